/* The safetensors writer: a JSON header in memory, data streamed behind it. */

#include "files/safetensors_write.h"

#include <inttypes.h>
#include <string.h>
#include "base/assert.h"
#include "base/buf.h"
#include "base/mem.h"
#include "files/out_file.h"

struct bt_st_writer {
    struct bt_out_file out;
    struct bt_buf header;
    uint64_t data_bytes, written;
};

enum bt_status bt_st_writer_create(const char *path, struct bt_st_writer **out, struct bt_err *err)
{
    struct bt_st_writer *w = bt_calloc(1, sizeof(*w));

    if (w == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", path);
    }
    enum bt_status st = bt_out_file_open(&w->out, path, err);
    if (st != BT_OK) {
        bt_st_writer_destroy(w);
        return st;
    }
    (void)bt_buf_adds(&w->header, "{\"__metadata__\":{\"format\":\"pt\"}");
    *out = w;
    return BT_OK;
}

void bt_st_writer_destroy(struct bt_st_writer *w)
{
    if (w != NULL) {
        bt_out_file_close(&w->out);
        bt_buf_fini(&w->header);
        bt_free(w);
    }
}

static void add_tensor(struct bt_st_writer *w, const char *name, const char *type, uint64_t bytes,
                       uint32_t n_dims, const uint64_t *shape)
{
    (void)bt_buf_addc(&w->header, ',');
    (void)bt_buf_add_json_str(&w->header, name, strlen(name));
    (void)bt_buf_addf(&w->header, ":{\"dtype\":\"%s\",\"shape\":[", type);
    for (uint32_t i = 0; i < n_dims; i++) {
        (void)bt_buf_addf(&w->header, "%s%" PRIu64, i == 0 ? "" : ",", shape[i]);
        bytes *= shape[i];
    }
    (void)bt_buf_addf(&w->header, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", w->data_bytes,
                      w->data_bytes + bytes);
    w->data_bytes += bytes;
}

void bt_st_add_tensor(struct bt_st_writer *w, const char *name, enum bt_dtype dtype,
                      uint32_t n_dims, const uint64_t *shape)
{
    static const char *const types[] = {"F32", "F16", "BF16"};

    BT_ASSERT(dtype <= BT_DTYPE_BF16);
    add_tensor(w, name, types[dtype], bt_dtype_block_bytes(dtype), n_dims, shape);
}

void bt_st_add_f8(struct bt_st_writer *w, const char *name, uint32_t n_dims, const uint64_t *shape)
{
    add_tensor(w, name, "F8_E4M3", 1, n_dims, shape);
}

enum bt_status bt_st_writer_begin(struct bt_st_writer *w, struct bt_err *err)
{
    uint8_t size[8];

    (void)bt_buf_addc(&w->header, '}');
    while (!w->header.failed && w->header.len % 8 != 0) {
        (void)bt_buf_addc(&w->header, ' ');
    }
    if (w->header.failed) {
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", w->out.path);
    }
    for (size_t i = 0; i < 8; i++) {
        size[i] = (uint8_t)((uint64_t)w->header.len >> (8 * i));
    }
    enum bt_status st = bt_out_file_write(&w->out, size, 8, err);
    return st == BT_OK ? bt_out_file_write(&w->out, w->header.data, w->header.len, err) : st;
}

enum bt_status bt_st_writer_data(struct bt_st_writer *w, const void *p, size_t n,
                                 struct bt_err *err)
{
    w->written += n;
    BT_ASSERT(w->written <= w->data_bytes);
    return bt_out_file_write(&w->out, p, n, err);
}

enum bt_status bt_st_writer_finish(struct bt_st_writer *w, struct bt_err *err)
{
    BT_ASSERT(w->written == w->data_bytes);
    return bt_out_file_finish(&w->out, err);
}
