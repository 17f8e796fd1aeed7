/* Patterns of tokenizer files. Their regexes are written for Oniguruma with Ruby rules; this
 * translates what differs (classes \s \w \h, escapes \u \v, line anchors) to PCRE2 and refuses what
 * PCRE2 would read otherwise. Owns all use of PCRE2; knows nothing of what the matches are for. */

#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/tokenizer_int.h"

#include <pcre2.h>
#include <string.h>
#include "base/mem.h"
#include "base/utf8.h"

#define PATTERN_BYTES_MAX   65536
#define JIT_STACK_BYTES_MAX (64 << 20)
#define MATCH_LIMIT         50000000

/* White_Space; PCRE2's \s also takes U+180E. */
#define SPACE_SET                                                                                  \
    "\\x09-\\x0d\\x20\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{"    \
    "205f}\\x{3000}"
#define WORD_SET "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}"
/* Outside brackets Oniguruma takes its word characters below U+0100 from another table, which has
 * the Latin-1 numbers. */
#define WORD_ALONE WORD_SET "\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}"
#define WORD_EDGE                                                                                  \
    "(?:(?<=[" WORD_ALONE "])(?![" WORD_ALONE "])|(?<![" WORD_ALONE "])(?=[" WORD_ALONE "]))"
#define NO_WORD_EDGE                                                                               \
    "(?:(?<=[" WORD_ALONE "])(?=[" WORD_ALONE "])|(?<![" WORD_ALONE "])(?![" WORD_ALONE "]))"
#define HEX_SET "0-9a-fA-F"

struct bt_tok_pattern {
    pcre2_code *code;            /* NULL: a literal */
    pcre2_match_context *limits; /* with a large JIT stack limit where needed by the matcher */
    char *lit;
    size_t lit_len;
};

/* ---- translation ---- */

struct translator {
    const char *s;
    size_t len, i;
    bool in_class;
    struct bt_buf out;
    struct bt_err *err;
};

static enum bt_status refuse(struct translator *tr, const char *what)
{
    return bt_err_set(tr->err, BT_ERR_UNSUPPORTED, "regex offset %zu: %s is not supported", tr->i,
                      what);
}

/* \s \w \h and their negations, in brackets or alone. */
static enum bt_status class_escape(struct translator *tr, char c)
{
    bool negated = c == 'S' || c == 'W' || c == 'H';
    char kind = (char)(c | 0x20);

    if (!tr->in_class) {
        bt_buf_addf(&tr->out, negated ? "[^%s]" : "[%s]",
                    kind == 's'   ? SPACE_SET
                    : kind == 'w' ? WORD_ALONE
                                  : HEX_SET);
    } else if (c == 'S') {
        bt_buf_adds(&tr->out, "\\S\\x{180e}");
    } else if (negated) {
        return refuse(tr, "this class inside brackets");
    } else {
        bt_buf_adds(&tr->out, kind == 's' ? SPACE_SET : kind == 'w' ? WORD_SET : HEX_SET);
    }
    return BT_OK;
}

/* At a backslash; i stays behind the whole escape. */
static enum bt_status escape(struct translator *tr)
{
    if (tr->i + 1 >= tr->len) {
        return bt_err_set(tr->err, BT_ERR_INVALID, "regex offset %zu: lone backslash", tr->i);
    }
    char c = tr->s[tr->i + 1];
    switch (c) {
    case 's':
    case 'w':
    case 'h':
    case 'S':
    case 'W':
    case 'H':
        tr->i += 2;
        return class_escape(tr, c);
    case 'b':
    case 'B':
        if (tr->in_class) {
            bt_buf_add(&tr->out, tr->s + tr->i, 2); /* a backspace */
        } else {
            bt_buf_adds(&tr->out, c == 'b' ? WORD_EDGE : NO_WORD_EDGE);
        }
        break;
    case 'v':
        bt_buf_adds(&tr->out, "\\x0b");
        break;
    case 'u':
        if (tr->len - tr->i < 6) {
            return bt_err_set(tr->err, BT_ERR_INVALID, "regex offset %zu: cut \\u escape", tr->i);
        }
        bt_buf_addf(&tr->out, "\\x{%.4s}", tr->s + tr->i + 2);
        tr->i += 4;
        break;
    case 'C':
    case 'M':
    case 'y':
    case 'Y':
    case 'Q':
    case 'E':
        return refuse(tr, "this escape");
    default:
        bt_buf_add(&tr->out, tr->s + tr->i, 2);
    }
    tr->i += 2;
    if ((c == 'p' || c == 'P' || c == 'x') && tr->i < tr->len &&
        tr->s[tr->i] == '{') { /* its braces are no interval */
        const char *close = memchr(tr->s + tr->i, '}', tr->len - tr->i);
        size_t n = close == NULL ? 1 : (size_t)(close + 1 - (tr->s + tr->i));
        bt_buf_add(&tr->out, tr->s + tr->i, n);
        tr->i += n;
    }
    return BT_OK;
}

/* "[:alpha:]" inside brackets, i at its bracket. */
static enum bt_status posix_class(struct translator *tr)
{
    static const char *const map[][2] = {
        {"[:alpha:]", "\\p{Alphabetic}"}, {"[:alnum:]", "\\p{Alphabetic}\\p{Nd}"},
        {"[:digit:]", "\\p{Nd}"},         {"[:space:]", SPACE_SET},
        {"[:punct:]", "\\p{P}\\p{S}"},    {"[:word:]", WORD_SET},
        {"[:upper:]", "\\p{Uppercase}"},  {"[:lower:]", "\\p{Lowercase}"},
    };

    for (size_t k = 0; k < sizeof(map) / sizeof(map[0]); k++) {
        size_t n = strlen(map[k][0]);
        if (tr->len - tr->i >= n && memcmp(tr->s + tr->i, map[k][0], n) == 0) {
            bt_buf_adds(&tr->out, map[k][1]);
            tr->i += n;
            return BT_OK;
        }
    }
    return refuse(tr, "a class inside a class");
}

static enum bt_status class_char(struct translator *tr)
{
    const char *p = tr->s + tr->i;

    if (*p == '&' && tr->len - tr->i > 1 && p[1] == '&') {
        return refuse(tr, "class intersection (&&)");
    }
    if (*p == '[') {
        return posix_class(tr);
    }
    tr->in_class = *p != ']';
    bt_buf_addc(&tr->out, *p);
    tr->i++;
    return BT_OK;
}

/* "(?imx-imx" groups: Ruby's m is "dot matches newline". */
static enum bt_status group_flags(struct translator *tr)
{
    for (size_t k = tr->i + 2; k < tr->len; k++) {
        char c = tr->s[k];
        if (c == 'm') {
            return refuse(tr, "the m option");
        }
        if (c != 'i' && c != 'x' && c != '-') {
            break;
        }
    }
    return BT_OK;
}

static enum bt_status plain_char(struct translator *tr)
{
    const char *p = tr->s + tr->i;
    size_t left = tr->len - tr->i;
    enum bt_status st = BT_OK;

    if (*p == '}' && left > 1 && p[1] == '+') {
        return refuse(tr, "an interval followed by +"); /* possessive to PCRE2, a repeat to Ruby */
    }
    if (*p == '(' && left > 2 && p[1] == '?') {
        st = group_flags(tr);
    }
    bt_buf_addc(&tr->out, *p);
    tr->i++;
    if (*p == '[') {
        tr->in_class = true;
        if (tr->i < tr->len && tr->s[tr->i] == '^') {
            bt_buf_addc(&tr->out, '^');
            tr->i++;
        }
        if (tr->i < tr->len && tr->s[tr->i] == ']') {
            bt_buf_adds(&tr->out, "\\]");
            tr->i++;
        }
    }
    return st;
}

static enum bt_status translate(struct translator *tr)
{
    enum bt_status st = BT_OK;

    while (tr->i < tr->len && st == BT_OK) {
        if (tr->s[tr->i] == '\\') {
            st = escape(tr);
        } else {
            st = tr->in_class ? class_char(tr) : plain_char(tr);
        }
    }
    if (st == BT_OK && tr->out.failed) {
        st = bt_err_set(tr->err, BT_ERR_NOMEM, "out of memory");
    }
    return st;
}

/* ---- compiling ---- */

static enum bt_status compile(const char *re, size_t len, struct bt_tok_pattern **out,
                              struct bt_err *err)
{
    struct bt_tok_pattern *p = bt_calloc(1, sizeof(*p));
    pcre2_compile_context *cc = pcre2_compile_context_create(NULL);
    int code;
    PCRE2_SIZE at;

    if (p == NULL || cc == NULL) {
        bt_free(p);
        pcre2_compile_context_free(cc);
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    (void)pcre2_set_newline(cc, PCRE2_NEWLINE_LF); /* a legal constant cannot fail */
    p->code = pcre2_compile((PCRE2_SPTR)re, len,
                            PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C,
                            &code, &at, cc);
    pcre2_compile_context_free(cc);
    p->limits = pcre2_match_context_create(NULL);
    if (p->code == NULL || p->limits == NULL) {
        PCRE2_UCHAR text[128] = "out of memory";
        if (p->code == NULL) {
            (void)pcre2_get_error_message(code, text,
                                          sizeof(text)); /* an unknown code leaves text usable */
        }
        bt_tok_pattern_destroy(p);
        return bt_err_set(err, BT_ERR_INVALID, "regex: %s", (const char *)text);
    }
    (void)pcre2_set_match_limit(p->limits, MATCH_LIMIT);
    (void)pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE); /* without JIT, pcre2_match interprets */
    *out = p;
    return BT_OK;
}

enum bt_status bt_tok_pattern_regex(const char *re, size_t len, struct bt_tok_pattern **out,
                                    struct bt_err *err)
{
    struct translator tr = {.s = re, .len = len, .err = err};

    if (len > PATTERN_BYTES_MAX) {
        return bt_err_set(err, BT_ERR_INVALID, "regex of %zu bytes, the limit is %d", len,
                          PATTERN_BYTES_MAX);
    }
    enum bt_status st = translate(&tr);
    if (st == BT_OK) {
        st = compile(tr.out.data == NULL ? "" : tr.out.data, tr.out.len, out, err);
    }
    bt_buf_fini(&tr.out);
    return st;
}

enum bt_status bt_tok_pattern_pcre(const char *re, struct bt_tok_pattern **out, struct bt_err *err)
{
    return compile(re, strlen(re), out, err);
}

enum bt_status bt_tok_pattern_literal(const char *s, size_t len, struct bt_tok_pattern **out,
                                      struct bt_err *err)
{
    struct bt_tok_pattern *p = bt_calloc(1, sizeof(*p));

    if (p == NULL || (p->lit = bt_alloc(len + 1)) == NULL) {
        bt_free(p);
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    memcpy(p->lit, s, len);
    p->lit_len = len;
    *out = p;
    return BT_OK;
}

void bt_tok_pattern_destroy(struct bt_tok_pattern *p)
{
    if (p != NULL) {
        pcre2_code_free(p->code);
        pcre2_match_context_free(p->limits);
        bt_free(p->lit);
        bt_free(p);
    }
}

/* ---- matching ---- */

bool bt_tok_matches_init(struct bt_tok_matches *m, const struct bt_tok_pattern *p)
{
    *m = (struct bt_tok_matches){.p = p};
    if (p->code != NULL) {
        m->data = pcre2_match_data_create_from_pattern(p->code, NULL);
        return m->data != NULL;
    }
    return true;
}

void bt_tok_matches_text(struct bt_tok_matches *m, const char *s, size_t len)
{
    m->s = s;
    m->len = len;
    m->from = 0;
    m->last_end = SIZE_MAX;
}

static int literal_next(struct bt_tok_matches *m, size_t *start, size_t *end)
{
    if (m->p->lit_len == 0 || m->from >= m->len) {
        return 0;
    }
    const char *at = memmem(m->s + m->from, m->len - m->from, m->p->lit, m->p->lit_len);
    if (at == NULL) {
        return 0;
    }
    *start = (size_t)(at - m->s);
    *end = *start + m->p->lit_len;
    m->from = *end;
    return 1;
}

/* Rare: the 32 KiB on the machine stack did not do. */
static int match_big_stack(const struct bt_tok_matches *m)
{
    int rc = PCRE2_ERROR_NOMEMORY;
    pcre2_match_context *mc = pcre2_match_context_copy(m->p->limits);
    pcre2_jit_stack *js = pcre2_jit_stack_create(32 << 10, JIT_STACK_BYTES_MAX, NULL);

    if (mc != NULL && js != NULL) {
        pcre2_jit_stack_assign(mc, NULL, js);
        rc = pcre2_match(m->p->code, (PCRE2_SPTR)m->s, m->len, m->from, PCRE2_NO_UTF_CHECK, m->data,
                         mc);
    }
    pcre2_jit_stack_free(js);
    pcre2_match_context_free(mc);
    return rc;
}

int bt_tok_matches_next(struct bt_tok_matches *m, size_t *start, size_t *end)
{
    if (m->p->code == NULL) {
        return literal_next(m, start, end);
    }
    while (m->from <= m->len) {
        int rc = pcre2_match(m->p->code, (PCRE2_SPTR)m->s, m->len, m->from, PCRE2_NO_UTF_CHECK,
                             m->data, m->p->limits);
        if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {
            rc = match_big_stack(m);
        }
        if (rc == PCRE2_ERROR_NOMATCH) {
            return 0;
        }
        if (rc < 0) {
            return -1;
        }
        const PCRE2_SIZE *ov = pcre2_get_ovector_pointer(m->data);
        size_t s = ov[0],
               e = ov[1] < ov[0] ? ov[0] : ov[1]; /* \K can put the start behind the end */
        bool again = s == e && s == m->last_end;  /* an empty match at the end of the last one */
        m->from = e;
        if (s == e) {
            uint32_t cp;
            m->from = e < m->len ? e + bt_utf8_decode(m->s + e, m->len - e, &cp) : m->len + 1;
        }
        if (!again) {
            m->last_end = e;
            *start = s;
            *end = e;
            return 1;
        }
    }
    return 0;
}

void bt_tok_matches_fini(struct bt_tok_matches *m)
{
    pcre2_match_data_free(m->data);
    m->data = NULL;
}
