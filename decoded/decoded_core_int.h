#ifndef BT_DECODED_DECODED_CORE_INT_H
#define BT_DECODED_DECODED_CORE_INT_H

/* Inside the decode node's core only: its state, and the calls between its files. */

#include "base/slab.h"
#include "decoded/decoded_core.h"

#define DRAINED "the node drains and its time is over"

enum job_state { JOB_WAITING, JOB_LEASING, JOB_LANDING, JOB_COMPUTING, JOB_RUNNING, JOB_ENDING };

struct dc_job {
    struct bt_job head;
    char request_id[BT_SESSION_ID_MAX + 1];
    enum job_state state;
    uint32_t router;
    uint64_t conn;       /* P's connection; 0 before `started` */
    uint64_t generation; /* of the lease; 0 before */
    uint64_t next_lease; /* id of the next job in its bucket of leases; 0: the last */
    uint32_t n_cached;   /* tokens that the prefix cache had */
    struct bt_dc_request req;
    uint32_t *tokens; /* of c->requests: memory of req.tokens, and of req.sampling.bias behind */
    bool land_open, land_closing, engine_knows;
    bool full, handed;
    bool local;  /* its prompt is computed here */
    bool resent; /* P sends again: the last token of the submit is the one that it hands off */
    struct bt_sampled first;
    uint32_t first_index;
    bool has_logprobs;
    uint64_t t_progress; /* ns: the grant, a page, the hand-off, or P said that it computes */
    uint64_t t_page;     /* a page came, of it or of one that shared its connection; 0: none yet */
    uint64_t t_started, t_granted, t_handoff, t_full, t_run; /* ns */
    uint64_t t_submit, t_compute; /* local: it came, and its first chunk began; 0: not yet */
    uint64_t batch_sum;           /* running jobs, summed over its tokens */
    uint32_t n_tokens;            /* decoded here */
    uint64_t n_shares[BT_CONTROL_GROUPS_MAX];
    uint64_t bytes, move_ns;
    struct bt_sampled out; /* token of the current output action */
};

/* A `started` without its submit. */
struct parked {
    bool used;
    struct bt_ticket ticket;
    uint64_t conn;
    uint32_t n_tokens;
    uint64_t since;
};

struct bt_dc_core {
    struct bt_dc_opts opts;
    struct bt_ticket_table jobs;
    struct bt_slab requests;
    uint64_t *
        leases; /* job ids by generation & leases_mask, for landings that outlive their ticket; 0: none */
    uint64_t leases_mask;
    struct parked *parked;
    uint32_t n_parked;
    uint64_t generation;
    uint32_t n_running;
    bool giving_back;
    struct bt_dc_actions actions;
    size_t actions_max;
    struct bt_dc_stats stats;
    char text[256];
};

/* ---- decoded_core.c ---- */

void bt_dc_begin(struct bt_dc_core *c);
struct bt_dc_action *bt_dc_act_job(struct bt_dc_core *c, enum bt_dc_action_kind kind,
                                   const struct dc_job *j);
struct bt_control *bt_dc_act_control(struct bt_dc_core *c, uint64_t conn, enum bt_control_kind kind,
                                     const struct bt_ticket *t);
void bt_dc_act_refuse(struct bt_dc_core *c, uint64_t conn, const struct bt_ticket *t,
                      enum bt_attempt_reason reason, const char *text);
/* request_id: valid as long as the list. */
void bt_dc_act_end(struct bt_dc_core *c, uint32_t router, const char *request_id,
                   const struct bt_ticket *t, enum bt_attempt_reason reason, const char *text);
void bt_dc_job_set_state(struct bt_dc_core *c, struct dc_job *j, enum job_state next);
struct dc_job *bt_dc_live_job(struct bt_dc_core *c, uint64_t id);
void bt_dc_job_remove(struct bt_dc_core *c, struct dc_job *j);
void bt_dc_job_close_landing(struct bt_dc_core *c, struct dc_job *j);
/* Ends a job in any state but ENDING. Its pages go when the landing is closed. */
void bt_dc_job_end(struct bt_dc_core *c, struct dc_job *j);
void bt_dc_act_revoke(struct bt_dc_core *c, uint64_t conn, const struct bt_ticket *t,
                      uint64_t generation, enum bt_attempt_reason reason);
/* P need not send any more: it is told, unless the news came from it. */
void bt_dc_job_revoke_at_peer(struct bt_dc_core *c, struct dc_job *j, enum bt_attempt_reason reason,
                              const char *text);
void bt_dc_job_fail(struct bt_dc_core *c, struct dc_job *j, enum bt_attempt_reason reason,
                    const char *text);
/* The same, with P told. */
void bt_dc_job_give_up(struct bt_dc_core *c, struct dc_job *j, enum bt_attempt_reason reason,
                       const char *text);

/* ---- decoded_submit.c ---- */

/* since: when `started` came. */
void bt_dc_job_lease(struct bt_dc_core *c, struct dc_job *j, uint64_t conn, uint32_t n_tokens,
                     uint64_t since, uint64_t now);
struct parked *bt_dc_parked_find(struct bt_dc_core *c, const struct bt_ticket *t);
void bt_dc_parked_drop(struct bt_dc_core *c, struct parked *p);
void bt_dc_park(struct bt_dc_core *c, const struct bt_ticket *t, uint64_t conn, uint32_t n_tokens,
                uint64_t now);

/* ---- decoded_compute.c ---- */

struct bt_msg_output *bt_dc_act_output(struct bt_dc_core *c, struct dc_job *j, uint32_t index);
struct bt_msg_leg_stats bt_dc_leg_stats(const struct dc_job *j, uint64_t now);

/* ---- decoded_landing.c ---- */

void bt_dc_lease_drop(struct bt_dc_core *c, struct dc_job *j);

#endif
