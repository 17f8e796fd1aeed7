#ifndef BT_PROTO_SESSION_H
#define BT_PROTO_SESSION_H

/* Messages of the session stream between router and daemon as plain structs (session.proto has the
 * wire shapes). Decoding validates: sizes, ranges and enum values; what it returns lives in the
 * caller's arena until that is reset. Encoding appends to a bt_buf. Any thread. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/arena.h"
#include "base/buf.h"
#include "base/sampling.h"
#include "base/status.h"
#include "proto/gate_token.h"
#include "proto/ticket.h"

#define BT_SESSION_METHOD        "/baton.session.v1.Session/Run"
#define BT_SESSION_VERSION_MIN   1u
#define BT_SESSION_VERSION_MAX   2u
#define BT_SESSION_VERSION_ADMIN 2u /* from here on nodes are told to drain and to change roles */
#define BT_SESSION_VERSION_GATE                                                                    \
    2u /* from here on decode nodes have a gate before UCX (transfer/xfer_gate.h) */
#define BT_SESSION_VERSION_LOCAL                                                                   \
    2u /* from here on decode nodes compute prompts of submits without a peer */
#define BT_SESSION_TOKENS_MAX (4u << 20) /* token ids in one submit */
#define BT_SESSION_PEERS_MAX  4096u
#define BT_SESSION_ID_MAX     200u   /* of a request id that daemons keep; longer ones are cut */
#define BT_TRACE_ID_DIGITS    32u    /* hex, lower case */
#define BT_SESSION_BLOCKS_MAX 65536u /* of a prefix cache, in one report */
#define BT_SESSION_MSG_MAX    (32u << 20) /* bytes of one message */

/* s begins with the id of a W3C trace: so many digits, not all 0. */
bool bt_trace_id_valid(const char *s);

/* What a node serves as; the first two also number the legs of an attempt. */
enum bt_role { BT_ROLE_PREFILL, BT_ROLE_DECODE, BT_ROLE_BOTH };
#define BT_LEGS 2u
const char *bt_role_name(enum bt_role r); /* "prefill", "decode", "both" */
/* false: no such name. */
bool bt_role_parse(const char *name, enum bt_role *out);
/* A node of role r serves as that leg. */
static inline bool bt_role_has(enum bt_role r, enum bt_role leg)
{
    return r == leg || r == BT_ROLE_BOTH;
}

/* Why an attempt ended without its answer. */
enum bt_attempt_reason {
    BT_ATTEMPT_REFUSED = 1,   /* no room now (pages, queue) */
    BT_ATTEMPT_RETRY = 2,     /* lost its pages or its peer; nothing wrong with the request */
    BT_ATTEMPT_PREEMPTED = 3, /* decode node ran out of pages */
    BT_ATTEMPT_INVALID = 4, /* the request cannot run here (too long, bad token id): do not retry */
    BT_ATTEMPT_INTERNAL = 5, /* device failure */
    BT_ATTEMPT_DRAINING = 6,
};

struct bt_msg_hello {
    uint32_t version_min, version_max;
    enum bt_role role;
    uint64_t instance;
    const char *name;
    uint64_t fingerprint;
    const char *numerics, *kv_layout, *model_name, *transfer_address, *backend;
    uint32_t page_tokens, n_pages, max_batch, max_tokens, context, vocab, chunk_tokens;
    uint64_t lease_ms;
    struct bt_gate_token gate_token; /* none: a node from before it */
};

struct bt_msg_transport {
    uint64_t peer;
    const char *description;
};

/* Blocks of a prefix cache: see sched/prefix_hash.h and prefix_report.h. */
struct bt_msg_prefix_blocks {
    bool told;  /* the node has such a cache and tells of it */
    bool reset; /* forget what was told before */
    size_t n_added, n_removed;
    const uint64_t *added, *removed;
};

struct bt_msg_load {
    uint32_t waiting, running, held, landing;
    uint64_t waiting_tokens;
    uint32_t pages_free, pages_cached, pages_leased, pages_quarantined;
    uint64_t transferred_tokens, transferred_bytes, transfer_failures, stale_messages,
        local_prefills;
    double prefill_tokens_per_s, decode_step_ms;
    bool pages_short; /* a prompt waits for pages that others hold */
    size_t n_transports;
    const struct bt_msg_transport *transports;
    struct bt_msg_prefix_blocks prefix_blocks;
};

struct bt_msg_leg_stats {
    uint64_t queue_ns, prefill_ns, grant_ns, transfer_ns, transfer_tail_ns, decode_ns;
    uint32_t cached_tokens, transferred_tokens, prefill_tokens;
    uint64_t transferred_bytes;
    double batch; /* mean; 0: not told */
    bool resent;  /* prefill: what an attempt before had computed was sent again */
};

struct bt_msg_output {
    struct bt_ticket ticket;
    uint32_t index;
    size_t n_tokens;
    const struct bt_sampled *tokens;
    uint32_t finish; /* 0 none, 1 stop, 2 length */
    bool has_logprobs;
    size_t n_prompt_logprobs;
    const struct bt_sampled *prompt_logprobs;
    uint32_t prompt_first;
    bool has_stats;
    struct bt_msg_leg_stats stats;
};

struct bt_msg_attempt_end {
    struct bt_ticket ticket;
    enum bt_attempt_reason reason;
    const char *text;
    bool
        kept; /* prefill: only the decode side failed; the pages wait for a submit that replaces it */
};

struct bt_msg_peer_state {
    uint64_t instance;
    bool reachable;
    const char *text;
};

struct bt_msg_role_state {
    enum bt_role role;
    enum bt_role leaving; /* the leg that drains; BOTH: none */
};

enum bt_from_daemon_kind {
    BT_FROM_DAEMON_HELLO,
    BT_FROM_DAEMON_LOAD,
    BT_FROM_DAEMON_OUTPUTS,
    BT_FROM_DAEMON_ATTEMPT_END,
    BT_FROM_DAEMON_PEER_STATE,
    BT_FROM_DAEMON_DRAINING,
    BT_FROM_DAEMON_ROLE_STATE,
};

struct bt_from_daemon {
    enum bt_from_daemon_kind kind;
    union {
        struct bt_msg_hello hello;
        struct bt_msg_load load;
        struct {
            size_t n;
            const struct bt_msg_output *outputs;
        } outputs;
        struct bt_msg_attempt_end attempt_end;
        struct bt_msg_peer_state peer_state;
        struct bt_msg_role_state role_state;
    };
};

struct bt_msg_welcome {
    uint32_t version; /* 0: refused */
    const char *reason;
    uint64_t instance;
    const char *name;
};

struct bt_msg_submit {
    struct bt_ticket ticket;
    enum bt_role leg; /* that is wanted of the node; BOTH: not told, it has one */
    const char *request_id;
    size_t n_tokens;
    const uint32_t *tokens;
    uint32_t n_prompt; /* 1 … n_tokens */
    struct bt_sampling sampling;
    bool prompt_logprobs;
    uint64_t peer_instance; /* 0: no other leg; a decode node computes the prompt itself then */
    const char *peer_address;
    struct bt_gate_token peer_gate_token;
    const char *trace_id; /* for logs; NULL or "": none */
    /* Prefill: the attempt whose decode side failed; what was kept of it is sent again. */
    bool has_replaces;
    struct bt_ticket replaces;
};

struct bt_msg_peer {
    uint64_t instance;
    const char *address, *name;
    struct bt_gate_token gate_token; /* none: the node or the router is from before it */
};

enum bt_from_router_kind {
    BT_FROM_ROUTER_WELCOME,
    BT_FROM_ROUTER_SUBMIT,
    BT_FROM_ROUTER_CANCEL,
    BT_FROM_ROUTER_PEERS,
    BT_FROM_ROUTER_HEARTBEAT,
    BT_FROM_ROUTER_DRAIN,
    BT_FROM_ROUTER_SET_ROLE,
};

struct bt_from_router {
    enum bt_from_router_kind kind;
    union {
        struct bt_msg_welcome welcome;
        struct bt_msg_submit submit;
        struct {
            struct bt_ticket ticket;
            bool keep; /* prefill: as AttemptEnd's kept, but the router says it */
        } cancel;
        struct {
            size_t n;
            const struct bt_msg_peer *peers;
        } peers;
        enum bt_role set_role;
    };
};

/* BT_ERR_PROTOCOL with the field in err; BT_ERR_NOMEM when the arena is full. */
enum bt_status bt_from_daemon_decode(const void *data, size_t n, struct bt_arena *arena,
                                     struct bt_from_daemon *out, struct bt_err *err) BT_NODISCARD;
enum bt_status bt_from_router_decode(const void *data, size_t n, struct bt_arena *arena,
                                     struct bt_from_router *out, struct bt_err *err) BT_NODISCARD;
/* Appends the encoded message; BT_ERR_NOMEM leaves out as it was. */
enum bt_status bt_from_daemon_encode(const struct bt_from_daemon *m,
                                     struct bt_buf *out) BT_NODISCARD;
enum bt_status bt_from_router_encode(const struct bt_from_router *m,
                                     struct bt_buf *out) BT_NODISCARD;

#endif
