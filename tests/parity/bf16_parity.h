#ifndef BT_TESTS_PARITY_BF16_PARITY_H
#define BT_TESTS_PARITY_BF16_PARITY_H

/* The arithmetic of products of bf16 (kernels/backend.h), written a second time for the tests of what is made of them. */

#include "tests/parity/kernel_parity.h"

#define LEAST 0x1p-126F

static inline float flushed(float f)
{
    return fabsf(f) < LEAST ? copysignf(0, f) : f;
}

/* a * b + c, rounded to 24 bits as if exponents had no end; if that is below 2^-126, zero. In double precision the product is
 * exact, and the sum's error tells what is just below the values that round up to 2^-126. */
static inline float fused(float a, float b, float c)
{
    float r = fmaf(a, b, c);
    if (!(fabsf(r) <= LEAST)) {
        return r;
    }
    double p = (double)a * (double)b, s = p + (double)c, z = s - p;
    double error = (p - (s - z)) + ((double)c - z), edge = 0x1p-126 - 0x1p-151;
    bool below = fabs(s) < edge || (fabs(s) <= edge && error * (double)r < 0);
    return below ? copysignf(0, r) : r;
}

#endif
