#ifndef BT_NODE_ROUTER_LINK_H
#define BT_NODE_ROUTER_LINK_H

/* Sessions from a daemon to every router: dials each address that the given names resolve to, says
 * hello, sends load reports as heartbeats, hands decoded messages up, and dials again with growing
 * pauses after a loss. Loop thread. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/status.h"
#include "proto/session.h"

struct bt_router_link;
struct bt_net_loop;
struct bt_hostport;

struct bt_router_link_opts {
    const char *routers;       /* "HOST:PORT[,HOST:PORT…]"; borrowed until destroy */
    struct bt_msg_hello hello; /* strings borrowed until destroy */
    uint64_t heartbeat_ns;
    uint64_t lease_ns; /* silence of a router after which its session is given up */
    void *arg;
    /* Fills in the load to report to this router now; what it points to is borrowed until the call
     * after returns. */
    void (*load)(void *arg, uint32_t router, struct bt_msg_load *out);
    void (*on_up)(void *arg, uint32_t router);   /* welcomed */
    void (*on_lost)(void *arg, uint32_t router); /* after on_up, once */
    void (*on_message)(void *arg, uint32_t router,
                       const struct bt_from_router *m); /* not welcome, not heartbeat */
};

#define BT_ROUTERS_MAX 64u /* addresses at one time, and names */

/* BT_ERR_INVALID: a router address does not parse; err names it. */
enum bt_status bt_router_link_create(struct bt_net_loop *l, const struct bt_router_link_opts *opts,
                                     struct bt_router_link **out, struct bt_err *err) BT_NODISCARD;
/* Ends all sessions; no callback runs any more. */
void bt_router_link_destroy(struct bt_router_link *r);
/* Ignored if that session is not up. */
void bt_router_link_send(struct bt_router_link *r, uint32_t router, const struct bt_from_daemon *m);
void bt_router_link_send_all(struct bt_router_link *r, const struct bt_from_daemon *m);
/* Each router is told as what this node serves from now on, and which leg still drains (BOTH: none); those
 * whose session comes up later hear it in their hello. A router of session version 1 gets a new session. */
void bt_router_link_role(struct bt_router_link *r, enum bt_role role, enum bt_role leaving);
/* Each router is told that this node drains, also those whose session comes up later. */
void bt_router_link_drain(struct bt_router_link *r);
uint32_t bt_router_link_up(const struct bt_router_link *r); /* sessions up */
/* Address of a router and whether its session is up; NULL: no such number now. */
const char *bt_router_link_address(const struct bt_router_link *r, uint32_t router, bool *up);

/* What the name with that number resolves to now; the resolver says so every ten seconds. New addresses are dialled. One
 * that no name resolves to any more is forgotten as soon as its session is not up: its number may be given to another. */
void bt_router_link_resolved(struct bt_router_link *r, uint32_t name,
                             const struct bt_hostport *addrs, size_t n);

#endif
