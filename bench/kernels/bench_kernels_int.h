#ifndef BT_BENCH_KERNELS_BENCH_KERNELS_INT_H
#define BT_BENCH_KERNELS_BENCH_KERNELS_INT_H

/* Shared by the parts of bench-kernels: what is measured, how a figure is timed and printed. */

#include "kernels/backend.h"

struct bench {
    struct bt_kctx *k;     /* measured */
    struct bt_kctx *plain; /* plain C of the same numerics class: what k must agree with */
    bool quick;
    bool cpu_time;                /* count this process's CPU time; one thread only */
    double fma, int8, bf16, read; /* limits with as many threads, 1e9 a second */
};

/* One figure: the fastest of several calls of fn(arg). ops: multiplications and additions; bytes: what must come from memory.
 * fn is called at least 3 times, for about 0.4 s. flush: memory as large as the last-level caches is read before each call. */
struct bench_figure {
    const char *kernel, *type, *shape;
    uint32_t rows;
    double ops, bytes;
    bool flush;
    void (*fn)(struct bench *b, void *arg);
    void *arg;
};
void bench_time(struct bench *b, const struct bench_figure *f);

void *bench_memory(size_t bytes); /* zeroed; ends the program when there is none */
float *bench_floats(size_t n);    /* in (-1, 1) */
uint32_t bench_random(void);
/* Ends the program unless the first n floats are equal, bit for bit. */
void bench_equal(const char *what, const float *a, const float *b, size_t n);

/* bench_products.c: products and embedding rows of one weight type. */
void bench_products(struct bench *b, enum bt_dtype t);
/* bench_rows.c */
void bench_attention(struct bench *b, enum bt_dtype t);
void bench_rows(struct bench *b);

#endif
