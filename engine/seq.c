/* Sequences: what a request brings is checked and copied here, once; ids are looked up; states and
 * pages are the scheduler's. No computing. */

#include "engine/engine_int.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>
#include "base/assert.h"
#include "base/mem.h"

void seq_free(struct bt_engine *e, uint32_t slot)
{
    struct seq *s = &e->seqs[slot];

    bt_slab_put(&e->seq_tokens, s->tokens);
    *s = (struct seq){0};
}

void seq_copy_cached(struct bt_engine *e, const struct bt_batch_seq *b)
{
    for (uint32_t g = 0; b->n_copied > 0 && g < e->info->n_groups; g++) {
        bt_kv_pool_copy(&e->pool, g, e->info->groups[g].n_layers, b->copy_from[g],
                        b->pages[g][b->n_shared]);
    }
    if (b->n_copied > 0) {
        enum bt_status st = bt_k_sync(e->k); /* from now on others may touch the page */

        (void)st; /* a fault stays: the next step reports it */
    }
}

enum bt_finish seq_finish(const struct bt_engine *e, const struct seq *s, uint32_t token,
                          uint32_t index)
{
    const struct bt_sampling *p = &s->sampling;

    for (uint32_t i = 0; i < e->info->n_eos && !p->ignore_eos; i++) {
        if (e->info->eos[i] == token) {
            return BT_FINISH_STOP;
        }
    }
    for (uint32_t i = 0; i < p->n_stop_ids; i++) {
        if (p->stop_ids[i] == token) {
            return BT_FINISH_STOP;
        }
    }
    bool last = index + 1 >= p->max_tokens || (uint64_t)s->n_prompt + index + 1 >= e->info->context;

    return last ? BT_FINISH_LENGTH : BT_FINISH_NONE;
}

static enum bt_status check_sampling(const struct bt_sampling *p, uint32_t vocab,
                                     struct bt_err *err)
{
    if (!(p->temperature >= 0.0F) || isinf(p->temperature)) {
        return bt_err_set(err, BT_ERR_INVALID, "temperature must be a number >= 0");
    }
    if (!(p->top_p > 0.0F && p->top_p <= 1.0F)) {
        return bt_err_set(err, BT_ERR_INVALID, "top_p must be in (0, 1]");
    }
    if (!(p->min_p >= 0.0F && p->min_p <= 1.0F)) {
        return bt_err_set(err, BT_ERR_INVALID, "min_p must be in [0, 1]");
    }
    if (!(p->repetition_penalty > 0.0F) || isinf(p->repetition_penalty)) {
        return bt_err_set(err, BT_ERR_INVALID, "repetition_penalty must be a number > 0");
    }
    if (!isfinite(p->presence_penalty) || !isfinite(p->frequency_penalty)) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "presence_penalty and frequency_penalty must be numbers");
    }
    if (p->n_top > BT_LOGPROBS_MAX || p->n_stop_ids > BT_STOP_IDS_MAX ||
        p->n_bias > BT_LOGIT_BIAS_MAX) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "more than %d log-probabilities, %d stop ids or %d biases",
                          BT_LOGPROBS_MAX, BT_STOP_IDS_MAX, BT_LOGIT_BIAS_MAX);
    }
    for (uint32_t i = 0; i < p->n_bias; i++) {
        if (p->bias[i].token >= vocab || isnan(p->bias[i].bias)) {
            return bt_err_set(err, BT_ERR_INVALID,
                              "logit_bias of token %" PRIu32 ": no such token, or no number",
                              p->bias[i].token);
        }
    }
    return BT_OK;
}

/* Everything that may be wrong with a request. land: its pages come from outside and one token is
 * known beyond them. */
static enum bt_status check_req(const struct bt_engine *e, const struct bt_engine_req *r, bool land,
                                struct bt_err *err)
{
    const struct bt_sampling *p = r->sampling;
    uint32_t max = bt_engine_max_tokens(e);

    if (r->n_prompt == 0 || r->n_tokens < r->n_prompt) {
        return bt_err_set(err, BT_ERR_INVALID, "the prompt is empty");
    }
    for (uint32_t i = 0; i < r->n_tokens; i++) {
        if (r->tokens[i] >= e->info->vocab) {
            return bt_err_set(err, BT_ERR_INVALID,
                              "token %" PRIu32 " at %" PRIu32
                              " is not in the vocabulary of %" PRIu32,
                              r->tokens[i], i, e->info->vocab);
        }
    }
    if (r->n_tokens - r->n_prompt >= p->max_tokens) {
        return bt_err_set(err, BT_ERR_INVALID, "max_tokens %" PRIu32 ": nothing is left to produce",
                          p->max_tokens);
    }
    if (r->n_tokens >= e->info->context) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "%" PRIu32 " tokens leave no room in the model's context of %" PRIu32,
                          r->n_tokens, e->info->context);
    }
    bool grows = land || (!r->hold && r->n_tokens - r->n_prompt + 1 < p->max_tokens);

    if ((uint64_t)r->n_tokens + grows > max) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "%" PRIu32 " tokens do not fit into the KV pool, which holds %" PRIu32,
                          r->n_tokens, max);
    }
    return check_sampling(p, e->info->vocab, err);
}

/* Fills a seq from a checked request. */
static enum bt_status copy_req(struct bt_engine *e, const struct bt_engine_req *r, bool hold,
                               struct seq *s)
{
    uint64_t total = (uint64_t)r->n_prompt + r->sampling->max_tokens;
    size_t n_bias = r->sampling->n_bias;

    total = total < e->info->context ? total : e->info->context;
    *s = (struct seq){.n_tokens = r->n_tokens,
                      .n_prompt = r->n_prompt,
                      .n_tokens_max = hold ? r->n_tokens : (uint32_t)(total - 1),
                      .sampling = *r->sampling,
                      .prompt_logprobs = r->prompt_logprobs};
    /* The last token of all is produced, never stored: one more place than n_tokens_max, which is less than the context. */
    size_t n_places = (size_t)s->n_tokens_max + 1;

    s->tokens = bt_slab_get(&e->seq_tokens);
    if (s->tokens == NULL) {
        return BT_ERR_BUSY;
    }
    memcpy(s->tokens, r->tokens, r->n_tokens * sizeof(*s->tokens));
    s->sampling.bias = NULL;
    if (n_bias > 0) {
        struct bt_logit_bias *bias = (struct bt_logit_bias *)(void *)(s->tokens + n_places);

        memcpy(bias, r->sampling->bias, n_bias * sizeof(*bias));
        s->sampling.bias = bias;
    }
    return BT_OK;
}

_Static_assert(_Alignof(struct bt_logit_bias) <= sizeof(uint32_t),
               "the bias lies right behind the tokens");

static enum bt_status add(struct bt_engine *e, const struct bt_engine_req *r, bool land,
                          uint32_t *slot, struct bt_err *err)
{
    bool hold = r->hold && !land;
    struct seq s;
    enum bt_status st = check_req(e, r, land, err);

    if (st != BT_OK) {
        return st;
    }
    st = copy_req(e, r, hold, &s);
    if (st != BT_OK) {
        return bt_err_set(err, st, "no place for a sequence now");
    }
    const struct bt_batch_new n = {.n_tokens = s.n_tokens,
                                   .n_tokens_max = s.n_tokens_max,
                                   .hold = hold,
                                   .all_rows = s.prompt_logprobs,
                                   .tokens = s.tokens};

    st = land ? bt_batch_land(e->batch, &n, slot) : bt_batch_submit(e->batch, &n, slot);
    if (st != BT_OK) {
        bt_slab_put(&e->seq_tokens, s.tokens);
        return bt_err_set(err, st, "no KV pages or no place for a sequence now");
    }
    e->seqs[*slot] = s;
    return BT_OK;
}

enum bt_status bt_engine_submit(struct bt_engine *e, const struct bt_engine_req *req,
                                bt_seq_id *out, struct bt_err *err)
{
    uint32_t slot;
    enum bt_status st = add(e, req, false, &slot, err);

    if (st == BT_OK) {
        *out = bt_batch_seq(e->batch, slot)->id;
    }
    return st;
}

enum bt_status bt_engine_land(struct bt_engine *e, const struct bt_engine_req *req,
                              struct bt_engine_landing *out, struct bt_err *err)
{
    uint32_t slot;
    enum bt_status st = add(e, req, true, &slot, err);

    if (st != BT_OK) {
        return st;
    }
    const struct bt_batch_seq *b = bt_batch_seq(e->batch, slot);

    uint32_t first = b->n_shared + (b->n_copied > 0);

    seq_copy_cached(e, b);
    *out = (struct bt_engine_landing){
        .seq = b->id, .n_pages = b->n_paged, .n_cached = bt_batch_n_cached(e->batch, b)};
    for (uint32_t g = 0; g < e->info->n_groups; g++) {
        out->first_page[g] = b->first_page[g] > first ? b->first_page[g] : first;
        out->page_ids[g] = b->pages[g];
    }
    return BT_OK;
}

enum bt_status bt_engine_start(struct bt_engine *e, bt_seq_id seq, uint32_t first_token)
{
    uint32_t slot = bt_batch_find(e->batch, seq);

    if (slot == BT_BATCH_NO_SLOT) {
        return BT_ERR_NOT_FOUND;
    }
    struct seq *s = &e->seqs[slot];

    if (bt_batch_seq(e->batch, slot)->state != BT_BATCH_LANDING || first_token >= e->info->vocab ||
        seq_finish(e, s, first_token, s->n_tokens - s->n_prompt) != BT_FINISH_NONE) {
        return BT_ERR_INVALID;
    }
    s->tokens[s->n_tokens++] = first_token;
    bt_batch_start(e->batch, slot);
    return BT_OK;
}

void bt_engine_quarantine(struct bt_engine *e, bt_seq_id seq)
{
    uint32_t slot = bt_batch_find(e->batch, seq);

    if (slot != BT_BATCH_NO_SLOT && bt_batch_seq(e->batch, slot)->state == BT_BATCH_LANDING) {
        bt_batch_quarantine(e->batch, slot);
    }
}

void bt_engine_release(struct bt_engine *e, bt_seq_id seq)
{
    uint32_t slot = bt_batch_find(e->batch, seq);

    if (slot != BT_BATCH_NO_SLOT) {
        bt_batch_remove(e->batch, slot);
        seq_free(e, slot);
    }
}

void bt_engine_cancel(struct bt_engine *e, bt_seq_id seq)
{
    uint32_t slot = bt_batch_find(e->batch, seq);

    if (slot != BT_BATCH_NO_SLOT) {
        bt_batch_cancel(e->batch, slot);
    }
}
