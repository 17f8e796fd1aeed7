/* Which types KV pages may have, and which one suits a numerics class. Knows classes by their names; no backend. */

#include "kernels/kv_type.h"

#include <string.h>

const enum bt_dtype bt_k_kv_types[] = {BT_DTYPE_AUTO, BT_DTYPE_F32, BT_DTYPE_F16,
                                       BT_DTYPE_BF16, BT_DTYPE_F8,  BT_DTYPE_F8};

enum bt_dtype bt_k_kv_type(enum bt_dtype choice, const char *numerics)
{
    if (choice != BT_DTYPE_AUTO) {
        return choice;
    }
    bool bf16 = strcmp(numerics, "cpu-int8") == 0 || strcmp(numerics, "cpu-bf16") == 0 ||
                strncmp(numerics, "cuda-bf16", 9) == 0;
    return bf16 ? BT_DTYPE_BF16 : BT_DTYPE_F32;
}
