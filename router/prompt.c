/* Texts and chats to token ids. Owns the rule of the one BOS; refuses to know where the text came from. */

#include "router/prompt.h"

#include <string.h>
#include "base/mem.h"

static bool take_ids(struct bt_ids *ids, struct bt_gen_prompt *out)
{
    out->ids = ids->v;
    out->n = (uint32_t)ids->len;
    return true;
}

static bool encode(const struct bt_prompt_env *env, const char *text, size_t len, unsigned flags,
                   struct bt_ids *ids, const char *param, struct bt_api_err *e)
{
    struct bt_err err = {0};
    enum bt_status st = bt_tokenizer_encode(env->tok, text, len, flags, ids, &err);

    if (st == BT_OK) {
        return true;
    }
    bt_ids_fini(ids);
    return st == BT_ERR_NOMEM ? bt_api_fail(e, BT_API_INTERNAL, NULL, "out of memory")
                              : bt_api_fail(e, BT_API_INVALID, param, "%s: %s", param, err.msg);
}

bool bt_prompt_from_text(const struct bt_prompt_env *env, const char *text, size_t len,
                         bool add_special, struct bt_gen_prompt *out, struct bt_api_err *e)
{
    struct bt_ids ids = {0};

    if (len == 0) {
        return bt_api_fail(e, BT_API_INVALID, "prompt", "prompt: is empty");
    }
    return encode(env, text, len, add_special ? BT_TOK_ADD_SPECIAL : 0, &ids, "prompt", e) &&
           take_ids(&ids, out);
}

/* The tokenizer's prefix in front, unless the template has put it there. */
static bool add_prefix(const struct bt_prompt_env *env, struct bt_ids *ids)
{
    size_t n = 0;
    const uint32_t *prefix = bt_tokenizer_prefix(env->tok, &n);

    if (n == 0 || (ids->len >= n && memcmp(ids->v, prefix, n * sizeof *prefix) == 0)) {
        return true;
    }
    for (size_t i = 0; i < n; i++) {
        if (bt_ids_add(ids, 0) != BT_OK) {
            return false;
        }
    }
    memmove(ids->v + n, ids->v, (ids->len - n) * sizeof *ids->v);
    memcpy(ids->v, prefix, n * sizeof *prefix);
    return true;
}

bool bt_prompt_from_chat(const struct bt_prompt_env *env, const struct bt_prompt_chat *chat,
                         struct bt_gen_prompt *out, struct bt_api_err *e)
{
    struct bt_template_inputs in = {
        .messages = chat->messages,
        .n_messages = chat->n_messages,
        .add_generation_prompt = chat->add_generation_prompt,
        .bos_token = env->bos,
        .eos_token = env->eos,
        .extra_json = chat->extra_json,
        .extra_json_len = chat->extra_json_len,
        .now_unix = env->now_unix,
    };
    struct bt_buf text = {0};
    struct bt_ids ids = {0};
    struct bt_err err = {0};

    if (env->tmpl == NULL) {
        return bt_api_fail(e, BT_API_INVALID, "messages",
                           "the model has no chat template; use a plain prompt");
    }
    enum bt_status st = bt_template_render(env->tmpl, &in, &text, &err);

    if (st != BT_OK) {
        bt_buf_fini(&text);
        return st == BT_ERR_NOMEM
                   ? bt_api_fail(e, BT_API_INTERNAL, NULL, "out of memory")
                   : bt_api_fail(e, BT_API_INVALID, "messages", "messages: %s", err.msg);
    }
    bool ok = encode(env, text.data != NULL ? text.data : "", text.len, BT_TOK_PARSE_SPECIAL, &ids,
                     "messages", e);

    bt_buf_fini(&text);
    if (!ok) {
        return false;
    }
    if (!add_prefix(env, &ids)) {
        bt_ids_fini(&ids);
        return bt_api_fail(e, BT_API_INTERNAL, NULL, "out of memory");
    }
    return take_ids(&ids, out);
}
