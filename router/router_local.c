/* Local prefill: whether a decode node computes a prompt itself instead of a prefill node. Reads what nodes have
 * measured; refuses to know which nodes there are to choose from. */

#include "router/router_core_int.h"

/* A speed that is older than this, or was never measured, is tried with a prompt of one chunk at most, on a node that
 * does nothing else. */
#define SPEED_OLD_NS (UINT64_C(10) * 1000000000)
#define PROBE_TOKENS 512u
#define HANDOFFS     16.0 /* that the mean looks back on, about */

bool bt_rt_local_able(const struct rt_node *d)
{
    return bt_rt_usable(d, BT_ROLE_DECODE) && d->version >= BT_SESSION_VERSION_LOCAL;
}

bool bt_rt_local_only(const struct bt_rt_core *c)
{
    return c->opts.local_prefill == BT_RT_LOCAL_ALWAYS;
}

bool bt_rt_computes(const struct bt_rt_core *c, const struct rt_node *n)
{
    return bt_rt_local_only(c) ? bt_rt_local_able(n) : bt_rt_usable(n, BT_ROLE_PREFILL);
}

void bt_rt_local_learn(struct bt_rt_core *c, const struct bt_msg_leg_stats *st)
{
    if (st->transferred_bytes > 0) {
        c->handoff_ns += ((double)st->transfer_tail_ns - c->handoff_ns) / HANDOFFS;
    }
}

/* Tokens a second that a decode node computes of prompts; 0: not known, and not to be tried now. */
static double local_speed(const struct bt_rt_core *c, uint64_t now, const struct rt_node *d,
                          uint64_t tokens, const struct rt_node *p)
{
    double own = d->load.prefill_tokens_per_s, mean = bt_rt_prefill_speed(c, p);
    bool idle = d->own_seqs + d->other_seqs == 0;

    if (idle && tokens <= PROBE_TOKENS && now - d->t_speed > SPEED_OLD_NS) {
        return own > mean ? own : mean;
    }
    return own;
}

/* Seconds that are waited more, summed over all who wait: this sequence; at the decode node those in the batch, whose
 * steps take the chunks with them; at the prefill node those that still wait in the router. */
static bool auto_better(const struct bt_rt_core *c, uint64_t now, const struct rt_seq *s,
                        const struct rt_node *d, const struct rt_node *p, uint32_t n_prefill)
{
    uint64_t here = s->n_tokens - d->credit, there = s->n_tokens - p->credit;
    double speed = local_speed(c, now, d, here, p), speed_p = bt_rt_prefill_speed(c, p);
    double beside = d->own_seqs + d->other_seqs;
    uint32_t others = c->stats.waiting > 1 ? c->stats.waiting - 1 : 0;
    double behind = (double)others / (n_prefill > 0 ? n_prefill : 1);

    if (speed <= 0) {
        return false;
    }
    double step = beside > 0 ? d->load.decode_step_ms / 1e3 : 0;
    double local = step + ((double)bt_rt_work_at(d) + (double)here * (1 + beside)) / speed;
    double remote =
        c->handoff_ns / 1e9 + ((double)bt_rt_work_at(p) + (double)there * (1 + behind)) / speed_p;

    return local < remote;
}

bool bt_rt_local_better(const struct bt_rt_core *c, uint64_t now, const struct rt_seq *s,
                        const struct rt_node *d, const struct rt_node *p, uint32_t n_prefill)
{
    if (s->prefer != 0) {
        return false; /* a prefill node has computed it already */
    }
    switch (c->opts.local_prefill) {
    case BT_RT_LOCAL_TOKENS:
        return s->n_tokens - d->credit <= c->opts.local_tokens;
    case BT_RT_LOCAL_AUTO:
        return auto_better(c, now, s, d, p, n_prefill);
    case BT_RT_LOCAL_ALWAYS:
        return true;
    case BT_RT_LOCAL_NEVER:
        break;
    }
    return false;
}
