#ifndef BT_NET_GRPC_H
#define BT_NET_GRPC_H

/* gRPC over HTTP/2, server and client, with raw message bytes: the caller packs and unpacks
 * (protobuf-c). No compression: a compressed message is answered UNIMPLEMENTED. Everything runs on
 * the loop thread; no call blocks; no callback runs inside a call made by the user.
 *
 * One call object for both sides. on_close comes exactly once, whatever happens, and is the last
 * sign of the call: after it the pointer is dead. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"
#include "net/http.h"

#ifdef __cplusplus
extern "C" {
#endif

enum bt_grpc_status {
    BT_GRPC_OK = 0,
    BT_GRPC_CANCELLED = 1,
    BT_GRPC_UNKNOWN = 2,
    BT_GRPC_INVALID_ARGUMENT = 3,
    BT_GRPC_DEADLINE_EXCEEDED = 4,
    BT_GRPC_NOT_FOUND = 5,
    BT_GRPC_ALREADY_EXISTS = 6,
    BT_GRPC_PERMISSION_DENIED = 7,
    BT_GRPC_RESOURCE_EXHAUSTED = 8,
    BT_GRPC_FAILED_PRECONDITION = 9,
    BT_GRPC_ABORTED = 10,
    BT_GRPC_OUT_OF_RANGE = 11,
    BT_GRPC_UNIMPLEMENTED = 12,
    BT_GRPC_INTERNAL = 13,
    BT_GRPC_UNAVAILABLE = 14,
    BT_GRPC_DATA_LOSS = 15,
    BT_GRPC_UNAUTHENTICATED = 16,
};
const char *bt_grpc_status_name(enum bt_grpc_status st); /* "NOT_FOUND" */

struct bt_grpc_call;

/* How a call ended. Strings are borrowed for the callback. */
struct bt_grpc_end {
    enum bt_grpc_status status;
    const char *message; /* UTF-8, "" without */
    /* Server: true if bt_grpc_finish() was called and everything was handed to the transport.
     * false: the call was cut short; status is CANCELLED (client cancelled or left),
     * DEADLINE_EXCEEDED, or the error that this side answered with (message too large, malformed
     * frame ...). Client: true if the status came from the server, false if it was made here. */
    bool finished;
    const struct bt_http_header *trailers; /* client: custom trailing metadata; server: none */
    size_t n_trailers;
};

/* Any member may be NULL. */
struct bt_grpc_events {
    /* One message, borrowed for the call. Server, UNARY and SERVER_STREAM methods: exactly once,
     * and only when the client has finished sending (other counts are answered here), so a handler
     * can do all its work in it. */
    void (*on_message)(struct bt_grpc_call *c, void *user, const uint8_t *data, size_t len);
    /* Server: the client sends no more. Client: the server's response headers came
     * (bt_grpc_metadata() now reads them). */
    void (*on_half_close)(struct bt_grpc_call *c, void *user);
    void (*on_headers)(struct bt_grpc_call *c, void *user);
    /* A send had returned write_high (256 KiB) or more and the queue fell to write_low (64 KiB) or
     * less. */
    void (*on_writable)(struct bt_grpc_call *c, void *user);
    void (*on_close)(struct bt_grpc_call *c, void *user, const struct bt_grpc_end *end);
};

/* ---- both sides ---- */

/* Queues one message (copied); returns the queued bytes of this call, like bt_http_write(). */
size_t bt_grpc_send(struct bt_grpc_call *c, const void *data, size_t len);
size_t bt_grpc_queued(const struct bt_grpc_call *c);
void *bt_grpc_user(const struct bt_grpc_call *c);
/* Received metadata (server: of the request; client: of the response headers); NULL: absent.
 * Lower-case name. */
const char *bt_grpc_metadata(const struct bt_grpc_call *c, const char *name);
/* "127.0.0.1:51234" */
const char *bt_grpc_peer(const struct bt_grpc_call *c);
/* Absolute bt_clock_ns() time, UINT64_MAX: none. */
uint64_t bt_grpc_deadline_ns(const struct bt_grpc_call *c);

/* ---- server ---- */

enum bt_grpc_kind { BT_GRPC_UNARY, BT_GRPC_SERVER_STREAM, BT_GRPC_CLIENT_STREAM, BT_GRPC_BIDI };

/* A call begins: metadata, peer and deadline can be read. Bind events here (or finish with an error
 * at once). */
typedef void bt_grpc_call_fn(struct bt_grpc_call *c, void *arg);

struct bt_grpc_method {
    const char *path; /* "/baton.v1.Inference/Generate"; static storage */
    enum bt_grpc_kind kind;
    bt_grpc_call_fn *on_call;
};

struct bt_grpc_server;
struct bt_grpc_server_opts {
    size_t message_bytes_max; /* of one received message; 0: 4 MiB. More: RESOURCE_EXHAUSTED */
};
/* health and reflection are always there. opts may be NULL. */
enum bt_status bt_grpc_server_create(struct bt_net_loop *l, const struct bt_grpc_server_opts *opts,
                                     struct bt_grpc_server **out) BT_NODISCARD;
/* methods: borrowed until destroy. arg goes to every on_call of this table. Before attach. */
enum bt_status bt_grpc_server_add(struct bt_grpc_server *g, const struct bt_grpc_method *methods,
                                  size_t n, void *arg) BT_NODISCARD;
/* Requests of hs whose content-type begins with application/grpc go to g from now on. One gRPC
 * server may serve several HTTP servers. */
void bt_grpc_server_attach(struct bt_grpc_server *g, struct bt_http_server *hs);
/* After every attached HTTP server was closed (bt_http_server_close) . */
void bt_grpc_server_destroy(struct bt_grpc_server *g);

void bt_grpc_bind(struct bt_grpc_call *c, const struct bt_grpc_events *ev, void *user);
/* Ends the call: status, message (NULL: ""), trailing metadata (names lower case; binary values
 * already in base64 with a
 * "-bin" name). Messages queued before go first. on_close follows, later. A second call is ignored.
 */
void bt_grpc_finish(struct bt_grpc_call *c, enum bt_grpc_status st, const char *message,
                    const struct bt_http_header *trailers, size_t n_trailers);
/* The usual ends: one message and OK; an error with a printf message. */
void bt_grpc_reply(struct bt_grpc_call *c, const void *data, size_t len);
void bt_grpc_fail(struct bt_grpc_call *c, enum bt_grpc_status st, const char *fmt, ...)
    BT_PRINTF(3, 4);
/* RESOURCE_EXHAUSTED or UNAVAILABLE with the time after which a client should try again, in the
 * trailers grpc-retry-pushback-ms and retry-after (seconds, rounded up). */
void bt_grpc_fail_retry(struct bt_grpc_call *c, enum bt_grpc_status st, uint64_t retry_ns,
                        const char *fmt, ...) BT_PRINTF(4, 5);

/* grpc.health.v1. Adds or changes a service; watchers are told. "" is SERVING from the start.
 * Services without an entry are NOT_FOUND (Check) or SERVICE_UNKNOWN (Watch). */
enum bt_grpc_health { BT_GRPC_HEALTH_SERVING = 1, BT_GRPC_HEALTH_NOT_SERVING = 2 };
enum bt_status bt_grpc_health_set(struct bt_grpc_server *g, const char *service,
                                  enum bt_grpc_health status) BT_NODISCARD;

/* grpc.reflection. Adds a serialised FileDescriptorSet (protoc --descriptor_set_out
 * --include_imports); borrowed until destroy. Services of registered methods are listed.
 * BT_ERR_INVALID: not a descriptor set. */
enum bt_status bt_grpc_reflection_add(struct bt_grpc_server *g, const uint8_t *descriptor_set,
                                      size_t len) BT_NODISCARD;

/* ---- client ---- */

/* A connection to one address, made when the first call needs it and made again by the next call
 * after it was lost. All calls share it. When it is lost its calls end with UNAVAILABLE. There is
 * no retry or backoff here: who starts calls decides when to try again. */
struct bt_grpc_channel;
struct bt_grpc_channel_opts {
    /* "HOST:PORT"; a name is resolved at each connect, its addresses are tried in order */
    const char *address;
    const char *authority;       /* NULL: address */
    uint64_t connect_timeout_ns; /* 0: 5 s, resolve and TLS handshake included */
    size_t message_bytes_max;    /* of one received message; 0: 64 MiB */
    uint64_t keepalive_ns; /* > 0: PING when nothing was received for so long; no answer in the same
                              time: lost */
    bool tls;
    const char *tls_ca; /* PEM file; NULL: the system's */
    bool tls_insecure;  /* do not check the certificate */
};
/* BT_ERR_INVALID: address; BT_ERR_IO: CA file; err says which. Does not connect yet. */
enum bt_status bt_grpc_channel_create(struct bt_net_loop *l,
                                      const struct bt_grpc_channel_opts *opts,
                                      struct bt_grpc_channel **out,
                                      struct bt_err *err) BT_NODISCARD;
const char *bt_grpc_channel_address(const struct bt_grpc_channel *ch);
/* Calls still open end with CANCELLED (inside this call). NULL is legal. */
void bt_grpc_channel_destroy(struct bt_grpc_channel *ch);

struct bt_grpc_start {
    const char *path;                      /* "/baton.v1.Inference/Generate" */
    uint64_t timeout_ns;                   /* 0: none. Sent as grpc-timeout, and kept here */
    const struct bt_http_header *metadata; /* copied */
    size_t n_metadata;
};
/* BT_OK: on_close will run exactly once, later; until then *out may be used (messages sent before
 * the connection is up are queued). Failure returned (BT_ERR_NOMEM, BT_ERR_INVALID): no callback
 * runs. */
enum bt_status bt_grpc_call_start(struct bt_grpc_channel *ch, const struct bt_grpc_start *start,
                                  const struct bt_grpc_events *ev, void *user,
                                  struct bt_grpc_call **out) BT_NODISCARD;
/* No more messages from this side. */
void bt_grpc_half_close(struct bt_grpc_call *c);
/* Client: RST_STREAM(CANCEL); on_close(CANCELLED) follows, later. Server: cuts the call without a
 * status. */
void bt_grpc_cancel(struct bt_grpc_call *c);

#ifdef __cplusplus
}
#endif
#endif
