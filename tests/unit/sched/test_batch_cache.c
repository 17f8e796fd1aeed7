/* The scheduler's prefix cache, rule by rule. */

#include "sched/batch.h"

#include "base/mem.h"
#include "tests/check.h"

#define PAGE 4

static const uint32_t text[32] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16,
                                  17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32};
static const uint32_t other[16] = {9, 9, 9, 9, 8, 8, 8, 8, 7, 7, 7, 7, 6, 6, 6, 6};

static struct bt_batch *make(uint32_t n_pages)
{
    struct bt_batch_opts o = {.page_tokens = PAGE,
                              .chunk_tokens = 64,
                              .max_batch = 8,
                              .max_seqs = 16,
                              .tokens_max = 4096,
                              .prefill_rows = 32,
                              .n_groups = 1,
                              .prefix_cache = true};
    struct bt_batch *b = NULL;

    o.groups[0].n_pages = n_pages;
    CHECK_EQ(bt_batch_create(&o, &b), BT_OK);
    return b;
}

static uint32_t submit(struct bt_batch *b, const uint32_t *tokens, uint32_t n_tokens)
{
    struct bt_batch_new n = {
        .n_tokens = n_tokens, .n_tokens_max = n_tokens, .hold = true, .tokens = tokens};
    uint32_t slot = BT_BATCH_NO_SLOT;

    CHECK_EQ(bt_batch_submit(b, &n, &slot), BT_OK);
    return slot;
}

static uint32_t land(struct bt_batch *b, const uint32_t *tokens, uint32_t n_tokens,
                     uint32_t n_tokens_max)
{
    struct bt_batch_new n = {.n_tokens = n_tokens, .n_tokens_max = n_tokens_max, .tokens = tokens};
    uint32_t slot = BT_BATCH_NO_SLOT;

    CHECK_EQ(bt_batch_land(b, &n, &slot), BT_OK);
    return slot;
}

/* One step; the tokens computed in it. */
static uint32_t step(struct bt_batch *b)
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
    return plan.n_tokens;
}

static uint32_t count(const struct bt_batch *b, enum bt_page_state state)
{
    return bt_pages_count(bt_batch_pages(b, 0), state);
}

static uint32_t page(const struct bt_batch *b, uint32_t slot, uint32_t at)
{
    return bt_batch_seq(b, slot)->pages[0][at];
}

static void compute(struct bt_batch *b, const uint32_t *tokens, uint32_t n, uint32_t want)
{
    uint32_t slot = submit(b, tokens, n);

    CHECK_EQ(bt_batch_load(b).waiting_tokens, want);
    CHECK_EQ(step(b), want);
    bt_batch_remove(b, slot);
}

static void test_hit_and_miss(void)
{
    struct bt_batch *b = make(16);

    compute(b, text, 10, 10);
    CHECK_EQ(count(b, BT_PAGE_CACHED), 2); /* full ones only */
    CHECK_EQ(count(b, BT_PAGE_FREE), 14);
    compute(b, text, 10, 2);
    compute(b, text, 8, 1); /* a full hit: the last token is computed, its logits are needed */
    compute(b, text, 9, 1);
    compute(b, text, 5, 1);
    compute(b, text, 4, 1);
    compute(b, text, 7, 1); /* ends inside a page */
    compute(b, text, 16, 8);
    compute(b, text, 16, 1);
    compute(b, other, 16, 16);
    compute(b, text + 4, 8, 8); /* known tokens at another place */
    CHECK_EQ(count(b, BT_PAGE_LEASED), 0);
    CHECK_EQ(count(b, BT_PAGE_CACHED) + count(b, BT_PAGE_FREE), 16);
    bt_batch_destroy(b);
}

static void test_shared_by_several(void)
{
    struct bt_batch *b = make(16);
    uint32_t x = submit(b, text, 11);

    CHECK_EQ(step(b), 11);
    uint32_t y = submit(b, text, 11), z = submit(b, text, 7);

    CHECK_EQ(step(b), 3 + 1);
    CHECK_EQ(bt_batch_seq(b, z)->n_copied, 2);
    CHECK_EQ(bt_batch_seq(b, z)->copy_from[0], page(b, x, 1));
    CHECK_EQ(bt_batch_seq(b, y)->n_shared, 2);
    CHECK_EQ(bt_batch_seq(b, z)->n_shared, 1);
    CHECK_EQ(page(b, y, 0), page(b, x, 0));
    CHECK_EQ(page(b, y, 1), page(b, x, 1));
    CHECK_EQ(page(b, z, 0), page(b, x, 0));
    CHECK(page(b, y, 2) != page(b, x, 2) && page(b, z, 1) != page(b, x, 1));
    CHECK_EQ(bt_pages_info(bt_batch_pages(b, 0), page(b, x, 0)).n_refs, 3);
    CHECK_EQ(count(b, BT_PAGE_LEASED), 5);
    bt_batch_remove(b, x);
    bt_batch_remove(b, z);
    CHECK_EQ(count(b, BT_PAGE_LEASED), 3);
    bt_batch_remove(b, y);
    CHECK_EQ(count(b, BT_PAGE_CACHED), 2);
    /* Computed by two at the same time, because one wants all rows: one copy stays. */
    struct bt_batch_new n = {
        .n_tokens = 9, .n_tokens_max = 9, .hold = true, .all_rows = true, .tokens = other};

    x = submit(b, other, 9);
    CHECK_EQ(bt_batch_submit(b, &n, &y), BT_OK);
    CHECK_EQ(step(b), 18);
    bt_batch_remove(b, x);
    bt_batch_remove(b, y);
    CHECK_EQ(count(b, BT_PAGE_CACHED), 4);
    bt_batch_destroy(b);
}

/* Prompts that begin alike and come together are computed once: the others wait for the pages. */
static void test_computed_once(void)
{
    struct bt_batch *b = make(16);
    uint32_t x = submit(b, text, 15), y = submit(b, text, 15), z = submit(b, text, 10);
    uint32_t u = submit(b, other, 6);

    /* The oldest, and what is not alike. */
    CHECK_EQ(step(b), 15 + 6);
    CHECK_EQ(bt_batch_seq(b, y)->state, BT_BATCH_WAITING);
    CHECK_EQ(bt_batch_seq(b, z)->state, BT_BATCH_WAITING);
    CHECK_EQ(step(b), 3 + 1); /* y has 12 tokens, z 8 and one of the third page */
    bt_batch_remove(b, x);
    bt_batch_remove(b, y);
    bt_batch_remove(b, z);
    bt_batch_remove(b, u);
    /* One that is cancelled is waited for no longer. */
    static const uint32_t new[16] = {5, 5, 5, 5, 4, 4, 4, 4, 3, 3, 3, 3, 2, 2, 2, 2};
    struct bt_batch_plan plan;

    x = submit(b, new, 16);
    y = submit(b, new, 16);
    bt_batch_plan(b, &plan);
    CHECK_EQ(plan.n_spans, 1);
    bt_batch_cancel(b, x);
    bt_batch_abandon(b);
    CHECK_EQ(step(b), 16);
    bt_batch_remove(b, x);
    bt_batch_remove(b, y);
    CHECK_EQ(count(b, BT_PAGE_LEASED), 0);
    bt_batch_destroy(b);
}

static void test_evicts_from_the_end(void)
{
    struct bt_batch *b = make(5);

    compute(b, text, 13, 13);
    CHECK_EQ(count(b, BT_PAGE_CACHED), 3);
    compute(b, other, 13, 13); /* four pages: two were free, the last two of text go */
    CHECK_EQ(count(b, BT_PAGE_CACHED), 4);
    compute(b, text, 5, 1);
    compute(b, text, 9, 5); /* takes the last page of other */
    compute(b, other, 9, 1);
    CHECK_EQ(count(b, BT_PAGE_LEASED), 0);
    /* What is in use is never given up: there is no room. */
    uint32_t x = submit(b, text, 9), y = submit(b, other, 13);

    CHECK_EQ(step(b), 1);
    CHECK_EQ(bt_batch_seq(b, y)->state, BT_BATCH_WAITING);
    CHECK_EQ(bt_batch_seq(b, y)->n_paged, 0);
    bt_batch_remove(b, x);
    CHECK_EQ(step(b), 13 - 2 * PAGE);
    bt_batch_remove(b, y);
    CHECK_EQ(count(b, BT_PAGE_LEASED), 0);
    bt_batch_destroy(b);
}

static void test_landing(void)
{
    struct bt_batch *b = make(16);
    uint32_t x = land(b, text, 10, 20);

    CHECK_EQ(bt_batch_seq(b, x)->n_shared, 0);
    bt_batch_remove(b, x); /* nothing was received for certain */
    CHECK_EQ(count(b, BT_PAGE_FREE), 16);
    x = land(b, text, 10, 20);
    bt_batch_start(b, x);
    uint32_t y = land(b, text, 10, 20);

    CHECK_EQ(bt_batch_seq(b, y)->n_shared, 2);
    CHECK_EQ(page(b, y, 1), page(b, x, 1));
    /* A receive may be in flight into the page that is its own, not into shared ones. */
    bt_batch_quarantine(b, y);
    CHECK_EQ(count(b, BT_PAGE_QUARANTINED), 1);
    bt_batch_remove(b, y);
    CHECK_EQ(count(b, BT_PAGE_QUARANTINED), 0);
    /* Its answer fills pages: 11 … 16 of text. */
    for (uint32_t i = 0; i < 7; i++) {
        CHECK_EQ(step(b), 1);
    }
    bt_batch_remove(b, x);
    CHECK_EQ(count(b, BT_PAGE_CACHED), 4);
    x = land(b, text, 16, 20); /* all of it, the last page too */
    CHECK_EQ(bt_batch_seq(b, x)->n_shared, 4);
    CHECK_EQ(bt_batch_seq(b, x)->n_paged, 4);
    bt_batch_start(b, x);
    CHECK_EQ(step(b), 1);
    bt_batch_remove(b, x);
    CHECK_EQ(count(b, BT_PAGE_LEASED), 0);
    bt_batch_destroy(b);
}

static void test_not_cached(void)
{
    struct bt_batch *b = make(16);
    struct bt_batch_plan plan;
    uint32_t x = submit(b, text, 12);

    /* An abandoned pass has stored nothing for certain. */
    bt_batch_plan(b, &plan);
    CHECK_EQ(plan.n_spans, 1);
    bt_batch_abandon(b);
    bt_batch_remove(b, x);
    CHECK_EQ(count(b, BT_PAGE_FREE), 16);
    compute(b, text, 12, 12);
    /* Every row is wanted: computed again. */
    struct bt_batch_new n = {
        .n_tokens = 12, .n_tokens_max = 12, .hold = true, .all_rows = true, .tokens = text};

    CHECK_EQ(bt_batch_submit(b, &n, &x), BT_OK);
    CHECK_EQ(step(b), 12);
    bt_batch_remove(b, x);
    /* Nobody knows what it is. */
    n = (struct bt_batch_new){.n_tokens = 12, .n_tokens_max = 12, .hold = true};
    CHECK_EQ(bt_batch_submit(b, &n, &x), BT_OK);
    CHECK_EQ(step(b), 12);
    bt_batch_remove(b, x);
    CHECK_EQ(count(b, BT_PAGE_CACHED), 3);
    bt_batch_destroy(b);
}

/* Groups with and without a window: a hit has all pages that the next token sees, no others. */
static void test_windows(void)
{
    struct bt_batch_opts o = {.page_tokens = PAGE,
                              .chunk_tokens = 64,
                              .max_batch = 8,
                              .max_seqs = 16,
                              .tokens_max = 4096,
                              .prefill_rows = 32,
                              .n_groups = 2,
                              .prefix_cache = true};
    struct bt_batch *b = NULL;

    o.groups[0].n_pages = 16;
    o.groups[1].n_pages = 4;
    o.groups[1].window = 6;
    CHECK_EQ(bt_batch_create(&o, &b), BT_OK);
    compute(b, text, 16, 16);
    CHECK_EQ(count(b, BT_PAGE_CACHED), 4);
    CHECK_EQ(bt_pages_count(bt_batch_pages(b, 1), BT_PAGE_CACHED), 4);
    uint32_t x = submit(b, text, 16);

    CHECK_EQ(step(b), 1); /* position 15 sees 10 … 15: pages 2 and 3 of group 1 */
    CHECK_EQ(bt_batch_seq(b, x)->n_shared, 3);
    CHECK_EQ(bt_batch_seq(b, x)->n_copied, 3);
    CHECK_EQ(bt_batch_seq(b, x)->first_page[0], 0);
    CHECK_EQ(bt_batch_seq(b, x)->first_page[1], 2);
    bt_batch_remove(b, x);
    /* Another prompt takes pages of group 1: what is left of them is in nobody's window. */
    compute(b, other, 8, 8);
    CHECK_EQ(count(b, BT_PAGE_CACHED), 6);
    x = submit(b, text, 16);
    CHECK_EQ(step(b), 16);
    CHECK_EQ(bt_batch_seq(b, x)->n_shared, 0);
    bt_batch_remove(b, x);
    x = land(b, text, 14, 20); /* will see 9 … 14 */
    CHECK_EQ(bt_batch_seq(b, x)->first_page[1], 2);
    CHECK_EQ(bt_batch_seq(b, x)->n_shared, 3);
    CHECK_EQ(bt_batch_seq(b, x)->n_copied, 2);
    bt_batch_remove(b, x);
    CHECK_EQ(count(b, BT_PAGE_LEASED), 0);
    CHECK_EQ(bt_pages_count(bt_batch_pages(b, 1), BT_PAGE_LEASED), 0);
    bt_batch_destroy(b);
}

int main(void)
{
    test_hit_and_miss();
    test_shared_by_several();
    test_computed_once();
    test_evicts_from_the_end();
    test_landing();
    test_not_cached();
    test_windows();
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
