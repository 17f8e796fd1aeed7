/* The index of the prefix cache: found by what is before and token ids, never by one of them; blocks
 * live as long as a page or a block behind them; the order in which idle pages are given up; blocks
 * that begin alike; what is told of changes. */

#include "sched/prefix_index.h"

#include "base/mem.h"
#include "sched/prefix_hash.h"
#include "tests/check.h"

static const uint32_t a[2] = {1, 2}, b[2] = {3, 4}, c[2] = {1, 3};
static const struct bt_prefix_pos root = {0, UINT32_MAX};

static struct bt_prefix_index *make(uint32_t n_pages, uint32_t n_groups)
{
    struct bt_prefix_index_opts o = {
        .page_tokens = 2, .n_groups = n_groups, .n_pages = {n_pages, n_pages}};
    struct bt_prefix_index *x = NULL;

    CHECK_EQ(bt_prefix_index_create(&o, &x), BT_OK);
    return x;
}

/* Puts a block with a page of group 0. */
static struct bt_prefix_pos put(struct bt_prefix_index *x, struct bt_prefix_pos before,
                                const uint32_t *tokens, uint32_t page)
{
    struct bt_prefix_pos at = root;

    CHECK(bt_prefix_index_put(x, before, tokens, 0, &at));
    bt_prefix_index_attach(x, at, 0, page);
    return at;
}

/* The page of group 0 there. */
static uint32_t find(const struct bt_prefix_index *x, struct bt_prefix_pos before,
                     const uint32_t *tokens)
{
    struct bt_prefix_pos at;

    return bt_prefix_index_find(x, before, tokens, &at) ? bt_prefix_index_page(x, at, 0)
                                                        : BT_PREFIX_NO_PAGE;
}

static void test_find(void)
{
    struct bt_prefix_index *x = make(8, 1);
    struct bt_prefix_pos pa = put(x, root, a, 5), pab = put(x, pa, b, 2), again;

    CHECK_EQ(find(x, root, a), 5);
    CHECK_EQ(find(x, pa, b), 2);
    CHECK_EQ(find(x, root, b), BT_PREFIX_NO_PAGE);
    CHECK_EQ(find(x, pa, a), BT_PREFIX_NO_PAGE);
    CHECK_EQ(find(x, root, c), BT_PREFIX_NO_PAGE);
    CHECK(bt_prefix_index_has(x, 0, 5) && !bt_prefix_index_has(x, 0, 0));
    CHECK_EQ(bt_prefix_index_before(x, pab).serial, pa.serial);
    /* Its page is gone: the block stays for what is behind it, and may get another. */
    bt_prefix_index_detach(x, 0, 5);
    CHECK(bt_prefix_index_live(x, pa) && find(x, root, a) == BT_PREFIX_NO_PAGE);
    CHECK_EQ(find(x, pa, b), 2);
    again = put(x, root, a, 6);
    CHECK_EQ(again.serial, pa.serial);
    /* With its last page and nothing behind it, it goes, and what led to it. */
    bt_prefix_index_detach(x, 0, 6);
    bt_prefix_index_detach(x, 0, 2);
    CHECK(!bt_prefix_index_live(x, pa) && !bt_prefix_index_live(x, pab));
    again = put(x, root, a, 5);
    CHECK(again.serial != pa.serial);
    CHECK(!bt_prefix_index_put(x, pa, b, 0, &again)); /* stale */
    CHECK_EQ(find(x, pa, b), BT_PREFIX_NO_PAGE);
    bt_prefix_index_destroy(x);
}

static void test_order(void)
{
    struct bt_prefix_index *x = make(3, 2);

    (void)put(x, root, a, 0);
    (void)put(x, root, b, 1);
    (void)put(x, root, c, 2);
    CHECK_EQ(bt_prefix_index_oldest(x, 0), BT_PREFIX_NO_PAGE);
    bt_prefix_index_idle(x, 0, 1);
    bt_prefix_index_idle(x, 0, 0);
    bt_prefix_index_idle(x, 0, 2);
    CHECK_EQ(bt_prefix_index_oldest(x, 0), 1);
    CHECK_EQ(bt_prefix_index_oldest(x, 1), BT_PREFIX_NO_PAGE);
    bt_prefix_index_idle(x, 0, 1); /* wanted again */
    CHECK_EQ(bt_prefix_index_oldest(x, 0), 0);
    bt_prefix_index_busy(x, 0, 2); /* in the middle */
    bt_prefix_index_detach(x, 0, 0);
    CHECK_EQ(bt_prefix_index_oldest(x, 0), 1);
    bt_prefix_index_detach(x, 0, 1);
    CHECK_EQ(bt_prefix_index_oldest(x, 0), BT_PREFIX_NO_PAGE);
    bt_prefix_index_idle(x, 0, 2);
    CHECK_EQ(bt_prefix_index_oldest(x, 0), 2);
    bt_prefix_index_destroy(x);
}

static void test_alike(void)
{
    struct bt_prefix_index *x = make(8, 2);
    struct bt_prefix_pos pa = put(x, root, a, 0), pc = put(x, root, c, 1), got = root;
    const uint32_t other[1] = {2};

    CHECK_EQ(bt_prefix_index_alike(x, root, a, 1, &got), 0); /* a group is missing */
    bt_prefix_index_attach(x, pa, 1, 7);
    CHECK_EQ(bt_prefix_index_alike(x, root, a, 1, &got), 1);
    CHECK_EQ(got.serial, pa.serial);
    bt_prefix_index_attach(x, pc, 1, 6);
    CHECK_EQ(bt_prefix_index_alike(x, root, c, 1, &got), 1);
    CHECK_EQ(got.serial, pc.serial); /* the newest */
    CHECK_EQ(bt_prefix_index_alike(x, root, other, 1, &got), 0);
    CHECK_EQ(bt_prefix_index_alike(x, pa, a, 1, &got), 0);
    bt_prefix_index_destroy(x);
}

/* There are twice as many blocks as pages; one without a page makes room when nothing needs it. */
static void test_full(void)
{
    struct bt_prefix_index *x = make(1, 1);
    struct bt_prefix_pos pa, pb, pc;

    CHECK(bt_prefix_index_put(x, root, a, 0, &pa));
    CHECK(!bt_prefix_index_full(x));
    CHECK(bt_prefix_index_put(x, pa, b, 0, &pb));
    CHECK(bt_prefix_index_full(x));
    CHECK(!bt_prefix_index_put(x, pb, c, 0, &pc));
    bt_prefix_index_drop(x, pa); /* something is behind it */
    CHECK(bt_prefix_index_live(x, pa));
    bt_prefix_index_attach(x, pb, 0, 0);
    bt_prefix_index_drop(x, pb);
    CHECK(bt_prefix_index_live(x, pb));
    bt_prefix_index_detach(x, 0, 0);
    CHECK(!bt_prefix_index_full(x) && !bt_prefix_index_live(x, pa));
    bt_prefix_index_destroy(x);
}

static void test_changes(void)
{
    struct bt_prefix_index *x = make(2, 2);
    struct bt_prefix_pos pa, pb;
    uint32_t n = 9;

    CHECK(bt_prefix_index_put(x, root, a, 77, &pa) && bt_prefix_index_put(x, pa, b, 0, &pb));
    bt_prefix_index_attach(x, pa, 1, 0); /* not the group that counts */
    (void)bt_prefix_index_changes(x, &n);
    CHECK_EQ(n, 0);
    bt_prefix_index_attach(x, pa, 0, 0);
    bt_prefix_index_attach(x, pb, 0, 1); /* has no hash */
    const struct bt_prefix_change *list = bt_prefix_index_changes(x, &n);

    CHECK(n == 1 && list[0].hash == 77 && list[0].added);
    (void)bt_prefix_index_changes(x, &n);
    CHECK_EQ(n, 0);
    for (uint32_t i = 0; i < 2; i++) {
        bt_prefix_index_detach(x, 0, 0);
        bt_prefix_index_attach(x, pa, 0, 0);
    }
    list = bt_prefix_index_changes(x, &n);
    CHECK(n == 2 && !list[0].added && list[1].added); /* more are forgotten */
    bt_prefix_index_destroy(x);
}

/* Many pages of few beginnings, one bucket for several: each is found where it was put. */
static void test_many(void)
{
    enum { N = 300 };
    struct bt_prefix_index *x = make(N, 1);
    struct bt_prefix_pos at[N];

    for (uint32_t p = 0; p < N; p++) {
        uint32_t t[2] = {p % 7, p % 3};

        at[p] = put(x, p < 21 ? root : at[p - 21], t, p);
    }
    for (uint32_t p = 0; p < N; p += 2) {
        bt_prefix_index_detach(x, 0, p);
    }
    for (uint32_t p = 0; p < N; p++) {
        uint32_t t[2] = {p % 7, p % 3};

        CHECK_EQ(find(x, p < 21 ? root : at[p - 21], t), p % 2 == 0 ? BT_PREFIX_NO_PAGE : p);
    }
    bt_prefix_index_destroy(x);
}

static void test_blocks(void)
{
    uint32_t t[128] = {5, 6, 7};

    CHECK_EQ(bt_prefix_block_tokens(1), 64);
    CHECK_EQ(bt_prefix_block_tokens(16), 64);
    CHECK_EQ(bt_prefix_block_tokens(24), 72);
    CHECK_EQ(bt_prefix_block_tokens(64), 64);
    CHECK_EQ(bt_prefix_block_tokens(100), 100);
    uint64_t h = bt_prefix_block_hash(0, t, 64);

    CHECK(h != 0 && bt_prefix_block_hash(h, t, 64) != h);
    t[63]++;
    CHECK(bt_prefix_block_hash(0, t, 64) != h);
}

static void test_no_memory(void)
{
    bool fired = true;

    for (uint64_t nth = 0; fired; nth++) {
        struct bt_prefix_index_opts o = {.page_tokens = 2, .n_groups = 2, .n_pages = {4, 4}};
        struct bt_prefix_index *x = NULL;

        bt_test_fail_alloc(nth);
        enum bt_status st = bt_prefix_index_create(&o, &x);

        fired = bt_test_fail_alloc_off();
        CHECK_EQ(st, fired ? BT_ERR_NOMEM : BT_OK);
        bt_prefix_index_destroy(x);
    }
}

int main(void)
{
    test_find();
    test_order();
    test_alike();
    test_full();
    test_changes();
    test_many();
    test_blocks();
    test_no_memory();
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
