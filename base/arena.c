/* Bump allocation out of a chain of blocks. Owns the blocks; knows nothing of what lies in them.
 * The cap counts the bytes handed out (rounded up to 16), so a hostile message is refused at the
 * same size on every machine. */

#include "base/arena.h"

#include <stdalign.h>
#include <stdint.h>
#include <string.h>
#include "base/mem.h"

#define ALIGN           16u
#define BLOCK_BYTES_MIN ((size_t)4096)
#define BLOCK_BYTES_MAX ((size_t)65536)

struct bt_arena_block {
    struct bt_arena_block *next;
    size_t bytes; /* of data */
    size_t used;
    alignas(ALIGN) unsigned char data[];
};

void bt_arena_init(struct bt_arena *a, size_t cap)
{
    *a = (struct bt_arena){.cap = cap};
}

static struct bt_arena_block *block_add(struct bt_arena *a, size_t n)
{
    size_t bytes = BLOCK_BYTES_MIN;
    if (a->head != NULL) {
        bytes = a->head->bytes < BLOCK_BYTES_MAX / 2 ? a->head->bytes * 2 : BLOCK_BYTES_MAX;
    }
    if (bytes < n) {
        bytes = n;
    }
    size_t total;
    if (!bt_add_size(bytes, sizeof(struct bt_arena_block), &total)) {
        return NULL;
    }
    struct bt_arena_block *b = bt_alloc_aligned(ALIGN, total);
    if (b == NULL) {
        return NULL;
    }
    b->bytes = bytes;
    b->used = 0;
    b->next = a->head;
    a->head = b;
    return b;
}

void *bt_arena_alloc(struct bt_arena *a, size_t n)
{
    if (n == 0) {
        n = 1;
    }
    if (n > SIZE_MAX - (ALIGN - 1)) {
        return NULL;
    }
    n = (n + ALIGN - 1) & ~(size_t)(ALIGN - 1);
    if (a->used > a->cap || n > a->cap - a->used) {
        return NULL;
    }
    struct bt_arena_block *b = a->head;
    if (b == NULL || b->bytes - b->used < n) {
        b = block_add(a, n);
        if (b == NULL) {
            return NULL;
        }
    }
    void *p = b->data + b->used;
    b->used += n;
    a->used += n;
    return p;
}

void *bt_arena_zalloc(struct bt_arena *a, size_t n)
{
    void *p = bt_arena_alloc(a, n);
    if (p != NULL) {
        memset(p, 0, n);
    }
    return p;
}

char *bt_arena_strndup(struct bt_arena *a, const char *s, size_t n)
{
    size_t len = strnlen(s, n);
    size_t bytes;
    if (!bt_add_size(len, 1, &bytes)) {
        return NULL;
    }
    char *p = bt_arena_alloc(a, bytes);
    if (p != NULL) {
        memcpy(p, s, len);
        p[len] = '\0';
    }
    return p;
}

void bt_arena_reset(struct bt_arena *a)
{
    struct bt_arena_block *b = a->head;
    while (b != NULL) {
        struct bt_arena_block *next = b->next;
        bt_free(b);
        b = next;
    }
    a->head = NULL;
    a->used = 0;
}

void bt_arena_rewind(struct bt_arena *a)
{
    struct bt_arena_block *kept = NULL;

    for (struct bt_arena_block *b = a->head, *next; b != NULL; b = next) {
        next = b->next;
        if (b->bytes <= BLOCK_BYTES_MAX && (kept == NULL || b->bytes > kept->bytes)) {
            bt_free(kept);
            kept = b;
        } else {
            bt_free(b);
        }
    }
    if (kept != NULL) {
        kept->next = NULL;
        kept->used = 0;
    }
    a->head = kept;
    a->used = 0;
}

void bt_arena_fini(struct bt_arena *a)
{
    bt_arena_reset(a);
}
