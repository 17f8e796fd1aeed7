/* Builds a tokenizer from GGUF metadata. "gpt2" vocabularies name their pre-tokenizer, whose
 * regexes are here; "llama" vocabularies have scores instead of merges, so the merges are worked
 * out from them. */

#include "text/tokenizer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "base/mem.h"
#include "base/utf8.h"
#include "files/gguf.h"
#include "text/tokenizer_int.h"

#define SPACE_MARK "\xe2\x96\x81" /* ▁ */

#define GPT2_SPLIT                                                                                 \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define ENDINGS     "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define LINES_SPACE "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define UPPER_LOWER                                                                                \
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
#define UPPER_ONLY                                                                                 \
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"

static const struct bt_tok_gguf_pre pre_tokenizers[] = {
    {"|gpt-2|", false, false, {GPT2_SPLIT}},
    {"|smollm|starcoder|refact|command-r|codeshell|", false, false, {"\\p{N}", GPT2_SPLIT}},
    {"|llama-bpe|llama3|llama-v3|",
     false,
     true,
     {ENDINGS
      "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" LINES_SPACE}},
    {"|qwen2|deepseek-r1-qwen|",
     true,
     false,
     {ENDINGS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" LINES_SPACE}},
    {"|gpt-4o|",
     false,
     true,
     {UPPER_LOWER ENDINGS "?|" UPPER_ONLY ENDINGS
                          "?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" LINES_SPACE}},
    {"|tekken|",
     false,
     true,
     {UPPER_LOWER "|" UPPER_ONLY "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" LINES_SPACE}},
    {"|deepseek-v3|",
     false,
     false,
     {"\\p{N}{1,3}",
      "[\xe4\xb8\x80-\xe9\xbe\xa5\xe3\x81\x80-\xe3\x82\x9f\xe3\x82\xa0-\xe3\x83\xbf]+",
      "[!\"#$%&'()*+,\\-./"
      ":;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "
      "?[\\p{P}\\p{S}]+[\r\n]*|" LINES_SPACE}},
};

#define N_PRE (sizeof(pre_tokenizers) / sizeof(pre_tokenizers[0]))

const char *bt_tok_gguf_pre_name(size_t i)
{
    /* the first name of each row of the table */
    static const char *const first[N_PRE] = {"gpt-2",  "smollm", "llama-bpe",  "qwen2",
                                             "gpt-4o", "tekken", "deepseek-v3"};

    return i < N_PRE ? first[i] : NULL;
}

struct gguf_loader {
    struct bt_tokenizer *t;
    const struct bt_tok_gguf *g;
    struct bt_err *err;
};

static enum bt_status nomem(struct gguf_loader *l)
{
    return bt_err_set(l->err, BT_ERR_NOMEM, "out of memory");
}

static int32_t type_of(const struct bt_tok_gguf *g, size_t i)
{
    return g->types == NULL ? BT_TOK_GGUF_NORMAL : g->types[i];
}

/* ---- vocabulary ---- */

static enum bt_status read_tokens(struct gguf_loader *l)
{
    const struct bt_tok_gguf *g = l->g;
    size_t used = 0;

    for (uint32_t i = 0; i < g->n_tokens; i++) {
        const struct bt_tok_str *s = &g->tokens[i];
        struct bt_tok_token *k = &l->t->tokens[i];
        int32_t type = type_of(g, i);
        bool special = type == BT_TOK_GGUF_CONTROL || type == BT_TOK_GGUF_UNKNOWN;
        bool added = special || type == BT_TOK_GGUF_USER;
        enum bt_status st = BT_OK;
        if (!bt_utf8_valid(s->s, s->len, NULL)) {
            return bt_err_set(l->err, BT_ERR_INVALID, "tokenizer.ggml.tokens[%u]: not valid UTF-8",
                              i);
        }
        k->name = bt_tok_build_name(l->t, &used, s->s, s->len);
        k->name_len = (uint32_t)s->len;
        k->special = special;
        if (!added) {
            st = bt_tok_bpe_add(&l->t->bpe, k->name, s->len, i);
        } else if (s->len > 0) {
            st = bt_tok_build_added(
                l->t,
                &(struct bt_tok_added){
                    .id = i, .special = special, .content = k->name, .len = s->len, .order = i});
        }
        if (st != BT_OK) {
            return nomem(l);
        }
    }
    return BT_OK;
}

static enum bt_status check_id(struct gguf_loader *l, const char *what, uint32_t id, uint32_t *out)
{
    if (id != BT_TOK_NONE && id >= l->t->n_tokens) {
        return bt_err_set(l->err, BT_ERR_INVALID, "tokenizer.ggml.%s: id %u, the vocabulary has %u",
                          what, id, l->t->n_tokens);
    }
    *out = id;
    return BT_OK;
}

static enum bt_status affix(struct gguf_loader *l, bool add, uint32_t id, const char *what,
                            uint32_t **v, size_t *n)
{
    if (!add) {
        return BT_OK;
    }
    if (id == BT_TOK_NONE) {
        return bt_err_set(l->err, BT_ERR_INVALID,
                          "tokenizer.ggml.add_%s_token is set without a %s_token_id", what, what);
    }
    *v = bt_alloc(sizeof(**v));
    if (*v == NULL) {
        return nomem(l);
    }
    (*v)[0] = id;
    *n = 1;
    return BT_OK;
}

static enum bt_status read_ids(struct gguf_loader *l)
{
    const struct bt_tok_gguf *g = l->g;
    struct bt_tokenizer *t = l->t;
    enum bt_status st = check_id(l, "bos_token_id", g->bos, &t->bos);

    st = st != BT_OK ? st : check_id(l, "eos_token_id", g->eos, &t->eos);
    st = st != BT_OK ? st : check_id(l, "unknown_token_id", g->unk, &t->unk);
    st = st != BT_OK ? st : check_id(l, "padding_token_id", g->pad, &t->pad);
    st = st != BT_OK ? st : affix(l, g->add_bos, t->bos, "bos", &t->prefix, &t->n_prefix);
    return st != BT_OK ? st : affix(l, g->add_eos, t->eos, "eos", &t->suffix, &t->n_suffix);
}

/* ---- byte-level vocabularies ---- */

static enum bt_status read_gpt2_merges(struct gguf_loader *l)
{
    const struct bt_tok_gguf *g = l->g;

    for (uint32_t i = 0; i < g->n_merges; i++) {
        const struct bt_tok_str *m = &g->merges[i];
        const char *space = m->len < 3 ? NULL : memchr(m->s + 1, ' ', m->len - 1);
        enum bt_status st = BT_ERR_INVALID;
        if (space != NULL) {
            struct bt_tok_str left = {m->s, (size_t)(space - m->s)},
                              right = {space + 1, m->len - left.len - 1};
            st = bt_tok_bpe_merge_names(&l->t->bpe, left, right, i);
        }
        if (st == BT_ERR_INVALID) {
            return bt_err_set(
                l->err, st,
                "tokenizer.ggml.merges[%u]: \"%.*s\" is not two tokens that make a third", i,
                (int)(m->len < 80 ? m->len : 80), m->s);
        }
        if (st != BT_OK) {
            return nomem(l);
        }
    }
    return BT_OK;
}

const struct bt_tok_gguf_pre *bt_tok_gguf_find_pre(const char *name)
{
    size_t n = strlen(name);

    for (size_t i = 0; i < sizeof(pre_tokenizers) / sizeof(pre_tokenizers[0]); i++) {
        for (const char *p = pre_tokenizers[i].names + 1; *p != '\0'; p = strchr(p, '|') + 1) {
            if (strncmp(p, name, n) == 0 && p[n] == '|') {
                return &pre_tokenizers[i];
            }
        }
    }
    return NULL;
}

static enum bt_status build_gpt2(struct gguf_loader *l)
{
    const char *name = l->g->pre == NULL ? "default" : l->g->pre;
    const struct bt_tok_gguf_pre *pre = bt_tok_gguf_find_pre(name);
    enum bt_status st = BT_OK;

    if (pre == NULL) {
        return bt_err_set(l->err, BT_ERR_UNSUPPORTED,
                          "tokenizer.ggml.pre: \"%.64s\" is not supported", name);
    }
    if (l->g->merges == NULL) {
        return bt_err_set(l->err, BT_ERR_INVALID, "tokenizer.ggml.merges is missing");
    }
    l->t->bpe.ignore_merges = pre->ignore_merges;
    if (pre->nfc) {
        struct bt_tok_norm *n = bt_tok_build_norm(&l->t->norms, &l->t->n_norms);
        if (n == NULL) {
            return nomem(l);
        }
        n->kind = BT_TOK_NFC;
    }
    for (unsigned i = 0; i < 4 && pre->splits[i] != NULL && st == BT_OK; i++) {
        st = bt_tok_build_split(l->t, pre->splits[i], BT_TOK_ISOLATED, l->err);
    }
    if (st == BT_OK) {
        st = bt_tok_build_byte_level(l->t, false, false, l->err);
    }
    l->t->decoder.kind = BT_TOK_DEC_BYTE_LEVEL;
    return st == BT_OK ? read_gpt2_merges(l) : st;
}

/* ---- vocabularies with scores ---- */

struct scored {
    float score;
    uint32_t id;
};

static int by_score(const void *pa, const void *pb)
{
    const struct scored *a = pa, *b = pb;

    if (a->score != b->score) {
        return a->score > b->score ? -1 : 1;
    }
    return a->id < b->id ? -1 : 1;
}

/* Every way to cut a token into two tokens is a merge; its rank is the token's place by score,
 * equal scores sharing one, so that of those the leftmost pair goes first. With add false they are
 * only counted. */
static size_t token_merges(struct gguf_loader *l, uint32_t id, uint32_t rank, bool add)
{
    struct bt_tok_bpe *b = &l->t->bpe;
    const struct bt_tok_token *k = &l->t->tokens[id];
    size_t count = 0;

    for (uint32_t cut = 1; cut < k->name_len; cut++) {
        if (((uint8_t)k->name[cut] & 0xC0) == 0x80) {
            continue;
        }
        uint32_t left = bt_tok_bpe_id(b, k->name, cut);
        uint32_t right =
            left == BT_TOK_NONE ? BT_TOK_NONE : bt_tok_bpe_id(b, k->name + cut, k->name_len - cut);
        if (right == BT_TOK_NONE || type_of(l->g, left) != BT_TOK_GGUF_NORMAL ||
            type_of(l->g, right) != BT_TOK_GGUF_NORMAL) {
            continue;
        }
        count++;
        if (add) {
            bt_tok_bpe_merge(b, left, right, rank, id);
        }
    }
    return count;
}

static enum bt_status merges_from_scores(struct gguf_loader *l)
{
    const struct bt_tok_gguf *g = l->g;
    struct scored *order = bt_alloc(g->n_tokens * sizeof(*order));
    size_t n = 0, n_merges = 0;
    uint32_t rank = 0;

    if (order == NULL) {
        return nomem(l);
    }
    for (uint32_t i = 0; i < g->n_tokens; i++) {
        if (isnan(g->scores[i])) {
            bt_free(order);
            return bt_err_set(l->err, BT_ERR_INVALID, "tokenizer.ggml.scores[%u]: not a number", i);
        }
        if (type_of(g, i) == BT_TOK_GGUF_NORMAL) {
            order[n++] = (struct scored){g->scores[i], i};
            n_merges += token_merges(l, i, 0, false);
        }
    }
    if (bt_tok_bpe_room(&l->t->bpe, n_merges) != BT_OK) {
        bt_free(order);
        return nomem(l);
    }
    qsort(order, n, sizeof(*order), by_score);
    for (size_t i = 0; i < n; i++) {
        rank += i > 0 && order[i].score != order[i - 1].score;
        (void)token_merges(l, order[i].id, rank, true); /* counted before */
    }
    bt_free(order);
    return BT_OK;
}

static enum bt_status add_text_step(struct bt_tok_norm **v, size_t *n, enum bt_tok_norm_kind kind,
                                    const char *from, const char *to, struct bt_err *err)
{
    struct bt_tok_norm *s = bt_tok_build_norm(v, n);

    if (s == NULL || (s->content = bt_strdup(to)) == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    s->kind = kind;
    s->content_len = strlen(to);
    return kind == BT_TOK_REPLACE ? bt_tok_pattern_literal(from, strlen(from), &s->pattern, err)
                                  : BT_OK;
}

static enum bt_status build_llama(struct gguf_loader *l)
{
    struct bt_tokenizer *t = l->t;
    struct bt_tok_decoder *d = &t->decoder;
    enum bt_status st = BT_OK;

    if (l->g->scores == NULL) {
        return bt_err_set(l->err, BT_ERR_INVALID, "tokenizer.ggml.scores is missing");
    }
    if (l->g->add_space_prefix) {
        st = add_text_step(&t->norms, &t->n_norms, BT_TOK_PREPEND, NULL, SPACE_MARK, l->err);
        memcpy(d->strip, " ", 1);
        d->strip_len = d->strip_start = 1;
    }
    if (st == BT_OK) {
        st = add_text_step(&t->norms, &t->n_norms, BT_TOK_REPLACE, " ", SPACE_MARK, l->err);
    }
    d->kind = BT_TOK_DEC_TEXT;
    d->byte_fallback = true;
    if (st == BT_OK) {
        st = add_text_step(&d->steps, &d->n_steps, BT_TOK_REPLACE, SPACE_MARK, " ", l->err);
    }
    t->bpe.byte_fallback = t->bpe.fuse_unk = true;
    t->bpe.unk = t->unk;
    return st == BT_OK ? merges_from_scores(l) : st;
}

/* ---- the whole ---- */

static enum bt_status build(struct gguf_loader *l)
{
    const struct bt_tok_gguf *g = l->g;
    bool gpt2 = strcmp(g->model, "gpt2") == 0;
    size_t names_bytes = 0;

    if (!gpt2 && strcmp(g->model, "llama") != 0) {
        return bt_err_set(l->err, BT_ERR_UNSUPPORTED,
                          "tokenizer.ggml.model: \"%.64s\" is not supported", g->model);
    }
    if (g->n_tokens == 0 || g->n_tokens > BT_TOK_IDS_MAX || g->n_merges > BT_TOK_IDS_MAX) {
        return bt_err_set(l->err, BT_ERR_INVALID,
                          "tokenizer.ggml.tokens: %zu tokens and %zu merges, the limit is %u",
                          g->n_tokens, g->n_merges, BT_TOK_IDS_MAX);
    }
    for (size_t i = 0; i < g->n_tokens; i++) {
        if (g->tokens[i].len > UINT16_MAX) {
            return bt_err_set(l->err, BT_ERR_INVALID,
                              "tokenizer.ggml.tokens[%zu]: %zu bytes, the limit is %u", i,
                              g->tokens[i].len, UINT16_MAX);
        }
        names_bytes += g->tokens[i].len + 1;
    }
    if (bt_tok_build_begin((uint32_t)g->n_tokens, names_bytes, g->n_merges, &l->t) != BT_OK) {
        return nomem(l);
    }
    enum bt_status st = read_tokens(l);
    st = st != BT_OK ? st : read_ids(l);
    st = st != BT_OK ? st : gpt2 ? build_gpt2(l) : build_llama(l);
    return st != BT_OK ? st : bt_tok_build_finish(l->t) == BT_OK ? BT_OK : nomem(l);
}

enum bt_status bt_tokenizer_from_gguf(const char *name, const struct bt_tok_gguf *g,
                                      struct bt_tokenizer **out, struct bt_err *err)
{
    struct bt_err cause = {.status = BT_OK};
    struct gguf_loader l = {.g = g, .err = &cause};
    enum bt_status st = build(&l);

    if (st != BT_OK) {
        bt_tokenizer_destroy(l.t);
        return bt_err_set(err, st, "%s: %s", name,
                          cause.status == BT_OK ? bt_status_str(st) : cause.msg);
    }
    *out = l.t;
    return BT_OK;
}

/* ---- from a file ---- */

/* Absent optional keys leave *v NULL. */
static enum bt_status strings(const struct bt_gguf *f, const char *key, bool need,
                              struct bt_tok_str **v, size_t *n, struct bt_err *err)
{
    struct bt_gguf_iter it;
    enum bt_status st = bt_gguf_iter_strings(f, key, &it, err);

    *n = 0;
    if (st != BT_OK) {
        return st == BT_ERR_NOT_FOUND && !need ? BT_OK : st;
    }
    if (it.left > BT_TOK_IDS_MAX) {
        return bt_err_set(err, BT_ERR_INVALID, "%s: %s: too many elements", bt_gguf_path(f), key);
    }
    *v = bt_alloc((size_t)it.left * sizeof(**v) + 1);
    if (*v == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "%s: %s: out of memory", bt_gguf_path(f), key);
    }
    for (size_t total = (size_t)it.left;
         *n < total && bt_gguf_next_str(&it, &(*v)[*n].s, &(*v)[*n].len); ++*n) {
    }
    return BT_OK;
}

/* An optional array of n numbers, stored by put. */
static enum bt_status numbers(const struct bt_gguf *f, const char *key, size_t n, float **as_float,
                              int32_t **as_int, struct bt_err *err)
{
    struct bt_gguf_iter it;
    enum bt_status st = bt_gguf_iter_numbers(f, key, &it, err);
    double x;

    if (st != BT_OK) {
        return st == BT_ERR_NOT_FOUND ? BT_OK : st;
    }
    if (it.left != n) {
        return bt_err_set(err, BT_ERR_INVALID, "%s: %s: %llu elements, there are %zu tokens",
                          bt_gguf_path(f), key, (unsigned long long)it.left, n);
    }
    void *v = bt_alloc(n * 4 + 1);
    if (v == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "%s: %s: out of memory", bt_gguf_path(f), key);
    }
    if (as_float != NULL) {
        *as_float = v;
    } else {
        *as_int = v;
    }
    for (size_t i = 0; i < n && bt_gguf_next_f64(&it, &x); i++) {
        if (as_float != NULL) {
            (*as_float)[i] = (float)x;
        } else {
            (*as_int)[i] = x >= 0 && x <= 6 ? (int32_t)x : 0;
        }
    }
    return BT_OK;
}

static enum bt_status string(const struct bt_gguf *f, const char *key, bool need, char **out,
                             struct bt_err *err)
{
    const char *s;
    size_t n;
    enum bt_status st = bt_gguf_get_str(f, key, &s, &n, err);

    if (st != BT_OK) {
        return st == BT_ERR_NOT_FOUND && !need ? BT_OK : st;
    }
    *out = bt_strndup(s, n);
    return *out != NULL
               ? BT_OK
               : bt_err_set(err, BT_ERR_NOMEM, "%s: %s: out of memory", bt_gguf_path(f), key);
}

static enum bt_status id(const struct bt_gguf *f, const char *key, uint32_t *out,
                         struct bt_err *err)
{
    uint64_t v;
    enum bt_status st = bt_gguf_get_u64(f, key, &v, err);

    *out = BT_TOK_NONE;
    if (st != BT_OK) {
        return st == BT_ERR_NOT_FOUND ? BT_OK : st;
    }
    if (v >= BT_TOK_IDS_MAX) {
        return bt_err_set(err, BT_ERR_INVALID, "%s: %s: %llu is no token id", bt_gguf_path(f), key,
                          (unsigned long long)v);
    }
    *out = (uint32_t)v;
    return BT_OK;
}

static enum bt_status boolean(const struct bt_gguf *f, const char *key, bool dflt, bool *out,
                              struct bt_err *err)
{
    enum bt_status st = bt_gguf_get_bool(f, key, out, err);

    if (st == BT_ERR_NOT_FOUND) {
        *out = dflt;
        return BT_OK;
    }
    return st;
}

enum bt_status bt_tok_gguf_collect(const struct bt_gguf *f, struct bt_tok_gguf_arrays *a,
                                   struct bt_tok_gguf *g, struct bt_err *err)
{
    enum bt_status st = string(f, "tokenizer.ggml.model", true, &a->model, err);

    st = st != BT_OK ? st : string(f, "tokenizer.ggml.pre", false, &a->pre, err);
    st =
        st != BT_OK ? st : strings(f, "tokenizer.ggml.tokens", true, &a->tokens, &g->n_tokens, err);
    st = st != BT_OK ? st
                     : strings(f, "tokenizer.ggml.merges", false, &a->merges, &g->n_merges, err);
    st = st != BT_OK ? st : numbers(f, "tokenizer.ggml.scores", g->n_tokens, &a->scores, NULL, err);
    st = st != BT_OK ? st
                     : numbers(f, "tokenizer.ggml.token_type", g->n_tokens, NULL, &a->types, err);
    st = st != BT_OK ? st : id(f, "tokenizer.ggml.bos_token_id", &g->bos, err);
    st = st != BT_OK ? st : id(f, "tokenizer.ggml.eos_token_id", &g->eos, err);
    st = st != BT_OK ? st : id(f, "tokenizer.ggml.unknown_token_id", &g->unk, err);
    st = st != BT_OK ? st : id(f, "tokenizer.ggml.padding_token_id", &g->pad, err);
    if (st != BT_OK) {
        return st;
    }
    bool llama = strcmp(a->model, "llama") == 0;
    bool bos_first = llama || (a->pre != NULL &&
                               (strcmp(a->pre, "llama-bpe") == 0 || strcmp(a->pre, "tekken") == 0));
    st = boolean(f, "tokenizer.ggml.add_bos_token", bos_first && g->bos != BT_TOK_NONE, &g->add_bos,
                 err);
    st = st != BT_OK ? st : boolean(f, "tokenizer.ggml.add_eos_token", false, &g->add_eos, err);
    st = st != BT_OK
             ? st
             : boolean(f, "tokenizer.ggml.add_space_prefix", llama, &g->add_space_prefix, err);
    g->model = a->model;
    g->pre = a->pre;
    g->tokens = a->tokens;
    g->merges = a->merges;
    g->scores = a->scores;
    g->types = a->types;
    return st;
}

void bt_tok_gguf_arrays_fini(struct bt_tok_gguf_arrays *a)
{
    bt_free(a->model);
    bt_free(a->pre);
    bt_free(a->tokens);
    bt_free(a->merges);
    bt_free(a->scores);
    bt_free(a->types);
}

enum bt_status bt_tokenizer_open_gguf(const struct bt_gguf *g, struct bt_tokenizer **out,
                                      struct bt_err *err)
{
    struct bt_tok_gguf_arrays a = {0};
    struct bt_tok_gguf in = {0};
    struct bt_err cause = {.status = BT_OK};
    enum bt_status st = bt_tok_gguf_collect(g, &a, &in, &cause);

    if (st == BT_OK) {
        st = bt_tokenizer_from_gguf(bt_gguf_path(g), &in, out, err);
    } else {
        (void)bt_err_set(err, st, "%s", cause.msg);
    }
    bt_tok_gguf_arrays_fini(&a);
    return st;
}
