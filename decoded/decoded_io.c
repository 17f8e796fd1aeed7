/* decoded's messages: what comes in goes to the core, what the core decides goes out. Decides
 * nothing itself. */

#include "decoded/decoded_io.h"

#include <string.h>
#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"
#include "decoded/decoded_core.h"
#include "net/loop.h"

#define PARKED_MAX 1024u

struct bt_decoded {
    struct bt_node *node;
    struct bt_dc_core *core;
    struct bt_prom_hist transfer_seconds, shares;
};

static uint64_t now_ns(const struct bt_decoded *d)
{
    return bt_net_loop_now(d->node->loop);
}

static void run(struct bt_decoded *d);

/* ---- actions out ---- */

/* The engine or the transfer room did not take it: the core hears of it as a failure of the job. */
static void fail_job(struct bt_decoded *d, uint64_t job, enum bt_status st, const char *what)
{
    bt_dc_on_engine_failed(d->core, now_ns(d), job, st, what);
    run(d);
}

static enum bt_status do_engine(struct bt_decoded *d, const struct bt_dc_action *a)
{
    const struct bt_engine_req r = {.tokens = a->request->tokens,
                                    .n_tokens = a->request->n_tokens,
                                    .n_prompt = a->request->n_prompt,
                                    .sampling = &a->request->sampling,
                                    .prompt_logprobs = a->request->prompt_logprobs};

    return a->kind == BT_DC_ENGINE_LAND ? bt_engine_thread_land(d->node->engine, a->job, &r)
                                        : bt_engine_thread_submit(d->node->engine, a->job, &r);
}

static enum bt_status do_land_open(struct bt_decoded *d, const struct bt_dc_action *a)
{
    const struct bt_engine_layout *l = d->node->layout;
    struct bt_xfer_landing x = {
        .generation = a->generation, .peer = a->peer, .n_groups = l->n_groups};

    memcpy(x.ticket, a->ticket.b, sizeof x.ticket);
    for (uint32_t g = 0; g < l->n_groups; g++) {
        uint32_t first = a->pages.first_page[g];

        x.group[g] = (struct bt_xfer_land_group){
            .base = l->groups[g].base,
            .layer_stride = l->groups[g].layer_stride,
            .page_stride = l->groups[g].page_stride,
            .page_layer_bytes = l->groups[g].page_layer_bytes,
            .n_layers = l->groups[g].n_layers,
            .first_page = first,
            .n_pages = a->pages.n_pages - first,
            .page_ids = a->pages.page_ids[g] + first,
        };
    }
    return bt_xfer_land_open(d->node->xfer, &x);
}

static void do_output(struct bt_decoded *d, const struct bt_dc_action *a)
{
    /* Statistics come with the first output and again with the last. */
    if (a->output.has_stats && a->output.finish == 0 && a->output.stats.transferred_bytes > 0) {
        bt_prom_hist_observe(&d->transfer_seconds, (double)a->output.stats.transfer_ns / 1e9);
    }
    bt_node_output(d->node, a->router, &a->output);
}

static enum bt_status do_action(struct bt_decoded *d, const struct bt_dc_action *a)
{
    char t[9];

    switch (a->kind) {
    case BT_DC_ENGINE_LAND:
    case BT_DC_ENGINE_SUBMIT:
        return do_engine(d, a);
    case BT_DC_ENGINE_BEGIN:
        bt_engine_thread_begin(d->node->engine, a->job, a->token);
        break;
    case BT_DC_ENGINE_QUARANTINE:
        bt_engine_thread_quarantine(d->node->engine, a->job);
        break;
    case BT_DC_ENGINE_CANCEL:
        bt_engine_thread_cancel(d->node->engine, a->job);
        break;
    case BT_DC_ENGINE_RELEASE:
        bt_engine_thread_release(d->node->engine, a->job);
        break;
    case BT_DC_LAND_OPEN:
        return do_land_open(d, a);
    case BT_DC_LAND_EXPECT:
        bt_node_must(bt_xfer_land_expect(d->node->xfer, a->ticket.b, a->generation, a->n_shares));
        break;
    case BT_DC_LAND_CLOSE:
        bt_node_must(bt_xfer_land_close(d->node->xfer, a->ticket.b, a->generation));
        break;
    case BT_DC_CONTROL:
        bt_node_control(d->node, a->peer, &a->control);
        break;
    case BT_DC_OUTPUT:
        do_output(d, a);
        break;
    case BT_DC_ATTEMPT_END:
        BT_LOG(BT_LOG_DEBUG, "decoded", a->request_id, "ticket %s ends: %s",
               bt_ticket_text(&a->end.ticket, t), a->end.text);
        bt_node_attempt_end(d->node, a->router, &a->end);
        break;
    }
    return BT_OK;
}

/* Carries out the core's list. An action that was not taken makes its job fail, after the list: a
 * grant already sent for it is revoked by that. */
static void run(struct bt_decoded *d)
{
    const struct bt_dc_actions *list = bt_dc_core_actions(d->core);
    uint64_t failed_job = 0;
    enum bt_status failed = BT_OK;
    bool land_open = false;

    for (size_t i = 0; i < list->n; i++) {
        const struct bt_dc_action *a = &list->items[i];
        enum bt_status st = do_action(d, a);

        if (st != BT_OK) { /* a list has at most one LAND, SUBMIT or LAND_OPEN */
            failed = st;
            failed_job = a->job;
            land_open = a->kind == BT_DC_LAND_OPEN;
        }
    }
    if (failed == BT_OK) {
        return;
    }
    if (land_open) {
        bt_dc_on_land_refused(d->core, now_ns(d), failed_job, bt_status_str(failed));
        run(d);
    } else {
        fail_job(d, failed_job, failed, bt_status_str(failed));
    }
}

/* ---- events in ---- */

static void on_engine(void *arg, const struct bt_engine_ev *ev)
{
    struct bt_decoded *d = arg;
    uint64_t now = now_ns(d);

    switch (ev->kind) {
    case BT_ENGINE_EV_FAILED:
        bt_dc_on_engine_failed(d->core, now, ev->job, ev->status, ev->text);
        break;
    case BT_ENGINE_EV_LANDED:
        bt_dc_on_engine_landed(d->core, now, ev->job, ev->n_cached, ev->landed.n_pages,
                               ev->landed.first_page, ev->landed.page_ids);
        break;
    case BT_ENGINE_EV_TOKEN:
        bt_dc_on_engine_token(d->core, now, ev->job, ev->token.index, &ev->token.sampled,
                              (uint32_t)ev->token.finish);
        break;
    case BT_ENGINE_EV_PREEMPTED:
        bt_dc_on_engine_preempted(d->core, now, ev->job);
        break;
    case BT_ENGINE_EV_STARTED:
        bt_dc_on_engine_started(d->core, now, ev->job, ev->n_cached);
        break;
    case BT_ENGINE_EV_PROMPT_LOGPROBS:
        bt_dc_on_engine_prompt_logprobs(d->core, now, ev->job, ev->prompt_logprobs.first,
                                        ev->prompt_logprobs.list, ev->prompt_logprobs.n);
        break;
    case BT_ENGINE_EV_PAGES:
    case BT_ENGINE_EV_SHORT:
    case BT_ENGINE_EV_STEP:
    case BT_ENGINE_EV_BROKEN:
    case BT_ENGINE_EV_CACHE:
        return;
    }
    run(d);
}

static void observe_shares(struct bt_decoded *d, const struct bt_xfer_event *ev)
{
    uint64_t n = 0;

    for (uint32_t g = 0; g < ev->n_groups; g++) {
        n += ev->n_shares[g];
    }
    if (ev->status == BT_OK && n > 0) {
        bt_prom_hist_observe(&d->shares, (double)n);
    }
}

static void on_xfer(void *arg, const struct bt_xfer_event *ev)
{
    struct bt_decoded *d = arg;
    struct bt_ticket t;
    uint64_t now = now_ns(d);

    memcpy(t.b, ev->ticket, sizeof t.b);
    switch (ev->kind) {
    case BT_XFER_PEER_DOWN:
        bt_dc_on_peer_down(d->core, now, ev->peer, ev->text);
        break;
    case BT_XFER_LANDED:
        bt_dc_on_landed(d->core, now, &t, ev->generation);
        break;
    case BT_XFER_LAND_FULL:
        observe_shares(d, ev);
        bt_dc_on_land_full(d->core, now, &t, ev->generation, ev->status, ev->bytes, ev->move_ns);
        break;
    case BT_XFER_LAND_CLOSED:
        bt_dc_on_land_closed(d->core, now, &t, ev->generation);
        break;
    case BT_XFER_PEER_UP:
    case BT_XFER_CTRL:
    case BT_XFER_PUSHED:
        return;
    }
    run(d);
}

static void on_control(void *arg, uint64_t conn, const struct bt_control *m)
{
    struct bt_decoded *d = arg;

    bt_dc_on_control(d->core, now_ns(d), conn, m);
    run(d);
}

static void on_router(void *arg, uint32_t router, const struct bt_from_router *m)
{
    struct bt_decoded *d = arg;

    if (m->kind == BT_FROM_ROUTER_SUBMIT) {
        bt_dc_on_submit(d->core, now_ns(d), router, &m->submit);
        run(d);
    } else if (m->kind == BT_FROM_ROUTER_CANCEL) {
        bt_dc_on_cancel(d->core, now_ns(d), router, &m->cancel.ticket);
        run(d);
    }
}

static void on_router_lost(void *arg, uint32_t router)
{
    struct bt_decoded *d = arg;

    bt_dc_on_router_lost(d->core, now_ns(d), router);
    run(d);
}

static void on_tick(void *arg, uint64_t now)
{
    struct bt_decoded *d = arg;

    bt_dc_on_tick(d->core, now);
    run(d);
}

static void give_back(void *arg)
{
    struct bt_decoded *d = arg;

    bt_dc_on_give_back(d->core, now_ns(d));
    run(d);
}

static void resume(void *arg)
{
    struct bt_decoded *d = arg;

    bt_dc_on_resume(d->core);
}

static uint32_t jobs(void *arg)
{
    struct bt_decoded *d = arg;

    return bt_dc_core_jobs(d->core);
}

static void load(void *arg, struct bt_msg_load *out)
{
    struct bt_decoded *d = arg;
    const struct bt_dc_stats *s = bt_dc_core_stats(d->core);

    out->stale_messages += s->stale;
    out->transferred_tokens += s->transferred_tokens;
    out->transferred_bytes += s->transferred_bytes;
    out->local_prefills += s->local_prefills;
}

static void metrics(void *arg, struct bt_buf *out)
{
    struct bt_decoded *d = arg;
    const struct bt_dc_stats *s = bt_dc_core_stats(d->core);

    bt_prom_head(out, "baton_kv_transferred_tokens_total", BT_PROM_COUNTER,
                 "Tokens whose KV arrived here.");
    bt_prom_u64(out, "baton_kv_transferred_tokens_total", NULL, 0, s->transferred_tokens);
    bt_prom_head(out, "baton_kv_transferred_bytes_total", BT_PROM_COUNTER,
                 "Bytes of KV that arrived here.");
    bt_prom_u64(out, "baton_kv_transferred_bytes_total", NULL, 0, s->transferred_bytes);
    bt_prom_head(out, "baton_local_prefill_total", BT_PROM_COUNTER,
                 "Prompts that this decode node computed itself.");
    bt_prom_u64(out, "baton_local_prefill_total", NULL, 0, s->local_prefills);
    bt_prom_head(out, "baton_local_prefill_tokens_total", BT_PROM_COUNTER,
                 "Tokens of those that it computed.");
    bt_prom_u64(out, "baton_local_prefill_tokens_total", NULL, 0, s->local_prefill_tokens);
}

static void numbers(void *arg, struct bt_node_leg_numbers *out)
{
    struct bt_decoded *d = arg;
    const struct bt_dc_stats *s = bt_dc_core_stats(d->core);

    *out = (struct bt_node_leg_numbers){&d->transfer_seconds, &d->shares, s->cached_tokens,
                                        s->failures};
}

/* ---- life ---- */

static void on_ready(void *arg, struct bt_node *n)
{
    struct bt_decoded *d = arg;
    struct bt_dc_opts o = {
        .max_jobs = n->cfg.max_jobs,
        .first_slot = bt_node_first_slot(n, BT_ROLE_DECODE),
        .parked_max = PARKED_MAX,
        .context = n->model->context,
        .n_groups = n->layout->n_groups,
        .park_ns = n->cfg.lease,
        .transfer_ns = n->cfg.transfer_deadline,
    };

    for (uint32_t g = 0; g < o.n_groups; g++) {
        o.n_layers[g] = n->layout->groups[g].n_layers;
    }
    d->node = n;
    bt_node_hist_init(n, &d->transfer_seconds);
    bt_node_hist_init_shares(&d->shares);
    enum bt_status st = bt_dc_core_create(&o, &d->core);

    BT_ASSERT(st == BT_OK); /* at start, before anything was promised */
}

enum bt_status bt_decoded_create(struct bt_decoded **out)
{
    struct bt_decoded *d = bt_calloc(1, sizeof *d);

    if (d == NULL) {
        return BT_ERR_NOMEM;
    }
    *out = d;
    return BT_OK;
}

void bt_decoded_destroy(struct bt_decoded *d)
{
    if (d == NULL) {
        return;
    }
    bt_dc_core_destroy(d->core);
    bt_free(d);
}

struct bt_node_hooks bt_decoded_hooks(struct bt_decoded *d)
{
    return (struct bt_node_hooks){
        .arg = d,
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
