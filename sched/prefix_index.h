#ifndef BT_SCHED_PREFIX_INDEX_H
#define BT_SCHED_PREFIX_INDEX_H

/* Which full page of a group holds the KV of which tokens: the index of the prefix cache. A page is
 * found by the page before it and its own token ids, which are compared, never the hash alone; so a
 * hit stands for the same tokens from position 0 on. It also keeps the order in which pages without
 * a holder may be given up. Numbers only; after create nothing is allocated. One thread. */

#include <stdbool.h>
#include <stdint.h>
#include "base/status.h"

struct bt_prefix_index;

#define BT_PREFIX_NO_PAGE UINT32_MAX

/* A chain names everything up to and including one page; never reused. */
#define BT_PREFIX_ROOT UINT64_C(1) /* the chain before the first page */

/* n_pages, page_tokens >= 1. BT_ERR_NOMEM. */
enum bt_status bt_prefix_index_create(uint32_t n_pages, uint32_t page_tokens,
                                      struct bt_prefix_index **out) BT_NODISCARD;
void bt_prefix_index_destroy(struct bt_prefix_index *x);

/* The page that continues `chain` with these [page_tokens] ids, or BT_PREFIX_NO_PAGE. */
uint32_t bt_prefix_index_find(const struct bt_prefix_index *x, uint64_t chain,
                              const uint32_t *tokens);
/* Enters a page, or moves one that is in behind another chain. There must be no other page there.
 * Returns the chain that it ends. */
uint64_t bt_prefix_index_put(struct bt_prefix_index *x, uint64_t chain, const uint32_t *tokens,
                             uint32_t page);
/* The chain that a page ends; 0: it is not in the index. */
uint64_t bt_prefix_index_chain(const struct bt_prefix_index *x, uint32_t page);
/* Takes a page out. */
void bt_prefix_index_remove(struct bt_prefix_index *x, uint32_t page);

/* A page of the index has lost its last holder, or was wanted again without one: the last to be
 * given up. */
void bt_prefix_index_idle(struct bt_prefix_index *x, uint32_t page);
/* An idle page has a holder again. */
void bt_prefix_index_busy(struct bt_prefix_index *x, uint32_t page);
/* The idle page to give up first, or BT_PREFIX_NO_PAGE. */
uint32_t bt_prefix_index_oldest(const struct bt_prefix_index *x);

#endif
