#ifndef BT_BASE_SLAB_H
#define BT_BASE_SLAB_H

/* A fixed number of objects of one size, reserved at init: taking and giving back never calls the heap. Address space
 * is reserved for all of them; memory is taken by those that were in use at the same time, and of an object only as far
 * as it was written to. Any thread; a short mutex around each call. */

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"

/* Of an object that is given back so much stays resident; what was written behind it goes back to the system. */
#define BT_SLAB_KEEP_BYTES (64u * 1024)

struct bt_slab {
    const char *name; /* static */
    uint8_t *base;
    size_t object_bytes, stride;
    uint32_t n_max, n_used;
    uint32_t n_fresh; /* objects below were in use before */
    void *free;       /* list of those that are not now, last one first */
    pthread_mutex_t mutex;
};

/* name: what the objects are. object_bytes, n_max >= 1. BT_ERR_NOMEM: no address space; fini is legal then too. */
enum bt_status bt_slab_init(struct bt_slab *s, const char *name, size_t object_bytes,
                            uint32_t n_max) BT_NODISCARD;
/* An object still in use is a bug. A zeroed slab is legal. */
void bt_slab_fini(struct bt_slab *s);
/* object_bytes, aligned to 16, content undefined; NULL: all are in use. */
void *bt_slab_get(struct bt_slab *s);
void bt_slab_put(struct bt_slab *s, void *object); /* NULL: nothing */
uint32_t bt_slab_used(struct bt_slab *s);

#endif
