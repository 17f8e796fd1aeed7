/* tokenizer.json as GGUF metadata. Owns the search for a description that means the same; that it does is checked by
 * building a tokenizer from it and comparing ids. Refuses to know regular expressions. */

#include "text/tokenizer_export.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "base/arena.h"
#include "base/mem.h"
#include "files/json_tape.h"
#include "text/template.h"
#include "text/tokenizer_int.h"

static const size_t ARENA_BYTES_MAX = (size_t)1 << 30;

/* What pre-tokenizers disagree about. */
static const char *const probes[] = {
    "Hello, world! It's 2024 and I'LL pay $12345.67 (or 89%)...",
    "  leading\tand   inner spaces  \n\n\nnew lines\r\n  end ",
    "na\xc3\xafve caf\xc3\xa9 e\xcc\x81 \xd0\x9f\xd1\x80\xd0\xb8\xd0\xb2\xd0\xb5\xd1\x82 "
    "\xe4\xbd\xa0\xe5\xa5\xbd\xe4\xb8\x96\xe7\x95\x8c "
    "\xf0\x9f\x98\x80\xf0\x9f\x91\x8d \xe3\x81\x93\xe3\x82\x93",
    "def f(x):\n    return x**2 + 0x1F  # comment\n\t\tfoo_bar.baz();",
    "camelCaseWORDS HTTPServer we'Ve don't 1st 22nd 333rd 4444th 55555 666666",
    "https://example.com/a/b?c=d&e=f\n//path/to\n---\n***!!!???",
    "a\xc2\xa0"
    "b \xe2\x80\x94 \xe2\x80\x9cquoted\xe2\x80\x9d \xc2\xbd \xe2\x85\xa7 \xd9\xa3\xd9\xa4\xd9\xa5",
    " ",
    "",
    "x",
    " x",
    "\n",
    "\n\n x",
};

struct export
{
    struct bt_tokenizer *t;
    struct bt_tape *tape;
    struct bt_arena arena;
    struct bt_tok_gguf g;
    struct bt_tok_str *tokens, *merges;
    float *scores;
    int32_t *types;
    struct bt_err *err;
};

static enum bt_status nomem(struct export *e)
{
    return bt_err_set(e->err, BT_ERR_NOMEM, "out of memory");
}

static enum bt_status open_tape(struct export *e, const char *dir)
{
    char path[4096];

    (void)snprintf(path, sizeof(path), "%s/tokenizer.json", dir);
    return bt_tape_read(path, BT_TOK_FILE_BYTES_MAX, &e->tape, e->err);
}

/* "<0x41>" */
static bool is_byte(const char *s, size_t n)
{
    return n == 6 && memcmp(s, "<0x", 3) == 0 && s[5] == '>';
}

static enum bt_status read_tokens(struct export *e, uint32_t vocab)
{
    uint32_t have = bt_tokenizer_vocab_size(e->t);

    if (have > vocab) {
        return bt_err_set(e->err, BT_ERR_UNSUPPORTED,
                          "the tokenizer has %u tokens, the embedding table %u", have, vocab);
    }
    e->tokens = bt_calloc(vocab, sizeof(*e->tokens));
    e->types = bt_calloc(vocab, sizeof(*e->types));
    if (e->tokens == NULL || e->types == NULL) {
        return nomem(e);
    }
    for (uint32_t i = 0; i < vocab; i++) {
        struct bt_tok_str *s = &e->tokens[i];
        s->s = i < have ? bt_tokenizer_token_name(e->t, i, &s->len) : NULL;
        e->types[i] = BT_TOK_GGUF_NORMAL;
        if (s->s == NULL) {
            char name[24];
            s->len = (size_t)snprintf(name, sizeof(name), "[PAD%u]", i);
            s->s = bt_arena_strndup(&e->arena, name, s->len);
            e->types[i] = BT_TOK_GGUF_UNUSED;
        } else if (bt_tokenizer_is_special(e->t, i)) {
            e->types[i] = i == bt_tokenizer_unk(e->t) ? BT_TOK_GGUF_UNKNOWN : BT_TOK_GGUF_CONTROL;
        }
        if (s->s == NULL) {
            return nomem(e);
        }
    }
    e->g.tokens = e->tokens;
    e->g.types = e->types;
    e->g.n_tokens = vocab;
    return BT_OK;
}

static void mark_added(struct export *e)
{
    const struct bt_tape_node *added = bt_tape_get(bt_tape_root(e->tape), "added_tokens");
    const struct bt_tape_node *a = added != NULL ? added + 1 : NULL;

    for (uint32_t i = 0; added != NULL && added->type == BT_TAPE_ARRAY && i < added->len;
         i++, a += a->span) {
        uint32_t id;
        if (bt_tape_u32(bt_tape_get(a, "id"), &id) && id < e->g.n_tokens &&
            e->types[id] == BT_TOK_GGUF_NORMAL) {
            e->types[id] = BT_TOK_GGUF_USER;
        }
    }
}

/* "left right" of a merge, as text or as a pair. */
static enum bt_status merge_text(struct export *e, const struct bt_tape_node *m,
                                 struct bt_tok_str *out, struct bt_tok_str parts[2])
{
    if (m->type == BT_TAPE_STRING) {
        const char *space = m->len < 3 ? NULL : memchr(m->s + 1, ' ', m->len - 1);
        *out = (struct bt_tok_str){m->s, m->len};
        if (space == NULL) {
            return bt_err_set(e->err, BT_ERR_INVALID, "tokenizer.json: a merge of one token");
        }
        parts[0] = (struct bt_tok_str){m->s, (size_t)(space - m->s)};
        parts[1] = (struct bt_tok_str){space + 1, m->len - parts[0].len - 1};
        return BT_OK;
    }
    if (m->type != BT_TAPE_ARRAY || m->len != 2 || !bt_tape_is(m + 1, BT_TAPE_STRING) ||
        !bt_tape_is(m + 2, BT_TAPE_STRING)) {
        return bt_err_set(e->err, BT_ERR_INVALID, "tokenizer.json: a merge is not two tokens");
    }
    parts[0] = (struct bt_tok_str){m[1].s, m[1].len};
    parts[1] = (struct bt_tok_str){m[2].s, m[2].len};
    out->len = parts[0].len + parts[1].len + 1;
    char *text = bt_arena_alloc(&e->arena, out->len + 1);
    if (text == NULL) {
        return nomem(e);
    }
    memcpy(text, parts[0].s, parts[0].len);
    text[parts[0].len] = ' ';
    memcpy(text + parts[0].len + 1, parts[1].s, parts[1].len);
    out->s = text;
    return BT_OK;
}

/* A token's score is its place among the merges: the first that makes it. */
static enum bt_status score(struct export *e, const struct bt_tok_str parts[2], uint32_t rank)
{
    size_t n = parts[0].len + parts[1].len;
    char *text = bt_arena_alloc(&e->arena, n + 1);

    if (text == NULL) {
        return nomem(e);
    }
    memcpy(text, parts[0].s, parts[0].len);
    memcpy(text + parts[0].len, parts[1].s, parts[1].len);
    uint32_t id = bt_tokenizer_id_of(e->t, text, n);
    if (id < e->g.n_tokens && e->scores[id] < -(float)rank) {
        e->scores[id] = -(float)rank;
    }
    return BT_OK;
}

static enum bt_status read_merges(struct export *e, bool by_score)
{
    const struct bt_tape_node *merges =
        bt_tape_get(bt_tape_get(bt_tape_root(e->tape), "model"), "merges");
    const struct bt_tape_node *m = merges + 1;
    enum bt_status st = BT_OK;

    e->merges = bt_calloc(merges->len + 1U, sizeof(*e->merges));
    e->scores = bt_calloc(e->g.n_tokens, sizeof(*e->scores));
    if (e->merges == NULL || e->scores == NULL) {
        return nomem(e);
    }
    for (size_t i = 0; i < e->g.n_tokens; i++) {
        e->scores[i] = e->types[i] == BT_TOK_GGUF_NORMAL ? -(float)merges->len : 0.0F;
    }
    for (uint32_t i = 0; i < merges->len && st == BT_OK; i++, m += m->span) {
        struct bt_tok_str parts[2] = {{NULL, 0}, {NULL, 0}};
        st = merge_text(e, m, &e->merges[i], parts);
        if (st == BT_OK && by_score) {
            st = score(e, parts, i);
        }
    }
    e->g.merges = by_score ? NULL : e->merges;
    e->g.n_merges = by_score ? 0 : merges->len;
    e->g.scores = by_score ? e->scores : NULL;
    return st;
}

static enum bt_status read_ids(struct export *e)
{
    size_t n_prefix, n_suffix;
    const uint32_t *prefix = bt_tokenizer_prefix(e->t, &n_prefix),
                   *suffix = bt_tokenizer_suffix(e->t, &n_suffix);

    e->g.bos = n_prefix == 1 ? prefix[0] : bt_tokenizer_bos(e->t);
    e->g.eos = n_suffix == 1 ? suffix[0] : bt_tokenizer_eos(e->t);
    e->g.unk = bt_tokenizer_unk(e->t);
    e->g.pad = bt_tokenizer_pad(e->t);
    e->g.add_bos = n_prefix == 1;
    e->g.add_eos = n_suffix == 1;
    return n_prefix <= 1 && n_suffix <= 1
               ? BT_OK
               : bt_err_set(e->err, BT_ERR_UNSUPPORTED,
                            "the tokenizer puts more than one token before or behind a text");
}

static bool same_ids(const struct bt_tokenizer *a, const struct bt_tokenizer *b, const char *text,
                     unsigned flags)
{
    struct bt_ids x = {0}, y = {0};
    bool same = bt_tokenizer_encode(a, text, strlen(text), flags, &x, NULL) == BT_OK &&
                bt_tokenizer_encode(b, text, strlen(text), flags, &y, NULL) == BT_OK &&
                x.len == y.len && (x.len == 0 || memcmp(x.v, y.v, x.len * sizeof(*x.v)) == 0);

    bt_ids_fini(&x);
    bt_ids_fini(&y);
    return same;
}

bool bt_tok_same_ids(const struct bt_tokenizer *a, const struct bt_tokenizer *b)
{
    bool same = true;

    for (size_t i = 0; i < sizeof(probes) / sizeof(probes[0]) && same; i++) {
        same = same_ids(a, b, probes[i], 0) &&
               same_ids(a, b, probes[i], BT_TOK_ADD_SPECIAL | BT_TOK_PARSE_SPECIAL);
    }
    return same;
}

/* The description as it is now gives the ids of the original. */
static bool matches(const struct export *e)
{
    struct bt_tokenizer *t = NULL;
    bool same = bt_tokenizer_from_gguf("", &e->g, &t, NULL) == BT_OK && bt_tok_same_ids(e->t, t);

    bt_tokenizer_destroy(t);
    return same;
}

static enum bt_status find_description(struct export *e, bool by_score)
{
    bool found = false;

    e->g.model = by_score ? "llama" : "gpt2";
    for (size_t i = 0; by_score && i < 2 && !found; i++) {
        e->g.add_space_prefix = i == 0;
        found = matches(e);
    }
    for (size_t i = 0; !by_score && !found && (e->g.pre = bt_tok_gguf_pre_name(i)) != NULL; i++) {
        found = matches(e);
    }
    return found ? BT_OK
                 : bt_err_set(e->err, BT_ERR_UNSUPPORTED,
                              "GGUF files have no words for this tokenizer: none of those known "
                              "gives the same ids");
}

static void put_id(struct bt_gguf_writer *w, const char *key, uint32_t id)
{
    if (id != BT_TOK_NONE) {
        bt_gguf_add_u32(w, key, id);
    }
}

static void put_keys(const struct export *e, const struct bt_tok_export_opts *o,
                     struct bt_gguf_writer *w)
{
    const struct bt_tok_gguf *g = &e->g;
    const char *pre = g->pre != NULL ? g->pre : "default";

    bt_gguf_add_str(w, "tokenizer.ggml.model", g->model, strlen(g->model));
    bt_gguf_add_str(w, "tokenizer.ggml.pre", pre, strlen(pre));
    bt_gguf_add_array(w, "tokenizer.ggml.tokens", BT_GGUF_STRING, g->n_tokens);
    for (size_t i = 0; i < g->n_tokens; i++) {
        bt_gguf_put_str(w, g->tokens[i].s, g->tokens[i].len);
    }
    bt_gguf_add_array(w, "tokenizer.ggml.token_type", BT_GGUF_I32, g->n_tokens);
    for (size_t i = 0; i < g->n_tokens; i++) {
        bt_gguf_put_i32(w, g->types[i]);
    }
    if (g->scores != NULL) {
        bt_gguf_add_array(w, "tokenizer.ggml.scores", BT_GGUF_F32, g->n_tokens);
        for (size_t i = 0; i < g->n_tokens; i++) {
            bt_gguf_put_f32(w, g->scores[i]);
        }
        bt_gguf_add_bool(w, "tokenizer.ggml.add_space_prefix", g->add_space_prefix);
    } else {
        bt_gguf_add_array(w, "tokenizer.ggml.merges", BT_GGUF_STRING, g->n_merges);
        for (size_t i = 0; i < g->n_merges; i++) {
            bt_gguf_put_str(w, g->merges[i].s, g->merges[i].len);
        }
    }
    put_id(w, "tokenizer.ggml.bos_token_id", o->has_bos ? BT_TOK_NONE : g->bos);
    put_id(w, "tokenizer.ggml.eos_token_id", o->has_eos ? BT_TOK_NONE : g->eos);
    put_id(w, "tokenizer.ggml.unknown_token_id", g->unk);
    put_id(w, "tokenizer.ggml.padding_token_id", g->pad);
    bt_gguf_add_bool(w, "tokenizer.ggml.add_bos_token", g->add_bos);
    bt_gguf_add_bool(w, "tokenizer.ggml.add_eos_token", g->add_eos);
}

static enum bt_status put_template(const char *dir, struct bt_gguf_writer *w, struct bt_err *err)
{
    struct bt_template_files f;
    enum bt_status st = bt_template_load(dir, &f, err);

    if (st == BT_OK && f.source != NULL) {
        bt_gguf_add_str(w, "tokenizer.chat_template", f.source, strlen(f.source));
    }
    if (st == BT_OK) {
        bt_template_files_fini(&f);
    }
    return st;
}

static enum bt_status describe(struct export *e, const char *dir, uint32_t vocab)
{
    enum bt_status st = open_tape(e, dir);

    if (st == BT_OK) {
        st = read_tokens(e, vocab);
    }
    if (st != BT_OK) {
        return st;
    }
    const struct bt_tape_node *model = bt_tape_get(bt_tape_root(e->tape), "model");
    bool by_score = bt_tape_is(bt_tape_get(model, "byte_fallback"), BT_TAPE_TRUE);
    mark_added(e);
    for (size_t i = 0; by_score && i < e->g.n_tokens; i++) {
        if (is_byte(e->tokens[i].s, e->tokens[i].len)) {
            e->types[i] = BT_TOK_GGUF_BYTE;
        }
    }
    st = read_merges(e, by_score);
    st = st == BT_OK ? read_ids(e) : st;
    return st == BT_OK ? find_description(e, by_score) : st;
}

enum bt_status bt_tokenizer_export_gguf(const char *dir, const struct bt_tok_export_opts *opts,
                                        struct bt_gguf_writer *w, struct bt_err *err)
{
    struct bt_err own = {0};
    struct export e = {.err = &own};
    enum bt_status st = bt_tokenizer_load(dir, &e.t, &own);

    bt_arena_init(&e.arena, ARENA_BYTES_MAX);
    if (st == BT_OK) {
        st = describe(&e, dir, opts->vocab);
        if (st != BT_OK) {
            (void)bt_err_prefix(&own, "%s", dir);
        }
    }
    if (st == BT_OK) {
        put_keys(&e, opts, w);
        st = put_template(dir, w, &own);
    }
    bt_free(e.tokens);
    bt_free(e.types);
    bt_free(e.merges);
    bt_free(e.scores);
    bt_arena_fini(&e.arena);
    bt_tape_destroy(e.tape);
    bt_tokenizer_destroy(e.t);
    if (err != NULL && st != BT_OK) {
        *err = own;
    }
    return st;
}
