/* KV pages in memory that only a device can touch: joins the backend's mover to the transfer room's stage, tells the transfer
 * room which memory to register, and notes that the device failed. Knows neither tickets nor pages. */

#include "node/node_int.h"

/* Pinned memory for pages on their way: enough that copies and the wire both go on. */
#define SLOTS_BYTES ((size_t)64 << 20)
#define SLOTS_MIN   16U
#define SLOTS_MAX   1024U

static void enter(void *arg)
{
    const struct bt_node_private *p = arg;

    bt_k_mover_enter(p->mover);
}

static uint8_t *slot(void *arg, uint32_t i)
{
    const struct bt_node_private *p = arg;

    return bt_k_mover_slot(p->mover, i);
}

static void start(void *arg, uint32_t i, void *device, size_t bytes, bool to_device)
{
    struct bt_node_private *p = arg;

    bt_k_mover_start(p->mover, i, device, bytes, to_device);
}

static void go(void *arg)
{
    struct bt_node_private *p = arg;

    bt_k_mover_go(p->mover);
}

static enum bt_status done(void *arg, uint32_t i, bool wait)
{
    struct bt_node_private *p = arg;
    enum bt_status st = bt_k_mover_done(p->mover, i, wait);

    if (st == BT_ERR_DEVICE) {
        atomic_store(&p->mover_failed, true);
    }
    return st;
}

bool bt_node_memory_failed(const struct bt_node *n)
{
    return atomic_load(&n->p->mover_failed);
}

enum bt_status bt_node_memory_start(struct bt_node *n, struct bt_engine *e, struct bt_err *err)
{
    struct bt_xfer_stage *s = &n->p->stage;

    if (!n->layout->device_memory) {
        return BT_OK;
    }
    for (uint32_t g = 0; g < n->layout->n_groups; g++) {
        size_t share = n->layout->groups[g].page_layer_bytes;

        s->slot_bytes = share > s->slot_bytes ? share : s->slot_bytes;
    }
    size_t slots = SLOTS_BYTES / s->slot_bytes;

    s->n_slots = slots < SLOTS_MIN ? SLOTS_MIN : slots > SLOTS_MAX ? SLOTS_MAX : (uint32_t)slots;
    s->enter = enter;
    s->slot = slot;
    s->start = start;
    s->go = go;
    s->done = done;
    const struct bt_k_mover_opts o = {.slot_bytes = s->slot_bytes, .n_slots = s->n_slots};
    enum bt_status st = bt_engine_mover_create(e, &o, &n->p->mover, err);

    s->arg = n->p;
    return st;
}

void bt_node_memory_opts(const struct bt_node *n, struct bt_xfer_opts *o)
{
    if (n->p->mover == NULL) {
        return;
    }
    o->stage = &n->p->stage;
    for (uint32_t g = 0; g < n->layout->n_groups; g++) {
        o->regions[o->n_regions++] = (struct bt_xfer_region){
            .base = n->layout->groups[g].base,
            .bytes = n->layout->groups[g].layer_stride * n->layout->groups[g].n_layers,
            .memory = BT_XFER_MEMORY_CUDA};
    }
}

void bt_node_memory_log(const struct bt_node *n)
{
    if (n->p->mover == NULL) {
        return;
    }
    bool registered = bt_xfer_memory_way(n->xfer)[0] == 'r';

    bt_log_info(
        "transfer", "KV pages lie in device memory and %s through pinned memory (%u x %zu bytes)%s",
        registered
            ? "are registered with UCX: given to it as they are where a connection's transport "
              "reads remote memory (\"registered\" behind it), else staged"
            : "are staged",
        n->p->stage.n_slots, n->p->stage.slot_bytes,
        registered ? "" : ": this UCX does not register CUDA memory");
}
