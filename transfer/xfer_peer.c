/* Connections: dialling and accepting, sending to them, heartbeats, leases, stalls, and the way down. Owns the peer
 * objects and says when each is UP and DOWN. Knows messages, not wires: what carries them is x->ops. */

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

static bool may_send(const struct xfer_peer *p)
{
    return p->broken == BT_OK && p->state != PEER_CLOSING;
}

static void send_op(struct bt_xfer *x, struct xfer_peer *p, struct xfer_op *op, struct xfer_head *h,
                    const uint8_t *data, size_t n)
{
    h->instance = x->o.instance;
    h->bytes = n;
    xfer_head_encode(h, op->wire);
    op->peer = p;
    op->head = *h;
    op->data = data;
    op->bytes = n;
    op->is_test = h->kind == XFER_TEST;
    p->n_sends++;
    x->ops->send(x, p, op);
}

void xfer_send_message(struct bt_xfer *x, struct xfer_peer *p, struct xfer_head *h, void *owned,
                       const uint8_t *data, size_t n)
{
    struct xfer_op *op = may_send(p) ? xfer_op_get(x, false) : NULL;
    if (op == NULL) {
        if (may_send(p)) {
            p->broken = BT_ERR_BUSY; /* a lost message is a lost connection */
        }
        bt_spent_add(&x->spent, owned);
        return;
    }
    op->owned = owned;
    send_op(x, p, op, h, data, n);
}

void xfer_peer_send(struct bt_xfer *x, struct xfer_peer *p, enum xfer_kind kind, void *owned,
                    size_t n)
{
    struct xfer_head h = {.kind = kind, .version = kind == XFER_WELCOME ? p->version : 0};
    xfer_send_message(x, p, &h, owned, owned, n);
}

void xfer_ctrl_send(struct bt_xfer *x, struct xfer_peer *p, struct xfer_ctrl *m)
{
    struct xfer_head h = {.kind = XFER_CTRL};
    if (!may_send(p)) {
        atomic_fetch_sub(&x->ctrl_out_bytes, m->n);
        bt_spent_add(&x->spent, m);
        return;
    }
    m->op.owned = m;
    send_op(x, p, &m->op, &h, m->data, m->n);
}

void xfer_sent(struct bt_xfer *x, struct xfer_op *op, enum bt_status st)
{
    struct xfer_peer *p = op->peer;
    BT_ASSERT(p->n_sends > 0);
    p->n_sends--;
    if (op->push != NULL) {
        xfer_push_sent(x, op, st);
        xfer_op_put(x, op);
        return;
    }
    if (st != BT_OK && p->broken == BT_OK) {
        p->broken = st;
    }
    void *owned = op->owned;
    if (op->head.kind == XFER_CTRL) {
        atomic_fetch_sub(&x->ctrl_out_bytes, op->bytes);
        x->st.ctrl_sent++;
    } else {
        if (op->head.kind == XFER_PING) {
            p->ping_in_flight = false;
        }
        xfer_op_put(x, op);
    }
    bt_spent_add(&x->spent, owned); /* a control message is gone with its op */
}

/* ---- up and down ---- */

void xfer_peer_up(struct bt_xfer *x, struct xfer_peer *p)
{
    struct bt_xfer_event *ev = &p->up->ev;
    struct xfer_transport t;
    ev->kind = BT_XFER_PEER_UP;
    ev->peer = p->id;
    ev->instance = p->instance;
    ev->incoming = p->incoming;
    x->ops->describe(x, p, &t);
    const char *way = "";
    if (xfer_stage_is_on(
            x)) { /* how the other end sends is its own affair: as this one would, most likely */
        way = p->direct && (p->incoming ? t.rndv_device : p->want_rndv_device) ? " registered"
                                                                               : " staged";
    }
    snprintf(ev->text, sizeof(ev->text), "%.180s%s", t.text, way);
    if (t.warning[0] != '\0') {
        bt_log_warn("xfer", "peer %016" PRIx64 ": %s", p->instance, t.warning);
    }
    bt_log_info("transfer", "peer %016" PRIx64 " up over %s (%s)", p->instance, ev->text,
                p->incoming ? "incoming" : p->address);
    p->state = PEER_UP;
    if (x->ops->up != NULL) {
        x->ops->up(x, p);
    }
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
    uint32_t n_held;
    /* Dialled in vain again and again: one line a minute; routers name each pair that is cut. */
    bool again =
        p->state != PEER_UP && !p->incoming && !bt_log_may(&x->in_vain, x->now_ns, &n_held);
    BT_LOG(again                            ? BT_LOG_DEBUG
           : told && st != BT_ERR_CANCELLED ? BT_LOG_WARN
                                            : BT_LOG_INFO,
           "transfer", NULL, "peer %016" PRIx64 " (%s) down: %s", p->instance, p->address, why);
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
    struct bt_seal *was = bt_alloc_unseal(); /* a connection is no request */
    enum bt_status st = x->n_peers > x->o.peers_max ? BT_ERR_BUSY : x->ops->dial(x, p);
    bt_alloc_reseal(was);
    if (st != BT_OK) {
        xfer_peer_down(x, p, st == BT_ERR_BUSY ? BT_ERR_BUSY : BT_ERR_PEER_LOST,
                       st == BT_ERR_BUSY ? "too many connections here" : "cannot dial");
        return;
    }
    p->conn_open = true;
}

struct xfer_peer *xfer_incoming(struct bt_xfer *x, void *conn, const char *from)
{
    if (x->n_peers >= x->o.peers_max) {
        bt_log_warn("xfer", "connection from %s refused: %u peers are the limit", from,
                    x->o.peers_max);
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
    case BT_ERR_BUSY:
        return "too much in flight here";
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
        snprintf(why, sizeof(why), "nothing heard for %" PRIu64 " ms",
                 (now - p->rx_ns) / BT_NS_PER_MS);
        xfer_peer_down(x, p, BT_ERR_TIMEOUT, why);
        return;
    }
    if (p->n_share_sends + p->n_share_recvs > 0) {
        if (now - p->progress_ns >= x->o.stall_ns) {
            x->st.fail_stall++;
            snprintf(why, sizeof(why),
                     "%u sends and %u receives without progress for %" PRIu64 " ms",
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
    struct bt_seal *was = bt_alloc_unseal(); /* neither is its end */
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
    bt_alloc_reseal(was);
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
