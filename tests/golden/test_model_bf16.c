/* Whole models in class cpu-bf16: BF16 weights, from files of them and from other fixtures written as BF16, with experts too. The
 * same bits for a prompt in one call and token by token, over pages of f32 and of bf16, on every instruction set; near the logits of class cpu-f32; the same
 * greedy tokens, except where the two best of them are close. With --backend cuda: in class cuda-bf16, over pages of bf16, so that
 * attention is of that class too; fewer models, for an emulated device is slow. */

#include <jansson.h>
#include <stdlib.h>
#include "kernels/open.h"
#include "model/export.h"
#include "tests/check.h"
#include "tests/model_run.h"
#include "tests/tempfile.h"

/* What rounding activations to 8 significant bits may change, as shares of the logits' root mean square: their own root mean
 * square, and each. One product is off by 0.1 % of it, at random; these models of random weights have ten to fourteen in a row,
 * and with experts one more or less of them, where two are nearly alike to the router. */
static const struct limits {
    double rms, max;
} dense = {0.03, 0.08}, experts = {0.15, 0.4};
/* Best and second best closer than that, in the same unit, may change places. */
#define MARGIN 0.05

enum { PROMPT_MAX = 1024, VOCAB_MAX = 4096, N_KCTX = 5 };

static struct bt_kctx *f32, *bf16[N_KCTX];
static uint32_t n_bf16;
static enum bt_dtype kv_dtype = BT_DTYPE_F32;

/* Leaves the program (77: skipped) where there is no device. */
static void open_cuda(void)
{
    const struct bt_k_opts o = {.numerics = "cuda-bf16"};
    struct bt_err err = {0};
    enum bt_status st = bt_k_create("cuda", &o, &bf16[0], &err);

    if (st != BT_OK) {
        fprintf(stderr, "%s\n", err.msg);
        exit(st == BT_ERR_UNSUPPORTED ? 77 : 1);
    }
    CHECK_EQ(bt_k_create_cpu(&(struct bt_k_opts){.n_threads = 1}, &f32, &err), BT_OK);
    n_bf16 = 1;
    kv_dtype = BT_DTYPE_BF16;
}

static void open_contexts(void)
{
    static const struct bt_k_opts want[N_KCTX] = {
        {.isa = "auto", .n_threads = 1, .numerics = "cpu-bf16"},
        {.isa = "auto", .n_threads = 2, .numerics = "cpu-bf16"},
        {.isa = "avx512", .n_threads = 1, .numerics = "cpu-bf16"},
        {.isa = "avx2", .n_threads = 2, .numerics = "cpu-bf16"},
        {.isa = "plain", .n_threads = 1, .numerics = "cpu-bf16"}};
    struct bt_err err;

    CHECK_EQ(bt_k_create_cpu(&(struct bt_k_opts){.n_threads = 1}, &f32, &err), BT_OK);
    for (int i = 0; i < N_KCTX; i++) {
        enum bt_status st = bt_k_create_cpu(&want[i], &bf16[n_bf16], &err);
        CHECK(st == BT_OK || st == BT_ERR_UNSUPPORTED);
        n_bf16 += st == BT_OK;
    }
}

/* The model in dir as a GGUF file with BF16 matrices. */
static bool write_bf16(const char *dir, const char *to)
{
    struct bt_model *m = NULL;
    struct bt_gguf_writer *w = NULL;
    struct bt_export *e = NULL;
    struct bt_err err = {0};
    enum bt_status st = bt_model_open(dir, &m, &err);

    st = st == BT_OK ? bt_gguf_writer_create(to, &w, &err) : st;
    st = st == BT_OK ? bt_export_create(m, BT_DTYPE_BF16, w, &e, &err) : st;
    st = st == BT_OK ? bt_gguf_writer_begin(w, &err) : st;
    st = st == BT_OK ? bt_export_data(e, f32, NULL, NULL, &err) : st;
    st = st == BT_OK ? bt_gguf_writer_finish(w, &err) : st;
    CHECK_EQ(st, BT_OK);
    if (st != BT_OK) {
        fprintf(stderr, "%s: %s\n", dir, err.msg);
    }
    bt_export_destroy(e);
    bt_gguf_writer_destroy(w);
    bt_model_destroy(m);
    return st == BT_OK;
}

/* The logits after the prompt and after each of n_more tokens that follow it, [1 + n_more, vocab]. */
static void logits_of(struct bt_model_run *r, const uint32_t *ids, uint32_t n, uint32_t n_more,
                      uint32_t chunk, enum bt_dtype kv, float *out)
{
    uint32_t vocab = bt_model_info(r->m)->vocab;

    bt_model_run_pool(r, 16, kv, n + n_more);
    CHECK_EQ(bt_model_run_tokens(r, ids, n, 0, chunk, out), BT_OK);
    for (uint32_t i = 0; i < n_more; i++) {
        CHECK_EQ(bt_model_run_tokens(r, &ids[n + i], 1, n + i, 1, out + (size_t)(i + 1) * vocab),
                 BT_OK);
    }
    bt_model_run_close_pool(r);
}

static double rms(const float *a, size_t n)
{
    double sum = 0;

    for (size_t i = 0; i < n; i++) {
        sum += (double)a[i] * (double)a[i];
    }
    return sqrt(sum / (double)n);
}

/* One step's logits in both classes. */
static void check_step(const char *name, const float *want, const float *got, uint32_t vocab,
                       double worst[2])
{
    double unit = rms(want, vocab), max = 0, sum = 0, second = -INFINITY;
    uint32_t a = bt_model_run_argmax(want, vocab), b = bt_model_run_argmax(got, vocab);

    for (uint32_t i = 0; i < vocab; i++) {
        double e = fabs((double)got[i] - (double)want[i]) / unit;
        max = e <= max ? max : e; /* a NaN stays */
        sum += e * e;
        second = i != a && (double)want[i] > second ? (double)want[i] : second;
    }
    double off = sqrt(sum / vocab), margin = ((double)want[a] - second) / unit;
    worst[0] = off <= worst[0] ? worst[0] : off;
    worst[1] = max <= worst[1] ? worst[1] : max;
    if (a != b) {
        printf("  %s: another best token, margin %.3g\n", name, margin);
        CHECK(margin < MARGIN);
    }
}

static void check_case(const char *path, const char *name, const json_t *c, float *want, float *got,
                       float *again, double worst[2])
{
    const json_t *prompt = json_object_get(c, "input_ids"), *greedy = json_object_get(c, "greedy");
    uint32_t ids[PROMPT_MAX], n = (uint32_t)json_array_size(prompt),
                              n_more = (uint32_t)json_array_size(greedy);
    struct bt_model_run r;
    struct bt_err err;

    CHECK(n > 0 && n_more > 0 && n + n_more <= PROMPT_MAX);
    for (uint32_t i = 0; i < n + n_more; i++) {
        ids[i] = (uint32_t)json_integer_value(i < n ? json_array_get(prompt, i)
                                                    : json_array_get(greedy, i - n));
    }
    CHECK_EQ(bt_model_run_open(&r, path, f32, &err), BT_OK);
    uint32_t vocab = bt_model_info(r.m)->vocab;
    size_t bytes = (size_t)(n_more + 1) * vocab * sizeof(float);
    CHECK(vocab <= VOCAB_MAX);
    logits_of(&r, ids, n, n_more, n, kv_dtype, want);
    bt_model_run_close(&r);
    for (uint32_t k = 0; k < n_bf16; k++) {
        CHECK_EQ(bt_model_run_open(&r, path, bf16[k], &err), BT_OK);
        logits_of(&r, ids, n, n_more, n, kv_dtype, k == 0 ? got : again);
        CHECK(k == 0 || memcmp(got, again, bytes) == 0);
        logits_of(&r, ids, n, n_more, k % 2 == 0 && kv_dtype == BT_DTYPE_F32 ? 1 : 7, BT_DTYPE_BF16,
                  again);
        CHECK(memcmp(got, again, bytes) == 0);
        bt_model_run_close(&r);
    }
    CHECK(memcmp(got, want, bytes) != 0); /* another class */
    for (uint32_t i = 0; i <= n_more; i++) {
        check_step(name, want + (size_t)i * vocab, got + (size_t)i * vocab, vocab, worst);
    }
}

static void check_model(const char *path, const char *name, const struct limits *limits)
{
    char ref_path[256];
    json_error_t je;
    double worst[2] = {0, 0};
    const size_t n = (size_t)64 * VOCAB_MAX;
    float *logits = bt_alloc(3 * n * sizeof(float));
    size_t i;
    json_t *c;

    (void)snprintf(ref_path, sizeof(ref_path), "tests/golden/models/%s/reference.json", name);
    json_t *ref = json_load_file(ref_path, 0, &je);
    CHECK(json_array_size(json_object_get(ref, "cases")) > 0);
    json_array_foreach(json_object_get(ref, "cases"), i, c)
    {
        check_case(path, name, c, logits, logits + n, logits + 2 * n, worst);
    }
    printf("%-12s off by %.4f in the root mean square, %.4f at most\n", name, worst[0], worst[1]);
    CHECK(worst[0] <= limits->rms);
    CHECK(worst[1] <= limits->max);
    bt_free(logits);
    json_decref(ref);
}

int main(int argc, char **argv)
{
    static const char *const written[] = {"gemma3", "mixtral", "qwen3", "phi3", "qwen3-moe"};
    static const char *const files[] = {"bf16.gguf"};
    bool cuda = argc == 3 && strcmp(argv[1], "--backend") == 0 && strcmp(argv[2], "cuda") == 0;

    CHECK(argc == 1 || cuda);
    if (cuda) {
        open_cuda();
    } else {
        open_contexts();
    }
    check_model("tests/golden/models/gguf-bf16/model.gguf", "gguf-bf16", &dense);
    check_model("tests/golden/models/llama-bf16", "llama-bf16", &dense);
    if (cuda) { /* weights in blocks are rounded too */
        check_model("tests/golden/models/gguf-q8_0/model.gguf", "gguf-q8_0", &dense);
        check_model("tests/golden/models/gguf-q4_k/model.gguf", "gguf-q4_k", &dense);
    }
    for (size_t i = 0; i < (cuda ? 2 : sizeof(written) / sizeof(written[0])); i++) {
        char dir[256];
        (void)snprintf(dir, sizeof(dir), "tests/golden/models/%s", written[i]);
        if (write_bf16(dir, bt_temp_path(files[0]))) {
            check_model(bt_temp_path(files[0]), written[i],
                        strstr(written[i], "mixtral") == NULL && strstr(written[i], "moe") == NULL
                            ? &dense
                            : &experts);
        }
    }
    for (uint32_t i = 0; i < n_bf16; i++) {
        bt_k_destroy(bf16[i]);
    }
    bt_k_destroy(f32);
    bt_temp_clean(files, 1);
    return bt_test_done();
}
