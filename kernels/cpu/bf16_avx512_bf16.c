/* The products of class cpu-bf16 with AVX512-BF16: bit for bit those of bf16_plain.c, on CPUs whose instruction does what the
 * class says. Only called where the CPU has it. */

#include "kernels/cpu/cpu_int.h"

#define BF16_TABLE cpu_bf16_avx512_bf16
#include "kernels/cpu/v16_avx512.inc"
#include "kernels/cpu/bf16_avx512_tiles.inc"
#include "kernels/cpu/isa_math.inc"
#include "kernels/cpu/isa_panel.inc"
#include "kernels/cpu/b16_avx.inc"
#include "kernels/cpu/isa_bf16.inc"
#include "kernels/cpu/isa_bf16_attention.inc"
#include "kernels/cpu/bf16_table.inc"

static void dot(float acc[16], const uint32_t x[16], const uint32_t w[16])
{
    v_store(acc, b_dot(v_load(acc), vi_load(x), vi_load(w)));
}

bool cpu_bf16_fits(void)
{
    return cpu_bf16_check(dot);
}
