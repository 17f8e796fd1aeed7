#ifndef BT_ROUTER_OPENAI_REQUEST_H
#define BT_ROUTER_OPENAI_REQUEST_H

/* Bodies of OpenAI-compatible requests. Parsing is strict in types, names the parameter at fault, ignores fields that
 * nobody knows, and refuses known ones whose meaning is not supported unless their value is neutral. Pure: any thread. */

#include <stdbool.h>
#include <stddef.h>
#include "router/api.h"
#include "router/prompt.h"

struct bt_openai_message {
    char *role, *content;
    size_t role_len, content_len;
};

struct bt_openai_request {
    bool chat;
    char *model; /* NULL: absent */
    struct bt_params params;
    bool stream, include_usage, continuous_usage;
    bool add_special; /* to text prompts */
    struct bt_gen_prompt
        *prompts; /* text or ids, as sent; bt_openai_tokenize() fills in the rest */
    size_t n_prompts;
    struct bt_openai_message *messages; /* chat */
    size_t n_messages;
    bool add_generation_prompt;
    char *template_json; /* chat_template_kwargs; NULL: none */
};

/* max_tokens absent: 16 for completions, 0 for chat (what is left). The result is freed in any case. */
bool bt_openai_parse(const char *body, size_t len, bool chat, struct bt_openai_request *out,
                     struct bt_api_err *e);
/* Texts and messages to ids. */
bool bt_openai_tokenize(struct bt_openai_request *q, const struct bt_prompt_env *env,
                        struct bt_api_err *e);
void bt_openai_request_free(struct bt_openai_request *q);

/* Body of /tokenize: text; of /detokenize: ids. */
struct bt_openai_tokens {
    char *text;
    size_t text_len;
    bool add_special, parse_special;
    uint32_t *ids;
    size_t n_ids;
    bool skip_special;
};
bool bt_openai_parse_tokenize(const char *body, size_t len, struct bt_openai_tokens *out,
                              struct bt_api_err *e);
bool bt_openai_parse_detokenize(const char *body, size_t len, struct bt_openai_tokens *out,
                                struct bt_api_err *e);
void bt_openai_tokens_free(struct bt_openai_tokens *t);

#endif
