/* The sending side of pages. Owns the queue of pushes of each peer, the window, and the promise that every push
 * ends in exactly one PUSHED. Refuses to know what a page holds or whether the receiver wanted it. */

#include "transfer/xfer_int.h"
#include <string.h>
#include "base/assert.h"
#include "base/clock.h"
#include "base/mem.h"

/* Shares handed to the wire in one go, so that a wire which completes at once cannot keep the thread. */
#define PUMP_MAX 64

static void push_finish(struct bt_xfer *x, struct xfer_push *pu)
{
    struct bt_xfer_event *ev = &pu->done->ev;
    BT_ASSERT(pu->n_in_flight == 0);
    ev->kind = BT_XFER_PUSHED;
    ev->status = pu->status;
    ev->peer = pu->d.peer;
    ev->tag = pu->d.tag;
    memcpy(ev->ticket, pu->d.ticket, sizeof(ev->ticket));
    ev->generation = pu->d.generation;
    ev->bytes = pu->bytes;
    /* call_ns is from another thread's clock reading and may lie after this round's time. */
    ev->move_ns = x->now_ns > pu->call_ns ? x->now_ns - pu->call_ns : 0;
    ev->post_ns = pu->post_ns;
    x->st.pushes++;
    x->st.move_ns += ev->move_ns;
    x->st.pushes_open--;
    xfer_event(x, pu->done);
    bt_spent_add(&x->spent, pu);
}

void xfer_push_start(struct bt_xfer *x, struct xfer_push *pu)
{
    struct xfer_peer *p = xfer_peer_find(x, pu->d.peer);
    x->st.pushes_open++;
    if (p == NULL || p->state != PEER_UP || p->broken != BT_OK) {
        pu->status = BT_ERR_PEER_LOST;
        push_finish(x, pu);
        return;
    }
    if (pu->n_total == 0) {
        push_finish(x, pu);
        return;
    }
    pu->peer = p;
    TAILQ_INSERT_TAIL(&p->queued, pu, link);
}

/* Ends the push if that was all of it. */
static void push_settle(struct bt_xfer *x, struct xfer_peer *p, struct xfer_push *pu)
{
    if (pu->n_in_flight == 0 && pu->cursor == pu->n_total) {
        TAILQ_REMOVE(&p->posted, pu, link);
        push_finish(x, pu);
    }
}

/* Sends the share at the cursor. False: too many are in flight. */
static bool send_share(struct bt_xfer *x, struct xfer_peer *p, struct xfer_push *pu)
{
    struct xfer_op *op = xfer_op_get(x, true);
    if (op == NULL) {
        return false;
    }
    uint32_t l = (uint32_t)(pu->cursor / pu->d.n_pages);
    uint32_t k = (uint32_t)(pu->cursor % pu->d.n_pages);
    op->peer = p;
    op->push = pu;
    op->bytes = pu->d.page_layer_bytes;
    op->data = (const uint8_t *)pu->d.base + l * pu->d.layer_stride +
               pu->d.page_ids[k] * pu->d.page_stride;
    bool staged = xfer_stage_is_on(x);
    if (staged && p->direct && p->want_rndv_device && !x->o.checksum) {
        op->direct = true;
        staged = false;
    }
    op->device = (uint8_t *)(uintptr_t)op->data; /* read only */
    if (staged && !xfer_stage_get_out(x, op)) {
        xfer_op_put(x, op);
        return false;
    }
    op->head = (struct xfer_head){
        .kind = XFER_SHARE,
        .instance = x->o.instance,
        .bytes = op->bytes,
        .group = pu->d.group,
        .layer = pu->d.layer + l,
        .page = pu->d.page_index != NULL ? pu->d.page_index[k] : pu->d.first_page + k,
        .generation = pu->d.generation,
    };
    memcpy(op->head.ticket, pu->d.ticket, sizeof(op->head.ticket));
    if (p->n_share_sends + p->n_share_recvs == 0) {
        p->progress_ns = x->now_ns;
    }
    pu->cursor++;
    pu->n_in_flight += 2; /* one keeps the push while the wire has it: it may end the op at once */
    p->window_used += op->bytes;
    p->n_sends++;
    p->n_share_sends++;
    if (pu->cursor == pu->n_total) {
        TAILQ_REMOVE(&p->queued, pu, link);
        TAILQ_INSERT_TAIL(&p->posted, pu, link);
    }
    if (staged) {
        xfer_stage_out(x, op);
    } else {
        xfer_push_send(x, op);
    }
    pu->n_in_flight--;
    push_settle(x, p, pu);
    return true;
}

void xfer_push_send(struct bt_xfer *x, struct xfer_op *op)
{
    struct xfer_push *pu = op->push;
    struct xfer_peer *p = op->peer;
    uint64_t t0 = bt_clock_ns();

    pu->n_in_flight++; /* as above */
    if (x->o.checksum) {
        op->head.check = bt_hash64(op->data, op->bytes, 0) | 1;
    }
    xfer_head_encode(&op->head, op->wire);
    x->ops->send(x, p, op);
    uint64_t took = bt_clock_ns() - t0;

    x->st.post_ns += took;
    pu->post_ns += took;
    pu->n_in_flight--;
    push_settle(x, p, pu);
}

bool xfer_push_pump(struct bt_xfer *x, struct xfer_peer *p)
{
    struct xfer_push *pu;
    unsigned n = 0;
    bool more = false;

    while (p->state == PEER_UP && p->broken == BT_OK && (pu = TAILQ_FIRST(&p->queued)) != NULL) {
        if (p->window_used > 0 && p->window_used + pu->d.page_layer_bytes > x->o.window_bytes) {
            break;
        }
        if (n == PUMP_MAX) {
            more = true;
            break;
        }
        if (!send_share(x, p, pu)) {
            break; /* tried again when a send ends or the next timer runs */
        }
        n++;
    }
    return more;
}

void xfer_push_sent(struct bt_xfer *x, struct xfer_op *op, enum bt_status st)
{
    struct xfer_push *pu = op->push;
    struct xfer_peer *p = op->peer;
    BT_ASSERT(pu->n_in_flight > 0 && p->window_used >= op->bytes);
    pu->n_in_flight--;
    p->window_used -= op->bytes;
    p->n_share_sends--;
    p->progress_ns = x->now_ns;
    if (st == BT_OK) {
        pu->bytes += op->bytes;
        x->st.bytes_sent += op->bytes;
        x->st.direct_bytes += op->direct ? op->bytes : 0;
        x->st.shares_sent++;
    } else {
        x->st.fail_sends++;
        if (pu->status == BT_OK) {
            pu->status = BT_ERR_PEER_LOST;
        }
        if (p->broken == BT_OK) {
            p->broken = st; /* a send fails only when its connection does */
        }
    }
    push_settle(x, p, pu);
}

/* Drops what has not been sent. */
static void push_abort(struct bt_xfer *x, struct xfer_peer *p, struct xfer_push *pu,
                       enum bt_status st)
{
    if (pu->status == BT_OK) {
        pu->status = st;
    }
    pu->cursor = pu->n_total;
    TAILQ_REMOVE(&p->queued, pu, link);
    if (pu->n_in_flight == 0) {
        push_finish(x, pu);
    } else {
        TAILQ_INSERT_TAIL(&p->posted, pu, link);
    }
}

void xfer_push_cancel_ticket(struct bt_xfer *x, const uint8_t *ticket)
{
    struct xfer_peer *p;
    TAILQ_FOREACH(p, &x->peers, link)
    {
        struct xfer_push *pu = TAILQ_FIRST(&p->queued);
        while (pu != NULL) {
            struct xfer_push *next = TAILQ_NEXT(pu, link);
            if (memcmp(pu->d.ticket, ticket, BT_XFER_TICKET_BYTES) == 0) {
                push_abort(x, p, pu, BT_ERR_CANCELLED);
            }
            pu = next;
        }
    }
}

void xfer_push_fail_peer(struct bt_xfer *x, struct xfer_peer *p)
{
    struct xfer_push *pu;
    while ((pu = TAILQ_FIRST(&p->queued)) != NULL) {
        push_abort(x, p, pu, BT_ERR_PEER_LOST);
    }
}
