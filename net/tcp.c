/* One TCP connection on libuv, optionally through TLS. It moves bytes between the socket and a
 * protocol core and knows when to stop reading, how to close; it knows no protocol. */

#include "net/tcp_int.h"

#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/mem.h"

#define LINGER_NS       (2 * BT_NS_PER_S)
#define FLUSH_ROUNDS    4
#define REST_KEEP       ((size_t)16 << 10)
#define TCP_KEEPALIVE_S 30
#define TCP_PROBES_S    10 /* between probes, once a connection has been quiet for the above */

static void flush(struct bt_tcp *t);

static void on_closed(uv_handle_t *h)
{
    struct bt_tcp *t = h->data;

    bt_tls_destroy(t->tls);
    bt_buf_fini(&t->rest);
    bt_free(t);
}

static void close_handle(struct bt_tcp *t, bool reset)
{
    BT_ASSERT(!t->closing);
    t->closing = true;
    bt_timer_stop(t->loop, &t->timer);
    bt_task_cancel(t->loop, &t->flush);
    /* A reset tells a reader of a cut body that it is not complete. */
    if (!reset || uv_tcp_close_reset(&t->tcp, on_closed) != 0) {
        uv_close((uv_handle_t *)&t->tcp, on_closed);
    }
}

static void gone(struct bt_tcp *t, enum bt_tcp_gone how, const char *why)
{
    if (t->closing) {
        return;
    }
    close_handle(t, how == BT_TCP_GONE_ERROR || how == BT_TCP_GONE_TIMEOUT);
    t->ops->on_gone(t->core, how, why);
}

enum bt_status bt_tcp_create(struct bt_net_loop *l, const struct bt_tcp_ops *ops, void *core,
                             struct bt_tls *tls, struct bt_tcp **out)
{
    struct bt_tcp *t = bt_calloc(1, sizeof *t);

    if (t == NULL || uv_tcp_init(&l->uv, &t->tcp) != 0) {
        bt_free(t);
        bt_tls_destroy(tls);
        return BT_ERR_NOMEM;
    }
    t->loop = l;
    t->ops = ops;
    t->core = core;
    t->tls = tls;
    t->tcp.data = t;
    *out = t;
    return BT_OK;
}

/* ---- reading ---- */

static void on_alloc(uv_handle_t *h, size_t suggested, uv_buf_t *buf)
{
    struct bt_tcp *t = h->data;

    (void)suggested;
    *buf = uv_buf_init(t->loop->read_buf, BT_NET_READ_BYTES);
}

static void deliver_tls(struct bt_tcp *t, const char *data, size_t len)
{
    struct bt_buf plain = {0};
    bool eof = false;
    enum bt_status st = bt_tls_feed(t->tls, data, len, &plain, &eof);

    if (st == BT_OK && !t->tls_told && bt_tls_ready(t->tls)) {
        t->tls_told = true;
        bt_timer_stop(t->loop, &t->timer); /* of a connect */
        t->ops->on_ready(t->core, bt_tls_is_h2(t->tls));
    }
    if (st == BT_OK && plain.len > 0) {
        t->ops->on_bytes(t->core, plain.data, plain.len);
    }
    bt_buf_fini(&plain);
    if (st == BT_OK && eof && !t->eof) {
        t->eof = true;
        t->ops->on_eof(t->core);
    }
    if (st != BT_OK) {
        struct bt_buf alert = {0};
        if (bt_tls_output(t->tls, &alert) && alert.len > 0 && !t->writing) {
            uv_buf_t b = uv_buf_init(alert.data, (unsigned)alert.len);
            (void)uv_try_write((uv_stream_t *)&t->tcp, &b, 1); /* best effort before closing */
        }
        bt_buf_fini(&alert);
        char why[256];
        (void)snprintf(why, sizeof why, "tls: %s", bt_tls_error(t->tls));
        if (!t->closing) {
            close_handle(t, false); /* no reset: the alert should arrive */
            t->ops->on_gone(t->core, BT_TCP_GONE_ERROR, why);
        }
    }
}

static void on_read(uv_stream_t *s, ssize_t n, const uv_buf_t *buf)
{
    struct bt_tcp *t = s->data;

    if (n == 0) {
        return;
    }
    if (n < 0) {
        if (t->lingering) {
            gone(t, BT_TCP_GONE_FINISHED, "");
        } else if (n == UV_EOF && (t->tls == NULL || t->tls_told)) {
            (void)uv_read_stop(s); /* always succeeds */
            t->reading = false;
            if (!t->eof) {
                t->eof = true;
                t->ops->on_eof(t->core);
            }
            flush(t);
        } else {
            gone(t, BT_TCP_GONE_PEER, uv_strerror((int)n));
        }
        return;
    }
    if (t->lingering) {
        return; /* thrown away: only so that the peer's unread bytes do not turn our close into a
                   reset */
    }
    if (t->tls != NULL) {
        deliver_tls(t, buf->base, (size_t)n);
    } else {
        t->ops->on_bytes(t->core, buf->base, (size_t)n);
    }
    if (!t->closing) {
        flush(t);
    }
}

static void update_reading(struct bt_tcp *t)
{
    bool want = !t->eof && (t->lingering || t->ops->want_read(t->core));

    if (want == t->reading || t->closing) {
        return;
    }
    if (want) {
        int rc = uv_read_start((uv_stream_t *)&t->tcp, on_alloc, on_read);
        if (rc != 0) {
            gone(t, BT_TCP_GONE_PEER, uv_strerror(rc));
            return;
        }
    } else {
        (void)uv_read_stop((uv_stream_t *)&t->tcp); /* always succeeds */
    }
    t->reading = want;
}

/* ---- writing ---- */

static void linger_over(struct bt_timer *timer, void *arg)
{
    (void)timer;
    gone(arg, BT_TCP_GONE_FINISHED, "");
}

static void on_shutdown(uv_shutdown_t *req, int status)
{
    struct bt_tcp *t = req->data;

    if (t->closing) {
        return;
    }
    if (status != 0 || t->eof) {
        gone(t, BT_TCP_GONE_FINISHED, "");
        return;
    }
    update_reading(t);
}

/* All output is out and the core is done: half-close, then wait for the peer's end a little. */
static void finish(struct bt_tcp *t)
{
    t->lingering = true;
    if (t->tls != NULL) {
        struct bt_buf bye = {0};
        bt_tls_close_notify(t->tls);
        if (bt_tls_output(t->tls, &bye) && bye.len > 0) {
            uv_buf_t b = uv_buf_init(bye.data, (unsigned)bye.len);
            (void)uv_try_write((uv_stream_t *)&t->tcp, &b, 1); /* courtesy only */
        }
        bt_buf_fini(&bye);
    }
    t->shutdown_req.data = t;
    int rc = uv_shutdown(&t->shutdown_req, (uv_stream_t *)&t->tcp, on_shutdown);
    if (rc != 0) {
        gone(t, BT_TCP_GONE_FINISHED, "");
        return;
    }
    bt_timer_start(t->loop, &t->timer, LINGER_NS, linger_over, t);
}

static void on_written(uv_write_t *req, int status)
{
    struct bt_tcp *t = req->data;

    t->writing = false;
    if (t->closing) {
        return;
    }
    if (status != 0) {
        gone(t, BT_TCP_GONE_PEER, uv_strerror(status));
        return;
    }
    flush(t);
}

/* Bytes for the wire, in one of the loop's shared buffers; NULL: failed. */
static struct bt_buf *next_output(struct bt_tcp *t)
{
    struct bt_buf *plain = &t->loop->pull_buf;

    bt_buf_clear(plain);
    if (t->tls == NULL) {
        t->ops->pull(t->core, plain, BT_NET_PULL_BYTES);
        return plain->failed ? NULL : plain;
    }
    struct bt_buf *wire = &t->loop->tls_buf;
    bt_buf_clear(wire);
    if (bt_tls_ready(t->tls) && t->tls_told) {
        t->ops->pull(t->core, plain, BT_NET_PULL_BYTES);
        if (plain->failed || bt_tls_write(t->tls, plain->data, plain->len) != BT_OK) {
            return NULL;
        }
    }
    return bt_tls_output(t->tls, wire) && !wire->failed ? wire : NULL;
}

/* Writes what the socket takes now, and leaves the rest to one write request. false: connection
 * gone. */
static bool send_out(struct bt_tcp *t, const struct bt_buf *out)
{
    uv_buf_t b = uv_buf_init(out->data, (unsigned)out->len);
    int n = uv_try_write((uv_stream_t *)&t->tcp, &b, 1);

    if (n < 0 && n != UV_EAGAIN) {
        gone(t, BT_TCP_GONE_PEER, uv_strerror(n));
        return false;
    }
    size_t sent = n > 0 ? (size_t)n : 0;
    if (sent == out->len) {
        return true;
    }
    bt_buf_clear(&t->rest);
    if (!bt_buf_add(&t->rest, out->data + sent, out->len - sent)) {
        gone(t, BT_TCP_GONE_ERROR, "no memory");
        return false;
    }
    b = uv_buf_init(t->rest.data, (unsigned)t->rest.len);
    t->write_req.data = t;
    int rc = uv_write(&t->write_req, (uv_stream_t *)&t->tcp, &b, 1, on_written);
    if (rc != 0) {
        gone(t, BT_TCP_GONE_PEER, uv_strerror(rc));
        return false;
    }
    t->writing = true;
    t->taken_left = t->rest.len;
    t->taken_ns = bt_clock_ns();
    return true;
}

static void on_flush(struct bt_task *task, void *arg)
{
    (void)task;
    flush(arg);
}

/* Never re-entered: it runs from libuv callbacks and from the deferred task only. */
static void flush(struct bt_tcp *t)
{
    unsigned round = 0;

    if (t->closing || t->connecting || t->lingering) {
        return;
    }
    while (!t->writing) {
        if (t->ops->state(t->core) == BT_TCP_CORE_BROKEN) {
            gone(t, BT_TCP_GONE_ERROR, "protocol error");
            return;
        }
        if (round++ == FLUSH_ROUNDS) { /* let other connections have their turn */
            bt_task_defer(t->loop, &t->flush, on_flush, t);
            break;
        }
        struct bt_buf *out = next_output(t);
        if (t->closing) {
            return;
        }
        if (out == NULL) {
            t->loop->pull_buf.failed = t->loop->tls_buf.failed = false;
            gone(t, BT_TCP_GONE_ERROR, "no memory or tls failure");
            return;
        }
        if (out->len == 0) {
            break;
        }
        if (!send_out(t, out)) {
            return;
        }
    }
    if (!t->writing) {
        if (t->rest.cap > REST_KEEP) {
            bt_buf_fini(&t->rest);
        }
        enum bt_tcp_core st = t->ops->state(t->core);
        if (st == BT_TCP_CORE_BROKEN) {
            gone(t, BT_TCP_GONE_ERROR, "protocol error");
            return;
        }
        if (st == BT_TCP_CORE_FINISHED && !t->flush.queued) {
            finish(t);
            return;
        }
    }
    update_reading(t);
}

void bt_tcp_kick(struct bt_tcp *t)
{
    if (!t->closing && !t->writing) {
        bt_task_defer(t->loop, &t->flush, on_flush, t);
    }
}

bool bt_tcp_check_stuck(struct bt_tcp *t, uint64_t now_ns, uint64_t timeout_ns)
{
    if (!t->writing || t->closing) {
        return false;
    }
    size_t left = uv_stream_get_write_queue_size((uv_stream_t *)&t->tcp);
    if (left != t->taken_left) {
        t->taken_left = left;
        t->taken_ns = now_ns;
        return false;
    }
    if (now_ns - t->taken_ns < timeout_ns) {
        return false;
    }
    gone(t, BT_TCP_GONE_TIMEOUT, "peer does not read");
    return true;
}

void bt_tcp_close(struct bt_tcp *t, bool quiet)
{
    if (t->closing) {
        return;
    }
    close_handle(t, false);
    if (!quiet) {
        t->ops->on_gone(t->core, BT_TCP_GONE_CLOSED, "closed");
    }
}

/* ---- opening ---- */

static void set_socket_options(struct bt_tcp *t)
{
    /* Latency of small frames; dead peers behind a cut cable. Failure costs only that. */
    (void)uv_tcp_nodelay(&t->tcp, 1);
    (void)uv_tcp_keepalive(&t->tcp, 1, TCP_KEEPALIVE_S);
}

void bt_tcp_dead_after(struct bt_tcp *t, uint64_t ns)
{
    unsigned ms = ns / BT_NS_PER_MS < UINT_MAX ? (unsigned)(ns / BT_NS_PER_MS) : UINT_MAX;
    int every = TCP_PROBES_S;
    uv_os_fd_t fd;

    if (uv_fileno((const uv_handle_t *)&t->tcp, &fd) == 0) {
        (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof every);
        (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof ms);
    }
}

static void read_peer_name(struct bt_tcp *t)
{
    struct sockaddr_storage ss;
    struct bt_hostport hp;
    int len = sizeof ss;

    if (uv_tcp_getpeername(&t->tcp, (struct sockaddr *)&ss, &len) == 0) {
        bt_hostport_from_sockaddr((const struct sockaddr *)&ss, &hp);
        (void)bt_hostport_text(&hp, t->peer);
    }
}

enum bt_status bt_tcp_accept(struct bt_tcp *t, uv_tcp_t *listener)
{
    if (uv_accept((uv_stream_t *)listener, (uv_stream_t *)&t->tcp) != 0) {
        return BT_ERR_IO;
    }
    set_socket_options(t);
    read_peer_name(t);
    return BT_OK;
}

static void connect_over(struct bt_timer *timer, void *arg)
{
    (void)timer;
    gone(arg, BT_TCP_GONE_TIMEOUT, "connect timeout");
}

static void on_connect(uv_connect_t *req, int status)
{
    struct bt_tcp *t = req->data;

    if (t->closing) {
        return;
    }
    if (status != 0) {
        gone(t, BT_TCP_GONE_PEER, uv_strerror(status));
        return;
    }
    t->connecting = false;
    set_socket_options(t);
    read_peer_name(t);
    if (t->tls == NULL) {
        bt_timer_stop(t->loop, &t->timer);
        t->ops->on_ready(t->core, true);
    }
    flush(t);
}

enum bt_status bt_tcp_connect(struct bt_tcp *t, const struct bt_hostport *to, uint64_t timeout_ns,
                              struct bt_err *err)
{
    struct sockaddr_storage ss;

    if (uv_ip4_addr(to->host, to->port, (struct sockaddr_in *)&ss) != 0 &&
        uv_ip6_addr(to->host, to->port, (struct sockaddr_in6 *)&ss) != 0) {
        return bt_err_set(err, BT_ERR_INVALID, "not a numeric address: %s", to->host);
    }
    t->connect_req.data = t;
    int rc = uv_tcp_connect(&t->connect_req, &t->tcp, (const struct sockaddr *)&ss, on_connect);
    if (rc != 0) {
        return bt_err_set(err, BT_ERR_IO, "connect: %s", uv_strerror(rc));
    }
    t->connecting = true;
    bt_timer_start(t->loop, &t->timer, timeout_ns, connect_over, t);
    return BT_OK;
}
