/* The same plain C, compiled where fmaf is an instruction instead of a library call: same bits, sooner. */

#include "kernels/cpu/cpu_int.h"

#define ISA_TABLE cpu_isa_plain_fma
#define ISA_NAME  "plain"
#include "kernels/cpu/v16_plain.inc"
#include "kernels/cpu/isa_plain_tiles.inc"
#include "kernels/cpu/isa_math.inc"
#include "kernels/cpu/isa_panel.inc"
#include "kernels/cpu/isa_rows.inc"
#include "kernels/cpu/isa_gemm.inc"
#include "kernels/cpu/isa_attention.inc"
#include "kernels/cpu/isa_table.inc"
