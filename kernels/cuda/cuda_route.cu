/* Experts: which rows go to whom, and the sum of what they return. */

#include "kernels/cuda/cuda_numbers_int.cuh"

#define THREADS 256U

/* A thread for each row: softmax over all experts, then the largest, the lower index first among equals. */
static __global__ void choose(struct cuda_route r)
{
    const size_t row = thread_index();

    if (row >= r.n_rows) {
        return;
    }
    const float *x = r.logits + row * r.n_experts;
    float *prob = r.prob + row * r.n_experts, *weight = r.weight + row * r.top_k;
    uint32_t *expert = r.expert + row * r.top_k;
    float max = x[0], all = 0.0F, chosen = 0.0F;
    for (uint32_t e = 1; e < r.n_experts; e++) {
        max = x[e] > max ? x[e] : max;
    }
    for (uint32_t e = 0; e < r.n_experts; e++) {
        prob[e] = device_exp(x[e] - max);
        all += prob[e];
    }
    for (uint32_t e = 0; e < r.n_experts; e++) {
        prob[e] = prob[e] / all;
    }
    for (uint32_t i = 0; i < r.top_k; i++) {
        uint32_t best = 0;
        for (uint32_t e = 1; e < r.n_experts; e++) {
            best = prob[e] > prob[best] ? e : best;
        }
        expert[i] = best;
        weight[i] = prob[best];
        chosen += prob[best];
        prob[best] = -1.0F;
    }
    for (uint32_t i = 0; r.normalize && i < r.top_k; i++) {
        weight[i] = weight[i] / chosen;
    }
}

/* One block: a counting sort of the assignments by expert, each expert's in the order of rows. */
static __global__ void group(struct cuda_route r)
{
    shared_ptr<uint32_t> start = shared_as<uint32_t>(0); /* [n_experts + 1] */
    const uint32_t n = r.n_rows * r.top_k;

    for (uint32_t e = threadIdx.x; e < r.n_experts; e += THREADS) {
        uint32_t count = 0;
        for (uint32_t i = 0; i < n; i++) {
            count += r.expert[i] == e ? 1U : 0U;
        }
        start[e + 1] = count;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        start[0] = 0U;
        for (uint32_t e = 0; e < r.n_experts; e++) {
            start[e + 1] += start[e];
        }
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x; e <= r.n_experts; e += THREADS) {
        r.start[e] = start[e];
    }
    for (uint32_t e = threadIdx.x; e < r.n_experts; e += THREADS) {
        uint32_t at = start[e];
        for (uint32_t i = 0; i < n; i++) {
            if (r.expert[i] == e) {
                r.slot[i] = at;
                r.row[at] = i / r.top_k;
                r.by_slot[at++] = e;
            }
        }
    }
}

extern "C" void cuda_route(struct cuda_ctx *c, const struct cuda_route *route)
{
    const struct cuda_route r = *route;

    BT_LAUNCH(c, choose, cuda_blocks(r.n_rows, 64), 64, 0, r);
    BT_LAUNCH(c, group, 1, THREADS, (r.n_experts + 1) * sizeof(uint32_t), r);
}

static __global__ void combine(float *out, const float *y, struct cuda_route r, uint32_t dim)
{
    const size_t at = thread_index();

    if (at >= (size_t)r.n_rows * dim) {
        return;
    }
    const size_t first = at / dim * r.top_k;
    float sum = 0.0F;
    for (uint32_t i = 0; i < r.top_k; i++) {
        sum = fmaf(r.weight[first + i], y[(size_t)r.slot[first + i] * dim + at % dim], sum);
    }
    out[at] = sum;
}

extern "C" void cuda_combine(struct cuda_ctx *c, float *out, const float *y,
                             const struct cuda_route *route, uint32_t dim)
{
    const struct cuda_route r = *route;

    BT_LAUNCH(c, combine, cuda_blocks((size_t)r.n_rows * dim, THREADS), THREADS, 0, out, y, r, dim);
}
