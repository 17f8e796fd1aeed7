/* The tests that every wire must pass: greeting, control messages, pages, refusals, cancel, many at once. */

#include "tests/unit/transfer/xfer_suite.h"
#include "tests/unit/transfer/xfer_util.h"

/* A pool as the engine has it: [layer][page][bytes]. */
struct pool {
    uint8_t *mem;
    uint32_t n_layers, n_pages;
    size_t share;
};

/* Where all pools of a world with registered memory lie, one test's after the other. */
static struct bt_xfer_region region;
static size_t region_used;

static struct pool pool_new(uint32_t n_layers, uint32_t n_pages, size_t share)
{
    size_t bytes = n_layers * n_pages * share;
    struct pool p = {region.bytes > 0 ? (uint8_t *)region.base + region_used : malloc(bytes),
                     n_layers, n_pages, share};
    region_used += region.bytes > 0 ? (bytes + 4095) / 4096 * 4096 : 0;
    CHECK(region_used <= region.bytes);
    memset(p.mem, 0xee, n_layers * n_pages * share);
    return p;
}

static void pool_free(struct pool *p)
{
    if (region.bytes == 0) {
        free(p->mem);
    }
}

static uint8_t *pool_at(const struct pool *p, uint32_t layer, uint32_t page)
{
    return p->mem + ((size_t)layer * p->n_pages + page) * p->share;
}

static bool untouched(const uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (p[i] != 0xee) {
            return false;
        }
    }
    return true;
}

static struct bt_xfer_land_group land_group(const struct pool *p, const uint32_t *ids, uint32_t n)
{
    return (struct bt_xfer_land_group){
        .base = p->mem,
        .layer_stride = p->n_pages * p->share,
        .page_stride = p->share,
        .page_layer_bytes = p->share,
        .n_layers = p->n_layers,
        .n_pages = n,
        .page_ids = ids,
    };
}

static struct bt_xfer_push push_of(const struct pool *p, uint64_t peer, unsigned ticket,
                                   uint64_t generation, const uint32_t *ids, uint32_t n)
{
    struct bt_xfer_push u = {
        .generation = generation,
        .peer = peer,
        .tag = ticket,
        .n_layers = p->n_layers,
        .layer_stride = p->n_pages * p->share,
        .page_stride = p->share,
        .page_layer_bytes = p->share,
        .base = p->mem,
        .n_pages = n,
        .page_ids = ids,
    };
    ticket_set(u.ticket, ticket);
    return u;
}

static void check_idle(struct side *s)
{
    struct bt_xfer_stats st;
    uint64_t end = bt_clock_ns() + (uint64_t)WAIT_MS * BT_NS_PER_MS;
    do { /* heartbeats come and go, and tests need not wait for every PUSHED */
        usleep(1000);
        bt_xfer_stats(s->x, &st);
    } while (st.sends_in_flight + st.receives_in_flight + st.landings_open + st.pushes_open +
                     st.ctrl_bytes_waiting >
                 0 &&
             bt_clock_ns() < end);
    CHECK_EQ(st.sends_in_flight, 0);
    CHECK_EQ(st.receives_in_flight, 0);
    CHECK_EQ(st.landings_open, 0);
    CHECK_EQ(st.pushes_open, 0);
    CHECK_EQ(st.ctrl_bytes_waiting, 0);
}

/* Pages of a staged world went through slots, but those that both ends may take straight from where they lie. */
static void check_way(const struct world *w, struct side *s, bool checksum)
{
    struct bt_xfer_stats st;
    bt_xfer_stats(s->x, &st);
    bool direct = w->direct && w->proto == BT_XFER_PROTO_RNDV && !checksum;
    CHECK_STR(bt_xfer_memory_way(s->x), w->direct ? "registered" : w->staged ? "staged" : "");
    CHECK_EQ(st.direct_bytes, direct ? st.bytes_sent + st.bytes_received : 0);
    CHECK_EQ(st.staged_bytes, w->staged && !direct ? st.bytes_sent + st.bytes_received : 0);
    CHECK_EQ(st.staged_shares, w->staged && !direct ? st.shares_sent + st.shares_received : 0);
    CHECK(st.staged_batches <= st.staged_shares &&
          (st.staged_batches > 0) == (st.staged_bytes > 0));
}

static void close_and_check(struct side *p, struct side *d)
{
    check_idle(p);
    check_idle(d);
    side_stop(p);
    side_stop(d);
}

static void test_ctrl(const struct world *w)
{
    static const size_t sizes[] = {1, 63, 4096, 8192, 65535, BT_XFER_CTRL_MAX};
    struct bt_xfer_opts op = {0}, od = {0};
    struct side p, d;
    struct bt_xfer_event ev;
    uint64_t pd, dp;
    uint8_t *buf = malloc(BT_XFER_CTRL_MAX + 1);

    side_start(&d, w, &od, 2, true);
    side_start(&p, w, &op, 1, false);
    CHECK(bt_xfer_address(p.x)[0] == 0);
    CHECK(bt_xfer_address_is_loopback(bt_xfer_address(d.x)));
    CHECK(join(&p, &d, &pd, &dp));
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        page_fill(buf, sizes[i], 1, 2, 3, (unsigned)i);
        CHECK_EQ(bt_xfer_send_ctrl(p.x, pd, buf, sizes[i]), BT_OK);
        CHECK(side_wait(&d, BT_XFER_CTRL, &ev, WAIT_MS));
        CHECK(ev.peer == dp && ev.instance == 1 && ev.n_bytes == sizes[i]);
        CHECK(page_is(ev.data, ev.n_bytes, 1, 2, 3, (unsigned)i));
        CHECK_EQ(bt_xfer_send_ctrl(d.x, dp, ev.data, ev.n_bytes), BT_OK);
        bt_xfer_event_free(&ev);
        CHECK(side_wait(&p, BT_XFER_CTRL, &ev, WAIT_MS));
        CHECK(ev.instance == 2 && page_is(ev.data, ev.n_bytes, 1, 2, 3, (unsigned)i));
        bt_xfer_event_free(&ev);
    }
    for (unsigned i = 0; i < 500; i++) {
        CHECK_EQ(bt_xfer_send_ctrl(p.x, pd, buf, 100), BT_OK);
    }
    for (unsigned i = 0; i < 500; i++) {
        CHECK(side_wait(&d, BT_XFER_CTRL, &ev, WAIT_MS));
        bt_xfer_event_free(&ev);
    }
    CHECK_EQ(bt_xfer_send_ctrl(p.x, pd, buf, 0), BT_ERR_INVALID);
    CHECK_EQ(bt_xfer_send_ctrl(p.x, pd, buf, BT_XFER_CTRL_MAX + 1), BT_ERR_INVALID);
    CHECK_EQ(bt_xfer_send_ctrl(p.x, 999, buf, 5), BT_OK); /* nobody: nothing happens */

    CHECK_EQ(bt_xfer_disconnect(p.x, pd), BT_OK);
    CHECK(side_wait(&p, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
    CHECK(ev.peer == pd && ev.status == BT_ERR_CANCELLED);
    CHECK(side_wait(&d, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
    CHECK(ev.peer == dp && ev.instance == 1 && ev.status == BT_ERR_PEER_LOST);
    CHECK(join(&p, &d, &pd, &dp)); /* and again */
    close_and_check(&p, &d);
    free(buf);
}

/* Two groups with different shapes, holes, a first page, layer by layer in reverse. */
static void test_pages(const struct world *w, bool checksum)
{
    enum { N = 20, SHARE0 = 65536, SHARE1 = 1000 };
    struct bt_xfer_opts op = {0}, od = {.checksum = checksum};
    struct side p, d;
    struct bt_xfer_event ev;
    struct bt_xfer_stats st;
    uint64_t pd, dp;
    uint32_t src[N], dst[N], dst1[4] = {3, BT_XFER_NO_PAGE, 0, 2}, src1[3] = {1, 0, 2},
                             idx1[3] = {103, 100, 102};
    op.checksum = checksum;

    side_start(&d, w, &od, 2, true);
    side_start(&p, w, &op, 1, false);
    CHECK(join(&p, &d, &pd, &dp));
    struct pool s0 = pool_new(3, 40, SHARE0), t0 = pool_new(3, 40, SHARE0);
    struct pool s1 = pool_new(2, 4, SHARE1), t1 = pool_new(2, 4, SHARE1);
    for (uint32_t k = 0; k < N; k++) {
        src[k] = (k * 7 + 3) % 40;
        dst[k] = (k * 11 + 1) % 40;
        for (uint32_t l = 0; l < 3; l++) {
            page_fill(pool_at(&s0, l, src[k]), SHARE0, 7, 0, l, k);
        }
    }
    for (uint32_t k = 0; k < 3; k++) {
        for (uint32_t l = 0; l < 2; l++) {
            page_fill(pool_at(&s1, l, src1[k]), SHARE1, 7, 1, l, idx1[k]);
        }
    }
    struct bt_xfer_landing land = {.generation = 5, .peer = dp, .n_groups = 2};
    ticket_set(land.ticket, 7);
    land.group[0] = land_group(&t0, dst, N);
    land.group[1] = land_group(&t1, dst1, 4);
    land.group[1].first_page = 100;
    CHECK_EQ(bt_xfer_land_open(d.x, &land), BT_OK);
    grant(&d, dp, &p);

    for (uint32_t l = 3; l-- > 0;) {
        struct bt_xfer_push u = push_of(&s0, pd, 7, 5, src, N);
        u.tag = l;
        u.layer = l;
        u.n_layers = 1;
        u.base = pool_at(&s0, l, 0);
        CHECK_EQ(bt_xfer_push(p.x, &u), BT_OK);
    }
    struct bt_xfer_push u1 = push_of(&s1, pd, 7, 5, src1, 3);
    u1.group = 1;
    u1.page_index = idx1;
    u1.tag = 99;
    CHECK_EQ(bt_xfer_push(p.x, &u1), BT_OK);
    uint64_t bytes = 0, tags = 0;
    for (int i = 0; i < 4; i++) {
        CHECK(side_wait(&p, BT_XFER_PUSHED, &ev, WAIT_MS));
        CHECK_EQ(ev.status, BT_OK);
        bytes += ev.bytes;
        tags += ev.tag;
    }
    CHECK_EQ(tags, 99 + 3);
    CHECK_EQ(bytes, 3 * N * SHARE0 + 6 * SHARE1);

    uint64_t expect[BT_XFER_GROUPS_MAX] = {3 * N, 6};
    CHECK_EQ(bt_xfer_land_expect(d.x, land.ticket, 5, expect), BT_OK);
    CHECK(side_wait(&d, BT_XFER_LAND_FULL, &ev, WAIT_MS));
    CHECK(ev.status == BT_OK && ev.generation == 5 && memcmp(ev.ticket, land.ticket, 16) == 0);
    CHECK(ev.n_groups == 2 && ev.n_shares[0] == 3 * N && ev.n_shares[1] == 6 && ev.bytes == bytes);
    CHECK(side_wait(&d, BT_XFER_LANDED, &ev, WAIT_MS));
    for (uint32_t k = 0; k < N; k++) {
        for (uint32_t l = 0; l < 3; l++) {
            CHECK(page_is(pool_at(&t0, l, dst[k]), SHARE0, 7, 0, l, k));
        }
    }
    for (uint32_t k = 0; k < 3; k++) {
        for (uint32_t l = 0; l < 2; l++) {
            CHECK(page_is(pool_at(&t1, l, dst1[idx1[k] - 100]), SHARE1, 7, 1, l, idx1[k]));
        }
    }
    CHECK(untouched(pool_at(&t1, 0, 1), SHARE1) && untouched(pool_at(&t0, 2, 0), SHARE0));
    CHECK_EQ(bt_xfer_land_close(d.x, land.ticket, 5), BT_OK);
    CHECK(side_wait(&d, BT_XFER_LAND_CLOSED, &ev, WAIT_MS));
    CHECK_EQ(ev.status, BT_OK);
    check_idle(&p);
    check_idle(&d);
    check_way(w, &p, checksum);
    check_way(w, &d, checksum);
    bt_xfer_stats(p.x, &st);
    CHECK(st.staged_batches < st.staged_shares || st.staged_shares == 0); /* many at once */
    close_and_check(&p, &d);
    pool_free(&s0);
    pool_free(&t0);
    pool_free(&s1);
    pool_free(&t1);
}

static void test_hashed_pages(const struct world *w)
{
    test_pages(w, true);
}

static void test_plain_pages(const struct world *w)
{
    test_pages(w, false);
}

/* Everything that must be dropped, and nothing is written by it. */
static void test_refused_pages(const struct world *w)
{
    enum { SHARE = 8192 };
    struct bt_xfer_opts op = {0}, od = {0};
    struct side p, d;
    struct bt_xfer_event ev;
    struct bt_xfer_stats st;
    uint64_t pd, dp;
    uint32_t ids[4] = {0, 1, 2, 3}, land_ids[3] = {2, BT_XFER_NO_PAGE, 5};

    side_start(&d, w, &od, 2, true);
    side_start(&p, w, &op, 1, false);
    CHECK(join(&p, &d, &pd, &dp));
    struct pool s = pool_new(2, 4, SHARE), t = pool_new(2, 6, SHARE);
    for (uint32_t k = 0; k < 4; k++) {
        page_fill(pool_at(&s, 0, k), SHARE, 1, 0, 0, k);
        page_fill(pool_at(&s, 1, k), SHARE, 1, 0, 1, k);
    }
    struct bt_xfer_landing land = {.generation = 9, .peer = dp, .n_groups = 1};
    ticket_set(land.ticket, 1);
    land.group[0] = land_group(&t, land_ids, 3);
    CHECK_EQ(bt_xfer_land_open(d.x, &land), BT_OK);
    struct bt_xfer_landing other = land; /* somebody else's */
    ticket_set(other.ticket, 2);
    other.peer = dp + 100;
    CHECK_EQ(bt_xfer_land_open(d.x, &other), BT_OK);
    grant(&d, dp, &p);

    struct bt_xfer_push u = push_of(&s, pd, 1, 8, ids, 1); /* stale generation: 2 shares */
    CHECK_EQ(bt_xfer_push(p.x, &u), BT_OK);
    u = push_of(&s, pd, 3, 9, ids, 1); /* unknown ticket: 2 */
    CHECK_EQ(bt_xfer_push(p.x, &u), BT_OK);
    u = push_of(&s, pd, 2, 9, ids, 1); /* other peer's landing: 2 */
    CHECK_EQ(bt_xfer_push(p.x, &u), BT_OK);
    u = push_of(&s, pd, 1, 9, ids + 1, 1); /* a hole: 2 */
    u.first_page = 1;
    CHECK_EQ(bt_xfer_push(p.x, &u), BT_OK);
    u = push_of(&s, pd, 1, 9, ids, 1); /* page out of range: 2 */
    u.first_page = 3;
    CHECK_EQ(bt_xfer_push(p.x, &u), BT_OK);
    u = push_of(&s, pd, 1, 9, ids, 1); /* layer 1 fits, 2 does not: 1 + the good one */
    u.layer = 1;
    CHECK_EQ(bt_xfer_push(p.x, &u), BT_OK);
    u = push_of(&s, pd, 1, 9, ids, 1); /* group out of range: 2 */
    u.group = 1;
    CHECK_EQ(bt_xfer_push(p.x, &u), BT_OK);
    u = push_of(&s, pd, 1, 9, ids, 1); /* wrong size: 2 */
    u.page_layer_bytes = SHARE - 1;
    CHECK_EQ(bt_xfer_push(p.x, &u), BT_OK);
    u = push_of(&s, pd, 1, 9, ids + 2, 1); /* good: page 2, both layers; sent twice: 2 duplicates */
    u.first_page = 2;
    CHECK_EQ(bt_xfer_push(p.x, &u), BT_OK);
    CHECK_EQ(bt_xfer_push(p.x, &u), BT_OK);
    for (int i = 0; i < 10; i++) {
        CHECK(side_wait(&p, BT_XFER_PUSHED, &ev, WAIT_MS));
        CHECK_EQ(ev.status, BT_OK);
    }
    uint64_t expect[BT_XFER_GROUPS_MAX] = {3};
    CHECK_EQ(bt_xfer_land_expect(d.x, land.ticket, 9, expect), BT_OK);
    CHECK(side_wait(&d, BT_XFER_LAND_FULL, &ev, WAIT_MS));
    CHECK(ev.status == BT_OK && ev.bytes == 3 * SHARE);
    CHECK_EQ(bt_xfer_send_ctrl(p.x, pd, "sync", 4), BT_OK);
    CHECK(side_wait(&d, BT_XFER_CTRL, &ev, WAIT_MS));
    bt_xfer_event_free(&ev);
    u = push_of(&s, pd, 1, 9, ids, 1); /* layer 0 of page 0 after FULL: more than announced */
    u.n_layers = 1;
    CHECK_EQ(bt_xfer_push(p.x, &u), BT_OK);
    CHECK(side_wait(&p, BT_XFER_PUSHED, &ev, WAIT_MS));
    CHECK_EQ(bt_xfer_send_ctrl(p.x, pd, "sync", 4), BT_OK);
    CHECK(side_wait(&d, BT_XFER_CTRL, &ev, WAIT_MS));
    bt_xfer_event_free(&ev);

    CHECK_EQ(bt_xfer_land_close(d.x, land.ticket, 9), BT_OK);
    CHECK_EQ(bt_xfer_land_close(d.x, other.ticket, 9), BT_OK);
    CHECK(side_wait(&d, BT_XFER_LAND_CLOSED, &ev, WAIT_MS));
    CHECK(side_wait(&d, BT_XFER_LAND_CLOSED, &ev, WAIT_MS));
    check_idle(&d);
    bt_xfer_stats(d.x, &st);
    CHECK_EQ(st.drop_generation, 2);
    CHECK_EQ(st.drop_unknown, 2);
    CHECK_EQ(st.drop_peer, 2);
    CHECK_EQ(st.drop_range, 2 + 2 + 1 + 2 + 2 + 1);
    CHECK_EQ(st.drop_duplicate, 2);
    CHECK_EQ(st.drop_malformed, 0);
    CHECK_EQ(st.shares_received, 3);
    CHECK(page_is(pool_at(&t, 1, 2), SHARE, 1, 0, 0, 0)); /* sent as layer 1 */
    CHECK(page_is(pool_at(&t, 0, 5), SHARE, 1, 0, 0, 2));
    CHECK(page_is(pool_at(&t, 1, 5), SHARE, 1, 0, 1, 2));
    CHECK(untouched(pool_at(&t, 0, 0), 5 * SHARE) && untouched(pool_at(&t, 1, 0), 2 * SHARE));
    CHECK(untouched(pool_at(&t, 1, 3), 2 * SHARE));
    close_and_check(&p, &d);
    pool_free(&s);
    pool_free(&t);
}

static void test_zero_and_misuse(const struct world *w)
{
    struct bt_xfer_opts op = {0}, od = {.landings_max = 2};
    struct side p, d;
    struct bt_xfer_event ev;
    uint64_t pd, dp;
    uint64_t none[BT_XFER_GROUPS_MAX] = {0};
    uint32_t ids[1] = {0};

    side_start(&d, w, &od, 2, true);
    side_start(&p, w, &op, 1, false);
    CHECK(join(&p, &d, &pd, &dp));
    struct pool t = pool_new(1, 1, 4096);
    struct bt_xfer_landing land = {.generation = 1, .peer = dp, .n_groups = 1};
    ticket_set(land.ticket, 1);
    land.group[0] = land_group(&t, NULL, 0);
    CHECK_EQ(bt_xfer_land_open(d.x, &land), BT_OK);
    CHECK_EQ(bt_xfer_land_expect(d.x, land.ticket, 1, none), BT_OK);
    CHECK(side_wait(&d, BT_XFER_LAND_FULL, &ev, WAIT_MS)); /* all was cached: full at once */
    CHECK_EQ(ev.status, BT_OK);
    CHECK_EQ(bt_xfer_land_open(d.x, &land), BT_OK); /* the same again */
    CHECK(side_wait(&d, BT_XFER_LAND_CLOSED, &ev, WAIT_MS));
    CHECK_EQ(ev.status, BT_ERR_INVALID);
    land.generation = 2;
    CHECK_EQ(bt_xfer_land_open(d.x, &land),
             BT_OK); /* another generation of the ticket may live beside it */
    land.generation = 3;
    CHECK_EQ(bt_xfer_land_open(d.x, &land), BT_ERR_BUSY);
    CHECK_EQ(bt_xfer_land_close(d.x, land.ticket, 1), BT_OK);
    CHECK_EQ(bt_xfer_land_close(d.x, land.ticket, 2), BT_OK);
    CHECK_EQ(bt_xfer_land_close(d.x, land.ticket, 77), BT_OK); /* unknown: nothing */
    CHECK(side_wait(&d, BT_XFER_LAND_CLOSED, &ev, WAIT_MS));
    CHECK(side_wait(&d, BT_XFER_LAND_CLOSED, &ev, WAIT_MS));
    land.group[0].n_layers = 0;
    CHECK_EQ(bt_xfer_land_open(d.x, &land), BT_ERR_INVALID);

    struct bt_xfer_push u = push_of(&t, pd, 1, 1, ids, 0);
    CHECK_EQ(bt_xfer_push(p.x, &u), BT_OK);
    CHECK(side_wait(&p, BT_XFER_PUSHED, &ev, WAIT_MS));
    CHECK(ev.status == BT_OK && ev.bytes == 0);
    u = push_of(&t, pd + 50, 1, 1, ids, 1);
    CHECK_EQ(bt_xfer_push(p.x, &u), BT_OK);
    CHECK(side_wait(&p, BT_XFER_PUSHED, &ev, WAIT_MS));
    CHECK_EQ(ev.status, BT_ERR_PEER_LOST);
    u.page_layer_bytes = 0;
    CHECK_EQ(bt_xfer_push(p.x, &u), BT_ERR_INVALID);
    close_and_check(&p, &d);
    pool_free(&t);
}

/* A large push under a small window is cancelled: few bytes leave, every push ends once. */
static void test_cancel(const struct world *w)
{
    enum { N = 64, SHARE = 262144, PUSHES = 40 };
    struct bt_xfer_opts op = {.window_bytes = 2 * SHARE}, od = {0};
    struct side p, d;
    struct bt_xfer_event ev;
    uint64_t pd, dp, sent = 0;
    uint32_t ids[N];
    unsigned cancelled = 0;

    side_start(&d, w, &od, 2, true);
    side_start(&p, w, &op, 1, false);
    CHECK(join(&p, &d, &pd, &dp));
    struct pool s = pool_new(1, N, SHARE), t = pool_new(1, N, SHARE);
    for (uint32_t k = 0; k < N; k++) {
        ids[k] = k;
    }
    struct bt_xfer_landing land = {.generation = 1, .peer = dp, .n_groups = 1};
    ticket_set(land.ticket, 1);
    land.group[0] = land_group(&t, ids, N);
    CHECK_EQ(bt_xfer_land_open(d.x, &land), BT_OK);
    grant(&d, dp, &p);
    for (unsigned i = 0; i < PUSHES; i++) {
        struct bt_xfer_push u = push_of(&s, pd, 1, 1, ids, N);
        CHECK_EQ(bt_xfer_push(p.x, &u), BT_OK);
    }
    CHECK(side_wait(&d, BT_XFER_LANDED, &ev, WAIT_MS));
    CHECK_EQ(bt_xfer_push_cancel(p.x, land.ticket), BT_OK);
    CHECK_EQ(bt_xfer_land_close(d.x, land.ticket, 1), BT_OK);
    CHECK(side_wait(&d, BT_XFER_LAND_CLOSED, &ev, WAIT_MS));
    memset(t.mem, 0xee, (size_t)N * SHARE); /* the pages are ours again */
    for (unsigned i = 0; i < PUSHES; i++) {
        CHECK(side_wait(&p, BT_XFER_PUSHED, &ev, WAIT_MS));
        CHECK(ev.status == BT_OK || ev.status == BT_ERR_CANCELLED);
        cancelled += ev.status == BT_ERR_CANCELLED;
        sent += ev.bytes;
    }
    if (w->hub == NULL ||
        w->proto != BT_XFER_PROTO_EAGER) { /* the eager twin takes everything at once */
        CHECK(cancelled > 0);
        CHECK(sent < (uint64_t)PUSHES * N * SHARE);
    }
    check_idle(&p);
    CHECK_EQ(side_count(&p, BT_XFER_PUSHED), 0);
    CHECK(untouched(t.mem, (size_t)N * SHARE));
    close_and_check(&p, &d);
    pool_free(&s);
    pool_free(&t);
}

enum cut { CUT_BY_P, CUT_BY_D, CUT_DEVICE_OF_P, CUT_DEVICE_OF_D, CUTS };

/* The connection is cut while pages fly, by one side or because its device fails: every push and landing still ends, once. */
static void test_cut_in_flight(const struct world *w, enum cut cut)
{
    enum { N = 64, SHARE = 131072, PUSHES = 8 };
    struct bt_xfer_opts op = {0}, od = {0};
    struct side p, d;
    struct bt_xfer_event ev;
    uint64_t pd, dp;
    uint32_t ids[N];

    side_start(&d, w, &od, 2, true);
    side_start(&p, w, &op, 1, false);
    if (cut == CUT_DEVICE_OF_P || cut == CUT_DEVICE_OF_D) {
        (cut == CUT_DEVICE_OF_P ? &p : &d)->device->fail_at = 20;
    }
    CHECK(join(&p, &d, &pd, &dp));
    struct pool s = pool_new(1, N, SHARE), t = pool_new(1, N, SHARE);
    for (uint32_t k = 0; k < N; k++) {
        ids[k] = k;
    }
    struct bt_xfer_landing land = {.peer = dp, .n_groups = 1};
    land.group[0] = land_group(&t, ids, N);
    for (unsigned i = 0; i < PUSHES; i++) {
        ticket_set(land.ticket, i);
        CHECK_EQ(bt_xfer_land_open(d.x, &land), BT_OK);
    }
    grant(&d, dp, &p);
    for (unsigned i = 0; i < PUSHES; i++) {
        struct bt_xfer_push u = push_of(&s, pd, i, 0, ids, N);
        CHECK_EQ(bt_xfer_push(p.x, &u), BT_OK);
    }
    if (cut == CUT_BY_P || cut == CUT_BY_D) {
        CHECK(side_wait(&d, BT_XFER_LANDED, &ev, WAIT_MS));
        CHECK_EQ(cut == CUT_BY_P ? bt_xfer_disconnect(p.x, pd) : bt_xfer_disconnect(d.x, dp),
                 BT_OK);
    }
    CHECK(side_wait(&p, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
    CHECK(side_wait(&d, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
    for (unsigned i = 0; i < PUSHES; i++) {
        CHECK(side_wait(&p, BT_XFER_PUSHED, &ev, WAIT_MS));
        ticket_set(land.ticket, i);
        CHECK_EQ(bt_xfer_land_close(d.x, land.ticket, 0), BT_OK);
        CHECK(side_wait(&d, BT_XFER_LAND_CLOSED, &ev, WAIT_MS));
    }
    memset(t.mem, 0xee, (size_t)N * SHARE);
    CHECK(join(&p, &d, &pd, &dp)); /* both sides go on */
    CHECK(untouched(t.mem, (size_t)N * SHARE));
    CHECK_EQ(side_count(&p, BT_XFER_PUSHED), 0);
    close_and_check(&p, &d);
    pool_free(&s);
    pool_free(&t);
}

static void test_many_tickets(const struct world *w)
{
    enum { TICKETS = 64, N = 6, LAYERS = 3, SHARE = 16384 };
    struct bt_xfer_opts op = {0}, od = {0};
    struct side p, d;
    struct bt_xfer_event ev;
    uint64_t pd, dp;
    uint32_t ids[TICKETS][N], back[TICKETS][N];
    uint64_t expect[BT_XFER_GROUPS_MAX] = {N * LAYERS};

    side_start(&d, w, &od, 2, true);
    side_start(&p, w, &op, 1, false);
    CHECK(join(&p, &d, &pd, &dp));
    struct pool s = pool_new(LAYERS, TICKETS * N, SHARE), t = pool_new(LAYERS, TICKETS * N, SHARE);
    for (unsigned i = 0; i < TICKETS; i++) {
        struct bt_xfer_landing land = {.generation = i, .peer = dp, .n_groups = 1};
        for (uint32_t k = 0; k < N; k++) {
            ids[i][k] = k * TICKETS + i;
            back[i][k] = (TICKETS - 1 - i) * N + k;
            for (uint32_t l = 0; l < LAYERS; l++) {
                page_fill(pool_at(&s, l, ids[i][k]), SHARE, i, 0, l, k);
            }
        }
        ticket_set(land.ticket, i);
        land.group[0] = land_group(&t, back[i], N);
        CHECK_EQ(bt_xfer_land_open(d.x, &land), BT_OK);
        CHECK_EQ(bt_xfer_land_expect(d.x, land.ticket, i, expect),
                 BT_OK); /* the hand-off may overtake */
    }
    grant(&d, dp, &p);
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (unsigned i = 0; i < TICKETS; i++) {
            struct bt_xfer_push u = push_of(&s, pd, i, i, ids[i], N);
            u.layer = l;
            u.n_layers = 1;
            u.base = pool_at(&s, l, 0);
            CHECK_EQ(bt_xfer_push(p.x, &u), BT_OK);
        }
    }
    for (unsigned n = 0; n < TICKETS; n++) {
        CHECK(side_wait(&d, BT_XFER_LAND_FULL, &ev, WAIT_MS));
        CHECK_EQ(ev.status, BT_OK);
        unsigned i = (unsigned)ev.generation;
        bool right = i < TICKETS;
        for (uint32_t k = 0; right && k < N * LAYERS; k++) {
            right = page_is(pool_at(&t, k / N, back[i][k % N]), SHARE, i, 0, k / N, k % N);
        }
        CHECK(right);
        CHECK_EQ(bt_xfer_land_close(d.x, ev.ticket, ev.generation), BT_OK);
    }
    for (unsigned n = 0; n < TICKETS; n++) {
        CHECK(side_wait(&d, BT_XFER_LAND_CLOSED, &ev, WAIT_MS));
    }
    for (unsigned n = 0; n < TICKETS * LAYERS; n++) {
        CHECK(side_wait(&p, BT_XFER_PUSHED, &ev, WAIT_MS));
    }
    close_and_check(&p, &d);
    pool_free(&s);
    pool_free(&t);
}

static void refused(const struct world *w, const char *fingerprint, const char *layout,
                    uint64_t expect, const struct bt_gate_token *token, const char *word)
{
    struct bt_xfer_opts op = {.fingerprint = fingerprint, .layout = layout}, od = {0};
    struct side p, d;
    struct bt_xfer_event ev;
    struct bt_xfer_stats st;
    uint64_t pd;

    side_start(&d, w, &od, 2, true);
    side_start(&p, w, &op, 1, false);
    CHECK_EQ(bt_xfer_connect(p.x, bt_xfer_address(d.x), expect, token, &pd), BT_OK);
    CHECK(side_wait(&p, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
    CHECK(ev.peer == pd && ev.status == BT_ERR_PROTOCOL);
    CHECK(strstr(ev.text, word) != NULL);
    CHECK_EQ(side_count(&p, BT_XFER_PEER_UP), 0);
    CHECK_EQ(side_count(&d, BT_XFER_PEER_UP) + side_count(&d, BT_XFER_PEER_DOWN), 0);
    bt_xfer_stats(d.x, &st);
    CHECK_EQ(st.peers_up, 0);
    close_and_check(&p, &d);
}

static void test_refusals(const struct world *w)
{
    struct bt_xfer_opts op = {0};
    struct side p;
    struct bt_xfer_event ev;
    uint64_t pd;

    refused(w, "other-model", NULL, 2, &test_token, "other-model");
    refused(w, NULL, "k8v8", 2, &test_token, "layout");
    refused(w, NULL, NULL, 77, &test_token, "instance");
    refused(w, NULL, NULL, 2, &(struct bt_gate_token){{1, 2, 3}}, "token");
    refused(w, NULL, NULL, 2, &(struct bt_gate_token){{0}}, "token");
    side_start(&p, w, &op, 1, false);
    CHECK_EQ(bt_xfer_connect(p.x, "127.0.0.1:1", 0, &test_token, &pd), BT_ERR_INVALID); /* whom? */
    CHECK_EQ(
        bt_xfer_connect(p.x, w->hub != NULL ? "loop:nobody" : "127.0.0.1:1", 7, &test_token, &pd),
        BT_OK);
    CHECK(side_wait(&p, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
    CHECK(ev.peer == pd && ev.status == BT_ERR_PEER_LOST);
    CHECK_EQ(bt_xfer_connect(p.x, "not an address", 7, &test_token, &pd), BT_OK);
    CHECK(side_wait(&p, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
    side_stop(&p);
}

/* destroy with everything open: nothing leaks, nothing hangs. */
static void test_destroy_busy(const struct world *w)
{
    enum { N = 64, SHARE = 65536 };
    struct bt_xfer_opts op = {0}, od = {0};
    struct side p, d;
    struct bt_xfer_event ev;
    uint64_t pd, dp;
    uint32_t ids[N];

    side_start(&d, w, &od, 2, true);
    side_start(&p, w, &op, 1, false);
    CHECK(join(&p, &d, &pd, &dp));
    struct pool s = pool_new(1, N, SHARE), t = pool_new(1, N, SHARE);
    for (uint32_t k = 0; k < N; k++) {
        ids[k] = k;
    }
    struct bt_xfer_landing land = {.generation = 1, .peer = dp, .n_groups = 1};
    ticket_set(land.ticket, 1);
    land.group[0] = land_group(&t, ids, N);
    CHECK_EQ(bt_xfer_land_open(d.x, &land), BT_OK);
    grant(&d, dp, &p);
    for (unsigned i = 0; i < 20; i++) {
        struct bt_xfer_push u = push_of(&s, pd, 1, 1, ids, N);
        CHECK_EQ(bt_xfer_push(p.x, &u), BT_OK);
        CHECK_EQ(bt_xfer_send_ctrl(p.x, pd, s.mem, 1000), BT_OK);
    }
    CHECK(side_wait(&d, BT_XFER_LANDED, &ev, WAIT_MS));
    side_stop(&d);
    CHECK(side_wait(&p, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
    side_stop(&p);
    pool_free(&s);
    pool_free(&t);
}

int xfer_suite(const struct world *w)
{
    static void (*const tests[])(const struct world *) = {
        test_ctrl,   test_hashed_pages, test_plain_pages, test_refused_pages, test_zero_and_misuse,
        test_cancel, test_many_tickets, test_refusals,    test_destroy_busy,
    };
    region = w->direct ? w->region : (struct bt_xfer_region){0};
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        uint64_t t0 = bt_clock_ns();
        region_used = 0;
        tests[i](w);
        printf("  suite %zu: %u ms\n", i, (unsigned)((bt_clock_ns() - t0) / BT_NS_PER_MS));
        fflush(stdout);
    }
    for (int cut = 0; cut < (w->staged && !w->direct ? CUTS : CUT_DEVICE_OF_P); cut++) {
        region_used = 0;
        test_cut_in_flight(w, (enum cut)cut);
    }
    return bt_test_failures;
}
