/* Rows of a weight file to f32, one value at a time: the formulas of the block formats. The packed panels give the
 * same values, bit for bit. Scale times quant is exact in f32 for every format but q6_k, where it rounds once, and
 * adding the minimum rounds once: no fused operation is needed to agree with the kernels. */

#include "kernels/cpu/cpu_int.h"

#include <string.h>
#include "base/float16.h"
#include "base/float8.h"

static float f16_at(const uint8_t *p)
{
    return bt_f16_to_f32((uint16_t)(p[0] | p[1] << 8));
}

/* d, m and 16 bytes of nibbles: low ones are values 0 … 15, high ones 16 … 31. */
static void q4_block(float *y, const uint8_t *q, float d, float m)
{
    for (uint32_t j = 0; j < 16; j++) {
        y[j] = d * (float)(q[j] & 15) + m;
        y[j + 16] = d * (float)(q[j] >> 4) + m;
    }
}

/* As q4_block, the fifth bits in high. */
static void q5_block(float *y, const uint8_t *high, const uint8_t *q, float d, float m)
{
    for (uint32_t j = 0; j < 16; j++) {
        uint32_t a = (uint32_t)high[j / 8] >> j % 8 & 1U;
        uint32_t b = (uint32_t)high[2 + j / 8] >> j % 8 & 1U;
        y[j] = d * (float)((q[j] & 15U) | a << 4) + m;
        y[j + 16] = d * (float)((uint32_t)(q[j] >> 4) | b << 4) + m;
    }
}

const uint8_t cpu_iq4_nl[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                129, 141, 153, 166, 181, 197, 217, 241};

static void iq4_nl_block(float *y, const uint8_t *p)
{
    float d = f16_at(p);
    for (uint32_t j = 0; j < 16; j++) {
        y[j] = d * (float)(cpu_iq4_nl[p[2 + j] & 15] - 128);
        y[j + 16] = d * (float)(cpu_iq4_nl[p[2 + j] >> 4] - 128);
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

void cpu_k_values(const uint8_t *p, enum bt_dtype dtype, uint8_t q[256])
{
    const uint8_t *pairs = dtype == BT_DTYPE_Q2_K ? p + 16 : p + 32; /* q2_k, q3_k */

    for (uint32_t j = 0; j < 256; j++) {
        uint32_t l = j % 32, quarter = j / 32 % 4, sub = j / 32;
        uint32_t low = (uint32_t)pairs[j / 128 * 32 + l] >> 2 * quarter & 3U;
        switch (dtype) {
        case BT_DTYPE_Q2_K:
            q[j] = (uint8_t)low;
            break;
        case BT_DTYPE_Q3_K:
            q[j] = (uint8_t)(low | (p[l] >> sub & 1U) << 2);
            break;
        default: /* q5_k */
            q[j] = (uint8_t)(((uint32_t)p[48 + sub / 2 * 32 + l] >> 4 * (sub % 2) & 15U) |
                             (p[16 + l] >> sub & 1U) << 4);
            break;
        }
    }
}

int8_t cpu_q3_k_scale(const uint8_t *scales, uint32_t s)
{
    uint32_t low = s < 8 ? scales[s] & 15U : scales[s - 8] >> 4;
    return (int8_t)((int)(low | ((uint32_t)scales[8 + s % 4] >> 2 * (s / 4) & 3U) << 4) - 32);
}

static void q2_k_block(float *y, const uint8_t *p)
{
    uint8_t q[256];
    float d = f16_at(p + 80), dmin = f16_at(p + 82);

    cpu_k_values(p, BT_DTYPE_Q2_K, q);
    for (uint32_t j = 0; j < 256; j++) {
        uint8_t s = p[j / 16];
        y[j] = d * (float)(s & 15) * (float)q[j] - dmin * (float)(s >> 4);
    }
}

static void q3_k_block(float *y, const uint8_t *p)
{
    uint8_t q[256];
    float d = f16_at(p + 108);

    cpu_k_values(p, BT_DTYPE_Q3_K, q);
    for (uint32_t j = 0; j < 256; j++) {
        y[j] = d * (float)cpu_q3_k_scale(p + 96, j / 16) * (float)(q[j] - 4);
    }
}

static void q5_k_block(float *y, const uint8_t *p)
{
    uint8_t q[256], scale, min;
    float d = f16_at(p), dmin = f16_at(p + 2);

    cpu_k_values(p, BT_DTYPE_Q5_K, q);
    for (uint32_t j = 0; j < 256; j++) {
        cpu_q4_k_scale(p + 4, j / 32, &scale, &min);
        y[j] = d * (float)scale * (float)q[j] - dmin * (float)min;
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

static float f32_at(const uint8_t *p)
{
    float f;
    memcpy(&f, p, sizeof(f));
    return f;
}

/* Rounds twice where the kernels' fused operation rounds once, unless scales have 16 bits: then both are exact. */
static void g8_block(float *y, const uint8_t *p)
{
    for (uint32_t j = 0; j < 32; j++) {
        y[j] = f32_at(p) * (float)p[8 + j] + f32_at(p + 4);
    }
}

static void gf8_block(float *y, const uint8_t *p)
{
    for (uint32_t j = 0; j < 32; j++) {
        y[j] = f32_at(p) * bt_f8_to_f32(p[4 + j]);
    }
}

static void block_values(float *y, const uint8_t *p, enum bt_dtype dtype)
{
    switch (dtype) {
    case BT_DTYPE_Q4_0:
        q4_block(y, p + 2, f16_at(p), -8.0F * f16_at(p));
        break;
    case BT_DTYPE_Q4_1:
        q4_block(y, p + 4, f16_at(p), f16_at(p + 2));
        break;
    case BT_DTYPE_Q5_0:
        q5_block(y, p + 2, p + 6, f16_at(p), -16.0F * f16_at(p));
        break;
    case BT_DTYPE_Q5_1:
        q5_block(y, p + 4, p + 8, f16_at(p), f16_at(p + 2));
        break;
    case BT_DTYPE_IQ4_NL:
        iq4_nl_block(y, p);
        break;
    case BT_DTYPE_Q8_0:
        q8_block(y, p);
        break;
    case BT_DTYPE_G4:
        q4_block(y, p + 8, f32_at(p), f32_at(p + 4));
        break;
    case BT_DTYPE_G8:
        g8_block(y, p);
        break;
    case BT_DTYPE_GF8:
        gf8_block(y, p);
        break;
    case BT_DTYPE_Q2_K:
        q2_k_block(y, p);
        break;
    case BT_DTYPE_Q3_K:
        q3_k_block(y, p);
        break;
    case BT_DTYPE_Q4_K:
        q4_k_block(y, p);
        break;
    case BT_DTYPE_Q5_K:
        q5_k_block(y, p);
        break;
    default:
        q6_k_block(y, p);
        break;
    }
}

void cpu_dequant(float *y, const uint8_t *raw, enum bt_dtype dtype, uint32_t n)
{
    uint32_t step = bt_dtype_block_values(dtype), bytes = bt_dtype_block_bytes(dtype);

    if (step == 1) {
        bt_plain_to_f32(y, raw, dtype, n);
        return;
    }
    for (uint32_t i = 0; i < n; i += step, raw += bytes) {
        block_values(y + i, raw, dtype);
    }
}
