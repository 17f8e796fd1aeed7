#ifndef BT_KERNELS_KV_TYPE_H
#define BT_KERNELS_KV_TYPE_H

/* The element types of KV pages, for option tables (base/options.h): as a list, and by choice. fp8_e4m3: another name of fp8. */

#include "base/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BT_K_KV_TYPES "auto|f32|f16|bf16|fp8|fp8_e4m3"
extern const enum bt_dtype bt_k_kv_types[6];

/* What a choice means in a class (bt_k_numerics): itself, but BT_DTYPE_AUTO is BF16 where attention rounds keys and values to bf16
 * anyway, so that pages of half the size give the same bits (cpu-int8, cpu-bf16), or on tensor cores needs pages of 16 bits
 * (cuda-bf16), and F32 elsewhere. */
enum bt_dtype bt_k_kv_type(enum bt_dtype choice, const char *numerics);

#ifdef __cplusplus
}
#endif

#endif
