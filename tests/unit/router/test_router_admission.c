/* Admission: the order of the waiting by priority, key and arrival, the spread of work over nodes, what is refused and
 * with which wait, and a cluster in virtual time under ten times the load that it can take. */

#include "tests/check.h"
#include "tests/unit/router/virtual_cluster.h"

/* ---- order ---- */

/* Fills the only prefill node, so that what follows waits. */
static void fill(uint32_t id)
{
    for (uint32_t i = 0; i < 2; i++) {
        CHECK_EQ(vc_ask(id + i, 0, 0, 20000, 1), BT_OK);
    }
    CHECK_EQ(vc.n_order, 2);
    for (uint32_t i = 2; bt_rt_core_stats(vc.core)->waiting == 0; i++) {
        CHECK_EQ(vc_ask(id + i, 0, 9, 500, 1), BT_OK);
    }
    vc.n_order = 0;
}

static void test_order(void)
{
    vc_begin(1, 1, 1024, 0, 10000);
    fill(1000);
    for (uint32_t i = 0; i < 30; i++) {
        CHECK_EQ(vc_ask(i, 0, i % 3 == 2 ? 5 : i % 3 == 1 ? -5 : 0, 600, 1), BT_OK);
    }
    CHECK_EQ(bt_rt_core_stats(vc.core)->waiting, 31);
    vc_run(20000);
    CHECK_EQ(bt_rt_core_stats(vc.core)->waiting, 0);
    CHECK_EQ(vc.n_order, 31);
    for (uint32_t i = 0; i < 10; i++) {
        CHECK_EQ(vc.order[1 + i], 3 * i + 2);
        CHECK_EQ(vc.order[11 + i], 3 * i);
        CHECK_EQ(vc.order[21 + i], 3 * i + 1);
    }
    CHECK_EQ(vc.n_failed, 0);
    vc_end();
}

/* One key with 1,000 requests does not starve another with one, nor one with a few long prompts. */
static void test_keys(void)
{
    vc_begin(1, 1, 2000, 0, 10000);
    fill(5000);
    for (uint32_t i = 0; i < 1000; i++) {
        CHECK_EQ(vc_ask(i, 1, 0, 600, 1), BT_OK);
    }
    CHECK_EQ(vc_ask(2000, 2, 0, 600, 1), BT_OK);
    vc_run(6000);
    uint32_t at = 0;

    while (at < vc.n_order && vc.order[at] != 2000) {
        at++;
    }
    CHECK(at <= 3);
    /* By work, not by number: eight times as long is an eighth as often. */
    uint32_t from = vc.n_order;

    for (uint32_t i = 0; i < 20; i++) {
        CHECK_EQ(vc_ask(3000 + i, 2, 0, 4800, 1), BT_OK);
    }
    vc_run(8000);
    uint32_t n[2] = {0};

    for (uint32_t i = from; i < vc.n_order; i++) {
        n[vc.order[i] >= 3000]++;
    }
    CHECK(n[1] >= 3 && n[0] >= 7 * n[1] && n[0] <= 9 * n[1] + 9);
    vc_end();
}

/* ---- spread ---- */

static void test_ties(void)
{
    uint32_t used[2 * NODES] = {0};

    vc_begin(NODES, NODES, 1024, 0, 10000);
    for (uint32_t i = 0; i < vc.n_nodes; i++) {
        vc.nodes[i].speed *= 1 + 0.01 * (i % 7); /* noise */
    }
    vc_report_all();
    /* At once, and one after the other. */
    for (uint32_t i = 0; i < NODES; i++) {
        CHECK_EQ(vc_ask(i, 0, 0, 100, 5), BT_OK);
        used[vc.where[i]]++;
    }
    vc_run(1000);
    for (uint32_t i = 0; i < NODES; i++) {
        CHECK_EQ(used[i], 1);
        CHECK_EQ(vc_ask(100 + i, 0, 0, 100, 5), BT_OK);
        used[vc.where[100 + i]]++;
        vc_run(50);
    }
    for (uint32_t i = 0; i < NODES; i++) {
        CHECK_EQ(used[i], 2);
        CHECK_EQ(vc.nodes[NODES + i].total, 200);
    }
    vc_end();
}

/* Prompts of 32k tokens with one token to answer among short ones: the nodes' seconds of work differ by no more than
 * the longest takes, also when one is four times as fast. */
static void test_skew(void)
{
    const double longest = 32768;

    for (uint32_t round = 0; round < 2; round++) {
        uint32_t rng = 12345;

        vc_begin(4, 2, 4096, 0, 100000);
        vc.skew = 0;
        vc.nodes[0].speed = round == 0 ? 10000 : 40000;
        vc_report_all();
        for (uint32_t i = 0; i < 3000; i++) {
            rng = rng * 1664525 + 1013904223;
            CHECK_EQ(vc_ask(i, 0, 0, (rng >> 8) % 16 == 0 ? 32768 : 20 + (rng >> 8) % 200,
                            (rng >> 8) % 16 == 0 ? 1 : 8),
                     BT_OK);
            vc_run(rng >> 25);
        }
        CHECK(vc.skew <= longest / 10000 + 0.001);
        /* Nobody idles while something waits, but for the way to it. */
        for (uint32_t k = 0; k < 4; k++) {
            CHECK(vc.nodes[k].idle_busy <= 10);
        }
        vc_run(900000);
        CHECK_EQ(vc.n_failed, 0);
        CHECK_EQ(bt_rt_core_stats(vc.core)->running, 0);
        vc_end();
    }
}

/* A short prompt is not held back by the long ones that wait. */
static void test_short_beside_long(void)
{
    vc_begin(1, 1, 1024, 0, 10000);
    for (uint32_t i = 0; i < 6; i++) {
        CHECK_EQ(vc_ask(i, 0, 0, 32768, 1), BT_OK);
    }
    CHECK_EQ(bt_rt_core_stats(vc.core)->waiting, 4);
    CHECK_EQ(vc_ask(10, 0, 0, 100, 1), BT_OK);
    CHECK_EQ(bt_rt_core_stats(vc.core)->waiting, 4);
    vc_run(200);
    CHECK(vc.t_end[10] != 0);
    vc_end();
}

/* ---- memory of decode nodes ---- */

static void test_pages(void)
{
    vc_begin(1, 2, 1024, 0, 100); /* 1600 tokens each */
    for (uint32_t i = 0; i < 40; i++) {
        CHECK_EQ(vc_ask(i, 0, 0, 16, 64), BT_OK); /* five pages at their end */
    }
    CHECK_EQ(vc.nodes[1].n, 20);
    CHECK_EQ(vc.nodes[2].n, 20);
    CHECK_EQ(vc_ask(50, 0, 0, 16, 64), BT_OK);
    CHECK_EQ(bt_rt_core_stats(vc.core)->waiting, 1);
    CHECK_EQ(vc_ask(51, 0, 0, 60000, 10000), BT_OK); /* no node takes that ever */
    CHECK(vc.n_failed == 1 && vc.last_end.kind == BT_RT_INVALID);
    vc_run(1000);
    CHECK_EQ(vc.n_finished, 41);
    CHECK_EQ(vc.core->nodes[1].own_pages + vc.core->nodes[2].own_pages, 0);
    vc_end();
}

/* ---- refusals ---- */

static void test_refusal(void)
{
    vc_begin(1, 1, 8, 3000, 10000);
    CHECK_EQ(vc_ask(0, 0, 0, 20000, 1), BT_OK); /* two seconds */
    CHECK_EQ(vc_ask(1, 0, 0, 20000, 1), BT_ERR_TIMEOUT);
    struct bt_rt_forecast f = bt_rt_forecast(vc.core, vc.now, 0, 0, 20000);

    CHECK(f.wait_ns / MS >= 1900 && f.wait_ns / MS <= 2100 && f.prefill_ns / MS == 2000);
    /* A short one would be computed beside it. */
    CHECK_EQ(vc_ask(2, 0, 0, 100, 1), BT_OK);
    /* What can never run is told so, not sent away for later. */
    CHECK_EQ(vc_ask(3, 0, 0, 40000, 40000), BT_OK);
    CHECK(vc.n_failed == 1 && vc.last_end.kind == BT_RT_INVALID);
    vc_run(1800);
    f = bt_rt_forecast(vc.core, vc.now, 0, 0, 20000); /* reports tell how far it is */
    CHECK(f.wait_ns / MS < 1000);
    CHECK_EQ(vc_ask(4, 0, 0, 20000, 1), BT_OK);
    vc_run(5000);
    CHECK_EQ(vc.n_finished, 3);
    CHECK_EQ(vc_ask(5, 0, 0, 39000, 1), BT_ERR_TIMEOUT);
    /* A speed that nobody has measured for long refuses nobody, or it would never be measured again. */
    vc_run(20000);
    CHECK_EQ(vc_ask(6, 0, 0, 39000, 1), BT_OK);
    CHECK_EQ(vc_ask(7, 0, 0, 39000, 1), BT_ERR_TIMEOUT);
    vc_end();
}

/* Ten times what the cluster can take: the queue stays bounded, who is admitted is served in time, who is refused is
 * told a wait after which he would be served, and seconds later all is as before. */
static void test_overload(void)
{
    uint32_t refused = 0, admitted = 0, asked = 0;
    uint64_t waits = 0, late = 0;

    vc_begin(2, 2, 64, 2000, 100000); /* 20,000 tokens a second: 20 requests of 1,000 */
    for (uint32_t i = 0; i < 20000; i++) {
        if (i % 5 == 0) {
            enum bt_status st = vc_ask(asked, asked % 3, 0, 1000, 8);

            CHECK(st == BT_OK || st == BT_ERR_TIMEOUT || st == BT_ERR_BUSY);
            if (st == BT_OK) {
                admitted++;
            } else {
                refused++;
                waits += bt_rt_forecast(vc.core, vc.now, asked % 3, 0, 1000).wait_ns;
            }
            asked++;
        }
        vc_run(1);
        CHECK(bt_rt_core_stats(vc.core)->waiting <= 64);
    }
    CHECK_EQ(asked, 4000);
    CHECK(admitted >= 360 && admitted <= 460); /* 400 can be served, and some wait at the end */
    CHECK(vc.n_failed * 100 <= admitted);      /* that others' turns came first was not foreseen */
    /* A wait of about two seconds less one prompt is what stands before each. */
    CHECK(waits / refused / MS > 1000 && waits / refused / MS < 2500);
    uint64_t over = vc.now;

    vc_run(3000);
    CHECK_EQ(vc.n_finished + vc.n_failed, admitted);
    CHECK_EQ(bt_rt_core_stats(vc.core)->waiting, 0);
    CHECK_EQ(bt_rt_core_stats(vc.core)->running, 0);
    for (uint32_t i = 0; i < asked; i++) {
        late += vc.t_end[i] > over + 2500 * MS;
    }
    CHECK_EQ(late, 0);
    CHECK_EQ(vc_ask(5000, 0, 0, 1000, 8), BT_OK);
    CHECK_EQ(bt_rt_forecast(vc.core, vc.now, 0, 0, 10).wait_ns / MS / 200, 0);
    vc_run(200);
    CHECK(vc.t_end[5000] != 0);
    /* Nobody idled meanwhile. */
    CHECK(vc.nodes[0].idle_busy + vc.nodes[1].idle_busy <= 20);
    vc_end();
}

int main(void)
{
    test_order();
    test_keys();
    test_ties();
    test_skew();
    test_short_beside_long();
    test_pages();
    test_refusal();
    test_overload();
    return bt_test_done();
}
