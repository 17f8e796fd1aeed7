/* A request's timeline in characters. Takes the log's line as it is, fields it does not know or miss included; refuses
 * to know where the line came from. */

#include "cli/trace_draw.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "cli/cli.h"

#define LABEL_WIDTH 13
#define VALUE_WIDTH 10
#define BAR_MIN     10

struct drawing {
    struct bt_buf *out;
    int width, bar_width;
    double total_ms;
};

/* ---- values ---- */

/* < 0: absent or null. */
static double number(const json_t *o, const char *name)
{
    const json_t *v = json_object_get(o, name);

    return json_is_number(v) ? json_number_value(v) : -1;
}

static double number_or_0(const json_t *o, const char *name)
{
    double v = number(o, name);

    return v > 0 ? v : 0;
}

static const char *text(const json_t *o, const char *name)
{
    const char *s = json_string_value(json_object_get(o, name));

    return s != NULL ? s : "";
}

/* ---- pieces ---- */

static void style(struct drawing *d, enum bt_cli_style s)
{
    bt_buf_adds(d->out, bt_cli_style(STDOUT_FILENO, s));
}

/* Log files hold what clients sent: nothing of it may reach the terminal as a command. s: UTF-8, cut after `room`
 * bytes at the end of a character. */
static void put_safe(struct drawing *d, const char *s, int room)
{
    for (int i = 0; s[i] != '\0' && (i < room || ((unsigned char)s[i] & 0xc0) == 0x80); i++) {
        unsigned char c = (unsigned char)s[i];
        bool c1 = c == 0xc2 && (unsigned char)s[i + 1] < 0xa0; /* U+0080 … U+009F */

        bt_buf_addc(d->out, c < 0x20 || c == 0x7f || c1 ? '?' : (char)c);
        i += c1;
    }
}

static void put_ms(char out[16], double ms)
{
    if (ms >= 10000) {
        snprintf(out, 16, "%.1f s", ms / 1000);
    } else {
        snprintf(out, 16, "%.*f ms", ms >= 100 ? 0 : ms >= 10 ? 1 : ms >= 1 ? 2 : 3, ms);
    }
}

static int column(const struct drawing *d, double ms)
{
    double x = d->total_ms > 0 ? ms / d->total_ms * d->bar_width : 0;

    return x < 0 ? 0 : x > d->bar_width ? d->bar_width : (int)x;
}

/* One row; to < from: nothing is drawn. */
static void row(struct drawing *d, const char *label, double from, double to, char fill,
                enum bt_cli_style colour)
{
    int a = column(d, from), b = column(d, to);
    char value[16];
    bool mark = fill == '^' || fill == 'x';
    bool nothing = !mark && to - from < 0.0005;

    if (to < from || from < 0) {
        return;
    }
    a = a == d->bar_width ? a - 1 : a;
    b = b <= a ? a + 1 : b;
    bt_buf_addf(d->out, "%-*s|%*s", LABEL_WIDTH, label, a, "");
    style(d, colour);
    for (int i = a; i < b; i++) {
        bt_buf_addc(d->out, nothing ? ' ' : fill);
    }
    style(d, BT_CLI_PLAIN);
    put_ms(value, mark ? from : to - from);
    bt_buf_addf(d->out, "%*s|%*s\n", d->bar_width - b, "", VALUE_WIDTH, value);
}

static void axis(struct drawing *d)
{
    char end[16];

    put_ms(end, d->total_ms);
    bt_buf_addf(d->out, "%-*s0%*s\n", LABEL_WIDTH, "", d->bar_width + 1, end);
}

/* ---- attempts ---- */

/* "attempt 2: prefill-0 -> decode-1, 96 tokens prefilled, …" */
static void attempt_head(struct drawing *d, const json_t *a, size_t number_of, bool several)
{
    char line[160];
    int room = d->width;

    if (several) {
        snprintf(line, sizeof line, "attempt %zu: ", number_of);
        bt_buf_adds(d->out, line);
        room -= (int)strlen(line);
    }
    snprintf(line, sizeof line, "%.60s%s%.60s", text(a, "prefill"),
             text(a, "decode")[0] != '\0' ? " -> " : "", text(a, "decode"));
    put_safe(d, line, room);
    room -= (int)strlen(line);
    line[0] = '\0';
    if (json_is_true(json_object_get(a, "resent"))) { /* computed for an attempt before */
        snprintf(line, sizeof line, ", sent again, %.0f moved",
                 number_or_0(a, "transferred_tokens"));
    } else if (number(a, "prefill_tokens") >= 0) {
        snprintf(line, sizeof line, ", %.0f tokens read, %.0f cached, %.0f moved",
                 number(a, "prefill_tokens"), number_or_0(a, "cached_tokens"),
                 number_or_0(a, "transferred_tokens"));
    }
    put_safe(d, line, room > 0 ? room : 0);
    bt_buf_addc(d->out, '\n');
}

static void attempt_end(struct drawing *d, const json_t *a, double at)
{
    row(d, "ended", at, at, 'x', BT_CLI_RED);
    bt_buf_addf(d->out, "%*s", LABEL_WIDTH + 1, "");
    style(d, BT_CLI_RED);
    put_safe(d, text(a, "reason"), d->width - LABEL_WIDTH - 1);
    int room = d->width - LABEL_WIDTH - 3 - (int)strlen(text(a, "reason"));

    if (room > 0 && text(a, "why")[0] != '\0') {
        bt_buf_adds(d->out, ": ");
        put_safe(d, text(a, "why"), room);
    }
    style(d, BT_CLI_PLAIN);
    bt_buf_addc(d->out, '\n');
}

/* since: when the sequence began to wait for this attempt; last: its last token, < 0: none. */
static void attempt(struct drawing *d, const json_t *a, double since, double last)
{
    double start = number(a, "start_at_ms"), landed = number(a, "landed_at_ms");
    double end = number(a, "end_at_ms");
    double begin = start + number_or_0(a, "queue_ms");

    row(d, "queue", since, start, '.', BT_CLI_YELLOW);
    if (number(a, "prefill_ms") >= 0) {
        row(d, "node queue", start, begin, '.', BT_CLI_YELLOW);
        row(d, "prefill", begin, begin + number(a, "prefill_ms"), '#', BT_CLI_CYAN);
    }
    if (landed >= 0 && number(a, "transfer_ms") >= 0) {
        row(d, "grant wait", begin, begin + number_or_0(a, "grant_ms"), '.', BT_CLI_YELLOW);
        row(d, "transfer", landed - number(a, "transfer_ms"), landed, '=', BT_CLI_GREEN);
        row(d, "  tail", landed - number_or_0(a, "transfer_tail_ms"), landed, '=', BT_CLI_GREEN);
    }
    if (landed >= 0) {
        row(d, "decode", landed, end >= 0 ? end : last, '#', BT_CLI_CYAN);
    }
    if (end >= 0) {
        attempt_end(d, a, end);
    }
}

/* ---- sequences ---- */

static void sequence_end(struct drawing *d, const json_t *s)
{
    const json_t *gaps = json_object_get(s, "itl_ms");

    row(d, "first token", number(s, "first_token_at_ms"), number(s, "first_token_at_ms"), '^',
        BT_CLI_BOLD);
    if (json_is_object(gaps)) {
        char p50[16], p99[16], max[16];

        put_ms(p50, number_or_0(gaps, "p50"));
        put_ms(p99, number_or_0(gaps, "p99"));
        put_ms(max, number_or_0(gaps, "max"));
        bt_buf_addf(d->out, "between tokens: p50 %s, p99 %s, max %s", p50, p99, max);
        bt_buf_addc(d->out, '\n');
    }
}

static void sequence(struct drawing *d, const json_t *s, double start, bool several)
{
    const json_t *list = json_object_get(s, "attempts");
    size_t n = json_array_size(list);
    double known = number_or_0(s, "n_attempts");
    double since = start;

    bt_buf_addc(d->out, '\n');
    if (several) {
        style(d, BT_CLI_BOLD);
        bt_buf_addf(d->out, "choice %.0f: %.0f tokens, ", number_or_0(s, "index"),
                    number_or_0(s, "completion_tokens"));
        put_safe(d, text(s, "finish_reason")[0] != '\0' ? text(s, "finish_reason") : "unfinished",
                 20);
        style(d, BT_CLI_PLAIN);
        bt_buf_addc(d->out, '\n');
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *a = json_array_get(list, i);
        bool last = i + 1 == n;

        /* Of very many the first and the last are kept. */
        attempt_head(d, a, last && known > (double)n ? (size_t)known : i + 1, n > 1);
        attempt(d, a, since, number(s, "last_token_at_ms"));
        since = number(a, "end_at_ms");
    }
    sequence_end(d, s);
}

/* ---- request ---- */

static void head(struct drawing *d, const json_t *o)
{
    char took[16];

    style(d, BT_CLI_BOLD);
    put_safe(d, text(o, "request_id"), d->width);
    style(d, BT_CLI_PLAIN);
    bt_buf_addc(d->out, '\n');
    put_safe(d, text(o, "time"), 30);
    bt_buf_addc(d->out, ' ');
    put_safe(d, text(o, "endpoint"), 40);
    if (text(o, "key")[0] != '\0') {
        bt_buf_adds(d->out, ", key ");
        put_safe(d, text(o, "key"), 40);
    }
    put_ms(took, number_or_0(o, "duration_ms"));
    bt_buf_addf(d->out, "\n%.0f ", number_or_0(o, "status"));
    put_safe(d, text(o, "finish_reason"), 20);
    bt_buf_addf(d->out, "%safter %s: %.0f prompt + %.0f answer tokens\n",
                text(o, "finish_reason")[0] != '\0' ? " " : "", took,
                number_or_0(o, "prompt_tokens"), number_or_0(o, "completion_tokens"));
    if (text(o, "error")[0] != '\0') {
        style(d, BT_CLI_RED);
        bt_buf_adds(d->out, "error: ");
        put_safe(d, text(o, "error"), 600);
        style(d, BT_CLI_PLAIN);
        bt_buf_addc(d->out, '\n');
    }
}

enum bt_status bt_trace_draw(const char *line, size_t n, int width, struct bt_buf *out,
                             struct bt_err *err)
{
    json_error_t je;
    json_t *o = json_loadb(line, n, 0, &je);
    int bar = width - LABEL_WIDTH - VALUE_WIDTH - 2;
    struct drawing d = {
        .out = out, .width = width < 40 ? 40 : width, .bar_width = bar < BAR_MIN ? BAR_MIN : bar};

    if (!json_is_object(o) || text(o, "request_id")[0] == '\0') {
        json_decref(o);
        return bt_err_set(err, BT_ERR_INVALID, "not a line of a request log%s%s",
                          o == NULL ? ": " : "", o == NULL ? je.text : "");
    }
    const json_t *list = json_object_get(o, "sequences");
    double start = number_or_0(o, "start_at_ms"), tokenize = number(o, "tokenize_ms");

    d.total_ms = number_or_0(o, "duration_ms");
    head(&d, o);
    if (json_array_size(list) > 0) {
        bt_buf_addc(out, '\n');
        axis(&d);
        row(&d, "tokenize", start > tokenize ? start - tokenize : 0, start, '#', BT_CLI_CYAN);
        for (size_t i = 0; i < json_array_size(list); i++) {
            sequence(&d, json_array_get(list, i), start, json_array_size(list) > 1);
        }
    }
    json_decref(o);
    return out->failed ? bt_err_set(err, BT_ERR_NOMEM, "out of memory") : BT_OK;
}
