/* One answer on the CUDA backend, to the bit, beside products (test_cuda_same): kernels over rows, experts and attention give a row the
 * same whatever the rows of the call, and attention whatever the chunks, the mates of the batch and the places of pages. In every
 * class that promises it. `--large`: shapes of an 8B model, for a device; the emulated one is slow. */

#include "tests/parity/cuda_parity.h"

static struct sizes {
    uint32_t rows, dim, ffn, heads, kv_heads, head_dim, tokens;
} z = {100, 96, 64, 6, 2, 16, 300};

/* What a case computes: rows [first, first + n) of out, from x, which it leaves alone. */
struct rows_case {
    struct bt_kctx *k;
    float *x, *x2, *out; /* device [rows][width] */
    float *w;            /* device [width] */
    uint32_t width;      /* of a row of each of them */
    float *cos, *sin;    /* host [rows][head_dim / 2] */
    struct bt_kweight *table;
    struct bt_k_moe moe;
    float *logits; /* device [rows][experts] */
    uint32_t *ids; /* host [rows] */
};
typedef void rows_fn(const struct rows_case *c, uint32_t first, uint32_t n);

static float *row_of(float *p, const struct rows_case *c, uint32_t row)
{
    return p + (size_t)row * c->width;
}

static void norm(const struct rows_case *c, uint32_t first, uint32_t n)
{
    bt_k_rmsnorm(c->k, row_of(c->out, c, first), c->width, row_of(c->x, c, first), c->width, c->w,
                 0, 1e-5F, n, 1, c->width);
}

static void head_norm(const struct rows_case *c, uint32_t first, uint32_t n)
{
    bt_k_rmsnorm(c->k, row_of(c->out, c, first), c->width, row_of(c->x, c, first), c->width, c->w,
                 1, 1e-6F, n, c->width / z.head_dim, z.head_dim);
}

static void rope(const struct rows_case *c, uint32_t first, uint32_t n)
{
    const size_t half = z.head_dim / 2;

    bt_k_copy(c->k, row_of(c->out, c, first), row_of(c->x, c, first),
              (size_t)n * c->width * sizeof(float));
    bt_k_rope(c->k, row_of(c->out, c, first), c->width, c->cos + first * half,
              c->sin + first * half, n, c->width / z.head_dim, z.head_dim, z.head_dim, false);
}

static void glu(const struct rows_case *c, uint32_t first, uint32_t n)
{
    bt_k_glu(c->k, row_of(c->out, c, first), c->width, row_of(c->x, c, first), c->width,
             row_of(c->x2, c, first), c->width, n, c->width, BT_K_GELU_TANH);
}

static void add(const struct rows_case *c, uint32_t first, uint32_t n)
{
    bt_k_copy(c->k, row_of(c->out, c, first), row_of(c->x, c, first),
              (size_t)n * c->width * sizeof(float));
    bt_k_add(c->k, row_of(c->out, c, first), c->width, row_of(c->x2, c, first), c->width, n,
             c->width);
}

static void softcap(const struct rows_case *c, uint32_t first, uint32_t n)
{
    bt_k_copy(c->k, row_of(c->out, c, first), row_of(c->x, c, first),
              (size_t)n * c->width * sizeof(float));
    bt_k_softcap(c->k, row_of(c->out, c, first), c->width, 0.7F, n, c->width);
}

static void gather(const struct rows_case *c, uint32_t first, uint32_t n)
{
    bt_k_gather_rows(c->k, row_of(c->out, c, first), c->width, c->x, c->width, c->ids + first, n,
                     c->width);
}

static void embed(const struct rows_case *c, uint32_t first, uint32_t n)
{
    bt_k_embed(c->k, row_of(c->out, c, first), c->table, c->ids + first, n, 1.5F);
}

static void experts(const struct rows_case *c, uint32_t first, uint32_t n)
{
    bt_k_moe_ffn(c->k, row_of(c->out, c, first), row_of(c->x, c, first),
                 c->logits + (size_t)first * c->moe.n_experts, &c->moe, n);
}

static void check_rows(const struct rows_case *c, const char *name, rows_fn *fn)
{
    static const uint32_t steps[] = {1, 37};
    const size_t n = (size_t)z.rows * c->width, bytes = n * sizeof(float);
    float *first = bt_alloc(bytes), *again = bt_alloc(bytes), *zeros = bt_calloc(n, sizeof(float));
    char what[96];

    fn(c, 0, z.rows);
    bt_k_read(c->k, first, c->out, bytes);
    for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
        (void)snprintf(what, sizeof(what), "%s, %s, %u rows at a time", bt_k_numerics(c->k), name,
                       steps[i]);
        bt_k_write(c->k, c->out, zeros, bytes);
        for (uint32_t r = 0; r < z.rows; r += steps[i]) {
            fn(c, r, z.rows - r < steps[i] ? z.rows - r : steps[i]);
        }
        bt_k_read(c->k, again, c->out, bytes);
        cp_same(what, again, first, n);
    }
    bt_free(first);
    bt_free(again);
    bt_free(zeros);
}

static struct bt_kweight *weight(struct bt_kctx *k, enum bt_dtype t, uint32_t n, uint32_t cols,
                                 bool expert)
{
    uint8_t *rows = pk_random_rows(t, n, cols);
    const struct bt_k_weight_desc d = {.dtype = t,
                                       .n_rows = n,
                                       .n_cols = cols,
                                       .data = rows,
                                       .for_gemm = expert,
                                       .for_embed = !expert,
                                       .expert = expert};
    struct bt_kweight *w = NULL;

    CHECK_EQ(bt_k_weight_create(k, &d, &w, NULL), BT_OK);
    bt_free(rows);
    return w;
}

static float *random_device(struct bt_kctx *k, size_t n, float low, float high)
{
    float *host = pk_floats(n, low, high), *dev = cp_floats(k, host, n);

    bt_free(host);
    return dev;
}

#define EXPERTS 6U
static void check_experts(struct rows_case *c, enum bt_dtype t)
{
    struct bt_kweight *w[3][EXPERTS];
    const uint32_t out[3] = {z.ffn, z.ffn, z.dim}, in[3] = {z.dim, z.dim, z.ffn};
    const size_t n = (size_t)z.rows * EXPERTS;
    char name[32];

    for (uint32_t i = 0; i < 3 * EXPERTS; i++) {
        w[i / EXPERTS][i % EXPERTS] = weight(c->k, t, out[i / EXPERTS], in[i / EXPERTS], true);
    }
    c->moe = (struct bt_k_moe){.n_experts = EXPERTS,
                               .top_k = 2,
                               .normalize = true,
                               .gate = w[0],
                               .up = w[1],
                               .down = w[2],
                               .dim = z.dim,
                               .ffn_dim = z.ffn};
    c->logits = random_device(c->k, n, -3, 3);
    CHECK_EQ(bt_k_moe_reserve(c->k, &c->moe, z.rows), BT_OK);
    (void)snprintf(name, sizeof(name), "experts of %s", bt_dtype_name(t));
    check_rows(c, name, experts);
    bt_k_free(c->k, c->logits, n * sizeof(float));
    for (uint32_t i = 0; i < 3 * EXPERTS; i++) {
        bt_k_weight_destroy(c->k, w[i / EXPERTS][i % EXPERTS]);
    }
}

static void check_all_rows(struct bt_kctx *k)
{
    static const struct {
        const char *name;
        rows_fn *fn;
    } kernels[] = {
        {"norm", norm}, {"norm of heads", head_norm}, {"rope", rope},     {"glu", glu},
        {"add", add},   {"softcap", softcap},         {"gather", gather}, {"embed", embed}};
    const size_t n = (size_t)z.rows * z.dim;
    struct rows_case c = {.k = k, .width = z.dim};

    c.x = random_device(k, n, -2, 2);
    c.x2 = random_device(k, n, -2, 2);
    c.out = random_device(k, n, 0, 0);
    c.w = random_device(k, z.dim, 0.5F, 1.5F);
    c.cos = pk_floats((size_t)z.rows * z.head_dim / 2, -1, 1);
    c.sin = pk_floats((size_t)z.rows * z.head_dim / 2, -1, 1);
    c.table = weight(k, BT_DTYPE_BF16, 200, z.dim, false);
    c.ids = bt_alloc(z.rows * sizeof(*c.ids));
    for (uint32_t i = 0; i < z.rows; i++) {
        c.ids[i] = pk_u32() % z.rows;
    }
    for (size_t i = 0; i < sizeof(kernels) / sizeof(kernels[0]); i++) {
        check_rows(&c, kernels[i].name, kernels[i].fn);
    }
    check_experts(&c, BT_DTYPE_BF16);
    check_experts(&c, BT_DTYPE_Q8_0);
    bt_k_weight_destroy(k, c.table);
    bt_k_free(k, c.x, n * sizeof(float));
    bt_k_free(k, c.x2, n * sizeof(float));
    bt_k_free(k, c.out, n * sizeof(float));
    bt_k_free(k, c.w, z.dim * sizeof(float));
    bt_free(c.cos);
    bt_free(c.sin);
    bt_free(c.ids);
}

/* ---- attention ---- */

#define PAGE 16U

/* Two sequences of z.tokens in one pool. */
struct attn_case {
    struct bt_kctx *k;
    float *q, *key, *value, *out; /* device: rows of the first sequence, then of the second */
    size_t q_width, kv_width;
    struct bt_k_kv kv;
    size_t kv_bytes;
    uint32_t n_pages;   /* of a sequence */
    uint32_t *pages[2]; /* host */
    uint32_t window;
};

/* Stores and attends tokens [from, from + n) of the first sequence, and of the second if it is a mate. */
static void attend(const struct attn_case *c, uint32_t from, uint32_t n, bool mate)
{
    const struct bt_k_attn a = {.q = c->q,
                                .out = c->out,
                                .q_stride = c->q_width,
                                .out_stride = c->q_width,
                                .n_heads = z.heads,
                                .scale = 0.3F,
                                .window = c->window};
    struct bt_k_span s[2];

    for (uint32_t i = 0; i < 2; i++) {
        s[i] = (struct bt_k_span){
            .row = i * z.tokens + from, .n = n, .pos = from, .pages = c->pages[i]};
    }
    bt_k_kv_store(c->k, &c->kv, c->key, c->kv_width, c->value, c->kv_width, s, mate ? 2 : 1);
    bt_k_attention(c->k, &a, &c->kv, s, mate ? 2 : 1);
}

/* Places of pages: in order, or scattered. */
static void place(struct attn_case *c, bool scattered)
{
    for (uint32_t i = 0; i < 2; i++) {
        for (uint32_t p = 0; p < c->n_pages; p++) {
            c->pages[i][p] = scattered ? 2 * (c->n_pages - 1 - p) + i : i * c->n_pages + p;
        }
    }
}

static void check_ways(struct attn_case *c)
{
    static const struct {
        uint32_t chunk;
        bool scattered, mate;
    } ways[] = {{0, false, false}, {0, true, true},   {37, false, true},
                {1, true, false},  {64, true, false}, {1, false, true}};
    const size_t n = z.tokens * c->q_width;
    float *first = bt_alloc(n * sizeof(float)), *again = bt_alloc(n * sizeof(float));
    uint8_t *nan = bt_alloc(c->kv_bytes);
    char what[128];

    memset(nan, 0xff, c->kv_bytes);
    for (size_t w = 0; w < sizeof(ways) / sizeof(ways[0]); w++) {
        const uint32_t chunk = ways[w].chunk != 0 ? ways[w].chunk : z.tokens;
        (void)snprintf(what, sizeof(what), "%s, attention of %s, window %u, chunks of %u%s%s",
                       bt_k_numerics(c->k), bt_dtype_name(c->kv.dtype), c->window, chunk,
                       ways[w].scattered ? ", pages scattered" : "",
                       ways[w].mate ? ", with a mate" : "");
        bt_k_write(c->k, c->kv.base, nan, c->kv_bytes);
        place(c, ways[w].scattered);
        for (uint32_t t = 0; t < z.tokens; t += chunk) {
            attend(c, t, z.tokens - t < chunk ? z.tokens - t : chunk, ways[w].mate);
        }
        bt_k_read(c->k, w == 0 ? first : again, c->out, n * sizeof(float));
        if (w > 0) {
            cp_same(what, again, first, n);
        }
    }
    bt_free(first);
    bt_free(again);
    bt_free(nan);
}

static void check_attention(struct bt_kctx *k, enum bt_dtype t, uint32_t window)
{
    struct attn_case c = {.k = k,
                          .q_width = (size_t)z.heads * z.head_dim,
                          .kv_width = (size_t)z.kv_heads * z.head_dim,
                          .n_pages = (z.tokens + PAGE - 1) / PAGE,
                          .window = window};
    const size_t rows = 2 * (size_t)z.tokens;

    c.q = random_device(k, rows * c.q_width, -2, 2);
    c.key = random_device(k, rows * c.kv_width, -2, 2);
    c.value = random_device(k, rows * c.kv_width, -2, 2);
    c.out = random_device(k, rows * c.q_width, 0, 0);
    c.kv = (struct bt_k_kv){.page_stride = 2 * PAGE * c.kv_width * bt_dtype_block_bytes(t),
                            .page_tokens = PAGE,
                            .n_kv_heads = z.kv_heads,
                            .head_dim = z.head_dim,
                            .dtype = t};
    c.kv_bytes = 2 * c.n_pages * c.kv.page_stride;
    c.kv.base = bt_k_alloc(k, c.kv_bytes);
    c.pages[0] = bt_alloc(c.n_pages * sizeof(uint32_t));
    c.pages[1] = bt_alloc(c.n_pages * sizeof(uint32_t));
    check_ways(&c);
    bt_k_free(k, c.q, rows * c.q_width * sizeof(float));
    bt_k_free(k, c.key, rows * c.kv_width * sizeof(float));
    bt_k_free(k, c.value, rows * c.kv_width * sizeof(float));
    bt_k_free(k, c.out, rows * c.q_width * sizeof(float));
    bt_k_free(k, c.kv.base, c.kv_bytes);
    bt_free(c.pages[0]);
    bt_free(c.pages[1]);
}

static void check_class(struct bt_kctx *k)
{
    static const enum bt_dtype types[] = {BT_DTYPE_F32, BT_DTYPE_F16, BT_DTYPE_BF16};

    check_all_rows(k);
    for (size_t t = 0; t < sizeof(types) / sizeof(types[0]); t++) {
        check_attention(k, types[t], types[t] == BT_DTYPE_F16 ? 70 : 0);
    }
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--large") == 0) {
        z = (struct sizes){512, 4096, 1024, 32, 8, 128, 1500};
    }
    cp_each_exact(check_class);
    return bt_test_done();
}
