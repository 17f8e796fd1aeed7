/* Products x · wᵀ and embedding rows of one weight type. Few rows read weights many times larger than the caches, as decoding
 * does; many rows are bound by arithmetic and take the matrices of a 0.6B model. */

#include "bench/kernels/bench_kernels_int.h"

#include <stdio.h>
#include <stdlib.h>
#include "base/mem.h"

#define STREAM_BYTES (128UL << 20)
#define ROWS_MAX     512U
#define DIM_MAX      3072U

struct product {
    const struct bt_kweight *w;
    const float *x;
    float *y;
    uint32_t n, k, rows;
    uint32_t ids[ROWS_MAX];
};

/* Bytes of blocks whose scales, wherever they lie, are small numbers. */
static uint8_t *made_up_weight(enum bt_dtype t, size_t bytes)
{
    uint8_t *p = bench_memory(bytes);

    for (size_t i = 0; i < bytes; i++) {
        uint32_t r = bench_random();
        /* e4m3: no subnormal codes, of which a model has few, and no NaN */
        p[i] = (uint8_t)(t == BT_DTYPE_GF8 && i % 36 >= 4 ? (r & 0xdeU) | 0x20U : r & 0x2fU);
    }
    uint32_t width = bt_dtype_block_values(t) > 1 ? 0 : bt_dtype_block_bytes(t);
    for (size_t i = width; width > 0 && i <= bytes; i += width) { /* and no subnormal ones */
        p[i - 1] = 0x3c;
    }
    return p;
}

static size_t weight_bytes(enum bt_dtype t, uint32_t n, uint32_t k)
{
    return (size_t)n * (k / bt_dtype_block_values(t)) * bt_dtype_block_bytes(t);
}

static struct bt_kweight *make(struct bt_kctx *k, enum bt_dtype t, const void *data, uint32_t n,
                               uint32_t cols, bool embed)
{
    struct bt_k_weight_desc d = {.dtype = t,
                                 .n_rows = n,
                                 .n_cols = cols,
                                 .data = data,
                                 .for_gemm = !embed,
                                 .for_embed = embed};
    struct bt_kweight *w = NULL;
    struct bt_err err = {0};

    if (bt_k_weight_create(k, &d, &w, &err) != BT_OK) {
        fprintf(stderr, "bench-kernels: %s\n", err.msg);
        exit(1);
    }
    return w;
}

static void verify(struct bench *b, enum bt_dtype t, const void *data, const struct product *p)
{
    static const uint32_t rows[] = {1, 3, 13};
    struct bt_kweight *want = make(b->plain, t, data, 64, p->k, false),
                      *have = make(b->k, t, data, 64, p->k, false);

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        bt_k_gemm(b->plain, p->y, 64, p->x, p->k, want, NULL, rows[i]);
        bt_k_gemm(b->k, p->y + 16 * 64, 64, p->x, p->k, have, NULL, rows[i]);
        bench_equal(bt_dtype_name(t), p->y, p->y + 16 * 64, (size_t)rows[i] * 64);
    }
    bt_k_weight_destroy(b->plain, want);
    bt_k_weight_destroy(b->k, have);
}

static void run_gemm(struct bench *b, void *arg)
{
    struct product *p = arg;

    bt_k_gemm(b->k, p->y, p->n, p->x, p->k, p->w, NULL, p->rows);
}

static void run_embed(struct bench *b, void *arg)
{
    struct product *p = arg;

    bt_k_embed(b->k, p->y, p->w, p->ids, p->rows, 1.0F);
}

static void time_product(struct bench *b, enum bt_dtype t, struct product *p, bool flush)
{
    char shape[32];

    (void)snprintf(shape, sizeof(shape), "%ux%u", p->n, p->k); /* fits */
    bench_time(b, &(struct bench_figure){.kernel = "product",
                                         .type = bt_dtype_name(t),
                                         .shape = shape,
                                         .rows = p->rows,
                                         .ops = 2.0 * p->rows * p->n * p->k,
                                         .bytes = (double)bt_k_weight_bytes(p->w),
                                         .flush = flush,
                                         .fn = run_gemm,
                                         .arg = p});
}

static void few_rows(struct bench *b, enum bt_dtype t, struct product *p)
{
    static const uint32_t rows[] = {1, 2, 4, 8, 16, 32};

    p->k = 2048;
    p->n = (uint32_t)(STREAM_BYTES / weight_bytes(t, 16, p->k)) * 16;
    uint8_t *data = made_up_weight(t, weight_bytes(t, p->n, p->k));
    struct bt_kweight *w = make(b->k, t, data, p->n, p->k, false);
    p->y = bench_memory((size_t)32 * p->n * sizeof(float));
    verify(b, t, data, p);
    p->w = w;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        p->rows = rows[i];
        if (!b->quick || rows[i] == 1 || rows[i] == 8) {
            time_product(b, t, p, false);
        }
    }
    bt_k_weight_destroy(b->k, w);
    bt_free(p->y);
    bt_free(data);
}

static void many_rows(struct bench *b, enum bt_dtype t, struct product *p)
{
    static const uint32_t shapes[][2] = {{2048, 1024}, {1024, 2048}, {3072, 1024}, {1024, 3072}};

    p->y = bench_memory((size_t)ROWS_MAX * DIM_MAX * sizeof(float));
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        p->n = shapes[i][0];
        p->k = shapes[i][1];
        uint8_t *data = made_up_weight(t, weight_bytes(t, p->n, p->k));
        struct bt_kweight *w = make(b->k, t, data, p->n, p->k, false);
        p->w = w;
        for (p->rows = 64; p->rows <= ROWS_MAX; p->rows *= 8) {
            if (!b->quick || (i == 2 && p->rows == ROWS_MAX)) {
                time_product(b, t, p, true);
            }
        }
        bt_k_weight_destroy(b->k, w);
        bt_free(data);
    }
    bt_free(p->y);
}

static void embedding(struct bench *b, enum bt_dtype t, struct product *p)
{
    p->n = 32000;
    p->k = 1024;
    p->rows = ROWS_MAX;
    p->y = bench_memory((size_t)ROWS_MAX * p->k * sizeof(float));
    uint8_t *data = made_up_weight(t, weight_bytes(t, p->n, p->k));
    struct bt_kweight *w = make(b->k, t, data, p->n, p->k, true);

    for (uint32_t i = 0; i < ROWS_MAX; i++) {
        p->ids[i] = bench_random() % p->n;
    }
    p->w = w;
    bench_time(b, &(struct bench_figure){.kernel = "embed",
                                         .type = bt_dtype_name(t),
                                         .shape = "32000x1024",
                                         .rows = ROWS_MAX,
                                         .bytes = (double)weight_bytes(t, ROWS_MAX, p->k) +
                                                  ROWS_MAX * p->k * sizeof(float),
                                         .flush = true,
                                         .fn = run_embed,
                                         .arg = p});
    bt_k_weight_destroy(b->k, w);
    bt_free(data);
    bt_free(p->y);
}

void bench_products(struct bench *b, enum bt_dtype t)
{
    static struct product p;
    float *x = bench_floats((size_t)ROWS_MAX * DIM_MAX);

    p.x = x;
    few_rows(b, t, &p);
    many_rows(b, t, &p);
    embedding(b, t, &p);
    bt_free(x);
}
