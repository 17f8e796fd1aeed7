/* The blocks of a node's prefix cache as routers are told of them: a hash set of what is there, and
 * a ring of the last changes with a running number. It knows neither pages nor sessions. A block that
 * moves inside the set while all are listed for someone may be left out: it is news again when it
 * changes, and until then a guess less. */

#include "sched/prefix_report.h"

#include "base/assert.h"
#include "base/mem.h"

#define CHANGES 8192u /* remembered; power of two */

struct listener {
    bool fresh;     /* nothing was told yet */
    bool listing;   /* all blocks are being told, */
    uint32_t at;    /* from this place of the set on */
    uint64_t known; /* changes told */
};

struct bt_prefix_report {
    uint64_t *set; /* [n_slots] hashes, 0: free */
    uint32_t n_slots, n_blocks, n_set;
    uint64_t changes[CHANGES]; /* hashes; whether a block is there now says the set */
    uint64_t n_changes;        /* of all time */
    struct listener *listeners;
    uint32_t n_listeners;
    uint64_t added[BT_PREFIX_NEWS_MAX], removed[BT_PREFIX_NEWS_MAX];
};

enum bt_status bt_prefix_report_create(uint32_t n_blocks, uint32_t n_listeners,
                                       struct bt_prefix_report **out)
{
    BT_ASSERT(n_blocks >= 1 && n_blocks <= UINT32_C(1) << 30 && n_listeners >= 1);
    struct bt_prefix_report *r = bt_calloc(1, sizeof *r);

    if (r == NULL) {
        return BT_ERR_NOMEM;
    }
    r->n_blocks = n_blocks;
    r->n_listeners = n_listeners;
    r->n_slots = 2;
    while (r->n_slots < 2 * n_blocks) {
        r->n_slots *= 2;
    }
    r->set = bt_calloc(r->n_slots, sizeof *r->set);
    r->listeners = bt_calloc(n_listeners, sizeof *r->listeners);
    if (r->set == NULL || r->listeners == NULL) {
        bt_prefix_report_destroy(r);
        return BT_ERR_NOMEM;
    }
    for (uint32_t i = 0; i < n_listeners; i++) {
        r->listeners[i].fresh = true;
    }
    *out = r;
    return BT_OK;
}

void bt_prefix_report_destroy(struct bt_prefix_report *r)
{
    if (r != NULL) {
        bt_free(r->set);
        bt_free(r->listeners);
        bt_free(r);
    }
}

/* ---- the set: linear probing from the hash's own place ---- */

static uint32_t home(const struct bt_prefix_report *r, uint64_t hash)
{
    return (uint32_t)hash & (r->n_slots - 1);
}

/* The place of a hash, or the free one where it would stand. */
static uint32_t place(const struct bt_prefix_report *r, uint64_t hash)
{
    uint32_t at = home(r, hash);

    while (r->set[at] != 0 && r->set[at] != hash) {
        at = (at + 1) & (r->n_slots - 1);
    }
    return at;
}

static bool set_add(struct bt_prefix_report *r, uint64_t hash)
{
    uint32_t at = place(r, hash);

    if (r->set[at] == hash || r->n_set == r->n_blocks) {
        return false;
    }
    r->set[at] = hash;
    r->n_set++;
    return true;
}

/* What stands behind the gap and would not be found across it moves into it. */
static bool set_remove(struct bt_prefix_report *r, uint64_t hash)
{
    uint32_t gap = place(r, hash), mask = r->n_slots - 1;

    if (r->set[gap] == 0) {
        return false;
    }
    r->n_set--;
    for (uint32_t at = (gap + 1) & mask; r->set[at] != 0; at = (at + 1) & mask) {
        if (((at - home(r, r->set[at])) & mask) >= ((at - gap) & mask)) {
            r->set[gap] = r->set[at];
            gap = at;
        }
    }
    r->set[gap] = 0;
    return true;
}

/* ---- in ---- */

void bt_prefix_report_change(struct bt_prefix_report *r, const struct bt_prefix_change *list,
                             size_t n)
{
    for (size_t i = 0; i < n; i++) {
        BT_ASSERT(list[i].hash != 0);
        if (list[i].added ? set_add(r, list[i].hash) : set_remove(r, list[i].hash)) {
            r->changes[r->n_changes++ % CHANGES] = list[i].hash;
        }
    }
}

void bt_prefix_report_restart(struct bt_prefix_report *r, uint32_t listener)
{
    BT_ASSERT(listener < r->n_listeners);
    r->listeners[listener] = (struct listener){.fresh = true};
}

/* ---- out ---- */

static void next_blocks(struct bt_prefix_report *r, struct listener *l, struct bt_prefix_news *out)
{
    for (; l->at < r->n_slots && out->n_added < BT_PREFIX_NEWS_MAX; l->at++) {
        if (r->set[l->at] != 0) {
            r->added[out->n_added++] = r->set[l->at];
        }
    }
    l->listing = l->at < r->n_slots;
}

static void next_changes(struct bt_prefix_report *r, struct listener *l, struct bt_prefix_news *out)
{
    while (l->known < r->n_changes && out->n_added < BT_PREFIX_NEWS_MAX &&
           out->n_removed < BT_PREFIX_NEWS_MAX) {
        uint64_t hash = r->changes[l->known++ % CHANGES];

        if (r->set[place(r, hash)] == hash) {
            r->added[out->n_added++] = hash;
        } else {
            r->removed[out->n_removed++] = hash;
        }
    }
}

void bt_prefix_report_next(struct bt_prefix_report *r, uint32_t listener,
                           struct bt_prefix_news *out)
{
    BT_ASSERT(listener < r->n_listeners);
    struct listener *l = &r->listeners[listener];

    *out = (struct bt_prefix_news){.added = r->added, .removed = r->removed};
    if (l->fresh || r->n_changes - l->known > CHANGES) {
        *l = (struct listener){.listing = true, .known = r->n_changes};
        out->reset = true;
    }
    if (l->listing) {
        next_blocks(r, l, out);
    } else {
        next_changes(r, l, out);
    }
}
