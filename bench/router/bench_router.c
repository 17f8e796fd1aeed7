/* What a router costs: many streams at once through it, from nodes that compute nothing to a client that does as little.
 * Starts baton-router itself, or measures another one (--server, --pid) whose HTTP workers it plays.
 *
 * Prints CPU time of the router for each token, how long tokens were on their way from a node's message to the client's
 * read (both ends of it included), and the router's memory over time. */

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/options.h"
#include "bench/router/load_shared.h"
#include "bench/router/toy_nodes.h"

struct config {
    char *router, *model, *server, *router_opts;
    uint32_t pid, streams, prefill, decode, tokens, seconds, warmup, workers_port;
    double rate, prefill_rate;
    uint64_t max_ttft;
    int protocol;
    bool chat;
};
enum { HTTP, GRPC };

#define ROW(name, type, field, dflt, lo, hi, arg, help)                                            \
    {name, type, offsetof(struct config, field), dflt, lo, hi, NULL, arg, help}
static const struct bt_opt options[] = {
    ROW("router", BT_OPT_STR, router, "build/release/bin/baton-router", 0, 0, "FILE",
        "The router to start."),
    ROW("router-opts", BT_OPT_STR, router_opts, "", 0, 0, "TEXT",
        "More options for it, separated by blanks."),
    ROW("model", BT_OPT_STR, model, NULL, 0, 0, "DIR_OR_GGUF", "Whose tokenizer is used."),
    ROW("server", BT_OPT_STR, server, NULL, 0, 0, "HOST:PORT",
        "A running router that speaks HTTP with its workers, in place of ours."),
    ROW("pid", BT_OPT_U32, pid, "0", 0, 4e9, "PID", "Of that router."),
    ROW("workers-port", BT_OPT_U32, workers_port, "18100", 1024, 60000, "PORT",
        "With --server: its prefill workers listen from here on, then its decode workers."),
    ROW("streams", BT_OPT_U32, streams, "2000", 1, 100000, "N", "Streams at once."),
    ROW("rate", BT_OPT_DOUBLE, rate, "25000", 1, 1e7, "N",
        "Tokens a second, of all streams together."),
    ROW("tokens", BT_OPT_U32, tokens, "512", 2, 100000, "N", "Of each answer."),
    ROW("prefill", BT_OPT_U32, prefill, "4", 1, 1000, "N", "Prefill nodes."),
    ROW("decode", BT_OPT_U32, decode, "32", 1, 1000, "N",
        "Decode nodes; each sends the tokens of all its sequences in one message."),
    ROW("prefill-rate", BT_OPT_DOUBLE, prefill_rate, "0", 0, 1e9, "N",
        "Prompt tokens a second of each prefill node; 0: it takes no time."),
    ROW("max-ttft", BT_OPT_DURATION, max_ttft, "0", 0, 3600e9, "MS",
        "Given to the router; with it the share of first tokens within it is told."),
    ROW("seconds", BT_OPT_U32, seconds, "10", 1, 86400, "N", "Measured."),
    ROW("warmup", BT_OPT_U32, warmup, "4", 1, 3600, "N", "Seconds before that."),
    {"protocol", BT_OPT_ENUM, offsetof(struct config, protocol), "http", 0, 0, "http|grpc",
     "http|grpc", "Of the clients; http: events over HTTP/1.1, one connection each."},
    ROW("chat", BT_OPT_BOOL, chat, "false", 0, 0, NULL, "Chats, not completions."),
};

static const struct bt_prog prog = {
    .name = "bench-router",
    .summary =
        "Measures what a router costs: many streams through it from nodes that compute nothing.",
    .opts = options,
    .n_opts = sizeof options / sizeof options[0],
};

static struct bench_shared shared;
static struct config cfg;
static struct toy_opts toy;
static char address[128], sessions[128];

static void die(const char *what)
{
    fprintf(stderr, "bench-router: %s\n", what);
    exit(1);
}

/* ---- the router ---- */

/* Its log says where it listens. */
static void read_addresses(FILE *log)
{
    char line[1024], *at;

    while (address[0] == '\0' || sessions[0] == '\0') {
        if (fgets(line, sizeof line, log) == NULL) {
            die("the router did not start");
        }
        line[strcspn(line, "\n")] = '\0';
        at = strstr(line, "listening on http://");
        if (at != NULL) {
            snprintf(address, sizeof address, "%s", at + strlen("listening on http://"));
        }
        at = strstr(line, "sessions on ");
        if (at != NULL) {
            snprintf(sessions, sizeof sessions, "%s", at + strlen("sessions on "));
        }
    }
}

static void *drain_log(void *arg)
{
    char line[1024];

    while (fgets(line, sizeof line, arg) != NULL) {
        if (!atomic_load(&shared.stop) &&
            (strstr(line, " warn ") != NULL || strstr(line, " error ") != NULL)) {
            fputs(line, stderr);
        }
    }
    return NULL;
}

static pid_t start_router(void)
{
    char streams[16], ttft[24],
        *argv[64] = {cfg.router,   "--model",      cfg.model,     "--listen",   "127.0.0.1:0",
                     "--sessions", "127.0.0.1:0",  "--queue-max", streams,      "--connections-max",
                     streams,      "--model-name", "m",           "--max-ttft", ttft};
    int fd[2], n = 15;
    pthread_t t;

    snprintf(streams, sizeof streams, "%u", cfg.streams * 2);
    snprintf(ttft, sizeof ttft, "%.0fms", (double)cfg.max_ttft / 1e6);
    for (char *save = NULL, *p = strtok_r(cfg.router_opts, " ", &save); p != NULL && n < 63;
         p = strtok_r(NULL, " ", &save)) {
        argv[n++] = p;
    }
    if (pipe(fd) != 0) {
        die("no pipe");
    }
    pid_t pid = fork();

    if (pid == 0) {
        (void)dup2(fd[1], 1);
        (void)dup2(fd[1], 2);
        (void)close(fd[0]);
        (void)execv(cfg.router, argv);
        _exit(127);
    }
    (void)close(fd[1]);
    FILE *log = fdopen(fd[0], "r");

    if (log == NULL) {
        die("no pipe");
    }
    read_addresses(log);
    if (pthread_create(&t, NULL, drain_log, log) != 0) {
        die("no thread");
    }
    return pid;
}

static double cpu_seconds(pid_t pid)
{
    char path[64], text[1024], *p;
    FILE *f;
    unsigned long user = 0, sys = 0;

    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    f = fopen(path, "r");
    if (f == NULL || fgets(text, sizeof text, f) == NULL || (p = strrchr(text, ')')) == NULL) {
        die("the router is gone");
    }
    (void)fclose(f);
    for (int i = 0; i < 12 && p != NULL; i++) { /* utime is the 14th field, the name the 2nd */
        p = strchr(p + 1, ' ');
    }
    if (p == NULL || sscanf(p, "%lu %lu", &user, &sys) != 2) {
        die("/proc is not as expected");
    }
    return (double)(user + sys) / (double)sysconf(_SC_CLK_TCK);
}

static long rss_kib(pid_t pid)
{
    char path[64], line[256];
    long kib = 0;
    FILE *f;

    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    f = fopen(path, "r");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        if (sscanf(line, "VmRSS: %ld", &kib) == 1) {
            break;
        }
    }
    if (f != NULL) {
        (void)fclose(f);
    }
    return kib;
}

/* ---- the load ---- */

static void *run_nodes(void *arg)
{
    (void)arg;
    if (cfg.server != NULL) {
        toy_workers_run(&shared, &toy, (uint16_t)cfg.workers_port);
    } else {
        toy_nodes_run(&shared, &toy);
    }
    return NULL;
}

static void *run_client(void *arg)
{
    (void)arg;
    if (cfg.protocol == GRPC) {
        bench_client_grpc(&shared, address);
    } else {
        bench_client_http(&shared, address);
    }
    return NULL;
}

static void measure(pid_t pid)
{
    uint64_t t0, n0, e0;
    double cpu0, own0;

    sleep(cfg.warmup);
    printf("memory of the router, MiB:");
    t0 = bt_clock_ns();
    n0 = atomic_load(&shared.n_tokens);
    e0 = atomic_load(&shared.n_events);
    cpu0 = cpu_seconds(pid);
    own0 = cpu_seconds(getpid());
    atomic_store(&shared.measuring, true);
    for (uint32_t i = 0; i < cfg.seconds; i++) {
        if (i % (cfg.seconds / 10 + 1) == 0) {
            printf(" %.1f", (double)rss_kib(pid) / 1024);
            (void)fflush(stdout);
        }
        sleep(1);
    }
    atomic_store(&shared.measuring, false);
    double cpu = cpu_seconds(pid) - cpu0;
    double own = cpu_seconds(getpid()) - own0;
    double s = (double)(bt_clock_ns() - t0) / 1e9;
    double n = (double)(atomic_load(&shared.n_tokens) - n0);
    double e = (double)(atomic_load(&shared.n_events) - e0);

    printf(" %.1f\n", (double)rss_kib(pid) / 1024);
    printf(
        "%.0f tokens/s in %.0f pieces/s; router: %.0f %% of one core, %.2f us a token; nodes and "
        "client: %.0f %%\n",
        n / s, e / s, cpu / s * 100, cpu / n * 1e6, own / s * 100);
}

int main(int argc, char **argv)
{
    struct bt_opt_result res;
    struct bt_err err = {0};
    struct rlimit l;
    pthread_t nodes, client;

    if (bt_opt_parse(&prog, argc, argv, &cfg, &res, &err) != BT_OK) {
        fprintf(stderr, "bench-router: %s\n", err.msg);
        return 2;
    }
    if (res.exit_now) {
        return 0;
    }
    if (cfg.model == NULL || (cfg.server != NULL && (cfg.pid == 0 || cfg.protocol == GRPC))) {
        fprintf(stderr, "bench-router: --model is needed; --server needs --pid and HTTP\n");
        return 2;
    }
    if (getrlimit(RLIMIT_NOFILE, &l) == 0) {
        l.rlim_cur = l.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &l); /* a lower limit shows soon enough */
    }
    bench_shared_init(&shared, cfg.model, cfg.streams, cfg.tokens);
    shared.chat = cfg.chat;
    shared.limit_ns = cfg.max_ttft;
    toy = (struct toy_opts){.sessions = sessions,
                            .n_prefill = cfg.prefill,
                            .n_decode = cfg.decode,
                            .prefill_rate = cfg.prefill_rate,
                            .step_ns = (uint64_t)(cfg.streams / cfg.rate * 1e9),
                            .max_batch = cfg.streams};
    pid_t pid = cfg.server != NULL ? (pid_t)cfg.pid : start_router();

    if (cfg.server != NULL) {
        snprintf(address, sizeof address, "%s", cfg.server);
    }
    if (pthread_create(&nodes, NULL, run_nodes, NULL) != 0) {
        die("no thread");
    }
    sleep(1);
    if (pthread_create(&client, NULL, run_client, NULL) != 0) {
        die("no thread");
    }
    measure(pid);
    atomic_store(&shared.stop, true);
    (void)pthread_join(client, NULL);
    (void)pthread_join(nodes, NULL);
    printf("on its way: p50 %.0f us, p90 %.0f us, p99 %.0f us, at most %.0f us\n",
           (double)bt_token_gaps_quantile(&shared.way, 0.5) / 1e3,
           (double)bt_token_gaps_quantile(&shared.way, 0.9) / 1e3,
           (double)bt_token_gaps_quantile(&shared.way, 0.99) / 1e3,
           (double)shared.way.max_ns / 1e3);
    printf("first token: p50 %.1f ms, p99 %.1f ms, at most %.1f ms\n",
           (double)bt_token_gaps_quantile(&shared.first, 0.5) / 1e6,
           (double)bt_token_gaps_quantile(&shared.first, 0.99) / 1e6,
           (double)shared.first.max_ns / 1e6);
    if (cfg.max_ttft > 0 && shared.first.n > 0) {
        printf("%.2f %% of %lu within --max-ttft, %.2f %% within 1.1 times that\n",
               100.0 * (double)shared.n_within / (double)shared.first.n, shared.first.n,
               100.0 * (double)shared.n_nearly / (double)shared.first.n);
    }
    printf("answers complete %lu, refused %lu, failed %lu\n", atomic_load(&shared.n_done),
           atomic_load(&shared.n_refused), atomic_load(&shared.n_failed));
    if (cfg.server == NULL) {
        (void)kill(pid, SIGTERM); /* drains: */
        (void)kill(pid, SIGINT);  /* now */
        (void)waitpid(pid, NULL, 0);
    }
    bench_shared_fini(&shared);
    bt_opt_free(&prog, &cfg);
    return atomic_load(&shared.n_failed) == 0 ? 0 : 1;
}
