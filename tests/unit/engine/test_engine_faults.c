/* The engine on the fake model when things go wrong: memory runs out, sequences are cancelled and
 * released at any moment. Nothing leaks, others are not disturbed, and no call but create allocates anything. */

#include <stdlib.h>
#include "base/mem.h"
#include "engine/philox.h"
#include "tests/check.h"
#include "tests/unit/engine/engine_drive.h"

#define N_CHURN 400
#define N_KINDS 16

static uint32_t rnd(uint32_t n)
{
    static uint32_t i;

    return (uint32_t)((double)bt_philox_bits(4711, 0, i++) * 0x1p-53 * n);
}

static void test_create_out_of_memory(void)
{
    struct bt_engine_opts o = drive_opts("fake:window", 16, 64, 8);
    bool fired = true;

    for (uint64_t nth = 0; fired; nth++) {
        struct bt_engine *e = NULL;

        bt_test_fail_alloc(nth);
        enum bt_status st = bt_engine_create(&o, &e, NULL);

        fired = bt_test_fail_alloc_off();
        CHECK_EQ(st, fired ? BT_ERR_NOMEM : BT_OK);
        bt_engine_destroy(fired ? NULL : e);
        CHECK_EQ(bt_test_live_bytes(), 0);
    }
}

/* Sequences of any size come, land and go without the heap. */
static void test_adding_allocates_nothing(void)
{
    struct bt_engine_opts o = drive_opts("fake:window", 16, 64, 8);
    struct bt_engine *e = drive_open(&o);
    struct drive_run *r = drive_make(bt_engine_model(e), 30, 8, 1);
    uint64_t calls = bt_test_heap_calls();

    for (uint32_t i = 0; i < 1000; i++) {
        struct bt_engine_req req = {.tokens = r->prompt,
                                    .n_tokens = 1 + i % 30,
                                    .n_prompt = 1 + i % 30,
                                    .sampling = &r->sampling};
        struct bt_engine_landing l = {0};

        CHECK_EQ(i % 2 == 0 ? bt_engine_land(e, &req, &l, NULL)
                            : bt_engine_submit(e, &req, &l.seq, NULL),
                 BT_OK);
        bt_engine_release(e, l.seq);
    }
    CHECK(bt_test_heap_calls() == calls);
    bt_free(r);
    drive_check_idle(e);
    bt_engine_destroy(e);
}

static void test_steps_allocate_nothing(void)
{
    struct bt_engine_opts o = drive_opts("fake:window", 4, 30, 8);
    struct drive d;

    o.kv_bytes = 100 << 10; /* so small that some are preempted */
    drive_init(&d, drive_open(&o), NULL);
    for (uint32_t i = 0; i < 12; i++) {
        struct drive_run *r = drive_make(bt_engine_model(d.engine), 100 + i, 100, i);

        r->echo = i == 3;
        CHECK_EQ(drive_submit(&d, r), BT_OK);
    }
    bt_test_fail_alloc(0);
    for (bool worked = true; worked;) {
        struct bt_engine_step_stats stats;

        CHECK_EQ(bt_engine_step(d.engine, &worked, &stats), BT_OK);
    }
    CHECK(!bt_test_fail_alloc_off());
    uint32_t n_preempted = 0;

    while (d.n_runs > 0) {
        struct drive_run *r = d.runs[0];

        n_preempted += r->n_preempted;
        CHECK(r->finish != BT_FINISH_NONE || r->n_preempted > 0);
        drive_release(&d, r);
        bt_free(r);
    }
    CHECK(n_preempted > 0);
    drive_fini(&d);
}

/* A relay under random cancels, quarantines and releases; what is not cancelled is answered as if
 * it were alone. */
static void test_churn(const char *model)
{
    struct bt_engine_opts o = drive_opts(model, 16, 512, 8);
    struct bt_engine_opts po = drive_opts(model, 5, 37, 1), dopts = drive_opts(model, 5, 1, 6);
    struct drive_run *want[N_KINDS];
    struct bt_engine_step_stats stats;
    struct drive d;
    uint32_t n_made = 0, n_answered = 0, n_cancelled = 0;
    bool worked;

    po.max_seqs = dopts.max_seqs = 16;
    drive_init(&d, drive_open(&o), NULL);
    for (uint32_t i = 0; i < N_KINDS; i++) {
        want[i] = drive_make(bt_engine_model(d.engine), 1 + i * i, 10, i);
        CHECK_EQ(drive_submit(&d, want[i]), BT_OK);
    }
    drive_finish(&d);
    drive_fini(&d);
    drive_init(&d, drive_open(&po), drive_open(&dopts));
    while (n_made < N_CHURN || d.n_runs > 0) {
        if (n_made < N_CHURN && d.n_runs < 16 && rnd(2) == 0) {
            struct drive_run *r = bt_alloc(sizeof(*r));

            *r = *want[n_made % N_KINDS];
            drive_reset(r);
            CHECK_EQ(drive_submit(&d, r), BT_OK);
            n_made++;
        }
        d.cancel_pending = false;
        CHECK_EQ(bt_engine_step(d.engine, &worked, &stats), BT_OK);
        CHECK_EQ(bt_engine_step(d.decode, &worked, &stats), BT_OK);
        for (uint32_t i = 0; i < d.n_runs;) {
            struct drive_run *r = d.runs[i];
            bool cancel = rnd(60) == 0;

            if (cancel && rnd(2) == 0) {
                bt_engine_cancel(d.engine, r->seq);
                bt_engine_cancel(d.decode, r->landing);
                bt_engine_quarantine(d.decode, r->landing);
                CHECK_EQ(bt_engine_step(d.engine, &worked, &stats), BT_OK);
                CHECK_EQ(bt_engine_step(d.decode, &worked, &stats), BT_OK);
            }
            if (!cancel && r->finish == BT_FINISH_NONE) {
                if (r->n_out > 0) {
                    bt_engine_release(d.engine, r->seq);
                }
                i++;
                continue;
            }
            if (r->finish != BT_FINISH_NONE) {
                bool found = false;

                for (uint32_t k = 0; k < N_KINDS; k++) {
                    found = found || (want[k]->n_prompt == r->n_prompt && drive_same(r, want[k]));
                }
                CHECK(found);
                n_answered++;
            } else {
                n_cancelled++;
            }
            drive_release(&d, r);
            bt_free(r);
        }
    }
    CHECK_EQ(n_answered + n_cancelled, N_CHURN);
    CHECK(n_answered > 50 && n_cancelled > 50);
    for (uint32_t i = 0; i < N_KINDS; i++) {
        bt_free(want[i]);
    }
    drive_fini(&d);
}

int main(void)
{
    test_create_out_of_memory();
    test_adding_allocates_nothing();
    test_steps_allocate_nothing();
    test_churn("fake:full");
    test_churn("fake:window");
    test_churn("fake:windows");
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
