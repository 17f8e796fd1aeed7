/* Rows of a weight file to f32, one value at a time: the formulas of the block formats. The packed panels give the
 * same values, bit for bit. Scale times quant is exact in f32 for every format but q6_k, where it rounds once, and
 * adding the minimum rounds once: no fused operation is needed to agree with the kernels. */

#include "kernels/cpu/cpu_int.h"

#include <string.h>

float cpu_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000U) << 16, mag = h & 0x7fffU, bits;
    float f;

    if (mag < 0x400U) {
        f = (float)mag * 0x1p-24F;
        memcpy(&bits, &f, sizeof(bits));
    } else if (mag < 0x7c00U) {
        bits = (mag << 13) + ((127U - 15U) << 23);
    } else {
        bits = 0x7f800000U | (mag & 0x3ffU) << 13 | (mag > 0x7c00U ? 0x400000U : 0);
    }
    bits |= sign;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static float f16_at(const uint8_t *p)
{
    return cpu_f16_to_f32((uint16_t)(p[0] | p[1] << 8));
}

/* d, m and 16 bytes of nibbles: low ones are values 0 … 15, high ones 16 … 31. */
static void q4_block(float *y, const uint8_t *q, float d, float m)
{
    for (uint32_t j = 0; j < 16; j++) {
        y[j] = d * (float)(q[j] & 15) + m;
        y[j + 16] = d * (float)(q[j] >> 4) + m;
    }
}

static void q8_block(float *y, const uint8_t *p)
{
    float d = f16_at(p);
    for (uint32_t j = 0; j < 32; j++) {
        y[j] = d * (float)(int8_t)p[2 + j];
    }
}

void cpu_q4_k_scale(const uint8_t *scales, uint32_t s, uint8_t *scale, uint8_t *min)
{
    if (s < 4) {
        *scale = scales[s] & 63U;
        *min = scales[s + 4] & 63U;
    } else {
        *scale = (uint8_t)((scales[s + 4] & 15U) | (scales[s - 4] >> 6) << 4);
        *min = (uint8_t)((scales[s + 4] >> 4) | (scales[s] >> 6) << 4);
    }
}

static void q4_k_block(float *y, const uint8_t *p)
{
    float d = f16_at(p), dmin = f16_at(p + 2);

    for (uint32_t s = 0; s < 8; s++) {
        uint8_t scale, min;
        cpu_q4_k_scale(p + 4, s, &scale, &min);
        float ds = d * (float)scale, dm = dmin * (float)min;
        const uint8_t *q = p + 16 + 32 * (s / 2);
        for (uint32_t j = 0; j < 32; j++) {
            *y++ = ds * (float)(s % 2 == 0 ? q[j] & 15 : q[j] >> 4) - dm;
        }
    }
}

void cpu_q6_k_values(const uint8_t *p, uint8_t q[256])
{
    for (uint32_t half = 0; half < 2; half++) {
        const uint8_t *low = p + 64 * half, *high = p + 128 + 32 * half;
        uint8_t *o = q + 128 * half;
        for (uint32_t j = 0; j < 32; j++) {
            o[j] = (uint8_t)((low[j] & 15) | (high[j] & 3) << 4);
            o[j + 32] = (uint8_t)((low[j + 32] & 15) | (high[j] >> 2 & 3) << 4);
            o[j + 64] = (uint8_t)(low[j] >> 4 | (high[j] >> 4 & 3) << 4);
            o[j + 96] = (uint8_t)(low[j + 32] >> 4 | (high[j] >> 6) << 4);
        }
    }
}

static void q6_k_block(float *y, const uint8_t *p)
{
    uint8_t q[256];
    float d = f16_at(p + 208);

    cpu_q6_k_values(p, q);
    for (uint32_t j = 0; j < 256; j++) {
        y[j] = d * (float)(int8_t)p[192 + j / 16] * (float)(q[j] - 32);
    }
}

static void plain_values(float *y, const uint8_t *raw, enum bt_dtype dtype, uint32_t n)
{
    if (dtype == BT_DTYPE_F32) {
        memcpy(y, raw, n * sizeof(float));
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, raw + 2 * (size_t)i, sizeof(h));
        if (dtype == BT_DTYPE_F16) {
            y[i] = cpu_f16_to_f32(h);
        } else {
            uint32_t bits = (uint32_t)h << 16;
            memcpy(&y[i], &bits, sizeof(bits));
        }
    }
}

void cpu_dequant(float *y, const uint8_t *raw, enum bt_dtype dtype, uint32_t n)
{
    uint32_t step = bt_dtype_block_values(dtype), bytes = bt_dtype_block_bytes(dtype);

    if (step == 1) {
        plain_values(y, raw, dtype, n);
        return;
    }
    for (uint32_t i = 0; i < n; i += step, raw += bytes) {
        switch (dtype) {
        case BT_DTYPE_Q4_0:
            q4_block(y + i, raw + 2, f16_at(raw), -8.0F * f16_at(raw));
            break;
        case BT_DTYPE_Q4_1:
            q4_block(y + i, raw + 4, f16_at(raw), f16_at(raw + 2));
            break;
        case BT_DTYPE_Q8_0:
            q8_block(y + i, raw);
            break;
        case BT_DTYPE_Q4_K:
            q4_k_block(y + i, raw);
            break;
        default:
            q6_k_block(y + i, raw);
            break;
        }
    }
}
