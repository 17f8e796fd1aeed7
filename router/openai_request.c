/* Bodies of OpenAI-compatible requests, read with jansson. Owns prompts and messages; refuses to know
 * sampling parameters (openai_params.c) and what becomes of the request. */

#include "router/openai_request.h"

#include <stdio.h>
#include <string.h>
#include "base/mem.h"
#include "router/openai_json_int.h"

#define MESSAGES_MAX 65536u
#define IDS_MAX      ((size_t)4 << 20)

static bool get_stream(const json_t *o, struct bt_openai_request *q, struct bt_api_err *e)
{
    const json_t *v = bt_json_member(o, "stream_options");

    if (!bt_json_bool(o, "stream", &q->stream, e) || v == NULL) {
        return e->code == BT_API_OK;
    }
    if (!json_is_object(v)) {
        return bt_json_wrong_type("stream_options", "an object", e);
    }
    if (!q->stream) {
        return bt_api_fail(e, BT_API_INVALID, "stream_options",
                           "stream_options: only together with stream: true");
    }
    return bt_json_bool(v, "include_usage", &q->include_usage, e) &&
           bt_json_bool(v, "continuous_usage_stats", &q->continuous_usage, e);
}

/* ---- prompts ---- */

static bool copy_ids(const json_t *list, struct bt_gen_prompt *p, const char *name,
                     struct bt_api_err *e)
{
    size_t n = json_array_size(list);

    if (n > IDS_MAX) {
        return bt_api_fail(e, BT_API_INVALID, name, "%s: more than %zu token ids", name, IDS_MAX);
    }
    p->ids = bt_alloc(n * sizeof *p->ids);
    if (p->ids == NULL) {
        return bt_json_out_of_memory(e);
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_array_get(list, i);

        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) > UINT32_MAX) {
            return bt_api_fail(e, BT_API_INVALID, name, "%s: element %zu is not a token id", name,
                               i);
        }
        p->ids[i] = (uint32_t)json_integer_value(id);
    }
    p->n = (uint32_t)n;
    return true;
}

static bool get_prompt(const json_t *v, struct bt_gen_prompt *p, struct bt_api_err *e)
{
    if (json_is_string(v)) {
        p->text = bt_json_dup_string(v, &p->text_len);
        return p->text != NULL ? true : bt_json_out_of_memory(e);
    }
    if (json_is_array(v)) {
        return copy_ids(v, p, "prompt", e);
    }
    return bt_json_wrong_type(
        "prompt", "a string, a list of strings, a list of token ids, or a list of such lists", e);
}

static bool get_prompts(const json_t *o, struct bt_openai_request *q, struct bt_api_err *e)
{
    const json_t *v = bt_json_member(o, "prompt");
    const json_t *first = json_array_get(v, 0);
    bool many = json_is_string(first) || json_is_array(first);

    if (v == NULL) {
        return bt_api_fail(e, BT_API_INVALID, "prompt", "prompt: is missing");
    }
    if (json_is_array(v) && first == NULL) {
        return bt_api_fail(e, BT_API_INVALID, "prompt", "prompt: is empty");
    }
    size_t n = many ? json_array_size(v) : 1;

    if (n > BT_PARAMS_PROMPTS_MAX) {
        return bt_api_fail(e, BT_API_INVALID, "prompt", "prompt: at most %u prompts",
                           BT_PARAMS_PROMPTS_MAX);
    }
    q->prompts = bt_calloc(n, sizeof *q->prompts);
    if (q->prompts == NULL) {
        return bt_json_out_of_memory(e);
    }
    q->n_prompts = n;
    for (size_t i = 0; i < n; i++) {
        const json_t *one = many ? json_array_get(v, i) : v;

        if (many && json_typeof(one) != json_typeof(first)) {
            return bt_json_wrong_type("prompt", "a list of one kind", e);
        }
        if (!get_prompt(one, &q->prompts[i], e)) {
            return false;
        }
    }
    return true;
}

/* ---- messages ---- */

/* Text parts are joined by line breaks. */
static char *join_parts(const json_t *parts, size_t *len, const char *where, struct bt_api_err *e)
{
    struct bt_buf b = {0};

    for (size_t i = 0; i < json_array_size(parts); i++) {
        const json_t *part = json_array_get(parts, i);
        const char *type = json_string_value(json_object_get(part, "type"));
        const json_t *text = json_object_get(part, "text");

        if (type == NULL || strcmp(type, "text") != 0 || !json_is_string(text)) {
            bt_buf_fini(&b);
            (void)bt_api_fail(e, BT_API_INVALID, "messages",
                              "%s.content[%zu]: only text parts are supported", where, i);
            return NULL;
        }
        if (i > 0) {
            bt_buf_addc(&b, '\n');
        }
        bt_buf_add(&b, json_string_value(text), json_string_length(text));
    }
    char *s = bt_buf_take(&b, len);

    if (s == NULL) {
        bt_buf_fini(&b);
        (void)bt_json_out_of_memory(e);
    }
    return s;
}

static bool get_message(const json_t *v, size_t i, struct bt_openai_message *m,
                        struct bt_api_err *e)
{
    char where[48];
    const json_t *role = bt_json_member(v, "role"), *content = bt_json_member(v, "content");

    snprintf(where, sizeof where, "messages[%zu]", i);
    if (!json_is_object(v) || !json_is_string(role)) {
        return bt_api_fail(e, BT_API_INVALID, "messages", "%s: must be an object with a role",
                           where);
    }
    if (json_array_size(bt_json_member(v, "tool_calls")) > 0 ||
        bt_json_member(v, "function_call") != NULL) {
        return bt_api_fail(e, BT_API_INVALID, "messages", "%s: tool calls are not supported",
                           where);
    }
    m->role = bt_json_dup_string(role, &m->role_len);
    if (json_is_string(content)) {
        m->content = bt_json_dup_string(content, &m->content_len);
    } else if (json_is_array(content)) {
        m->content = join_parts(content, &m->content_len, where, e);
        if (m->content == NULL) {
            return false;
        }
    } else if (content == NULL && strcmp(json_string_value(role), "assistant") == 0) {
        m->content = bt_strdup("");
    } else {
        return bt_api_fail(e, BT_API_INVALID, "messages",
                           "%s.content: must be a string or a list of text parts", where);
    }
    return m->role != NULL && m->content != NULL ? true : bt_json_out_of_memory(e);
}

static bool get_messages(const json_t *o, struct bt_openai_request *q, struct bt_api_err *e)
{
    const json_t *v = bt_json_member(o, "messages"),
                 *kwargs = bt_json_member(o, "chat_template_kwargs");
    size_t n = json_array_size(v);

    if (n == 0 || n > MESSAGES_MAX) {
        return bt_json_wrong_type("messages", "a list of messages, at least one", e);
    }
    q->messages = bt_calloc(n, sizeof *q->messages);
    if (q->messages == NULL) {
        return bt_json_out_of_memory(e);
    }
    q->n_messages = n;
    for (size_t i = 0; i < n; i++) {
        if (!get_message(json_array_get(v, i), i, &q->messages[i], e)) {
            return false;
        }
    }
    if (!bt_json_bool(o, "add_generation_prompt", &q->add_generation_prompt, e) || kwargs == NULL) {
        return e->code == BT_API_OK;
    }
    if (!json_is_object(kwargs)) {
        return bt_json_wrong_type("chat_template_kwargs", "an object", e);
    }
    size_t bytes = json_dumpb(kwargs, NULL, 0, JSON_COMPACT);

    q->template_json = bt_calloc(1, bytes + 1);
    if (q->template_json == NULL) {
        return bt_json_out_of_memory(e);
    }
    (void)json_dumpb(kwargs, q->template_json, bytes, JSON_COMPACT);
    return true;
}

/* ---- requests ---- */

static bool get_request(const json_t *o, struct bt_openai_request *q, struct bt_api_err *e)
{
    const json_t *model = bt_json_member(o, "model");

    if (model != NULL &&
        (!json_is_string(model) || strlen(json_string_value(model)) != json_string_length(model))) {
        return bt_json_wrong_type("model", "a string without NUL", e);
    }
    if (model != NULL && (q->model = bt_json_dup_string(model, NULL)) == NULL) {
        return bt_json_out_of_memory(e);
    }
    if (!bt_openai_get_params(o, q->chat, &q->params, e) || !get_stream(o, q, e) ||
        !bt_openai_check_unsupported(o, q->chat, e)) {
        return false;
    }
    if (q->chat) {
        return get_messages(o, q, e);
    }
    return bt_json_bool(o, "add_special_tokens", &q->add_special, e) && get_prompts(o, q, e);
}

bool bt_openai_parse(const char *body, size_t len, bool chat, struct bt_openai_request *out,
                     struct bt_api_err *e)
{
    json_t *o = NULL;

    *out = (struct bt_openai_request){
        .chat = chat, .add_special = true, .add_generation_prompt = true};
    bt_params_init(&out->params);
    *e = (struct bt_api_err){0};
    if (!bt_json_parse_object(body, len, &o, e)) {
        return false;
    }
    bool ok = get_request(o, out, e);

    json_decref(o);
    return ok;
}

void bt_openai_request_free(struct bt_openai_request *q)
{
    for (size_t i = 0; i < q->n_messages; i++) {
        bt_free(q->messages[i].role);
        bt_free(q->messages[i].content);
    }
    bt_free(q->messages);
    bt_free(q->model);
    bt_free(q->template_json);
    bt_gen_prompts_free(q->prompts, q->n_prompts);
    bt_params_fini(&q->params);
    *q = (struct bt_openai_request){0};
}

static bool tokenize_chat(struct bt_openai_request *q, const struct bt_prompt_env *env,
                          struct bt_api_err *e)
{
    struct bt_chat_msg *list = bt_calloc(q->n_messages, sizeof *list);

    q->prompts = bt_calloc(1, sizeof *q->prompts);
    q->n_prompts = q->prompts != NULL ? 1 : 0;
    if (list == NULL || q->prompts == NULL) {
        bt_free(list);
        return bt_json_out_of_memory(e);
    }
    for (size_t i = 0; i < q->n_messages; i++) {
        const struct bt_openai_message *m = &q->messages[i];

        list[i] = (struct bt_chat_msg){m->role, m->role_len, m->content, m->content_len};
    }
    bool ok = bt_prompt_from_chat(
        env,
        &(struct bt_prompt_chat){
            .messages = list,
            .n_messages = q->n_messages,
            .add_generation_prompt = q->add_generation_prompt,
            .extra_json = q->template_json,
            .extra_json_len = q->template_json != NULL ? strlen(q->template_json) : 0,
        },
        &q->prompts[0], e);

    bt_free(list);
    return ok;
}

bool bt_openai_tokenize(struct bt_openai_request *q, const struct bt_prompt_env *env,
                        struct bt_api_err *e)
{
    if (q->chat) {
        return tokenize_chat(q, env, e);
    }
    for (size_t i = 0; i < q->n_prompts; i++) {
        struct bt_gen_prompt *p = &q->prompts[i];

        if (p->text != NULL &&
            !bt_prompt_from_text(env, p->text, p->text_len, q->add_special, p, e)) {
            return false;
        }
    }
    return true;
}

/* ---- /tokenize, /detokenize ---- */

bool bt_openai_parse_tokenize(const char *body, size_t len, struct bt_openai_tokens *out,
                              struct bt_api_err *e)
{
    json_t *o = NULL;

    *out = (struct bt_openai_tokens){.add_special = true};
    if (!bt_json_parse_object(body, len, &o, e)) {
        return false;
    }
    const json_t *v = bt_json_member(o, "prompt");
    bool ok = bt_json_bool(o, "add_special_tokens", &out->add_special, e) &&
              bt_json_bool(o, "parse_special", &out->parse_special, e);

    if (ok && !json_is_string(v)) {
        ok = bt_json_wrong_type("prompt", "a string", e);
    }
    if (ok) {
        out->text = bt_json_dup_string(v, &out->text_len);
        ok = out->text != NULL ? true : bt_json_out_of_memory(e);
    }
    json_decref(o);
    return ok;
}

bool bt_openai_parse_detokenize(const char *body, size_t len, struct bt_openai_tokens *out,
                                struct bt_api_err *e)
{
    struct bt_gen_prompt p = {0};
    json_t *o = NULL;

    *out = (struct bt_openai_tokens){0};
    if (!bt_json_parse_object(body, len, &o, e)) {
        return false;
    }
    const json_t *v = bt_json_member(o, "tokens");
    bool ok = bt_json_bool(o, "skip_special_tokens", &out->skip_special, e);

    if (ok) {
        ok = json_is_array(v) ? copy_ids(v, &p, "tokens", e)
                              : bt_json_wrong_type("tokens", "a list of token ids", e);
    }
    out->ids = p.ids;
    out->n_ids = p.n;
    json_decref(o);
    return ok;
}

void bt_openai_tokens_free(struct bt_openai_tokens *t)
{
    bt_free(t->text);
    bt_free(t->ids);
    *t = (struct bt_openai_tokens){0};
}
