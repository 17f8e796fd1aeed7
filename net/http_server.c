/* The listening side: accepts, gives each connection a transport and a protocol core, ticks them,
 * drains and closes. It knows no HTTP beyond what http_int.h offers. */

#include "net/http.h"
#include "net/http_server_int.h"

#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "net/tcp_int.h"

#define TICK_MAX_NS (250 * BT_NS_PER_MS)
#define TICK_MIN_NS (5 * BT_NS_PER_MS)
#define BACKLOG     1024

struct server_conn {
    struct bt_http_server *server;
    struct bt_tcp *tcp;
    struct bt_http_conn *core;
    struct server_conn *next, *prev;
};

struct bt_http_server {
    struct bt_net_loop *loop;
    struct bt_http_env env;
    struct bt_tls_ctx *tls;
    uv_tcp_t listener;
    struct server_conn *conns;
    uint32_t n_conns;
    struct bt_timer tick;
    struct bt_task teardown;
    uint64_t tick_ns;
    uint64_t date_s; /* second that env.date shows */
    char address[BT_ADDR_TEXT_MAX];
    uint16_t port;
    void (*drained)(void *arg);
    void *drained_arg;
    struct bt_task drained_task;
    bool listening; /* the listener handle is open */
    bool draining, closing;
};

/* ---- transport callbacks ---- */

static void kick(void *arg)
{
    struct server_conn *sc = arg;

    bt_tcp_kick(sc->tcp);
}

static void on_ready(void *core, bool h2)
{
    struct server_conn *sc = core;

    bt_http_conn_alpn(sc->core, h2);
}

static void on_bytes(void *core, const char *data, size_t len)
{
    struct server_conn *sc = core;

    bt_http_conn_feed(sc->core, bt_clock_ns(), data, len);
}

static void on_eof(void *core)
{
    struct server_conn *sc = core;

    bt_http_conn_eof(sc->core, bt_clock_ns());
}

static void pull(void *core, struct bt_buf *out, size_t max)
{
    struct server_conn *sc = core;

    bt_http_conn_pull(sc->core, bt_clock_ns(), out, max);
}

static bool want_read(void *core)
{
    struct server_conn *sc = core;

    return bt_http_conn_want_read(sc->core);
}

static enum bt_tcp_core core_state(void *core)
{
    struct server_conn *sc = core;

    if (sc->core->broken) {
        return BT_TCP_CORE_BROKEN;
    }
    return bt_http_conn_finished(sc->core) ? BT_TCP_CORE_FINISHED : BT_TCP_CORE_OPEN;
}

static void on_drained(struct bt_task *task, void *arg)
{
    struct bt_http_server *sv = arg;

    (void)task;
    if (sv->drained != NULL) {
        sv->drained(sv->drained_arg);
    }
}

static void unlink_conn(struct server_conn *sc)
{
    struct bt_http_server *sv = sc->server;

    if (sc->prev != NULL) {
        sc->prev->next = sc->next;
    } else {
        sv->conns = sc->next;
    }
    if (sc->next != NULL) {
        sc->next->prev = sc->prev;
    }
    sv->n_conns--;
    bt_free(sc);
    if (sv->draining && !sv->closing && sv->n_conns == 0) {
        bt_task_defer(sv->loop, &sv->drained_task, on_drained, sv);
    }
}

static void on_gone(void *core, enum bt_tcp_gone how, const char *why)
{
    static const enum bt_http_close reasons[] = {
        [BT_TCP_GONE_FINISHED] = BT_HTTP_CLOSE_DONE, [BT_TCP_GONE_PEER] = BT_HTTP_CLOSE_PEER,
        [BT_TCP_GONE_ERROR] = BT_HTTP_CLOSE_ERROR,   [BT_TCP_GONE_TIMEOUT] = BT_HTTP_CLOSE_TIMEOUT,
        [BT_TCP_GONE_CLOSED] = BT_HTTP_CLOSE_SERVER,
    };
    struct server_conn *sc = core;

    if (how != BT_TCP_GONE_FINISHED && how != BT_TCP_GONE_CLOSED) {
        bt_log_debug("net", "%s: connection gone: %s", sc->core->peer, why);
    }
    enum bt_http_close reason = reasons[how];
    if (how == BT_TCP_GONE_ERROR && sc->core->proto == BT_HTTP_H2 && sc->core->h2 != NULL &&
        sc->tcp->eof) {
        reason = BT_HTTP_CLOSE_PEER; /* an HTTP/2 client that closed its connection */
    }
    bt_http_conn_destroy(sc->core, reason);
    unlink_conn(sc);
}

static const struct bt_tcp_ops tcp_ops = {
    .on_ready = on_ready,
    .on_bytes = on_bytes,
    .on_eof = on_eof,
    .pull = pull,
    .want_read = want_read,
    .state = core_state,
    .on_gone = on_gone,
};

/* ---- accepting ---- */

static void drop_one(struct bt_http_server *sv)
{
    struct bt_tcp *t = NULL;

    if (bt_tcp_create(sv->loop, &tcp_ops, NULL, NULL, &t) == BT_OK) {
        if (bt_tcp_accept(t, &sv->listener) != BT_OK) {
            bt_log_debug("net", "%s: accept failed", sv->address);
        }
        bt_tcp_close(t, true);
    }
}

static enum bt_status open_conn(struct bt_http_server *sv)
{
    struct bt_tls *tls = NULL;
    struct server_conn *sc = bt_calloc(1, sizeof *sc);

    if (sc == NULL) {
        return BT_ERR_NOMEM;
    }
    sc->server = sv;
    if (sv->tls != NULL) {
        tls = bt_tls_create(sv->tls, NULL);
        if (tls == NULL) {
            bt_free(sc);
            return BT_ERR_NOMEM;
        }
    }
    enum bt_status st = bt_tcp_create(sv->loop, &tcp_ops, sc, tls, &sc->tcp);
    if (st != BT_OK) {
        bt_free(sc);
        return st;
    }
    st = bt_tcp_accept(sc->tcp, &sv->listener);
    if (st == BT_OK) {
        bt_tcp_dead_after(sc->tcp, sv->env.opts.write_timeout_ns);
        sc->core = bt_http_conn_create(&sv->env, sc->tcp->peer, sv->tls != NULL, false,
                                       bt_clock_ns(), kick, sc);
        st = sc->core != NULL ? BT_OK : BT_ERR_NOMEM;
    }
    if (st != BT_OK) {
        bt_tcp_close(sc->tcp, true);
        bt_free(sc);
        return st;
    }
    sc->next = sv->conns;
    if (sv->conns != NULL) {
        sv->conns->prev = sc;
    }
    sv->conns = sc;
    sv->n_conns++;
    bt_tcp_kick(sc->tcp); /* the first flush starts reading */
    return BT_OK;
}

static void on_connection(uv_stream_t *listener, int status)
{
    struct bt_http_server *sv = listener->data;

    if (status < 0) {
        bt_log_warn("net", "%s: accept: %s", sv->address, uv_strerror(status));
        return;
    }
    if (sv->n_conns >= sv->env.opts.connections_max) {
        bt_log_debug("net", "%s: connection refused: %u are open", sv->address, sv->n_conns);
        drop_one(sv);
        return;
    }
    enum bt_status st = open_conn(sv);
    if (st != BT_OK) {
        bt_log_warn("net", "%s: connection refused: %s", sv->address, bt_status_str(st));
    }
}

/* ---- time ---- */

static void update_date(struct bt_http_server *sv)
{
    uint64_t now_s = bt_clock_unix_ns() / BT_NS_PER_S;
    time_t t = (time_t)now_s;
    struct tm tm;

    if (now_s != sv->date_s && gmtime_r(&t, &tm) != NULL) {
        sv->date_s = now_s;
        (void)strftime(sv->env.date, sizeof sv->env.date, "%a, %d %b %Y %H:%M:%S GMT", &tm);
    }
}

static void on_tick(struct bt_timer *timer, void *arg)
{
    struct bt_http_server *sv = arg;
    uint64_t now = bt_clock_ns();

    update_date(sv);
    for (struct server_conn *sc = sv->conns, *next; sc != NULL; sc = next) {
        next = sc->next;
        if (bt_tcp_check_stuck(sc->tcp, now, sv->env.opts.write_timeout_ns)) {
            continue;
        }
        bt_http_conn_tick(sc->core, now);
        bt_tcp_kick(sc->tcp);
    }
    bt_timer_start(sv->loop, timer, sv->tick_ns, on_tick, sv);
}

static uint64_t tick_for(const struct bt_http_server_opts *o)
{
    uint64_t shortest = o->header_timeout_ns;

    shortest = o->idle_timeout_ns < shortest ? o->idle_timeout_ns : shortest;
    shortest = o->write_timeout_ns < shortest ? o->write_timeout_ns : shortest;
    uint64_t tick = shortest / 4;
    return tick < TICK_MIN_NS ? TICK_MIN_NS : tick > TICK_MAX_NS ? TICK_MAX_NS : tick;
}

/* ---- life ---- */

static enum bt_status bind_listener(struct bt_http_server *sv, const struct bt_hostport *hp,
                                    struct bt_err *err)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *ai = NULL;
    char port[8];

    (void)snprintf(port, sizeof port, "%u", (unsigned)hp->port);
    int rc = getaddrinfo(hp->host, port, &hints, &ai);
    if (rc != 0) {
        return bt_err_set(err, BT_ERR_INVALID, "listen %s: %s", hp->host, gai_strerror(rc));
    }
    rc = uv_tcp_bind(&sv->listener, ai->ai_addr, 0);
    freeaddrinfo(ai);
    if (rc == 0) {
        rc = uv_listen((uv_stream_t *)&sv->listener, BACKLOG, on_connection);
    }
    if (rc != 0) {
        return bt_err_set(err, BT_ERR_IO, "listen %s:%u: %s", hp->host, (unsigned)hp->port,
                          uv_strerror(rc));
    }
    struct sockaddr_storage ss;
    struct bt_hostport bound = {.port = 0};
    int len = sizeof ss;
    if (uv_tcp_getsockname(&sv->listener, (struct sockaddr *)&ss, &len) == 0) {
        bt_hostport_from_sockaddr((const struct sockaddr *)&ss, &bound);
    }
    sv->port = bound.port;
    (void)bt_hostport_text(&bound, sv->address);
    return BT_OK;
}

static void free_server(struct bt_http_server *sv)
{
    bt_tls_ctx_destroy(sv->tls);
    bt_free(sv);
}

static void on_listener_closed(uv_handle_t *h)
{
    struct bt_http_server *sv = h->data;

    sv->listening = false;
    if (sv->closing && !sv->teardown.queued) {
        free_server(sv);
    }
}

static enum bt_status open_tls(struct bt_http_server *sv, const struct bt_http_server_opts *o,
                               struct bt_err *err)
{
    if ((o->tls_cert == NULL) != (o->tls_key == NULL)) {
        return bt_err_set(err, BT_ERR_INVALID, "tls needs both a certificate and a key");
    }
    return o->tls_cert == NULL ? BT_OK : bt_tls_server_ctx(o->tls_cert, o->tls_key, &sv->tls, err);
}

enum bt_status bt_http_server_create(struct bt_net_loop *l, const struct bt_http_server_opts *opts,
                                     struct bt_http_server **out, struct bt_err *err)
{
    struct bt_hostport hp;
    enum bt_status st = bt_hostport_parse(opts->listen, -1, &hp, err);

    if (st != BT_OK) {
        return st;
    }
    struct bt_http_server *sv = bt_calloc(1, sizeof *sv);
    if (sv == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "no memory");
    }
    sv->loop = l;
    sv->env.opts = *opts;
    sv->env.opts.listen = sv->env.opts.tls_cert = sv->env.opts.tls_key = NULL;
    bt_http_opts_defaults(&sv->env.opts);
    st = open_tls(sv, opts, err);
    if (st != BT_OK) {
        bt_free(sv);
        return st;
    }
    if (uv_tcp_init(&l->uv, &sv->listener) != 0) {
        free_server(sv);
        return bt_err_set(err, BT_ERR_NOMEM, "no memory");
    }
    sv->listener.data = sv;
    sv->listening = true;
    st = bind_listener(sv, &hp, err);
    if (st != BT_OK) {
        sv->closing = true;
        uv_close((uv_handle_t *)&sv->listener, on_listener_closed);
        return st;
    }
    update_date(sv);
    sv->tick_ns = tick_for(&sv->env.opts);
    bt_timer_start(l, &sv->tick, sv->tick_ns, on_tick, sv);
    *out = sv;
    return BT_OK;
}

const char *bt_http_server_address(const struct bt_http_server *sv)
{
    return sv->address;
}

uint16_t bt_http_server_port(const struct bt_http_server *sv)
{
    return sv->port;
}

uint32_t bt_http_server_connections(const struct bt_http_server *sv)
{
    return sv->n_conns;
}

uint32_t bt_http_server_streams(const struct bt_http_server *sv)
{
    uint32_t n = 0;

    for (const struct server_conn *sc = sv->conns; sc != NULL; sc = sc->next) {
        n += sc->core->n_streams;
    }
    return n;
}

void bt_http_server_set_grpc(struct bt_http_server *sv,
                             bool (*fn)(struct bt_http_stream *s, const struct bt_http_request *req,
                                        void *arg),
                             void *arg)
{
    sv->env.grpc = fn;
    sv->env.grpc_arg = arg;
}

static void close_listener(struct bt_http_server *sv)
{
    if (sv->listening && !uv_is_closing((uv_handle_t *)&sv->listener)) {
        uv_close((uv_handle_t *)&sv->listener, on_listener_closed);
    }
}

void bt_http_server_drain(struct bt_http_server *sv, void (*done)(void *arg), void *arg)
{
    if (sv->draining) {
        return;
    }
    sv->draining = true;
    sv->drained = done;
    sv->drained_arg = arg;
    close_listener(sv);
    for (struct server_conn *sc = sv->conns; sc != NULL; sc = sc->next) {
        bt_http_conn_drain(sc->core);
    }
    if (sv->n_conns == 0) {
        bt_task_defer(sv->loop, &sv->drained_task, on_drained, sv);
    }
}

static void teardown(struct bt_task *task, void *arg)
{
    struct bt_http_server *sv = arg;

    (void)task;
    while (sv->conns != NULL) {
        bt_tcp_close(sv->conns->tcp, false);
    }
    if (sv->listening) {
        close_listener(sv);
    } else {
        free_server(sv);
    }
}

void bt_http_server_close(struct bt_http_server *sv)
{
    if (sv == NULL) {
        return;
    }
    BT_ASSERT(!sv->closing);
    sv->closing = true;
    bt_timer_stop(sv->loop, &sv->tick);
    bt_task_cancel(sv->loop, &sv->drained_task);
    for (struct server_conn *sc = sv->conns; sc != NULL; sc = sc->next) {
        bt_http_conn_abandon(sc->core, BT_HTTP_CLOSE_SERVER);
    }
    /* Connections go in a turn of their own: this call may come from one of their callbacks. */
    bt_task_defer(sv->loop, &sv->teardown, teardown, sv);
}
