/* Decoders and post-processors of a tokenizer.json: the two components at the ends of the pipeline.
 * Taken exactly or refused with their JSON path. */

#include "text/tokenizer_int.h"

#include <stdio.h>
#include <string.h>
#include "base/mem.h"
#include "files/json_tape.h"
#include "text/tokenizer_json_int.h"

/* ---- decoders ---- */

/* The order that can be streamed: Replace …, ByteFallback, Fuse, Strip; or ByteLevel or Metaspace
 * alone. */
struct decoder_state {
    unsigned n;                         /* decoders read */
    bool alone, bytes, fused, stripped; /* what came so far */
};

static enum bt_status read_strip(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                 const char *path, struct bt_err *err)
{
    const struct bt_tape_node *v;
    uint32_t start, stop;
    enum bt_status st = bt_tok_json_str(node, path, "content", &v, err);

    if (st != BT_OK) {
        return st;
    }
    if (v->len == 0 || v->len > 4) {
        return bt_tok_json_bad(err, path, "content", "one character");
    }
    if (!bt_tape_u32(bt_tape_get(node, "start"), &start) ||
        !bt_tape_u32(bt_tape_get(node, "stop"), &stop)) {
        return bt_tok_json_bad(err, path, "start and stop", "whole numbers");
    }
    if (stop != 0) {
        return bt_err_set(err, BT_ERR_UNSUPPORTED, "%s.stop: only 0 is supported", path);
    }
    memcpy(t->decoder.strip, v->s, v->len);
    t->decoder.strip_len = v->len;
    t->decoder.strip_start = start;
    return BT_OK;
}

static enum bt_status read_meta_decoder(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                        const char *path, struct bt_err *err)
{
    struct bt_tok_decoder *d = &t->decoder;
    const struct bt_tape_node *rep = NULL;
    enum bt_tok_prepend prepend = BT_TOK_PREPEND_ALWAYS;
    enum bt_status st = bt_tok_json_meta(node, path, &rep, &prepend, err);

    if (st != BT_OK) {
        return st;
    }
    struct bt_tok_norm *n = bt_tok_build_norm(&d->steps, &d->n_steps);
    if (n == NULL || (n->content = bt_strdup(" ")) == NULL ||
        bt_tok_pattern_literal(rep->s, rep->len, &n->pattern, err) != BT_OK) {
        return bt_tok_json_nomem(err);
    }
    n->content_len = 1;
    n->kind = BT_TOK_REPLACE;
    memcpy(d->meta, rep->s, rep->len);
    d->meta_len = rep->len;
    d->meta_drop_first = prepend != BT_TOK_PREPEND_NEVER;
    return BT_OK;
}

static enum bt_status read_one_decoder(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                       const char *path, struct decoder_state *s,
                                       struct bt_err *err)
{
    struct bt_tok_decoder *d = &t->decoder;
    const char *type = "";
    enum bt_status st = bt_tok_json_type(node, path, &type, err);
    bool alone = strcmp(type, "ByteLevel") == 0 || strcmp(type, "Metaspace") == 0;

    if (st != BT_OK) {
        return st;
    }
    if (s->alone || s->stripped || (alone && s->n > 0)) {
        return bt_err_set(err, BT_ERR_UNSUPPORTED,
                          "%s.type: \"%.64s\" is not supported at this place", path, type);
    }
    s->n++;
    s->alone = alone;
    d->kind = BT_TOK_DEC_TEXT;
    if (strcmp(type, "ByteLevel") == 0) {
        d->kind = BT_TOK_DEC_BYTE_LEVEL;
        return BT_OK;
    }
    if (strcmp(type, "Metaspace") == 0) {
        return read_meta_decoder(t, node, path, err);
    }
    if (strcmp(type, "Replace") == 0 && !s->bytes && !s->fused) {
        struct bt_tok_norm *n = bt_tok_build_norm(&d->steps, &d->n_steps);
        return n == NULL ? bt_tok_json_nomem(err) : bt_tok_json_replace(node, path, n, err);
    }
    if (strcmp(type, "ByteFallback") == 0 && !s->bytes && !s->fused) {
        d->byte_fallback = s->bytes = true;
        return BT_OK;
    }
    if (strcmp(type, "Fuse") == 0) {
        s->fused = true;
        return BT_OK;
    }
    if (strcmp(type, "Strip") == 0 && s->fused) {
        s->stripped = true;
        return read_strip(t, node, path, err);
    }
    return bt_err_set(err, BT_ERR_UNSUPPORTED, "%s.type: \"%.64s\" is not supported%s", path, type,
                      s->n > 1 ? " at this place" : "");
}

enum bt_status bt_tok_read_decoder(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                   const char *path, struct bt_err *err)
{
    struct decoder_state s = {0};
    enum bt_status st = BT_OK;

    t->decoder.kind = BT_TOK_DEC_JOIN_SPACE;
    if (bt_tok_json_absent(node)) {
        return BT_OK;
    }
    if (!bt_tape_str_eq(bt_tape_get(node, "type"), "Sequence")) {
        return read_one_decoder(t, node, path, &s, err);
    }
    const struct bt_tape_node *list = bt_tape_get(node, "decoders");
    if (!bt_tape_is(list, BT_TAPE_ARRAY) || list->len > BT_TOK_STEPS_MAX) {
        return bt_tok_json_bad(err, path, "decoders", "an array of at most 64");
    }
    t->decoder.kind = BT_TOK_DEC_TEXT;
    const struct bt_tape_node *v = list + 1;
    for (uint32_t i = 0; i < list->len && st == BT_OK; i++, v += v->span) {
        char sub[BT_TOK_PATH_BYTES];
        (void)snprintf(sub, sizeof(sub), "%s.decoders[%u]", path,
                       i); /* a cut path is still a path */
        st = read_one_decoder(t, v, sub, &s, err);
    }
    return st;
}

/* ---- post-processors ---- */

/* Puts one id at the front of the prefix or at the end of the suffix. */
static enum bt_status wrap(struct bt_tokenizer *t, bool prefix, size_t at, uint32_t id,
                           struct bt_err *err)
{
    uint32_t **v = prefix ? &t->prefix : &t->suffix;
    size_t *n = prefix ? &t->n_prefix : &t->n_suffix;
    uint32_t *w = bt_realloc(*v, (*n + 1) * sizeof(*w));

    if (w == NULL) {
        return bt_tok_json_nomem(err);
    }
    memmove(w + at + 1, w + at, (*n - at) * sizeof(*w));
    w[at] = id;
    *v = w;
    (*n)++;
    return BT_OK;
}

/* The ids of a special token of a template. */
static enum bt_status template_ids(struct bt_tokenizer *t, const struct bt_tape_node *specials,
                                   const struct bt_tape_node *name, const char *path, bool prefix,
                                   size_t *at, struct bt_err *err)
{
    const struct bt_tape_node *ids = NULL;
    uint32_t id;

    if (bt_tape_is(name, BT_TAPE_STRING)) {
        ids = bt_tape_get(bt_tape_get(specials, name->s), "ids");
    }
    if (!bt_tape_is(ids, BT_TAPE_ARRAY)) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "%s: a special token that special_tokens does not define", path);
    }
    const struct bt_tape_node *v = ids + 1;
    for (uint32_t i = 0; i < ids->len; i++, v += v->span) {
        if (!bt_tape_u32(v, &id) || id >= t->n_tokens || t->tokens[id].name == NULL) {
            return bt_err_set(err, BT_ERR_INVALID,
                              "%s: special token \"%.64s\" has an id outside the vocabulary", path,
                              name->s);
        }
        enum bt_status st = wrap(t, prefix, (*at)++, id, err);
        if (st != BT_OK) {
            return st;
        }
    }
    return BT_OK;
}

static enum bt_status read_template(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                    const char *path, struct bt_err *err)
{
    const struct bt_tape_node *single = bt_tape_get(node, "single"),
                              *specials = bt_tape_get(node, "special_tokens");
    bool behind = false;
    size_t at = 0;

    if (!bt_tape_is(single, BT_TAPE_ARRAY) || single->len > BT_TOK_STEPS_MAX) {
        return bt_tok_json_bad(err, path, "single", "an array of at most 64");
    }
    const struct bt_tape_node *v = single + 1;
    for (uint32_t i = 0; i < single->len; i++, v += v->span) {
        char sub[BT_TOK_PATH_BYTES];
        (void)snprintf(sub, sizeof(sub), "%s.single[%u]", path, i); /* a cut path is still a path */
        const struct bt_tape_node *special = bt_tape_get(v, "SpecialToken");
        const struct bt_tape_node *seq = bt_tape_get(v, "Sequence");
        if (special != NULL) {
            enum bt_status st =
                template_ids(t, specials, bt_tape_get(special, "id"), sub, !behind, &at, err);
            if (st != BT_OK) {
                return st;
            }
        } else if (seq != NULL && !behind && bt_tape_str_eq(bt_tape_get(seq, "id"), "A")) {
            behind = true;
            at = t->n_suffix;
        } else {
            return bt_err_set(err, BT_ERR_UNSUPPORTED,
                              "%s: neither a SpecialToken nor the one Sequence A", sub);
        }
    }
    return behind ? BT_OK
                  : bt_err_set(err, BT_ERR_INVALID, "%s.single: Sequence A is missing", path);
}

/* ["[CLS]", 101] */
static enum bt_status read_pair(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                const char *path, const char *key, bool prefix, struct bt_err *err)
{
    const struct bt_tape_node *v = bt_tape_get(node, key);
    uint32_t id;

    if (!bt_tape_is(v, BT_TAPE_ARRAY) || v->len != 2 || !bt_tape_is(v + 1, BT_TAPE_STRING) ||
        !bt_tape_u32(v + 2, &id) || id >= t->n_tokens || t->tokens[id].name == NULL) {
        return bt_tok_json_bad(err, path, key, "a token and its id");
    }
    return wrap(t, prefix, prefix ? 0 : t->n_suffix, id, err);
}

static enum bt_status read_post(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                const char *path, unsigned depth, struct bt_err *err)
{
    const char *type = "";
    enum bt_status st = bt_tok_json_type(node, path, &type, err);

    if (st != BT_OK) {
        return st;
    }
    if (strcmp(type, "Sequence") == 0) {
        return bt_tok_json_each(t, node, path, "processors", depth, read_post, err);
    }
    if (strcmp(type, "ByteLevel") == 0) { /* moves offsets only */
        return BT_OK;
    }
    if (strcmp(type, "TemplateProcessing") == 0) {
        return read_template(t, node, path, err);
    }
    if (strcmp(type, "RobertaProcessing") == 0 || strcmp(type, "BertProcessing") == 0) {
        st = read_pair(t, node, path, "cls", true, err);
        return st != BT_OK ? st : read_pair(t, node, path, "sep", false, err);
    }
    return bt_tok_json_unsupported(err, path, type);
}

enum bt_status bt_tok_read_post_processor(struct bt_tokenizer *t, const struct bt_tape_node *node,
                                          const char *path, struct bt_err *err)
{
    return bt_tok_json_absent(node) ? BT_OK : read_post(t, node, path, 0, err);
}
