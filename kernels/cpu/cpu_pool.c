/* Fork-join over a fixed set of threads. Owns the threads and the way they sleep; knows nothing about kernels, and
 * results never depend on which thread takes which task.
 *
 * A run opens a gate: workers that come while it is open count themselves in, take task numbers from a shared counter and
 * count themselves out. The caller works too; when no number is left it closes the gate and waits only for those inside.
 * So a worker that the kernel has not woken yet (two daemons on two cores) delays nobody. */

#include "kernels/cpu/cpu_pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "base/assert.h"
#include "base/log.h"
#include "base/mem.h"

#define GATE_OPEN 0x80000000U
#define SPIN_MAX  1500U /* pauses, some 10 to 50 µs: about the gap between two kernels of one step */

struct bt_pool {
    bt_pool_fn *fn;
    void *arg;
    uint32_t n_tasks;
    uint32_t n_workers;
    _Alignas(64) _Atomic uint32_t generation; /* futex: one more per run */
    _Atomic uint32_t n_sleeping;
    _Atomic bool stop;
    _Alignas(64) _Atomic uint32_t next_task;
    _Alignas(64) _Atomic uint32_t gate; /* futex: GATE_OPEN | workers inside */
    _Atomic uint32_t caller_waits;
    pthread_t *threads;
    struct worker {
        struct bt_pool *pool;
        uint32_t index;
    } *workers;
};

static void futex_wait(_Atomic uint32_t *word, uint32_t value)
{
    (void)syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL,
                  0); /* any wake is rechecked */
}

static void futex_wake(_Atomic uint32_t *word, int n)
{
    (void)syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0); /* nobody there is fine */
}

static void cpu_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#else
    __asm__ volatile("" ::: "memory");
#endif
}

static void take_tasks(struct bt_pool *p, uint32_t thread)
{
    bt_pool_fn *fn = p->fn;
    void *arg = p->arg;
    uint32_t n = p->n_tasks;
    uint32_t task = atomic_fetch_add_explicit(&p->next_task, 1, memory_order_relaxed);

    while (task < n) {
        fn(arg, task, thread);
        task = atomic_fetch_add_explicit(&p->next_task, 1, memory_order_relaxed);
    }
}

static bool gate_enter(struct bt_pool *p)
{
    uint32_t g = atomic_load(&p->gate);

    while (g & GATE_OPEN) {
        if (atomic_compare_exchange_weak(&p->gate, &g, g + 1)) {
            return true;
        }
    }
    return false;
}

static void gate_leave(struct bt_pool *p)
{
    /* 1: closed, and this was the last one inside. */
    if (atomic_fetch_sub(&p->gate, 1) == 1 && atomic_load(&p->caller_waits) != 0) {
        futex_wake(&p->gate, 1);
    }
}

/* Returns the new generation. */
static uint32_t wait_for_run(struct bt_pool *p, uint32_t seen)
{
    for (uint32_t i = 0; i < SPIN_MAX; i++) {
        uint32_t g = atomic_load_explicit(&p->generation, memory_order_acquire);
        if (g != seen) {
            return g;
        }
        cpu_pause();
    }
    atomic_fetch_add(&p->n_sleeping, 1);
    uint32_t g = atomic_load(&p->generation);
    while (g == seen) {
        futex_wait(&p->generation, seen);
        g = atomic_load(&p->generation);
    }
    atomic_fetch_sub(&p->n_sleeping, 1);
    return g;
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    struct bt_pool *p = w->pool;
    uint32_t seen = 0;

    bt_log_thread("compute");
    for (;;) {
        seen = wait_for_run(p, seen);
        if (atomic_load(&p->stop)) {
            return NULL;
        }
        if (gate_enter(p)) {
            take_tasks(p, w->index);
            gate_leave(p);
        }
    }
}

void bt_pool_run(struct bt_pool *p, bt_pool_fn *fn, void *arg, uint32_t n_tasks)
{
    if (n_tasks <= 1 || p->n_workers == 0) {
        for (uint32_t i = 0; i < n_tasks; i++) {
            fn(arg, i, 0);
        }
        return;
    }
    p->fn = fn;
    p->arg = arg;
    p->n_tasks = n_tasks;
    atomic_store_explicit(&p->next_task, 0, memory_order_relaxed);
    atomic_store(&p->gate, GATE_OPEN);
    atomic_fetch_add(&p->generation, 1);
    if (atomic_load(&p->n_sleeping) != 0) {
        futex_wake(&p->generation, (int)(n_tasks - 1 < p->n_workers ? n_tasks - 1 : p->n_workers));
    }
    take_tasks(p, 0);

    uint32_t inside = atomic_fetch_and(&p->gate, ~GATE_OPEN) & ~GATE_OPEN;
    for (uint32_t i = 0; inside != 0 && i < SPIN_MAX; i++) {
        cpu_pause();
        inside = atomic_load(&p->gate);
    }
    if (inside != 0) {
        atomic_store(&p->caller_waits, 1);
        for (inside = atomic_load(&p->gate); inside != 0; inside = atomic_load(&p->gate)) {
            futex_wait(&p->gate, inside);
        }
        atomic_store(&p->caller_waits, 0);
    }
}

uint32_t bt_pool_threads(const struct bt_pool *p)
{
    return p->n_workers + 1;
}

enum bt_status bt_pool_create(uint32_t n_threads, struct bt_pool **out)
{
    BT_ASSERT(n_threads >= 1);
    struct bt_pool *p = bt_alloc_aligned(64, sizeof(*p));
    if (p == NULL) {
        return BT_ERR_NOMEM;
    }
    *p = (struct bt_pool){0};
    p->threads = bt_calloc(n_threads, sizeof(*p->threads));
    p->workers = bt_calloc(n_threads, sizeof(*p->workers));
    if (p->threads == NULL || p->workers == NULL) {
        bt_pool_destroy(p);
        return BT_ERR_NOMEM;
    }
    for (uint32_t i = 0; i + 1 < n_threads; i++) {
        p->workers[i] = (struct worker){.pool = p, .index = i + 1};
        if (pthread_create(&p->threads[i], NULL, worker_main, &p->workers[i]) != 0) {
            bt_pool_destroy(p);
            return BT_ERR_NOMEM;
        }
        p->n_workers++;
    }
    *out = p;
    return BT_OK;
}

void bt_pool_destroy(struct bt_pool *p)
{
    if (p == NULL) {
        return;
    }
    atomic_store(&p->stop, true);
    atomic_fetch_add(&p->generation, 1);
    futex_wake(&p->generation, INT_MAX);
    for (uint32_t i = 0; i < p->n_workers; i++) {
        pthread_join(p->threads[i], NULL);
    }
    bt_free(p->threads);
    bt_free(p->workers);
    bt_free(p);
}
