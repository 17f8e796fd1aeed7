#ifndef BT_KERNELS_CUDA_NUMBERS_INT_H
#define BT_KERNELS_CUDA_NUMBERS_INT_H

/* Numbers on the device: f16 and bf16, and the polynomials of kernels/cpu/isa_math.inc one value at a time. Compiled without
 * contraction: what is fused says fmaf. So a device and the emulation give the same bits. */

#include "kernels/cuda/cuda_device_int.cuh"

#ifdef BT_CUDA_EMULATED
#include "base/float16.h"
#else
#include <cuda_fp16.h>
#endif

static __device__ __forceinline__ float float_of_bits(uint32_t bits)
{
#ifdef BT_CUDA_EMULATED
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
#else
    return __uint_as_float(bits);
#endif
}

static __device__ __forceinline__ uint32_t bits_of_float(float f)
{
#ifdef BT_CUDA_EMULATED
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    return bits;
#else
    return __float_as_uint(f);
#endif
}

static __device__ __forceinline__ float float_of_f16(uint32_t h)
{
#ifdef BT_CUDA_EMULATED
    return bt_f16_to_f32((uint16_t)h);
#else
    return __half2float(__ushort_as_half((unsigned short)h));
#endif
}

static __device__ __forceinline__ uint16_t f16_of_float(float f)
{
#ifdef BT_CUDA_EMULATED
    return bt_f32_to_f16(f);
#else
    return __half_as_ushort(__float2half_rn(f));
#endif
}

static __device__ __forceinline__ float float_of_bf16(uint32_t h)
{
    return float_of_bits(h << 16);
}

/* To nearest, ties to even; NaNs become quiet. */
static __device__ __forceinline__ uint16_t bf16_of_float(float f)
{
    uint32_t bits = bits_of_float(f);

    if ((bits & 0x7fffffffU) > 0x7f800000U) {
        return (uint16_t)(bits >> 16 | 0x40U);
    }
    return (uint16_t)((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

/* e4m3, as in base/float8.h: NaNs stay, what is beyond 448 becomes 448. */
static __device__ __forceinline__ float float_of_f8(uint32_t code)
{
    const uint32_t sign = (code & 0x80U) << 24, mag = code & 0x7fU;

    if (mag == 0x7fU) {
        return float_of_bits(sign | 0x7fc00000U);
    }
    /* the same bits, its mantissa filled up, are an f16 2^-8 times as large */
    return float_of_f16(sign >> 16 | mag << 7) * 0x1p8F;
}

static __device__ __forceinline__ uint8_t f8_of_float(float f)
{
    const uint32_t sign = bits_of_float(f) >> 24 & 0x80U, mag = bits_of_float(f) & 0x7fffffffU;

    if (mag >= 0x43e00000U) { /* 448, or a NaN */
        return (uint8_t)(sign | (mag > 0x7f800000U ? 0x7fU : 0x7eU));
    }
    if (mag < 0x3c800000U) { /* below 2^-6: a multiple of 2^-9, the unit of 2^14 */
        return (uint8_t)(sign | (bits_of_float(float_of_bits(mag) + 0x1p14F) - 0x46800000U));
    }
    return (uint8_t)(sign | (mag + 0x7ffffU + (mag >> 20 & 1U) - ((127U - 7U) << 23)) >> 20);
}

static __device__ __forceinline__ float device_exp(float x)
{
    const float magic = 0x1.8p23F;

    x = x > 90.0F ? 90.0F : x;
    x = x < -105.0F ? -105.0F : x;
    float t = fmaf(x, 0x1.715476p+0F, magic);
    float n = t - magic;
    float r = fmaf(n, -0x1.63p-1F, x);
    r = fmaf(n, 0x1.bd0106p-13F, r);
    float p = 0x1.6db4ccp-10F;
    p = fmaf(p, r, 0x1.123bdep-7F);
    p = fmaf(p, r, 0x1.55545ep-5F);
    p = fmaf(p, r, 0x1.55548ep-3F);
    p = fmaf(p, r, 0.5F);
    p = fmaf(r * r, p, r);
    p = p + 1.0F;
    /* Two factors, each a normal number: results may be subnormal or overflow. */
    int32_t k = (int32_t)(bits_of_float(t) - bits_of_float(magic));
    int32_t k1 = k >> 1;
    int32_t k2 = k - k1;
    p = p * float_of_bits((uint32_t)(k1 + 127) << 23);
    return p * float_of_bits((uint32_t)(k2 + 127) << 23);
}

static __device__ __forceinline__ float device_tanh(float x)
{
    float a = fabsf(x), t = x * x;
    float p = -0x1.76b3a8p-8F;
    p = fmaf(p, t, 0x1.5258c0p-6F);
    p = fmaf(p, t, -0x1.b844a0p-5F);
    p = fmaf(p, t, 0x1.11076cp-3F);
    p = fmaf(p, t, -0x1.555534p-2F);
    float e = device_exp(a + a);
    float large = 1.0F - 2.0F / (e + 1.0F);
    return a < 0.625F ? fmaf(t * x, p, x) : copysignf(large, x);
}

static __device__ __forceinline__ float device_erf(float x)
{
    float a = fabsf(x), t = x * x;
    float p = 0x1.4ae4c2p-14F;
    p = fmaf(p, t, -0x1.a485e6p-11F);
    p = fmaf(p, t, 0x1.5419f4p-8F);
    p = fmaf(p, t, -0x1.b7fbb4p-6F);
    p = fmaf(p, t, 0x1.ce2d20p-4F);
    p = fmaf(p, t, -0x1.81273ep-2F);
    p = fmaf(p, t, 0x1.06eba8p-3F);
    float small = fmaf(x, p, x);
    bool near = a < 1.0F;
    a = a > 4.0F ? 4.0F : a; /* ln erfc(a) on 1 … 4; beyond, erf is 1 in f32 */
    float q = 0x1.0e0f68p-22F;
    q = fmaf(q, a, -0x1.a8c1c0p-16F);
    q = fmaf(q, a, 0x1.e6558cp-12F);
    q = fmaf(q, a, -0x1.18a766p-8F);
    q = fmaf(q, a, 0x1.9fb8e6p-6F);
    q = fmaf(q, a, -0x1.bcfc68p-4F);
    q = fmaf(q, a, -0x1.441dc0p-1F);
    q = fmaf(q, a, -0x1.21317ap+0F);
    q = fmaf(q, a, 0x1.ac98b6p-13F);
    return near ? small : copysignf(1.0F - device_exp(q), x);
}

static __device__ __forceinline__ float device_softcap(float x, float cap)
{
    return cap * device_tanh(x / cap);
}

static __device__ __forceinline__ float device_act(float x, enum bt_k_act act)
{
    if (act == BT_K_SILU) {
        return x / (1.0F + device_exp(-x));
    }
    if (act == BT_K_GELU_TANH) {
        float x3 = x * x * x;
        return 0.5F * x * (1.0F + device_tanh(0x1.988454p-1F * fmaf(0.044715F, x3, x)));
    }
    return 0.5F * x * (1.0F + device_erf(x * 0x1.6a09e6p-1F));
}

#endif
