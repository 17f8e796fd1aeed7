/* Values of chat templates as text: str() and repr() as Python writes them, JSON in both
 * directions. */

#include "text/template_int.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"

bool bt_tev_take(struct tev *ev, struct bt_buf *b, struct tv *out)
{
    char *copy = NULL;
    bool ok = !b->failed;

    if (!ok) {
        (void)bt_tev_nomem(ev);
    } else {
        copy = bt_tev_alloc(ev, b->len);
        ok = copy != NULL && bt_tev_steps(ev, b->len / 64);
    }
    if (ok) {
        if (b->len > 0) {
            memcpy(copy, b->data, b->len);
        }
        *out = tv_str(copy, b->len);
    }
    bt_buf_fini(b);
    return ok;
}

void bt_tv_print_float(struct bt_buf *b, double f)
{
    char digits[40], *e;
    int precision = 0, exp10, n;

    if (isnan(f) || isinf(f)) {
        bt_buf_adds(b, isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
        return;
    }
    do { /* the shortest digits that read back as the same number */
        snprintf(digits, sizeof digits, "%.*e", precision, f);
    } while (strtod(digits, NULL) != f && ++precision < 17);
    e = strchr(digits, 'e');
    exp10 = (int)strtol(e + 1, NULL, 10);
    if (exp10 < -4 || exp10 >= 16) {
        *e = '\0';
        bt_buf_addf(b, "%se%c%02d", digits, exp10 < 0 ? '-' : '+', abs(exp10));
        return;
    }
    n = precision - exp10;
    bt_buf_addf(b, "%.*f", n > 1 ? n : 1, f);
}

/* Like Python: single quotes unless the text has only single ones inside. */
static void print_quoted(struct bt_buf *b, const char *s, size_t n)
{
    bool one = n > 0 && memchr(s, '\'', n) != NULL, two = n > 0 && memchr(s, '"', n) != NULL;
    char quote = one && !two ? '"' : '\'';
    uint32_t cp;

    bt_buf_addc(b, quote);
    for (size_t i = 0; i < n;) {
        unsigned len = bt_utf8_decode(s + i, n - i, &cp);

        len += len == 0;
        if (s[i] == quote || s[i] == '\\') {
            bt_buf_addc(b, '\\');
            bt_buf_addc(b, s[i]);
        } else if (s[i] == '\n' || s[i] == '\r' || s[i] == '\t') {
            bt_buf_adds(b, s[i] == '\n' ? "\\n" : s[i] == '\r' ? "\\r" : "\\t");
        } else if (bt_tchar_printable(cp)) {
            bt_buf_add(b, s + i, len);
        } else if (cp < 0x100) {
            bt_buf_addf(b, "\\x%02x", cp);
        } else {
            bt_buf_addf(b, cp < 0x10000 ? "\\u%04x" : "\\U%08x", cp);
        }
        i += len;
    }
    bt_buf_addc(b, quote);
}

static bool print_list(struct tev *ev, struct bt_buf *b, struct tv v, uint32_t depth)
{
    const struct tlist *l = v.list;
    bool tuple = v.kind == LIST_TUPLE;

    bt_buf_addc(b, tuple ? '(' : '[');
    for (uint32_t i = 0; i < l->n; i++) {
        if (i > 0) {
            bt_buf_adds(b, ", ");
        }
        if (!bt_tv_print(ev, b, l->items[i], true, depth + 1)) {
            return false;
        }
    }
    bt_buf_adds(b, tuple ? (l->n == 1 ? ",)" : ")") : "]");
    return true;
}

static bool print_dict(struct tev *ev, struct bt_buf *b, const struct tdict *d, uint32_t depth)
{
    bt_buf_addc(b, '{');
    for (uint32_t i = 0; i < d->n; i++) {
        if (i > 0) {
            bt_buf_adds(b, ", ");
        }
        if (!bt_tv_print(ev, b, d->e[i].key, true, depth + 1)) {
            return false;
        }
        bt_buf_adds(b, ": ");
        if (!bt_tv_print(ev, b, d->e[i].value, true, depth + 1)) {
            return false;
        }
    }
    bt_buf_addc(b, '}');
    return true;
}

bool bt_tv_print(struct tev *ev, struct bt_buf *b, struct tv v, bool repr, uint32_t depth)
{
    if (depth > BT_TEMPLATE_DEPTH_MAX) {
        return bt_tev_fail(ev, "value nested too deeply");
    }
    if (!bt_tev_steps(ev, 1 + (v.type == TV_STR ? v.n / 64 : 0))) {
        return false;
    }
    if (b->len > ev->out_max) {
        return bt_tev_fail(ev, "text longer than %zu bytes", ev->out_max);
    }
    switch ((enum tv_type)v.type) {
    case TV_UNDEF:
        bt_buf_adds(b, repr ? "Undefined" : "");
        break;
    case TV_NONE:
        bt_buf_adds(b, "None");
        break;
    case TV_BOOL:
        bt_buf_adds(b, v.b ? "True" : "False");
        break;
    case TV_INT:
        bt_buf_addf(b, "%lld", (long long)v.i);
        break;
    case TV_FLOAT:
        bt_tv_print_float(b, v.f);
        break;
    case TV_STR:
        if (repr) {
            print_quoted(b, v.s, v.n);
        } else {
            bt_buf_add(b, v.s, v.n);
        }
        break;
    case TV_LIST:
        if (v.kind <= LIST_TUPLE) {
            return print_list(ev, b, v, depth);
        }
        return bt_tev_fail(ev, "a %s has no text form here", bt_tv_type_name(v));
    case TV_DICT:
        return print_dict(ev, b, v.dict, depth);
    default:
        return bt_tev_fail(ev, "a %s has no text form here", bt_tv_type_name(v));
    }
    return !b->failed || bt_tev_nomem(ev);
}

bool bt_tv_to_str(struct tev *ev, struct tv v, struct tv *out)
{
    struct bt_buf b = {0};

    if (v.type == TV_STR) {
        *out = v;
        return true;
    }
    if (!bt_tv_print(ev, &b, v, false, 0)) {
        bt_buf_fini(&b);
        return false;
    }
    return bt_tev_take(ev, &b, out);
}

/* ---- JSON ---- */

bool bt_tev_from_json(struct tev *ev, const json_t *j, uint32_t depth, struct tv *out)
{
    if (depth > BT_TEMPLATE_DEPTH_MAX) {
        return bt_tev_fail(ev, "JSON input nested too deeply");
    }
    if (json_is_object(j)) {
        struct tdict *d;
        void *it;

        if (!bt_tdict_new(ev, (uint32_t)json_object_size(j), &d)) {
            return false;
        }
        for (it = json_object_iter((json_t *)(uintptr_t)j); it != NULL;
             it = json_object_iter_next((json_t *)(uintptr_t)j, it)) {
            struct tentry *e = &d->e[d->n++];

            e->key = tv_str(json_object_iter_key(it), strlen(json_object_iter_key(it)));
            if (!bt_tev_from_json(ev, json_object_iter_value(it), depth + 1, &e->value)) {
                return false;
            }
        }
        *out = tv_dict(d);
    } else if (json_is_array(j)) {
        struct tlist *l;

        if (!bt_tlist_new(ev, (uint32_t)json_array_size(j), &l)) {
            return false;
        }
        for (size_t i = 0; i < json_array_size(j); i++) {
            if (!bt_tev_from_json(ev, json_array_get(j, i), depth + 1, &l->items[l->n++])) {
                return false;
            }
        }
        *out = tv_list(LIST_LIST, l);
    } else if (json_is_string(j)) {
        *out = tv_str(json_string_value(j), json_string_length(j));
    } else if (json_is_integer(j)) {
        *out = tv_int(json_integer_value(j));
    } else if (json_is_real(j)) {
        *out = tv_float(json_real_value(j));
    } else {
        *out = json_is_null(j) ? tv_none() : tv_bool(json_is_true(j));
    }
    return true;
}

struct json_style {
    struct bt_buf b;
    const char *indent; /* NULL: one line */
    size_t indent_len;
    struct tv item_sep, key_sep;
    bool ascii;
    bool sort_keys;
};

static void json_str(struct json_style *js, const char *s, size_t n)
{
    static const char from[] = "\"\\\n\r\t\f\b", to[] = "\"\\nrtfb";
    uint32_t cp;

    bt_buf_addc(&js->b, '"');
    for (size_t i = 0; i < n;) {
        const char *simple = s[i] != '\0' ? strchr(from, s[i]) : NULL;
        unsigned len = bt_utf8_decode(s + i, n - i, &cp);

        len += len == 0;
        if (simple != NULL) {
            bt_buf_addc(&js->b, '\\');
            bt_buf_addc(&js->b, to[simple - from]);
        } else if (cp >= 0x10000 && js->ascii) {
            bt_buf_addf(&js->b, "\\u%04x\\u%04x", 0xD800 + ((cp - 0x10000) >> 10),
                        0xDC00 + ((cp - 0x10000) & 0x3FF));
        } else if (cp < 0x20 || (cp > 0x7E && js->ascii && cp != 0x7F)) {
            bt_buf_addf(&js->b, "\\u%04x", cp);
        } else {
            bt_buf_add(&js->b, s + i, len);
        }
        i += len;
    }
    bt_buf_addc(&js->b, '"');
}

static void json_newline(struct json_style *js, uint32_t depth)
{
    if (js->indent == NULL) {
        return;
    }
    bt_buf_addc(&js->b, '\n');
    for (uint32_t i = 0; i < depth; i++) {
        bt_buf_add(&js->b, js->indent, js->indent_len);
    }
}

static bool json_value(struct tev *ev, struct json_style *js, struct tv v, uint32_t depth);

static bool json_list(struct tev *ev, struct json_style *js, const struct tlist *l, uint32_t depth)
{
    if (l->n == 0) {
        bt_buf_adds(&js->b, "[]");
        return true;
    }
    bt_buf_addc(&js->b, '[');
    for (uint32_t i = 0; i < l->n; i++) {
        if (i > 0) {
            bt_buf_add(&js->b, js->item_sep.s, js->item_sep.n);
        }
        json_newline(js, depth + 1);
        if (!json_value(ev, js, l->items[i], depth + 1)) {
            return false;
        }
    }
    json_newline(js, depth);
    bt_buf_addc(&js->b, ']');
    return true;
}

static bool json_key(struct tev *ev, struct json_style *js, struct tv key)
{
    if (key.type == TV_STR) {
        json_str(js, key.s, key.n);
        return true;
    }
    if (key.type > TV_FLOAT || key.type == TV_UNDEF) {
        return bt_tev_fail(ev, "a %s cannot be a key in JSON", bt_tv_type_name(key));
    }
    bt_buf_addc(&js->b, '"');
    if (!json_value(ev, js, key, 0)) {
        return false;
    }
    bt_buf_addc(&js->b, '"');
    return true;
}

/* A copy of d's entries ordered by key. Insertion sort: charged for, and objects are small. */
static bool sorted_dict(struct tev *ev, const struct tdict *d, struct tdict **out)
{
    if (!bt_tdict_new(ev, d->n, out)) {
        return false;
    }
    for (uint32_t i = 0; i < d->n; i++) {
        uint32_t at = (*out)->n++;
        bool less;

        for (; at > 0; at--) {
            if (!bt_tv_less(ev, d->e[i].key, (*out)->e[at - 1].key, &less)) {
                return false;
            }
            if (!less) {
                break;
            }
            (*out)->e[at] = (*out)->e[at - 1];
        }
        (*out)->e[at] = d->e[i];
    }
    return true;
}

static bool json_dict(struct tev *ev, struct json_style *js, struct tdict *d, uint32_t depth)
{
    if (d->n == 0) {
        bt_buf_adds(&js->b, "{}");
        return true;
    }
    if (js->sort_keys && !sorted_dict(ev, d, &d)) {
        return false;
    }
    bt_buf_addc(&js->b, '{');
    for (uint32_t i = 0; i < d->n; i++) {
        if (i > 0) {
            bt_buf_add(&js->b, js->item_sep.s, js->item_sep.n);
        }
        json_newline(js, depth + 1);
        if (!json_key(ev, js, d->e[i].key)) {
            return false;
        }
        bt_buf_add(&js->b, js->key_sep.s, js->key_sep.n);
        if (!json_value(ev, js, d->e[i].value, depth + 1)) {
            return false;
        }
    }
    json_newline(js, depth);
    bt_buf_addc(&js->b, '}');
    return true;
}

static bool json_value(struct tev *ev, struct json_style *js, struct tv v, uint32_t depth)
{
    if (depth > BT_TEMPLATE_DEPTH_MAX) {
        return bt_tev_fail(ev, "value nested too deeply");
    }
    if (js->b.len > ev->out_max) {
        return bt_tev_fail(ev, "text longer than %zu bytes", ev->out_max);
    }
    if (!bt_tev_steps(ev, 1 + (v.type == TV_STR ? v.n / 64 : 0))) {
        return false;
    }
    switch ((enum tv_type)v.type) {
    case TV_NONE:
        bt_buf_adds(&js->b, "null");
        break;
    case TV_BOOL:
        bt_buf_adds(&js->b, v.b ? "true" : "false");
        break;
    case TV_INT:
        bt_buf_addf(&js->b, "%lld", (long long)v.i);
        break;
    case TV_FLOAT:
        if (isnan(v.f) || isinf(v.f)) {
            bt_buf_adds(&js->b, isnan(v.f) ? "NaN" : v.f < 0 ? "-Infinity" : "Infinity");
        } else {
            bt_tv_print_float(&js->b, v.f);
        }
        break;
    case TV_STR:
        json_str(js, v.s, v.n);
        break;
    case TV_LIST:
        if (v.kind <= LIST_TUPLE) {
            return json_list(ev, js, v.list, depth);
        }
        return bt_tev_fail(ev, "a %s cannot be written as JSON", bt_tv_type_name(v));
    case TV_DICT:
        return json_dict(ev, js, v.dict, depth);
    default:
        return bt_tev_fail(ev, "a %s cannot be written as JSON", bt_tv_type_name(v));
    }
    return !js->b.failed || bt_tev_nomem(ev);
}

/* opts: ensure_ascii, indent, separators, sort_keys. */
bool bt_tev_to_json(struct tev *ev, struct tv v, const struct tv *opts, struct tv *out)
{
    static const char spaces[] = "                                ";
    struct json_style js = {.item_sep = tv_str(", ", 2), .key_sep = tv_str(": ", 2)};

    js.ascii = bt_tv_truth(opts[0]);
    js.sort_keys = bt_tv_truth(opts[3]);
    if (opts[1].type == TV_STR) {
        js.indent = opts[1].s;
        js.indent_len = opts[1].n;
    } else if (opts[1].type == TV_INT) {
        if (opts[1].i > (int64_t)sizeof spaces - 1) {
            return bt_tev_fail(ev, "tojson: indent of more than %zu", sizeof spaces - 1);
        }
        js.indent = spaces;
        js.indent_len = opts[1].i > 0 ? (size_t)opts[1].i : 0;
    }
    if (js.indent != NULL) {
        js.item_sep = tv_str(",", 1);
    }
    if (opts[2].type == TV_LIST && opts[2].kind <= LIST_TUPLE && opts[2].list->n == 2 &&
        opts[2].list->items[0].type == TV_STR && opts[2].list->items[1].type == TV_STR) {
        js.item_sep = opts[2].list->items[0];
        js.key_sep = opts[2].list->items[1];
    } else if (opts[2].type != TV_NONE && opts[2].type != TV_UNDEF) {
        return bt_tev_fail(ev, "tojson: separators are two strings");
    }
    if (!json_value(ev, &js, v, 0)) {
        bt_buf_fini(&js.b);
        return false;
    }
    return bt_tev_take(ev, &js.b, out);
}
