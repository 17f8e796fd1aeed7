/* Around prefilld_core, as prefilld/prefilld_io.c: carries its actions out, gives it what happens. */

#include "plan/sim_int.h"

#include <stdlib.h>
#include "base/assert.h"
#include "base/mem.h"

/* Answers to actions, given to the core after its list was carried out. */
struct sim_answer {
    enum {
        ANSWER_CONNECTING,
        ANSWER_CONNECT_FAILED,
        ANSWER_PUSH_FAILED,
        ANSWER_ENGINE_FAILED
    } kind;
    uint64_t id, conn;
    struct bt_ticket ticket; /* PUSH_FAILED */
};

void sim_prefill_start(struct bt_sim *s, struct sim_node *n)
{
    const struct sim_config *c = &s->cfg;
    struct bt_pf_opts o = {
        .max_jobs = c->max_jobs,
        .peers_max = SIM_NODES_MAX * 2,
        .n_groups = c->n_groups,
        .page_tokens = c->page_tokens,
        .context = c->context,
        .reconnect_ns = 200 * SIM_MS,
        .unreachable_ns = c->lease_ns,
        .grant_ns = c->transfer_ns,
        .alive_ns = c->alive_ns,
        .keep_ns = c->lease_ns,
    };

    for (uint32_t g = 0; g < c->n_groups; g++) {
        o.n_layers[g] = c->n_layers[g];
        o.window[g] = c->window[g];
    }
    enum bt_status st = bt_pf_core_create(&o, &n->pf);

    BT_ASSERT(st == BT_OK);
}

static void answer(struct sim_node *n, struct sim_answer a)
{
    n->answers = sim_grow(n->answers, n->n_answers, &n->cap_answers, sizeof *n->answers);
    n->answers[n->n_answers++] = a;
}

static void do_submit(struct bt_sim *s, struct sim_node *n, const struct bt_pf_action *a)
{
    const struct bt_msg_submit *m = a->submit;

    sim_job_new(s, n, a->job, &m->ticket);
    n->jobs[(uint32_t)a->job].request = (uint32_t)strtoul(m->request_id + 1, NULL, 10);
    if (sim_chance(s, s->cfg.busy_ppm)) {
        answer(n, (struct sim_answer){.kind = ANSWER_ENGINE_FAILED, .id = a->job});
        return;
    }
    struct sim_req *r = sim_alloc(sizeof *r + m->n_tokens * sizeof r->tokens[0]);

    r->n_tokens = (uint32_t)m->n_tokens;
    r->n_prompt = m->n_prompt;
    r->max_tokens = m->sampling.max_tokens;
    r->seed = m->sampling.seed;
    r->hold = true;
    r->prompt_logprobs = m->prompt_logprobs;
    memcpy(r->tokens, m->tokens, m->n_tokens * sizeof r->tokens[0]);
    sim_engine_cmd(s, n, &(struct sim_cmd){.kind = CMD_SUBMIT, .job = a->job, .req = r});
}

static void do_connect(struct bt_sim *s, struct sim_node *n, const struct bt_pf_action *a)
{
    if (sim_chance(s, s->cfg.busy_ppm)) {
        answer(n, (struct sim_answer){.kind = ANSWER_CONNECT_FAILED, .id = a->instance});
        return;
    }
    uint64_t conn = sim_connect(s, n, a->address, a->instance, &a->gate_token);

    answer(n, (struct sim_answer){.kind = ANSWER_CONNECTING, .id = a->instance, .conn = conn});
}

static void do_push(struct bt_sim *s, struct sim_node *n, const struct bt_pf_action *a)
{
    struct sim_job_state *j = sim_job(s, n, a->job, "PUSH");

    j->n_pushes++;
    if (j->gone) {
        sim_fail(s, "%s pushes pages of job %llx, which the engine forgot", s->procs[n->proc].name,
                 (unsigned long long)a->job);
    } else if (sim_chance(s, s->cfg.busy_ppm)) {
        answer(n,
               (struct sim_answer){.kind = ANSWER_PUSH_FAILED, .id = a->job, .ticket = a->ticket});
    } else {
        sim_push(s, n, a);
    }
}

static void do_release(struct bt_sim *s, struct sim_node *n, uint64_t job)
{
    struct sim_job_state *j = sim_job(s, n, job, "RELEASE");

    if (j->n_pushes > 0) {
        sim_fail(s, "%s releases job %llx while %u pushes are open", s->procs[n->proc].name,
                 (unsigned long long)job, j->n_pushes);
    }
    sim_engine_cmd(s, n, &(struct sim_cmd){.kind = CMD_RELEASE, .job = job});
    *j = (struct sim_job_state){0};
}

static void do_action(struct bt_sim *s, struct sim_node *n, const struct bt_pf_action *a)
{
    switch (a->kind) {
    case BT_PF_ENGINE_SUBMIT:
        do_submit(s, n, a);
        break;
    case BT_PF_ENGINE_CANCEL:
        (void)sim_job(s, n, a->job, "CANCEL");
        sim_engine_cmd(s, n, &(struct sim_cmd){.kind = CMD_CANCEL, .job = a->job});
        break;
    case BT_PF_ENGINE_RELEASE:
        do_release(s, n, a->job);
        break;
    case BT_PF_PUSH:
        do_push(s, n, a);
        break;
    case BT_PF_PUSH_CANCEL:
        sim_push_cancel(s, n, &a->ticket);
        break;
    case BT_PF_CONTROL:
        sim_control(s, n, a->peer, &a->control);
        break;
    case BT_PF_CONNECT:
        do_connect(s, n, a);
        break;
    case BT_PF_DISCONNECT:
        sim_disconnect(s, n, a->peer);
        break;
    case BT_PF_OUTPUT:
        sim_ticket_output(s, n, a->router, &a->output);
        break;
    case BT_PF_ATTEMPT_END:
        sim_ticket_end(s, n, a->router, &a->end);
        break;
    case BT_PF_MOVED:
        break;
    case BT_PF_ADOPTED:
        sim_log(s, "%p: job %x goes on as ticket %x", n->proc, a->job, sim_ticket_id(&a->ticket));
        s->result.n_resent++;
        sim_job(s, n, a->job, "ADOPTED")->ticket = a->ticket;
        break;
    case BT_PF_PEER_STATE:
        sim_log(s, "%p: instance %x is reachable: %u", n->proc, a->peer_state.instance & 0xffff,
                a->peer_state.reachable);
        for (uint32_t i = 0; i < s->cfg.n_routers; i++) {
            sim_link_send(s, n, i,
                          &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_PEER_STATE,
                                                   .peer_state = a->peer_state});
        }
        break;
    }
}

static void run_list(struct bt_sim *s, struct sim_node *n)
{
    const struct bt_pf_actions *list = bt_pf_core_actions(n->pf);

    for (size_t i = 0; i < list->n; i++) {
        do_action(s, n, &list->items[i]);
    }
}

void sim_prefill_run(struct bt_sim *s, struct sim_node *n)
{
    run_list(s, n);
    for (uint32_t i = 0; i < n->n_answers; i++) {
        struct sim_answer a = n->answers[i];

        switch (a.kind) {
        case ANSWER_CONNECTING:
            bt_pf_on_connecting(n->pf, s->now, a.id, a.conn);
            break;
        case ANSWER_CONNECT_FAILED:
            bt_pf_on_connect_failed(n->pf, s->now, a.id, "busy");
            break;
        case ANSWER_PUSH_FAILED:
            sim_job(s, n, a.id, "PUSHED")->n_pushes--;
            bt_pf_on_pushed(n->pf, s->now, a.id, &a.ticket, BT_ERR_BUSY);
            break;
        case ANSWER_ENGINE_FAILED:
            sim_job_gone(n, a.id);
            bt_pf_on_engine_failed(n->pf, s->now, a.id, BT_ERR_BUSY, "busy");
            break;
        }
        run_list(s, n);
    }
    n->n_answers = 0;
}

void sim_prefill_pushed(struct bt_sim *s, struct sim_node *n, uint64_t job,
                        const struct bt_ticket *t, enum bt_status st)
{
    sim_job(s, n, job, "PUSHED")->n_pushes--;
    bt_pf_on_pushed(n->pf, s->now, job, t, st);
    sim_prefill_run(s, n);
}

/* ---- events in ---- */

static void on_prompt_logprobs(struct bt_sim *s, struct sim_node *n, const struct sim_engine_msg *m)
{
    struct bt_sampled list[64];

    for (uint32_t at = 0; at < m->n_list; at += 64) {
        uint32_t k = m->n_list - at < 64 ? m->n_list - at : 64;

        for (uint32_t i = 0; i < k; i++) {
            list[i] = (struct bt_sampled){.token = m->ids[at + i], .logprob = -1};
        }
        bt_pf_on_engine_prompt_logprobs(n->pf, s->now, m->job, m->first + at, list, k);
        sim_prefill_run(s, n);
    }
}

/* A prompt begins to be computed: for the second time, where it could have been sent again? */
static void count_prompt(struct bt_sim *s, const struct sim_node *n, uint64_t job)
{
    const struct sim_job_state *j = &n->jobs[(uint32_t)job];
    struct sim_request *q = &s->requests[j->request];

    s->result.n_prompts++;
    if (j->job != job) {
        return; /* it is over */
    }
    /* The log-probabilities of a prompt cannot be told again, so it is not kept. */
    s->result.n_again += q->computed_by != 0 && !q->landed && !q->prompt_logprobs &&
                         sim_alive(s, q->computed_at, q->computed_by);
    q->computed_at = n->proc;
    q->computed_by = s->procs[n->proc].incarnation;
}

void sim_prefill_engine(struct bt_sim *s, struct sim_node *n, const struct sim_engine_msg *m)
{
    switch (m->kind) {
    case EV_FAILED:
        bt_pf_on_engine_failed(n->pf, s->now, m->job, m->status, m->text);
        break;
    case EV_SHORT:
        bt_pf_on_engine_short(n->pf, s->now);
        break;
    case EV_STARTED:
        count_prompt(s, n, m->job);
        bt_pf_on_engine_started(n->pf, s->now, m->job);
        if (m->first > 0) {
            sim_prefill_run(s, n);
            bt_pf_on_engine_cached(n->pf, s->now, m->job, m->first);
        }
        break;
    case EV_PAGES:
        bt_pf_on_engine_pages(n->pf, s->now, m->job, m->group, m->layer, m->first, m->end, m->ids);
        break;
    case EV_TOKEN:
        bt_pf_on_engine_token(n->pf, s->now, m->job, m->index, &m->sampled, m->finish);
        break;
    case EV_LOGPROBS:
        on_prompt_logprobs(s, n, m);
        return;
    case EV_PREEMPTED:
        bt_pf_on_engine_preempted(n->pf, s->now, m->job);
        break;
    case EV_LANDED:
        return;
    }
    sim_prefill_run(s, n);
}

/* The core gets the union of what all routers allow. */
static void update_peers(struct bt_sim *s, struct sim_node *n)
{
    struct bt_msg_peer all[SIM_ROUTERS_MAX * SIM_NODES_MAX * 2];
    size_t count = 0;

    for (uint32_t r = 0; r < s->cfg.n_routers; r++) {
        for (size_t i = 0; i < n->links[r].n_peers; i++) {
            size_t k = 0;

            while (k < count && all[k].instance != n->links[r].peers[i].instance) {
                k++;
            }
            if (k == count) {
                all[count++] = n->links[r].peers[i];
            }
        }
    }
    bt_pf_on_peers(n->pf, s->now, all, count);
    sim_prefill_run(s, n);
}

static void on_peers(struct bt_sim *s, struct sim_node *n, uint32_t link,
                     const struct bt_from_router *m)
{
    struct sim_link *l = &n->links[link];

    l->n_peers = 0;
    for (size_t i = 0; i < m->peers.n && l->n_peers < SIM_NODES_MAX * 2; i++) {
        uint32_t proc = sim_proc_by_name(s, m->peers.peers[i].address);

        if (proc == UINT32_MAX) {
            sim_fail(s, "a router names a peer at \"%s\"", m->peers.peers[i].address);
            return;
        }
        const char *name = s->procs[proc].name;

        l->peers[l->n_peers++] = (struct bt_msg_peer){.instance = m->peers.peers[i].instance,
                                                      .address = name,
                                                      .name = name,
                                                      .gate_token = m->peers.peers[i].gate_token};
    }
    update_peers(s, n);
}

void sim_prefill_message(struct bt_sim *s, struct sim_node *n, uint32_t link,
                         const struct bt_from_router *m)
{
    if (m->kind == BT_FROM_ROUTER_SUBMIT) {
        bt_pf_on_submit(n->pf, s->now, link, &m->submit);
    } else if (m->kind == BT_FROM_ROUTER_CANCEL) {
        bt_pf_on_cancel(n->pf, s->now, link, &m->cancel.ticket, m->cancel.keep);
    } else if (m->kind == BT_FROM_ROUTER_PEERS) {
        on_peers(s, n, link, m);
        return;
    } else {
        return;
    }
    sim_prefill_run(s, n);
}

void sim_prefill_router_lost(struct bt_sim *s, struct sim_node *n, uint32_t link)
{
    bt_pf_on_router_lost(n->pf, s->now, link);
    sim_prefill_run(s, n);
    n->links[link].n_peers = 0;
    update_peers(s, n);
}
