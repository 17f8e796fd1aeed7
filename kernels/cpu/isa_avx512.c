/* The kernels on AVX-512: bit for bit those of isa_plain.c. Only called where the CPU has it. */

#include "kernels/cpu/cpu_int.h"

#define ISA_TABLE cpu_isa_avx512
#define ISA_NAME  "avx512"

/* 12 x 32 outputs: 24 accumulators of 32 registers. */
#define UNROLL(n)      _Pragma(UNROLL_TEXT(GCC unroll n))
#define UNROLL_TEXT(x) #x
#define GEMM_MR        12
#define GEMM_NP        2
#define GEMM_ROWS(X, NP)                                                                           \
    X(1, NP)                                                                                       \
    X(2, NP)                                                                                       \
    X(3, NP) X(4, NP) X(5, NP) X(6, NP) X(7, NP) X(8, NP) X(9, NP) X(10, NP) X(11, NP) X(12, NP)
#define GEMM_TILES(X) GEMM_ROWS(X, 1) GEMM_ROWS(X, 2)
#define GEMM_TILE_TABLE                                                                            \
    {GEMM_ROWS(TILE_ENTRY, 1)},                                                                    \
    {                                                                                              \
        GEMM_ROWS(TILE_ENTRY, 2)                                                                   \
    }
#define GEMV_NP      4
#define GEMV_MR_MAX  8
#define GEMV_MR_F32  4
#define GEMV_NP_8(T) (BT_DTYPE_##T <= BT_DTYPE_BF16 ? 1 : 2)
#define GEMV_NP_1(T) (BT_DTYPE_##T <= BT_DTYPE_BF16 ? 2 : 4)
#define GEMV_ROWS(T)                                                                               \
    GEMV_CASE(1, GEMV_NP_1(T), T)                                                                  \
    GEMV_CASE(2, 4, T)                                                                             \
    GEMV_CASE(3, 4, T)                                                                             \
    GEMV_CASE(4, 4, T)                                                                             \
    GEMV_CASE(5, 2, T) GEMV_CASE(6, 2, T) GEMV_CASE(7, 2, T) GEMV_CASE(8, GEMV_NP_8(T), T)
#define GEMV_AHEAD         512
#define GEMV_AHEAD_1       256
#define GEMV_AHEAD_PLAIN   1024
#define ATTN_DOT_ROWS      4
#define ATTN_DOT_KEYS      4
#define ATTN_ROWS_IN_PLACE 8
#define ATTN_PV_ROWS       4
#define ATTN_PV_ACCS       16
#include "kernels/cpu/v16_avx512.inc"
#include "kernels/cpu/isa_math.inc"
#include "kernels/cpu/isa_panel.inc"
#include "kernels/cpu/isa_rows.inc"
#include "kernels/cpu/isa_gemm.inc"
#include "kernels/cpu/isa_attention.inc"
#include "kernels/cpu/isa_table.inc"
