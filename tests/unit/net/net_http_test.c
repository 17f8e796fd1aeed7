/* The HTTP server over real sockets: both versions, pipelining, limits, timeouts, readers that
 * stall, disconnects, drain. The client is a plain socket, driven between steps of the server's
 * loop. */

#include "net/http.h"

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

struct world {
    struct bt_net_loop *l;
    struct bt_http_server *sv;
    struct echo_stats stats;
};

struct peer {
    int fd;
    bool closed;
    struct bt_buf in;
};

static void start(struct world *w, struct bt_http_server_opts o)
{
    struct bt_err err = {.msg = ""};

    memset(w, 0, sizeof *w);
    o.listen = "127.0.0.1:0";
    o.on_request = echo_on_request;
    o.arg = &w->stats;
    CHECK_EQ(bt_net_loop_create(&w->l), BT_OK);
    CHECK_EQ(bt_http_server_create(w->l, &o, &w->sv, &err), BT_OK);
    CHECK_STR(err.msg, "");
}

static void stop(struct world *w)
{
    bt_http_server_close(w->sv);
    bt_net_loop_destroy(w->l);
}

static void pump(struct world *w, struct peer *p)
{
    char buf[65536];

    bt_net_loop_step(w->l, 2 * BT_NS_PER_MS);
    if (p == NULL || p->closed) {
        return;
    }
    ssize_t n = recv(p->fd, buf, sizeof buf, MSG_DONTWAIT);
    if (n > 0) {
        bt_buf_add(&p->in, buf, (size_t)n);
    } else if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) {
        p->closed = true;
    }
}

static void dial(struct world *w, struct peer *p)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(bt_http_server_port(w->sv))};

    memset(p, 0, sizeof *p);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    p->fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_EQ(connect(p->fd, (const struct sockaddr *)&to, sizeof to), 0);
}

static void hang_up(struct peer *p)
{
    close(p->fd);
    bt_buf_fini(&p->in);
}

static void give(struct world *w, struct peer *p, const void *data, size_t len)
{
    const char *at = data;

    while (len > 0 && !p->closed) {
        ssize_t n = send(p->fd, at, len, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n > 0) {
            at += n;
            len -= (size_t)n;
        } else if (errno != EAGAIN) {
            return;
        }
        pump(w, p);
    }
}

#define WAIT(w, p, cond)                                                                           \
    do {                                                                                           \
        uint64_t until_ = bt_clock_ns() + 30 * BT_NS_PER_S;                                        \
        while (!(cond) && bt_clock_ns() < until_) {                                                \
            pump((w), (p));                                                                        \
        }                                                                                          \
        CHECK(cond);                                                                               \
    } while (0)

static unsigned count(const struct peer *p, const char *what)
{
    unsigned n = 0;

    for (const char *at = p->in.data; at != NULL && (at = strstr(at, what)) != NULL; at++) {
        n++;
    }
    return n;
}

/* Sends text on a new connection, reads until the server closes it; the answer must contain `want`.
 */
static void ask(struct world *w, const char *text, const char *want)
{
    struct peer p;

    dial(w, &p);
    give(w, &p, text, strlen(text));
    WAIT(w, &p, p.closed);
    bool found = p.in.data != NULL && strstr(p.in.data, want) != NULL;
    CHECK(found);
    if (!found) {
        fprintf(stderr, "sent %.60s\nwanted %s\ngot %s\n", text, want,
                p.in.data != NULL ? p.in.data : "nothing");
    }
    hang_up(&p);
}

static void test_http1(struct world *w)
{
    struct peer p;

    ask(w, "GET /x HTTP/1.1\r\nConnection: close\r\n\r\n", "\r\n\r\nhello\n");
    ask(w, "GET /x HTTP/1.0\r\n\r\n", "connection: close\r\n\r\nhello\n");
    ask(w, "GET /chunks?n=2 HTTP/1.0\r\n\r\n", "\r\n\r\ndata: 0\n\ndata: 1\n\n");
    ask(w, "GET /chunks?n=1 HTTP/1.1\r\nConnection: close\r\n\r\n",
        "\r\n\r\n9\r\ndata: 0\n\n\r\n0\r\n\r\n");
    ask(w, "HEAD /x HTTP/1.1\r\nConnection: close\r\n\r\n", "content-length: 6\r\n");
    ask(w, "HEAD /x HTTP/1.1\r\n\r\nGET /x HTTP/1.1\r\nConnection: close\r\n\r\n",
        "\r\n\r\nHTTP/1.1 200");
    ask(w,
        "POST /echo HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\nConnection: "
        "close\r\n\r\nabc",
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK");
    ask(w,
        "POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: "
        "close\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n"
        "trailer: 1\r\n\r\n",
        "\r\n\r\nabcde");
    ask(w, "GET http://host/x HTTP/1.1\r\nConnection: close\r\n\r\n", "hello");
    ask(w,
        "GET / HTTP/1.1\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\nGET / "
        "HTTP/1.1\r\nConnection: close\r\n\r\n",
        "hello\nHTTP/1.1 200 OK");
    /* malformed */
    ask(w, "garbage\r\n\r\n", "HTTP/1.1 400 ");
    ask(w, "\026\003\001\002\r\n\r\n", "HTTP/1.1 400 ");
    ask(w, "FETCH /x HTTP/1.1\r\n\r\n", "HTTP/1.1 501 ");
    ask(w, "get /x HTTP/1.1\r\n\r\n", "HTTP/1.1 501 ");
    ask(w, "GET /x HTTP/3.7\r\n\r\n", "HTTP/1.1 505 ");
    ask(w, "GET /x HTTP/2.0\r\n\r\n", "HTTP/1.1 505 ");
    ask(w, "GET x HTTP/1.1\r\n\r\n", "HTTP/1.1 400 ");
    ask(w, "CONNECT a:1 HTTP/1.1\r\n\r\n", "HTTP/1.1 501 ");
    ask(w, "POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "HTTP/1.1 400 ");
    ask(w, "POST /echo HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 400 ");
    ask(w, "POST /echo HTTP/1.1\r\nContent-Length: -3\r\n\r\n", "HTTP/1.1 400 ");
    ask(w, "POST /echo HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n", "HTTP/1.1 400 ");
    ask(w, "PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", "HTTP/1.1 400 ");
    /* pipelined, byte by byte */
    static const char pipeline[] =
        "GET /1 HTTP/1.1\r\n\r\nPOST /echo HTTP/1.1\r\nContent-Length: 2\r\n\r\nabGET /2 "
        "HTTP/1.1\r\nX:  y \r\n\r\n";
    dial(w, &p);
    for (size_t i = 0; i + 1 < sizeof pipeline; i++) {
        give(w, &p, pipeline + i, 1);
    }
    WAIT(w, &p,
         count(&p, "HTTP/1.1 200 OK") == 3 && count(&p, "hello\n") == 2 &&
             count(&p, "\r\n\r\nab") == 1);
    CHECK(!p.closed);
    hang_up(&p);
}

static void test_limits(void)
{
    struct bt_http_server_opts o = {
        .header_bytes_max = 4096, .headers_max = 10, .body_bytes_max = 1000, .connections_max = 2};
    struct world w;
    struct peer a, b, c;
    char *text = bt_alloc(20000);

    CHECK(text != NULL);
    start(&w, o);
    int n = snprintf(text, 20000, "GET / HTTP/1.1\r\nx: %05000d\r\n\r\n", 0);
    CHECK(n > 5000);
    ask(&w, text, "HTTP/1.1 431 ");
    (void)snprintf(text, 20000, "GET /%05000d HTTP/1.1\r\n\r\n", 0);
    ask(&w, text, "HTTP/1.1 431 ");
    size_t len = (size_t)snprintf(text, 20000, "GET / HTTP/1.1\r\n");
    for (int i = 0; i < 11; i++) {
        len += (size_t)snprintf(text + len, 20000 - len, "h%d: v\r\n", i);
    }
    (void)snprintf(text + len, 20000 - len, "\r\n");
    ask(&w, text, "HTTP/1.1 431 ");
    ask(&w, "POST /echo HTTP/1.1\r\nContent-Length: 1001\r\n\r\n", "HTTP/1.1 413 ");
    (void)snprintf(
        text, 20000,
        "POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n%01001d\r\n0\r\n\r\n", 0);
    ask(&w, text, "HTTP/1.1 413 ");
    CHECK_EQ(w.stats.closed_limit, 1);
    (void)snprintf(text, 20000,
                   "POST /echo HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: "
                   "chunked\r\n\r\n3e8\r\n%01000d\r\n0\r\n\r\n",
                   0);
    ask(&w, text, "HTTP/1.1 200 ");
    dial(&w, &a);
    dial(&w, &b);
    WAIT(&w, &a, bt_http_server_connections(w.sv) == 2);
    dial(&w, &c);
    WAIT(&w, &c, c.closed);
    hang_up(&a);
    hang_up(&b);
    hang_up(&c);
    bt_free(text);
    stop(&w);
}

static void test_timeouts(void)
{
    struct bt_http_server_opts o = {.header_timeout_ns = 60 * BT_NS_PER_MS,
                                    .idle_timeout_ns = 120 * BT_NS_PER_MS,
                                    .write_timeout_ns = 120 * BT_NS_PER_MS};
    struct world w;
    struct peer p, other;

    start(&w, o);
    ask(&w, "GET / HT", "HTTP/1.1 408 ");
    ask(&w, "POST /echo HTTP/1.1\r\nContent-Length: 5\r\n\r\nabc", "HTTP/1.1 408 ");
    CHECK_EQ(w.stats.closed_timeout, 1);
    dial(&w, &p); /* nothing at all */
    WAIT(&w, &p, p.closed);
    CHECK_EQ(p.in.len, 0);
    hang_up(&p);
    dial(&w, &p); /* idle after a request */
    give(&w, &p, "GET / HTTP/1.1\r\n\r\n", 18);
    WAIT(&w, &p, count(&p, "hello") == 1);
    WAIT(&w, &p, p.closed);
    hang_up(&p);
    /* a reader that takes nothing: others go on, then it is cut */
    w.stats.queued_max = 0;
    dial(&w, &p);
    (void)send(p.fd, "GET /flood HTTP/1.1\r\n\r\n", 23, MSG_NOSIGNAL);
    WAIT(&w, NULL, w.stats.queued_max > 0);
    dial(&w, &other);
    give(&w, &other, "GET / HTTP/1.1\r\n\r\n", 18);
    WAIT(&w, &other, count(&other, "hello") == 1);
    WAIT(&w, NULL, w.stats.closed_timeout == 2);
    CHECK(w.stats.queued_max < 512 << 10);
    hang_up(&p);
    hang_up(&other);
    stop(&w);
}

static void test_disconnect(struct world *w)
{
    struct peer p;
    int before = w->stats.closed_peer;

    dial(w, &p);
    give(w, &p, "GET /hang HTTP/1.1\r\n\r\n", 22);
    WAIT(w, NULL, bt_http_server_streams(w->sv) == 1);
    hang_up(&p);
    WAIT(w, NULL, w->stats.closed_peer == before + 1);
    dial(w, &p);
    give(w, &p, "POST /echo HTTP/1.1\r\nContent-Length: 5\r\n\r\nabc", 45);
    WAIT(w, NULL, bt_http_server_streams(w->sv) == 1);
    hang_up(&p);
    WAIT(w, NULL, w->stats.closed_peer == before + 2);
    WAIT(w, NULL, bt_http_server_connections(w->sv) == 0);
}

/* ---- HTTP/2 by hand ---- */

static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

static void frame(struct bt_buf *b, unsigned type, unsigned flags, unsigned id, const void *payload,
                  size_t len)
{
    uint8_t head[9] = {(uint8_t)(len >> 16), (uint8_t)(len >> 8), (uint8_t)len,
                       (uint8_t)type,        (uint8_t)flags,      (uint8_t)(id >> 24),
                       (uint8_t)(id >> 16),  (uint8_t)(id >> 8),  (uint8_t)id};

    bt_buf_add(b, head, 9);
    bt_buf_add(b, payload, len);
}

/* GET path with END_STREAM. */
static void h2_get(struct bt_buf *b, unsigned id, const char *path)
{
    /* static table; literal authority "h" and path */
    uint8_t block[64] = {0x82, 0x86, 0x01, 1, 'h', 0x04, (uint8_t)strlen(path)};

    memcpy(block + 7, path, strlen(path));
    frame(b, 1, 0x5, id, block, 7 + strlen(path));
}

static void test_http2(void)
{
    static const uint8_t window_0[] = {0, 4, 0, 0, 0, 0}; /* SETTINGS_INITIAL_WINDOW_SIZE = 0 */
    struct bt_http_server_opts o = {.write_timeout_ns = 120 * BT_NS_PER_MS,
                                    .idle_timeout_ns = 300 * BT_NS_PER_MS};
    struct world w;
    struct peer p;
    struct bt_buf b = {0};

    start(&w, o);
    bt_buf_add(&b, preface, sizeof preface - 1);
    frame(&b, 4, 0, 0, window_0, sizeof window_0);
    h2_get(&b, 1, "/flood");
    h2_get(&b, 3, "/hang");
    dial(&w, &p);
    give(&w, &p, b.data, b.len);
    WAIT(&w, &p, bt_http_server_streams(w.sv) == 2);
    /* the stream whose window stays shut is cut, the other is not */
    WAIT(&w, &p, w.stats.closed_timeout == 1);
    CHECK_EQ(bt_http_server_streams(w.sv), 1);
    CHECK(!p.closed);
    /* RST_STREAM of the other */
    static const uint8_t cancel[] = {0, 0, 0, 8};
    bt_buf_clear(&b);
    frame(&b, 3, 0, 3, cancel, 4);
    give(&w, &p, b.data, b.len);
    WAIT(&w, &p, w.stats.closed_peer == 1);
    /* idle: GOAWAY and close */
    WAIT(&w, &p, p.closed);
    hang_up(&p);
    /* garbage behind the preface */
    bt_buf_clear(&b);
    bt_buf_add(&b, preface, sizeof preface - 1);
    bt_buf_adds(&b, "this is no frame at all, whatever one thinks of it");
    dial(&w, &p);
    give(&w, &p, b.data, b.len);
    WAIT(&w, &p, p.closed);
    hang_up(&p);
    bt_buf_fini(&b);
    stop(&w);
}

static void on_drained(void *arg)
{
    *(bool *)arg = true;
}

static void test_drain(void)
{
    struct bt_http_server_opts o = {.listen = NULL};
    struct world w;
    struct peer idle, busy;
    bool drained = false;

    start(&w, o);
    dial(&w, &idle);
    give(&w, &idle, "GET / HTTP/1.1\r\n\r\n", 18);
    WAIT(&w, &idle, count(&idle, "hello") == 1);
    dial(&w, &busy);
    give(&w, &busy, "POST /echo HTTP/1.1\r\nContent-Length: 3\r\n\r\nab", 44);
    WAIT(&w, &busy, bt_http_server_streams(w.sv) == 1);
    bt_http_server_drain(w.sv, on_drained, &drained);
    WAIT(&w, &idle, idle.closed);
    CHECK(!drained);
    give(&w, &busy, "c", 1);
    WAIT(&w, &busy, busy.closed && drained);
    CHECK_EQ(count(&busy, "connection: close"), 1);
    CHECK_EQ(count(&busy, "\r\n\r\nabc"), 1);
    hang_up(&idle);
    hang_up(&busy);
    stop(&w);
}

static void test_create_errors(void)
{
    struct bt_http_server_opts o = {.listen = "127.0.0.1:0"};
    struct bt_net_loop *l = NULL;
    struct bt_http_server *one = NULL, *two = NULL;
    struct bt_err err;

    CHECK_EQ(bt_net_loop_create(&l), BT_OK);
    CHECK_EQ(bt_http_server_create(l, &o, &one, &err), BT_OK);
    o.listen = bt_http_server_address(one);
    CHECK_EQ(bt_http_server_create(l, &o, &two, &err), BT_ERR_IO);
    CHECK(strstr(err.msg, "address already in use") != NULL);
    o.listen = "nonsense";
    CHECK_EQ(bt_http_server_create(l, &o, &two, &err), BT_ERR_INVALID);
    o.listen = "127.0.0.1:0";
    o.tls_cert = "/nonexistent/cert.pem";
    CHECK_EQ(bt_http_server_create(l, &o, &two, &err), BT_ERR_INVALID);
    o.tls_key = "/nonexistent/key.pem";
    CHECK_EQ(bt_http_server_create(l, &o, &two, &err), BT_ERR_IO);
    CHECK(strstr(err.msg, "/nonexistent/cert.pem") != NULL);
    bt_http_server_close(one);
    bt_net_loop_destroy(l);
}

int main(void)
{
    struct bt_http_server_opts o = {.listen = NULL};
    struct world w;

    start(&w, o);
    test_http1(&w);
    test_disconnect(&w);
    stop(&w);
    test_limits();
    test_timeouts();
    test_http2();
    test_drain();
    test_create_errors();
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
