/* The emulated cuBLASLt refuses what the library would: so that the backend's calls are worth something. And it computes what a
 * product is, in an order that changes with the number of columns. */

#include <math.h>
#include <stdalign.h>
#include <string.h>
#include "kernels/cuda/emulation/emu_blas_int.h"
#include "tests/check.h"

enum { N = 5, K = 40, ROWS = 20 };

static alignas(256) uint16_t w[N * K], x[ROWS * K];
static alignas(256) float y[ROWS * N];
static alignas(256) uint8_t space[4096];

struct call {
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulPreferenceOpaque_t pref;
    cublasLtMatmulHeuristicResult_t found;
    cublasLtHandle_t handle;
    cudaStream_t stream;
};

static void describe(struct call *c)
{
    const cublasOperation_t turned = CUBLAS_OP_T;
    const size_t bytes = sizeof(space);

    CHECK_EQ(cublasLtMatmulDescInit_internal(&c->op, sizeof(c->op), CUBLAS_COMPUTE_32F, CUDA_R_32F),
             CUBLAS_STATUS_SUCCESS);
    CHECK_EQ(cublasLtMatmulDescSetAttribute(&c->op, CUBLASLT_MATMUL_DESC_TRANSA, &turned,
                                            sizeof(turned)),
             CUBLAS_STATUS_SUCCESS);
    (void)cublasLtMatrixLayoutInit_internal(&c->a, sizeof(c->a), CUDA_R_16BF, K, N, K);
    (void)cublasLtMatrixLayoutInit_internal(&c->b, sizeof(c->b), CUDA_R_16BF, K, ROWS, K);
    (void)cublasLtMatrixLayoutInit_internal(&c->d, sizeof(c->d), CUDA_R_32F, N, ROWS, N);
    (void)cublasLtMatmulPreferenceInit_internal(&c->pref, sizeof(c->pref));
    CHECK_EQ(cublasLtMatmulPreferenceSetAttribute(
                 &c->pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof(bytes)),
             CUBLAS_STATUS_SUCCESS);
}

static cublasStatus_t ask(struct call *c)
{
    int n = 0;
    cublasStatus_t st = cublasLtMatmulAlgoGetHeuristic(c->handle, &c->op, &c->a, &c->b, &c->d,
                                                       &c->d, &c->pref, 1, &c->found, &n);

    CHECK_EQ(n, st == CUBLAS_STATUS_SUCCESS);
    return st;
}

static cublasStatus_t multiply(struct call *c, const void *b, size_t bytes)
{
    const float one = 1.0F, zero = 0.0F;

    return cublasLtMatmul(c->handle, &c->op, &one, w, &c->a, b, &c->b, &zero, y, &c->d, y, &c->d,
                          &c->found.algo, space, bytes, c->stream);
}

/* Of 8 bits everything is a multiple of 16 bytes, and the first matrix is turned. */
static void test_refused_f8(struct call *c)
{
    const struct call was = *c;
    const cublasOperation_t straight = CUBLAS_OP_N, turned = CUBLAS_OP_T;

    c->a.type = c->b.type = CUDA_R_8F_E4M3; /* K is 40 */
    CHECK_EQ(ask(c), CUBLAS_STATUS_NOT_SUPPORTED);
    c->a.rows = c->b.rows = 32;
    c->a.ld = c->b.ld = 32;
    CHECK_EQ(ask(c), CUBLAS_STATUS_NOT_SUPPORTED); /* N is 5: 20 bytes */
    c->a.cols = c->d.rows = 4;
    CHECK_EQ(ask(c), CUBLAS_STATUS_NOT_SUPPORTED); /* the same of D's leading dimension */
    c->d.ld = 4;
    CHECK_EQ(ask(c), CUBLAS_STATUS_SUCCESS);
    for (int i = 0; i < 4; i++) {
        c->pref.aligned[i] = 8;
        CHECK_EQ(ask(c), CUBLAS_STATUS_NOT_SUPPORTED);
        c->pref.aligned[i] = 16;
    }
    CHECK_EQ(ask(c), CUBLAS_STATUS_SUCCESS);
    c->b.type = CUDA_R_16BF;
    CHECK_EQ(ask(c), CUBLAS_STATUS_NOT_SUPPORTED);
    c->b.type = CUDA_R_8F_E4M3;
    (void)cublasLtMatmulDescSetAttribute(&c->op, CUBLASLT_MATMUL_DESC_TRANSA, &straight,
                                         sizeof(straight));
    c->a.rows = 4;
    c->a.cols = 32;
    CHECK(ask(c) != CUBLAS_STATUS_SUCCESS);
    *c = was;
    (void)cublasLtMatmulDescSetAttribute(&c->op, CUBLASLT_MATMUL_DESC_TRANSA, &turned,
                                         sizeof(turned));
}

static void test_refused(struct call *c)
{
    uint32_t aligned = 2;
    const int64_t ld = c->a.ld;

    c->a.ld = K - 1; /* shorter than a column */
    CHECK_EQ(ask(c), CUBLAS_STATUS_INVALID_VALUE);
    c->a.ld = K + 1; /* columns that are not 16-byte aligned */
    CHECK_EQ(ask(c), CUBLAS_STATUS_NOT_SUPPORTED);
    c->a.ld = ld;
    c->a.cols = N + 1; /* not the rows of D */
    CHECK_EQ(ask(c), CUBLAS_STATUS_INVALID_VALUE);
    c->a.cols = N;
    c->b.type = CUDA_R_16F; /* two types */
    CHECK_EQ(ask(c), CUBLAS_STATUS_NOT_SUPPORTED);
    c->b.type = CUDA_R_16BF;
    c->op.compute = CUBLAS_COMPUTE_32F_FAST_TF32; /* of bf16 */
    CHECK_EQ(ask(c), CUBLAS_STATUS_NOT_SUPPORTED);
    c->op.compute = CUBLAS_COMPUTE_32F;
    c->pref.aligned[1] = aligned;
    CHECK_EQ(ask(c), CUBLAS_STATUS_NOT_SUPPORTED);
    c->pref.aligned[1] = 256;
    test_refused_f8(c);
    c->d.made = 0; /* never initialised */
    CHECK_EQ(ask(c), CUBLAS_STATUS_INVALID_VALUE);
    describe(c);
    CHECK_EQ(ask(c), CUBLAS_STATUS_SUCCESS);
    CHECK_EQ(multiply(c, x + 8, sizeof(space)), CUBLAS_STATUS_INVALID_VALUE); /* 256 was promised */
    CHECK_EQ(multiply(c, NULL, sizeof(space)), CUBLAS_STATUS_INVALID_VALUE);
    CHECK(c->found.workspaceSize > 0);
    CHECK_EQ(multiply(c, x, 0), CUBLAS_STATUS_INVALID_VALUE);
    c->b.cols = c->d.cols = ROWS - 1; /* another shape than was asked about */
    CHECK_EQ(multiply(c, x, sizeof(space)), CUBLAS_STATUS_INVALID_VALUE);
    describe(c);
}

static void test_product(struct call *c)
{
    for (int i = 0; i < ROWS * K; i++) {
        x[i] = (uint16_t)(0x3f80 + i % 64); /* 1 to 1.5 */
    }
    for (int i = 0; i < N * K; i++) {
        w[i] = (uint16_t)(i % 2 == 0 ? 0x3f80 : 0xbf80); /* 1, -1 */
    }
    memset(y, 0xff, sizeof(y)); /* NaN: beta is 0 */
    CHECK_EQ(ask(c), CUBLAS_STATUS_SUCCESS);
    CHECK_EQ(multiply(c, x, sizeof(space)), CUBLAS_STATUS_SUCCESS);
    CHECK_EQ(cudaStreamSynchronize(c->stream), cudaSuccess);
    for (int m = 0; m < ROWS; m++) {
        for (int n = 0; n < N; n++) {
            float want = 0;
            for (int k = 0; k < K; k++) {
                want += (k % 2 == 0 ? 1.0F : -1.0F) * (1.0F + (float)((m * K + k) % 64) / 128.0F);
            }
            CHECK(fabsf(y[m * N + n] - want) < 1e-5F);
        }
    }
}

int main(void)
{
    struct call c = {0};

    CHECK_EQ(cublasLtCreate(&c.handle), CUBLAS_STATUS_SUCCESS);
    CHECK_EQ(cudaStreamCreateWithFlags(&c.stream, cudaStreamNonBlocking), cudaSuccess);
    describe(&c);
    test_refused(&c);
    test_product(&c);
    CHECK_EQ(cudaStreamDestroy(c.stream), cudaSuccess);
    CHECK_EQ(cublasLtDestroy(c.handle), CUBLAS_STATUS_SUCCESS);
    return bt_test_done();
}
