/* Ids to text, streamed; decoding at once is a stream that ends. What every token stands for was
 * worked out when the tokenizer was built, so a push is a copy and a check of UTF-8. Knows nothing
 * of stop strings or requests. */

#include "text/detok.h"

#include <string.h>
#include "base/mem.h"
#include "base/utf8.h"
#include "text/tokenizer_int.h"

#define REPLACEMENT "\xef\xbf\xbd"

/* ---- the text of every token ---- */

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    c = (char)(c | 0x20);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* "<0x0A>" */
static bool byte_token(const char *s, size_t len, char *byte)
{
    if (len != 6 || memcmp(s, "<0x", 3) != 0 || s[5] != '>') {
        return false;
    }
    int hi = hex_digit(s[3]), lo = hex_digit(s[4]);
    *byte = (char)(hi * 16 + lo);
    return hi >= 0 && lo >= 0;
}

/* Byte stand-ins back to bytes; a spelling with any other character is text as it is. */
static bool unmap_bytes(const char *s, size_t len, struct bt_buf *out)
{
    size_t n_before = out->len;

    for (size_t i = 0; i < len;) {
        uint32_t cp;
        unsigned n = bt_utf8_decode(s + i, len - i, &cp);
        int byte = n == 0 ? -1 : bt_tok_char_byte(cp);
        if (byte < 0) {
            out->len = n_before;
            return bt_buf_add(out, s, len);
        }
        if (!bt_buf_addc(out, (char)byte)) {
            return false;
        }
        i += n;
    }
    return true;
}

static enum bt_status token_text(const struct bt_tok_decoder *d, const struct bt_tok_token *k,
                                 struct bt_buf *a, struct bt_buf *b)
{
    const char *s = k->text != NULL ? k->text : k->name; /* text: a normalized spelling */
    size_t len = k->text != NULL ? k->text_len : k->name_len;
    char byte;

    bt_buf_clear(a);
    if (d->kind == BT_TOK_DEC_BYTE_LEVEL) {
        return unmap_bytes(s, len, a) ? BT_OK : BT_ERR_NOMEM;
    }
    if (!bt_buf_add(a, s, len)) {
        return BT_ERR_NOMEM;
    }
    for (size_t i = 0; i < d->n_steps; i++) {
        enum bt_status st = bt_tok_norm_apply(&d->steps[i], a, b);
        if (st != BT_OK) {
            return st;
        }
    }
    if (d->byte_fallback && byte_token(a->data, a->len, &byte)) {
        bt_buf_clear(a);
        return bt_buf_addc(a, byte) ? BT_OK : BT_ERR_NOMEM;
    }
    return BT_OK;
}

enum bt_status bt_tok_decoder_compile(struct bt_tokenizer *t)
{
    struct bt_buf all = {0}, a = {0}, b = {0};
    enum bt_status st = BT_OK;

    for (uint32_t id = 0; id < t->n_tokens && st == BT_OK; id++) {
        struct bt_tok_token *k = &t->tokens[id];
        if (k->name != NULL) {
            st = token_text(&t->decoder, k, &a, &b);
            k->text_len = (uint32_t)a.len;
            (void)bt_buf_add(&all, a.data, a.len); /* a failure stays in all.failed */
        }
    }
    if (st == BT_OK && all.failed) {
        st = BT_ERR_NOMEM;
    }
    bt_buf_fini(&a);
    bt_buf_fini(&b);
    if (st != BT_OK) {
        bt_buf_fini(&all);
        return st;
    }
    size_t off = 0;
    t->texts = all.data; /* owned by t from here */
    for (uint32_t id = 0; id < t->n_tokens; id++) {
        struct bt_tok_token *k = &t->tokens[id];
        if (k->name != NULL) {
            k->text = t->texts == NULL ? "" : t->texts + off;
            off += k->text_len;
        }
    }
    return BT_OK;
}

/* ---- bytes to valid UTF-8 ---- */

/* Looks at the n > 0 bytes of s. Returns the length of the whole character there, or of the longest
 * piece that could begin one (1 for a byte that cannot): *whole and *cut (s ended too early) tell
 * which. */
static unsigned look(const char *s, size_t n, bool *whole, bool *cut)
{
    const uint8_t *p = (const uint8_t *)s;
    uint8_t lo = 0x80, hi = 0xBF;
    unsigned need = p[0] < 0x80 ? 1 : p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4, i = 1;

    *whole = *cut = false;
    if ((p[0] >= 0x80 && p[0] < 0xC2) || p[0] > 0xF4) {
        return 1;
    }
    lo = p[0] == 0xE0 ? 0xA0 : p[0] == 0xF0 ? 0x90 : lo;
    hi = p[0] == 0xED ? 0x9F : p[0] == 0xF4 ? 0x8F : hi;
    while (i < need && i < n && p[i] >= lo && p[i] <= hi) {
        lo = 0x80;
        hi = 0xBF;
        i++;
    }
    *whole = i == need;
    *cut = i < need && i == n;
    return i;
}

/* Whole characters of the answer; the first may be subject to stripping. */
static void emit(struct bt_detok *d, const char *s, size_t n, struct bt_buf *out)
{
    const struct bt_tok_decoder *dec = &d->t->decoder;

    while (d->strip_left > 0 && n > 0) {
        if (n >= dec->strip_len && memcmp(s, dec->strip, dec->strip_len) == 0) {
            s += dec->strip_len;
            n -= dec->strip_len;
            d->strip_left--;
        } else {
            d->strip_left = 0;
        }
    }
    if (n > 0) {
        (void)bt_buf_add(out, s, n); /* a failure stays in out->failed */
    }
}

static void emit_broken(struct bt_detok *d, unsigned n_bytes, struct bt_buf *out)
{
    unsigned n = d->t->decoder.byte_fallback ? n_bytes : 1;

    for (unsigned i = 0; i < n; i++) {
        emit(d, REPLACEMENT, 3, out);
    }
}

static void feed(struct bt_detok *d, const char *s, size_t n, struct bt_buf *out)
{
    bool whole, cut;
    size_t i = 0, done = 0;

    while (d->n_held > 0 && i < n) {
        d->held[d->n_held] = s[i]; /* at most 3 are held */
        unsigned len = look(d->held, d->n_held + 1u, &whole, &cut);
        if (whole) {
            emit(d, d->held, len, out);
            d->n_held = 0;
            i++;
        } else if (cut) {
            d->n_held++;
            i++;
        } else {
            emit_broken(d, d->n_held, out);
            d->n_held = 0; /* s[i] starts anew */
        }
    }
    done = i;
    while (i < n) {
        unsigned len = look(s + i, n - i, &whole, &cut);
        if (!whole) {
            emit(d, s + done, i - done, out);
            done = i + len;
            if (cut) {
                memcpy(d->held, s + i, len);
                d->n_held = (uint8_t)len;
            } else {
                emit_broken(d, len, out);
            }
        }
        i += len;
    }
    emit(d, s + done, n - done, out);
}

/* ---- the stream ---- */

void bt_detok_init(struct bt_detok *d, const struct bt_tokenizer *t, unsigned flags)
{
    *d = (struct bt_detok){.t = t, .flags = flags, .strip_left = t->decoder.strip_start};
    if (flags & BT_DETOK_CONTINUE) {
        d->strip_left = 0;
        d->started = true;
    }
}

/* Metaspace drops the spaces of the very first token. */
static void feed_without_meta(struct bt_detok *d, const struct bt_tok_token *k, struct bt_buf *out)
{
    const struct bt_tok_decoder *dec = &d->t->decoder;
    const char *s = k->name, *end = k->name + k->name_len;

    while (s < end) {
        const char *at = memmem(s, (size_t)(end - s), dec->meta, dec->meta_len);
        feed(d, s, (size_t)((at == NULL ? end : at) - s), out);
        s = at == NULL ? end : at + dec->meta_len;
    }
}

enum bt_status bt_detok_push(struct bt_detok *d, uint32_t id, struct bt_buf *out)
{
    const struct bt_tokenizer *t = d->t;

    if (id >= t->n_tokens) {
        return BT_ERR_INVALID;
    }
    const struct bt_tok_token *k = &t->tokens[id];
    if (k->name == NULL || (k->special && (d->flags & BT_DETOK_SKIP_SPECIAL))) {
        return BT_OK;
    }
    if (!d->started && t->decoder.meta_drop_first) {
        feed_without_meta(d, k, out);
    } else {
        if (d->started && t->decoder.kind == BT_TOK_DEC_JOIN_SPACE) {
            feed(d, " ", 1, out);
        }
        feed(d, k->text, k->text_len, out);
    }
    d->started = true;
    return out->failed ? BT_ERR_NOMEM : BT_OK;
}

enum bt_status bt_detok_finish(struct bt_detok *d, struct bt_buf *out)
{
    if (d->n_held > 0) {
        emit_broken(d, d->n_held, out);
    }
    bt_detok_init(d, d->t, d->flags);
    return out->failed ? BT_ERR_NOMEM : BT_OK;
}

enum bt_status bt_tokenizer_decode(const struct bt_tokenizer *t, const uint32_t *ids, size_t n,
                                   unsigned flags, struct bt_buf *out, struct bt_err *err)
{
    struct bt_detok d;
    enum bt_status st = BT_OK;

    bt_detok_init(&d, t, flags);
    for (size_t i = 0; i < n && st == BT_OK; i++) {
        st = bt_detok_push(&d, ids[i], out);
        if (st == BT_ERR_INVALID) {
            return bt_err_set(err, st, "token id %u at index %zu: the vocabulary has %u", ids[i], i,
                              t->n_tokens);
        }
    }
    if (st == BT_OK) {
        st = bt_detok_finish(&d, out);
    }
    return st == BT_OK ? st : bt_err_set(err, st, "out of memory while decoding %zu tokens", n);
}
