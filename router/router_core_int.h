#ifndef BT_ROUTER_ROUTER_CORE_INT_H
#define BT_ROUTER_ROUTER_CORE_INT_H

/* Inside the router's core only: its state, and the calls between its files. */

#include "base/arena.h"
#include "base/log.h"
#include "base/slab.h"
#include "proto/ticket_table.h"
#include "router/router_admission.h"
#include "router/router_core.h"

#define RT_DROPPED   (BT_RT_LOG + 1) /* kind of a queued action that nobody wants any more */
#define RT_NAME_MAX  BT_RT_NAME_MAX
#define RT_GAP_MAX   64   /* tokens that may wait for one in front of them */
#define RT_CHAIN_MAX 4096 /* blocks of one prompt that are looked for in caches */
#define RT_AVOID_MAX 8
#define RT_GONE_MAX  64
#define RT_GONE_NS   (UINT64_C(300) * 1000000000)
/* A finished answer waits so long for the prefill leg's statistics. */
#define RT_STATS_NS (UINT64_C(100) * 1000000)

struct rt_node {
    uint64_t session; /* 0: free */
    bool hello_seen, draining;
    uint32_t losing;      /* bits of legs that it was told to give up, and has not answered yet */
    enum bt_role leaving; /* the leg that drains there; BOTH: none */
    bool complained;      /* its mismatch was logged */
    bool disagreed;       /* a token of its was another than one taken before; logged */
    uint64_t last_heard;
    struct bt_msg_hello hello; /* strings in `strings` */
    char *strings;
    uint64_t ident; /* hash of what must be equal for pairing */
    uint32_t version;
    struct bt_msg_load load;
    void *transports;    /* memory of load.transports */
    uint64_t peers_hash; /* of the list last sent */
    /* Load: own is counted at dispatch, others is what the last report had beyond our own at that
     * time. Tokens are those of prompts that it is to compute. */
    uint32_t own_seqs, other_seqs;
    uint32_t own_decodes; /* of own_seqs, those that it decodes, or will */
    uint64_t own_tokens, other_tokens;
    bool caches;        /* it has shown that it has a prefix cache, */
    bool tells_cache;   /* and tells what comes into it and leaves it */
    uint64_t cache_key; /* of its entries, see router_affinity.c */
    uint32_t credit;    /* tokens of the sequence being placed that it likely has cached */
    /* Of own, prompts that are not computed yet, with BT_ADM_SHORT tokens at most each; of own_tokens,
     * those sent since the last report, and those that it saw computed. */
    uint32_t own_prompts;
    uint64_t own_short, fresh_tokens, done_tokens;
    uint64_t t_speed; /* its measured speed was news */
    /* Decode: tokens that own sequences hold, pages that they will take, and those of others by the
     * last report. */
    uint64_t own_held, own_pages, other_pages;
    uint64_t *cut; /* prefill: decode instances that it cannot reach */
    uint32_t n_cut, cap_cut;
};

struct rt_leg {
    uint64_t session; /* 0: none */
    bool live;        /* it may still send, and wants a cancel */
    uint64_t charge;  /* tokens to compute, counted at the node */
    uint64_t held;    /* tokens that it holds */
    uint32_t pages;   /* and pages */
};

enum rt_seq_state { SEQ_WAITING, SEQ_RUNNING, SEQ_OVER };

struct rt_seq {
    struct bt_job head;
    enum rt_seq_state state;
    struct rt_seq *prev, *next; /* in the list of its state */
    char request_id[BT_SESSION_ID_MAX + 1];
    char trace_id[BT_TRACE_ID_DIGITS + 1];
    uint32_t *tokens; /* prompt and answer so far, of c->tokens */
    uint32_t n_tokens, n_prompt;
    struct bt_sampling sampling;
    struct bt_logit_bias *bias; /* of c->biases, or NULL */
    bool prompt_logprobs;
    uint32_t prompt_next;    /* prompt position whose log-probability is wanted next */
    struct bt_adm_item turn; /* its place among the waiting */
    uint64_t deadline;
    void *user;
    uint64_t t_wait, not_before;
    uint64_t t_progress;         /* dispatch, or the last new token or prompt log-probability */
    uint64_t t_start, expect_ns; /* its first token was expected so long after its start */
    uint64_t ident;              /* of the nodes of the first attempt: all attempts run on such */
    uint32_t failures, refusals, drains; /* in a row */
    bool refused;                        /* waits after a refusal: goes on when a node gets room */
    bool has_reason;
    enum bt_attempt_reason reason; /* of the last failure */
    char why[192];
    struct {
        uint64_t instance;
        uint32_t weight;
    } avoid[RT_AVOID_MAX];
    uint32_t n_avoid;
    uint64_t *
        chain; /* of c->chains when needed: [n_chain] names of the prompt's blocks, see router_affinity.c */
    uint32_t n_chain, block_tokens; /* 0: not known yet */
    uint64_t prefer; /* prefill instance that has computed the prompt already; 0: none */
    /* The prefill leg of the last attempt, if only its decode side failed: that node keeps what it computed for the
     * next attempt, for a while. */
    struct {
        uint64_t session; /* 0: nothing is kept */
        struct bt_ticket ticket;
        uint64_t since;
        bool computed; /* the whole prompt */
    } kept;
    uint32_t resends; /* in a row that failed, but for refusals */
    bool told_kept;   /* the prefill node says so in the report that is being handled */
    /* the attempt */
    struct rt_leg leg[2]; /* by enum bt_role */
    bool decode_began, prefill_answered;
    struct bt_sampled *gap; /* [RT_GAP_MAX], of c->gaps when needed */
    uint32_t gap_first, gap_n, gap_finish;
    uint32_t finish; /* != 0: complete, waits for statistics until finish_at */
    uint64_t finish_at;
    struct bt_rt_seq_info info;
    struct bt_rt_attempt *ended; /* [BT_RT_ATTEMPTS_MAX], of c->histories when needed */
    char prefill_name[RT_NAME_MAX], decode_name[RT_NAME_MAX];
};

struct rt_list {
    struct rt_seq *first, *last;
};

/* Tokens of short prompts sent to nodes: in the period that began at t0, and in the one before. */
struct rt_mix {
    uint64_t t0;
    double current, last;
};

#define RT_LATE_SEEN 512u
/* First tokens of late: sums of what they took, of what was expected, and of how much the corrected expectation was off,
 * in ns; and of each, how much later than that it was, as a part of it and of some of the limit. */
struct rt_late {
    double took, expected, off;
    float later[RT_LATE_SEEN]; /* a ring */
    uint32_t n_fresh;          /* those since there was none for a while */
    uint64_t t_last;           /* when the last one came */
};

struct rt_gone {
    char name[RT_NAME_MAX];
    enum bt_role role;
    uint64_t since; /* 0: free */
};

struct bt_rt_core {
    struct bt_rt_opts opts;
    struct rt_node *nodes; /* [nodes_max] */
    uint32_t *node_generation;
    uint32_t n_slots; /* slots of nodes ever used */
    struct bt_ticket_table seqs;
    struct bt_slab tokens, biases, chains, gaps, histories; /* of sequences: room for one of each */
    struct rt_list waiting, running, over;
    struct bt_adm adm;  /* order of the waiting */
    double answer_mean; /* tokens of an answer, of late */
    struct rt_mix mix;
    struct rt_late late[3]; /* short, longer and long prompts */
    double prefill_speed;   /* tokens a second of a prefill node, on average */
    double handoff_ns; /* from the end of a prompt to its last page at the decode node, of late */
    struct bt_rt_stats stats;
    struct bt_log_limit stale_told;
    uint64_t served; /* ident of the nodes in use; 0: none yet */
    bool ready;
    uint64_t t_unready;
    uint64_t next_beat;
    uint32_t n_freed; /* legs that ended since the last pump: as many refused sequences may try */
    struct rt_affinity *affinity;
    uint64_t n_cache_keys;
    uint32_t next_node[2]; /* where the search for the next prefill / decode node begins */
    uint64_t n_tickets;
    struct rt_gone gone[RT_GONE_MAX];
    struct bt_rt_action *actions;
    size_t n_actions, cap_actions, head_action;
    struct bt_arena scratch; /* texts and lists of queued actions */
    void **trash;            /* memory that queued actions may point to */
    size_t n_trash, cap_trash;
};

static inline uint32_t bt_rt_produced(const struct rt_seq *s)
{
    return s->n_tokens - s->n_prompt;
}

/* More than one token is still to come: a decode leg is needed. */
static inline bool bt_rt_wants_decode(const struct rt_seq *s)
{
    return s->finish == 0 &&
           (s->sampling.max_tokens == 0 || s->sampling.max_tokens - bt_rt_produced(s) > 1 ||
            s->kept.session != 0); /* a decode node makes the last token from what is kept */
}

/* Log-probabilities of the prompt are still to come: the prefill leg is needed, even when the answer
 * is complete. */
static inline bool bt_rt_wants_prompt(const struct rt_seq *s)
{
    return s->prompt_logprobs && s->prompt_next < s->n_prompt;
}

/* ---- router_core.c ---- */

struct bt_rt_action *bt_rt_act(struct bt_rt_core *c, enum bt_rt_action_kind kind);
const char *bt_rt_say(struct bt_rt_core *c, const char *fmt, ...) BT_PRINTF(2, 3);
void bt_rt_log(struct bt_rt_core *c, int level, const char *text);
void bt_rt_trash(struct bt_rt_core *c, void *p); /* freed when the queue was drained */
void bt_rt_seq_wait(struct bt_rt_core *c, uint64_t now, struct rt_seq *s);
void bt_rt_seq_run(struct bt_rt_core *c, struct rt_seq *s);
void bt_rt_seq_end(struct bt_rt_core *c, struct rt_seq *s, enum bt_rt_end_kind kind,
                   uint32_t finish, const char *text);
void bt_rt_next_ticket(struct bt_rt_core *c, struct bt_ticket *t);
void bt_rt_pump(struct bt_rt_core *c, uint64_t now); /* dispatches what can be */

/* ---- router_affinity.c ---- */

struct rt_affinity;
struct rt_affinity *bt_rt_affinity_create(void); /* NULL: no memory */
void bt_rt_affinity_destroy(struct rt_affinity *a);
/* Names the blocks of the sequence's prompt as the nodes that it may go to do. */
void bt_rt_affinity_prepare(struct bt_rt_core *c, struct rt_seq *s);
/* A node has said hello: nothing is known of its cache. */
void bt_rt_affinity_new_node(struct bt_rt_core *c, struct rt_node *n);
/* What its load report says. */
void bt_rt_affinity_told(struct bt_rt_core *c, struct rt_node *n,
                         const struct bt_msg_prefix_blocks *b);
/* A node gets the prompt of a sequence. */
void bt_rt_affinity_note(struct rt_affinity *a, uint64_t now, const struct rt_node *n,
                         const struct rt_seq *s);
/* A node has seen the answer of a sequence too, as far as it goes. */
void bt_rt_affinity_note_more(struct rt_affinity *a, uint64_t now, const struct rt_node *n,
                              const struct rt_seq *s);
/* Tokens at the beginning of the prompt that the node probably has. */
uint32_t bt_rt_affinity_tokens(struct rt_affinity *a, uint64_t now, const struct rt_node *n,
                               const struct rt_seq *s);

/* ---- router_attempt.c ---- */

enum rt_dispatch {
    RT_DISPATCHED,
    RT_NO_ROOM, /* at the decode nodes */
    RT_QUEUED,  /* the prefill nodes have work enough for now */
    RT_HELD,    /* the same, but others may go where this sequence has failed */
    RT_NO_PAIR,
    RT_ENDED
};
enum rt_dispatch bt_rt_attempt_start(struct bt_rt_core *c, uint64_t now, struct rt_seq *s);
/* The first attempt fixes what the answer depends on: the kind of nodes, and its length if none was
 * given. false: the sequence does not fit and has ended. */
bool bt_rt_resolve(struct bt_rt_core *c, struct rt_seq *s);
/* It can never run here: longer than the context. */
bool bt_rt_too_long(const struct bt_rt_core *c, uint32_t n_prompt, uint32_t max_tokens);
void bt_rt_attempt_cancel(struct bt_rt_core *c, struct rt_seq *s); /* both legs */
void bt_rt_kept_drop(struct bt_rt_core *c, struct rt_seq *s);      /* nobody wants it any more */
/* Drops it if the node has left, gets no more prompts, or has kept it for its lease: then it is there no more. */
void bt_rt_kept_check(struct bt_rt_core *c, uint64_t now, struct rt_seq *s);
/* The leg of that role will say nothing any more; false cancel: it knows. */
void bt_rt_leg_end(struct bt_rt_core *c, struct rt_seq *s, enum bt_role role, bool cancel);
void bt_rt_attempt_failed(struct bt_rt_core *c, uint64_t now, struct rt_seq *s, enum bt_role role,
                          enum bt_attempt_reason reason, const char *text);
/* The leg ended, or its node did: the attempt goes on without it if its part was done. */
void bt_rt_leg_lost(struct bt_rt_core *c, uint64_t now, struct rt_seq *s, enum bt_role role,
                    enum bt_attempt_reason reason, const char *text);
/* Where its attempt stands, for a person; valid as long as queued actions. */
const char *bt_rt_phase(struct bt_rt_core *c, const struct rt_seq *s);
void bt_rt_attempt_finish(struct bt_rt_core *c, struct rt_seq *s);
/* Ends the attempt if it made no progress for too long; another follows. */
void bt_rt_attempt_check(struct bt_rt_core *c, uint64_t now, struct rt_seq *s);
void bt_rt_on_output(struct bt_rt_core *c, uint64_t now, struct rt_node *n,
                     const struct bt_msg_output *o);
void bt_rt_on_attempt_end(struct bt_rt_core *c, uint64_t now, struct rt_node *n,
                          const struct bt_msg_attempt_end *m);

/* ---- router_nodes.c ---- */

struct rt_node *bt_rt_node(const struct bt_rt_core *c, uint64_t session); /* NULL: gone */
/* It gets no new attempts; why is for the log. */
void bt_rt_node_drains(struct bt_rt_core *c, uint64_t now, struct rt_node *n, const char *why);
void bt_rt_nodes_tick(struct bt_rt_core *c, uint64_t now);
void bt_rt_nodes_fini(struct bt_rt_core *c);

/* ---- router_pairs.c ---- */

bool bt_rt_usable(const struct rt_node *n, enum bt_role role); /* for new attempts */
bool bt_rt_may_pair(const struct rt_node *prefill, const struct rt_node *decode);
/* After any change of the nodes: which kind is in use, readiness, peer lists, warnings. */
void bt_rt_nodes_changed(struct bt_rt_core *c, uint64_t now);
void bt_rt_node_state(const struct bt_rt_core *c, const struct rt_node *n, char *out, size_t cap);
/* Why there is no pair, for a person; in scratch memory. */
const char *bt_rt_no_pair_text(struct bt_rt_core *c, bool with_decode);

/* ---- router_place.c ---- */

struct rt_pair {
    struct rt_node *prefill, *decode;
};
/* Picks the pair for a sequence; decode NULL when the rest of the answer is one token, both the same
 * node when that computes the prompt and decodes on. RT_DISPATCHED: *out is set. */
enum rt_dispatch bt_rt_place(struct bt_rt_core *c, uint64_t now, const struct rt_seq *s,
                             struct rt_pair *out);
/* Tokens a second, as far as it is known. */
double bt_rt_prefill_speed(const struct bt_rt_core *c, const struct rt_node *p);
/* Pages of a decode node that so many tokens take. */
uint32_t bt_rt_pages_of(const struct rt_node *d, uint64_t tokens);
/* Tokens that a sequence will probably have at its end. */
uint64_t bt_rt_expected_tokens(const struct bt_rt_core *c, const struct rt_seq *s);
/* After a load report or the loss of a node. */
void bt_rt_speeds_changed(struct bt_rt_core *c);
uint32_t bt_rt_context_of(const struct bt_rt_core *c, uint64_t ident, bool with_decode);
/* Tokens of prompts that a node has still to compute. */
uint64_t bt_rt_work_at(const struct rt_node *n);

/* Tokens of work that a prompt of so many has in front of it at a prefill node, the time that takes, and whether the node
 * takes one more for now. */
uint64_t bt_rt_work_before(const struct rt_node *p, uint64_t n_tokens);
uint64_t bt_rt_work_ns(const struct bt_rt_core *c, const struct rt_node *p, uint64_t tokens);
bool bt_rt_takes_more(const struct bt_rt_core *c, const struct rt_node *p, uint64_t n_tokens);
/* How many more sequences of so many tokens a decode node takes. */
uint32_t bt_rt_room_of(const struct rt_node *d, uint64_t tokens);

/* ---- router_forecast.c ---- */

/* As bt_rt_forecast(), before the correction by lateness. */
struct bt_rt_forecast bt_rt_forecast_work(const struct bt_rt_core *c, uint64_t now, uint32_t key,
                                          int32_t priority, uint32_t n_prompt);
/* The first token of its first attempt is here: forecasts learn from it. */
void bt_rt_first_token(struct bt_rt_core *c, uint64_t now, const struct rt_seq *s);
/* A prompt of so many tokens, those that are cached left out, goes to a prefill node. */
void bt_rt_mix_note(struct bt_rt_core *c, uint64_t now, uint64_t tokens);
/* Its first token would come after max_ttft_ns: if it went to that node now; wherever it went. Never of a sequence that
 * had an attempt. */
bool bt_rt_too_late_at(const struct bt_rt_core *c, uint64_t now, const struct rt_seq *s,
                       const struct rt_node *p);
bool bt_rt_too_late(const struct bt_rt_core *c, uint64_t now, const struct rt_seq *s);
/* Ends one that is; forecasts learn from it. */
void bt_rt_end_late(struct bt_rt_core *c, uint64_t now, struct rt_seq *s);

/* ---- router_local.c ---- */

/* A decode node that can compute prompts. */
bool bt_rt_local_able(const struct rt_node *d);
/* Prompts are computed by decode nodes only. */
bool bt_rt_local_only(const struct bt_rt_core *c);
/* It computes prompts, as a prefill node or alone. */
bool bt_rt_computes(const struct bt_rt_core *c, const struct rt_node *n);
/* Whether node d should compute the prompt of s itself rather than prefill node p, of so many. */
bool bt_rt_local_better(const struct bt_rt_core *c, uint64_t now, const struct rt_seq *s,
                        const struct rt_node *d, const struct rt_node *p, uint32_t n_prefill);
/* A decode node has told of a transfer. */
void bt_rt_local_learn(struct bt_rt_core *c, const struct bt_msg_leg_stats *st);

#endif
