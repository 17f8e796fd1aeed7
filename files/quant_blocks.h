#ifndef BT_FILES_QUANT_BLOCKS_H
#define BT_FILES_QUANT_BLOCKS_H

/* Rounding of f32 rows to the types that files store. The inverse is the kernels' (kernels/backend.h). Any thread. */

#include <stdbool.h>
#include <stdint.h>
#include "base/dtype.h"

/* F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. */
bool bt_quantize_known(enum bt_dtype dtype);
/* n values, a multiple of the block size, to n / block values blocks at out. Every value goes to the nearest one that its
 * block can hold (halves: ties to even); blocks take their scale from their largest value. NaNs are the caller's to refuse:
 * the block types have none. dtype: a known one. */
void bt_quantize(void *out, const float *x, uint32_t n, enum bt_dtype dtype);

#endif
