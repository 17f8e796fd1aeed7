/* The list of the program's kernels, which they enter before main, and their loading. Owns the list; the same for all contexts.
 * The emulation loads nothing. */

#include "kernels/cuda/cuda_int.h"

#include "base/log.h"

static struct {
    const void *kernel[CUDA_KERNELS_MAX];
    uint32_t n;
} listed;

bool cuda_list_kernel(const void *kernel)
{
    BT_ASSERT(listed.n < CUDA_KERNELS_MAX);
    listed.kernel[listed.n++] = kernel;
    return true;
}

enum bt_status cuda_load_kernels(struct bt_err *err)
{
    enum bt_status st = BT_OK;

    if (listed.n == 0) {
        bt_log_warn("kernels", "no kernel is listed: each is loaded when it is first used");
    }
    for (uint32_t i = 0; i < listed.n && st == BT_OK; i++) {
        struct cudaFuncAttributes a;

        st = cuda_status(cudaFuncGetAttributes(&a, listed.kernel[i]), "a kernel", err);
    }
    return st;
}
