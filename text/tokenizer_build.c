/* Puts a tokenizer together, whatever file its parts come from. Owns the growth of its arrays and
 * the last step, in which added tokens are sorted and decoded texts worked out. */

#include "text/tokenizer_int.h"

#include <string.h>
#include "base/assert.h"
#include "base/mem.h"

/* What GPT-2 splits by; ByteLevel has it built in. */
#define GPT2_SPLIT                                                                                 \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

enum bt_status bt_tok_build_begin(uint32_t n_ids, size_t names_bytes, size_t n_merges_max,
                                  struct bt_tokenizer **out)
{
    struct bt_tokenizer *t = bt_calloc(1, sizeof(*t));

    if (t == NULL) {
        return BT_ERR_NOMEM;
    }
    bt_map_init(&t->added_ids, false);
    t->bos = t->eos = t->unk = t->pad = BT_TOK_NONE;
    t->tokens = bt_calloc(n_ids == 0 ? 1 : n_ids, sizeof(*t->tokens));
    t->names = bt_alloc(names_bytes + 1);
    if (bt_tok_bpe_init(&t->bpe, n_merges_max) != BT_OK || t->tokens == NULL || t->names == NULL) {
        bt_tokenizer_destroy(t);
        return BT_ERR_NOMEM;
    }
    t->n_tokens = n_ids;
    *out = t;
    return BT_OK;
}

const char *bt_tok_build_name(struct bt_tokenizer *t, size_t *used, const char *s, size_t len)
{
    char *at = t->names + *used;

    memcpy(at, s, len);
    at[len] = '\0';
    *used += len + 1;
    return at;
}

enum bt_status bt_tok_build_added(struct bt_tokenizer *t, const struct bt_tok_added *a)
{
    struct bt_tok_finder *f = a->normalized ? &t->normalized : &t->raw;

    if (bt_map_put(&t->added_ids, a->content, a->len, a->id) != BT_OK) {
        return BT_ERR_NOMEM;
    }
    if ((f->n & (f->n - 1)) == 0) { /* 0 or a power of two: full */
        struct bt_tok_added *v = bt_realloc(f->v, (f->n == 0 ? 1 : f->n * 2) * sizeof(*v));
        if (v == NULL) {
            return BT_ERR_NOMEM;
        }
        f->v = v;
    }
    f->v[f->n++] = *a;
    return BT_OK;
}

struct bt_tok_norm *bt_tok_build_norm(struct bt_tok_norm **v, size_t *n)
{
    struct bt_tok_norm *w = bt_realloc(*v, (*n + 1) * sizeof(*w));

    if (w == NULL) {
        return NULL;
    }
    *v = w;
    w[*n] = (struct bt_tok_norm){.kind = BT_TOK_PREPEND};
    return &w[(*n)++];
}

struct bt_tok_pre *bt_tok_build_pre(struct bt_tokenizer *t)
{
    struct bt_tok_pre *w = bt_realloc(t->pres, (t->n_pres + 1) * sizeof(*w));

    if (w == NULL) {
        return NULL;
    }
    t->pres = w;
    w[t->n_pres] = (struct bt_tok_pre){.kind = BT_TOK_BYTE_MAP};
    return &w[t->n_pres++];
}

enum bt_status bt_tok_build_split(struct bt_tokenizer *t, const char *regex,
                                  enum bt_tok_behavior behavior, struct bt_err *err)
{
    struct bt_tok_pre *p = bt_tok_build_pre(t);

    if (p == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    enum bt_status st = bt_tok_pattern_regex(regex, strlen(regex), &p->pattern, err);
    if (st == BT_OK) {
        p->kind = BT_TOK_SPLIT;
        p->behavior = behavior;
    }
    return st;
}

enum bt_status bt_tok_build_byte_level(struct bt_tokenizer *t, bool prefix_space, bool split,
                                       struct bt_err *err)
{
    struct bt_tok_pre *p;

    if (prefix_space) {
        p = bt_tok_build_pre(t);
        if (p == NULL) {
            return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
        }
        p->kind = BT_TOK_PREFIX_SPACE;
    }
    if (split) {
        enum bt_status st = bt_tok_build_split(t, GPT2_SPLIT, BT_TOK_ISOLATED, err);
        if (st != BT_OK) {
            return st;
        }
    }
    return bt_tok_build_pre(t) != NULL ? BT_OK : bt_err_set(err, BT_ERR_NOMEM, "out of memory");
}

/* Added tokens that are found after normalizing are looked for in their normalized spelling, and
 * decode to it. */
static enum bt_status normalize_added(struct bt_tokenizer *t)
{
    struct bt_tok_finder *f = &t->normalized;
    struct bt_buf all = {0}, b = {0}, tmp = {0};
    size_t kept = 0, off = 0;
    enum bt_status st = BT_OK;

    for (size_t i = 0; i < f->n && st == BT_OK; i++) {
        bt_buf_clear(&b);
        st = bt_buf_add(&b, f->v[i].content, f->v[i].len) ? BT_OK : BT_ERR_NOMEM;
        for (size_t k = 0; k < t->n_norms && st == BT_OK; k++) {
            st = bt_tok_norm_apply(&t->norms[k], &b, &tmp);
        }
        if (st == BT_OK && b.len > 0) {
            f->v[kept] = f->v[i];
            f->v[kept++].len = b.len;
            st = bt_buf_add(&all, b.data, b.len) ? BT_OK : BT_ERR_NOMEM;
        }
    }
    f->n = kept;
    bt_buf_fini(&b);
    bt_buf_fini(&tmp);
    t->normalized_names = all.data; /* owned by t from here */
    for (size_t i = 0; i < f->n && st == BT_OK; i++) {
        f->v[i].content = t->normalized_names + off;
        off += f->v[i].len;
        t->tokens[f->v[i].id].text = f->v[i].content;
        t->tokens[f->v[i].id].text_len = (uint32_t)f->v[i].len;
    }
    return st;
}

enum bt_status bt_tok_build_finish(struct bt_tokenizer *t)
{
    enum bt_status st = normalize_added(t);

    if (st != BT_OK) {
        return st;
    }
    bt_tok_finder_sort(&t->raw);
    bt_tok_finder_sort(&t->normalized);
    while (t->n_tokens > 0 && t->tokens[t->n_tokens - 1].name == NULL) {
        t->n_tokens--;
    }
    return bt_tok_decoder_compile(t);
}
