#ifndef BT_BENCH_LIMITS_LIMITS_H
#define BT_BENCH_LIMITS_LIMITS_H

/* What this machine can do at most: the measures that kernels, engine and peers are compared with. */

#include <stdbool.h>
#include <stdint.h>

enum bench_limit {
    BENCH_FMA_256,  /* fused multiply-adds of f32 on registers, AVX2 */
    BENCH_FMA_512,  /* AVX-512 */
    BENCH_INT8_256, /* u8 x s8 by maddubs, madd, add: AVX2 */
    BENCH_INT8_512, /* the same, AVX-512 */
    BENCH_VNNI_256, /* u8 x s8 by vpdpbusd */
    BENCH_VNNI_512,
    BENCH_BF16_512, /* vdpbf16ps */
    BENCH_READ_1,   /* reading memory, one stream a thread */
    BENCH_READ_4,   /* four streams a thread */
    BENCH_READ_8,
    BENCH_LIMITS,
};

struct bench_rate {
    double median,
        best; /* of the samples: 1e9 operations (multiply and add count as two) or bytes a second */
};

const char *bench_limit_name(enum bench_limit l);
bool bench_limit_is_read(enum bench_limit l);
/* Whether this CPU and build have the instructions. */
bool bench_limit_present(enum bench_limit l);
/* Measures n_threads threads at once, each on its own CPU as far as there are any and, for reads, with its own
 * BENCH_READ_BYTES; all threads' rates together. A sample takes some 20 ms of wall time: on a machine with other work the best
 * is nearer to the limit. Zeros if not present or out of memory. Blocks. */
#define BENCH_READ_BYTES (256UL << 20)
struct bench_rate bench_limit_measure(enum bench_limit l, uint32_t n_threads, uint32_t n_samples);
/* The best of several kinds, measured now; n_threads as above. */
double bench_limit_fma(uint32_t n_threads);
double bench_limit_int8(uint32_t n_threads);
double bench_limit_bf16(uint32_t n_threads); /* 0 without an instruction for them */
double bench_limit_read(uint32_t n_threads);

/* limits_loops.c: one round of work on the calling thread. Arithmetic: `rounds` times bench_loop_ops() operations. Reads: the
 * whole of p, n bytes (a multiple of 64 KiB), once. */
uint64_t bench_loop_ops(enum bench_limit l);
void bench_loop_run(enum bench_limit l, uint64_t rounds);
void bench_loop_read(enum bench_limit l, const void *p, uint64_t n);

#endif
