/* Whole models in the classes of cuBLAS: logits near those of the CPU backend in cpu-f32, for a prompt in one call and in chunks, and
 * then token by token. No bits are compared: these classes promise none. */

#include <dirent.h>
#include <jansson.h>
#include <stdlib.h>
#include "base/mem.h"
#include "kernels/open.h"
#include "tests/check.h"
#include "tests/model_run.h"

/* Differences as shares of the logits' root mean square: their own root mean square, and each. Where no activation is rounded,
 * rounding them to bf16 or f16 (see test_model_bf16.c), with experts, one more or less of which may be chosen, and rounding them to e4m3. */
static const struct limits {
    double rms, max;
} exact = {1e-4, 5e-4}, rounded = {0.03, 0.1}, experts = {0.15, 0.4}, codes = {0.15, 0.4};

enum { PROMPT_MAX = 1024, VOCAB_MAX = 4096, STEPS_MAX = 1 };

static double rms_of(const float *a, const float *b, size_t n)
{
    double sum = 0;

    for (size_t i = 0; i < n; i++) {
        double d = (double)a[i] - (b != NULL ? (double)b[i] : 0);
        sum += d * d;
    }
    return sqrt(sum / (double)n);
}

/* Logits after the prompt and after each of n_more tokens behind it. */
static bool run(const char *path, struct bt_kctx *k, const uint32_t *ids, uint32_t n,
                uint32_t n_more, uint32_t chunk, float *out, uint32_t *vocab)
{
    struct bt_model_run r;
    struct bt_err err = {0};

    if (bt_model_run_open(&r, path, k, &err) != BT_OK) {
        fprintf(stderr, "%s: %s\n", path, err.msg);
        CHECK(false);
        bt_model_run_close(&r);
        return false;
    }
    *vocab = bt_model_info(r.m)->vocab;
    CHECK(*vocab <= VOCAB_MAX);
    bt_model_run_pool(&r, 16, BT_DTYPE_F32, n + n_more);
    CHECK_EQ(bt_model_run_tokens(&r, ids, n, 0, chunk, out), BT_OK);
    for (uint32_t i = 0; i < n_more; i++) {
        CHECK_EQ(bt_model_run_tokens(&r, &ids[n + i], 1, n + i, 1, out + (size_t)(i + 1) * *vocab),
                 BT_OK);
    }
    bt_model_run_close_pool(&r);
    bt_model_run_close(&r);
    return true;
}

static uint32_t read_case(const json_t *c, uint32_t *ids, uint32_t *n_more)
{
    const json_t *prompt = json_object_get(c, "input_ids"), *greedy = json_object_get(c, "greedy");
    uint32_t n = (uint32_t)json_array_size(prompt), more = (uint32_t)json_array_size(greedy);

    *n_more = more < STEPS_MAX ? more : STEPS_MAX;
    CHECK(n > 0 && n + *n_more <= PROMPT_MAX);
    for (uint32_t i = 0; i < n + *n_more; i++) {
        ids[i] = (uint32_t)json_integer_value(i < n ? json_array_get(prompt, i)
                                                    : json_array_get(greedy, i - n));
    }
    return n;
}

static void check_model(const char *name, const struct limits *limit, struct bt_kctx *cpu,
                        struct bt_kctx *cuda)
{
    static float want[(STEPS_MAX + 1) * VOCAB_MAX], got[(STEPS_MAX + 1) * VOCAB_MAX];
    static const uint32_t chunks[] = {PROMPT_MAX, 11};
    const char *folder = "tests/golden/models";
    char path[256], ref_path[256];
    uint32_t ids[PROMPT_MAX], n_more, vocab = 0;
    double worst[2] = {0, 0};
    json_error_t je;

    (void)snprintf(ref_path, sizeof(ref_path), "%s/%s/reference.json", folder, name);
    (void)snprintf(path, sizeof(path), "%s/%s%s", folder, name,
                   strncmp(name, "gguf-", 5) == 0 ? "/model.gguf" : "");
    json_t *ref = json_load_file(ref_path, 0, &je);
    const json_t *c = json_array_get(json_object_get(ref, "cases"), 2);
    uint32_t n = read_case(c, ids, &n_more);
    CHECK(n > 32); /* else the library has no part in it */
    if (!run(path, cpu, ids, n, n_more, n, want, &vocab)) {
        json_decref(ref);
        return;
    }
    for (size_t i = 0; i < sizeof(chunks) / sizeof(chunks[0]); i++) {
        if (!run(path, cuda, ids, n, n_more, chunks[i], got, &vocab)) {
            break;
        }
        double unit = rms_of(want, NULL, (size_t)(n_more + 1) * vocab),
               off = rms_of(got, want, (size_t)(n_more + 1) * vocab) / unit;
        worst[0] = off <= worst[0] ? worst[0] : off; /* a NaN stays */
        for (size_t j = 0; j < (size_t)(n_more + 1) * vocab; j++) {
            double d = fabs((double)got[j] - (double)want[j]) / unit;
            worst[1] = d <= worst[1] ? worst[1] : d;
        }
    }
    printf("%-18s %3u tokens: off by %.2g in the root mean square, %.2g at most\n", name, n,
           worst[0], worst[1]);
    CHECK(worst[0] <= limit->rms);
    CHECK(worst[1] <= limit->max);
    json_decref(ref);
}

int main(void)
{
    static const struct {
        const char *numerics;
        struct {
            const char *name;
            const struct limits *limit;
        } models[16];
    } all[] = {
        {"cuda-cublas",
         {{"llama-mha-tied", &exact},
          {"qwen2", &exact},
          {"mixtral", &exact}, /* F32: nothing is rounded */
          {"llama-bf16", &rounded},
          {"llama-f16", &rounded},
          {"gguf-q8_0", &rounded},
          {"gptq4-order", &rounded},
          {"fp8-block", &rounded}}},
        {"cuda-cublas-tf32", {{"qwen3-moe", &experts}}},
        {"cuda-cublas-fp8", {{"ct-f8", &codes}, {"fp8-static", &codes}, {"fp8-block", &codes}}}};
    struct bt_err err = {0};

    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        struct bt_kctx *cpu = NULL, *cuda = NULL;
        enum bt_status st =
            bt_k_create("cuda", &(struct bt_k_opts){.numerics = all[i].numerics}, &cuda, &err);
        if (st == BT_ERR_UNSUPPORTED) {
            printf("skipped: %s\n", err.msg);
            return 77;
        }
        CHECK_EQ(st, BT_OK);
        CHECK_EQ(bt_k_create("cpu", &(struct bt_k_opts){.n_threads = 1}, &cpu, &err), BT_OK);
        for (size_t m = 0; all[i].models[m].name != NULL && cuda != NULL; m++) {
            check_model(all[i].models[m].name, all[i].models[m].limit, cpu, cuda);
        }
        bt_k_destroy(cuda);
        bt_k_destroy(cpu);
    }
    return bt_test_done();
}
