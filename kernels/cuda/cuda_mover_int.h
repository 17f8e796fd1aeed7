#ifndef BT_KERNELS_CUDA_MOVER_INT_H
#define BT_KERNELS_CUDA_MOVER_INT_H

/* What the mover and its kernel have of each other. */

#include "kernels/cuda/cuda_int.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CUDA_MOVES_MAX 256U /* copies of one launch */

/* One of them; addresses. In pinned memory. */
struct cuda_move {
    uint64_t to, from, bytes;
};
/* Puts copies first … first + n - 1 of the ring [ring_n] into the stream, at most CUDA_MOVES_MAX, none longer than bytes_max, which
 * are done in any order. The ring is left alone until they are. */
cudaError_t cuda_move_run(cudaStream_t stream, const struct cuda_move *ring, uint32_t ring_n,
                          uint32_t first, uint32_t n, uint64_t bytes_max);

#ifdef __cplusplus
}
#endif

#endif
