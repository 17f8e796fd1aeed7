#ifndef BT_ROUTER_GENERATE_H
#define BT_ROUTER_GENERATE_H

/* One request, independent of the front end: tokenized prompts become sequences of the core, their tokens become text,
 * cut at stop strings; usage and timings are added up. Loop thread.
 *
 * Callbacks never run inside a call made by the user. The last one is on_end, exactly once, unless bt_gen_cancel()
 * came before; after either the pointer is dead. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/sampling.h"
#include "base/status.h"
#include "proto/inference.h"
#include "router/api.h"

struct bt_router;
struct bt_gen;
struct bt_rt_action;

struct bt_gen_prompt {
    uint32_t *ids; /* owned */
    uint32_t n;
    char *text; /* owned; what the client sent, NULL for ids and chats */
    size_t text_len;
};
void bt_gen_prompts_free(struct bt_gen_prompt *p, size_t n); /* the array too */

/* Something new of one choice. */
struct bt_gen_piece {
    uint32_t index;   /* prompt * n + choice */
    bool first;       /* the first of this choice */
    const char *text; /* whole characters, nothing that a stop string may still take */
    size_t len;
    const struct bt_sampled *tokens; /* counted tokens, each once; text may lag behind */
    size_t n_tokens;
    uint32_t finish; /* 0: more follows, 1 stop, 2 length: the last of this choice */
    bool last;       /* of the request: usage and timings are complete */
};

struct bt_gen_events {
    /* Returns the bytes that wait on the client's stream: above a high mark no more text is made until
     * bt_gen_resume(). */
    size_t (*on_piece)(void *user, struct bt_gen *g, const struct bt_gen_piece *p);
    /* e: NULL when every choice has finished. */
    void (*on_end)(void *user, struct bt_gen *g, const struct bt_api_err *e);
};

struct bt_gen_start {
    const char *request_id;        /* copied */
    const char *endpoint;          /* static: "/v1/completions", the gRPC method */
    const char *traceparent;       /* copied; NULL: none */
    struct bt_params *params;      /* content taken; checked before */
    struct bt_gen_prompt *prompts; /* taken */
    size_t n_prompts;
    uint64_t t_arrival, tokenize_ns;
    uint64_t deadline; /* time; UINT64_MAX: none */
    uint32_t key;      /* whose it is, by bt_router_key_find() */
    const struct bt_gen_events *events;
    void *user;
};

/* false: refused, e says why; prompts and params are freed, no callback runs. */
bool bt_gen_start(struct bt_router *r, const struct bt_gen_start *s, struct bt_gen **out,
                  struct bt_api_err *e);
void bt_gen_cancel(struct bt_gen *g);
void bt_gen_resume(struct bt_gen *g);
/* Ends the request of that id with CANCELLED: its on_end runs inside this call. false: none. */
bool bt_gen_abort(struct bt_router *r, const char *request_id);

/* In callbacks. */
const struct bt_params *bt_gen_params(const struct bt_gen *g);
const struct bt_gen_prompt *bt_gen_prompt(const struct bt_gen *g, uint32_t index);
/* Log-probabilities of prompt positions 1 … n - 1, for echo; NULL: not asked for. */
const struct bt_sampled *bt_gen_prompt_logprobs(const struct bt_gen *g, uint32_t index);
struct bt_inf_usage bt_gen_usage(const struct bt_gen *g);
struct bt_inf_timings bt_gen_timings(const struct bt_gen *g);
/* Nodes of the first choice; "" if none. */
const char *bt_gen_prefill_name(const struct bt_gen *g);
const char *bt_gen_decode_name(const struct bt_gen *g);

/* For router_io.c: the core's actions, and what follows when they have all been carried out. user: the choice. */
void bt_gen_on_tokens(struct bt_router *r, const struct bt_rt_action *a);
void bt_gen_on_prompt_logprobs(struct bt_router *r, const struct bt_rt_action *a);
void bt_gen_on_seq_end(struct bt_router *r, const struct bt_rt_action *a);
void bt_gen_flush(struct bt_router *r); /* makes pieces of what came; may call the core */
void bt_gen_collect(
    struct bt_router *r); /* frees requests that are over; the core's queue is empty */
/* All that is left, without callbacks; before the core goes. */
void bt_gen_cancel_all(struct bt_router *r);                          /* no callbacks */
void bt_gen_end_all(struct bt_router *r, const struct bt_api_err *e); /* each gets its on_end */

#endif
