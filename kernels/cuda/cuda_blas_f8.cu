/* Kernels of class cuda-cublas-fp8: x rounded to e4m3 for the library, its sums scaled, and products of few rows. */

#include "kernels/cuda/cuda_blas_int.h"
#include "kernels/cuda/cuda_numbers_int.cuh"

#define THREADS 256U
#define WARPS   8U
#define PITCH   33U /* lanes of a sum in shared memory, so that adding them meets no bank twice */
#define PIECE   8U  /* codes that a lane loads at once */

/* A block of threads for each row. */
static __global__ void __launch_bounds__(THREADS)
    round_f8(uint32_t *codes, float *scales, const float *x, size_t ldx, uint32_t n_cols)
{
    shared_ptr<float> most = shared_as<float>(0); /* [THREADS] */
    const float *row = x + blockIdx.x * ldx;
    float a = 0.0F;

    for (uint32_t k = threadIdx.x; k < n_cols; k += THREADS) {
        const float v = fabsf(row[k]);
        a = v > a ? v : a;
    }
    most[threadIdx.x] = a;
    for (uint32_t half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            const float v = most[threadIdx.x + half];
            a = v > a ? v : a;
            most[threadIdx.x] = a;
        }
    }
    __syncthreads();
    a = most[0];
    const bool zero = a < 0x1p-100F;
    const float up = zero ? 0.0F : 448.0F / a;
    for (uint32_t i = threadIdx.x; i < n_cols / 4; i += THREADS) {
        uint32_t word = 0;
        for (uint32_t j = 0; j < 4; j++) {
            word |= (uint32_t)f8_of_float(row[4 * i + j] * up) << 8 * j;
        }
        codes[(size_t)blockIdx.x * (n_cols / 4) + i] = word;
    }
    if (threadIdx.x == 0) {
        scales[blockIdx.x] = zero ? 0.0F : a / 448.0F;
    }
}

extern "C" void cuda_f8_round(struct cuda_ctx *c, void *codes, float *scales, const float *x,
                              size_t ldx, uint32_t n_cols, uint32_t n_rows)
{
    uint32_t *words = (uint32_t *)codes;

    BT_LAUNCH(c, (round_f8), n_rows, THREADS, THREADS * sizeof(float), words, scales, x, ldx,
              n_cols);
}

struct scale_job {
    float *y;
    const float *x_scales, *w_scales, *bias;
    size_t ldy, n;
    uint32_t n_out;
};

static __global__ void scale_sums(struct scale_job s)
{
    const size_t at = thread_index();

    if (at >= s.n) {
        return;
    }
    const size_t m = at / s.n_out, n = at % s.n_out;
    const float v = s.y[m * s.ldy + n] * s.x_scales[m] * s.w_scales[n];
    s.y[m * s.ldy + n] = s.bias != NULL ? v + s.bias[n] : v;
}

extern "C" void cuda_f8_scale(struct cuda_ctx *c, float *y, size_t ldy, const float *x_scales,
                              const float *w_scales, const float *bias, uint32_t n_rows,
                              uint32_t n_out)
{
    struct scale_job s = {};

    s.y = y;
    s.x_scales = x_scales;
    s.w_scales = w_scales;
    s.bias = bias;
    s.ldy = ldy;
    s.n = (size_t)n_rows * n_out;
    s.n_out = n_out;
    BT_LAUNCH(c, (scale_sums), cuda_blocks(s.n, THREADS), THREADS, 0, s);
}

struct alignas(8) codes8 {
    uint32_t v[2];
};

/* Every warp runs along a row of weights for M rows of x; then the lanes' sums are added. */
template <int M>
static __global__ void __launch_bounds__(THREADS) gemv_f8(struct cuda_rows_product p)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, n0 = blockIdx.x * WARPS + warp;
    const uint32_t n = n0 < p.n_out ? n0 : p.n_out - 1;
    shared_ptr<float> sums = shared_as<float>(0); /* [WARPS][M][PITCH] */
    float acc[M] = {0.0F};

    for (uint32_t k = lane * PIECE; k < p.n_cols; k += 32 * PIECE) {
        const struct codes8 q =
            *(const struct codes8 *)(const void *)((const uint8_t *)p.w + (size_t)n * p.ld + k);
#pragma unroll
        for (uint32_t i = 0; i < PIECE; i++) {
            const float w = float_of_f8(q.v[i / 4] >> 8 * (i % 4) & 255U);
#pragma unroll
            for (uint32_t m = 0; m < M; m++) {
                acc[m] = fmaf(p.x[(m < p.n_rows ? m : 0) * p.ldx + k + i], w, acc[m]);
            }
        }
    }
#pragma unroll
    for (uint32_t m = 0; m < M; m++) {
        sums[(warp * M + m) * PITCH + lane] = acc[m];
    }
    __syncthreads();
    if (threadIdx.x < WARPS * M) {
        const uint32_t m = threadIdx.x % M, out = blockIdx.x * WARPS + threadIdx.x / M;
        float total = 0.0F;
        for (uint32_t i = 0; i < 32; i++) {
            total += sums[threadIdx.x * PITCH + i];
        }
        if (m < p.n_rows && out < p.n_out) {
            const float v = total * p.scales[out];
            p.y[m * p.ldy + out] = p.bias != NULL ? v + p.bias[out] : v;
        }
    }
}

template <int M>
static void launch_gemv(struct cuda_ctx *c, const struct cuda_rows_product *product)
{
    const struct cuda_rows_product p = *product;

    BT_LAUNCH(c, (gemv_f8<M>), cuda_blocks(p.n_out, WARPS), THREADS,
              (size_t)WARPS * M * PITCH * sizeof(float), p);
}

extern "C" void cuda_f8_gemv(struct cuda_ctx *c, const struct cuda_rows_product *p)
{
    BT_ASSERT(p->n_rows > 0 && p->n_rows <= CUDA_BLAS_FEW);
    if (p->n_rows == 1) {
        launch_gemv<1>(c, p);
    } else if (p->n_rows <= 4) {
        launch_gemv<4>(c, p);
    } else {
        launch_gemv<8>(c, p);
    }
}
