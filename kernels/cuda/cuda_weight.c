/* Weights on their way from a mapped file into device memory: sent in pieces, packed there. */

#include "kernels/cuda/cuda_int.h"

#include "base/mem.h"

#define STAGE_BYTES                                                                                \
    ((size_t)32 << 20) /* raw rows on the device at a time, if one panel has not more */

size_t cuda_row_bytes(enum bt_dtype dtype, uint32_t n_cols)
{
    uint32_t values = bt_dtype_block_values(dtype);
    size_t n =
        values == 1 ? (n_cols + (size_t)CUDA_BLOCK - 1) / CUDA_BLOCK * CUDA_BLOCK : n_cols / values;

    return n * bt_dtype_block_bytes(dtype);
}

uint32_t cuda_unit(enum bt_dtype dtype)
{
    /* Rows of 16-bit values are padded to 32 of them. */
    return bt_dtype_block_values(dtype) == 1 || bt_dtype_block_bytes(dtype) % 4 == 0 ? 4 : 2;
}

static enum bt_status send_perm(struct cuda_ctx *c, struct cuda_weight *w,
                                const struct bt_k_weight_desc *d, struct bt_err *err)
{
    size_t bytes = d->n_cols * sizeof(uint32_t);

    if (d->perm == NULL) {
        return BT_OK;
    }
    enum bt_status st =
        cuda_status(cudaMalloc((void **)&w->perm, bytes), "memory of a weight", err);
    if (st == BT_OK) {
        st =
            cuda_status(cudaMemcpyAsync(w->perm, d->perm, bytes, cudaMemcpyHostToDevice, c->stream),
                        "order of inputs", err);
    }
    w->view.perm = w->perm;
    return st;
}

/* Sends and packs panels through a stage on the device. */
static enum bt_status send_rows(struct cuda_ctx *c, struct cuda_weight *w,
                                const struct bt_k_weight_desc *d, struct bt_err *err)
{
    size_t raw =
        (size_t)d->n_cols / bt_dtype_block_values(d->dtype) * bt_dtype_block_bytes(d->dtype);
    size_t panel = raw * CUDA_PANEL,
           per_panel = (size_t)w->view.row_units * w->view.unit * CUDA_PANEL;
    uint32_t step = (uint32_t)(STAGE_BYTES / panel),
             n_panels = (d->n_rows + CUDA_PANEL - 1) / CUDA_PANEL;
    void *stage = NULL;

    step = step == 0 ? 1 : step < n_panels ? step : n_panels;
    enum bt_status st =
        cuda_status(cudaMalloc(&stage, panel * step), "memory to load weights", err);
    for (uint32_t p = 0, n; p < n_panels && st == BT_OK; p += n) {
        n = n_panels - p < step ? n_panels - p : step;
        uint32_t row = p * CUDA_PANEL, left = d->n_rows - row;
        uint32_t rows = left < n * CUDA_PANEL ? left : n * CUDA_PANEL;
        st = cuda_status(cudaMemcpyAsync(stage, (const uint8_t *)d->data + row * raw, rows * raw,
                                         cudaMemcpyHostToDevice, c->stream),
                         "loading a weight", err);
        if (st == BT_OK) {
            cuda_pack(c, (uint8_t *)w->data + p * per_panel, stage, raw, rows, n, &w->view);
        }
    }
    enum bt_status done = cuda_status(cudaStreamSynchronize(c->stream), "loading a weight", err);
    (void)cuda_ok(c, cudaFree(stage), "device memory");
    return st == BT_OK && done == BT_OK ? c->fault : st != BT_OK ? st : done;
}

static uint32_t kind_of(const struct cuda_ctx *c, const struct bt_k_weight_desc *d)
{
    if (c->mma && d->for_gemm && d->dtype == BT_DTYPE_BF16) {
        return CUDA_KIND_TILES;
    }
    if (d->dtype < BT_DTYPE_Q4_0) {
        return (uint32_t)d->dtype;
    }
    return c->mma && c->blas == NULL && d->for_gemm ? CUDA_KIND_BLOCK_TILES : CUDA_KIND_BLOCKS;
}

/* Into panels. */
static enum bt_status load(struct cuda_ctx *c, struct cuda_weight *w,
                           const struct bt_k_weight_desc *d, struct bt_err *err)
{
    enum bt_status st = send_perm(c, w, d, err);

    return st == BT_OK ? send_rows(c, w, d, err) : st;
}

enum bt_status cuda_weight_make(struct cuda_ctx *c, const struct bt_k_weight_desc *d,
                                const struct cuda_view *view, size_t bytes,
                                cuda_weight_load_fn *load_rows, struct bt_kweight **out,
                                struct bt_err *err)
{
    if (d->n_rows == 0 || d->n_cols == 0 || d->n_cols % bt_dtype_block_values(d->dtype) != 0) {
        return bt_err_set(err, BT_ERR_INVALID, "a %s matrix of %u rows of %u values",
                          bt_dtype_name(d->dtype), d->n_rows, d->n_cols);
    }
    struct cuda_weight *w = bt_calloc(1, sizeof(*w));
    if (w == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for a weight");
    }
    cuda_enter(c);
    w->view = *view;
    w->for_gemm = d->for_gemm;
    w->for_embed = d->for_embed;
    w->base.packed_bytes = bytes;
    enum bt_status st = cuda_status(cudaMalloc(&w->data, bytes), "memory of a weight", err);
    w->view.data = w->data;
    if (st == BT_OK) {
        st = load_rows(c, w, d, err);
    }
    if (st != BT_OK) {
        cuda_weight_destroy(&c->base, &w->base);
        return st;
    }
    *out = &w->base;
    return BT_OK;
}

enum bt_status cuda_weight_create(struct bt_kctx *k, const struct bt_k_weight_desc *d,
                                  struct bt_kweight **out, struct bt_err *err)
{
    struct cuda_ctx *c = cuda_of(k);
    const uint32_t n_blocks = (d->n_cols + CUDA_BLOCK - 1) / CUDA_BLOCK;
    const bool f8 = d->dtype == BT_DTYPE_GF8;
    const uint32_t group = !f8 ? n_blocks : d->group < CUDA_BLOCK ? 1 : d->group / CUDA_BLOCK;
    size_t row_bytes = f8 ? (size_t)(n_blocks / group) * (4 + group * (size_t)CUDA_BLOCK)
                          : cuda_row_bytes(d->dtype, d->n_cols);

    if (group == 0 || n_blocks % group != 0) {
        return bt_err_set(err, BT_ERR_INVALID, "%u columns in groups of %u", d->n_cols, d->group);
    }
    const struct cuda_view v = {.n_rows = d->n_rows,
                                .n_cols = d->n_cols,
                                .n_blocks = n_blocks,
                                .group_blocks = group,
                                .unit = cuda_unit(d->dtype),
                                .row_units = (uint32_t)(row_bytes / cuda_unit(d->dtype)),
                                .dtype = (uint32_t)d->dtype,
                                .kind = kind_of(c, d)};

    return cuda_weight_make(
        c, d, &v, (d->n_rows + (size_t)CUDA_PANEL - 1) / CUDA_PANEL * CUDA_PANEL * row_bytes, load,
        out, err);
}

void cuda_weight_destroy(struct bt_kctx *k, struct bt_kweight *weight)
{
    struct cuda_weight *w = (struct cuda_weight *)(void *)weight;

    cuda_enter(cuda_of(k));
    (void)cuda_ok(cuda_of(k), cudaFree(w->data), "device memory");
    (void)cuda_ok(cuda_of(k), cudaFree(w->perm), "device memory");
    bt_free(w);
}
