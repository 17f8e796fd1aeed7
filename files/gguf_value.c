/* Typed reading of GGUF metadata values. Owns the conversions between stored and asked-for types;
 * the bytes were checked when the file was opened. */

#include <math.h>
#include <string.h>
#include "files/gguf.h"

static uint64_t get_le(const uint8_t *p, size_t n)
{
    uint64_t v = 0;

    for (size_t i = 0; i < n; i++) {
        v |= (uint64_t)p[i] << (8 * i);
    }
    return v;
}

/* Integers of any width, sign-extended. false: not an integer type. */
static bool as_int(enum bt_gguf_type type, const uint8_t *p, uint64_t *out, bool *negative)
{
    *negative = false;
    switch (type) {
    case BT_GGUF_U8:
        *out = p[0];
        return true;
    case BT_GGUF_U16:
        *out = get_le(p, 2);
        return true;
    case BT_GGUF_U32:
        *out = get_le(p, 4);
        return true;
    case BT_GGUF_U64:
        *out = get_le(p, 8);
        return true;
    case BT_GGUF_I8:
        *out = (uint64_t)(int64_t)(int8_t)p[0];
        break;
    case BT_GGUF_I16:
        *out = (uint64_t)(int64_t)(int16_t)get_le(p, 2);
        break;
    case BT_GGUF_I32:
        *out = (uint64_t)(int64_t)(int32_t)get_le(p, 4);
        break;
    case BT_GGUF_I64:
        *out = get_le(p, 8);
        break;
    default:
        return false;
    }
    *negative = (int64_t)*out < 0;
    return true;
}

static bool as_real(enum bt_gguf_type type, const uint8_t *p, double *out)
{
    uint64_t bits;
    bool negative;

    if (type == BT_GGUF_F32) {
        uint32_t b = (uint32_t)get_le(p, 4);
        float f;
        memcpy(&f, &b, 4);
        *out = (double)f;
        return true;
    }
    if (type == BT_GGUF_F64) {
        bits = get_le(p, 8);
        memcpy(out, &bits, 8);
        return true;
    }
    if (!as_int(type, p, &bits, &negative)) {
        return false;
    }
    *out = negative ? (double)(int64_t)bits : (double)bits;
    return true;
}

static enum bt_status find(const struct bt_gguf *g, const char *key, const struct bt_gguf_value **v,
                           struct bt_err *err)
{
    *v = bt_gguf_find(g, key);
    return *v != NULL ? BT_OK
                      : bt_err_set(err, BT_ERR_NOT_FOUND, "%s: no key %s", bt_gguf_path(g), key);
}

static enum bt_status wrong(const struct bt_gguf *g, const char *key, const char *want,
                            struct bt_err *err)
{
    return bt_err_set(err, BT_ERR_INVALID, "%s: key %s is not %s", bt_gguf_path(g), key, want);
}

enum bt_status bt_gguf_get_u64(const struct bt_gguf *g, const char *key, uint64_t *out,
                               struct bt_err *err)
{
    const struct bt_gguf_value *v;
    uint64_t u;
    bool negative;
    enum bt_status st = find(g, key, &v, err);

    if (st != BT_OK) {
        return st;
    }
    if (!as_int(v->type, v->data, &u, &negative) || negative) {
        return wrong(g, key, "an integer from 0", err);
    }
    *out = u;
    return BT_OK;
}

enum bt_status bt_gguf_get_f64(const struct bt_gguf *g, const char *key, double *out,
                               struct bt_err *err)
{
    const struct bt_gguf_value *v;
    double d;
    enum bt_status st = find(g, key, &v, err);

    if (st != BT_OK) {
        return st;
    }
    if (!as_real(v->type, v->data, &d) || !isfinite(d)) {
        return wrong(g, key, "a finite number", err);
    }
    *out = d;
    return BT_OK;
}

enum bt_status bt_gguf_get_bool(const struct bt_gguf *g, const char *key, bool *out,
                                struct bt_err *err)
{
    const struct bt_gguf_value *v;
    enum bt_status st = find(g, key, &v, err);

    if (st != BT_OK) {
        return st;
    }
    if (v->type != BT_GGUF_BOOL || v->data[0] > 1) {
        return wrong(g, key, "a bool", err);
    }
    *out = v->data[0] == 1;
    return BT_OK;
}

enum bt_status bt_gguf_get_str(const struct bt_gguf *g, const char *key, const char **s, size_t *n,
                               struct bt_err *err)
{
    const struct bt_gguf_value *v;
    enum bt_status st = find(g, key, &v, err);

    if (st != BT_OK) {
        return st;
    }
    if (v->type != BT_GGUF_STRING) {
        return wrong(g, key, "a string", err);
    }
    *n = (size_t)get_le(v->data, 8);
    *s = (const char *)v->data + 8;
    return BT_OK;
}

enum bt_status bt_gguf_iter_strings(const struct bt_gguf *g, const char *key,
                                    struct bt_gguf_iter *it, struct bt_err *err)
{
    const struct bt_gguf_value *v;
    enum bt_status st = find(g, key, &v, err);

    if (st != BT_OK) {
        return st;
    }
    if (v->type != BT_GGUF_ARRAY || v->elem_type != BT_GGUF_STRING) {
        return wrong(g, key, "an array of strings", err);
    }
    *it = (struct bt_gguf_iter){v->data, v->count, v->elem_type};
    return BT_OK;
}

enum bt_status bt_gguf_iter_numbers(const struct bt_gguf *g, const char *key,
                                    struct bt_gguf_iter *it, struct bt_err *err)
{
    const struct bt_gguf_value *v;
    enum bt_status st = find(g, key, &v, err);

    if (st != BT_OK) {
        return st;
    }
    if (v->type != BT_GGUF_ARRAY || v->elem_type == BT_GGUF_STRING ||
        v->elem_type == BT_GGUF_ARRAY) {
        return wrong(g, key, "an array of numbers", err);
    }
    *it = (struct bt_gguf_iter){v->data, v->count, v->elem_type};
    return BT_OK;
}

bool bt_gguf_next_str(struct bt_gguf_iter *it, const char **s, size_t *n)
{
    if (it->left == 0) {
        return false;
    }
    it->left--;
    *n = (size_t)get_le(it->next, 8);
    *s = (const char *)it->next + 8;
    it->next += 8 + *n;
    return true;
}

bool bt_gguf_next_f64(struct bt_gguf_iter *it, double *out)
{
    static const uint8_t bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

    if (it->left == 0) {
        return false;
    }
    it->left--;
    if (it->elem_type == BT_GGUF_BOOL) {
        *out = it->next[0] != 0;
    } else {
        (void)as_real(it->elem_type, it->next, out);
    }
    it->next += bytes[it->elem_type];
    return true;
}
