#ifndef BT_KERNELS_CUDA_TILE_INT_H
#define BT_KERNELS_CUDA_TILE_INT_H

/* Tensor cores: one operation of a warp, c[16][8] += a[16][16] b[16][8] with c in f32, and what brings a and b to it. On a
 * device instructions of sm_80 (PTX ISA, "mma", "ldmatrix", "cp.async"), in the emulation the same with the same layouts. All
 * lanes of a warp come to each of these together, but for copies and loads.
 *
 * Lane 4 g + t holds of a: word 0 row g, words 1: row g + 8, k = 2 t and 2 t + 1 in its low and high half; words 2 and 3 the
 * same rows, k + 8. Of b: word 0 k = 2 t and 2 t + 1 of column g; word 1 k + 8. Of c: row g, columns 2 t and 2 t + 1, then row
 * g + 8. */

#include "kernels/cuda/cuda_numbers_int.cuh"

/* 16 bytes that move at once. */
struct alignas(16) words4 {
    uint32_t r[4];
};

/* KIND: CUDA_KIND_F16 or CUDA_KIND_BF16. */
template <int KIND>
static __device__ __forceinline__ void tile_multiply(float *c, const uint32_t *a, const uint32_t *b)
{
    static_assert(KIND == CUDA_KIND_F16 || KIND == CUDA_KIND_BF16, "types of 16 bits");
#ifdef BT_CUDA_EMULATED
    emu_multiply(a, b, c, KIND == CUDA_KIND_BF16);
#else
    if (KIND == CUDA_KIND_BF16) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
#endif
}

#ifndef BT_CUDA_EMULATED
static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}
#endif

/* Four 8 x 8 matrices of 16 bits out of shared memory: `row` is where row lane % 8 of matrix lane / 8 begins. Word i of lane
 * 4 g + t: matrix i, row g, columns 2 t and 2 t + 1; TRANSPOSED: rows 2 t and 2 t + 1, column g. */
template <bool TRANSPOSED>
static __device__ __forceinline__ void tile_load(uint32_t *out, shared_ptr<words4> row)
{
#ifdef BT_CUDA_EMULATED
    emu_load_matrices(row.at, TRANSPOSED, out);
#else
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(shared_address(row))
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(shared_address(row))
                     : "memory");
    }
#endif
}

/* What lanes of a warp have written to shared memory before, the others may touch after. */
static __device__ __forceinline__ void warp_sync()
{
#ifdef BT_CUDA_EMULATED
    emu_warp_sync();
#else
    __syncwarp();
#endif
}

/* The value of lane ^ mask. */
static __device__ __forceinline__ float lane_xor(float v, uint32_t mask)
{
#ifdef BT_CUDA_EMULATED
    return float_of_bits(emu_shuffle_xor(bits_of_float(v), mask));
#else
    return __shfl_xor_sync(0xffffffffU, v, (int)mask);
#endif
}

/* Whether `yes` holds in any lane of the warp. */
static __device__ __forceinline__ bool lane_any(bool yes)
{
#ifdef BT_CUDA_EMULATED
    return emu_vote_any(yes);
#else
    return __any_sync(0xffffffffU, yes) != 0;
#endif
}

/* Begins a copy of 16 bytes of global memory, aligned to them, into shared memory; !there: of zeros, `from` is any address of
 * global memory. The thread sees them after copy_wait, others after a barrier that follows. */
static __device__ __forceinline__ void copy_begin(shared_ptr<words4> to, const void *from,
                                                  bool there)
{
#ifdef BT_CUDA_EMULATED
    words4 w = {};
    if (there) {
        w = *(const words4 *)from;
    }
    emu_copy_begin(to.at, w.r);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0)
                 : "memory");
#endif
}

/* Copies begun since the last call are a group, maybe of none. */
static __device__ __forceinline__ void copy_commit()
{
#ifdef BT_CUDA_EMULATED
    emu_copy_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Until all of this thread's groups but the last LEFT are there. */
template <int LEFT> static __device__ __forceinline__ void copy_wait()
{
#ifdef BT_CUDA_EMULATED
    emu_copy_wait(LEFT);
#else
    asm volatile("cp.async.wait_group %0;" : : "n"(LEFT) : "memory");
#endif
}

/* 16 bytes of global memory that no kernel writes now; p: aligned to them. */
static __device__ __forceinline__ words4 load_words4(const void *p)
{
#ifdef BT_CUDA_EMULATED
    return *(const words4 *)p;
#else
    const uint4 v = __ldg((const uint4 *)p);
    return words4{{v.x, v.y, v.z, v.w}};
#endif
}

/* Two values rounded to 16 bits, the first in the low half. */
template <int KIND> static __device__ __forceinline__ uint32_t pair_of(float low, float high)
{
    if (KIND == CUDA_KIND_F16) {
        return f16_of_float(low) | (uint32_t)f16_of_float(high) << 16;
    }
    return bf16_of_float(low) | (uint32_t)bf16_of_float(high) << 16;
}

/* Two numbers of e4m3, the first in the low byte, as f16, which can be all of them. */
static __device__ __forceinline__ uint32_t pair_of_f8(uint32_t codes)
{
#if defined(BT_CUDA_EMULATED)
    return pair_of<CUDA_KIND_F16>(float_of_f8(codes & 0xffU), float_of_f8(codes >> 8 & 0xffU));
#elif __CUDA_ARCH__ >= 890
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((uint16_t)codes));
    return pair;
#else
    /* The same bits, the mantissa filled up, are an f16 2^-8 times as large, NaN excepted: its exponent becomes all ones. */
    const uint32_t apart = (codes & 0xffU) << 8 | (codes & 0xff00U) << 16,
                   mag = apart & 0x7f007f00U;
    const uint32_t small = (apart & 0x80008000U) | mag >> 1,
                   nan = (mag + 0x01000100U) & 0x80008000U;
    uint32_t pair;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(small), "r"(0x5c005c00U));
    return pair | (nan - (nan >> 5));
#endif
}

/* The value of 16 bits. */
template <int KIND> static __device__ __forceinline__ float half_value(uint32_t half)
{
    return KIND == CUDA_KIND_F16 ? float_of_f16(half) : float_of_bf16(half);
}

#endif
