/* How fast pages move between two processes of this machine: transport x share size x window. This process is P,
 * a child of it is D. Time runs from the first push to D's word that the landing is full. CSV on stdout:
 *   tls,proto,transport,share_bytes,window_bytes,n_shares,seconds,gb_per_s,p_cpu_s,d_cpu_s,ctrl_rtt_us
 * Best of --repeats, or their median with --median. bench/transfer/perftest.py compares it with UCX's own benchmark. */

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/mem.h"
#include "base/options.h"
#include "bench/transfer/bench_pool.h"

#define PINGS       200
#define REPEATS_MAX 100U

struct config {
    char *tls, *shares, *windows, *protos, *p_cpus, *d_cpus;
    uint64_t bytes, pool_bytes;
    uint32_t repeats, device;
    int memory;
    bool median;
};

#define ROW(name, type, field, dflt, lo, hi, arg, help)                                            \
    {name, type, offsetof(struct config, field), dflt, lo, hi, NULL, arg, help}
enum { MEMORY_HOST, MEMORY_CUDA };
static const struct bt_opt options[] = {
    ROW("tls", BT_OPT_STR, tls, "tcp shm", 0, 0, "LIST",
        "Transports to measure, separated by blanks; each as --transport of a daemon takes it."),
    ROW("shares", BT_OPT_LIST, shares, "4096,16384,65536,262144,1048576", 0, 0, "BYTES,...",
        "Sizes of a page's share of one layer: one message each."),
    ROW("windows", BT_OPT_LIST, windows, "262144,1048576,4194304,8388608", 0, 0, "BYTES,...",
        "Bytes in flight; daemons use 4194304."),
    ROW("protos", BT_OPT_LIST, protos, "eager,rndv", 0, 0, "eager|rndv,...", "How they are sent."),
    ROW("bytes", BT_OPT_SIZE, bytes, "256MiB", 1 << 20, 1e12, "SIZE", "Moved in one run."),
    ROW("pool", BT_OPT_SIZE, pool_bytes, "64MiB", 1 << 20, 1e12, "SIZE",
        "Memory that the pages lie in, used round and round: a small one stays in caches."),
    {"memory", BT_OPT_ENUM, offsetof(struct config, memory), "host", 0, 0, "host|cuda", NULL,
     "Whose memory it is; cuda: both sides' pages lie on one device, and go out as nodes send "
     "them."},
    ROW("device", BT_OPT_U32, device, "0", 0, 255, "N", "Index of that device."),
    ROW("repeats", BT_OPT_U32, repeats, "3", 1, REPEATS_MAX, "N", "Runs of each."),
    ROW("p-cpus", BT_OPT_STR, p_cpus, "", 0, 0, "LIST",
        "CPUs of the sender, like 0 or 0-3; empty: those of this process."),
    ROW("d-cpus", BT_OPT_STR, d_cpus, "", 0, 0, "LIST", "CPUs of the receiver."),
    ROW("median", BT_OPT_BOOL, median, "false", 0, 0, NULL, "Print the median, not the best."),
};
static const struct bt_prog prog = {.name = "bench-transfer",
                                    .summary = "How fast pages move between two processes.",
                                    .opts = options,
                                    .n_opts = sizeof(options) / sizeof(options[0])};
static struct config cfg;
static cpu_set_t all_cpus; /* that this process may use; each side takes its part */

struct order { /* P -> D: what comes next; echoed when ready, and again when full */
    uint64_t generation, n_shares, share_bytes;
    double d_cpu_s;
};

static void die(const char *what)
{
    fprintf(stderr, "bench-transfer: %s\n", what);
    exit(1);
}

static void use_cpus(const char *list)
{
    struct bt_err err;
    if (list[0] == 0) {
        return;
    }
    (void)sched_setaffinity(0, sizeof(all_cpus), &all_cpus); /* it was so before */
    if (bt_cpus_use(list, &err) != BT_OK) {
        die(err.msg);
    }
}

static double cpu_seconds(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

/* The wake callback writes one byte into a pipe; the main thread reads events. */
static void on_wake(void *arg)
{
    const int *fd = arg;
    if (write(fd[1], "", 1) < 0 && errno != EAGAIN) {
        die("pipe");
    }
}

static void next_event(struct bt_xfer *x, const int fd[2], struct bt_xfer_event *ev)
{
    char junk[64];
    while (!bt_xfer_poll(x, ev)) {
        if (read(fd[0], junk, sizeof(junk)) < 0) {
            die("pipe");
        }
    }
    if (ev->kind == BT_XFER_PEER_DOWN) {
        fprintf(stderr, "peer down: %s\n", ev->text);
        exit(ev->status == BT_ERR_PEER_LOST ? 0 : 1);
    }
}

/* ---- D ---- */

static uint32_t *page_ids(uint64_t n_shares, uint64_t share_bytes)
{
    uint32_t n_pool = (uint32_t)(cfg.pool_bytes / share_bytes);
    uint32_t *ids = bt_alloc(n_shares * sizeof(*ids));
    for (uint64_t i = 0; ids != NULL && i < n_shares; i++) {
        ids[i] = (uint32_t)(i % n_pool);
    }
    return ids;
}

static void d_open(struct bt_xfer *x, uint64_t peer, const struct order *o, uint8_t *pool)
{
    uint64_t expect[BT_XFER_GROUPS_MAX] = {o->n_shares};
    uint32_t *ids = page_ids(o->n_shares, o->share_bytes);
    struct bt_xfer_landing l = {.generation = o->generation, .peer = peer, .n_groups = 1};
    l.group[0] = (struct bt_xfer_land_group){.base = pool,
                                             .page_stride = o->share_bytes,
                                             .page_layer_bytes = o->share_bytes,
                                             .n_layers = 1,
                                             .n_pages = (uint32_t)o->n_shares,
                                             .page_ids = ids};
    if (bt_xfer_land_open(x, &l) != BT_OK ||
        bt_xfer_land_expect(x, l.ticket, o->generation, expect) != BT_OK ||
        bt_xfer_send_ctrl(x, peer, o, sizeof(*o)) != BT_OK) {
        die("land_open");
    }
    bt_free(ids);
}

static const struct bt_gate_token token = {{1}}; /* of d_main's process */

_Noreturn static void d_main(const char *tls, const char *memory)
{
    int fd[2], device;
    unsigned long long share_max, pool_bytes;
    struct bt_err err;
    struct bt_xfer *x;
    struct bt_xfer_event ev;
    struct bench_pool pool;
    struct order o = {0};
    if (sscanf(memory, "%llu %llu %d", &pool_bytes, &share_max, &device) != 3 || pipe(fd) != 0) {
        die("setup");
    }
    cfg.pool_bytes = pool_bytes;
    bench_pool_open(&pool, cfg.pool_bytes, device, share_max);
    struct bt_xfer_opts opts = {.instance = 2,
                                .token = token,
                                .listen = "127.0.0.1:0",
                                .tls = tls,
                                .wake = on_wake,
                                .wake_arg = fd};
    bench_pool_opts(&pool, &opts);
    if (bt_xfer_create(&opts, &x, &err) != BT_OK) {
        die(err.msg);
    }
    printf("%s\n", bt_xfer_address(x));
    fflush(stdout);
    for (;;) {
        next_event(x, fd, &ev);
        if (ev.kind == BT_XFER_CTRL && ev.n_bytes == sizeof(o)) {
            memcpy(&o, ev.data, sizeof(o));
            if (o.n_shares > 0) {
                d_open(x, ev.peer, &o, pool.base);
            } else if (bt_xfer_send_ctrl(x, ev.peer, &o, sizeof(o)) != BT_OK) { /* ping */
                die("send_ctrl");
            }
        } else if (ev.kind == BT_XFER_LAND_FULL) {
            o.d_cpu_s = cpu_seconds();
            if (bt_xfer_send_ctrl(x, ev.peer, &o, sizeof(o)) != BT_OK ||
                bt_xfer_land_close(x, ev.ticket, ev.generation) != BT_OK) {
                die("send_ctrl");
            }
        }
        bt_xfer_event_free(&ev);
    }
}

/* ---- P ---- */

struct p_side {
    struct bt_xfer *x;
    int fd[2];
    uint64_t peer;
    char transport[200];
};

static struct order wait_ctrl(struct p_side *p)
{
    struct bt_xfer_event ev;
    struct order o;
    do {
        next_event(p->x, p->fd, &ev);
    } while (ev.kind != BT_XFER_CTRL);
    memcpy(&o, ev.data, sizeof(o));
    bt_xfer_event_free(&ev);
    return o;
}

static struct order exchange(struct p_side *p, const struct order *o)
{
    if (bt_xfer_send_ctrl(p->x, p->peer, o, sizeof(*o)) != BT_OK) {
        die("send_ctrl");
    }
    return wait_ctrl(p);
}

struct times {
    double s, p_cpu_s, d_cpu_s;
};

static struct times run_once(struct p_side *p, uint8_t *pool, uint64_t generation,
                             uint64_t n_shares, uint64_t bytes)
{
    struct order o = {.generation = generation, .n_shares = n_shares, .share_bytes = bytes};
    uint32_t *ids = page_ids(n_shares, bytes);
    exchange(p, &o);
    double cpu0 = cpu_seconds();
    uint64_t t0 = bt_clock_ns();
    struct bt_xfer_push u = {.generation = generation,
                             .peer = p->peer,
                             .n_layers = 1,
                             .page_stride = bytes,
                             .page_layer_bytes = bytes,
                             .base = pool,
                             .n_pages = (uint32_t)n_shares,
                             .page_ids = ids};
    if (bt_xfer_push(p->x, &u) != BT_OK) {
        die("push");
    }
    struct order done = wait_ctrl(p);
    struct times t = {.s = (double)(bt_clock_ns() - t0) / 1e9,
                      .p_cpu_s = cpu_seconds() - cpu0,
                      .d_cpu_s = done.d_cpu_s};
    bt_free(ids);
    return t;
}

static uint64_t share_max(void)
{
    uint64_t max = 1;

    for (const char *s = cfg.shares; s != NULL; s = strchr(s, ',')) {
        s += *s == ',';
        uint64_t share = strtoull(s, NULL, 10);
        max = share > max ? share : max;
    }
    return max;
}

static pid_t d_start(const char *tls, const struct bench_pool *pool, char address[80])
{
    int fd[2];
    char self[512], memory[80];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (n < 0 || pipe(fd) != 0) {
        die("pipe");
    }
    self[n] = 0;
    (void)snprintf(memory, sizeof(memory), "%zu %" PRIu64 " %d", pool->bytes, share_max(),
                   cfg.memory == MEMORY_CUDA ? (int)cfg.device : BENCH_POOL_HOST); /* fits */
    pid_t pid = fork();
    if (pid == 0) {
        dup2(fd[1], 1);
        close(fd[0]);
        close(fd[1]);
        use_cpus(cfg.d_cpus);
        execl(self, self, "--d", tls, memory, (char *)NULL);
        _exit(127);
    }
    close(fd[1]);
    FILE *f = fdopen(fd[0], "r");
    if (f == NULL || fgets(address, 80, f) == NULL) {
        die("the other side does not start");
    }
    fclose(f);
    address[strcspn(address, "\n")] = 0;
    return pid;
}

static struct p_side p_start(const char *tls, enum bt_xfer_proto proto, size_t window,
                             const struct bench_pool *pool, pid_t *pid)
{
    static int fd[2]; /* the wake callback's, one at a time */
    struct p_side p = {0};
    struct bt_err err;
    struct bt_xfer_event ev;
    char address[80];

    *pid = d_start(tls, pool, address);
    use_cpus(cfg.p_cpus);
    if (pipe(fd) != 0) {
        die("pipe");
    }
    memcpy(p.fd, fd, sizeof(fd));
    struct bt_xfer_opts o = {.instance = 1,
                             .tls = tls,
                             .proto = proto,
                             .window_bytes = window,
                             .wake = on_wake,
                             .wake_arg = fd};
    bench_pool_opts(pool, &o);
    if (bt_xfer_create(&o, &p.x, &err) != BT_OK ||
        bt_xfer_connect(p.x, address, 2, &token, &p.peer) != BT_OK) {
        die("setup");
    }
    next_event(p.x, p.fd, &ev);
    (void)snprintf(p.transport, sizeof(p.transport), "%s", ev.text); /* cut if long */
    return p;
}

static double ping_us(struct p_side *p)
{
    struct order ping = {0};

    exchange(p, &ping);
    uint64_t t0 = bt_clock_ns();
    for (int i = 0; i < PINGS; i++) {
        exchange(p, &ping);
    }
    return (double)(bt_clock_ns() - t0) / 1e3 / PINGS;
}

static int by_seconds(const void *a, const void *b)
{
    double x = ((const struct times *)a)->s, y = ((const struct times *)b)->s;
    return x < y ? -1 : x > y;
}

/* CPU times of D come as sums. */
static struct times run_all(struct p_side *p, uint8_t *pool, uint64_t *generation, uint64_t n,
                            uint64_t share)
{
    struct times t[REPEATS_MAX];
    double d_cpu = 0;

    for (uint32_t r = 0; r < cfg.repeats; r++) {
        t[r] = run_once(p, pool, (*generation)++, n, share);
        double sum = t[r].d_cpu_s;
        t[r].d_cpu_s = r == 0 ? 0 : sum - d_cpu;
        d_cpu = sum;
    }
    qsort(t, cfg.repeats, sizeof(t[0]), by_seconds);
    return t[cfg.median ? cfg.repeats / 2 : 0];
}

static void bench(const char *tls, const char *proto, size_t window, const struct bench_pool *pool)
{
    pid_t pid;
    struct p_side p =
        p_start(tls, strcmp(proto, "rndv") == 0 ? BT_XFER_PROTO_RNDV : BT_XFER_PROTO_EAGER, window,
                pool, &pid);
    double rtt_us = ping_us(&p);
    uint64_t generation = 1;
    char list[256], *save = NULL;

    (void)snprintf(list, sizeof(list), "%s", cfg.shares); /* cut if long */
    for (char *s = strtok_r(list, ",", &save); s != NULL; s = strtok_r(NULL, ",", &save)) {
        uint64_t share = strtoull(s, NULL, 10);
        if (share == 0 || share > cfg.pool_bytes || share > cfg.bytes) {
            die("--shares: sizes in bytes, none above --pool or --bytes");
        }
        uint64_t n = cfg.bytes / share;
        struct times t = run_all(&p, pool->base, &generation, n, share);
        printf("%s,%s,%s,%" PRIu64 ",%zu,%" PRIu64 ",%.4f,%.3f,%.3f,%.3f,%.1f\n", tls, proto,
               p.transport, share, window, n, t.s, (double)(n * share) / t.s / 1e9, t.p_cpu_s,
               t.d_cpu_s, rtt_us);
        (void)fflush(stdout);
    }
    bt_xfer_destroy(p.x);
    close(p.fd[0]);
    close(p.fd[1]);
    waitpid(pid, NULL, 0);
}

/* Every protocol and window over one transport. */
static void bench_transport(const char *tls, const struct bench_pool *pool)
{
    char protos[64], *save = NULL;

    (void)snprintf(protos, sizeof(protos), "%s", cfg.protos); /* cut if long */
    for (char *p = strtok_r(protos, ",", &save); p != NULL; p = strtok_r(NULL, ",", &save)) {
        char windows[256], *rest = NULL;
        (void)snprintf(windows, sizeof(windows), "%s", cfg.windows); /* cut if long */
        for (char *w = strtok_r(windows, ",", &rest); w != NULL; w = strtok_r(NULL, ",", &rest)) {
            bench(tls, p, strtoull(w, NULL, 10), pool);
        }
    }
}

int main(int argc, char **argv)
{
    struct bt_opt_result res;
    struct bt_err err = {0};

    if (argc == 4 && strcmp(argv[1], "--d") == 0) {
        d_main(argv[2], argv[3]);
    }
    if (bt_opt_parse(&prog, argc, argv, &cfg, &res, &err) != BT_OK) {
        fprintf(stderr, "bench-transfer: %s\n", err.msg);
        return 2;
    }
    if (res.exit_now) {
        return 0;
    }
    if (sched_getaffinity(0, sizeof(all_cpus), &all_cpus) != 0) {
        die("affinity");
    }
    struct bench_pool pool;
    bench_pool_open(&pool, cfg.pool_bytes,
                    cfg.memory == MEMORY_CUDA ? (int)cfg.device : BENCH_POOL_HOST, share_max());
    printf("tls,proto,transport,share_bytes,window_bytes,n_shares,seconds,gb_per_s,p_cpu_s,d_cpu_s,"
           "ctrl_rtt_us\n");
    char *save = NULL;
    for (char *tls = strtok_r(cfg.tls, " ", &save); tls != NULL; tls = strtok_r(NULL, " ", &save)) {
        bench_transport(tls, &pool);
    }
    bench_pool_close(&pool);
    bt_opt_free(&prog, &cfg);
    return 0;
}
