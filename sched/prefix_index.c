/* The index of the prefix cache: a hash table of pages by (chain, token ids), and a list of the
 * idle ones, the one idle for the longest first. It knows neither page states nor sequences; which
 * pages are full and immutable is the scheduler's business. */

#include "sched/prefix_index.h"

#include <string.h>
#include "base/assert.h"
#include "base/hash.h"
#include "base/mem.h"

#define NO_PAGE BT_PREFIX_NO_PAGE

struct entry {
    uint64_t chain;  /* that this page ends; 0: not in the index */
    uint64_t parent; /* the chain before it */
    uint32_t next;   /* in its bucket */
    bool idle;       /* in the list of idle pages: */
    uint32_t older, newer;
};

struct bt_prefix_index {
    uint32_t n_pages, page_tokens;
    struct entry *entries;   /* by page */
    uint32_t *tokens;        /* [n_pages][page_tokens] */
    uint32_t *buckets;       /* first page of each */
    uint32_t n_buckets;      /* power of two */
    uint32_t oldest, newest; /* idle pages */
    uint64_t last_chain;
};

enum bt_status bt_prefix_index_create(uint32_t n_pages, uint32_t page_tokens,
                                      struct bt_prefix_index **out)
{
    BT_ASSERT(n_pages >= 1 && page_tokens >= 1);
    struct bt_prefix_index *x = bt_calloc(1, sizeof(*x));
    size_t token_bytes = 0;

    if (x == NULL) {
        return BT_ERR_NOMEM;
    }
    *x = (struct bt_prefix_index){.n_pages = n_pages,
                                  .page_tokens = page_tokens,
                                  .n_buckets = 1,
                                  .oldest = NO_PAGE,
                                  .newest = NO_PAGE,
                                  .last_chain = BT_PREFIX_ROOT};
    while (x->n_buckets < n_pages && x->n_buckets < UINT32_C(1) << 31) {
        x->n_buckets *= 2;
    }
    x->entries = bt_calloc(n_pages, sizeof(*x->entries));
    x->buckets = bt_calloc(x->n_buckets, sizeof(*x->buckets));
    if (bt_mul_size((size_t)n_pages * sizeof(*x->tokens), page_tokens, &token_bytes)) {
        x->tokens = bt_alloc(token_bytes);
    }
    if (x->entries == NULL || x->buckets == NULL || x->tokens == NULL) {
        bt_prefix_index_destroy(x);
        return BT_ERR_NOMEM;
    }
    memset(x->buckets, 0xff, x->n_buckets * sizeof(*x->buckets)); /* NO_PAGE */
    *out = x;
    return BT_OK;
}

void bt_prefix_index_destroy(struct bt_prefix_index *x)
{
    if (x != NULL) {
        bt_free(x->entries);
        bt_free(x->tokens);
        bt_free(x->buckets);
        bt_free(x);
    }
}

static struct entry *entry_at(const struct bt_prefix_index *x, uint32_t page)
{
    BT_ASSERT(page < x->n_pages);
    return &x->entries[page];
}

static uint32_t *tokens_of(const struct bt_prefix_index *x, uint32_t page)
{
    return x->tokens + (size_t)page * x->page_tokens;
}

static uint32_t *bucket_of(const struct bt_prefix_index *x, uint64_t chain, const uint32_t *tokens)
{
    uint64_t h = bt_hash64(tokens, x->page_tokens * sizeof(*tokens), chain);

    return &x->buckets[h & (x->n_buckets - 1)];
}

uint32_t bt_prefix_index_find(const struct bt_prefix_index *x, uint64_t chain,
                              const uint32_t *tokens)
{
    for (uint32_t p = *bucket_of(x, chain, tokens); p != NO_PAGE; p = x->entries[p].next) {
        if (x->entries[p].parent == chain &&
            memcmp(tokens_of(x, p), tokens, x->page_tokens * sizeof(*tokens)) == 0) {
            return p;
        }
    }
    return NO_PAGE;
}

static void bucket_remove(struct bt_prefix_index *x, uint32_t page)
{
    struct entry *e = entry_at(x, page);
    uint32_t *at = bucket_of(x, e->parent, tokens_of(x, page));

    while (*at != page) {
        BT_ASSERT(*at != NO_PAGE);
        at = &x->entries[*at].next;
    }
    *at = e->next;
}

uint64_t bt_prefix_index_put(struct bt_prefix_index *x, uint64_t chain, const uint32_t *tokens,
                             uint32_t page)
{
    struct entry *e = entry_at(x, page);
    uint32_t *bucket = bucket_of(x, chain, tokens);

    if (e->chain != 0) {
        /* Same tokens, so what follows it stays right. */
        BT_ASSERT(memcmp(tokens_of(x, page), tokens, x->page_tokens * sizeof(*tokens)) == 0);
        bucket_remove(x, page);
    } else {
        memcpy(tokens_of(x, page), tokens, x->page_tokens * sizeof(*tokens));
        e->chain = ++x->last_chain;
    }
    e->parent = chain;
    e->next = *bucket;
    *bucket = page;
    return e->chain;
}

uint64_t bt_prefix_index_chain(const struct bt_prefix_index *x, uint32_t page)
{
    return entry_at(x, page)->chain;
}

void bt_prefix_index_busy(struct bt_prefix_index *x, uint32_t page)
{
    struct entry *e = entry_at(x, page);

    BT_ASSERT(e->idle);
    *(e->older != NO_PAGE ? &x->entries[e->older].newer : &x->oldest) = e->newer;
    *(e->newer != NO_PAGE ? &x->entries[e->newer].older : &x->newest) = e->older;
    e->idle = false;
}

void bt_prefix_index_idle(struct bt_prefix_index *x, uint32_t page)
{
    struct entry *e = entry_at(x, page);

    BT_ASSERT(e->chain != 0);
    if (e->idle) {
        bt_prefix_index_busy(x, page);
    }
    e->older = x->newest;
    e->newer = NO_PAGE;
    *(x->newest != NO_PAGE ? &x->entries[x->newest].newer : &x->oldest) = page;
    x->newest = page;
    e->idle = true;
}

void bt_prefix_index_remove(struct bt_prefix_index *x, uint32_t page)
{
    struct entry *e = entry_at(x, page);

    BT_ASSERT(e->chain != 0);
    if (e->idle) {
        bt_prefix_index_busy(x, page);
    }
    bucket_remove(x, page);
    e->chain = 0;
}

uint32_t bt_prefix_index_oldest(const struct bt_prefix_index *x)
{
    return x->oldest;
}
