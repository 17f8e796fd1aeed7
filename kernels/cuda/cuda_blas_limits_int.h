#ifndef BT_KERNELS_CUDA_BLAS_LIMITS_INT_H
#define BT_KERNELS_CUDA_BLAS_LIMITS_INT_H

/* Where the classes of cuBLAS change from own kernels to the library, and how much memory they take; for tests too. */

#include "kernels/backend.h"

#define CUDA_BLAS_FEW        8U  /* rows of x, and fewer: own kernels */
#define CUDA_BLAS_FEW_BLOCKS 32U /* the same with weights in blocks, or with an order of inputs */
#define CUDA_BLAS_WORKSPACE  ((size_t)32 << 20)  /* cuBLASLt's own */
#define CUDA_BLAS_WEIGHTS    ((size_t)128 << 20) /* expanded weights, some rows at a time */
#define CUDA_BLAS_X          ((size_t)128 << 20) /* rounded x, some rows at a time */

/* For tests: use no more than so much of the last two. k: a context of such a class. */
void cuda_blas_limit(struct bt_kctx *k, size_t weight_bytes, size_t x_bytes);
/* For tests: how often the library was asked how to compute a shape. */
uint64_t cuda_blas_asked(struct bt_kctx *k);

#endif
