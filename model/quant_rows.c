/* The values of quantised HF matrices as rows of G4 and G8 blocks, which the kernels pack: scale and minimum in f32, 4-bit
 * or 8-bit quants. Moves bits; the only arithmetic is minimum = scale * -zero, exact for 16-bit scales. */

#include <string.h>
#include "base/float16.h"
#include "base/mem.h"
#include "model/model_int.h"

enum { BLOCK = 32 };

static uint32_t word_at(const struct bt_tensor *t, size_t i)
{
    uint32_t w;

    memcpy(&w, (const uint8_t *)t->data + 4 * i, 4);
    return w;
}

/* Field i of a word of `bits` wide fields. */
static uint32_t field(uint32_t word, uint32_t i, uint32_t bits)
{
    return word >> i * bits & ((1U << bits) - 1U);
}

/* AWQ's words hold columns 0, 2, 4, 6, 1, 3, 5, 7. */
static uint32_t awq_place(uint32_t column)
{
    return column % 2 * 4 + column / 2;
}

/* Quant of row n and input k, not negative. */
static uint32_t quant_at(const struct bt_quant *q, uint32_t n, uint32_t k)
{
    uint32_t per_word = 32 / q->c.bits;

    switch (q->c.kind) {
    case BT_QUANT_GPTQ:
        return field(word_at(q->q, (size_t)(k / per_word) * q->n_rows + n), k % per_word,
                     q->c.bits);
    case BT_QUANT_AWQ:
        return field(word_at(q->q, (size_t)k * (q->n_rows / 8) + n / 8), awq_place(n % 8), 4);
    case BT_QUANT_CT_PACKED:
        return field(word_at(q->q, (size_t)n * (q->n_cols / per_word) + k / per_word), k % per_word,
                     q->c.bits);
    default:
        return (uint32_t)(((const int8_t *)q->q->data)[(size_t)n * q->n_cols + k] + 128);
    }
}

/* The quant that stands for 0 in row n, group g. */
static int32_t zero_at(const struct bt_quant *q, uint32_t n, uint32_t g)
{
    uint32_t per_word = 32 / q->c.bits, mask = (1U << q->c.bits) - 1U;

    switch (q->c.kind) {
    case BT_QUANT_GPTQ: {
        uint32_t w = word_at(q->zero, (size_t)g * (q->n_rows / per_word) + n / per_word);
        return (int32_t)((field(w, n % per_word, q->c.bits) + q->c.zero_added) & mask);
    }
    case BT_QUANT_AWQ:
        return (int32_t)field(word_at(q->zero, (size_t)g * (q->n_rows / 8) + n / 8),
                              awq_place(n % 8), 4);
    default: {
        int32_t middle = 1 << (q->c.bits - 1);
        if (q->zero == NULL) {
            return middle;
        }
        size_t at = q->zero->bytes == 1 ? 0 : (size_t)n * (q->n_cols / q->group) + g;
        return middle + ((const int8_t *)q->zero->data)[at];
    }
    }
}

static float scale_at(const struct bt_quant *q, uint32_t n, uint32_t g)
{
    const struct bt_tensor *t = q->scale;
    size_t at = q->c.kind == BT_QUANT_GPTQ || q->c.kind == BT_QUANT_AWQ
                    ? (size_t)g * q->n_rows + n
                    : (size_t)n * (q->n_cols / q->group) + g;
    float f;

    at = bt_tensor_values(t) == 1 ? 0 : at;
    bt_plain_to_f32(&f, (const uint8_t *)t->data + at * bt_dtype_block_bytes(t->dtype), t->dtype,
                    1);
    return f;
}

static void put_block(uint8_t *out, const struct bt_quant *q, uint32_t n, uint32_t block)
{
    uint32_t k0 = block * BLOCK, v[BLOCK];
    float scale = scale_at(q, n, k0 / q->group);
    int32_t zero = zero_at(q, n, k0 / q->group);

    for (uint32_t i = 0; i < BLOCK; i++) {
        v[i] = quant_at(q, n, q->perm != NULL ? q->perm[k0 + i] : k0 + i);
    }
    memcpy(out, &scale, 4);
    float min = scale * (float)-zero;
    memcpy(out + 4, &min, 4);
    for (uint32_t i = 0; i < BLOCK; i++) {
        if (q->c.bits == 8) {
            out[8 + i] = (uint8_t)v[i];
        } else if (i < BLOCK / 2) {
            out[8 + i] = (uint8_t)(v[i] | v[i + BLOCK / 2] << 4);
        }
    }
}

enum bt_dtype bt_quant_dtype(const struct bt_quant *q)
{
    return q->c.kind == BT_QUANT_F8 ? BT_DTYPE_GF8 : q->c.bits == 4 ? BT_DTYPE_G4 : BT_DTYPE_G8;
}

enum bt_status bt_quant_rows(const struct bt_quant *q, void **rows, struct bt_err *err)
{
    if (q->c.kind == BT_QUANT_F8) {
        return bt_quant_f8_rows(q, rows, err);
    }
    uint32_t n_blocks = q->n_cols / BLOCK;
    size_t block_bytes = bt_dtype_block_bytes(bt_quant_dtype(q)), bytes;
    uint8_t *out = bt_mul_size(q->n_rows, n_blocks * block_bytes, &bytes) ? bt_alloc(bytes) : NULL;

    if (out == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    /* Blocks outermost: where the file lies input by input, a pass over n reads neighbours. */
    for (uint32_t b = 0; b < n_blocks; b++) {
        for (uint32_t n = 0; n < q->n_rows; n++) {
            put_block(out + ((size_t)n * n_blocks + b) * block_bytes, q, n, b);
        }
    }
    *rows = out;
    return BT_OK;
}
