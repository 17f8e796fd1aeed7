#ifndef BT_TEXT_TEMPLATE_INT_H
#define BT_TEXT_TEMPLATE_INT_H

/* Shared by the template's own files: tokens, syntax tree, values, evaluator. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/arena.h"
#include "base/buf.h"
#include "base/status.h"
#include "text/template.h"

struct json_t;
struct tev;
struct tnode;

/* ---- values ---- */

enum tv_type {
    TV_UNDEF, /* kind: enum undef_kind; s, n: what was asked for */
    TV_NONE,
    TV_BOOL,
    TV_INT,
    TV_FLOAT,
    TV_STR,  /* s, n: UTF-8, in the arena, the template or the caller's input */
    TV_LIST, /* kind: enum list_kind */
    TV_DICT,
    TV_NS,     /* namespace(): the only value that changes */
    TV_LOOP,   /* the `loop` variable */
    TV_FUNC,   /* a global function; fn */
    TV_METHOD, /* a method bound to its object; m */
    TV_MACRO,  /* a macro or a call block's body */
};

enum undef_kind { UNDEF_NAME, UNDEF_ATTR, UNDEF_UNSAFE, UNDEF_ITEM, UNDEF_PARAM, UNDEF_OTHER };

/* A view is what dict.items() gives: no index. An iterator (from select, map, …) is used up by
 * reading it. */
enum list_kind { LIST_LIST, LIST_TUPLE, LIST_RANGE, LIST_VIEW, LIST_ITER };

struct tv {
    uint8_t type;
    uint8_t kind;
    uint32_t n; /* bytes of s */
    union {
        bool b;
        int64_t i;
        double f;
        const char *s;
        struct tlist *list;
        struct tdict *dict;
        struct tloop *loop;
        struct tmacro *macro;
        struct tmethod *m;
        const struct tfunc *fn;
    };
};

struct tlist {
    struct tv *items;
    uint32_t n;
    uint32_t cap;
    uint32_t pos; /* LIST_ITER: items already taken */
};

struct tentry {
    struct tv key;
    struct tv value;
};

struct tdict {
    struct tentry *e; /* in insertion order */
    uint32_t n;
    uint32_t cap;
};

struct tkw {
    const char *name;
    uint32_t len;
    struct tv value;
};

struct targs {
    struct tv *pos;
    uint32_t n_pos;
    struct tkw *kw;
    uint32_t n_kw;
};

#define TFUNC_ARGS_MAX 6

/* One function, filter, test or method. params lists its parameter names separated by commas, the
 * first n_required of which must be given; missing ones arrive as TV_UNDEF of kind UNDEF_PARAM.
 * params NULL: the function reads raw itself. self: the filtered, tested or owning value. */
struct tfunc {
    const char *name;
    bool (*fn)(struct tev *ev, struct tv self, const struct tv *a, const struct targs *raw,
               struct tv *out);
    const char *params;
    uint8_t n_required;
};

struct tmethod {
    struct tv self;
    const struct tfunc *fn;
};

static inline struct tv tv_undef(enum undef_kind kind, const char *s, size_t n)
{
    return (struct tv){.type = TV_UNDEF, .kind = (uint8_t)kind, .n = (uint32_t)n, .s = s};
}
static inline struct tv tv_none(void)
{
    return (struct tv){.type = TV_NONE};
}
static inline struct tv tv_bool(bool b)
{
    return (struct tv){.type = TV_BOOL, .b = b};
}
static inline struct tv tv_int(int64_t i)
{
    return (struct tv){.type = TV_INT, .i = i};
}
static inline struct tv tv_float(double f)
{
    return (struct tv){.type = TV_FLOAT, .f = f};
}
static inline struct tv tv_str(const char *s, size_t n)
{
    return (struct tv){.type = TV_STR, .n = (uint32_t)n, .s = s};
}
static inline struct tv tv_list(enum list_kind kind, struct tlist *l)
{
    return (struct tv){.type = TV_LIST, .kind = (uint8_t)kind, .list = l};
}
static inline struct tv tv_dict(struct tdict *d)
{
    return (struct tv){.type = TV_DICT, .dict = d};
}
static inline bool tv_missing(struct tv v)
{
    return v.type == TV_UNDEF && v.kind == UNDEF_PARAM;
}
bool tv_is(struct tv v, const char *s); /* a string equal to s */

/* ---- syntax tree ---- */

enum tnode_type {
    /* expressions */
    N_CONST,  /* val */
    N_NAME,   /* name */
    N_TUPLE,  /* a: items */
    N_LIST,   /* a: items */
    N_DICT,   /* a: N_PAIR list */
    N_PAIR,   /* a: key, b: value */
    N_ATTR,   /* a: object, name */
    N_ITEM,   /* a: object, b: index or N_SLICE */
    N_SLICE,  /* a, b, c: start, stop, step; each may be NULL */
    N_CALL,   /* a: callee, b: N_ARG list */
    N_ARG,    /* a: value, name: keyword; op: 0, '*' or 'p' (**) */
    N_FILTER, /* a: value (NULL in a filter block), b: arguments, fn, name */
    N_TEST,   /* a: value, b: arguments, fn, name */
    N_COND,   /* a: value, b: condition, c: otherwise or NULL */
    N_AND,    /* a, b */
    N_OR,
    N_NOT, /* a */
    N_NEG,
    N_POS,
    N_BIN,     /* op: '+' '-' '*' '/' 'f' (//) '%' 'p' (**); a, b */
    N_CONCAT,  /* a: operands */
    N_COMPARE, /* a: first, b: N_CMP list */
    N_CMP,     /* op: '=' '!' '<' '>' 'l' (<=) 'g' (>=) 'i' (in) 'n' (not in); a */
    /* statements */
    N_TEXT,     /* val */
    N_OUT,      /* a */
    N_IF,       /* a: condition, b: body, c: else part, or with op 1 the N_IF of an elif */
    N_FOR,      /* name: "loop", a: target, b: iterable, c: body, d: else part, e: filter; op: 1
                   recursive */
    N_SET,      /* a: target, b: value */
    N_SETBLOCK, /* a: target, b: filters or NULL, c: body */
    N_NSREF,    /* name: namespace, val: attribute; only as a target */
    N_MACRO, /* name, a: N_PARAM list, b: N_NAME list of special names used, c: body, d: enclosing
                one; op: TMACRO_* */
    N_PARAM, /* name, a: default or NULL */
    N_CALLBLOCK,   /* a: N_CALL, b: N_MACRO of the body */
    N_FILTERBLOCK, /* a: filters, c: body */
    N_WITH,        /* a: N_SET list, c: body */
    N_SCOPE,       /* c: body */
    N_BREAK,
    N_CONTINUE,
};

#define TMACRO_VARARGS 1u /* bit i: special name i of bind_special */
#define TMACRO_KWARGS  2u
#define TMACRO_CALLER  4u

struct tname { /* interned: equal names are equal pointers within a template */
    const char *s;
    uint32_t n;
    struct tname *next;
};

struct tnode {
    uint8_t type;
    uint8_t op;
    uint32_t line, col;
    struct tnode *next; /* in a list */
    struct tnode *a, *b, *c, *d, *e;
    const struct tname *name;
    union {
        struct tv val;
        const struct tfunc *fn; /* NULL: unknown, an error when it is reached */
    };
};

struct bt_template {
    struct bt_arena arena;
    struct tnode *body;
};

/* ---- lexer ---- */

enum ttok_type {
    TT_EOF,
    TT_DATA,
    TT_VAR_BEGIN,
    TT_VAR_END,
    TT_BLOCK_BEGIN,
    TT_BLOCK_END,
    TT_NAME,
    TT_STR,
    TT_INT,
    TT_FLOAT,
    TT_OP, /* op: the character, or 'f' //, 'p' **, '=' ==, 'a' = (assign), '!' !=, 'l' <=, 'g' >=
            */
};

struct ttok {
    enum ttok_type type;
    char op;
    uint32_t line, col;
    const char *s; /* data, name, decoded string */
    size_t n;
    int64_t i;
    double f;
};

struct tlex {
    const char *src; /* newlines are \n */
    size_t n;
    size_t pos;
    size_t mark; /* line and column are known up to here */
    uint32_t line;
    size_t line_start;
    enum { LEX_ROOT, LEX_RAW, LEX_BLOCK, LEX_VAR } state;
    char open[BT_TEMPLATE_DEPTH_MAX]; /* brackets not closed yet */
    uint32_t n_open;
    struct bt_arena *arena;
    struct bt_err *err;
};

enum bt_status bt_tlex_init(struct tlex *lx, const char *src, size_t n, struct bt_arena *arena,
                            struct bt_err *err) BT_NODISCARD;
bool bt_tlex_next(struct tlex *lx, struct ttok *tok) BT_NODISCARD;
BT_PRINTF(5, 6)
bool bt_tlex_fail(struct tlex *lx, enum bt_status st, uint32_t line, uint32_t col, const char *fmt,
                  ...);

/* ---- parser ---- */

struct tparse {
    struct tlex lx;
    struct ttok cur, ahead;
    bool has_ahead;
    uint32_t depth;
    uint32_t soft;       /* inside an if: unknown filters and tests fail only when reached */
    uint32_t loop_depth; /* for statements that break and continue may leave */
    struct tnode *macro; /* innermost macro, told about caller, varargs and kwargs */
    struct bt_arena *arena;
    struct tname *names[64];
};

bool bt_tparse_advance(struct tparse *p);
bool bt_tparse_look(struct tparse *p, struct ttok *tok);
bool bt_tparse_is_name(const struct tparse *p, const char *name);
bool bt_tparse_is_op(const struct tparse *p, char op);
bool bt_tparse_expect_op(struct tparse *p, char op, const char *what);
bool bt_tparse_unexpected(struct tparse *p, const char *wanted);
struct tnode *bt_tparse_node(struct tparse *p, enum tnode_type type);
const struct tname *bt_tparse_intern(struct tparse *p, const char *s, size_t n);
bool bt_tparse_enter(struct tparse *p);

/* NULL: err is set. */
struct tnode *bt_tparse_expr(struct tparse *p, bool with_cond);
struct tnode *bt_tparse_tuple(struct tparse *p, bool with_cond, bool in_parens);
struct tnode *bt_tparse_target(struct tparse *p);
struct tnode *bt_tparse_filters(struct tparse *p, struct tnode *value, bool bare_first);
struct tnode *bt_tparse_body(struct tparse *p, bool *ok);

/* ---- evaluator ---- */

struct tvar {
    const struct tname *name;
    struct tvar *next;
    struct tv value;
    bool set;
};

struct tscope {
    struct tscope *parent;
    struct tvar *vars;
};

struct tloop {
    struct tev *ev;
    const struct tnode *node;
    struct tscope *outer;
    struct tlist *src;
    uint32_t src_pos;
    int64_t index0; /* -1 before the first */
    uint32_t depth0;
    struct tlist *peeked; /* accepted by the filter, not yet current */
    uint32_t peeked_pos;
    struct tv prev, cur;
    struct tv *changed; /* last arguments of loop.changed */
    uint32_t n_changed;
    bool changed_set;
};

struct tmacro {
    const struct tnode *node;
    struct tscope *scope; /* where it was defined */
};

struct tev {
    struct bt_arena arena;
    struct tdict *vars; /* the caller's variables */
    struct tscope *scope;
    struct bt_buf *out;
    size_t out_bytes; /* written so far, captured blocks included */
    size_t out_max;
    uint64_t steps_left;
    uint32_t depth;
    uint32_t macro_depth;
    int64_t now_unix;
    const struct tnode *at; /* for error positions */
    struct bt_err *err;
    bool failed;
};

/* Set err with the current position; return false. */
BT_PRINTF(2, 3) bool bt_tev_fail(struct tev *ev, const char *fmt, ...);
bool bt_tev_nomem(struct tev *ev); /* the machine's memory, not the render's limit */
bool bt_tev_steps(struct tev *ev, size_t n);
bool bt_tev_eval(struct tev *ev, const struct tnode *n, struct tv *out);
bool bt_tev_call(struct tev *ev, struct tv fn, const struct targs *args, struct tv *out);
bool bt_tev_call_func(struct tev *ev, const struct tfunc *f, struct tv self,
                      const struct targs *args, struct tv *out);
bool bt_tev_args(struct tev *ev, const struct tnode *list, struct targs *out);
bool bt_tev_assign(struct tev *ev, const struct tnode *target, struct tv v);
bool bt_tev_binary(struct tev *ev, uint8_t op, struct tv a, struct tv b, struct tv *out);
/* op as in N_CMP. */
bool bt_tev_compare(struct tev *ev, uint8_t op, struct tv a, struct tv b, bool *out);
bool bt_tev_contains(struct tev *ev, struct tv item, struct tv in, bool *out);
bool bt_tev_set_var(struct tev *ev, const struct tname *name, struct tv v);
bool bt_tev_lookup(struct tev *ev, const struct tname *name, struct tv *out);
bool bt_tev_emit(struct tev *ev, const char *s, size_t n);
bool bt_tev_emit_value(struct tev *ev, struct tv v);
/* Runs statements; *flow tells whether a break or continue ended them. */
enum tflow { FLOW_NEXT, FLOW_BREAK, FLOW_CONTINUE };
bool bt_tev_exec(struct tev *ev, const struct tnode *list, enum tflow *flow);
bool bt_tev_call_macro(struct tev *ev, const struct tmacro *m, const struct targs *args,
                       struct tv *out);
bool bt_tev_call_loop(struct tev *ev, struct tloop *loop, const struct targs *args, struct tv *out);
bool bt_tloop_attr(struct tev *ev, struct tloop *loop, const char *name, size_t n, struct tv *out);

/* Values. Functions of bool type fail with err set. */
void *bt_tev_alloc(struct tev *ev, size_t n); /* NULL: err is set */
const char *bt_tv_type_name(struct tv v);
bool bt_tev_undefined_error(struct tev *ev, struct tv v);
bool bt_tv_truth(struct tv v);
bool bt_tv_equal(struct tev *ev, struct tv a, struct tv b, bool *out);
bool bt_tv_less(struct tev *ev, struct tv a, struct tv b, bool *out);
bool bt_tv_hashable(struct tv v);
bool bt_tlist_new(struct tev *ev, uint32_t cap, struct tlist **out);
bool bt_tlist_push(struct tev *ev, struct tlist *l, struct tv v);
bool bt_tdict_new(struct tev *ev, uint32_t cap, struct tdict **out);
struct tv *bt_tdict_find(const struct tdict *d, struct tv key);
struct tv *bt_tdict_find_str(const struct tdict *d, const char *s, size_t n);
bool bt_tdict_put(struct tev *ev, struct tdict *d, struct tv key, struct tv value);
/* The items of anything iterable; an iterator is used up. The list is shared: do not change it. */
bool bt_tev_items(struct tev *ev, struct tv v, struct tlist **out);
bool bt_tev_getattr(struct tev *ev, struct tv obj, const char *name, size_t n, struct tv *out);
bool bt_tev_getitem(struct tev *ev, struct tv obj, struct tv key, struct tv *out);
bool bt_tev_slice(struct tev *ev, struct tv obj, struct tv start, struct tv stop, struct tv step,
                  struct tv *out);
/* A dotted attribute path as filters take it: "a.b.0" or an integer. */
bool bt_tev_getpath(struct tev *ev, struct tv obj, struct tv path, struct tv *out);
bool bt_tv_to_str(struct tev *ev, struct tv v, struct tv *out); /* str(v) */
bool bt_tv_print(struct tev *ev, struct bt_buf *b, struct tv v, bool repr, uint32_t depth);
void bt_tv_print_float(struct bt_buf *b, double f);
bool bt_tev_take(struct tev *ev, struct bt_buf *b,
                 struct tv *out); /* moves b's text into the arena, frees b */
bool bt_tev_from_json(struct tev *ev, const struct json_t *j, uint32_t depth, struct tv *out);
bool bt_tev_to_json(struct tev *ev, struct tv v, const struct tv *opts, struct tv *out);

/* An argument of a type; an integer that is missing or none is dflt. */
bool bt_tev_want_str(struct tev *ev, struct tv v);
bool bt_tev_want_int(struct tev *ev, struct tv v, int64_t dflt, int64_t *out);

/* Tables. */
extern const struct tfunc bt_tstr_methods[]; /* ends with a NULL name */
const struct tfunc *bt_tfilter_find(const char *name, size_t n);
const struct tfunc *bt_tlistfilter_find(const char *name, size_t n);
const struct tfunc *bt_ttest_find(const char *name, size_t n);
const struct tfunc *bt_tglobal_find(const char *name, size_t n);
const struct tfunc *bt_tmethod_find(struct tv obj, const char *name, size_t n, bool *unsafe);

/* Strings: the behaviour of Python's str. */
uint32_t bt_tstr_count(const char *s, size_t n); /* characters */
size_t bt_tstr_offset(const char *s, size_t n, uint32_t chars);
bool bt_tchar_space(uint32_t cp);
bool bt_tchar_printable(uint32_t cp);
bool bt_tchar_alnum(uint32_t cp);
enum tstrip { STRIP_LEFT = 1, STRIP_RIGHT = 2, STRIP_BOTH = 3 };
bool bt_tstr_strip(struct tev *ev, struct tv s, struct tv chars, enum tstrip sides, struct tv *out);
enum tcase {
    CASE_LOWER,
    CASE_UPPER,
    CASE_CAPITAL,
    CASE_TITLE,
    CASE_SWAP,
    CASE_FOLD,
    CASE_JINJA_TITLE
};
bool bt_tstr_case(struct tev *ev, struct tv s, enum tcase c, struct tv *out);
bool bt_tstr_replace(struct tev *ev, struct tv s, struct tv from, struct tv to, int64_t count,
                     struct tv *out);
bool bt_tstr_splitlines(struct tev *ev, struct tv s, bool keep_ends, struct tlist **out);
bool bt_tstr_join(struct tev *ev, struct tv sep, const struct tlist *l, bool convert,
                  struct tv *out);
bool bt_tstr_percent(struct tev *ev, struct tv fmt, struct tv args, struct tv *out);
bool bt_tstr_is_case(struct tv s, bool upper);
bool bt_tstr_pad(struct tev *ev, struct tv s, int64_t width, struct tv fill, int align,
                 struct tv *out);

#endif
