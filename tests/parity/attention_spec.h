#ifndef BT_TESTS_PARITY_ATTENTION_SPEC_H
#define BT_TESTS_PARITY_ATTENTION_SPEC_H

/* Attention of numerics class cuda-bf16 from its description in kernels/cuda/cuda_int.h, in double precision but for what it
 * rounds to 16 bits: q, and the exponentials, relative to the maximum of the blocks of a split so far. */

#include <math.h>
#include "base/dtype.h"
#include "base/float16.h"

struct as_row {
    const float *q;           /* [head_dim] */
    const float *key, *value; /* of position 0 and this row's key-value head */
    size_t ld;                /* floats from one position to the next */
    uint32_t head_dim, pos, window;
    enum bt_dtype dtype; /* of the pages: F16 or BF16 */
    float scale, softcap;
};

static inline double as_round(double v, enum bt_dtype t)
{
    return t == BT_DTYPE_F16 ? (double)bt_f16_to_f32(bt_f32_to_f16((float)v))
                             : (double)bt_bf16_to_f32(bt_f32_to_bf16((float)v));
}

static inline double as_score(const struct as_row *r, uint32_t j)
{
    double dot = 0;

    for (uint32_t d = 0; d < r->head_dim; d++) {
        dot +=
            as_round((double)r->q[d], r->dtype) * as_round((double)r->key[j * r->ld + d], r->dtype);
    }
    dot *= (double)r->scale;
    return r->softcap > 0 ? (double)r->softcap * tanh(dot / (double)r->softcap) : dot;
}

/* Keys lo … hi - 1 of one block join: out[head_dim] and *sum, relative to *max. */
static inline void as_block(const struct as_row *r, uint32_t lo, uint32_t hi, double *max,
                            double *sum, double *out)
{
    double m = *max;

    for (uint32_t j = lo; j < hi; j++) {
        double s = as_score(r, j);
        m = s > m ? s : m;
    }
    double keep = *max == m ? 1 : exp(*max - m);
    *sum *= keep;
    for (uint32_t d = 0; d < r->head_dim; d++) {
        out[d] *= keep;
    }
    for (uint32_t j = lo; j < hi; j++) {
        double p = exp(as_score(r, j) - m), p16 = as_round(p, r->dtype);
        *sum += p;
        for (uint32_t d = 0; d < r->head_dim; d++) {
            out[d] += p16 * as_round((double)r->value[j * r->ld + d], r->dtype);
        }
    }
    *max = m;
}

static inline void as_attend(const struct as_row *r, double *out)
{
    enum { BLOCK = 64, SPLIT = 256, DIM_MAX = 512 };
    uint32_t first = r->window != 0 && r->pos >= r->window ? r->pos - r->window + 1 : 0;
    double all_max = -INFINITY, all_sum = 0, part[DIM_MAX];

    for (uint32_t d = 0; d < r->head_dim; d++) {
        out[d] = 0;
    }
    for (uint32_t split = first / SPLIT; split <= r->pos / SPLIT; split++) {
        double max = -INFINITY, sum = 0;
        for (uint32_t d = 0; d < r->head_dim; d++) {
            part[d] = 0;
        }
        for (uint32_t b = split * SPLIT; b < (split + 1) * SPLIT; b += BLOCK) {
            uint32_t lo = b > first ? b : first,
                     hi = b + BLOCK < r->pos + 1 ? b + BLOCK : r->pos + 1;
            if (lo < hi) {
                as_block(r, lo, hi, &max, &sum, part);
            }
        }
        double both = max > all_max ? max : all_max, a = exp(all_max - both), c = exp(max - both);
        all_sum = all_sum * a + sum * c;
        for (uint32_t d = 0; d < r->head_dim; d++) {
            out[d] = out[d] * a + part[d] * c;
        }
        all_max = both;
    }
    for (uint32_t d = 0; d < r->head_dim; d++) {
        out[d] /= all_sum;
    }
}

#endif
