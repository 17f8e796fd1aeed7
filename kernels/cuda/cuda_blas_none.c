/* A build without cuBLAS: its classes are refused, and nothing else is ever called. */

#include "base/assert.h"
#include "kernels/cuda/cuda_blas_int.h"

#include <string.h>

enum bt_status cuda_blas_create(struct cuda_ctx *c, const char *numerics, struct cuda_blas **out,
                                struct bt_err *err)
{
    (void)c;
    *out = NULL;
    if (strncmp(numerics, "cuda-cublas", strlen("cuda-cublas")) == 0) {
        return bt_err_set(err, BT_ERR_UNSUPPORTED,
                          "numerics class %s: this build has no cuBLAS (deploy/quickstart.sh "
                          "--deps-only --cuda, then configure again)",
                          numerics);
    }
    return BT_OK;
}

void cuda_blas_destroy(struct cuda_ctx *c, struct cuda_blas *b)
{
    (void)c;
    BT_ASSERT(b == NULL);
}

bool cuda_blas_takes(const struct cuda_ctx *c, const struct bt_k_weight_desc *d)
{
    (void)c;
    (void)d;
    return false;
}

enum bt_status cuda_blas_weight_create(struct bt_kctx *k, const struct bt_k_weight_desc *desc,
                                       struct bt_kweight **out, struct bt_err *err)
{
    (void)k;
    (void)desc;
    (void)out;
    return bt_err_set(err, BT_ERR_UNSUPPORTED, "this build has no cuBLAS");
}

void cuda_blas_gemm_all(struct bt_kctx *k, const struct bt_k_product *products, uint32_t n,
                        const float *x, size_t ldx, uint32_t n_rows)
{
    for (uint32_t i = 0; i < n; i++) {
        const struct bt_k_product *p = &products[i];
        cuda_gemm(k, p->y, p->ldy, x, ldx, p->w, p->bias, n_rows);
    }
}

void cuda_blas_embed(struct bt_kctx *k, float *y, const struct bt_kweight *table,
                     const uint32_t *ids, uint32_t n_ids, float scale)
{
    cuda_embed(k, y, table, ids, n_ids, scale);
}

void cuda_blas_limit(struct bt_kctx *k, size_t weight_bytes, size_t x_bytes)
{
    (void)k;
    (void)weight_bytes;
    (void)x_bytes;
}

uint64_t cuda_blas_asked(struct bt_kctx *k)
{
    (void)k;
    return 0;
}
