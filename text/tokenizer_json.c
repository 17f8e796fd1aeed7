/* Builds a tokenizer from a Hugging Face tokenizer.json and, beside it, tokenizer_config.json. Owns
 * the model section (vocabulary, merges), the added tokens and the special ids; the pipeline's
 * components are in tokenizer_steps.c and tokenizer_ends.c. */

#include "text/tokenizer.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "base/mem.h"
#include "files/gguf.h"
#include "files/json_tape.h"
#include "text/tokenizer_int.h"

#define CONFIG_BYTES_MAX ((size_t)64 << 20)

struct loader {
    struct bt_tokenizer *t;
    size_t names_used;
    uint32_t n_model;   /* entries of the vocabulary */
    uint32_t added_max; /* largest id of an added token so far; valid when n_added > 0 */
    uint32_t n_added;
    const struct bt_tape_node *root, *model, *vocab, *merges, *added;
    struct bt_err *err;
};

static bool absent(const struct bt_tape_node *n)
{
    return n == NULL || n->type == BT_TAPE_NULL;
}

static enum bt_status nomem(struct loader *l)
{
    return bt_err_set(l->err, BT_ERR_NOMEM, "out of memory");
}

/* ---- the model section ---- */

static bool flag(const struct loader *l, const char *key)
{
    return bt_tape_is(bt_tape_get(l->model, key), BT_TAPE_TRUE);
}

static enum bt_status check_model(struct loader *l)
{
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    const struct bt_tape_node *type = bt_tape_get(l->model, "type"),
                              *dropout = bt_tape_get(l->model, "dropout");

    if (!absent(type) && !bt_tape_str_eq(type, "BPE")) {
        return bt_err_set(l->err, BT_ERR_UNSUPPORTED,
                          "model.type: \"%.64s\" is not supported, only \"BPE\" is",
                          bt_tape_is(type, BT_TAPE_STRING) ? type->s : "?");
    }
    if (!bt_tape_is(l->vocab, BT_TAPE_OBJECT)) {
        return bt_err_set(l->err, BT_ERR_INVALID, "model.vocab: an object expected");
    }
    if (!bt_tape_is(l->merges, BT_TAPE_ARRAY)) {
        return bt_err_set(l->err, BT_ERR_INVALID, "model.merges: an array expected");
    }
    if (!absent(l->added) && l->added->type != BT_TAPE_ARRAY) {
        return bt_err_set(l->err, BT_ERR_INVALID, "added_tokens: an array expected");
    }
    if (!absent(dropout) &&
        (dropout->type != BT_TAPE_NUMBER || strspn(dropout->s, "0.") < dropout->len)) {
        return bt_err_set(l->err, BT_ERR_UNSUPPORTED,
                          "model.dropout: only null and 0 are supported");
    }
    for (unsigned i = 0; i < 2; i++) {
        const struct bt_tape_node *v = bt_tape_get(l->model, affixes[i]);
        if (!absent(v) && (v->type != BT_TAPE_STRING || v->len > 0)) {
            return bt_err_set(l->err, BT_ERR_UNSUPPORTED,
                              "model.%s: only null and \"\" are supported", affixes[i]);
        }
    }
    return BT_OK;
}

/* Sizes of everything, and the first id that is out of bounds. */
static enum bt_status measure(struct loader *l, uint32_t *n_ids, size_t *names_bytes)
{
    uint32_t n_added = absent(l->added) ? 0 : l->added->len, max = 0, id;
    uint32_t limit = l->vocab->len * 8u + 65536;
    const struct bt_tape_node *key = l->vocab + 1;

    if (l->vocab->len > BT_TOK_IDS_MAX / 16 || n_added > BT_TOK_IDS_MAX / 16) {
        return bt_err_set(l->err, BT_ERR_INVALID,
                          "model.vocab: %u entries and %u added tokens, the limit is %u each",
                          l->vocab->len, n_added, BT_TOK_IDS_MAX / 16);
    }
    *names_bytes = 0;
    for (uint32_t i = 0; i < l->vocab->len; i++, key += 2) {
        if (!bt_tape_u32(key + 1, &id) || id >= limit) {
            return bt_err_set(l->err, BT_ERR_INVALID,
                              "model.vocab[\"%.64s\"]: an id below %u expected", key->s, limit);
        }
        max = id > max ? id : max;
        *names_bytes += key->len + 1;
    }
    const struct bt_tape_node *a = n_added == 0 ? NULL : l->added + 1;
    for (uint32_t i = 0; i < n_added; i++, a += a->span) {
        const struct bt_tape_node *content = bt_tape_get(a, "content");
        if (!bt_tape_is(content, BT_TAPE_STRING)) {
            return bt_err_set(l->err, BT_ERR_INVALID, "added_tokens[%u].content: a string expected",
                              i);
        }
        *names_bytes += content->len + 1;
    }
    l->n_model = l->vocab->len;
    *n_ids = (max + 1 > l->n_model ? max + 1 : l->n_model) + n_added;
    return BT_OK;
}

static enum bt_status read_vocab(struct loader *l)
{
    const struct bt_tape_node *key = l->vocab + 1;

    for (uint32_t i = 0; i < l->vocab->len; i++, key += 2) {
        uint32_t id = 0;
        (void)bt_tape_u32(key + 1, &id); /* measured before */
        const char *name = bt_tok_build_name(l->t, &l->names_used, key->s, key->len);
        struct bt_tok_token *k = &l->t->tokens[id];
        k->name = name;
        k->name_len = key->len;
        if (bt_tok_bpe_add(&l->t->bpe, name, key->len, id) != BT_OK) {
            return nomem(l);
        }
    }
    return BT_OK;
}

/* A merge is "left right" or ["left", "right"]. */
static bool merge_parts(const struct bt_tape_node *m, struct bt_tok_str *left,
                        struct bt_tok_str *right)
{
    if (m->type == BT_TAPE_ARRAY && m->len == 2 && m[1].type == BT_TAPE_STRING &&
        m[2].type == BT_TAPE_STRING) {
        *left = (struct bt_tok_str){m[1].s, m[1].len};
        *right = (struct bt_tok_str){m[2].s, m[2].len};
        return true;
    }
    const char *space = m->type == BT_TAPE_STRING ? memchr(m->s, ' ', m->len) : NULL;
    if (space == NULL) {
        return false;
    }
    *left = (struct bt_tok_str){m->s, (size_t)(space - m->s)};
    *right = (struct bt_tok_str){space + 1, m->len - left->len - 1};
    return memchr(right->s, ' ', right->len) == NULL;
}

static enum bt_status read_merges(struct loader *l)
{
    const struct bt_tape_node *m = l->merges + 1;
    struct bt_tok_str left, right;
    enum bt_status st = BT_OK;

    for (uint32_t i = 0; i < l->merges->len && st == BT_OK; i++, m += m->span) {
        if (!merge_parts(m, &left, &right)) {
            return bt_err_set(l->err, BT_ERR_INVALID, "model.merges[%u]: two tokens expected", i);
        }
        st = bt_tok_bpe_merge_names(&l->t->bpe, left, right, i);
        if (st == BT_ERR_INVALID) {
            return bt_err_set(
                l->err, st,
                "model.merges[%u]: the parts \"%.*s\" and \"%.*s\" or their sum are no tokens", i,
                (int)(left.len < 40 ? left.len : 40), left.s,
                (int)(right.len < 40 ? right.len : 40), right.s);
        }
    }
    return st;
}

static enum bt_status read_model(struct loader *l)
{
    struct bt_tok_bpe *b = &l->t->bpe;
    const struct bt_tape_node *unk = bt_tape_get(l->model, "unk_token");
    enum bt_status st = read_vocab(l);

    if (st == BT_OK) {
        st = read_merges(l);
    }
    if (st != BT_OK) {
        return st;
    }
    b->fuse_unk = flag(l, "fuse_unk");
    b->byte_fallback = flag(l, "byte_fallback");
    b->ignore_merges = flag(l, "ignore_merges");
    if (bt_tape_is(unk, BT_TAPE_STRING)) {
        b->unk = bt_tok_bpe_id(b, unk->s, unk->len);
        if (b->unk == BT_TOK_NONE) {
            return bt_err_set(l->err, BT_ERR_INVALID,
                              "model.unk_token: \"%.64s\" is not in the vocabulary", unk->s);
        }
        l->t->unk = b->unk;
    }
    return BT_OK;
}

/* ---- added tokens ---- */

/* The reference numbers tokens that the vocabulary lacks by itself, whatever id the file gives. */
static uint32_t added_id(const struct loader *l, const struct bt_tape_node *content)
{
    uint32_t id = bt_tok_bpe_id(&l->t->bpe, content->s, content->len);

    if (id != BT_TOK_NONE) {
        return id;
    }
    if (l->n_added > 0 && (l->added_max >= l->n_model || l->n_model == 0)) {
        return l->added_max + 1;
    }
    return l->n_model;
}

static enum bt_status read_added_token(struct loader *l, const struct bt_tape_node *node,
                                       uint32_t i)
{
    const struct bt_tape_node *content = bt_tape_get(node, "content");
    uint64_t known;

    if (content->len == 0 || bt_map_get(&l->t->added_ids, content->s, content->len, &known)) {
        return BT_OK; /* the first one counts */
    }
    const char *name = bt_tok_build_name(l->t, &l->names_used, content->s, content->len);
    struct bt_tok_added a = {
        .id = added_id(l, content),
        .special = bt_tape_is(bt_tape_get(node, "special"), BT_TAPE_TRUE),
        .lstrip = bt_tape_is(bt_tape_get(node, "lstrip"), BT_TAPE_TRUE),
        .rstrip = bt_tape_is(bt_tape_get(node, "rstrip"), BT_TAPE_TRUE),
        .single_word = bt_tape_is(bt_tape_get(node, "single_word"), BT_TAPE_TRUE),
        .normalized = bt_tape_is(bt_tape_get(node, "normalized"), BT_TAPE_TRUE),
        .content = name,
        .len = content->len,
        .order = i,
    };
    struct bt_tok_token *k = &l->t->tokens[a.id];
    k->name = name;
    k->name_len = content->len;
    k->special = a.special;
    l->added_max = l->n_added == 0 || a.id > l->added_max ? a.id : l->added_max;
    l->n_added++;
    return bt_tok_build_added(l->t, &a) == BT_OK ? BT_OK : nomem(l);
}

static enum bt_status read_added(struct loader *l)
{
    enum bt_status st = BT_OK;

    if (absent(l->added)) {
        return BT_OK;
    }
    const struct bt_tape_node *a = l->added + 1;
    for (uint32_t i = 0; i < l->added->len && st == BT_OK; i++, a += a->span) {
        st = read_added_token(l, a, i);
    }
    return st;
}

/* ---- the file ---- */

static enum bt_status build(struct loader *l)
{
    struct bt_err *err = l->err;
    uint32_t n_ids = 0;
    size_t names_bytes = 0;
    enum bt_status st = check_model(l);

    if (st == BT_OK) {
        st = measure(l, &n_ids, &names_bytes);
    }
    if (st != BT_OK) {
        return st;
    }
    if (bt_tok_build_begin(n_ids, names_bytes, l->merges->len, &l->t) != BT_OK) {
        return nomem(l);
    }
    st = read_model(l);
    if (st == BT_OK) {
        st = read_added(l);
    }
    if (st == BT_OK) {
        st = bt_tok_read_normalizer(l->t, bt_tape_get(l->root, "normalizer"), "normalizer", err);
    }
    if (st == BT_OK) {
        st = bt_tok_read_pre_tokenizer(l->t, bt_tape_get(l->root, "pre_tokenizer"), "pre_tokenizer",
                                       err);
    }
    if (st == BT_OK) {
        st = bt_tok_read_post_processor(l->t, bt_tape_get(l->root, "post_processor"),
                                        "post_processor", err);
    }
    if (st == BT_OK) {
        st = bt_tok_read_decoder(l->t, bt_tape_get(l->root, "decoder"), "decoder", err);
    }
    if (st == BT_OK && bt_tok_build_finish(l->t) != BT_OK) {
        st = nomem(l);
    }
    return st;
}

static enum bt_status from_tape(const char *file, const struct bt_tape *tape,
                                struct bt_tokenizer **out, struct bt_err *err)
{
    struct bt_err cause = {.status = BT_OK};
    struct loader l = {.root = bt_tape_root(tape), .err = &cause};
    enum bt_status st;

    l.model = bt_tape_get(l.root, "model");
    l.vocab = bt_tape_get(l.model, "vocab");
    l.merges = bt_tape_get(l.model, "merges");
    l.added = bt_tape_get(l.root, "added_tokens");
    st = build(&l);
    if (st != BT_OK) {
        bt_tokenizer_destroy(l.t);
        return bt_err_set(err, st, "%s: %s", file,
                          cause.status == BT_OK ? bt_status_str(st) : cause.msg);
    }
    *out = l.t;
    return BT_OK;
}

/* ---- tokenizer_config.json ---- */

/* The id of a token given as "text" or {"content": "text"}. */
static uint32_t config_token(const struct bt_tokenizer *t, const struct bt_tape_node *root,
                             const char *key)
{
    const struct bt_tape_node *v = bt_tape_get(root, key);

    if (bt_tape_is(v, BT_TAPE_OBJECT)) {
        v = bt_tape_get(v, "content");
    }
    return bt_tape_is(v, BT_TAPE_STRING) ? bt_tokenizer_id_of(t, v->s, v->len) : BT_TOK_NONE;
}

/* These classes of the reference replace the file's post-processor by what add_bos_token and
 * add_eos_token say. */
static bool class_sets_bos(const struct bt_tape_node *root)
{
    static const char *const classes[] = {"LlamaTokenizer",     "LlamaTokenizerFast",
                                          "GemmaTokenizer",     "GemmaTokenizerFast",
                                          "CodeLlamaTokenizer", "CodeLlamaTokenizerFast"};

    for (size_t i = 0; i < sizeof(classes) / sizeof(classes[0]); i++) {
        if (bt_tape_str_eq(bt_tape_get(root, "tokenizer_class"), classes[i])) {
            return true;
        }
    }
    return false;
}

static enum bt_status set_affix(uint32_t **v, size_t *n, uint32_t id)
{
    bt_free(*v);
    *v = NULL;
    *n = 0;
    if (id == BT_TOK_NONE) {
        return BT_OK;
    }
    *v = bt_alloc(sizeof(**v));
    if (*v == NULL) {
        return BT_ERR_NOMEM;
    }
    (*v)[0] = id;
    *n = 1;
    return BT_OK;
}

static enum bt_status apply_config(struct bt_tokenizer *t, const struct bt_tape_node *root)
{
    uint32_t unk = config_token(t, root, "unk_token");
    const struct bt_tape_node *add_bos = bt_tape_get(root, "add_bos_token");
    bool bos = absent(add_bos) || add_bos->type == BT_TAPE_TRUE;
    bool eos = bt_tape_is(bt_tape_get(root, "add_eos_token"), BT_TAPE_TRUE);

    t->bos = config_token(t, root, "bos_token");
    t->eos = config_token(t, root, "eos_token");
    t->pad = config_token(t, root, "pad_token");
    t->unk = unk == BT_TOK_NONE ? t->unk : unk;
    if (!class_sets_bos(root)) {
        return BT_OK;
    }
    if (set_affix(&t->prefix, &t->n_prefix, bos ? t->bos : BT_TOK_NONE) != BT_OK) {
        return BT_ERR_NOMEM;
    }
    return set_affix(&t->suffix, &t->n_suffix, eos ? t->eos : BT_TOK_NONE);
}

static enum bt_status read_config(struct bt_tokenizer *t, const char *dir, struct bt_err *err)
{
    char path[4096];
    struct bt_tape *tape;

    if (snprintf(path, sizeof(path), "%s/tokenizer_config.json", dir) >= (int)sizeof(path)) {
        return bt_err_set(err, BT_ERR_INVALID, "%.64s…: path too long", dir);
    }
    enum bt_status st = bt_tape_read(path, CONFIG_BYTES_MAX, &tape, err);
    if (st == BT_ERR_NOT_FOUND) {
        return BT_OK;
    }
    if (st == BT_OK) {
        st = apply_config(t, bt_tape_root(tape));
        if (st != BT_OK) {
            (void)bt_err_set(err, st, "%s: out of memory", path);
        }
        bt_tape_destroy(tape);
    }
    return st;
}

enum bt_status bt_tokenizer_load(const char *path, struct bt_tokenizer **out, struct bt_err *err)
{
    char file[4096];
    struct stat sb;
    struct bt_tape *tape;
    struct bt_tokenizer *t;
    bool dir = stat(path, &sb) == 0 && S_ISDIR(sb.st_mode);

    if (snprintf(file, sizeof(file), dir ? "%s/tokenizer.json" : "%s", path) >= (int)sizeof(file)) {
        return bt_err_set(err, BT_ERR_INVALID, "%.64s…: path too long", path);
    }
    enum bt_status st = bt_tape_read(file, BT_TOK_FILE_BYTES_MAX, &tape, err);
    if (st != BT_OK) {
        if (st == BT_ERR_NOT_FOUND && dir && err != NULL) {
            bt_gguf_hint(path, err);
        }
        return st;
    }
    st = from_tape(file, tape, &t, err);
    bt_tape_destroy(tape);
    if (st == BT_OK && dir) {
        st = read_config(t, path, err);
        if (st != BT_OK) {
            bt_tokenizer_destroy(t);
        }
    }
    if (st == BT_OK) {
        *out = t;
    }
    return st;
}

enum bt_status bt_tokenizer_from_json(const char *name, const char *text, size_t n,
                                      struct bt_tokenizer **out, struct bt_err *err)
{
    struct bt_tape *tape;
    enum bt_status st = bt_tape_parse(name, text, n, &tape, err);

    if (st == BT_OK) {
        st = from_tape(name, tape, out, err);
        bt_tape_destroy(tape);
    }
    return st;
}
