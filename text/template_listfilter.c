/* Filters of chat templates that take or give sequences. */

#include "text/template_int.h"

#include <string.h>

#define UNUSED_ARGS ((void)a, (void)raw)

static bool new_list(struct tev *ev, enum list_kind kind, uint32_t cap, struct tlist **l,
                     struct tv *out)
{
    if (!bt_tlist_new(ev, cap, l)) {
        return false;
    }
    *out = tv_list(kind, *l);
    return true;
}

static bool f_list(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                   struct tv *out)
{
    struct tlist *l;

    UNUSED_ARGS;
    if (!bt_tev_items(ev, v, &l)) {
        return false;
    }
    *out = tv_list(LIST_LIST, l); /* lists never change, so the items may be shared */
    return true;
}

static bool f_first(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    struct tlist *l;

    UNUSED_ARGS;
    if (v.type == TV_LIST && v.kind == LIST_ITER) {
        l = v.list;
        *out = l->pos < l->n ? l->items[l->pos++] : tv_undef(UNDEF_OTHER, "", 0);
        return true;
    }
    if (v.type == TV_STR) {
        *out = v.n > 0 ? tv_str(v.s, bt_tstr_offset(v.s, v.n, 1)) : tv_undef(UNDEF_OTHER, "", 0);
        return true;
    }
    if (!bt_tev_items(ev, v, &l)) {
        return false;
    }
    *out = l->n > 0 ? l->items[0] : tv_undef(UNDEF_OTHER, "", 0);
    return true;
}

static bool f_last(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                   struct tv *out)
{
    struct tlist *l;

    UNUSED_ARGS;
    if (v.type == TV_LIST && v.kind == LIST_ITER) {
        return bt_tev_fail(ev, "last: an iterator has no last element; make it a list first");
    }
    if (!bt_tev_items(ev, v, &l)) {
        return false;
    }
    *out = l->n > 0 ? l->items[l->n - 1] : tv_undef(UNDEF_OTHER, "", 0);
    return true;
}

static bool f_reverse(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                      struct tv *out)
{
    struct tv none = tv_none();
    struct tlist *l, *r;

    UNUSED_ARGS;
    if (v.type == TV_STR) {
        return bt_tev_slice(ev, v, none, none, tv_int(-1), out);
    }
    if (!bt_tev_items(ev, v, &l) || !new_list(ev, LIST_ITER, l->n, &r, out)) {
        return false;
    }
    for (uint32_t i = l->n; i > 0; i--) {
        r->items[r->n++] = l->items[i - 1];
    }
    return bt_tev_steps(ev, l->n / 4);
}

static bool f_join(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                   struct tv *out)
{
    struct tv sep = tv_str("", 0), ignored;
    struct tlist *l, *picked;

    (void)raw;
    if ((!tv_missing(a[0]) && !bt_tv_to_str(ev, a[0], &sep)) || !bt_tev_items(ev, v, &l)) {
        return false;
    }
    if (!tv_missing(a[1]) && a[1].type != TV_NONE) {
        if (!new_list(ev, LIST_LIST, l->n, &picked, &ignored)) {
            return false;
        }
        for (uint32_t i = 0; i < l->n; i++) {
            if (!bt_tev_getpath(ev, l->items[i], a[1], &picked->items[picked->n++])) {
                return false;
            }
        }
        l = picked;
    }
    return bt_tstr_join(ev, sep, l, true, out);
}

static bool f_items(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    bool unsafe;
    struct targs none = {0};
    struct tlist *l;

    UNUSED_ARGS;
    if (v.type == TV_UNDEF) {
        return new_list(ev, LIST_ITER, 0, &l, out);
    }
    if (v.type != TV_DICT) {
        return bt_tev_fail(ev, "items: expected a mapping, got %s", bt_tv_type_name(v));
    }
    if (!bt_tev_call_func(ev, bt_tmethod_find(v, "items", 5, &unsafe), v, &none, out)) {
        return false;
    }
    out->kind = LIST_ITER;
    return true;
}

/* ---- order ---- */

static bool sort_key(struct tev *ev, struct tv item, struct tv attr, bool fold, struct tv *key)
{
    const char *comma = attr.type == TV_STR ? memchr(attr.s, ',', attr.n) : NULL;
    struct tlist *l;

    if (comma == NULL) {
        return bt_tev_getpath(ev, item, attr, key) &&
               (!fold || key->type != TV_STR || bt_tstr_case(ev, *key, CASE_LOWER, key));
    }
    if (!new_list(ev, LIST_TUPLE, 2, &l, key)) {
        return false;
    }
    while (attr.n > 0 || comma != NULL) { /* several attributes compare as a tuple */
        size_t n = comma != NULL ? (size_t)(comma - attr.s) : attr.n;
        struct tv one;

        if (!sort_key(ev, item, tv_str(attr.s, n), fold, &one) || !bt_tlist_push(ev, l, one)) {
            return false;
        }
        if (comma == NULL) {
            break;
        }
        attr = tv_str(comma + 1, attr.n - n - 1);
        comma = memchr(attr.s, ',', attr.n);
    }
    return true;
}

struct keyed {
    struct tv key, item;
};

/* Does b have to come before a? */
static bool out_of_order(struct tev *ev, const struct keyed *a, const struct keyed *b, bool reverse,
                         bool *out)
{
    return reverse ? bt_tv_less(ev, a->key, b->key, out) : bt_tv_less(ev, b->key, a->key, out);
}

/* Stable merge sort, bottom up. */
static bool sort_keyed(struct tev *ev, struct keyed *k, uint32_t n, bool reverse)
{
    struct keyed *from = k, *to = bt_tev_alloc(ev, (size_t)n * sizeof *to), *swap;

    if (to == NULL) {
        return false;
    }
    for (uint32_t width = 1; width < n; width *= 2) {
        for (uint32_t lo = 0; lo < n; lo += 2 * width) {
            uint32_t i = lo, mid = lo + width < n ? lo + width : n, j = mid,
                     hi = mid + width < n ? mid + width : n;

            for (uint32_t at = lo; at < hi; at++) {
                bool later = false;

                if (i < mid && j < hi && !out_of_order(ev, &from[i], &from[j], reverse, &later)) {
                    return false;
                }
                to[at] = i < mid && (j >= hi || !later) ? from[i++] : from[j++];
            }
        }
        swap = from;
        from = to;
        to = swap;
    }
    if (from != k) {
        memcpy(k, from, n * sizeof *k);
    }
    return true;
}

static bool sort_items(struct tev *ev, const struct tlist *l, struct tv attr, bool fold,
                       bool reverse, struct tv *out)
{
    struct keyed *k = bt_tev_alloc(ev, (size_t)l->n * sizeof *k);
    struct tlist *sorted;

    if (k == NULL || !new_list(ev, LIST_LIST, l->n, &sorted, out)) {
        return false;
    }
    for (uint32_t i = 0; i < l->n; i++) {
        k[i].item = l->items[i];
        if (!sort_key(ev, l->items[i], attr, fold, &k[i].key)) {
            return false;
        }
    }
    if (!sort_keyed(ev, k, l->n, reverse)) {
        return false;
    }
    for (uint32_t i = 0; i < l->n; i++) {
        sorted->items[sorted->n++] = k[i].item;
    }
    return true;
}

static bool f_sort(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                   struct tv *out)
{
    struct tlist *l;

    (void)raw;
    return bt_tev_items(ev, v, &l) &&
           sort_items(ev, l, a[2], !bt_tv_truth(a[1]), bt_tv_truth(a[0]), out);
}

static bool f_dictsort(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                       struct tv *out)
{
    bool by_value = tv_is(a[1], "value");

    if (!tv_missing(a[1]) && !by_value && !tv_is(a[1], "key")) {
        return bt_tev_fail(ev, "dictsort: by is \"key\" or \"value\"");
    }
    if (v.type != TV_DICT) {
        return v.type == TV_UNDEF ? bt_tev_undefined_error(ev, v)
                                  : bt_tev_fail(ev, "dictsort: not a mapping");
    }
    return f_items(ev, v, a, raw, out) &&
           sort_items(ev, out->list, tv_int(by_value), !bt_tv_truth(a[0]), bt_tv_truth(a[2]), out);
}

static bool f_unique(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                     struct tv *out)
{
    struct tlist *l, *kept;
    struct tdict *seen;
    struct tv key;

    (void)raw;
    if (!bt_tev_items(ev, v, &l) || !new_list(ev, LIST_ITER, l->n, &kept, out) ||
        !bt_tdict_new(ev, 0, &seen)) {
        return false;
    }
    for (uint32_t i = 0; i < l->n; i++) {
        uint32_t before = seen->n;

        if (!sort_key(ev, l->items[i], a[1], !bt_tv_truth(a[0]), &key) ||
            !bt_tdict_put(ev, seen, key, tv_none())) {
            return false;
        }
        if (seen->n > before) {
            kept->items[kept->n++] = l->items[i];
        }
    }
    return true;
}

static bool extreme(struct tev *ev, struct tv v, const struct tv *a, bool max, struct tv *out)
{
    struct tlist *l;
    struct tv best = {0}, key;
    bool less;

    if (!bt_tev_items(ev, v, &l)) {
        return false;
    }
    *out = tv_undef(UNDEF_OTHER, "", 0);
    for (uint32_t i = 0; i < l->n; i++) {
        if (!sort_key(ev, l->items[i], a[1], !bt_tv_truth(a[0]), &key)) {
            return false;
        }
        if (i > 0 && !(max ? bt_tv_less(ev, best, key, &less) : bt_tv_less(ev, key, best, &less))) {
            return false;
        }
        if (i == 0 || less) {
            best = key;
            *out = l->items[i];
        }
    }
    return true;
}

static bool f_min(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                  struct tv *out)
{
    (void)raw;
    return extreme(ev, v, a, false, out);
}

static bool f_max(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                  struct tv *out)
{
    (void)raw;
    return extreme(ev, v, a, true, out);
}

static bool f_sum(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                  struct tv *out)
{
    struct tlist *l;
    struct tv item;

    (void)raw;
    if (!bt_tev_items(ev, v, &l)) {
        return false;
    }
    *out = tv_missing(a[1]) ? tv_int(0) : a[1];
    if (out->type == TV_STR) {
        return bt_tev_fail(ev, "sum: strings are joined, not summed");
    }
    for (uint32_t i = 0; i < l->n; i++) {
        if (!bt_tev_getpath(ev, l->items[i], a[0], &item) ||
            !bt_tev_binary(ev, '+', *out, item, out)) {
            return false;
        }
    }
    return true;
}

/* ---- selection ---- */

static bool f_map(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                  struct tv *out)
{
    struct tv attr = tv_undef(UNDEF_OTHER, "", 0), dflt = tv_none();
    const struct tfunc *f = NULL;
    struct targs rest = *raw;
    struct tlist *l, *mapped;

    (void)a;
    if (!bt_tv_truth(v)) { /* nothing is not looked at, whatever its type */
        return new_list(ev, LIST_ITER, 0, &l, out);
    }
    if (raw->n_pos > 0) {
        f = raw->pos[0].type == TV_STR ? bt_tfilter_find(raw->pos[0].s, raw->pos[0].n) : NULL;
        if (f == NULL) {
            return bt_tev_fail(ev, "map: there is no such filter");
        }
        rest.pos++;
        rest.n_pos--;
    }
    for (uint32_t i = 0; f == NULL && i < raw->n_kw; i++) {
        struct tv name = tv_str(raw->kw[i].name, raw->kw[i].len);

        if (tv_is(name, "attribute")) {
            attr = raw->kw[i].value;
        } else if (tv_is(name, "default")) {
            dflt = raw->kw[i].value;
        } else {
            return bt_tev_fail(ev, "map: unexpected argument '%.*s'",
                               (int)(name.n < 60 ? name.n : 60), name.s);
        }
    }
    if (f == NULL && attr.type == TV_UNDEF) {
        return bt_tev_fail(ev, "map: needs a filter or attribute=");
    }
    if (!bt_tev_items(ev, v, &l) || !new_list(ev, LIST_ITER, l->n, &mapped, out)) {
        return false;
    }
    for (uint32_t i = 0; i < l->n; i++) {
        struct tv item;

        if (!(f != NULL ? bt_tev_call_func(ev, f, l->items[i], &rest, &item)
                        : bt_tev_getpath(ev, l->items[i], attr, &item))) {
            return false;
        }
        if (f == NULL && item.type == TV_UNDEF && dflt.type != TV_NONE) {
            item = dflt;
        }
        mapped->items[mapped->n++] = item;
    }
    return true;
}

/* select, reject, selectattr, rejectattr: [attribute,] [test, arguments …] */
static bool choose(struct tev *ev, struct tv v, const struct targs *raw, bool by_attr, bool keep,
                   struct tv *out)
{
    struct tv attr = tv_none(), result;
    const struct tfunc *test = NULL;
    struct targs rest = *raw;
    struct tlist *l, *kept;

    if (!bt_tv_truth(v)) {
        return new_list(ev, LIST_ITER, 0, &l, out);
    }
    if (by_attr) {
        if (rest.n_pos == 0) {
            return bt_tev_fail(ev, "missing attribute name");
        }
        attr = rest.pos[0];
        rest.pos++;
        rest.n_pos--;
    }
    if (rest.n_pos > 0) {
        test = rest.pos[0].type == TV_STR ? bt_ttest_find(rest.pos[0].s, rest.pos[0].n) : NULL;
        if (test == NULL) {
            return bt_tev_fail(ev, "there is no such test");
        }
        rest.pos++;
        rest.n_pos--;
    }
    if (!bt_tev_items(ev, v, &l) || !new_list(ev, LIST_ITER, l->n, &kept, out)) {
        return false;
    }
    for (uint32_t i = 0; i < l->n; i++) {
        if (!bt_tev_getpath(ev, l->items[i], attr, &result) ||
            (test != NULL && !bt_tev_call_func(ev, test, result, &rest, &result)) ||
            !bt_tev_steps(ev, 1)) {
            return false;
        }
        if (bt_tv_truth(result) == keep) {
            kept->items[kept->n++] = l->items[i];
        }
    }
    return true;
}

static bool f_select(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                     struct tv *out)
{
    (void)a;
    return choose(ev, v, raw, false, true, out);
}

static bool f_reject(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                     struct tv *out)
{
    (void)a;
    return choose(ev, v, raw, false, false, out);
}

static bool f_selectattr(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                         struct tv *out)
{
    (void)a;
    return choose(ev, v, raw, true, true, out);
}

static bool f_rejectattr(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                         struct tv *out)
{
    (void)a;
    return choose(ev, v, raw, true, false, out);
}

static bool f_batch(struct tev *ev, struct tv v, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    struct tlist *l, *rows, *row = NULL;
    struct tv row_value;

    (void)raw;
    if (a[0].type != TV_INT || a[0].i < 1 || a[0].i > 100000) {
        return bt_tev_fail(ev, "batch: a row has 1 to 100000 items");
    }
    if (!bt_tev_items(ev, v, &l) || !new_list(ev, LIST_ITER, 0, &rows, out)) {
        return false;
    }
    for (uint32_t i = 0; i < l->n; i++) {
        if (i % (uint32_t)a[0].i == 0 && (!new_list(ev, LIST_LIST, 0, &row, &row_value) ||
                                          !bt_tlist_push(ev, rows, row_value))) {
            return false;
        }
        if (!bt_tlist_push(ev, row, l->items[i])) {
            return false;
        }
    }
    while (row != NULL && !tv_missing(a[1]) && a[1].type != TV_NONE && row->n < a[0].i) {
        if (!bt_tlist_push(ev, row, a[1])) {
            return false;
        }
    }
    return true;
}

static const struct tfunc filters[] = {
    {"batch", f_batch, "linecount,fill_with", 1},
    {"dictsort", f_dictsort, "case_sensitive,by,reverse", 0},
    {"first", f_first, "", 0},
    {"items", f_items, "", 0},
    {"join", f_join, "d,attribute", 0},
    {"last", f_last, "", 0},
    {"list", f_list, "", 0},
    {"map", f_map, NULL, 0},
    {"max", f_max, "case_sensitive,attribute", 0},
    {"min", f_min, "case_sensitive,attribute", 0},
    {"reject", f_reject, NULL, 0},
    {"rejectattr", f_rejectattr, NULL, 0},
    {"reverse", f_reverse, "", 0},
    {"select", f_select, NULL, 0},
    {"selectattr", f_selectattr, NULL, 0},
    {"sort", f_sort, "reverse,case_sensitive,attribute", 0},
    {"sum", f_sum, "attribute,start", 0},
    {"unique", f_unique, "case_sensitive,attribute", 0},
};

const struct tfunc *bt_tlistfilter_find(const char *name, size_t n)
{
    for (size_t i = 0; i < sizeof filters / sizeof filters[0]; i++) {
        if (strlen(filters[i].name) == n && memcmp(filters[i].name, name, n) == 0) {
            return &filters[i];
        }
    }
    return NULL;
}
