/* A daemon's frame: start in order, run the loop, drain, stop in reverse order. Owns the threads
 * and connections; refuses to know what a job is. */

#include "node/node.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/arena.h"
#include "base/assert.h"
#include "base/cache_dir.h"
#include "base/clock.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/notify.h"
#include "kernels/kv_type.h"
#include "kernels/open.h"
#include "net/addr.h"
#include "net/grpc.h"
#include "net/http.h"
#include "net/loop.h"
#include "node/node_int.h"
#include "node/node_name.h"

#define PANEL_BYTES_MIN      ((uint64_t)16 << 20) /* less is packed again sooner than a file is made */
#define TICK_NS              (100 * BT_NS_PER_MS)
#define CONTROL_ARENA        ((size_t)1 << 20)
#define OUTBOX_ARENA         ((size_t)256 << 20)
#define TRANSFER_COMMANDS    65536u
#define XFER_EVENTS_PER_TURN 256
#define BLOCKS_MAX           (1u << 22) /* of the prefix cache, told to routers: 96 MiB here at most */

uint32_t bt_node_first_slot(const struct bt_node *n, enum bt_role leg)
{
    return leg == BT_ROLE_PREFILL ? 0 : n->cfg.max_jobs;
}

/* ---- outputs ---- */

static void flush_router(struct bt_node *n, uint32_t router)
{
    struct outbox *b = &n->p->outboxes[router];

    if (b->n == 0) {
        return;
    }
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_OUTPUTS};

    m.outputs.n = b->n;
    m.outputs.outputs = b->items;
    bt_router_link_send(n->link, router, &m);
    b->n = 0;
    bt_arena_reset(&b->arena);
}

static void flush_all(struct bt_task *t, void *arg)
{
    struct bt_node *n = arg;

    (void)t;
    for (uint32_t i = 0; i < BT_ROUTERS_MAX; i++) {
        flush_router(n, i);
    }
}

static bool outbox_copy(struct outbox *b, const struct bt_msg_output *o, struct bt_msg_output *out)
{
    struct bt_sampled *tokens = bt_arena_alloc(&b->arena, o->n_tokens * sizeof *tokens);
    struct bt_sampled *prompt = bt_arena_alloc(&b->arena, o->n_prompt_logprobs * sizeof *prompt);

    if (tokens == NULL || prompt == NULL) {
        return false;
    }
    if (o->n_tokens > 0) {
        memcpy(tokens, o->tokens, o->n_tokens * sizeof *tokens);
    }
    if (o->n_prompt_logprobs > 0) {
        memcpy(prompt, o->prompt_logprobs, o->n_prompt_logprobs * sizeof *prompt);
    }
    *out = *o;
    out->tokens = tokens;
    out->prompt_logprobs = prompt;
    return true;
}

void bt_node_output(struct bt_node *n, uint32_t router, const struct bt_msg_output *o)
{
    BT_ASSERT(router < BT_ROUTERS_MAX);
    struct outbox *b = &n->p->outboxes[router];

    if (b->n == b->cap) {
        size_t cap = b->cap == 0 ? 64 : b->cap * 2;
        struct bt_msg_output *grown = bt_realloc(b->items, cap * sizeof *grown);

        if (grown != NULL) {
            b->items = grown;
            b->cap = cap;
        }
    }
    if (b->n == b->cap || !outbox_copy(b, o, &b->items[b->n])) {
        bt_log_error("node", "out of memory: an output is lost, its request will be cut");
        return;
    }
    b->n++;
    bt_task_defer(n->loop, &n->p->flush, flush_all, n);
}

void bt_node_attempt_end(struct bt_node *n, uint32_t router, const struct bt_msg_attempt_end *e)
{
    flush_router(n, router);
    bt_router_link_send(
        n->link, router,
        &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_ATTEMPT_END, .attempt_end = *e});
}

/* ---- control messages ---- */

void bt_node_control(struct bt_node *n, uint64_t conn, const struct bt_control *m)
{
    struct bt_buf *b = &n->p->control;
    char t[9];

    bt_buf_clear(b);
    enum bt_status st = bt_control_encode(m, b);

    if (st == BT_OK) {
        st = bt_xfer_send_ctrl(n->xfer, conn, b->data, b->len);
    }
    if (st != BT_OK) {
        bt_log_warn("node", "ticket %s: cannot send %s: %s", bt_ticket_text(&m->ticket, t),
                    bt_control_name(m->kind), bt_status_str(st));
    }
}

void bt_node_must(enum bt_status st)
{
    BT_ASSERT(st == BT_OK);
}

static void on_control(struct bt_node *n, const struct bt_xfer_event *ev)
{
    struct bt_control m;
    struct bt_err err = {0};

    bt_arena_reset(&n->p->control_arena);
    if (bt_control_decode(ev->data, ev->n_bytes, &n->p->control_arena, &m, &err) != BT_OK) {
        uint32_t n_held;

        if (bt_log_may(&n->p->bad_control, bt_net_loop_now(n->loop), &n_held)) {
            bt_log_warn("node", "peer %016llx: %s (%u more before it)",
                        (unsigned long long)ev->instance, err.msg, n_held);
        }
        return;
    }
    bt_node_legs_control(n, ev->peer, &m);
}

/* ---- load ---- */

/* The transport that a connected peer uses, for load reports. text "": forget it. */
static void set_transport(struct bt_node *n, const struct bt_xfer_event *ev, const char *text)
{
    struct bt_node_private *p = n->p;
    uint32_t i = 0;

    while (i < p->n_transports && p->transports[i].conn != ev->peer) {
        i++;
    }
    if (text[0] == '\0') {
        if (i < p->n_transports) {
            p->transports[i] = p->transports[--p->n_transports];
        }
        return;
    }
    if (i == PEERS_MAX) {
        return; /* shown in the log only */
    }
    p->n_transports += i == p->n_transports;
    p->transports[i].conn = ev->peer;
    p->transports[i].instance = ev->instance;
    snprintf(p->transports[i].text, sizeof p->transports[i].text, "%s", text);
}

static void tell_prefix_blocks(struct bt_node *n, uint32_t router, struct bt_msg_load *out)
{
    struct bt_prefix_news news;

    if (n->p->report != NULL) {
        bt_prefix_report_next(n->p->report, router, &news);
        out->prefix_blocks = (struct bt_msg_prefix_blocks){.told = true,
                                                           .reset = news.reset,
                                                           .n_added = news.n_added,
                                                           .n_removed = news.n_removed,
                                                           .added = news.added,
                                                           .removed = news.removed};
    }
}

/* Two nodes that serve as both have two connections: told once. */
static uint32_t list_transports(struct bt_node_private *p)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < p->n_transports; i++) {
        uint32_t k = 0;

        while (k < n && p->transport_msgs[k].peer != p->transports[i].instance) {
            k++;
        }
        p->transport_msgs[k] =
            (struct bt_msg_transport){p->transports[i].instance, p->transports[i].text};
        n += k == n;
    }
    return n;
}

static void node_load(void *arg, uint32_t router, struct bt_msg_load *out)
{
    struct bt_node *n = arg;
    struct bt_node_private *p = n->p;
    struct bt_engine_snapshot s = bt_engine_thread_snapshot(n->engine);
    struct bt_xfer_stats x;

    bt_xfer_stats(n->xfer, &x);
    *out = (struct bt_msg_load){
        .waiting = s.load.n_waiting,
        .running = s.load.n_running,
        .held = s.load.n_held,
        .landing = s.load.n_landing,
        .waiting_tokens = s.load.waiting_tokens,
        .pages_free = s.pages.free,
        .pages_cached = s.pages.cached,
        .pages_leased = s.pages.leased,
        .pages_quarantined = s.pages.quarantined,
        .prefill_tokens_per_s = s.prefill_tokens_per_s,
        .decode_step_ms = s.decode_step_ms,
        .pages_short = s.load.pages_short,
        .transfer_failures = bt_node_transfer_failures(&x),
        .stale_messages =
            x.drop_unknown + x.drop_generation + x.drop_peer + x.drop_range + x.drop_malformed,
        .n_transports = list_transports(p),
        .transports = p->transport_msgs,
    };
    bt_node_legs_load(n, out);
    tell_prefix_blocks(n, router, out);
}

/* ---- events ---- */

/* Nothing can be computed here any more. Routers hear of it by their sessions' end, and go on as with a node that died. */
static void end_broken(struct bt_node *n, const char *what, enum bt_status st)
{
    if (!n->p->broken) {
        bt_log_error("engine",
                     "%s: %s; this node ends with exit code 1, its requests go on at other nodes",
                     what, bt_status_str(st));
    }
    n->p->broken = true;
    bt_net_loop_stop(n->loop);
}

static void on_engine(void *arg, const struct bt_engine_ev *ev)
{
    struct bt_node *n = arg;

    if (ev->kind == BT_ENGINE_EV_STEP) {
        bt_node_metrics_step(n, &ev->step);
    } else if (ev->kind == BT_ENGINE_EV_BROKEN) {
        end_broken(n, ev->text, ev->status);
        return;
    } else if (ev->kind == BT_ENGINE_EV_CACHE) {
        bt_prefix_report_change(n->p->report, ev->cache.list, ev->cache.n);
        return;
    }
    bt_node_legs_engine(n, ev);
}

static void on_xfer_event(struct bt_node *n, const struct bt_xfer_event *ev)
{
    switch (ev->kind) {
    case BT_XFER_PEER_UP: /* up and down were logged by the transfer thread */
        set_transport(n, ev, ev->text);
        break;
    case BT_XFER_PEER_DOWN:
        set_transport(n, ev, "");
        break;
    case BT_XFER_CTRL:
        on_control(n, ev);
        return;
    default:
        break;
    }
    bt_node_legs_xfer(n, ev);
}

static void on_xfer_wake(void *arg) /* transfer thread */
{
    struct bt_node *n = arg;
    uint8_t one = 1;

    if (!bt_inbox_post(n->p->xfer_inbox, &one)) {
        return; /* wakes are already waiting */
    }
}

/* A bounded number in each turn of the loop, so that a burst of pages does not hold up the rest. */
static void read_xfer(struct bt_task *t, void *arg)
{
    struct bt_node *n = arg;
    struct bt_xfer_event ev;

    for (int i = 0; i < XFER_EVENTS_PER_TURN; i++) {
        if (n->xfer == NULL || !bt_xfer_poll(n->xfer, &ev)) {
            return;
        }
        if (bt_node_memory_failed(n)) { /* the legs would blame the peer, and go on */
            end_broken(n, "a KV page cannot be copied", BT_ERR_DEVICE);
        } else {
            on_xfer_event(n, &ev);
        }
        bt_xfer_event_free(&ev);
    }
    bt_task_defer(n->loop, t, read_xfer, n);
}

static void on_xfer_inbox(void *arg, const void *msg)
{
    struct bt_node *n = arg;

    (void)msg;
    bt_task_defer(n->loop, &n->p->read_xfer, read_xfer, n);
}

static void on_router_up(void *arg, uint32_t router)
{
    struct bt_node *n = arg;

    (void)router;
    if (!n->p->was_up) {
        n->p->was_up = true;
        bt_log_info("node", "ready");
        bt_notify("READY=1");
    }
    bt_node_health_changed(n);
}

static void on_router_lost(void *arg, uint32_t router)
{
    struct bt_node *n = arg;

    if (n->p->report != NULL) {
        bt_prefix_report_restart(n->p->report, router);
    }
    n->p->outboxes[router].n = 0;
    bt_arena_reset(&n->p->outboxes[router].arena);
    bt_node_legs_router_lost(n, router);
    bt_node_health_changed(n);
}

static void drain(struct bt_node *n)
{
    struct bt_node_private *p = n->p;

    bt_log_info("node", "draining");
    bt_notify("STOPPING=1");
    p->draining = true;
    p->drain_end = bt_net_loop_now(n->loop) + n->cfg.drain_timeout;
    bt_router_link_drain(n->link);
    bt_node_health_changed(n);
}

static void set_role(struct bt_node *n, enum bt_role role)
{
    if (n->p->draining) {
        bt_log_warn("node", "this node drains: its role stays");
    } else if (bt_role_has(role, BT_ROLE_DECODE) && bt_xfer_address(n->xfer)[0] == '\0') {
        bt_log_warn("node", "no --transfer address: this node cannot decode");
    } else {
        bt_node_legs_set_role(n, role);
    }
    bt_node_legs_tell_role(n); /* in any case: the router waits for it */
}

static void on_router_message(void *arg, uint32_t router, const struct bt_from_router *m)
{
    struct bt_node *n = arg;
    bool up = false;

    if (m->kind == BT_FROM_ROUTER_SET_ROLE) {
        bt_log_info("node", "router %s tells this node to serve as %s",
                    bt_router_link_address(n->link, router, &up), bt_role_name(m->set_role));
        set_role(n, m->set_role);
        return;
    }
    if (m->kind == BT_FROM_ROUTER_DRAIN) {
        bt_log_info("node", "router %s tells this node to drain",
                    bt_router_link_address(n->link, router, &up));
        if (!n->p->draining) {
            drain(n);
        }
        return;
    }
    bt_node_legs_router(n, router, m);
}

/* Whether a draining node has nothing left. When its time is over the rest goes back to the routers, which run it
 * elsewhere; it stays for a tick so that they hear of it, and a little longer for receives that have not ended. */
static bool drained(struct bt_node *n, uint64_t now)
{
    struct bt_node_private *p = n->p;
    uint32_t left = bt_node_legs_jobs(n);

    if (left == 0) {
        return true;
    }
    if (now >= p->drain_end && !p->gave_back) {
        p->gave_back = true;
        bt_log_warn("node", "drain timed out: %u unfinished sequences go back to their routers",
                    left);
        bt_node_legs_give_back(n);
    }
    return p->gave_back && now >= p->drain_end + n->cfg.lease;
}

static void on_tick(struct bt_timer *t, void *arg)
{
    struct bt_node *n = arg;
    uint64_t now = bt_net_loop_now(n->loop);

    bt_node_legs_tick(n, now);
    bt_node_watch(n, now);
    if (n->p->draining && drained(n, now)) {
        bt_net_loop_stop(n->loop);
        return;
    }
    bt_timer_start(n->loop, t, TICK_NS, on_tick, n);
}

static void on_signal(void *arg, int signum)
{
    struct bt_node *n = arg;
    struct bt_node_private *p = n->p;

    if (p->draining) {
        bt_log_info("node", "second signal %d: stopping now", signum);
        bt_net_loop_stop(n->loop);
        return;
    }
    drain(n);
}

/* ---- start ---- */

static void on_load_progress(void *arg, double fraction)
{
    struct bt_node *n = arg;
    int tenth = (int)(fraction * 10);

    if (tenth > n->p->load_tenth) {
        n->p->load_tenth = tenth;
        bt_log_info("node", "loading the model: %d %%", tenth * 10);
    }
}

/* --panel-cache; NULL: none. */
static const char *panel_folder(const struct bt_node *n, struct bt_buf *buf)
{
    struct bt_err err = {0};

    if (strcmp(n->cfg.panel_cache, "off") == 0) {
        return NULL;
    }
    if (strcmp(n->cfg.panel_cache, "auto") != 0) {
        return n->cfg.panel_cache;
    }
    if (bt_cache_dir(buf, "panels", &err) != BT_OK) {
        bt_log_info("node", "packed weights are not shared: %s (--panel-cache)", err.msg);
        return NULL;
    }
    return buf->data;
}

/* asked: a folder was named. */
static void log_packed(const struct bt_model_packed *p, bool asked)
{
    if (p->shared) {
        bt_log_info("node", "%.1f MB of packed weights, shared, %s %s", (double)p->bytes / 1e6,
                    p->reused ? "mapped from" : "now in", p->note);
    } else {
        BT_LOG(asked && p->failed ? BT_LOG_WARN : BT_LOG_INFO, "node", NULL,
               "%.1f MB of packed weights in memory of this process: %s%s", (double)p->bytes / 1e6,
               asked ? "--panel-cache: " : "", p->note);
    }
}

static void log_pool(const struct bt_node *n)
{
    const struct bt_engine_layout *l = n->layout;
    uint64_t bytes = 0, n_tokens = UINT64_MAX;

    for (uint32_t i = 0; i < l->n_groups; i++) {
        uint64_t tokens = (uint64_t)l->groups[i].n_pages * l->page_tokens;

        bytes +=
            (uint64_t)l->groups[i].n_pages * l->groups[i].n_layers * l->groups[i].page_layer_bytes;
        n_tokens = tokens < n_tokens ? tokens : n_tokens;
    }
    bt_log_info("node", "kv cache of %.0f MiB: room for %llu tokens (--kv-bytes)",
                (double)bytes / 1048576.0, (unsigned long long)n_tokens);
    if (n->cfg.kv_bytes > bytes + bytes / 64) {
        bt_log_info("node",
                    "that is all that %u sequences (--max-seqs) of the model's context can fill: "
                    "of the %.0f MiB of --kv-bytes the rest is not taken",
                    BT_LEGS * n->cfg.max_jobs, (double)n->cfg.kv_bytes / 1048576.0);
    }
    if (bytes > bt_memory_usable()) {
        bt_log_warn("node", "that is more than the %.0f MiB of memory that this process may use",
                    (double)bt_memory_usable() / 1048576.0);
    }
}

/* Blocks of 64 tokens and more: no more of them than pages. */
static enum bt_status start_report(struct bt_node *n)
{
    uint32_t pages = bt_prefix_block_tokens(n->layout->page_tokens) / n->layout->page_tokens;
    uint32_t blocks = n->layout->groups[0].n_pages / pages + 1;

    return bt_prefix_report_create(blocks < BLOCKS_MAX ? blocks : BLOCKS_MAX, BT_ROUTERS_MAX,
                                   &n->p->report);
}

/* The class to compute in; NULL: what suits backend and model. */
static const char *numerics_of(const struct bt_node_cfg *cfg)
{
    const char *name = cfg->numerics > 0 ? bt_k_all_classes[cfg->numerics - 1] : NULL;

    if (!cfg->deterministic || bt_k_one_answer(name)) {
        return name;
    }
    bt_log_info("node", "--deterministic: own kernels instead of class %s", name);
    return NULL;
}

static enum bt_status start_engine(struct bt_node *n, struct bt_err *err)
{
    struct bt_engine *e = NULL;
    struct bt_buf panel_dir = {0};
    uint64_t t0 = bt_clock_ns();
    struct bt_engine_opts o = {
        .model_path = n->cfg.model,
        .panel_dir = panel_folder(n, &panel_dir),
        .panel_bytes_min = PANEL_BYTES_MIN,
        .backend = bt_node_backends[n->cfg.backend],
        .device = n->cfg.device,
        .isa = bt_k_isas[n->cfg.isa],
        .numerics = numerics_of(&n->cfg),
        .n_threads = n->cfg.threads,
        .kv_bytes = n->cfg.kv_bytes,
        .page_tokens = n->cfg.page_tokens,
        .kv_dtype = bt_k_kv_types[n->cfg.kv_dtype],
        .chunk_tokens = n->cfg.chunk_tokens,
        .max_batch = n->cfg.max_batch,
        .max_seqs = BT_LEGS * n->cfg.max_jobs,
        .prefix_cache = n->cfg.prefix_cache != 0,
        .load_progress = on_load_progress,
        .load_arg = n,
    };
    enum bt_status st = bt_engine_create(&o, &e, err);

    bt_buf_fini(&panel_dir);
    if (st != BT_OK) {
        return st;
    }
    n->packed = bt_engine_packed(e);
    n->model = bt_engine_model(e);
    n->layout = bt_engine_layout(e);
    bt_log_info("node",
                "model %s (%s, %.1f M parameters) loaded in %.0f ms; %s, class %s; kv %s, up to %u "
                "tokens a "
                "sequence, prefix cache %s",
                n->model->name, n->model->arch, (double)n->model->n_params / 1e6,
                (double)(bt_clock_ns() - t0) / 1e6, bt_engine_describe(e), n->layout->numerics,
                n->layout->kv_layout, bt_engine_max_tokens(e),
                n->cfg.prefix_cache != 0 ? "on" : "off");
    log_packed(n->packed,
               strcmp(n->cfg.panel_cache, "off") != 0 && strcmp(n->cfg.panel_cache, "auto") != 0);
    log_pool(n);
    if (n->cfg.prefix_cache != 0 && start_report(n) != BT_OK) {
        bt_engine_destroy(e);
        return bt_err_set(err, BT_ERR_NOMEM, "no memory for the list of cached blocks");
    }
    st = bt_node_memory_start(n, e, err);
    if (st != BT_OK) {
        bt_engine_destroy(e);
        return st;
    }
    st = bt_engine_thread_start(n->loop, e, BT_LEGS * n->cfg.max_jobs, on_engine, n, &n->engine);
    return st == BT_OK ? BT_OK : bt_err_set(err, st, "cannot start the engine thread");
}

static enum bt_status start_transfer(struct bt_node *n, struct bt_err *err)
{
    char address[BT_ADDR_TEXT_MAX];
    char fingerprint[128];
    uint16_t port_min, port_max;
    enum bt_status st = bt_inbox_create(n->loop, 1, 4, on_xfer_inbox, n, &n->p->xfer_inbox);

    if (st != BT_OK) {
        return bt_err_set(err, st, "cannot create the transfer inbox");
    }
    st = bt_node_transfer_ports(n, &port_min, &port_max, err);
    if (st == BT_OK) {
        st = bt_node_transfer_address(n, address, err);
    }
    if (st != BT_OK) {
        return st;
    }
    snprintf(fingerprint, sizeof fingerprint, "%016llx/%s",
             (unsigned long long)n->layout->fingerprint, n->layout->numerics);
    struct bt_xfer_opts o = {.listen = address[0] != '\0' ? address : NULL,
                             .port_min = port_min,
                             .port_max = port_max,
                             .tls = n->cfg.transport,
                             .instance = n->instance,
                             .fingerprint = fingerprint,
                             .layout = n->layout->kv_layout,
                             .heartbeat_ns = n->cfg.heartbeat,
                             .lease_ns = n->cfg.lease,
                             .stall_ns = n->cfg.transfer_deadline,
                             .checksum = n->cfg.checksum,
                             .peers_max = PEERS_MAX,
                             .landings_max = n->cfg.max_jobs,
                             .commands_max = TRANSFER_COMMANDS,
                             .wake = on_xfer_wake,
                             .wake_arg = n};

    bt_node_memory_opts(n, &o);
    st = bt_xfer_create(&o, &n->xfer, err);
    if (st == BT_OK) {
        bt_node_memory_log(n);
    }
    return st;
}

static enum bt_status start_link(struct bt_node *n, struct bt_err *err)
{
    const struct bt_engine *e = bt_engine_thread_engine(n->engine);
    uint32_t n_pages = 0;

    for (uint32_t g = 0; g < n->layout->n_groups; g++) {
        n_pages += n->layout->groups[g].n_pages;
    }
    if (n->cfg.name == NULL) {
        char name[BT_NODE_NAME_BYTES];

        n->p->name_fd = bt_node_default_name(bt_role_name(n->role), name);
        n->cfg.name = bt_strdup(name);
    }
    if (n->cfg.name == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    struct bt_router_link_opts o = {
        .routers = n->cfg.router,
        .hello = {.version_min = BT_SESSION_VERSION_MIN,
                  .version_max = BT_SESSION_VERSION_MAX,
                  .role = n->role,
                  .instance = n->instance,
                  .name = n->cfg.name,
                  .fingerprint = n->layout->fingerprint,
                  .numerics = n->layout->numerics,
                  .kv_layout = n->layout->kv_layout,
                  .model_name = n->cfg.model_name != NULL ? n->cfg.model_name : n->model->name,
                  .transfer_address = bt_xfer_address(n->xfer),
                  .gate_token = *bt_xfer_token(n->xfer),
                  .backend = bt_engine_describe(e),
                  .page_tokens = n->cfg.page_tokens,
                  .n_pages = n_pages,
                  .max_batch = n->cfg.max_batch,
                  .max_tokens = bt_engine_max_tokens(e),
                  .context = n->model->context,
                  .vocab = n->model->vocab,
                  .chunk_tokens = n->cfg.chunk_tokens,
                  .lease_ms = n->cfg.lease / BT_NS_PER_MS},
        .heartbeat_ns = n->cfg.heartbeat,
        .lease_ns = n->cfg.lease,
        .arg = n,
        .load = node_load,
        .on_up = on_router_up,
        .on_lost = on_router_lost,
        .on_message = on_router_message,
    };

    if (bt_role_has(n->role, BT_ROLE_DECODE)) {
        bt_log_info("transfer", "listening for KV pages on %s", bt_xfer_address(n->xfer));
    }
    return bt_router_link_create(n->loop, &o, &n->link, err);
}

static enum bt_status node_start(struct bt_node *n, struct bt_err *err)
{
    enum bt_status st = bt_net_loop_create(&n->loop);

    if (st == BT_OK) {
        st = start_engine(n, err);
    }
    if (st == BT_OK) {
        st = start_transfer(n, err);
    }
    if (st == BT_OK) {
        bt_node_legs_ready(n);
        st = bt_node_health_start(n, err);
    }
    if (st == BT_OK) {
        st = start_link(n, err);
    }
    if (st == BT_OK) {
        st = bt_net_signal_start(n->loop, SIGTERM, on_signal, n, &n->p->sigterm);
    }
    if (st == BT_OK) {
        st = bt_net_signal_start(n->loop, SIGINT, on_signal, n, &n->p->sigint);
    }
    if (st == BT_OK) {
        bt_timer_start(n->loop, &n->p->tick, TICK_NS, on_tick, n);
    }
    return st;
}

/* Reverse order; every step copes with a start that failed before it. */
static void node_stop(struct bt_node *n)
{
    struct bt_node_private *p = n->p;

    if (n->loop == NULL) {
        return;
    }
    bt_timer_stop(n->loop, &p->tick);
    bt_task_cancel(n->loop, &p->flush);
    bt_net_signal_stop(p->sigterm);
    bt_net_signal_stop(p->sigint);
    if (n->link != NULL) {
        flush_all(NULL, n);
        bt_net_loop_step(n->loop, 10 * BT_NS_PER_MS); /* last outputs leave */
    }
    bt_router_link_destroy(n->link);
    bt_node_health_stop(n);
    if (n->xfer != NULL) {
        struct bt_xfer *x = n->xfer;

        n->xfer = NULL;
        bt_xfer_destroy(x);
    }
    bt_task_cancel(n->loop, &p->read_xfer);
    bt_k_mover_destroy(p->mover); /* before the context of the engine */
    bt_engine_thread_stop(n->engine);
    if (p->xfer_inbox != NULL) {
        bt_inbox_destroy(p->xfer_inbox);
    }
    bt_prefix_report_destroy(p->report);
    bt_arena_fini(&p->control_arena);
    bt_buf_fini(&p->control);
    for (uint32_t i = 0; i < BT_ROUTERS_MAX; i++) {
        bt_arena_fini(&p->outboxes[i].arena);
        bt_free(p->outboxes[i].items);
    }
    if (p->name_fd >= 0) {
        close(p->name_fd);
    }
    bt_net_loop_destroy(n->loop);
}

int bt_node_main(const struct bt_prog *prog, int argc, char **argv,
                 const struct bt_node_hooks legs[BT_LEGS])
{
    struct bt_node n = {.legs = {legs[BT_ROLE_PREFILL], legs[BT_ROLE_DECODE]}};
    struct bt_opt_result res;
    struct bt_err err = {0};

    bt_log_thread("loop");
    if (bt_opt_parse(prog, argc, argv, &n.cfg, &res, &err) != BT_OK) {
        fprintf(stderr, "%s: %s\n", prog->name, err.msg);
        return 2;
    }
    if (res.exit_now) {
        bt_opt_free(prog, &n.cfg);
        return 0;
    }
    n.role = (enum bt_role)n.cfg.role; /* the option lists them in that order */
    n.p = bt_calloc(1, sizeof *n.p);
    if (n.p == NULL) {
        fprintf(stderr, "%s: out of memory\n", prog->name);
        return 1;
    }
    if (bt_node_check(&n, &err) != BT_OK) {
        fprintf(stderr, "%s: %s\n", prog->name, err.msg);
        bt_free(n.p);
        bt_opt_free(prog, &n.cfg);
        return 2;
    }
    n.p->name_fd = -1;
    for (uint32_t i = 0; i < BT_ROUTERS_MAX; i++) {
        bt_arena_init(&n.p->outboxes[i].arena, OUTBOX_ARENA);
    }
    bt_arena_init(&n.p->control_arena, CONTROL_ARENA);
    do {
        bt_random_bytes(&n.instance, sizeof n.instance);
    } while (n.instance == 0);
    enum bt_status st = node_start(&n, &err);

    if (st == BT_OK) {
        bt_net_loop_run(n.loop);
        bt_log_info("node", "stopped");
    } else {
        bt_log_error("node", "%s", err.msg[0] != '\0' ? err.msg : bt_status_str(st));
    }
    int rc = st == BT_OK ? (n.p->broken ? 1 : 0) : st == BT_ERR_INVALID ? 2 : 1;

    node_stop(&n);
    bt_free(n.p);
    bt_opt_free(prog, &n.cfg);
    return rc;
}
