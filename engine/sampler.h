#ifndef BT_ENGINE_SAMPLER_H
#define BT_ENGINE_SAMPLER_H

/* From logits to a token: a pure function of logits, parameters and history, the same bits on every
 * machine (double arithmetic, own exp and log, sums in one fixed order, random numbers keyed by
 * (seed, choice, token index)).
 *
 * Order: logit bias → repetition penalty (prompt and answer; once per distinct token) → presence
 * and frequency penalties (answer) → EOS and stop ids masked before min_tokens → temperature 0: the
 * largest logit; else temperature → top-k → top-p over what top-k left → min-p → draw. Ties
 * everywhere: the lower id first. A NaN logit counts as -inf. */

#include <stdint.h>
#include "base/sampling.h"
#include "base/status.h"

struct bt_sampler; /* scratch memory; one thread at a time */

struct bt_sampler_in {
    const struct bt_sampling *params;
    const float *logits;    /* [vocab], borrowed, not changed */
    const uint32_t *tokens; /* the whole history: prompt, then answer; each < vocab */
    uint32_t n_tokens,
        n_prompt; /* the token to sample has index n_tokens - n_prompt in the answer */
    const uint32_t *eos;
    uint32_t n_eos;
};

enum bt_status bt_sampler_create(uint32_t vocab, struct bt_sampler **out) BT_NODISCARD;
void bt_sampler_destroy(struct bt_sampler *s);

/* Fills out->token; the log-probabilities too if in->params->logprobs (else they are 0 and n_top is
 * 0). */
void bt_sampler_sample(struct bt_sampler *s, const struct bt_sampler_in *in,
                       struct bt_sampled *out);
/* The log-probabilities of a given token and of the n_top (<= BT_LOGPROBS_MAX) most likely ones. */
void bt_sampler_logprobs(struct bt_sampler *s, const float *logits, uint32_t token, uint32_t n_top,
                         struct bt_sampled *out);

#endif
