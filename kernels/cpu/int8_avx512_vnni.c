/* The integer products with AVX-512 VNNI: bit for bit those of int8_plain.c. Only called where the CPU has it. */

#include "kernels/cpu/cpu_int.h"

#define INT8_TABLE cpu_int8_avx512_vnni

/* 12 x 16 outputs: 12 integer sums and 12 of f32, of 32 registers. */
#define UNROLL(n)      _Pragma(UNROLL_TEXT(GCC unroll n))
#define UNROLL_TEXT(x) #x
#define I8_MR          12
#define I8_TILES(X, KIND)                                                                          \
    X(KIND, 1)                                                                                     \
    X(KIND, 2)                                                                                     \
    X(KIND, 3)                                                                                     \
    X(KIND, 4)                                                                                     \
    X(KIND, 5) X(KIND, 6) X(KIND, 7) X(KIND, 8) X(KIND, 9) X(KIND, 10) X(KIND, 11) X(KIND, 12)
#define I8_CHAINS_MAX     12
#define I8_GEMV_ROWS_MAX  24
#define I8_GEMV_AHEAD(MR) ((MR) <= 4 ? 256 : 2048)
#define I8_GEMV_TILES(T)                                                                           \
    I8_GEMV_CASE(1, T)                                                                             \
    I8_GEMV_CASE(2, T)                                                                             \
    I8_GEMV_CASE(3, T)                                                                             \
    I8_GEMV_CASE(4, T)                                                                             \
    I8_GEMV_CASE(5, T)                                                                             \
    I8_GEMV_CASE(6, T)                                                                             \
    I8_GEMV_CASE(7, T)                                                                             \
    I8_GEMV_CASE(8, T)                                                                             \
    I8_GEMV_CASE(9, T) I8_GEMV_CASE(10, T) I8_GEMV_CASE(11, T) I8_GEMV_CASE(12, T)
#define I8_EXPAND_AHEAD 2048
#include "kernels/cpu/v16_avx512.inc"
#include "kernels/cpu/isa_math.inc"
#include "kernels/cpu/isa_panel.inc"
#include "kernels/cpu/i8_avx512.inc"
#include "kernels/cpu/isa_int8.inc"
