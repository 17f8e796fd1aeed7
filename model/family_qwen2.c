/* Qwen 2 and 2.5: biases on q, k and v; a sliding window on the upper layers if switched on. */

#include "model/blocks_int.h"

static void config_hf(struct bt_model *m, struct bt_hf *c)
{
    m->config.qkv_bias = true;
    bt_config_hf_qwen_windows(m, c);
}

static void config_gguf(struct bt_model *m, struct bt_meta *g)
{
    bt_config_gguf_window_all(m, g);
}

static void bind(struct bt_binder *b, uint32_t layer)
{
    bt_bind_prenorms(b, layer);
    bt_bind_attention(b, layer, false);
    bt_bind_mlp(b, layer);
}

const struct bt_family bt_family_qwen2 = {
    .name = "qwen2",
    .hf_type = "qwen2",
    .gguf_arch = "qwen2",
    .config_hf = config_hf,
    .config_gguf = config_gguf,
    .bind = bind,
    .layer = bt_block_prenorm_layer,
};
