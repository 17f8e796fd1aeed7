/* One answer on the CUDA backend, to the bit: a product computed twice, and the rows of a call of 512 computed one by one, in every
 * class that promises it. `--large`: shapes of an 8B model, for a device; the emulated one is slow. */

#include "tests/parity/cuda_parity.h"

#define ROWS 512U

static void fill(float *dx, struct bt_kctx *k, size_t n)
{
    float *x = pk_floats(n, -1, 1);

    bt_k_write(k, dx, x, n * sizeof(float));
    bt_free(x);
}

static void check_product(struct bt_kctx *k, enum bt_dtype t, uint32_t n, uint32_t k_cols)
{
    const size_t in = (size_t)ROWS * k_cols, out = (size_t)ROWS * n;
    uint8_t *rows = pk_random_rows(t, n, k_cols);
    const struct bt_k_weight_desc d = {
        .dtype = t, .n_rows = n, .n_cols = k_cols, .data = rows, .for_gemm = true};
    struct bt_kweight *w = NULL;
    float *dx = bt_k_alloc(k, in * sizeof(float)), *dy = bt_k_alloc(k, out * sizeof(float));
    float *first = bt_alloc(out * sizeof(float)), *again = bt_alloc(out * sizeof(float));
    char what[64];

    CHECK_EQ(bt_k_weight_create(k, &d, &w, NULL), BT_OK);
    CHECK(dx != NULL && dy != NULL && first != NULL && again != NULL);
    fill(dx, k, in);
    bt_k_gemm(k, dy, n, dx, k_cols, w, NULL, ROWS);
    bt_k_read(k, first, dy, out * sizeof(float));
    for (int way = 0; way < 3; way++) { /* all again; one by one; in chunks */
        const uint32_t step = way == 0 ? ROWS : way == 1 ? 1 : 37;
        (void)snprintf(what, sizeof(what), "%s, %s, %u rows at a time", bt_k_numerics(k),
                       bt_dtype_name(t), step);
        for (uint32_t r = 0; r < ROWS; r += step) {
            bt_k_gemm(k, dy + (size_t)r * n, n, dx + (size_t)r * k_cols, k_cols, w, NULL,
                      ROWS - r < step ? ROWS - r : step);
        }
        bt_k_read(k, again, dy, out * sizeof(float));
        cp_same(what, again, first, out);
    }
    bt_k_free(k, dx, in * sizeof(float));
    bt_k_free(k, dy, out * sizeof(float));
    bt_k_weight_destroy(k, w);
    bt_free(first);
    bt_free(again);
    bt_free(rows);
}

static uint32_t outputs = 19, inputs = 256;

static void check_class(struct bt_kctx *k)
{
    static const enum bt_dtype types[] = {BT_DTYPE_F32, BT_DTYPE_BF16, BT_DTYPE_Q8_0,
                                          BT_DTYPE_Q4_K};

    for (size_t t = 0; t < sizeof(types) / sizeof(types[0]); t++) {
        check_product(k, types[t], outputs, inputs);
    }
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--large") == 0) {
        outputs = inputs = 4096;
    }
    cp_each_exact(check_class);
    return bt_test_done();
}
