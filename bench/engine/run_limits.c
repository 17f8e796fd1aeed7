/* Keeps the measurements of one case. Refuses to know what runs between them. */

#include "bench/engine/run_limits.h"

#include <stdlib.h>
#include "bench/limits/limits.h"

#define LOOKS_MAX 64U
#define SAMPLES   3U

static struct {
    double fma[LOOKS_MAX], read[LOOKS_MAX];
    double fma_best, read_best;
    uint32_t n;
} seen;

void bench_run_limits_forget(void)
{
    seen.n = 0;
    seen.fma_best = seen.read_best = 0;
}

/* Of the kinds first to last: the best median to *median, and *best if it was less. */
static void measure(enum bench_limit first, enum bench_limit last, uint32_t n_threads,
                    double *median, double *best)
{
    *median = 0;
    for (int l = (int)first; l <= (int)last; l++) {
        struct bench_rate r = bench_limit_measure((enum bench_limit)l, n_threads, SAMPLES);
        *median = r.median > *median ? r.median : *median;
        *best = r.best > *best ? r.best : *best;
    }
}

void bench_run_limits_look(uint32_t n_threads)
{
    if (seen.n == LOOKS_MAX) {
        return;
    }
    measure(BENCH_FMA_256, BENCH_FMA_512, n_threads, &seen.fma[seen.n], &seen.fma_best);
    measure(BENCH_READ_1, BENCH_READ_8, n_threads, &seen.read[seen.n], &seen.read_best);
    seen.n++;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

struct bench_run_limits bench_run_limits_tell(void)
{
    qsort(seen.fma, seen.n, sizeof(seen.fma[0]), by_value);
    qsort(seen.read, seen.n, sizeof(seen.read[0]), by_value);
    return (struct bench_run_limits){.fma = seen.n > 0 ? seen.fma[seen.n / 2] : 0,
                                     .fma_best = seen.fma_best,
                                     .read = seen.n > 0 ? seen.read[seen.n / 2] : 0,
                                     .read_best = seen.read_best};
}
