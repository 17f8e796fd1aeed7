#ifndef BT_ROUTER_SESSION_IO_H
#define BT_ROUTER_SESSION_IO_H

/* The sessions of daemons: a gRPC server for baton.session.v1.Session. Messages go to the core, the core's go out. */

#include <stdint.h>
#include "base/status.h"
#include "proto/session.h"

struct bt_router;
struct bt_sessions;

/* Listens on "HOST:PORT". err names the address. */
enum bt_status bt_sessions_create(struct bt_router *r, const char *listen, struct bt_sessions **out,
                                  struct bt_err *err) BT_NODISCARD;
/* "127.0.0.1:7001" */
const char *bt_sessions_address(const struct bt_sessions *s);
/* Ends every session without a word to the core. */
void bt_sessions_destroy(struct bt_sessions *s);
/* By the core's ids; sessions that are over are ignored. */
void bt_sessions_send(struct bt_sessions *s, uint64_t session, const struct bt_from_router *m);
void bt_sessions_close(struct bt_sessions *s, uint64_t session, const char *why);

#endif
