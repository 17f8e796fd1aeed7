/* Setting UCX up and taking it down: contexts and their settings, workers, the gate and the listener, UCX's log, and the names of
 * the transports it chose. Owns what was measured about settings; moves no message. */

#include <ifaddrs.h>
#include <linux/if.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <ucs/debug/log_def.h>
#include "base/log.h"
#include "base/mem.h"
#include "transfer/xfer_ucx_int.h"

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

/* ---- workers ---- */

void xfer_ucx_worker_destroy(struct ucx *u, struct ucx_worker *w)
{
    TAILQ_REMOVE(&u->workers, w, link);
    u->n_workers--;
    xfer_door_forget(&u->door, w);
    ucp_worker_destroy(w->handle);
    bt_free(w);
}

/* NULL: *why says it. */
struct ucx_worker *xfer_ucx_worker_create(struct bt_xfer *x, ucp_context_h context,
                                          const char **why)
{
    struct ucx *u = x->wire;
    struct ucx_worker *w = bt_calloc(1, sizeof(*w));
    ucp_worker_params_t wp = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_CLIENT_ID,
        /* One thread at a time, but not the one that creates it: builds of UCX with assertions on
         * (Debian 13) abort when SINGLE's worker is progressed by another. */
        .thread_mode = UCS_THREAD_MODE_SERIALIZED,
        .client_id = x->o.instance,
    };
    ucp_am_handler_param_t ap = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = XFER_UCX_AM_ID,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = xfer_ucx_on_am,
        .arg = x,
    };
    if (w == NULL) {
        *why = "out of memory";
        return NULL;
    }
    if (x->o.port_max != 0 && u->n_workers >= (unsigned)(x->o.port_max - x->o.port_min + 1) / 4) {
        /* With none left UCX would look for a free one for ever. */
        *why = "the range of ports is too small for so many connections";
        bt_free(w);
        return NULL;
    }
    xfer_door_begin(&u->door);
    ucs_status_t us = ucp_worker_create(context, &wp, &w->handle);
    xfer_door_end(&u->door, w);
    if (us != UCS_OK) {
        xfer_door_forget(&u->door, w);
        *why = ucs_status_string(us);
        bt_free(w);
        return NULL;
    }
    TAILQ_INSERT_TAIL(&u->workers, w, link);
    u->n_workers++;
    us = ucp_worker_set_am_recv_handler(w->handle, &ap);
    if (us == UCS_OK) {
        us = ucp_worker_get_efd(w->handle, &w->efd);
    }
    if (us != UCS_OK) {
        *why = ucs_status_string(us);
        xfer_ucx_worker_destroy(u, w);
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
static const char *tls_list(const struct bt_xfer *x, bool local)
{
    const char *tls = x->tls;
    if (strcmp(tls, "shm") == 0 || (strcmp(tls, "auto") == 0 && local)) {
        return x->direct && xfer_stage_is_on(x) ? "sysv,tcp,cuda_copy,cuda_ipc" : "sysv,tcp";
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

/* The device of 127.0.0.1, so that what stays on this machine is not heard on other addresses. */
static bool loopback_device(char name[IFNAMSIZ])
{
    struct ifaddrs *all = NULL;
    bool found = false;
    if (getifaddrs(&all) != 0) {
        return false;
    }
    for (const struct ifaddrs *i = all; i != NULL && !found; i = i->ifa_next) {
        found = i->ifa_addr != NULL && i->ifa_addr->sa_family == AF_INET &&
                (i->ifa_flags & IFF_LOOPBACK) != 0 && (i->ifa_flags & IFF_UP) != 0;
        if (found) {
            snprintf(name, IFNAMSIZ, "%s", i->ifa_name);
        }
    }
    freeifaddrs(all);
    return found;
}

static void config_ports(ucp_config_t *config, const struct bt_xfer_opts *o)
{
    char range[16];
    const char *const settings[][2] = {{"PORT_RANGE", range}, {"TCP_PORT_RANGE", range}};
    snprintf(range, sizeof(range), "%u-%u", o->port_min, o->port_max);
    if (o->port_max != 0) {
        config_try(config, settings, 2);
    }
}

struct choice {
    const char *list; /* UCX_TLS */
    bool v6, local;
};

static enum bt_status context_init(struct bt_xfer *x, struct ucx_context *c,
                                   const struct choice *ch, struct bt_err *err)
{
    /* Releases differ in whether a transport's key carries the transport's name, and may accept a wrong one without
     * a word; so both are set, and refusals ignored. Keys of shared memory only where it is in use. */
    static const char *const settings[][2] = {
        {"TX_SEG_SIZE", "256k"}, /* TCP: 8k halves the rate */
        {"TCP_TX_SEG_SIZE", "256k"},
        {"RX_SEG_SIZE", "256k"},
        {"TCP_RX_SEG_SIZE", "256k"},
    };
    static const char
        *const
            shm_settings[][2] =
                {
                    {"MM_ERROR_HANDLING", "y"}, /* without it no shared memory with peer error handling */
                    {"SYSV_ERROR_HANDLING", "y"},
                    {"MM_SEG_SIZE", "32k"}, /* with the default 8k and 64 slots a sender waits all the time */
                    {"SYSV_SEG_SIZE", "32k"},
                    {"MM_FIFO_SIZE", "256"},
                    {"SYSV_FIFO_SIZE", "256"},
                };
    /* A device has one address of one family; that of the other end must be of the same. */
    static const char *const v6_settings[][2] = {
        {"AF_PRIO", "inet6,inet"},
        {"TCP_AF_PRIO", "inet6,inet"},
    };
    /* The receiver reads: a put of a peer that wakes late would find a page that is another's by now. */
    static const char *const direct_settings[][2] = {{"RNDV_SCHEME", "get_zcopy"}};
    char device[IFNAMSIZ];
    const char *const local_settings[][2] = {{"NET_DEVICES", device}};
    const char *list = ch->list;
    ucp_config_t *config;
    ucs_status_t us = ucp_config_read(NULL, NULL, &config);
    if (us != UCS_OK) {
        return fail(err, BT_ERR_DEVICE, "ucp_config_read", us);
    }
    config_try(config, settings, sizeof(settings) / sizeof(settings[0]));
    config_ports(config, &x->o);
    if (ch->local && loopback_device(device)) {
        config_try(config, local_settings, 1);
    }
    if (x->direct) {
        config_try(config, direct_settings, 1);
    }
    if (ch->v6) {
        config_try(config, v6_settings, sizeof(v6_settings) / sizeof(v6_settings[0]));
    }
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
    return us == UCS_OK ? BT_OK
                        : bt_err_set(err, BT_ERR_DEVICE, "transfer: no transport of \"%s\": %s",
                                     list, ucs_status_string(us));
}

/* The context for an address: with automatic choice, shared memory for a loopback address, for which the other end
 * is on this machine beyond doubt. NULL: err has it. */
struct ucx_context *xfer_ucx_context(struct bt_xfer *x, const char *address, struct bt_err *err)
{
    struct ucx *u = x->wire;
    const char *why;
    bool local = strcmp(x->tls, "auto") == 0 && bt_xfer_address_is_loopback(address);
    bool v6 = address[0] == '[';
    struct ucx_context *c = &u->contexts[local ? CONTEXT_LOCAL : v6 ? CONTEXT_NET6 : CONTEXT_NET];
    if (v6 && bt_xfer_address_is_loopback(address)) {
        /* UCX 1.13 takes the device's IPv4 address for an IPv6 one, and reads behind it. */
        bt_err_set(err, BT_ERR_INVALID, "transfer address %s: use 127.0.0.1 on this machine",
                   address);
        return NULL;
    }
    if (c->handle != NULL) {
        return c;
    }
    struct choice ch = {.list = tls_list(x, local), .v6 = v6, .local = local};
    if (context_init(x, c, &ch, err) != BT_OK) {
        c->handle = NULL;
        return NULL;
    }
    xfer_ucx_memory_map(x, c);
    c->shared = xfer_ucx_worker_create(x, c->handle, &why);
    if (c->shared == NULL) {
        bt_err_set(err, BT_ERR_DEVICE, "transfer: UCX worker: %s", why);
        xfer_ucx_memory_unmap(c);
        ucp_cleanup(c->handle);
        c->handle = NULL;
        return NULL;
    }
    return c;
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
        .transports = {.entries = entries, .num_entries = 16, .entry_size = sizeof(entries[0])},
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
    char info[8192] = "";
    FILE *f = fmemopen(info, sizeof(info) - 1, "w");
    if (f == NULL) {
        return;
    }
    ucp_ep_print_info(ep, f);
    fclose(f);
    for (char *at = info; (at = strstr(at, "lane[")) != NULL; at++) {
        char *name = strstr(at, "]:");
        name = name != NULL ? strchr(name + 2, ':') : NULL;
        if (name != NULL) {
            add_transport(text, cap, name + 1, strcspn(name + 1, ". \n"));
        }
    }
}
#endif

void xfer_ucx_describe(struct bt_xfer *x, struct xfer_peer *p, struct xfer_transport *t)
{
    struct ucx_conn *c = p->conn;
    (void)x;
    memset(t, 0, sizeof(*t));
    query_transports(c->ep, t->text, sizeof(t->text));
    xfer_transport_judge(t, "/sys/class/infiniband");
    if (t->text[0] == 0) {
        snprintf(t->text, sizeof(t->text), "unknown");
    }
}

/* ---- life ---- */

/* UCX's listener, on the gate's host. With a range of ports: the first free one, from a random place on. */
static ucs_status_t listener_try(struct bt_xfer *x, struct sockaddr_storage *a, uint32_t len)
{
    struct ucx *u = x->wire;
    uint32_t n = x->o.port_max != 0 ? (uint32_t)(x->o.port_max - x->o.port_min) + 1 : 1;
    uint32_t first = (uint32_t)(x->o.instance % n);
    ucp_listener_params_t lp = {
        .field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
        .sockaddr = {.addr = (const struct sockaddr *)a, .addrlen = len},
        .conn_handler = {.cb = xfer_ucx_on_request, .arg = x},
    };
    ucs_status_t us = UCS_ERR_BUSY;
    for (uint32_t i = 0; i < n && us != UCS_OK; i++) {
        uint32_t port = x->o.port_max != 0 ? x->o.port_min + (first + i) % n : 0;
        xfer_addr_set_port(a, (uint16_t)port);
        xfer_door_begin(&u->door);
        us = ucp_listener_create(u->listening->shared->handle, &lp, &u->listener);
        xfer_door_end(&u->door, &u->listener);
    }
    return us;
}

static enum bt_status listener_open(struct bt_xfer *x, struct ucx *u, const char *address,
                                    struct bt_err *err)
{
    struct sockaddr_storage a, bound;
    uint32_t len;
    enum bt_status st = xfer_addr_parse(address, true, &a, &len, err);
    if (st != BT_OK) {
        return st;
    }
    xfer_addr_format(&a, x->address, sizeof(x->address));
    u->listening = xfer_ucx_context(x, x->address, err);
    if (u->listening == NULL) {
        return err != NULL ? err->status : BT_ERR_DEVICE;
    }
    xfer_door_begin(&u->door);
    st = xfer_gate_listen(u->gate, &a, len, &bound, err);
    xfer_door_cancel(&u->door);
    if (st != BT_OK) {
        return st;
    }
    xfer_addr_format(&bound, x->address, sizeof(x->address));
    ucs_status_t us = listener_try(x, &a, len);
    if (us != UCS_OK) {
        return bt_err_set(err, BT_ERR_IO, "transfer: UCX cannot listen beside %s: %s", x->address,
                          ucs_status_string(us));
    }
    ucp_listener_attr_t attr = {.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR};
    us = ucp_listener_query(u->listener, &attr);
    if (us != UCS_OK) {
        return fail(err, BT_ERR_DEVICE, "ucp_listener_query", us);
    }
    u->port = xfer_addr_port(&attr.sockaddr);
    return BT_OK;
}

/* Takes down whatever is up: also the way out of a failed open. */
void xfer_ucx_fini(struct bt_xfer *x)
{
    struct ucx *u = x->wire;
    for (unsigned i = 0; i < u->n_requests; i++) {
        ucp_listener_reject(u->listener, u->requests[i].handle);
    }
    if (u->listener != NULL) {
        xfer_door_forget(&u->door, &u->listener);
        ucp_listener_destroy(u->listener);
    }
    xfer_gate_destroy(u->gate);
    while (!TAILQ_EMPTY(&u->workers)) {
        xfer_ucx_worker_destroy(u, TAILQ_LAST(&u->workers, ucx_workers));
    }
    for (size_t i = 0; i < N_CONTEXTS; i++) {
        if (u->contexts[i].handle != NULL) {
            xfer_ucx_memory_unmap(&u->contexts[i]);
            ucp_cleanup(u->contexts[i].handle);
        }
    }
    xfer_door_fini(&u->door);
    bt_map_fini(&u->by_ep);
    bt_free(u->pfds);
    ucs_log_pop_handler();
    bt_free(u);
}

enum bt_status xfer_ucx_open(struct bt_xfer *x, const struct bt_xfer_opts *o, struct bt_err *err)
{
    struct ucx *u = bt_calloc(1, sizeof(*u));
    if (u == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "transfer: out of memory");
    }
    ucs_log_push_handler(on_ucx_log); /* a stack, process-wide: each bt_xfer has its place in it */
    bt_map_init(&u->by_ep, true);
    TAILQ_INIT(&u->workers);
    x->wire = u;
    xfer_ucx_memory_probe(x);
    struct xfer_gate_hooks hooks = {
        .arg = x, .admit = xfer_ucx_admit, .answered = xfer_ucx_on_answered};
    enum bt_status st = xfer_gate_create(x, &hooks, &u->gate, err);
    if (st != BT_OK) {
        xfer_ucx_fini(x);
        return st;
    }
    /* The wake fd, the gate, the shared workers, one for each peer. */
    u->pfds = bt_alloc((2 + N_CONTEXTS + (size_t)x->o.peers_max) * sizeof(*u->pfds));
    if (u->pfds == NULL) {
        st = bt_err_set(err, BT_ERR_NOMEM, "transfer: out of memory");
    } else if (o->listen != NULL) {
        st = listener_open(x, u, o->listen, err);
    } else if (strcmp(x->tls, "auto") != 0 && xfer_ucx_context(x, "", err) == NULL) {
        st = BT_ERR_DEVICE; /* a wrong list is told now, not at the first dial */
    }
    if (st != BT_OK) {
        xfer_ucx_fini(x);
    }
    return st;
}
