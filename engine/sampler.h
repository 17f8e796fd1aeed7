#ifndef BT_ENGINE_SAMPLER_H
#define BT_ENGINE_SAMPLER_H

/* From logits to a token: a pure function of logits, parameters and history, the same bits on every
 * machine and on devices that sample by themselves (kernels/backend.h): arithmetic of
 * base/sample_math.h, random numbers keyed by (seed, choice, token index).
 *
 * Order: logit bias → repetition penalty (prompt and answer; once per distinct token) → presence
 * and frequency penalties (answer) → EOS and stop ids masked before min_tokens → temperature 0: the
 * largest logit; else temperature → top-k → top-p over what top-k left → min-p → draw. Ties
 * everywhere: the lower id first. A NaN logit counts as -inf.
 *
 * A token's weight is an integer, bt_sample_weight(logit, largest logit, 1 / temperature): no order
 * of adding can change a sum, so nobody has to sort for one. Top-p keeps a token if the tokens
 * before it (by logit) weigh less than bt_sample_share(top_p, all that top-k left); min-p, if it
 * weighs bt_sample_share(min_p, 1) or more. Of those that stay, by id, the first is drawn up to
 * which they weigh more than bt_sample_target(random number, all of them). If nothing weighs anything
 * (the largest logit is not finite) the largest logit's token is taken. Log-probabilities:
 * bt_sample_logprob, of the logits as they came. */

#include <stdint.h>
#include "base/sampling.h"
#include "base/status.h"
#include "kernels/backend.h"

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
/* Whether the history has a part in what is sampled. */
bool bt_sampler_penalises(const struct bt_sampling *p);
/* The distinct tokens of a history, for penalties: writes at most n_max, returns how many there are. */
uint32_t bt_sampler_seen(struct bt_sampler *s, const uint32_t *tokens, uint32_t n_tokens,
                         uint32_t n_prompt, struct bt_k_seen *out, uint32_t n_max);
/* The log-probabilities of a given token and of the n_top (<= BT_LOGPROBS_MAX) most likely ones. */
void bt_sampler_logprobs(struct bt_sampler *s, const float *logits, uint32_t token, uint32_t n_top,
                         struct bt_sampled *out);

#endif
