/* Every f16 and bf16 goes to f32 and back unchanged; rounding goes to the even neighbour at ties. */

#include "base/float16.h"

#include <math.h>
#include "tests/check.h"

int main(void)
{
    for (uint32_t h = 0; h < 65536; h++) {
        float f = bt_f16_to_f32((uint16_t)h), b = bt_bf16_to_f32((uint16_t)h);
        uint32_t nan_f16 = (h & 0x7fffU) > 0x7c00U ? 0x200U : 0, /* NaNs become quiet */
            nan_bf16 = (h & 0x7fffU) > 0x7f80U ? 64U : 0;

        CHECK_EQ(bt_f32_to_f16(f), h | nan_f16);
        CHECK_EQ(bt_f32_to_bf16(b), h | nan_bf16);
    }
    CHECK(bt_f16_to_f32(0x3c00) == 1.0F && bt_f16_to_f32(0xc000) == -2.0F);
    CHECK(bt_f16_to_f32(1) == 0x1p-24F && bt_f16_to_f32(0x7bff) == 65504.0F);
    CHECK(isinf(bt_f16_to_f32(0x7c00)) && bt_bf16_to_f32(0x3f80) == 1.0F);
    CHECK_EQ(bt_f32_to_f16(0x1p-25F), 0); /* half of the smallest: to even */
    CHECK_EQ(bt_f32_to_f16(0x1.8p-24F), 2);
    CHECK_EQ(bt_f32_to_f16(1.0F + 0x1p-11F), 0x3c00);
    CHECK_EQ(bt_f32_to_f16(1.0F + 0x1.8p-10F), 0x3c02);
    CHECK_EQ(bt_f32_to_bf16(1.0F + 0x1p-8F), 0x3f80);
    CHECK_EQ(bt_f32_to_bf16(1.0F + 0x1.8p-7F), 0x3f82);
    return bt_test_done();
}
