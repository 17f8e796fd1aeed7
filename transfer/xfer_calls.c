/* The calls that other threads make: each checks its arguments, copies them into a command and queues it. Owns the
 * queue of commands from the caller's side, and what becomes of commands that are never run. Does no work itself. */

#include "transfer/xfer_int.h"
#include <stdio.h>
#include <string.h>
#include "base/clock.h"
#include "base/mem.h"

static enum bt_status command_add(struct bt_xfer *x, struct xfer_cmd *c, bool new_work)
{
    bool first, full;
    pthread_mutex_lock(&x->cmd_mu);
    first = x->n_cmds == 0;
    full = new_work && x->n_cmds >= x->o.commands_max;
    if (!full) {
        x->n_cmds++;
        STAILQ_INSERT_TAIL(&x->cmds, c, link);
    }
    pthread_mutex_unlock(&x->cmd_mu);
    if (full) {
        return BT_ERR_BUSY;
    }
    if (first) {
        xfer_wake(x);
    }
    return BT_OK;
}

static struct xfer_cmd *command_new(struct bt_xfer *x, enum xfer_cmd_kind kind, uint64_t peer)
{
    bt_spent_free(&x->spent);
    struct xfer_cmd *c = bt_calloc(1, sizeof(*c));
    if (c != NULL) {
        c->kind = kind;
        c->peer = peer;
    }
    return c;
}

struct xfer_cmd *xfer_command_take(struct bt_xfer *x)
{
    pthread_mutex_lock(&x->cmd_mu);
    struct xfer_cmd *c = STAILQ_FIRST(&x->cmds);
    if (c != NULL) {
        STAILQ_REMOVE_HEAD(&x->cmds, link);
        x->n_cmds--;
    }
    pthread_mutex_unlock(&x->cmd_mu);
    return c;
}

enum bt_status bt_xfer_connect(struct bt_xfer *x, const char *address, uint64_t instance,
                               const struct bt_gate_token *token, uint64_t *peer)
{
    struct xfer_cmd *c = command_new(x, XFER_CMD_CONNECT, 0);
    struct xfer_peer *p = xfer_peer_alloc(x);
    enum bt_status st = BT_ERR_NOMEM;
    if (c == NULL || p == NULL) {
        goto err;
    }
    st = BT_ERR_INVALID;
    if (instance == 0 || strlen(address) >= sizeof(p->address)) {
        goto err;
    }
    snprintf(p->address, sizeof(p->address), "%s", address);
    p->expect = instance;
    p->token = *token;
    c->dial = p;
    uint64_t id = p->id; /* the thread may free p before we return */
    st = command_add(x, c, true);
    if (st != BT_OK) {
        goto err;
    }
    *peer = id;
    return BT_OK;
err:
    if (p != NULL) {
        xfer_peer_free(p);
    }
    bt_free(c);
    return st;
}

enum bt_status bt_xfer_disconnect(struct bt_xfer *x, uint64_t peer)
{
    struct xfer_cmd *c = command_new(x, XFER_CMD_DISCONNECT, peer);
    return c == NULL ? BT_ERR_NOMEM : command_add(x, c, false);
}

enum bt_status bt_xfer_send_ctrl(struct bt_xfer *x, uint64_t peer, const void *data, size_t n)
{
    if (n == 0 || n > BT_XFER_CTRL_MAX) {
        return BT_ERR_INVALID;
    }
    struct xfer_cmd *c = command_new(x, XFER_CMD_CTRL, peer);
    struct xfer_ctrl *m = bt_calloc(1, sizeof(*m) + n);
    enum bt_status st = BT_ERR_NOMEM;
    if (c != NULL && m != NULL) {
        m->n = n;
        memcpy(m->data, data, n);
        c->ctrl = m;
        if (atomic_fetch_add(&x->ctrl_out_bytes, n) + n > x->o.ctrl_bytes_max) {
            st = BT_ERR_BUSY;
        } else {
            st = command_add(x, c, true);
        }
        if (st != BT_OK) {
            atomic_fetch_sub(&x->ctrl_out_bytes, n);
        }
    }
    if (st != BT_OK) {
        bt_free(m);
        bt_free(c);
    }
    return st;
}

enum bt_status bt_xfer_land_open(struct bt_xfer *x, const struct bt_xfer_landing *d)
{
    struct xfer_landing *l = NULL;
    if (atomic_fetch_add(&x->n_landings, 1) >= x->o.landings_max) {
        atomic_fetch_sub(&x->n_landings, 1);
        return BT_ERR_BUSY;
    }
    struct xfer_cmd *c = command_new(x, XFER_CMD_LAND_OPEN, d->peer);
    enum bt_status st = c == NULL ? BT_ERR_NOMEM : xfer_landing_make(x, d, &l);
    if (st == BT_OK) {
        c->landing = l;
        st = command_add(x, c, true);
    }
    if (st != BT_OK) {
        if (l != NULL) {
            xfer_landing_free(x, l);
        }
        bt_free(c);
        atomic_fetch_sub(&x->n_landings, 1);
    }
    return st;
}

static enum bt_status ref_command(struct bt_xfer *x, enum xfer_cmd_kind kind, const uint8_t *ticket,
                                  uint64_t generation, const uint64_t *n_shares)
{
    struct xfer_cmd *c = command_new(x, kind, 0);
    if (c == NULL) {
        return BT_ERR_NOMEM;
    }
    memcpy(c->ref.ticket, ticket, BT_XFER_TICKET_BYTES);
    c->ref.generation = generation;
    if (n_shares != NULL) {
        memcpy(c->ref.n_shares, n_shares, sizeof(c->ref.n_shares));
    }
    return command_add(x, c, false);
}

enum bt_status bt_xfer_land_expect(struct bt_xfer *x, const uint8_t ticket[BT_XFER_TICKET_BYTES],
                                   uint64_t generation, const uint64_t n_shares[BT_XFER_GROUPS_MAX])
{
    return ref_command(x, XFER_CMD_LAND_EXPECT, ticket, generation, n_shares);
}

enum bt_status bt_xfer_land_close(struct bt_xfer *x, const uint8_t ticket[BT_XFER_TICKET_BYTES],
                                  uint64_t generation)
{
    return ref_command(x, XFER_CMD_LAND_CLOSE, ticket, generation, NULL);
}

enum bt_status bt_xfer_push_cancel(struct bt_xfer *x, const uint8_t ticket[BT_XFER_TICKET_BYTES])
{
    return ref_command(x, XFER_CMD_CANCEL, ticket, 0, NULL);
}

static bool push_valid(const struct bt_xfer_push *d)
{
    return d->page_layer_bytes > 0 && d->page_layer_bytes <= BT_XFER_SHARE_MAX &&
           d->n_pages <= BT_XFER_PAGES_MAX && d->n_layers <= 4096 && d->layer <= 4096 &&
           d->group < BT_XFER_GROUPS_MAX && d->first_page <= UINT32_MAX - BT_XFER_PAGES_MAX &&
           (d->n_pages == 0 || (d->base != NULL && d->page_ids != NULL));
}

/* Copies d with its arrays behind the struct. */
static struct xfer_push *push_new(const struct bt_xfer_push *d)
{
    size_t n = d->n_pages;
    size_t n_ids = n * (d->page_index != NULL ? 2 : 1);
    struct xfer_push *pu = bt_calloc(1, sizeof(*pu) + n_ids * sizeof(uint32_t));
    if (pu == NULL) {
        return NULL;
    }
    pu->done = bt_calloc(1, sizeof(*pu->done));
    if (pu->done == NULL) {
        bt_free(pu);
        return NULL;
    }
    pu->d = *d;
    if (n > 0) {
        memcpy(pu->ids, d->page_ids, n * sizeof(uint32_t));
        if (d->page_index != NULL) {
            memcpy(pu->ids + n, d->page_index, n * sizeof(uint32_t));
        }
    }
    pu->d.page_ids = pu->ids;
    pu->d.page_index = d->page_index != NULL ? pu->ids + n : NULL;
    pu->n_total = (uint64_t)d->n_layers * d->n_pages;
    return pu;
}

static void push_free(struct xfer_push *pu)
{
    bt_free(pu->done);
    bt_free(pu);
}

enum bt_status bt_xfer_push(struct bt_xfer *x, const struct bt_xfer_push *d)
{
    if (!push_valid(d)) {
        return BT_ERR_INVALID;
    }
    struct xfer_cmd *c = command_new(x, XFER_CMD_PUSH, d->peer);
    struct xfer_push *pu = push_new(d);
    enum bt_status st = BT_ERR_NOMEM;
    if (c != NULL && pu != NULL) {
        pu->call_ns = x->o.manual ? 0 : bt_clock_ns();
        c->push = pu;
        st = command_add(x, c, true);
    }
    if (st != BT_OK) {
        if (pu != NULL) {
            push_free(pu);
        }
        bt_free(c);
    }
    return st;
}

/* Commands that were never run. */
void xfer_command_drop(struct bt_xfer *x, struct xfer_cmd *c)
{
    switch (c->kind) {
    case XFER_CMD_CONNECT:
        xfer_peer_free(c->dial);
        break;
    case XFER_CMD_CTRL:
        bt_free(c->ctrl);
        break;
    case XFER_CMD_LAND_OPEN:
        xfer_landing_free(x, c->landing);
        break;
    case XFER_CMD_PUSH:
        push_free(c->push);
        break;
    default:
        break;
    }
    bt_free(c);
}
