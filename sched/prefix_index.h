#ifndef BT_SCHED_PREFIX_INDEX_H
#define BT_SCHED_PREFIX_INDEX_H

/* Which full pages hold the KV of which tokens: the index of the prefix cache. A tree of blocks, a
 * block being as many token ids as a page has, found by the block before it and its own ids, which are
 * compared, never the hash alone; so a block stands for the same tokens from position 0 on. A block
 * has at most one page of each layer group, and lives as long as it has one, or a block behind it has.
 * The index also keeps the order in which pages without a holder may be given up, and a list of
 * what changed for those who guess from outside (sched/prefix_report.h). Numbers only; after create
 * nothing is allocated. One thread. */

#include <stdbool.h>
#include <stdint.h>
#include "base/status.h"

struct bt_prefix_index;

#define BT_PREFIX_NO_PAGE      UINT32_MAX
#define BT_PREFIX_GROUPS_MAX   4u
#define BT_PREFIX_CHILDREN_MAX 64u /* blocks that bt_prefix_index_alike looks at, the newest */

/* A place in the tree: everything up to and including one block. Stale when the block is gone: then
 * nothing is found behind it, and never another block's. */
struct bt_prefix_pos {
    uint64_t serial; /* never reused */
    uint32_t node;
};
#define BT_PREFIX_ROOT ((struct bt_prefix_pos){0, UINT32_MAX}) /* before the first block */

struct bt_prefix_index_opts {
    uint32_t page_tokens, n_groups;         /* >= 1 */
    uint32_t n_pages[BT_PREFIX_GROUPS_MAX]; /* >= 1 each */
};

/* Twice as many blocks as pages. BT_ERR_NOMEM. */
enum bt_status bt_prefix_index_create(const struct bt_prefix_index_opts *opts,
                                      struct bt_prefix_index **out) BT_NODISCARD;
void bt_prefix_index_destroy(struct bt_prefix_index *x);

/* ---- blocks ---- */

/* The block behind `before` with these [page_tokens] ids. */
bool bt_prefix_index_find(const struct bt_prefix_index *x, struct bt_prefix_pos before,
                          const uint32_t *tokens, struct bt_prefix_pos *out);
/* The block behind `before` that has pages of all groups and begins with the most of the n <
 * page_tokens ids: how many; 0: none. */
uint32_t bt_prefix_index_alike(const struct bt_prefix_index *x, struct bt_prefix_pos before,
                               const uint32_t *tokens, uint32_t n, struct bt_prefix_pos *out);
/* Its block is there; true for the root. */
bool bt_prefix_index_live(const struct bt_prefix_index *x, struct bt_prefix_pos at);
/* Finds or adds a block. hash: its name for others, 0: none (see bt_prefix_block_hash). false: `before`
 * is stale, or there are as many blocks as there may be: give up a page, try again. A new block that
 * gets neither a page nor one behind it must be dropped. */
bool bt_prefix_index_put(struct bt_prefix_index *x, struct bt_prefix_pos before,
                         const uint32_t *tokens, uint64_t hash, struct bt_prefix_pos *out);
/* Takes a block away if nothing needs it, and then the one before it. */
void bt_prefix_index_drop(struct bt_prefix_index *x, struct bt_prefix_pos at);
bool bt_prefix_index_full(const struct bt_prefix_index *x); /* no block can be added */
/* The block before one that is not stale. */
struct bt_prefix_pos bt_prefix_index_before(const struct bt_prefix_index *x,
                                            struct bt_prefix_pos at);
uint64_t bt_prefix_index_hash(const struct bt_prefix_index *x, struct bt_prefix_pos at);

/* ---- pages ---- */

/* The block's page of a group, or BT_PREFIX_NO_PAGE. */
uint32_t bt_prefix_index_page(const struct bt_prefix_index *x, struct bt_prefix_pos at,
                              uint32_t group);
/* Gives a page to a block that has none of the group. */
void bt_prefix_index_attach(struct bt_prefix_index *x, struct bt_prefix_pos at, uint32_t group,
                            uint32_t page);
/* Takes a page out. */
void bt_prefix_index_detach(struct bt_prefix_index *x, uint32_t group, uint32_t page);
bool bt_prefix_index_has(const struct bt_prefix_index *x, uint32_t group, uint32_t page);

/* A page of the index has lost its last holder, or was wanted again without one: the last to be
 * given up. */
void bt_prefix_index_idle(struct bt_prefix_index *x, uint32_t group, uint32_t page);
/* An idle page has a holder again. */
void bt_prefix_index_busy(struct bt_prefix_index *x, uint32_t group, uint32_t page);
/* The idle page to give up first, or BT_PREFIX_NO_PAGE. */
uint32_t bt_prefix_index_oldest(const struct bt_prefix_index *x, uint32_t group);

/* ---- changes ---- */

struct bt_prefix_change {
    uint64_t hash; /* of a block */
    bool added;    /* it has a page of group 0 now; else: no longer */
};
/* What happened to blocks with a hash since the last call, in order; valid until the next call of any
 * kind. At most one for each page of group 0: more are forgotten. */
const struct bt_prefix_change *bt_prefix_index_changes(struct bt_prefix_index *x, uint32_t *n);

#endif
