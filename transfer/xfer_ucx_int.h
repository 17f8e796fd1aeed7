#ifndef BT_TRANSFER_XFER_UCX_INT_H
#define BT_TRANSFER_XFER_UCX_INT_H

/* The UCX wire's objects, shared by its two files: xfer_ucx.c (connections and messages) and xfer_ucx_setup.c
 * (contexts, workers, listener, names of transports). */

#include <poll.h>
#include <ucp/api/ucp.h>
#include "transfer/xfer_door.h"
#include "transfer/xfer_gate.h"
#include "transfer/xfer_int.h"

#define XFER_UCX_AM_ID        0
#define XFER_UCX_REQUESTS_MAX DOOR_DUE_MAX /* connection requests waiting; more are rejected */

struct ucx_worker {
    TAILQ_ENTRY(ucx_worker) link;
    ucp_worker_h handle;
    int efd;
};
TAILQ_HEAD(ucx_workers, ucx_worker);

/* A set of transports. Made when first needed. */
struct ucx_context {
    ucp_context_h handle;      /* NULL: not made yet */
    struct ucx_worker *shared; /* of all connections, unless own_workers; the listener's */
    bool own_workers;          /* one for each connection: shared memory is in use */
    bool direct;               /* all regions are registered: */
    ucp_mem_h memory[BT_XFER_REGIONS_MAX];
};
enum { CONTEXT_NET, CONTEXT_NET6, CONTEXT_LOCAL, N_CONTEXTS };

struct ucx_conn {
    struct bt_xfer *x;
    struct xfer_peer *peer;
    struct ucx_context *context;
    struct ucx_worker *worker;
    ucp_ep_h ep; /* NULL: still at the gate */
};

struct ucx_request {
    ucp_conn_request_h handle;
    uint64_t instance; /* as the client says */
    char from[80];
};

struct ucx {
    struct xfer_gate *gate;
    struct xfer_door door;
    bool gate_ready;  /* it has something to do */
    uint64_t gate_ns; /* last looked at */
    uint16_t port;    /* of UCX's listener */
    struct ucx_context contexts[N_CONTEXTS];
    struct ucx_context *listening;
    struct ucx_workers workers; /* all */
    unsigned n_workers;
    ucp_listener_h listener;
    struct pollfd *pfds; /* of wait */
    struct bt_map by_ep; /* ucp_ep_h to struct ucx_conn * */
    struct ucx_request requests[XFER_UCX_REQUESTS_MAX];
    unsigned n_requests;
    unsigned n_spins; /* refusals to arm since the last progress */
};

/* xfer_ucx_setup.c */
enum bt_status xfer_ucx_open(struct bt_xfer *x, const struct bt_xfer_opts *o, struct bt_err *err);
void xfer_ucx_fini(struct bt_xfer *x);
void xfer_ucx_describe(struct bt_xfer *x, struct xfer_peer *p, struct xfer_transport *t);
/* The context for an address, made if need be. NULL: err has it. */
struct ucx_context *xfer_ucx_context(struct bt_xfer *x, const char *address, struct bt_err *err);
struct ucx_worker *xfer_ucx_worker_create(struct bt_xfer *x, ucp_context_h context,
                                          const char **why);
void xfer_ucx_worker_destroy(struct ucx *u, struct ucx_worker *w);

/* xfer_ucx_memory.c: whether this UCX can register the regions; tried once, when the wire is opened. */
void xfer_ucx_memory_probe(struct bt_xfer *x);
/* Registers the regions with a context; without x->direct does nothing. */
void xfer_ucx_memory_map(struct bt_xfer *x, struct ucx_context *c);
void xfer_ucx_memory_unmap(struct ucx_context *c);
/* What a send or receive of n bytes at p, in a region, says of its memory. */
void xfer_ucx_memory_param(const struct bt_xfer *x, const struct ucx_context *c, const void *p,
                           ucp_request_param_t *rp);

/* xfer_ucx.c: what the gate, workers and listeners call */
void xfer_ucx_admit(void *arg, const struct xfer_knock *k, const struct sockaddr_storage *from,
                    struct xfer_answer *a);
void xfer_ucx_on_answered(void *arg, struct xfer_peer *p, const struct xfer_answer *a,
                          const char *why);
ucs_status_t xfer_ucx_on_am(void *arg, const void *head, size_t head_bytes, void *data,
                            size_t bytes, const ucp_am_recv_param_t *param);
void xfer_ucx_on_request(ucp_conn_request_h handle, void *arg);

#endif
