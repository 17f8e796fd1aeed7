#ifndef BT_SCHED_PREFIX_REPORT_H
#define BT_SCHED_PREFIX_REPORT_H

/* What a node tells its routers of its prefix cache: which blocks of tokens came and went
 * (sched/prefix_hash.h names them). It keeps the blocks that are there and the last changes; each
 * listener gets the changes since it was told last, or, when it is new or those are forgotten, all
 * anew. So much memory as blocks and changes, given at create; a pure state machine, one thread. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"
#include "sched/prefix_index.h"

#define BT_PREFIX_NEWS_MAX 2048u /* blocks told at once */

struct bt_prefix_report;

struct bt_prefix_news {
    bool reset; /* forget what was told before */
    size_t n_added, n_removed;
    const uint64_t *added, *removed; /* valid until the next call */
};

/* n_blocks, n_listeners >= 1. More blocks than n_blocks are not kept. BT_ERR_NOMEM. */
enum bt_status bt_prefix_report_create(uint32_t n_blocks, uint32_t n_listeners,
                                       struct bt_prefix_report **out) BT_NODISCARD;
void bt_prefix_report_destroy(struct bt_prefix_report *r);
void bt_prefix_report_change(struct bt_prefix_report *r, const struct bt_prefix_change *list,
                             size_t n);
/* A listener knows nothing yet, or no longer. So it is with all after create. */
void bt_prefix_report_restart(struct bt_prefix_report *r, uint32_t listener);
/* What it has to be told next: little enough for one message. Nothing new: all empty. */
void bt_prefix_report_next(struct bt_prefix_report *r, uint32_t listener,
                           struct bt_prefix_news *out);

#endif
