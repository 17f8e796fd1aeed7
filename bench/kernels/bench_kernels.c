/* Times the CPU kernels: matrix products by weight format and row count, attention, packing. First checks a few rows against
 * plain C, bit for bit. Weights are many times the last-level cache, as in decoding. Prints CSV with the machine's limits.
 *
 * bench-kernels [--isa I] [--threads N] [--type T] [--quick] [--cpu-time] */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "base/clock.h"
#include "base/mem.h"
#include "base/options.h"
#include "bench/limits/limits.h"
#include "kernels/backend.h"

#define DIM      2048U
#define ROWS_MAX 512U
#define Y_FLOATS (16U * 128 * 1024)

static struct bt_kctx *plain, *ctx;
static double seconds = 0.4; /* measured per figure */

static bool
    cpu_time; /* count the process's CPU time: on a machine shared with others, one thread only */

static uint64_t now_ns(void)
{
    struct timespec ts;

    if (!cpu_time) {
        return bt_clock_ns();
    }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
    return (uint64_t)ts.tv_sec * BT_NS_PER_S + (uint64_t)ts.tv_nsec;
}

static uint32_t rnd(void)
{
    static uint32_t s = 1;
    s = s * 1664525U + 1013904223U;
    return s ^ s >> 16;
}

static uint8_t *random_weight(enum bt_dtype t, size_t bytes)
{
    uint8_t *p = bt_alloc(bytes);
    uint32_t step = bt_dtype_block_bytes(t);

    for (size_t i = 0; p != NULL && i < bytes; i++) {
        p[i] = (uint8_t)rnd();
    }
    for (size_t i = 0; p != NULL && i < bytes;
         i += step) { /* no infinities: exponents of halves or floats */
        size_t at = t == BT_DTYPE_Q6_K ? i + 208 : i;
        p[t == BT_DTYPE_F32 ? at + 3 : at + 1] =
            t == BT_DTYPE_F32 || t == BT_DTYPE_BF16 ? 0x3c : 0x1c;
        if (t == BT_DTYPE_Q4_1 || t == BT_DTYPE_Q4_K) {
            p[at + 3] = 0x1c;
        }
    }
    return p;
}

static struct bt_kweight *make(struct bt_kctx *k, enum bt_dtype t, const void *data, uint32_t n)
{
    struct bt_k_weight_desc d = {
        .dtype = t, .n_rows = n, .n_cols = DIM, .data = data, .for_gemm = true};
    struct bt_kweight *w = NULL;
    struct bt_err err;

    if (bt_k_weight_create(k, &d, &w, &err) != BT_OK) {
        fprintf(stderr, "bench-kernels: %s\n", err.msg);
        exit(1);
    }
    return w;
}

static void verify(enum bt_dtype t, const void *data, const float *x, float *y)
{
    static const uint32_t rows[] = {1, 3, 13};
    struct bt_kweight *a = make(plain, t, data, 64), *b = make(ctx, t, data, 64);

    for (size_t i = 0; i < 3; i++) {
        bt_k_gemm(plain, y, 64, x, DIM, a, NULL, rows[i]);
        bt_k_gemm(ctx, y + 16 * 64, 64, x, DIM, b, NULL, rows[i]);
        if (memcmp(y, y + 16 * 64, rows[i] * 64 * sizeof(float)) != 0) {
            fprintf(stderr, "bench-kernels: %s, %u rows: other bits than plain C\n",
                    bt_dtype_name(t), rows[i]);
            exit(1);
        }
    }
    bt_k_weight_destroy(plain, a);
    bt_k_weight_destroy(ctx, b);
}

static void bench_gemm(enum bt_dtype t, bool quick)
{
    static const uint32_t rows[] = {1, 2, 4, 5, 8, 16, 64, 512};
    uint32_t n =
        120U * 1024 * 1024 / (DIM / bt_dtype_block_values(t) * bt_dtype_block_bytes(t)) / 16 * 16;
    size_t bytes = (size_t)n * (DIM / bt_dtype_block_values(t)) * bt_dtype_block_bytes(t);
    uint8_t *data = random_weight(t, bytes);
    float *x = bt_alloc(ROWS_MAX * DIM * sizeof(float)),
          *y = bt_alloc((size_t)Y_FLOATS * sizeof(float));

    for (uint32_t i = 0; i < ROWS_MAX * DIM; i++) {
        x[i] = (float)(int32_t)rnd() * 0x1p-31F;
    }
    memset(y, 0, Y_FLOATS * sizeof(float));
    verify(t, data, x, y);
    uint64_t t0 = now_ns();
    struct bt_kweight *whole = make(ctx, t, data, n), *slice = make(ctx, t, data, 2048);
    double pack = (double)(now_ns() - t0) * 1e-9;
    printf("pack,%s,,%zu,%.3f,,%.2f\n", bt_dtype_name(t), bytes, pack, (double)bytes / pack * 1e-9);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        double best = 1e9, total = 0;
        const struct bt_kweight *w =
            rows[i] < 64 ? whole : slice; /* many rows: bound by arithmetic */
        uint32_t cols = rows[i] < 64 ? n : 2048;
        if (quick && rows[i] != 1 && rows[i] != 512) {
            continue;
        }
        for (int rep = 0; rep < 3 || (total < seconds && rep < 50); rep++) {
            t0 = now_ns();
            bt_k_gemm(ctx, y, cols, x, DIM, w, NULL, rows[i]);
            double s = (double)(now_ns() - t0) * 1e-9;
            best = s < best ? s : best;
            total += s;
            if (total > 3 * seconds) {
                break;
            }
        }
        printf("gemm,%s,%u,%zu,%.6f,%.1f,%.2f\n", bt_dtype_name(t), rows[i], bt_k_weight_bytes(w),
               best, 2.0 * rows[i] * cols * DIM / best * 1e-9,
               (double)bt_k_weight_bytes(w) / best * 1e-9);
        fflush(stdout);
    }
    bt_k_weight_destroy(ctx, whole);
    bt_k_weight_destroy(ctx, slice);
    bt_free(data);
    bt_free(x);
    bt_free(y);
}

/* A prompt of 2048 tokens in its last chunk of 512, and one decode step at 2048. */
static void bench_attention(enum bt_dtype t, uint32_t head_dim)
{
    const uint32_t n_heads = 16, n_kv = 4, page_tokens = 16, n_pages = 128,
                   width = n_heads * head_dim;
    struct bt_k_kv kv = {.page_tokens = page_tokens,
                         .n_kv_heads = n_kv,
                         .head_dim = head_dim,
                         .dtype = t,
                         .page_stride =
                             2UL * n_kv * page_tokens * head_dim * bt_dtype_block_bytes(t)};
    float *q = bt_calloc((size_t)512 * width, sizeof(float)),
          *out = bt_calloc((size_t)512 * width, sizeof(float));
    uint32_t pages[128];

    kv.base = bt_calloc(n_pages, kv.page_stride);
    for (uint32_t i = 0; i < n_pages; i++) {
        pages[i] = (i * 37) % n_pages;
    }
    struct bt_k_attn a = {.q = q,
                          .out = out,
                          .q_stride = width,
                          .out_stride = width,
                          .n_heads = n_heads,
                          .scale = 0.1F};
    for (uint32_t rows = 1; rows <= 512; rows += 511) {
        struct bt_k_span span = {.n = rows, .pos = 2048 - rows, .pages = pages};
        double best = 1e9, pairs = 0;
        for (uint32_t i = 0; i < rows; i++) {
            pairs += (double)(span.pos + i + 1) * n_heads;
        }
        for (int rep = 0; rep < 10; rep++) {
            uint64_t t0 = now_ns();
            bt_k_attention(ctx, &a, &kv, &span, 1);
            double s = (double)(now_ns() - t0) * 1e-9;
            best = s < best ? s : best;
        }
        printf("attention head_dim %u,%s,%u,%zu,%.6f,%.1f,%.2f\n", head_dim, bt_dtype_name(t), rows,
               n_pages * kv.page_stride, best, pairs * 4 * head_dim / best * 1e-9,
               (double)(n_pages * kv.page_stride) / best * 1e-9);
    }
    bt_free(kv.base);
    bt_free(q);
    bt_free(out);
}

int main(int argc, char **argv)
{
    struct bt_k_opts opts = {0};
    struct bt_err err;
    bool quick = false;
    const char *only = NULL;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0) {
            quick = true;
        } else if (strcmp(argv[i], "--cpu-time") == 0) {
            cpu_time = true;
        } else if (i + 1 < argc && strcmp(argv[i], "--isa") == 0) {
            opts.isa = argv[++i];
        } else if (i + 1 < argc && strcmp(argv[i], "--threads") == 0) {
            opts.n_threads = (uint32_t)strtoul(argv[++i], NULL, 10);
        } else if (i + 1 < argc && strcmp(argv[i], "--type") == 0) {
            only = argv[++i];
        } else {
            fprintf(
                stderr,
                "usage: bench-kernels [--isa I] [--threads N] [--type T] [--quick] [--cpu-time]\n");
            return 2;
        }
    }
    if (bt_k_create_cpu(&opts, &ctx, &err) != BT_OK ||
        bt_k_create_cpu(&(struct bt_k_opts){.isa = "plain", .n_threads = 1}, &plain, &err) !=
            BT_OK) {
        fprintf(stderr, "bench-kernels: %s\n", err.msg);
        return 1;
    }
    uint32_t threads = opts.n_threads != 0 ? opts.n_threads : bt_cpus_usable();
    printf("# %s; limits in this run: FMA %.1f GFLOP/s, int8 %.1f GOP/s, read %.1f GB/s\n",
           bt_k_describe(ctx), bench_limit_fma(threads), bench_limit_int8(threads),
           bench_limit_read(threads));
    printf("op,type,rows,bytes,seconds,gflops,gbytes_per_s\n");
    for (int t = 0; t < BT_DTYPE_COUNT; t++) {
        if (only == NULL || strcmp(only, bt_dtype_name((enum bt_dtype)t)) == 0) {
            bench_gemm((enum bt_dtype)t, quick);
        }
    }
    if (only == NULL) {
        bench_attention(BT_DTYPE_BF16, 64);
        bench_attention(BT_DTYPE_BF16, 128);
        bench_attention(BT_DTYPE_F32, 64);
    }
    bt_k_destroy(ctx);
    bt_k_destroy(plain);
    return 0;
}
