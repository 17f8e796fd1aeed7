/* Mixture of experts: routing on the device, then one product for all experts together, whose rows lie grouped by expert. The
 * host never learns who was chosen. Owns the experts' activations. */

#include "kernels/cuda/cuda_int.h"

#include "base/log.h"

/* One round's memory, carved from one block; n: assignments. */
struct round {
    float *gate, *up; /* [n][ffn_dim] */
    float *down;      /* [n][dim] */
    uint16_t *x16;    /* [n][the wider of dim, ffn_dim, padded to CUDA_BLOCK]: with tensor cores */
    struct cuda_route route; /* its arrays */
};

/* Words of a rounded row of x. */
static size_t x16_words(const struct cuda_ctx *c, const struct bt_k_moe *moe)
{
    size_t k = moe->dim > moe->ffn_dim ? moe->dim : moe->ffn_dim;

    return c->mma ? (k + CUDA_BLOCK - 1) / CUDA_BLOCK * (CUDA_BLOCK / 2) : 0;
}

static size_t round_words(const struct cuda_ctx *c, const struct bt_k_moe *moe, size_t rows)
{
    size_t n = rows * moe->top_k;

    return n * x16_words(c, moe) + n * (moe->dim + 2 * (size_t)moe->ffn_dim + 5) +
           rows * moe->n_experts + moe->n_experts + 1;
}

static struct round carve(const struct cuda_ctx *c, const struct bt_k_moe *moe, uint32_t rows)
{
    size_t n = (size_t)rows * moe->top_k;
    struct round r;

    r.x16 = c->moe.p; /* first: its rows are read 16 bytes at a time */
    r.gate = (float *)c->moe.p + n * x16_words(c, moe);
    r.up = r.gate + n * moe->ffn_dim;
    r.down = r.up + n * moe->ffn_dim;
    r.route = (struct cuda_route){.n_rows = rows,
                                  .n_experts = moe->n_experts,
                                  .top_k = moe->top_k,
                                  .normalize = moe->normalize};
    r.route.prob = r.down + n * moe->dim;
    r.route.weight = r.route.prob + (size_t)rows * moe->n_experts;
    r.route.expert = (uint32_t *)(void *)(r.route.weight + n);
    r.route.slot = r.route.expert + n;
    r.route.row = r.route.slot + n;
    r.route.by_slot = r.route.row + n;
    r.route.start = r.route.by_slot + n;
    return r;
}

enum bt_status cuda_moe_reserve(struct bt_kctx *k, const struct bt_k_moe *moe, uint32_t n_rows)
{
    struct cuda_ctx *c = cuda_of(k);
    size_t bytes =
        round_words(c, moe, n_rows < CUDA_MOE_ROWS ? n_rows : CUDA_MOE_ROWS) * sizeof(float);
    void *p = NULL;

    if (bytes <= c->moe.bytes) {
        return BT_OK;
    }
    cuda_enter(c);
    (void)cuda_ok(c, cudaStreamSynchronize(c->stream), "kernels");
    if (cudaMalloc(&p, bytes) != cudaSuccess) {
        return BT_ERR_NOMEM;
    }
    (void)cuda_ok(c, cudaFree(c->moe.p), "device memory");
    c->moe = (struct cuda_scratch){.p = p, .bytes = bytes};
    return BT_OK;
}

/* One product of all experts: weights may be of several types, each has its launch. */
static void run_experts(struct cuda_ctx *c, struct cuda_product *p, struct bt_kweight *const *w,
                        uint32_t n_experts)
{
    struct cuda_view *views = c->views;
    uint32_t kinds = 0;

    for (uint32_t e = 0; e < n_experts; e++) {
        BT_ASSERT(cuda_weight_of(w[e])->for_gemm && !cuda_weight_of(w[e])->rows);
        views[e] = cuda_weight_of(w[e])->view;
        kinds |= 1U << views[e].kind;
    }
    p->w = views[0];
    p->experts = cuda_send_as(c, w, CUDA_SEND_VIEWS, views, n_experts * sizeof(views[0]));
    for (uint32_t kind = 0; kind <= CUDA_KIND_BLOCK_TILES; kind++) {
        if (kinds >> kind & 1U) {
            p->kind = kind;
            if (kind >= CUDA_KIND_TILES) {
                cuda_tiles_round(c, p);
            }
            cuda_product(c, p);
        }
    }
}

static void run_round(struct cuda_ctx *c, float *out, const float *x, const float *logits,
                      const struct bt_k_moe *moe, uint32_t n_rows)
{
    struct round r = carve(c, moe, n_rows);
    uint32_t n = n_rows * moe->top_k;
    struct cuda_product p = {.x = x,
                             .ldx = moe->dim,
                             .ldy = moe->ffn_dim,
                             .x16 = r.x16,
                             .n_rows = n,
                             .start = r.route.start,
                             .row_expert = r.route.by_slot,
                             .x_row = r.route.row,
                             .n_experts = moe->n_experts};

    r.route.logits = logits;
    cuda_route(c, &r.route);
    p.y = r.gate;
    run_experts(c, &p, moe->gate, moe->n_experts);
    p.y = r.up;
    run_experts(c, &p, moe->up, moe->n_experts);
    cuda_glu(&c->base, r.gate, moe->ffn_dim, r.gate, moe->ffn_dim, r.up, moe->ffn_dim, n,
             moe->ffn_dim, moe->act);
    p.x = r.gate;
    p.ldx = moe->ffn_dim;
    p.x_row = NULL;
    p.y = r.down;
    p.ldy = moe->dim;
    run_experts(c, &p, moe->down, moe->n_experts);
    cuda_combine(c, out, r.down, &r.route, moe->dim);
}

void cuda_moe_ffn(struct bt_kctx *k, float *out, const float *x, const float *logits,
                  const struct bt_k_moe *moe, uint32_t n_rows)
{
    struct cuda_ctx *c = cuda_of(k);
    uint32_t step = n_rows < CUDA_MOE_ROWS ? n_rows : CUDA_MOE_ROWS;

    BT_ASSERT(moe->top_k > 0 && moe->top_k <= moe->n_experts && moe->n_experts <= CUDA_EXPERTS_MAX);
    if (cuda_moe_reserve(k, moe, n_rows) != BT_OK) {
        (void)cuda_ok(c, cudaErrorMemoryAllocation, "activations of experts");
        return;
    }
    for (uint32_t row = 0; row < n_rows; row += step) {
        uint32_t n = n_rows - row < step ? n_rows - row : step;
        run_round(c, out + (size_t)row * moe->dim, x + (size_t)row * moe->dim,
                  logits + (size_t)row * moe->n_experts, moe, n);
    }
}
