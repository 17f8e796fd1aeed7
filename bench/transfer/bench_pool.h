#ifndef BT_BENCH_POOL_H
#define BT_BENCH_POOL_H

/* Memory that pages lie in: the host's, or a CUDA device's with its way to the wire, as nodes have it. */

#include "kernels/open.h"
#include "transfer/xfer.h"

struct bench_pool {
    uint8_t *base;
    size_t bytes;
    struct bt_kctx *k; /* NULL: the host's */
    struct bt_k_mover *mover;
    struct bt_xfer_stage stage;
};

#define BENCH_POOL_HOST (-1)
/* device: its index, or BENCH_POOL_HOST. No share is larger than share_max. Ends the program, with a message, if it cannot be:
 * with 77 where there is no device. */
void bench_pool_open(struct bench_pool *p, size_t bytes, int device, size_t share_max);
void bench_pool_close(struct bench_pool *p);
/* Tells the transfer room of it; p lives as long. */
void bench_pool_opts(const struct bench_pool *p, struct bt_xfer_opts *o);

#endif
