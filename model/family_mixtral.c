/* Mixtral: Mistral's attention, every feed-forward a mixture of experts (w1 gate, w3 up, w2 down). Its
 * GGUF files call themselves llama and tell by expert_count. */

#include "model/blocks_int.h"

static void config_hf(struct bt_model *m, struct bt_hf *c)
{
    struct bt_model_config *g = &m->config;

    g->n_experts = (uint32_t)bt_hf_require_int(c, "num_local_experts", 1, BT_EXPERTS_MAX);
    g->n_experts_used = (uint32_t)bt_hf_int(c, "num_experts_per_tok", 1, BT_EXPERTS_MAX, 2);
    g->expert_ffn_dim = g->ffn_dim;
    g->norm_topk = true;
    g->n_ropes = 1;
    bt_config_hf_rope(c, &g->ropes[0], "rope_parameters", "rope_theta", "rope_scaling", 1000000.0);
    bt_config_hf_window_all(m, c, bt_config_hf_window(c, 0));
    for (uint32_t i = 0; i < g->n_layers; i++) {
        m->layers[i].sparse = true;
    }
}

static void config_gguf(struct bt_model *m, struct bt_meta *g)
{
    m->config.rope_interleaved = true;
    bt_config_gguf_window_all(m, g);
    bt_config_gguf_experts(m, g, "feed_forward_length");
    for (uint32_t i = 0; i < m->config.n_layers; i++) {
        m->layers[i].sparse = true;
    }
}

static void bind(struct bt_binder *b, uint32_t layer)
{
    struct bt_model *m = bt_bind_model(b);
    const struct bt_model_config *c = &m->config;
    struct bt_layer *l = &m->layers[layer];
    static const char experts[] = "block_sparse_moe.experts";

    bt_bind_prenorms(b, layer);
    bt_bind_attention(b, layer, false);
    bt_bind_linear(b, &l->router, "block_sparse_moe.gate", "ffn_gate_inp", c->n_experts, c->dim,
                   false);
    bt_bind_experts(b, &l->expert_gate, experts, "w1", "ffn_gate", c->expert_ffn_dim, c->dim);
    bt_bind_experts(b, &l->expert_up, experts, "w3", "ffn_up", c->expert_ffn_dim, c->dim);
    bt_bind_experts(b, &l->expert_down, experts, "w2", "ffn_down", c->dim, c->expert_ffn_dim);
}

const struct bt_family bt_family_mixtral = {
    .name = "mixtral",
    .hf_type = "mixtral",
    .gguf_arch = "llama",
    .config_hf = config_hf,
    .config_gguf = config_gguf,
    .bind = bind,
    .layer = bt_block_prenorm_layer,
};
