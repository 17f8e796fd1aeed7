/* Pages that UCX sends from where they lie, and receives there: registration of their memory with each context. Owns what is
 * known about UCX and device memory; which shares go this way is decided elsewhere. */

#include <string.h>
#include "base/assert.h"
#include "base/log.h"
#include "transfer/xfer_ucx_int.h"

static bool any_cuda(const struct bt_xfer *x)
{
    for (uint32_t i = 0; i < x->o.n_regions; i++) {
        if (x->o.regions[i].memory == BT_XFER_MEMORY_CUDA) {
            return true;
        }
    }
    return false;
}

static ucs_memory_type_t type_of(const struct bt_xfer_region *r)
{
    return r->memory == BT_XFER_MEMORY_CUDA ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
}

static bool knows_cuda(ucp_context_h context)
{
    ucp_context_attr_t attr = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};

    return ucp_context_query(context, &attr) == UCS_OK &&
           (attr.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0;
}

/* With all transports that UCX has, whatever the options choose: whether it was built with CUDA, and found a driver. */
void xfer_ucx_memory_probe(struct bt_xfer *x)
{
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_AM};
    ucp_config_t *config;
    ucp_context_h context;

    x->direct = x->o.n_regions > 0 && !any_cuda(x);
    if (!any_cuda(x) || ucp_config_read(NULL, NULL, &config) != UCS_OK) {
        return;
    }
    ucs_status_t us = ucp_init(&params, config, &context);
    ucp_config_release(config);
    if (us == UCS_OK) {
        x->direct = knows_cuda(context);
        ucp_cleanup(context);
    }
}

void xfer_ucx_memory_unmap(struct ucx_context *c)
{
    for (uint32_t i = 0; i < BT_XFER_REGIONS_MAX; i++) {
        if (c->memory[i] != NULL) {
            (void)ucp_mem_unmap(c->handle, c->memory[i]); /* the context goes next */
            c->memory[i] = NULL;
        }
    }
    c->direct = false;
}

void xfer_ucx_memory_map(struct bt_xfer *x, struct ucx_context *c)
{
    ucs_status_t us = any_cuda(x) && !knows_cuda(c->handle) ? UCS_ERR_UNSUPPORTED : UCS_OK;

    if (!x->direct) {
        return;
    }
    for (uint32_t i = 0; i < x->o.n_regions && us == UCS_OK; i++) {
        ucp_mem_map_params_t mp = {
            .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                          UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
            .address = x->o.regions[i].base,
            .length = x->o.regions[i].bytes,
            .memory_type = type_of(&x->o.regions[i]),
        };
        us = ucp_mem_map(c->handle, &mp, &c->memory[i]);
    }
    c->direct = us == UCS_OK;
    if (us != UCS_OK) {
        bt_log_info("transfer", "KV pages are not registered with UCX here, and staged: %s",
                    ucs_status_string(us));
        xfer_ucx_memory_unmap(c);
    }
}

void xfer_ucx_memory_param(const struct bt_xfer *x, const struct ucx_context *c, const void *p,
                           ucp_request_param_t *rp)
{
    uint32_t i = 0;

    while (i < x->o.n_regions &&
           ((const uint8_t *)p < (const uint8_t *)x->o.regions[i].base ||
            (size_t)((const uint8_t *)p - (const uint8_t *)x->o.regions[i].base) >=
                x->o.regions[i].bytes)) {
        i++;
    }
    BT_ASSERT(i < x->o.n_regions);
    rp->op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FIELD_MEMH;
    rp->memory_type = type_of(&x->o.regions[i]);
    rp->memh = c->memory[i];
}
