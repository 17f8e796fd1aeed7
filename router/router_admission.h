#ifndef BT_ROUTER_ROUTER_ADMISSION_H
#define BT_ROUTER_ROUTER_ADMISSION_H

/* Inside the router's core: who goes next of those that wait, and how long a newcomer would.
 *
 * A *flow* is what waits with one API key at one priority. The highest priority goes first; among
 * its flows, the key that has been given the least work; within a flow, first in first out. Work is
 * tokens: of prompts when they are sent to a node, of answers as they come. A key that was idle
 * starts level with the others, so it neither saves up turns nor owes any.
 *
 * No I/O, no clock; memory is taken at init only. */

#include <stdbool.h>
#include <stdint.h>
#include "base/status.h"

/* A prompt up to this size is *short*: prefill nodes compute it beside a long one, so a long one in
 * front of it counts for no more than this. */
#define BT_ADM_SHORT 512u

struct bt_adm_item { /* part of what waits; key and priority are set by its owner, order to 0 */
    struct bt_adm_item *prev, *next;
    uint32_t key; /* below n_keys */
    int32_t priority;
    uint32_t tokens;
    uint64_t order; /* of arrival: kept when it comes back */
    uint64_t since;
};

struct bt_adm_flow {
    int32_t priority;
    uint32_t key;
    uint32_t n;
    uint64_t tokens, tokens_short; /* short: each counted with BT_ADM_SHORT at most */
    struct bt_adm_item *first, *last;
    struct bt_adm_item *at; /* of the round: the next to look at */
};

struct bt_adm {
    struct bt_adm_flow *flows;
    uint32_t n_flows, cap_flows;
    uint64_t *served; /* [n_keys] tokens of work, in virtual time */
    uint32_t n_keys;
    uint64_t turn; /* virtual time: what the key had been served whose turn it was last */
    uint64_t n_arrived;
    uint32_t n; /* waiting */
    /* How fast the queue moves: departures of those that had to wait, in the time that any did. */
    uint32_t n_gone;
    uint64_t busy_ns, t_mark;
};

/* items_max: that may wait at once. BT_ERR_NOMEM. */
enum bt_status bt_adm_init(struct bt_adm *a, uint32_t n_keys, uint32_t items_max) BT_NODISCARD;
void bt_adm_fini(struct bt_adm *a);

/* tokens: of work until its answer begins. */
void bt_adm_add(struct bt_adm *a, struct bt_adm_item *it, uint32_t tokens, uint64_t now);
void bt_adm_remove(struct bt_adm *a, struct bt_adm_item *it);
/* Before its removal: it goes to a node. work: tokens that its key pays for. */
void bt_adm_goes(struct bt_adm *a, const struct bt_adm_item *it, uint64_t work, uint64_t now);
/* Work done for a key later. */
void bt_adm_charge(struct bt_adm *a, uint32_t key, uint64_t work);
/* Time that does not tell how fast the queue moves: there is no node. */
void bt_adm_pause(struct bt_adm *a, uint64_t now);

/* A round through the queue in the order of turns: the caller may remove what it was given, and what
 * it leaves is not given again. */
void bt_adm_rewind(struct bt_adm *a);
struct bt_adm_item *bt_adm_next(struct bt_adm *a); /* NULL: the round is over */

/* What the nodes have to do, for a prediction. */
struct bt_adm_nodes {
    double tokens_per_s; /* of all prefill nodes together */
    double tokens;       /* prompt tokens at all of them that would be computed before */
    uint64_t least_ns;   /* work before it at the node with the least */
    bool full;           /* none of them, or no decode node, takes another sequence now */
    uint64_t decode_ns;  /* until decode nodes likely have room for it and those in front of it */
};
/* How many have their turn before a newcomer. */
uint64_t bt_adm_ahead(const struct bt_adm *a, uint32_t key, int32_t priority, uint32_t tokens);
/* How long a newcomer would wait until its prompt is computed. */
uint64_t bt_adm_wait_ns(const struct bt_adm *a, uint64_t now, uint32_t key, int32_t priority,
                        uint32_t tokens, const struct bt_adm_nodes *nodes);

#endif
