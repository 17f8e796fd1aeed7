/* Runs statements of chat templates: output, scopes, loops, macros. Scopes are as Jinja's: a loop's
 * body, a macro, a block set, a call, filter, with or generation block each have their own; an if
 * has none. */

#include "text/template_int.h"

#include <string.h>

bool bt_tev_emit(struct tev *ev, const char *s, size_t n)
{
    if (n > ev->out_max - ev->out_bytes) {
        return bt_tev_fail(ev, "output longer than %zu bytes", ev->out_max);
    }
    ev->out_bytes += n;
    return bt_buf_add(ev->out, s, n) || bt_tev_nomem(ev);
}

bool bt_tev_emit_value(struct tev *ev, struct tv v)
{
    return bt_tv_to_str(ev, v, &v) && bt_tev_emit(ev, v.s, v.n);
}

/* Runs body in a scope of its own under parent, its output becoming a string. */
static bool capture(struct tev *ev, const struct tnode *body, struct tscope *scope, struct tv *out)
{
    struct tscope *old_scope = ev->scope;
    struct bt_buf *old_out = ev->out, b = {0};
    enum tflow flow;
    bool ok;

    ev->scope = scope;
    ev->out = &b;
    ok = bt_tev_exec(ev, body, &flow);
    ev->out = old_out;
    ev->scope = old_scope;
    if (!ok) {
        bt_buf_fini(&b);
        return false;
    }
    return bt_tev_take(ev, &b, out);
}

static struct tscope *new_scope(struct tev *ev, struct tscope *parent)
{
    struct tscope *s = bt_tev_alloc(ev, sizeof *s);

    if (s != NULL) {
        *s = (struct tscope){.parent = parent};
    }
    return s;
}

/* ---- loops ---- */

/* The next item that the filter accepts. */
static bool loop_fetch(struct tloop *loop, struct tv *item, bool *found)
{
    struct tev *ev = loop->ev;
    const struct tnode *n = loop->node;
    struct tscope filter = {.parent = loop->outer}, *old = ev->scope;
    struct tv keep;
    bool ok = true;

    *found = false;
    while (ok && !*found && loop->src_pos < loop->src->n) {
        *item = loop->src->items[loop->src_pos++];
        *found = true;
        if (n->e == NULL) {
            break;
        }
        filter.vars = NULL;
        ev->scope = &filter;
        ok = bt_tev_assign(ev, n->a, *item) && bt_tev_eval(ev, n->e, &keep) && bt_tev_steps(ev, 1);
        ev->scope = old;
        *found = ok && bt_tv_truth(keep);
    }
    return ok;
}

/* Makes sure that n more items are known beyond the current one, if there are as many. */
static bool loop_peek(struct tloop *loop, uint32_t n)
{
    bool found = true;
    struct tv item;

    while (found && loop->peeked->n - loop->peeked_pos < n) {
        if (!loop_fetch(loop, &item, &found) ||
            (found && !bt_tlist_push(loop->ev, loop->peeked, item))) {
            return false;
        }
    }
    return true;
}

static bool loop_next(struct tloop *loop, struct tv *item, bool *found)
{
    if (!loop_peek(loop, 1)) {
        return false;
    }
    *found = loop->peeked_pos < loop->peeked->n;
    if (*found) {
        *item = loop->peeked->items[loop->peeked_pos++];
        if (loop->peeked_pos == loop->peeked->n) {
            loop->peeked_pos = loop->peeked->n = 0;
        }
    }
    return true;
}

/* A filter that looks at names set by the loop body must see each item late; without one everything
 * is known. */
static bool loop_length(struct tloop *loop, int64_t *out)
{
    if (loop->node->e == NULL) {
        *out = loop->src->n;
        return true;
    }
    if (!loop_peek(loop, UINT32_MAX)) {
        return false;
    }
    *out = loop->index0 + 1 + (loop->peeked->n - loop->peeked_pos);
    return true;
}

bool bt_tloop_attr(struct tev *ev, struct tloop *loop, const char *name, size_t n, struct tv *out)
{
    struct tv attr = tv_str(name, n);
    int64_t length;

    if (tv_is(attr, "index") || tv_is(attr, "index0")) {
        *out = tv_int(loop->index0 + (n == 5));
    } else if (tv_is(attr, "first")) {
        *out = tv_bool(loop->index0 == 0);
    } else if (tv_is(attr, "depth") || tv_is(attr, "depth0")) {
        *out = tv_int((int64_t)loop->depth0 + (n == 5));
    } else if (tv_is(attr, "previtem")) {
        *out = loop->index0 > 0 ? loop->prev : tv_undef(UNDEF_OTHER, "", 0);
    } else if (tv_is(attr, "last") || tv_is(attr, "nextitem")) {
        if (!loop_peek(loop, 1)) {
            return false;
        }
        bool more = loop->peeked_pos < loop->peeked->n;

        *out = n == 4 ? tv_bool(!more)
               : more ? loop->peeked->items[loop->peeked_pos]
                      : tv_undef(UNDEF_OTHER, "", 0);
    } else if (tv_is(attr, "length") || tv_is(attr, "revindex") || tv_is(attr, "revindex0")) {
        if (!loop_length(loop, &length)) {
            return false;
        }
        *out = tv_int(n == 6 ? length : length - loop->index0 - (n == 9));
    } else {
        *out = tv_undef(UNDEF_ATTR, name, n);
    }
    return !ev->failed;
}

/* A fresh round: names set in the last one are gone. */
static bool bind_loop_names(struct tev *ev, struct tscope *scope, struct tloop *loop,
                            struct tv item)
{
    for (struct tvar *var = scope->vars; var != NULL; var = var->next) {
        var->set = false;
    }
    return bt_tev_set_var(ev, loop->node->name, (struct tv){.type = TV_LOOP, .loop = loop}) &&
           bt_tev_assign(ev, loop->node->a, item);
}

static bool run_loop(struct tev *ev, const struct tnode *n, struct tscope *outer,
                     struct tv iterable, uint32_t depth0, enum tflow *flow)
{
    struct tscope *old = ev->scope, *scope = new_scope(ev, outer);
    struct tloop *loop = bt_tev_alloc(ev, sizeof *loop);
    bool ok = scope != NULL && loop != NULL, found = true;
    struct tv item = {0};

    *flow = FLOW_NEXT;
    if (!ok) {
        return false;
    }
    *loop = (struct tloop){.ev = ev, .node = n, .outer = outer, .index0 = -1, .depth0 = depth0};
    if (!bt_tev_items(ev, iterable, &loop->src) || !bt_tlist_new(ev, 0, &loop->peeked)) {
        return false;
    }
    ev->scope = scope;
    while (ok && *flow != FLOW_BREAK) {
        ok = loop_next(loop, &item, &found);
        if (!ok || !found) {
            break;
        }
        loop->index0++;
        loop->prev = loop->cur;
        loop->cur = item;
        ok = bt_tev_steps(ev, 1) && bind_loop_names(ev, scope, loop, item) &&
             bt_tev_exec(ev, n->c, flow);
    }
    if (ok && loop->index0 < 0 && n->d != NULL) {
        scope->vars = NULL;
        ok = bt_tev_exec(ev, n->d, flow);
        ev->scope = old;
        return ok; /* a break in the else part leaves the loop around this one */
    }
    ev->scope = old;
    *flow = FLOW_NEXT;
    return ok;
}

static bool exec_for(struct tev *ev, const struct tnode *n, enum tflow *flow)
{
    struct tv iterable;

    return bt_tev_eval(ev, n->b, &iterable) && run_loop(ev, n, ev->scope, iterable, 0, flow);
}

static bool enter_macro(struct tev *ev)
{
    if (ev->macro_depth >= BT_TEMPLATE_DEPTH_MAX / 2) {
        return bt_tev_fail(ev, "macros call each other too deeply");
    }
    ev->macro_depth++;
    return true;
}

/* loop(items) in a recursive loop: the body again, one level deeper; gives its text. */
bool bt_tev_call_loop(struct tev *ev, struct tloop *loop, const struct targs *args, struct tv *out)
{
    struct bt_buf *old_out = ev->out, b = {0};
    enum tflow flow;
    bool ok;

    if (loop->node->op == 0) {
        return bt_tev_fail(ev, "the loop is not marked recursive");
    }
    if (args->n_pos != 1 || args->n_kw != 0) {
        return bt_tev_fail(ev, "loop() takes one sequence");
    }
    if (!enter_macro(ev)) {
        return false;
    }
    ev->out = &b;
    ok = run_loop(ev, loop->node, loop->outer, args->pos[0], loop->depth0 + 1, &flow);
    ev->out = old_out;
    ev->macro_depth--;
    if (!ok) {
        bt_buf_fini(&b);
        return false;
    }
    return bt_tev_take(ev, &b, out);
}

/* ---- macros ---- */

/* The keyword argument called name, marked as used. */
static bool take_kw(const struct targs *args, bool *used, const struct tname *name, struct tv *out)
{
    for (uint32_t i = 0; i < args->n_kw; i++) {
        if (args->kw[i].len == name->n && memcmp(args->kw[i].name, name->s, name->n) == 0) {
            used[i] = true;
            *out = args->kw[i].value;
            return true;
        }
    }
    return false;
}

static bool bind_params(struct tev *ev, const struct tnode *m, const struct targs *args, bool *used)
{
    uint32_t i = 0;

    for (const struct tnode *p = m->a; p != NULL; p = p->next, i++) {
        struct tv v = tv_undef(UNDEF_PARAM, p->name->s, p->name->n);

        if (i < args->n_pos) {
            v = args->pos[i];
        } else if (!take_kw(args, used, p->name, &v) && p->a != NULL &&
                   !bt_tev_eval(ev, p->a, &v)) {
            return false;
        }
        if (!bt_tev_set_var(ev, p->name, v)) {
            return false;
        }
    }
    return true;
}

/* varargs, kwargs and caller, as far as the macro's body names them; everything else left over is
 * an error. */
static bool bind_special(struct tev *ev, const struct tmacro *macro, const struct targs *args,
                         bool *used)
{
    const struct tnode *m = macro->node;
    uint32_t n_params = 0;
    struct tlist *rest;
    struct tdict *d;
    struct tv caller = tv_undef(UNDEF_OTHER, "", 0);

    for (const struct tnode *p = m->a; p != NULL; p = p->next) {
        n_params++;
    }
    if (!bt_tlist_new(ev, 0, &rest) || !bt_tdict_new(ev, 0, &d)) {
        return false;
    }
    for (uint32_t i = n_params; i < args->n_pos; i++) {
        if ((m->op & TMACRO_VARARGS) == 0) {
            return bt_tev_fail(ev, "macro '%.*s' takes %u arguments, got %u", (int)m->name->n,
                               m->name->s, n_params, args->n_pos);
        }
        if (!bt_tlist_push(ev, rest, args->pos[i])) {
            return false;
        }
    }
    for (uint32_t i = 0; i < args->n_kw; i++) {
        struct tv name = tv_str(args->kw[i].name, args->kw[i].len);

        if (!used[i] && (m->op & TMACRO_CALLER) != 0 && tv_is(name, "caller")) {
            caller = args->kw[i].value;
        } else if (!used[i] && (m->op & TMACRO_KWARGS) == 0) {
            return bt_tev_fail(ev, "macro '%.*s' has no parameter '%.*s'", (int)m->name->n,
                               m->name->s, (int)name.n, name.s);
        } else if (!used[i] && !bt_tdict_put(ev, d, name, args->kw[i].value)) {
            return false;
        }
    }
    const struct tv special[3] = {tv_list(LIST_TUPLE, rest), tv_dict(d), caller};
    const struct tnode *name = m->b; /* the interned special names that the body uses */

    for (; name != NULL; name = name->next) {
        if (!bt_tev_set_var(ev, name->name, special[name->op])) {
            return false;
        }
    }
    return true;
}

bool bt_tev_call_macro(struct tev *ev, const struct tmacro *m, const struct targs *args,
                       struct tv *out)
{
    struct tscope *old = ev->scope, *scope = new_scope(ev, m->scope);
    bool *used = bt_tev_alloc(ev, args->n_kw), ok;

    if (scope == NULL || used == NULL || !enter_macro(ev)) {
        return false;
    }
    memset(used, 0, args->n_kw);
    ev->scope = scope;
    ok = bind_params(ev, m->node, args, used) && bind_special(ev, m, args, used);
    ev->scope = old;
    ok = ok && capture(ev, m->node->c, scope, out);
    ev->macro_depth--;
    return ok;
}

static bool make_macro(struct tev *ev, const struct tnode *n, struct tv *out)
{
    struct tmacro *m = bt_tev_alloc(ev, sizeof *m);

    if (m == NULL) {
        return false;
    }
    *m = (struct tmacro){.node = n, .scope = ev->scope};
    *out = (struct tv){.type = TV_MACRO, .macro = m};
    return true;
}

static bool exec_call_block(struct tev *ev, const struct tnode *n)
{
    struct targs args;
    struct tv callee, caller, text;
    struct tkw *kw;

    if (!bt_tev_eval(ev, n->a->a, &callee) || !bt_tev_args(ev, n->a->b, &args) ||
        !make_macro(ev, n->b, &caller)) {
        return false;
    }
    ev->at = n->a;
    kw = bt_tev_alloc(ev, (args.n_kw + 1) * sizeof *kw);
    if (kw == NULL) {
        return false;
    }
    if (args.n_kw > 0) {
        memcpy(kw, args.kw, args.n_kw * sizeof *kw);
    }
    kw[args.n_kw++] = (struct tkw){.name = "caller", .len = 6, .value = caller};
    args.kw = kw;
    return bt_tev_call(ev, callee, &args, &text) && bt_tev_emit_value(ev, text);
}

/* ---- blocks ---- */

/* Applies the filters of a block, innermost first, to its text. */
static bool apply_filters(struct tev *ev, const struct tnode *f, struct tv v, struct tv *out)
{
    struct targs args;

    if (f == NULL) {
        *out = v;
        return true;
    }
    if (!apply_filters(ev, f->a, v, &v) || !bt_tev_args(ev, f->b, &args)) {
        return false;
    }
    ev->at = f;
    if (f->fn == NULL) {
        return bt_tev_fail(ev, "no filter named '%.*s'", (int)f->name->n, f->name->s);
    }
    return bt_tev_call_func(ev, f->fn, v, &args, out);
}

/* A block whose text goes through filters: to a target, or to the output. */
static bool exec_text_block(struct tev *ev, const struct tnode *n)
{
    struct tscope *scope = new_scope(ev, ev->scope);
    struct tv v;

    if (scope == NULL || !capture(ev, n->c, scope, &v) ||
        !apply_filters(ev, n->type == N_SETBLOCK ? n->b : n->a, v, &v)) {
        return false;
    }
    return n->type == N_SETBLOCK ? bt_tev_assign(ev, n->a, v) : bt_tev_emit_value(ev, v);
}

static bool exec_scope(struct tev *ev, const struct tnode *n, enum tflow *flow)
{
    struct tscope *old = ev->scope, *scope = new_scope(ev, old);
    struct tv v;
    bool ok = scope != NULL;

    for (const struct tnode *set = n->a; ok && set != NULL; set = set->next) {
        ok = bt_tev_eval(ev, set->b, &v); /* values see the names outside */
        ev->scope = scope;
        ok = ok && bt_tev_assign(ev, set->a, v);
        ev->scope = old;
    }
    if (!ok) {
        return false;
    }
    ev->scope = scope;
    ok = bt_tev_exec(ev, n->c, flow);
    ev->scope = old;
    return ok;
}

static bool exec_if(struct tev *ev, const struct tnode *n, enum tflow *flow)
{
    struct tv cond;

    for (;; n = n->c) {
        if (!bt_tev_eval(ev, n->a, &cond)) {
            return false;
        }
        if (bt_tv_truth(cond)) {
            return bt_tev_exec(ev, n->b, flow);
        }
        if (n->op == 0) {
            return bt_tev_exec(ev, n->c, flow);
        }
    }
}

static bool exec_set(struct tev *ev, const struct tnode *n)
{
    struct tv v;

    return bt_tev_eval(ev, n->b, &v) && bt_tev_assign(ev, n->a, v);
}

static bool exec_node(struct tev *ev, const struct tnode *n, enum tflow *flow)
{
    struct tv v;

    switch ((enum tnode_type)n->type) {
    case N_TEXT:
        return bt_tev_emit(ev, n->val.s, n->val.n);
    case N_OUT:
        if (!bt_tev_eval(ev, n->a, &v)) {
            return false;
        }
        ev->at = n;
        return bt_tev_emit_value(ev, v);
    case N_IF:
        return exec_if(ev, n, flow);
    case N_FOR:
        return exec_for(ev, n, flow);
    case N_SET:
        return exec_set(ev, n);
    case N_SETBLOCK:
    case N_FILTERBLOCK:
        return exec_text_block(ev, n);
    case N_MACRO:
        return make_macro(ev, n, &v) && bt_tev_set_var(ev, n->name, v);
    case N_CALLBLOCK:
        return exec_call_block(ev, n);
    case N_WITH:
    case N_SCOPE:
        return exec_scope(ev, n, flow);
    case N_BREAK:
    case N_CONTINUE:
        *flow = n->type == N_BREAK ? FLOW_BREAK : FLOW_CONTINUE;
        return true;
    default:
        return bt_tev_fail(ev, "not a statement");
    }
}

bool bt_tev_exec(struct tev *ev, const struct tnode *list, enum tflow *flow)
{
    bool ok = true;

    *flow = FLOW_NEXT;
    if (ev->depth >= BT_TEMPLATE_DEPTH_MAX * 5) {
        return bt_tev_fail(ev, "nested too deeply");
    }
    ev->depth++;
    for (; ok && list != NULL && *flow == FLOW_NEXT; list = list->next) {
        ev->at = list;
        ok = bt_tev_steps(ev, 1) && exec_node(ev, list, flow);
    }
    ev->depth--;
    return ok;
}
