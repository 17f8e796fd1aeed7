/* Finds the tensors that a model uses, checks their shapes, and makes device weights of them. Owns
 * the list of slots (tensor → device pointer); a family only says which names and shapes it wants.
 * Tensors that nobody asked for are refused: an unknown bias or sink is a different model. */

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/assert.h"
#include "base/mem.h"
#include "files/map.h"
#include "model/model_int.h"

enum { TENSOR_NAME_MAX = 256 };

struct bt_binder {
    struct bt_model *m;
    int64_t layer; /* -1: outside the layers */
    bool *used;    /* [tensors in the file] */
    enum bt_status st;
    struct bt_err *err;
};

struct bt_model *bt_bind_model(struct bt_binder *b)
{
    return b->m;
}

static size_t tensor_count(const struct bt_model *m)
{
    return m->st != NULL ? bt_st_count(m->st) : bt_gguf_tensor_count(m->gguf);
}

static const struct bt_tensor *tensor_at(const struct bt_model *m, size_t i)
{
    return m->st != NULL ? bt_st_at(m->st, i) : bt_gguf_tensor_at(m->gguf, i);
}

const struct bt_tensor *bt_weights_find(const struct bt_model *m, const char *name)
{
    return m->st != NULL ? bt_st_find(m->st, name) : bt_gguf_tensor_find(m->gguf, name);
}

static void fail(struct bt_binder *b, enum bt_status st, const struct bt_tensor *t, const char *fmt,
                 ...) BT_PRINTF(4, 5);

static void fail(struct bt_binder *b, enum bt_status st, const struct bt_tensor *t, const char *fmt,
                 ...)
{
    char text[256];
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    if (b->st == BT_OK) {
        b->st = bt_err_set(b->err, st, "%s: tensor %s: %s", t->file, t->name, text);
    }
}

static void no_memory(struct bt_binder *b)
{
    if (b->st == BT_OK) {
        b->st = bt_err_set(b->err, BT_ERR_NOMEM, "%s: out of memory", b->m->path);
    }
}

/* Finds a tensor that must exist, and marks it used. NULL after an error. */
static const struct bt_tensor *take(struct bt_binder *b, const char *name)
{
    if (b->st != BT_OK) {
        return NULL;
    }
    const struct bt_tensor *t = bt_weights_find(b->m, name);
    if (t == NULL) {
        b->st = bt_err_set(b->err, BT_ERR_INVALID, "%s: no tensor %s", b->m->path, name);
        return NULL;
    }
    b->used[t - tensor_at(b->m, 0)] = true;
    if (!t->supported) {
        fail(b, BT_ERR_UNSUPPORTED, t, "type %s is not supported", t->type_name);
        return NULL;
    }
    return t;
}

static void check_shape(struct bt_binder *b, const struct bt_tensor *t, uint32_t n_dims,
                        const uint64_t *shape)
{
    char have[128] = "", want[128] = "";
    size_t h = 0, w = 0;
    bool same = t->n_dims == n_dims;

    for (uint32_t i = 0; same && i < n_dims; i++) {
        same = t->shape[i] == shape[i];
    }
    if (same) {
        return;
    }
    for (uint32_t i = 0; i < t->n_dims && h < sizeof(have) - 24; i++) {
        h += (size_t)snprintf(have + h, sizeof(have) - h, "%s%llu", i ? ", " : "",
                              (unsigned long long)t->shape[i]);
    }
    for (uint32_t i = 0; i < n_dims; i++) {
        w += (size_t)snprintf(want + w, sizeof(want) - w, "%s%llu", i ? ", " : "",
                              (unsigned long long)shape[i]);
    }
    fail(b, BT_ERR_INVALID, t, "shape [%s], expected [%s]", have, want);
}

static struct bt_slot *push_slot(struct bt_binder *b)
{
    struct bt_model *m = b->m;

    if (m->n_slots == m->cap_slots) {
        size_t cap = m->cap_slots == 0 ? 256 : m->cap_slots * 2;
        struct bt_slot *p = bt_realloc(m->slots, cap * sizeof(*p));
        if (p == NULL) {
            no_memory(b);
            return NULL;
        }
        m->slots = p;
        m->cap_slots = cap;
    }
    return &m->slots[m->n_slots++];
}

/* The file's name of a tensor: layer prefix, stem, suffix. */
static const char *full_name(const struct bt_binder *b, const char *hf, const char *gguf,
                             const char *suffix, char out[TENSOR_NAME_MAX])
{
    bool st = b->m->st != NULL;
    const char *stem = st ? hf : gguf;

    if (b->layer < 0) {
        (void)snprintf(out, TENSOR_NAME_MAX, "%s%s", stem, suffix);
    } else {
        (void)snprintf(out, TENSOR_NAME_MAX, "%s.%lld.%s%s", st ? "model.layers" : "blk",
                       (long long)b->layer, stem, suffix);
    }
    return out;
}

static void bind_vector(struct bt_binder *b, float **dst, const char *name, uint32_t n)
{
    const struct bt_tensor *t = take(b, name);

    if (t == NULL) {
        return;
    }
    if (t->dtype > BT_DTYPE_BF16) {
        fail(b, BT_ERR_UNSUPPORTED, t, "a vector of type %s", t->type_name);
        return;
    }
    check_shape(b, t, 1, (const uint64_t[]){n});
    struct bt_slot *s = b->st == BT_OK ? push_slot(b) : NULL;
    if (s != NULL) {
        *s =
            (struct bt_slot){.tensor = t, .data = t->data, .n_rows = 1, .n_cols = n, .vector = dst};
    }
}

static void bind_matrix(struct bt_binder *b, struct bt_kweight **dst, const char *name,
                        uint32_t n_rows, uint32_t n_cols, bool for_gemm, bool for_embed)
{
    const struct bt_tensor *t = take(b, name);

    if (t == NULL) {
        return;
    }
    check_shape(b, t, 2, (const uint64_t[]){n_rows, n_cols});
    struct bt_slot *s = b->st == BT_OK ? push_slot(b) : NULL;
    if (s != NULL) {
        *s = (struct bt_slot){.tensor = t,
                              .data = t->data,
                              .n_rows = n_rows,
                              .n_cols = n_cols,
                              .for_gemm = for_gemm,
                              .for_embed = for_embed,
                              .weight = dst};
    }
}

void bt_bind_vector(struct bt_binder *b, float **dst, const char *hf, const char *gguf, uint32_t n)
{
    char name[TENSOR_NAME_MAX];

    bind_vector(b, dst, full_name(b, hf, gguf, ".weight", name), n);
}

void bt_bind_linear(struct bt_binder *b, struct bt_linear *dst, const char *hf, const char *gguf,
                    uint32_t n_out, uint32_t n_in, bool bias)
{
    char name[TENSOR_NAME_MAX];

    bind_matrix(b, &dst->w, full_name(b, hf, gguf, ".weight", name), n_out, n_in, true, false);
    if (bias) {
        bind_vector(b, &dst->bias, full_name(b, hf, gguf, ".bias", name), n_out);
    }
}

void bt_bind_experts(struct bt_binder *b, struct bt_kweight ***dst, const char *hf_stem,
                     const char *hf_suffix, uint32_t n_out, uint32_t n_in)
{
    uint32_t n = b->m->config.n_experts;
    char stem[TENSOR_NAME_MAX], name[TENSOR_NAME_MAX];

    *dst = bt_arena_zalloc(&b->m->arena, n * sizeof(**dst));
    if (*dst == NULL) {
        no_memory(b);
        return;
    }
    for (uint32_t e = 0; e < n; e++) {
        (void)snprintf(stem, sizeof(stem), "%s.%u.%s", hf_stem, e, hf_suffix);
        bind_matrix(b, &(*dst)[e], full_name(b, stem, stem, ".weight", name), n_out, n_in, true,
                    false);
    }
}

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), k = strlen(tail);

    return n >= k && strcmp(s + n - k, tail) == 0;
}

static void check_unused(struct bt_binder *b)
{
    for (size_t i = 0; i < tensor_count(b->m) && b->st == BT_OK; i++) {
        const struct bt_tensor *t = tensor_at(b->m, i);
        bool harmless = ends_with(t->name, ".rotary_emb.inv_freq") ||
                        strcmp(t->name, "rope_freqs.weight") == 0 ||
                        (b->m->config.tied && strcmp(t->name, "lm_head.weight") == 0);
        if (!b->used[i] && !harmless) {
            fail(b, BT_ERR_UNSUPPORTED, t, "a %s model has no use for it", b->m->family->name);
        }
    }
}

enum bt_status bt_weights_bind(struct bt_model *m, struct bt_err *err)
{
    struct bt_binder b = {.m = m, .layer = -1, .err = err};
    const struct bt_model_config *c = &m->config;
    bool st = m->st != NULL;

    b.used = bt_calloc(tensor_count(m) + 1, 1);
    if (b.used == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", m->path);
    }
    bind_matrix(&b, &m->embed, st ? "model.embed_tokens.weight" : "token_embd.weight", c->vocab,
                c->dim, c->tied, true);
    if (!c->tied) {
        bind_matrix(&b, &m->output, st ? "lm_head.weight" : "output.weight", c->vocab, c->dim, true,
                    false);
    }
    bt_bind_vector(&b, &m->final_norm, "model.norm", "output_norm", c->dim);
    for (uint32_t i = 0; i < c->n_layers && b.st == BT_OK; i++) {
        b.layer = i;
        m->family->bind(&b, i);
    }
    check_unused(&b);
    bt_free(b.used);
    return b.st;
}

static float f16_value(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000U) << 16, exp = (h >> 10) & 31U, man = h & 1023U, bits;
    float f;

    if (exp == 0) { /* zero or subnormal: man * 2^-24 is exact */
        f = (float)man * 0x1p-24F;
        return sign != 0 ? -f : f;
    }
    bits = sign | (exp == 31 ? 0x7f800000U : (exp + 112) << 23) | man << 13;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static void to_f32(float *out, const struct bt_slot *s)
{
    const uint8_t *p = s->data;

    if (s->tensor->dtype == BT_DTYPE_F32) {
        memcpy(out, p, s->n_cols * sizeof(float));
        return;
    }
    for (uint32_t i = 0; i < s->n_cols; i++) {
        uint16_t h;
        memcpy(&h, p + 2 * (size_t)i, 2);
        if (s->tensor->dtype == BT_DTYPE_F16) {
            out[i] = f16_value(h);
        } else {
            uint32_t bits = (uint32_t)h << 16;
            memcpy(&out[i], &bits, sizeof(bits));
        }
    }
}

static enum bt_status load_vector(struct bt_model *m, struct bt_slot *s, struct bt_err *err)
{
    size_t bytes = s->n_cols * sizeof(float);
    float *host = bt_alloc(bytes);

    *s->vector = host != NULL ? bt_k_alloc(m->k, bytes) : NULL;
    if (*s->vector == NULL) {
        bt_free(host);
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    to_f32(host, s);
    bt_k_write(m->k, *s->vector, host, bytes);
    bt_free(host);
    return BT_OK;
}

/* One slot's device form; at: its place in the cache file. */
static enum bt_status load_slot(struct bt_model *m, struct bt_slot *s, size_t at,
                                struct bt_err *err)
{
    if (s->vector != NULL) {
        return load_vector(m, s, err);
    }
    struct bt_k_weight_desc d = bt_slot_desc(s);

    if (m->panels != NULL && bt_panels_bytes(m, s) > 0) {
        d.panels = bt_panel_file_data(m->panels) + at;
        d.panels_ready = bt_panel_file_ready(m->panels);
    }
    enum bt_status st = bt_k_weight_create(m->k, &d, s->weight, err);
    if (st == BT_OK) {
        m->packed.bytes += bt_k_weight_bytes(*s->weight);
        bt_file_map_forget(s->data, s->tensor->bytes);
    }
    return st;
}

static enum bt_status load_slots(struct bt_model *m, const struct bt_model_load_opts *o,
                                 struct bt_err *err)
{
    uint64_t done = 0;
    size_t at = 0;

    m->packed.bytes = 0;
    for (size_t i = 0; i < m->n_slots; i++) {
        struct bt_slot *s = &m->slots[i];
        enum bt_status st = load_slot(m, s, at, err);
        if (st != BT_OK) {
            (void)bt_err_prefix(err, "%s: tensor %s", s->tensor->file, s->tensor->name);
            return st;
        }
        at += bt_panels_bytes(m, s);
        done += s->tensor->bytes;
        if (m->panels != NULL && !bt_panel_file_ready(m->panels)) {
            bt_panel_file_progress(m->panels, at);
        }
        if (o->progress != NULL) {
            o->progress(o->arg, (double)done / (double)m->info.weight_bytes);
        }
    }
    return m->panels != NULL && !bt_panel_file_ready(m->panels)
               ? bt_panel_file_publish(m->panels, err)
               : BT_OK;
}

enum bt_status bt_model_load(struct bt_model *m, struct bt_kctx *k,
                             const struct bt_model_load_opts *opts, struct bt_err *err)
{
    static const struct bt_model_load_opts none;
    const struct bt_model_load_opts *o = opts != NULL ? opts : &none;

    BT_ASSERT(m->k == NULL);
    /* A cache file of other weights, or of an older layout, is thrown out and made anew: once. */
    for (int attempt = 0;; attempt++) {
        m->k = k;
        bt_panels_open(m, o);
        enum bt_status st = load_slots(m, o, err);
        if (st == BT_OK) {
            return BT_OK;
        }
        bool wrong = st == BT_ERR_PROTOCOL && m->packed.reused;
        bt_weights_unload(m, wrong);
        if (!wrong || attempt > 0) {
            return st;
        }
    }
}

void bt_weights_unload(struct bt_model *m, bool wrong_panels)
{
    for (size_t i = 0; i < m->n_slots && m->k != NULL; i++) {
        struct bt_slot *s = &m->slots[i];
        if (s->weight != NULL && *s->weight != NULL) {
            bt_k_weight_destroy(m->k, *s->weight);
            *s->weight = NULL;
        }
        if (s->vector != NULL && *s->vector != NULL) {
            bt_k_free(m->k, *s->vector, s->n_cols * sizeof(float));
            *s->vector = NULL;
        }
    }
    bt_panels_close(m, wrong_panels);
    m->k = NULL;
}
