#ifndef BT_SCHED_PREFIX_HASH_H
#define BT_SCHED_PREFIX_HASH_H

/* How routers and nodes name the same beginning of a prompt without sending its tokens: in blocks of
 * at least 64 tokens and whole pages, each hashed with the name of all before it. Any thread. */

#include <stdint.h>
#include "base/hash.h"

#define BT_PREFIX_BLOCK_MIN 64u

/* Tokens of a block, for pages of so many tokens (>= 1). */
static inline uint32_t bt_prefix_block_tokens(uint32_t page_tokens)
{
    return (BT_PREFIX_BLOCK_MIN + page_tokens - 1) / page_tokens * page_tokens;
}

/* The name of everything up to a block's end; before: that of everything before it, 0: nothing. Never
 * 0. tokens: [block_tokens]. */
static inline uint64_t bt_prefix_block_hash(uint64_t before, const uint32_t *tokens,
                                            uint32_t block_tokens)
{
    uint64_t h = bt_hash64(tokens, block_tokens * sizeof *tokens, before);

    return h != 0 ? h : 1;
}

#endif
