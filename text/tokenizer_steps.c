/* Normalizers and pre-tokenizers of a tokenizer.json, and what all readers of components share.
 * Each is taken exactly or refused with its JSON path; unknown extra keys are passed over as the
 * reference does. */

#include "text/tokenizer_int.h"

#include <stdio.h>
#include <string.h>
#include "base/mem.h"
#include "files/json_tape.h"
#include "text/tokenizer_json_int.h"

enum bt_status bt_tok_json_nomem(struct bt_err *err)
{
    return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
}

enum bt_status bt_tok_json_bad(struct bt_err *err, const char *path, const char *key,
                               const char *want)
{
    return bt_err_set(err, BT_ERR_INVALID, "%s.%s: %s expected", path, key, want);
}

bool bt_tok_json_absent(const struct bt_tape_node *n)
{
    return n == NULL || n->type == BT_TAPE_NULL;
}

/* The component's type; "" and an error when it has none. */
enum bt_status bt_tok_json_type(const struct bt_tape_node *node, const char *path,
                                const char **type, struct bt_err *err)
{
    const struct bt_tape_node *v = bt_tape_get(node, "type");

    if (!bt_tape_is(v, BT_TAPE_STRING)) {
        return bt_tok_json_bad(err, path, "type", "a string");
    }
    *type = v->s;
    return BT_OK;
}

static enum bt_status get_bool(const struct bt_tape_node *node, const char *path, const char *key,
                               bool dflt, bool *out, struct bt_err *err)
{
    const struct bt_tape_node *v = bt_tape_get(node, key);

    *out = bt_tok_json_absent(v) ? dflt : v->type == BT_TAPE_TRUE;
    if (!bt_tok_json_absent(v) && v->type != BT_TAPE_TRUE && v->type != BT_TAPE_FALSE) {
        return bt_tok_json_bad(err, path, key, "true or false");
    }
    return BT_OK;
}

enum bt_status bt_tok_json_str(const struct bt_tape_node *node, const char *path, const char *key,
                               const struct bt_tape_node **out, struct bt_err *err)
{
    *out = bt_tape_get(node, key);
    return bt_tape_is(*out, BT_TAPE_STRING) ? BT_OK : bt_tok_json_bad(err, path, key, "a string");
}

enum bt_status bt_tok_json_unsupported(struct bt_err *err, const char *path, const char *type)
{
    return bt_err_set(err, BT_ERR_UNSUPPORTED, "%s.type: \"%.64s\" is not supported", path, type);
}

/* {"String": …} or {"Regex": …} */
static enum bt_status get_pattern(const struct bt_tape_node *node, const char *path,
                                  struct bt_tok_pattern **out, struct bt_err *err)
{
    const struct bt_tape_node *v = bt_tape_get(node, "pattern");
    const struct bt_tape_node *str = bt_tape_get(v, "String"), *re = bt_tape_get(v, "Regex");
    enum bt_status st;

    if (bt_tape_is(str, BT_TAPE_STRING)) {
        st = bt_tok_pattern_literal(str->s, str->len, out, err);
    } else if (bt_tape_is(re, BT_TAPE_STRING)) {
        st = bt_tok_pattern_regex(re->s, re->len, out, err);
    } else {
        return bt_tok_json_bad(err, path, "pattern", "a String or Regex");
    }
    if (st != BT_OK) {
        (void)bt_err_prefix(err, "%s.pattern", path);
    }
    return st;
}

enum bt_status bt_tok_json_each(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                const char *path, const char *key, unsigned depth,
                                bt_tok_json_fn *read, struct bt_err *err)
{
    const struct bt_tape_node *list = bt_tape_get(node, key);
    enum bt_status st = BT_OK;

    if (!bt_tape_is(list, BT_TAPE_ARRAY) || list->len > BT_TOK_STEPS_MAX) {
        return bt_tok_json_bad(err, path, key, "an array of at most 64");
    }
    if (depth >= BT_TOK_NEST_MAX) {
        return bt_err_set(err, BT_ERR_INVALID, "%s: nested too deeply", path);
    }
    const struct bt_tape_node *v = list + 1;
    for (uint32_t i = 0; i < list->len && st == BT_OK; i++, v += v->span) {
        char sub[BT_TOK_PATH_BYTES];
        (void)snprintf(sub, sizeof(sub), "%s.%s[%u]", path, key,
                       i); /* a cut path is still a path */
        st = read(t, v, sub, depth + 1, err);
    }
    return st;
}

/* ---- normalizers ---- */

static enum bt_status set_content(struct bt_tok_norm *n, const struct bt_tape_node *v,
                                  struct bt_err *err)
{
    n->content = bt_alloc(v->len + 1);
    if (n->content == NULL) {
        return bt_tok_json_nomem(err);
    }
    memcpy(n->content, v->s, v->len);
    n->content_len = v->len;
    return BT_OK;
}

enum bt_status bt_tok_json_replace(const struct bt_tape_node *node, const char *path,
                                   struct bt_tok_norm *n, struct bt_err *err)
{
    const struct bt_tape_node *v;
    enum bt_status st = bt_tok_json_str(node, path, "content", &v, err);

    if (st == BT_OK) {
        st = set_content(n, v, err);
    }
    if (st == BT_OK) {
        st = get_pattern(node, path, &n->pattern, err);
    }
    if (st == BT_OK) {
        n->kind = BT_TOK_REPLACE;
    }
    return st;
}

static enum bt_status read_norm(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                const char *path, unsigned depth, struct bt_err *err)
{
    static const struct {
        const char *name;
        enum bt_tok_norm_kind kind;
    } simple[] = {
        {"NFC", BT_TOK_NFC},
        {"NFD", BT_TOK_NFD},
        {"NFKC", BT_TOK_NFKC},
        {"NFKD", BT_TOK_NFKD},
        {"Lowercase", BT_TOK_LOWERCASE},
        {"StripAccents", BT_TOK_STRIP_ACCENTS},
    };
    const char *type = "";
    enum bt_status st = bt_tok_json_type(node, path, &type, err);

    if (st != BT_OK) {
        return st;
    }
    if (strcmp(type, "Sequence") == 0) {
        return bt_tok_json_each(t, node, path, "normalizers", depth, read_norm, err);
    }
    struct bt_tok_norm *n = bt_tok_build_norm(&t->norms, &t->n_norms);
    if (n == NULL) {
        return bt_tok_json_nomem(err);
    }
    for (size_t i = 0; i < sizeof(simple) / sizeof(simple[0]); i++) {
        if (strcmp(type, simple[i].name) == 0) {
            n->kind = simple[i].kind;
            return BT_OK;
        }
    }
    if (strcmp(type, "Strip") == 0) {
        n->kind = BT_TOK_STRIP;
        st = get_bool(node, path, "strip_left", true, &n->left, err);
        return st != BT_OK ? st : get_bool(node, path, "strip_right", true, &n->right, err);
    }
    if (strcmp(type, "Prepend") == 0) {
        const struct bt_tape_node *v;
        st = bt_tok_json_str(node, path, "prepend", &v, err);
        return st != BT_OK ? st : set_content(n, v, err);
    }
    if (strcmp(type, "Replace") == 0) {
        return bt_tok_json_replace(node, path, n, err);
    }
    return bt_tok_json_unsupported(err, path, type);
}

enum bt_status bt_tok_read_normalizer(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                      const char *path, struct bt_err *err)
{
    return bt_tok_json_absent(node) ? BT_OK : read_norm(t, node, path, 0, err);
}

/* ---- pre-tokenizers ---- */

static enum bt_status read_behavior(const struct bt_tape_node *node, const char *path,
                                    enum bt_tok_behavior dflt, enum bt_tok_behavior *out,
                                    struct bt_err *err)
{
    static const char *const names[] = {"Removed", "Isolated", "MergedWithPrevious",
                                        "MergedWithNext", "Contiguous"};
    const struct bt_tape_node *v = bt_tape_get(node, "behavior");

    *out = dflt;
    if (bt_tok_json_absent(v)) {
        return BT_OK;
    }
    for (unsigned i = 0; i < 5; i++) {
        if (bt_tape_str_eq(v, names[i])) {
            *out = (enum bt_tok_behavior)i;
            return BT_OK;
        }
    }
    return bt_tok_json_bad(err, path, "behavior", "a known behavior");
}

static enum bt_status read_split(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                 const char *path, struct bt_err *err)
{
    struct bt_tok_pre *p = bt_tok_build_pre(t);
    enum bt_status st;

    if (p == NULL) {
        return bt_tok_json_nomem(err);
    }
    st = get_pattern(node, path, &p->pattern, err);
    if (st == BT_OK) {
        p->kind = BT_TOK_SPLIT;
        st = read_behavior(node, path, BT_TOK_ISOLATED, &p->behavior, err);
    }
    return st != BT_OK ? st : get_bool(node, path, "invert", false, &p->invert, err);
}

static enum bt_status read_byte_level(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                      const char *path, struct bt_err *err)
{
    bool prefix = true, split = true;
    enum bt_status st = get_bool(node, path, "add_prefix_space", true, &prefix, err);

    if (st == BT_OK) {
        st = get_bool(node, path, "use_regex", true, &split, err);
    }
    return st != BT_OK ? st : bt_tok_build_byte_level(t, prefix, split, err);
}

/* replacement and prepend_scheme, the latter also by its older name */
enum bt_status bt_tok_json_meta(const struct bt_tape_node *node, const char *path,
                                const struct bt_tape_node **replacement,
                                enum bt_tok_prepend *prepend, struct bt_err *err)
{
    const struct bt_tape_node *scheme = bt_tape_get(node, "prepend_scheme");
    bool legacy = true;
    enum bt_status st = bt_tok_json_str(node, path, "replacement", replacement, err);

    if (st == BT_OK && ((*replacement)->len == 0 || (*replacement)->len > 4)) {
        st = bt_tok_json_bad(err, path, "replacement", "one character");
    }
    if (st == BT_OK) {
        st = get_bool(node, path, "add_prefix_space", true, &legacy, err);
    }
    if (st != BT_OK) {
        return st;
    }
    *prepend = legacy ? BT_TOK_PREPEND_ALWAYS : BT_TOK_PREPEND_NEVER;
    if (bt_tape_str_eq(scheme, "first")) {
        *prepend = BT_TOK_PREPEND_FIRST;
    } else if (bt_tape_str_eq(scheme, "never")) {
        *prepend = BT_TOK_PREPEND_NEVER;
    } else if (bt_tape_str_eq(scheme, "always")) {
        *prepend = BT_TOK_PREPEND_ALWAYS;
    } else if (!bt_tok_json_absent(scheme)) {
        return bt_tok_json_bad(err, path, "prepend_scheme", "always, first or never");
    }
    return BT_OK;
}

static enum bt_status read_metaspace(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                     const char *path, struct bt_err *err)
{
    const struct bt_tape_node *rep = NULL;
    enum bt_tok_prepend prepend = BT_TOK_PREPEND_ALWAYS;
    bool split = true;
    enum bt_status st = bt_tok_json_meta(node, path, &rep, &prepend, err);

    if (st == BT_OK) {
        st = get_bool(node, path, "split", true, &split, err);
    }
    if (st != BT_OK) {
        return st;
    }
    struct bt_tok_pre *p = bt_tok_build_pre(t);
    if (p == NULL) {
        return bt_tok_json_nomem(err);
    }
    p->kind = BT_TOK_METASPACE;
    p->prepend = prepend;
    memcpy(p->content, rep->s, rep->len);
    p->content_len = rep->len;
    if (split) {
        p = bt_tok_build_pre(t);
        if (p == NULL || bt_tok_pattern_literal(rep->s, rep->len, &p->pattern, err) != BT_OK) {
            return bt_tok_json_nomem(err);
        }
        p->kind = BT_TOK_SPLIT;
        p->behavior = BT_TOK_MERGED_NEXT;
    }
    return BT_OK;
}

static enum bt_status add_class(struct bt_tokenizer *t, const char *pcre,
                                enum bt_tok_behavior behavior, struct bt_err *err)
{
    struct bt_tok_pre *p = bt_tok_build_pre(t);

    if (p == NULL) {
        return bt_tok_json_nomem(err);
    }
    p->kind = BT_TOK_SPLIT;
    p->behavior = behavior;
    return bt_tok_pattern_pcre(pcre, &p->pattern, err);
}

#define WHITE                                                                                      \
    "\\x09-\\x0d\\x20\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{"    \
    "205f}\\x{3000}"
#define WORD "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{200c}\\x{200d}"

static enum bt_status read_class(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                 const char *path, const char *type, struct bt_err *err)
{
    enum bt_tok_behavior behavior = BT_TOK_ISOLATED;
    enum bt_status st;
    bool individual = false;

    if (strcmp(type, "Digits") == 0) {
        st = get_bool(node, path, "individual_digits", false, &individual, err);
        return st != BT_OK
                   ? st
                   : add_class(t, "\\p{N}", individual ? BT_TOK_ISOLATED : BT_TOK_CONTIGUOUS, err);
    }
    if (strcmp(type, "Punctuation") == 0) {
        st = read_behavior(node, path, BT_TOK_ISOLATED, &behavior, err);
        return st != BT_OK ? st : add_class(t, "[\\p{P}$+<=>^`|~]", behavior, err);
    }
    if (strcmp(type, "WhitespaceSplit") == 0) {
        return add_class(t, "[" WHITE "]", BT_TOK_REMOVED, err);
    }
    if (strcmp(type, "Whitespace") == 0) {
        st = add_class(t, "[" WORD "]+|[^" WORD WHITE "]+", BT_TOK_REMOVED, err);
        if (st == BT_OK) {
            t->pres[t->n_pres - 1].invert = true;
        }
        return st;
    }
    return bt_tok_json_unsupported(err, path, type);
}

static enum bt_status read_delimiter(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                     const char *path, struct bt_err *err)
{
    const struct bt_tape_node *v;
    enum bt_status st = bt_tok_json_str(node, path, "delimiter", &v, err);

    if (st != BT_OK) {
        return st;
    }
    struct bt_tok_pre *p = bt_tok_build_pre(t);
    if (p == NULL) {
        return bt_tok_json_nomem(err);
    }
    p->kind = BT_TOK_SPLIT;
    p->behavior = BT_TOK_REMOVED;
    return bt_tok_pattern_literal(v->s, v->len, &p->pattern, err);
}

static enum bt_status read_pre(struct bt_tokenizer *t, const struct bt_tape_node *node,
                               const char *path, unsigned depth, struct bt_err *err)
{
    const char *type = "";
    enum bt_status st = bt_tok_json_type(node, path, &type, err);

    if (st != BT_OK) {
        return st;
    }
    if (strcmp(type, "Sequence") == 0) {
        return bt_tok_json_each(t, node, path, "pretokenizers", depth, read_pre, err);
    }
    if (strcmp(type, "Split") == 0) {
        return read_split(t, node, path, err);
    }
    if (strcmp(type, "ByteLevel") == 0) {
        return read_byte_level(t, node, path, err);
    }
    if (strcmp(type, "Metaspace") == 0) {
        return read_metaspace(t, node, path, err);
    }
    if (strcmp(type, "CharDelimiterSplit") == 0) {
        return read_delimiter(t, node, path, err);
    }
    return read_class(t, node, path, type, err);
}

enum bt_status bt_tok_read_pre_tokenizer(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                         const char *path, struct bt_err *err)
{
    return bt_tok_json_absent(node) ? BT_OK : read_pre(t, node, path, 0, err);
}
