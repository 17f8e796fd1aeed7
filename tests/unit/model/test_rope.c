/* Rotary frequencies against numbers that transformers 5.24 computed for the same parameters, and
 * the row cache. */

#include "model/rope.h"

#include "base/mem.h"
#include "tests/check.h"

enum { DIM = 16, PAIRS = DIM / 2 };

static void expect(const struct bt_rope_spec *spec, double scale, const double freq[PAIRS])
{
    struct bt_rope_table t;

    CHECK_EQ(bt_rope_table_init(&t, spec, NULL, 8), BT_OK);
    CHECK_NEAR(t.scale, scale, 1e-12);
    for (uint32_t i = 0; i < PAIRS; i++) {
        CHECK_NEAR(t.inv_freq[i] / freq[i], 1.0, 1e-6); /* the reference is f32 */
    }
    bt_rope_table_fini(&t);
}

static void test_frequencies(void)
{
    struct bt_rope_spec s = {.dim = DIM, .theta = 10000.0};
    static const double plain[] = {1,    0.31622776601,   0.1,   0.031622776601,
                                   0.01, 0.0031622776601, 0.001, 0.00031622776601};
    expect(&s, 1.0, plain);

    s.type = BT_ROPE_LINEAR;
    s.factor = 4.0;
    static const double linear[] = {0.25,          0.079056941,    0.025,   0.00790569466,
                                    0.00249999994, 0.000790569466, 0.00025, 7.90569466e-05};
    expect(&s, 1.0, linear);

    s.type = BT_ROPE_LLAMA3;
    s.factor = 8.0;
    s.low_freq_factor = 1.0;
    s.high_freq_factor = 4.0;
    s.original_context = 64;
    static const double llama3[] = {1,       0.244384587,    0.0130422562, 0.00395284733,
                                    0.00125, 0.000395284733, 0.000125,     3.95284733e-05};
    expect(&s, 1.0, llama3);
}

static void test_yarn(void)
{
    struct bt_rope_spec s = {.type = BT_ROPE_YARN,
                             .dim = DIM,
                             .theta = 10000.0,
                             .factor = 8.0,
                             .original_context = 64,
                             .beta_fast = 32.0,
                             .beta_slow = 1.0,
                             .truncate = true};
    static const double yarn[] = {1,       0.223994657,    0.0416666642, 0.00395284733,
                                  0.00125, 0.000395284733, 0.000125,     3.95284733e-05};
    expect(&s, 1.2079441541679836, yarn);
    s.mscale = 1.0;
    s.mscale_all_dim = 0.5;
    expect(&s, 1.094179988101349, yarn);
    s.mscale = s.mscale_all_dim = 0.0;

    s.truncate = false;
    static const double exact[] = {1,       0.178976148,    0.0131944576, 0.00395284733,
                                   0.00125, 0.000395284733, 0.000125,     3.95284733e-05};
    expect(&s, 1.2079441541679836, exact);

    s.truncate = true;
    s.beta_fast = 8.0;
    s.beta_slow = 2.0;
    s.attention_factor = 1.5;
    static const double betas[] = {1,       0.177878112,    0.0125,   0.00395284733,
                                   0.00125, 0.000395284733, 0.000125, 3.95284733e-05};
    expect(&s, 1.5, betas);
}

static void test_rows(void)
{
    struct bt_rope_spec s = {.dim = 4, .theta = 100.0};
    const float divisors[] = {1.0F, 2.0F};
    struct bt_rope_table t;

    CHECK_EQ(bt_rope_table_init(&t, &s, divisors, 10), BT_OK);
    const float *row = bt_rope_table_row(&t, 9);
    CHECK_NEAR(row[0], cos(9.0), 1e-7);
    CHECK_NEAR(row[1], cos(0.45), 1e-7);
    CHECK_NEAR(row[2], sin(9.0), 1e-7);
    CHECK_NEAR(row[3], sin(0.45), 1e-7);
    CHECK(bt_rope_table_row(&t, 9) == row);
    CHECK_NEAR(bt_rope_table_row(&t, 0)[0], 1.0, 0.0);
    bt_rope_table_fini(&t);
    CHECK_EQ(bt_test_live_bytes(), 0);
}

int main(void)
{
    test_frequencies();
    test_yarn();
    test_rows();
    return bt_test_done();
}
