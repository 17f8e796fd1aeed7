#ifndef BT_FILES_SAFETENSORS_H
#define BT_FILES_SAFETENSORS_H

/* Safetensors weights: one file, or the shards that model.safetensors.index.json lists. Mapped, not
 * read; the header is checked in full at opening: size, JSON, types, shapes, offsets inside the
 * file and matching the shape, overlaps, duplicate names (also between shards), index entries.
 * Errors name file and tensor. Any thread. */

#include <stddef.h>
#include "base/status.h"
#include "files/tensor.h"

struct bt_st;

/* path: a .safetensors file, or a directory with model.safetensors or model.safetensors.index.json.
 */
enum bt_status bt_st_open(const char *path, struct bt_st **out, struct bt_err *err) BT_NODISCARD;
void bt_st_close(struct bt_st *s);

size_t bt_st_count(const struct bt_st *s);
const struct bt_tensor *bt_st_at(const struct bt_st *s,
                                 size_t i); /* i < count; by file, then by data offset */
const struct bt_tensor *bt_st_find(const struct bt_st *s,
                                   const char *name); /* NULL: no such tensor */

#endif
