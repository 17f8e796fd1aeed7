/* A stack that many push to and whose whole content one takes: so no block can come back while it is being taken. */

#include "base/spent.h"

#include <stdbool.h>
#include <string.h>
#include "base/mem.h"

void bt_spent_add(struct bt_spent *s, void *block)
{
    void *first = __atomic_load_n(&s->first, __ATOMIC_RELAXED);

    if (block == NULL) {
        return;
    }
    do {
        memcpy(block, &first, sizeof first);
    } while (!__atomic_compare_exchange_n(&s->first, &first, block, true, __ATOMIC_RELEASE,
                                          __ATOMIC_RELAXED));
}

void bt_spent_free(struct bt_spent *s)
{
    void *block = __atomic_load_n(&s->first, __ATOMIC_RELAXED) == NULL
                      ? NULL
                      : __atomic_exchange_n(&s->first, NULL, __ATOMIC_ACQUIRE);

    while (block != NULL) {
        void *next;

        memcpy(&next, block, sizeof next);
        bt_free(block);
        block = next;
    }
}
