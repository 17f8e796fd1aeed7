#ifndef BT_BASE_MEM_H
#define BT_BASE_MEM_H

/* Heap, counted, with an allocation that a test can make fail. All memory of the project outside
 * third-party libraries comes from here; any thread. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"

/* NULL when memory is out (or a test asked for it). n = 0 gives a unique pointer. */
void *bt_alloc(size_t n) BT_NODISCARD;
void *bt_calloc(size_t count, size_t size) BT_NODISCARD; /* zeroed; overflow gives NULL */
void *bt_realloc(void *p, size_t n) BT_NODISCARD;        /* old block stays on failure */
void *bt_alloc_aligned(size_t align,
                       size_t n) BT_NODISCARD; /* align: power of two; freed with bt_free */
char *bt_strdup(const char *s) BT_NODISCARD;
char *bt_strndup(const char *s, size_t n) BT_NODISCARD; /* ends at a NUL inside s */
char *bt_memdup(const void *p, size_t n) BT_NODISCARD;  /* all n bytes, and a NUL behind them */
void bt_free(void *p);

/* For programs whose large blocks come and go: from now on a block of 256 KiB or more goes back to the system when it is
 * freed. Costs page faults. At start. */
void bt_mem_return_large(void);
/* Gives back what many small blocks have left behind. Takes milliseconds for each 100 MiB, and other threads'
 * allocations may wait for some of it. */
void bt_mem_trim(void);

/* A list of n items with room for one more, where it is now; *cap: items that there is room for, 0 with NULL. For lists
 * that grow to their working size and stay there, of things whose loss would break a promise: without memory the
 * process ends. */
void *bt_grow(void *items, size_t n, size_t *cap, size_t item_bytes) BT_NODISCARD;

/* false on overflow; *out is then untouched. */
bool bt_mul_size(size_t a, size_t b, size_t *out) BT_NODISCARD;
bool bt_add_size(size_t a, size_t b, size_t *out) BT_NODISCARD;

/* Tests: the nth (0-based) allocation of this thread from now on fails; off() tells whether one
 * did. */
void bt_test_fail_alloc(uint64_t nth);
bool bt_test_fail_alloc_off(void);
size_t bt_test_live_bytes(void);

#endif
