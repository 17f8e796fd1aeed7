/* Block formats against values that an independent implementation computed from the same bytes
 * (tests/golden/dequant.bin, made by tools/make_dequant_fixtures.py). */

#include <stdio.h>
#include <string.h>
#include "tests/parity/kernel_parity.h"

enum { VALUES_MAX = 4096, RAW_MAX = 16384 };

static enum bt_dtype type_named(const char *name)
{
    int t = 0;

    while (t < BT_DTYPE_COUNT && strcmp(bt_dtype_name((enum bt_dtype)t), name) != 0) {
        t++;
    }
    return (enum bt_dtype)t;
}

static void check_type(struct bt_kctx *k, enum bt_dtype t, const uint8_t *raw, const float *want,
                       uint32_t n)
{
    struct bt_k_weight_desc d = {
        .dtype = t, .n_rows = 1, .n_cols = n, .data = raw, .for_embed = true};
    struct bt_kweight *w = NULL;
    const uint32_t id = 0;
    float *got = bt_alloc(n * sizeof(float));
    int bad = 0;

    CHECK_EQ(bt_k_weight_create(k, &d, &w, NULL), BT_OK);
    bt_k_embed(k, got, w, &id, 1, 1.0F);
    for (uint32_t i = 0; i < n; i++) {
        bad += !(fabsf(got[i] - want[i]) <= 1.2e-7F * fabsf(want[i]));
    }
    if (bad != 0) {
        fprintf(stderr, "%s: %d of %u values differ\n", bt_dtype_name(t), bad, n);
    }
    CHECK_EQ(bad, 0);
    bt_k_weight_destroy(k, w);
    bt_free(got);
}

int main(void)
{
    struct bt_k_opts o = {.n_threads = 1};
    struct bt_kctx *k;
    FILE *f = fopen("tests/golden/dequant.bin", "rb");
    static uint8_t raw[RAW_MAX];
    static float want[VALUES_MAX];
    char name[16];
    uint32_t sizes[2], n_types = 0;

    CHECK_EQ(bt_k_create_cpu(&o, &k, NULL), BT_OK);
    CHECK(f != NULL);
    while (f != NULL && fread(name, sizeof(name), 1, f) == 1) {
        bool read = fread(sizes, sizeof(sizes), 1, f) == 1 && sizes[0] <= VALUES_MAX &&
                    sizes[1] <= RAW_MAX && fread(raw, sizes[1], 1, f) == 1 &&
                    fread(want, sizeof(float), sizes[0], f) == sizes[0];
        enum bt_dtype t = type_named(name);
        CHECK(read && t < BT_DTYPE_COUNT);
        if (!read || t >= BT_DTYPE_COUNT) {
            break;
        }
        CHECK_EQ(sizes[0] / bt_dtype_block_values(t) * bt_dtype_block_bytes(t), sizes[1]);
        check_type(k, t, raw, want, sizes[0]);
        n_types++;
    }
    CHECK_EQ(n_types, BT_DTYPE_G4 - (BT_DTYPE_BF16 + 1)); /* every block format of files */
    if (f != NULL) {
        (void)fclose(f);
    }
    bt_k_destroy(k);
    return bt_test_done();
}
