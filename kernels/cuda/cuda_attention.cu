/* Causal attention in f32 of tiles of 16 (token, head) rows of one key-value head over a paged cache, the joining of splits that
 * ran at once (here or in cuda_attention_tiles.cu), and the writing of K and V into pages. A row's result depends on its position, window and keys only: in which tile it is, with which others, and
 * whether its splits ran at once or one after the other changes no bit. */

#include "kernels/cuda/cuda_attend_int.cuh"

#define THREADS     128U
#define ROW_THREADS (THREADS / CUDA_ATTN_ROWS) /* that share a row */
#define ROW_KEYS    (CUDA_ATTN_KEYS / ROW_THREADS)
#define PITCH_S     (CUDA_ATTN_KEYS + 1)

static __device__ __forceinline__ float kv_value(const uint8_t *p, size_t i, uint32_t dtype)
{
    if (dtype == BT_DTYPE_F32) {
        return ((const float *)(const void *)p)[i];
    }
    if (dtype == BT_DTYPE_F8) {
        return float_of_f8(p[i]);
    }
    const uint32_t h = ((const uint16_t *)(const void *)p)[i];
    return dtype == BT_DTYPE_F16 ? float_of_f16(h) : float_of_bf16(h);
}

/* Sums over some keys: the maximum of the scores, the sum of exp(score - max), and this thread's part of the sum of
 * exp(score - max) * value. NACC: a thread's dimensions c, c + 8, … */
template <int NACC> struct sums {
    float max, sum, acc[NACC];
};

template <int NACC> static __device__ __forceinline__ void clear(struct sums<NACC> &s)
{
    s.max = NONE;
    s.sum = 0.0F;
#pragma unroll
    for (int i = 0; i < NACC; i++) {
        s.acc[i] = 0.0F;
    }
}

/* What a split found joins what those before it found. Splits in which the row sees nothing do not come here. */
template <int NACC>
static __device__ __forceinline__ void merge_part(struct sums<NACC> &t, float max, float sum,
                                                  const float *acc)
{
    const float both = max > t.max ? max : t.max;
    const float a = device_exp(t.max - both), b = device_exp(max - both);

    t.sum = fmaf(t.sum, a, sum * b);
#pragma unroll
    for (int i = 0; i < NACC; i++) {
        t.acc[i] = fmaf(t.acc[i], a, acc[i] * b);
    }
    t.max = both;
}

/* The same where what was found before lies in memory: every eighth of n values at `to`, this thread's. */
template <int NACC>
static __device__ __forceinline__ void
merge_output(float *to, uint32_t n, const struct sums<NACC> &s, float &max, float &sum)
{
    const float both = s.max > max ? s.max : max;
    const float a = device_exp(max - both), b = device_exp(s.max - both);
    const bool none = sum == 0.0F; /* the first one */

    sum = fmaf(sum, a, s.sum * b);
#pragma unroll
    for (int i = 0; i < NACC; i++) {
        const uint32_t d = ROW_THREADS * (uint32_t)i;
        if (d < n) {
            to[d] = fmaf(none ? 0.0F : to[d], a, s.acc[i] * b);
        }
    }
    max = both;
}

/* What a block of threads works on. */
struct where {
    uint32_t row, c;      /* this thread's row of the tile, and which of the row's threads it is */
    bool real;            /* the tile has such a row */
    uint32_t pos, lo;     /* the row's position, and the first one it sees */
    uint32_t first, last; /* positions that some row of the tile sees */
    uint32_t head;        /* the row's head */
    size_t batch_row;
    const uint32_t *pages;
};

static __device__ __forceinline__ struct where find_row(const struct cuda_attn &a)
{
    const struct cuda_tile t = a.tiles[blockIdx.x];
    const uint32_t group = a.a.n_heads / a.kv.n_kv_heads;
    struct where w;

    w.row = threadIdx.x / ROW_THREADS;
    w.c = threadIdx.x % ROW_THREADS;
    w.real = w.row < t.n;
    const uint32_t at = t.first + (w.real ? w.row : 0), token = at / group;
    w.pos = t.pos + token;
    w.lo = first_seen(w.pos, a.a.window);
    w.head = blockIdx.y * group + at % group;
    w.batch_row = (size_t)t.row0 + token;
    w.first = first_seen(t.pos + t.first / group, a.a.window);
    w.last = t.pos + (t.first + t.n - 1) / group;
    w.pages = a.pages + t.pages_at;
    return w;
}

/* Keys or values [base, base + 32) of the block's head as f32 rows of `pitch`; what no row of the tile sees: 0. */
static __device__ __forceinline__ void load_keys(const struct cuda_attn &a, const struct where &w,
                                                 uint32_t base, bool values, shared_ptr<float> out,
                                                 uint32_t pitch)
{
    const uint32_t dim = a.kv.head_dim;
    const size_t head = blockIdx.y + (values ? a.kv.n_kv_heads : 0U);

    for (uint32_t i = threadIdx.x; i < CUDA_ATTN_KEYS * dim; i += THREADS) {
        const uint32_t j = i / dim, d = i % dim, p = base + j;
        float v = 0.0F;
        if (p >= w.first && p <= w.last) {
            const uint8_t *page =
                (const uint8_t *)a.kv.base + w.pages[p / a.kv.page_tokens] * a.kv.page_stride;
            v = kv_value(page, (head * a.kv.page_tokens + p % a.kv.page_tokens) * dim + d,
                         (uint32_t)a.kv.dtype);
        }
        out[j * pitch + d] = v;
    }
}

/* Keys [base, base + 32) join s. All threads of the block; q: [16][dim], keys: [32][dim + 1], scores: [16][33] shared. */
template <int NACC>
static __device__ __forceinline__ void
attend_block(const struct cuda_attn &a, const struct where &w, uint32_t base, shared_ptr<float> q,
             shared_ptr<float> keys, shared_ptr<float> scores, struct sums<NACC> &s)
{
    const uint32_t dim = a.kv.head_dim, pitch = dim + 1;
    const uint32_t lo = w.lo > base ? w.lo - base : 0;
    const uint32_t hi = w.pos < base                    ? 0
                        : w.pos - base < CUDA_ATTN_KEYS ? w.pos - base + 1
                                                        : CUDA_ATTN_KEYS;
    const bool sees = w.real && lo < hi;
    float p[ROW_KEYS], max = s.max;

    load_keys(a, w, base, false, keys, pitch);
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < ROW_KEYS; i++) {
        const uint32_t j = w.c + ROW_THREADS * i;
        float dot = 0.0F;
        for (uint32_t d = 0; w.real && d < dim; d++) {
            dot = fmaf(q[w.row * dim + d], keys[j * pitch + d], dot);
        }
        dot = a.a.scale * dot;
        p[i] = a.a.softcap > 0.0F ? device_softcap(dot, a.a.softcap) : dot;
        scores[w.row * PITCH_S + j] = p[i];
    }
    __syncthreads();
    for (uint32_t j = lo; sees && j < hi; j++) {
        const float x = scores[w.row * PITCH_S + j];
        max = x > max ? x : max;
    }
    load_keys(a, w, base, true, keys, pitch);
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < ROW_KEYS; i++) {
        scores[w.row * PITCH_S + w.c + ROW_THREADS * i] = device_exp(p[i] - max);
    }
    __syncthreads();
    if (sees) {
        const float rescale = device_exp(s.max - max);
        float sum = 0.0F;
#pragma unroll
        for (int i = 0; i < NACC; i++) {
            s.acc[i] = s.acc[i] * rescale;
        }
        for (uint32_t j = lo; j < hi; j++) {
            const float pj = scores[w.row * PITCH_S + j];
            sum = sum + pj;
#pragma unroll
            for (int i = 0; i < NACC; i++) {
                const uint32_t d = w.c + ROW_THREADS * (uint32_t)i;
                if (d < dim) {
                    s.acc[i] = fmaf(pj, keys[j * pitch + d], s.acc[i]);
                }
            }
        }
        s.sum = fmaf(s.sum, rescale, sum);
        s.max = max;
    }
    __syncthreads();
}

/* The blocks of a split that some row of the tile sees. */
template <int NACC>
static __device__ __forceinline__ void
attend_split(const struct cuda_attn &a, const struct where &w, uint32_t split, shared_ptr<float> q,
             shared_ptr<float> keys, shared_ptr<float> scores, struct sums<NACC> &s)
{
    clear(s);
    for (uint32_t i = 0; i < CUDA_ATTN_SPLIT / CUDA_ATTN_KEYS; i++) {
        const uint32_t base = split * CUDA_ATTN_SPLIT + i * CUDA_ATTN_KEYS;
        if (base <= w.last && base + CUDA_ATTN_KEYS > w.first) {
            attend_block(a, w, base, q, keys, scores, s);
        }
    }
}

/* Whether the row sees a position of the split. */
static __device__ __forceinline__ bool row_sees(const struct where &w, uint32_t split)
{
    return w.real && split * CUDA_ATTN_SPLIT <= w.pos && (split + 1) * CUDA_ATTN_SPLIT > w.lo;
}

template <int NACC>
static __device__ __forceinline__ void write_row(const struct cuda_attn &a, const struct where &w,
                                                 const struct sums<NACC> &t)
{
    const uint32_t dim = a.kv.head_dim;
    float *out = a.a.out + w.batch_row * a.a.out_stride + (size_t)w.head * dim;

#pragma unroll
    for (int i = 0; i < NACC; i++) {
        const uint32_t d = w.c + ROW_THREADS * (uint32_t)i;
        if (w.real && d < dim) {
            out[d] = t.acc[i] / t.sum;
        }
    }
}

/* Grid: (tiles, key-value heads, splits at once or 1). Shared: q, keys, scores. */
template <int NACC>
static __global__ void __launch_bounds__(THREADS, NACC <= 32 ? 4 : 2) attend(struct cuda_attn a)
{
    const struct where w = find_row(a);
    const uint32_t dim = a.kv.head_dim, first = w.first / CUDA_ATTN_SPLIT,
                   last = w.last / CUDA_ATTN_SPLIT;
    shared_ptr<float> q = shared_as<float>(0), keys = q + CUDA_ATTN_ROWS * dim,
                      scores = keys + CUDA_ATTN_KEYS * (dim + 1);
    float *out = a.a.out + w.batch_row * a.a.out_stride + (size_t)w.head * dim;
    struct sums<NACC> s;
    float max = NONE, sum = 0.0F; /* of the splits so far; their values are in the output */

    if (a.n_splits != 0 && first + blockIdx.z > last) {
        return;
    }
    const float *from = a.a.q + w.batch_row * a.a.q_stride + (size_t)w.head * dim;
    for (uint32_t d = w.c; d < dim; d += ROW_THREADS) {
        q[w.row * dim + d] = w.real ? from[d] : 0.0F;
    }
    __syncthreads();
    uint32_t split = first + blockIdx.z;
    const uint32_t end = a.n_splits != 0 ? split : last;
    for (; split <= end; split++) {
        attend_split(a, w, split, q, keys, scores, s);
        if (a.n_splits == 0 && row_sees(w, split)) {
            merge_output(out + w.c, w.c < dim ? dim - w.c : 0, s, max, sum);
        }
    }
    if (a.n_splits == 0) {
        for (uint32_t d = w.c; w.real && d < dim; d += ROW_THREADS) {
            out[d] = out[d] / sum;
        }
        return;
    }
    float *part = part_row(a, blockIdx.z, w.row);
    if (w.real && w.c == 0) {
        part[0] = s.max;
        part[1] = s.sum;
    }
#pragma unroll
    for (int i = 0; i < NACC; i++) {
        const uint32_t d = w.c + ROW_THREADS * (uint32_t)i;
        if (w.real && d < dim) {
            part[2 + d] = s.acc[i];
        }
    }
}

/* Grid: (tiles, key-value heads). Joins the splits that ran at once. */
template <int NACC> static __global__ void __launch_bounds__(THREADS, 2) join(struct cuda_attn a)
{
    const struct where w = find_row(a);
    const uint32_t dim = a.kv.head_dim, first = w.first / CUDA_ATTN_SPLIT,
                   last = w.last / CUDA_ATTN_SPLIT;
    struct sums<NACC> t;

    clear(t);
    for (uint32_t split = first; split <= last; split++) {
        if (!row_sees(w, split)) {
            continue;
        }
        const float *part = part_row(a, split - first, w.row);
        float acc[NACC];
#pragma unroll
        for (int i = 0; i < NACC; i++) {
            const uint32_t d = w.c + ROW_THREADS * (uint32_t)i;
            acc[i] = d < dim ? part[2 + d] : 0.0F;
        }
        merge_part(t, part[0], part[1], acc);
    }
    write_row(a, w, t);
}

template <int NACC> static void launch(struct cuda_ctx *c, const struct cuda_attn *attn)
{
    const struct cuda_attn a = *attn;
    const size_t dim = a.kv.head_dim;
    const size_t shared =
        (CUDA_ATTN_ROWS * dim + CUDA_ATTN_KEYS * (dim + 1) + CUDA_ATTN_ROWS * PITCH_S) *
        sizeof(float);

    if (cuda_attention_tiled(c, &a.kv)) {
        cuda_attention_tiles(c, attn);
    } else {
        BT_LAUNCH(c, (attend<NACC>),
                  dim3(a.n_tiles, a.kv.n_kv_heads, a.n_splits != 0 ? a.n_splits : 1), THREADS,
                  shared, a);
    }
    if (a.n_splits != 0) {
        BT_LAUNCH(c, (join<NACC>), dim3(a.n_tiles, a.kv.n_kv_heads), THREADS, 0, a);
    }
}

extern "C" void cuda_attention_run(struct cuda_ctx *c, const struct cuda_attn *a)
{
    const uint32_t dim = a->kv.head_dim;

    if (dim <= 8 * ROW_THREADS) {
        launch<8>(c, a);
    } else if (dim <= 16 * ROW_THREADS) {
        launch<16>(c, a);
    } else if (dim <= 32 * ROW_THREADS) {
        launch<32>(c, a);
    } else {
        launch<64>(c, a);
    }
}

/* ---- writing K and V ---- */

/* A thread for each value of K and of V of each row. */
static __global__ void store_kv(struct cuda_store s)
{
    const size_t at = thread_index(), width = (size_t)s.kv.n_kv_heads * s.kv.head_dim;

    if (at >= 2 * width * s.n) {
        return;
    }
    const struct cuda_place place = s.places[at / (2 * width)];
    const bool values = at % (2 * width) >= width;
    const size_t i = at % width, head = i / s.kv.head_dim + (values ? s.kv.n_kv_heads : 0),
                 to = (head * s.kv.page_tokens + place.token) * s.kv.head_dim + i % s.kv.head_dim;
    const float v = values ? s.value[place.row * s.ldv + i] : s.key[place.row * s.ldk + i];
    uint8_t *page = (uint8_t *)s.kv.base + place.page * s.kv.page_stride;
    if (s.kv.dtype == BT_DTYPE_F32) {
        ((float *)(void *)page)[to] = v;
    } else if (s.kv.dtype == BT_DTYPE_F8) {
        page[to] = f8_of_float(v);
    } else {
        ((uint16_t *)(void *)page)[to] =
            s.kv.dtype == BT_DTYPE_F16 ? f16_of_float(v) : bf16_of_float(v);
    }
}

extern "C" void cuda_store_run(struct cuda_ctx *c, const struct cuda_store *store)
{
    const struct cuda_store s = *store;

    BT_LAUNCH(c, store_kv, cuda_blocks(2 * (size_t)s.kv.n_kv_heads * s.kv.head_dim * s.n, 256), 256,
              0, s);
}
