#ifndef BT_KERNELS_CUDA_DEVICE_INT_H
#define BT_KERNELS_CUDA_DEVICE_INT_H

/* What kernels may use of CUDA, so that the same source is compiled by nvcc for a device and by a C++ compiler for the
 * emulation (emulation/emu_block_int.h): the built-in indices, __syncthreads, shared memory through shared_as and
 * shared_ptr, and BT_LAUNCH. Whatever else a kernel needs gets a twin here first. */

#include "kernels/cuda/cuda_int.h"

#ifdef BT_CUDA_EMULATED

#include "kernels/cuda/emulation/emu_device_int.cuh"

#else

#include <cuda_runtime.h>

/* A pointer into the block's shared memory. */
template <class T> using shared_ptr = T *;

/* The block's shared memory, from a byte on (a multiple of T's size), as elements of T. */
template <class T> __device__ __forceinline__ T *shared_as(size_t byte)
{
    extern __shared__ float4 bt_shared_memory[];
    return reinterpret_cast<T *>(reinterpret_cast<char *>(bt_shared_memory) + byte);
}

/* Additions of several threads to one word, in any order. */
static __device__ __forceinline__ void shared_add(shared_ptr<uint32_t> p, uint32_t v)
{
    (void)atomicAdd(p, v);
}

/* The same in global memory; the larger one of *p and v. */
static __device__ __forceinline__ void global_add(uint64_t *p, uint64_t v)
{
    (void)atomicAdd((unsigned long long *)p, (unsigned long long)v);
}

static __device__ __forceinline__ void global_max(uint64_t *p, uint64_t v)
{
    (void)atomicMax((unsigned long long *)p, (unsigned long long)v);
}

/* Adds one; what was there before. */
static __device__ __forceinline__ uint32_t global_take(uint32_t *p)
{
    return atomicAdd(p, 1U);
}

/* Puts a kernel into the program's list of kernels (cuda_int.h), before main. */
template <auto *KERNEL> struct cuda_listed {
    static inline const bool is = cuda_list_kernel((const void *)KERNEL);
};

/* kernel<<<grid, block, shared>>>(…) into a stream; grid, block: dim3 or numbers. What the runtime says of it. Kernels of
 * templates: in parentheses. */
#define BT_LAUNCH_IN(stream, kernel, grid, block, shared, ...)                                     \
    ((void)cuda_listed<&kernel>::is,                                                               \
     (&kernel)<<<(grid), (block), (shared), (stream)>>>(__VA_ARGS__), cudaGetLastError())

/* The same into c's stream. Errors go to cuda_ok. */
#define BT_LAUNCH(c, kernel, grid, block, shared, ...)                                             \
    do {                                                                                           \
        if (cuda_begin(c) && cuda_allow_shared((c), (const void *)&kernel, (shared), #kernel)) {   \
            (void)cuda_ok(                                                                         \
                (c), BT_LAUNCH_IN((c)->stream, kernel, grid, block, shared, __VA_ARGS__),          \
                #kernel);                                                                          \
        }                                                                                          \
    } while (0)

/* More than 48 KiB of shared memory must be asked for. */
static inline bool cuda_allow_shared(struct cuda_ctx *c, const void *kernel, size_t bytes,
                                     const char *what)
{
    return bytes <= (48U << 10) ||
           cuda_ok(c,
                   cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        (int)bytes),
                   what);
}

#endif

/* Blocks of `per` that cover n. */
static inline unsigned cuda_blocks(size_t n, size_t per)
{
    return (unsigned)((n + per - 1) / per);
}

/* Index of this thread in a launch of one dimension. */
static __device__ __forceinline__ size_t thread_index()
{
    return (size_t)blockIdx.x * blockDim.x + threadIdx.x;
}

#endif
