#ifndef BT_BASE_FIFO_H
#define BT_BASE_FIFO_H

/* Blocks of any size for what one thread hands to another, out of a ring that is reserved at create: no heap call later.
 * Blocks may be given back in any order; the room of one is used again when all that were taken before it are back, too.
 * Whenever all are back the ring begins anew, so only as much of it takes memory as was out at the same time. Any
 * thread; a short mutex around each call. */

#include <stddef.h>
#include "base/status.h"

#define BT_FIFO_BLOCK_OVERHEAD                                                                     \
    32 /* bytes of the ring that a block costs besides its own, rounded up to 32 */

struct bt_fifo;

enum bt_status bt_fifo_create(size_t bytes, struct bt_fifo **out) BT_NODISCARD;
/* Blocks that are still out go with it. NULL is legal. */
void bt_fifo_destroy(struct bt_fifo *f);
/* n bytes, aligned to 16, content undefined; NULL: no room now. With all blocks back there is room for any block of up
 * to `bytes` less BT_FIFO_BLOCK_OVERHEAD. */
void *bt_fifo_take(struct bt_fifo *f, size_t n);
void bt_fifo_give(void *block); /* NULL: nothing */

#endif
