/* Page accounting: a state, a holder and a reference count per page, and a stack of the free ones.
 * It knows neither memory nor sequences nor time; every change of state passes page_move(), which
 * checks it against one table. */

#include "sched/pages.h"

#include "base/assert.h"
#include "base/mem.h"

#define BIT(s) (1U << (s))

struct page {
    uint64_t holder;
    uint32_t n_refs;
    enum bt_page_state state;
};

struct bt_pages {
    uint32_t n_pages;
    uint32_t counts[BT_PAGE_STATES];
    uint32_t *free; /* stack; counts[BT_PAGE_FREE] entries */
    struct page *pages;
};

static const uint8_t legal_next[BT_PAGE_STATES] = {
    [BT_PAGE_FREE] = BIT(BT_PAGE_LEASED),
    [BT_PAGE_CACHED] = BIT(BT_PAGE_LEASED) | BIT(BT_PAGE_FREE),
    [BT_PAGE_LEASED] = BIT(BT_PAGE_FREE) | BIT(BT_PAGE_CACHED) | BIT(BT_PAGE_QUARANTINED),
    [BT_PAGE_QUARANTINED] = BIT(BT_PAGE_FREE),
};

static struct page *page_at(struct bt_pages *p, uint32_t page)
{
    BT_ASSERT(page < p->n_pages);
    return &p->pages[page];
}

static void page_move(struct bt_pages *p, uint32_t page, enum bt_page_state next)
{
    struct page *pg = page_at(p, page);

    BT_ASSERT((legal_next[pg->state] & BIT(next)) != 0);
    p->counts[pg->state]--;
    if (next == BT_PAGE_FREE) {
        p->free[p->counts[BT_PAGE_FREE]] = page;
    }
    p->counts[next]++;
    pg->state = next;
}

enum bt_status bt_pages_create(uint32_t n_pages, struct bt_pages **out)
{
    BT_ASSERT(n_pages >= 1);
    struct bt_pages *p = bt_calloc(1, sizeof(*p));

    if (p == NULL) {
        return BT_ERR_NOMEM;
    }
    p->n_pages = n_pages;
    p->free = bt_calloc(n_pages, sizeof(*p->free));
    p->pages = bt_calloc(n_pages, sizeof(*p->pages));
    if (p->free == NULL || p->pages == NULL) {
        bt_pages_destroy(p);
        return BT_ERR_NOMEM;
    }
    for (uint32_t i = 0; i < n_pages; i++) {
        p->free[i] = n_pages - 1 - i;
    }
    p->counts[BT_PAGE_FREE] = n_pages;
    *out = p;
    return BT_OK;
}

void bt_pages_destroy(struct bt_pages *p)
{
    if (p != NULL) {
        bt_free(p->free);
        bt_free(p->pages);
        bt_free(p);
    }
}

bool bt_pages_lease(struct bt_pages *p, uint64_t holder, uint32_t n, uint32_t *out)
{
    BT_ASSERT(holder != 0 && holder != BT_PAGE_SHARED);
    if (n > p->counts[BT_PAGE_FREE]) {
        return false;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t page = p->free[p->counts[BT_PAGE_FREE] - 1];

        page_move(p, page, BT_PAGE_LEASED);
        p->pages[page].holder = holder;
        p->pages[page].n_refs = 1;
        out[i] = page;
    }
    return true;
}

void bt_pages_share(struct bt_pages *p, uint32_t page, uint64_t holder)
{
    struct page *pg = page_at(p, page);

    BT_ASSERT(holder != 0 && holder != BT_PAGE_SHARED);
    if (pg->state == BT_PAGE_LEASED) {
        pg->n_refs++;
        pg->holder = BT_PAGE_SHARED;
        return;
    }
    page_move(p, page, BT_PAGE_LEASED);
    pg->n_refs = 1;
    pg->holder = holder;
}

/* Takes one reference of holder away; true if it was the last. */
static bool page_unref(struct page *pg, uint64_t holder)
{
    BT_ASSERT(pg->n_refs > 0);
    BT_ASSERT(pg->holder == holder || pg->holder == BT_PAGE_SHARED);
    if (--pg->n_refs > 0) {
        return false;
    }
    pg->holder = 0;
    return true;
}

void bt_pages_release(struct bt_pages *p, uint32_t page, uint64_t holder)
{
    if (page_unref(page_at(p, page), holder)) {
        page_move(p, page, BT_PAGE_FREE);
    }
}

void bt_pages_retire(struct bt_pages *p, uint32_t page, uint64_t holder)
{
    if (page_unref(page_at(p, page), holder)) {
        page_move(p, page, BT_PAGE_CACHED);
    }
}

void bt_pages_evict(struct bt_pages *p, uint32_t page)
{
    BT_ASSERT(page_at(p, page)->state == BT_PAGE_CACHED);
    page_move(p, page, BT_PAGE_FREE);
}

void bt_pages_quarantine(struct bt_pages *p, uint32_t page, uint64_t holder)
{
    struct page *pg = page_at(p, page);

    BT_ASSERT(pg->n_refs == 1 && pg->holder == holder);
    page_move(p, page, BT_PAGE_QUARANTINED);
}

uint32_t bt_pages_total(const struct bt_pages *p)
{
    return p->n_pages;
}

uint32_t bt_pages_count(const struct bt_pages *p, enum bt_page_state state)
{
    return p->counts[state];
}

struct bt_page_info bt_pages_info(const struct bt_pages *p, uint32_t page)
{
    BT_ASSERT(page < p->n_pages);
    const struct page *pg = &p->pages[page];

    return (struct bt_page_info){.state = pg->state, .n_refs = pg->n_refs, .holder = pg->holder};
}
