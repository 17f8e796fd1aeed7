#ifndef BT_BENCH_KERNELS_BENCH_LIMITS_H
#define BT_BENCH_KERNELS_BENCH_LIMITS_H

/* What one thread of this machine can do at most: the measures that kernels are compared with. */

#include <stddef.h>

/* Fused multiply-adds on registers, GFLOP/s. vector_bits: 256 or 512; 0 if the CPU has no such unit. */
double bt_bench_fma_peak(int vector_bits);
/* Reading n bytes as four streams, GB/s. One stream alone would flatter the kernels. */
double bt_bench_read_peak(const void *p, size_t n);

#endif
