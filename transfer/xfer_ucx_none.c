/* Stands in for the UCX wire where UCX cannot be linked: its memory hooks crash under ThreadSanitizer. Only the
 * loopback twin works in such a build. */

#include "transfer/xfer_int.h"

static enum bt_status none_open(struct bt_xfer *x, const struct bt_xfer_opts *o, struct bt_err *err)
{
    (void)x;
    (void)o;
    return bt_err_set(err, BT_ERR_UNSUPPORTED,
                      "transfer: this build has no UCX, only the loopback twin");
}

const struct xfer_ops xfer_ucx_ops = {.name = "none", .open = none_open};
