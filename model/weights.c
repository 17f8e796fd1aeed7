/* Finds the tensors that a model uses, checks their shapes, and makes device weights of them. Owns
 * the list of slots (tensor → device pointer); a family only says which names and shapes it wants.
 * Tensors that nobody asked for are refused: an unknown bias or sink is a different model. */

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/assert.h"
#include "base/float16.h"
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
    /* Names of what is bound next, in both formats. */
    char hf_name[TENSOR_NAME_MAX], gguf_name[TENSOR_NAME_MAX];
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

void bt_bind_fail(struct bt_binder *b, enum bt_status st, const struct bt_tensor *t,
                  const char *fmt, ...)
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

void bt_bind_no_memory(struct bt_binder *b)
{
    if (b->st == BT_OK) {
        b->st = bt_err_set(b->err, BT_ERR_NOMEM, "%s: out of memory", b->m->path);
    }
}

/* Finds a tensor that must exist, and marks it used. NULL after an error. */
const struct bt_tensor *bt_bind_take(struct bt_binder *b, const char *name, bool any_type)
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
    if (!t->supported && !any_type) {
        bt_bind_fail(b, BT_ERR_UNSUPPORTED, t, "type %s is not supported", t->type_name);
        return NULL;
    }
    return t;
}

void bt_bind_check_shape(struct bt_binder *b, const struct bt_tensor *t, uint32_t n_dims,
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
    bt_bind_fail(b, BT_ERR_INVALID, t, "shape [%s], expected [%s]", have, want);
}

/* A slot that knows its names. NULL: out of memory. */
static struct bt_slot *push_slot(struct bt_binder *b)
{
    struct bt_model *m = b->m;

    if (m->n_slots == m->cap_slots) {
        size_t cap = m->cap_slots == 0 ? 256 : m->cap_slots * 2;
        struct bt_slot *p = bt_realloc(m->slots, cap * sizeof(*p));
        if (p == NULL) {
            bt_bind_no_memory(b);
            return NULL;
        }
        m->slots = p;
        m->cap_slots = cap;
    }
    struct bt_slot *s = &m->slots[m->n_slots];
    *s = (struct bt_slot){.gguf_name =
                              bt_arena_strndup(&m->arena, b->gguf_name, strlen(b->gguf_name)),
                          .hf_name = bt_arena_strndup(&m->arena, b->hf_name, strlen(b->hf_name))};
    if (s->gguf_name == NULL || s->hf_name == NULL) {
        bt_bind_no_memory(b);
        return NULL;
    }
    m->n_slots++;
    return s;
}

/* Notes both names of a tensor (layer prefix, stem, suffix) and returns the file's. */
static const char *full_name(struct bt_binder *b, const char *hf, const char *gguf,
                             const char *suffix)
{
    if (b->layer < 0) {
        (void)snprintf(b->hf_name, TENSOR_NAME_MAX, "%s%s", hf, suffix);
        (void)snprintf(b->gguf_name, TENSOR_NAME_MAX, "%s%s", gguf, suffix);
    } else {
        (void)snprintf(b->hf_name, TENSOR_NAME_MAX, "model.layers.%lld.%s%s", (long long)b->layer,
                       hf, suffix);
        (void)snprintf(b->gguf_name, TENSOR_NAME_MAX, "blk.%lld.%s%s", (long long)b->layer, gguf,
                       suffix);
    }
    return b->m->st != NULL ? b->hf_name : b->gguf_name;
}

static void bind_vector(struct bt_binder *b, float **dst, const char *name, uint32_t n)
{
    const struct bt_tensor *t = bt_bind_take(b, name, false);

    if (t == NULL) {
        return;
    }
    if (t->dtype > BT_DTYPE_BF16) {
        bt_bind_fail(b, BT_ERR_UNSUPPORTED, t, "a vector of type %s", t->type_name);
        return;
    }
    bt_bind_check_shape(b, t, 1, (const uint64_t[]){n});
    struct bt_slot *s = b->st == BT_OK ? push_slot(b) : NULL;
    if (s != NULL) {
        s->tensor = t;
        s->data = t->data;
        s->bytes = t->bytes;
        s->n_rows = 1;
        s->n_cols = n;
        s->vector = dst;
    }
}

/* name + ".weight" in the quantised form. False: it is plain. */
static bool bind_quantised(struct bt_binder *b, struct bt_kweight **dst, const char *name,
                           uint32_t n_rows, uint32_t n_cols)
{
    char stem[TENSOR_NAME_MAX];

    (void)snprintf(stem, sizeof(stem), "%.*s", (int)(strlen(name) - strlen(".weight")), name);
    const struct bt_quant *q = b->st == BT_OK ? bt_quant_bind(b, stem, n_rows, n_cols) : NULL;
    struct bt_slot *s = q != NULL && b->st == BT_OK ? push_slot(b) : NULL;
    if (s != NULL) {
        s->tensor = q->q;
        s->data = q->q->data;
        s->bytes = bt_quant_bytes(q);
        s->n_rows = n_rows;
        s->n_cols = n_cols;
        s->quant = q;
        s->for_gemm = true;
        s->weight = dst;
    }
    return q != NULL;
}

static void bind_matrix(struct bt_binder *b, struct bt_kweight **dst, const char *name,
                        uint32_t n_rows, uint32_t n_cols, bool for_gemm, bool for_embed)
{
    if (b->m->quant.kind != BT_QUANT_NONE && !for_embed &&
        bind_quantised(b, dst, name, n_rows, n_cols)) {
        return;
    }
    const struct bt_tensor *t = bt_bind_take(b, name, false);

    if (t == NULL) {
        return;
    }
    bt_bind_check_shape(b, t, 2, (const uint64_t[]){n_rows, n_cols});
    struct bt_slot *s = b->st == BT_OK ? push_slot(b) : NULL;
    if (s != NULL) {
        s->tensor = t;
        s->data = t->data;
        s->bytes = t->bytes;
        s->n_rows = n_rows;
        s->n_cols = n_cols;
        s->for_gemm = for_gemm;
        s->for_embed = for_embed;
        s->weight = dst;
    }
}

void bt_bind_vector(struct bt_binder *b, float **dst, const char *hf, const char *gguf, uint32_t n)
{
    bind_vector(b, dst, full_name(b, hf, gguf, ".weight"), n);
}

void bt_bind_linear(struct bt_binder *b, struct bt_linear *dst, const char *hf, const char *gguf,
                    uint32_t n_out, uint32_t n_in, bool bias)
{
    bind_matrix(b, &dst->w, full_name(b, hf, gguf, ".weight"), n_out, n_in, true, false);
    const char *name = full_name(b, hf, gguf, ".bias");
    /* Some quantisers give every matrix a bias, of zeros where the model has none. */
    if (bias || (b->m->quant.kind != BT_QUANT_NONE && bt_weights_find(b->m, name) != NULL)) {
        bind_vector(b, &dst->bias, name, n_out);
    }
}

/* The slices of one tensor [n_experts, n_out, n_in], a matrix for each expert. */
static void bind_slices(struct bt_binder *b, struct bt_kweight **dst, const char *name,
                        uint32_t n_out, uint32_t n_in)
{
    uint32_t n = b->m->config.n_experts;
    const struct bt_tensor *t = bt_bind_take(b, name, false);

    if (t == NULL) {
        return;
    }
    bt_bind_check_shape(b, t, 3, (const uint64_t[]){n, n_out, n_in});
    for (uint32_t e = 0; e < n && b->st == BT_OK; e++) {
        struct bt_slot *s = push_slot(b);
        if (s != NULL) {
            s->tensor = t;
            s->data = (const uint8_t *)t->data + t->bytes / n * e;
            s->bytes = t->bytes / n;
            s->n_rows = n_out;
            s->n_cols = n_in;
            s->for_gemm = s->expert = true;
            s->weight = &dst[e];
        }
    }
}

void bt_bind_experts(struct bt_binder *b, struct bt_kweight ***dst, const char *hf_stem,
                     const char *hf_suffix, const char *gguf_stem, uint32_t n_out, uint32_t n_in)
{
    uint32_t n = b->m->config.n_experts;
    char hf[TENSOR_NAME_MAX], all[TENSOR_NAME_MAX], one[TENSOR_NAME_MAX];

    *dst = bt_arena_zalloc(&b->m->arena, n * sizeof(**dst));
    if (*dst == NULL) {
        bt_bind_no_memory(b);
        return;
    }
    (void)snprintf(all, sizeof(all), "%s_exps", gguf_stem);
    const char *name = full_name(b, "", all, ".weight");
    if (b->m->gguf != NULL && bt_weights_find(b->m, name) != NULL) {
        bind_slices(b, *dst, name, n_out, n_in);
        return;
    }
    for (uint32_t e = 0; e < n; e++) {
        (void)snprintf(hf, sizeof(hf), "%s.%u.%s", hf_stem, e, hf_suffix);
        (void)snprintf(one, sizeof(one), "%s.%u", gguf_stem, e);
        name = full_name(b, hf, b->m->gguf != NULL ? one : all, ".weight");
        size_t at = b->m->n_slots;
        bind_matrix(b, &(*dst)[e], name, n_out, n_in, true, false);
        if (b->m->n_slots > at) { /* one matrix, one slot */
            b->m->slots[at].expert = true;
        }
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
                        (b->m->config.tied && strcmp(t->name, "lm_head.weight") == 0) ||
                        bt_quant_unused(b->m, t->name);
        if (!b->used[i] && !harmless) {
            bt_bind_fail(b, BT_ERR_UNSUPPORTED, t, "a %s model has no use for it",
                         b->m->family->name);
        }
    }
}

enum bt_status bt_weights_bind(struct bt_model *m, struct bt_err *err)
{
    struct bt_binder b = {.m = m, .layer = -1, .err = err};
    const struct bt_model_config *c = &m->config;

    b.used = bt_calloc(tensor_count(m) + 1, 1);
    if (b.used == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", m->path);
    }
    bind_matrix(&b, &m->embed, full_name(&b, "model.embed_tokens", "token_embd", ".weight"),
                c->vocab, c->dim, c->tied, true);
    if (!c->tied) {
        bind_matrix(&b, &m->output, full_name(&b, "lm_head", "output", ".weight"), c->vocab, c->dim,
                    true, false);
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

static enum bt_status load_vector(struct bt_model *m, struct bt_slot *s, struct bt_err *err)
{
    size_t bytes = s->n_cols * sizeof(float);
    float *host = bt_alloc(bytes);

    *s->vector = host != NULL ? bt_k_alloc(m->k, bytes) : NULL;
    if (*s->vector == NULL) {
        bt_free(host);
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    bt_plain_to_f32(host, s->data, s->tensor->dtype, s->n_cols);
    bt_k_write(m->k, *s->vector, host, bytes);
    bt_free(host);
    return BT_OK;
}

struct put_at {
    struct bt_panel_file *file;
    size_t at;
};

static bool put_panels(void *arg, size_t at, const void *data, size_t bytes)
{
    const struct put_at *p = arg;

    return bt_panel_file_put(p->file, p->at + at, data, bytes);
}

/* One slot's device form; at: its place among the packed ones. */
static enum bt_status load_slot(struct bt_model *m, struct bt_slot *s, size_t at,
                                struct bt_err *err)
{
    if (s->vector != NULL) {
        return load_vector(m, s, err);
    }
    struct bt_k_weight_desc d = bt_slot_desc(s);
    struct put_at put = {.file = m->panels, .at = at};
    uint8_t *base = m->panels != NULL ? bt_panel_file_data(m->panels) : m->own_panels;

    if (base != NULL && bt_panels_bytes(m, s) > 0) {
        d.panels = base + at;
        d.panels_ready = m->packed.reused;
        d.put = m->panels != NULL && !m->packed.reused ? put_panels : NULL;
        d.put_arg = &put;
    }
    void *rows = NULL;
    enum bt_status st = s->quant != NULL ? bt_quant_rows(s->quant, &rows, err) : BT_OK;
    d.data = rows != NULL ? rows : d.data;
    if (st == BT_OK) {
        st = bt_k_weight_create(m->k, &d, s->weight, err);
    }
    bt_free(rows);
    if (st == BT_OK) {
        m->packed.bytes += bt_k_weight_bytes(*s->weight);
        bt_file_map_forget(s->data, s->quant != NULL ? s->tensor->bytes : s->bytes);
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
        done += s->bytes;
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
    struct bt_model_load_opts with = *o;
    /* A cache file of other weights, or of an older layout, is thrown out and made anew: once. One that cannot be written is
     * done without. */
    for (int attempt = 0;; attempt++) {
        m->k = k;
        bt_panels_open(m, &with);
        enum bt_status st = load_slots(m, &with, err);
        if (st == BT_OK && with.panel_dir == NULL && o->panel_dir != NULL) {
            m->packed.failed = true;
            (void)snprintf(m->packed.note, sizeof(m->packed.note), "%s",
                           "the cache file could not be written");
        }
        if (st == BT_OK) {
            return BT_OK;
        }
        bool wrong = st == BT_ERR_PROTOCOL && m->packed.reused;
        bool unwritten = st == BT_ERR_IO && m->packed.shared;
        bt_weights_unload(m, wrong);
        if (!unwritten && (!wrong || attempt > 0)) {
            return st;
        }
        with.panel_dir = unwritten ? NULL : with.panel_dir;
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
