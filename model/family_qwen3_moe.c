/* Qwen 3 with a mixture of experts on the layers that decoder_sparse_step and mlp_only_layers pick.
 */

#include "model/blocks_int.h"

static void mark_sparse(struct bt_model *m, struct bt_hf *c)
{
    uint32_t step = (uint32_t)bt_hf_int(c, "decoder_sparse_step", 1, BT_LAYERS_MAX, 1);
    int64_t n = bt_hf_array_size(c, "mlp_only_layers");

    for (uint32_t i = 0; i < m->config.n_layers; i++) {
        m->layers[i].sparse = m->config.n_experts > 0 && (i + 1) % step == 0;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t layer =
            bt_hf_array_int(c, "mlp_only_layers", (size_t)i, 0, (int64_t)m->config.n_layers - 1);
        m->layers[layer].sparse = false;
    }
}

static void config_hf(struct bt_model *m, struct bt_hf *c)
{
    struct bt_model_config *g = &m->config;
    const char *experts = bt_hf_has(c, "num_experts") ? "num_experts" : "num_local_experts";

    g->qkv_bias = g->o_bias = bt_hf_bool(c, "attention_bias", false);
    g->n_experts = (uint32_t)bt_hf_require_int(c, experts, 0, BT_EXPERTS_MAX);
    g->n_experts_used = (uint32_t)bt_hf_int(c, "num_experts_per_tok", 1, BT_EXPERTS_MAX, 8);
    g->expert_ffn_dim = (uint32_t)bt_hf_require_int(c, "moe_intermediate_size", 1, BT_DIM_MAX);
    g->norm_topk = bt_hf_bool(c, "norm_topk_prob", false);
    if (bt_hf_has(c, "mlp_layer_types")) {
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, "mlp_layer_types",
                   "is not supported: use decoder_sparse_step");
    }
    /* Unlike the dense models, a switched-on window is on every layer. */
    bt_config_hf_window_all(
        m, c, bt_hf_bool(c, "use_sliding_window", false) ? bt_config_hf_window(c, 4096) : 0);
    mark_sparse(m, c);
}

static void config_gguf(struct bt_model *m, struct bt_meta *g)
{
    bt_config_gguf_window_all(m, g);
    bt_config_gguf_experts(m, g, "expert_feed_forward_length");
}

static void bind(struct bt_binder *b, uint32_t layer)
{
    struct bt_model *m = bt_bind_model(b);
    const struct bt_model_config *c = &m->config;
    struct bt_layer *l = &m->layers[layer];

    bt_bind_prenorms(b, layer);
    bt_bind_attention(b, layer, true);
    if (!l->sparse) {
        bt_bind_mlp(b, layer);
        return;
    }
    bt_bind_linear(b, &l->router, "mlp.gate", "ffn_gate_inp", c->n_experts, c->dim, false);
    bt_bind_experts(b, &l->expert_gate, "mlp.experts", "gate_proj", "ffn_gate", c->expert_ffn_dim,
                    c->dim);
    bt_bind_experts(b, &l->expert_up, "mlp.experts", "up_proj", "ffn_up", c->expert_ffn_dim,
                    c->dim);
    bt_bind_experts(b, &l->expert_down, "mlp.experts", "down_proj", "ffn_down", c->dim,
                    c->expert_ffn_dim);
}

const struct bt_family bt_family_qwen3_moe = {
    .name = "qwen3_moe",
    .hf_type = "qwen3_moe",
    .gguf_arch = "qwen3moe",
    .config_hf = config_hf,
    .config_gguf = config_gguf,
    .bind = bind,
    .layer = bt_block_prenorm_layer,
};
