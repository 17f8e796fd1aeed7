/* Sampling on the device against engine/sampler.h: the same token and the same bits of log-probabilities, over vocabularies of odd
 * and large sizes, logits with ties, infinities and NaN, and all parameters, several rows in a call. `--large`: more of the large
 * ones, for a device; the emulated one is slow. */

#include <stdlib.h>
#include "engine/philox.h"
#include "engine/sampler.h"
#include "tests/parity/cuda_parity.h"

#define ROWS_MAX    7U
#define HISTORY_MAX 300U

static const uint32_t eos[] = {2, 5, UINT32_MAX};

/* One row and all that its parameters show. */
struct row {
    struct bt_sampling p;
    struct bt_logit_bias bias[40];
    uint32_t tokens[HISTORY_MAX], n_tokens, n_prompt;
    struct bt_k_seen seen[HISTORY_MAX];
    uint32_t n_seen;
    bool given;
    uint32_t token;
};

enum kind { UNIFORM, SHARP, STEPS, EQUAL, HOLES, NOTHING, INFINITE, ZEROS, HUGE_ONES, N_KINDS };

static float logit(enum kind kind, uint32_t id)
{
    float u = pk_uniform(0, 1), n = pk_uniform(-3, 3) + pk_uniform(-3, 3) + pk_uniform(-3, 3);

    switch (kind) {
    case UNIFORM:
        return pk_uniform(-0.1F, 0.1F);
    case SHARP:
        return pk_u32() % 200 == 0 ? n + 12.0F : n;
    case STEPS:
        return floorf(n);
    case EQUAL:
        return 1.5F;
    case HOLES:
        return u < 0.2F ? (float)NAN : u < 0.3F ? -INFINITY : n;
    case NOTHING:
        return u < 0.5F ? (float)NAN : -INFINITY;
    case INFINITE:
        return id % 31 == 30 ? INFINITY : n;
    case ZEROS:
        return u < 0.4F ? -0.0F : u < 0.8F ? 0.0F : -1e-40F;
    case HUGE_ONES:
    default:
        return n * 3e37F;
    }
}

static bool one_in(uint32_t n)
{
    return pk_u32() % n == 0;
}

static void make_history(struct row *r, uint32_t vocab)
{
    r->n_tokens = pk_u32() % HISTORY_MAX;
    r->n_prompt = r->n_tokens > 0 ? pk_u32() % r->n_tokens : 0;
    for (uint32_t i = 0; i < r->n_tokens; i++) {
        r->tokens[i] = pk_u32() % (one_in(2) && vocab > 20 ? 20 : vocab);
    }
    r->n_seen = 0;
    if (r->p.repetition_penalty == 1.0F && r->p.presence_penalty == 0.0F &&
        r->p.frequency_penalty == 0.0F) {
        return;
    }
    for (uint32_t i = 0; i < r->n_tokens; i++) {
        uint32_t at = 0;

        while (at < r->n_seen && r->seen[at].token != r->tokens[i]) {
            at++;
        }
        if (at == r->n_seen) {
            r->seen[r->n_seen++] = (struct bt_k_seen){.token = r->tokens[i]};
        }
        r->seen[at].count += i >= r->n_prompt;
    }
}

static void make_row(struct row *r, uint32_t vocab)
{
    static const float temperatures[] = {0.01F, 0.3F, 0.8F, 1.0F, 1.7F, 50.0F, 1e-42F};
    struct bt_sampling *p = &r->p;

    *p = (struct bt_sampling){.temperature = one_in(4) ? 0.0F : temperatures[pk_u32() % 7],
                              .top_p = one_in(2) ? 1.0F : pk_uniform(0.001F, 1.0F),
                              .top_k = one_in(2)   ? 0
                                       : one_in(4) ? pk_u32() % (vocab + 2)
                                                   : 1 + pk_u32() % 60,
                              .min_p = one_in(3) ? pk_uniform(0, 1) * pk_uniform(0, 1) : 0.0F,
                              .repetition_penalty = one_in(3) ? pk_uniform(0.5F, 2) : 1.0F,
                              .presence_penalty = one_in(4) ? pk_uniform(-2, 2) : 0.0F,
                              .frequency_penalty = one_in(4) ? pk_uniform(-2, 2) : 0.0F,
                              .seed = (uint64_t)pk_u32() << 32 | pk_u32(),
                              .choice = pk_u32() % 3,
                              .min_tokens = one_in(3) ? pk_u32() % HISTORY_MAX : 0,
                              .ignore_eos = one_in(3),
                              .logprobs = one_in(2),
                              .n_top = one_in(3) ? 0 : pk_u32() % (BT_LOGPROBS_MAX + 1)};
    for (; p->n_stop_ids < 5; p->n_stop_ids++) { /* some twice, some that no vocabulary has */
        p->stop_ids[p->n_stop_ids] = one_in(5) ? 1U << 30 : pk_u32() % (vocab + 1) % 30;
    }
    p->bias = r->bias;
    p->n_bias = one_in(3) ? pk_u32() % 40 : 0;
    for (uint32_t i = 0; i < p->n_bias; i++) {
        r->bias[i].token = pk_u32() % (one_in(2) && vocab > 10 ? 10 : vocab);
        r->bias[i].bias = one_in(20) ? -INFINITY : one_in(40) ? INFINITY : pk_uniform(-5, 5);
    }
    make_history(r, vocab);
    r->given = one_in(5);
    r->token = pk_u32() % vocab;
}

static void want_of(struct bt_sampler *s, const struct row *r, const float *logits,
                    struct bt_sampled *out)
{
    const struct bt_sampler_in in = {.params = &r->p,
                                     .logits = logits,
                                     .tokens = r->tokens,
                                     .n_tokens = r->n_tokens,
                                     .n_prompt = r->n_prompt,
                                     .eos = eos,
                                     .n_eos = 3};

    if (r->given) {
        bt_sampler_logprobs(s, logits, r->token, r->p.n_top, out);
    } else {
        bt_sampler_sample(s, &in, out);
    }
}

static struct bt_k_draw draw_of(const struct row *r, uint32_t row)
{
    const uint32_t index = r->n_tokens - r->n_prompt;

    return (struct bt_k_draw){.row = row,
                              .given = r->given,
                              .token = r->token,
                              .params = &r->p,
                              .random = bt_philox_bits(r->p.seed, r->p.choice, index),
                              .seen = r->seen,
                              .n_seen = r->n_seen,
                              .masked = index < r->p.min_tokens,
                              .eos = eos,
                              .n_eos = 3};
}

static void check_same(const struct row *r, uint32_t vocab, enum kind kind,
                       const struct bt_sampled *got, const struct bt_sampled *want)
{
    const struct bt_sampling *p = &r->p;

    bt_test_checks++;
    if (memcmp(got, want, sizeof(*got)) == 0) {
        return;
    }
    bt_test_failures++;
    fprintf(stderr,
            "vocabulary %u, logits %d%s: token %u (%a), not %u (%a), top %u: %u (%a), not %u: %u "
            "(%a); temperature %g, top_k %u, top_p %g, min_p %g, penalties %g %g %g of %u, %u "
            "biases, min_tokens %u\n",
            vocab, (int)kind, r->given ? ", given" : "", got->token, (double)got->logprob,
            want->token, (double)want->logprob, got->n_top, got->top[0].token,
            (double)got->top[0].logprob, want->n_top, want->top[0].token,
            (double)want->top[0].logprob, (double)p->temperature, p->top_k, (double)p->top_p,
            (double)p->min_p, (double)p->repetition_penalty, (double)p->presence_penalty,
            (double)p->frequency_penalty, r->n_seen, p->n_bias, p->min_tokens);
}

/* Calls of 1 … ROWS_MAX rows, in another order than the logits lie. */
static void check_vocab(uint32_t vocab, uint32_t n_calls)
{
    struct bt_k_opts o = {0};
    struct bt_kctx *k = NULL;
    struct bt_sampler *s = NULL;
    struct row *rows = bt_calloc(ROWS_MAX, sizeof(*rows));
    float *logits = bt_alloc((size_t)ROWS_MAX * vocab * sizeof(float));
    struct bt_k_draw draws[ROWS_MAX];
    const size_t bytes = (size_t)ROWS_MAX * vocab * sizeof(float);

    CHECK(rows != NULL && logits != NULL);
    CHECK_EQ(bt_k_create("cuda", &o, &k, NULL), BT_OK); /* room is made once */
    CHECK_EQ(bt_sampler_create(vocab, &s), BT_OK);
    CHECK_EQ(bt_k_sample_reserve(k, ROWS_MAX, vocab), BT_OK);
    float *dev = bt_k_alloc(k, bytes);

    CHECK(dev != NULL);
    for (uint32_t call = 0; call < n_calls; call++) {
        const uint32_t n = 1 + pk_u32() % ROWS_MAX, first = pk_u32() % ROWS_MAX;
        enum kind kinds[ROWS_MAX];

        for (uint32_t i = 0; i < ROWS_MAX; i++) {
            kinds[i] = one_in(2) ? SHARP : (enum kind)(pk_u32() % N_KINDS);
            for (uint32_t id = 0; id < vocab; id++) {
                logits[(size_t)i * vocab + id] = logit(kinds[i], id);
            }
        }
        bt_k_write(k, dev, logits, bytes);
        for (uint32_t i = 0; i < n; i++) {
            make_row(&rows[i], vocab);
            draws[i] = draw_of(&rows[i], (first + 3 * i) % ROWS_MAX);
        }
        bt_k_sample(k, dev, draws, n);
        CHECK_EQ(bt_k_sync(k), BT_OK);
        for (uint32_t i = 0; i < n; i++) {
            struct bt_sampled want;

            want_of(s, &rows[i], logits + (size_t)draws[i].row * vocab, &want);
            check_same(&rows[i], vocab, kinds[draws[i].row], &bt_k_sampled(k)[i], &want);
        }
    }
    bt_k_free(k, dev, bytes);
    bt_sampler_destroy(s);
    bt_k_destroy(k);
    bt_free(rows);
    bt_free(logits);
    printf("vocabulary %u done\n", vocab);
}

/* The longest lists that a row may have. */
static void check_limits(void)
{
    static struct bt_k_seen seen[BT_K_SEEN_MAX];
    static struct bt_logit_bias bias[BT_LOGIT_BIAS_MAX];
    static uint32_t tokens[BT_K_SEEN_MAX];
    const uint32_t vocab = BT_K_SEEN_MAX + 100;
    struct bt_sampling p = {.temperature = 0.7F,
                            .top_p = 0.95F,
                            .repetition_penalty = 1.3F,
                            .n_bias = BT_LOGIT_BIAS_MAX,
                            .bias = bias,
                            .min_tokens = 10,
                            .logprobs = true,
                            .n_top = BT_LOGPROBS_MAX,
                            .n_stop_ids = BT_STOP_IDS_MAX};
    struct bt_k_opts o = {0};
    struct bt_kctx *k = NULL;
    struct bt_sampler *s = NULL;
    float *logits = pk_floats(vocab, -4, 4);
    struct bt_sampled want;

    for (uint32_t i = 0; i < BT_K_SEEN_MAX; i++) {
        tokens[i] = seen[i].token = vocab - 1 - i;
    }
    for (uint32_t i = 0; i < BT_LOGIT_BIAS_MAX; i++) {
        bias[i] = (struct bt_logit_bias){.token = i * 37 % 997, .bias = (float)i * 0.001F};
    }
    for (uint32_t i = 0; i < BT_STOP_IDS_MAX; i++) {
        p.stop_ids[i] = i * 7;
    }
    CHECK_EQ(bt_k_create("cuda", &o, &k, NULL), BT_OK);
    CHECK_EQ(bt_sampler_create(vocab, &s), BT_OK);
    CHECK_EQ(bt_k_sample_reserve(k, 1, vocab), BT_OK);
    float *dev = cp_floats(k, logits, vocab);
    const struct bt_sampler_in in = {.params = &p,
                                     .logits = logits,
                                     .tokens = tokens,
                                     .n_tokens = BT_K_SEEN_MAX,
                                     .n_prompt = BT_K_SEEN_MAX};
    const struct bt_k_draw draw = {.params = &p,
                                   .random = bt_philox_bits(0, 0, 0),
                                   .seen = seen,
                                   .n_seen = BT_K_SEEN_MAX,
                                   .masked = true};

    bt_k_sample(k, dev, &draw, 1);
    CHECK_EQ(bt_k_sync(k), BT_OK);
    bt_sampler_sample(s, &in, &want);
    CHECK(memcmp(&bt_k_sampled(k)[0], &want, sizeof(want)) == 0);
    bt_k_free(k, dev, vocab * sizeof(float));
    bt_sampler_destroy(s);
    bt_k_destroy(k);
    bt_free(logits);
}

/* What the host does instead. */
static void check_refused(const struct cp *cp)
{
    CHECK_EQ(bt_k_sample_reserve(cp->cpu, 1, 100), BT_ERR_UNSUPPORTED);
    CHECK_EQ(bt_k_sample_reserve(cp->cuda, 1, (1U << 20) + 1), BT_ERR_UNSUPPORTED);
    CHECK_EQ(bt_k_sample_reserve(cp->cuda, 1U << 16, 100), BT_ERR_UNSUPPORTED);
}

int main(int argc, char **argv)
{
    static const struct {
        uint32_t vocab, n_calls;
    } small[] = {{1, 40}, {7, 30}, {97, 25}, {1000, 40}, {4096, 12}, {4097, 12}, {12289, 10}};
    static const uint32_t large[] = {32000, 128256, 151936, 262144, 1U << 20};
    const bool all = argc > 1 && strcmp(argv[1], "--large") == 0;
    struct cp cp;

    cp_open(&cp);
    check_refused(&cp);
    for (size_t i = 0; i < sizeof(small) / sizeof(small[0]); i++) {
        check_vocab(small[i].vocab, small[i].n_calls * (all ? 10 : 1));
    }
    for (size_t i = 0; all && i < sizeof(large) / sizeof(large[0]); i++) {
        check_vocab(large[i], 40);
    }
    if (!all) {
        check_vocab(131077, 1);
    }
    check_limits();
    cp_close(&cp);
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
