/* What must hold after the last fault: all requests end within bounded time; then all cores are
 * idle, all pools are free; then every router sees every node again and serves a request. */

#include "plan/sim_int.h"

#include <stdio.h>

#define LOOK_NS (100 * SIM_MS)

/* ---- idle ---- */

/* The reason why a node is not idle, or NULL. */
static const char *node_busy(const struct bt_sim *s, const struct sim_node *n)
{
    struct bt_batch_load l = bt_batch_load(n->engine.batch);

    if (sim_node_jobs(n) > 0) {
        return "jobs in its core";
    }
    if (l.n_waiting + l.n_running + l.n_held + l.n_landing > 0) {
        return "sequences in its engine";
    }
    for (uint32_t g = 0; g < s->cfg.n_groups; g++) {
        const struct bt_pages *p = bt_batch_pages(n->engine.batch, g);

        if (bt_pages_count(p, BT_PAGE_LEASED) + bt_pages_count(p, BT_PAGE_QUARANTINED) > 0) {
            return "pages in use";
        }
    }
    for (uint32_t i = 0; i < n->xfer.n_landings; i++) {
        if (!n->xfer.landings[i].close_told) {
            return "open landings";
        }
    }
    for (uint32_t i = 0; i < n->xfer.n_pushes; i++) {
        if (!n->xfer.pushes[i].over) {
            return "open pushes";
        }
    }
    return NULL;
}

static const char *router_busy(const struct sim_router *r)
{
    const struct bt_rt_stats *st = bt_rt_core_stats(r->core);
    struct bt_rt_node_info i;
    uint32_t pos = 0;

    if (st->running + st->waiting > 0) {
        return "sequences";
    }
    while (bt_rt_core_node(r->core, &pos, &i)) {
        if (i.own_seqs != 0 || i.own_tokens != 0) {
            return "load counted at an idle node";
        }
    }
    return NULL;
}

/* Pages without a holder are free or cached, and none is both held and not. */
static void audit(struct bt_sim *s)
{
    for (uint32_t i = 0; i < s->n_procs; i++) {
        if (s->procs[i].alive && !s->procs[i].is_router) {
            sim_audit(s, s->procs[i].node);
        }
    }
}

static const char *busy(const struct bt_sim *s, const char **who)
{
    for (uint32_t i = 0; i < s->n_procs; i++) {
        const struct sim_proc *p = &s->procs[i];
        const char *why = !p->alive      ? "no life"
                          : p->is_router ? router_busy(p->router)
                                         : node_busy(s, p->node);

        if (why != NULL) {
            *who = p->name;
            return why;
        }
    }
    return NULL;
}

/* ---- together again ---- */

static bool conn_up(const struct bt_sim *s, uint32_t p, uint32_t d)
{
    for (uint32_t i = 0; i < s->n_conns; i++) {
        const struct sim_conn *c = &s->conns[i];

        if (c->proc[SIDE_P] == p && c->proc[SIDE_D] == d && c->end[SIDE_P] == END_UP &&
            c->end[SIDE_D] == END_UP) {
            return true;
        }
    }
    return false;
}

/* What a router takes a node for is what it is: it may have been told on the way. */
static bool knows_role(const struct bt_sim *s, const struct bt_rt_node_info *i)
{
    for (uint32_t k = 0; k < s->n_procs; k++) {
        const struct sim_proc *p = &s->procs[k];

        if (!p->is_router && p->instance == i->instance) {
            return p->node->role == i->role;
        }
    }
    return false;
}

static bool sees_all(const struct bt_sim *s, const struct sim_router *r)
{
    struct bt_rt_node_info i;
    uint32_t pos = 0, n = 0;

    while (bt_rt_core_node(r->core, &pos, &i)) {
        n += i.n_cut == 0 && knows_role(s, &i) &&
             (strcmp(i.state, "ready") == 0 || strncmp(i.state, "mismatch: model", 15) == 0);
    }
    return n == s->cfg.n_nodes[0] + s->cfg.n_nodes[1];
}

static bool serves(const struct sim_proc *p, enum bt_role leg)
{
    return !p->is_router && bt_role_has(p->node->role, leg);
}

static bool joined(const struct bt_sim *s)
{
    for (uint32_t i = 0; i < s->n_procs; i++) {
        const struct sim_proc *p = &s->procs[i];

        if (p->is_router && !sees_all(s, p->router)) {
            return false;
        }
        for (uint32_t d = 0; d < s->n_procs; d++) {
            if (d != i && serves(p, BT_ROLE_PREFILL) && serves(&s->procs[d], BT_ROLE_DECODE) &&
                s->cfg.classes[i] == s->cfg.classes[d] && !conn_up(s, i, d)) {
                return false;
            }
        }
    }
    return true;
}

/* ---- stages ---- */

/* Requests end → idle → all joined; then for each router: its probe ends → idle again. One after the other, so that even
 * the smallest node has room for it. */
static void stage_next(struct bt_sim *s, uint64_t within)
{
    static const char *const names[] = {"requests end", "idle", "all joined", "a probe ends",
                                        "idle again"};

    s->t_stage_end = s->now + within;
    sim_logs(s, names[s->stage], "waiting for: %s", 0);
}

static bool stage_done(struct bt_sim *s, char *why, size_t cap)
{
    const char *who = "", *what;

    switch (s->stage) {
    case 0:
    case 3:
        snprintf(why, cap, "%u requests have not ended", s->n_open);
        return s->n_open == 0;
    case 1:
    case 4:
        what = busy(s, &who);
        snprintf(why, cap, "%s still has %s", who, what != NULL ? what : "");
        return what == NULL;
    default:
        snprintf(why, cap, "not every router sees every node, or a pair has no connection");
        return joined(s);
    }
}

static void on_look(struct bt_sim *s, struct sim_event *e)
{
    const struct sim_config *c = &s->cfg;
    char why[128];

    (void)e;
    if (!stage_done(s, why, sizeof why)) {
        if (s->now > s->t_stage_end) {
            sim_fail(s, "it does not settle: %s", why);
        }
        sim_post(s, s->now + LOOK_NS, SIM_WORLD, on_look);
        return;
    }
    if (s->stage == 0) {
        s->result.settling_ns = s->now - s->t_settle;
    }
    s->stage++;
    if (s->stage == 5 && s->n_probed < c->n_routers) {
        s->stage = 3;
    }
    switch (s->stage) {
    case 1: /* pages of a vanished peer go with the lease, those of a lost message with its deadline */
    case 4:
        stage_next(s, c->lease_ns + c->transfer_ns + 2000 * SIM_MS);
        break;
    case 2:
        stage_next(s, c->lease_ns + c->connect_ns + 6000 * SIM_MS);
        break;
    case 3:
        sim_client_probe(s, s->n_probed++);
        /* Each connection of its prefill node may have stalled: that shows when it is used, after transfer_ns. */
        stage_next(s, (c->n_nodes[1] + 2) * c->transfer_ns + 3000 * SIM_MS);
        break;
    default:
        audit(s);
        s->done = true;
        return;
    }
    sim_post(s, s->now, SIM_WORLD, on_look);
}

static void collect(struct bt_sim *s)
{
    for (uint32_t i = 0; i < s->n_procs; i++) {
        if (s->procs[i].is_router && s->procs[i].alive) {
            s->result.n_attempts += bt_rt_core_stats(s->procs[i].router->core)->attempts;
            s->result.n_stale += bt_rt_core_stats(s->procs[i].router->core)->stale;
            if (bt_rt_core_stats(s->procs[i].router->core)->token_mismatches > 0) {
                sim_fail(s, "%s got two tokens of one index", s->procs[i].name);
            }
        }
    }
}

void sim_settle_start(struct bt_sim *s)
{
    const struct sim_config *c = &s->cfg;

    collect(s);
    s->t_settle = s->now;
    s->stage = 0;
    uint64_t prompts = c->n_requests * c->context * c->token_ns[BT_ROLE_PREFILL];

    stage_next(s, c->queue_ns + 8 * (c->transfer_ns + c->lease_ns) + prompts + 20000 * SIM_MS);
    sim_post(s, s->now, SIM_WORLD, on_look);
}
