/* The same plain C, compiled where fmaf is an instruction instead of a library call: same bits, sooner. */

#include "kernels/cpu/cpu_int.h"

#define BF16_TABLE cpu_bf16_plain_fma
#include "kernels/cpu/v16_plain.inc"
#include "kernels/cpu/bf16_plain_tiles.inc"
#include "kernels/cpu/isa_math.inc"
#include "kernels/cpu/isa_panel.inc"
#include "kernels/cpu/b16_plain.inc"
#include "kernels/cpu/isa_bf16.inc"
#include "kernels/cpu/isa_bf16_attention.inc"
#include "kernels/cpu/bf16_table.inc"
