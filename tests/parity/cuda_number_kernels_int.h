#ifndef BT_TESTS_CUDA_NUMBER_KERNELS_INT_H
#define BT_TESTS_CUDA_NUMBER_KERNELS_INT_H

/* Kernels that convert one number each. */

#include "kernels/cuda/cuda_int.h"

#ifdef __cplusplus
extern "C" {
#endif

/* to[i] = the value of e4m3 code i, for all 256; device. */
void number_test_f8(struct cuda_ctx *c, float *to);
/* to[i] = the code of from[i]; device. */
void number_test_to_f8(struct cuda_ctx *c, uint32_t *to, const float *from, uint32_t n);

#ifdef __cplusplus
}
#endif

#endif
