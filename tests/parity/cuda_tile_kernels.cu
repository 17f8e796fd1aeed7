/* Kernels of the tile operation's test. They spell out which lane has which element as the PTX ISA does, element by element,
 * and share nothing with the products' own packing. */

#include "tests/parity/cuda_tile_kernels_int.h"
#include "kernels/cuda/cuda_tile_int.cuh"

template <int KIND>
static __global__ void multiply(float *d, const uint16_t *a, const uint16_t *b, const float *from)
{
    const uint32_t lane = threadIdx.x, g = lane >> 2, t = lane & 3;
    uint32_t wa[4] = {0}, wb[2] = {0};
    float c[4];

    for (uint32_t i = 0; i < 8; i++) {
        const uint32_t row = i < 2 || (i >= 4 && i < 6) ? g : g + 8,
                       col = t * 2 + (i & 1) + (i < 4 ? 0 : 8);
        wa[i / 2] |= (uint32_t)a[row * 16 + col] << 16 * (i & 1);
    }
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t row = t * 2 + (i & 1) + (i < 2 ? 0 : 8);
        wb[i / 2] |= (uint32_t)b[row * 8 + g] << 16 * (i & 1);
        c[i] = from[(i < 2 ? g : g + 8) * 8 + t * 2 + (i & 1)];
    }
    tile_multiply<KIND>(c, wa, wb);
    for (uint32_t i = 0; i < 4; i++) {
        d[(i < 2 ? g : g + 8) * 8 + t * 2 + (i & 1)] = c[i];
    }
}

extern "C" void tile_test_multiply(struct cuda_ctx *c, float *d, const uint16_t *a,
                                   const uint16_t *b, const float *from, bool bf16)
{
    if (bf16) {
        BT_LAUNCH(c, (multiply<CUDA_KIND_BF16>), 1, 32, 0, d, a, b, from);
    } else {
        BT_LAUNCH(c, (multiply<CUDA_KIND_F16>), 1, 32, 0, d, a, b, from);
    }
}

template <bool TRANSPOSED> static __global__ void load(uint32_t *out, const uint16_t *from)
{
    shared_ptr<words4> rows = shared_as<words4>(0);
    uint32_t got[4];

    rows[threadIdx.x] = load_words4(from + threadIdx.x * 8);
    __syncthreads();
    tile_load<TRANSPOSED>(got, rows + threadIdx.x);
    for (uint32_t i = 0; i < 4; i++) {
        out[threadIdx.x * 4 + i] = got[i];
    }
}

extern "C" void tile_test_load(struct cuda_ctx *c, uint32_t *out, const uint16_t *from,
                               bool transposed)
{
    if (transposed) {
        BT_LAUNCH(c, (load<true>), 1, 32, 32 * sizeof(struct words4), out, from);
    } else {
        BT_LAUNCH(c, (load<false>), 1, 32, 32 * sizeof(struct words4), out, from);
    }
}

static __global__ void exchange(float *out, const float *from, uint32_t mask)
{
    shared_ptr<float> places = shared_as<float>(0);
    const uint32_t lane = threadIdx.x;
    float v = from[lane];

    for (int i = 0; i < 3;
         i++) { /* by way of shared memory too, as the lanes' word alone orders it */
        places[lane] = v;
        warp_sync();
        v = places[lane ^ mask];
        warp_sync();
    }
    const float w = lane_xor(from[lane], mask);
    out[lane] = v == w ? v : -1.0F;
}

extern "C" void tile_test_xor(struct cuda_ctx *c, float *out, const float *from, uint32_t mask)
{
    BT_LAUNCH(c, exchange, 1, 32, 32 * sizeof(float), out, from, mask);
}

static __global__ void copy(uint32_t *out, const uint32_t *from, const uint32_t *keep, uint32_t n)
{
    shared_ptr<words4> places = shared_as<words4>(0);
    const uint32_t lane = threadIdx.x, groups = n / 32;

    for (uint32_t i = 0; i < groups; i++) {
        copy_begin(places + (i * 32 + lane), from + (size_t)(i * 32 + lane) * 4,
                   keep[i * 32 + lane] != 0);
        copy_commit();
    }
    for (uint32_t i = 0; i < groups; i++) {
        if (groups - 1 - i >= 2) { /* a constant for the instruction */
            copy_wait<2>();
        } else if (groups - 1 - i == 1) {
            copy_wait<1>();
        } else {
            copy_wait<0>();
        }
        __syncthreads();
        const words4 w = places[i * 32 + (31 - lane)]; /* another thread's */
        for (uint32_t j = 0; j < 4; j++) {
            out[(i * 32 + 31 - lane) * 4 + j] = w.r[j];
        }
    }
}

extern "C" void tile_test_copy(struct cuda_ctx *c, uint32_t *out, const uint32_t *from,
                               const uint32_t *keep, uint32_t n)
{
    BT_LAUNCH(c, copy, 1, 32, n * sizeof(struct words4), out, from, keep, n);
}

static __global__ void break_rule(enum tile_fault fault, float *out)
{
    shared_ptr<words4> places = shared_as<words4>(0);
    const uint32_t lane = threadIdx.x;
    const bool half = lane < 16;
    float v = (float)lane;
    uint32_t w[4] = {0};

    switch (fault) {
    case TILE_LANE_MISSING:
        v = half ? lane_xor(v, 1) : v;
        break;
    case TILE_OTHER_OPERATION:
        if (half) {
            v = lane_xor(v, 1);
        } else {
            tile_multiply<CUDA_KIND_BF16>(&v, w, w);
        }
        break;
    case TILE_BARRIER_IN_BRANCH:
        if (half) {
            __syncthreads();
        } else {
            v = lane_xor(v, 1);
        }
        break;
    case TILE_COPY_READ_EARLY:
    case TILE_COPY_LEFT:
        copy_begin(places + lane, out, true);
        copy_commit();
        copy_wait<1>();
        if (fault == TILE_COPY_READ_EARLY) {
            __syncthreads();
            w[0] = ((words4)places[lane]).r[0];
        }
        break;
    case TILE_COPY_NO_BARRIER:
        copy_begin(places + lane, out, true);
        copy_commit();
        copy_wait<0>();
        w[0] = ((words4)places[lane & ~1U]).r[0];
        break;
    case TILE_NO_WARP_SYNC:
        places[lane] = words4{};
        warp_sync();
        w[0] = ((words4)places[lane ^ 1]).r[0];
        places[lane] = words4{};
        break;
    case TILE_ROW_ODD:
    case TILE_FAULTS:
        places[lane] = words4{};
        places[lane + 32] = words4{};
        __syncthreads();
        tile_load<false>(w, shared_as<words4>(8) + lane);
        break;
    }
    out[lane] = v + (float)w[0];
}

extern "C" void tile_test_fault(struct cuda_ctx *c, enum tile_fault fault, float *out)
{
    BT_LAUNCH(c, break_rule, 1, 32, 64 * sizeof(struct words4), fault, out);
}
