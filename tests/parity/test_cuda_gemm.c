/* The CUDA backend's products and embeddings against the CPU backend, for every weight format; and that the number of rows
 * in a call, which chooses the kernel, changes no bit. */

#include "tests/parity/cuda_parity.h"

#define ROWS_MAX 70

/* All rows at once, against the CPU; then in calls of every size. */
static void test_product(const struct cp *p, enum bt_dtype t, uint32_t n, uint32_t k_cols,
                         bool ordered)
{
    static const uint32_t calls[] = {1, 3, 8, 9};
    const uint32_t m = ROWS_MAX;
    const size_t ldx = k_cols + 3, ldy = n + 5;
    uint8_t *rows = pk_random_rows(t, n, k_cols);
    float *x = pk_floats(m * ldx, -1, 1), *bias = pk_floats(n, -1, 1),
          *gaps = pk_floats(m * ldy, 7, 7);
    float *want = pk_floats(m * ldy, 0, 0), *got = pk_floats(m * ldy, 0, 0),
          *part = pk_floats(m * ldy, 0, 0);
    uint32_t *perm = bt_alloc(k_cols * sizeof(uint32_t));
    char what[96];

    (void)snprintf(what, sizeof(what), "%s [%u, %u]%s", bt_dtype_name(t), n, k_cols,
                   ordered ? " with an order of inputs" : "");
    for (uint32_t i = 0; i < k_cols; i++) {
        perm[i] = (uint32_t)(((uint64_t)i * 7919 + 3) % k_cols);
    }
    for (int side = 0; side < 2; side++) {
        struct bt_kctx *k = side == 0 ? p->cpu : p->cuda;
        const struct bt_k_weight_desc d = {.dtype = t,
                                           .n_rows = n,
                                           .n_cols = k_cols,
                                           .data = rows,
                                           .for_gemm = true,
                                           .perm = ordered ? perm : NULL};
        struct bt_kweight *w = NULL;
        CHECK_EQ(bt_k_weight_create(k, &d, &w, NULL), BT_OK);
        float *dx = cp_floats(k, x, m * ldx), *db = cp_floats(k, bias, n),
              *dy = cp_floats(k, gaps, m * ldy);
        bt_k_gemm(k, dy, ldy, dx, ldx, w, db, m);
        cp_take(k, side == 0 ? want : got, dy, m * ldy);
        for (size_t c = 0; side == 1 && c < sizeof(calls) / sizeof(calls[0]); c++) {
            dy = cp_floats(k, gaps, m * ldy);
            for (uint32_t r = 0; r < m; r += calls[c]) {
                bt_k_gemm(k, dy + r * ldy, ldy, dx + r * ldx, ldx, w, db,
                          m - r < calls[c] ? m - r : calls[c]);
            }
            cp_take(k, part, dy, m * ldy);
            cp_same(what, part, got, m * ldy);
        }
        bt_k_free(k, dx, m * ldx * sizeof(float));
        bt_k_free(k, db, n * sizeof(float));
        bt_k_weight_destroy(k, w);
    }
    double most = 0; /* rounding grows with what is added up */
    for (size_t i = 0; i < m * ldy; i++) {
        most = fabs((double)want[i]) > most ? fabs((double)want[i]) : most;
    }
    cp_near(what, got, want, m * ldy, 5e-7 * sqrt(k_cols) * most, 2e-6);
    bt_free(rows);
    bt_free(x);
    bt_free(bias);
    bt_free(gaps);
    bt_free(want);
    bt_free(got);
    bt_free(part);
    bt_free(perm);
}

/* gf8 with a scale for each group has the bits of the same weight with one for each block. */
static void test_groups(struct bt_kctx *k, uint32_t n, uint32_t k_cols, uint32_t group)
{
    const uint32_t m = 20, blocks = k_cols / 32;
    uint8_t *rows = pk_random_rows(BT_DTYPE_GF8, n, k_cols);
    float *x = pk_floats(m * k_cols, -1, 1),
          *y[2] = {pk_floats(m * n, 0, 0), pk_floats(m * n, 0, 0)};

    for (uint32_t i = 0; i < n * blocks; i++) {
        memcpy(rows + (size_t)i * 36, rows + (size_t)(i - i % blocks % (group / 32)) * 36, 4);
    }
    for (int i = 0; i < 2; i++) {
        const struct bt_k_weight_desc d = {.dtype = BT_DTYPE_GF8,
                                           .n_rows = n,
                                           .n_cols = k_cols,
                                           .data = rows,
                                           .for_gemm = true,
                                           .group = i == 0 ? 0 : group};
        struct bt_kweight *w = NULL;
        CHECK_EQ(bt_k_weight_create(k, &d, &w, NULL), BT_OK);
        CHECK(i == 0 ||
              bt_k_weight_bytes(w) == (n + 31) / 32 * 32 * (size_t)(k_cols + k_cols / group * 4));
        float *dx = cp_floats(k, x, m * k_cols), *dy = cp_floats(k, y[i], m * n);
        bt_k_gemm(k, dy, n, dx, k_cols, w, NULL, m);
        bt_k_gemm(k, dy, n, dx, k_cols, w, NULL, 3);
        cp_take(k, y[i], dy, m * n);
        bt_k_free(k, dx, m * k_cols * sizeof(float));
        bt_k_weight_destroy(k, w);
    }
    cp_same("groups", y[1], y[0], m * n);
    bt_free(rows);
    bt_free(x);
    bt_free(y[0]);
    bt_free(y[1]);
}

/* The values of every format, by way of the embedding: the CPU's bits. */
static void test_values(const struct cp *p, enum bt_dtype t, uint32_t n, uint32_t k_cols)
{
    const uint32_t ids[] = {n - 1, 0, n / 2, n - 1};
    uint8_t *rows = pk_random_rows(t, n, k_cols);
    float *want = pk_floats(4 * k_cols, 0, 0), *got = pk_floats(4 * k_cols, 0, 0);

    for (int side = 0; side < 2; side++) {
        struct bt_kctx *k = side == 0 ? p->cpu : p->cuda;
        const struct bt_k_weight_desc d = {
            .dtype = t, .n_rows = n, .n_cols = k_cols, .data = rows, .for_embed = true};
        struct bt_kweight *w = NULL;
        CHECK_EQ(bt_k_weight_create(k, &d, &w, NULL), BT_OK);
        float *dy = cp_floats(k, want, 4 * k_cols);
        bt_k_embed(k, dy, w, ids, 4, 1.5F);
        cp_take(k, side == 0 ? want : got, dy, 4 * k_cols);
        bt_k_weight_destroy(k, w);
    }
    cp_same(bt_dtype_name(t), got, want, 4 * k_cols);
    bt_free(rows);
    bt_free(want);
    bt_free(got);
}

int main(void)
{
    static const uint32_t odd[][2] = {{1, 1}, {31, 7}, {33, 40}, {70, 256}, {130, 257}, {5, 1100}};
    struct cp p;

    cp_open(&p);
    for (int t = 0; t < BT_DTYPE_COUNT; t++) {
        enum bt_dtype type = (enum bt_dtype)t;
        uint32_t block = bt_dtype_block_values(type);
        if (block == 1) {
            for (size_t i = 0; i < sizeof(odd) / sizeof(odd[0]); i++) {
                test_product(&p, type, odd[i][0], odd[i][1], false);
                test_values(&p, type, odd[i][0], odd[i][1]);
            }
        } else {
            test_product(&p, type, 33, block == 32 ? 288 : 512, false);
            test_values(&p, type, 37, block == 32 ? 96 : 768);
        }
    }
    test_product(&p, BT_DTYPE_G4, 40, 320, true);
    test_groups(p.cuda, 40, 384, 128);
    test_groups(p.cuda, 33, 288, 96);
    test_groups(p.cuda, 33, 544, 544);
    test_product(&p, BT_DTYPE_F32, 40, 300, true);
    cp_close(&p);
    return bt_test_done();
}
