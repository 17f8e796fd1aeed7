#ifndef BT_MODEL_EXPORT_INT_H
#define BT_MODEL_EXPORT_INT_H

/* export_hf.c: config.json for weights of dtype, or why there is none. */
enum bt_status bt_export_config_json(const struct bt_model *m, enum bt_dtype dtype,
                                     struct bt_buf *out, struct bt_err *err) BT_NODISCARD;

struct bt_slot;
typedef bool bt_export_plain_fn(const struct bt_model *m, const struct bt_slot *s);
/* The same of m's HF directory, or made for its GGUF file, with a quantization_config that says which of its matrices are not
 * quantised: those that plain says of. */
enum bt_status bt_export_config_f8(const struct bt_model *m, bt_export_plain_fn *plain,
                                   struct bt_buf *out, struct bt_err *err) BT_NODISCARD;

/* export_keys.c: what a model's configuration is in GGUF's keys. */

#include "base/buf.h"
#include "files/gguf_write.h"
#include "model/model_int.h"

enum bt_status bt_export_keys(const struct bt_model *m, struct bt_gguf_writer *w,
                              struct bt_err *err) BT_NODISCARD;
/* All keys of m's GGUF file but those that the new one has of its own. */
enum bt_status bt_export_copy_keys(const struct bt_model *m, struct bt_gguf_writer *w) BT_NODISCARD;
void bt_export_file_type(struct bt_gguf_writer *w, enum bt_dtype dtype);
/* Files of this architecture store q and k for interleaved rotation. */
bool bt_export_interleaves(const struct bt_model *m);
/* *freqs: rope_freqs.weight, by which frequencies are divided, or NULL. bt_free frees it. */
enum bt_status bt_export_freqs(const struct bt_model *m, float **freqs,
                               struct bt_err *err) BT_NODISCARD;

#endif
