#ifndef BT_BASE_SPENT_H
#define BT_BASE_SPENT_H

/* Heap blocks on their way back from a sealed thread (base/mem.h) that is done with them to the thread that made them,
 * which frees them. Without a lock. Zero-initialised is empty and valid. */

struct bt_spent {
    void *first; /* a list through the blocks */
};

/* Any thread. block: from bt_alloc, of at least 8 bytes, with nothing in it that anybody wants; NULL: nothing. */
void bt_spent_add(struct bt_spent *s, void *block);
/* Frees what was added so far. Any thread that may call the heap. */
void bt_spent_free(struct bt_spent *s);

#endif
