#ifndef BT_KERNELS_CPU_BF16_SPEC_H
#define BT_KERNELS_CPU_BF16_SPEC_H

/* The arithmetic of class cpu-bf16, one value at a time: what vdpbf16ps does on the CPUs where cpu_bf16_check says so, in
 * portable C. Magnitudes below 2^-126 count as zero, as inputs and as results. */

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include "base/float16.h"

#define BF16_SMALLEST 0x1p-126F /* the least normal f32, and bf16 */

static inline float bf16_flush(float f)
{
    return fabsf(f) < BF16_SMALLEST ? copysignf(0.0F, f) : f;
}

/* An activation as the products see it. */
static inline uint16_t bf16_round(float f)
{
    return bt_f32_to_bf16(bf16_flush(f));
}

/* fma(x, w, acc) of inputs that are flushed already. Whether a result is below 2^-126 is asked after rounding to 24 bits as
 * if exponents had no end: one that fmaf rounds up to 2^-126 may be below it. */
static inline float bf16_fma(float x, float w, float acc)
{
    float r = fmaf(x, w, acc);

    if (!(fabsf(r) <= BF16_SMALLEST)) {
        return r;
    }
    if (fabsf(r) < BF16_SMALLEST) {
        return copysignf(0.0F, r);
    }
    float big = fabsf(x) < fabsf(w) ? fmaf(x * 0x1p60F, w, acc * 0x1p60F)
                                    : fmaf(x, w * 0x1p60F, acc * 0x1p60F);
    return fabsf(big) < BF16_SMALLEST * 0x1p60F ? copysignf(0.0F, r) : r;
}

/* acc, then plus the products of the high (odd k) halves, then of the low ones. */
static inline float bf16_dot2(float acc, uint32_t x, uint32_t w)
{
    for (int half = 1; half >= 0; half--) {
        float a = bt_bf16_to_f32((uint16_t)(x >> 16 * half)),
              b = bt_bf16_to_f32((uint16_t)(w >> 16 * half));
        acc = bf16_fma(bf16_flush(a), bf16_flush(b), bf16_flush(acc));
    }
    return acc;
}

/* acc[i] += the two products of x[i] and w[i]. */
typedef void bf16_dot_fn(float acc[16], const uint32_t x[16], const uint32_t w[16]);
/* Whether dot does what bf16_dot2 does, on values of every kind: ordinary, cancelling, very small, very large, not finite. */
bool cpu_bf16_check(bf16_dot_fn *dot);

#endif
