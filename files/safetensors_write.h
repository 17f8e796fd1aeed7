#ifndef BT_FILES_SAFETENSORS_WRITE_H
#define BT_FILES_SAFETENSORS_WRITE_H

/* Writes one safetensors file of plain types and e4m3. Calls: create; tensors; begin; their data in the same order; finish. Until
 * then the file has another name (files/out_file.h). One thread. */

#include <stdint.h>
#include "base/dtype.h"
#include "base/status.h"

struct bt_st_writer;

enum bt_status bt_st_writer_create(const char *path, struct bt_st_writer **out,
                                   struct bt_err *err) BT_NODISCARD;
void bt_st_writer_destroy(struct bt_st_writer *w);
/* dtype: F32, F16 or BF16. Running out of memory is told by begin. */
void bt_st_add_tensor(struct bt_st_writer *w, const char *name, enum bt_dtype dtype,
                      uint32_t n_dims, const uint64_t *shape);
/* Of e4m3 codes ("F8_E4M3"), a byte each. */
void bt_st_add_f8(struct bt_st_writer *w, const char *name, uint32_t n_dims, const uint64_t *shape);
enum bt_status bt_st_writer_begin(struct bt_st_writer *w, struct bt_err *err) BT_NODISCARD;
enum bt_status bt_st_writer_data(struct bt_st_writer *w, const void *p, size_t n,
                                 struct bt_err *err) BT_NODISCARD;
/* Asserts that all data came. */
enum bt_status bt_st_writer_finish(struct bt_st_writer *w, struct bt_err *err) BT_NODISCARD;

#endif
