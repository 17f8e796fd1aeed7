/* Chat templates against Jinja2: every text equal, every refusal a refusal. Then limits, errors
 * with positions, failing allocations, and the places where model files keep a template. */

#include "text/template.h"

#include <jansson.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "tests/check.h"

#define REFERENCE "../shared/data/reference/tokenizers/"

static json_t *load(const char *path)
{
    json_error_t e;
    json_t *doc = json_load_file(path, JSON_ALLOW_NUL, &e);

    if (doc == NULL) {
        fprintf(stderr, "%s: %s\n", path, e.text);
    }
    return doc;
}

/* Renders template (a JSON string) with variables and compares with the expected text, or error. */
static void check_case(const char *name, const json_t *template, const json_t *vars, int64_t now,
                       const json_t *want)
{
    const json_t *text = json_object_get(want, "text");
    bool same;
    const char *error = json_string_value(json_object_get(want, "error"));
    struct bt_template *t = NULL;
    struct bt_buf out = {0};
    struct bt_err err = {0};
    char *dump = json_dumps(vars, JSON_COMPACT);
    enum bt_status st =
        bt_template_compile(json_string_value(template), json_string_length(template), &t, &err);

    if (st == BT_OK) {
        st = bt_template_render_json(t, dump, strlen(dump), now, &out, &err);
    }
    if (text != NULL) {
        same = st == BT_OK && out.len == json_string_length(text) &&
               memcmp(out.data != NULL ? out.data : "", json_string_value(text), out.len) == 0;
        CHECK(same);
        if (!same) {
            fprintf(stderr, "  %s\n  got:  %s\n  want: %s\n", name,
                    st != BT_OK        ? err.msg
                    : out.data != NULL ? out.data
                                       : "",
                    json_string_value(text));
        }
    } else {
        CHECK(st != BT_OK && err.msg[0] != '\0');
        if (st == BT_OK) {
            fprintf(stderr, "  %s\n  got:  %s\n  want error: %s\n", name, out.data, error);
        } else if (strncmp(error, "TemplateError: ", 15) == 0) {
            CHECK(strstr(err.msg, error + 15) != NULL); /* the template's own words */
        }
        CHECK_EQ(out.len, 0);
    }
    bt_buf_fini(&out);
    bt_template_destroy(t);
    free(dump);
}

static void test_language(void)
{
    json_t *doc = load("tests/golden/templates/language.json"), *c;
    size_t i;

    CHECK(doc != NULL);
    json_array_foreach(json_object_get(doc, "cases"), i, c)
    {
        const json_t *template = json_object_get(c, "template");

        check_case(json_string_value(template), template, json_object_get(doc, "variables"),
                   json_integer_value(json_object_get(doc, "now_unix")), c);
    }
    CHECK(i > 250);
    json_decref(doc);
}

static void test_chats(void)
{
    json_t *doc = load("tests/golden/templates/chats.json"), *c;
    size_t i;

    CHECK(doc != NULL);
    json_array_foreach(json_object_get(doc, "cases"), i, c)
    {
        json_t *vars = json_deep_copy(json_object_get(c, "variables"));
        const char *conversation = json_string_value(json_object_get(c, "conversation"));
        const char *style = json_string_value(json_object_get(c, "style"));

        json_object_set(vars, "messages",
                        json_object_get(json_object_get(doc, "conversations"), conversation));
        json_object_set_new(vars, "tools",
                            json_is_true(json_object_get(c, "tools"))
                                ? json_deep_copy(json_object_get(doc, "tools"))
                                : json_null());
        check_case(json_string_value(json_object_get(c, "name")),
                   json_object_get(json_object_get(doc, "styles"), style), vars,
                   json_integer_value(json_object_get(doc, "now_unix")), c);
        json_decref(vars);
    }
    CHECK(i > 200);
    json_decref(doc);
}

/* One published conversation through bt_template_render, the way the router calls it. */
static void check_published(const char *name, const struct bt_template *t, const json_t *entry,
                            const json_t *conversation, const json_t *c)
{
    struct bt_chat_msg msgs[16];
    const json_t *tokens = json_object_get(entry, "special_tokens");
    const char *error = json_string_value(json_object_get(c, "error"));
    char *extra = json_dumps(json_object_get(c, "kwargs"), 0);
    struct bt_template_inputs in = {
        .messages = msgs,
        .n_messages = json_array_size(conversation),
        .add_generation_prompt = json_is_true(json_object_get(c, "add_generation_prompt")),
        .bos_token = json_string_value(json_object_get(tokens, "bos_token")),
        .eos_token = json_string_value(json_object_get(tokens, "eos_token")),
        .extra_json = extra,
        .extra_json_len = extra != NULL ? strlen(extra) : 0,
        .now_unix = 1738281600,
    };
    struct bt_buf out = {0};
    struct bt_err err = {0};
    enum bt_status st;

    for (size_t i = 0; i < in.n_messages; i++) {
        const json_t *m = json_array_get(conversation, i);

        msgs[i].role = json_string_value(json_object_get(m, "role"));
        msgs[i].role_len = strlen(msgs[i].role);
        msgs[i].content = json_string_value(json_object_get(m, "content"));
        msgs[i].content_len = strlen(msgs[i].content);
    }
    st = bt_template_render(t, &in, &out, &err);
    if (error != NULL) {
        CHECK_EQ(st, BT_ERR_INVALID);
        CHECK(strstr(err.msg, error + strlen("TemplateError: ")) != NULL);
    } else {
        CHECK_EQ(st, BT_OK);
        CHECK_STR(out.data, json_string_value(json_object_get(c, "text")));
        if (st != BT_OK) {
            fprintf(stderr, "  %s: %s\n", name, err.msg);
        }
    }
    bt_buf_fini(&out);
    free(extra);
}

static void test_published(void)
{
    json_t *templates, *rendered, *cases, *c;
    const char *name;
    size_t i;

    if (access(REFERENCE "chat_templates.json", R_OK) != 0) {
        printf("skipped: published templates (%s is not here)\n", REFERENCE);
        return;
    }
    templates = load(REFERENCE "chat_templates.json");
    rendered = load(REFERENCE "chat_rendered.json");
    json_object_foreach(json_object_get(rendered, "rendered"), name, cases)
    {
        const json_t *entry = json_object_get(templates, name);
        const char *src = json_string_value(json_object_get(entry, "chat_template"));
        struct bt_template *t = NULL;
        struct bt_err err = {0};

        CHECK_EQ(bt_template_compile(src, strlen(src), &t, &err), BT_OK);
        json_array_foreach(cases, i, c)
        {
            const char *which = json_string_value(json_object_get(c, "conversation"));

            check_published(name, t, entry,
                            json_object_get(json_object_get(rendered, "conversations"), which), c);
        }
        bt_template_destroy(t);
    }
    json_decref(templates);
    json_decref(rendered);
}

static enum bt_status render(const char *src, const char *vars, struct bt_buf *out,
                             struct bt_err *err)
{
    struct bt_template *t;
    enum bt_status st = bt_template_compile(src, strlen(src), &t, err);

    if (st == BT_OK) {
        st = bt_template_render_json(t, vars, strlen(vars), 0, out, err);
        bt_template_destroy(t);
    }
    return st;
}

static void check_error(const char *src, enum bt_status want, const char *text)
{
    struct bt_buf out = {0};
    struct bt_err err = {0};

    bt_buf_adds(&out, "kept");
    CHECK_EQ(render(src, "{\"l\":[1,2,3],\"s\":\"text\"}", &out, &err), want);
    CHECK(strstr(err.msg, text) != NULL);
    if (strstr(err.msg, text) == NULL) {
        fprintf(stderr, "  got: %s\n  want: %s\n", err.msg, text);
    }
    CHECK_STR(out.data, "kept");
    bt_buf_fini(&out);
}

static void test_errors(void)
{
    check_error("a\n{{ b.c }}", BT_ERR_INVALID, "line 2 column 6: 'b' is undefined");
    check_error("\n\n  {% include 'x' %}", BT_ERR_UNSUPPORTED,
                "line 3 column 6: unknown or misplaced statement 'include'");
    check_error("{{ s | frobnicate }}", BT_ERR_UNSUPPORTED,
                "line 1 column 8: no filter named 'frobnicate'");
    check_error("{{ s is frob }}", BT_ERR_UNSUPPORTED, "no test named 'frob'");
    check_error("{% if s %}\nx{% for a in l %}", BT_ERR_INVALID, "line 2 column");
    check_error("{{ l.append(4) }}", BT_ERR_INVALID, "not allowed");
    check_error("{{ raise_exception('no such role') }}", BT_ERR_INVALID, "column 19: no such role");
    check_error("{{ s + 1 }}", BT_ERR_INVALID, "'+' does not work between str and int");
    check_error("\xff", BT_ERR_INVALID, "byte 0 is not UTF-8");
    check_error("{{ 9223372036854775807 + 1 }}", BT_ERR_INVALID, "64 bits");
    check_error("{{ 99999999999999999999 }}", BT_ERR_UNSUPPORTED, "64 bits");
}

/* Endless work, memory, output and nesting end in an error, soon. */
static void test_limits(void)
{
    struct bt_buf src = {0};

    check_error(
        "{% set r = range(100000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        BT_ERR_INVALID, "steps");
    check_error("{% for a in range(100000) %}{{ "
                "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx' }}{% endfor %}",
                BT_ERR_INVALID, "output longer");
    check_error("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", BT_ERR_INVALID, "too deeply");
    check_error("{% set ns = namespace(x='ab') %}{% for a in range(100) %}{% set ns.x = ns.x + "
                "ns.x %}{% endfor %}",
                BT_ERR_INVALID, "longer than");
    check_error("{% set ns = namespace(x=[1]) %}{% for a in range(100) %}{% set ns.x = ns.x + ns.x "
                "%}{% endfor %}",
                BT_ERR_INVALID, "memory");
    check_error("{% set ns = namespace(x=[]) %}{% for a in range(1000) %}{% set ns.x = [ns.x] %}{% "
                "endfor %}{{ ns.x }}",
                BT_ERR_INVALID, "nested too deeply");
    check_error("{% set ns = namespace(x=[]) %}{% for a in range(1000) %}{% set ns.x = [ns.x] %}{% "
                "endfor %}{{ ns.x | tojson }}",
                BT_ERR_INVALID, "nested too deeply");
    check_error("{{ 'x' * 999999999999 }}", BT_ERR_INVALID, "repeated");
    check_error("{{ 'x'.center(9999999999) }}", BT_ERR_INVALID, "longer");
    check_error("{{ 'x' | replace('', 'y' * 1000000) | replace('', 'z' * 1000000) }}",
                BT_ERR_INVALID, "longer");
    for (int i = 0; i < 100000; i++) {
        bt_buf_adds(&src, "{# #}");
    }
    bt_buf_adds(&src, "{{ ");
    for (int i = 0; i < 500; i++) {
        bt_buf_addc(&src, '(');
    }
    check_error(src.data, BT_ERR_INVALID, "nested too deeply");
    bt_buf_clear(&src);
    for (int i = 0; i < 1000; i++) {
        bt_buf_adds(&src, "{% if s %}");
    }
    check_error(src.data, BT_ERR_INVALID, "nested too deeply");
    bt_buf_clear(&src);
    bt_buf_adds(&src, "{{ 1");
    for (int i = 0; i < 1000; i++) {
        bt_buf_adds(&src, " - 1");
    }
    bt_buf_adds(&src, "}}");
    check_error(src.data, BT_ERR_INVALID, "too long");
    bt_buf_clear(&src);
    while (src.len <= BT_TEMPLATE_BYTES_MAX) {
        bt_buf_adds(&src, "0123456789abcdef");
    }
    check_error(src.data, BT_ERR_INVALID, "more than");
    bt_buf_fini(&src);
}

static void test_inputs(void)
{
    static const char src[] =
        "{{ messages[0].content }}|{{ tools }}|{{ bos_token is defined }}|{{ eos_token }}|{{ x }}";
    struct bt_chat_msg msg = {"user", 4, "h\0i", 3};
    struct bt_template_inputs in = {.messages = &msg,
                                    .n_messages = 1,
                                    .eos_token = "E",
                                    .extra_json = "{\"x\":[1]}",
                                    .extra_json_len = 9};
    struct bt_template *t = NULL;
    struct bt_buf out = {0};
    struct bt_err err = {0};

    CHECK_EQ(bt_template_compile(src, sizeof src - 1, &t, &err), BT_OK);
    CHECK_EQ(bt_template_render(t, &in, &out, &err), BT_OK);
    CHECK_EQ(out.len, 3 + strlen("|None|False|E|[1]"));
    CHECK(out.data != NULL && memcmp(out.data, "h\0i|None|False|E|[1]", out.len) == 0);
    bt_buf_clear(&out);
    in.extra_json = "[1]";
    in.extra_json_len = 3;
    CHECK_EQ(bt_template_render(t, &in, &out, &err), BT_ERR_INVALID);
    in.extra_json = NULL;
    msg.content = "\xff";
    msg.content_len = 1;
    CHECK_EQ(bt_template_render(t, &in, &out, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "content") != NULL);
    CHECK_EQ(bt_template_render_json(t, "{", 1, 0, &out, &err), BT_ERR_INVALID);
    CHECK_EQ(out.len, 0);
    bt_template_destroy(t);
    bt_buf_fini(&out);
}

/* Every allocation fails once; nothing leaks, nothing half done stays. */
static void test_allocations(void)
{
    static const char src[] = "{% macro m(a, b=1) %}{{ a ~ b }}{% endmacro %}{% for x in l | "
                              "map('string') | sort %}{{ m(x) | upper }}"
                              "{{ {'k': x} | tojson }}{% set y %}{{ x * 3 }}{% endset %}{{ "
                              "y.split('1') | join('-') }}{% endfor %}";
    static const char vars[] = "{\"l\":[3,1,2]}";
    size_t live = bt_test_live_bytes();
    bool fired = true;

    for (uint64_t nth = 0; fired && nth < 1000; nth++) {
        struct bt_buf out = {0};
        enum bt_status st;

        bt_test_fail_alloc(nth);
        st = render(src, vars, &out, NULL);
        fired = bt_test_fail_alloc_off();
        CHECK_EQ(st, fired ? BT_ERR_NOMEM : BT_OK);
        bt_buf_fini(&out);
        CHECK_EQ(bt_test_live_bytes(), live);
    }
    CHECK(!fired);
}

static void write_file(const char *dir, const char *name, const char *text)
{
    char path[512];
    FILE *f;

    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    if (text == NULL) {
        (void)unlink(path);
        return;
    }
    f = fopen(path, "w");
    CHECK(f != NULL && fputs(text, f) >= 0 && fclose(f) == 0);
}

static void check_loaded(const char *dir, const char *want, const char *bos, const char *eos)
{
    struct bt_template_files f = {0};
    struct bt_err err = {0};
    struct bt_buf out = {0};

    CHECK_EQ(bt_template_load(dir, &f, &err), BT_OK);
    CHECK((f.tmpl != NULL) == (want != NULL));
    if (f.tmpl != NULL && want != NULL) {
        CHECK_EQ(bt_template_render_json(f.tmpl, "{}", 2, 0, &out, &err), BT_OK);
        CHECK_STR(out.data, want);
    }
    CHECK_STR(f.bos_token != NULL ? f.bos_token : "", bos);
    CHECK_STR(f.eos_token != NULL ? f.eos_token : "", eos);
    bt_buf_fini(&out);
    bt_template_files_fini(&f);
}

static void test_load(void)
{
    char dir[] = "/tmp/bt_template_XXXXXX";
    struct bt_template_files f = {0};
    struct bt_err err = {0};

    CHECK(mkdtemp(dir) != NULL);
    CHECK_EQ(bt_template_load("/nonexistent/model", &f, &err), BT_ERR_NOT_FOUND);
    check_loaded(dir, NULL, "", "");
    write_file(dir, "tokenizer_config.json",
               "{\"chat_template\": \"a{{ 1 }}\", \"bos_token\": {\"content\": \"<s>\"}, "
               "\"eos_token\": \"</s>\"}");
    check_loaded(dir, "a1", "<s>", "</s>");
    write_file(dir, "tokenizer_config.json",
               "{\"chat_template\": [{\"name\": \"tool_use\", \"template\": \"t\"}, {\"name\": "
               "\"default\", \"template\": \"d\"}], \"bos_token\": null}");
    check_loaded(dir, "d", "", "");
    write_file(dir, "chat_template.json", "{\"chat_template\": \"j\"}");
    check_loaded(dir, "j", "", "");
    write_file(dir, "chat_template.jinja", "x{{ 2 }}\n");
    check_loaded(dir, "x2", "", "");
    write_file(dir, "chat_template.jinja", "{{");
    CHECK(bt_template_load(dir, &f, &err) != BT_OK);
    CHECK(strstr(err.msg, "chat_template.jinja") != NULL);
    write_file(dir, "chat_template.jinja", NULL);
    write_file(dir, "chat_template.json", NULL);
    write_file(dir, "tokenizer_config.json", "{\"chat_template\": 5}");
    CHECK_EQ(bt_template_load(dir, &f, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "tokenizer_config.json") != NULL);
    write_file(dir, "tokenizer_config.json", "{\"bos_token\": 5}");
    CHECK_EQ(bt_template_load(dir, &f, &err), BT_ERR_INVALID);
    write_file(dir, "tokenizer_config.json", "{");
    CHECK_EQ(bt_template_load(dir, &f, &err), BT_ERR_INVALID);
    write_file(dir, "tokenizer_config.json", NULL);
    CHECK_EQ(rmdir(dir), 0);
}

int main(void)
{
    test_language();
    test_chats();
    test_published();
    test_errors();
    test_limits();
    test_inputs();
    test_allocations();
    test_load();
    return bt_test_done();
}
