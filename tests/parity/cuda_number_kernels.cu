/* Kernels of the conversions' test. */

#include "tests/parity/cuda_number_kernels_int.h"
#include "kernels/cuda/cuda_numbers_int.cuh"

static __global__ void from_f8(float *to)
{
    to[threadIdx.x] = float_of_f8(threadIdx.x);
}

extern "C" void number_test_f8(struct cuda_ctx *c, float *to)
{
    BT_LAUNCH(c, (from_f8), 1, 256, 0, to);
}

static __global__ void to_f8(uint32_t *to, const float *from, uint32_t n)
{
    const size_t at = thread_index();

    if (at < n) {
        to[at] = f8_of_float(from[at]);
    }
}

extern "C" void number_test_to_f8(struct cuda_ctx *c, uint32_t *to, const float *from, uint32_t n)
{
    BT_LAUNCH(c, (to_f8), cuda_blocks(n, 256), 256, 0, to, from, n);
}
