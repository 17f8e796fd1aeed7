#ifndef BT_TESTS_PARITY_ATTENTION_SHAPE_H
#define BT_TESTS_PARITY_ATTENTION_SHAPE_H

/* The shape of one attention test, how its sequence lies in memory (rows with something between them, pages with something
 * between them, backwards and with holes), and its computing chunk by chunk. */

#include "tests/parity/kernel_parity.h"

struct shape {
    uint32_t n_heads, n_kv_heads, head_dim, page_tokens, n_tokens, window;
    enum bt_dtype dtype;
    float softcap;
};

/* Floats from one row of q, or of k and v, to the next. */
static inline size_t shape_q_stride(const struct shape *s)
{
    return (size_t)s->n_heads * s->head_dim + 7;
}

static inline size_t shape_kv_stride(const struct shape *s)
{
    return (size_t)s->n_kv_heads * s->head_dim + 3;
}

static inline uint32_t shape_n_pages(const struct shape *s)
{
    return (s->n_tokens + s->page_tokens - 1) / s->page_tokens;
}

/* The cache but for its memory, of *bytes. */
static inline struct bt_k_kv shape_kv(const struct shape *s, size_t *bytes)
{
    struct bt_k_kv kv = {.page_tokens = s->page_tokens,
                         .n_kv_heads = s->n_kv_heads,
                         .head_dim = s->head_dim,
                         .dtype = s->dtype};

    kv.page_stride =
        2 * (size_t)s->n_kv_heads * s->head_dim * s->page_tokens * bt_dtype_block_bytes(s->dtype) +
        64;
    *bytes = kv.page_stride * 2 * shape_n_pages(s);
    return kv;
}

/* Its page table; the caller frees it. */
static inline uint32_t *shape_pages(const struct shape *s)
{
    uint32_t n = shape_n_pages(s), *pages = bt_alloc(n * sizeof(*pages));

    for (uint32_t i = 0; i < n; i++) {
        pages[i] = 2 * (n - 1 - i) + (i & 1);
    }
    return pages;
}

/* A sequence of that shape, in memory of the backend that computes it. */
struct shape_rows {
    const float *q, *k, *v;
    float *out; /* [n_tokens, n_heads * head_dim] */
    const struct bt_k_kv *kv;
    const uint32_t *pages; /* host */
};

/* Tokens [from, from + n): store K and V, then attend, as a model does. */
static inline void shape_chunk(struct bt_kctx *k, const struct shape *s, const struct shape_rows *r,
                               uint32_t from, uint32_t n)
{
    const size_t width = (size_t)s->n_heads * s->head_dim, q_stride = shape_q_stride(s),
                 kv_stride = shape_kv_stride(s);
    const struct bt_k_span span = {.row = 0, .n = n, .pos = from, .pages = r->pages};
    const struct bt_k_attn a = {.q = r->q + from * q_stride,
                                .out = r->out + from * width,
                                .q_stride = q_stride,
                                .out_stride = width,
                                .n_heads = s->n_heads,
                                .scale = 1.0F / sqrtf((float)s->head_dim),
                                .softcap = s->softcap,
                                .window = s->window};

    bt_k_kv_store(k, r->kv, r->k + from * kv_stride, kv_stride, r->v + from * kv_stride, kv_stride,
                  &span, 1);
    bt_k_attention(k, &a, r->kv, &span, 1);
}

#endif
