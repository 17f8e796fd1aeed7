#ifndef BT_KERNELS_OPEN_H
#define BT_KERNELS_OPEN_H

/* A backend by its name, and the numerics classes of all backends, for option tables (base/options.h): as a list, and by
 * choice. cuda-f32 and cuda-bf16 are described in kernels/cuda/cuda_int.h, those of cuBLAS in cuda_blas_int.h there, the
 * others in backend.h. */

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BT_K_ALL_CLASSES                                                                           \
    BT_K_CLASSES "|cuda-f32|cuda-bf16|cuda-cublas|cuda-cublas-tf32|cuda-cublas-fp8"
extern const char *const bt_k_all_classes[8];
/* Whether answers of a class are *one answer*: the same for every batch, chunk and cache. NULL, a backend's first: true. */
bool bt_k_one_answer(const char *numerics);

/* backend: "cpu" or "cuda". opts->numerics: NULL (its first class), or one of its own: else BT_ERR_INVALID.
 * BT_ERR_UNSUPPORTED: not in this build, or no such device on this machine; the message says which. */
enum bt_status bt_k_create(const char *backend, const struct bt_k_opts *opts, struct bt_kctx **out,
                           struct bt_err *err) BT_NODISCARD;
/* For measuring: how long the device worked on the last step's graph, ns, after bt_k_sync. Steps are timed from the first call on;
 * 0: the last one was not, or nothing here is. */
uint64_t bt_k_step_device_ns(struct bt_kctx *k);
/* Only where the build has it. */
uint64_t bt_k_step_device_ns_cuda(struct bt_kctx *k);
enum bt_status bt_k_create_cuda(const struct bt_k_opts *opts, struct bt_kctx **out,
                                struct bt_err *err) BT_NODISCARD;

#ifdef __cplusplus
}
#endif

#endif
