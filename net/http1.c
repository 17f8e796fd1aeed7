/* HTTP/1.1, server side, over llhttp: one exchange at a time, pipelined bytes wait. Bytes in by
 * feed, out by pull; no socket and no clock. It does not upgrade (an Upgrade header is ignored, as
 * the standard allows) and is no proxy. */

#include "net/http_int.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include <llhttp.h>

#include "base/log.h"
#include "base/mem.h"

struct bt_http1 {
    struct bt_http_conn *conn;
    llhttp_t parser;
    struct bt_http_stream *s; /* the exchange that runs, or whose headers arrive */
    struct bt_buf stash;      /* bytes behind the request that runs */
    struct bt_outq out;
    struct bt_buf name, value; /* header being read */
    struct bt_buf url;
    size_t head_bytes;
    int fail_status; /* set by a parser callback that stops the parser */
    const char *fail_message;
    bool paused;     /* request complete: the next waits for the end of this exchange */
    bool stopped;    /* no more requests on this connection */
    bool keep_alive; /* of the request that runs */
    bool expects_continue;
    bool first; /* no request yet */
};

static const struct bt_http_vt vt;
static const char unspoken_version[] = "only HTTP/1.0, HTTP/1.1 and HTTP/2 are spoken here";

static struct bt_http1 *of(llhttp_t *p)
{
    return p->data;
}

static int stop(struct bt_http1 *h, int status, const char *message)
{
    h->fail_status = status;
    h->fail_message = message;
    return -1;
}

/* ---- parser callbacks ---- */

static int on_message_begin(llhttp_t *p)
{
    struct bt_http1 *h = of(p);

    h->s = bt_http_stream_new(h->conn, &vt);
    if (h->s == NULL) {
        return stop(h, 503, "out of memory");
    }
    h->conn->wait_since_ns = h->conn->now_ns;
    h->head_bytes = 0;
    h->keep_alive = false;
    h->expects_continue = false;
    h->first = false;
    bt_buf_clear(&h->url);
    bt_buf_clear(&h->name);
    bt_buf_clear(&h->value);
    return 0;
}

static int head_part(struct bt_http1 *h, struct bt_buf *to, const char *at, size_t n)
{
    h->head_bytes += n;
    if (h->head_bytes > h->conn->env->opts.header_bytes_max) {
        return stop(h, 431, "request headers too large");
    }
    return bt_buf_add(to, at, n) ? 0 : stop(h, 503, "out of memory");
}

static int on_url(llhttp_t *p, const char *at, size_t n)
{
    return head_part(of(p), &of(p)->url, at, n);
}

static int on_header_field(llhttp_t *p, const char *at, size_t n)
{
    return head_part(of(p), &of(p)->name, at, n);
}

static int on_header_value(llhttp_t *p, const char *at, size_t n)
{
    return head_part(of(p), &of(p)->value, at, n);
}

static int store(struct bt_http1 *h, const char *name, size_t name_len, const char *value,
                 size_t value_len)
{
    const struct bt_http_server_opts *o = &h->conn->env->opts;

    while (value_len > 0 && (value[value_len - 1] == ' ' || value[value_len - 1] == '\t')) {
        value_len--;
    }
    /* ":method" and ":path" take two entries and a few bytes more than the limits say */
    switch (bt_hstore_add(&h->s->head, name, name_len, value != NULL ? value : "", value_len,
                          o->header_bytes_max + 2 * (size_t)o->headers_max + 64,
                          o->headers_max + 2)) {
    case BT_HSTORE_OK:
        return 0;
    case BT_HSTORE_LIMIT:
        return stop(h, 431, "too many request headers");
    case BT_HSTORE_BAD:
        return stop(h, 400, "bad character in a request header");
    case BT_HSTORE_NOMEM:
        break;
    }
    return stop(h, 503, "out of memory");
}

static int on_header_value_complete(llhttp_t *p)
{
    struct bt_http1 *h = of(p);

    if (h->name.len == 0 || h->name.data[0] == ':') {
        return stop(h, 400, "bad request header name");
    }
    int rc = store(h, h->name.data, h->name.len, h->value.data, h->value.len);
    bt_buf_clear(&h->name);
    bt_buf_clear(&h->value);
    return rc;
}

static int on_headers_complete(llhttp_t *p)
{
    struct bt_http1 *h = of(p);
    struct bt_http_stream *s = h->s;
    const char *method = llhttp_method_name((llhttp_method_t)llhttp_get_method(p));
    int version = llhttp_get_http_major(p) * 10 + llhttp_get_http_minor(p);

    if (version != 10 && version != 11) {
        return stop(h, 505, unspoken_version);
    }
    if (llhttp_get_method(p) == HTTP_CONNECT) {
        return stop(h, 501, "CONNECT is not supported");
    }
    int rc = store(h, ":method", 7, method, strlen(method));
    if (rc == 0) {
        rc = store(h, ":path", 5, h->url.data, h->url.len);
    }
    if (rc != 0) {
        return rc;
    }
    if (!bt_hstore_finish(&s->head)) {
        return stop(h, 503, "out of memory");
    }
    if (!bt_http_stream_fill_request(s, version)) {
        return stop(h, 400, "bad request target or content-length");
    }
    p->upgrade = 0;
    h->keep_alive = version == 11 && llhttp_should_keep_alive(p) != 0 && !h->conn->draining;
    s->req.has_body = (p->flags & F_CHUNKED) != 0 ||
                      (s->req.content_length != UINT64_MAX && s->req.content_length > 0);
    const char *expect = bt_http_header_find(s->req.headers, s->req.n_headers, "expect");
    h->expects_continue = expect != NULL && strcasecmp(expect, "100-continue") == 0 &&
                          s->req.has_body && version == 11;
    bt_http_stream_on_request(s);
    if (h->expects_continue && !s->responded) {
        static const char go_on[] = "HTTP/1.1 100 Continue\r\n\r\n";
        h->expects_continue = false;
        if (!bt_outq_add(&h->out, go_on, sizeof go_on - 1)) {
            return stop(h, 503, "out of memory");
        }
    }
    if (s->rejected && s->req.has_body) {
        h->stopped =
            true; /* a body that nobody wants: the answer goes out, then the connection closes */
    }
    return h->stopped ? -1 : 0;
}

static int on_body(llhttp_t *p, const char *at, size_t n)
{
    struct bt_http1 *h = of(p);

    if (!bt_http_stream_on_data(h->s, at, n)) {
        return stop(h, 413, "request body too large");
    }
    return h->conn->broken || h->stopped ? -1 : 0;
}

static int on_message_complete(llhttp_t *p)
{
    struct bt_http1 *h = of(p);

    bt_http_stream_on_end(h->s);
    return HPE_PAUSED;
}

static const llhttp_settings_t settings = {
    .on_message_begin = on_message_begin,
    .on_url = on_url,
    .on_header_field = on_header_field,
    .on_header_value = on_header_value,
    .on_header_value_complete = on_header_value_complete,
    .on_headers_complete = on_headers_complete,
    .on_body = on_body,
    .on_message_complete = on_message_complete,
};

/* ---- responses ---- */

static void add_out(struct bt_http1 *h, const void *p, size_t n)
{
    if (!bt_outq_add(&h->out, p, n)) {
        h->conn->broken =
            true; /* out of memory in the middle of a response: nothing sensible can follow */
        if (h->s != NULL) {
            bt_http_stream_set_why(h->s, BT_HTTP_CLOSE_ERROR);
        }
    }
    h->conn->kick(h->conn->kick_arg);
}

/* Connection management belongs to this file. */
static bool hop_header(const char *name)
{
    return strcmp(name, "connection") == 0 || strcmp(name, "transfer-encoding") == 0 ||
           strcmp(name, "keep-alive") == 0 || strcmp(name, "date") == 0;
}

static void h1_respond(struct bt_http_stream *s, int status, const struct bt_http_header *headers,
                       size_t n, bool end)
{
    struct bt_http1 *h = s->conn->h1;
    struct bt_buf b = {0};
    bool has_length = false;

    if (s->conn->draining || h->stopped || (s->rejected && s->req.has_body) ||
        h->expects_continue) {
        h->keep_alive =
            false; /* expects_continue: the client may or may not send the body it asked about */
    }
    bt_buf_addf(&b, "HTTP/1.1 %d %s\r\n", status, bt_http_status_text(status));
    for (size_t i = 0; i < n; i++) {
        if (hop_header(headers[i].name) || !bt_http_header_sendable(&headers[i])) {
            continue;
        }
        if (strcmp(headers[i].name, "content-length") == 0) {
            has_length = true;
            s->length_left = strtoull(headers[i].value, NULL, 10);
        }
        bt_buf_adds(&b, headers[i].name);
        bt_buf_adds(&b, ": ");
        bt_buf_adds(&b, headers[i].value);
        bt_buf_adds(&b, "\r\n");
    }
    if (!has_length && !s->no_body) {
        if (end) {
            bt_buf_adds(&b, "content-length: 0\r\n");
        } else if (s->req.version == 11) {
            bt_buf_adds(&b, "transfer-encoding: chunked\r\n");
            s->chunked = true;
        } else {
            s->until_close = true;
            h->keep_alive = false;
        }
    }
    if (s->conn->env->date[0] != '\0') {
        bt_buf_addf(&b, "date: %s\r\n", s->conn->env->date);
    }
    bt_buf_adds(&b, h->keep_alive ? "\r\n" : "connection: close\r\n\r\n");
    if (b.failed) {
        s->conn->broken = true;
        bt_http_stream_set_why(s, BT_HTTP_CLOSE_ERROR);
        s->conn->kick(s->conn->kick_arg);
    } else {
        add_out(h, b.data, b.len);
    }
    bt_buf_fini(&b);
}

/* "1f\r\n" at the end of out; returns where it begins. */
static size_t chunk_size(size_t len, char out[24])
{
    size_t at = 22;

    out[22] = '\r';
    out[23] = '\n';
    do {
        out[--at] = "0123456789abcdef"[len & 15];
        len >>= 4;
    } while (len > 0);
    return at;
}

static void h1_write(struct bt_http_stream *s, const void *data, size_t len)
{
    struct bt_http1 *h = s->conn->h1;
    char size[24];

    if (s->chunked) {
        size_t at = chunk_size(len, size);
        add_out(h, size + at, sizeof size - at);
        add_out(h, data, len);
        add_out(h, "\r\n", 2);
        return;
    }
    if (!s->until_close) {
        if (len > s->length_left) {
            bt_log_warn("net", "response longer than its content-length: cut");
            len = (size_t)s->length_left;
        }
        s->length_left -= len;
    }
    add_out(h, data, len);
}

static void h1_end(struct bt_http_stream *s, const struct bt_http_header *trailers, size_t n)
{
    struct bt_http1 *h = s->conn->h1;

    if (s->chunked && !s->no_body) {
        struct bt_buf b = {0};
        bt_buf_adds(&b, "0\r\n");
        for (size_t i = 0; i < n; i++) {
            if (bt_http_header_sendable(&trailers[i])) {
                bt_buf_adds(&b, trailers[i].name);
                bt_buf_adds(&b, ": ");
                bt_buf_adds(&b, trailers[i].value);
                bt_buf_adds(&b, "\r\n");
            }
        }
        bt_buf_adds(&b, "\r\n");
        if (b.failed) {
            s->conn->broken = true;
        } else {
            add_out(h, b.data, b.len);
        }
        bt_buf_fini(&b);
    } else if (!s->until_close && !s->no_body && s->length_left > 0) {
        bt_log_warn("net", "response shorter than its content-length: connection cut");
        s->conn->broken = true;
        bt_http_stream_set_why(s, BT_HTTP_CLOSE_ERROR);
    }
    s->conn->kick(s->conn->kick_arg);
}

static void h1_reset(struct bt_http_stream *s, enum bt_http_code code)
{
    (void)code;
    s->conn->broken = true;
    s->conn->kick(s->conn->kick_arg);
}

static size_t h1_queued(const struct bt_http_stream *s)
{
    return bt_outq_len(&s->conn->h1->out);
}

static const struct bt_http_vt vt = {
    .respond = h1_respond,
    .write = h1_write,
    .end = h1_end,
    .reset = h1_reset,
    .queued = h1_queued,
};

/* ---- the connection ---- */

struct bt_http1 *bt_http1_create(struct bt_http_conn *c)
{
    struct bt_http1 *h = bt_calloc(1, sizeof *h);

    if (h == NULL) {
        return NULL;
    }
    h->conn = c;
    h->first = true;
    llhttp_init(&h->parser, HTTP_REQUEST, &settings);
    h->parser.data = h;
    return h;
}

void bt_http1_destroy(struct bt_http1 *h)
{
    if (h == NULL) {
        return;
    }
    bt_buf_fini(&h->stash);
    bt_buf_fini(&h->name);
    bt_buf_fini(&h->value);
    bt_buf_fini(&h->url);
    bt_outq_fini(&h->out);
    bt_free(h);
}

/* The request cannot go on: answer it if nothing was answered yet, and take no more from this
 * connection. */
static void fail(struct bt_http1 *h, int status, const char *message)
{
    h->stopped = true;
    h->keep_alive = false;
    bt_buf_clear(&h->stash);
    if (h->s == NULL) {
        h->s = bt_http_stream_new(h->conn, &vt);
        if (h->s == NULL) {
            h->conn->broken = true;
            return;
        }
    }
    if (h->s->ended) {
        return; /* answered already: only the rest of the body is bad */
    }
    bt_http_stream_set_why(h->s, status == 413   ? BT_HTTP_CLOSE_LIMIT
                                 : status == 408 ? BT_HTTP_CLOSE_TIMEOUT
                                                 : BT_HTTP_CLOSE_ERROR);
    if (h->s->responded) {
        h->conn->broken = true;
    } else {
        bt_http_stream_reply_error(h->s, status, message);
    }
}

/* Whether the rest of a method, as far as it is here, could be one that the parser does not know: the
 * characters of a token, then a space. Other bytes are no HTTP. */
static bool is_method(const char *at, const char *end)
{
    const char *p = at;

    if (at == NULL) {
        return false;
    }
    while (p < end && (isalnum((unsigned char)*p) != 0 ||
                       (*p != 0 && strchr("!#$%&'*+-.^_`|~", *p) != NULL))) {
        p++;
    }
    return p != at && (p == end || *p == ' ');
}

static void run(struct bt_http1 *h, const char *data, size_t len)
{
    llhttp_errno_t e = llhttp_execute(&h->parser, data, len);

    if (e == HPE_OK || h->conn->broken) {
        return;
    }
    if (e == HPE_PAUSED) {
        const char *pos = llhttp_get_error_pos(&h->parser);
        h->paused = true;
        if (!bt_buf_add(&h->stash, pos, (size_t)(data + len - pos))) {
            h->conn->broken = true;
        }
        return;
    }
    if (h->stopped) {
        return;
    }
    if (h->fail_status != 0) {
        fail(h, h->fail_status, h->fail_message);
    } else if (e == HPE_INVALID_METHOD && is_method(llhttp_get_error_pos(&h->parser), data + len)) {
        fail(h, 501, "unknown request method");
    } else if (e == HPE_INVALID_VERSION && llhttp_get_method(&h->parser) != HTTP_PRI) {
        fail(h, 505, unspoken_version);
    } else {
        char message[160];
        const char *reason = llhttp_get_error_reason(&h->parser);
        (void)snprintf(message, sizeof message, "malformed HTTP/1.1 request: %s (%s)",
                       reason != NULL ? reason : "", llhttp_errno_name(e));
        fail(h, 400, message);
    }
}

/* Ends exchanges that are over and starts those that wait; user callbacks may add output. */
static void settle(struct bt_http1 *h)
{
    while (h->s != NULL && h->s->ended && (h->s->request_done || h->stopped) &&
           bt_outq_len(&h->out) == 0 && !h->conn->broken) {
        struct bt_http_stream *s = h->s;
        h->s = NULL;
        bt_http_stream_close(s, BT_HTTP_CLOSE_DONE);
        if (!h->keep_alive || h->conn->draining) {
            h->stopped = true;
            bt_buf_clear(&h->stash);
            return;
        }
        h->conn->wait_since_ns = h->conn->now_ns;
        h->paused = false;
        llhttp_resume(&h->parser);
        if (h->stash.len > 0) {
            struct bt_buf next = h->stash;
            h->stash = (struct bt_buf){0};
            run(h, next.data, next.len);
            bt_buf_fini(&next);
        }
    }
    if (h->s != NULL && h->s->ended && !h->s->request_done && bt_outq_len(&h->out) == 0 &&
        !h->conn->broken) {
        bt_http_stream_report(
            h->s, BT_HTTP_CLOSE_DONE); /* only the rest of a body is awaited, to throw it away */
    }
}

void bt_http1_feed(struct bt_http1 *h, const char *data, size_t len)
{
    if (h->stopped || len == 0) {
        return;
    }
    if (h->paused) {
        if (!bt_buf_add(&h->stash, data, len)) {
            h->conn->broken = true;
        }
        return;
    }
    run(h, data, len);
    settle(h);
}

void bt_http1_eof(struct bt_http1 *h)
{
    if (h->s != NULL && !h->s->ended) {
        bt_http_stream_set_why(h->s, BT_HTTP_CLOSE_PEER);
        h->conn->broken = true;
        return;
    }
    h->stopped = true;
    h->keep_alive = false;
    bt_buf_clear(&h->stash);
}

void bt_http1_tick(struct bt_http1 *h)
{
    const struct bt_http_server_opts *o = &h->conn->env->opts;
    uint64_t now = h->conn->now_ns;

    if (h->stopped) {
        return;
    }
    if (h->s == NULL) {
        uint64_t limit = h->first ? o->header_timeout_ns : o->idle_timeout_ns;
        if (now - h->conn->wait_since_ns >= limit) {
            h->stopped = true;
        }
    } else if (!h->s->requested) {
        if (now - h->conn->wait_since_ns >= o->header_timeout_ns) {
            fail(h, 408, "request headers did not arrive in time");
        }
    } else if (!h->s->request_done && now - h->conn->last_read_ns >= o->idle_timeout_ns) {
        fail(h, 408, "request body did not arrive in time");
    }
}

void bt_http1_pull(struct bt_http1 *h, struct bt_buf *out, size_t max)
{
    size_t room = max;

    settle(h);
    while (room > 0 && bt_outq_len(&h->out) > 0 && !h->conn->broken) {
        size_t n = bt_outq_len(&h->out) < room ? bt_outq_len(&h->out) : room;
        if (!bt_buf_reserve(out, n)) {
            h->conn->broken = true;
            return;
        }
        (void)bt_outq_take(&h->out, out->data + out->len, n); /* n was asked for what is there */
        out->len += n;
        out->data[out->len] = '\0'; /* reserve left room for it */
        room -= n;
        if (h->s != NULL) {
            h->s->progress_ns = h->conn->now_ns;
            bt_http_stream_check_writable(h->s);
        }
        settle(h);
    }
}

bool bt_http1_want_read(const struct bt_http1 *h)
{
    return !h->stopped && h->stash.len < BT_HTTP_STASH_MAX;
}

bool bt_http1_finished(const struct bt_http1 *h)
{
    return h->stopped && h->s == NULL && bt_outq_len(&h->out) == 0;
}

void bt_http1_drain(struct bt_http1 *h)
{
    h->keep_alive = false;
    if (h->s == NULL) {
        h->stopped = true;
    }
}
