/* The kernels in plain C, for any machine: the specification of the numerics class. Knows no instruction set; fmaf is
 * the C library's. */

#include "kernels/cpu/cpu_int.h"

#define ISA_TABLE cpu_isa_plain
#define ISA_NAME  "plain-libm"
#include "kernels/cpu/v16_plain.inc"
#include "kernels/cpu/isa_plain_tiles.inc"
#include "kernels/cpu/isa_math.inc"
#include "kernels/cpu/isa_panel.inc"
#include "kernels/cpu/isa_rows.inc"
#include "kernels/cpu/isa_gemm.inc"
#include "kernels/cpu/isa_attention.inc"
#include "kernels/cpu/isa_table.inc"
