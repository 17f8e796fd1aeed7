/* Any bytes as a control message between a pair. */

#include "proto/transfer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct bt_arena a;
    struct bt_buf b = {0};
    struct bt_err err;
    struct bt_control m;

    bt_arena_init(&a, 1 << 20);
    if (bt_control_decode(data, n, &a, &m, &err) == BT_OK) {
        (void)!bt_control_encode(&m, &b);
    }
    bt_buf_fini(&b);
    bt_arena_fini(&a);
    return 0;
}
