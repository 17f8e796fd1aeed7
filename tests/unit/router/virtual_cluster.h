#ifndef BT_TESTS_VIRTUAL_CLUSTER_H
#define BT_TESTS_VIRTUAL_CLUSTER_H

/* The router's core and nodes that compute nothing, in virtual time, a millisecond at a time: prefill nodes with a speed
 * and reports every 250 ms, decode nodes that answer at once or a token a step. One per test. */

#include "base/clock.h"
#include "router/router_core_int.h"

#define MS      BT_NS_PER_MS
#define NODES   32
#define VC_JOBS 4096
#define VC_SEQS 16384

struct vc_job {
    struct bt_ticket ticket;
    uint32_t n_prompt, left, max_tokens;
    uint32_t seq; /* the request's number */
    bool two_legs, landed;
};

struct vc_node {
    uint64_t session;
    enum bt_role role;
    struct vc_job jobs[VC_JOBS];
    uint32_t n;
    double speed;     /* prefill: tokens a second */
    uint32_t step_ms; /* decode: for a token of each sequence; 0: the whole answer comes at once */
    double budget;    /* of time, not used yet, in seconds */
    uint64_t idle_busy; /* ms without work while something waited in the router */
    uint64_t total;     /* tokens of all jobs it was ever sent */
};

struct vc {
    struct bt_rt_core *core;
    uint64_t now;
    struct vc_node nodes[2 * NODES];
    uint32_t n_nodes;
    uint32_t order[VC_SEQS], n_order; /* request numbers as prefill nodes get them */
    uint32_t where[VC_SEQS];          /* the prefill node of each */
    uint64_t t_ask[VC_SEQS], t_first[VC_SEQS], t_end[VC_SEQS]; /* 0: not yet */
    enum bt_rt_end_kind how[VC_SEQS];
    struct bt_rt_end last_end;
    uint32_t n_finished, n_failed;
    double
        skew; /* seconds of predicted work of a prefill node that got more, beyond the least: the most */
};
extern struct vc vc;

/* n_keys is 3; prefill nodes compute 10,000 tokens a second, in chunks of 512; decode nodes have room for 64 sequences
 * and so many pages of 16 tokens. */
void vc_begin(uint32_t n_prefill, uint32_t n_decode, uint32_t queue_max, uint64_t max_ttft_ms,
              uint32_t pages);
void vc_end(void);
/* Request `id`, a number below VC_SEQS that was not used yet. */
enum bt_status vc_ask(uint32_t id, uint32_t key, int32_t priority, uint32_t n_prompt,
                      uint32_t max_tokens) BT_NODISCARD;
void vc_run(uint32_t ms);
void vc_report_all(void);

#endif
