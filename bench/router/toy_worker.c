/* OpenAI servers that compute nothing, for routers that speak HTTP with their workers. Owns their listeners and the
 * streams that get tokens. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/clock.h"
#include "base/mem.h"
#include "bench/router/toy_nodes.h"
#include "net/http.h"
#include "net/loop.h"

struct worker;
struct stream {
    struct worker *w;
    struct bt_http_stream *s;
    struct stream *prev, *next;
    struct bt_buf body;
    uint32_t slot, index;
    bool running;
};

struct worker {
    struct bench_shared *b;
    struct bt_net_loop *loop;
    const struct toy_opts *o;
    enum { WORKER_PREFILL, WORKER_DECODE } role;
    struct bt_http_server *http;
    struct stream *streams;
    struct bt_timer timer;
    uint64_t due;
};

static void put_token(struct stream *x, uint64_t now)
{
    struct bench_shared *b = x->w->b;
    bool last = x->index + 1 == b->max_tokens;
    char out[512];
    int n = snprintf(
        out, sizeof out,
        "data: {\"id\":\"cmpl-%08x\",\"object\":\"%s\",\"created\":1700000000,\"model\":\"m\","
        "\"choices\":[{\"index\":0,%s\"%s\"%s,\"logprobs\":null,\"finish_reason\":%s}]}\n\n%s",
        x->slot, b->chat ? "chat.completion.chunk" : "text_completion",
        b->chat ? "\"delta\":{\"content\":" : "\"text\":", b->texts[x->index % BENCH_TEXT_TOKENS],
        b->chat ? "}" : "", last ? "\"length\"" : "null", last ? "data: [DONE]\n\n" : "");

    bench_sent(b, x->slot, x->index++, now);
    (void)bt_http_write(x->s, out, (size_t)n);
    if (last) {
        x->running = false;
        bt_http_end(x->s);
    }
}

static void on_step(struct bt_timer *t, void *arg)
{
    struct worker *w = arg;
    uint64_t now = bt_clock_ns();

    for (struct stream *x = w->streams; x != NULL; x = x->next) {
        if (x->running) {
            put_token(x, now);
        }
    }
    while (w->due <= now) {
        w->due += w->o->step_ns;
    }
    bt_timer_start(w->loop, t, w->due - now, on_step, w);
}

static void on_data(struct bt_http_stream *s, void *user, const char *data, size_t len)
{
    (void)s;
    (void)bt_buf_add(&((struct stream *)user)->body, data, len);
}

static void on_end(struct bt_http_stream *s, void *user)
{
    static const struct bt_http_header sse[] = {{"content-type", "text/event-stream"}};
    struct stream *x = user;
    const char *seed = x->body.data != NULL ? strstr(x->body.data, "\"seed\":") : NULL;

    if (x->w->role == WORKER_PREFILL || seed == NULL) {
        bt_http_reply(s, 200, "application/json", "{}", 2, NULL, 0);
        return;
    }
    x->slot = (uint32_t)strtoul(seed + 7, NULL, 10);
    x->running = true;
    bt_http_respond(s, 200, sse, 1);
}

static void on_close(struct bt_http_stream *s, void *user, enum bt_http_close why)
{
    struct stream *x = user;

    (void)s;
    (void)why;
    *(x->prev != NULL ? &x->prev->next : &x->w->streams) = x->next;
    if (x->next != NULL) {
        x->next->prev = x->prev;
    }
    bt_buf_fini(&x->body);
    bt_free(x);
}

static void on_request(struct bt_http_stream *s, const struct bt_http_request *req, void *arg)
{
    static const struct bt_http_events events = {
        .on_data = on_data, .on_end = on_end, .on_close = on_close};
    static const char info[] =
        "{\"model_path\":\"m\",\"served_model_name\":\"m\",\"is_generation\":true,"
        "\"data\":[{\"id\":\"m\",\"object\":\"model\"}]}";
    struct worker *w = arg;
    struct stream *x;

    if (strcmp(req->method, "POST") != 0) {
        bt_http_reply(s, 200, "application/json", info, sizeof info - 1, NULL, 0);
        return;
    }
    x = bt_calloc(1, sizeof *x);
    if (x == NULL) {
        bt_http_reset(s, BT_HTTP_INTERNAL);
        return;
    }
    *x = (struct stream){.w = w, .s = s, .next = w->streams};
    if (w->streams != NULL) {
        w->streams->prev = x;
    }
    w->streams = x;
    bt_http_bind(s, &events, x);
}

static void on_watch(struct bt_timer *t, void *arg)
{
    struct worker *w = arg;

    if (atomic_load(&w->b->stop)) {
        bt_net_loop_stop(w->loop);
        return;
    }
    bt_timer_start(w->loop, t, 50 * BT_NS_PER_MS, on_watch, w);
}

static void worker_start(struct worker *w, uint16_t port)
{
    char listen[32];
    struct bt_err err = {0};

    snprintf(listen, sizeof listen, "127.0.0.1:%u", port);
    struct bt_http_server_opts opts = {.listen = listen,
                                       .on_request = on_request,
                                       .arg = w,
                                       .idle_timeout_ns = 3600 * BT_NS_PER_S};

    if (bt_http_server_create(w->loop, &opts, &w->http, &err) != BT_OK) {
        fprintf(stderr, "bench-router: worker: %s\n", err.msg);
        exit(1);
    }
}

void toy_workers_run(struct bench_shared *b, const struct toy_opts *o, uint16_t port)
{
    uint32_t n = o->n_prefill + o->n_decode;
    struct worker *w = bt_calloc(n, sizeof *w);
    struct bt_net_loop *loop = NULL;
    struct bt_timer watch = {.active = false};

    if (w == NULL || bt_net_loop_create(&loop) != BT_OK) {
        fprintf(stderr, "bench-router: out of memory\n");
        exit(1);
    }
    for (uint32_t i = 0; i < n; i++) {
        w[i] = (struct worker){.b = b, .loop = loop, .o = o};
        w[i].role = i < o->n_prefill ? WORKER_PREFILL : WORKER_DECODE;
        worker_start(&w[i], (uint16_t)(port + i));
        if (w[i].role == WORKER_DECODE) {
            w[i].due = bt_clock_ns() + o->step_ns * (i - o->n_prefill) / o->n_decode;
            bt_timer_start(loop, &w[i].timer, o->step_ns, on_step, &w[i]);
        }
    }
    bt_timer_start(loop, &watch, BT_NS_PER_MS, on_watch, &w[0]);
    bt_net_loop_run(loop);
    bt_timer_stop(loop, &watch);
    for (uint32_t i = 0; i < n; i++) {
        bt_timer_stop(loop, &w[i].timer);
        bt_http_server_close(w[i].http);
    }
    bt_net_loop_destroy(loop);
    bt_free(w);
}
