#ifndef BT_NET_TCP_INT_H
#define BT_NET_TCP_INT_H

/* Inside net/ only: one TCP connection, with TLS or without, under a protocol core that does no
 * I/O.
 *
 * The transport reads and calls on_bytes; when told that output waits (bt_tcp_kick) or after
 * reading, it pulls output from the core, one write in flight; when the core says that it is
 * finished it closes, after the peer had time to read. on_gone comes exactly once, never inside a
 * call of the core's user, and is the last call. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/status.h"
#include "net/addr.h"
#include "net/loop_int.h"
#include "net/tls_int.h"

enum bt_tcp_gone {
    BT_TCP_GONE_FINISHED, /* the core was finished */
    BT_TCP_GONE_PEER,     /* reset or read error */
    BT_TCP_GONE_ERROR,    /* TLS, memory */
    BT_TCP_GONE_TIMEOUT,  /* connect, or output not taken */
    BT_TCP_GONE_CLOSED,   /* bt_tcp_close() */
};

struct bt_tcp_ops {
    /* The connection is up (client) and TLS is agreed; h2: ALPN chose it. Server without TLS: not
     * called. */
    void (*on_ready)(void *core, bool h2);
    void (*on_bytes)(void *core, const char *data, size_t len);
    void (*on_eof)(void *core);
    /* Appends about max bytes to out. */
    void (*pull)(void *core, struct bt_buf *out, size_t max);
    bool (*want_read)(void *core);
    enum bt_tcp_core {
        BT_TCP_CORE_OPEN,
        BT_TCP_CORE_FINISHED,
        BT_TCP_CORE_BROKEN
    } (*state)(void *core);
    void (*on_gone)(void *core, enum bt_tcp_gone how, const char *why);
};

struct bt_tcp {
    struct bt_net_loop *loop;
    uv_tcp_t tcp;
    uv_write_t write_req;
    uv_shutdown_t shutdown_req;
    uv_connect_t connect_req;
    const struct bt_tcp_ops *ops;
    void *core;
    struct bt_tls *tls;
    struct bt_buf rest; /* bytes of the write in flight */
    struct bt_task flush;
    struct bt_timer timer; /* linger, or connect */
    uint64_t taken_ns;     /* when the socket last took bytes of the write in flight */
    size_t taken_left;
    char peer[BT_ADDR_TEXT_MAX];
    bool connecting, reading, writing, eof, lingering, closing, tls_told;
};

/* Allocates and binds to the loop. tls: taken, NULL: none. */
enum bt_status bt_tcp_create(struct bt_net_loop *l, const struct bt_tcp_ops *ops, void *core,
                             struct bt_tls *tls, struct bt_tcp **out) BT_NODISCARD;
enum bt_status bt_tcp_accept(struct bt_tcp *t, uv_tcp_t *listener) BT_NODISCARD;
/* The peer is given up when it acknowledges nothing for so long: of what was sent, or of the probes of a quiet
 * connection. After accept. Where the system cannot, it takes minutes. */
void bt_tcp_dead_after(struct bt_tcp *t, uint64_t ns);
/* To a numeric address. on_ready follows, or on_gone. */
enum bt_status bt_tcp_connect(struct bt_tcp *t, const struct bt_hostport *to, uint64_t timeout_ns,
                              struct bt_err *err) BT_NODISCARD;
/* Output waits: flushes soon. */
void bt_tcp_kick(struct bt_tcp *t);
/* The write in flight moved nothing for timeout_ns: closes (on_gone(TIMEOUT)) and returns true. */
bool bt_tcp_check_stuck(struct bt_tcp *t, uint64_t now_ns, uint64_t timeout_ns);
/* Closes at once; on_gone(CLOSED) comes inside unless quiet. Not inside one of the core's
 * callbacks. */
void bt_tcp_close(struct bt_tcp *t, bool quiet);

#endif
