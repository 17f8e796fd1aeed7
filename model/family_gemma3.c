/* Gemma 3, text: sandwich norms, per-head norms on q and k, local layers (sliding window, their own
 * unscaled rope base) between global ones. */

#include "model/gemma_int.h"

enum {
    N_LAYERS_27B = 62,
    WINDOW_DEFAULT = 4096,
    PATTERN_DEFAULT = 6,
    ROPE_GLOBAL = 0,
    ROPE_LOCAL = 1
};
static const double THETA_GLOBAL = 1000000.0, THETA_LOCAL = 10000.0;

static bool local(uint32_t layer, uint32_t pattern)
{
    return (layer + 1) % pattern != 0;
}

/* From here on, local layers are those that the reading of windows found sliding. */
static void set_ropes(struct bt_model *m)
{
    m->config.n_ropes = 2;
    for (uint32_t i = 0; i < m->config.n_layers; i++) {
        m->layers[i].rope = m->layers[i].window != 0 ? ROPE_LOCAL : ROPE_GLOBAL;
    }
}

static void config_hf(struct bt_model *m, struct bt_hf *c)
{
    const char *key = bt_hf_has(c, "sliding_window_pattern") ? "sliding_window_pattern"
                                                             : "_sliding_window_pattern";
    uint32_t pattern = (uint32_t)bt_hf_int(c, key, 1, BT_LAYERS_MAX, PATTERN_DEFAULT);

    bt_gemma_config_hf(m, c, 0.0, 0.0);
    if (m->config.attn_softcap != 0.0F) { /* upstream reads it and does nothing with it */
        bt_hf_fail(c, BT_ERR_UNSUPPORTED, "attn_logit_softcapping",
                   "is not supported for gemma3_text");
    }
    bt_config_hf_windows(m, c, bt_config_hf_window(c, WINDOW_DEFAULT), local, pattern);
    bt_config_hf_rope(c, &m->config.ropes[ROPE_GLOBAL], "rope_parameters.full_attention",
                      "rope_theta", "rope_scaling", THETA_GLOBAL);
    bt_config_hf_rope(c, &m->config.ropes[ROPE_LOCAL], "rope_parameters.sliding_attention",
                      "rope_local_base_freq", NULL, THETA_LOCAL);
    set_ropes(m);
}

/* Which layers are local: a list of flags, a period, or the usual period. */
static void read_pattern(struct bt_model *m, struct bt_meta *g, uint32_t window)
{
    static const char key[] = "gemma3.attention.sliding_window_pattern";
    struct bt_gguf_iter it;
    struct bt_err err;
    double flag;
    uint32_t n = 0;

    if (bt_gguf_iter_numbers(bt_meta_file(g), key, &it, &err) == BT_OK) {
        while (n < m->config.n_layers && bt_gguf_next_f64(&it, &flag)) {
            m->layers[n++].window = flag != 0.0 ? window : 0;
        }
        if (n < m->config.n_layers) {
            bt_meta_fail(g, BT_ERR_INVALID, "attention.sliding_window_pattern",
                         "shorter than the layers");
        }
        return;
    }
    uint32_t pattern =
        bt_meta_u32_or(g, "attention.sliding_window_pattern", 1, BT_LAYERS_MAX, PATTERN_DEFAULT);
    for (uint32_t i = 0; i < m->config.n_layers; i++) {
        m->layers[i].window = local(i, pattern) ? window : 0;
    }
}

static void config_gguf(struct bt_model *m, struct bt_meta *g)
{
    struct bt_model_config *c = &m->config;

    bt_gemma_config_gguf(m, g, N_LAYERS_27B);
    if (c->attn_softcap != 0.0F) {
        bt_meta_fail(g, BT_ERR_UNSUPPORTED, "attn_logit_softcapping", "is not supported");
    }
    read_pattern(m, g,
                 bt_meta_u32_or(g, "attention.sliding_window", 1, UINT32_MAX, WINDOW_DEFAULT));
    c->ropes[ROPE_GLOBAL].theta = bt_meta_f64_or(g, "rope.freq_base", THETA_GLOBAL);
    c->ropes[ROPE_LOCAL] =
        (struct bt_rope_spec){.dim = c->ropes[ROPE_GLOBAL].dim,
                              .theta = bt_meta_f64_or(g, "rope.freq_base_swa", THETA_LOCAL)};
    set_ropes(m);
}

static void bind(struct bt_binder *b, uint32_t layer)
{
    bt_gemma_bind(b, layer, true);
}

const struct bt_family bt_family_gemma3 = {
    .name = "gemma3",
    .hf_type = "gemma3_text",
    .gguf_arch = "gemma3",
    .config_hf = config_hf,
    .config_gguf = config_gguf,
    .bind = bind,
    .layer = bt_block_sandwich_layer,
};
