/* Names of backends. Knows which ones this build has; no device. */

#include "kernels/open.h"

#include <string.h>

enum bt_status bt_k_create(const char *backend, const struct bt_k_opts *opts, struct bt_kctx **out,
                           struct bt_err *err)
{
    if (strcmp(backend, "cpu") == 0 && opts->numerics != NULL &&
        strncmp(opts->numerics, "cuda-", 5) == 0) {
        return bt_err_set(err, BT_ERR_INVALID, "numerics class %s needs --backend cuda",
                          opts->numerics);
    }
    if (strcmp(backend, "cpu") == 0) {
        return bt_k_create_cpu(opts, out, err);
    }
    if (strcmp(backend, "cuda") == 0) {
#ifdef BT_HAVE_CUDA
        return bt_k_create_cuda(opts, out, err);
#else
        return bt_err_set(err, BT_ERR_UNSUPPORTED,
                          "backend cuda is not in this build (cmake --preset cuda)");
#endif
    }
    return bt_err_set(err, BT_ERR_UNSUPPORTED, "there is no backend \"%s\"", backend);
}

uint64_t bt_k_step_device_ns(struct bt_kctx *k)
{
#ifdef BT_HAVE_CUDA
    if (strncmp(bt_k_numerics(k), "cuda-", strlen("cuda-")) == 0) {
        return bt_k_step_device_ns_cuda(k);
    }
#else
    (void)k;
#endif
    return 0;
}
