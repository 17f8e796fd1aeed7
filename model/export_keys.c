/* The metadata of a model in GGUF's keys, and what GGUF cannot say. Owns the inverse of config_gguf.c. */

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/mem.h"
#include "model/export.h"
#include "model/export_int.h"

enum { KEY_MAX = 128 };

struct keys {
    const struct bt_model *m;
    struct bt_gguf_writer *w;
    const char *arch;
};

static const char *full(const struct keys *k, const char *key, char out[KEY_MAX])
{
    (void)snprintf(out, KEY_MAX, "%s.%s", k->arch, key);
    return out;
}

static void add_u32(const struct keys *k, const char *key, uint32_t v)
{
    char name[KEY_MAX];

    bt_gguf_add_u32(k->w, full(k, key, name), v);
}

static void add_f32(const struct keys *k, const char *key, double v)
{
    char name[KEY_MAX];

    bt_gguf_add_f32(k->w, full(k, key, name), (float)v);
}

static void add_text(struct bt_gguf_writer *w, const char *key, const char *s)
{
    bt_gguf_add_str(w, key, s, strlen(s));
}

static enum bt_status no_words(const struct bt_model *m, struct bt_err *err, const char *what)
{
    return bt_err_set(err, BT_ERR_UNSUPPORTED, "%s: GGUF files of %s cannot say %s", m->path,
                      m->family->gguf_arch, what);
}

bool bt_export_interleaves(const struct bt_model *m)
{
    return strcmp(m->family->gguf_arch, "llama") == 0;
}

static bool gemma(const struct bt_model *m)
{
    return strncmp(m->family->name, "gemma", 5) == 0;
}

static enum bt_status add_rope(const struct keys *k, struct bt_err *err)
{
    const struct bt_rope_spec *s = &k->m->config.ropes[0];
    const char *type = s->type == BT_ROPE_LINEAR ? "linear" : s->type == BT_ROPE_YARN ? "yarn" : "";
    char name[KEY_MAX];

    add_u32(k, "rope.dimension_count", s->dim);
    add_f32(k, "rope.freq_base", s->theta);
    if (k->m->config.n_ropes > 1) {
        add_f32(k, "rope.freq_base_swa", k->m->config.ropes[1].theta);
    }
    if (type[0] == '\0') { /* llama3's scaling is in rope_freqs.weight */
        return BT_OK;
    }
    add_text(k->w, full(k, "rope.scaling.type", name), type);
    add_f32(k, "rope.scaling.factor", s->factor);
    if (s->type == BT_ROPE_LINEAR) {
        return BT_OK;
    }
    if (s->mscale != 0.0 || s->mscale_all_dim != 0.0 || !s->truncate) {
        return no_words(k->m, err, "mscale, mscale_all_dim and truncate of yarn");
    }
    add_u32(k, "rope.scaling.original_context_length", (uint32_t)s->original_context);
    add_f32(k, "rope.scaling.yarn_beta_fast", s->beta_fast);
    add_f32(k, "rope.scaling.yarn_beta_slow", s->beta_slow);
    if (s->attention_factor != 0.0) {
        add_f32(k, "rope.scaling.attn_factor", s->attention_factor / (0.1 * log(s->factor) + 1.0));
    }
    return BT_OK;
}

/* The windows, as the families' readers take them: one for all layers, or gemma's patterns. */
static void add_windows(const struct keys *k)
{
    const struct bt_model *m = k->m;
    uint32_t n = m->config.n_layers, window = 0, period = 0;

    for (uint32_t i = 0; i < n; i++) {
        window = m->layers[i].window > window ? m->layers[i].window : window;
        period = period == 0 && m->layers[i].window == 0 ? i + 1 : period;
    }
    if (window != 0 || gemma(m)) {
        /* without windows, one that nobody leaves */
        add_u32(k, "attention.sliding_window", window != 0 ? window : m->config.context);
    }
    if (strcmp(m->family->name, "gemma3") == 0) {
        add_u32(k, "attention.sliding_window_pattern", period != 0 ? period : n + 1);
    }
}

static void add_experts(const struct keys *k)
{
    const struct bt_model_config *c = &k->m->config;

    if (c->n_experts > 0) {
        add_u32(k, "expert_count", c->n_experts);
        add_u32(k, "expert_used_count", c->n_experts_used);
        if (strcmp(k->arch, "llama") != 0) {
            add_u32(k, "expert_feed_forward_length", c->expert_ffn_dim);
        }
    }
}

static enum bt_status check_words(const struct bt_model *m, struct bt_err *err)
{
    const struct bt_model_config *c = &m->config;
    enum bt_k_act act = gemma(m) ? BT_K_GELU_TANH : BT_K_SILU;

    if (m->family->gguf_arch == NULL) {
        return bt_err_set(err, BT_ERR_UNSUPPORTED, "%s: no GGUF architecture for %s", m->path,
                          m->family->name);
    }
    if (c->act != act) {
        return no_words(m, err, "its activation function");
    }
    if (c->n_eos > 3) {
        return no_words(m, err, "more than three tokens that end a text");
    }
    if (c->n_experts > 0 && !c->norm_topk) {
        return no_words(m, err, "norm_topk_prob false");
    }
    return BT_OK;
}

static void add_ids(const struct keys *k)
{
    static const char *const eos[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                      "tokenizer.ggml.eom_token_id"};
    const struct bt_model_config *c = &k->m->config;

    for (uint32_t i = 0; i < c->n_eos && i < 3; i++) {
        bt_gguf_add_u32(k->w, eos[i], c->eos[i]);
    }
    if (c->bos >= 0) {
        bt_gguf_add_u32(k->w, "tokenizer.ggml.bos_token_id", (uint32_t)c->bos);
    }
}

enum bt_status bt_export_keys(const struct bt_model *m, struct bt_gguf_writer *w,
                              struct bt_err *err)
{
    const struct bt_model_config *c = &m->config;
    enum bt_status st = check_words(m, err);
    struct keys k = {.m = m, .w = w, .arch = m->family->gguf_arch};

    if (st != BT_OK) {
        return st;
    }
    add_text(w, "general.architecture", k.arch);
    add_text(w, "general.name", m->info.name);
    add_u32(&k, "block_count", c->n_layers);
    add_u32(&k, "context_length", c->context);
    add_u32(&k, "embedding_length", c->dim);
    add_u32(&k, "feed_forward_length", c->ffn_dim);
    add_u32(&k, "attention.head_count", c->n_heads);
    add_u32(&k, "attention.head_count_kv", c->n_kv_heads);
    add_u32(&k, "attention.key_length", c->head_dim);
    add_u32(&k, "attention.value_length", c->head_dim);
    add_f32(&k, "attention.layer_norm_rms_epsilon", c->rms_eps);
    add_u32(&k, "vocab_size", c->vocab);
    if (gemma(m)) {
        add_f32(&k, "attention.scale", (double)c->attn_scale);
    }
    if (c->attn_softcap != 0.0F) {
        add_f32(&k, "attn_logit_softcapping", (double)c->attn_softcap);
    }
    if (c->final_softcap != 0.0F) {
        add_f32(&k, "final_logit_softcapping", (double)c->final_softcap);
    }
    add_windows(&k);
    add_experts(&k);
    add_ids(&k);
    return add_rope(&k, err);
}

enum bt_status bt_export_copy_keys(const struct bt_model *m, struct bt_gguf_writer *w)
{
    static const char *const own[] = {"general.file_type", "general.quantization_version",
                                      "general.alignment"};

    for (size_t i = 0; i < bt_gguf_value_count(m->gguf); i++) {
        const struct bt_gguf_value *v = bt_gguf_value_at(m->gguf, i);
        bool copy = strncmp(v->key, "split.", 6) != 0;
        for (size_t j = 0; j < sizeof(own) / sizeof(own[0]); j++) {
            copy = copy && strcmp(v->key, own[j]) != 0;
        }
        if (copy) {
            bt_gguf_add_value(w, v);
        }
    }
    return BT_OK;
}

void bt_export_file_type(struct bt_gguf_writer *w, enum bt_dtype dtype)
{
    static const uint8_t types[] = {
        [BT_DTYPE_F32] = 0,  [BT_DTYPE_F16] = 1,  [BT_DTYPE_BF16] = 32, [BT_DTYPE_Q4_0] = 2,
        [BT_DTYPE_Q4_1] = 3, [BT_DTYPE_Q5_0] = 8, [BT_DTYPE_Q5_1] = 9,  [BT_DTYPE_Q8_0] = 7};

    bt_gguf_add_u32(w, "general.file_type", types[dtype]);
    bt_gguf_add_u32(w, "general.quantization_version", 2);
}

enum bt_status bt_export_freqs(const struct bt_model *m, float **freqs, struct bt_err *err)
{
    const struct bt_rope_spec *s = &m->config.ropes[0];
    struct bt_rope_spec plain = {.dim = s->dim, .theta = s->theta};
    struct bt_rope_table a = {0}, b = {0};
    uint32_t n = s->dim / 2;
    enum bt_status st = BT_OK;

    *freqs = NULL;
    if (m->rope_divisors == NULL && s->type != BT_ROPE_LLAMA3) {
        return BT_OK;
    }
    *freqs = bt_alloc(n * sizeof(float));
    if (*freqs != NULL && m->rope_divisors != NULL) {
        memcpy(*freqs, m->rope_divisors, n * sizeof(float));
        return BT_OK;
    }
    st = *freqs == NULL ? BT_ERR_NOMEM : bt_rope_table_init(&a, &plain, NULL, 1);
    st = st == BT_OK ? bt_rope_table_init(&b, s, NULL, 1) : st;
    for (uint32_t i = 0; i < n && st == BT_OK; i++) {
        (*freqs)[i] = (float)(a.inv_freq[i] / b.inv_freq[i]);
    }
    bt_rope_table_fini(&a);
    bt_rope_table_fini(&b);
    return st == BT_OK ? st : bt_err_set(err, st, "%s: out of memory", m->path);
}

enum bt_status bt_export_check(const struct bt_model *a, const struct bt_model *b,
                               struct bt_err *err)
{
    const struct bt_model_config *x = &a->config, *y = &b->config;
    bool same = x->n_layers == y->n_layers && x->dim == y->dim && x->n_heads == y->n_heads &&
                x->n_kv_heads == y->n_kv_heads && x->head_dim == y->head_dim &&
                x->vocab == y->vocab && x->ffn_dim == y->ffn_dim && x->tied == y->tied &&
                x->n_experts == y->n_experts && x->n_experts_used == y->n_experts_used &&
                x->n_ropes == y->n_ropes && x->act == y->act &&
                fabsf(x->attn_scale - y->attn_scale) <= 1e-6F * x->attn_scale;

    for (uint32_t i = 0; same && i < x->n_layers; i++) {
        const struct bt_layer *p = &a->layers[i], *q = &b->layers[i];
        same = p->window == q->window && p->rope == q->rope && p->sparse == q->sparse;
        if (!same) {
            return bt_err_set(err, BT_ERR_UNSUPPORTED,
                              "%s: GGUF files of %s cannot say the window of layer %u", a->path,
                              a->family->gguf_arch, i);
        }
    }
    return same ? BT_OK
                : bt_err_set(err, BT_ERR_UNSUPPORTED, "%s: what was written is another model",
                             a->path);
}
