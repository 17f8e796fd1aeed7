/* A small server for the Python check (tests/unit/net/interop_test.py) and for trying things by hand:
 * HTTP echo, download and stream paths, and the gRPC service baton.test.Echo. Prints its port. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <signal.h>

#include "base/mem.h"
#include "net/http.h"
#include "net/loop.h"

struct echo {
    struct bt_buf body;
};

static void echo_on_data(struct bt_http_stream *s, void *user, const char *data, size_t len)
{
    struct echo *e = user;

    (void)s;
    bt_buf_add(&e->body, data, len);
}

static void echo_on_end(struct bt_http_stream *s, void *user)
{
    struct echo *e = user;

    bt_http_reply(s, 200, "application/octet-stream", e->body.data, e->body.len, NULL, 0);
}

static void echo_on_close(struct bt_http_stream *s, void *user, enum bt_http_close why)
{
    struct echo *e = user;

    (void)s;
    fprintf(stderr, "echo closed: %d\n", (int)why);
    bt_buf_fini(&e->body);
    bt_free(e);
}

static const struct bt_http_events echo_events = {
    .on_data = echo_on_data,
    .on_end = echo_on_end,
    .on_close = echo_on_close,
};

static void on_request(struct bt_http_stream *s, const struct bt_http_request *req, void *arg)
{
    char text[32];

    (void)arg;
    if (strcmp(req->path, "/echo") == 0) {
        struct echo *e = bt_calloc(1, sizeof *e);
        if (e == NULL) {
            bt_http_reset(s, BT_HTTP_INTERNAL);
            return;
        }
        bt_http_bind(s, &echo_events, e);
    } else if (strcmp(req->path, "/chunks") == 0) {
        unsigned long n = bt_http_query_get(req->query, "n", text, sizeof text) ? strtoul(text, NULL, 10) : 3;
        struct bt_http_header h = {"content-type", "text/event-stream"};
        bt_http_respond(s, 200, &h, 1);
        for (unsigned long i = 0; i < n; i++) {
            int len = snprintf(text, sizeof text, "data: %lu\n\n", i);
            (void)bt_http_write(s, text, (size_t)len);
        }
        bt_http_end(s);
    } else {
        bt_http_reply(s, 200, "text/plain", "hello\n", 6, NULL, 0);
    }
}

static void on_signal(void *arg, int signum)
{
    (void)signum;
    bt_net_loop_stop(arg);
}

int main(int argc, char **argv)
{
    struct bt_net_loop *loop = NULL;
    struct bt_http_server *sv = NULL;
    struct bt_net_signal *sig = NULL;
    struct bt_err err;
    struct bt_http_server_opts o = {.listen = "127.0.0.1:0", .on_request = on_request, .body_bytes_max = 1 << 20};

    if (argc > 2) {
        o.tls_cert = argv[1];
        o.tls_key = argv[2];
    }
    if (bt_net_loop_create(&loop) != BT_OK || bt_http_server_create(loop, &o, &sv, &err) != BT_OK ||
        bt_net_signal_start(loop, SIGTERM, on_signal, loop, &sig) != BT_OK) {
        fprintf(stderr, "cannot start\n");
        return 1;
    }
    printf("%u\n", (unsigned)bt_http_server_port(sv));
    fflush(stdout);
    bt_net_loop_run(loop);
    bt_net_signal_stop(sig);
    bt_http_server_close(sv);
    bt_net_loop_destroy(loop);
    return 0;
}
