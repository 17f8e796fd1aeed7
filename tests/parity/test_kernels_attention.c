/* Paged causal attention: against double precision, equal bits on every instruction set and thread count, and equal bits
 * however a sequence is cut into chunks, paged, and batched with others, and for pages of 8 bits those of f32 pages with the same
 * numbers. Memory that no position may see is filled with
 * NaN: a single read of it into a sum would show. */

#include "tests/parity/attention_parity.h"

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
    seq_reference(&q, ref);
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

/* Pages of 8 bits give the bits of f32 pages that hold the same numbers. */
static void test_f8(const struct pk *p, struct shape s)
{
    static const uint32_t chunks[] = {1, 33};
    size_t n = (size_t)s.n_tokens * s.n_heads * s.head_dim;
    float *want = pk_floats(n, 0, 0), *got = pk_floats(n, 0, 0);
    struct seq q, f32;

    seq_init(&q, s);
    for (size_t i = 0; i < s.n_tokens * q.kv_stride; i += 5) { /* small and large ones too */
        q.k[i] *= ldexpf(1, (int)(pk_u32() % 14) - 12);
        q.v[i] *= ldexpf(1, (int)(pk_u32() % 22) - 12);
    }
    f32 = q;
    f32.kv.dtype = BT_DTYPE_F32;
    f32.kv.page_stride *= 4;
    f32.kv_bytes *= 4;
    f32.kv.base = bt_alloc(f32.kv_bytes);
    f32.k = pk_floats(s.n_tokens * q.kv_stride, 0, 0);
    f32.v = pk_floats(s.n_tokens * q.kv_stride, 0, 0);
    memcpy(f32.k, q.k, s.n_tokens * q.kv_stride * sizeof(float));
    memcpy(f32.v, q.v, s.n_tokens * q.kv_stride * sizeof(float));
    seq_round(&f32);
    for (int i = 0; i < p->n; i++) {
        for (size_t c = 0; c < 2; c++) {
            memset(f32.kv.base, 0xff, f32.kv_bytes);
            memset(q.kv.base, 0xff, q.kv_bytes);
            for (uint32_t t = 0; t < s.n_tokens; t += chunks[c]) {
                uint32_t left = s.n_tokens - t, m = left < chunks[c] ? left : chunks[c];
                seq_chunk(p->k[i], &q, got, t, m);
                seq_chunk(p->k[i], &f32, want, t, m);
            }
            pk_same("f8 pages and f32 pages", p, i, got, want, n);
        }
    }
    seq_fini(&q);
    bt_free(f32.kv.base);
    bt_free(f32.k);
    bt_free(f32.v);
    bt_free(want);
    bt_free(got);
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
        {6, 3, 24, 5, 150, 0, BT_DTYPE_F8, 0},      {4, 2, 128, 16, 140, 50, BT_DTYPE_F8, 30.0F},
    };
    static const struct shape f8[] = {
        {9, 3, 64, 16, 200, 0, BT_DTYPE_F8, 0},  {3, 1, 24, 1, 70, 0, BT_DTYPE_F8, 0},
        {4, 1, 128, 16, 80, 20, BT_DTYPE_F8, 0}, {40, 1, 16, 16, 70, 0, BT_DTYPE_F8, 0},
        {2, 2, 31, 64, 130, 1, BT_DTYPE_F8, 0},  {2, 1, 256, 5, 66, 7, BT_DTYPE_F8, 5.0F},
        {12, 6, 80, 32, 90, 0, BT_DTYPE_F8, 0},
    };
    static const char *const classes[] = {"cpu-bf16", "cpu-f32"};
    struct pk p;

    pk_open(&p);
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        test_shape(&p, shapes[i]);
    }
    test_batch(&p);
    pk_close(&p);
    for (size_t c = 0; c < 2; c++) {
        pk_open_as(&p, classes[c]);
        for (size_t i = 0; i < sizeof(f8) / sizeof(f8[0]); i++) {
            test_f8(&p, f8[i]);
        }
        pk_close(&p);
    }
    return bt_test_done();
}
