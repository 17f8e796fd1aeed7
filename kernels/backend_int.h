#ifndef BT_KERNELS_BACKEND_INT_H
#define BT_KERNELS_BACKEND_INT_H

/* What a backend implements. Each context and each weight begins with the structs below; the rest of them belongs to
 * the backend. Signatures and meaning are those of kernels/backend.h. */

#include "kernels/backend.h"

struct bt_backend_ops {
    void (*destroy)(struct bt_kctx *k);
    void *(*alloc)(struct bt_kctx *k, size_t bytes);
    void (*free)(struct bt_kctx *k, void *dev, size_t bytes);
    void (*write)(struct bt_kctx *k, void *dev, const void *host, size_t bytes);
    void (*copy)(struct bt_kctx *k, void *dev, const void *from, size_t bytes);
    void (*read)(struct bt_kctx *k, void *host, const void *dev, size_t bytes);
    /* All NULL: memory of the heap, and read. */
    void *(*host_alloc)(struct bt_kctx *k, size_t bytes);
    void (*host_free)(struct bt_kctx *k, void *p, size_t bytes);
    void (*fetch)(struct bt_kctx *k, void *host, const void *dev, size_t bytes);
    void *(*host)(struct bt_kctx *k, void *dev);
    enum bt_status (*sync)(struct bt_kctx *k);
    /* Both NULL: calls are done when they return. */
    uint32_t (*mark)(struct bt_kctx *k);
    enum bt_status (*wait)(struct bt_kctx *k, uint32_t mark);
    /* All NULL: no steps. */
    uint32_t (*step_begin)(struct bt_kctx *k, const struct bt_k_step *s);
    enum bt_status (*step_end)(struct bt_kctx *k, bool keep);
    void (*step_forget)(struct bt_kctx *k, const void *owner);
    /* NULL: no mover. The others are there with it. */
    enum bt_status (*mover_create)(struct bt_kctx *k, const struct bt_k_mover_opts *o,
                                   struct bt_k_mover **out, struct bt_err *err);
    void (*mover_destroy)(struct bt_k_mover *m);
    void (*mover_enter)(struct bt_k_mover *m);
    uint8_t *(*mover_slot)(struct bt_k_mover *m, uint32_t slot);
    void (*mover_start)(struct bt_k_mover *m, uint32_t slot, void *dev, size_t bytes,
                        bool to_device);
    void (*mover_go)(struct bt_k_mover *m);
    enum bt_status (*mover_done)(struct bt_k_mover *m, uint32_t slot, bool wait);
    size_t (*panel_bytes)(struct bt_kctx *k, const struct bt_k_weight_desc *desc); /* NULL: 0 */
    const char *panel_layout; /* with panel_bytes */
    enum bt_status (*weight_create)(struct bt_kctx *k, const struct bt_k_weight_desc *desc,
                                    struct bt_kweight **out, struct bt_err *err);
    void (*weight_destroy)(struct bt_kctx *k, struct bt_kweight *w);
    void (*embed)(struct bt_kctx *k, float *y, const struct bt_kweight *table, const uint32_t *ids,
                  uint32_t n_ids, float scale);
    void (*gemm)(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                 const struct bt_kweight *w, const float *bias, uint32_t n_rows);
    /* NULL: gemm, one after the other */
    void (*gemm_all)(struct bt_kctx *k, const struct bt_k_product *products, uint32_t n,
                     const float *x, size_t ldx, uint32_t n_rows);
    void (*rmsnorm)(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                    const float *w, float w_offset, float eps, uint32_t n_rows, uint32_t n_sub,
                    uint32_t dim);
    void (*rope)(struct bt_kctx *k, float *x, size_t ldx, const float *cos, const float *sin,
                 uint32_t n_rows, uint32_t n_heads, uint32_t head_dim, uint32_t rot_dim,
                 bool interleaved);
    void (*kv_store)(struct bt_kctx *k, const struct bt_k_kv *kv, const float *key, size_t ldk,
                     const float *value, size_t ldv, const struct bt_k_span *spans,
                     uint32_t n_spans);
    void (*attention)(struct bt_kctx *k, const struct bt_k_attn *a, const struct bt_k_kv *kv,
                      const struct bt_k_span *spans, uint32_t n_spans);
    void (*glu)(struct bt_kctx *k, float *y, size_t ldy, const float *gate, size_t ldg,
                const float *up, size_t ldu, uint32_t n_rows, uint32_t n_cols, enum bt_k_act act);
    void (*add)(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                uint32_t n_rows, uint32_t n_cols);
    void (*softcap)(struct bt_kctx *k, float *x, size_t ldx, float cap, uint32_t n_rows,
                    uint32_t n_cols);
    void (*gather_rows)(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                        const uint32_t *rows, uint32_t n, uint32_t n_cols);
    enum bt_status (*moe_reserve)(struct bt_kctx *k, const struct bt_k_moe *moe, uint32_t n_rows);
    void (*moe_ffn)(struct bt_kctx *k, float *out, const float *x, const float *logits,
                    const struct bt_k_moe *moe, uint32_t n_rows);
    /* All NULL: no sampling here. */
    enum bt_status (*sample_reserve)(struct bt_kctx *k, uint32_t n_rows, uint32_t vocab);
    void (*sample)(struct bt_kctx *k, float *logits, const struct bt_k_draw *draws, uint32_t n);
    const struct bt_sampled *(*sampled)(const struct bt_kctx *k);
};

struct bt_kctx {
    const struct bt_backend_ops *ops;
    const char *numerics; /* static storage */
    char describe[64];
};

struct bt_kweight {
    size_t packed_bytes;
};

struct bt_k_mover {
    const struct bt_backend_ops *ops;
};

#endif
