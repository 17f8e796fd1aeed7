/* The index of the prefix cache: a tree of token blocks in a hash table by (block before, token ids),
 * the pages that hold their KV, and for each group a list of the idle pages, the one idle for the
 * longest first. It knows neither page states nor sequences; which pages are full and immutable is
 * the scheduler's business. */

#include "sched/prefix_index.h"

#include <string.h>
#include "base/assert.h"
#include "base/hash.h"
#include "base/mem.h"

#define NO_PAGE BT_PREFIX_NO_PAGE
#define NONE    UINT32_MAX

struct node {
    uint64_t serial; /* 0: free */
    uint64_t hash;
    uint32_t parent, child; /* child: the newest */
    uint32_t newer, older;  /* of the same parent; free nodes: older is the next free one */
    uint32_t next;          /* in its bucket + 1; 0: the last */
    uint32_t n_pages;
    uint32_t pages[BT_PREFIX_GROUPS_MAX];
};

struct page {
    uint32_t owner; /* its node + 1; 0: not in the index */
    bool idle;      /* in the list of idle pages: */
    uint32_t older, newer;
};

struct group {
    struct page *pages;
    uint32_t n_pages, oldest, newest;
};

struct bt_prefix_index {
    uint32_t page_tokens, n_groups, n_nodes;
    struct node *nodes;
    uint32_t *tokens;      /* [n_nodes][page_tokens] */
    uint32_t *buckets;     /* first node of each + 1; 0: none */
    uint32_t n_buckets;    /* power of two */
    uint32_t free, n_used; /* given back; all from n_used on are new, and memory not touched yet */
    uint32_t root;         /* the newest of those before which there is none */
    uint64_t last_serial;
    struct group groups[BT_PREFIX_GROUPS_MAX];
    struct bt_prefix_change *changes; /* [n_pages of group 0] */
    uint32_t n_changes;
    bool told; /* the caller has seen the changes */
};

static enum bt_status alloc_all(struct bt_prefix_index *x)
{
    size_t token_bytes = 0;
    bool ok = true;

    x->nodes = bt_calloc(x->n_nodes, sizeof(*x->nodes));
    x->buckets = bt_calloc(x->n_buckets, sizeof(*x->buckets));
    x->changes = bt_calloc(x->groups[0].n_pages, sizeof(*x->changes));
    if (bt_mul_size((size_t)x->n_nodes * sizeof(*x->tokens), x->page_tokens, &token_bytes)) {
        x->tokens = bt_alloc(token_bytes);
    }
    for (uint32_t g = 0; g < x->n_groups; g++) {
        x->groups[g].pages = bt_calloc(x->groups[g].n_pages, sizeof(*x->groups[g].pages));
        ok = ok && x->groups[g].pages != NULL;
    }
    ok = ok && x->nodes != NULL && x->buckets != NULL && x->changes != NULL && x->tokens != NULL;
    return ok ? BT_OK : BT_ERR_NOMEM;
}

enum bt_status bt_prefix_index_create(const struct bt_prefix_index_opts *opts,
                                      struct bt_prefix_index **out)
{
    BT_ASSERT(opts->page_tokens >= 1 && opts->n_groups >= 1 &&
              opts->n_groups <= BT_PREFIX_GROUPS_MAX);
    struct bt_prefix_index *x = bt_calloc(1, sizeof(*x));
    uint64_t n_nodes = 0;

    if (x == NULL) {
        return BT_ERR_NOMEM;
    }
    x->page_tokens = opts->page_tokens;
    x->n_groups = opts->n_groups;
    x->root = x->free = NONE;
    x->n_buckets = 1;
    for (uint32_t g = 0; g < x->n_groups; g++) {
        BT_ASSERT(opts->n_pages[g] >= 1);
        x->groups[g] =
            (struct group){.n_pages = opts->n_pages[g], .oldest = NO_PAGE, .newest = NO_PAGE};
        n_nodes += 2 * (uint64_t)opts->n_pages[g];
    }
    x->n_nodes = n_nodes < NONE ? (uint32_t)n_nodes : NONE - 1;
    while (x->n_buckets < x->n_nodes && x->n_buckets < UINT32_C(1) << 31) {
        x->n_buckets *= 2;
    }
    if (alloc_all(x) != BT_OK) {
        bt_prefix_index_destroy(x);
        return BT_ERR_NOMEM;
    }
    *out = x;
    return BT_OK;
}

void bt_prefix_index_destroy(struct bt_prefix_index *x)
{
    if (x != NULL) {
        for (uint32_t g = 0; g < x->n_groups; g++) {
            bt_free(x->groups[g].pages);
        }
        bt_free(x->nodes);
        bt_free(x->tokens);
        bt_free(x->buckets);
        bt_free(x->changes);
        bt_free(x);
    }
}

/* ---- blocks ---- */

bool bt_prefix_index_live(const struct bt_prefix_index *x, struct bt_prefix_pos at)
{
    return at.node == NONE ? at.serial == 0
                           : at.node < x->n_nodes && x->nodes[at.node].serial == at.serial;
}

static struct node *node_at(const struct bt_prefix_index *x, struct bt_prefix_pos at)
{
    BT_ASSERT(at.node != NONE && bt_prefix_index_live(x, at));
    return &x->nodes[at.node];
}

static struct bt_prefix_pos pos_of(const struct bt_prefix_index *x, uint32_t node)
{
    return node == NONE ? BT_PREFIX_ROOT : (struct bt_prefix_pos){x->nodes[node].serial, node};
}

static uint32_t *tokens_of(const struct bt_prefix_index *x, uint32_t node)
{
    return x->tokens + (size_t)node * x->page_tokens;
}

static uint32_t *bucket_of(const struct bt_prefix_index *x, uint64_t parent_serial,
                           const uint32_t *tokens)
{
    uint64_t h = bt_hash64(tokens, x->page_tokens * sizeof(*tokens), parent_serial);

    return &x->buckets[h & (x->n_buckets - 1)];
}

static uint32_t *children_of(struct bt_prefix_index *x, uint32_t parent)
{
    return parent == NONE ? &x->root : &x->nodes[parent].child;
}

bool bt_prefix_index_find(const struct bt_prefix_index *x, struct bt_prefix_pos before,
                          const uint32_t *tokens, struct bt_prefix_pos *out)
{
    if (!bt_prefix_index_live(x, before)) {
        return false;
    }
    for (uint32_t k = *bucket_of(x, before.serial, tokens); k != 0; k = x->nodes[k - 1].next) {
        uint32_t i = k - 1;

        if (x->nodes[i].parent == before.node &&
            memcmp(tokens_of(x, i), tokens, x->page_tokens * sizeof(*tokens)) == 0) {
            *out = pos_of(x, i);
            return true;
        }
    }
    return false;
}

uint32_t bt_prefix_index_alike(const struct bt_prefix_index *x, struct bt_prefix_pos before,
                               const uint32_t *tokens, uint32_t n, struct bt_prefix_pos *out)
{
    uint32_t best = 0, left = BT_PREFIX_CHILDREN_MAX;

    BT_ASSERT(n < x->page_tokens);
    if (!bt_prefix_index_live(x, before)) {
        return 0;
    }
    for (uint32_t i = before.node == NONE ? x->root : x->nodes[before.node].child;
         i != NONE && left > 0 && best < n; i = x->nodes[i].older, left--) {
        const uint32_t *t = tokens_of(x, i);
        uint32_t k = 0;

        while (k < n && t[k] == tokens[k]) {
            k++;
        }
        if (k > best && x->nodes[i].n_pages == x->n_groups) {
            best = k;
            *out = pos_of(x, i);
        }
    }
    return best;
}

bool bt_prefix_index_put(struct bt_prefix_index *x, struct bt_prefix_pos before,
                         const uint32_t *tokens, uint64_t hash, struct bt_prefix_pos *out)
{
    if (bt_prefix_index_find(x, before, tokens, out)) {
        return true;
    }
    if (!bt_prefix_index_live(x, before) || bt_prefix_index_full(x)) {
        return false;
    }
    uint32_t at = x->free != NONE ? x->free : x->n_used++,
             *bucket = bucket_of(x, before.serial, tokens);
    uint32_t *first = children_of(x, before.node);
    struct node *n = &x->nodes[at];

    x->free = x->free != NONE ? n->older : NONE;
    *n = (struct node){.serial = ++x->last_serial,
                       .hash = hash,
                       .parent = before.node,
                       .child = NONE,
                       .newer = NONE,
                       .older = *first,
                       .next = *bucket};
    memset(n->pages, 0xff, sizeof(n->pages)); /* NO_PAGE */
    memcpy(tokens_of(x, at), tokens, x->page_tokens * sizeof(*tokens));
    if (*first != NONE) {
        x->nodes[*first].newer = at;
    }
    *first = at;
    *bucket = at + 1;
    *out = pos_of(x, at);
    return true;
}

static void node_remove(struct bt_prefix_index *x, uint32_t at)
{
    struct node *n = &x->nodes[at];
    uint64_t before = n->parent == NONE ? 0 : x->nodes[n->parent].serial;
    uint32_t *link = bucket_of(x, before, tokens_of(x, at));

    while (*link != at + 1) {
        BT_ASSERT(*link != 0);
        link = &x->nodes[*link - 1].next;
    }
    *link = n->next;
    *(n->newer != NONE ? &x->nodes[n->newer].older : children_of(x, n->parent)) = n->older;
    if (n->older != NONE) {
        x->nodes[n->older].newer = n->newer;
    }
    *n = (struct node){.older = x->free};
    x->free = at;
}

static void trim(struct bt_prefix_index *x, uint32_t at)
{
    while (at != NONE && x->nodes[at].n_pages == 0 && x->nodes[at].child == NONE) {
        uint32_t parent = x->nodes[at].parent;

        node_remove(x, at);
        at = parent;
    }
}

void bt_prefix_index_drop(struct bt_prefix_index *x, struct bt_prefix_pos at)
{
    if (bt_prefix_index_live(x, at)) {
        trim(x, at.node);
    }
}

bool bt_prefix_index_full(const struct bt_prefix_index *x)
{
    return x->free == NONE && x->n_used == x->n_nodes;
}

struct bt_prefix_pos bt_prefix_index_before(const struct bt_prefix_index *x,
                                            struct bt_prefix_pos at)
{
    return pos_of(x, node_at(x, at)->parent);
}

uint64_t bt_prefix_index_hash(const struct bt_prefix_index *x, struct bt_prefix_pos at)
{
    return node_at(x, at)->hash;
}

/* ---- pages ---- */

static struct page *page_at(const struct bt_prefix_index *x, uint32_t group, uint32_t page)
{
    BT_ASSERT(group < x->n_groups && page < x->groups[group].n_pages);
    return &x->groups[group].pages[page];
}

uint32_t bt_prefix_index_page(const struct bt_prefix_index *x, struct bt_prefix_pos at,
                              uint32_t group)
{
    return node_at(x, at)->pages[group];
}

static void note_change(struct bt_prefix_index *x, const struct node *n, bool added)
{
    if (x->told) {
        x->told = false;
        x->n_changes = 0;
    }
    if (n->hash != 0 && x->n_changes < x->groups[0].n_pages) {
        x->changes[x->n_changes++] = (struct bt_prefix_change){n->hash, added};
    }
}

void bt_prefix_index_attach(struct bt_prefix_index *x, struct bt_prefix_pos at, uint32_t group,
                            uint32_t page)
{
    struct node *n = node_at(x, at);
    struct page *p = page_at(x, group, page);

    BT_ASSERT(n->pages[group] == NO_PAGE && p->owner == 0);
    n->pages[group] = page;
    n->n_pages++;
    p->owner = at.node + 1;
    if (group == 0) {
        note_change(x, n, true);
    }
}

void bt_prefix_index_detach(struct bt_prefix_index *x, uint32_t group, uint32_t page)
{
    struct page *p = page_at(x, group, page);
    BT_ASSERT(p->owner != 0);
    uint32_t at = p->owner - 1;

    BT_ASSERT(x->nodes[at].pages[group] == page);
    if (p->idle) {
        bt_prefix_index_busy(x, group, page);
    }
    if (group == 0) {
        note_change(x, &x->nodes[at], false);
    }
    x->nodes[at].pages[group] = NO_PAGE;
    x->nodes[at].n_pages--;
    p->owner = 0;
    trim(x, at);
}

bool bt_prefix_index_has(const struct bt_prefix_index *x, uint32_t group, uint32_t page)
{
    return page_at(x, group, page)->owner != 0;
}

void bt_prefix_index_busy(struct bt_prefix_index *x, uint32_t group, uint32_t page)
{
    struct group *g = &x->groups[group];
    struct page *p = page_at(x, group, page);

    BT_ASSERT(p->idle);
    *(p->older != NO_PAGE ? &g->pages[p->older].newer : &g->oldest) = p->newer;
    *(p->newer != NO_PAGE ? &g->pages[p->newer].older : &g->newest) = p->older;
    p->idle = false;
}

void bt_prefix_index_idle(struct bt_prefix_index *x, uint32_t group, uint32_t page)
{
    struct group *g = &x->groups[group];
    struct page *p = page_at(x, group, page);

    BT_ASSERT(p->owner != 0);
    if (p->idle) {
        bt_prefix_index_busy(x, group, page);
    }
    p->older = g->newest;
    p->newer = NO_PAGE;
    *(g->newest != NO_PAGE ? &g->pages[g->newest].newer : &g->oldest) = page;
    g->newest = page;
    p->idle = true;
}

uint32_t bt_prefix_index_oldest(const struct bt_prefix_index *x, uint32_t group)
{
    return x->groups[group].oldest;
}

/* ---- changes ---- */

const struct bt_prefix_change *bt_prefix_index_changes(struct bt_prefix_index *x, uint32_t *n)
{
    if (x->told) {
        x->n_changes = 0;
    }
    x->told = true;
    *n = x->n_changes;
    return x->changes;
}
