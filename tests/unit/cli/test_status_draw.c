/* The screen of `baton status --watch`: rates between two answers, bars, and every size of terminal. */

#include <stdio.h>
#include <string.h>
#include "base/buf.h"
#include "base/clock.h"
#include "base/mem.h"
#include "cli/status_draw.h"
#include "tests/check.h"

static struct bt_buf out;

static const struct bt_inf_transport link_d = {"decode-0", "tcp/eth0"};
static const struct bt_inf_node nodes[] = {
    {.name = "prefill-0",
     .role = "prefill",
     .state = "ready",
     .instance = "00000000000000aa",
     .backend = "cpu",
     .numerics = "cpu-f32",
     .kv_layout = "k",
     .fingerprint = "f",
     .transfer_address = "",
     .waiting = 3,
     .running = 1,
     .pages_leased = 50,
     .pages_cached = 25,
     .pages_free = 25,
     .prefill_tokens_per_s = 1234.4,
     .n_transports = 1,
     .transports = &link_d},
    {.name = "decode-0",
     .role = "decode",
     .state = "mismatch: model 1 there, 2 here",
     .instance = "00000000000000bb",
     .backend = "cpu",
     .numerics = "cpu-f32",
     .kv_layout = "k",
     .fingerprint = "f",
     .transfer_address = "",
     .running = 7,
     .pages_leased = 1,
     .pages_quarantined = 1,
     .pages_free = 9998,
     .decode_step_ms = 12.345,
     .transferred_bytes_total = 3 << 20},
};
static const struct bt_inf_cluster cluster = {
    .model = "m",
    .router_instance = "0123456789abcdef",
    .local_prefill = "never",
    .n_nodes = 2,
    .nodes = nodes,
    .requests_running = 8,
    .requests_waiting = 2,
    .requests_total = 110,
    .prompt_tokens_total = 2000,
    .generated_tokens_total = 5000,
};

static bool has(const char *what)
{
    bool found = strstr(out.data, what) != NULL;

    if (!found) {
        fprintf(stderr, "no \"%s\" in:\n%s", what, out.data);
    }
    return found;
}

static void screen(const struct bt_inf_cluster *c, const struct bt_status_sample *before, int width,
                   int height)
{
    struct bt_status_sample now;

    bt_status_sample_take(&now, c, 5 * BT_NS_PER_S);
    bt_buf_clear(&out);
    bt_status_screen(c, before, &now, width, height, &out);
}

static void test_rates(void)
{
    struct bt_status_sample before = {
        .router = "0123456789abcdef",
        .t_ns = 3 * BT_NS_PER_S,
        .requests = 100,
        .prompt_tokens = 1000,
        .generated_tokens = 4990,
        .transferred_bytes = 1 << 20,
    };
    const struct bt_status_sample none = {0};

    screen(&cluster, &before, 100, 40);
    CHECK(has("8 running, 2 waiting; model m, router 01234567\n"));
    CHECK(has("5.0 tokens/s written, 500 read, 5.0 requests/s ended, 1.0 MiB/s of KV moved\n"));
    CHECK(has("1234 tok/s"));
    CHECK(has("12.35 ms/step") || has("12.34 ms/step"));
    CHECK(has("prefill-0 -> decode-0 over tcp/eth0\n"));
    CHECK(has("decode-0: mismatch: model 1 there, 2 here\n"));
    screen(&cluster, &none, 100, 40);
    CHECK(has("- tokens/s written, - read"));
    before.router[0] = 'x'; /* another router */
    screen(&cluster, &before, 100, 40);
    CHECK(has("- tokens/s written, - read"));
    snprintf(before.router, sizeof before.router, "%s", cluster.router_instance);
    before.generated_tokens = 6000; /* counts from 0 again */
    screen(&cluster, &before, 100, 40);
    CHECK(has("- tokens/s written, 500 read"));
}

static void test_bars(void)
{
    const struct bt_status_sample none = {0};

    screen(&cluster, &none, 88, 40); /* 20 columns of bar */
    CHECK(has("[##########=====.....] 50/100\n"));
    CHECK(has("[#!")); /* one page of ten thousand is seen */
    CHECK(has("] 2/10000\n"));
}

/* Columns of the widest line, and how many lines there are. */
static int widest(int *lines)
{
    int most = 0;

    *lines = 0;
    for (const char *p = out.data; *p != '\0'; p++) {
        int n = 0;

        for (; *p != '\n'; p++) {
            n += ((unsigned char)*p & 0xc0) != 0x80;
        }
        ++*lines;
        most = n > most ? n : most;
    }
    return most;
}

static void test_sizes(void)
{
    static struct bt_inf_node many[100];
    const struct bt_status_sample none = {0};
    struct bt_inf_cluster c = cluster;
    int lines;

    for (int i = 0; i < 100; i++) {
        many[i] = nodes[i % 2];
    }
    many[3].name = "a-node-with-a-name-that-is-longer-than-any-column-would-like-to-be";
    many[4].name = "kn\xc3\xb6t\xc3\xb6";
    c.nodes = many;
    for (size_t n = 0; n <= 100; n += n < 4 ? 1 : 48) {
        c.n_nodes = n;
        for (int width = 20; width < 220; width += 7) {
            for (int height = 3; height < 60; height += 5) {
                screen(&c, &none, width, height);
                CHECK(widest(&lines) <= width);
                CHECK(lines <= height);
            }
        }
    }
    c.n_nodes = 100;
    screen(&c, &none, 80, 10);
    CHECK(has("and 93 more nodes\n"));
    c.n_nodes = 0;
    screen(&c, &none, 80, 10);
    CHECK(has("no nodes are connected\n"));
}

static void test_table(void)
{
    bt_buf_clear(&out);
    bt_status_table(&cluster, &out);
    CHECK(has("model m, 8 requests running, 2 waiting, router 01234567\n"));
    CHECK(has("decode-0   decode   mismatch "));
    CHECK(has("kv with decode-0 over tcp/eth0\n"));
    CHECK(has("mismatch: model 1 there, 2 here\n"));
}

int main(void)
{
    test_rates();
    test_bars();
    test_sizes();
    test_table();
    bt_buf_fini(&out);
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
