/* Conversions on the device against those of base/: all codes of e4m3, and numbers of every size. */

#include "base/float8.h"
#include "tests/parity/cuda_number_kernels_int.h"
#include "tests/parity/cuda_parity.h"

#define N 4096U

static void test_codes(struct cuda_ctx *c)
{
    float got[256], want[256], *dev = bt_k_alloc(&c->base, sizeof(got));

    number_test_f8(c, dev);
    cp_take(&c->base, got, dev, 256);
    for (uint32_t i = 0; i < 256; i++) {
        want[i] = bt_f8_to_f32((uint8_t)i);
    }
    cp_same("codes of e4m3", got, want, 256);
}

static void test_rounding(struct cuda_ctx *c)
{
    float from[N];
    uint32_t got[N];

    for (uint32_t i = 0; i < N; i++) {
        float f = ldexpf(pk_uniform(-2, 2), (int)(pk_u32() % 26) - 14);
        uint32_t bits;
        memcpy(&bits, &f, 4);
        bits &= i % 3 == 0 ? 0xfff80000U : i % 3 == 1 ? UINT32_MAX : 0xff800001U; /* ties */
        memcpy(&from[i], &bits, 4);
    }
    from[0] = INFINITY;
    from[1] = -INFINITY;
    from[2] = NAN;
    from[3] = 1e30F;
    from[4] = 448.0F;
    from[5] = -0.0F;
    float *dev = cp_floats(&c->base, from, N);
    uint32_t *to = bt_k_alloc(&c->base, sizeof(got));
    number_test_to_f8(c, to, dev, N);
    bt_k_read(&c->base, got, to, sizeof(got));
    for (uint32_t i = 0; i < N; i++) {
        CHECK_EQ(got[i], bt_f32_to_f8(from[i]));
    }
    bt_k_free(&c->base, dev, sizeof(from));
    bt_k_free(&c->base, to, sizeof(got));
}

int main(void)
{
    struct cp p;

    cp_open(&p);
    test_codes(cuda_of(p.cuda));
    test_rounding(cuda_of(p.cuda));
    cp_close(&p);
    return bt_test_done();
}
