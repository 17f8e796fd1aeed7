/* Around router_core, as router/router_io.c and session_io.c: carries its actions out. */

#include "plan/sim_int.h"

#include "base/assert.h"
#include "base/mem.h"

#define TICK_NS (50 * SIM_MS)

static void do_action(struct bt_sim *s, struct sim_router *r, const struct bt_rt_action *a)
{
    switch (a->kind) {
    case BT_RT_SEND:
        if (a->send.kind == BT_FROM_ROUTER_SUBMIT) {
            sim_client_submitted(s, r, &a->send.submit);
        }
        sim_router_send(s, r, a->session, &a->send);
        break;
    case BT_RT_CLOSE:
        sim_logs(s, a->text, "%p closes a session: %s", r->proc);
        sim_router_close(s, r, a->session);
        break;
    case BT_RT_TOKENS:
        sim_client_tokens(s, r, a);
        break;
    case BT_RT_PROMPT_LOGPROBS:
        sim_client_prompt(s, r, a);
        break;
    case BT_RT_END:
        sim_client_end(s, r, a);
        break;
    case BT_RT_READY:
        sim_log(s, "%p is ready: %u", r->proc, a->ready);
        break;
    case BT_RT_LOG:
        sim_logs(s, a->text, "%p: %s", r->proc);
        break;
    }
}

void sim_router_pump(struct bt_sim *s, struct sim_router *r)
{
    struct bt_rt_action a;

    while (bt_rt_core_next(r->core, &a)) {
        do_action(s, r, &a);
    }
}

static void on_tick(struct bt_sim *s, struct sim_event *e)
{
    struct sim_router *r = s->procs[e->proc].router;

    bt_rt_on_tick(r->core, s->now);
    sim_router_pump(s, r);
    sim_post(s, s->now + TICK_NS, e->proc, on_tick)->k = SIM_TIMER;
}

struct sim_router *sim_router_create(struct bt_sim *s, uint32_t proc)
{
    const struct sim_config *c = &s->cfg;
    struct sim_router *r = sim_alloc(sizeof *r);
    struct bt_rt_opts o = {
        .instance = s->procs[proc].instance,
        .name = s->procs[proc].name,
        .seed = {sim_random(s), sim_random(s)},
        .seqs_max = c->seqs_max,
        .queue_max = c->queue_max,
        .nodes_max = SIM_NODES_MAX * 4,
        .attempts_max = c->attempts_max,
        .queue_ns = c->queue_ns,
        .max_ttft_ns = c->max_ttft_ns,
        .grace_ns = c->grace_ns,
        .migrate_ns = c->migrate_ns,
        .lease_ns = c->lease_ns,
        .heartbeat_ns = c->heartbeat_ns,
        .backoff_ns = 50 * SIM_MS,
        .local_prefill = c->local,
        .local_tokens = c->local_tokens,
    };
    enum bt_status st = bt_rt_core_create(&o, &r->core);

    BT_ASSERT(st == BT_OK);
    r->proc = proc;
    sim_post(s, s->now + TICK_NS, proc, on_tick)->k = SIM_TIMER;
    return r;
}

void sim_router_destroy(struct sim_router *r)
{
    if (r != NULL) {
        bt_rt_core_destroy(r->core);
        bt_free(r);
    }
}
