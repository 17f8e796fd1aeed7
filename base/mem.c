/* The project's heap: libc's, counted by what libc really reserved for a block, so that no header
 * of our own is needed and an aligned block is freed like any other. Owns the counter and each
 * thread's planned failure. */

#include "base/mem.h"

#include <malloc.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"

static atomic_size_t live_bytes;

/* Allocations until the planned failure; UINT64_MAX: none is planned. */
static _Thread_local uint64_t fail_after = UINT64_MAX;
static _Thread_local bool fail_fired;

static bool must_fail(void)
{
    if (__builtin_expect(fail_after == UINT64_MAX, 1)) {
        return false;
    }
    if (fail_after-- > 0) {
        return false;
    }
    fail_after = UINT64_MAX;
    fail_fired = true;
    return true;
}

static void *counted(void *p)
{
    if (p != NULL) {
        atomic_fetch_add_explicit(&live_bytes, malloc_usable_size(p), memory_order_relaxed);
    }
    return p;
}

void *bt_alloc(size_t n)
{
    return must_fail() ? NULL : counted(malloc(n > 0 ? n : 1));
}

void *bt_calloc(size_t count, size_t size)
{
    size_t n;
    if (!bt_mul_size(count, size, &n) || must_fail()) {
        return NULL;
    }
    return counted(calloc(1, n > 0 ? n : 1));
}

void *bt_realloc(void *p, size_t n)
{
    if (must_fail()) {
        return NULL;
    }
    size_t before = p != NULL ? malloc_usable_size(p) : 0;
    void *q = realloc(p, n > 0 ? n : 1);
    if (q == NULL) {
        return NULL;
    }
    atomic_fetch_sub_explicit(&live_bytes, before, memory_order_relaxed);
    return counted(q);
}

void bt_mem_return_large(void)
{
    /* Without it the threshold grows with what is freed. */
    (void)mallopt(M_MMAP_THRESHOLD, 256 << 10);
    /* Small blocks become one again when they are freed: else the end of a thread's heap is not given back. */
    (void)mallopt(M_MXFAST, 0);
}

void bt_mem_trim(void)
{
    (void)malloc_trim(0); /* whether there was anything to give back */
}

void *bt_alloc_aligned(size_t align, size_t n)
{
    void *p = NULL;
    if (must_fail()) {
        return NULL;
    }
    if (align < sizeof(void *)) {
        align = sizeof(void *);
    }
    if (posix_memalign(&p, align, n > 0 ? n : 1) != 0) {
        return NULL;
    }
    return counted(p);
}

char *bt_memdup(const void *p, size_t n)
{
    size_t bytes;
    if (!bt_add_size(n, 1, &bytes)) {
        return NULL;
    }
    char *copy = bt_alloc(bytes);
    if (copy != NULL) {
        memcpy(copy, p, n);
        copy[n] = '\0';
    }
    return copy;
}

char *bt_strndup(const char *s, size_t n)
{
    return bt_memdup(s, strnlen(s, n));
}

char *bt_strdup(const char *s)
{
    return bt_memdup(s, strlen(s));
}

void bt_free(void *p)
{
    if (p != NULL) {
        atomic_fetch_sub_explicit(&live_bytes, malloc_usable_size(p), memory_order_relaxed);
        free(p);
    }
}

void *bt_grow(void *items, size_t n, size_t *cap, size_t item_bytes)
{
    if (n < *cap) {
        return items;
    }
    size_t more = *cap == 0 ? 32 : *cap * 2, bytes;
    void *grown = bt_mul_size(more, item_bytes, &bytes) ? bt_realloc(items, bytes) : NULL;

    BT_ASSERT(grown != NULL);
    *cap = more;
    return grown;
}

bool bt_mul_size(size_t a, size_t b, size_t *out)
{
    size_t r;
    if (__builtin_mul_overflow(a, b, &r)) {
        return false;
    }
    *out = r;
    return true;
}

bool bt_add_size(size_t a, size_t b, size_t *out)
{
    size_t r;
    if (__builtin_add_overflow(a, b, &r)) {
        return false;
    }
    *out = r;
    return true;
}

void bt_test_fail_alloc(uint64_t nth)
{
    fail_after = nth;
    fail_fired = false;
}

bool bt_test_fail_alloc_off(void)
{
    bool fired = fail_fired;
    fail_after = UINT64_MAX;
    fail_fired = false;
    return fired;
}

size_t bt_test_live_bytes(void)
{
    return atomic_load_explicit(&live_bytes, memory_order_relaxed);
}
