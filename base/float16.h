#ifndef BT_BASE_FLOAT16_H
#define BT_BASE_FLOAT16_H

/* The two 16-bit floating-point types of weights and KV, one value at a time: f16 (IEEE 754 binary16) and bf16 (the upper
 * half of an f32). Rounding is to nearest, ties to even; what is too large becomes infinity, a NaN stays one. Any thread. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "base/dtype.h"

static inline float bt_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000U) << 16, mag = h & 0x7fffU, bits;
    float f;

    if (mag < 0x400U) { /* subnormal: mag * 2^-24, exact */
        f = (float)mag * 0x1p-24F;
        memcpy(&bits, &f, sizeof(bits));
    } else if (mag < 0x7c00U) {
        bits = (mag << 13) + ((127U - 15U) << 23);
    } else {
        bits = 0x7f800000U | (mag & 0x3ffU) << 13 |
               (mag > 0x7c00U ? 0x400000U : 0); /* NaNs become quiet */
    }
    bits |= sign;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static inline uint16_t bt_f32_to_f16(float f)
{
    uint32_t bits;

    memcpy(&bits, &f, sizeof(bits));
    uint32_t sign = bits >> 16 & 0x8000U, mag = bits & 0x7fffffffU;
    if (mag > 0x7f800000U) {
        return (uint16_t)(sign | 0x7e00U | (mag >> 13 & 0x3ffU));
    }
    if (mag >= 0x477ff000U) { /* 65520 and more */
        return (uint16_t)(sign | 0x7c00U);
    }
    if (mag < 0x38800000U) { /* below 2^-14: a multiple of 2^-24, the unit of 0.5 */
        float a;

        memcpy(&a, &mag, sizeof(a));
        a += 0.5F;
        memcpy(&bits, &a, sizeof(bits));
        return (uint16_t)(sign | (bits - 0x3f000000U));
    }
    mag += 0xfffU + (mag >> 13 & 1U);
    return (uint16_t)(sign | ((mag - ((127U - 15U) << 23)) >> 13));
}

static inline float bt_bf16_to_f32(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float f;

    memcpy(&f, &bits, sizeof(f));
    return f;
}

static inline uint16_t bt_f32_to_bf16(float f)
{
    uint32_t bits;

    memcpy(&bits, &f, sizeof(bits));
    if ((bits & 0x7fffffffU) > 0x7f800000U) {
        return (uint16_t)(bits >> 16 | 64U);
    }
    return (uint16_t)((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

/* n values of dtype (F32, F16 or BF16), at any alignment, to f32. */
void bt_plain_to_f32(float *out, const void *from, enum bt_dtype dtype, size_t n);

#endif
