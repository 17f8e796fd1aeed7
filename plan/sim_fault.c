/* Faults: what is broken, when, and for how long. After the last one everything is put right again
 * and the run must settle. */

#include "plan/sim_int.h"

static void changed(struct bt_sim *s)
{
    s->t_fault = s->now;
}

static uint32_t pick_proc(struct bt_sim *s, bool router)
{
    uint32_t first = router ? 0 : s->cfg.n_routers;
    uint32_t n = router ? s->cfg.n_routers : s->n_procs - s->cfg.n_routers;

    return first + sim_below(s, n);
}

static void on_restart(struct bt_sim *s, struct sim_event *e)
{
    if (!s->procs[e->i].alive) {
        changed(s);
        sim_proc_start(s, e->i);
    }
}

static void kill_proc(struct bt_sim *s, uint32_t proc)
{
    static const uint64_t pauses[] = {1, 200, 1500, 6000};

    if (!s->procs[proc].alive) {
        return;
    }
    sim_proc_stop(s, proc, sim_chance(s, 700000));
    sim_post(s, s->now + sim_between(s, 0, pauses[sim_below(s, 4)]) * SIM_MS, SIM_WORLD, on_restart)
        ->i = proc;
}

static void on_thaw(struct bt_sim *s, struct sim_event *e)
{
    if (s->procs[e->i].alive && s->procs[e->i].frozen && s->procs[e->i].incarnation == e->k) {
        changed(s);
        sim_proc_thaw(s, e->i);
    }
}

static void freeze_proc(struct bt_sim *s, uint32_t proc)
{
    struct sim_proc *p = &s->procs[proc];

    if (!p->alive || p->frozen) {
        return;
    }
    sim_proc_freeze(s, proc);
    struct sim_event *e = sim_post(
        s, s->now + sim_between(s, 1, s->cfg.lease_ns * (1 + sim_below(s, 3))), SIM_WORLD, on_thaw);

    e->i = proc;
    e->k = p->incarnation;
}

static void on_heal(struct bt_sim *s, struct sim_event *e)
{
    if (s->cut[e->i][e->k] || s->cut[e->k][e->i]) {
        changed(s);
        sim_heal(s, e->i, e->k);
    }
}

static void cut_network(struct bt_sim *s)
{
    uint32_t a = sim_below(s, s->n_procs);
    uint32_t b = sim_below(s, s->n_procs);

    if (a == b) {
        return;
    }
    sim_cut(s, a, b);
    if (!sim_chance(s, 300000)) {
        sim_cut(s, b, a);
    }
    uint64_t at = s->now + sim_between(s, 1, s->cfg.lease_ns * (1 + sim_below(s, 3)));
    struct sim_event *e = sim_post(s, at, SIM_WORLD, on_heal);

    e->i = a;
    e->k = b;
}

static void on_fast(struct bt_sim *s, struct sim_event *e)
{
    (void)e;
    changed(s);
    s->slow = 1;
}

/* A drained node stops by itself; it is replaced a little later. */
static void on_drained(struct bt_sim *s, struct sim_event *e)
{
    struct sim_proc *p = &s->procs[e->i];

    if (p->alive && p->draining) {
        sim_post(s, s->now + 100 * SIM_MS, SIM_WORLD, on_drained)->i = e->i;
    } else if (!p->alive) {
        changed(s);
        sim_proc_start(s, e->i);
    }
}

void sim_drain(struct bt_sim *s, uint32_t proc)
{
    if (s->procs[proc].alive && !s->procs[proc].draining && !s->procs[proc].frozen) {
        sim_node_drain(s, proc);
        sim_post(s, s->now + 100 * SIM_MS, SIM_WORLD, on_drained)->i = proc;
    }
}

/* As SIGTERM; or a router is asked, and tells it. */
static void drain_proc(struct bt_sim *s, uint32_t proc)
{
    uint64_t x = sim_mix(s->opts.seed, s->now), instance = 0;
    struct sim_proc *r = &s->procs[x / 2 % s->cfg.n_routers];
    struct bt_err err = {0};

    if (x % 2 == 0 && r->alive && !r->frozen &&
        bt_rt_drain(r->router->core, s->now, s->procs[proc].name, true, &instance, &err) == BT_OK) {
        sim_logs(s, r->name, "%s is asked to drain %p", proc);
        sim_router_pump(s, r->router);
    } else {
        sim_drain(s, proc);
    }
}

/* Generations that D will never give: what they name is stale everywhere. */
static void forge_fill(struct bt_sim *s, struct bt_control *m, enum bt_control_kind kind)
{
    m->kind = kind;
    m->generation = sim_chance(s, 300000) ? 0 : UINT64_C(1) << 40 | sim_below(s, 100);
    switch (kind) {
    case BT_CONTROL_STARTED:
        m->started.n_tokens = sim_below(s, 200);
        break;
    case BT_CONTROL_GRANT:
        m->grant.n_groups = 1 + sim_below(s, 3);
        m->grant.first_page[0] = sim_below(s, 100);
        break;
    case BT_CONTROL_REFUSE:
        m->refuse.reason = BT_ATTEMPT_RETRY;
        m->refuse.text = "forged";
        break;
    case BT_CONTROL_HANDOFF:
        m->handoff.index = sim_below(s, 3);
        m->handoff.n_groups = 1 + sim_below(s, 3);
        m->handoff.n_shares[0] = sim_below(s, 100);
        break;
    case BT_CONTROL_REVOKE:
    case BT_CONTROL_FORGET:
    case BT_CONTROL_DONE:
    case BT_CONTROL_COMPUTING:
    case BT_CONTROL_KINDS:
        break;
    }
}

static void forge(struct bt_sim *s)
{
    for (uint32_t i = sim_below(s, 20); s->n_conns > 0 && i > 0; i--) {
        uint32_t conn = sim_below(s, s->n_conns);
        enum sim_side to = (enum sim_side)sim_below(s, 2);
        const struct sim_node *n = s->procs[s->conns[conn].proc[to]].node;
        struct bt_control m = {0};

        if (n == NULL || n->n_tickets == 0) {
            continue;
        }
        m.ticket =
            n->tickets[n->n_tickets - 1 - sim_below(s, n->n_tickets < 4 ? n->n_tickets : 4)].ticket;
        if (sim_chance(s, 200000)) {
            m.ticket.b[3] ^= 1;
        }
        forge_fill(s, &m, (enum bt_control_kind)sim_below(s, BT_CONTROL_KINDS));
        sim_conn_forge(s, conn, to, &m);
    }
}

static void inject(struct bt_sim *s, enum sim_fault kind)
{
    changed(s);
    s->stalled = s->stalled || kind == SIM_FAULT_STALL || kind == SIM_FAULT_FORGE;
    switch (kind) {
    case SIM_FAULT_KILL_NODE:
        kill_proc(s, pick_proc(s, false));
        break;
    case SIM_FAULT_KILL_ROUTER:
        kill_proc(s, pick_proc(s, true));
        break;
    case SIM_FAULT_FREEZE:
        freeze_proc(s, sim_below(s, s->n_procs));
        break;
    case SIM_FAULT_CUT:
        cut_network(s);
        break;
    case SIM_FAULT_STREAM:
        if (s->n_streams > 0) {
            sim_stream_break(s, sim_below(s, s->n_streams));
        }
        break;
    case SIM_FAULT_CONN:
        if (s->n_conns > 0) {
            sim_conn_break(s, sim_below(s, s->n_conns));
        }
        break;
    case SIM_FAULT_SLOW:
        s->slow = 1 + sim_below(s, 40);
        sim_post(s, s->now + sim_between(s, 100, 3000) * SIM_MS, SIM_WORLD, on_fast);
        break;
    case SIM_FAULT_STALL:
        if (s->n_conns > 0) {
            uint32_t conn = sim_below(s, s->n_conns);

            sim_log(s, "connection %u stalls", conn);
            s->conns[conn].stalled = true;
        }
        break;
    case SIM_FAULT_FORGE:
        forge(s);
        break;
    case SIM_FAULT_DRAIN:
        drain_proc(s, pick_proc(s, false));
        break;
    case SIM_FAULT_KILL_DECODE:
        kill_proc(s, s->cfg.n_routers + s->cfg.n_nodes[0] + sim_below(s, s->cfg.n_nodes[1]));
        break;
    case SIM_FAULT_ALL:
        break;
    }
}

static void on_fault(struct bt_sim *s, struct sim_event *e)
{
    uint32_t n = 0, bits[16];

    (void)e;
    for (uint32_t b = 1; b <= SIM_FAULT_KILL_DECODE; b <<= 1) {
        if ((s->cfg.fault_kinds & b) != 0) {
            bits[n++] = b;
        }
    }
    s->result.faults++;
    inject(s, (enum sim_fault)bits[sim_below(s, n)]);
}

/* ---- one node after the other ---- */

static void on_roll(struct bt_sim *s, struct sim_event *e)
{
    struct sim_proc *p = &s->procs[e->i];

    changed(s);
    if (e->k == 0) {
        drain_proc(s, e->i);
        s->result.faults++;
    } else if (p->alive && !p->draining) { /* replaced, and back for a while */
        if (e->i + 1 < s->n_procs) {
            sim_post(s, s->now, SIM_WORLD, on_roll)->i = e->i + 1;
        } else {
            sim_settle_start(s);
        }
        return;
    }
    struct sim_event *next = sim_post(s, s->now + 2000 * SIM_MS, SIM_WORLD, on_roll);

    next->i = e->i;
    next->k = 1;
}

/* ---- roles ---- */

/* A router is asked; it refuses where nobody would be left, as far as it knows. */
static void on_flip(struct bt_sim *s, struct sim_event *e)
{
    uint64_t x = sim_mix(s->opts.seed ^ 79, e->i), instance = 0;
    struct sim_proc *r = &s->procs[x % s->cfg.n_routers];
    uint32_t node = s->cfg.n_routers + (uint32_t)(x / 8 % (s->n_procs - s->cfg.n_routers));
    enum bt_role role = (enum bt_role)(x / 1024 % 3);
    struct bt_err err = {0};

    changed(s);
    if (r->alive && !r->frozen &&
        bt_rt_set_role(r->router->core, s->now, s->procs[node].name, role, false, &instance,
                       &err) == BT_OK) {
        sim_logs(s, bt_role_name(role), "%p is told to serve as %s", node);
        sim_router_pump(s, r->router);
    }
}

/* From the seed alone, so that nothing else changes with it. */
static void flips_start(struct bt_sim *s)
{
    for (uint32_t i = 0; i < s->cfg.n_flips; i++) {
        uint64_t within = sim_mix(s->opts.seed ^ 80, i) % (1500 * SIM_MS);

        sim_post(s, s->now + (i + 1) * 1500 * SIM_MS + within, SIM_WORLD, on_flip)->i = i;
    }
}

/* ---- the end of it ---- */

static void on_all_over(struct bt_sim *s, struct sim_event *e)
{
    (void)e;
    changed(s);
    s->slow = 1;
    for (uint32_t a = 0; a < s->n_procs; a++) {
        struct sim_proc *p = &s->procs[a];

        for (uint32_t b = 0; b < a; b++) {
            if (s->cut[a][b] || s->cut[b][a]) {
                sim_heal(s, a, b);
            }
        }
        if (p->alive && p->frozen) {
            sim_proc_thaw(s, a);
        }
        if (!p->alive) {
            sim_proc_start(s, a);
        } else if (!p->is_router && s->cfg.n_flips > 0) {
            sim_node_set_role(
                s, p->node,
                s->cfg.roles[a]); /* routers that do not know of each other may leave none */
        }
    }
    sim_settle_start(s);
}

void sim_faults_start(struct bt_sim *s)
{
    const struct sim_config *c = &s->cfg;
    uint64_t last = c->fault_ns > c->arrive_ns ? c->fault_ns : c->arrive_ns;

    flips_start(s);
    if (c->n_flips > 0 && last < (c->n_flips + 2) * 1500 * SIM_MS) {
        last = (c->n_flips + 2) * 1500 * SIM_MS;
    }
    if (s->opts.profile == BT_SIM_ROLLING) {
        sim_post(s, s->now + 2000 * SIM_MS, SIM_WORLD, on_roll)->i = c->n_routers;
        return;
    }
    uint64_t at = sim_between(s, 0, c->fault_ns);

    for (uint32_t i = 0; i < c->n_faults; i++) {
        uint64_t later = c->together ? sim_between(s, 0, 5 * SIM_MS) : 0;

        sim_post(s, s->now + (c->together ? at + later : sim_between(s, 0, c->fault_ns)), SIM_WORLD,
                 on_fault);
    }
    sim_post(s, s->now + last + 2000 * SIM_MS, SIM_WORLD, on_all_over);
}
