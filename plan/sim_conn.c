/* Transfer connections: dial, greeting, control messages in any order, heartbeats, the way down. As
 * transfer/xfer.h promises it, with one event queue and one command queue for each node between the
 * loop and the transfer thread. */

#include "plan/sim_int.h"

#include "base/assert.h"
#include "base/mem.h"

uint64_t sim_conn_id(uint32_t conn, enum sim_side side)
{
    return ((uint64_t)conn + 1) * 2 + side;
}

uint32_t sim_conn_find(const struct bt_sim *s, const struct sim_node *n, uint64_t id)
{
    uint32_t i = (uint32_t)(id / 2 - 1);
    enum sim_side side = sim_conn_side(id);

    return id >= 2 && i < s->n_conns && sim_conn_id(i, side) == id &&
                   s->conns[i].proc[side] == n->proc &&
                   sim_alive(s, n->proc, s->conns[i].incarnation[side])
               ? i
               : UINT32_MAX;
}

/* ---- queues between loop and transfer thread ---- */

struct sim_event *sim_xfer_event(struct bt_sim *s, struct sim_node *n, sim_fn *fn)
{
    uint64_t at = s->now + sim_local(s);

    n->xfer.event_at = at > n->xfer.event_at ? at : n->xfer.event_at;
    return sim_post(s, n->xfer.event_at, n->proc, fn);
}

struct sim_event *sim_xfer_cmd(struct bt_sim *s, struct sim_node *n, sim_fn *fn)
{
    uint64_t at = s->now + sim_local(s);

    n->xfer.cmd_at = at > n->xfer.cmd_at ? at : n->xfer.cmd_at;
    return sim_post(s, n->xfer.cmd_at, n->proc, fn);
}

/* To the other end of a connection, whatever order it arrives in. */
static struct sim_event *conn_post(struct bt_sim *s, uint32_t conn, enum sim_side to, sim_fn *fn)
{
    struct sim_conn *c = &s->conns[conn];
    struct sim_event *e = sim_post(s, s->now + sim_latency(s), c->proc[to], fn);

    e->incarnation = c->incarnation[to];
    e->i = conn;
    return e;
}

static bool is_cut(const struct bt_sim *s, const struct sim_conn *c, enum sim_side to)
{
    return s->cut[c->proc[1 - to]][c->proc[to]];
}

/* ---- down ---- */

static const char *const why_texts[] = {"closed by the other side",
                                        "nothing heard",
                                        "no progress",
                                        "no greeting",
                                        "refused",
                                        "cancelled",
                                        "replaced"};
enum why {
    WHY_CLOSED,
    WHY_SILENT,
    WHY_STALLED,
    WHY_CONNECT,
    WHY_REFUSED,
    WHY_CANCELLED,
    WHY_REPLACED
};

static void on_down_event(struct bt_sim *s, struct sim_event *e)
{
    sim_node_peer_down(s, s->procs[e->proc].node, e->a, why_texts[e->b]);
}

static void on_reset(struct bt_sim *s, struct sim_event *e);

static void end_down(struct bt_sim *s, uint32_t conn, enum sim_side side, enum why why, bool tell)
{
    struct sim_conn *c = &s->conns[conn];
    struct sim_node *n = s->procs[c->proc[side]].node;
    enum sim_end was = c->end[side];

    if (was == END_CLOSED || was == END_NONE) {
        return;
    }
    c->end[side] = END_CLOSED;
    struct sim_event *e = sim_xfer_event(s, n, on_down_event);

    e->a = sim_conn_id(conn, side);
    e->b = why;
    if (side == SIDE_P) {
        sim_pushes_fail(s, n, conn);
    } else {
        sim_receives_fail(s, conn);
    }
    if (tell && c->end[1 - side] != END_CLOSED) {
        conn_post(s, conn, 1 - side, on_reset);
    }
}

static void on_reset(struct bt_sim *s, struct sim_event *e)
{
    struct sim_conn *c = &s->conns[e->i];
    enum sim_side side = e->proc == c->proc[SIDE_P] ? SIDE_P : SIDE_D;

    if (!is_cut(s, c, side)) { /* else its lease tells */
        end_down(s, e->i, side, WHY_CLOSED, false);
    }
}

/* ---- up ---- */

static void on_up_event(struct bt_sim *s, struct sim_event *e)
{
    sim_node_peer_up(s, s->procs[e->proc].node, e->a);
}

static void end_up(struct bt_sim *s, uint32_t conn, enum sim_side side)
{
    struct sim_conn *c = &s->conns[conn];
    struct sim_node *n = s->procs[c->proc[side]].node;

    c->end[side] = END_UP;
    c->rx[side] = c->progress[side] = s->now;
    sim_xfer_event(s, n, on_up_event)->a = sim_conn_id(conn, side);
}

static void on_ready(struct bt_sim *s, struct sim_event *e)
{
    struct sim_conn *c = &s->conns[e->i];

    if (is_cut(s, c, SIDE_P)) {
        sim_hold(s, e);
    } else if (c->end[SIDE_P] == END_DIALING) {
        end_up(s, e->i, SIDE_P);
    }
}

static void on_refused(struct bt_sim *s, struct sim_event *e)
{
    if (!is_cut(s, &s->conns[e->i], SIDE_P)) {
        end_down(s, e->i, SIDE_P, WHY_REFUSED, false);
    }
}

/* Hello, welcome and test page in one. */
static void on_greeting(struct bt_sim *s, struct sim_event *e)
{
    struct sim_conn *c = &s->conns[e->i];

    if (is_cut(s, c, SIDE_D)) {
        sim_hold(s, e);
        return;
    }
    if (c->instance != s->procs[e->proc].instance ||
        s->cfg.classes[c->proc[SIDE_P]] != s->cfg.classes[c->proc[SIDE_D]]) {
        conn_post(s, e->i, SIDE_P, on_refused);
        return;
    }
    struct bt_gate_token want = sim_gate_token(&s->procs[e->proc]);

    if (!bt_gate_token_equal(&c->gate_token, &want)) {
        sim_fail(s, "%s comes to the gate of %s without its token", s->procs[c->proc[SIDE_P]].name,
                 s->procs[e->proc].name);
        return;
    }
    for (uint32_t i = 0; i < s->n_conns; i++) {
        struct sim_conn *o = &s->conns[i];

        if (i != e->i && o->end[SIDE_D] == END_UP && o->proc[SIDE_D] == e->proc &&
            o->proc[SIDE_P] == c->proc[SIDE_P] &&
            o->incarnation[SIDE_P] == c->incarnation[SIDE_P]) {
            end_down(s, i, SIDE_D, WHY_REPLACED, true);
        }
    }
    end_up(s, e->i, SIDE_D);
    conn_post(s, e->i, SIDE_P, on_ready);
    if (c->end[SIDE_P] == END_CLOSED) { /* it gave up meanwhile */
        conn_post(s, e->i, SIDE_D, on_reset);
    }
}

static void on_connect_time(struct bt_sim *s, struct sim_event *e)
{
    if (s->conns[e->i].end[SIDE_P] == END_DIALING) {
        end_down(s, e->i, SIDE_P, WHY_CONNECT, true);
    }
}

uint64_t sim_connect(struct bt_sim *s, struct sim_node *n, const char *address, uint64_t instance,
                     const struct bt_gate_token *token)
{
    uint32_t to = sim_proc_by_name(s, address);

    if (to == UINT32_MAX || s->procs[to].is_router) {
        sim_fail(s, "%s dials \"%s\"", s->procs[n->proc].name, address);
        return 0;
    }
    s->conns = sim_grow(s->conns, s->n_conns, &s->cap_conns, sizeof *s->conns);
    uint32_t i = s->n_conns++;

    s->conns[i] = (struct sim_conn){
        .proc = {n->proc, to},
        .incarnation = {s->procs[n->proc].incarnation, s->procs[to].incarnation},
        .end = {END_DIALING, END_NONE},
        .instance = instance,
        .gate_token = *token,
    };
    sim_logs(s, s->procs[n->proc].name, "%s dials %p, connection %u", to, i);
    if (s->procs[to].alive) {
        conn_post(s, i, SIDE_D, on_greeting);
    } else {
        conn_post(s, i, SIDE_P, on_refused);
    }
    struct sim_event *e = sim_post(s, s->now + s->cfg.connect_ns, n->proc, on_connect_time);

    e->i = i;
    e->k = SIM_TIMER;
    return sim_conn_id(i, SIDE_P);
}

/* ---- disconnect ---- */

static void on_disconnect(struct bt_sim *s, struct sim_event *e)
{
    end_down(s, e->i, (enum sim_side)e->a, WHY_CANCELLED, true);
}

void sim_disconnect(struct bt_sim *s, struct sim_node *n, uint64_t id)
{
    uint32_t conn = sim_conn_find(s, n, id);

    if (conn == UINT32_MAX) {
        sim_fail(s, "%s disconnects an unknown peer", s->procs[n->proc].name);
        return;
    }
    struct sim_event *e = sim_xfer_cmd(s, n, on_disconnect);

    e->i = conn;
    e->a = sim_conn_side(id);
}

/* Both ends notice by themselves. */
void sim_conn_break(struct bt_sim *s, uint32_t conn)
{
    struct sim_conn *c = &s->conns[conn];

    for (int side = SIDE_P; side <= SIDE_D; side++) {
        if (sim_alive(s, c->proc[side], c->incarnation[side]) && !s->procs[c->proc[side]].frozen) {
            end_down(s, conn, (enum sim_side)side, WHY_CLOSED, true);
        }
    }
}

void sim_conns_of_dead(struct bt_sim *s, uint32_t proc, bool noticed)
{
    for (uint32_t i = 0; i < s->n_conns; i++) {
        struct sim_conn *c = &s->conns[i];
        enum sim_side side = c->proc[SIDE_P] == proc ? SIDE_P : SIDE_D;

        if (c->proc[side] != proc || c->end[side] == END_CLOSED ||
            c->incarnation[side] != s->procs[proc].incarnation) {
            continue;
        }
        c->end[side] = END_CLOSED;
        if (noticed && c->end[1 - side] != END_CLOSED) {
            conn_post(s, i, 1 - side, on_reset);
        }
    }
}

/* ---- control messages ---- */

static void on_control_event(struct bt_sim *s, struct sim_event *e)
{
    struct sim_node *n = s->procs[e->proc].node;
    struct bt_control m;
    struct bt_err err = {0};

    bt_arena_reset(&s->arena);
    if (bt_control_decode(e->p, e->b, &s->arena, &m, &err) != BT_OK) {
        sim_fail(s, "a control message does not decode: %s", err.msg);
        return;
    }
    sim_logs(s, bt_control_name(m.kind), "%p gets %s ticket %x generation %u", e->proc,
             sim_ticket_id(&m.ticket), m.generation);
    sim_node_control(s, n, e->a, &m);
}

static void on_control_arrives(struct bt_sim *s, struct sim_event *e)
{
    struct sim_conn *c = &s->conns[e->i];
    enum sim_side side = e->proc == c->proc[SIDE_P] ? SIDE_P : SIDE_D;
    struct sim_node *n = s->procs[e->proc].node;

    if (is_cut(s, c, side)) {
        sim_hold(s, e);
        return;
    }
    if (side == SIDE_P && c->end[side] == END_DIALING) {
        end_up(s, e->i, side); /* D says nothing before the greeting was right */
    }
    if (c->end[side] != END_UP) {
        return;
    }
    c->rx[side] = s->now;
    struct sim_event *to = sim_xfer_event(s, n, on_control_event);

    to->a = sim_conn_id(e->i, side);
    to->b = e->b;
    to->p = e->p;
    e->p = NULL;
}

static void on_control_cmd(struct bt_sim *s, struct sim_event *e)
{
    struct sim_conn *c = &s->conns[e->i];
    enum sim_side side = (enum sim_side)e->a;

    if (c->end[side] != END_UP) {
        return; /* lost with its connection */
    }
    struct sim_event *to = conn_post(s, e->i, 1 - side, on_control_arrives);

    to->b = e->b;
    to->p = e->p;
    e->p = NULL;
}

void sim_control(struct bt_sim *s, struct sim_node *n, uint64_t id, const struct bt_control *m)
{
    uint32_t conn = sim_conn_find(s, n, id);

    if (conn == UINT32_MAX) {
        sim_fail(s, "%s sends %s to a peer that it was never told of", s->procs[n->proc].name,
                 bt_control_name(m->kind));
        return;
    }
    if (sim_chance(s, s->cfg.ctrl_lost_ppm)) {
        sim_logs(s, bt_control_name(m->kind), "a send of %s is refused, ticket %x",
                 sim_ticket_id(&m->ticket));
        return;
    }
    bt_buf_clear(&s->buf);
    enum bt_status st = bt_control_encode(m, &s->buf);

    BT_ASSERT(st == BT_OK);
    struct sim_event *e = sim_xfer_cmd(s, n, on_control_cmd);

    e->i = conn;
    e->a = sim_conn_side(id);
    e->b = s->buf.len;
    e->p = sim_alloc(s->buf.len + 1);
    memcpy(e->p, s->buf.data, s->buf.len);
}

/* A message that comes as if the other end had sent it. */
void sim_conn_forge(struct bt_sim *s, uint32_t conn, enum sim_side to, const struct bt_control *m)
{
    if (s->conns[conn].end[to] != END_UP) {
        return;
    }
    bt_buf_clear(&s->buf);
    enum bt_status st = bt_control_encode(m, &s->buf);

    BT_ASSERT(st == BT_OK);
    struct sim_event *e = conn_post(s, conn, to, on_control_arrives);

    e->b = s->buf.len;
    e->p = sim_alloc(s->buf.len + 1);
    memcpy(e->p, s->buf.data, s->buf.len);
}

/* ---- heartbeats ---- */

static void on_ping(struct bt_sim *s, struct sim_event *e)
{
    struct sim_conn *c = &s->conns[e->i];
    enum sim_side side = e->proc == c->proc[SIDE_P] ? SIDE_P : SIDE_D;

    if (is_cut(s, c, side)) {
        return;
    }
    if (side == SIDE_P && c->end[side] == END_DIALING) {
        end_up(s, e->i, side);
    }
    c->rx[side] = s->now;
}

static bool in_flight(const struct bt_sim *s, uint32_t conn, enum sim_side side)
{
    for (uint32_t i = 0; i < s->n_ops; i++) {
        const struct sim_op *op = &s->ops[i];

        if (op->used && op->conn == conn && (side == SIDE_P ? op->send_open : op->recv_open)) {
            return true;
        }
    }
    return false;
}

static void end_tick(struct bt_sim *s, struct sim_node *n, uint32_t conn, enum sim_side side)
{
    struct sim_conn *c = &s->conns[conn];

    if (c->proc[side] != n->proc || c->end[side] != END_UP) {
        return;
    }
    if (s->now - c->rx[side] >= s->cfg.lease_ns) {
        end_down(s, conn, side, WHY_SILENT, sim_chance(s, 500000));
    } else if (s->now - c->progress[side] >= s->cfg.transfer_ns && in_flight(s, conn, side)) {
        end_down(s, conn, side, WHY_STALLED, true);
    } else {
        conn_post(s, conn, 1 - side, on_ping);
    }
}

void sim_conns_tick(struct bt_sim *s, struct sim_node *n)
{
    for (uint32_t i = 0; i < s->n_conns; i++) {
        end_tick(s, n, i, SIDE_P);
        end_tick(s, n, i, SIDE_D);
    }
}
