#ifndef BT_KERNELS_CUDA_ATTEND_INT_H
#define BT_KERNELS_CUDA_ATTEND_INT_H

/* What both kinds of attention kernels share: which positions a row sees, and where partial results lie. */

#include "kernels/cuda/cuda_numbers_int.cuh"

#define NONE float_of_bits(0xff800000U) /* minus infinity: the maximum of no scores */

static __device__ __forceinline__ uint32_t first_seen(uint32_t pos, uint32_t window)
{
    return window != 0 && pos >= window ? pos - window + 1 : 0;
}

/* Row `row` of this block's tile and split: its maximum, its sum, its values. */
static __device__ __forceinline__ float *part_row(const struct cuda_attn &a, uint32_t split,
                                                  uint32_t row)
{
    const size_t at = ((size_t)blockIdx.x * a.kv.n_kv_heads + blockIdx.y) * a.n_splits + split;

    return a.part + (at * CUDA_ATTN_ROWS + row) * (a.kv.head_dim + 2);
}

#endif
