/* Finds the tensors of a quantised matrix, checks types and shapes, and works out the order in which its inputs lie when
 * every group is together. Owns struct bt_quant; reading values is quant_rows.c's. */

#include <stdio.h>
#include <string.h>
#include "base/mem.h"
#include "model/model_int.h"

enum { NAME_MAX_BYTES = 288 };

static const char *join(char out[NAME_MAX_BYTES], const char *stem, const char *suffix)
{
    (void)snprintf(out, NAME_MAX_BYTES, "%s%s", stem, suffix);
    return out;
}

const struct bt_tensor *bt_quant_part(struct bt_binder *b, const char *stem, const char *suffix,
                                      bool needed, const char *type, uint64_t rows, uint64_t cols)
{
    char name[NAME_MAX_BYTES];

    if (!needed && bt_weights_find(bt_bind_model(b), join(name, stem, suffix)) == NULL) {
        return NULL;
    }
    const struct bt_tensor *t = bt_bind_take(b, join(name, stem, suffix), true);
    if (t == NULL) {
        return NULL;
    }
    bool right =
        type != NULL ? strcmp(t->type_name, type) == 0 : t->supported && t->dtype <= BT_DTYPE_BF16;
    if (!right) {
        bt_bind_fail(b, BT_ERR_UNSUPPORTED, t, "type %s is not supported here", t->type_name);
        return NULL;
    }
    bt_bind_check_shape(b, t, cols == 0 ? 1 : 2, (const uint64_t[]){rows, cols});
    return t;
}

/* perm, from the group of every input: inputs of group 0 in order, then of group 1, … Each group must be whole. */
static void order_inputs(struct bt_binder *b, struct bt_quant *q)
{
    struct bt_model *m = bt_bind_model(b);
    uint32_t n_groups = q->n_cols / q->group;
    const uint8_t *p = q->index->data;
    uint32_t *fill = bt_calloc(n_groups, sizeof(*fill));
    uint32_t *perm = bt_arena_alloc(&m->arena, q->n_cols * sizeof(*perm));
    bool sorted = true;

    if (fill == NULL || perm == NULL) {
        bt_free(fill);
        bt_bind_no_memory(b);
        return;
    }
    for (uint32_t k = 0; k < q->n_cols; k++) {
        uint32_t g;
        memcpy(&g, p + 4 * (size_t)k, 4);
        if (g >= n_groups || fill[g] == q->group) {
            bt_bind_fail(b, BT_ERR_INVALID, q->index,
                         "value %u: group %u is none of %u, or has more than %u inputs", k, g,
                         n_groups, q->group);
            break;
        }
        uint32_t at = g * q->group + fill[g]++;
        perm[at] = k;
        sorted = sorted && at == k;
    }
    bt_free(fill);
    q->perm = sorted ? NULL : perm;
}

static void bind_gptq(struct bt_binder *b, struct bt_quant *q, const char *stem)
{
    uint32_t per_word = 32 / q->c.bits, n_groups = q->n_cols / q->group;

    q->q = bt_quant_part(b, stem, ".qweight", true, "I32", q->n_cols / per_word, q->n_rows);
    q->zero = bt_quant_part(b, stem, ".qzeros", true, "I32", n_groups, q->n_rows / per_word);
    q->scale = bt_quant_part(b, stem, ".scales", true, NULL, n_groups, q->n_rows);
    q->index = bt_quant_part(b, stem, ".g_idx", false, "I32", q->n_cols, 0);
}

static void bind_awq(struct bt_binder *b, struct bt_quant *q, const char *stem)
{
    uint32_t n_groups = q->n_cols / q->group;

    q->q = bt_quant_part(b, stem, ".qweight", true, "I32", q->n_cols, q->n_rows / 8);
    q->zero = bt_quant_part(b, stem, ".qzeros", true, "I32", n_groups, q->n_rows / 8);
    q->scale = bt_quant_part(b, stem, ".scales", true, NULL, n_groups, q->n_rows);
}

static void bind_compressed(struct bt_binder *b, struct bt_quant *q, const char *stem)
{
    bool packed = q->c.kind == BT_QUANT_CT_PACKED;
    uint32_t n_groups = q->n_cols / q->group;
    char name[NAME_MAX_BYTES];
    const struct bt_tensor *s =
        bt_weights_find(bt_bind_model(b), join(name, stem, ".weight_scale"));

    q->q = packed ? bt_quant_part(b, stem, ".weight_packed", true, "I32", q->n_rows,
                                  q->n_cols / (32 / q->c.bits))
                  : bt_quant_part(b, stem, ".weight", true, "I8", q->n_rows, q->n_cols);
    if (s != NULL && bt_tensor_values(s) == 1) { /* one for the whole matrix */
        q->scale = bt_quant_part(b, stem, ".weight_scale", true, NULL, 1, s->n_dims == 2 ? 1 : 0);
        q->zero =
            bt_quant_part(b, stem, ".weight_zero_point", false, "I8", 1, s->n_dims == 2 ? 1 : 0);
    } else {
        q->scale = bt_quant_part(b, stem, ".weight_scale", true, NULL, q->n_rows, n_groups);
        q->zero = bt_quant_part(b, stem, ".weight_zero_point", false, "I8", q->n_rows, n_groups);
    }
    q->index = bt_quant_part(b, stem, ".weight_g_idx", false, "I32", q->n_cols, 0);
    if (packed) {
        (void)bt_quant_part(b, stem, ".weight_shape", false, "I64", 2, 0);
    }
}

static bool quantised(const struct bt_model *m, const char *stem)
{
    char name[NAME_MAX_BYTES];
    const struct bt_tensor *t;

    switch (m->quant.kind) {
    case BT_QUANT_GPTQ:
    case BT_QUANT_AWQ:
        return bt_weights_find(m, join(name, stem, ".qweight")) != NULL;
    case BT_QUANT_CT_PACKED:
        return bt_weights_find(m, join(name, stem, ".weight_packed")) != NULL;
    case BT_QUANT_CT_INT:
        t = bt_weights_find(m, join(name, stem, ".weight"));
        return t != NULL && strcmp(t->type_name, "I8") == 0;
    case BT_QUANT_F8:
        t = bt_weights_find(m, join(name, stem, ".weight"));
        return t != NULL && strcmp(t->type_name, "F8_E4M3") == 0;
    default:
        return false;
    }
}

const struct bt_quant *bt_quant_bind(struct bt_binder *b, const char *stem, uint32_t n_rows,
                                     uint32_t n_cols)
{
    struct bt_model *m = bt_bind_model(b);

    if (!quantised(m, stem)) {
        return NULL;
    }
    struct bt_quant *q = bt_arena_zalloc(&m->arena, sizeof(*q));
    if (q == NULL) {
        bt_bind_no_memory(b);
        return NULL;
    }
    q->c = m->quant;
    q->n_rows = n_rows;
    q->n_cols = n_cols;
    q->group = q->c.group == 0 || q->c.group > n_cols ? n_cols : q->c.group;
    if (q->c.kind == BT_QUANT_AWQ) {
        bind_awq(b, q, stem);
    } else if (q->c.kind == BT_QUANT_GPTQ) {
        bind_gptq(b, q, stem);
    } else if (q->c.kind == BT_QUANT_F8) {
        bt_quant_f8_bind(b, q, stem);
    } else {
        bind_compressed(b, q, stem);
    }
    if (q->q == NULL || q->scale == NULL) {
        return NULL;
    }
    uint32_t word = q->c.kind == BT_QUANT_GPTQ || q->c.kind == BT_QUANT_AWQ ? 32 / q->c.bits : 1;
    if (n_cols % 32 != 0 || n_cols % q->group != 0 || n_rows % word != 0) {
        bt_bind_fail(b, BT_ERR_UNSUPPORTED, q->q,
                     "%u x %u values: no whole groups of %u, blocks of 32 and words of %u", n_rows,
                     n_cols, q->group, word);
        return NULL;
    }
    if (q->index != NULL) {
        order_inputs(b, q);
    }
    return q;
}

size_t bt_quant_bytes(const struct bt_quant *q)
{
    return q->q->bytes + q->scale->bytes + (q->zero != NULL ? q->zero->bytes : 0);
}
