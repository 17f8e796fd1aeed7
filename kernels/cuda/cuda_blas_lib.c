/* Opens NVIDIA's library and finds its calls. Knows where the build found one; nothing of what is computed. */

#include "kernels/cuda/cuda_blas_api_int.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include "base/log.h"

#define LIBRARY "libcublasLt.so.13"

static const struct {
    const char *name;
    size_t at;
} calls[] = {
    {"cublasLtCreate", offsetof(struct cuda_blas_api, create)},
    {"cublasLtDestroy", offsetof(struct cuda_blas_api, destroy)},
    {"cublasLtGetVersion", offsetof(struct cuda_blas_api, version)},
    {"cublasLtGetStatusString", offsetof(struct cuda_blas_api, text)},
    {"cublasLtMatmulDescInit_internal", offsetof(struct cuda_blas_api, op_init)},
    {"cublasLtMatmulDescSetAttribute", offsetof(struct cuda_blas_api, op_set)},
    {"cublasLtMatrixLayoutInit_internal", offsetof(struct cuda_blas_api, layout_init)},
    {"cublasLtMatmulPreferenceInit_internal", offsetof(struct cuda_blas_api, pref_init)},
    {"cublasLtMatmulPreferenceSetAttribute", offsetof(struct cuda_blas_api, pref_set)},
    {"cublasLtMatmulAlgoGetHeuristic", offsetof(struct cuda_blas_api, heuristic)},
    {"cublasLtMatmul", offsetof(struct cuda_blas_api, matmul)},
};

/* As the loader finds it, else where the build did. */
static void *open_library(struct bt_err *err)
{
    void *lib = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    char first[256];

    if (lib != NULL) {
        return lib;
    }
    const char *why = dlerror();
    (void)snprintf(first, sizeof(first), "%s", why != NULL ? why : "?");
    lib = dlopen(BT_CUBLAS_DIR "/" LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (lib == NULL) {
        (void)bt_err_set(err, BT_ERR_UNSUPPORTED,
                         "cuBLAS: %s, and it is not in " BT_CUBLAS_DIR
                         " either, where the build found it; cuda-f32 needs none",
                         first);
    }
    return lib;
}

enum bt_status cuda_blas_open(struct cuda_blas_api *out, struct bt_err *err)
{
    void *lib = open_library(err);

    if (lib == NULL) {
        return BT_ERR_UNSUPPORTED;
    }
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        void *call = dlsym(lib, calls[i].name);
        if (call == NULL) {
            (void)dlclose(lib); /* nothing of it is used */
            return bt_err_set(err, BT_ERR_UNSUPPORTED, "cuBLAS: " LIBRARY " has no %s",
                              calls[i].name);
        }
        memcpy((char *)out + calls[i].at, &call, sizeof(call));
    }
    return BT_OK;
}
