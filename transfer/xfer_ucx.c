/* The UCX wire: one listener and one or two contexts per `bt_xfer`; client-server endpoints with peer error handling; every
 * message is an active message. Owns all UCX objects and the rules learned about them (when an endpoint may be
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
#include <ucp/api/ucp.h>
#include <ucs/debug/log_def.h>
#include "base/assert.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "transfer/xfer_int.h"

#define AM_ID        0
#define PROGRESS_MAX 64
#define REQUESTS_MAX 64 /* connection requests waiting; more are rejected */
/* A full shared-memory FIFO makes the worker refuse to arm. So long we spin, then we nap. */
#define SPIN_MAX 200
#define NAP_MS   1

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
};
enum { CONTEXT_NET, CONTEXT_LOCAL, N_CONTEXTS };

struct ucx_conn {
    struct bt_xfer *x;
    struct xfer_peer *peer;
    struct ucx_context *context;
    struct ucx_worker *worker;
    ucp_ep_h ep;
};

struct ucx_request {
    ucp_conn_request_h handle;
    char from[80];
};

struct ucx {
    struct ucx_context contexts[N_CONTEXTS];
    struct ucx_context *listening;
    struct ucx_workers workers; /* all */
    ucp_listener_h listener;
    struct pollfd *pfds; /* of wait */
    struct bt_map by_ep; /* ucp_ep_h to struct ucx_conn * */
    struct ucx_request requests[REQUESTS_MAX];
    unsigned n_requests;
    unsigned n_spins; /* refusals to arm since the last progress */
};

/* ---- UCX's own log, through ours ---- */

static ucs_log_func_rc_t on_ucx_log(const char *file, unsigned line, const char *function,
                                    ucs_log_level_t level, const ucs_log_component_config_t *comp,
                                    const char *format, va_list ap)
{
    char text[512];
    (void)function;
    (void)comp;
    if (level > UCS_LOG_LEVEL_INFO) {
        return UCS_LOG_FUNC_RC_CONTINUE; /* asked for by UCX_LOG_LEVEL: UCX prints it itself */
    }
    vsnprintf(text, sizeof(text), format, ap);
    const char *base = strrchr(file, '/');
    /* What UCX calls an error is mostly a peer that went away, and reported to us by status as well. */
    enum bt_log_level to = level == UCS_LOG_LEVEL_FATAL ? BT_LOG_ERROR : BT_LOG_DEBUG;
    BT_LOG(to, "ucx", NULL, "%s:%u %s", base != NULL ? base + 1 : file, line, text);
    return UCS_LOG_FUNC_RC_STOP;
}

static enum bt_status status_from_ucs(ucs_status_t us)
{
    switch (us) {
    case UCS_OK:
        return BT_OK;
    case UCS_ERR_NO_MEMORY:
        return BT_ERR_NOMEM;
    case UCS_ERR_CANCELED:
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_ENDPOINT_TIMEOUT:
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_REJECTED:
        return BT_ERR_PEER_LOST;
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
static ucs_status_t on_am(void *arg, const void *head, size_t head_bytes, void *data, size_t bytes,
                          const ucp_am_recv_param_t *param)
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
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_RECV_INFO,
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

/* ---- workers ---- */

static void worker_destroy(struct ucx *u, struct ucx_worker *w)
{
    TAILQ_REMOVE(&u->workers, w, link);
    ucp_worker_destroy(w->handle);
    bt_free(w);
}

/* NULL: *why says it. */
static struct ucx_worker *worker_create(struct bt_xfer *x, ucp_context_h context, const char **why)
{
    struct ucx *u = x->wire;
    struct ucx_worker *w = bt_calloc(1, sizeof(*w));
    ucp_worker_params_t wp = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
    };
    ucp_am_handler_param_t ap = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = AM_ID,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = on_am,
        .arg = x,
    };
    if (w == NULL) {
        *why = "out of memory";
        return NULL;
    }
    ucs_status_t us = ucp_worker_create(context, &wp, &w->handle);
    if (us != UCS_OK) {
        *why = ucs_status_string(us);
        bt_free(w);
        return NULL;
    }
    TAILQ_INSERT_TAIL(&u->workers, w, link);
    us = ucp_worker_set_am_recv_handler(w->handle, &ap);
    if (us == UCS_OK) {
        us = ucp_worker_get_efd(w->handle, &w->efd);
    }
    if (us != UCS_OK) {
        *why = ucs_status_string(us);
        worker_destroy(u, w);
        return NULL;
    }
    return w;
}

/* ---- contexts ---- */

static enum bt_status fail(struct bt_err *err, enum bt_status st, const char *what, ucs_status_t us)
{
    return bt_err_set(err, st, "transfer: %s: %s", what, ucs_status_string(us));
}

/* UCX_TLS for our names. The connection manager wants the TCP device in the list even if no lane uses it. Of the
 * shared-memory transports one is enough, and each costs a worker megabytes. */
static const char *tls_list(const char *tls, bool local)
{
    if (strcmp(tls, "shm") == 0 || (strcmp(tls, "auto") == 0 && local)) {
        return "sysv,tcp";
    }
    return strcmp(tls, "auto") == 0 ? "^posix,sysv,cma" : tls;
}

static bool has_shared_memory(const char *list)
{
    return list[0] != '^' && (strstr(list, "shm") != NULL || strstr(list, "sysv") != NULL ||
                              strstr(list, "posix") != NULL || strcmp(list, "all") == 0);
}

static void config_try(ucp_config_t *config, const char *const settings[][2], size_t n)
{
    for (size_t i = 0; i < n; i++) {
        ucs_status_t us = ucp_config_modify(config, settings[i][0], settings[i][1]);
        if (us != UCS_OK) {
            bt_log_debug("xfer", "UCX setting %s: %s", settings[i][0], ucs_status_string(us));
        }
    }
}

static enum bt_status context_init(struct ucx_context *c, const char *list, struct bt_err *err)
{
    /* Releases differ in whether a transport's key carries the transport's name, and may accept a wrong one without
     * a word; so both are set, and refusals ignored. Keys of shared memory only where it is in use. */
    static const char *const settings[][2] = {
        { "TX_SEG_SIZE", "256k" },  /* TCP: 8k halves the rate */
        { "TCP_TX_SEG_SIZE", "256k" },
        { "RX_SEG_SIZE", "256k" },
        { "TCP_RX_SEG_SIZE", "256k" },
    };
    static const char *const shm_settings[][2] = {
        { "MM_ERROR_HANDLING", "y" }, /* without it no shared memory with peer error handling */
        { "SYSV_ERROR_HANDLING", "y" },
        { "MM_SEG_SIZE", "32k" },     /* with the default 8k and 64 slots a sender waits all the time */
        { "SYSV_SEG_SIZE", "32k" },
        { "MM_FIFO_SIZE", "256" },
        { "SYSV_FIFO_SIZE", "256" },
    };
    ucp_config_t *config;
    ucs_status_t us = ucp_config_read(NULL, NULL, &config);
    if (us != UCS_OK) {
        return fail(err, BT_ERR_DEVICE, "ucp_config_read", us);
    }
    config_try(config, settings, sizeof(settings) / sizeof(settings[0]));
    c->own_workers = has_shared_memory(list);
    if (c->own_workers) {
        config_try(config, shm_settings, sizeof(shm_settings) / sizeof(shm_settings[0]));
    }
    us = ucp_config_modify(config, "TLS", list);
    if (us == UCS_OK) {
        ucp_params_t params = {
            .field_mask = UCP_PARAM_FIELD_FEATURES,
            .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
        };
        us = ucp_init(&params, config, &c->handle);
    }
    ucp_config_release(config);
    return us == UCS_OK ? BT_OK : bt_err_set(err, BT_ERR_DEVICE, "transfer: no transport of \"%s\": %s", list,
                                              ucs_status_string(us));
}

/* The context for an address: with automatic choice, shared memory for a loopback address, for which the other end
 * is on this machine beyond doubt. NULL: err has it. */
static struct ucx_context *context_for(struct bt_xfer *x, const char *address, struct bt_err *err)
{
    struct ucx *u = x->wire;
    const char *why;
    bool local = strcmp(x->tls, "auto") == 0 && bt_xfer_address_is_loopback(address);
    struct ucx_context *c = &u->contexts[local ? CONTEXT_LOCAL : CONTEXT_NET];
    if (c->handle != NULL) {
        return c;
    }
    if (context_init(c, tls_list(x->tls, local), err) != BT_OK) {
        c->handle = NULL;
        return NULL;
    }
    c->shared = worker_create(x, c->handle, &why);
    if (c->shared == NULL) {
        bt_err_set(err, BT_ERR_DEVICE, "transfer: UCX worker: %s", why);
        ucp_cleanup(c->handle);
        c->handle = NULL;
        return NULL;
    }
    return c;
}

/* ---- endpoints ---- */

static void on_ep_error(void *arg, ucp_ep_h ep, ucs_status_t us)
{
    struct ucx_conn *c = arg;
    (void)ep;
    bt_log_debug("xfer", "endpoint of %s: %s", c->peer != NULL ? c->peer->address : "?", ucs_status_string(us));
    if (c->peer != NULL) {
        xfer_broken(c->x, c->peer, status_from_ucs(us));
    }
}

static void conn_free(struct ucx_conn *c)
{
    struct ucx *u = c->x->wire;
    if (c->worker != NULL && c->worker != c->context->shared) {
        worker_destroy(u, c->worker);
    }
    bt_free(c);
}

/* Makes the endpoint that params ask for and remembers it. NULL: logged. */
static struct ucx_conn *conn_new(struct bt_xfer *x, struct ucx_context *context, ucp_ep_params_t *params)
{
    struct ucx *u = x->wire;
    const char *why = "out of memory";
    struct ucx_conn *c = bt_calloc(1, sizeof(*c));
    if (c == NULL) {
        goto err;
    }
    c->x = x;
    c->context = context;
    c->worker = context->own_workers ? worker_create(x, context->handle, &why) : context->shared;
    if (c->worker == NULL) {
        goto err_conn;
    }
    params->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params->err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params->err_handler.cb = on_ep_error;
    params->err_handler.arg = c;
    ucs_status_t us = ucp_ep_create(c->worker->handle, params, &c->ep);
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
        .sockaddr = { .addr = (const struct sockaddr *)&a, .addrlen = len },
    };
    struct ucx_context *context = context_for(x, p->address, &err);
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
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
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
static void on_conn_request(ucp_conn_request_h handle, void *arg)
{
    struct bt_xfer *x = arg;
    struct ucx *u = x->wire;
    if (u->n_requests == REQUESTS_MAX || atomic_load(&x->stop)) {
        ucp_listener_reject(u->listener, handle);
        return;
    }
    struct ucx_request *r = &u->requests[u->n_requests++];
    ucp_conn_request_attr_t attr = { .field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR };
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
        bt_log_warn("xfer", "connection from %s refused: %u peers are the limit", r->from, x->o.peers_max);
        ucp_listener_reject(u->listener, r->handle);
        return;
    }
    struct ucx_conn *c = conn_new(x, u->listening, &params);
    if (c == NULL) {
        return;
    }
    c->peer = xfer_incoming(x, c, r->from);
    if (c->peer == NULL) {
        struct xfer_peer none = { .conn = c };
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
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .flags = UCP_AM_SEND_FLAG_REPLY | (rndv ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER),
        .cb.send = on_sent,
        .user_data = op,
    };
    ucs_status_ptr_t r = ucp_am_send_nbx(c->ep, AM_ID, op->wire, XFER_HEAD_BYTES, op->data, op->bytes, &rp);
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
    u->pfds[0] = (struct pollfd){ .fd = x->wake_fd, .events = POLLIN };
    TAILQ_FOREACH(w, &u->workers, link)
    {
        if (ucp_worker_arm(w->handle) != UCS_OK) {
            if (++u->n_spins < SPIN_MAX) {
                return; /* events pending: the caller goes round */
            }
            ms = ms < NAP_MS ? ms : NAP_MS;
        } else {
            u->pfds[n++] = (struct pollfd){ .fd = w->efd, .events = POLLIN };
        }
    }
    if (poll(u->pfds, n, (int)ms) > 0 && u->pfds[0].revents != 0) {
        drain_wake(x);
    }
}

/* ---- which transport ---- */

/* Adds "tcp/lo" once to a '+'-joined list. */
static void add_transport(char *text, size_t cap, const char *name, size_t n)
{
    char one[64];
    snprintf(one, sizeof(one), "%.*s", (int)(n < sizeof(one) - 1 ? n : sizeof(one) - 1), name);
    size_t len = strlen(text);
    const char *at = strstr(text, one);
    if (at != NULL && (at[strlen(one)] == 0 || at[strlen(one)] == '+')) {
        return;
    }
    snprintf(text + len, cap - len, "%s%s", len > 0 ? "+" : "", one);
}

#if UCP_API_VERSION >= UCP_VERSION(1, 14)
static void query_transports(ucp_ep_h ep, char *text, size_t cap)
{
    ucp_transport_entry_t entries[16];
    ucp_ep_attr_t attr = {
        .field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS,
        .transports = { .entries = entries, .num_entries = 16, .entry_size = sizeof(entries[0]) },
    };
    if (ucp_ep_query(ep, &attr) != UCS_OK) {
        return;
    }
    for (unsigned i = 0; i < attr.transports.num_entries; i++) {
        char one[64];
        if (entries[i].device_name[0] == 0) {
            continue; /* the connection manager's own lane */
        }
        snprintf(one, sizeof(one), "%s/%s", entries[i].transport_name, entries[i].device_name);
        add_transport(text, cap, one, strlen(one));
    }
}
#else
/* Before 1.14 only the printed description tells: lines "#  lane[0]:  3:posix/memory.0 md[3] ...". */
static void query_transports(ucp_ep_h ep, char *text, size_t cap)
{
    char *info = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&info, &n);
    if (f == NULL) {
        return;
    }
    ucp_ep_print_info(ep, f);
    fclose(f);
    for (char *at = info; at != NULL && (at = strstr(at, "lane[")) != NULL; at++) {
        char *name = strstr(at, "]:");
        name = name != NULL ? strchr(name + 2, ':') : NULL;
        if (name != NULL) {
            add_transport(text, cap, name + 1, strcspn(name + 1, ". \n"));
        }
    }
    free(info); /* check: allow free, memory of open_memstream */
}
#endif

/* Whether a transport reads remote memory by itself, so that rendezvous saves copies. TCP and shared memory do
 * not: there UCX would emulate a put, and a killed peer can take the survivor down with it. */
static bool is_rdma(const char *name)
{
    static const char *const prefixes[] = { "rc", "dc", "ud", "gga", "cuda_ipc", "rocm_ipc", "gdr" };
    for (size_t i = 0; i < sizeof(prefixes) / sizeof(prefixes[0]); i++) {
        if (strncmp(name, prefixes[i], strlen(prefixes[i])) == 0) {
            return true;
        }
    }
    return false;
}

static void ucx_describe(struct bt_xfer *x, struct xfer_peer *p, char *text, size_t cap, bool *rndv)
{
    struct ucx_conn *c = p->conn;
    (void)x;
    text[0] = 0;
    query_transports(c->ep, text, cap);
    *rndv = false;
    for (const char *at = text; at != NULL && *at != 0; at = strchr(at, '+')) {
        at += *at == '+';
        *rndv = *rndv || is_rdma(at);
    }
    if (text[0] == 0) {
        snprintf(text, cap, "unknown");
    }
}

/* ---- life ---- */

static enum bt_status listener_open(struct bt_xfer *x, struct ucx *u, const char *address, struct bt_err *err)
{
    struct sockaddr_storage a;
    uint32_t len;
    enum bt_status st = xfer_addr_parse(address, true, &a, &len, err);
    if (st != BT_OK) {
        return st;
    }
    xfer_addr_format(&a, x->address, sizeof(x->address));
    u->listening = context_for(x, x->address, err);
    if (u->listening == NULL) {
        return BT_ERR_DEVICE;
    }
    ucp_listener_params_t lp = {
        .field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
        .sockaddr = { .addr = (const struct sockaddr *)&a, .addrlen = len },
        .conn_handler = { .cb = on_conn_request, .arg = x },
    };
    ucs_status_t us = ucp_listener_create(u->listening->shared->handle, &lp, &u->listener);
    if (us != UCS_OK) {
        return bt_err_set(err, BT_ERR_IO, "transfer: cannot listen on %s: %s", address, ucs_status_string(us));
    }
    ucp_listener_attr_t attr = { .field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR };
    us = ucp_listener_query(u->listener, &attr);
    if (us != UCS_OK) {
        return fail(err, BT_ERR_DEVICE, "ucp_listener_query", us);
    }
    xfer_addr_format(&attr.sockaddr, x->address, sizeof(x->address));
    return BT_OK;
}

/* Takes down whatever is up: also the way out of a failed open. */
static void ucx_fini(struct bt_xfer *x)
{
    struct ucx *u = x->wire;
    for (unsigned i = 0; i < u->n_requests; i++) {
        ucp_listener_reject(u->listener, u->requests[i].handle);
    }
    if (u->listener != NULL) {
        ucp_listener_destroy(u->listener);
    }
    while (!TAILQ_EMPTY(&u->workers)) {
        worker_destroy(u, TAILQ_LAST(&u->workers, ucx_workers));
    }
    for (size_t i = 0; i < N_CONTEXTS; i++) {
        if (u->contexts[i].handle != NULL) {
            ucp_cleanup(u->contexts[i].handle);
        }
    }
    bt_map_fini(&u->by_ep);
    bt_free(u->pfds);
    ucs_log_pop_handler();
    bt_free(u);
}

static enum bt_status ucx_open(struct bt_xfer *x, const struct bt_xfer_opts *o, struct bt_err *err)
{
    struct ucx *u = bt_calloc(1, sizeof(*u));
    if (u == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "transfer: out of memory");
    }
    ucs_log_push_handler(on_ucx_log); /* a stack, process-wide: each bt_xfer has its place in it */
    bt_map_init(&u->by_ep, true);
    TAILQ_INIT(&u->workers);
    x->wire = u;
    enum bt_status st = BT_OK;
    /* The wake fd, the shared workers, one for each peer. */
    u->pfds = bt_alloc((1 + N_CONTEXTS + (size_t)x->o.peers_max) * sizeof(*u->pfds));
    if (u->pfds == NULL) {
        st = bt_err_set(err, BT_ERR_NOMEM, "transfer: out of memory");
    } else if (o->listen != NULL) {
        st = listener_open(x, u, o->listen, err);
    } else if (strcmp(x->tls, "auto") != 0 && context_for(x, "", err) == NULL) {
        st = BT_ERR_DEVICE; /* a wrong list is told now, not at the first dial */
    }
    if (st != BT_OK) {
        ucx_fini(x);
    }
    return st;
}

const struct xfer_ops xfer_ucx_ops = {
    .name = "ucx",
    .open = ucx_open,
    .fini = ucx_fini,
    .dial = ucx_dial,
    .send = ucx_send,
    .close = ucx_close,
    .release = ucx_release,
    .progress = ucx_progress,
    .wait = ucx_wait,
    .describe = ucx_describe,
};
