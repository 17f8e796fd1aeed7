/* The UCX wire: one listener and one or two contexts per `bt_xfer`; client-server endpoints with peer error
 * handling; every message is an active message. Owns all UCX objects and the rules learned about them (when an endpoint may be
 * touched, how a worker sleeps). Knows nothing of greetings, pages or leases.
 *
 * Connections share one worker, except over shared memory: there a worker's receive FIFO is written by all its
 * peers, and one that is killed between taking a slot and filling it blocks the FIFO for ever, for all. So each
 * connection has a worker of its own, which goes down with it.
 *
 * Rules kept here: an endpoint is closed only from the round (never inside a callback), always by force, and
 * nothing is posted on it after its error callback. One-sided puts are not used at all: over TCP a killed
 * initiator can abort the target inside UCX, and only the receiver may write its pages. */

#include <errno.h>
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

/* Makes the endpoint that params ask for and remembers it. NULL: logged. */
static struct ucx_conn *conn_new(struct bt_xfer *x, struct ucx_context *context,
                                 ucp_ep_params_t *params)
{
    struct ucx *u = x->wire;
    const char *why = "out of memory";
    bool request = (params->field_mask & UCP_EP_PARAM_FIELD_CONN_REQUEST) != 0; /* to be answered */
    struct ucx_conn *c = bt_calloc(1, sizeof(*c));
    if (c == NULL) {
        goto err;
    }
    c->x = x;
    c->context = context;
    c->worker =
        context->own_workers ? xfer_ucx_worker_create(x, context->handle, &why) : context->shared;
    if (c->worker == NULL) {
        if (params->field_mask & UCP_EP_PARAM_FIELD_CONN_REQUEST) {
            ucp_listener_reject(u->listener,
                                params->conn_request); /* ucp_ep_create would take it */
        }
        goto err_conn;
    }
    params->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params->err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params->err_handler.cb = on_ep_error;
    params->err_handler.arg = c;
    ucs_status_t us = ucp_ep_create(c->worker->handle, params, &c->ep);
    request = false; /* taken, even by a failure */
    if (us != UCS_OK) {
        why = ucs_status_string(us);
        goto err_conn;
    }
    /* Without a place in the map its messages would be dropped and the greeting would time out. */
    if (bt_map_put(&u->by_ep, &c->ep, sizeof(c->ep), (uint64_t)(uintptr_t)c) != BT_OK) {
        bt_log_warn("xfer", "out of memory for a connection");
    }
    return c;
err_conn:
    conn_free(c);
err:
    if (request) {
        ucp_listener_reject(u->listener, params->conn_request);
    }
    bt_log_warn("xfer", "cannot make an endpoint: %s", why);
    return NULL;
}

static enum bt_status ucx_dial(struct bt_xfer *x, struct xfer_peer *p)
{
    struct sockaddr_storage a;
    uint32_t len;
    struct bt_err err;
    enum bt_status st = xfer_addr_parse(p->address, false, &a, &len, &err);
    if (st != BT_OK) {
        bt_log_warn("xfer", "%s", err.msg);
        return st;
    }
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR,
        .flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER,
        .sockaddr = {.addr = (const struct sockaddr *)&a, .addrlen = len},
    };
    struct ucx_context *context = xfer_ucx_context(x, p->address, &err);
    if (context == NULL) {
        bt_log_warn("xfer", "%s", err.msg);
        return BT_ERR_PEER_LOST;
    }
    struct ucx_conn *c = conn_new(x, context, &params);
    if (c == NULL) {
        return BT_ERR_PEER_LOST;
    }
    c->peer = p;
    p->conn = c;
    return BT_OK;
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
    ucp_conn_request_attr_t attr = {.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR};
    r->handle = handle;
    snprintf(r->from, sizeof(r->from), "?");
    if (ucp_conn_request_query(handle, &attr) == UCS_OK) {
        xfer_addr_format(&attr.client_address, r->from, sizeof(r->from));
    }
}

static void accept_request(struct bt_xfer *x, const struct ucx_request *r)
{
    struct ucx *u = x->wire;
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST,
        .conn_request = r->handle,
    };
    if (x->n_peers >= x->o.peers_max) {
        bt_log_warn("xfer", "connection from %s refused: %u peers are the limit", r->from,
                    x->o.peers_max);
        ucp_listener_reject(u->listener, r->handle);
        return;
    }
    struct ucx_conn *c = conn_new(x, u->listening, &params);
    if (c == NULL) {
        return;
    }
    c->peer = xfer_incoming(x, c, r->from);
    if (c->peer == NULL) {
        struct xfer_peer none = {.conn = c};
        ucx_close(x, &none);
    }
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
    bool rndv = p->want_rndv && (op->push != NULL || op->is_test);
    ucp_request_param_t rp = {
        .op_attr_mask =
            UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .flags = UCP_AM_SEND_FLAG_REPLY | (rndv ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER),
        .cb.send = on_sent,
        .user_data = op,
    };
    ucs_status_ptr_t r =
        ucp_am_send_nbx(c->ep, XFER_UCX_AM_ID, op->wire, XFER_HEAD_BYTES, op->data, op->bytes, &rp);
    if (r == NULL) {
        xfer_sent(x, op, BT_OK);
    } else if (UCS_PTR_IS_ERR(r)) {
        xfer_sent(x, op, status_from_ucs(UCS_PTR_STATUS(r)));
    }
}

/* ---- progress and sleep ---- */

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
    for (unsigned i = 0; i < u->n_requests; i++) {
        accept_request(x, &u->requests[i]);
        did = true;
    }
    u->n_requests = 0;
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
    uint64_t ms = timeout_ns / BT_NS_PER_MS + (timeout_ns % BT_NS_PER_MS != 0);
    nfds_t n = 1;
    if (ms > 60000) {
        ms = 60000;
    }
    u->pfds[0] = (struct pollfd){.fd = x->wake_fd, .events = POLLIN};
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
    if (poll(u->pfds, n, (int)ms) > 0 && u->pfds[0].revents != 0) {
        drain_wake(x);
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
};
