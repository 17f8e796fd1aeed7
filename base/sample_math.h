#ifndef BT_BASE_SAMPLE_MATH_H
#define BT_BASE_SAMPLE_MATH_H

/* The arithmetic of sampling, the same bits on every processor and on GPUs: exp and log in plain IEEE double operations in one
 * order (libm picks FMA variants at run time), and sums in integers, which come out the same in whatever order they are made.
 * Build without contraction. What it is used for: engine/sampler.h. */

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define BT_ANYWHERE static inline __host__ __device__
#else
#define BT_ANYWHERE static inline
#endif

#define BT_LN2_HI 0x1.62e42feep-1 /* the low 21 bits are zero: k * LN2_HI is exact */
#define BT_LN2_LO 0x1.a39ef35793c76p-33

/* e^x for x <= 0, to a few units in the last place; below -708, or for NaN, 0. */
BT_ANYWHERE double bt_exact_exp(double x)
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
    double r = (x - k * BT_LN2_HI) - k * BT_LN2_LO;
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
BT_ANYWHERE double bt_exact_log(double x)
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
    return (2.0 * s * y + e * BT_LN2_LO) + e * BT_LN2_HI;
}

/* A logit as sampling takes it: a number, and never -0. */
BT_ANYWHERE float bt_sample_clean(float logit)
{
    return logit != logit ? -INFINITY : logit + 0.0F;
}

/* Bits behind the binary point of weights: so many that the sum over a vocabulary is at most 2^63. */
BT_ANYWHERE uint32_t bt_sample_point(uint32_t vocab)
{
    uint32_t bits =
        17; /* 2^46: weights take 47 bits, which is what lanes of 16 bits can count up (kernels/cuda/cuda_sample.cu) */

    while (bits < 32 && vocab > UINT32_C(1) << bits) {
        bits++;
    }
    return 63 - bits;
}

/* e^((logit - max) * inv_temperature), at most 1, in units of 2^-point, to the nearest. 0 where the largest logit is not finite. */
BT_ANYWHERE uint64_t bt_sample_weight(float logit, float max, double inv_temperature,
                                      uint32_t point)
{
    double x = ((double)logit - (double)max) * inv_temperature;

    if (!(x > -33.0)) { /* less than half a unit */
        return 0;
    }
    return (uint64_t)(bt_exact_exp(x) * (double)(UINT64_C(1) << point) + 0.5);
}

/* The least integer that is not less than fraction * units. */
BT_ANYWHERE uint64_t bt_sample_share(float fraction, uint64_t units)
{
    double x = (double)fraction * (double)units;
    uint64_t n = (uint64_t)x;

    return n + ((double)n < x);
}

/* Where among `total` > 0 units a number in [0, 1), random / 2^53, falls: floor(random * total / 2^53), less than total. */
BT_ANYWHERE uint64_t bt_sample_target(uint64_t random, uint64_t total)
{
    uint64_t a = random << 11, a0 = (uint32_t)a, a1 = a >> 32;
    uint64_t b0 = (uint32_t)total, b1 = total >> 32;
    uint64_t mid = a1 * b0 + (a0 * b0 >> 32);

    return a1 * b1 + (mid >> 32) + ((a0 * b1 + (uint32_t)mid) >> 32);
}

/* A logit of a token that prompt or answer have, `count` times in the answer. */
BT_ANYWHERE float bt_sample_penalised(float logit, uint32_t count, float repetition, float presence,
                                      float frequency)
{
    float l = logit > 0.0F ? logit / repetition : logit * repetition;

    if (count > 0) {
        l -= presence;
        l -= frequency * (float)count;
    }
    return bt_sample_clean(l);
}

/* sum: of the weights of all logits at temperature 1. */
BT_ANYWHERE float bt_sample_logprob(float logit, float max, uint64_t sum, uint32_t point)
{
    if (sum == 0) {
        return -INFINITY;
    }
    double total = (double)sum / (double)(UINT64_C(1) << point);

    return (float)((double)logit - ((double)max + bt_exact_log(total)));
}

#endif
