/* Evaluates expressions of chat templates: names, operators, calls. The value rules are in
 * template_value.c. */

#include "text/template_int.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

bool bt_tev_fail(struct tev *ev, const char *fmt, ...)
{
    char msg[440];
    va_list ap;

    if (ev->failed) {
        return false;
    }
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    ev->failed = true;
    (void)bt_err_set(ev->err, BT_ERR_INVALID, "chat template line %u column %u: %s",
                     ev->at != NULL ? ev->at->line : 0, ev->at != NULL ? ev->at->col : 0, msg);
    return false;
}

bool bt_tev_nomem(struct tev *ev)
{
    if (!ev->failed) {
        ev->failed = true;
        (void)bt_err_set(ev->err, BT_ERR_NOMEM, "chat template: out of memory");
    }
    return false;
}

bool bt_tev_steps(struct tev *ev, size_t n)
{
    if (ev->steps_left < n) {
        return bt_tev_fail(ev, "more than %u steps", BT_TEMPLATE_STEPS_MAX);
    }
    ev->steps_left -= n;
    return true;
}

/* ---- names ---- */

bool bt_tev_lookup(struct tev *ev, const struct tname *name, struct tv *out)
{
    const struct tfunc *fn;
    struct tv *v;

    for (const struct tscope *s = ev->scope; s != NULL; s = s->parent) {
        for (const struct tvar *var = s->vars; var != NULL; var = var->next) {
            if (var->name == name && var->set) {
                *out = var->value;
                return true;
            }
        }
    }
    v = bt_tdict_find_str(ev->vars, name->s, name->n);
    if (v != NULL) {
        *out = *v;
        return true;
    }
    fn = bt_tglobal_find(name->s, name->n);
    *out = fn != NULL ? (struct tv){.type = TV_FUNC, .fn = fn}
                      : tv_undef(UNDEF_NAME, name->s, name->n);
    return true;
}

bool bt_tev_set_var(struct tev *ev, const struct tname *name, struct tv v)
{
    struct tvar *var = ev->scope->vars;

    while (var != NULL && var->name != name) {
        var = var->next;
    }
    if (var == NULL) {
        var = bt_tev_alloc(ev, sizeof *var);
        if (var == NULL) {
            return false;
        }
        *var = (struct tvar){.name = name, .next = ev->scope->vars};
        ev->scope->vars = var;
    }
    var->value = v;
    var->set = true;
    return true;
}

static bool assign_ns(struct tev *ev, const struct tnode *target, struct tv v)
{
    struct tv ns;

    if (!bt_tev_lookup(ev, target->name, &ns)) {
        return false;
    }
    if (ns.type != TV_NS) {
        return bt_tev_fail(ev, "only attributes of a namespace can be set, '%.*s' is none",
                           (int)target->name->n, target->name->s);
    }
    if (target->val.s[0] == '_') {
        return bt_tev_fail(ev, "attributes of a namespace cannot start with an underscore");
    }
    return bt_tdict_put(ev, ns.dict, target->val, v);
}

bool bt_tev_assign(struct tev *ev, const struct tnode *target, struct tv v)
{
    struct tlist *l;
    uint32_t i = 0;

    ev->at = target;
    if (target->type == N_NAME) {
        return bt_tev_set_var(ev, target->name, v);
    }
    if (target->type == N_NSREF) {
        return assign_ns(ev, target, v);
    }
    if (!bt_tev_items(ev, v, &l)) {
        return false;
    }
    for (const struct tnode *n = target->a; n != NULL; n = n->next, i++) {
        if (i >= l->n) {
            return bt_tev_fail(ev, "not enough values to unpack: %u", l->n);
        }
        if (!bt_tev_assign(ev, n, l->items[i])) {
            return false;
        }
    }
    return i == l->n || bt_tev_fail(ev, "too many values to unpack: %u instead of %u", l->n, i);
}

/* ---- calls ---- */

static bool push_kw(struct tev *ev, struct targs *args, uint32_t *cap, const char *name,
                    uint32_t len, struct tv v)
{
    for (uint32_t i = 0; i < args->n_kw; i++) {
        if (args->kw[i].len == len && memcmp(args->kw[i].name, name, len) == 0) {
            return bt_tev_fail(ev, "argument '%.*s' given twice", (int)len, name);
        }
    }
    if (args->n_kw == *cap) {
        uint32_t n = *cap < 4 ? 4 : *cap * 2;
        struct tkw *kw = bt_tev_alloc(ev, n * sizeof *kw);

        if (kw == NULL) {
            return false;
        }
        if (args->n_kw > 0) {
            memcpy(kw, args->kw, args->n_kw * sizeof *kw);
        }
        args->kw = kw;
        *cap = n;
    }
    args->kw[args->n_kw++] = (struct tkw){.name = name, .len = len, .value = v};
    return bt_tev_steps(ev, 1 + args->n_kw / 16);
}

static bool push_kws(struct tev *ev, struct targs *args, uint32_t *cap, struct tv v)
{
    if (v.type != TV_DICT) {
        return bt_tev_fail(ev, "** needs a mapping, not %s", bt_tv_type_name(v));
    }
    for (uint32_t i = 0; i < v.dict->n; i++) {
        const struct tentry *e = &v.dict->e[i];

        if (e->key.type != TV_STR) {
            return bt_tev_fail(ev, "keyword arguments have string names");
        }
        if (!push_kw(ev, args, cap, e->key.s, e->key.n, e->value)) {
            return false;
        }
    }
    return true;
}

bool bt_tev_args(struct tev *ev, const struct tnode *list, struct targs *out)
{
    struct tlist pos = {0}, *more;
    uint32_t kw_cap = 0;
    struct tv v;

    *out = (struct targs){0};
    for (const struct tnode *arg = list; arg != NULL; arg = arg->next) {
        if (!bt_tev_eval(ev, arg->a, &v)) {
            return false;
        }
        ev->at = arg;
        if (arg->name != NULL) {
            if (!push_kw(ev, out, &kw_cap, arg->name->s, arg->name->n, v)) {
                return false;
            }
        } else if (arg->op == 'p') {
            if (!push_kws(ev, out, &kw_cap, v)) {
                return false;
            }
        } else if (arg->op == '*') {
            if (!bt_tev_items(ev, v, &more)) {
                return false;
            }
            for (uint32_t i = 0; i < more->n; i++) {
                if (!bt_tlist_push(ev, &pos, more->items[i])) {
                    return false;
                }
            }
        } else if (!bt_tlist_push(ev, &pos, v)) {
            return false;
        }
    }
    out->pos = pos.items;
    out->n_pos = pos.n;
    return true;
}

/* The place of a keyword in a comma-separated parameter list; -1: none. */
static int param_index(const char *params, const char *name, uint32_t len)
{
    int i = 0;

    for (const char *p = params; *p != '\0'; i++) {
        const char *end = strchrnul(p, ',');

        if ((size_t)(end - p) == len && memcmp(p, name, len) == 0) {
            return i;
        }
        p = *end == ',' ? end + 1 : end;
    }
    return -1;
}

static uint32_t param_count(const char *params)
{
    uint32_t n = *params != '\0';

    for (; *params != '\0'; params++) {
        n += *params == ',';
    }
    return n;
}

bool bt_tev_call_func(struct tev *ev, const struct tfunc *f, struct tv self,
                      const struct targs *args, struct tv *out)
{
    struct tv a[TFUNC_ARGS_MAX];
    uint32_t n;

    if (!bt_tev_steps(ev, 1)) {
        return false;
    }
    if (f->params == NULL) {
        return f->fn(ev, self, NULL, args, out);
    }
    n = param_count(f->params);
    if (args->n_pos > n) {
        return bt_tev_fail(ev, "%s takes at most %u arguments, got %u", f->name, n, args->n_pos);
    }
    for (uint32_t i = 0; i < TFUNC_ARGS_MAX; i++) {
        a[i] = i < args->n_pos ? args->pos[i] : tv_undef(UNDEF_PARAM, f->name, strlen(f->name));
    }
    for (uint32_t i = 0; i < args->n_kw; i++) {
        int at = param_index(f->params, args->kw[i].name, args->kw[i].len);

        if (at < 0 || (uint32_t)at < args->n_pos) {
            return bt_tev_fail(ev, "%s: unexpected argument '%.*s'", f->name,
                               (int)(args->kw[i].len < 60 ? args->kw[i].len : 60),
                               args->kw[i].name);
        }
        a[at] = args->kw[i].value;
    }
    for (uint32_t i = 0; i < f->n_required; i++) {
        if (tv_missing(a[i])) {
            return bt_tev_fail(ev, "%s: argument %u is missing", f->name, i + 1);
        }
    }
    return f->fn(ev, self, a, args, out);
}

bool bt_tev_call(struct tev *ev, struct tv fn, const struct targs *args, struct tv *out)
{
    switch (fn.type) {
    case TV_FUNC:
        return bt_tev_call_func(ev, fn.fn, tv_none(), args, out);
    case TV_METHOD:
        return bt_tev_call_func(ev, fn.m->fn, fn.m->self, args, out);
    case TV_MACRO:
        return bt_tev_call_macro(ev, fn.macro, args, out);
    case TV_LOOP:
        return bt_tev_call_loop(ev, fn.loop, args, out);
    case TV_UNDEF:
        return bt_tev_undefined_error(ev, fn);
    default:
        return bt_tev_fail(ev, "a %s cannot be called", bt_tv_type_name(fn));
    }
}

static bool eval_call(struct tev *ev, const struct tnode *n, struct tv *out)
{
    const struct tfunc *fn = NULL;
    struct targs args;
    struct tv callee;
    bool unsafe = false;

    if (n->a->type == N_ATTR) { /* a method is called without making a value of it */
        if (!bt_tev_eval(ev, n->a->a, &callee)) {
            return false;
        }
        ev->at = n->a;
        fn = bt_tmethod_find(callee, n->a->name->s, n->a->name->n, &unsafe);
        if (fn == NULL && !bt_tev_getattr(ev, callee, n->a->name->s, n->a->name->n, &callee)) {
            return false;
        }
    } else if (!bt_tev_eval(ev, n->a, &callee)) {
        return false;
    }
    if (!bt_tev_args(ev, n->b, &args)) {
        return false;
    }
    ev->at = n;
    return fn != NULL ? bt_tev_call_func(ev, fn, callee, &args, out)
                      : bt_tev_call(ev, callee, &args, out);
}

static bool eval_fn(struct tev *ev, const struct tnode *n, struct tv *out)
{
    struct targs args;
    struct tv v;

    if (!bt_tev_eval(ev, n->a, &v) || !bt_tev_args(ev, n->b, &args)) {
        return false;
    }
    ev->at = n;
    if (n->fn == NULL) {
        return bt_tev_fail(ev, "no %s named '%.*s'", n->type == N_FILTER ? "filter" : "test",
                           (int)(n->name->n < 60 ? n->name->n : 60), n->name->s);
    }
    return bt_tev_call_func(ev, n->fn, v, &args, out);
}

/* ---- operators ---- */

static bool is_int(struct tv v)
{
    return v.type == TV_INT || v.type == TV_BOOL;
}

static int64_t as_int(struct tv v)
{
    return v.type == TV_BOOL ? v.b : v.i;
}

static bool int_pow(int64_t base, int64_t exp, int64_t *out)
{
    int64_t r = 1;

    while (exp > 0) {
        if ((exp & 1) != 0 && __builtin_mul_overflow(r, base, &r)) {
            return false;
        }
        exp >>= 1;
        if (exp > 0 && __builtin_mul_overflow(base, base, &base)) {
            return false;
        }
    }
    *out = r;
    return true;
}

static bool int_op(struct tev *ev, uint8_t op, int64_t a, int64_t b, struct tv *out)
{
    int64_t r = 0;
    bool fits = true;

    if (b == 0 && (op == 'f' || op == '%' || op == '/')) {
        return bt_tev_fail(ev, "division by zero");
    }
    switch (op) {
    case '+':
        fits = !__builtin_add_overflow(a, b, &r);
        break;
    case '-':
        fits = !__builtin_sub_overflow(a, b, &r);
        break;
    case '*':
        fits = !__builtin_mul_overflow(a, b, &r);
        break;
    case 'f':
        fits = !(a == INT64_MIN && b == -1);
        r = fits ? a / b - (a % b != 0 && (a < 0) != (b < 0)) : 0;
        break;
    case '%':
        r = b == -1 ? 0 : a % b;
        r += r != 0 && (r < 0) != (b < 0) ? b : 0;
        break;
    case 'p':
        if (b < 0) {
            *out = tv_float(pow((double)a, (double)b));
            return a != 0 || bt_tev_fail(ev, "division by zero");
        }
        fits = int_pow(a, b, &r);
        break;
    default: /* '/' */
        *out = tv_float((double)a / (double)b);
        return true;
    }
    *out = tv_int(r);
    return fits || bt_tev_fail(ev, "the integer result does not fit 64 bits");
}

static bool float_op(struct tev *ev, uint8_t op, double a, double b, struct tv *out)
{
    double r;

    if (b == 0 && (op == 'f' || op == '%' || op == '/')) {
        return bt_tev_fail(ev, "division by zero");
    }
    switch (op) {
    case '+':
        r = a + b;
        break;
    case '-':
        r = a - b;
        break;
    case '*':
        r = a * b;
        break;
    case 'f':
        r = floor(a / b);
        break;
    case '%':
        r = fmod(a, b);
        r += r != 0 && (r < 0) != (b < 0) ? b : 0;
        break;
    case 'p':
        r = pow(a, b);
        break;
    default:
        r = a / b;
        break;
    }
    *out = tv_float(r);
    return true;
}

static bool concat_lists(struct tev *ev, struct tv a, struct tv b, struct tv *out)
{
    struct tlist *l;

    if (!bt_tlist_new(ev, a.list->n + b.list->n, &l) || !bt_tev_steps(ev, l->cap / 4)) {
        return false;
    }
    for (uint32_t i = 0; i < a.list->n; i++) {
        l->items[l->n++] = a.list->items[i];
    }
    for (uint32_t i = 0; i < b.list->n; i++) {
        l->items[l->n++] = b.list->items[i];
    }
    *out = tv_list((enum list_kind)a.kind, l);
    return true;
}

static bool repeat(struct tev *ev, struct tv v, int64_t times, struct tv *out)
{
    size_t n = v.type == TV_STR ? v.n : v.list->n;
    struct tlist *l;

    times = times < 0 ? 0 : times;
    if (n > 0 && (uint64_t)times > ev->out_max / n) {
        return bt_tev_fail(ev, "repeated to more than %zu", ev->out_max);
    }
    if (!bt_tev_steps(ev, n * (size_t)times / 16)) {
        return false;
    }
    if (v.type == TV_STR) {
        char *s = bt_tev_alloc(ev, n * (size_t)times);

        for (int64_t i = 0; s != NULL && n > 0 && i < times; i++) {
            memcpy(s + (size_t)i * n, v.s, n);
        }
        *out = tv_str(s, n * (size_t)times);
        return s != NULL;
    }
    if (!bt_tlist_new(ev, (uint32_t)(n * (size_t)times), &l)) {
        return false;
    }
    for (int64_t i = 0; n > 0 && i < times; i++) {
        memcpy(l->items + l->n, v.list->items, n * sizeof *l->items);
        l->n += (uint32_t)n;
    }
    *out = tv_list((enum list_kind)v.kind, l);
    return true;
}

static bool concat_str(struct tev *ev, struct tv a, struct tv b, struct tv *out)
{
    size_t n = (size_t)a.n + b.n;
    char *s;

    if (n > ev->out_max) {
        return bt_tev_fail(ev, "text longer than %zu bytes", ev->out_max);
    }
    s = bt_tev_alloc(ev, n);
    if (s == NULL || !bt_tev_steps(ev, n / 64)) {
        return false;
    }
    memcpy(s, a.s, a.n);
    memcpy(s + a.n, b.s, b.n);
    *out = tv_str(s, n);
    return true;
}

bool bt_tev_binary(struct tev *ev, uint8_t op, struct tv a, struct tv b, struct tv *out)
{
    const char shown[3] = {op == 'f'   ? '/'
                           : op == 'p' ? '*'
                                       : (char)op,
                           op == 'f'   ? '/'
                           : op == 'p' ? '*'
                                       : '\0',
                           '\0'};
    bool lists = a.type == TV_LIST && b.type == TV_LIST && a.kind == b.kind && a.kind <= LIST_TUPLE;

    if (op == '%' && a.type == TV_STR) {
        return bt_tstr_percent(ev, a, b, out);
    }
    if (a.type == TV_UNDEF || b.type == TV_UNDEF) {
        return bt_tev_undefined_error(ev, a.type == TV_UNDEF ? a : b);
    }
    if (is_int(a) && is_int(b)) {
        return int_op(ev, op, as_int(a), as_int(b), out);
    }
    if ((is_int(a) || a.type == TV_FLOAT) && (is_int(b) || b.type == TV_FLOAT)) {
        return float_op(ev, op, a.type == TV_FLOAT ? a.f : (double)as_int(a),
                        b.type == TV_FLOAT ? b.f : (double)as_int(b), out);
    }
    if (op == '+' && a.type == TV_STR && b.type == TV_STR) {
        return concat_str(ev, a, b, out);
    }
    if (op == '+' && lists) {
        return concat_lists(ev, a, b, out);
    }
    if (op == '*' && is_int(b) &&
        (a.type == TV_STR || (a.type == TV_LIST && a.kind <= LIST_TUPLE))) {
        return repeat(ev, a, as_int(b), out);
    }
    if (op == '*' && is_int(a) &&
        (b.type == TV_STR || (b.type == TV_LIST && b.kind <= LIST_TUPLE))) {
        return repeat(ev, b, as_int(a), out);
    }
    return bt_tev_fail(ev, "'%s' does not work between %s and %s", shown, bt_tv_type_name(a),
                       bt_tv_type_name(b));
}

/* A chain of + is evaluated without copying the text at every link. */
static bool eval_sum(struct tev *ev, const struct tnode *n, struct tv *out)
{
    const struct tnode *leaf[32];
    uint32_t depth = 0, n_str = 0;
    struct tv v[32], sum;
    size_t bytes = 0;

    for (; depth < 31 && n->type == N_BIN && n->op == '+'; n = n->a) {
        leaf[depth++] = n;
    }
    if (!bt_tev_eval(ev, n, &v[0])) {
        return false;
    }
    for (uint32_t i = 0; i < depth; i++) {
        if (!bt_tev_eval(ev, leaf[depth - 1 - i]->b, &v[i + 1])) {
            return false;
        }
    }
    while (n_str <= depth && v[n_str].type == TV_STR) {
        bytes += v[n_str++].n;
    }
    sum = v[0];
    if (n_str > 2) {
        char *s = bytes <= ev->out_max ? bt_tev_alloc(ev, bytes) : NULL;

        ev->at = leaf[0];
        if (s == NULL || !bt_tev_steps(ev, bytes / 64)) {
            return ev->failed ? false : bt_tev_fail(ev, "text longer than %zu bytes", ev->out_max);
        }
        sum = tv_str(s, bytes);
        for (uint32_t i = 0; i < n_str; i++) {
            memcpy(s, v[i].s, v[i].n);
            s += v[i].n;
        }
    }
    for (uint32_t i = n_str > 2 ? n_str : 1; i <= depth; i++) {
        ev->at = leaf[depth - i];
        if (!bt_tev_binary(ev, '+', sum, v[i], &sum)) {
            return false;
        }
    }
    *out = sum;
    return true;
}

static bool eval_concat(struct tev *ev, const struct tnode *n, struct tv *out)
{
    struct bt_buf b = {0};
    struct tv v;

    for (const struct tnode *part = n->a; part != NULL; part = part->next) {
        if (!bt_tev_eval(ev, part, &v) || !bt_tv_print(ev, &b, v, false, 0)) {
            bt_buf_fini(&b);
            return false;
        }
    }
    ev->at = n;
    return bt_tev_take(ev, &b, out);
}

bool bt_tev_contains(struct tev *ev, struct tv item, struct tv in, bool *out)
{
    struct tlist *l;

    *out = false;
    if (in.type == TV_STR) {
        if (item.type != TV_STR) {
            return bt_tev_fail(ev, "'in' looks for a string in a string, not for %s",
                               bt_tv_type_name(item));
        }
        *out = item.n == 0 || memmem(in.s, in.n, item.s, item.n) != NULL;
        return bt_tev_steps(ev, in.n / 64);
    }
    if (in.type == TV_DICT) {
        if (!bt_tv_hashable(item)) {
            return bt_tev_fail(ev, "a %s cannot be a key", bt_tv_type_name(item));
        }
        *out = bt_tdict_find(in.dict, item) != NULL;
        return bt_tev_steps(ev, in.dict->n / 16);
    }
    if (!bt_tev_items(ev, in, &l)) {
        return false;
    }
    for (uint32_t i = 0; i < l->n && !*out; i++) {
        if (!bt_tv_equal(ev, l->items[i], item, out)) {
            return false;
        }
    }
    return true;
}

static bool compare(struct tev *ev, uint8_t op, struct tv a, struct tv b, bool *out)
{
    bool same = false;

    switch (op) {
    case '=':
    case '!':
        if (!bt_tv_equal(ev, a, b, out)) {
            return false;
        }
        *out = *out == (op == '=');
        return true;
    case 'i':
    case 'n':
        if (!bt_tev_contains(ev, a, b, out)) {
            return false;
        }
        *out = *out == (op == 'i');
        return true;
    case '<':
        return bt_tv_less(ev, a, b, out);
    case '>':
        return bt_tv_less(ev, b, a, out);
    default: /* 'l', 'g' */
        if (!(op == 'l' ? bt_tv_less(ev, a, b, out) : bt_tv_less(ev, b, a, out)) ||
            !bt_tv_equal(ev, a, b, &same)) {
            return false;
        }
        *out = *out || same;
        return true;
    }
}

static bool eval_compare(struct tev *ev, const struct tnode *n, struct tv *out)
{
    struct tv left, right;
    bool b = true;

    if (!bt_tev_eval(ev, n->a, &left)) {
        return false;
    }
    for (const struct tnode *cmp = n->b; cmp != NULL && b; cmp = cmp->next) {
        if (!bt_tev_eval(ev, cmp->a, &right)) {
            return false;
        }
        ev->at = cmp;
        if (!compare(ev, cmp->op, left, right, &b)) {
            return false;
        }
        left = right;
    }
    *out = tv_bool(b);
    return true;
}

/* ---- the rest ---- */

static bool eval_sequence(struct tev *ev, const struct tnode *n, struct tv *out)
{
    struct tlist *l;
    struct tv v;

    if (!bt_tlist_new(ev, 0, &l)) {
        return false;
    }
    for (const struct tnode *item = n->a; item != NULL; item = item->next) {
        if (!bt_tev_eval(ev, item, &v) || !bt_tlist_push(ev, l, v)) {
            return false;
        }
    }
    *out = tv_list(n->type == N_TUPLE ? LIST_TUPLE : LIST_LIST, l);
    return true;
}

static bool eval_dict(struct tev *ev, const struct tnode *n, struct tv *out)
{
    struct tdict *d;
    struct tv key, value;

    if (!bt_tdict_new(ev, 0, &d)) {
        return false;
    }
    for (const struct tnode *pair = n->a; pair != NULL; pair = pair->next) {
        if (!bt_tev_eval(ev, pair->a, &key) || !bt_tev_eval(ev, pair->b, &value) ||
            !bt_tdict_put(ev, d, key, value)) {
            return false;
        }
    }
    *out = tv_dict(d);
    return true;
}

static bool eval_item(struct tev *ev, const struct tnode *n, struct tv *out)
{
    const struct tnode *s = n->b;
    struct tv obj, bound[3] = {tv_none(), tv_none(), tv_none()};

    if (!bt_tev_eval(ev, n->a, &obj)) {
        return false;
    }
    if (s->type != N_SLICE) {
        if (!bt_tev_eval(ev, s, &bound[0])) {
            return false;
        }
        ev->at = n;
        return bt_tev_getitem(ev, obj, bound[0], out);
    }
    if ((s->a != NULL && !bt_tev_eval(ev, s->a, &bound[0])) ||
        (s->b != NULL && !bt_tev_eval(ev, s->b, &bound[1])) ||
        (s->c != NULL && !bt_tev_eval(ev, s->c, &bound[2]))) {
        return false;
    }
    ev->at = n;
    return bt_tev_slice(ev, obj, bound[0], bound[1], bound[2], out);
}

static bool eval_sign(struct tev *ev, const struct tnode *n, struct tv *out)
{
    if (!bt_tev_eval(ev, n->a, out)) {
        return false;
    }
    ev->at = n;
    if (out->type == TV_UNDEF) {
        return bt_tev_undefined_error(ev, *out);
    }
    if (out->type == TV_FLOAT) {
        *out = tv_float(n->type == N_NEG ? -out->f : out->f);
        return true;
    }
    if (!is_int(*out)) {
        return bt_tev_fail(ev, "a sign before a %s", bt_tv_type_name(*out));
    }
    return n->type == N_NEG ? int_op(ev, '-', 0, as_int(*out), out)
                            : int_op(ev, '+', 0, as_int(*out), out);
}

static bool eval_logic(struct tev *ev, const struct tnode *n, struct tv *out)
{
    if (!bt_tev_eval(ev, n->a, out)) {
        return false;
    }
    if (n->type == N_NOT) {
        *out = tv_bool(!bt_tv_truth(*out));
        return true;
    }
    return bt_tv_truth(*out) == (n->type == N_OR) || bt_tev_eval(ev, n->b, out);
}

static bool eval_cond(struct tev *ev, const struct tnode *n, struct tv *out)
{
    struct tv cond;

    if (!bt_tev_eval(ev, n->b, &cond)) {
        return false;
    }
    if (bt_tv_truth(cond)) {
        return bt_tev_eval(ev, n->a, out);
    }
    if (n->c != NULL) {
        return bt_tev_eval(ev, n->c, out);
    }
    *out = tv_undef(UNDEF_OTHER, "", 0);
    return true;
}

static bool eval_binary(struct tev *ev, const struct tnode *n, struct tv *out)
{
    struct tv a, b;

    if (!bt_tev_eval(ev, n->a, &a) || !bt_tev_eval(ev, n->b, &b)) {
        return false;
    }
    ev->at = n;
    return bt_tev_binary(ev, n->op, a, b, out);
}

static bool eval_node(struct tev *ev, const struct tnode *n, struct tv *out)
{
    switch ((enum tnode_type)n->type) {
    case N_CONST:
        *out = n->val;
        return true;
    case N_NAME:
        return bt_tev_lookup(ev, n->name, out);
    case N_TUPLE:
    case N_LIST:
        return eval_sequence(ev, n, out);
    case N_DICT:
        return eval_dict(ev, n, out);
    case N_ATTR:
        if (!bt_tev_eval(ev, n->a, out)) {
            return false;
        }
        ev->at = n;
        return bt_tev_getattr(ev, *out, n->name->s, n->name->n, out);
    case N_ITEM:
        return eval_item(ev, n, out);
    case N_CALL:
        return eval_call(ev, n, out);
    case N_FILTER:
    case N_TEST:
        return eval_fn(ev, n, out);
    case N_COND:
        return eval_cond(ev, n, out);
    case N_AND:
    case N_OR:
    case N_NOT:
        return eval_logic(ev, n, out);
    case N_NEG:
    case N_POS:
        return eval_sign(ev, n, out);
    case N_BIN:
        return n->op == '+' ? eval_sum(ev, n, out) : eval_binary(ev, n, out);
    case N_CONCAT:
        return eval_concat(ev, n, out);
    case N_COMPARE:
        return eval_compare(ev, n, out);
    default:
        return bt_tev_fail(ev, "not an expression");
    }
}

bool bt_tev_eval(struct tev *ev, const struct tnode *n, struct tv *out)
{
    bool ok;

    ev->at = n;
    if (ev->depth >= BT_TEMPLATE_DEPTH_MAX * 5) {
        return bt_tev_fail(ev, "nested too deeply");
    }
    if (!bt_tev_steps(ev, 1)) {
        return false;
    }
    ev->depth++;
    ok = eval_node(ev, n, out);
    ev->depth--;
    return ok;
}
