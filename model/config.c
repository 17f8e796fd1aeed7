/* What both kinds of configuration share: limits and cross-checks of the parsed values, the layer
 * array, and the sorting of layers into KV groups. Refuses to know how files spell anything. */

#include <math.h>
#include <string.h>
#include "model/model_int.h"

static enum bt_status bad(struct bt_err *err, const char *file, const char *text)
{
    return bt_err_set(err, BT_ERR_INVALID, "%s: %s", file, text);
}

static bool positive(double v)
{
    return isfinite(v) && v > 0.0;
}

static enum bt_status check_rope(struct bt_rope_spec *s, uint32_t head_dim, const char *file,
                                 struct bt_err *err)
{
    if (s->dim == 0 || s->dim % 2 != 0 || s->dim > head_dim) {
        return bt_err_set(err, BT_ERR_INVALID, "%s: rope turns %u of %u values of a head", file,
                          s->dim, head_dim);
    }
    if (!isfinite(s->theta) || s->theta <= 1.0) {
        return bad(err, file, "rope theta is not above 1");
    }
    if (s->type == BT_ROPE_DEFAULT) {
        return BT_OK;
    }
    if (!positive(s->factor)) {
        return bad(err, file, "rope factor is not positive");
    }
    if (s->type == BT_ROPE_LINEAR) {
        return BT_OK;
    }
    if (!positive(s->original_context)) {
        return bad(err, file, "rope original_max_position_embeddings is not positive");
    }
    if (s->type == BT_ROPE_LLAMA3 &&
        (!positive(s->low_freq_factor) || !positive(s->high_freq_factor) ||
         s->high_freq_factor <= s->low_freq_factor)) {
        return bad(err, file, "rope low_freq_factor and high_freq_factor are not 0 < low < high");
    }
    if (s->type == BT_ROPE_YARN &&
        (!positive(s->beta_fast) || !positive(s->beta_slow) || s->attention_factor < 0.0)) {
        return bad(err, file, "rope beta_fast, beta_slow or attention_factor is not positive");
    }
    return BT_OK;
}

static enum bt_status check_tokens(const struct bt_model_config *c, const char *file,
                                   struct bt_err *err)
{
    for (uint32_t i = 0; i < c->n_eos; i++) {
        if (c->eos[i] >= c->vocab) {
            return bt_err_set(err, BT_ERR_INVALID,
                              "%s: eos_token_id %u is outside the vocabulary of %u", file,
                              c->eos[i], c->vocab);
        }
    }
    if (c->bos >= (int64_t)c->vocab) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "%s: bos_token_id %lld is outside the vocabulary of %u", file,
                          (long long)c->bos, c->vocab);
    }
    return BT_OK;
}

enum bt_status bt_config_check(struct bt_model *m, const char *file, struct bt_err *err)
{
    struct bt_model_config *c = &m->config;
    enum bt_status st = BT_OK;

    if (c->head_dim == 0 || c->head_dim > BT_HEAD_DIM_MAX || c->head_dim % 2 != 0) {
        return bt_err_set(err, BT_ERR_INVALID, "%s: head dimension %u is not even and from 2 to %d",
                          file, c->head_dim, BT_HEAD_DIM_MAX);
    }
    if (c->n_heads % c->n_kv_heads != 0) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "%s: %u attention heads are no multiple of %u key-value heads", file,
                          c->n_heads, c->n_kv_heads);
    }
    if ((uint64_t)(c->n_heads + 2 * c->n_kv_heads) * c->head_dim > BT_DIM_MAX * 4) {
        return bad(err, file, "attention is too wide");
    }
    if (!positive(c->rms_eps) || c->rms_eps >= 1.0) {
        return bad(err, file, "rms_norm_eps is not between 0 and 1");
    }
    if (c->attn_scale == 0.0F) {
        c->attn_scale = (float)(1.0 / sqrt(c->head_dim));
    }
    if (!positive((double)c->attn_scale) || !isfinite(c->attn_softcap) || c->attn_softcap < 0.0F ||
        !isfinite(c->final_softcap) || c->final_softcap < 0.0F) {
        return bad(err, file, "an attention scale or soft cap is not positive");
    }
    if (c->n_experts > 0 &&
        (c->n_experts_used == 0 || c->n_experts_used > c->n_experts || c->expert_ffn_dim == 0)) {
        return bt_err_set(err, BT_ERR_INVALID, "%s: %u of %u experts for a token", file,
                          c->n_experts_used, c->n_experts);
    }
    for (uint32_t i = 0; i < c->n_ropes && st == BT_OK; i++) {
        st = check_rope(&c->ropes[i], c->head_dim, file, err);
    }
    return st == BT_OK ? check_tokens(c, file, err) : st;
}

enum bt_status bt_config_layers_alloc(struct bt_model *m, struct bt_err *err)
{
    uint32_t n = m->config.n_layers;

    m->layers = bt_arena_zalloc(&m->arena, n * sizeof(*m->layers));
    m->layer_group = bt_arena_zalloc(&m->arena, n);
    m->layer_index = bt_arena_zalloc(&m->arena, n * sizeof(*m->layer_index));
    if (m->layers == NULL || m->layer_group == NULL || m->layer_index == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", m->path);
    }
    return BT_OK;
}

/* Full attention first, then windows in the order of their first layer. A window that no position
 * can leave is full. */
enum bt_status bt_config_groups(struct bt_model *m, const char *file, struct bt_err *err)
{
    struct bt_model_info *info = &m->info;
    bool any_full = false;

    for (uint32_t i = 0; i < m->config.n_layers; i++) {
        if (m->layers[i].window >= m->config.context) {
            m->layers[i].window = 0;
        }
        any_full |= m->layers[i].window == 0;
    }
    info->n_groups = any_full ? 1 : 0;
    for (uint32_t i = 0; i < m->config.n_layers; i++) {
        uint32_t g = 0;
        while (g < info->n_groups && info->groups[g].window != m->layers[i].window) {
            g++;
        }
        if (g == BT_MODEL_KV_GROUPS_MAX) {
            return bt_err_set(err, BT_ERR_UNSUPPORTED, "%s: more than %d kinds of attention window",
                              file, BT_MODEL_KV_GROUPS_MAX);
        }
        if (g == info->n_groups) {
            info->groups[info->n_groups++].window = m->layers[i].window;
        }
        m->layer_group[i] = (uint8_t)g;
        m->layer_index[i] = info->groups[g].n_layers++;
    }
    return BT_OK;
}
