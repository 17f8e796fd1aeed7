/* Qwen 3, dense: per-head norms on q and k before rotation. */

#include "model/blocks_int.h"

static void config_hf(struct bt_model *m, struct bt_hf *c)
{
    m->config.head_dim = (uint32_t)bt_hf_int(c, "head_dim", 1, BT_HEAD_DIM_MAX, 128);
    m->config.qkv_bias = m->config.o_bias = bt_hf_bool(c, "attention_bias", false);
    bt_config_hf_qwen_windows(m, c);
}

static void config_gguf(struct bt_model *m, struct bt_meta *g)
{
    bt_config_gguf_window_all(m, g);
}

static void bind(struct bt_binder *b, uint32_t layer)
{
    bt_bind_prenorms(b, layer);
    bt_bind_attention(b, layer, true);
    bt_bind_mlp(b, layer);
}

const struct bt_family bt_family_qwen3 = {
    .name = "qwen3",
    .hf_type = "qwen3",
    .gguf_arch = "qwen3",
    .config_hf = config_hf,
    .config_gguf = config_gguf,
    .bind = bind,
    .layer = bt_block_prenorm_layer,
};
