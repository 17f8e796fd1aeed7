/* Strings of chat templates as Python's str: indexed by character, whitespace and case by Unicode.
 * Upper case beyond one character is known for sharp s and the Latin ligatures only. */

#include "text/template_int.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/utf8.h"

uint32_t bt_tstr_count(const char *s, size_t n)
{
    uint32_t count = 0;

    for (size_t i = 0; i < n; i++) {
        count += ((unsigned char)s[i] & 0xC0) != 0x80;
    }
    return count;
}

size_t bt_tstr_offset(const char *s, size_t n, uint32_t chars)
{
    size_t i = 0;

    while (i < n && chars > 0) {
        for (i++; i < n && ((unsigned char)s[i] & 0xC0) == 0x80; i++) {
        }
        chars--;
    }
    return i;
}

bool bt_tchar_space(uint32_t cp)
{
    return (cp >= 9 && cp <= 13) || (cp >= 0x1C && cp <= 0x20) || cp == 0x85 || cp == 0xA0 ||
           cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200A) || cp == 0x2028 || cp == 0x2029 ||
           cp == 0x202F || cp == 0x205F || cp == 0x3000;
}

bool bt_tchar_printable(uint32_t cp)
{
    switch (utf8proc_category((utf8proc_int32_t)cp)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
        return false;
    case UTF8PROC_CATEGORY_ZS:
        return cp == ' ';
    default:
        return true;
    }
}

/* Strings hold valid UTF-8 only: compile and render checked it. */
static unsigned decode(const char *s, size_t n, uint32_t *cp)
{
    unsigned len = bt_utf8_decode(s, n, cp);

    if (len == 0) {
        *cp = 0xFFFD;
        return 1;
    }
    return len;
}

static size_t last_char(const char *s, size_t n)
{
    size_t at = n - 1;

    while (at > 0 && ((unsigned char)s[at] & 0xC0) == 0x80) {
        at--;
    }
    return at;
}

static bool stripped(const char *s, size_t n, struct tv chars)
{
    uint32_t cp;

    if (chars.type != TV_STR) {
        (void)decode(s, n, &cp);
        return bt_tchar_space(cp);
    }
    for (size_t i = 0, len; i < chars.n; i += len) {
        len = bt_tstr_offset(chars.s + i, chars.n - i, 1);
        if (len == n && memcmp(chars.s + i, s, n) == 0) {
            return true;
        }
    }
    return false;
}

bool bt_tstr_strip(struct tev *ev, struct tv s, struct tv chars, enum tstrip sides, struct tv *out)
{
    size_t from = 0, end = s.n;

    if (chars.type != TV_STR && chars.type != TV_NONE && !tv_missing(chars)) {
        return bt_tev_fail(ev, "strip takes a string, not %s", bt_tv_type_name(chars));
    }
    while ((sides & STRIP_LEFT) != 0 && from < end) {
        size_t n = bt_tstr_offset(s.s + from, end - from, 1);

        if (!stripped(s.s + from, n, chars)) {
            break;
        }
        from += n;
    }
    while ((sides & STRIP_RIGHT) != 0 && end > from) {
        size_t at = last_char(s.s + from, end - from) + from;

        if (!stripped(s.s + at, end - at, chars)) {
            break;
        }
        end = at;
    }
    *out = tv_str(s.s + from, end - from);
    return bt_tev_steps(ev, 1 + (s.n - (end - from)) / 16 *
                                    (chars.type == TV_STR ? 1 + chars.n / 16 : 1));
}

/* ---- case ---- */

static bool is_cased(uint32_t cp)
{
    utf8proc_int32_t c = (utf8proc_int32_t)cp;

    return utf8proc_tolower(c) != c || utf8proc_toupper(c) != c ||
           utf8proc_category(c) == UTF8PROC_CATEGORY_LL;
}

static bool is_letter(uint32_t cp)
{
    utf8proc_category_t c = utf8proc_category((utf8proc_int32_t)cp);

    return c >= UTF8PROC_CATEGORY_LU && c <= UTF8PROC_CATEGORY_LO;
}

static void add_cp(struct bt_buf *b, uint32_t cp)
{
    char utf8[4];

    bt_buf_add(b, utf8, bt_utf8_encode(cp, utf8));
}

static void add_upper(struct bt_buf *b, uint32_t cp)
{
    static const char *const ligatures[] = {"FF", "FI", "FL", "FFI", "FFL", "ST", "ST"};

    if (cp == 0xDF) {
        bt_buf_adds(b, "SS");
    } else if (cp >= 0xFB00 && cp <= 0xFB06) {
        bt_buf_adds(b, ligatures[cp - 0xFB00]);
    } else {
        add_cp(b, (uint32_t)utf8proc_toupper((utf8proc_int32_t)cp));
    }
}

static void add_lower(struct bt_buf *b, uint32_t cp, uint32_t before, uint32_t after)
{
    if (cp == 0x130) {
        bt_buf_adds(b, "i\xCC\x87");
    } else if (cp == 0x3A3) {
        add_cp(b, is_letter(before) && !is_letter(after) ? 0x3C2
                                                         : 0x3C3); /* sigma at the end of a word */
    } else {
        add_cp(b, (uint32_t)utf8proc_tolower((utf8proc_int32_t)cp));
    }
}

/* Does Jinja's title filter start a word after this character? */
static bool breaks_word(uint32_t cp)
{
    return bt_tchar_space(cp) || (cp < 0x80 && cp != 0 && strchr("-({[<", (int)cp) != NULL);
}

bool bt_tstr_case(struct tev *ev, struct tv s, enum tcase c, struct tv *out)
{
    struct bt_buf b = {0};
    uint32_t before = 0, cp, after = 0;

    for (size_t i = 0, len; i < s.n; i += len, before = cp) {
        bool upper = c == CASE_UPPER;

        len = decode(s.s + i, s.n - i, &cp);
        after = 0;
        if (i + len < s.n) {
            (void)decode(s.s + i + len, s.n - i - len, &after);
        }
        if (c == CASE_CAPITAL) {
            upper = i == 0;
        } else if (c == CASE_TITLE) {
            upper = !is_cased(before);
        } else if (c == CASE_JINJA_TITLE) {
            upper = i == 0 || breaks_word(before);
        } else if (c == CASE_SWAP) {
            upper = utf8proc_toupper((utf8proc_int32_t)cp) != (utf8proc_int32_t)cp;
        }
        if (upper && (c == CASE_CAPITAL || c == CASE_TITLE)) {
            add_cp(&b, (uint32_t)utf8proc_totitle((utf8proc_int32_t)cp));
        } else if (upper) {
            add_upper(&b, cp);
        } else if (c == CASE_FOLD && cp == 0xDF) {
            bt_buf_adds(&b, "ss");
        } else {
            add_lower(&b, cp, before, after);
        }
    }
    return bt_tev_take(ev, &b, out) && bt_tev_steps(ev, s.n / 16);
}

bool bt_tstr_is_case(struct tv s, bool upper)
{
    bool any = false;
    uint32_t cp;

    for (size_t i = 0, len; i < s.n; i += len) {
        utf8proc_int32_t c;

        len = decode(s.s + i, s.n - i, &cp);
        c = (utf8proc_int32_t)cp;
        if (upper ? utf8proc_toupper(c) != c : utf8proc_tolower(c) != c) {
            return false;
        }
        any = any || (is_cased(cp) && (utf8proc_category(c) ==
                                       (upper ? UTF8PROC_CATEGORY_LU : UTF8PROC_CATEGORY_LL)));
    }
    return any;
}

/* ---- pieces ---- */

bool bt_tstr_replace(struct tev *ev, struct tv s, struct tv from, struct tv to, int64_t count,
                     struct tv *out)
{
    struct bt_buf b = {0};
    size_t at = 0;

    while (count != 0 && at <= s.n && b.len <= ev->out_max) {
        const char *hit = from.n > 0 ? memmem(s.s + at, s.n - at, from.s, from.n) : s.s + at;

        if (hit == NULL) {
            break;
        }
        bt_buf_add(&b, s.s + at, (size_t)(hit - s.s) - at);
        bt_buf_add(&b, to.s, to.n);
        at = (size_t)(hit - s.s) + from.n;
        if (from.n == 0) { /* an empty pattern matches before every character and at the end */
            size_t len = bt_tstr_offset(s.s + at, s.n - at, 1);

            bt_buf_add(&b, s.s + at, len);
            at += len;
            if (len == 0) {
                at = s.n + 1;
            }
        }
        count -= count > 0;
    }
    if (b.len > ev->out_max) {
        bt_buf_fini(&b);
        return bt_tev_fail(ev, "text longer than %zu bytes", ev->out_max);
    }
    if (at < s.n) {
        bt_buf_add(&b, s.s + at, s.n - at);
    }
    return bt_tev_take(ev, &b, out) && bt_tev_steps(ev, s.n / 64);
}

static bool ends_line(uint32_t cp)
{
    return (cp >= 10 && cp <= 13) || (cp >= 0x1C && cp <= 0x1E) || cp == 0x85 || cp == 0x2028 ||
           cp == 0x2029;
}

bool bt_tstr_splitlines(struct tev *ev, struct tv s, bool keep_ends, struct tlist **out)
{
    size_t from = 0;
    uint32_t cp;

    if (!bt_tlist_new(ev, 0, out)) {
        return false;
    }
    for (size_t i = 0, len; i < s.n; i += len) {
        len = decode(s.s + i, s.n - i, &cp);
        if (!ends_line(cp)) {
            continue;
        }
        size_t end = i;

        len += cp == '\r' && i + 1 < s.n && s.s[i + 1] == '\n';
        if (!bt_tlist_push(ev, *out, tv_str(s.s + from, (keep_ends ? end + len : end) - from))) {
            return false;
        }
        from = i + len;
    }
    return (from == s.n || bt_tlist_push(ev, *out, tv_str(s.s + from, s.n - from))) &&
           bt_tev_steps(ev, s.n / 64);
}

bool bt_tstr_join(struct tev *ev, struct tv sep, const struct tlist *l, bool convert,
                  struct tv *out)
{
    struct bt_buf b = {0};
    bool ok = bt_tev_steps(ev, l->n);

    for (uint32_t i = 0; ok && i < l->n; i++) {
        if (i > 0) {
            bt_buf_add(&b, sep.s, sep.n);
        }
        if (!convert && l->items[i].type != TV_STR) {
            ok = bt_tev_fail(ev, "join: element %u is a %s, not a string", i,
                             bt_tv_type_name(l->items[i]));
        } else {
            ok = bt_tv_print(ev, &b, l->items[i], false, 0);
        }
    }
    if (!ok) {
        bt_buf_fini(&b);
        return false;
    }
    return bt_tev_take(ev, &b, out);
}

/* align: -1 left, 0 centre, 1 right, 2 zeros after the sign. */
bool bt_tstr_pad(struct tev *ev, struct tv s, int64_t width, struct tv fill, int align,
                 struct tv *out)
{
    int64_t have = bt_tstr_count(s.s, s.n), pad = width > have ? width - have : 0, left;
    struct bt_buf b = {0};

    if (fill.type != TV_STR || bt_tstr_count(fill.s, fill.n) != 1) {
        return bt_tev_fail(ev, "the fill must be one character");
    }
    if (pad > (int64_t)ev->out_max || (size_t)pad * fill.n + s.n > ev->out_max ||
        !bt_tev_steps(ev, (size_t)pad / 16)) {
        return ev->failed ? false : bt_tev_fail(ev, "text longer than %zu bytes", ev->out_max);
    }
    /* Python's rule for the odd one out when centring */
    left = align < 0 ? 0 : align > 0 ? pad : pad / 2 + (pad & width & 1);
    size_t sign = align == 2 && s.n > 0 && (s.s[0] == '-' || s.s[0] == '+');

    bt_buf_add(&b, s.s, sign);
    for (int64_t i = 0; i < left; i++) {
        bt_buf_add(&b, fill.s, fill.n);
    }
    bt_buf_add(&b, s.s + sign, s.n - sign);
    for (int64_t i = left; i < pad; i++) {
        bt_buf_add(&b, fill.s, fill.n);
    }
    return bt_tev_take(ev, &b, out);
}

/* ---- the % operator ---- */

struct percent {
    bool minus, zero, plus;
    int64_t width, precision; /* -1: not given */
    char conv;
};

/* One conversion after '%' (and after a "(name)"): returns the bytes read, 0 when not understood.
 */
static size_t percent_spec(const char *s, size_t n, struct percent *p)
{
    size_t i = 0;

    *p = (struct percent){.width = 0, .precision = -1};
    for (; i < n && strchr("-0+", s[i]) != NULL && s[i] != '\0'; i++) {
        p->minus = p->minus || s[i] == '-';
        p->zero = p->zero || s[i] == '0';
        p->plus = p->plus || s[i] == '+';
    }
    for (; i < n && s[i] >= '0' && s[i] <= '9' && p->width < 100000; i++) {
        p->width = p->width * 10 + (s[i] - '0');
    }
    if (i < n && s[i] == '.') {
        p->precision = 0;
        for (i++; i < n && s[i] >= '0' && s[i] <= '9' && p->precision < 100; i++) {
            p->precision = p->precision * 10 + (s[i] - '0');
        }
    }
    if (i >= n || s[i] == '\0' || strchr("sdirfFeEgGxXo", s[i]) == NULL) {
        return 0;
    }
    p->conv = s[i];
    return i + 1;
}

static bool percent_number(struct tev *ev, struct bt_buf *b, const struct percent *p, struct tv v)
{
    const char *plus = p->plus ? "+" : "";
    double f;

    if (v.type != TV_INT && v.type != TV_FLOAT && v.type != TV_BOOL) {
        return v.type == TV_UNDEF
                   ? bt_tev_undefined_error(ev, v)
                   : bt_tev_fail(ev, "%%%c wants a number, not %s", p->conv, bt_tv_type_name(v));
    }
    f = v.type == TV_FLOAT ? v.f : v.type == TV_BOOL ? (double)v.b : (double)v.i;
    if (strchr("dixXo", p->conv) != NULL) {
        if (v.type == TV_FLOAT && (strchr("xXo", p->conv) != NULL || !(f > -9e18 && f < 9e18))) {
            return bt_tev_fail(ev, "%%%c wants an integer", p->conv);
        }
        long long i = v.type == TV_INT ? v.i : (long long)f;
        unsigned long long u = i < 0 ? 0 - (unsigned long long)i : (unsigned long long)i;

        bt_buf_adds(b, i < 0 ? "-" : plus);
        bt_buf_addf(b,
                    p->conv == 'x'   ? "%llx"
                    : p->conv == 'X' ? "%llX"
                    : p->conv == 'o' ? "%llo"
                                     : "%llu",
                    u);
        return true;
    }
    int precision = p->precision < 0 ? 6 : (int)p->precision;

    bt_buf_adds(b, f >= 0 ? plus : "");
    if (p->conv == 'f' || p->conv == 'F') {
        bt_buf_addf(b, "%.*f", precision, f);
    } else if (p->conv == 'e' || p->conv == 'E') {
        bt_buf_addf(b, p->conv == 'e' ? "%.*e" : "%.*E", precision, f);
    } else {
        bt_buf_addf(b, p->conv == 'g' ? "%.*g" : "%.*G", precision, f);
    }
    return true;
}

static bool percent_value(struct tev *ev, const struct percent *p, struct tv v, struct tv *out)
{
    struct bt_buf b = {0};
    bool text = p->conv == 's' || p->conv == 'r';

    if (!(text ? bt_tv_print(ev, &b, v, p->conv == 'r', 0) : percent_number(ev, &b, p, v))) {
        bt_buf_fini(&b);
        return false;
    }
    if (!bt_tev_take(ev, &b, out)) {
        return false;
    }
    if (text && p->precision >= 0) {
        *out = tv_str(out->s, bt_tstr_offset(out->s, out->n, (uint32_t)p->precision));
    }
    return bt_tstr_pad(ev, *out, p->width,
                       p->zero && !text && !p->minus ? tv_str("0", 1) : tv_str(" ", 1),
                       p->minus           ? -1
                       : p->zero && !text ? 2
                                          : 1,
                       out);
}

/* The argument for a conversion: by name from a dict, or the next one. */
static bool percent_arg(struct tev *ev, const char *s, size_t n, size_t *i, struct tv args,
                        uint32_t *next, struct tv *v)
{
    bool tuple = args.type == TV_LIST && args.kind == LIST_TUPLE;

    if (*i < n && s[*i] == '(') {
        const char *end = memchr(s + *i, ')', n - *i);
        struct tv *found;

        if (end == NULL || args.type != TV_DICT) {
            return bt_tev_fail(ev, "%%(name) wants a dict of values");
        }
        found = bt_tdict_find_str(args.dict, s + *i + 1, (size_t)(end - s) - *i - 1);
        if (found == NULL) {
            return bt_tev_fail(ev, "%%(name) finds no such value");
        }
        *i = (size_t)(end - s) + 1;
        *v = *found;
        return true;
    }
    if (*next >= (tuple ? args.list->n : 1u)) {
        return bt_tev_fail(ev, "not enough arguments for the format string");
    }
    *v = tuple ? args.list->items[*next] : args;
    (*next)++;
    return true;
}

bool bt_tstr_percent(struct tev *ev, struct tv fmt, struct tv args, struct tv *out)
{
    struct bt_buf b = {0};
    uint32_t next = 0;
    bool ok = true;

    for (size_t i = 0; ok && i < fmt.n;) {
        struct percent p;
        struct tv v;
        size_t used;

        if (fmt.s[i] != '%' || (i + 1 < fmt.n && fmt.s[i + 1] == '%')) {
            bt_buf_addc(&b, fmt.s[i]);
            i += fmt.s[i] == '%' ? 2 : 1;
            continue;
        }
        i++;
        ok = b.len <= ev->out_max && percent_arg(ev, fmt.s, fmt.n, &i, args, &next, &v);
        if (ok) {
            used = percent_spec(fmt.s + i, fmt.n - i, &p);
            i += used;
            ok = (used > 0 || bt_tev_fail(ev, "conversion in the format string not understood")) &&
                 percent_value(ev, &p, v, &v);
            if (ok) {
                bt_buf_add(&b, v.s, v.n);
            }
        }
    }
    /* One value must be used, a tuple to its end; what can be indexed might have been a mapping. */
    bool tuple = args.type == TV_LIST && args.kind == LIST_TUPLE;
    bool indexed = args.type == TV_LIST || args.type == TV_DICT || args.type == TV_UNDEF;

    if (ok && (tuple ? next < args.list->n : next == 0 && !indexed)) {
        ok = bt_tev_fail(ev, "not all arguments of the format string were used");
    }
    if (!ok) {
        bt_buf_fini(&b);
        return bt_tev_fail(ev, "text longer than %zu bytes", ev->out_max);
    }
    return bt_tev_take(ev, &b, out);
}
