/* The step loop: asks the scheduler what to compute, runs one forward pass over the ragged batch,
 * reports pages as layers end, samples, tells the hooks. It decides nothing about who runs and
 * knows nothing of where pages go. */

#include "engine/engine_int.h"

#include "base/assert.h"
#include "base/clock.h"

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Reports the pages that the span's chunk completes in a layer, unless they will be outside the
 * window when decode begins. */
static void report_pages(struct bt_engine *e, const struct bt_batch_span *sp, uint32_t group,
                         uint32_t layer)
{
    const struct bt_batch_seq *b = bt_batch_seq(e->batch, sp->slot);
    uint32_t page_tokens = e->opts.page_tokens;
    uint32_t end_pos = sp->pos + sp->n;
    uint32_t needed = bt_batch_first_visible(e->batch, group, b->n_tokens);
    struct bt_engine_page_event ev = {.seq = b->id,
                                      .group = group,
                                      .layer = layer,
                                      .first = sp->pos / page_tokens,
                                      .end = end_pos / page_tokens,
                                      .page_ids = b->pages[group]};

    if (sp->last && end_pos % page_tokens != 0) {
        ev.end++; /* the partial tail */
    }
    ev.first = ev.first > needed ? ev.first : needed;
    if (ev.first < ev.end) {
        e->hooks.on_pages(e->hooks.arg, &ev);
    }
}

static bool all_cancelled(const struct bt_engine *e)
{
    for (uint32_t i = 0; i < e->plan.n_spans; i++) {
        if (!bt_batch_seq(e->batch, e->plan.spans[i].slot)->cancelled) {
            return false;
        }
    }
    return true;
}

/* Whether the pass computes pages that somebody waits for. */
static bool any_held(const struct bt_engine *e)
{
    for (uint32_t i = 0; e->hooks.on_pages != NULL && i < e->plan.n_spans; i++) {
        const struct bt_batch_seq *b = bt_batch_seq(e->batch, e->plan.spans[i].slot);

        if (b->hold && !b->cancelled) {
            return true;
        }
    }
    return false;
}

/* Layers that a device has before it, so that it computes while the host looks at those that are done. */
#define LAYERS_AHEAD 2U

/* Waits for the oldest layer not told yet, and reports its pages. */
static void tell_layer(struct bt_engine *e)
{
    uint32_t layer = e->n_told++;
    uint32_t group = e->info->layer_group[layer];

    if (bt_k_wait(e->k, e->marks[layer % BT_K_MARKS]) != BT_OK || !any_held(e)) {
        return; /* a fault stays: it is the forward pass's status too */
    }
    for (uint32_t i = 0; i < e->plan.n_spans; i++) {
        const struct bt_batch_span *sp = &e->plan.spans[i];
        const struct bt_batch_seq *b = bt_batch_seq(e->batch, sp->slot);

        if (b->hold && !b->cancelled) {
            report_pages(e, sp, group, e->info->layer_index[layer]);
        }
    }
}

static bool on_layer_done(void *arg, uint32_t layer)
{
    struct bt_engine *e = arg;
    uint32_t ahead = e->layout.device_memory ? LAYERS_AHEAD : 0;

    if (e->paced) {
        BT_ASSERT(layer == e->n_marked);
        e->marks[e->n_marked++ % BT_K_MARKS] = bt_k_mark(e->k);
        while (e->n_marked - e->n_told > ahead) {
            tell_layer(e);
        }
    }
    if (e->hooks.step_interrupted == NULL || !e->hooks.step_interrupted(e->hooks.arg)) {
        return true;
    }
    return !all_cancelled(e);
}

/* The pass is in the device's stream to its end. */
static void on_queued(void *arg, float *logits)
{
    struct bt_engine *e = arg;

    if (e->device_sampling) {
        draw_queue(e, logits);
    }
    while (e->n_told < e->n_marked) {
        tell_layer(e);
    }
}

void echo_range(const struct bt_engine *e, const struct bt_batch_span *sp, uint32_t *first,
                uint32_t *end)
{
    const struct seq *s = &e->seqs[sp->slot];

    *first = sp->pos;
    *end = s->prompt_logprobs && !sp->decode ? min_u32(sp->pos + sp->n, s->n_prompt - 1) : sp->pos;
    *end = *end > *first ? *end : *first;
}

static void fill_batch(struct bt_engine *e, struct bt_model_batch *mb)
{
    *mb = (struct bt_model_batch){.tokens = e->tokens,
                                  .n_spans = e->plan.n_spans,
                                  .spans = e->spans,
                                  .out_rows = e->out_rows,
                                  .logits = e->device_sampling ? NULL : e->logits,
                                  .layer_done = on_layer_done,
                                  .queued = on_queued,
                                  .arg = e};
    /* Others wait for its pages, or a cancel shall find it between two layers. */
    e->paced = e->plan.n_prefill_tokens > 0 || any_held(e);
    mb->paced = e->paced;
    e->n_marked = e->n_told = 0;
    for (uint32_t i = 0; i < e->plan.n_spans; i++) {
        const struct bt_batch_span *sp = &e->plan.spans[i];
        const struct bt_batch_seq *b = bt_batch_seq(e->batch, sp->slot);
        uint32_t row = mb->n_tokens, first, end;

        BT_ASSERT(row + sp->n <= e->rows_max);
        for (uint32_t t = 0; t < sp->n; t++) {
            e->tokens[row + t] = e->seqs[sp->slot].tokens[sp->pos + t];
        }
        e->spans[i] = (struct bt_model_span){.n = sp->n, .pos = sp->pos};
        for (uint32_t g = 0; g < e->info->n_groups; g++) {
            e->spans[i].pages[g] = b->pages[g];
        }
        mb->n_tokens += sp->n;
        echo_range(e, sp, &first, &end);
        BT_ASSERT(mb->n_out + (end - first) + sp->last <= e->out_max);
        for (uint32_t p = first; p < end; p++) {
            e->out_rows[mb->n_out++] = row + p - sp->pos;
        }
        if (sp->last) {
            e->out_rows[mb->n_out++] = row + sp->n - 1;
        }
    }
}

static void sample_on_host(struct bt_engine *e, const struct seq *s, const float *logits,
                           struct bt_sampled *out)
{
    const struct bt_sampler_in in = {.params = &s->sampling,
                                     .logits = logits,
                                     .tokens = s->tokens,
                                     .n_tokens = s->n_tokens,
                                     .n_prompt = s->n_prompt,
                                     .eos = e->info->eos,
                                     .n_eos = e->info->n_eos};

    bt_sampler_sample(e->sampler, &in, out);
}

static void deliver_next(struct bt_engine *e, uint32_t slot, uint32_t row)
{
    struct seq *s = &e->seqs[slot];
    const struct bt_sampled *there = draw_result(e, row);
    struct bt_engine_token t = {.seq = bt_batch_seq(e->batch, slot)->id,
                                .index = s->n_tokens - s->n_prompt,
                                .has_logprobs = s->sampling.logprobs};

    if (there != NULL) {
        t.sampled = *there;
    } else {
        sample_on_host(e, s, draw_logits(e, row), &t.sampled);
    }
    t.finish = seq_finish(e, s, t.sampled.token, t.index);
    s->tokens[s->n_tokens++] = t.sampled.token;
    bt_batch_sampled(e->batch, slot, t.finish != BT_FINISH_NONE);
    if (e->hooks.on_token != NULL) {
        e->hooks.on_token(e->hooks.arg, &t);
    }
}

static void deliver_echo(struct bt_engine *e, uint32_t slot, uint32_t pos, uint32_t row)
{
    const struct seq *s = &e->seqs[slot];
    const struct bt_sampled *there = draw_result(e, row);
    struct bt_sampled lp;

    if (there == NULL) {
        bt_sampler_logprobs(e->sampler, draw_logits(e, row), s->tokens[pos], s->sampling.n_top,
                            &lp);
        there = &lp;
    }
    e->hooks.on_prompt_logprob(e->hooks.arg, bt_batch_seq(e->batch, slot)->id, pos, there);
}

/* Samples what was not sampled on the device, and reports, in the order of the spans. */
static void deliver(struct bt_engine *e)
{
    uint32_t row = 0;

    for (uint32_t i = 0; i < e->plan.n_spans; i++) {
        const struct bt_batch_span *sp = &e->plan.spans[i];
        const struct bt_batch_seq *b = bt_batch_seq(e->batch, sp->slot);
        uint32_t first, end;

        echo_range(e, sp, &first, &end);
        for (uint32_t p = first; p < end; p++, row++) {
            if (!b->cancelled && e->hooks.on_prompt_logprob != NULL) {
                deliver_echo(e, sp->slot, p + 1, row);
            }
        }
        if (sp->last) {
            if (!b->cancelled) {
                deliver_next(e, sp->slot, row);
            }
            row++;
        }
    }
}

/* The prompt's pages from the prefix cache: complete in every layer from the start. */
static void report_cached(struct bt_engine *e, const struct bt_batch_seq *b)
{
    struct bt_engine_page_event ev = {.seq = b->id, .end = b->n_shared};

    for (ev.group = 0; ev.group < e->info->n_groups; ev.group++) {
        ev.first = bt_batch_first_visible(e->batch, ev.group, b->n_tokens);
        ev.page_ids = b->pages[ev.group];
        for (ev.layer = 0; ev.first < ev.end && ev.layer < e->info->groups[ev.group].n_layers;
             ev.layer++) {
            e->hooks.on_pages(e->hooks.arg, &ev);
        }
    }
}

static void tell_started(struct bt_engine *e, const struct bt_batch_seq *b)
{
    seq_copy_cached(e, b);
    if (e->hooks.on_started != NULL) {
        e->hooks.on_started(e->hooks.arg, b->id, bt_batch_n_cached(e->batch, b));
    }
    if (b->hold && b->n_shared > 0 && e->hooks.on_pages != NULL) {
        report_cached(e, b);
    }
}

static void tell_plan(struct bt_engine *e)
{
    for (uint32_t i = 0; i < e->plan.n_preempted; i++) {
        seq_free(e, (uint32_t)e->plan.preempted[i]);
        if (e->hooks.on_preempted != NULL) {
            e->hooks.on_preempted(e->hooks.arg, e->plan.preempted[i]);
        }
    }
    for (uint32_t i = 0; i < e->plan.n_started; i++) {
        tell_started(e, bt_batch_seq(e->batch, e->plan.started[i]));
    }
}

enum bt_status bt_engine_step(struct bt_engine *e, bool *worked, struct bt_engine_step_stats *stats)
{
    struct bt_model_batch mb;

    bt_batch_plan(e->batch, &e->plan);
    *worked = e->plan.n_spans > 0 || e->plan.n_preempted > 0;
    *stats = (struct bt_engine_step_stats){.n_prefill_tokens = e->plan.n_prefill_tokens,
                                           .n_decode_tokens =
                                               e->plan.n_tokens - e->plan.n_prefill_tokens,
                                           .n_spans = e->plan.n_spans};
    tell_plan(e);
    if (e->plan.n_spans == 0) {
        return BT_OK;
    }
    fill_batch(e, &mb);
    uint64_t t0 = bt_clock_ns();
    enum bt_status st = bt_model_forward(e->model, e->ws, &e->pool.kv, &mb);

    stats->compute_ns = bt_clock_ns() - t0;
    if (st != BT_OK) {
        bt_batch_abandon(e->batch);
        *stats = (struct bt_engine_step_stats){0};
        return st == BT_ERR_CANCELLED ? BT_OK : st;
    }
    stats->n_host_draws = e->n_host_draws;
    bt_batch_commit(e->batch);
    deliver(e);
    return BT_OK;
}
