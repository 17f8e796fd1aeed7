#ifndef BT_TESTS_CUDA_TILE_KERNELS_INT_H
#define BT_TESTS_CUDA_TILE_KERNELS_INT_H

/* Kernels of one warp that do one thing with tensor cores, and kernels that break a rule of the execution model each. */

#include "kernels/cuda/cuda_int.h"

#ifdef __cplusplus
extern "C" {
#endif

/* d = c + a b: a [16][16], b [16][8] of 16-bit values, c, d [16][8], all row-major in device memory. */
void tile_test_multiply(struct cuda_ctx *c, float *d, const uint16_t *a, const uint16_t *b,
                        const float *from, bool bf16);
/* What each lane gets of four 8 x 8 matrices [4][8][8] by way of shared memory: out[32][4] words. */
void tile_test_load(struct cuda_ctx *c, uint32_t *out, const uint16_t *from, bool transposed);
/* out[lane] = the value of lane ^ mask, by two ways; -1 where they differ. */
void tile_test_xor(struct cuda_ctx *c, float *out, const float *from, uint32_t mask);
/* out = from, n (a multiple of 32, to 128) times 16 bytes, by way of shared memory in groups of 32; where keep is 0: zeros. */
void tile_test_copy(struct cuda_ctx *c, uint32_t *out, const uint32_t *from, const uint32_t *keep,
                    uint32_t n);

enum tile_fault {
    TILE_LANE_MISSING,      /* half of the lanes do not come to an operation */
    TILE_OTHER_OPERATION,   /* lanes meet in two operations */
    TILE_BARRIER_IN_BRANCH, /* half of the lanes wait at a barrier, the others in an operation */
    TILE_COPY_READ_EARLY,   /* a copy's place is read before it is there */
    TILE_COPY_NO_BARRIER,   /* what another thread has copied, without a barrier */
    TILE_COPY_LEFT,         /* a thread ends with a copy in flight */
    TILE_NO_WARP_SYNC,      /* a place is written anew without asking those who read it */
    TILE_ROW_ODD,           /* a matrix row that is not aligned */
    TILE_FAULTS
};
void tile_test_fault(struct cuda_ctx *c, enum tile_fault fault, float *out);

#ifdef __cplusplus
}
#endif

#endif
