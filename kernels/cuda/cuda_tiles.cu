/* Matrix products on tensor cores: weights in fragments of tiles of 16 outputs (cuda_int.h), x rounded to bf16 once for all
 * outputs. Two kernels with the same sums: for few rows every warp runs down its own segments of K, the weights going from
 * memory straight into registers, 16 bytes for each lane; for more rows tiles of 128 outputs and up to 128 rows, a few steps
 * of K on their way into shared memory while one is worked on. */

#include "kernels/cuda/cuda_blocks_int.cuh"
#include "kernels/cuda/cuda_tiles_int.cuh"

#define STAGES   4U
#define FEW_ROWS 32U

/* ---- x, rounded ---- */

/* A thread for each two values of each row of x16. */
static __global__ void round_x(struct cuda_product p, size_t n)
{
    const size_t at = thread_index(), pairs = (size_t)p.w.n_blocks * CUDA_BLOCK / 2;

    if (at >= n) {
        return;
    }
    const uint32_t m = (uint32_t)(at / pairs), k = (uint32_t)(at % pairs) * 2;
    const uint32_t *perm = p.experts != NULL ? p.experts[p.row_expert[m]].perm : p.w.perm;
    const float *x = p.x + (p.x_row != NULL ? p.x_row[m] : m) * p.ldx;
    float v[2] = {0.0F, 0.0F};
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        if (k + i < p.w.n_cols) {
            v[i] = x[perm != NULL ? perm[k + i] : k + i];
        }
    }
    ((uint32_t *)(void *)p.x16)[at] = pair_of<CUDA_KIND_BF16>(v[0], v[1]);
}

/* ---- few rows ---- */

/* Blocks b … b + N - 1 of K join acc: all loads are on their way before the first operation. Rows that are not there are
 * another row's twin; their outputs go nowhere. */
template <int N, int MT>
static __device__ __forceinline__ void few_blocks(const struct cuda_product &p, const words4 *data,
                                                  const uint32_t *rows, uint32_t b, float (*acc)[4])
{
    const uint32_t lane = threadIdx.x % 32;
    words4 a[N][2], x[N][MT];

#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        a[i][0] = load_words4(data + (size_t)(b + i) * BLOCK_WORDS4 + lane);
        a[i][1] = load_words4(data + (size_t)(b + i) * BLOCK_WORDS4 + 32 + lane);
#pragma unroll
        for (uint32_t m = 0; m < MT; m++) {
            x[i][m] = load_words4(x_piece(p, rows[m], b + i, lane % 4));
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
#pragma unroll
        for (uint32_t m = 0; m < MT; m++) {
            tile_multiply<CUDA_KIND_BF16>(acc[m], a[i][0].r, x[i][m].r);
            tile_multiply<CUDA_KIND_BF16>(acc[m], a[i][1].r, x[i][m].r + 2);
        }
    }
}

/* Grid: (tiles of outputs, groups of 8 * MT rows; of experts: rows). WARPS segments at a time, then their sums in order. */
template <int MT>
static __global__ void __launch_bounds__(THREADS, MT < 4 ? 3 : 2) few(struct cuda_product p)
{
    constexpr uint32_t OUTPUTS = 128 * MT, AT_ONCE = MT < 4 ? 4 : 2;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t row0 = p.experts != NULL ? blockIdx.y : blockIdx.y * 8 * MT,
                   row1 = p.experts != NULL ? row0 + 1 : p.n_rows;
    shared_ptr<float> sums = shared_as<float>(0); /* [WARPS][8 * MT rows][16 outputs] */
    struct cuda_view w = p.w;
    float total[(OUTPUTS + THREADS - 1) / THREADS] = {0.0F};
    uint32_t rows[MT]; /* of x, for this lane */

    if (p.experts != NULL) {
        w = p.experts[p.row_expert[row0]];
        if (w.kind != CUDA_KIND_TILES) {
            return;
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < MT; i++) {
        const uint32_t m = row0 + 8 * i + lane / 4;
        rows[i] = m < row1 ? m : row0;
    }
    const words4 *data = (const words4 *)w.data + (size_t)blockIdx.x * w.n_blocks * BLOCK_WORDS4;
    for (uint32_t b0 = 0; b0 < w.n_blocks; b0 += WARPS * SEGMENT_BLOCKS) {
        const uint32_t first = b0 + warp * SEGMENT_BLOCKS, end = first + SEGMENT_BLOCKS < w.n_blocks
                                                                     ? first + SEGMENT_BLOCKS
                                                                     : w.n_blocks;
        float acc[MT][4] = {{0.0F}};
        uint32_t b = first;
#pragma unroll 1
        for (; b + AT_ONCE <= end; b += AT_ONCE) {
            few_blocks<AT_ONCE, MT>(p, data, rows, b, acc);
        }
#pragma unroll 1
        for (; b < end; b++) {
            few_blocks<1, MT>(p, data, rows, b, acc);
        }
#pragma unroll
        for (uint32_t i = 0; i < MT; i++) {
#pragma unroll
            for (uint32_t j = 0; j < 4; j++) {
                const uint32_t row = 8 * i + lane % 4 * 2 + j % 2, n = lane / 4 + j / 2 * 8;
                sums[warp * OUTPUTS + row * 16 + n] = acc[i][j];
            }
        }
        __syncthreads();
#pragma unroll
        for (uint32_t o = 0; o < sizeof(total) / sizeof(total[0]); o++) {
            const uint32_t at = o * THREADS + threadIdx.x;
            for (uint32_t s = 0; at < OUTPUTS && s < WARPS && b0 + s * SEGMENT_BLOCKS < w.n_blocks;
                 s++) {
                total[o] += sums[s * OUTPUTS + at];
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (uint32_t o = 0; o < sizeof(total) / sizeof(total[0]); o++) {
        const uint32_t at = o * THREADS + threadIdx.x, m = row0 + at / 16,
                       n = blockIdx.x * 16 + at % 16;
        if (at < OUTPUTS && m < row1 && n < w.n_rows) {
            p.y[m * p.ldy + n] = p.bias != NULL ? total[o] + p.bias[n] : total[o];
        }
    }
}

template <int MT> static void launch_few(struct cuda_ctx *c, const struct cuda_product *product)
{
    const struct cuda_product p = *product;
    const uint32_t rows = p.experts != NULL ? 1 : 8 * MT;

    BT_LAUNCH(c, (few<MT>), dim3(cuda_blocks(p.w.n_rows, 16), cuda_blocks(p.n_rows, rows)), THREADS,
              WARPS * 128 * MT * sizeof(float), p);
}

/* ---- many rows ---- */

/* Where a block of threads' step of K lies in shared memory. */
template <int MT> struct stage {
    static constexpr uint32_t ROWS = 16 * MT, X = TILES_N * BLOCK_WORDS4, WORDS4 = X + ROWS * 4;
};

/* Begins the copies of one step: block b of K, of the tiles' weights and of the rows. */
template <int MT>
static __device__ __forceinline__ void begin_step(const struct cuda_product &p,
                                                  const struct cuda_view &w, const struct tile &t,
                                                  uint32_t b, shared_ptr<words4> to)
{
    const uint32_t n_tiles = (w.n_rows + 15) / 16;

#pragma unroll
    for (uint32_t i = 0; i < TILES_N * BLOCK_WORDS4 / THREADS; i++) {
        const uint32_t at = i * THREADS + threadIdx.x,
                       tile = blockIdx.x * TILES_N + at / BLOCK_WORDS4;
        const bool there = tile < n_tiles;
        copy_begin(to + at,
                   (const words4 *)w.data +
                       ((size_t)(there ? tile : 0) * w.n_blocks + b) * BLOCK_WORDS4 +
                       at % BLOCK_WORDS4,
                   there);
    }
#pragma unroll
    for (uint32_t i = 0; i < stage<MT>::ROWS * 4 / THREADS; i++) {
        const uint32_t at = i * THREADS + threadIdx.x, m = t.row0 + at / 4;
        const bool there = m < t.row1;
        copy_begin(to + (stage<MT>::X + at), x_piece(p, there ? m : t.row0, b, at % 4), there);
    }
}

/* Grid: (blocks of 128 outputs, tiles of 16 * MT rows). */
template <int MT> static __global__ void __launch_bounds__(THREADS) many(struct cuda_product p)
{
    shared_ptr<words4> stages = shared_as<words4>(0);
    const struct tile t = find_tile(p, stage<MT>::ROWS);
    struct cuda_view w;
    float acc[2][MT][4] = {{{0.0F}}}, total[2][MT][4] = {{{0.0F}}};

    if (!find_weight(p, t, CUDA_KIND_TILES, w)) {
        return;
    }
    const bool works = warp_works<MT>(t, w.n_rows);
    for (uint32_t b = 0; b + 1 < STAGES; b++) {
        if (b < w.n_blocks) {
            begin_step<MT>(p, w, t, b, stages + b * stage<MT>::WORDS4);
        }
        copy_commit();
    }
    for (uint32_t b = 0; b < w.n_blocks; b++) {
        copy_wait<STAGES - 2>();
        __syncthreads(); /* step b is there for all, and none reads step b - 1 any more */
        if (b + STAGES - 1 < w.n_blocks) {
            begin_step<MT>(p, w, t, b + STAGES - 1,
                           stages + (b + STAGES - 1) % STAGES * stage<MT>::WORDS4);
        }
        copy_commit();
        if (works) {
            shared_ptr<words4> from = stages + b % STAGES * stage<MT>::WORDS4;
            multiply_block<MT>(from, threadIdx.x % 32, from + stage<MT>::X, acc);
        }
        if ((b + 1) % SEGMENT_BLOCKS == 0 || b + 1 == w.n_blocks) {
            add_segment<MT>(total, acc);
        }
    }
    if (works) {
        write_tile<MT>(p, w.n_rows, t, total);
    }
}

template <int MT> static void launch_many(struct cuda_ctx *c, const struct cuda_product *product)
{
    const struct cuda_product p = *product;
    const uint32_t rows = stage<MT>::ROWS;

    BT_ASSERT(p.n_rows / rows + p.n_experts < 65535);
    BT_LAUNCH(
        c, (many<MT>),
        dim3(cuda_blocks(p.w.n_rows, 16 * TILES_N), cuda_blocks(p.n_rows, rows) + p.n_experts),
        THREADS, STAGES * stage<MT>::WORDS4 * sizeof(struct words4), p);
}

extern "C" void cuda_tiles_round(struct cuda_ctx *c, const struct cuda_product *product)
{
    const struct cuda_product p = *product;
    const size_t n = (size_t)p.n_rows * p.w.n_blocks * CUDA_BLOCK / 2;

    BT_LAUNCH(c, round_x, cuda_blocks(n, THREADS), THREADS, 0, p, n);
}

extern "C" void cuda_tiles_product(struct cuda_ctx *c, const struct cuda_product *p)
{
    if (p->kind == CUDA_KIND_BLOCK_TILES) {
        cuda_tiles_blocks(c, p);
    } else if (p->n_rows <= CUDA_GEMV_ROWS) {
        launch_few<1>(c, p);
    } else if (p->experts == NULL && p->n_rows <= FEW_ROWS / 2) {
        launch_few<2>(c, p);
    } else if (p->experts == NULL && p->n_rows <= FEW_ROWS) {
        launch_few<4>(c, p);
    } else if (p->experts != NULL || p->n_rows <= 64) {
        launch_many<4>(c, p);
    } else {
        launch_many<8>(c, p);
    }
}

/* ---- packing ---- */

/* Word `at` of a packed weight: of which output, and the first of its two k. */
struct packed_word {
    size_t row;
    uint32_t k;
};

static __device__ __forceinline__ struct packed_word word_of(size_t at, uint32_t n_blocks)
{
    const uint32_t word = (uint32_t)(at % 4), lane = (uint32_t)(at / 4 % 32),
                   step = (uint32_t)(at / 128 % 2);
    const size_t tile_block = at / (4 * BLOCK_WORDS4);
    struct packed_word w;

    w.row = tile_block / n_blocks * 16 + lane / 4 + word % 2 * 8;
    w.k = (uint32_t)(tile_block % n_blocks) * CUDA_BLOCK + lane % 4 * 8 + step * 4 + word / 2 * 2;
    return w;
}

/* A thread for each word. */
static __global__ void pack_tiles(uint32_t *out, const uint8_t *raw, size_t raw_bytes,
                                  uint32_t n_rows, uint32_t n_blocks, size_t n)
{
    const size_t at = thread_index();

    if (at >= n) {
        return;
    }
    const struct packed_word w = word_of(at, n_blocks);
    uint32_t v = 0;
    for (uint32_t i = 0; i < 4; i++) { /* of any alignment */
        const size_t byte = (size_t)w.k * 2 + i;
        if (w.row < n_rows && byte < raw_bytes) {
            v |= (uint32_t)raw[w.row * raw_bytes + byte] << 8 * i;
        }
    }
    out[at] = v;
}

extern "C" void cuda_tiles_pack(struct cuda_ctx *c, void *out, const uint8_t *raw, size_t raw_bytes,
                                uint32_t n_rows, uint32_t n_panels, const struct cuda_view *v)
{
    const uint32_t n_blocks = v->n_blocks;
    const size_t n = (size_t)n_panels * (CUDA_PANEL / 16) * n_blocks * BLOCK_WORDS4 * 4;

    BT_LAUNCH(c, pack_tiles, cuda_blocks(n, THREADS), THREADS, 0, (uint32_t *)out, raw, raw_bytes,
              n_rows, n_blocks, n);
}
