/* Every task of every run runs exactly once, with any number of threads and tasks; workers sleep when idle. */

#include "kernels/cpu/cpu_pool.h"

#include <stdatomic.h>
#include <sys/resource.h>
#include <time.h>
#include "base/mem.h"
#include "tests/check.h"

#define TASKS_MAX 300

struct count {
    _Atomic uint32_t runs[TASKS_MAX];
    uint32_t n_threads;
    _Atomic uint32_t bad_thread;
};

static void count_task(void *arg, uint32_t task, uint32_t thread)
{
    struct count *c = arg;
    atomic_fetch_add(&c->runs[task], 1);
    if (thread >= c->n_threads) {
        atomic_store(&c->bad_thread, 1);
    }
}

static void test_runs(uint32_t n_threads)
{
    static const uint32_t n_tasks[] = {0, 1, 2, 3, 7, 64, TASKS_MAX};
    static struct count c;
    struct bt_pool *p = NULL;
    uint32_t want[TASKS_MAX] = {0};

    memset(&c, 0, sizeof(c));
    c.n_threads = n_threads;
    CHECK_EQ(bt_pool_create(n_threads, &p), BT_OK);
    CHECK_EQ(bt_pool_threads(p), n_threads);
    for (uint32_t round = 0; round < 3000; round++) {
        uint32_t n = n_tasks[round % 7];
        bt_pool_run(p, count_task, &c, n);
        for (uint32_t i = 0; i < n; i++) {
            want[i]++;
        }
        if (round % 500 == 0) { /* long enough for the workers to fall asleep */
            nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
        }
    }
    int bad = 0;
    for (uint32_t i = 0; i < TASKS_MAX; i++) {
        bad += atomic_load(&c.runs[i]) != want[i];
    }
    CHECK_EQ(bad, 0);
    CHECK_EQ(atomic_load(&c.bad_thread), 0);
    bt_pool_destroy(p);
}

static double cpu_seconds(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static void test_idle(void)
{
    static struct count c = {.n_threads = 8};
    struct bt_pool *p = NULL;

    CHECK_EQ(bt_pool_create(8, &p), BT_OK);
    bt_pool_run(p, count_task, &c, 64);
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    double before = cpu_seconds();
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    CHECK(cpu_seconds() - before < 0.01);
    bt_pool_destroy(p);
    bt_pool_destroy(NULL);
}

int main(void)
{
    for (uint32_t n = 1; n <= 5; n++) {
        test_runs(n);
    }
    test_idle();
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
