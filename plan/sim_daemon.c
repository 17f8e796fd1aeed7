/* What both nodes share, as node/node.c: timers, sessions, load, drain; and the checks of what a
 * core says about jobs and tickets. */

#include "plan/sim_int.h"

#include <stdlib.h>
#include "base/assert.h"
#include "base/mem.h"

#define TICK_NS (100 * SIM_MS)

/* ---- checks ---- */

void sim_job_new(struct bt_sim *s, struct sim_node *n, uint64_t job, const struct bt_ticket *t)
{
    struct sim_job_state *j = &n->jobs[(uint32_t)job];

    if (j->job != 0 && !j->gone) {
        sim_fail(s, "%s: job %llx is given to the engine while %llx has its slot",
                 s->procs[n->proc].name, (unsigned long long)job, (unsigned long long)j->job);
    }
    *j = (struct sim_job_state){.job = job, .ticket = *t};
}

struct sim_job_state *sim_job(struct bt_sim *s, struct sim_node *n, uint64_t job, const char *what)
{
    struct sim_job_state *j = &n->jobs[(uint32_t)job];

    if (j->job != job) {
        sim_fail(s, "%s: %s of job %llx, which the engine does not have", s->procs[n->proc].name,
                 what, (unsigned long long)job);
    }
    return j;
}

void sim_job_gone(struct sim_node *n, uint64_t job)
{
    struct sim_job_state *j = &n->jobs[(uint32_t)job];

    j->gone = j->gone || j->job == job;
}

static struct sim_ticket_state *ticket_find(const struct sim_node *n, const struct bt_ticket *t)
{
    uint64_t i = 0;

    return bt_map_get(&n->by_ticket, t->b, sizeof t->b, &i) ? &n->tickets[i] : NULL;
}

void sim_ticket_new(struct bt_sim *s, struct sim_node *n, uint32_t link,
                    const struct bt_msg_submit *m)
{
    if (ticket_find(n, &m->ticket) != NULL) {
        sim_fail(s, "%s gets a second submit of one ticket", s->procs[n->proc].name);
        return;
    }
    n->tickets = sim_grow(n->tickets, n->n_tickets, &n->cap_tickets, sizeof *n->tickets);
    n->tickets[n->n_tickets] =
        (struct sim_ticket_state){.ticket = m->ticket,
                                  .router = link,
                                  .next = (uint32_t)m->n_tokens - m->n_prompt,
                                  .request = (uint32_t)strtoul(m->request_id + 1, NULL, 10)};
    enum bt_status st = bt_map_put(&n->by_ticket, m->ticket.b, sizeof m->ticket.b, n->n_tickets++);

    BT_ASSERT(st == BT_OK);
}

static void ticket_set_over(struct bt_sim *s, struct sim_ticket_state *x)
{
    if (!x->over) {
        x->over = true;
        x->t_over = s->now;
    }
}

void sim_ticket_over(struct bt_sim *s, struct sim_node *n, uint32_t link, const struct bt_ticket *t)
{
    for (uint32_t i = 0; i < n->n_tickets; i++) {
        struct sim_ticket_state *x = &n->tickets[i];

        if (x->router == link && (t == NULL || bt_ticket_equal(&x->ticket, t))) {
            ticket_set_over(s, x);
        }
    }
}

/* Whoever left is forgotten promptly. */
static void check_held(struct bt_sim *s, struct sim_node *n)
{
    for (uint32_t i = 0; i < n->max_jobs; i++) {
        const struct sim_job_state *j = &n->jobs[i];
        const struct sim_ticket_state *x =
            j->job != 0 && !j->gone ? ticket_find(n, &j->ticket) : NULL;

        if (x != NULL && x->over && s->now - x->t_over > s->cfg.hold_ns) {
            sim_fail(s, "%s holds pages of ticket %llx %llu ms after it is over",
                     s->procs[n->proc].name, (unsigned long long)sim_ticket_id(&j->ticket),
                     (unsigned long long)((s->now - x->t_over) / SIM_MS));
        }
    }
}

static struct sim_ticket_state *ticket_live(struct bt_sim *s, struct sim_node *n, uint32_t link,
                                            const struct bt_ticket *t, const char *what)
{
    struct sim_ticket_state *x = ticket_find(n, t);

    if (x == NULL || x->over || x->router != link) {
        sim_fail(s, "%s sends %s for ticket %llx, which is %s", s->procs[n->proc].name, what,
                 (unsigned long long)sim_ticket_id(t), x == NULL ? "unknown" : "over");
        return NULL;
    }
    return x;
}

void sim_ticket_output(struct bt_sim *s, struct sim_node *n, uint32_t link,
                       const struct bt_msg_output *o)
{
    struct sim_ticket_state *x = ticket_live(s, n, link, &o->ticket, "an output");

    if (x == NULL) {
        return;
    }
    sim_log(s, "%p: output of ticket %x: %u tokens from %u, finish %u", n->proc,
            sim_ticket_id(&o->ticket), o->n_tokens, o->index, o->finish);
    if (o->n_tokens > 0 && !x->began && o->index + 1 == x->next) {
        x->next--; /* what was computed for an attempt before: its token is in the submit already */
    }
    x->began = x->began || o->n_tokens > 0;
    s->requests[x->request].landed |= x->began && n->role == BT_ROLE_DECODE;
    if (o->n_tokens > 0 && o->index != x->next) {
        sim_fail(s, "%s: output of ticket %llx begins at %u, not at %u", s->procs[n->proc].name,
                 (unsigned long long)sim_ticket_id(&o->ticket), o->index, x->next);
    }
    x->next += (uint32_t)o->n_tokens;
    if (o->finish != 0) {
        ticket_set_over(s, x);
    }
    sim_link_output(s, n, link, o);
}

void sim_ticket_end(struct bt_sim *s, struct sim_node *n, uint32_t link,
                    const struct bt_msg_attempt_end *m)
{
    struct sim_ticket_state *x = ticket_live(s, n, link, &m->ticket, "an end");

    if (x == NULL) {
        return;
    }
    sim_logs(s, m->text, "%p: ticket %x ends, reason %u: %s", n->proc, sim_ticket_id(&m->ticket),
             m->reason);
    ticket_set_over(s, x);
    sim_link_attempt_end(s, n, link, m);
}

/* ---- what a node says of itself ---- */

struct bt_gate_token sim_gate_token(const struct sim_proc *p)
{
    struct bt_gate_token t = {{1}};

    memcpy(t.b + sizeof t.b - sizeof p->instance, &p->instance, sizeof p->instance);
    return t;
}

void sim_node_hello(struct bt_sim *s, const struct sim_node *n, struct bt_msg_hello *h)
{
    const struct sim_proc *p = &s->procs[n->proc];

    *h = (struct bt_msg_hello){
        .version_min = BT_SESSION_VERSION_MIN,
        .version_max = BT_SESSION_VERSION_MAX,
        .role = n->role,
        .instance = p->instance,
        .name = p->name,
        .fingerprint = 1 + s->cfg.classes[n->proc],
        .numerics = "toy",
        .kv_layout = "toy",
        .model_name = "toy",
        .transfer_address = p->name,
        .backend = "toy",
        .page_tokens = s->cfg.page_tokens,
        .n_pages = n->engine.n_pages,
        .max_batch = s->cfg.max_batch,
        .max_tokens = sim_engine_max_tokens(s, n->home),
        .context = s->cfg.context,
        .vocab = SIM_VOCAB,
        .chunk_tokens = s->cfg.chunk_tokens,
        .lease_ms = s->cfg.lease_ns / SIM_MS,
        .gate_token = sim_gate_token(p),
    };
}

void sim_node_load(struct bt_sim *s, struct sim_node *n, uint32_t link, struct bt_msg_load *l)
{
    struct bt_batch_load b = bt_batch_load(n->engine.batch);
    struct bt_prefix_news news;

    *l = (struct bt_msg_load){.waiting = b.n_waiting,
                              .running = b.n_running,
                              .held = b.n_held,
                              .landing = b.n_landing,
                              .waiting_tokens = b.waiting_tokens,
                              .pages_short = b.pages_short};
    if (s->cfg.local == BT_RT_LOCAL_AUTO) { /* it decides by speeds */
        l->prefill_tokens_per_s = 1e9 / (double)s->cfg.token_ns[n->home];
        l->decode_step_ms = (double)s->cfg.step_ns / 1e6;
    }
    if (s->cfg.caches[n->home]) {
        bt_prefix_report_next(n->report, link, &news);
        l->prefix_blocks = (struct bt_msg_prefix_blocks){.told = true,
                                                         .reset = news.reset,
                                                         .n_added = news.n_added,
                                                         .n_removed = news.n_removed,
                                                         .added = news.added,
                                                         .removed = news.removed};
    }
    for (uint32_t g = 0; g < s->cfg.n_groups; g++) {
        const struct bt_pages *p = bt_batch_pages(n->engine.batch, g);

        l->pages_free += bt_pages_count(p, BT_PAGE_FREE);
        l->pages_cached += bt_pages_count(p, BT_PAGE_CACHED);
        l->pages_leased += bt_pages_count(p, BT_PAGE_LEASED);
        l->pages_quarantined += bt_pages_count(p, BT_PAGE_QUARANTINED);
    }
}

uint32_t sim_node_jobs(const struct sim_node *n)
{
    return bt_pf_core_jobs(n->pf) + bt_dc_core_jobs(n->dc);
}

/* ---- timers ---- */

static void give_back(struct bt_sim *s, struct sim_node *n, enum bt_role leg)
{
    if (leg == BT_ROLE_PREFILL) {
        bt_pf_on_give_back(n->pf, s->now);
        sim_prefill_run(s, n);
    } else {
        bt_dc_on_give_back(n->dc, s->now);
        sim_decode_run(s, n);
    }
}

/* ---- roles: as node/node_legs.c ---- */

static enum bt_role leaving(const struct sim_node *n)
{
    return n->leg[BT_ROLE_PREFILL].leaving  ? BT_ROLE_PREFILL
           : n->leg[BT_ROLE_DECODE].leaving ? BT_ROLE_DECODE
                                            : BT_ROLE_BOTH;
}

/* Also to a router that has just welcomed it: hello may be older than the last change. */
void sim_node_tell_role(struct bt_sim *s, struct sim_node *n, uint32_t link)
{
    if (n->role != s->cfg.roles[n->proc] || leaving(n) != BT_ROLE_BOTH || s->cfg.n_flips > 0) {
        sim_link_send(s, n, link,
                      &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_ROLE_STATE,
                                               .role_state = {n->role, leaving(n)}});
    }
}

static void tell_role(struct bt_sim *s, struct sim_node *n)
{
    sim_log(s, "%p serves as %u, %u leaves", n->proc, n->role, leaving(n));
    for (uint32_t i = 0; i < s->cfg.n_routers; i++) {
        sim_node_tell_role(s, n, i);
    }
}

void sim_node_set_role(struct bt_sim *s, struct sim_node *n, enum bt_role role)
{
    if (role == n->role || s->procs[n->proc].draining) {
        return;
    }
    for (enum bt_role leg = BT_ROLE_PREFILL; leg < BT_LEGS; leg++) {
        bool had = bt_role_has(n->role, leg), has = bt_role_has(role, leg);

        if (had && !has) {
            n->leg[leg].leaving = true;
            n->leg[leg].gave_back = false;
            n->leg[leg].end = s->now + s->cfg.drain_ns;
        } else if (has && !had) {
            n->leg[leg].leaving = false;
            if (leg == BT_ROLE_PREFILL) {
                bt_pf_on_resume(n->pf);
            } else {
                bt_dc_on_resume(n->dc);
            }
        }
    }
    n->role = role;
    s->result.n_roles++;
    tell_role(s, n);
}

static void leg_tick(struct bt_sim *s, struct sim_node *n, enum bt_role leg)
{
    uint32_t left = leg == BT_ROLE_PREFILL ? bt_pf_core_jobs(n->pf) : bt_dc_core_jobs(n->dc);

    if (!n->leg[leg].leaving) {
        return;
    }
    if ((left == 0 || s->now >= n->leg[leg].end) && !n->leg[leg].gave_back) {
        n->leg[leg].gave_back = true;
        give_back(s, n, leg);
        left = leg == BT_ROLE_PREFILL ? bt_pf_core_jobs(n->pf) : bt_dc_core_jobs(n->dc);
    }
    if (left == 0) {
        n->leg[leg].leaving = false;
        tell_role(s, n);
    }
}

static bool drained(struct bt_sim *s, struct sim_node *n)
{
    if (sim_node_jobs(n) == 0) {
        return true;
    }
    if (s->now >= n->drain_end && !n->gave_back) {
        n->gave_back = true;
        sim_log(s, "%p gives back %u jobs", n->proc, sim_node_jobs(n));
        give_back(s, n, BT_ROLE_PREFILL);
        give_back(s, n, BT_ROLE_DECODE);
    }
    return n->gave_back && s->now >= n->drain_end + s->cfg.lease_ns;
}

/* Where nothing breaks and there is room for all, no landing may be given up, however long its prompt takes. */
static void count_stalled(struct bt_sim *s, struct sim_node *n)
{
    uint64_t before = bt_dc_core_stats(n->dc)->stalled;

    bt_dc_on_tick(n->dc, s->now);
    uint64_t stalled = bt_dc_core_stats(n->dc)->stalled - before;

    s->result.n_stalled += stalled;
    if (stalled > 0 && (s->opts.profile == BT_SIM_CALM || s->opts.profile == BT_SIM_CANCELS)) {
        sim_fail(s, "%s gives a landing up though nothing is broken", s->procs[n->proc].name);
    }
}

static void on_tick(struct bt_sim *s, struct sim_event *e)
{
    struct sim_proc *p = &s->procs[e->proc];
    struct sim_node *n = p->node;

    if (n->engine.n_layers_done != n->n_layers_told) { /* as prefilld/prefilld_io.c */
        n->n_layers_told = n->engine.n_layers_done;
        bt_pf_on_engine_alive(n->pf, s->now);
        sim_prefill_run(s, n);
    }
    bt_pf_on_tick(n->pf, s->now);
    sim_prefill_run(s, n);
    count_stalled(s, n);
    sim_decode_run(s, n);
    leg_tick(s, n, BT_ROLE_PREFILL);
    leg_tick(s, n, BT_ROLE_DECODE);
    check_held(s, n);
    if (p->draining && drained(s, n)) {
        sim_proc_stop(s, e->proc, true);
        return;
    }
    sim_post(s, s->now + TICK_NS, e->proc, on_tick)->k = SIM_TIMER;
}

static void on_beat(struct bt_sim *s, struct sim_event *e)
{
    struct sim_node *n = s->procs[e->proc].node;

    sim_link_beat(s, n);
    sim_post(s, s->now + s->cfg.heartbeat_ns, e->proc, on_beat)->k = SIM_TIMER;
}

static void on_xfer_beat(struct bt_sim *s, struct sim_event *e)
{
    struct sim_node *n = s->procs[e->proc].node;

    sim_conns_tick(s, n);
    sim_post(s, s->now + s->cfg.heartbeat_ns, e->proc, on_xfer_beat)->k = SIM_TIMER;
}

/* ---- events ---- */

void sim_node_router_up(struct bt_sim *s, struct sim_node *n, uint32_t link)
{
    (void)s;
    n->links[link].n_peers = 0;
}

void sim_node_router_lost(struct bt_sim *s, struct sim_node *n, uint32_t link)
{
    sim_ticket_over(s, n, link, NULL);
    bt_prefix_report_restart(n->report, link);
    sim_prefill_router_lost(s, n, link);
    bt_dc_on_router_lost(n->dc, s->now, link);
    sim_decode_run(s, n);
}

void sim_node_message(struct bt_sim *s, struct sim_node *n, uint32_t link,
                      const struct bt_from_router *m)
{
    if (m->kind == BT_FROM_ROUTER_SUBMIT) {
        sim_log(s, "%p: submit of ticket %x from %p, %u tokens, replaces %x", n->proc,
                sim_ticket_id(&m->submit.ticket), link, m->submit.n_tokens,
                m->submit.has_replaces ? sim_ticket_id(&m->submit.replaces) : 0);
        sim_ticket_new(s, n, link, &m->submit);
    } else if (m->kind == BT_FROM_ROUTER_CANCEL) {
        sim_log(s, "%p: cancel of ticket %x from %p, keep %u", n->proc,
                sim_ticket_id(&m->cancel.ticket), link, m->cancel.keep);
        sim_ticket_over(s, n, link, &m->cancel.ticket);
    } else if (m->kind == BT_FROM_ROUTER_DRAIN) {
        sim_drain(s, n->proc);
        return;
    } else if (m->kind == BT_FROM_ROUTER_SET_ROLE) {
        sim_node_set_role(s, n, m->set_role);
        return;
    }
    if (m->kind != BT_FROM_ROUTER_SUBMIT || m->submit.leg == BT_ROLE_PREFILL) {
        sim_prefill_message(s, n, link, m);
    }
    if (m->kind == BT_FROM_ROUTER_SUBMIT && m->submit.leg == BT_ROLE_DECODE) {
        bt_dc_on_submit(n->dc, s->now, link, &m->submit);
        sim_decode_run(s, n);
    } else if (m->kind == BT_FROM_ROUTER_CANCEL) {
        bt_dc_on_cancel(n->dc, s->now, link, &m->cancel.ticket);
        sim_decode_run(s, n);
    }
}

void sim_node_engine(struct bt_sim *s, struct sim_event *e)
{
    struct sim_node *n = s->procs[e->proc].node;
    const struct sim_engine_msg *m = e->p;

    if (m->kind == EV_FAILED || m->kind == EV_PREEMPTED) {
        sim_log(s, "%p: the engine forgot job %x, %u", e->proc, m->job, m->kind);
        sim_job_gone(n, m->job);
    }
    if ((uint32_t)m->job < s->cfg.max_jobs) {
        sim_prefill_engine(s, n, m);
    } else {
        sim_decode_engine(s, n, m);
    }
}

void sim_node_peer_up(struct bt_sim *s, struct sim_node *n, uint64_t conn)
{
    sim_log(s, "%p: connection %u is up", n->proc, conn / 2 - 1);
    if (sim_conn_side(conn) == SIDE_P) {
        bt_pf_on_peer_up(n->pf, s->now, conn);
        sim_prefill_run(s, n);
    }
}

void sim_node_peer_down(struct bt_sim *s, struct sim_node *n, uint64_t conn, const char *why)
{
    sim_logs(s, why, "%p: connection %u is down: %s", n->proc, conn / 2 - 1);
    if (sim_conn_side(conn) == SIDE_P) {
        bt_pf_on_peer_down(n->pf, s->now, conn, why);
        sim_prefill_run(s, n);
    } else {
        bt_dc_on_peer_down(n->dc, s->now, conn, why);
        sim_decode_run(s, n);
    }
}

void sim_node_control(struct bt_sim *s, struct sim_node *n, uint64_t conn,
                      const struct bt_control *m)
{
    if (!bt_control_from_prefill(m->kind)) {
        bt_pf_on_control(n->pf, s->now, conn, m);
        sim_prefill_run(s, n);
    } else {
        bt_dc_on_control(n->dc, s->now, conn, m);
        sim_decode_run(s, n);
    }
}

/* ---- life ---- */

struct sim_node *sim_node_create(struct bt_sim *s, uint32_t proc)
{
    struct sim_node *n = sim_alloc(sizeof *n);

    n->proc = proc;
    n->max_jobs = BT_LEGS * s->cfg.max_jobs;
    n->home = s->procs[proc].name[0] == 'p' ? BT_ROLE_PREFILL : BT_ROLE_DECODE;
    n->role = s->cfg.roles[proc];
    n->jobs = sim_alloc(n->max_jobs * sizeof *n->jobs);
    bt_map_init(&n->by_ticket, true);
    sim_engine_init(s, n);
    enum bt_status st =
        bt_prefix_report_create(s->cfg.n_pages[n->home], SIM_ROUTERS_MAX, &n->report);

    BT_ASSERT(st == BT_OK);
    sim_prefill_start(s, n);
    sim_decode_start(s, n);
    for (enum bt_role leg = BT_ROLE_PREFILL; leg < BT_LEGS; leg++) {
        if (!bt_role_has(n->role, leg)) {
            give_back(s, n, leg); /* it has nothing, and takes nothing */
        }
    }
    s->procs[proc].node = n;
    sim_links_start(s, n);
    sim_post(s, s->now + TICK_NS, proc, on_tick)->k = SIM_TIMER;
    sim_post(s, s->now + s->cfg.heartbeat_ns, proc, on_beat)->k = SIM_TIMER;
    sim_post(s, s->now + s->cfg.heartbeat_ns, proc, on_xfer_beat)->k = SIM_TIMER;
    return n;
}

void sim_node_destroy(struct sim_node *n)
{
    if (n == NULL) {
        return;
    }
    sim_links_fini(n);
    sim_landings_fini(n);
    sim_pushes_fini(n);
    sim_engine_fini(n);
    bt_prefix_report_destroy(n->report);
    bt_pf_core_destroy(n->pf);
    bt_dc_core_destroy(n->dc);
    bt_map_fini(&n->by_ticket);
    bt_free(n->tickets);
    bt_free(n->answers);
    bt_free(n->jobs);
    bt_free(n);
}

void sim_node_drain(struct bt_sim *s, uint32_t proc)
{
    struct sim_proc *p = &s->procs[proc];

    sim_logs(s, p->name, "%s drains", 0);
    p->draining = true;
    p->node->drain_end = s->now + s->cfg.drain_ns;
    for (uint32_t i = 0; i < s->cfg.n_routers; i++) {
        sim_link_send(s, p->node, i, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_DRAINING});
    }
}
