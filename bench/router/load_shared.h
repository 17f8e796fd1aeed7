#ifndef BT_BENCH_ROUTER_LOAD_SHARED_H
#define BT_BENCH_ROUTER_LOAD_SHARED_H

/* What the two sides of the load test share: the answer that every stream gets, when each of its tokens was sent, and
 * what came of it. The sending side (toy nodes or workers) and the receiving side (the client) are threads of one
 * process, so one clock tells how long a token was on its way. */

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "router/token_gaps.h"

#define BENCH_TEXT_TOKENS 64u

struct bench_shared {
    /* The answer: these tokens over and over. Read only after the start. */
    uint32_t ids[BENCH_TEXT_TOKENS];
    char texts[BENCH_TEXT_TOKENS][32]; /* no character that JSON escapes */
    uint32_t lens[BENCH_TEXT_TOKENS];
    uint32_t vocab;
    uint32_t n_streams, max_tokens, prompt_tokens;
    bool chat;
    _Atomic uint64_t *sent; /* [n_streams * max_tokens] ns */
    atomic_bool measuring, stop;
    _Atomic uint64_t n_tokens, n_events, n_done, n_failed, n_refused; /* at the client */
    struct bt_token_gaps
        first; /* from asking to the first token, of requests that were answered; likewise */
    uint64_t limit_ns; /* of that, and how many were within it, and within a tenth more */
    uint64_t n_within, n_nearly;
    struct bt_token_gaps way; /* of tokens sent while measuring; the client's until it has ended */
};

/* Takes the answer's tokens from a model folder or file. Ends the process when it cannot. */
void bench_shared_init(struct bench_shared *b, const char *model, uint32_t n_streams,
                       uint32_t max_tokens);
void bench_shared_fini(struct bench_shared *b);
/* The body of a request of stream `slot`: its seed says which it is. Returns its length. */
size_t bench_body(const struct bench_shared *b, uint32_t slot, char *out, size_t cap);

static inline void bench_sent(struct bench_shared *b, uint32_t slot, uint32_t index, uint64_t now)
{
    if (slot < b->n_streams && index < b->max_tokens) {
        atomic_store_explicit(&b->sent[(size_t)slot * b->max_tokens + index], now,
                              memory_order_relaxed);
    }
}

/* One stream as its reader counts it. */
struct bench_reader {
    uint32_t slot, index, bytes;
    uint64_t t_ask;
};
/* n bytes of text arrived for it. */
void bench_received(struct bench_shared *b, struct bench_reader *r, size_t n, uint64_t now);

/* Runs streams against address until b->stop: all begin within a second, each asks again when its answer is complete.
 * Blocks; a thread of its own. */
void bench_client_http(struct bench_shared *b, const char *address);
void bench_client_grpc(struct bench_shared *b, const char *address);

#endif
