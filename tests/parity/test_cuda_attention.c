/* The CUDA backend's paged attention against the CPU backend (class cuda-bf16: against its description), and equal bits however a sequence is cut into chunks (which
 * decides whether its splits run at once or in turn) and batched with others. Memory that no position may see is NaN. */

#include "base/float8.h"
#include "tests/parity/attention_shape.h"
#include "tests/parity/attention_spec.h"
#include "tests/parity/cuda_parity.h"

/* One sequence on one backend. */
struct seq {
    struct shape s;
    struct bt_kctx *k;
    float *q, *key, *value, *out; /* device */
    size_t q_stride, kv_stride, n_out, kv_bytes;
    struct bt_k_kv kv;
    uint32_t *pages;
};

struct values {
    float *q, *key, *value;
};

static void seq_init(struct seq *q, struct bt_kctx *k, struct shape s, const struct values *v)
{
    *q = (struct seq){.s = s, .k = k};
    q->q_stride = shape_q_stride(&s);
    q->kv_stride = shape_kv_stride(&s);
    q->n_out = (size_t)s.n_tokens * s.n_heads * s.head_dim;
    q->q = cp_floats(k, v->q, s.n_tokens * q->q_stride);
    q->key = cp_floats(k, v->key, s.n_tokens * q->kv_stride);
    q->value = cp_floats(k, v->value, s.n_tokens * q->kv_stride);
    q->out = bt_k_alloc(k, q->n_out * sizeof(float));
    q->kv = shape_kv(&s, &q->kv_bytes);
    q->kv.base = bt_k_alloc(k, q->kv_bytes);
    q->pages = shape_pages(&s);
}

static void seq_fini(struct seq *q)
{
    bt_k_free(q->k, q->q, q->s.n_tokens * q->q_stride * sizeof(float));
    bt_k_free(q->k, q->key, q->s.n_tokens * q->kv_stride * sizeof(float));
    bt_k_free(q->k, q->value, q->s.n_tokens * q->kv_stride * sizeof(float));
    bt_k_free(q->k, q->out, q->n_out * sizeof(float));
    bt_k_free(q->k, q->kv.base, q->kv_bytes);
    bt_free(q->pages);
}

/* The whole sequence in chunks, out of a cache that is NaN at first. */
static void seq_run(struct seq *q, uint32_t chunk, float *got)
{
    const struct shape_rows r = {
        .q = q->q, .k = q->key, .v = q->value, .out = q->out, .kv = &q->kv, .pages = q->pages};
    uint8_t *nan = bt_alloc(q->kv_bytes);

    memset(nan, 0xff, q->kv_bytes);
    bt_k_write(q->k, q->kv.base, nan, q->kv_bytes);
    for (uint32_t t = 0; t < q->s.n_tokens; t += chunk) {
        shape_chunk(q->k, &q->s, &r, t, q->s.n_tokens - t < chunk ? q->s.n_tokens - t : chunk);
    }
    bt_k_read(q->k, got, q->out, q->n_out * sizeof(float));
    bt_free(nan);
}

/* The whole of it as class cuda-bf16 has it. */
static void attend_as_described(const struct shape *s, const struct values *v, float *out)
{
    size_t q_stride = shape_q_stride(s), ld = shape_kv_stride(s);
    double row[512];

    for (uint32_t i = 0; i < s->n_tokens * s->n_heads; i++) {
        uint32_t token = i / s->n_heads, head = i % s->n_heads;
        size_t kv = (size_t)(head / (s->n_heads / s->n_kv_heads)) * s->head_dim;
        struct as_row r = {.q = v->q + token * q_stride + (size_t)head * s->head_dim,
                           .key = v->key + kv,
                           .value = v->value + kv,
                           .ld = ld,
                           .head_dim = s->head_dim,
                           .pos = token,
                           .window = s->window,
                           .dtype = s->dtype == BT_DTYPE_F8 ? BT_DTYPE_F16 : s->dtype,
                           .scale = 1.0F / sqrtf((float)s->head_dim),
                           .softcap = s->softcap};
        as_attend(&r, row);
        for (uint32_t d = 0; d < s->head_dim; d++) {
            out[(size_t)i * s->head_dim + d] = (float)row[d];
        }
    }
}

/* K and V become numbers of e4m3, if pages have these. */
static void round_f8(const struct shape *s, struct values *v)
{
    for (size_t i = 0; i < s->n_tokens * shape_kv_stride(s) && s->dtype == BT_DTYPE_F8; i++) {
        v->key[i] = bt_f8_to_f32(bt_f32_to_f8(v->key[i]));
        v->value[i] = bt_f8_to_f32(bt_f32_to_f8(v->value[i]));
    }
}

static void test_shape(const struct cp *p, struct shape s)
{
    bool tiles = strcmp(bt_k_numerics(p->cuda), "cuda-f32") != 0 && s.dtype != BT_DTYPE_F32 &&
                 s.head_dim % (s.dtype == BT_DTYPE_F8 ? 16 : 8) == 0;
    static const uint32_t chunks[] = {1, 5, 64};
    size_t n = (size_t)s.n_tokens * s.n_heads * s.head_dim;
    struct values v = {.q = pk_floats(s.n_tokens * shape_q_stride(&s), -2, 2),
                       .key = pk_floats(s.n_tokens * shape_kv_stride(&s), -2, 2),
                       .value = pk_floats(s.n_tokens * shape_kv_stride(&s), -2, 2)};
    float *want = pk_floats(n, 0, 0), *got = pk_floats(n, 0, 0), *other = pk_floats(n, 0, 0);
    struct seq cpu, cuda;
    char what[128];

    (void)snprintf(what, sizeof(what),
                   "attention %s heads %u/%u dim %u page %u tokens %u window %u cap %g",
                   bt_dtype_name(s.dtype), s.n_heads, s.n_kv_heads, s.head_dim, s.page_tokens,
                   s.n_tokens, s.window, (double)s.softcap);
    seq_init(&cpu, p->cpu, s, &v);
    seq_init(&cuda, p->cuda, s, &v);
    seq_run(&cpu, s.n_tokens, want);
    seq_run(&cuda, s.n_tokens, got);
    if (tiles) {
        round_f8(&s, &v);
        attend_as_described(&s, &v, want);
    }
    /* An exponential that is nearly halfway between two of 16 bits may be rounded either way. */
    cp_near(what, got, want, n, tiles ? 2e-4 : 3e-6, 3e-6);
    uint8_t *a = bt_alloc(cpu.kv_bytes), *b = bt_alloc(cpu.kv_bytes);
    bt_k_read(p->cpu, a, cpu.kv.base, cpu.kv_bytes);
    bt_k_read(p->cuda, b, cuda.kv.base, cuda.kv_bytes);
    CHECK(memcmp(a, b, cpu.kv_bytes) == 0); /* K and V rounded alike, nothing else touched */
    for (size_t c = 0; c < sizeof(chunks) / sizeof(chunks[0]); c++) {
        seq_run(&cuda, chunks[c], other);
        if (!cp_same(what, other, got, n)) {
            fprintf(stderr, "  in chunks of %u\n", chunks[c]);
        }
    }
    seq_fini(&cpu);
    seq_fini(&cuda);
    bt_free(a);
    bt_free(b);
    bt_free(v.q);
    bt_free(v.key);
    bt_free(v.value);
    bt_free(want);
    bt_free(got);
    bt_free(other);
}

/* Pages of 8 bits give the bits of wider ones that hold the same numbers. */
static void test_f8(const struct cp *p, struct shape s)
{
    static const uint32_t chunks[] = {1, 33, 300};
    const bool tiles = strcmp(bt_k_numerics(p->cuda), "cuda-f32") != 0 && s.head_dim % 16 == 0;
    size_t n = (size_t)s.n_tokens * s.n_heads * s.head_dim, ld = shape_kv_stride(&s);
    struct values v = {.q = pk_floats(s.n_tokens * shape_q_stride(&s), -2, 2),
                       .key = pk_floats(s.n_tokens * ld, -2, 2),
                       .value = pk_floats(s.n_tokens * ld, -2, 2)};
    float *want = pk_floats(n, 0, 0), *got = pk_floats(n, 0, 0);
    struct seq narrow, wide;

    for (size_t i = 0; i < s.n_tokens * ld; i += 5) { /* small and large ones too */
        v.key[i] *= ldexpf(1, (int)(pk_u32() % 14) - 12);
        v.value[i] *= ldexpf(1, (int)(pk_u32() % 22) - 12);
    }
    seq_init(&narrow, p->cuda, s, &v);
    round_f8(&s, &v);
    s.dtype = tiles ? BT_DTYPE_F16 : BT_DTYPE_F32;
    seq_init(&wide, p->cuda, s, &v);
    for (size_t i = 0; i < sizeof(chunks) / sizeof(chunks[0]); i++) {
        seq_run(&narrow, chunks[i], got);
        seq_run(&wide, chunks[i], want);
        cp_same("f8 pages and wider ones", got, want, n);
    }
    seq_fini(&narrow);
    seq_fini(&wide);
    bt_free(v.q);
    bt_free(v.key);
    bt_free(v.value);
    bt_free(want);
    bt_free(got);
}

/* The same bits, but that a NaN may be any. */
static void check_alike(const char *what, const float *got, const float *want, size_t n)
{
    bt_test_checks++;
    for (size_t j = 0; j < n; j++) {
        if (memcmp(&got[j], &want[j], sizeof(float)) != 0 && !(isnan(got[j]) && isnan(want[j]))) {
            bt_test_failures++;
            fprintf(stderr, "%s: value %zu is %.9g, not %.9g\n", what, j, (double)got[j],
                    (double)want[j]);
            return;
        }
    }
}

/* Values that are not finite reach the rows that see them, whatever else is in their tile, and no other row. */
static void test_infinite(const struct cp *p, struct shape s)
{
    static const struct {
        uint32_t token, dim;
        float value;
    } bad[] = {{41, 3, INFINITY}, {77, 9, NAN}, {79, 3, -INFINITY}, {100, 0, INFINITY}};
    static const uint32_t chunks[] = {150, 64, 9};
    size_t width = (size_t)s.n_heads * s.head_dim, n = s.n_tokens * width;
    size_t ld = shape_kv_stride(&s);
    struct values v = {.q = pk_floats(s.n_tokens * shape_q_stride(&s), -2, 2),
                       .key = pk_floats(s.n_tokens * ld, -2, 2),
                       .value = pk_floats(s.n_tokens * ld, -2, 2)};
    float *clean = pk_floats(n, 0, 0), *want = pk_floats(n, 0, 0), *got = pk_floats(n, 0, 0);
    struct seq q;
    char what[128];

    (void)snprintf(what, sizeof(what), "values not finite, %s, %s, dim %u, window %u",
                   bt_k_numerics(p->cuda), bt_dtype_name(s.dtype), s.head_dim, s.window);
    seq_init(&q, p->cuda, s, &v);
    seq_run(&q, s.n_tokens, clean);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        v.value[bad[i].token * ld + bad[i].dim] = bad[i].value;
    }
    bt_k_write(p->cuda, q.value, v.value, s.n_tokens * q.kv_stride * sizeof(float));
    seq_run(&q, 1, want); /* no row with another of another position */
    for (size_t i = 0; i < sizeof(chunks) / sizeof(chunks[0]); i++) {
        seq_run(&q, chunks[i], got);
        check_alike(what, got, want, n);
        check_alike(what, got, clean, bad[0].token * width);
    }
    CHECK(isinf(got[bad[0].token * width + bad[0].dim]));
    CHECK(isnan(got[bad[1].token * width + bad[1].dim]));
    seq_fini(&q);
    bt_free(v.q);
    bt_free(v.key);
    bt_free(v.value);
    bt_free(clean);
    bt_free(want);
    bt_free(got);
}

/* A ragged batch of prompts and decoding sequences: others in the same call change nothing. */
static void test_batch(const struct cp *p)
{
    const struct shape s = {6, 2, 48, 16, 300, 0, BT_DTYPE_BF16, 0};
    static const uint32_t n_rows[4] = {1, 20, 7, 1}, pos[4] = {149, 40, 0, 299};
    const size_t width = 6 * 48, n = 29 * width;
    struct values v = {.q = pk_floats(300 * shape_q_stride(&s), -2, 2),
                       .key = pk_floats(300 * shape_kv_stride(&s), -2, 2),
                       .value = pk_floats(300 * shape_kv_stride(&s), -2, 2)};
    float *together = pk_floats(n, 0, 0), *alone = pk_floats(n, 0, 0);
    uint32_t pages[4][19];
    struct bt_k_span spans[4];
    struct seq base;

    seq_init(&base, p->cuda, s, &v);
    uint16_t *cache = bt_alloc(base.kv_bytes);
    for (size_t i = 0; i < base.kv_bytes / 2; i++) {
        cache[i] = (uint16_t)(0x3f00 + pk_u32() % 256 + (pk_u32() & 0x8000));
    }
    bt_k_write(p->cuda, base.kv.base, cache, base.kv_bytes);
    for (uint32_t i = 0, row = 0; i < 4; i++) {
        for (uint32_t j = 0; j < 19; j++) {
            pages[i][j] = (j * 3 + i * 5) % 38;
        }
        spans[i] = (struct bt_k_span){.row = row, .n = n_rows[i], .pos = pos[i], .pages = pages[i]};
        row += n_rows[i];
    }
    struct bt_k_attn a = {.q = base.q,
                          .out = base.out,
                          .q_stride = width,
                          .out_stride = width,
                          .n_heads = 6,
                          .scale = 0.2F};
    bt_k_attention(p->cuda, &a, &base.kv, spans, 4);
    bt_k_read(p->cuda, together, base.out, n * sizeof(float));
    for (int j = 3; j >= 0; j--) {
        bt_k_attention(p->cuda, &a, &base.kv, &spans[j], 1);
    }
    bt_k_read(p->cuda, alone, base.out, n * sizeof(float));
    cp_same("a ragged batch", together, alone, n);
    seq_fini(&base);
    bt_free(cache);
    bt_free(v.q);
    bt_free(v.key);
    bt_free(v.value);
    bt_free(together);
    bt_free(alone);
}

int main(void)
{
    static const struct shape shapes[] = {
        {3, 1, 24, 1, 70, 0, BT_DTYPE_F32, 0},    {4, 4, 32, 3, 131, 0, BT_DTYPE_F16, 0},
        {9, 3, 64, 16, 100, 0, BT_DTYPE_BF16, 0}, {4, 2, 80, 64, 70, 0, BT_DTYPE_F16, 30.0F},
        {2, 1, 128, 16, 270, 0, BT_DTYPE_F32, 0}, {2, 1, 16, 16, 330, 50, BT_DTYPE_BF16, 0},
        {2, 1, 24, 3, 300, 260, BT_DTYPE_F16, 0}, {2, 2, 64, 64, 40, 1, BT_DTYPE_F32, 5.0F},
        {2, 1, 256, 5, 40, 7, BT_DTYPE_BF16, 0},  {40, 1, 16, 16, 40, 0, BT_DTYPE_F32, 0},
        {1, 1, 512, 16, 34, 0, BT_DTYPE_BF16, 0},
    };
    static const struct shape f8[] = {
        {6, 3, 64, 16, 140, 0, BT_DTYPE_F8, 0}, {2, 1, 80, 5, 70, 30, BT_DTYPE_F8, 20.0F},
        {2, 1, 16, 1, 70, 0, BT_DTYPE_F8, 0},   {5, 1, 128, 32, 100, 0, BT_DTYPE_F8, 0},
        {2, 2, 24, 16, 66, 0, BT_DTYPE_F8, 0},  {1, 1, 256, 16, 66, 0, BT_DTYPE_F8, 0},
        {1, 1, 512, 16, 66, 0, BT_DTYPE_F8, 0},
    };
    static const struct shape tiled[] = {
        {9, 3, 64, 16, 100, 0, BT_DTYPE_BF16, 0},    {4, 2, 80, 64, 70, 0, BT_DTYPE_F16, 30.0F},
        {2, 1, 16, 16, 330, 50, BT_DTYPE_BF16, 0},   {2, 1, 24, 3, 300, 260, BT_DTYPE_F16, 0},
        {2, 1, 256, 5, 90, 7, BT_DTYPE_BF16, 0},     {20, 1, 16, 16, 40, 0, BT_DTYPE_F16, 0},
        {1, 1, 512, 16, 66, 0, BT_DTYPE_BF16, 0},    {5, 1, 128, 32, 140, 0, BT_DTYPE_BF16, 0},
        {2, 1, 128, 16, 130, 1, BT_DTYPE_F16, 5.0F}, {3, 1, 20, 4, 30, 0, BT_DTYPE_F16, 0},
        {2, 2, 32, 16, 80, 0, BT_DTYPE_F32, 0},
    };
    static const struct shape infinite[] = {
        {6, 2, 64, 16, 150, 0, BT_DTYPE_BF16, 0},    {4, 2, 80, 5, 150, 30, BT_DTYPE_F16, 0},
        {2, 1, 256, 16, 150, 0, BT_DTYPE_F16, 0},    {2, 1, 512, 16, 150, 70, BT_DTYPE_BF16, 0},
        {2, 1, 24, 16, 150, 20, BT_DTYPE_F32, 3.0F},
    };
    struct cp p;

    cp_open(&p);
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        test_shape(&p, shapes[i]);
    }
    test_batch(&p);
    for (size_t i = 0; i < sizeof(infinite) / sizeof(infinite[0]); i++) {
        test_infinite(&p, infinite[i]);
    }
    cp_close(&p);
    cp_open_as(&p, "cuda-bf16");
    for (size_t i = 0; i < sizeof(tiled) / sizeof(tiled[0]); i++) {
        test_shape(&p, tiled[i]);
    }
    test_batch(&p);
    for (size_t i = 0; i < sizeof(infinite) / sizeof(infinite[0]); i++) {
        test_infinite(&p, infinite[i]);
    }
    cp_close(&p);
    for (size_t c = 0; c < 2; c++) {
        cp_open_as(&p, c == 0 ? "cuda-f32" : "cuda-bf16");
        for (size_t i = 0; i < sizeof(f8) / sizeof(f8[0]); i++) {
            test_f8(&p, f8[i]);
            if (i < 3) {
                test_shape(&p, f8[i]);
            }
        }
        cp_close(&p);
    }
    return bt_test_done();
}
