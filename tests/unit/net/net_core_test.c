/* The protocol cores without sockets: the same bytes give the same answer however they are cut, and
 * every allocation may fail once without a crash, a leak or a stream that is not closed. */

#include "tests/fuzz/fuzz_conn.h"

#include "base/clock.h"
#include "tests/check.h"

static const char pipeline[] =
    "GET /now HTTP/1.1\r\nHost: h\r\n\r\n"
    "POST /hang HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello"
    "HEAD /now HTTP/1.1\r\n\r\n"
    "POST /hang HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    "GET /last HTTP/1.1\r\nConnection: close\r\n\r\nGET /never HTTP/1.1\r\n\r\n";

/* SETTINGS; GET /now; POST /x with a body; gRPC Health/Check with "" (literal headers, no table
 * updates) */
static const uint8_t frames[] =
    "\0\0\0\4\0\0\0\0\0"
    "\0\0\x0b\1\5\0\0\0\1\x82\x86\1\1h\4\4/now"
    "\0\0\x09\1\4\0\0\0\3\x83\x86\1\1h\4\2/x"
    "\0\0\5\0\1\0\0\0\3hello"
    "\0\0\x36\1\4\0\0\0\5\x83\x86\1\1h\4\x1c/grpc.health.v1.Health/Check\x0f\x10\x10"
    "application/grpc"
    "\0\0\5\0\1\0\0\0\5\0\0\0\0\0";

static void collect(struct bt_http_conn *c, struct bt_buf *out)
{
    size_t before;

    do {
        before = out->len;
        bt_http_conn_pull(c, 1000, out, 100);
    } while (out->len > before);
}

static void session(const char *before, const void *data, size_t n, size_t piece,
                    struct bt_buf *out)
{
    struct bt_net_loop *loop = NULL;
    struct bt_http_env env = {.grpc = bt_grpc_take_request, .grpc_arg = fuzz_grpc(&loop)};

    env.opts.on_request = fuzz_on_request;
    bt_http_opts_defaults(&env.opts);
    struct bt_http_conn *c = bt_http_conn_create(&env, "test", false, false, 1000, fuzz_kick, NULL);
    if (c == NULL) {
        return;
    }
    bt_http_conn_feed(c, 1000, before, strlen(before));
    for (size_t at = 0; at < n; at += piece) {
        bt_http_conn_feed(c, 1000, (const char *)data + at, n - at < piece ? n - at : piece);
        collect(c, out);
    }
    bt_http_conn_destroy(c, BT_HTTP_CLOSE_PEER);
    bt_net_loop_step(loop, 0);
}

static void test_cuts(void)
{
    struct bt_buf whole = {0};

    session("", pipeline, sizeof pipeline - 1, sizeof pipeline, &whole);
    CHECK(strstr(whole.data, "\r\n\r\nnowHTTP/1.1 200 OK\r\n") != NULL);
    CHECK(strstr(whole.data, "\r\n\r\ndoneHTTP/1.1 200 OK\r\n") != NULL);
    CHECK(strstr(whole.data, "connection: close\r\n\r\n0\r\n\r\n") != NULL);
    for (size_t piece = 1; piece < 40; piece++) {
        struct bt_buf cut = {0};
        session("", pipeline, sizeof pipeline - 1, piece, &cut);
        CHECK_STR(cut.data, whole.data);
        bt_buf_fini(&cut);
    }
    bt_buf_fini(&whole);
    CHECK_EQ(fuzz_open, 0);
}

static void test_http2(void)
{
    struct bt_buf out = {0};

    session("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", frames, sizeof frames - 1, 7, &out);
    CHECK(memmem(out.data, out.len, "now", 3) != NULL);
    CHECK(memmem(out.data, out.len, "hello", 5) != NULL);
    CHECK(memmem(out.data, out.len, "\0\0\0\0\2\x08\1", 7) != NULL); /* SERVING */
    bt_buf_fini(&out);
}

static void test_failing_allocations(const char *before, const void *data, size_t n)
{
    size_t live = bt_test_live_bytes();
    bool fired = true;

    for (uint64_t nth = 0; fired && nth < 10000; nth++) {
        struct bt_buf out = {0};
        bt_test_fail_alloc(nth);
        session(before, data, n, n, &out);
        fired = bt_test_fail_alloc_off();
        bt_buf_fini(&out);
        CHECK_EQ(fuzz_open, 0);
        CHECK_EQ(bt_test_live_bytes(), live);
    }
    CHECK(!fired);
}

int main(void)
{
    struct bt_net_loop *loop = NULL;
    struct bt_grpc_server *g = fuzz_grpc(&loop);

    test_cuts();
    test_http2();
    test_failing_allocations("", pipeline, sizeof pipeline - 1);
    test_failing_allocations("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", frames, sizeof frames - 1);
    bt_grpc_server_destroy(g);
    bt_net_loop_destroy(loop);
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
