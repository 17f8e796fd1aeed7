/* The kernels on NEON: bit for bit those of isa_plain.c. Every AArch64 CPU has it. */

#include "kernels/cpu/cpu_int.h"

#define ISA_TABLE cpu_isa_neon
#define ISA_NAME  "neon"

/* 6 x 16 outputs: 24 accumulators, a panel's row in four registers, two copies of x. */
#define UNROLL(n)          _Pragma(UNROLL_TEXT(GCC unroll n))
#define UNROLL_TEXT(x)     #x
#define GEMM_MR            6
#define GEMM_NP            1
#define GEMM_TILES(X)      X(1, 1) X(2, 1) X(3, 1) X(4, 1) X(5, 1) X(6, 1)
#define GEMM_TILE_TABLE    {GEMM_TILES(TILE_ENTRY)}
#define GEMV_NP            4
#define GEMV_MR_MAX        4
#define GEMV_MR_F32        4
#define GEMV_ROWS(T)       GEMV_CASE(1, 2, T) GEMV_CASE(2, 2, T) GEMV_CASE(3, 1, T) GEMV_CASE(4, 1, T)
#define GEMV_AHEAD         512
#define GEMV_AHEAD_PLAIN   1024
#define GEMV_AHEAD_1       256
#define ATTN_DOT_ROWS      2
#define ATTN_DOT_KEYS      2
#define ATTN_ROWS_IN_PLACE 4
#define ATTN_PV_ROWS       2
#define ATTN_PV_ACCS       6
#include "kernels/cpu/v16_neon.inc"
#include "kernels/cpu/isa_math.inc"
#include "kernels/cpu/isa_panel.inc"
#include "kernels/cpu/isa_rows.inc"
#include "kernels/cpu/isa_gemm.inc"
#include "kernels/cpu/isa_attention.inc"
#include "kernels/cpu/isa_table.inc"
