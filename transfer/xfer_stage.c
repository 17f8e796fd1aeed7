/* Shares whose pages lie in memory that only a device can touch: copied to slots of pinned host memory before they are sent, and
 * from slots into their pages after they came, while others are on the wire. Owns the slots and the order of the copies;
 * moves nothing itself: bt_xfer_stage does.
 *
 * Sends take at most half of the slots. What comes when there is none is received into memory of the host, from which it goes
 * into the next free slot: a receive never waits for a send. */

#include <sched.h>
#include <string.h>
#include "base/assert.h"
#include "base/clock.h"
#include "transfer/xfer_int.h"

#define SPARE_MAX 8192U /* receives without a slot, if address space allows */

enum bt_status xfer_stage_init(struct bt_xfer *x, const struct bt_xfer_stage *o)
{
    struct xfer_stage *s = &x->stage;

    STAILQ_INIT(&s->moving);
    STAILQ_INIT(&s->waiting);
    if (o == NULL) {
        return BT_OK;
    }
    BT_ASSERT(o->n_slots >= 2 && o->slot_bytes > 0);
    size_t n = XFER_STAGE_SPARE_BYTES / o->slot_bytes;
    s->o = *o;
    s->free = bt_alloc(o->n_slots * sizeof(*s->free));
    if (s->free == NULL) {
        return BT_ERR_NOMEM;
    }
    for (uint32_t i = 0; i < o->n_slots; i++) {
        s->free[s->n_free++] = o->n_slots - 1 - i;
    }
    n = n < 64 ? 64 : n > SPARE_MAX ? SPARE_MAX : n;
    return bt_slab_init(&s->spare, "pages that wait for a copy", o->slot_bytes, (uint32_t)n);
}

void xfer_stage_fini(struct bt_xfer *x)
{
    bt_free(x->stage.free);
    bt_slab_fini(&x->stage.spare);
}

/* Takes a slot for op; its memory is op->data then. */
static bool take_slot(struct xfer_stage *s, struct xfer_op *op)
{
    if (s->n_free == 0) {
        return false;
    }
    op->slot = s->free[--s->n_free];
    op->has_slot = true;
    op->data = s->o.slot(s->o.arg, op->slot);
    return true;
}

static void start(struct bt_xfer *x, struct xfer_op *op)
{
    struct xfer_stage *s = &x->stage;

    s->o.start(s->o.arg, op->slot, op->device, op->bytes, op->landing != NULL);
    s->n_queued++;
    STAILQ_INSERT_TAIL(&s->moving, op, link);
}

/* ---- out ---- */

bool xfer_stage_get_out(struct bt_xfer *x, struct xfer_op *op)
{
    struct xfer_stage *s = &x->stage;

    if (s->n_out >= s->o.n_slots / 2 || !STAILQ_EMPTY(&s->waiting) || !take_slot(s, op)) {
        return false;
    }
    op->is_out = true;
    s->n_out++;
    return true;
}

void xfer_stage_out(struct bt_xfer *x, struct xfer_op *op)
{
    start(x, op);
}

/* ---- in ---- */

uint8_t *xfer_stage_get_in(struct bt_xfer *x, struct xfer_op *op, uint8_t *device)
{
    struct xfer_stage *s = &x->stage;

    op->device = device;
    if (!STAILQ_EMPTY(&s->waiting) || !take_slot(s, op)) {
        op->spare = bt_slab_get(&s->spare);
        op->data = op->spare;
    }
    return (uint8_t *)(uintptr_t)op->data; /* a receive's destination */
}

void xfer_stage_in(struct bt_xfer *x, struct xfer_op *op)
{
    if (op->has_slot) {
        start(x, op);
    } else {
        STAILQ_INSERT_TAIL(&x->stage.waiting, op, link);
    }
}

/* ---- progress ---- */

void xfer_stage_put(struct bt_xfer *x, struct xfer_op *op)
{
    struct xfer_stage *s = &x->stage;

    if (op->has_slot) {
        s->free[s->n_free++] = op->slot;
        s->n_out -= op->is_out;
        op->has_slot = false;
    }
    if (op->spare != NULL) {
        bt_slab_put(&s->spare, op->spare);
        op->spare = NULL;
    }
}

/* The next one that has no slot takes one. false: none does. */
static bool serve_waiting(struct bt_xfer *x)
{
    struct xfer_stage *s = &x->stage;
    struct xfer_op *op = STAILQ_FIRST(&s->waiting);

    if (op == NULL || !take_slot(s, op)) {
        return false;
    }
    STAILQ_REMOVE_HEAD(&s->waiting, link);
    memcpy((uint8_t *)(uintptr_t)op->data, op->spare, op->bytes); /* a slot, ours */
    bt_slab_put(&s->spare, op->spare);
    op->spare = NULL;
    start(x, op);
    return true;
}

/* A page is in its slot, or in its place. */
static void moved(struct bt_xfer *x, struct xfer_op *op, enum bt_status st)
{
    struct xfer_peer *p = op->peer;

    if (op->landing != NULL) {
        op->is_moved = true;
        xfer_received(x, op, st);
    } else if (st == BT_OK && (p->state != PEER_UP || p->broken != BT_OK)) {
        xfer_sent(x, op, BT_ERR_PEER_LOST); /* nothing is posted on its connection any more */
    } else if (st != BT_OK) {
        xfer_sent(x, op, st);
    } else {
        xfer_push_send(x, op);
    }
}

bool xfer_stage_step(struct bt_xfer *x)
{
    struct xfer_stage *s = &x->stage;
    struct xfer_op *op;

    if (STAILQ_EMPTY(&s->moving) && STAILQ_EMPTY(&s->waiting)) {
        return false;
    }
    for (unsigned n = 0; n < XFER_STAGE_PER_ROUND && (op = STAILQ_FIRST(&s->moving)) != NULL; n++) {
        enum bt_status st = s->o.done(s->o.arg, op->slot, false);
        if (st == BT_ERR_BUSY) {
            (void)
                sched_yield(); /* a copy takes microseconds, and nothing else would tell of its end */
            break;
        }
        STAILQ_REMOVE_HEAD(&s->moving, link);
        x->st.staged_bytes += st == BT_OK ? op->bytes : 0;
        moved(x, op, st);
        (void)serve_waiting(x);
    }
    /* Those that wait for slots which the wire holds wait for the wire. */
    return serve_waiting(x) || !STAILQ_EMPTY(&s->moving);
}

bool xfer_stage_go(struct bt_xfer *x)
{
    struct xfer_stage *s = &x->stage;

    if (s->n_queued == 0) {
        return false;
    }
    s->o.go(s->o.arg);
    x->st.staged_shares += s->n_queued;
    x->st.staged_batches++;
    s->n_queued = 0;
    return true;
}
