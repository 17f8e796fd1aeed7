/* OpenAI-compatible JSON. Owns the shapes; refuses to know how they are sent. */

#include "router/openai_write.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>
#include "base/utf8.h"

#define LOGPROB_MIN (-9999.0f) /* JSON has no infinity, and no NaN */

enum { LP_TOKENS, LP_VALUES, LP_TOP, LP_OFFSETS };

/* ---- choices ---- */

void bt_openai_choice_fini(struct bt_openai_choice *c)
{
    bt_buf_fini(&c->text);
    for (unsigned i = 0; i < 4; i++) {
        bt_buf_fini(&c->lp[i]);
    }
}

void bt_openai_choice_clear(struct bt_openai_choice *c)
{
    bt_buf_clear(&c->text);
    for (unsigned i = 0; i < 4; i++) {
        bt_buf_clear(&c->lp[i]);
    }
    c->n_lp = 0;
}

static void put_logprob(struct bt_buf *b, float v)
{
    bt_buf_addf(b, "%.9g", (double)(v >= LOGPROB_MIN && v <= FLT_MAX ? v : LOGPROB_MIN));
}

/* A token's text; bytes that are no text by themselves as "bytes:\xe2\x80". */
static void put_token(struct bt_buf *b, const struct bt_tokenizer *tok, uint32_t id)
{
    size_t n = 0;
    const char *s = bt_tokenizer_token_text(tok, id, &n);

    if (bt_utf8_valid(s, n, NULL)) {
        bt_buf_add_json_str(b, s != NULL ? s : "", n);
        return;
    }
    bt_buf_adds(b, "\"bytes:");
    for (size_t i = 0; i < n; i++) {
        bt_buf_addf(b, "\\\\x%02x", (unsigned char)s[i]);
    }
    bt_buf_addc(b, '"');
}

static void put_bytes(struct bt_buf *b, const struct bt_tokenizer *tok, uint32_t id)
{
    size_t n = 0;
    const char *s = bt_tokenizer_token_text(tok, id, &n);

    bt_buf_addc(b, '[');
    for (size_t i = 0; i < n; i++) {
        bt_buf_addf(b, "%s%u", i > 0 ? "," : "", (unsigned char)s[i]);
    }
    bt_buf_addc(b, ']');
}

/* Offsets follow the text as it is made: special tokens have no width, half a character belongs to the token that ends it. */
static uint32_t next_offset(struct bt_openai_choice *c, const struct bt_openai_head *h, uint32_t id,
                            unsigned flags)
{
    uint32_t offset = c->text_offset;
    struct bt_buf b = {0};

    if (!c->detok_on) {
        c->detok_on = true;
        bt_detok_init(&c->detok, h->tok, flags);
    }
    if (bt_detok_push(&c->detok, id, &b) == BT_OK) {
        for (size_t i = 0; i < b.len; i++) {
            c->text_offset += ((unsigned char)b.data[i] & 0xc0) != 0x80;
        }
    }
    bt_buf_fini(&b);
    return offset;
}

/* {"token": logprob, …}: the most likely ones and the chosen one. */
static void put_top_object(struct bt_buf *b, const struct bt_tokenizer *tok,
                           const struct bt_sampled *s)
{
    bool chosen_in = false;

    bt_buf_addc(b, '{');
    for (uint32_t i = 0; i < s->n_top; i++) {
        chosen_in = chosen_in || s->top[i].token == s->token;
        bt_buf_adds(b, i > 0 ? "," : "");
        put_token(b, tok, s->top[i].token);
        bt_buf_addc(b, ':');
        put_logprob(b, s->top[i].logprob);
    }
    if (!chosen_in) {
        bt_buf_adds(b, s->n_top > 0 ? "," : "");
        put_token(b, tok, s->token);
        bt_buf_addc(b, ':');
        put_logprob(b, s->logprob);
    }
    bt_buf_addc(b, '}');
}

/* s NULL: the first token of a prompt, which has no log-probability. */
static void add_completion_logprob(struct bt_openai_choice *c, const struct bt_openai_head *h,
                                   uint32_t id, const struct bt_sampled *s,
                                   const struct bt_params *params)
{
    const struct bt_tokenizer *tok = h->tok;
    bool top = params->sampling.n_top > 0;
    unsigned flags = params->keep_special ? 0 : BT_DETOK_SKIP_SPECIAL;

    for (unsigned i = 0; i < 4; i++) {
        bt_buf_adds(&c->lp[i], c->n_lp > 0 ? "," : "");
    }
    put_token(&c->lp[LP_TOKENS], tok, id);
    if (s == NULL) {
        bt_buf_adds(&c->lp[LP_VALUES], "null");
        bt_buf_adds(&c->lp[LP_TOP], top ? "null" : "");
    } else {
        put_logprob(&c->lp[LP_VALUES], s->logprob);
        if (top) {
            put_top_object(&c->lp[LP_TOP], tok, s);
        }
    }
    bt_buf_addf(&c->lp[LP_OFFSETS], "%u",
                next_offset(c, h, id, params->echo ? flags : flags | BT_DETOK_CONTINUE));
    c->n_lp++;
}

static void put_chat_logprob(struct bt_buf *b, const struct bt_tokenizer *tok, uint32_t id,
                             float logprob)
{
    bt_buf_adds(b, "{\"token\":");
    put_token(b, tok, id);
    bt_buf_adds(b, ",\"logprob\":");
    put_logprob(b, logprob);
    bt_buf_adds(b, ",\"bytes\":");
    put_bytes(b, tok, id);
}

static void add_chat_logprob(struct bt_openai_choice *c, const struct bt_tokenizer *tok,
                             const struct bt_sampled *s)
{
    struct bt_buf *b = &c->lp[0];

    bt_buf_adds(b, c->n_lp++ > 0 ? "," : "");
    put_chat_logprob(b, tok, s->token, s->logprob);
    bt_buf_adds(b, ",\"top_logprobs\":[");
    for (uint32_t i = 0; i < s->n_top; i++) {
        bt_buf_adds(b, i > 0 ? "," : "");
        put_chat_logprob(b, tok, s->top[i].token, s->top[i].logprob);
        bt_buf_addc(b, '}');
    }
    bt_buf_adds(b, "]}");
}

void bt_openai_choice_echo(struct bt_openai_choice *c, const struct bt_openai_head *h,
                           const struct bt_gen *g, uint32_t index)
{
    const struct bt_gen_prompt *p = bt_gen_prompt(g, index);
    const struct bt_params *params = bt_gen_params(g);
    const struct bt_sampled *lp = bt_gen_prompt_logprobs(g, index);

    if (p->text != NULL) {
        bt_buf_add(&c->text, p->text, p->text_len);
    } else if (bt_tokenizer_decode(h->tok, p->ids, p->n,
                                   params->keep_special ? 0 : BT_DETOK_SKIP_SPECIAL, &c->text,
                                   NULL) != BT_OK) {
        c->text.failed = true; /* ids are in the vocabulary: only memory can fail */
    }
    for (uint32_t i = 0; params->sampling.logprobs && i < p->n; i++) {
        add_completion_logprob(c, h, p->ids[i], i == 0 || lp == NULL ? NULL : &lp[i - 1], params);
    }
}

void bt_openai_choice_add(struct bt_openai_choice *c, const struct bt_openai_head *h,
                          const struct bt_gen *g, const struct bt_gen_piece *p)
{
    const struct bt_sampling *s = &bt_gen_params(g)->sampling;

    bt_buf_add(&c->text, p->text, p->len);
    c->finish = p->finish;
    for (size_t i = 0; s->logprobs && i < p->n_tokens; i++) {
        if (h->chat) {
            add_chat_logprob(c, h->tok, &p->tokens[i]);
        } else {
            add_completion_logprob(c, h, p->tokens[i].token, &p->tokens[i], bt_gen_params(g));
        }
    }
}

/* ---- objects ---- */

void bt_openai_open(struct bt_buf *b, const struct bt_openai_head *h)
{
    bt_buf_adds(b, "{\"id\":");
    bt_buf_add_json_str(b, h->id, strlen(h->id));
    bt_buf_adds(b, ",\"object\":\"");
    bt_buf_adds(b, !h->chat    ? "text_completion"
                   : h->stream ? "chat.completion.chunk"
                               : "chat.completion");
    bt_buf_adds(b, "\",\"created\":");
    bt_buf_addu(b, h->created);
    bt_buf_adds(b, ",\"model\":");
    bt_buf_add_json_str(b, h->model, strlen(h->model));
    bt_buf_adds(b, ",\"choices\":[");
}

static void put_list(struct bt_buf *b, const char *name, const struct bt_buf *list)
{
    bt_buf_addf(b, "\"%s\":[", name);
    bt_buf_add(b, list->data != NULL ? list->data : "", list->len);
    bt_buf_addc(b, ']');
}

static void put_logprobs(struct bt_buf *b, const struct bt_openai_head *h,
                         const struct bt_openai_choice *c, bool logprobs)
{
    bt_buf_adds(b, ",\"logprobs\":");
    if (!logprobs) {
        bt_buf_adds(b, "null");
    } else if (h->chat) {
        bt_buf_addc(b, '{');
        put_list(b, "content", &c->lp[0]);
        bt_buf_addc(b, '}');
    } else {
        bool top = c->n_lp > 0 && c->lp[LP_TOP].len >= c->n_lp; /* more than separators */

        bt_buf_addc(b, '{');
        put_list(b, "tokens", &c->lp[LP_TOKENS]);
        bt_buf_addc(b, ',');
        put_list(b, "token_logprobs", &c->lp[LP_VALUES]);
        bt_buf_addc(b, ',');
        if (top) {
            put_list(b, "top_logprobs", &c->lp[LP_TOP]);
        } else {
            bt_buf_adds(b, "\"top_logprobs\":null");
        }
        bt_buf_addc(b, ',');
        put_list(b, "text_offset", &c->lp[LP_OFFSETS]);
        bt_buf_addc(b, '}');
    }
}

static void put_content(struct bt_buf *b, const struct bt_openai_head *h,
                        const struct bt_openai_choice *c)
{
    const char *text = c->text.data != NULL ? c->text.data : "";

    if (!h->chat) {
        bt_buf_adds(b, ",\"text\":");
        bt_buf_add_json_str(b, text, c->text.len);
    } else if (!h->stream) {
        bt_buf_adds(b, ",\"message\":{\"role\":\"assistant\",\"content\":");
        bt_buf_add_json_str(b, text, c->text.len);
        bt_buf_addc(b, '}');
    } else if (c->finish != 0 && c->text.len == 0) {
        bt_buf_adds(b, ",\"delta\":{}");
    } else {
        bt_buf_adds(b, ",\"delta\":{\"content\":");
        bt_buf_add_json_str(b, text, c->text.len);
        bt_buf_addc(b, '}');
    }
}

void bt_openai_put_choice(struct bt_buf *b, const struct bt_openai_head *h,
                          const struct bt_openai_choice *c, uint32_t index, bool logprobs)
{
    static const char *const finish[] = {"null", "\"stop\"", "\"length\""};

    bt_buf_adds(b, "{\"index\":");
    bt_buf_addu(b, index);
    put_content(b, h, c);
    put_logprobs(b, h, c, logprobs);
    bt_buf_adds(b, ",\"finish_reason\":");
    bt_buf_adds(b, finish[c->finish]);
    bt_buf_addc(b, '}');
}

void bt_openai_put_role(struct bt_buf *b, uint32_t index)
{
    bt_buf_addf(
        b,
        "{\"index\":%u,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
        "\"finish_reason\":null}",
        index);
}

static void put_usage(struct bt_buf *b, const struct bt_inf_usage *u)
{
    bt_buf_addf(b,
                ",\"usage\":{\"prompt_tokens\":%u,\"completion_tokens\":%u,\"total_tokens\":%u,"
                "\"prompt_tokens_details\":{\"cached_tokens\":%u},\"cached_tokens\":%u,"
                "\"transferred_tokens\":%u}",
                u->prompt_tokens, u->completion_tokens, u->prompt_tokens + u->completion_tokens,
                u->cached_tokens, u->cached_tokens, u->transferred_tokens);
}

static void put_timings(struct bt_buf *b, const struct bt_inf_timings *t)
{
    bt_buf_addf(
        b,
        ",\"timings\":{\"tokenize_ms\":%.3f,\"queue_ms\":%.3f,\"prefill_ms\":%.3f,\"first_token_"
        "ms\":%.3f,"
        "\"transfer_ms\":%.3f,\"transfer_tail_ms\":%.3f,\"decode_ms\":%.3f,\"detokenize_ms\":%.3f,",
        t->tokenize_ms, t->queue_ms, t->prefill_ms, t->first_token_ms, t->transfer_ms,
        t->transfer_tail_ms, t->decode_ms, t->detokenize_ms);
    bt_buf_addf(b,
                "\"prefill_tokens\":%u,\"decode_tokens\":%u,\"transferred_tokens\":%u,"
                "\"transferred_bytes\":%" PRIu64 ",\"local_prefills\":%u}",
                t->prefill_tokens, t->decode_tokens, t->transferred_tokens, t->transferred_bytes,
                t->local_prefills);
}

void bt_openai_close(struct bt_buf *b, const struct bt_inf_usage *u, bool null_usage,
                     const struct bt_inf_timings *t)
{
    bt_buf_addc(b, ']');
    if (u != NULL) {
        put_usage(b, u);
    } else if (null_usage) {
        bt_buf_adds(b, ",\"usage\":null");
    }
    if (t != NULL) {
        put_timings(b, t);
    }
    bt_buf_addc(b, '}');
}

void bt_openai_put_error(struct bt_buf *b, const struct bt_api_err *e)
{
    bt_buf_adds(b, "{\"error\":{\"message\":");
    bt_buf_add_json_str(b, e->msg, strlen(e->msg));
    bt_buf_addf(b, ",\"type\":\"%s\",\"param\":", bt_api_error_type(e->code));
    if (e->param[0] != '\0') {
        bt_buf_add_json_str(b, e->param, strlen(e->param));
    } else {
        bt_buf_adds(b, "null");
    }
    bt_buf_addf(b, ",\"code\":\"%s\"}}", bt_api_error_code(e->code));
}
