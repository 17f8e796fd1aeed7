/* The common suite over UCX, two bt_xfer in one process: TCP and shared memory, eager and rendezvous, with pages that go through
 * slots, and with pages in registered memory (the host's: there is no other here). */

#include "tests/unit/transfer/xfer_suite.h"
#include "tests/unit/transfer/xfer_util.h"

/* IPv6 loopback makes UCX 1.13 overwrite its heap: both ends refuse to use it, and live. */
static void test_v6_loopback(const struct world *w)
{
    struct bt_xfer_opts o = {.tls = w->tls, .instance = 1, .fingerprint = "f", .layout = "l"};
    struct bt_xfer_event ev;
    struct bt_err err = {0};
    struct bt_xfer *x;
    struct side p;
    uint64_t peer;

    o.listen = "[::1]:0";
    CHECK_EQ(bt_xfer_create(&o, &x, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "[::1]:0") != NULL);
    o.listen = "localhost:0"; /* IPv4, whatever the resolver likes better */
    CHECK_EQ(bt_xfer_create(&o, &x, &err), BT_OK);
    bt_xfer_destroy(x);
    struct bt_xfer_opts op = {0};

    side_start(&p, w, &op, 1, false);
    CHECK_EQ(bt_xfer_connect(p.x, "[::1]:1", 7, &test_token, &peer), BT_OK);
    CHECK(side_wait(&p, BT_XFER_PEER_DOWN, &ev, 5000));
    side_stop(&p);
}

int main(int argc, char **argv)
{
    struct world w = {.tls = argc > 1 ? argv[1] : "tcp"};
    w.proto = argc > 2 && strcmp(argv[2], "rndv") == 0    ? BT_XFER_PROTO_RNDV
              : argc > 2 && strcmp(argv[2], "eager") == 0 ? BT_XFER_PROTO_EAGER
                                                          : BT_XFER_PROTO_AUTO;
    const char *pages = argc > 3 ? argv[3] : "";
    static uint8_t memory[80 << 20];
    w.direct = strcmp(pages, "direct") == 0;
    w.staged = w.direct || strcmp(pages, "staged") == 0;
    w.region = (struct bt_xfer_region){memory, sizeof(memory), BT_XFER_MEMORY_HOST};
    CHECK_EQ(xfer_suite(&w), 0);
    test_v6_loopback(&w);
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
