#ifndef BT_KERNELS_CUDA_PRODUCT_INT_H
#define BT_KERNELS_CUDA_PRODUCT_INT_H

/* Which rows a block of a product's kernel works on: of one matrix, or of one expert among many. */

#include "kernels/cuda/cuda_device_int.cuh"

struct tile {
    uint32_t row0, row1; /* output rows; none: row0 == row1 */
    uint32_t expert;
};

/* The tile of blockIdx.y, of `rows` output rows: of the whole output, or within one expert's rows. */
static __device__ __forceinline__ struct tile find_tile(const struct cuda_product &p, uint32_t rows)
{
    struct tile t = {blockIdx.y * rows, p.n_rows, 0};

    if (p.experts == NULL) {
        t.row1 = t.row0 + rows < p.n_rows ? t.row0 + rows : p.n_rows;
        return t;
    }
    for (uint32_t e = 0, skip = blockIdx.y; e < p.n_experts; e++) {
        const uint32_t start = p.start[e], n = p.start[e + 1] - start,
                       tiles = (n + rows - 1) / rows;
        if (skip < tiles) {
            t.row0 = start + skip * rows;
            t.row1 = t.row0 + rows < start + n ? t.row0 + rows : start + n;
            t.expert = e;
            return t;
        }
        skip -= tiles;
    }
    t.row0 = t.row1 = 0;
    return t;
}

#endif
