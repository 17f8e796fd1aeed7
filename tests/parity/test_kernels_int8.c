/* The integer class: every product of block-quantised weights has the bits of its definition in kernels/backend.h, written
 * here a second time, on every instruction set, thread count and row count. Other weights have the f32 class's bits. */

#include "tests/parity/kernel_parity.h"

static const enum bt_dtype formats[] = {
    BT_DTYPE_Q4_0,   BT_DTYPE_Q4_1, BT_DTYPE_Q5_0, BT_DTYPE_Q5_1, BT_DTYPE_Q8_0,
    BT_DTYPE_IQ4_NL, BT_DTYPE_Q2_K, BT_DTYPE_Q3_K, BT_DTYPE_Q4_K, BT_DTYPE_Q5_K,
    BT_DTYPE_Q6_K,   BT_DTYPE_G4,   BT_DTYPE_G8};

/* 32 values of a row: integers, the scale of each half, and what is added to each. */
struct parts {
    int q[32];
    float scale[2], min[2];
    bool halves, has_min;
};

static void nibbles(struct parts *p, const uint8_t *q, int offset)
{
    for (int j = 0; j < 16; j++) {
        p->q[j] = (q[j] & 15) - offset;
        p->q[j + 16] = (q[j] >> 4) - offset;
    }
}

/* The fifth bits, 32 in a row, on top of the nibbles. */
static void fifth_bits(struct parts *p, const uint8_t *bits)
{
    for (int j = 0; j < 32; j++) {
        p->q[j] += (bits[j / 8] >> j % 8 & 1) * 16;
    }
}

static void iq4_nl_parts(struct parts *p, const uint8_t *q)
{
    static const int values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
    nibbles(p, q, 0);
    for (int j = 0; j < 32; j++) {
        p->q[j] = values[p->q[j]];
    }
}

static void grouped_parts(struct parts *p, const uint8_t *b, bool bytes)
{
    memcpy(p->scale, b, sizeof(float));
    memcpy(p->min, b + 4, sizeof(float));
    p->has_min = true;
    nibbles(p, b + 8, 0);
    for (int j = 0; bytes && j < 32; j++) {
        p->q[j] = b[8 + j];
    }
}

static void q2_k_parts(struct parts *p, const uint8_t *b, uint32_t g)
{
    for (uint32_t j = 0; j < 32; j++) {
        p->q[j] = b[16 + 32 * (g / 4) + j] >> 2 * (g % 4) & 3;
    }
    p->halves = p->has_min = true;
    for (uint32_t h = 0; h < 2; h++) {
        p->scale[h] = (float)pk_half_value(b + 80) * (float)(b[2 * g + h] & 15);
        p->min[h] = -((float)pk_half_value(b + 82) * (float)(b[2 * g + h] >> 4));
    }
}

static void q3_k_parts(struct parts *p, const uint8_t *b, uint32_t g)
{
    const uint8_t *s = b + 96;

    for (uint32_t j = 0; j < 32; j++) {
        p->q[j] = (b[32 + 32 * (g / 4) + j] >> 2 * (g % 4) & 3) + (b[j] >> g & 1) * 4 - 4;
    }
    p->halves = true;
    for (uint32_t h = 0; h < 2; h++) {
        uint32_t i = 2 * g + h, low = i < 8 ? s[i] & 15U : s[i - 8] >> 4;
        uint32_t high = (uint32_t)s[8 + i % 4] >> 2 * (i / 4) & 3U;
        p->scale[h] = (float)pk_half_value(b + 108) * (float)((int)(low + 16 * high) - 32);
    }
}

/* nibbles_at: of all 256 values; q5_k's lie further on. */
static void q4_k_parts(struct parts *p, const uint8_t *b, uint32_t g, const uint8_t *nibbles_at)
{
    const uint8_t *s = b + 4, *q = nibbles_at + g / 2 * 32;
    int scale = g < 4 ? s[g] & 63 : (s[g + 4] & 15) + 16 * (s[g - 4] >> 6);
    int min = g < 4 ? s[g + 4] & 63 : (s[g + 4] >> 4) + 16 * (s[g] >> 6);

    p->scale[0] = (float)pk_half_value(b) * (float)scale;
    p->min[0] = -((float)pk_half_value(b + 2) * (float)min);
    p->has_min = true;
    for (int j = 0; j < 32; j++) {
        p->q[j] = g % 2 ? q[j] >> 4 : q[j] & 15;
    }
}

static void q6_k_parts(struct parts *p, const uint8_t *b, uint32_t g)
{
    for (uint32_t j = 0; j < 32; j++) {
        uint32_t half = g / 4, quarter = g % 4;
        uint8_t low = b[64 * half + 32 * (quarter % 2) + j], high = b[128 + 32 * half + j];
        p->q[j] = (quarter < 2 ? low & 15 : low >> 4) + 16 * (high >> 2 * quarter & 3) - 32;
    }
    p->halves = true;
    for (uint32_t h = 0; h < 2; h++) {
        p->scale[h] = (float)pk_half_value(b + 208) * (float)(int8_t)b[192 + 2 * g + h];
    }
}

static struct parts parts_of(enum bt_dtype t, const uint8_t *row, uint32_t block)
{
    uint32_t i = block * 32, in = bt_dtype_block_values(t);
    const uint8_t *b = row + (size_t)(i / in) * bt_dtype_block_bytes(t);
    struct parts p = {.scale = {(float)pk_half_value(b)}};

    switch (t) {
    case BT_DTYPE_Q4_0:
        nibbles(&p, b + 2, 8);
        break;
    case BT_DTYPE_Q4_1:
        nibbles(&p, b + 4, 0);
        p.min[0] = (float)pk_half_value(b + 2);
        p.has_min = true;
        break;
    case BT_DTYPE_Q8_0:
        for (int j = 0; j < 32; j++) {
            p.q[j] = (int8_t)b[2 + j];
        }
        break;
    case BT_DTYPE_Q5_0:
        nibbles(&p, b + 6, 16);
        fifth_bits(&p, b + 2);
        break;
    case BT_DTYPE_Q5_1:
        nibbles(&p, b + 8, 0);
        fifth_bits(&p, b + 4);
        p.min[0] = (float)pk_half_value(b + 2);
        p.has_min = true;
        break;
    case BT_DTYPE_IQ4_NL:
        iq4_nl_parts(&p, b + 2);
        break;
    case BT_DTYPE_G4:
    case BT_DTYPE_G8:
        grouped_parts(&p, b, t == BT_DTYPE_G8);
        break;
    case BT_DTYPE_Q2_K:
        q2_k_parts(&p, b, i % 256 / 32);
        break;
    case BT_DTYPE_Q3_K:
        q3_k_parts(&p, b, i % 256 / 32);
        break;
    case BT_DTYPE_Q4_K:
        q4_k_parts(&p, b, i % 256 / 32, b + 16);
        break;
    case BT_DTYPE_Q5_K:
        q4_k_parts(&p, b, i % 256 / 32, b + 48);
        for (uint32_t j = 0; j < 32; j++) {
            p.q[j] += (b[16 + j] >> i % 256 / 32 & 1) * 16;
        }
        break;
    default:
        q6_k_parts(&p, b, i % 256 / 32);
        break;
    }
    return p;
}

/* 32 values of x in 8 bits. Products are exact in double. */
struct rounded {
    int q[32];
    float scale;
};

static struct rounded round_x(const float *x)
{
    struct rounded r = {.scale = 0};
    float max = 0;

    for (int j = 0; j < 32; j++) {
        if (!isfinite(x[j])) {
            r.scale = NAN;
            return r;
        }
        max = fabsf(x[j]) > max ? fabsf(x[j]) : max;
    }
    if (max >= 0x1p-100F) {
        float inv = 127.0F / max;
        for (int j = 0; j < 32; j++) {
            r.q[j] = (int)rint((double)x[j] * (double)inv);
        }
        r.scale = max / 127.0F;
    }
    return r;
}

static float next_sum(float acc, const struct parts *p, const struct rounded *x)
{
    for (int h = 0; h < (p->halves ? 2 : 1); h++) {
        int32_t sum = 0, sum_x = 0;
        for (int j = 16 * h; j < (p->halves ? 16 * h + 16 : 32); j++) {
            sum += p->q[j] * x->q[j];
            sum_x += x->q[j];
        }
        acc = fmaf((float)sum, p->scale[h] * x->scale, acc);
        if (p->has_min) {
            acc = fmaf(p->min[h], x->scale * (float)sum_x, acc);
        }
    }
    return acc;
}

static void expected(enum bt_dtype t, float *y, size_t ldy, const float *x, size_t ldx,
                     const uint8_t *rows, const float *bias, uint32_t m_n, uint32_t n, uint32_t k)
{
    size_t row_bytes = (size_t)(k / bt_dtype_block_values(t)) * bt_dtype_block_bytes(t);
    struct rounded *r = bt_alloc(m_n * (k / 32) * sizeof(*r));

    for (uint32_t m = 0; m < m_n; m++) {
        for (uint32_t b = 0; b < k / 32; b++) {
            r[m * (k / 32) + b] = round_x(x + m * ldx + b * 32);
        }
    }
    for (uint32_t j = 0; j < n; j++) {
        for (uint32_t m = 0; m < m_n; m++) {
            y[m * ldy + j] = 0;
        }
        for (uint32_t b = 0; b < k / 32; b++) {
            struct parts p = parts_of(t, rows + j * row_bytes, b);
            for (uint32_t m = 0; m < m_n; m++) {
                y[m * ldy + j] = next_sum(y[m * ldy + j], &p, &r[m * (k / 32) + b]);
            }
        }
        for (uint32_t m = 0; bias != NULL && m < m_n; m++) {
            y[m * ldy + j] += bias[j];
        }
    }
    bt_free(r);
}

static uint8_t *random_rows(enum bt_dtype t, uint32_t n, uint32_t k)
{
    size_t step = bt_dtype_block_bytes(t), bytes = (size_t)n * k / bt_dtype_block_values(t) * step;
    uint8_t *w = bt_alloc(bytes);

    for (size_t i = 0; i < bytes; i++) {
        w[i] = (uint8_t)pk_u32();
    }
    for (size_t i = 0; i < bytes; i += step) {
        uint8_t *d = w + i +
                     (t == BT_DTYPE_Q6_K   ? 208
                      : t == BT_DTYPE_Q2_K ? 80
                      : t == BT_DTYPE_Q3_K ? 108
                                           : 0);
        pk_put_half(d);
        if (t == BT_DTYPE_Q4_1 || t == BT_DTYPE_Q5_1 || t == BT_DTYPE_Q2_K || t == BT_DTYPE_Q4_K ||
            t == BT_DTYPE_Q5_K) {
            pk_put_half(d + 2);
        }
        if (t == BT_DTYPE_G4 || t == BT_DTYPE_G8) {
            float f[2] = {pk_uniform(-0.03F, 0.03F), pk_uniform(-4, 4)};
            memcpy(d, f, sizeof(f));
        }
        if (t == BT_DTYPE_Q8_0 && pk_u32() % 4 == 0) {
            memset(w + i + 2, 0x80, 32); /* -128 throughout: the largest sums */
        }
        if (t != BT_DTYPE_Q8_0 && step < 64 && pk_u32() % 4 == 0) {
            memset(w + i + step - 16, 0xff, 16); /* the largest nibbles */
        }
    }
    return w;
}

/* Rows of every kind: smooth, with outliers, integers (ties), zeros, the largest sums, too small, near the largest float. */
static float *random_x(uint32_t m_n, size_t ldx)
{
    float *x = pk_floats(m_n * ldx, -1, 1);

    for (size_t i = 0; i + 32 <= m_n * ldx; i += 32) {
        uint32_t kind = pk_u32() % 16;
        for (size_t j = i; j < i + 32; j++) {
            x[j] = kind == 0   ? x[j] * 1e-33F
                   : kind == 1 ? x[j] * 1e30F
                   : kind == 2 ? 0.0F
                   : kind == 3 ? 1.0F
                   : kind == 4 ? floorf(x[j] * 127.0F) * 0.5F
                   : kind == 5 ? x[j] * x[j] * x[j] * 100.0F
                               : x[j];
        }
    }
    return x;
}

static void test_shape(const struct pk *p, enum bt_dtype t, uint32_t m, uint32_t n, uint32_t k,
                       bool bias)
{
    const size_t ldx = k + 3, ldy = n + 5;
    uint8_t *rows = random_rows(t, n, k);
    float *x = random_x(m, ldx), *b = pk_floats(n, -1, 1);
    float *want = pk_floats(m * ldy, -1, 1), *y = pk_floats(m * ldy, -1, 1);
    char what[96];

    snprintf(what, sizeof(what), "int8 gemm %s m %u n %u k %u", bt_dtype_name(t), m, n, k);
    expected(t, want, ldy, x, ldx, rows, bias ? b : NULL, m, n, k);
    for (int i = 0; i < p->n; i++) {
        struct bt_kweight *w = pk_weight(p->k[i], t, rows, n, k);
        pk_gemm(p->k[i], y, want, ldy, x, ldx, w, bias ? b : NULL, m, n);
        pk_same(what, p, i, y, want, m * ldy);
        bt_k_weight_destroy(p->k[i], w);
    }
    bt_free(rows);
    bt_free(x);
    bt_free(b);
    bt_free(want);
    bt_free(y);
}

/* A row with a NaN or an infinity gives NaNs; the other rows do not notice. */
static void test_not_finite(const struct pk *p, enum bt_dtype t)
{
    const uint32_t m_n = 14, n = 18, k = 512;
    uint8_t *rows = random_rows(t, n, k);
    float *x = pk_floats(m_n * k, -1, 1), *y = bt_alloc(m_n * n * sizeof(float));

    x[2 * k + 40] = NAN;
    x[5 * k + 511] = INFINITY;
    x[13 * k] = -INFINITY;
    for (int i = 0; i < p->n; i++) {
        struct bt_kweight *w = pk_weight(p->k[i], t, rows, n, k);
        bt_k_gemm(p->k[i], y, n, x, k, w, NULL, m_n);
        int bad = 0;
        for (uint32_t m = 0; m < m_n; m++) {
            bool want_nan = m == 2 || m == 5 || m == 13;
            for (uint32_t j = 0; j < n; j++) {
                bad += isnan(y[m * n + j]) != want_nan;
            }
        }
        CHECK_EQ(bad, 0);
        bt_k_weight_destroy(p->k[i], w);
    }
    bt_free(rows);
    bt_free(x);
    bt_free(y);
}

/* Blocks of a group have the same scale and minimum, which the panels hold once. */
static void test_groups(const struct pk *p, enum bt_dtype t, uint32_t group)
{
    const uint32_t n = 35, k = 384, blocks = group / 32;
    size_t step = bt_dtype_block_bytes(t);
    uint8_t *rows = random_rows(t, n, k);

    for (uint32_t b = 0; b < n * k / 32; b++) {
        memcpy(rows + b * step, rows + (b - b % (k / 32) % blocks) * step, 8);
    }
    for (uint32_t m = 1; m <= 13; m += 3) {
        float *x = random_x(m, k), *want = bt_alloc(m * n * sizeof(float)),
              *y = bt_alloc(m * n * sizeof(float));
        expected(t, want, n, x, k, rows, NULL, m, n, k);
        for (int i = 0; i < p->n; i++) {
            struct bt_k_weight_desc d = {.dtype = t,
                                         .n_rows = n,
                                         .n_cols = k,
                                         .data = rows,
                                         .group = group,
                                         .for_gemm = true};
            struct bt_kweight *w = NULL;
            CHECK_EQ(bt_k_weight_create(p->k[i], &d, &w, NULL), BT_OK);
            bt_k_gemm(p->k[i], y, n, x, k, w, NULL, m);
            pk_same(bt_dtype_name(t), p, i, y, want, m * n);
            bt_k_weight_destroy(p->k[i], w);
        }
        bt_free(x);
        bt_free(want);
        bt_free(y);
    }
    bt_free(rows);
}

static void test_float_weights(const struct pk *p, const struct pk *f32)
{
    const uint32_t m = 6, n = 35, k = 130;
    float *w = pk_floats(n * k, -1, 1), *x = pk_floats(m * k, -1, 1);
    float *want = bt_alloc(m * n * sizeof(float)), *y = bt_alloc(m * n * sizeof(float));

    struct bt_kweight *a = pk_weight(f32->k[0], BT_DTYPE_F32, w, n, k);
    bt_k_gemm(f32->k[0], want, n, x, k, a, NULL, m);
    bt_k_weight_destroy(f32->k[0], a);
    for (int i = 0; i < p->n; i++) {
        a = pk_weight(p->k[i], BT_DTYPE_F32, w, n, k);
        bt_k_gemm(p->k[i], y, n, x, k, a, NULL, m);
        pk_same("f32 weights in the integer class", p, i, y, want, m * n);
        bt_k_weight_destroy(p->k[i], a);
    }
    bt_free(w);
    bt_free(x);
    bt_free(want);
    bt_free(y);
}

int main(void)
{
    struct pk p, f32;

    pk_open_as(&p, "cpu-int8");
    pk_open(&f32);
    CHECK_STR(bt_k_numerics(p.k[0]), "cpu-int8");
    for (size_t f = 0; f < sizeof(formats) / sizeof(formats[0]); f++) {
        enum bt_dtype t = formats[f];
        uint32_t block = bt_dtype_block_values(t);
        for (uint32_t m = 1; m <= 40; m++) {
            test_shape(&p, t, m, 1 + m * 7 % 41, m % 3 == 0 ? 512 : 256, m % 2 == 0);
        }
        test_shape(&p, t, 3, 200, 1280, true); /* several K-blocks, several streams */
        test_shape(&p, t, 29, 130, 1536, true);
        test_shape(&p, t, 512, 20, 256, false);
        test_shape(&p, t, 601, 17, 256, true); /* more rows than are rounded at a time */
        test_shape(&p, t, 5, 33, block, false);
        test_shape(&p, t, 13, 33, 9 * block, false);
        test_not_finite(&p, t);
    }
    test_groups(&p, BT_DTYPE_G4, 64);
    test_groups(&p, BT_DTYPE_G4, 384);
    test_groups(&p, BT_DTYPE_G8, 128);
    test_float_weights(&p, &f32);
    pk_close(&p);
    pk_close(&f32);
    return bt_test_done();
}
