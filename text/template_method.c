/* Methods of dicts, lists and loops, and the global functions of chat templates. Methods that would
 * change a value are known by name and refused. */

#include "text/template_int.h"

#include <string.h>
#include <time.h>

#define RANGE_MAX 100000 /* as in the sandbox */

#define UNUSED_ARGS ((void)a, (void)raw)

bool bt_tev_want_str(struct tev *ev, struct tv v)
{
    if (v.type == TV_STR) {
        return true;
    }
    return v.type == TV_UNDEF ? bt_tev_undefined_error(ev, v)
                              : bt_tev_fail(ev, "expected a string, got %s", bt_tv_type_name(v));
}

bool bt_tev_want_int(struct tev *ev, struct tv v, int64_t dflt, int64_t *out)
{
    if (tv_missing(v) || v.type == TV_NONE) {
        *out = dflt;
        return true;
    }
    if (v.type != TV_INT && v.type != TV_BOOL) {
        return bt_tev_fail(ev, "expected an integer, got %s", bt_tv_type_name(v));
    }
    *out = v.type == TV_BOOL ? v.b : v.i;
    return true;
}

/* ---- dicts ---- */

static bool m_get(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                  struct tv *out)
{
    struct tv *v;

    (void)raw;
    if (!bt_tv_hashable(a[0])) {
        return bt_tev_fail(ev, "a %s cannot be a key", bt_tv_type_name(a[0]));
    }
    v = bt_tdict_find(self.dict, a[0]);
    *out = v != NULL ? *v : tv_missing(a[1]) ? tv_none() : a[1];
    return bt_tev_steps(ev, self.dict->n / 16);
}

enum dict_part { PART_KEYS, PART_VALUES, PART_ITEMS };

static bool dict_view(struct tev *ev, const struct tdict *d, enum dict_part part, struct tv *out)
{
    struct tlist *l, *pair;

    if (!bt_tlist_new(ev, d->n, &l) || !bt_tev_steps(ev, d->n)) {
        return false;
    }
    for (uint32_t i = 0; i < d->n; i++) {
        l->items[l->n] = part == PART_KEYS ? d->e[i].key : d->e[i].value;
        if (part == PART_ITEMS) {
            if (!bt_tlist_new(ev, 2, &pair)) {
                return false;
            }
            pair->n = 2;
            pair->items[0] = d->e[i].key;
            pair->items[1] = d->e[i].value;
            l->items[l->n] = tv_list(LIST_TUPLE, pair);
        }
        l->n++;
    }
    *out = tv_list(LIST_VIEW, l);
    return true;
}

static bool m_keys(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                   struct tv *out)
{
    UNUSED_ARGS;
    return dict_view(ev, self.dict, PART_KEYS, out);
}

static bool m_values(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                     struct tv *out)
{
    UNUSED_ARGS;
    return dict_view(ev, self.dict, PART_VALUES, out);
}

static bool m_items(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    UNUSED_ARGS;
    return dict_view(ev, self.dict, PART_ITEMS, out);
}

/* Values never change, so a copy is the value itself. */
static bool m_copy(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                   struct tv *out)
{
    (void)ev;
    UNUSED_ARGS;
    *out = self;
    return true;
}

static const struct tfunc dict_methods[] = {
    {"copy", m_copy, "", 0}, {"get", m_get, "key,default", 1}, {"items", m_items, "", 0},
    {"keys", m_keys, "", 0}, {"values", m_values, "", 0},      {NULL, NULL, NULL, 0},
};

/* ---- lists ---- */

static bool count_in(struct tev *ev, struct tv self, struct tv v, bool first_only, int64_t *out)
{
    int64_t count = 0;
    bool same;

    for (uint32_t i = 0; i < self.list->n; i++) {
        if (!bt_tv_equal(ev, self.list->items[i], v, &same)) {
            return false;
        }
        if (same && first_only) {
            *out = i;
            return true;
        }
        count += same;
    }
    *out = first_only ? -1 : count;
    return true;
}

static bool m_list_count(struct tev *ev, struct tv self, const struct tv *a,
                         const struct targs *raw, struct tv *out)
{
    (void)raw;
    *out = tv_int(0);
    return count_in(ev, self, a[0], false, &out->i);
}

static bool m_list_index(struct tev *ev, struct tv self, const struct tv *a,
                         const struct targs *raw, struct tv *out)
{
    (void)raw;
    *out = tv_int(0);
    return count_in(ev, self, a[0], true, &out->i) &&
           (out->i >= 0 || bt_tev_fail(ev, "the value is not in the list"));
}

static const struct tfunc list_methods[] = {
    {"copy", m_copy, "", 0},
    {"count", m_list_count, "value", 1},
    {"index", m_list_index, "value", 1},
    {NULL, NULL, NULL, 0},
};

static const char *const dict_unsafe[] = {"clear", "pop", "popitem", "setdefault", "update", NULL};
static const char *const list_unsafe[] = {"append", "clear",   "extend", "insert", "pop",
                                          "remove", "reverse", "sort",   NULL};

/* ---- loop ---- */

static bool m_cycle(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    (void)a;
    if (raw->n_pos == 0) {
        return bt_tev_fail(ev, "loop.cycle: no items to cycle through");
    }
    *out = raw->pos[self.loop->index0 % raw->n_pos];
    return true;
}

static bool m_changed(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                      struct tv *out)
{
    struct tloop *loop = self.loop;
    bool same = loop->changed_set && loop->n_changed == raw->n_pos;

    (void)a;
    for (uint32_t i = 0; same && i < raw->n_pos; i++) {
        if (!bt_tv_equal(ev, loop->changed[i], raw->pos[i], &same)) {
            return false;
        }
    }
    loop->changed_set = true;
    loop->changed = raw->pos;
    loop->n_changed = raw->n_pos;
    *out = tv_bool(!same);
    return true;
}

static const struct tfunc loop_methods[] = {
    {"changed", m_changed, NULL, 0},
    {"cycle", m_cycle, NULL, 0},
    {NULL, NULL, NULL, 0},
};

static const struct tfunc *in_table(const struct tfunc *t, const char *name, size_t n)
{
    for (; t->name != NULL; t++) {
        if (strlen(t->name) == n && memcmp(t->name, name, n) == 0) {
            return t;
        }
    }
    return NULL;
}

const struct tfunc *bt_tmethod_find(struct tv obj, const char *name, size_t n, bool *unsafe)
{
    const char *const *bad = obj.type == TV_DICT                            ? dict_unsafe
                             : obj.type == TV_LIST && obj.kind == LIST_LIST ? list_unsafe
                                                                            : NULL;

    for (; bad != NULL && *bad != NULL; bad++) {
        if (strlen(*bad) == n && memcmp(*bad, name, n) == 0) {
            *unsafe = true;
            return NULL;
        }
    }
    switch (obj.type) {
    case TV_STR:
        return in_table(bt_tstr_methods, name, n);
    case TV_DICT:
        return in_table(dict_methods, name, n);
    case TV_LIST:
        return obj.kind <= LIST_RANGE ? in_table(list_methods + (obj.kind != LIST_LIST), name, n)
                                      : NULL;
    case TV_LOOP:
        return in_table(loop_methods, name, n);
    default:
        return NULL;
    }
}

/* ---- global functions ---- */

static bool g_raise(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    struct tv msg;

    (void)self;
    (void)raw;
    (void)out;
    if (!bt_tv_to_str(ev, a[0], &msg)) {
        return false;
    }
    return bt_tev_fail(ev, "%.*s", (int)(msg.n < 400 ? msg.n : 400), msg.s);
}

static bool g_range(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                    struct tv *out)
{
    int64_t from = 0, to, step;
    uint64_t n = 0;
    struct tlist *l;

    (void)self;
    (void)raw;
    if (!bt_tev_want_int(ev, a[0], 0, &to) || !bt_tev_want_int(ev, a[2], 1, &step)) {
        return false;
    }
    if (!tv_missing(a[1])) {
        from = to;
        if (!bt_tev_want_int(ev, a[1], 0, &to)) {
            return false;
        }
    }
    if (step == 0) {
        return bt_tev_fail(ev, "range: the step is 0");
    }
    if (step > 0 ? from < to : from > to) {
        uint64_t span = step > 0 ? (uint64_t)to - (uint64_t)from : (uint64_t)from - (uint64_t)to;
        uint64_t by = step > 0 ? (uint64_t)step : 0 - (uint64_t)step;

        n = (span - 1) / by + 1;
    }
    if (n > RANGE_MAX) {
        return bt_tev_fail(ev, "range of more than %d elements", RANGE_MAX);
    }
    if (!bt_tev_steps(ev, n / 4) || !bt_tlist_new(ev, (uint32_t)n, &l)) {
        return false;
    }
    for (uint64_t i = 0; i < n; i++) {
        l->items[l->n++] = tv_int(from);
        from = i + 1 < n ? from + step : from;
    }
    *out = tv_list(LIST_RANGE, l);
    return true;
}

/* dict(mapping or pairs, **more) */
static bool build_dict(struct tev *ev, const struct targs *raw, struct tdict **out)
{
    struct tlist *l, *pair;

    if (raw->n_pos > 1 || !bt_tdict_new(ev, raw->n_kw, out)) {
        return ev->failed ? false : bt_tev_fail(ev, "more than one positional argument");
    }
    if (raw->n_pos == 1 && raw->pos[0].type == TV_DICT) {
        for (uint32_t i = 0; i < raw->pos[0].dict->n; i++) {
            const struct tentry *e = &raw->pos[0].dict->e[i];

            if (!bt_tdict_put(ev, *out, e->key, e->value)) {
                return false;
            }
        }
    } else if (raw->n_pos == 1) {
        if (!bt_tev_items(ev, raw->pos[0], &l)) {
            return false;
        }
        for (uint32_t i = 0; i < l->n; i++) {
            if (!bt_tev_items(ev, l->items[i], &pair)) {
                return false;
            }
            if (pair->n != 2) {
                return bt_tev_fail(ev, "element %u is not a pair", i);
            }
            if (!bt_tdict_put(ev, *out, pair->items[0], pair->items[1])) {
                return false;
            }
        }
    }
    for (uint32_t i = 0; i < raw->n_kw; i++) {
        if (!bt_tdict_put(ev, *out, tv_str(raw->kw[i].name, raw->kw[i].len), raw->kw[i].value)) {
            return false;
        }
    }
    return true;
}

static bool g_dict(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                   struct tv *out)
{
    struct tdict *d;

    (void)self;
    (void)a;
    if (!build_dict(ev, raw, &d)) {
        return false;
    }
    *out = tv_dict(d);
    return true;
}

static bool g_namespace(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
                        struct tv *out)
{
    if (!g_dict(ev, self, a, raw, out)) {
        return false;
    }
    for (uint32_t i = 0; i < out->dict->n; i++) {
        struct tv name = out->dict->e[i].key;

        if (name.type == TV_STR && name.n > 0 && name.s[0] == '_') {
            return bt_tev_fail(ev, "attributes of a namespace cannot start with an underscore");
        }
    }
    out->type = TV_NS;
    return true;
}

static bool g_strftime_now(struct tev *ev, struct tv self, const struct tv *a,
                           const struct targs *raw, struct tv *out)
{
    char fmt[256], text[2048];
    time_t t = (time_t)ev->now_unix;
    struct tm tm;
    size_t n;

    (void)self;
    (void)raw;
    if (!bt_tev_want_str(ev, a[0])) {
        return false;
    }
    if (a[0].n >= sizeof fmt - 1 || memchr(a[0].s, '\0', a[0].n) != NULL ||
        gmtime_r(&t, &tm) == NULL) {
        return bt_tev_fail(ev, "strftime_now: format or time out of range");
    }
    memcpy(fmt, a[0].s, a[0].n);
    fmt[a[0].n] = '.'; /* an empty result is no error: never empty */
    fmt[a[0].n + 1] = '\0';
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral" /* strftime reads no argument but tm */
    n = strftime(text, sizeof text, fmt, &tm);
#pragma GCC diagnostic pop
    if (n == 0) {
        return bt_tev_fail(ev, "strftime_now: result longer than %zu bytes", sizeof text - 1);
    }
    char *copy = bt_tev_alloc(ev, n);
    if (copy == NULL) {
        return false;
    }
    memcpy(copy, text, n - 1);
    *out = tv_str(copy, n - 1);
    return true;
}

static const struct tfunc globals[] = {
    {"dict", g_dict, NULL, 0},
    {"namespace", g_namespace, NULL, 0},
    {"raise_exception", g_raise, "message", 1},
    {"range", g_range, "start,stop,step", 1},
    {"strftime_now", g_strftime_now, "format", 1},
    {NULL, NULL, NULL, 0},
};

const struct tfunc *bt_tglobal_find(const char *name, size_t n)
{
    return in_table(globals, name, n);
}
