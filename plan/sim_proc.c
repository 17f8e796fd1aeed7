/* Processes: started, killed, frozen; and whether the network between two of them passes. */

#include "plan/sim_int.h"

#include <stdlib.h>
#include "base/assert.h"
#include "base/mem.h"

static uint64_t hiccup(struct bt_sim *s)
{
    return sim_chance(s, s->cfg.hiccup_ppm) ? sim_between(s, 2, 200) : 1;
}

static uint64_t at_most(uint64_t ns, uint64_t limit)
{
    return ns < limit ? ns : limit;
}

uint64_t sim_latency(struct bt_sim *s)
{
    uint64_t ns = sim_between(s, s->cfg.net_min_ns, s->cfg.net_max_ns);

    return at_most(ns * s->slow * hiccup(s), 500 * SIM_MS);
}

uint64_t sim_local(struct bt_sim *s)
{
    return at_most(sim_between(s, 0, s->cfg.local_max_ns) * hiccup(s), 100 * SIM_MS);
}

bool sim_alive(const struct bt_sim *s, uint32_t proc, uint32_t incarnation)
{
    return s->procs[proc].alive && s->procs[proc].incarnation == incarnation;
}

uint32_t sim_proc_by_name(const struct bt_sim *s, const char *name)
{
    for (uint32_t i = 0; i < s->n_procs; i++) {
        if (strcmp(s->procs[i].name, name) == 0) {
            return i;
        }
    }
    return UINT32_MAX;
}

/* ---- life ---- */

void sim_proc_start(struct bt_sim *s, uint32_t proc)
{
    struct sim_proc *p = &s->procs[proc];

    BT_ASSERT(!p->alive);
    p->alive = true;
    p->frozen = p->draining = false;
    p->incarnation++;
    p->instance = sim_random(s) | 1;
    sim_logs(s, p->name, "%s starts, instance %x", p->instance & 0xffff);
    if (p->is_router) {
        p->router = sim_router_create(s, proc);
    } else {
        p->node = sim_node_create(s, proc);
    }
}

static void on_start(struct bt_sim *s, struct sim_event *e)
{
    if (!s->procs[e->i].alive) {
        sim_proc_start(s, e->i);
    }
}

void sim_procs_start(struct bt_sim *s)
{
    for (uint32_t i = 0; i < s->n_procs; i++) {
        sim_post(s, s->now + sim_between(s, 0, s->cfg.start_ns), SIM_WORLD, on_start)->i = i;
    }
}

static void drop_stalled(struct sim_proc *p)
{
    for (size_t i = 0; i < p->n_stalled; i++) {
        bt_free(p->stalled[i].p);
    }
    p->n_stalled = 0;
}

void sim_proc_stop(struct bt_sim *s, uint32_t proc, bool noticed)
{
    struct sim_proc *p = &s->procs[proc];

    sim_logs(s, p->name, "%s dies, %u", noticed);
    p->alive = false;
    p->frozen = false;
    drop_stalled(p);
    sim_streams_of_dead(s, proc, noticed);
    if (p->is_router) {
        sim_clients_lost(s, proc);
        sim_router_destroy(p->router);
        p->router = NULL;
        return;
    }
    sim_conns_of_dead(s, proc, noticed);
    sim_node_destroy(p->node);
    p->node = NULL;
}

void sim_proc_freeze(struct bt_sim *s, uint32_t proc)
{
    sim_logs(s, s->procs[proc].name, "%s is frozen", 0);
    s->procs[proc].frozen = true;
}

static int by_order(const void *a, const void *b)
{
    const struct sim_event *x = a, *y = b;

    return x->order < y->order ? -1 : x->order > y->order;
}

/* What came meanwhile is seen at once: in the order in which it was sent (some was held back by the
 * network meanwhile), or timers first, as a loop happens to look. */
void sim_proc_thaw(struct bt_sim *s, uint32_t proc)
{
    struct sim_proc *p = &s->procs[proc];
    bool timers_first = sim_chance(s, 500000);

    sim_logs(s, p->name, "%s goes on", 0);
    p->frozen = false;
    if (p->n_stalled > 0) {
        qsort(p->stalled, p->n_stalled, sizeof *p->stalled, by_order);
    }
    for (size_t i = 0; timers_first && i < p->n_stalled; i++) {
        if (p->stalled[i].k == SIM_TIMER) {
            sim_repost(s, s->now, &p->stalled[i]);
        }
    }
    for (size_t i = 0; i < p->n_stalled; i++) {
        if (!timers_first || p->stalled[i].k != SIM_TIMER) {
            sim_repost(s, s->now, &p->stalled[i]);
        }
    }
    p->n_stalled = 0;
}

/* ---- network ---- */

void sim_hold(struct bt_sim *s, struct sim_event *e)
{
    sim_push_event(&s->held, &s->n_held, &s->cap_held, e);
}

void sim_cut(struct bt_sim *s, uint32_t from, uint32_t to)
{
    sim_logs(s, s->procs[from].name, "network cut from %s to %p", to);
    s->cut[from][to] = true;
}

void sim_heal(struct bt_sim *s, uint32_t a, uint32_t b)
{
    size_t n = s->n_held;

    sim_logs(s, s->procs[a].name, "network joined between %s and %p", b);
    s->cut[a][b] = s->cut[b][a] = false;
    s->n_held = 0;
    for (size_t i = 0; i < n; i++) { /* those of other cuts come back here */
        struct sim_event e = s->held[i];

        sim_repost(s, s->now, &e);
    }
}
