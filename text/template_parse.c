/* Parser of chat templates, expressions: precedence climbing exactly as Jinja's grammar has it (a
 * filter binds tighter than an operator, `not` looser than a comparison). Builds nodes in the
 * template's arena; evaluates nothing. */

#include "text/template_int.h"

#include <string.h>

static struct tnode *parse_or(struct tparse *p);
static struct tnode *parse_unary(struct tparse *p, bool with_filter);

static bool fail(struct tparse *p, enum bt_status st, const char *what, const char *s, size_t n)
{
    return bt_tlex_fail(&p->lx, st, p->cur.line, p->cur.col, "%s%s%.*s%s", what, n > 0 ? " '" : "",
                        (int)(n < 60 ? n : 60), s, n > 0 ? "'" : "");
}

bool bt_tparse_unexpected(struct tparse *p, const char *wanted)
{
    char what[96] = "expected ";
    bool names = p->cur.type == TT_NAME || p->cur.type == TT_OP;

    strncat(what, wanted, sizeof what - 16);
    strncat(what, names ? ", got" : "", sizeof what - strlen(what) - 1);
    return fail(p, BT_ERR_INVALID, what, p->cur.s, names ? p->cur.n : 0);
}

bool bt_tparse_advance(struct tparse *p)
{
    if (p->has_ahead) {
        p->cur = p->ahead;
        p->has_ahead = false;
        return true;
    }
    return bt_tlex_next(&p->lx, &p->cur);
}

bool bt_tparse_look(struct tparse *p, struct ttok *tok)
{
    if (!p->has_ahead) {
        if (!bt_tlex_next(&p->lx, &p->ahead)) {
            return false;
        }
        p->has_ahead = true;
    }
    *tok = p->ahead;
    return true;
}

static bool tok_is_name(const struct ttok *t, const char *name)
{
    return t->type == TT_NAME && t->n == strlen(name) && memcmp(t->s, name, t->n) == 0;
}

bool bt_tparse_is_name(const struct tparse *p, const char *name)
{
    return tok_is_name(&p->cur, name);
}

bool bt_tparse_is_op(const struct tparse *p, char op)
{
    return p->cur.type == TT_OP && p->cur.op == op;
}

bool bt_tparse_expect_op(struct tparse *p, char op, const char *what)
{
    return bt_tparse_is_op(p, op) ? bt_tparse_advance(p) : bt_tparse_unexpected(p, what);
}

struct tnode *bt_tparse_node(struct tparse *p, enum tnode_type type)
{
    struct tnode *n = bt_arena_zalloc(p->arena, sizeof *n);

    if (n == NULL) {
        (void)fail(p, BT_ERR_NOMEM, "out of memory", "", 0);
        return NULL;
    }
    n->type = (uint8_t)type;
    n->line = p->cur.line;
    n->col = p->cur.col;
    return n;
}

const struct tname *bt_tparse_intern(struct tparse *p, const char *s, size_t n)
{
    size_t h = n;
    struct tname *name;

    for (size_t i = 0; i < n; i++) {
        h = h * 31 + (unsigned char)s[i];
    }
    h %= sizeof p->names / sizeof p->names[0];
    for (name = p->names[h]; name != NULL; name = name->next) {
        if (name->n == n && memcmp(name->s, s, n) == 0) {
            return name;
        }
    }
    name = bt_arena_alloc(p->arena, sizeof *name);
    if (name == NULL) {
        (void)fail(p, BT_ERR_NOMEM, "out of memory", "", 0);
        return NULL;
    }
    *name = (struct tname){.s = s, .n = (uint32_t)n, .next = p->names[h]};
    p->names[h] = name;
    return name;
}

bool bt_tparse_enter(struct tparse *p)
{
    if (p->depth >= BT_TEMPLATE_DEPTH_MAX) {
        return fail(p, BT_ERR_INVALID, "nested too deeply", "", 0);
    }
    p->depth++;
    return true;
}

/* A node made at the current token, with its first child. */
static struct tnode *unary(struct tparse *p, enum tnode_type type, struct tnode *a)
{
    struct tnode *n = a != NULL ? bt_tparse_node(p, type) : NULL;

    if (n != NULL) {
        n->a = a;
        n->line = a->line;
        n->col = a->col;
    }
    return n;
}

static struct tnode *named(struct tparse *p, enum tnode_type type)
{
    struct tnode *n = bt_tparse_node(p, type);

    if (n == NULL || (n->name = bt_tparse_intern(p, p->cur.s, p->cur.n)) == NULL ||
        !bt_tparse_advance(p)) {
        return NULL;
    }
    return n;
}

/* Tells the macros being parsed which of the special names their bodies use. */
static bool note_special(struct tparse *p)
{
    static const char *const special[] = {"varargs", "kwargs", "caller"};

    for (uint8_t i = 0; i < 3; i++) {
        if (!bt_tparse_is_name(p, special[i])) {
            continue;
        }
        for (struct tnode *m = p->macro; m != NULL; m = m->d) {
            struct tnode *n;

            if ((m->op & (1u << i)) != 0) {
                continue;
            }
            n = bt_tparse_node(p, N_NAME);
            if (n == NULL ||
                (n->name = bt_tparse_intern(p, special[i], strlen(special[i]))) == NULL) {
                return false;
            }
            n->op = i;
            n->next = m->b;
            m->b = n;
            m->op |= (uint8_t)(1u << i);
        }
    }
    return true;
}

static struct tnode *parse_name(struct tparse *p)
{
    static const struct {
        const char *word;
        uint8_t type;
        bool b;
    } consts[] = {{"true", TV_BOOL, true},   {"True", TV_BOOL, true},  {"false", TV_BOOL, false},
                  {"False", TV_BOOL, false}, {"none", TV_NONE, false}, {"None", TV_NONE, false}};

    for (size_t i = 0; i < sizeof consts / sizeof consts[0]; i++) {
        if (bt_tparse_is_name(p, consts[i].word)) {
            struct tnode *n = bt_tparse_node(p, N_CONST);

            if (n == NULL || !bt_tparse_advance(p)) {
                return NULL;
            }
            n->val = consts[i].type == TV_NONE ? tv_none() : tv_bool(consts[i].b);
            return n;
        }
    }
    return note_special(p) ? named(p, N_NAME) : NULL;
}

/* Adjacent literals are one string. */
static struct tnode *parse_string(struct tparse *p)
{
    struct tnode *n = bt_tparse_node(p, N_CONST);

    if (n == NULL) {
        return NULL;
    }
    n->val = tv_str(p->cur.s, p->cur.n);
    for (;;) {
        char *joined;

        if (!bt_tparse_advance(p)) {
            return NULL;
        }
        if (p->cur.type != TT_STR) {
            return n;
        }
        joined = bt_arena_alloc(p->arena, n->val.n + p->cur.n + 1);
        if (joined == NULL) {
            (void)fail(p, BT_ERR_NOMEM, "out of memory", "", 0);
            return NULL;
        }
        memcpy(joined, n->val.s, n->val.n);
        memcpy(joined + n->val.n, p->cur.s, p->cur.n);
        n->val = tv_str(joined, n->val.n + p->cur.n);
    }
}

static struct tnode *parse_list(struct tparse *p)
{
    struct tnode *n = bt_tparse_node(p, N_LIST), **tail;

    if (n == NULL || !bt_tparse_advance(p)) {
        return NULL;
    }
    for (tail = &n->a; !bt_tparse_is_op(p, ']'); tail = &(*tail)->next) {
        if (tail != &n->a && !bt_tparse_expect_op(p, ',', "',' or ']'")) {
            return NULL;
        }
        if (bt_tparse_is_op(p, ']')) {
            break;
        }
        if ((*tail = bt_tparse_expr(p, true)) == NULL) {
            return NULL;
        }
    }
    return bt_tparse_advance(p) ? n : NULL;
}

static struct tnode *parse_dict(struct tparse *p)
{
    struct tnode *n = bt_tparse_node(p, N_DICT), **tail;

    if (n == NULL || !bt_tparse_advance(p)) {
        return NULL;
    }
    for (tail = &n->a; !bt_tparse_is_op(p, '}'); tail = &(*tail)->next) {
        if (tail != &n->a && !bt_tparse_expect_op(p, ',', "',' or '}'")) {
            return NULL;
        }
        if (bt_tparse_is_op(p, '}')) {
            break;
        }
        if ((*tail = unary(p, N_PAIR, bt_tparse_expr(p, true))) == NULL ||
            !bt_tparse_expect_op(p, ':', "':'") || ((*tail)->b = bt_tparse_expr(p, true)) == NULL) {
            return NULL;
        }
    }
    return bt_tparse_advance(p) ? n : NULL;
}

static struct tnode *parse_primary(struct tparse *p)
{
    struct tnode *n;

    switch (p->cur.type) {
    case TT_NAME:
        return parse_name(p);
    case TT_STR:
        return parse_string(p);
    case TT_INT:
    case TT_FLOAT:
        if ((n = bt_tparse_node(p, N_CONST)) == NULL) {
            return NULL;
        }
        n->val = p->cur.type == TT_INT ? tv_int(p->cur.i) : tv_float(p->cur.f);
        return bt_tparse_advance(p) ? n : NULL;
    case TT_OP:
        if (p->cur.op == '(') {
            if (!bt_tparse_advance(p) || (n = bt_tparse_tuple(p, true, true)) == NULL) {
                return NULL;
            }
            return bt_tparse_expect_op(p, ')', "')'") ? n : NULL;
        }
        if (p->cur.op == '[') {
            return parse_list(p);
        }
        if (p->cur.op == '{') {
            return parse_dict(p);
        }
        break;
    default:
        break;
    }
    (void)bt_tparse_unexpected(p, "an expression");
    return NULL;
}

/* One optional part of a slice: up to ':' or the end of the subscript. */
static bool slice_part(struct tparse *p, struct tnode **out)
{
    if (bt_tparse_is_op(p, ':') || bt_tparse_is_op(p, ']') || bt_tparse_is_op(p, ',')) {
        return true;
    }
    return (*out = bt_tparse_expr(p, true)) != NULL;
}

static struct tnode *parse_subscribed(struct tparse *p)
{
    struct tnode *first = NULL, *n;

    if (!slice_part(p, &first)) {
        return NULL;
    }
    if (first != NULL && !bt_tparse_is_op(p, ':')) {
        return first;
    }
    n = bt_tparse_node(p, N_SLICE);
    if (n == NULL || !bt_tparse_expect_op(p, ':', "':'")) {
        return NULL;
    }
    n->a = first;
    if (!slice_part(p, &n->b)) {
        return NULL;
    }
    if (bt_tparse_is_op(p, ':') && (!bt_tparse_advance(p) || !slice_part(p, &n->c))) {
        return NULL;
    }
    return n;
}

static struct tnode *parse_subscript(struct tparse *p, struct tnode *obj)
{
    struct tnode *n;

    if (bt_tparse_is_op(p, '.')) {
        if (!bt_tparse_advance(p)) {
            return NULL;
        }
        if (p->cur.type == TT_NAME) {
            n = named(p, N_ATTR);
        } else if (p->cur.type == TT_INT) {
            n = bt_tparse_node(p, N_ITEM);
            if (n != NULL && (n->b = parse_primary(p)) == NULL) {
                return NULL;
            }
        } else {
            (void)bt_tparse_unexpected(p, "a name or number after '.'");
            return NULL;
        }
    } else {
        n = bt_tparse_node(p, N_ITEM);
        if (n == NULL || !bt_tparse_advance(p) || (n->b = parse_subscribed(p)) == NULL ||
            !bt_tparse_expect_op(p, ']', "']'")) {
            return NULL;
        }
    }
    if (n != NULL) {
        n->a = obj;
    }
    return n;
}

static struct tnode *parse_arg(struct tparse *p)
{
    struct tnode *n = bt_tparse_node(p, N_ARG);
    struct ttok ahead;

    if (n == NULL) {
        return NULL;
    }
    if (bt_tparse_is_op(p, '*') || bt_tparse_is_op(p, 'p')) {
        n->op = (uint8_t)p->cur.op;
        if (!bt_tparse_advance(p)) {
            return NULL;
        }
    } else if (p->cur.type == TT_NAME) {
        if (!bt_tparse_look(p, &ahead)) {
            return NULL;
        }
        if (ahead.type == TT_OP && ahead.op == 'a') {
            n->name = bt_tparse_intern(p, p->cur.s, p->cur.n);
            if (n->name == NULL || !bt_tparse_advance(p) || !bt_tparse_advance(p)) {
                return NULL;
            }
        }
    }
    return (n->a = bt_tparse_expr(p, true)) != NULL ? n : NULL;
}

/* 0: positional, 1: keyword, … in the order in which they may follow each other. */
static int arg_rank(const struct tnode *arg)
{
    return arg->op == 'p' ? 3 : arg->op == '*' ? 2 : arg->name != NULL ? 1 : 0;
}

/* At '('. */
static bool parse_args(struct tparse *p, struct tnode **out)
{
    struct tnode **tail = out, *last = NULL;

    if (!bt_tparse_advance(p)) {
        return false;
    }
    while (!bt_tparse_is_op(p, ')')) {
        if (last != NULL) {
            if (!bt_tparse_expect_op(p, ',', "',' or ')'")) {
                return false;
            }
            if (bt_tparse_is_op(p, ')')) {
                break;
            }
        }
        if ((*tail = parse_arg(p)) == NULL) {
            return false;
        }
        if (last != NULL && (arg_rank(*tail) < arg_rank(last) ||
                             (arg_rank(last) > 1 && arg_rank(*tail) == arg_rank(last)))) {
            return fail(p, BT_ERR_INVALID, "arguments of a call in the wrong order", "", 0);
        }
        last = *tail;
        tail = &last->next;
    }
    return bt_tparse_advance(p);
}

static struct tnode *parse_call(struct tparse *p, struct tnode *callee)
{
    struct tnode *n = bt_tparse_node(p, N_CALL);

    if (n == NULL || !parse_args(p, &n->b)) {
        return NULL;
    }
    n->a = callee;
    return n;
}

static struct tnode *parse_postfix(struct tparse *p, struct tnode *n)
{
    for (uint32_t links = 0; n != NULL; links++) {
        if (links >= BT_TEMPLATE_DEPTH_MAX) {
            (void)fail(p, BT_ERR_INVALID, "expression too long", "", 0);
            return NULL;
        }
        if (bt_tparse_is_op(p, '.') || bt_tparse_is_op(p, '[')) {
            n = parse_subscript(p, n);
        } else if (bt_tparse_is_op(p, '(')) {
            n = parse_call(p, n);
        } else {
            break;
        }
    }
    return n;
}

/* The name of a filter or test in n, and its function; unknown ones are refused here unless an if
 * guards them. */
static bool find_fn(struct tparse *p, struct tnode *n, const char *what)
{
    n->name = bt_tparse_intern(p, p->cur.s, p->cur.n);
    if (n->name == NULL) {
        return false;
    }
    n->fn = n->type == N_FILTER ? bt_tfilter_find(n->name->s, n->name->n)
                                : bt_ttest_find(n->name->s, n->name->n);
    if (n->fn == NULL && p->soft == 0) {
        return fail(p, BT_ERR_UNSUPPORTED, what, p->cur.s, p->cur.n);
    }
    return bt_tparse_advance(p);
}

struct tnode *bt_tparse_filters(struct tparse *p, struct tnode *value, bool bare_first)
{
    struct tnode *n = value;

    for (uint32_t links = 0; bare_first || bt_tparse_is_op(p, '|'); links++, bare_first = false) {
        if (!bare_first && !bt_tparse_advance(p)) {
            return NULL;
        }
        if (p->cur.type != TT_NAME || links >= BT_TEMPLATE_DEPTH_MAX) {
            (void)bt_tparse_unexpected(p, "the name of a filter");
            return NULL;
        }
        struct tnode *f = bt_tparse_node(p, N_FILTER);
        if (f == NULL || !find_fn(p, f, "no filter named")) {
            return NULL;
        }
        f->a = n;
        n = f;
        if (bt_tparse_is_op(p, '(') && !parse_args(p, &n->b)) {
            return NULL;
        }
    }
    return n;
}

/* Does the current token start the bare argument of a test, as in `is divisibleby 3`? */
static bool starts_test_arg(const struct tparse *p)
{
    switch (p->cur.type) {
    case TT_NAME:
        return !bt_tparse_is_name(p, "else") && !bt_tparse_is_name(p, "or") &&
               !bt_tparse_is_name(p, "and");
    case TT_STR:
    case TT_INT:
    case TT_FLOAT:
        return true;
    default:
        return bt_tparse_is_op(p, '[') || bt_tparse_is_op(p, '{');
    }
}

static struct tnode *parse_test_arg(struct tparse *p)
{
    struct tnode *arg;

    if (bt_tparse_is_name(p, "is")) {
        (void)fail(p, BT_ERR_INVALID, "tests with 'is' cannot be chained", "", 0);
        return NULL;
    }
    arg = bt_tparse_node(p, N_ARG);
    if (arg != NULL) {
        arg->a = parse_postfix(p, parse_primary(p));
    }
    return arg != NULL && arg->a != NULL ? arg : NULL;
}

/* At `is`. */
static struct tnode *parse_test(struct tparse *p, struct tnode *value)
{
    bool negated;
    struct tnode *n;

    if (!bt_tparse_advance(p)) {
        return NULL;
    }
    negated = bt_tparse_is_name(p, "not");
    if (negated && !bt_tparse_advance(p)) {
        return NULL;
    }
    if (p->cur.type != TT_NAME) {
        (void)bt_tparse_unexpected(p, "the name of a test");
        return NULL;
    }
    n = bt_tparse_node(p, N_TEST);
    if (n == NULL || !find_fn(p, n, "no test named")) {
        return NULL;
    }
    n->a = value;
    if (bt_tparse_is_op(p, '(')) {
        if (!parse_args(p, &n->b)) {
            return NULL;
        }
    } else if (starts_test_arg(p) && (n->b = parse_test_arg(p)) == NULL) {
        return NULL;
    }
    return negated ? unary(p, N_NOT, n) : n;
}

static struct tnode *parse_filter_expr(struct tparse *p, struct tnode *n)
{
    for (uint32_t links = 0; n != NULL; links++) {
        if (links >= BT_TEMPLATE_DEPTH_MAX) {
            (void)fail(p, BT_ERR_INVALID, "expression too long", "", 0);
            return NULL;
        }
        if (bt_tparse_is_op(p, '|')) {
            n = bt_tparse_filters(p, n, false);
        } else if (bt_tparse_is_name(p, "is")) {
            n = parse_test(p, n);
        } else if (bt_tparse_is_op(p, '(')) {
            n = parse_call(p, n);
        } else {
            break;
        }
    }
    return n;
}

static struct tnode *parse_sign(struct tparse *p)
{
    struct tnode *n = bt_tparse_node(p, bt_tparse_is_op(p, '-') ? N_NEG : N_POS);

    if (n == NULL || !bt_tparse_enter(p)) {
        return NULL;
    }
    if (!bt_tparse_advance(p) || (n->a = parse_unary(p, false)) == NULL) {
        return NULL;
    }
    p->depth--;
    return n;
}

static struct tnode *parse_unary(struct tparse *p, bool with_filter)
{
    struct tnode *n =
        bt_tparse_is_op(p, '-') || bt_tparse_is_op(p, '+') ? parse_sign(p) : parse_primary(p);

    n = parse_postfix(p, n);
    return with_filter ? parse_filter_expr(p, n) : n;
}

typedef struct tnode *parse_fn(struct tparse *p);

static struct tnode *parse_operand(struct tparse *p)
{
    return parse_unary(p, true);
}

/* Left-associative binary operators, each one of the characters of ops. */
static struct tnode *parse_left(struct tparse *p, parse_fn *operand, const char *ops)
{
    struct tnode *n = operand(p);

    for (uint32_t links = 0; n != NULL && p->cur.type == TT_OP && strchr(ops, p->cur.op) != NULL;
         links++) {
        struct tnode *bin = bt_tparse_node(p, N_BIN);

        if (bin == NULL || links >= BT_TEMPLATE_DEPTH_MAX) {
            (void)fail(p, BT_ERR_INVALID, "expression too long", "", 0);
            return NULL;
        }
        bin->op = (uint8_t)p->cur.op;
        bin->a = n;
        if (!bt_tparse_advance(p) || (bin->b = operand(p)) == NULL) {
            return NULL;
        }
        n = bin;
    }
    return n;
}

static struct tnode *parse_pow(struct tparse *p)
{
    return parse_left(p, parse_operand, "p");
}

static struct tnode *parse_product(struct tparse *p)
{
    return parse_left(p, parse_pow, "*/f%");
}

static struct tnode *parse_concat(struct tparse *p)
{
    struct tnode *n = parse_product(p), *last = n;

    if (n == NULL || !bt_tparse_is_op(p, '~')) {
        return n;
    }
    n = unary(p, N_CONCAT, n);
    while (n != NULL && bt_tparse_is_op(p, '~')) {
        if (!bt_tparse_advance(p) || (last->next = parse_product(p)) == NULL) {
            return NULL;
        }
        last = last->next;
    }
    return n;
}

static struct tnode *parse_sum(struct tparse *p)
{
    return parse_left(p, parse_concat, "+-");
}

/* The comparison operator at the current token, consumed; 0: none; -1: error. */
static int compare_op(struct tparse *p)
{
    struct ttok ahead;
    int op = 0;

    if (p->cur.type == TT_OP && strchr("=!<>lg", p->cur.op) != NULL) {
        op = p->cur.op;
    } else if (bt_tparse_is_name(p, "in")) {
        op = 'i';
    } else if (bt_tparse_is_name(p, "not")) {
        if (!bt_tparse_look(p, &ahead)) {
            return -1;
        }
        if (!tok_is_name(&ahead, "in")) {
            return 0;
        }
        if (!bt_tparse_advance(p)) {
            return -1;
        }
        op = 'n';
    }
    return op == 0 || bt_tparse_advance(p) ? op : -1;
}

static struct tnode *parse_compare(struct tparse *p)
{
    struct tnode *first = parse_sum(p), *n = NULL, **tail = NULL;

    while (first != NULL) {
        struct tnode *cmp;
        int op = compare_op(p);

        if (op <= 0) {
            return op < 0 ? NULL : n != NULL ? n : first;
        }
        if (n == NULL) {
            n = unary(p, N_COMPARE, first);
            if (n == NULL) {
                return NULL;
            }
            tail = &n->b;
        }
        cmp = unary(p, N_CMP, parse_sum(p));
        if (cmp == NULL) {
            return NULL;
        }
        cmp->op = (uint8_t)op;
        *tail = cmp;
        tail = &cmp->next;
    }
    return NULL;
}

static struct tnode *parse_not(struct tparse *p)
{
    struct tnode *n;

    if (!bt_tparse_is_name(p, "not")) {
        return parse_compare(p);
    }
    n = bt_tparse_node(p, N_NOT);
    if (n == NULL || !bt_tparse_enter(p) || !bt_tparse_advance(p) ||
        (n->a = parse_not(p)) == NULL) {
        return NULL;
    }
    p->depth--;
    return n;
}

static struct tnode *parse_bool(struct tparse *p, parse_fn *operand, const char *word,
                                enum tnode_type type)
{
    struct tnode *n = operand(p);

    for (uint32_t links = 0; n != NULL && bt_tparse_is_name(p, word); links++) {
        if (links >= BT_TEMPLATE_DEPTH_MAX) {
            (void)fail(p, BT_ERR_INVALID, "expression too long", "", 0);
            return NULL;
        }
        n = unary(p, type, n);
        if (n == NULL || !bt_tparse_advance(p) || (n->b = operand(p)) == NULL) {
            return NULL;
        }
    }
    return n;
}

static struct tnode *parse_and(struct tparse *p)
{
    return parse_bool(p, parse_not, "and", N_AND);
}

static struct tnode *parse_or(struct tparse *p)
{
    return parse_bool(p, parse_and, "or", N_OR);
}

struct tnode *bt_tparse_expr(struct tparse *p, bool with_cond)
{
    struct tnode *n;

    if (!bt_tparse_enter(p)) {
        return NULL;
    }
    n = parse_or(p);
    for (uint32_t links = 0; with_cond && n != NULL && bt_tparse_is_name(p, "if"); links++) {
        if (links >= BT_TEMPLATE_DEPTH_MAX) {
            (void)fail(p, BT_ERR_INVALID, "expression too long", "", 0);
            return NULL;
        }
        n = unary(p, N_COND, n);
        if (n == NULL || !bt_tparse_advance(p) || (n->b = parse_or(p)) == NULL) {
            return NULL;
        }
        if (bt_tparse_is_name(p, "else") &&
            (!bt_tparse_advance(p) || (n->c = bt_tparse_expr(p, true)) == NULL)) {
            return NULL;
        }
    }
    p->depth--;
    return n;
}

static bool tuple_ends(const struct tparse *p)
{
    return p->cur.type == TT_VAR_END || p->cur.type == TT_BLOCK_END || bt_tparse_is_op(p, ')') ||
           bt_tparse_is_name(p, "in") || bt_tparse_is_name(p, "recursive");
}

struct tnode *bt_tparse_tuple(struct tparse *p, bool with_cond, bool in_parens)
{
    struct tnode *n = bt_tparse_node(p, N_TUPLE), **tail;

    if (n == NULL) {
        return NULL;
    }
    if (tuple_ends(p) && !in_parens) {
        (void)bt_tparse_unexpected(p, "an expression");
        return NULL;
    }
    for (tail = &n->a; !tuple_ends(p); tail = &(*tail)->next) {
        if ((*tail = bt_tparse_expr(p, with_cond)) == NULL) {
            return NULL;
        }
        if (!bt_tparse_is_op(p, ',')) {
            return tail == &n->a ? n->a : n;
        }
        if (!bt_tparse_advance(p)) {
            return NULL;
        }
    }
    return n;
}

/* A name, or the attribute of a namespace. */
static struct tnode *parse_target_name(struct tparse *p)
{
    struct tnode *n;

    if (p->cur.type != TT_NAME) {
        (void)bt_tparse_unexpected(p, "a name to assign to");
        return NULL;
    }
    for (const char *const *w =
             (const char *const[]){"true", "false", "none", "True", "False", "None", NULL};
         *w != NULL; w++) {
        if (bt_tparse_is_name(p, *w)) {
            (void)bt_tparse_unexpected(p, "a name to assign to");
            return NULL;
        }
    }
    n = named(p, N_NAME);
    if (n != NULL && bt_tparse_is_op(p, '.')) {
        n->type = N_NSREF;
        if (!bt_tparse_advance(p)) {
            return NULL;
        }
        if (p->cur.type != TT_NAME) {
            (void)bt_tparse_unexpected(p, "an attribute name");
            return NULL;
        }
        n->val = tv_str(p->cur.s, p->cur.n);
        return bt_tparse_advance(p) ? n : NULL;
    }
    return n;
}

struct tnode *bt_tparse_target(struct tparse *p)
{
    struct tnode *n = bt_tparse_node(p, N_TUPLE), **tail;

    if (n == NULL || !bt_tparse_enter(p)) {
        return NULL;
    }
    for (tail = &n->a; tail == &n->a || !(tuple_ends(p) || bt_tparse_is_op(p, 'a'));
         tail = &(*tail)->next) {
        if (bt_tparse_is_op(p, '(')) {
            if (!bt_tparse_advance(p) || (*tail = bt_tparse_target(p)) == NULL ||
                !bt_tparse_expect_op(p, ')', "')'")) {
                return NULL;
            }
        } else if ((*tail = parse_target_name(p)) == NULL) {
            return NULL;
        }
        if (!bt_tparse_is_op(p, ',')) {
            p->depth--;
            return tail == &n->a ? n->a : n;
        }
        if (!bt_tparse_advance(p)) {
            return NULL;
        }
    }
    p->depth--;
    return n;
}
