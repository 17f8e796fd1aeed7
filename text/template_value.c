/* Values of chat templates: lists, dicts, truth, equality, order, attributes and indexes with the
 * rules of Python and of Jinja's immutable sandbox. Everything lives in the render's arena. Knows
 * nothing of the syntax tree. */

#include "text/template_int.h"

#include <math.h>
#include <string.h>

#define DICT_SCAN_STEPS 16u /* entries compared per step charged */

bool tv_is(struct tv v, const char *s)
{
    return v.type == TV_STR && v.n == strlen(s) && memcmp(v.s, s, v.n) == 0;
}

void *bt_tev_alloc(struct tev *ev, size_t n)
{
    void *p;

    if (n >= UINT32_MAX || n + 16 > ev->arena.cap - ev->arena.used) {
        (void)bt_tev_fail(ev, "more than %zu bytes of memory needed", ev->arena.cap);
        return NULL;
    }
    p = bt_arena_alloc(&ev->arena, n);
    if (p == NULL) {
        (void)bt_tev_nomem(ev);
    }
    return p;
}

const char *bt_tv_type_name(struct tv v)
{
    static const char *const lists[] = {"list", "tuple", "range", "dict view", "iterator"};

    switch ((enum tv_type)v.type) {
    case TV_UNDEF:
        return "Undefined";
    case TV_NONE:
        return "None";
    case TV_BOOL:
        return "bool";
    case TV_INT:
        return "int";
    case TV_FLOAT:
        return "float";
    case TV_STR:
        return "str";
    case TV_LIST:
        return lists[v.kind];
    case TV_DICT:
        return "dict";
    case TV_NS:
        return "namespace";
    case TV_LOOP:
        return "loop";
    case TV_MACRO:
        return "macro";
    case TV_FUNC:
    case TV_METHOD:
        break;
    }
    return "function";
}

bool bt_tev_undefined_error(struct tev *ev, struct tv v)
{
    int n = (int)(v.n < 80 ? v.n : 80);

    switch ((enum undef_kind)v.kind) {
    case UNDEF_NAME:
        return bt_tev_fail(ev, "'%.*s' is undefined", n, v.s);
    case UNDEF_ATTR:
        return bt_tev_fail(ev, "there is no attribute or key '%.*s'", n, v.s);
    case UNDEF_UNSAFE:
        return bt_tev_fail(ev, "access to '%.*s' is not allowed: values cannot be changed", n, v.s);
    case UNDEF_PARAM:
        return bt_tev_fail(ev, "parameter '%.*s' was not given", n, v.s);
    case UNDEF_ITEM:
        return bt_tev_fail(ev, "there is no such element");
    case UNDEF_OTHER:
        break;
    }
    return bt_tev_fail(ev, "the value is undefined");
}

bool bt_tv_truth(struct tv v)
{
    switch ((enum tv_type)v.type) {
    case TV_UNDEF:
    case TV_NONE:
        return false;
    case TV_BOOL:
        return v.b;
    case TV_INT:
        return v.i != 0;
    case TV_FLOAT:
        return v.f != 0;
    case TV_STR:
        return v.n > 0;
    case TV_LIST:
        return v.kind == LIST_ITER || v.list->n > 0;
    case TV_DICT:
        return v.dict->n > 0;
    default:
        return true;
    }
}

static bool is_number(struct tv v)
{
    return v.type == TV_BOOL || v.type == TV_INT || v.type == TV_FLOAT;
}

static int64_t as_int(struct tv v)
{
    return v.type == TV_BOOL ? v.b : v.i;
}

static double as_float(struct tv v)
{
    return v.type == TV_FLOAT ? v.f : (double)as_int(v);
}

/* Equality of everything but containers. */
static bool equal_scalar(struct tv a, struct tv b)
{
    if (is_number(a) && is_number(b)) {
        return a.type == TV_FLOAT || b.type == TV_FLOAT ? as_float(a) == as_float(b)
                                                        : as_int(a) == as_int(b);
    }
    if (a.type != b.type) {
        return false;
    }
    switch ((enum tv_type)a.type) {
    case TV_UNDEF:
    case TV_NONE:
        return true;
    case TV_STR:
        return a.n == b.n && memcmp(a.s, b.s, a.n) == 0;
    case TV_METHOD:
        return a.m->fn == b.m->fn && equal_scalar(a.m->self, b.m->self);
    case TV_LIST:
        return a.list == b.list;
    case TV_DICT:
    case TV_NS:
        return a.dict == b.dict;
    default:
        return a.loop == b.loop; /* pointers of one union */
    }
}

static bool equal_deep(struct tev *ev, struct tv a, struct tv b, uint32_t depth, bool *out);

static bool equal_lists(struct tev *ev, const struct tlist *a, const struct tlist *b,
                        uint32_t depth, bool *out)
{
    *out = a->n == b->n;
    for (uint32_t i = 0; *out && i < a->n; i++) {
        if (!equal_deep(ev, a->items[i], b->items[i], depth, out)) {
            return false;
        }
    }
    return true;
}

static bool equal_dicts(struct tev *ev, const struct tdict *a, const struct tdict *b,
                        uint32_t depth, bool *out)
{
    *out = a->n == b->n;
    for (uint32_t i = 0; *out && i < a->n; i++) {
        struct tv *other = bt_tdict_find(b, a->e[i].key);

        if (other == NULL) {
            *out = false;
        } else if (!bt_tev_steps(ev, 1 + b->n / DICT_SCAN_STEPS) ||
                   !equal_deep(ev, a->e[i].value, *other, depth, out)) {
            return false;
        }
    }
    return true;
}

static bool equal_deep(struct tev *ev, struct tv a, struct tv b, uint32_t depth, bool *out)
{
    if (depth > BT_TEMPLATE_DEPTH_MAX) {
        return bt_tev_fail(ev, "value nested too deeply");
    }
    if (!bt_tev_steps(ev, 1 + (a.type == TV_STR ? a.n / 256 : 0))) {
        return false;
    }
    if (a.type == TV_LIST && b.type == TV_LIST && a.kind == b.kind && a.kind <= LIST_RANGE) {
        return equal_lists(ev, a.list, b.list, depth + 1, out);
    }
    if (a.type == TV_DICT && b.type == TV_DICT) {
        return equal_dicts(ev, a.dict, b.dict, depth + 1, out);
    }
    *out = equal_scalar(a, b);
    return true;
}

bool bt_tv_equal(struct tev *ev, struct tv a, struct tv b, bool *out)
{
    return equal_deep(ev, a, b, 0, out);
}

static bool less_deep(struct tev *ev, struct tv a, struct tv b, uint32_t depth, bool *out)
{
    bool same = false;

    if (depth > BT_TEMPLATE_DEPTH_MAX || !bt_tev_steps(ev, 1)) {
        return ev->failed ? false : bt_tev_fail(ev, "value nested too deeply");
    }
    if (a.type == TV_UNDEF || b.type == TV_UNDEF) {
        return bt_tev_undefined_error(ev, a.type == TV_UNDEF ? a : b);
    }
    if (is_number(a) && is_number(b)) {
        *out = a.type == TV_FLOAT || b.type == TV_FLOAT ? as_float(a) < as_float(b)
                                                        : as_int(a) < as_int(b);
        return true;
    }
    if (a.type == TV_STR && b.type == TV_STR) {
        int c = memcmp(a.s, b.s, a.n < b.n ? a.n : b.n);

        *out = c != 0 ? c < 0 : a.n < b.n; /* UTF-8 sorts as its code points do */
        return true;
    }
    if (a.type != TV_LIST || b.type != TV_LIST || a.kind != b.kind || a.kind > LIST_TUPLE) {
        return bt_tev_fail(ev, "'<' does not compare %s and %s", bt_tv_type_name(a),
                           bt_tv_type_name(b));
    }
    for (uint32_t i = 0; i < a.list->n && i < b.list->n; i++) {
        if (!equal_deep(ev, a.list->items[i], b.list->items[i], depth + 1, &same)) {
            return false;
        }
        if (!same) {
            return less_deep(ev, a.list->items[i], b.list->items[i], depth + 1, out);
        }
    }
    *out = a.list->n < b.list->n;
    return true;
}

bool bt_tv_less(struct tev *ev, struct tv a, struct tv b, bool *out)
{
    return less_deep(ev, a, b, 0, out);
}

bool bt_tv_hashable(struct tv v)
{
    if (v.type == TV_LIST && v.kind == LIST_TUPLE) {
        for (uint32_t i = 0; i < v.list->n; i++) {
            if (v.list->items[i].type == TV_LIST || v.list->items[i].type == TV_DICT) {
                return false;
            }
        }
        return true;
    }
    return !((v.type == TV_LIST && v.kind == LIST_LIST) || v.type == TV_DICT);
}

/* ---- lists and dicts ---- */

bool bt_tlist_new(struct tev *ev, uint32_t cap, struct tlist **out)
{
    struct tlist *l = bt_tev_alloc(ev, sizeof *l);

    if (l == NULL) {
        return false;
    }
    *l = (struct tlist){.cap = cap};
    if (cap > 0 && (l->items = bt_tev_alloc(ev, (size_t)cap * sizeof *l->items)) == NULL) {
        return false;
    }
    *out = l;
    return true;
}

bool bt_tlist_push(struct tev *ev, struct tlist *l, struct tv v)
{
    if (l->n == l->cap) {
        uint32_t cap = l->cap < 4 ? 4 : l->cap * 2;
        struct tv *items = bt_tev_alloc(ev, (size_t)cap * sizeof *items);

        if (items == NULL) {
            return false;
        }
        if (l->n > 0) {
            memcpy(items, l->items, l->n * sizeof *items);
        }
        l->items = items;
        l->cap = cap;
    }
    l->items[l->n++] = v;
    return true;
}

bool bt_tdict_new(struct tev *ev, uint32_t cap, struct tdict **out)
{
    struct tdict *d = bt_tev_alloc(ev, sizeof *d);

    if (d == NULL) {
        return false;
    }
    *d = (struct tdict){.cap = cap};
    if (cap > 0 && (d->e = bt_tev_alloc(ev, (size_t)cap * sizeof *d->e)) == NULL) {
        return false;
    }
    *out = d;
    return true;
}

static bool equal_key(struct tv a, struct tv b)
{
    if (a.type == TV_LIST && b.type == TV_LIST && a.kind == LIST_TUPLE && b.kind == LIST_TUPLE) {
        for (uint32_t i = 0; i < a.list->n && a.list->n == b.list->n; i++) {
            if (!equal_scalar(a.list->items[i], b.list->items[i])) {
                return false;
            }
        }
        return a.list->n == b.list->n;
    }
    return equal_scalar(a, b);
}

struct tv *bt_tdict_find(const struct tdict *d, struct tv key)
{
    for (uint32_t i = 0; i < d->n; i++) {
        if (equal_key(d->e[i].key, key)) {
            return &d->e[i].value;
        }
    }
    return NULL;
}

struct tv *bt_tdict_find_str(const struct tdict *d, const char *s, size_t n)
{
    return bt_tdict_find(d, tv_str(s, n));
}

bool bt_tdict_put(struct tev *ev, struct tdict *d, struct tv key, struct tv value)
{
    struct tv *old;

    if (!bt_tev_steps(ev, 1 + d->n / DICT_SCAN_STEPS)) {
        return false;
    }
    if (!bt_tv_hashable(key)) {
        return bt_tev_fail(ev, "a %s cannot be a key", bt_tv_type_name(key));
    }
    old = bt_tdict_find(d, key);
    if (old != NULL) {
        *old = value;
        return true;
    }
    if (d->n == d->cap) {
        uint32_t cap = d->cap < 4 ? 4 : d->cap * 2;
        struct tentry *e = bt_tev_alloc(ev, (size_t)cap * sizeof *e);

        if (e == NULL) {
            return false;
        }
        if (d->n > 0) {
            memcpy(e, d->e, d->n * sizeof *e);
        }
        d->e = e;
        d->cap = cap;
    }
    d->e[d->n++] = (struct tentry){.key = key, .value = value};
    return true;
}

static bool str_items(struct tev *ev, struct tv s, struct tlist **out)
{
    if (!bt_tlist_new(ev, bt_tstr_count(s.s, s.n), out)) {
        return false;
    }
    for (size_t i = 0, n; i < s.n; i += n) {
        n = bt_tstr_offset(s.s + i, s.n - i, 1);
        if (!bt_tlist_push(ev, *out, tv_str(s.s + i, n))) {
            return false;
        }
    }
    return bt_tev_steps(ev, s.n / 16);
}

static bool dict_keys(struct tev *ev, const struct tdict *d, struct tlist **out)
{
    if (!bt_tlist_new(ev, d->n, out)) {
        return false;
    }
    for (uint32_t i = 0; i < d->n; i++) {
        if (!bt_tlist_push(ev, *out, d->e[i].key)) {
            return false;
        }
    }
    return true;
}

bool bt_tev_items(struct tev *ev, struct tv v, struct tlist **out)
{
    switch ((enum tv_type)v.type) {
    case TV_UNDEF:
        return bt_tlist_new(ev, 0, out);
    case TV_STR:
        return str_items(ev, v, out);
    case TV_DICT:
        return dict_keys(ev, v.dict, out);
    case TV_LIST:
        if (v.kind != LIST_ITER) {
            *out = v.list;
            return true;
        }
        if (!bt_tlist_new(ev, 0, out)) {
            return false;
        }
        (*out)->items = v.list->items + v.list->pos;
        (*out)->n = (*out)->cap = v.list->n - v.list->pos;
        v.list->pos = v.list->n;
        return true;
    default:
        return bt_tev_fail(ev, "a %s cannot be iterated over", bt_tv_type_name(v));
    }
}

/* ---- attributes and indexes ---- */

static bool method_value(struct tev *ev, struct tv obj, const struct tfunc *fn, struct tv *out)
{
    struct tmethod *m = bt_tev_alloc(ev, sizeof *m);

    if (m == NULL) {
        return false;
    }
    *m = (struct tmethod){.self = obj, .fn = fn};
    *out = (struct tv){.type = TV_METHOD, .m = m};
    return true;
}

/* The object's own attribute; *found false when there is none. */
static bool own_attr(struct tev *ev, struct tv obj, const char *name, size_t n, bool *found,
                     struct tv *out)
{
    bool unsafe = false;
    const struct tfunc *fn = bt_tmethod_find(obj, name, n, &unsafe);

    *found = true;
    if (unsafe) {
        *out = tv_undef(UNDEF_UNSAFE, name, n);
        return true;
    }
    if (fn != NULL) {
        return method_value(ev, obj, fn, out);
    }
    if (obj.type == TV_NS) {
        struct tv *v = bt_tdict_find_str(obj.dict, name, n);

        *out = v != NULL ? *v : tv_undef(UNDEF_ATTR, name, n);
        return true;
    }
    if (obj.type == TV_LOOP) {
        return bt_tloop_attr(ev, obj.loop, name, n, out);
    }
    if (obj.type == TV_MACRO && n == 4 && memcmp(name, "name", 4) == 0) {
        *out = tv_str(obj.macro->node->name->s, obj.macro->node->name->n);
        return true;
    }
    *found = false;
    return true;
}

bool bt_tev_getattr(struct tev *ev, struct tv obj, const char *name, size_t n, struct tv *out)
{
    bool found;
    struct tv *v;

    if (obj.type == TV_UNDEF) {
        return bt_tev_undefined_error(ev, obj);
    }
    if (!own_attr(ev, obj, name, n, &found, out) || found) {
        return !ev->failed;
    }
    v = obj.type == TV_DICT ? bt_tdict_find_str(obj.dict, name, n) : NULL;
    *out = v != NULL ? *v : tv_undef(UNDEF_ATTR, name, n);
    return bt_tev_steps(ev, obj.type == TV_DICT ? obj.dict->n / DICT_SCAN_STEPS : 0);
}

static bool index_str(struct tev *ev, struct tv s, int64_t i, struct tv *out)
{
    uint32_t count = bt_tstr_count(s.s, s.n);

    i += i < 0 ? count : 0;
    if (i < 0 || i >= count) {
        *out = tv_undef(UNDEF_ITEM, "", 0);
        return true;
    }
    size_t at = bt_tstr_offset(s.s, s.n, (uint32_t)i);
    *out = tv_str(s.s + at, bt_tstr_offset(s.s + at, s.n - at, 1));
    return bt_tev_steps(ev, s.n / 64);
}

bool bt_tev_getitem(struct tev *ev, struct tv obj, struct tv key, struct tv *out)
{
    struct tv *v;
    bool found;

    if (obj.type == TV_UNDEF) {
        return bt_tev_undefined_error(ev, obj);
    }
    if (obj.type == TV_DICT) {
        v = bt_tv_hashable(key) ? bt_tdict_find(obj.dict, key) : NULL;
        if (!bt_tev_steps(ev, obj.dict->n / DICT_SCAN_STEPS)) {
            return false;
        }
        if (v != NULL) {
            *out = *v;
            return true;
        }
    }
    if (key.type == TV_INT || key.type == TV_BOOL) {
        int64_t i = as_int(key);

        if (obj.type == TV_STR) {
            return index_str(ev, obj, i, out);
        }
        if (obj.type == TV_LIST && obj.kind <= LIST_RANGE) {
            i += i < 0 ? obj.list->n : 0;
            *out = i >= 0 && i < obj.list->n ? obj.list->items[i] : tv_undef(UNDEF_ITEM, "", 0);
            return true;
        }
    }
    if (key.type == TV_STR) {
        if (!own_attr(ev, obj, key.s, key.n, &found, out)) {
            return false;
        }
        if (!found) {
            *out = tv_undef(UNDEF_ATTR, key.s, key.n);
        }
        return true;
    }
    *out = tv_undef(UNDEF_ITEM, "", 0);
    return true;
}

bool bt_tev_getpath(struct tev *ev, struct tv obj, struct tv path, struct tv *out)
{
    const char *s = path.s;
    size_t left = path.n;

    *out = obj;
    if (path.type == TV_NONE || tv_missing(path)) {
        return true;
    }
    if (path.type != TV_STR) {
        return bt_tev_getitem(ev, obj, path, out);
    }
    for (;;) {
        const char *dot = memchr(s, '.', left);
        size_t n = dot != NULL ? (size_t)(dot - s) : left;
        struct tv key = tv_str(s, n);
        int64_t i = 0;
        size_t d = 0;

        for (; d < n && d < 9 && s[d] >= '0' && s[d] <= '9'; d++) {
            i = i * 10 + (s[d] - '0');
        }
        if (n > 0 && d == n) {
            key = tv_int(i);
        }
        if (!bt_tev_getitem(ev, *out, key, out)) {
            return false;
        }
        if (dot == NULL) {
            return true;
        }
        s = dot + 1;
        left -= n + 1;
    }
}

/* A slice bound: none, or an integer clipped to [low, high] after counting negative ones from the
 * end. */
static bool slice_bound(struct tev *ev, struct tv v, int64_t n, int64_t low, int64_t high,
                        int64_t dflt, int64_t *out)
{
    if (v.type == TV_NONE) {
        *out = dflt;
        return true;
    }
    if (v.type != TV_INT && v.type != TV_BOOL) {
        return bt_tev_fail(ev, "slice bounds are integers, not %s", bt_tv_type_name(v));
    }
    *out = as_int(v);
    if (*out < 0) {
        *out = *out < -n ? low : *out + n;
    }
    *out = *out < low ? low : *out > high ? high : *out;
    return true;
}

static bool slice_list(struct tev *ev, struct tv obj, int64_t from, int64_t to, int64_t step,
                       struct tv *out)
{
    struct tlist *l;

    if (!bt_tlist_new(ev, 0, &l)) {
        return false;
    }
    *out = tv_list((enum list_kind)obj.kind, l);
    if (step == 1) {
        l->items = obj.list->items + (from < to ? from : 0);
        l->n = l->cap = from < to ? (uint32_t)(to - from) : 0;
        return true;
    }
    for (; step > 0 ? from < to : from > to; from += step) {
        if (!bt_tlist_push(ev, l, obj.list->items[from])) {
            return false;
        }
    }
    return bt_tev_steps(ev, l->n / 4);
}

static bool slice_str(struct tev *ev, struct tv obj, int64_t from, int64_t to, int64_t step,
                      struct tv *out)
{
    struct tlist *chars;
    struct tv list, empty = tv_str("", 0);

    if (!bt_tev_steps(ev, obj.n / 64)) {
        return false;
    }
    if (step == 1) {
        size_t a, b;

        if (from >= to) {
            *out = empty;
            return true;
        }
        a = bt_tstr_offset(obj.s, obj.n, (uint32_t)from);
        b = a + bt_tstr_offset(obj.s + a, obj.n - a, (uint32_t)(to - from));
        *out = tv_str(obj.s + a, b - a);
        return true;
    }
    return str_items(ev, obj, &chars) &&
           slice_list(ev, tv_list(LIST_LIST, chars), from, to, step, &list) &&
           bt_tstr_join(ev, empty, list.list, false, out);
}

bool bt_tev_slice(struct tev *ev, struct tv obj, struct tv start, struct tv stop, struct tv step,
                  struct tv *out)
{
    int64_t n, by = 1, from, to;

    if (obj.type == TV_UNDEF) {
        return bt_tev_undefined_error(ev, obj);
    }
    if (obj.type != TV_STR && !(obj.type == TV_LIST && obj.kind <= LIST_RANGE)) {
        return bt_tev_fail(ev, "a %s cannot be sliced", bt_tv_type_name(obj));
    }
    if (step.type != TV_NONE) {
        if ((step.type != TV_INT && step.type != TV_BOOL) || as_int(step) == 0) {
            return bt_tev_fail(ev, "the step of a slice is an integer other than 0");
        }
        by = as_int(step);
        by = by > INT32_MAX ? INT32_MAX : by < -INT32_MAX ? -INT32_MAX : by;
    }
    n = obj.type == TV_STR ? bt_tstr_count(obj.s, obj.n) : obj.list->n;
    if (!slice_bound(ev, start, n, by > 0 ? 0 : -1, by > 0 ? n : n - 1, by > 0 ? 0 : n - 1,
                     &from) ||
        !slice_bound(ev, stop, n, by > 0 ? 0 : -1, by > 0 ? n : n - 1, by > 0 ? n : -1, &to)) {
        return false;
    }
    return obj.type == TV_STR ? slice_str(ev, obj, from, to, by, out)
                              : slice_list(ev, obj, from, to, by, out);
}
