#ifndef BT_ROUTER_ROUTER_CORE_H
#define BT_ROUTER_ROUTER_CORE_H

/* The router's decisions: nodes, placement, attempts, retries. Events in, actions out, time as an
 * argument. No I/O, no clock, no thread. The router and the simulation run the same code. What a sequence needs is reserved
 * at create for all seqs_max, its token ids too: address space for BT_SESSION_TOKENS_MAX of them, memory for those that it
 * has. Only what nodes tell of themselves takes heap memory, and the queue of actions and their texts, until they have
 * their working size.
 *
 * A *sequence* is one choice of one prompt. It runs as a series of *attempts*, each with its own
 * ticket on one pair:
 *
 *   WAITING -- a pair is free --> RUNNING -- finish, failure, cancel --> OVER
 *      ^                             |
 *      +-----------------------------+ refused, lost, preempted: again, the tokens so far forced
 *
 * Tokens are taken by index, first copy wins: from the prefill leg, the decode leg, any later
 * attempt.
 *
 * Actions are a queue: calls append, the caller drains it with bt_rt_core_next() after each call
 * (calls made while draining append too). What an action points to is valid until the queue was
 * drained. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/sampling.h"
#include "base/status.h"
#include "proto/session.h"

/* Whose prompts a decode node computes itself (local prefill). */
enum bt_rt_local {
    BT_RT_LOCAL_NEVER,
    BT_RT_LOCAL_AUTO,   /* those with which fewer seconds are waited by that, as far as measured */
    BT_RT_LOCAL_ALWAYS, /* all: prefill nodes are not needed, and get nothing */
    BT_RT_LOCAL_TOKENS, /* those with at most local_tokens tokens that the node has not cached */
};

struct bt_rt_opts {
    uint64_t instance;  /* of this router */
    const char *name;   /* borrowed */
    uint64_t seed[2];   /* of tickets: random */
    uint32_t seqs_max;  /* waiting and running */
    uint32_t queue_max; /* waiting */
    uint32_t nodes_max;
    uint32_t attempts_max; /* in a row without a new token */
    uint64_t queue_ns;     /* longest wait for a pair */
    uint64_t grace_ns; /* the same while no pair is connected, for a sequence without a token yet */
    uint64_t migrate_ns; /* and for one that has begun */
    /* A running attempt without a new token for so long, and for four times what its prompt should take, is given up: a
     * node may report its load and yet never answer. 0: never */
    uint64_t progress_ns;
    uint64_t lease_ns; /* silence after which a node is lost */
    uint64_t heartbeat_ns;
    uint64_t backoff_ns;  /* before the second attempt; doubles, at most 32 times that */
    uint64_t max_ttft_ns; /* predicted time to the first token above which a newcomer is refused; 0:
                             never */
    uint32_t n_keys;      /* API keys; 0: one that all share */
    enum bt_rt_local local_prefill;
    uint32_t local_tokens;
};

enum bt_rt_action_kind {
    BT_RT_SEND,            /* session, send */
    BT_RT_CLOSE,           /* session, text: end it; the core has forgotten it */
    BT_RT_TOKENS,          /* seq, user, tokens */
    BT_RT_PROMPT_LOGPROBS, /* seq, user, prompt_logprobs */
    BT_RT_END,   /* seq, user, end: the last action of a sequence that was not cancelled */
    BT_RT_READY, /* ready: whether a pair can serve has changed */
    BT_RT_LOG,   /* level, text */
};

enum bt_rt_end_kind {
    BT_RT_FINISHED,  /* finish says how */
    BT_RT_INVALID,   /* the request cannot run here */
    BT_RT_EXHAUSTED, /* no room within the queue time */
    BT_RT_LATE, /* while it waited it became clear that its first token would come after max_ttft_ns */
    BT_RT_UNAVAILABLE, /* no pair, or every attempt failed */
    BT_RT_INTERNAL,
    BT_RT_DEADLINE,
};

struct bt_rt_end {
    enum bt_rt_end_kind kind;
    uint32_t finish;  /* 1 stop, 2 length */
    const char *text; /* why not finished */
};

struct bt_rt_action {
    enum bt_rt_action_kind kind;
    uint64_t session;
    uint64_t seq;
    void *user;
    int level; /* enum bt_log_level */
    const char *text;
    bool ready;
    union {
        struct bt_from_router send;
        struct {
            uint32_t index; /* of list[0] in the answer */
            size_t n;
            const struct bt_sampled *list;
        } tokens;
        struct {
            uint32_t first; /* prompt position of list[0] */
            size_t n;
            const struct bt_sampled *list;
        } prompt_logprobs;
        struct bt_rt_end end;
    };
};

struct bt_rt_core;

enum bt_status bt_rt_core_create(const struct bt_rt_opts *opts,
                                 struct bt_rt_core **out) BT_NODISCARD;
void bt_rt_core_destroy(struct bt_rt_core *c);
/* Takes the next action; false: the queue is empty. */
bool bt_rt_core_next(struct bt_rt_core *c, struct bt_rt_action *out);
bool bt_rt_core_pending(const struct bt_rt_core *c); /* there is one */

/* ---- nodes ---- */

/* A daemon opened a session. Its id, never 0; 0: too many nodes, close it. */
uint64_t bt_rt_on_session(struct bt_rt_core *c, uint64_t now);
/* A message from it. Messages of sessions that are over are ignored. */
void bt_rt_on_message(struct bt_rt_core *c, uint64_t now, uint64_t session,
                      const struct bt_from_daemon *m);
/* The stream has ended. */
void bt_rt_on_session_lost(struct bt_rt_core *c, uint64_t now, uint64_t session, const char *why);

/* Takes a node out of service, named by its name or instance (16 hex digits); the answer is *instance. It
 * gets nothing more from now on, and is told. force: also the last node of its role. BT_ERR_NOT_FOUND;
 * BT_ERR_INVALID: it drains already, is the last one, or several have that name; BT_ERR_UNSUPPORTED: it
 * is too old to be told. err says which. */
enum bt_status bt_rt_drain(struct bt_rt_core *c, uint64_t now, const char *node, bool force,
                           uint64_t *instance, struct bt_err *err) BT_NODISCARD;

/* Tells a node to serve as something else. What it loses gets nothing more from now on and drains there; what is
 * new begins when the node has answered. Errors as above; BT_ERR_INVALID also: it is so already, or the node cannot. */
enum bt_status bt_rt_set_role(struct bt_rt_core *c, uint64_t now, const char *node,
                              enum bt_role role, bool force, uint64_t *instance,
                              struct bt_err *err) BT_NODISCARD;

/* ---- sequences ---- */

struct bt_rt_seq_start {
    const char *request_id; /* copied; cut at BT_SESSION_ID_MAX */
    const char *trace_id;   /* begins with one, copied; NULL: none. Nodes log it */
    const uint32_t *tokens; /* copied; the prompt, n_prompt >= 1 */
    uint32_t n_prompt;
    const struct bt_sampling
        *sampling; /* copied, bias included; max_tokens 0: what is left of the context */
    bool prompt_logprobs;
    int32_t priority;  /* among waiting sequences, higher goes first */
    uint32_t key;      /* whose it is, below n_keys: those of one priority take turns */
    uint64_t deadline; /* time; UINT64_MAX: none */
    void *user;
};
/* BT_ERR_BUSY: the queue is full; BT_ERR_TIMEOUT: its first token would come later than max_ttft_ns
 * (bt_rt_forecast() has the numbers of both); BT_ERR_NOMEM. */
enum bt_status bt_rt_seq_start(struct bt_rt_core *c, uint64_t now, const struct bt_rt_seq_start *s,
                               uint64_t *seq) BT_NODISCARD;
/* What a sequence would have to expect if it came now. */
struct bt_rt_forecast {
    uint64_t wait_ns;    /* until its prompt is computed; 0 while no pair can serve */
    uint64_t prefill_ns; /* of its prompt */
    uint64_t
        margin_ns; /* so much more it may become, going by how much first tokens of late differed from it */
    bool uncertain; /* the speed is not known well enough to refuse for it */
};
struct bt_rt_forecast bt_rt_forecast(const struct bt_rt_core *c, uint64_t now, uint32_t key,
                                     int32_t priority, uint32_t n_prompt);
/* How many sequences could be started now. */
uint32_t bt_rt_core_room(const struct bt_rt_core *c);
/* Ends it: both legs are cancelled, no action names it any more. Unknown ids are ignored. */
void bt_rt_seq_cancel(struct bt_rt_core *c, uint64_t now, uint64_t seq);

#define BT_RT_NAME_MAX     64
#define BT_RT_ATTEMPTS_MAX 8 /* ended ones kept of a sequence */

/* One attempt as the router saw it. Times are those given to the core; 0: not reached. */
struct bt_rt_attempt {
    char prefill_name[BT_RT_NAME_MAX], decode_name[BT_RT_NAME_MAX];
    uint64_t t_start;
    uint64_t t_prefilled; /* the prefill leg's token came */
    uint64_t t_landed;    /* the decode leg's first output came: its pages are there */
    uint64_t t_end;       /* it failed; 0: the current or last attempt */
    uint32_t first;       /* index of the answer's token that it was to produce first */
    bool local;           /* the decode node computes the prompt: both names are its own */
    bool has_prefill, has_decode;
    struct bt_msg_leg_stats prefill, decode;
    enum bt_attempt_reason reason; /* why it failed */
    char why[192];
};

/* What is known of a sequence; valid until its END was handled and the queue drained, or it was
 * cancelled. */
struct bt_rt_seq_info {
    const char *prefill_name, *decode_name; /* of the current or last attempt; "" if none */
    uint64_t t_dispatch;                    /* of the first attempt; 0: none yet */
    uint32_t n_attempts;
    uint32_t max_tokens; /* resolved; 0 before the first attempt */
    bool has_prefill, has_decode;
    struct bt_msg_leg_stats prefill,
        decode;                        /* of the attempt that answered; prefill: of the first one */
    struct bt_rt_attempt attempt;      /* current or last */
    const struct bt_rt_attempt *ended; /* failed before it, oldest first; of more than
                                        * BT_RT_ATTEMPTS_MAX the first ones and the last */
    uint32_t n_ended;
};
/* NULL: unknown id. */
const struct bt_rt_seq_info *bt_rt_seq_info(const struct bt_rt_core *c, uint64_t seq);

/* At least every 50 ms: leases, heartbeats, deadlines, retries. */
void bt_rt_on_tick(struct bt_rt_core *c, uint64_t now);

/* ---- state for status and metrics ---- */

struct bt_rt_node_info {
    const char *name;
    uint64_t instance;
    enum bt_role role;
    char state[320]; /* "ready", "draining", "mismatch: …" */
    const struct bt_msg_hello *hello;
    const struct bt_msg_load *load;
    uint32_t own_seqs; /* load that this router counts there: sequences and tokens */
    uint64_t own_tokens;
    uint32_t n_cut; /* prefill: connected decode nodes that it said it cannot reach */
};
/* The node after position *pos (start with 0); false at the end. Pointers: until the core is called
 * again. */
bool bt_rt_core_node(const struct bt_rt_core *c, uint32_t *pos, struct bt_rt_node_info *out);
/* The name of a connected instance, or NULL. */
const char *bt_rt_core_instance_name(const struct bt_rt_core *c, uint64_t instance);

struct bt_rt_gone_info {
    const char *name;
    enum bt_role role;
};
/* Nodes lost in the last minutes that have not come back. */
bool bt_rt_core_gone(const struct bt_rt_core *c, uint32_t *pos, struct bt_rt_gone_info *out);

struct bt_rt_stats {
    uint64_t attempts, migrated, stale;
    uint64_t local;  /* attempts whose prompt the decode node was to compute */
    uint64_t pairs;  /* attempts on two nodes */
    uint64_t resent; /* attempts for which a prefill node did not compute the prompt again */
    uint64_t token_mismatches; /* copies of a token that differed from the one taken first */
    uint32_t running, waiting; /* sequences */
};
const struct bt_rt_stats *bt_rt_core_stats(const struct bt_rt_core *c);
/* A pair can serve. */
bool bt_rt_core_ready(const struct bt_rt_core *c);
/* Longest prompt plus answer that the connected nodes take; 0: no pair. */
uint32_t bt_rt_core_context(const struct bt_rt_core *c);

#endif
