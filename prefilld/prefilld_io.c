/* prefilld's messages: what comes in goes to the core, what the core decides goes out. Decides
 * nothing itself. */

#include "prefilld/prefilld_io.h"

#include <string.h>
#include "base/assert.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "net/loop.h"
#include "prefilld/prefilld_core.h"

#define PEERS_MAX    256u
#define RECONNECT_NS (200 * BT_NS_PER_MS)

/* What a router last said about peers. */
struct peer_list {
    struct bt_msg_peer *peers; /* one block with the strings */
    size_t n;
};

/* Answers to actions, given to the core after its list was carried out. */
struct answer {
    enum {
        ANSWER_CONNECTING,
        ANSWER_CONNECT_FAILED,
        ANSWER_PUSH_FAILED,
        ANSWER_ENGINE_FAILED
    } kind;
    uint64_t id, conn;
    enum bt_status st;
    struct bt_ticket ticket; /* PUSH_FAILED */
};

struct bt_prefilld {
    struct bt_node *node;
    struct bt_pf_core *core;
    struct peer_list lists[BT_ROUTERS_MAX];
    struct answer *answers;
    size_t n_answers, answers_cap;
    struct bt_log_limit not_dialled;
    uint64_t n_layers; /* that the engine had computed when the core was told last */
    struct bt_prom_hist prefill_seconds, queue_seconds, post_seconds, move_seconds, shares;
};

static uint64_t now_ns(const struct bt_prefilld *p)
{
    return bt_net_loop_now(p->node->loop);
}

/* ---- actions out ---- */

static void answer(struct bt_prefilld *p, struct answer a)
{
    p->answers = bt_grow(p->answers, p->n_answers, &p->answers_cap, sizeof *p->answers);
    p->answers[p->n_answers++] = a;
}

static void do_submit(struct bt_prefilld *p, const struct bt_pf_action *a)
{
    const struct bt_msg_submit *s = a->submit;
    enum bt_status st =
        bt_engine_thread_submit(p->node->engine, a->job,
                                &(struct bt_engine_req){.tokens = s->tokens,
                                                        .n_tokens = (uint32_t)s->n_tokens,
                                                        .n_prompt = s->n_prompt,
                                                        .sampling = &s->sampling,
                                                        .hold = true,
                                                        .prompt_logprobs = s->prompt_logprobs});

    if (st != BT_OK) {
        answer(p, (struct answer){.kind = ANSWER_ENGINE_FAILED, .id = a->job, .st = st});
    }
}

static void do_push(struct bt_prefilld *p, const struct bt_pf_action *a)
{
    const struct bt_engine_layout *l = p->node->layout;
    uint32_t g = a->push.group;
    struct bt_xfer_push x = {
        .generation = a->generation,
        .peer = a->peer,
        .tag = a->job,
        .group = g,
        .layer = a->push.layer,
        .n_layers = 1,
        .layer_stride = l->groups[g].layer_stride,
        .page_stride = l->groups[g].page_stride,
        .page_layer_bytes = l->groups[g].page_layer_bytes,
        .base = l->groups[g].base + (size_t)a->push.layer * l->groups[g].layer_stride,
        .n_pages = a->push.n_pages,
        .first_page = a->push.first,
        .page_ids = a->push.page_ids,
    };

    memcpy(x.ticket, a->ticket.b, sizeof x.ticket);
    enum bt_status st = bt_xfer_push(p->node->xfer, &x);

    if (st != BT_OK) {
        answer(p, (struct answer){
                      .kind = ANSWER_PUSH_FAILED, .id = a->job, .st = st, .ticket = a->ticket});
    }
}

static const char *no_connection(enum bt_status st)
{
    return st == BT_ERR_UNSUPPORTED
               ? "its gate token was not told: a router older than this node does not pass it on"
               : bt_status_str(st);
}

static void do_connect(struct bt_prefilld *p, const struct bt_pf_action *a)
{
    uint64_t conn = 0;
    enum bt_status st =
        bt_gate_token_is_set(&a->gate_token)
            ? bt_xfer_connect(p->node->xfer, a->address, a->instance, &a->gate_token, &conn)
            : BT_ERR_UNSUPPORTED;

    if (st != BT_OK) {
        uint32_t n_held;

        if (bt_log_may(&p->not_dialled, now_ns(p), &n_held)) {
            bt_log_warn("prefilld", "cannot dial decode node at %s: %s (%u more before it)",
                        a->address, no_connection(st), n_held);
        }
        answer(p, (struct answer){.kind = ANSWER_CONNECT_FAILED, .id = a->instance, .st = st});
        return;
    }
    answer(p, (struct answer){.kind = ANSWER_CONNECTING, .id = a->instance, .conn = conn});
}

static void do_output(struct bt_prefilld *p, const struct bt_pf_action *a)
{
    if (a->output.has_stats && !a->again) {
        bt_prom_hist_observe(&p->prefill_seconds, (double)a->output.stats.prefill_ns / 1e9);
        bt_prom_hist_observe(&p->queue_seconds, (double)a->output.stats.queue_ns / 1e9);
    }
    bt_node_output(p->node, a->router, &a->output);
}

static void do_action(struct bt_prefilld *p, const struct bt_pf_action *a)
{
    char t[9];

    switch (a->kind) {
    case BT_PF_ENGINE_SUBMIT:
        do_submit(p, a);
        break;
    case BT_PF_ENGINE_CANCEL:
        bt_engine_thread_cancel(p->node->engine, a->job);
        break;
    case BT_PF_ENGINE_RELEASE:
        bt_engine_thread_release(p->node->engine, a->job);
        break;
    case BT_PF_PUSH:
        do_push(p, a);
        break;
    case BT_PF_PUSH_CANCEL:
        bt_node_must(bt_xfer_push_cancel(p->node->xfer, a->ticket.b));
        break;
    case BT_PF_CONTROL:
        bt_node_control(p->node, a->peer, &a->control);
        break;
    case BT_PF_CONNECT:
        do_connect(p, a);
        break;
    case BT_PF_DISCONNECT:
        bt_node_must(bt_xfer_disconnect(p->node->xfer, a->peer));
        break;
    case BT_PF_OUTPUT:
        do_output(p, a);
        break;
    case BT_PF_ATTEMPT_END:
        BT_LOG(BT_LOG_DEBUG, "prefilld", a->request_id, "ticket %s ends: %s",
               bt_ticket_text(&a->end.ticket, t), a->end.text);
        bt_node_attempt_end(p->node, a->router, &a->end);
        break;
    case BT_PF_PEER_STATE:
        bt_router_link_send_all(p->node->link,
                                &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_PEER_STATE,
                                                         .peer_state = a->peer_state});
        break;
    case BT_PF_MOVED:
        bt_prom_hist_observe(&p->post_seconds, (double)a->moved.post_ns / 1e9);
        bt_prom_hist_observe(&p->move_seconds, (double)a->moved.move_ns / 1e9);
        bt_prom_hist_observe(&p->shares, (double)a->moved.n_shares);
        break;
    case BT_PF_ADOPTED:
        bt_log_debug("prefilld", "ticket %s: what was computed for an attempt before is sent again",
                     bt_ticket_text(&a->ticket, t));
        break;
    }
}

static void run_list(struct bt_prefilld *p)
{
    const struct bt_pf_actions *list = bt_pf_core_actions(p->core);

    for (size_t i = 0; i < list->n; i++) {
        do_action(p, &list->items[i]);
    }
}

/* Carries out the core's list, then the lists that its answers make. */
static void run(struct bt_prefilld *p)
{
    run_list(p);
    for (size_t i = 0; i < p->n_answers; i++) {
        struct answer a = p->answers[i];
        uint64_t now = now_ns(p);

        switch (a.kind) {
        case ANSWER_CONNECTING:
            bt_pf_on_connecting(p->core, now, a.id, a.conn);
            break;
        case ANSWER_CONNECT_FAILED:
            bt_pf_on_connect_failed(p->core, now, a.id, no_connection(a.st));
            break;
        case ANSWER_PUSH_FAILED:
            bt_pf_on_pushed(p->core, now, a.id, &a.ticket, a.st);
            break;
        case ANSWER_ENGINE_FAILED:
            bt_pf_on_engine_failed(p->core, now, a.id, a.st, bt_status_str(a.st));
            break;
        }
        run_list(p);
    }
    p->n_answers = 0;
}

/* ---- events in ---- */

static void on_engine(void *arg, const struct bt_engine_ev *ev)
{
    struct bt_prefilld *p = arg;
    uint64_t now = now_ns(p);

    switch (ev->kind) {
    case BT_ENGINE_EV_FAILED:
        bt_pf_on_engine_failed(p->core, now, ev->job, ev->status, ev->text);
        break;
    case BT_ENGINE_EV_STARTED:
        bt_pf_on_engine_started(p->core, now, ev->job);
        if (ev->n_cached > 0) {
            run(p);
            bt_pf_on_engine_cached(p->core, now, ev->job, ev->n_cached);
        }
        break;
    case BT_ENGINE_EV_PAGES:
        bt_pf_on_engine_pages(p->core, now, ev->job, ev->pages.group, ev->pages.layer,
                              ev->pages.first, ev->pages.end, ev->pages.page_ids);
        break;
    case BT_ENGINE_EV_TOKEN:
        bt_pf_on_engine_token(p->core, now, ev->job, ev->token.index, &ev->token.sampled,
                              (uint32_t)ev->token.finish);
        break;
    case BT_ENGINE_EV_PROMPT_LOGPROBS:
        bt_pf_on_engine_prompt_logprobs(p->core, now, ev->job, ev->prompt_logprobs.first,
                                        ev->prompt_logprobs.list, ev->prompt_logprobs.n);
        break;
    case BT_ENGINE_EV_PREEMPTED:
        bt_pf_on_engine_preempted(p->core, now, ev->job);
        break;
    case BT_ENGINE_EV_SHORT:
        bt_pf_on_engine_short(p->core, now);
        break;
    case BT_ENGINE_EV_LANDED:
    case BT_ENGINE_EV_STEP:
    case BT_ENGINE_EV_BROKEN:
    case BT_ENGINE_EV_CACHE:
        return;
    }
    run(p);
}

static void on_control(void *arg, uint64_t conn, const struct bt_control *m)
{
    struct bt_prefilld *p = arg;

    bt_pf_on_control(p->core, now_ns(p), conn, m);
    run(p);
}

static void on_xfer(void *arg, const struct bt_xfer_event *ev)
{
    struct bt_prefilld *p = arg;
    uint64_t now = now_ns(p);
    struct bt_ticket t;

    memcpy(t.b, ev->ticket, sizeof t.b);
    switch (ev->kind) {
    case BT_XFER_PEER_UP:
        bt_pf_on_peer_up(p->core, now, ev->peer);
        break;
    case BT_XFER_PEER_DOWN:
        bt_pf_on_peer_down(p->core, now, ev->peer, ev->text);
        break;
    case BT_XFER_PUSHED:
        bt_pf_count_push(p->core, now, ev->tag, &t, ev->post_ns, ev->move_ns);
        bt_pf_on_pushed(p->core, now, ev->tag, &t, ev->status);
        break;
    case BT_XFER_CTRL:
    case BT_XFER_LANDED:
    case BT_XFER_LAND_FULL:
    case BT_XFER_LAND_CLOSED:
        return; /* nothing lands on a prefill node */
    }
    run(p);
}

static bool peer_list_set(struct peer_list *l, const struct bt_msg_peer *peers, size_t n)
{
    size_t bytes = n * sizeof *peers;

    for (size_t i = 0; i < n; i++) {
        bytes += strlen(peers[i].address) + strlen(peers[i].name) + 2;
    }
    struct bt_msg_peer *copy = bt_alloc(bytes);

    if (copy == NULL) {
        return false;
    }
    char *text = (char *)(copy + n);

    for (size_t i = 0; i < n; i++) {
        size_t address = strlen(peers[i].address) + 1;
        size_t name = strlen(peers[i].name) + 1;

        memcpy(text, peers[i].address, address);
        memcpy(text + address, peers[i].name, name);
        copy[i] = peers[i];
        copy[i].address = text;
        copy[i].name = text + address;
        text += address + name;
    }
    bt_free(l->peers);
    *l = (struct peer_list){copy, n};
    return true;
}

/* The core gets the union of what all routers allow. */
static void update_peers(struct bt_prefilld *p)
{
    struct bt_msg_peer all[PEERS_MAX];
    size_t n = 0;

    for (uint32_t r = 0; r < BT_ROUTERS_MAX; r++) {
        for (size_t i = 0; i < p->lists[r].n && n < PEERS_MAX; i++) {
            size_t k = 0;

            while (k < n && all[k].instance != p->lists[r].peers[i].instance) {
                k++;
            }
            if (k == n) {
                all[n++] = p->lists[r].peers[i];
            } else if (!bt_gate_token_is_set(&all[k].gate_token)) {
                all[k] = p->lists[r].peers[i]; /* this router may know more */
            }
        }
    }
    bt_pf_on_peers(p->core, now_ns(p), all, n);
    run(p);
}

static void on_router(void *arg, uint32_t router, const struct bt_from_router *m)
{
    struct bt_prefilld *p = arg;

    switch (m->kind) {
    case BT_FROM_ROUTER_SUBMIT:
        bt_pf_on_submit(p->core, now_ns(p), router, &m->submit);
        run(p);
        break;
    case BT_FROM_ROUTER_CANCEL:
        bt_pf_on_cancel(p->core, now_ns(p), router, &m->cancel.ticket, m->cancel.keep);
        run(p);
        break;
    case BT_FROM_ROUTER_PEERS:
        if (!peer_list_set(&p->lists[router], m->peers.peers, m->peers.n)) {
            bt_log_error("prefilld", "out of memory: peer list of a router not taken");
            return;
        }
        update_peers(p);
        break;
    case BT_FROM_ROUTER_WELCOME:
    case BT_FROM_ROUTER_HEARTBEAT:
    case BT_FROM_ROUTER_DRAIN:
    case BT_FROM_ROUTER_SET_ROLE:
        break;
    }
}

static void on_router_lost(void *arg, uint32_t router)
{
    struct bt_prefilld *p = arg;

    bt_pf_on_router_lost(p->core, now_ns(p), router);
    run(p);
    bt_free(p->lists[router].peers);
    p->lists[router] = (struct peer_list){0};
    update_peers(p);
}

static void on_tick(void *arg, uint64_t now)
{
    struct bt_prefilld *p = arg;
    uint64_t n_layers = bt_engine_thread_layers(p->node->engine);

    if (n_layers != p->n_layers) {
        p->n_layers = n_layers;
        bt_pf_on_engine_alive(p->core, now);
        run(p);
    }
    bt_pf_on_tick(p->core, now);
    run(p);
}

static void give_back(void *arg)
{
    struct bt_prefilld *p = arg;

    bt_pf_on_give_back(p->core, now_ns(p));
    run(p);
}

static void resume(void *arg)
{
    struct bt_prefilld *p = arg;

    bt_pf_on_resume(p->core);
}

static uint32_t jobs(void *arg)
{
    struct bt_prefilld *p = arg;

    return bt_pf_core_jobs(p->core);
}

static void load(void *arg, struct bt_msg_load *out)
{
    struct bt_prefilld *p = arg;

    out->stale_messages += bt_pf_core_stats(p->core)->stale;
}

static void metrics(void *arg, struct bt_buf *out)
{
    struct bt_prefilld *p = arg;
    const struct bt_pf_stats *s = bt_pf_core_stats(p->core);

    bt_prom_head(out, "baton_prefill_seconds", BT_PROM_HISTOGRAM,
                 "From the first chunk to the first token.");
    bt_prom_hist_render(out, "baton_prefill_seconds", NULL, 0, &p->prefill_seconds);
    bt_prom_head(out, "baton_queue_seconds", BT_PROM_HISTOGRAM, "From submit to the first chunk.");
    bt_prom_hist_render(out, "baton_queue_seconds", NULL, 0, &p->queue_seconds);
    bt_prom_head(out, "baton_kv_transfer_post_seconds", BT_PROM_HISTOGRAM,
                 "Time spent handing the shares of one transfer to the transport.");
    bt_prom_hist_render(out, "baton_kv_transfer_post_seconds", NULL, 0, &p->post_seconds);
    bt_prom_head(out, "baton_handoffs_total", BT_PROM_COUNTER, "Hand-offs sent to decode nodes.");
    bt_prom_u64(out, "baton_handoffs_total", NULL, 0, s->handoffs);
    bt_prom_head(out, "baton_prompts_resent_total", BT_PROM_COUNTER,
                 "Prompts sent to another decode node, or again, without being computed again.");
    bt_prom_u64(out, "baton_prompts_resent_total", NULL, 0, s->resent);
    bt_prom_head(out, "baton_prompts_kept", BT_PROM_GAUGE,
                 "Prompts whose decode node failed, kept for another attempt.");
    bt_prom_u64(out, "baton_prompts_kept", NULL, 0, bt_pf_core_kept(p->core));
    bt_prom_head(out, "baton_prompts_kept_dropped_total", BT_PROM_COUNTER,
                 "Kept prompts given up: no attempt came in time, or others needed their room.");
    bt_prom_u64(out, "baton_prompts_kept_dropped_total",
                &(struct bt_prom_label){"reason", "expired"}, 1, s->keep_expired);
    bt_prom_u64(out, "baton_prompts_kept_dropped_total",
                &(struct bt_prom_label){"reason", "evicted"}, 1, s->keep_evicted);
}

static void numbers(void *arg, struct bt_node_leg_numbers *out)
{
    struct bt_prefilld *p = arg;
    const struct bt_pf_stats *s = bt_pf_core_stats(p->core);

    *out =
        (struct bt_node_leg_numbers){&p->move_seconds, &p->shares, s->cached_tokens, s->failures};
}

/* ---- life ---- */

static void on_ready(void *arg, struct bt_node *n)
{
    struct bt_prefilld *p = arg;
    uint64_t quarter = n->cfg.transfer_deadline / 4;
    struct bt_pf_opts o = {
        .max_jobs = n->cfg.max_jobs,
        .first_slot = bt_node_first_slot(n, BT_ROLE_PREFILL),
        .peers_max = PEERS_MAX,
        .n_groups = n->layout->n_groups,
        .page_tokens = n->cfg.page_tokens,
        .context = n->model->context,
        .reconnect_ns = RECONNECT_NS,
        .unreachable_ns = n->cfg.lease,
        .grant_ns = n->cfg.transfer_deadline,
        .alive_ns = n->cfg.heartbeat < quarter ? n->cfg.heartbeat : quarter,
        .keep_ns = n->cfg.lease,
    };

    for (uint32_t g = 0; g < o.n_groups; g++) {
        o.n_layers[g] = n->layout->groups[g].n_layers;
        o.window[g] = n->layout->groups[g].window;
    }
    p->node = n;
    bt_node_hist_init(n, &p->prefill_seconds);
    bt_node_hist_init(n, &p->queue_seconds);
    bt_node_hist_init(n, &p->post_seconds);
    bt_node_hist_init(n, &p->move_seconds);
    bt_node_hist_init_shares(&p->shares);
    enum bt_status st = bt_pf_core_create(&o, &p->core);

    BT_ASSERT(st == BT_OK); /* at start, before anything was promised */
}

enum bt_status bt_prefilld_create(struct bt_prefilld **out)
{
    struct bt_prefilld *p = bt_calloc(1, sizeof *p);

    if (p == NULL) {
        return BT_ERR_NOMEM;
    }
    *out = p;
    return BT_OK;
}

void bt_prefilld_destroy(struct bt_prefilld *p)
{
    if (p == NULL) {
        return;
    }
    for (uint32_t i = 0; i < BT_ROUTERS_MAX; i++) {
        bt_free(p->lists[i].peers);
    }
    bt_pf_core_destroy(p->core);
    bt_free(p->answers);
    bt_free(p);
}

struct bt_node_hooks bt_prefilld_hooks(struct bt_prefilld *p)
{
    return (struct bt_node_hooks){
        .arg = p,
        .on_ready = on_ready,
        .on_engine = on_engine,
        .on_xfer = on_xfer,
        .on_control = on_control,
        .on_router = on_router,
        .on_router_lost = on_router_lost,
        .on_tick = on_tick,
        .give_back = give_back,
        .resume = resume,
        .jobs = jobs,
        .load = load,
        .metrics = metrics,
        .numbers = numbers,
    };
}
