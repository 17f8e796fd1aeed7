#ifndef BT_ROUTER_INFERENCE_GRPC_H
#define BT_ROUTER_INFERENCE_GRPC_H

/* The gRPC side of the front end: baton.v1.Inference. */

#include "base/status.h"

struct bt_router;
struct bt_grpc_server;

/* Adds the methods and their descriptors. Before attach. */
enum bt_status bt_inference_grpc_add(struct bt_grpc_server *g, struct bt_router *r) BT_NODISCARD;

#endif
