/* The state of a cluster as text. Knows no connection and no clock. */

#include "cli/status_draw.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/clock.h"
#include "cli/cli.h"

#define NAME_WIDTH_MIN 10
#define NAME_WIDTH_MAX 24
#define BAR_MIN        4
#define BAR_MAX        60

static uint32_t pages_of(const struct bt_inf_node *n)
{
    return n->pages_free + n->pages_cached + n->pages_leased + n->pages_quarantined;
}

static bool is_ready(const struct bt_inf_node *n)
{
    return strcmp(n->state, "ready") == 0;
}

static int name_width(const struct bt_inf_cluster *c, int most)
{
    int width = NAME_WIDTH_MIN;

    for (size_t i = 0; i < c->n_nodes; i++) {
        int len = (int)strlen(c->nodes[i].name);

        width = len > width ? len : width;
    }
    return width < most ? width : most;
}

void bt_status_sample_take(struct bt_status_sample *s, const struct bt_inf_cluster *c,
                           uint64_t now_ns)
{
    *s = (struct bt_status_sample){
        .t_ns = now_ns,
        .requests = c->requests_total,
        .prompt_tokens = c->prompt_tokens_total,
        .generated_tokens = c->generated_tokens_total,
    };
    snprintf(s->router, sizeof s->router, "%s", c->router_instance);
    for (size_t i = 0; i < c->n_nodes; i++) {
        s->transferred_bytes += c->nodes[i].transferred_bytes_total;
    }
}

/* ---- table ---- */

/* The state up to its reason, which details() gives a line of its own. */
static void table_row(const struct bt_inf_node *n, int width, struct bt_buf *out)
{
    bt_buf_addf(out, "%-*s %-8s %s%-10.*s%s %7u %7u %8u %8u %8u %6u %6u  %.8s\n", width, n->name,
                n->role, bt_cli_style(STDOUT_FILENO, is_ready(n) ? BT_CLI_GREEN : BT_CLI_YELLOW),
                (int)strcspn(n->state, ":"), n->state, bt_cli_style(STDOUT_FILENO, BT_CLI_PLAIN),
                n->waiting, n->running, pages_of(n), n->pages_free, n->pages_cached,
                n->pages_leased, n->pages_quarantined, n->instance);
}

static void details(const struct bt_inf_node *n, int width, struct bt_buf *out)
{
    bt_buf_addf(out, "%-*s %s; class %s; kv %s; model %s\n", width, n->name, n->backend,
                n->numerics, n->kv_layout, n->fingerprint);
    if (strchr(n->state, ':') != NULL) {
        bt_buf_addf(out, "%-*s %s%s%s\n", width, "", bt_cli_style(STDOUT_FILENO, BT_CLI_YELLOW),
                    n->state, bt_cli_style(STDOUT_FILENO, BT_CLI_PLAIN));
    }
    if (n->transfer_address[0] != '\0') {
        bt_buf_addf(out, "%-*s takes KV pages at %s\n", width, "", n->transfer_address);
    }
    if (n->local_prefills_total > 0) {
        bt_buf_addf(out, "%-*s computed %llu prompts itself\n", width, "",
                    (unsigned long long)n->local_prefills_total);
    }
    for (size_t i = 0; i < n->n_transports; i++) {
        bt_buf_addf(out, "%-*s kv with %s over %s\n", width, "", n->transports[i].peer,
                    n->transports[i].description);
    }
}

void bt_status_table(const struct bt_inf_cluster *c, struct bt_buf *out)
{
    int width = name_width(c, 1 << 20);

    bt_buf_addf(out, "%smodel %s%s, %u requests running, %u waiting, router %.8s",
                bt_cli_style(STDOUT_FILENO, BT_CLI_BOLD), c->model,
                bt_cli_style(STDOUT_FILENO, BT_CLI_PLAIN), c->requests_running, c->requests_waiting,
                c->router_instance);
    if (c->local_prefill[0] != '\0' && strcmp(c->local_prefill, "never") != 0) {
        bt_buf_addf(out, ", local prefill %s", c->local_prefill);
    }
    bt_buf_adds(out, "\n\n");
    if (c->n_nodes == 0) {
        bt_buf_adds(out, "no nodes are connected\n");
        return;
    }
    bt_buf_addf(out, "%-*s %-8s %-10s %7s %7s %8s %8s %8s %6s %6s  %s\n", width, "node", "role",
                "state", "waiting", "running", "KV pages", "free", "cached", "leased", "quar.",
                "instance");
    for (size_t i = 0; i < c->n_nodes; i++) {
        table_row(&c->nodes[i], width, out);
    }
    bt_buf_addc(out, '\n');
    for (size_t i = 0; i < c->n_nodes; i++) {
        details(&c->nodes[i], width, out);
    }
}

/* ---- screen ---- */

struct screen {
    struct bt_buf *out;
    int width, height;
    int lines; /* so far */
    int room;  /* columns left in this line */
};

/* At most `room` columns of it; a character counts as one. */
static void put(struct screen *s, const char *text)
{
    while (*text != '\0' && s->room > 0) {
        do {
            bt_buf_addc(s->out, *text++);
        } while (((unsigned char)*text & 0xc0) == 0x80);
        s->room--;
    }
}

static void put_style(struct screen *s, enum bt_cli_style style)
{
    bt_buf_adds(s->out, bt_cli_style(STDOUT_FILENO, style));
}

/* Cut or filled up to `columns`; < 0: the text stands at the right. */
static void put_cell(struct screen *s, const char *text, int columns)
{
    char cell[160];
    int w = columns < 0 ? -columns : columns;

    snprintf(cell, sizeof cell, columns < 0 ? "%*.*s " : "%-*.*s ", w, w, text);
    put(s, cell);
}

static void end_line(struct screen *s)
{
    bt_buf_addc(s->out, '\n');
    s->lines++;
    s->room = s->width;
}

/* Per second since `before`; < 0: not known. */
static double rate(uint64_t before, uint64_t now, const struct bt_status_sample *b,
                   const struct bt_status_sample *n)
{
    if (b->router[0] == '\0' || strcmp(b->router, n->router) != 0 || n->t_ns <= b->t_ns ||
        now < before) {
        return -1;
    }
    return (double)(now - before) * (double)BT_NS_PER_S / (double)(n->t_ns - b->t_ns);
}

static const char *rate_text(char out[32], double r)
{
    if (r < 0) {
        return "-";
    }
    snprintf(out, 32, r < 100 ? "%.1f" : "%.0f", r);
    return out;
}

static const char *bytes_text(char out[32], double r)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    unsigned u = 0;

    if (r < 0) {
        return "-";
    }
    for (; r >= 1024 && u < 4; u++) {
        r /= 1024;
    }
    snprintf(out, 32, u == 0 ? "%.0f %s" : "%.1f %s", r, units[u]);
    return out;
}

static void summary(struct screen *s, const struct bt_inf_cluster *c,
                    const struct bt_status_sample *b, const struct bt_status_sample *n)
{
    char line[320], written[32], read[32], moved[32], done[32];

    put_style(s, BT_CLI_BOLD);
    snprintf(line, sizeof line, "%u running, %u waiting", c->requests_running, c->requests_waiting);
    put(s, line);
    put_style(s, BT_CLI_PLAIN);
    snprintf(line, sizeof line, "; model %.200s, router %.8s", c->model, c->router_instance);
    put(s, line);
    end_line(s);
    snprintf(line, sizeof line,
             "%s tokens/s written, %s read, %s requests/s ended, %s/s of KV moved",
             rate_text(written, rate(b->generated_tokens, n->generated_tokens, b, n)),
             rate_text(read, rate(b->prompt_tokens, n->prompt_tokens, b, n)),
             rate_text(done, rate(b->requests, n->requests, b, n)),
             bytes_text(moved, rate(b->transferred_bytes, n->transferred_bytes, b, n)));
    put(s, line);
    end_line(s);
}

/* Columns that a width has room for. */
struct columns {
    int name, bar;
    bool role, speed;
};

static struct columns columns_for(const struct bt_inf_cluster *c, int width)
{
    struct columns k = {
        .name = name_width(c, NAME_WIDTH_MAX), .role = width >= 60, .speed = width >= 76};
    int used = k.name + 1 + 9 + 6 + 6 + (k.role ? 8 : 0) + (k.speed ? 14 : 0);

    int count = 0;

    for (size_t i = 0; i < c->n_nodes; i++) {
        int n = snprintf(NULL, 0, "%u", pages_of(&c->nodes[i]));

        count = n > count ? n : count;
    }
    k.bar = width - used - 3 - 2 * count - 1; /* "[bar] n/n" */
    k.bar = k.bar > BAR_MAX ? BAR_MAX : k.bar < BAR_MIN ? 0 : k.bar;
    return k;
}

/* Leased, quarantined, cached, free, then the count; width 0: only that. What is there gets at
 * least one column while there are any. */
static void put_bar(struct screen *s, const struct bt_inf_node *n, int width)
{
    const struct {
        uint32_t pages;
        char c;
        enum bt_cli_style style;
    } parts[] = {{n->pages_leased, '#', BT_CLI_CYAN},
                 {n->pages_quarantined, '!', BT_CLI_RED},
                 {n->pages_cached, '=', BT_CLI_GREEN},
                 {n->pages_free, '.', BT_CLI_DIM}};
    uint64_t total = pages_of(n), before = 0;
    int at = 0;
    char count[32];

    if (width > 0) {
        put(s, "[");
    }
    for (unsigned i = 0; i < 4 && total > 0; i++) {
        before += parts[i].pages;
        int end = (int)(before * (uint64_t)width / total);

        end = parts[i].pages > 0 && end <= at && at < width ? at + 1 : end;
        put_style(s, parts[i].style);
        for (; at < end && s->room > 0; at++) {
            put(s, (const char[]){parts[i].c, '\0'});
        }
        put_style(s, BT_CLI_PLAIN);
    }
    if (width > 0) {
        put(s, total > 0 ? "] " : "]");
    }
    snprintf(count, sizeof count, "%u/%llu", n->pages_leased + n->pages_quarantined,
             (unsigned long long)total);
    if ((int)strlen(count) <= s->room) { /* half a number would be a wrong one */
        put(s, count);
    }
}

static void speed_text(const struct bt_inf_node *n, char out[32])
{
    bool prefill =
        strcmp(n->role, "prefill") == 0 || (strcmp(n->role, "both") == 0 && n->decode_step_ms <= 0);
    double v = prefill ? n->prefill_tokens_per_s : n->decode_step_ms;

    if (v <= 0) {
        snprintf(out, 32, "-");
    } else if (prefill) {
        snprintf(out, 32, "%.0f tok/s", v);
    } else {
        snprintf(out, 32, "%.*f ms/step", v < 100 ? 2 : 0, v);
    }
}

static void node_line(struct screen *s, const struct bt_inf_node *n, const struct columns *k)
{
    char text[32];

    put_cell(s, n->name, k->name);
    if (k->role) {
        put_cell(s, n->role, 7);
    }
    put_style(s, is_ready(n) ? BT_CLI_GREEN : BT_CLI_YELLOW);
    snprintf(text, sizeof text, "%.*s", (int)strcspn(n->state, ":"), n->state);
    put_cell(s, text, 8);
    put_style(s, BT_CLI_PLAIN);
    snprintf(text, sizeof text, "%u", n->waiting);
    put_cell(s, text, -5);
    snprintf(text, sizeof text, "%u", n->running);
    put_cell(s, text, -5);
    if (k->speed) {
        speed_text(n, text);
        put_cell(s, text, -13);
    }
    put_bar(s, n, k->bar);
    end_line(s);
}

static void heading(struct screen *s, const struct columns *k)
{
    put_style(s, BT_CLI_DIM);
    put_cell(s, "node", k->name);
    if (k->role) {
        put_cell(s, "role", 7);
    }
    put_cell(s, "state", 8);
    put_cell(s, "wait", -5);
    put_cell(s, "run", -5);
    if (k->speed) {
        put_cell(s, "speed", -13);
    }
    put(s, s->room >= 22 ? "pages: # used = cached" : "pages used");
    put_style(s, BT_CLI_PLAIN);
    end_line(s);
}

/* Reasons of nodes that are not used, then transports, while there are lines. */
static void notes(struct screen *s, const struct bt_inf_cluster *c)
{
    char line[512];

    for (size_t i = 0; i < c->n_nodes && s->lines < s->height; i++) {
        if (strchr(c->nodes[i].state, ':') != NULL) {
            snprintf(line, sizeof line, "%.100s: %.380s", c->nodes[i].name, c->nodes[i].state);
            put_style(s, BT_CLI_YELLOW);
            put(s, line);
            put_style(s, BT_CLI_PLAIN);
            end_line(s);
        }
    }
    for (size_t i = 0; i < c->n_nodes; i++) {
        const struct bt_inf_node *n = &c->nodes[i];

        for (size_t t = 0; t < n->n_transports && s->lines < s->height; t++) {
            if (strcmp(n->role, "decode") != 0) { /* the other side says the same */
                snprintf(line, sizeof line, "%.100s -> %.100s over %.200s", n->name,
                         n->transports[t].peer, n->transports[t].description);
                put(s, line);
                end_line(s);
            }
        }
    }
}

void bt_status_screen(const struct bt_inf_cluster *c, const struct bt_status_sample *before,
                      const struct bt_status_sample *now, int width, int height, struct bt_buf *out)
{
    struct screen s = {.out = out, .width = width, .height = height, .room = width};
    struct columns k = columns_for(c, width);
    char line[64];

    summary(&s, c, before, now);
    if (c->n_nodes == 0) {
        put(&s, "no nodes are connected");
        end_line(&s);
        return;
    }
    if ((size_t)(height - s.lines) > c->n_nodes) {
        heading(&s, &k);
    }
    for (size_t i = 0; i < c->n_nodes && s.lines < height; i++) {
        if (s.lines + 1 == height && i + 1 < c->n_nodes) {
            snprintf(line, sizeof line, "and %zu more nodes", c->n_nodes - i);
            put(&s, line);
            end_line(&s);
            return;
        }
        node_line(&s, &c->nodes[i], &k);
    }
    notes(&s, c);
}
