/* The choice of a pair for a sequence: load counted at dispatch, ties rotated, what failed before avoided. Owns the cost
 * of a node; refuses to know what a request asks for beyond its size. */

#include "router/router_core_int.h"

#define DECODE_AHEAD 2u    /* sequences sent to a decode node, in batches */
#define SEQ_COST     1024u /* a sequence weighs like so many tokens in the load of a decode node */

static uint32_t limit_of(const struct rt_node *n)
{
    uint32_t context = n->hello.context == 0 ? UINT32_MAX : n->hello.context;
    uint32_t room = n->hello.max_tokens == 0 ? UINT32_MAX : n->hello.max_tokens;

    return context < room ? context : room;
}

uint32_t bt_rt_context_of(const struct bt_rt_core *c, uint64_t ident, bool with_decode)
{
    uint32_t best = 0;

    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *p = &c->nodes[i];

        if (!bt_rt_usable(p, BT_ROLE_PREFILL) || p->ident != ident || limit_of(p) <= best) {
            continue;
        }
        if (!with_decode) {
            best = limit_of(p);
        }
        for (uint32_t k = 0; with_decode && k < c->n_slots; k++) {
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

/* A prefill node that still has the prompt is worth less than a decode node that failed before. */
static uint32_t penalty(const struct rt_seq *s, const struct rt_node *n)
{
    uint32_t other =
        s->prefer != 0 && n->hello.role == BT_ROLE_PREFILL && n->hello.instance != s->prefer;

    for (uint32_t i = 0; i < s->n_avoid; i++) {
        if (s->avoid[i].instance == n->hello.instance) {
            return 2 * s->avoid[i].weight + other;
        }
    }
    return other;
}

static uint64_t prefill_cost(const struct rt_node *n)
{
    return n->own_tokens + n->other_tokens;
}

static uint64_t decode_cost(const struct rt_node *n)
{
    return (uint64_t)(n->own_seqs + n->other_seqs) * SEQ_COST + n->own_tokens;
}

/* Sequences beyond what fits would only be refused there: they wait here, where any node can take
 * them. */
static bool has_room(const struct rt_node *d, const struct rt_seq *s)
{
    uint64_t pool = (uint64_t)d->hello.n_pages * d->hello.page_tokens;
    uint64_t padding = (uint64_t)d->hello.page_tokens * (d->own_seqs + 1);

    if (d->own_seqs == 0) {
        return true;
    }
    return (d->hello.max_batch == 0 || d->own_seqs < DECODE_AHEAD * d->hello.max_batch) &&
           (pool == 0 || d->own_tokens + s->n_tokens + padding <= pool);
}

struct choice {
    struct rt_pair pair;
    uint32_t penalty;
    uint64_t cost;
};

/* Keeps the better one; of equals the first, so that the rotated search decides. */
static void consider(struct choice *best, const struct choice *x)
{
    if (best->pair.prefill == NULL || x->penalty < best->penalty ||
        (x->penalty == best->penalty && x->cost < best->cost)) {
        *best = *x;
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

enum rt_dispatch bt_rt_place(struct bt_rt_core *c, const struct rt_seq *s, struct rt_pair *out)
{
    struct choice best = {0};
    uint64_t ident = s->ident != 0 ? s->ident : c->served;
    uint64_t tokens = (uint64_t)s->n_prompt + s->sampling.max_tokens;
    bool with_decode = bt_rt_wants_decode(s), any = false;

    for (uint32_t i = 0; i < c->n_slots; i++) {
        struct rt_node *p = at_rotated(c, BT_ROLE_PREFILL, i);

        if (!fits(p, BT_ROLE_PREFILL, ident, tokens)) {
            continue;
        }
        if (!with_decode) {
            any = true;
            consider(&best, &(struct choice){{p, NULL}, penalty(s, p), prefill_cost(p)});
            continue;
        }
        for (uint32_t k = 0; k < c->n_slots; k++) {
            struct rt_node *d = at_rotated(c, BT_ROLE_DECODE, k);

            if (fits(d, BT_ROLE_DECODE, ident, tokens) && bt_rt_may_pair(p, d)) {
                any = true;
                if (has_room(d, s)) {
                    consider(&best, &(struct choice){{p, d},
                                                     penalty(s, p) + penalty(s, d),
                                                     prefill_cost(p) + decode_cost(d)});
                }
            }
        }
    }
    if (best.pair.prefill == NULL) {
        return any ? RT_NO_ROOM : RT_NO_PAIR;
    }
    *out = best.pair;
    c->next_node[BT_ROLE_PREFILL] = (uint32_t)out->prefill->session + 1;
    if (out->decode != NULL) {
        c->next_node[BT_ROLE_DECODE] = (uint32_t)out->decode->session + 1;
    }
    return RT_DISPATCHED;
}
