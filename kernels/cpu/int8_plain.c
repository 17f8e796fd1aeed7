/* The integer products in plain C, for any machine: the specification of their class. fmaf is the C library's. */

#include "kernels/cpu/cpu_int.h"

#define INT8_TABLE cpu_int8_plain
#include "kernels/cpu/v16_plain.inc"
#include "kernels/cpu/int8_plain_tiles.inc"
#include "kernels/cpu/isa_math.inc"
#include "kernels/cpu/isa_panel.inc"
#include "kernels/cpu/i8_plain.inc"
#include "kernels/cpu/isa_int8.inc"
