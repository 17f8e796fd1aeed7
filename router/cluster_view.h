#ifndef BT_ROUTER_CLUSTER_VIEW_H
#define BT_ROUTER_CLUSTER_VIEW_H

/* What the router knows of its cluster, for GetCluster, /v1/cluster and the dashboard. */

#include "base/arena.h"
#include "base/buf.h"
#include "base/status.h"
#include "proto/inference.h"

struct bt_router;

/* Texts and lists live in the arena or the core: use them before anything else happens. BT_ERR_NOMEM. */
enum bt_status bt_cluster_status(const struct bt_router *r, struct bt_arena *arena,
                                 struct bt_inf_cluster *out) BT_NODISCARD;
/* The same as JSON. */
enum bt_status bt_cluster_json(const struct bt_router *r, struct bt_buf *out) BT_NODISCARD;

/* The page at "/", from dashboard.html: polls /metrics and /v1/cluster; loads nothing from elsewhere. */
extern const unsigned char bt_dashboard_html[];
extern const size_t bt_dashboard_html_bytes;

#endif
