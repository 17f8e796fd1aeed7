/* The integer products on AVX2: bit for bit those of int8_plain.c. Only called where the CPU has it. */

#include "kernels/cpu/cpu_int.h"

#define INT8_TABLE cpu_int8_avx2

/* 4 x 16 outputs: 8 sums in 16 or 32 bits, two words of weights, one of x, products; the f32 sums of more than two rows stay in
 * memory. */
#define UNROLL(n)         _Pragma(UNROLL_TEXT(GCC unroll n))
#define UNROLL_TEXT(x)    #x
#define I8_MR             4
#define I8_TILES(X, KIND) X(KIND, 1) X(KIND, 2) X(KIND, 3) X(KIND, 4)
#define I8_CHAINS_MAX     2
#define I8_GEMV_ROWS_MAX  8
#define I8_GEMV_AHEAD(MR) 2048
#define I8_EXPAND_AHEAD   2048
#define I8_GEMV_TILES(T)  I8_GEMV_CASE(1, T) I8_GEMV_CASE(2, T) I8_GEMV_CASE(3, T) I8_GEMV_CASE(4, T)
#include "kernels/cpu/v16_avx2.inc"
#include "kernels/cpu/isa_math.inc"
#include "kernels/cpu/isa_panel.inc"
#include "kernels/cpu/i8_avx2.inc"
#include "kernels/cpu/isa_int8.inc"
