/* What an exchange is in both versions: header blocks, the request view, limits of the body, the
 * order of callbacks. It knows no wire format. */

#include "net/http.h"
#include "net/http_int.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"

#define OUTQ_COMPACT ((size_t)64 << 10)

/* ---- byte queue ---- */

bool bt_outq_add(struct bt_outq *q, const void *p, size_t n)
{
    if (q->off == q->b.len) {
        bt_buf_clear(&q->b);
        q->off = 0;
    } else if (q->off >= OUTQ_COMPACT && q->off >= q->b.len / 2) {
        bt_buf_consume(&q->b, q->off);
        q->off = 0;
    }
    return bt_buf_add(&q->b, p, n);
}

size_t bt_outq_take(struct bt_outq *q, void *dst, size_t max)
{
    size_t n = bt_outq_len(q);

    if (n > max) {
        n = max;
    }
    if (n > 0) {
        memcpy(dst, q->b.data + q->off, n);
        q->off += n;
    }
    if (q->off == q->b.len && q->b.cap > OUTQ_COMPACT) {
        bt_outq_fini(q); /* a burst is over: many quiet streams must not keep large buffers */
    }
    return n;
}

void bt_outq_fini(struct bt_outq *q)
{
    bt_buf_fini(&q->b);
    q->off = 0;
}

/* ---- header blocks ---- */

static bool is_token(unsigned char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           (c != '\0' && strchr("!#$%&'*+-.^_`|~", c) != NULL);
}

static bool value_ok(const char *v, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)v[i];
        if ((c < 0x20 && c != '\t') || c == 0x7f) {
            return false;
        }
    }
    return true;
}

enum bt_hstore_result bt_hstore_add(struct bt_hstore *h, const char *name, size_t name_len,
                                    const char *value, size_t value_len, size_t bytes_max,
                                    size_t n_max)
{
    if (h->n >= n_max || name_len > bytes_max || value_len > bytes_max ||
        h->text.len + name_len + value_len + 2 > bytes_max) {
        return BT_HSTORE_LIMIT;
    }
    for (size_t i = name[0] == ':' ? 1 : 0; i < name_len; i++) {
        if (!is_token((unsigned char)name[i])) {
            return BT_HSTORE_BAD;
        }
    }
    if (name_len == 0 || !value_ok(value, value_len)) {
        return BT_HSTORE_BAD;
    }
    if (h->n == h->cap) {
        size_t cap = h->cap > 0 ? h->cap * 2 : 16;
        struct bt_hstore_at *at = bt_realloc(h->at, cap * sizeof *at);
        if (at == NULL) {
            return BT_HSTORE_NOMEM;
        }
        h->at = at;
        h->cap = cap;
    }
    h->at[h->n].name = (uint32_t)h->text.len;
    for (size_t i = 0; i < name_len; i++) {
        char c = name[i];
        bt_buf_addc(&h->text, c >= 'A' && c <= 'Z' ? (char)(c + 32) : c);
    }
    bt_buf_addc(&h->text, '\0');
    h->at[h->n].value = (uint32_t)h->text.len;
    bt_buf_add(&h->text, value, value_len);
    bt_buf_addc(&h->text, '\0');
    if (h->text.failed) {
        return BT_HSTORE_NOMEM;
    }
    h->n++;
    return BT_HSTORE_OK;
}

bool bt_hstore_finish(struct bt_hstore *h)
{
    bt_free(h->v);
    h->n_v = 0;
    h->v = bt_alloc((h->n + 1) * sizeof *h->v);
    if (h->v == NULL) {
        return false;
    }
    for (size_t i = 0; i < h->n; i++) {
        const char *name = h->text.data + h->at[i].name;
        if (name[0] != ':') {
            h->v[h->n_v].name = name;
            h->v[h->n_v].value = h->text.data + h->at[i].value;
            h->n_v++;
        }
    }
    return true;
}

char *bt_hstore_pseudo(struct bt_hstore *h, const char *name)
{
    for (size_t i = 0; i < h->n; i++) {
        if (strcmp(h->text.data + h->at[i].name, name) == 0) {
            return h->text.data + h->at[i].value;
        }
    }
    return NULL;
}

void bt_hstore_fini(struct bt_hstore *h)
{
    bt_buf_fini(&h->text);
    bt_free(h->at);
    bt_free(h->v);
    memset(h, 0, sizeof *h);
}

const char *bt_http_header_find(const struct bt_http_header *headers, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++) {
        if (strcmp(headers[i].name, name) == 0) {
            return headers[i].value;
        }
    }
    return NULL;
}

bool bt_http_header_sendable(const struct bt_http_header *h)
{
    size_t n = strlen(h->name);
    bool ok = n > 0 && value_ok(h->value, strlen(h->value));

    for (size_t i = 0; ok && i < n; i++) {
        ok = is_token((unsigned char)h->name[i]) && !(h->name[i] >= 'A' && h->name[i] <= 'Z');
    }
    if (!ok) {
        bt_log_warn("net", "header \"%.40s\" left out: not sendable", h->name);
    }
    return ok;
}

/* ---- query strings ---- */

static int hex(char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    c = (char)(c | 32);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static void query_decode(const char *v, size_t n, char *out, size_t cap)
{
    size_t w = 0;

    for (size_t i = 0; i < n && w + 1 < cap; i++) {
        char c = v[i] == '+' ? ' ' : v[i];
        if (c == '%' && i + 2 < n && hex(v[i + 1]) >= 0 && hex(v[i + 2]) >= 0) {
            c = (char)(hex(v[i + 1]) * 16 + hex(v[i + 2]));
            i += 2;
        }
        out[w++] = c;
    }
    out[w] = '\0';
}

bool bt_http_query_get(const char *query, const char *name, char *out, size_t cap)
{
    size_t name_len = strlen(name);

    while (*query != '\0') {
        size_t len = strcspn(query, "&");
        if (len >= name_len && memcmp(query, name, name_len) == 0 &&
            (len == name_len || query[name_len] == '=')) {
            size_t skip = len == name_len ? name_len : name_len + 1;
            query_decode(query + skip, len - skip, out, cap);
            return true;
        }
        query += len + (query[len] == '&' ? 1 : 0);
    }
    return false;
}

const char *bt_http_status_text(int status)
{
    static const struct {
        int status;
        const char *text;
    } table[] = {
        {100, "Continue"},
        {200, "OK"},
        {201, "Created"},
        {202, "Accepted"},
        {204, "No Content"},
        {301, "Moved Permanently"},
        {302, "Found"},
        {304, "Not Modified"},
        {307, "Temporary Redirect"},
        {308, "Permanent Redirect"},
        {400, "Bad Request"},
        {401, "Unauthorized"},
        {403, "Forbidden"},
        {404, "Not Found"},
        {405, "Method Not Allowed"},
        {408, "Request Timeout"},
        {409, "Conflict"},
        {411, "Length Required"},
        {413, "Content Too Large"},
        {415, "Unsupported Media Type"},
        {417, "Expectation Failed"},
        {422, "Unprocessable Content"},
        {426, "Upgrade Required"},
        {429, "Too Many Requests"},
        {431, "Request Header Fields Too Large"},
        {499, "Client Closed Request"},
        {500, "Internal Server Error"},
        {501, "Not Implemented"},
        {502, "Bad Gateway"},
        {503, "Service Unavailable"},
        {504, "Gateway Timeout"},
        {505, "HTTP Version Not Supported"},
    };

    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (table[i].status == status) {
            return table[i].text;
        }
    }
    return "";
}

/* ---- life of a stream ---- */

struct bt_http_stream *bt_http_stream_new(struct bt_http_conn *c, const struct bt_http_vt *vt)
{
    struct bt_http_stream *s = bt_calloc(1, sizeof *s);

    if (s == NULL) {
        return NULL;
    }
    s->conn = c;
    s->vt = vt;
    s->created_ns = s->progress_ns = c->now_ns;
    s->req.version = 11;
    s->rst_code = UINT32_MAX;
    s->next = c->streams;
    if (c->streams != NULL) {
        c->streams->prev = s;
    }
    c->streams = s;
    c->n_streams++;
    return s;
}

static bool parse_length(const char *text, uint64_t *out)
{
    uint64_t v = 0;

    if (*text == '\0') {
        return false;
    }
    for (; *text != '\0'; text++) {
        if (*text < '0' || *text > '9' || v > (UINT64_MAX - 9) / 10) {
            return false;
        }
        v = v * 10 + (uint64_t)(*text - '0');
    }
    *out = v;
    return true;
}

bool bt_http_stream_fill_request(struct bt_http_stream *s, int version)
{
    struct bt_http_request *r = &s->req;
    char *path = bt_hstore_pseudo(&s->head, ":path");

    r->method = bt_hstore_pseudo(&s->head, ":method");
    if (r->method == NULL || path == NULL || path[0] == '\0') {
        return false;
    }
    r->headers = s->head.v;
    r->n_headers = s->head.n_v;
    r->authority = bt_hstore_pseudo(&s->head, ":authority");
    if (path[0] != '/' && path[0] != '*') { /* absolute form, as sent to proxies */
        char *host = strstr(path, "://");
        if (host == NULL) {
            return false;
        }
        path = strchr(host + 3, '/');
        if (path == NULL) {
            return false;
        }
    }
    char *query = strchr(path, '?');
    if (query != NULL) {
        *query++ = '\0';
    }
    r->path = path;
    r->query = query != NULL ? query : "";
    if (r->authority == NULL) {
        r->authority = bt_http_header_find(r->headers, r->n_headers, "host");
    }
    if (r->authority == NULL) {
        r->authority = "";
    }
    r->peer = s->conn->peer;
    r->version = version;
    r->tls = s->conn->tls;
    r->content_length = UINT64_MAX;
    const char *length = bt_http_header_find(r->headers, r->n_headers, "content-length");
    if (length != NULL && !parse_length(length, &r->content_length)) {
        return false;
    }
    s->no_body = strcmp(r->method, "HEAD") == 0;
    return true;
}

void bt_http_stream_on_request(struct bt_http_stream *s)
{
    const struct bt_http_env *env = s->conn->env;

    if (s->conn->broken) {
        return; /* the server was closed by a callback before this one */
    }
    s->requested = true;
    if (env->grpc != NULL && env->grpc(s, &s->req, env->grpc_arg)) {
        return;
    }
    if (s->req.content_length != UINT64_MAX && s->req.content_length > env->opts.body_bytes_max) {
        bt_http_stream_reply_error(s, 413, "request body too large");
        return;
    }
    if (env->opts.on_request != NULL) {
        env->opts.on_request(s, &s->req, env->opts.arg);
    } else {
        bt_http_stream_reply_error(s, 404, "not found");
    }
}

bool bt_http_stream_on_data(struct bt_http_stream *s, const char *data, size_t len)
{
    s->body_bytes += len;
    if (!s->unlimited && s->body_bytes > s->conn->env->opts.body_bytes_max) {
        return false;
    }
    if (s->ev != NULL && s->ev->on_data != NULL && !s->rejected && len > 0) {
        s->ev->on_data(s, s->user, data, len);
    }
    return true;
}

void bt_http_stream_on_end(struct bt_http_stream *s)
{
    s->request_done = true;
    if (s->ev != NULL && s->ev->on_end != NULL && !s->rejected) {
        s->ev->on_end(s, s->user);
    }
}

void bt_http_stream_check_writable(struct bt_http_stream *s)
{
    if (!s->over_high || s->vt->queued(s) > s->conn->env->opts.write_low) {
        return;
    }
    s->over_high = false;
    if (s->ev != NULL && s->ev->on_writable != NULL && !s->ended) {
        s->ev->on_writable(s, s->user);
    }
}

void bt_http_stream_set_why(struct bt_http_stream *s, enum bt_http_close why)
{
    if (!s->why_set) {
        s->why_set = true;
        s->why = why;
    }
}

void bt_http_stream_report(struct bt_http_stream *s, enum bt_http_close why)
{
    const struct bt_http_events *ev = s->ev;

    if (s->closed) {
        return;
    }
    s->closed = true;
    s->ended = true;
    s->ev = NULL;
    if (ev != NULL && ev->on_close != NULL) {
        ev->on_close(s, s->user, s->why_set ? s->why : why);
    }
}

void bt_http_stream_close(struct bt_http_stream *s, enum bt_http_close why)
{
    struct bt_http_conn *c = s->conn;

    bt_http_stream_report(s, why);
    if (s->prev != NULL) {
        s->prev->next = s->next;
    } else {
        c->streams = s->next;
    }
    if (s->next != NULL) {
        s->next->prev = s->prev;
    }
    c->n_streams--;
    bt_outq_fini(&s->out);
    bt_hstore_fini(&s->head);
    bt_hstore_fini(&s->trailers);
    bt_free(s);
}

void bt_http_stream_reply_error(struct bt_http_stream *s, int status, const char *message)
{
    const struct bt_http_env *env = s->conn->env;
    const char *type = "text/plain";
    struct bt_buf body = {0};

    s->rejected = true;
    if (env->opts.error_body != NULL) {
        env->opts.error_body(status, message, &body, &type, env->opts.arg);
    } else {
        bt_buf_addf(&body, "%s\n", message);
    }
    bt_http_reply(s, status, type, body.data, body.len, NULL, 0);
    bt_buf_fini(&body);
}

/* ---- user calls ---- */

void bt_http_bind(struct bt_http_stream *s, const struct bt_http_events *ev, void *user)
{
    if (!s->closed) {
        s->ev = ev;
    }
    s->user = user;
}

void *bt_http_stream_user(const struct bt_http_stream *s)
{
    return s->user;
}

const struct bt_http_request *bt_http_stream_request(const struct bt_http_stream *s)
{
    return &s->req;
}

static void respond(struct bt_http_stream *s, int status, const struct bt_http_header *headers,
                    size_t n, bool end)
{
    if (s->responded || s->closed) {
        if (!s->closed && !s->rejected) {
            bt_log_warn("net", "second response on one request ignored (%d)", status);
        }
        return;
    }
    s->responded = true;
    if (status == 204 || status == 304) {
        s->no_body = true;
    }
    s->vt->respond(s, status, headers, n, end);
    if (end) {
        s->ended = true;
    }
}

void bt_http_respond(struct bt_http_stream *s, int status, const struct bt_http_header *headers,
                     size_t n)
{
    respond(s, status, headers, n, false);
}

void bt_http_respond_end(struct bt_http_stream *s, int status, const struct bt_http_header *headers,
                         size_t n)
{
    respond(s, status, headers, n, true);
}

size_t bt_http_write(struct bt_http_stream *s, const void *data, size_t len)
{
    if (s->ended || s->closed) {
        return 0;
    }
    BT_ASSERT(s->responded || s->conn->client);
    if (s->vt->queued(s) == 0) {
        s->progress_ns = s->conn->now_ns;
    }
    if (len > 0 && !s->no_body) {
        s->vt->write(s, data, len);
    }
    size_t queued = s->vt->queued(s);
    if (queued >= s->conn->env->opts.write_high) {
        s->over_high = true;
    }
    return queued;
}

size_t bt_http_queued(const struct bt_http_stream *s)
{
    return s->closed ? 0 : s->vt->queued(s);
}

void bt_http_end_with_trailers(struct bt_http_stream *s, const struct bt_http_header *trailers,
                               size_t n)
{
    if (s->ended || s->closed) {
        return;
    }
    BT_ASSERT(s->responded || s->conn->client);
    s->ended = true;
    s->vt->end(s, trailers, n);
}

void bt_http_end(struct bt_http_stream *s)
{
    bt_http_end_with_trailers(s, NULL, 0);
}

void bt_http_reply(struct bt_http_stream *s, int status, const char *content_type, const void *body,
                   size_t len, const struct bt_http_header *extra, size_t n_extra)
{
    struct bt_http_header h[16];
    char length[24];
    size_t n = 0;

    if (s->responded) {
        respond(s, status, NULL, 0, true); /* says why it is ignored */
        return;
    }
    (void)snprintf(length, sizeof length, "%zu", len);
    if (content_type != NULL) {
        h[n++] = (struct bt_http_header){"content-type", content_type};
    }
    h[n++] = (struct bt_http_header){"content-length", length};
    BT_ASSERT(n_extra <= sizeof h / sizeof h[0] - n);
    for (size_t i = 0; i < n_extra; i++) {
        h[n++] = extra[i];
    }
    if (len == 0) {
        bt_http_respond_end(s, status, h, n);
        return;
    }
    bt_http_respond(s, status, h, n);
    (void)bt_http_write(s, body, len); /* the end follows: nothing to wait for */
    bt_http_end(s);
}

void bt_http_reset(struct bt_http_stream *s, enum bt_http_code code)
{
    if (s->closed) {
        return;
    }
    bt_http_stream_set_why(s, BT_HTTP_CLOSE_RESET);
    s->ended = true;
    s->vt->reset(s, code);
}
