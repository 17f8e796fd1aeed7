/* Class cuda-bf16's products of weights of bf16 and in blocks against sums in double precision over x and weights rounded to bf16; and that the number of
 * rows in a call, which chooses the kernel, changes no bit. Experts too, of several types; the embedding of a table that is
 * multiplied as well; and that weights of other types have the bits of cuda-f32. */

#include "base/float16.h"
#include "tests/parity/cuda_parity.h"

#define ROWS_MAX 140

static struct bt_kweight *weight(struct bt_kctx *k, enum bt_dtype t, const void *rows, uint32_t n,
                                 uint32_t k_cols, const uint32_t *perm, bool embed, uint32_t group)
{
    const struct bt_k_weight_desc d = {.dtype = t,
                                       .n_rows = n,
                                       .n_cols = k_cols,
                                       .data = rows,
                                       .for_gemm = true,
                                       .for_embed = embed,
                                       .group = group,
                                       .perm = perm};
    struct bt_kweight *w = NULL;

    CHECK_EQ(bt_k_weight_create(k, &d, &w, NULL), BT_OK);
    return w;
}

static double bf16_at(const uint8_t *rows, size_t i)
{
    return (double)bt_bf16_to_f32((uint16_t)(rows[2 * i] | rows[2 * i + 1] << 8));
}

/* The values of n rows, as the CPU's embedding has them, rounded to bf16; those of gf8 are not. */
static float *values_of(struct bt_kctx *cpu, enum bt_dtype t, const uint8_t *rows, uint32_t n,
                        uint32_t k_cols)
{
    float *v = pk_floats((size_t)n * k_cols, 0, 0);
    const struct bt_k_weight_desc d = {
        .dtype = t, .n_rows = n, .n_cols = k_cols, .data = rows, .for_embed = true};
    struct bt_kweight *w = NULL;

    CHECK_EQ(bt_k_weight_create(cpu, &d, &w, NULL), BT_OK);
    for (uint32_t i = 0; i < n; i++) {
        bt_k_embed(cpu, v + (size_t)i * k_cols, w, &i, 1, 1.0F);
    }
    bt_k_weight_destroy(cpu, w);
    for (size_t i = 0; t != BT_DTYPE_GF8 && i < (size_t)n * k_cols; i++) {
        v[i] = bt_bf16_to_f32(bt_f32_to_bf16(v[i]));
    }
    return v;
}

/* All rows at once, against the definition; then in calls of every size, with each kernel. */
static void test_product(const struct cp *p, enum bt_dtype t, uint32_t n, uint32_t k_cols,
                         bool ordered, uint32_t group)
{
    struct bt_kctx *k = p->cuda;
    static const uint32_t calls[] = {1, 3, 8, 9, 17, 33, 66};
    const uint32_t m = ROWS_MAX;
    const size_t ldx = k_cols + 3, ldy = n + 5;
    uint8_t *rows = pk_random_rows(t, n, k_cols);
    for (uint32_t i = 0, blocks = k_cols / 32; group != 0 && i < n * blocks; i++) {
        memcpy(rows + (size_t)i * 36, rows + (size_t)(i - i % blocks % (group / 32)) * 36, 4);
    }
    float *values = values_of(p->cpu, t, rows, n, k_cols);
    float *x = pk_floats(m * ldx, -1, 1), *bias = pk_floats(n, -1, 1),
          *gaps = pk_floats(m * ldy, 7, 7), *got = pk_floats(m * ldy, 0, 0),
          *part = pk_floats(m * ldy, 0, 0);
    double *want = bt_alloc(m * ldy * sizeof(double));
    uint32_t *perm = bt_alloc(k_cols * sizeof(uint32_t));
    char what[96];

    (void)snprintf(what, sizeof(what), "%s [%u, %u]%s", bt_dtype_name(t), n, k_cols,
                   ordered ? " with an order of inputs" : "");
    for (uint32_t i = 0; i < k_cols; i++) {
        perm[i] = ordered ? (uint32_t)(((uint64_t)i * 7919 + 3) % k_cols) : i;
    }
    double most = 1;
    for (size_t i = 0; i < m * ldy; i++) {
        want[i] = 7;
        for (uint32_t j = 0; i % ldy < n && j < k_cols; j++) {
            double xj = (double)bt_bf16_to_f32(bt_f32_to_bf16(x[i / ldy * ldx + perm[j]]));
            want[i] = (j == 0 ? (double)bias[i % ldy] : want[i]) +
                      xj * (double)values[i % ldy * k_cols + j];
        }
        most = fabs(want[i]) > most ? fabs(want[i]) : most;
    }
    struct bt_kweight *w = weight(k, t, rows, n, k_cols, ordered ? perm : NULL, false, group);
    float *dx = cp_floats(k, x, m * ldx), *db = cp_floats(k, bias, n),
          *dy = cp_floats(k, gaps, m * ldy);
    bt_k_gemm(k, dy, ldy, dx, ldx, w, db, m);
    cp_take(k, got, dy, m * ldy);
    pk_near(what, got, want, m * ldy, 1e-6 * sqrt(k_cols) * most, 1e-6);
    for (size_t c = 0; c < sizeof(calls) / sizeof(calls[0]); c++) {
        dy = cp_floats(k, gaps, m * ldy);
        for (uint32_t r = 0; r < m; r += calls[c]) {
            bt_k_gemm(k, dy + r * ldy, ldy, dx + r * ldx, ldx, w, db,
                      m - r < calls[c] ? m - r : calls[c]);
        }
        cp_take(k, part, dy, m * ldy);
        if (!cp_same(what, part, got, m * ldy)) {
            fprintf(stderr, "  in calls of %u\n", calls[c]);
        }
    }
    bt_k_free(k, dx, m * ldx * sizeof(float));
    bt_k_free(k, db, n * sizeof(float));
    bt_k_weight_destroy(k, w);
    bt_free(rows);
    bt_free(values);
    bt_free(x);
    bt_free(bias);
    bt_free(gaps);
    bt_free(want);
    bt_free(got);
    bt_free(part);
    bt_free(perm);
}

/* Products of one x, of several types and orders of inputs: the bits of each alone. */
static void test_together(struct bt_kctx *k, bool ordered)
{
    enum { M = 9, COLS = 64 };
    static const enum bt_dtype types[3] = {BT_DTYPE_BF16, BT_DTYPE_BF16, BT_DTYPE_F32};
    float *x = pk_floats((size_t)M * COLS, -1, 1), *dx = cp_floats(k, x, (size_t)M * COLS);
    struct bt_k_product p[BT_K_PRODUCTS_MAX];
    uint32_t perm[COLS];
    struct bt_kweight *w[3];

    for (uint32_t i = 0; i < COLS; i++) {
        perm[i] = (i * 7 + 3) % COLS;
    }
    for (uint32_t i = 0; i < 3; i++) {
        uint8_t *rows = pk_random_rows(types[i], 20 + i, COLS);
        w[i] = weight(k, types[i], rows, 20 + i, COLS, ordered && i == 1 ? perm : NULL, false, 0);
        p[i] = (struct bt_k_product){
            .y = bt_k_alloc(k, (size_t)M * (20 + i) * sizeof(float)), .ldy = 20 + i, .w = w[i]};
        bt_free(rows);
    }
    bt_k_gemm_all(k, p, 3, dx, COLS, M);
    for (uint32_t i = 0; i < 3; i++) {
        size_t n = (size_t)M * (20 + i);
        float *alone = pk_floats(n, 0, 0), *both = pk_floats(n, 0, 0), *dy = cp_floats(k, alone, n);
        bt_k_gemm(k, dy, 20 + i, dx, COLS, w[i], NULL, M);
        cp_take(k, alone, dy, n);
        cp_take(k, both, p[i].y, n);
        cp_same("products of one x", both, alone, n);
        bt_k_weight_destroy(k, w[i]);
        bt_free(alone);
        bt_free(both);
    }
    bt_k_free(k, dx, (size_t)M * COLS * sizeof(float));
    bt_free(x);
}

/* A table of bf16 in fragments gives its rows back as they were. */
static void test_embed(struct bt_kctx *k)
{
    enum { N = 37, COLS = 70 };
    const uint32_t ids[] = {N - 1, 0, 17, 8, 25};
    uint8_t *rows = pk_random_rows(BT_DTYPE_BF16, N, COLS);
    float *got = pk_floats((size_t)5 * COLS, 0, 0);
    struct bt_kweight *w = weight(k, BT_DTYPE_BF16, rows, N, COLS, NULL, true, 0);
    float *dy = cp_floats(k, got, (size_t)5 * COLS);

    bt_k_embed(k, dy, w, ids, 5, 2.0F);
    cp_take(k, got, dy, (size_t)5 * COLS);
    for (uint32_t i = 0; i < 5 * COLS; i++) {
        CHECK((double)got[i] == 2 * bf16_at(rows, ids[i / COLS] * COLS + i % COLS));
    }
    bt_k_weight_destroy(k, w);
    bt_free(rows);
    bt_free(got);
}

enum { EXPERTS = 5, DIM = 96, FFN = 64, MOE_ROWS = 40 };

static const enum bt_dtype expert_type[EXPERTS] = {BT_DTYPE_BF16, BT_DTYPE_Q8_0, BT_DTYPE_F32,
                                                   BT_DTYPE_BF16, BT_DTYPE_Q4_0};

static void create_experts(struct bt_kctx *k, uint8_t *const rows[3][EXPERTS],
                           struct bt_kweight *w[3][EXPERTS])
{
    for (uint32_t i = 0; i < 3; i++) {
        for (uint32_t e = 0; e < EXPERTS; e++) {
            w[i][e] = weight(k, expert_type[e], rows[i][e], i < 2 ? FFN : DIM, i < 2 ? DIM : FFN,
                             NULL, false, 0);
        }
    }
}

static void run_experts(struct bt_kctx *k, struct bt_kweight *w[3][EXPERTS], const float *x,
                        const float *logits, uint32_t step, float *out)
{
    const struct bt_k_moe moe = {.n_experts = EXPERTS,
                                 .top_k = 2,
                                 .normalize = true,
                                 .act = BT_K_SILU,
                                 .gate = w[0],
                                 .up = w[1],
                                 .down = w[2],
                                 .dim = DIM,
                                 .ffn_dim = FFN};
    float *dx = cp_floats(k, x, (size_t)MOE_ROWS * DIM),
          *dl = cp_floats(k, logits, (size_t)MOE_ROWS * EXPERTS),
          *dy = cp_floats(k, out, (size_t)MOE_ROWS * DIM);

    CHECK_EQ(bt_k_moe_reserve(k, &moe, MOE_ROWS), BT_OK);
    for (uint32_t r = 0; r < MOE_ROWS; r += step) {
        bt_k_moe_ffn(k, dy + (size_t)r * DIM, dx + (size_t)r * DIM, dl + (size_t)r * EXPERTS, &moe,
                     MOE_ROWS - r < step ? MOE_ROWS - r : step);
    }
    cp_take(k, out, dy, (size_t)MOE_ROWS * DIM);
    bt_k_free(k, dx, (size_t)MOE_ROWS * DIM * sizeof(float));
    bt_k_free(k, dl, (size_t)MOE_ROWS * EXPERTS * sizeof(float));
}

/* Experts of several types, near those of the CPU; a row at a time as all together. */
static void test_experts(const struct cp *p)
{
    const size_t n = (size_t)MOE_ROWS * DIM;
    uint8_t *rows[3][EXPERTS];
    struct bt_kweight *w[3][EXPERTS];
    float *x = pk_floats(n, -1, 1), *logits = pk_floats((size_t)MOE_ROWS * EXPERTS, -3, 3),
          *want = pk_floats(n, 0, 0), *got = pk_floats(n, 0, 0), *part = pk_floats(n, 0, 0);

    for (uint32_t i = 0; i < 3 * EXPERTS; i++) {
        rows[i / EXPERTS][i % EXPERTS] = pk_random_rows(expert_type[i % EXPERTS], DIM, FFN);
    }
    for (int side = 0; side < 2; side++) {
        struct bt_kctx *k = side == 0 ? p->cpu : p->cuda;
        create_experts(k, rows, w);
        run_experts(k, w, x, logits, MOE_ROWS, side == 0 ? want : got);
        if (side == 1) {
            run_experts(k, w, x, logits, 1, part);
            cp_same("experts row by row", part, got, n);
            run_experts(k, w, x, logits, 13, part);
            cp_same("experts in calls of 13", part, got, n);
        }
        for (uint32_t i = 0; i < 3 * EXPERTS; i++) {
            bt_k_weight_destroy(k, w[i / EXPERTS][i % EXPERTS]);
        }
    }
    double most = 0;
    for (size_t i = 0; i < n; i++) {
        most = fabs((double)want[i]) > most ? fabs((double)want[i]) : most;
    }
    cp_near("experts", got, want, n, 0.01 * most, 0);
    for (uint32_t i = 0; i < 3 * EXPERTS; i++) {
        bt_free(rows[i / EXPERTS][i % EXPERTS]);
    }
    bt_free(x);
    bt_free(logits);
    bt_free(want);
    bt_free(got);
    bt_free(part);
}

/* Plain types other than bf16 have the bits of the other class. */
static void test_others(struct bt_kctx *tiles)
{
    static const enum bt_dtype types[] = {BT_DTYPE_F32, BT_DTYPE_F16};
    struct cp f32;

    cp_open(&f32);
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        uint8_t *rows = pk_random_rows(types[i], 40, 256);
        float *x = pk_floats((size_t)9 * 256, -1, 1), y[2][9 * 40] = {{0}};
        for (int side = 0; side < 2; side++) {
            struct bt_kctx *k = side == 0 ? f32.cuda : tiles;
            struct bt_kweight *w = weight(k, types[i], rows, 40, 256, NULL, false, 0);
            float *dx = cp_floats(k, x, (size_t)9 * 256), *dy = cp_floats(k, y[side], 360);
            bt_k_gemm(k, dy, 40, dx, 256, w, NULL, 9);
            cp_take(k, y[side], dy, 360);
            bt_k_free(k, dx, (size_t)9 * 256 * sizeof(float));
            bt_k_weight_destroy(k, w);
        }
        cp_same(bt_dtype_name(types[i]), y[1], y[0], 360);
        bt_free(rows);
        bt_free(x);
    }
    cp_close(&f32);
}

int main(void)
{
    static const uint32_t odd[][2] = {{1, 1}, {15, 7}, {33, 40}, {130, 257}, {5, 1100}, {17, 4700}};
    struct cp p;

    cp_open_as(&p, "cuda-bf16");
    CHECK(strncmp(bt_k_numerics(p.cuda), "cuda-bf16-", 10) == 0);
    for (size_t i = 0; i < sizeof(odd) / sizeof(odd[0]); i++) {
        test_product(&p, BT_DTYPE_BF16, odd[i][0], odd[i][1], false, 0);
    }
    test_product(&p, BT_DTYPE_BF16, 40, 300, true, 0);
    for (int t = BT_DTYPE_Q4_0; t < BT_DTYPE_COUNT; t++) {
        uint32_t block = bt_dtype_block_values((enum bt_dtype)t);
        test_product(&p, (enum bt_dtype)t, 37, block == 32 ? 96 : 256, false, 0);
    }
    test_product(&p, BT_DTYPE_Q8_0, 133, 4128, false, 0);
    test_product(&p, BT_DTYPE_G4, 40, 608, true, 0);
    test_product(&p, BT_DTYPE_GF8, 37, 1024, false, 128);
    test_product(&p, BT_DTYPE_GF8, 133, 1120, false, 1120);
    test_product(&p, BT_DTYPE_GF8, 33, 1152, false, 576); /* segments of 512 and 64 */
    test_together(p.cuda, false);
    test_together(p.cuda, true);
    test_embed(p.cuda);
    test_experts(&p);
    test_others(p.cuda);
    cp_close(&p);
    return bt_test_done();
}
