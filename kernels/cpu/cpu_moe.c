/* Mixture of experts: routes each row, lets each expert work on its own rows gathered together, and adds the results
 * per row in descending order of weight. A row's result does not depend on which other rows chose the same expert,
 * because matrix products do not. Owns the context's expert activations. */

#include "kernels/cpu/cpu_int.h"

#include <string.h>
#include "base/log.h"

#define MOE_ROWS 256U /* rows routed together; more rows go in several rounds */

/* One round's memory, carved from one block. An assignment is a (row, rank) pair; assignments lie grouped by expert. */
struct round {
    float *x;         /* [assignments][dim]: gathered rows, then the experts' outputs */
    float *gate, *up; /* [assignments][ffn_dim] */
    float *weight;    /* [rows][top_k] */
    float *prob;      /* [n_experts] */
    uint32_t *expert; /* [rows][top_k] */
    uint32_t *slot;   /* [rows][top_k]: place among the assignments */
    uint32_t *start;  /* [n_experts + 1] */
};

static size_t round_floats(const struct bt_k_moe *moe, size_t rows)
{
    size_t per_row = (size_t)moe->top_k * (moe->dim + 2 * (size_t)moe->ffn_dim + 3);
    return rows * per_row + 2 * (size_t)moe->n_experts + 1;
}

static struct round carve(float *p, const struct bt_k_moe *moe, size_t rows)
{
    size_t n = rows * moe->top_k;
    struct round r;

    r.x = p;
    r.gate = r.x + n * moe->dim;
    r.up = r.gate + n * moe->ffn_dim;
    r.weight = r.up + n * moe->ffn_dim;
    r.prob = r.weight + n;
    r.expert = (uint32_t *)(void *)(r.prob + moe->n_experts);
    r.slot = r.expert + n;
    r.start = r.slot + n;
    return r;
}

static void route_row(const struct cpu_ctx *c, const struct round *r, const struct bt_k_moe *moe,
                      const float *logits, uint32_t row)
{
    float *weight = r->weight + (size_t)row * moe->top_k;
    uint32_t *expert = r->expert + (size_t)row * moe->top_k;
    float sum = 0.0F;

    c->isa->softmax(r->prob, logits, moe->n_experts);
    for (uint32_t i = 0; i < moe->top_k; i++) {
        uint32_t best = 0;
        for (uint32_t e = 1; e < moe->n_experts; e++) {
            best = r->prob[e] > r->prob[best] ? e : best;
        }
        expert[i] = best;
        weight[i] = r->prob[best];
        sum += weight[i];
        r->prob[best] = -1.0F;
    }
    for (uint32_t i = 0; moe->normalize && i < moe->top_k; i++) {
        weight[i] /= sum;
    }
}

/* Counting sort of the assignments by expert. */
static void group_rows(const struct round *r, const struct bt_k_moe *moe, uint32_t n_assigned)
{
    memset(r->start, 0, (moe->n_experts + 1) * sizeof(*r->start));
    for (uint32_t i = 0; i < n_assigned; i++) {
        r->start[r->expert[i] + 1]++;
    }
    for (uint32_t e = 0; e < moe->n_experts; e++) {
        r->start[e + 1] += r->start[e];
    }
    for (uint32_t i = 0; i < n_assigned; i++) {
        r->slot[i] = r->start[r->expert[i]]++;
    }
    for (uint32_t e = moe->n_experts; e > 0; e--) {
        r->start[e] = r->start[e - 1];
    }
    r->start[0] = 0;
}

static void run_experts(struct bt_kctx *k, const struct round *r, const struct bt_k_moe *moe)
{
    for (uint32_t e = 0; e < moe->n_experts; e++) {
        uint32_t n = r->start[e + 1] - r->start[e];
        float *x = r->x + (size_t)r->start[e] * moe->dim;
        float *gate = r->gate + (size_t)r->start[e] * moe->ffn_dim;
        float *up = r->up + (size_t)r->start[e] * moe->ffn_dim;
        if (n == 0) {
            continue;
        }
        const struct bt_k_product both[] = {
            {.y = gate, .ldy = moe->ffn_dim, .w = moe->gate[e]},
            {.y = up, .ldy = moe->ffn_dim, .w = moe->up[e]},
        };
        cpu_gemm_all(k, both, 2, x, moe->dim, n);
        cpu_glu(k, gate, moe->ffn_dim, gate, moe->ffn_dim, up, moe->ffn_dim, n, moe->ffn_dim,
                moe->act);
        cpu_gemm(k, x, moe->dim, gate, moe->ffn_dim, moe->down[e], NULL, n);
    }
}

/* Makes c->moe hold a round of as many rows as possible, up to want. 0: not even one. */
static uint32_t reserve(struct cpu_ctx *c, const struct bt_k_moe *moe, uint32_t want)
{
    for (uint32_t rows = want; rows > 0; rows /= 2) {
        size_t bytes = round_floats(moe, rows) * sizeof(float);
        if (bytes <= c->moe_bytes) {
            return rows;
        }
        float *p = cpu_map(bytes);
        if (p != NULL) {
            cpu_unmap(c->moe, c->moe_bytes);
            c->moe = p;
            c->moe_bytes = bytes;
            return rows;
        }
    }
    return 0;
}

enum bt_status cpu_moe_reserve(struct bt_kctx *k, const struct bt_k_moe *moe, uint32_t n_rows)
{
    return reserve(cpu_of(k), moe, n_rows < MOE_ROWS ? n_rows : MOE_ROWS) > 0 ? BT_OK
                                                                              : BT_ERR_NOMEM;
}

void cpu_moe_ffn(struct bt_kctx *k, float *out, const float *x, const float *logits,
                 const struct bt_k_moe *moe, uint32_t n_rows)
{
    struct cpu_ctx *c = cpu_of(k);
    uint32_t step = reserve(c, moe, n_rows < MOE_ROWS ? n_rows : MOE_ROWS);

    BT_ASSERT(moe->top_k > 0 && moe->top_k <= moe->n_experts);
    if (step == 0 && n_rows > 0) {
        bt_log_error("kernels", "out of memory for the activations of %u experts", moe->top_k);
        c->fault = BT_ERR_NOMEM;
        return;
    }
    for (uint32_t row = 0; row < n_rows; row += step) {
        uint32_t n = n_rows - row < step ? n_rows - row : step, n_assigned = n * moe->top_k;
        struct round r = carve(c->moe, moe, n);
        for (uint32_t i = 0; i < n; i++) {
            route_row(c, &r, moe, logits + (size_t)(row + i) * moe->n_experts, i);
        }
        group_rows(&r, moe, n_assigned);
        for (uint32_t i = 0; i < n_assigned; i++) {
            memcpy(r.x + (size_t)r.slot[i] * moe->dim,
                   x + (size_t)(row + i / moe->top_k) * moe->dim, moe->dim * sizeof(float));
        }
        run_experts(k, &r, moe);
        for (uint32_t i = 0; i < n; i++) {
            float *y = out + (size_t)(row + i) * moe->dim;
            memset(y, 0, moe->dim * sizeof(float));
            for (uint32_t j = 0; j < moe->top_k; j++) {
                uint32_t at = i * moe->top_k + j;
                c->isa->madd(y, r.x + (size_t)r.slot[at] * moe->dim, r.weight[at], moe->dim);
            }
        }
    }
}
