/* Sessions to routers. Owns channels, calls, reconnect timers and heartbeats; refuses to know what
 * the messages mean, beyond hello and welcome. */

#include "node/router_link.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "net/addr.h"
#include "net/grpc.h"
#include "net/loop.h"

#define DIAL_PAUSE_MIN (100 * BT_NS_PER_MS)
#define DIAL_PAUSE_MAX (2 * BT_NS_PER_S)
#define RESOLVE_EVERY  (10 * BT_NS_PER_S)
#define MESSAGE_ARENA  ((size_t)256 << 20)
#define QUEUE_MAX      ((size_t)64 << 20) /* bytes that a router may leave unread */

enum session_state { SESSION_IDLE, SESSION_DIALLING, SESSION_UP };

struct session {
    struct bt_router_link *link;
    uint32_t index;
    char address[BT_ADDR_TEXT_MAX];
    struct bt_grpc_channel *channel;
    struct bt_grpc_call *call;
    enum session_state state;
    uint32_t version;
    enum bt_role told_role, told_leaving;
    uint64_t last_heard;
    uint64_t pause_ns;
    struct bt_timer redial;
    uint32_t complained; /* losses logged since the last success */
    struct bt_log_limit bad;
    uint64_t by_name; /* bits: the names that resolve to it now; 0: forgotten once it is not up */
};
static_assert(BT_ROUTERS_MAX <= 64, "one bit for each name");

struct name {
    struct bt_router_link *link;
    struct bt_hostport hp;
    bool resolving;
};

struct bt_router_link {
    struct bt_net_loop *loop;
    struct bt_router_link_opts opts;
    struct session sessions[BT_ROUTERS_MAX]; /* channel NULL: free */
    struct name names[BT_ROUTERS_MAX];
    uint32_t n_names, n_resolving;
    struct bt_timer beat, resolve;
    struct bt_arena arena;
    struct bt_buf buf;
    bool draining, closing;
    struct bt_msg_role_state role;
};

static void session_dial(struct session *s);

/* Not inside a callback of its channel. */
static void session_forget(struct session *s)
{
    struct bt_router_link *r = s->link;

    bt_log_info("session", "router %s is forgotten: no name resolves to it any more", s->address);
    bt_timer_stop(r->loop, &s->redial);
    bt_grpc_channel_destroy(s->channel);
    *s = (struct session){0};
}

static void on_redial(struct bt_timer *t, void *arg)
{
    struct session *s = arg;

    (void)t;
    if (s->by_name == 0) {
        session_forget(s);
    } else {
        session_dial(s);
    }
}

/* ---- sending ---- */

static void send_on(struct session *s, const struct bt_from_daemon *m)
{
    struct bt_buf *b = &s->link->buf;

    if (s->call == NULL) {
        return;
    }
    bt_buf_clear(b);
    if (bt_from_daemon_encode(m, b) != BT_OK) {
        bt_log_error("session", "out of memory: a message to router %s is lost; ending the session",
                     s->address);
        bt_grpc_cancel(s->call);
        return;
    }
    if (bt_grpc_send(s->call, b->data, b->len) > QUEUE_MAX) {
        bt_log_warn("session", "router %s does not read its messages; ending the session",
                    s->address);
        bt_grpc_cancel(s->call);
    }
}

void bt_router_link_send(struct bt_router_link *r, uint32_t router, const struct bt_from_daemon *m)
{
    if (router < BT_ROUTERS_MAX && r->sessions[router].state == SESSION_UP) {
        send_on(&r->sessions[router], m);
    }
}

void bt_router_link_send_all(struct bt_router_link *r, const struct bt_from_daemon *m)
{
    for (uint32_t i = 0; i < BT_ROUTERS_MAX; i++) {
        bt_router_link_send(r, i, m);
    }
}

static void send_load(struct session *s)
{
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_LOAD};

    s->link->opts.load(s->link->opts.arg, s->index, &m.load);
    send_on(s, &m);
}

/* ---- a session's life ---- */

/* What hello does not say: it has the role, but it may have become another since. */
static void send_role(struct session *s)
{
    const struct bt_msg_role_state *role = &s->link->role;

    if (role->role == s->told_role && role->leaving == s->told_leaving) {
        return;
    }
    if (s->version < BT_SESSION_VERSION_ADMIN) {
        if (role->role != s->told_role) {
            bt_grpc_cancel(s->call); /* only a new hello tells it */
        }
        return;
    }
    s->told_role = role->role;
    s->told_leaving = role->leaving;
    send_on(s, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_ROLE_STATE, .role_state = *role});
}

static void on_welcome(struct session *s, const struct bt_msg_welcome *w)
{
    if (w->version == 0) {
        bt_log_error("session", "router %s refuses this node: %s", s->address, w->reason);
        s->complained = UINT32_MAX;
        s->pause_ns = DIAL_PAUSE_MAX;
        bt_grpc_cancel(s->call);
        return;
    }
    s->state = SESSION_UP;
    s->version = w->version;
    s->pause_ns = DIAL_PAUSE_MIN;
    s->complained = 0;
    bt_log_info("session", "session with router %s (%s) is up", w->name, s->address);
    send_role(s);
    if (s->link->draining) {
        send_on(s, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_DRAINING});
    }
    send_load(s);
    s->link->opts.on_up(s->link->opts.arg, s->index);
}

static void on_message(struct bt_grpc_call *call, void *user, const uint8_t *data, size_t len)
{
    struct session *s = user;
    struct bt_router_link *r = s->link;
    struct bt_from_router m;
    struct bt_err err = {0};

    s->last_heard = bt_net_loop_now(r->loop);
    bt_arena_reset(&r->arena);
    if (bt_from_router_decode(data, len, &r->arena, &m, &err) != BT_OK) {
        uint32_t n_held;

        if (bt_log_may(&s->bad, s->last_heard, &n_held)) {
            bt_log_warn("session", "router %s sent a bad message: %s (%u more before it)",
                        s->address, err.msg, n_held);
        }
        bt_grpc_cancel(call);
        return;
    }
    if (m.kind == BT_FROM_ROUTER_WELCOME) {
        if (s->state == SESSION_DIALLING) {
            on_welcome(s, &m.welcome);
        }
    } else if (s->state == SESSION_UP && m.kind != BT_FROM_ROUTER_HEARTBEAT) {
        r->opts.on_message(r->opts.arg, s->index, &m);
    }
}

static void on_close(struct bt_grpc_call *call, void *user, const struct bt_grpc_end *end)
{
    struct session *s = user;
    struct bt_router_link *r = s->link;
    bool was_up = s->state == SESSION_UP;

    (void)call;
    s->call = NULL;
    s->state = SESSION_IDLE;
    if (r->closing) {
        return;
    }
    if (s->by_name != 0 && (was_up || s->complained == 0)) {
        s->complained = 1;
        bt_log_warn("session", "no session with router %s: %s; dialling again", s->address,
                    end->message[0] != '\0' ? end->message : bt_grpc_status_name(end->status));
    }
    bt_timer_start(r->loop, &s->redial, s->by_name != 0 ? s->pause_ns : 0, on_redial, s);
    s->pause_ns = s->pause_ns * 2 < DIAL_PAUSE_MAX ? s->pause_ns * 2 : DIAL_PAUSE_MAX;
    if (was_up) {
        r->opts.on_lost(r->opts.arg, s->index);
    }
}

static void session_dial(struct session *s)
{
    static const struct bt_grpc_events events = {.on_message = on_message, .on_close = on_close};
    struct bt_router_link *r = s->link;

    if (bt_grpc_call_start(s->channel, &(struct bt_grpc_start){.path = BT_SESSION_METHOD}, &events,
                           s, &s->call) != BT_OK) {
        s->call = NULL;
        bt_timer_start(r->loop, &s->redial, DIAL_PAUSE_MAX, on_redial, s);
        return;
    }
    s->state = SESSION_DIALLING;
    s->last_heard = bt_net_loop_now(r->loop);
    s->told_role = r->opts.hello.role = r->role.role;
    s->told_leaving = BT_ROLE_BOTH;
    send_on(s, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_HELLO, .hello = r->opts.hello});
}

/* No name resolves to it and it is not up. One that is up stays until it ends. */
static void session_drop_stale(struct session *s)
{
    if (s->channel == NULL || s->by_name != 0) {
        return;
    }
    if (s->state == SESSION_IDLE) {
        session_forget(s);
    } else if (s->state == SESSION_DIALLING && s->call != NULL) {
        bt_grpc_cancel(s->call); /* on_close, then on_redial */
    }
}

static struct session *session_find(struct bt_router_link *r, const struct bt_hostport *hp)
{
    char text[BT_ADDR_TEXT_MAX];

    bt_hostport_text(hp, text);
    for (uint32_t i = 0; i < BT_ROUTERS_MAX; i++) {
        if (r->sessions[i].channel != NULL && strcmp(r->sessions[i].address, text) == 0) {
            return &r->sessions[i];
        }
    }
    return NULL;
}

static void session_add(struct bt_router_link *r, const struct bt_hostport *hp, uint64_t name_bit)
{
    char text[BT_ADDR_TEXT_MAX];
    struct bt_err err = {0};
    struct session *s = NULL;

    bt_hostport_text(hp, text);
    for (uint32_t i = 0; s == NULL && i < BT_ROUTERS_MAX; i++) {
        s = r->sessions[i].channel == NULL ? &r->sessions[i] : NULL;
    }
    if (s == NULL) {
        bt_log_warn("session", "more than %u router addresses; %s is not dialled", BT_ROUTERS_MAX,
                    text);
        return;
    }
    *s = (struct session){.link = r,
                          .index = (uint32_t)(s - r->sessions),
                          .pause_ns = DIAL_PAUSE_MIN,
                          .by_name = name_bit};
    snprintf(s->address, sizeof s->address, "%s", text);
    if (bt_grpc_channel_create(r->loop,
                               &(struct bt_grpc_channel_opts){
                                   .address = s->address, .message_bytes_max = BT_SESSION_MSG_MAX},
                               &s->channel, &err) != BT_OK) {
        bt_log_error("session", "router %s: %s", text, err.msg);
        *s = (struct session){0};
        return;
    }
    session_dial(s);
}

/* ---- names ---- */

static void on_resolved(void *arg, enum bt_status st, const struct bt_hostport *addrs, size_t n,
                        const char *why)
{
    struct name *nm = arg;
    struct bt_router_link *r = nm->link;

    nm->resolving = false;
    r->n_resolving--;
    if (r->closing) {
        if (r->n_resolving == 0) {
            bt_free(r);
        }
        return;
    }
    if (st != BT_OK) {
        bt_log_warn("session", "cannot resolve router %s: %s", nm->hp.host, why);
        return;
    }
    bt_router_link_resolved(r, (uint32_t)(nm - r->names), addrs, n);
}

void bt_router_link_resolved(struct bt_router_link *r, uint32_t name,
                             const struct bt_hostport *addrs, size_t n)
{
    uint64_t bit = UINT64_C(1) << name;
    struct session *s;

    for (uint32_t i = 0; i < BT_ROUTERS_MAX; i++) {
        r->sessions[i].by_name &= ~bit;
    }
    for (size_t i = 0; i < n; i++) {
        if ((s = session_find(r, &addrs[i])) != NULL) {
            s->by_name |= bit;
        }
    }
    for (uint32_t i = 0; i < BT_ROUTERS_MAX; i++) { /* makes room for the new ones */
        session_drop_stale(&r->sessions[i]);
    }
    for (size_t i = 0; i < n; i++) {
        if (session_find(r, &addrs[i]) == NULL) {
            session_add(r, &addrs[i], bit);
        }
    }
}

static void resolve_all(struct bt_timer *t, void *arg)
{
    struct bt_router_link *r = arg;

    (void)t;
    for (uint32_t i = 0; i < r->n_names; i++) {
        struct name *nm = &r->names[i];

        if (!nm->resolving && bt_net_resolve(r->loop, &nm->hp, on_resolved, nm) == BT_OK) {
            nm->resolving = true;
            r->n_resolving++;
        }
    }
    bt_timer_start(r->loop, &r->resolve, RESOLVE_EVERY, resolve_all, r);
}

static enum bt_status parse_names(struct bt_router_link *r, struct bt_err *err)
{
    char one[BT_ADDR_TEXT_MAX];
    const char *p = r->opts.routers;

    while (*p != '\0') {
        size_t n = strcspn(p, ",");

        if (n == 0 || n >= sizeof one || r->n_names == BT_ROUTERS_MAX) {
            return bt_err_set(err, BT_ERR_INVALID,
                              "--router %s: an empty or too long address, or too many",
                              r->opts.routers);
        }
        memcpy(one, p, n);
        one[n] = '\0';
        struct name *nm = &r->names[r->n_names];
        enum bt_status st = bt_hostport_parse(one, -1, &nm->hp, err);

        if (st != BT_OK) {
            bt_err_prefix(err, "--router");
            return st;
        }
        nm->link = r;
        r->n_names++;
        p += n + (p[n] == ',');
    }
    return r->n_names > 0 ? BT_OK : bt_err_set(err, BT_ERR_INVALID, "--router: no address given");
}

/* ---- heartbeats ---- */

static void on_beat(struct bt_timer *t, void *arg)
{
    struct bt_router_link *r = arg;
    uint64_t now = bt_net_loop_now(r->loop);

    (void)t;
    for (uint32_t i = 0; i < BT_ROUTERS_MAX; i++) {
        struct session *s = &r->sessions[i];

        if (s->call != NULL && now - s->last_heard > r->opts.lease_ns) {
            if (s->state == SESSION_UP) {
                bt_log_warn("session", "router %s is silent; its session ends", s->address);
            }
            bt_grpc_cancel(s->call);
        } else if (s->state == SESSION_UP) {
            send_load(s);
        }
    }
    bt_timer_start(r->loop, &r->beat, r->opts.heartbeat_ns, on_beat, r);
}

/* ---- life ---- */

enum bt_status bt_router_link_create(struct bt_net_loop *l, const struct bt_router_link_opts *opts,
                                     struct bt_router_link **out, struct bt_err *err)
{
    struct bt_router_link *r = bt_calloc(1, sizeof *r);

    if (r == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    r->loop = l;
    r->opts = *opts;
    r->role = (struct bt_msg_role_state){opts->hello.role, BT_ROLE_BOTH};
    enum bt_status st = parse_names(r, err);

    if (st != BT_OK) {
        bt_free(r);
        return st;
    }
    bt_arena_init(&r->arena, MESSAGE_ARENA);
    resolve_all(NULL, r);
    bt_timer_start(l, &r->beat, opts->heartbeat_ns, on_beat, r);
    *out = r;
    return BT_OK;
}

void bt_router_link_destroy(struct bt_router_link *r)
{
    if (r == NULL) {
        return;
    }
    r->closing = true;
    bt_timer_stop(r->loop, &r->beat);
    bt_timer_stop(r->loop, &r->resolve);
    for (uint32_t i = 0; i < BT_ROUTERS_MAX; i++) {
        bt_timer_stop(r->loop, &r->sessions[i].redial);
        bt_grpc_channel_destroy(r->sessions[i].channel);
    }
    bt_arena_fini(&r->arena);
    bt_buf_fini(&r->buf);
    if (r->n_resolving == 0) {
        bt_free(r); /* else the last resolver callback does */
    }
}

void bt_router_link_role(struct bt_router_link *r, enum bt_role role, enum bt_role leaving)
{
    r->role = (struct bt_msg_role_state){role, leaving};
    for (uint32_t i = 0; i < BT_ROUTERS_MAX; i++) {
        if (r->sessions[i].state == SESSION_UP) {
            send_role(&r->sessions[i]);
        }
    }
}

void bt_router_link_drain(struct bt_router_link *r)
{
    r->draining = true;
    bt_router_link_send_all(r, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_DRAINING});
}

uint32_t bt_router_link_up(const struct bt_router_link *r)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < BT_ROUTERS_MAX; i++) {
        n += r->sessions[i].state == SESSION_UP;
    }
    return n;
}

const char *bt_router_link_address(const struct bt_router_link *r, uint32_t router, bool *up)
{
    if (router >= BT_ROUTERS_MAX || r->sessions[router].channel == NULL) {
        return NULL;
    }
    *up = r->sessions[router].state == SESSION_UP;
    return r->sessions[router].address;
}
