/* The accounts of a node's pages, counted again from the page tables of its sequences: a page is held
 * by exactly those in whose tables it stands, and is free or cached without any. */

#include "plan/sim_int.h"

#include "base/assert.h"
#include "base/mem.h"

/* References of live sequences to each page of a group. */
static void count_refs(const struct bt_sim *s, const struct sim_node *n, uint32_t group,
                       uint32_t *refs)
{
    for (uint32_t slot = 0; slot < n->max_jobs; slot++) {
        const struct bt_batch_seq *b = bt_batch_seq(n->engine.batch, slot);

        for (uint32_t p = b->first_page[group]; b->state != BT_BATCH_FREE && p < b->n_paged; p++) {
            BT_ASSERT(b->pages[group][p] < s->cfg.n_pages[n->home]);
            refs[b->pages[group][p]]++;
        }
    }
}

void sim_audit(struct bt_sim *s, const struct sim_node *n)
{
    uint32_t *refs = sim_alloc(n->engine.n_pages * sizeof *refs);

    for (uint32_t g = 0; g < s->cfg.n_groups; g++) {
        const struct bt_pages *pages = bt_batch_pages(n->engine.batch, g);

        memset(refs, 0, n->engine.n_pages * sizeof *refs);
        count_refs(s, n, g, refs);
        for (uint32_t p = 0; p < n->engine.n_pages; p++) {
            struct bt_page_info i = bt_pages_info(pages, p);
            bool held = i.state == BT_PAGE_LEASED || i.state == BT_PAGE_QUARANTINED;

            if (i.n_refs != refs[p] || held != (refs[p] > 0)) {
                sim_fail(s, "%s: page %u of group %u is in state %u with %u holders, not %u",
                         s->procs[n->proc].name, p, g, i.state, i.n_refs, refs[p]);
            }
        }
    }
    bt_free(refs);
}
