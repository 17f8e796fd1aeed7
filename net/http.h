#ifndef BT_NET_HTTP_H
#define BT_NET_HTTP_H

/* HTTP server: HTTP/1.1 and HTTP/2 (cleartext by prior knowledge, or TLS with ALPN; "Upgrade: h2c" is
 * ignored) on one port, one stream object for both. Everything runs on the loop thread; no call blocks; no callback runs
 * inside a call made by the user (so a stream is never gone when a call returns), except where
 * said.
 *
 * Life of a stream: on_request (headers are complete; bind events here) -> on_data* -> on_end, and
 * meanwhile or later respond, write*, end by the user; then on_close exactly once, after which the
 * pointer is dead. The peer may vanish at any time: on_close then comes without the rest. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct bt_net_loop;
struct bt_http_server;
struct bt_http_stream;

/* Names are lower case. Values have no CR, LF or NUL (outgoing ones that have are refused: the
 * header is left out and logged). */
struct bt_http_header {
    const char *name;
    const char *value;
};

struct bt_http_request {
    const char *method;    /* "GET" */
    const char *path;      /* as sent, not percent-decoded, without the query: "/v1/models" */
    const char *query;     /* after '?', "" without */
    const char *authority; /* Host or :authority, "" without */
    const char *peer;      /* "127.0.0.1:51234" */
    int version;           /* 10, 11, 20 */
    bool tls;
    bool has_body;           /* on_data may follow; on_end follows in any case */
    uint64_t content_length; /* UINT64_MAX: not given */
    const struct bt_http_header *headers;
    size_t n_headers;
};
/* The first header of that (lower-case) name, or NULL. */
const char *bt_http_header_find(const struct bt_http_header *headers, size_t n, const char *name);
/* Value of `name` in a query string "a=1&b=2", percent-decoded into out (NUL-terminated, cut at
 * cap). false: absent. */
bool bt_http_query_get(const char *query, const char *name, char *out, size_t cap);

enum bt_http_close {
    BT_HTTP_CLOSE_DONE,    /* the whole response was handed to the transport */
    BT_HTTP_CLOSE_PEER,    /* reset, disconnect, or end of input from the client before that */
    BT_HTTP_CLOSE_RESET,   /* bt_http_reset() */
    BT_HTTP_CLOSE_ERROR,   /* protocol error, or no memory */
    BT_HTTP_CLOSE_TIMEOUT, /* body not sent, or response not read, within the limits */
    BT_HTTP_CLOSE_LIMIT,   /* request body over the limit (413 was answered if nothing had been) */
    BT_HTTP_CLOSE_SERVER,  /* bt_http_server_close() */
};

/* Any member may be NULL. user is what was given to bt_http_bind(). */
struct bt_http_events {
    /* A piece of the request body, borrowed for the call. Consumed on return (windows are opened
     * again). */
    void (*on_data)(struct bt_http_stream *s, void *user, const char *data, size_t len);
    /* The request body is complete. */
    void (*on_end)(struct bt_http_stream *s, void *user);
    /* A write had returned write_high or more, and the queue fell to write_low or less. */
    void (*on_writable)(struct bt_http_stream *s, void *user);
    void (*on_close)(struct bt_http_stream *s, void *user, enum bt_http_close why);
};

/* Called when the headers of a request are complete. req lives as long as the stream
 * (bt_http_stream_request() gives it again). May bind, respond, write, end at once. A stream that
 * is never bound nor answered stays open until the client leaves. */
typedef void bt_http_request_fn(struct bt_http_stream *s, const struct bt_http_request *req,
                                void *arg);
/* Body of an answer that the server itself gives (400, 408, 413, 431, 500, 501, 503, 505). Append to
 * body; *content_type is "text/plain" before. */
typedef void bt_http_error_fn(int status, const char *message, struct bt_buf *body,
                              const char **content_type, void *arg);

/* Zero members take the default in brackets. Strings are borrowed for the create call. */
struct bt_http_server_opts {
    const char
        *listen; /* "HOST:PORT", port 0: any; IPv6 in brackets; names are resolved (blocks) */
    const char *tls_cert, *tls_key; /* PEM files; both or none */
    bt_http_request_fn *on_request; /* NULL: 404 */
    bt_http_error_fn *error_body;   /* NULL: "message\n" as text */
    void *arg;                      /* for both */
    size_t header_bytes_max;        /* [64 KiB] names and values of one request; more: 431 */
    uint32_t headers_max;           /* [128] more: 431 */
    uint64_t body_bytes_max;  /* [64 MiB] more: 413. Does not apply to gRPC (bt_grpc has message
                                 limits) */
    uint32_t streams_max;     /* [1024] concurrent, of one HTTP/2 connection */
    uint32_t connections_max; /* [4096] more: accepted and closed at once */
    uint64_t
        header_timeout_ns; /* [10 s] from the first byte (or accept) to complete headers; 408 */
    uint64_t
        idle_timeout_ns; /* [5 min] no stream open; also between two pieces of a request body */
    uint64_t write_timeout_ns;    /* [60 s] queued output of which the client takes nothing */
    size_t write_high, write_low; /* [256 KiB, 64 KiB] */
};

/* Binds, listens and starts accepting. Errors: BT_ERR_INVALID (address), BT_ERR_IO (in use,
 * certificate), BT_ERR_NOMEM; err names the address or file. */
enum bt_status bt_http_server_create(struct bt_net_loop *l, const struct bt_http_server_opts *opts,
                                     struct bt_http_server **out, struct bt_err *err) BT_NODISCARD;
/* "127.0.0.1:43121": what it is bound to. */
const char *bt_http_server_address(const struct bt_http_server *sv);
uint16_t bt_http_server_port(const struct bt_http_server *sv);
uint32_t bt_http_server_connections(const struct bt_http_server *sv);
uint32_t bt_http_server_streams(const struct bt_http_server *sv);
/* Stops accepting, sends GOAWAY / Connection: close, lets open streams finish. done (may be NULL)
 * runs once, later, when no connection is left. Call bt_http_server_close() then, or earlier to cut
 * what is left. */
void bt_http_server_drain(struct bt_http_server *sv, void (*done)(void *arg), void *arg);
/* Closes listener and connections (on_close(SERVER) for each open stream, inside this call or
 * later) and frees the server when all handles are closed. NULL is legal. The pointer is dead. */
void bt_http_server_close(struct bt_http_server *sv);

/* ---- streams ---- */

void bt_http_bind(struct bt_http_stream *s, const struct bt_http_events *ev, void *user);
void *bt_http_stream_user(const struct bt_http_stream *s);
const struct bt_http_request *bt_http_stream_request(const struct bt_http_stream *s);

/* Response headers; once. Over HTTP/1.1 the body is chunked unless "content-length" is among the
 * headers. Copies everything. "date" and connection headers are added here. A second call is
 * ignored and logged. */
void bt_http_respond(struct bt_http_stream *s, int status, const struct bt_http_header *headers,
                     size_t n);
/* Queues bytes (copied) and returns how many are queued after that and not yet handed to the
 * transport. Returns 0 and drops the bytes if the response is already over. Out of memory: the
 * stream is reset (on_close follows). The caller decides what to do with a long queue: the call
 * itself never refuses. Before respond(): a bug, asserted. */
size_t bt_http_write(struct bt_http_stream *s, const void *data, size_t len);
size_t bt_http_queued(const struct bt_http_stream *s);
/* The response is complete; on_close(DONE) follows when the queue is out. */
void bt_http_end(struct bt_http_stream *s);
/* With trailers. If no byte of the body was written, and respond() came in the same callback,
 * HTTP/2 still sends headers and trailers as two blocks; see bt_http_respond_end() for one block.
 */
void bt_http_end_with_trailers(struct bt_http_stream *s, const struct bt_http_header *trailers,
                               size_t n);
/* Headers without any body, one block. */
void bt_http_respond_end(struct bt_http_stream *s, int status, const struct bt_http_header *headers,
                         size_t n);
/* A whole response: status, content-type, content-length, extra headers, body. */
void bt_http_reply(struct bt_http_stream *s, int status, const char *content_type, const void *body,
                   size_t len, const struct bt_http_header *extra, size_t n_extra);

enum bt_http_code { /* HTTP/2 error codes in use */
                    BT_HTTP_NO_ERROR = 0,
                    BT_HTTP_INTERNAL = 2,
                    BT_HTTP_REFUSED = 7,
                    BT_HTTP_CANCEL = 8,
                    BT_HTTP_CALM = 11,
};
/* Cuts the stream: RST_STREAM, or over HTTP/1.1 closes the connection, dropping what is queued.
 * on_close(RESET) follows, later. */
void bt_http_reset(struct bt_http_stream *s, enum bt_http_code code);

const char *bt_http_status_text(int status); /* "Not Found"; "" if unknown */

#ifdef __cplusplus
}
#endif
#endif
