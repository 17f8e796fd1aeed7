/* The products of class cpu-bf16 in plain C, for any machine: the specification. fmaf is the C library's. */

#include "kernels/cpu/cpu_int.h"

#define BF16_TABLE cpu_bf16_plain
#include "kernels/cpu/v16_plain.inc"
#include "kernels/cpu/bf16_plain_tiles.inc"
#include "kernels/cpu/isa_math.inc"
#include "kernels/cpu/isa_panel.inc"
#include "kernels/cpu/b16_plain.inc"
#include "kernels/cpu/isa_bf16.inc"
#include "kernels/cpu/isa_bf16_attention.inc"
#include "kernels/cpu/bf16_table.inc"
