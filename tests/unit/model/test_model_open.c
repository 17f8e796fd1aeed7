/* Opening models: what info says, and that every defect or unknown feature is refused with its
 * name. */

#include "model/model.h"

#include "base/mem.h"
#include "tests/check.h"
#include "tests/tiny_model.h"

/* tiny_config with `from` replaced by `to`. */
static const char *edited(const char *from, const char *to)
{
    static char out[2048];
    const char *at = strstr(tiny_config, from);

    if (at == NULL) {
        abort();
    }
    (void)snprintf(out, sizeof(out), "%.*s%s%s", (int)(at - tiny_config), tiny_config, to,
                   at + strlen(from));
    return out;
}

/* tiny_config with one more field. */
static const char *with(const char *field)
{
    char to[512];

    (void)snprintf(to, sizeof(to), "{%s, ", field);
    return edited("{", to);
}

static enum bt_status open_model(const struct tiny_model *t, const char *config,
                                 struct bt_model **m, struct bt_err *err)
{
    *m = NULL;
    return bt_model_open(tiny_write(t, config, 1), m, err);
}

static void expect(const struct tiny_model *t, const char *config, enum bt_status want,
                   const char *text)
{
    struct bt_model *m;
    struct bt_err err = {0};

    CHECK_EQ(open_model(t, config, &m, &err), want);
    CHECK(strstr(err.msg, text) != NULL);
    if (strstr(err.msg, text) == NULL) {
        fprintf(stderr, "  wanted \"%s\" in: %s\n", text, err.msg);
    }
    bt_model_destroy(m);
}

static void test_info(void)
{
    struct tiny_model t;
    struct bt_model *m;
    struct bt_err err = {0};

    tiny_llama(&t);
    CHECK_EQ(open_model(&t, tiny_config, &m, &err), BT_OK);
    if (m == NULL) {
        fprintf(stderr, "%s\n", err.msg);
        return;
    }
    const struct bt_model_info *i = bt_model_info(m);
    CHECK_STR(i->arch, "llama");
    CHECK(strncmp(i->name, "baton-test-", 11) == 0);
    CHECK(i->n_layers == 2 && i->dim == 32 && i->n_heads == 4 && i->n_kv_heads == 2 &&
          i->head_dim == 8);
    CHECK(i->vocab == 64 && i->context == 256 && i->n_groups == 1);
    CHECK(i->groups[0].window == 0 && i->groups[0].n_layers == 2);
    CHECK(i->layer_group[1] == 0 && i->layer_index[1] == 1);
    CHECK(i->n_eos == 2 && i->eos[0] == 2 && i->eos[1] == 3 && i->bos == 1);
    CHECK_EQ(i->weight_bytes, i->n_params * 4);
    bt_model_destroy(m);
}

/* A good config whose fingerprint differs from the plain one, or not. */
static void expect_fingerprint(const struct tiny_model *t, const char *config, uint64_t seed,
                               uint64_t plain, bool same)
{
    struct bt_model *m = NULL;
    struct bt_err err = {0};

    CHECK_EQ(bt_model_open(tiny_write(t, config, seed), &m, &err), BT_OK);
    if (m != NULL) {
        CHECK((bt_model_info(m)->fingerprint == plain) == same);
    } else {
        fprintf(stderr, "%s\n", err.msg);
    }
    bt_model_destroy(m);
}

static void test_fingerprint(void)
{
    struct tiny_model t;
    struct bt_model *m;
    struct bt_err err = {0};

    tiny_llama(&t);
    CHECK_EQ(open_model(&t, tiny_config, &m, &err), BT_OK);
    uint64_t plain = bt_model_info(m)->fingerprint;
    bt_model_destroy(m);
    expect_fingerprint(&t, tiny_config, 1, plain, true);
    expect_fingerprint(&t, with("\"attention_dropout\": 0.5"), 1, plain, true);
    expect_fingerprint(&t, tiny_config, 2, plain, false);
    expect_fingerprint(&t, edited("1e-5", "1e-6"), 1, plain, false);
    expect_fingerprint(&t, edited("10000.0", "20000.0"), 1, plain, false);
    expect_fingerprint(&t, edited("[2, 3]", "2"), 1, plain, false);
    tiny_find(&t, "model.norm.weight")->type = "BF16";
    expect_fingerprint(&t, tiny_config, 1, plain, false);
}

static void test_groups(void)
{
    struct tiny_model t;
    struct bt_model *m;
    struct bt_err err = {0};

    tiny_llama(&t);
    CHECK_EQ(open_model(&t, edited("\"llama\"", "\"mistral\", \"sliding_window\": 16"), &m, &err),
             BT_OK);
    CHECK(m != NULL && bt_model_info(m)->n_groups == 1 && bt_model_info(m)->groups[0].window == 16);
    bt_model_destroy(m);
    CHECK_EQ(open_model(&t, edited("\"llama\"", "\"mistral\", \"sliding_window\": null"), &m, &err),
             BT_OK);
    CHECK(m != NULL && bt_model_info(m)->groups[0].window == 0);
    bt_model_destroy(m);
    /* A window that no position can leave is full attention; an absent one is 4096. */
    CHECK_EQ(open_model(&t, edited("\"llama\"", "\"mistral\""), &m, &err), BT_OK);
    CHECK(m != NULL && bt_model_info(m)->groups[0].window == 0);
    bt_model_destroy(m);
    const char *mixed = "\"mistral\", \"sliding_window\": 16, "
                        "\"layer_types\": [\"sliding_attention\", \"full_attention\"]";
    CHECK_EQ(open_model(&t, edited("\"llama\"", mixed), &m, &err), BT_OK);
    if (m != NULL) {
        const struct bt_model_info *i = bt_model_info(m);
        CHECK(i->n_groups == 2 && i->groups[0].window == 0 && i->groups[1].window == 16);
        CHECK(i->layer_group[0] == 1 && i->layer_group[1] == 0 && i->layer_index[0] == 0 &&
              i->layer_index[1] == 0);
    }
    bt_model_destroy(m);
}

static void test_bad_config(void)
{
    struct tiny_model t;
    tiny_llama(&t);
    expect(&t, edited("\"llama\"", "\"deepseek_v3\""), BT_ERR_UNSUPPORTED,
           "\"deepseek_v3\" is not supported");
    expect(&t, edited("\"model_type\": \"llama\", ", ""), BT_ERR_INVALID, "model_type: missing");
    expect(&t, edited("LlamaForCausalLM", "LlamaForSequenceClassification"), BT_ERR_UNSUPPORTED,
           "architectures");
    expect(&t, edited("silu", "relu2"), BT_ERR_UNSUPPORTED, "hidden_act: activation \"relu2\"");
    expect(&t, with("\"quantization_config\": {}"), BT_ERR_UNSUPPORTED,
           "quantization_config.quant_method: \"\" is not supported");
    expect(&t, with("\"use_bidirectional_attention\": true"), BT_ERR_UNSUPPORTED,
           "use_bidirectional_attention");
    expect(&t, with("\"rope_scaling\": {\"rope_type\": \"dynamic\", \"factor\": 2}"),
           BT_ERR_UNSUPPORTED, "rope_scaling.rope_type: rope type \"dynamic\"");
    expect(&t, with("\"rope_scaling\": {\"type\": \"longrope\"}"), BT_ERR_UNSUPPORTED,
           "rope_scaling.type: rope type \"longrope\"");
    expect(&t, with("\"rope_scaling\": {\"type\": \"linear\"}"), BT_ERR_INVALID,
           "rope_scaling.factor: missing");
    expect(&t, with("\"rope_scaling\": {\"type\": \"linear\", \"factor\": 0}"), BT_ERR_INVALID,
           "rope factor");
    expect(&t, with("\"rope_parameters\": {\"full_attention\": {}}"), BT_ERR_UNSUPPORTED,
           "by layer type");
    expect(&t, with("\"rope_scaling\": 3"), BT_ERR_INVALID, "rope_scaling: not an object");
    expect(&t, edited("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 0"), BT_ERR_INVALID,
           "num_hidden_layers");
    expect(&t, edited("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3"), BT_ERR_INVALID,
           "no tensor model.layers.2.");
    expect(&t, edited("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3"), BT_ERR_INVALID,
           "no multiple");
    expect(&t, edited("\"hidden_size\": 32", "\"hidden_size\": \"x\""), BT_ERR_INVALID,
           "hidden_size: not an integer");
    expect(&t, edited("1e-5", "-1"), BT_ERR_INVALID, "rms_norm_eps");
    expect(&t, edited("[2, 3]", "64"), BT_ERR_INVALID, "eos_token_id 64 is outside the vocabulary");
    expect(&t, edited("10000.0", "0"), BT_ERR_INVALID, "rope theta");
    expect(&t, with("\"partial_rotary_factor\": 0.1"), BT_ERR_INVALID, "rope turns 0");
    expect(
        &t,
        edited("\"llama\"",
               "\"mistral\", \"sliding_window\": 4, \"layer_types\": [\"chunked\", \"chunked\"]"),
        BT_ERR_UNSUPPORTED, "layer_types: \"chunked\"");
    expect(&t, edited("\"llama\"", "\"mistral\", \"layer_types\": [\"full_attention\"]"),
           BT_ERR_INVALID, "layer_types: 1 entries for 2 layers");
    expect(&t, edited("\"llama\"", "\"gemma3_text\", \"attn_logit_softcapping\": 5.0"),
           BT_ERR_UNSUPPORTED, "attn_logit_softcapping");
    expect(&t, "{", BT_ERR_INVALID, "config.json: byte");
}

/* body: members of quantization_config. */
static void expect_quant(const struct tiny_model *t, const char *body, const char *text)
{
    char member[512];

    (void)snprintf(member, sizeof(member), "\"quantization_config\": {%s}", body);
    expect(t, with(member), BT_ERR_UNSUPPORTED, text);
}

#define GPTQ "\"quant_method\": \"gptq\", \"bits\": 4"
#define AWQ  "\"quant_method\": \"awq\", \"bits\": 4"
#define CT(weights)                                                                                \
    "\"quant_method\": \"compressed-tensors\", \"config_groups\": {\"group_0\": {\"weights\": "    \
    "{" weights "}}}"

static void test_quant_refused(void)
{
    struct tiny_model t;

    tiny_llama(&t);
    expect_quant(&t, "\"quant_method\": \"gptq\", \"bits\": 3", "quantization_config.bits: 3");
    expect_quant(&t, GPTQ ", \"group_size\": 48", "quantization_config.group_size: 48");
    expect_quant(&t, GPTQ ", \"checkpoint_format\": \"marlin\"", "checkpoint_format: \"marlin\"");
    expect_quant(&t, GPTQ ", \"dynamic\": {\"a\": {}}", "quantization_config.dynamic");
    expect_quant(&t, AWQ ", \"version\": \"gemv\"", "quantization_config.version: \"gemv\"");
    expect_quant(&t, AWQ ", \"zero_point\": false", "quantization_config.zero_point");
    expect_quant(&t, CT("\"num_bits\": 8, \"type\": \"float\""), "group_0.weights.type");
    expect_quant(&t, CT("\"num_bits\": 4"), "group_0.weights.num_bits: is not 8");
    expect_quant(&t, CT("\"num_bits\": 8, \"strategy\": \"block\""), "strategy: \"block\"");
    expect_quant(&t, CT("\"num_bits\": 8") ", \"format\": \"nvfp4-pack-quantized\"",
                 "quantization_config.format: \"nvfp4-pack-quantized\"");
}

#define CT8(weights, more)                                                                         \
    "\"quant_method\": \"compressed-tensors\", \"format\": \"float-quantized\", "                  \
    "\"config_groups\": {\"group_0\": {\"weights\": {\"type\": \"float\", " weights "}" more "}}"
#define FP8   "\"quant_method\": \"fp8\""
#define BLOCK FP8 ", \"weight_block_size\": [32, 32]"

static void test_f8_refused(void)
{
    struct tiny_model t;

    tiny_llama(&t);
    expect_quant(&t, CT8("\"num_bits\": 4", ""), "group_0.weights.num_bits: is not 8");
    expect_quant(&t, CT8("\"num_bits\": 8, \"symmetric\": false", ""), "weights.symmetric");
    expect_quant(&t, CT8("\"num_bits\": 8, \"strategy\": \"token\"", ""), "strategy: \"token\"");
    expect_quant(
        &t, CT8("\"num_bits\": 8, \"strategy\": \"block\", \"block_structure\": [128, 48]", ""),
        "block_structure: 48 columns");
    expect_quant(&t, CT8("\"num_bits\": 8", ", \"input_activations\": {\"num_bits\": 4}"),
                 "input_activations");
    expect_quant(&t, CT8("\"num_bits\": 8", ", \"input_activations\": {\"type\": \"int\"}"),
                 "input_activations");
    expect_quant(&t, CT("\"num_bits\": 8, \"type\": \"int\"") ", \"format\": \"float-quantized\"",
                 "group_0.weights.type: is not float");
    expect_quant(&t, FP8 ", \"fmt\": \"e5m2\"", "quantization_config.fmt: is not e4m3");
    expect_quant(&t, FP8 ", \"activation_scheme\": \"odd\"", "activation_scheme: \"odd\"");
    expect_quant(&t, FP8 ", \"weight_block_size\": [128, 8]", "weight_block_size: 8 columns");
    expect(&t, with("\"quantization_config\": {" FP8 ", \"weight_block_size\": [128]}"),
           BT_ERR_INVALID, "weight_block_size: is not a pair");
}

#define QKEY "model.layers.0.self_attn.q_proj."
#define Q8   "\"quantization_config\": {" FP8 "}"
#define QB   "\"quantization_config\": {" BLOCK "}"

/* One matrix [32, 32] in e4m3, with such a scale. */
static void f8_model(struct tiny_model *t, const char *scale, uint32_t rows, uint32_t cols)
{
    tiny_llama(t);
    tiny_find(t, QKEY "weight")->type = "F8_E4M3";
    tiny_add(t, scale, rows, cols);
}

static void test_f8_tensors(void)
{
    static const struct {
        const char *scale, *config;
        uint32_t rows, cols;
    } good[] = {{QKEY "weight_scale", Q8, 1, 0},
                {QKEY "weight_scale", Q8, 1, 1},
                {QKEY "weight_scale", Q8, 32, 1},
                {QKEY "weight_scale", Q8, 32, 0},
                {QKEY "weight_scale_inv", QB, 1, 1},
                {QKEY "weight_scale",
                 "\"quantization_config\": {" CT8("\"num_bits\": 8, \"strategy\": \"channel\"",
                                                  ", \"input_activations\": null") "}",
                 32, 1}};
    struct tiny_model t;
    struct bt_model *m;
    struct bt_err err = {0};

    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        f8_model(&t, good[i].scale, good[i].rows, good[i].cols);
        /* how activations and the cache may be rounded, which is not done */
        tiny_add(&t, QKEY "input_scale", 1, 0);
        tiny_add(&t, "model.layers.0.self_attn.k_scale", 1, 0);
        tiny_add(&t, "model.layers.0.self_attn.v_proj.output_scale", 1, 0);
        CHECK_EQ(open_model(&t, with(good[i].config), &m, &err), BT_OK);
        if (m == NULL) {
            fprintf(stderr, "%zu: %s\n", i, err.msg);
        }
        bt_model_destroy(m);
    }
    f8_model(&t, QKEY "weight_scale_2", 1, 0);
    expect(&t, with(Q8), BT_ERR_INVALID, "no tensor " QKEY "weight_scale");
    f8_model(&t, QKEY "weight_scale", 1, 0);
    expect(&t, with(QB), BT_ERR_INVALID, "no tensor " QKEY "weight_scale_inv");
    expect(&t, tiny_config, BT_ERR_UNSUPPORTED, "weight: type F8_E4M3 is not supported");
    f8_model(&t, QKEY "weight_scale", 16, 1);
    expect(&t, with(Q8), BT_ERR_INVALID, "weight_scale: shape [16, 1], expected [32, 1]");
    f8_model(&t, QKEY "weight_scale_inv", 2, 1);
    expect(&t, with(QB), BT_ERR_INVALID, "weight_scale_inv: shape [2, 1], expected [1, 1]");
    f8_model(&t, QKEY "weight_scale", 32, 1);
    tiny_find(&t, QKEY "weight_scale")->type = "I64";
    expect(&t, with(Q8), BT_ERR_UNSUPPORTED, "weight_scale: type I64 is not supported here");
    f8_model(&t, QKEY "weight_scale", 32, 1);
    tiny_find(&t, QKEY "weight")->type = "F8_E5M2";
    expect(&t, with(Q8), BT_ERR_UNSUPPORTED, QKEY "weight: type F8_E5M2");
    tiny_llama(&t);
    tiny_add(&t, QKEY "input_scale", 1, 0);
    expect(&t, tiny_config, BT_ERR_UNSUPPORTED, "input_scale: a llama model has no use for it");
}

static void test_bad_tensors(void)
{
    struct tiny_model t;

    tiny_llama(&t);
    tiny_remove(&t, "model.layers.1.self_attn.k_proj.weight");
    expect(&t, tiny_config, BT_ERR_INVALID, "no tensor model.layers.1.self_attn.k_proj.weight");
    tiny_llama(&t);
    tiny_find(&t, "model.layers.0.mlp.up_proj.weight")->shape[0] = 47;
    expect(&t, tiny_config, BT_ERR_INVALID,
           "tensor model.layers.0.mlp.up_proj.weight: shape [47, 32], expected [48, 32]");
    tiny_llama(&t);
    tiny_find(&t, "model.norm.weight")->type = "I64";
    expect(&t, tiny_config, BT_ERR_UNSUPPORTED, "tensor model.norm.weight: type I64");
    tiny_llama(&t);
    tiny_add(&t, "model.layers.0.self_attn.q_proj.bias", 32, 0);
    expect(&t, tiny_config, BT_ERR_UNSUPPORTED,
           "tensor model.layers.0.self_attn.q_proj.bias: a llama model has no use");
    tiny_llama(&t);
    tiny_remove(&t, "lm_head.weight");
    expect(&t, tiny_config, BT_ERR_INVALID, "no tensor lm_head.weight");

    struct bt_model *m;
    struct bt_err err = {0};
    tiny_llama(&t);
    tiny_add(&t, "model.layers.0.self_attn.rotary_emb.inv_freq", 4, 0);
    CHECK_EQ(open_model(&t, with("\"tie_word_embeddings\": true"), &m, &err), BT_OK);
    bt_model_destroy(m);

    /* The last tensor's end is past the end of the file. */
    const char *path = bt_temp_path("model.safetensors");
    tiny_llama(&t);
    (void)tiny_write(&t, tiny_config, 1);
    FILE *f = fopen(path, "r+b");
    CHECK(f != NULL && fseek(f, 0, SEEK_END) == 0 && ftruncate(fileno(f), ftell(f) - 4) == 0);
    (void)fclose(f);
    CHECK_EQ(bt_model_open(bt_temp_dir(), &m, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "model.layers.1.mlp.down_proj.weight") != NULL &&
          strstr(err.msg, "outside") != NULL);
    (void)unlink(path);
    CHECK_EQ(bt_model_open(bt_temp_dir(), &m, &err), BT_ERR_NOT_FOUND);
    CHECK(strstr(err.msg, "model.safetensors") != NULL);
    CHECK_EQ(bt_model_open("/nonexistent/model.gguf", &m, &err), BT_ERR_NOT_FOUND);
}

static void test_out_of_memory(void)
{
    struct tiny_model t;
    bool fired = true;

    tiny_llama(&t);
    (void)tiny_write(&t, tiny_config, 1);
    for (uint64_t nth = 0; fired; nth++) {
        struct bt_model *m = NULL;
        bt_test_fail_alloc(nth);
        enum bt_status st = bt_model_open(bt_temp_dir(), &m, NULL);
        fired = bt_test_fail_alloc_off();
        CHECK_EQ(st, fired ? BT_ERR_NOMEM : BT_OK);
        bt_model_destroy(m);
        CHECK_EQ(bt_test_live_bytes(), 0);
    }
}

int main(void)
{
    test_info();
    test_fingerprint();
    test_groups();
    test_bad_config();
    test_quant_refused();
    test_f8_refused();
    test_f8_tensors();
    test_bad_tensors();
    test_out_of_memory();
    tiny_clean();
    return bt_test_done();
}
