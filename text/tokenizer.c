/* The tokenizer as a whole: encode from text to ids, lookups, destruction. How one is built from
 * files is in tokenizer_json.c and tokenizer_gguf.c; ids to text is in detok.c. */

#include "text/tokenizer.h"

#include <string.h>
#include "base/mem.h"
#include "base/utf8.h"
#include "text/tokenizer_int.h"

/* ---- lists of ids ---- */

enum bt_status bt_ids_add(struct bt_ids *ids, uint32_t id)
{
    if (ids->len == ids->cap) {
        size_t cap = ids->cap < 16 ? 16 : ids->cap * 2;
        uint32_t *v = bt_realloc(ids->v, cap * sizeof(*v));
        if (v == NULL) {
            return BT_ERR_NOMEM;
        }
        ids->v = v;
        ids->cap = cap;
    }
    ids->v[ids->len++] = id;
    return BT_OK;
}

void bt_ids_clear(struct bt_ids *ids)
{
    ids->len = 0;
}

void bt_ids_fini(struct bt_ids *ids)
{
    bt_free(ids->v);
    *ids = (struct bt_ids){0};
}

/* ---- encode ---- */

struct encoder {
    const struct bt_tokenizer *t;
    struct bt_ids *out;
    struct bt_err *err;
    bool parse_special;
    bool at_start;             /* the section begins the whole text */
    struct bt_buf norm, tmp;   /* a section while it is normalized */
    struct bt_tok_pieces a, b; /* the pieces of one gap */
    struct bt_tok_work work;
};

static enum bt_status on_token(void *arg, uint32_t id)
{
    struct encoder *e = arg;

    return bt_ids_add(e->out, id);
}

/* Text without added tokens, normalized: pieces, then BPE. */
static enum bt_status on_text(void *arg, const char *s, size_t off, size_t len)
{
    struct encoder *e = arg;
    struct bt_tok_pieces *p = &e->a;
    enum bt_status st;

    bt_buf_clear(&p->text);
    p->n = 0;
    p->first = e->at_start && off == 0;
    e->b.first = p->first;
    if (!bt_buf_add(&p->text, s, len) || !bt_tok_pieces_add(p, 0, len)) {
        return BT_ERR_NOMEM;
    }
    st = bt_tok_pre_apply(e->t->pres, e->t->n_pres, p, &e->b, e->err);
    for (size_t i = 0; i < p->n && st == BT_OK; i++) {
        if (p->v[i].len > 0) {
            st = bt_tok_bpe_encode(&e->t->bpe, &e->work, p->text.data + p->v[i].off, p->v[i].len,
                                   e->out);
        }
    }
    return st;
}

/* Text between the added tokens that are searched for as typed. */
static enum bt_status on_section(void *arg, const char *s, size_t off, size_t len)
{
    struct encoder *e = arg;
    const struct bt_tokenizer *t = e->t;

    e->at_start = off == 0;
    if (t->n_norms == 0) {
        return bt_tok_finder_cut(&t->normalized, s, len, e->parse_special, on_text, on_token, e);
    }
    bt_buf_clear(&e->norm);
    if (!bt_buf_add(&e->norm, s, len)) {
        return BT_ERR_NOMEM;
    }
    for (size_t i = 0; i < t->n_norms; i++) {
        enum bt_status st = bt_tok_norm_apply(&t->norms[i], &e->norm, &e->tmp);
        if (st != BT_OK) {
            return st;
        }
        if (e->norm.len > 4 * BT_TOK_TEXT_BYTES_MAX) {
            return bt_err_set(e->err, BT_ERR_INVALID,
                              "text: normalizing makes it longer than %zu bytes",
                              4 * BT_TOK_TEXT_BYTES_MAX);
        }
    }
    return bt_tok_finder_cut(&t->normalized, e->norm.data, e->norm.len, e->parse_special, on_text,
                             on_token, e);
}

static enum bt_status add_all(struct bt_ids *out, const uint32_t *ids, size_t n)
{
    enum bt_status st = BT_OK;

    for (size_t i = 0; i < n && st == BT_OK; i++) {
        st = bt_ids_add(out, ids[i]);
    }
    return st;
}

enum bt_status bt_tokenizer_encode(const struct bt_tokenizer *t, const char *text, size_t len,
                                   unsigned flags, struct bt_ids *out, struct bt_err *err)
{
    struct encoder e = {
        .t = t, .out = out, .err = err, .parse_special = (flags & BT_TOK_PARSE_SPECIAL) != 0};
    size_t n_before = out->len, bad;
    enum bt_status st = BT_OK;
    struct bt_err cause = {.status = BT_OK};

    if (len > BT_TOK_TEXT_BYTES_MAX) {
        return bt_err_set(err, BT_ERR_INVALID, "text of %zu bytes, the limit is %zu", len,
                          BT_TOK_TEXT_BYTES_MAX);
    }
    if (!bt_utf8_valid(text, len, &bad)) {
        return bt_err_set(err, BT_ERR_INVALID, "text: byte %zu: not valid UTF-8", bad);
    }
    e.err = &cause;
    if (flags & BT_TOK_ADD_SPECIAL) {
        st = add_all(out, t->prefix, t->n_prefix);
    }
    if (st == BT_OK) {
        st = bt_tok_finder_cut(&t->raw, text, len, e.parse_special, on_section, on_token, &e);
    }
    if (st == BT_OK && (flags & BT_TOK_ADD_SPECIAL)) {
        st = add_all(out, t->suffix, t->n_suffix);
    }
    bt_buf_fini(&e.norm);
    bt_buf_fini(&e.tmp);
    bt_tok_pieces_fini(&e.a);
    bt_tok_pieces_fini(&e.b);
    bt_tok_work_fini(&e.work);
    if (st != BT_OK) {
        out->len = n_before;
        return bt_err_set(err, st, "%s", cause.status != BT_OK ? cause.msg : bt_status_str(st));
    }
    return BT_OK;
}

/* ---- lookups ---- */

static const struct bt_tok_token *token(const struct bt_tokenizer *t, uint32_t id)
{
    return id < t->n_tokens && t->tokens[id].name != NULL ? &t->tokens[id] : NULL;
}

uint32_t bt_tokenizer_vocab_size(const struct bt_tokenizer *t)
{
    return t->n_tokens;
}

const char *bt_tokenizer_token_text(const struct bt_tokenizer *t, uint32_t id, size_t *len)
{
    const struct bt_tok_token *k = token(t, id);

    *len = k == NULL ? 0 : k->text_len;
    return k == NULL ? NULL : k->text;
}

const char *bt_tokenizer_token_name(const struct bt_tokenizer *t, uint32_t id, size_t *len)
{
    const struct bt_tok_token *k = token(t, id);

    *len = k == NULL ? 0 : k->name_len;
    return k == NULL ? NULL : k->name;
}

bool bt_tokenizer_is_special(const struct bt_tokenizer *t, uint32_t id)
{
    const struct bt_tok_token *k = token(t, id);

    return k != NULL && k->special;
}

uint32_t bt_tokenizer_id_of(const struct bt_tokenizer *t, const char *name, size_t len)
{
    uint64_t id;

    if (bt_map_get(&t->added_ids, name, len, &id)) {
        return (uint32_t)id;
    }
    return bt_tok_bpe_id(&t->bpe, name, len);
}

uint32_t bt_tokenizer_bos(const struct bt_tokenizer *t)
{
    return t->bos;
}

uint32_t bt_tokenizer_eos(const struct bt_tokenizer *t)
{
    return t->eos;
}

uint32_t bt_tokenizer_unk(const struct bt_tokenizer *t)
{
    return t->unk;
}

uint32_t bt_tokenizer_pad(const struct bt_tokenizer *t)
{
    return t->pad;
}

const uint32_t *bt_tokenizer_prefix(const struct bt_tokenizer *t, size_t *n)
{
    *n = t->n_prefix;
    return t->prefix;
}

const uint32_t *bt_tokenizer_suffix(const struct bt_tokenizer *t, size_t *n)
{
    *n = t->n_suffix;
    return t->suffix;
}

/* ---- the end ---- */

void bt_tokenizer_destroy(struct bt_tokenizer *t)
{
    if (t == NULL) {
        return;
    }
    for (size_t i = 0; i < t->n_norms; i++) {
        bt_tok_norm_fini(&t->norms[i]);
    }
    for (size_t i = 0; i < t->n_pres; i++) {
        bt_tok_pattern_destroy(t->pres[i].pattern);
    }
    for (size_t i = 0; i < t->decoder.n_steps; i++) {
        bt_tok_norm_fini(&t->decoder.steps[i]);
    }
    bt_tok_bpe_fini(&t->bpe);
    bt_map_fini(&t->added_ids);
    bt_free(t->norms);
    bt_free(t->pres);
    bt_free(t->decoder.steps);
    bt_free(t->raw.v);
    bt_free(t->normalized.v);
    bt_free(t->normalized_names);
    bt_free(t->prefix);
    bt_free(t->suffix);
    bt_free(t->tokens);
    bt_free(t->names);
    bt_free(t->texts);
    bt_free(t);
}
