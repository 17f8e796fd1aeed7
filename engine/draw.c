/* Sampling where the logits are: tells the device what each row of a pass is for, and fetches the rows that are the host's.
 * What a sequence has seen is kept along as a list of distinct tokens. Samples nothing itself. */

#include "base/assert.h"
#include "engine/engine_int.h"
#include "engine/philox.h"

_Static_assert(BT_MODEL_EOS_MAX <= BT_K_EOS_MAX, "the device masks all of them");

enum bt_status draw_init(struct bt_engine *e)
{
    enum bt_status st = e->opts.host_sampling
                            ? BT_ERR_UNSUPPORTED
                            : bt_k_sample_reserve(e->k, e->out_max, e->info->vocab);

    e->device_sampling = st == BT_OK;
    e->seen_max = e->opts.device_seen_max != 0 && e->opts.device_seen_max < BT_K_SEEN_MAX
                      ? e->opts.device_seen_max
                      : BT_K_SEEN_MAX;
    return st == BT_ERR_UNSUPPORTED ? BT_OK : st;
}

size_t draw_seen_at(const struct bt_engine *e)
{
    return e->info->context * sizeof(uint32_t) + BT_LOGIT_BIAS_MAX * sizeof(struct bt_logit_bias);
}

size_t draw_seen_bytes(const struct bt_engine *e)
{
    return e->device_sampling ? e->seen_max * sizeof(struct bt_k_seen) : 0;
}

static struct bt_k_seen *seen_of(const struct bt_engine *e, const struct seq *s)
{
    return (struct bt_k_seen *)(void *)((uint8_t *)s->tokens + draw_seen_at(e));
}

_Static_assert(_Alignof(struct bt_k_seen) <= sizeof(uint32_t), "it lies right behind the biases");

/* One token more. */
static void note_token(const struct bt_engine *e, struct seq *s, uint32_t token)
{
    struct bt_k_seen *seen = seen_of(e, s);
    uint32_t at = 0;

    while (at < s->n_seen && seen[at].token != token) {
        at++;
    }
    if (at == s->n_seen && s->n_seen++ < e->seen_max) {
        seen[at] = (struct bt_k_seen){.token = token};
    }
    if (at < e->seen_max) {
        seen[at].count++;
    }
}

/* Brings the list up to the last token. False: it is too long. */
static bool note_seen(struct bt_engine *e, struct seq *s)
{
    if (s->n_noted == 0) {
        s->n_seen = bt_sampler_seen(e->sampler, s->tokens, s->n_tokens, s->n_prompt, seen_of(e, s),
                                    e->seen_max);
        s->n_noted = s->n_tokens;
    }
    for (; s->n_seen <= e->seen_max && s->n_noted < s->n_tokens; s->n_noted++) {
        note_token(e, s, s->tokens[s->n_noted]); /* of the answer: they are noted as they come */
    }
    return s->n_seen <= e->seen_max;
}

/* The next token of a sequence. False: the host samples it. */
static bool next_draw(struct bt_engine *e, uint32_t slot, struct bt_k_draw *d)
{
    struct seq *s = &e->seqs[slot];
    const struct bt_sampling *p = &s->sampling;
    uint32_t index = s->n_tokens - s->n_prompt;

    *d = (struct bt_k_draw){.params = p,
                            .random = bt_philox_bits(p->seed, p->choice, index),
                            .masked = index < p->min_tokens,
                            .eos = e->info->eos,
                            .n_eos = e->info->n_eos};
    if (bt_sampler_penalises(p)) {
        if (!note_seen(e, s)) {
            return false;
        }
        d->seen = seen_of(e, s);
        d->n_seen = s->n_seen;
    }
    return true;
}

/* The next of the host's rows. */
static float *host_row(const struct bt_engine *e, uint32_t i)
{
    const size_t vocab = e->info->vocab;

    return i < e->n_pinned ? e->logits + i * vocab : e->more_logits + (i - e->n_pinned) * vocab;
}

/* Where all pinned rows are taken, the device is waited for. */
static void fetch_row(struct bt_engine *e, uint32_t row, const float *logits)
{
    const uint32_t i = e->n_host_draws++;
    const size_t bytes = e->info->vocab * sizeof(float);

    if (i < e->n_pinned) {
        bt_k_fetch(e->k, host_row(e, i), logits, bytes);
    } else {
        bt_k_read(e->k, host_row(e, i), logits, bytes);
    }
    e->draw_of[row] = BT_HOST_DRAWS | i;
}

void draw_queue(struct bt_engine *e, float *logits)
{
    const size_t vocab = e->info->vocab;
    uint32_t row = 0, n = 0;

    e->n_host_draws = 0;
    for (uint32_t i = 0; i < e->plan.n_spans; i++) {
        const struct bt_batch_span *sp = &e->plan.spans[i];
        const struct seq *s = &e->seqs[sp->slot];
        uint32_t first, end;

        echo_range(e, sp, &first, &end);
        for (uint32_t p = first; p < end; p++, row++) {
            e->draws[n] = (struct bt_k_draw){
                .row = row, .given = true, .token = s->tokens[p + 1], .params = &s->sampling};
            e->draw_of[row] = n++;
        }
        if (!sp->last) {
            continue;
        }
        if (next_draw(e, sp->slot, &e->draws[n])) {
            e->draws[n].row = row;
            e->draw_of[row] = n++;
        } else {
            fetch_row(e, row, logits + row * vocab);
        }
        row++;
    }
    if (n > 0) {
        bt_k_sample(e->k, logits, e->draws, n);
    }
}

const struct bt_sampled *draw_result(const struct bt_engine *e, uint32_t row)
{
    if (!e->device_sampling || (e->draw_of[row] & BT_HOST_DRAWS) != 0) {
        return NULL;
    }
    return &bt_k_sampled(e->k)[e->draw_of[row]];
}

const float *draw_logits(const struct bt_engine *e, uint32_t row)
{
    return host_row(e, e->device_sampling ? e->draw_of[row] & ~BT_HOST_DRAWS : row);
}
