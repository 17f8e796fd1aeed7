/* The products of class cpu-bf16 with AVX2: bit for bit those of bf16_plain.c. Only called where the CPU has it. */

#include "kernels/cpu/cpu_int.h"

#define BF16_TABLE cpu_bf16_avx2

/* 6 x 16 outputs: 12 accumulators of 16 registers. */
#define UNROLL(n)       _Pragma(UNROLL_TEXT(GCC unroll n))
#define UNROLL_TEXT(x)  #x
#define BF16_MR         6
#define BF16_NP         1
#define BF16_NP_MAX     2
#define BF16_ACC        6
#define BF16_TILES(X)   X(1, 1) X(2, 1) X(3, 1) X(4, 1) X(5, 1) X(6, 1) X(1, 2) X(2, 2) X(3, 2)
#define BF16_STREAMS(M) ((M) <= 3 ? 2U : 1U)
#define BF16_UNROLL     1
#define BF16_CHUNK      64U
#define BF16_KB         256U
#define BF16_AHEAD(M)   ((M) == 1 ? 256 : 1024)
/* Weights of both halves at once would not fit beside them: the second half is loaded again. */
#define BF16_HALVES_APART  __asm__ volatile("" ::: "memory")
#define BF16_FLUSHES       true
#define BF16_DIRECT        2U
#define BF16_DIRECTS(X, T) X(1, T) X(2, T)
#include "kernels/cpu/v16_avx2.inc"
#include "kernels/cpu/isa_math.inc"
#include "kernels/cpu/isa_panel.inc"
#include "kernels/cpu/b16_avx.inc"
#include "kernels/cpu/isa_bf16.inc"
#include "kernels/cpu/isa_bf16_attention.inc"
#include "kernels/cpu/bf16_table.inc"
