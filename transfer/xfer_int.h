#ifndef BT_TRANSFER_XFER_INT_H
#define BT_TRANSFER_XFER_INT_H

/* Inside of the transfer room. One struct bt_xfer; its protocol (peers, pushes, landings) is the same for every
 * wire, and a wire is a `struct xfer_ops`. Everything is owned by the transfer thread unless marked. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>
#include "base/fifo.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/slab.h"
#include "base/spent.h"
#include "transfer/xfer.h"
#include "transfer/xfer_wire.h"

/* ---- queues across threads ---- */

struct xfer_node {
    STAILQ_ENTRY(xfer_node) link;
    struct bt_xfer_event ev;
    bool queued; /* under ev_mu */
    bool keep;   /* under ev_mu: owned by a landing, not freed by poll */
    bool block;  /* of x->ctrl_in, not of the heap */
};
STAILQ_HEAD(xfer_nodes, xfer_node);

enum xfer_cmd_kind {
    XFER_CMD_CONNECT,
    XFER_CMD_DISCONNECT,
    XFER_CMD_CTRL,
    XFER_CMD_LAND_OPEN,
    XFER_CMD_LAND_EXPECT,
    XFER_CMD_LAND_CLOSE,
    XFER_CMD_PUSH,
    XFER_CMD_CANCEL,
};

struct xfer_cmd {
    STAILQ_ENTRY(xfer_cmd) link;
    enum xfer_cmd_kind kind;
    uint64_t peer;
    union {
        struct xfer_peer *dial; /* CONNECT */
        struct xfer_ctrl *ctrl;
        struct xfer_landing *landing;
        struct xfer_push *push;
        struct {
            uint8_t ticket[BT_XFER_TICKET_BYTES];
            uint64_t generation;
            uint64_t n_shares[BT_XFER_GROUPS_MAX];
        } ref; /* EXPECT, CLOSE, CANCEL */
    };
};
STAILQ_HEAD(xfer_cmds, xfer_cmd);

/* ---- sends and receives in flight ---- */

/* Shares in flight, both ways together: no more are sent for now; a connection by which one more would be received is
 * given up. Behind these there are ops for the greetings and heartbeats of every peer. */
#define XFER_SHARES_MAX   65536u
#define XFER_OPS_PER_PEER 8u

/* Of x->op_slab; a control message brings its own. */
struct xfer_op {
    STAILQ_ENTRY(xfer_op) link; /* in the stage's queues */
    struct xfer_peer *peer;
    struct xfer_push *push;       /* send of a share */
    struct xfer_landing *landing; /* receive of a share */
    void *owned;                  /* goes back to the heap when the op ends */
    const uint8_t *data;          /* payload of a send, destination of a receive */
    size_t bytes;
    bool is_test, is_share;
    /* Device memory: what is at `data` comes from there, or goes there. */
    uint8_t *device;
    uint8_t *spare; /* receive without a slot */
    uint32_t slot;
    bool has_slot, is_out, is_moved;
    bool direct;           /* `data` is device memory: the wire takes it as it is */
    struct xfer_head head; /* of a receive or a share */
    uint8_t wire[XFER_HEAD_BYTES];
};

STAILQ_HEAD(xfer_ops_queue, xfer_op);

/* Pages in device memory; without a stage all zero. */
#define XFER_STAGE_PER_ROUND   64U
#define XFER_STAGE_SPARE_BYTES ((size_t)4 << 30) /* of address space */
struct xfer_stage {
    struct bt_xfer_stage o;
    uint32_t *free;                   /* slots */
    uint32_t n_free, n_out, n_queued; /* queued: copies that wait for xfer_stage_go */
    struct xfer_ops_queue moving;     /* copies queued and in flight, in their order */
    struct xfer_ops_queue waiting;    /* received without a slot */
    struct bt_slab spare;
};

struct xfer_ctrl {
    struct xfer_op op;
    size_t n;
    uint8_t data[];
};

/* ---- peers ---- */

enum xfer_peer_state {
    PEER_DIALING, /* P: HELLO sent, or waiting for the wire */
    PEER_GREETED, /* D: connection there, HELLO not yet */
    PEER_TESTING, /* HELLO and WELCOME exchanged; the test page is on its way */
    PEER_UP,
    PEER_REFUSED, /* REFUSE sent; the other side closes, or we do after a while */
    PEER_CLOSING, /* the wire is being closed; sends and receives end */
};

TAILQ_HEAD(xfer_pushes, xfer_push);

struct xfer_peer {
    TAILQ_ENTRY(xfer_peer) link;
    uint64_t id;
    enum xfer_peer_state state;
    bool incoming;
    bool conn_open;             /* the wire's part exists */
    bool conn_closing;          /* ops->close was called */
    uint64_t instance;          /* 0 until known */
    struct bt_gate_token token; /* outgoing: the other end's */
    uint64_t expect;            /* dialled: whom we want */
    uint32_t version;
    void *conn;            /* the wire's */
    enum bt_status broken; /* set by the wire; acted on by the round */
    uint64_t born_ns, rx_ns, ping_ns, progress_ns, closing_ns;
    bool ping_in_flight;
    bool want_rndv, want_rndv_device;
    bool direct;               /* the wire takes and fills device memory, by rendezvous */
    size_t window_used;        /* share bytes in flight */
    uint32_t n_sends, n_recvs; /* in flight, of any kind */
    uint32_t n_share_sends, n_share_recvs;
    struct xfer_pushes queued;   /* shares left to send */
    struct xfer_pushes posted;   /* all sent, some in flight */
    struct xfer_node *up, *down; /* reserved events; NULL once used */
    uint8_t *test_page;          /* D: receive buffer */
    char address[80];
};
TAILQ_HEAD(xfer_peers, xfer_peer);

/* ---- pushes ---- */

struct xfer_push {
    TAILQ_ENTRY(xfer_push) link;
    struct bt_xfer_push d; /* arrays point behind this struct */
    struct xfer_peer *peer;
    struct xfer_node *done;
    uint64_t n_total, cursor; /* shares; layer-major */
    uint32_t n_in_flight;
    enum bt_status status;
    uint64_t bytes;
    uint64_t call_ns, post_ns;
    uint32_t ids[]; /* page_ids, then page_index */
};

/* ---- landings ---- */

struct xfer_land_group {
    struct bt_xfer_land_group d; /* page_ids: owned */
    uint64_t *seen;              /* bit per (layer, page) */
    uint64_t n_done;
    uint64_t n_expect;
};

struct xfer_landing {
    TAILQ_ENTRY(xfer_landing) link;
    struct xfer_landing *next_in_bucket;
    uint8_t ticket[BT_XFER_TICKET_BYTES];
    uint64_t generation;
    uint64_t peer;
    bool expecting, full, closing;
    uint32_t n_in_flight;
    uint64_t bytes, first_ns, last_ns;
    uint32_t n_groups;
    struct xfer_land_group group[BT_XFER_GROUPS_MAX];
    struct xfer_node *landed, *full_ev, *closed;
};
TAILQ_HEAD(xfer_landings, xfer_landing);

/* ---- the wire ---- */

enum xfer_take {
    XFER_TAKEN, /* done with it (or dropped) */
    XFER_RECV,  /* receive into op->data, op->bytes; then xfer_received(op) */
};

/* What carries a connection. */
struct xfer_transport {
    char text[200];    /* as in PEER_UP */
    bool rndv;         /* under PROTO_AUTO shares in host memory go by rendezvous */
    bool rndv_device;  /* likewise those in registered device memory */
    char warning[128]; /* why it is a poor choice, or "" */
};

/* A wire. All on the transfer thread, except open (creator, before the thread exists). None blocks but `wait`.
 * The wire calls back: xfer_dialled, xfer_incoming, xfer_frame, xfer_sent, xfer_received, xfer_broken, xfer_closed. */
struct xfer_ops {
    const char *name;
    enum bt_status (*open)(struct bt_xfer *x, const struct bt_xfer_opts *o, struct bt_err *err);
    void (*fini)(struct bt_xfer *x); /* no peer has a connection any more */
    /* BT_OK: xfer_dialled(p) follows when messages can be sent, perhaps before this returns, unless the peer goes
     * down before. Else: nothing of p is left in the wire. */
    enum bt_status (*dial)(struct bt_xfer *x, struct xfer_peer *p);
    /* Sends op->wire and op->data[op->bytes]; xfer_sent(op) follows exactly once, perhaps before it returns. */
    void (*send)(struct bt_xfer *x, struct xfer_peer *p, struct xfer_op *op);
    /* Ends everything in flight of the peer, then xfer_closed. Once per connection. */
    void (*close)(struct bt_xfer *x, struct xfer_peer *p);
    /* Frees p->conn: closed, and no send or receive is left. */
    void (*release)(struct bt_xfer *x, struct xfer_peer *p);
    /* Delivers what has come, for a bounded time. True if anything was done. */
    bool (*progress)(struct bt_xfer *x);
    /* Sleeps until the wire, xfer_wake() or the time. May return early. */
    void (*wait)(struct bt_xfer *x, uint64_t timeout_ns);
    void (*describe)(struct bt_xfer *x, struct xfer_peer *p, struct xfer_transport *t);
    /* NULL, or: the greeting is over, and the peer up. */
    void (*up)(struct bt_xfer *x, struct xfer_peer *p);
    /* NULL, or: true while the whole instance must stand still (fault injection). */
    bool (*frozen)(struct bt_xfer *x);
};
extern const struct xfer_ops xfer_ucx_ops;
extern const struct xfer_ops xfer_loop_ops;

struct bt_xfer {
    const struct xfer_ops *ops;
    void *wire;            /* the wire's state */
    struct bt_xfer_opts o; /* defaults filled in; strings below */
    char fingerprint[BT_XFER_NAME_MAX], layout[BT_XFER_NAME_MAX], tls[256];
    char address[80];
    pthread_t thread;
    int wake_fd;
    atomic_bool stop;
    atomic_uint_fast64_t next_peer;
    atomic_size_t ctrl_out_bytes, ctrl_in_bytes;
    atomic_uint n_landings;
    struct bt_spent
        spent; /* what callers made and the thread is done with: freed by the next call */
    struct bt_seal seal;
    struct bt_fifo *ctrl_in;     /* control messages that came, and their events */
    struct bt_log_limit in_vain; /* lines about connections that were never up */

    pthread_mutex_t cmd_mu;
    struct xfer_cmds cmds;
    uint32_t n_cmds;

    pthread_mutex_t ev_mu;
    struct xfer_nodes events;

    pthread_mutex_t stats_mu;
    struct bt_xfer_stats stats_out;

    /* transfer thread only */
    uint64_t now_ns;
    bool events_added;
    struct bt_xfer_stats st;
    struct xfer_peers peers;
    uint32_t n_peers;
    struct xfer_landings landings;
    struct xfer_landing **buckets; /* of landings, by ticket */
    uint32_t buckets_mask;
    struct bt_slab op_slab;
    uint32_t n_share_ops; /* of them, those of shares */
    struct xfer_stage stage;
    bool direct; /* the wire registered the regions; set when it is opened */
};

/* xfer.c */
void xfer_wake(struct bt_xfer *x);                       /* any thread */
void xfer_event(struct bt_xfer *x, struct xfer_node *n); /* takes n unless n->keep */
/* Zeroed. NULL: as many are in flight as may be. */
struct xfer_op *xfer_op_get(struct bt_xfer *x, bool share);
void xfer_op_put(struct bt_xfer *x, struct xfer_op *op);

/* xfer_calls.c */
struct xfer_cmd *xfer_command_take(struct bt_xfer *x);
void xfer_command_drop(struct bt_xfer *x, struct xfer_cmd *c); /* one that is never run */

/* xfer_peer.c, xfer_recv.c: called by the wire */
struct xfer_peer *xfer_incoming(struct bt_xfer *x, void *conn,
                                const char *from); /* NULL: refused */
/* data NULL: rendezvous, the payload is elsewhere. XFER_RECV sets *op. */
enum xfer_take xfer_frame(struct bt_xfer *x, struct xfer_peer *p, const uint8_t *head,
                          size_t head_bytes, const uint8_t *data, size_t bytes,
                          struct xfer_op **op);
void xfer_sent(struct bt_xfer *x, struct xfer_op *op, enum bt_status st);
void xfer_received(struct bt_xfer *x, struct xfer_op *op, enum bt_status st);
void xfer_broken(struct bt_xfer *x, struct xfer_peer *p,
                 enum bt_status st); /* st: why; acted on later */
void xfer_closed(struct bt_xfer *x, struct xfer_peer *p);

/* xfer_quality.c: fills rndv and warning from text. rdma_folder has an entry for each RDMA device of this machine
 * (/sys/class/infiniband). */
void xfer_transport_judge(struct xfer_transport *t, const char *rdma_folder);

/* xfer_peer.c: called by the round */
struct xfer_peer *xfer_peer_alloc(struct bt_xfer *x); /* any thread */
void xfer_peer_free(struct xfer_peer *p);
struct xfer_peer *xfer_peer_find(struct bt_xfer *x, uint64_t id);
void xfer_peer_dial(struct bt_xfer *x, struct xfer_peer *p);
void xfer_peer_down(struct bt_xfer *x, struct xfer_peer *p, enum bt_status st, const char *why);
/* Timers, broken wires and freeing; returns the next deadline. *did: something changed. */
uint64_t xfer_peers_tick(struct bt_xfer *x, bool *did);
/* A message with a payload from bt_alloc (taken) or none. */
void xfer_peer_send(struct bt_xfer *x, struct xfer_peer *p, enum xfer_kind kind, void *owned,
                    size_t n);
void xfer_send_message(struct bt_xfer *x, struct xfer_peer *p, struct xfer_head *h, void *owned,
                       const uint8_t *data, size_t n);
void xfer_ctrl_send(struct bt_xfer *x, struct xfer_peer *p, struct xfer_ctrl *m); /* takes m */
void xfer_peer_up(struct bt_xfer *x, struct xfer_peer *p);

/* xfer_greet.c */
void xfer_dialled(struct bt_xfer *x, struct xfer_peer *p); /* P: called by the wire */
struct xfer_hello xfer_greet_own(const struct bt_xfer *x, const struct xfer_peer *p);
/* What D thinks of who greets; unless XFER_ENTER, why it may not, in words that tell no secret. */
enum xfer_verdict xfer_greet_judge(const struct bt_xfer *x, const struct xfer_hello *hello,
                                   char *why, size_t cap);
void xfer_greet_hello(struct bt_xfer *x, struct xfer_peer *p, const struct xfer_head *h,
                      const uint8_t *data);
void xfer_greet_welcome(struct bt_xfer *x, struct xfer_peer *p, const struct xfer_head *h);
void xfer_greet_page(struct bt_xfer *x, struct xfer_peer *p, const struct xfer_head *h,
                     const uint8_t *page);
void xfer_greet_refused(struct bt_xfer *x, struct xfer_peer *p, const struct xfer_head *h,
                        const uint8_t *data);

/* xfer_push.c */
void xfer_push_start(struct bt_xfer *x, struct xfer_push *pu);
bool xfer_push_pump(struct bt_xfer *x, struct xfer_peer *p); /* true: more could be sent at once */
void xfer_push_send(struct bt_xfer *x, struct xfer_op *op);  /* op->data is there: to the wire */
void xfer_push_sent(struct bt_xfer *x, struct xfer_op *op, enum bt_status st);
void xfer_push_cancel_ticket(struct bt_xfer *x, const uint8_t *ticket);
void xfer_push_fail_peer(struct bt_xfer *x, struct xfer_peer *p);

/* xfer_stage.c */
static inline bool xfer_stage_is_on(const struct bt_xfer *x)
{
    return x->stage.o.n_slots > 0;
}
enum bt_status xfer_stage_init(struct bt_xfer *x, const struct bt_xfer_stage *o);
void xfer_stage_fini(struct bt_xfer *x);
/* A send: a slot for op, whose op->device is set. false: none now. Then xfer_stage_out: op is sent when it is there. */
bool xfer_stage_get_out(struct bt_xfer *x, struct xfer_op *op);
void xfer_stage_out(struct bt_xfer *x, struct xfer_op *op);
/* A receive: where op's bytes go first. NULL: too much waits. Then xfer_stage_in: xfer_received comes, with op->is_moved, when they
 * are in their page. */
uint8_t *xfer_stage_get_in(struct bt_xfer *x, struct xfer_op *op, uint8_t *device);
void xfer_stage_in(struct bt_xfer *x, struct xfer_op *op);
void xfer_stage_put(struct bt_xfer *x, struct xfer_op *op); /* the op ends */
bool xfer_stage_step(struct bt_xfer *x); /* true: copies are in flight, or ended */
bool xfer_stage_go(struct bt_xfer *x);   /* begins what a round queued; true: there was any */

/* xfer_land.c */
enum bt_status
xfer_landing_make(struct bt_xfer *x, const struct bt_xfer_landing *l,
                  struct xfer_landing **out); /* any thread but the transfer thread */
void xfer_landing_free(struct bt_xfer *x, struct xfer_landing *l);
enum bt_status xfer_buckets_init(struct bt_xfer *x);
void xfer_land_add(struct bt_xfer *x, struct xfer_landing *l);
void xfer_land_expect_cmd(struct bt_xfer *x, const struct xfer_cmd *c);
void xfer_land_close_cmd(struct bt_xfer *x, const struct xfer_cmd *c);
/* Where a share goes; NULL: dropped and counted. On success it counts as in flight until xfer_land_done. */
struct xfer_landing *xfer_land_begin(struct bt_xfer *x, uint64_t peer, const struct xfer_head *h,
                                     uint8_t **dst);
void xfer_land_done(struct bt_xfer *x, struct xfer_landing *l, const struct xfer_head *h,
                    enum bt_status st);

/* xfer_addr.c */
struct sockaddr_storage;
/* "1.2.3.4:5" or "[::1]:5"; numeric only unless resolve. *len: of the address. */
enum bt_status xfer_addr_parse(const char *text, bool resolve, struct sockaddr_storage *out,
                               uint32_t *len, struct bt_err *err);
uint16_t xfer_addr_port(const struct sockaddr_storage *a);
void xfer_addr_set_port(struct sockaddr_storage *a, uint16_t port);
void xfer_addr_format(const struct sockaddr_storage *a, char *text, size_t cap);

#endif
