/* Prometheus text of the router: its own numbers, and every node's from its last load report. */

#include "router/metrics.h"

#include <string.h>
#include "router/request_log.h"
#include "router/router_core.h"

static const char *const refusal_names[] = {
    "invalid", "unauthenticated", "queue_full", "queue_timeout", "max_ttft", "no_node", "draining"};
static const char *const finished_names[] = {"stop", "length", "cancelled", "error"};

enum bt_status bt_router_metrics_init(struct bt_router_metrics *m, const char *buckets_ttft,
                                      const char *buckets_itl, const char *buckets_request,
                                      struct bt_err *err)
{
    struct {
        struct bt_prom_hist *h;
        const char *buckets, *option;
    } list[] = {{&m->ttft, buckets_ttft, "--buckets-ttft"},
                {&m->itl, buckets_itl, "--buckets-itl"},
                {&m->request, buckets_request, "--buckets-request"},
                {&m->queue, buckets_ttft, "--buckets-ttft"},
                {&m->prefill, buckets_ttft, "--buckets-ttft"},
                {&m->transfer, buckets_ttft, "--buckets-ttft"}};

    *m = (struct bt_router_metrics){0};
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        enum bt_status st = bt_prom_hist_init_text(list[i].h, list[i].buckets, err);

        if (st != BT_OK) {
            (void)bt_err_prefix(err, "%s", list[i].option);
            return st;
        }
    }
    return BT_OK;
}

static void hist(struct bt_buf *b, const char *name, const char *help, const struct bt_prom_hist *h)
{
    bt_prom_head(b, name, BT_PROM_HISTOGRAM, help);
    bt_prom_hist_render(b, name, NULL, 0, h);
}

static void number(struct bt_buf *b, const char *name, enum bt_prom_type type, const char *help,
                   uint64_t v)
{
    bt_prom_head(b, name, type, help);
    bt_prom_u64(b, name, NULL, 0, v);
}

/* One number of every node, from the load report. */
struct node_metric {
    const char *name, *help;
    enum bt_prom_type type;
    int role; /* enum bt_role; -1: both */
    uint64_t (*get)(const struct bt_msg_load *l);
};

static uint64_t get_waiting(const struct bt_msg_load *l)
{
    return l->waiting;
}
static uint64_t get_waiting_tokens(const struct bt_msg_load *l)
{
    return l->waiting_tokens;
}
static uint64_t get_running(const struct bt_msg_load *l)
{
    return l->running;
}
static uint64_t get_held(const struct bt_msg_load *l)
{
    return l->held;
}
static uint64_t get_short(const struct bt_msg_load *l)
{
    return l->pages_short;
}
static uint64_t get_landing(const struct bt_msg_load *l)
{
    return l->landing;
}
static uint64_t get_tokens(const struct bt_msg_load *l)
{
    return l->transferred_tokens;
}
static uint64_t get_bytes(const struct bt_msg_load *l)
{
    return l->transferred_bytes;
}
static uint64_t get_failures(const struct bt_msg_load *l)
{
    return l->transfer_failures;
}
static uint64_t get_stale(const struct bt_msg_load *l)
{
    return l->stale_messages;
}

static const struct node_metric node_metrics[] = {
    {"baton_node_waiting", "Sequences that wait at the node.", BT_PROM_GAUGE, -1, get_waiting},
    {"baton_node_waiting_tokens", "Prompt tokens that wait at the node.", BT_PROM_GAUGE, -1,
     get_waiting_tokens},
    {"baton_node_running", "Sequences in the node's batch.", BT_PROM_GAUGE, -1, get_running},
    {"baton_node_held", "Computed prompts that wait for their hand-off.", BT_PROM_GAUGE,
     BT_ROLE_PREFILL, get_held},
    {"baton_node_pages_short", "1 while a prompt waits for pages that others hold.", BT_PROM_GAUGE,
     -1, get_short},
    {"baton_node_landing", "Sequences whose pages arrive.", BT_PROM_GAUGE, BT_ROLE_DECODE,
     get_landing},
    {"baton_kv_transferred_tokens_total", "Tokens whose KV arrived from a prefill node.",
     BT_PROM_COUNTER, BT_ROLE_DECODE, get_tokens},
    {"baton_kv_transferred_bytes_total", "KV bytes that arrived from prefill nodes.",
     BT_PROM_COUNTER, BT_ROLE_DECODE, get_bytes},
    {"baton_kv_transfer_failures_total", "Transfers that did not complete.", BT_PROM_COUNTER, -1,
     get_failures},
    {"baton_stale_messages_total",
     "Messages dropped for a ticket, generation or instance that did not match.", BT_PROM_COUNTER,
     -1, get_stale},
};

static void render_nodes(const struct bt_rt_core *core, struct bt_buf *b)
{
    struct bt_rt_node_info n;

    for (size_t i = 0; i < sizeof node_metrics / sizeof node_metrics[0]; i++) {
        const struct node_metric *m = &node_metrics[i];

        bt_prom_head(b, m->name, m->type, m->help);
        for (uint32_t pos = 0; bt_rt_core_node(core, &pos, &n);) {
            if (m->role < 0 || bt_role_has(n.role, (enum bt_role)m->role)) {
                struct bt_prom_label labels[] = {{"node", n.name}, {"role", bt_role_name(n.role)}};

                bt_prom_u64(b, m->name, labels, 2, m->get(n.load));
            }
        }
    }
    bt_prom_head(b, "baton_kv_pages", BT_PROM_GAUGE, "KV pages by state.");
    for (uint32_t pos = 0; bt_rt_core_node(core, &pos, &n);) {
        const uint32_t pages[] = {n.load->pages_free, n.load->pages_cached, n.load->pages_leased,
                                  n.load->pages_quarantined};
        static const char *const states[] = {"free", "cached", "leased", "quarantined"};

        for (unsigned i = 0; i < 4; i++) {
            struct bt_prom_label labels[] = {
                {"node", n.name}, {"role", bt_role_name(n.role)}, {"state", states[i]}};

            bt_prom_u64(b, "baton_kv_pages", labels, 3, pages[i]);
        }
    }
    bt_prom_head(b, "baton_node_decode_step_seconds", BT_PROM_GAUGE,
                 "Recent time of one decode step.");
    for (uint32_t pos = 0; bt_rt_core_node(core, &pos, &n);) {
        if (bt_role_has(n.role, BT_ROLE_DECODE)) {
            struct bt_prom_label labels[] = {{"node", n.name}, {"role", bt_role_name(n.role)}};

            bt_prom_f64(b, "baton_node_decode_step_seconds", labels, 2,
                        n.load->decode_step_ms / 1e3);
        }
    }
}

static void render_sessions(const struct bt_rt_core *core, struct bt_buf *b)
{
    struct bt_rt_node_info n;
    struct bt_rt_gone_info g;

    bt_prom_head(b, "baton_session_up", BT_PROM_GAUGE,
                 "1 while the node's session is up, 0 for minutes after its loss.");
    for (uint32_t pos = 0; bt_rt_core_node(core, &pos, &n);) {
        struct bt_prom_label labels[] = {{"node", n.name}, {"role", bt_role_name(n.role)}};

        bt_prom_u64(b, "baton_session_up", labels, 2, 1);
    }
    for (uint32_t pos = 0; bt_rt_core_gone(core, &pos, &g);) {
        struct bt_prom_label labels[] = {{"node", g.name}, {"role", bt_role_name(g.role)}};

        bt_prom_u64(b, "baton_session_up", labels, 2, 0);
    }
}

static void render_request_log(const struct bt_request_log *log, struct bt_buf *b)
{
    struct bt_request_log_stats s = bt_request_log_stats(log);

    number(b, "baton_request_log_lines_total", BT_PROM_COUNTER, "Lines in the request log.",
           s.written);
    number(b, "baton_request_log_lost_total", BT_PROM_COUNTER,
           "Lines that did not get into the request log: disk too slow or failing.", s.lost);
}

void bt_router_metrics_render(const struct bt_router_metrics *m, const struct bt_rt_core *core,
                              const struct bt_request_log *log, struct bt_buf *b)
{
    const struct bt_rt_stats *s = bt_rt_core_stats(core);

    hist(b, "baton_time_to_first_token_seconds", "From the request's arrival to its first token.",
         &m->ttft);
    hist(b, "baton_inter_token_latency_seconds", "Between tokens of one answer.", &m->itl);
    hist(b, "baton_request_seconds", "From the request's arrival to its end.", &m->request);
    hist(b, "baton_queue_seconds", "Waiting for a pair, and at the prefill node.", &m->queue);
    hist(b, "baton_prefill_seconds", "Computing the prompt.", &m->prefill);
    hist(b, "baton_kv_transfer_seconds",
         "From a sequence's first page to its last, at the receiver.", &m->transfer);
    bt_prom_head(b, "baton_requests_total", BT_PROM_COUNTER,
                 "Answers by how they ended; each choice counts.");
    for (unsigned i = 0; i < BT_FINISHEDS; i++) {
        bt_prom_u64(b, "baton_requests_total",
                    &(struct bt_prom_label){"finish_reason", finished_names[i]}, 1, m->finished[i]);
    }
    bt_prom_head(b, "baton_requests_refused_total", BT_PROM_COUNTER,
                 "Requests refused, by reason.");
    for (unsigned i = 0; i < BT_REFUSALS; i++) {
        bt_prom_u64(b, "baton_requests_refused_total",
                    &(struct bt_prom_label){"reason", refusal_names[i]}, 1, m->refused[i]);
    }
    number(b, "baton_requests_migrated_total", BT_PROM_COUNTER,
           "Attempts that began again on other nodes.", s->migrated);
    number(b, "baton_prompts_resent_total", BT_PROM_COUNTER,
           "Attempts whose prompt was sent again without being computed again.", s->resent);
    number(b, "baton_local_prefill_total", BT_PROM_COUNTER,
           "Attempts whose prompt the decode node was to compute itself.", s->local);
    number(b, "baton_token_mismatch_total", BT_PROM_COUNTER,
           "Copies of a token that differed from the first one: a node computes wrongly.",
           s->token_mismatches);
    bt_prom_head(
        b, "baton_attempts_total", BT_PROM_COUNTER,
        "Attempts by the way of their KV: local (one node does both), transfer (between two), "
        "none (one token, from the prefill node).");
    bt_prom_u64(b, "baton_attempts_total", &(struct bt_prom_label){"kv", "local"}, 1, s->local);
    bt_prom_u64(b, "baton_attempts_total", &(struct bt_prom_label){"kv", "transfer"}, 1, s->pairs);
    bt_prom_u64(b, "baton_attempts_total", &(struct bt_prom_label){"kv", "none"}, 1,
                s->attempts - s->local - s->pairs);
    number(b, "baton_requests_running", BT_PROM_GAUGE, "Sequences on a pair.", s->running);
    number(b, "baton_requests_waiting", BT_PROM_GAUGE, "Sequences that wait for a pair.",
           s->waiting);
    number(b, "baton_prompt_tokens_total", BT_PROM_COUNTER, "Prompt tokens of answered sequences.",
           m->prompt_tokens);
    number(b, "baton_generated_tokens_total", BT_PROM_COUNTER, "Tokens generated.",
           m->generated_tokens);
    number(b, "baton_prefix_cached_tokens_total", BT_PROM_COUNTER,
           "Prompt tokens whose computation was skipped.", m->cached_tokens);
    number(b, "baton_session_stale_messages_total", BT_PROM_COUNTER,
           "Session messages of attempts that were over.", s->stale);
    if (log != NULL) {
        render_request_log(log, b);
    }
    render_sessions(core, b);
    render_nodes(core, b);
}
