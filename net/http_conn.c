/* One HTTP connection without I/O: tells HTTP/2 from HTTP/1.1 by the first bytes and hands on to
 * the right codec. It owns the list of streams and the clock value; it knows no socket. */

#include "net/http_int.h"

#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"

static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
#define PREFACE_LEN (sizeof preface - 1)

void bt_http_opts_defaults(struct bt_http_server_opts *o)
{
#define DEFAULT(field, value) o->field = o->field != 0 ? o->field : (value)
    DEFAULT(header_bytes_max, (size_t)64 << 10);
    DEFAULT(headers_max, 128);
    DEFAULT(body_bytes_max, (uint64_t)64 << 20);
    DEFAULT(streams_max, 1024);
    DEFAULT(connections_max, 4096);
    DEFAULT(header_timeout_ns, 10 * BT_NS_PER_S);
    DEFAULT(idle_timeout_ns, 300 * BT_NS_PER_S);
    DEFAULT(write_timeout_ns, 60 * BT_NS_PER_S);
    DEFAULT(write_high, (size_t)256 << 10);
    DEFAULT(write_low, (size_t)64 << 10);
#undef DEFAULT
}

static bool start_codec(struct bt_http_conn *c, bool h2)
{
    if (h2) {
        c->h2 = bt_http2_create(c);
    } else {
        c->h1 = bt_http1_create(c);
    }
    if (c->h1 == NULL && c->h2 == NULL) {
        c->broken = true;
        return false;
    }
    c->proto = h2 ? BT_HTTP_H2 : BT_HTTP_H1;
    return true;
}

struct bt_http_conn *bt_http_conn_create(const struct bt_http_env *env, const char *peer, bool tls,
                                         bool client, uint64_t now_ns, void (*kick)(void *arg),
                                         void *kick_arg)
{
    struct bt_http_conn *c = bt_calloc(1, sizeof *c);

    if (c == NULL) {
        return NULL;
    }
    c->env = env;
    c->kick = kick;
    c->kick_arg = kick_arg;
    c->now_ns = c->last_read_ns = c->wait_since_ns = now_ns;
    c->tls = tls;
    c->client = client;
    (void)snprintf(c->peer, sizeof c->peer, "%s", peer);
    if (client && !start_codec(c, true)) {
        bt_free(c);
        return NULL;
    }
    return c;
}

void bt_http_conn_alpn(struct bt_http_conn *c, bool h2)
{
    if (h2 && c->proto == BT_HTTP_SNIFF) {
        (void)start_codec(c, true); /* failure marks the connection broken */
    }
}

/* Keeps bytes while they could still be the HTTP/2 preface. */
static void sniff(struct bt_http_conn *c, const char *data, size_t len)
{
    size_t take = PREFACE_LEN - c->n_sniff;

    if (take > len) {
        take = len;
    }
    memcpy(c->sniff + c->n_sniff, data, take);
    c->n_sniff += take;
    bool match = memcmp(c->sniff, preface, c->n_sniff) == 0;
    if (match && c->n_sniff < PREFACE_LEN) {
        return;
    }
    if (!start_codec(c, match)) {
        return;
    }
    if (match) {
        bt_http2_feed(c->h2, (const char *)c->sniff, c->n_sniff);
        bt_http2_feed(c->h2, data + take, len - take);
    } else {
        bt_http1_feed(c->h1, (const char *)c->sniff, c->n_sniff);
        bt_http1_feed(c->h1, data + take, len - take);
    }
}

void bt_http_conn_feed(struct bt_http_conn *c, uint64_t now_ns, const char *data, size_t len)
{
    c->now_ns = now_ns;
    if (c->broken || len == 0) {
        return;
    }
    if (c->proto == BT_HTTP_SNIFF && c->n_sniff == 0) {
        c->wait_since_ns = now_ns;
    }
    c->last_read_ns = now_ns;
    switch (c->proto) {
    case BT_HTTP_SNIFF:
        sniff(c, data, len);
        break;
    case BT_HTTP_H1:
        bt_http1_feed(c->h1, data, len);
        break;
    case BT_HTTP_H2:
        bt_http2_feed(c->h2, data, len);
        break;
    case BT_HTTP_DEAD:
        break;
    }
}

void bt_http_conn_eof(struct bt_http_conn *c, uint64_t now_ns)
{
    c->now_ns = now_ns;
    if (c->proto == BT_HTTP_H1) {
        bt_http1_eof(c->h1);
    } else {
        c->broken = true; /* HTTP/2 has no half-closed connections */
    }
}

void bt_http_conn_tick(struct bt_http_conn *c, uint64_t now_ns)
{
    c->now_ns = now_ns;
    switch (c->proto) {
    case BT_HTTP_SNIFF:
        if (now_ns - c->wait_since_ns >= c->env->opts.header_timeout_ns) {
            c->broken = true;
        }
        break;
    case BT_HTTP_H1:
        bt_http1_tick(c->h1);
        break;
    case BT_HTTP_H2:
        bt_http2_tick(c->h2);
        break;
    case BT_HTTP_DEAD:
        break;
    }
}

void bt_http_conn_pull(struct bt_http_conn *c, uint64_t now_ns, struct bt_buf *out, size_t max)
{
    c->now_ns = now_ns;
    if (c->broken) {
        return;
    }
    if (c->proto == BT_HTTP_H1) {
        bt_http1_pull(c->h1, out, max);
    } else if (c->proto == BT_HTTP_H2) {
        bt_http2_pull(c->h2, out, max);
    }
}

bool bt_http_conn_want_read(const struct bt_http_conn *c)
{
    return c->proto != BT_HTTP_H1 || bt_http1_want_read(c->h1);
}

bool bt_http_conn_finished(const struct bt_http_conn *c)
{
    switch (c->proto) {
    case BT_HTTP_SNIFF:
        return c->draining;
    case BT_HTTP_H1:
        return bt_http1_finished(c->h1);
    case BT_HTTP_H2:
        return bt_http2_finished(c->h2);
    case BT_HTTP_DEAD:
        break;
    }
    return true;
}

void bt_http_conn_drain(struct bt_http_conn *c)
{
    if (c->draining) {
        return;
    }
    c->draining = true;
    if (c->proto == BT_HTTP_H1) {
        bt_http1_drain(c->h1);
    } else if (c->proto == BT_HTTP_H2) {
        bt_http2_drain(c->h2);
    }
    c->kick(c->kick_arg);
}

void bt_http_conn_abandon(struct bt_http_conn *c, enum bt_http_close why)
{
    /* No stream is freed meanwhile: only top calls do that. */
    for (struct bt_http_stream *s = c->streams; s != NULL; s = s->next) {
        bt_http_stream_report(s, why);
    }
    c->broken = true;
}

void bt_http_conn_destroy(struct bt_http_conn *c, enum bt_http_close why)
{
    if (c == NULL) {
        return;
    }
    bt_http_conn_abandon(c, why);
    while (c->streams != NULL) {
        bt_http_stream_close(c->streams, why);
    }
    bt_http1_destroy(c->h1);
    bt_http2_destroy(c->h2);
    bt_free(c);
}
