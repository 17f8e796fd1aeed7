/* Kernels around cuBLASLt: products of few rows with weights that lie as rows, x rounded for the library, packed weights
 * expanded for it. */

#include "kernels/cuda/cuda_blas_int.h"
#include "kernels/cuda/cuda_blocks_int.cuh"

#define THREADS 256U
#define WARPS   8U
#define PITCH   33U /* lanes of a sum in shared memory, so that adding them meets no bank twice */

/* 16 bytes that are loaded at once. */
struct alignas(16) quad {
    uint32_t v[4];
};

template <int KIND> static __device__ __forceinline__ void unpack(const struct quad &q, float *w)
{
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        if (KIND == CUDA_KIND_F32) {
            w[i] = float_of_bits(q.v[i]);
        } else if (KIND == CUDA_KIND_F16) {
            w[2 * i] = float_of_f16(q.v[i] & 0xffffU);
            w[2 * i + 1] = float_of_f16(q.v[i] >> 16);
        } else {
            w[2 * i] = float_of_bits(q.v[i] << 16);
            w[2 * i + 1] = float_of_bits(q.v[i] & 0xffff0000U);
        }
    }
}

/* n values of x from k on, zeros behind n_cols. */
static __device__ __forceinline__ void load_x(const float *x, uint32_t k, uint32_t n,
                                              uint32_t n_cols, bool aligned, float *v)
{
    if (aligned && k + n <= n_cols) {
#pragma unroll
        for (uint32_t i = 0; i < n; i += 4) {
            const struct quad q = *(const struct quad *)(const void *)(x + k + i);
            unpack<CUDA_KIND_F32>(q, v + i);
        }
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < n; i++) {
        v[i] = k + i < n_cols ? x[k + i] : 0.0F;
    }
}

/* Every warp runs along the rows of OUT weights for M rows of x; then the lanes' sums are added. */
template <int KIND, int M, int OUT>
static __global__ void __launch_bounds__(32 * WARPS) gemv_rows(struct cuda_rows_product p)
{
    constexpr uint32_t V = KIND == CUDA_KIND_F32 ? 4 : 8, BYTES = 16 / V, SUMS = OUT * M;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t n0 = (blockIdx.x * WARPS + warp) * OUT;
    shared_ptr<float> sums = shared_as<float>(0); /* [WARPS][OUT][M][PITCH] */
    float acc[OUT][M] = {{0.0F}};

    for (uint32_t k = lane * V; k < p.ld; k += 32 * V) {
        float x[M][V];
#pragma unroll
        for (uint32_t m = 0; m < M; m++) {
            load_x(p.x + (m < p.n_rows ? m : 0) * p.ldx, k, V, p.n_cols, p.aligned, x[m]);
        }
#pragma unroll
        for (uint32_t o = 0; o < OUT; o++) {
            const uint32_t n = n0 + o < p.n_out ? n0 + o : p.n_out - 1;
            const struct quad q =
                *(const struct quad *)((const uint8_t *)p.w + ((size_t)n * p.ld + k) * BYTES);
            float w[V];
            unpack<KIND>(q, w);
#pragma unroll
            for (uint32_t m = 0; m < M; m++) {
#pragma unroll
                for (uint32_t i = 0; i < V; i++) {
                    acc[o][m] = fmaf(x[m][i], w[i], acc[o][m]);
                }
            }
        }
    }
#pragma unroll
    for (uint32_t o = 0; o < OUT; o++) {
#pragma unroll
        for (uint32_t m = 0; m < M; m++) {
            sums[(warp * SUMS + o * M + m) * PITCH + lane] = acc[o][m];
        }
    }
    __syncthreads();
    if (threadIdx.x < WARPS * SUMS) {
        const uint32_t o = threadIdx.x / M, m = threadIdx.x % M, n = blockIdx.x * WARPS * OUT + o;
        float total = 0.0F;
        for (uint32_t i = 0; i < 32; i++) {
            total += sums[threadIdx.x * PITCH + i];
        }
        if (m < p.n_rows && n < p.n_out) {
            p.y[m * p.ldy + n] = p.bias != NULL ? total + p.bias[n] : total;
        }
    }
}

template <int KIND, int M, int OUT>
static void launch_gemv(struct cuda_ctx *c, const struct cuda_rows_product *product)
{
    const struct cuda_rows_product p = *product;
    const size_t shared = (size_t)WARPS * OUT * M * PITCH * sizeof(float);

    static_assert(OUT * M <= 32, "a thread for each sum");
    BT_LAUNCH(c, (gemv_rows<KIND, M, OUT>), cuda_blocks(p.n_out, WARPS * OUT), 32 * WARPS, shared,
              p);
}

template <int KIND> static void gemv(struct cuda_ctx *c, const struct cuda_rows_product *p)
{
    if (p->n_rows == 1) {
        launch_gemv<KIND, 1, 1>(c, p);
    } else if (p->n_rows <= 4) {
        launch_gemv<KIND, 4, 2>(c, p);
    } else {
        launch_gemv<KIND, 8, 4>(c, p);
    }
}

extern "C" void cuda_rows_gemv(struct cuda_ctx *c, const struct cuda_rows_product *p)
{
    BT_ASSERT(p->n_rows > 0 && p->n_rows <= CUDA_BLAS_FEW);
    if (p->kind == CUDA_KIND_F32) {
        gemv<CUDA_KIND_F32>(c, p);
    } else if (p->kind == CUDA_KIND_F16) {
        gemv<CUDA_KIND_F16>(c, p);
    } else {
        gemv<CUDA_KIND_BF16>(c, p);
    }
}

/* ---- other kernels; a thread for each value, pair or block ---- */

template <int KIND>
static __global__ void embed_rows(float *y, struct cuda_view v, const uint32_t *ids, size_t n,
                                  float scale)
{
    const size_t at = thread_index();

    if (at >= n) {
        return;
    }
    const size_t k = at % v.n_cols, from = (size_t)ids[at / v.n_cols] * v.n_blocks * CUDA_BLOCK + k;
    float w;
    if (KIND == CUDA_KIND_F32) {
        w = ((const float *)v.data)[from];
    } else if (KIND == CUDA_KIND_F16) {
        w = float_of_f16(((const uint16_t *)v.data)[from]);
    } else {
        w = float_of_bf16(((const uint16_t *)v.data)[from]);
    }
    y[at] = w * scale;
}

extern "C" void cuda_rows_embed(struct cuda_ctx *c, float *y, const struct cuda_view *view,
                                const uint32_t *ids, uint32_t n_ids, float scale)
{
    const struct cuda_view v = *view;
    const size_t n = (size_t)n_ids * v.n_cols;

    if (v.kind == CUDA_KIND_F32) {
        BT_LAUNCH(c, (embed_rows<CUDA_KIND_F32>), cuda_blocks(n, THREADS), THREADS, 0, y, v, ids, n,
                  scale);
    } else if (v.kind == CUDA_KIND_F16) {
        BT_LAUNCH(c, (embed_rows<CUDA_KIND_F16>), cuda_blocks(n, THREADS), THREADS, 0, y, v, ids, n,
                  scale);
    } else {
        BT_LAUNCH(c, (embed_rows<CUDA_KIND_BF16>), cuda_blocks(n, THREADS), THREADS, 0, y, v, ids,
                  n, scale);
    }
}

/* What is beyond f16 becomes its largest number; infinities and NaNs stay. */
static __device__ __forceinline__ uint32_t f16_held(float f)
{
    const uint32_t size = bits_of_float(f) & 0x7fffffffU;

    if (size >= 0x477ff000U && size < 0x7f800000U) { /* would round to infinity */
        return (bits_of_float(f) >> 31) << 15 | 0x7bffU;
    }
    return f16_of_float(f);
}

template <int KIND> static __device__ __forceinline__ uint32_t rounded(float f)
{
    return KIND == CUDA_KIND_F16 ? f16_held(f) : bf16_of_float(f);
}

struct round_job {
    uint32_t *out; /* words */
    const float *x;
    const uint32_t *perm;
    size_t ldx, n; /* n: words */
    uint32_t row_words, n_cols;
};

static __device__ __forceinline__ float x_at(const struct round_job &r, size_t row, uint32_t k)
{
    return k < r.n_cols ? r.x[row * r.ldx + (r.perm != NULL ? r.perm[k] : k)] : 0.0F;
}

template <int KIND> static __global__ void round_x(struct round_job r)
{
    const size_t at = thread_index();

    if (at >= r.n) {
        return;
    }
    const size_t row = at / r.row_words;
    const uint32_t i = (uint32_t)(at % r.row_words);
    if (KIND == CUDA_KIND_F32) {
        r.out[at] = bits_of_float(x_at(r, row, i));
    } else {
        r.out[at] = rounded<KIND>(x_at(r, row, 2 * i)) | rounded<KIND>(x_at(r, row, 2 * i + 1))
                                                             << 16;
    }
}

extern "C" void cuda_rows_round(struct cuda_ctx *c, void *out, uint32_t ld, uint32_t kind,
                                const float *x, size_t ldx, const uint32_t *perm, uint32_t n_cols,
                                uint32_t n_rows)
{
    struct round_job r = {};

    r.out = (uint32_t *)out;
    r.x = x;
    r.perm = perm;
    r.ldx = ldx;
    r.row_words = kind == CUDA_KIND_F32 ? ld : ld / 2;
    r.n = (size_t)n_rows * r.row_words;
    r.n_cols = n_cols;
    if (kind == CUDA_KIND_F32) {
        BT_LAUNCH(c, (round_x<CUDA_KIND_F32>), cuda_blocks(r.n, THREADS), THREADS, 0, r);
    } else if (kind == CUDA_KIND_F16) {
        BT_LAUNCH(c, (round_x<CUDA_KIND_F16>), cuda_blocks(r.n, THREADS), THREADS, 0, r);
    } else {
        BT_LAUNCH(c, (round_x<CUDA_KIND_BF16>), cuda_blocks(r.n, THREADS), THREADS, 0, r);
    }
}

template <int KIND>
static __global__ void expand(uint32_t *out, struct cuda_view v, uint32_t row0, size_t n)
{
    constexpr uint32_t WORDS = KIND == CUDA_KIND_F32 ? CUDA_BLOCK : CUDA_BLOCK / 2;
    const size_t at = thread_index();
    float w[CUDA_BLOCK];

    if (at >= n) {
        return;
    }
    /* Lanes hold neighbouring rows, as the panels do. */
    const uint32_t lane = (uint32_t)(at % CUDA_PANEL);
    const size_t rest = at / CUDA_PANEL;
    const uint32_t b = (uint32_t)(rest % v.n_blocks),
                   row = (uint32_t)(rest / v.n_blocks) * CUDA_PANEL + lane;
    if (row0 + row >= v.n_rows) {
        return;
    }
    weight_block<KIND>(v, row0 + row, b, w);
    uint32_t *to = out + ((size_t)row * v.n_blocks + b) * WORDS;
#pragma unroll
    for (uint32_t i = 0; i < WORDS; i++) {
        if (KIND == CUDA_KIND_F32) {
            to[i] = bits_of_float(w[i]);
        } else if (KIND == CUDA_KIND_F16) {
            to[i] = rounded<CUDA_KIND_F16>(w[2 * i]) | rounded<CUDA_KIND_F16>(w[2 * i + 1]) << 16;
        } else {
            to[i] = rounded<CUDA_KIND_BF16>(w[2 * i]) | rounded<CUDA_KIND_BF16>(w[2 * i + 1]) << 16;
        }
    }
}

extern "C" void cuda_rows_expand(struct cuda_ctx *c, void *out, const struct cuda_view *view,
                                 uint32_t row0, uint32_t n_rows)
{
    const struct cuda_view v = *view;
    const size_t n = (size_t)cuda_blocks(n_rows, CUDA_PANEL) * CUDA_PANEL * v.n_blocks;
    uint32_t *to = (uint32_t *)out;

    switch ((enum cuda_kind)v.kind) {
    case CUDA_KIND_F32:
        BT_LAUNCH(c, (expand<CUDA_KIND_F32>), cuda_blocks(n, THREADS), THREADS, 0, to, v, row0, n);
        break;
    case CUDA_KIND_F16:
        BT_LAUNCH(c, (expand<CUDA_KIND_F16>), cuda_blocks(n, THREADS), THREADS, 0, to, v, row0, n);
        break;
    case CUDA_KIND_BF16:
        BT_LAUNCH(c, (expand<CUDA_KIND_BF16>), cuda_blocks(n, THREADS), THREADS, 0, to, v, row0, n);
        break;
    case CUDA_KIND_BLOCKS:
    case CUDA_KIND_BLOCK_TILES:
        BT_LAUNCH(c, (expand<CUDA_KIND_BLOCKS>), cuda_blocks(n, THREADS), THREADS, 0, to, v, row0,
                  n);
        break;
    case CUDA_KIND_TILES:
        BT_LAUNCH(c, (expand<CUDA_KIND_TILES>), cuda_blocks(n, THREADS), THREADS, 0, to, v, row0,
                  n);
        break;
    }
}

static __global__ void add_bias(float *y, size_t ldy, const float *bias, size_t n, uint32_t n_cols)
{
    const size_t at = thread_index();

    if (at < n) {
        y[at / n_cols * ldy + at % n_cols] += bias[at % n_cols];
    }
}

extern "C" void cuda_rows_bias(struct cuda_ctx *c, float *y, size_t ldy, const float *bias,
                               uint32_t n_rows, uint32_t n_cols)
{
    const size_t n = (size_t)n_rows * n_cols;

    BT_LAUNCH(c, (add_bias), cuda_blocks(n, THREADS), THREADS, 0, y, ldy, bias, n, n_cols);
}
