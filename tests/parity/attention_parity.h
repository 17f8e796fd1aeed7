#ifndef BT_TESTS_PARITY_ATTENTION_PARITY_H
#define BT_TESTS_PARITY_ATTENTION_PARITY_H

/* What the attention tests share: one sequence with its paged cache, computed in chunks. */

#include "tests/parity/attention_shape.h"

/* One sequence, its q, k, v rows and its paged cache. */
struct seq {
    struct shape s;
    float *q, *k, *v;
    struct bt_k_kv kv;
    uint32_t *pages;
    size_t kv_bytes;
    size_t q_stride, kv_stride;
};

/* To a number of e4m3: four significant bits, multiples of 2^-9, at most 448. */
static inline float rounded_f8(float x)
{
    int e = 0;

    if (isnan(x)) {
        return x;
    }
    if (fabsf(x) > 448) {
        return copysignf(448, x);
    }
    (void)frexpf(x, &e);
    e = e < -5 ? -9 : e - 4;
    return ldexpf(rintf(ldexpf(x, -e)), e);
}

static inline float rounded(float x, enum bt_dtype t)
{
    uint32_t u;

    if (t == BT_DTYPE_F32) {
        return x;
    }
    if (t == BT_DTYPE_F8) {
        return rounded_f8(x);
    }
    if (t == BT_DTYPE_BF16) {
        memcpy(&u, &x, 4);
        u = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000U;
        memcpy(&x, &u, 4);
        return x;
    }
    int e = 0;
    (void)frexpf(x, &e);
    e = e < -13 ? -24 : e - 11;
    return ldexpf(rintf(ldexpf(x, -e)), e);
}

static inline void seq_init(struct seq *q, struct shape s)
{
    q->s = s;
    q->q_stride = shape_q_stride(&s);
    q->kv_stride = shape_kv_stride(&s);
    q->q = pk_floats(s.n_tokens * q->q_stride, -2, 2);
    q->k = pk_floats(s.n_tokens * q->kv_stride, -2, 2);
    q->v = pk_floats(s.n_tokens * q->kv_stride, -2, 2);
    q->kv = shape_kv(&s, &q->kv_bytes);
    q->kv.base = bt_alloc(q->kv_bytes);
    memset(q->kv.base, 0xff, q->kv_bytes); /* NaN in every dtype */
    q->pages = shape_pages(&s);
}

static inline void seq_fini(struct seq *q)
{
    bt_free(q->q);
    bt_free(q->k);
    bt_free(q->v);
    bt_free(q->kv.base);
    bt_free(q->pages);
}

/* q->k and q->v become what pages of q's type make of them. */
static inline void seq_round(struct seq *q)
{
    for (size_t i = 0; i < q->s.n_tokens * q->kv_stride; i++) {
        q->k[i] = rounded(q->k[i], q->s.dtype);
        q->v[i] = rounded(q->v[i], q->s.dtype);
    }
}

/* Tokens [from, from + n): store K and V, then attend, as a model does. */
static inline void seq_chunk(struct bt_kctx *k, struct seq *q, float *out, uint32_t from,
                             uint32_t n)
{
    const struct shape_rows r = {
        .q = q->q, .k = q->k, .v = q->v, .out = out, .kv = &q->kv, .pages = q->pages};

    shape_chunk(k, &q->s, &r, from, n);
}

/* In double precision, of K and V as stored. */
static inline void seq_reference(const struct seq *q, double *out)
{
    const struct shape *s = &q->s;
    uint32_t group = s->n_heads / s->n_kv_heads, dim = s->head_dim;
    double *p = bt_alloc(s->n_tokens * sizeof(double));

    for (uint32_t t = 0; t < s->n_tokens; t++) {
        for (uint32_t h = 0; h < s->n_heads; h++) {
            uint32_t from = s->window != 0 && t >= s->window ? t - s->window + 1 : 0;
            double max = -1e300, sum = 0, *o = out + ((size_t)t * s->n_heads + h) * dim;
            for (uint32_t j = from; j <= t; j++) {
                double dot = 0;
                for (uint32_t d = 0; d < dim; d++) {
                    dot += (double)q->q[t * q->q_stride + h * dim + d] *
                           (double)rounded(q->k[j * q->kv_stride + h / group * dim + d], s->dtype);
                }
                dot /= sqrt((double)dim);
                p[j] = s->softcap > 0 ? (double)s->softcap * tanh(dot / (double)s->softcap) : dot;
                max = p[j] > max ? p[j] : max;
            }
            memset(o, 0, dim * sizeof(double));
            for (uint32_t j = from; j <= t; j++) {
                double e = exp(p[j] - max);
                sum += e;
                for (uint32_t d = 0; d < dim; d++) {
                    o[d] +=
                        e * (double)rounded(q->v[j * q->kv_stride + h / group * dim + d], s->dtype);
                }
            }
            for (uint32_t d = 0; d < dim; d++) {
                o[d] /= sum;
            }
        }
    }
    bt_free(p);
}

#endif
