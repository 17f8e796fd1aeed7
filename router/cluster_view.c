/* The state of the cluster as clients see it. Only reads. */

#include "router/cluster_view.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "router/router_int.h"

#define STATUS_ARENA ((size_t)64 << 20)

static const char *hex(struct bt_arena *a, uint64_t v)
{
    char text[17];

    snprintf(text, sizeof text, "%016llx", (unsigned long long)v);
    return bt_arena_strndup(a, text, 16);
}

static bool fill_node(const struct bt_router *r, struct bt_arena *a,
                      const struct bt_rt_node_info *n, struct bt_inf_node *out)
{
    const struct bt_msg_load *l = n->load;
    struct bt_inf_transport *t = bt_arena_alloc(a, l->n_transports * sizeof *t);

    *out = (struct bt_inf_node){
        .name = n->name,
        .role = bt_role_name(n->role),
        .instance = hex(a, n->instance),
        .state = bt_arena_strndup(a, n->state, strlen(n->state)),
        .backend = n->hello->backend,
        .numerics = n->hello->numerics,
        .transfer_address = n->hello->transfer_address,
        .kv_layout = n->hello->kv_layout,
        .fingerprint = hex(a, n->hello->fingerprint),
        .page_tokens = n->hello->page_tokens,
        .pages_free = l->pages_free,
        .pages_cached = l->pages_cached,
        .pages_leased = l->pages_leased,
        .pages_quarantined = l->pages_quarantined,
        .waiting = l->waiting,
        .running = l->running,
        .prefill_tokens_per_s = l->prefill_tokens_per_s,
        .decode_step_ms = l->decode_step_ms,
        .transferred_bytes_total = l->transferred_bytes,
        .local_prefills_total = l->local_prefills,
        .n_transports = l->n_transports,
        .transports = t,
    };
    for (size_t i = 0; t != NULL && i < l->n_transports; i++) {
        const char *peer = bt_rt_core_instance_name(r->core, l->transports[i].peer);

        t[i] = (struct bt_inf_transport){peer != NULL ? peer : hex(a, l->transports[i].peer),
                                         l->transports[i].description};
    }
    return t != NULL && out->instance != NULL && out->state != NULL && out->fingerprint != NULL;
}

enum bt_status bt_cluster_status(const struct bt_router *r, struct bt_arena *arena,
                                 struct bt_inf_cluster *out)
{
    const struct bt_rt_stats *s = bt_rt_core_stats(r->core);
    struct bt_rt_node_info n;
    size_t count = 0;

    for (uint32_t pos = 0; bt_rt_core_node(r->core, &pos, &n);) {
        count++;
    }
    struct bt_inf_node *nodes = bt_arena_alloc(arena, count * sizeof *nodes);

    *out = (struct bt_inf_cluster){.model = r->model_name,
                                   .router_instance = hex(arena, r->instance),
                                   .local_prefill = r->local_prefill,
                                   .nodes = nodes,
                                   .requests_running = s->running,
                                   .requests_waiting = s->waiting,
                                   .prompt_tokens_total = r->metrics.prompt_tokens,
                                   .generated_tokens_total = r->metrics.generated_tokens};
    for (unsigned i = 0; i < BT_FINISHEDS; i++) {
        out->requests_total += r->metrics.finished[i];
    }
    if (nodes == NULL || out->router_instance == NULL) {
        return BT_ERR_NOMEM;
    }
    for (uint32_t pos = 0; bt_rt_core_node(r->core, &pos, &n);) {
        if (!fill_node(r, arena, &n, &nodes[out->n_nodes++])) {
            return BT_ERR_NOMEM;
        }
    }
    return BT_OK;
}

static void put_text(struct bt_buf *b, const char *name, const char *value)
{
    bt_buf_addf(b, "\"%s\":", name);
    bt_buf_add_json_str(b, value, strlen(value));
    bt_buf_addc(b, ',');
}

/* JSON has no infinity. */
static double finite_or_0(double v)
{
    return isfinite(v) ? v : 0;
}

static void put_node(struct bt_buf *b, const struct bt_inf_node *n)
{
    bt_buf_addc(b, '{');
    put_text(b, "name", n->name);
    put_text(b, "role", n->role);
    put_text(b, "instance", n->instance);
    put_text(b, "state", n->state);
    put_text(b, "backend", n->backend);
    put_text(b, "numerics", n->numerics);
    put_text(b, "transfer_address", n->transfer_address);
    put_text(b, "kv_layout", n->kv_layout);
    put_text(b, "fingerprint", n->fingerprint);
    bt_buf_addf(
        b,
        "\"page_tokens\":%u,\"pages\":{\"free\":%u,\"cached\":%u,\"leased\":%u,\"quarantined\":%u},"
        "\"waiting\":%u,\"running\":%u,\"prefill_tokens_per_s\":%.1f,\"decode_step_ms\":%.3f,"
        "\"transferred_bytes_total\":%llu,\"local_prefills_total\":%llu,\"transports\":[",
        n->page_tokens, n->pages_free, n->pages_cached, n->pages_leased, n->pages_quarantined,
        n->waiting, n->running, finite_or_0(n->prefill_tokens_per_s),
        finite_or_0(n->decode_step_ms), (unsigned long long)n->transferred_bytes_total,
        (unsigned long long)n->local_prefills_total);
    for (size_t i = 0; i < n->n_transports; i++) {
        bt_buf_adds(b, i > 0 ? ",{" : "{");
        put_text(b, "peer", n->transports[i].peer);
        bt_buf_adds(b, "\"description\":");
        bt_buf_add_json_str(b, n->transports[i].description, strlen(n->transports[i].description));
        bt_buf_addc(b, '}');
    }
    bt_buf_adds(b, "],\"transport\":");
    const char *first = n->n_transports > 0 ? n->transports[0].description : "";

    bt_buf_add_json_str(b, first, strlen(first));
    bt_buf_addc(b, '}');
}

enum bt_status bt_cluster_json(const struct bt_router *r, struct bt_buf *out)
{
    struct bt_arena a;
    struct bt_inf_cluster c;

    bt_arena_init(&a, STATUS_ARENA);
    enum bt_status st = bt_cluster_status(r, &a, &c);

    if (st == BT_OK) {
        bt_buf_addc(out, '{');
        put_text(out, "model", c.model);
        put_text(out, "router_instance", c.router_instance);
        put_text(out, "local_prefill", c.local_prefill);
        bt_buf_addf(out,
                    "\"ready\":%s,\"draining\":%s,\"context\":%u,\"requests_running\":%u,"
                    "\"requests_waiting\":%u,\"requests_total\":%llu,\"prompt_tokens_total\":%llu,"
                    "\"generated_tokens_total\":%llu,",
                    bt_rt_core_ready(r->core) ? "true" : "false", r->draining ? "true" : "false",
                    bt_rt_core_context(r->core), c.requests_running, c.requests_waiting,
                    (unsigned long long)c.requests_total, (unsigned long long)c.prompt_tokens_total,
                    (unsigned long long)c.generated_tokens_total);
        bt_buf_adds(out, "\"nodes\":[");
        for (size_t i = 0; i < c.n_nodes; i++) {
            bt_buf_adds(out, i > 0 ? "," : "");
            put_node(out, &c.nodes[i]);
        }
        bt_buf_adds(out, "]}");
        st = out->failed ? BT_ERR_NOMEM : BT_OK;
    }
    bt_arena_fini(&a);
    return st;
}
