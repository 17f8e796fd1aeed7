/* Configuration and tensors that gemma 2 and 3 have in common. */

#include "model/gemma_int.h"

#include <math.h>
#include "base/float16.h"

static double cap(struct bt_hf *c, const char *key, double if_absent)
{
    return bt_hf_is_null(c, key) ? 0.0 : bt_hf_real(c, key, if_absent);
}

void bt_gemma_config_hf(struct bt_model *m, struct bt_hf *c, double attn_softcap,
                        double final_softcap)
{
    struct bt_model_config *g = &m->config;
    const struct bt_tensor *embed = bt_weights_find(m, "model.embed_tokens.weight");
    double scalar = bt_hf_real(c, "query_pre_attn_scalar", 256.0);

    g->head_dim = (uint32_t)bt_hf_int(c, "head_dim", 1, BT_HEAD_DIM_MAX, 256);
    g->tied = bt_hf_bool(c, "tie_word_embeddings", true);
    g->qkv_bias = g->o_bias = bt_hf_bool(c, "attention_bias", false);
    if (!bt_hf_has(c, "hidden_activation")) {
        g->act = BT_K_GELU_TANH;
    }
    if (scalar <= 0.0) {
        bt_hf_fail(c, BT_ERR_INVALID, "query_pre_attn_scalar", "not positive");
        return;
    }
    g->attn_scale = (float)(1.0 / sqrt(scalar));
    g->attn_softcap = (float)cap(c, "attn_logit_softcapping", attn_softcap);
    g->final_softcap = (float)cap(c, "final_logit_softcapping", final_softcap);
    g->norm_offset = 1.0F;
    /* The training code held the factor in the type of the weights. */
    g->embed_scale = sqrtf((float)g->dim);
    if (embed != NULL && embed->supported && embed->dtype == BT_DTYPE_BF16) {
        g->embed_scale = bt_bf16_to_f32(bt_f32_to_bf16(g->embed_scale));
    } else if (embed != NULL && embed->supported && embed->dtype == BT_DTYPE_F16) {
        g->embed_scale = bt_f16_to_f32(bt_f32_to_f16(g->embed_scale));
    }
}

void bt_gemma_config_gguf(struct bt_model *m, struct bt_meta *g, uint32_t n_layers_27b)
{
    struct bt_model_config *c = &m->config;
    double scale =
        1.0 / sqrt(c->n_layers == n_layers_27b ? (double)c->dim / c->n_heads : (double)c->head_dim);

    c->act = BT_K_GELU_TANH;
    c->embed_scale = sqrtf((float)c->dim);
    c->norm_offset = 0.0F; /* the converter added 1 to the weights */
    c->attn_scale = (float)bt_meta_f64_or(g, "attention.scale", scale);
    c->attn_softcap = (float)bt_meta_f64_or(g, "attn_logit_softcapping", 0.0);
    c->final_softcap = (float)bt_meta_f64_or(g, "final_logit_softcapping", 0.0);
}

void bt_gemma_bind(struct bt_binder *b, uint32_t layer, bool qk_norm)
{
    struct bt_model *m = bt_bind_model(b);
    struct bt_layer *l = &m->layers[layer];
    uint32_t dim = m->config.dim;

    bt_bind_vector(b, &l->attn_norm, "input_layernorm", "attn_norm", dim);
    bt_bind_vector(b, &l->post_attn_norm, "post_attention_layernorm", "post_attention_norm", dim);
    bt_bind_vector(b, &l->ffn_norm, "pre_feedforward_layernorm", "ffn_norm", dim);
    bt_bind_vector(b, &l->post_ffn_norm, "post_feedforward_layernorm", "post_ffw_norm", dim);
    bt_bind_attention(b, layer, qk_norm);
    bt_bind_mlp(b, layer);
}
