#ifndef BT_TESTS_MODEL_RUN_H
#define BT_TESTS_MODEL_RUN_H

/* A model with a toy KV pool, for tests: one sequence at a time, any chunk size, pages in reverse
 * order, and pages that a window has left behind taken away. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/mem.h"
#include "model/model.h"

struct bt_model_run {
    struct bt_kctx *k;
    struct bt_model *m;
    struct bt_model_ws *ws;
    struct bt_model_kv kv;
    size_t group_bytes[BT_MODEL_KV_GROUPS_MAX];
    uint32_t *pages[BT_MODEL_KV_GROUPS_MAX];
    uint32_t n_pages, max_tokens;
    bool (*layer_done)(void *arg, uint32_t layer);
    void *arg;
};

static inline enum bt_status bt_model_run_open(struct bt_model_run *r, const char *path,
                                               struct bt_kctx *k, struct bt_err *err)
{
    *r = (struct bt_model_run){.k = k};
    enum bt_status st = bt_model_open(path, &r->m, err);
    return st == BT_OK ? bt_model_load(r->m, k, NULL, err) : st;
}

static inline void bt_model_run_close_pool(struct bt_model_run *r)
{
    for (uint32_t g = 0; g < BT_MODEL_KV_GROUPS_MAX; g++) {
        if (r->kv.groups[g].base != NULL) {
            bt_k_free(r->k, r->kv.groups[g].base, r->group_bytes[g]);
        }
        bt_free(r->pages[g]);
        r->pages[g] = NULL;
        r->kv.groups[g].base = NULL;
    }
    bt_model_ws_destroy(r->ws);
    r->ws = NULL;
}

static inline void bt_model_run_close(struct bt_model_run *r)
{
    bt_model_run_close_pool(r);
    bt_model_destroy(r->m);
    r->m = NULL;
}

/* A pool for one sequence of max_tokens, and a workspace for chunks of as many. */
static inline void bt_model_run_pool(struct bt_model_run *r, uint32_t page_tokens,
                                     enum bt_dtype dtype, uint32_t max_tokens)
{
    const struct bt_model_info *info = bt_model_info(r->m);
    struct bt_err err = {0};
    size_t page =
        (size_t)2 * info->n_kv_heads * page_tokens * info->head_dim * bt_dtype_block_bytes(dtype);

    r->max_tokens = max_tokens;
    r->n_pages = (max_tokens + page_tokens - 1) / page_tokens;
    r->kv.page_tokens = page_tokens;
    r->kv.dtype = dtype;
    for (uint32_t g = 0; g < info->n_groups; g++) {
        r->kv.groups[g].page_stride = page;
        r->kv.groups[g].layer_stride = page * r->n_pages;
        r->group_bytes[g] = page * r->n_pages * info->groups[g].n_layers;
        r->kv.groups[g].base = bt_k_alloc(r->k, r->group_bytes[g]);
        r->pages[g] = bt_calloc(r->n_pages, sizeof(uint32_t));
        if (r->kv.groups[g].base == NULL || r->pages[g] == NULL) {
            abort();
        }
        for (uint32_t p = 0; p < r->n_pages; p++) {
            r->pages[g][p] = r->n_pages - 1 - p;
        }
    }
    if (bt_model_ws_create(r->m, max_tokens, max_tokens, &r->ws, &err) != BT_OK) {
        fprintf(stderr, "%s\n", err.msg);
        abort();
    }
}

/* Before tokens at pos: pages wholly behind the window are no longer there. */
static inline void bt_model_run_trim(struct bt_model_run *r, uint32_t pos)
{
    const struct bt_model_info *info = bt_model_info(r->m);

    for (uint32_t g = 0; g < info->n_groups; g++) {
        uint32_t window = info->groups[g].window;
        for (uint32_t p = 0; p < r->n_pages; p++) {
            bool gone =
                window != 0 && (uint64_t)(p + 1) * r->kv.page_tokens + window <= (uint64_t)pos + 1;
            r->pages[g][p] = gone ? BT_PAGE_NONE : r->n_pages - 1 - p;
        }
    }
}

/* Computes tokens at positions pos …, in chunks; logits [vocab] of the last one. */
static inline enum bt_status bt_model_run_tokens(struct bt_model_run *r, const uint32_t *tokens,
                                                 uint32_t n, uint32_t pos, uint32_t chunk,
                                                 float *logits)
{
    enum bt_status st = BT_OK;

    for (uint32_t i = 0; i < n && st == BT_OK; i += chunk) {
        uint32_t take = n - i < chunk ? n - i : chunk, last = take - 1;
        struct bt_model_span span = {.n = take, .pos = pos + i};
        struct bt_model_batch b = {.n_tokens = take,
                                   .tokens = tokens + i,
                                   .n_spans = 1,
                                   .spans = &span,
                                   .n_out = i + take == n ? 1 : 0,
                                   .out_rows = &last,
                                   .logits = logits,
                                   .layer_done = r->layer_done,
                                   .arg = r->arg};
        bt_model_run_trim(r, pos + i);
        for (uint32_t g = 0; g < BT_MODEL_KV_GROUPS_MAX; g++) {
            span.pages[g] = r->pages[g];
        }
        st = bt_model_forward(r->m, r->ws, &r->kv, &b);
    }
    return st;
}

static inline uint32_t bt_model_run_argmax(const float *logits, uint32_t n)
{
    uint32_t best = 0;

    for (uint32_t i = 1; i < n; i++) {
        best = logits[i] > logits[best] ? i : best;
    }
    return best;
}

#endif
