/* The sampler: known answers of the generator, own exp and log against libm, every parameter alone,
 * distributions, determinism, log-probabilities. */

#include "engine/sampler.h"

#include <stdlib.h>
#include "base/mem.h"
#include "base/sample_math.h"
#include "engine/philox.h"
#include "tests/check.h"

#define VOCAB 64

static struct bt_sampler *sampler;
static float logits[VOCAB];
static uint32_t history[32];

static struct bt_sampling params(void)
{
    return (struct bt_sampling){.temperature = 1.0F,
                                .top_p = 1.0F,
                                .repetition_penalty = 1.0F,
                                .max_tokens = 100,
                                .seed = 1};
}

static struct bt_sampler_in input(const struct bt_sampling *p, uint32_t n_prompt, uint32_t n_tokens)
{
    static const uint32_t eos[] = {2};

    return (struct bt_sampler_in){.params = p,
                                  .logits = logits,
                                  .tokens = history,
                                  .n_tokens = n_tokens,
                                  .n_prompt = n_prompt,
                                  .eos = eos,
                                  .n_eos = 1};
}

static uint32_t sample(const struct bt_sampling *p, uint32_t n_prompt, uint32_t n_tokens)
{
    struct bt_sampler_in in = input(p, n_prompt, n_tokens);
    struct bt_sampled out;

    bt_sampler_sample(sampler, &in, &out);
    CHECK(out.token < VOCAB);
    return out.token;
}

static void set_logits(float v)
{
    for (uint32_t i = 0; i < VOCAB; i++) {
        logits[i] = v;
    }
}

/* Samples n times under different seeds into counts. */
static void histogram(struct bt_sampling p, uint32_t n, uint32_t counts[VOCAB])
{
    memset(counts, 0, VOCAB * sizeof(*counts));
    for (uint32_t i = 0; i < n; i++) {
        p.seed = i;
        counts[sample(&p, 1, 1)]++;
    }
}

/* Pearson's statistic against probabilities; categories expected under 5 times are joined. */
static double chi2(const uint32_t counts[VOCAB], const double prob[VOCAB], uint32_t n,
                   uint32_t *dof)
{
    double sum = 0, rest_e = 0, rest_c = 0;

    *dof = 0;
    for (uint32_t i = 0; i < VOCAB; i++) {
        double e = prob[i] * n;

        if (e < 5.0) {
            rest_e += e;
            rest_c += counts[i];
            continue;
        }
        sum += (counts[i] - e) * (counts[i] - e) / e;
        ++*dof;
    }
    if (rest_e > 1.0) {
        sum += (rest_c - rest_e) * (rest_c - rest_e) / rest_e;
        ++*dof;
    }
    --*dof;
    return sum;
}

/* Expected probabilities by the definition, slowly: temperature, top-k, top-p, min-p. */
static void expect(const struct bt_sampling *p, double prob[VOCAB])
{
    uint32_t order[VOCAB];
    double total = 0, cum = 0, kept = 0;
    uint32_t k = p->top_k > 0 && p->top_k < VOCAB ? p->top_k : VOCAB;

    for (uint32_t i = 0; i < VOCAB; i++) {
        uint32_t at = i;

        for (; at > 0 && logits[order[at - 1]] < logits[i]; at--) {
            order[at] = order[at - 1];
        }
        order[at] = i;
    }
    for (uint32_t i = 0; i < VOCAB; i++) {
        prob[order[i]] =
            i < k ? exp((double)(logits[order[i]] - logits[order[0]]) / (double)p->temperature)
                  : 0.0;
        total += prob[order[i]];
    }
    for (uint32_t i = 0; i < VOCAB; i++) {
        bool in = i == 0 || (cum < (double)p->top_p * total && prob[order[i]] >= (double)p->min_p);

        cum += prob[order[i]];
        prob[order[i]] = in ? prob[order[i]] : 0.0;
        kept += prob[order[i]];
    }
    for (uint32_t i = 0; i < VOCAB; i++) {
        prob[i] /= kept;
    }
}

static void check_distribution(struct bt_sampling p)
{
    uint32_t counts[VOCAB], dof;
    double prob[VOCAB];
    const uint32_t n = 20000;

    histogram(p, n, counts);
    expect(&p, prob);
    for (uint32_t i = 0; i < VOCAB; i++) {
        CHECK(prob[i] > 0.0 || counts[i] == 0);
    }
    double x = chi2(counts, prob, n, &dof);

    /* Far beyond the 0.1 % point; seeds are fixed, so this does not flicker. */
    if (!(x <= dof + 4.0 * sqrt(2.0 * dof) + 4.0)) {
        fprintf(stderr, "chi2 %g with %u degrees of freedom\n", x, dof);
        CHECK(false);
    }
}

static void test_philox_known_answers(void)
{
    static const struct {
        uint32_t counter[4], key[2], want[4];
    } kat[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };

    for (size_t i = 0; i < sizeof(kat) / sizeof(kat[0]); i++) {
        uint32_t out[4];

        bt_philox4x32(kat[i].counter, kat[i].key, out);
        CHECK(memcmp(out, kat[i].want, sizeof(out)) == 0);
    }
    CHECK(bt_philox_bits(1, 0, 0) != bt_philox_bits(1, 1, 0));
    CHECK(bt_philox_bits(1, 0, 0) != bt_philox_bits(1, 0, 1));
    CHECK(bt_philox_bits(1, 0, 0) != bt_philox_bits(UINT64_C(1) << 32 | 1, 0, 0));
}

static void test_exact_math(void)
{
    for (int i = 0; i < 100000; i++) {
        double x = -700.0 * i / 100000.0, y = 1.0 + i * 3.7;

        CHECK(fabs(bt_exact_exp(x) - exp(x)) <= 4e-16 * exp(x));
        CHECK(fabs(bt_exact_log(y) - log(y)) <= 4e-16 * fmax(log(y), 0.1));
    }
    CHECK(bt_exact_exp(0.0) == 1.0);
    CHECK(bt_exact_log(1.0) == 0.0);
    CHECK(bt_exact_exp(-INFINITY) == 0.0 && bt_exact_exp((double)NAN) == 0.0);
    CHECK_NEAR(bt_exact_log(1e-300), log(1e-300), 1e-12);
}

static void test_units(void)
{
    const uint64_t all53 = (UINT64_C(1) << 53) - 1;

    CHECK_EQ(bt_sample_point(1), 46);
    CHECK_EQ(bt_sample_point(1U << 17), 46);
    CHECK_EQ(bt_sample_point((1U << 17) + 1), 45);
    CHECK_EQ(bt_sample_point(1U << 23), 40);
    CHECK_EQ(bt_sample_point(UINT32_MAX), 31);
    CHECK(bt_sample_weight(3.0F, 3.0F, 0.5, 46) == UINT64_C(1) << 46);
    CHECK(bt_sample_weight(-0.0F, 0.0F, 1e30, 46) == UINT64_C(1) << 46);
    CHECK(bt_sample_weight(2.0F, 3.0F, 1.0, 30) == 395007542); /* 2^30 / e = 395007542.3 */
    CHECK(bt_sample_weight(-40.0F, 0.0F, 1.0, 46) == 0);
    CHECK(bt_sample_weight(-INFINITY, -INFINITY, 1.0, 46) == 0);
    CHECK(bt_sample_weight(INFINITY, INFINITY, 1.0, 46) == 0);
    CHECK(bt_sample_weight(1.0F, INFINITY, 1.0, 46) == 0);
    CHECK(bt_sample_share(0.5F, 9) == 5 && bt_sample_share(0.5F, 10) == 5);
    CHECK(bt_sample_share(1.0F, UINT64_C(1) << 63) == UINT64_C(1) << 63);
    CHECK(bt_sample_share(1e-30F, 1) == 1 && bt_sample_share(0.5F, 0) == 0);
    CHECK(bt_sample_target(0, 1) == 0 && bt_sample_target(all53, 1) == 0);
    CHECK(bt_sample_target(UINT64_C(1) << 52, 1000) == 500);
    for (uint32_t i = 0; i < 20000; i++) {
        uint64_t r = bt_philox_bits(1, 2, i), n = (bt_philox_bits(1, 3, i) << 10) + i + 1;

        n >>= i % 60;
        n += n == 0;
        CHECK(bt_sample_target(r, n) == (uint64_t)((unsigned __int128)r * n >> 53));
        CHECK(bt_sample_target(all53, n) < n);
    }
}

static void test_greedy(void)
{
    struct bt_sampling p = params();

    p.temperature = 0.0F;
    set_logits(1.0F);
    CHECK_EQ(sample(&p, 1, 1), 0); /* all equal: the lowest id */
    logits[9] = logits[7] = 5.0F;
    CHECK_EQ(sample(&p, 1, 1), 7);
    logits[3] = NAN;
    CHECK_EQ(sample(&p, 1, 1), 7);
    set_logits(NAN);
    CHECK_EQ(sample(&p, 1, 1), 0);
    p.temperature = 1.0F;
    CHECK_EQ(sample(&p, 1, 1), 0);
    p.top_p = 0.5F;
    CHECK_EQ(sample(&p, 1, 1), 0);
    p.top_k = 3;
    CHECK_EQ(sample(&p, 1, 1), 0);
}

static void test_bias_and_masks(void)
{
    struct bt_sampling p = params();
    struct bt_logit_bias bias[] = {{5, 100.0F}, {6, -100.0F}};

    p.temperature = 0.0F;
    set_logits(0.0F);
    logits[6] = 10.0F;
    p.n_bias = 2;
    p.bias = bias;
    CHECK_EQ(sample(&p, 1, 1), 5);
    p.n_bias = 0;
    CHECK_EQ(sample(&p, 1, 1), 6);
    /* min_tokens masks EOS (2) and the stop ids up to that index. */
    set_logits(0.0F);
    logits[2] = 9.0F;
    logits[8] = 8.0F;
    logits[4] = 7.0F;
    p.min_tokens = 3;
    p.n_stop_ids = 2;
    p.stop_ids[0] = 8;
    p.stop_ids[1] = 100000; /* no such token: nothing to mask */
    CHECK_EQ(sample(&p, 1, 1), 4);
    CHECK_EQ(sample(&p, 1, 3), 4);
    CHECK_EQ(sample(&p, 1, 4), 2);
    p.ignore_eos = true;
    CHECK_EQ(sample(&p, 1, 1), 2);
}

static void test_penalties(void)
{
    struct bt_sampling p = params();

    p.temperature = 0.0F;
    set_logits(-5.0F);
    logits[10] = 4.0F;
    logits[11] = 3.0F;
    history[0] = 10;
    history[1] = 10;
    p.repetition_penalty = 1.3F; /* 4 / 1.3 > 3, once although the token stands there twice */
    CHECK_EQ(sample(&p, 2, 2), 10);
    p.repetition_penalty = 1.4F;
    CHECK_EQ(sample(&p, 2, 2), 11);
    set_logits(-3.0F);
    logits[10] = -2.0F;
    p.repetition_penalty = 1.4F; /* negative: multiplied, -2.8 */
    CHECK_EQ(sample(&p, 2, 2), 10);
    p.repetition_penalty = 1.6F;
    CHECK_EQ(sample(&p, 2, 2), 0);
    /* Presence and frequency look at the answer only. */
    p.repetition_penalty = 1.0F;
    set_logits(0.0F);
    logits[10] = 4.0F;
    logits[11] = 3.0F;
    p.presence_penalty = 1.5F;
    CHECK_EQ(sample(&p, 2, 2), 10);
    CHECK_EQ(sample(&p, 1, 2), 11);
    p.presence_penalty = 0.0F;
    p.frequency_penalty = 0.6F;
    CHECK_EQ(sample(&p, 1, 2), 10); /* once: 3.4 */
    CHECK_EQ(sample(&p, 0, 2), 11); /* twice: 2.8 */
    p.frequency_penalty = 0.0F;
    p.presence_penalty = 0.9F;
    CHECK_EQ(sample(&p, 0, 2), 10); /* not per occurrence */
}

static void test_distributions(void)
{
    struct bt_sampling p = params();
    uint32_t counts[VOCAB];

    for (uint32_t i = 0; i < VOCAB; i++) {
        logits[i] = 3.0F * (float)sin(0.7 * i * i);
    }
    check_distribution(p);
    p.temperature = 0.5F;
    check_distribution(p);
    p.temperature = 2.0F;
    check_distribution(p);
    p.top_k = 7;
    check_distribution(p);
    p.top_p = 0.6F;
    check_distribution(p);
    p.top_k = 0;
    check_distribution(p);
    p.min_p = 0.5F;
    check_distribution(p);
    p.top_p = 1.0F;
    check_distribution(p);
    p.top_k = 20;
    check_distribution(p);
    p.top_k = 1;
    histogram(p, 100, counts);
    p.temperature = 0.0F;
    CHECK_EQ(counts[sample(&p, 1, 1)], 100);
    /* The lower id first, where ties decide who stays. */
    p = params();
    set_logits(0.0F);
    p.top_k = 3;
    histogram(p, 300, counts);
    CHECK_EQ(counts[0] + counts[1] + counts[2], 300);
    p.top_k = 0;
    p.top_p = 2.5F / VOCAB;
    histogram(p, 300, counts);
    CHECK_EQ(counts[0] + counts[1] + counts[2], 300);
    /* Token indexes and choices are as independent as seeds. */
    p = params();
    memset(counts, 0, sizeof(counts));
    for (uint32_t i = 0; i < 1000; i++) {
        p.choice = i;
        counts[sample(&p, 1, 1)]++;
    }
    for (uint32_t i = 0; i < VOCAB; i++) {
        CHECK(counts[i] < 45);
    }
}

static void test_determinism(void)
{
    struct bt_sampling p = params();
    struct bt_sampler *other = NULL;
    uint64_t hash = 0;

    for (uint32_t i = 0; i < VOCAB; i++) {
        logits[i] = (float)((i * 2654435761U) >> 20) / 1024.0F;
    }
    CHECK_EQ(bt_sampler_create(VOCAB, &other), BT_OK);
    p.logprobs = true;
    p.n_top = 5;
    p.frequency_penalty = 0.3F;
    for (uint32_t i = 0; i < 400; i++) {
        p.seed = i * 77;
        p.top_k = i % 3 == 0 ? 10 : 0;
        p.top_p = i % 2 == 0 ? 0.9F : 1.0F;
        struct bt_sampler_in in = input(&p, 1, 1 + i % 30);
        struct bt_sampled a, b;

        bt_sampler_sample(sampler, &in, &a);
        bt_sampler_sample(other, &in, &b);
        CHECK(memcmp(&a, &b, sizeof(a)) == 0);
        uint32_t bits;

        memcpy(&bits, &a.logprob, sizeof(bits));
        hash = (hash ^ a.token ^ (uint64_t)bits << 20) * UINT64_C(0x9E3779B97F4A7C15);
    }
    /* The same on every machine, compiler and build type. */
    CHECK(hash == UINT64_C(0xaa840f32c95d85af));
    bt_sampler_destroy(other);
}

static void test_logprobs(void)
{
    struct bt_sampling p = params();
    struct bt_logit_bias bias[] = {{40, 50.0F}};
    struct bt_sampled out;
    double sum = 0;

    for (uint32_t i = 0; i < VOCAB; i++) {
        logits[i] = 2.0F * (float)cos(1.3 * i);
        sum += exp((double)logits[i]);
    }
    logits[7] = logits[3]; /* a tie */
    sum = 0;
    for (uint32_t i = 0; i < VOCAB; i++) {
        sum += exp((double)logits[i]);
    }
    p.temperature = 0.0F;
    p.logprobs = true;
    p.n_top = BT_LOGPROBS_MAX;
    p.n_bias = 1;
    p.bias = bias;
    struct bt_sampler_in in = input(&p, 1, 1);

    bt_sampler_sample(sampler, &in, &out);
    CHECK_EQ(out.token, 40);
    CHECK_NEAR(out.logprob, (double)logits[40] - log(sum),
               1e-6); /* of the raw logits, whatever the bias */
    CHECK_EQ(out.n_top, BT_LOGPROBS_MAX);
    for (uint32_t i = 0; i < out.n_top; i++) {
        CHECK_NEAR(out.top[i].logprob, (double)logits[out.top[i].token] - log(sum), 1e-6);
        CHECK(i == 0 || out.top[i].logprob < out.top[i - 1].logprob ||
              (out.top[i].logprob == out.top[i - 1].logprob &&
               out.top[i].token > out.top[i - 1].token));
    }
    bt_sampler_logprobs(sampler, logits, 5, 0, &out);
    CHECK_EQ(out.token, 5);
    CHECK_EQ(out.n_top, 0);
    CHECK_NEAR(out.logprob, (double)logits[5] - log(sum), 1e-6);
    set_logits(NAN);
    bt_sampler_logprobs(sampler, logits, 5, 2, &out);
    CHECK(out.logprob == -INFINITY);
}

static void test_out_of_memory(void)
{
    size_t before = bt_test_live_bytes();
    bool fired = true;

    for (uint64_t nth = 0; fired; nth++) {
        struct bt_sampler *s = NULL;

        bt_test_fail_alloc(nth);
        enum bt_status st = bt_sampler_create(8, &s);

        fired = bt_test_fail_alloc_off();
        CHECK_EQ(st, fired ? BT_ERR_NOMEM : BT_OK);
        bt_sampler_destroy(s);
        CHECK_EQ(bt_test_live_bytes(), before);
    }
}

int main(void)
{
    CHECK_EQ(bt_sampler_create(VOCAB, &sampler), BT_OK);
    test_philox_known_answers();
    test_exact_math();
    test_units();
    test_greedy();
    test_bias_and_masks();
    test_penalties();
    test_distributions();
    test_determinism();
    test_logprobs();
    test_out_of_memory();
    bt_sampler_destroy(sampler);
    return bt_test_done();
}
