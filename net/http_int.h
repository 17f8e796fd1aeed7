#ifndef BT_NET_HTTP_INT_H
#define BT_NET_HTTP_INT_H

/* Inside net/ only: the protocol side of an HTTP connection, without I/O and without a clock. Bytes
 * come in by feed, go out by pull, time comes as an argument. http_conn.c tells HTTP/1.1 from
 * HTTP/2, http1.c and http2.c speak them, http_stream.c holds what an exchange is in both.
 *
 * Two levels: *top* calls (feed, eof, tick, pull, drain, destroy) come from the transport and may
 * run user callbacks; *user* calls (bt_http_*) may come at any time, also inside those callbacks,
 * and never run one. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "net/addr.h"
#include "net/http.h"

#define BT_HTTP_STASH_MAX ((size_t)64 << 10) /* pipelined bytes kept while an exchange runs */

struct bt_http_conn;
struct bt_http1;
struct bt_http2;

/* ---- byte queue with a cheap front ---- */

struct bt_outq {
    struct bt_buf b;
    size_t off;
};
static inline size_t bt_outq_len(const struct bt_outq *q)
{
    return q->b.len - q->off;
}
bool bt_outq_add(struct bt_outq *q, const void *p, size_t n) BT_NODISCARD;
/* Moves at most max bytes to dst; returns how many. */
size_t bt_outq_take(struct bt_outq *q, void *dst, size_t max);
void bt_outq_fini(struct bt_outq *q);

/* ---- header block under construction, then an array ---- */

struct bt_hstore {
    struct bt_buf text; /* name NUL value NUL … */
    struct bt_hstore_at {
        uint32_t name, value;
    } *at;
    size_t n, cap;
    struct bt_http_header *v; /* after finish: without the pseudo headers */
    size_t n_v;
};
enum bt_hstore_result { BT_HSTORE_OK, BT_HSTORE_LIMIT, BT_HSTORE_BAD, BT_HSTORE_NOMEM };
/* Lower-cases the name; checks name and value. bytes_max and n_max are limits of the whole block.
 */
enum bt_hstore_result bt_hstore_add(struct bt_hstore *h, const char *name, size_t name_len,
                                    const char *value, size_t value_len, size_t bytes_max,
                                    size_t n_max);
bool bt_hstore_finish(struct bt_hstore *h) BT_NODISCARD; /* false: no memory */
/* Value of a pseudo header such as ":path", after finish; NULL. */
char *bt_hstore_pseudo(struct bt_hstore *h, const char *name);
void bt_hstore_fini(struct bt_hstore *h);

/* A header that may be sent: token name in lower case, value without CR, LF, NUL. Logs and says
 * false otherwise. */
bool bt_http_header_sendable(const struct bt_http_header *h);

/* ---- streams ---- */

struct bt_http_vt { /* HTTP/1.1 and HTTP/2 */
    void (*respond)(struct bt_http_stream *s, int status, const struct bt_http_header *headers,
                    size_t n, bool end);
    void (*write)(struct bt_http_stream *s, const void *data, size_t len);
    void (*end)(struct bt_http_stream *s, const struct bt_http_header *trailers, size_t n);
    void (*reset)(struct bt_http_stream *s, enum bt_http_code code);
    size_t (*queued)(const struct bt_http_stream *s);
};

struct bt_http_stream {
    struct bt_http_conn *conn;
    const struct bt_http_vt *vt;
    struct bt_http_stream *next, *prev; /* of the connection */
    struct bt_http_request req;
    struct bt_hstore head;     /* request (server) or response (client) */
    struct bt_hstore trailers; /* client: what came behind the body */
    const struct bt_http_events *ev;
    void *user;
    void (*on_head)(struct bt_http_stream *s, void *user,
                    int status); /* client: response headers */
    struct bt_outq out;          /* HTTP/2 body waiting; HTTP/1.1 queues on the connection */
    uint64_t body_bytes;         /* received */
    uint64_t length_left;        /* HTTP/1.1 response with content-length */
    uint64_t progress_ns;        /* when the queue last moved or was empty */
    uint64_t created_ns;
    uint32_t rst_code;      /* HTTP/2: how it was closed; UINT32_MAX: with its connection */
    int32_t id;             /* HTTP/2 */
    enum bt_http_close why; /* if why_set: how to report the end */
    bool why_set;
    bool requested;    /* on_request was delivered */
    bool request_done; /* the peer sends no more */
    bool responded, ended;
    bool no_body; /* HEAD, 204, 304: nothing of the body is sent */
    bool chunked, until_close;
    bool over_high;
    bool out_done;  /* HTTP/2: the last byte went to the framing layer */
    bool deferred;  /* HTTP/2: the framing layer waits for bytes */
    bool rejected;  /* answered here; what still comes is thrown away */
    bool unlimited; /* gRPC: no body limit, no body timeout */
    bool closed;    /* on_close was delivered */
    bool cut;       /* HTTP/2: RST_STREAM is queued */
};

struct bt_http_stream *bt_http_stream_new(struct bt_http_conn *c,
                                          const struct bt_http_vt *vt) BT_NODISCARD;
/* Top: head is finished and req can be filled. false: malformed (":path" missing …). */
bool bt_http_stream_fill_request(struct bt_http_stream *s, int version) BT_NODISCARD;
void bt_http_stream_on_request(struct bt_http_stream *s);
/* Top: a piece of the body. false: over the limit. */
bool bt_http_stream_on_data(struct bt_http_stream *s, const char *data, size_t len) BT_NODISCARD;
void bt_http_stream_on_end(struct bt_http_stream *s);
void bt_http_stream_check_writable(struct bt_http_stream *s);
void bt_http_stream_set_why(struct bt_http_stream *s,
                            enum bt_http_close why); /* first one counts */
/* Top: reports on_close, unless done. */
void bt_http_stream_report(struct bt_http_stream *s, enum bt_http_close why);
/* Top: reports on_close, unlinks, frees. */
void bt_http_stream_close(struct bt_http_stream *s, enum bt_http_close why);
/* The server answers itself. */
void bt_http_stream_reply_error(struct bt_http_stream *s, int status, const char *message);

/* ---- connections ---- */

struct bt_http_env {                 /* one per server or channel; outlives its connections */
    struct bt_http_server_opts opts; /* defaults applied; its strings are not used */
    /* true: took the request (content-type application/grpc) */
    bool (*grpc)(struct bt_http_stream *s, const struct bt_http_request *req, void *arg);
    void *grpc_arg;
    char date[32]; /* value of "date", kept fresh by the server; "": none */
};
void bt_http_opts_defaults(struct bt_http_server_opts *o);

enum bt_http_proto { BT_HTTP_SNIFF, BT_HTTP_H1, BT_HTTP_H2, BT_HTTP_DEAD };

struct bt_http_conn {
    const struct bt_http_env *env;
    void (*kick)(void *arg); /* output waits */
    void *kick_arg;
    enum bt_http_proto proto;
    struct bt_http1 *h1;
    struct bt_http2 *h2;
    struct bt_http_stream *streams;
    uint32_t n_streams;
    uint64_t now_ns;
    uint64_t last_read_ns;
    uint64_t wait_since_ns; /* begin of the wait for a request's headers */
    char peer[BT_ADDR_TEXT_MAX];
    char lost[128]; /* client: why the connection is gone, for the calls on it */
    bool tls, client;
    bool draining;
    bool broken;   /* cut the transport now */
    bool goaway;   /* client: the server takes no more streams */
    bool ping_out; /* client: a keepalive PING is unanswered */
    unsigned char sniff[24];
    size_t n_sniff;
};

/* client: HTTP/2 at once. NULL: no memory. */
struct bt_http_conn *bt_http_conn_create(const struct bt_http_env *env, const char *peer, bool tls,
                                         bool client, uint64_t now_ns, void (*kick)(void *arg),
                                         void *kick_arg) BT_NODISCARD;
void bt_http_conn_alpn(struct bt_http_conn *c,
                       bool h2); /* before the first feed; false: still sniffs */
void bt_http_conn_feed(struct bt_http_conn *c, uint64_t now_ns, const char *data, size_t len);
void bt_http_conn_eof(struct bt_http_conn *c, uint64_t now_ns);
void bt_http_conn_tick(struct bt_http_conn *c, uint64_t now_ns);
void bt_http_conn_pull(struct bt_http_conn *c, uint64_t now_ns, struct bt_buf *out, size_t max);
bool bt_http_conn_want_read(const struct bt_http_conn *c);
bool bt_http_conn_finished(const struct bt_http_conn *c);
void bt_http_conn_drain(struct bt_http_conn *c);
/* Reports on_close for all streams, whose memory stays until destroy: may be called inside a
 * callback. */
void bt_http_conn_abandon(struct bt_http_conn *c, enum bt_http_close why);
void bt_http_conn_destroy(struct bt_http_conn *c, enum bt_http_close why);

/* ---- http1.c ---- */

struct bt_http1 *bt_http1_create(struct bt_http_conn *c) BT_NODISCARD;
void bt_http1_destroy(struct bt_http1 *h);
void bt_http1_feed(struct bt_http1 *h, const char *data, size_t len);
void bt_http1_eof(struct bt_http1 *h);
void bt_http1_tick(struct bt_http1 *h);
void bt_http1_pull(struct bt_http1 *h, struct bt_buf *out, size_t max);
bool bt_http1_want_read(const struct bt_http1 *h);
bool bt_http1_finished(const struct bt_http1 *h);
void bt_http1_drain(struct bt_http1 *h);

/* ---- http2.c ---- */

struct bt_http2 *bt_http2_create(struct bt_http_conn *c) BT_NODISCARD;
void bt_http2_destroy(struct bt_http2 *h);
void bt_http2_feed(struct bt_http2 *h, const char *data, size_t len);
void bt_http2_tick(struct bt_http2 *h);
void bt_http2_pull(struct bt_http2 *h, struct bt_buf *out, size_t max);
bool bt_http2_finished(const struct bt_http2 *h);
void bt_http2_drain(struct bt_http2 *h);
/* Client: opens a stream; headers include the pseudo ones, in order. NULL: no memory, or ids used
 * up. */
struct bt_http_stream *bt_http2_request(struct bt_http_conn *c,
                                        const struct bt_http_header *headers,
                                        size_t n) BT_NODISCARD;
void bt_http2_ping(struct bt_http2 *h);

#endif
