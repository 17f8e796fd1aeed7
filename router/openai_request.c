/* Bodies of OpenAI-compatible requests, read with jansson. Owns names, types and neutral values; refuses to know what a
 * parameter does. */

#include "router/openai_request.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/mem.h"

#define MESSAGES_MAX       65536u
#define DEFAULT_MAX_TOKENS 16u
#define IDS_MAX            ((size_t)4 << 20)

/* ---- typed members ---- */

static bool wrong_type(const char *name, const char *want, struct bt_api_err *e)
{
    return bt_api_fail(e, BT_API_INVALID, name, "%s: must be %s", name, want);
}

static bool out_of_memory(struct bt_api_err *e)
{
    return bt_api_fail(e, BT_API_INTERNAL, NULL, "out of memory");
}

/* NULL: absent or null, which mean the same. */
static const json_t *member(const json_t *o, const char *name)
{
    const json_t *v = json_object_get(o, name);

    return json_is_null(v) ? NULL : v;
}

/* Each leaves *out alone when the member is absent. */
static bool get_bool(const json_t *o, const char *name, bool *out, struct bt_api_err *e)
{
    const json_t *v = member(o, name);

    if (v == NULL) {
        return true;
    }
    if (!json_is_boolean(v)) {
        return wrong_type(name, "true or false", e);
    }
    *out = json_is_true(v);
    return true;
}

static bool get_float(const json_t *o, const char *name, float *out, struct bt_api_err *e)
{
    const json_t *v = member(o, name);

    if (v == NULL) {
        return true;
    }
    if (!json_is_number(v)) {
        return wrong_type(name, "a number", e);
    }
    *out = (float)json_number_value(v);
    return true;
}

static bool get_int(const json_t *o, const char *name, int64_t min, int64_t max, int64_t *out,
                    bool *has, struct bt_api_err *e)
{
    const json_t *v = member(o, name);

    if (v == NULL) {
        return true;
    }
    if (!json_is_integer(v)) {
        return wrong_type(name, "an integer", e);
    }
    int64_t n = json_integer_value(v);

    if (n < min || n > max) {
        return bt_api_fail(e, BT_API_INVALID, name, "%s: must be from %lld to %lld", name,
                           (long long)min, (long long)max);
    }
    *out = n;
    if (has != NULL) {
        *has = true;
    }
    return true;
}

static bool get_u32(const json_t *o, const char *name, uint32_t *out, bool *has,
                    struct bt_api_err *e)
{
    int64_t n = *out;

    if (!get_int(o, name, 0, UINT32_MAX / 2, &n, has, e)) {
        return false;
    }
    *out = (uint32_t)n;
    return true;
}

static char *dup_string(const json_t *v, size_t *len)
{
    size_t n = json_string_length(v);

    if (len != NULL) {
        *len = n;
    }
    return bt_strndup(json_string_value(v), n);
}

static bool parse_object(const char *body, size_t len, json_t **out, struct bt_api_err *e)
{
    json_error_t err;
    json_t *o = json_loadb(body, len, JSON_ALLOW_NUL, &err);

    if (o == NULL) {
        return bt_api_fail(e, BT_API_INVALID, NULL,
                           "the body is not valid JSON: %s (line %d, column %d)", err.text,
                           err.line, err.column);
    }
    if (!json_is_object(o)) {
        json_decref(o);
        return bt_api_fail(e, BT_API_INVALID, NULL, "the body must be a JSON object");
    }
    *out = o;
    return true;
}

/* ---- known fields without support: their neutral values, as JSON ---- */

enum where { IN_BOTH, IN_COMPLETIONS, IN_CHAT };
static const struct {
    const char *name, *neutral;
    enum where where;
} unsupported[] = {
    {"suffix", "[\"\"]", IN_COMPLETIONS},
    {"use_beam_search", "[false]", IN_BOTH},
    {"length_penalty", "[1, 1.0]", IN_BOTH},
    {"early_stopping", "[false]", IN_BOTH},
    {"include_stop_str_in_output", "[false]", IN_BOTH},
    {"spaces_between_special_tokens", "[true]", IN_BOTH},
    {"truncate_prompt_tokens", "[]", IN_BOTH},
    {"prompt_logprobs", "[]", IN_BOTH},
    {"allowed_token_ids", "[]", IN_BOTH},
    {"bad_words", "[[]]", IN_BOTH},
    {"logits_processors", "[[]]", IN_BOTH},
    {"response_format", "[{\"type\": \"text\"}]", IN_BOTH},
    {"structured_outputs", "[]", IN_BOTH},
    {"guided_json", "[]", IN_BOTH},
    {"guided_regex", "[]", IN_BOTH},
    {"guided_choice", "[]", IN_BOTH},
    {"guided_grammar", "[]", IN_BOTH},
    {"grammar", "[\"\"]", IN_BOTH},
    {"return_tokens_as_token_ids", "[false]", IN_BOTH},
    {"return_token_ids", "[false]", IN_BOTH},
    {"kv_transfer_params", "[]", IN_BOTH},
    {"prompt_embeds", "[]", IN_BOTH},
    {"tools", "[[]]", IN_CHAT},
    {"tool_choice", "[\"none\", \"auto\"]", IN_CHAT},
    {"functions", "[[]]", IN_CHAT},
    {"function_call", "[\"none\", \"auto\"]", IN_CHAT},
    {"modalities", "[[\"text\"], []]", IN_CHAT},
    {"audio", "[]", IN_CHAT},
    {"prediction", "[]", IN_CHAT},
    {"reasoning_effort", "[]", IN_CHAT},
    {"verbosity", "[\"medium\"]", IN_CHAT},
    {"web_search_options", "[]", IN_CHAT},
    {"continue_final_message", "[false]", IN_CHAT},
    {"chat_template", "[]", IN_CHAT},
    {"documents", "[[]]", IN_CHAT},
    {"store", "[false]", IN_CHAT},
    {"echo", "[false]", IN_CHAT},
    {"add_special_tokens", "[false]", IN_CHAT},
};

static bool check_unsupported(const json_t *o, bool chat, struct bt_api_err *e)
{
    for (size_t i = 0; i < sizeof unsupported / sizeof unsupported[0]; i++) {
        const json_t *v = member(o, unsupported[i].name);
        bool neutral = false;

        if (v == NULL || unsupported[i].where == (chat ? IN_COMPLETIONS : IN_CHAT)) {
            continue;
        }
        json_t *list = json_loads(unsupported[i].neutral, 0, NULL);

        for (size_t k = 0; k < json_array_size(list); k++) {
            neutral = neutral || json_equal(v, json_array_get(list, k));
        }
        json_decref(list);
        if (!neutral) {
            return bt_api_fail(e, BT_API_INVALID, unsupported[i].name,
                               "%s: this value is not supported", unsupported[i].name);
        }
    }
    return true;
}

/* ---- sampling ---- */

static bool get_stop(const json_t *o, struct bt_params *p, struct bt_api_err *e)
{
    const json_t *v = member(o, "stop");

    if (v == NULL) {
        return true;
    }
    if (json_is_string(v)) {
        return bt_params_add_stop(p, json_string_value(v), json_string_length(v), e);
    }
    if (!json_is_array(v)) {
        return wrong_type("stop", "a string or a list of strings", e);
    }
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *s = json_array_get(v, i);

        if (!json_is_string(s)) {
            return wrong_type("stop", "a string or a list of strings", e);
        }
        if (!bt_params_add_stop(p, json_string_value(s), json_string_length(s), e)) {
            return false;
        }
    }
    return true;
}

static bool get_stop_ids(const json_t *o, struct bt_params *p, struct bt_api_err *e)
{
    const json_t *v = member(o, "stop_token_ids");

    if (v == NULL) {
        return true;
    }
    if (!json_is_array(v)) {
        return wrong_type("stop_token_ids", "a list of integers", e);
    }
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *id = json_array_get(v, i);

        if (!json_is_integer(id) || json_integer_value(id) < 0) {
            return wrong_type("stop_token_ids", "a list of integers, none negative", e);
        }
        if (!bt_params_add_stop_id(p, (uint64_t)json_integer_value(id), e)) {
            return false;
        }
    }
    return true;
}

static bool get_bias(const json_t *o, struct bt_params *p, struct bt_api_err *e)
{
    const json_t *v = member(o, "logit_bias");

    if (v == NULL) {
        return true;
    }
    if (!json_is_object(v)) {
        return wrong_type("logit_bias", "an object from token id to number", e);
    }
    for (void *it = json_object_iter((json_t *)(uintptr_t)v); it != NULL;
         it = json_object_iter_next((json_t *)(uintptr_t)v, it)) {
        const char *key = json_object_iter_key(it);
        const json_t *bias = json_object_iter_value(it);
        uint64_t id = 0;
        size_t n = strspn(key, "0123456789");

        if (n == 0 || n > 10 || key[n] != '\0' || !json_is_number(bias)) {
            return wrong_type("logit_bias", "an object from token id to number", e);
        }
        for (size_t i = 0; i < n; i++) {
            id = id * 10 + (uint64_t)(key[i] - '0');
        }
        if (!bt_params_add_bias(p, id, json_number_value(bias), e)) {
            return false;
        }
    }
    return true;
}

/* The order in which an object was written is not the client's intent: biases are kept in the order of ids. */
static void sort_bias(struct bt_params *p)
{
    for (uint32_t i = 1; i < p->sampling.n_bias; i++) {
        struct bt_logit_bias x = p->bias[i];
        uint32_t k = i;

        for (; k > 0 && p->bias[k - 1].token > x.token; k--) {
            p->bias[k] = p->bias[k - 1];
        }
        p->bias[k] = x;
    }
}

/* -1 and 0 both switch it off. */
static bool get_top_k(const json_t *o, struct bt_params *p, struct bt_api_err *e)
{
    int64_t k = 0;

    if (!get_int(o, "top_k", -1, INT32_MAX, &k, NULL, e)) {
        return false;
    }
    p->sampling.top_k = k > 0 ? (uint32_t)k : 0;
    return true;
}

static bool get_seed(const json_t *o, struct bt_params *p, struct bt_api_err *e)
{
    int64_t seed = 0;

    if (!get_int(o, "seed", INT64_MIN, INT64_MAX, &seed, &p->has_seed, e)) {
        return false;
    }
    p->sampling.seed = (uint64_t)seed;
    return true;
}

static bool get_max_tokens(const json_t *o, bool chat, struct bt_params *p, struct bt_api_err *e)
{
    uint32_t old = 0, new = 0;
    bool has_old = false, has_new = false;

    if (!get_u32(o, "max_tokens", &old, &has_old, e) ||
        !get_u32(o, "max_completion_tokens", &new, &has_new, e)) {
        return false;
    }
    if (has_old && has_new && old != new) {
        return bt_api_fail(e, BT_API_INVALID, "max_completion_tokens",
                           "max_tokens and max_completion_tokens differ: %u and %u", old, new);
    }
    p->has_max_tokens = has_old || has_new || !chat;
    p->sampling.max_tokens = has_new ? new : has_old ? old : chat ? 0 : DEFAULT_MAX_TOKENS;
    return true;
}

static bool get_logprobs(const json_t *o, bool chat, struct bt_params *p, struct bt_api_err *e)
{
    struct bt_sampling *s = &p->sampling;
    bool has_top = false;

    if (!chat) {
        const json_t *v = member(o, "logprobs");

        if (v != NULL && json_is_boolean(v)) {
            return wrong_type("logprobs", "an integer", e);
        }
        return get_u32(o, "logprobs", &s->n_top, &s->logprobs, e);
    }
    if (!get_bool(o, "logprobs", &s->logprobs, e) ||
        !get_u32(o, "top_logprobs", &s->n_top, &has_top, e)) {
        return false;
    }
    if (s->n_top > 0 && !s->logprobs) {
        return bt_api_fail(e, BT_API_INVALID, "top_logprobs", "top_logprobs: needs logprobs: true");
    }
    if (s->n_top > BT_LOGPROBS_MAX) {
        return bt_api_fail(e, BT_API_INVALID, "top_logprobs", "top_logprobs: at most %d",
                           BT_LOGPROBS_MAX);
    }
    return true;
}

static bool get_best_of(const json_t *o, const struct bt_params *p, struct bt_api_err *e)
{
    int64_t best_of = 1;

    if (!get_int(o, "best_of", 1, BT_PARAMS_N_MAX, &best_of, NULL, e)) {
        return false;
    }
    if (best_of != 1 && best_of != (int64_t)p->n) {
        return bt_api_fail(e, BT_API_INVALID, "best_of",
                           "best_of: only 1, or as many as n, is supported");
    }
    return true;
}

static bool get_params(const json_t *o, bool chat, struct bt_params *p, struct bt_api_err *e)
{
    struct bt_sampling *s = &p->sampling;
    int64_t priority = 0;
    bool skip_special = true;

    if (!get_float(o, "temperature", &s->temperature, e) || !get_float(o, "top_p", &s->top_p, e) ||
        !get_float(o, "min_p", &s->min_p, e) ||
        !get_float(o, "repetition_penalty", &s->repetition_penalty, e) ||
        !get_float(o, "presence_penalty", &s->presence_penalty, e) ||
        !get_float(o, "frequency_penalty", &s->frequency_penalty, e) || !get_top_k(o, p, e) ||
        !get_seed(o, p, e) || !get_max_tokens(o, chat, p, e) ||
        !get_u32(o, "min_tokens", &s->min_tokens, NULL, e) || !get_u32(o, "n", &p->n, NULL, e) ||
        !get_bool(o, "ignore_eos", &s->ignore_eos, e) || !get_stop(o, p, e) ||
        !get_stop_ids(o, p, e) || !get_bias(o, p, e) || !get_logprobs(o, chat, p, e) ||
        !get_best_of(o, p, e) || !get_bool(o, "timings", &p->timings, e) ||
        !get_bool(o, "skip_special_tokens", &skip_special, e) ||
        !get_int(o, "priority", INT32_MIN, INT32_MAX, &priority, NULL, e)) {
        return false;
    }
    if (!chat && !get_bool(o, "echo", &p->echo, e)) {
        return false;
    }
    sort_bias(p);
    p->priority = (int32_t)priority;
    p->keep_special = !skip_special;
    return true;
}

static bool get_stream(const json_t *o, struct bt_openai_request *q, struct bt_api_err *e)
{
    const json_t *v = member(o, "stream_options");

    if (!get_bool(o, "stream", &q->stream, e) || v == NULL) {
        return e->code == BT_API_OK;
    }
    if (!json_is_object(v)) {
        return wrong_type("stream_options", "an object", e);
    }
    if (!q->stream) {
        return bt_api_fail(e, BT_API_INVALID, "stream_options",
                           "stream_options: only together with stream: true");
    }
    return get_bool(v, "include_usage", &q->include_usage, e) &&
           get_bool(v, "continuous_usage_stats", &q->continuous_usage, e);
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
        return out_of_memory(e);
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
        p->text = dup_string(v, &p->text_len);
        return p->text != NULL ? true : out_of_memory(e);
    }
    if (json_is_array(v)) {
        return copy_ids(v, p, "prompt", e);
    }
    return wrong_type(
        "prompt", "a string, a list of strings, a list of token ids, or a list of such lists", e);
}

static bool get_prompts(const json_t *o, struct bt_openai_request *q, struct bt_api_err *e)
{
    const json_t *v = member(o, "prompt");
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
        return out_of_memory(e);
    }
    q->n_prompts = n;
    for (size_t i = 0; i < n; i++) {
        const json_t *one = many ? json_array_get(v, i) : v;

        if (many && json_typeof(one) != json_typeof(first)) {
            return wrong_type("prompt", "a list of one kind", e);
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
        (void)out_of_memory(e);
    }
    return s;
}

static bool get_message(const json_t *v, size_t i, struct bt_openai_message *m,
                        struct bt_api_err *e)
{
    char where[48];
    const json_t *role = member(v, "role"), *content = member(v, "content");

    snprintf(where, sizeof where, "messages[%zu]", i);
    if (!json_is_object(v) || !json_is_string(role)) {
        return bt_api_fail(e, BT_API_INVALID, "messages", "%s: must be an object with a role",
                           where);
    }
    if (json_array_size(member(v, "tool_calls")) > 0 || member(v, "function_call") != NULL) {
        return bt_api_fail(e, BT_API_INVALID, "messages", "%s: tool calls are not supported",
                           where);
    }
    m->role = dup_string(role, &m->role_len);
    if (json_is_string(content)) {
        m->content = dup_string(content, &m->content_len);
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
    return m->role != NULL && m->content != NULL ? true : out_of_memory(e);
}

static bool get_messages(const json_t *o, struct bt_openai_request *q, struct bt_api_err *e)
{
    const json_t *v = member(o, "messages"), *kwargs = member(o, "chat_template_kwargs");
    size_t n = json_array_size(v);

    if (n == 0 || n > MESSAGES_MAX) {
        return wrong_type("messages", "a list of messages, at least one", e);
    }
    q->messages = bt_calloc(n, sizeof *q->messages);
    if (q->messages == NULL) {
        return out_of_memory(e);
    }
    q->n_messages = n;
    for (size_t i = 0; i < n; i++) {
        if (!get_message(json_array_get(v, i), i, &q->messages[i], e)) {
            return false;
        }
    }
    if (!get_bool(o, "add_generation_prompt", &q->add_generation_prompt, e) || kwargs == NULL) {
        return e->code == BT_API_OK;
    }
    if (!json_is_object(kwargs)) {
        return wrong_type("chat_template_kwargs", "an object", e);
    }
    size_t bytes = json_dumpb(kwargs, NULL, 0, JSON_COMPACT);

    q->template_json = bt_calloc(1, bytes + 1);
    if (q->template_json == NULL) {
        return out_of_memory(e);
    }
    (void)json_dumpb(kwargs, q->template_json, bytes, JSON_COMPACT);
    return true;
}

/* ---- requests ---- */

static bool get_request(const json_t *o, struct bt_openai_request *q, struct bt_api_err *e)
{
    const json_t *model = member(o, "model");

    if (model != NULL && !json_is_string(model)) {
        return wrong_type("model", "a string", e);
    }
    if (model != NULL && (q->model = dup_string(model, NULL)) == NULL) {
        return out_of_memory(e);
    }
    if (!get_params(o, q->chat, &q->params, e) || !get_stream(o, q, e) ||
        !check_unsupported(o, q->chat, e)) {
        return false;
    }
    if (q->chat) {
        return get_messages(o, q, e);
    }
    return get_bool(o, "add_special_tokens", &q->add_special, e) && get_prompts(o, q, e);
}

bool bt_openai_parse(const char *body, size_t len, bool chat, struct bt_openai_request *out,
                     struct bt_api_err *e)
{
    json_t *o = NULL;

    *out = (struct bt_openai_request){
        .chat = chat, .add_special = true, .add_generation_prompt = true};
    bt_params_init(&out->params);
    *e = (struct bt_api_err){0};
    if (!parse_object(body, len, &o, e)) {
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
        return out_of_memory(e);
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
    if (!parse_object(body, len, &o, e)) {
        return false;
    }
    const json_t *v = member(o, "prompt");
    bool ok = get_bool(o, "add_special_tokens", &out->add_special, e) &&
              get_bool(o, "parse_special", &out->parse_special, e);

    if (ok && !json_is_string(v)) {
        ok = wrong_type("prompt", "a string", e);
    }
    if (ok) {
        out->text = dup_string(v, &out->text_len);
        ok = out->text != NULL ? true : out_of_memory(e);
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
    if (!parse_object(body, len, &o, e)) {
        return false;
    }
    const json_t *v = member(o, "tokens");
    bool ok = get_bool(o, "skip_special_tokens", &out->skip_special, e);

    if (ok) {
        ok = json_is_array(v) ? copy_ids(v, &p, "tokens", e)
                              : wrong_type("tokens", "a list of token ids", e);
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
