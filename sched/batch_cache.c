/* The scheduler's prefix cache: full pages enter the index, prompts take them by reference, pages
 * without a holder are given up when room is needed. The index knows token ids, pages.c who holds a
 * page; this file keeps the two in step: a page is idle in the index exactly while it is cached. */

#include "sched/batch_int.h"

#include <stddef.h>
#include <string.h>
#include "base/assert.h"
#include "sched/prefix_hash.h"

#define ALIKE_PART 4u /* a page is copied for at least this part of it, or all that is wanted */

static bool takes_part(const struct bt_batch *b, const struct bt_batch_seq *s)
{
    return b->index != NULL && s->tokens != NULL;
}

static const uint32_t *block(const struct bt_batch *b, const struct bt_batch_seq *s, uint32_t i)
{
    return s->tokens + (size_t)i * b->opts.page_tokens;
}

/* ---- what there is ---- */

/* What the cache has of a sequence. */
struct hit {
    uint32_t n_pages; /* whole pages, taken by reference */
    struct bt_prefix_pos at;
    uint32_t n_alike; /* tokens behind them that a page begins with: to be copied */
    struct bt_prefix_pos alike;
};

/* The first page of a group that the sequence needs when so many pages are taken. */
static uint32_t first_needed(const struct bt_batch *b, const struct bt_batch_seq *s, uint32_t group,
                             uint32_t n_pages)
{
    uint32_t tokens = s->state == BT_BATCH_LANDING ? s->n_tokens : n_pages * b->opts.page_tokens;
    uint32_t first = bt_batch_first_visible(b, group, tokens);

    return first < n_pages ? first : n_pages;
}

/* The most pages of the first n_tokens tokens such that each group has those that will be seen. */
static void find_pages(const struct bt_batch *b, const struct bt_batch_seq *s, uint32_t n_tokens,
                       struct hit *out)
{
    uint32_t run[BT_BATCH_GROUPS_MAX] = {0}; /* pages of the group, up to here without a gap */
    struct bt_prefix_pos at = BT_PREFIX_ROOT;

    *out = (struct hit){.at = at};
    for (uint32_t n = 0; n < n_tokens / b->opts.page_tokens;) {
        if (!bt_prefix_index_find(b->index, at, block(b, s, n), &at)) {
            break;
        }
        bool all = true;

        n++;
        for (uint32_t g = 0; g < b->opts.n_groups; g++) {
            run[g] = bt_prefix_index_page(b->index, at, g) != BT_PREFIX_NO_PAGE ? run[g] + 1 : 0;
            all = all && run[g] >= n - first_needed(b, s, g, n);
        }
        if (all) {
            out->n_pages = n;
            out->at = at;
        }
    }
}

static void find_hit(const struct bt_batch *b, const struct bt_batch_seq *s, uint32_t n_tokens,
                     struct hit *out)
{
    find_pages(b, s, n_tokens, out);
    uint32_t left = n_tokens - out->n_pages * b->opts.page_tokens;
    uint32_t n = left < b->opts.page_tokens - 1 ? left : b->opts.page_tokens - 1;

    if (n > 0) {
        out->n_alike =
            bt_prefix_index_alike(b->index, out->at, block(b, s, out->n_pages), n, &out->alike);
    }
    /* Not for the one token that all prompts begin with; and another node sends whole pages: a part
     * of one is of no use there. */
    uint32_t least = s->state == BT_BATCH_LANDING ? left : b->opts.page_tokens / ALIKE_PART;

    if (out->n_alike < left && out->n_alike < least) {
        out->n_alike = 0;
    }
}

uint32_t bt_batch_cache_probe(const struct bt_batch *b, const struct bt_batch_seq *s,
                              uint32_t n_tokens)
{
    struct hit h;

    if (!takes_part(b, s)) {
        return 0;
    }
    find_hit(b, s, n_tokens, &h);
    return h.n_pages * b->opts.page_tokens + h.n_alike;
}

bool bt_batch_cache_soon(const struct bt_batch *b, const struct bt_batch_seq *s)
{
    uint32_t size = b->opts.page_tokens;
    struct hit h;

    if (!takes_part(b, s) || s->all_rows) {
        return false;
    }
    find_pages(b, s, s->n_tokens - 1, &h);
    uint32_t end = (h.n_pages + 1) * size;

    for (uint32_t i = 0; i < b->n_spans && end <= s->n_tokens; i++) {
        const struct bt_batch_seq *o = &b->seqs[b->spans[i].slot];

        if (o->state == BT_BATCH_PREFILL && takes_part(b, o) && o->n_tokens >= end &&
            o->n_done < end &&
            memcmp(block(b, o, h.n_pages), block(b, s, h.n_pages), size * sizeof(*s->tokens)) ==
                0 &&
            memcmp(o->tokens, s->tokens, (size_t)h.n_pages * size * sizeof(*s->tokens)) == 0) {
            return true;
        }
    }
    return false;
}

/* ---- taking ---- */

static void take_page(struct bt_batch *b, struct bt_batch_seq *s, uint32_t group, uint32_t at,
                      uint32_t page)
{
    if (bt_pages_info(b->pages[group], page).state == BT_PAGE_CACHED) {
        bt_prefix_index_busy(b->index, group, page);
    }
    bt_pages_share(b->pages[group], page, s->id);
    s->pages[group][at] = page;
}

void bt_batch_cache_take(struct bt_batch *b, struct bt_batch_seq *s, uint32_t n_tokens)
{
    struct hit h;

    if (!takes_part(b, s)) {
        return;
    }
    BT_ASSERT(s->n_paged == 0 && s->n_entered == 0);
    find_hit(b, s, n_tokens, &h);
    s->at = h.at;
    s->hash = 0;
    for (uint32_t g = 0; g < b->opts.n_groups; g++) {
        uint32_t first = first_needed(b, s, g, h.n_pages);

        s->first_page[g] = s->first_page[g] > first ? s->first_page[g] : first;
        s->copy_from[g] =
            h.n_alike > 0 ? bt_prefix_index_page(b->index, h.alike, g) : BT_BATCH_NO_PAGE;
    }
    struct bt_prefix_pos at = h.at;

    for (uint32_t n = h.n_pages; n > 0; n--, at = bt_prefix_index_before(b->index, at)) {
        for (uint32_t g = 0; g < b->opts.n_groups; g++) {
            if (n > s->first_page[g]) {
                take_page(b, s, g, n - 1, bt_prefix_index_page(b->index, at, g));
            }
        }
        s->hash = s->hash == 0 ? bt_prefix_index_hash(b->index, at) : s->hash;
    }
    s->n_copied = h.n_alike;
    s->n_paged = s->n_shared = s->n_entered = h.n_pages;
}

void bt_batch_cache_untake(struct bt_batch *b, struct bt_batch_seq *s)
{
    for (uint32_t g = 0; g < b->opts.n_groups; g++) {
        for (uint32_t p = s->n_paged; p > s->first_page[g]; p--) {
            bt_batch_drop_page(b, s, g, p - 1);
        }
        s->first_page[g] = 0;
    }
    s->n_paged = s->n_shared = s->n_entered = s->n_copied = 0;
    s->at = BT_PREFIX_ROOT;
    s->hash = 0;
}

/* ---- entering ---- */

static void evict_page(struct bt_batch *b, uint32_t group, uint32_t page)
{
    bt_prefix_index_detach(b->index, group, page);
    bt_pages_evict(b->pages[group], page);
}

/* There is room for one more block: pages that nobody holds are given up for it. */
static void make_room(struct bt_batch *b)
{
    for (uint32_t g = 0; g < b->opts.n_groups && bt_prefix_index_full(b->index);) {
        uint32_t page = bt_prefix_index_oldest(b->index, g);

        if (page != BT_PREFIX_NO_PAGE) {
            evict_page(b, g, page);
        } else {
            g++;
        }
    }
}

/* The name of the blocks up to page i's end, if a block ends there. */
static uint64_t hash_at(const struct bt_batch *b, const struct bt_batch_seq *s, uint32_t i)
{
    uint32_t n = bt_prefix_block_tokens(b->opts.page_tokens);
    uint64_t end = ((uint64_t)i + 1) * b->opts.page_tokens;

    return end % n == 0 ? bt_prefix_block_hash(s->hash, s->tokens + (end - n), n) : 0;
}

void bt_batch_cache_enter(struct bt_batch *b, struct bt_batch_seq *s)
{
    if (!takes_part(b, s) || s->n_entered >= s->n_done / b->opts.page_tokens) {
        return;
    }
    for (; s->n_entered < s->n_done / b->opts.page_tokens; s->n_entered++) {
        uint64_t hash = hash_at(b, s, s->n_entered);
        struct bt_prefix_pos at;

        make_room(b);
        if (!bt_prefix_index_put(b->index, s->at, block(b, s, s->n_entered), hash, &at)) {
            break; /* others' pages stood before it, and are gone: see leave */
        }
        s->at = at;
        s->hash = hash != 0 ? hash : s->hash;
        for (uint32_t g = 0; g < b->opts.n_groups; g++) {
            uint32_t own = s->pages[g][s->n_entered];

            if (own != BT_BATCH_NO_PAGE &&
                bt_prefix_index_page(b->index, at, g) == BT_PREFIX_NO_PAGE) {
                bt_prefix_index_attach(b->index, at, g, own);
            }
        }
    }
    bt_prefix_index_drop(b->index, s->at); /* if nothing is there or behind it */
}

/* Pages of others with the same tokens lead to this one's: they must not go before them. */
static void renew(struct bt_batch *b, const struct bt_batch_seq *s, struct bt_prefix_pos at)
{
    for (uint32_t n = s->n_entered; n > 0; n--, at = bt_prefix_index_before(b->index, at)) {
        for (uint32_t g = 0; g < b->opts.n_groups; g++) {
            uint32_t page = bt_prefix_index_page(b->index, at, g);

            if (n > s->first_page[g] && page != BT_PREFIX_NO_PAGE &&
                bt_pages_info(b->pages[g], page).state == BT_PAGE_CACHED) {
                bt_prefix_index_idle(b->index, g, page);
            }
        }
    }
}

void bt_batch_cache_leave(struct bt_batch *b, struct bt_batch_seq *s)
{
    if (!takes_part(b, s)) {
        return;
    }
    s->n_entered = 0;
    s->at = BT_PREFIX_ROOT;
    s->hash = 0;
    bt_batch_cache_enter(b, s);
    if (bt_prefix_index_live(b->index, s->at)) {
        renew(b, s, s->at);
    }
}

void bt_batch_cache_evict(struct bt_batch *b, uint32_t group, uint32_t n)
{
    while (b->index != NULL && bt_pages_count(b->pages[group], BT_PAGE_FREE) < n) {
        uint32_t page = bt_prefix_index_oldest(b->index, group);

        BT_ASSERT(page != BT_PREFIX_NO_PAGE);
        evict_page(b, group, page);
    }
}
