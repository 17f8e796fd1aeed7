/* The emulated cuBLASLt: looks hard at what it is given, then computes one output after the other. */

#include "kernels/cuda/emulation/emu_blas_int.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>
#include "base/float16.h"
#include "base/float8.h"
#include "base/mem.h"
#include "kernels/cuda/cuda_blas_api_int.h"
#include "kernels/cuda/emulation/emu_block_int.h"

#define MADE      0x6c6179656d617274U /* in what was initialised */
#define PARTS_MAX 3U
#define PATTERN   0x5a /* what is left in the workspace */

struct emu_blas {
    uint64_t made;
};

enum bt_status cuda_blas_open(struct cuda_blas_api *out, struct bt_err *err)
{
    (void)err;
    *out = (struct cuda_blas_api){.create = cublasLtCreate,
                                  .destroy = cublasLtDestroy,
                                  .version = cublasLtGetVersion,
                                  .text = cublasLtGetStatusString,
                                  .op_init = cublasLtMatmulDescInit_internal,
                                  .op_set = cublasLtMatmulDescSetAttribute,
                                  .layout_init = cublasLtMatrixLayoutInit_internal,
                                  .pref_init = cublasLtMatmulPreferenceInit_internal,
                                  .pref_set = cublasLtMatmulPreferenceSetAttribute,
                                  .heuristic = cublasLtMatmulAlgoGetHeuristic,
                                  .matmul = cublasLtMatmul};
    return BT_OK;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    *handle = bt_calloc(1, sizeof(**handle));
    if (*handle == NULL) {
        return CUBLAS_STATUS_ALLOC_FAILED;
    }
    (*handle)->made = MADE;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    bt_free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion(void)
{
    return 0; /* emulated */
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "success";
    case CUBLAS_STATUS_ALLOC_FAILED:
        return "out of memory";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "not supported";
    case CUBLAS_STATUS_INVALID_VALUE:
    default:
        return "invalid value";
    }
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t op, size_t size,
                                               cublasComputeType_t compute, cudaDataType_t scale)
{
    if (size < sizeof(*op)) {
        return CUBLAS_STATUS_ALLOC_FAILED;
    }
    *op = (cublasLtMatmulDescOpaque_t){.made = MADE, .compute = compute, .scale = scale};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t op,
                                              cublasLtMatmulDescAttributes_t name,
                                              const void *value, size_t bytes)
{
    if (op->made != MADE || name != CUBLASLT_MATMUL_DESC_TRANSA || value == NULL ||
        bytes != sizeof(op->a)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    memcpy(&op->a, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t size,
                                                 cudaDataType type, uint64_t rows, uint64_t cols,
                                                 int64_t ld)
{
    if (size < sizeof(*layout)) {
        return CUBLAS_STATUS_ALLOC_FAILED;
    }
    *layout = (cublasLtMatrixLayoutOpaque_t){
        .made = MADE, .type = type, .rows = rows, .cols = cols, .ld = ld};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t pref, size_t size)
{
    if (size < sizeof(*pref)) {
        return CUBLAS_STATUS_ALLOC_FAILED;
    }
    *pref = (cublasLtMatmulPreferenceOpaque_t){.made = MADE, .aligned = {256, 256, 256, 256}};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t pref,
                                                    cublasLtMatmulPreferenceAttributes_t name,
                                                    const void *value, size_t bytes)
{
    bool space = name == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;

    if (pref->made != MADE || value == NULL ||
        bytes != (space ? sizeof(pref->workspace) : sizeof(pref->aligned[0]))) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (space) {
        memcpy(&pref->workspace, value, bytes);
    } else {
        memcpy(&pref->aligned[name - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, bytes);
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- what is refused ---- */

static size_t bytes_of(cudaDataType type)
{
    return type == CUDA_R_32F ? 4 : type == CUDA_R_8F_E4M3 ? 1 : 2;
}

/* What 8-bit types ask of every matrix: columns of whole 16 bytes, 16 bytes apart. */
static bool fits_f8(const cublasLtMatrixLayoutOpaque_t *l)
{
    return l->rows * bytes_of(l->type) % 16 == 0 && (uint64_t)l->ld * bytes_of(l->type) % 16 == 0;
}

static cublasStatus_t look(cublasLtHandle_t handle, const cublasLtMatmulDescOpaque_t *op,
                           const cublasLtMatrixLayoutOpaque_t *a,
                           const cublasLtMatrixLayoutOpaque_t *b,
                           const cublasLtMatrixLayoutOpaque_t *c,
                           const cublasLtMatrixLayoutOpaque_t *d)
{
    if (handle == NULL || handle->made != MADE || op->made != MADE || a->made != MADE ||
        b->made != MADE || c->made != MADE || d->made != MADE) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    const cublasLtMatrixLayoutOpaque_t *all[] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        if (all[i]->rows == 0 || all[i]->cols == 0 || all[i]->ld < 0 ||
            (uint64_t)all[i]->ld < all[i]->rows) {
            return CUBLAS_STATUS_INVALID_VALUE;
        }
    }
    uint64_t m = op->a == CUBLAS_OP_T ? a->cols : a->rows,
             k = op->a == CUBLAS_OP_T ? a->rows : a->cols;
    if (b->rows != k || d->rows != m || d->cols != b->cols || c->rows != d->rows ||
        c->cols != d->cols || c->ld != d->ld || c->type != d->type) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (op->a != CUBLAS_OP_T || op->scale != CUDA_R_32F || d->type != CUDA_R_32F ||
        a->type != b->type ||
        (op->compute == CUBLAS_COMPUTE_32F_FAST_TF32 && a->type != CUDA_R_32F)) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    for (int i = 0; i < 2; i++) {
        if (bytes_of(a->type) == 2 && (uint64_t)all[i]->ld * 2 % 16 != 0) {
            return CUBLAS_STATUS_NOT_SUPPORTED;
        }
    }
    for (int i = 0; i < 4 && a->type == CUDA_R_8F_E4M3; i++) {
        if (!fits_f8(all[i])) {
            return CUBLAS_STATUS_NOT_SUPPORTED;
        }
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t op,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t pref, int most,
                                              cublasLtMatmulHeuristicResult_t found[], int *n)
{
    cublasStatus_t st = look(handle, op, a, b, c, d);

    *n = 0;
    if (st != CUBLAS_STATUS_SUCCESS || most < 1 || pref->made != MADE) {
        return st != CUBLAS_STATUS_SUCCESS ? st : CUBLAS_STATUS_INVALID_VALUE;
    }
    for (int i = 0; i < 4; i++) {
        uint32_t least = bytes_of(a->type) == 1 || (i < 2 && bytes_of(a->type) == 2) ? 16 : 4;
        if (pref->aligned[i] < least) {
            return CUBLAS_STATUS_NOT_SUPPORTED;
        }
    }
    cublasLtMatmulAlgo_t algo = {.made = MADE,
                                 .m = d->rows,
                                 .n = d->cols,
                                 .k = a->rows,
                                 .parts = (uint32_t)(1 + d->cols / 8 % PARTS_MAX)};
    memcpy(algo.aligned, pref->aligned, sizeof(algo.aligned));
    algo.workspace = algo.parts > 1 && pref->workspace >= 1024 ? 1024 : 0;
    found[0] = (cublasLtMatmulHeuristicResult_t){
        .algo = algo, .workspaceSize = algo.workspace, .state = CUBLAS_STATUS_SUCCESS};
    *n = 1;
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- the product ---- */

/* To 10 bits behind the point, to nearest, halves away from zero, as the conversion of tensor cores' inputs does. */
static float tf32(float f)
{
    uint32_t bits;

    memcpy(&bits, &f, sizeof(bits));
    if ((bits & 0x7f800000U) != 0x7f800000U) {
        bits = (bits + 0x1000U) & ~0x1fffU;
    }
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static float value(const void *p, cudaDataType type, size_t at, bool short_float)
{
    uint16_t h;

    if (type == CUDA_R_32F) {
        float f = ((const float *)p)[at];
        return short_float ? tf32(f) : f;
    }
    if (type == CUDA_R_8F_E4M3) {
        return bt_f8_to_f32(((const uint8_t *)p)[at]);
    }
    memcpy(&h, (const uint8_t *)p + 2 * at, sizeof(h));
    return type == CUDA_R_16F ? bt_f16_to_f32(h) : bt_bf16_to_f32(h);
}

/* A product in a stream. */
struct product {
    const void *a, *b, *c;
    void *d, *workspace;
    cublasLtMatrixLayoutOpaque_t la, lb, lc, ld;
    cublasLtMatmulAlgo_t algo;
    bool short_float;
    float scale, add;
};

static void multiply(void *arg)
{
    const struct product *p = arg;

    memset(p->workspace, PATTERN, p->algo.workspace);
    for (uint64_t col = 0; col < p->ld.cols; col++) {
        for (uint64_t row = 0; row < p->ld.rows; row++) {
            float part[PARTS_MAX] = {0.0F}, sum = 0.0F;
            for (uint64_t k = 0; k < p->la.rows; k++) {
                float *to = &part[k * p->algo.parts / p->la.rows];
                *to = fmaf(value(p->a, p->la.type, row * (uint64_t)p->la.ld + k, p->short_float),
                           value(p->b, p->lb.type, col * (uint64_t)p->lb.ld + k, p->short_float),
                           *to);
            }
            for (uint32_t i = 0; i < p->algo.parts; i++) {
                sum += part[i];
            }
            float *out = (float *)p->d + col * (uint64_t)p->ld.ld + row;
            *out = p->add != 0.0F
                       ? p->scale * sum +
                             p->add * ((const float *)p->c)[col * (uint64_t)p->lc.ld + row]
                       : p->scale * sum;
        }
    }
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t op, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t la, const void *b,
                              cublasLtMatrixLayout_t lb, const void *beta, const void *c,
                              cublasLtMatrixLayout_t lc, void *d, cublasLtMatrixLayout_t ld,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t bytes,
                              cudaStream_t stream)
{
    cublasStatus_t st = look(handle, op, la, lb, lc, ld);
    const uintptr_t at[] = {(uintptr_t)a, (uintptr_t)b, (uintptr_t)c, (uintptr_t)d};

    if (st != CUBLAS_STATUS_SUCCESS) {
        return st;
    }
    for (int i = 0; i < 4; i++) {
        if (at[i] == 0 || at[i] % algo->aligned[i] != 0) {
            return CUBLAS_STATUS_INVALID_VALUE;
        }
    }
    if (stream == NULL || algo->made != MADE || algo->m != ld->rows || algo->n != ld->cols ||
        algo->k != la->rows || bytes < algo->workspace ||
        (algo->workspace > 0 && (workspace == NULL || (uintptr_t)workspace % 16 != 0))) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    struct product p = {.a = a,
                        .b = b,
                        .c = c,
                        .d = d,
                        .workspace = workspace,
                        .la = *la,
                        .lb = *lb,
                        .lc = *lc,
                        .ld = *ld,
                        .algo = *algo,
                        .short_float = op->compute == CUBLAS_COMPUTE_32F_FAST_TF32};
    memcpy(&p.scale, alpha, sizeof(p.scale));
    memcpy(&p.add, beta, sizeof(p.add));
    return emu_queue_call(stream, multiply, &p, sizeof(p)) == cudaSuccess
               ? CUBLAS_STATUS_SUCCESS
               : CUBLAS_STATUS_EXECUTION_FAILED;
}
