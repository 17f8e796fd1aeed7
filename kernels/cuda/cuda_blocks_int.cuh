#ifndef BT_KERNELS_CUDA_BLOCKS_INT_H
#define BT_KERNELS_CUDA_BLOCKS_INT_H

/* 32 consecutive values of a packed weight row, made f32 by one thread. The lanes of a warp hold neighbouring rows, so that
 * each load of a unit is one stretch of memory. Formulas as in kernels/cpu/cpu_dequant.c. */

#include "kernels/cuda/cuda_numbers_int.cuh"

/* Bytes of a packed row, from one on; U: the weight's unit. */
template <class U> struct row_bytes {
    const U *p;

    __device__ __forceinline__ uint32_t u8(uint32_t at) const
    {
        return (uint32_t)p[(size_t)(at / sizeof(U)) * CUDA_PANEL] >> at % sizeof(U) * 8 & 255U;
    }
    /* at: even */
    __device__ __forceinline__ uint32_t u16(uint32_t at) const
    {
        return (uint32_t)p[(size_t)(at / sizeof(U)) * CUDA_PANEL] >> at % sizeof(U) * 8 & 0xffffU;
    }
    __device__ __forceinline__ float f16(uint32_t at) const
    {
        return float_of_f16(u16(at));
    }
    __device__ __forceinline__ float f32(uint32_t at) const
    {
        return float_of_bits(u16(at) | u16(at + 2) << 16);
    }
    __device__ __forceinline__ float i8(uint32_t at) const
    {
        return (float)(int8_t)u8(at);
    }
    __device__ __forceinline__ row_bytes from(size_t at) const
    {
        return row_bytes{p + at / sizeof(U) * CUDA_PANEL};
    }
};

/* Row n's bytes. */
template <class U>
static __device__ __forceinline__ row_bytes<U> row_of(const struct cuda_view &v, uint32_t n)
{
    return row_bytes<U>{(const U *)v.data + (size_t)(n / CUDA_PANEL) * v.row_units * CUDA_PANEL +
                        n % CUDA_PANEL};
}

/* 16 bytes of nibbles from `at` on: low ones are values 0 … 15, high ones 16 … 31. */
template <class R>
static __device__ __forceinline__ void nibbles(const R &r, uint32_t at, float d, float m, float *w)
{
#pragma unroll
    for (uint32_t j = 0; j < 16; j++) {
        uint32_t q = r.u8(at + j);
        w[j] = fmaf(d, (float)(q & 15U), m);
        w[j + 16] = fmaf(d, (float)(q >> 4), m);
    }
}

/* As nibbles, the fifth bits in 4 bytes at `high`. */
template <class R>
static __device__ __forceinline__ void fives(const R &r, uint32_t high, uint32_t at, float d,
                                             float m, float *w)
{
    uint32_t bits = r.u16(high) | r.u16(high + 2) << 16;

#pragma unroll
    for (uint32_t j = 0; j < 16; j++) {
        uint32_t q = r.u8(at + j);
        w[j] = fmaf(d, (float)((q & 15U) | (bits >> j & 1U) << 4), m);
        w[j + 16] = fmaf(d, (float)(q >> 4 | (bits >> (j + 16) & 1U) << 4), m);
    }
}

/* iq4_nl: what nibble q stands for. */
static __device__ __forceinline__ float iq4_nl_value(uint32_t q)
{
    const uint64_t low = 0x6a5d4f3f2d1801ULL, mid = 0xa6998d8176ULL;
    /* 1 24 45 63 79 93 106 | 118 129 141 153 166 | 181 197 217 241, less 128 */
    const uint32_t high = 0xf1d9c5b5U;
    uint64_t b = q < 7 ? low >> 8 * q : q < 12 ? mid >> 8 * (q - 7) : (uint64_t)high >> 8 * (q - 12);

    return (float)((int)(b & 255U) - 128);
}

/* Scale and minimum (6 bits each) of sub-block s of a q4_k or q5_k block, from its 12 bytes at 4. */
template <class R>
static __device__ __forceinline__ void k4_scale(const R &r, uint32_t s, float *scale, float *min)
{
    if (s < 4) {
        *scale = (float)(r.u8(4 + s) & 63U);
        *min = (float)(r.u8(8 + s) & 63U);
    } else {
        uint32_t both = r.u8(8 + s);
        *scale = (float)((both & 15U) | (r.u8(s) >> 6) << 4);
        *min = (float)(both >> 4 | (r.u8(4 + s) >> 6) << 4);
    }
}

/* Scale, -32 … 31, of the 16 values from 16 s on of a q3_k block. */
template <class R> static __device__ __forceinline__ float k3_scale(const R &r, uint32_t s)
{
    uint32_t low = s < 8 ? r.u8(96 + s) & 15U : r.u8(88 + s) >> 4;

    return (float)((int)(low | (r.u8(104 + s % 4) >> 2 * (s / 4) & 3U) << 4) - 32);
}

/* Values 32 s … 32 s + 31 of a superblock. */
template <class R>
static __device__ __forceinline__ void k_block(const R &r, uint32_t dtype, uint32_t s, float *w)
{
    float scale, min;

    switch (dtype) {
    case BT_DTYPE_Q2_K:
#pragma unroll
        for (uint32_t j = 0; j < 32; j++) {
            uint32_t sm = r.u8(2 * s + j / 16), q = r.u8(16 + s / 4 * 32 + j) >> 2 * (s % 4) & 3U;
            w[j] = r.f16(80) * (float)(sm & 15U) * (float)q - r.f16(82) * (float)(sm >> 4);
        }
        break;
    case BT_DTYPE_Q3_K:
#pragma unroll
        for (uint32_t j = 0; j < 32; j++) {
            uint32_t q = (r.u8(32 + s / 4 * 32 + j) >> 2 * (s % 4) & 3U) |
                         (r.u8(j) >> s & 1U) << 2;
            w[j] = r.f16(108) * k3_scale(r, 2 * s + j / 16) * (float)((int)q - 4);
        }
        break;
    case BT_DTYPE_Q4_K:
        k4_scale(r, s, &scale, &min);
#pragma unroll
        for (uint32_t j = 0; j < 32; j++) {
            uint32_t q = r.u8(16 + s / 2 * 32 + j) >> 4 * (s % 2) & 15U;
            w[j] = r.f16(0) * scale * (float)q - r.f16(2) * min;
        }
        break;
    case BT_DTYPE_Q5_K:
        k4_scale(r, s, &scale, &min);
#pragma unroll
        for (uint32_t j = 0; j < 32; j++) {
            uint32_t q = (r.u8(48 + s / 2 * 32 + j) >> 4 * (s % 2) & 15U) |
                         (r.u8(16 + j) >> s & 1U) << 4;
            w[j] = r.f16(0) * scale * (float)q - r.f16(2) * min;
        }
        break;
    default: { /* q6_k: 128 bytes of low nibbles, 64 of high pairs, 16 scales, d */
        uint32_t half = s / 4, quarter = s % 4;
#pragma unroll
        for (uint32_t j = 0; j < 32; j++) {
            uint32_t low = r.u8(64 * half + 32 * (quarter % 2) + j) >> 4 * (quarter / 2) & 15U;
            uint32_t q = low | (r.u8(128 + 32 * half + j) >> 2 * quarter & 3U) << 4;
            w[j] = r.f16(208) * r.i8(192 + 2 * s + j / 16) * (float)((int)q - 32);
        }
        break;
    }
    }
}

/* A block of 32 values of one of the formats with blocks. */
template <class R>
static __device__ __forceinline__ void quant_block(const R &row, uint32_t dtype, uint32_t b,
                                                   float *w)
{
    switch (dtype) {
    case BT_DTYPE_Q4_0: {
        R r = row.from(18 * (size_t)b);
        nibbles(r, 2, r.f16(0), -8.0F * r.f16(0), w);
        break;
    }
    case BT_DTYPE_Q4_1: {
        R r = row.from(20 * (size_t)b);
        nibbles(r, 4, r.f16(0), r.f16(2), w);
        break;
    }
    case BT_DTYPE_Q5_0: {
        R r = row.from(22 * (size_t)b);
        fives(r, 2, 6, r.f16(0), -16.0F * r.f16(0), w);
        break;
    }
    case BT_DTYPE_Q5_1: {
        R r = row.from(24 * (size_t)b);
        fives(r, 4, 8, r.f16(0), r.f16(2), w);
        break;
    }
    case BT_DTYPE_IQ4_NL: {
        R r = row.from(18 * (size_t)b);
#pragma unroll
        for (uint32_t j = 0; j < 16; j++) {
            w[j] = r.f16(0) * iq4_nl_value(r.u8(2 + j) & 15U);
            w[j + 16] = r.f16(0) * iq4_nl_value(r.u8(2 + j) >> 4);
        }
        break;
    }
    case BT_DTYPE_Q8_0: {
        R r = row.from(34 * (size_t)b);
#pragma unroll
        for (uint32_t j = 0; j < 32; j++) {
            w[j] = r.f16(0) * r.i8(2 + j);
        }
        break;
    }
    case BT_DTYPE_G4: {
        R r = row.from(24 * (size_t)b);
        nibbles(r, 8, r.f32(0), r.f32(4), w);
        break;
    }
    case BT_DTYPE_G8: {
        R r = row.from(40 * (size_t)b);
#pragma unroll
        for (uint32_t j = 0; j < 32; j++) {
            w[j] = fmaf(r.f32(0), (float)r.u8(8 + j), r.f32(4));
        }
        break;
    }
    default: {
        const uint32_t bytes = dtype == BT_DTYPE_Q2_K   ? 84
                               : dtype == BT_DTYPE_Q3_K ? 110
                               : dtype == BT_DTYPE_Q4_K ? 144
                               : dtype == BT_DTYPE_Q5_K ? 176
                                                        : 210;
        k_block(row.from((size_t)bytes * (b / 8)), dtype, b % 8, w);
        break;
    }
    }
}

/* Of a gf8 weight: the units of row n's group that has block b, its scale first. */
static __device__ __forceinline__ const uint32_t *f8_group(const struct cuda_view &v, uint32_t n,
                                                           uint32_t b)
{
    return row_of<uint32_t>(v, n).p +
           (size_t)(b / v.group_blocks) * (1 + 8 * v.group_blocks) * CUDA_PANEL;
}

/* What the sums of block b and its neighbours in a segment are multiplied by. */
static __device__ __forceinline__ float block_scale(const struct cuda_view &v, uint32_t n,
                                                    uint32_t b)
{
    return v.dtype == BT_DTYPE_GF8 ? float_of_bits(f8_group(v, n, b)[0]) : 1.0F;
}

static __device__ __forceinline__ void f8_codes(const struct cuda_view &v, uint32_t n, uint32_t b,
                                                float *w)
{
    const uint32_t *p = f8_group(v, n, b) + (size_t)(1 + b % v.group_blocks * 8) * CUDA_PANEL;

#pragma unroll
    for (uint32_t j = 0; j < 8; j++) {
        const uint32_t codes = p[j * CUDA_PANEL];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            w[4 * j + i] = float_of_f8(codes >> 8 * i & 255U);
        }
    }
}

/* Where k and k + 1 (k even, of block b) of row n lie among the words of a weight in fragments. */
static __device__ __forceinline__ size_t cuda_tile_word(uint32_t n, uint32_t b, uint32_t k,
                                                        uint32_t n_blocks)
{
    const uint32_t lane = n % 8 * 4 + k / 8, step = k / 4 % 2, word = n / 8 % 2 + k / 2 % 2 * 2;

    return ((((size_t)(n / 16) * n_blocks + b) * 2 + step) * 32 + lane) * 4 + word;
}

/* Values 32 b … 32 b + 31 of row n; of gf8 for tensor cores without their scale. KIND: enum cuda_kind of the weight. Rows up to a multiple of 32 are there. */
template <int KIND>
static __device__ __forceinline__ void weight_block(const struct cuda_view &v, uint32_t n,
                                                    uint32_t b, float *w)
{
    if (KIND == CUDA_KIND_F32) {
        row_bytes<uint32_t> r = row_of<uint32_t>(v, n).from(128 * (size_t)b);
#pragma unroll
        for (uint32_t j = 0; j < 32; j++) {
            w[j] = float_of_bits(r.p[j * CUDA_PANEL]);
        }
    } else if (KIND == CUDA_KIND_F16 || KIND == CUDA_KIND_BF16) {
        row_bytes<uint32_t> r = row_of<uint32_t>(v, n).from(64 * (size_t)b);
#pragma unroll
        for (uint32_t j = 0; j < 16; j++) {
            uint32_t pair = r.p[j * CUDA_PANEL];
            w[2 * j] = KIND == CUDA_KIND_F16 ? float_of_f16(pair & 0xffffU)
                                             : float_of_bits(pair << 16);
            w[2 * j + 1] = KIND == CUDA_KIND_F16 ? float_of_f16(pair >> 16)
                                                 : float_of_bits(pair & 0xffff0000U);
        }
    } else if (KIND == CUDA_KIND_TILES) {
        const uint32_t *words = (const uint32_t *)v.data;
#pragma unroll
        for (uint32_t j = 0; j < 16; j++) {
            uint32_t pair = words[cuda_tile_word(n, b, 2 * j, v.n_blocks)];
            w[2 * j] = float_of_bits(pair << 16);
            w[2 * j + 1] = float_of_bits(pair & 0xffff0000U);
        }
    } else if (v.dtype == BT_DTYPE_GF8) {
        const float d = KIND == CUDA_KIND_BLOCK_TILES ? 1.0F : block_scale(v, n, b);
        f8_codes(v, n, b, w);
#pragma unroll
        for (uint32_t j = 0; j < 32; j++) {
            w[j] *= d;
        }
    } else if (v.unit == 4) {
        quant_block(row_of<uint32_t>(v, n), v.dtype, b, w);
    } else {
        quant_block(row_of<uint16_t>(v, n), v.dtype, b, w);
    }
}

#endif
