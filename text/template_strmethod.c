/* Methods of strings in chat templates, as Python's str has them. */

#include "text/template_int.h"

#include <string.h>
#include <utf8proc.h>

#include "base/utf8.h"

#define UNUSED_ARGS ((void)a, (void)raw)

static bool m_upper(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    UNUSED_ARGS;
    return bt_tstr_case(ev, self, CASE_UPPER, out);
}

static bool m_lower(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    UNUSED_ARGS;
    return bt_tstr_case(ev, self, CASE_LOWER, out);
}

static bool m_capitalize(struct tev *ev, struct tv self, const struct tv *a,
                         const struct targs *raw, struct tv *out)
{
    UNUSED_ARGS;
    return bt_tstr_case(ev, self, CASE_CAPITAL, out);
}

static bool m_title(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    UNUSED_ARGS;
    return bt_tstr_case(ev, self, CASE_TITLE, out);
}

static bool m_swapcase(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                       struct tv *out)
{
    UNUSED_ARGS;
    return bt_tstr_case(ev, self, CASE_SWAP, out);
}

static bool m_casefold(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                       struct tv *out)
{
    UNUSED_ARGS;
    return bt_tstr_case(ev, self, CASE_FOLD, out);
}

static bool m_strip(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    (void)raw;
    return bt_tstr_strip(ev, self, a[0], STRIP_BOTH, out);
}

static bool m_lstrip(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                     struct tv *out)
{
    (void)raw;
    return bt_tstr_strip(ev, self, a[0], STRIP_LEFT, out);
}

static bool m_rstrip(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                     struct tv *out)
{
    (void)raw;
    return bt_tstr_strip(ev, self, a[0], STRIP_RIGHT, out);
}

/* The part of self between character positions a[1] and a[2], as find and startswith take them. */
static bool window(struct tev *ev, struct tv self, const struct tv *a, struct tv *part,
                   int64_t *from)
{
    int64_t n = bt_tstr_count(self.s, self.n), to;
    size_t at;

    if (!bt_tev_want_int(ev, a[1], 0, from) || !bt_tev_want_int(ev, a[2], n, &to)) {
        return false;
    }
    *from = *from < 0 ? (*from < -n ? 0 : *from + n) : *from;
    to = to < 0 ? (to < -n ? 0 : to + n) : to > n ? n : to;
    if (*from > to) {
        *part = (struct tv){.type = TV_NONE}; /* not even the empty string is found there */
        return true;
    }
    at = bt_tstr_offset(self.s, self.n, (uint32_t)*from);
    *part = tv_str(self.s + at, bt_tstr_offset(self.s + at, self.n - at, (uint32_t)(to - *from)));
    return bt_tev_steps(ev, self.n / 64);
}

static bool has_affix(struct tv s, struct tv affix, bool at_end)
{
    return affix.n <= s.n && memcmp(at_end ? s.s + s.n - affix.n : s.s, affix.s, affix.n) == 0;
}

static bool affix_test(struct tev *ev, struct tv self, const struct tv *a, bool at_end,
                       struct tv *out)
{
    struct tv part;
    int64_t from;

    if (!window(ev, self, a, &part, &from)) {
        return false;
    }
    *out = tv_bool(false);
    if (a[0].type == TV_LIST && a[0].kind == LIST_TUPLE) {
        for (uint32_t i = 0; i < a[0].list->n; i++) {
            if (!bt_tev_want_str(ev, a[0].list->items[i])) {
                return false;
            }
            out->b =
                out->b || (part.type == TV_STR && has_affix(part, a[0].list->items[i], at_end));
        }
        return true;
    }
    if (!bt_tev_want_str(ev, a[0])) {
        return false;
    }
    out->b = part.type == TV_STR && has_affix(part, a[0], at_end);
    return true;
}

static bool m_startswith(struct tev *ev, struct tv self, const struct tv *a,
                         const struct targs *raw, struct tv *out)
{
    (void)raw;
    return affix_test(ev, self, a, false, out);
}

static bool m_endswith(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                       struct tv *out)
{
    (void)raw;
    return affix_test(ev, self, a, true, out);
}

static bool m_removeprefix(struct tev *ev, struct tv self, const struct tv *a,
                           const struct targs *raw, struct tv *out)
{
    (void)raw;
    if (!bt_tev_want_str(ev, a[0])) {
        return false;
    }
    *out = has_affix(self, a[0], false) ? tv_str(self.s + a[0].n, self.n - a[0].n) : self;
    return true;
}

static bool m_removesuffix(struct tev *ev, struct tv self, const struct tv *a,
                           const struct targs *raw, struct tv *out)
{
    (void)raw;
    if (!bt_tev_want_str(ev, a[0])) {
        return false;
    }
    *out = has_affix(self, a[0], true) ? tv_str(self.s, self.n - a[0].n) : self;
    return true;
}

/* First or last place of needle in s; NULL: none. */
static const char *search(struct tv s, struct tv needle, bool last)
{
    if (!last) {
        return needle.n == 0 ? s.s : memmem(s.s, s.n, needle.s, needle.n);
    }
    for (size_t at = s.n >= needle.n ? s.n - needle.n + 1 : 0; at > 0; at--) {
        if (memcmp(s.s + at - 1, needle.s, needle.n) == 0) {
            return s.s + at - 1;
        }
    }
    return NULL;
}

static bool find(struct tev *ev, struct tv self, const struct tv *a, bool last, bool must,
                 struct tv *out)
{
    struct tv part;
    const char *hit = NULL;
    int64_t from;

    if (!bt_tev_want_str(ev, a[0]) || !window(ev, self, a, &part, &from) ||
        !bt_tev_steps(ev, self.n / 16)) {
        return false;
    }
    if (part.type == TV_STR) {
        hit = search(part, a[0], last);
    }
    if (hit == NULL && must) {
        return bt_tev_fail(ev, "substring not found");
    }
    *out = tv_int(hit == NULL ? -1 : from + bt_tstr_count(part.s, (size_t)(hit - part.s)));
    return true;
}

static bool m_find(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                   struct tv *out)
{
    (void)raw;
    return find(ev, self, a, false, false, out);
}

static bool m_rfind(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    (void)raw;
    return find(ev, self, a, true, false, out);
}

static bool m_index(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    (void)raw;
    return find(ev, self, a, false, true, out);
}

static bool m_rindex(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                     struct tv *out)
{
    (void)raw;
    return find(ev, self, a, true, true, out);
}

static bool m_count(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    struct tv part;
    int64_t from, count = 0;

    (void)raw;
    if (!bt_tev_want_str(ev, a[0]) || !window(ev, self, a, &part, &from)) {
        return false;
    }
    if (part.type == TV_STR && a[0].n == 0) {
        count = bt_tstr_count(part.s, part.n) + 1;
    } else if (part.type == TV_STR) {
        const char *at = part.s, *end = part.s + part.n;

        for (; (at = memmem(at, (size_t)(end - at), a[0].s, a[0].n)) != NULL; at += a[0].n) {
            count++;
        }
    }
    *out = tv_int(count);
    return true;
}

static bool m_replace(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                      struct tv *out)
{
    int64_t count;

    (void)raw;
    return bt_tev_want_str(ev, a[0]) && bt_tev_want_str(ev, a[1]) &&
           bt_tev_want_int(ev, a[2], -1, &count) &&
           bt_tstr_replace(ev, self, a[0], a[1], count, out);
}

/* Fields between runs of whitespace; the rest after max splits keeps its whitespace. */
static bool split_space(struct tev *ev, struct tv s, int64_t max, struct tlist *l)
{
    struct tv none = tv_none(), rest;

    if (!bt_tstr_strip(ev, s, none, STRIP_LEFT, &rest)) {
        return false;
    }
    while (rest.n > 0) {
        size_t end = 0;
        uint32_t cp;
        unsigned len;

        if (max == 0) {
            return bt_tlist_push(ev, l, rest);
        }
        while (end < rest.n && (len = bt_utf8_decode(rest.s + end, rest.n - end, &cp)) > 0 &&
               !bt_tchar_space(cp)) {
            end += len;
        }
        if (!bt_tlist_push(ev, l, tv_str(rest.s, end)) ||
            !bt_tstr_strip(ev, tv_str(rest.s + end, rest.n - end), none, STRIP_LEFT, &rest)) {
            return false;
        }
        max -= max > 0;
    }
    return true;
}

static void reverse(struct tlist *l)
{
    for (uint32_t i = 0; i < l->n / 2; i++) {
        struct tv v = l->items[i];

        l->items[i] = l->items[l->n - 1 - i];
        l->items[l->n - 1 - i] = v;
    }
}

/* The same from the right: fields come last first. */
static bool rsplit_space(struct tev *ev, struct tv s, int64_t max, struct tlist *l)
{
    struct tv none = tv_none(), rest;

    if (!bt_tstr_strip(ev, s, none, STRIP_RIGHT, &rest)) {
        return false;
    }
    while (rest.n > 0) {
        size_t from = rest.n;

        if (max == 0) {
            return bt_tlist_push(ev, l, rest);
        }
        while (from > 0) {
            size_t at = from - 1;
            uint32_t cp;

            while (at > 0 && ((unsigned char)rest.s[at] & 0xC0) == 0x80) {
                at--;
            }
            if (bt_utf8_decode(rest.s + at, rest.n - at, &cp) == 0 || bt_tchar_space(cp)) {
                break;
            }
            from = at;
        }
        if (!bt_tlist_push(ev, l, tv_str(rest.s + from, rest.n - from)) ||
            !bt_tstr_strip(ev, tv_str(rest.s, from), none, STRIP_RIGHT, &rest)) {
            return false;
        }
        max -= max > 0;
    }
    return true;
}

static bool split_sep(struct tev *ev, struct tv s, struct tv sep, int64_t max, bool right,
                      struct tlist *l)
{
    for (; max != 0; max -= max > 0) {
        const char *hit = search(s, sep, right);
        size_t at;

        if (hit == NULL) {
            break;
        }
        at = (size_t)(hit - s.s);
        if (!bt_tlist_push(ev, l,
                           right ? tv_str(hit + sep.n, s.n - at - sep.n) : tv_str(s.s, at))) {
            return false;
        }
        s = right ? tv_str(s.s, at) : tv_str(hit + sep.n, s.n - at - sep.n);
    }
    return bt_tlist_push(ev, l, s);
}

static bool split(struct tev *ev, struct tv self, const struct tv *a, bool right, struct tv *out)
{
    struct tlist *l;
    int64_t max;
    bool ok;

    if (!bt_tev_want_int(ev, a[1], -1, &max) || !bt_tlist_new(ev, 0, &l) ||
        !bt_tev_steps(ev, self.n / 16)) {
        return false;
    }
    if (tv_missing(a[0]) || a[0].type == TV_NONE) {
        ok = right ? rsplit_space(ev, self, max, l) : split_space(ev, self, max, l);
    } else if (!bt_tev_want_str(ev, a[0]) || a[0].n == 0) {
        return ev->failed ? false : bt_tev_fail(ev, "split: the separator is empty");
    } else {
        ok = split_sep(ev, self, a[0], max, right, l);
    }
    if (right) {
        reverse(l);
    }
    *out = tv_list(LIST_LIST, l);
    return ok && bt_tev_steps(ev, l->n / 4);
}

static bool m_split(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    (void)raw;
    return split(ev, self, a, false, out);
}

static bool m_rsplit(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                     struct tv *out)
{
    (void)raw;
    return split(ev, self, a, true, out);
}

static bool partition(struct tev *ev, struct tv self, struct tv sep, bool last, struct tv *out)
{
    struct tlist *l;
    const char *hit;

    if (!bt_tev_want_str(ev, sep) || !bt_tlist_new(ev, 3, &l)) {
        return false;
    }
    if (sep.n == 0) {
        return bt_tev_fail(ev, "partition: the separator is empty");
    }
    hit = search(self, sep, last);
    l->n = 3;
    l->items[0] = l->items[1] = l->items[2] = tv_str("", 0);
    if (hit == NULL) {
        l->items[last ? 2 : 0] = self;
    } else {
        size_t at = (size_t)(hit - self.s);

        l->items[0] = tv_str(self.s, at);
        l->items[1] = sep;
        l->items[2] = tv_str(hit + sep.n, self.n - at - sep.n);
    }
    *out = tv_list(LIST_TUPLE, l);
    return bt_tev_steps(ev, self.n / 16);
}

static bool m_partition(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                        struct tv *out)
{
    (void)raw;
    return partition(ev, self, a[0], false, out);
}

static bool m_rpartition(struct tev *ev, struct tv self, const struct tv *a,
                         const struct targs *raw, struct tv *out)
{
    (void)raw;
    return partition(ev, self, a[0], true, out);
}

static bool m_splitlines(struct tev *ev, struct tv self, const struct tv *a,
                         const struct targs *raw, struct tv *out)
{
    struct tlist *l;

    (void)raw;
    if (!bt_tstr_splitlines(ev, self, bt_tv_truth(a[0]), &l)) {
        return false;
    }
    *out = tv_list(LIST_LIST, l);
    return true;
}

static bool m_join(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                   struct tv *out)
{
    struct tlist *l;

    (void)raw;
    return bt_tev_items(ev, a[0], &l) && bt_tstr_join(ev, self, l, false, out);
}

static bool pad(struct tev *ev, struct tv self, const struct tv *a, int align, struct tv *out)
{
    int64_t width = 0;

    return bt_tev_want_int(ev, a[0], 0, &width) &&
           bt_tstr_pad(ev, self, width, tv_missing(a[1]) ? tv_str(" ", 1) : a[1], align, out);
}

static bool m_ljust(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    (void)raw;
    return pad(ev, self, a, -1, out);
}

static bool m_rjust(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    (void)raw;
    return pad(ev, self, a, 1, out);
}

static bool m_center(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                     struct tv *out)
{
    (void)raw;
    return pad(ev, self, a, 0, out);
}

static bool m_zfill(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    const struct tv args[2] = {a[0], tv_str("0", 1)};

    (void)raw;
    return pad(ev, self, args, 2, out);
}

/* The fields of str.format: {}, {0}, {name}; no attributes, no format specifications. */
static bool format_field(struct tev *ev, const char *s, size_t n, const struct targs *raw,
                         uint32_t *next, struct tv *v)
{
    uint32_t i = 0;

    if (n == 0 || (s[0] >= '0' && s[0] <= '9' && n < 6)) {
        for (size_t k = 0; k < n; k++) {
            if (s[k] < '0' || s[k] > '9') {
                return bt_tev_fail(ev, "format: field '%.*s' is not supported", (int)n, s);
            }
            i = i * 10 + (uint32_t)(s[k] - '0');
        }
        i = n == 0 ? (*next)++ : i;
        if (i >= raw->n_pos) {
            return bt_tev_fail(ev, "format: there is no argument %u", i);
        }
        *v = raw->pos[i];
        return true;
    }
    for (i = 0; i < raw->n_kw; i++) {
        if (raw->kw[i].len == n && memcmp(raw->kw[i].name, s, n) == 0) {
            *v = raw->kw[i].value;
            return true;
        }
    }
    return bt_tev_fail(ev, "format: field '%.*s' is not supported", (int)(n < 60 ? n : 60), s);
}

static bool m_format(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                     struct tv *out)
{
    struct bt_buf b = {0};
    uint32_t next = 0;
    bool ok = true;

    (void)a;
    for (size_t i = 0; ok && i < self.n; i++) {
        char c = self.s[i];
        const char *end;
        struct tv v;

        if (c != '{' && c != '}') {
            bt_buf_addc(&b, c);
        } else if (i + 1 < self.n && self.s[i + 1] == c) {
            bt_buf_addc(&b, c);
            i++;
        } else if (c == '}' || (end = memchr(self.s + i, '}', self.n - i)) == NULL) {
            ok = bt_tev_fail(ev, "format: single '%c'", c);
        } else {
            ok = format_field(ev, self.s + i + 1, (size_t)(end - self.s) - i - 1, raw, &next, &v) &&
                 bt_tv_print(ev, &b, v, false, 0);
            i = (size_t)(end - self.s);
        }
    }
    if (!ok) {
        bt_buf_fini(&b);
        return false;
    }
    return bt_tev_take(ev, &b, out);
}

static bool cat_alpha(uint32_t cp)
{
    utf8proc_category_t c = utf8proc_category((utf8proc_int32_t)cp);

    return c >= UTF8PROC_CATEGORY_LU && c <= UTF8PROC_CATEGORY_LO;
}

static bool cat_decimal(uint32_t cp)
{
    return utf8proc_category((utf8proc_int32_t)cp) == UTF8PROC_CATEGORY_ND;
}

static bool cat_digit(uint32_t cp)
{
    return cat_decimal(cp) || cp == 0xB2 || cp == 0xB3 || cp == 0xB9;
}

static bool cat_numeric(uint32_t cp)
{
    utf8proc_category_t c = utf8proc_category((utf8proc_int32_t)cp);

    return c >= UTF8PROC_CATEGORY_ND && c <= UTF8PROC_CATEGORY_NO;
}

bool bt_tchar_alnum(uint32_t cp)
{
    return cat_alpha(cp) || cat_numeric(cp);
}

static bool cat_ascii(uint32_t cp)
{
    return cp < 0x80;
}

static struct tv all_chars(struct tv s, bool (*test)(uint32_t cp), bool empty)
{
    uint32_t cp;

    for (size_t i = 0; i < s.n;) {
        unsigned len = bt_utf8_decode(s.s + i, s.n - i, &cp);

        if (len == 0 || !test(cp)) {
            return tv_bool(false);
        }
        i += len;
    }
    return tv_bool(s.n > 0 || empty);
}

#define CHARS_METHOD(name, test, empty)                                                            \
    static bool name(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,  \
                     struct tv *out)                                                               \
    {                                                                                              \
        UNUSED_ARGS;                                                                               \
        *out = all_chars(self, test, empty);                                                       \
        return bt_tev_steps(ev, self.n / 16);                                                      \
    }
CHARS_METHOD(m_isalpha, cat_alpha, false)
CHARS_METHOD(m_isdecimal, cat_decimal, false)
CHARS_METHOD(m_isdigit, cat_digit, false)
CHARS_METHOD(m_isnumeric, cat_numeric, false)
CHARS_METHOD(m_isalnum, bt_tchar_alnum, false)
CHARS_METHOD(m_isspace, bt_tchar_space, false)
CHARS_METHOD(m_isascii, cat_ascii, true)
CHARS_METHOD(m_isprintable, bt_tchar_printable, true)

static bool m_isupper(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                      struct tv *out)
{
    UNUSED_ARGS;
    *out = tv_bool(bt_tstr_is_case(self, true));
    return bt_tev_steps(ev, self.n / 16);
}

static bool m_islower(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                      struct tv *out)
{
    UNUSED_ARGS;
    *out = tv_bool(bt_tstr_is_case(self, false));
    return bt_tev_steps(ev, self.n / 16);
}

const struct tfunc bt_tstr_methods[] = {
    {"capitalize", m_capitalize, "", 0},
    {"casefold", m_casefold, "", 0},
    {"center", m_center, "width,fillchar", 1},
    {"count", m_count, "sub,start,end", 1},
    {"endswith", m_endswith, "suffix,start,end", 1},
    {"find", m_find, "sub,start,end", 1},
    {"format", m_format, NULL, 0},
    {"index", m_index, "sub,start,end", 1},
    {"isalnum", m_isalnum, "", 0},
    {"isalpha", m_isalpha, "", 0},
    {"isascii", m_isascii, "", 0},
    {"isdecimal", m_isdecimal, "", 0},
    {"isdigit", m_isdigit, "", 0},
    {"islower", m_islower, "", 0},
    {"isnumeric", m_isnumeric, "", 0},
    {"isprintable", m_isprintable, "", 0},
    {"isspace", m_isspace, "", 0},
    {"isupper", m_isupper, "", 0},
    {"join", m_join, "iterable", 1},
    {"ljust", m_ljust, "width,fillchar", 1},
    {"lower", m_lower, "", 0},
    {"lstrip", m_lstrip, "chars", 0},
    {"partition", m_partition, "sep", 1},
    {"removeprefix", m_removeprefix, "prefix", 1},
    {"removesuffix", m_removesuffix, "suffix", 1},
    {"replace", m_replace, "old,new,count", 2},
    {"rfind", m_rfind, "sub,start,end", 1},
    {"rindex", m_rindex, "sub,start,end", 1},
    {"rjust", m_rjust, "width,fillchar", 1},
    {"rpartition", m_rpartition, "sep", 1},
    {"rsplit", m_rsplit, "sep,maxsplit", 0},
    {"rstrip", m_rstrip, "chars", 0},
    {"split", m_split, "sep,maxsplit", 0},
    {"splitlines", m_splitlines, "keepends", 0},
    {"startswith", m_startswith, "prefix,start,end", 1},
    {"strip", m_strip, "chars", 0},
    {"swapcase", m_swapcase, "", 0},
    {"title", m_title, "", 0},
    {"upper", m_upper, "", 0},
    {"zfill", m_zfill, "width", 1},
    {NULL, NULL, NULL, 0},
};
