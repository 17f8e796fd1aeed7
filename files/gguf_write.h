#ifndef BT_FILES_GGUF_WRITE_H
#define BT_FILES_GGUF_WRITE_H

/* Writes a GGUF file, version 3. The order of calls: create; keys and tensors, in any order; data, for the tensors in the
 * order they were added; finish. The file is written beside its place under another name and takes its place in finish,
 * complete, or never. One thread; data and finish block on the disk.
 *
 * Errors of adding (out of memory) stick and are told by begin. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/dtype.h"
#include "base/status.h"
#include "files/gguf.h"

struct bt_gguf_writer;

/* BT_ERR_IO when the file cannot be made. */
enum bt_status bt_gguf_writer_create(const char *path, struct bt_gguf_writer **out,
                                     struct bt_err *err) BT_NODISCARD;
/* Without finish before: nothing is left on the disk. */
void bt_gguf_writer_destroy(struct bt_gguf_writer *w);

void bt_gguf_add_u32(struct bt_gguf_writer *w, const char *key, uint32_t v);
void bt_gguf_add_f32(struct bt_gguf_writer *w, const char *key, float v);
void bt_gguf_add_bool(struct bt_gguf_writer *w, const char *key, bool v);
void bt_gguf_add_str(struct bt_gguf_writer *w, const char *key, const char *s, size_t n);
/* A key of another file, as it stands there. */
void bt_gguf_add_value(struct bt_gguf_writer *w, const struct bt_gguf_value *v);
/* An array of n elements, which follow by bt_gguf_put_*: exactly n of them. */
void bt_gguf_add_array(struct bt_gguf_writer *w, const char *key, enum bt_gguf_type type,
                       uint64_t n);
void bt_gguf_put_str(struct bt_gguf_writer *w, const char *s, size_t n);
void bt_gguf_put_i32(struct bt_gguf_writer *w, int32_t v);
void bt_gguf_put_f32(struct bt_gguf_writer *w, float v);

/* shape: outermost first, as bt_tensor has it. Returns the bytes of its data. dtype: one that files know. */
uint64_t bt_gguf_add_tensor(struct bt_gguf_writer *w, const char *name, enum bt_dtype dtype,
                            uint32_t n_dims, const uint64_t *shape);

/* Writes the header; nothing may be added after it. */
enum bt_status bt_gguf_writer_begin(struct bt_gguf_writer *w, struct bt_err *err) BT_NODISCARD;
/* The next n bytes of the tensors' data. */
enum bt_status bt_gguf_writer_data(struct bt_gguf_writer *w, const void *p, size_t n,
                                   struct bt_err *err) BT_NODISCARD;
/* Asserts that all data came. The file is on the disk and in its place when this succeeds. */
enum bt_status bt_gguf_writer_finish(struct bt_gguf_writer *w, struct bt_err *err) BT_NODISCARD;
/* Where the file is until then: to look at it before it is finished, after all data. */
enum bt_status bt_gguf_writer_flush(struct bt_gguf_writer *w, const char **temp_path,
                                    struct bt_err *err) BT_NODISCARD;

#endif
