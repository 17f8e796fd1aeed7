/* Evaluates expressions of chat templates: names, operators, calls. The value rules are in
 * template_value.c. */

#include "text/template_int.h"

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
        if (!bt_tev_compare(ev, cmp->op, left, right, &b)) {
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
    if (out->type != TV_INT && out->type != TV_BOOL) {
        return bt_tev_fail(ev, "a sign before a %s", bt_tv_type_name(*out));
    }
    return bt_tev_binary(ev, n->type == N_NEG ? '-' : '+', tv_int(0), *out, out);
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
