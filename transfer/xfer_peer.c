/* Connections: the greeting (identity, model, test page), heartbeats, leases, stalls, and the way down. Owns the
 * peer objects and says when each is UP and DOWN. Knows messages, not wires: what carries them is x->ops. */

#include "transfer/xfer_int.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "base/assert.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"

/* A refused peer has this long to close by itself after it was told why. */
#define REFUSED_LINGER_NS (BT_NS_PER_S)

struct xfer_peer *xfer_peer_alloc(struct bt_xfer *x)
{
    struct xfer_peer *p = bt_calloc(1, sizeof(*p));
    if (p == NULL) {
        return NULL;
    }
    p->up = bt_calloc(1, sizeof(*p->up));
    p->down = bt_calloc(1, sizeof(*p->down));
    if (p->up == NULL || p->down == NULL) {
        xfer_peer_free(p);
        return NULL;
    }
    p->id = atomic_fetch_add(&x->next_peer, 1) + 1;
    TAILQ_INIT(&p->queued);
    TAILQ_INIT(&p->posted);
    return p;
}

void xfer_peer_free(struct xfer_peer *p)
{
    bt_free(p->up);
    bt_free(p->down);
    bt_free(p->test_page);
    bt_free(p);
}

struct xfer_peer *xfer_peer_find(struct bt_xfer *x, uint64_t id)
{
    struct xfer_peer *p;
    TAILQ_FOREACH(p, &x->peers, link)
    {
        if (p->id == id) {
            return p;
        }
    }
    return NULL;
}

static void peer_add(struct bt_xfer *x, struct xfer_peer *p)
{
    TAILQ_INSERT_TAIL(&x->peers, p, link);
    x->n_peers++;
    p->born_ns = p->rx_ns = p->progress_ns = x->now_ns;
}

/* ---- sending ---- */

static void send_message(struct bt_xfer *x, struct xfer_peer *p, struct xfer_head *h, void *owned,
                         const uint8_t *data, size_t n)
{
    struct xfer_op *op = NULL;
    if (p->broken == BT_OK && p->state != PEER_CLOSING) {
        op = xfer_op_get(x);
        if (op == NULL) {
            p->broken = BT_ERR_NOMEM; /* a lost message is a lost connection */
        }
    }
    if (op == NULL) {
        if (h->kind == XFER_CTRL) {
            atomic_fetch_sub(&x->ctrl_out_bytes, n);
        }
        bt_free(owned);
        return;
    }
    h->instance = x->o.instance;
    h->bytes = n;
    xfer_head_encode(h, op->wire);
    op->peer = p;
    op->head = *h;
    op->owned = owned;
    op->data = data;
    op->bytes = n;
    op->is_test = h->kind == XFER_TEST;
    p->n_sends++;
    x->ops->send(x, p, op);
}

/* A message with a payload from bt_alloc (taken) or none. */
void xfer_peer_send(struct bt_xfer *x, struct xfer_peer *p, enum xfer_kind kind, void *owned, size_t n)
{
    struct xfer_head h = { .kind = kind, .version = kind == XFER_WELCOME ? p->version : 0 };
    if (kind == XFER_CTRL) {
        send_message(x, p, &h, owned, ((struct xfer_ctrl *)owned)->data, n);
        return;
    }
    send_message(x, p, &h, owned, owned, n);
}

static void send_hello(struct bt_xfer *x, struct xfer_peer *p)
{
    struct xfer_hello h = {
        .expect = p->expect, .version_min = XFER_VERSION_MIN, .version_max = XFER_VERSION_MAX
    };
    memcpy(h.fingerprint, x->fingerprint, sizeof(h.fingerprint));
    memcpy(h.layout, x->layout, sizeof(h.layout));
    uint8_t *buf = bt_alloc(XFER_HELLO_MAX);
    if (buf == NULL) {
        p->broken = BT_ERR_NOMEM;
        return;
    }
    xfer_peer_send(x, p, XFER_HELLO, buf, xfer_hello_encode(&h, buf));
}

static void send_test_page(struct bt_xfer *x, struct xfer_peer *p)
{
    size_t n = x->o.test_page_bytes;
    uint8_t *page = bt_alloc(n);
    if (page == NULL) {
        p->broken = BT_ERR_NOMEM;
        return;
    }
    xfer_test_fill(page, n, x->o.instance);
    struct xfer_head h = { .kind = XFER_TEST, .check = bt_hash64(page, n, 0) | 1 };
    send_message(x, p, &h, page, page, n);
}

void xfer_sent(struct bt_xfer *x, struct xfer_op *op, enum bt_status st)
{
    struct xfer_peer *p = op->peer;
    BT_ASSERT(p->n_sends > 0);
    p->n_sends--;
    if (op->push != NULL) {
        xfer_push_sent(x, op, st);
    } else {
        if (op->head.kind == XFER_PING) {
            p->ping_in_flight = false;
        } else if (op->head.kind == XFER_CTRL) {
            atomic_fetch_sub(&x->ctrl_out_bytes, op->bytes);
            x->st.ctrl_sent++;
        }
        if (st != BT_OK && p->broken == BT_OK) {
            p->broken = st;
        }
        bt_free(op->owned);
    }
    xfer_op_put(x, op);
}

/* ---- up and down ---- */

static void peer_up(struct bt_xfer *x, struct xfer_peer *p)
{
    struct bt_xfer_event *ev = &p->up->ev;
    bool rndv;
    ev->kind = BT_XFER_PEER_UP;
    ev->peer = p->id;
    ev->instance = p->instance;
    ev->incoming = p->incoming;
    x->ops->describe(x, p, ev->text, sizeof(ev->text), &rndv);
    bt_log_info("xfer", "peer %016" PRIx64 " up over %s (%s)", p->instance, ev->text,
                p->incoming ? "incoming" : p->address);
    p->state = PEER_UP;
    p->ping_ns = x->now_ns;
    x->st.peers_up++;
    xfer_event(x, p->up);
    p->up = NULL;
}

static void count_failure(struct bt_xfer *x, const struct xfer_peer *p, enum bt_status st)
{
    if (p->state != PEER_UP) {
        if (st == BT_ERR_PROTOCOL) {
            x->st.fail_refused++;
        } else if (st != BT_ERR_CANCELLED) {
            x->st.fail_connect++;
        }
    } else if (st == BT_ERR_PEER_LOST) {
        x->st.fail_peer_lost++;
    }
}

/* Says DOWN (if the caller knows of the peer), fails what is queued, and leaves the wire to the next tick
 * (this may be inside one of the wire's own callbacks). */
void xfer_peer_down(struct bt_xfer *x, struct xfer_peer *p, enum bt_status st, const char *why)
{
    if (p->state == PEER_CLOSING) {
        return;
    }
    bool told = !p->incoming || p->state == PEER_UP;
    bt_log_info("xfer", "peer %016" PRIx64 " (%s) down: %s", p->instance, p->address, why);
    count_failure(x, p, st);
    if (p->state == PEER_UP) {
        x->st.peers_up--;
    }
    p->state = PEER_CLOSING;
    p->closing_ns = x->now_ns;
    if (told) {
        struct bt_xfer_event *ev = &p->down->ev;
        ev->kind = BT_XFER_PEER_DOWN;
        ev->status = st;
        ev->peer = p->id;
        ev->instance = p->instance;
        ev->incoming = p->incoming;
        snprintf(ev->text, sizeof(ev->text), "%s", why);
        xfer_event(x, p->down);
        p->down = NULL;
    }
    xfer_push_fail_peer(x, p);
}

void xfer_peer_dial(struct bt_xfer *x, struct xfer_peer *p)
{
    peer_add(x, p);
    p->state = PEER_DIALING;
    enum bt_status st = x->n_peers > x->o.peers_max ? BT_ERR_BUSY : x->ops->dial(x, p);
    if (st != BT_OK) {
        xfer_peer_down(x, p, st == BT_ERR_BUSY ? BT_ERR_BUSY : BT_ERR_PEER_LOST,
                       st == BT_ERR_BUSY ? "too many connections here" : "cannot dial");
        return;
    }
    p->conn_open = true;
    send_hello(x, p);
}

struct xfer_peer *xfer_incoming(struct bt_xfer *x, void *conn, const char *from)
{
    if (x->n_peers >= x->o.peers_max) {
        bt_log_warn("xfer", "connection from %s refused: %u peers are the limit", from, x->o.peers_max);
        return NULL;
    }
    struct xfer_peer *p = xfer_peer_alloc(x);
    if (p == NULL) {
        return NULL;
    }
    p->incoming = true;
    p->conn = conn;
    p->conn_open = true;
    snprintf(p->address, sizeof(p->address), "%s", from);
    peer_add(x, p);
    p->state = PEER_GREETED;
    return p;
}

void xfer_broken(struct bt_xfer *x, struct xfer_peer *p, enum bt_status st)
{
    (void)x;
    if (p->broken == BT_OK) {
        p->broken = st;
    }
}

void xfer_closed(struct bt_xfer *x, struct xfer_peer *p)
{
    (void)x;
    p->conn_open = false; /* the tick frees it */
}

/* ---- greeting ---- */

static void refuse(struct bt_xfer *x, struct xfer_peer *p, const char *why)
{
    char *text = bt_strdup(why);
    bt_log_warn("xfer", "connection of %016" PRIx64 " (%s) refused: %s", p->instance, p->address, why);
    x->st.fail_refused++;
    p->state = PEER_REFUSED;
    p->born_ns = x->now_ns;
    if (text == NULL) {
        p->broken = BT_ERR_NOMEM;
        return;
    }
    xfer_peer_send(x, p, XFER_REFUSE, text, strlen(text));
}

/* The new connection of an instance replaces the old one, whose death has not shown yet. */
static void replace_older(struct bt_xfer *x, struct xfer_peer *p)
{
    struct xfer_peer *q;
    TAILQ_FOREACH(q, &x->peers, link)
    {
        if (q != p && q->incoming && q->instance == p->instance && q->state == PEER_UP) {
            xfer_peer_down(x, q, BT_ERR_PEER_LOST, "replaced by a newer connection of the same instance");
        }
    }
}

static void on_hello(struct bt_xfer *x, struct xfer_peer *p, const struct xfer_head *h, const uint8_t *data)
{
    struct xfer_hello hello;
    char why[XFER_REFUSE_MAX];
    if (p->state != PEER_GREETED || !xfer_hello_decode(data, h->bytes, &hello)) {
        x->st.drop_malformed++;
        xfer_broken(x, p, BT_ERR_PROTOCOL);
        return;
    }
    p->instance = h->instance;
    why[0] = 0;
    if (hello.version_min > XFER_VERSION_MAX || hello.version_max < XFER_VERSION_MIN) {
        snprintf(why, sizeof(why), "no transfer protocol version in common: %u to %u there, %d to %d here",
                 hello.version_min, hello.version_max, XFER_VERSION_MIN, XFER_VERSION_MAX);
    } else if (hello.expect != 0 && hello.expect != x->o.instance) {
        snprintf(why, sizeof(why), "instance differs: %016" PRIx64 " wanted, %016" PRIx64 " is here",
                 hello.expect, x->o.instance);
    } else if (strcmp(hello.fingerprint, x->fingerprint) != 0) {
        snprintf(why, sizeof(why), "model fingerprint differs: \"%s\" there, \"%s\" here",
                 hello.fingerprint, x->fingerprint);
    } else if (strcmp(hello.layout, x->layout) != 0) {
        snprintf(why, sizeof(why), "KV layout differs: \"%s\" there, \"%s\" here", hello.layout, x->layout);
    }
    if (why[0] != 0) {
        refuse(x, p, why);
        return;
    }
    p->version = hello.version_max < XFER_VERSION_MAX ? hello.version_max : XFER_VERSION_MAX;
    p->state = PEER_TESTING;
    xfer_peer_send(x, p, XFER_WELCOME, NULL, 0);
}

static void on_welcome(struct bt_xfer *x, struct xfer_peer *p, const struct xfer_head *h)
{
    char why[160];
    char transport[200];
    if (p->state != PEER_DIALING || h->version < XFER_VERSION_MIN || h->version > XFER_VERSION_MAX) {
        x->st.drop_malformed++;
        xfer_broken(x, p, BT_ERR_PROTOCOL);
        return;
    }
    p->instance = h->instance;
    if (p->expect != 0 && p->expect != h->instance) {
        snprintf(why, sizeof(why), "instance differs: %016" PRIx64 " wanted, %016" PRIx64 " is there", p->expect,
                 h->instance);
        xfer_peer_down(x, p, BT_ERR_PROTOCOL, why);
        return;
    }
    p->version = h->version;
    p->state = PEER_TESTING;
    x->ops->describe(x, p, transport, sizeof(transport), &p->want_rndv);
    if (x->o.proto != BT_XFER_PROTO_AUTO) {
        p->want_rndv = x->o.proto == BT_XFER_PROTO_RNDV;
    }
    send_test_page(x, p);
}

/* The whole test page is here. */
static void test_page_arrived(struct bt_xfer *x, struct xfer_peer *p, const struct xfer_head *h, const uint8_t *page)
{
    if (p->state != PEER_TESTING) {
        return;
    }
    if ((bt_hash64(page, h->bytes, 0) | 1) != h->check || !xfer_test_verify(page, h->bytes, p->instance)) {
        refuse(x, p, "the test page arrived damaged");
        return;
    }
    replace_older(x, p);
    xfer_peer_send(x, p, XFER_READY, NULL, 0);
    peer_up(x, p);
}

static void on_refuse(struct bt_xfer *x, struct xfer_peer *p, const struct xfer_head *h, const uint8_t *data)
{
    char text[200];
    if (p->incoming) {
        x->st.drop_malformed++;
        return;
    }
    xfer_text_clean(data, h->bytes, text, sizeof(text));
    xfer_peer_down(x, p, BT_ERR_PROTOCOL, text);
}

/* ---- receiving ---- */

static void on_ctrl(struct bt_xfer *x, struct xfer_peer *p, const uint8_t *data, size_t n)
{
    size_t waiting = atomic_fetch_add(&x->ctrl_in_bytes, n) + n;
    struct xfer_node *node = NULL;
    if (waiting <= x->o.ctrl_bytes_max) {
        node = bt_calloc(1, sizeof(*node));
    }
    if (node != NULL) {
        node->ev.data = bt_alloc(n);
    }
    if (node == NULL || node->ev.data == NULL) {
        atomic_fetch_sub(&x->ctrl_in_bytes, n);
        bt_free(node);
        xfer_peer_down(x, p, BT_ERR_BUSY, "control messages are not read fast enough here");
        return;
    }
    memcpy(node->ev.data, data, n);
    node->ev.kind = BT_XFER_CTRL;
    node->ev.peer = p->id;
    node->ev.instance = p->instance;
    node->ev.incoming = p->incoming;
    node->ev.n_bytes = n;
    x->st.ctrl_received++;
    xfer_event(x, node);
}

/* An op for a receive by rendezvous; NULL: no memory, the connection is given up. */
static struct xfer_op *recv_op(struct bt_xfer *x, struct xfer_peer *p, const struct xfer_head *h, uint8_t *dst)
{
    struct xfer_op *op = xfer_op_get(x);
    if (op == NULL) {
        xfer_broken(x, p, BT_ERR_NOMEM);
        return NULL;
    }
    op->peer = p;
    op->data = dst;
    op->bytes = h->bytes;
    op->head = *h;
    if (p->n_share_sends + p->n_share_recvs == 0) {
        p->progress_ns = x->now_ns;
    }
    p->n_recvs++;
    return op;
}

static void share_done(struct bt_xfer *x, struct xfer_peer *p, struct xfer_landing *l, const struct xfer_head *h,
                       const uint8_t *at, enum bt_status st)
{
    p->progress_ns = x->now_ns;
    if (st == BT_OK && h->check != 0 && (bt_hash64(at, h->bytes, 0) | 1) != h->check) {
        x->st.drop_checksum++;
        xfer_broken(x, p, BT_ERR_PROTOCOL);
        st = BT_ERR_PROTOCOL;
    }
    if (st != BT_OK) {
        x->st.fail_receives++;
    }
    xfer_land_done(x, l, h, st);
}

static enum xfer_take on_share(struct bt_xfer *x, struct xfer_peer *p, const struct xfer_head *h,
                               const uint8_t *data, struct xfer_op **out)
{
    uint8_t *dst;
    struct xfer_landing *l = xfer_land_begin(x, p->id, h, &dst);
    if (l == NULL) {
        return XFER_TAKEN;
    }
    if (data != NULL) {
        memcpy(dst, data, h->bytes);
        share_done(x, p, l, h, dst, BT_OK);
        return XFER_TAKEN;
    }
    struct xfer_op *op = recv_op(x, p, h, dst);
    if (op == NULL) {
        xfer_land_done(x, l, h, BT_ERR_NOMEM);
        return XFER_TAKEN;
    }
    op->landing = l;
    p->n_share_recvs++;
    *out = op;
    return XFER_RECV;
}

static enum xfer_take on_test(struct bt_xfer *x, struct xfer_peer *p, const struct xfer_head *h,
                              const uint8_t *data, struct xfer_op **out)
{
    if (!p->incoming || p->state != PEER_TESTING || p->test_page != NULL) {
        x->st.drop_malformed++;
        return XFER_TAKEN;
    }
    if (data != NULL) {
        test_page_arrived(x, p, h, data);
        return XFER_TAKEN;
    }
    p->test_page = bt_alloc(h->bytes);
    if (p->test_page == NULL) {
        xfer_broken(x, p, BT_ERR_NOMEM);
        return XFER_TAKEN;
    }
    *out = recv_op(x, p, h, p->test_page);
    if (*out == NULL) {
        return XFER_TAKEN;
    }
    (*out)->is_test = true;
    return XFER_RECV;
}

void xfer_received(struct bt_xfer *x, struct xfer_op *op, enum bt_status st)
{
    struct xfer_peer *p = op->peer;
    BT_ASSERT(p->n_recvs > 0);
    p->n_recvs--;
    if (st != BT_OK) {
        xfer_broken(x, p, st); /* a receive fails only with its connection */
    }
    if (op->landing != NULL) {
        p->n_share_recvs--;
        share_done(x, p, op->landing, &op->head, op->data, st);
    } else if (st == BT_OK && p->state != PEER_CLOSING) {
        test_page_arrived(x, p, &op->head, op->data);
    }
    xfer_op_put(x, op);
}

/* D says nothing before the test page was right, so anything else from it implies READY. */
static void imply_ready(struct bt_xfer *x, struct xfer_peer *p)
{
    if (p->state == PEER_TESTING && !p->incoming) {
        peer_up(x, p);
    }
}

enum xfer_take xfer_frame(struct bt_xfer *x, struct xfer_peer *p, const uint8_t *head, size_t head_bytes,
                          const uint8_t *data, size_t bytes, struct xfer_op **op)
{
    struct xfer_head h;
    if (p->state == PEER_CLOSING || p->state == PEER_REFUSED) {
        return XFER_TAKEN;
    }
    if (!xfer_head_decode(head, head_bytes, bytes, &h) || (p->instance != 0 && h.instance != p->instance) ||
        (data == NULL && bytes > 0 && h.kind != XFER_SHARE && h.kind != XFER_TEST)) {
        x->st.drop_malformed++;
        xfer_broken(x, p, BT_ERR_PROTOCOL);
        return XFER_TAKEN;
    }
    p->rx_ns = x->now_ns;
    switch (h.kind) {
    case XFER_HELLO:
        on_hello(x, p, &h, data);
        return XFER_TAKEN;
    case XFER_WELCOME:
        on_welcome(x, p, &h);
        return XFER_TAKEN;
    case XFER_TEST:
        return on_test(x, p, &h, data, op);
    case XFER_REFUSE:
        on_refuse(x, p, &h, data);
        return XFER_TAKEN;
    case XFER_READY:
    case XFER_PING:
        imply_ready(x, p);
        return XFER_TAKEN;
    case XFER_CTRL:
        imply_ready(x, p);
        break;
    case XFER_SHARE:
        break;
    }
    if (p->state != PEER_UP) {
        x->st.drop_malformed++;
        return XFER_TAKEN;
    }
    if (h.kind == XFER_SHARE) {
        return on_share(x, p, &h, data, op);
    }
    on_ctrl(x, p, data, bytes);
    return XFER_TAKEN;
}

/* ---- time ---- */

static void min_into(uint64_t *deadline, uint64_t t)
{
    if (t < *deadline) {
        *deadline = t;
    }
}

static const char *broken_text(enum bt_status st)
{
    switch (st) {
    case BT_ERR_PROTOCOL:
        return "the peer broke the protocol";
    case BT_ERR_NOMEM:
        return "out of memory here";
    default:
        return "connection lost";
    }
}

/* Heartbeat, lease, stall, connect time. Each test sets the next deadline. */
static void peer_timers(struct bt_xfer *x, struct xfer_peer *p, uint64_t *deadline)
{
    char why[128];
    uint64_t now = x->now_ns;
    if (p->state == PEER_REFUSED) {
        if (now - p->born_ns >= REFUSED_LINGER_NS) {
            xfer_peer_down(x, p, BT_ERR_CANCELLED, "refused");
        } else {
            min_into(deadline, p->born_ns + REFUSED_LINGER_NS);
        }
        return;
    }
    if (p->state != PEER_UP) {
        if (now - p->born_ns >= x->o.connect_timeout_ns) {
            xfer_peer_down(x, p, BT_ERR_TIMEOUT, "no greeting within the connect timeout");
        } else {
            min_into(deadline, p->born_ns + x->o.connect_timeout_ns);
        }
        return;
    }
    if (now - p->rx_ns >= x->o.lease_ns) {
        x->st.fail_lease++;
        snprintf(why, sizeof(why), "nothing heard for %" PRIu64 " ms", (now - p->rx_ns) / BT_NS_PER_MS);
        xfer_peer_down(x, p, BT_ERR_TIMEOUT, why);
        return;
    }
    if (p->n_share_sends + p->n_share_recvs > 0) {
        if (now - p->progress_ns >= x->o.stall_ns) {
            x->st.fail_stall++;
            snprintf(why, sizeof(why), "%u sends and %u receives without progress for %" PRIu64 " ms",
                     p->n_share_sends, p->n_share_recvs, (now - p->progress_ns) / BT_NS_PER_MS);
            xfer_peer_down(x, p, BT_ERR_TIMEOUT, why);
            return;
        }
        min_into(deadline, p->progress_ns + x->o.stall_ns);
    }
    if (now - p->ping_ns >= x->o.heartbeat_ns) {
        p->ping_ns = now;
        if (!p->ping_in_flight) {
            p->ping_in_flight = true;
            xfer_peer_send(x, p, XFER_PING, NULL, 0);
        }
    }
    min_into(deadline, p->ping_ns + x->o.heartbeat_ns);
    min_into(deadline, p->rx_ns + x->o.lease_ns);
}

/* Closes the wire of a peer that is going, and frees it when nothing is in flight. True: something was done. */
static bool closing_step(struct bt_xfer *x, struct xfer_peer *p)
{
    bool did = false;
    if (p->conn_open && !p->conn_closing) {
        p->conn_closing = true;
        x->ops->close(x, p);
        did = true;
    }
    if (!p->conn_open && p->n_sends + p->n_recvs == 0) {
        BT_ASSERT(TAILQ_EMPTY(&p->queued) && TAILQ_EMPTY(&p->posted));
        TAILQ_REMOVE(&x->peers, p, link);
        x->n_peers--;
        if (p->conn != NULL) {
            x->ops->release(x, p);
        }
        xfer_peer_free(p);
        did = true;
    }
    return did;
}

uint64_t xfer_peers_tick(struct bt_xfer *x, bool *did)
{
    uint64_t deadline = UINT64_MAX;
    struct xfer_peer *p = TAILQ_FIRST(&x->peers);
    while (p != NULL) {
        struct xfer_peer *next = TAILQ_NEXT(p, link);
        if (p->broken == BT_OK && p->state != PEER_CLOSING) {
            peer_timers(x, p, &deadline); /* its heartbeat may find the connection broken */
        }
        if (p->broken != BT_OK && p->state != PEER_CLOSING) {
            xfer_peer_down(x, p, p->broken == BT_ERR_PROTOCOL ? BT_ERR_PROTOCOL : BT_ERR_PEER_LOST,
                           broken_text(p->broken));
        }
        if (p->state == PEER_CLOSING) {
            *did = closing_step(x, p) || *did;
        }
        p = next;
    }
    return deadline;
}
