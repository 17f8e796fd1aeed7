#ifndef BT_NODE_NODE_H
#define BT_NODE_NODE_H

/* What a daemon is around its two legs: options, the model, the engine thread, the transfer room,
 * sessions to routers, health endpoint, drain. A leg is what prefilld/ or decoded/ gives: a core and
 * its messages, as callbacks. Both legs are always there and share everything; the node's role says
 * which of them take work. Loop thread throughout. */

#include <stdbool.h>
#include <stdint.h>
#include "base/options.h"
#include "base/status.h"
#include "net/prom.h"
#include "node/engine_thread.h"
#include "node/router_link.h"
#include "proto/session.h"
#include "proto/transfer.h"
#include "transfer/xfer.h"

struct bt_node_cfg {
    char *router, *model, *model_name, *name, *transfer, *transfer_ports, *health, *transport;
    char *buckets_seconds, *buckets_tokens, *panel_cache, *cpus;
    bool checksum, deterministic;
    int backend, kv_dtype, role, isa, numerics, prefix_cache;
    uint32_t threads, page_tokens, chunk_tokens, device, max_batch, max_jobs;
    uint64_t kv_bytes, lease, heartbeat, transfer_deadline, drain_timeout;
};

/* The option tables of the two daemons: they differ in the default role. */
extern const char *const bt_node_backends[3]; /* by cfg.backend */
extern const struct bt_opt bt_node_opts_prefill[], bt_node_opts_decode[];
extern const size_t bt_node_n_opts_prefill, bt_node_n_opts_decode;

struct bt_node;

/* Numbers that both legs have, for metrics with the label `leg`. */
struct bt_node_leg_numbers {
    const struct bt_prom_hist *transfer_seconds, *shares;
    uint64_t cached_tokens, failures;
};

struct bt_node_hooks {
    void *arg;
    void (*on_ready)(void *arg, struct bt_node *n); /* everything is up: create the core */
    void (*on_engine)(void *arg, const struct bt_engine_ev *ev);
    void (*on_xfer)(void *arg, const struct bt_xfer_event *ev); /* all but control messages */
    void (*on_control)(void *arg, uint64_t conn, const struct bt_control *m);
    void (*on_router)(void *arg, uint32_t router, const struct bt_from_router *m);
    void (*on_router_lost)(void *arg, uint32_t router);
    void (*on_tick)(void *arg, uint64_t now);
    /* The time to drain is over: what is left goes back to its routers, and so does what still comes, until resume. */
    void (*give_back)(void *arg);
    void (*resume)(void *arg);
    uint32_t (*jobs)(void *arg);                      /* unfinished work, for drain */
    void (*load)(void *arg, struct bt_msg_load *out); /* adds the leg's own totals */
    void (*metrics)(void *arg, struct bt_buf *out);   /* the leg's own lines */
    void (*numbers)(void *arg, struct bt_node_leg_numbers *out);
};

struct bt_node {
    struct bt_node_cfg cfg;
    struct bt_node_hooks legs[BT_LEGS]; /* by enum bt_role */
    enum bt_role role;                  /* as which it serves */
    struct bt_net_loop *loop;
    struct bt_engine_thread *engine;
    struct bt_xfer *xfer;
    struct bt_router_link *link;
    uint64_t instance;
    const struct bt_model_info *model;
    const struct bt_engine_layout *layout;
    const struct bt_model_packed *packed;
    struct bt_node_private *p;
};

/* Runs a daemon from argv to its end: options, model, threads, loop, drain. legs: by enum bt_role.
 * Returns the exit code. */
int bt_node_main(const struct bt_prog *prog, int argc, char **argv,
                 const struct bt_node_hooks legs[BT_LEGS]);

/* For a leg's core: job ids of the two legs have slots of their own. */
uint32_t bt_node_first_slot(const struct bt_node *n, enum bt_role leg);

/* An empty histogram with the buckets of --buckets-seconds. */
void bt_node_hist_init(const struct bt_node *n, struct bt_prom_hist *seconds);
/* And one for the shares of a transfer: powers of 4 up to a million. */
void bt_node_hist_init_shares(struct bt_prom_hist *shares);

/* Queues an output for a router; all outputs of one wake leave as one message. Copied. */
void bt_node_output(struct bt_node *n, uint32_t router, const struct bt_msg_output *o);
/* Sends at once, after outputs queued before. */
void bt_node_attempt_end(struct bt_node *n, uint32_t router, const struct bt_msg_attempt_end *e);

/* Sends a control message to a peer of the transfer room. A failure is logged: deadlines end what
 * waited for it. */
void bt_node_control(struct bt_node *n, uint64_t conn, const struct bt_control *m);

/* For the transfer calls that end work: they fail only without memory, and then the process is lost
 * anyway. */
void bt_node_must(enum bt_status st);

#endif
