#ifndef BT_MODEL_EXPORT_H
#define BT_MODEL_EXPORT_H

/* A model as a GGUF file, or as a Hugging Face directory.
 *
 * GGUF: metadata in GGUF's keys, tensors under GGUF's names, laid out as its readers expect them (rows of
 * q and k permuted for llama files, 1 added to norms that store less). The tokenizer's keys are text/'s
 * (text/tokenizer_export.h). Calls: add; the caller's own keys; bt_gguf_writer_begin; data. One thread. */

#include "base/buf.h"
#include "files/gguf_write.h"
#include "files/safetensors_write.h"
#include "model/model.h"

struct bt_export;

/* Everything but the data. m: open, not loaded, and there until destroy. dtype: a type that bt_quantize_known knows.
 * Matrices get it, except: vectors and routers stay F32; the output matrix (or an embedding table that is both) gets Q8_0
 * instead of four or five bits; rows that are no whole blocks get F16. From a GGUF file all keys are copied; from a HF
 * directory they are written. BT_ERR_UNSUPPORTED: GGUF has no words for it, which err names. */
enum bt_status bt_export_create(const struct bt_model *m, enum bt_dtype dtype,
                                struct bt_gguf_writer *w, struct bt_export **out,
                                struct bt_err *err) BT_NODISCARD;
/* The tensors of model.safetensors, and config.json (text to be written by the caller; appended to config). dtype: F32, F16
 * or BF16, for matrices and vectors; or GF8: e4m3 with an F32 scale for each row (compressed-tensors, float-quantized) for matrices,
 * but not embeddings, the output matrix and routers, which keep their plain type or are BF16, as vectors do. From a GGUF file for llama, qwen2
 * and qwen3 without windows, from a HF directory (GF8 only; its config.json is taken over) for all families;
 * others are BT_ERR_UNSUPPORTED, as is what is quantised already in a HF directory. The tokenizer's files are text/'s. */
enum bt_status bt_export_create_hf(const struct bt_model *m, enum bt_dtype dtype,
                                   struct bt_st_writer *w, struct bt_buf *config,
                                   struct bt_export **out, struct bt_err *err) BT_NODISCARD;
/* Reads, rounds and writes all tensors. k: reads weights of any type. progress(arg, fraction) may be NULL. Values that are
 * not finite are refused for block types. */
enum bt_status bt_export_data(struct bt_export *e, struct bt_kctx *k,
                              void (*progress)(void *arg, double fraction), void *arg,
                              struct bt_err *err) BT_NODISCARD;
void bt_export_destroy(struct bt_export *e);

/* The two compute the same layers, whatever their weights are: checks what was written by opening it again. */
enum bt_status bt_export_check(const struct bt_model *a, const struct bt_model *b,
                               struct bt_err *err) BT_NODISCARD;

#endif
