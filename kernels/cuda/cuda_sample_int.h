#ifndef BT_KERNELS_CUDA_SAMPLE_INT_H
#define BT_KERNELS_CUDA_SAMPLE_INT_H

/* Sampling: what the host lays out for the kernels (cuda_draw.c), and the kernels (cuda_sample.cu).
 *
 * Sums are of integers, and logits have keys, integers in the same order: so blocks add and compare in any order with the same
 * result, and nothing is sorted. A cut, where top-k or top-p ends, is the key of the last logit that stays, found in three rounds
 * of 11, 11 and 10 bits: how much the logits weigh by the value of these bits (`bins`), then which value the cut falls into
 * (`narrow`). Of logits equal to it those with the lowest ids stay. */

#include "kernels/cuda/cuda_int.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CUDA_SAMPLE_CHUNK 4096U /* logits of a block */
#define CUDA_SAMPLE_BINS  2048U
#define CUDA_SAMPLE_ROWS  65535U              /* in a call: blocks of the grid's second dimension */
#define CUDA_SAMPLE_VOCAB (UINT32_C(1) << 20) /* a block looks through the sums of all chunks */
#define CUDA_SAMPLE_EDITS                                                                          \
    (BT_LOGIT_BIAS_MAX + BT_K_SEEN_MAX + BT_K_EOS_MAX + BT_STOP_IDS_MAX) /* of a row */

/* Which logits of a row stay: the key is greater, or equal and the id not greater than last. */
struct cuda_cut {
    uint32_t on;
    uint32_t key, last; /* while it is sought: the bits found */
    uint64_t want;      /* how much of what is left to look at stays */
};
enum { CUDA_CUT_TOPS, CUDA_CUT_K, CUDA_CUT_P, CUDA_CUTS }; /* most likely ones; top-k; top-p */

struct cuda_edit {
    uint32_t token;
    union {
        float bias;
        uint32_t count;
    };
};

struct cuda_draw {
    uint32_t row;
    uint32_t draws, logprobs, greedy; /* bool. draws: no token is given */
    uint32_t token;
    uint32_t n_top;
    float top_p;
    float repetition, presence, frequency;
    double inv_temperature;
    uint64_t random;
    uint64_t least; /* weight, by min-p */
    /* Edits, one list after the other. */
    uint32_t edits_at, n_bias, n_seen, n_masked;
    /* What the kernels find; zero at first. */
    struct cuda_cut cuts[CUDA_CUTS];
    uint64_t
        peaks[2]; /* key << 32 | ~id of the largest logit: before edits, after (if there are any) */
    uint64_t raw_sum; /* weights of all as they came, at temperature 1 */
    uint64_t kept;    /* weights of what top-k keeps */
    uint32_t n_found; /* of the most likely ones */
};

/* What some row of a call needs. */
enum {
    CUDA_SAMPLE_RAW = 1, /* the largest logit before edits */
    CUDA_SAMPLE_LOGPROBS = 2,
    CUDA_SAMPLE_TOPS = 4,
    CUDA_SAMPLE_EDITED = 8,
    CUDA_SAMPLE_RANDOM = 16,
    CUDA_SAMPLE_K = 32,
    CUDA_SAMPLE_P = 64,
};

struct cuda_sample {
    float *logits;           /* [.., vocab] */
    struct cuda_draw *draws; /* device, as all here: [n] */
    struct cuda_edit *edits;
    float *before;  /* by edit: the logit that it changed */
    uint64_t *bins; /* [n][CUDA_SAMPLE_BINS], zero between rounds */
    uint64_t *sums; /* [n][n_chunks] */
    uint64_t *tops; /* [n][BT_LOGPROBS_MAX]: key << 32 | ~id */
    struct bt_sampled *out;
    uint32_t vocab, n_chunks, n, point;
    uint32_t needs;
};
void cuda_sample_run(struct cuda_ctx *c, const struct cuda_sample *s);

/* cuda_draw.c: memory for it, by reserve, and entries of the table. */
struct cuda_sampler {
    struct cuda_sample dev;
    struct cuda_draw *draws; /* host, pinned: [n_max] */
    struct cuda_edit *edits;
    struct bt_sampled *out;
    uint32_t n_max;
};
enum bt_status cuda_sample_reserve(struct bt_kctx *k, uint32_t n_rows, uint32_t vocab);
void cuda_sample(struct bt_kctx *k, float *logits, const struct bt_k_draw *draws, uint32_t n);
const struct bt_sampled *cuda_sampled(const struct bt_kctx *k);
void cuda_sample_destroy(struct cuda_ctx *c, struct cuda_sampler *s);

#ifdef __cplusplus
}
#endif

#endif
