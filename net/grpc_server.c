/* gRPC, server side, over HTTP/2 streams: method table, request checks, deadlines, trailers. It
 * knows no method but the built-in services' tables, and decodes no message. */

#include "net/grpc.h"
#include "net/grpc_int.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "net/http_server_int.h"

#define MESSAGE_MAX  ((size_t)4 << 20)
#define TRAILERS_MAX 16

static bool single_request(const struct bt_grpc_call *c)
{
    return c->method->kind == BT_GRPC_UNARY || c->method->kind == BT_GRPC_SERVER_STREAM;
}

/* ---- ending a call ---- */

/* Status and trailers onto the stream; one block if nothing was sent before. */
static void write_status(struct bt_http_stream *s, enum bt_grpc_status st, const char *message,
                         const struct bt_http_header *trailers, size_t n_trailers)
{
    struct bt_http_header h[TRAILERS_MAX + 3];
    struct bt_buf text = {0};
    char code[8];
    size_t n = 0;

    BT_ASSERT(n_trailers <= TRAILERS_MAX);
    if (!s->responded) {
        h[n++] = (struct bt_http_header){"content-type", "application/grpc"};
    }
    (void)snprintf(code, sizeof code, "%d", (int)st);
    h[n++] = (struct bt_http_header){"grpc-status", code};
    bt_grpc_message_encode(message, &text);
    if (text.len > 0) {
        h[n++] = (struct bt_http_header){"grpc-message", text.data};
    }
    for (size_t i = 0; i < n_trailers; i++) {
        h[n++] = trailers[i];
    }
    if (s->responded) {
        bt_http_end_with_trailers(s, h, n);
    } else {
        bt_http_respond_end(s, 200, h, n);
    }
    bt_buf_fini(&text);
}

void bt_grpc_finish(struct bt_grpc_call *c, enum bt_grpc_status st, const char *message,
                    const struct bt_http_header *trailers, size_t n_trailers)
{
    BT_ASSERT(!c->client);
    if (c->finished || c->closed || c->ending || c->s == NULL) {
        return;
    }
    c->finished = true;
    c->sent_status = st;
    bt_timer_stop(c->loop, &c->deadline);
    write_status(c->s, st, message != NULL ? message : "", trailers, n_trailers);
}

void bt_grpc_reply(struct bt_grpc_call *c, const void *data, size_t len)
{
    (void)bt_grpc_send(c, data, len); /* the status follows: nothing to wait for */
    bt_grpc_finish(c, BT_GRPC_OK, NULL, NULL, 0);
}

void bt_grpc_fail(struct bt_grpc_call *c, enum bt_grpc_status st, const char *fmt, ...)
{
    char message[1024];
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(message, sizeof message, fmt, ap);
    va_end(ap);
    bt_grpc_finish(c, st, message, NULL, 0);
}

void bt_grpc_fail_retry(struct bt_grpc_call *c, enum bt_grpc_status st, uint64_t retry_ns,
                        const char *fmt, ...)
{
    char message[1024], ms[24], s[24];
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(message, sizeof message, fmt, ap);
    va_end(ap);
    (void)snprintf(ms, sizeof ms, "%" PRIu64, (retry_ns + BT_NS_PER_MS - 1) / BT_NS_PER_MS);
    (void)snprintf(s, sizeof s, "%" PRIu64, (retry_ns + BT_NS_PER_S - 1) / BT_NS_PER_S);
    struct bt_http_header trailers[] = {{"grpc-retry-pushback-ms", ms}, {"retry-after", s}};
    bt_grpc_finish(c, st, message, trailers, 2);
}

/* This side ends the call against the handler's will: status to the client, on_close soon. */
static void abort_call(struct bt_grpc_call *c, enum bt_grpc_status st, const char *message)
{
    struct bt_http_stream *s = c->s;

    if (c->finished || c->ending || s == NULL) {
        return;
    }
    bt_grpc_call_end_later(c, st, message);
    /* Behind what the client has not taken yet; one that takes nothing is cut by the write timeout. */
    write_status(s, st, message, NULL, 0);
}

static void on_deadline(struct bt_timer *t, void *arg)
{
    (void)t;
    abort_call(arg, BT_GRPC_DEADLINE_EXCEEDED, "deadline exceeded");
}

/* ---- stream events ---- */

static bool on_frame(void *arg, const uint8_t *data, size_t len)
{
    struct bt_grpc_call *c = arg;

    if (c->n_messages < UINT32_MAX) {
        c->n_messages++;
    }
    if (single_request(c)) {
        if (c->n_messages > 1) {
            abort_call(c, BT_GRPC_INVALID_ARGUMENT, "more than one request message");
        } else if (!bt_buf_add(&c->held, data, len)) {
            abort_call(c, BT_GRPC_RESOURCE_EXHAUSTED, "out of memory");
        }
    } else if (c->ev != NULL && c->ev->on_message != NULL && !c->finished) {
        c->ev->on_message(c, c->user, data, len);
    }
    return !c->closed && !c->ending && !c->finished;
}

static void on_data(struct bt_http_stream *s, void *user, const char *data, size_t len)
{
    struct bt_grpc_call *c = user;
    enum bt_grpc_status st = BT_GRPC_OK;
    char message[128];

    (void)s;
    if (c->finished) {
        return;
    }
    bt_grpc_call_enter(c);
    if (!bt_grpc_call_receive(c, data, len, on_frame, &st, message, sizeof message)) {
        abort_call(c, st, message);
    }
    bt_grpc_call_leave(c);
}

static void on_end(struct bt_http_stream *s, void *user)
{
    struct bt_grpc_call *c = user;

    (void)s;
    if (c->finished) {
        return;
    }
    bt_grpc_call_enter(c);
    if (!bt_grpc_deframe_idle(&c->in)) {
        abort_call(c, BT_GRPC_INTERNAL, "request ends inside a message");
    } else if (single_request(c)) {
        if (c->n_messages != 1) {
            abort_call(c, BT_GRPC_INVALID_ARGUMENT, "no request message");
        } else if (c->ev != NULL && c->ev->on_message != NULL) {
            struct bt_buf one = c->held;
            c->held = (struct bt_buf){0};
            c->ev->on_message(c, c->user, (const uint8_t *)(one.data != NULL ? one.data : ""),
                              one.len);
            bt_buf_fini(&one);
        }
    }
    if (!c->closed && !c->ending && c->ev != NULL && c->ev->on_half_close != NULL) {
        c->ev->on_half_close(c, c->user);
    }
    bt_grpc_call_leave(c);
}

static void on_writable(struct bt_http_stream *s, void *user)
{
    struct bt_grpc_call *c = user;

    (void)s;
    bt_grpc_call_enter(c);
    if (c->ev != NULL && c->ev->on_writable != NULL && !c->finished) {
        c->ev->on_writable(c, c->user);
    }
    bt_grpc_call_leave(c);
}

static void on_close(struct bt_http_stream *s, void *user, enum bt_http_close why)
{
    static const char *const texts[] = {
        [BT_HTTP_CLOSE_DONE] = "",
        [BT_HTTP_CLOSE_PEER] = "the peer cancelled, or the connection was lost",
        [BT_HTTP_CLOSE_RESET] = "cut",
        [BT_HTTP_CLOSE_ERROR] = "connection error",
        [BT_HTTP_CLOSE_TIMEOUT] = "the client does not read",
        [BT_HTTP_CLOSE_LIMIT] = "over a limit",
        [BT_HTTP_CLOSE_SERVER] = "server closed",
    };
    struct bt_grpc_call *c = user;
    struct bt_grpc_end end = {.status = BT_GRPC_CANCELLED, .message = texts[why]};

    (void)s;
    if (c->finished && why == BT_HTTP_CLOSE_DONE) {
        end.status = c->sent_status;
        end.finished = true;
    }
    bt_grpc_call_report(c, &end);
}

static const struct bt_http_events stream_events = {
    .on_data = on_data,
    .on_end = on_end,
    .on_writable = on_writable,
    .on_close = on_close,
};

/* ---- a request arrives ---- */

static const struct bt_grpc_method *find_method(const struct bt_grpc_server *g, const char *path,
                                                void **arg)
{
    for (size_t t = 0; t < g->n_tables; t++) {
        for (size_t i = 0; i < g->tables[t].n; i++) {
            if (strcmp(g->tables[t].methods[i].path, path) == 0) {
                *arg = g->tables[t].arg;
                return &g->tables[t].methods[i];
            }
        }
    }
    return NULL;
}

static void refuse(struct bt_http_stream *s, enum bt_grpc_status st, const char *message)
{
    s->rejected = true;
    write_status(s, st, message, NULL, 0);
}

/* Content types are application/grpc, application/grpc+proto, and either with parameters. */
static bool grpc_content_type(const char *type, bool *proto)
{
    static const char grpc[] = "application/grpc";

    if (type == NULL || strncmp(type, grpc, sizeof grpc - 1) != 0) {
        return false;
    }
    const char *rest = type + sizeof grpc - 1;
    if (strncmp(rest, "+proto", 6) == 0) {
        rest += 6;
    }
    *proto = *rest == '\0' || *rest == ';';
    return true;
}

static void begin_call(struct bt_grpc_server *g, struct bt_http_stream *s,
                       const struct bt_http_request *req)
{
    uint64_t timeout = 0;
    void *arg = NULL;
    const struct bt_grpc_method *m = find_method(g, req->path, &arg);

    if (m == NULL) {
        char message[200];
        (void)snprintf(message, sizeof message, "unknown method %.150s", req->path);
        refuse(s, BT_GRPC_UNIMPLEMENTED, message);
        return;
    }
    const char *text = bt_http_header_find(req->headers, req->n_headers, "grpc-timeout");
    if (text != NULL && !bt_grpc_timeout_parse(text, &timeout)) {
        refuse(s, BT_GRPC_INTERNAL, "malformed grpc-timeout");
        return;
    }
    struct bt_grpc_call *c = bt_grpc_call_new(g->loop, false, g->message_max, &g->calls);
    if (c == NULL) {
        refuse(s, BT_GRPC_RESOURCE_EXHAUSTED, "out of memory");
        return;
    }
    c->s = s;
    c->method = m;
    bt_http_bind(s, &stream_events, c);
    if (text != NULL) {
        c->deadline_ns = bt_clock_ns() + timeout;
        bt_timer_start(g->loop, &c->deadline, timeout, on_deadline, c);
    }
    bt_grpc_call_enter(c);
    m->on_call(c, arg);
    bt_grpc_call_leave(c);
}

bool bt_grpc_take_request(struct bt_http_stream *s, const struct bt_http_request *req, void *server)
{
    struct bt_grpc_server *g = server;
    bool proto = false;

    if (!grpc_content_type(bt_http_header_find(req->headers, req->n_headers, "content-type"),
                           &proto)) {
        return false;
    }
    if (!proto) {
        bt_http_stream_reply_error(
            s, 415, "only application/grpc and application/grpc+proto are supported");
    } else if (req->version != 20) {
        bt_http_stream_reply_error(s, 426, "gRPC needs HTTP/2");
    } else if (strcmp(req->method, "POST") != 0) {
        bt_http_stream_reply_error(s, 405, "gRPC uses POST");
    } else {
        s->unlimited = true;
        begin_call(g, s, req);
    }
    return true;
}

/* ---- the server object ---- */

void bt_grpc_bind(struct bt_grpc_call *c, const struct bt_grpc_events *ev, void *user)
{
    c->ev = ev;
    c->user = user;
}

enum bt_status bt_grpc_server_create(struct bt_net_loop *l, const struct bt_grpc_server_opts *opts,
                                     struct bt_grpc_server **out)
{
    struct bt_grpc_server *g = bt_calloc(1, sizeof *g);

    if (g == NULL) {
        return BT_ERR_NOMEM;
    }
    g->loop = l;
    g->message_max =
        opts != NULL && opts->message_bytes_max > 0 ? opts->message_bytes_max : MESSAGE_MAX;
    enum bt_status st = bt_grpc_health_init(g);
    if (st == BT_OK) {
        st = bt_grpc_reflection_init(g);
    }
    if (st != BT_OK) {
        bt_grpc_server_destroy(g);
        return st;
    }
    *out = g;
    return BT_OK;
}

enum bt_status bt_grpc_server_add(struct bt_grpc_server *g, const struct bt_grpc_method *methods,
                                  size_t n, void *arg)
{
    struct bt_grpc_table *t = bt_realloc(g->tables, (g->n_tables + 1) * sizeof *t);

    if (t == NULL) {
        return BT_ERR_NOMEM;
    }
    g->tables = t;
    g->tables[g->n_tables++] = (struct bt_grpc_table){.methods = methods, .n = n, .arg = arg};
    return BT_OK;
}

void bt_grpc_server_attach(struct bt_grpc_server *g, struct bt_http_server *hs)
{
    bt_http_server_set_grpc(hs, bt_grpc_take_request, g);
}

void bt_grpc_server_destroy(struct bt_grpc_server *g)
{
    if (g == NULL) {
        return;
    }
    bt_grpc_call_report_all(&g->calls, BT_GRPC_CANCELLED, "server closed");
    bt_grpc_health_fini(g);
    bt_grpc_reflection_fini(g);
    bt_free(g->tables);
    bt_free(g);
}
