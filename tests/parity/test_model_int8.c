/* Whole models in class cpu-int8. A model for each block type, dense and with experts: its logits against those of its
 * dequantised values in plain C and class cpu-f32, within what 8-bit activations cost; and the same bits for one prompt of 512
 * tokens and for 512 steps of one, with one thread and with several, on every instruction set. The committed fixtures: against the
 * logits of an independent implementation. */

#include <dirent.h>
#include <jansson.h>
#include "tests/model_run.h"
#include "tests/parity/made_model.h"

/* What rounding activations may change, as shares of the logits' root mean square: their root mean square, and each. A product
 * of many values is off by some 0.5 %: a step of 1/127 of the largest of 32, at random; the models here have ten to fourteen
 * products in a row. */
#define RMS_LIMIT 0.03
#define MAX_LIMIT 0.12

enum { N_TOKENS = 512, PAGE = 16, GOLDEN_MAX = 288 };

/* Where logits are looked at; plain C takes long and sees the first N_PLAIN tokens only. */
static const uint32_t out_rows[] = {0, 1, 31, 32, 70, 510, 511};
enum { N_OUT = sizeof(out_rows) / sizeof(out_rows[0]), N_PLAIN = 71, N_OUT_PLAIN = 5 };

static uint32_t tokens[N_TOKENS];

static bool open_run(struct bt_model_run *r, const char *path, struct bt_kctx *k, enum bt_dtype kv,
                     uint32_t n)
{
    struct bt_err err = {0};
    enum bt_status st = bt_model_run_open(r, path, k, &err);

    CHECK_EQ(st, BT_OK);
    if (st != BT_OK) {
        fprintf(stderr, "%s: %s\n", path, err.msg);
        bt_model_run_close(r);
        return false;
    }
    bt_model_run_pool(r, PAGE, kv, n);
    return true;
}

/* The first n tokens in one call: logits [n_out, vocab]. */
static void one_prompt(struct bt_model_run *r, uint32_t n, uint32_t n_out, float *logits)
{
    struct bt_model_span span = {.n = n};
    struct bt_model_batch b = {.n_tokens = n,
                               .tokens = tokens,
                               .n_spans = 1,
                               .spans = &span,
                               .n_out = n_out,
                               .out_rows = out_rows,
                               .logits = logits};

    bt_model_run_trim(r, 0);
    for (uint32_t g = 0; g < BT_MODEL_KV_GROUPS_MAX; g++) {
        span.pages[g] = r->pages[g];
    }
    CHECK_EQ(bt_model_forward(r->m, r->ws, &r->kv, &b), BT_OK);
}

/* One token in a call. */
static void one_by_one(struct bt_model_run *r, uint32_t n, float *logits)
{
    float last[MADE_VOCAB];
    uint32_t at = 0;

    for (uint32_t i = 0; i < n; i++) {
        CHECK_EQ(bt_model_run_tokens(r, &tokens[i], 1, i, 1, last), BT_OK);
        if (out_rows[at] == i) {
            memcpy(logits + (size_t)at++ * MADE_VOCAB, last, sizeof(last));
        }
    }
}

struct difference {
    double rms, max; /* as shares of the root mean square of what is wanted */
};

static struct difference compare(const float *got, const double *want, size_t n)
{
    double sum = 0, square = 0, max = 0;

    for (size_t i = 0; i < n; i++) {
        double e = fabs((double)got[i] - want[i]);
        sum += e * e;
        square += want[i] * want[i];
        max = e <= max ? max : e; /* a NaN stays */
    }
    return (struct difference){sqrt(sum / square), max / sqrt(square / (double)n)};
}

static void check_near(const char *what, const float *got, const double *want, size_t n,
                       double room)
{
    struct difference d = compare(got, want, n);

    printf("%-16s off by %.4f in the root mean square, %.4f at most\n", what, d.rms, d.max);
    CHECK(d.rms <= room * RMS_LIMIT);
    CHECK(d.max <= room * MAX_LIMIT);
}

static void check_type(const struct pk *p, struct bt_kctx *f32, enum bt_dtype t, bool experts)
{
    static float want[N_OUT * MADE_VOCAB], got[N_OUT * MADE_VOCAB];
    static double exact[N_OUT_PLAIN * MADE_VOCAB];
    struct bt_model_run r;
    char what[64];

    (void)snprintf(what, sizeof(what), "%s%s", bt_dtype_name(t), experts ? ", experts" : "");
    if (open_run(&r, made_write("values.gguf", t, experts, f32), f32, BT_DTYPE_F32, N_TOKENS)) {
        one_prompt(&r, N_PLAIN, N_OUT_PLAIN, got);
        bt_model_run_close(&r);
    }
    for (size_t i = 0; i < N_OUT_PLAIN * MADE_VOCAB; i++) {
        exact[i] = (double)got[i];
    }
    const char *path = made_write("blocks.gguf", t, experts, NULL);
    for (int i = p->n - 1; i >= 0; i--) { /* plain C comes last */
        bool plain = strncmp(p->isa[i], "plain", 5) == 0;
        uint32_t n = plain ? N_PLAIN : N_TOKENS, n_out = plain ? N_OUT_PLAIN : N_OUT;
        const enum bt_dtype kv = i % 2 == 0 ? BT_DTYPE_F32 : BT_DTYPE_BF16; /* the same bits */
        if (!open_run(&r, path, p->k[i], kv, N_TOKENS)) {
            return;
        }
        one_prompt(&r, n, n_out, i == p->n - 1 ? want : got);
        CHECK(i == p->n - 1 || pk_same(what, p, i, got, want, (size_t)n_out * MADE_VOCAB));
        if (p->threads[i] == 1 ||
            t == BT_DTYPE_Q4_1) { /* threads that meet at each step take long */
            one_by_one(&r, n, got);
            pk_same(what, p, i, got, want, (size_t)n_out * MADE_VOCAB);
        }
        bt_model_run_close(&r);
    }
    check_near(what, want, exact, N_OUT_PLAIN * MADE_VOCAB, 1);
}

static void check_case(struct bt_model_run *r, const json_t *c, const char *name)
{
    static float logits[GOLDEN_MAX], again[GOLDEN_MAX];
    double want[GOLDEN_MAX];
    uint32_t ids[N_TOKENS], vocab = bt_model_info(r->m)->vocab;
    const json_t *list = json_object_get(c, "input_ids"), *ref = json_object_get(c, "logits");
    uint32_t n = (uint32_t)json_array_size(list);

    CHECK(n <= N_TOKENS && vocab <= GOLDEN_MAX && json_array_size(ref) == vocab);
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = (uint32_t)json_integer_value(json_array_get(list, i));
    }
    for (uint32_t i = 0; i < vocab; i++) {
        want[i] = json_number_value(json_array_get(ref, i));
    }
    CHECK_EQ(bt_model_run_tokens(r, ids, n, 0, n, logits), BT_OK);
    CHECK_EQ(bt_model_run_tokens(r, ids, n, 0, 1, again), BT_OK);
    CHECK(memcmp(logits, again, vocab * sizeof(float)) == 0);
    check_near(name, logits, want, vocab,
               2); /* one row: the rows of one model differ by five times */
}

/* Fixtures with block-quantised weights, from files and from quantised directories. */
static void check_fixtures(struct bt_kctx *k)
{
    static const char *const names[] = {"gguf-q4_0", "gguf-q4_1", "gguf-q8_0",   "gguf-q4_k",
                                        "gguf-q6_k", "awq4",      "gptq4-order", "gptq8-row",
                                        "ct-int8",   "ct-pack4"};
    char path[256];
    json_error_t je;

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        struct bt_model_run r;
        size_t at;
        json_t *c;
        (void)snprintf(path, sizeof(path), "tests/golden/models/%s/reference.json", names[i]);
        json_t *ref = json_load_file(path, 0, &je);
        (void)snprintf(path, sizeof(path), "tests/golden/models/%s%s", names[i],
                       strncmp(names[i], "gguf", 4) == 0 ? "/model.gguf" : "");
        CHECK(json_array_size(json_object_get(ref, "cases")) > 0);
        if (open_run(&r, path, k, BT_DTYPE_BF16, N_TOKENS)) {
            json_array_foreach(json_object_get(ref, "cases"), at, c)
            {
                check_case(&r, c, names[i]);
            }
            bt_model_run_close(&r);
        }
        json_decref(ref);
    }
}

int main(void)
{
    static const char *const files[] = {"values.gguf", "blocks.gguf"};
    struct pk p;
    struct bt_kctx *f32 = NULL;
    struct bt_k_opts plain = {.isa = "plain", .n_threads = 2};

    pk_open_as(&p, "cpu-int8");
    CHECK_EQ(bt_k_create_cpu(&plain, &f32, NULL), BT_OK);
    for (uint32_t i = 0; i < N_TOKENS; i++) {
        tokens[i] = pk_u32() % MADE_VOCAB;
    }
    for (enum bt_dtype t = BT_DTYPE_Q4_0; t <= BT_DTYPE_Q6_K; t++) {
        check_type(&p, f32, t, false);
    }
    check_type(&p, f32, BT_DTYPE_Q4_1, true);
    check_type(&p, f32, BT_DTYPE_Q8_0, true);
    check_fixtures(p.k[0]);
    bt_k_destroy(f32);
    pk_close(&p);
    bt_temp_clean(files, 2);
    return bt_test_done();
}
