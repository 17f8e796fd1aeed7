/* The products of class cpu-bf16 with AVX-512, without its instruction for them: bit for bit those of bf16_plain.c. Only
 * called where the CPU has it. */

#include "kernels/cpu/cpu_int.h"

#define BF16_TABLE cpu_bf16_avx512
#include "kernels/cpu/v16_avx512.inc"
#include "kernels/cpu/bf16_avx512_tiles.inc"
#include "kernels/cpu/isa_math.inc"
#include "kernels/cpu/isa_panel.inc"
#include "kernels/cpu/b16_avx.inc"
#include "kernels/cpu/isa_bf16.inc"
#include "kernels/cpu/isa_bf16_attention.inc"
#include "kernels/cpu/bf16_table.inc"
