/* Normalizers: text to text. Unicode forms use utf8proc's tables, but its canonical ordering is
 * replaced: that is quadratic on long runs of combining marks, this one is not. */

#include "text/tokenizer_int.h"

#include <string.h>
#include <utf8proc.h>
#include "base/mem.h"
#include "base/utf8.h"

/* ---- Unicode normalization forms ---- */

struct cps {
    int32_t *v;
    size_t n, cap;
};

static bool cps_room(struct cps *c, size_t more)
{
    if (c->cap - c->n >= more) {
        return true;
    }
    size_t cap = c->cap * 2 > c->n + more ? c->cap * 2 : c->n + more;
    int32_t *v = bt_realloc(c->v, cap * sizeof(*v));
    if (v == NULL) {
        return false;
    }
    c->v = v;
    c->cap = cap;
    return true;
}

static unsigned combining_class(int32_t cp)
{
    return cp < 0x300 ? 0 : (unsigned)utf8proc_get_property(cp)->combining_class;
}

/* Stable sort of a run of combining marks by class: insertion for the usual few, counting for many.
 */
static bool order_run(int32_t *v, size_t n)
{
    if (n <= 16) {
        for (size_t i = 1; i < n; i++) {
            int32_t cp = v[i];
            unsigned cc = combining_class(cp);
            size_t k = i;
            while (k > 0 && combining_class(v[k - 1]) > cc) {
                v[k] = v[k - 1];
                k--;
            }
            v[k] = cp;
        }
        return true;
    }
    size_t at[256] = {0};
    int32_t *sorted = bt_alloc(n * sizeof(*sorted));
    if (sorted == NULL) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        at[combining_class(v[i]) & 255]++;
    }
    for (size_t c = 0, sum = 0; c < 256; c++) {
        size_t count = at[c];
        at[c] = sum;
        sum += count;
    }
    for (size_t i = 0; i < n; i++) {
        sorted[at[combining_class(v[i]) & 255]++] = v[i];
    }
    memcpy(v, sorted, n * sizeof(*v));
    bt_free(sorted);
    return true;
}

static bool canonical_order(struct cps *c)
{
    for (size_t i = 0; i < c->n;) {
        size_t start = i;
        while (i < c->n && combining_class(c->v[i]) != 0) {
            i++;
        }
        if (i - start > 1 && !order_run(c->v + start, i - start)) {
            return false;
        }
        i += i == start;
    }
    return true;
}

static bool decompose(const char *s, size_t len, utf8proc_option_t opts, struct cps *c)
{
    for (size_t i = 0; i < len;) {
        uint32_t cp;
        int boundclass = 0;
        i += bt_utf8_decode(s + i, len - i, &cp);
        if (!cps_room(c, 32)) {
            return false;
        }
        utf8proc_ssize_t n =
            utf8proc_decompose_char((int32_t)cp, c->v + c->n, 32, opts, &boundclass);
        if (n < 0 || n > 32) { /* no character is that long (the longest: 18) */
            c->v[c->n] = (int32_t)cp;
            n = 1;
        }
        c->n += (size_t)n;
    }
    return true;
}

static bool is_ascii(const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if ((unsigned char)s[i] >= 0x80) {
            return false;
        }
    }
    return true;
}

static enum bt_status unicode_form(enum bt_tok_norm_kind kind, struct bt_buf *b)
{
    bool compose = kind == BT_TOK_NFC || kind == BT_TOK_NFKC;
    bool compat = kind == BT_TOK_NFKC || kind == BT_TOK_NFKD;
    utf8proc_option_t opts = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE;
    struct cps c = {NULL, 0, 0};
    bool ok;

    if (is_ascii(b->data, b->len)) {
        return BT_OK;
    }
    if (compat) {
        opts |= UTF8PROC_COMPAT;
    }
    ok = decompose(b->data, b->len, opts, &c) && canonical_order(&c);
    if (ok && compose) {
        utf8proc_ssize_t n = utf8proc_normalize_utf32(c.v, (utf8proc_ssize_t)c.n,
                                                      UTF8PROC_STABLE | UTF8PROC_COMPOSE);
        c.n = n < 0 ? c.n : (size_t)n;
    }
    bt_buf_clear(b);
    for (size_t i = 0; ok && i < c.n; i++) {
        char u[4];
        ok = bt_buf_add(b, u, bt_utf8_encode((uint32_t)c.v[i], u));
    }
    bt_free(c.v);
    return ok ? BT_OK : BT_ERR_NOMEM;
}

/* ---- the others ---- */

static bool add_cp(struct bt_buf *b, uint32_t cp)
{
    char u[4];
    return bt_buf_add(b, u, bt_utf8_encode(cp, u));
}

static bool is_white(uint32_t cp)
{
    return (cp >= 9 && cp <= 13) || cp == ' ' || cp == 0x85 || cp == 0xA0 || cp == 0x1680 ||
           (cp >= 0x2000 && cp <= 0x200A) || cp == 0x2028 || cp == 0x2029 || cp == 0x202F ||
           cp == 0x205F || cp == 0x3000;
}

static enum bt_status by_char(enum bt_tok_norm_kind kind, struct bt_buf *b, struct bt_buf *tmp)
{
    bt_buf_clear(tmp);
    for (size_t i = 0; i < b->len;) {
        uint32_t cp;
        i += bt_utf8_decode(b->data + i, b->len - i, &cp);
        if (kind == BT_TOK_STRIP_ACCENTS) {
            utf8proc_category_t c = utf8proc_category((int32_t)cp);
            if (c == UTF8PROC_CATEGORY_MN || c == UTF8PROC_CATEGORY_MC ||
                c == UTF8PROC_CATEGORY_ME) {
                continue;
            }
        } else if (cp == 0x130) { /* the one character whose lower case is two */
            (void)bt_buf_adds(tmp, "i\xcc\x87");
            continue;
        } else {
            cp = (uint32_t)utf8proc_tolower((int32_t)cp);
        }
        (void)add_cp(tmp, cp); /* a failure stays in tmp->failed */
    }
    if (tmp->failed) {
        return BT_ERR_NOMEM;
    }
    bt_buf_clear(b);
    return bt_buf_add(b, tmp->data, tmp->len) ? BT_OK : BT_ERR_NOMEM;
}

static void strip(bool left, bool right, struct bt_buf *b)
{
    size_t from = 0, to = b->len;
    uint32_t cp;

    while (left && from < to) {
        unsigned n = bt_utf8_decode(b->data + from, to - from, &cp);
        if (!is_white(cp)) {
            break;
        }
        from += n;
    }
    while (right && to > from) {
        size_t k = to - 1;
        while (k > from && ((unsigned char)b->data[k] & 0xC0) == 0x80) {
            k--;
        }
        (void)bt_utf8_decode(b->data + k, to - k, &cp); /* the text is valid UTF-8 */
        if (!is_white(cp)) {
            break;
        }
        to = k;
    }
    b->len = to;
    b->data[to] = '\0';
    bt_buf_consume(b, from);
}

enum bt_status bt_tok_replace(const struct bt_tok_pattern *p, const char *content,
                              size_t content_len, const char *s, size_t len, struct bt_buf *out)
{
    struct bt_tok_matches m;
    size_t done = 0, start, end;
    int rc;

    if (!bt_tok_matches_init(&m, p)) {
        return BT_ERR_NOMEM;
    }
    bt_tok_matches_text(&m, s, len);
    while ((rc = bt_tok_matches_next(&m, &start, &end)) > 0) {
        (void)bt_buf_add(out, s + done, start - done); /* a failure stays in out->failed */
        (void)bt_buf_add(out, content, content_len);
        done = end;
    }
    (void)bt_buf_add(out, s + done, len - done);
    bt_tok_matches_fini(&m);
    if (rc < 0) {
        return BT_ERR_INVALID;
    }
    return out->failed ? BT_ERR_NOMEM : BT_OK;
}

enum bt_status bt_tok_norm_apply(const struct bt_tok_norm *n, struct bt_buf *b, struct bt_buf *tmp)
{
    enum bt_status st;

    if (b->len == 0) {
        return BT_OK;
    }
    switch (n->kind) {
    case BT_TOK_NFC:
    case BT_TOK_NFD:
    case BT_TOK_NFKC:
    case BT_TOK_NFKD:
        return unicode_form(n->kind, b);
    case BT_TOK_LOWERCASE:
    case BT_TOK_STRIP_ACCENTS:
        return by_char(n->kind, b, tmp);
    case BT_TOK_STRIP:
        strip(n->left, n->right, b);
        return BT_OK;
    case BT_TOK_PREPEND:
    case BT_TOK_REPLACE:
        break;
    }
    bt_buf_clear(tmp);
    if (n->kind == BT_TOK_PREPEND) {
        st = bt_buf_add(tmp, n->content, n->content_len) && bt_buf_add(tmp, b->data, b->len)
                 ? BT_OK
                 : BT_ERR_NOMEM;
    } else {
        st = bt_tok_replace(n->pattern, n->content, n->content_len, b->data, b->len, tmp);
    }
    if (st == BT_OK) {
        struct bt_buf swap = *b;
        *b = *tmp;
        *tmp = swap;
    }
    return st;
}

void bt_tok_norm_fini(struct bt_tok_norm *n)
{
    bt_tok_pattern_destroy(n->pattern);
    bt_free(n->content);
}
