#ifndef BT_KERNELS_EMU_DEVICE_INT_H
#define BT_KERNELS_EMU_DEVICE_INT_H

/* What a C++ compiler needs to see CUDA's kernels as functions: the built-in variables, and shared memory whose every access
 * is watched. Included by cuda_device_int.cuh only. */

#include <math.h>
#include <string.h>
#include "kernels/cuda/emulation/emu_block_int.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_)
    {
    }
};

#define threadIdx (emu_self->thread)
#define blockIdx  (emu_self->block)
#define blockDim  (emu_self->block_size)
#define gridDim   (emu_self->grid)

static inline void __syncthreads()
{
    emu_barrier();
}

/* An element of shared memory. */
template <class T> struct shared_element {
    static_assert(sizeof(T) % 4 == 0, "shared memory is watched by words");
    T *at;

    operator T() const
    {
        emu_shared_read(at, sizeof(T));
        return *at;
    }
    T operator=(T v) const
    {
        emu_shared_write(at, sizeof(T));
        return *at = v;
    }
    T operator=(const shared_element &e) const
    {
        return *this = (T)e;
    }
    T operator+=(T v) const
    {
        return *this = (T) * this + v;
    }
};

template <class T> struct shared_ptr {
    T *at;

    shared_element<T> operator[](size_t i) const
    {
        return shared_element<T>{at + i};
    }
    shared_ptr operator+(size_t i) const
    {
        return shared_ptr{at + i};
    }
};

template <class T> static inline shared_ptr<T> shared_as(size_t byte)
{
    return shared_ptr<T>{(T *)(void *)(emu_self->shared + byte)};
}

/* Atomic operations: one thread runs at a time. */
static inline void shared_add(shared_ptr<uint32_t> p, uint32_t v)
{
    emu_shared_add(p.at, v);
}

static inline void global_add(uint64_t *p, uint64_t v)
{
    *p += v;
}

static inline void global_max(uint64_t *p, uint64_t v)
{
    *p = v > *p ? v : *p;
}

static inline uint32_t global_take(uint32_t *p)
{
    return (*p)++;
}

template <class F> static void emu_call(void *f)
{
    (*(F *)f)();
}

template <class F>
static cudaError_t emu_put(cudaStream_t s, const char *kernel, dim3 grid, dim3 block, size_t shared,
                           F f)
{
    struct emu_launch l = {};

    l.kernel = kernel;
    l.grid = emu_dim{grid.x, grid.y, grid.z};
    l.block = emu_dim{block.x, block.y, block.z};
    l.shared_bytes = shared;
    l.thread = emu_call<F>;
    static_assert(sizeof(F) <= EMU_ARG_MAX && __is_trivially_copyable(F), "copied into a stream");
    return emu_queue(s, &l, &f, sizeof(f));
}

#define BT_LAUNCH_IN(stream, kernel, grid, block, shared, ...)                                     \
    emu_put((stream), #kernel, (grid), (block), (shared), [=] { kernel(__VA_ARGS__); })

#define BT_LAUNCH(c, kernel, grid, block, shared, ...)                                             \
    do {                                                                                           \
        if (cuda_begin(c)) {                                                                       \
            (void)cuda_ok(                                                                         \
                (c), BT_LAUNCH_IN((c)->stream, kernel, grid, block, shared, __VA_ARGS__),          \
                #kernel);                                                                          \
        }                                                                                          \
    } while (0)

#endif
