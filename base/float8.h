#ifndef BT_BASE_FLOAT8_H
#define BT_BASE_FLOAT8_H

/* The 8-bit floating-point type e4m3 ("F8_E4M3", "e4m3fn"): sign, 4 bits of exponent with bias 7, 3 of mantissa. No infinities: 7f
 * and ff are NaN, 7e is 448, the largest number; 01 is 2^-9, the smallest. Any thread. */

#include <stdint.h>
#include <string.h>

#define BT_F8_MAX 448.0F

static inline float bt_f8_to_f32(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80U) << 24, mag = code & 0x7fU, bits;
    float f;

    if (mag < 8U) { /* subnormal: mag * 2^-9, exact */
        f = (float)mag * 0x1p-9F;
        memcpy(&bits, &f, sizeof(bits));
    } else {
        bits = mag == 0x7fU ? 0x7fc00000U : (mag << 20) + ((127U - 7U) << 23);
    }
    bits |= sign;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

/* To nearest, ties to even; what is larger than 448, infinity too, becomes 448. A NaN stays one. */
static inline uint8_t bt_f32_to_f8(float f)
{
    uint32_t bits;

    memcpy(&bits, &f, sizeof(bits));
    uint32_t sign = bits >> 24 & 0x80U, mag = bits & 0x7fffffffU;
    if (mag > 0x7f800000U) {
        return (uint8_t)(sign | 0x7fU);
    }
    if (mag >= 0x43e00000U) { /* 448 */
        return (uint8_t)(sign | 0x7eU);
    }
    if (mag < 0x3c800000U) { /* below 2^-6: a multiple of 2^-9, the unit of 2^14 */
        float a;

        memcpy(&a, &mag, sizeof(a));
        a += 0x1p14F;
        memcpy(&bits, &a, sizeof(bits));
        return (uint8_t)(sign | (bits - 0x46800000U));
    }
    mag += 0x7ffffU + (mag >> 20 & 1U);
    return (uint8_t)(sign | ((mag - ((127U - 7U) << 23)) >> 20));
}

#endif
