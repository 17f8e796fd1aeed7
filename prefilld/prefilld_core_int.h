#ifndef BT_PREFILLD_PREFILLD_CORE_INT_H
#define BT_PREFILLD_PREFILLD_CORE_INT_H

/* Inside the prefill node's core only: its state, and the calls between its files. */

#include "base/slab.h"
#include "prefilld/prefilld_core.h"

#define ADDRESS_MAX 256
#define DRAINED     "the node drains and its time is over"

enum job_state { JOB_QUEUED, JOB_COMPUTING, JOB_HELD, JOB_ENDING };

/* What is known of one layer of one group: shares [pushed_end, avail_end) are computed and not yet
 * pushed. */
struct layer_progress {
    uint32_t avail_end, pushed_end;
};

struct pf_job {
    struct bt_job head;
    char request_id[BT_SESSION_ID_MAX + 1];
    enum job_state state;
    uint32_t router;
    uint64_t peer_instance; /* 0: no decode leg */
    uint32_t n_tokens, n_prompt, n_cached, n_pages;
    uint64_t identity;          /* of tokens and sampling */
    uint64_t t_submit, t_start; /* ns */
    uint64_t t_peer;            /* ns: it wants its peer since then */
    uint64_t t_progress;        /* ns: token 0, the grant, or a push that ended */
    uint64_t t_alive;           /* ns: the grant, or when D was last told that it is computed */
    uint64_t post_ns, t_push_first, t_push_last, n_shares; /* of its pushes that ended */
    bool want_logprobs, prompt_logprobs;
    bool engine_knows;
    bool kept; /* its attempt is over, its decode side failed; t_kept: since then */
    uint64_t t_kept;
    bool told;                     /* its first token and statistics went out, */
    bool known;                    /* and the router has them */
    struct bt_msg_leg_stats stats; /* with has_token */
    uint32_t finish;
    bool started_sent, granted, handed, has_token, done;
    uint64_t generation;
    uint64_t conn;                              /* connection that `started` went over */
    uint32_t first_page[BT_CONTROL_GROUPS_MAX]; /* first page that D wants */
    uint32_t index;
    struct bt_sampled first;
    uint32_t pushes_open;
    struct layer_progress
        *layers;        /* [Σ n_layers]; of c->tables, with page_ids behind; NULL: no peer */
    uint32_t *page_ids; /* [n_groups][n_pages] */
};

enum peer_state { PEER_IDLE, PEER_CONNECTING, PEER_UP };

enum peer_told { TOLD_NOTHING, TOLD_REACHABLE, TOLD_UNREACHABLE };

struct pf_peer {
    uint64_t instance; /* 0: free */
    char address[ADDRESS_MAX];
    struct bt_gate_token gate_token;
    bool wanted;         /* in the routers' list */
    enum peer_told told; /* to the routers */
    enum peer_state state;
    uint64_t conn;
    uint64_t next_dial; /* time */
    uint64_t t_pushed;  /* time: a push over this connection ended */
    uint32_t failures;
};

struct bt_pf_core {
    struct bt_pf_opts opts;
    struct bt_ticket_table jobs;
    struct bt_slab tables; /* of jobs with a peer */
    struct pf_peer *peers;
    uint32_t n_layers_all;
    uint32_t layer_base[BT_CONTROL_GROUPS_MAX];
    uint32_t n_computing, n_kept;
    bool giving_back;
    struct bt_sampled out; /* token of the current output action */
    struct bt_pf_actions actions;
    size_t actions_max;
    struct bt_pf_stats stats;
    char text[256];
};

/* ---- prefilld_core.c ---- */

void bt_pf_begin(struct bt_pf_core *c);
struct bt_pf_action *bt_pf_act(struct bt_pf_core *c, enum bt_pf_action_kind kind);
struct bt_control *bt_pf_act_control(struct bt_pf_core *c, uint64_t conn, enum bt_control_kind kind,
                                     const struct bt_ticket *t);
/* request_id: valid as long as the list. */
struct bt_msg_attempt_end *bt_pf_act_end(struct bt_pf_core *c, uint32_t router,
                                         const char *request_id, const struct bt_ticket *t,
                                         enum bt_attempt_reason reason, const char *text);
void bt_pf_job_set_state(struct bt_pf_core *c, struct pf_job *j, enum job_state next);
struct pf_job *bt_pf_live_job(struct bt_pf_core *c, uint64_t id);
void bt_pf_job_finish_ending(struct bt_pf_core *c, struct pf_job *j);
void bt_pf_job_set_kept(struct bt_pf_core *c, struct pf_job *j, bool kept);
/* Ends a job in any state but ENDING; the engine forgets it once no send is in flight. */
void bt_pf_job_end(struct bt_pf_core *c, struct pf_job *j);
/* The decode node need not wait for this ticket any more. */
void bt_pf_job_forget_at_peer(struct bt_pf_core *c, struct pf_job *j);
void bt_pf_job_fail(struct bt_pf_core *c, struct pf_job *j, enum bt_attempt_reason reason,
                    const char *text);
/* Keeps a job without its decode side. false: nobody could use it. What P has told of the prompt's log-probabilities
 * cannot be told again, so they must all have been. */
bool bt_pf_job_keep(struct bt_pf_core *c, struct pf_job *j, uint64_t now);
/* Only the decode side of its attempt failed. */
void bt_pf_job_lose_peer(struct bt_pf_core *c, struct pf_job *j, uint64_t now,
                         enum bt_attempt_reason reason, const char *text);
/* Gives up the job that is kept for the longest, for others; with_pages: one that holds some. false: there is none. */
bool bt_pf_kept_evict(struct bt_pf_core *c, bool with_pages);

/* ---- prefilld_peers.c ---- */

struct pf_peer *bt_pf_peer_by_instance(struct bt_pf_core *c, uint64_t instance);
/* NULL: that connection is over. */
struct pf_peer *bt_pf_peer_by_conn(struct bt_pf_core *c, uint64_t conn);
void bt_pf_peer_dial(struct bt_pf_core *c, struct pf_peer *p);
void bt_pf_send_started(struct bt_pf_core *c, struct pf_job *j, const struct pf_peer *p);
/* The peer that a submit names, dialled if it has to be. NULL: too many. */
struct pf_peer *bt_pf_peer_of_submit(struct bt_pf_core *c, uint64_t now,
                                     const struct bt_msg_submit *s);

/* ---- prefilld_compute.c ---- */

/* Its first token to the router, and on to D: once for each attempt. The statistics go out until the router has them. */
void bt_pf_job_deliver(struct bt_pf_core *c, struct pf_job *j);

/* ---- prefilld_send.c ---- */

void bt_pf_push_layer(struct bt_pf_core *c, struct pf_job *j, uint32_t group, uint32_t layer);
/* Shares that D must count: every wanted page of every layer. */
void bt_pf_send_handoff(struct bt_pf_core *c, struct pf_job *j);

#endif
