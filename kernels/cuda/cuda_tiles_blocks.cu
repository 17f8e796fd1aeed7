/* Matrix products on tensor cores of weights in blocks: expanded, rounded to bf16 and put into shared memory in the order of
 * fragments, there to be operands as bf16 weights are, with the same sums (cuda_tiles.cu). */

#include "kernels/cuda/cuda_blocks_int.cuh"
#include "kernels/cuda/cuda_tiles_int.cuh"

#define STEP 2U /* blocks of K at a time, with many rows */

/* A chain of operations: blocks [first, end) of K. */
struct segment {
    uint32_t first, end;
};

static __device__ __forceinline__ uint32_t group_segments(const struct cuda_view &w)
{
    return (w.group_blocks + SEGMENT_BLOCKS - 1) / SEGMENT_BLOCKS;
}

/* The sth one; behind the last: none. */
static __device__ __forceinline__ struct segment find_segment(const struct cuda_view &w, uint32_t s)
{
    const uint32_t per_group = group_segments(w), group = s / per_group * w.group_blocks,
                   in = s % per_group * SEGMENT_BLOCKS;
    const uint32_t left = w.group_blocks - in, n = left < SEGMENT_BLOCKS ? left : SEGMENT_BLOCKS;
    struct segment r;

    r.first = group + in;
    r.end = group < w.n_blocks ? r.first + n : r.first;
    return r;
}

/* Where lane's words4 of a step of a tile lie among 32: not at `lane`, so that neither writing nor reading meets one bank. */
static __device__ __forceinline__ uint32_t slot_of(uint32_t lane)
{
    return lane ^ (lane / 8 & 3U);
}

/* Values v of a row (of 16 of its tile) and a block of K into the tile's fragments. */
static __device__ __forceinline__ void put_row(shared_ptr<uint32_t> tile, uint32_t row,
                                               const float *v)
{
#pragma unroll
    for (uint32_t q = 0; q < CUDA_BLOCK / 2; q++) {
        const uint32_t lane = row % 8 * 4 + q / 4, step = q / 2 % 2, word = row / 8 + q % 2 * 2;
        tile[(step * 32 + slot_of(lane)) * 4 + word] =
            pair_of<CUDA_KIND_BF16>(v[2 * q], v[2 * q + 1]);
    }
}

/* Grid: (panels, groups of 8 * MT rows; of experts: rows). As `few` of cuda_tiles.cu; a lane expands a row of the panel. */
template <int MT> static __global__ void __launch_bounds__(THREADS, 1) few(struct cuda_product p)
{
    constexpr uint32_t OUTPUTS = 8 * MT * CUDA_PANEL, AREA = 2 * BLOCK_WORDS4;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t row0 = p.experts != NULL ? blockIdx.y : blockIdx.y * 8 * MT,
                   row1 = p.experts != NULL ? row0 + 1 : p.n_rows;
    shared_ptr<words4> area = shared_as<words4>(0) + warp * AREA; /* of this warp: 2 tiles */
    shared_ptr<uint32_t> tile =
        shared_as<uint32_t>((warp * AREA + lane / 16 * BLOCK_WORDS4) * sizeof(words4));
    shared_ptr<float> sums = shared_as<float>(WARPS * AREA * sizeof(words4)); /* [WARPS][OUTPUTS] */
    struct cuda_view w = p.w;
    float total[OUTPUTS / THREADS] = {0.0F};

    if (p.experts != NULL) {
        w = p.experts[p.row_expert[row0]];
        if (w.kind != CUDA_KIND_BLOCK_TILES) {
            return;
        }
    }
    const uint32_t n_segments = w.n_blocks / w.group_blocks * group_segments(w);
    for (uint32_t s0 = 0; s0 < n_segments; s0 += WARPS) {
        const struct segment mine = find_segment(w, s0 + warp);
        float acc[2][MT][4] = {{{0.0F}}};
#pragma unroll 1
        for (uint32_t b = mine.first; b < mine.end; b++) {
            float v[CUDA_BLOCK];
            words4 a[2][2];
            weight_block<CUDA_KIND_BLOCK_TILES>(w, blockIdx.x * CUDA_PANEL + lane, b, v);
            put_row(tile, lane % 16, v);
            warp_sync();
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                a[i / 2][i % 2] = area[i * 32 + slot_of(lane)];
            }
            warp_sync(); /* none reads any more */
#pragma unroll
            for (uint32_t m = 0; m < MT; m++) {
                const uint32_t row = row0 + 8 * m + lane / 4;
                const words4 x = load_words4(x_piece(p, row < row1 ? row : row0, b, lane % 4));
#pragma unroll
                for (uint32_t i = 0; i < 2; i++) {
                    tile_multiply<CUDA_KIND_BF16>(acc[i][m], a[i][0].r, x.r);
                    tile_multiply<CUDA_KIND_BF16>(acc[i][m], a[i][1].r, x.r + 2);
                }
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < 2 * MT * 4; i++) {
            const uint32_t t = i / 4 / MT, m = i / 4 % MT, j = i % 4;
            const uint32_t row = 8 * m + lane % 4 * 2 + j % 2, n = t * 16 + lane / 4 + j / 2 * 8;
            sums[warp * OUTPUTS + row * CUDA_PANEL + n] = acc[t][m][j];
        }
        __syncthreads();
#pragma unroll
        for (uint32_t o = 0; o < OUTPUTS / THREADS; o++) {
            for (uint32_t s = 0; s < WARPS && s0 + s < n_segments; s++) {
                const float d =
                    block_scale(w, blockIdx.x * CUDA_PANEL + lane, find_segment(w, s0 + s).first);
                total[o] = fmaf(d, sums[s * OUTPUTS + o * THREADS + threadIdx.x], total[o]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (uint32_t o = 0; o < OUTPUTS / THREADS; o++) {
        const uint32_t m = row0 + o * WARPS + warp, n = blockIdx.x * CUDA_PANEL + lane;
        if (m < row1 && n < w.n_rows) {
            p.y[m * p.ldy + n] = p.bias != NULL ? total[o] + p.bias[n] : total[o];
        }
    }
}

template <int MT> static void launch_few(struct cuda_ctx *c, const struct cuda_product *product)
{
    const struct cuda_product p = *product;
    const uint32_t rows = p.experts != NULL ? 1 : 8 * MT;
    const size_t shared =
        WARPS * (2 * BLOCK_WORDS4 * sizeof(struct words4) + 8 * MT * CUDA_PANEL * sizeof(float));

    BT_LAUNCH(c, (few<MT>), dim3(cuda_blocks(p.w.n_rows, CUDA_PANEL), cuda_blocks(p.n_rows, rows)),
              THREADS, shared, p);
}

/* Begins the copies of x for a step. */
template <int MT>
static __device__ __forceinline__ void begin_x(const struct cuda_product &p, const struct tile &t,
                                               uint32_t step, shared_ptr<words4> to)
{
    constexpr uint32_t WORDS4 = 16 * MT * 4;

#pragma unroll
    for (uint32_t i = 0; i < STEP * WORDS4 / THREADS; i++) {
        const uint32_t at = i * THREADS + threadIdx.x, b = step * STEP + at / WORDS4,
                       m = t.row0 + at % WORDS4 / 4;
        const bool there = m < t.row1 && b < p.w.n_blocks;
        copy_begin(to + at, x_piece(p, there ? m : t.row0, there ? b : 0, at % 4), there);
    }
}

/* A segment of K has ended with block b. */
template <int MT>
static __device__ __forceinline__ void add_scaled(const struct cuda_view &w, uint32_t b,
                                                  float (*total)[MT][4], float (*acc)[MT][4])
{
    const uint32_t n0 =
        (blockIdx.x * TILES_N + threadIdx.x / 32 % 4 * 2) * 16 + threadIdx.x % 32 / 4;

#pragma unroll
    for (uint32_t i = 0; i < 4; i++) { /* tile i / 2, upper or lower half */
        const uint32_t n = n0 + i * 8;
        const float d = n < w.n_rows ? block_scale(w, n, b) : 0.0F;
#pragma unroll
        for (uint32_t m = 0; m < MT; m++) {
#pragma unroll
            for (uint32_t j = i % 2 * 2; j < i % 2 * 2 + 2; j++) {
                total[i / 2][m][j] = fmaf(d, acc[i / 2][m][j], total[i / 2][m][j]);
                acc[i / 2][m][j] = 0.0F;
            }
        }
    }
}

/* Grid: (blocks of 128 outputs, tiles of 16 * MT rows). */
template <int MT> static __global__ void __launch_bounds__(THREADS, 1) many(struct cuda_product p)
{
    constexpr uint32_t X = 16 * MT * 4, W = TILES_N * BLOCK_WORDS4; /* words4 of a block of K */
    shared_ptr<words4> ws = shared_as<words4>(0), xs = ws + STEP * W;
    const struct tile t = find_tile(p, 16 * MT);
    const uint32_t n = threadIdx.x % 128; /* the row that it expands */
    shared_ptr<uint32_t> tile =
        shared_as<uint32_t>((threadIdx.x / 128 * W + n / 16 * BLOCK_WORDS4) * sizeof(words4));
    struct cuda_view w;
    float acc[2][MT][4] = {{{0.0F}}}, total[2][MT][4] = {{{0.0F}}};

    if (!find_weight(p, t, CUDA_KIND_BLOCK_TILES, w)) {
        return;
    }
    const uint32_t row = blockIdx.x * 128 + n, n_steps = (w.n_blocks + STEP - 1) / STEP;
    const bool works = warp_works<MT>(t, w.n_rows);
    begin_x<MT>(p, t, 0, xs);
    copy_commit();
    for (uint32_t step = 0; step < n_steps; step++) {
        const uint32_t mine = step * STEP + threadIdx.x / 128;
        float v[CUDA_BLOCK] = {0.0F};
        if (step + 1 < n_steps) {
            begin_x<MT>(p, t, step + 1, xs + (step + 1) % 2 * STEP * X);
        }
        copy_commit();
        if (row / CUDA_PANEL * CUDA_PANEL < w.n_rows && mine < w.n_blocks) {
            weight_block<CUDA_KIND_BLOCK_TILES>(w, row, mine, v);
        }
        put_row(tile, n % 16, v);
        copy_wait<1>();
        __syncthreads();
        for (uint32_t i = 0; i < STEP && step * STEP + i < w.n_blocks; i++) {
            const uint32_t b = step * STEP + i;
            if (works) {
                multiply_block<MT>(ws + i * W, slot_of(threadIdx.x % 32),
                                   xs + (step % 2 * STEP + i) * X, acc);
            }
            const uint32_t in = b % w.group_blocks + 1;
            if (in % SEGMENT_BLOCKS == 0 || in == w.group_blocks) {
                add_scaled<MT>(w, b, total, acc);
            }
        }
        __syncthreads(); /* none reads this step any more */
    }
    if (works) {
        write_tile<MT>(p, w.n_rows, t, total);
    }
}

template <int MT> static void launch_many(struct cuda_ctx *c, const struct cuda_product *product)
{
    const struct cuda_product p = *product;
    const size_t shared = STEP * (TILES_N * BLOCK_WORDS4 + 2 * 16 * MT * 4) * sizeof(struct words4);

    BT_ASSERT(p.n_rows / (16 * MT) + p.n_experts < 65535);
    BT_LAUNCH(c, (many<MT>),
              dim3(cuda_blocks(p.w.n_rows, 128), cuda_blocks(p.n_rows, 16 * MT) + p.n_experts),
              THREADS, shared, p);
}

extern "C" void cuda_tiles_blocks(struct cuda_ctx *c, const struct cuda_product *p)
{
    if (p->n_rows <= CUDA_GEMV_ROWS) {
        launch_few<1>(c, p);
    } else if (p->experts == NULL && p->n_rows <= 32) {
        launch_few<4>(c, p);
    } else {
        launch_many<4>(c, p);
    }
}
