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

/* Zeroed memory that takes room only where it was written to: for tables that are sized for the worst case at create.
 * NULL when memory is out. Goes back with bt_unreserve and the same n; (NULL, n) is legal. */
void *bt_reserve(size_t n) BT_NODISCARD;
void bt_unreserve(void *p, size_t n);
/* Inside of a reserved block: what was written to [p, p + n) goes back to the system as far as whole pages lie in it.
 * The content is not to be relied on after it. Not a heap call. */
void bt_reserve_trim(void *p, size_t n);

/* A list of n items with room for one more, where it is now; *cap: items that there is room for, 0 with NULL. For lists
 * that grow to their working size and stay there, of things whose loss would break a promise: without memory the
 * process ends. */
void *bt_grow(void *items, size_t n, size_t *cap, size_t item_bytes) BT_NODISCARD;

/* ---- sealed threads ----
 *
 * A thread whose work must never wait for the heap seals itself when its preparations are over. From then on each call
 * above on that thread that takes or frees heap memory (growing bt_bufs, maps and arenas included; bt_free(NULL) not)
 * still works, but is counted. Where the program was started with BT_HEAP_SEAL=abort in its environment, as all tests
 * of daemons do, it ends the process instead, with the place on stderr.
 *
 * Counted are our calls only: what UCX, libc and other libraries take for themselves is not seen here. */
struct bt_seal {
    const char *thread;  /* for the message; static */
    uint64_t heap_calls; /* read with bt_seal_heap_calls() */
};

/* The calling thread, until it ends. s is the caller's and outlives the thread. */
void bt_alloc_seal(struct bt_seal *s);
/* Lifts the calling thread's seal for work off the request path (making a connection, say), and puts it back.
 * Unseal gives what reseal wants: NULL where there was no seal, so pairs may lie inside each other. */
struct bt_seal *bt_alloc_unseal(void) BT_NODISCARD;
void bt_alloc_reseal(struct bt_seal *s);
uint64_t bt_seal_heap_calls(const struct bt_seal *s); /* any thread */

/* false on overflow; *out is then untouched. */
bool bt_mul_size(size_t a, size_t b, size_t *out) BT_NODISCARD;
bool bt_add_size(size_t a, size_t b, size_t *out) BT_NODISCARD;

/* Tests: the nth (0-based) allocation of this thread from now on fails; off() tells whether one
 * did. */
void bt_test_fail_alloc(uint64_t nth);
bool bt_test_fail_alloc_off(void);
size_t bt_test_live_bytes(void);
/* Calls of this thread that took heap memory, since it began. */
uint64_t bt_test_heap_calls(void);

#endif
