/* Fixed-size objects in one reserved block, with a free list through those that are not in use. Objects that were
 * never used are handed out last, in order, so that the block is touched only as far as needed. Refuses to know what
 * an object is. */

#include "base/slab.h"

#include <string.h>
#include "base/assert.h"
#include "base/mem.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define GUARD_BYTES    32 /* behind each object */
#define POISON(p, n)   __asan_poison_memory_region(p, n)
#define UNPOISON(p, n) __asan_unpoison_memory_region(p, n)
#else
#define GUARD_BYTES    0
#define POISON(p, n)   ((void)0)
#define UNPOISON(p, n) ((void)0)
#endif

enum bt_status bt_slab_init(struct bt_slab *s, const char *name, size_t object_bytes,
                            uint32_t n_max)
{
    size_t stride, bytes;

    BT_ASSERT(object_bytes > 0 && n_max > 0);
    if (object_bytes < sizeof(void *)) { /* the free list lies in the objects */
        object_bytes = sizeof(void *);
    }
    *s = (struct bt_slab){.name = name, .object_bytes = object_bytes, .n_max = n_max};
    pthread_mutex_init(&s->mutex, NULL);
    if (!bt_add_size(object_bytes, GUARD_BYTES + 15, &stride)) {
        return BT_ERR_NOMEM;
    }
    s->stride = stride & ~(size_t)15;
    if (bt_mul_size(s->stride, n_max, &bytes)) {
        s->base = bt_reserve(bytes);
    }
    return s->base != NULL ? BT_OK : BT_ERR_NOMEM;
}

void bt_slab_fini(struct bt_slab *s)
{
    if (s->n_max == 0) {
        return;
    }
    BT_ASSERT(s->n_used == 0);
    if (s->base != NULL) {
        UNPOISON(s->base, s->stride * s->n_fresh);
        bt_unreserve(s->base, s->stride * s->n_max);
    }
    pthread_mutex_destroy(&s->mutex);
    *s = (struct bt_slab){0};
}

void *bt_slab_get(struct bt_slab *s)
{
    pthread_mutex_lock(&s->mutex);
    uint8_t *o = s->free;

    if (o != NULL) {
        UNPOISON(o, s->object_bytes);
        memcpy(&s->free, o, sizeof s->free);
    } else if (s->n_fresh < s->n_max) {
        o = s->base + s->stride * s->n_fresh++;
        POISON(o + s->stride - GUARD_BYTES, GUARD_BYTES);
    }
    s->n_used += o != NULL;
    pthread_mutex_unlock(&s->mutex);
    return o;
}

void bt_slab_put(struct bt_slab *s, void *object)
{
    uint8_t *o = object;

    if (o == NULL) {
        return;
    }
    BT_ASSERT(o >= s->base && (size_t)(o - s->base) < s->stride * s->n_max &&
              (size_t)(o - s->base) % s->stride == 0);
    if (s->object_bytes > BT_SLAB_KEEP_BYTES) {
        bt_reserve_trim(o + BT_SLAB_KEEP_BYTES, s->object_bytes - BT_SLAB_KEEP_BYTES);
    }
    pthread_mutex_lock(&s->mutex);
    BT_ASSERT(s->n_used > 0);
    s->n_used--;
    memcpy(o, &s->free, sizeof s->free);
    s->free = o;
    POISON(o, s->object_bytes);
    pthread_mutex_unlock(&s->mutex);
}

uint32_t bt_slab_used(struct bt_slab *s)
{
    pthread_mutex_lock(&s->mutex);
    uint32_t n = s->n_used;

    pthread_mutex_unlock(&s->mutex);
    return n;
}
