#ifndef BT_NET_GRPC_INT_H
#define BT_NET_GRPC_INT_H

/* Inside net/ only: framing, the call object, and what server, client and the built-in services
 * share. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "net/grpc.h"
#include "net/http_int.h"
#include "net/loop_int.h"

/* ---- framing ---- */

struct bt_grpc_deframer {
    uint8_t head[5];
    size_t n_head;
    size_t need; /* bytes of the message that runs */
    struct bt_buf body;
    size_t max;
};
enum bt_grpc_deframe {
    BT_GRPC_DEFRAME_OK,
    BT_GRPC_DEFRAME_STOPPED,    /* fn said so */
    BT_GRPC_DEFRAME_COMPRESSED, /* flag is not 0 */
    BT_GRPC_DEFRAME_TOO_LARGE,  /* need holds the announced size */
    BT_GRPC_DEFRAME_NOMEM,
};
/* fn: one message, borrowed; false stops. */
enum bt_grpc_deframe bt_grpc_deframe(struct bt_grpc_deframer *d, const uint8_t *data, size_t len,
                                     bool (*fn)(void *arg, const uint8_t *data, size_t len),
                                     void *arg);
bool bt_grpc_deframe_idle(const struct bt_grpc_deframer *d); /* between two messages */
void bt_grpc_deframe_fini(struct bt_grpc_deframer *d);
bool bt_grpc_frame(struct bt_buf *b, const void *data, size_t len); /* appends prefix and message */

/* ---- small texts ---- */

bool bt_grpc_timeout_parse(const char *s, uint64_t *ns);
void bt_grpc_timeout_text(uint64_t ns, char out[16]);
void bt_grpc_message_encode(const char *message, struct bt_buf *out);
void bt_grpc_message_decode(const char *text, struct bt_buf *out);
enum bt_grpc_status bt_grpc_status_from_http(int http);

/* ---- calls ---- */

struct bt_grpc_call {
    struct bt_net_loop *loop;
    struct bt_http_stream *s; /* NULL: not yet, or detached */
    const struct bt_grpc_events *ev;
    void *user;
    struct bt_grpc_deframer in;
    struct bt_timer deadline;
    uint64_t deadline_ns;
    struct bt_task end_task; /* on_close in a turn of its own */
    enum bt_grpc_status end_status;
    char end_message[256];
    uint32_t busy; /* depth of our callbacks: memory stays */
    bool zombie;   /* free when no longer busy */
    bool client;
    bool ending;   /* detached, end_task queued */
    bool closed;   /* on_close was delivered */
    bool finished; /* server: status was written; client: half-closed */
    /* server */
    const struct bt_grpc_method *method;
    struct bt_buf held; /* the single request message, until the client half-closes */
    uint32_t n_messages;
    enum bt_grpc_status sent_status;
    struct bt_grpc_call **list; /* head of the owner's list of open calls, or NULL */
    struct bt_grpc_call *next, *prev;
    /* client */
    struct bt_grpc_channel *channel;
    struct bt_hstore meta; /* request headers until the stream is open */
    struct bt_buf pending; /* framed messages until the stream is open */
    int http_status;
    size_t write_high;
    bool over_high;
};

/* list: head of the owner's open calls; the call leaves it when it is reported. */
struct bt_grpc_call *bt_grpc_call_new(struct bt_net_loop *l, bool client, size_t message_max,
                                      struct bt_grpc_call **list) BT_NODISCARD;
/* Top: on_close now, then frees (later, if a callback of the call is on the stack). */
void bt_grpc_call_report(struct bt_grpc_call *c, const struct bt_grpc_end *end);
/* Any time: detaches from the stream and reports in a turn of its own. */
void bt_grpc_call_end_later(struct bt_grpc_call *c, enum bt_grpc_status st, const char *message);
void bt_grpc_call_detach(struct bt_grpc_call *c);
void bt_grpc_call_enter(struct bt_grpc_call *c);
void bt_grpc_call_leave(struct bt_grpc_call *c); /* may free c */
/* Feeds received bytes; delivers through fn. false: an error, put into st and message. */
bool bt_grpc_call_receive(struct bt_grpc_call *c, const char *data, size_t len,
                          bool (*fn)(void *arg, const uint8_t *data, size_t len),
                          enum bt_grpc_status *st, char *message, size_t message_cap) BT_NODISCARD;
/* Top: reports all calls of a list, also those that are ending. */
void bt_grpc_call_report_all(struct bt_grpc_call **list, enum bt_grpc_status st,
                             const char *message);

/* ---- server and built-in services ---- */

struct health_entry;
struct health_watch;
struct reflect_file;

struct bt_grpc_server {
    struct bt_net_loop *loop;
    size_t message_max;
    struct bt_grpc_table {
        const struct bt_grpc_method *methods;
        size_t n;
        void *arg;
    } *tables;
    size_t n_tables;
    struct bt_grpc_call *calls;
    struct health_entry *health;
    struct health_watch *watches;
    struct reflect_file *files;
    size_t n_files;
};

enum bt_status bt_grpc_health_init(struct bt_grpc_server *g) BT_NODISCARD;
void bt_grpc_health_fini(struct bt_grpc_server *g);
enum bt_status bt_grpc_reflection_init(struct bt_grpc_server *g) BT_NODISCARD;
void bt_grpc_reflection_fini(struct bt_grpc_server *g);

/* The hook for HTTP connections: bt_grpc_server_attach() without a server, for tests and fuzzing.
 */
bool bt_grpc_take_request(struct bt_http_stream *s, const struct bt_http_request *req,
                          void *server);

#endif
