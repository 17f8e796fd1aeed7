/* Session streams between nodes and routers. A stream keeps the order of its messages; it ends at
 * one side at a time: the other one is told when the network lets it, or never (then its lease ends
 * it). The node's end is what node/router_link.c does: dial, hello, welcome, load, redial. */

#include "plan/sim_int.h"

#include "base/assert.h"
#include "base/mem.h"

#define PAUSE_MIN (100 * SIM_MS)
#define PAUSE_MAX (2 * BT_NS_PER_S)

enum stream_side { AT_NODE, AT_ROUTER };

static void on_to_node(struct bt_sim *s, struct sim_event *e);
static void on_to_router(struct bt_sim *s, struct sim_event *e);
static void on_closed(struct bt_sim *s, struct sim_event *e);

/* ---- streams ---- */

static struct sim_stream *stream_at(struct bt_sim *s, uint32_t i)
{
    return &s->streams[i];
}

/* Keeps the order of one direction. */
static uint64_t arrival(struct bt_sim *s, struct sim_stream *st, enum stream_side to)
{
    uint64_t at = s->now + sim_latency(s);

    st->last_at[to] = at > st->last_at[to] ? at : st->last_at[to];
    return st->last_at[to];
}

/* Posts to one end of a stream; the event is of the process that had that end. */
static struct sim_event *stream_post(struct bt_sim *s, uint32_t i, enum stream_side to, sim_fn *fn)
{
    struct sim_stream *st = stream_at(s, i);
    struct sim_event *e = sim_post(s, arrival(s, st, to), st->proc[to], fn);

    e->incarnation = st->incarnation[to];
    e->i = i;
    return e;
}

static void stream_send(struct bt_sim *s, uint32_t i, enum stream_side to)
{
    struct sim_stream *st = stream_at(s, i);
    struct sim_event *e = stream_post(s, i, to, to == AT_NODE ? on_to_node : on_to_router);

    e->a = s->buf.len;
    e->b = ++st->n_sent[to];
    e->p = sim_alloc(s->buf.len + 1);
    memcpy(e->p, s->buf.data, s->buf.len);
}

/* True: the message must wait, or is lost with its stream. */
static bool stopped(struct bt_sim *s, struct sim_event *e, enum stream_side to)
{
    struct sim_stream *st = stream_at(s, e->i);

    if (s->cut[st->proc[1 - to]][st->proc[to]]) {
        sim_hold(s, e);
        return true;
    }
    return !st->open[to];
}

/* One side closes its end. Messages on the way to the other side may be lost, from some point on. */
static void stream_close(struct bt_sim *s, uint32_t i, enum stream_side side, bool tell)
{
    struct sim_stream *st = stream_at(s, i);
    enum stream_side other = side == AT_NODE ? AT_ROUTER : AT_NODE;

    st->open[side] = false;
    if (st->open[other] && tell) {
        st->keep[other] = sim_between(s, st->n_seen[other], st->n_sent[other]);
        stream_post(s, i, other, on_closed);
    }
}

/* ---- the node's end ---- */

static void link_dial(struct bt_sim *s, struct sim_node *n, uint32_t link);

static void on_redial(struct bt_sim *s, struct sim_event *e)
{
    struct sim_node *n = s->procs[e->proc].node;

    if (n->links[e->i].state == LINK_IDLE) {
        link_dial(s, n, e->i);
    }
}

static void link_closed(struct bt_sim *s, struct sim_node *n, uint32_t link)
{
    struct sim_link *l = &n->links[link];
    bool was_up = l->state == LINK_UP;
    struct sim_event *e = sim_post(s, s->now + l->pause_ns, n->proc, on_redial);

    e->i = link;
    e->k = SIM_TIMER;
    l->pause_ns = l->pause_ns * 2 < PAUSE_MAX ? l->pause_ns * 2 : PAUSE_MAX;
    l->state = LINK_IDLE;
    if (was_up) {
        sim_logs(s, s->procs[n->proc].name, "%s: session with %p is lost", link);
        l->n_outbox = 0;
        bt_arena_reset(&l->arena);
        sim_node_router_lost(s, n, link);
    }
}

static void on_accept(struct bt_sim *s, struct sim_event *e)
{
    struct sim_stream *st = stream_at(s, e->i);
    struct sim_router *r = s->procs[e->proc].router;

    if (stopped(s, e, AT_ROUTER)) {
        return;
    }
    st->session = bt_rt_on_session(r->core, s->now);
    if (st->session == 0) {
        stream_close(s, e->i, AT_ROUTER, true);
    }
    sim_router_pump(s, r);
}

static void on_dial_refused(struct bt_sim *s, struct sim_event *e)
{
    on_closed(s, e);
}

static void send_hello(struct bt_sim *s, struct sim_node *n, uint32_t stream)
{
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_HELLO};

    sim_node_hello(s, n, &m.hello);
    bt_buf_clear(&s->buf);
    enum bt_status st = bt_from_daemon_encode(&m, &s->buf);

    BT_ASSERT(st == BT_OK);
    stream_send(s, stream, AT_ROUTER);
}

static void link_dial(struct bt_sim *s, struct sim_node *n, uint32_t link)
{
    struct sim_link *l = &n->links[link];
    struct sim_proc *r = &s->procs[l->router];

    s->streams = sim_grow(s->streams, s->n_streams, &s->cap_streams, sizeof *s->streams);
    uint32_t i = s->n_streams++;

    s->streams[i] = (struct sim_stream){
        .proc = {n->proc, l->router},
        .incarnation = {s->procs[n->proc].incarnation, r->incarnation},
        .link = link,
        .open = {true, r->alive},
        .keep = {UINT64_MAX, UINT64_MAX},
    };
    l->state = LINK_DIALLING;
    l->stream = i;
    l->last_heard = s->now;
    if (!r->alive) {
        stream_post(s, i, AT_NODE, on_dial_refused);
        return;
    }
    stream_post(s, i, AT_ROUTER, on_accept);
    send_hello(s, n, i);
}

void sim_link_send(struct bt_sim *s, struct sim_node *n, uint32_t link,
                   const struct bt_from_daemon *m)
{
    struct sim_link *l = &n->links[link];

    if (l->state != LINK_UP) {
        return;
    }
    bt_buf_clear(&s->buf);
    enum bt_status st = bt_from_daemon_encode(m, &s->buf);

    BT_ASSERT(st == BT_OK);
    stream_send(s, l->stream, AT_ROUTER);
}

static void send_load(struct bt_sim *s, struct sim_node *n, uint32_t link)
{
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_LOAD};

    sim_node_load(s, n, link, &m.load);
    sim_link_send(s, n, link, &m);
}

static void on_welcome(struct bt_sim *s, struct sim_node *n, uint32_t link,
                       const struct bt_msg_welcome *w)
{
    struct sim_link *l = &n->links[link];

    if (w->version == 0) {
        sim_fail(s, "a router refuses %s: %s", s->procs[n->proc].name, w->reason);
        return;
    }
    sim_logs(s, s->procs[n->proc].name, "%s: session with %p is up", link);
    l->state = LINK_UP;
    l->pause_ns = PAUSE_MIN;
    sim_node_tell_role(s, n, link);
    if (s->procs[n->proc].draining) {
        sim_link_send(s, n, link, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_DRAINING});
    }
    send_load(s, n, link);
    sim_node_router_up(s, n, link);
}

static void on_to_node(struct bt_sim *s, struct sim_event *e)
{
    struct sim_stream *st = stream_at(s, e->i);
    struct sim_node *n = s->procs[e->proc].node;
    uint32_t link = st->link;
    struct bt_from_router m;
    struct bt_err err = {0};

    if (stopped(s, e, AT_NODE) || e->b > st->keep[AT_NODE]) {
        return;
    }
    st->n_seen[AT_NODE] = e->b;
    n->links[link].last_heard = s->now;
    bt_arena_reset(&s->arena);
    if (bt_from_router_decode(e->p, e->a, &s->arena, &m, &err) != BT_OK) {
        sim_fail(s, "a router's message does not decode: %s", err.msg);
    } else if (m.kind == BT_FROM_ROUTER_WELCOME) {
        if (n->links[link].state == LINK_DIALLING) {
            on_welcome(s, n, link, &m.welcome);
        }
    } else if (n->links[link].state == LINK_UP && m.kind != BT_FROM_ROUTER_HEARTBEAT) {
        sim_node_message(s, n, link, &m);
    }
}

void sim_link_beat(struct bt_sim *s, struct sim_node *n)
{
    for (uint32_t i = 0; i < s->cfg.n_routers; i++) {
        struct sim_link *l = &n->links[i];

        if (l->state != LINK_IDLE && s->now - l->last_heard > s->cfg.lease_ns) {
            stream_close(s, l->stream, AT_NODE, true);
            link_closed(s, n, i);
        } else if (l->state == LINK_UP) {
            send_load(s, n, i);
        }
    }
}

/* ---- outputs: those of one wake leave as one message ---- */

static void link_flush(struct bt_sim *s, struct sim_node *n, uint32_t link)
{
    struct sim_link *l = &n->links[link];
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_OUTPUTS};

    if (l->n_outbox == 0) {
        return;
    }
    m.outputs.n = l->n_outbox;
    m.outputs.outputs = l->outbox;
    sim_link_send(s, n, link, &m);
    l->n_outbox = 0;
    bt_arena_reset(&l->arena);
}

static void on_flush(struct bt_sim *s, struct sim_event *e)
{
    struct sim_node *n = s->procs[e->proc].node;

    n->links[e->i].flush_posted = false;
    link_flush(s, n, e->i);
}

static const struct bt_sampled *copy_list(struct sim_link *l, const struct bt_sampled *from,
                                          size_t n)
{
    struct bt_sampled *to = bt_arena_alloc(&l->arena, n * sizeof *to + 1);

    BT_ASSERT(to != NULL);
    if (n > 0) {
        memcpy(to, from, n * sizeof *to);
    }
    return to;
}

void sim_link_output(struct bt_sim *s, struct sim_node *n, uint32_t link,
                     const struct bt_msg_output *o)
{
    struct sim_link *l = &n->links[link];

    l->outbox = bt_grow(l->outbox, l->n_outbox, &l->cap_outbox, sizeof *l->outbox);
    struct bt_msg_output *x = &l->outbox[l->n_outbox++];

    *x = *o;
    x->tokens = copy_list(l, o->tokens, o->n_tokens);
    x->prompt_logprobs = copy_list(l, o->prompt_logprobs, o->n_prompt_logprobs);
    if (!l->flush_posted) {
        l->flush_posted = true;
        sim_post(s, s->now + sim_local(s) / 4, n->proc, on_flush)->i = link;
    }
}

void sim_link_attempt_end(struct bt_sim *s, struct sim_node *n, uint32_t link,
                          const struct bt_msg_attempt_end *m)
{
    link_flush(s, n, link);
    sim_link_send(s, n, link,
                  &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_ATTEMPT_END, .attempt_end = *m});
}

void sim_links_start(struct bt_sim *s, struct sim_node *n)
{
    for (uint32_t i = 0; i < s->cfg.n_routers; i++) {
        n->links[i] = (struct sim_link){.router = i, .pause_ns = PAUSE_MIN};
        bt_arena_init(&n->links[i].arena, (size_t)1 << 24);
        link_dial(s, n, i);
    }
}

void sim_links_fini(struct sim_node *n)
{
    for (uint32_t i = 0; i < SIM_ROUTERS_MAX; i++) {
        bt_arena_fini(&n->links[i].arena);
        bt_free(n->links[i].outbox);
    }
}

/* ---- the router's end ---- */

static void on_to_router(struct bt_sim *s, struct sim_event *e)
{
    struct sim_stream *st = stream_at(s, e->i);
    struct sim_router *r = s->procs[e->proc].router;
    struct bt_from_daemon m;
    struct bt_err err = {0};

    if (stopped(s, e, AT_ROUTER) || e->b > st->keep[AT_ROUTER]) {
        return;
    }
    st->n_seen[AT_ROUTER] = e->b;
    bt_arena_reset(&s->arena);
    if (bt_from_daemon_decode(e->p, e->a, &s->arena, &m, &err) != BT_OK) {
        sim_fail(s, "a node's message does not decode: %s", err.msg);
        return;
    }
    bt_rt_on_message(r->core, s->now, st->session, &m);
    sim_router_pump(s, r);
}

static uint32_t stream_of_session(const struct bt_sim *s, const struct sim_router *r,
                                  uint64_t session)
{
    for (uint32_t i = s->n_streams; i-- > 0;) {
        const struct sim_stream *st = &s->streams[i];

        if (st->proc[AT_ROUTER] == r->proc && st->session == session && st->open[AT_ROUTER] &&
            st->incarnation[AT_ROUTER] == s->procs[r->proc].incarnation) {
            return i;
        }
    }
    return UINT32_MAX;
}

void sim_router_send(struct bt_sim *s, struct sim_router *r, uint64_t session,
                     const struct bt_from_router *m)
{
    uint32_t i = stream_of_session(s, r, session);

    if (i == UINT32_MAX) {
        sim_fail(s, "router %s sends to a session that is over", s->procs[r->proc].name);
        return;
    }
    bt_buf_clear(&s->buf);
    enum bt_status st = bt_from_router_encode(m, &s->buf);

    BT_ASSERT(st == BT_OK);
    stream_send(s, i, AT_NODE);
}

void sim_router_close(struct bt_sim *s, struct sim_router *r, uint64_t session)
{
    uint32_t i = stream_of_session(s, r, session);

    if (i == UINT32_MAX) {
        sim_fail(s, "router %s closes a session that is over", s->procs[r->proc].name);
        return;
    }
    stream_close(s, i, AT_ROUTER, true);
}

/* ---- ends ---- */

static void on_closed(struct bt_sim *s, struct sim_event *e)
{
    struct sim_stream *st = stream_at(s, e->i);
    enum stream_side side = e->proc == st->proc[AT_NODE] ? AT_NODE : AT_ROUTER;

    if (stopped(s, e, side)) {
        return;
    }
    st->open[side] = false;
    if (side == AT_NODE) {
        link_closed(s, s->procs[e->proc].node, st->link);
    } else if (st->session != 0) {
        bt_rt_on_session_lost(s->procs[e->proc].router->core, s->now, st->session, "closed");
        sim_router_pump(s, s->procs[e->proc].router);
    }
}

/* Both ends hear of it by themselves. */
void sim_stream_break(struct bt_sim *s, uint32_t stream)
{
    for (int side = AT_NODE; side <= AT_ROUTER; side++) {
        struct sim_stream *st = stream_at(s, stream);

        if (st->open[side]) {
            st->keep[side] = sim_between(s, st->n_seen[side], st->n_sent[side]);
            stream_post(s, stream, (enum stream_side)side, on_closed);
        }
    }
}

void sim_streams_of_dead(struct bt_sim *s, uint32_t proc, bool noticed)
{
    for (uint32_t i = 0; i < s->n_streams; i++) {
        enum stream_side side = proc == s->streams[i].proc[AT_NODE] ? AT_NODE : AT_ROUTER;

        if (s->streams[i].proc[side] == proc && s->streams[i].open[side]) {
            stream_close(s, i, side, noticed);
        }
    }
}
