/* The receiving side of pages, as transfer/xfer_land.c: what does not match an open landing in every
 * field is dropped; LAND_CLOSED comes when no receive is in flight. Every write checks that the page
 * is still the landing sequence's. */

#include "plan/sim_int.h"

#include "base/assert.h"
#include "base/mem.h"

/* ---- events to the loop ---- */

struct land_event {
    struct bt_ticket ticket;
    uint64_t generation, bytes, move_ns;
    enum bt_status status;
};

static struct land_event *tell(struct bt_sim *s, struct sim_node *n, const struct sim_landing *l,
                               sim_fn *fn)
{
    struct sim_event *e = sim_xfer_event(s, n, fn);
    struct land_event *m = sim_alloc(sizeof *m);

    m->ticket = l->ticket;
    m->generation = l->generation;
    e->p = m;
    e->i = (uint32_t)(l - n->xfer.landings);
    return m;
}

static void on_landed(struct bt_sim *s, struct sim_event *e)
{
    struct sim_node *n = s->procs[e->proc].node;
    const struct land_event *m = e->p;

    n->xfer.landings[e->i].landed_queued = false;
    bt_dc_on_landed(n->dc, s->now, &m->ticket, m->generation);
    sim_decode_run(s, n);
}

static void on_full(struct bt_sim *s, struct sim_event *e)
{
    struct sim_node *n = s->procs[e->proc].node;
    const struct land_event *m = e->p;

    sim_log(s, "%p: landing of ticket %x is full, status %u", e->proc, sim_ticket_id(&m->ticket),
            (uint64_t)-m->status);
    bt_dc_on_land_full(n->dc, s->now, &m->ticket, m->generation, m->status, m->bytes, m->move_ns);
    sim_decode_run(s, n);
}

static void on_closed(struct bt_sim *s, struct sim_event *e)
{
    struct sim_node *n = s->procs[e->proc].node;
    const struct land_event *m = e->p;

    n->xfer.landings[e->i].close_told = true;
    sim_log(s, "%p: landing of ticket %x is closed", e->proc, sim_ticket_id(&m->ticket));
    bt_dc_on_land_closed(n->dc, s->now, &m->ticket, m->generation);
    sim_decode_run(s, n);
}

/* ---- landings ---- */

static struct sim_landing *find(struct sim_node *n, const struct bt_ticket *t, uint64_t generation)
{
    for (uint32_t i = n->xfer.n_landings; i-- > 0;) {
        struct sim_landing *l = &n->xfer.landings[i];

        if (l->generation == generation && bt_ticket_equal(&l->ticket, t)) {
            return l;
        }
    }
    return NULL;
}

bool sim_land_open_of_job(const struct sim_node *n, uint64_t job)
{
    for (uint32_t i = 0; i < n->xfer.n_landings; i++) {
        if (n->xfer.landings[i].job == job && !n->xfer.landings[i].close_told) {
            return true;
        }
    }
    return false;
}

static void landing_close(struct bt_sim *s, struct sim_node *n, struct sim_landing *l)
{
    l->open = false;
    bt_free(l->ids);
    bt_free(l->seen);
    l->ids = NULL;
    l->seen = NULL;
    tell(s, n, l, on_closed);
}

static void check_full(struct bt_sim *s, struct sim_node *n, struct sim_landing *l)
{
    bool over = false;
    uint64_t bytes = 0;

    if (!l->expecting || l->full || l->closing || l->in_flight > 0) {
        return;
    }
    for (uint32_t g = 0; g < s->cfg.n_groups; g++) {
        if (l->got[g] < l->want[g]) {
            return;
        }
        over = over || l->got[g] > l->want[g];
        bytes += l->got[g] * 100;
    }
    l->full = true;
    struct land_event *m = tell(s, n, l, on_full);

    m->status = over ? BT_ERR_PROTOCOL : BT_OK;
    m->bytes = bytes;
    m->move_ns = l->t_last - l->t_first;
}

static void on_open_cmd(struct bt_sim *s, struct sim_event *e)
{
    s->procs[e->proc].node->xfer.landings[e->i].open = true;
}

static uint32_t layer_base(const struct sim_config *c, uint32_t group)
{
    return group == 0 ? 0 : c->n_layers[0];
}

void sim_land_open(struct bt_sim *s, struct sim_node *n, const struct bt_dc_action *a)
{
    struct sim_xfer *x = &n->xfer;
    const struct sim_config *c = &s->cfg;
    uint32_t n_pages = a->pages.n_pages;

    if (find(n, &a->ticket, a->generation) != NULL || sim_conn_find(s, n, a->peer) == UINT32_MAX) {
        sim_fail(s, "%s opens a landing twice, or for an unknown peer", s->procs[n->proc].name);
        return;
    }
    x->landings = sim_grow(x->landings, x->n_landings, &x->cap_landings, sizeof *x->landings);
    uint32_t i = x->n_landings++;
    struct sim_landing *l = &x->landings[i];

    *l = (struct sim_landing){.ticket = a->ticket,
                              .generation = a->generation,
                              .job = a->job,
                              .holder = sim_engine_seq_of(n, a->job),
                              .conn = sim_conn_find(s, n, a->peer),
                              .n_pages = n_pages};
    l->ids = sim_alloc((size_t)c->n_groups * n_pages * sizeof *l->ids);
    l->seen = sim_alloc((size_t)(c->n_layers[0] + c->n_layers[1]) * n_pages);
    for (uint32_t g = 0; g < c->n_groups; g++) {
        l->first[g] = a->pages.first_page[g];
        memcpy(l->ids + (size_t)g * n_pages, a->pages.page_ids[g], n_pages * sizeof *l->ids);
    }
    sim_xfer_cmd(s, n, on_open_cmd)->i = i;
}

static void on_expect_cmd(struct bt_sim *s, struct sim_event *e)
{
    struct sim_node *n = s->procs[e->proc].node;
    struct sim_landing *l = &n->xfer.landings[e->i];

    if (!l->open || l->full || l->closing) {
        return;
    }
    l->expecting = true;
    memcpy(l->want, e->p, sizeof l->want);
    check_full(s, n, l);
}

void sim_land_expect(struct bt_sim *s, struct sim_node *n, const struct bt_dc_action *a)
{
    struct sim_landing *l = find(n, &a->ticket, a->generation);

    if (l == NULL || l->close_asked) {
        sim_fail(s, "%s: LAND_EXPECT of a landing that is not open", s->procs[n->proc].name);
        return;
    }
    struct sim_event *e = sim_xfer_cmd(s, n, on_expect_cmd);

    e->i = (uint32_t)(l - n->xfer.landings);
    e->p = sim_alloc(sizeof l->want);
    memcpy(e->p, a->n_shares, sizeof l->want);
}

static void on_close_cmd(struct bt_sim *s, struct sim_event *e)
{
    struct sim_node *n = s->procs[e->proc].node;
    struct sim_landing *l = &n->xfer.landings[e->i];

    l->closing = true;
    if (l->in_flight == 0) {
        landing_close(s, n, l);
    }
}

void sim_land_close(struct bt_sim *s, struct sim_node *n, const struct bt_dc_action *a)
{
    struct sim_landing *l = find(n, &a->ticket, a->generation);

    if (l == NULL || l->close_asked) {
        sim_fail(s, "%s: LAND_CLOSE twice, or of an unknown landing", s->procs[n->proc].name);
        return;
    }
    l->close_asked = true;
    sim_xfer_cmd(s, n, on_close_cmd)->i = (uint32_t)(l - n->xfer.landings);
}

void sim_landings_fini(struct sim_node *n)
{
    for (uint32_t i = 0; i < n->xfer.n_landings; i++) {
        bt_free(n->xfer.landings[i].ids);
        bt_free(n->xfer.landings[i].seen);
    }
    bt_free(n->xfer.landings);
}

/* ---- shares ---- */

static uint32_t dest(const struct sim_landing *l, const struct sim_op *op)
{
    return l->ids[(size_t)op->group * l->n_pages + op->page];
}

static bool receive_begin(struct bt_sim *s, struct sim_node *n, struct sim_op *op)
{
    struct sim_landing *l = find(n, &op->ticket, op->generation);

    if (l == NULL || !l->open || l->closing || l->full || l->conn != op->conn ||
        op->page < l->first[op->group] || op->page >= l->n_pages ||
        dest(l, op) == BT_BATCH_NO_PAGE) {
        return false;
    }
    uint8_t *seen = &l->seen[(layer_base(&s->cfg, op->group) + op->layer) * l->n_pages + op->page];

    if (*seen) {
        return false;
    }
    *seen = 1;
    l->in_flight++;
    op->landing = (uint32_t)(l - n->xfer.landings);
    op->recv_open = true;
    return true;
}

static void write_page(struct bt_sim *s, struct sim_node *n, const struct sim_landing *l,
                       const struct sim_op *op)
{
    uint32_t page = dest(l, op);
    struct bt_page_info i = bt_pages_info(bt_batch_pages(n->engine.batch, op->group), page);

    if (i.holder != l->holder || (i.state != BT_PAGE_LEASED && i.state != BT_PAGE_QUARANTINED)) {
        sim_fail(s, "%s: page %u of group %u is written by a transfer after it was freed",
                 s->procs[n->proc].name, page, op->group);
        return;
    }
    memcpy(sim_engine_page(s, n, op->group, op->layer, page), op->data,
           s->cfg.page_tokens * sizeof op->data[0]);
}

static void receive_end(struct bt_sim *s, struct sim_node *n, uint32_t at, bool ok)
{
    struct sim_op *op = &s->ops[at];
    struct sim_landing *l = &n->xfer.landings[op->landing];

    op->recv_open = false;
    l->in_flight--;
    if (ok) {
        write_page(s, n, l, op);
        l->got[op->group]++;
        l->t_last = s->now;
        l->t_first = l->t_first == 0 ? s->now : l->t_first;
        s->conns[op->conn].progress[SIDE_D] = s->now;
    }
    if (l->closing) {
        if (l->in_flight == 0) {
            landing_close(s, n, l);
        }
        return;
    }
    if (ok && !l->landed_queued) {
        l->landed_queued = true;
        tell(s, n, l, on_landed);
    }
    check_full(s, n, l);
}

static void on_receive_failed(struct bt_sim *s, struct sim_event *e)
{
    if (s->ops[e->i].used && s->ops[e->i].recv_open && s->ops[e->i].number == e->a) {
        receive_end(s, s->procs[e->proc].node, e->i, false);
        sim_op_put(s, e->i);
    }
}

/* The connection is down at D: its receives end, but not at once. */
void sim_receives_fail(struct bt_sim *s, uint32_t conn)
{
    for (uint32_t i = 0; i < s->n_ops; i++) {
        if (s->ops[i].used && s->ops[i].conn == conn && s->ops[i].recv_open) {
            struct sim_event *e = sim_post(s, s->now + sim_between(s, 0, 50 * SIM_MS),
                                           s->conns[conn].proc[SIDE_D], on_receive_failed);

            e->i = i;
            e->a = s->ops[i].number;
        }
    }
}

/* The data of a rendezvous is there. A source that is gone, or cannot be reached, leaves the receive
 * open until the connection ends. */
static void on_receive_end(struct bt_sim *s, struct sim_event *e)
{
    struct sim_op *op = &s->ops[e->i];
    struct sim_conn *c = &s->conns[op->conn];

    if (!op->used || !op->recv_open || op->number != e->a || c->stalled) {
        return;
    }
    if (s->cut[c->proc[SIDE_P]][c->proc[SIDE_D]]) {
        sim_hold(s, e);
        return;
    }
    if (c->end[SIDE_P] == END_CLOSED || !sim_op_read(s, op)) {
        return;
    }
    receive_end(s, s->procs[e->proc].node, e->i, true);
    sim_share_sent(s, e->i, s->now + sim_latency(s), true);
    sim_op_put(s, e->i);
}

void sim_share_arrives(struct bt_sim *s, struct sim_event *e)
{
    struct sim_op *op = &s->ops[e->i];
    struct sim_conn *c = &s->conns[op->conn];
    struct sim_node *n = s->procs[e->proc].node;

    if (s->cut[c->proc[SIDE_P]][c->proc[SIDE_D]]) {
        sim_hold(s, e);
        return;
    }
    op->arriving = false;
    if (c->end[SIDE_D] == END_UP) {
        c->rx[SIDE_D] = s->now;
        bool begun = receive_begin(s, n, op);

        if (begun && s->cfg.rendezvous) {
            c->progress[SIDE_D] = s->now;
            struct sim_event *end = sim_post(s, s->now + sim_latency(s), e->proc, on_receive_end);

            end->i = e->i;
            end->a = op->number;
            return;
        }
        if (begun) {
            receive_end(s, n, e->i, true);
        }
        if (s->cfg.rendezvous) { /* refused: the sender is done */
            sim_share_sent(s, e->i, s->now + sim_latency(s), true);
        }
    }
    sim_op_put(s, e->i);
}
