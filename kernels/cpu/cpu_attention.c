/* Attention over a ragged batch: cuts it into tiles of query rows that share a key-value head and hands them to the
 * threads. A row's result does not depend on its tile, so tiles may be as small as the number of threads asks for. The
 * arithmetic is in isa_attention.inc. */

#include "kernels/cpu/cpu_int.h"

struct attn_run {
    const struct cpu_ctx *ctx;
    const struct bt_k_attn *a;
    const struct bt_k_kv *kv;
    const struct bt_k_span *spans;
    uint32_t n_spans;
    uint32_t group; /* query heads per key-value head */
    uint32_t tile_rows;
};

static uint32_t span_tiles(const struct attn_run *r, const struct bt_k_span *s)
{
    return (s->n * r->group + r->tile_rows - 1) / r->tile_rows;
}

static uint32_t count_tasks(const struct attn_run *r)
{
    uint32_t n = 0;
    for (uint32_t s = 0; s < r->n_spans; s++) {
        n += span_tiles(r, &r->spans[s]) * r->kv->n_kv_heads;
    }
    return n;
}

static void attn_task(void *arg, uint32_t task, uint32_t thread)
{
    const struct attn_run *r = arg;
    const struct bt_k_span *s = r->spans;
    uint32_t n = span_tiles(r, s) * r->kv->n_kv_heads;

    while (task >= n) {
        task -= n;
        s++;
        n = span_tiles(r, s) * r->kv->n_kv_heads;
    }
    uint32_t kv_head = task % r->kv->n_kv_heads;
    uint32_t first = task / r->kv->n_kv_heads * r->tile_rows, n_rows = s->n * r->group;
    struct cpu_attn_tile t = {.a = r->a, .kv = r->kv, .pages = s->pages, .kv_head = kv_head};

    for (uint32_t i = first; i < n_rows && t.n_rows < r->tile_rows; i++, t.n_rows++) {
        uint32_t token = i / r->group, head = kv_head * r->group + i % r->group;
        size_t row = (size_t)s->row + token, at = (size_t)head * r->kv->head_dim;
        t.rows[t.n_rows].q = r->a->q + row * r->a->q_stride + at;
        t.rows[t.n_rows].out = r->a->out + row * r->a->out_stride + at;
        t.rows[t.n_rows].pos = s->pos + token;
    }
    r->ctx->isa->attention(&t, cpu_scratch(r->ctx, thread));
}

void cpu_attention(struct bt_kctx *k, const struct bt_k_attn *a, const struct bt_k_kv *kv,
                   const struct bt_k_span *spans, uint32_t n_spans)
{
    struct attn_run run = {.ctx = cpu_of(k),
                           .a = a,
                           .kv = kv,
                           .spans = spans,
                           .n_spans = n_spans,
                           .group = a->n_heads / kv->n_kv_heads,
                           .tile_rows = CPU_ATTN_ROWS};

    BT_ASSERT(kv->n_kv_heads > 0 && a->n_heads % kv->n_kv_heads == 0 && kv->dtype <= BT_DTYPE_BF16);
    BT_ASSERT(kv->head_dim > 0 && kv->head_dim <= CPU_HEAD_DIM_MAX && kv->page_tokens > 0);
    uint32_t n_tasks = count_tasks(&run);
    /* The query heads of a key-value head stay together, so that it is read once, unless threads would be idle. */
    while (run.ctx->n_threads > 1 && n_tasks < 3 * run.ctx->n_threads &&
           run.tile_rows > (n_tasks < run.ctx->n_threads ? 1 : run.group)) {
        run.tile_rows /= 2;
        n_tasks = count_tasks(&run);
    }
    bt_pool_run(run.ctx->pool, attn_task, &run, n_tasks);
}
