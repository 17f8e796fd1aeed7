/* Who may be paired with whom, which kind of nodes is in use, and what is said about those that are not. Reads the node
 * table; refuses to know what a request is. */

#include <stdarg.h>
#include <stdio.h>
#include "base/hash.h"
#include "base/log.h"
#include "router/router_core_int.h"

bool bt_rt_usable(const struct rt_node *n, enum bt_role role)
{
    return n->session != 0 && n->hello_seen && !n->draining && bt_role_has(n->hello.role, role) &&
           (n->losing & 1U << role) == 0;
}

/* What stands before a node's transfer port, and so what its own prefill leg says at others'. */
enum gate { GATE_NONE, GATE_INSTANCE, GATE_TOKEN };

static enum gate gate_of(const struct rt_node *n)
{
    return bt_gate_token_is_set(&n->hello.gate_token) ? GATE_TOKEN
           : n->version >= BT_SESSION_VERSION_GATE    ? GATE_INSTANCE
                                                      : GATE_NONE;
}

bool bt_rt_may_pair(const struct rt_node *p, const struct rt_node *d)
{
    if (p == d) {
        return bt_rt_local_able(d); /* alone */
    }
    if (p->ident != d->ident || p->hello.version_min > d->hello.version_max ||
        d->hello.version_min > p->hello.version_max || gate_of(p) != gate_of(d)) {
        return false;
    }
    for (uint32_t i = 0; i < p->n_cut; i++) {
        if (p->cut[i] == d->hello.instance) {
            return false;
        }
    }
    return true;
}

/* ---- pairing ---- */

/* Whether n and m could be a pair, in one order or the other; matching: and do fit. */
static bool are_counterparts(const struct rt_node *n, const struct rt_node *m, bool matching)
{
    return (bt_role_has(n->hello.role, BT_ROLE_PREFILL) && bt_rt_usable(m, BT_ROLE_DECODE) &&
            (!matching || bt_rt_may_pair(n, m))) ||
           (bt_role_has(n->hello.role, BT_ROLE_DECODE) && bt_rt_usable(m, BT_ROLE_PREFILL) &&
            (!matching || bt_rt_may_pair(m, n)));
}

static const struct rt_node *any_counterpart(const struct bt_rt_core *c, const struct rt_node *n,
                                             bool matching)
{
    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *m = &c->nodes[i];

        if (are_counterparts(n, m, matching)) {
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

static BT_PRINTF(4, 5) void add_text(char *out, size_t cap, size_t *len, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    int n = vsnprintf(out + *len, cap - *len, fmt, ap);

    va_end(ap);
    *len = n < 0 ? *len : *len + (size_t)n < cap ? *len + (size_t)n : cap - 1;
}

/* All that keeps n and m apart, both values named. */
static void mismatch_text(const struct rt_node *n, const struct rt_node *m, char *out, size_t cap)
{
    static const char *const asks[] = {"none", "its instance", "a token"};
    const struct bt_msg_hello *a = &n->hello, *b = &m->hello;
    size_t len = 0;

    add_text(out, cap, &len, "mismatch:");
    size_t start = len;

    if (a->fingerprint != b->fingerprint) {
        add_text(out, cap, &len, " model fingerprint %016llx here (%s), %016llx at %s (%s);",
                 (unsigned long long)a->fingerprint, a->model_name,
                 (unsigned long long)b->fingerprint, b->name, b->model_name);
    }
    if (strcmp(a->numerics, b->numerics) != 0) {
        add_text(out, cap, &len, " numerics class %s here, %s at %s;", a->numerics, b->numerics,
                 b->name);
    }
    if (strcmp(a->kv_layout, b->kv_layout) != 0) {
        add_text(out, cap, &len, " KV layout \"%s\" here, \"%s\" at %s;", a->kv_layout,
                 b->kv_layout, b->name);
    }
    if (a->version_min > b->version_max || b->version_min > a->version_max) {
        add_text(out, cap, &len, " protocol versions %u to %u here, %u to %u at %s;",
                 a->version_min, a->version_max, b->version_min, b->version_max, b->name);
    }
    if (gate_of(n) != gate_of(m)) {
        add_text(out, cap, &len,
                 " the gate at the transfer port asks for %s here, for %s at %s: the two are of "
                 "different releases;",
                 asks[gate_of(n)], asks[gate_of(m)], b->name);
    }
    if (len == start) {
        snprintf(out, cap, "unreachable: %s", b->name);
    } else if (out[len - 1] == ';') {
        out[len - 1] = '\0';
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

        if (!bt_rt_computes(c, p) || p->ident != ident) {
            continue;
        }
        if (bt_rt_local_only(c)) {
            return true;
        }
        for (uint32_t k = 0; k < c->n_slots; k++) {
            if (bt_rt_usable(&c->nodes[k], BT_ROLE_DECODE) && bt_rt_may_pair(p, &c->nodes[k])) {
                return true;
            }
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
        if (bt_rt_computes(c, n) && has_pair(c, n->ident)) {
            c->served = n->ident;
            return;
        }
        if (first == NULL ||
            (first->hello.role == BT_ROLE_DECODE && n->hello.role != BT_ROLE_DECODE)) {
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

/* Tells a prefill node the decode nodes that it may use, if the list has changed; one that was a prefill node, that
 * there are none. */
static void send_peers(struct bt_rt_core *c, struct rt_node *p)
{
    struct bt_msg_peer *list = bt_arena_alloc(&c->scratch, c->n_slots * sizeof *list);
    bool prefill = bt_role_has(p->hello.role, BT_ROLE_PREFILL);
    uint64_t hash = prefill;
    size_t n = 0;

    for (uint32_t i = 0; prefill && list != NULL && i < c->n_slots; i++) {
        const struct rt_node *d = &c->nodes[i];

        /* Also what it cannot reach now: it is the one who tries. */
        if (d != p && bt_rt_usable(d, BT_ROLE_DECODE) && d->ident == p->ident &&
            gate_of(d) == gate_of(p)) {
            list[n++] =
                (struct bt_msg_peer){.instance = d->hello.instance,
                                     .address = bt_rt_say(c, "%s", d->hello.transfer_address),
                                     .name = bt_rt_say(c, "%s", d->hello.name),
                                     .gate_token = d->hello.gate_token};
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
void bt_rt_nodes_changed(struct bt_rt_core *c, uint64_t now)
{
    choose_served(c);
    bool ready = has_pair(c, c->served);

    for (uint32_t i = 0; i < c->n_slots; i++) {
        struct rt_node *n = &c->nodes[i];

        if (n->session == 0 || !n->hello_seen) {
            continue;
        }
        log_mismatch(c, n);
        send_peers(c, n);
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

const char *bt_rt_no_pair_text(struct bt_rt_core *c, bool with_decode)
{
    char text[sizeof((struct bt_rt_node_info *)0)->state];
    bool role[2] = {false, false};

    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *n = &c->nodes[i];

        for (enum bt_role leg = BT_ROLE_PREFILL; leg < BT_LEGS; leg++) {
            role[leg] = role[leg] || bt_rt_usable(n, leg);
        }
    }
    if (bt_rt_local_only(c)) {
        return role[BT_ROLE_DECODE] ? "no decode node that can compute prompts fits the request"
                                    : "no decode node is connected, and prompts are theirs alone";
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

static void node_state_text(const struct rt_node *n, char *out, size_t cap)
{
    if (n->draining) {
        snprintf(out, cap, "draining");
    } else if (n->leaving != BT_ROLE_BOTH) {
        snprintf(out, cap, "changing: what it has as %s node ends or moves",
                 bt_role_name(n->leaving));
    } else {
        snprintf(out, cap, "%s", n->losing != 0 ? "changing: it was told to" : "ready");
    }
}

void bt_rt_node_state(const struct bt_rt_core *c, const struct rt_node *n, char *out, size_t cap)
{
    const struct rt_node *m = opponent(c, n);

    if (m != NULL) {
        mismatch_text(n, m, out, cap);
    } else {
        node_state_text(n, out, cap);
    }
}
