/* Nodes: what their sessions tell, and what becomes of the attempts on one that is lost. Owns the node table; refuses to
 * know who is paired with whom. */

#include <stdio.h>
#include "base/assert.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "router/router_core_int.h"

#define NODE_TEXT_MAX 1024u /* bytes of one string of a hello that are kept */
#define CUT_MAX       4096u

/* ---- the table ---- */

struct rt_node *bt_rt_node(const struct bt_rt_core *c, uint64_t session)
{
    uint32_t slot = (uint32_t)session;

    return session != 0 && slot < c->opts.nodes_max && c->nodes[slot].session == session
               ? &c->nodes[slot]
               : NULL;
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

/* ---- messages ---- */

static void session_close(struct bt_rt_core *c, uint64_t session, const char *text)
{
    struct bt_rt_action *a = bt_rt_act(c, BT_RT_CLOSE);

    a->session = session;
    a->text = text;
}

/* A node that comes back has another instance, and perhaps another role than it had last: it is known by its name, which
 * no other connected node has. */
static void remember_gone(struct bt_rt_core *c, const struct rt_node *n, uint64_t now)
{
    struct rt_gone *oldest = &c->gone[0];

    for (uint32_t i = 0; i < RT_GONE_MAX; i++) {
        struct rt_gone *g = &c->gone[i];

        if (g->since != 0 && strcmp(g->name, n->hello.name) == 0) {
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
        if (strcmp(c->gone[i].name, n->hello.name) == 0) {
            c->gone[i].since = 0;
        }
    }
}

/* Who could not reach that instance has nothing to do with it any more. */
static void cuts_forget(struct bt_rt_core *c, uint64_t instance)
{
    for (uint32_t i = 0; i < c->n_slots; i++) {
        struct rt_node *p = &c->nodes[i];

        for (uint32_t k = 0; k < p->n_cut; k++) {
            if (p->cut[k] == instance) {
                p->cut[k] = p->cut[--p->n_cut];
            }
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
        bt_rt_speeds_changed(c);
        cuts_forget(c, instance);
        for (struct rt_seq *s = c->running.first; s != NULL; s = next) {
            next = s->next;
            enum bt_role leg =
                s->leg[BT_ROLE_PREFILL].session == session ? BT_ROLE_PREFILL : BT_ROLE_DECODE;

            if (s->leg[leg].session == session && s->leg[leg].live) {
                bt_rt_leg_lost(c, now, s, leg, BT_ATTEMPT_RETRY, text);
            }
        }
        bt_rt_nodes_changed(c, now);
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

/* At most max bytes of s, whole characters. */
static size_t text_len(const char *s, size_t max)
{
    size_t n = strnlen(s, max);

    return s[n] == '\0' ? n : bt_utf8_complete_len(s, n);
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

        len[i] = text_len(from[i], max);
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

/* By a connected node of whatever role: that may change. */
static bool name_taken(const struct bt_rt_core *c, const char *name)
{
    size_t len = text_len(name, RT_NAME_MAX - 1);
    bool taken = false;

    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *m = &c->nodes[i];

        taken = taken || (m->session != 0 && m->hello_seen &&
                          strncmp(m->hello.name, name, len) == 0 && m->hello.name[len] == '\0');
    }
    return taken;
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
    if (!copy_hello(n, h, name_taken(c, h->name))) {
        node_drop(c, now, n, "out of memory");
        return;
    }
    n->hello_seen = true;
    n->version = version;
    n->leaving = BT_ROLE_BOTH;
    n->ident = ident_of(&n->hello);
    bt_rt_affinity_new_node(c, n);
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
    bt_rt_nodes_changed(c, now);
}

/* What the report has beyond our own is that of others. What it has less of ours was computed, except
 * for what we sent lately: a report that could do without does not know it yet. */
static void take_work(struct rt_node *n, const struct bt_msg_load *l)
{
    uint64_t seen = n->own_tokens > n->fresh_tokens ? n->own_tokens - n->fresh_tokens : 0;
    uint64_t pages = (uint64_t)l->pages_leased + l->pages_quarantined;

    n->other_tokens = l->waiting_tokens > n->own_tokens ? l->waiting_tokens - n->own_tokens : 0;
    uint64_t known = l->waiting_tokens > seen ? n->own_tokens : seen;

    n->done_tokens = known > l->waiting_tokens ? known - l->waiting_tokens : 0;
    n->fresh_tokens = 0;
    n->other_pages = pages > n->own_pages ? pages - n->own_pages : 0;
}

static void on_load(struct bt_rt_core *c, uint64_t now, struct rt_node *n,
                    const struct bt_msg_load *l)
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
        size_t len = text_len(l->transports[i].description, NODE_TEXT_MAX);

        memcpy(text, l->transports[i].description, len);
        list[i] = (struct bt_msg_transport){l->transports[i].peer, text};
        text += len + 1;
    }
    bt_rt_trash(c, n->transports);
    n->transports = list;
    if (l->prefill_tokens_per_s != n->load.prefill_tokens_per_s) {
        n->t_speed = now;
    }
    n->load = *l;
    n->load.transports = list;
    n->load.prefix_blocks = (struct bt_msg_prefix_blocks){0};
    n->caches = n->caches || l->pages_cached > 0;
    bt_rt_affinity_told(c, n, &l->prefix_blocks);
    n->other_seqs = seqs > n->own_seqs ? (uint32_t)(seqs - n->own_seqs) : 0;
    take_work(n, l);
    bt_rt_speeds_changed(c);
}

/* The connected node of that instance, or NULL. */
static const struct rt_node *node_of(const struct bt_rt_core *c, uint64_t instance)
{
    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *n = &c->nodes[i];

        if (n->session != 0 && n->hello_seen && n->hello.instance == instance) {
            return n;
        }
    }
    return NULL;
}

static void on_peer_state(struct bt_rt_core *c, uint64_t now, struct rt_node *n,
                          const struct bt_msg_peer_state *p)
{
    const struct rt_node *d = node_of(c, p->instance);
    uint32_t at = 0;

    /* Gone, or not here yet, or no pair by their roles: then the list that names it makes the node tell again. */
    if (d == NULL || (!p->reachable && !(bt_role_has(n->hello.role, BT_ROLE_PREFILL) &&
                                         bt_role_has(d->hello.role, BT_ROLE_DECODE)))) {
        return;
    }
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
    bt_rt_log(c, p->reachable ? BT_LOG_INFO : BT_LOG_WARN,
              bt_rt_say(c, "prefill node %s %s decode node %s%s%s", n->hello.name,
                        p->reachable ? "reaches" : "cannot reach", d->hello.name,
                        p->text[0] != '\0' ? ": " : "", p->text));
    bt_rt_nodes_changed(c, now);
}

void bt_rt_node_drains(struct bt_rt_core *c, uint64_t now, struct rt_node *n, const char *why)
{
    n->draining = true;
    bt_rt_log(
        c, BT_LOG_INFO,
        bt_rt_say(c, "%s node %s drains, %s", bt_role_name(n->hello.role), n->hello.name, why));
    bt_rt_nodes_changed(c, now);
}

static void on_role_state(struct bt_rt_core *c, uint64_t now, struct rt_node *n,
                          const struct bt_msg_role_state *m)
{
    if (m->role != n->hello.role) {
        bt_rt_log(c, BT_LOG_INFO,
                  bt_rt_say(c, "%s node %s serves as %s from now on", bt_role_name(n->hello.role),
                            n->hello.name, bt_role_name(m->role)));
    }
    n->hello.role = m->role;
    n->leaving = m->leaving;
    /* Whom a prefill node cannot reach it tells again when a list names it; that comes when it is one again. */
    if (!bt_role_has(m->role, BT_ROLE_PREFILL)) {
        n->n_cut = 0;
    }
    if (!bt_role_has(m->role, BT_ROLE_DECODE)) {
        cuts_forget(c, n->hello.instance);
    }
    n->losing = 0;
    bt_rt_speeds_changed(c);
    bt_rt_nodes_changed(c, now);
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
        on_load(c, now, n, &m->load);
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
    case BT_FROM_DAEMON_ROLE_STATE:
        on_role_state(c, now, n, &m->role_state);
        break;
    case BT_FROM_DAEMON_DRAINING:
        if (!n->draining) {
            bt_rt_node_drains(c, now, n, "by itself");
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
        *out = (struct bt_rt_node_info){.name = n->hello.name,
                                        .instance = n->hello.instance,
                                        .role = n->hello.role,
                                        .hello = &n->hello,
                                        .load = &n->load,
                                        .own_seqs = n->own_seqs,
                                        .own_tokens = n->own_tokens + n->own_held,
                                        .n_cut = n->n_cut};
        bt_rt_node_state(c, n, out->state, sizeof out->state);
        return true;
    }
    return false;
}

const char *bt_rt_core_instance_name(const struct bt_rt_core *c, uint64_t instance)
{
    const struct rt_node *n = node_of(c, instance);

    return n != NULL ? n->hello.name : NULL;
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
