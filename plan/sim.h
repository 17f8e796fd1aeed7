#ifndef BT_PLAN_SIM_H
#define BT_PLAN_SIM_H

/* A whole cluster in one process, one thread and virtual time: routers, prefill and decode nodes,
 * sessions between them, transfers, clients, faults. The decisions are the real ones (router_core,
 * prefilld_core, decoded_core, sched/batch); what surrounds them is modelled: streams keep their
 * order and may be cut; control messages and page shares are delayed, reordered, dropped with their
 * connection, duplicated; processes are killed, frozen, drained and started again. The engine is a
 * toy whose token is a hash of everything it reads from its pages, so that one mixed-up, stale or
 * freed page changes the answer; many prompts begin alike, and most nodes have a prefix cache.
 *
 * A run is a pure function of seed and profile. Checked while it runs and at its end: every request
 * is answered or refused exactly once; its tokens are those of an undisturbed run, in order, without
 * gap or repeat; the cores' actions keep the contracts of their headers; no page is written, sent or
 * read by any but its holder, nor written when others have it too; each page's holders are those in
 * whose tables it stands; whenever no request runs and the last lease of whoever vanished is over,
 * the pools are all free or cached within a second; after the faults everything settles within
 * bounded time, and new requests are served. */

#include <stdbool.h>
#include <stdint.h>
#include "base/status.h"

struct bt_sim;

enum bt_sim_profile {
    BT_SIM_CALM,       /* no faults: every request must finish */
    BT_SIM_CANCELS,    /* clients leave at any moment */
    BT_SIM_KILLS,      /* kill -9 and restart, of routers too */
    BT_SIM_CUTS,       /* sessions, connections and the network between two processes */
    BT_SIM_FREEZES,    /* stopped for shorter or longer than the lease, then continued */
    BT_SIM_TINY_POOLS, /* pages, slots and queues too small */
    BT_SIM_ROLLING,    /* one node after the other is drained and replaced: nothing may fail */
    BT_SIM_ONE_FAULT,  /* one fault, two nodes of each role: only the dead router's requests fail */
    BT_SIM_EVERYTHING, /* all of the above, and sends that are refused or lost */
    BT_SIM_RESEND, /* decode nodes that are too small, die, and lose connections; prefill nodes that do not */
    BT_SIM_PROFILES,
};
/* "calm", "cancels", …; NULL past the end. */
const char *bt_sim_profile_name(enum bt_sim_profile p);

typedef void bt_sim_line_fn(void *arg, const char *line);

struct bt_sim_opts {
    uint64_t seed;
    enum bt_sim_profile profile;
    bt_sim_line_fn *log; /* every event as it happens; NULL: none */
    void *log_arg;
};

struct bt_sim_result {
    bool failed;
    char text[512];      /* the violated rule; "" if none */
    uint64_t trace;      /* hash of all events: equal for equal runs */
    uint64_t virtual_ns; /* length of the run */
    uint64_t events;     /* handled */
    uint64_t faults;     /* injected */
    uint64_t n_requests, n_finished, n_refused, n_cancelled, n_lost; /* lost: with their router */
    uint64_t n_tokens;                                               /* delivered to clients */
    uint64_t n_attempts, n_transfers, n_preempted, n_stale;
    uint64_t n_stalled; /* landings given up after the transfer deadline */
    /* Prompts that began to be computed, and those that another attempt took over from a failed one instead. */
    uint64_t n_prompts, n_resent;
    /* Of n_prompts: computed again before a decode node had begun, though the prefill node that had begun with it lived: it
     * reached no decode node, resends failed twice, nobody came within a lease, or pages were short. */
    uint64_t n_again;
    uint64_t n_hits[2];   /* of the prefix caches, by enum bt_role */
    uint64_t n_roles;     /* changes of a node's role */
    uint64_t n_local;     /* prompts given to a decode node */
    uint64_t longest_ns;  /* of a request that finished, from its arrival */
    uint64_t settling_ns; /* from the last fault's end until all requests were over */
    uint64_t
        free_ns; /* longest time that pages were held after the last request's end and the last lease's */
};

/* BT_ERR_NOMEM. */
enum bt_status bt_sim_create(const struct bt_sim_opts *opts, struct bt_sim **out) BT_NODISCARD;
/* Runs it to its end or to the first violation, once. */
void bt_sim_run(struct bt_sim *s);
const struct bt_sim_result *bt_sim_result(const struct bt_sim *s);
/* The last n events, oldest first. Allocates nothing: usable after an assertion failed. */
void bt_sim_tail(const struct bt_sim *s, uint32_t n, bt_sim_line_fn *line, void *arg);
void bt_sim_destroy(struct bt_sim *s);

#endif
