#ifndef BT_PREFILLD_PREFILLD_CORE_H
#define BT_PREFILLD_PREFILLD_CORE_H

/* The decisions of a prefill node (PROTOCOL: Submit, Pages): events in, actions out, time as an
 * argument. No I/O, no clock, no thread; no heap after create: the tables of max_jobs jobs and the largest possible list
 * of actions are reserved there. The daemon and the simulation run the same code.
 *
 * Life of a job (one ticket):
 *   QUEUED -- engine started --> COMPUTING -- token 0 --> HELD -- done from D --> ENDING --> gone
 * A job ends early by cancel, lost router, engine failure, or a token 0 that ends the answer. ENDING
 * waits until no send of its pages is in flight; only then are the pages released.
 *
 * When only the decode side failed (refuse, revoke, lost peer, a deadline, or the router says so) the attempt is over, the
 * job is *kept*: in whatever state it is, it goes on being computed, without a peer, for keep_ns. A submit that
 * replaces its ticket adopts it: it goes on under the new ticket with the new peer, and its pages are sent again. Kept
 * jobs go first when pages or jobs are short. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/sampling.h"
#include "base/status.h"
#include "proto/session.h"
#include "proto/ticket_table.h"
#include "proto/transfer.h"

struct bt_pf_opts {
    uint32_t max_jobs;
    uint32_t first_slot; /* of job ids: those of both legs of a node must differ */
    uint32_t peers_max;
    uint32_t n_groups;
    uint32_t n_layers[BT_CONTROL_GROUPS_MAX]; /* layers of each group */
    uint32_t window[BT_CONTROL_GROUPS_MAX];   /* of each group; 0: full attention */
    uint32_t page_tokens;
    uint32_t context; /* tokens of the longest sequence; a submit of more is refused as invalid */
    /* First pause before a peer is dialled again; doubles up to 16 times that. */
    uint64_t reconnect_ns;
    uint64_t unreachable_ns; /* a started prompt waits so long for its peer's connection */
    uint64_t grant_ns;       /* a computed prompt waits so long for its grant, then for done; each
                                push that ends starts it anew */
    uint64_t alive_ns; /* its decode node hears so often that a granted prompt is being computed */
    uint64_t keep_ns;  /* a job whose decode side failed waits so long for another attempt */
};

enum bt_pf_action_kind {
    BT_PF_ENGINE_SUBMIT,  /* job, submit */
    BT_PF_ENGINE_CANCEL,  /* job */
    BT_PF_ENGINE_RELEASE, /* job: its pages are free after this */
    BT_PF_PUSH,           /* job, ticket, generation, peer, push: one layer's pages; answered by
                             on_pushed, once */
    BT_PF_PUSH_CANCEL,    /* ticket */
    BT_PF_CONTROL,        /* peer, control */
    BT_PF_CONNECT,        /* instance, address, gate_token; answered by on_connecting or
                             on_connect_failed */
    BT_PF_DISCONNECT,     /* peer */
    BT_PF_OUTPUT,         /* router, output */
    BT_PF_ATTEMPT_END,    /* router, end */
    BT_PF_PEER_STATE,     /* to every router: peer_state */
    BT_PF_MOVED,          /* moved: for the metrics, of a transfer that D confirmed */
    BT_PF_ADOPTED,        /* job, ticket: its ticket from now on; for the log */
};

/* A whole transfer, as bt_pf_count_push() told it. */
struct bt_pf_moved {
    uint64_t n_shares, post_ns;
    uint64_t move_ns; /* first page handed to the transport to the last send that completed */
};

/* Pointers are valid until the core is called again. */
struct bt_pf_action {
    enum bt_pf_action_kind kind;
    uint32_t router;
    const char *request_id; /* ATTEMPT_END: for the log */
    bool again;             /* OUTPUT: its statistics went out before */
    uint64_t job, peer, generation, instance;
    struct bt_ticket ticket;
    const char *address;
    struct bt_gate_token gate_token;
    union {
        const struct bt_msg_submit *submit;
        struct {
            uint32_t group, layer, first, n_pages; /* absolute pages first, first + 1, … */
            const uint32_t *page_ids;              /* [n_pages] */
        } push;
        struct bt_control control;
        struct bt_msg_output output;
        struct bt_msg_attempt_end end;
        struct bt_msg_peer_state peer_state;
        struct bt_pf_moved moved;
    };
};

struct bt_pf_actions {
    struct bt_pf_action *items;
    size_t n;
};

struct bt_pf_stats {
    uint64_t stale; /* messages dropped: ticket, generation or instance did not match */
    uint64_t handoffs, done, failures;
    uint64_t cached_tokens; /* of prompts: not computed, because the prefix cache had them */
    /* Jobs whose decode side failed: adopted by another attempt; given up after keep_ns, or for those that were short */
    uint64_t resent, keep_expired, keep_evicted;
};

struct bt_pf_core;

enum bt_status bt_pf_core_create(const struct bt_pf_opts *opts,
                                 struct bt_pf_core **out) BT_NODISCARD;
void bt_pf_core_destroy(struct bt_pf_core *c);
/* What the last call decided, in order; valid until the next call. Each call below begins with an
 * empty list. */
const struct bt_pf_actions *bt_pf_core_actions(const struct bt_pf_core *c);
const struct bt_pf_stats *bt_pf_core_stats(const struct bt_pf_core *c);
uint32_t bt_pf_core_jobs(const struct bt_pf_core *c); /* ENDING ones included */
uint32_t bt_pf_core_kept(const struct bt_pf_core *c); /* of them, without a decode side now */

/* From routers. router: the caller's number of the session. */
void bt_pf_on_submit(struct bt_pf_core *c, uint64_t now, uint32_t router,
                     const struct bt_msg_submit *s);
/* keep: only the decode side has failed. */
void bt_pf_on_cancel(struct bt_pf_core *c, uint64_t now, uint32_t router, const struct bt_ticket *t,
                     bool keep);
void bt_pf_on_router_lost(struct bt_pf_core *c, uint64_t now, uint32_t router);
/* All peers that any router allows: the union, made by the caller. */
void bt_pf_on_peers(struct bt_pf_core *c, uint64_t now, const struct bt_msg_peer *peers, size_t n);

/* From the engine. Job ids that are over are ignored. */
void bt_pf_on_engine_failed(struct bt_pf_core *c, uint64_t now, uint64_t job, enum bt_status st,
                            const char *text);
void bt_pf_on_engine_started(struct bt_pf_core *c, uint64_t now, uint64_t job);
/* Right after started: the prefix cache had the KV of the first n_tokens tokens. */
void bt_pf_on_engine_cached(struct bt_pf_core *c, uint64_t now, uint64_t job, uint32_t n_tokens);
void bt_pf_on_engine_pages(struct bt_pf_core *c, uint64_t now, uint64_t job, uint32_t group,
                           uint32_t layer, uint32_t first, uint32_t end, const uint32_t *page_ids);
/* finish: as in struct bt_msg_output. */
void bt_pf_on_engine_token(struct bt_pf_core *c, uint64_t now, uint64_t job, uint32_t index,
                           const struct bt_sampled *s, uint32_t finish);
void bt_pf_on_engine_prompt_logprobs(struct bt_pf_core *c, uint64_t now, uint64_t job,
                                     uint32_t first, const struct bt_sampled *list, size_t n);
void bt_pf_on_engine_preempted(struct bt_pf_core *c, uint64_t now, uint64_t job);
/* Layers were computed since the last call. Call it now and then while they are, at least every 100 ms: decode nodes
 * that hold pages for what is being computed are told so. An engine that hangs says nothing, and they give up. */
void bt_pf_on_engine_alive(struct bt_pf_core *c, uint64_t now);
/* A prompt waits for pages that others hold. */
void bt_pf_on_engine_short(struct bt_pf_core *c, uint64_t now);

/* From the transfer room. conn: its id of a connection. */
void bt_pf_on_connecting(struct bt_pf_core *c, uint64_t now, uint64_t instance, uint64_t conn);
void bt_pf_on_connect_failed(struct bt_pf_core *c, uint64_t now, uint64_t instance,
                             const char *why);
void bt_pf_on_peer_up(struct bt_pf_core *c, uint64_t now, uint64_t conn);
void bt_pf_on_peer_down(struct bt_pf_core *c, uint64_t now, uint64_t conn, const char *why);
void bt_pf_on_control(struct bt_pf_core *c, uint64_t now, uint64_t conn,
                      const struct bt_control *m);
/* What the push cost that on_pushed will end, for BT_PF_MOVED: before that call, and only where it is known. t: the
 * ticket that it was made for, in both calls. */
void bt_pf_count_push(struct bt_pf_core *c, uint64_t now, uint64_t job, const struct bt_ticket *t,
                      uint64_t post_ns, uint64_t move_ns);
void bt_pf_on_pushed(struct bt_pf_core *c, uint64_t now, uint64_t job, const struct bt_ticket *t,
                     enum bt_status st);

/* The time to drain is over: every attempt goes back to its router as BT_ATTEMPT_DRAINING, at once, and
 * so does each that still comes. Jobs may stay until their sends have ended. */
void bt_pf_on_give_back(struct bt_pf_core *c, uint64_t now);
/* From now on it takes work again, as before give_back. */
void bt_pf_on_resume(struct bt_pf_core *c);

/* At least every 100 ms: deadlines, reconnects. */
void bt_pf_on_tick(struct bt_pf_core *c, uint64_t now);

#endif
