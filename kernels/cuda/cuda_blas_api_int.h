#ifndef BT_KERNELS_CUDA_BLAS_API_INT_H
#define BT_KERNELS_CUDA_BLAS_API_INT_H

/* The calls of cuBLASLt that the backend makes, NVIDIA's or the emulation's (emulation/emu_blas_int.h). The library is opened
 * when a context asks for it, not linked: a program built with CUDA starts where there is none. */

#include "base/status.h"

#ifdef BT_CUDA_EMULATED
#include "kernels/cuda/emulation/emu_blas_int.h"
#else
#include <cublasLt.h>
#endif

struct cuda_blas_api {
    __typeof__(cublasLtCreate) *create;
    __typeof__(cublasLtDestroy) *destroy;
    __typeof__(cublasLtGetVersion) *version;
    __typeof__(cublasLtGetStatusString) *text;
    __typeof__(cublasLtMatmulDescInit_internal) *op_init;
    __typeof__(cublasLtMatmulDescSetAttribute) *op_set;
    __typeof__(cublasLtMatrixLayoutInit_internal) *layout_init;
    __typeof__(cublasLtMatmulPreferenceInit_internal) *pref_init;
    __typeof__(cublasLtMatmulPreferenceSetAttribute) *pref_set;
    __typeof__(cublasLtMatmulAlgoGetHeuristic) *heuristic;
    __typeof__(cublasLtMatmul) *matmul;
};

/* BT_ERR_UNSUPPORTED: no library, or one without these calls; the message names it. It stays open. */
enum bt_status cuda_blas_open(struct cuda_blas_api *out, struct bt_err *err) BT_NODISCARD;

#endif
