#ifndef BT_BASE_SAMPLING_H
#define BT_BASE_SAMPLING_H

/* Sampling parameters (resolved: nothing is absent any more) and what a sampler returns: values
 * that cross rooms, wires and threads. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"

#define BT_LOGPROBS_MAX   20
#define BT_LOGIT_BIAS_MAX 1024
#define BT_STOP_IDS_MAX   64

struct bt_logit_bias {
    uint32_t token;
    float bias;
};

struct bt_sampling {
    float temperature;                         /* 0: greedy */
    float top_p;                               /* (0, 1], 1: off */
    uint32_t top_k;                            /* 0: off */
    float min_p;                               /* [0, 1], 0: off */
    float repetition_penalty;                  /* > 0, 1: off; over prompt and answer */
    float presence_penalty, frequency_penalty; /* over the answer */
    uint64_t seed;
    uint32_t choice; /* index among n: random numbers are keyed by (seed, choice, token index) */
    uint32_t max_tokens; /* answer tokens in all, those already delivered included; >= 1 */
    uint32_t min_tokens;
    bool ignore_eos;
    bool logprobs;  /* log-probability of each chosen token wanted */
    uint32_t n_top; /* and of the n_top most likely ones, <= BT_LOGPROBS_MAX */
    uint32_t n_stop_ids;
    uint32_t stop_ids[BT_STOP_IDS_MAX];
    uint32_t n_bias;
    const struct bt_logit_bias *bias; /* owned by whoever holds the parameters */
};

struct bt_top_logprob {
    uint32_t token;
    float logprob;
};

struct bt_sampled {
    uint32_t token;
    float logprob; /* natural log of the softmax of the model's logits, before penalties, bias,
                      temperature, filters */
    uint32_t n_top;
    struct bt_top_logprob top[BT_LOGPROBS_MAX]; /* descending */
};

#endif
