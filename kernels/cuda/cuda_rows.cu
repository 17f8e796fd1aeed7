/* Everything that works on rows of activations: norms, rotation, activations, sums, copies. A row is one block's or its
 * elements are independent, so that a batch changes nothing. */

#include "kernels/cuda/cuda_numbers_int.cuh"

#define THREADS      256U
#define NORM_THREADS 128U

static __global__ void rmsnorm(float *y, size_t ldy, const float *x, size_t ldx, const float *w,
                               float w_offset, float eps, uint32_t dim)
{
    shared_ptr<float> part = shared_as<float>(0);
    const uint32_t t = threadIdx.x;
    float acc = 0.0F;

    x += blockIdx.x * ldx + (size_t)blockIdx.y * dim;
    y += blockIdx.x * ldy + (size_t)blockIdx.y * dim;
    for (uint32_t i = t; i < dim; i += NORM_THREADS) {
        acc = fmaf(x[i], x[i], acc);
    }
    part[t] = acc;
    for (uint32_t half = NORM_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) {
            part[t] += part[t + half];
        }
    }
    __syncthreads();
    float inv = 1.0F / sqrtf(part[0] / (float)dim + eps);
    for (uint32_t i = t; i < dim; i += NORM_THREADS) {
        y[i] = x[i] * inv * (w[i] + w_offset);
    }
}

extern "C" void cuda_rmsnorm(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                             const float *w, float w_offset, float eps, uint32_t n_rows,
                             uint32_t n_sub, uint32_t dim)
{
    BT_ASSERT(dim > 0);
    if (n_rows > 0 && n_sub > 0) {
        BT_LAUNCH(cuda_of(k), rmsnorm, dim3(n_rows, n_sub), NORM_THREADS,
                  NORM_THREADS * sizeof(float), y, ldy, x, ldx, w, w_offset, eps, dim);
    }
}

/* A thread for each pair of a head of a row. */
static __global__ void rope(float *x, size_t ldx, const float *cos, const float *sin,
                            uint32_t n_heads, uint32_t head_dim, uint32_t half, bool interleaved)
{
    const size_t at = thread_index();

    if (at >= (size_t)n_heads * half) {
        return;
    }
    const uint32_t i = (uint32_t)(at % half), row = blockIdx.y;
    const float c = cos[(size_t)row * half + i], s = sin[(size_t)row * half + i];
    float *head = x + row * ldx + at / half * head_dim;
    float *pa = head + (interleaved ? 2 * i : i), *pb = head + (interleaved ? 2 * i + 1 : i + half);
    const float a = *pa, b = *pb;
    *pa = fmaf(a, c, -(b * s));
    *pb = fmaf(b, c, a * s);
}

extern "C" void cuda_rope(struct bt_kctx *k, float *x, size_t ldx, const float *cos,
                          const float *sin, uint32_t n_rows, uint32_t n_heads, uint32_t head_dim,
                          uint32_t rot_dim, bool interleaved)
{
    struct cuda_ctx *c = cuda_of(k);
    const uint32_t half = rot_dim / 2, rows_max = 32768;
    const size_t row_bytes = half * sizeof(float);

    BT_ASSERT(rot_dim <= head_dim && row_bytes <= CUDA_SEND_MAX);
    for (uint32_t row = 0, n; half > 0 && row < n_rows; row += n) {
        const size_t room =
            CUDA_SEND_MAX / row_bytes < rows_max ? CUDA_SEND_MAX / row_bytes : rows_max;
        n = n_rows - row < room ? n_rows - row : (uint32_t)room;
        const float *dev_cos = (const float *)cuda_send(c, cos + (size_t)row * half, n * row_bytes);
        const float *dev_sin = (const float *)cuda_send(c, sin + (size_t)row * half, n * row_bytes);
        float *rows = x + row * ldx;
        BT_LAUNCH(c, rope, dim3(cuda_blocks((size_t)n_heads * half, THREADS), n), THREADS, 0, rows,
                  ldx, dev_cos, dev_sin, n_heads, head_dim, half, interleaved);
    }
}

/* Kernels of one value each: a thread for each of n_rows * n_cols. */
static __global__ void glu(float *y, size_t ldy, const float *gate, size_t ldg, const float *up,
                           size_t ldu, size_t n, uint32_t n_cols, enum bt_k_act act)
{
    const size_t at = thread_index();

    if (at < n) {
        const size_t r = at / n_cols, i = at % n_cols;
        y[r * ldy + i] = device_act(gate[r * ldg + i], act) * up[r * ldu + i];
    }
}

extern "C" void cuda_glu(struct bt_kctx *k, float *y, size_t ldy, const float *gate, size_t ldg,
                         const float *up, size_t ldu, uint32_t n_rows, uint32_t n_cols,
                         enum bt_k_act act)
{
    const size_t n = (size_t)n_rows * n_cols;

    if (n > 0) {
        BT_LAUNCH(cuda_of(k), glu, cuda_blocks(n, THREADS), THREADS, 0, y, ldy, gate, ldg, up, ldu,
                  n, n_cols, act);
    }
}

static __global__ void add(float *y, size_t ldy, const float *x, size_t ldx, size_t n,
                           uint32_t n_cols)
{
    const size_t at = thread_index();

    if (at < n) {
        y[at / n_cols * ldy + at % n_cols] += x[at / n_cols * ldx + at % n_cols];
    }
}

extern "C" void cuda_add(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                         uint32_t n_rows, uint32_t n_cols)
{
    const size_t n = (size_t)n_rows * n_cols;

    if (n > 0) {
        BT_LAUNCH(cuda_of(k), add, cuda_blocks(n, THREADS), THREADS, 0, y, ldy, x, ldx, n, n_cols);
    }
}

static __global__ void softcap(float *x, size_t ldx, float cap, size_t n, uint32_t n_cols)
{
    const size_t at = thread_index();

    if (at < n) {
        float *v = x + at / n_cols * ldx + at % n_cols;
        *v = device_softcap(*v, cap);
    }
}

extern "C" void cuda_softcap(struct bt_kctx *k, float *x, size_t ldx, float cap, uint32_t n_rows,
                             uint32_t n_cols)
{
    const size_t n = (size_t)n_rows * n_cols;

    BT_ASSERT(cap > 0.0F);
    if (n > 0) {
        BT_LAUNCH(cuda_of(k), softcap, cuda_blocks(n, THREADS), THREADS, 0, x, ldx, cap, n, n_cols);
    }
}

static __global__ void gather_rows(float *y, size_t ldy, const float *x, size_t ldx,
                                   const uint32_t *rows, size_t n, uint32_t n_cols)
{
    const size_t at = thread_index();

    if (at < n) {
        y[at / n_cols * ldy + at % n_cols] = x[rows[at / n_cols] * ldx + at % n_cols];
    }
}

extern "C" void cuda_gather_rows(struct bt_kctx *k, float *y, size_t ldy, const float *x,
                                 size_t ldx, const uint32_t *rows, uint32_t n_rows, uint32_t n_cols)
{
    struct cuda_ctx *c = cuda_of(k);
    const uint32_t most = CUDA_SEND_MAX / sizeof(uint32_t);

    for (uint32_t row = 0, m; n_cols > 0 && row < n_rows; row += m) {
        m = n_rows - row < most ? n_rows - row : most;
        const size_t n = (size_t)m * n_cols;
        const uint32_t *dev = (const uint32_t *)cuda_send(c, rows + row, m * sizeof(uint32_t));
        float *to = y + row * ldy;
        BT_LAUNCH(c, gather_rows, cuda_blocks(n, THREADS), THREADS, 0, to, ldy, x, ldx, dev, n,
                  n_cols);
    }
}
