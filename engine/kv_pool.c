/* Sizes and allocates the KV pool. It knows no sequence and no lease. */

#include "engine/kv_pool.h"

#include <inttypes.h>
#include "base/mem.h"

enum bt_status bt_kv_pool_init(struct bt_kv_pool *p, struct bt_kctx *k,
                               const struct bt_model_info *info, const struct bt_kv_pool_opts *opts,
                               struct bt_err *err)
{
    size_t row = 2 * (size_t)info->n_kv_heads * info->head_dim * bt_dtype_block_bytes(opts->dtype);
    size_t page_bytes; /* one page of every group */

    *p = (struct bt_kv_pool){.k = k, .n_groups = info->n_groups};
    p->kv.page_tokens = opts->page_tokens;
    p->kv.dtype = opts->dtype;
    if (!bt_mul_size(row, opts->page_tokens, &p->page_layer_bytes) ||
        !bt_mul_size(p->page_layer_bytes, info->n_layers, &page_bytes)) {
        return bt_err_set(err, BT_ERR_INVALID, "KV pages of %" PRIu32 " tokens are too large",
                          opts->page_tokens);
    }
    uint64_t n = opts->bytes / page_bytes;

    if (n == 0) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "a KV pool of %" PRIu64 " bytes holds no page: one page of %" PRIu32
                          " tokens in %" PRIu32 " layers takes %zu bytes",
                          opts->bytes, opts->page_tokens, info->n_layers, page_bytes);
    }
    p->n_pages = n < opts->n_pages_max ? (uint32_t)n : opts->n_pages_max;
    for (uint32_t g = 0; g < info->n_groups; g++) {
        size_t layer = p->page_layer_bytes * p->n_pages;

        p->kv.groups[g].page_stride = p->page_layer_bytes;
        p->kv.groups[g].layer_stride = layer;
        p->group_bytes[g] = layer * info->groups[g].n_layers;
        p->kv.groups[g].base = bt_k_alloc(k, p->group_bytes[g]);
        if (p->kv.groups[g].base == NULL) {
            bt_kv_pool_fini(p);
            return bt_err_set(err, BT_ERR_NOMEM, "no memory for a KV pool of %" PRIu64 " bytes",
                              opts->bytes);
        }
    }
    return BT_OK;
}

void bt_kv_pool_copy(struct bt_kv_pool *p, uint32_t group, uint32_t n_layers, uint32_t from,
                     uint32_t to)
{
    uint8_t *layer = p->kv.groups[group].base;

    for (uint32_t l = 0; l < n_layers && from != to; l++) {
        bt_k_copy(p->k, layer + to * p->page_layer_bytes, layer + from * p->page_layer_bytes,
                  p->page_layer_bytes);
        layer += p->kv.groups[group].layer_stride;
    }
}

void bt_kv_pool_fini(struct bt_kv_pool *p)
{
    for (uint32_t g = 0; g < p->n_groups; g++) {
        if (p->kv.groups[g].base != NULL) {
            bt_k_free(p->k, p->kv.groups[g].base, p->group_bytes[g]);
        }
    }
    *p = (struct bt_kv_pool){0};
}
