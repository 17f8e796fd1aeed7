#ifndef BT_BASE_ARENA_H
#define BT_BASE_ARENA_H

/* Bump allocator with a cap: everything of one message or one request, freed at once. One thread.
 */

#include <stddef.h>
#include "base/status.h"

struct bt_arena_block;
struct bt_arena {
    struct bt_arena_block *head;
    size_t used;
    size_t cap; /* bytes in all; an allocation past it gives NULL */
};

void bt_arena_init(struct bt_arena *a, size_t cap);
void *bt_arena_alloc(struct bt_arena *a, size_t n) BT_NODISCARD; /* 16-byte aligned, not zeroed */
void *bt_arena_zalloc(struct bt_arena *a, size_t n) BT_NODISCARD;
char *bt_arena_strndup(struct bt_arena *a, const char *s, size_t n) BT_NODISCARD;
void bt_arena_reset(struct bt_arena *a); /* frees all, stays usable */
/* The same, but a block of at most 64 KiB stays for what comes next: what needs no more than was needed before takes no
 * heap call. */
void bt_arena_rewind(struct bt_arena *a);
void bt_arena_fini(struct bt_arena *a);

#endif
