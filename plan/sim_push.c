/* The sending side of pages, as transfer/xfer_push.c: pushes of a connection leave share by share
 * under a window; each ends in exactly one PUSHED. Every share that is read checks that its page is
 * still the sequence's. */

#include "plan/sim_int.h"

#include "base/assert.h"
#include "base/mem.h"

static void on_pushed(struct bt_sim *s, struct sim_event *e)
{
    sim_prefill_pushed(s, s->procs[e->proc].node, e->a, e->p, (enum bt_status)e->b);
}

static void push_finish(struct bt_sim *s, struct sim_node *n, struct sim_push *p)
{
    struct sim_event *e = sim_xfer_event(s, n, on_pushed);

    BT_ASSERT(p->in_flight == 0 && !p->over);
    e->a = p->job;
    e->b = (uint64_t)p->status;
    e->p = sim_alloc(sizeof p->ticket);
    memcpy(e->p, &p->ticket, sizeof p->ticket);
    p->over = true;
    bt_free(p->ids);
    p->ids = NULL;
}

/* ---- shares ---- */

bool sim_op_read(struct bt_sim *s, struct sim_op *op)
{
    const struct sim_conn *c = &s->conns[op->conn];
    struct sim_node *n = s->procs[c->proc[SIDE_P]].node;

    if (!sim_alive(s, c->proc[SIDE_P], op->p_incarnation)) {
        return false;
    }
    uint32_t slot = bt_batch_find(n->engine.batch, op->holder);
    const struct bt_batch_seq *b =
        slot != BT_BATCH_NO_SLOT ? bt_batch_seq(n->engine.batch, slot) : NULL;

    if (b == NULL || op->page >= b->n_paged || b->pages[op->group][op->page] != op->source) {
        sim_fail(s, "%s: page %u of group %u is sent after it was freed", s->procs[n->proc].name,
                 op->source, op->group);
        return false;
    }
    memcpy(op->data, sim_engine_page(s, n, op->group, op->layer, op->source),
           s->cfg.page_tokens * sizeof op->data[0]);
    return true;
}

static uint32_t op_get(struct bt_sim *s)
{
    uint32_t i = 0;

    while (i < s->n_ops && s->ops[i].used) {
        i++;
    }
    if (i == s->n_ops) {
        s->ops = sim_grow(s->ops, s->n_ops, &s->cap_ops, sizeof *s->ops);
        s->n_ops++;
    }
    s->ops[i] = (struct sim_op){.used = true, .number = ++s->op_number};
    return i;
}

void sim_op_put(struct bt_sim *s, uint32_t op)
{
    struct sim_op *o = &s->ops[op];

    if (!o->send_open && !o->recv_open && !o->arriving) {
        o->used = false;
    }
}

static void on_sent(struct bt_sim *s, struct sim_event *e);

void sim_share_sent(struct bt_sim *s, uint32_t op, uint64_t at, bool ok)
{
    struct sim_conn *c = &s->conns[s->ops[op].conn];
    struct sim_event *e = sim_post(s, at, c->proc[SIDE_P], on_sent);

    e->incarnation = s->ops[op].p_incarnation;
    e->i = op;
    e->a = s->ops[op].number;
    e->b = ok;
}

static void share_post(struct bt_sim *s, uint32_t at)
{
    struct sim_op *op = &s->ops[at];
    struct sim_conn *c = &s->conns[op->conn];
    struct sim_event *e = sim_post(s, s->now + sim_latency(s) + sim_between(s, 0, s->cfg.share_ns),
                                   c->proc[SIDE_D], sim_share_arrives);

    e->incarnation = c->incarnation[SIDE_D];
    e->i = at;
    op->arriving = true;
}

/* Sends the share at the cursor of a push. */
static void share_send(struct bt_sim *s, uint32_t push, struct sim_push *p)
{
    uint32_t at = op_get(s), twice = UINT32_MAX;
    struct sim_op *op = &s->ops[at];
    struct sim_conn *c = &s->conns[p->conn];

    op->conn = p->conn;
    op->push = push;
    op->p_incarnation = c->incarnation[SIDE_P];
    op->ticket = p->ticket;
    op->generation = p->generation;
    op->holder = p->holder;
    op->group = p->group;
    op->layer = p->layer;
    op->page = p->first + p->cursor;
    op->source = p->ids[p->cursor];
    op->send_open = true;
    p->cursor++;
    p->in_flight++;
    if (c->n_sending++ == 0) {
        c->progress[SIDE_P] = s->now;
    }
    if (!s->cfg.rendezvous) {
        (void)sim_op_read(s, op);
        sim_share_sent(s, at, s->now + sim_between(s, 0, s->cfg.share_ns), true);
    }
    if (!s->cfg.rendezvous && sim_chance(s, s->cfg.share_twice_ppm)) {
        twice = op_get(s); /* moves the list */
        uint64_t number = s->ops[twice].number;

        s->ops[twice] = s->ops[at];
        s->ops[twice].number = number;
        s->ops[twice].send_open = false;
        share_post(s, twice);
    }
    if (!s->cfg.rendezvous && sim_chance(s, s->cfg.share_drop_ppm)) {
        sim_log(s, "a share of ticket %x is dropped", sim_ticket_id(&p->ticket));
        return;
    }
    share_post(s, at);
}

static void pump(struct bt_sim *s, struct sim_node *n, uint32_t conn)
{
    struct sim_xfer *x = &n->xfer;

    if (s->conns[conn].end[SIDE_P] != END_UP) {
        return;
    }
    while (x->push_first < x->n_pushes && x->pushes[x->push_first].over) {
        x->push_first++;
    }
    for (uint32_t i = x->push_first; i < x->n_pushes; i++) {
        struct sim_push *p = &x->pushes[i];

        while (!p->over && p->started && p->conn == conn && p->cursor < p->n_pages) {
            if (s->conns[conn].n_sending >= s->cfg.share_window) {
                return;
            }
            share_send(s, i, p);
        }
    }
}

static void on_sent(struct bt_sim *s, struct sim_event *e)
{
    struct sim_op *op = &s->ops[e->i];
    struct sim_node *n = s->procs[e->proc].node;

    if (!op->used || !op->send_open || op->number != e->a) {
        return;
    }
    struct sim_push *p = &n->xfer.pushes[op->push];
    struct sim_conn *c = &s->conns[op->conn];
    uint32_t conn = op->conn;

    op->send_open = false;
    c->n_sending--;
    c->progress[SIDE_P] = s->now;
    sim_op_put(s, e->i);
    p->in_flight--;
    if (!e->b && p->status == BT_OK) {
        p->status = BT_ERR_PEER_LOST;
    }
    if (p->in_flight == 0 && p->cursor == p->n_pages) {
        push_finish(s, n, p);
    }
    pump(s, n, conn);
}

/* ---- pushes ---- */

static void on_push_cmd(struct bt_sim *s, struct sim_event *e)
{
    struct sim_node *n = s->procs[e->proc].node;
    struct sim_push *p = &n->xfer.pushes[e->i];

    p->started = true;
    if (p->over) {
        return;
    }
    if (s->conns[p->conn].end[SIDE_P] != END_UP) {
        p->status = BT_ERR_PEER_LOST;
        push_finish(s, n, p);
        return;
    }
    pump(s, n, p->conn);
}

void sim_push(struct bt_sim *s, struct sim_node *n, const struct bt_pf_action *a)
{
    struct sim_xfer *x = &n->xfer;
    uint32_t conn = sim_conn_find(s, n, a->peer);

    if (conn == UINT32_MAX || a->push.n_pages == 0) {
        sim_fail(s, "%s pushes nothing, or to an unknown peer", s->procs[n->proc].name);
        return;
    }
    x->pushes = sim_grow(x->pushes, x->n_pushes, &x->cap_pushes, sizeof *x->pushes);
    uint32_t i = x->n_pushes++;
    struct sim_push *p = &x->pushes[i];

    *p = (struct sim_push){.ticket = a->ticket,
                           .generation = a->generation,
                           .job = a->job,
                           .holder = sim_engine_seq_of(n, a->job),
                           .conn = conn,
                           .group = a->push.group,
                           .layer = a->push.layer,
                           .first = a->push.first,
                           .n_pages = a->push.n_pages};
    p->ids = sim_alloc(p->n_pages * sizeof *p->ids);
    memcpy(p->ids, a->push.page_ids, p->n_pages * sizeof *p->ids);
    sim_xfer_cmd(s, n, on_push_cmd)->i = i;
}

/* Drops what has not been sent. */
static void push_abort(struct bt_sim *s, struct sim_node *n, struct sim_push *p, enum bt_status st)
{
    p->status = p->status == BT_OK ? st : p->status;
    p->cursor = p->n_pages;
    if (p->in_flight == 0) {
        push_finish(s, n, p);
    }
}

static void on_cancel_cmd(struct bt_sim *s, struct sim_event *e)
{
    struct sim_node *n = s->procs[e->proc].node;

    for (uint32_t i = n->xfer.push_first; i < n->xfer.n_pushes; i++) {
        struct sim_push *p = &n->xfer.pushes[i];

        if (!p->over && p->started && p->cursor < p->n_pages && bt_ticket_equal(&p->ticket, e->p)) {
            push_abort(s, n, p, BT_ERR_CANCELLED);
        }
    }
}

void sim_push_cancel(struct bt_sim *s, struct sim_node *n, const struct bt_ticket *t)
{
    struct sim_event *e = sim_xfer_cmd(s, n, on_cancel_cmd);

    e->p = sim_alloc(sizeof *t);
    memcpy(e->p, t, sizeof *t);
}

/* The connection is down at P: what is queued ends at once, what is in flight a little later. */
void sim_pushes_fail(struct bt_sim *s, struct sim_node *n, uint32_t conn)
{
    for (uint32_t i = n->xfer.push_first; i < n->xfer.n_pushes; i++) {
        struct sim_push *p = &n->xfer.pushes[i];

        if (!p->over && p->started && p->conn == conn && p->cursor < p->n_pages) {
            push_abort(s, n, p, BT_ERR_PEER_LOST);
        }
    }
    for (uint32_t i = 0; i < s->n_ops; i++) {
        if (s->ops[i].used && s->ops[i].conn == conn && s->ops[i].send_open) {
            sim_share_sent(s, i, s->now + sim_between(s, 0, 50 * SIM_MS), false);
        }
    }
}

void sim_pushes_fini(struct sim_node *n)
{
    for (uint32_t i = 0; i < n->xfer.n_pushes; i++) {
        bt_free(n->xfer.pushes[i].ids);
    }
    bt_free(n->xfer.pushes);
}
