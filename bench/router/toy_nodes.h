#ifndef BT_BENCH_ROUTER_TOY_NODES_H
#define BT_BENCH_ROUTER_TOY_NODES_H

/* Prefill and decode nodes that compute nothing, all in one thread, each with a session of its own: the protocol is the
 * real one. A prompt is answered at once; a decode node sends one message each step with a token of every sequence. */

#include "bench/router/load_shared.h"

struct toy_opts {
    const char *sessions; /* the router's address; nodes only */
    uint32_t n_prefill, n_decode;
    uint64_t step_ns;
    double
        prefill_rate; /* tokens a second of each prefill node, one prompt after the other; 0: at once */
    uint32_t max_batch;
};

/* Runs until b->stop. Blocks; a thread of its own. */
void toy_nodes_run(struct bench_shared *b, const struct toy_opts *o);
/* The same answers from OpenAI servers on 127.0.0.1, for routers that speak HTTP with their workers: n_prefill of them
 * from `port` on, then n_decode. */
void toy_workers_run(struct bench_shared *b, const struct toy_opts *o, uint16_t port);

#endif
