/* The GGUF writer: header in memory, data streamed to a file under a temporary name. Owns layout (counts, offsets,
 * alignment); refuses to know what keys and tensors mean. */

#include "files/gguf_write.h"

#include <string.h>
#include "base/assert.h"
#include "base/buf.h"
#include "base/mem.h"
#include "files/out_file.h"

enum { ALIGNMENT = 32, VERSION = 3, HEADER_BYTES = 24 };

struct bt_gguf_writer {
    struct bt_out_file out;
    struct bt_buf keys, infos, sizes; /* sizes: the tensors' bytes, uint64_t each */
    uint64_t n_keys, n_tensors, data_bytes;
    size_t tensor; /* the one whose data comes next */
    uint64_t left; /* bytes missing in it */
    bool begun;
};

/* ggml's numbers. */
static const uint8_t type_ids[] = {
    [BT_DTYPE_F32] = 0,   [BT_DTYPE_F16] = 1,    [BT_DTYPE_BF16] = 30, [BT_DTYPE_Q4_0] = 2,
    [BT_DTYPE_Q4_1] = 3,  [BT_DTYPE_Q5_0] = 6,   [BT_DTYPE_Q5_1] = 7,  [BT_DTYPE_Q8_0] = 8,
    [BT_DTYPE_Q2_K] = 10, [BT_DTYPE_Q3_K] = 11,  [BT_DTYPE_Q4_K] = 12, [BT_DTYPE_Q5_K] = 13,
    [BT_DTYPE_Q6_K] = 14, [BT_DTYPE_IQ4_NL] = 20};

static void put_le(struct bt_buf *b, uint64_t v, size_t n)
{
    uint8_t bytes[8];

    for (size_t i = 0; i < n; i++) {
        bytes[i] = (uint8_t)(v >> (8 * i));
    }
    (void)bt_buf_add(b, bytes, n); /* a failure sticks to the buffer */
}

static void put_text(struct bt_buf *b, const char *s, size_t n)
{
    put_le(b, n, 8);
    (void)bt_buf_add(b, s, n);
}

static uint32_t f32_bits(float v)
{
    uint32_t bits;

    memcpy(&bits, &v, sizeof(bits));
    return bits;
}

enum bt_status bt_gguf_writer_create(const char *path, struct bt_gguf_writer **out,
                                     struct bt_err *err)
{
    struct bt_gguf_writer *w = bt_calloc(1, sizeof(*w));

    if (w == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", path);
    }
    enum bt_status st = bt_out_file_open(&w->out, path, err);
    if (st != BT_OK) {
        bt_gguf_writer_destroy(w);
        return st;
    }
    *out = w;
    return BT_OK;
}

void bt_gguf_writer_destroy(struct bt_gguf_writer *w)
{
    if (w == NULL) {
        return;
    }
    bt_out_file_close(&w->out);
    bt_buf_fini(&w->keys);
    bt_buf_fini(&w->infos);
    bt_buf_fini(&w->sizes);
    bt_free(w);
}

static void begin_key(struct bt_gguf_writer *w, const char *key, enum bt_gguf_type type)
{
    BT_ASSERT(!w->begun);
    put_text(&w->keys, key, strlen(key));
    put_le(&w->keys, (uint64_t)type, 4);
    w->n_keys++;
}

void bt_gguf_add_u32(struct bt_gguf_writer *w, const char *key, uint32_t v)
{
    begin_key(w, key, BT_GGUF_U32);
    put_le(&w->keys, v, 4);
}

void bt_gguf_add_f32(struct bt_gguf_writer *w, const char *key, float v)
{
    begin_key(w, key, BT_GGUF_F32);
    put_le(&w->keys, f32_bits(v), 4);
}

void bt_gguf_add_bool(struct bt_gguf_writer *w, const char *key, bool v)
{
    begin_key(w, key, BT_GGUF_BOOL);
    put_le(&w->keys, v ? 1 : 0, 1);
}

void bt_gguf_add_str(struct bt_gguf_writer *w, const char *key, const char *s, size_t n)
{
    begin_key(w, key, BT_GGUF_STRING);
    put_text(&w->keys, s, n);
}

void bt_gguf_add_value(struct bt_gguf_writer *w, const struct bt_gguf_value *v)
{
    begin_key(w, v->key, v->type);
    if (v->type == BT_GGUF_ARRAY) {
        put_le(&w->keys, (uint64_t)v->elem_type, 4);
        put_le(&w->keys, v->count, 8);
    }
    (void)bt_buf_add(&w->keys, v->data, v->bytes);
}

void bt_gguf_add_array(struct bt_gguf_writer *w, const char *key, enum bt_gguf_type type,
                       uint64_t n)
{
    begin_key(w, key, BT_GGUF_ARRAY);
    put_le(&w->keys, (uint64_t)type, 4);
    put_le(&w->keys, n, 8);
}

void bt_gguf_put_str(struct bt_gguf_writer *w, const char *s, size_t n)
{
    put_text(&w->keys, s, n);
}

void bt_gguf_put_i32(struct bt_gguf_writer *w, int32_t v)
{
    put_le(&w->keys, (uint32_t)v, 4);
}

void bt_gguf_put_f32(struct bt_gguf_writer *w, float v)
{
    put_le(&w->keys, f32_bits(v), 4);
}

static uint64_t padding(uint64_t n)
{
    return (ALIGNMENT - n % ALIGNMENT) % ALIGNMENT;
}

uint64_t bt_gguf_add_tensor(struct bt_gguf_writer *w, const char *name, enum bt_dtype dtype,
                            uint32_t n_dims, const uint64_t *shape)
{
    uint64_t values = 1;

    BT_ASSERT(!w->begun && n_dims > 0 && dtype < sizeof(type_ids));
    put_text(&w->infos, name, strlen(name));
    put_le(&w->infos, n_dims, 4);
    for (uint32_t i = n_dims; i > 0; i--) { /* the contiguous one first */
        put_le(&w->infos, shape[i - 1], 8);
        values *= shape[i - 1];
    }
    put_le(&w->infos, type_ids[dtype], 4);
    put_le(&w->infos, w->data_bytes, 8);
    uint64_t bytes = values / bt_dtype_block_values(dtype) * bt_dtype_block_bytes(dtype);
    (void)bt_buf_add(&w->sizes, &bytes, sizeof(bytes));
    w->data_bytes += bytes + padding(bytes);
    w->n_tensors++;
    return bytes;
}

/* Goes to the next tensor that has data. */
static void next_tensor(struct bt_gguf_writer *w)
{
    while (w->left == 0 && w->tensor < w->n_tensors) {
        memcpy(&w->left, w->sizes.data + w->tensor++ * sizeof(w->left), sizeof(w->left));
    }
}

enum bt_status bt_gguf_writer_begin(struct bt_gguf_writer *w, struct bt_err *err)
{
    static const uint8_t zeros[ALIGNMENT];
    struct bt_buf head = {0};
    enum bt_status st;

    (void)bt_buf_adds(&head, "GGUF");
    put_le(&head, VERSION, 4);
    put_le(&head, w->n_tensors, 8);
    put_le(&head, w->n_keys, 8);
    if (head.failed || w->keys.failed || w->infos.failed || w->sizes.failed) {
        bt_buf_fini(&head);
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", w->out.path);
    }
    st = bt_out_file_write(&w->out, head.data, head.len, err);
    bt_buf_fini(&head);
    st = st == BT_OK ? bt_out_file_write(&w->out, w->keys.data, w->keys.len, err) : st;
    st = st == BT_OK ? bt_out_file_write(&w->out, w->infos.data, w->infos.len, err) : st;
    st = st == BT_OK ? bt_out_file_write(&w->out, zeros,
                                         padding(HEADER_BYTES + w->keys.len + w->infos.len), err)
                     : st;
    w->begun = true;
    next_tensor(w);
    return st;
}

enum bt_status bt_gguf_writer_data(struct bt_gguf_writer *w, const void *p, size_t n,
                                   struct bt_err *err)
{
    static const uint8_t zeros[ALIGNMENT];
    const uint8_t *from = p;
    enum bt_status st = BT_OK;

    while (n > 0 && st == BT_OK) {
        size_t take = n < w->left ? n : (size_t)w->left;
        BT_ASSERT(w->begun && take > 0);
        st = bt_out_file_write(&w->out, from, take, err);
        from += take;
        n -= take;
        w->left -= take;
        if (w->left == 0 && st == BT_OK) {
            uint64_t bytes;
            memcpy(&bytes, w->sizes.data + (w->tensor - 1) * sizeof(bytes), sizeof(bytes));
            st = bt_out_file_write(&w->out, zeros, padding(bytes), err);
            next_tensor(w);
        }
    }
    return st;
}

enum bt_status bt_gguf_writer_flush(struct bt_gguf_writer *w, const char **temp_path,
                                    struct bt_err *err)
{
    BT_ASSERT(w->begun && w->left == 0 && w->tensor == w->n_tensors);
    *temp_path = w->out.temp;
    return bt_out_file_flush(&w->out, err);
}

enum bt_status bt_gguf_writer_finish(struct bt_gguf_writer *w, struct bt_err *err)
{
    BT_ASSERT(w->begun && w->left == 0 && w->tensor == w->n_tensors);
    return bt_out_file_finish(&w->out, err);
}
