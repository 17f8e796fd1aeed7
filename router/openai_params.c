/* Parameters of OpenAI-compatible requests. Owns their names, types and neutral values; refuses to know what they do. */

#include <stdio.h>
#include <string.h>
#include "base/mem.h"
#include "router/openai_json_int.h"

#define DEFAULT_MAX_TOKENS 16u

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

bool bt_openai_check_unsupported(const json_t *o, bool chat, struct bt_api_err *e)
{
    for (size_t i = 0; i < sizeof unsupported / sizeof unsupported[0]; i++) {
        const json_t *v = bt_json_member(o, unsupported[i].name);
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
    const json_t *v = bt_json_member(o, "stop");

    if (v == NULL) {
        return true;
    }
    if (json_is_string(v)) {
        return bt_params_add_stop(p, json_string_value(v), json_string_length(v), e);
    }
    if (!json_is_array(v)) {
        return bt_json_wrong_type("stop", "a string or a list of strings", e);
    }
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *s = json_array_get(v, i);

        if (!json_is_string(s)) {
            return bt_json_wrong_type("stop", "a string or a list of strings", e);
        }
        if (!bt_params_add_stop(p, json_string_value(s), json_string_length(s), e)) {
            return false;
        }
    }
    return true;
}

static bool get_stop_ids(const json_t *o, struct bt_params *p, struct bt_api_err *e)
{
    const json_t *v = bt_json_member(o, "stop_token_ids");

    if (v == NULL) {
        return true;
    }
    if (!json_is_array(v)) {
        return bt_json_wrong_type("stop_token_ids", "a list of integers", e);
    }
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *id = json_array_get(v, i);

        if (!json_is_integer(id) || json_integer_value(id) < 0) {
            return bt_json_wrong_type("stop_token_ids", "a list of integers, none negative", e);
        }
        if (!bt_params_add_stop_id(p, (uint64_t)json_integer_value(id), e)) {
            return false;
        }
    }
    return true;
}

static bool get_bias(const json_t *o, struct bt_params *p, struct bt_api_err *e)
{
    const json_t *v = bt_json_member(o, "logit_bias");

    if (v == NULL) {
        return true;
    }
    if (!json_is_object(v)) {
        return bt_json_wrong_type("logit_bias", "an object from token id to number", e);
    }
    for (void *it = json_object_iter((json_t *)(uintptr_t)v); it != NULL;
         it = json_object_iter_next((json_t *)(uintptr_t)v, it)) {
        const char *key = json_object_iter_key(it);
        const json_t *bias = json_object_iter_value(it);
        uint64_t id = 0;
        size_t n = strspn(key, "0123456789");

        if (n == 0 || n > 10 || key[n] != '\0' || !json_is_number(bias)) {
            return bt_json_wrong_type("logit_bias", "an object from token id to number", e);
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

    if (!bt_json_int(o, "top_k", -1, INT32_MAX, &k, NULL, e)) {
        return false;
    }
    p->sampling.top_k = k > 0 ? (uint32_t)k : 0;
    return true;
}

static bool get_seed(const json_t *o, struct bt_params *p, struct bt_api_err *e)
{
    int64_t seed = 0;

    if (!bt_json_int(o, "seed", INT64_MIN, INT64_MAX, &seed, &p->has_seed, e)) {
        return false;
    }
    p->sampling.seed = (uint64_t)seed;
    return true;
}

static bool get_max_tokens(const json_t *o, bool chat, struct bt_params *p, struct bt_api_err *e)
{
    uint32_t old = 0, new = 0;
    bool has_old = false, has_new = false;

    if (!bt_json_u32(o, "max_tokens", &old, &has_old, e) ||
        !bt_json_u32(o, "max_completion_tokens", &new, &has_new, e)) {
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
        const json_t *v = bt_json_member(o, "logprobs");

        if (v != NULL && json_is_boolean(v)) {
            return bt_json_wrong_type("logprobs", "an integer", e);
        }
        return bt_json_u32(o, "logprobs", &s->n_top, &s->logprobs, e);
    }
    if (!bt_json_bool(o, "logprobs", &s->logprobs, e) ||
        !bt_json_u32(o, "top_logprobs", &s->n_top, &has_top, e)) {
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

    if (!bt_json_int(o, "best_of", 1, BT_PARAMS_N_MAX, &best_of, NULL, e)) {
        return false;
    }
    if (best_of != 1 && best_of != (int64_t)p->n) {
        return bt_api_fail(e, BT_API_INVALID, "best_of",
                           "best_of: only 1, or as many as n, is supported");
    }
    return true;
}

bool bt_openai_get_params(const json_t *o, bool chat, struct bt_params *p, struct bt_api_err *e)
{
    struct bt_sampling *s = &p->sampling;
    int64_t priority = 0;
    bool skip_special = true;

    if (!bt_json_float(o, "temperature", &s->temperature, e) ||
        !bt_json_float(o, "top_p", &s->top_p, e) || !bt_json_float(o, "min_p", &s->min_p, e) ||
        !bt_json_float(o, "repetition_penalty", &s->repetition_penalty, e) ||
        !bt_json_float(o, "presence_penalty", &s->presence_penalty, e) ||
        !bt_json_float(o, "frequency_penalty", &s->frequency_penalty, e) || !get_top_k(o, p, e) ||
        !get_seed(o, p, e) || !get_max_tokens(o, chat, p, e) ||
        !bt_json_u32(o, "min_tokens", &s->min_tokens, NULL, e) ||
        !bt_json_u32(o, "n", &p->n, NULL, e) || !bt_json_bool(o, "ignore_eos", &s->ignore_eos, e) ||
        !get_stop(o, p, e) || !get_stop_ids(o, p, e) || !get_bias(o, p, e) ||
        !get_logprobs(o, chat, p, e) || !get_best_of(o, p, e) ||
        !bt_json_bool(o, "timings", &p->timings, e) ||
        !bt_json_bool(o, "skip_special_tokens", &skip_special, e) ||
        !bt_json_int(o, "priority", INT32_MIN, INT32_MAX, &priority, NULL, e)) {
        return false;
    }
    if (!chat && !bt_json_bool(o, "echo", &p->echo, e)) {
        return false;
    }
    sort_bias(p);
    p->priority = (int32_t)priority;
    p->keep_special = !skip_special;
    return true;
}
