/* gRPC, client side: a channel that connects when a call needs it, and calls on it. It decides
 * nothing about retries. */

#include "net/grpc.h"
#include "net/grpc_int.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "net/tcp_int.h"

#define CONNECT_TIMEOUT_NS (5 * BT_NS_PER_S)
#define MESSAGE_MAX        ((size_t)64 << 20)
#define META_BYTES_MAX     ((size_t)64 << 10)
#define META_MAX           128
#define TICK_NS            (1 * BT_NS_PER_S)

struct client_conn {
    struct bt_grpc_channel *channel;
    struct bt_tcp *tcp;
    struct bt_http_conn *core;
    struct client_conn *next, *prev;
    struct bt_timer tick;
    uint64_t ping_ns; /* when the unanswered PING went out */
    const char *why;  /* why we cut it ourselves */
    bool ready;
};

struct bt_grpc_channel {
    struct bt_net_loop *loop;
    struct bt_http_env env;
    struct bt_tls_ctx *tls;
    struct bt_hostport target;
    char address[BT_ADDR_TEXT_MAX];
    char *authority;
    uint64_t connect_timeout_ns, keepalive_ns;
    size_t message_max;
    struct bt_grpc_call *calls;
    struct client_conn *conns; /* the current one, and old ones that finish their calls */
    struct client_conn *cur;   /* connecting or ready; NULL */
    struct bt_hostport addrs[BT_RESOLVE_MAX];
    size_t n_addrs, next_addr;
    uint64_t connect_until_ns;
    struct bt_timer resolve_timer;
    struct bt_task teardown;
    bool resolving;
    bool dead; /* destroyed by the user; memory waits for resolver and connections */
};

static void connect_next(struct bt_grpc_channel *ch, const char *last_error);

/* ---- connections ---- */

static void kick(void *arg)
{
    struct client_conn *cc = arg;

    if (cc->tcp != NULL) {
        bt_tcp_kick(cc->tcp);
    }
}

static void start_stream(struct bt_grpc_call *c, struct client_conn *cc);

static bool waiting(const struct bt_grpc_call *c)
{
    return c->s == NULL && !c->ending && !c->closed;
}

static void fail_waiting(struct bt_grpc_channel *ch, const char *why)
{
    char message[256];

    (void)snprintf(message, sizeof message, "connect to %.100s: %.140s", ch->address, why);
    for (struct bt_grpc_call *c = ch->calls; c != NULL; c = c->next) {
        if (waiting(c)) {
            bt_grpc_call_end_later(c, BT_GRPC_UNAVAILABLE, message);
        }
    }
}

static void start_waiting(struct bt_grpc_channel *ch, struct client_conn *cc)
{
    for (struct bt_grpc_call *c = ch->calls; c != NULL; c = c->next) {
        if (waiting(c)) {
            start_stream(c, cc);
        }
    }
}

static void on_ready(void *core, bool h2)
{
    struct client_conn *cc = core;

    if (!h2) {
        cc->why = "the server does not offer HTTP/2";
        cc->core->broken = true;
        return;
    }
    cc->ready = true;
    bt_log_debug("net", "connected to %s", cc->channel->address);
    start_waiting(cc->channel, cc);
}

static void on_bytes(void *core, const char *data, size_t len)
{
    struct client_conn *cc = core;

    bt_http_conn_feed(cc->core, bt_clock_ns(), data, len);
    if (cc->core->goaway && cc->channel->cur == cc) {
        cc->channel->cur = NULL; /* later calls open a new connection */
    }
}

static void on_eof(void *core)
{
    struct client_conn *cc = core;

    bt_http_conn_eof(cc->core, bt_clock_ns());
}

static void pull(void *core, struct bt_buf *out, size_t max)
{
    struct client_conn *cc = core;

    bt_http_conn_pull(cc->core, bt_clock_ns(), out, max);
}

static bool want_read(void *core)
{
    (void)core;
    return true;
}

static enum bt_tcp_core core_state(void *core)
{
    struct client_conn *cc = core;

    if (cc->core->broken) {
        return BT_TCP_CORE_BROKEN;
    }
    return bt_http_conn_finished(cc->core) ? BT_TCP_CORE_FINISHED : BT_TCP_CORE_OPEN;
}

static void free_channel(struct bt_grpc_channel *ch)
{
    bt_tls_ctx_destroy(ch->tls);
    bt_free(ch->authority);
    bt_free(ch);
}

static void on_gone(void *core, enum bt_tcp_gone how, const char *why)
{
    static const enum bt_http_close reasons[] = {
        [BT_TCP_GONE_FINISHED] = BT_HTTP_CLOSE_PEER, [BT_TCP_GONE_PEER] = BT_HTTP_CLOSE_PEER,
        [BT_TCP_GONE_ERROR] = BT_HTTP_CLOSE_ERROR,   [BT_TCP_GONE_TIMEOUT] = BT_HTTP_CLOSE_TIMEOUT,
        [BT_TCP_GONE_CLOSED] = BT_HTTP_CLOSE_SERVER,
    };
    struct client_conn *cc = core;
    struct bt_grpc_channel *ch = cc->channel;
    bool was_ready = cc->ready;
    bool was_cur = ch->cur == cc;
    char text[128];

    bool by_eof = how == BT_TCP_GONE_ERROR && cc->tcp->eof;
    (void)snprintf(text, sizeof text, "%s",
                   cc->why != NULL ? cc->why
                   : by_eof        ? "closed by the server"
                                   : why);
    memcpy(cc->core->lost, text, sizeof cc->core->lost);
    if (was_cur) {
        ch->cur = NULL;
    }
    bt_timer_stop(ch->loop, &cc->tick);
    bt_http_conn_destroy(cc->core, by_eof ? BT_HTTP_CLOSE_PEER : reasons[how]);
    if (cc->prev != NULL) {
        cc->prev->next = cc->next;
    } else {
        ch->conns = cc->next;
    }
    if (cc->next != NULL) {
        cc->next->prev = cc->prev;
    }
    bt_free(cc);
    if (!ch->dead && was_cur && !was_ready) {
        connect_next(ch, text);
    }
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

static uint64_t tick_interval(const struct bt_grpc_channel *ch)
{
    uint64_t half = ch->keepalive_ns / 2;

    return half > 0 && half < TICK_NS ? half : TICK_NS;
}

static void on_tick(struct bt_timer *t, void *arg)
{
    struct client_conn *cc = arg;
    struct bt_grpc_channel *ch = cc->channel;
    uint64_t now = bt_clock_ns();

    bt_timer_start(ch->loop, t, tick_interval(ch), on_tick, cc);
    if (bt_tcp_check_stuck(cc->tcp, now, ch->env.opts.write_timeout_ns)) {
        return;
    }
    bt_http_conn_tick(cc->core, now);
    if (ch->keepalive_ns > 0 && cc->ready) {
        if (cc->core->ping_out && now - cc->ping_ns >= ch->keepalive_ns) {
            cc->why = "no answer to a keepalive PING";
            bt_tcp_close(cc->tcp, false);
            return;
        }
        if (!cc->core->ping_out && now - cc->core->last_read_ns >= ch->keepalive_ns) {
            cc->ping_ns = now;
            bt_http2_ping(cc->core->h2);
        }
    }
    bt_tcp_kick(cc->tcp);
}

static enum bt_status open_conn(struct bt_grpc_channel *ch, const struct bt_hostport *to,
                                struct bt_err *err)
{
    uint64_t now = bt_clock_ns();
    struct bt_tls *tls = NULL;
    struct client_conn *cc = bt_calloc(1, sizeof *cc);

    if (cc == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    cc->channel = ch;
    cc->core = bt_http_conn_create(&ch->env, ch->address, ch->tls != NULL, true, now, kick, cc);
    if (cc->core == NULL) {
        goto err_free;
    }
    if (ch->tls != NULL) {
        tls = bt_tls_create(ch->tls, ch->target.host);
        if (tls == NULL) {
            goto err_core;
        }
    }
    if (bt_tcp_create(ch->loop, &tcp_ops, cc, tls, &cc->tcp) != BT_OK) {
        goto err_core;
    }
    uint64_t left = ch->connect_until_ns > now ? ch->connect_until_ns - now : 1;
    enum bt_status st = bt_tcp_connect(cc->tcp, to, left, err);
    if (st != BT_OK) {
        bt_tcp_close(cc->tcp, true);
        bt_http_conn_destroy(cc->core, BT_HTTP_CLOSE_ERROR);
        bt_free(cc);
        return st;
    }
    cc->next = ch->conns;
    if (ch->conns != NULL) {
        ch->conns->prev = cc;
    }
    ch->conns = cc;
    ch->cur = cc;
    bt_timer_start(ch->loop, &cc->tick, tick_interval(ch), on_tick, cc);
    return BT_OK;
err_core:
    bt_http_conn_destroy(cc->core, BT_HTTP_CLOSE_ERROR);
err_free:
    bt_free(cc);
    return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
}

/* Tries the addresses in order; the last error is what waiting calls get. */
static void connect_next(struct bt_grpc_channel *ch, const char *last_error)
{
    struct bt_err err;
    char text[160];

    (void)snprintf(text, sizeof text, "%s", last_error);
    while (ch->next_addr < ch->n_addrs && bt_clock_ns() < ch->connect_until_ns) {
        if (open_conn(ch, &ch->addrs[ch->next_addr++], &err) == BT_OK) {
            return;
        }
        (void)snprintf(text, sizeof text, "%.150s", err.msg);
    }
    fail_waiting(ch, text);
}

static void on_resolved(void *arg, enum bt_status st, const struct bt_hostport *addrs, size_t n,
                        const char *why)
{
    struct bt_grpc_channel *ch = arg;

    ch->resolving = false;
    if (ch->dead) {
        if (!ch->teardown.queued) {
            free_channel(ch);
        }
        return;
    }
    bt_timer_stop(ch->loop, &ch->resolve_timer);
    if (st != BT_OK) {
        fail_waiting(ch, why);
        return;
    }
    memcpy(ch->addrs, addrs, n * sizeof *addrs);
    ch->n_addrs = n;
    ch->next_addr = 0;
    connect_next(ch, "connect timeout");
}

/* The look-up itself cannot be stopped; who waits for it can. */
static void resolve_over(struct bt_timer *t, void *arg)
{
    (void)t;
    fail_waiting(arg, "name look-up timeout");
}

static void start_connecting(struct bt_grpc_channel *ch)
{
    if (ch->cur != NULL || ch->resolving) {
        return;
    }
    ch->connect_until_ns = bt_clock_ns() + ch->connect_timeout_ns;
    if (bt_net_resolve(ch->loop, &ch->target, on_resolved, ch) != BT_OK) {
        fail_waiting(ch, "cannot start the name look-up");
        return;
    }
    ch->resolving = true;
    bt_timer_start(ch->loop, &ch->resolve_timer, ch->connect_timeout_ns, resolve_over, ch);
}

/* ---- calls: what the server sends ---- */

static void on_head(struct bt_http_stream *s, void *user, int status)
{
    struct bt_grpc_call *c = user;

    (void)s;
    c->http_status = status;
    bt_grpc_call_enter(c);
    if (status == 200 && c->ev->on_headers != NULL) {
        c->ev->on_headers(c, c->user);
    }
    bt_grpc_call_leave(c);
}

static bool on_frame(void *arg, const uint8_t *data, size_t len)
{
    struct bt_grpc_call *c = arg;

    if (c->ev->on_message != NULL) {
        c->ev->on_message(c, c->user, data, len);
    }
    return !c->closed && !c->ending;
}

static void cut_stream(struct bt_grpc_call *c, enum bt_grpc_status st, const char *message)
{
    struct bt_http_stream *s = c->s;

    bt_grpc_call_end_later(c, st, message);
    if (s != NULL) {
        bt_http_reset(s, BT_HTTP_CANCEL);
    }
}

static void on_data(struct bt_http_stream *s, void *user, const char *data, size_t len)
{
    struct bt_grpc_call *c = user;
    enum bt_grpc_status st = BT_GRPC_OK;
    char message[128];

    (void)s;
    if (c->http_status != 200) {
        return; /* some proxy's error page */
    }
    bt_grpc_call_enter(c);
    if (!bt_grpc_call_receive(c, data, len, on_frame, &st, message, sizeof message)) {
        cut_stream(c, st, message);
    }
    bt_grpc_call_leave(c);
}

static const char *find_trailer(const struct bt_http_stream *s, const char *name)
{
    const char *v = bt_http_header_find(s->trailers.v, s->trailers.n_v, name);

    return v != NULL ? v : bt_http_header_find(s->head.v, s->head.n_v, name);
}

/* The server ended the stream: its status, or why there is none. */
static void on_end(struct bt_http_stream *s, void *user)
{
    struct bt_grpc_call *c = user;
    const char *code = find_trailer(s, "grpc-status");
    const char *text = find_trailer(s, "grpc-message");
    struct bt_buf message = {0};
    char made[96];
    struct bt_grpc_end end = {.status = BT_GRPC_UNKNOWN, .message = made, .finished = code != NULL};

    made[0] = '\0';
    if (code != NULL) {
        char *rest = NULL;
        long v = strtol(code, &rest, 10);
        end.status = *rest == '\0' && v >= 0 && v <= BT_GRPC_UNAUTHENTICATED
                         ? (enum bt_grpc_status)v
                         : BT_GRPC_UNKNOWN;
        bt_grpc_message_decode(text != NULL ? text : "", &message);
        end.message = message.data != NULL ? message.data : "";
        bool split = s->trailers.n_v > 0;
        end.trailers = split ? s->trailers.v : s->head.v;
        end.n_trailers = split ? s->trailers.n_v : s->head.n_v;
    } else if (c->http_status != 200) {
        end.status = bt_grpc_status_from_http(c->http_status);
        (void)snprintf(made, sizeof made, "HTTP status %d", c->http_status);
    } else {
        (void)snprintf(made, sizeof made, "the response ends without grpc-status");
    }
    if (end.status == BT_GRPC_OK && !bt_grpc_deframe_idle(&c->in)) {
        end.status = BT_GRPC_INTERNAL;
        end.message = "the response ends inside a message";
    }
    bool open = !s->ended;
    bt_grpc_call_report(c, &end);
    bt_buf_fini(&message);
    if (open) {
        bt_http_reset(
            s, BT_HTTP_CANCEL); /* our side of the stream; the server is not interested any more */
    }
}

static void on_writable(struct bt_http_stream *s, void *user)
{
    struct bt_grpc_call *c = user;

    (void)s;
    bt_grpc_call_enter(c);
    if (c->ev->on_writable != NULL && !c->finished) {
        c->ev->on_writable(c, c->user);
    }
    bt_grpc_call_leave(c);
}

/* Without on_end before: the stream was reset, or the connection lost. */
static void on_close(struct bt_http_stream *s, void *user, enum bt_http_close why)
{
    struct bt_grpc_call *c = user;
    char text[192];
    struct bt_grpc_end end = {.status = BT_GRPC_UNAVAILABLE, .message = text};

    if (s->rst_code == UINT32_MAX) {
        (void)snprintf(text, sizeof text, "connection lost: %s",
                       s->conn->lost[0] != '\0' ? s->conn->lost : "no gRPC on the other side");
    } else {
        (void)snprintf(text, sizeof text, "stream reset by the server (code %" PRIu32 ")",
                       s->rst_code);
        switch (s->rst_code) {
        case 7: /* REFUSED_STREAM */
            break;
        case 8: /* CANCEL */
            end.status = BT_GRPC_CANCELLED;
            break;
        case 11: /* ENHANCE_YOUR_CALM */
            end.status = BT_GRPC_RESOURCE_EXHAUSTED;
            break;
        default:
            end.status = BT_GRPC_INTERNAL;
            break;
        }
    }
    if (why == BT_HTTP_CLOSE_TIMEOUT && s->rst_code != UINT32_MAX) {
        (void)snprintf(text, sizeof text, "the server does not read");
        end.status = BT_GRPC_UNAVAILABLE;
    }
    bt_grpc_call_report(c, &end);
}

static const struct bt_http_events stream_events = {
    .on_data = on_data,
    .on_end = on_end,
    .on_writable = on_writable,
    .on_close = on_close,
};

/* ---- calls: what we send ---- */

static size_t collect_headers(const struct bt_grpc_call *c, struct bt_http_header *h,
                              char timeout[16])
{
    size_t n = 0;

    for (size_t i = 0; i < c->meta.n; i++) {
        h[n++] = (struct bt_http_header){c->meta.text.data + c->meta.at[i].name,
                                         c->meta.text.data + c->meta.at[i].value};
    }
    if (c->deadline_ns != UINT64_MAX) {
        uint64_t now = bt_clock_ns();
        bt_grpc_timeout_text(c->deadline_ns > now ? c->deadline_ns - now : 1, timeout);
        h[n++] = (struct bt_http_header){"grpc-timeout", timeout};
    }
    return n;
}

static void start_stream(struct bt_grpc_call *c, struct client_conn *cc)
{
    struct bt_http_header h[META_MAX + 1];
    char timeout[16];
    size_t n = collect_headers(c, h, timeout);
    struct bt_http_stream *s = bt_http2_request(cc->core, h, n);

    if (s == NULL) {
        cc->channel->cur = NULL; /* broken, or its stream ids are used up */
        bt_grpc_call_end_later(c, BT_GRPC_UNAVAILABLE, "cannot open a stream");
        return;
    }
    s->on_head = on_head;
    bt_http_bind(s, &stream_events, c);
    c->s = s;
    bt_hstore_fini(&c->meta);
    if (c->pending.len > 0) {
        (void)bt_http_write(s, c->pending.data,
                            c->pending.len); /* its length was reported when queued */
        s->over_high = s->over_high || c->over_high;
        bt_buf_fini(&c->pending);
    }
    if (c->finished) {
        bt_http_end(s);
    }
}

static bool add_meta(struct bt_grpc_call *c, const char *name, const char *value)
{
    return bt_hstore_add(&c->meta, name, strlen(name), value, strlen(value), META_BYTES_MAX,
                         META_MAX) == BT_HSTORE_OK;
}

static bool build_meta(struct bt_grpc_call *c, const struct bt_grpc_channel *ch,
                       const struct bt_grpc_start *start)
{
    bool ok = add_meta(c, ":method", "POST") &&
              add_meta(c, ":scheme", ch->tls != NULL ? "https" : "http") &&
              add_meta(c, ":authority", ch->authority) && add_meta(c, ":path", start->path) &&
              add_meta(c, "te", "trailers") && add_meta(c, "content-type", "application/grpc") &&
              add_meta(c, "user-agent", "baton/" BT_VERSION) &&
              add_meta(c, "grpc-accept-encoding", "identity");

    for (size_t i = 0; ok && i < start->n_metadata; i++) {
        ok = start->metadata[i].name[0] != ':' &&
             add_meta(c, start->metadata[i].name, start->metadata[i].value);
    }
    return ok;
}

static void on_deadline(struct bt_timer *t, void *arg)
{
    (void)t;
    cut_stream(arg, BT_GRPC_DEADLINE_EXCEEDED, "deadline exceeded");
}

enum bt_status bt_grpc_call_start(struct bt_grpc_channel *ch, const struct bt_grpc_start *start,
                                  const struct bt_grpc_events *ev, void *user,
                                  struct bt_grpc_call **out)
{
    if (ch->dead || start->path[0] != '/') {
        return BT_ERR_INVALID;
    }
    struct bt_grpc_call *c = bt_grpc_call_new(ch->loop, true, ch->message_max, &ch->calls);
    if (c == NULL) {
        return BT_ERR_NOMEM;
    }
    c->channel = ch;
    c->write_high = ch->env.opts.write_high;
    if (!build_meta(c, ch, start)) {
        struct bt_grpc_end end = {.status = BT_GRPC_INVALID_ARGUMENT, .message = ""};
        bt_grpc_call_report(c, &end); /* no events are bound: only frees */
        return BT_ERR_INVALID;
    }
    c->ev = ev;
    c->user = user;
    if (start->timeout_ns > 0) {
        c->deadline_ns = bt_clock_ns() + start->timeout_ns;
        bt_timer_start(ch->loop, &c->deadline, start->timeout_ns, on_deadline, c);
    }
    if (ch->cur != NULL && (ch->cur->core->broken || ch->cur->core->goaway)) {
        ch->cur = NULL;
    }
    if (ch->cur != NULL && ch->cur->ready) {
        start_stream(c, ch->cur);
    } else {
        start_connecting(ch);
    }
    *out = c;
    return BT_OK;
}

void bt_grpc_half_close(struct bt_grpc_call *c)
{
    if (c->finished || c->closed || c->ending) {
        return;
    }
    BT_ASSERT(c->client);
    c->finished = true;
    if (c->s != NULL) {
        bt_http_end(c->s);
    }
}

void bt_grpc_cancel(struct bt_grpc_call *c)
{
    if (!c->closed && !c->ending) {
        cut_stream(c, BT_GRPC_CANCELLED, c->client ? "cancelled by the caller" : "cut");
    }
}

/* ---- the channel object ---- */

enum bt_status bt_grpc_channel_create(struct bt_net_loop *l,
                                      const struct bt_grpc_channel_opts *opts,
                                      struct bt_grpc_channel **out, struct bt_err *err)
{
    struct bt_hostport target;
    enum bt_status st = bt_hostport_parse(opts->address, -1, &target, err);

    if (st != BT_OK) {
        return st;
    }
    struct bt_grpc_channel *ch = bt_calloc(1, sizeof *ch);
    if (ch == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    ch->loop = l;
    ch->target = target;
    (void)bt_hostport_text(&target, ch->address);
    bt_http_opts_defaults(&ch->env.opts);
    ch->connect_timeout_ns =
        opts->connect_timeout_ns > 0 ? opts->connect_timeout_ns : CONNECT_TIMEOUT_NS;
    ch->keepalive_ns = opts->keepalive_ns;
    ch->message_max = opts->message_bytes_max > 0 ? opts->message_bytes_max : MESSAGE_MAX;
    ch->authority = bt_strdup(opts->authority != NULL ? opts->authority : ch->address);
    if (ch->authority == NULL) {
        bt_free(ch);
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    if (opts->tls) {
        st = bt_tls_client_ctx(opts->tls_ca, opts->tls_insecure, &ch->tls, err);
        if (st != BT_OK) {
            free_channel(ch);
            return st;
        }
    }
    *out = ch;
    return BT_OK;
}

const char *bt_grpc_channel_address(const struct bt_grpc_channel *ch)
{
    return ch->address;
}

static void teardown(struct bt_task *task, void *arg)
{
    struct bt_grpc_channel *ch = arg;

    (void)task;
    while (ch->conns != NULL) {
        bt_tcp_close(ch->conns->tcp, false);
    }
    if (!ch->resolving) {
        free_channel(ch);
    }
}

void bt_grpc_channel_destroy(struct bt_grpc_channel *ch)
{
    if (ch == NULL) {
        return;
    }
    ch->dead = true;
    bt_timer_stop(ch->loop, &ch->resolve_timer);
    for (struct client_conn *cc = ch->conns; cc != NULL; cc = cc->next) {
        bt_timer_stop(ch->loop, &cc->tick);
    }
    bt_grpc_call_report_all(&ch->calls, BT_GRPC_CANCELLED, "channel destroyed");
    /* Connections go in a turn of their own: this call may come from one of their callbacks. */
    bt_task_defer(ch->loop, &ch->teardown, teardown, ch);
}
