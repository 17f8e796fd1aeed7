#ifndef BT_ROUTER_ADMIN_GRPC_H
#define BT_ROUTER_ADMIN_GRPC_H

/* The gRPC side for those who run the cluster: baton.v1.Admin. */

#include "base/status.h"

struct bt_router;
struct bt_grpc_server;

/* Adds the methods and their descriptors. Before attach. */
enum bt_status bt_admin_grpc_add(struct bt_grpc_server *g, struct bt_router *r) BT_NODISCARD;

#endif
