/* Mistral: Llama's layer with one sliding window on every layer. Its GGUF files call themselves
 * llama. */

#include "model/blocks_int.h"

static void config_hf(struct bt_model *m, struct bt_hf *c)
{
    bt_config_hf_window_all(m, c, bt_config_hf_window(c, 4096));
}

static void bind(struct bt_binder *b, uint32_t layer)
{
    bt_bind_prenorms(b, layer);
    bt_bind_attention(b, layer, false);
    bt_bind_mlp(b, layer);
}

const struct bt_family bt_family_mistral = {
    .name = "mistral",
    .hf_type = "mistral",
    .gguf_arch = "llama",
    .config_hf = config_hf,
    .bind = bind,
    .layer = bt_block_prenorm_layer,
};
