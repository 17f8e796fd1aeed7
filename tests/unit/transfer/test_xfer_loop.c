/* The protocol over the loopback twin: the common suite, then what needs faults: frozen and killed peers, receives
 * that do not end, lost, doubled, reordered and damaged pages. Run under TSan as well (UCX cannot be). */

#include "tests/unit/transfer/xfer_suite.h"
#include "tests/unit/transfer/xfer_util.h"

enum { SHARE = 4096, PAGES = 32 };

struct pair {
    struct world w;
    struct side p, d;
    uint64_t pd, dp;
    uint8_t *src, *dst;
    uint32_t ids[PAGES];
};

static void pair_start(struct pair *s, const struct bt_xfer_faults *faults,
                       const struct bt_xfer_opts *common)
{
    struct bt_xfer_opts op = {0}, od = {0};
    memset(s, 0, sizeof(*s));
    CHECK_EQ(bt_xfer_hub_create(NULL, &s->w.hub), BT_OK);
    if (common != NULL) {
        op = od = *common;
        op.stall_ns = 0; /* only D's may run out first */
    }
    side_start(&s->d, &s->w, &od, 2, true);
    side_start(&s->p, &s->w, &op, 1, false);
    CHECK(join(&s->p, &s->d, &s->pd, &s->dp));
    if (faults != NULL) {
        bt_xfer_hub_set_faults(s->w.hub, faults);
    }
    s->src = malloc(PAGES * SHARE);
    s->dst = malloc(PAGES * SHARE);
    memset(s->dst, 0xee, PAGES * SHARE);
    for (uint32_t k = 0; k < PAGES; k++) {
        s->ids[k] = k;
        page_fill(s->src + k * SHARE, SHARE, 1, 0, 0, k);
    }
}

static void pair_stop(struct pair *s)
{
    side_stop(&s->p);
    side_stop(&s->d);
    bt_xfer_hub_destroy(s->w.hub);
    free(s->src);
    free(s->dst);
}

static struct bt_xfer_landing landing_of(const struct pair *s)
{
    struct bt_xfer_landing l = {.generation = 4, .peer = s->dp, .n_groups = 1};
    ticket_set(l.ticket, 1);
    l.group[0] = (struct bt_xfer_land_group){.base = s->dst,
                                             .page_stride = SHARE,
                                             .page_layer_bytes = SHARE,
                                             .n_layers = 1,
                                             .n_pages = PAGES,
                                             .page_ids = s->ids};
    return l;
}

static void push_all(struct pair *s)
{
    struct bt_xfer_push u = {.generation = 4,
                             .peer = s->pd,
                             .tag = 5,
                             .n_layers = 1,
                             .page_stride = SHARE,
                             .page_layer_bytes = SHARE,
                             .base = s->src,
                             .n_pages = PAGES,
                             .page_ids = s->ids};
    ticket_set(u.ticket, 1);
    CHECK_EQ(bt_xfer_push(s->p.x, &u), BT_OK);
}

/* Wires that double, delay and reorder: each page is placed once, and right. */
static void test_disorder(void)
{
    static const uint64_t expect[BT_XFER_GROUPS_MAX] = {PAGES};
    for (uint64_t seed = 1; seed <= 8; seed++) {
        struct bt_xfer_faults f = {.seed = seed,
                                   .duplicate_ppm = 200000,
                                   .reorder_ppm = 300000,
                                   .delay_ns_max = 3 * BT_NS_PER_MS};
        struct pair s;
        struct bt_xfer_event ev;
        struct bt_xfer_stats st;
        pair_start(&s, &f, NULL);
        struct bt_xfer_landing l = landing_of(&s);
        CHECK_EQ(bt_xfer_land_open(s.d.x, &l), BT_OK);
        CHECK_EQ(bt_xfer_land_expect(s.d.x, l.ticket, 4, expect), BT_OK);
        grant(&s.d, s.dp, &s.p);
        push_all(&s);
        CHECK(side_wait(&s.d, BT_XFER_LAND_FULL, &ev, WAIT_MS));
        CHECK_EQ(ev.status, BT_OK);
        for (uint32_t k = 0; k < PAGES; k++) {
            CHECK(page_is(s.dst + k * SHARE, SHARE, 1, 0, 0, k));
        }
        CHECK_EQ(bt_xfer_land_close(s.d.x, l.ticket, 4), BT_OK);
        CHECK(side_wait(&s.d, BT_XFER_LAND_CLOSED, &ev, WAIT_MS));
        CHECK(side_wait(&s.p, BT_XFER_PUSHED, &ev, WAIT_MS));
        bt_xfer_stats(s.d.x, &st);
        CHECK_EQ(st.shares_received, PAGES);
        pair_stop(&s);
    }
}

/* Pages that vanish: never FULL; the caller gives up and gets its pages back. */
static void test_lost_pages(void)
{
    static const uint64_t expect[BT_XFER_GROUPS_MAX] = {PAGES};
    struct bt_xfer_faults f = {.seed = 3, .drop_ppm = 400000};
    struct pair s;
    struct bt_xfer_event ev;
    pair_start(&s, &f, NULL);
    struct bt_xfer_landing l = landing_of(&s);
    CHECK_EQ(bt_xfer_land_open(s.d.x, &l), BT_OK);
    CHECK_EQ(bt_xfer_land_expect(s.d.x, l.ticket, 4, expect), BT_OK);
    grant(&s.d, s.dp, &s.p);
    push_all(&s);
    CHECK(side_wait(&s.p, BT_XFER_PUSHED, &ev, WAIT_MS));
    CHECK_EQ(ev.status, BT_OK); /* sent is not delivered */
    CHECK(!side_wait(&s.d, BT_XFER_LAND_FULL, &ev, 100));
    CHECK_EQ(bt_xfer_land_close(s.d.x, l.ticket, 4), BT_OK);
    CHECK(side_wait(&s.d, BT_XFER_LAND_CLOSED, &ev, WAIT_MS));
    CHECK(ev.n_shares[0] > 0 && ev.n_shares[0] < PAGES);
    pair_stop(&s);
}

/* A landing is closed while receives into it hang: LAND_CLOSED waits; in the end the stall resets the connection. */
static void test_close_while_receiving(bool let_go)
{
    struct bt_xfer_opts o = {.stall_ns = let_go ? 0 : 1500 * BT_NS_PER_MS};
    struct pair s;
    struct bt_xfer_event ev;
    struct bt_xfer_stats st;
    pair_start(&s, NULL, &o);
    struct bt_xfer_landing l = landing_of(&s);
    bt_xfer_hub_hold_receives(s.w.hub, 2, true);
    CHECK_EQ(bt_xfer_land_open(s.d.x, &l), BT_OK);
    grant(&s.d, s.dp, &s.p);
    push_all(&s);
    do {
        usleep(1000);
        bt_xfer_stats(s.d.x, &st);
    } while (st.receives_in_flight < PAGES);
    CHECK_EQ(bt_xfer_land_close(s.d.x, l.ticket, 4), BT_OK);
    CHECK(!side_wait(&s.d, BT_XFER_LAND_CLOSED, &ev, 100));
    if (let_go) {
        bt_xfer_hub_hold_receives(s.w.hub, 2, false);
        CHECK(side_wait(&s.d, BT_XFER_LAND_CLOSED, &ev, WAIT_MS));
        CHECK(side_wait(&s.p, BT_XFER_PUSHED, &ev, WAIT_MS));
        CHECK_EQ(ev.status, BT_OK);
        CHECK_EQ(side_count(&s.d, BT_XFER_PEER_DOWN), 0);
    } else {
        CHECK(side_wait(&s.d, BT_XFER_PEER_DOWN, &ev, WAIT_MS) && ev.status == BT_ERR_TIMEOUT);
        CHECK(side_wait(&s.d, BT_XFER_LAND_CLOSED, &ev, WAIT_MS));
        memset(s.dst, 0xee, PAGES * SHARE);
        bt_xfer_hub_hold_receives(s.w.hub, 2, false);
        CHECK(side_wait(&s.p, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
        CHECK(side_wait(&s.p, BT_XFER_PUSHED, &ev, WAIT_MS));
        CHECK_EQ(ev.status, BT_ERR_PEER_LOST);
        for (size_t i = 0; i < PAGES * SHARE; i++) {
            if (s.dst[i] != 0xee) {
                CHECK(false);
                break;
            }
        }
    }
    pair_stop(&s);
}

/* One side stands still longer than the lease: both get DOWN, and join again. */
static void test_frozen(uint64_t who)
{
    struct bt_xfer_opts o = {.heartbeat_ns = 20 * BT_NS_PER_MS, .lease_ns = 900 * BT_NS_PER_MS};
    struct pair s;
    struct bt_xfer_event ev;
    pair_start(&s, NULL, &o);
    struct bt_xfer_landing l = landing_of(&s);
    CHECK(!side_wait(&s.p, BT_XFER_PEER_DOWN, &ev, 1000)); /* heartbeats keep it up */
    CHECK_EQ(bt_xfer_land_open(s.d.x, &l), BT_OK);
    bt_xfer_hub_freeze(s.w.hub, who, true);
    push_all(&s);
    struct side *awake = who == 1 ? &s.d : &s.p;
    struct side *asleep = who == 1 ? &s.p : &s.d;
    CHECK(side_wait(awake, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
    CHECK_EQ(ev.status, BT_ERR_TIMEOUT);
    CHECK_EQ(bt_xfer_land_close(s.d.x, l.ticket, 4), BT_OK);
    bt_xfer_hub_freeze(s.w.hub, who, false);
    CHECK(side_wait(asleep, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
    CHECK(side_wait(&s.d, BT_XFER_LAND_CLOSED, &ev, WAIT_MS));
    CHECK(side_wait(&s.p, BT_XFER_PUSHED, &ev, WAIT_MS));
    CHECK(join(&s.p, &s.d, &s.pd, &s.dp));
    pair_stop(&s);
}

static void test_killed(uint64_t who)
{
    struct pair s;
    struct bt_xfer_event ev;
    pair_start(&s, NULL, NULL);
    struct bt_xfer_landing l = landing_of(&s);
    CHECK_EQ(bt_xfer_land_open(s.d.x, &l), BT_OK);
    push_all(&s);
    bt_xfer_hub_kill(s.w.hub, who);
    CHECK(side_wait(who == 1 ? &s.d : &s.p, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
    CHECK_EQ(ev.status, BT_ERR_PEER_LOST);
    CHECK_EQ(bt_xfer_land_close(s.d.x, l.ticket, 4), BT_OK);
    CHECK(side_wait(&s.d, BT_XFER_LAND_CLOSED, &ev, WAIT_MS));
    CHECK(side_wait(&s.p, BT_XFER_PUSHED, &ev, WAIT_MS));
    CHECK_EQ(bt_xfer_connect(s.p.x, "loop:2", 2, &test_token, &s.pd), BT_OK);
    CHECK(side_wait(&s.p, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
    pair_stop(&s);
}

/* Damage: the test page refuses the pair; with checksums on, a damaged page resets the connection. */
static void test_damage(void)
{
    struct bt_xfer_faults f = {.seed = 1, .corrupt_ppm = 1000000};
    struct bt_xfer_opts op = {0}, od = {0}, sum = {.checksum = true};
    struct world w = {0};
    struct side p, d;
    struct bt_xfer_event ev;
    struct bt_xfer_stats st;
    uint64_t id;
    CHECK_EQ(bt_xfer_hub_create(&f, &w.hub), BT_OK);
    side_start(&d, &w, &od, 2, true);
    side_start(&p, &w, &op, 1, false);
    CHECK_EQ(bt_xfer_connect(p.x, "loop:2", 2, &test_token, &id), BT_OK);
    CHECK(side_wait(&p, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
    CHECK_EQ(ev.status, BT_ERR_PROTOCOL);
    CHECK(strstr(ev.text, "test page") != NULL);
    side_stop(&p);
    side_stop(&d);
    bt_xfer_hub_destroy(w.hub);

    struct pair s;
    pair_start(&s, &f, &sum);
    struct bt_xfer_landing l = landing_of(&s);
    CHECK_EQ(bt_xfer_land_open(s.d.x, &l), BT_OK);
    grant(&s.d, s.dp, &s.p);
    push_all(&s);
    CHECK(side_wait(&s.d, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
    CHECK_EQ(ev.status, BT_ERR_PROTOCOL);
    CHECK_EQ(bt_xfer_land_close(s.d.x, l.ticket, 4), BT_OK);
    CHECK(side_wait(&s.d, BT_XFER_LAND_CLOSED, &ev, WAIT_MS));
    CHECK_EQ(ev.n_shares[0], 0);
    bt_xfer_stats(s.d.x, &st);
    CHECK(st.drop_checksum > 0);
    pair_stop(&s);
}

/* Nobody reads: the peer is cut off at the limit instead of filling the memory. */
static void test_unread_ctrl(void)
{
    struct bt_xfer_opts o = {.ctrl_bytes_max = 256 * 1024};
    static uint8_t msg[16384];
    struct pair s;
    struct bt_xfer_event ev;
    pair_start(&s, NULL, &o);
    /* Until it is cut off: a sender whose thread gets no CPU is BUSY at the same limit, and has sent nothing too much. */
    for (int i = 0; i < WAIT_MS / 10 && !side_wait(&s.p, BT_XFER_PEER_DOWN, &ev, 10); i++) {
        enum bt_status st = bt_xfer_send_ctrl(s.p.x, s.pd, msg, sizeof(msg));
        CHECK(st == BT_OK || st == BT_ERR_BUSY || st == BT_ERR_PEER_LOST);
    }
    CHECK(side_wait(&s.d, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
    CHECK_EQ(ev.status, BT_ERR_BUSY);
    pair_stop(&s);
}

/* The new connection of a restarted dialler replaces the one whose death has not been noticed. */
static void test_replaced(void)
{
    struct pair s;
    struct bt_xfer_event ev;
    uint64_t again;
    pair_start(&s, NULL, NULL);
    CHECK_EQ(bt_xfer_connect(s.p.x, "loop:2", 2, &test_token, &again), BT_OK);
    CHECK(side_wait(&s.d, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
    CHECK_EQ(ev.peer, s.dp);
    CHECK(side_wait(&s.d, BT_XFER_PEER_UP, &ev, WAIT_MS));
    CHECK(side_wait(&s.p, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
    CHECK_EQ(ev.peer, s.pd);
    CHECK(side_wait(&s.p, BT_XFER_PEER_UP, &ev, WAIT_MS));
    CHECK_EQ(ev.peer, again);
    pair_stop(&s);
}

/* Manual mode: no thread, virtual time; a lease runs out without anyone waiting for it. */
static void test_manual(void)
{
    struct bt_xfer_hub *hub;
    struct bt_xfer *p, *d;
    struct bt_xfer_event ev;
    uint64_t id, now = 0;
    unsigned ups = 0, downs = 0;
    CHECK_EQ(bt_xfer_hub_create(NULL, &hub), BT_OK);
    struct bt_xfer_opts o = {
        .hub = hub, .manual = true, .instance = 2, .token = test_token, .listen = "loop:d"};
    CHECK_EQ(bt_xfer_create(&o, &d, NULL), BT_OK);
    o = (struct bt_xfer_opts){.hub = hub, .manual = true, .instance = 1};
    CHECK_EQ(bt_xfer_create(&o, &p, NULL), BT_OK);
    CHECK_EQ(bt_xfer_connect(p, "loop:d", 2, &test_token, &id), BT_OK);
    for (int i = 0; i < 2000; i++) {
        now += 10 * BT_NS_PER_MS;
        if (i == 1000) {
            bt_xfer_hub_freeze(hub, 2, true);
        }
        bt_xfer_step(p, now);
        bt_xfer_step(d, now);
        while (bt_xfer_poll(p, &ev)) {
            ups += ev.kind == BT_XFER_PEER_UP;
            if (ev.kind == BT_XFER_PEER_DOWN) {
                downs++;
                CHECK(now >= 12700 * BT_NS_PER_MS && now <= 13100 * BT_NS_PER_MS);
            }
        }
    }
    CHECK_EQ(ups, 1);
    CHECK_EQ(downs, 1);
    bt_xfer_destroy(p);
    bt_xfer_destroy(d);
    bt_xfer_hub_destroy(hub);
}

/* Steps both sides for a while; true if x was told of that kind. */
static bool step_both(struct bt_xfer *p, struct bt_xfer *d, uint64_t *now, struct bt_xfer *x,
                      enum bt_xfer_event_kind kind, uint64_t *peer)
{
    struct bt_xfer_event ev;
    bool seen = false;
    for (int i = 0; i < 20; i++) {
        *now += BT_NS_PER_MS;
        bt_xfer_step(p, *now);
        bt_xfer_step(d, *now);
        while (bt_xfer_poll(x, &ev)) {
            if (ev.kind == kind) {
                seen = true;
                *peer = ev.peer;
            }
            bt_xfer_event_free(&ev);
        }
    }
    return seen;
}

/* A small relay in one thread. True if all of it worked. */
static bool relay_once(struct bt_xfer *p, struct bt_xfer *d)
{
    static uint8_t src[2 * SHARE], dst[2 * SHARE];
    static const uint32_t ids[2] = {0, 1};
    uint64_t expect[BT_XFER_GROUPS_MAX] = {2};
    uint64_t now = 0, pd, dp, any;
    struct bt_xfer_landing l = {.generation = 1, .n_groups = 1};
    struct bt_xfer_push u = {.generation = 1,
                             .n_layers = 1,
                             .page_stride = SHARE,
                             .page_layer_bytes = SHARE,
                             .base = src,
                             .n_pages = 2,
                             .page_ids = ids};
    if (bt_xfer_connect(p, "loop:d", 2, &test_token, &pd) != BT_OK ||
        !step_both(p, d, &now, d, BT_XFER_PEER_UP, &dp)) {
        return false;
    }
    l.peer = dp;
    u.peer = pd;
    l.group[0] = (struct bt_xfer_land_group){.base = dst,
                                             .page_stride = SHARE,
                                             .page_layer_bytes = SHARE,
                                             .n_layers = 1,
                                             .n_pages = 2,
                                             .page_ids = ids};
    bool ok = bt_xfer_land_open(d, &l) == BT_OK && bt_xfer_send_ctrl(d, dp, "grant", 5) == BT_OK &&
              step_both(p, d, &now, p, BT_XFER_CTRL, &any) && bt_xfer_push(p, &u) == BT_OK &&
              bt_xfer_land_expect(d, l.ticket, 1, expect) == BT_OK &&
              step_both(p, d, &now, d, BT_XFER_LAND_FULL, &any);
    return bt_xfer_land_close(d, l.ticket, 1) == BT_OK &&
           step_both(p, d, &now, d, BT_XFER_LAND_CLOSED, &any) && ok;
}

/* Every allocation fails once: an error or a lost connection, never a crash, a leak or a hang. */
static void test_no_memory(void)
{
    bool fired = true;
    size_t live = bt_test_live_bytes();
    unsigned nth = 0, worked = 0;
    for (; fired && nth < 1000; nth++) {
        struct bt_xfer_hub *hub = NULL;
        struct bt_xfer *p = NULL, *d = NULL;
        bt_test_fail_alloc(nth);
        bool ok = bt_xfer_hub_create(NULL, &hub) == BT_OK;
        struct bt_xfer_opts od = {
            .hub = hub, .manual = true, .instance = 2, .token = test_token, .listen = "loop:d"};
        struct bt_xfer_opts op = {.hub = hub, .manual = true, .instance = 1};
        ok = ok && bt_xfer_create(&od, &d, NULL) == BT_OK &&
             bt_xfer_create(&op, &p, NULL) == BT_OK && relay_once(p, d);
        bt_xfer_destroy(p);
        bt_xfer_destroy(d);
        bt_xfer_hub_destroy(hub);
        fired = bt_test_fail_alloc_off();
        worked += ok;
        CHECK(fired || ok);
        CHECK_EQ(bt_test_live_bytes(), live);
    }
    CHECK(nth > 20 && nth < 1000 && worked >= 1);
}

static void test_options(void)
{
    struct bt_xfer *x;
    struct bt_err err;
    struct bt_xfer_hub *hub;
    struct bt_xfer_opts o = {0};
    CHECK_EQ(bt_xfer_hub_create(NULL, &hub), BT_OK);
    CHECK_EQ(bt_xfer_create(&o, &x, &err), BT_ERR_INVALID); /* no instance */
    o = (struct bt_xfer_opts){.instance = 1, .hub = hub, .listen = "loop:a"};
    CHECK_EQ(bt_xfer_create(&o, &x, &err), BT_OK);
    struct bt_xfer *y;
    o.instance = 2;
    CHECK_EQ(bt_xfer_create(&o, &y, &err), BT_ERR_IO); /* the address is taken */
    bt_xfer_destroy(x);
    bt_xfer_destroy(NULL);
    bt_xfer_hub_destroy(hub);
    CHECK(bt_xfer_address_is_loopback("127.3.2.1:5") && bt_xfer_address_is_loopback("[::1]:5"));
    CHECK(!bt_xfer_address_is_loopback("10.0.0.1:5") && !bt_xfer_address_is_loopback("junk"));
    CHECK(bt_xfer_address_is_any("0.0.0.0:5") && bt_xfer_address_is_any("[::]:5"));
    CHECK(!bt_xfer_address_is_any("127.0.0.1:5"));
}

int main(void)
{
    static const enum bt_xfer_proto protos[] = {BT_XFER_PROTO_AUTO, BT_XFER_PROTO_EAGER};
    for (size_t i = 0; i < 3; i++) {
        struct world w = {.proto = protos[i % 2], .staged = i == 2};
        CHECK_EQ(bt_xfer_hub_create(NULL, &w.hub), BT_OK);
        CHECK_EQ(xfer_suite(&w), 0);
        bt_xfer_hub_destroy(w.hub);
    }
    test_options();
    test_disorder();
    test_lost_pages();
    test_close_while_receiving(true);
    test_close_while_receiving(false);
    test_frozen(1);
    test_frozen(2);
    test_killed(1);
    test_killed(2);
    test_damage();
    test_unread_ctrl();
    test_replaced();
    test_manual();
    test_no_memory();
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
