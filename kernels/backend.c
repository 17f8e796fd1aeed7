/* The public face of a backend: every call goes through the context's table. Owns nothing; knows no device. */

#include "kernels/backend.h"

#include "base/assert.h"
#include "base/mem.h"
#include "kernels/backend_int.h"

const char *const bt_k_isas[] = {"auto",        "plain",       "avx2", "avx512",
                                 "avx512-vnni", "avx512-bf16", "neon"};
const char *const bt_k_classes[] = {"cpu-f32", "cpu-int8", "cpu-bf16"};

const char *bt_k_numerics(const struct bt_kctx *k)
{
    return k->numerics;
}

const char *bt_k_describe(const struct bt_kctx *k)
{
    return k->describe;
}

void bt_k_destroy(struct bt_kctx *k)
{
    if (k != NULL) {
        k->ops->destroy(k);
    }
}

void *bt_k_alloc(struct bt_kctx *k, size_t bytes)
{
    return k->ops->alloc(k, bytes);
}

void bt_k_free(struct bt_kctx *k, void *dev, size_t bytes)
{
    if (dev != NULL) {
        k->ops->free(k, dev, bytes);
    }
}

void bt_k_write(struct bt_kctx *k, void *dev, const void *host, size_t bytes)
{
    k->ops->write(k, dev, host, bytes);
}

void bt_k_read(struct bt_kctx *k, void *host, const void *dev, size_t bytes)
{
    k->ops->read(k, host, dev, bytes);
}

void *bt_k_host_alloc(struct bt_kctx *k, size_t bytes)
{
    return k->ops->host_alloc != NULL ? k->ops->host_alloc(k, bytes) : bt_alloc_aligned(64, bytes);
}

void bt_k_host_free(struct bt_kctx *k, void *p, size_t bytes)
{
    if (p == NULL) {
        return;
    }
    if (k->ops->host_free != NULL) {
        k->ops->host_free(k, p, bytes);
    } else {
        bt_free(p);
    }
}

void bt_k_fetch(struct bt_kctx *k, void *host, const void *dev, size_t bytes)
{
    (k->ops->fetch != NULL ? k->ops->fetch : k->ops->read)(k, host, dev, bytes);
}

void bt_k_copy(struct bt_kctx *k, void *dev, const void *from, size_t bytes)
{
    k->ops->copy(k, dev, from, bytes);
}

void *bt_k_host(struct bt_kctx *k, void *dev)
{
    return k->ops->host(k, dev);
}

enum bt_status bt_k_sync(struct bt_kctx *k)
{
    return k->ops->sync(k);
}

uint32_t bt_k_mark(struct bt_kctx *k)
{
    return k->ops->mark != NULL ? k->ops->mark(k) : 0;
}

enum bt_status bt_k_wait(struct bt_kctx *k, uint32_t mark)
{
    return k->ops->wait != NULL ? k->ops->wait(k, mark) : BT_OK;
}

uint32_t bt_k_step_begin(struct bt_kctx *k, const struct bt_k_step *s)
{
    BT_ASSERT(s->n_rows > 0 && s->n_rows <= s->rows_max);
    return k->ops->step_begin != NULL ? k->ops->step_begin(k, s) : 0;
}

enum bt_status bt_k_step_end(struct bt_kctx *k, bool keep)
{
    BT_ASSERT(k->ops->step_end != NULL);
    return k->ops->step_end(k, keep);
}

void bt_k_step_forget(struct bt_kctx *k, const void *owner)
{
    if (k->ops->step_forget != NULL) {
        k->ops->step_forget(k, owner);
    }
}

enum bt_status bt_k_mover_create(struct bt_kctx *k, const struct bt_k_mover_opts *o,
                                 struct bt_k_mover **out, struct bt_err *err)
{
    BT_ASSERT(o->slot_bytes > 0 && o->n_slots > 0);
    return k->ops->mover_create != NULL
               ? k->ops->mover_create(k, o, out, err)
               : bt_err_set(err, BT_ERR_UNSUPPORTED, "%s: all memory is the host's", k->describe);
}

void bt_k_mover_destroy(struct bt_k_mover *m)
{
    if (m != NULL) {
        m->ops->mover_destroy(m);
    }
}

void bt_k_mover_enter(struct bt_k_mover *m)
{
    m->ops->mover_enter(m);
}

uint8_t *bt_k_mover_slot(struct bt_k_mover *m, uint32_t slot)
{
    return m->ops->mover_slot(m, slot);
}

void bt_k_mover_start(struct bt_k_mover *m, uint32_t slot, void *dev, size_t bytes, bool to_device)
{
    m->ops->mover_start(m, slot, dev, bytes, to_device);
}

void bt_k_mover_go(struct bt_k_mover *m)
{
    m->ops->mover_go(m);
}

enum bt_status bt_k_mover_done(struct bt_k_mover *m, uint32_t slot, bool wait)
{
    return m->ops->mover_done(m, slot, wait);
}

size_t bt_k_panel_bytes(struct bt_kctx *k, const struct bt_k_weight_desc *desc)
{
    return k->ops->panel_bytes != NULL ? k->ops->panel_bytes(k, desc) : 0;
}

const char *bt_k_panel_layout(const struct bt_kctx *k)
{
    return k->ops->panel_layout != NULL ? k->ops->panel_layout : "";
}

enum bt_status bt_k_weight_create(struct bt_kctx *k, const struct bt_k_weight_desc *desc,
                                  struct bt_kweight **out, struct bt_err *err)
{
    return k->ops->weight_create(k, desc, out, err);
}

void bt_k_weight_destroy(struct bt_kctx *k, struct bt_kweight *w)
{
    if (w != NULL) {
        k->ops->weight_destroy(k, w);
    }
}

size_t bt_k_weight_bytes(const struct bt_kweight *w)
{
    return w->packed_bytes;
}

void bt_k_embed(struct bt_kctx *k, float *y, const struct bt_kweight *table, const uint32_t *ids,
                uint32_t n_ids, float scale)
{
    k->ops->embed(k, y, table, ids, n_ids, scale);
}

void bt_k_gemm(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
               const struct bt_kweight *w, const float *bias, uint32_t n_rows)
{
    k->ops->gemm(k, y, ldy, x, ldx, w, bias, n_rows);
}

void bt_k_gemm_all(struct bt_kctx *k, const struct bt_k_product *products, uint32_t n,
                   const float *x, size_t ldx, uint32_t n_rows)
{
    BT_ASSERT(n > 0 && n <= BT_K_PRODUCTS_MAX);
    if (k->ops->gemm_all != NULL) {
        k->ops->gemm_all(k, products, n, x, ldx, n_rows);
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        const struct bt_k_product *p = &products[i];
        k->ops->gemm(k, p->y, p->ldy, x, ldx, p->w, p->bias, n_rows);
    }
}

void bt_k_rmsnorm(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                  const float *w, float w_offset, float eps, uint32_t n_rows, uint32_t n_sub,
                  uint32_t dim)
{
    k->ops->rmsnorm(k, y, ldy, x, ldx, w, w_offset, eps, n_rows, n_sub, dim);
}

void bt_k_rope(struct bt_kctx *k, float *x, size_t ldx, const float *cos, const float *sin,
               uint32_t n_rows, uint32_t n_heads, uint32_t head_dim, uint32_t rot_dim,
               bool interleaved)
{
    k->ops->rope(k, x, ldx, cos, sin, n_rows, n_heads, head_dim, rot_dim, interleaved);
}

void bt_k_kv_store(struct bt_kctx *k, const struct bt_k_kv *kv, const float *key, size_t ldk,
                   const float *value, size_t ldv, const struct bt_k_span *spans, uint32_t n_spans)
{
    k->ops->kv_store(k, kv, key, ldk, value, ldv, spans, n_spans);
}

void bt_k_attention(struct bt_kctx *k, const struct bt_k_attn *a, const struct bt_k_kv *kv,
                    const struct bt_k_span *spans, uint32_t n_spans)
{
    k->ops->attention(k, a, kv, spans, n_spans);
}

void bt_k_glu(struct bt_kctx *k, float *y, size_t ldy, const float *gate, size_t ldg,
              const float *up, size_t ldu, uint32_t n_rows, uint32_t n_cols, enum bt_k_act act)
{
    k->ops->glu(k, y, ldy, gate, ldg, up, ldu, n_rows, n_cols, act);
}

void bt_k_add(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx, uint32_t n_rows,
              uint32_t n_cols)
{
    k->ops->add(k, y, ldy, x, ldx, n_rows, n_cols);
}

void bt_k_softcap(struct bt_kctx *k, float *x, size_t ldx, float cap, uint32_t n_rows,
                  uint32_t n_cols)
{
    k->ops->softcap(k, x, ldx, cap, n_rows, n_cols);
}

void bt_k_gather_rows(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                      const uint32_t *rows, uint32_t n, uint32_t n_cols)
{
    k->ops->gather_rows(k, y, ldy, x, ldx, rows, n, n_cols);
}

enum bt_status bt_k_moe_reserve(struct bt_kctx *k, const struct bt_k_moe *moe, uint32_t n_rows)
{
    return k->ops->moe_reserve(k, moe, n_rows);
}

void bt_k_moe_ffn(struct bt_kctx *k, float *out, const float *x, const float *logits,
                  const struct bt_k_moe *moe, uint32_t n_rows)
{
    k->ops->moe_ffn(k, out, x, logits, moe, n_rows);
}

enum bt_status bt_k_sample_reserve(struct bt_kctx *k, uint32_t n_rows, uint32_t vocab)
{
    return k->ops->sample_reserve != NULL ? k->ops->sample_reserve(k, n_rows, vocab)
                                          : BT_ERR_UNSUPPORTED;
}

void bt_k_sample(struct bt_kctx *k, float *logits, const struct bt_k_draw *draws, uint32_t n)
{
    k->ops->sample(k, logits, draws, n);
}

const struct bt_sampled *bt_k_sampled(const struct bt_kctx *k)
{
    return k->ops->sampled(k);
}
