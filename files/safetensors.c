/* Reads safetensors headers and keeps the files mapped. Owns every check of a header and of a shard
 * index; refuses to know what a tensor is for. Element types that the kernels have no use for are
 * kept by name and size only. */

#include "files/safetensors.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "base/arena.h"
#include "base/assert.h"
#include "base/buf.h"
#include "base/hash.h"
#include "base/mem.h"
#include "files/json_file.h"
#include "files/map.h"

enum {
    HEADER_BYTES_MAX = 100 * 1000 * 1000, /* the format's own limit */
    INDEX_BYTES_MAX = 100 * 1000 * 1000,
    SHARDS_MAX = 1024,
    TENSORS_MAX = 4 * 1000 * 1000,
    NAME_BYTES_MAX = 1024,
};
static const size_t ARENA_BYTES_MAX = (size_t)1 << 30; /* names and paths */

struct st_type {
    const char *name;
    uint32_t bits;
    bool supported;
    enum bt_dtype dtype;
};

static const struct st_type types[] = {
    {"F32", 32, true, BT_DTYPE_F32},     {"F16", 16, true, BT_DTYPE_F16},
    {"BF16", 16, true, BT_DTYPE_BF16},   {"F64", 64, false, BT_DTYPE_F32},
    {"I64", 64, false, BT_DTYPE_F32},    {"U64", 64, false, BT_DTYPE_F32},
    {"I32", 32, false, BT_DTYPE_F32},    {"U32", 32, false, BT_DTYPE_F32},
    {"I16", 16, false, BT_DTYPE_F32},    {"U16", 16, false, BT_DTYPE_F32},
    {"I8", 8, false, BT_DTYPE_F32},      {"U8", 8, false, BT_DTYPE_F32},
    {"BOOL", 8, false, BT_DTYPE_F32},    {"F8_E4M3", 8, false, BT_DTYPE_F32},
    {"F8_E5M2", 8, false, BT_DTYPE_F32}, {"F8_E8M0", 8, false, BT_DTYPE_F32},
    {"F4", 4, false, BT_DTYPE_F32},      {"C64", 64, false, BT_DTYPE_F32},
};

struct bt_st {
    struct bt_file_map maps[SHARDS_MAX];
    size_t n_maps;
    struct bt_tensor *tensors;
    size_t n_tensors, cap_tensors;
    struct bt_map by_name;
    struct bt_arena arena;
};

static const struct st_type *find_type(const char *name)
{
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        if (strcmp(types[i].name, name) == 0) {
            return &types[i];
        }
    }
    return NULL;
}

static struct bt_tensor *push_tensor(struct bt_st *s)
{
    if (s->n_tensors == s->cap_tensors) {
        size_t cap = s->cap_tensors == 0 ? 256 : s->cap_tensors * 2;
        struct bt_tensor *p = bt_realloc(s->tensors, cap * sizeof(*p));
        if (p == NULL) {
            return NULL;
        }
        s->tensors = p;
        s->cap_tensors = cap;
    }
    struct bt_tensor *t = &s->tensors[s->n_tensors++];
    *t = (struct bt_tensor){0};
    return t;
}

/* Shape and the bytes that it asks for. */
static enum bt_status read_shape(struct bt_tensor *t, const json_t *shape, uint32_t bits,
                                 struct bt_err *err)
{
    uint64_t n_bits = bits;

    if (!json_is_array(shape) || json_array_size(shape) > BT_TENSOR_DIMS_MAX) {
        return bt_err_set(err, BT_ERR_INVALID, "shape is not an array of at most %d numbers",
                          BT_TENSOR_DIMS_MAX);
    }
    t->n_dims = (uint32_t)json_array_size(shape);
    for (uint32_t i = 0; i < t->n_dims; i++) {
        const json_t *d = json_array_get(shape, i);
        if (!json_is_integer(d) || json_integer_value(d) < 0) {
            return bt_err_set(err, BT_ERR_INVALID, "shape[%u] is not a size", i);
        }
        t->shape[i] = (uint64_t)json_integer_value(d);
        if (__builtin_mul_overflow(n_bits, t->shape[i], &n_bits)) {
            return bt_err_set(err, BT_ERR_INVALID, "shape overflows at dimension %u", i);
        }
    }
    if (n_bits % 8 != 0) {
        return bt_err_set(err, BT_ERR_INVALID, "shape does not fill whole bytes");
    }
    t->bytes = (size_t)(n_bits / 8);
    return BT_OK;
}

static enum bt_status read_entry(struct bt_tensor *t, const json_t *entry, const uint8_t *data,
                                 size_t data_bytes, struct bt_err *err)
{
    const json_t *off = json_object_get(entry, "data_offsets");
    const char *type_name = json_string_value(json_object_get(entry, "dtype"));

    if (!json_is_object(entry) || type_name == NULL) {
        return bt_err_set(err, BT_ERR_INVALID, "no dtype");
    }
    const struct st_type *type = find_type(type_name);
    if (type == NULL) {
        return bt_err_set(err, BT_ERR_INVALID, "unknown dtype \"%.32s\"", type_name);
    }
    t->type_name = type->name;
    t->supported = type->supported;
    t->dtype = type->dtype;
    enum bt_status st = read_shape(t, json_object_get(entry, "shape"), type->bits, err);
    if (st != BT_OK) {
        return st;
    }
    if (!json_is_array(off) || json_array_size(off) != 2 ||
        !json_is_integer(json_array_get(off, 0)) || !json_is_integer(json_array_get(off, 1))) {
        return bt_err_set(err, BT_ERR_INVALID, "data_offsets is not a pair of integers");
    }
    long long begin = json_integer_value(json_array_get(off, 0));
    long long end = json_integer_value(json_array_get(off, 1));
    if (begin < 0 || end < begin || (uint64_t)end > data_bytes) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "data_offsets [%lld, %lld] are outside the file's %zu bytes of data",
                          begin, end, data_bytes);
    }
    if ((uint64_t)(end - begin) != t->bytes) {
        return bt_err_set(err, BT_ERR_INVALID, "data_offsets hold %lld bytes, the shape needs %zu",
                          end - begin, t->bytes);
    }
    t->data = data + begin;
    return BT_OK;
}

static int by_data(const void *a, const void *b)
{
    const struct bt_tensor *x = a, *y = b;
    uintptr_t p = (uintptr_t)x->data, q = (uintptr_t)y->data;

    if (p != q) {
        return p < q ? -1 : 1;
    }
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static enum bt_status check_overlaps(struct bt_tensor *t, size_t n, struct bt_err *err)
{
    if (n > 1) {
        qsort(t, n, sizeof(*t), by_data);
    }
    for (size_t i = 1; i < n; i++) {
        if ((const uint8_t *)t[i - 1].data + t[i - 1].bytes > (const uint8_t *)t[i].data) {
            return bt_err_set(err, BT_ERR_INVALID, "%s: tensors %s and %s overlap", t[i].file,
                              t[i - 1].name, t[i].name);
        }
    }
    return BT_OK;
}

static enum bt_status read_tensors(struct bt_st *s, const char *file, const json_t *header,
                                   const uint8_t *data, size_t data_bytes, struct bt_err *err)
{
    size_t first = s->n_tensors;
    const char *name;
    json_t *entry;

    json_object_foreach((json_t *)(uintptr_t)header, name, entry)
    {
        if (strcmp(name, "__metadata__") == 0) {
            continue;
        }
        if (strlen(name) > NAME_BYTES_MAX || s->n_tensors >= TENSORS_MAX) {
            return bt_err_set(err, BT_ERR_INVALID,
                              "%s: a tensor name over %d bytes, or over %d tensors", file,
                              NAME_BYTES_MAX, TENSORS_MAX);
        }
        struct bt_tensor *t = push_tensor(s);
        if (t == NULL || (t->name = bt_arena_strndup(&s->arena, name, strlen(name))) == NULL) {
            return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", file);
        }
        t->file = file;
        enum bt_status st = read_entry(t, entry, data, data_bytes, err);
        if (st != BT_OK) {
            (void)bt_err_prefix(err, "%s: tensor %s", file, name);
            return st;
        }
    }
    return check_overlaps(s->tensors + first, s->n_tensors - first, err);
}

static enum bt_status open_file(struct bt_st *s, const char *path, struct bt_err *err)
{
    char *file = bt_arena_strndup(&s->arena, path, strlen(path));
    struct bt_file_map *m = &s->maps[s->n_maps];
    uint64_t header_bytes = 0;
    json_t *header = NULL;

    if (file == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", path);
    }
    enum bt_status st = bt_file_map_open(m, path, 8, err);
    if (st != BT_OK) {
        return st;
    }
    s->n_maps++;
    for (unsigned i = 0; i < 8; i++) {
        header_bytes |= (uint64_t)m->data[i] << (8 * i);
    }
    if (header_bytes > HEADER_BYTES_MAX || header_bytes > m->bytes - 8) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "%s: byte 0: header of %llu bytes (file: %zu, limit: %d)", path,
                          (unsigned long long)header_bytes, m->bytes, HEADER_BYTES_MAX);
    }
    st = bt_json_parse(path, (const char *)m->data + 8, (size_t)header_bytes, &header, err);
    if (st != BT_OK) {
        return st;
    }
    if (!json_is_object(header)) {
        st = bt_err_set(err, BT_ERR_INVALID, "%s: byte 8: the header is no JSON object", path);
    } else {
        st = read_tensors(s, file, header, m->data + 8 + header_bytes,
                          m->bytes - 8 - (size_t)header_bytes, err);
    }
    json_decref(header);
    return st;
}

static enum bt_status build_names(struct bt_st *s, struct bt_err *err)
{
    for (size_t i = 0; i < s->n_tensors; i++) {
        const struct bt_tensor *t = &s->tensors[i];
        uint64_t other;
        if (bt_map_get(&s->by_name, t->name, strlen(t->name), &other)) {
            return bt_err_set(err, BT_ERR_INVALID, "%s: tensor %s is in %s too", t->file, t->name,
                              s->tensors[other].file);
        }
        if (bt_map_put(&s->by_name, t->name, strlen(t->name), i) != BT_OK) {
            return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", t->file);
        }
    }
    return BT_OK;
}

/* Opens every distinct shard of weight_map, in order of first mention. */
static enum bt_status open_shards(struct bt_st *s, const char *dir, const char *index,
                                  const json_t *weight_map, struct bt_map *seen, struct bt_err *err)
{
    const char *name;
    json_t *v;

    json_object_foreach((json_t *)(uintptr_t)weight_map, name, v)
    {
        const char *file = json_string_value(v);
        uint64_t other;
        if (file == NULL || file[0] == '\0' || file[0] == '.' || strchr(file, '/') != NULL ||
            strlen(file) > NAME_BYTES_MAX) {
            return bt_err_set(err, BT_ERR_INVALID, "%s: weight_map.%.256s is no plain file name",
                              index, name);
        }
        if (bt_map_get(seen, file, strlen(file), &other)) {
            continue;
        }
        if (s->n_maps == SHARDS_MAX) {
            return bt_err_set(err, BT_ERR_INVALID, "%s: over %d files", index, SHARDS_MAX);
        }
        struct bt_buf path = {0};
        bt_buf_addf(&path, "%s/%s", dir, file);
        enum bt_status st = path.failed || bt_map_put(seen, file, strlen(file), s->n_maps) != BT_OK
                                ? bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", index)
                                : open_file(s, path.data, err);
        bt_buf_fini(&path);
        if (st != BT_OK) {
            return st;
        }
    }
    return BT_OK;
}

/* Every entry of the index must be where the index says. */
static enum bt_status check_index(const struct bt_st *s, const char *index,
                                  const json_t *weight_map, struct bt_err *err)
{
    const char *name;
    json_t *v;

    json_object_foreach((json_t *)(uintptr_t)weight_map, name, v)
    {
        const struct bt_tensor *t = bt_st_find(s, name);
        const char *base = t == NULL ? NULL : strrchr(t->file, '/');
        if (base == NULL || strcmp(base + 1, json_string_value(v)) != 0) {
            return bt_err_set(err, BT_ERR_INVALID, "%s: tensor %.256s is not in %.128s", index,
                              name, json_string_value(v));
        }
    }
    return BT_OK;
}

static enum bt_status open_index(struct bt_st *s, const char *dir, const char *index,
                                 struct bt_err *err)
{
    json_t *root;
    struct bt_map seen;
    enum bt_status st = bt_json_file_read(index, INDEX_BYTES_MAX, &root, err);

    if (st != BT_OK) {
        return st;
    }
    const json_t *weight_map = json_object_get(root, "weight_map");
    bt_map_init(&seen, false);
    if (!json_is_object(weight_map)) {
        st = bt_err_set(err, BT_ERR_INVALID, "%s: no object weight_map", index);
    } else {
        st = open_shards(s, dir, index, weight_map, &seen, err);
    }
    if (st == BT_OK) {
        st = build_names(s, err);
    }
    if (st == BT_OK) {
        st = check_index(s, index, weight_map, err);
    }
    bt_map_fini(&seen);
    json_decref(root);
    return st;
}

static enum bt_status open_dir(struct bt_st *s, const char *dir, struct bt_err *err)
{
    struct bt_buf single = {0}, index = {0};
    struct stat sb;
    enum bt_status st;

    bt_buf_addf(&single, "%s/model.safetensors", dir);
    bt_buf_addf(&index, "%s/model.safetensors.index.json", dir);
    if (single.failed || index.failed) {
        st = bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", dir);
    } else if (stat(single.data, &sb) == 0) {
        st = open_file(s, single.data, err);
        st = st == BT_OK ? build_names(s, err) : st;
    } else if (stat(index.data, &sb) == 0) {
        st = open_index(s, dir, index.data, err);
    } else {
        st = bt_err_set(err, BT_ERR_NOT_FOUND,
                        "%s: neither model.safetensors nor model.safetensors.index.json", dir);
    }
    bt_buf_fini(&single);
    bt_buf_fini(&index);
    return st;
}

enum bt_status bt_st_open(const char *path, struct bt_st **out, struct bt_err *err)
{
    struct stat sb;
    struct bt_st *s = bt_calloc(1, sizeof(*s));
    enum bt_status st;

    if (s == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", path);
    }
    bt_arena_init(&s->arena, ARENA_BYTES_MAX);
    bt_map_init(&s->by_name, false);
    if (stat(path, &sb) == 0 && S_ISDIR(sb.st_mode)) {
        st = open_dir(s, path, err);
    } else {
        st = open_file(s, path, err);
        st = st == BT_OK ? build_names(s, err) : st;
    }
    if (st != BT_OK) {
        bt_st_close(s);
        return st;
    }
    *out = s;
    return BT_OK;
}

void bt_st_close(struct bt_st *s)
{
    if (s == NULL) {
        return;
    }
    for (size_t i = 0; i < s->n_maps; i++) {
        bt_file_map_close(&s->maps[i]);
    }
    bt_map_fini(&s->by_name);
    bt_arena_fini(&s->arena);
    bt_free(s->tensors);
    bt_free(s);
}

size_t bt_st_count(const struct bt_st *s)
{
    return s->n_tensors;
}

const struct bt_tensor *bt_st_at(const struct bt_st *s, size_t i)
{
    BT_ASSERT(i < s->n_tensors);
    return &s->tensors[i];
}

const struct bt_tensor *bt_st_find(const struct bt_st *s, const char *name)
{
    uint64_t i;

    return bt_map_get(&s->by_name, name, strlen(name), &i) ? &s->tensors[i] : NULL;
}
