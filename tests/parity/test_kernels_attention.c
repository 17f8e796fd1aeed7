/* Paged causal attention: against double precision, equal bits on every instruction set and thread count, and equal bits
 * however a sequence is cut into chunks, paged, and batched with others. Memory that no position may see is filled with
 * NaN: a single read of it into a sum would show. */

#include "tests/parity/kernel_parity.h"

struct shape {
    uint32_t n_heads, n_kv_heads, head_dim, page_tokens, n_tokens, window;
    enum bt_dtype dtype;
    float softcap;
};

/* One sequence, its q, k, v rows and its paged cache. */
struct seq {
    struct shape s;
    float *q, *k, *v;
    struct bt_k_kv kv;
    uint32_t *pages;
    size_t kv_bytes;
    size_t q_stride, kv_stride;
};

static float rounded(float x, enum bt_dtype t)
{
    uint32_t u;

    if (t == BT_DTYPE_F32) {
        return x;
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

static void seq_init(struct seq *q, struct shape s)
{
    size_t width = (size_t)s.n_kv_heads * s.head_dim;
    uint32_t n_pages = (s.n_tokens + s.page_tokens - 1) / s.page_tokens;

    q->s = s;
    q->q_stride = (size_t)s.n_heads * s.head_dim + 7;
    q->kv_stride = width + 3;
    q->q = pk_floats(s.n_tokens * q->q_stride, -2, 2);
    q->k = pk_floats(s.n_tokens * q->kv_stride, -2, 2);
    q->v = pk_floats(s.n_tokens * q->kv_stride, -2, 2);
    q->kv = (struct bt_k_kv){.page_tokens = s.page_tokens,
                             .n_kv_heads = s.n_kv_heads,
                             .head_dim = s.head_dim,
                             .dtype = s.dtype};
    q->kv.page_stride = 2 * width * s.page_tokens * bt_dtype_block_bytes(s.dtype) + 64;
    q->kv_bytes = q->kv.page_stride * 2 * n_pages;
    q->kv.base = bt_alloc(q->kv_bytes);
    memset(q->kv.base, 0xff, q->kv_bytes); /* NaN in every dtype */
    q->pages = bt_alloc(n_pages * sizeof(uint32_t));
    for (uint32_t i = 0; i < n_pages; i++) {
        q->pages[i] = 2 * (n_pages - 1 - i) + (i & 1);
    }
}

static void seq_fini(struct seq *q)
{
    bt_free(q->q);
    bt_free(q->k);
    bt_free(q->v);
    bt_free(q->kv.base);
    bt_free(q->pages);
}

/* Tokens [from, from + n): store K and V, then attend, as a model does. */
static void seq_chunk(struct bt_kctx *k, struct seq *q, float *out, uint32_t from, uint32_t n)
{
    size_t width = (size_t)q->s.n_heads * q->s.head_dim;
    struct bt_k_span span = {.row = 0, .n = n, .pos = from, .pages = q->pages};
    struct bt_k_attn a = {.q = q->q + from * q->q_stride,
                          .out = out + from * width,
                          .q_stride = q->q_stride,
                          .out_stride = width,
                          .n_heads = q->s.n_heads,
                          .scale = 1.0F / sqrtf((float)q->s.head_dim),
                          .softcap = q->s.softcap,
                          .window = q->s.window};

    bt_k_kv_store(k, &q->kv, q->k + from * q->kv_stride, q->kv_stride, q->v + from * q->kv_stride,
                  q->kv_stride, &span, 1);
    bt_k_attention(k, &a, &q->kv, &span, 1);
}

static void reference(const struct seq *q, double *out)
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

static void test_shape(const struct pk *p, struct shape s)
{
    static const uint32_t chunks[] = {1, 5, 64, 1000};
    size_t n = (size_t)s.n_tokens * s.n_heads * s.head_dim;
    float *want = pk_floats(n, 0, 0), *got = pk_floats(n, 0, 0);
    double *ref = bt_alloc(n * sizeof(double));
    struct seq q;
    char what[128];

    snprintf(what, sizeof(what),
             "attention %s heads %u/%u dim %u page %u tokens %u window %u cap %g",
             bt_dtype_name(s.dtype), s.n_heads, s.n_kv_heads, s.head_dim, s.page_tokens, s.n_tokens,
             s.window, (double)s.softcap);
    seq_init(&q, s);
    reference(&q, ref);
    for (int i = 0; i < p->n; i++) {
        bool slow = strcmp(p->isa[i], "plain-libm") == 0; /* one way of cutting is enough */
        for (size_t c = slow ? 2 : 0; c < (slow ? 3 : 4); c++) {
            memset(q.kv.base, 0xff, q.kv_bytes);
            for (uint32_t t = 0; t < s.n_tokens; t += chunks[c]) {
                uint32_t left = s.n_tokens - t;
                seq_chunk(p->k[i], &q, i == 0 && c == 0 ? want : got, t,
                          left < chunks[c] ? left : chunks[c]);
            }
            if (i == 0 && c == 0) {
                pk_near(what, want, ref, n, 2e-6, 2e-6);
            } else if (!pk_same(what, p, i, got, want, n)) {
                fprintf(stderr, "  in chunks of %u\n", chunks[c]);
            }
        }
    }
    seq_fini(&q);
    bt_free(want);
    bt_free(got);
    bt_free(ref);
}

/* A ragged batch: sequences of other lengths in the same call change nothing. */
static void test_batch(const struct pk *p)
{
    const struct shape s = {6, 2, 48, 16, 150, 0, BT_DTYPE_BF16, 0};
    static const uint32_t n_rows[3] = {1, 20, 7}, pos[3] = {149, 40, 0};
    const size_t width = 6 * 48;
    float *q = pk_floats(28 * width, -2, 2), *alone = pk_floats(28 * width, 0, 0),
          *got = pk_floats(28 * width, 0, 0);
    struct bt_k_span spans[3];
    uint32_t pages[3][10];
    struct seq base;

    seq_init(&base, s);
    for (uint32_t i = 0; i < base.kv_bytes / 2; i++) {
        ((uint16_t *)base.kv.base)[i] = (uint16_t)(0x3f00 + pk_u32() % 256 + (pk_u32() & 0x8000));
    }
    for (uint32_t i = 0, row = 0; i < 3; i++) {
        for (uint32_t j = 0; j < 10; j++) {
            pages[i][j] = (j * 3 + i * 5) % 20;
        }
        spans[i] = (struct bt_k_span){.row = row, .n = n_rows[i], .pos = pos[i], .pages = pages[i]};
        row += n_rows[i];
    }
    for (int i = 0; i < p->n; i++) {
        struct bt_k_attn a = {.q = q,
                              .out = got,
                              .q_stride = width,
                              .out_stride = width,
                              .n_heads = 6,
                              .scale = 0.2F};
        bt_k_attention(p->k[i], &a, &base.kv, spans, 3);
        if (i == 0) {
            a.out = alone;
            for (int j = 0; j < 3; j++) {
                bt_k_attention(p->k[0], &a, &base.kv, &spans[j], 1);
            }
        }
        pk_same("batch", p, i, got, alone, 28 * width);
    }
    seq_fini(&base);
    bt_free(q);
    bt_free(alone);
    bt_free(got);
}

int main(void)
{
    static const struct shape shapes[] = {
        {3, 1, 24, 1, 70, 0, BT_DTYPE_F32, 0},      {4, 4, 32, 3, 131, 0, BT_DTYPE_F16, 0},
        {9, 3, 64, 16, 200, 0, BT_DTYPE_BF16, 0},   {8, 2, 80, 64, 140, 0, BT_DTYPE_F16, 30.0F},
        {4, 1, 128, 16, 190, 0, BT_DTYPE_F32, 0},   {4, 2, 64, 16, 260, 50, BT_DTYPE_BF16, 0},
        {2, 1, 24, 3, 150, 64, BT_DTYPE_F16, 0},    {2, 2, 64, 64, 130, 1, BT_DTYPE_F32, 5.0F},
        {2, 1, 256, 5, 66, 7, BT_DTYPE_BF16, 0},    {40, 1, 16, 16, 70, 0, BT_DTYPE_F32, 0},
        {16, 8, 128, 16, 150, 0, BT_DTYPE_BF16, 0}, {12, 6, 64, 32, 140, 0, BT_DTYPE_F16, 0},
        {10, 5, 32, 16, 150, 40, BT_DTYPE_F32, 0},  {72, 72, 16, 16, 70, 0, BT_DTYPE_BF16, 0},
    };
    struct pk p;

    pk_open(&p);
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        test_shape(&p, shapes[i]);
    }
    test_batch(&p);
    pk_close(&p);
    return bt_test_done();
}
