/* The transfer room's front: creation, the events that are read back, and the thread that runs rounds. Owns the events and the option defaults. Refuses to know wires and greetings. */

#include "transfer/xfer.h"
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include "base/assert.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "transfer/xfer_int.h"

#define COMMANDS_PER_ROUND 256
/* destroy waits this long for sends and receives to end before it takes the wire down under them. */
#define DESTROY_WAIT_NS (5 * BT_NS_PER_S)
#define CTRL_IN_MORE    ((size_t)1 << 20) /* room for control messages besides twice ctrl_bytes_max */

/* ---- queues ---- */

void xfer_wake(struct bt_xfer *x)
{
    uint64_t one = 1;
    ssize_t n = write(x->wake_fd, &one, sizeof(one));
    BT_ASSERT(n == (ssize_t)sizeof(one) || errno == EAGAIN);
}

void xfer_event(struct bt_xfer *x, struct xfer_node *n)
{
    pthread_mutex_lock(&x->ev_mu);
    n->queued = true;
    STAILQ_INSERT_TAIL(&x->events, n, link);
    pthread_mutex_unlock(&x->ev_mu);
    x->events_added = true;
}

bool bt_xfer_poll(struct bt_xfer *x, struct bt_xfer_event *ev)
{
    pthread_mutex_lock(&x->ev_mu);
    struct xfer_node *n = STAILQ_FIRST(&x->events);
    bool owned = false;
    if (n != NULL) {
        STAILQ_REMOVE_HEAD(&x->events, link);
        n->queued = false;
        owned = !n->keep;
        *ev = n->ev;
    }
    pthread_mutex_unlock(&x->ev_mu);
    if (n == NULL) {
        bt_spent_free(&x->spent);
        return false;
    }
    if (n->block) {
        bt_fifo_give(n);
    } else if (owned) {
        bt_free(n);
    }
    if (ev->kind == BT_XFER_CTRL) {
        atomic_fetch_sub(&x->ctrl_in_bytes, ev->n_bytes);
    }
    return true;
}

void bt_xfer_event_free(struct bt_xfer_event *ev)
{
    bt_fifo_give(ev->data);
    ev->data = NULL;
    ev->n_bytes = 0;
}

struct xfer_op *xfer_op_get(struct bt_xfer *x, bool share)
{
    struct xfer_op *op =
        share && x->n_share_ops >= XFER_SHARES_MAX ? NULL : bt_slab_get(&x->op_slab);
    if (op == NULL) {
        return NULL;
    }
    memset(op, 0, sizeof(*op));
    op->is_share = share;
    x->n_share_ops += share;
    return op;
}

void xfer_op_put(struct bt_xfer *x, struct xfer_op *op)
{
    x->n_share_ops -= op->is_share;
    xfer_stage_put(x, op);
    bt_slab_put(&x->op_slab, op);
}

void bt_xfer_stats(struct bt_xfer *x, struct bt_xfer_stats *out)
{
    pthread_mutex_lock(&x->stats_mu);
    *out = x->stats_out;
    pthread_mutex_unlock(&x->stats_mu);
    out->sealed_heap_calls = bt_seal_heap_calls(&x->seal);
    out->ctrl_bytes_waiting = atomic_load(&x->ctrl_in_bytes) + atomic_load(&x->ctrl_out_bytes);
}

const struct bt_gate_token *bt_xfer_token(const struct bt_xfer *x)
{
    return &x->o.token;
}

const char *bt_xfer_memory_way(const struct bt_xfer *x)
{
    return x->direct ? "registered" : xfer_stage_is_on(x) ? "staged" : "";
}

const char *bt_xfer_address(const struct bt_xfer *x)
{
    return x->address;
}

/* ---- the round ---- */

static void command_run(struct bt_xfer *x, struct xfer_cmd *c)
{
    struct xfer_peer *p;
    switch (c->kind) {
    case XFER_CMD_CONNECT:
        xfer_peer_dial(x, c->dial);
        break;
    case XFER_CMD_DISCONNECT:
        p = xfer_peer_find(x, c->peer);
        if (p != NULL) {
            xfer_peer_down(x, p, BT_ERR_CANCELLED, "disconnected by this side");
        }
        break;
    case XFER_CMD_CTRL:
        p = xfer_peer_find(x, c->peer);
        if (p == NULL || p->state != PEER_UP) {
            atomic_fetch_sub(&x->ctrl_out_bytes, c->ctrl->n);
            bt_spent_add(&x->spent, c->ctrl);
        } else {
            xfer_ctrl_send(x, p, c->ctrl);
        }
        break;
    case XFER_CMD_LAND_OPEN:
        xfer_land_add(x, c->landing);
        break;
    case XFER_CMD_LAND_EXPECT:
        xfer_land_expect_cmd(x, c);
        break;
    case XFER_CMD_LAND_CLOSE:
        xfer_land_close_cmd(x, c);
        break;
    case XFER_CMD_PUSH:
        xfer_push_start(x, c->push);
        break;
    case XFER_CMD_CANCEL:
        xfer_push_cancel_ticket(x, c->ref.ticket);
        break;
    }
    bt_spent_add(&x->spent, c);
}

static void publish_stats(struct bt_xfer *x)
{
    struct xfer_peer *p;
    x->st.sends_in_flight = 0;
    x->st.receives_in_flight = 0;
    TAILQ_FOREACH(p, &x->peers, link)
    {
        x->st.sends_in_flight += p->n_sends;
        x->st.receives_in_flight += p->n_recvs;
    }
    pthread_mutex_lock(&x->stats_mu);
    x->stats_out = x->st;
    pthread_mutex_unlock(&x->stats_mu);
}

/* Commands, wire, pumps, timers, in this order: what has arrived counts before a lease is judged. Copies that wire and pumps ask
 * for begin together, once.
 * Returns whether anything was done; *deadline: the next timer. */
static bool round_run(struct bt_xfer *x, uint64_t *deadline)
{
    bool did = false;
    struct xfer_cmd *c;
    struct xfer_peer *p;

    for (unsigned n = 0; n < COMMANDS_PER_ROUND && (c = xfer_command_take(x)) != NULL; n++) {
        command_run(x, c);
        did = true;
    }
    did = x->ops->progress(x) || did;
    did = xfer_stage_step(x) || did;
    TAILQ_FOREACH(p, &x->peers, link)
    {
        did = xfer_push_pump(x, p) || did;
    }
    did = xfer_stage_go(x) || did;
    *deadline = xfer_peers_tick(x, &did);
    publish_stats(x);
    if (x->events_added) {
        x->events_added = false;
        if (x->o.wake != NULL) {
            x->o.wake(x->o.wake_arg);
        }
    }
    return did;
}

static void close_all(struct bt_xfer *x)
{
    struct xfer_peer *p;
    TAILQ_FOREACH(p, &x->peers, link)
    {
        xfer_peer_down(x, p, BT_ERR_CANCELLED, "this side stops");
    }
}

/* Runs rounds until every connection is closed and nothing is in flight. */
static void drain(struct bt_xfer *x)
{
    uint64_t t0 = bt_clock_ns();
    uint64_t deadline;
    do {
        if (!x->o.manual) {
            x->now_ns = bt_clock_ns();
        }
        close_all(x);
        if (!round_run(x, &deadline) && x->n_peers > 0) {
            x->ops->wait(x, BT_NS_PER_MS);
        }
        if (bt_clock_ns() - t0 > DESTROY_WAIT_NS) {
            bt_log_warn("xfer", "%u connections do not close; taking the wire down", x->n_peers);
            break;
        }
    } while (x->n_peers > 0);
    x->ops->fini(x);
}

/* The wire and the stage may touch device memory from here on. */
static void enter(struct bt_xfer *x)
{
    if (x->stage.o.enter != NULL) {
        x->stage.o.enter(x->stage.o.arg);
    }
}

static void *thread_main(void *arg)
{
    struct bt_xfer *x = arg;
    bt_log_thread("xfer");
    enter(x);
    bt_alloc_seal(&x->seal);
    while (!atomic_load(&x->stop)) {
        uint64_t deadline = 0;
        x->now_ns = bt_clock_ns();
        if (x->ops->frozen != NULL && x->ops->frozen(x)) {
            x->ops->wait(x, 10 * BT_NS_PER_MS);
        } else if (!round_run(x, &deadline)) {
            uint64_t now = bt_clock_ns();
            x->ops->wait(x, deadline > now ? deadline - now : 0);
        }
    }
    struct bt_seal *was = bt_alloc_unseal(); /* connections and the wire go */
    drain(x);
    bt_alloc_reseal(was);
    return NULL;
}

bool bt_xfer_step(struct bt_xfer *x, uint64_t now_ns)
{
    uint64_t deadline;
    BT_ASSERT(x->o.manual && now_ns >= x->now_ns);
    x->now_ns = now_ns;
    if (x->ops->frozen != NULL && x->ops->frozen(x)) {
        return false;
    }
    return round_run(x, &deadline);
}

/* ---- life ---- */

static void set_default(uint64_t *v, uint64_t dflt)
{
    if (*v == 0) {
        *v = dflt;
    }
}

static enum bt_status options_fill(struct bt_xfer *x, const struct bt_xfer_opts *o,
                                   struct bt_err *err)
{
    const char *fp = o->fingerprint != NULL ? o->fingerprint : "";
    const char *layout = o->layout != NULL ? o->layout : "";
    if (o->instance == 0) {
        return bt_err_set(err, BT_ERR_INVALID, "transfer: the instance id must not be 0");
    }
    if (strlen(fp) >= BT_XFER_NAME_MAX || strlen(layout) >= BT_XFER_NAME_MAX ||
        (o->tls != NULL && strlen(o->tls) >= sizeof(x->tls))) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "transfer: fingerprint, layout or transport list too long");
    }
    if (o->test_page_bytes > (1u << 20)) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "transfer: test page of %zu bytes, 1 MiB is the limit",
                          o->test_page_bytes);
    }
    if (o->manual && o->hub == NULL) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "transfer: manual mode is for the loopback hub only");
    }
    if (o->port_min > o->port_max ||
        (o->port_max != 0 &&
         (o->port_min == 0 || o->port_max - o->port_min + 1 < BT_XFER_PORTS_MIN))) {
        return bt_err_set(err, BT_ERR_INVALID, "transfer: ports %u to %u: want at least %d, none 0",
                          o->port_min, o->port_max, BT_XFER_PORTS_MIN);
    }
    x->o = *o;
    while (!bt_gate_token_is_set(&x->o.token)) {
        bt_random_bytes(x->o.token.b, sizeof(x->o.token.b));
    }
    snprintf(x->fingerprint, sizeof(x->fingerprint), "%s", fp);
    snprintf(x->layout, sizeof(x->layout), "%s", layout);
    snprintf(x->tls, sizeof(x->tls), "%s", o->tls != NULL ? o->tls : "auto");
    set_default(&x->o.heartbeat_ns, 250 * BT_NS_PER_MS);
    set_default(&x->o.lease_ns, 3 * BT_NS_PER_S);
    set_default(&x->o.connect_timeout_ns, 5 * BT_NS_PER_S);
    set_default(&x->o.stall_ns, 30 * BT_NS_PER_S);
    x->o.window_bytes = o->window_bytes != 0 ? o->window_bytes : 4u << 20;
    x->o.test_page_bytes = o->test_page_bytes != 0 ? o->test_page_bytes : 64u << 10;
    x->o.peers_max = o->peers_max != 0 ? o->peers_max : 256;
    x->o.landings_max = o->landings_max != 0 ? o->landings_max : 4096;
    x->o.commands_max = o->commands_max != 0 ? o->commands_max : 4096;
    x->o.ctrl_bytes_max = o->ctrl_bytes_max != 0 ? o->ctrl_bytes_max : 32u << 20;
    x->o.listen = x->o.tls = x->o.fingerprint = x->o.layout = NULL; /* borrowed for the call only */
    return BT_OK;
}

/* All that the thread needs later. */
static enum bt_status memory_init(struct bt_xfer *x)
{
    enum bt_status st = bt_slab_init(&x->op_slab, "sends and receives", sizeof(struct xfer_op),
                                     XFER_SHARES_MAX + XFER_OPS_PER_PEER * (x->o.peers_max + 1));
    if (st == BT_OK) {
        st = bt_fifo_create(2 * x->o.ctrl_bytes_max + CTRL_IN_MORE, &x->ctrl_in);
    }
    if (st == BT_OK) {
        st = xfer_stage_init(x, x->o.stage);
        x->o.stage = NULL; /* borrowed for the call only */
    }
    return st != BT_OK ? st : xfer_buckets_init(x);
}

static void memory_fini(struct bt_xfer *x)
{
    bt_spent_free(&x->spent);
    xfer_stage_fini(x);
    bt_slab_fini(&x->op_slab);
    bt_fifo_destroy(x->ctrl_in);
    bt_free(x->buckets);
}

enum bt_status bt_xfer_create(const struct bt_xfer_opts *opts, struct bt_xfer **out,
                              struct bt_err *err)
{
    struct bt_xfer *x = bt_calloc(1, sizeof(*x));
    if (x == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "transfer: out of memory");
    }
    STAILQ_INIT(&x->cmds);
    STAILQ_INIT(&x->events);
    TAILQ_INIT(&x->peers);
    TAILQ_INIT(&x->landings);
    x->seal.thread = "transfer";
    pthread_mutex_init(&x->cmd_mu, NULL);
    pthread_mutex_init(&x->ev_mu, NULL);
    pthread_mutex_init(&x->stats_mu, NULL);
    x->ops = opts->hub != NULL ? &xfer_loop_ops : &xfer_ucx_ops;

    enum bt_status st = options_fill(x, opts, err);
    if (st != BT_OK) {
        goto err_free;
    }
    st = memory_init(x);
    if (st != BT_OK) {
        (void)bt_err_set(err, st, "transfer: out of memory");
        goto err_memory;
    }
    x->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (x->wake_fd < 0) {
        st = bt_err_set(err, BT_ERR_IO, "transfer: eventfd: %s", strerror(errno));
        goto err_memory;
    }
    x->now_ns = x->o.manual ? 0 : bt_clock_ns();
    enter(x);
    st = x->ops->open(x, opts, err);
    if (st != BT_OK) {
        goto err_fd;
    }
    if (!x->o.manual && pthread_create(&x->thread, NULL, thread_main, x) != 0) {
        st = bt_err_set(err, BT_ERR_NOMEM, "transfer: cannot start a thread");
        goto err_wire;
    }
    *out = x;
    return BT_OK;
err_wire:
    x->ops->fini(x);
err_fd:
    close(x->wake_fd);
err_memory:
    memory_fini(x);
err_free:
    pthread_mutex_destroy(&x->stats_mu);
    pthread_mutex_destroy(&x->ev_mu);
    pthread_mutex_destroy(&x->cmd_mu);
    bt_free(x);
    return st;
}

static void free_landings(struct bt_xfer *x)
{
    struct xfer_landing *l;
    while ((l = TAILQ_FIRST(&x->landings)) != NULL) {
        TAILQ_REMOVE(&x->landings, l, link);
        if (l->landed->queued) {
            l->landed->keep = false; /* freed with the events */
            l->landed = NULL;
        }
        xfer_landing_free(x, l);
    }
}

void bt_xfer_destroy(struct bt_xfer *x)
{
    struct xfer_cmd *c;
    struct bt_xfer_event ev;
    if (x == NULL) {
        return;
    }
    atomic_store(&x->stop, true);
    if (x->o.manual) {
        drain(x);
    } else {
        xfer_wake(x);
        pthread_join(x->thread, NULL);
    }
    while ((c = xfer_command_take(x)) != NULL) {
        xfer_command_drop(x, c);
    }
    free_landings(x);
    while (bt_xfer_poll(x, &ev)) {
        bt_xfer_event_free(&ev);
    }
    memory_fini(x);
    close(x->wake_fd);
    pthread_mutex_destroy(&x->stats_mu);
    pthread_mutex_destroy(&x->ev_mu);
    pthread_mutex_destroy(&x->cmd_mu);
    bt_free(x);
}
