/* Matrix products and embeddings for every weight format: dequantisation against formulas written here from the format's
 * description, sums against double precision, and equal bits on every instruction set, thread count and row count, alone or
 * with other products. */

#include "tests/parity/kernel_parity.h"

static int nibble(const uint8_t *q, uint32_t j)
{
    return j < 16 ? q[j] & 15 : q[j - 16] >> 4;
}

static int bit(const uint8_t *bits, uint32_t j)
{
    return bits[j / 8] >> j % 8 & 1;
}

/* q2_k and q3_k: 64 bytes; a half of 128 values has 32 of them, a quarter of that one pair of bits in each. */
static int pair(const uint8_t *q, uint32_t j)
{
    return q[j / 128 * 32 + j % 32] >> 2 * (j % 128 / 32) & 3;
}

/* q3_k: 16 scales of 6 bits, less 32: low nibbles in 8 bytes, high pairs in 4. */
static int scale3(const uint8_t *s, uint32_t i)
{
    int low = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
    return low + 16 * (s[8 + i % 4] >> 2 * (i / 4) & 3) - 32;
}

/* q4_k and q5_k: 8 groups of 32: 6-bit scale and minimum each, packed into 12 bytes. */
static int scale4(const uint8_t *s, uint32_t g, bool min)
{
    if (g < 4) {
        return s[min ? g + 4 : g] & 63;
    }
    return min ? (s[g + 4] >> 4) + 16 * (s[g] >> 6) : (s[g + 4] & 15) + 16 * (s[g - 4] >> 6);
}

/* gf8: sign, 4 bits of exponent less 7, 3 behind the point; exponent 0 has no leading 1. */
static double e4m3(uint32_t c)
{
    uint32_t exponent = c >> 3 & 15, fraction = c & 7;
    double v = exponent == 0 ? ldexp(fraction, -9) : ldexp(8 + fraction, (int)exponent - 10);

    return c >> 7 ? -v : v;
}

static const int iq4_nl_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};

/* Value i of a row. */
static double weight_value(enum bt_dtype t, const uint8_t *row, uint32_t i)
{
    const uint8_t *b = row + (size_t)(i / bt_dtype_block_values(t)) * bt_dtype_block_bytes(t);
    uint32_t j = i % bt_dtype_block_values(t);
    float f;

    switch (t) {
    case BT_DTYPE_F32:
        memcpy(&f, b, 4);
        return (double)f;
    case BT_DTYPE_F16:
        return pk_half_value(b);
    case BT_DTYPE_BF16: {
        uint32_t bits = (uint32_t)b[0] << 16 | (uint32_t)b[1] << 24;
        memcpy(&f, &bits, 4);
        return (double)f;
    }
    case BT_DTYPE_Q4_0:
        return pk_half_value(b) * (nibble(b + 2, j) - 8);
    case BT_DTYPE_Q4_1:
        return pk_half_value(b) * nibble(b + 4, j) + pk_half_value(b + 2);
    case BT_DTYPE_Q5_0:
        return pk_half_value(b) * (nibble(b + 6, j) + 16 * bit(b + 2, j) - 16);
    case BT_DTYPE_Q5_1:
        return pk_half_value(b) * (nibble(b + 8, j) + 16 * bit(b + 4, j)) + pk_half_value(b + 2);
    case BT_DTYPE_IQ4_NL:
        return pk_half_value(b) * iq4_nl_values[nibble(b + 2, j)];
    case BT_DTYPE_Q8_0:
        return pk_half_value(b) * (int8_t)b[2 + j];
    case BT_DTYPE_G4:
    case BT_DTYPE_G8: {
        float d, m;
        memcpy(&d, b, 4);
        memcpy(&m, b + 4, 4);
        return (double)d * (t == BT_DTYPE_G4 ? nibble(b + 8, j) : b[8 + j]) + (double)m;
    }
    case BT_DTYPE_GF8:
        memcpy(&f, b, 4);
        return (double)f * e4m3(b[4 + j]);
    case BT_DTYPE_Q2_K:
        return pk_half_value(b + 80) * (b[j / 16] & 15) * pair(b + 16, j) -
               pk_half_value(b + 82) * (b[j / 16] >> 4);
    case BT_DTYPE_Q3_K:
        return pk_half_value(b + 108) * scale3(b + 96, j / 16) *
               (pair(b + 32, j) + 4 * (b[j % 32] >> j / 32 & 1) - 4);
    case BT_DTYPE_Q4_K:
        return pk_half_value(b) * scale4(b + 4, j / 32, false) *
                   (b[16 + j / 64 * 32 + j % 32] >> 4 * (j / 32 % 2) & 15) -
               pk_half_value(b + 2) * scale4(b + 4, j / 32, true);
    case BT_DTYPE_Q5_K:
        return pk_half_value(b) * scale4(b + 4, j / 32, false) *
                   ((b[48 + j / 64 * 32 + j % 32] >> 4 * (j / 32 % 2) & 15) +
                    16 * (b[16 + j % 32] >> j / 32 & 1)) -
               pk_half_value(b + 2) * scale4(b + 4, j / 32, true);
    default: {
        /* q6_k: 128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales, d */
        uint32_t half = j / 128, r = j % 128, quarter = r / 32, l = r % 32;
        uint8_t low = b[64 * half + 32 * (quarter % 2) + l], high = b[128 + 32 * half + l];
        int q = (quarter < 2 ? low & 15 : low >> 4) + 16 * (high >> 2 * quarter & 3) - 32;
        return pk_half_value(b + 208) * (int8_t)b[192 + j / 16] * q;
    }
    }
}

static struct bt_kweight *weight(struct bt_kctx *k, enum bt_dtype t, const void *data,
                                 uint32_t n_rows, uint32_t n_cols)
{
    struct bt_k_weight_desc d = {.dtype = t,
                                 .n_rows = n_rows,
                                 .n_cols = n_cols,
                                 .data = data,
                                 .for_gemm = true,
                                 .for_embed = true};
    struct bt_kweight *w = NULL;
    CHECK_EQ(bt_k_weight_create(k, &d, &w, NULL), BT_OK);
    return w;
}

/* y against double sums; tolerance from the sum of magnitudes. */
static void check_sums(const char *what, enum bt_dtype t, const float *y, size_t ldy,
                       const float *x, size_t ldx, const uint8_t *rows, const float *bias,
                       uint32_t m_n, uint32_t n, uint32_t k)
{
    size_t row_bytes = (size_t)(k / bt_dtype_block_values(t)) * bt_dtype_block_bytes(t);
    double worst = 0;

    for (uint32_t j = 0; j < n; j++) {
        double *w = bt_alloc(k * sizeof(double));
        for (uint32_t i = 0; i < k; i++) {
            w[i] = weight_value(t, rows + j * row_bytes, i);
        }
        for (uint32_t m = 0; m < m_n; m++) {
            double sum = bias != NULL ? (double)bias[j] : 0, magnitude = 1e-20;
            for (uint32_t i = 0; i < k; i++) {
                sum += (double)x[m * ldx + i] * w[i];
                magnitude += fabs((double)x[m * ldx + i] * w[i]);
            }
            double e = fabs((double)y[m * ldy + j] - sum) / magnitude;
            worst = e > worst ? e : worst;
        }
        bt_free(w);
    }
    if (!(worst < 3e-6)) {
        fprintf(stderr, "%s: relative error %g\n", what, worst);
    }
    CHECK(worst < 3e-6);
}

static void test_shape(const struct pk *p, enum bt_dtype t, uint32_t m, uint32_t n, uint32_t k,
                       bool bias)
{
    const size_t ldx = k + 3, ldy = n + 5;
    uint8_t *rows = pk_random_rows(t, n, k);
    float *x = pk_floats(m * ldx, -1, 1), *b = pk_floats(n, -1, 1);
    float *want = pk_floats(m * ldy, -1, 1), *y = pk_floats(m * ldy, -1, 1);
    char what[96];

    snprintf(what, sizeof(what), "gemm %s m %u n %u k %u", bt_dtype_name(t), m, n, k);
    for (int i = 0; i < p->n; i++) {
        struct bt_kweight *w = weight(p->k[i], t, rows, n, k);
        memcpy(y, want, m * ldy * sizeof(float)); /* the gap between rows must stay */
        bt_k_gemm(p->k[i], i == 0 ? want : y, ldy, x, ldx, w, bias ? b : NULL, m);
        if (i == 0) {
            check_sums(what, t, want, ldy, x, ldx, rows, bias ? b : NULL, m, n, k);
        } else {
            pk_same(what, p, i, y, want, m * ldy);
        }
        /* Any run of rows alone gives the same bits. */
        for (uint32_t r = 0, step = 1; r + step <= m && i != 2; r += step, step = step % 7 + 1) {
            memcpy(y, want, m * ldy * sizeof(float));
            bt_k_gemm(p->k[i], y + r * ldy, ldy, x + r * ldx, ldx, w, bias ? b : NULL, step);
            if (!pk_same(what, p, i, y, want, m * ldy)) {
                fprintf(stderr, "  rows %u + %u alone\n", r, step);
                break;
            }
        }
        bt_k_weight_destroy(p->k[i], w);
    }
    bt_free(rows);
    bt_free(x);
    bt_free(b);
    bt_free(want);
    bt_free(y);
}

/* Row j of the table is column j of a product with unit vectors, and both are the format's values. */
static void test_values(const struct pk *p, enum bt_dtype t)
{
    const uint32_t n = 21, k = t <= BT_DTYPE_BF16 ? 37 : 512;
    uint8_t *rows = pk_random_rows(t, n, k);
    size_t row_bytes = (size_t)(k / bt_dtype_block_values(t)) * bt_dtype_block_bytes(t);
    float *unit = bt_calloc(k, k * sizeof(float)), *y = bt_alloc(k * n * sizeof(float)),
          *e = bt_alloc(n * k * 4);
    uint32_t ids[21];

    for (uint32_t i = 0; i < k; i++) {
        unit[i * k + i] = 1.0F;
    }
    for (uint32_t j = 0; j < n; j++) {
        ids[j] = n - 1 - j;
    }
    for (int i = 0; i < p->n; i++) {
        struct bt_kweight *w = weight(p->k[i], t, rows, n, k);
        bt_k_gemm(p->k[i], y, n, unit, k, w, NULL, k);
        bt_k_embed(p->k[i], e, w, ids, n, 1.0F);
        int bad = 0;
        for (uint32_t j = 0; j < n; j++) {
            for (uint32_t c = 0; c < k; c++) {
                double want = weight_value(t, rows + j * row_bytes, c);
                float f = y[c * n + j], g = e[(n - 1 - j) * k + c];
                bad += !(f <= g && f >= g) || fabs((double)f - want) > 6.1e-8 * fabs(want) + 1e-9;
            }
        }
        CHECK_EQ(bad, 0);
        bt_k_embed(p->k[i], y, w, ids, 1, 0.5F);
        CHECK_NEAR(y[3], 0.5 * (double)e[3], 0);
        bt_k_weight_destroy(p->k[i], w);
    }
    bt_free(rows);
    bt_free(unit);
    bt_free(y);
    bt_free(e);
}

/* Blocks of a group share a header, and the inputs come in another order: equal to the same matrix block by block with
 * its inputs in place. */
static void test_groups(const struct pk *p, enum bt_dtype t, uint32_t n, uint32_t k, uint32_t group,
                        bool reorder)
{
    const size_t block = bt_dtype_block_bytes(t);
    const uint32_t m_n = 300; /* more than are put in order at a time */
    uint8_t *rows = pk_random_rows(t, n, k);
    uint32_t *perm = bt_alloc(k * sizeof(*perm));
    float *x = pk_floats(m_n * k, -1, 1), *xp = bt_alloc(m_n * k * sizeof(float)),
          *want = pk_floats(m_n * n, -1, 1), *y = pk_floats(m_n * n, -1, 1);

    for (uint32_t i = 0; i < n * (k / 32); i++) {
        uint32_t first = i / (k / 32) * (k / 32) + i % (k / 32) / (group / 32) * (group / 32);
        memcpy(rows + i * block, rows + first * block, t == BT_DTYPE_GF8 ? 4 : 8);
    }
    for (uint32_t i = 0; i < k; i++) {
        perm[i] = reorder ? (i * 7 + 3) % k : i; /* k is no multiple of 7 */
        for (uint32_t m = 0; m < m_n; m++) {
            xp[m * k + i] = x[m * k + perm[i]];
        }
    }
    for (int i = 0; i < p->n; i++) {
        struct bt_k_weight_desc d = {.dtype = t,
                                     .n_rows = n,
                                     .n_cols = k,
                                     .data = rows,
                                     .for_gemm = true,
                                     .group = group,
                                     .perm = reorder ? perm : NULL};
        struct bt_kweight *grouped = NULL, *plain = weight(p->k[i], t, rows, n, k);
        CHECK_EQ(bt_k_weight_create(p->k[i], &d, &grouped, NULL), BT_OK);
        for (uint32_t m = 1; m <= m_n; m += m == 1 ? 6 : 293) {
            bt_k_gemm(p->k[i], want, n, xp, k, plain, NULL, m);
            bt_k_gemm(p->k[i], y, n, x, k, grouped, NULL, m);
            pk_same("grouped", p, i, y, want, (size_t)m * n);
        }
        CHECK(group == 32 || group == 96 || bt_k_weight_bytes(grouped) < bt_k_weight_bytes(plain));
        bt_k_weight_destroy(p->k[i], grouped);
        bt_k_weight_destroy(p->k[i], plain);
    }
    bt_free(rows);
    bt_free(perm);
    bt_free(x);
    bt_free(xp);
    bt_free(want);
    bt_free(y);
}

/* Three products of the same x at once: each as it is alone. types[i], n[i]: of the i-th. g4 has its inputs
 * in another order. */
static void test_together(const struct pk *p, const enum bt_dtype types[3], const uint32_t n[3],
                          uint32_t m, uint32_t k)
{
    const size_t ldx = k + 3;
    float *x = pk_floats(m * ldx, -1, 1), *want[3], *y[3], *bias = pk_floats(n[0], -1, 1);
    uint32_t *perm = bt_alloc(k * sizeof(*perm));
    uint8_t *rows[3];

    for (uint32_t i = 0; i < k; i++) {
        perm[i] = (i * 7 + 3) % k;
    }
    for (int i = 0; i < 3; i++) {
        rows[i] = pk_random_rows(types[i], n[i], k);
        want[i] = pk_floats(m * (n[i] + 5), -1, 1);
        y[i] = bt_alloc(m * (n[i] + 5) * sizeof(float));
    }
    for (int c = 0; c < p->n; c++) {
        struct bt_k_product all[3];
        struct bt_kweight *w[3] = {NULL};
        for (int i = 0; i < 3; i++) {
            struct bt_k_weight_desc d = {.dtype = types[i],
                                         .n_rows = n[i],
                                         .n_cols = k,
                                         .data = rows[i],
                                         .for_gemm = true,
                                         .perm = types[i] >= BT_DTYPE_G4 ? perm : NULL};
            CHECK_EQ(bt_k_weight_create(p->k[c], &d, &w[i], NULL), BT_OK);
            if (c == 0) {
                bt_k_gemm(p->k[c], want[i], n[i] + 5, x, ldx, w[i], i == 0 ? bias : NULL, m);
            }
            memcpy(y[i], want[i], m * (n[i] + 5) * sizeof(float));
            for (uint32_t r = 0; r < m; r++) {
                memset(y[i] + r * (n[i] + 5), 0xff, n[i] * sizeof(float));
            }
            all[i] = (struct bt_k_product){
                .y = y[i], .ldy = n[i] + 5, .w = w[i], .bias = i == 0 ? bias : NULL};
        }
        bt_k_gemm_all(p->k[c], all, 3, x, ldx, m);
        for (int i = 0; i < 3; i++) {
            pk_same(bt_k_numerics(p->k[c]), p, c, y[i], want[i], m * (n[i] + 5));
            bt_k_weight_destroy(p->k[c], w[i]);
        }
    }
    for (int i = 0; i < 3; i++) {
        bt_free(rows[i]);
        bt_free(want[i]);
        bt_free(y[i]);
    }
    bt_free(x);
    bt_free(bias);
    bt_free(perm);
}

static void test_all_together(const char *numerics)
{
    static const enum bt_dtype types[][3] = {{BT_DTYPE_Q8_0, BT_DTYPE_Q8_0, BT_DTYPE_Q8_0},
                                             {BT_DTYPE_Q4_K, BT_DTYPE_Q4_K, BT_DTYPE_Q6_K},
                                             {BT_DTYPE_BF16, BT_DTYPE_BF16, BT_DTYPE_F32},
                                             {BT_DTYPE_F32, BT_DTYPE_F16, BT_DTYPE_Q4_0},
                                             {BT_DTYPE_Q4_0, BT_DTYPE_G4, BT_DTYPE_Q4_0},
                                             {BT_DTYPE_GF8, BT_DTYPE_BF16, BT_DTYPE_GF8}};
    static const uint32_t n[][3] = {{576, 192, 192}, {17, 1, 40}, {100, 33, 500}};
    static const uint32_t m[] = {1, 2, 8, 13, 70, 515};
    struct pk p;

    pk_open_as(&p, numerics);
    for (size_t t = 0; t < sizeof(types) / sizeof(types[0]); t++) {
        for (size_t i = 0; i < sizeof(m) / sizeof(m[0]); i++) {
            test_together(&p, types[t], m[i] == 515 ? n[1] : n[(i + t) % 3], m[i], 256);
        }
    }
    pk_close(&p);
}

static void test_bad_weights(struct bt_kctx *k)
{
    uint8_t data[512] = {0};
    struct bt_kweight *w = NULL;
    struct bt_err err = {0};
    struct bt_k_weight_desc d = {
        .dtype = BT_DTYPE_Q4_0, .n_rows = 1, .n_cols = 48, .data = data, .for_gemm = true};

    CHECK_EQ(bt_k_weight_create(k, &d, &w, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "q4_0") != NULL);
    d = (struct bt_k_weight_desc){
        .dtype = BT_DTYPE_G4, .n_rows = 1, .n_cols = 64, .data = data, .group = 48};
    CHECK_EQ(bt_k_weight_create(k, &d, &w, &err), BT_ERR_INVALID);
    uint32_t perm[64] = {64};
    d.group = 32;
    d.perm = perm;
    CHECK_EQ(bt_k_weight_create(k, &d, &w, &err), BT_ERR_INVALID);
    d.n_cols = 0;
    CHECK_EQ(bt_k_weight_create(k, &d, &w, &err), BT_ERR_INVALID);
    d = (struct bt_k_weight_desc){.dtype = BT_DTYPE_COUNT, .n_rows = 1, .n_cols = 1, .data = data};
    CHECK_EQ(bt_k_weight_create(k, &d, &w, &err), BT_ERR_UNSUPPORTED);
    CHECK(w == NULL);
}

int main(void)
{
    struct pk p;

    pk_open(&p);
    for (int t = 0; t < BT_DTYPE_COUNT; t++) {
        enum bt_dtype type = (enum bt_dtype)t;
        bool plain = type <= BT_DTYPE_BF16;
        test_values(&p, type);
        for (uint32_t m = 1; m <= 26; m++) {
            test_shape(&p, type, m, 16 + m * 7 % 41, plain ? 61 + m : 256, m % 2 == 0);
        }
        test_shape(&p, type, 70, 200, plain ? 545 : 768, true);
        test_shape(&p, type, 2, 1, plain ? 1 : 256, false);
        test_shape(&p, type, 9, 1, plain ? 2 : 256, false);
        test_shape(&p, type, 1, 700, plain ? 300 : 256, false);
        if (!plain && bt_dtype_block_values(type) == 32) {
            test_shape(&p, type, 5, 33, 32, false);
            test_shape(&p, type, 13, 33, 288, false);
        }
    }
    test_shape(&p, BT_DTYPE_BF16, 509, 48, 259, true); /* several tasks of rows */
    for (enum bt_dtype t = BT_DTYPE_G4; t <= BT_DTYPE_GF8; t++) {
        test_groups(&p, t, 40, 256, 128, false);
        test_groups(&p, t, 16, 256, 64, true);
        test_groups(&p, t, 33, 192, 96, true);  /* no power of two: headers of 32 */
        test_groups(&p, t, 50, 544, 544, true); /* a row */
        test_groups(&p, t, 50, 32, 32, false);
    }
    test_bad_weights(p.k[0]);
    pk_close(&p);
    test_all_together("cpu-f32");
    test_all_together("cpu-int8");
    test_all_together("cpu-bf16");
    return bt_test_done();
}
