/* Chat templates, the public side: compiles text into an immutable tree, and turns a caller's
 * messages or JSON into the variables of one render. Owns the limits. */

#include "text/template_int.h"

#include <jansson.h>
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"

#define TREE_BYTES_MAX (64u * 1024 * 1024)
/* Memory and output of one render: a fixed part, and a multiple of the input. */
#define ARENA_BYTES_BASE (32u * 1024 * 1024)
#define ARENA_PER_BYTE   64u
#define OUT_BYTES_BASE   (1024u * 1024)
#define OUT_PER_BYTE     16u
#define INPUT_BYTES_MAX  (64u * 1024 * 1024)

enum bt_status bt_template_compile(const char *src, size_t n, struct bt_template **out,
                                   struct bt_err *err)
{
    struct bt_err local = {0};
    struct bt_template *t = bt_calloc(1, sizeof *t);
    struct tparse p = {0};
    enum bt_status st;
    bool ok = false;

    err = err != NULL ? err : &local;
    *out = NULL;
    if (t == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "chat template: out of memory");
    }
    bt_arena_init(&t->arena, TREE_BYTES_MAX);
    p.arena = &t->arena;
    st = bt_tlex_init(&p.lx, src, n, &t->arena, err);
    if (st == BT_OK && bt_tparse_advance(&p)) {
        t->body = bt_tparse_body(&p, &ok);
        if (ok && p.cur.type != TT_EOF) {
            ok = p.cur.type == TT_NAME
                     ? bt_tlex_fail(&p.lx, BT_ERR_UNSUPPORTED, p.cur.line, p.cur.col,
                                    "unknown or misplaced statement '%.*s'",
                                    (int)(p.cur.n < 60 ? p.cur.n : 60), p.cur.s)
                     : bt_tparse_unexpected(&p, "a statement");
        }
    }
    if (!ok) {
        bt_template_destroy(t);
        return err->status;
    }
    *out = t;
    return BT_OK;
}

void bt_template_destroy(struct bt_template *t)
{
    if (t != NULL) {
        bt_arena_fini(&t->arena);
        bt_free(t);
    }
}

static void ev_init(struct tev *ev, size_t input_bytes, int64_t now_unix, struct bt_buf *out,
                    struct bt_err *err)
{
    *ev = (struct tev){
        .out = out,
        .out_max = OUT_BYTES_BASE + OUT_PER_BYTE * input_bytes,
        .steps_left = BT_TEMPLATE_STEPS_MAX,
        .now_unix = now_unix,
        .err = err,
    };
    bt_arena_init(&ev->arena, ARENA_BYTES_BASE + ARENA_PER_BYTE * input_bytes);
}

/* Runs the template; ends ev either way. ok: whether setting it up worked. */
static enum bt_status finish(struct tev *ev, const struct bt_template *t, bool ok)
{
    struct tscope root = {0};
    size_t before = ev->out->len;
    enum tflow flow;

    ev->scope = &root;
    ok = ok && bt_tev_exec(ev, t->body, &flow);
    bt_arena_fini(&ev->arena);
    if (ok) {
        return BT_OK;
    }
    if (ev->out->data != NULL) {
        ev->out->len = before;
        ev->out->data[before] = '\0';
    }
    ev->out->failed = false;
    return ev->err->status;
}

static bool add_text(struct tev *ev, struct tdict *d, const char *key, const char *s, size_t n)
{
    size_t bad;

    if (!bt_utf8_valid(s != NULL ? s : "", n, &bad)) {
        return bt_tev_fail(ev, "%s: byte %zu is not UTF-8", key, bad);
    }
    return bt_tdict_put(ev, d, tv_str(key, strlen(key)), tv_str(s != NULL ? s : "", n));
}

static bool add_messages(struct tev *ev, const struct bt_template_inputs *in)
{
    struct tlist *l;
    struct tdict *d;

    if (!bt_tlist_new(ev, (uint32_t)in->n_messages, &l)) {
        return false;
    }
    for (size_t i = 0; i < in->n_messages; i++) {
        const struct bt_chat_msg *m = &in->messages[i];

        if (!bt_tdict_new(ev, 2, &d) || !add_text(ev, d, "role", m->role, m->role_len) ||
            !add_text(ev, d, "content", m->content, m->content_len)) {
            return false;
        }
        l->items[l->n++] = tv_dict(d);
    }
    return bt_tdict_put(ev, ev->vars, tv_str("messages", 8), tv_list(LIST_LIST, l));
}

static bool add_defaults(struct tev *ev, const struct bt_template_inputs *in)
{
    return add_messages(ev, in) && bt_tdict_put(ev, ev->vars, tv_str("tools", 5), tv_none()) &&
           bt_tdict_put(ev, ev->vars, tv_str("documents", 9), tv_none()) &&
           bt_tdict_put(ev, ev->vars, tv_str("add_generation_prompt", 21),
                        tv_bool(in->add_generation_prompt)) &&
           (in->bos_token == NULL ||
            add_text(ev, ev->vars, "bos_token", in->bos_token, strlen(in->bos_token))) &&
           (in->eos_token == NULL ||
            add_text(ev, ev->vars, "eos_token", in->eos_token, strlen(in->eos_token)));
}

/* The members of a JSON object as variables; the document must outlive the render. */
static bool add_json(struct tev *ev, const char *json, size_t n, json_t **doc)
{
    json_error_t e;
    struct tv v;

    *doc = json_loadb(json, n, JSON_ALLOW_NUL, &e);
    if (*doc == NULL) {
        return bt_tev_fail(ev, "variables: JSON line %d column %d: %s", e.line, e.column, e.text);
    }
    if (!json_is_object(*doc)) {
        return bt_tev_fail(ev, "variables: a JSON object is needed");
    }
    if (!bt_tev_from_json(ev, *doc, 0, &v)) {
        return false;
    }
    for (uint32_t i = 0; i < v.dict->n; i++) {
        if (!bt_tdict_put(ev, ev->vars, v.dict->e[i].key, v.dict->e[i].value)) {
            return false;
        }
    }
    return true;
}

static size_t input_bytes(const struct bt_template_inputs *in)
{
    size_t n = in->extra_json != NULL ? in->extra_json_len : 0;

    for (size_t i = 0; i < in->n_messages && n <= INPUT_BYTES_MAX; i++) {
        size_t more = in->messages[i].content_len < INPUT_BYTES_MAX ? in->messages[i].content_len
                                                                    : INPUT_BYTES_MAX;

        n += 64 + more +
             (in->messages[i].role_len < INPUT_BYTES_MAX ? in->messages[i].role_len
                                                         : INPUT_BYTES_MAX);
    }
    return n;
}

static enum bt_status too_long(struct bt_err *err, size_t n)
{
    return bt_err_set(err, BT_ERR_INVALID, "chat template: %zu bytes of input, more than %u", n,
                      INPUT_BYTES_MAX);
}

enum bt_status bt_template_render(const struct bt_template *t, const struct bt_template_inputs *in,
                                  struct bt_buf *out, struct bt_err *err)
{
    struct bt_err local = {0};
    size_t n = input_bytes(in);
    json_t *doc = NULL;
    enum bt_status st;
    struct tev ev;
    bool ok;

    err = err != NULL ? err : &local;
    if (n > INPUT_BYTES_MAX) {
        return too_long(err, n);
    }
    ev_init(&ev, n, in->now_unix, out, err);
    ok = bt_tdict_new(&ev, 8, &ev.vars) && add_defaults(&ev, in) &&
         (in->extra_json == NULL || add_json(&ev, in->extra_json, in->extra_json_len, &doc));
    st = finish(&ev, t, ok);
    json_decref(doc);
    return st;
}

enum bt_status bt_template_render_json(const struct bt_template *t, const char *json, size_t n,
                                       int64_t now_unix, struct bt_buf *out, struct bt_err *err)
{
    struct bt_err local = {0};
    json_t *doc = NULL;
    enum bt_status st;
    struct tev ev;
    bool ok;

    err = err != NULL ? err : &local;
    if (n > INPUT_BYTES_MAX) {
        return too_long(err, n);
    }
    ev_init(&ev, n, now_unix, out, err);
    ok = bt_tdict_new(&ev, 8, &ev.vars) && add_json(&ev, json, n, &doc);
    st = finish(&ev, t, ok);
    json_decref(doc);
    return st;
}
