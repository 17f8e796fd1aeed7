#ifndef BT_DECODED_DECODED_CORE_H
#define BT_DECODED_DECODED_CORE_H

/* The decisions of a decode node (PROTOCOL: Submit, Pages): events in, actions out, time as an
 * argument. No I/O, no clock, no thread; no heap after create: the tokens of max_jobs jobs and the largest possible list
 * of actions are reserved there. The daemon and the simulation run the same code.
 *
 * Life of a job (one ticket):
 *   WAITING -- started from P --> LEASING -- pages leased --> LANDING
 *           -- full and handed off --> RUNNING -- finish --> ENDING --> gone
 * LANDING has a grant at P and an open landing in the transfer room. ENDING waits until the landing
 * is closed (no receive into its pages is in flight: quarantine), then releases the pages. Any
 * state may end early. A `started` that comes before its submit is parked.
 *
 * A submit without a peer is computed here, prompt and all (local prefill):
 *   WAITING -- at once --> COMPUTING -- first token --> RUNNING -- finish --> ENDING --> gone
 * No pages travel, and no other node hears of it. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/sampling.h"
#include "base/status.h"
#include "proto/session.h"
#include "proto/ticket_table.h"
#include "proto/transfer.h"

struct bt_dc_opts {
    uint32_t max_jobs;
    uint32_t first_slot; /* of job ids: those of both legs of a node must differ */
    uint32_t parked_max;
    uint32_t context; /* tokens of the longest sequence; a submit of more is refused as invalid */
    uint32_t n_groups;
    uint32_t n_layers[BT_CONTROL_GROUPS_MAX];
    uint64_t park_ns; /* a `started` waits so long for its submit */
    uint64_t
        transfer_ns; /* a landing is given up when for so long no page came and P did not say that
                             it computes; so is a prompt that is to be computed here and does not
                             start */
};

enum bt_dc_action_kind {
    BT_DC_ENGINE_LAND,       /* job, submit tokens kept by the core: request */
    BT_DC_ENGINE_SUBMIT,     /* job, request: computed here, and decoded on without a pause */
    BT_DC_ENGINE_BEGIN,      /* job, token */
    BT_DC_ENGINE_QUARANTINE, /* job */
    BT_DC_ENGINE_CANCEL,     /* job */
    BT_DC_ENGINE_RELEASE,    /* job */
    BT_DC_LAND_OPEN,         /* job, ticket, generation, peer, pages */
    BT_DC_LAND_EXPECT,       /* ticket, generation, n_shares */
    BT_DC_LAND_CLOSE,        /* ticket, generation; answered by on_land_closed, once */
    BT_DC_CONTROL,           /* peer, control */
    BT_DC_OUTPUT,            /* router, output */
    BT_DC_ATTEMPT_END,       /* router, end */
};

/* What the engine needs to land or compute a sequence; owned by the core until the job is over. */
struct bt_dc_request {
    uint32_t n_tokens, n_prompt;
    bool prompt_logprobs; /* only of one that is computed here */
    const uint32_t *tokens;
    struct bt_sampling sampling;
};

/* Pointers are valid until the core is called again. */
struct bt_dc_action {
    enum bt_dc_action_kind kind;
    uint32_t router;
    const char *request_id; /* ATTEMPT_END: for the log */
    uint64_t job, peer, generation;
    struct bt_ticket ticket;
    uint32_t token;
    union {
        const struct bt_dc_request *request;
        struct {
            uint32_t n_pages;
            const uint32_t *first_page;      /* [n_groups] */
            const uint32_t *const *page_ids; /* [n_groups][n_pages] */
        } pages;
        const uint64_t *n_shares; /* [BT_CONTROL_GROUPS_MAX] */
        struct bt_control control;
        struct bt_msg_output output;
        struct bt_msg_attempt_end end;
    };
};

struct bt_dc_actions {
    struct bt_dc_action *items;
    size_t n;
};

struct bt_dc_stats {
    uint64_t stale; /* messages dropped: ticket, generation or connection did not match */
    uint64_t transferred_tokens, transferred_bytes, transfers, failures;
    uint64_t stalled;       /* of failures: landings given up after transfer_ns */
    uint64_t cached_tokens; /* not sent or computed, because the prefix cache had them */
    uint64_t local_prefills, local_prefill_tokens; /* prompts computed here, and their tokens */
};

struct bt_dc_core;

enum bt_status bt_dc_core_create(const struct bt_dc_opts *opts,
                                 struct bt_dc_core **out) BT_NODISCARD;
void bt_dc_core_destroy(struct bt_dc_core *c);
/* What the last call decided, in order; valid until the next call. Each call below begins with an
 * empty list. */
const struct bt_dc_actions *bt_dc_core_actions(const struct bt_dc_core *c);
const struct bt_dc_stats *bt_dc_core_stats(const struct bt_dc_core *c);
uint32_t bt_dc_core_jobs(const struct bt_dc_core *c);

/* From routers. */
void bt_dc_on_submit(struct bt_dc_core *c, uint64_t now, uint32_t router,
                     const struct bt_msg_submit *s);
void bt_dc_on_cancel(struct bt_dc_core *c, uint64_t now, uint32_t router,
                     const struct bt_ticket *t);
void bt_dc_on_router_lost(struct bt_dc_core *c, uint64_t now, uint32_t router);

/* From the engine. */
void bt_dc_on_engine_failed(struct bt_dc_core *c, uint64_t now, uint64_t job, enum bt_status st,
                            const char *text);
/* Pages before first_page are not wanted: outside the group's window, or here from the prefix cache.
 * n_cached: tokens that are; n_pages: of all tokens. */
void bt_dc_on_engine_landed(struct bt_dc_core *c, uint64_t now, uint64_t job, uint32_t n_cached,
                            uint32_t n_pages, const uint32_t *first_page,
                            const uint32_t *const *page_ids);
/* Of a job that is computed here: its first chunk begins; the prefix cache had n_cached tokens. */
void bt_dc_on_engine_started(struct bt_dc_core *c, uint64_t now, uint64_t job, uint32_t n_cached);
void bt_dc_on_engine_prompt_logprobs(struct bt_dc_core *c, uint64_t now, uint64_t job,
                                     uint32_t first, const struct bt_sampled *list, size_t n);
void bt_dc_on_engine_token(struct bt_dc_core *c, uint64_t now, uint64_t job, uint32_t index,
                           const struct bt_sampled *s, uint32_t finish);
void bt_dc_on_engine_preempted(struct bt_dc_core *c, uint64_t now, uint64_t job);

/* The transfer room did not take the LAND_OPEN of this job; no on_land_closed follows for it. */
void bt_dc_on_land_refused(struct bt_dc_core *c, uint64_t now, uint64_t job, const char *text);

/* From the transfer room. conn: its id of a connection. */
void bt_dc_on_peer_down(struct bt_dc_core *c, uint64_t now, uint64_t conn, const char *why);
void bt_dc_on_control(struct bt_dc_core *c, uint64_t now, uint64_t conn,
                      const struct bt_control *m);
void bt_dc_on_landed(struct bt_dc_core *c, uint64_t now, const struct bt_ticket *t,
                     uint64_t generation);
/* move_ns: first to last arrival. */
void bt_dc_on_land_full(struct bt_dc_core *c, uint64_t now, const struct bt_ticket *t,
                        uint64_t generation, enum bt_status st, uint64_t bytes, uint64_t move_ns);
void bt_dc_on_land_closed(struct bt_dc_core *c, uint64_t now, const struct bt_ticket *t,
                          uint64_t generation);

/* The time to drain is over: every attempt goes back to its router as BT_ATTEMPT_DRAINING, at once, and
 * so does each that still comes. Jobs may stay until their landings are closed. */
void bt_dc_on_give_back(struct bt_dc_core *c, uint64_t now);
/* From now on it takes work again, as before give_back. */
void bt_dc_on_resume(struct bt_dc_core *c);

/* At least every 100 ms: deadlines. */
void bt_dc_on_tick(struct bt_dc_core *c, uint64_t now);

#endif
