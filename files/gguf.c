/* Reads GGUF headers and keeps the file mapped. Owns every check of bytes, so that views handed out
 * need none; refuses to know what a key or tensor means. */

#include "files/gguf.h"

#include <dirent.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/arena.h"
#include "base/assert.h"
#include "base/hash.h"
#include "base/mem.h"
#include "files/map.h"

enum {
    KEYS_MAX = 65536,
    KEY_BYTES_MAX = 65535, /* the format's own limit */
    TENSORS_MAX = 1000 * 1000,
    TENSOR_NAME_BYTES_MAX = 1024,
    TENSOR_DIMS_MAX = 4,
    ARRAY_DEPTH_MAX = 4,
    ALIGNMENT_DEFAULT = 32,
    ALIGNMENT_MAX = 1 << 20,
    HEADER_BYTES_MIN = 24,
    KEY_ENTRY_BYTES_MIN = 8 + 1 + 4 + 1,
    TENSOR_ENTRY_BYTES_MIN = 8 + 1 + 4 + 8 + 4 + 8,
};
static const size_t ARENA_BYTES_MAX = (size_t)1 << 30; /* keys and names */

struct bt_gguf {
    char *path;
    struct bt_file_map map;
    struct bt_arena arena;
    struct bt_gguf_value *values;
    size_t n_values;
    struct bt_map by_key;
    struct bt_tensor *tensors;
    size_t n_tensors;
    struct bt_map by_name;
};

/* ggml's type numbers; types that the kernels have no use for are known by name only. */
struct gguf_tensor_type {
    uint32_t id;
    const char *name;
    bool supported;
    enum bt_dtype dtype;
};

static const struct gguf_tensor_type tensor_types[] = {
    {0, "F32", true, BT_DTYPE_F32},        {1, "F16", true, BT_DTYPE_F16},
    {2, "Q4_0", true, BT_DTYPE_Q4_0},      {3, "Q4_1", true, BT_DTYPE_Q4_1},
    {6, "Q5_0", true, BT_DTYPE_Q5_0},      {7, "Q5_1", true, BT_DTYPE_Q5_1},
    {8, "Q8_0", true, BT_DTYPE_Q8_0},      {9, "Q8_1", false, BT_DTYPE_F32},
    {10, "Q2_K", true, BT_DTYPE_Q2_K},     {11, "Q3_K", true, BT_DTYPE_Q3_K},
    {12, "Q4_K", true, BT_DTYPE_Q4_K},     {13, "Q5_K", true, BT_DTYPE_Q5_K},
    {14, "Q6_K", true, BT_DTYPE_Q6_K},     {15, "Q8_K", false, BT_DTYPE_F32},
    {16, "IQ2_XXS", false, BT_DTYPE_F32},  {17, "IQ2_XS", false, BT_DTYPE_F32},
    {18, "IQ3_XXS", false, BT_DTYPE_F32},  {19, "IQ1_S", false, BT_DTYPE_F32},
    {20, "IQ4_NL", true, BT_DTYPE_IQ4_NL}, {21, "IQ3_S", false, BT_DTYPE_F32},
    {22, "IQ2_S", false, BT_DTYPE_F32},    {23, "IQ4_XS", false, BT_DTYPE_F32},
    {24, "I8", false, BT_DTYPE_F32},       {25, "I16", false, BT_DTYPE_F32},
    {26, "I32", false, BT_DTYPE_F32},      {27, "I64", false, BT_DTYPE_F32},
    {28, "F64", false, BT_DTYPE_F32},      {29, "IQ1_M", false, BT_DTYPE_F32},
    {30, "BF16", true, BT_DTYPE_BF16},     {34, "TQ1_0", false, BT_DTYPE_F32},
    {35, "TQ2_0", false, BT_DTYPE_F32},    {39, "MXFP4", false, BT_DTYPE_F32},
};

/* Bytes of one fixed-size element; 0 for strings, arrays and unknown types. */
static size_t type_bytes(uint32_t type)
{
    static const uint8_t bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

    return type < sizeof(bytes) ? bytes[type] : 0;
}

static uint64_t get_le(const uint8_t *p, size_t n)
{
    uint64_t v = 0;

    for (size_t i = 0; i < n; i++) {
        v |= (uint64_t)p[i] << (8 * i);
    }
    return v;
}

/* A cursor over the header. */
struct reader {
    const char *path;
    const uint8_t *base;
    size_t pos, end;
    struct bt_err *err;
};

static enum bt_status short_file(struct reader *r, uint64_t need)
{
    return bt_err_set(r->err, BT_ERR_INVALID,
                      "%s: byte %zu: %" PRIu64 " bytes needed, %zu left in the file", r->path,
                      r->pos, need, r->end - r->pos);
}

static enum bt_status read_uint(struct reader *r, size_t n, uint64_t *out)
{
    if (r->end - r->pos < n) {
        return short_file(r, n);
    }
    *out = get_le(r->base + r->pos, n);
    r->pos += n;
    return BT_OK;
}

static enum bt_status read_string(struct reader *r, const char **s, uint64_t *n)
{
    enum bt_status st = read_uint(r, 8, n);

    if (st != BT_OK) {
        return st;
    }
    if (*n > r->end - r->pos) {
        return short_file(r, *n);
    }
    *s = (const char *)r->base + r->pos;
    r->pos += (size_t)*n;
    return BT_OK;
}

/* A string that becomes a key or name: a NUL-terminated copy. */
static enum bt_status read_name(struct reader *r, struct bt_arena *a, size_t max, const char **out)
{
    size_t at = r->pos;
    const char *s = NULL;
    uint64_t n = 0;
    enum bt_status st = read_string(r, &s, &n);

    if (st != BT_OK) {
        return st;
    }
    if (n == 0 || n > max || memchr(s, 0, (size_t)n) != NULL) {
        return bt_err_set(r->err, BT_ERR_INVALID,
                          "%s: byte %zu: a name of %" PRIu64 " bytes is empty, over %zu or holds "
                          "a zero",
                          r->path, at, n, max);
    }
    *out = bt_arena_strndup(a, s, (size_t)n);
    return *out != NULL ? BT_OK : bt_err_set(r->err, BT_ERR_NOMEM, "%s: out of memory", r->path);
}

static enum bt_status skip_elems(struct reader *r, uint32_t type, uint64_t count, unsigned depth);

static enum bt_status skip_array(struct reader *r, unsigned depth)
{
    uint64_t type = 0, count = 0;
    enum bt_status st = read_uint(r, 4, &type);

    if (st == BT_OK) {
        st = read_uint(r, 8, &count);
    }
    if (st != BT_OK) {
        return st;
    }
    return skip_elems(r, (uint32_t)type, count, depth);
}

static enum bt_status skip_elems(struct reader *r, uint32_t type, uint64_t count, unsigned depth)
{
    size_t size = type_bytes(type);
    enum bt_status st = BT_OK;

    if (size != 0) {
        if (count > (r->end - r->pos) / size) {
            return short_file(r, count);
        }
        r->pos += (size_t)count * size;
        return BT_OK;
    }
    if (type != BT_GGUF_STRING && (type != BT_GGUF_ARRAY || depth == ARRAY_DEPTH_MAX)) {
        return bt_err_set(r->err, BT_ERR_INVALID, "%s: byte %zu: value type %u (array depth %u)",
                          r->path, r->pos, type, depth);
    }
    for (uint64_t i = 0; i < count && st == BT_OK; i++) {
        const char *s = NULL;
        uint64_t n = 0;
        st = type == BT_GGUF_STRING ? read_string(r, &s, &n) : skip_array(r, depth + 1);
    }
    return st;
}

static enum bt_status read_value(struct reader *r, struct bt_gguf_value *v)
{
    uint64_t type = 0, elem = 0;
    enum bt_status st = read_uint(r, 4, &type);

    v->count = 1;
    if (st == BT_OK && type == BT_GGUF_ARRAY) {
        st = read_uint(r, 4, &elem);
        if (st == BT_OK) {
            st = read_uint(r, 8, &v->count);
        }
    }
    if (st != BT_OK) {
        return st;
    }
    v->type = (enum bt_gguf_type)type;
    v->elem_type = (enum bt_gguf_type)elem;
    v->data = r->base + r->pos;
    st = skip_elems(r, (uint32_t)(type == BT_GGUF_ARRAY ? elem : type), v->count, 1);
    v->bytes = (size_t)(r->base + r->pos - v->data);
    return st;
}

static enum bt_status read_values(struct bt_gguf *g, struct reader *r, uint64_t n)
{
    g->values = bt_calloc((size_t)n + 1, sizeof(*g->values));
    if (g->values == NULL) {
        return bt_err_set(r->err, BT_ERR_NOMEM, "%s: out of memory", r->path);
    }
    for (uint64_t i = 0; i < n; i++) {
        struct bt_gguf_value *v = &g->values[i];
        uint64_t other;
        enum bt_status st = read_name(r, &g->arena, KEY_BYTES_MAX, &v->key);
        if (st != BT_OK) {
            return st;
        }
        if (bt_map_get(&g->by_key, v->key, strlen(v->key), &other)) {
            return bt_err_set(r->err, BT_ERR_INVALID, "%s: key %.128s appears twice", r->path,
                              v->key);
        }
        st = read_value(r, v);
        if (st != BT_OK) {
            (void)bt_err_prefix(r->err, "key %.128s", v->key);
            return st;
        }
        if (bt_map_put(&g->by_key, v->key, strlen(v->key), i) != BT_OK) {
            return bt_err_set(r->err, BT_ERR_NOMEM, "%s: out of memory", r->path);
        }
        g->n_values++;
    }
    return BT_OK;
}

static enum bt_status read_tensor_shape(struct reader *r, struct bt_tensor *t)
{
    uint64_t n_dims = 0, values = 1;
    enum bt_status st = read_uint(r, 4, &n_dims);

    if (st != BT_OK) {
        return st;
    }
    if (n_dims > TENSOR_DIMS_MAX) {
        return bt_err_set(r->err, BT_ERR_INVALID,
                          "%s: tensor %s: %" PRIu64 " dimensions, the limit is %d", r->path,
                          t->name, n_dims, TENSOR_DIMS_MAX);
    }
    t->n_dims = (uint32_t)n_dims;
    for (uint32_t i = 0; i < t->n_dims; i++) {
        uint64_t *d = &t->shape[t->n_dims - 1 - i]; /* the file lists the contiguous one first */
        st = read_uint(r, 8, d);
        if (st != BT_OK) {
            return st;
        }
        if (*d == 0 || __builtin_mul_overflow(values, *d, &values) || values > INT64_MAX) {
            return bt_err_set(r->err, BT_ERR_INVALID,
                              "%s: tensor %s: dimension %u is 0 or overflows", r->path, t->name, i);
        }
    }
    return BT_OK;
}

static enum bt_status set_tensor_type(struct reader *r, struct bt_tensor *t, uint64_t id)
{
    for (size_t i = 0; i < sizeof(tensor_types) / sizeof(tensor_types[0]); i++) {
        const struct gguf_tensor_type *ty = &tensor_types[i];
        if (ty->id != id) {
            continue;
        }
        t->type_name = ty->name;
        t->supported = ty->supported;
        t->dtype = ty->dtype;
        if (!t->supported) {
            return BT_OK;
        }
        uint64_t row = t->n_dims == 0 ? 1 : t->shape[t->n_dims - 1], blocks, bytes;
        if (row % bt_dtype_block_values(t->dtype) != 0) {
            return bt_err_set(r->err, BT_ERR_INVALID,
                              "%s: tensor %s: rows of %" PRIu64 " values are no whole %s blocks",
                              r->path, t->name, row, t->type_name);
        }
        blocks = bt_tensor_values(t) / bt_dtype_block_values(t->dtype);
        if (__builtin_mul_overflow(blocks, bt_dtype_block_bytes(t->dtype), &bytes) ||
            bytes > SIZE_MAX) {
            return bt_err_set(r->err, BT_ERR_INVALID, "%s: tensor %s: size overflows", r->path,
                              t->name);
        }
        t->bytes = (size_t)bytes;
        return BT_OK;
    }
    return bt_err_set(r->err, BT_ERR_INVALID, "%s: tensor %s: unknown type %" PRIu64, r->path,
                      t->name, id);
}

static enum bt_status read_tensor(struct bt_gguf *g, struct reader *r, struct bt_tensor *t,
                                  uint64_t *offset)
{
    uint64_t type = 0;
    enum bt_status st = read_name(r, &g->arena, TENSOR_NAME_BYTES_MAX, &t->name);

    if (st == BT_OK) {
        t->file = g->path;
        st = read_tensor_shape(r, t);
    }
    if (st == BT_OK) {
        st = read_uint(r, 4, &type);
    }
    if (st == BT_OK) {
        st = set_tensor_type(r, t, type);
    }
    if (st == BT_OK) {
        st = read_uint(r, 8, offset);
    }
    return st;
}

static enum bt_status alignment(struct bt_gguf *g, struct reader *r, uint64_t *out)
{
    enum bt_status st = bt_gguf_get_u64(g, "general.alignment", out, r->err);

    if (st == BT_ERR_NOT_FOUND) {
        *out = ALIGNMENT_DEFAULT;
        return BT_OK;
    }
    if (st == BT_OK && (*out < 8 || *out > ALIGNMENT_MAX || (*out & (*out - 1)) != 0)) {
        return bt_err_set(r->err, BT_ERR_INVALID,
                          "%s: general.alignment %" PRIu64 " is no power of two from 8 to %d",
                          r->path, *out, ALIGNMENT_MAX);
    }
    return st;
}

struct extent {
    uint64_t begin, end;
    const char *name;
};

static int by_begin(const void *a, const void *b)
{
    const struct extent *x = a, *y = b;

    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

static enum bt_status check_overlaps(const struct bt_gguf *g, struct extent *e, size_t n,
                                     struct bt_err *err)
{
    if (n > 1) {
        qsort(e, n, sizeof(*e), by_begin);
    }
    for (size_t i = 1; i < n; i++) {
        if (e[i - 1].end > e[i].begin) {
            return bt_err_set(err, BT_ERR_INVALID, "%s: tensors %s and %s overlap", g->path,
                              e[i - 1].name, e[i].name);
        }
    }
    return BT_OK;
}

/* offsets: relative to the data section. An unsupported type has an unknown size and is only
 * checked to begin inside. */
static enum bt_status place_tensors(struct bt_gguf *g, struct reader *r, struct extent *e)
{
    uint64_t align;
    enum bt_status st = alignment(g, r, &align);

    if (st != BT_OK) {
        return st;
    }
    uint64_t begin = (r->pos + align - 1) & ~(align - 1);
    uint64_t avail = begin <= r->end ? r->end - begin : 0;
    for (size_t i = 0; i < g->n_tensors; i++) {
        struct bt_tensor *t = &g->tensors[i];
        uint64_t off = e[i].begin, other;
        if (off % align != 0) {
            return bt_err_set(r->err, BT_ERR_INVALID,
                              "%s: tensor %s: offset %" PRIu64 " is not a multiple of %" PRIu64,
                              r->path, t->name, off, align);
        }
        if (off > avail || t->bytes > avail - off) {
            return bt_err_set(r->err, BT_ERR_INVALID,
                              "%s: tensor %s: %zu bytes at offset %" PRIu64 " are outside the "
                              "file's %" PRIu64 " bytes of data",
                              r->path, t->name, t->bytes, off, avail);
        }
        if (bt_map_get(&g->by_name, t->name, strlen(t->name), &other)) {
            return bt_err_set(r->err, BT_ERR_INVALID, "%s: tensor %s appears twice", r->path,
                              t->name);
        }
        if (bt_map_put(&g->by_name, t->name, strlen(t->name), i) != BT_OK) {
            return bt_err_set(r->err, BT_ERR_NOMEM, "%s: out of memory", r->path);
        }
        if (t->supported) {
            t->data = r->base + begin + off;
        }
        e[i].end = off + t->bytes;
        e[i].name = t->name;
    }
    return check_overlaps(g, e, g->n_tensors, r->err);
}

static enum bt_status read_tensors(struct bt_gguf *g, struct reader *r, uint64_t n)
{
    struct extent *e = bt_calloc((size_t)n + 1, sizeof(*e));
    enum bt_status st = BT_OK;

    g->tensors = bt_calloc((size_t)n + 1, sizeof(*g->tensors));
    if (e == NULL || g->tensors == NULL) {
        bt_free(e);
        return bt_err_set(r->err, BT_ERR_NOMEM, "%s: out of memory", r->path);
    }
    for (uint64_t i = 0; i < n && st == BT_OK; i++) {
        st = read_tensor(g, r, &g->tensors[i], &e[i].begin);
        g->n_tensors += st == BT_OK;
    }
    if (st == BT_OK) {
        st = place_tensors(g, r, e);
    }
    bt_free(e);
    return st;
}

static enum bt_status read_header(struct bt_gguf *g, struct reader *r)
{
    uint64_t magic = 0, version = 0, n_tensors = 0, n_values = 0;
    enum bt_status st = read_uint(r, 4, &magic);

    if (st != BT_OK || magic != 0x46554747) {
        return bt_err_set(r->err, BT_ERR_INVALID, "%s: byte 0: not a GGUF file", r->path);
    }
    st = read_uint(r, 4, &version);
    if (st == BT_OK && (version & 0xffff) == 0) {
        return bt_err_set(r->err, BT_ERR_UNSUPPORTED, "%s: byte 4: big-endian GGUF", r->path);
    }
    if (st == BT_OK && version != 2 && version != 3) {
        return bt_err_set(r->err, BT_ERR_UNSUPPORTED,
                          "%s: byte 4: GGUF version %" PRIu64 ", known are 2 and 3", r->path,
                          version);
    }
    if (st == BT_OK) {
        st = read_uint(r, 8, &n_tensors);
    }
    if (st == BT_OK) {
        st = read_uint(r, 8, &n_values);
    }
    if (st != BT_OK) {
        return st;
    }
    /* Counts are believed only as far as the file's size can back them. */
    if (n_tensors > TENSORS_MAX || n_tensors > r->end / TENSOR_ENTRY_BYTES_MIN) {
        return bt_err_set(r->err, BT_ERR_INVALID,
                          "%s: byte 8: %" PRIu64
                          " tensors do not fit into %zu bytes, or are over %u",
                          r->path, n_tensors, (size_t)r->end, (unsigned)TENSORS_MAX);
    }
    if (n_values > KEYS_MAX || n_values > r->end / KEY_ENTRY_BYTES_MIN) {
        return bt_err_set(r->err, BT_ERR_INVALID,
                          "%s: byte 16: %" PRIu64
                          " metadata keys do not fit into %zu bytes, or are over %u",
                          r->path, n_values, (size_t)r->end, (unsigned)KEYS_MAX);
    }
    st = read_values(g, r, n_values);
    return st == BT_OK ? read_tensors(g, r, n_tensors) : st;
}

enum bt_status bt_gguf_open(const char *path, struct bt_gguf **out, struct bt_err *err)
{
    struct bt_gguf *g = bt_calloc(1, sizeof(*g));
    enum bt_status st;

    if (g == NULL || (g->path = bt_strdup(path)) == NULL) {
        bt_free(g);
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", path);
    }
    bt_arena_init(&g->arena, ARENA_BYTES_MAX);
    bt_map_init(&g->by_key, false);
    bt_map_init(&g->by_name, false);
    st = bt_file_map_open(&g->map, path, HEADER_BYTES_MIN, err);
    if (st == BT_OK) {
        struct bt_err own;
        struct reader r = {g->path, g->map.data, 0, g->map.bytes, err != NULL ? err : &own};
        st = read_header(g, &r);
    }
    if (st != BT_OK) {
        bt_gguf_close(g);
        return st;
    }
    *out = g;
    return BT_OK;
}

void bt_gguf_close(struct bt_gguf *g)
{
    if (g == NULL) {
        return;
    }
    bt_map_fini(&g->by_name);
    bt_map_fini(&g->by_key);
    bt_free(g->tensors);
    bt_free(g->values);
    bt_arena_fini(&g->arena);
    bt_file_map_close(&g->map);
    bt_free(g->path);
    bt_free(g);
}

const char *bt_gguf_path(const struct bt_gguf *g)
{
    return g->path;
}

size_t bt_gguf_value_count(const struct bt_gguf *g)
{
    return g->n_values;
}

const struct bt_gguf_value *bt_gguf_value_at(const struct bt_gguf *g, size_t i)
{
    BT_ASSERT(i < g->n_values);
    return &g->values[i];
}

size_t bt_gguf_tensor_count(const struct bt_gguf *g)
{
    return g->n_tensors;
}

const struct bt_tensor *bt_gguf_tensor_at(const struct bt_gguf *g, size_t i)
{
    BT_ASSERT(i < g->n_tensors);
    return &g->tensors[i];
}

const struct bt_tensor *bt_gguf_tensor_find(const struct bt_gguf *g, const char *name)
{
    uint64_t i;

    return bt_map_get(&g->by_name, name, strlen(name), &i) ? &g->tensors[i] : NULL;
}

const struct bt_gguf_value *bt_gguf_find(const struct bt_gguf *g, const char *key)
{
    uint64_t i;

    return bt_map_get(&g->by_key, key, strlen(key), &i) ? &g->values[i] : NULL;
}

/* ---- directories ---- */

void bt_gguf_hint(const char *dir, struct bt_err *err)
{
    DIR *d = opendir(dir);
    const struct dirent *e;
    size_t used = strlen(err->msg);

    while (d != NULL && (e = readdir(d)) != NULL) {
        size_t n = strlen(e->d_name);

        if (n > 5 && strcmp(e->d_name + n - 5, ".gguf") == 0) {
            (void)snprintf(err->msg + used, sizeof(err->msg) - used,
                           "; %s lies there: give the path of that file", e->d_name);
            break;
        }
    }
    if (d != NULL) {
        (void)closedir(d);
    }
}
