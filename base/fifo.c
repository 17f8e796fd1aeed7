/* The ring of blocks: each begins with a header that says how long it is and whether it is still out; the room between
 * the last block and the ring's end, when the next one does not fit there, is a block that nobody has. Refuses to know
 * what is in a block. */

#include "base/fifo.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include "base/assert.h"
#include "base/mem.h"

struct header {
    struct bt_fifo *fifo;
    size_t bytes; /* with this header */
    bool out;
    _Alignas(16) uint8_t data[];
};
_Static_assert(sizeof(struct header) == BT_FIFO_BLOCK_OVERHEAD, "as the public header says");

struct bt_fifo {
    pthread_mutex_t mutex;
    uint8_t *ring;
    size_t bytes;      /* a multiple of a header */
    size_t first, end; /* the oldest block, and behind the newest; both in [0, bytes) */
    size_t used;       /* between them, around the ring's end */
};

static struct header *at(struct bt_fifo *f, size_t pos)
{
    return (struct header *)(void *)(f->ring + pos);
}

enum bt_status bt_fifo_create(size_t bytes, struct bt_fifo **out)
{
    struct bt_fifo *f = bt_calloc(1, sizeof *f);

    BT_ASSERT(bytes > sizeof(struct header));
    if (f == NULL) {
        return BT_ERR_NOMEM;
    }
    f->bytes = (bytes + sizeof(struct header) - 1) / sizeof(struct header) * sizeof(struct header);
    f->ring = bt_reserve(f->bytes);
    if (f->ring == NULL) {
        bt_free(f);
        return BT_ERR_NOMEM;
    }
    pthread_mutex_init(&f->mutex, NULL);
    *out = f;
    return BT_OK;
}

void bt_fifo_destroy(struct bt_fifo *f)
{
    if (f != NULL) {
        pthread_mutex_destroy(&f->mutex);
        bt_unreserve(f->ring, f->bytes);
        bt_free(f);
    }
}

static struct header *append(struct bt_fifo *f, size_t bytes, bool out)
{
    struct header *h = at(f, f->end);

    *h = (struct header){.fifo = f, .bytes = bytes, .out = out};
    f->used += bytes;
    f->end = f->end + bytes == f->bytes ? 0 : f->end + bytes;
    return h;
}

void *bt_fifo_take(struct bt_fifo *f, size_t n)
{
    struct header *h = NULL;
    size_t bytes;

    if (!bt_add_size(n, 2 * sizeof *h - 1, &bytes)) {
        return NULL;
    }
    bytes = bytes / sizeof *h * sizeof *h;
    pthread_mutex_lock(&f->mutex);
    if (f->used == 0) {
        f->first = f->end = 0;
    }
    size_t to_end = f->bytes - f->end, filler = bytes > to_end && f->used > 0 ? to_end : 0;

    if (bytes + filler >= bytes && bytes + filler <= f->bytes - f->used) {
        if (filler > 0) {
            (void)append(f, filler, false);
        }
        h = append(f, bytes, true);
    }
    pthread_mutex_unlock(&f->mutex);
    return h != NULL ? h->data : NULL;
}

void bt_fifo_give(void *block)
{
    if (block == NULL) {
        return;
    }
    struct header *h = (struct header *)(void *)((uint8_t *)block - sizeof *h);
    struct bt_fifo *f = h->fifo;

    pthread_mutex_lock(&f->mutex);
    BT_ASSERT(h->out);
    h->out = false;
    while (f->used > 0 && !at(f, f->first)->out) {
        size_t bytes = at(f, f->first)->bytes;

        f->used -= bytes;
        f->first = f->first + bytes == f->bytes ? 0 : f->first + bytes;
    }
    pthread_mutex_unlock(&f->mutex);
}
