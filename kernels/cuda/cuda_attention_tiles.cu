/* Causal attention on tensor cores: tiles of 16 to 64 (token, head) rows of one key-value head over a paged cache, four warps
 * each. Of a block of 64 keys a warp has the scores of 16 and, of the sums over values, every fourth 8 dimensions. Keys and
 * values come into shared memory by copies that run while the other is worked on. What a row's result may depend on:
 * cuda_int.h. */

#include "kernels/cuda/cuda_attend_int.cuh"
#include "kernels/cuda/cuda_tile_int.cuh"

#define THREADS 128U
#define WARPS   4U
#define KEYS    64U /* in a block; a warp has 16 */
#define PITCH_P 9U  /* words4 of a row of p: one more than 64 values, against bank conflicts */

/* Where things lie in shared memory, in words4: queries [rows][pitch], keys [KEYS][pitch], values likewise, p [rows][PITCH_P]. Of
 * heads above 256 keys and values take turns in one place: both at once would need more than CUDA_SHARED_MAX. */
template <int NT> static __device__ __host__ __forceinline__ constexpr bool takes_turns()
{
    return NT > 8;
}

template <int R, int NT>
static __device__ __host__ __forceinline__ constexpr uint32_t v_at(uint32_t pitch)
{
    return (R * 16 + (takes_turns<NT>() ? 0 : KEYS)) * pitch;
}

template <int R, int NT>
static __device__ __host__ __forceinline__ constexpr uint32_t p_at(uint32_t pitch)
{
    return v_at<R, NT>(pitch) + KEYS * pitch;
}

/* What a block of threads works on. */
struct work {
    struct cuda_tile t;
    uint32_t group, dim;
    uint32_t pitch; /* words4 of a row of q, keys or values: the head padded to 32, and one more */
    uint32_t first, last; /* positions that some row of the tile sees */
    const uint32_t *pages;
    shared_ptr<words4> q, k, v, p;
    shared_ptr<float> maxima, part_sum; /* [WARPS][rows] each */
};

template <int R, int NT>
static __device__ __forceinline__ struct work begin_work(const struct cuda_attn &a)
{
    constexpr uint32_t rows = R * 16;
    struct work w;

    w.t = a.tiles[blockIdx.x];
    w.group = a.a.n_heads / a.kv.n_kv_heads;
    w.dim = a.kv.head_dim;
    w.pitch = (w.dim + 31) / 32 * 4 + 1;
    w.first = first_seen(w.t.pos + w.t.first / w.group, a.a.window);
    w.last = w.t.pos + (w.t.first + w.t.n - 1) / w.group;
    w.pages = a.pages + w.t.pages_at;
    w.q = shared_as<words4>(0);
    w.k = w.q + rows * w.pitch;
    w.v = w.q + v_at<R, NT>(w.pitch);
    w.p = w.q + p_at<R, NT>(w.pitch);
    w.maxima = shared_as<float>((p_at<R, NT>(w.pitch) + rows * PITCH_P) * sizeof(words4));
    w.part_sum = w.maxima + WARPS * rows;
    return w;
}

template <int R, int NT> static size_t shared_bytes(uint32_t dim)
{
    const size_t rows = R * 16;

    return (p_at<R, NT>((dim + 31) / 32 * 4 + 1) + rows * PITCH_P) * sizeof(struct words4) +
           2 * WARPS * rows * sizeof(float);
}

/* Where row `row` of the tile is in the batch, and its head. */
static __device__ __forceinline__ size_t batch_row(const struct work &w, uint32_t row,
                                                   uint32_t *head)
{
    const uint32_t at = w.t.first + row;

    *head = blockIdx.y * w.group + at % w.group;
    return (size_t)w.t.row0 + at / w.group;
}

template <int KIND>
static __device__ __forceinline__ void load_q(const struct cuda_attn &a, const struct work &w,
                                              uint32_t rows)
{
    const uint32_t pairs = (w.pitch - 1) * 4;
    shared_ptr<uint32_t> q = shared_as<uint32_t>(0);

    for (uint32_t i = threadIdx.x; i < rows * pairs; i += THREADS) {
        const uint32_t row = i / pairs, d = i % pairs * 2;
        float v[2] = {0.0F, 0.0F};
        if (row < w.t.n && d < w.dim) { /* 8 divides the dimension */
            uint32_t head;
            const size_t at = batch_row(w, row, &head);
            const float *from = a.a.q + at * a.a.q_stride + (size_t)head * w.dim + d;
            v[0] = from[0];
            v[1] = from[1];
        }
        q[row * w.pitch * 4 + d / 2] = pair_of<KIND>(v[0], v[1]);
    }
}

/* Begins to copy keys or values [base, base + 64); what no row of the tile sees, and beyond the head: zeros. */
static __device__ __forceinline__ void begin_copy(const struct cuda_attn &a, const struct work &w,
                                                  uint32_t base, bool values, shared_ptr<words4> to)
{
    const uint32_t pieces = w.pitch - 1;
    const size_t head = blockIdx.y + (values ? a.kv.n_kv_heads : 0U);

    for (uint32_t i = threadIdx.x; i < KEYS * pieces; i += THREADS) {
        const uint32_t j = i / pieces, piece = i % pieces, p = base + j;
        const bool there = p >= w.first && p <= w.last && piece * 8 < w.dim;
        const uint8_t *from = (const uint8_t *)a.kv.base;
        if (there) {
            from += w.pages[p / a.kv.page_tokens] * a.kv.page_stride +
                    ((head * a.kv.page_tokens + p % a.kv.page_tokens) * w.dim + piece * 8) * 2;
        }
        copy_begin(to + (j * w.pitch + piece), from, there);
    }
    copy_commit();
}

/* ---- pages of 8 bits ---- */

/* A piece is 16 numbers of e4m3, 16 bytes. Those of a row of keys or values are brought to where the row begins, and there become
 * f16, by one warp: all are read before the first is written. */
struct pieces {
    uint32_t n, rows; /* of a row; rows that a warp has at once */
    uint32_t row, piece;
    bool has; /* this lane has one */
};

static __device__ __forceinline__ struct pieces find_pieces(const struct work &w)
{
    const uint32_t lane = threadIdx.x % 32;
    struct pieces p;

    p.n = w.dim / 16;
    p.rows = 32 / p.n;
    p.row = threadIdx.x / 32 * p.rows + lane / p.n;
    p.piece = lane % p.n;
    p.has = lane < p.rows * p.n;
    return p;
}

static __device__ __forceinline__ void begin_copy_f8(const struct cuda_attn &a,
                                                     const struct work &w, uint32_t base,
                                                     bool values, shared_ptr<words4> to)
{
    const struct pieces c = find_pieces(w);
    const size_t head = blockIdx.y + (values ? a.kv.n_kv_heads : 0U);

    for (uint32_t j = c.row; c.has && j < KEYS; j += WARPS * c.rows) {
        const uint32_t p = base + j;
        const bool there = p >= w.first && p <= w.last;
        const uint8_t *from = (const uint8_t *)a.kv.base;
        if (there) {
            from += w.pages[p / a.kv.page_tokens] * a.kv.page_stride +
                    (head * a.kv.page_tokens + p % a.kv.page_tokens) * w.dim + c.piece * 16;
        }
        copy_begin(to + (j * w.pitch + c.piece), from, there);
    }
    copy_commit();
}

/* What a thread has copied itself, and waited for, becomes f16; beyond the head: zeros. */
static __device__ __forceinline__ void expand_f8(const struct work &w, shared_ptr<words4> at)
{
    const struct pieces c = find_pieces(w);

#pragma unroll 1
    for (uint32_t first = 0; first < KEYS; first += WARPS * c.rows) {
        const uint32_t j = first + c.row;
        const bool has = c.has && j < KEYS;
        words4 codes = {};
        if (has) {
            codes = at[j * w.pitch + c.piece];
        }
        warp_sync();
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            words4 out;
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                out.r[i] = pair_of_f8(codes.r[half * 2 + i / 2] >> 16 * (i % 2) & 0xffffU);
            }
            if (has) {
                at[j * w.pitch + c.piece * 2 + half] = out;
            }
            if (has && c.piece == 0 && c.n * 2 + half + 1 < w.pitch) {
                at[j * w.pitch + c.n * 2 + half] = words4{};
            }
        }
    }
}

/* Begins to bring keys or values; makes of what came what products take. F8: of pages of 8 bits. */
template <bool F8>
static __device__ __forceinline__ void bring(const struct cuda_attn &a, const struct work &w,
                                             uint32_t base, bool values, shared_ptr<words4> to)
{
    if (F8) {
        begin_copy_f8(a, w, base, values, to);
    } else {
        begin_copy(a, w, base, values, to);
    }
}

template <bool F8, int LEFT>
static __device__ __forceinline__ void receive(const struct work &w, shared_ptr<words4> at)
{
    copy_wait<LEFT>();
    if (F8) {
        expand_f8(w, at);
    }
    __syncthreads();
}

/* What a thread has of its rows, 16 r + 8 h + lane / 4: of sums over some keys, the maximum of the scores and the sum of
 * exp(score - max); and of exp(score - max) * value its dimensions. NT: tiles of 8 of them. */
template <int R, int NT> struct sums {
    float max[R][2], sum[R][2], acc[R][NT][4];
};

template <int R, int NT> static __device__ __forceinline__ void clear(struct sums<R, NT> &s)
{
#pragma unroll
    for (int r = 0; r < R; r++) {
        s.max[r][0] = s.max[r][1] = NONE;
        s.sum[r][0] = s.sum[r][1] = 0.0F;
#pragma unroll
        for (int i = 0; i < NT * 4; i++) {
            s.acc[r][i / 4][i % 4] = 0.0F;
        }
    }
}

/* Scores of this warp's 16 keys, two tiles of 8. */
template <int KIND, int R>
static __device__ __forceinline__ void find_scores(const struct work &w, float (*score)[2][4])
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;

#pragma unroll
    for (int i = 0; i < R * 8; i++) {
        score[i / 8][i / 4 % 2][i % 4] = 0.0F;
    }
    for (uint32_t c = 0; c + 1 < w.pitch; c += 4) { /* 32 dimensions */
        uint32_t k[2][4];
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            tile_load<false>(k[i], w.k + ((warp * 16 + i * 8 + lane % 8) * w.pitch + c + lane / 8));
        }
#pragma unroll
        for (uint32_t step = 0; step < 2; step++) {
#pragma unroll
            for (uint32_t r = 0; r < R; r++) {
                uint32_t q[4];
                tile_load<false>(q,
                                 w.q + ((r * 16 + lane % 16) * w.pitch + c + step * 2 + lane / 16));
                tile_multiply<KIND>(score[r][0], q, &k[0][step * 2]);
                tile_multiply<KIND>(score[r][1], q, &k[1][step * 2]);
            }
        }
    }
}

/* Scores as they count, minus infinity of what a row does not see; their maxima over this warp's keys to the others. */
template <int R>
static __device__ __forceinline__ void mask_scores(const struct cuda_attn &a, const struct work &w,
                                                   uint32_t base, float (*score)[2][4])
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;

#pragma unroll
    for (uint32_t i = 0; i < R * 2; i++) {
        const uint32_t row = i * 8 + lane / 4, pos = w.t.pos + (w.t.first + row) / w.group,
                       lo = first_seen(pos, a.a.window);
        float max = NONE;
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            float *s = &score[i / 2][j / 2][i % 2 * 2 + j % 2];
            const uint32_t key = base + warp * 16 + j / 2 * 8 + lane % 4 * 2 + j % 2;
            const bool sees = row < w.t.n && key >= lo && key <= pos;
            float x = a.a.scale * *s;
            x = a.a.softcap > 0.0F ? device_softcap(x, a.a.softcap) : x;
            *s = sees ? x : NONE;
            max = *s > max ? *s : max;
        }
#pragma unroll
        for (uint32_t other = 1; other < 4; other *= 2) {
            const float m = lane_xor(max, other);
            max = m > max ? m : max;
        }
        if (lane % 4 == 0) {
            w.maxima[warp * R * 16 + row] = max;
        }
    }
}

/* From scores to p, in shared memory; s->acc and s->sum are scaled to the new maximum. */
template <int KIND, int R, int NT>
static __device__ __forceinline__ void take_scores(const struct work &w, float (*score)[2][4],
                                                   struct sums<R, NT> &s)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    shared_ptr<uint32_t> p = shared_as<uint32_t>(0) + (size_t)p_at<R, NT>(w.pitch) * 4;

#pragma unroll
    for (uint32_t i = 0; i < R * 2; i++) {
        const uint32_t row = i * 8 + lane / 4;
        float max = s.max[i / 2][i % 2], sum = 0.0F, e[4];
#pragma unroll
        for (uint32_t k = 0; k < WARPS; k++) {
            const float m = w.maxima[k * R * 16 + row];
            max = m > max ? m : max;
        }
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            const float x = score[i / 2][j / 2][i % 2 * 2 + j % 2];
            e[j] = x == NONE ? 0.0F : device_exp(x - max);
            sum = j == 0 ? e[0] : sum + e[j];
        }
        sum += lane_xor(sum, 1);
        sum += lane_xor(sum, 2);
        if (lane % 4 == 0) {
            w.part_sum[warp * R * 16 + row] = sum;
        }
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) {
            p[row * PITCH_P * 4 + warp * 8 + j * 4 + lane % 4] =
                pair_of<KIND>(e[2 * j], e[2 * j + 1]);
        }
        const float scale =
            s.max[i / 2][i % 2] == max ? 1.0F : device_exp(s.max[i / 2][i % 2] - max);
        s.max[i / 2][i % 2] = max;
        s.sum[i / 2][i % 2] = s.sum[i / 2][i % 2] * scale;
#pragma unroll
        for (uint32_t j = 0; j < NT * 2; j++) {
            s.acc[i / 2][j / 2][i % 2 * 2 + j % 2] *= scale;
        }
    }
}

/* ---- values that are not finite ---- */

/* The bits of a half word's exponent; all of them set: infinite or NaN. */
template <int KIND> static __device__ __forceinline__ uint32_t exponent()
{
    return KIND == CUDA_KIND_F16 ? 0x7c00U : 0x7f80U;
}

template <int KIND> static __device__ __forceinline__ bool is_finite(uint32_t half)
{
    return (half & exponent<KIND>()) != exponent<KIND>();
}

/* Whether this warp's dimensions of a block of values have one. */
template <int KIND, int NT>
static __device__ __forceinline__ bool any_infinite(const struct work &w)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t mask = exponent<KIND>() * 0x10001U,
                   one = KIND == CUDA_KIND_F16 ? 0x04000400U : 0x00800080U;
    uint32_t carry = 0;

#pragma unroll 1
    for (uint32_t piece = warp; piece * 8 < w.dim; piece += WARPS) {
#pragma unroll
        for (uint32_t j = lane; j < KEYS; j += 32) {
            const words4 v = w.v[(size_t)j * w.pitch + piece];
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                carry |= (v.r[i] & mask) + one;
            }
        }
    }
    return lane_any((carry & 0x80008000U) != 0);
}

/* In a block that some row sees less of than others: values that are not finite join the sums of the rows that see them, one by
 * one, and are zeros for the product that follows, where all rows meet all values. */
template <int KIND, int R, int NT>
static __device__ __forceinline__ void
take_infinite(const struct cuda_attn &a, const struct work &w, uint32_t base, struct sums<R, NT> &s)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    shared_ptr<uint32_t> p = shared_as<uint32_t>(0) + (size_t)p_at<R, NT>(w.pitch) * 4,
                         v = shared_as<uint32_t>(0) + (size_t)v_at<R, NT>(w.pitch) * 4;

    if (!any_infinite<KIND, NT>(w)) {
        return;
    }
#pragma unroll 1
    for (uint32_t j = 0; j < KEYS; j++) {
        float by[R * 2]; /* p of this key */
        bool sees[R * 2];
#pragma unroll
        for (uint32_t i = 0; i < R * 2; i++) {
            const uint32_t row = i * 8 + lane / 4, pos = w.t.pos + (w.t.first + row) / w.group;
            sees[i] = base + j <= pos && base + j >= first_seen(pos, a.a.window);
            by[i] = half_value<KIND>(p[row * PITCH_P * 4 + j / 2] >> 16 * (j % 2) & 0xffffU);
        }
#pragma unroll
        for (uint32_t n = 0; n < NT; n++) {
            const uint32_t piece = n * WARPS + warp;
            const uint32_t pair = piece * 8 < w.dim ? v[(j * w.pitch + piece) * 4 + lane % 4] : 0U;
#pragma unroll
            for (uint32_t i = 0; i < R * 4; i++) {
                const uint32_t half = pair >> 16 * (i % 2) & 0xffffU;
                if (!is_finite<KIND>(half) && sees[i / 2]) {
                    float &acc = s.acc[i / 4][n][i % 4];
                    acc = fmaf(by[i / 2], half_value<KIND>(half), acc);
                }
            }
        }
    }
    warp_sync();
#pragma unroll 1
    for (uint32_t i = lane; i < KEYS * NT; i += 32) { /* a warp's dimensions are its own */
        const uint32_t piece = i / KEYS * WARPS + warp;
        for (uint32_t k = 0; k < 4 && piece * 8 < w.dim; k++) {
            const uint32_t at = (i % KEYS * w.pitch + piece) * 4 + k, pair = v[at];
            v[at] = (is_finite<KIND>(pair) ? pair & 0xffffU : 0U) |
                    (is_finite<KIND>(pair >> 16) ? pair & 0xffff0000U : 0U);
        }
    }
    warp_sync();
}

/* p v joins the sums. */
template <int KIND, int R, int NT>
static __device__ __forceinline__ void add_values(const struct work &w, struct sums<R, NT> &s)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;

#pragma unroll
    for (uint32_t i = 0; i < R * 2; i++) {
        const uint32_t row = i * 8 + lane / 4;
        float sum = w.part_sum[row];
#pragma unroll
        for (uint32_t k = 1; k < WARPS; k++) {
            sum += w.part_sum[k * R * 16 + row];
        }
        s.sum[i / 2][i % 2] += sum;
    }
#pragma unroll
    for (uint32_t j = 0; j < KEYS; j += 32) {
        uint32_t p[R][2][4];
#pragma unroll
        for (uint32_t i = 0; i < R * 2; i++) {
            tile_load<false>(p[i / 2][i % 2], w.p + ((i / 2 * 16 + lane % 16) * PITCH_P + j / 8 +
                                                     i % 2 * 2 + lane / 16));
        }
#pragma unroll
        for (uint32_t n = 0; n < NT; n++) {
            const uint32_t piece = n * WARPS + warp; /* 8 dimensions */
            if (piece * 8 < w.dim) {
                uint32_t v[4];
                tile_load<true>(v, w.v + ((j + lane) * w.pitch + piece));
#pragma unroll
                for (uint32_t r = 0; r < R; r++) {
                    tile_multiply<KIND>(s.acc[r][n], p[r][0], v);
                    tile_multiply<KIND>(s.acc[r][n], p[r][1], v + 2);
                }
            }
        }
    }
}

/* Calls f(index, row, to) for each of the thread's rows that is there: to: where its values go, f32 [head_dim]. */
template <int R, class F>
static __device__ __forceinline__ void for_rows(const struct cuda_attn &a, const struct work &w,
                                                const F &f)
{
#pragma unroll
    for (uint32_t i = 0; i < R * 2; i++) {
        const uint32_t row = i * 8 + threadIdx.x % 32 / 4;
        if (row < w.t.n) {
            uint32_t head;
            const size_t at = batch_row(w, row, &head);
            f(i, row, a.a.out + at * a.a.out_stride + (size_t)head * w.dim);
        }
    }
}

/* Dimension j % 2 of tile j / 2, of this thread. */
static __device__ __forceinline__ uint32_t dimension(uint32_t j)
{
    return (j / 2 * WARPS + threadIdx.x / 32) * 8 + threadIdx.x % 4 * 2 + j % 2;
}

/* A split has ended: rows that saw something in it join what is in the output, and s is as new. + 0: whether a zero is
 * negative depends on what else was in the tile. */
template <int R, int NT>
static __device__ __forceinline__ void merge(const struct cuda_attn &a, const struct work &w,
                                             float (*max)[2], float (*all)[2],
                                             struct sums<R, NT> &s)
{
    for_rows<R>(a, w, [&](uint32_t i, uint32_t, float *to) {
        const float before = max[i / 2][i % 2], found = s.max[i / 2][i % 2];
        if (found == NONE) {
            return;
        }
        const float both = found > before ? found : before;
        const float x = device_exp(before - both), y = device_exp(found - both);
        max[i / 2][i % 2] = both;
        all[i / 2][i % 2] = fmaf(all[i / 2][i % 2], x, s.sum[i / 2][i % 2] * y);
#pragma unroll
        for (uint32_t j = 0; j < NT * 2; j++) {
            const uint32_t d = dimension(j);
            const float v = s.acc[i / 2][j / 2][i % 2 * 2 + j % 2] + 0.0F;
            if (d < w.dim) {
                to[d] = fmaf(before == NONE ? 0.0F : to[d], x, v * y);
            }
        }
    });
    clear(s);
}

/* The output, divided by the sums. */
template <int R, int NT>
static __device__ __forceinline__ void finish(const struct cuda_attn &a, const struct work &w,
                                              float (*all)[2])
{
    for_rows<R>(a, w, [&](uint32_t i, uint32_t, float *to) {
#pragma unroll
        for (uint32_t j = 0; j < NT * 2; j++) {
            const uint32_t d = dimension(j);
            if (d < w.dim) { /* no sum: nothing was written */
                to[d] = (all[i / 2][i % 2] == 0.0F ? 0.0F : to[d]) / all[i / 2][i % 2];
            }
        }
    });
}

/* What a split found, for `join`. */
template <int R, int NT>
static __device__ __forceinline__ void write_part(const struct cuda_attn &a, const struct work &w,
                                                  const struct sums<R, NT> &s)
{
    for_rows<R>(a, w, [&](uint32_t i, uint32_t row, float *) {
        float *to = part_row(a, blockIdx.z, row);
        if (threadIdx.x < 32 && threadIdx.x % 4 == 0) {
            to[0] = s.max[i / 2][i % 2];
            to[1] = s.sum[i / 2][i % 2];
        }
#pragma unroll
        for (uint32_t j = 0; j < NT * 2; j++) {
            const uint32_t d = dimension(j);
            if (d < w.dim) {
                to[2 + d] = s.acc[i / 2][j / 2][i % 2 * 2 + j % 2] + 0.0F;
            }
        }
    });
}

/* Grid: (tiles, key-value heads, splits at once or 1). R: tiles of 16 rows; NT: a warp's tiles of 8 dimensions. */
template <int KIND, int R, int NT, bool F8>
static __global__ void __launch_bounds__(THREADS, R *NT > 8 ? 2 : 3) attend(struct cuda_attn a)
{
    constexpr bool TURNS = takes_turns<NT>();
    const struct work w = begin_work<R, NT>(a);
    const bool part = a.n_splits != 0;
    /* All rows see what lies between these two, or what there is of it. */
    const uint32_t all_from = first_seen(w.last, a.a.window),
                   all_to = w.t.pos + w.t.first / w.group;
    uint32_t base = w.first / KEYS * KEYS, last = w.last;
    struct sums<R, NT> s;
    float score[R][2][4], max[R][2],
        sum[R][2]; /* of the splits so far; their values: in the output */

    if (part) { /* this split's share of it */
        const uint32_t split = w.first / CUDA_ATTN_SPLIT + blockIdx.z,
                       end = (split + 1) * CUDA_ATTN_SPLIT - 1;
        if (split > w.last / CUDA_ATTN_SPLIT) {
            return;
        }
        base = base > split * CUDA_ATTN_SPLIT ? base : split * CUDA_ATTN_SPLIT;
        last = last < end ? last : end;
    }
    bring<F8>(a, w, base, false, w.k);
    load_q<KIND>(a, w, R * 16);
    clear(s);
#pragma unroll
    for (int i = 0; i < R * 2; i++) {
        max[i / 2][i % 2] = NONE;
        sum[i / 2][i % 2] = 0.0F;
    }
    for (; base <= last; base += KEYS) {
        const bool more = last - base >= KEYS;
        if (!TURNS) {
            bring<F8>(a, w, base, true, w.v);
        }
        receive<F8, TURNS ? 0 : 1>(w, w.k); /* the keys are there */
        find_scores<KIND, R>(w, score);
        mask_scores<R>(a, w, base, score);
        __syncthreads(); /* none reads them any more; maxima are there */
        if (TURNS) {
            bring<F8>(a, w, base, true, w.v);
        } else if (more) {
            bring<F8>(a, w, base + KEYS, false, w.k);
        } else {
            copy_commit();
        }
        take_scores<KIND, R, NT>(w, score, s);
        receive<F8, TURNS ? 0 : 1>(w, w.v); /* the values and p are there */
        if ((base < all_from && w.first < all_from) ||
            (base + KEYS - 1 > all_to && w.last > all_to)) {
            take_infinite<KIND, R, NT>(a, w, base, s);
        }
        add_values<KIND, R, NT>(w, s);
        __syncthreads(); /* none reads them any more */
        if (TURNS && more) {
            bring<F8>(a, w, base + KEYS, false, w.k);
        }
        if (!part && (!more || (base + KEYS) % CUDA_ATTN_SPLIT == 0)) {
            merge(a, w, max, sum, s);
        }
    }
    if (part) {
        write_part(a, w, s);
    } else {
        finish<R, NT>(a, w, sum);
    }
}

template <int KIND, int R, int NT, bool F8>
static void launch(struct cuda_ctx *c, const struct cuda_attn *attn)
{
    const struct cuda_attn a = *attn;

    BT_ASSERT(a.rows == R * 16);
    BT_LAUNCH(c, (attend<KIND, R, NT, F8>),
              dim3(a.n_tiles, a.kv.n_kv_heads, a.n_splits != 0 ? a.n_splits : 1), THREADS,
              (shared_bytes<R, NT>(a.kv.head_dim)), a);
}

/* The head's dimensions decide how many rows there is room for; splits at once are of 16 rows. */
template <int KIND, bool F8> static void launch_kind(struct cuda_ctx *c, const struct cuda_attn *a)
{
    const uint32_t dim = a->kv.head_dim;

    if (a->rows == CUDA_ATTN_ROWS && dim <= 128) {
        launch<KIND, 1, 4, F8>(c, a);
    } else if (dim <= 128) {
        launch<KIND, 4, 4, F8>(c, a);
    } else if (a->rows == CUDA_ATTN_ROWS && dim <= 256) {
        launch<KIND, 1, 8, F8>(c, a);
    } else if (dim <= 256) {
        launch<KIND, 2, 8, F8>(c, a);
    } else {
        launch<KIND, 1, 16, F8>(c, a);
    }
}

extern "C" bool cuda_attention_tiled(const struct cuda_ctx *c, const struct bt_k_kv *kv)
{
    return c->mma && kv->dtype != BT_DTYPE_F32 &&
           kv->head_dim % (kv->dtype == BT_DTYPE_F8 ? 16 : 8) == 0;
}

extern "C" uint32_t cuda_attention_rows(const struct cuda_ctx *c, const struct bt_k_kv *kv)
{
    if (!cuda_attention_tiled(c, kv) || kv->head_dim > 256) {
        return CUDA_ATTN_ROWS;
    }
    return kv->head_dim > 128 ? 2 * CUDA_ATTN_ROWS : 4 * CUDA_ATTN_ROWS;
}

extern "C" void cuda_attention_tiles(struct cuda_ctx *c, const struct cuda_attn *a)
{
    BT_ASSERT((uintptr_t)a->kv.base % 16 == 0 && a->kv.page_stride % 16 == 0);
    if (a->kv.dtype == BT_DTYPE_F16) {
        launch_kind<CUDA_KIND_F16, false>(c, a);
    } else if (a->kv.dtype == BT_DTYPE_F8) {
        launch_kind<CUDA_KIND_F16, true>(c, a);
    } else {
        launch_kind<CUDA_KIND_BF16, false>(c, a);
    }
}
