/* Many copies at once, between pages that lie here and there in device memory and slots of pinned host memory, which the device
 * reads and writes by itself (unified addressing). A call of the runtime for each page would cost more than the page: 4 to 64
 * KiB are there in a microsecond or less. Knows no order: cuda_mover.c decides what goes together. */

#include "kernels/cuda/cuda_mover_int.h"
#include "kernels/cuda/cuda_tile_int.cuh"

#define THREADS 256U
#define WARPS   (THREADS / 32)
/* What the bus needs in flight (some 100 KB), and no more: kernels that compute keep the other multiprocessors, and room on these. */
#define BLOCKS 8U
#define PIECE  4096U /* bytes that a warp copies at a time */
#define AHEAD  8U    /* loads of a lane before its first store */

/* The lanes of a warp copy `bytes`, words of T and then the bytes left over. Both addresses are multiples of T's size. */
template <class T>
static __device__ __forceinline__ void copy_words(uint8_t *to, const uint8_t *from, uint32_t bytes,
                                                  uint32_t lane)
{
    const uint32_t n = bytes / (uint32_t)sizeof(T);
    const T *in = (const T *)(const void *)from;
    T *out = (T *)(void *)to;

    for (uint32_t first = lane; first < n; first += 32 * AHEAD) {
        T v[AHEAD];
#pragma unroll
        for (uint32_t j = 0; j < AHEAD; j++) {
            if (first + 32 * j < n) {
                v[j] = in[first + 32 * j];
            }
        }
#pragma unroll
        for (uint32_t j = 0; j < AHEAD; j++) {
            if (first + 32 * j < n) {
                out[first + 32 * j] = v[j];
            }
        }
    }
    for (uint32_t i = n * (uint32_t)sizeof(T) + lane; i < bytes; i += 32) {
        to[i] = from[i];
    }
}

/* Copies first … first + n - 1 of the ring, pieces of them for each warp. n_pieces: of the longest one. */
static __global__ void __launch_bounds__(THREADS)
    move_pages(const struct cuda_move *ring, uint32_t ring_n, uint32_t first, uint32_t n,
               uint32_t n_pieces)
{
    static_assert(CUDA_MOVES_MAX <= THREADS, "a thread for each");
    shared_ptr<uint64_t> list = shared_as<uint64_t>(0);
    const uint32_t t = threadIdx.x;

    /* The list lies in the host's memory: a block goes there once. */
    if (t < n) {
        const struct cuda_move m = ring[(first + t) % ring_n];
        list[3 * t] = m.to;
        list[3 * t + 1] = m.from;
        list[3 * t + 2] = m.bytes;
    }
    __syncthreads();
    for (uint32_t item = blockIdx.x * WARPS + t / 32; item < n * n_pieces;
         item += gridDim.x * WARPS) {
        const uint32_t i = item / n_pieces;
        const uint64_t at = (uint64_t)(item % n_pieces) * PIECE, bytes = list[3 * i + 2];
        if (at < bytes) {
            const uint64_t to = list[3 * i] + at, from = list[3 * i + 1] + at;
            const uint32_t part = bytes - at < PIECE ? (uint32_t)(bytes - at) : PIECE;
            if ((to | from) % sizeof(words4) == 0) {
                copy_words<words4>((uint8_t *)to, (const uint8_t *)from, part, t % 32);
            } else if ((to | from) % sizeof(uint32_t) == 0) {
                copy_words<uint32_t>((uint8_t *)to, (const uint8_t *)from, part, t % 32);
            } else {
                copy_words<uint8_t>((uint8_t *)to, (const uint8_t *)from, part, t % 32);
            }
        }
    }
}

extern "C" cudaError_t cuda_move_run(cudaStream_t stream, const struct cuda_move *ring,
                                     uint32_t ring_n, uint32_t first, uint32_t n,
                                     uint64_t bytes_max)
{
    const uint32_t n_pieces = cuda_blocks(bytes_max, PIECE);
    const uint32_t blocks = cuda_blocks((size_t)n * n_pieces, WARPS);

    BT_ASSERT(n <= CUDA_MOVES_MAX && n_pieces <= UINT32_MAX / CUDA_MOVES_MAX);
    if (blocks == 0) {
        return cudaSuccess;
    }
    return BT_LAUNCH_IN(stream, move_pages, blocks < BLOCKS ? blocks : BLOCKS, THREADS,
                        3 * n * sizeof(uint64_t), ring, ring_n, first, n, n_pieces);
}
