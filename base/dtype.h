#ifndef BT_BASE_DTYPE_H
#define BT_BASE_DTYPE_H

/* Element types of weights and KV, as model files store them. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum bt_dtype {
    BT_DTYPE_F32,
    BT_DTYPE_F16,
    BT_DTYPE_BF16,
    /* GGUF block formats (layout: ggml's, see docs of GGUF v3). */
    BT_DTYPE_Q4_0,   /* 32 values: f16 d, 16 bytes nibbles */
    BT_DTYPE_Q4_1,   /* 32 values: f16 d, f16 m, 16 bytes nibbles */
    BT_DTYPE_Q5_0,   /* 32 values: f16 d, 32 high bits, 16 bytes nibbles */
    BT_DTYPE_Q5_1,   /* 32 values: f16 d, f16 m, 32 high bits, 16 bytes nibbles */
    BT_DTYPE_IQ4_NL, /* 32 values: f16 d, 16 bytes nibbles: places in a table of 16 int8 */
    BT_DTYPE_Q8_0,   /* 32 values: f16 d, 32 int8 */
    BT_DTYPE_Q2_K,   /* 256 values, 84 bytes */
    BT_DTYPE_Q3_K,   /* 256 values, 110 bytes */
    BT_DTYPE_Q4_K,   /* 256 values, 144 bytes */
    BT_DTYPE_Q5_K,   /* 256 values, 176 bytes */
    BT_DTYPE_Q6_K,   /* 256 values, 210 bytes */
    /* In no file: what quantised matrices of HF directories are turned into. */
    BT_DTYPE_G4,  /* 32 values: f32 scale, f32 min, 16 bytes nibbles; scale * q + min */
    BT_DTYPE_G8,  /* 32 values: f32 scale, f32 min, 32 bytes; scale * q + min */
    BT_DTYPE_GF8, /* 32 values: f32 scale of a magnitude below 2^7, 32 e4m3 (base/float8.h), none NaN; scale * value */
    BT_DTYPE_COUNT,               /* of those that weights have */
    BT_DTYPE_F8 = BT_DTYPE_COUNT, /* of KV pages only: e4m3 (base/float8.h) */
    BT_DTYPE_AUTO,                /* of options only */
};

/* Values in a block and bytes of one (1 and the element size for plain types). */
static inline uint32_t bt_dtype_block_values(enum bt_dtype t)
{
    return t <= BT_DTYPE_BF16 || t == BT_DTYPE_F8   ? 1U
           : t <= BT_DTYPE_Q8_0 || t >= BT_DTYPE_G4 ? 32U
                                                    : 256U;
}

static inline uint32_t bt_dtype_block_bytes(enum bt_dtype t)
{
    static const uint16_t bytes[BT_DTYPE_COUNT + 1] = {4,  2,   2,   18,  20,  22, 24, 18, 34,
                                                       84, 110, 144, 176, 210, 24, 40, 36, 1};
    return bytes[t];
}

static inline const char *bt_dtype_name(enum bt_dtype t)
{
    static const char *const names[BT_DTYPE_COUNT + 1] = {
        "f32",  "f16",  "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "q8_0",
        "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "g4",   "g8",   "gf8",    "fp8"};
    return names[t];
}

/* Whether KV pages may have it. */
static inline bool bt_dtype_is_kv(enum bt_dtype t)
{
    return t <= BT_DTYPE_BF16 || t == BT_DTYPE_F8;
}

#endif
