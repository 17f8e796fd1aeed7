/* Llama 2, 3 and relatives: grouped-query attention, SiLU feed-forward, optional biases. GGUF files
 * of this architecture store q and k permuted for interleaved rotation. */

#include "model/blocks_int.h"

static void config_hf(struct bt_model *m, struct bt_hf *c)
{
    m->config.qkv_bias = m->config.o_bias = bt_hf_bool(c, "attention_bias", false);
    m->config.mlp_bias = bt_hf_bool(c, "mlp_bias", false);
}

static void config_gguf(struct bt_model *m, struct bt_meta *g)
{
    m->config.rope_interleaved = true;
    bt_config_gguf_window_all(m, g);
}

static void bind(struct bt_binder *b, uint32_t layer)
{
    bt_bind_prenorms(b, layer);
    bt_bind_attention(b, layer, false);
    bt_bind_mlp(b, layer);
}

const struct bt_family bt_family_llama = {
    .name = "llama",
    .hf_type = "llama",
    .gguf_arch = "llama",
    .config_hf = config_hf,
    .config_gguf = config_gguf,
    .bind = bind,
    .layer = bt_block_prenorm_layer,
};
