/* HTTP/2 over nghttp2, both roles. Bytes in by feed, out by pull; no socket and no clock. It knows
 * frames, windows and streams, and nothing of what requests mean. Never deleted inside its own
 * callbacks: user calls only queue, and only top calls destroy. */

#include "net/http_int.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <nghttp2/nghttp2.h>

#include "base/log.h"
#include "base/mem.h"

#define WINDOW_STREAM     (1 << 20)
#define WINDOW_CONNECTION (16 << 20)
#define DISCARD_MAX       ((uint64_t)64 << 20) /* of a body that nobody wants any more */

struct bt_http2 {
    struct bt_http_conn *conn;
    nghttp2_session *session;
    bool dead; /* the session failed: no further calls into it */
};

static const struct bt_http_vt vt;

static struct bt_http_stream *stream_of(nghttp2_session *session, int32_t id)
{
    return nghttp2_session_get_stream_user_data(session, id);
}

/* Queues RST_STREAM; on_stream_close follows when it is sent. */
static void cut(struct bt_http2 *h, struct bt_http_stream *s, uint32_t code)
{
    if (s->cut) {
        return;
    }
    s->cut = true;
    bt_outq_fini(&s->out);
    if (!h->dead && nghttp2_submit_rst_stream(h->session, NGHTTP2_FLAG_NONE, s->id, code) != 0) {
        h->conn->broken = true; /* no memory */
    }
    h->conn->kick(h->conn->kick_arg);
}

static void cut_nomem(struct bt_http2 *h, struct bt_http_stream *s)
{
    bt_http_stream_set_why(s, BT_HTTP_CLOSE_ERROR);
    s->ended = true;
    cut(h, s, NGHTTP2_INTERNAL_ERROR);
}

/* ---- sending ---- */

/* nghttp2 copies names and values. Headers that may not be sent are left out. */
static nghttp2_nv nv_of(const char *name, const char *value)
{
    nghttp2_nv nv = {
        .name = (uint8_t *)(uintptr_t)name, /* nghttp2 only reads, its type lacks const */
        .value = (uint8_t *)(uintptr_t)value,
        .namelen = strlen(name),
        .valuelen = strlen(value),
        .flags = NGHTTP2_NV_FLAG_NONE,
    };
    return nv;
}

static bool connection_header(const char *name)
{
    return strcmp(name, "connection") == 0 || strcmp(name, "transfer-encoding") == 0 ||
           strcmp(name, "keep-alive") == 0 || strcmp(name, "upgrade") == 0 ||
           strcmp(name, "proxy-connection") == 0;
}

/* nv[] with room for n + 2; returns how many, or NULL in *out when memory is out. */
static size_t build_nv(const struct bt_http_header *headers, size_t n, const char *status,
                       const char *date, nghttp2_nv **out)
{
    nghttp2_nv *nv = bt_alloc((n + 2) * sizeof *nv);
    size_t k = 0;

    *out = nv;
    if (nv == NULL) {
        return 0;
    }
    if (status != NULL) {
        nv[k++] = nv_of(":status", status);
    }
    for (size_t i = 0; i < n; i++) {
        bool pseudo = headers[i].name[0] == ':';
        if (pseudo ||
            (!connection_header(headers[i].name) && bt_http_header_sendable(&headers[i]))) {
            nv[k++] = nv_of(headers[i].name, headers[i].value);
        }
    }
    if (date != NULL && date[0] != '\0') {
        nv[k++] = nv_of("date", date);
    }
    return k;
}

static ssize_t on_body_wanted(nghttp2_session *session, int32_t id, uint8_t *buf, size_t length,
                              uint32_t *flags, nghttp2_data_source *source, void *arg)
{
    struct bt_http_stream *s = source->ptr;
    struct bt_http2 *h = arg;

    (void)session;
    (void)id;
    size_t n = bt_outq_take(&s->out, buf, length);
    if (n > 0) {
        s->progress_ns = h->conn->now_ns;
    }
    if (bt_outq_len(&s->out) > 0) {
        return (ssize_t)n;
    }
    if (s->ended) {
        *flags |= NGHTTP2_DATA_FLAG_EOF;
        if (s->trailers.n_v > 0 && !h->conn->client) {
            nghttp2_nv *nv = NULL;
            size_t k = build_nv(s->trailers.v, s->trailers.n_v, NULL, NULL, &nv);
            int rc =
                nv != NULL ? nghttp2_submit_trailer(h->session, s->id, nv, k) : NGHTTP2_ERR_NOMEM;
            bt_free(nv);
            if (rc != 0) {
                return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
            }
            *flags |= NGHTTP2_DATA_FLAG_NO_END_STREAM;
        }
        s->out_done = true;
        return (ssize_t)n;
    }
    if (n == 0) {
        s->deferred = true;
        return NGHTTP2_ERR_DEFERRED;
    }
    return (ssize_t)n;
}

static void h2_respond(struct bt_http_stream *s, int status, const struct bt_http_header *headers,
                       size_t n, bool end)
{
    struct bt_http2 *h = s->conn->h2;
    nghttp2_data_provider body = {.source = {.ptr = s}, .read_callback = on_body_wanted};
    nghttp2_nv *nv = NULL;
    char text[16];

    if (h->dead) {
        return;
    }
    (void)snprintf(text, sizeof text, "%d", status);
    size_t k = build_nv(headers, n, text, s->conn->env->date, &nv);
    int rc = nv != NULL ? nghttp2_submit_response(h->session, s->id, nv, k, end ? NULL : &body)
                        : NGHTTP2_ERR_NOMEM;
    bt_free(nv);
    s->out_done = end;
    if (rc != 0) {
        cut_nomem(h, s);
        return;
    }
    h->conn->kick(h->conn->kick_arg);
}

static void resume(struct bt_http2 *h, struct bt_http_stream *s)
{
    if (s->deferred && !h->dead) {
        s->deferred = false;
        (void)nghttp2_session_resume_data(h->session,
                                          s->id); /* fails if the stream is about to close */
    }
    h->conn->kick(h->conn->kick_arg);
}

static void h2_write(struct bt_http_stream *s, const void *data, size_t len)
{
    struct bt_http2 *h = s->conn->h2;

    if (!bt_outq_add(&s->out, data, len)) {
        cut_nomem(h, s);
        return;
    }
    resume(h, s);
}

static void h2_end(struct bt_http_stream *s, const struct bt_http_header *trailers, size_t n)
{
    struct bt_http2 *h = s->conn->h2;

    for (size_t i = 0; i < n; i++) {
        if (bt_http_header_sendable(&trailers[i]) &&
            bt_hstore_add(&s->trailers, trailers[i].name, strlen(trailers[i].name),
                          trailers[i].value, strlen(trailers[i].value), (size_t)64 << 10,
                          128) != BT_HSTORE_OK) {
            cut_nomem(h, s);
            return;
        }
    }
    if (n > 0 && !bt_hstore_finish(&s->trailers)) {
        cut_nomem(h, s);
        return;
    }
    resume(h, s);
}

static void h2_reset(struct bt_http_stream *s, enum bt_http_code code)
{
    cut(s->conn->h2, s, (uint32_t)code);
}

static size_t h2_queued(const struct bt_http_stream *s)
{
    return bt_outq_len(&s->out);
}

static const struct bt_http_vt vt = {
    .respond = h2_respond,
    .write = h2_write,
    .end = h2_end,
    .reset = h2_reset,
    .queued = h2_queued,
};

/* ---- receiving ---- */

static int on_begin_headers(nghttp2_session *session, const nghttp2_frame *frame, void *arg)
{
    struct bt_http2 *h = arg;

    if (frame->hd.type != NGHTTP2_HEADERS) {
        return 0;
    }
    if (frame->headers.cat == NGHTTP2_HCAT_REQUEST) {
        struct bt_http_stream *s = bt_http_stream_new(h->conn, &vt);
        if (s == NULL) {
            return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
        }
        s->id = frame->hd.stream_id;
        s->req.version = 20;
        /* fails only for an unknown stream */
        (void)nghttp2_session_set_stream_user_data(session, s->id, s);
        return 0;
    }
    struct bt_http_stream *s = stream_of(session, frame->hd.stream_id);
    if (s != NULL && h->conn->client && !s->responded) {
        bt_hstore_fini(&s->head); /* what came before was an interim response */
    }
    return 0;
}

static int on_header(nghttp2_session *session, const nghttp2_frame *frame, const uint8_t *name,
                     size_t name_len, const uint8_t *value, size_t value_len, uint8_t flags,
                     void *arg)
{
    struct bt_http2 *h = arg;
    const struct bt_http_server_opts *o = &h->conn->env->opts;
    struct bt_http_stream *s = stream_of(session, frame->hd.stream_id);

    (void)flags;
    if (frame->hd.type != NGHTTP2_HEADERS || s == NULL || s->rejected) {
        return 0;
    }
    struct bt_hstore *to = &s->head;
    if (h->conn->client && s->responded) {
        to = &s->trailers;
    } else if (!h->conn->client && frame->headers.cat != NGHTTP2_HCAT_REQUEST) {
        return 0; /* trailers of a request: nobody reads them */
    }
    switch (bt_hstore_add(to, (const char *)name, name_len, (const char *)value, value_len,
                          o->header_bytes_max + 2 * (size_t)o->headers_max + 64,
                          o->headers_max + 4)) {
    case BT_HSTORE_OK:
        return 0;
    case BT_HSTORE_LIMIT:
        if (h->conn->client) {
            return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
        }
        s->rejected = true;
        return 0;
    case BT_HSTORE_BAD:
    case BT_HSTORE_NOMEM:
        break;
    }
    return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
}

static void got_request(struct bt_http2 *h, struct bt_http_stream *s, bool end)
{
    s->request_done = end;
    s->req.has_body = !end;
    if (s->rejected) {
        bt_http_stream_reply_error(s, 431, "request headers too large");
        return;
    }
    if (!bt_hstore_finish(&s->head)) {
        cut_nomem(h, s);
        return;
    }
    if (!bt_http_stream_fill_request(s, 20)) {
        bt_http_stream_reply_error(s, 400, "bad request target or content-length");
        return;
    }
    bt_http_stream_on_request(s);
    if (end) {
        bt_http_stream_on_end(s);
    }
}

/* Response headers, interim headers, or trailers. */
static int got_response(struct bt_http_stream *s, bool end)
{
    if (!s->responded) {
        const char *status = NULL;
        if (!bt_hstore_finish(&s->head)) {
            return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
        }
        status = bt_hstore_pseudo(&s->head, ":status");
        int code = status != NULL ? (int)strtol(status, NULL, 10) : 0;
        if (code >= 100 && code < 200 && !end) {
            return 0;
        }
        s->responded = true;
        s->req.headers = s->head.v;
        s->req.n_headers = s->head.n_v;
        if (s->on_head != NULL && !s->closed && s->ev != NULL) {
            s->on_head(s, s->user, code);
        }
    } else if (!bt_hstore_finish(&s->trailers)) {
        return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
    }
    if (end) {
        bt_http_stream_on_end(s);
    }
    return 0;
}

static int on_frame_recv(nghttp2_session *session, const nghttp2_frame *frame, void *arg)
{
    struct bt_http2 *h = arg;
    bool end = (frame->hd.flags & NGHTTP2_FLAG_END_STREAM) != 0;
    struct bt_http_stream *s =
        frame->hd.stream_id > 0 ? stream_of(session, frame->hd.stream_id) : NULL;

    switch (frame->hd.type) {
    case NGHTTP2_HEADERS:
        if (s == NULL) {
            break;
        }
        if (h->conn->client) {
            return got_response(s, end);
        }
        if (frame->headers.cat == NGHTTP2_HCAT_REQUEST) {
            got_request(h, s, end);
        } else if (end) {
            bt_http_stream_on_end(s);
        }
        break;
    case NGHTTP2_DATA:
        if (s != NULL && end) {
            bt_http_stream_on_end(s);
        }
        break;
    case NGHTTP2_GOAWAY:
        h->conn->goaway = true;
        break;
    case NGHTTP2_PING:
        if ((frame->hd.flags & NGHTTP2_FLAG_ACK) != 0) {
            h->conn->ping_out = false;
        }
        break;
    default:
        break;
    }
    return 0;
}

static int on_data_chunk(nghttp2_session *session, uint8_t flags, int32_t id, const uint8_t *data,
                         size_t len, void *arg)
{
    struct bt_http2 *h = arg;
    struct bt_http_stream *s = stream_of(session, id);

    (void)flags;
    if (s == NULL || bt_http_stream_on_data(s, (const char *)data, len)) {
        return 0;
    }
    if (s->rejected) {
        if (s->body_bytes > h->conn->env->opts.body_bytes_max + DISCARD_MAX) {
            cut(h, s, NGHTTP2_NO_ERROR);
        }
        return 0;
    }
    bt_http_stream_set_why(s, BT_HTTP_CLOSE_LIMIT);
    if (!s->responded) {
        bt_http_stream_reply_error(s, 413, "request body too large");
    } else if (!s->ended) {
        s->ended = true;
        cut(h, s, NGHTTP2_CANCEL);
    }
    s->rejected = true;
    return 0;
}

/* A complete response to a request whose body still comes. gRPC clients take RST_STREAM(NO_ERROR)
 * as "stop"; HTTP clients (curl, httpx) lose the response over it, so their body is thrown away,
 * within limits. */
static int on_frame_send(nghttp2_session *session, const nghttp2_frame *frame, void *arg)
{
    struct bt_http2 *h = arg;

    if (h->conn->client || (frame->hd.flags & NGHTTP2_FLAG_END_STREAM) == 0 ||
        (frame->hd.type != NGHTTP2_DATA && frame->hd.type != NGHTTP2_HEADERS)) {
        return 0;
    }
    struct bt_http_stream *s = stream_of(session, frame->hd.stream_id);
    if (s != NULL && !s->request_done) {
        s->rejected = true;
        if (s->unlimited) {
            cut(h, s, NGHTTP2_NO_ERROR);
        }
        bt_http_stream_report(s, BT_HTTP_CLOSE_DONE);
    }
    return 0;
}

static int on_stream_close(nghttp2_session *session, int32_t id, uint32_t code, void *arg)
{
    struct bt_http2 *h = arg;
    struct bt_http_stream *s = stream_of(session, id);

    if (s == NULL) {
        return 0;
    }
    (void)nghttp2_session_set_stream_user_data(session, id,
                                               NULL); /* fails only for an unknown stream */
    s->rst_code = code;
    bool done = s->out_done && (code == NGHTTP2_NO_ERROR || s->conn->client);
    bt_http_stream_close(s, done ? BT_HTTP_CLOSE_DONE : BT_HTTP_CLOSE_PEER);
    if (h->conn->streams == NULL) {
        h->conn->wait_since_ns = h->conn->now_ns; /* idle from here */
    }
    return 0;
}

static int on_error(nghttp2_session *session, int code, const char *msg, size_t len, void *arg)
{
    struct bt_http2 *h = arg;

    (void)session;
    (void)code;
    bt_log_debug("net", "%s: http2: %.*s", h->conn->peer, (int)len, msg);
    return 0;
}

/* ---- the connection ---- */

static bool set_callbacks(nghttp2_session_callbacks **out)
{
    nghttp2_session_callbacks *cb = NULL;

    if (nghttp2_session_callbacks_new(&cb) != 0) {
        return false;
    }
    nghttp2_session_callbacks_set_on_begin_headers_callback(cb, on_begin_headers);
    nghttp2_session_callbacks_set_on_header_callback(cb, on_header);
    nghttp2_session_callbacks_set_on_frame_recv_callback(cb, on_frame_recv);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(cb, on_data_chunk);
    nghttp2_session_callbacks_set_on_frame_send_callback(cb, on_frame_send);
    nghttp2_session_callbacks_set_on_stream_close_callback(cb, on_stream_close);
    nghttp2_session_callbacks_set_error_callback2(cb, on_error);
    *out = cb;
    return true;
}

static bool open_session(struct bt_http2 *h)
{
    nghttp2_session_callbacks *cb = NULL;
    nghttp2_option *option = NULL;
    bool ok = false;

    if (!set_callbacks(&cb)) {
        return false;
    }
    if (nghttp2_option_new(&option) == 0) {
        nghttp2_option_set_no_closed_streams(
            option, 1); /* priorities of the past are not worth the memory */
        int rc = h->conn->client ? nghttp2_session_client_new2(&h->session, cb, h, option)
                                 : nghttp2_session_server_new2(&h->session, cb, h, option);
        ok = rc == 0;
    }
    nghttp2_option_del(option);
    nghttp2_session_callbacks_del(cb);
    return ok;
}

struct bt_http2 *bt_http2_create(struct bt_http_conn *c)
{
    struct bt_http2 *h = bt_calloc(1, sizeof *h);

    if (h == NULL) {
        return NULL;
    }
    h->conn = c;
    const struct bt_http_server_opts *o = &c->env->opts;
    nghttp2_settings_entry settings[] = {
        {NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, c->client ? 0 : o->streams_max},
        {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, WINDOW_STREAM},
        {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE,
         o->header_bytes_max > UINT32_MAX ? UINT32_MAX : (uint32_t)o->header_bytes_max},
        {NGHTTP2_SETTINGS_ENABLE_PUSH, 0},
    };
    if (!open_session(h)) {
        bt_free(h);
        return NULL;
    }
    /* ENABLE_PUSH is the client's to send */
    if (nghttp2_submit_settings(h->session, NGHTTP2_FLAG_NONE, settings, c->client ? 4 : 3) != 0 ||
        nghttp2_session_set_local_window_size(h->session, NGHTTP2_FLAG_NONE, 0,
                                              WINDOW_CONNECTION) != 0) {
        bt_http2_destroy(h);
        return NULL;
    }
    c->kick(c->kick_arg);
    return h;
}

void bt_http2_destroy(struct bt_http2 *h)
{
    if (h != NULL) {
        nghttp2_session_del(h->session);
        bt_free(h);
    }
}

void bt_http2_feed(struct bt_http2 *h, const char *data, size_t len)
{
    if (h->dead || len == 0) {
        return;
    }
    ssize_t n = nghttp2_session_mem_recv(h->session, (const uint8_t *)data, len);
    if (n < 0) {
        bt_log_debug("net", "%s: http2: %s", h->conn->peer, nghttp2_strerror((int)n));
        h->dead = true;
        h->conn->broken = true;
    }
}

static void tick_stream(struct bt_http2 *h, struct bt_http_stream *s)
{
    const struct bt_http_server_opts *o = &h->conn->env->opts;
    uint64_t now = h->conn->now_ns;

    if (s->out_done && !s->request_done && !h->conn->client &&
        now - h->conn->last_read_ns >= o->idle_timeout_ns) {
        cut(h, s, NGHTTP2_NO_ERROR);
    }
    if (s->closed || s->why_set) {
        return; /* on its way out */
    }
    if (!s->requested && !h->conn->client) {
        if (now - s->created_ns >= o->header_timeout_ns) {
            h->conn->broken = true; /* a header block that never ends stops the whole connection */
        }
        return;
    }
    if (bt_outq_len(&s->out) > 0 && now - s->progress_ns >= o->write_timeout_ns) {
        bt_http_stream_set_why(s, BT_HTTP_CLOSE_TIMEOUT);
        s->ended = true;
        cut(h, s, NGHTTP2_CANCEL);
        return;
    }
    if (!s->request_done && !s->responded && !s->unlimited && !h->conn->client &&
        now - h->conn->last_read_ns >= o->idle_timeout_ns) {
        bt_http_stream_set_why(s, BT_HTTP_CLOSE_TIMEOUT);
        bt_http_stream_reply_error(s, 408, "request body did not arrive in time");
    }
}

void bt_http2_tick(struct bt_http2 *h)
{
    struct bt_http_conn *c = h->conn;

    if (h->dead) {
        return;
    }
    for (struct bt_http_stream *s = c->streams; s != NULL; s = s->next) {
        tick_stream(h, s);
    }
    if (c->streams == NULL && !c->client) {
        uint64_t since = c->last_read_ns > c->wait_since_ns ? c->last_read_ns : c->wait_since_ns;
        if (c->now_ns - since >= c->env->opts.idle_timeout_ns) {
            bt_http_conn_drain(c);
        }
    }
}

void bt_http2_pull(struct bt_http2 *h, struct bt_buf *out, size_t max)
{
    const uint8_t *data = NULL;
    size_t begin = out->len;

    while (!h->dead && !h->conn->broken && out->len - begin < max) {
        ssize_t n = nghttp2_session_mem_send(h->session, &data);
        if (n < 0) {
            h->dead = true;
            h->conn->broken = true;
            return;
        }
        if (n == 0) {
            break;
        }
        if (!bt_buf_add(out, data, (size_t)n)) {
            h->dead = true; /* bytes were lost: the stream of frames is cut here */
            h->conn->broken = true;
            return;
        }
    }
    for (struct bt_http_stream *s = h->conn->streams; s != NULL && out->len > begin; s = s->next) {
        bt_http_stream_check_writable(s);
    }
}

bool bt_http2_finished(const struct bt_http2 *h)
{
    return h->dead || (nghttp2_session_want_read(h->session) == 0 &&
                       nghttp2_session_want_write(h->session) == 0);
}

void bt_http2_drain(struct bt_http2 *h)
{
    if (h->dead) {
        return;
    }
    int32_t last = nghttp2_session_get_last_proc_stream_id(h->session);
    if (nghttp2_submit_goaway(h->session, NGHTTP2_FLAG_NONE, last, NGHTTP2_NO_ERROR, NULL, 0) !=
        0) {
        h->conn->broken = true;
    }
}

struct bt_http_stream *bt_http2_request(struct bt_http_conn *c,
                                        const struct bt_http_header *headers, size_t n)
{
    struct bt_http2 *h = c->h2;
    nghttp2_nv *nv = NULL;

    if (h->dead || c->broken) {
        return NULL;
    }
    struct bt_http_stream *s = bt_http_stream_new(c, &vt);
    if (s == NULL) {
        return NULL;
    }
    nghttp2_data_provider body = {.source = {.ptr = s}, .read_callback = on_body_wanted};
    s->requested = true;
    s->unlimited = true;
    s->req.version = 20;
    s->req.peer = c->peer;
    size_t k = build_nv(headers, n, NULL, NULL, &nv);
    int32_t id =
        nv != NULL ? nghttp2_submit_request(h->session, NULL, nv, k, &body, s) : NGHTTP2_ERR_NOMEM;
    bt_free(nv);
    if (id < 0) {
        bt_http_stream_close(s, BT_HTTP_CLOSE_ERROR);
        return NULL;
    }
    s->id = id;
    c->kick(c->kick_arg);
    return s;
}

void bt_http2_ping(struct bt_http2 *h)
{
    if (!h->dead && nghttp2_submit_ping(h->session, NGHTTP2_FLAG_NONE, NULL) == 0) {
        h->conn->ping_out = true;
        h->conn->kick(h->conn->kick_arg);
    }
}
