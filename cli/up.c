/* baton up: router, prefill and decode nodes as child processes. Owns the children and their
 * output; knows of the daemons only their names, options and two log lines that tell addresses. */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <poll.h>
#include <unistd.h>
#include "base/assert.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/options.h"
#include "cli/cli.h"
#include "cli/client.h"
#include "cli/fetch.h"

#define CHILDREN_MAX   130
#define OWN_ARGS_MAX   32 /* of a child's arguments, those that come from here */
#define LINE_MAX_BYTES 8192u
#define READY_POLL_NS  (100 * BT_NS_PER_MS)
#define DRAIN_NS       (30 * BT_NS_PER_S)   /* the daemons' default */
#define KILL_AFTER_NS  (5 * BT_NS_PER_S)    /* beyond that */
#define SAY_STOP_NS    (300 * BT_NS_PER_MS) /* an idle cluster is gone before */
#define SAY_LOAD_NS    (2 * BT_NS_PER_S)    /* between progress lines where there is no terminal */

struct up_cfg {
    char *model, *listen;
    uint32_t n_prefill, n_decode;
    bool verbose;
};

static const struct bt_opt options[] = {
    {"model", BT_OPT_STR, offsetof(struct up_cfg, model), NULL, 0, 0, NULL, "DIR_OR_GGUF",
     "Model to serve (default: SmolLM2-135M-Instruct, fetched once into the cache folder)."},
    {"prefill", BT_OPT_U32, offsetof(struct up_cfg, n_prefill), "1", 0, 64, NULL, "N",
     "Number of prefill nodes. 0: the decode nodes compute prompts (--role both, or "
     "--local-prefill always)."},
    {"decode", BT_OPT_U32, offsetof(struct up_cfg, n_decode), "1", 0, 64, NULL, "N",
     "Number of decode nodes. 0: the prefill nodes write the answers (--role both)."},
    {"listen", BT_OPT_STR, offsetof(struct up_cfg, listen), "127.0.0.1:8000", 0, 0, NULL,
     "HOST:PORT",
     "Where clients connect: gRPC and OpenAI HTTP on the same port; port 0: any free one."},
    {"verbose", BT_OPT_BOOL, offsetof(struct up_cfg, verbose), NULL, 0, 0, NULL, NULL,
     "Show everything the daemons log, not only warnings and errors."},
};

/* Options for the router, and for all three; any other that is not ours goes to the nodes. */
static const char *const router_only[] = {
    "admin-key-file",   "api-key-file",  "attempts",        "body-bytes-max", "buckets-itl",
    "buckets-request",  "buckets-ttft",  "connections-max", "idle-timeout",   "local-prefill",
    "max-ttft",         "migrate-grace", "model-name",      "no-node-grace",  "nodes-max",
    "progress-timeout", "queue-max",     "queue-timeout",   "request-log",    "request-timeout",
    "seqs-max",         "sessions",      "tls-cert",        "tls-key",        "write-timeout",
};
static const char *const for_all[] = {"drain-timeout", "heartbeat", "lease", "log-format",
                                      "log-level"};

enum child_kind { CHILD_ROUTER, CHILD_PREFILL, CHILD_DECODE };

struct child {
    enum child_kind kind;
    char name[32];
    pid_t pid; /* 0: ended */
    int fd;    /* its standard error; -1: closed */
    struct bt_buf line;
    int code;        /* exit code, or 128 + signal */
    unsigned loaded; /* of its model, in percent */
};

struct up {
    struct up_cfg cfg;
    struct child children[CHILDREN_MAX];
    size_t n;
    char bin[4096];
    char **pass[3]; /* by child_kind; each has room for every argument we were given */
    size_t n_pass[3];
    char listening[256], sessions[256];
    bool tls, ready, stopping;
    bool progress_line; /* the terminal's last line is one, without its end */
    uint64_t kill_at, next_progress;
};

static volatile sig_atomic_t stop_signals; /* counted in the handler */

static void on_stop_signal(int signum)
{
    (void)signum;
    stop_signals++;
}

/* ---- arguments ---- */

static bool in_list(const char *name, size_t len, const char *const *list, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (strlen(list[i]) == len && memcmp(list[i], name, len) == 0) {
            return true;
        }
    }
    return false;
}

static bool is_own(const char *name, size_t len)
{
    static const char *const everywhere[] = {"help", "version", "config", "dump-config"};

    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        if (strlen(options[i].name) == len && memcmp(options[i].name, name, len) == 0) {
            return true;
        }
    }
    return in_list(name, len, everywhere, sizeof everywhere / sizeof everywhere[0]);
}

static void pass_to(struct up *u, enum child_kind k, char *arg)
{
    u->pass[k][u->n_pass[k]++] = arg;
}

/* "--prefill-threads" → "--threads": the rest of the prefix, inside the same string. */
static char *without_prefix(char *arg, size_t prefix)
{
    char *out = arg + prefix;

    out[0] = '-';
    out[1] = '-';
    return out;
}

/* One option that is not ours: to whom it goes. *arg is replaced by the option as that daemon knows
 * it. */
static unsigned receivers(char **arg)
{
    char *name = *arg + 2;
    size_t len = strcspn(name, "=");

    if (strncmp(name, "prefill-", 8) == 0) {
        *arg = without_prefix(*arg, 8);
        return 1u << CHILD_PREFILL;
    }
    if (strncmp(name, "decode-", 7) == 0) {
        *arg = without_prefix(*arg, 7);
        return 1u << CHILD_DECODE;
    }
    if (strncmp(name, "router-", 7) == 0) {
        *arg = without_prefix(*arg, 7);
        return 1u << CHILD_ROUTER;
    }
    if (in_list(name, len, router_only, sizeof router_only / sizeof router_only[0])) {
        return 1u << CHILD_ROUTER;
    }
    if (in_list(name, len, for_all, sizeof for_all / sizeof for_all[0])) {
        return 1u << CHILD_ROUTER | 1u << CHILD_PREFILL | 1u << CHILD_DECODE;
    }
    return 1u << CHILD_PREFILL | 1u << CHILD_DECODE;
}

/* Splits argv into our own options (returned, NULL-terminated by count) and those that pass
 * through. A value is the next argument unless it begins with "--" or the option has one after '='.
 */
static int split_args(struct up *u, int argc, char **argv, char **own)
{
    int n = 0;

    own[n++] = argv[0];
    for (int i = 1; i < argc; i++) {
        char *arg = argv[i];
        bool option = strncmp(arg, "--", 2) == 0 && arg[2] != '\0';

        if (!option || is_own(arg + 2, strcspn(arg + 2, "="))) {
            own[n++] = arg;
            continue;
        }
        bool separate =
            strchr(arg, '=') == NULL && i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0;
        unsigned to = receivers(&arg);

        for (int k = 0; k < 3; k++) {
            if ((to & 1u << k) != 0) {
                pass_to(u, (enum child_kind)k, arg);
                if (separate) {
                    pass_to(u, (enum child_kind)k, argv[i + 1]);
                }
            }
        }
        i += separate;
    }
    return n;
}

/* ---- children ---- */

/* The value of an option that goes to children of that kind, "" if it has none; of several the last counts, as for
 * them. NULL: not given. */
static const char *passed(const struct up *u, enum child_kind k, const char *option)
{
    size_t len = strlen(option);
    const char *value = NULL;

    for (size_t i = 0; i < u->n_pass[k]; i++) {
        const char *arg = u->pass[k][i];

        if (strncmp(arg, option, len) != 0) {
            continue;
        }
        if (arg[len] == '=') {
            value = arg + len + 1;
        } else if (arg[len] == '\0') {
            value = i + 1 < u->n_pass[k] ? u->pass[k][i + 1] : "";
        }
    }
    return value;
}

static bool passes(const struct up *u, enum child_kind k, const char *option)
{
    return passed(u, k, option) != NULL;
}

/* What one cluster on one machine cannot take: names must differ, and nodes serve the router started here. */
static enum bt_status check_passed(const struct up *u, struct bt_err *err)
{
    static const char *const roles[] = {"router", "prefill", "decode"};
    const uint32_t n[] = {1, u->cfg.n_prefill, u->cfg.n_decode};

    for (enum child_kind k = CHILD_PREFILL; k <= CHILD_DECODE; k++) {
        if (passes(u, k, "--router")) {
            return bt_err_set(
                err, BT_ERR_INVALID,
                "--router: the nodes serve the router that baton up starts; for another "
                "one run baton-%sd",
                k == CHILD_PREFILL ? "prefill" : "decode");
        }
        if (passes(u, k, "--name") && n[k] > 1) {
            return bt_err_set(err, BT_ERR_INVALID,
                              "--name: %u %s nodes cannot have the same name (without it they are "
                              "%s-0 to %s-%u)",
                              n[k], roles[k], roles[k], roles[k], n[k] - 1);
        }
    }
    const char *p = passed(u, CHILD_PREFILL, "--name"), *d = passed(u, CHILD_DECODE, "--name");

    if (p != NULL && d != NULL && strcmp(p, d) == 0) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "--name: prefill and decode node cannot have the same name; give "
                          "--prefill-name and --decode-name");
    }
    return BT_OK;
}

static bool passes_value(const struct up *u, enum child_kind k, const char *option,
                         const char *value)
{
    const char *v = passed(u, k, option);

    return v != NULL && strcmp(v, value) == 0;
}

/* Nobody would ever compute prompts, or write answers. */
static enum bt_status check_roles(const struct up *u, struct bt_err *err)
{
    bool local = passes_value(u, CHILD_ROUTER, "--local-prefill", "always");

    if (u->cfg.n_prefill == 0 && !local && !passes_value(u, CHILD_DECODE, "--role", "both")) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "--prefill 0: then the decode nodes need --role both, or the router "
                          "--local-prefill always");
    }
    if (u->cfg.n_decode == 0 && !passes_value(u, CHILD_PREFILL, "--role", "both")) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "--decode 0: then the prefill nodes need --role both");
    }
    return u->cfg.n_prefill + u->cfg.n_decode > 0
               ? BT_OK
               : bt_err_set(err, BT_ERR_INVALID, "--prefill 0 --decode 0: there would be no node");
}

static void exec_child(const struct up *u, const struct child *c, int err_fd)
{
    static const char *const programs[] = {"baton-router", "baton-prefilld", "baton-decoded"};
    char path[4200], threads[16], kv[32];
    char **argv = bt_calloc(OWN_ARGS_MAX + u->n_pass[c->kind], sizeof *argv);
    size_t n = 0;
    uint32_t peers = c->kind == CHILD_PREFILL ? u->cfg.n_prefill : u->cfg.n_decode;
    uint32_t share = bt_cpus_usable() / (peers > 0 ? peers : 1); /* the router has none */

    if (argv == NULL) {
        fprintf(stderr, "out of memory\n");
        _exit(127);
    }
    (void)prctl(PR_SET_PDEATHSIG, SIGTERM);
    (void)unsetenv("BATON_CONFIG"); /* ours: its options are not theirs */
    snprintf(path, sizeof path, "%s/%s", u->bin, programs[c->kind]);
    snprintf(threads, sizeof threads, "%u", share > 0 ? share : 1);
    snprintf(kv, sizeof kv, "%llu",
             (unsigned long long)(bt_memory_usable() / 4 / (u->cfg.n_prefill + u->cfg.n_decode)));
    union {
        const char *in;
        char *out;
    } word;
#define ARG(text) (word.in = (text), argv[n++] = word.out)
    ARG(programs[c->kind]);
    ARG("--model"), ARG(u->cfg.model);
    if (c->kind == CHILD_ROUTER) {
        ARG("--listen"), ARG(u->cfg.listen);
        if (!passes(u, CHILD_ROUTER, "--sessions")) {
            ARG("--sessions"), ARG("127.0.0.1:0");
        }
    } else {
        ARG("--router"), ARG(u->sessions);
        ARG("--name"), ARG(c->name);
        if (!passes(u, c->kind, "--threads") && getenv("BATON_THREADS") == NULL) {
            ARG("--threads"), ARG(threads);
        }
        if (!passes(u, c->kind, "--kv-bytes") && getenv("BATON_KV_BYTES") == NULL) {
            ARG("--kv-bytes"), ARG(kv);
        }
    }
#undef ARG
    for (size_t i = 0; i < u->n_pass[c->kind]; i++) {
        argv[n++] = u->pass[c->kind][i];
    }
    argv[n] = NULL;
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);

    if (null >= 0 && dup2(null, STDIN_FILENO) >= 0 && dup2(err_fd, STDERR_FILENO) >= 0 &&
        dup2(err_fd, STDOUT_FILENO) >= 0) {
        execv(path, argv);
    }
    fprintf(stderr, "cannot run %s: %s\n", path, strerror(errno));
    _exit(127);
}

static enum bt_status start_child(struct up *u, enum child_kind kind, const char *name,
                                  struct bt_err *err)
{
    struct child *c = &u->children[u->n];
    sigset_t all, before;
    int fds[2];

    BT_ASSERT(u->n < CHILDREN_MAX);
    *c = (struct child){.kind = kind, .fd = -1};
    snprintf(c->name, sizeof c->name, "%s", name);
    if (pipe2(fds, O_CLOEXEC) != 0) {
        return bt_err_set(err, BT_ERR_IO, "pipe: %s", strerror(errno));
    }
    /* A stop signal that comes to the child before it is another program must end it: our handler, which it has
     * until then, would only count it. */
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before);
    c->pid = fork();
    if (c->pid == 0) {
        (void)signal(SIGINT, SIG_DFL);
        (void)signal(SIGTERM, SIG_DFL);
        sigemptyset(&all);
        sigprocmask(SIG_SETMASK, &all, NULL);
        (void)setpgid(
            0, 0); /* the terminal's Ctrl-C comes to us alone; we end the children in order */
        exec_child(u, c, fds[1]);
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    close(fds[1]);
    if (c->pid < 0) {
        close(fds[0]);
        return bt_err_set(err, BT_ERR_IO, "fork: %s", strerror(errno));
    }
    c->fd = fds[0];
    (void)fcntl(c->fd, F_SETFL, O_NONBLOCK);
    u->n++;
    return BT_OK;
}

/* ---- what they say ---- */

static void take_address(const char *line, const char *after, char out[256])
{
    const char *at = strstr(line, after);

    if (at == NULL || out[0] != '\0') {
        return;
    }
    at += strlen(after);
    size_t n = strcspn(at, " \n");

    if (n > 0 && n < 256) {
        memcpy(out, at, n);
        out[n] = '\0';
    }
}

/* The slowest node tells. On a terminal one line changes in place; elsewhere a slow load gets a line now and then. */
static void show_progress(struct up *u)
{
    unsigned least = 100;
    uint64_t now = bt_clock_ns();

    for (size_t i = 0; i < u->n; i++) {
        if (u->children[i].kind != CHILD_ROUTER && u->children[i].loaded < least) {
            least = u->children[i].loaded;
        }
    }
    if (isatty(STDERR_FILENO)) {
        fprintf(stderr, "\rloading the model: %u %%\033[K", least);
        u->progress_line = true;
    } else if (now >= u->next_progress) {
        fprintf(stderr, "loading the model: %u %%\n", least);
        u->next_progress = now + SAY_LOAD_NS;
    }
}

static void end_progress(struct up *u)
{
    if (u->progress_line) {
        fprintf(stderr, "\r\033[K");
        u->progress_line = false;
    }
}

static void on_line(struct up *u, struct child *c, const char *line)
{
    const char *loading = strstr(line, "loading the model: ");
    bool warn = strstr(line, " warn ") != NULL;
    bool info = strstr(line, " info ") != NULL || strstr(line, " debug ") != NULL ||
                strstr(line, " trace ") != NULL;

    if (c->kind == CHILD_ROUTER) {
        u->tls = u->tls || strstr(line, "listening on https://") != NULL;
        take_address(line, "listening on http://", u->listening);
        take_address(line, "listening on https://", u->listening);
        take_address(line, "sessions on ", u->sessions);
    } else if (loading != NULL && !u->ready && !u->stopping) {
        c->loaded = (unsigned)strtoul(loading + strlen("loading the model: "), NULL, 10);
        if (!u->cfg.verbose) {
            show_progress(u);
        }
    }
    if (info && !u->cfg.verbose) {
        return;
    }
    if (warn && u->stopping && !u->cfg.verbose) {
        return; /* children notice each other leaving */
    }
    end_progress(u);
    fprintf(stderr, "%s%-10s%s %s%s%s\n", bt_cli_style(STDERR_FILENO, BT_CLI_CYAN), c->name,
            bt_cli_style(STDERR_FILENO, BT_CLI_PLAIN),
            info ? bt_cli_style(STDERR_FILENO, BT_CLI_DIM)
                 : bt_cli_style(STDERR_FILENO, warn ? BT_CLI_YELLOW : BT_CLI_RED),
            line, bt_cli_style(STDERR_FILENO, BT_CLI_PLAIN));
}

static void read_child(struct up *u, struct child *c)
{
    char chunk[4096];
    ssize_t n;

    while ((n = read(c->fd, chunk, sizeof chunk)) > 0) {
        for (ssize_t i = 0; i < n; i++) {
            if (chunk[i] != '\n' && c->line.len < LINE_MAX_BYTES) {
                (void)bt_buf_addc(&c->line, chunk[i]);
            } else if (chunk[i] == '\n') {
                on_line(u, c, c->line.data != NULL ? c->line.data : "");
                bt_buf_clear(&c->line);
            }
        }
    }
    if (n == 0) {
        close(c->fd);
        c->fd = -1;
    }
}

static void reap(struct up *u)
{
    for (size_t i = 0; i < u->n; i++) {
        struct child *c = &u->children[i];
        int status;

        if (c->pid == 0 || waitpid(c->pid, &status, WNOHANG) != c->pid) {
            continue;
        }
        c->code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        if (c->fd >= 0) {
            read_child(u, c);
        }
        if (!u->stopping) {
            end_progress(u);
            fprintf(stderr, "%sbaton up: %s (pid %ld) ended: %s %d%s%s%s%s\n",
                    bt_cli_style(STDERR_FILENO, BT_CLI_RED), c->name, (long)c->pid,
                    WIFEXITED(status) ? "exit code" : "signal",
                    WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status),
                    WIFEXITED(status) ? "" : " (",
                    WIFEXITED(status) ? "" : strsignal(c->code - 128), WIFEXITED(status) ? "" : ")",
                    bt_cli_style(STDERR_FILENO, BT_CLI_PLAIN));
        }
        c->pid = 0;
    }
}

/* Waits for output or an end for at most timeout_ms, and serves it. */
static void pump(struct up *u, int timeout_ms)
{
    struct pollfd fds[CHILDREN_MAX];

    for (size_t i = 0; i < u->n; i++) {
        fds[i] = (struct pollfd){.fd = u->children[i].fd, .events = POLLIN};
    }
    if (poll(fds, u->n, timeout_ms) > 0) {
        for (size_t i = 0; i < u->n; i++) {
            if (u->children[i].fd >= 0 && fds[i].revents != 0) {
                read_child(u, &u->children[i]);
            }
        }
    }
    reap(u);
}

static size_t alive(const struct up *u)
{
    size_t n = 0;

    for (size_t i = 0; i < u->n; i++) {
        n += u->children[i].pid != 0;
    }
    return n;
}

static void signal_all(const struct up *u, int signum)
{
    for (size_t i = 0; i < u->n; i++) {
        if (u->children[i].pid != 0) {
            (void)kill(u->children[i].pid, signum);
        }
    }
}

/* ---- phases ---- */

/* The first child that ended before the cluster was ready; 0 if none did. */
static int early_end(const struct up *u)
{
    for (size_t i = 0; i < u->n; i++) {
        if (u->children[i].pid == 0) {
            return u->children[i].code != 0 ? u->children[i].code : 1;
        }
    }
    return 0;
}

/* wrong: set if a node will never be ready. */
static bool nodes_ready(struct up *u, struct bt_err *wrong)
{
    struct bt_client_cfg cfg = {.server = u->listening};
    struct bt_client *client = NULL;
    struct bt_buf request = {0}, reply = {0};
    struct bt_arena arena;
    struct bt_inf_cluster cluster = {0};
    uint32_t ready = 0;

    bt_arena_init(&arena, (size_t)16 << 20);
    if (bt_client_create(&cfg, &client, NULL) == BT_OK &&
        bt_client_unary(client, BT_INF_GET_CLUSTER, &request, &reply, BT_NS_PER_S, NULL) == BT_OK &&
        bt_inf_cluster_decode(reply.data, reply.len, &arena, &cluster, NULL) == BT_OK) {
        for (size_t i = 0; i < cluster.n_nodes; i++) {
            const struct bt_inf_node *n = &cluster.nodes[i];

            ready += strcmp(n->state, "ready") == 0;
            if (strncmp(n->state, "mismatch", 8) == 0) {
                bt_err_set(wrong, BT_ERR_INVALID, "node %s: %s", n->name, n->state);
            }
        }
    }
    bt_client_destroy(client);
    bt_buf_fini(&reply);
    bt_arena_fini(&arena);
    return ready >= u->cfg.n_prefill + u->cfg.n_decode;
}

/* With an API key file or TLS the status cannot be asked for without credentials: then the sessions
 * tell. */
static bool may_ask(const struct up *u)
{
    return !passes(u, CHILD_ROUTER, "--api-key-file") && !passes(u, CHILD_ROUTER, "--tls-cert");
}

static enum bt_status start_nodes(struct up *u, struct bt_err *err)
{
    char name[32];
    enum bt_status st = BT_OK;

    for (uint32_t i = 0; st == BT_OK && i < u->cfg.n_prefill; i++) {
        snprintf(name, sizeof name, "prefill-%u", i);
        st = start_child(u, CHILD_PREFILL, name, err);
    }
    for (uint32_t i = 0; st == BT_OK && i < u->cfg.n_decode; i++) {
        snprintf(name, sizeof name, "decode-%u", i);
        st = start_child(u, CHILD_DECODE, name, err);
    }
    return st;
}

static void print_ready(struct up *u)
{
    const char *bold = bt_cli_style(STDERR_FILENO, BT_CLI_BOLD);
    const char *off = bt_cli_style(STDERR_FILENO, BT_CLI_PLAIN);
    const char *scheme = u->tls ? "https" : "http";
    bool keys = passes(u, CHILD_ROUTER, "--api-key-file");

    end_progress(u);
    fprintf(stderr,
            "%sready%s on %s://%s: %u prefill, %u decode; the dashboard is there too\n"
            "  baton chat --server %s%s%s\n"
            "  curl %s://%s/v1/completions%s -d '{\"prompt\": \"Once upon a time\", "
            "\"max_tokens\": 32}'\n"
            "  Ctrl-C stops everything\n",
            bold, off, scheme, u->listening, u->cfg.n_prefill, u->cfg.n_decode, u->listening,
            u->tls ? " --tls" : "", keys ? " --api-key KEY" : "", scheme, u->listening,
            keys ? " -H 'authorization: Bearer KEY'" : "");
}

/* Until a stop signal, or until no child is left. */
static int run(struct up *u, struct bt_err *err)
{
    uint64_t next_poll = 0;

    if (stop_signals > 0) {
        return 0; /* came while the model was fetched */
    }
    enum bt_status st = start_child(u, CHILD_ROUTER, "router", err);

    u->next_progress = bt_clock_ns() + SAY_LOAD_NS;
    while (st == BT_OK && stop_signals == 0 && u->sessions[0] == '\0' && early_end(u) == 0) {
        pump(u, 100);
    }
    if (st == BT_OK && stop_signals == 0 && early_end(u) == 0) {
        st = start_nodes(u, err);
    }
    if (st != BT_OK) {
        return 1;
    }
    while (stop_signals == 0 && alive(u) > 0) {
        pump(u, u->ready ? 1000 : 50);
        if (u->ready) {
            continue;
        }
        if (early_end(u) != 0) {
            bt_err_set(err, BT_ERR_IO, "a child ended before the cluster was ready");
            return early_end(u);
        }
        if (bt_clock_ns() >= next_poll) {
            next_poll = bt_clock_ns() + READY_POLL_NS;
            u->ready = u->listening[0] != '\0' && (!may_ask(u) || nodes_ready(u, err));
            if (u->ready) {
                print_ready(u);
            } else if (err->status != BT_OK) {
                return 1;
            }
        }
    }
    return stop_signals > 0 ? 0 : early_end(u);
}

/* How long the children drain: the longest --drain-timeout that was passed on. */
static uint64_t drain_time(const struct up *u)
{
    uint64_t longest = 0;

    for (enum child_kind k = CHILD_ROUTER; k <= CHILD_DECODE; k++) {
        const char *value = passed(u, k, "--drain-timeout");
        uint64_t ns = DRAIN_NS, given;

        if (value != NULL && bt_parse_duration(value, &given) == BT_OK) {
            ns = given;
        }
        longest = ns > longest ? ns : longest;
    }
    return longest;
}

static void stop(struct up *u)
{
    int seen = stop_signals;
    uint64_t say_at = bt_clock_ns() + SAY_STOP_NS;

    end_progress(u);
    u->stopping = true;
    u->kill_at = bt_clock_ns() + drain_time(u) + KILL_AFTER_NS;
    signal_all(u, SIGTERM);
    while (alive(u) > 0) {
        pump(u, 50);
        if (bt_clock_ns() > say_at && alive(u) > 0) {
            fprintf(stderr,
                    "stopping: running requests have up to %llu s to end; Ctrl-C again "
                    "stops at once\n",
                    (unsigned long long)(drain_time(u) / BT_NS_PER_S));
            say_at = UINT64_MAX;
        }
        if (stop_signals > seen || bt_clock_ns() > u->kill_at) {
            seen = stop_signals;
            u->kill_at = bt_clock_ns() + KILL_AFTER_NS;
            signal_all(u, SIGKILL);
        }
    }
    for (size_t i = 0; i < u->n; i++) {
        if (u->children[i].fd >= 0) {
            close(u->children[i].fd);
        }
        bt_buf_fini(&u->children[i].line);
    }
}

static enum bt_status prepare(struct up *u, struct bt_err *err)
{
    struct sigaction sa = {.sa_handler = on_stop_signal};
    ssize_t n = readlink("/proc/self/exe", u->bin, sizeof u->bin - 1);
    char *slash = n > 0 ? strrchr(u->bin, '/') : NULL;

    if (slash == NULL) {
        return bt_err_set(err, BT_ERR_IO, "cannot tell where this program lies");
    }
    *slash = '\0';
    sigemptyset(&sa.sa_mask);
    (void)sigaction(SIGINT, &sa, NULL);
    (void)sigaction(SIGTERM, &sa, NULL);
    if (u->cfg.model == NULL) {
        struct bt_buf path = {0};
        enum bt_status st = bt_cli_fetch_model(&path, err);

        u->cfg.model = bt_buf_take(&path, NULL);
        return st;
    }
    return BT_OK;
}

int bt_cli_up(int argc, char **argv)
{
    const struct bt_prog prog = {
        .name = "baton up",
        .summary =
            "Starts router, prefill and decode nodes on this machine; Ctrl-C stops them together.",
        .usage = "[options] [options of the daemons]",
        .opts = options,
        .n_opts = sizeof options / sizeof options[0],
        .epilogue = "Other options pass through to the daemons: --threads 2 goes to all nodes, "
                    "--prefill-threads 2 to the\n"
                    "prefill nodes, --decode-max-batch 16 to the decode nodes, --router-log-level "
                    "debug to the router.\n\n"
                    "Example:\n  baton up --prefill 2 --decode 1 --kv-bytes 512MiB\n",
    };
    struct up *u = bt_calloc(1, sizeof *u);
    char **args = bt_calloc(4 * ((size_t)argc + 1), sizeof *args); /* four lists of them */
    struct bt_opt_result res = {0};
    struct bt_err err = {0};
    int rc = 1;

    for (size_t k = 0; u != NULL && args != NULL && k < 3; k++) {
        u->pass[k] = args + (k + 1) * ((size_t)argc + 1);
    }
    if (u == NULL || args == NULL) {
        fprintf(stderr, "baton up: out of memory\n");
    } else if (bt_opt_parse(&prog, split_args(u, argc, argv, args), args, &u->cfg, &res, &err) !=
               BT_OK) {
        rc = 2;
    } else if (res.exit_now) {
        rc = 0;
    } else if (check_passed(u, &err) != BT_OK) {
        rc = 2;
    } else if (check_roles(u, &err) != BT_OK) {
        rc = 2;
    } else if (prepare(u, &err) == BT_OK) {
        rc = run(u, &err);
        stop(u);
    }
    if (err.msg[0] != '\0') {
        fprintf(stderr, "baton up: %s\n", err.msg);
    }
    if (u != NULL) {
        bt_opt_free(&prog, &u->cfg);
    }
    bt_free(args);
    bt_free(u);
    return rc;
}
