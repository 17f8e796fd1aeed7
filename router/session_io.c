/* Session streams of daemons. Owns the listener, the calls and the decoding of messages; refuses to know what they
 * mean. */

#include "router/session_io.h"

#include <string.h>
#include "base/log.h"
#include "base/mem.h"
#include "net/grpc.h"
#include "net/http.h"
#include "router/router_int.h"

#define MESSAGE_ARENA ((size_t)256 << 20)
#define QUEUE_MAX     ((size_t)64 << 20) /* bytes that a daemon may leave unread */

struct session {
    struct bt_sessions *all;
    struct session *prev, *next;
    struct bt_grpc_call *call; /* NULL: over */
    uint64_t id;               /* the core's */
};

struct bt_sessions {
    struct bt_router *r;
    struct bt_http_server *http;
    struct bt_grpc_server *grpc;
    struct session *list;
    struct bt_map by_id; /* core's id → address of its struct session */
    struct bt_arena arena;
    struct bt_buf buf;
    struct bt_log_limit bad;
    bool closing;
};

static struct session *find(struct bt_sessions *s, uint64_t id)
{
    uint64_t address = 0;

    return bt_map_get(&s->by_id, &id, sizeof id, &address) ? (struct session *)(uintptr_t)address
                                                           : NULL;
}

static void unlink_session(struct session *x)
{
    struct bt_sessions *s = x->all;

    *(x->prev != NULL ? &x->prev->next : &s->list) = x->next;
    if (x->next != NULL) {
        x->next->prev = x->prev;
    }
    (void)bt_map_del(&s->by_id, &x->id, sizeof x->id);
}

/* ---- from daemons ---- */

static void on_message(struct bt_grpc_call *call, void *user, const uint8_t *data, size_t len)
{
    struct session *x = user;
    struct bt_sessions *s = x->all;
    struct bt_from_daemon m;
    struct bt_err err = {0};

    bt_arena_reset(&s->arena);
    if (bt_from_daemon_decode(data, len, &s->arena, &m, &err) != BT_OK) {
        uint32_t n_held;

        if (bt_log_may(&s->bad, bt_net_loop_now(s->r->loop), &n_held)) {
            bt_log_warn("session", "%s sent a bad message: %s (%u more before it)",
                        bt_grpc_peer(call), err.msg, n_held);
        }
        bt_grpc_fail(call, BT_GRPC_INVALID_ARGUMENT, "%s", err.msg);
        return;
    }
    bt_rt_on_message(s->r->core, bt_net_loop_now(s->r->loop), x->id, &m);
    bt_router_pump(s->r);
}

static void on_half_close(struct bt_grpc_call *call, void *user)
{
    (void)user;
    bt_grpc_finish(call, BT_GRPC_OK, NULL, NULL, 0);
}

static void on_close(struct bt_grpc_call *call, void *user, const struct bt_grpc_end *end)
{
    struct session *x = user;
    struct bt_sessions *s = x->all;
    uint64_t id = x->id;

    (void)call;
    unlink_session(x);
    bt_free(x);
    if (!s->closing) {
        bt_rt_on_session_lost(s->r->core, bt_net_loop_now(s->r->loop), id,
                              end->message[0] != '\0' ? end->message : "the stream ended");
        bt_router_pump(s->r);
    }
}

static void on_call(struct bt_grpc_call *call, void *arg)
{
    static const struct bt_grpc_events events = {
        .on_message = on_message, .on_half_close = on_half_close, .on_close = on_close};
    struct bt_sessions *s = arg;
    struct session *x = bt_calloc(1, sizeof *x);
    uint64_t id = x == NULL ? 0 : bt_rt_on_session(s->r->core, bt_net_loop_now(s->r->loop));

    if (id == 0 || bt_map_put(&s->by_id, &id, sizeof id, (uint64_t)(uintptr_t)x) != BT_OK) {
        if (id != 0) {
            bt_rt_on_session_lost(s->r->core, bt_net_loop_now(s->r->loop), id, "out of memory");
        }
        bt_free(x);
        bt_grpc_fail(call, BT_GRPC_RESOURCE_EXHAUSTED, "the router takes no more nodes");
        return;
    }
    *x = (struct session){.all = s, .next = s->list, .call = call, .id = id};
    if (s->list != NULL) {
        s->list->prev = x;
    }
    s->list = x;
    bt_grpc_bind(call, &events, x);
}

/* ---- to daemons ---- */

void bt_sessions_send(struct bt_sessions *s, uint64_t session, const struct bt_from_router *m)
{
    struct session *x = find(s, session);

    if (x == NULL || x->call == NULL) {
        return;
    }
    bt_buf_clear(&s->buf);
    if (bt_from_router_encode(m, &s->buf) != BT_OK) {
        bt_log_error("session", "out of memory: a message to %s is lost; ending its session",
                     bt_grpc_peer(x->call));
        bt_grpc_fail(x->call, BT_GRPC_RESOURCE_EXHAUSTED, "out of memory");
        return;
    }
    if (bt_grpc_send(x->call, s->buf.data, s->buf.len) > QUEUE_MAX) {
        bt_log_warn("session", "%s does not read its messages; ending its session",
                    bt_grpc_peer(x->call));
        bt_grpc_cancel(x->call);
    }
}

void bt_sessions_close(struct bt_sessions *s, uint64_t session, const char *why)
{
    struct session *x = find(s, session);

    if (x == NULL || x->call == NULL) {
        return;
    }
    bt_grpc_fail(x->call, BT_GRPC_FAILED_PRECONDITION, "%s", why);
    x->call = NULL; /* on_close frees it */
}

/* ---- life ---- */

static const struct bt_grpc_method methods[] = {{BT_SESSION_METHOD, BT_GRPC_BIDI, on_call}};

enum bt_status bt_sessions_create(struct bt_router *r, const char *listen, struct bt_sessions **out,
                                  struct bt_err *err)
{
    struct bt_sessions *s = bt_calloc(1, sizeof *s);

    if (s == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    s->r = r;
    bt_map_init(&s->by_id, true);
    bt_arena_init(&s->arena, MESSAGE_ARENA);
    struct bt_grpc_server_opts grpc = {.message_bytes_max = BT_SESSION_MSG_MAX};
    enum bt_status st = bt_grpc_server_create(r->loop, &grpc, &s->grpc);

    if (st == BT_OK) {
        st = bt_grpc_server_add(s->grpc, methods, 1, s);
    }
    if (st == BT_OK) {
        struct bt_http_server_opts http = {.listen = listen};

        st = bt_http_server_create(r->loop, &http, &s->http, err);
    } else {
        (void)bt_err_set(err, st, "out of memory");
    }
    if (st != BT_OK) {
        bt_sessions_destroy(s);
        return st;
    }
    bt_grpc_server_attach(s->grpc, s->http);
    *out = s;
    return BT_OK;
}

const char *bt_sessions_address(const struct bt_sessions *s)
{
    return bt_http_server_address(s->http);
}

void bt_sessions_destroy(struct bt_sessions *s)
{
    if (s == NULL) {
        return;
    }
    s->closing = true;
    bt_http_server_close(s->http);
    if (s->grpc != NULL) {
        bt_grpc_server_destroy(s->grpc);
    }
    bt_map_fini(&s->by_id);
    bt_arena_fini(&s->arena);
    bt_buf_fini(&s->buf);
    bt_free(s);
}
