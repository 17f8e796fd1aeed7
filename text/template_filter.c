/* Filters and tests of chat templates, with the arguments, defaults and edge cases of Jinja's own.
 */

#include "text/template_int.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"

#define UNUSED_ARGS ((void)a, (void)raw)

typedef bool filter_fn(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                       struct tv *out);

static bool want_int(struct tev *ev, struct tv v, int64_t dflt, int64_t *out)
{
    if (tv_missing(v)) {
        *out = dflt;
        return true;
    }
    if (v.type != TV_INT && v.type != TV_BOOL) {
        return v.type == TV_UNDEF
                   ? bt_tev_undefined_error(ev, v)
                   : bt_tev_fail(ev, "expected an integer, got %s", bt_tv_type_name(v));
    }
    *out = v.type == TV_BOOL ? v.b : v.i;
    return true;
}

/* ---- text ---- */

#define CASE_FILTER(name, which)                                                                   \
    static bool name(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,     \
                     struct tv *out)                                                               \
    {                                                                                              \
        UNUSED_ARGS;                                                                               \
        return bt_tv_to_str(ev, v, &v) && bt_tstr_case(ev, v, which, out);                         \
    }
CASE_FILTER(f_upper, CASE_UPPER)
CASE_FILTER(f_lower, CASE_LOWER)
CASE_FILTER(f_capitalize, CASE_CAPITAL)
CASE_FILTER(f_title, CASE_JINJA_TITLE)

static bool f_trim(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                   struct tv *out)
{
    (void)raw;
    return bt_tv_to_str(ev, v, &v) && bt_tstr_strip(ev, v, a[0], STRIP_BOTH, out);
}

static bool f_string(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                     struct tv *out)
{
    UNUSED_ARGS;
    return bt_tv_to_str(ev, v, out);
}

static bool f_replace(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                      struct tv *out)
{
    struct tv from, to;
    int64_t count = -1;

    (void)raw;
    return bt_tv_to_str(ev, v, &v) && bt_tv_to_str(ev, a[0], &from) &&
           bt_tv_to_str(ev, a[1], &to) &&
           (a[2].type == TV_NONE || want_int(ev, a[2], -1, &count)) &&
           bt_tstr_replace(ev, v, from, to, count, out);
}

static bool f_center(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                     struct tv *out)
{
    int64_t width;

    (void)raw;
    return bt_tv_to_str(ev, v, &v) && want_int(ev, a[0], 80, &width) &&
           bt_tstr_pad(ev, v, width, tv_str(" ", 1), 0, out);
}

static bool f_indent(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                     struct tv *out)
{
    bool first = bt_tv_truth(a[1]), blank = bt_tv_truth(a[2]);
    struct tv indent = a[0];
    struct bt_buf b = {0};
    struct tlist *lines;
    int64_t width = 4;

    (void)raw;
    if (v.type != TV_STR) {
        return v.type == TV_UNDEF
                   ? bt_tev_undefined_error(ev, v)
                   : bt_tev_fail(ev, "indent: expected a string, got %s", bt_tv_type_name(v));
    }
    if (indent.type != TV_STR &&
        (!want_int(ev, indent, 4, &width) ||
         !bt_tstr_pad(ev, tv_str("", 0), width, tv_str(" ", 1), -1, &indent))) {
        return false;
    }
    bt_buf_add(&b, v.s, v.n);
    bt_buf_addc(&b, '\n'); /* so that a final newline starts one more line */
    if (!bt_tev_take(ev, &b, &v) || !bt_tstr_splitlines(ev, v, false, &lines)) {
        return false;
    }
    if (lines->n > ev->out_max / (indent.n + 1)) {
        return bt_tev_fail(ev, "text longer than %zu bytes", ev->out_max);
    }
    for (uint32_t i = 0; i < lines->n; i++) {
        if (i > 0) {
            bt_buf_addc(&b, '\n');
        }
        if (i == 0 ? first : blank || lines->items[i].n > 0) {
            bt_buf_add(&b, indent.s, indent.n);
        }
        bt_buf_add(&b, lines->items[i].s, lines->items[i].n);
    }
    return bt_tev_take(ev, &b, out);
}

static bool f_escape(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                     struct tv *out)
{
    static const char from[] = "&<>\"'";
    static const char *const to[] = {"&amp;", "&lt;", "&gt;", "&#34;", "&#39;"};
    struct bt_buf b = {0};

    UNUSED_ARGS;
    if (!bt_tv_to_str(ev, v, &v)) {
        return false;
    }
    for (size_t i = 0; i < v.n; i++) {
        const char *hit = v.s[i] != '\0' ? strchr(from, v.s[i]) : NULL;

        if (hit != NULL) {
            bt_buf_adds(&b, to[hit - from]);
        } else {
            bt_buf_addc(&b, v.s[i]);
        }
    }
    return bt_tev_take(ev, &b, out);
}

static bool f_format(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                     struct tv *out)
{
    struct tlist *l;
    struct tdict *d;

    (void)a;
    if (!bt_tv_to_str(ev, v, &v)) {
        return false;
    }
    if (raw->n_kw > 0) {
        if (raw->n_pos > 0) {
            return bt_tev_fail(ev, "format: positional and keyword arguments at the same time");
        }
        if (!bt_tdict_new(ev, raw->n_kw, &d)) {
            return false;
        }
        for (uint32_t i = 0; i < raw->n_kw; i++) {
            if (!bt_tdict_put(ev, d, tv_str(raw->kw[i].name, raw->kw[i].len), raw->kw[i].value)) {
                return false;
            }
        }
        return bt_tstr_percent(ev, v, tv_dict(d), out);
    }
    if (!bt_tlist_new(ev, 0, &l)) {
        return false;
    }
    l->items = raw->pos;
    l->n = l->cap = raw->n_pos;
    return bt_tstr_percent(ev, v, tv_list(LIST_TUPLE, l), out);
}

static bool f_wordcount(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                        struct tv *out)
{
    bool inside = false;
    uint32_t cp;

    UNUSED_ARGS;
    if (!bt_tv_to_str(ev, v, &v)) {
        return false;
    }
    *out = tv_int(0);
    for (size_t i = 0, len; i < v.n; i += len) {
        bool word;

        len = bt_tstr_offset(v.s + i, v.n - i, 1);
        word = bt_utf8_decode(v.s + i, len, &cp) > 0 && (cp == '_' || bt_tchar_alnum(cp));
        out->i += word && !inside;
        inside = word;
    }
    return bt_tev_steps(ev, v.n / 16);
}

static bool f_tojson(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                     struct tv *out)
{
    (void)raw;
    return bt_tev_to_json(ev, v, a, out);
}

/* ---- numbers ---- */

/* A number from text as Python's int() and float() accept it: surrounding space, sign, single
 * underscores. */
static bool parse_number(struct tv s, bool integer, int64_t base, int64_t *i, double *f)
{
    char buf[128], *end;
    size_t n = 0, from = 0, to = s.n;

    while (from < to && bt_tchar_space((unsigned char)s.s[from])) {
        from++;
    }
    while (to > from && bt_tchar_space((unsigned char)s.s[to - 1])) {
        to--;
    }
    for (size_t k = from; k < to; k++) {
        char c = s.s[k];

        if (c == '_' && k > from && k + 1 < to && s.s[k - 1] != '_') {
            continue;
        }
        if (c == '_' || c == '\0' || bt_tchar_space((unsigned char)c) || n + 1 >= sizeof buf ||
            ((c == 'x' || c == 'X' || c == '(') && !integer)) {
            return false;
        }
        buf[n++] = c;
    }
    buf[n] = '\0';
    if (n == 0) {
        return false;
    }
    if (integer) {
        const char *digits = buf + (buf[0] == '-' || buf[0] == '+');

        if (digits[0] == '0' && (base == 2 || base == 8) &&
            (digits[1] | 32) == (base == 2 ? 'b' : 'o')) {
            memmove(buf + (digits - buf), digits + 2, strlen(digits + 2) + 1);
        }
        *i = strtoll(buf, &end, (int)base);
        return *end == '\0' && end != buf;
    }
    *f = strtod(buf, &end);
    return *end == '\0';
}

static bool f_int(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                  struct tv *out)
{
    struct tv dflt = tv_missing(a[0]) ? tv_int(0) : a[0];
    int64_t base = tv_missing(a[1]) ? 10 : a[1].type == TV_INT ? a[1].i : -1, i = 0;
    double f = 0;

    (void)raw;
    if (v.type == TV_UNDEF) {
        return bt_tev_undefined_error(ev, v);
    }
    if (v.type == TV_INT || v.type == TV_BOOL) {
        *out = tv_int(v.type == TV_INT ? v.i : v.b);
        return true;
    }
    errno = 0;
    if (v.type == TV_STR && (base == 0 || (base >= 2 && base <= 36)) &&
        parse_number(v, true, base, &i, NULL)) {
        *out = tv_int(i);
        return errno != ERANGE || bt_tev_fail(ev, "int: the number does not fit 64 bits");
    }
    *out = dflt;
    if (v.type != TV_FLOAT && !(v.type == TV_STR && parse_number(v, false, 10, NULL, &f))) {
        return true;
    }
    f = v.type == TV_FLOAT ? v.f : f;
    if (isnan(f) || isinf(f)) {
        return true;
    }
    if (!(f > -9.2e18 && f < 9.2e18)) {
        return bt_tev_fail(ev, "int: the number does not fit 64 bits");
    }
    *out = tv_int((int64_t)f);
    return true;
}

static bool f_float(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    double f = 0;

    (void)raw;
    if (v.type == TV_UNDEF) {
        return bt_tev_undefined_error(ev, v);
    }
    if (v.type == TV_FLOAT || v.type == TV_INT || v.type == TV_BOOL) {
        *out = tv_float(v.type == TV_FLOAT ? v.f : v.type == TV_INT ? (double)v.i : (double)v.b);
    } else if (v.type == TV_STR && parse_number(v, false, 10, NULL, &f)) {
        *out = tv_float(f);
    } else {
        *out = tv_missing(a[0]) ? tv_float(0) : a[0];
    }
    return true;
}

static bool f_abs(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                  struct tv *out)
{
    UNUSED_ARGS;
    if (v.type == TV_INT && v.i != INT64_MIN) {
        *out = tv_int(v.i < 0 ? -v.i : v.i);
    } else if (v.type == TV_FLOAT) {
        *out = tv_float(fabs(v.f));
    } else if (v.type == TV_BOOL) {
        *out = tv_int(v.b);
    } else {
        return v.type == TV_UNDEF ? bt_tev_undefined_error(ev, v)
                                  : bt_tev_fail(ev, "abs: not a number");
    }
    return true;
}

/* round() of Python: the decimal digits decide, a tie goes to the even one. */
static double round_to(double f, int64_t precision)
{
    char buf[400];

    if (precision > 300 || !isfinite(f)) {
        return f;
    }
    if (precision < 0) {
        double p = pow(10, (double)-precision);

        return nearbyint(f / p) * p;
    }
    snprintf(buf, sizeof buf, "%.*f", (int)precision, f);
    return fabs(f) < 1e22 ? strtod(buf, NULL) : f;
}

static bool f_round(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    int64_t precision = 0;
    double f, scale;

    (void)raw;
    if (!want_int(ev, a[0], 0, &precision)) {
        return false;
    }
    if (v.type != TV_INT && v.type != TV_FLOAT && v.type != TV_BOOL) {
        return v.type == TV_UNDEF ? bt_tev_undefined_error(ev, v)
                                  : bt_tev_fail(ev, "round: not a number");
    }
    f = v.type == TV_FLOAT ? v.f : v.type == TV_INT ? (double)v.i : (double)v.b;
    if (tv_missing(a[1]) || tv_is(a[1], "common")) {
        *out = v.type == TV_FLOAT ? tv_float(round_to(f, precision))
               : v.type == TV_INT ? v
                                  : tv_int(v.b);
        return true;
    }
    if (!tv_is(a[1], "ceil") && !tv_is(a[1], "floor")) {
        return bt_tev_fail(ev, "round: the method is common, ceil or floor");
    }
    scale = pow(10, (double)precision);
    *out = tv_float((tv_is(a[1], "ceil") ? ceil(f * scale) : floor(f * scale)) / scale);
    return true;
}

/* ---- values ---- */

static bool f_default(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                      struct tv *out)
{
    (void)ev;
    (void)raw;
    *out = v.type == TV_UNDEF || (bt_tv_truth(a[1]) && !bt_tv_truth(v))
               ? (tv_missing(a[0]) ? tv_str("", 0) : a[0])
               : v;
    return true;
}

static bool f_length(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                     struct tv *out)
{
    UNUSED_ARGS;
    if (v.type == TV_STR) {
        *out = tv_int(bt_tstr_count(v.s, v.n));
    } else if (v.type == TV_LIST && v.kind != LIST_ITER) {
        *out = tv_int(v.list->n);
    } else if (v.type == TV_DICT) {
        *out = tv_int(v.dict->n);
    } else if (v.type == TV_UNDEF) {
        *out = tv_int(0);
    } else {
        return bt_tev_fail(ev, "a %s has no length", bt_tv_type_name(v));
    }
    return bt_tev_steps(ev, v.type == TV_STR ? v.n / 64 : 0);
}

static bool f_safe(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                   struct tv *out)
{
    UNUSED_ARGS;
    return bt_tv_to_str(ev, v, out);
}

static bool f_attr(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                   struct tv *out)
{
    (void)raw;
    if (a[0].type != TV_STR) {
        return bt_tev_fail(ev, "attr: the name must be a string");
    }
    if (v.type == TV_DICT) { /* only methods: keys are no attributes */
        bool unsafe = false;

        if (bt_tmethod_find(v, a[0].s, a[0].n, &unsafe) == NULL && !unsafe) {
            *out = tv_undef(UNDEF_ATTR, a[0].s, a[0].n);
            return true;
        }
    }
    return bt_tev_getattr(ev, v, a[0].s, a[0].n, out);
}

/* ---- tests ---- */

#define TYPE_TEST(name, expr)                                                                      \
    static bool name(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,     \
                     struct tv *out)                                                               \
    {                                                                                              \
        (void)ev;                                                                                  \
        UNUSED_ARGS;                                                                               \
        *out = tv_bool(expr);                                                                      \
        return true;                                                                               \
    }
TYPE_TEST(t_defined, v.type != TV_UNDEF)
TYPE_TEST(t_undefined, v.type == TV_UNDEF)
TYPE_TEST(t_none, v.type == TV_NONE)
TYPE_TEST(t_boolean, v.type == TV_BOOL)
TYPE_TEST(t_true, v.type == TV_BOOL && v.b)
TYPE_TEST(t_false, v.type == TV_BOOL && !v.b)
TYPE_TEST(t_integer, v.type == TV_INT)
TYPE_TEST(t_float, v.type == TV_FLOAT)
TYPE_TEST(t_number, v.type == TV_INT || v.type == TV_FLOAT || v.type == TV_BOOL)
TYPE_TEST(t_string, v.type == TV_STR)
TYPE_TEST(t_mapping, v.type == TV_DICT)
TYPE_TEST(t_iterable, v.type == TV_LIST || v.type == TV_DICT || v.type == TV_STR ||
                          v.type == TV_UNDEF || v.type == TV_LOOP)
TYPE_TEST(t_sequence, (v.type == TV_LIST && v.kind <= LIST_RANGE) || v.type == TV_DICT ||
                          v.type == TV_STR || v.type == TV_UNDEF)
TYPE_TEST(t_callable, v.type == TV_FUNC || v.type == TV_METHOD || v.type == TV_MACRO ||
                          v.type == TV_UNDEF || v.type == TV_LOOP)
TYPE_TEST(t_escaped, ((void)v, false))
TYPE_TEST(t_filter, v.type == TV_STR && bt_tfilter_find(v.s, v.n) != NULL)
TYPE_TEST(t_test, v.type == TV_STR && bt_ttest_find(v.s, v.n) != NULL)

static bool case_test(struct tev *ev, struct tv v, bool upper, struct tv *out)
{
    if (!bt_tv_to_str(ev, v, &v)) {
        return false;
    }
    *out = tv_bool(bt_tstr_is_case(v, upper));
    return true;
}

static bool t_upper(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    UNUSED_ARGS;
    return case_test(ev, v, true, out);
}

static bool t_lower(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    UNUSED_ARGS;
    return case_test(ev, v, false, out);
}

static bool remainder_is(struct tev *ev, struct tv v, struct tv by, int64_t want, struct tv *out)
{
    if (!bt_tev_binary(ev, '%', v, by, out)) {
        return false;
    }
    return bt_tv_equal(ev, *out, tv_int(want), &out->b) && (*out = tv_bool(out->b), true);
}

static bool t_odd(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                  struct tv *out)
{
    UNUSED_ARGS;
    return remainder_is(ev, v, tv_int(2), 1, out);
}

static bool t_even(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                   struct tv *out)
{
    UNUSED_ARGS;
    return remainder_is(ev, v, tv_int(2), 0, out);
}

static bool t_divisibleby(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                          struct tv *out)
{
    (void)raw;
    return remainder_is(ev, v, a[0], 0, out);
}

static bool t_eq(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                 struct tv *out)
{
    bool b;

    (void)raw;
    return bt_tv_equal(ev, v, a[0], &b) && (*out = tv_bool(b), true);
}

static bool t_ne(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                 struct tv *out)
{
    bool b;

    (void)raw;
    return bt_tv_equal(ev, v, a[0], &b) && (*out = tv_bool(!b), true);
}

/* Identity, which for the values here is equality of the same type; containers are equal only to
 * themselves. */
static bool t_sameas(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                     struct tv *out)
{
    bool b = v.type == a[0].type && v.type == TV_LIST ? v.list == a[0].list : false;

    (void)raw;
    if (v.type == TV_DICT && a[0].type == TV_DICT) {
        b = v.dict == a[0].dict;
    } else if (v.type == a[0].type && v.type != TV_LIST && !bt_tv_equal(ev, v, a[0], &b)) {
        return false;
    }
    *out = tv_bool(b);
    return true;
}

static bool t_lt(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                 struct tv *out)
{
    bool b;

    (void)raw;
    return bt_tv_less(ev, v, a[0], &b) && (*out = tv_bool(b), true);
}

static bool t_gt(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                 struct tv *out)
{
    bool b;

    (void)raw;
    return bt_tv_less(ev, a[0], v, &b) && (*out = tv_bool(b), true);
}

static bool t_le(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                 struct tv *out)
{
    bool less, same;

    (void)raw;
    return bt_tv_less(ev, v, a[0], &less) && bt_tv_equal(ev, v, a[0], &same) &&
           (*out = tv_bool(less || same), true);
}

static bool t_ge(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                 struct tv *out)
{
    bool less, same;

    (void)raw;
    return bt_tv_less(ev, a[0], v, &less) && bt_tv_equal(ev, v, a[0], &same) &&
           (*out = tv_bool(less || same), true);
}

static bool t_in(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                 struct tv *out)
{
    bool b;

    (void)raw;
    return bt_tev_contains(ev, v, a[0], &b) && (*out = tv_bool(b), true);
}

static const struct tfunc tests[] = {
    {"!=", t_ne, "other", 1},
    {"<", t_lt, "other", 1},
    {"<=", t_le, "other", 1},
    {"==", t_eq, "other", 1},
    {">", t_gt, "other", 1},
    {">=", t_ge, "other", 1},
    {"boolean", t_boolean, "", 0},
    {"callable", t_callable, "", 0},
    {"defined", t_defined, "", 0},
    {"divisibleby", t_divisibleby, "num", 1},
    {"eq", t_eq, "other", 1},
    {"equalto", t_eq, "other", 1},
    {"escaped", t_escaped, "", 0},
    {"even", t_even, "", 0},
    {"false", t_false, "", 0},
    {"filter", t_filter, "", 0},
    {"float", t_float, "", 0},
    {"ge", t_ge, "other", 1},
    {"greaterthan", t_gt, "other", 1},
    {"gt", t_gt, "other", 1},
    {"in", t_in, "seq", 1},
    {"integer", t_integer, "", 0},
    {"iterable", t_iterable, "", 0},
    {"le", t_le, "other", 1},
    {"lessthan", t_lt, "other", 1},
    {"lower", t_lower, "", 0},
    {"lt", t_lt, "other", 1},
    {"mapping", t_mapping, "", 0},
    {"ne", t_ne, "other", 1},
    {"none", t_none, "", 0},
    {"number", t_number, "", 0},
    {"odd", t_odd, "", 0},
    {"sameas", t_sameas, "other", 1},
    {"sequence", t_sequence, "", 0},
    {"string", t_string, "", 0},
    {"test", t_test, "", 0},
    {"true", t_true, "", 0},
    {"undefined", t_undefined, "", 0},
    {"upper", t_upper, "", 0},
};

static const struct tfunc filters[] = {
    {"abs", f_abs, "", 0},
    {"attr", f_attr, "name", 1},
    {"capitalize", f_capitalize, "", 0},
    {"center", f_center, "width", 0},
    {"d", f_default, "default_value,boolean", 0},
    {"default", f_default, "default_value,boolean", 0},
    {"e", f_escape, "", 0},
    {"escape", f_escape, "", 0},
    {"float", f_float, "default", 0},
    {"forceescape", f_escape, "", 0},
    {"format", f_format, NULL, 0},
    {"indent", f_indent, "width,first,blank", 0},
    {"int", f_int, "default,base", 0},
    {"length", f_length, "", 0},
    {"lower", f_lower, "", 0},
    {"replace", f_replace, "old,new,count", 2},
    {"round", f_round, "precision,method", 0},
    {"safe", f_safe, "", 0},
    {"string", f_string, "", 0},
    {"title", f_title, "", 0},
    {"tojson", f_tojson, "ensure_ascii,indent,separators,sort_keys", 0},
    {"trim", f_trim, "chars", 0},
    {"upper", f_upper, "", 0},
    {"wordcount", f_wordcount, "", 0},
};

static const struct tfunc *in_table(const struct tfunc *t, size_t count, const char *name, size_t n)
{
    for (size_t i = 0; i < count; i++) {
        if (strlen(t[i].name) == n && memcmp(t[i].name, name, n) == 0) {
            return &t[i];
        }
    }
    return NULL;
}

const struct tfunc *bt_tfilter_find(const char *name, size_t n)
{
    const struct tfunc *f;

    if (n == 5 && memcmp(name, "count", 5) == 0) {
        return bt_tfilter_find("length", 6);
    }
    f = in_table(filters, sizeof filters / sizeof filters[0], name, n);
    return f != NULL ? f : bt_tlistfilter_find(name, n);
}

const struct tfunc *bt_ttest_find(const char *name, size_t n)
{
    return in_table(tests, sizeof tests / sizeof tests[0], name, n);
}
