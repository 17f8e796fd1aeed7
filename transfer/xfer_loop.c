/* The loopback wire: connections between `bt_xfer` of one process, with faults on request. Owns the hub: its nodes
 * (one per bt_xfer), connections and messages on their way, all under one mutex. Shares travel as a reference to
 * the sender's memory and are copied at the receive, as by rendezvous; with BT_XFER_PROTO_EAGER, and for all other
 * messages, the payload is copied at the send. Never calls the protocol with the mutex held. */

#include "transfer/xfer_loop.h"
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/queue.h>
#include <unistd.h>
#include "base/assert.h"
#include "base/mem.h"
#include "transfer/xfer_int.h"

#define DELIVER_MAX 256

enum frame_kind { FRAME_MESSAGE, FRAME_SENT, FRAME_CONNECT, FRAME_BROKEN, FRAME_RECEIVING };

struct loop_conn;
struct frame {
    TAILQ_ENTRY(frame) link;
    enum frame_kind kind;
    struct loop_conn *conn; /* the end that this is delivered at */
    uint64_t due_ns;
    struct xfer_op
        *op; /* the sender's (MESSAGE by reference, SENT) or the receiver's (RECEIVING) */
    struct frame *message; /* RECEIVING: what is received */
    enum bt_status status;
    const uint8_t *data; /* payload: in the sender's memory, or `copy` */
    size_t bytes;
    bool by_reference, corrupt;
    uint8_t head[XFER_HEAD_BYTES];
    uint8_t copy[];
};
TAILQ_HEAD(frames, frame);

/* One end of a connection. */
struct loop_conn {
    struct loop_conn *other; /* NULL once that end is gone */
    struct node *node;
    struct xfer_peer *peer; /* NULL until accepted; set by the node's thread */
    bool closed;            /* by this end: no more upcalls */
    bool broken;            /* told, or about to be */
};

struct node {
    TAILQ_ENTRY(node) link;
    struct bt_xfer *x;
    struct bt_xfer_hub *hub;
    uint64_t instance;
    bool listening, killed, frozen, hold;
    char address[80];
    struct frames inbox;
    struct frame *current; /* taken out, being handled by the node's thread */
};
TAILQ_HEAD(nodes, node);

struct bt_xfer_hub {
    pthread_mutex_t mu;
    struct nodes nodes;
    struct bt_xfer_faults faults;
    uint64_t rng;
};

/* ---- hub ---- */

enum bt_status bt_xfer_hub_create(const struct bt_xfer_faults *faults, struct bt_xfer_hub **out)
{
    struct bt_xfer_hub *hub = bt_calloc(1, sizeof(*hub));
    if (hub == NULL) {
        return BT_ERR_NOMEM;
    }
    pthread_mutex_init(&hub->mu, NULL);
    TAILQ_INIT(&hub->nodes);
    if (faults != NULL) {
        hub->faults = *faults;
        hub->rng = faults->seed;
    }
    *out = hub;
    return BT_OK;
}

void bt_xfer_hub_destroy(struct bt_xfer_hub *hub)
{
    if (hub == NULL) {
        return;
    }
    BT_ASSERT(TAILQ_EMPTY(&hub->nodes));
    pthread_mutex_destroy(&hub->mu);
    bt_free(hub);
}

void bt_xfer_hub_set_faults(struct bt_xfer_hub *hub, const struct bt_xfer_faults *faults)
{
    pthread_mutex_lock(&hub->mu);
    hub->faults = *faults;
    hub->rng = faults->seed;
    pthread_mutex_unlock(&hub->mu);
}

static uint64_t draw(struct bt_xfer_hub *hub)
{
    uint64_t z = hub->rng += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static bool chance(struct bt_xfer_hub *hub, uint32_t ppm)
{
    return ppm > 0 && draw(hub) % 1000000 < ppm;
}

static struct node *node_by_instance(struct bt_xfer_hub *hub, uint64_t instance)
{
    struct node *n;
    TAILQ_FOREACH(n, &hub->nodes, link)
    {
        if (n->instance == instance) {
            return n;
        }
    }
    return NULL;
}

/* ---- frames; hub->mu held ---- */

/* A wire has memory of its own: that of frames is no business of the thread that sends, nor does it fail because a test
 * made one allocation fail. */
static struct frame *frame_new(enum frame_kind kind, struct loop_conn *to, size_t copy_bytes)
{
    struct bt_seal *was = bt_alloc_unseal();
    struct frame *f = bt_calloc(1, sizeof(*f) + copy_bytes);
    if (f == NULL) {
        f = bt_calloc(1, sizeof(*f) + copy_bytes);
    }
    bt_alloc_reseal(was);
    BT_ASSERT(f != NULL);
    f->kind = kind;
    f->conn = to;
    return f;
}

static void frame_free(struct frame *f)
{
    struct bt_seal *was = bt_alloc_unseal();
    bt_free(f);
    bt_alloc_reseal(was);
}

static void deliver(struct frame *f)
{
    TAILQ_INSERT_TAIL(&f->conn->node->inbox, f, link);
    xfer_wake(f->conn->node->x);
}

/* Tells a sender that its op has ended; a sender whose end is gone has had that already. */
static void deliver_sent(struct loop_conn *to, struct xfer_op *op, enum bt_status st)
{
    struct frame *f = frame_new(FRAME_SENT, to, 0);
    f->op = op;
    f->status = st;
    deliver(f);
}

static void break_end(struct loop_conn *c)
{
    if (c != NULL && !c->broken) {
        c->broken = true;
        deliver(frame_new(FRAME_BROKEN, c, 0));
    }
}

void bt_xfer_hub_kill(struct bt_xfer_hub *hub, uint64_t instance)
{
    pthread_mutex_lock(&hub->mu);
    struct node *n = node_by_instance(hub, instance);
    if (n != NULL) {
        n->killed = true;
        n->listening = false;
        xfer_wake(n->x);
    }
    pthread_mutex_unlock(&hub->mu);
}

void bt_xfer_hub_freeze(struct bt_xfer_hub *hub, uint64_t instance, bool on)
{
    pthread_mutex_lock(&hub->mu);
    struct node *n = node_by_instance(hub, instance);
    if (n != NULL) {
        n->frozen = on;
        xfer_wake(n->x);
    }
    pthread_mutex_unlock(&hub->mu);
}

void bt_xfer_hub_hold_receives(struct bt_xfer_hub *hub, uint64_t instance, bool on)
{
    pthread_mutex_lock(&hub->mu);
    struct node *n = node_by_instance(hub, instance);
    if (n != NULL) {
        n->hold = on;
        xfer_wake(n->x);
    }
    pthread_mutex_unlock(&hub->mu);
}

/* ---- the wire ---- */

static enum bt_status loop_open(struct bt_xfer *x, const struct bt_xfer_opts *o, struct bt_err *err)
{
    struct bt_xfer_hub *hub = o->hub;
    struct node *n = bt_calloc(1, sizeof(*n));
    struct node *q;
    if (n == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "transfer: out of memory");
    }
    TAILQ_INIT(&n->inbox);
    n->x = x;
    n->hub = hub;
    n->instance = o->instance;
    n->listening = o->listen != NULL;
    if (n->listening) {
        snprintf(n->address, sizeof(n->address), "%s", o->listen);
        snprintf(x->address, sizeof(x->address), "%s", o->listen);
    }
    bool taken = false;
    pthread_mutex_lock(&hub->mu);
    TAILQ_FOREACH(q, &hub->nodes, link)
    {
        taken = taken || (n->listening && q->listening && strcmp(q->address, n->address) == 0);
    }
    if (!taken) {
        TAILQ_INSERT_TAIL(&hub->nodes, n, link);
    }
    pthread_mutex_unlock(&hub->mu);
    if (taken) {
        bt_free(n);
        return bt_err_set(err, BT_ERR_IO, "transfer: address \"%s\" is in use", o->listen);
    }
    x->wire = n;
    return BT_OK;
}

static void loop_fini(struct bt_xfer *x)
{
    struct node *n = x->wire;
    struct frame *f;
    pthread_mutex_lock(&n->hub->mu);
    TAILQ_REMOVE(&n->hub->nodes, n, link);
    while ((f = TAILQ_FIRST(&n->inbox)) != NULL) {
        TAILQ_REMOVE(&n->inbox, f, link);
        if (f->kind == FRAME_CONNECT) { /* dialled us, never accepted */
            if (f->conn->other != NULL) {
                f->conn->other->other = NULL;
                break_end(f->conn->other);
            }
            bt_free(f->conn);
        }
        frame_free(f);
    }
    pthread_mutex_unlock(&n->hub->mu);
    bt_free(n);
}

static enum bt_status loop_dial(struct bt_xfer *x, struct xfer_peer *p)
{
    struct node *n = x->wire;
    struct node *to = NULL;
    struct node *q;
    struct loop_conn *a = bt_calloc(1, sizeof(*a));
    struct loop_conn *b = bt_calloc(1, sizeof(*b));
    if (a == NULL || b == NULL) {
        bt_free(a);
        bt_free(b);
        return BT_ERR_NOMEM;
    }
    pthread_mutex_lock(&n->hub->mu);
    TAILQ_FOREACH(q, &n->hub->nodes, link)
    {
        if (q->listening && strcmp(q->address, p->address) == 0) {
            to = q;
        }
    }
    if (to != NULL && !n->killed) {
        *a = (struct loop_conn){.other = b, .node = n, .peer = p};
        *b = (struct loop_conn){.other = a, .node = to};
        p->conn = a;
        deliver(frame_new(FRAME_CONNECT, b, 0));
    }
    pthread_mutex_unlock(&n->hub->mu);
    if (p->conn == NULL) {
        bt_free(a);
        bt_free(b);
        return BT_ERR_PEER_LOST;
    }
    xfer_dialled(x, p);
    return BT_OK;
}

/* Makes the frame of a message; hub->mu held. */
static void post_message(struct node *n, struct loop_conn *to, struct xfer_op *op,
                         bool by_reference)
{
    struct bt_xfer_hub *hub = n->hub;
    const struct bt_xfer_faults *ft = &hub->faults;
    struct frame *f = frame_new(FRAME_MESSAGE, to, by_reference ? 0 : op->bytes);
    bool page = op->push != NULL || op->is_test;

    memcpy(f->head, op->wire, sizeof(f->head));
    f->bytes = op->bytes;
    f->by_reference = by_reference;
    f->op = by_reference ? op : NULL;
    f->data = op->data;
    if (!by_reference) {
        if (op->bytes > 0) {
            memcpy(f->copy, op->data, op->bytes);
        }
        f->data = f->copy;
    }
    f->corrupt = page && chance(hub, ft->corrupt_ppm);
    f->due_ns = n->x->now_ns + (ft->delay_ns_max > 0 ? draw(hub) % ft->delay_ns_max : 0);
    struct frame *last = TAILQ_LAST(&to->node->inbox, frames);
    deliver(f);
    if (op->push != NULL && last != NULL && last->kind == FRAME_MESSAGE &&
        chance(hub, ft->reorder_ppm)) {
        TAILQ_REMOVE(&to->node->inbox, last, link);
        TAILQ_INSERT_TAIL(&to->node->inbox, last, link);
    }
    if (op->push != NULL && chance(hub, ft->duplicate_ppm)) {
        struct frame *twin = frame_new(FRAME_MESSAGE, to, op->bytes);
        memcpy(twin->head, f->head, sizeof(twin->head));
        memcpy(twin->copy, op->data, op->bytes);
        twin->data = twin->copy;
        twin->bytes = op->bytes;
        twin->due_ns = f->due_ns;
        deliver(twin);
    }
}

static void loop_send(struct bt_xfer *x, struct xfer_peer *p, struct xfer_op *op)
{
    struct node *n = x->wire;
    struct loop_conn *c = p->conn;
    bool by_reference = op->push != NULL && x->o.proto != BT_XFER_PROTO_EAGER;
    enum bt_status st = BT_OK;
    bool ended = true;

    pthread_mutex_lock(&n->hub->mu);
    if (c->broken || c->other == NULL) {
        st = BT_ERR_PEER_LOST;
    } else if (op->push != NULL && chance(n->hub, n->hub->faults.drop_ppm)) {
        st = BT_OK;
    } else {
        post_message(n, c->other, op, by_reference);
        ended = !by_reference;
    }
    pthread_mutex_unlock(&n->hub->mu);
    if (ended) {
        xfer_sent(x, op, st);
    }
}

/* Takes everything addressed to this end out of its node's inbox; hub->mu held. They go
 * to *mine; the other end's sends among them are answered. */
static void purge(struct loop_conn *c, struct frames *mine)
{
    struct frame *f = TAILQ_FIRST(&c->node->inbox);
    while (f != NULL) {
        struct frame *next = TAILQ_NEXT(f, link);
        if (f->conn == c) {
            TAILQ_REMOVE(&c->node->inbox, f, link);
            struct frame *msg = f->kind == FRAME_RECEIVING ? f->message : f;
            if (msg->by_reference && c->other != NULL) {
                deliver_sent(c->other, msg->op, BT_ERR_PEER_LOST);
            }
            if (f->kind == FRAME_RECEIVING) {
                frame_free(f->message);
            }
            TAILQ_INSERT_TAIL(mine, f, link);
        }
        f = next;
    }
}

/* The reference of frame f, a message or the receive of one, is withdrawn: nothing reads it any more, and the
 * receive fails. Adds the end of the sender's op to *mine; hub->mu held. */
static void withdraw(struct loop_conn *c, struct frame *f, struct frames *mine)
{
    struct frame *m = f->kind == FRAME_RECEIVING ? f->message : f;
    if (m->by_reference) {
        struct frame *s = frame_new(FRAME_SENT, c, 0);
        s->op = m->op;
        s->status = BT_ERR_PEER_LOST;
        TAILQ_INSERT_TAIL(mine, s, link);
        m->by_reference = false;
        m->data = NULL;
    }
}

/* Sends of this end that lie at the other end, not yet received: taken back; hub->mu held. */
static void take_back(struct loop_conn *c, struct frames *mine)
{
    struct loop_conn *o = c->other;
    struct frame *f = TAILQ_FIRST(&o->node->inbox);
    while (f != NULL) {
        struct frame *next = TAILQ_NEXT(f, link);
        if (f->conn == o && (f->kind == FRAME_MESSAGE || f->kind == FRAME_RECEIVING)) {
            withdraw(c, f, mine);
            if (f->kind == FRAME_MESSAGE) {
                TAILQ_REMOVE(&o->node->inbox, f, link);
                frame_free(f);
            }
        }
        f = next;
    }
    f = o->node->current;
    if (f != NULL && f->conn == o && (f->kind == FRAME_MESSAGE || f->kind == FRAME_RECEIVING)) {
        withdraw(c, f, mine);
    }
}

static void loop_close(struct bt_xfer *x, struct xfer_peer *p)
{
    struct node *n = x->wire;
    struct loop_conn *c = p->conn;
    struct frames mine;
    struct frame *f;

    TAILQ_INIT(&mine);
    pthread_mutex_lock(&n->hub->mu);
    c->closed = true;
    purge(c, &mine);
    if (c->other != NULL) {
        take_back(c, &mine);
        c->other->other = NULL;
        break_end(c->other);
    }
    pthread_mutex_unlock(&n->hub->mu);
    while ((f = TAILQ_FIRST(&mine)) != NULL) {
        TAILQ_REMOVE(&mine, f, link);
        if (f->kind == FRAME_SENT) {
            xfer_sent(x, f->op, f->status);
        } else if (f->kind == FRAME_RECEIVING) {
            xfer_received(x, f->op, BT_ERR_PEER_LOST);
        }
        frame_free(f);
    }
    xfer_closed(x, p);
}

static void loop_release(struct bt_xfer *x, struct xfer_peer *p)
{
    (void)x;
    bt_free(p->conn);
    p->conn = NULL;
}

/* ---- delivery ---- */

/* The next frame that may be handled now; hub->mu held. */
static struct frame *next_due(struct node *n)
{
    struct frame *f;
    TAILQ_FOREACH(f, &n->inbox, link)
    {
        bool held = f->kind == FRAME_RECEIVING && n->hold && f->message->data != NULL;
        if (f->due_ns <= n->x->now_ns && !held) {
            TAILQ_REMOVE(&n->inbox, f, link);
            n->current = f;
            return f;
        }
    }
    return NULL;
}

static void on_connect(struct bt_xfer *x, struct frame *f)
{
    struct node *n = x->wire;
    struct xfer_peer *p = xfer_incoming(x, f->conn, "loop");
    if (p == NULL) {
        pthread_mutex_lock(&n->hub->mu);
        struct frames mine;
        struct frame *q;
        TAILQ_INIT(&mine);
        purge(f->conn, &mine);
        if (f->conn->other != NULL) {
            f->conn->other->other = NULL;
            break_end(f->conn->other);
        }
        while ((q = TAILQ_FIRST(&mine)) != NULL) {
            TAILQ_REMOVE(&mine, q, link);
            frame_free(q);
        }
        pthread_mutex_unlock(&n->hub->mu);
        bt_free(f->conn);
        return;
    }
    pthread_mutex_lock(&n->hub->mu);
    f->conn->peer = p;
    pthread_mutex_unlock(&n->hub->mu);
}

/* Returns whether the frame lives on as part of a receive. */
static bool on_message(struct bt_xfer *x, struct frame *f)
{
    struct node *n = x->wire;
    struct loop_conn *c = f->conn;
    struct xfer_op *op = NULL;
    pthread_mutex_lock(&n->hub->mu);
    const uint8_t *data =
        f->data == f->copy ? f->data : NULL; /* NULL: by reference, perhaps withdrawn */
    pthread_mutex_unlock(&n->hub->mu);
    if (data != NULL && f->corrupt) {
        f->copy[f->bytes / 2] ^= 1;
    }
    enum xfer_take take = xfer_frame(x, c->peer, f->head, sizeof(f->head), data, f->bytes, &op);
    bool lives = false;
    pthread_mutex_lock(&n->hub->mu);
    n->current = NULL;
    if (take == XFER_RECV) {
        struct frame *r = frame_new(FRAME_RECEIVING, c, 0);
        r->op = op;
        r->message = f;
        lives = true;
        deliver(r);
    } else if (f->by_reference && c->other != NULL) {
        deliver_sent(c->other, f->op,
                     BT_OK); /* dropped by the receiver: the send is over all the same */
    }
    pthread_mutex_unlock(&n->hub->mu);
    return lives;
}

/* Copies the payload, if its owner is still there, and ends both ops. */
static void on_receiving(struct bt_xfer *x, struct frame *f)
{
    struct node *n = x->wire;
    struct frame *m = f->message;
    enum bt_status st = BT_OK;
    pthread_mutex_lock(&n->hub->mu);
    n->current = NULL;
    if (m->data == NULL || f->conn->other == NULL) {
        st = BT_ERR_PEER_LOST;
    } else {
        uint8_t *dst = (uint8_t *)(uintptr_t)f->op->data; /* a receive's destination */
        memcpy(dst, m->data, m->bytes);
        if (m->corrupt) {
            dst[m->bytes / 2] ^= 1;
        }
        if (m->by_reference) {
            deliver_sent(f->conn->other, m->op, BT_OK);
        }
    }
    pthread_mutex_unlock(&n->hub->mu);
    frame_free(m);
    xfer_received(x, f->op, st);
}

/* A killed node hears nothing; its connections break at both ends. */
static bool loop_die(struct bt_xfer *x)
{
    struct xfer_peer *p;
    bool did = false;
    TAILQ_FOREACH(p, &x->peers, link)
    {
        if (p->state != PEER_CLOSING) {
            xfer_peer_down(x, p, BT_ERR_PEER_LOST, "killed");
            did = true;
        }
    }
    return did;
}

static bool loop_progress(struct bt_xfer *x)
{
    struct node *n = x->wire;
    struct bt_seal *was;
    bool did = false;
    for (unsigned i = 0; i < DELIVER_MAX; i++) {
        pthread_mutex_lock(&n->hub->mu);
        bool killed = n->killed;
        struct frame *f = killed ? NULL : next_due(n);
        pthread_mutex_unlock(&n->hub->mu);
        if (killed) {
            return loop_die(x);
        }
        if (f == NULL) {
            break;
        }
        did = true;
        bool lives = false;
        switch (f->kind) {
        case FRAME_CONNECT:
            was = bt_alloc_unseal(); /* making a connection is no request */
            on_connect(x, f);
            bt_alloc_reseal(was);
            break;
        case FRAME_MESSAGE:
            lives = on_message(x, f);
            break;
        case FRAME_RECEIVING:
            on_receiving(x, f);
            break;
        case FRAME_SENT:
            xfer_sent(x, f->op, f->status);
            break;
        case FRAME_BROKEN:
            xfer_broken(x, f->conn->peer, BT_ERR_PEER_LOST);
            break;
        }
        pthread_mutex_lock(&n->hub->mu);
        n->current = NULL;
        pthread_mutex_unlock(&n->hub->mu);
        if (!lives) {
            frame_free(f);
        }
    }
    return did;
}

static void loop_wait(struct bt_xfer *x, uint64_t timeout_ns)
{
    struct node *n = x->wire;
    struct frame *f;
    uint64_t now = x->now_ns;
    pthread_mutex_lock(&n->hub->mu);
    TAILQ_FOREACH(f, &n->inbox, link)
    {
        if (f->kind == FRAME_RECEIVING && n->hold) {
            continue;
        }
        uint64_t left = f->due_ns > now ? f->due_ns - now : 0;
        timeout_ns = left < timeout_ns ? left : timeout_ns;
    }
    pthread_mutex_unlock(&n->hub->mu);
    if (x->o.manual) {
        return;
    }
    struct pollfd pfd = {.fd = x->wake_fd, .events = POLLIN};
    uint64_t ms = timeout_ns / 1000000 + 1;
    if (poll(&pfd, 1, ms > 60000 ? 60000 : (int)ms) > 0) {
        uint64_t v;
        ssize_t r = read(x->wake_fd, &v, sizeof(v));
        (void)r; /* EAGAIN: nothing to drain */
    }
}

static void loop_describe(struct bt_xfer *x, struct xfer_peer *p, struct xfer_transport *t)
{
    (void)x;
    (void)p;
    *t = (struct xfer_transport){.text = "loopback", .rndv = true, .rndv_device = true};
}

static bool loop_frozen(struct bt_xfer *x)
{
    struct node *n = x->wire;
    pthread_mutex_lock(&n->hub->mu);
    bool frozen = n->frozen && !atomic_load(&x->stop);
    pthread_mutex_unlock(&n->hub->mu);
    return frozen;
}

const struct xfer_ops xfer_loop_ops = {
    .name = "loopback",
    .open = loop_open,
    .fini = loop_fini,
    .dial = loop_dial,
    .send = loop_send,
    .close = loop_close,
    .release = loop_release,
    .progress = loop_progress,
    .wait = loop_wait,
    .describe = loop_describe,
    .frozen = loop_frozen,
};
