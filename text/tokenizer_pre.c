/* Pre-tokenizers: cut a text into the pieces that BPE never merges across. A step either cuts
 * pieces of the same text or rewrites the text of every piece. Owns the byte stand-ins of
 * byte-level vocabularies. */

#include "text/tokenizer_int.h"

#include <string.h>
#include "base/mem.h"
#include "base/utf8.h"

/* ---- bytes as printable characters ---- */

/* Printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards in order. */
static bool byte_is_plain(uint32_t b)
{
    return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
}

uint32_t bt_tok_byte_char(uint8_t byte)
{
    if (byte_is_plain(byte)) {
        return byte;
    }
    if (byte <= 0x20) {
        return 0x100u + byte;
    }
    return byte == 0xAD ? 0x143u : 0x121u + (uint32_t)(byte - 0x7F);
}

int bt_tok_char_byte(uint32_t cp)
{
    if (cp < 0x100) {
        return byte_is_plain(cp) ? (int)cp : -1;
    }
    if (cp <= 0x120) {
        return (int)(cp - 0x100);
    }
    if (cp <= 0x142) {
        return (int)(cp - 0x121 + 0x7F);
    }
    return cp == 0x143 ? 0xAD : -1;
}

/* ---- pieces ---- */

bool bt_tok_pieces_add(struct bt_tok_pieces *p, size_t off, size_t len)
{
    if (p->n == p->cap) {
        size_t cap = p->cap < 16 ? 16 : p->cap * 2;
        struct bt_tok_piece *v = bt_realloc(p->v, cap * sizeof(*v));
        if (v == NULL) {
            return false;
        }
        p->v = v;
        p->cap = cap;
    }
    p->v[p->n++] = (struct bt_tok_piece){(uint32_t)off, (uint32_t)len};
    return true;
}

void bt_tok_pieces_fini(struct bt_tok_pieces *p)
{
    bt_buf_fini(&p->text);
    bt_free(p->v);
    *p = (struct bt_tok_pieces){0};
}

/* ---- cutting ---- */

struct cutter {
    const struct bt_tok_pre *pre;
    struct bt_tok_pieces *out;
    size_t n_before; /* pieces that came from earlier pieces */
    bool prev_match, empty;
};

/* One segment, matches and the text between them in order. Whether it joins the one before is the
 * behavior. */
static bool segment(struct cutter *c, size_t off, size_t len, bool match)
{
    bool join = false, prev = c->prev_match;

    match = match != c->pre->invert;
    c->prev_match = match;
    switch (c->pre->behavior) {
    case BT_TOK_REMOVED:
        if (match) {
            return true;
        }
        break;
    case BT_TOK_ISOLATED:
        break;
    case BT_TOK_MERGED_PREV:
        join = match && !prev;
        break;
    case BT_TOK_MERGED_NEXT:
        join = !match && prev;
        break;
    case BT_TOK_CONTIGUOUS:
        join = match == prev;
        break;
    }
    if (join && c->out->n > c->n_before) {
        c->out->v[c->out->n - 1].len += (uint32_t)len;
        return true;
    }
    c->empty = c->empty || len == 0;
    return bt_tok_pieces_add(c->out, off, len);
}

/* Empty matches take part in joining, but leave no pieces. */
static void drop_empty(struct bt_tok_pieces *p, size_t from)
{
    size_t kept = from;

    for (size_t i = from; i < p->n; i++) {
        if (p->v[i].len > 0) {
            p->v[kept++] = p->v[i];
        }
    }
    p->n = kept;
}

static enum bt_status cut_piece(struct cutter *c, struct bt_tok_matches *m, const char *text,
                                struct bt_tok_piece piece)
{
    size_t done = 0, start, end;
    int rc;

    c->n_before = c->out->n;
    c->prev_match = c->empty = false;
    bt_tok_matches_text(m, text + piece.off, piece.len);
    while ((rc = bt_tok_matches_next(m, &start, &end)) > 0) {
        if ((start > done && !segment(c, piece.off + done, start - done, false)) ||
            !segment(c, piece.off + start, end - start, true)) {
            return BT_ERR_NOMEM;
        }
        done = end;
    }
    if (rc < 0) {
        return BT_ERR_INVALID;
    }
    if (done < piece.len && !segment(c, piece.off + done, piece.len - done, false)) {
        return BT_ERR_NOMEM;
    }
    if (c->empty) {
        drop_empty(c->out, c->n_before);
    }
    return BT_OK;
}

/* The pieces of a, cut further, become those of b; the text stays in a. */
static enum bt_status cut(const struct bt_tok_pre *pre, const struct bt_tok_pieces *a,
                          struct bt_tok_pieces *b, struct bt_err *err)
{
    struct cutter c = {.pre = pre, .out = b};
    struct bt_tok_matches m;
    enum bt_status st = BT_OK;

    b->n = 0;
    if (!bt_tok_matches_init(&m, pre->pattern)) {
        st = BT_ERR_NOMEM;
    }
    for (size_t i = 0; i < a->n && st == BT_OK; i++) {
        st = cut_piece(&c, &m, a->text.data, a->v[i]);
    }
    bt_tok_matches_fini(&m);
    if (st == BT_ERR_INVALID) {
        return bt_err_set(err, st, "text: a limit of the pre-tokenizer's regex was reached");
    }
    return st;
}

/* ---- rewriting ---- */

static bool starts_with(const char *s, size_t len, const char *prefix, size_t prefix_len)
{
    return len >= prefix_len && memcmp(s, prefix, prefix_len) == 0;
}

static void map_bytes(const char *s, size_t len, struct bt_buf *out)
{
    if (!bt_buf_reserve(out, len * 2)) {
        return;
    }
    char *w = out->data + out->len;
    for (size_t i = 0; i < len; i++) {
        uint32_t cp = bt_tok_byte_char((uint8_t)s[i]);
        if (cp < 0x80) {
            *w++ = (char)cp;
        } else {
            *w++ = (char)(0xC0 | cp >> 6);
            *w++ = (char)(0x80 | (cp & 0x3F));
        }
    }
    *w = '\0';
    out->len = (size_t)(w - out->data);
}

static void metaspace(const struct bt_tok_pre *pre, const char *s, size_t len, bool first,
                      struct bt_buf *out)
{
    bool prepend =
        pre->prepend == BT_TOK_PREPEND_ALWAYS || (pre->prepend == BT_TOK_PREPEND_FIRST && first);

    if (prepend && len > 0 && s[0] != ' ' && !starts_with(s, len, pre->content, pre->content_len)) {
        (void)bt_buf_add(out, pre->content, pre->content_len);
    }
    for (size_t i = 0; i < len;) {
        const char *space = memchr(s + i, ' ', len - i);
        size_t run = space == NULL ? len - i : (size_t)(space - s) - i;
        (void)bt_buf_add(out, s + i, run);
        i += run;
        if (space != NULL) {
            (void)bt_buf_add(out, pre->content, pre->content_len);
            i++;
        }
    }
}

/* The rewritten pieces of a become b, text and all. Append failures stay in b->text.failed. */
static enum bt_status rewrite(const struct bt_tok_pre *pre, const struct bt_tok_pieces *a,
                              struct bt_tok_pieces *b)
{
    b->n = 0;
    bt_buf_clear(&b->text);
    for (size_t i = 0; i < a->n; i++) {
        const char *s = a->text.data + a->v[i].off;
        size_t len = a->v[i].len, off = b->text.len;
        switch (pre->kind) {
        case BT_TOK_BYTE_MAP:
            map_bytes(s, len, &b->text);
            break;
        case BT_TOK_METASPACE:
            metaspace(pre, s, len, a->first && a->v[i].off == 0, &b->text);
            break;
        case BT_TOK_PREFIX_SPACE:
            if (len > 0 && s[0] != ' ') {
                (void)bt_buf_addc(&b->text, ' ');
            }
            (void)bt_buf_add(&b->text, s, len);
            break;
        case BT_TOK_SPLIT:
            break;
        }
        if (b->text.failed || b->text.len > UINT32_MAX / 2 ||
            !bt_tok_pieces_add(b, off, b->text.len - off)) {
            return BT_ERR_NOMEM;
        }
    }
    return BT_OK;
}

static void swap_lists(struct bt_tok_pieces *a, struct bt_tok_pieces *b)
{
    struct bt_tok_piece *v = a->v;
    size_t n = a->n, cap = a->cap;

    a->v = b->v;
    a->n = b->n;
    a->cap = b->cap;
    b->v = v;
    b->n = n;
    b->cap = cap;
}

enum bt_status bt_tok_pre_apply(const struct bt_tok_pre *pre, size_t n_pre, struct bt_tok_pieces *a,
                                struct bt_tok_pieces *b, struct bt_err *err)
{
    for (size_t i = 0; i < n_pre; i++) {
        enum bt_status st =
            pre[i].kind == BT_TOK_SPLIT ? cut(&pre[i], a, b, err) : rewrite(&pre[i], a, b);
        if (st != BT_OK) {
            return st == BT_ERR_NOMEM ? bt_err_set(err, st, "out of memory while cutting text")
                                      : st;
        }
        swap_lists(a, b);
        if (pre[i].kind != BT_TOK_SPLIT) {
            struct bt_buf text = a->text;
            a->text = b->text;
            b->text = text;
        }
    }
    return BT_OK;
}
