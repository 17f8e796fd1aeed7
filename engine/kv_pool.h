#ifndef BT_ENGINE_KV_POOL_H
#define BT_ENGINE_KV_POOL_H

/* The memory of the KV pages: per layer group one block,
 * [layer][page][K|V][kv_head][token][head_dim]. Who holds which page is known to sched/. Every
 * group has the same number of pages. */

#include "model/model.h"

struct bt_kv_pool {
    struct bt_kctx *k;          /* borrowed, outlives the pool */
    struct bt_model_kv kv;      /* as the forward pass wants it */
    uint32_t n_groups, n_pages; /* n_pages: of each group */
    size_t page_layer_bytes;    /* one page's share of one layer */
    size_t group_bytes[BT_MODEL_KV_GROUPS_MAX];
};

struct bt_kv_pool_opts {
    uint64_t bytes;       /* at most so much memory */
    uint32_t page_tokens; /* >= 1 */
    uint32_t n_pages_max; /* more would never be used */
    enum bt_dtype dtype;  /* bt_dtype_is_kv() */
};

/* BT_ERR_INVALID: not even one page per group fits; BT_ERR_NOMEM. */
enum bt_status bt_kv_pool_init(struct bt_kv_pool *p, struct bt_kctx *k,
                               const struct bt_model_info *info, const struct bt_kv_pool_opts *opts,
                               struct bt_err *err) BT_NODISCARD;
/* Copies a page of a group, all layers; from == to: nothing to do. */
void bt_kv_pool_copy(struct bt_kv_pool *p, uint32_t group, uint32_t n_layers, uint32_t from,
                     uint32_t to);
void bt_kv_pool_fini(struct bt_kv_pool *p); /* legal on a zeroed pool */

#endif
