/* What arrives: every message is checked here and handed to the part it is for. Owns the ops of receives in flight.
 * Trusts no field of a message. */

#include <string.h>
#include "base/assert.h"
#include "base/mem.h"
#include "transfer/xfer_int.h"

static void on_ctrl(struct bt_xfer *x, struct xfer_peer *p, const uint8_t *data, size_t n)
{
    size_t waiting = atomic_fetch_add(&x->ctrl_in_bytes, n) + n;
    bool fits = waiting <= x->o.ctrl_bytes_max;
    struct xfer_node *node = fits ? bt_fifo_take(x->ctrl_in, sizeof(*node)) : NULL;
    uint8_t *copy = node != NULL ? bt_fifo_take(x->ctrl_in, n) : NULL;
    if (copy == NULL) {
        atomic_fetch_sub(&x->ctrl_in_bytes, n);
        bt_fifo_give(node);
        xfer_peer_down(x, p, BT_ERR_BUSY, "control messages are not read fast enough here");
        return;
    }
    memset(node, 0, sizeof(*node));
    node->block = true;
    node->ev.data = copy;
    memcpy(node->ev.data, data, n);
    node->ev.kind = BT_XFER_CTRL;
    node->ev.peer = p->id;
    node->ev.instance = p->instance;
    node->ev.incoming = p->incoming;
    node->ev.n_bytes = n;
    x->st.ctrl_received++;
    xfer_event(x, node);
}

/* An op for a receive by rendezvous; NULL: too many are in flight, the connection is given up. */
static struct xfer_op *recv_op(struct bt_xfer *x, struct xfer_peer *p, const struct xfer_head *h,
                               uint8_t *dst)
{
    struct xfer_op *op = xfer_op_get(x, h->kind == XFER_SHARE);
    if (op == NULL) {
        xfer_broken(x, p, BT_ERR_BUSY);
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

static bool intact(const struct xfer_head *h, const uint8_t *at)
{
    return h->check == 0 || (bt_hash64(at, h->bytes, 0) | 1) == h->check;
}

static void share_done(struct bt_xfer *x, struct xfer_peer *p, struct xfer_landing *l,
                       const struct xfer_head *h, const uint8_t *at, enum bt_status st)
{
    p->progress_ns = x->now_ns;
    if (st == BT_OK && !intact(h, at)) {
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
    bool direct = p->direct && data == NULL && h->check == 0; /* a hash is of what the host sees */
    bool staged = xfer_stage_is_on(x) && !direct;
    if (data != NULL && !staged) {
        memcpy(dst, data, h->bytes);
        share_done(x, p, l, h, dst, BT_OK);
        return XFER_TAKEN;
    }
    struct xfer_op *op = recv_op(x, p, h, dst);
    if (op != NULL && staged && xfer_stage_get_in(x, op, dst) == NULL) {
        p->n_recvs--;
        xfer_op_put(x, op);
        xfer_broken(x, p, BT_ERR_BUSY);
        op = NULL;
    }
    if (op == NULL) {
        xfer_land_done(x, l, h, BT_ERR_BUSY);
        return XFER_TAKEN;
    }
    op->landing = l;
    op->direct = direct;
    op->is_moved = !staged;
    p->n_share_recvs++;
    if (data != NULL) {
        memcpy((uint8_t *)(uintptr_t)op->data, data, h->bytes); /* memory of the stage */
        xfer_received(x, op, BT_OK);
        return XFER_TAKEN;
    }
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
        xfer_greet_page(x, p, h, data);
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
    if (st == BT_OK && op->landing != NULL && !op->is_moved && intact(&op->head, op->data)) {
        op->head.check = 0; /* looked at while the host sees it */
        xfer_stage_in(x, op);
        return;
    }
    p->n_recvs--;
    if (st != BT_OK) {
        xfer_broken(x, p, st); /* a receive fails only with its connection */
    }
    if (op->landing != NULL) {
        p->n_share_recvs--;
        x->st.direct_bytes += op->direct && st == BT_OK ? op->bytes : 0;
        share_done(x, p, op->landing, &op->head, op->data, st);
    } else if (st == BT_OK && p->state != PEER_CLOSING) {
        struct bt_seal *was = bt_alloc_unseal();
        xfer_greet_page(x, p, &op->head, op->data);
        bt_alloc_reseal(was);
    }
    xfer_op_put(x, op);
}

/* D says nothing before the test page was right, so anything else from it implies READY. */
static void imply_ready(struct bt_xfer *x, struct xfer_peer *p)
{
    if (p->state == PEER_TESTING && !p->incoming) {
        xfer_peer_up(x, p);
    }
}

/* Making a connection is no request: here the heap may be called. */
static enum xfer_take on_greeting(struct bt_xfer *x, struct xfer_peer *p, const struct xfer_head *h,
                                  const uint8_t *data, struct xfer_op **op)
{
    struct bt_seal *was = bt_alloc_unseal();
    enum xfer_take take = XFER_TAKEN;
    if (h->kind == XFER_HELLO) {
        xfer_greet_hello(x, p, h, data);
    } else if (h->kind == XFER_WELCOME) {
        xfer_greet_welcome(x, p, h);
    } else if (h->kind == XFER_TEST) {
        take = on_test(x, p, h, data, op);
    } else {
        xfer_greet_refused(x, p, h, data);
    }
    bt_alloc_reseal(was);
    return take;
}

enum xfer_take xfer_frame(struct bt_xfer *x, struct xfer_peer *p, const uint8_t *head,
                          size_t head_bytes, const uint8_t *data, size_t bytes, struct xfer_op **op)
{
    struct xfer_head h;
    if (p->state == PEER_CLOSING || p->state == PEER_REFUSED) {
        return XFER_TAKEN;
    }
    if (!xfer_head_decode(head, head_bytes, bytes, &h) ||
        (p->instance != 0 && h.instance != p->instance) ||
        (data == NULL && bytes > 0 && h.kind != XFER_SHARE && h.kind != XFER_TEST)) {
        x->st.drop_malformed++;
        xfer_broken(x, p, BT_ERR_PROTOCOL);
        return XFER_TAKEN;
    }
    p->rx_ns = x->now_ns;
    switch (h.kind) {
    case XFER_HELLO:
    case XFER_WELCOME:
    case XFER_TEST:
    case XFER_REFUSE:
        return on_greeting(x, p, &h, data, op);
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
