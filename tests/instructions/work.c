/* Small fixed pieces of work, one for each hot path, for counting instructions: count.py runs this under callgrind and compares.
 * Each piece is a function work_NAME that is called once. Kernels run with AVX2, which valgrind knows, on one thread. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/mem.h"
#include "engine/engine.h"
#include "engine/sampler.h"
#include "kernels/backend.h"
#include "router/openai_write.h"

#define K_DIM    1024U /* columns; rows of weights below */
#define N_DIM    256U
#define ROWS     48U
#define VOCAB    32000U
#define KV_HEADS 4U
#define HEADS    8U
#define HEAD_DIM 64U
#define PAGE     16U
#define CONTEXT  512U
#define STEPS    4
#define BATCH    8U
#define PIECES   64U

static struct bt_kctx *k, *k_bf16, *k_int8; /* classes cpu-f32, cpu-bf16, cpu-int8 */
static float *x, *y, *norm, *logits;
static struct bt_kweight *weights[BT_DTYPE_COUNT], *weights_int8[BT_DTYPE_COUNT], *weight_bf16;
static struct bt_k_kv kv, kv_f8;
static uint32_t pages[CONTEXT / PAGE];
static struct bt_sampler *sampler;
static uint32_t history[256];
static struct bt_engine *engine;
static struct bt_tokenizer *tokenizer;

_Noreturn static void die(const char *text)
{
    fprintf(stderr, "instructions_work: %s\n", text);
    exit(1);
}

static uint32_t rnd(void)
{
    static uint32_t s = 1;

    s = s * 1664525U + 1013904223U;
    return s ^ s >> 16;
}

static float *floats(size_t n)
{
    float *p = bt_alloc_aligned(64, n * sizeof(*p));

    for (size_t i = 0; p != NULL && i < n; i++) {
        p[i] = (float)(int32_t)rnd() * 0x1p-31F;
    }
    return p != NULL ? p : (die("out of memory"), p);
}

/* Bytes of blocks whose scales are small halves (or floats), so that nothing overflows. */
static struct bt_kweight *weight(struct bt_kctx *ctx, enum bt_dtype t)
{
    size_t bytes = (size_t)N_DIM * (K_DIM / bt_dtype_block_values(t)) * bt_dtype_block_bytes(t);
    uint8_t *p = bt_alloc(bytes);
    struct bt_kweight *w = NULL;
    struct bt_err err = {0};

    if (p == NULL) {
        die("out of memory");
    }
    for (size_t i = 0; i < bytes; i++) {
        p[i] = (uint8_t)(t == BT_DTYPE_F32 ? (i % 4 == 3 ? 0x3c : 0x11) : (rnd() & 0x2fU));
    }
    struct bt_k_weight_desc d = {
        .dtype = t, .n_rows = N_DIM, .n_cols = K_DIM, .data = p, .for_gemm = true}; /* p stays */
    if (bt_k_weight_create(ctx, &d, &w, &err) != BT_OK) {
        die(err.msg);
    }
    return w;
}

static void gemm(enum bt_dtype t, uint32_t rows)
{
    bt_k_gemm(k, y, N_DIM, x, K_DIM, weights[t], NULL, rows);
}

static void gemm_rounded(uint32_t rows)
{
    bt_k_gemm(k_bf16, y, N_DIM, x, K_DIM, weight_bf16, NULL, rows);
}

static void gemm_int8(enum bt_dtype t, uint32_t rows)
{
    bt_k_gemm(k_int8, y, N_DIM, x, K_DIM, weights_int8[t], NULL, rows);
}

static void attention(struct bt_kctx *ctx, const struct bt_k_kv *pool, uint32_t n)
{
    struct bt_k_span span = {.n = n, .pos = CONTEXT - n, .pages = pages};
    struct bt_k_attn a = {.q = x,
                          .out = y,
                          .q_stride = HEADS * HEAD_DIM,
                          .out_stride = HEADS * HEAD_DIM,
                          .n_heads = HEADS,
                          .scale = 0.125F};
    bt_k_attention(ctx, &a, pool, &span, 1);
}

static void sample(float temperature, uint32_t top_k, float top_p, float penalty)
{
    struct bt_sampling p = {.temperature = temperature,
                            .top_k = top_k,
                            .top_p = top_p,
                            .repetition_penalty = penalty,
                            .seed = 1,
                            .max_tokens = 1000};
    struct bt_sampler_in in = {
        .params = &p, .logits = logits, .tokens = history, .n_tokens = 256, .n_prompt = 128};
    struct bt_sampled out;

    bt_sampler_sample(sampler, &in, &out);
}

/* Every piece, in the order in which they run. */
#define WORKS(W)                                                                                   \
    W(nothing, (void)rnd()) /* the first count has everything before it */                         \
    W(gemm_f32, gemm(BT_DTYPE_F32, ROWS))                                                          \
    W(gemm_bf16, gemm(BT_DTYPE_BF16, ROWS))                                                        \
    W(gemm_q8_0, gemm(BT_DTYPE_Q8_0, ROWS))                                                        \
    W(gemm_q4_0, gemm(BT_DTYPE_Q4_0, ROWS))                                                        \
    W(gemm_q4_1, gemm(BT_DTYPE_Q4_1, ROWS))                                                        \
    W(gemm_q4_k, gemm(BT_DTYPE_Q4_K, ROWS))                                                        \
    W(gemm_q6_k, gemm(BT_DTYPE_Q6_K, ROWS))                                                        \
    W(gemv_f32, gemm(BT_DTYPE_F32, 1))                                                             \
    W(gemv_bf16, gemm(BT_DTYPE_BF16, 1))                                                           \
    W(gemv_q8_0, gemm(BT_DTYPE_Q8_0, 1))                                                           \
    W(gemv_q4_0, gemm(BT_DTYPE_Q4_0, 1))                                                           \
    W(gemv_q4_1, gemm(BT_DTYPE_Q4_1, 1))                                                           \
    W(gemv_q4_k, gemm(BT_DTYPE_Q4_K, 1))                                                           \
    W(gemv_q6_k, gemm(BT_DTYPE_Q6_K, 1))                                                           \
    W(gemm_bf16_rounded, gemm_rounded(ROWS))                                                       \
    W(gemv_bf16_rounded, gemm_rounded(1))                                                          \
    W(gemm_int8_q8_0, gemm_int8(BT_DTYPE_Q8_0, ROWS))                                              \
    W(gemm_int8_q4_0, gemm_int8(BT_DTYPE_Q4_0, ROWS))                                              \
    W(gemm_int8_q6_k, gemm_int8(BT_DTYPE_Q6_K, ROWS))                                              \
    W(gemv_int8_q8_0, gemm_int8(BT_DTYPE_Q8_0, 1))                                                 \
    W(gemv_int8_q4_0, gemm_int8(BT_DTYPE_Q4_0, 1))                                                 \
    W(attention_prompt, attention(k, &kv, 64))                                                     \
    W(attention_decode, attention(k, &kv, 1))                                                      \
    W(attention_prompt_f8, attention(k_bf16, &kv_f8, 64))                                          \
    W(attention_decode_f8, attention(k_bf16, &kv_f8, 1))                                           \
    W(rmsnorm, bt_k_rmsnorm(k, y, K_DIM, x, K_DIM, norm, 0, 1e-6F, ROWS, 1, K_DIM))                \
    W(rope, bt_k_rope(k, y, K_DIM, x, x + K_DIM, 16, K_DIM / HEAD_DIM, HEAD_DIM, HEAD_DIM, false)) \
    W(glu, bt_k_glu(k, y, K_DIM, x, K_DIM, y, K_DIM, ROWS, K_DIM, BT_K_SILU))                      \
    W(sampler_greedy, sample(0, 0, 1, 1))                                                          \
    W(sampler_top_p, sample(0.8F, 0, 0.95F, 1))                                                    \
    W(sampler_penalty, sample(0.8F, 40, 0.95F, 1.1F))                                              \
    W(engine_steps, engine_steps())                                                                \
    W(text_pieces, text_pieces())

/* ---- the two that are more than one call ---- */

/* Decode steps of a batch of a tiny model: scheduler, page accounts, sampler. */
static void engine_steps(void)
{
    for (int i = 0; i < STEPS; i++) {
        struct bt_engine_step_stats stats;
        bool worked;
        if (bt_engine_step(engine, &worked, &stats) != BT_OK || stats.n_decode_tokens != BATCH) {
            die("a step without its batch");
        }
    }
}

/* A token's text and its chunk of a stream. */
static void text_pieces(void)
{
    struct bt_openai_head h = {
        .stream = true, .id = "cmpl-0", .model = "model", .created = 1, .tok = tokenizer};
    struct bt_openai_choice c = {0};
    struct bt_detok d;
    struct bt_buf out = {0};

    bt_detok_init(&d, tokenizer, 0);
    for (uint32_t i = 0; i < PIECES; i++) {
        if (bt_detok_push(&d, 40 + i % 50, &c.text) != BT_OK) {
            die("no such token");
        }
        bt_openai_open(&out, &h);
        bt_openai_put_choice(&out, &h, &c, 0, false);
        bt_openai_close(&out, NULL, false, NULL);
        bt_openai_choice_clear(&c);
    }
    bt_openai_choice_fini(&c);
    bt_buf_fini(&out);
}

#define DEFINE(name, call)                                                                         \
    void work_##name(void);                                                                        \
    __attribute__((noinline)) void work_##name(void)                                               \
    {                                                                                              \
        call;                                                                                      \
    }
WORKS(DEFINE)

/* ---- what they need ---- */

static void prepare_engine(void)
{
    static const struct bt_sampling greedy = {
        .top_p = 1, .repetition_penalty = 1, .max_tokens = 100, .ignore_eos = true};
    struct bt_engine_opts o = {.model_path = "tests/golden/models/llama",
                               .backend = "cpu",
                               .isa = "avx2",
                               .n_threads = 1,
                               .kv_bytes = 4U << 20,
                               .page_tokens = 16,
                               .kv_dtype = BT_DTYPE_F32,
                               .chunk_tokens = 512,
                               .max_batch = BATCH,
                               .max_seqs = BATCH};
    const uint32_t prompt[] = {5, 6, 7, 8, 9, 10, 11, 12};
    struct bt_engine_req req = {
        .tokens = prompt, .n_tokens = 8, .n_prompt = 8, .sampling = &greedy};
    struct bt_engine_step_stats stats;
    struct bt_err err = {0};
    bool worked;

    if (bt_engine_create(&o, &engine, &err) != BT_OK) {
        die(err.msg);
    }
    for (uint32_t i = 0; i < BATCH; i++) {
        bt_seq_id id;
        if (bt_engine_submit(engine, &req, &id, &err) != BT_OK) {
            die(err.msg);
        }
    }
    do { /* until all decode */
        if (bt_engine_step(engine, &worked, &stats) != BT_OK) {
            die("a step failed");
        }
    } while (stats.n_decode_tokens != BATCH);
}

static void prepare(void)
{
    struct bt_err err = {0};

    x = floats((size_t)ROWS * 4 * K_DIM);
    y = floats((size_t)ROWS * 4 * K_DIM);
    norm = floats(K_DIM);
    logits = floats(VOCAB);
    for (uint32_t i = 0; i < VOCAB; i++) { /* a few likely tokens, as a model has them */
        logits[i] = 30.0F * powf(logits[i], 101.0F);
    }
    for (int t = 0; t < BT_DTYPE_COUNT; t++) {
        weights[t] = weight(k, (enum bt_dtype)t);
        weights_int8[t] = weight(k_int8, (enum bt_dtype)t);
    }
    weight_bf16 = weight(k_bf16, BT_DTYPE_BF16);
    kv = (struct bt_k_kv){.page_stride = 2UL * KV_HEADS * PAGE * HEAD_DIM * sizeof(uint16_t),
                          .page_tokens = PAGE,
                          .n_kv_heads = KV_HEADS,
                          .head_dim = HEAD_DIM,
                          .dtype = BT_DTYPE_F16};
    kv.base = bt_calloc(CONTEXT / PAGE, kv.page_stride);
    kv_f8 = kv;
    kv_f8.dtype = BT_DTYPE_F8;
    kv_f8.page_stride /= 2;
    kv_f8.base = bt_calloc(CONTEXT / PAGE, kv_f8.page_stride);
    for (uint32_t i = 0; i < CONTEXT / PAGE; i++) {
        pages[i] = i;
    }
    for (uint32_t i = 0; i < 256; i++) {
        history[i] = rnd() % VOCAB;
    }
    if (kv.base == NULL || kv_f8.base == NULL || bt_sampler_create(VOCAB, &sampler) != BT_OK ||
        bt_tokenizer_load("tests/golden/tokenizers/bytes.tokenizer.json", &tokenizer, &err) !=
            BT_OK) {
        die(err.msg[0] != 0 ? err.msg : "out of memory");
    }
    prepare_engine();
}

int main(void)
{
    struct bt_k_opts o = {.isa = "avx2", .n_threads = 1},
                     bf16 = {.isa = "avx2", .n_threads = 1, .numerics = "cpu-bf16"},
                     int8 = {.isa = "avx2", .n_threads = 1, .numerics = "cpu-int8"};
    struct bt_err err = {0};

    if (bt_k_create_cpu(&o, &k, &err) != BT_OK || bt_k_create_cpu(&bf16, &k_bf16, &err) != BT_OK ||
        bt_k_create_cpu(&int8, &k_int8, &err) != BT_OK) {
        printf("skipped: %s\n", err.msg);
        return 77;
    }
    prepare();
#define RUN(name, call) work_##name();
    WORKS(RUN)
    return 0; /* everything lives until the end */
}
