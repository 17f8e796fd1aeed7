/* Attention over a paged cache, and the kernels that go over rows: norm, rope, gated unit, residual. */

#include "bench/kernels/bench_kernels_int.h"

#include <stdio.h>
#include "base/mem.h"

#define HEADS       16U
#define KV_HEADS    8U
#define HEAD_DIM    128U
#define WIDTH       (HEADS * HEAD_DIM)
#define PAGE_TOKENS 16U
#define PAGES_MAX   512U /* 8192 tokens */
#define CHUNK       512U
#define DIM         1024U
#define FFN         3072U

struct attn {
    struct bt_k_attn a;
    struct bt_k_kv kv;
    struct bt_k_span span;
    uint32_t pages[PAGES_MAX];
};

static void run_attention(struct bench *b, void *arg)
{
    struct attn *t = arg;

    bt_k_attention(b->k, &t->a, &t->kv, &t->span, 1);
}

static void verify_attention(struct bench *b, struct attn *t)
{
    float *want = bench_memory((size_t)CHUNK * WIDTH * sizeof(float)), *have = t->a.out;

    t->span = (struct bt_k_span){.n = 5, .pos = 300, .pages = t->pages};
    bt_k_attention(b->k, &t->a, &t->kv, &t->span, 1);
    t->a.out = want;
    bt_k_attention(b->plain, &t->a, &t->kv, &t->span, 1);
    t->a.out = have;
    bench_equal("attention", want, have, (size_t)5 * WIDTH);
    bt_free(want);
}

/* The last rows of a prompt or one decoded token, with `context` keys in all. */
static void time_attention(struct bench *b, struct attn *t, uint32_t rows, uint32_t context)
{
    char shape[48];
    double pairs = 0;
    size_t key_bytes = 2UL * KV_HEADS * HEAD_DIM * bt_dtype_block_bytes(t->kv.dtype);

    t->span = (struct bt_k_span){.n = rows, .pos = context - rows, .pages = t->pages};
    for (uint32_t i = 0; i < rows; i++) {
        pairs += t->span.pos + i + 1;
    }
    (void)snprintf(shape, sizeof(shape), "%uq %ukv x%u at %u", HEADS, KV_HEADS, HEAD_DIM,
                   context); /* fits */
    bench_time(b, &(struct bench_figure){.kernel = "attention",
                                         .type = bt_dtype_name(t->kv.dtype),
                                         .shape = shape,
                                         .rows = rows,
                                         .ops = pairs * HEADS * HEAD_DIM * 4,
                                         .bytes = (double)context * (double)key_bytes,
                                         .flush = true,
                                         .fn = run_attention,
                                         .arg = t});
}

void bench_attention(struct bench *b, enum bt_dtype dtype)
{
    static const uint32_t contexts[] = {64, 512, 4096, 8192};
    static struct attn t;
    float *q = bench_floats((size_t)CHUNK * WIDTH),
          *out = bench_memory((size_t)CHUNK * WIDTH * sizeof(float));
    size_t stride = 2UL * KV_HEADS * PAGE_TOKENS * HEAD_DIM * bt_dtype_block_bytes(dtype);
    float *page = bench_floats(2UL * KV_HEADS * PAGE_TOKENS * HEAD_DIM);

    t = (struct attn){.a = {.q = q,
                            .out = out,
                            .q_stride = WIDTH,
                            .out_stride = WIDTH,
                            .n_heads = HEADS,
                            .scale = 0.088F},
                      .kv = {.base = bt_k_alloc(b->k, PAGES_MAX * stride),
                             .page_stride = stride,
                             .page_tokens = PAGE_TOKENS,
                             .n_kv_heads = KV_HEADS,
                             .head_dim = HEAD_DIM,
                             .dtype = dtype}};
    if (t.kv.base == NULL) {
        bench_memory(SIZE_MAX); /* says so, and ends */
    }
    for (uint32_t i = 0; i < PAGES_MAX; i++) {
        t.pages[i] = i * 37 % PAGES_MAX;
        struct bt_k_span span = {.n = PAGE_TOKENS, .pos = i * PAGE_TOKENS, .pages = t.pages};
        bt_k_kv_store(b->plain, &t.kv, page, KV_HEADS * HEAD_DIM,
                      page + KV_HEADS * PAGE_TOKENS * HEAD_DIM, KV_HEADS * HEAD_DIM, &span, 1);
    }
    verify_attention(b, &t);
    for (size_t i = 0; i < sizeof(contexts) / sizeof(contexts[0]); i++) {
        if (b->quick && contexts[i] == 4096) {
            continue;
        }
        time_attention(b, &t, 1, contexts[i]);
        time_attention(b, &t, contexts[i] < CHUNK ? contexts[i] : CHUNK, contexts[i]);
    }
    bt_k_free(b->k, t.kv.base, PAGES_MAX * stride);
    bt_free(page);
    bt_free(out);
    bt_free(q);
}

/* ---- rows ---- */

struct rows {
    float *x, *y, *w, *cos, *sin;
    uint32_t n;
};

static void norm(struct bt_kctx *k, struct rows *r)
{
    bt_k_rmsnorm(k, r->y, DIM, r->x, DIM, r->w, 0, 1e-6F, r->n, 1, DIM);
}

static void rope(struct bt_kctx *k, struct rows *r)
{
    bt_k_rope(k, r->y, WIDTH, r->cos, r->sin, r->n, HEADS, HEAD_DIM, HEAD_DIM, false);
}

static void glu(struct bt_kctx *k, struct rows *r)
{
    bt_k_glu(k, r->y, FFN, r->x, FFN, r->x, FFN, r->n, FFN, BT_K_SILU);
}

static void add(struct bt_kctx *k, struct rows *r)
{
    bt_k_add(k, r->y, DIM, r->x, DIM, r->n, DIM);
}

struct row_kernel {
    const char *name;
    void (*fn)(struct bt_kctx *k, struct rows *r);
    uint32_t width;
    double ops, bytes; /* for a value of a row */
    struct rows *rows;
};

static void run_row_kernel(struct bench *b, void *arg)
{
    const struct row_kernel *rk = arg;

    rk->fn(b->k, rk->rows);
}

static void verify_row_kernel(struct bench *b, const struct row_kernel *rk)
{
    size_t n = (size_t)rk->rows->n * rk->width;
    float *want = bench_memory(n * sizeof(float)), *have = bench_memory(n * sizeof(float)),
          *y = rk->rows->y;

    rk->rows->y = want;
    rk->fn(b->plain, rk->rows);
    rk->rows->y = have;
    rk->fn(b->k, rk->rows);
    rk->rows->y = y;
    bench_equal(rk->name, want, have, n);
    bt_free(want);
    bt_free(have);
}

void bench_rows(struct bench *b)
{
    struct rows r = {.x = bench_floats((size_t)CHUNK * FFN),
                     .y = bench_floats((size_t)CHUNK * FFN),
                     .w = bench_floats(FFN),
                     .cos = bench_floats((size_t)CHUNK * HEAD_DIM),
                     .sin = bench_floats((size_t)CHUNK * HEAD_DIM)};
    struct row_kernel kernels[] = {{"rmsnorm", norm, DIM, 4, 8, &r},
                                   {"rope", rope, WIDTH, 3, 8, &r},
                                   {"glu silu", glu, FFN, 0, 12, &r}, /* ops: its exp is ours */
                                   {"add", add, DIM, 1, 12, &r}};

    for (size_t i = 0; i < sizeof(kernels) / sizeof(kernels[0]); i++) {
        for (r.n = 1; r.n <= CHUNK; r.n *= CHUNK) {
            struct row_kernel *rk = &kernels[i];
            char shape[16];
            verify_row_kernel(b, rk);
            (void)snprintf(shape, sizeof(shape), "%u", rk->width); /* fits */
            bench_time(b, &(struct bench_figure){.kernel = rk->name,
                                                 .type = "f32",
                                                 .shape = shape,
                                                 .rows = r.n,
                                                 .ops = rk->ops * r.n * rk->width,
                                                 .bytes = rk->bytes * r.n * rk->width,
                                                 .flush = true,
                                                 .fn = run_row_kernel,
                                                 .arg = rk});
        }
    }
    bt_free(r.x);
    bt_free(r.y);
    bt_free(r.w);
    bt_free(r.cos);
    bt_free(r.sin);
}
