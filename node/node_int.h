#ifndef BT_NODE_NODE_INT_H
#define BT_NODE_NODE_INT_H

#include <stdatomic.h>
#include "base/arena.h"
#include "base/log.h"
#include "net/addr.h"
#include "net/loop.h"
#include "node/node.h"
#include "sched/prefix_hash.h"
#include "sched/prefix_report.h"

#define PEERS_MAX 256u

/* Outputs of one router that wait for the end of this wake. */
struct outbox {
    struct bt_msg_output *items;
    size_t n, cap;
    struct bt_arena arena;
};

/* A counter whose growth is told in the log, at most once a minute. */
struct watched {
    uint64_t told;
    struct bt_log_limit limit;
};

struct bt_node_private {
    struct outbox outboxes[BT_ROUTERS_MAX];
    struct bt_arena control_arena; /* one received control message */
    struct bt_buf control;         /* one sent */
    struct bt_task flush;
    struct bt_timer tick;
    struct bt_inbox *xfer_inbox;
    struct bt_k_mover *mover; /* NULL: the host reaches the KV pages */
    atomic_bool mover_failed; /* with a copy: set by the transfer thread */
    struct bt_xfer_stage stage;
    struct bt_task read_xfer;
    struct bt_net_signal *sigterm, *sigint;
    struct {
        uint64_t conn, instance;
        char text[200];
    } transports[PEERS_MAX];
    struct bt_msg_transport transport_msgs[PEERS_MAX];
    uint32_t n_transports;
    struct bt_prefix_report *report; /* NULL: no prefix cache */
    int load_tenth;
    int name_fd; /* holds the number in a default name; -1: none */
    struct bt_log_limit bad_control;
    struct watched late, forged;
    bool was_up, draining, gave_back, broken;
    uint64_t drain_end;
    /* node_legs.c: legs that go. At most one at a time. */
    struct {
        bool leaving, gave_back;
        uint64_t end; /* of its time to drain */
    } leg[BT_LEGS];
    /* health.c */
    struct bt_http_server *http;
    struct bt_grpc_server *grpc;
    struct bt_prom_hist step_seconds[BT_LEGS],
        batch_tokens; /* steps with prompt tokens, and without */
};

/* node/node_memory.c: e is not the engine thread's yet. */
enum bt_status bt_node_memory_start(struct bt_node *n, struct bt_engine *e,
                                    struct bt_err *err) BT_NODISCARD;
void bt_node_memory_opts(const struct bt_node *n, struct bt_xfer_opts *o);
void bt_node_memory_log(const struct bt_node *n);
/* Whether the device failed with a copy of a page. The share's event comes after. */
bool bt_node_memory_failed(const struct bt_node *n);

/* node/node_legs.c: an event goes to the leg that it is for, or to both. */
void bt_node_legs_tick(struct bt_node *n, uint64_t now);
/* As what it serves from now on: what leaves drains as the whole node does. */
void bt_node_legs_set_role(struct bt_node *n, enum bt_role role);
/* To every router: what it serves as, and what is leaving. */
void bt_node_legs_tell_role(struct bt_node *n);
void bt_node_legs_ready(struct bt_node *n); /* everything is up: the legs of the role may work */
void bt_node_legs_engine(struct bt_node *n, const struct bt_engine_ev *ev);
void bt_node_legs_xfer(struct bt_node *n, const struct bt_xfer_event *ev);
void bt_node_legs_control(struct bt_node *n, uint64_t conn, const struct bt_control *m);
void bt_node_legs_router(struct bt_node *n, uint32_t router, const struct bt_from_router *m);
void bt_node_legs_router_lost(struct bt_node *n, uint32_t router);
uint32_t bt_node_legs_jobs(const struct bt_node *n);
void bt_node_legs_give_back(struct bt_node *n);
void bt_node_legs_load(struct bt_node *n, struct bt_msg_load *out);

/* node/node_watch.c: every tick. */
void bt_node_watch(struct bt_node *n, uint64_t now);

/* node/node_check.c */
/* All that can be wrong without looking at files: before the model is loaded. */
enum bt_status bt_node_check(struct bt_node *n, struct bt_err *err) BT_NODISCARD;
/* Where the decode leg listens for pages; checked against where the routers are. "" on a prefill node that
 * was not told: it can have no other role then. */
enum bt_status bt_node_transfer_address(const struct bt_node *n, char out[BT_ADDR_TEXT_MAX],
                                        struct bt_err *err) BT_NODISCARD;
/* --transfer-ports FROM-TO; 0, 0: none given. */
enum bt_status bt_node_transfer_ports(const struct bt_node *n, uint16_t *min, uint16_t *max,
                                      struct bt_err *err) BT_NODISCARD;

/* node/health.c */
enum bt_status bt_node_metrics_init(struct bt_node *n, struct bt_err *err) BT_NODISCARD;
enum bt_status bt_node_health_start(struct bt_node *n, struct bt_err *err) BT_NODISCARD;
void bt_node_health_stop(struct bt_node *n);
void bt_node_health_changed(struct bt_node *n);
void bt_node_metrics_step(struct bt_node *n, const struct bt_engine_step_stats *s);
uint64_t bt_node_transfer_failures(const struct bt_xfer_stats *x);

#endif
