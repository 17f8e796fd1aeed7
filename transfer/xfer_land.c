/* The receiving side of pages. Owns the open landings: which memory a ticket may fill, what has arrived, and the
 * promise that LAND_CLOSED comes only when no receive into it is in flight. A share that does not match one of
 * them in every field is dropped and counted. Refuses to know what a page holds, and never allocates pages. */

#include "transfer/xfer_int.h"
#include <string.h>
#include "base/assert.h"
#include "base/mem.h"

static enum bt_status group_init(struct xfer_land_group *g, const struct bt_xfer_land_group *d)
{
    size_t bits, bytes, span;
    if (d->page_layer_bytes == 0 || d->page_layer_bytes > BT_XFER_SHARE_MAX ||
        d->n_pages > BT_XFER_PAGES_MAX || d->n_layers == 0 || d->n_layers > 4096 ||
        d->first_page > UINT32_MAX - BT_XFER_PAGES_MAX ||
        (d->n_pages > 0 && (d->base == NULL || d->page_ids == NULL)) ||
        !bt_mul_size(d->n_layers, d->layer_stride, &span) ||
        !bt_mul_size(d->n_layers, d->n_pages, &bits)) {
        return BT_ERR_INVALID;
    }
    g->d = *d;
    g->d.page_ids = NULL;
    bytes = (bits + 63) / 64 * sizeof(uint64_t);
    /* at least as much as bt_spent wants */
    uint32_t *ids = bt_alloc((d->n_pages + 2) * sizeof(*ids));
    g->seen = bt_calloc(1, bytes + sizeof(uint64_t));
    if (ids == NULL || g->seen == NULL) {
        bt_free(ids);
        return BT_ERR_NOMEM;
    }
    if (d->n_pages > 0) {
        memcpy(ids, d->page_ids, d->n_pages * sizeof(*ids));
    }
    g->d.page_ids = ids;
    return BT_OK;
}

enum bt_status xfer_landing_make(struct bt_xfer *x, const struct bt_xfer_landing *d,
                                 struct xfer_landing **out)
{
    if (d->n_groups > BT_XFER_GROUPS_MAX) {
        return BT_ERR_INVALID;
    }
    struct xfer_landing *l = bt_calloc(1, sizeof(*l));
    if (l == NULL) {
        return BT_ERR_NOMEM;
    }
    memcpy(l->ticket, d->ticket, sizeof(l->ticket));
    l->generation = d->generation;
    l->peer = d->peer;
    l->n_groups = d->n_groups;
    l->landed = bt_calloc(1, sizeof(*l->landed));
    l->full_ev = bt_calloc(1, sizeof(*l->full_ev));
    l->closed = bt_calloc(1, sizeof(*l->closed));
    enum bt_status st =
        l->landed == NULL || l->full_ev == NULL || l->closed == NULL ? BT_ERR_NOMEM : BT_OK;
    for (uint32_t i = 0; st == BT_OK && i < d->n_groups; i++) {
        st = group_init(&l->group[i], &d->group[i]);
    }
    if (st != BT_OK) {
        xfer_landing_free(x, l);
        return st;
    }
    l->landed->keep = true;
    *out = l;
    return BT_OK;
}

void xfer_landing_free(struct bt_xfer *x, struct xfer_landing *l)
{
    for (uint32_t i = 0; i < l->n_groups; i++) {
        /* owned; const only towards callers */
        bt_spent_add(&x->spent, (void *)(uintptr_t)l->group[i].d.page_ids);
        bt_spent_add(&x->spent, l->group[i].seen);
    }
    bt_spent_add(&x->spent, l->landed);
    bt_spent_add(&x->spent, l->full_ev);
    bt_spent_add(&x->spent, l->closed);
    bt_spent_add(&x->spent, l);
}

/* ---- by ticket ---- */

enum bt_status xfer_buckets_init(struct bt_xfer *x)
{
    while (x->buckets_mask + 1 < x->o.landings_max && x->buckets_mask < UINT32_MAX / 2) {
        x->buckets_mask = x->buckets_mask << 1 | 1;
    }
    x->buckets = bt_calloc((size_t)x->buckets_mask + 1, sizeof(struct xfer_landing *));
    return x->buckets != NULL ? BT_OK : BT_ERR_NOMEM;
}

static struct xfer_landing **bucket_of(struct bt_xfer *x, const uint8_t *ticket)
{
    return &x->buckets[bt_hash64(ticket, BT_XFER_TICKET_BYTES, x->o.instance) & x->buckets_mask];
}

/* The first one with the ticket at l or behind it. */
static struct xfer_landing *with_ticket(struct xfer_landing *l, const uint8_t *ticket)
{
    while (l != NULL && memcmp(l->ticket, ticket, BT_XFER_TICKET_BYTES) != 0) {
        l = l->next_in_bucket;
    }
    return l;
}

static struct xfer_landing *find(struct bt_xfer *x, const uint8_t *ticket)
{
    return with_ticket(*bucket_of(x, ticket), ticket);
}

static struct xfer_landing *find_exact(struct bt_xfer *x, const uint8_t *ticket,
                                       uint64_t generation)
{
    struct xfer_landing *l = find(x, ticket);
    while (l != NULL && l->generation != generation) {
        l = with_ticket(l->next_in_bucket, ticket);
    }
    return l;
}

/* ---- events ---- */

static void fill_event(struct xfer_landing *l, struct bt_xfer_event *ev,
                       enum bt_xfer_event_kind kind, enum bt_status st)
{
    ev->kind = kind;
    ev->status = st;
    ev->peer = l->peer;
    memcpy(ev->ticket, l->ticket, sizeof(ev->ticket));
    ev->generation = l->generation;
    ev->n_groups = l->n_groups;
    for (uint32_t i = 0; i < l->n_groups; i++) {
        ev->n_shares[i] = l->group[i].n_done;
    }
    ev->bytes = l->bytes;
    ev->move_ns = l->last_ns - l->first_ns;
}

/* Refreshes LANDED where it waits, or queues it. */
static void tell_landed(struct bt_xfer *x, struct xfer_landing *l)
{
    bool queued;
    pthread_mutex_lock(&x->ev_mu);
    queued = l->landed->queued;
    fill_event(l, &l->landed->ev, BT_XFER_LANDED, BT_OK);
    pthread_mutex_unlock(&x->ev_mu);
    if (!queued) {
        xfer_event(x, l->landed);
    }
}

/* Queues the last event and lets the landing go. */
static void finish_close(struct bt_xfer *x, struct xfer_landing *l, enum bt_status st)
{
    struct xfer_node *closed = l->closed;
    fill_event(l, &closed->ev, BT_XFER_LAND_CLOSED, st);
    l->closed = NULL;
    pthread_mutex_lock(&x->ev_mu);
    if (l->landed->queued) {
        l->landed->keep = false; /* the poll that takes it frees it */
        l->landed = NULL;
    }
    pthread_mutex_unlock(&x->ev_mu);
    xfer_landing_free(x, l);
    atomic_fetch_sub(&x->n_landings, 1);
    xfer_event(x, closed);
}

void xfer_land_add(struct bt_xfer *x, struct xfer_landing *l)
{
    if (find_exact(x, l->ticket, l->generation) != NULL) {
        finish_close(x, l, BT_ERR_INVALID);
        return;
    }
    struct xfer_landing **bucket = bucket_of(x, l->ticket);
    l->next_in_bucket = *bucket;
    *bucket = l;
    TAILQ_INSERT_TAIL(&x->landings, l, link);
    x->st.landings_open++;
}

static void unlink_landing(struct bt_xfer *x, struct xfer_landing *l)
{
    struct xfer_landing **at = bucket_of(x, l->ticket);
    while (*at != l) {
        BT_ASSERT(*at != NULL);
        at = &(*at)->next_in_bucket;
    }
    *at = l->next_in_bucket;
    TAILQ_REMOVE(&x->landings, l, link);
    x->st.landings_open--;
}

/* LAND_FULL, if the counts say so. */
static void check_full(struct bt_xfer *x, struct xfer_landing *l)
{
    bool over = false;
    if (!l->expecting || l->full || l->closing || l->n_in_flight > 0) {
        return;
    }
    for (uint32_t i = 0; i < l->n_groups; i++) {
        if (l->group[i].n_done < l->group[i].n_expect) {
            return;
        }
        over = over || l->group[i].n_done > l->group[i].n_expect;
    }
    l->full = true;
    fill_event(l, &l->full_ev->ev, BT_XFER_LAND_FULL, over ? BT_ERR_PROTOCOL : BT_OK);
    struct xfer_node *n = l->full_ev;
    l->full_ev = NULL;
    xfer_event(x, n);
}

void xfer_land_expect_cmd(struct bt_xfer *x, const struct xfer_cmd *c)
{
    struct xfer_landing *l = find_exact(x, c->ref.ticket, c->ref.generation);
    if (l == NULL || l->full || l->closing) {
        return;
    }
    l->expecting = true;
    for (uint32_t i = 0; i < l->n_groups; i++) {
        l->group[i].n_expect = c->ref.n_shares[i];
    }
    check_full(x, l);
}

void xfer_land_close_cmd(struct bt_xfer *x, const struct xfer_cmd *c)
{
    struct xfer_landing *l = find_exact(x, c->ref.ticket, c->ref.generation);
    if (l == NULL || l->closing) {
        return;
    }
    l->closing = true;
    if (l->n_in_flight == 0) {
        unlink_landing(x, l);
        finish_close(x, l, BT_OK);
    }
}

/* The bit of a share in group g, or false when the header points outside. */
static bool share_bit(const struct xfer_land_group *g, const struct xfer_head *h, uint32_t *index,
                      size_t *bit)
{
    if (h->layer >= g->d.n_layers || h->page < g->d.first_page ||
        h->page - g->d.first_page >= g->d.n_pages || h->bytes != g->d.page_layer_bytes) {
        return false;
    }
    *index = h->page - g->d.first_page;
    *bit = (size_t)h->layer * g->d.n_pages + *index;
    return g->d.page_ids[*index] != BT_XFER_NO_PAGE;
}

struct xfer_landing *xfer_land_begin(struct bt_xfer *x, uint64_t peer, const struct xfer_head *h,
                                     uint8_t **dst)
{
    struct xfer_landing *l = find_exact(x, h->ticket, h->generation);
    uint32_t index;
    size_t bit;

    if (l == NULL) {
        if (find(x, h->ticket) != NULL) {
            x->st.drop_generation++;
        } else {
            x->st.drop_unknown++;
        }
        return NULL;
    }
    if (l->closing) {
        x->st.drop_unknown++;
        return NULL;
    }
    if (l->peer != peer) {
        x->st.drop_peer++;
        return NULL;
    }
    if (h->group >= l->n_groups || !share_bit(&l->group[h->group], h, &index, &bit)) {
        x->st.drop_range++;
        return NULL;
    }
    struct xfer_land_group *g = &l->group[h->group];
    if ((g->seen[bit / 64] >> (bit % 64) & 1) != 0) {
        x->st.drop_duplicate++;
        return NULL;
    }
    if (l->full) {
        x->st.drop_range++; /* more than the hand-off announced; the pages are in use by now */
        return NULL;
    }
    g->seen[bit / 64] |= UINT64_C(1) << (bit % 64);
    l->n_in_flight++;
    *dst = (uint8_t *)g->d.base + h->layer * g->d.layer_stride +
           g->d.page_ids[index] * g->d.page_stride;
    return l;
}

void xfer_land_done(struct bt_xfer *x, struct xfer_landing *l, const struct xfer_head *h,
                    enum bt_status st)
{
    BT_ASSERT(l->n_in_flight > 0);
    l->n_in_flight--;
    if (st == BT_OK) {
        l->group[h->group].n_done++;
        l->bytes += h->bytes;
        l->last_ns = x->now_ns;
        if (l->first_ns == 0) {
            l->first_ns = x->now_ns;
        }
        x->st.bytes_received += h->bytes;
        x->st.shares_received++;
    }
    if (l->closing) {
        if (l->n_in_flight == 0) {
            unlink_landing(x, l);
            finish_close(x, l, BT_OK);
        }
        return;
    }
    if (st == BT_OK) {
        tell_landed(x, l);
    }
    check_full(x, l);
}
