#ifndef BT_TESTS_FUZZ_CONN_H
#define BT_TESTS_FUZZ_CONN_H

/* Bytes into a server connection without a socket. The first byte of the input chooses how the rest
 * is cut into pieces; the handlers answer in different ways by path. Traps when a stream is opened
 * and not closed exactly once. */

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "net/grpc_int.h"
#include "net/http_int.h"

static int fuzz_open;

static void fuzz_on_data(struct bt_http_stream *s, void *user, const char *data, size_t len)
{
    (void)user;
    if (s->responded) {
        (void)bt_http_write(s, data, len);
    }
}

static void fuzz_on_end(struct bt_http_stream *s, void *user)
{
    (void)user;
    if (s->responded) {
        bt_http_end(s);
    } else {
        bt_http_reply(s, 200, "text/plain", "done", 4, NULL, 0);
    }
}

static void fuzz_on_close(struct bt_http_stream *s, void *user, enum bt_http_close why)
{
    (void)s;
    (void)user;
    (void)why;
    fuzz_open--;
}

static void fuzz_on_request(struct bt_http_stream *s, const struct bt_http_request *req, void *arg)
{
    static const struct bt_http_events events = {
        .on_data = fuzz_on_data, .on_end = fuzz_on_end, .on_close = fuzz_on_close};

    (void)arg;
    fuzz_open++;
    bt_http_bind(s, &events, NULL);
    if (strcmp(req->path, "/reset") == 0) {
        bt_http_reset(s, BT_HTTP_CANCEL);
    } else if (strcmp(req->path, "/now") == 0) {
        bt_http_reply(s, 200, "text/plain", "now", 3, NULL, 0);
    } else if (strcmp(req->path, "/hang") != 0) {
        bt_http_respond(s, 200, NULL, 0);
    }
}

static void fuzz_kick(void *arg)
{
    (void)arg;
}

static void fuzz_on_call(struct bt_grpc_call *c, void *arg)
{
    (void)arg;
    bt_grpc_bind(c, NULL, NULL);
}

/* One gRPC server and loop for the whole run; only deadlines use the loop. */
static struct bt_grpc_server *fuzz_grpc(struct bt_net_loop **loop)
{
    static const struct bt_grpc_method methods[] = {{"/a/B", BT_GRPC_BIDI, fuzz_on_call}};
    static struct bt_grpc_server *g;
    static struct bt_net_loop *l;

    if (g == NULL &&
        (bt_net_loop_create(&l) != BT_OK || bt_grpc_server_create(l, NULL, &g) != BT_OK ||
         bt_grpc_server_add(g, methods, 1, NULL) != BT_OK)) {
        abort();
    }
    *loop = l;
    return g;
}

static inline void fuzz_pull(struct bt_http_conn *c, uint64_t now, struct bt_buf *out)
{
    for (int i = 0; i < 64; i++) {
        bt_buf_clear(out);
        bt_http_conn_pull(c, now, out, 4096);
        if (out->len == 0) {
            break;
        }
    }
}

/* before: fed first, unmutated (the HTTP/2 preface), may be NULL. */
static inline void fuzz_run(const char *before, const uint8_t *data, size_t n)
{
    struct bt_net_loop *loop = NULL;
    struct bt_http_env env = {.grpc = bt_grpc_take_request, .grpc_arg = fuzz_grpc(&loop)};
    struct bt_buf out = {0};
    uint64_t now = 1000;
    size_t piece = n > 0 && data[0] % 4 != 0 ? (size_t)1 << (data[0] % 16) : n;

    env.opts.on_request = fuzz_on_request;
    env.opts.body_bytes_max = 5000;
    env.opts.header_bytes_max = 4000;
    env.opts.headers_max = 30;
    bt_http_opts_defaults(&env.opts);
    struct bt_http_conn *c = bt_http_conn_create(&env, "fuzz", false, false, now, fuzz_kick, NULL);
    if (c == NULL) {
        return;
    }
    if (before != NULL) {
        bt_http_conn_feed(c, now, before, strlen(before));
    }
    for (size_t at = n > 0 ? 1 : 0; at < n && !c->broken && bt_http_conn_want_read(c);
         at += piece) {
        bt_http_conn_feed(c, ++now, (const char *)data + at, n - at < piece ? n - at : piece);
        fuzz_pull(c, now, &out);
        bt_net_loop_step(loop, 0);
    }
    bt_http_conn_tick(c, now + env.opts.write_timeout_ns);
    fuzz_pull(c, now, &out);
    if (n % 2 == 0) {
        bt_http_conn_drain(c);
        fuzz_pull(c, now, &out);
    }
    bt_http_conn_eof(c, now);
    fuzz_pull(c, now, &out);
    bt_http_conn_destroy(c, BT_HTTP_CLOSE_PEER);
    bt_net_loop_step(loop, 0);
    bt_buf_fini(&out);
    if (fuzz_open != 0) {
        abort();
    }
}

#endif
