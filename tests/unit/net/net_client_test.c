/* The gRPC client against servers that misbehave: silent, babbling, leaving, no gRPC; and its own
 * limits. */

#include "net/grpc.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "echo_service.h"
#include "net/loop.h"
#include "tests/check.h"

struct client {
    int closes, messages;
    enum bt_grpc_status status;
    char message[256];
};

static void on_message(struct bt_grpc_call *c, void *user, const uint8_t *data, size_t len)
{
    struct client *k = user;

    (void)c;
    (void)data;
    (void)len;
    k->messages++;
}

static void on_close(struct bt_grpc_call *c, void *user, const struct bt_grpc_end *end)
{
    struct client *k = user;

    (void)c;
    k->closes++;
    k->status = end->status;
    (void)snprintf(k->message, sizeof k->message, "%s", end->message);
}

static const struct bt_grpc_events events = {.on_message = on_message, .on_close = on_close};

/* A listener that is ours to answer on, byte by byte. */
struct fake {
    int listener, fd;
    char address[32];
};

static void fake_open(struct fake *f)
{
    struct sockaddr_in a = {.sin_family = AF_INET};
    socklen_t n = sizeof a;

    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    f->fd = -1;
    f->listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    CHECK_EQ(bind(f->listener, (const struct sockaddr *)&a, sizeof a), 0);
    CHECK_EQ(listen(f->listener, 8), 0);
    CHECK_EQ(getsockname(f->listener, (struct sockaddr *)&a, &n), 0);
    (void)snprintf(f->address, sizeof f->address, "127.0.0.1:%u", (unsigned)ntohs(a.sin_port));
}

static void fake_close(struct fake *f)
{
    if (f->fd >= 0) {
        close(f->fd);
    }
    close(f->listener);
}

/* One call on a new channel; the fake server answers each connection with `say`. */
static void against(struct bt_net_loop *l, const struct bt_grpc_channel_opts *co, struct fake *f,
                    const void *say, size_t say_len, struct client *k, uint64_t timeout_ns)
{
    struct bt_grpc_start s = {.path = "/baton.test.Echo/Unary", .timeout_ns = timeout_ns};
    struct bt_grpc_channel *ch = NULL;
    struct bt_grpc_call *c = NULL;
    struct bt_err err;
    uint64_t until = bt_clock_ns() + 10 * BT_NS_PER_S;

    memset(k, 0, sizeof *k);
    CHECK_EQ(bt_grpc_channel_create(l, co, &ch, &err), BT_OK);
    CHECK_EQ(bt_grpc_call_start(ch, &s, &events, k, &c), BT_OK);
    (void)bt_grpc_send(c, "0123456789", 10);
    bt_grpc_half_close(c);
    while (k->closes == 0 && bt_clock_ns() < until) {
        bt_net_loop_step(l, 5 * BT_NS_PER_MS);
        if (f != NULL && f->fd < 0) {
            f->fd = accept(f->listener, NULL, NULL);
            if (f->fd >= 0 && say_len > 0) {
                CHECK_EQ(send(f->fd, say, say_len, MSG_NOSIGNAL), say_len);
            }
        }
    }
    CHECK_EQ(k->closes, 1);
    bt_grpc_channel_destroy(ch);
}

static void test_fakes(struct bt_net_loop *l)
{
    static const char http1[] = "HTTP/1.1 400 Bad Request\r\n\r\n";
    /* SETTINGS, then GOAWAY with last stream 0 */
    static const char leaving[] = "\0\0\0\4\0\0\0\0\0\0\0\x08\7\0\0\0\0\0\0\0\0\0\0\0\0\0";
    struct fake f;
    struct client k;

    fake_open(&f);
    struct bt_grpc_channel_opts co = {.address = f.address, .keepalive_ns = 50 * BT_NS_PER_MS};
    against(l, &co, &f, "", 0, &k, 0);
    CHECK_EQ(k.status, BT_GRPC_UNAVAILABLE);
    CHECK_STR(k.message, "connection lost: no answer to a keepalive PING");
    fake_close(&f);
    co.keepalive_ns = 0;
    fake_open(&f);
    against(l, &co, &f, "", 0, &k, 50 * BT_NS_PER_MS);
    CHECK_EQ(k.status, BT_GRPC_DEADLINE_EXCEEDED);
    fake_close(&f);
    fake_open(&f);
    against(l, &co, &f, http1, sizeof http1 - 1, &k, 0);
    CHECK_EQ(k.status, BT_GRPC_UNAVAILABLE);
    fake_close(&f);
    fake_open(&f);
    against(l, &co, &f, leaving, sizeof leaving - 1, &k, 0);
    CHECK_EQ(k.status, BT_GRPC_UNAVAILABLE);
    fake_close(&f);
    against(l, &co, NULL, "", 0, &k, 0); /* nobody listens any more */
    CHECK_EQ(k.status, BT_GRPC_UNAVAILABLE);
    CHECK(strstr(k.message, "connection refused") != NULL);
    co.address = "no-such-host.invalid:1";
    against(l, &co, NULL, "", 0, &k, 0);
    CHECK_EQ(k.status, BT_GRPC_UNAVAILABLE);
}

static void test_real(struct bt_net_loop *l)
{
    struct echo_stats stats = {0};
    struct bt_http_server_opts o = {.listen = "127.0.0.1:0"};
    struct bt_http_server *sv = NULL;
    struct bt_grpc_server *g = NULL;
    struct bt_err err;
    struct client k;
    char address[32];

    CHECK_EQ(bt_http_server_create(l, &o, &sv, &err), BT_OK);
    (void)snprintf(address, sizeof address, "localhost:%u", (unsigned)bt_http_server_port(sv));
    struct bt_grpc_channel_opts co = {.address = address};
    against(l, &co, NULL, "", 0, &k, 0); /* an HTTP server without gRPC */
    CHECK_EQ(k.status, BT_GRPC_UNIMPLEMENTED);
    CHECK_STR(k.message, "HTTP status 404");
    CHECK_EQ(bt_grpc_server_create(l, NULL, &g), BT_OK);
    CHECK_EQ(bt_grpc_server_add(g, echo_methods, echo_n_methods, &stats), BT_OK);
    bt_grpc_server_attach(g, sv);
    against(l, &co, NULL, "", 0, &k, 0); /* localhost may be ::1 first, where nobody listens */
    CHECK_EQ(k.status, BT_GRPC_OK);
    CHECK_EQ(k.messages, 1);
    co.message_bytes_max = 9;
    against(l, &co, NULL, "", 0, &k, 0);
    CHECK_EQ(k.status, BT_GRPC_RESOURCE_EXHAUSTED);
    CHECK_EQ(k.messages, 0);
    bt_http_server_close(sv);
    bt_grpc_server_destroy(g);
}

static void test_refused_starts(struct bt_net_loop *l)
{
    struct bt_grpc_channel_opts co = {.address = "127.0.0.1:1"};
    struct bt_http_header bad_name = {"a b", "c"}, bad_value = {"a", "b\r\nc: d"};
    struct bt_grpc_start s = {.path = "/a/B", .metadata = &bad_name, .n_metadata = 1};
    struct bt_grpc_channel *ch = NULL;
    struct bt_grpc_call *c = NULL;
    struct client k = {.closes = 0};
    struct bt_err err = {.msg = ""};

    CHECK_EQ(bt_grpc_channel_create(l, &co, &ch, &err), BT_OK);
    CHECK_EQ(bt_grpc_call_start(ch, &s, &events, &k, &c), BT_ERR_INVALID);
    s.metadata = &bad_value;
    CHECK_EQ(bt_grpc_call_start(ch, &s, &events, &k, &c), BT_ERR_INVALID);
    s.n_metadata = 0;
    s.path = "a";
    CHECK_EQ(bt_grpc_call_start(ch, &s, &events, &k, &c), BT_ERR_INVALID);
    CHECK_EQ(k.closes, 0);
    bt_grpc_channel_destroy(ch);
    co.address = "nonsense";
    CHECK_EQ(bt_grpc_channel_create(l, &co, &ch, &err), BT_ERR_INVALID);
    co.address = "a:1";
    co.tls = true;
    co.tls_ca = "/nonexistent/ca.pem";
    CHECK_EQ(bt_grpc_channel_create(l, &co, &ch, &err), BT_ERR_IO);
    CHECK(strstr(err.msg, "/nonexistent/ca.pem") != NULL);
}

int main(void)
{
    struct bt_net_loop *l = NULL;

    CHECK_EQ(bt_net_loop_create(&l), BT_OK);
    test_fakes(l);
    test_real(l);
    test_refused_starts(l);
    bt_net_loop_destroy(l);
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
