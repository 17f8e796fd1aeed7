/* Nodes: what their sessions tell, who may be paired with whom, and the choice of a pair. Owns the
 * node table; refuses to know what a request asks for beyond its size. */

#include <stdio.h>
#include "base/assert.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/mem.h"
#include "router/router_core_int.h"

#define NODE_TEXT_MAX 1024u /* bytes of one string of a hello that are kept */
#define DECODE_AHEAD  2u    /* sequences sent to a decode node, in batches */
#define SEQ_COST      1024u /* a sequence weighs like so many tokens in the load of a decode node */
#define CUT_MAX       4096u

/* ---- the table ---- */

struct rt_node *bt_rt_node(const struct bt_rt_core *c, uint64_t session)
{
    uint32_t slot = (uint32_t)session;

    return session != 0 && slot < c->opts.nodes_max && c->nodes[slot].session == session
               ? &c->nodes[slot]
               : NULL;
}

static bool usable(const struct rt_node *n, enum bt_role role)
{
    return n->session != 0 && n->hello_seen && !n->draining && n->hello.role == role;
}

static bool may_pair(const struct rt_node *p, const struct rt_node *d)
{
    if (p->ident != d->ident || p->hello.version_min > d->hello.version_max ||
        d->hello.version_min > p->hello.version_max) {
        return false;
    }
    for (uint32_t i = 0; i < p->n_cut; i++) {
        if (p->cut[i] == d->hello.instance) {
            return false;
        }
    }
    return true;
}

static void node_clear(struct bt_rt_core *c, struct rt_node *n)
{
    bt_rt_trash(c, n->strings);
    bt_rt_trash(c, n->transports);
    bt_free(n->cut);
    *n = (struct rt_node){0};
}

void bt_rt_nodes_fini(struct bt_rt_core *c)
{
    for (uint32_t i = 0; i < c->n_slots; i++) {
        bt_free(c->nodes[i].strings);
        bt_free(c->nodes[i].transports);
        bt_free(c->nodes[i].cut);
    }
}

uint64_t bt_rt_on_session(struct bt_rt_core *c, uint64_t now)
{
    uint32_t slot = 0;

    while (slot < c->n_slots && c->nodes[slot].session != 0) {
        slot++;
    }
    if (slot == c->opts.nodes_max) {
        return 0;
    }
    c->n_slots = slot == c->n_slots ? slot + 1 : c->n_slots;
    if (++c->node_generation[slot] == 0) {
        c->node_generation[slot] = 1;
    }
    c->nodes[slot] = (struct rt_node){.session = (uint64_t)c->node_generation[slot] << 32 | slot,
                                      .last_heard = now};
    return c->nodes[slot].session;
}

/* ---- pairing ---- */

static const struct rt_node *any_counterpart(const struct bt_rt_core *c, const struct rt_node *n,
                                             bool matching)
{
    enum bt_role other = n->hello.role == BT_ROLE_PREFILL ? BT_ROLE_DECODE : BT_ROLE_PREFILL;

    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *m = &c->nodes[i];

        if (usable(m, other) &&
            (!matching || (other == BT_ROLE_DECODE ? may_pair(n, m) : may_pair(m, n)))) {
            return m;
        }
    }
    return NULL;
}

static const struct rt_node *any_of_ident(const struct bt_rt_core *c, uint64_t ident)
{
    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *m = &c->nodes[i];

        if (m->session != 0 && m->hello_seen && m->ident == ident) {
            return m;
        }
    }
    return NULL;
}

/* What keeps n and m apart, both values named. */
static void mismatch_text(const struct rt_node *n, const struct rt_node *m, char *out, size_t cap)
{
    const struct bt_msg_hello *a = &n->hello, *b = &m->hello;

    if (a->fingerprint != b->fingerprint) {
        snprintf(out, cap, "mismatch: model fingerprint %016llx here (%s), %016llx at %s (%s)",
                 (unsigned long long)a->fingerprint, a->model_name,
                 (unsigned long long)b->fingerprint, b->name, b->model_name);
    } else if (strcmp(a->numerics, b->numerics) != 0) {
        snprintf(out, cap, "mismatch: numerics class %s here, %s at %s", a->numerics, b->numerics,
                 b->name);
    } else if (strcmp(a->kv_layout, b->kv_layout) != 0) {
        snprintf(out, cap, "mismatch: KV layout \"%s\" here, \"%s\" at %s", a->kv_layout,
                 b->kv_layout, b->name);
    } else if (a->version_min > b->version_max || b->version_min > a->version_max) {
        snprintf(out, cap, "mismatch: protocol versions %u to %u here, %u to %u at %s",
                 a->version_min, a->version_max, b->version_min, b->version_max, b->name);
    } else {
        snprintf(out, cap, "unreachable: %s", b->name);
    }
}

/* Whom this node disagrees with: a counterpart if it has no fitting one, or the nodes in use. NULL:
 * no one. */
static const struct rt_node *opponent(const struct bt_rt_core *c, const struct rt_node *n)
{
    if (any_counterpart(c, n, true) == NULL) {
        const struct rt_node *m = any_counterpart(c, n, false);

        if (m != NULL) {
            return m;
        }
    }
    return n->ident != c->served ? any_of_ident(c, c->served) : NULL;
}

static bool has_pair(const struct bt_rt_core *c, uint64_t ident)
{
    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *p = &c->nodes[i];

        if (usable(p, BT_ROLE_PREFILL) && p->ident == ident &&
            any_counterpart(c, p, true) != NULL) {
            return true;
        }
    }
    return false;
}

/* The kind of nodes that new requests go to: stays as it is while it has a pair. */
static void choose_served(struct bt_rt_core *c)
{
    const struct rt_node *first = NULL;

    if (c->served != 0 && has_pair(c, c->served)) {
        return;
    }
    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *n = &c->nodes[i];

        if (n->session == 0 || !n->hello_seen) {
            continue;
        }
        if (n->hello.role == BT_ROLE_PREFILL && has_pair(c, n->ident)) {
            c->served = n->ident;
            return;
        }
        if (first == NULL ||
            (first->hello.role != BT_ROLE_PREFILL && n->hello.role == BT_ROLE_PREFILL)) {
            first = n;
        }
    }
    if (first != NULL && any_of_ident(c, c->served) == NULL) {
        c->served = first->ident;
    }
}

static void log_mismatch(struct bt_rt_core *c, struct rt_node *n)
{
    char text[sizeof((struct bt_rt_node_info *)0)->state];
    const struct rt_node *m = opponent(c, n);

    if (m == NULL) {
        n->complained = false;
        return;
    }
    if (!n->complained) {
        n->complained = true;
        mismatch_text(n, m, text, sizeof text);
        bt_rt_log(c, BT_LOG_WARN,
                  bt_rt_say(c, "%s node %s is not used: %s", bt_role_name(n->hello.role),
                            n->hello.name, text));
    }
}

/* Tells a prefill node the decode nodes that it may use, if the list has changed. */
static void send_peers(struct bt_rt_core *c, struct rt_node *p)
{
    struct bt_msg_peer *list = bt_arena_alloc(&c->scratch, c->n_slots * sizeof *list);
    uint64_t hash = 1;
    size_t n = 0;

    for (uint32_t i = 0; list != NULL && i < c->n_slots; i++) {
        const struct rt_node *d = &c->nodes[i];

        /* Also what it cannot reach now: it is the one who tries. */
        if (usable(d, BT_ROLE_DECODE) && d->ident == p->ident) {
            list[n++] = (struct bt_msg_peer){d->hello.instance,
                                             bt_rt_say(c, "%s", d->hello.transfer_address),
                                             bt_rt_say(c, "%s", d->hello.name)};
            hash = bt_hash64(&d->hello.instance, sizeof d->hello.instance, hash);
        }
    }
    if (list == NULL || hash == p->peers_hash) {
        return;
    }
    p->peers_hash = hash;
    struct bt_rt_action *a = bt_rt_act(c, BT_RT_SEND);

    a->session = p->session;
    a->send.kind = BT_FROM_ROUTER_PEERS;
    a->send.peers.n = n;
    a->send.peers.peers = list;
}

/* After any change of the nodes. */
static void nodes_changed(struct bt_rt_core *c, uint64_t now)
{
    choose_served(c);
    bool ready = has_pair(c, c->served);

    for (uint32_t i = 0; i < c->n_slots; i++) {
        struct rt_node *n = &c->nodes[i];

        if (n->session == 0 || !n->hello_seen) {
            continue;
        }
        log_mismatch(c, n);
        if (n->hello.role == BT_ROLE_PREFILL) {
            send_peers(c, n);
        }
    }
    if (ready != c->ready) {
        c->ready = ready;
        c->t_unready = ready ? c->t_unready : now;
        bt_rt_act(c, BT_RT_READY)->ready = ready;
    }
}

bool bt_rt_core_ready(const struct bt_rt_core *c)
{
    return c->ready;
}

/* ---- placement ---- */

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

        if (!usable(p, BT_ROLE_PREFILL) || p->ident != ident || limit_of(p) <= best) {
            continue;
        }
        if (!with_decode) {
            best = limit_of(p);
        }
        for (uint32_t k = 0; with_decode && k < c->n_slots; k++) {
            const struct rt_node *d = &c->nodes[k];

            if (usable(d, BT_ROLE_DECODE) && may_pair(p, d)) {
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
    return usable(n, role) && n->ident == ident && limit_of(n) >= tokens;
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

            if (fits(d, BT_ROLE_DECODE, ident, tokens) && may_pair(p, d)) {
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

const char *bt_rt_no_pair_text(struct bt_rt_core *c, bool with_decode)
{
    char text[sizeof((struct bt_rt_node_info *)0)->state];
    bool role[2] = {false, false};

    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *n = &c->nodes[i];

        if (n->session != 0 && n->hello_seen) {
            role[n->hello.role] = role[n->hello.role] || !n->draining;
        }
    }
    if (!role[BT_ROLE_PREFILL] || (with_decode && !role[BT_ROLE_DECODE])) {
        return bt_rt_say(c, "no %s node is connected",
                         role[BT_ROLE_PREFILL]                    ? "decode"
                         : (role[BT_ROLE_DECODE] || !with_decode) ? "prefill"
                                                                  : "prefill or decode");
    }
    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *n = &c->nodes[i];
        const struct rt_node *m = n->session != 0 && n->hello_seen ? opponent(c, n) : NULL;

        if (m != NULL) {
            mismatch_text(n, m, text, sizeof text);
            return bt_rt_say(c, "no pair of nodes fits: node %s: %s", n->hello.name, text);
        }
    }
    return "no pair of nodes fits the request";
}

/* ---- messages ---- */

static void session_close(struct bt_rt_core *c, uint64_t session, const char *text)
{
    struct bt_rt_action *a = bt_rt_act(c, BT_RT_CLOSE);

    a->session = session;
    a->text = text;
}

static void remember_gone(struct bt_rt_core *c, const struct rt_node *n, uint64_t now)
{
    struct rt_gone *oldest = &c->gone[0];

    for (uint32_t i = 0; i < RT_GONE_MAX; i++) {
        struct rt_gone *g = &c->gone[i];

        if (g->since != 0 && g->role == n->hello.role && strcmp(g->name, n->hello.name) == 0) {
            oldest = g;
            break;
        }
        oldest = g->since < oldest->since ? g : oldest;
    }
    snprintf(oldest->name, sizeof oldest->name, "%s", n->hello.name);
    oldest->role = n->hello.role;
    oldest->since = now != 0 ? now : 1;
}

static void forget_gone(struct bt_rt_core *c, const struct rt_node *n)
{
    for (uint32_t i = 0; i < RT_GONE_MAX; i++) {
        if (c->gone[i].role == n->hello.role && strcmp(c->gone[i].name, n->hello.name) == 0) {
            c->gone[i].since = 0;
        }
    }
}

/* Its attempts begin again elsewhere, with the tokens so far. */
static void node_lost(struct bt_rt_core *c, uint64_t now, struct rt_node *n, const char *why)
{
    uint64_t session = n->session;
    enum bt_role role = n->hello.role;
    bool known = n->hello_seen;
    struct rt_seq *next;

    if (known) {
        const char *text =
            bt_rt_say(c, "%s node %s was lost: %s", bt_role_name(role), n->hello.name, why);
        uint64_t instance = n->hello.instance;

        bt_rt_log(c, BT_LOG_WARN, text);
        remember_gone(c, n, now);
        node_clear(c, n);
        for (uint32_t i = 0; i < c->n_slots; i++) {
            struct rt_node *p = &c->nodes[i];

            for (uint32_t k = 0; k < p->n_cut; k++) {
                if (p->cut[k] == instance) {
                    p->cut[k] = p->cut[--p->n_cut];
                }
            }
        }
        for (struct rt_seq *s = c->running.first; s != NULL; s = next) {
            next = s->next;
            if (s->leg[role].session != session || !s->leg[role].live) {
                continue;
            }
            if (s->finish != 0) {
                bt_rt_leg_end(c, s, role, false);
                bt_rt_attempt_finish(c, s);
            } else if (role == BT_ROLE_PREFILL && s->decode_began) {
                bt_rt_leg_end(c, s, role, false);
            } else {
                bt_rt_attempt_failed(c, now, s, role, BT_ATTEMPT_RETRY, text);
            }
        }
        nodes_changed(c, now);
        bt_rt_pump(c, now);
    } else {
        node_clear(c, n);
    }
}

void bt_rt_on_session_lost(struct bt_rt_core *c, uint64_t now, uint64_t session, const char *why)
{
    struct rt_node *n = bt_rt_node(c, session);

    if (n != NULL) {
        node_lost(c, now, n, why);
    }
}

static void node_drop(struct bt_rt_core *c, uint64_t now, struct rt_node *n, const char *why)
{
    session_close(c, n->session, why);
    node_lost(c, now, n, why);
}

/* One block with copies of a hello's strings. Names label metrics: a missing or taken one gets the instance. */
static bool copy_hello(struct rt_node *n, const struct bt_msg_hello *h, bool name_taken)
{
    const char *from[] = {h->name,       h->numerics,         h->kv_layout,
                          h->model_name, h->transfer_address, h->backend};
    const char **to[] = {&n->hello.name,       &n->hello.numerics,         &n->hello.kv_layout,
                         &n->hello.model_name, &n->hello.transfer_address, &n->hello.backend};
    size_t at = 0, len[6], total = 0;

    for (unsigned i = 0; i < 6; i++) {
        size_t max = i == 0 ? RT_NAME_MAX - 1 : NODE_TEXT_MAX;

        len[i] = strnlen(from[i], max);
        total += len[i] + 1;
    }
    n->strings = bt_calloc(1, total + RT_NAME_MAX + 16);
    if (n->strings == NULL) {
        return false;
    }
    n->hello = *h;
    for (unsigned i = 0; i < 6; i++) {
        memcpy(n->strings + at, from[i], len[i]);
        *to[i] = n->strings + at;
        at += len[i] + 1;
    }
    if (n->hello.name[0] == '\0' || name_taken) {
        snprintf(n->strings + total, RT_NAME_MAX + 16, "%s-%08x",
                 n->hello.name[0] != '\0' ? n->hello.name : bt_role_name(h->role),
                 (unsigned)h->instance);
        n->hello.name = n->strings + total;
    }
    return true;
}

static uint64_t ident_of(const struct bt_msg_hello *h)
{
    uint64_t x = bt_hash64(&h->fingerprint, sizeof h->fingerprint, 1);

    x = bt_hash64(h->numerics, strlen(h->numerics), x);
    x = bt_hash64(h->kv_layout, strlen(h->kv_layout), x);
    return x != 0 ? x : 1;
}

static void send_welcome(struct bt_rt_core *c, const struct rt_node *n, uint32_t version,
                         const char *reason)
{
    struct bt_rt_action *a = bt_rt_act(c, BT_RT_SEND);

    a->session = n->session;
    a->send.kind = BT_FROM_ROUTER_WELCOME;
    a->send.welcome = (struct bt_msg_welcome){version, reason, c->opts.instance, c->opts.name};
}

static void on_hello(struct bt_rt_core *c, uint64_t now, struct rt_node *n,
                     const struct bt_msg_hello *h)
{
    uint32_t version =
        h->version_max < BT_SESSION_VERSION_MAX ? h->version_max : BT_SESSION_VERSION_MAX;

    if (version < h->version_min || version < BT_SESSION_VERSION_MIN) {
        const char *why = bt_rt_say(
            c, "session protocol versions %u to %u there, %u to %u at the router", h->version_min,
            h->version_max, BT_SESSION_VERSION_MIN, BT_SESSION_VERSION_MAX);

        bt_rt_log(c, BT_LOG_WARN,
                  bt_rt_say(c, "%s node %s is refused: %s", bt_role_name(h->role), h->name, why));
        send_welcome(c, n, 0, why);
        node_drop(c, now, n, why);
        return;
    }
    for (uint32_t i = 0; i < c->n_slots; i++) {
        struct rt_node *m = &c->nodes[i];

        if (m != n && m->session != 0 && m->hello_seen && m->hello.instance == h->instance) {
            node_drop(c, now, m, "the same instance opened a new session");
        }
    }
    bool taken = false;

    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *m = &c->nodes[i];

        taken = taken || (m->session != 0 && m->hello_seen && m->hello.role == h->role &&
                          strcmp(m->hello.name, h->name) == 0);
    }
    if (!copy_hello(n, h, taken)) {
        node_drop(c, now, n, "out of memory");
        return;
    }
    n->hello_seen = true;
    n->version = version;
    n->ident = ident_of(&n->hello);
    forget_gone(c, n);
    send_welcome(c, n, version, "");
    bt_rt_log(
        c, BT_LOG_INFO,
        bt_rt_say(
            c,
            "%s node %s joins: instance %016llx, model %s %016llx, %s, %s, %u pages of %u tokens",
            bt_role_name(h->role), n->hello.name, (unsigned long long)h->instance,
            n->hello.model_name, (unsigned long long)h->fingerprint, n->hello.numerics,
            n->hello.kv_layout, h->n_pages, h->page_tokens));
    nodes_changed(c, now);
}

static void on_load(struct bt_rt_core *c, struct rt_node *n, const struct bt_msg_load *l)
{
    size_t bytes = l->n_transports * sizeof *l->transports;
    uint64_t seqs = (uint64_t)l->running + l->landing + l->waiting;

    for (size_t i = 0; i < l->n_transports; i++) {
        bytes += strnlen(l->transports[i].description, NODE_TEXT_MAX) + 1;
    }
    struct bt_msg_transport *list = bt_calloc(1, bytes);

    if (list == NULL) {
        return; /* the last report stays */
    }
    char *text = (char *)(list + l->n_transports);

    for (size_t i = 0; i < l->n_transports; i++) {
        size_t len = strnlen(l->transports[i].description, NODE_TEXT_MAX);

        memcpy(text, l->transports[i].description, len);
        list[i] = (struct bt_msg_transport){l->transports[i].peer, text};
        text += len + 1;
    }
    bt_rt_trash(c, n->transports);
    n->transports = list;
    n->load = *l;
    n->load.transports = list;
    n->other_seqs = seqs > n->own_seqs ? (uint32_t)(seqs - n->own_seqs) : 0;
    n->other_tokens = l->waiting_tokens > n->own_tokens ? l->waiting_tokens - n->own_tokens : 0;
}

static void on_peer_state(struct bt_rt_core *c, uint64_t now, struct rt_node *n,
                          const struct bt_msg_peer_state *p)
{
    uint32_t at = 0;

    while (at < n->n_cut && n->cut[at] != p->instance) {
        at++;
    }
    if (p->reachable && at < n->n_cut) {
        n->cut[at] = n->cut[--n->n_cut];
    } else if (!p->reachable && at == n->n_cut && n->n_cut < CUT_MAX) {
        if (n->n_cut == n->cap_cut) {
            uint32_t cap = n->cap_cut == 0 ? 8 : n->cap_cut * 2;
            uint64_t *grown = bt_realloc(n->cut, cap * sizeof *grown);

            if (grown == NULL) {
                return;
            }
            n->cut = grown;
            n->cap_cut = cap;
        }
        n->cut[n->n_cut++] = p->instance;
    } else {
        return;
    }
    const char *peer = bt_rt_core_instance_name(c, p->instance);

    if (peer != NULL) { /* one that is gone was logged as lost */
        bt_rt_log(c, p->reachable ? BT_LOG_INFO : BT_LOG_WARN,
                  bt_rt_say(c, "prefill node %s %s decode node %s%s%s", n->hello.name,
                            p->reachable ? "reaches" : "cannot reach", peer,
                            p->text[0] != '\0' ? ": " : "", p->text));
    }
    nodes_changed(c, now);
}

void bt_rt_on_message(struct bt_rt_core *c, uint64_t now, uint64_t session,
                      const struct bt_from_daemon *m)
{
    struct rt_node *n = bt_rt_node(c, session);

    if (n == NULL) {
        return;
    }
    n->last_heard = now;
    if (n->hello_seen == (m->kind == BT_FROM_DAEMON_HELLO)) {
        node_drop(c, now, n, "hello must be the first message, once");
        return;
    }
    switch (m->kind) {
    case BT_FROM_DAEMON_HELLO:
        on_hello(c, now, n, &m->hello);
        break;
    case BT_FROM_DAEMON_LOAD:
        on_load(c, n, &m->load);
        break;
    case BT_FROM_DAEMON_OUTPUTS:
        for (size_t i = 0; i < m->outputs.n; i++) {
            bt_rt_on_output(c, now, n, &m->outputs.outputs[i]);
        }
        break;
    case BT_FROM_DAEMON_ATTEMPT_END:
        bt_rt_on_attempt_end(c, now, n, &m->attempt_end);
        break;
    case BT_FROM_DAEMON_PEER_STATE:
        on_peer_state(c, now, n, &m->peer_state);
        break;
    case BT_FROM_DAEMON_DRAINING:
        if (!n->draining) {
            n->draining = true;
            bt_rt_log(
                c, BT_LOG_INFO,
                bt_rt_say(c, "%s node %s drains", bt_role_name(n->hello.role), n->hello.name));
            nodes_changed(c, now);
        }
        break;
    }
    bt_rt_pump(c, now);
}

/* ---- time ---- */

void bt_rt_nodes_tick(struct bt_rt_core *c, uint64_t now)
{
    bool beat = now >= c->next_beat;

    for (uint32_t i = 0; i < c->n_slots; i++) {
        struct rt_node *n = &c->nodes[i];

        if (n->session == 0) {
            continue;
        }
        if (now - n->last_heard > c->opts.lease_ns) {
            node_drop(c, now, n, "silent for longer than the lease");
        } else if (beat && n->hello_seen) {
            struct bt_rt_action *a = bt_rt_act(c, BT_RT_SEND);

            a->session = n->session;
            a->send.kind = BT_FROM_ROUTER_HEARTBEAT;
        }
    }
    if (beat) {
        c->next_beat = now + c->opts.heartbeat_ns;
    }
    for (uint32_t i = 0; i < RT_GONE_MAX; i++) {
        if (c->gone[i].since != 0 && now - c->gone[i].since > RT_GONE_NS) {
            c->gone[i].since = 0;
        }
    }
}

/* ---- status ---- */

bool bt_rt_core_node(const struct bt_rt_core *c, uint32_t *pos, struct bt_rt_node_info *out)
{
    while (*pos < c->n_slots) {
        const struct rt_node *n = &c->nodes[(*pos)++];

        if (n->session == 0 || !n->hello_seen) {
            continue;
        }
        const struct rt_node *m = opponent(c, n);

        *out = (struct bt_rt_node_info){.name = n->hello.name,
                                        .instance = n->hello.instance,
                                        .role = n->hello.role,
                                        .hello = &n->hello,
                                        .load = &n->load};
        if (m != NULL) {
            mismatch_text(n, m, out->state, sizeof out->state);
        } else {
            snprintf(out->state, sizeof out->state, "%s", n->draining ? "draining" : "ready");
        }
        return true;
    }
    return false;
}

const char *bt_rt_core_instance_name(const struct bt_rt_core *c, uint64_t instance)
{
    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *n = &c->nodes[i];

        if (n->session != 0 && n->hello_seen && n->hello.instance == instance) {
            return n->hello.name;
        }
    }
    return NULL;
}

bool bt_rt_core_gone(const struct bt_rt_core *c, uint32_t *pos, struct bt_rt_gone_info *out)
{
    while (*pos < RT_GONE_MAX) {
        const struct rt_gone *g = &c->gone[(*pos)++];

        if (g->since != 0) {
            *out = (struct bt_rt_gone_info){g->name, g->role};
            return true;
        }
    }
    return false;
}
