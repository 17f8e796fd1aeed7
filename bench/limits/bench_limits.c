/* Prints what this machine can do at most: arithmetic by instruction set, reading of memory; with one thread and with several. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/clock.h"
#include "base/mem.h"
#include "base/options.h"
#include "bench/limits/limits.h"

struct config {
    uint32_t threads, samples, burn;
    bool json;
};

#define ROW(name, type, field, dflt, lo, hi, arg, help)                                            \
    {name, type, offsetof(struct config, field), dflt, lo, hi, NULL, arg, help}
static const struct bt_opt options[] = {
    ROW("threads", BT_OPT_U32, threads, "0", 0, 1024, "N",
        "Threads of the second column; 0: every CPU that this process may use."),
    ROW("samples", BT_OPT_U32, samples, "15", 1, 64, "N", "Samples of each; the median is shown."),
    ROW("burn", BT_OPT_U32, burn, "0", 0, 86400, "S",
        "Measure nothing: read memory on one thread for so many seconds, to disturb others."),
    ROW("json", BT_OPT_BOOL, json, "false", 0, 0, NULL, "One JSON object, nothing else."),
};
static const struct bt_prog prog = {.name = "bench-limits",
                                    .summary = "What this machine can do at most.",
                                    .opts = options,
                                    .n_opts = sizeof(options) / sizeof(options[0])};

static struct config cfg;

/* "model name" of /proc/cpuinfo, made safe for a JSON string. */
static void cpu_name(char out[128])
{
    char line[256];
    FILE *f = fopen("/proc/cpuinfo", "re");

    (void)snprintf(out, 128, "unknown CPU");
    while (f != NULL && fgets(line, sizeof(line), f) != NULL) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon != NULL) {
            (void)snprintf(out, 128, "%.120s", colon + 2); /* cut if long */
            break;
        }
    }
    if (f != NULL) {
        (void)fclose(f);
    }
    for (char *p = out; *p != 0; p++) {
        if (*p == '\n') {
            *p = 0;
            break;
        }
        *p = *p == '"' || *p == '\\' || *p < ' ' ? ' ' : *p;
    }
}

static void print_row(enum bench_limit l, bool first)
{
    struct bench_rate one = bench_limit_measure(l, 1, cfg.samples);
    struct bench_rate all = bench_limit_measure(l, cfg.threads, cfg.samples);

    if (cfg.json) {
        printf("%s\"%s\":{\"1\":%.2f,\"1_best\":%.2f,\"n\":%.2f,\"n_best\":%.2f}", first ? "" : ",",
               bench_limit_name(l), one.median, one.best, all.median, all.best);
    } else {
        printf("%-16s %-8s %9.1f %9.1f %9.1f %9.1f\n", bench_limit_name(l),
               bench_limit_is_read(l)                                            ? "GB/s"
               : l == BENCH_FMA_256 || l == BENCH_FMA_512 || l == BENCH_BF16_512 ? "GFLOP/s"
                                                                                 : "GOP/s",
               one.median, one.best, all.median, all.best);
    }
    (void)fflush(stdout);
}

static void burn(void)
{
    uint64_t end = bt_clock_ns() + cfg.burn * BT_NS_PER_S;
    void *p = bt_alloc_aligned(64, BENCH_READ_BYTES);

    if (p == NULL) {
        return;
    }
    memset(p, 1, BENCH_READ_BYTES);
    while (bt_clock_ns() < end) {
        bench_loop_read(BENCH_READ_4, p, BENCH_READ_BYTES);
    }
    bt_free(p);
}

int main(int argc, char **argv)
{
    struct bt_opt_result res;
    struct bt_err err = {0};
    double load = 0;
    char cpu[128];
    bool first = true;

    if (bt_opt_parse(&prog, argc, argv, &cfg, &res, &err) != BT_OK) {
        fprintf(stderr, "bench-limits: %s\n", err.msg);
        return 2;
    }
    if (res.exit_now) {
        return 0;
    }
    if (cfg.burn > 0) {
        burn();
        return 0;
    }
    cfg.threads = cfg.threads != 0 ? cfg.threads : bt_cpus_usable();
    cpu_name(cpu);
    (void)getloadavg(&load, 1); /* 0 where it is not told */
    if (cfg.json) {
        printf("{\"cpu\":\"%s\",\"threads\":%u,\"load\":%.1f,\"limits\":{", cpu, cfg.threads, load);
    } else {
        printf("%s, load average %.1f\n%-16s %-8s %9s %9s %4u thr's %9s\n", cpu, load, "limit",
               "unit", "1 thread", "best", cfg.threads, "best");
    }
    for (int l = 0; l < BENCH_LIMITS; l++) {
        if (bench_limit_present((enum bench_limit)l)) {
            print_row((enum bench_limit)l, first);
            first = false;
        }
    }
    printf(cfg.json ? "}}\n" : "");
    bt_opt_free(&prog, &cfg);
    return 0;
}
