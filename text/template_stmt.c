/* Parser of chat templates, statements: everything between {% and %}, and the text and outputs
 * between them. */

#include "text/template_int.h"

#include <string.h>

static bool fail(struct tparse *p, enum bt_status st, const char *what, const struct ttok *tok)
{
    return bt_tlex_fail(&p->lx, st, tok->line, tok->col, "%s%s%.*s%s", what,
                        tok->type == TT_NAME ? " '" : "",
                        tok->type == TT_NAME ? (int)(tok->n < 60 ? tok->n : 60) : 0, tok->s,
                        tok->type == TT_NAME ? "'" : "");
}

static bool expect_word(struct tparse *p, const char *word)
{
    return bt_tparse_is_name(p, word) ? bt_tparse_advance(p) : bt_tparse_unexpected(p, word);
}

static bool expect_end(struct tparse *p)
{
    return p->cur.type == TT_BLOCK_END ? bt_tparse_advance(p)
                                       : bt_tparse_unexpected(p, "the end of the tag");
}

/* The body of a tag whose own end comes next, up to one of the words ends (NULL-terminated), at
 * which it stops. */
static bool parse_body_until(struct tparse *p, const char *const *ends, struct tnode **out)
{
    struct ttok start = p->cur;
    bool ok = true;

    if (!expect_end(p)) {
        return false;
    }
    *out = bt_tparse_body(p, &ok);
    if (!ok) {
        return false;
    }
    for (; *ends != NULL; ends++) {
        if (bt_tparse_is_name(p, *ends)) {
            return true;
        }
    }
    if (p->cur.type == TT_EOF) {
        return fail(p, BT_ERR_INVALID, "the template ends inside the statement that starts here",
                    &start);
    }
    return fail(p, p->cur.type == TT_NAME ? BT_ERR_UNSUPPORTED : BT_ERR_INVALID,
                "unknown or misplaced statement", &p->cur);
}

/* The same with a single end word, which is consumed. */
static bool parse_block(struct tparse *p, const char *end, struct tnode **out)
{
    const char *const ends[] = {end, NULL};

    return parse_body_until(p, ends, out) && bt_tparse_advance(p);
}

static struct tnode *parse_if(struct tparse *p)
{
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    struct tnode *top = NULL, *prev = NULL, **link = &top;

    do {
        struct tnode *n = bt_tparse_node(p, N_IF);

        if (n == NULL || !bt_tparse_advance(p) ||
            (n->a = bt_tparse_tuple(p, false, false)) == NULL) {
            return NULL;
        }
        *link = n;
        link = &n->c;
        if (prev != NULL) {
            prev->op = 1;
        }
        prev = n;
        p->soft++;
        if (!parse_body_until(p, ends, &n->b)) {
            return NULL;
        }
        p->soft--;
    } while (bt_tparse_is_name(p, "elif"));
    if (bt_tparse_is_name(p, "else")) {
        p->soft++;
        if (!bt_tparse_advance(p) || !parse_block(p, "endif", link)) {
            return NULL;
        }
        p->soft--;
        return top;
    }
    return bt_tparse_advance(p) ? top : NULL;
}

static struct tnode *parse_for(struct tparse *p)
{
    static const char *const ends[] = {"else", "endfor", NULL};
    struct tnode *n = bt_tparse_node(p, N_FOR);

    if (n == NULL || (n->name = bt_tparse_intern(p, "loop", 4)) == NULL || !bt_tparse_advance(p) ||
        (n->a = bt_tparse_target(p)) == NULL || !expect_word(p, "in") ||
        (n->b = bt_tparse_tuple(p, false, false)) == NULL) {
        return NULL;
    }
    if (bt_tparse_is_name(p, "if") &&
        (!bt_tparse_advance(p) || (n->e = bt_tparse_expr(p, true)) == NULL)) {
        return NULL;
    }
    if (bt_tparse_is_name(p, "recursive")) {
        n->op = 1;
        if (!bt_tparse_advance(p)) {
            return NULL;
        }
    }
    p->loop_depth++;
    if (!parse_body_until(p, ends, &n->c)) {
        return NULL;
    }
    p->loop_depth--;
    if (bt_tparse_is_name(p, "else")) {
        return bt_tparse_advance(p) && parse_block(p, "endfor", &n->d) ? n : NULL;
    }
    return bt_tparse_advance(p) ? n : NULL;
}

static struct tnode *parse_set(struct tparse *p)
{
    struct tnode *n = bt_tparse_node(p, N_SET);

    if (n == NULL || !bt_tparse_advance(p) || (n->a = bt_tparse_target(p)) == NULL) {
        return NULL;
    }
    if (bt_tparse_is_op(p, 'a')) {
        return bt_tparse_advance(p) && (n->b = bt_tparse_tuple(p, true, false)) != NULL ? n : NULL;
    }
    n->type = N_SETBLOCK;
    if (bt_tparse_is_op(p, '|') && (n->b = bt_tparse_filters(p, NULL, false)) == NULL) {
        return NULL;
    }
    return parse_block(p, "endset", &n->c) ? n : NULL;
}

/* At '(': the parameters of a macro or call block. */
static bool parse_params(struct tparse *p, struct tnode *macro)
{
    struct tnode **tail = &macro->a;
    bool defaults = false;

    if (!bt_tparse_expect_op(p, '(', "'('")) {
        return false;
    }
    while (!bt_tparse_is_op(p, ')')) {
        if (tail != &macro->a && !bt_tparse_expect_op(p, ',', "',' or ')'")) {
            return false;
        }
        if (p->cur.type != TT_NAME) {
            return bt_tparse_unexpected(p, "a parameter name");
        }
        if ((*tail = bt_tparse_node(p, N_PARAM)) == NULL ||
            ((*tail)->name = bt_tparse_intern(p, p->cur.s, p->cur.n)) == NULL ||
            !bt_tparse_advance(p)) {
            return false;
        }
        if (bt_tparse_is_op(p, 'a')) {
            defaults = true;
            if (!bt_tparse_advance(p) || ((*tail)->a = bt_tparse_expr(p, true)) == NULL) {
                return false;
            }
        } else if (defaults) {
            return fail(p, BT_ERR_INVALID, "parameter without default after one with a default",
                        &p->cur);
        }
        tail = &(*tail)->next;
    }
    return bt_tparse_advance(p);
}

/* Parameters (when with_params) and body of a macro-like block; break and continue cannot leave it.
 */
static bool parse_macro_rest(struct tparse *p, struct tnode *macro, bool with_params,
                             const char *end)
{
    struct tnode *outer = p->macro;
    uint32_t loop_depth = p->loop_depth;

    macro->d = outer;
    p->macro = macro;
    p->loop_depth = 0;
    if ((with_params && !parse_params(p, macro)) || !parse_block(p, end, &macro->c)) {
        return false;
    }
    p->macro = outer;
    p->loop_depth = loop_depth;
    return true;
}

static struct tnode *parse_macro(struct tparse *p)
{
    struct tnode *n = bt_tparse_node(p, N_MACRO);

    if (n == NULL || !bt_tparse_advance(p)) {
        return NULL;
    }
    if (p->cur.type != TT_NAME) {
        (void)bt_tparse_unexpected(p, "the macro's name");
        return NULL;
    }
    n->name = bt_tparse_intern(p, p->cur.s, p->cur.n);
    return n->name != NULL && bt_tparse_advance(p) && parse_macro_rest(p, n, true, "endmacro")
               ? n
               : NULL;
}

static struct tnode *parse_call_block(struct tparse *p)
{
    struct tnode *n = bt_tparse_node(p, N_CALLBLOCK), *body = bt_tparse_node(p, N_MACRO);

    if (n == NULL || body == NULL || !bt_tparse_advance(p)) {
        return NULL;
    }
    n->b = body;
    body->name = bt_tparse_intern(p, "caller", 6);
    if (body->name == NULL || (bt_tparse_is_op(p, '(') && !parse_params(p, body))) {
        return NULL;
    }
    n->a = bt_tparse_expr(p, true);
    if (n->a == NULL) {
        return NULL;
    }
    if (n->a->type != N_CALL) {
        (void)bt_tparse_unexpected(p, "a call");
        return NULL;
    }
    return parse_macro_rest(p, body, false, "endcall") ? n : NULL;
}

static struct tnode *parse_filter_block(struct tparse *p)
{
    struct tnode *n = bt_tparse_node(p, N_FILTERBLOCK);

    if (n == NULL || !bt_tparse_advance(p) || (n->a = bt_tparse_filters(p, NULL, true)) == NULL) {
        return NULL;
    }
    return parse_block(p, "endfilter", &n->c) ? n : NULL;
}

static struct tnode *parse_with(struct tparse *p)
{
    struct tnode *n = bt_tparse_node(p, N_WITH), **tail;

    if (n == NULL || !bt_tparse_advance(p)) {
        return NULL;
    }
    for (tail = &n->a; p->cur.type != TT_BLOCK_END; tail = &(*tail)->next) {
        if (tail != &n->a && !bt_tparse_expect_op(p, ',', "','")) {
            return NULL;
        }
        if ((*tail = bt_tparse_node(p, N_SET)) == NULL ||
            ((*tail)->a = bt_tparse_target(p)) == NULL || !bt_tparse_expect_op(p, 'a', "'='") ||
            ((*tail)->b = bt_tparse_expr(p, true)) == NULL) {
            return NULL;
        }
    }
    return parse_block(p, "endwith", &n->c) ? n : NULL;
}

/* transformers marks what the assistant wrote with this block; the text is the same, names set
 * inside stay inside. */
static struct tnode *parse_generation(struct tparse *p)
{
    struct tnode *n = bt_tparse_node(p, N_SCOPE);
    uint32_t loop_depth = p->loop_depth;

    if (n == NULL || !bt_tparse_advance(p)) {
        return NULL;
    }
    p->loop_depth = 0;
    if (!parse_block(p, "endgeneration", &n->c)) {
        return NULL;
    }
    p->loop_depth = loop_depth;
    return n;
}

static struct tnode *parse_print(struct tparse *p)
{
    struct tnode *n = bt_tparse_node(p, N_OUT);

    return n != NULL && bt_tparse_advance(p) && (n->a = bt_tparse_expr(p, true)) != NULL ? n : NULL;
}

static struct tnode *parse_jump(struct tparse *p)
{
    struct tnode *n = bt_tparse_node(p, bt_tparse_is_name(p, "break") ? N_BREAK : N_CONTINUE);

    if (n != NULL && p->loop_depth == 0) {
        (void)fail(p, BT_ERR_INVALID, "outside of a loop:", &p->cur);
        return NULL;
    }
    return n != NULL && bt_tparse_advance(p) ? n : NULL;
}

static const struct {
    const char *word;
    struct tnode *(*parse)(struct tparse *p);
} statements[] = {
    {"if", parse_if},           {"for", parse_for},
    {"set", parse_set},         {"macro", parse_macro},
    {"call", parse_call_block}, {"filter", parse_filter_block},
    {"with", parse_with},       {"break", parse_jump},
    {"continue", parse_jump},   {"generation", parse_generation},
    {"print", parse_print},
};

static struct tnode *parse_statement(struct tparse *p, bool *known)
{
    *known = true;
    for (size_t i = 0; i < sizeof statements / sizeof statements[0]; i++) {
        if (bt_tparse_is_name(p, statements[i].word)) {
            struct tnode *n = statements[i].parse(p);

            return n != NULL && expect_end(p) ? n : NULL;
        }
    }
    *known = false;
    return NULL;
}

static struct tnode *parse_output(struct tparse *p)
{
    struct tnode *n = bt_tparse_node(p, N_OUT);

    if (n == NULL || !bt_tparse_advance(p)) {
        return NULL;
    }
    n->line = p->cur.line;
    n->col = p->cur.col;
    if ((n->a = bt_tparse_tuple(p, true, false)) == NULL) {
        return NULL;
    }
    if (p->cur.type != TT_VAR_END) {
        (void)bt_tparse_unexpected(p, "the end of the output");
        return NULL;
    }
    return bt_tparse_advance(p) ? n : NULL;
}

static struct tnode *parse_text(struct tparse *p)
{
    struct tnode *n = bt_tparse_node(p, N_TEXT);

    if (n == NULL) {
        return NULL;
    }
    n->val = tv_str(p->cur.s, p->cur.n);
    return bt_tparse_advance(p) ? n : NULL;
}

/* Statements up to the end of the text or a tag that is none: then the current token is that tag's
 * first word. */
struct tnode *bt_tparse_body(struct tparse *p, bool *ok)
{
    struct tnode *first = NULL, **tail = &first;
    bool known = true;

    *ok = false;
    if (!bt_tparse_enter(p)) {
        return NULL;
    }
    while (p->cur.type != TT_EOF) {
        if (p->cur.type == TT_DATA) {
            *tail = parse_text(p);
        } else if (p->cur.type == TT_VAR_BEGIN) {
            *tail = parse_output(p);
        } else if (!bt_tparse_advance(p)) {
            return NULL;
        } else {
            *tail = parse_statement(p, &known);
        }
        if (!known) {
            break;
        }
        if (*tail == NULL) {
            return NULL;
        }
        tail = &(*tail)->next;
    }
    p->depth--;
    *ok = true;
    return first;
}
