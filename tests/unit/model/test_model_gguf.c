/* GGUF models: the tiny Llama, converted here as llama.cpp's converter does it (q and k permuted),
 * gives the logits of its Hugging Face form; what is not supported is refused by name. */

#include "model/model.h"

#include "files/safetensors.h"
#include "tests/check.h"
#include "tests/gguf_writer.h"
#include "tests/model_run.h"
#include "tests/tiny_model.h"

static struct bt_kctx *kctx;
static struct bt_st *st;

/* What a test changes in an otherwise good file. */
struct edit {
    const char *arch;
    const char *skip_key;  /* left out */
    const char *key, *str; /* one more key: a string, or */
    uint32_t u32;          /* a number */
    const char *tensor;    /* one tensor is written with another */
    uint32_t tensor_type;  /* type, and its data are as before */
};

static const char *gguf_name(const char *hf, char out[96])
{
    static const char *const stems[][2] = {
        {"input_layernorm", "attn_norm"}, {"post_attention_layernorm", "ffn_norm"},
        {"self_attn.q_proj", "attn_q"},   {"self_attn.k_proj", "attn_k"},
        {"self_attn.v_proj", "attn_v"},   {"self_attn.o_proj", "attn_output"},
        {"mlp.gate_proj", "ffn_gate"},    {"mlp.up_proj", "ffn_up"},
        {"mlp.down_proj", "ffn_down"},
    };
    unsigned layer;

    if (strcmp(hf, "model.embed_tokens.weight") == 0) {
        return "token_embd.weight";
    }
    if (strcmp(hf, "lm_head.weight") == 0) {
        return "output.weight";
    }
    if (sscanf(hf, "model.layers.%u.", &layer) != 1) {
        return "output_norm.weight";
    }
    for (size_t i = 0; i < sizeof(stems) / sizeof(stems[0]); i++) {
        if (strstr(hf, stems[i][0]) != NULL) {
            (void)snprintf(out, 96, "blk.%u.%s.weight", layer, stems[i][1]);
        }
    }
    return out;
}

static void put_data(const struct bt_tensor *t)
{
    size_t row = t->bytes / t->shape[0];
    bool permute = strstr(t->name, "q_proj") != NULL || strstr(t->name, "k_proj") != NULL;

    for (uint32_t r = 0; r < t->shape[0]; r++) {
        uint32_t head = r / TINY_HEAD_DIM, i = r % TINY_HEAD_DIM;
        uint32_t from = permute ? head * TINY_HEAD_DIM + i % 2 * (TINY_HEAD_DIM / 2) + i / 2 : r;
        gw_bytes((const uint8_t *)t->data + from * row, row);
    }
}

static void put_keys(const char *arch, const struct edit *e)
{
    static const struct {
        const char *key;
        uint32_t v;
    } keys[] = {{"block_count", TINY_LAYERS},         {"context_length", 256},
                {"embedding_length", TINY_DIM},       {"feed_forward_length", TINY_FFN},
                {"attention.head_count", TINY_HEADS}, {"attention.head_count_kv", TINY_KV_HEADS}};
    char name[96];
    uint64_t n = 3;

    gw_begin(bt_st_count(st), 0);
    gw_key_str("general.architecture", arch);
    gw_key_u32("tokenizer.ggml.eos_token_id", 2);
    (void)snprintf(name, sizeof(name), "%s.attention.layer_norm_rms_epsilon", arch);
    gw_key_f32(name, 1e-5F);
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        if (e->skip_key == NULL || strcmp(keys[i].key, e->skip_key) != 0) {
            (void)snprintf(name, sizeof(name), "%s.%s", arch, keys[i].key);
            gw_key_u32(name, keys[i].v);
            n++;
        }
    }
    if (e->str != NULL) {
        gw_key_str(e->key, e->str);
        n++;
    } else if (e->key != NULL) {
        gw_key_u32(e->key, e->u32);
        n++;
    }
    gw_buf[16] = (uint8_t)n;
}

static const char *write_gguf(const struct edit *e)
{
    uint64_t offset = 0;
    char name[96];

    put_keys(e->arch != NULL ? e->arch : "llama", e);
    for (size_t i = 0; i < bt_st_count(st); i++) {
        const struct bt_tensor *t = bt_st_at(st, i);
        const char *n = gguf_name(t->name, name);
        bool other = e->tensor != NULL && strcmp(e->tensor, n) == 0;
        gw_tensor(n, other ? e->tensor_type : 0, t->shape[t->n_dims - 1],
                  t->n_dims == 2 ? t->shape[0] : 0, offset);
        offset = (offset + t->bytes + 31) & ~(uint64_t)31;
    }
    for (size_t i = 0; i < bt_st_count(st); i++) {
        gw_align(32);
        put_data(bt_st_at(st, i));
    }
    return gw_save("tiny.gguf");
}

static void run(const char *path, float logits[TINY_VOCAB])
{
    static const uint32_t ids[] = {1, 5, 9, 33, 60, 2, 7, 7, 41, 12, 0, 63, 8};
    struct bt_model_run r;
    struct bt_err err = {0};
    enum bt_status status = bt_model_run_open(&r, path, kctx, &err);

    CHECK_EQ(status, BT_OK);
    if (status != BT_OK) {
        fprintf(stderr, "%s\n", err.msg);
        return;
    }
    bt_model_run_pool(&r, 4, BT_DTYPE_F32, 16);
    CHECK_EQ(bt_model_run_tokens(&r, ids, 13, 0, 13, logits), BT_OK);
    bt_model_run_close(&r);
}

static void test_same_logits(void)
{
    float hf[TINY_VOCAB], gguf[TINY_VOCAB];
    struct bt_model *m = NULL;
    struct bt_err err = {0};

    run(bt_temp_dir(), hf);
    run(write_gguf(&(struct edit){0}), gguf);
    for (uint32_t i = 0; i < TINY_VOCAB; i++) {
        CHECK_NEAR(hf[i], gguf[i], 1e-5);
    }
    CHECK_EQ(bt_model_open(bt_temp_path("tiny.gguf"), &m, &err), BT_OK);
    if (m != NULL) {
        const struct bt_model_info *i = bt_model_info(m);
        CHECK_STR(i->name, "tiny");
        CHECK(i->vocab == TINY_VOCAB && i->context == 256 && i->n_eos == 1 && i->eos[0] == 2 &&
              i->bos == -1);
    }
    bt_model_destroy(m);
}

static void expect(const struct edit *e, enum bt_status want, const char *text)
{
    struct bt_model *m = NULL;
    struct bt_err err = {0};

    CHECK_EQ(bt_model_open(write_gguf(e), &m, &err), want);
    CHECK(strstr(err.msg, text) != NULL && strstr(err.msg, "tiny.gguf") != NULL);
    if (strstr(err.msg, text) == NULL) {
        fprintf(stderr, "  wanted \"%s\" in: %s\n", text, err.msg);
    }
    bt_model_destroy(m);
}

static void test_refused(void)
{
    expect(&(struct edit){.arch = "mamba"}, BT_ERR_UNSUPPORTED, "general.architecture \"mamba\"");
    expect(&(struct edit){.skip_key = "block_count"}, BT_ERR_INVALID,
           "key llama.block_count: missing");
    expect(&(struct edit){.key = "llama.expert_count", .u32 = 8}, BT_ERR_INVALID,
           "llama.expert_used_count: missing");
    expect(&(struct edit){.arch = "qwen2", .key = "qwen2.expert_count", .u32 = 8},
           BT_ERR_UNSUPPORTED, "qwen2.expert_count");
    expect(&(struct edit){.key = "split.count", .u32 = 2}, BT_ERR_UNSUPPORTED, "split.count");
    expect(&(struct edit){.key = "llama.rope.scaling.type", .str = "longrope"}, BT_ERR_UNSUPPORTED,
           "llama.rope.scaling.type");
    expect(&(struct edit){.key = "llama.rope.scaling.type", .str = "yarn"}, BT_ERR_INVALID,
           "rope.scaling.original_context_length: missing");
    expect(&(struct edit){.key = "llama.attention.key_length", .str = "x"}, BT_ERR_INVALID,
           "llama.attention.key_length");
    expect(&(struct edit){.key = "llama.rope.dimension_count", .u32 = 16}, BT_ERR_INVALID,
           "rope turns 16 of 8");
    expect(&(struct edit){.tensor = "blk.1.ffn_up.weight", .tensor_type = 15}, BT_ERR_UNSUPPORTED,
           "tensor blk.1.ffn_up.weight: type Q8_K is not supported");
    expect(&(struct edit){.tensor = "blk.0.attn_norm.weight", .tensor_type = 8}, BT_ERR_UNSUPPORTED,
           "tensor blk.0.attn_norm.weight: a vector of type Q8_0");
    expect(&(struct edit){.arch = "qwen3"}, BT_ERR_INVALID, "no tensor blk.0.attn_q_norm.weight");
}

int main(void)
{
    struct bt_k_opts opts = {.n_threads = 1};
    struct bt_err err = {0};
    struct tiny_model t;

    CHECK_EQ(bt_k_create_cpu(&opts, &kctx, &err), BT_OK);
    tiny_llama(&t);
    CHECK_EQ(bt_st_open(tiny_write(&t, tiny_config, 3), &st, &err), BT_OK);
    test_same_logits();
    test_refused();
    bt_st_close(st);
    bt_k_destroy(kctx);
    (void)unlink(bt_temp_path("tiny.gguf"));
    tiny_clean();
    return bt_test_done();
}
