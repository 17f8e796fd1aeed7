/* HTTP endpoints: which path does what, and those that answer at once. Generation is in openai_generate.c. */

#include "router/openai_http.h"

#include <stdio.h>
#include <string.h>
#include "base/clock.h"
#include "base/mem.h"
#include "router/cluster_view.h"
#include "router/openai_call_int.h"
#include "router/openai_write.h"

#define JSON "application/json"

/* ---- answers ---- */

/* What the client sent to find its answer again; returns how many. */
static size_t echo_headers(struct bt_http_stream *s, struct bt_http_header h[2])
{
    static const char *const names[] = {"x-request-id", "traceparent"};
    const struct bt_http_request *req = bt_http_stream_request(s);
    size_t n = 0;

    for (unsigned i = 0; i < 2; i++) {
        const char *v = bt_http_header_find(req->headers, req->n_headers, names[i]);

        if (v != NULL) {
            h[n++] = (struct bt_http_header){names[i], v};
        }
    }
    return n;
}

static void reply_buf(struct bt_http_stream *s, int status, const char *type, struct bt_buf *b)
{
    struct bt_http_header h[2];

    if (b->failed) {
        bt_http_reset(s, BT_HTTP_INTERNAL);
    } else {
        bt_http_reply(s, status, type, b->data != NULL ? b->data : "", b->len, h,
                      echo_headers(s, h));
    }
    bt_buf_fini(b);
}

void bt_openai_reply_error(struct bt_http_stream *s, const struct bt_api_err *e,
                           const struct bt_http_header *extra, size_t n_extra)
{
    struct bt_http_header h[8];
    struct bt_buf b = {0};
    char retry[24];
    size_t n = 0;

    for (; n < n_extra && n < 6; n++) {
        h[n] = extra[n];
    }
    if (e->retry_ns != 0) {
        snprintf(retry, sizeof retry, "%llu",
                 (unsigned long long)((e->retry_ns + BT_NS_PER_S - 1) / BT_NS_PER_S));
        h[n++] = (struct bt_http_header){"retry-after", retry};
    }
    if (e->code == BT_API_UNAUTHENTICATED) {
        h[n++] = (struct bt_http_header){"www-authenticate", "Bearer"};
    }
    bt_openai_put_error(&b, e);
    bt_http_reply(s, bt_api_http_status(e->code), JSON, b.data != NULL ? b.data : "", b.len, h, n);
    bt_buf_fini(&b);
}

void bt_openai_error_body(int status, const char *message, struct bt_buf *body,
                          const char **content_type, void *arg)
{
    (void)arg;
    *content_type = JSON;
    bt_buf_adds(body, "{\"error\":{\"message\":");
    bt_buf_add_json_str(body, message, strlen(message));
    bt_buf_addf(body, ",\"type\":\"%s\",\"param\":null,\"code\":%d}}",
                status >= 500 && status != 501 && status != 505 ? "internal_error"
                                                                : "invalid_request_error",
                status);
}

/* ---- endpoints that answer at once ---- */

static void get_health(struct bt_router *r, struct bt_http_stream *s)
{
    struct bt_buf b = {0};
    bool ok = !r->draining && bt_rt_core_ready(r->core);

    bt_buf_addf(&b, "{\"status\":\"%s\"}\n",
                ok            ? "ok"
                : r->draining ? "draining"
                              : "no pair can serve");
    reply_buf(s, ok ? 200 : 503, JSON, &b);
}

static void get_live(struct bt_router *r, struct bt_http_stream *s)
{
    struct bt_buf b = {0};

    (void)r;
    bt_buf_adds(&b, "{\"status\":\"ok\"}\n");
    reply_buf(s, 200, JSON, &b);
}

static void get_version(struct bt_router *r, struct bt_http_stream *s)
{
    struct bt_buf b = {0};

    (void)r;
    bt_buf_adds(&b, "{\"version\":\"" BT_VERSION "\"}\n");
    reply_buf(s, 200, JSON, &b);
}

static void get_metrics(struct bt_router *r, struct bt_http_stream *s)
{
    struct bt_buf b = {0};

    bt_router_metrics_render(&r->metrics, r->core, r->request_log, &b);
    reply_buf(s, 200, BT_PROM_CONTENT_TYPE, &b);
}

static void get_dashboard(struct bt_router *r, struct bt_http_stream *s)
{
    struct bt_buf b = {0};

    (void)r;
    bt_buf_add(&b, bt_dashboard_html, bt_dashboard_html_bytes);
    reply_buf(s, 200, "text/html; charset=utf-8", &b);
}

static void get_cluster(struct bt_router *r, struct bt_http_stream *s)
{
    struct bt_buf b = {0};

    if (bt_cluster_json(r, &b) != BT_OK) {
        b.failed = true;
    }
    reply_buf(s, 200, JSON, &b);
}

static void put_model(struct bt_router *r, struct bt_buf *b)
{
    bt_buf_adds(b, "{\"id\":");
    bt_buf_add_json_str(b, r->model_name, strlen(r->model_name));
    bt_buf_addf(
        b, ",\"object\":\"model\",\"created\":%llu,\"owned_by\":\"baton\",\"max_model_len\":%u}",
        (unsigned long long)r->started_unix, bt_rt_core_context(r->core));
}

static void get_models(struct bt_router *r, struct bt_http_stream *s)
{
    struct bt_buf b = {0};

    bt_buf_adds(&b, "{\"object\":\"list\",\"data\":[");
    put_model(r, &b);
    bt_buf_adds(&b, "]}");
    reply_buf(s, 200, JSON, &b);
}

/* "a%2Fb" → "a/b", cut at cap. */
static void percent_decode(const char *s, char *out, size_t cap)
{
    size_t n = 0;

    while (*s != '\0' && n + 1 < cap) {
        unsigned byte = 0;

        if (s[0] == '%' && strspn(s + 1, "0123456789abcdefABCDEF") >= 2 &&
            sscanf(s + 1, "%2x", &byte) == 1) {
            out[n++] = (char)byte;
            s += 3;
        } else {
            out[n++] = *s++;
        }
    }
    out[n] = '\0';
}

static void get_model(struct bt_router *r, struct bt_http_stream *s)
{
    char name[512];
    struct bt_http_header h[2];
    struct bt_api_err e = {0};
    struct bt_buf b = {0};

    percent_decode(bt_http_stream_request(s)->path + strlen("/v1/models/"), name, sizeof name);
    if (strcmp(name, r->model_name) != 0) {
        (void)bt_api_fail(&e, BT_API_NOT_FOUND, "model", "model \"%.200s\" is not served here",
                          name);
        bt_openai_reply_error(s, &e, h, echo_headers(s, h));
        return;
    }
    put_model(r, &b);
    reply_buf(s, 200, JSON, &b);
}

/* ---- dispatch ---- */

static const struct endpoint {
    const char *path;
    const char *method;
    enum { ANYBODY, LOOKER, CLIENT } who;                       /* by the key that is asked for */
    bool prefix;                                                /* path is only its beginning */
    void (*get)(struct bt_router *r, struct bt_http_stream *s); /* NULL: a call with a body */
    enum bt_openai_kind kind;
} endpoints[] = {
    {"/v1/completions", "POST", CLIENT, false, NULL, BT_OPENAI_COMPLETION},
    {"/v1/chat/completions", "POST", CLIENT, false, NULL, BT_OPENAI_CHAT},
    {"/tokenize", "POST", CLIENT, false, NULL, BT_OPENAI_TOKENIZE},
    {"/detokenize", "POST", CLIENT, false, NULL, BT_OPENAI_DETOKENIZE},
    {"/v1/models", "GET", CLIENT, false, get_models, 0},
    {"/v1/models/", "GET", CLIENT, true, get_model, 0},
    {"/v1/cluster", "GET", LOOKER, false, get_cluster, 0},
    {"/health", "GET", ANYBODY, false, get_health, 0},
    {"/live", "GET", ANYBODY, false, get_live, 0},
    {"/metrics", "GET", ANYBODY, false, get_metrics, 0},
    {"/version", "GET", ANYBODY, false, get_version, 0},
    {"/", "GET", ANYBODY, false, get_dashboard, 0},
};

static const struct endpoint *find_endpoint(const char *path)
{
    for (size_t i = 0; i < sizeof endpoints / sizeof endpoints[0]; i++) {
        const struct endpoint *p = &endpoints[i];

        if (p->prefix ? strncmp(path, p->path, strlen(p->path)) == 0 : strcmp(path, p->path) == 0) {
            return p;
        }
    }
    return NULL;
}

static bool method_fits(const struct endpoint *p, const char *method)
{
    return strcmp(method, p->method) == 0 ||
           (strcmp(method, "HEAD") == 0 && strcmp(p->method, "GET") == 0);
}

static void reply_plain_error(struct bt_http_stream *s, int status, const char *text,
                              const char *allow)
{
    struct bt_http_header h[3];
    struct bt_buf b = {0};
    const char *type = JSON;
    size_t n = echo_headers(s, h);

    if (allow != NULL) {
        h[n++] = (struct bt_http_header){"allow", allow};
    }
    bt_openai_error_body(status, text, &b, &type, NULL);
    bt_http_reply(s, status, type, b.data != NULL ? b.data : "", b.len, h, n);
    bt_buf_fini(&b);
}

void bt_openai_on_request(struct bt_http_stream *s, const struct bt_http_request *req, void *arg)
{
    struct bt_router *r = arg;
    const struct endpoint *p = find_endpoint(req->path);
    const char *auth = bt_http_header_find(req->headers, req->n_headers, "authorization");
    struct bt_http_header h[2];
    struct bt_api_err e = {0};
    uint32_t key = 0;

    if (p == NULL) {
        reply_plain_error(s, 404, "no such path", NULL);
    } else if (!method_fits(p, req->method)) {
        reply_plain_error(s, 405, "method not allowed",
                          strcmp(p->method, "GET") == 0 ? "GET, HEAD" : p->method);
    } else if ((p->who == CLIENT && !bt_router_key_find(r, auth, &key)) ||
               (p->who == LOOKER && !bt_router_may_look(r, auth))) {
        (void)bt_api_fail(&e, BT_API_UNAUTHENTICATED, NULL, "a missing or wrong API key");
        bt_router_count_refusal(r, &e);
        bt_openai_reply_error(s, &e, h, echo_headers(s, h));
    } else if (p->get != NULL) {
        p->get(r, s);
    } else {
        bt_openai_call_begin(r, s, p->kind, key);
    }
}
