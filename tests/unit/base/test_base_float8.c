/* All 256 codes of e4m3 against the formula of the type, and rounding against a search through all of them. */

#include "base/float8.h"

#include <math.h>
#include "tests/check.h"

/* What a code stands for, by the definition of the type. */
static double meaning(uint32_t code)
{
    int exponent = (int)(code >> 3 & 15U), mantissa = (int)(code & 7U);
    double size = exponent == 0 ? ldexp(mantissa, -6 - 3) : ldexp(8 + mantissa, exponent - 7 - 3);

    if (exponent == 15 && mantissa == 7) {
        return NAN;
    }
    return code & 128U ? -size : size;
}

/* The nearest number; of two as near the one with an even code. */
static uint32_t nearest(double x)
{
    uint32_t best = 0;

    for (uint32_t c = 1; c < 0x7fU; c++) {
        double far = fabs(meaning(c) - fabs(x)), least = fabs(meaning(best) - fabs(x));
        if (far < least || (far == least && c % 2 == 0)) {
            best = c;
        }
    }
    return signbit(x) ? best | 128U : best;
}

static void test_codes(void)
{
    /* 0 0.001953125 … 448, as other tools print them */
    static const struct {
        uint8_t code;
        float value;
    } known[] = {{0x00, 0.0F},   {0x01, 0.001953125F}, {0x07, 0.013671875F}, {0x08, 0.015625F},
                 {0x30, 0.5F},   {0x38, 1.0F},         {0x3c, 1.5F},         {0x40, 2.0F},
                 {0x7e, 448.0F}, {0xb8, -1.0F},        {0xfe, -448.0F}};

    for (uint32_t c = 0; c < 256; c++) {
        float f = bt_f8_to_f32((uint8_t)c);
        if (isnan(meaning(c))) {
            CHECK(isnan(f));
        } else {
            CHECK((double)f == meaning(c) && (signbit(f) != 0) == (c >= 128));
        }
        CHECK_EQ(bt_f32_to_f8(f), c);
    }
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        CHECK(bt_f8_to_f32(known[i].code) == known[i].value);
    }
}

static void test_rounding(void)
{
    /* around every code and every middle between two */
    for (uint32_t c = 0; c + 1 < 0x7fU; c++) {
        float low = bt_f8_to_f32((uint8_t)c), high = bt_f8_to_f32((uint8_t)(c + 1));
        float middle = (low + high) / 2.0F;
        const float at[] = {low,    nextafterf(low, high),    nextafterf(middle, low),
                            middle, nextafterf(middle, high), nextafterf(high, low)};
        for (size_t i = 0; i < sizeof(at) / sizeof(at[0]); i++) {
            CHECK_EQ(bt_f32_to_f8(at[i]), nearest((double)at[i]));
            CHECK_EQ(bt_f32_to_f8(-at[i]), nearest(-(double)at[i]));
        }
    }
    CHECK_EQ(bt_f32_to_f8(0x1p-10F), 0); /* half of the smallest: to even */
    CHECK_EQ(bt_f32_to_f8(0x1p-140F), 0);
    CHECK_EQ(bt_f32_to_f8(-0x1p-140F), 0x80);
}

static void test_beyond(void)
{
    const float large[] = {448.0F, 449.0F, 464.0F, 480.0F, 1e30F, INFINITY};

    for (size_t i = 0; i < sizeof(large) / sizeof(large[0]); i++) {
        CHECK_EQ(bt_f32_to_f8(large[i]), 0x7e);
        CHECK_EQ(bt_f32_to_f8(-large[i]), 0xfe);
    }
    CHECK_EQ(bt_f32_to_f8(NAN) & 0x7f, 0x7f);
    CHECK_EQ(bt_f32_to_f8(-NAN), 0xff);
}

int main(void)
{
    test_codes();
    test_rounding();
    test_beyond();
    return bt_test_done();
}
