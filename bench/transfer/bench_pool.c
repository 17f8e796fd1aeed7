/* The memory that bench-transfer moves pages out of and into. Owns the device's context and its mover; moves nothing. */

#include "bench/transfer/bench_pool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/mem.h"

#define SLOTS_BYTES ((size_t)64 << 20) /* pinned memory, as nodes have it */
#define SLOTS_MIN   16U
#define SLOTS_MAX   1024U

_Noreturn static void die(const char *text, int code)
{
    fprintf(stderr, "bench-transfer: %s\n", text);
    exit(code);
}

static void enter(void *arg)
{
    bt_k_mover_enter(arg);
}

static uint8_t *slot(void *arg, uint32_t i)
{
    return bt_k_mover_slot(arg, i);
}

static void start(void *arg, uint32_t i, void *device, size_t bytes, bool to_device)
{
    bt_k_mover_start(arg, i, device, bytes, to_device);
}

static void go(void *arg)
{
    bt_k_mover_go(arg);
}

static enum bt_status done(void *arg, uint32_t i, bool wait)
{
    return bt_k_mover_done(arg, i, wait);
}

static void open_device(struct bench_pool *p, uint32_t device, size_t share_max)
{
    const struct bt_k_opts o = {.device = device};
    struct bt_err err = {0};
    size_t n = SLOTS_BYTES / share_max;
    uint32_t n_slots = n < SLOTS_MIN ? SLOTS_MIN : n > SLOTS_MAX ? SLOTS_MAX : (uint32_t)n;
    enum bt_status st = bt_k_create("cuda", &o, &p->k, &err);

    if (st != BT_OK) {
        die(err.msg, st == BT_ERR_UNSUPPORTED ? 77 : 1);
    }
    const struct bt_k_mover_opts mo = {.slot_bytes = share_max, .n_slots = n_slots};
    if (bt_k_mover_create(p->k, &mo, &p->mover, &err) != BT_OK) {
        die(err.msg, 1);
    }
    p->stage = (struct bt_xfer_stage){.arg = p->mover,
                                      .slot_bytes = share_max,
                                      .n_slots = n_slots,
                                      .enter = enter,
                                      .slot = slot,
                                      .start = start,
                                      .go = go,
                                      .done = done};
    p->base = bt_k_alloc(p->k, p->bytes);
}

void bench_pool_open(struct bench_pool *p, size_t bytes, int device, size_t share_max)
{
    *p = (struct bench_pool){.bytes = bytes};
    if (device == BENCH_POOL_HOST) {
        p->base = bt_alloc(bytes);
        if (p->base != NULL) {
            memset(p->base, 2, bytes);
        }
    } else {
        open_device(p, (uint32_t)device, share_max);
    }
    if (p->base == NULL) {
        die("no memory for --pool", 1);
    }
}

void bench_pool_close(struct bench_pool *p)
{
    if (p->k == NULL) {
        bt_free(p->base);
        return;
    }
    bt_k_mover_destroy(p->mover);
    bt_k_free(p->k, p->base, p->bytes);
    bt_k_destroy(p->k);
}

void bench_pool_opts(const struct bench_pool *p, struct bt_xfer_opts *o)
{
    if (p->k == NULL) {
        return;
    }
    o->stage = &p->stage;
    o->regions[o->n_regions++] =
        (struct bt_xfer_region){.base = p->base, .bytes = p->bytes, .memory = BT_XFER_MEMORY_CUDA};
}
