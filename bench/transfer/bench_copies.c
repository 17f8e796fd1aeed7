/* How fast pages get from device memory into slots of pinned memory and back: many of them in one launch of a kernel, beside one
 * copy of the device's runtime for each. Two batches are under way at a time, as in a node that sends. CSV on stdout:
 *   direction,way,share_bytes,at_once,seconds,gb_per_s,shares_per_s
 * Medians of --repeats. */

#include <stdio.h>
#include <stdlib.h>
#include "base/clock.h"
#include "base/mem.h"
#include "base/options.h"
#include "kernels/open.h"

#define REPEATS_MAX 100U
#define BATCH_BYTES                                                                                \
    (4U << 20) /* pages at once: so many bytes, as a peer's window; at most AT_ONCE */
#define AT_ONCE 256U

struct config {
    char *shares;
    uint64_t bytes, pool_bytes;
    uint32_t repeats, device;
};

#define ROW(name, type, field, dflt, lo, hi, arg, help)                                            \
    {name, type, offsetof(struct config, field), dflt, lo, hi, NULL, arg, help}
static const struct bt_opt options[] = {
    ROW("shares", BT_OPT_LIST, shares, "4096,16384,65536,262144,1048576,4194304", 0, 0, "BYTES,...",
        "Sizes of a page's share of one layer."),
    ROW("bytes", BT_OPT_SIZE, bytes, "256MiB", 1 << 20, 1e12, "SIZE", "Copied in one run."),
    ROW("pool", BT_OPT_SIZE, pool_bytes, "256MiB", 16 << 20, 1e12, "SIZE",
        "Device memory that the pages lie in."),
    ROW("device", BT_OPT_U32, device, "0", 0, 255, "N", "Index of the device."),
    ROW("repeats", BT_OPT_U32, repeats, "5", 1, REPEATS_MAX, "N", "Runs of each."),
};
static const struct bt_prog prog = {.name = "bench-copies",
                                    .summary = "How fast pages get out of device memory and in.",
                                    .opts = options,
                                    .n_opts = sizeof(options) / sizeof(options[0])};
static struct config cfg;

static void die(const char *what, int code)
{
    fprintf(stderr, "bench-copies: %s\n", what);
    exit(code);
}

/* Ends when the last copy of a batch, in slots from `first` on, is done. */
static void await(struct bt_k_mover *m, uint32_t first, uint32_t n)
{
    enum bt_status st;

    do {
        st = bt_k_mover_done(m, first + n - 1, false);
    } while (st == BT_ERR_BUSY);
    for (uint32_t i = 0; i < n; i++) {
        if (bt_k_mover_done(m, first + i, false) != BT_OK) {
            die("a copy failed", 1);
        }
    }
}

static double run(struct bt_k_mover *m, uint8_t *pool, uint64_t share, uint32_t at_once,
                  bool to_device)
{
    const uint64_t n_pages = cfg.pool_bytes / share;
    uint64_t n_batches = cfg.bytes / (share * at_once), page = 0, t0 = bt_clock_ns();

    n_batches = n_batches < 2 ? 2 : n_batches;
    for (uint64_t b = 0; b < n_batches + 2; b++) {
        const uint32_t first = (uint32_t)(b % 2) * at_once;

        if (b >= 2) {
            await(m, first, at_once);
        }
        for (uint32_t i = 0; i < at_once && b < n_batches; i++, page++) {
            bt_k_mover_start(m, first + i, pool + page * 37 % n_pages * share, share, to_device);
        }
        bt_k_mover_go(m);
    }
    return (double)(bt_clock_ns() - t0) * 1e-9 / (double)(n_batches * at_once);
}

static int ascending(const void *a, const void *b)
{
    const double *x = a, *y = b;

    return (*x > *y) - (*x < *y);
}

static void measure(struct bt_kctx *k, uint8_t *pool, uint64_t share)
{
    static const char *const ways[] = {"single", "batch"};
    const uint64_t fit = BATCH_BYTES / share;
    const uint32_t at_once = fit < 2 ? 2 : fit > AT_ONCE ? AT_ONCE : (uint32_t)fit;
    double seconds[REPEATS_MAX];

    for (int to_device = 0; to_device < 2; to_device++) {
        for (int way = 0; way < 2; way++) {
            const struct bt_k_mover_opts o = {.slot_bytes = share,
                                              .n_slots = 2 * at_once,
                                              .single_bytes = way == 0 ? 1 : SIZE_MAX};
            struct bt_k_mover *m;
            struct bt_err err = {0};

            if (bt_k_mover_create(k, &o, &m, &err) != BT_OK) {
                die(err.msg, 1);
            }
            (void)run(m, pool, share, at_once, to_device != 0); /* memory and clocks wake up */
            for (uint32_t r = 0; r < cfg.repeats; r++) {
                seconds[r] = run(m, pool, share, at_once, to_device != 0);
            }
            bt_k_mover_destroy(m);
            qsort(seconds, cfg.repeats, sizeof(seconds[0]), ascending);
            const double each = seconds[cfg.repeats / 2];
            printf("%s,%s,%llu,%u,%.9f,%.3f,%.0f\n", to_device != 0 ? "in" : "out", ways[way],
                   (unsigned long long)share, at_once, each, (double)share / each * 1e-9, 1 / each);
            (void)fflush(stdout);
        }
    }
}

int main(int argc, char **argv)
{
    struct bt_opt_result res;
    struct bt_err err = {0};
    struct bt_kctx *k = NULL;

    if (bt_opt_parse(&prog, argc, argv, &cfg, &res, &err) != BT_OK) {
        die(err.msg, 2);
    }
    if (res.exit_now) {
        return 0;
    }
    const struct bt_k_opts o = {.device = cfg.device};
    enum bt_status st = bt_k_create("cuda", &o, &k, &err);
    if (st != BT_OK) {
        die(err.msg, st == BT_ERR_UNSUPPORTED ? 77 : 1);
    }
    uint8_t *pool = bt_k_alloc(k, cfg.pool_bytes);
    if (pool == NULL) {
        die("no device memory", 1);
    }
    printf("direction,way,share_bytes,at_once,seconds,gb_per_s,shares_per_s\n");
    for (char *at = cfg.shares, *end = at; *at != 0; at = *end == ',' ? end + 1 : end) {
        const uint64_t share = strtoull(at, &end, 10);

        if (end == at || (*end != ',' && *end != 0) || share == 0 || share > cfg.pool_bytes) {
            die("--shares: sizes of at least a byte and at most --pool", 2);
        }
        measure(k, pool, share);
    }
    bt_k_free(k, pool, cfg.pool_bytes);
    bt_k_destroy(k);
    bt_opt_free(&prog, &cfg);
    return 0;
}
