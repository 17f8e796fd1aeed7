#ifndef BT_NET_ADDR_H
#define BT_NET_ADDR_H

/* HOST:PORT texts and socket addresses. The pure functions run on any thread. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct bt_net_loop;
struct sockaddr;

#define BT_HOST_MAX      256 /* bytes with the NUL */
#define BT_ADDR_TEXT_MAX (BT_HOST_MAX + 8)

/* A host name or a numeric address without brackets, and a port. */
struct bt_hostport {
    char host[BT_HOST_MAX];
    uint16_t port;
};

/* "host:8080", "127.0.0.1:0", "[::1]:8080". An empty host (":8080") is 0.0.0.0.
 * dflt_port: used when ":PORT" is absent; -1: then it is an error. BT_ERR_INVALID, err names the
 * text. */
enum bt_status bt_hostport_parse(const char *text, int dflt_port, struct bt_hostport *out,
                                 struct bt_err *err) BT_NODISCARD;
/* Writes "host:port", with brackets around IPv6; returns out. */
char *bt_hostport_text(const struct bt_hostport *hp, char out[BT_ADDR_TEXT_MAX]);
/* 127.0.0.0/8, ::1, ::ffff:127.x, "localhost". Does not resolve other names. */
bool bt_hostport_is_loopback(const struct bt_hostport *hp);
/* 0.0.0.0, :: . */
bool bt_hostport_is_any(const struct bt_hostport *hp);

/* From an IPv4 or IPv6 socket address; anything else gives an empty host and port 0. */
void bt_hostport_from_sockaddr(const struct sockaddr *sa, struct bt_hostport *out);

/* Resolves a name to all its addresses (numeric hosts, same port, no duplicates), at most
 * BT_RESOLVE_MAX, in the resolver's order. Loop thread; the look-up runs on the libuv pool.
 * Failure returned: done never runs. BT_OK: done runs exactly once, later, on the loop thread; st
 * != BT_OK: n = 0 and why is the resolver's text. addrs is borrowed for the callback. */
#define BT_RESOLVE_MAX 16
typedef void bt_resolve_fn(void *arg, enum bt_status st, const struct bt_hostport *addrs, size_t n,
                           const char *why);
enum bt_status bt_net_resolve(struct bt_net_loop *l, const struct bt_hostport *hp,
                              bt_resolve_fn *done, void *arg) BT_NODISCARD;

#ifdef __cplusplus
}
#endif
#endif
