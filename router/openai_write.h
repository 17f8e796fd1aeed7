#ifndef BT_ROUTER_OPENAI_WRITE_H
#define BT_ROUTER_OPENAI_WRITE_H

/* OpenAI-compatible JSON, appended to a buffer. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "proto/inference.h"
#include "router/api.h"
#include "router/generate.h"
#include "text/detok.h"
#include "text/tokenizer.h"

/* What stays the same in all objects of one answer. */
struct bt_openai_head {
    bool chat, stream;
    const char *id; /* "cmpl-…", "chatcmpl-…" */
    const char *model;
    uint64_t created; /* Unix seconds */
    const struct bt_tokenizer *tok;
};

/* One choice of an answer that is not streamed, as it grows; and what streams must remember. */
struct bt_openai_choice {
    struct bt_buf text;
    struct bt_buf lp
        [4]; /* completions: lists tokens, token_logprobs, top_logprobs, text_offset; chat: [0] content */
    size_t n_lp;           /* entries in them */
    struct bt_detok detok; /* over the tokens listed, for their offsets */
    bool detok_on;
    uint32_t text_offset; /* characters of the tokens so far */
    uint32_t finish;
};
void bt_openai_choice_fini(struct bt_openai_choice *c);
/* The prompt's text and, if wanted, its tokens' log-probabilities. */
void bt_openai_choice_echo(struct bt_openai_choice *c, const struct bt_openai_head *h,
                           const struct bt_gen *g, uint32_t index);
/* Adds text and log-probabilities of a piece. */
void bt_openai_choice_add(struct bt_openai_choice *c, const struct bt_openai_head *h,
                          const struct bt_gen *g, const struct bt_gen_piece *p);
/* Empties text and lists, for the next chunk. */
void bt_openai_choice_clear(struct bt_openai_choice *c);

/* {"id":… up to "choices":[ */
void bt_openai_open(struct bt_buf *b, const struct bt_openai_head *h);
/* One element of choices; logprobs: wanted by the client. */
void bt_openai_put_choice(struct bt_buf *b, const struct bt_openai_head *h,
                          const struct bt_openai_choice *c, uint32_t index, bool logprobs);
/* The first chunk of a chat's choice: its role. */
void bt_openai_put_role(struct bt_buf *b, uint32_t index);
/* ] and usage (NULL: none; null_usage: "usage":null), timings (NULL: none), } */
void bt_openai_close(struct bt_buf *b, const struct bt_inf_usage *u, bool null_usage,
                     const struct bt_inf_timings *t);

/* {"error":{…}} */
void bt_openai_put_error(struct bt_buf *b, const struct bt_api_err *e);

#endif
