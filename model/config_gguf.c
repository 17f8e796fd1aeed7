/* Reads GGUF metadata into bt_model_config. Owns the keys that the architectures share and the
 * refusal of what would change the result unseen; a family adds its own keys. */

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/mem.h"
#include "model/model_int.h"

static const struct bt_family *const families[] = {
    &bt_family_llama,  &bt_family_qwen2, &bt_family_qwen3,     &bt_family_gemma2,
    &bt_family_gemma3, &bt_family_phi3,  &bt_family_qwen3_moe,
};

struct bt_meta {
    const struct bt_gguf *g;
    const char *arch;
    struct bt_err first;
};

enum { META_KEY_MAX = 128 };

static const char *full_key(const struct bt_meta *g, const char *key, char out[META_KEY_MAX])
{
    (void)snprintf(out, META_KEY_MAX, "%s.%s", g->arch, key);
    return out;
}

void bt_meta_fail(struct bt_meta *g, enum bt_status st, const char *key, const char *text)
{
    char full[META_KEY_MAX];

    if (g->first.status == BT_OK) {
        (void)bt_err_set(&g->first, st, "%s: key %s: %s", bt_gguf_path(g->g),
                         full_key(g, key, full), text);
    }
}

bool bt_meta_has(struct bt_meta *g, const char *key)
{
    char full[META_KEY_MAX];

    return bt_gguf_find(g->g, full_key(g, key, full)) != NULL;
}

uint32_t bt_meta_u32_or(struct bt_meta *g, const char *key, uint32_t min, uint32_t max,
                        uint32_t def)
{
    char full[META_KEY_MAX], text[64];
    struct bt_err err;
    uint64_t v = def;
    enum bt_status st = bt_gguf_get_u64(g->g, full_key(g, key, full), &v, &err);

    if (st == BT_ERR_NOT_FOUND) {
        return def;
    }
    if (st != BT_OK) {
        if (g->first.status == BT_OK) {
            g->first = err;
        }
        return def;
    }
    if (v < min || v > max) {
        (void)snprintf(text, sizeof(text), "%llu is outside %u … %u", (unsigned long long)v, min,
                       max);
        bt_meta_fail(g, BT_ERR_INVALID, key, text);
        return def;
    }
    return (uint32_t)v;
}

uint32_t bt_meta_u32(struct bt_meta *g, const char *key, uint32_t min, uint32_t max)
{
    if (!bt_meta_has(g, key)) {
        bt_meta_fail(g, BT_ERR_INVALID, key, "missing");
    }
    return bt_meta_u32_or(g, key, min, max, min);
}

double bt_meta_f64_or(struct bt_meta *g, const char *key, double def)
{
    char full[META_KEY_MAX];
    struct bt_err err;
    double v = def;
    enum bt_status st = bt_gguf_get_f64(g->g, full_key(g, key, full), &v, &err);

    if (st != BT_OK && st != BT_ERR_NOT_FOUND && g->first.status == BT_OK) {
        g->first = err;
    }
    return v;
}

void bt_config_gguf_window_all(struct bt_model *m, struct bt_meta *g)
{
    uint32_t window = bt_meta_u32_or(g, "attention.sliding_window", 0, UINT32_MAX, 0);

    for (uint32_t i = 0; i < m->config.n_layers; i++) {
        m->layers[i].window = window;
    }
}

/* Routing that is not: softmax over all experts, the best few, weights that sum to 1. */
static void refuse_routing(struct bt_meta *g)
{
    static const char *const keys[] = {
        "expert_shared_count",       "expert_shared_feed_forward_length", "expert_group_count",
        "expert_group_used_count",   "expert_chunk_feed_forward_length",  "moe_every_n_layers",
        "interleave_moe_layer_step", "leading_dense_block_count"};
    double scale = bt_meta_f64_or(g, "expert_weights_scale", 0.0);
    bool norm = true;
    char full[META_KEY_MAX];
    struct bt_err err;

    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        if (bt_meta_f64_or(g, keys[i], 0.0) != 0.0) {
            bt_meta_fail(g, BT_ERR_UNSUPPORTED, keys[i], "is not supported");
        }
    }
    if (scale != 0.0 && scale != 1.0) {
        bt_meta_fail(g, BT_ERR_UNSUPPORTED, "expert_weights_scale", "only 1 is supported");
    }
    if (bt_meta_u32_or(g, "expert_gating_func", 0, UINT32_MAX, 1) > 1) {
        bt_meta_fail(g, BT_ERR_UNSUPPORTED, "expert_gating_func", "only softmax is supported");
    }
    if (bt_gguf_get_bool(g->g, full_key(g, "expert_weights_norm", full), &norm, &err) == BT_OK &&
        !norm) {
        bt_meta_fail(g, BT_ERR_UNSUPPORTED, "expert_weights_norm", "false is not supported");
    }
}

void bt_config_gguf_experts(struct bt_model *m, struct bt_meta *g, const char *ffn_key)
{
    struct bt_model_config *c = &m->config;
    char name[64];

    c->n_experts = bt_meta_u32(g, "expert_count", 1, BT_EXPERTS_MAX);
    c->n_experts_used = bt_meta_u32(g, "expert_used_count", 1, BT_EXPERTS_MAX);
    c->expert_ffn_dim = bt_meta_u32(g, ffn_key, 1, BT_DIM_MAX * 4);
    c->norm_topk = true;
    refuse_routing(g);
    for (uint32_t i = 0; i < c->n_layers; i++) {
        (void)snprintf(name, sizeof(name), "blk.%u.ffn_gate_inp.weight", i);
        m->layers[i].sparse = bt_gguf_tensor_find(m->gguf, name) != NULL;
    }
}

const struct bt_gguf *bt_meta_file(const struct bt_meta *g)
{
    return g->g;
}

static bool str_is(const char *s, size_t n, const char *want)
{
    return n == strlen(want) && memcmp(s, want, n) == 0;
}

const struct bt_family *bt_config_gguf_family(const struct bt_gguf *g, struct bt_err *err)
{
    const char *arch;
    size_t n;

    if (bt_gguf_get_str(g, "general.architecture", &arch, &n, err) != BT_OK) {
        return NULL;
    }
    for (size_t i = 0; i < sizeof(families) / sizeof(families[0]); i++) {
        if (str_is(arch, n, families[i]->gguf_arch)) {
            uint64_t experts = 0;
            bool mixture = families[i] == &bt_family_llama &&
                           bt_gguf_get_u64(g, "llama.expert_count", &experts, err) == BT_OK &&
                           experts > 0;
            return mixture ? &bt_family_mixtral : families[i];
        }
    }
    (void)bt_err_set(err, BT_ERR_UNSUPPORTED, "%s: general.architecture \"%.*s\" is not supported",
                     bt_gguf_path(g), n < 64 ? (int)n : 64, arch);
    return NULL;
}

/* Keys that name arithmetic which this code does not do. */
static void refuse_variants(struct bt_meta *g)
{
    static const char *const keys[] = {"logit_scale",
                                       "residual_scale",
                                       "embedding_scale",
                                       "attention.clamp_kqv",
                                       "attention.max_alibi_bias",
                                       "rope.scaling.alpha",
                                       "rope.scaling.yarn_log_multiplier"};
    uint64_t splits = 1;
    bool causal = true;
    char full[META_KEY_MAX];
    struct bt_err err;

    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        if (bt_meta_f64_or(g, keys[i], 0.0) != 0.0) {
            bt_meta_fail(g, BT_ERR_UNSUPPORTED, keys[i], "is not supported");
        }
    }
    if (bt_gguf_get_bool(g->g, full_key(g, "attention.causal", full), &causal, &err) == BT_OK &&
        !causal) {
        bt_meta_fail(g, BT_ERR_UNSUPPORTED, "attention.causal", "false is not supported");
    }
    if (bt_gguf_get_u64(g->g, "split.count", &splits, &err) == BT_OK && splits > 1 &&
        g->first.status == BT_OK) {
        (void)bt_err_set(&g->first, BT_ERR_UNSUPPORTED,
                         "%s: split.count: split files are not supported", bt_gguf_path(g->g));
    }
}

static void read_scaling(struct bt_meta *g, struct bt_rope_spec *s)
{
    char full[META_KEY_MAX];
    const char *type = "none";
    size_t n = 4;
    struct bt_err err;

    if (bt_gguf_get_str(g->g, full_key(g, "rope.scaling.type", full), &type, &n, &err) != BT_OK) {
        double scale = bt_meta_f64_or(g, "rope.scale_linear", 1.0); /* the older key */
        s->type = scale != 1.0 ? BT_ROPE_LINEAR : BT_ROPE_DEFAULT;
        s->factor = scale;
        return;
    }
    if (str_is(type, n, "none")) {
        return;
    }
    s->factor = bt_meta_f64_or(g, "rope.scaling.factor", 1.0);
    if (str_is(type, n, "linear")) {
        s->type = BT_ROPE_LINEAR;
        return;
    }
    if (!str_is(type, n, "yarn")) {
        bt_meta_fail(g, BT_ERR_UNSUPPORTED, "rope.scaling.type",
                     "only none, linear and yarn are supported");
        return;
    }
    s->type = BT_ROPE_YARN;
    s->original_context = bt_meta_u32(g, "rope.scaling.original_context_length", 1, BT_CONTEXT_MAX);
    s->beta_fast = bt_meta_f64_or(g, "rope.scaling.yarn_beta_fast", 32.0);
    s->beta_slow = bt_meta_f64_or(g, "rope.scaling.yarn_beta_slow", 1.0);
    s->truncate = true;
    double attn = bt_meta_f64_or(g, "rope.scaling.attn_factor",
                                 bt_meta_f64_or(g, "rope.scaling.yarn_attn_factor", 1.0));
    if (attn != 1.0) {
        s->attention_factor = attn * (0.1 * log(s->factor) + 1.0);
    }
    if (bt_meta_f64_or(g, "rope.scaling.yarn_ext_factor", 1.0) != 1.0) {
        bt_meta_fail(g, BT_ERR_UNSUPPORTED, "rope.scaling.yarn_ext_factor", "only 1 is supported");
    }
}

static void read_shared(struct bt_model *m, struct bt_meta *g)
{
    struct bt_model_config *c = &m->config;
    const struct bt_tensor *embed = bt_gguf_tensor_find(m->gguf, "token_embd.weight");

    c->n_layers = bt_meta_u32(g, "block_count", 1, BT_LAYERS_MAX);
    c->dim = bt_meta_u32(g, "embedding_length", 1, BT_DIM_MAX);
    c->n_heads = bt_meta_u32(g, "attention.head_count", 1, BT_DIM_MAX);
    c->n_kv_heads = bt_meta_u32_or(g, "attention.head_count_kv", 1, BT_DIM_MAX, c->n_heads);
    c->head_dim =
        bt_meta_u32_or(g, "attention.key_length", 1, BT_HEAD_DIM_MAX, c->dim / c->n_heads);
    if (bt_meta_u32_or(g, "attention.value_length", 1, BT_HEAD_DIM_MAX, c->head_dim) !=
        c->head_dim) {
        bt_meta_fail(g, BT_ERR_UNSUPPORTED, "attention.value_length",
                     "differs from the key length");
    }
    c->context = bt_meta_u32(g, "context_length", 1, BT_CONTEXT_MAX);
    c->ffn_dim = bt_meta_u32(g, "feed_forward_length", 1, BT_DIM_MAX * 4);
    if (!bt_meta_has(g, "attention.layer_norm_rms_epsilon")) {
        bt_meta_fail(g, BT_ERR_INVALID, "attention.layer_norm_rms_epsilon", "missing");
    }
    c->rms_eps = bt_meta_f64_or(g, "attention.layer_norm_rms_epsilon", 0.0);
    c->vocab = embed != NULL && embed->n_dims == 2 && embed->shape[0] <= BT_VOCAB_MAX
                   ? (uint32_t)embed->shape[0]
                   : 0;
    c->act = BT_K_SILU;
    c->embed_scale = 1.0F;
    c->tied = bt_gguf_tensor_find(m->gguf, "output.weight") == NULL;
    c->qkv_bias = bt_gguf_tensor_find(m->gguf, "blk.0.attn_q.bias") != NULL;
    c->o_bias = bt_gguf_tensor_find(m->gguf, "blk.0.attn_output.bias") != NULL;
    c->mlp_bias = bt_gguf_tensor_find(m->gguf, "blk.0.ffn_down.bias") != NULL;
    c->n_ropes = 1;
    c->ropes[0].theta = bt_meta_f64_or(g, "rope.freq_base", 10000.0);
    c->ropes[0].dim = bt_meta_u32_or(g, "rope.dimension_count", 2, BT_HEAD_DIM_MAX, c->head_dim);
    read_scaling(g, &c->ropes[0]);
}

static void read_tokens(struct bt_model_config *c, const struct bt_gguf *g)
{
    static const char *const eos[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                      "tokenizer.ggml.eom_token_id"};
    struct bt_err err;
    uint64_t id;

    for (size_t i = 0; i < sizeof(eos) / sizeof(eos[0]); i++) {
        bool seen = false;
        if (bt_gguf_get_u64(g, eos[i], &id, &err) != BT_OK || id > UINT32_MAX) {
            continue;
        }
        for (uint32_t k = 0; k < c->n_eos; k++) {
            seen |= c->eos[k] == id;
        }
        if (!seen) {
            c->eos[c->n_eos++] = (uint32_t)id;
        }
    }
    c->bos =
        bt_gguf_get_u64(g, "tokenizer.ggml.bos_token_id", &id, &err) == BT_OK && id <= UINT32_MAX
            ? (int64_t)id
            : -1;
}

/* rope_freqs.weight: what each frequency is divided by; how GGUF stores Llama 3's scaling. */
static enum bt_status read_divisors(struct bt_model *m, struct bt_err *err)
{
    const struct bt_tensor *t = bt_gguf_tensor_find(m->gguf, "rope_freqs.weight");
    uint32_t n = m->config.ropes[0].dim / 2;

    if (bt_gguf_tensor_find(m->gguf, "rope_factors_long.weight") != NULL) {
        return bt_err_set(err, BT_ERR_UNSUPPORTED,
                          "%s: tensor rope_factors_long.weight: longrope is not supported",
                          m->path);
    }
    if (t == NULL) {
        return BT_OK;
    }
    if (!t->supported || t->dtype != BT_DTYPE_F32 || t->n_dims != 1 || t->shape[0] != n) {
        return bt_err_set(err, BT_ERR_INVALID, "%s: tensor rope_freqs.weight is not %u F32 values",
                          m->path, n);
    }
    m->rope_divisors = bt_arena_alloc(&m->arena, n * sizeof(float));
    if (m->rope_divisors == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", m->path);
    }
    memcpy(m->rope_divisors, t->data, n * sizeof(float));
    for (uint32_t i = 0; i < n; i++) {
        if (!isfinite(m->rope_divisors[i]) || m->rope_divisors[i] <= 0.0F) {
            return bt_err_set(err, BT_ERR_INVALID,
                              "%s: tensor rope_freqs.weight: value %u is not positive", m->path, i);
        }
    }
    return BT_OK;
}

enum bt_status bt_config_gguf_read(struct bt_model *m, struct bt_err *err)
{
    struct bt_meta g = {.g = m->gguf, .arch = m->family->gguf_arch};

    refuse_variants(&g);
    read_shared(m, &g);
    read_tokens(&m->config, m->gguf);
    if (m->config.vocab == 0 && g.first.status == BT_OK) {
        (void)bt_err_set(&g.first, BT_ERR_INVALID,
                         "%s: no tensor token_embd.weight [vocabulary, dimension]", m->path);
    }
    enum bt_status st =
        g.first.status == BT_OK ? bt_config_layers_alloc(m, &g.first) : g.first.status;
    if (st == BT_OK) {
        m->family->config_gguf(m, &g);
        if (m->config.n_experts == 0 && bt_meta_f64_or(&g, "expert_count", 0.0) != 0.0) {
            bt_meta_fail(&g, BT_ERR_UNSUPPORTED, "expert_count",
                         "is not supported for this architecture");
        }
        st = g.first.status;
    }
    if (st != BT_OK) {
        if (err != NULL) {
            *err = g.first;
        }
        return st;
    }
    st = bt_config_check(m, m->path, err);
    if (st == BT_OK) {
        st = bt_config_groups(m, m->path, err);
    }
    return st == BT_OK ? read_divisors(m, err) : st;
}
