/* A seed's cluster: sizes, limits, speeds, and which faults may happen, by profile. And the toy
 * model: hashes. */

#include "plan/sim_int.h"

#include <stdio.h>

/* ---- the toy model ---- */

uint64_t sim_mix(uint64_t a, uint64_t b)
{
    uint64_t z = a * UINT64_C(0x9e3779b97f4a7c15) + b;

    z = (z ^ z >> 32) * UINT64_C(0xd6e8feb86659fd93);
    z = (z ^ z >> 29) * UINT64_C(0xbf58476d1ce4e5b9);
    return z ^ z >> 32;
}

uint64_t sim_prefix(uint64_t prefix, uint32_t token)
{
    return sim_mix(prefix, (uint64_t)token + 1);
}

uint64_t sim_kv(uint64_t prefix, uint32_t group, uint32_t layer, uint32_t pos)
{
    return sim_mix(prefix, (uint64_t)group << 48 | (uint64_t)layer << 32 | pos);
}

struct bt_sampled sim_sample(uint64_t sum, uint32_t class, uint64_t seed, uint32_t index)
{
    uint64_t x = sim_mix(sim_mix(sum + class, seed), index);

    return (struct bt_sampled){.token = (uint32_t)(x % SIM_VOCAB),
                               .logprob = -(float)(x >> 44) / 65536.0F};
}

uint32_t sim_finish(const struct sim_config *c, uint32_t token, uint32_t n_prompt, uint32_t index,
                    uint32_t max_tokens)
{
    if (token < SIM_VOCAB / 40) {
        return 1;
    }
    return index + 1 >= max_tokens || n_prompt + index + 1 >= c->context ? 2 : 0;
}

/* ---- the cluster ---- */

static void config_sizes(struct bt_sim *s, struct sim_config *c, enum bt_sim_profile profile)
{
    bool tiny =
        profile == BT_SIM_TINY_POOLS || (profile == BT_SIM_EVERYTHING && sim_chance(s, 300000));
    bool resend = profile == BT_SIM_RESEND;
    uint32_t at_least = profile == BT_SIM_ROLLING || profile == BT_SIM_ONE_FAULT || resend ? 2 : 1;
    bool several = sim_chance(s, resend ? 800000 : 400000);

    c->n_routers = 1 + (several ? 1 + sim_below(s, SIM_ROUTERS_MAX - 1) : 0);
    c->n_nodes[0] = at_least + sim_below(s, SIM_NODES_MAX - at_least);
    c->n_nodes[1] = at_least + sim_below(s, SIM_NODES_MAX - at_least);
    c->page_tokens = 1U << sim_between(s, 1, 3);
    c->n_groups = 1 + sim_chance(s, 300000);
    for (uint32_t g = 0; g < c->n_groups; g++) {
        c->n_layers[g] = (uint32_t)sim_between(s, 1, 2);
        c->window[g] = g > 0 ? (uint32_t)sim_between(s, 1, 24) : 0;
    }
    c->context = (uint32_t)sim_between(s, 40, 120);
    c->prompt_max = (uint32_t)sim_between(s, 1, c->context * 3 / 4);
    c->answer_max = (uint32_t)sim_between(s, 2, 30);
    c->chunk_tokens = (uint32_t)sim_between(s, 4, 64);
    c->max_batch = (uint32_t)sim_between(s, 1, 16);
    c->max_jobs = tiny ? (uint32_t)sim_between(s, 2, 12) : 64;
    uint32_t one = c->context / c->page_tokens + 2;

    for (unsigned r = 0; r < 2; r++) {
        c->n_pages[r] = tiny ? (uint32_t)sim_between(s, one / 2, one * 2) : one * 16;
    }
    if (resend) {
        c->n_pages[BT_ROLE_DECODE] = (uint32_t)sim_between(s, one, one * 4);
    }
    c->seqs_max = tiny ? (uint32_t)sim_between(s, 4, 64) : 256;
    c->queue_max = tiny ? (uint32_t)sim_between(s, 2, 64) : 256;
    c->n_requests = (uint32_t)sim_between(s, 3, tiny ? 80 : 40);
    c->arrive_ns = sim_between(s, 50, tiny ? 1000 : 6000) * SIM_MS;
}

/* Prefix caches on both sides, mostly, and prompts that begin alike. */
static void config_caches(struct bt_sim *s, struct sim_config *c)
{
    for (unsigned r = 0; r < 2; r++) {
        c->caches[r] = sim_chance(s, 850000);
    }
    c->n_texts = (uint32_t)sim_between(s, 1, 4);
    c->alike_ppm = sim_chance(s, 800000) ? (uint32_t)sim_between(s, 200000, 1000000) : 0;
}

static void config_times(struct bt_sim *s, struct sim_config *c)
{
    c->lease_ns = sim_between(s, 800, 3000) * SIM_MS;
    c->heartbeat_ns = 250 * SIM_MS;
    c->transfer_ns = sim_between(s, 1500, 6000) * SIM_MS;
    c->connect_ns = sim_between(s, 1000, 5000) * SIM_MS;
    c->drain_ns = sim_between(s, 0, sim_chance(s, 500000) ? 1000 : 20000) * SIM_MS;
    c->net_min_ns = sim_between(s, 10, 1000) * 1000;
    c->net_max_ns = c->net_min_ns + sim_between(s, 0, 5000) * 1000;
    c->local_max_ns = sim_between(s, 1, 1000) * 1000;
    c->hiccup_ppm = sim_chance(s, 500000) ? sim_below(s, 20000) : 0;
    c->step_ns = sim_between(s, 200, 15000) * 1000;
    c->token_ns[0] = c->token_ns[1] = sim_between(s, 10, 500) * 1000;
    c->share_ns = sim_between(s, 1, 2000) * 1000;
    c->share_window = (uint32_t)sim_between(s, 1, 16);
    c->rendezvous = sim_chance(s, 500000);
    c->attempts_max = 8;
    c->queue_ns = sim_between(s, 10000, 30000) * SIM_MS;
    if (s->opts.profile == BT_SIM_TINY_POOLS && sim_chance(s, 500000)) {
        c->queue_ns = sim_between(s, 100, 3000) * SIM_MS;
    }
    c->grace_ns = sim_between(s, 1000, 5000) * SIM_MS;
    c->migrate_ns = 10000 * SIM_MS;
}

static void config_faults(struct bt_sim *s, struct sim_config *c, enum bt_sim_profile profile)
{
    static const uint32_t kinds[BT_SIM_PROFILES] = {
        [BT_SIM_KILLS] = SIM_FAULT_KILL_NODE | SIM_FAULT_KILL_ROUTER,
        [BT_SIM_CUTS] =
            SIM_FAULT_CUT | SIM_FAULT_STREAM | SIM_FAULT_CONN | SIM_FAULT_SLOW | SIM_FAULT_STALL,
        [BT_SIM_FREEZES] = SIM_FAULT_FREEZE,
        [BT_SIM_TINY_POOLS] = 0,
        [BT_SIM_ROLLING] = SIM_FAULT_DRAIN,
        [BT_SIM_ONE_FAULT] = SIM_FAULT_ALL,
        [BT_SIM_EVERYTHING] = SIM_FAULT_ALL,
        [BT_SIM_RESEND] = SIM_FAULT_KILL_DECODE | SIM_FAULT_CONN,
    };

    c->fault_kinds = kinds[profile];
    c->n_faults = c->fault_kinds == 0           ? 0
                  : profile == BT_SIM_ONE_FAULT ? 1
                                                : (uint32_t)sim_between(s, 1, 8);
    c->together = sim_chance(s, 200000);
    if (profile ==
        BT_SIM_ONE_FAULT) { /* a router that was frozen is dialled again within that time */
        c->grace_ns = c->lease_ns + 5000 * SIM_MS;
    }
    c->fault_ns = sim_between(s, 1000, 8000) * SIM_MS;
    c->must_finish = profile == BT_SIM_CALM || profile == BT_SIM_CANCELS ||
                     profile == BT_SIM_ROLLING || profile == BT_SIM_ONE_FAULT;
    if (profile == BT_SIM_ROLLING) {
        c->n_faults = c->n_nodes[0] + c->n_nodes[1];
        c->arrive_ns = sim_between(s, 3000, 12000) * SIM_MS;
        c->drain_ns = sim_chance(s, 500000) ? 60000 * SIM_MS : c->drain_ns;
    }
    if (profile != BT_SIM_CALM && profile != BT_SIM_ROLLING) {
        c->cancel_ppm = profile == BT_SIM_CANCELS ? 600000 : 150000;
        c->deadline_ppm = profile == BT_SIM_EVERYTHING ? 100000 : 0;
    }
    if (profile == BT_SIM_RESEND) {
        c->share_twice_ppm = sim_below(s, 50000);
    }
    if (profile == BT_SIM_EVERYTHING || profile == BT_SIM_CUTS) {
        bool rough = sim_chance(s, 500000);

        c->share_drop_ppm = rough ? sim_below(s, 3000) : 0;
        c->share_twice_ppm = rough ? sim_below(s, 100000) : 0;
        c->busy_ppm = rough && profile == BT_SIM_EVERYTHING ? sim_below(s, 20000) : 0;
        c->ctrl_lost_ppm = rough && profile == BT_SIM_EVERYTHING ? sim_below(s, 10000) : 0;
    }
    if (!c->must_finish && sim_chance(s, 200000)) {
        c->max_ttft_ns = sim_between(s, 1000, 5000) * SIM_MS;
    }
}

/* How long a job may hold its pages after its ticket is over: a step and the shares in flight; with
 * faults, until connections are given up. */
static uint64_t hold_ns(const struct sim_config *c)
{
    uint64_t hiccup = c->hiccup_ppm > 0 ? 200 : 1;
    uint64_t step = c->step_ns + c->token_ns[BT_ROLE_PREFILL] * (c->chunk_tokens + c->max_batch);
    uint64_t shares = c->share_window * (3 * c->net_max_ns + c->share_ns);
    uint64_t ns = 2 * step + (shares + 8 * c->local_max_ns) * hiccup + 200 * SIM_MS;

    ns += c->lease_ns; /* a prefill node keeps what only its decode side lost */
    return c->fault_kinds == 0 ? ns : ns * 40 + c->lease_ns * 4 + c->transfer_ns;
}

/* Models of a second kind may be there: never paired with the first, and never in its place. */
static void config_classes(struct bt_sim *s, struct sim_config *c)
{
    uint32_t first[2] = {c->n_routers, c->n_routers + c->n_nodes[0]};

    if (s->opts.profile != BT_SIM_EVERYTHING || !sim_chance(s, 300000)) {
        return;
    }
    for (uint32_t i = c->n_routers; i < s->n_procs; i++) {
        c->classes[i] = i != first[0] && i != first[1] && sim_chance(s, 400000);
    }
}

static void name_procs(struct bt_sim *s)
{
    static const char kind[] = "pd";

    for (uint32_t i = 0; i < s->cfg.n_routers; i++) {
        struct sim_proc *p = &s->procs[s->n_procs++];

        p->is_router = true;
        snprintf(p->name, sizeof p->name, "r%u", i);
    }
    for (unsigned role = 0; role < 2; role++) {
        for (uint32_t i = 0; i < s->cfg.n_nodes[role]; i++) {
            struct sim_proc *p = &s->procs[s->n_procs++];

            snprintf(p->name, sizeof p->name, "%c%u", kind[role], i);
        }
    }
}

/* From the seed alone: so seeds without local prefill run as they did before there was any. */
static void config_local(const struct bt_sim *s, struct sim_config *c)
{
    uint64_t x = sim_mix(s->opts.seed, 77);

    if (x % 2 == 0) {
        c->local = (enum bt_rt_local)(x / 2 % 4);
        c->local_tokens = 1 + (uint32_t)(x / 8 % c->prompt_max);
    }
}

/* Of a third of all seeds some nodes serve as both; then all pools are alike, so that what fits somewhere fits
 * everywhere. */
static void config_roles(const struct bt_sim *s, struct sim_config *c)
{
    uint64_t x = sim_mix(s->opts.seed, 78);

    for (uint32_t i = c->n_routers; i < s->n_procs; i++) {
        bool both = x % 3 == 0 && sim_mix(x, i) % 2 == 0;

        c->roles[i] = both                         ? BT_ROLE_BOTH
                      : s->procs[i].name[0] == 'p' ? BT_ROLE_PREFILL
                                                   : BT_ROLE_DECODE;
    }
    if (x % 3 == 0) {
        c->n_pages[0] = c->n_pages[1];
        /* Not while nodes are drained in turn or one fault is all that there is: both may take the last of a role. */
        c->n_flips = s->opts.profile == BT_SIM_ROLLING || s->opts.profile == BT_SIM_ONE_FAULT
                         ? 0
                         : (uint32_t)(x / 3 % 5);
    }
}

/* Of an eighth of all seeds the prefill nodes are slow: a long prompt takes several transfer deadlines, a layer of a chunk
 * a fraction of one; and what is computed may all be there at its decode node. */
static void config_slow(const struct bt_sim *s, struct sim_config *c)
{
    uint64_t x = sim_mix(s->opts.seed, 81);

    if (x % 8 == 0) {
        c->transfer_ns = (1500 + x / 8 % 1000) * SIM_MS;
        c->chunk_tokens = c->chunk_tokens < 8 ? c->chunk_tokens : 8;
        c->max_batch = c->max_batch < 4 ? c->max_batch : 4;
        c->n_requests = c->n_requests < 8 ? c->n_requests : 8;
        c->token_ns[BT_ROLE_PREFILL] =
            c->transfer_ns / 4 * c->n_layers[0] / (c->chunk_tokens + c->max_batch);
        c->caches[BT_ROLE_PREFILL] = c->caches[BT_ROLE_PREFILL] && x / 8192 % 2 == 0;
        /* The last request may wait for all prompts before it. */
        c->queue_ns += (uint64_t)c->n_requests * c->context * c->token_ns[BT_ROLE_PREFILL];
    }
    c->alive_ns = c->heartbeat_ns < c->transfer_ns / 4 ? c->heartbeat_ns : c->transfer_ns / 4;
}

void sim_config(struct bt_sim *s)
{
    config_sizes(s, &s->cfg, s->opts.profile);
    config_caches(s, &s->cfg);
    config_times(s, &s->cfg);
    config_slow(s, &s->cfg);
    config_faults(s, &s->cfg, s->opts.profile);
    name_procs(s);
    config_classes(s, &s->cfg);
    if (!s->cfg.must_finish && sim_chance(s, 200000)) {
        s->cfg.start_ns = sim_between(s, 1, 3000) * SIM_MS;
    }
    s->cfg.hold_ns = hold_ns(&s->cfg);
    config_local(s, &s->cfg);
    config_roles(s, &s->cfg);
}
