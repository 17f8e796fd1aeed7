/* Rounding to block formats: every value within half a step of its block, extremes kept, zeros exact; halves to nearest
 * even. What was rounded is read back by the kernels' dequantisation. */

#include "files/quant_blocks.h"

#include <float.h>
#include <stdlib.h>
#include "base/mem.h"
#include "kernels/backend.h"
#include "tests/check.h"

enum { N = 32 * 64 };

static struct bt_kctx *k;

static void read_back(enum bt_dtype t, const void *data, float *y, uint32_t n)
{
    struct bt_k_weight_desc d = {
        .dtype = t, .n_rows = 1, .n_cols = n, .data = data, .for_embed = true};
    struct bt_kweight *w = NULL;
    const uint32_t id = 0;

    CHECK_EQ(bt_k_weight_create(k, &d, &w, NULL), BT_OK);
    bt_k_embed(k, y, w, &id, 1, 1.0F);
    bt_k_weight_destroy(k, w);
}

/* Steps between neighbours that a block of these values has, by the format's definition. */
static double step_of(enum bt_dtype t, const float *x)
{
    double low = (double)x[0], high = (double)x[0], most = 0.0;

    for (int i = 0; i < 32; i++) {
        low = fmin(low, (double)x[i]);
        high = fmax(high, (double)x[i]);
        most = fmax(most, fabs((double)x[i]));
    }
    switch (t) {
    case BT_DTYPE_Q8_0:
        return most / 127.0;
    case BT_DTYPE_Q4_0:
        return most / 8.0;
    case BT_DTYPE_Q5_0:
        return most / 16.0;
    case BT_DTYPE_Q4_1:
        return (high - low) / 15.0;
    default:
        return (high - low) / 31.0;
    }
}

static void check_blocks(enum bt_dtype t, const float *x)
{
    static float y[N];
    static uint8_t q[N * 4];
    int bad = 0;

    bt_quantize(q, x, N, t);
    read_back(t, q, y, N);
    for (uint32_t b = 0; b < N; b += 32) {
        double step = step_of(t, x + b), most = 0.0;
        for (uint32_t i = b; i < b + 32; i++) {
            most = fmax(most, fabs((double)x[i]));
        }
        for (uint32_t i = b; i < b + 32; i++) {
            /* The signed formats lack the step opposite to their extreme; scales and minima are halves. */
            double room = t == BT_DTYPE_Q4_0 || t == BT_DTYPE_Q5_0 ? 1.0 : 0.5;
            bad += !(fabs((double)y[i] - (double)x[i]) <= room * step * 1.01 + most * 2e-3 + 1e-7);
        }
    }
    CHECK_EQ(bad, 0);
    if (bad != 0) {
        fprintf(stderr, "%s: %d values too far\n", bt_dtype_name(t), bad);
    }
}

static void test_blocks(void)
{
    static const enum bt_dtype types[] = {BT_DTYPE_Q4_0, BT_DTYPE_Q4_1, BT_DTYPE_Q5_0,
                                          BT_DTYPE_Q5_1, BT_DTYPE_Q8_0};
    static float x[N], zeros[N], y[N];
    static uint8_t q[N * 4];

    srand(5);
    for (uint32_t i = 0; i < N; i++) {
        x[i] = ((float)rand() / (float)RAND_MAX - 0.3F) * ldexpf(1.0F, (int)(i / 32 % 9) - 4);
    }
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        CHECK(bt_quantize_known(types[i]));
        check_blocks(types[i], x);
        bt_quantize(q, zeros, N, types[i]);
        read_back(types[i], q, y, N);
        CHECK(memcmp(y, zeros, sizeof(zeros)) == 0 || y[0] == 0.0F);
        for (uint32_t j = 0; j < N; j++) {
            zeros[j] = y[j];
        }
        for (uint32_t j = 0; j < N; j++) {
            CHECK_NEAR(zeros[j], 0.0, 0.0);
            zeros[j] = 0.0F;
        }
    }
    CHECK(!bt_quantize_known(BT_DTYPE_Q4_K) && !bt_quantize_known(BT_DTYPE_G4));
}

static void test_known_bytes(void)
{
    float x[32];
    uint8_t q[34];

    for (int i = 0; i < 32; i++) {
        x[i] = (float)(i - 16) * 0.5F; /* the largest is -8: one for 127 steps of 8/127 */
    }
    bt_quantize(q, x, 32, BT_DTYPE_Q8_0);
    CHECK_EQ((int8_t)q[2], -127);
    CHECK_EQ(q[2 + 16], 0);
    CHECK_EQ((int8_t)q[2 + 24], 64); /* 4 / (8 / 127) = 63.5, to even */
    bt_quantize(q, x, 32, BT_DTYPE_Q4_0);
    CHECK(q[0] == 0x00 && q[1] == 0x3c); /* -8 / -8 = 1.0 */
    CHECK_EQ(q[2] & 15, 0);
    CHECK_EQ(q[2] >> 4, 8);
    bt_quantize(q, x, 32, BT_DTYPE_Q4_1);
    CHECK(q[2] == 0x00 && q[3] == 0xc8); /* -8.0 */
    CHECK_EQ(q[4 + 15] >> 4, 15);
}

static void test_halves(void)
{
    static const struct {
        float x;
        uint16_t f16, bf16;
    } cases[] = {
        {1.0F, 0x3c00, 0x3f80},           {-2.0F, 0xc000, 0xc000},
        {65504.0F, 0x7bff, 0x4780},       {65520.0F, 0x7c00, 0x4780},
        {0x1p-24F, 0x0001, 0x3380},       {0x1p-25F, 0x0000, 0x3300},
        {0x1.8p-24F, 0x0002, 0x33c0},     {1.00048828125F, 0x3c00, 0x3f80}, /* half way: to even */
        {1.00146484375F, 0x3c02, 0x3f80}, {1.00390625F, 0x3c04, 0x3f80},
        {1.01171875F, 0x3c0c, 0x3f82},    {INFINITY, 0x7c00, 0x7f80}};
    uint16_t h;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        bt_quantize(&h, &cases[i].x, 1, BT_DTYPE_F16);
        CHECK_EQ(h, cases[i].f16);
        bt_quantize(&h, &cases[i].x, 1, BT_DTYPE_BF16);
        CHECK_EQ(h, cases[i].bf16);
    }
    bt_quantize(&h, &(float){NAN}, 1, BT_DTYPE_F16);
    CHECK((h & 0x7fffU) > 0x7c00U);
    bt_quantize(&h, &(float){NAN}, 1, BT_DTYPE_BF16);
    CHECK((h & 0x7fffU) > 0x7f80U);
}

int main(void)
{
    struct bt_k_opts o = {.n_threads = 1};

    CHECK_EQ(bt_k_create_cpu(&o, &k, NULL), BT_OK);
    test_blocks();
    test_known_bytes();
    test_halves();
    bt_k_destroy(k);
    return bt_test_done();
}
