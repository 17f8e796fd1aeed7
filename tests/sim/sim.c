/* The driver of the cluster simulation (plan/sim.h): replays one seed with its log, or runs many in
 * several processes. A seed that fails is printed with the violated rule and its last events. */

#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/mem.h"
#include "plan/sim.h"

#define TAIL     60
#define JOBS_MAX 64

struct options {
    uint64_t first, last;
    enum bt_sim_profile profile; /* BT_SIM_PROFILES: the seed chooses */
    unsigned jobs;
    uint64_t seconds; /* 0: no limit */
    bool verbose, twice, keep_going;
};

/* What a worker has done since it last told. */
struct totals {
    uint64_t seeds, failed, events, requests, finished, refused, cancelled, lost, tokens, attempts,
        transfers, local, roles, preempted, prompts, resent, again, stalled, hits_prefill,
        hits_decode, faults, virtual_ms;
    struct longest {
        uint64_t ms, seed;
    } request, settling, held;
};

static const struct bt_sim *current; /* for the handler of a failed assertion */
static uint64_t current_seed;
static enum bt_sim_profile current_profile;

static void print_line(void *arg, const char *line)
{
    fprintf(arg, "%s\n", line);
}

static void print_failure(const char *what)
{
    fprintf(stderr, "\nseed %llu, profile %s: %s\nthe last events:\n",
            (unsigned long long)current_seed, bt_sim_profile_name(current_profile), what);
    if (current != NULL) {
        bt_sim_tail(current, TAIL, print_line, stderr);
    }
    fprintf(stderr, "again: sim --seed %llu --profile %s --verbose\n",
            (unsigned long long)current_seed, bt_sim_profile_name(current_profile));
}

static void on_abort(int signum)
{
    (void)signum;
    print_failure("an assertion failed");
    _exit(3);
}

static enum bt_sim_profile profile_of(const struct options *o, uint64_t seed)
{
    return o->profile < BT_SIM_PROFILES ? o->profile
                                        : (enum bt_sim_profile)(seed % BT_SIM_PROFILES);
}

static void longer(struct longest *l, uint64_t ms, uint64_t seed)
{
    if (ms > l->ms) {
        *l = (struct longest){ms, seed};
    }
}

static void add(struct totals *t, uint64_t seed, const struct bt_sim_result *r)
{
    longer(&t->request, r->longest_ns / BT_NS_PER_MS, seed);
    longer(&t->settling, r->settling_ns / BT_NS_PER_MS, seed);
    longer(&t->held, r->free_ns / BT_NS_PER_MS, seed);
    t->seeds++;
    t->failed += r->failed;
    t->events += r->events;
    t->requests += r->n_requests;
    t->finished += r->n_finished;
    t->refused += r->n_refused;
    t->cancelled += r->n_cancelled;
    t->lost += r->n_lost;
    t->tokens += r->n_tokens;
    t->attempts += r->n_attempts;
    t->transfers += r->n_transfers;
    t->local += r->n_local;
    t->roles += r->n_roles;
    t->preempted += r->n_preempted;
    t->prompts += r->n_prompts;
    t->resent += r->n_resent;
    t->again += r->n_again;
    t->stalled += r->n_stalled;
    t->hits_prefill += r->n_hits[0];
    t->hits_decode += r->n_hits[1];
    t->faults += r->faults;
    t->virtual_ms += r->virtual_ns / BT_NS_PER_MS;
}

static bool run_once(const struct options *o, uint64_t seed, struct bt_sim_result *out)
{
    struct bt_sim_opts so = {.seed = seed, .profile = profile_of(o, seed)};
    struct bt_sim *s = NULL;
    size_t before = bt_test_live_bytes();

    if (o->verbose) {
        so.log = print_line;
        so.log_arg = stdout;
    }
    if (bt_sim_create(&so, &s) != BT_OK) {
        fprintf(stderr, "out of memory\n");
        return false;
    }
    current = s;
    current_seed = seed;
    current_profile = so.profile;
    bt_sim_run(s);
    *out = *bt_sim_result(s);
    if (out->failed) {
        print_failure(out->text);
    }
    current = NULL;
    bt_sim_destroy(s);
    if (!out->failed && bt_test_live_bytes() != before) {
        print_failure("memory is left over");
        out->failed = true;
    }
    return !out->failed;
}

static bool run_seed(const struct options *o, uint64_t seed, struct totals *t)
{
    struct bt_sim_result r = {0}, again = {0};
    bool ok = run_once(o, seed, &r);

    if (ok && o->twice) {
        ok = run_once(o, seed, &again);
        if (ok && again.trace != r.trace) {
            print_failure("a second run of the same seed was different");
            ok = false;
        }
    }
    r.failed = !ok;
    add(t, seed, &r);
    return ok;
}

/* ---- many seeds ---- */

static void tell(int fd, struct totals *t)
{
    ssize_t n = write(fd, t, sizeof *t); /* less than PIPE_BUF: whole */

    if (n != (ssize_t)sizeof *t) {
        _exit(4);
    }
    *t = (struct totals){0};
}

static int worker(const struct options *o, unsigned index, int fd)
{
    struct totals t = {0};
    uint64_t told = bt_clock_ns(), end = told + o->seconds * BT_NS_PER_S;
    bool ok = true;

    for (uint64_t seed = o->first + index; seed <= o->last; seed += o->jobs) {
        uint64_t now = bt_clock_ns();

        if (o->seconds != 0 && now >= end) {
            break;
        }
        if (now - told > BT_NS_PER_S / 2) {
            told = now;
            tell(fd, &t);
        }
        ok = run_seed(o, seed, &t) && ok;
        if (!ok && !o->keep_going) {
            break;
        }
    }
    tell(fd, &t);
    return ok ? 0 : 1;
}

static void sum(struct totals *all, const struct totals *t)
{
    const uint64_t *from = (const uint64_t *)t;
    uint64_t *to = (uint64_t *)all;

    for (size_t i = 0; i < offsetof(struct totals, request) / sizeof *from; i++) {
        to[i] += from[i];
    }
    longer(&all->request, t->request.ms, t->request.seed);
    longer(&all->settling, t->settling.ms, t->settling.seed);
    longer(&all->held, t->held.ms, t->held.seed);
}

static void print_totals(const struct totals *t, uint64_t ns)
{
    double s = (double)ns / 1e9;

    printf(
        "%llu seeds, %llu failed, in %.1f s (%.0f seeds/s); %.0f h of virtual time, %llu events, "
        "%llu faults\n",
        (unsigned long long)t->seeds, (unsigned long long)t->failed, s, (double)t->seeds / s,
        (double)t->virtual_ms / 3.6e6, (unsigned long long)t->events,
        (unsigned long long)t->faults);
    printf("%llu requests: %llu finished, %llu refused, %llu cancelled, %llu lost with a router; "
           "%llu tokens, %llu attempts, %llu prompts computed (%llu again, their node alive), %llu "
           "sent again, %llu transfers (%llu more given up without progress), %llu "
           "local prefills, %llu roles changed, %llu preempted; %llu prefix cache hits at prefill "
           "nodes, %llu at decode "
           "nodes\n",
           (unsigned long long)t->requests, (unsigned long long)t->finished,
           (unsigned long long)t->refused, (unsigned long long)t->cancelled,
           (unsigned long long)t->lost, (unsigned long long)t->tokens,
           (unsigned long long)t->attempts, (unsigned long long)t->prompts,
           (unsigned long long)t->again, (unsigned long long)t->resent,
           (unsigned long long)t->transfers, (unsigned long long)t->stalled,
           (unsigned long long)t->local, (unsigned long long)t->roles,
           (unsigned long long)t->preempted, (unsigned long long)t->hits_prefill,
           (unsigned long long)t->hits_decode);
    printf("longest answer: %llu ms (seed %llu); longest settling: %llu ms (seed %llu); pages "
           "held after quiet: %llu ms (seed %llu)\n",
           (unsigned long long)t->request.ms, (unsigned long long)t->request.seed,
           (unsigned long long)t->settling.ms, (unsigned long long)t->settling.seed,
           (unsigned long long)t->held.ms, (unsigned long long)t->held.seed);
}

static int run_many(const struct options *o)
{
    struct totals all = {0}, t;
    uint64_t t0 = bt_clock_ns(), shown = t0;
    int fds[2], status, bad = 0;

    if (pipe(fds) != 0) {
        perror("pipe");
        return 2;
    }
    fflush(stdout);
    for (unsigned i = 0; i < o->jobs; i++) {
        pid_t pid = fork();

        if (pid < 0) {
            perror("fork");
            return 2;
        }
        if (pid == 0) {
            close(fds[0]);
            exit(worker(o, i, fds[1]));
        }
    }
    close(fds[1]);
    while (read(fds[0], &t, sizeof t) == (ssize_t)sizeof t) {
        uint64_t now = bt_clock_ns();

        sum(&all, &t);
        if (now - shown > 10 * BT_NS_PER_S) {
            shown = now;
            printf("%llu seeds, %llu failed, %.0f seeds/s\n", (unsigned long long)all.seeds,
                   (unsigned long long)all.failed, (double)all.seeds * 1e9 / (double)(now - t0));
            fflush(stdout);
        }
    }
    for (unsigned i = 0; i < o->jobs; i++) {
        while (wait(&status) < 0 && errno == EINTR) {
        }
        bad += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    }
    print_totals(&all, bt_clock_ns() - t0);
    return bad > 0 ? 1 : 0;
}

/* ---- command line ---- */

static void usage(FILE *f)
{
    fprintf(f, "Usage: sim [--seed N | --seeds A..B] [--profile NAME] [--jobs N] [--seconds N]\n"
               "           [--verbose] [--twice] [--keep-going]\n\n"
               "  --seed N        one run\n"
               "  --seeds A..B    many; default 1..1000\n"
               "  --profile NAME  ");
    for (enum bt_sim_profile p = BT_SIM_CALM; p < BT_SIM_PROFILES; p++) {
        fprintf(f, "%s%s", p > 0 ? ", " : "", bt_sim_profile_name(p));
    }
    fprintf(f, "; default: the seed chooses\n"
               "  --jobs N        processes, default 1\n"
               "  --seconds N     begin no seed after that long\n"
               "  --verbose       print every event\n"
               "  --twice         run each seed twice: both runs must be equal\n"
               "  --keep-going    go on after a failure\n");
}

static bool parse_seeds(const char *text, struct options *o)
{
    char *end;

    o->first = strtoull(text, &end, 10);
    if (strncmp(end, "..", 2) != 0) {
        return false;
    }
    o->last = strtoull(end + 2, &end, 10);
    return *end == '\0' && o->first <= o->last;
}

static bool parse_value(const char *name, const char *value, struct options *o)
{
    char *end;

    if (strcmp(name, "--profile") == 0) {
        o->profile = BT_SIM_CALM;
        while (o->profile < BT_SIM_PROFILES &&
               strcmp(bt_sim_profile_name(o->profile), value) != 0) {
            o->profile++;
        }
        return o->profile < BT_SIM_PROFILES;
    }
    if (strcmp(name, "--seeds") == 0) {
        return parse_seeds(value, o);
    }
    uint64_t n = strtoull(value, &end, 10);

    if (strcmp(name, "--seed") == 0) {
        o->first = o->last = n;
    } else if (strcmp(name, "--jobs") == 0) {
        o->jobs = (unsigned)n;
    } else if (strcmp(name, "--seconds") == 0) {
        o->seconds = n;
    } else {
        return false;
    }
    return *end == '\0' && o->jobs >= 1 && o->jobs <= JOBS_MAX;
}

int main(int argc, char **argv)
{
    struct options o = {.first = 1, .last = 1000, .profile = BT_SIM_PROFILES, .jobs = 1};

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--verbose") == 0) {
            o.verbose = true;
        } else if (strcmp(argv[i], "--twice") == 0) {
            o.twice = true;
        } else if (strcmp(argv[i], "--keep-going") == 0) {
            o.keep_going = true;
        } else if (strcmp(argv[i], "--help") == 0) {
            usage(stdout);
            return 0;
        } else if (i + 1 < argc && parse_value(argv[i], argv[i + 1], &o)) {
            i++;
        } else {
            usage(stderr);
            return 2;
        }
    }
    signal(SIGABRT, on_abort);
    return run_many(&o);
}
