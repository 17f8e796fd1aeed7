/* Spans of a ragged batch for the kernels: cuts them into tiles, writes their page tables one behind the other, and decides
 * which go at once. Knows nothing of what is computed. */

#include "kernels/cuda/cuda_int.h"

#include <string.h>

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* In a step: a place for each row, the same for all layers of a group. */
static void store_step(struct cuda_ctx *c, struct cuda_store *s, const struct bt_k_span *spans,
                       uint32_t n_spans)
{
    for (uint32_t i = 0; i < n_spans; i++) {
        BT_ASSERT(spans[i].n == 1);
        c->places[i] = (struct cuda_place){.row = spans[i].row,
                                           .page = spans[i].pages[spans[i].pos / s->kv.page_tokens],
                                           .token = spans[i].pos % s->kv.page_tokens};
    }
    s->n = n_spans;
    s->places = cuda_send_as(c, spans, CUDA_SEND_PLACES, c->places, n_spans * sizeof(*c->places));
    cuda_store_run(c, s);
}

void cuda_kv_store(struct bt_kctx *k, const struct bt_k_kv *kv, const float *key, size_t ldk,
                   const float *value, size_t ldv, const struct bt_k_span *spans, uint32_t n_spans)
{
    struct cuda_ctx *c = cuda_of(k);
    uint32_t span = 0, done = 0; /* rows of it */

    if (c->step.mode != CUDA_STEP_OFF) {
        struct cuda_store step = {.kv = *kv, .key = key, .value = value, .ldk = ldk, .ldv = ldv};
        store_step(c, &step, spans, n_spans);
        return;
    }

    while (span < n_spans) {
        uint32_t n = 0;
        for (; span < n_spans && n < CUDA_PLACES_MAX; n++) {
            const struct bt_k_span *s = &spans[span];
            uint32_t pos = s->pos + done;
            BT_ASSERT(s->n > 0);
            c->places[n] = (struct cuda_place){.row = s->row + done,
                                               .page = s->pages[pos / kv->page_tokens],
                                               .token = pos % kv->page_tokens};
            if (++done == s->n) {
                span++;
                done = 0;
            }
        }
        struct cuda_store store = {
            .kv = *kv, .key = key, .value = value, .ldk = ldk, .ldv = ldv, .n = n};
        store.places = cuda_send(c, c->places, n * sizeof(*c->places));
        cuda_store_run(c, &store);
    }
}

/* What one launch takes up. */
struct pending {
    struct cuda_attn *a;
    size_t n_tiles, n_pages;
    uint32_t n_splits; /* most of a tile */
};

static void run(struct cuda_ctx *c, struct pending *p)
{
    if (p->n_tiles > 0) {
        p->a->tiles = cuda_send(c, c->tiles, p->n_tiles * sizeof(*c->tiles));
        p->a->pages = cuda_send(c, c->pages, p->n_pages * sizeof(*c->pages));
        p->a->n_tiles = (uint32_t)p->n_tiles;
        p->a->n_splits = p->n_splits;
        p->a->part = c->attn.p;
        cuda_attention_run(c, p->a);
    }
    p->n_tiles = p->n_pages = 0;
    p->n_splits = 0;
}

/* Bytes of partial results of n_tiles tiles. */
static size_t part_bytes(const struct cuda_attn *a, size_t n_tiles, size_t n_splits)
{
    return n_tiles * a->kv.n_kv_heads * n_splits * CUDA_ATTN_ROWS * (a->kv.head_dim + 2) *
           sizeof(float);
}

/* Splits of a tile whose rows have positions first … last. */
static uint32_t splits_of(const struct cuda_attn *a, uint32_t first, uint32_t last)
{
    uint32_t window = a->a.window, from = window != 0 && first >= window ? first - window + 1 : 0;

    return last / CUDA_ATTN_SPLIT - from / CUDA_ATTN_SPLIT + 1;
}

/* Puts the tiles of rows [first, n_rows) of a span into p, as many as there is room for; at_once: their splits run together.
 * Returns the first row that is left. */
static uint32_t add_span(struct cuda_ctx *c, struct pending *p, const struct bt_k_span *s,
                         uint32_t first, bool at_once)
{
    const struct cuda_attn *a = p->a;
    uint32_t group = a->a.n_heads / a->kv.n_kv_heads, n_rows = s->n * group;
    size_t n_pages = (s->pos + s->n - 1) / a->kv.page_tokens + 1, pages_at = p->n_pages;

    if (n_pages > CUDA_PAGES_MAX - p->n_pages) {
        return first;
    }
    uint32_t row = first;
    for (; row < n_rows && p->n_tiles < CUDA_TILES_MAX; row += a->rows) {
        uint32_t n = (uint32_t)min_size(n_rows - row, a->rows), splits = 0;
        if (at_once) {
            splits = splits_of(a, s->pos + row / group, s->pos + (row + n - 1) / group);
            splits = splits > p->n_splits ? splits : p->n_splits;
            if (part_bytes(a, p->n_tiles + 1, splits) > c->attn.bytes) {
                break;
            }
        }
        p->n_splits = splits;
        c->tiles[p->n_tiles++] = (struct cuda_tile){
            .row0 = s->row, .pos = s->pos, .first = row, .n = n, .pages_at = (uint32_t)pages_at};
    }
    if (row > first) {
        memcpy(c->pages + pages_at, s->pages, n_pages * sizeof(*c->pages));
        p->n_pages += n_pages;
    }
    return row < n_rows ? row : n_rows;
}

/* All spans of one kind: decoding ones (a single token, whose splits run at once), or prompts. */
static void attend_kind(struct cuda_ctx *c, struct cuda_attn *a, const struct bt_k_span *spans,
                        uint32_t n_spans, bool decoding)
{
    uint32_t group = a->a.n_heads / a->kv.n_kv_heads;
    struct pending p = {.a = a};

    a->rows = decoding ? CUDA_ATTN_ROWS : cuda_attention_rows(c, &a->kv);
    for (uint32_t i = 0; i < n_spans; i++) {
        const struct bt_k_span *s = &spans[i];
        /* A split more than one is worth it, and all of a tile must have room. */
        bool at_once = decoding && splits_of(a, s->pos, s->pos) <= UINT16_MAX &&
                       part_bytes(a, 1, splits_of(a, s->pos, s->pos)) <= c->attn.bytes;
        if ((s->n == 1) != decoding) {
            continue;
        }
        BT_ASSERT((s->pos + s->n - 1) / a->kv.page_tokens < CUDA_PAGES_MAX);
        if (p.n_tiles > 0 && at_once != (p.n_splits > 0)) {
            run(c, &p);
        }
        for (uint32_t row = 0; row < s->n * group;) {
            row = add_span(c, &p, s, row, at_once);
            if (row < s->n * group) {
                run(c, &p);
            }
        }
    }
    run(c, &p);
}

/* In a step: tables of one size, and as many splits for each row as the longest has, so that no size depends on the rows. */
static void attend_step(struct cuda_ctx *c, struct cuda_attn *a, const struct bt_k_span *spans,
                        uint32_t n_spans)
{
    uint32_t group = a->a.n_heads / a->kv.n_kv_heads, table = c->step.table, n = 0;
    size_t n_tiles = (size_t)n_spans * ((group + CUDA_ATTN_ROWS - 1) / CUDA_ATTN_ROWS);
    size_t tiles = n_tiles * sizeof(*c->tiles), pages = (size_t)n_spans * table * sizeof(uint32_t);
    bool sent = cuda_step_find(c, spans, CUDA_SEND_TILES) != NULL; /* for another layer */

    for (uint32_t i = 0; i < n_spans && !sent; i++) {
        const struct bt_k_span *s = &spans[i];
        uint32_t n_pages = s->pos / a->kv.page_tokens + 1;
        BT_ASSERT(s->n == 1 && n_pages <= table);
        memcpy(c->pages + (size_t)i * table, s->pages, n_pages * sizeof(*c->pages));
        memset(c->pages + (size_t)i * table + n_pages, 0, (table - n_pages) * sizeof(*c->pages));
        for (uint32_t row = 0; row < group; row += CUDA_ATTN_ROWS) {
            c->tiles[n++] = (struct cuda_tile){.row0 = s->row,
                                               .pos = s->pos,
                                               .first = row,
                                               .n = (uint32_t)min_size(group - row, CUDA_ATTN_ROWS),
                                               .pages_at = i * table};
        }
    }
    a->tiles = cuda_send_as(c, spans, CUDA_SEND_TILES, c->tiles, tiles);
    a->pages = cuda_send_as(c, spans, CUDA_SEND_PAGES, c->pages, pages);
    a->n_tiles = (uint32_t)n_tiles;
    a->rows = CUDA_ATTN_ROWS;
    a->n_splits = c->step.n_splits;
    a->part = c->attn.p;
    cuda_attention_run(c, a);
}

void cuda_attention(struct bt_kctx *k, const struct bt_k_attn *a, const struct bt_k_kv *kv,
                    const struct bt_k_span *spans, uint32_t n_spans)
{
    struct cuda_attn attn = {.a = *a, .kv = *kv};

    BT_ASSERT(kv->head_dim <= CUDA_HEAD_DIM_MAX && a->n_heads % kv->n_kv_heads == 0);
    if (cuda_of(k)->step.mode != CUDA_STEP_OFF) {
        attend_step(cuda_of(k), &attn, spans, n_spans);
        return;
    }
    attend_kind(cuda_of(k), &attn, spans, n_spans, true);
    attend_kind(cuda_of(k), &attn, spans, n_spans, false);
}
