/* Timelines as they are drawn: phases at their places on the axis, several attempts, any width, and files that lie. */

#include <stdio.h>
#include <string.h>
#include "base/buf.h"
#include "base/mem.h"
#include "cli/trace_draw.h"
#include "tests/check.h"

static struct bt_buf out;

static enum bt_status draw(const char *line, int width)
{
    struct bt_err err = {0};

    bt_buf_clear(&out);
    enum bt_status st = bt_trace_draw(line, strlen(line), width, &out, &err);

    CHECK(st == BT_OK || err.msg[0] != '\0');
    return st;
}

/* No line is longer than that. */
static int longest(void)
{
    int most = 0;

    for (const char *p = out.data; *p != '\0'; p += p[0] == '\n') {
        int n = (int)strcspn(p, "\n");

        most = n > most ? n : most;
        p += n;
    }
    return most;
}

/* One failed attempt, then one that answers: 10 ms an axis cell at width 65. */
static const char retried[] =
    "{\"time\":\"2026-01-02T03:04:05.678Z\",\"request_id\":\"r1\",\"key\":\"alice\","
    "\"endpoint\":\"/v1/completions\",\"status\":200,\"finish_reason\":\"stop\",\"error\":null,"
    "\"prompt_tokens\":100,\"completion_tokens\":9,\"duration_ms\":400,\"start_at_ms\":20,"
    "\"tokenize_ms\":10,\"sequences\":[{\"index\":0,\"finish_reason\":\"stop\","
    "\"completion_tokens\":9,\"first_token_at_ms\":110,\"last_token_at_ms\":390,"
    "\"itl_ms\":{\"p50\":5,\"p99\":100.25,\"max\":12000},\"n_attempts\":2,\"attempts\":["
    "{\"prefill\":\"p-0\",\"decode\":\"d-0\",\"start_at_ms\":30,\"prefilled_at_ms\":110,"
    "\"landed_at_ms\":150,\"end_at_ms\":200,\"queue_ms\":10,\"prefill_ms\":70,"
    "\"prefill_tokens\":100,\"grant_ms\":20,\"transfer_ms\":60,\"transfer_tail_ms\":40,"
    "\"transferred_tokens\":100,\"reason\":\"lost\",\"why\":\"decode node d-0: gone\"},"
    "{\"prefill\":\"p-1\",\"decode\":\"d-1\",\"start_at_ms\":250,\"end_at_ms\":null,"
    "\"landed_at_ms\":300,\"queue_ms\":0,\"prefill_ms\":30,\"prefill_tokens\":0,\"resent\":true,"
    "\"grant_ms\":0,\"transfer_ms\":20,\"transfer_tail_ms\":20}]}]}";

static void test_retried(void)
{
    static const char *const want[] = {
        "\n             0                                   400 ms\n",
        "\ntokenize     | #                                      |   10.0 ms\n",
        "\nattempt 1: p-0 -> d-0, 100 tokens read, 0 cached, 100 moved\n",
        "\nqueue        |  .                                     |   10.0 ms\n",
        "\nnode queue   |   .                                    |   10.0 ms\n",
        "\nprefill      |    #######                             |   70.0 ms\n",
        "\ngrant wait   |    ..                                  |   20.0 ms\n",
        "\ntransfer     |         ======                         |   60.0 ms\n",
        "\n  tail       |           ====                         |   40.0 ms\n",
        "\ndecode       |               #####                    |   50.0 ms\n",
        "\nended        |                    x                   |    200 ms\n",
        "\n              lost: decode node d-0: gone\n",
        "\nattempt 2: p-1 -> d-1, sent again, 0 moved\n",
        "\nqueue        |                    .....               |   50.0 ms\n",
        "\nnode queue   |                                        |  0.000 ms\n",
        "\nprefill      |                         ###            |   30.0 ms\n",
        "\ndecode       |                              ######### |   90.0 ms\n",
        "\nfirst token  |           ^                            |    110 ms\n",
        "\nbetween tokens: p50 5.00 ms, p99 100 ms, max 12.0 s\n",
    };
    const char *at;

    CHECK_EQ(draw(retried, 65), BT_OK);
    at = out.data;
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        const char *found = strstr(at, want[i]);

        CHECK(found != NULL);
        if (found == NULL) {
            fprintf(stderr, "not there, or not in order: %s\nin: %s\n", want[i], out.data);
            return;
        }
        at = found + 1;
    }
    CHECK(longest() <= 65);
    CHECK(strchr(out.data, '\033') == NULL); /* not a terminal */
}

static void test_widths(void)
{
    for (int width = 1; width < 250; width++) {
        CHECK_EQ(draw(retried, width), BT_OK);
        CHECK(longest() <= (width < 56 ? 56 : width)); /* the summary lines */
    }
}

static void test_bad_lines(void)
{
    static const char *const bad[] = {
        "", "{", "[]", "null", "{}", "{\"request_id\":7}", "{\"request_id\":\"\"}"};

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK_EQ(draw(bad[i], 80), BT_ERR_INVALID);
    }
    CHECK_EQ(draw("{\"request_id\":\"a\"}", 80), BT_OK);
    CHECK_EQ(
        draw("{\"request_id\":\"a\",\"sequences\":[1,null,{\"attempts\":[3,{},{\"start_at_ms\":"
             "1e300,\"prefill_ms\":1e300,\"end_at_ms\":-5}]}],\"duration_ms\":0}",
             80),
        BT_OK);
    CHECK_EQ(
        draw("{\"request_id\":\"a\\u001b[2J\\u009b2J\\u00e9\",\"error\":\"x\\u001b]0;y\\u0007\"}",
             80),
        BT_OK);
    CHECK(strchr(out.data, '\033') == NULL && strchr(out.data, '\007') == NULL);
    CHECK(strstr(out.data, "a?[2J?2J\xc3\xa9\n") != NULL);
}

int main(void)
{
    test_retried();
    test_widths();
    test_bad_lines();
    bt_buf_fini(&out);
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
