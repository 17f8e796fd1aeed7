/* Byte-pair encoding of one piece: characters to ids, then merges by rank, leftmost first. Short
 * pieces scan for the best pair; long ones use a heap over a linked list, so that a megabyte in one
 * piece is not quadratic. Owns vocabulary lookup and the merge table; knows nothing of how text
 * became pieces. */

#include "text/tokenizer_int.h"

#include <string.h>
#include "base/assert.h"
#include "base/mem.h"
#include "base/utf8.h"

#define SCAN_MAX 48 /* symbols of a piece that is merged by scanning */
#define NO_SYM   UINT32_MAX

struct bt_tok_sym {
    uint32_t id; /* BT_TOK_NONE: merged away */
    uint32_t prev, next;
};

/* ---- tables ---- */

static size_t merge_slot(const struct bt_tok_bpe *b, uint32_t left, uint32_t right)
{
    uint64_t h = (((uint64_t)left << 32) | right) * UINT64_C(0x9E3779B97F4A7C15);
    return (size_t)(h >> 32) & (b->n_slots - 1);
}

enum bt_status bt_tok_bpe_room(struct bt_tok_bpe *b, size_t n_merges)
{
    size_t n = 64;

    while (n < n_merges * 2) {
        n *= 2;
    }
    bt_free(b->merges);
    b->merges = bt_alloc(n * sizeof(*b->merges));
    if (b->merges == NULL) {
        return BT_ERR_NOMEM;
    }
    b->n_slots = n;
    b->n_merges = 0;
    for (size_t i = 0; i < n; i++) {
        b->merges[i].rank = BT_TOK_NONE;
    }
    return BT_OK;
}

enum bt_status bt_tok_bpe_init(struct bt_tok_bpe *b, size_t n_merges)
{
    *b = (struct bt_tok_bpe){.unk = BT_TOK_NONE};
    bt_map_init(&b->ids, false);
    for (unsigned i = 0; i < 256; i++) {
        b->byte_ids[i] = BT_TOK_NONE;
    }
    return bt_tok_bpe_room(b, n_merges);
}

void bt_tok_bpe_fini(struct bt_tok_bpe *b)
{
    bt_map_fini(&b->ids);
    bt_free(b->merges);
    for (size_t i = 0; i < BT_TOK_CP_PAGES; i++) {
        bt_free(b->cp_pages[i]);
    }
}

static enum bt_status add_char(struct bt_tok_bpe *b, uint32_t cp, uint32_t id)
{
    uint32_t **page = &b->cp_pages[cp >> 8];

    if (*page == NULL) {
        *page = bt_alloc(256 * sizeof(**page));
        if (*page == NULL) {
            return BT_ERR_NOMEM;
        }
        memset(*page, 0xFF, 256 * sizeof(**page));
    }
    (*page)[cp & 255] = id;
    return BT_OK;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

enum bt_status bt_tok_bpe_add(struct bt_tok_bpe *b, const char *name, size_t len, uint32_t id)
{
    uint32_t cp;

    if (bt_map_put(&b->ids, name, len, id) != BT_OK) {
        return BT_ERR_NOMEM;
    }
    if (len == 6 && memcmp(name, "<0x", 3) == 0 && name[5] == '>') {
        int hi = hex_digit(name[3]), lo = hex_digit(name[4]);
        if (hi >= 0 && lo >= 0) {
            b->byte_ids[hi * 16 + lo] = id;
        }
    }
    if (len > 0 && len <= 4 && bt_utf8_decode(name, len, &cp) == len) {
        return add_char(b, cp, id);
    }
    return BT_OK;
}

void bt_tok_bpe_merge(struct bt_tok_bpe *b, uint32_t left, uint32_t right, uint32_t rank,
                      uint32_t id)
{
    size_t i = merge_slot(b, left, right);

    BT_ASSERT(b->n_merges * 2 <= b->n_slots);
    while (b->merges[i].rank != BT_TOK_NONE &&
           (b->merges[i].left != left || b->merges[i].right != right)) {
        i = (i + 1) & (b->n_slots - 1);
    }
    b->n_merges += b->merges[i].rank == BT_TOK_NONE;
    b->merges[i] = (struct bt_tok_merge){left, right, rank, id};
}

enum bt_status bt_tok_bpe_merge_names(struct bt_tok_bpe *b, struct bt_tok_str left,
                                      struct bt_tok_str right, uint32_t rank)
{
    char small[256], *both = small;
    size_t n;

    if (!bt_add_size(left.len, right.len, &n)) {
        return BT_ERR_NOMEM;
    }
    if (n > sizeof(small)) {
        both = bt_alloc(n);
        if (both == NULL) {
            return BT_ERR_NOMEM;
        }
    }
    memcpy(both, left.s, left.len);
    memcpy(both + left.len, right.s, right.len);
    uint32_t l = bt_tok_bpe_id(b, left.s, left.len), r = bt_tok_bpe_id(b, right.s, right.len);
    uint32_t id = bt_tok_bpe_id(b, both, n);
    if (both != small) {
        bt_free(both);
    }
    if (l == BT_TOK_NONE || r == BT_TOK_NONE || id == BT_TOK_NONE) {
        return BT_ERR_INVALID;
    }
    bt_tok_bpe_merge(b, l, r, rank, id);
    return BT_OK;
}

const struct bt_tok_merge *bt_tok_bpe_find(const struct bt_tok_bpe *b, uint32_t left,
                                           uint32_t right)
{
    for (size_t i = merge_slot(b, left, right);; i = (i + 1) & (b->n_slots - 1)) {
        const struct bt_tok_merge *m = &b->merges[i];
        if (m->rank == BT_TOK_NONE) {
            return NULL;
        }
        if (m->left == left && m->right == right) {
            return m;
        }
    }
}

uint32_t bt_tok_bpe_id(const struct bt_tok_bpe *b, const char *name, size_t len)
{
    uint64_t id;

    return bt_map_get(&b->ids, name, len, &id) ? (uint32_t)id : BT_TOK_NONE;
}

/* ---- characters to symbols ---- */

static void add_sym(struct bt_tok_work *w, uint32_t id)
{
    uint32_t i = (uint32_t)w->n_syms++;
    w->syms[i] = (struct bt_tok_sym){id, i - 1, i + 1};
}

static bool add_bytes(const struct bt_tok_bpe *b, struct bt_tok_work *w, const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (b->byte_ids[(uint8_t)s[i]] == BT_TOK_NONE) {
            return false;
        }
    }
    for (size_t i = 0; i < n; i++) {
        add_sym(w, b->byte_ids[(uint8_t)s[i]]);
    }
    return true;
}

/* Room for one symbol a byte, and one more. */
static bool syms_room(struct bt_tok_work *w, size_t len)
{
    if (w->cap_syms < len + 1) {
        size_t cap = w->cap_syms * 2 > len + 1 ? w->cap_syms * 2 : len + 1;
        struct bt_tok_sym *v = bt_realloc(w->syms, cap * sizeof(*v));
        if (v == NULL) {
            return false;
        }
        w->syms = v;
        w->cap_syms = cap;
    }
    return true;
}

static void symbols(const struct bt_tok_bpe *b, struct bt_tok_work *w, const char *s, size_t len)
{
    bool unk = false; /* unknown characters before i that have no symbol yet */
    unsigned n;

    w->n_syms = 0;
    for (size_t i = 0; i < len; i += n) {
        uint32_t cp;
        n = bt_utf8_decode(s + i, len - i, &cp);
        const uint32_t *page = b->cp_pages[cp >> 8];
        uint32_t id = page == NULL ? BT_TOK_NONE : page[cp & 255];
        if (id != BT_TOK_NONE) {
            if (unk) {
                add_sym(w, b->unk);
                unk = false;
            }
            add_sym(w, id);
        } else if (b->byte_fallback && add_bytes(b, w, s + i, n)) {
            continue; /* a pending unknown stays behind the bytes, as in the reference */
        } else if (b->unk != BT_TOK_NONE) {
            if (unk && !b->fuse_unk) {
                add_sym(w, b->unk);
            }
            unk = true;
        }
    }
    if (unk) {
        add_sym(w, b->unk);
    }
    if (w->n_syms > 0) {
        w->syms[w->n_syms - 1].next = NO_SYM;
    }
}

/* ---- merging ---- */

/* Few symbols: an array, its pair ranks beside it. */
static void merge_scan(const struct bt_tok_bpe *b, struct bt_tok_work *w)
{
    const struct bt_tok_merge *pair[SCAN_MAX];
    struct bt_tok_sym *v = w->syms;
    size_t n = w->n_syms;

    for (size_t i = 0; i + 1 < n; i++) {
        pair[i] = bt_tok_bpe_find(b, v[i].id, v[i + 1].id);
    }
    while (n > 1) {
        size_t best = n;
        for (size_t i = 0; i + 1 < n; i++) {
            if (pair[i] != NULL && (best == n || pair[i]->rank < pair[best]->rank)) {
                best = i;
            }
        }
        if (best == n) {
            break;
        }
        v[best].id = pair[best]->id;
        for (size_t i = best + 1; i + 1 < n; i++) {
            v[i].id = v[i + 1].id;
            pair[i] = i + 2 < n ? pair[i + 1] : NULL;
        }
        n--;
        pair[best] = best + 1 < n ? bt_tok_bpe_find(b, v[best].id, v[best + 1].id) : NULL;
        if (best > 0) {
            pair[best - 1] = bt_tok_bpe_find(b, v[best - 1].id, v[best].id);
        }
    }
    w->n_syms = n;
}

static void sift_down(uint64_t *h, size_t n, size_t i)
{
    uint64_t x = h[i];

    for (;;) {
        size_t c = 2 * i + 1;
        if (c >= n) {
            break;
        }
        if (c + 1 < n && h[c + 1] < h[c]) {
            c++;
        }
        if (h[c] >= x) {
            break;
        }
        h[i] = h[c];
        i = c;
    }
    h[i] = x;
}

static void heap_push(struct bt_tok_work *w, uint64_t x)
{
    size_t i = w->n_heap++;

    while (i > 0 && w->heap[(i - 1) / 2] > x) {
        w->heap[i] = w->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    w->heap[i] = x;
}

static uint64_t heap_pop(struct bt_tok_work *w)
{
    uint64_t top = w->heap[0];

    w->heap[0] = w->heap[--w->n_heap];
    if (w->n_heap > 0) {
        sift_down(w->heap, w->n_heap, 0);
    }
    return top;
}

/* Heap entries are rank << 32 | index of the left symbol. A pair is entered when it comes to be and
 * looked up again when popped: an entry whose pair is gone finds another rank. */
static void consider(const struct bt_tok_bpe *b, struct bt_tok_work *w, uint32_t i)
{
    const struct bt_tok_sym *v = w->syms;

    if (v[i].next != NO_SYM) {
        const struct bt_tok_merge *m = bt_tok_bpe_find(b, v[i].id, v[v[i].next].id);
        if (m != NULL) {
            heap_push(w, (uint64_t)m->rank << 32 | i);
        }
    }
}

/* Room: a pair each at the start, then at most two new ones for every merge, which takes one out.
 */
static enum bt_status merge_heap(const struct bt_tok_bpe *b, struct bt_tok_work *w)
{
    size_t need = 2 * w->n_syms + 2, kept = 0;
    struct bt_tok_sym *v = w->syms;

    if (w->cap_heap < need) {
        uint64_t *h = bt_realloc(w->heap, need * sizeof(*h));
        if (h == NULL) {
            return BT_ERR_NOMEM;
        }
        w->heap = h;
        w->cap_heap = need;
    }
    w->n_heap = 0;
    for (uint32_t i = 0; i + 1 < w->n_syms; i++) {
        const struct bt_tok_merge *m = bt_tok_bpe_find(b, v[i].id, v[i + 1].id);
        if (m != NULL) {
            w->heap[w->n_heap++] = (uint64_t)m->rank << 32 | i;
        }
    }
    for (size_t i = w->n_heap / 2; i-- > 0;) {
        sift_down(w->heap, w->n_heap, i);
    }
    while (w->n_heap > 0) {
        uint64_t top = heap_pop(w);
        uint32_t i = (uint32_t)top, r = v[i].next;
        if (v[i].id == BT_TOK_NONE || r == NO_SYM) {
            continue;
        }
        const struct bt_tok_merge *m = bt_tok_bpe_find(b, v[i].id, v[r].id);
        if (m == NULL || m->rank != top >> 32) {
            continue;
        }
        v[i].id = m->id;
        v[i].next = v[r].next;
        v[r].id = BT_TOK_NONE;
        if (v[i].next != NO_SYM) {
            v[v[i].next].prev = i;
        }
        if (i > 0) {
            consider(b, w, v[i].prev);
        }
        consider(b, w, i);
    }
    for (uint32_t i = 0; i != NO_SYM; i = v[i].next) {
        v[kept++].id = v[i].id;
    }
    w->n_syms = kept;
    return BT_OK;
}

enum bt_status bt_tok_bpe_encode(const struct bt_tok_bpe *b, struct bt_tok_work *w, const char *s,
                                 size_t len, struct bt_ids *out)
{
    enum bt_status st = BT_OK;

    if (b->ignore_merges) {
        uint32_t id = bt_tok_bpe_id(b, s, len);
        if (id != BT_TOK_NONE) {
            return bt_ids_add(out, id);
        }
    }
    if (!syms_room(w, len)) {
        return BT_ERR_NOMEM;
    }
    symbols(b, w, s, len);
    if (w->n_syms > SCAN_MAX) {
        st = merge_heap(b, w);
    } else if (w->n_syms > 1) {
        merge_scan(b, w);
    }
    for (size_t i = 0; i < w->n_syms && st == BT_OK; i++) {
        st = bt_ids_add(out, w->syms[i].id);
    }
    return st;
}

void bt_tok_work_fini(struct bt_tok_work *w)
{
    bt_free(w->syms);
    bt_free(w->heap);
    *w = (struct bt_tok_work){0};
}
