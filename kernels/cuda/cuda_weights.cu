/* Weights on the device: packing rows of a file for the kernels, and reading single rows for the embedding. */

#include "kernels/cuda/cuda_blocks_int.cuh"

#define THREADS 256U

/* A thread for each unit of each row of the panels. */
template <class U>
static __global__ void pack(U *out, const uint8_t *raw, size_t raw_bytes, uint32_t n_rows, size_t n,
                            uint32_t row_units)
{
    const size_t at = thread_index();

    if (at >= n) {
        return;
    }
    const size_t lane = at % CUDA_PANEL, unit = at / CUDA_PANEL % row_units,
                 row = at / CUDA_PANEL / row_units * CUDA_PANEL + lane;
    uint32_t v = 0;
    for (uint32_t i = 0; i < sizeof(U); i++) { /* of any alignment */
        const size_t byte = unit * sizeof(U) + i;
        if (row < n_rows && byte < raw_bytes) {
            v |= (uint32_t)raw[row * raw_bytes + byte] << 8 * i;
        }
    }
    out[at] = (U)v;
}

/* The same of gf8, whose groups get one scale each: that of their first block. */
static __global__ void pack_f8(uint32_t *out, const uint8_t *raw, size_t raw_bytes, uint32_t n_rows,
                               size_t n, uint32_t row_units, uint32_t group_blocks)
{
    const size_t at = thread_index();

    if (at >= n) {
        return;
    }
    const uint32_t unit = (uint32_t)(at / CUDA_PANEL % row_units), units = 1 + 8 * group_blocks,
                   block = unit / units * group_blocks, in = unit % units;
    const size_t row = at / CUDA_PANEL / row_units * CUDA_PANEL + at % CUDA_PANEL;
    const size_t from =
        row * raw_bytes +
        (in == 0 ? (size_t)block * 36 : (size_t)(block + (in - 1) / 8) * 36 + 4 + (in - 1) % 8 * 4);
    uint32_t v = 0;
    for (uint32_t i = 0; i < 4 && row < n_rows; i++) { /* of any alignment */
        v |= (uint32_t)raw[from + i] << 8 * i;
    }
    out[at] = v;
}

extern "C" void cuda_pack(struct cuda_ctx *c, void *out, const uint8_t *raw, size_t raw_bytes,
                          uint32_t n_rows, uint32_t n_panels, const struct cuda_view *v)
{
    const size_t n = (size_t)n_panels * CUDA_PANEL * v->row_units;
    const uint32_t row_units = v->row_units;

    if (v->kind == CUDA_KIND_TILES) {
        cuda_tiles_pack(c, out, raw, raw_bytes, n_rows, n_panels, v);
    } else if (v->dtype == BT_DTYPE_GF8) {
        const uint32_t group_blocks = v->group_blocks;
        BT_LAUNCH(c, (pack_f8), cuda_blocks(n, THREADS), THREADS, 0, (uint32_t *)out, raw,
                  raw_bytes, n_rows, n, row_units, group_blocks);
    } else if (v->unit == 4) {
        BT_LAUNCH(c, (pack<uint32_t>), cuda_blocks(n, THREADS), THREADS, 0, (uint32_t *)out, raw,
                  raw_bytes, n_rows, n, row_units);
    } else {
        BT_LAUNCH(c, (pack<uint16_t>), cuda_blocks(n, THREADS), THREADS, 0, (uint16_t *)out, raw,
                  raw_bytes, n_rows, n, row_units);
    }
}

/* A thread for each block of 32 values of each row. */
template <int KIND>
static __global__ void embed(float *y, struct cuda_view v, const uint32_t *ids, size_t n,
                             float scale)
{
    const size_t at = thread_index();
    float w[CUDA_BLOCK];

    if (at >= n) {
        return;
    }
    const uint32_t b = (uint32_t)(at % v.n_blocks);
    float *row = y + at / v.n_blocks * v.n_cols;
    weight_block<KIND>(v, ids[at / v.n_blocks], b, w);
#pragma unroll
    for (uint32_t j = 0; j < CUDA_BLOCK; j++) {
        if (b * CUDA_BLOCK + j < v.n_cols) {
            row[b * CUDA_BLOCK + j] = w[j] * scale;
        }
    }
}

extern "C" void cuda_embed(struct bt_kctx *k, float *y, const struct bt_kweight *table,
                           const uint32_t *ids, uint32_t n_ids, float scale)
{
    struct cuda_ctx *c = cuda_of(k);
    const struct cuda_weight *w = cuda_weight_of(table);
    const struct cuda_view v = w->view;
    const uint32_t most = CUDA_SEND_MAX / sizeof(uint32_t);

    BT_ASSERT(w->for_embed);
    for (uint32_t row = 0, m; row < n_ids; row += m) {
        m = n_ids - row < most ? n_ids - row : most;
        for (uint32_t i = 0; i < m; i++) {
            BT_ASSERT(ids[row + i] < v.n_rows);
        }
        const size_t n = (size_t)m * v.n_blocks;
        const uint32_t *dev = (const uint32_t *)cuda_send(c, ids + row, m * sizeof(uint32_t));
        float *to = y + (size_t)row * v.n_cols;
        switch ((enum cuda_kind)v.kind) {
        case CUDA_KIND_F32:
            BT_LAUNCH(c, (embed<CUDA_KIND_F32>), cuda_blocks(n, THREADS), THREADS, 0, to, v, dev, n,
                      scale);
            break;
        case CUDA_KIND_F16:
            BT_LAUNCH(c, (embed<CUDA_KIND_F16>), cuda_blocks(n, THREADS), THREADS, 0, to, v, dev, n,
                      scale);
            break;
        case CUDA_KIND_BF16:
            BT_LAUNCH(c, (embed<CUDA_KIND_BF16>), cuda_blocks(n, THREADS), THREADS, 0, to, v, dev,
                      n, scale);
            break;
        case CUDA_KIND_BLOCKS:
        case CUDA_KIND_BLOCK_TILES:
            BT_LAUNCH(c, (embed<CUDA_KIND_BLOCKS>), cuda_blocks(n, THREADS), THREADS, 0, to, v, dev,
                      n, scale);
            break;
        case CUDA_KIND_TILES:
            BT_LAUNCH(c, (embed<CUDA_KIND_TILES>), cuda_blocks(n, THREADS), THREADS, 0, to, v, dev,
                      n, scale);
            break;
        }
    }
}
