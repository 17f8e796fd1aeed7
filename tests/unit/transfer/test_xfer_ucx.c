/* The common suite over UCX, two bt_xfer in one process: TCP and shared memory, eager and rendezvous. */

#include "tests/unit/transfer/xfer_suite.h"
#include "tests/unit/transfer/xfer_util.h"

int main(int argc, char **argv)
{
    struct world w = {.tls = argc > 1 ? argv[1] : "tcp"};
    w.proto = argc > 2 && strcmp(argv[2], "rndv") == 0    ? BT_XFER_PROTO_RNDV
              : argc > 2 && strcmp(argv[2], "eager") == 0 ? BT_XFER_PROTO_EAGER
                                                          : BT_XFER_PROTO_AUTO;
    CHECK_EQ(xfer_suite(&w), 0);
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
