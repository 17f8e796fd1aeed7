/* Nodes that compute nothing. Owns their sessions and what each sequence has got so far. */

#include "bench/router/toy_nodes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/clock.h"
#include "base/mem.h"
#include "net/grpc.h"
#include "net/loop.h"
#include "proto/session.h"

struct toy_job {
    struct bt_ticket ticket;
    uint32_t slot, index, max_tokens, n_tokens;
    uint64_t peer;
    bool ready; /* decode: the prompt is computed */
};

struct toy_node {
    struct toy *t;
    enum bt_role role;
    struct bt_grpc_channel *channel;
    struct bt_grpc_call *call;
    struct bt_timer timer;
    uint64_t due;
    struct toy_job *jobs; /* [max_batch] */
    uint32_t n_jobs;
};

struct toy {
    struct bench_shared *b;
    const struct toy_opts *o;
    struct bt_net_loop *loop;
    struct bt_arena arena;
    struct bt_buf buf;
    struct toy_node *nodes;
    uint32_t n_nodes;
    struct bt_msg_output *outputs; /* [max_batch] */
    struct bt_sampled *tokens;     /* [max_batch] */
    struct bt_timer watch;
};

static void send_message(struct toy_node *n, const struct bt_from_daemon *m)
{
    bt_buf_clear(&n->t->buf);
    if (n->call == NULL || bt_from_daemon_encode(m, &n->t->buf) != BT_OK) {
        return;
    }
    (void)bt_grpc_send(n->call, n->t->buf.data, n->t->buf.len);
}

/* Prompt tokens that wait at a node, the part of the first one that is computed left out. */
static uint64_t waiting_tokens(const struct toy_node *n)
{
    uint64_t sum = 0, now = bt_clock_ns();

    for (uint32_t i = 0; n->role == BT_ROLE_PREFILL && i < n->n_jobs; i++) {
        sum += n->jobs[i].n_tokens;
    }
    double left = n->due > now ? (double)(n->due - now) / 1e9 * n->t->o->prefill_rate : 0;

    return sum == 0 ? 0 : sum - n->jobs[0].n_tokens + (uint64_t)left;
}

static void send_load(struct toy_node *n)
{
    struct bt_from_daemon m = {
        .kind = BT_FROM_DAEMON_LOAD,
        .load = {.running = n->role == BT_ROLE_DECODE ? n->n_jobs : 0,
                 .waiting_tokens = waiting_tokens(n),
                 .pages_free = 1u << 20,
                 .prefill_tokens_per_s = n->t->o->prefill_rate > 0 ? n->t->o->prefill_rate : 1e6,
                 .decode_step_ms = (double)n->t->o->step_ns / 1e6}};

    send_message(n, &m);
}

/* Appends the next token of a job to slot i of the message; true: it was the last. */
static bool next_token(struct toy_node *n, struct toy_job *j, uint32_t i, uint64_t now)
{
    struct toy *t = n->t;

    t->tokens[i] = (struct bt_sampled){.token = t->b->ids[j->index % BENCH_TEXT_TOKENS]};
    t->outputs[i] = (struct bt_msg_output){
        .ticket = j->ticket, .index = j->index, .n_tokens = 1, .tokens = &t->tokens[i]};
    if (n->role == BT_ROLE_DECODE) {
        bench_sent(t->b, j->slot, j->index, now);
    }
    j->index++;
    if (n->role == BT_ROLE_PREFILL || j->index == j->max_tokens) {
        t->outputs[i].finish = j->index == j->max_tokens ? 2 : 0;
        t->outputs[i].has_stats = true;
        return true;
    }
    return false;
}

static void on_step(struct bt_timer *timer, void *arg)
{
    struct toy_node *n = arg;
    struct toy *t = n->t;
    uint64_t now = bt_clock_ns();
    uint32_t kept = 0, sent = 0;

    for (uint32_t i = 0; i < n->n_jobs; i++) {
        if (!n->jobs[i].ready || !next_token(n, &n->jobs[i], sent++, now)) {
            n->jobs[kept++] = n->jobs[i];
        }
    }
    n->n_jobs = kept;
    if (sent > 0) {
        send_message(n, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_OUTPUTS,
                                                 .outputs = {sent, t->outputs}});
    }
    while (n->due <= now) {
        n->due += t->o->step_ns;
    }
    bt_timer_start(t->loop, timer, n->due - now, on_step, n);
}

/* The decode node has got the submit long before a prompt is computed. */
static void hand_off(struct toy *t, const struct toy_job *j)
{
    struct toy_node *d = j->peer > 0 && j->peer <= t->n_nodes ? &t->nodes[j->peer - 1] : NULL;

    for (uint32_t i = 0; d != NULL && i < d->n_jobs; i++) {
        d->jobs[i].ready = d->jobs[i].ready || bt_ticket_equal(&d->jobs[i].ticket, &j->ticket);
    }
}

static void answer_prompt(struct toy_node *n, struct toy_job *j)
{
    (void)next_token(n, j, 0, 0);
    send_message(
        n, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_OUTPUTS, .outputs = {1, n->t->outputs}});
}

static void on_computed(struct bt_timer *timer, void *arg);

static void compute_next(struct toy_node *n)
{
    uint64_t now = bt_clock_ns();

    if (n->n_jobs > 0) { /* as long as a node that was never late would take */
        n->due = n->due + BT_NS_PER_MS * 5 > now ? n->due : now;
        n->due += (uint64_t)(n->jobs[0].n_tokens / n->t->o->prefill_rate * 1e9);
        bt_timer_start(n->t->loop, &n->timer, n->due > now ? n->due - now : 0, on_computed, n);
    }
}

static void on_computed(struct bt_timer *timer, void *arg)
{
    struct toy_node *n = arg;
    struct toy_job j = n->jobs[0];

    (void)timer;
    memmove(n->jobs, n->jobs + 1, --n->n_jobs * sizeof *n->jobs);
    answer_prompt(n, &j);
    hand_off(n->t, &j);
    compute_next(n);
}

static void on_cancel(struct toy_node *n, const struct bt_ticket *t)
{
    for (uint32_t i = 0; i < n->n_jobs; i++) {
        if (bt_ticket_equal(&n->jobs[i].ticket, t)) {
            memmove(n->jobs + i, n->jobs + i + 1, (--n->n_jobs - i) * sizeof *n->jobs);
            if (n->role == BT_ROLE_PREFILL && i == 0) {
                bt_timer_stop(n->t->loop, &n->timer);
                compute_next(n);
            }
            return;
        }
    }
}

static void on_submit(struct toy_node *n, const struct bt_msg_submit *s)
{
    struct toy *t = n->t;
    struct toy_job j = {.ticket = s->ticket,
                        .slot = (uint32_t)s->sampling.seed,
                        .index = (uint32_t)s->n_tokens - s->n_prompt,
                        .n_tokens = (uint32_t)s->n_tokens,
                        .peer = s->peer_instance,
                        .ready = t->o->prefill_rate <= 0,
                        .max_tokens = s->sampling.max_tokens};

    if (n->role == BT_ROLE_PREFILL && t->o->prefill_rate <= 0) {
        answer_prompt(n, &j);
    } else if (n->n_jobs < t->o->max_batch) {
        n->jobs[n->n_jobs++] = j;
        if (n->role == BT_ROLE_PREFILL && n->n_jobs == 1) {
            compute_next(n);
        }
    } else {
        send_message(
            n, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_ATTEMPT_END,
                                        .attempt_end = {s->ticket, BT_ATTEMPT_REFUSED, "full"}});
    }
}

static void on_message(struct bt_grpc_call *call, void *user, const uint8_t *data, size_t len)
{
    struct toy_node *n = user;
    struct bt_from_router m;
    struct bt_err err = {0};

    (void)call;
    bt_arena_reset(&n->t->arena);
    if (bt_from_router_decode(data, len, &n->t->arena, &m, &err) != BT_OK) {
        fprintf(stderr, "bench-router: %s\n", err.msg);
        exit(1);
    }
    if (m.kind == BT_FROM_ROUTER_SUBMIT) {
        on_submit(n, &m.submit);
    } else if (m.kind == BT_FROM_ROUTER_CANCEL) {
        on_cancel(n, &m.cancel.ticket);
    } else if (m.kind != BT_FROM_ROUTER_PEERS) {
        send_load(n);
    }
}

static void on_close(struct bt_grpc_call *call, void *user, const struct bt_grpc_end *end)
{
    struct toy_node *n = user;

    (void)call;
    n->call = NULL;
    if (!atomic_load(&n->t->b->stop)) {
        fprintf(stderr, "bench-router: the router ended a session: %s\n", end->message);
        exit(1);
    }
}

static void node_start(struct toy *t, enum bt_role role)
{
    static const struct bt_grpc_events events = {.on_message = on_message, .on_close = on_close};
    struct toy_node *n = &t->nodes[t->n_nodes++];
    struct bt_err err = {0};
    char name[16];

    *n = (struct toy_node){.t = t, .role = role};
    n->jobs = bt_calloc(t->o->max_batch, sizeof *n->jobs);
    if (n->jobs == NULL ||
        bt_grpc_channel_create(t->loop, &(struct bt_grpc_channel_opts){.address = t->o->sessions},
                               &n->channel, &err) != BT_OK ||
        bt_grpc_call_start(n->channel, &(struct bt_grpc_start){.path = BT_SESSION_METHOD}, &events,
                           n, &n->call) != BT_OK) {
        fprintf(stderr, "bench-router: no session: %s\n", err.msg);
        exit(1);
    }
    snprintf(name, sizeof name, "%c%u", role == BT_ROLE_PREFILL ? 'p' : 'd', t->n_nodes);
    send_message(n, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_HELLO,
                                             .hello = {.version_min = 1,
                                                       .version_max = 1,
                                                       .role = role,
                                                       .instance = t->n_nodes,
                                                       .name = name,
                                                       .fingerprint = 1,
                                                       .numerics = "toy",
                                                       .kv_layout = "none",
                                                       .model_name = "m",
                                                       .transfer_address = "127.0.0.1:1",
                                                       .backend = "toy",
                                                       .page_tokens = 16,
                                                       .n_pages = 1u << 20,
                                                       .max_batch = t->o->max_batch,
                                                       .max_tokens = 1u << 20,
                                                       .context = 1u << 20,
                                                       .vocab = t->b->vocab,
                                                       .lease_ms = 3000}});
    if (role == BT_ROLE_DECODE) { /* steps of the nodes do not coincide */
        n->due = bt_clock_ns() + t->o->step_ns * (t->n_nodes % t->o->n_decode) / t->o->n_decode;
        bt_timer_start(t->loop, &n->timer, t->o->step_ns, on_step, n);
    }
}

static void on_watch(struct bt_timer *timer, void *arg)
{
    struct toy *t = arg;

    if (atomic_load(&t->b->stop)) {
        bt_net_loop_stop(t->loop);
        return;
    }
    bt_timer_start(t->loop, timer, 50 * BT_NS_PER_MS, on_watch, t);
}

void toy_nodes_run(struct bench_shared *b, const struct toy_opts *o)
{
    struct toy t = {.b = b, .o = o};

    bt_arena_init(&t.arena, (size_t)64 << 20);
    t.nodes = bt_calloc(o->n_prefill + o->n_decode, sizeof *t.nodes);
    t.outputs = bt_calloc(o->max_batch, sizeof *t.outputs);
    t.tokens = bt_calloc(o->max_batch, sizeof *t.tokens);
    if (t.nodes == NULL || t.outputs == NULL || t.tokens == NULL ||
        bt_net_loop_create(&t.loop) != BT_OK) {
        fprintf(stderr, "bench-router: out of memory\n");
        exit(1);
    }
    for (uint32_t i = 0; i < o->n_prefill; i++) {
        node_start(&t, BT_ROLE_PREFILL);
    }
    for (uint32_t i = 0; i < o->n_decode; i++) {
        node_start(&t, BT_ROLE_DECODE);
    }
    on_watch(&t.watch, &t);
    bt_net_loop_run(t.loop);
    for (uint32_t i = 0; i < t.n_nodes; i++) {
        bt_timer_stop(t.loop, &t.nodes[i].timer);
        bt_grpc_channel_destroy(t.nodes[i].channel);
        bt_free(t.nodes[i].jobs);
    }
    bt_timer_stop(t.loop, &t.watch);
    bt_net_loop_destroy(t.loop);
    bt_free(t.nodes);
    bt_free(t.outputs);
    bt_free(t.tokens);
    bt_buf_fini(&t.buf);
    bt_arena_fini(&t.arena);
}
