#ifndef BT_KERNELS_CUDA_BLAS_INT_H
#define BT_KERNELS_CUDA_BLAS_INT_H

/* Products of many rows by cuBLASLt: what the backend adds for its classes "cuda-cublas", "cuda-cublas-tf32" and "cuda-cublas-fp8".
 *
 * They are cuda-bf16 (cuda_int.h) but for experts with weights in blocks, which are as in cuda-f32, and for bt_k_gemm:
 *  - of more than CUDA_BLAS_FEW rows, with weights in blocks of more than CUDA_BLAS_FEW_BLOCKS: cuBLASLt, sums in f32. Their
 *    order is the library's and changes with the number of rows, its version and the device: no *one answer*. x is rounded to
 *    the weight's type, to nearest even, in f16 at most to ±65504; blocks are made bf16, x too. F32 weights: nothing is
 *    rounded; in cuda-cublas-tf32 the device rounds both to TF32.
 *  - of fewer, with F32, F16 and BF16 weights: lane i of 32 takes the V values from k = V i, V i + 32 V, … on (V: what 16 bytes
 *    hold) one by one by fma, from +0; the lanes are added in order to +0; then + bias[n]. x is not rounded. One row or eight,
 *    the order is this.
 *  - of fewer, with weights in blocks: as cuda-f32; F32, F16 and BF16 weights with an order of inputs: as cuda-bf16.
 *  - where cuBLASLt has nothing for a shape: as if there were few rows.
 * cuda-cublas-fp8, on devices from compute capability 8.9 on, is cuda-cublas but for gf8 weights with one scale d for each row, not of
 * experts and without an order of inputs:
 *  - of more than CUDA_BLAS_FEW rows: each row of x is rounded to e4m3. With a = max |x[k]|: a < 2^-100: s and all codes are 0; else
 *    s = a / 448, and the codes are those of x[k] * (448 / a). cuBLASLt adds up the products of codes; y = sum * s * d, then
 *    + bias[n].
 *  - of fewer: w are the codes, V is 8, and the sum is multiplied by d; x is not rounded.
 * F32, F16 and BF16 weights lie in device memory as in the file, rows padded to 32 values: the only copy, which cuBLASLt reads
 * as it is. Others are expanded into a workspace for each call. Everything is allocated when the context is made. */

#include "kernels/cuda/cuda_int.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/cuda/cuda_blas_limits_int.h"

struct cuda_blas;

/* numerics: the context's class. NULL in *out: it is not one with cuBLAS. BT_ERR_UNSUPPORTED: not in this build, or no such
 * library on this machine. */
enum bt_status cuda_blas_create(struct cuda_ctx *c, const char *numerics, struct cuda_blas **out,
                                struct bt_err *err) BT_NODISCARD;
void cuda_blas_destroy(struct cuda_ctx *c, struct cuda_blas *b); /* the stream is idle */
/* Whether a weight is kept as rows: then it is made by cuda_blas_weight_create. */
bool cuda_blas_takes(const struct cuda_ctx *c, const struct bt_k_weight_desc *d);
enum bt_status cuda_blas_weight_create(struct bt_kctx *k, const struct bt_k_weight_desc *desc,
                                       struct bt_kweight **out, struct bt_err *err);
void cuda_blas_gemm_all(struct bt_kctx *k, const struct bt_k_product *products, uint32_t n,
                        const float *x, size_t ldx, uint32_t n_rows);
/* Of a weight that is kept as rows. */
void cuda_blas_embed(struct bt_kctx *k, float *y, const struct bt_kweight *table,
                     const uint32_t *ids, uint32_t n_ids, float scale);

/* Kind of weights that lie as rows of e4m3 codes, and behind them, on 256 bytes, their scales. */
#define CUDA_KIND_F8 16U

/* Kernels (cuda_blas_rows.cu). */
struct cuda_rows_product {
    float *y;
    const float *x;
    const void *w; /* [n_out][ld] of kind, 16-byte aligned rows */
    const float *bias;
    size_t ldy, ldx;
    uint32_t ld, n_out, n_cols,
        n_rows;          /* ld: values, a multiple of 32; what lies behind n_cols is 0 */
    uint32_t kind;       /* CUDA_KIND_F32, F16 or BF16 */
    bool aligned;        /* rows of x are 16-byte aligned */
    const float *scales; /* [n_out], of CUDA_KIND_F8 */
};
/* n_rows: 1 to CUDA_BLAS_FEW. */
void cuda_rows_gemv(struct cuda_ctx *c, const struct cuda_rows_product *p);
void cuda_rows_embed(struct cuda_ctx *c, float *y, const struct cuda_view *v, const uint32_t *ids,
                     uint32_t n_ids, float scale);
/* out[n_rows][ld] of kind = x, rounded, in the order perm (NULL: as it is), zeros behind n_cols. */
void cuda_rows_round(struct cuda_ctx *c, void *out, uint32_t ld, uint32_t kind, const float *x,
                     size_t ldx, const uint32_t *perm, uint32_t n_cols, uint32_t n_rows);
/* Rows row0 (a multiple of 32) … of a packed weight: out[n_rows][32 * n_blocks], of its kind, blocks as BF16. */
void cuda_rows_expand(struct cuda_ctx *c, void *out, const struct cuda_view *v, uint32_t row0,
                      uint32_t n_rows);
/* cuda_blas_f8.cu. Codes: [n_rows][n_cols], 4-byte aligned; n_cols: a multiple of 32. */
void cuda_f8_round(struct cuda_ctx *c, void *codes, float *scales, const float *x, size_t ldx,
                   uint32_t n_cols, uint32_t n_rows);
void cuda_f8_scale(struct cuda_ctx *c, float *y, size_t ldy, const float *x_scales,
                   const float *w_scales, const float *bias, uint32_t n_rows, uint32_t n_out);
/* As cuda_rows_gemv, of CUDA_KIND_F8; ld = n_cols. */
void cuda_f8_gemv(struct cuda_ctx *c, const struct cuda_rows_product *p);
void cuda_rows_bias(struct cuda_ctx *c, float *y, size_t ldy, const float *bias, uint32_t n_rows,
                    uint32_t n_cols);

#ifdef __cplusplus
}
#endif

#endif
