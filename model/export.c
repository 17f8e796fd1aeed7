/* Writes a model's tensors as a GGUF file or as safetensors. Owns the choice of types and the layout of rows; the keys are export_keys.c's,
 * rounding files/quant_blocks.h's, reading of weights the backend's. */

#include "model/export.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/assert.h"
#include "base/float16.h"
#include "base/float8.h"
#include "base/mem.h"
#include "files/quant_blocks.h"
#include "model/export_int.h"

enum { ROWS = 32 }; /* read and rounded at a time */

/* Slots [first, first + n) of the model make one tensor. */
struct out_tensor {
    size_t first, n;
    enum bt_dtype dtype; /* GF8: codes, and another tensor with a scale for each row */
};

struct bt_export {
    const struct bt_model *m;
    struct out_tensor *tensors;
    size_t n_tensors;
    float *freqs;                /* rope_freqs.weight; NULL: none */
    struct bt_gguf_writer *gguf; /* one of the two */
    struct bt_st_writer *st;
};

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), k = strlen(tail);

    return n >= k && strcmp(s + n - k, tail) == 0;
}

static enum bt_dtype type_of(const struct bt_model *m, const struct bt_slot *s, enum bt_dtype want)
{
    bool output = s->weight == &m->output || (m->config.tied && s->for_embed);

    if (s->vector != NULL || ends_with(s->gguf_name, ".ffn_gate_inp.weight")) {
        return BT_DTYPE_F32;
    }
    if (want <= BT_DTYPE_BF16) {
        return want;
    }
    if (s->n_cols % bt_dtype_block_values(want) != 0) {
        return BT_DTYPE_F16;
    }
    return output ? BT_DTYPE_Q8_0 : want;
}

static enum bt_status plan_tensors(struct bt_export *e, enum bt_dtype want,
                                   struct bt_gguf_writer *w, struct bt_err *err)
{
    const struct bt_model *m = e->m;

    e->tensors = bt_calloc(m->n_slots + 1, sizeof(*e->tensors));
    if (e->tensors == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", m->path);
    }
    for (size_t i = 0; i < m->n_slots; i += e->tensors[e->n_tensors++].n) {
        const struct bt_slot *s = &m->slots[i];
        struct out_tensor *t = &e->tensors[e->n_tensors];
        *t = (struct out_tensor){.first = i, .n = 1, .dtype = type_of(m, s, want)};
        while (i + t->n < m->n_slots && strcmp(m->slots[i + t->n].gguf_name, s->gguf_name) == 0) {
            t->n++;
        }
        const uint64_t shape[] = {t->n, s->n_rows, s->n_cols};
        uint32_t n_dims = s->vector != NULL ? 1 : ends_with(s->gguf_name, "_exps.weight") ? 3 : 2;
        (void)bt_gguf_add_tensor(w, s->gguf_name, t->dtype, n_dims, shape + 3 - n_dims);
    }
    return BT_OK;
}

enum bt_status bt_export_create(const struct bt_model *m, enum bt_dtype dtype,
                                struct bt_gguf_writer *w, struct bt_export **out,
                                struct bt_err *err)
{
    struct bt_export *e = bt_calloc(1, sizeof(*e));

    BT_ASSERT(bt_quantize_known(dtype));
    if (e == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", m->path);
    }
    e->m = m;
    e->gguf = w;
    enum bt_status st = m->gguf != NULL ? bt_export_copy_keys(m, w) : bt_export_keys(m, w, err);
    bt_export_file_type(w, dtype);
    if (st == BT_OK) {
        st = bt_export_freqs(m, &e->freqs, err);
    }
    if (st == BT_OK && e->freqs != NULL) {
        const uint64_t n = m->config.ropes[0].dim / 2;
        (void)bt_gguf_add_tensor(w, "rope_freqs.weight", BT_DTYPE_F32, 1, &n);
    }
    if (st == BT_OK) {
        st = plan_tensors(e, dtype, w, err);
    }
    if (st != BT_OK) {
        bt_export_destroy(e);
        return st;
    }
    *out = e;
    return BT_OK;
}

/* Of a model in e4m3: what stays as it is. */
static bool stays_plain(const struct bt_model *m, const struct bt_slot *s)
{
    return s->vector != NULL || s->for_embed || s->weight == &m->output ||
           ends_with(s->gguf_name, ".ffn_gate_inp.weight") || s->n_cols % 32 != 0;
}

static enum bt_dtype type_in_f8(const struct bt_model *m, const struct bt_slot *s)
{
    enum bt_dtype has = bt_slot_desc(s).dtype;

    return !stays_plain(m, s) ? BT_DTYPE_GF8 : has <= BT_DTYPE_BF16 ? has : BT_DTYPE_BF16;
}

static void add_f8(struct bt_st_writer *w, const struct bt_slot *s)
{
    const uint64_t shape[] = {s->n_rows, s->n_cols}, scales[] = {s->n_rows, 1};
    char name[288]; /* names are shorter than 256 bytes */

    bt_st_add_f8(w, s->hf_name, 2, shape);
    (void)snprintf(name, sizeof(name), "%s_scale", s->hf_name);
    bt_st_add_tensor(w, name, BT_DTYPE_F32, 2, scales);
}

enum bt_status bt_export_create_hf(const struct bt_model *m, enum bt_dtype dtype,
                                   struct bt_st_writer *w, struct bt_buf *config,
                                   struct bt_export **out, struct bt_err *err)
{
    struct bt_export *e = bt_calloc(1, sizeof(*e));

    BT_ASSERT(dtype <= BT_DTYPE_BF16 || dtype == BT_DTYPE_GF8);
    if (e == NULL || (e->tensors = bt_calloc(m->n_slots + 1, sizeof(*e->tensors))) == NULL) {
        bt_export_destroy(e);
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", m->path);
    }
    e->m = m;
    e->st = w;
    enum bt_status st = dtype == BT_DTYPE_GF8 ? bt_export_config_f8(m, stays_plain, config, err)
                                              : bt_export_config_json(m, dtype, config, err);
    if (st != BT_OK) {
        bt_export_destroy(e);
        return st;
    }
    for (size_t i = 0; i < m->n_slots; i++) {
        const struct bt_slot *s = &m->slots[i];
        const uint64_t shape[] = {s->n_rows, s->n_cols};
        bool vector = s->vector != NULL;
        enum bt_dtype t = dtype == BT_DTYPE_GF8 ? type_in_f8(m, s) : dtype;
        e->tensors[e->n_tensors++] = (struct out_tensor){.first = i, .n = 1, .dtype = t};
        if (t == BT_DTYPE_GF8) {
            add_f8(w, s);
        } else {
            bt_st_add_tensor(w, s->hf_name, t, vector ? 1 : 2, vector ? shape + 1 : shape);
        }
    }
    *out = e;
    return BT_OK;
}

void bt_export_destroy(struct bt_export *e)
{
    if (e != NULL) {
        bt_free(e->tensors);
        bt_free(e->freqs);
        bt_free(e);
    }
}

/* The row of the source that row r of q or k comes from: llama's GGUF files have pairs of a rotation side by side. */
static uint32_t source_row(const struct bt_export *e, const struct bt_slot *s, uint32_t r)
{
    const char *name = s->gguf_name;
    uint32_t half = e->m->config.head_dim / 2, head = r / (2 * half) * 2 * half, i = r % (2 * half);
    bool from_gguf = e->m->gguf != NULL, to_gguf = e->gguf != NULL;

    if (from_gguf == to_gguf || !bt_export_interleaves(e->m) ||
        (strstr(name, ".attn_q.") == NULL && strstr(name, ".attn_k.") == NULL)) {
        return r;
    }
    return head + (to_gguf ? i % 2 * half + i / 2 : i % half * 2 + i / half);
}

static enum bt_status emit(const struct bt_export *e, const void *p, size_t n, struct bt_err *err)
{
    return e->gguf != NULL ? bt_gguf_writer_data(e->gguf, p, n, err)
                           : bt_st_writer_data(e->st, p, n, err);
}

/* One slot's values, rows in the order of the output. */
struct reader {
    struct bt_kctx *k;
    struct bt_kweight *w;
    void *rows; /* of a quantised matrix */
    const uint32_t *perm;
    float *ordered; /* [n_cols]; with perm */
};

static void reader_close(struct reader *r)
{
    if (r->w != NULL) {
        bt_k_weight_destroy(r->k, r->w);
    }
    bt_free(r->rows);
    bt_free(r->ordered);
}

static enum bt_status reader_open(struct reader *r, struct bt_kctx *k, const struct bt_slot *s,
                                  struct bt_err *err)
{
    struct bt_k_weight_desc d = bt_slot_desc(s);

    *r = (struct reader){.k = k, .perm = d.perm};
    if (s->quant != NULL) {
        enum bt_status st = bt_quant_rows(s->quant, &r->rows, err);
        if (st != BT_OK) {
            return st;
        }
        d.data = r->rows;
        d.perm = NULL;
    }
    d.for_gemm = false;
    d.for_embed = true;
    if (r->perm != NULL && (r->ordered = bt_alloc(s->n_cols * sizeof(float))) == NULL) {
        bt_free(r->rows);
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    enum bt_status st = bt_k_weight_create(k, &d, &r->w, err);
    if (st != BT_OK) {
        reader_close(r);
    }
    return st;
}

static void read_rows(struct reader *r, const struct bt_export *e, const struct bt_slot *s,
                      uint32_t first, uint32_t n, float *out)
{
    uint32_t ids[ROWS];

    for (uint32_t i = 0; i < n; i++) {
        ids[i] = source_row(e, s, first + i);
    }
    bt_k_embed(r->k, out, r->w, ids, n, 1.0F);
    for (uint32_t i = 0; r->perm != NULL && i < n; i++) {
        float *row = out + (size_t)i * s->n_cols;
        for (uint32_t c = 0; c < s->n_cols; c++) {
            r->ordered[r->perm[c]] = row[c];
        }
        memcpy(row, r->ordered, s->n_cols * sizeof(float));
    }
}

static enum bt_status check_finite(const struct bt_slot *s, const float *x, size_t n,
                                   struct bt_err *err)
{
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(x[i])) {
            return bt_err_set(err, BT_ERR_INVALID, "%s: tensor %s: a value is not finite",
                              s->tensor->file, s->tensor->name);
        }
    }
    return BT_OK;
}

struct work {
    float *x;   /* [ROWS, n_cols] */
    uint8_t *q; /* the same, rounded */
};

/* The largest value of a row becomes the largest code. Returns the scale. */
static float put_f8_row(uint8_t *out, const float *x, uint32_t n)
{
    float most = 0.0F;

    for (uint32_t i = 0; i < n; i++) {
        most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    }
    float scale = most / BT_F8_MAX;
    for (uint32_t i = 0; i < n; i++) {
        out[i] = scale > 0.0F ? bt_f32_to_f8(x[i] / scale) : 0;
    }
    return scale;
}

/* Codes, then scales. */
static enum bt_status put_f8(const struct bt_export *e, struct bt_kctx *k, const struct bt_slot *s,
                             struct work *w, struct bt_err *err)
{
    float *scales = bt_alloc(s->n_rows * sizeof(float));
    struct reader r;

    if (scales == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    enum bt_status st = reader_open(&r, k, s, err);
    if (st != BT_OK) {
        bt_free(scales);
        return bt_err_prefix(err, "%s: tensor %s", s->tensor->file, s->tensor->name);
    }
    for (uint32_t i = 0; i < s->n_rows && st == BT_OK; i += ROWS) {
        uint32_t n = s->n_rows - i < ROWS ? s->n_rows - i : ROWS;
        read_rows(&r, e, s, i, n, w->x);
        st = check_finite(s, w->x, (size_t)n * s->n_cols, err);
        for (uint32_t j = 0; j < n && st == BT_OK; j++) {
            size_t at = (size_t)j * s->n_cols;
            scales[i + j] = put_f8_row(w->q + at, w->x + at, s->n_cols);
            if (!(scales[i + j] < BT_GF8_SCALE_MAX)) {
                st = bt_err_set(err, BT_ERR_UNSUPPORTED, "%s: tensor %s: a value is too large",
                                s->tensor->file, s->tensor->name);
            }
        }
        st = st == BT_OK ? emit(e, w->q, (size_t)n * s->n_cols, err) : st;
    }
    st = st == BT_OK ? emit(e, scales, s->n_rows * sizeof(float), err) : st;
    reader_close(&r);
    bt_free(scales);
    return st;
}

static enum bt_status put_matrix(const struct bt_export *e, struct bt_kctx *k,
                                 const struct bt_slot *s, enum bt_dtype t, struct work *w,
                                 struct bt_err *err)
{
    size_t row = (size_t)s->n_cols / bt_dtype_block_values(t) * bt_dtype_block_bytes(t);
    struct reader r;
    enum bt_status st = reader_open(&r, k, s, err);

    if (st != BT_OK) {
        return bt_err_prefix(err, "%s: tensor %s", s->tensor->file, s->tensor->name);
    }
    for (uint32_t i = 0; i < s->n_rows && st == BT_OK; i += ROWS) {
        uint32_t n = s->n_rows - i < ROWS ? s->n_rows - i : ROWS;
        read_rows(&r, e, s, i, n, w->x);
        st = t > BT_DTYPE_BF16 ? check_finite(s, w->x, (size_t)n * s->n_cols, err) : BT_OK;
        if (st == BT_OK) {
            bt_quantize(w->q, w->x, n * s->n_cols, t);
            st = emit(e, w->q, n * row, err);
        }
    }
    reader_close(&r);
    return st;
}

static enum bt_status put_vector(const struct bt_export *e, const struct bt_slot *s,
                                 enum bt_dtype t, struct work *w, struct bt_err *err)
{
    const struct bt_model *m = e->m;
    bool norm = m->st != NULL && e->gguf != NULL && strstr(s->gguf_name, "norm.") != NULL;
    float *y = w->x + s->n_cols; /* there is room for many rows */

    bt_plain_to_f32(w->x, s->data, s->tensor->dtype, s->n_cols);
    for (uint32_t i = 0; i < s->n_cols; i++) {
        y[i] = w->x[source_row(e, s, i)] + (norm ? m->config.norm_offset : 0.0F);
    }
    bt_quantize(w->q, y, s->n_cols, t);
    return emit(e, w->q, s->n_cols * bt_dtype_block_bytes(t), err);
}

static enum bt_status work_init(const struct bt_export *e, struct work *w, struct bt_err *err)
{
    size_t cols = 1;

    for (size_t i = 0; i < e->m->n_slots; i++) {
        cols = e->m->slots[i].n_cols > cols ? e->m->slots[i].n_cols : cols;
    }
    w->x = bt_alloc(cols * ROWS * sizeof(float));
    w->q = bt_alloc(cols * ROWS * sizeof(float)); /* no type is wider */
    return w->x != NULL && w->q != NULL ? BT_OK : bt_err_set(err, BT_ERR_NOMEM, "out of memory");
}

enum bt_status bt_export_data(struct bt_export *e, struct bt_kctx *k,
                              void (*progress)(void *arg, double fraction), void *arg,
                              struct bt_err *err)
{
    struct work work = {0};
    uint64_t done = 0;
    enum bt_status st = work_init(e, &work, err);

    if (st == BT_OK && e->freqs != NULL) {
        st = emit(e, e->freqs, e->m->config.ropes[0].dim / 2 * sizeof(float), err);
    }
    for (size_t i = 0; i < e->n_tensors; i++) {
        const struct out_tensor *t = &e->tensors[i];
        for (size_t j = t->first; j < t->first + t->n && st == BT_OK; j++) {
            const struct bt_slot *s = &e->m->slots[j];
            st = s->vector != NULL          ? put_vector(e, s, t->dtype, &work, err)
                 : t->dtype == BT_DTYPE_GF8 ? put_f8(e, k, s, &work, err)
                                            : put_matrix(e, k, s, t->dtype, &work, err);
            done += s->bytes;
            if (progress != NULL && st == BT_OK) {
                progress(arg, (double)done / (double)e->m->info.weight_bytes);
            }
        }
    }
    bt_free(work.x);
    bt_free(work.q);
    return st;
}
