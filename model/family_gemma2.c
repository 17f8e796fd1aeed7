/* Gemma 2: sandwich norms, soft caps on scores and logits, every other layer (from the first) with
 * a sliding window. */

#include "model/gemma_int.h"

enum { N_LAYERS_27B = 46, WINDOW_DEFAULT = 4096 };

static bool even(uint32_t layer, uint32_t arg)
{
    (void)arg;
    return layer % 2 == 0;
}

static void config_hf(struct bt_model *m, struct bt_hf *c)
{
    bt_gemma_config_hf(m, c, 50.0, 30.0);
    bt_config_hf_windows(m, c, bt_config_hf_window(c, WINDOW_DEFAULT), even, 0);
}

static void config_gguf(struct bt_model *m, struct bt_meta *g)
{
    uint32_t window = bt_meta_u32_or(g, "attention.sliding_window", 1, UINT32_MAX, WINDOW_DEFAULT);

    bt_gemma_config_gguf(m, g, N_LAYERS_27B);
    for (uint32_t i = 0; i < m->config.n_layers; i++) {
        m->layers[i].window = even(i, 0) ? window : 0;
    }
}

static void bind(struct bt_binder *b, uint32_t layer)
{
    bt_gemma_bind(b, layer, false);
}

const struct bt_family bt_family_gemma2 = {
    .name = "gemma2",
    .hf_type = "gemma2",
    .gguf_arch = "gemma2",
    .config_hf = config_hf,
    .config_gguf = config_gguf,
    .bind = bind,
    .layer = bt_block_sandwich_layer,
};
