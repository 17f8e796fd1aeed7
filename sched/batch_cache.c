/* The scheduler's prefix cache: full pages enter the index, prompts take them by reference, pages
 * without a holder are given up when room is needed. The index knows token ids, pages.c who holds a
 * page; this file keeps the two in step: a page is idle in the index exactly while it is cached. */

#include "sched/batch_int.h"

#include <stddef.h>
#include "base/assert.h"

uint32_t bt_batch_cache_probe(const struct bt_batch *b, const struct bt_batch_seq *s,
                              uint32_t n_tokens)
{
    uint32_t n = 0;
    uint64_t chain = BT_PREFIX_ROOT;

    if (b->index == NULL || s->tokens == NULL) {
        return 0;
    }
    for (; n < n_tokens / b->opts.page_tokens; n++) {
        uint32_t page =
            bt_prefix_index_find(b->index, chain, s->tokens + (size_t)n * b->opts.page_tokens);

        if (page == BT_PREFIX_NO_PAGE) {
            break;
        }
        chain = bt_prefix_index_chain(b->index, page);
    }
    return n;
}

void bt_batch_cache_take(struct bt_batch *b, struct bt_batch_seq *s, uint32_t n_tokens)
{
    if (b->index == NULL || s->tokens == NULL) {
        return;
    }
    BT_ASSERT(s->n_paged == 0 && s->n_entered == 0);
    for (; s->n_paged < n_tokens / b->opts.page_tokens; s->n_paged++) {
        uint32_t page = bt_prefix_index_find(b->index, s->chain,
                                             s->tokens + (size_t)s->n_paged * b->opts.page_tokens);

        if (page == BT_PREFIX_NO_PAGE) {
            break;
        }
        if (bt_pages_info(b->pages[0], page).state == BT_PAGE_CACHED) {
            bt_prefix_index_busy(b->index, page);
        }
        bt_pages_share(b->pages[0], page, s->id);
        s->pages[0][s->n_paged] = page;
        s->chain = bt_prefix_index_chain(b->index, page);
    }
    s->n_shared = s->n_entered = s->n_paged;
}

void bt_batch_cache_untake(struct bt_batch *b, struct bt_batch_seq *s)
{
    while (s->n_paged > 0) {
        bt_batch_drop_page(b, s, 0, --s->n_paged);
    }
    s->n_shared = s->n_entered = 0;
    s->chain = BT_PREFIX_ROOT;
}

void bt_batch_cache_enter(struct bt_batch *b, struct bt_batch_seq *s)
{
    if (b->index == NULL || s->tokens == NULL) {
        return;
    }
    for (; s->n_entered < s->n_done / b->opts.page_tokens; s->n_entered++) {
        const uint32_t *tokens = s->tokens + (size_t)s->n_entered * b->opts.page_tokens;
        uint32_t own = s->pages[0][s->n_entered];
        uint32_t page = bt_prefix_index_find(b->index, s->chain, tokens);

        if (page == BT_PREFIX_NO_PAGE) {
            page = own;
            s->chain = bt_prefix_index_put(b->index, s->chain, tokens, own);
        } else {
            s->chain = bt_prefix_index_chain(b->index, page);
        }
        b->walk[s->n_entered] = page;
    }
}

void bt_batch_cache_leave(struct bt_batch *b, struct bt_batch_seq *s)
{
    if (b->index == NULL || s->tokens == NULL) {
        return;
    }
    s->n_entered = 0;
    s->chain = BT_PREFIX_ROOT;
    bt_batch_cache_enter(b, s);
    /* Pages of others with the same tokens lead to this one's: they must not go before them. */
    for (uint32_t p = s->n_entered; p > 0; p--) {
        if (bt_pages_info(b->pages[0], b->walk[p - 1]).state == BT_PAGE_CACHED) {
            bt_prefix_index_idle(b->index, b->walk[p - 1]);
        }
    }
}

void bt_batch_cache_evict(struct bt_batch *b, uint32_t group, uint32_t n)
{
    while (b->index != NULL && bt_pages_count(b->pages[group], BT_PAGE_FREE) < n) {
        uint32_t page = bt_prefix_index_oldest(b->index);

        BT_ASSERT(page != BT_PREFIX_NO_PAGE);
        bt_prefix_index_remove(b->index, page);
        bt_pages_evict(b->pages[group], page);
    }
}
