/* Calls that work row by row: splits the rows among the threads; a row is always one thread's. The arithmetic is in
 * isa_rows.inc. */

#include "kernels/cpu/cpu_int.h"

#include <string.h>

struct rows_run {
    const struct cpu_isa *isa;
    float *y;
    const float *x, *x2;
    size_t ldy, ldx, ldx2;
    const float *w;
    float a, b;
    uint32_t n_sub, n;
    enum bt_k_act act;
    const uint32_t *ids;
};

static void embed_rows(void *arg, const struct cpu_weight *w, uint32_t first, uint32_t last)
{
    const struct rows_run *r = arg;

    for (uint32_t m = first; m < last; m++) {
        float *y = r->y + (size_t)m * r->ldy;
        BT_ASSERT(r->ids[m] < w->n_rows);
        cpu_dequant(y, w->raw + (size_t)r->ids[m] * w->raw_row_bytes, w->dtype, w->n_cols);
        if (r->a < 1.0F || r->a > 1.0F) {
            for (uint32_t i = 0; i < w->n_cols; i++) {
                y[i] *= r->a;
            }
        }
    }
}

struct embed_run {
    struct rows_run rows;
    const struct cpu_weight *w;
};

static void embed_range(void *arg, uint32_t first, uint32_t last)
{
    struct embed_run *r = arg;
    embed_rows(&r->rows, r->w, first, last);
}

void cpu_embed(struct bt_kctx *k, float *y, const struct bt_kweight *table, const uint32_t *ids,
               uint32_t n_ids, float scale)
{
    const struct cpu_weight *w = cpu_weight_of(table);
    struct embed_run run = {.rows = {.y = y, .ldy = w->n_cols, .ids = ids, .a = scale}, .w = w};

    BT_ASSERT(w->raw != NULL);
    cpu_for_range(cpu_of(k), n_ids, w->n_cols, embed_range, &run);
}

static void rmsnorm_range(void *arg, uint32_t first, uint32_t last)
{
    const struct rows_run *r = arg;

    for (uint32_t m = first; m < last; m++) {
        for (uint32_t s = 0; s < r->n_sub; s++) {
            r->isa->rmsnorm(r->y + (size_t)m * r->ldy + (size_t)s * r->n,
                            r->x + (size_t)m * r->ldx + (size_t)s * r->n, r->w, r->a, r->b, r->n);
        }
    }
}

void cpu_rmsnorm(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                 const float *w, float w_offset, float eps, uint32_t n_rows, uint32_t n_sub,
                 uint32_t dim)
{
    struct rows_run run = {.isa = cpu_of(k)->isa,
                           .y = y,
                           .ldy = ldy,
                           .x = x,
                           .ldx = ldx,
                           .w = w,
                           .a = w_offset,
                           .b = eps,
                           .n_sub = n_sub,
                           .n = dim};

    BT_ASSERT(dim > 0);
    cpu_for_range(cpu_of(k), n_rows, (size_t)n_sub * dim, rmsnorm_range, &run);
}

struct rope_run {
    const struct cpu_isa *isa;
    float *x;
    size_t ldx;
    const float *cos, *sin;
    uint32_t n_heads, head_dim, rot_dim;
    bool interleaved;
};

static void rope_range(void *arg, uint32_t first, uint32_t last)
{
    const struct rope_run *r = arg;

    for (uint32_t m = first; m < last; m++) {
        size_t angle = (size_t)m * (r->rot_dim / 2);
        for (uint32_t h = 0; h < r->n_heads; h++) {
            r->isa->rope(r->x + (size_t)m * r->ldx + (size_t)h * r->head_dim, r->cos + angle,
                         r->sin + angle, r->rot_dim, r->interleaved);
        }
    }
}

void cpu_rope(struct bt_kctx *k, float *x, size_t ldx, const float *cos, const float *sin,
              uint32_t n_rows, uint32_t n_heads, uint32_t head_dim, uint32_t rot_dim,
              bool interleaved)
{
    struct rope_run run = {.isa = cpu_of(k)->isa,
                           .x = x,
                           .ldx = ldx,
                           .cos = cos,
                           .sin = sin,
                           .n_heads = n_heads,
                           .head_dim = head_dim,
                           .rot_dim = rot_dim,
                           .interleaved = interleaved};

    BT_ASSERT(rot_dim % 2 == 0 && rot_dim <= head_dim);
    cpu_for_range(cpu_of(k), n_rows, (size_t)n_heads * rot_dim, rope_range, &run);
}

struct store_run {
    const struct cpu_ctx *ctx;
    const struct bt_k_kv *kv;
    const struct bt_k_span *span;
    const float *key, *value;
    size_t ldk, ldv;
};

/* bf16 as attention will read it, where that reads all as bf16. */
static void store_row(const struct cpu_ctx *c, void *to, const float *from, uint32_t n,
                      enum bt_dtype t)
{
    if (t == BT_DTYPE_BF16 && c->attn != NULL) {
        c->attn->round(to, from, n);
    } else {
        c->isa->round_store(to, from, n, t);
    }
}

static void store_range(void *arg, uint32_t first, uint32_t last)
{
    const struct store_run *r = arg;
    const struct bt_k_kv *kv = r->kv;
    size_t row_bytes = (size_t)kv->head_dim * bt_dtype_block_bytes(kv->dtype);

    for (uint32_t i = first; i < last; i++) {
        uint32_t pos = r->span->pos + i;
        uint8_t *page =
            (uint8_t *)kv->base + (size_t)r->span->pages[pos / kv->page_tokens] * kv->page_stride;
        const float *key = r->key + (size_t)(r->span->row + i) * r->ldk;
        const float *value = r->value + (size_t)(r->span->row + i) * r->ldv;
        for (uint32_t h = 0; h < kv->n_kv_heads; h++) {
            size_t at = ((size_t)h * kv->page_tokens + pos % kv->page_tokens) * row_bytes;
            size_t v_half = (size_t)kv->n_kv_heads * kv->page_tokens * row_bytes;
            store_row(r->ctx, page + at, key + (size_t)h * kv->head_dim, kv->head_dim, kv->dtype);
            store_row(r->ctx, page + v_half + at, value + (size_t)h * kv->head_dim, kv->head_dim,
                      kv->dtype);
        }
    }
}

void cpu_kv_store(struct bt_kctx *k, const struct bt_k_kv *kv, const float *key, size_t ldk,
                  const float *value, size_t ldv, const struct bt_k_span *spans, uint32_t n_spans)
{
    BT_ASSERT(bt_dtype_is_kv(kv->dtype) && kv->page_tokens > 0);
    for (uint32_t s = 0; s < n_spans; s++) {
        struct store_run run = {.ctx = cpu_of(k),
                                .kv = kv,
                                .span = &spans[s],
                                .key = key,
                                .value = value,
                                .ldk = ldk,
                                .ldv = ldv};
        cpu_for_range(cpu_of(k), spans[s].n, 2U * (size_t)kv->n_kv_heads * kv->head_dim,
                      store_range, &run);
    }
}

static void glu_range(void *arg, uint32_t first, uint32_t last)
{
    const struct rows_run *r = arg;

    for (uint32_t m = first; m < last; m++) {
        r->isa->glu(r->y + (size_t)m * r->ldy, r->x + (size_t)m * r->ldx,
                    r->x2 + (size_t)m * r->ldx2, r->n, r->act);
    }
}

void cpu_glu(struct bt_kctx *k, float *y, size_t ldy, const float *gate, size_t ldg,
             const float *up, size_t ldu, uint32_t n_rows, uint32_t n_cols, enum bt_k_act act)
{
    struct rows_run run = {.isa = cpu_of(k)->isa,
                           .y = y,
                           .ldy = ldy,
                           .x = gate,
                           .ldx = ldg,
                           .x2 = up,
                           .ldx2 = ldu,
                           .n = n_cols,
                           .act = act};

    cpu_for_range(cpu_of(k), n_rows, 4 * (size_t)n_cols, glu_range, &run);
}

static void add_range(void *arg, uint32_t first, uint32_t last)
{
    const struct rows_run *r = arg;

    for (uint32_t m = first; m < last; m++) {
        r->isa->add(r->y + (size_t)m * r->ldy, r->x + (size_t)m * r->ldx, r->n);
    }
}

void cpu_add(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx, uint32_t n_rows,
             uint32_t n_cols)
{
    struct rows_run run = {
        .isa = cpu_of(k)->isa, .y = y, .ldy = ldy, .x = x, .ldx = ldx, .n = n_cols};

    cpu_for_range(cpu_of(k), n_rows, n_cols, add_range, &run);
}

static void softcap_range(void *arg, uint32_t first, uint32_t last)
{
    const struct rows_run *r = arg;

    for (uint32_t m = first; m < last; m++) {
        r->isa->softcap(r->y + (size_t)m * r->ldy, r->a, r->n);
    }
}

void cpu_softcap(struct bt_kctx *k, float *x, size_t ldx, float cap, uint32_t n_rows,
                 uint32_t n_cols)
{
    struct rows_run run = {.isa = cpu_of(k)->isa, .y = x, .ldy = ldx, .a = cap, .n = n_cols};

    BT_ASSERT(cap > 0.0F);
    cpu_for_range(cpu_of(k), n_rows, 4 * (size_t)n_cols, softcap_range, &run);
}

static void gather_range(void *arg, uint32_t first, uint32_t last)
{
    const struct rows_run *r = arg;

    for (uint32_t i = first; i < last; i++) {
        memcpy(r->y + (size_t)i * r->ldy, r->x + (size_t)r->ids[i] * r->ldx, r->n * sizeof(float));
    }
}

void cpu_gather_rows(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                     const uint32_t *rows, uint32_t n, uint32_t n_cols)
{
    struct rows_run run = {.y = y, .ldy = ldy, .x = x, .ldx = ldx, .ids = rows, .n = n_cols};

    cpu_for_range(cpu_of(k), n, n_cols, gather_range, &run);
}
