#ifndef BT_MODEL_MODEL_H
#define BT_MODEL_MODEL_H

/* A model: its configuration, its weights (mapped files, packed by the backend), and the forward
 * pass over a ragged batch and a paged KV cache. One file per architecture family
 * (model/family_*.c) over shared blocks. Opening and loading may happen on any thread; forward
 * belongs to the thread that owns the kernel context. */

#include <stdbool.h>
#include <stdint.h>
#include "base/status.h"
#include "kernels/backend.h"

#define BT_MODEL_KV_GROUPS_MAX 4
#define BT_MODEL_EOS_MAX       16

struct bt_model;
struct bt_model_ws; /* activations for one forward pass at a time */

/* Layers that share one page table: full attention, or one window size. */
struct bt_model_kv_group {
    uint32_t window; /* 0: full attention; else tokens visible, the token itself included */
    uint32_t n_layers;
};

struct bt_model_info {
    char arch[32];  /* "llama", "qwen3", … */
    char name[128]; /* base name of the path, without .gguf */
    uint32_t n_layers, dim, n_heads, n_kv_heads, head_dim, vocab;
    uint32_t context; /* positions the model may use (max_position_embeddings) */
    uint32_t n_groups;
    struct bt_model_kv_group groups[BT_MODEL_KV_GROUPS_MAX];
    const uint8_t *layer_group;  /* [n_layers]: group of each layer; owned by the model */
    const uint32_t *layer_index; /* [n_layers]: index of the layer inside its group */
    uint32_t n_eos;
    uint32_t eos[BT_MODEL_EOS_MAX]; /* generation_config.json, else config.json / GGUF metadata */
    int64_t bos;                    /* -1: none */
    uint64_t fingerprint; /* config and weights (names, shapes, dtypes, and content samples of every
                             tensor): equal models give equal values on every machine */
    uint64_t n_params;
    uint64_t weight_bytes; /* as stored in the files */
};

/* Opens a HF directory or a .gguf file: parses and checks configuration and every tensor; maps,
 * does not read. Errors name the file, field or tensor. */
enum bt_status bt_model_open(const char *path, struct bt_model **out,
                             struct bt_err *err) BT_NODISCARD;
const struct bt_model_info *bt_model_info(const struct bt_model *m);
/* The numerics class (kernels/backend.h) of a backend for the types that most of its matrices have: cpu-int8 for blocks of
 * integers, cpu-bf16 for BF16, else cpu-f32; cuda-bf16 for both, else cuda-f32. The same on every machine. Static storage. */
const char *bt_model_numerics(const struct bt_model *m, const char *backend);

struct bt_model_load_opts {
    /* Where packed weights are kept for every process of this machine that serves the model (files/panel_file.h). NULL, or
     * fewer bytes of them than panel_bytes_min: in memory of this process. */
    const char *panel_dir;
    uint64_t panel_bytes_min;
    void (*progress)(void *arg, double fraction); /* 0 to 1; may be NULL */
    void *arg;
};

/* What the weights take in memory besides the mapped files, after loading. */
struct bt_model_packed {
    uint64_t bytes;
    bool shared;    /* in a cache file; else in memory of this process */
    bool reused;    /* the file was there: nothing was packed */
    bool failed;    /* a file was wanted and could not be had */
    char note[640]; /* the file, or why there is none */
};

/* Packs the weights for k, which must outlive the model. opts may be NULL. */
enum bt_status bt_model_load(struct bt_model *m, struct bt_kctx *k,
                             const struct bt_model_load_opts *opts,
                             struct bt_err *err) BT_NODISCARD;
const struct bt_model_packed *bt_model_packed(const struct bt_model *m);
void bt_model_destroy(struct bt_model *m);

/* The KV pool as the forward pass sees it: per group, layer i of the group begins at base + i *
 * layer_stride. */
struct bt_model_kv {
    uint32_t page_tokens;
    enum bt_dtype dtype;
    struct {
        void *base; /* device */
        size_t layer_stride, page_stride;
    } groups[BT_MODEL_KV_GROUPS_MAX];
};

struct bt_model_span {
    uint32_t n;   /* tokens */
    uint32_t pos; /* absolute position of the first */
    const uint32_t
        *pages[BT_MODEL_KV_GROUPS_MAX]; /* host page tables, indexed by absolute page number */
};

struct bt_model_batch {
    uint32_t n_tokens;
    const uint32_t
        *tokens; /* [n_tokens], spans one after the other; each < vocab (caller checks) */
    uint32_t n_spans;
    const struct bt_model_span *spans;
    uint32_t n_out;           /* rows whose logits are wanted */
    const uint32_t *out_rows; /* [n_out] row numbers in the batch */
    float *logits;            /* host [n_out, vocab], f32; NULL: they stay on the device */
    /* Called when the calls that store K, V of `layer` for all tokens of the batch are made; they are done when bt_k_wait() says
     * so of a mark made here. Returning false abandons the pass (logits are not written; KV of the tokens is half
     * written and must be recomputed). May be NULL. */
    bool (*layer_done)(void *arg, uint32_t layer);
    /* Called when all calls of a pass that was not abandoned are made, before they are waited for: those made here are waited
     * for together with them. logits: device [n_out, vocab], to be read or changed by calls made here. May be NULL. */
    void (*queued)(void *arg, float *logits);
    bool paced; /* layer_done calls bt_k_mark or bt_k_wait */
    void *arg;
};

/* Workspace for up to max_tokens rows and max_out logits rows. */
enum bt_status bt_model_ws_create(struct bt_model *m, uint32_t max_tokens, uint32_t max_out,
                                  struct bt_model_ws **out, struct bt_err *err) BT_NODISCARD;
void bt_model_ws_destroy(struct bt_model_ws *ws);

/* BT_OK; BT_ERR_CANCELLED when layer_done said so; BT_ERR_DEVICE. */
enum bt_status bt_model_forward(struct bt_model *m, struct bt_model_ws *ws,
                                const struct bt_model_kv *kv,
                                const struct bt_model_batch *batch) BT_NODISCARD;

#endif
