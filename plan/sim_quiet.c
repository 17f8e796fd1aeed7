/* Pages come back by themselves: once no request runs and the last lease of whoever vanished is over, every pool is free
 * within a second. Looked at all the time, between requests and while faults last too. */

#include "plan/sim_int.h"

#define LOOK_NS  (100 * SIM_MS)
#define SOON_NS  (1000 * SIM_MS)
#define ALONG_NS (500 * SIM_MS) /* a message may be on its way so long (sim_latency) */

static uint32_t held(const struct bt_sim *s, const struct sim_node *n)
{
    uint32_t sum = 0;

    for (uint32_t g = 0; g < s->cfg.n_groups; g++) {
        const struct bt_pages *p = bt_batch_pages(n->engine.batch, g);

        sum += bt_pages_count(p, BT_PAGE_LEASED) + bt_pages_count(p, BT_PAGE_QUARANTINED);
    }
    return sum;
}

/* Who vanished was heard of for the last time when its fault began, or by what was on its way then; silence is looked
 * for once a heartbeat; and a prefill node that lost its decode node so keeps the prompt for another lease. Where single messages, shares or receives get lost, the transfer deadline ends what waits for
 * them, and then what was kept goes after a lease. */
static uint64_t last_expiry(const struct bt_sim *s)
{
    const struct sim_config *c = &s->cfg;
    bool lossy = c->share_drop_ppm + c->ctrl_lost_ppm + c->busy_ppm > 0 || s->stalled;
    uint64_t lease = c->lease_ns + c->heartbeat_ns;
    uint64_t fault = s->t_fault != 0 ? s->t_fault + ALONG_NS + 2 * lease : 0;

    if (!lossy) {
        return fault > s->t_over ? fault : s->t_over;
    }
    return (fault > s->t_over ? fault : s->t_over) + c->transfer_ns + lease;
}

static void on_look(struct bt_sim *s, struct sim_event *e)
{
    uint64_t due = last_expiry(s);

    (void)e;
    for (uint32_t i = 0; s->n_open == 0 && i < s->n_procs; i++) {
        const struct sim_proc *p = &s->procs[i];
        uint32_t n = p->alive && !p->frozen && !p->is_router ? held(s, p->node) : 0;

        if (n > 0 && s->now > due && s->now - due > s->result.free_ns) {
            s->result.free_ns = s->now - due;
        }
        if (n > 0 && s->now > due + SOON_NS) {
            sim_fail(s, "%s still holds %u pages %llu ms after the last request and lease", p->name,
                     n, (unsigned long long)((s->now - due) / SIM_MS));
        }
    }
    sim_post(s, s->now + LOOK_NS, SIM_WORLD, on_look);
}

void sim_quiet_start(struct bt_sim *s)
{
    sim_post(s, s->now + LOOK_NS, SIM_WORLD, on_look);
}
