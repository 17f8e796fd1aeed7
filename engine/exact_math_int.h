#ifndef BT_ENGINE_EXACT_MATH_INT_H
#define BT_ENGINE_EXACT_MATH_INT_H

/* exp and log in plain IEEE double operations, in one order: the same bits whatever the processor
 * or the C library (libm picks FMA variants at run time). Error: a few units in the last place.
 * Build without contraction. */

#include <stdint.h>
#include <string.h>

#define EXACT_LN2_HI 0x1.62e42feep-1 /* the low 21 bits are zero: k * LN2_HI is exact */
#define EXACT_LN2_LO 0x1.a39ef35793c76p-33

/* e^x for x <= 0; below -708, or for NaN, 0. */
static inline double exact_exp(double x)
{
    static const double inv_fact[14] = {
        1.0,
        1.0,
        1.0 / 2,
        1.0 / 6,
        1.0 / 24,
        1.0 / 120,
        1.0 / 720,
        1.0 / 5040,
        1.0 / 40320,
        1.0 / 362880,
        1.0 / 3628800,
        1.0 / 39916800,
        1.0 / 479001600,
        1.0 / 6227020800.0,
    };

    if (!(x > -708.0)) {
        return 0.0;
    }
    int32_t k = (int32_t)(x * 0x1.71547652b82fep+0 - 0.5); /* x <= 0: rounds to the nearest */
    double r = (x - k * EXACT_LN2_HI) - k * EXACT_LN2_LO;
    double y = inv_fact[13];

    for (int i = 12; i >= 0; i--) {
        y = y * r + inv_fact[i];
    }
    uint64_t bits = (uint64_t)(k + 1023) << 52;
    double scale;

    memcpy(&scale, &bits, sizeof(scale));
    return y * scale;
}

/* Natural logarithm of a normal x > 0. */
static inline double exact_log(double x)
{
    uint64_t bits;

    memcpy(&bits, &x, sizeof(bits));
    int32_t e = (int32_t)(bits >> 52) - 1023;

    bits = (bits & 0xfffffffffffffU) | UINT64_C(1023) << 52;
    memcpy(&x, &bits, sizeof(x));
    if (x > 0x1.6a09e667f3bcdp+0) { /* sqrt 2 */
        x *= 0.5;
        e++;
    }
    /* ln x = 2 atanh s, |s| <= 0.172 */
    double s = (x - 1.0) / (x + 1.0);
    double s2 = s * s;
    double y = 1.0 / 25;

    for (int n = 23; n >= 1; n -= 2) {
        y = y * s2 + 1.0 / n;
    }
    return (2.0 * s * y + e * EXACT_LN2_LO) + e * EXACT_LN2_HI;
}

#endif
