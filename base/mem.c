/* The project's heap: libc's, counted by what libc really reserved for a block, so that no header
 * of our own is needed and an aligned block is freed like any other. Owns the counter, each
 * thread's planned failure and each thread's seal. */

#include "base/mem.h"

#include <execinfo.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "base/assert.h"

static atomic_size_t live_bytes;

/* Allocations until the planned failure; UINT64_MAX: none is planned. */
static _Thread_local uint64_t fail_after = UINT64_MAX;
static _Thread_local bool fail_fired;

/* Calls that took memory; and the seal, NULL: none. */
static _Thread_local uint64_t heap_calls;
static _Thread_local struct bt_seal *seal;

/* Whether a heap call of a sealed thread ends the process: read when the first thread seals itself. */
static bool seal_aborts(void)
{
    static atomic_int known; /* 0: not yet, 1: no, 2: yes */
    int v = atomic_load_explicit(&known, memory_order_relaxed);

    if (v == 0) {
        const char *mode = getenv("BT_HEAP_SEAL");

        v = mode != NULL && strcmp(mode, "abort") == 0 ? 2 : 1;
        atomic_store_explicit(&known, v, memory_order_relaxed);
    }
    return v == 2;
}

static void seal_broken(void)
{
    void *frames[32];
    char msg[160];

    (void)__atomic_fetch_add(&seal->heap_calls, 1, __ATOMIC_RELAXED);
    if (!seal_aborts()) {
        return;
    }
    int n = snprintf(msg, sizeof(msg), "heap call on the sealed %s thread:\n", seal->thread);
    ssize_t w = n > 0 ? write(STDERR_FILENO, msg, (size_t)n) : 0;
    (void)w;     /* nowhere left to report to */
    seal = NULL; /* naming the frames may take memory */
    n = backtrace(frames, sizeof(frames) / sizeof(frames[0]));
    backtrace_symbols_fd(frames, n, STDERR_FILENO);
    abort();
}

static inline void check_seal(void)
{
    if (__builtin_expect(seal != NULL, 0)) {
        seal_broken();
    }
}

static bool must_fail(void)
{
    heap_calls++;
    check_seal();
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
        check_seal();
        atomic_fetch_sub_explicit(&live_bytes, malloc_usable_size(p), memory_order_relaxed);
        free(p);
    }
}

void *bt_reserve(size_t n)
{
    if (must_fail()) {
        return NULL;
    }
    n = n > 0 ? n : 1;
    void *p =
        mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (p == MAP_FAILED) {
        return NULL;
    }
    (void)madvise(
        p, n,
        MADV_NOHUGEPAGE); /* a huge page for each byte written would defeat it; old kernels may not know */
    atomic_fetch_add_explicit(&live_bytes, n, memory_order_relaxed);
    return p;
}

void bt_unreserve(void *p, size_t n)
{
    if (p != NULL) {
        n = n > 0 ? n : 1;
        check_seal();
        atomic_fetch_sub_explicit(&live_bytes, n, memory_order_relaxed);
        (void)munmap(p, n); /* fails for what is no mapping only */
    }
}

void bt_reserve_trim(void *p, size_t n)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t from = ((uintptr_t)p + page - 1) & ~(page - 1),
              end = ((uintptr_t)p + n) & ~(page - 1);

    if (from < end) {
        (void)madvise((char *)p + (from - (uintptr_t)p), end - from, MADV_DONTNEED);
    }
}

void bt_alloc_seal(struct bt_seal *s)
{
    (void)seal_aborts();
    seal = s;
}

struct bt_seal *bt_alloc_unseal(void)
{
    struct bt_seal *s = seal;

    seal = NULL;
    return s;
}

void bt_alloc_reseal(struct bt_seal *s)
{
    seal = s;
}

uint64_t bt_seal_heap_calls(const struct bt_seal *s)
{
    return __atomic_load_n(&s->heap_calls, __ATOMIC_RELAXED);
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

uint64_t bt_test_heap_calls(void)
{
    return heap_calls;
}

size_t bt_test_live_bytes(void)
{
    return atomic_load_explicit(&live_bytes, memory_order_relaxed);
}
