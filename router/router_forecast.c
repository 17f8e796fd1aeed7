/* What a newcomer has to expect, and whether one that waits can still be in time. From what each node has to do, from how
 * much of the nodes' time shorter prompts take of late (they are computed beside longer ones and so overtake them), and
 * from how far earlier forecasts were off. Refuses to know who goes where. */

#include "router/router_core_int.h"

/* The speed of an idle node is old after a while: it refuses nobody, and is measured anew. */
#define SPEED_OLD_NS (UINT64_C(10) * 1000000000)
/* Forecasts are corrected by about so many first tokens, but for those that were expected sooner than
 * means anything. */
#define LATE_MEAN     16.0
#define LATE_MAX      4.0
#define LATE_MIN      0.7
#define LATE_NOISE_NS 20000000u
/* What is added: so many times the mean error of late, of the wait; or what nearly all of late were later by. */
#define OFF        3.0
#define OFF_LEAST  0.6
#define OFF_MOST   1.0
#define UNPROVEN   1.0 /* more, before there were LATE_MEAN first tokens of late */
#define LATER_MOST 1.0
#define WORSE_MAX  2u  /* so many of RT_LATE_SEEN may have been later than that */
#define LIMIT_PART 0.5 /* of the limit, added to a wait where errors are compared with it */
/* Work is counted over so long; the oldest prompt at a node keeps half of it whatever comes. */
#define MIX_NS    (UINT64_C(2) * 1000000000)
#define MIX_MOST  0.5
#define ENDS_SEEN 1024u /* running sequences that are looked through */

/* ---- overtaking ---- */

static void mix_turn(struct rt_mix *m, uint64_t now)
{
    uint64_t periods = (now - m->t0) / MIX_NS;

    if (periods > 0) {
        m->last = periods == 1 ? m->current : 0;
        m->current = 0;
        m->t0 += periods * MIX_NS;
    }
}

void bt_rt_mix_note(struct bt_rt_core *c, uint64_t now, uint64_t tokens)
{
    mix_turn(&c->mix, now);
    c->mix.current += tokens <= BT_ADM_SHORT ? (double)tokens : 0;
}

/* How many times longer a prompt takes because short ones overtake it. */
static double overtaken(const struct bt_rt_core *c, uint64_t now, uint64_t tokens, double speed)
{
    struct rt_mix m = c->mix;

    mix_turn(&m, now);
    double part = (double)(now - m.t0) / (double)MIX_NS;
    double share = (m.last * (1 - part) + m.current) / (speed * (double)MIX_NS / 1e9);

    return tokens <= BT_ADM_SHORT ? 1 : 1 / (1 - (share < MIX_MOST ? share : MIX_MOST));
}

/* ---- forecast ---- */

static double at_most(double x, double most)
{
    return x < most ? x : most;
}

static unsigned class_of(uint32_t n_prompt)
{
    return n_prompt <= BT_ADM_SHORT ? 0 : n_prompt <= 4 * BT_ADM_SHORT ? 1 : 2;
}

static double ratio_of(const struct rt_late *l)
{
    double x = l->expected > 0 ? l->took / l->expected : 1;

    return x > LATE_MAX ? LATE_MAX : x < LATE_MIN ? LATE_MIN : x;
}

/* What short waits are off by counts less. */
static double some_of_limit(const struct bt_rt_core *c)
{
    return (double)c->opts.max_ttft_ns * LIMIT_PART;
}

static uint32_t fresh(const struct rt_late *l, uint64_t now)
{
    return now - l->t_last > SPEED_OLD_NS ? 0 : l->n_fresh;
}

static void learn(struct bt_rt_core *c, uint64_t now, const struct rt_seq *s, uint64_t took)
{
    struct rt_late *l = &c->late[class_of(s->n_prompt)];
    double expected = (double)s->expect_ns, corrected = expected * ratio_of(l);
    double off = (double)took - corrected;

    if (s->expect_ns >= LATE_NOISE_NS) {
        l->n_fresh = fresh(l, now) + 1;
        l->t_last = now;
        l->later[(l->n_fresh - 1) % RT_LATE_SEEN] = (float)(off / (corrected + some_of_limit(c)));
        l->off += (off < 0 ? -off : off) - l->off / LATE_MEAN;
        l->took += (double)took - l->took / LATE_MEAN;
        l->expected += expected - l->expected / LATE_MEAN;
    }
}

void bt_rt_first_token(struct bt_rt_core *c, uint64_t now, const struct rt_seq *s)
{
    learn(c, now, s, now - s->t_start);
}

/* How much later nearly all first tokens of late were at most. */
static double nearly_worst(const struct rt_late *l, uint64_t now)
{
    uint32_t n = fresh(l, now) < RT_LATE_SEEN ? fresh(l, now) : RT_LATE_SEEN;
    float top[WORSE_MAX + 1] = {0}; /* the largest ones, falling */
    uint32_t at = n * WORSE_MAX / RT_LATE_SEEN;

    for (uint32_t i = 0; i < n; i++) {
        float x = l->later[i];

        if (x <= top[at]) {
            continue;
        }
        for (uint32_t k = 0; k <= at; k++) {
            float y = top[k];

            top[k] = x > y ? x : y;
            x = x > y ? y : x;
        }
    }
    return (double)top[at];
}

/* The first ones of a rush meet nodes whose speed was measured while little ran: it may become much less. */
static double unproven(const struct rt_late *l, uint64_t now)
{
    return UNPROVEN * (1 - at_most(fresh(l, now) / LATE_MEAN, 1));
}

/* Under overload all are admitted just below the limit, so what a wait may become more than predicted is what breaks the
 * promise: as much is left as forecasts of late would have needed. */
static uint64_t margin_ns(const struct bt_rt_core *c, uint64_t now, const struct rt_late *l,
                          uint64_t wait_ns)
{
    double wait = (double)wait_ns, later = at_most(nearly_worst(l, now), LATER_MOST);
    double off = l->expected > 0 ? OFF * l->off / (l->expected * ratio_of(l)) : 0;
    double least = OFF_LEAST + unproven(l, now);
    double by_mean = (off < least ? least : at_most(off, OFF_MOST)) * wait;
    double by_worst = later * (wait + some_of_limit(c));

    return (uint64_t)(by_worst > by_mean ? by_worst : by_mean);
}

/* Corrected by what first tokens took of late, over what was expected: batches, steps beside the computation, and
 * whatever else no report tells. */
struct bt_rt_forecast bt_rt_forecast(const struct bt_rt_core *c, uint64_t now, uint32_t key,
                                     int32_t priority, uint32_t n_prompt)
{
    const struct rt_late *l = &c->late[class_of(n_prompt)];
    struct bt_rt_forecast f = bt_rt_forecast_work(c, now, key, priority, n_prompt);

    if (f.wait_ns == 0) {
        return f; /* nothing is in its way: what others met under load says nothing about it */
    }
    f.wait_ns = (uint64_t)((double)f.wait_ns * ratio_of(l));
    f.prefill_ns = (uint64_t)((double)f.prefill_ns * ratio_of(l));
    f.margin_ns = margin_ns(c, now, l, f.wait_ns);
    return f;
}

/* ---- decode nodes ---- */

/* Until the kth answer is over, of those that run: all are of about the usual length, so the oldest ends first; and no
 * faster than so many steps take. */
static uint64_t kth_end_ns(const struct bt_rt_core *c, uint64_t now, uint64_t k)
{
    const struct rt_seq *s = c->running.first;
    double per_s = 0, step_ms = 0;

    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *n = &c->nodes[i];

        if (bt_rt_usable(n, BT_ROLE_DECODE) && n->load.decode_step_ms > 0) {
            uint32_t most = n->hello.max_batch;
            uint32_t batch = most > 0 && most < n->own_seqs ? most : n->own_seqs;

            per_s += batch / (c->answer_mean * n->load.decode_step_ms / 1e3);
            step_ms = n->load.decode_step_ms > step_ms ? n->load.decode_step_ms : step_ms;
        }
    }
    if (per_s <= 0) {
        return 0; /* not known */
    }
    for (uint64_t i = 1; i < k && i < ENDS_SEEN && s != NULL; i++) {
        s = s->next;
    }
    double whole = c->answer_mean * step_ms * 1e6, ends = (double)k / per_s * 1e9;
    uint64_t began = s != NULL ? s->info.attempt.t_landed : 0;
    double left = s == NULL ? 0 : began == 0 ? whole : whole - (double)(now - began);

    return (uint64_t)(left > ends ? left : ends);
}

/* Until there is room for a newcomer with so many in front of it. */
static uint64_t decode_wait_ns(const struct bt_rt_core *c, uint64_t now, uint64_t ahead,
                               uint64_t tokens)
{
    uint64_t room = 0;

    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *n = &c->nodes[i];

        if (bt_rt_usable(n, BT_ROLE_DECODE) && n->ident == c->served) {
            room += bt_rt_room_of(n, tokens);
        }
    }
    return ahead < room ? 0 : kth_end_ns(c, now, ahead + 1 - room);
}

/* ---- forecast ---- */

struct bt_rt_forecast bt_rt_forecast_work(const struct bt_rt_core *c, uint64_t now, uint32_t key,
                                          int32_t priority, uint32_t n_prompt)
{
    struct bt_adm_nodes nodes = {.least_ns = UINT64_MAX};
    struct bt_rt_forecast f = {0};
    bool prefill_room = false, decode_room = false;

    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *n = &c->nodes[i];

        if (n->ident != c->served) {
            continue;
        }
        if (bt_rt_usable(n, BT_ROLE_DECODE)) {
            decode_room = decode_room || bt_rt_room_of(n, n_prompt) > 0;
        }
        if (bt_rt_computes(c, n)) {
            uint64_t before = bt_rt_work_before(n, n_prompt), ns = bt_rt_work_ns(c, n, before);
            bool idle = n->own_prompts == 0 && n->other_tokens == 0;

            nodes.tokens += (double)before;
            nodes.tokens_per_s += bt_rt_prefill_speed(c, n);
            prefill_room = prefill_room || bt_rt_takes_more(c, n, n_prompt);
            f.uncertain = f.uncertain || (idle && now - n->t_speed > SPEED_OLD_NS);
            if (ns < nodes.least_ns) {
                nodes.least_ns = ns;
                f.prefill_ns = bt_rt_work_ns(c, n, n_prompt);
            }
        }
    }
    if (nodes.tokens_per_s > 0) {
        double longer = overtaken(c, now, n_prompt, nodes.tokens_per_s);

        nodes.tokens_per_s /= longer;
        nodes.least_ns = (uint64_t)((double)nodes.least_ns * longer);
        f.prefill_ns = (uint64_t)((double)f.prefill_ns * longer);
        nodes.full = !prefill_room || !decode_room;
        nodes.decode_ns = decode_wait_ns(c, now, bt_adm_ahead(&c->adm, key, priority, n_prompt),
                                         n_prompt + (uint64_t)c->answer_mean);
        f.wait_ns = bt_adm_wait_ns(&c->adm, now, key, priority, n_prompt, &nodes);
        f.uncertain = f.uncertain && c->adm.n == 0;
    }
    return f;
}

/* ---- too late ---- */

static uint64_t waited(const struct rt_seq *s, uint64_t now)
{
    return now - s->t_start;
}

/* Promised, and nothing was spent on it yet. */
static bool has_limit(const struct bt_rt_core *c, const struct rt_seq *s)
{
    return c->opts.max_ttft_ns > 0 && s->info.n_attempts == 0;
}

void bt_rt_end_late(struct bt_rt_core *c, uint64_t now, struct rt_seq *s)
{
    /* It would have taken at least so long, and nobody knows how much longer. */
    uint64_t at_least = waited(s, now) > c->opts.max_ttft_ns ? waited(s, now) : c->opts.max_ttft_ns;

    learn(c, now, s, at_least + (uint64_t)some_of_limit(c));
    bt_rt_seq_end(c, s, BT_RT_LATE, 0,
                  "the first token would come later than this router allows: others took longer "
                  "than was predicted");
}

bool bt_rt_too_late_at(const struct bt_rt_core *c, uint64_t now, const struct rt_seq *s,
                       const struct rt_node *p)
{
    uint64_t own = s->n_tokens - p->credit;
    uint64_t ns = bt_rt_work_ns(c, p, bt_rt_work_before(p, own) + own);

    if (!has_limit(c, s) || s->t_start == now) {
        return false; /* it was just admitted */
    }
    /* What begins at once on an idle node is measured by that. */
    return waited(s, now) + (p->own_prompts > 0 ? ns : 0) > c->opts.max_ttft_ns;
}

bool bt_rt_too_late(const struct bt_rt_core *c, uint64_t now, const struct rt_seq *s)
{
    return has_limit(c, s) && waited(s, now) > c->opts.max_ttft_ns;
}
