/* The classes of cuBLAS against the CPU backend: every weight type, few rows and many, in pieces, with odd shapes and leading
 * dimensions; and what is said of them: few rows give the same bits in every call, rounding is where it should be. On the
 * emulated device the library is emulated too, and refuses what it should. */

#include "base/float16.h"
#include "base/float8.h"
#include "kernels/cuda/cuda_blas_limits_int.h"
#include "tests/parity/cuda_parity.h"

#define ROWS_MAX 70

static const char *const classes[] = {"cuda-cublas", "cuda-cublas-tf32", "cuda-cublas-fp8"};

/* The rows that own kernels compute, for a type. */
static uint32_t few(enum bt_dtype t)
{
    return bt_dtype_block_values(t) == 1 ? CUDA_BLAS_FEW : CUDA_BLAS_FEW_BLOCKS;
}

/* Largest rounding of a value of x or w, as a share of it: what the library is given. */
static double rounding(enum bt_dtype t, bool tf32, bool exact_x)
{
    if (bt_dtype_block_values(t) != 1) {
        return 0x1p-8; /* weights, and x: to 8 bits */
    }
    return t == BT_DTYPE_F32   ? (tf32 ? 0x1p-10 : 0)
           : exact_x           ? 0
           : t == BT_DTYPE_F16 ? 0x1p-11
                               : 0x1p-8;
}

struct product {
    enum bt_dtype type;
    uint32_t n, k, rows;
    size_t ldx, ldy;
    const uint8_t *weights;
    const uint32_t *perm;
    const float *x, *bias;
    float *gaps;    /* what y holds before */
    uint32_t group; /* of gf8 */
};

static void compute(struct bt_kctx *k, const struct product *p, uint32_t at_once, float *y)
{
    const struct bt_k_weight_desc d = {.dtype = p->type,
                                       .n_rows = p->n,
                                       .n_cols = p->k,
                                       .data = p->weights,
                                       .perm = p->perm,
                                       .group = p->group,
                                       .for_gemm = true};
    struct bt_kweight *w = NULL;

    CHECK_EQ(bt_k_weight_create(k, &d, &w, NULL), BT_OK);
    float *dx = cp_floats(k, p->x, p->rows * p->ldx),
          *db = p->bias != NULL ? cp_floats(k, p->bias, p->n) : NULL,
          *dy = cp_floats(k, p->gaps, p->rows * p->ldy);
    for (uint32_t row = 0; row < p->rows; row += at_once) {
        bt_k_gemm(k, dy + row * p->ldy, p->ldy, dx + row * p->ldx, p->ldx, w, db,
                  p->rows - row < at_once ? p->rows - row : at_once);
    }
    cp_take(k, y, dy, p->rows * p->ldy);
    bt_k_free(k, dx, p->rows * p->ldx * sizeof(float));
    if (db != NULL) {
        bt_k_free(k, db, p->n * sizeof(float));
    }
    bt_k_weight_destroy(k, w);
}

static double largest(const float *v, size_t n)
{
    double most = 0;

    for (size_t i = 0; i < n; i++) {
        most = fabs((double)v[i]) > most ? fabs((double)v[i]) : most;
    }
    return most;
}

static void check_product(const struct cp *cp, struct product p, bool ordered, bool tf32,
                          bool exact_x)
{
    const size_t n = p.rows * p.ldy;
    uint32_t *perm = bt_alloc(p.k * sizeof(*perm));
    float *x = pk_floats(p.rows * p.ldx, -1, 1), *bias = pk_floats(p.n, -1, 1);
    float *want = pk_floats(n, 0, 0), *got = pk_floats(n, 0, 0), *part = pk_floats(n, 0, 0);
    uint8_t *weights = pk_random_rows(p.type, p.n, p.k);
    char what[128];

    (void)snprintf(what, sizeof(what), "%s [%u, %u] x %u%s%s", bt_dtype_name(p.type), p.n, p.k,
                   p.rows, ordered ? " with an order of inputs" : "", tf32 ? ", tf32" : "");
    for (uint32_t i = 0; i < p.k; i++) {
        perm[i] = (uint32_t)(((uint64_t)i * 7919 + 3) % p.k);
    }
    for (size_t i = 0; exact_x && i < p.rows * p.ldx; i++) {
        x[i] = bt_bf16_to_f32(bt_f32_to_bf16(x[i] < 0 ? x[i] - 0.25F : x[i] + 0.25F));
    }
    p.gaps = pk_floats(n, 7, 7);
    p.x = x;
    p.bias = p.rows % 2 == 0 ? bias : NULL;
    p.weights = weights;
    p.perm = ordered ? perm : NULL;
    compute(cp->cpu, &p, p.rows, want);
    compute(cp->cuda, &p, p.rows, got);
    /* Sums of k products at random: their roundings add up as roots. */
    double most = largest(want, n),
           off = p.rows > few(p.type) ? rounding(p.type, tf32, exact_x) : 0;
    cp_near(what, got, want, n, (5e-7 * sqrt(p.k) + 3 * off) * most, 2e-6);
    if (off > 0 && p.k > 1) {
        CHECK(memcmp(got, want, n * sizeof(float)) != 0);
    }
    /* Few rows are one answer. */
    compute(cp->cuda, &p, few(p.type), got);
    const uint32_t calls[] = {1, 3, few(p.type) - 1};
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        compute(cp->cuda, &p, calls[i], part);
        cp_same(what, part, got, n);
    }
    cp_near(what, got, want, n, 5e-7 * sqrt(p.k) * most, 2e-6);
    bt_free(perm);
    bt_free(x);
    bt_free(bias);
    bt_free(want);
    bt_free(got);
    bt_free(part);
    bt_free(weights);
    bt_free(p.gaps);
}

/* BF16 with an order of inputs lies in tiles; x is exact in bf16, so both ways round nothing. */
static void test_tiles(const struct cp *cp)
{
    struct product p = {
        .type = BT_DTYPE_BF16, .n = 40, .k = 320, .rows = 50, .ldx = 320, .ldy = 40};

    check_product(cp, p, true, false, true);
}

static void test_products(const struct cp *cp, bool tf32)
{
    static const uint32_t odd[][2] = {{1, 1}, {33, 40}, {70, 256}, {130, 257}, {5, 1100}};

    for (int t = 0; t < (tf32 ? BT_DTYPE_F16 : BT_DTYPE_COUNT); t++) { /* others do not change */
        enum bt_dtype type = (enum bt_dtype)t;
        uint32_t block = bt_dtype_block_values(type);
        for (size_t i = 0; block == 1 && i < sizeof(odd) / sizeof(odd[0]); i++) {
            struct product p = {.type = type, .n = odd[i][0], .k = odd[i][1]};
            p.rows = i % 2 == 0 ? ROWS_MAX : 23;
            p.ldx = i == 2 ? p.k : p.k + 3; /* one whose rows are aligned */
            p.ldy = p.n + 5;
            check_product(cp, p, false, tf32, type != BT_DTYPE_F32);
            check_product(cp, p, false, tf32, false);
        }
        if (block != 1) {
            struct product p = {.type = type, .n = 70, .k = block == 32 ? 288 : 512};
            p.rows = ROWS_MAX;
            p.ldx = p.k;
            p.ldy = p.n;
            check_product(cp, p, false, tf32, false);
        }
    }
    struct product p = {.type = BT_DTYPE_G4, .n = 40, .k = 320, .rows = 50, .ldx = 320, .ldy = 40};
    check_product(cp, p, true, tf32, false);
    p.type = BT_DTYPE_F32;
    check_product(cp, p, true, tf32, false);
    p.type = BT_DTYPE_F16;
    check_product(cp, p, true, tf32, false);
    test_tiles(cp);
}

/* Three products of one x: as one by one, whatever was rounded for the one before. */
static void test_together(const struct cp *cp)
{
    static const enum bt_dtype types[] = {BT_DTYPE_BF16, BT_DTYPE_Q8_0, BT_DTYPE_F16};
    const uint32_t k_cols = 96, rows = 40, n_out[] = {64, 33, 48};
    float *x = pk_floats(rows * k_cols, -1, 1);
    float *dx = cp_floats(cp->cuda, x, rows * k_cols);
    struct bt_k_product p[3];
    struct bt_kweight *w[3] = {NULL, NULL, NULL};
    float *alone[3], *zeros = pk_floats(rows * 64, 0, 0);

    for (int i = 0; i < 3; i++) {
        uint8_t *data = pk_random_rows(types[i], n_out[i], k_cols);
        const struct bt_k_weight_desc d = {.dtype = types[i],
                                           .n_rows = n_out[i],
                                           .n_cols = k_cols,
                                           .data = data,
                                           .for_gemm = true};
        CHECK_EQ(bt_k_weight_create(cp->cuda, &d, &w[i], NULL), BT_OK);
        bt_free(data);
        alone[i] = pk_floats(rows * n_out[i], 0, 0);
        p[i] = (struct bt_k_product){
            .y = cp_floats(cp->cuda, zeros, rows * n_out[i]), .ldy = n_out[i], .w = w[i]};
        bt_k_gemm(cp->cuda, p[i].y, p[i].ldy, dx, k_cols, w[i], NULL, rows);
        bt_k_read(cp->cuda, alone[i], p[i].y, rows * n_out[i] * sizeof(float));
        bt_k_write(cp->cuda, p[i].y, zeros, rows * n_out[i] * sizeof(float));
    }
    bt_k_gemm_all(cp->cuda, p, 3, dx, k_cols, rows);
    for (int i = 0; i < 3; i++) {
        float *got = pk_floats(rows * n_out[i], 0, 0);
        cp_take(cp->cuda, got, p[i].y, rows * n_out[i]);
        cp_same("three at once", got, alone[i], rows * n_out[i]);
        bt_k_weight_destroy(cp->cuda, w[i]);
        bt_free(got);
        bt_free(alone[i]);
    }
    bt_k_free(cp->cuda, dx, rows * k_cols * sizeof(float));
    bt_free(x);
    bt_free(zeros);
}

/* Weights and x in many pieces, as large ones go: each row of each output is there, and right. */
static void test_pieces(const struct cp *cp, bool tf32)
{
    static const enum bt_dtype types[] = {BT_DTYPE_Q4_K, BT_DTYPE_BF16, BT_DTYPE_F32};

    cuda_blas_limit(cp->cuda, 1, 35 * 256 * sizeof(float));
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        struct product p = {
            .type = types[i], .n = 70, .k = 256, .rows = ROWS_MAX + 1, .ldx = 259, .ldy = 71};
        check_product(cp, p, false, tf32, false);
    }
    cuda_blas_limit(cp->cuda, CUDA_BLAS_WEIGHTS, CUDA_BLAS_X);
}

/* A shape is asked about once; another number of rows is another shape. */
static void test_asked_once(const struct cp *cp)
{
    const uint32_t most = 40;
    float *x = pk_floats(most * 32, -1, 1), *zeros = pk_floats(most * 64, 0, 0);
    float *dx = cp_floats(cp->cuda, x, most * 32), *dy = cp_floats(cp->cuda, zeros, most * 64);
    uint8_t *data = pk_random_rows(BT_DTYPE_F32, 64, 32);
    const struct bt_k_weight_desc d = {
        .dtype = BT_DTYPE_F32, .n_rows = 64, .n_cols = 32, .data = data, .for_gemm = true};
    struct bt_kweight *w = NULL;

    CHECK_EQ(bt_k_weight_create(cp->cuda, &d, &w, NULL), BT_OK);
    const uint64_t before = cuda_blas_asked(cp->cuda);
    for (int again = 0; again < 3; again++) {
        for (uint32_t rows = CUDA_BLAS_FEW + 1; rows <= most; rows++) {
            bt_k_gemm(cp->cuda, dy, 64, dx, 32, w, NULL, rows);
        }
    }
    CHECK_EQ(cuda_blas_asked(cp->cuda) - before, most - CUDA_BLAS_FEW);
    bt_k_free(cp->cuda, dx, most * 32 * sizeof(float));
    bt_k_free(cp->cuda, dy, most * 64 * sizeof(float));
    bt_k_weight_destroy(cp->cuda, w);
    bt_free(x);
    bt_free(zeros);
    bt_free(data);
}

/* Beyond f16: its largest number; infinities stay. */
static void test_f16_range(const struct cp *cp)
{
    enum { ROWS = 9, K = 32 };
    float x[ROWS * K] = {0}, y[ROWS] = {0};
    uint16_t one[K] = {0};

    one[0] = 0x3c00;
    x[0] = 65504.0F;
    x[K] = 1e9F;
    x[2 * K] = -65520.0F;
    x[3 * K] = INFINITY;
    x[4 * K] = 65519.0F; /* rounds to 65504 */
    const struct bt_k_weight_desc d = {
        .dtype = BT_DTYPE_F16, .n_rows = 1, .n_cols = K, .data = one, .for_gemm = true};
    struct bt_kweight *w = NULL;
    CHECK_EQ(bt_k_weight_create(cp->cuda, &d, &w, NULL), BT_OK);
    float *dx = cp_floats(cp->cuda, x, ROWS * (size_t)K), *dy = cp_floats(cp->cuda, y, ROWS);
    bt_k_gemm(cp->cuda, dy, 1, dx, K, w, NULL, ROWS);
    cp_take(cp->cuda, y, dy, ROWS);
    CHECK(y[0] == 65504.0F && y[1] == 65504.0F && y[2] == -65504.0F && isinf(y[3]) &&
          y[4] == 65504.0F && y[5] == 0.0F);
    bt_k_free(cp->cuda, dx, sizeof(x));
    bt_k_weight_destroy(cp->cuda, w);
}

/* A table that is an output matrix too: read as rows. */
static void test_embed(const struct cp *cp)
{
    const uint32_t ids[] = {36, 0, 18, 36}, n = 37, k_cols = 41;

    for (int t = 0; t <= BT_DTYPE_BF16; t++) {
        uint8_t *rows = pk_random_rows((enum bt_dtype)t, n, k_cols);
        float *want = pk_floats(4 * k_cols, 0, 0), *got = pk_floats(4 * k_cols, 0, 0);
        for (int side = 0; side < 2; side++) {
            struct bt_kctx *k = side == 0 ? cp->cpu : cp->cuda;
            const struct bt_k_weight_desc d = {.dtype = (enum bt_dtype)t,
                                               .n_rows = n,
                                               .n_cols = k_cols,
                                               .data = rows,
                                               .for_gemm = true,
                                               .for_embed = true};
            struct bt_kweight *w = NULL;
            CHECK_EQ(bt_k_weight_create(k, &d, &w, NULL), BT_OK);
            float *dy = cp_floats(k, want, 4 * k_cols);
            bt_k_embed(k, dy, w, ids, 4, 1.5F);
            cp_take(k, side == 0 ? want : got, dy, 4 * k_cols);
            bt_k_weight_destroy(k, w);
        }
        cp_same(bt_dtype_name((enum bt_dtype)t), got, want, 4 * k_cols);
        bt_free(rows);
        bt_free(want);
        bt_free(got);
    }
}

/* What class cuda-cublas-fp8 says of many rows, but for the order of sums: a row's codes and scale. */
static void f8_want(const struct product *p, float *want)
{
    const size_t row_bytes = p->k / 32 * (size_t)36;

    for (uint32_t m = 0; m < p->rows; m++) {
        const float *x = p->x + m * p->ldx;
        float a = 0.0F;
        for (uint32_t k = 0; k < p->k; k++) {
            a = fabsf(x[k]) > a ? fabsf(x[k]) : a;
        }
        for (uint32_t n = 0; n < p->n; n++) {
            const uint8_t *row = p->weights + n * row_bytes;
            double sum = 0;
            float d;
            memcpy(&d, row, sizeof(d));
            for (uint32_t k = 0; k < p->k && a > 0.0F; k++) {
                sum += (double)bt_f8_to_f32(bt_f32_to_f8(x[k] * (448.0F / a))) *
                       (double)bt_f8_to_f32(row[k / 32 * 36 + 4 + k % 32]);
            }
            sum = sum * (double)(a / 448.0F) * (double)d;
            want[m * p->ldy + n] = (float)(p->bias != NULL ? sum + (double)p->bias[n] : sum);
        }
    }
}

/* A scale for each row of the weights. n, k: multiples of 4 and 32; else the library has nothing, and all rows are few. */
static void check_f8(const struct cp *cp, uint32_t n, uint32_t k, size_t ldy, uint32_t rows)
{
    struct product p = {.type = BT_DTYPE_GF8, .n = n, .k = k, .rows = rows, .group = k};
    const size_t n_y = rows * ldy;
    uint8_t *weights = pk_random_rows(p.type, n, k);
    float *x = pk_floats(rows * (k + 1), -1, 1), *bias = pk_floats(n, -1, 1);
    float *want = pk_floats(n_y, 7, 7), *got = pk_floats(n_y, 0, 0), *few = pk_floats(n_y, 0, 0),
          *part = pk_floats(n_y, 0, 0), *cpu = pk_floats(n_y, 0, 0);
    char what[64];

    (void)snprintf(what, sizeof(what), "gf8 [%u, %u] x %u", n, k, rows);
    for (uint32_t i = 0; i < n * (k / 32); i++) {
        memcpy(weights + (size_t)i * 36, weights + (size_t)(i / (k / 32)) * (k / 32) * 36, 4);
    }
    memset(x + 2 * (k + 1), 0, k * sizeof(float)); /* a row of zeros */
    p.ldx = k + 1;
    p.ldy = ldy;
    p.x = x;
    p.bias = bias;
    p.weights = weights;
    p.gaps = pk_floats(n_y, 7, 7);
    compute(cp->cpu, &p, rows, cpu);
    compute(cp->cuda, &p, rows, got);
    compute(cp->cuda, &p, CUDA_BLAS_FEW, few);
    compute(cp->cuda, &p, 3, part);
    cp_same(what, part, few, n_y);
    cp_near(what, few, cpu, n_y, 5e-7 * sqrt(k) * largest(cpu, n_y), 2e-6);
    if (n % 4 == 0 && ldy % 4 == 0) {
        f8_want(&p, want);
        cp_near(what, got, want, n_y, 1e-6 * sqrt(k) * largest(want, n_y), 2e-6);
        CHECK(memcmp(got, few, n_y * sizeof(float)) != 0);
    } else {
        cp_same(what, got, few, n_y);
    }
    bt_free(weights);
    bt_free(x);
    bt_free(bias);
    bt_free(want);
    bt_free(got);
    bt_free(few);
    bt_free(part);
    bt_free(cpu);
    bt_free(p.gaps);
}

static void test_f8(const struct cp *cp)
{
    check_f8(cp, 64, 96, 64, 40);
    check_f8(cp, 4, 32, 8, 9);
    check_f8(cp, 36, 544, 40, 70);
    check_f8(cp, 33, 64, 36, 12); /* 33 outputs are no whole 16 bytes */
    check_f8(cp, 32, 64, 33, 12);
    cuda_blas_limit(cp->cuda, 1, 35 * 64 * sizeof(float));
    check_f8(cp, 40, 64, 40, 80); /* x in pieces */
    cuda_blas_limit(cp->cuda, CUDA_BLAS_WEIGHTS, CUDA_BLAS_X);
}

int main(void)
{
    for (size_t i = 0; i < sizeof(classes) / sizeof(classes[0]); i++) {
        struct cp cp;
        cp_open_as(&cp, classes[i]);
        CHECK_STR(bt_k_numerics(cp.cuda), classes[i]);
        CHECK(!bt_k_one_answer(bt_k_numerics(cp.cuda)));
        if (i < 2) { /* weights of other types and groups are those of the first */
            test_products(&cp, i == 1);
        }
        test_together(&cp);
        test_pieces(&cp, i == 1);
        test_asked_once(&cp);
        test_f16_range(&cp);
        test_embed(&cp);
        if (i == 2) {
            test_f8(&cp);
        }
        cp_close(&cp);
    }
    CHECK(bt_k_one_answer(NULL) && bt_k_one_answer("cuda-f32") && bt_k_one_answer("cpu-int8"));
    return bt_test_done();
}
