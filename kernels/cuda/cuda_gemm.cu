/* Matrix products in f32, of weights of every type; those of tensor cores are in cuda_tiles.cu. Two kernels with the same
 * sums (cuda_int.h): for up to 8 rows every warp runs down its own segments of K over the 32 outputs of a panel, reading the
 * weights once in long stretches; for more rows tiles of 64 x 128 outputs in shared memory. */

#include "kernels/cuda/cuda_blocks_int.cuh"
#include "kernels/cuda/cuda_product_int.cuh"

#define TILE_M       64U
#define TILE_N       128U /* a multiple of CUDA_PANEL */
#define TILE_THREADS 256U
#define THREAD_M     4U
#define THREAD_N     8U
#define PITCH_M      (TILE_M + 1) /* so that neither writing nor reading meets one bank */
#define PITCH_N      (TILE_N + 1)

/* The row of x of an output row. */
static __device__ __forceinline__ const float *x_row(const struct cuda_product &p, uint32_t m)
{
    return p.x + (p.x_row != NULL ? p.x_row[m] : m) * p.ldx;
}

static __device__ __forceinline__ float x_value(const float *x, const struct cuda_view &w,
                                                uint32_t k)
{
    return k < w.n_cols ? x[w.perm != NULL ? w.perm[k] : k] : 0.0F;
}

/* ---- up to 8 rows ---- */

/* Grid: (panels, groups of M rows). WARPS segments at a time; x of those lies in shared memory, then their sums. */
template <int KIND, int M, int WARPS>
static __global__ void __launch_bounds__(32 * WARPS,
                                         KIND == CUDA_KIND_BLOCKS || WARPS == 16 ? 1 : 2)
    gemv(struct cuda_product p)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t row0 = blockIdx.y * M;
    shared_ptr<float> xs = shared_as<float>(0);                     /* [WARPS][M][CUDA_SEGMENT] */
    shared_ptr<float> sums = xs + (size_t)WARPS * M * CUDA_SEGMENT; /* [WARPS][M][32] */
    struct cuda_view w = p.w;
    float total = 0.0F; /* warps 0 … M - 1: of their row */

    if (p.experts != NULL) {
        w = p.experts[p.row_expert[row0]];
        if (w.kind != (uint32_t)KIND) {
            return;
        }
    }
    const uint32_t n = blockIdx.x * CUDA_PANEL + lane;
    for (uint32_t k0 = 0; k0 < w.n_cols; k0 += WARPS * CUDA_SEGMENT) {
        for (uint32_t i = threadIdx.x; i < WARPS * M * CUDA_SEGMENT; i += 32 * WARPS) {
            const uint32_t k = i % CUDA_SEGMENT, m = i / CUDA_SEGMENT % M, s = i / CUDA_SEGMENT / M;
            xs[i] = row0 + m < p.n_rows ? x_value(x_row(p, row0 + m), w, k0 + s * CUDA_SEGMENT + k)
                                        : 0.0F;
        }
        __syncthreads();
        const uint32_t b0 = k0 / CUDA_BLOCK + warp * (CUDA_SEGMENT / CUDA_BLOCK);
        float acc[M] = {0.0F};
        for (uint32_t b = b0; b < b0 + CUDA_SEGMENT / CUDA_BLOCK && b < w.n_blocks; b++) {
            float v[CUDA_BLOCK];
            weight_block<KIND>(w, n, b, v);
#pragma unroll
            for (int m = 0; m < M; m++) {
                shared_ptr<float> xm =
                    xs + ((size_t)warp * M + (uint32_t)m) * CUDA_SEGMENT + (b - b0) * CUDA_BLOCK;
#pragma unroll
                for (uint32_t j = 0; j < CUDA_BLOCK; j++) {
                    acc[m] = fmaf(xm[j], v[j], acc[m]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
            sums[((size_t)warp * M + (uint32_t)m) * 32 + lane] = acc[m];
        }
        __syncthreads();
        for (uint32_t s = 0; warp < M && s < WARPS && k0 + s * CUDA_SEGMENT < w.n_cols; s++) {
            total += sums[((size_t)s * M + warp) * 32 + lane];
        }
    }
    if (warp < M && row0 + warp < p.n_rows && n < w.n_rows) {
        p.y[(row0 + warp) * p.ldy + n] = p.bias != NULL ? total + p.bias[n] : total;
    }
}

template <int KIND, int M, int WARPS>
static void launch_gemv(struct cuda_ctx *c, const struct cuda_product *product)
{
    const struct cuda_product p = *product;
    const size_t shared = (size_t)WARPS * M * (CUDA_SEGMENT + 32) * sizeof(float);

    static_assert(WARPS >= M, "a warp for the sums of each row");
    BT_LAUNCH(c, (gemv<KIND, M, WARPS>),
              dim3(cuda_blocks(p.w.n_rows, CUDA_PANEL), cuda_blocks(p.n_rows, M)), 32 * WARPS,
              shared, p);
}

/* ---- tiles ---- */

/* 32 k of the tile's weights and rows into shared memory, k outermost. */
template <int KIND>
static __device__ __forceinline__ void
load_tile(const struct cuda_product &p, const struct cuda_view &w, const struct tile &t, uint32_t b,
          shared_ptr<float> ws, shared_ptr<float> xs)
{
    const uint32_t at = threadIdx.x, n = blockIdx.x * TILE_N + at;

    if (at < TILE_N) {
        float v[CUDA_BLOCK] = {0.0F};
        if (n / CUDA_PANEL * CUDA_PANEL < w.n_rows) { /* the panel is there */
            weight_block<KIND>(w, n, b, v);
        }
#pragma unroll
        for (uint32_t j = 0; j < CUDA_BLOCK; j++) {
            ws[j * PITCH_N + at] = v[j];
        }
    }
    for (uint32_t i = at; i < TILE_M * CUDA_BLOCK; i += TILE_THREADS) {
        const uint32_t k = i % CUDA_BLOCK, m = i / CUDA_BLOCK;
        xs[k * PITCH_M + m] =
            t.row0 + m < t.row1 ? x_value(x_row(p, t.row0 + m), w, b * CUDA_BLOCK + k) : 0.0F;
    }
}

/* Grid: (tiles of outputs, tiles of rows). Thread (i, j) of 16 x 16 has rows i + 16 a and outputs j + 16 c. */
template <int KIND>
static __global__ void __launch_bounds__(TILE_THREADS) gemm(struct cuda_product p)
{
    shared_ptr<float> ws = shared_as<float>(0), xs = ws + CUDA_BLOCK * PITCH_N;
    const uint32_t i = threadIdx.x / 16, j = threadIdx.x % 16;
    const struct tile t = find_tile(p, TILE_M);
    struct cuda_view w = p.w;
    float acc[THREAD_M][THREAD_N] = {{0.0F}}, total[THREAD_M][THREAD_N] = {{0.0F}};

    if (t.row0 == t.row1) {
        return;
    }
    if (p.experts != NULL) {
        w = p.experts[t.expert];
        if (w.kind != (uint32_t)KIND) {
            return;
        }
    }
    for (uint32_t b = 0; b < w.n_blocks; b++) {
        load_tile<KIND>(p, w, t, b, ws, xs);
        __syncthreads();
        for (uint32_t k = 0; k < CUDA_BLOCK; k++) {
            float x[THREAD_M], v[THREAD_N];
#pragma unroll
            for (uint32_t a = 0; a < THREAD_M; a++) {
                x[a] = xs[k * PITCH_M + i + 16 * a];
            }
#pragma unroll
            for (uint32_t c = 0; c < THREAD_N; c++) {
                v[c] = ws[k * PITCH_N + j + 16 * c];
            }
#pragma unroll
            for (uint32_t a = 0; a < THREAD_M; a++) {
#pragma unroll
                for (uint32_t c = 0; c < THREAD_N; c++) {
                    acc[a][c] = fmaf(x[a], v[c], acc[a][c]);
                }
            }
        }
        __syncthreads();
        if ((b + 1) % (CUDA_SEGMENT / CUDA_BLOCK) == 0 || b + 1 == w.n_blocks) {
#pragma unroll
            for (uint32_t a = 0; a < THREAD_M; a++) {
#pragma unroll
                for (uint32_t c = 0; c < THREAD_N; c++) {
                    total[a][c] += acc[a][c];
                    acc[a][c] = 0.0F;
                }
            }
        }
    }
#pragma unroll
    for (uint32_t a = 0; a < THREAD_M; a++) {
#pragma unroll
        for (uint32_t c = 0; c < THREAD_N; c++) {
            const uint32_t m = t.row0 + i + 16 * a, n = blockIdx.x * TILE_N + j + 16 * c;
            if (m < t.row1 && n < w.n_rows) {
                p.y[m * p.ldy + n] = p.bias != NULL ? total[a][c] + p.bias[n] : total[a][c];
            }
        }
    }
}

template <int KIND> static void launch(struct cuda_ctx *c, const struct cuda_product *product)
{
    const struct cuda_product p = *product;
    const size_t shared = CUDA_BLOCK * (PITCH_M + PITCH_N) * sizeof(float);
    const uint32_t rows_max = 65535 * TILE_M;

    if (p.n_rows <= CUDA_GEMV_ROWS) {
        if (p.n_rows == 1 || p.experts != NULL) {
            launch_gemv<KIND, 1, KIND == CUDA_KIND_BLOCKS ? 8 : 16>(c, product);
        } else if (p.n_rows <= 4) {
            launch_gemv<KIND, 4, 8>(c, product);
        } else {
            launch_gemv<KIND, 8, 8>(c, product);
        }
        return;
    }
    BT_ASSERT(p.n_rows <= rows_max);
    BT_LAUNCH(c, (gemm<KIND>),
              dim3(cuda_blocks(p.w.n_rows, TILE_N), cuda_blocks(p.n_rows, TILE_M) + p.n_experts),
              TILE_THREADS, shared, p);
}

extern "C" void cuda_product(struct cuda_ctx *c, const struct cuda_product *p)
{
    switch ((enum cuda_kind)p->kind) {
    case CUDA_KIND_F32:
        launch<CUDA_KIND_F32>(c, p);
        break;
    case CUDA_KIND_F16:
        launch<CUDA_KIND_F16>(c, p);
        break;
    case CUDA_KIND_BF16:
        launch<CUDA_KIND_BF16>(c, p);
        break;
    case CUDA_KIND_BLOCKS:
        launch<CUDA_KIND_BLOCKS>(c, p);
        break;
    case CUDA_KIND_TILES:
    case CUDA_KIND_BLOCK_TILES:
        cuda_tiles_product(c, p);
        break;
    }
}

/* Pieces of rows that c's memory holds rounded; `rounded`: it holds x as this weight takes it, of the product before. */
static void tiles_gemm(struct cuda_ctx *c, struct cuda_product *p, uint32_t n_rows, bool rounded)
{
    const size_t row_bytes = (size_t)p->w.n_blocks * CUDA_BLOCK * sizeof(*p->x16);
    const uint32_t most = (uint32_t)(CUDA_X16_SCRATCH / row_bytes);

    BT_ASSERT(most > 0);
    p->x16 = (uint16_t *)c->x16.p;
    for (uint32_t row = 0; row < n_rows; row += p->n_rows) {
        p->n_rows = n_rows - row < most ? n_rows - row : most;
        if (!rounded || n_rows > most) {
            cuda_tiles_round(c, p);
        }
        cuda_product(c, p);
        p->x += p->n_rows * p->ldx;
        p->y += p->n_rows * p->ldy;
    }
}

static bool same_x16(const struct cuda_view *a, const struct cuda_view *b)
{
    return a->kind >= CUDA_KIND_TILES && b->kind >= CUDA_KIND_TILES && a->n_cols == b->n_cols &&
           a->perm == NULL && b->perm == NULL;
}

extern "C" void cuda_gemm_all(struct bt_kctx *k, const struct bt_k_product *products, uint32_t n,
                              const float *x, size_t ldx, uint32_t n_rows)
{
    for (uint32_t i = 0; i < n && n_rows > 0; i++) {
        const struct cuda_weight *w = cuda_weight_of(products[i].w);
        struct cuda_product p = {};

        BT_ASSERT(w->for_gemm && products[i].ldy >= w->view.n_rows && ldx >= w->view.n_cols);
        p.y = products[i].y;
        p.x = x;
        p.ldy = products[i].ldy;
        p.ldx = ldx;
        p.w = w->view;
        p.bias = products[i].bias;
        p.n_rows = n_rows;
        p.kind = w->view.kind;
        if (p.kind >= CUDA_KIND_TILES) {
            tiles_gemm(cuda_of(k), &p, n_rows,
                       i > 0 && same_x16(&p.w, &cuda_weight_of(products[i - 1].w)->view));
        } else {
            cuda_product(cuda_of(k), &p);
        }
    }
}

extern "C" void cuda_gemm(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                          const struct bt_kweight *w, const float *bias, uint32_t n_rows)
{
    const struct bt_k_product p = {y, ldy, w, bias};

    cuda_gemm_all(k, &p, 1, x, ldx, n_rows);
}
