/* Parses JSON in place: strings are unescaped where they stand in the document's own copy, values
 * are recorded on a tape in document order. Owns syntax and its errors; knows nothing of what a
 * document means. */

#include "files/json_tape.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/mem.h"
#include "base/utf8.h"

#define BYTES_MAX (((size_t)1 << 29) - 1) /* lengths have 29 bits */
#define DEPTH_MAX 64

struct bt_tape {
    char *text;
    struct bt_tape_node *nodes;
    size_t n_nodes;
    size_t cap;
};

struct parser {
    struct bt_tape *tape;
    char *begin, *p, *end;
    uint32_t stack[DEPTH_MAX]; /* open containers, as tape indices */
    unsigned depth;
    bool nomem;
    const char *what; /* the syntax error, NULL: none */
};

static bool fail(struct parser *ps, const char *what)
{
    if (ps->what == NULL) {
        ps->what = what;
    }
    return false;
}

static struct bt_tape_node *push(struct parser *ps, enum bt_tape_type type)
{
    struct bt_tape *t = ps->tape;

    if (t->n_nodes == t->cap) {
        size_t cap = t->cap * 2;
        struct bt_tape_node *nodes = bt_realloc(t->nodes, cap * sizeof(*nodes));
        if (nodes == NULL) {
            ps->nomem = true;
            (void)fail(ps, "out of memory");
            return NULL;
        }
        t->nodes = nodes;
        t->cap = cap;
    }
    struct bt_tape_node *n = &t->nodes[t->n_nodes++];
    *n = (struct bt_tape_node){.s = NULL, .len = 0, .type = type, .span = 1};
    return n;
}

static void skip_space(struct parser *ps)
{
    while (ps->p < ps->end &&
           (*ps->p == ' ' || *ps->p == '\n' || *ps->p == '\t' || *ps->p == '\r')) {
        ps->p++;
    }
}

static bool hex4(struct parser *ps, uint32_t *out)
{
    uint32_t v = 0;

    if (ps->end - ps->p < 4) {
        return fail(ps, "cut \\u escape");
    }
    for (int i = 0; i < 4; i++) {
        char c = ps->p[i];
        uint32_t d;
        if (c >= '0' && c <= '9') {
            d = (uint32_t)(c - '0');
        } else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f') {
            d = (uint32_t)((c | 0x20) - 'a' + 10);
        } else {
            return fail(ps, "bad hex digit in \\u escape");
        }
        v = v << 4 | d;
    }
    ps->p += 4;
    *out = v;
    return true;
}

/* p is behind "\u"; writes the character at *w. */
static bool unicode_escape(struct parser *ps, char **w)
{
    uint32_t cp, low;

    if (!hex4(ps, &cp)) {
        return false;
    }
    if (cp >= 0xD800 && cp < 0xDC00) {
        if (ps->end - ps->p < 2 || ps->p[0] != '\\' || ps->p[1] != 'u') {
            return fail(ps, "lone surrogate in string");
        }
        ps->p += 2;
        if (!hex4(ps, &low)) {
            return false;
        }
        if (low < 0xDC00 || low > 0xDFFF) {
            return fail(ps, "lone surrogate in string");
        }
        cp = 0x10000 + ((cp - 0xD800) << 10) + (low - 0xDC00);
    } else if (cp >= 0xDC00 && cp <= 0xDFFF) {
        return fail(ps, "lone surrogate in string");
    }
    *w += bt_utf8_encode(cp, *w);
    return true;
}

static bool escape(struct parser *ps, char **w)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    char c;

    if (ps->p == ps->end) {
        return fail(ps, "string does not end");
    }
    c = *ps->p++;
    if (c == 'u') {
        return unicode_escape(ps, w);
    }
    const char *at = c == '\0' ? NULL : strchr(from, c);
    if (at == NULL) {
        ps->p--;
        return fail(ps, "unknown escape");
    }
    *(*w)++ = to[at - from];
    return true;
}

static bool string(struct parser *ps)
{
    char *start = ++ps->p, *w = start;

    for (;;) {
        char *run = ps->p;
        while (ps->p < ps->end && *ps->p != '"' && *ps->p != '\\' &&
               (unsigned char)*ps->p >= 0x20) {
            ps->p++;
        }
        if (w != run) {
            memmove(w, run, (size_t)(ps->p - run));
        }
        w += ps->p - run;
        if (ps->p == ps->end) {
            return fail(ps, "string does not end");
        }
        if (*ps->p == '"') {
            break;
        }
        if (*ps->p != '\\') {
            return fail(ps, "control character in string");
        }
        ps->p++;
        if (!escape(ps, &w)) {
            return false;
        }
    }
    ps->p++;
    *w = '\0';
    struct bt_tape_node *n = push(ps, BT_TAPE_STRING);
    if (n == NULL) {
        return false;
    }
    n->s = start;
    n->len = (uint32_t)(w - start) & 0x1FFFFFFF;
    return true;
}

static size_t digits(struct parser *ps)
{
    char *start = ps->p;

    while (ps->p < ps->end && *ps->p >= '0' && *ps->p <= '9') {
        ps->p++;
    }
    return (size_t)(ps->p - start);
}

static bool number(struct parser *ps)
{
    char *start = ps->p;

    ps->p += *ps->p == '-';
    char first = ps->p < ps->end ? *ps->p : '\0';
    size_t n_int = digits(ps);
    if (n_int == 0 || (n_int > 1 && first == '0')) {
        return fail(ps, "bad number");
    }
    if (ps->p < ps->end && *ps->p == '.') {
        ps->p++;
        if (digits(ps) == 0) {
            return fail(ps, "bad number");
        }
    }
    if (ps->p < ps->end && (*ps->p | 0x20) == 'e') {
        ps->p++;
        if (ps->p < ps->end && (*ps->p == '+' || *ps->p == '-')) {
            ps->p++;
        }
        if (digits(ps) == 0) {
            return fail(ps, "bad number");
        }
    }
    struct bt_tape_node *n = push(ps, BT_TAPE_NUMBER);
    if (n == NULL) {
        return false;
    }
    n->s = start;
    n->len = (uint32_t)(ps->p - start) & 0x1FFFFFFF;
    return true;
}

static bool word(struct parser *ps, const char *text, enum bt_tape_type type)
{
    size_t n = strlen(text);

    if ((size_t)(ps->end - ps->p) < n || memcmp(ps->p, text, n) != 0) {
        return fail(ps, "unexpected character");
    }
    ps->p += n;
    return push(ps, type) != NULL;
}

/* Opens a container or reads a scalar. */
static bool value(struct parser *ps)
{
    if (ps->p == ps->end) {
        return fail(ps, "value missing at the end");
    }
    switch (*ps->p) {
    case '{':
    case '[':
        if (ps->depth == DEPTH_MAX) {
            return fail(ps, "nested too deeply");
        }
        if (push(ps, *ps->p == '{' ? BT_TAPE_OBJECT : BT_TAPE_ARRAY) == NULL) {
            return false;
        }
        ps->stack[ps->depth++] = (uint32_t)(ps->tape->n_nodes - 1);
        ps->p++;
        return true;
    case '"':
        return string(ps);
    case 'n':
        return word(ps, "null", BT_TAPE_NULL);
    case 't':
        return word(ps, "true", BT_TAPE_TRUE);
    case 'f':
        return word(ps, "false", BT_TAPE_FALSE);
    default:
        return number(ps);
    }
}

static bool object_key(struct parser *ps)
{
    if (ps->p == ps->end || *ps->p != '"') {
        return fail(ps, "object key expected");
    }
    if (!string(ps)) {
        return false;
    }
    skip_space(ps);
    if (ps->p == ps->end || *ps->p != ':') {
        return fail(ps, "':' expected");
    }
    ps->p++;
    skip_space(ps);
    return true;
}

/* One member of the innermost open container, or its end. */
static bool member(struct parser *ps)
{
    struct bt_tape_node *c = &ps->tape->nodes[ps->stack[ps->depth - 1]];
    bool object = c->type == BT_TAPE_OBJECT;

    if (ps->p < ps->end && *ps->p == (object ? '}' : ']')) {
        c->span = (uint32_t)(ps->tape->n_nodes - ps->stack[ps->depth - 1]);
        ps->depth--;
        ps->p++;
        return true;
    }
    if (c->len > 0) {
        if (ps->p == ps->end || *ps->p != ',') {
            return fail(ps, "',' or the container's end expected");
        }
        ps->p++;
        skip_space(ps);
    }
    c->len = (c->len + 1) & 0x1FFFFFFF;
    return (!object || object_key(ps)) && value(ps);
}

static bool document(struct parser *ps)
{
    skip_space(ps);
    if (!value(ps)) {
        return false;
    }
    while (ps->depth > 0) {
        skip_space(ps);
        if (!member(ps)) {
            return false;
        }
    }
    skip_space(ps);
    return ps->p == ps->end || fail(ps, "text after the document");
}

/* Takes text (n bytes and room for a NUL). */
static enum bt_status parse(const char *name, char *text, size_t n, struct bt_tape **out,
                            struct bt_err *err)
{
    struct bt_tape *t = bt_calloc(1, sizeof(*t));
    size_t bad;

    if (t == NULL) {
        bt_free(text);
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", name);
    }
    t->text = text;
    t->cap = n / 16 + 16;
    t->nodes = bt_alloc(t->cap * sizeof(*t->nodes));
    if (t->nodes == NULL) {
        bt_tape_destroy(t);
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", name);
    }
    if (!bt_utf8_valid(text, n, &bad)) {
        bt_tape_destroy(t);
        return bt_err_set(err, BT_ERR_INVALID, "%s: byte %zu: not valid UTF-8", name, bad);
    }
    text[n] = '\0';
    struct parser ps = {.tape = t, .begin = text, .p = text, .end = text + n};
    if (!document(&ps)) {
        enum bt_status st = ps.nomem ? BT_ERR_NOMEM : BT_ERR_INVALID;
        (void)bt_err_set(err, st, "%s: byte %td: %s", name, ps.p - ps.begin, ps.what);
        bt_tape_destroy(t);
        return st;
    }
    *out = t;
    return BT_OK;
}

enum bt_status bt_tape_parse(const char *name, const char *text, size_t n, struct bt_tape **out,
                             struct bt_err *err)
{
    if (n > BYTES_MAX) {
        return bt_err_set(err, BT_ERR_INVALID, "%s: %zu bytes, the limit is %zu", name, n,
                          BYTES_MAX);
    }
    char *copy = bt_alloc(n + 1);
    if (copy == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", name);
    }
    memcpy(copy, text, n);
    return parse(name, copy, n, out, err);
}

static enum bt_status read_fd(int fd, const char *path, char *buf, size_t n, struct bt_err *err)
{
    for (size_t got = 0; got < n;) {
        ssize_t r = read(fd, buf + got, n - got);
        if (r < 0 && errno == EINTR) {
            continue;
        }
        if (r <= 0) {
            return bt_err_set(err, BT_ERR_IO, "%s: byte %zu of %zu: %s", path, got, n,
                              r == 0 ? "the file ended early" : strerror(errno));
        }
        got += (size_t)r;
    }
    return BT_OK;
}

enum bt_status bt_tape_read(const char *path, size_t max_bytes, struct bt_tape **out,
                            struct bt_err *err)
{
    size_t limit = max_bytes < BYTES_MAX ? max_bytes : BYTES_MAX;
    struct stat sb;
    enum bt_status st;
    char *buf = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

    if (fd < 0) {
        return bt_err_set(err, errno == ENOENT ? BT_ERR_NOT_FOUND : BT_ERR_IO, "%s: %s", path,
                          strerror(errno));
    }
    if (fstat(fd, &sb) != 0 || !S_ISREG(sb.st_mode)) {
        st = bt_err_set(err, BT_ERR_IO, "%s: not a regular file", path);
    } else if ((uint64_t)sb.st_size > limit) {
        st = bt_err_set(err, BT_ERR_INVALID, "%s: %lld bytes, the limit is %zu", path,
                        (long long)sb.st_size, limit);
    } else if ((buf = bt_alloc((size_t)sb.st_size + 1)) == NULL) {
        st = bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", path);
    } else {
        st = read_fd(fd, path, buf, (size_t)sb.st_size, err);
    }
    (void)close(fd);
    if (st != BT_OK) {
        bt_free(buf);
        return st;
    }
    return parse(path, buf, (size_t)sb.st_size, out, err);
}

void bt_tape_destroy(struct bt_tape *t)
{
    if (t != NULL) {
        bt_free(t->nodes);
        bt_free(t->text);
        bt_free(t);
    }
}

const struct bt_tape_node *bt_tape_root(const struct bt_tape *t)
{
    return t->nodes;
}

const struct bt_tape_node *bt_tape_get(const struct bt_tape_node *obj, const char *key)
{
    if (!bt_tape_is(obj, BT_TAPE_OBJECT)) {
        return NULL;
    }
    const struct bt_tape_node *k = obj + 1;
    for (uint32_t i = 0; i < obj->len; i++) {
        const struct bt_tape_node *v = k + 1;
        if (bt_tape_str_eq(k, key)) {
            return v;
        }
        k = v + v->span;
    }
    return NULL;
}

bool bt_tape_is(const struct bt_tape_node *n, enum bt_tape_type type)
{
    return n != NULL && n->type == type;
}

bool bt_tape_str_eq(const struct bt_tape_node *n, const char *s)
{
    return bt_tape_is(n, BT_TAPE_STRING) && n->len == strlen(s) && memcmp(n->s, s, n->len) == 0;
}

bool bt_tape_u32(const struct bt_tape_node *n, uint32_t *out)
{
    uint64_t v = 0;

    if (!bt_tape_is(n, BT_TAPE_NUMBER) || n->len > 10) {
        return false;
    }
    for (uint32_t i = 0; i < n->len; i++) {
        if (n->s[i] < '0' || n->s[i] > '9') {
            return false;
        }
        v = v * 10 + (uint64_t)(n->s[i] - '0');
    }
    if (v > UINT32_MAX) {
        return false;
    }
    *out = (uint32_t)v;
    return true;
}
