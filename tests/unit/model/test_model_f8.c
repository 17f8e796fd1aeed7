/* Matrices of e4m3 in Hugging Face directories: the same bits as the model whose F32 weights are code times scale, for every form of
 * scales and every instruction set; codes and scales that are no numbers are refused when the model is loaded. */

#include "base/float8.h"
#include "base/mem.h"
#include "tests/check.h"
#include "tests/model_run.h"
#include "tests/tiny_model.h"

enum { LEN = 13 };

#define QUANT(body) "{\"quantization_config\": {" body "}, "
#define CHANNEL                                                                                    \
    QUANT("\"quant_method\": \"compressed-tensors\", \"format\": \"float-quantized\", "            \
          "\"config_groups\": {\"group_0\": {\"weights\": {\"num_bits\": 8, \"type\": \"float\", " \
          "\"strategy\": \"channel\"}}}")
#define TENSOR          QUANT("\"quant_method\": \"fp8\", \"activation_scheme\": \"static\"")
#define BLOCKS_OF(ROWS) QUANT("\"quant_method\": \"fp8\", \"weight_block_size\": [" #ROWS ", 32]")
#define BLOCKS          BLOCKS_OF(24)

/* rows, cols: of values with one scale. */
static const struct form {
    const char *config, *suffix, *type;
    uint32_t rows, cols;
} forms[] = {{CHANNEL, ".weight_scale", "F32", 1, 32},
             {CHANNEL, ".weight_scale", "BF16", 1, 32},
             {TENSOR, ".weight_scale", "F32", 64, 32},
             {TENSOR, ".weight_scale_inv", "F32", 64, 32},
             {BLOCKS, ".weight_scale_inv", "F32", 24, 32}};

static uint64_t hash_name(const char *name, uint64_t at)
{
    uint64_t h = at * 0x9e3779b97f4a7c15U + 0x123456789U;

    for (; *name != 0; name++) {
        h = (h ^ (uint8_t)*name) * 0x100000001b3U;
    }
    return h ^ h >> 29;
}

static bool is_f8(const struct tiny_tensor *t)
{
    return t->n_dims == 2 && t->shape[1] == 32 && strstr(t->name, ".layers.") != NULL;
}

static uint8_t code_at(const char *name, size_t i)
{
    uint8_t c = (uint8_t)(hash_name(name, i) >> 11);

    return (c & 0x7f) == 0x7f ? 0x3a : c;
}

/* Exact in bf16 too. */
static float scale_at(const char *name, size_t i)
{
    return (float)(17 + hash_name(name, i + 1000) % 111) * 0x1p-17F;
}

static size_t value_bytes(const struct tiny_tensor *t)
{
    return strcmp(t->type, "F32") == 0 ? 4 : strcmp(t->type, "BF16") == 0 ? 2 : 1;
}

static size_t values(const struct tiny_tensor *t)
{
    return (size_t)t->shape[0] * (t->n_dims == 2 ? t->shape[1] : 1);
}

static float value_at(const struct tiny_tensor *t, const struct form *f, size_t i)
{
    if (is_f8(t)) {
        uint32_t row = (uint32_t)i / 32, per_row = 32 / f->cols;
        size_t s = (size_t)(row / f->rows) * per_row + i % 32 / f->cols;
        return scale_at(t->name, s) * bt_f8_to_f32(code_at(t->name, i));
    }
    return ((float)(hash_name(t->name, i) % 2048) - 1024.0F) * 0x1p-11F;
}

/* A scale's tensor has its matrix's name before the suffix. */
static void put_values(uint8_t *out, const struct tiny_tensor *t, const struct form *f)
{
    const char *at = strstr(t->name, ".weight_scale");
    char matrix[96] = "";

    if (at != NULL) {
        (void)snprintf(matrix, sizeof(matrix), "%.*s.weight", (int)(at - t->name), t->name);
    }
    for (size_t i = 0; i < values(t); i++) {
        float v = at != NULL ? scale_at(matrix, i) : value_at(t, f, i);
        if (value_bytes(t) == 1) {
            out[i] = code_at(t->name, i);
        } else {
            memcpy(out + i * value_bytes(t), (const uint8_t *)&v + (4 - value_bytes(t)),
                   value_bytes(t));
        }
    }
}

/* Writes the model of a form, or (f8 false) what it stands for. bad: a tensor (or NULL) whose sixth value becomes `value`. */
static const char *write_model(const struct form *f, bool f8, const char *bad, uint32_t value)
{
    static struct tiny_model t;
    static uint8_t data[1 << 18];
    char config[2048];

    tiny_llama(&t);
    for (uint32_t i = 0, n = t.n; i < n && f8; i++) {
        if (is_f8(&t.t[i])) {
            char name[96];
            uint32_t rows = (t.t[i].shape[0] + f->rows - 1) / f->rows;
            t.t[i].type = "F8_E4M3";
            (void)snprintf(name, sizeof(name), "%.*s%s", (int)strlen(t.t[i].name) - 7, t.t[i].name,
                           f->suffix);
            tiny_add(&t, name, rows, rows == 1 ? 0 : 1);
            tiny_find(&t, name)->type = f->type;
        }
    }
    (void)snprintf(config, sizeof(config), "%s%s", f8 ? f->config : "{", tiny_config + 1);
    const char *dir = tiny_write(&t, config, 1);
    size_t at = 0, bytes = 0;
    for (uint32_t i = 0; i < t.n; i++) {
        put_values(data + at, &t.t[i], f);
        if (bad != NULL && strcmp(t.t[i].name, bad) == 0) {
            memcpy(data + at + 5 * value_bytes(&t.t[i]), &value, value_bytes(&t.t[i]));
        }
        at += values(&t.t[i]) * value_bytes(&t.t[i]);
    }
    bytes = at;
    FILE *file = fopen(bt_temp_path("model.safetensors"), "r+b");
    CHECK(file != NULL && fseek(file, -(long)bytes, SEEK_END) == 0 &&
          fwrite(data, bytes, 1, file) == 1);
    CHECK(file != NULL && fclose(file) == 0);
    return dir;
}

static size_t answer(const char *dir, bool f8, struct bt_kctx *k, float *logits)
{
    static const uint32_t prompt[LEN] = {1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 49};
    struct bt_model_run r = {.k = k};
    struct bt_err err = {0};

    enum bt_status st = bt_model_open(dir, &r.m, &err);
    st = st == BT_OK ? bt_model_load(r.m, k, NULL, &err) : st;
    CHECK_EQ(st, BT_OK);
    if (st != BT_OK) {
        fprintf(stderr, "%s\n", err.msg);
        return 0;
    }
    CHECK_STR(bt_model_numerics(r.m, "cpu"), f8 ? "cpu-bf16" : "cpu-f32");
    size_t packed = bt_model_packed(r.m)->bytes;
    bt_model_run_pool(&r, 8, BT_DTYPE_F32, LEN + 1);
    CHECK_EQ(bt_model_run_tokens(&r, prompt, LEN, 0, LEN, logits), BT_OK);
    CHECK_EQ(bt_model_run_tokens(&r, prompt, 1, LEN, 1, logits + TINY_VOCAB), BT_OK);
    bt_model_run_close(&r);
    return packed;
}

static void test_forms(const char *isa, const char *numerics)
{
    struct bt_k_opts o = {.isa = isa, .numerics = numerics, .n_threads = 1};
    struct bt_kctx *k = NULL;

    if (bt_k_create_cpu(&o, &k, NULL) != BT_OK) {
        printf("not on this CPU: %s\n", isa);
        return;
    }
    for (size_t i = 0; i < sizeof(forms) / sizeof(forms[0]); i++) {
        float want[2 * TINY_VOCAB] = {0}, got[2 * TINY_VOCAB] = {1};
        size_t plain = answer(write_model(&forms[i], false, NULL, 0), false, k, want);
        size_t small = answer(write_model(&forms[i], true, NULL, 0), true, k, got);
        CHECK(memcmp(want, got, sizeof(want)) == 0);
        CHECK(small < plain);
    }
    bt_k_destroy(k);
}

static void expect_load(const struct form *f, const char *bad, uint32_t value, const char *text)
{
    struct bt_k_opts o = {.n_threads = 1};
    struct bt_kctx *k = NULL;
    struct bt_model *m = NULL;
    struct bt_err err = {0};

    CHECK_EQ(bt_k_create_cpu(&o, &k, NULL), BT_OK);
    CHECK_EQ(bt_model_open(write_model(f, true, bad, value), &m, &err), BT_OK);
    CHECK_EQ(bt_model_load(m, k, NULL, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, text) != NULL && strstr(err.msg, "layers.1.mlp.up_proj") != NULL);
    if (strstr(err.msg, text) == NULL) {
        fprintf(stderr, "  wanted \"%s\" in: %s\n", text, err.msg);
    }
    bt_model_destroy(m);
    bt_k_destroy(k);
}

static void test_no_numbers(void)
{
    const char *matrix = "model.layers.1.mlp.up_proj.weight",
               *scale = "model.layers.1.mlp.up_proj.weight_scale";

    expect_load(&forms[0], matrix, 0x7f, "row 0 has a NaN in columns 0 to 31");
    expect_load(&forms[0], matrix, 0xff, "row 0 has a NaN");
    expect_load(&forms[0], scale, 0x7f800000U, "scale 5 is inf");
    expect_load(&forms[0], scale, 0x7fc00000U, "scale 5 is nan");
    expect_load(&forms[0], scale, 0xc3000000U, "scale 5 is -128");
}

static uint64_t fingerprint(const struct form *f)
{
    struct bt_model *m = NULL;
    uint64_t h = 0;

    CHECK_EQ(bt_model_open(write_model(f, true, NULL, 0), &m, NULL), BT_OK);
    h = m != NULL ? bt_model_info(m)->fingerprint : 0;
    bt_model_destroy(m);
    return h;
}

/* The same files, but other rows to each scale: another model, which must not take its packed weights. */
static void test_block_size_tells_models_apart(void)
{
    const struct form a = {BLOCKS, ".weight_scale_inv", "F32", 24, 32},
                      b = {BLOCKS_OF(28), ".weight_scale_inv", "F32", 24, 32};

    CHECK(fingerprint(&a) == fingerprint(&a));
    CHECK(fingerprint(&a) != fingerprint(&b));
}

int main(void)
{
    static const char *const isas[] = {"plain", "avx2", "avx512", "neon"};

    for (size_t i = 0; i < sizeof(isas) / sizeof(isas[0]); i++) {
        test_forms(isas[i], NULL);
    }
    test_forms("auto", "cpu-int8");
    test_forms("auto", "cpu-bf16");
    test_no_numbers();
    test_block_size_tells_models_apart();
    CHECK_EQ(bt_test_live_bytes(), 0);
    tiny_clean();
    return bt_test_done();
}
