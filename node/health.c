/* The daemon's health endpoint: /live, /ready, /metrics and grpc.health.v1. Reads snapshots;
 * decides nothing. */

#include <string.h>
#include "base/log.h"
#include "net/grpc.h"
#include "net/http.h"
#include "node/node_int.h"

static bool node_ready(const struct bt_node *n)
{
    return n->link != NULL && bt_router_link_up(n->link) > 0 && !n->p->draining;
}

enum bt_status bt_node_metrics_init(struct bt_node *n, struct bt_err *err)
{
    for (unsigned leg = 0; leg < BT_LEGS; leg++) {
        if (bt_prom_hist_init_text(&n->p->step_seconds[leg], n->cfg.buckets_seconds, err) !=
            BT_OK) {
            return bt_err_prefix(err, "--buckets-seconds");
        }
    }
    if (bt_prom_hist_init_text(&n->p->batch_tokens, n->cfg.buckets_tokens, err) != BT_OK) {
        return bt_err_prefix(err, "--buckets-tokens");
    }
    return BT_OK;
}

void bt_node_hist_init(const struct bt_node *n, struct bt_prom_hist *seconds)
{
    *seconds = n->p->step_seconds[0];
    memset(seconds->counts, 0, sizeof seconds->counts);
    seconds->sum = 0;
    seconds->count = 0;
}

void bt_node_hist_init_shares(struct bt_prom_hist *shares)
{
    *shares = (struct bt_prom_hist){.n_bounds = 11};
    for (uint32_t i = 0; i < shares->n_bounds; i++) {
        shares->bounds[i] = (double)(1u << 2 * i);
    }
}

uint64_t bt_node_transfer_failures(const struct bt_xfer_stats *x)
{
    return x->fail_peer_lost + x->fail_lease + x->fail_stall + x->fail_connect + x->fail_refused +
           x->fail_sends + x->fail_receives;
}

void bt_node_metrics_step(struct bt_node *n, const struct bt_engine_step_stats *s)
{
    enum bt_role leg = s->n_prefill_tokens > 0 ? BT_ROLE_PREFILL : BT_ROLE_DECODE;

    bt_prom_hist_observe(&n->p->step_seconds[leg], (double)s->compute_ns / 1e9);
    bt_prom_hist_observe(&n->p->batch_tokens, (double)(s->n_prefill_tokens + s->n_decode_tokens));
}

static void page_states(struct bt_buf *b, const struct bt_engine_pages *p)
{
    static const char *const names[] = {"free", "cached", "leased", "quarantined"};
    const uint32_t values[] = {p->free, p->cached, p->leased, p->quarantined};

    bt_prom_head(b, "baton_kv_pages", BT_PROM_GAUGE, "KV pages by state.");
    for (int i = 0; i < 4; i++) {
        bt_prom_u64(b, "baton_kv_pages", &(struct bt_prom_label){"state", names[i]}, 1, values[i]);
    }
}

static void one(struct bt_buf *b, const char *name, enum bt_prom_type type, const char *help,
                uint64_t value)
{
    bt_prom_head(b, name, type, help);
    bt_prom_u64(b, name, NULL, 0, value);
}

static void turned_away(struct bt_buf *b, const struct bt_xfer_stats *x)
{
    static const char name[] = "baton_kv_gate_refused_total";
    static const char *const reasons[] = {"garbage", "slow", "crowded", "refused"};
    const uint64_t values[] = {x->gate_garbage, x->gate_slow, x->gate_crowded, x->gate_refused};

    bt_prom_head(b, name, BT_PROM_COUNTER, "Connections turned away at the transfer port.");
    for (int i = 0; i < 4; i++) {
        bt_prom_u64(b, name, &(struct bt_prom_label){"reason", reasons[i]}, 1, values[i]);
    }
}

/* Nothing where the host reaches the pages. */
static void device_pages(struct bt_buf *b, const struct bt_xfer_stats *x)
{
    static const char name[] = "baton_kv_device_bytes_total";

    bt_prom_head(b, name, BT_PROM_COUNTER,
                 "Bytes of KV pages that went between device memory and the wire; staged: through "
                 "pinned memory, registered: given to UCX as they are.");
    bt_prom_u64(b, name, &(struct bt_prom_label){"way", "staged"}, 1, x->staged_bytes);
    bt_prom_u64(b, name, &(struct bt_prom_label){"way", "registered"}, 1, x->direct_bytes);
    one(b, "baton_kv_staged_shares_total", BT_PROM_COUNTER,
        "Shares of KV pages whose copy to or from pinned memory began.", x->staged_shares);
    one(b, "baton_kv_staged_batches_total", BT_PROM_COUNTER,
        "Batches in which they did: as many shares each as waited.", x->staged_batches);
}

static void sealed_threads(struct bt_buf *b, const struct bt_engine_snapshot *s,
                           const struct bt_xfer_stats *x)
{
    static const char name[] = "baton_sealed_heap_calls_total";

    bt_prom_head(b, name, BT_PROM_COUNTER,
                 "Heap calls of threads that must not make any: 0, or a bug.");
    bt_prom_u64(b, name, &(struct bt_prom_label){"thread", "engine"}, 1, s->sealed_heap_calls);
    bt_prom_u64(b, name, &(struct bt_prom_label){"thread", "transfer"}, 1, x->sealed_heap_calls);
}

/* Label node: the router's address. */
static void sessions(const struct bt_node *n, struct bt_buf *b)
{
    const char *address = NULL;
    bool up = false;

    bt_prom_head(b, "baton_session_up", BT_PROM_GAUGE, "1 while the session with a router is up.");
    for (uint32_t i = 0; n->link != NULL && i < BT_ROUTERS_MAX; i++) {
        if ((address = bt_router_link_address(n->link, i, &up)) != NULL) {
            const struct bt_prom_label labels[] = {{"node", address}, {"role", "router"}};

            bt_prom_u64(b, "baton_session_up", labels, 2, up);
        }
    }
}

/* A leg is told of while the node serves as it, and once it has done something. */
static bool is_told(const struct bt_node *n, enum bt_role leg)
{
    return bt_role_has(n->role, leg) || n->p->step_seconds[leg].count > 0;
}

static void steps(const struct bt_node *n, struct bt_buf *b)
{
    static const char *const names[] = {"baton_prefill_step_seconds", "baton_decode_step_seconds"};
    static const char *const help[] = {"Compute time of one step with prompt tokens in it.",
                                       "Compute time of one step without."};

    for (enum bt_role leg = BT_ROLE_PREFILL; leg < BT_LEGS; leg++) {
        if (is_told(n, leg)) {
            bt_prom_head(b, names[leg], BT_PROM_HISTOGRAM, help[leg]);
            bt_prom_hist_render(b, names[leg], NULL, 0, &n->p->step_seconds[leg]);
        }
    }
}

/* What both legs have, with the label `leg`. */
static void legs(const struct bt_node *n, struct bt_buf *b)
{
    static const struct {
        const char *name, *help;
        enum bt_prom_type type;
    } families[] = {
        {"baton_kv_transfer_seconds",
         "From a transfer's first share to its last; leg prefill: as sent, decode: as received.",
         BT_PROM_HISTOGRAM},
        {"baton_kv_transfer_shares",
         "Shares (one page of one layer: one descriptor) of a transfer.", BT_PROM_HISTOGRAM},
        {"baton_prefix_cached_tokens_total",
         "Tokens neither computed (prefill) nor sent here (decode), because the prefix cache had "
         "them.",
         BT_PROM_COUNTER},
        {"baton_attempts_failed_total", "Attempts that this node gave up.", BT_PROM_COUNTER},
    };

    for (unsigned f = 0; f < sizeof families / sizeof families[0]; f++) {
        bt_prom_head(b, families[f].name, families[f].type, families[f].help);
        for (enum bt_role leg = BT_ROLE_PREFILL; leg < BT_LEGS; leg++) {
            struct bt_prom_label label = {"leg", bt_role_name(leg)};
            struct bt_node_leg_numbers x = {0};

            if (!is_told(n, leg)) {
                continue;
            }
            n->legs[leg].numbers(n->legs[leg].arg, &x);
            if (families[f].type == BT_PROM_HISTOGRAM) {
                bt_prom_hist_render(b, families[f].name, &label, 1,
                                    f == 0 ? x.transfer_seconds : x.shares);
            } else {
                bt_prom_u64(b, families[f].name, &label, 1, f == 2 ? x.cached_tokens : x.failures);
            }
        }
    }
    for (enum bt_role leg = BT_ROLE_PREFILL; leg < BT_LEGS; leg++) {
        if (is_told(n, leg)) {
            n->legs[leg].metrics(n->legs[leg].arg, b);
        }
    }
}

static void render_metrics(struct bt_node *n, struct bt_buf *b)
{
    struct bt_engine_snapshot s = bt_engine_thread_snapshot(n->engine);
    struct bt_xfer_stats x;

    bt_xfer_stats(n->xfer, &x);
    page_states(b, &s.pages);
    const struct bt_prom_label shared = {"shared", n->packed->shared ? "true" : "false"};
    bt_prom_head(
        b, "baton_packed_weight_bytes", BT_PROM_GAUGE,
        "Packed weights, besides the mapped model files; shared: in a file that all daemons "
        "of this machine map.");
    bt_prom_u64(b, "baton_packed_weight_bytes", &shared, 1, n->packed->bytes);
    one(b, "baton_requests_waiting", BT_PROM_GAUGE, "Sequences that wait for compute.",
        s.load.n_waiting);
    one(b, "baton_requests_running", BT_PROM_GAUGE, "Sequences in the running batch.",
        s.load.n_running);
    one(b, "baton_prompt_tokens_total", BT_PROM_COUNTER, "Prompt tokens computed.",
        s.n_prefill_tokens);
    one(b, "baton_generated_tokens_total", BT_PROM_COUNTER, "Tokens decoded.", s.n_decode_tokens);
    one(b, "baton_tokens_sampled_by_host_total", BT_PROM_COUNTER,
        "Tokens that the host sampled because the device that samples cannot.", s.n_host_draws);
    one(b, "baton_kv_shares_sent_total", BT_PROM_COUNTER,
        "Page shares (one page of one layer) sent.", x.shares_sent);
    one(b, "baton_kv_shares_received_total", BT_PROM_COUNTER,
        "Page shares (one page of one layer) received and placed.", x.shares_received);
    one(b, "baton_kv_bytes_sent_total", BT_PROM_COUNTER, "Bytes of KV pages sent.", x.bytes_sent);
    one(b, "baton_kv_transfer_failures_total", BT_PROM_COUNTER,
        "Failed connections, sends and receives of KV.", bt_node_transfer_failures(&x));
    one(b, "baton_kv_stale_messages_total", BT_PROM_COUNTER,
        "Page messages dropped: ticket, generation, peer or range did not match.",
        x.drop_unknown + x.drop_generation + x.drop_peer + x.drop_range + x.drop_malformed);
    device_pages(b, &x);
    turned_away(b, &x);
    sealed_threads(b, &s, &x);
    steps(n, b);
    bt_prom_head(b, "baton_batch_tokens", BT_PROM_HISTOGRAM, "Tokens computed in one step.");
    bt_prom_hist_render(b, "baton_batch_tokens", NULL, 0, &n->p->batch_tokens);
    sessions(n, b);
    legs(n, b);
}

static void on_request(struct bt_http_stream *s, const struct bt_http_request *req, void *arg)
{
    struct bt_node *n = arg;
    bool known = strcmp(req->path, "/live") == 0 || strcmp(req->path, "/ready") == 0 ||
                 strcmp(req->path, "/metrics") == 0;

    if (known && strcmp(req->method, "GET") != 0 && strcmp(req->method, "HEAD") != 0) {
        static const struct bt_http_header allow = {"allow", "GET, HEAD"};

        bt_http_reply(s, 405, "text/plain", "method not allowed\n", 19, &allow, 1);
    } else if (strcmp(req->path, "/live") == 0) {
        bt_http_reply(s, 200, "text/plain", "ok\n", 3, NULL, 0);
    } else if (strcmp(req->path, "/ready") == 0) {
        bool ready = node_ready(n);
        const char *text = ready            ? "ready\n"
                           : n->p->draining ? "draining\n"
                                            : "no session with a router\n";

        bt_http_reply(s, ready ? 200 : 503, "text/plain", text, strlen(text), NULL, 0);
    } else if (strcmp(req->path, "/metrics") == 0) {
        struct bt_buf b = {0};

        render_metrics(n, &b);
        bt_http_reply(s, 200, BT_PROM_CONTENT_TYPE, b.data, b.len, NULL, 0);
        bt_buf_fini(&b);
    } else {
        bt_http_reply(s, 404, "text/plain", "not found\n", 10, NULL, 0);
    }
}

void bt_node_health_changed(struct bt_node *n)
{
    if (n->p->grpc == NULL) {
        return;
    }
    enum bt_grpc_health h = node_ready(n) ? BT_GRPC_HEALTH_SERVING : BT_GRPC_HEALTH_NOT_SERVING;

    if (bt_grpc_health_set(n->p->grpc, "baton.session.v1.Session", h) != BT_OK) {
        bt_log_error("health", "out of memory");
    }
}

enum bt_status bt_node_health_start(struct bt_node *n, struct bt_err *err)
{
    struct bt_node_private *p = n->p;
    enum bt_status st = BT_OK;

    if (n->cfg.health == NULL) {
        return st;
    }
    st = bt_grpc_server_create(n->loop, NULL, &p->grpc);
    if (st == BT_OK) {
        st = bt_http_server_create(n->loop,
                                   &(struct bt_http_server_opts){
                                       .listen = n->cfg.health, .on_request = on_request, .arg = n},
                                   &p->http, err);
    }
    if (st != BT_OK) {
        bt_err_prefix(err, "--health");
        return st;
    }
    bt_grpc_server_attach(p->grpc, p->http);
    bt_node_health_changed(n);
    bt_log_info("health", "listening on http://%s", bt_http_server_address(p->http));
    return BT_OK;
}

void bt_node_health_stop(struct bt_node *n)
{
    bt_http_server_close(n->p->http);
    if (n->p->grpc != NULL) {
        bt_grpc_server_destroy(n->p->grpc);
    }
}
