#ifndef BT_SCHED_PAGES_H
#define BT_SCHED_PAGES_H

/* Page accounting of one layer group: who holds which page. Numbers only: the pages' memory is
 * elsewhere.
 *
 * free ⇄ leased, leased ⇄ cached, cached → free, leased → quarantined → free. A page is leased to a
 * holder; more holders of the same (full, immutable) page are counted by reference. After create
 * nothing is allocated. One thread. Calls that break these rules are bugs of the caller and abort.
 */

#include <stdbool.h>
#include <stdint.h>
#include "base/status.h"

struct bt_pages;

enum bt_page_state {
    BT_PAGE_FREE,
    BT_PAGE_CACHED, /* content kept, no holder; may be taken back at any time */
    BT_PAGE_LEASED,
    BT_PAGE_QUARANTINED, /* given up by its holder's request, but a receive may still write into it
                          */
    BT_PAGE_STATES,
};

#define BT_PAGE_SHARED UINT64_MAX /* the holder of a page that has or had several */

struct bt_page_info {
    enum bt_page_state state;
    uint32_t n_refs;
    uint64_t holder; /* 0: none */
};

/* n_pages >= 1. BT_ERR_NOMEM. */
enum bt_status bt_pages_create(uint32_t n_pages, struct bt_pages **out) BT_NODISCARD;
void bt_pages_destroy(struct bt_pages *p);

/* Leases n free pages to holder (not 0) and writes their ids to out, or leases none and returns
 * false. */
bool bt_pages_lease(struct bt_pages *p, uint64_t holder, uint32_t n, uint32_t *out) BT_NODISCARD;
/* One more reference to a leased page, or the first one to a cached page. The page is full and nobody
 * writes into it. */
void bt_pages_share(struct bt_pages *p, uint32_t page, uint64_t holder);
/* Drops holder's reference to a leased or quarantined page; the last one frees it. */
void bt_pages_release(struct bt_pages *p, uint32_t page, uint64_t holder);
/* Like release, but the last reference leaves the page cached. Leased pages only. */
void bt_pages_retire(struct bt_pages *p, uint32_t page, uint64_t holder);
/* Frees a cached page. */
void bt_pages_evict(struct bt_pages *p, uint32_t page);
/* A leased page with one reference: counted as quarantined until it is released. */
void bt_pages_quarantine(struct bt_pages *p, uint32_t page, uint64_t holder);

uint32_t bt_pages_total(const struct bt_pages *p);
uint32_t bt_pages_count(const struct bt_pages *p, enum bt_page_state state);
struct bt_page_info bt_pages_info(const struct bt_pages *p, uint32_t page);

#endif
