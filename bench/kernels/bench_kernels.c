/* Times the CPU kernels one by one: first checks that they give the bits of plain C, then takes the fastest of several calls, with
 * caches flushed or with weights many times larger than they are. Prints CSV: beside each figure its share of the limits that this
 * machine showed in the same run. */

#include "bench/kernels/bench_kernels_int.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "base/clock.h"
#include "base/mem.h"
#include "base/options.h"
#include "bench/limits/limits.h"

#define SECONDS     0.4 /* measured for each figure */
#define FLUSH_BYTES (64UL << 20)

struct config {
    char *type;
    uint32_t threads;
    int isa, numerics;
    bool quick, cpu_time;
};

#define ROW(name, type, field, dflt, lo, hi, choices, arg, help)                                   \
    {name, type, offsetof(struct config, field), dflt, lo, hi, choices, arg, help}
static const struct bt_opt options[] = {
    ROW("isa", BT_OPT_ENUM, isa, "auto", 0, 0, BT_K_ISAS, NULL, "Instruction set of the kernels."),
    ROW("numerics", BT_OPT_ENUM, numerics, "cpu-f32", 0, 0, BT_K_CLASSES, NULL,
        "Numerics class of the kernels."),
    ROW("threads", BT_OPT_U32, threads, "0", 0, 1024, NULL, "N",
        "Compute threads; 0: every CPU that this process may use."),
    ROW("type", BT_OPT_STR, type, NULL, 0, 0, NULL, "T",
        "Products of this weight type only, and no other kernels."),
    ROW("quick", BT_OPT_BOOL, quick, "false", 0, 0, NULL, NULL, "Fewer shapes."),
    ROW("cpu-time", BT_OPT_BOOL, cpu_time, "false", 0, 0, NULL, NULL,
        "Count CPU time, for machines with other work; means something with one thread only."),
};
static const struct bt_prog prog = {.name = "bench-kernels",
                                    .summary = "Times the CPU kernels one by one.",
                                    .opts = options,
                                    .n_opts = sizeof(options) / sizeof(options[0])};
static struct config cfg;

static uint64_t now_ns(const struct bench *b)
{
    struct timespec ts;

    if (!b->cpu_time) {
        return bt_clock_ns();
    }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
    return (uint64_t)ts.tv_sec * BT_NS_PER_S + (uint64_t)ts.tv_nsec;
}

static void flush_caches(void)
{
    static uint8_t *junk;
    uint32_t sum = 0;

    if (junk == NULL) {
        junk = bench_memory(FLUSH_BYTES);
    }
    for (size_t i = 0; i < FLUSH_BYTES; i += 64) {
        sum += ++junk[i];
    }
    __asm__ volatile("" ::"r"(sum));
}

void bench_time(struct bench *b, const struct bench_figure *f)
{
    double best = 1e9, total = 0;

    for (int rep = 0; rep < 3 || (total < SECONDS && rep < 500); rep++) {
        if (f->flush) {
            flush_caches();
        }
        uint64_t t0 = now_ns(b);
        f->fn(b, f->arg);
        double s = (double)(now_ns(b) - t0) * 1e-9;
        best = s < best ? s : best;
        total += s;
        if (total > 5 * SECONDS) {
            break;
        }
    }
    double gops = f->ops / best * 1e-9, gbytes = f->bytes / best * 1e-9;
    printf("%s,%s,%s,%u,%.7f,%.1f,%.3f,%.3f,%.3f,%.2f,%.3f\n", f->kernel, f->type, f->shape,
           f->rows, best, gops, b->fma > 0 ? gops / b->fma : 0, b->int8 > 0 ? gops / b->int8 : 0,
           b->bf16 > 0 ? gops / b->bf16 : 0, gbytes, gbytes / b->read);
    (void)fflush(stdout);
}

void *bench_memory(size_t bytes)
{
    void *p = bt_alloc_aligned(64, bytes);

    if (p == NULL) {
        fprintf(stderr, "bench-kernels: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    memset(p, 0, bytes);
    return p;
}

uint32_t bench_random(void)
{
    static uint32_t s = 1;

    s = s * 1664525U + 1013904223U;
    return s ^ s >> 16;
}

float *bench_floats(size_t n)
{
    float *p = bench_memory(n * sizeof(*p));

    for (size_t i = 0; i < n; i++) {
        p[i] = (float)(int32_t)bench_random() * 0x1p-31F;
    }
    return p;
}

void bench_equal(const char *what, const float *a, const float *b, size_t n)
{
    if (memcmp(a, b, n * sizeof(*a)) != 0) {
        fprintf(stderr, "bench-kernels: %s: other bits than plain C\n", what);
        exit(1);
    }
}

static void run(struct bench *b)
{
    for (int t = 0; t < BT_DTYPE_COUNT; t++) {
        if (cfg.type == NULL || strcmp(cfg.type, bt_dtype_name((enum bt_dtype)t)) == 0) {
            bench_products(b, (enum bt_dtype)t);
        }
    }
    if (cfg.type == NULL) {
        bench_attention(b, BT_DTYPE_F32);
        bench_attention(b, BT_DTYPE_F16);
        bench_attention(b, BT_DTYPE_BF16);
        bench_attention(b, BT_DTYPE_F8);
        bench_rows(b);
    }
}

/* Says which there are if --type is none of them. */
static bool type_exists(void)
{
    for (int t = 0; cfg.type != NULL && t < BT_DTYPE_COUNT; t++) {
        if (strcmp(cfg.type, bt_dtype_name((enum bt_dtype)t)) == 0) {
            return true;
        }
    }
    if (cfg.type != NULL) {
        fprintf(stderr, "bench-kernels: --type %s: want one of", cfg.type);
        for (int t = 0; t < BT_DTYPE_COUNT; t++) {
            fprintf(stderr, " %s", bt_dtype_name((enum bt_dtype)t));
        }
        fputc('\n', stderr);
    }
    return cfg.type == NULL;
}

int main(int argc, char **argv)
{
    struct bt_opt_result res;
    struct bt_err err = {0};
    struct bench b = {0};

    if (bt_opt_parse(&prog, argc, argv, &cfg, &res, &err) != BT_OK) {
        fprintf(stderr, "bench-kernels: %s\n", err.msg);
        return 2;
    }
    if (res.exit_now) {
        return 0;
    }
    if (!type_exists()) {
        return 2;
    }
    uint32_t threads = cfg.threads != 0 ? cfg.threads : bt_cpus_usable();
    struct bt_k_opts opts = {
        .isa = bt_k_isas[cfg.isa], .n_threads = threads, .numerics = bt_k_classes[cfg.numerics]};
    struct bt_k_opts plain = {.isa = "plain", .n_threads = 1, .numerics = opts.numerics};
    if (bt_k_create_cpu(&opts, &b.k, &err) != BT_OK ||
        bt_k_create_cpu(&plain, &b.plain, &err) != BT_OK) {
        fprintf(stderr, "bench-kernels: %s\n", err.msg);
        return 1;
    }
    b.quick = cfg.quick;
    b.cpu_time = cfg.cpu_time;
    b.fma = bench_limit_fma(threads);
    b.int8 = bench_limit_int8(threads);
    b.bf16 = bench_limit_bf16(threads);
    b.read = bench_limit_read(threads);
    printf("# %s, %s; limits in this run: FMA %.1f GFLOP/s, int8 %.1f GOP/s, bf16 %.1f GFLOP/s, "
           "read %.1f GB/s\n",
           bt_k_describe(b.k), bt_k_numerics(b.k), b.fma, b.int8, b.bf16, b.read);
    printf("kernel,type,shape,rows,seconds,gops,of_fma,of_int8,of_bf16,gbytes_per_s,of_read\n");
    run(&b);
    bt_k_destroy(b.k);
    bt_k_destroy(b.plain);
    bt_opt_free(&prog, &cfg);
    return 0;
}
