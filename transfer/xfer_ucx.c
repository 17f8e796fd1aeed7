/* The UCX wire: one gate, one listener and one or two contexts per `bt_xfer`; client-server endpoints with peer error
 * handling; every message is an active message. Owns all UCX objects and the rules learned about them (when an endpoint may be
 * touched, how a worker sleeps). Knows nothing of greetings, pages or leases.
 *
 * Connections share one worker, except over shared memory: there a worker's receive FIFO is written by all its
 * peers, and one that is killed between taking a slot and filling it blocks the FIFO for ever, for all. So each
 * connection has a worker of its own, which goes down with it.
 *
 * Nobody reaches UCX but by the gate (transfer/xfer_gate.h): D answers a prefill node's knock with the port of its
 * listener and expects it there by its instance; for some seconds both let each other's addresses through
 * (transfer/xfer_door.h).
 *
 * Rules kept here: an endpoint is closed only from the round (never inside a callback), always by force, and
 * nothing is posted on it after its error callback. One-sided puts are not used at all: over TCP a killed
 * initiator can abort the target inside UCX, and only the receiver may write its pages. */

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/assert.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "transfer/xfer_ucx_int.h"

#define PROGRESS_MAX 64
/* A full shared-memory FIFO makes the worker refuse to arm. So long we spin, then we nap. */
#define SPIN_MAX 200
#define NAP_MS   1
/* How often a busy thread looks at the gate. */
#define GATE_PERIOD_NS BT_NS_PER_MS

static enum bt_status status_from_ucs(ucs_status_t us)
{
    switch (us) {
    case UCS_OK:
        return BT_OK;
    case UCS_ERR_NO_MEMORY:
        return BT_ERR_NOMEM;
    default:
        return BT_ERR_PEER_LOST; /* on an endpoint, whatever it was, the connection is over */
    }
}

/* ---- receiving ---- */

static struct ucx_conn *conn_of(struct ucx *u, ucp_ep_h ep)
{
    uint64_t v;
    if (!bt_map_get(&u->by_ep, &ep, sizeof(ep), &v)) {
        return NULL;
    }
    return (struct ucx_conn *)(uintptr_t)v;
}

static void on_received(void *request, ucs_status_t us, size_t length, void *arg)
{
    struct xfer_op *op = arg;
    struct ucx_conn *c = op->peer->conn;
    enum bt_status st = status_from_ucs(us);
    if (st == BT_OK && length != op->bytes) {
        st = BT_ERR_PROTOCOL;
    }
    ucp_request_free(request);
    xfer_received(c->x, op, st);
}

/* One active message. By rendezvous, `data` is a descriptor that the receive consumes. */
ucs_status_t xfer_ucx_on_am(void *arg, const void *head, size_t head_bytes, void *data,
                            size_t bytes, const ucp_am_recv_param_t *param)
{
    struct bt_xfer *x = arg;
    struct ucx *u = x->wire;
    struct ucx_conn *c = NULL;
    struct xfer_op *op = NULL;
    bool rndv = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;

    if ((param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0) {
        c = conn_of(u, param->reply_ep);
    }
    if (c == NULL) {
        x->st.drop_malformed++;
        return UCS_OK;
    }
    if (xfer_frame(x, c->peer, head, head_bytes, rndv ? NULL : data, bytes, &op) == XFER_TAKEN) {
        return UCS_OK;
    }
    size_t got = 0;
    ucp_request_param_t rp = {
        .op_attr_mask =
            UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_RECV_INFO,
        .cb.recv_am = on_received,
        .user_data = op,
        .recv_info.length = &got,
    };
    uint8_t *dst = (uint8_t *)(uintptr_t)op->data; /* a receive's destination */
    if (op->direct) {
        xfer_ucx_memory_param(x, c->context, dst, &rp);
    }
    ucs_status_ptr_t r = ucp_am_recv_data_nbx(c->worker->handle, data, dst, op->bytes, &rp);
    if (r == NULL) {
        xfer_received(x, op, got == op->bytes ? BT_OK : BT_ERR_PROTOCOL);
    } else if (UCS_PTR_IS_ERR(r)) {
        xfer_received(x, op, status_from_ucs(UCS_PTR_STATUS(r)));
    }
    return UCS_OK;
}

/* ---- endpoints ---- */

static void on_ep_error(void *arg, ucp_ep_h ep, ucs_status_t us)
{
    struct ucx_conn *c = arg;
    (void)ep;
    bt_log_debug("xfer", "endpoint of %s: %s", c->peer != NULL ? c->peer->address : "?",
                 ucs_status_string(us));
    if (c->peer != NULL) {
        xfer_broken(c->x, c->peer, status_from_ucs(us));
    }
}

static void conn_free(struct ucx_conn *c)
{
    struct ucx *u = c->x->wire;
    if (c->worker != NULL && c->worker != c->context->shared) {
        xfer_ucx_worker_destroy(u, c->worker);
    }
    bt_free(c);
}

static struct ucx_conn *conn_alloc(struct bt_xfer *x, struct ucx_context *context)
{
    struct ucx_conn *c = bt_calloc(1, sizeof(*c));
    if (c != NULL) {
        c->x = x;
        c->context = context;
    }
    return c;
}

/* Makes the endpoint that params ask for and remembers it. False: logged; a connection request was answered. */
static bool conn_open(struct ucx_conn *c, ucp_ep_params_t *params)
{
    struct bt_xfer *x = c->x;
    struct ucx *u = x->wire;
    const char *why = NULL;
    bool request = (params->field_mask & UCP_EP_PARAM_FIELD_CONN_REQUEST) != 0;
    c->worker = c->context->own_workers ? xfer_ucx_worker_create(x, c->context->handle, &why)
                                        : c->context->shared;
    if (c->worker == NULL) {
        if (request) {
            ucp_listener_reject(u->listener, params->conn_request); /* ucp_ep_create takes it */
        }
        goto err;
    }
    params->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params->err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params->err_handler.cb = on_ep_error;
    params->err_handler.arg = c;
    ucs_status_t us = ucp_ep_create(c->worker->handle, params, &c->ep);
    if (us != UCS_OK) {
        c->ep = NULL;
        why = ucs_status_string(us);
        goto err;
    }
    /* Without a place in the map its messages would be dropped and the greeting would time out. */
    if (bt_map_put(&u->by_ep, &c->ep, sizeof(c->ep), (uint64_t)(uintptr_t)c) != BT_OK) {
        bt_log_warn("xfer", "out of memory for a connection");
    }
    return true;
err:
    bt_log_warn("xfer", "cannot make an endpoint: %s", why);
    return false;
}

/* ---- dialling: the gate, then UCX ---- */

/* The gate is where p->address says; UCX's port behind it comes with the answer. */
static enum bt_status ucx_dial(struct bt_xfer *x, struct xfer_peer *p)
{
    struct ucx *u = x->wire;
    struct sockaddr_storage a;
    struct xfer_knock k = {.instance = x->o.instance, .hello = xfer_greet_own(x, p)};
    uint32_t len;
    struct bt_err err;
    char why[128];
    enum bt_status st = xfer_addr_parse(p->address, false, &a, &len, &err);
    if (st != BT_OK) {
        bt_log_warn("xfer", "%s", err.msg);
        return st;
    }
    struct ucx_context *context = xfer_ucx_context(x, p->address, &err);
    if (context == NULL) {
        bt_log_warn("xfer", "%s", err.msg);
        return BT_ERR_PEER_LOST;
    }
    struct ucx_conn *c = conn_alloc(x, context);
    if (c == NULL) {
        return BT_ERR_NOMEM;
    }
    c->peer = p;
    p->direct = context->direct;
    k.n_ips = xfer_door_own_ips(k.ips, bt_xfer_address_is_loopback(p->address));
    st = xfer_gate_call(u->gate, p, &a, len, &k, why, sizeof(why));
    if (st != BT_OK) {
        bt_log_info("xfer", "cannot dial %s: %s", p->address, why);
        conn_free(c);
        return st;
    }
    p->conn = c;
    return BT_OK;
}

static bool let_in(struct bt_xfer *x, uint64_t instance, const struct sockaddr_storage *from,
                   const struct xfer_ip *ips, uint32_t n)
{
    struct ucx *u = x->wire;
    struct xfer_ip all[XFER_IPS_MAX + 1];
    memcpy(all, ips, n * sizeof(*ips));
    n += xfer_door_ip_of(from, &all[n]);
    return xfer_door_expect(&u->door, instance, all, n, x->now_ns + x->o.connect_timeout_ns);
}

void xfer_ucx_on_answered(void *arg, struct xfer_peer *p, const struct xfer_answer *a,
                          const char *why)
{
    struct bt_xfer *x = arg;
    struct sockaddr_storage to;
    uint32_t len;
    char text[200];
    if (p->state != PEER_DIALING) {
        return; /* given up meanwhile */
    }
    if (a == NULL) {
        snprintf(text, sizeof(text), "cannot reach %s: %s", p->address, why);
        xfer_peer_down(x, p, BT_ERR_PEER_LOST, text);
        return;
    }
    if (a->verdict != XFER_ENTER) {
        xfer_peer_down(x, p, a->verdict == XFER_NO_ROOM ? BT_ERR_BUSY : BT_ERR_PROTOCOL, a->text);
        return;
    }
    if (xfer_addr_parse(p->address, false, &to, &len, NULL) != BT_OK ||
        !let_in(x, p->expect, &to, a->ips, a->n_ips)) {
        xfer_peer_down(x, p, BT_ERR_BUSY, "too many connections begin at once here");
        return;
    }
    xfer_addr_set_port(&to, a->port);
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR,
        .flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER | UCP_EP_PARAMS_FLAGS_SEND_CLIENT_ID,
        .sockaddr = {.addr = (const struct sockaddr *)&to, .addrlen = len},
    };
    if (!conn_open(p->conn, &params)) {
        xfer_peer_down(x, p, BT_ERR_PEER_LOST, "cannot dial");
        return;
    }
    xfer_dialled(x, p);
}

/* ---- accepting: who was at the gate, and comes now ---- */

void xfer_ucx_admit(void *arg, const struct xfer_knock *k, const struct sockaddr_storage *from,
                    struct xfer_answer *a)
{
    struct bt_xfer *x = arg;
    struct ucx *u = x->wire;
    a->verdict = XFER_NO_ROOM;
    if (x->n_peers >= x->o.peers_max) {
        snprintf(a->text, sizeof(a->text), "%u peers are the limit", x->o.peers_max);
    } else if (!let_in(x, k->instance, from, k->ips, k->n_ips)) {
        snprintf(a->text, sizeof(a->text), "too many connections begin at once");
    } else {
        a->verdict = XFER_ENTER;
        a->port = u->port;
        a->n_ips = xfer_door_own_ips(a->ips, bt_xfer_address_is_loopback(x->address));
    }
}

static void ucx_up(struct bt_xfer *x, struct xfer_peer *p)
{
    struct ucx *u = x->wire;
    xfer_door_up(&u->door, p->instance, x->now_ns);
}

static void on_closed(void *request, ucs_status_t us, void *arg)
{
    struct ucx_conn *c = arg;
    (void)us; /* by force: the endpoint is gone whatever it says */
    if (request != NULL) {
        ucp_request_free(request);
    }
    if (c->peer != NULL) {
        xfer_closed(c->x, c->peer);
    } else {
        conn_free(c);
    }
}

static void ucx_close(struct bt_xfer *x, struct xfer_peer *p)
{
    struct ucx *u = x->wire;
    struct ucx_conn *c = p->conn;
    if (c->ep == NULL) {
        xfer_gate_hang_up(u->gate, p);
        xfer_closed(x, p);
        return;
    }
    bt_map_del(&u->by_ep, &c->ep, sizeof(c->ep));
    ucp_request_param_t rp = {
        .op_attr_mask =
            UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .flags = UCP_EP_CLOSE_FLAG_FORCE,
        .cb.send = on_closed,
        .user_data = c,
    };
    ucs_status_ptr_t r = ucp_ep_close_nbx(c->ep, &rp);
    if (r == NULL || UCS_PTR_IS_ERR(r)) {
        on_closed(NULL, UCS_OK, c);
    }
}

static void ucx_release(struct bt_xfer *x, struct xfer_peer *p)
{
    (void)x;
    conn_free(p->conn);
    p->conn = NULL;
}

/* Runs inside ucp_worker_progress: only notes the request. */
void xfer_ucx_on_request(ucp_conn_request_h handle, void *arg)
{
    struct bt_xfer *x = arg;
    struct ucx *u = x->wire;
    if (u->n_requests == XFER_UCX_REQUESTS_MAX || atomic_load(&x->stop)) {
        ucp_listener_reject(u->listener, handle);
        return;
    }
    struct ucx_request *r = &u->requests[u->n_requests++];
    ucp_conn_request_attr_t attr = {.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR |
                                                  UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ID};
    r->handle = handle;
    r->instance = 0;
    snprintf(r->from, sizeof(r->from), "?");
    if (ucp_conn_request_query(handle, &attr) == UCS_OK) {
        xfer_addr_format(&attr.client_address, r->from, sizeof(r->from));
        r->instance = attr.client_id;
    }
}

static void accept_request(struct bt_xfer *x, const struct ucx_request *r)
{
    struct ucx *u = x->wire;
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST,
        .conn_request = r->handle,
    };
    if (!xfer_door_arrived(&u->door, r->instance) || x->n_peers >= x->o.peers_max) {
        bt_log_warn("xfer", "connection of %016" PRIx64 " (%s) refused: it is not expected",
                    r->instance, r->from);
        x->st.gate_refused++;
        ucp_listener_reject(u->listener, r->handle);
        return;
    }
    struct ucx_conn *c = conn_alloc(x, u->listening);
    if (c == NULL) {
        ucp_listener_reject(u->listener, r->handle);
        return;
    }
    if (!conn_open(c, &params)) {
        conn_free(c);
        return;
    }
    c->peer = xfer_incoming(x, c, r->from);
    if (c->peer == NULL) {
        struct xfer_peer none = {.conn = c};
        ucx_close(x, &none);
        return;
    }
    c->peer->instance = r->instance; /* its greeting must say the same */
    c->peer->direct = c->context->direct;
}

/* ---- sending ---- */

static void on_sent(void *request, ucs_status_t us, void *arg)
{
    struct xfer_op *op = arg;
    struct ucx_conn *c = op->peer->conn;
    ucp_request_free(request);
    xfer_sent(c->x, op, status_from_ucs(us));
}

static void ucx_send(struct bt_xfer *x, struct xfer_peer *p, struct xfer_op *op)
{
    struct ucx_conn *c = p->conn;
    bool rndv = op->direct || (p->want_rndv && (op->push != NULL || op->is_test));
    ucp_request_param_t rp = {
        .op_attr_mask =
            UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .flags = UCP_AM_SEND_FLAG_REPLY | (rndv ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER),
        .cb.send = on_sent,
        .user_data = op,
    };
    if (op->direct) {
        xfer_ucx_memory_param(x, c->context, op->data, &rp);
    }
    ucs_status_ptr_t r =
        ucp_am_send_nbx(c->ep, XFER_UCX_AM_ID, op->wire, XFER_HEAD_BYTES, op->data, op->bytes, &rp);
    if (r == NULL) {
        xfer_sent(x, op, BT_OK);
    } else if (UCS_PTR_IS_ERR(r)) {
        xfer_sent(x, op, status_from_ucs(UCS_PTR_STATUS(r)));
    }
}

/* ---- progress and sleep ---- */

/* Who comes, at the gate and behind it. Making a connection is no request: here the heap may be called. */
static bool connections_step(struct bt_xfer *x)
{
    struct ucx *u = x->wire;
    struct bt_seal *was = bt_alloc_unseal();
    bool did = u->n_requests > 0;
    for (unsigned i = 0; i < u->n_requests; i++) {
        accept_request(x, &u->requests[i]);
    }
    u->n_requests = 0;
    /* A system call: also a thread that never sleeps makes it now and then only. */
    if (u->gate_ready || x->now_ns - u->gate_ns >= GATE_PERIOD_NS) {
        u->gate_ready = false;
        u->gate_ns = x->now_ns;
        did = xfer_gate_step(u->gate) || did;
        did = xfer_door_step(&u->door, x->now_ns) || did;
    }
    bt_alloc_reseal(was);
    return did;
}

static bool ucx_progress(struct bt_xfer *x)
{
    struct ucx *u = x->wire;
    struct ucx_worker *w;
    bool did = false;
    TAILQ_FOREACH(w, &u->workers, link)
    {
        for (unsigned i = 0; i < PROGRESS_MAX && ucp_worker_progress(w->handle) != 0; i++) {
            did = true;
        }
    }
    did = connections_step(x) || did;
    if (did) {
        u->n_spins = 0;
    }
    return did;
}

static void drain_wake(struct bt_xfer *x)
{
    uint64_t v;
    ssize_t n = read(x->wake_fd, &v, sizeof(v));
    (void)n; /* EAGAIN: nothing to drain */
}

static void ucx_wait(struct bt_xfer *x, uint64_t timeout_ns)
{
    struct ucx *u = x->wire;
    struct ucx_worker *w;
    nfds_t n = 2;
    uint64_t gate = xfer_gate_deadline(u->gate), door = xfer_door_deadline(&u->door);
    gate = gate < door ? gate : door;
    gate = gate > x->now_ns ? gate - x->now_ns : 0;
    timeout_ns = gate < timeout_ns ? gate : timeout_ns;
    uint64_t ms = timeout_ns / BT_NS_PER_MS + (timeout_ns % BT_NS_PER_MS != 0);
    if (ms > 60000) {
        ms = 60000;
    }
    u->pfds[0] = (struct pollfd){.fd = x->wake_fd, .events = POLLIN};
    u->pfds[1] = (struct pollfd){.fd = xfer_gate_fd(u->gate), .events = POLLIN};
    TAILQ_FOREACH(w, &u->workers, link)
    {
        if (ucp_worker_arm(w->handle) != UCS_OK) {
            if (++u->n_spins < SPIN_MAX) {
                return; /* events pending: the caller goes round */
            }
            ms = ms < NAP_MS ? ms : NAP_MS;
        } else {
            u->pfds[n++] = (struct pollfd){.fd = w->efd, .events = POLLIN};
        }
    }
    if (poll(u->pfds, n, (int)ms) > 0) {
        u->gate_ready = u->pfds[1].revents != 0;
        if (u->pfds[0].revents != 0) {
            drain_wake(x);
        }
    }
}

const struct xfer_ops xfer_ucx_ops = {
    .name = "ucx",
    .open = xfer_ucx_open,
    .fini = xfer_ucx_fini,
    .dial = ucx_dial,
    .send = ucx_send,
    .close = ucx_close,
    .release = ucx_release,
    .progress = ucx_progress,
    .wait = ucx_wait,
    .describe = xfer_ucx_describe,
    .up = ucx_up,
};
