/* The index of the prefix cache: found by chain and token ids, never by one of them; the order in
 * which idle pages are given up; pages moved behind another chain. */

#include "sched/prefix_index.h"

#include "base/mem.h"
#include "tests/check.h"

static const uint32_t a[2] = {1, 2}, b[2] = {3, 4}, c[2] = {1, 3};

static struct bt_prefix_index *make(uint32_t n_pages)
{
    struct bt_prefix_index *x = NULL;

    CHECK_EQ(bt_prefix_index_create(n_pages, 2, &x), BT_OK);
    return x;
}

static void test_find(void)
{
    struct bt_prefix_index *x = make(8);
    uint64_t ca = bt_prefix_index_put(x, BT_PREFIX_ROOT, a, 5);
    uint64_t cab = bt_prefix_index_put(x, ca, b, 2);

    CHECK(ca != BT_PREFIX_ROOT && cab != ca);
    CHECK_EQ(bt_prefix_index_find(x, BT_PREFIX_ROOT, a), 5);
    CHECK_EQ(bt_prefix_index_find(x, ca, b), 2);
    CHECK_EQ(bt_prefix_index_find(x, BT_PREFIX_ROOT, b), BT_PREFIX_NO_PAGE);
    CHECK_EQ(bt_prefix_index_find(x, ca, a), BT_PREFIX_NO_PAGE);
    CHECK_EQ(bt_prefix_index_find(x, BT_PREFIX_ROOT, c), BT_PREFIX_NO_PAGE);
    CHECK_EQ(bt_prefix_index_chain(x, 5), ca);
    CHECK_EQ(bt_prefix_index_chain(x, 0), 0);
    /* Its page is gone, and with it what was behind; the same tokens again are another chain. */
    bt_prefix_index_remove(x, 5);
    CHECK_EQ(bt_prefix_index_find(x, BT_PREFIX_ROOT, a), BT_PREFIX_NO_PAGE);
    uint64_t again = bt_prefix_index_put(x, BT_PREFIX_ROOT, a, 6);

    CHECK(again != ca);
    CHECK_EQ(bt_prefix_index_find(x, again, b), BT_PREFIX_NO_PAGE);
    /* Moved behind it, the page keeps its own chain. */
    CHECK_EQ(bt_prefix_index_put(x, again, b, 2), cab);
    CHECK_EQ(bt_prefix_index_find(x, again, b), 2);
    CHECK_EQ(bt_prefix_index_find(x, ca, b), BT_PREFIX_NO_PAGE);
    bt_prefix_index_destroy(x);
}

static void test_order(void)
{
    struct bt_prefix_index *x = make(3);

    (void)bt_prefix_index_put(x, BT_PREFIX_ROOT, a, 0);
    (void)bt_prefix_index_put(x, BT_PREFIX_ROOT, b, 1);
    (void)bt_prefix_index_put(x, BT_PREFIX_ROOT, c, 2);
    CHECK_EQ(bt_prefix_index_oldest(x), BT_PREFIX_NO_PAGE);
    bt_prefix_index_idle(x, 1);
    bt_prefix_index_idle(x, 0);
    bt_prefix_index_idle(x, 2);
    CHECK_EQ(bt_prefix_index_oldest(x), 1);
    bt_prefix_index_idle(x, 1); /* wanted again */
    CHECK_EQ(bt_prefix_index_oldest(x), 0);
    bt_prefix_index_busy(x, 2); /* in the middle */
    bt_prefix_index_remove(x, 0);
    CHECK_EQ(bt_prefix_index_oldest(x), 1);
    bt_prefix_index_remove(x, 1);
    CHECK_EQ(bt_prefix_index_oldest(x), BT_PREFIX_NO_PAGE);
    bt_prefix_index_idle(x, 2);
    CHECK_EQ(bt_prefix_index_oldest(x), 2);
    bt_prefix_index_destroy(x);
}

/* Many pages of few beginnings, one bucket for several: each is found where it was put. */
static void test_many(void)
{
    enum { N = 300 };
    struct bt_prefix_index *x = make(N);
    uint64_t chain[N];

    for (uint32_t p = 0; p < N; p++) {
        uint32_t t[2] = {p % 7, p % 3};

        chain[p] = bt_prefix_index_put(x, p < 21 ? BT_PREFIX_ROOT : chain[p - 21], t, p);
    }
    for (uint32_t p = 0; p < N; p += 2) {
        bt_prefix_index_remove(x, p);
    }
    for (uint32_t p = 0; p < N; p++) {
        uint32_t t[2] = {p % 7, p % 3};

        CHECK_EQ(bt_prefix_index_find(x, p < 21 ? BT_PREFIX_ROOT : chain[p - 21], t),
                 p % 2 == 0 ? BT_PREFIX_NO_PAGE : p);
    }
    bt_prefix_index_destroy(x);
}

static void test_no_memory(void)
{
    bool fired = true;

    for (uint64_t nth = 0; fired; nth++) {
        struct bt_prefix_index *x = NULL;

        bt_test_fail_alloc(nth);
        enum bt_status st = bt_prefix_index_create(4, 2, &x);

        fired = bt_test_fail_alloc_off();
        CHECK_EQ(st, fired ? BT_ERR_NOMEM : BT_OK);
        bt_prefix_index_destroy(x);
    }
}

int main(void)
{
    test_find();
    test_order();
    test_many();
    test_no_memory();
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
