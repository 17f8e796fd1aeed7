/* How fast pages move between two processes of this machine: transport x share size x window. This process is P,
 * a child of it is D. Time runs from the first push to D's word that the landing is full. CSV on stdout:
 *   tls,proto,transport,share_bytes,window_bytes,n_shares,seconds,gb_per_s,p_cpu_s,d_cpu_s,ctrl_rtt_us
 * Best of REPEATS. Arguments: ["tls tls ..."] [bytes per run]. */

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/mem.h"
#include "transfer/xfer.h"

#define REPEATS    3
#define PINGS      200
#define BYTES_DFLT (256u << 20)
#define POOL_BYTES (64u << 20) /* pages are reused round and round */

struct order { /* P -> D: what comes next; echoed when ready, and again when full */
    uint64_t generation, n_shares, share_bytes;
    double d_cpu_s;
};

static double cpu_seconds(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static void die(const char *what)
{
    fprintf(stderr, "bench_transfer: %s\n", what);
    exit(1);
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
    uint32_t n_pool = (uint32_t)(POOL_BYTES / share_bytes);
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

_Noreturn static void d_main(const char *tls)
{
    int fd[2];
    struct bt_err err;
    struct bt_xfer *x;
    struct bt_xfer_event ev;
    uint8_t *pool = bt_alloc(POOL_BYTES);
    struct order o = {0};
    if (pool == NULL || pipe(fd) != 0) {
        die("setup");
    }
    memset(pool, 1, POOL_BYTES);
    struct bt_xfer_opts opts = {.instance = 2,
                                .token = token,
                                .listen = "127.0.0.1:0",
                                .tls = tls,
                                .wake = on_wake,
                                .wake_arg = fd};
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
                d_open(x, ev.peer, &o, pool);
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

static pid_t d_start(const char *tls, char address[80])
{
    int fd[2];
    char self[512];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (n < 0 || pipe(fd) != 0) {
        die("pipe");
    }
    self[n] = 0;
    pid_t pid = fork();
    if (pid == 0) {
        dup2(fd[1], 1);
        close(fd[0]);
        close(fd[1]);
        execl(self, self, "--d", tls, (char *)NULL);
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

static void bench(const char *tls, enum bt_xfer_proto proto, const char *name, size_t window,
                  uint64_t total, uint8_t *pool)
{
    static const size_t shares[] = {4096, 16384, 65536, 262144, 1048576};
    struct p_side p;
    struct bt_err err;
    struct bt_xfer_event ev;
    char address[80];
    pid_t pid = d_start(tls, address);
    struct bt_xfer_opts o = {.instance = 1,
                             .tls = tls,
                             .proto = proto,
                             .window_bytes = window,
                             .wake = on_wake,
                             .wake_arg = p.fd};
    if (pipe(p.fd) != 0 || bt_xfer_create(&o, &p.x, &err) != BT_OK ||
        bt_xfer_connect(p.x, address, 2, &token, &p.peer) != BT_OK) {
        die("setup");
    }
    next_event(p.x, p.fd, &ev);
    snprintf(p.transport, sizeof(p.transport), "%s", ev.text);
    struct order ping = {0};
    exchange(&p, &ping);
    uint64_t t0 = bt_clock_ns();
    for (int i = 0; i < PINGS; i++) {
        exchange(&p, &ping);
    }
    double rtt_us = (double)(bt_clock_ns() - t0) / 1e3 / PINGS;
    uint64_t generation = 1;
    for (size_t i = 0; i < sizeof(shares) / sizeof(shares[0]); i++) {
        uint64_t n = total / shares[i];
        struct times best = {0};
        double d_cpu = 0;
        for (int r = 0; r < REPEATS; r++) {
            struct times t = run_once(&p, pool, generation++, n, shares[i]);
            if (r == 0 || t.s < best.s) {
                best = t;
                best.d_cpu_s = r == 0 ? 0 : t.d_cpu_s - d_cpu;
            }
            d_cpu = t.d_cpu_s;
        }
        printf("%s,%s,%s,%zu,%zu,%llu,%.4f,%.3f,%.3f,%.3f,%.1f\n", tls, name, p.transport,
               shares[i], window, (unsigned long long)n, best.s,
               (double)(n * shares[i]) / best.s / 1e9, best.p_cpu_s, best.d_cpu_s, rtt_us);
        fflush(stdout);
    }
    bt_xfer_destroy(p.x);
    close(p.fd[0]);
    close(p.fd[1]);
    waitpid(pid, NULL, 0);
}

int main(int argc, char **argv)
{
    static const size_t windows[] = {262144, 1048576, 2097152, 8388608};
    if (argc == 3 && strcmp(argv[1], "--d") == 0) {
        d_main(argv[2]);
    }
    char list[256];
    snprintf(list, sizeof(list), "%s", argc > 1 ? argv[1] : "tcp shm");
    uint64_t total = argc > 2 ? strtoull(argv[2], NULL, 0) : BYTES_DFLT;
    uint8_t *pool = bt_alloc(POOL_BYTES);
    if (pool == NULL) {
        die("memory");
    }
    memset(pool, 2, POOL_BYTES);
    printf("tls,proto,transport,share_bytes,window_bytes,n_shares,seconds,gb_per_s,p_cpu_s,d_cpu_s,"
           "ctrl_rtt_us\n");
    char *save = NULL;
    for (char *tls = strtok_r(list, " ", &save); tls != NULL; tls = strtok_r(NULL, " ", &save)) {
        for (size_t i = 0; i < sizeof(windows) / sizeof(windows[0]); i++) {
            bench(tls, BT_XFER_PROTO_EAGER, "eager", windows[i], total, pool);
        }
        bench(tls, BT_XFER_PROTO_RNDV, "rndv", 2097152, total, pool);
    }
    bt_free(pool);
    return 0;
}
