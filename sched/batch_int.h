#ifndef BT_SCHED_BATCH_INT_H
#define BT_SCHED_BATCH_INT_H

/* Shared by batch.c (sequences and their pages) and batch_plan.c (what the next step computes). */

#include "sched/batch.h"

struct bt_batch {
    struct bt_batch_opts opts;
    struct bt_pages *pages[BT_BATCH_GROUPS_MAX];
    struct bt_batch_seq *seqs; /* [max_seqs], by slot */
    uint32_t *order;           /* slots in use, oldest first */
    uint32_t n_order;
    uint32_t *free_slots; /* stack */
    uint32_t n_free_slots;
    uint32_t *planned; /* [max_seqs]: span of the slot in the current plan + 1, 0: none */

    uint64_t head_id;     /* the oldest prompt of the last plan */
    uint32_t n_overtakes; /* younger ones started while it waited for pages */

    bool in_step; /* between plan and commit */
    struct bt_batch_span *spans;
    uint32_t n_spans;
    uint32_t *started;
    uint32_t n_started;
    uint64_t *preempted;
    uint32_t n_preempted;
};

static inline uint32_t bt_batch_pages_for(const struct bt_batch *b, uint32_t n_tokens)
{
    return n_tokens / b->opts.page_tokens + (n_tokens % b->opts.page_tokens != 0);
}

void bt_batch_move(struct bt_batch_seq *s, enum bt_batch_state next);
/* Leases pages of every group up to absolute page n_pages, leaving `spare` free in each; false:
 * none leased. */
bool bt_batch_lease_to(struct bt_batch *b, struct bt_batch_seq *s, uint32_t n_pages,
                       uint32_t spare);
/* Frees the pages that positions from s->n_done on do not see. */
void bt_batch_leave_window(struct bt_batch *b, struct bt_batch_seq *s);
void bt_batch_forget(struct bt_batch *b, uint32_t slot);
/* Sequences that may need a page at any time: DECODE and READY. */
uint32_t bt_batch_n_growing(const struct bt_batch *b);

#endif
