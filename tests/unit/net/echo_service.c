/* The test service; see its header. */

#include "echo_service.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"

#define PIECE       ((size_t)64 << 10)
#define FLOOD_BYTES ((size_t)64 << 20)
#define HIGH        ((size_t)256 << 10)

static const char piece[PIECE];

/* ---- HTTP ---- */

struct exchange {
    struct echo_stats *stats;
    struct bt_buf body;
    size_t left;
    bool echo;
};

static void http_on_data(struct bt_http_stream *s, void *user, const char *data, size_t len)
{
    struct exchange *e = user;

    (void)s;
    bt_buf_add(&e->body, data, len);
}

static void http_on_end(struct bt_http_stream *s, void *user)
{
    struct exchange *e = user;

    if (e->echo) {
        bt_http_reply(s, 200, "application/octet-stream", e->body.data, e->body.len, NULL, 0);
    }
}

static void http_on_writable(struct bt_http_stream *s, void *user)
{
    struct exchange *e = user;

    while (e->left > 0) {
        size_t queued = bt_http_write(s, piece, PIECE);
        e->left -= PIECE;
        e->stats->queued_max = queued > e->stats->queued_max ? queued : e->stats->queued_max;
        if (queued >= HIGH) {
            return;
        }
    }
    bt_http_end(s);
}

static void http_on_close(struct bt_http_stream *s, void *user, enum bt_http_close why)
{
    struct exchange *e = user;
    struct echo_stats *st = e->stats;

    (void)s;
    switch (why) {
    case BT_HTTP_CLOSE_DONE:
        st->closed_done++;
        break;
    case BT_HTTP_CLOSE_PEER:
        st->closed_peer++;
        break;
    case BT_HTTP_CLOSE_TIMEOUT:
        st->closed_timeout++;
        break;
    case BT_HTTP_CLOSE_LIMIT:
        st->closed_limit++;
        break;
    case BT_HTTP_CLOSE_SERVER:
        st->closed_server++;
        break;
    case BT_HTTP_CLOSE_RESET:
    case BT_HTTP_CLOSE_ERROR:
        st->closed_other++;
        break;
    }
    bt_buf_fini(&e->body);
    bt_free(e);
}

static const struct bt_http_events http_events = {
    .on_data = http_on_data,
    .on_end = http_on_end,
    .on_writable = http_on_writable,
    .on_close = http_on_close,
};

void echo_on_request(struct bt_http_stream *s, const struct bt_http_request *req, void *stats)
{
    struct exchange *e = bt_calloc(1, sizeof *e);
    char text[32];

    if (e == NULL) {
        bt_http_reset(s, BT_HTTP_INTERNAL);
        return;
    }
    e->stats = stats;
    bt_http_bind(s, &http_events, e);
    if (strcmp(req->path, "/echo") == 0) {
        e->echo = true;
    } else if (strcmp(req->path, "/chunks") == 0) {
        unsigned long n =
            bt_http_query_get(req->query, "n", text, sizeof text) ? strtoul(text, NULL, 10) : 3;
        struct bt_http_header h = {"content-type", "text/event-stream"};
        bt_http_respond(s, 200, &h, 1);
        for (unsigned long i = 0; i < n; i++) {
            int len = snprintf(text, sizeof text, "data: %lu\n\n", i);
            (void)bt_http_write(s, text, (size_t)len);
        }
        bt_http_end(s);
    } else if (strcmp(req->path, "/hang") == 0) {
        return;
    } else if (strcmp(req->path, "/flood") == 0) {
        e->left = FLOOD_BYTES;
        bt_http_respond(s, 200, NULL, 0);
        http_on_writable(s, e);
    } else {
        bt_http_reply(s, 200, "text/plain", "hello\n", 6, NULL, 0);
    }
}

/* ---- gRPC ---- */

struct echo_call {
    struct echo_stats *stats;
    size_t left;
};

static void call_on_close(struct bt_grpc_call *c, void *user, const struct bt_grpc_end *end)
{
    struct echo_call *e = user;

    (void)c;
    e->stats->calls_open--;
    if (end->finished) {
        e->stats->calls_finished++;
    } else if (end->status == BT_GRPC_CANCELLED) {
        e->stats->calls_cancelled++;
    } else if (end->status == BT_GRPC_DEADLINE_EXCEEDED) {
        e->stats->calls_deadline++;
    } else {
        e->stats->calls_failed++;
    }
    bt_free(e);
}

static void bind_call(struct bt_grpc_call *c, void *stats, const struct bt_grpc_events *ev)
{
    struct echo_call *e = bt_calloc(1, sizeof *e);

    if (e == NULL) {
        bt_grpc_fail(c, BT_GRPC_RESOURCE_EXHAUSTED, "out of memory");
        return;
    }
    e->stats = stats;
    e->stats->calls_open++;
    bt_grpc_bind(c, ev, e);
}

static unsigned long number_of(const uint8_t *data, size_t len)
{
    char text[16];
    size_t n = len < sizeof text - 1 ? len : sizeof text - 1;

    memcpy(text, data, n);
    text[n] = '\0';
    return strtoul(text, NULL, 10);
}

static void unary_on_message(struct bt_grpc_call *c, void *user, const uint8_t *data, size_t len)
{
    (void)user;
    bt_grpc_reply(c, data, len);
}

static void on_unary(struct bt_grpc_call *c, void *stats)
{
    static const struct bt_grpc_events ev = {.on_message = unary_on_message,
                                             .on_close = call_on_close};

    bind_call(c, stats, &ev);
}

static void count_on_message(struct bt_grpc_call *c, void *user, const uint8_t *data, size_t len)
{
    unsigned long n = number_of(data, len);
    char text[24];

    (void)user;
    for (unsigned long i = 0; i < n; i++) {
        int k = snprintf(text, sizeof text, "%lu", i);
        (void)bt_grpc_send(c, text, (size_t)k);
    }
    bt_grpc_finish(c, BT_GRPC_OK, NULL, NULL, 0);
}

static void on_count(struct bt_grpc_call *c, void *stats)
{
    static const struct bt_grpc_events ev = {.on_message = count_on_message,
                                             .on_close = call_on_close};

    bind_call(c, stats, &ev);
}

static void chat_on_message(struct bt_grpc_call *c, void *user, const uint8_t *data, size_t len)
{
    (void)user;
    (void)bt_grpc_send(c, data, len);
}

static void chat_on_half_close(struct bt_grpc_call *c, void *user)
{
    struct bt_http_header h = {"x-echo", "bye"};

    (void)user;
    bt_grpc_finish(c, BT_GRPC_OK, NULL, &h, 1);
}

static void on_chat(struct bt_grpc_call *c, void *stats)
{
    static const struct bt_grpc_events ev = {.on_message = chat_on_message,
                                             .on_half_close = chat_on_half_close,
                                             .on_close = call_on_close};

    bind_call(c, stats, &ev);
}

static void fail_on_message(struct bt_grpc_call *c, void *user, const uint8_t *data, size_t len)
{
    (void)user;
    bt_grpc_fail_retry(c, (enum bt_grpc_status)number_of(data, len), 1500 * BT_NS_PER_MS,
                       "müde %d%%", 100);
}

static void on_fail(struct bt_grpc_call *c, void *stats)
{
    static const struct bt_grpc_events ev = {.on_message = fail_on_message,
                                             .on_close = call_on_close};

    bind_call(c, stats, &ev);
}

static void on_hang(struct bt_grpc_call *c, void *stats)
{
    static const struct bt_grpc_events ev = {.on_close = call_on_close};

    bind_call(c, stats, &ev);
}

static void flood_on_writable(struct bt_grpc_call *c, void *user)
{
    struct echo_call *e = user;

    while (e->left > 0) {
        size_t queued = bt_grpc_send(c, piece, PIECE);
        e->left -= PIECE;
        e->stats->queued_max = queued > e->stats->queued_max ? queued : e->stats->queued_max;
        if (queued >= HIGH) {
            return;
        }
    }
    bt_grpc_finish(c, BT_GRPC_OK, NULL, NULL, 0);
}

static void flood_on_message(struct bt_grpc_call *c, void *user, const uint8_t *data, size_t len)
{
    struct echo_call *e = user;

    (void)data;
    (void)len;
    e->left = FLOOD_BYTES;
    flood_on_writable(c, user);
}

static void on_flood(struct bt_grpc_call *c, void *stats)
{
    static const struct bt_grpc_events ev = {.on_message = flood_on_message,
                                             .on_writable = flood_on_writable,
                                             .on_close = call_on_close};

    bind_call(c, stats, &ev);
}

const struct bt_grpc_method echo_methods[] = {
    {"/baton.test.Echo/Unary", BT_GRPC_UNARY, on_unary},
    {"/baton.test.Echo/Count", BT_GRPC_SERVER_STREAM, on_count},
    {"/baton.test.Echo/Chat", BT_GRPC_BIDI, on_chat},
    {"/baton.test.Echo/Fail", BT_GRPC_UNARY, on_fail},
    {"/baton.test.Echo/Hang", BT_GRPC_SERVER_STREAM, on_hang},
    {"/baton.test.Echo/Flood", BT_GRPC_SERVER_STREAM, on_flood},
};
const size_t echo_n_methods = sizeof echo_methods / sizeof echo_methods[0];
