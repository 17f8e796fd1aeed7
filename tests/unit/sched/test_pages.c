/* Page accounting: leases, references, cache and quarantine, allocation failure. */

#include "sched/pages.h"

#include "base/mem.h"
#include "tests/check.h"

static void test_lease_is_all_or_nothing(void)
{
    struct bt_pages *p = NULL;
    uint32_t ids[8];

    CHECK_EQ(bt_pages_create(5, &p), BT_OK);
    CHECK(bt_pages_lease(p, 7, 3, ids));
    CHECK(!bt_pages_lease(p, 8, 3, ids + 3));
    CHECK_EQ(bt_pages_count(p, BT_PAGE_FREE), 2);
    CHECK(bt_pages_lease(p, 8, 2, ids + 3));
    CHECK(bt_pages_lease(p, 8, 0, ids));
    for (uint32_t i = 0; i < 5; i++) {
        for (uint32_t j = 0; j < i; j++) {
            CHECK(ids[i] != ids[j]);
        }
        CHECK_EQ(bt_pages_info(p, ids[i]).holder, i < 3 ? 7 : 8);
        CHECK_EQ(bt_pages_info(p, ids[i]).state, BT_PAGE_LEASED);
    }
    bt_pages_release(p, ids[1], 7);
    CHECK_EQ(bt_pages_count(p, BT_PAGE_FREE), 1);
    CHECK_EQ(bt_pages_info(p, ids[1]).holder, 0);
    CHECK_EQ(bt_pages_total(p), 5);
    bt_pages_destroy(p);
}

static void test_references(void)
{
    struct bt_pages *p = NULL;
    uint32_t id;

    CHECK_EQ(bt_pages_create(2, &p), BT_OK);
    CHECK(bt_pages_lease(p, 1, 1, &id));
    bt_pages_share(p, id, 2);
    CHECK_EQ(bt_pages_info(p, id).n_refs, 2);
    CHECK(bt_pages_info(p, id).holder == BT_PAGE_SHARED);
    bt_pages_release(p, id, 1);
    CHECK_EQ(bt_pages_info(p, id).state, BT_PAGE_LEASED);
    bt_pages_retire(p, id, 2);
    CHECK_EQ(bt_pages_info(p, id).state, BT_PAGE_CACHED);
    CHECK_EQ(bt_pages_count(p, BT_PAGE_CACHED), 1);
    bt_pages_share(p, id, 3);
    CHECK_EQ(bt_pages_info(p, id).holder, 3);
    bt_pages_retire(p, id, 3);
    bt_pages_evict(p, id);
    CHECK_EQ(bt_pages_count(p, BT_PAGE_FREE), 2);
    bt_pages_destroy(p);
}

static void test_quarantine(void)
{
    struct bt_pages *p = NULL;
    uint32_t id;

    CHECK_EQ(bt_pages_create(1, &p), BT_OK);
    CHECK(bt_pages_lease(p, 9, 1, &id));
    bt_pages_quarantine(p, id, 9);
    CHECK_EQ(bt_pages_count(p, BT_PAGE_QUARANTINED), 1);
    CHECK(!bt_pages_lease(p, 10, 1, &id));
    bt_pages_release(p, id, 9);
    CHECK(bt_pages_lease(p, 10, 1, &id));
    bt_pages_destroy(p);
}

static void test_out_of_memory(void)
{
    bool fired = true;

    for (uint64_t nth = 0; fired; nth++) {
        struct bt_pages *p = NULL;

        bt_test_fail_alloc(nth);
        enum bt_status st = bt_pages_create(16, &p);

        fired = bt_test_fail_alloc_off();
        CHECK_EQ(st, fired ? BT_ERR_NOMEM : BT_OK);
        bt_pages_destroy(p);
        CHECK_EQ(bt_test_live_bytes(), 0);
    }
}

int main(void)
{
    test_lease_is_all_or_nothing();
    test_references();
    test_quarantine();
    test_out_of_memory();
    return bt_test_done();
}
