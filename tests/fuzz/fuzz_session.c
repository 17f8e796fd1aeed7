/* Any bytes as a session message, in both directions, and as messages of clients: refused, or decoded into values that
 * encode again. */

#include "proto/inference.h"
#include "proto/session.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct bt_arena a;
    struct bt_buf b = {0};
    struct bt_err err;
    struct bt_from_daemon d;
    struct bt_from_router r;
    struct bt_inf_generate g;
    struct bt_inf_generated o;

    bt_arena_init(&a, 16 << 20);
    if (bt_from_daemon_decode(data, n, &a, &d, &err) == BT_OK) {
        (void)!bt_from_daemon_encode(&d, &b);
    }
    if (bt_from_router_decode(data, n, &a, &r, &err) == BT_OK) {
        (void)!bt_from_router_encode(&r, &b);
    }
    if (bt_inf_generate_decode(data, n, &a, &g, &err) == BT_OK) {
        (void)!bt_inf_generate_encode(&g, &b);
    }
    if (bt_inf_generated_decode(data, n, &a, &o, &err) == BT_OK) {
        (void)!bt_inf_generated_encode(&o, &b);
    }
    bt_buf_fini(&b);
    bt_arena_fini(&a);
    return 0;
}
