/* The host's side of sampling on the device: lays out what the rows of a call ask for, in pinned memory, sends it, and has the
 * results brought back. Owns that memory. What a parameter does is the kernels' (cuda_sample.cu). */

#include "kernels/cuda/cuda_sample_int.h"

#include <string.h>
#include "base/mem.h"
#include "base/sample_math.h"

/* All memory of a sampler. */
struct block {
    void **p;
    size_t n, bytes;
    bool pinned;
};
#define N_BLOCKS 10U

static void blocks_of(struct cuda_sampler *s, struct block out[N_BLOCKS])
{
    struct cuda_sample *d = &s->dev;
    const size_t n = s->n_max;
    const struct block all[N_BLOCKS] = {
        {(void **)&d->draws, n, sizeof(*d->draws), false},
        {(void **)&d->edits, n * CUDA_SAMPLE_EDITS, sizeof(*d->edits), false},
        {(void **)&d->before, n * CUDA_SAMPLE_EDITS, sizeof(*d->before), false},
        {(void **)&d->bins, n * CUDA_SAMPLE_BINS, sizeof(*d->bins), false},
        {(void **)&d->sums, n * d->n_chunks, sizeof(*d->sums), false},
        {(void **)&d->tops, n * BT_LOGPROBS_MAX, sizeof(*d->tops), false},
        {(void **)&d->out, n, sizeof(*d->out), false},
        {(void **)&s->draws, n, sizeof(*s->draws), true},
        {(void **)&s->edits, n * CUDA_SAMPLE_EDITS, sizeof(*s->edits), true},
        {(void **)&s->out, n, sizeof(*s->out), true},
    };

    memcpy(out, all, sizeof(all));
}

enum bt_status cuda_sample_reserve(struct bt_kctx *k, uint32_t n_rows, uint32_t vocab)
{
    struct cuda_ctx *c = cuda_of(k);
    struct block blocks[N_BLOCKS];

    BT_ASSERT(c->sampler == NULL && n_rows > 0 && vocab > 0);
    if (n_rows > CUDA_SAMPLE_ROWS || vocab > CUDA_SAMPLE_VOCAB) {
        return BT_ERR_UNSUPPORTED;
    }
    struct cuda_sampler *s = bt_calloc(1, sizeof(*s));

    if (s == NULL) {
        return BT_ERR_NOMEM;
    }
    c->sampler = s;
    s->n_max = n_rows;
    s->dev.vocab = vocab;
    s->dev.point = bt_sample_point(vocab);
    s->dev.n_chunks = (vocab + CUDA_SAMPLE_CHUNK - 1) / CUDA_SAMPLE_CHUNK;
    (void)cuda_begin(c);
    blocks_of(s, blocks);
    for (uint32_t i = 0; i < N_BLOCKS; i++) {
        const struct block *b = &blocks[i];
        size_t bytes = b->n * b->bytes;

        if ((b->pinned ? cudaMallocHost(b->p, bytes) : cudaMalloc(b->p, bytes)) != cudaSuccess) {
            (void)cudaGetLastError(); /* it would be taken for that of the next call */
            return BT_ERR_NOMEM;      /* what is there goes with the context */
        }
    }
    /* Bins are zero between calls. */
    bool zeros = cuda_ok(c,
                         cudaMemsetAsync(s->dev.bins, 0,
                                         (size_t)n_rows * CUDA_SAMPLE_BINS * sizeof(*s->dev.bins),
                                         c->stream),
                         "zeros");

    return zeros ? BT_OK : c->fault;
}

void cuda_sample_destroy(struct cuda_ctx *c, struct cuda_sampler *s)
{
    struct block blocks[N_BLOCKS];

    if (s == NULL) {
        return;
    }
    blocks_of(s, blocks);
    for (uint32_t i = 0; i < N_BLOCKS; i++) {
        (void)cuda_ok(c, blocks[i].pinned ? cudaFreeHost(*blocks[i].p) : cudaFree(*blocks[i].p),
                      "memory of sampling");
    }
    bt_free(s);
}

static void put_masked(struct cuda_sampler *s, const struct bt_k_draw *in, struct cuda_draw *d,
                       uint32_t at)
{
    const struct bt_sampling *p = in->params;

    for (uint32_t i = 0; i < in->n_eos && !p->ignore_eos; i++) {
        if (in->eos[i] < s->dev.vocab) {
            s->edits[at + d->n_masked++].token = in->eos[i];
        }
    }
    for (uint32_t i = 0; i < p->n_stop_ids; i++) {
        if (p->stop_ids[i] < s->dev.vocab) {
            s->edits[at + d->n_masked++].token = p->stop_ids[i];
        }
    }
}

/* What changes logits; returns the place behind it among the edits of all. */
static uint32_t put_edits(struct cuda_sampler *s, const struct bt_k_draw *in, struct cuda_draw *d,
                          uint32_t at)
{
    const struct bt_sampling *p = in->params;

    BT_ASSERT(in->n_seen <= BT_K_SEEN_MAX && in->n_eos <= BT_K_EOS_MAX);
    d->edits_at = at;
    for (uint32_t i = 0; i < p->n_bias; i++) {
        s->edits[at++] = (struct cuda_edit){.token = p->bias[i].token, .bias = p->bias[i].bias};
    }
    d->n_bias = p->n_bias;
    for (uint32_t i = 0; i < in->n_seen; i++) {
        s->edits[at++] = (struct cuda_edit){.token = in->seen[i].token, .count = in->seen[i].count};
    }
    d->n_seen = in->n_seen;
    if (in->masked) {
        put_masked(s, in, d, at);
    }
    return at + d->n_masked;
}

/* One row; returns what it needs. */
static uint32_t put_draw(struct cuda_sampler *s, const struct bt_k_draw *in, struct cuda_draw *d,
                         uint32_t *n_edits)
{
    const struct bt_sampling *p = in->params;
    const uint32_t vocab = s->dev.vocab;
    uint32_t needs = 0;

    *d = (struct cuda_draw){.row = in->row,
                            .draws = !in->given,
                            .logprobs = in->given || p->logprobs,
                            .token = in->token};
    if (d->logprobs) {
        needs |= CUDA_SAMPLE_RAW | CUDA_SAMPLE_LOGPROBS;
        d->n_top = p->n_top < vocab ? p->n_top : vocab;
    }
    if (d->n_top > 0) {
        needs |= CUDA_SAMPLE_TOPS;
        d->cuts[CUDA_CUT_TOPS] = (struct cuda_cut){.on = 1, .want = d->n_top};
    }
    if (in->given) {
        BT_ASSERT(in->token < vocab);
        return needs;
    }
    uint32_t end = put_edits(s, in, d, *n_edits);

    needs |= end > *n_edits ? CUDA_SAMPLE_EDITED : CUDA_SAMPLE_RAW;
    *n_edits = end;
    d->repetition = p->repetition_penalty;
    d->presence = p->presence_penalty;
    d->frequency = p->frequency_penalty;
    if (p->temperature == 0.0F) {
        d->greedy = 1;
        return needs;
    }
    d->inv_temperature = 1.0 / (double)p->temperature;
    d->random = in->random;
    d->least = bt_sample_share(p->min_p, UINT64_C(1) << s->dev.point);
    d->top_p = p->top_p;
    needs |= CUDA_SAMPLE_RANDOM;
    if (p->top_k > 0 && p->top_k < vocab) {
        needs |= CUDA_SAMPLE_K;
        d->cuts[CUDA_CUT_K] = (struct cuda_cut){.on = 1, .want = p->top_k};
    }
    if (p->top_p < 1.0F) {
        needs |= CUDA_SAMPLE_P;
        d->cuts[CUDA_CUT_P].on = 1;
    }
    return needs;
}

void cuda_sample(struct bt_kctx *k, float *logits, const struct bt_k_draw *draws, uint32_t n)
{
    struct cuda_ctx *c = cuda_of(k);
    struct cuda_sampler *s = c->sampler;
    struct cuda_sample run = s->dev;
    uint32_t n_edits = 0;

    BT_ASSERT(n > 0 && n <= s->n_max && c->step.mode == CUDA_STEP_OFF);
    run.logits = logits;
    run.n = n;
    for (uint32_t i = 0; i < n; i++) {
        run.needs |= put_draw(s, &draws[i], &s->draws[i], &n_edits);
    }
    (void)cuda_begin(c);
    (void)cuda_ok(c,
                  cudaMemcpyAsync(run.draws, s->draws, n * sizeof(*s->draws),
                                  cudaMemcpyHostToDevice, c->stream),
                  "upload of draws");
    if (n_edits > 0) {
        (void)cuda_ok(c,
                      cudaMemcpyAsync(run.edits, s->edits, n_edits * sizeof(*s->edits),
                                      cudaMemcpyHostToDevice, c->stream),
                      "upload of edits");
    }
    cuda_sample_run(c, &run);
    (void)cuda_ok(
        c, cudaMemcpyAsync(s->out, run.out, n * sizeof(*s->out), cudaMemcpyDeviceToHost, c->stream),
        "what was sampled");
}

const struct bt_sampled *cuda_sampled(const struct bt_kctx *k)
{
    return ((const struct cuda_ctx *)(const void *)k)->sampler->out;
}
