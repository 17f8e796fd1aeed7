/* Phi-3 and Phi-4: q, k and v in one matrix, gate and up in one matrix; part of each head is
 * rotated. */

#include "model/blocks_int.h"

static void config_hf(struct bt_model *m, struct bt_hf *c)
{
    bt_config_hf_window_all(m, c, bt_config_hf_window(c, 0));
}

static void config_gguf(struct bt_model *m, struct bt_meta *g)
{
    bt_config_gguf_window_all(m, g);
}

static void bind(struct bt_binder *b, uint32_t layer)
{
    struct bt_model *m = bt_bind_model(b);
    const struct bt_model_config *c = &m->config;
    struct bt_layer *l = &m->layers[layer];
    uint32_t q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;

    bt_bind_prenorms(b, layer);
    bt_bind_linear(b, &l->qkv, "self_attn.qkv_proj", "attn_qkv", q + 2 * kv, c->dim, c->qkv_bias);
    bt_bind_linear(b, &l->o, "self_attn.o_proj", "attn_output", c->dim, q, c->o_bias);
    bt_bind_linear(b, &l->gate_up, "mlp.gate_up_proj", "ffn_up", 2 * c->ffn_dim, c->dim,
                   c->mlp_bias);
    bt_bind_linear(b, &l->down, "mlp.down_proj", "ffn_down", c->dim, c->ffn_dim, c->mlp_bias);
}

const struct bt_family bt_family_phi3 = {
    .name = "phi3",
    .hf_type = "phi3",
    .gguf_arch = "phi3",
    .config_hf = config_hf,
    .config_gguf = config_gguf,
    .bind = bind,
    .layer = bt_block_prenorm_layer,
};
