#ifndef BT_SCHED_BATCH_INT_H
#define BT_SCHED_BATCH_INT_H

/* Shared by batch.c (sequences and their pages), batch_cache.c (the prefix cache) and batch_plan.c
 * (what the next step computes). */

#include "base/slab.h"
#include "sched/batch.h"

_Static_assert(BT_BATCH_GROUPS_MAX <= BT_PREFIX_GROUPS_MAX, "the index knows all groups");

#define BATCH_WAITS UINT32_MAX

struct bt_batch {
    struct bt_batch_opts opts;
    struct bt_pages *pages[BT_BATCH_GROUPS_MAX];
    struct bt_batch_seq *seqs; /* [max_seqs], by slot */
    struct bt_slab tables;     /* page tables of all groups of a sequence */
    uint32_t *order;           /* slots in use, oldest first */
    uint32_t n_order;
    uint32_t *free_slots; /* stack */
    uint32_t n_free_slots;
    struct bt_prefix_index *index; /* NULL: no prefix cache */
    uint32_t *planned;             /* [max_seqs]: span of the slot in the current plan + 1, 0: none,
                          BATCH_WAITS: it has to wait for another's pages */

    uint64_t head_id;     /* the oldest prompt of the last plan */
    uint32_t n_overtakes; /* younger ones started while it waited for pages */
    bool pages_short;     /* a prompt of the last plan did not get its pages */

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
/* Leases pages of every group up to absolute page n_pages, leaving `spare` free (or cached) in each;
 * false: none leased. */
bool bt_batch_lease_to(struct bt_batch *b, struct bt_batch_seq *s, uint32_t n_pages,
                       uint32_t spare);
/* Frees the pages that positions from s->n_done on do not see. */
void bt_batch_leave_window(struct bt_batch *b, struct bt_batch_seq *s);
/* Drops the sequence's reference to a page of its table. */
void bt_batch_drop_page(struct bt_batch *b, struct bt_batch_seq *s, uint32_t group, uint32_t page);
void bt_batch_forget(struct bt_batch *b, uint32_t slot);
/* ---- batch_cache.c; without a cache these do nothing ---- */

/* How many of the first n_tokens tokens the cache has. */
uint32_t bt_batch_cache_probe(const struct bt_batch *b, const struct bt_batch_seq *s,
                              uint32_t n_tokens);
/* A prompt of the current plan computes the page that is the next one the cache does not have. */
bool bt_batch_cache_soon(const struct bt_batch *b, const struct bt_batch_seq *s);
/* Takes their pages by reference, as the sequence's first ones; it has none yet. What is to be
 * copied besides stands in the sequence. */
void bt_batch_cache_take(struct bt_batch *b, struct bt_batch_seq *s, uint32_t n_tokens);
/* Gives them back: the rest could not be leased. */
void bt_batch_cache_untake(struct bt_batch *b, struct bt_batch_seq *s);
/* Enters the full pages whose KV is stored. */
void bt_batch_cache_enter(struct bt_batch *b, struct bt_batch_seq *s);
/* The same before its pages are dropped: what it knew of the index may have changed meanwhile, and
 * pages of the same tokens count as used now. */
void bt_batch_cache_leave(struct bt_batch *b, struct bt_batch_seq *s);
/* Frees cached pages of the group until n are free. */
void bt_batch_cache_evict(struct bt_batch *b, uint32_t group, uint32_t n);

/* Sequences that may need a page at any time: DECODE and READY. */
uint32_t bt_batch_n_growing(const struct bt_batch *b);

#endif
