/* Measures the limits: threads that start together, several samples, median and best. Knows no instruction: the loops are in
 * limits_loops.c. */

#include "bench/limits/limits.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "base/clock.h"
#include "base/mem.h"

#define SAMPLE_NS   20000000U
#define SAMPLES_MAX 64U

struct worker {
    struct run *run;
    uint32_t index;
    void *buf; /* reads only */
    pthread_t thread;
};

struct run {
    enum bench_limit limit;
    uint32_t n_threads, n_samples;
    uint64_t rounds;
    pthread_barrier_t barrier;
    struct worker *workers;
    double seconds[SAMPLES_MAX];
};

const char *bench_limit_name(enum bench_limit l)
{
    static const char *const names[BENCH_LIMITS] = {
        "fma avx2",     "fma avx512",  "int8 avx2",     "int8 avx512",    "int8 vnni256",
        "int8 vnni512", "bf16 avx512", "read 1 stream", "read 4 streams", "read 8 streams"};
    return names[l];
}

bool bench_limit_is_read(enum bench_limit l)
{
    return l >= BENCH_READ_1;
}

/* The n-th CPU that this process may use; with fewer CPUs than threads the kernel chooses. */
static void pin(uint32_t n)
{
    cpu_set_t all, one;

    if (sched_getaffinity(0, sizeof(all), &all) != 0 || (uint32_t)CPU_COUNT(&all) <= n) {
        return;
    }
    for (uint32_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &all) && n-- == 0) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            (void)pthread_setaffinity_np(pthread_self(), sizeof(one), &one); /* else not pinned */
            return;
        }
    }
}

static void sample(const struct run *r, const struct worker *w)
{
    if (bench_limit_is_read(r->limit)) {
        bench_loop_read(r->limit, w->buf, BENCH_READ_BYTES);
    } else {
        bench_loop_run(r->limit, r->rounds);
    }
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    struct run *r = w->run;

    pin(w->index);
    if (w->buf != NULL) {
        memset(w->buf, 1, BENCH_READ_BYTES);
    }
    sample(r, w);
    for (uint32_t i = 0; i < r->n_samples; i++) {
        (void)pthread_barrier_wait(&r->barrier);
        uint64_t t0 = bt_clock_ns();
        sample(r, w);
        (void)pthread_barrier_wait(&r->barrier);
        if (w->index == 0) {
            r->seconds[i] = (double)(bt_clock_ns() - t0) * 1e-9;
        }
    }
    return NULL;
}

static bool map_buffers(struct run *r)
{
    for (uint32_t i = 0; i < r->n_threads && bench_limit_is_read(r->limit); i++) {
        void *p = mmap(NULL, BENCH_READ_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                       -1, 0);
        if (p == MAP_FAILED) {
            return false;
        }
        (void)madvise(p, BENCH_READ_BYTES, MADV_HUGEPAGE); /* as packed weights do */
        r->workers[i].buf = p;
    }
    return true;
}

static void unmap_buffers(struct run *r)
{
    for (uint32_t i = 0; i < r->n_threads; i++) {
        if (r->workers[i].buf != NULL) {
            (void)munmap(r->workers[i].buf, BENCH_READ_BYTES);
        }
    }
}

/* Rounds that take about one sample on one thread. */
static uint64_t calibrate(enum bench_limit l)
{
    uint64_t rounds = 20000, best = UINT64_MAX;

    for (int i = 0; i < 5 && !bench_limit_is_read(l); i++) {
        uint64_t t0 = bt_clock_ns();
        bench_loop_run(l, rounds);
        uint64_t ns = bt_clock_ns() - t0;
        best = ns < best ? ns : best;
    }
    return best == UINT64_MAX ? 0 : rounds * SAMPLE_NS / (best + 1) + 1;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* The calling thread is none of the workers: its affinity stays. */
static void run_threads(struct run *r)
{
    for (uint32_t i = 0; i < r->n_threads; i++) {
        r->workers[i].run = r;
        r->workers[i].index = i;
        if (pthread_create(&r->workers[i].thread, NULL, worker_main, &r->workers[i]) != 0) {
            abort(); /* the others wait at the barrier */
        }
    }
    for (uint32_t i = 0; i < r->n_threads; i++) {
        (void)pthread_join(r->workers[i].thread, NULL);
    }
}

struct bench_rate bench_limit_measure(enum bench_limit l, uint32_t n_threads, uint32_t n_samples)
{
    struct run r = {.limit = l,
                    .n_threads = n_threads,
                    .n_samples = n_samples < SAMPLES_MAX ? n_samples : SAMPLES_MAX};
    struct bench_rate rate = {0};

    if (!bench_limit_present(l)) {
        return rate;
    }
    r.rounds = calibrate(l);
    r.workers = bt_calloc(n_threads, sizeof(*r.workers));
    if (r.workers == NULL || pthread_barrier_init(&r.barrier, NULL, n_threads) != 0) {
        bt_free(r.workers);
        return rate;
    }
    if (map_buffers(&r)) {
        run_threads(&r);
        qsort(r.seconds, r.n_samples, sizeof(r.seconds[0]), by_value);
        double work = bench_limit_is_read(l) ? (double)BENCH_READ_BYTES
                                             : (double)r.rounds * (double)bench_loop_ops(l);
        rate.best = work * n_threads / r.seconds[0] * 1e-9;
        rate.median = work * n_threads / r.seconds[r.n_samples / 2] * 1e-9;
    }
    unmap_buffers(&r);
    (void)pthread_barrier_destroy(&r.barrier);
    bt_free(r.workers);
    return rate;
}

static double best_of(enum bench_limit first, enum bench_limit last, uint32_t n_threads)
{
    double best = 0;

    for (int l = (int)first; l <= (int)last; l++) {
        struct bench_rate r = bench_limit_measure((enum bench_limit)l, n_threads, 9);
        best = r.best > best ? r.best : best;
    }
    return best;
}

double bench_limit_fma(uint32_t n_threads)
{
    return best_of(BENCH_FMA_256, BENCH_FMA_512, n_threads);
}

double bench_limit_int8(uint32_t n_threads)
{
    return best_of(BENCH_INT8_256, BENCH_VNNI_512, n_threads);
}

double bench_limit_bf16(uint32_t n_threads)
{
    return best_of(BENCH_BF16_512, BENCH_BF16_512, n_threads);
}

double bench_limit_read(uint32_t n_threads)
{
    return best_of(BENCH_READ_1, BENCH_READ_8, n_threads);
}
