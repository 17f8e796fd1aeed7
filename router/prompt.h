#ifndef BT_ROUTER_PROMPT_H
#define BT_ROUTER_PROMPT_H

/* Texts and chats to token ids, as requests mean it. Pure: any thread. */

#include <stdbool.h>
#include <stddef.h>
#include "router/api.h"
#include "router/generate.h"
#include "text/template.h"
#include "text/tokenizer.h"

struct bt_prompt_env {
    const struct bt_tokenizer *tok;
    const struct bt_template *tmpl; /* NULL: chats are refused */
    const char *bos, *eos;
    int64_t now_unix;
};

struct bt_prompt_chat {
    const struct bt_chat_msg *messages;
    size_t n_messages;
    bool add_generation_prompt;
    const char *extra_json; /* NULL: none */
    size_t extra_json_len;
};

/* Fills out->ids and out->n; the rest of out is left alone. add_special: the tokenizer's own special tokens around. */
bool bt_prompt_from_text(const struct bt_prompt_env *env, const char *text, size_t len,
                         bool add_special, struct bt_gen_prompt *out, struct bt_api_err *e);
/* Renders; text that spells a special token is one here. The BOS is there once, whoever brings it. */
bool bt_prompt_from_chat(const struct bt_prompt_env *env, const struct bt_prompt_chat *chat,
                         struct bt_gen_prompt *out, struct bt_api_err *e);

#endif
