/* Attention over a ragged batch: cuts it into tiles of query rows and hands them to the threads. Rows that share a key-value
 * head belong together, so that it is read once, and of few rows (decoding) all heads do, so that pages are read as they lie.
 * A row's result does not depend on its tile, so tiles may be as small as the number of threads asks for. Finds the keys of a
 * block in their pages. The arithmetic is in isa_attention.inc and, with products of bf16, isa_bf16_attention.inc. */

#include "kernels/cpu/cpu_int.h"

struct attn_run {
    const struct cpu_ctx *ctx;
    const struct bt_k_attn *a;
    const struct bt_k_kv *kv;
    const struct bt_k_span *spans;
    uint32_t n_spans;
    uint32_t group;    /* query heads per key-value head */
    uint32_t rows_max; /* in a tile */
    uint32_t tile_rows, tile_heads;
};

void cpu_attn_keys(const struct cpu_attn_tile *t, size_t row_bytes, uint32_t first, uint32_t last,
                   uint32_t base, const uint8_t *out[CPU_ATTN_KEYS])
{
    const struct bt_k_kv *kv = t->kv;
    size_t head = (size_t)t->kv_head * kv->page_tokens * row_bytes;
    uint32_t lo = first > base ? first - base : 0;
    uint32_t hi = last - base < CPU_ATTN_KEYS ? last - base + 1 : CPU_ATTN_KEYS;
    uint32_t page = (base + lo) / kv->page_tokens, off = (base + lo) % kv->page_tokens;

    for (uint32_t j = lo; j < hi; page++, off = 0) {
        const uint8_t *src =
            (const uint8_t *)kv->base + (size_t)t->pages[page] * kv->page_stride + head;
        for (; off < kv->page_tokens && j < hi; off++, j++) {
            out[j] = src + off * row_bytes;
        }
    }
    for (uint32_t j = 0; j < lo; j++) {
        out[j] = out[lo];
    }
    for (uint32_t j = hi; j < CPU_ATTN_KEYS; j++) {
        out[j] = out[hi - 1];
    }
}

void cpu_attn_seen(const struct cpu_attn_tile *t, uint32_t r, uint32_t base, uint32_t *lo,
                   uint32_t *hi)
{
    uint32_t pos = t->rows[r].pos, window = t->a->window;
    uint32_t first = window != 0 && pos >= window ? pos - window + 1 : 0;

    *lo = first <= base ? 0 : first - base < CPU_ATTN_KEYS ? first - base : CPU_ATTN_KEYS;
    *hi = pos < base ? 0 : pos - base < CPU_ATTN_KEYS ? pos - base + 1 : CPU_ATTN_KEYS;
    if (*lo >= *hi) {
        *lo = *hi = 0;
    }
}

/* How the query rows of a span are cut: tiles of n_each rows of each of n_heads key-value heads. */
struct span_cut {
    uint32_t n_rows; /* of one key-value head */
    uint32_t n_each, n_heads;
    uint32_t row_tiles, head_tiles;
};

static struct span_cut cut(const struct attn_run *r, const struct bt_k_span *s)
{
    struct span_cut c = {.n_rows = s->n * r->group};

    c.n_each = c.n_rows < r->tile_rows ? c.n_rows : r->tile_rows;
    c.n_heads = r->rows_max / c.n_each < r->tile_heads ? r->rows_max / c.n_each : r->tile_heads;
    c.row_tiles = (c.n_rows + c.n_each - 1) / c.n_each;
    c.head_tiles = (r->kv->n_kv_heads + c.n_heads - 1) / c.n_heads;
    return c;
}

static void attn_task(void *arg, uint32_t task, uint32_t thread)
{
    const struct attn_run *r = arg;
    const struct bt_k_span *s = r->spans;
    struct span_cut c = cut(r, s);

    while (task >= c.row_tiles * c.head_tiles) {
        task -= c.row_tiles * c.head_tiles;
        s++;
        c = cut(r, s);
    }
    uint32_t head0 = task % c.head_tiles * c.n_heads, first = task / c.head_tiles * c.n_each;
    uint32_t n_each = c.n_rows - first < c.n_each ? c.n_rows - first : c.n_each;
    struct cpu_attn_tile t = {.a = r->a, .kv = r->kv, .pages = s->pages, .kv_head = head0};

    t.n_kv_heads = r->kv->n_kv_heads - head0 < c.n_heads ? r->kv->n_kv_heads - head0 : c.n_heads;
    for (uint32_t i = 0; i < t.n_kv_heads * n_each; i++, t.n_rows++) {
        uint32_t at_row = first + i % n_each, token = at_row / r->group;
        uint32_t head = (head0 + i / n_each) * r->group + at_row % r->group;
        size_t row = (size_t)s->row + token, at = (size_t)head * r->kv->head_dim;
        t.rows[i].q = r->a->q + row * r->a->q_stride + at;
        t.rows[i].out = r->a->out + row * r->a->out_stride + at;
        t.rows[i].pos = s->pos + token;
    }
    if (r->ctx->attn != NULL) {
        r->ctx->attn->attention(&t, cpu_scratch(r->ctx, thread));
    } else {
        r->ctx->isa->attention(&t, cpu_scratch(r->ctx, thread));
    }
}

/* Whether n_threads finish together: many tasks for each, or as many equal ones. */
static bool is_even(const struct attn_run *r, uint32_t *n_tasks)
{
    uint32_t n_threads = r->ctx->n_threads, n = 0;
    uint64_t all = 0, largest = 0;

    for (uint32_t i = 0; i < r->n_spans; i++) {
        struct span_cut c = cut(r, &r->spans[i]);
        uint64_t cost = (uint64_t)c.n_each * c.n_heads * (r->spans[i].pos + r->spans[i].n);
        n += c.row_tiles * c.head_tiles;
        all += cost * c.row_tiles * c.head_tiles;
        largest = cost > largest ? cost : largest;
    }
    *n_tasks = n;
    return largest * n_threads * 3 <= all || (n % n_threads == 0 && largest * n * 8 <= all * 9);
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
                           .rows_max = cpu_of(k)->attn != NULL ? CPU_ATTN16_ROWS : CPU_ATTN_ROWS,
                           .tile_heads = kv->n_kv_heads};
    uint32_t n_tasks = 0;

    BT_ASSERT(kv->n_kv_heads > 0 && a->n_heads % kv->n_kv_heads == 0 && bt_dtype_is_kv(kv->dtype));
    BT_ASSERT(kv->head_dim > 0 && kv->head_dim <= CPU_HEAD_DIM_MAX && kv->page_tokens > 0);
    run.tile_rows = run.rows_max;
    /* The query heads of a key-value head are parted only where threads would be idle. */
    while (!is_even(&run, &n_tasks) && run.ctx->n_threads > 1) {
        if (run.tile_heads > 1) {
            run.tile_heads = (run.tile_heads + 1) / 2;
        } else if (run.tile_rows > (n_tasks < run.ctx->n_threads ? 1 : run.group)) {
            run.tile_rows /= 2;
        } else {
            break;
        }
    }
    bt_pool_run(run.ctx->pool, attn_task, &run, n_tasks);
}
