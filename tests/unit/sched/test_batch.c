/* The scheduler's rules, one by one. */

#include "sched/batch.h"

#include "base/mem.h"
#include "tests/check.h"

static struct bt_batch *make(uint32_t page_tokens, uint32_t n_pages, uint32_t chunk,
                             uint32_t max_batch)
{
    struct bt_batch_opts o = {.page_tokens = page_tokens,
                              .chunk_tokens = chunk,
                              .max_batch = max_batch,
                              .max_seqs = 64,
                              .tokens_max = 4096,
                              .prefill_rows = 32,
                              .n_groups = 1};
    struct bt_batch *b = NULL;

    o.groups[0].n_pages = n_pages;
    CHECK_EQ(bt_batch_create(&o, &b), BT_OK);
    return b;
}

static uint32_t submit(struct bt_batch *b, uint32_t n_tokens, uint32_t n_max, bool hold)
{
    struct bt_batch_new n = {.n_tokens = n_tokens, .n_tokens_max = n_max, .hold = hold};
    uint32_t slot = BT_BATCH_NO_SLOT;

    CHECK_EQ(bt_batch_submit(b, &n, &slot), BT_OK);
    return slot;
}

/* One step without an end for anybody; returns the plan. */
static struct bt_batch_plan step(struct bt_batch *b)
{
    struct bt_batch_plan plan;

    bt_batch_plan(b, &plan);
    if (plan.n_spans > 0) {
        bt_batch_commit(b);
        for (uint32_t i = 0; i < plan.n_spans; i++) {
            if (plan.spans[i].last) {
                bt_batch_sampled(b, plan.spans[i].slot, false);
            }
        }
    }
    return plan;
}

static uint32_t span_of(const struct bt_batch_plan *plan, uint32_t slot)
{
    for (uint32_t i = 0; i < plan->n_spans; i++) {
        if (plan->spans[i].slot == slot) {
            return plan->spans[i].n;
        }
    }
    return 0;
}

static void test_prompt_then_decode(void)
{
    struct bt_batch *b = make(4, 16, 8, 4);
    uint32_t s = submit(b, 10, 20, false);
    struct bt_batch_plan plan = step(b);

    CHECK_EQ(plan.n_started, 1);
    CHECK_EQ(plan.n_spans, 1);
    CHECK_EQ(plan.n_prefill_tokens, 8);
    CHECK_EQ(bt_pages_count(bt_batch_pages(b, 0), BT_PAGE_LEASED), 3); /* 10 + 1 tokens */
    plan = step(b);
    CHECK_EQ(plan.n_started, 0);
    CHECK_EQ(span_of(&plan, s), 2);
    CHECK_EQ(bt_batch_seq(b, s)->state, BT_BATCH_READY);
    plan = step(b);
    CHECK(plan.spans[0].decode && plan.spans[0].pos == 10);
    plan = step(b);
    plan = step(b);
    CHECK_EQ(plan.spans[0].pos, 12);
    CHECK_EQ(bt_pages_count(bt_batch_pages(b, 0), BT_PAGE_LEASED), 4);
    uint64_t id = bt_batch_seq(b, s)->id;

    CHECK_EQ(bt_batch_find(b, id), s);
    bt_batch_remove(b, s);
    CHECK_EQ(bt_batch_find(b, id), BT_BATCH_NO_SLOT);
    CHECK_EQ(bt_batch_find(b, 0), BT_BATCH_NO_SLOT);
    CHECK_EQ(bt_pages_count(bt_batch_pages(b, 0), BT_PAGE_FREE), 16);
    bt_batch_destroy(b);
}

static void test_short_prompts_share_a_step(void)
{
    struct bt_batch *b = make(16, 64, 512, 32);
    struct bt_batch_plan plan;

    for (uint32_t i = 0; i < 10; i++) {
        (void)submit(b, 20 + i, 100, true);
    }
    plan = step(b);
    CHECK_EQ(plan.n_spans, 10);
    CHECK_EQ(plan.n_prefill_tokens, 245);
    CHECK_EQ(bt_batch_load(b).n_held, 10);
    bt_batch_destroy(b);
}

static void test_long_and_short_both_move(void)
{
    struct bt_batch *b = make(16, 1024, 64, 32);
    uint32_t long_1 = submit(b, 1000, 1000, true);
    uint32_t long_2 = submit(b, 900, 900, true);
    struct bt_batch_plan plan = step(b);

    CHECK_EQ(span_of(&plan, long_1), 64);
    CHECK_EQ(span_of(&plan, long_2), 0);
    uint32_t small = submit(b, 5, 5, true);

    plan = step(b);
    CHECK_EQ(span_of(&plan, small), 5);
    CHECK_EQ(span_of(&plan, long_1), 59);
    CHECK_EQ(span_of(&plan, long_2), 0);
    /* A stream of short prompts does not stop the oldest one. */
    for (uint32_t i = 0; i < 20 && bt_batch_seq(b, long_1)->state != BT_BATCH_HELD; i++) {
        uint32_t a = submit(b, 60, 60, true);

        plan = step(b);
        CHECK(span_of(&plan, long_1) >= 32);
        if (i > 0) {
            bt_batch_remove(b, a);
        }
    }
    bt_batch_destroy(b);
}

/* Prompts of about the same length: first in, first out, though the younger ones are a bit shorter. */
static void test_alike_prompts_keep_their_order(void)
{
    struct bt_batch *b = make(16, 1024, 64, 32);
    uint32_t slots[4];

    for (uint32_t i = 0; i < 4; i++) {
        slots[i] = submit(b, 200 - i, 200 - i, true);
    }
    for (uint32_t at = 0, i = 0; i < 13; i++) {
        struct bt_batch_plan plan = step(b);

        while (at < 4 && bt_batch_seq(b, slots[at])->state == BT_BATCH_HELD) {
            at++;
        }
        for (uint32_t k = at + 1; k < 4; k++) {
            CHECK(bt_batch_seq(b, slots[k])->state != BT_BATCH_HELD);
        }
        CHECK_EQ(plan.n_prefill_tokens, i < 12 ? 64u : 200u + 199 + 198 + 197 - 12 * 64);
    }
    CHECK_EQ(bt_batch_load(b).n_held, 4);
    bt_batch_destroy(b);
}

static void test_prompt_waits_for_all_its_pages(void)
{
    struct bt_batch *b = make(4, 10, 64, 4);
    uint32_t a = submit(b, 24, 24, true);   /* 6 pages */
    uint32_t big = submit(b, 20, 20, true); /* 5: not now */
    uint32_t small = submit(b, 8, 8, true); /* 2: overtakes */
    struct bt_batch_plan plan = step(b);

    CHECK_EQ(span_of(&plan, a), 24);
    CHECK(bt_batch_load(b).pages_short);
    plan = step(b);
    CHECK_EQ(bt_batch_seq(b, big)->state, BT_BATCH_WAITING);
    CHECK_EQ(bt_batch_seq(b, small)->state, BT_BATCH_HELD);
    uint32_t n = 0;

    /* Only so many younger ones may start before it. */
    for (; n < 40; n++) {
        uint32_t s = submit(b, 4, 4, true);

        (void)step(b);
        bool started = bt_batch_seq(b, s)->state == BT_BATCH_HELD;

        bt_batch_remove(b, s);
        if (!started) {
            break;
        }
    }
    CHECK(n >= 1 && n <= BATCH_OVERTAKE_MAX);
    CHECK(bt_batch_load(b).pages_short);
    bt_batch_remove(b, a);
    plan = step(b);
    CHECK_EQ(span_of(&plan, big), 20);
    CHECK(!bt_batch_load(b).pages_short);
    bt_batch_destroy(b);
}

static void test_preempts_the_newest(void)
{
    struct bt_batch *b = make(4, 6, 64, 8);
    struct bt_batch_new landing = {.n_tokens = 4, .n_tokens_max = 24};
    uint32_t old = submit(b, 7, 24, false);

    (void)step(b); /* old: 2 pages */
    uint32_t young = submit(b, 7, 24, false);

    (void)step(b); /* young: 2 pages */
    uint32_t land = 0;

    CHECK_EQ(bt_batch_land(b, &landing, &land),
             BT_ERR_BUSY); /* one page for each of the two must stay */
    struct bt_batch_plan plan;
    uint64_t young_id = bt_batch_seq(b, young)->id;
    bool preempted = false;

    for (uint32_t i = 0; i < 20; i++) {
        plan = step(b);
        if (plan.n_preempted > 0) {
            preempted = true;
            CHECK_EQ(plan.n_preempted, 1);
            CHECK(plan.preempted[0] == young_id);
            CHECK_EQ(span_of(&plan, old), 1);
            break;
        }
    }
    CHECK(preempted);
    CHECK_EQ(bt_batch_find(b, young_id), BT_BATCH_NO_SLOT);
    bt_batch_destroy(b);
}

static void test_landing_is_never_preempted(void)
{
    struct bt_batch *b = make(4, 4, 64, 8);
    struct bt_batch_new n = {.n_tokens = 8, .n_tokens_max = 16};
    uint32_t landing, running;

    CHECK_EQ(bt_batch_land(b, &n, &running), BT_OK);
    CHECK_EQ(bt_batch_land(b, &n, &landing), BT_OK);
    uint64_t id = bt_batch_seq(b, running)->id;

    bt_batch_start(b, running);
    struct bt_batch_plan plan = step(b);

    CHECK_EQ(plan.n_preempted, 1);
    CHECK(plan.preempted[0] == id);
    CHECK_EQ(bt_batch_seq(b, landing)->state, BT_BATCH_LANDING);
    bt_batch_quarantine(b, landing);
    CHECK_EQ(bt_pages_count(bt_batch_pages(b, 0), BT_PAGE_QUARANTINED), 2);
    CHECK_EQ(bt_batch_load(b).n_landing, 1);
    bt_batch_remove(b, landing);
    CHECK_EQ(bt_pages_count(bt_batch_pages(b, 0), BT_PAGE_FREE), 4);
    bt_batch_destroy(b);
}

static void test_window_pages_leave(void)
{
    struct bt_batch_opts o = {
        .page_tokens = 4,
        .chunk_tokens = 16,
        .max_batch = 4,
        .max_seqs = 4,
        .tokens_max = 4096,
        .prefill_rows = 4,
        .n_groups = 2,
        .groups = {{.window = 0, .n_pages = 32}, {.window = 6, .n_pages = 32}}};
    struct bt_batch *b = NULL;
    uint32_t s = 0;

    CHECK_EQ(bt_batch_create(&o, &b), BT_OK);
    s = submit(b, 33, 64, false);
    (void)step(b);
    /* 16 done: position 16 sees 11 …, so pages 0 and 1 (0 … 7) have left. */
    CHECK_EQ(bt_batch_seq(b, s)->first_page[1], 2);
    CHECK_EQ(bt_batch_seq(b, s)->first_page[0], 0);
    CHECK_EQ(bt_batch_seq(b, s)->pages[1][1], BT_BATCH_NO_PAGE);
    CHECK_EQ(bt_pages_count(bt_batch_pages(b, 1), BT_PAGE_LEASED), 7);
    (void)step(b);
    (void)step(b);
    CHECK_EQ(bt_batch_seq(b, s)->first_page[1], 7); /* (33 - 6 + 1) / 4 */
    for (uint32_t i = 0; i < 4; i++) {
        (void)step(b);
    }
    CHECK_EQ(bt_batch_seq(b, s)->n_done, 37);
    CHECK_EQ(bt_batch_seq(b, s)->first_page[1], 8);
    CHECK_EQ(bt_batch_seq(b, s)->n_paged, 10);
    bt_batch_remove(b, s);
    struct bt_batch_new n = {.n_tokens = 33, .n_tokens_max = 64};

    CHECK_EQ(bt_batch_land(b, &n, &s), BT_OK);
    CHECK_EQ(bt_batch_seq(b, s)->first_page[1], 7);
    CHECK_EQ(bt_pages_count(bt_batch_pages(b, 1), BT_PAGE_LEASED), 2);
    CHECK_EQ(bt_pages_count(bt_batch_pages(b, 0), BT_PAGE_LEASED), 9);
    bt_batch_destroy(b);
}

static void test_batch_limit_and_cancel(void)
{
    struct bt_batch *b = make(4, 64, 64, 2);
    uint32_t s[4];
    struct bt_batch_plan plan;

    for (uint32_t i = 0; i < 4; i++) {
        s[i] = submit(b, 3, 20, false);
    }
    plan = step(b);
    CHECK_EQ(plan.n_spans, 4);
    plan = step(b);
    CHECK_EQ(plan.n_spans, 2);
    CHECK_EQ(span_of(&plan, s[0]) + span_of(&plan, s[1]), 2);
    bt_batch_cancel(b, s[0]);
    plan = step(b);
    CHECK_EQ(plan.n_spans, 1);
    bt_batch_remove(b, s[0]);
    plan = step(b);
    CHECK_EQ(span_of(&plan, s[1]) + span_of(&plan, s[2]), 2);
    /* An abandoned pass changes nothing but what was started. */
    uint32_t done = bt_batch_seq(b, s[1])->n_done;

    bt_batch_plan(b, &plan);
    bt_batch_abandon(b);
    CHECK_EQ(bt_batch_seq(b, s[1])->n_done, done);
    plan = step(b);
    CHECK_EQ(plan.spans[0].pos, done);
    bt_batch_destroy(b);
}

static void test_rows(void)
{
    struct bt_batch_opts o = {.page_tokens = 4,
                              .chunk_tokens = 100,
                              .max_batch = 4,
                              .max_seqs = 16,
                              .tokens_max = 4096,
                              .prefill_rows = 4,
                              .n_groups = 1,
                              .groups = {{.window = 0, .n_pages = 64}}};
    struct bt_batch *b = NULL;
    struct bt_batch_new echo = {.n_tokens = 10, .n_tokens_max = 10, .hold = true, .all_rows = true};
    uint32_t e, s;

    CHECK_EQ(bt_batch_create(&o, &b), BT_OK);
    CHECK_EQ(bt_batch_submit(b, &echo, &e), BT_OK);
    s = submit(b, 5, 5, true);
    struct bt_batch_plan plan = step(b);

    CHECK_EQ(span_of(&plan, s), 5);
    CHECK_EQ(span_of(&plan, e), 3); /* half the rows, and the one that was left */
    plan = step(b);
    CHECK_EQ(span_of(&plan, e), 4);
    plan = step(b);
    CHECK_EQ(span_of(&plan, e), 3);
    CHECK_EQ(bt_batch_seq(b, e)->state, BT_BATCH_HELD);
    bt_batch_destroy(b);
}

static void test_out_of_memory(void)
{
    bool fired = true;

    for (uint64_t nth = 0; fired; nth++) {
        struct bt_batch_opts o = {.page_tokens = 1,
                                  .chunk_tokens = 1,
                                  .max_batch = 1,
                                  .max_seqs = 2,
                                  .tokens_max = 4096,
                                  .prefill_rows = 1,
                                  .n_groups = 2,
                                  .groups = {{.n_pages = 4}, {.n_pages = 4}}};
        struct bt_batch *b = NULL;

        bt_test_fail_alloc(nth);
        enum bt_status st = bt_batch_create(&o, &b);

        fired = bt_test_fail_alloc_off();
        CHECK_EQ(st, fired ? BT_ERR_NOMEM : BT_OK);
        bt_batch_destroy(b);
        CHECK_EQ(bt_test_live_bytes(), 0);
    }
}

int main(void)
{
    test_prompt_then_decode();
    test_short_prompts_share_a_step();
    test_long_and_short_both_move();
    test_alike_prompts_keep_their_order();
    test_prompt_waits_for_all_its_pages();
    test_preempts_the_newest();
    test_landing_is_never_preempted();
    test_window_pages_leave();
    test_batch_limit_and_cancel();
    test_rows();
    test_out_of_memory();
    return bt_test_done();
}
