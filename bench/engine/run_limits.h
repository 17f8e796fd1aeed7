#ifndef BT_BENCH_ENGINE_RUN_LIMITS_H
#define BT_BENCH_ENGINE_RUN_LIMITS_H

/* What the machine could do while a case ran: FMA and reading, measured shortly between its steps. On a machine that others use
 * memory is twice as fast at one moment as at another: only medians of both in turn, or the best of both, tell a share. */

#include <stdint.h>

struct bench_run_limits {
    double fma, fma_best;   /* GFLOP/s; the median of what was seen, and the best */
    double read, read_best; /* GB/s */
};

void bench_run_limits_forget(void);
/* Half a second. What is over 64 measurements since forget is left out. */
void bench_run_limits_look(uint32_t n_threads);
/* Zeros if nothing was measured. */
struct bench_run_limits bench_run_limits_tell(void);

#endif
