/* Matrices of e4m3 with scales: finds and checks their tensors, and makes rows of GF8 blocks of them, which the kernels pack. A
 * scale belongs to the whole matrix, to a row, or to a block of rows and columns; a value is its code's times its scale. Moves
 * bits, does no arithmetic. */

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/float16.h"
#include "base/mem.h"
#include "model/model_int.h"

enum { BLOCK = 32, NAME_MAX_BYTES = 288 };

static uint32_t pieces(uint32_t n, uint32_t size)
{
    return n / size + (n % size != 0);
}

void bt_quant_f8_bind(struct bt_binder *b, struct bt_quant *q, const char *stem)
{
    static const char inv[] = ".weight_scale_inv";
    const char *suffix = q->c.scale_inv ? inv : ".weight_scale";
    char name[NAME_MAX_BYTES];
    bool blocks = q->c.block_rows != 0;

    (void)snprintf(name, sizeof(name), "%s%s", stem, suffix);
    const struct bt_tensor *s = bt_weights_find(bt_bind_model(b), name);
    if (s == NULL && !blocks) { /* both names are in use */
        (void)snprintf(name, sizeof(name), "%s%s", stem, inv);
        s = bt_weights_find(bt_bind_model(b), name);
        suffix = s != NULL ? inv : suffix;
    }
    bool one = s != NULL && bt_tensor_values(s) == 1;
    q->scale_rows = one ? q->n_rows : blocks ? q->c.block_rows : 1;
    q->scale_cols = one || !blocks ? q->n_cols : q->c.block_cols;
    /* Scales of blocks of 32 where theirs do not divide a row. */
    q->group = q->n_cols % q->scale_cols == 0 ? q->scale_cols : BLOCK;
    q->q = bt_quant_part(b, stem, ".weight", true, "F8_E4M3", q->n_rows, q->n_cols);
    if (one && s->n_dims == 0) {
        q->scale = bt_bind_take(b, name, false);
        return;
    }
    q->scale = bt_quant_part(
        b, stem, suffix, true, NULL, pieces(q->n_rows, q->scale_rows),
        s != NULL && s->n_dims == 1 && (one || !blocks) ? 0 : pieces(q->n_cols, q->scale_cols));
}

bool bt_quant_unused(const struct bt_model *m, const char *name)
{
    static const char *const tails[] = {
        ".input_scale",         ".activation_scale",   ".k_scale", ".v_scale", ".kv_scale",
        ".k_proj.output_scale", ".v_proj.output_scale"};
    size_t n = strlen(name);

    for (size_t i = 0; i < sizeof(tails) / sizeof(tails[0]) && m->quant.kind != BT_QUANT_NONE;
         i++) {
        size_t k = strlen(tails[i]);
        if (n > k && strcmp(name + n - k, tails[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* The scales of a row's blocks of 32. */
static enum bt_status row_scales(const struct bt_quant *q, uint32_t n, float *scales,
                                 struct bt_err *err)
{
    const struct bt_tensor *t = q->scale;
    size_t row = (size_t)(n / q->scale_rows) * pieces(q->n_cols, q->scale_cols);

    for (uint32_t b = 0; b < q->n_cols / BLOCK; b++) {
        size_t at = row + b * BLOCK / q->scale_cols;
        bt_plain_to_f32(&scales[b], (const uint8_t *)t->data + at * bt_dtype_block_bytes(t->dtype),
                        t->dtype, 1);
        if (!(fabsf(scales[b]) < BT_GF8_SCALE_MAX)) {
            return bt_err_set(err, BT_ERR_INVALID, "%s: scale %zu is %g", t->name, at,
                              (double)scales[b]);
        }
    }
    return BT_OK;
}

/* A NaN among 32 codes? */
static bool any_nan(const uint8_t *codes)
{
    uint8_t any = 0;

    for (uint32_t i = 0; i < BLOCK; i++) {
        any |= (codes[i] & 0x7fU) == 0x7fU;
    }
    return any != 0;
}

static enum bt_status put_rows(const struct bt_quant *q, uint8_t *out, float *scales,
                               struct bt_err *err)
{
    const uint8_t *codes = q->q->data;

    for (uint32_t n = 0; n < q->n_rows; n++) {
        enum bt_status st = row_scales(q, n, scales, err);
        if (st != BT_OK) {
            return st;
        }
        for (uint32_t b = 0; b < q->n_cols / BLOCK; b++) {
            if (any_nan(codes)) {
                return bt_err_set(err, BT_ERR_INVALID, "row %u has a NaN in columns %u to %u", n,
                                  b * BLOCK, b * BLOCK + BLOCK - 1);
            }
            memcpy(out, &scales[b], 4);
            memcpy(out + 4, codes, BLOCK);
            out += bt_dtype_block_bytes(BT_DTYPE_GF8);
            codes += BLOCK;
        }
    }
    return BT_OK;
}

enum bt_status bt_quant_f8_rows(const struct bt_quant *q, void **rows, struct bt_err *err)
{
    size_t row = (size_t)(q->n_cols / BLOCK) * bt_dtype_block_bytes(BT_DTYPE_GF8), bytes;
    uint8_t *out = bt_mul_size(q->n_rows, row, &bytes) ? bt_alloc(bytes) : NULL;
    float *scales = bt_alloc(q->n_cols / BLOCK * sizeof(float));

    enum bt_status st = out != NULL && scales != NULL
                            ? put_rows(q, out, scales, err)
                            : bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    bt_free(scales);
    if (st != BT_OK) {
        bt_free(out);
        return st;
    }
    *rows = out;
    return BT_OK;
}
