/* Reads config.json into bt_model_config, in both spellings: as published (rope_theta,
 * rope_scaling) and as transformers 5 writes it (rope_parameters, layer_types). Owns what the
 * families share and the refusal of what would change the result unseen; a family adds its own
 * fields. */

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "model/model_int.h"

static const struct bt_family *const families[] = {
    &bt_family_llama, &bt_family_mistral, &bt_family_qwen2,
    &bt_family_qwen3, &bt_family_gemma2,  &bt_family_gemma3,
    &bt_family_phi3,  &bt_family_mixtral, &bt_family_qwen3_moe,
};

const struct bt_family *bt_config_hf_family(struct bt_hf *c)
{
    const char *type = bt_hf_str(c, "model_type", NULL);

    for (size_t i = 0; type != NULL && i < sizeof(families) / sizeof(families[0]); i++) {
        if (families[i]->hf_type != NULL && strcmp(families[i]->hf_type, type) == 0) {
            return families[i];
        }
    }
    if (type == NULL) {
        bt_hf_fail(c, BT_ERR_INVALID, "model_type", "missing");
    } else {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, "model_type", "\"%.64s\" is not supported", type);
    }
    return NULL;
}

static enum bt_k_act read_act(struct bt_hf *c, const char *key, const char *def)
{
    static const struct {
        const char *name;
        enum bt_k_act act;
    } acts[] = {{"silu", BT_K_SILU},
                {"swish", BT_K_SILU},
                {"gelu_pytorch_tanh", BT_K_GELU_TANH},
                {"gelu_new", BT_K_GELU_TANH},
                {"gelu", BT_K_GELU_ERF}};
    const char *name = bt_hf_str(c, key, def);

    for (size_t i = 0; i < sizeof(acts) / sizeof(acts[0]); i++) {
        if (strcmp(acts[i].name, name) == 0) {
            return acts[i].act;
        }
    }
    bt_hf_fail(c, BT_ERR_UNSUPPORTED, key, "activation \"%.64s\" is not supported", name);
    return BT_K_SILU;
}

/* Fields whose presence, or whose other value, means arithmetic that this code does not do. */
static void refuse_variants(struct bt_hf *c)
{
    static const char *const absent[] = {
        "compression_config", "text_config", "vision_config",
        "clip_qkv",           "alibi",       "attention_chunk_size"};
    static const char *const off[] = {"use_bidirectional_attention", "use_qk_norm",
                                      "is_encoder_decoder", "add_cross_attention"};

    for (size_t i = 0; i < sizeof(absent) / sizeof(absent[0]); i++) {
        if (bt_hf_has(c, absent[i])) {
            bt_hf_fail(c, BT_ERR_UNSUPPORTED, absent[i], "is not supported");
        }
    }
    for (size_t i = 0; i < sizeof(off) / sizeof(off[0]); i++) {
        if (bt_hf_bool(c, off[i], false)) {
            bt_hf_fail(c, BT_ERR_UNSUPPORTED, off[i], "true is not supported");
        }
    }
    if (!bt_hf_bool(c, "is_causal", true)) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, "is_causal", "false is not supported");
    }
    if (bt_hf_array_size(c, "architectures") > 0) {
        const char *name = bt_hf_array_str(c, "architectures", 0);
        if (strstr(name, "ForCausalLM") == NULL) {
            bt_hf_fail(c, BT_ERR_UNSUPPORTED, "architectures",
                       "%.64s is not a causal language model", name);
        }
    }
}

static const char *join(char out[192], const char *object, const char *key)
{
    (void)snprintf(out, 192, "%s.%s", object, key);
    return out;
}

static enum bt_rope_type rope_type(struct bt_hf *c, const char *object)
{
    char a[192], b[192];
    const char *key = bt_hf_has(c, join(a, object, "rope_type")) ? a : join(b, object, "type");
    const char *name = bt_hf_str(c, key, "default");

    if (strcmp(name, "default") == 0) {
        return BT_ROPE_DEFAULT;
    }
    if (strcmp(name, "linear") == 0) {
        return BT_ROPE_LINEAR;
    }
    if (strcmp(name, "llama3") == 0) {
        return BT_ROPE_LLAMA3;
    }
    if (strcmp(name, "yarn") == 0) {
        return BT_ROPE_YARN;
    }
    bt_hf_fail(c, BT_ERR_UNSUPPORTED, key, "rope type \"%.64s\" is not supported", name);
    return BT_ROPE_DEFAULT;
}

static void read_scaling(struct bt_hf *c, struct bt_rope_spec *s, const char *object)
{
    char key[192];

    if (bt_hf_has(c, join(key, object, "mrope_section"))) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, key, "is not supported");
    }
    s->type = rope_type(c, object);
    if (s->type == BT_ROPE_DEFAULT) {
        return;
    }
    double context = bt_hf_require_real(c, "max_position_embeddings");
    s->original_context =
        bt_hf_real(c, join(key, object, "original_max_position_embeddings"), context);
    /* Beside the object it has precedence, as upstream reads it. */
    s->original_context = bt_hf_real(c, "original_max_position_embeddings", s->original_context);
    if (s->type == BT_ROPE_YARN) {
        s->factor = bt_hf_real(c, join(key, object, "factor"), context / s->original_context);
        s->beta_fast = bt_hf_real(c, join(key, object, "beta_fast"), 32.0);
        s->beta_slow = bt_hf_real(c, join(key, object, "beta_slow"), 1.0);
        s->attention_factor = bt_hf_real(c, join(key, object, "attention_factor"), 0.0);
        s->mscale = bt_hf_real(c, join(key, object, "mscale"), 0.0);
        s->mscale_all_dim = bt_hf_real(c, join(key, object, "mscale_all_dim"), 0.0);
        s->truncate = bt_hf_bool(c, join(key, object, "truncate"), true);
        return;
    }
    s->factor = bt_hf_require_real(c, join(key, object, "factor"));
    if (s->type == BT_ROPE_LLAMA3) {
        s->low_freq_factor = bt_hf_require_real(c, join(key, object, "low_freq_factor"));
        s->high_freq_factor = bt_hf_require_real(c, join(key, object, "high_freq_factor"));
    }
}

void bt_config_hf_rope(struct bt_hf *c, struct bt_rope_spec *spec, const char *object,
                       const char *theta_key, const char *scaling_key, double theta_default)
{
    char key[192];
    bool v5 = bt_hf_is_object(c, object);

    if (!v5 && bt_hf_has(c, "rope_parameters")) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, "rope_parameters", "no object %s", object);
    }
    if (strcmp(object, "rope_parameters") == 0 &&
        (bt_hf_has(c, "rope_parameters.full_attention") ||
         bt_hf_has(c, "rope_parameters.sliding_attention"))) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, "rope_parameters",
                   "by layer type is not supported for this model_type");
    }
    spec->theta = bt_hf_real(c, theta_key, theta_default);
    if (v5) {
        spec->theta = bt_hf_real(c, join(key, object, "rope_theta"), spec->theta);
        read_scaling(c, spec, object);
    } else if (scaling_key != NULL && bt_hf_has(c, scaling_key)) {
        if (!bt_hf_is_object(c, scaling_key)) {
            bt_hf_fail(c, BT_ERR_INVALID, scaling_key, "not an object");
        }
        read_scaling(c, spec, scaling_key);
    }
}

static void read_shared(struct bt_model_config *g, struct bt_hf *c)
{
    uint32_t bos;

    g->n_layers = (uint32_t)bt_hf_require_int(c, "num_hidden_layers", 1, BT_LAYERS_MAX);
    g->dim = (uint32_t)bt_hf_require_int(c, "hidden_size", 1, BT_DIM_MAX);
    g->n_heads = (uint32_t)bt_hf_require_int(c, "num_attention_heads", 1, BT_DIM_MAX);
    g->n_kv_heads = (uint32_t)bt_hf_int(c, "num_key_value_heads", 1, BT_DIM_MAX, g->n_heads);
    g->head_dim = (uint32_t)bt_hf_int(c, "head_dim", 1, BT_HEAD_DIM_MAX, g->dim / g->n_heads);
    g->vocab = (uint32_t)bt_hf_require_int(c, "vocab_size", 1, BT_VOCAB_MAX);
    g->context = (uint32_t)bt_hf_require_int(c, "max_position_embeddings", 1, BT_CONTEXT_MAX);
    g->ffn_dim = (uint32_t)bt_hf_require_int(c, "intermediate_size", 1, BT_DIM_MAX * 4);
    g->rms_eps = bt_hf_real(c, "rms_norm_eps", 1e-6);
    g->act =
        read_act(c, bt_hf_has(c, "hidden_activation") ? "hidden_activation" : "hidden_act", "silu");
    g->tied = bt_hf_bool(c, "tie_word_embeddings", false);
    g->embed_scale = 1.0F;
    g->n_eos = (uint32_t)bt_hf_token_ids(c, "eos_token_id", g->eos, BT_MODEL_EOS_MAX);
    g->bos = bt_hf_token_ids(c, "bos_token_id", &bos, 1) == 1 ? (int64_t)bos : -1;
}

/* What a share of the head's values is rotated; phi3 has one below 1. */
static void rope_dims(struct bt_model_config *g, struct bt_hf *c)
{
    double part = bt_hf_real(c, "partial_rotary_factor", 1.0);

    part = bt_hf_real(c, "rope_parameters.partial_rotary_factor", part);
    if (part <= 0.0 || part > 1.0) {
        bt_hf_fail(c, BT_ERR_INVALID, "partial_rotary_factor", "not above 0 and at most 1");
        return;
    }
    for (uint32_t i = 0; i < g->n_ropes; i++) {
        g->ropes[i].dim = (uint32_t)(g->head_dim * part);
    }
}

enum bt_status bt_config_hf_read(struct bt_model *m, struct bt_hf *c, struct bt_err *err)
{
    struct bt_model_config *g = &m->config;

    refuse_variants(c);
    bt_quant_config_read(m, c);
    read_shared(g, c);
    enum bt_status st = bt_hf_status(c, err);
    if (st == BT_OK) {
        st = bt_config_layers_alloc(m, err);
    }
    if (st != BT_OK) {
        return st;
    }
    m->family->config_hf(m, c);
    if (g->n_ropes == 0) {
        g->n_ropes = 1;
        bt_config_hf_rope(c, &g->ropes[0], "rope_parameters", "rope_theta", "rope_scaling",
                          10000.0);
    }
    rope_dims(g, c);
    st = bt_hf_status(c, err);
    if (st == BT_OK) {
        st = bt_config_check(m, bt_hf_path(c), err);
    }
    return st == BT_OK ? bt_config_groups(m, bt_hf_path(c), err) : st;
}

void bt_config_hf_windows(struct bt_model *m, struct bt_hf *c, uint32_t window,
                          bool (*is_sliding)(uint32_t layer, uint32_t arg), uint32_t arg)
{
    int64_t n = bt_hf_array_size(c, "layer_types");

    if (n >= 0 && n != m->config.n_layers) {
        bt_hf_fail(c, BT_ERR_INVALID, "layer_types", "%lld entries for %u layers", (long long)n,
                   m->config.n_layers);
        return;
    }
    for (uint32_t i = 0; i < m->config.n_layers; i++) {
        bool sliding = window != 0 && is_sliding(i, arg);
        if (n >= 0) {
            const char *type = bt_hf_array_str(c, "layer_types", i);
            sliding = strcmp(type, "sliding_attention") == 0;
            if (!sliding && strcmp(type, "full_attention") != 0) {
                bt_hf_fail(c, BT_ERR_UNSUPPORTED, "layer_types", "\"%.64s\" is not supported",
                           type);
            }
        }
        if (sliding && window == 0) {
            bt_hf_fail(c, BT_ERR_INVALID, "layer_types", "a sliding layer, but no sliding_window");
        }
        m->layers[i].window = sliding ? window : 0;
    }
}

static bool always(uint32_t layer, uint32_t arg)
{
    (void)layer;
    (void)arg;
    return true;
}

static bool from_layer(uint32_t layer, uint32_t first)
{
    return layer >= first;
}

uint32_t bt_config_hf_window(struct bt_hf *c, uint32_t if_absent)
{
    uint32_t def = bt_hf_is_null(c, "sliding_window") ? 0 : if_absent;

    return (uint32_t)bt_hf_int(c, "sliding_window", 1, UINT32_MAX, def);
}

void bt_config_hf_window_all(struct bt_model *m, struct bt_hf *c, uint32_t window)
{
    bt_config_hf_windows(m, c, window, always, 0);
}

void bt_config_hf_qwen_windows(struct bt_model *m, struct bt_hf *c)
{
    uint32_t window = bt_hf_bool(c, "use_sliding_window", false) ? bt_config_hf_window(c, 4096) : 0;

    bt_config_hf_windows(m, c, window, from_layer,
                         (uint32_t)bt_hf_int(c, "max_window_layers", 0, UINT32_MAX, 28));
}
