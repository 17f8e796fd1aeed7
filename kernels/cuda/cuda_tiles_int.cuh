#ifndef BT_KERNELS_CUDA_TILES_INT_H
#define BT_KERNELS_CUDA_TILES_INT_H

/* What the products on tensor cores share, whatever their weights are. */

#include "kernels/cuda/cuda_product_int.cuh"
#include "kernels/cuda/cuda_tile_int.cuh"

#define THREADS        256U
#define WARPS          (THREADS / 32U)
#define SEGMENT_BLOCKS (CUDA_TILE_SEGMENT / CUDA_BLOCK)
#define BLOCK_WORDS4   64U /* of a tile of weights and a block of K: 2 steps, 32 lanes */
#define TILES_N        8U  /* tiles of outputs of a block of threads */

/* 32 k of row m, this lane's 8 of them: k = 8 (lane % 4) … */
static __device__ __forceinline__ const uint16_t *x_piece(const struct cuda_product &p, uint32_t m,
                                                          uint32_t b, uint32_t piece)
{
    return p.x16 + ((size_t)m * p.w.n_blocks + b) * CUDA_BLOCK + 8 * piece;
}

/* What a block of threads works on: rows and, of experts, whose weight. False: nothing of this kind is there. */
static __device__ __forceinline__ bool find_weight(const struct cuda_product &p,
                                                   const struct tile &t, uint32_t kind,
                                                   struct cuda_view &w)
{
    w = p.w;
    if (t.row0 == t.row1 || p.experts == NULL) {
        return t.row0 != t.row1;
    }
    w = p.experts[t.expert];
    return w.kind == kind;
}

/* A warp none of whose outputs is there only helps to load. */
template <int MT>
static __device__ __forceinline__ bool warp_works(const struct tile &t, uint32_t n_rows)
{
    const uint32_t warp = threadIdx.x / 32;

    return t.row0 + warp / 4 * MT * 8 < t.row1 &&
           (blockIdx.x * TILES_N + warp % 4 * 2) * 16 < n_rows;
}

/* A block of K: warp (i, j) of 4 x 2 has tiles 2 i and 2 i + 1 of the outputs, and rows 8 MT j … w: [TILES_N][BLOCK_WORDS4], a
 * lane's words at `slot` of 32; x: [16 * MT][4]. */
template <int MT>
static __device__ __forceinline__ void multiply_block(shared_ptr<words4> w, uint32_t slot,
                                                      shared_ptr<words4> x, float (*acc)[MT][4])
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    words4 a[2][2];

#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        a[i / 2][i % 2] = w[(warp % 4 * 2 + i / 2) * BLOCK_WORDS4 + i % 2 * 32 + slot];
    }
#pragma unroll
    for (uint32_t m = 0; m < MT; m++) {
        const words4 b = x[(warp / 4 * MT + m) * 32 + lane];
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            tile_multiply<CUDA_KIND_BF16>(acc[i][m], a[i][0].r, b.r);
            tile_multiply<CUDA_KIND_BF16>(acc[i][m], a[i][1].r, b.r + 2);
        }
    }
}

/* A segment of K has ended. */
template <int MT>
static __device__ __forceinline__ void add_segment(float (*total)[MT][4], float (*acc)[MT][4])
{
#pragma unroll
    for (uint32_t i = 0; i < 2 * MT * 4; i++) {
        total[i / 4 / MT][i / 4 % MT][i % 4] += acc[i / 4 / MT][i / 4 % MT][i % 4];
        acc[i / 4 / MT][i / 4 % MT][i % 4] = 0.0F;
    }
}

template <int MT>
static __device__ __forceinline__ void write_tile(const struct cuda_product &p, uint32_t n_rows,
                                                  const struct tile &t, float (*total)[MT][4])
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;

#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
#pragma unroll
        for (uint32_t a = 0; a < MT; a++) {
#pragma unroll
            for (uint32_t j = 0; j < 4; j++) {
                const uint32_t m = t.row0 + (warp / 4 * MT + a) * 8 + lane % 4 * 2 + j % 2,
                               n = (blockIdx.x * TILES_N + warp % 4 * 2 + i) * 16 + lane / 4 +
                                   j / 2 * 8;
                if (m < t.row1 && n < n_rows) {
                    p.y[m * p.ldy + n] =
                        p.bias != NULL ? total[i][a][j] + p.bias[n] : total[i][a][j];
                }
            }
        }
    }
}

#endif
