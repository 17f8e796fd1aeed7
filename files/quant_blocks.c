/* Quantisers of the block formats that need no search. Owns rounding; refuses to know files and tensors. */

#include "files/quant_blocks.h"

#include <math.h>
#include <string.h>
#include "base/assert.h"
#include "base/float16.h"

enum { BLOCK = 32 };

bool bt_quantize_known(enum bt_dtype dtype)
{
    return dtype <= BT_DTYPE_Q5_1 || dtype == BT_DTYPE_Q8_0;
}

/* Stores scale as a half at out and returns 1 / the stored value, 0 for none. */
static float put_scale(uint8_t *out, float scale)
{
    uint16_t h = bt_f32_to_f16(scale);
    float stored = bt_f16_to_f32(h);

    memcpy(out, &h, 2);
    return stored < 0.0F || stored > 0.0F ? 1.0F / stored : 0.0F;
}

static uint32_t clamped(float v, int max)
{
    long q = lrintf(v);

    return (uint32_t)(q < 0 ? 0 : q > max ? max : q);
}

/* Quants of bits 4 or 5: nibbles at out, fifth bits at high. */
static void put_quants(uint8_t *out, uint8_t *high, const uint32_t q[BLOCK])
{
    for (uint32_t j = 0; j < BLOCK / 2; j++) {
        out[j] = (uint8_t)((q[j] & 15U) | (q[j + BLOCK / 2] & 15U) << 4);
    }
    if (high != NULL) {
        memset(high, 0, 4);
        for (uint32_t j = 0; j < BLOCK; j++) {
            high[j / 8] |= (uint8_t)((q[j] >> 4) << j % 8);
        }
    }
}

/* The value of largest magnitude becomes the lowest quant, 0, which has one step more than the highest. */
static void signed_block(uint8_t *out, const float *x, int bits)
{
    int middle = 1 << (bits - 1);
    float extreme = 0.0F;
    uint32_t q[BLOCK];

    for (uint32_t j = 0; j < BLOCK; j++) {
        extreme = fabsf(x[j]) > fabsf(extreme) ? x[j] : extreme;
    }
    float inverse = put_scale(out, extreme / (float)-middle);
    for (uint32_t j = 0; j < BLOCK; j++) {
        q[j] = clamped(x[j] * inverse + (float)middle, 2 * middle - 1);
    }
    put_quants(out + (bits == 5 ? 6 : 2), bits == 5 ? out + 2 : NULL, q);
}

static void offset_block(uint8_t *out, const float *x, int bits)
{
    int top = (1 << bits) - 1;
    float low = x[0], high = x[0];
    uint32_t q[BLOCK];

    for (uint32_t j = 1; j < BLOCK; j++) {
        low = x[j] < low ? x[j] : low;
        high = x[j] > high ? x[j] : high;
    }
    uint16_t min = bt_f32_to_f16(low);
    float inverse = put_scale(out, (high - low) / (float)top);
    memcpy(out + 2, &min, 2);
    for (uint32_t j = 0; j < BLOCK; j++) {
        q[j] = clamped((x[j] - bt_f16_to_f32(min)) * inverse, top);
    }
    put_quants(out + (bits == 5 ? 8 : 4), bits == 5 ? out + 4 : NULL, q);
}

static void q8_0_block(uint8_t *out, const float *x)
{
    float most = 0.0F;

    for (uint32_t j = 0; j < BLOCK; j++) {
        most = fabsf(x[j]) > most ? fabsf(x[j]) : most;
    }
    float inverse = put_scale(out, most / 127.0F);
    for (uint32_t j = 0; j < BLOCK; j++) {
        out[2 + j] = (uint8_t)(clamped(x[j] * inverse + 128.0F, 255) - 128U);
    }
}

static void plain(void *out, const float *x, uint32_t n, enum bt_dtype dtype)
{
    uint16_t *h = out;

    if (dtype == BT_DTYPE_F32) {
        memcpy(out, x, n * sizeof(float));
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        h[i] = dtype == BT_DTYPE_F16 ? bt_f32_to_f16(x[i]) : bt_f32_to_bf16(x[i]);
    }
}

void bt_quantize(void *out, const float *x, uint32_t n, enum bt_dtype dtype)
{
    uint8_t *p = out;
    uint32_t bytes = bt_dtype_block_bytes(dtype);

    BT_ASSERT(bt_quantize_known(dtype) && n % bt_dtype_block_values(dtype) == 0);
    if (dtype <= BT_DTYPE_BF16) {
        plain(out, x, n, dtype);
        return;
    }
    for (uint32_t i = 0; i < n; i += BLOCK, p += bytes) {
        switch (dtype) {
        case BT_DTYPE_Q4_0:
            signed_block(p, x + i, 4);
            break;
        case BT_DTYPE_Q4_1:
            offset_block(p, x + i, 4);
            break;
        case BT_DTYPE_Q5_0:
            signed_block(p, x + i, 5);
            break;
        case BT_DTYPE_Q5_1:
            offset_block(p, x + i, 5);
            break;
        default:
            q8_0_block(p, x + i);
            break;
        }
    }
}
