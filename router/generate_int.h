#ifndef BT_ROUTER_GENERATE_INT_H
#define BT_ROUTER_GENERATE_INT_H

/* Between generate.c (life of a request, tokens in) and generate_text.c (text out, sums). */

#include "base/buf.h"
#include "router/generate.h"
#include "router/request_line.h"
#include "router/router_int.h"
#include "router/token_gaps.h"
#include "text/detok.h"
#include "text/stop.h"

struct gen_choice {
    struct bt_gen *g;
    uint32_t index;
    uint64_t seq; /* 0: not in the core (any more) */
    const struct bt_gen_prompt *prompt;
    struct bt_detok detok;
    struct bt_stop stop;
    struct bt_buf pending; /* tokens not yet text, see put_token() */
    size_t pending_at;     /* consumed bytes of it */
    bool ended;            /* no more tokens come; finish is set */
    bool finished;         /* its last piece is out */
    bool begun;
    uint32_t finish;
    uint32_t n_out; /* tokens in pieces so far */
    uint32_t n_received;
    uint64_t t_first, t_last; /* of token arrivals; 0: none */
    struct bt_sampled *plp;   /* [n_prompt - 1] */
    uint32_t n_plp;
    struct bt_rt_seq_info info; /* names point to the arrays below */
    char prefill_name[64], decode_name[64];
    struct bt_rt_attempt *attempts; /* memory of info.ended; NULL: none */
    struct bt_token_gaps *gaps;     /* for the request log only, else NULL */
};

struct bt_gen {
    struct bt_router *r;
    struct bt_gen *prev, *next; /* in r->gens */
    struct bt_gen *next_dirty;
    bool is_dirty, over, paused;
    char *request_id, *traceparent;
    const char *endpoint;
    struct bt_params params;
    struct bt_gen_prompt *prompts;
    size_t n_prompts;
    struct bt_stop_set *stops;
    uint64_t t_arrival, t_start, tokenize_ns, detokenize_ns, deadline;
    const struct bt_gen_events *events;
    void *user;
    uint32_t key;
    struct bt_buf raw, text;
    uint32_t n_choices, n_unfinished;
    struct gen_choice choices[];
};

/* Layout in the pending buffer: token, logprob, n_top, then n_top pairs: 12 bytes without log-probabilities. */
struct gen_packed {
    uint32_t token;
    float logprob;
    uint32_t n_top;
};

void bt_gen_retire(struct bt_gen *g); /* no callback after this; freed by bt_gen_collect() */
void bt_gen_fail_memory(struct bt_gen *g);
void bt_gen_cancel_seq(struct gen_choice *ch);
/* Keeps what the core knows of a sequence that ends. */
void bt_gen_keep_info(struct gen_choice *ch, const struct bt_rt_seq_info *info);

#endif
