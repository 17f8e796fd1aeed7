/* Class cpu-bf16: every product of bf16 weights has the bits of its definition in kernels/backend.h, written here a second time,
 * on every instruction set, thread count and row count. Other weights have the f32 class's bits. An instruction that does
 * something else is found out. */

#include "kernels/cpu/bf16_spec.h"
#include "tests/parity/bf16_parity.h"

/* To eight significant bits. */
static float activation(float f)
{
    int e;
    double m = frexp((double)f, &e), r = ldexp(rint(m * 256), e - 8);

    return !isfinite(f)           ? f
           : r > 0x1p127 * 1.999  ? INFINITY
           : r < -0x1p127 * 1.999 ? -INFINITY
                                  : flushed((float)r);
}

static uint16_t bits_of(const uint8_t *row, uint32_t k)
{
    return (uint16_t)(row[2 * k] | row[2 * k + 1] << 8);
}

static float weight_of(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float f;

    memcpy(&f, &bits, sizeof(f));
    return flushed(f);
}

static float product(const float *x, const uint8_t *row, uint32_t n_cols)
{
    float acc = 0;

    for (uint32_t i = 0; i < n_cols; i += 2) {
        for (uint32_t k = i + 2; k-- > i;) { /* the odd one first */
            acc = k < n_cols ? fused(activation(x[k]), weight_of(bits_of(row, k)), acc)
                             : fused(0, 0, acc);
        }
    }
    return acc;
}

/* Exponents from lo to lo + n - 1. */
static float number(uint32_t lo, uint32_t n)
{
    uint32_t bits = (pk_u32() & 0x807fffffU) | (lo + pk_u32() % n) << 23;
    float f;

    memcpy(&f, &bits, sizeof(f));
    return f;
}

enum kind { ORDINARY, SMALL, EDGE, LARGE, ANY, KINDS };

static float random_x(enum kind kind)
{
    float f = kind == SMALL   ? number(0, 70)
              : kind == EDGE  ? number(50, 4)
              : kind == LARGE ? number(150, 100)
              : kind == ANY   ? number(0, 256)
                              : number(115, 14);
    uint32_t bits;

    memcpy(&bits, &f, sizeof(bits));
    switch (pk_u32() % 8) {
    case 0: /* halfway between two */
        bits = (bits & 0xffff0000U) | 0x8000U;
        break;
    case 1: /* few bits */
        bits &= 0xff800000U;
        break;
    default:
        break;
    }
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static void random_row(uint8_t *row, uint32_t n_cols, enum kind kind)
{
    for (uint32_t k = 0; k < n_cols; k++) {
        float f = kind == SMALL   ? number(40, 40)
                  : kind == EDGE  ? number(51, 3)
                  : kind == LARGE ? number(100, 30)
                  : kind == ANY   ? number(0, 256)
                                  : number(115, 14);
        uint32_t bits;
        memcpy(&bits, &f, sizeof(bits));
        bits &= pk_u32() % 4 == 0 ? 0xff800000U : UINT32_MAX;
        row[2 * k] = (uint8_t)(bits >> 16);
        row[2 * k + 1] = (uint8_t)(bits >> 24);
    }
}

/* NaNs count as equal. */
static void same(const char *what, const struct pk *p, int i, float *got, const float *want,
                 size_t n)
{
    for (size_t j = 0; j < n; j++) {
        if (isnan(got[j]) && isnan(want[j])) {
            got[j] = want[j];
        }
    }
    pk_same(what, p, i, got, want, n);
}

static void test_shape(const struct pk *p, enum kind kind, uint32_t m, uint32_t n, uint32_t k,
                       bool bias)
{
    const size_t ldx = k + 3, ldy = n + 5;
    uint8_t *rows = bt_alloc((size_t)n * k * 2);
    float *x = bt_alloc(m * ldx * sizeof(float)), *b = bt_alloc(n * sizeof(float));
    float *want = pk_floats(m * ldy, -1, 1), *y = pk_floats(m * ldy, -1, 1);
    char what[96];

    random_row(rows, n * k, kind);
    for (size_t i = 0; i < m * ldx; i++) {
        x[i] = random_x(kind);
    }
    for (uint32_t j = 0; j < n; j++) {
        b[j] = kind == SMALL || kind == EDGE ? number(0, 3) : number(115, 14);
    }
    for (uint32_t r = 0; r < m; r++) {
        for (uint32_t j = 0; j < n; j++) {
            float acc = product(x + r * ldx, rows + (size_t)j * k * 2, k);
            want[r * ldy + j] = bias ? flushed(acc + flushed(b[j])) : acc;
        }
    }
    snprintf(what, sizeof(what), "bf16 gemm kind %d m %u n %u k %u", (int)kind, m, n, k);
    for (int i = 0; i < p->n; i++) {
        struct bt_kweight *w = pk_weight(p->k[i], BT_DTYPE_BF16, rows, n, k);
        pk_gemm(p->k[i], y, want, ldy, x, ldx, w, bias ? b : NULL, m, n);
        same(what, p, i, y, want, m * ldy);
        bt_k_weight_destroy(p->k[i], w);
    }
    bt_free(rows);
    bt_free(x);
    bt_free(b);
    bt_free(want);
    bt_free(y);
}

static void test_other_weights(const struct pk *p, const struct pk *f32, enum bt_dtype t)
{
    const uint32_t m = 6, n = 35, k = 130;
    float *x = pk_floats(m * k, -1, 1), *want = bt_alloc(m * n * sizeof(float)),
          *y = bt_alloc(m * n * sizeof(float));
    uint8_t *w = bt_alloc(n * k * 4);

    random_row(w, n * k * 2, ORDINARY);
    struct bt_kweight *a = pk_weight(f32->k[0], t, w, n, k);
    bt_k_gemm(f32->k[0], want, n, x, k, a, NULL, m);
    bt_k_weight_destroy(f32->k[0], a);
    for (int i = 0; i < p->n; i++) {
        a = pk_weight(p->k[i], t, w, n, k);
        bt_k_gemm(p->k[i], y, n, x, k, a, NULL, m);
        pk_same("other weights in class cpu-bf16", p, i, y, want, m * n);
        bt_k_weight_destroy(p->k[i], a);
    }
    bt_free(w);
    bt_free(x);
    bt_free(want);
    bt_free(y);
}

/* ---- what cpu_bf16_check lets pass ---- */

static float half_of(uint32_t word, int half)
{
    return bt_bf16_to_f32((uint16_t)(word >> 16 * half));
}

static void as_defined(float acc[16], const uint32_t x[16], const uint32_t w[16])
{
    for (int i = 0; i < 16; i++) {
        acc[i] = bf16_dot2(acc[i], x[i], w[i]);
    }
}

static void even_first(float acc[16], const uint32_t x[16], const uint32_t w[16])
{
    for (int i = 0; i < 16; i++) {
        acc[i] = bf16_dot2(acc[i], x[i] >> 16 | x[i] << 16, w[i] >> 16 | w[i] << 16);
    }
}

static void denormals_kept(float acc[16], const uint32_t x[16], const uint32_t w[16])
{
    for (int i = 0; i < 16; i++) {
        acc[i] = fmaf(half_of(x[i], 1), half_of(w[i], 1), acc[i]);
        acc[i] = fmaf(half_of(x[i], 0), half_of(w[i], 0), acc[i]);
    }
}

static void flushed_after_rounding_to_denormals(float acc[16], const uint32_t x[16],
                                                const uint32_t w[16])
{
    for (int i = 0; i < 16; i++) {
        for (int half = 1; half >= 0; half--) {
            acc[i] = flushed(
                fmaf(flushed(half_of(x[i], half)), flushed(half_of(w[i], half)), flushed(acc[i])));
        }
    }
}

static void pair_added_first(float acc[16], const uint32_t x[16], const uint32_t w[16])
{
    for (int i = 0; i < 16; i++) {
        float pair = flushed(half_of(x[i], 1)) * flushed(half_of(w[i], 1));
        acc[i] = flushed(flushed(acc[i]) +
                         fused(flushed(half_of(x[i], 0)), flushed(half_of(w[i], 0)), pair));
    }
}

static void rounded_once(float acc[16], const uint32_t x[16], const uint32_t w[16])
{
    for (int i = 0; i < 16; i++) {
        long double s =
            (long double)flushed(half_of(x[i], 1)) * (long double)flushed(half_of(w[i], 1)) +
            (long double)flushed(half_of(x[i], 0)) * (long double)flushed(half_of(w[i], 0));
        acc[i] = flushed((float)(s + (long double)flushed(acc[i])));
    }
}

int main(void)
{
    struct pk p, f32;

    CHECK(cpu_bf16_check(as_defined));
    CHECK(!cpu_bf16_check(even_first));
    CHECK(!cpu_bf16_check(denormals_kept));
    CHECK(!cpu_bf16_check(flushed_after_rounding_to_denormals));
    CHECK(!cpu_bf16_check(pair_added_first));
    CHECK(!cpu_bf16_check(rounded_once));
    pk_open_as(&p, "cpu-bf16");
    pk_open(&f32);
    CHECK_STR(bt_k_numerics(p.k[0]), "cpu-bf16");
    for (uint32_t m = 1; m <= 40; m++) {
        test_shape(&p, ORDINARY, m, 1 + m * 7 % 41, 40 + m, m % 2 == 0);
        test_shape(&p, (enum kind)(m % KINDS), m, 1 + m * 5 % 37, 64 - m, m % 2 == 1);
    }
    for (int kind = 0; kind < KINDS; kind++) {
        test_shape(&p, (enum kind)kind, 1, 200, 1, true);
        test_shape(&p, (enum kind)kind, 3, 200, 7, true);
        test_shape(&p, (enum kind)kind, 29, 70, 600, true); /* several K-blocks, several streams */
        test_shape(&p, (enum kind)kind, 130, 33, 1025, false);
    }
    test_shape(&p, ORDINARY, 601, 17, 64, true); /* more rows than are rounded at a time */
    test_other_weights(&p, &f32, BT_DTYPE_F32);
    test_other_weights(&p, &f32, BT_DTYPE_F16);
    pk_close(&p);
    pk_close(&f32);
    return bt_test_done();
}
