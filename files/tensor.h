#ifndef BT_FILES_TENSOR_H
#define BT_FILES_TENSOR_H

/* One tensor of a mapped model file, the same for safetensors and GGUF. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/dtype.h"

#define BT_TENSOR_DIMS_MAX 8

struct bt_tensor {
    const char *name;      /* NUL-terminated; every pointer lives as long as the file object */
    const char *file;      /* path, for messages */
    const char *type_name; /* as the file spells it: "BF16", "F8_E4M3", "Q5_K", … */
    bool supported;        /* false: dtype has no meaning, data must not be interpreted */
    enum bt_dtype dtype;
    uint32_t n_dims;                    /* 0: a scalar */
    uint64_t shape[BT_TENSOR_DIMS_MAX]; /* outermost first; the last one is contiguous */
    const void *data; /* any alignment; NULL for an unsupported GGUF type, whose size is unknown */
    size_t bytes;
};

/* Product of the shape: 1 for a scalar. It fits 64 bits: opening checked it. */
static inline uint64_t bt_tensor_values(const struct bt_tensor *t)
{
    uint64_t n = 1;
    for (uint32_t i = 0; i < t->n_dims; i++) {
        n *= t->shape[i];
    }
    return n;
}

#endif
