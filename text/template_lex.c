/* Lexer of chat templates: text, tags and the tokens inside tags, one at a time, with the
 * whitespace control of trim_blocks and lstrip_blocks. Knows nothing of grammar beyond brackets,
 * which hide a tag's end. */

#include "text/template_int.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"

bool bt_tlex_fail(struct tlex *lx, enum bt_status st, uint32_t line, uint32_t col, const char *fmt,
                  ...)
{
    char msg[384];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    (void)bt_err_set(lx->err, st, "chat template line %u column %u: %s", line, col, msg);
    return false;
}

/* Line and column of a position, which never moves backwards by more than the current tag. */
static void locate(struct tlex *lx, size_t pos, uint32_t *line, uint32_t *col)
{
    for (; lx->mark < pos; lx->mark++) {
        if (lx->src[lx->mark] == '\n') {
            lx->line++;
            lx->line_start = lx->mark + 1;
        }
    }
    *line = lx->line;
    *col = (uint32_t)(pos >= lx->line_start ? pos - lx->line_start : 0) + 1;
}

static bool fail_at(struct tlex *lx, size_t pos, const char *what)
{
    uint32_t line, col;

    locate(lx, pos, &line, &col);
    return bt_tlex_fail(lx, BT_ERR_INVALID, line, col, "%s", what);
}

enum bt_status bt_tlex_init(struct tlex *lx, const char *src, size_t n, struct bt_arena *arena,
                            struct bt_err *err)
{
    char *copy;
    size_t bad, len = 0;

    if (n > BT_TEMPLATE_BYTES_MAX) {
        return bt_err_set(err, BT_ERR_INVALID, "chat template: %zu bytes, more than %u", n,
                          BT_TEMPLATE_BYTES_MAX);
    }
    if (!bt_utf8_valid(src, n, &bad)) {
        return bt_err_set(err, BT_ERR_INVALID, "chat template: byte %zu is not UTF-8", bad);
    }
    copy = bt_arena_alloc(arena, n + 1);
    if (copy == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "chat template: out of memory");
    }
    for (size_t i = 0; i < n; i++) {
        if (src[i] == '\r') {
            copy[len++] = '\n';
            i += i + 1 < n && src[i + 1] == '\n';
        } else {
            copy[len++] = src[i];
        }
    }
    if (len > 0 && copy[len - 1] == '\n') {
        len--; /* keep_trailing_newline is off */
    }
    copy[len] = '\0';
    *lx = (struct tlex){
        .src = copy, .n = len, .line = 1, .state = LEX_ROOT, .arena = arena, .err = err};
    return BT_OK;
}

/* Length of the character at pos if it is whitespace in Python's sense, else 0. */
static size_t space_at(const struct tlex *lx, size_t pos)
{
    uint32_t cp;
    unsigned n;

    if (pos >= lx->n) {
        return 0;
    }
    n = bt_utf8_decode(lx->src + pos, lx->n - pos, &cp);
    return n > 0 && bt_tchar_space(cp) ? n : 0;
}

static size_t skip_space(const struct tlex *lx, size_t pos)
{
    size_t n;

    while ((n = space_at(lx, pos)) > 0) {
        pos += n;
    }
    return pos;
}

/* End of src[from, end) without trailing whitespace. */
static size_t rstrip(const struct tlex *lx, size_t from, size_t end)
{
    while (end > from) {
        size_t at = end - 1;

        while (at > from && ((unsigned char)lx->src[at] & 0xC0) == 0x80) {
            at--;
        }
        if (space_at(lx, at) == 0) {
            break;
        }
        end = at;
    }
    return end;
}

/* The text src[from, end) before a tag whose sign (0, '-', '+') follows its opening: returns its
 * new end. */
static size_t text_end(const struct tlex *lx, size_t from, size_t end, char sign, bool block)
{
    size_t line = end;

    if (sign == '-') {
        return rstrip(lx, from, end);
    }
    if (!block || sign == '+') {
        return end;
    }
    while (line > from && lx->src[line - 1] != '\n') {
        line--;
    }
    if (line == from && from > 0 && lx->src[from - 1] != '\n') {
        return end; /* a tag shares this line */
    }
    return rstrip(lx, line, end) == line ? line : end;
}

/* After a block or comment: its end is at pos ("%}" or "#}", a sign before it). Where the text
 * continues. */
static size_t after_end(const struct tlex *lx, size_t pos, char sign)
{
    pos += 2;
    if (sign == '-') {
        return skip_space(lx, pos);
    }
    return pos + (sign != '+' && pos < lx->n && lx->src[pos] == '\n');
}

static char sign_at(const struct tlex *lx, size_t pos)
{
    return pos < lx->n && (lx->src[pos] == '-' || lx->src[pos] == '+') ? lx->src[pos] : 0;
}

/* At "{%": is it `{% word %}`? Sets what follows the tag's end: the position of "%}" and the sign
 * before it. */
static bool word_tag(const struct tlex *lx, size_t pos, const char *word, size_t *end,
                     char *end_sign)
{
    size_t n = strlen(word);

    pos += 2;
    pos += sign_at(lx, pos) != 0;
    pos = skip_space(lx, pos);
    if (lx->n - pos < n || memcmp(lx->src + pos, word, n) != 0) {
        return false;
    }
    pos = skip_space(lx, pos + n);
    *end_sign = sign_at(lx, pos);
    pos += *end_sign != 0;
    *end = pos;
    return lx->n - pos >= 2 && lx->src[pos] == '%' && lx->src[pos + 1] == '}';
}

static bool token(struct tlex *lx, struct ttok *tok, enum ttok_type type, size_t from, size_t end)
{
    *tok = (struct ttok){.type = type, .s = lx->src + from, .n = end - from};
    locate(lx, from, &tok->line, &tok->col);
    return true;
}

static bool lex_raw(struct tlex *lx, struct ttok *tok)
{
    size_t from = lx->pos;

    for (size_t i = from; i + 1 < lx->n; i++) {
        size_t end;
        char sign;

        if (lx->src[i] == '{' && lx->src[i + 1] == '%' && word_tag(lx, i, "endraw", &end, &sign)) {
            size_t stop = text_end(lx, from, i, sign_at(lx, i + 2), true);

            lx->state = LEX_ROOT;
            lx->pos = after_end(lx, end, sign);
            return token(lx, tok, TT_DATA, from, stop);
        }
    }
    return fail_at(lx, from, "raw without endraw");
}

static bool skip_comment(struct tlex *lx, size_t at)
{
    size_t from = at + 2 + (sign_at(lx, at + 2) != 0);

    for (size_t i = from; i + 1 < lx->n; i++) {
        if (lx->src[i] == '#' && lx->src[i + 1] == '}') {
            char sign = i > from ? sign_at(lx, i - 1) : 0;

            lx->pos = after_end(lx, i, sign);
            return true;
        }
    }
    return fail_at(lx, at, "comment without end");
}

static size_t find_tag(const struct tlex *lx, size_t from)
{
    for (size_t i = from; i + 1 < lx->n; i++) {
        char c = lx->src[i + 1];

        if (lx->src[i] == '{' && (c == '{' || c == '%' || c == '#')) {
            return i;
        }
    }
    return lx->n;
}

/* Text up to the next tag, or, when there is none left before it, the tag's opening. */
static bool lex_root(struct tlex *lx, struct ttok *tok)
{
    for (;;) {
        size_t from = lx->pos, i = find_tag(lx, from), stop, end;
        char kind, sign, end_sign;

        if (i == lx->n) {
            lx->pos = lx->n;
            return token(lx, tok, lx->n > from ? TT_DATA : TT_EOF, from, lx->n);
        }
        kind = lx->src[i + 1];
        sign = sign_at(lx, i + 2);
        stop = text_end(lx, from, i, sign, kind != '{');
        lx->pos = i;
        if (stop > from) {
            return token(lx, tok, TT_DATA, from, stop); /* the next call finds the tag at once */
        }
        if (kind == '#') {
            if (!skip_comment(lx, i)) {
                return false;
            }
            continue;
        }
        if (kind == '%' && word_tag(lx, i, "raw", &end, &end_sign) && end_sign != '+') {
            lx->pos = end_sign == '-' ? skip_space(lx, end + 2) : end + 2;
            lx->state = LEX_RAW;
            return lex_raw(lx, tok);
        }
        lx->pos = i + 2 + (sign != 0);
        lx->state = kind == '%' ? LEX_BLOCK : LEX_VAR;
        lx->n_open = 0;
        return token(lx, tok, kind == '%' ? TT_BLOCK_BEGIN : TT_VAR_BEGIN, i, lx->pos);
    }
}

static bool tag_end(struct tlex *lx, struct ttok *tok)
{
    size_t pos = lx->pos;
    char sign = sign_at(lx, pos), close = lx->state == LEX_BLOCK ? '%' : '}';

    if (lx->n_open > 0 || (sign == '+' && lx->state == LEX_VAR)) {
        return false;
    }
    pos += sign != 0;
    if (lx->n - pos < 2 || lx->src[pos] != close || lx->src[pos + 1] != '}') {
        return false;
    }
    (void)token(lx, tok, lx->state == LEX_BLOCK ? TT_BLOCK_END : TT_VAR_END, pos, pos + 2);
    if (lx->state == LEX_BLOCK || sign == '-') {
        lx->pos = after_end(lx, pos, sign);
    } else {
        lx->pos = pos + 2;
    }
    lx->state = LEX_ROOT;
    return true;
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool is_word(char c)
{
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
           (unsigned char)c >= 0x80;
}

/* Digits with single underscores between them; copies the digits. */
static size_t digits(const struct tlex *lx, size_t pos, char *buf, size_t *len, size_t cap)
{
    while (pos < lx->n) {
        if (is_digit(lx->src[pos])) {
            if (*len + 1 < cap) {
                buf[(*len)++] = lx->src[pos];
            }
            pos++;
        } else if (lx->src[pos] == '_' && pos + 1 < lx->n && is_digit(lx->src[pos + 1])) {
            pos++;
        } else {
            break;
        }
    }
    return pos;
}

static bool lex_number(struct tlex *lx, struct ttok *tok)
{
    char buf[400];
    size_t len = 0, from = lx->pos, pos = digits(lx, from, buf, &len, sizeof buf - 8);
    bool is_float = false;

    if (!(from > 0 && lx->src[from - 1] == '.')) { /* x.0.1 is two subscripts */
        if (pos + 1 < lx->n && lx->src[pos] == '.' && is_digit(lx->src[pos + 1])) {
            buf[len++] = '.';
            pos = digits(lx, pos + 1, buf, &len, sizeof buf - 4);
            is_float = true;
        }
        size_t e = pos + 1;
        if (pos < lx->n && (lx->src[pos] == 'e' || lx->src[pos] == 'E')) {
            char sign = sign_at(lx, e);
            e += sign != 0;
            if (e < lx->n && is_digit(lx->src[e])) {
                buf[len++] = 'e';
                if (sign != 0) {
                    buf[len++] = sign;
                }
                pos = digits(lx, e, buf, &len, sizeof buf - 1);
                is_float = true;
            }
        }
    }
    buf[len] = '\0';
    (void)token(lx, tok, is_float ? TT_FLOAT : TT_INT, from, pos);
    if (pos - from > 300 || (pos < lx->n && is_word(lx->src[pos])) ||
        (!is_float && buf[0] == '0' && len > 1)) {
        return bt_tlex_fail(lx, BT_ERR_INVALID, tok->line, tok->col, "number not understood");
    }
    errno = 0;
    if (is_float) {
        tok->f = strtod(buf, NULL);
    } else {
        tok->i = strtoll(buf, NULL, 10);
        if (errno == ERANGE) {
            return bt_tlex_fail(lx, BT_ERR_UNSUPPORTED, tok->line, tok->col,
                                "integer does not fit 64 bits");
        }
    }
    lx->pos = pos;
    return true;
}

/* Value of up to max hexadecimal (or octal) digits; returns how many there were. */
static size_t escape_digits(const char *s, size_t n, size_t max, unsigned base, uint32_t *value)
{
    size_t i = 0;

    for (*value = 0; i < n && i < max; i++) {
        unsigned char c = (unsigned char)s[i];
        unsigned d = is_digit((char)c)                    ? c - 48u
                     : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32u) - 'a' + 10u
                                                          : 99u;

        if (d >= base) {
            break;
        }
        *value = *value * base + d;
    }
    return i;
}

/* One escape at s (after the backslash) into out; returns the bytes read, 0 when malformed. */
static size_t unescape_one(const char *s, size_t n, char *out, size_t *len)
{
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    const char *simple = s[0] != '\0' ? strchr(from, s[0]) : NULL;
    uint32_t cp;
    size_t want, got;

    if (simple != NULL) {
        out[(*len)++] = to[simple - from];
        return 1;
    }
    if (s[0] == '\n') {
        return 1;
    }
    if (s[0] >= '0' && s[0] <= '7') {
        got = escape_digits(s, n, 3, 8, &cp);
        *len += bt_utf8_encode(cp, out + *len);
        return got;
    }
    want = s[0] == 'x' ? 2 : s[0] == 'u' ? 4 : s[0] == 'U' ? 8 : 0;
    if (want == 0) {
        out[(*len)++] = '\\'; /* unknown escapes stay as written */
        return s[0] == 'N' ? 0 : SIZE_MAX;
    }
    got = escape_digits(s + 1, n - 1, want, 16, &cp);
    if (got != want || cp > 0x10FFFF || (cp >= 0xD800 && cp < 0xE000)) {
        return 0;
    }
    *len += bt_utf8_encode(cp, out + *len);
    return 1 + want;
}

static bool lex_string(struct tlex *lx, struct ttok *tok)
{
    char quote = lx->src[lx->pos], *out;
    size_t from = lx->pos + 1, end = from, len = 0;

    while (end < lx->n && lx->src[end] != quote) {
        end += lx->src[end] == '\\' ? 2 : 1;
    }
    if (end >= lx->n) {
        return fail_at(lx, lx->pos, "string without end");
    }
    (void)token(lx, tok, TT_STR, lx->pos, end);
    lx->pos = end + 1;
    out = bt_arena_alloc(lx->arena, end - from + 5);
    if (out == NULL) {
        return bt_tlex_fail(lx, BT_ERR_NOMEM, tok->line, tok->col, "out of memory");
    }
    for (size_t i = from; i < end;) {
        size_t used;

        if (lx->src[i] != '\\') {
            out[len++] = lx->src[i++];
            continue;
        }
        used = unescape_one(lx->src + i + 1, end - i - 1, out, &len);
        if (used == 0) {
            return bt_tlex_fail(lx, BT_ERR_INVALID, tok->line, tok->col,
                                "escape sequence not understood in string");
        }
        i += used == SIZE_MAX ? 1 : 1 + used;
    }
    tok->s = out;
    tok->n = len;
    return true;
}

static bool lex_op(struct tlex *lx, struct ttok *tok)
{
    static const char two[][3] = {"//", "**", "==", "!=", "<=", ">="}, two_op[] = "fp=!lg";
    char c = lx->src[lx->pos];

    (void)token(lx, tok, TT_OP, lx->pos, lx->pos + 1);
    for (size_t i = 0; i < sizeof two / sizeof two[0]; i++) {
        if (lx->n - lx->pos >= 2 && memcmp(lx->src + lx->pos, two[i], 2) == 0) {
            tok->op = two_op[i];
            tok->n = 2;
            lx->pos += 2;
            return true;
        }
    }
    if (c == '\0' || strchr("+-/*%~[](){}><=.:|,;", c) == NULL) {
        return bt_tlex_fail(lx, BT_ERR_INVALID, tok->line, tok->col, "unexpected character %.1s",
                            tok->s);
    }
    if (strchr("([{", c) != NULL) {
        if (lx->n_open == sizeof lx->open) {
            return bt_tlex_fail(lx, BT_ERR_INVALID, tok->line, tok->col, "nested too deeply");
        }
        lx->open[lx->n_open++] = c == '(' ? ')' : c == '[' ? ']' : '}';
    } else if (strchr(")]}", c) != NULL) {
        if (lx->n_open == 0 || lx->open[lx->n_open - 1] != c) {
            return bt_tlex_fail(lx, BT_ERR_INVALID, tok->line, tok->col, "'%c' closes nothing", c);
        }
        lx->n_open--;
    }
    tok->op = c == '=' ? 'a' : c;
    lx->pos++;
    return true;
}

bool bt_tlex_next(struct tlex *lx, struct ttok *tok)
{
    if (lx->state == LEX_ROOT) {
        return lex_root(lx, tok);
    }
    if (lx->state == LEX_RAW) {
        return lex_raw(lx, tok);
    }
    if (tag_end(lx, tok)) {
        return true;
    }
    lx->pos = skip_space(lx, lx->pos);
    if (tag_end(lx, tok)) {
        return true;
    }
    if (lx->pos >= lx->n) {
        return fail_at(lx, lx->n, "the template ends inside a tag");
    }
    char c = lx->src[lx->pos];

    if (is_digit(c)) {
        return lex_number(lx, tok);
    }
    if (is_word(c)) {
        size_t from = lx->pos;

        while (lx->pos < lx->n && is_word(lx->src[lx->pos])) {
            lx->pos++;
        }
        return token(lx, tok, TT_NAME, from, lx->pos);
    }
    if (c == '\'' || c == '"') {
        return lex_string(lx, tok);
    }
    return lex_op(lx, tok);
}
