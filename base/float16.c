/* Rows of the plain types to f32. */

#include "base/float16.h"

void bt_plain_to_f32(float *out, const void *from, enum bt_dtype dtype, size_t n)
{
    const uint8_t *p = from;

    if (dtype == BT_DTYPE_F32) {
        memcpy(out, p, n * sizeof(float));
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, p + 2 * i, sizeof(h));
        out[i] = dtype == BT_DTYPE_F16 ? bt_f16_to_f32(h) : bt_bf16_to_f32(h);
    }
}
