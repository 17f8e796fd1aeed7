#ifndef BT_TESTS_PARITY_KERNEL_PARITY_H
#define BT_TESTS_PARITY_KERNEL_PARITY_H

/* What the kernel parity tests share: one context per instruction set and thread count of this machine (the first is
 * plain C on one thread), seeded random data, comparison of bits. */

#include <stdbool.h>
#include <stdlib.h>
#include "base/mem.h"
#include "kernels/backend.h"
#include "tests/check.h"

#define PK_MAX 17

struct pk {
    struct bt_kctx *k[PK_MAX];
    const char *isa[PK_MAX];
    uint32_t threads[PK_MAX];
    int n;
};

/* numerics: the class; NULL: the default. */
static inline void pk_open_as(struct pk *p, const char *numerics)
{
    static const struct {
        const char *isa;
        uint32_t threads;
        const char *only; /* the class that it has kernels of its own for; NULL: all */
    } want[PK_MAX] = {{"plain", 1, NULL},
                      {"plain", 2, NULL},
                      {"plain-libm", 1, NULL},
                      {"avx2", 1, NULL},
                      {"avx2", 2, NULL},
                      {"avx2", 3, NULL},
                      {"avx512", 1, NULL},
                      {"avx512", 2, NULL},
                      {"avx512", 3, NULL},
                      {"auto", 2, NULL},
                      {"avx512-vnni", 1, "cpu-int8"},
                      {"avx512-vnni", 3, "cpu-int8"},
                      {"avx512-bf16", 1, "cpu-bf16"},
                      {"avx512-bf16", 3, "cpu-bf16"},
                      {"neon", 1, NULL},
                      {"neon", 2, NULL},
                      {"neon", 3, NULL}};

    p->n = 0;
    for (int i = 0; i < PK_MAX; i++) {
        struct bt_k_opts o = {
            .isa = want[i].isa, .n_threads = want[i].threads, .numerics = numerics};
        struct bt_err err;
        if (want[i].only != NULL && (numerics == NULL || strcmp(want[i].only, numerics) != 0)) {
            continue;
        }
        enum bt_status st = bt_k_create_cpu(&o, &p->k[p->n], &err);
        if (st == BT_ERR_UNSUPPORTED) {
            printf("not on this CPU: %s\n", want[i].isa);
            continue;
        }
        CHECK_EQ(st, BT_OK);
        p->isa[p->n] = want[i].isa;
        p->threads[p->n++] = want[i].threads;
    }
}

static inline void pk_open(struct pk *p)
{
    pk_open_as(p, NULL);
}

static inline void pk_close(struct pk *p)
{
    for (int i = 0; i < p->n; i++) {
        bt_k_destroy(p->k[i]);
    }
}

static uint64_t pk_seed = 0x9e3779b97f4a7c15U;

static inline uint32_t pk_u32(void)
{
    pk_seed = pk_seed * 6364136223846793005U + 1442695040888963407U;
    uint32_t x = (uint32_t)(pk_seed >> 32);
    return x ^ x >> 15;
}

/* The two bytes of a half, from the format's description. */
static inline double pk_half_value(const uint8_t *p)
{
    uint32_t h = (uint32_t)p[0] | (uint32_t)p[1] << 8, exponent = h >> 10 & 31, fraction = h & 1023;
    double v = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, (int)exponent - 25);

    return h >> 15 ? -v : v;
}

/* A random half of up to about 0.03, of both signs. */
static inline void pk_put_half(uint8_t *p)
{
    p[0] = (uint8_t)pk_u32();
    p[1] = (uint8_t)(0x1c + pk_u32() % 8 + (pk_u32() & 128));
}

static inline float pk_uniform(float lo, float hi)
{
    return lo + (hi - lo) * (float)(pk_u32() >> 8) * 0x1p-24F;
}

static inline float *pk_floats(size_t n, float lo, float hi)
{
    float *p = bt_alloc(n * sizeof(float) + 64);
    for (size_t i = 0; p != NULL && i < n; i++) {
        p[i] = pk_uniform(lo, hi);
    }
    return p;
}

/* n rows of k values as a file has them: random, no NaN, of magnitudes up to about 1. */
static inline uint8_t *pk_random_rows(enum bt_dtype t, uint32_t n, uint32_t k)
{
    size_t bytes = (size_t)n * k / bt_dtype_block_values(t) * bt_dtype_block_bytes(t);
    uint8_t *w = bt_alloc(bytes + 8);

    for (size_t i = 0; i < bytes; i++) {
        w[i] = (uint8_t)pk_u32();
    }
    for (size_t i = 0; i < bytes; i += bt_dtype_block_bytes(t)) {
        float f = pk_uniform(-1, 1);
        switch (t) {
        case BT_DTYPE_F32:
            memcpy(w + i, &f, 4);
            break;
        case BT_DTYPE_BF16:
            memcpy(w + i, (const uint8_t *)&f + 2, 2);
            break;
        case BT_DTYPE_F16:
        case BT_DTYPE_Q4_0:
        case BT_DTYPE_Q5_0:
        case BT_DTYPE_IQ4_NL:
        case BT_DTYPE_Q8_0:
            pk_put_half(w + i);
            break;
        case BT_DTYPE_Q2_K:
            pk_put_half(w + i + 80);
            pk_put_half(w + i + 82);
            break;
        case BT_DTYPE_Q3_K:
            pk_put_half(w + i + 108);
            break;
        case BT_DTYPE_Q6_K:
            pk_put_half(w + i + 208);
            break;
        case BT_DTYPE_G4:
        case BT_DTYPE_G8: /* as from scales of 16 bits: sums of scale and minimum are exact */
            f = rintf(f * 1024) / 65536;
            memcpy(w + i, &f, 4);
            f *= -(float)(pk_u32() % 16);
            memcpy(w + i + 4, &f, 4);
            break;
        case BT_DTYPE_GF8:
            f /= 256;
            memcpy(w + i, &f, 4);
            for (size_t j = i + 4; j < i + 36; j++) {
                w[j] = (w[j] & 0x7f) == 0x7f ? 0x7e : w[j];
            }
            break;
        default:
            pk_put_half(w + i);
            pk_put_half(w + i + 2);
            break;
        }
    }
    return w;
}

/* Equal bit for bit; says where and what not. */
static inline bool pk_same(const char *what, const struct pk *p, int i, const float *got,
                           const float *want, size_t n)
{
    bt_test_checks++;
    for (size_t j = 0; j < n; j++) {
        if (memcmp(&got[j], &want[j], sizeof(float)) != 0) {
            bt_test_failures++;
            fprintf(stderr, "%s: %s, %u threads: value %zu is %.9g, plain says %.9g\n", what,
                    p->isa[i], p->threads[i], j, (double)got[j], (double)want[j]);
            return false;
        }
    }
    return true;
}

/* A matrix for products. */
static inline struct bt_kweight *pk_weight(struct bt_kctx *k, enum bt_dtype t, const void *data,
                                           uint32_t n_rows, uint32_t n_cols)
{
    struct bt_k_weight_desc d = {
        .dtype = t, .n_rows = n_rows, .n_cols = n_cols, .data = data, .for_gemm = true};
    struct bt_kweight *w = NULL;
    CHECK_EQ(bt_k_weight_create(k, &d, &w, NULL), BT_OK);
    return w;
}

/* y = x w + bias, m rows of n, where no value of want is left in y but between the rows: that gap must stay. */
static inline void pk_gemm(struct bt_kctx *k, float *y, const float *want, size_t ldy,
                           const float *x, size_t ldx, const struct bt_kweight *w,
                           const float *bias, uint32_t m, uint32_t n)
{
    memcpy(y, want, m * ldy * sizeof(float));
    for (uint32_t r = 0; r < m; r++) {
        memset(y + r * ldy, 0xff, n * sizeof(float));
    }
    bt_k_gemm(k, y, ldy, x, ldx, w, bias, m);
}

/* |got - want| <= atol + rtol |want| for all; says the worst. */
static inline bool pk_near(const char *what, const float *got, const double *want, size_t n,
                           double atol, double rtol)
{
    double worst = 0;
    size_t at = 0;

    bt_test_checks++;
    for (size_t j = 0; j < n; j++) {
        double e = fabs((double)got[j] - want[j]) / (atol + rtol * fabs(want[j]));
        if (!(e <= worst)) {
            worst = e;
            at = j;
        }
    }
    if (!(worst <= 1.0)) {
        bt_test_failures++;
        fprintf(stderr, "%s: value %zu is %.9g, want %.9g: %.2f times the tolerance\n", what, at,
                (double)got[at], want[at], worst);
        return false;
    }
    return true;
}

#endif
