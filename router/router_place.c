/* The choice of a pair for a sequence: by the seconds of work that wait at a prefill node and how full a decode node will
 * be, load counted at dispatch, ties rotated, what failed before avoided. Owns the cost of a node; refuses to know what a
 * request asks for beyond its size and its beginning.
 *
 * What a prefill node likely has cached of the prompt is work that it need not do: so a prefix draws prompts to its
 * node only until others are that much work ahead. It is never buried, and a node that all want does not stop the
 * others from being wanted. */

#include "router/router_core_int.h"

#define DECODE_AHEAD 2u  /* sequences sent to a decode node, in batches */
#define FULL_NS      1e9 /* a node that is full weighs like so much work at a prefill node */
#define FOREVER_NS   1e18
#define BATCH        64u  /* of a decode node that does not tell */
#define CHUNK        512u /* of a prefill node that does not tell */
/* A prefill node gets no more while it has so much to do, in chunks and in time, whichever is longer, unless it has
 * fewer than so many prompts: work for longer than it takes to send more, and what is not sent can still be put in
 * another order or go to another node. */
#define AHEAD_CHUNKS  4u
#define AHEAD_S       0.5
#define AHEAD_PROMPTS 2u
#define SPEED         2000.0 /* tokens a second of a prefill node, before anything was measured */
/* Speeds that differ less from the mean are taken as equal, so that ties stay ties. */
#define SPEED_NOISE 0.25
#define CREDIT_MAX  1024u /* cached tokens, */
#define CREDIT_SEQS 0.9   /* which are worth so many sequences on a decode node */
/* An answer without a near end is expected to be so many times the mean. */
#define EXPECT_MEANS 2.0

static uint32_t limit_of(const struct rt_node *n)
{
    uint32_t context = n->hello.context == 0 ? UINT32_MAX : n->hello.context;
    uint32_t room = n->hello.max_tokens == 0 ? UINT32_MAX : n->hello.max_tokens;
    uint32_t least = context < room ? context : room;

    return least < BT_SESSION_TOKENS_MAX ? least : BT_SESSION_TOKENS_MAX;
}

uint32_t bt_rt_context_of(const struct bt_rt_core *c, uint64_t ident, bool with_decode)
{
    uint32_t best = 0;

    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *p = &c->nodes[i];

        if (!bt_rt_computes(c, p) || p->ident != ident || limit_of(p) <= best) {
            continue;
        }
        if (!with_decode || bt_rt_local_only(c)) {
            best = limit_of(p);
            continue;
        }
        for (uint32_t k = 0; k < c->n_slots; k++) {
            const struct rt_node *d = &c->nodes[k];

            if (bt_rt_usable(d, BT_ROLE_DECODE) && bt_rt_may_pair(p, d)) {
                uint32_t l = limit_of(p) < limit_of(d) ? limit_of(p) : limit_of(d);

                best = l > best ? l : best;
            }
        }
    }
    return best;
}

uint32_t bt_rt_core_context(const struct bt_rt_core *c)
{
    return bt_rt_context_of(c, c->served, true);
}

static uint32_t penalty(const struct rt_seq *s, const struct rt_node *n)
{
    for (uint32_t i = 0; i < s->n_avoid; i++) {
        if (s->avoid[i].instance == n->hello.instance) {
            return s->avoid[i].weight;
        }
    }
    return 0;
}

/* What each node likely has of the sequence: a bit less than all, something is always computed. */
static void set_credits(struct bt_rt_core *c, uint64_t now, const struct rt_seq *s)
{
    bool echo = bt_rt_wants_prompt(s); /* computes everything */

    for (uint32_t i = 0; i < c->n_slots; i++) {
        struct rt_node *n = &c->nodes[i];
        bool may = n->session != 0 && n->caches && !(echo && bt_rt_computes(c, n));
        uint32_t tokens = may ? bt_rt_affinity_tokens(c->affinity, now, n, s) : 0;

        n->credit = tokens < s->n_prompt ? tokens : s->n_prompt - 1;
    }
}

/* ---- prefill ---- */

void bt_rt_speeds_changed(struct bt_rt_core *c)
{
    double sum = 0;
    uint32_t n = 0;

    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *p = &c->nodes[i];

        if (bt_rt_computes(c, p) && p->load.prefill_tokens_per_s > 0) {
            sum += p->load.prefill_tokens_per_s;
            n++;
        }
    }
    c->prefill_speed = n > 0 ? sum / n : 0;
}

double bt_rt_prefill_speed(const struct bt_rt_core *c, const struct rt_node *p)
{
    double mean = c->prefill_speed > 0 ? c->prefill_speed : SPEED;
    double own = p->load.prefill_tokens_per_s;

    return own > 0 && (own < mean * (1 - SPEED_NOISE) || own > mean * (1 + SPEED_NOISE)) ? own
                                                                                         : mean;
}

uint64_t bt_rt_work_at(const struct rt_node *p)
{
    return p->own_tokens + p->other_tokens - p->done_tokens;
}

/* Work that a prompt of so many tokens has in front of it. */
uint64_t bt_rt_work_before(const struct rt_node *p, uint64_t n_tokens)
{
    uint64_t all = bt_rt_work_at(p);
    uint64_t others = (uint64_t)(p->other_seqs + 1) * BT_ADM_SHORT;
    uint64_t parts = p->own_short + (p->other_tokens < others ? p->other_tokens : others);

    return n_tokens <= BT_ADM_SHORT && parts < all ? parts : all;
}

/* For how long a node without pages counts as busy, beside its work. */
static uint64_t short_ns(const struct rt_node *p)
{
    return p->load.pages_short ? (uint64_t)FULL_NS : 0;
}

uint64_t bt_rt_work_ns(const struct bt_rt_core *c, const struct rt_node *p, uint64_t tokens)
{
    double ns = (double)tokens / bt_rt_prefill_speed(c, p) * 1e9;

    return ns < FOREVER_NS ? (uint64_t)ns : (uint64_t)FOREVER_NS;
}

/* A node whose prompts wait for pages gets no more than the one that keeps its place there. */
bool bt_rt_takes_more(const struct bt_rt_core *c, const struct rt_node *p, uint64_t n_tokens)
{
    double chunks =
        AHEAD_CHUNKS * (double)(p->hello.chunk_tokens > 0 ? p->hello.chunk_tokens : CHUNK);
    double ahead = bt_rt_prefill_speed(c, p) * AHEAD_S;

    if (p->load.pages_short) {
        return p->own_prompts == 0;
    }
    return p->own_prompts < AHEAD_PROMPTS ||
           (double)bt_rt_work_before(p, n_tokens) < (ahead > chunks ? ahead : chunks);
}

/* ---- decode ---- */

uint32_t bt_rt_pages_of(const struct rt_node *d, uint64_t tokens)
{
    uint32_t n = d->hello.page_tokens;

    return n == 0 ? 0 : (uint32_t)((tokens + n - 1) / n);
}

uint64_t bt_rt_expected_tokens(const struct bt_rt_core *c, const struct rt_seq *s)
{
    uint64_t likely = (uint64_t)(c->answer_mean * EXPECT_MEANS) + 1;
    uint64_t left =
        s->sampling.max_tokens == 0 ? likely : s->sampling.max_tokens - bt_rt_produced(s);

    return s->n_tokens + (left < likely ? left : likely);
}

static uint64_t decode_cost(const struct rt_node *n, uint64_t tokens)
{
    double batch = n->hello.max_batch > 0 ? n->hello.max_batch : BATCH;
    double pages = n->hello.n_pages > 0 ? n->hello.n_pages : UINT32_MAX;
    double want = (double)(n->own_pages + n->other_pages + bt_rt_pages_of(n, tokens));

    /* Pages that need not travel are worth less than a sequence: they decide among equally busy
     * nodes only. */
    double credit = n->credit < CREDIT_MAX ? (double)n->credit / CREDIT_MAX : 1;
    double seqs = (double)(n->own_seqs + n->other_seqs) + 1 - CREDIT_SEQS * credit;

    return (uint64_t)(FULL_NS * (seqs / batch + want / pages));
}

/* Sequences beyond what fits would only be refused there: they wait here, where any node can take
 * them. */
uint32_t bt_rt_room_of(const struct rt_node *d, uint64_t tokens)
{
    uint32_t most = d->hello.max_batch == 0 ? UINT32_MAX : DECODE_AHEAD * d->hello.max_batch;
    uint64_t taken = d->own_pages + d->other_pages, pages = bt_rt_pages_of(d, tokens);
    uint32_t room = most > d->own_decodes ? most - d->own_decodes : 0;

    if (d->hello.n_pages > 0 && pages > 0) {
        uint64_t fit = d->hello.n_pages > taken ? (d->hello.n_pages - taken) / pages : 0;

        room = fit < room ? (uint32_t)fit : room;
    }
    return room == 0 && d->own_seqs == 0 ? 1 : room;
}

/* ---- pairs ---- */

struct choice {
    struct rt_pair pair; /* prefill NULL: none */
    bool kept;           /* the prefill node has kept the prompt: before all others */
    uint32_t penalty;
    uint64_t cost;
};

/* Of the pairs whose decode node has room: the best, and the best whose prefill node takes more; and
 * of the decode nodes that may compute prompts and take more, the best. */
struct search {
    struct choice best, open, local;
    uint64_t least_ns;  /* work of the prefill node with the least */
    bool any;           /* there are pairs */
    uint32_t n_prefill; /* prefill nodes */
};

static bool is_better(const struct choice *x, const struct choice *than)
{
    return x->kept != than->kept         ? x->kept
           : x->penalty != than->penalty ? x->penalty < than->penalty
                                         : x->cost < than->cost;
}

/* Of equals the first, so that the rotated search decides. */
static void keep_better(struct choice *best, const struct choice *x)
{
    if (best->pair.prefill == NULL || is_better(x, best)) {
        *best = *x;
    }
}

/* Beyond the prompt: how full the decode node will be; how full a prefill node is that decodes, too; and what is waited
 * for pages that travel. */
static uint64_t pair_cost(const struct bt_rt_core *c, const struct rt_pair *pair, uint64_t tokens)
{
    const struct rt_node *p = pair->prefill, *d = pair->decode;
    uint64_t cost = d != NULL ? decode_cost(d, tokens) : 0;

    if (p->hello.role == BT_ROLE_BOTH) {
        cost += decode_cost(p, 0);
    }
    return cost + (d != NULL && p != d ? (uint64_t)c->handoff_ns + 1 : 0);
}

static void consider(struct bt_rt_core *c, struct search *x, const struct rt_seq *s,
                     const struct rt_pair *pair, uint64_t tokens)
{
    const struct rt_node *p = pair->prefill, *d = pair->decode;
    bool kept = s->kept.session != 0 && s->kept.session == p->session && p != d;
    uint32_t pen = penalty(s, p) + (d != NULL && d != p ? penalty(s, d) : 0);
    /* The node that has computed the prompt before probably still has it. */
    uint64_t work =
        bt_rt_work_at(p) + (p->hello.instance == s->prefer && p != d ? 0 : s->n_tokens - p->credit);

    x->any = true;
    if (d != NULL && bt_rt_room_of(d, tokens) == 0) {
        return;
    }
    struct choice y = {*pair, kept, pen,
                       bt_rt_work_ns(c, p, work) + short_ns(p) + pair_cost(c, pair, tokens)};

    uint64_t ns = bt_rt_work_ns(c, p, bt_rt_work_at(p)) + short_ns(p);

    x->least_ns = ns < x->least_ns ? ns : x->least_ns;
    keep_better(&x->best, &y);
    if (kept || bt_rt_takes_more(c, p, s->n_tokens)) {
        keep_better(&x->open, &y);
    }
}

static struct rt_node *at_rotated(struct bt_rt_core *c, enum bt_role role, uint32_t i)
{
    return &c->nodes[(c->next_node[role] + i) % c->n_slots];
}

static bool fits(const struct rt_node *n, enum bt_role role, uint64_t ident, uint64_t tokens)
{
    return bt_rt_usable(n, role) && n->ident == ident && limit_of(n) >= tokens;
}

/* Decode nodes alone. */
static void search_local(struct bt_rt_core *c, const struct rt_seq *s, uint64_t ident,
                         struct search *x)
{
    uint64_t tokens = (uint64_t)s->n_prompt + s->sampling.max_tokens;
    struct search alone = {.least_ns = UINT64_MAX};

    for (uint32_t k = 0; k < c->n_slots; k++) {
        struct rt_node *d = at_rotated(c, BT_ROLE_DECODE, k);

        if (bt_rt_local_able(d) && fits(d, BT_ROLE_DECODE, ident, tokens)) {
            consider(c, &alone, s, &(struct rt_pair){d, d}, bt_rt_expected_tokens(c, s));
        }
    }
    if (bt_rt_local_only(c)) {
        *x = alone;
    } else {
        x->local = alone.open;
    }
}

static void search(struct bt_rt_core *c, uint64_t now, const struct rt_seq *s, struct search *x)
{
    uint64_t ident = s->ident != 0 ? s->ident : c->served;
    uint64_t tokens = (uint64_t)s->n_prompt + s->sampling.max_tokens;
    uint64_t expected = bt_rt_expected_tokens(c, s);
    bool with_decode = bt_rt_wants_decode(s);

    set_credits(c, now, s);
    if (c->opts.local_prefill != BT_RT_LOCAL_NEVER) {
        search_local(c, s, ident, x);
    }
    for (uint32_t i = 0; !bt_rt_local_only(c) && i < c->n_slots; i++) {
        struct rt_node *p = at_rotated(c, BT_ROLE_PREFILL, i);

        if (!fits(p, BT_ROLE_PREFILL, ident, tokens)) {
            continue;
        }
        x->n_prefill++;
        if (!with_decode) {
            consider(c, x, s, &(struct rt_pair){p, NULL}, expected);
            continue;
        }
        for (uint32_t k = 0; k < c->n_slots; k++) {
            struct rt_node *d = at_rotated(c, BT_ROLE_DECODE, k);

            if (fits(d, BT_ROLE_DECODE, ident, tokens) && bt_rt_may_pair(p, d)) {
                consider(c, x, s, &(struct rt_pair){p, d}, expected);
            }
        }
    }
}

/* When the best node has enough for now, another gets the sequence only if it would run dry first: one
 * with more to do is no better for having fewer prompts, nor is one that failed at once. */
static bool worth_it(const struct bt_rt_core *c, const struct search *x)
{
    const struct rt_node *best = x->best.pair.prefill, *open = x->open.pair.prefill;

    return open == best || (open != NULL && x->open.penalty == x->best.penalty &&
                            bt_rt_work_ns(c, open, bt_rt_work_at(open)) <= x->least_ns);
}

/* Another than the best pair: a decode node alone. */
static bool goes_local(const struct bt_rt_core *c, uint64_t now, const struct rt_seq *s,
                       const struct search *x)
{
    const struct rt_node *d = x->local.pair.decode;

    return d != NULL && x->best.pair.prefill != NULL && !x->best.kept && bt_rt_wants_decode(s) &&
           x->local.penalty <= x->best.penalty &&
           bt_rt_local_better(c, now, s, d, x->best.pair.prefill, x->n_prefill);
}

enum rt_dispatch bt_rt_place(struct bt_rt_core *c, uint64_t now, const struct rt_seq *s,
                             struct rt_pair *out)
{
    struct search x = {.least_ns = UINT64_MAX};

    search(c, now, s, &x);
    if (x.best.pair.prefill == NULL) {
        return x.any ? RT_NO_ROOM : RT_NO_PAIR;
    }
    if (goes_local(c, now, s, &x)) {
        *out = x.local.pair;
    } else if (!worth_it(c, &x)) {
        return s->n_avoid > 0 ? RT_HELD : RT_QUEUED;
    } else {
        *out = x.open.pair;
        c->next_node[BT_ROLE_PREFILL] = (uint32_t)out->prefill->session + 1;
    }
    if (out->decode != NULL) {
        c->next_node[BT_ROLE_DECODE] = (uint32_t)out->decode->session + 1;
    }
    return RT_DISPATCHED;
}
