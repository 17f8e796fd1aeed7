/* The scheduler's sequences: states, ages, page tables and the leases behind them. It decides
 * nothing about what the next step computes (batch_plan.c) and knows neither tokens nor memory nor
 * time. */

#include "sched/batch_int.h"

#include <string.h>
#include "base/assert.h"
#include "base/mem.h"

#define BIT(s) (1U << (s))

static const uint16_t legal_next[BT_BATCH_STATES] = {
    [BT_BATCH_FREE] = BIT(BT_BATCH_WAITING) | BIT(BT_BATCH_LANDING),
    [BT_BATCH_WAITING] = BIT(BT_BATCH_PREFILL) | BIT(BT_BATCH_FREE),
    [BT_BATCH_PREFILL] =
        BIT(BT_BATCH_HELD) | BIT(BT_BATCH_READY) | BIT(BT_BATCH_FINISHED) | BIT(BT_BATCH_FREE),
    [BT_BATCH_HELD] = BIT(BT_BATCH_FREE),
    [BT_BATCH_LANDING] = BIT(BT_BATCH_READY) | BIT(BT_BATCH_QUARANTINED) | BIT(BT_BATCH_FREE),
    [BT_BATCH_QUARANTINED] = BIT(BT_BATCH_FREE),
    [BT_BATCH_READY] = BIT(BT_BATCH_DECODE) | BIT(BT_BATCH_FREE),
    [BT_BATCH_DECODE] = BIT(BT_BATCH_FINISHED) | BIT(BT_BATCH_FREE),
    [BT_BATCH_FINISHED] = BIT(BT_BATCH_FREE),
};

void bt_batch_move(struct bt_batch_seq *s, enum bt_batch_state next)
{
    BT_ASSERT((legal_next[s->state] & BIT(next)) != 0);
    s->state = next;
}

uint32_t bt_batch_first_visible(const struct bt_batch *b, uint32_t group, uint32_t pos)
{
    uint32_t window = b->opts.groups[group].window;

    return window == 0 || pos < window ? 0 : (pos - window + 1) / b->opts.page_tokens;
}

bool bt_batch_lease_to(struct bt_batch *b, struct bt_batch_seq *s, uint32_t n_pages, uint32_t spare)
{
    BT_ASSERT(n_pages <= s->table_len);
    for (uint32_t g = 0; g < b->opts.n_groups; g++) {
        uint32_t from = s->n_paged > s->first_page[g] ? s->n_paged : s->first_page[g];
        uint32_t n = n_pages > from ? n_pages - from : 0;

        if ((uint64_t)n + spare > (uint64_t)bt_pages_count(b->pages[g], BT_PAGE_FREE) +
                                      bt_pages_count(b->pages[g], BT_PAGE_CACHED)) {
            return false;
        }
    }
    for (uint32_t g = 0; g < b->opts.n_groups; g++) {
        uint32_t from = s->n_paged > s->first_page[g] ? s->n_paged : s->first_page[g];

        if (n_pages > from) {
            bt_batch_cache_evict(b, g, n_pages - from);
            bool leased = bt_pages_lease(b->pages[g], s->id, n_pages - from, s->pages[g] + from);

            BT_ASSERT(leased);
        }
    }
    s->n_paged = n_pages;
    return true;
}

void bt_batch_drop_page(struct bt_batch *b, struct bt_batch_seq *s, uint32_t group, uint32_t page)
{
    struct bt_pages *pages = b->pages[group];
    uint32_t id = s->pages[group][page];

    s->pages[group][page] = BT_BATCH_NO_PAGE;
    if (b->index == NULL || !bt_prefix_index_has(b->index, group, id)) {
        bt_pages_release(pages, id, s->id);
        return;
    }
    bt_pages_retire(pages, id, s->id);
    if (bt_pages_info(pages, id).state == BT_PAGE_CACHED) {
        bt_prefix_index_idle(b->index, group, id);
    }
}

/* The last first: of two cached pages the one behind goes before the one that leads to it. */
static void free_pages_below(struct bt_batch *b, struct bt_batch_seq *s, uint32_t g, uint32_t end)
{
    for (uint32_t p = end; p > s->first_page[g]; p--) {
        bt_batch_drop_page(b, s, g, p - 1);
    }
    s->first_page[g] = end;
}

void bt_batch_leave_window(struct bt_batch *b, struct bt_batch_seq *s)
{
    for (uint32_t g = 0; g < b->opts.n_groups; g++) {
        uint32_t first = bt_batch_first_visible(b, g, s->n_done);

        first = first < s->n_paged ? first : s->n_paged;
        if (first > s->first_page[g]) {
            free_pages_below(b, s, g, first);
        }
    }
}

void bt_batch_forget(struct bt_batch *b, uint32_t slot)
{
    struct bt_batch_seq *s = &b->seqs[slot];
    uint32_t at = 0;

    if (s->state != BT_BATCH_LANDING && s->state != BT_BATCH_QUARANTINED) {
        bt_batch_cache_leave(b, s);
    }
    bt_batch_move(s, BT_BATCH_FREE);
    for (uint32_t g = 0; g < b->opts.n_groups; g++) {
        if (s->n_paged > s->first_page[g]) {
            free_pages_below(b, s, g, s->n_paged);
        }
    }
    bt_slab_put(&b->tables, s->pages[0]);
    while (b->order[at] != slot) {
        at++;
        BT_ASSERT(at < b->n_order);
    }
    b->n_order--;
    memmove(&b->order[at], &b->order[at + 1], (b->n_order - at) * sizeof(*b->order));
    b->free_slots[b->n_free_slots++] = slot;
    /* The next user of the slot has another generation; generation 0 would make id 0 valid. */
    uint32_t gen = (uint32_t)(s->id >> 32) + 1;

    *s = (struct bt_batch_seq){.id = (uint64_t)(gen == 0 ? 1 : gen) << 32 | slot};
}

uint32_t bt_batch_n_growing(const struct bt_batch *b)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < b->n_order; i++) {
        enum bt_batch_state st = b->seqs[b->order[i]].state;

        n += st == BT_BATCH_DECODE || st == BT_BATCH_READY;
    }
    return n;
}

static bool opts_legal(const struct bt_batch_opts *o)
{
    if (o->page_tokens == 0 || o->chunk_tokens == 0 || o->max_batch == 0 || o->max_seqs == 0 ||
        o->tokens_max == 0 || o->prefill_rows == 0 || o->n_groups == 0 ||
        o->n_groups > BT_BATCH_GROUPS_MAX) {
        return false;
    }
    for (uint32_t g = 0; g < o->n_groups; g++) {
        if (o->groups[g].n_pages == 0) {
            return false;
        }
    }
    return true;
}

enum bt_status bt_batch_create(const struct bt_batch_opts *opts, struct bt_batch **out)
{
    BT_ASSERT(opts_legal(opts));
    struct bt_batch *b = bt_calloc(1, sizeof(*b));
    size_t n = opts->max_seqs;

    if (b == NULL) {
        return BT_ERR_NOMEM;
    }
    b->opts = *opts;
    b->seqs = bt_calloc(n, sizeof(*b->seqs));
    b->order = bt_calloc(n, sizeof(*b->order));
    b->free_slots = bt_calloc(n, sizeof(*b->free_slots));
    b->planned = bt_calloc(n, sizeof(*b->planned));
    b->spans = bt_calloc(n, sizeof(*b->spans));
    b->started = bt_calloc(n, sizeof(*b->started));
    b->preempted = bt_calloc(n, sizeof(*b->preempted));
    bool ok = b->seqs != NULL && b->order != NULL && b->free_slots != NULL && b->planned != NULL &&
              b->spans != NULL && b->started != NULL && b->preempted != NULL &&
              bt_slab_init(&b->tables, "page tables",
                           (size_t)bt_batch_pages_for(b, opts->tokens_max) * opts->n_groups *
                               sizeof(uint32_t),
                           opts->max_seqs) == BT_OK;

    for (uint32_t g = 0; ok && g < opts->n_groups; g++) {
        ok = bt_pages_create(opts->groups[g].n_pages, &b->pages[g]) == BT_OK;
    }
    if (ok && opts->prefix_cache) {
        struct bt_prefix_index_opts o = {.page_tokens = opts->page_tokens,
                                         .n_groups = opts->n_groups};

        for (uint32_t g = 0; g < opts->n_groups; g++) {
            o.n_pages[g] = opts->groups[g].n_pages;
        }
        ok = bt_prefix_index_create(&o, &b->index) == BT_OK;
    }
    if (!ok) {
        bt_batch_destroy(b);
        return BT_ERR_NOMEM;
    }
    for (uint32_t i = 0; i < opts->max_seqs; i++) {
        b->seqs[i].id = UINT64_C(1) << 32 | i;
        b->free_slots[i] = opts->max_seqs - 1 - i;
    }
    b->n_free_slots = opts->max_seqs;
    *out = b;
    return BT_OK;
}

void bt_batch_destroy(struct bt_batch *b)
{
    if (b == NULL) {
        return;
    }
    for (uint32_t i = 0; i < b->n_order; i++) {
        bt_slab_put(&b->tables, b->seqs[b->order[i]].pages[0]);
    }
    bt_slab_fini(&b->tables);
    for (uint32_t g = 0; g < BT_BATCH_GROUPS_MAX; g++) {
        bt_pages_destroy(b->pages[g]);
    }
    bt_prefix_index_destroy(b->index);
    bt_free(b->seqs);
    bt_free(b->order);
    bt_free(b->free_slots);
    bt_free(b->planned);
    bt_free(b->spans);
    bt_free(b->started);
    bt_free(b->preempted);
    bt_free(b);
}

uint32_t bt_batch_n_cached(const struct bt_batch *b, const struct bt_batch_seq *s)
{
    return s->n_shared * b->opts.page_tokens + s->n_copied;
}

const struct bt_prefix_change *bt_batch_cache_changes(struct bt_batch *b, uint32_t *n)
{
    *n = 0;
    return b->index != NULL ? bt_prefix_index_changes(b->index, n) : NULL;
}

uint32_t bt_batch_capacity(const struct bt_batch *b)
{
    uint64_t tokens = UINT32_MAX;

    for (uint32_t g = 0; g < b->opts.n_groups; g++) {
        uint64_t t = (uint64_t)b->opts.groups[g].n_pages * b->opts.page_tokens;

        tokens = t < tokens ? t : tokens;
    }
    return (uint32_t)tokens;
}

/* A slot with empty page tables, the youngest of all; its state is still FREE. */
static enum bt_status add(struct bt_batch *b, const struct bt_batch_new *n, uint32_t *slot)
{
    BT_ASSERT(!b->in_step && n->n_tokens >= 1 && n->n_tokens_max >= n->n_tokens &&
              n->n_tokens_max <= b->opts.tokens_max);
    BT_ASSERT(n->n_tokens <= bt_batch_capacity(b));
    if (b->n_free_slots == 0) {
        return BT_ERR_BUSY;
    }
    uint32_t len = bt_batch_pages_for(b, n->n_tokens_max);
    uint32_t *table = bt_slab_get(&b->tables);

    BT_ASSERT(table != NULL);                                             /* one for each slot */
    memset(table, 0xff, (size_t)len * b->opts.n_groups * sizeof(*table)); /* BT_BATCH_NO_PAGE */
    *slot = b->free_slots[--b->n_free_slots];
    struct bt_batch_seq *s = &b->seqs[*slot];

    for (uint32_t g = 0; g < b->opts.n_groups; g++) {
        s->pages[g] = table + (size_t)g * len;
    }
    s->table_len = len;
    s->n_tokens = n->n_tokens;
    s->n_tokens_max = n->n_tokens_max;
    s->tokens = n->tokens;
    s->at = BT_PREFIX_ROOT;
    b->order[b->n_order++] = *slot;
    return BT_OK;
}

enum bt_status bt_batch_submit(struct bt_batch *b, const struct bt_batch_new *n, uint32_t *slot)
{
    enum bt_status st = add(b, n, slot);

    if (st == BT_OK) {
        struct bt_batch_seq *s = &b->seqs[*slot];

        s->hold = n->hold;
        s->all_rows = n->all_rows;
        if (!s->all_rows) {
            s->n_likely = bt_batch_cache_probe(b, s, s->n_tokens - 1);
        }
        bt_batch_move(s, BT_BATCH_WAITING);
    }
    return st;
}

enum bt_status bt_batch_land(struct bt_batch *b, const struct bt_batch_new *n, uint32_t *slot)
{
    uint32_t spare = bt_batch_n_growing(b);
    enum bt_status st = add(b, n, slot);

    if (st != BT_OK) {
        return st;
    }
    struct bt_batch_seq *s = &b->seqs[*slot];

    bt_batch_move(s, BT_BATCH_LANDING);
    s->n_done = n->n_tokens;
    for (uint32_t g = 0; g < b->opts.n_groups; g++) {
        s->first_page[g] = bt_batch_first_visible(b, g, n->n_tokens);
    }
    bt_batch_cache_take(b, s, n->n_tokens);
    if (!bt_batch_lease_to(b, s, bt_batch_pages_for(b, n->n_tokens), spare)) {
        bt_batch_forget(b, *slot);
        return BT_ERR_BUSY;
    }
    return BT_OK;
}

void bt_batch_start(struct bt_batch *b, uint32_t slot)
{
    struct bt_batch_seq *s = &b->seqs[slot];

    BT_ASSERT(!b->in_step && s->state == BT_BATCH_LANDING);
    bt_batch_move(s, BT_BATCH_READY);
    bt_batch_cache_enter(b, s);
    s->n_tokens++;
}

void bt_batch_quarantine(struct bt_batch *b, uint32_t slot)
{
    struct bt_batch_seq *s = &b->seqs[slot];

    bt_batch_move(s, BT_BATCH_QUARANTINED);
    for (uint32_t g = 0; g < b->opts.n_groups; g++) {
        uint32_t first = s->first_page[g] > s->n_shared ? s->first_page[g] : s->n_shared;

        for (uint32_t p = first; p < s->n_paged; p++) { /* nothing is received into shared ones */
            bt_pages_quarantine(b->pages[g], s->pages[g][p], s->id);
        }
    }
}

void bt_batch_cancel(struct bt_batch *b, uint32_t slot)
{
    BT_ASSERT(b->seqs[slot].state != BT_BATCH_FREE);
    b->seqs[slot].cancelled = true;
}

void bt_batch_remove(struct bt_batch *b, uint32_t slot)
{
    BT_ASSERT(!b->in_step);
    bt_batch_forget(b, slot);
}

uint32_t bt_batch_find(const struct bt_batch *b, uint64_t id)
{
    uint32_t slot = (uint32_t)id;

    if (slot >= b->opts.max_seqs || b->seqs[slot].id != id ||
        b->seqs[slot].state == BT_BATCH_FREE) {
        return BT_BATCH_NO_SLOT;
    }
    return slot;
}

const struct bt_batch_seq *bt_batch_seq(const struct bt_batch *b, uint32_t slot)
{
    return &b->seqs[slot];
}

const struct bt_pages *bt_batch_pages(const struct bt_batch *b, uint32_t group)
{
    return b->pages[group];
}

struct bt_batch_load bt_batch_load(const struct bt_batch *b)
{
    struct bt_batch_load l = {.pages_short = b->pages_short};

    for (uint32_t i = 0; i < b->n_order; i++) {
        const struct bt_batch_seq *s = &b->seqs[b->order[i]];

        switch (s->state) {
        case BT_BATCH_WAITING:
            l.n_waiting++;
            l.waiting_tokens += s->n_tokens - s->n_likely;
            break;
        case BT_BATCH_PREFILL:
            l.waiting_tokens += s->n_tokens - s->n_done;
            l.n_running++;
            break;
        case BT_BATCH_READY:
        case BT_BATCH_DECODE:
            l.n_running++;
            break;
        case BT_BATCH_HELD:
        case BT_BATCH_FINISHED:
            l.n_held++;
            break;
        case BT_BATCH_LANDING:
        case BT_BATCH_QUARANTINED:
            l.n_landing++;
            break;
        case BT_BATCH_FREE:
        case BT_BATCH_STATES:
            break;
        }
    }
    return l;
}
