#ifndef BT_BASE_OPTIONS_H
#define BT_BASE_OPTIONS_H

/* One static table per program: parse, range check, --help, --dump-config.
 * Precedence: option > environment BATON_<NAME> > --config file (`name = value` lines, # comments)
 * > default. Unknown keys are errors. Every program also gets --help, --version, --config,
 * --dump-config,
 * --log-level and --log-format from here. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"

enum bt_opt_type {
    BT_OPT_STR, /* char * owned by the config struct */
    BT_OPT_U32,
    BT_OPT_U64,
    BT_OPT_SIZE,     /* uint64_t bytes: 512, 64KiB, 2MiB, 1GiB */
    BT_OPT_DURATION, /* uint64_t ns: 250ms, 3s, 2min; a bare number is ms */
    BT_OPT_DOUBLE,
    BT_OPT_BOOL, /* bool; `--x` alone is true, `--no-x` false */
    BT_OPT_ENUM, /* int, index into `choices` */
    BT_OPT_LIST, /* char * with values joined by ',', each use of the option adds */
};

struct bt_opt {
    const char *name; /* without dashes: "chunk-tokens"; environment BATON_CHUNK_TOKENS */
    enum bt_opt_type type;
    size_t offset;       /* into the config struct */
    const char *dflt;    /* text, parsed like a value; NULL: zero / NULL string */
    double min, max;     /* numbers, in the unit stored; both 0: no range */
    const char *choices; /* ENUM: "cpu|cuda|emulated" */
    const char *arg;     /* shown in help: "HOST:PORT" */
    const char *help;    /* one or two sentences with the unit */
};

struct bt_prog {
    const char *name;
    const char *summary;  /* one line under the usage line */
    const char *usage;    /* text after the name, e.g. "[options]"; NULL: "[options]" */
    const char *epilogue; /* examples; NULL */
    const struct bt_opt *opts;
    size_t n_opts;
    bool positionals; /* allowed; otherwise an error */
};

/* An empty environment variable counts as not set. A value that begins with "--" needs the form
 * --name=value. In a file, a value may stand in double quotes (with \" and \\); # after a blank
 * ends an unquoted one. */

struct bt_opt_result {
    bool exit_now; /* --help, --version, --dump-config were served on stdout: exit 0 */
    int n_positional;
    char **positional; /* points into argv */
};

/* Fills cfg (zeroed by the caller). On error err names the option, BT_ERR_INVALID: print it, exit
 * 2; cfg holds no strings then. Positional arguments are moved behind the options in argv. Also
 * sets up the log from --log-level / --log-format. */
enum bt_status bt_opt_parse(const struct bt_prog *prog, int argc, char **argv, void *cfg,
                            struct bt_opt_result *res, struct bt_err *err) BT_NODISCARD;
void bt_opt_free(const struct bt_prog *prog, void *cfg); /* frees the strings */

/* One value from text, as the table would. Used for sizes and durations elsewhere. */
enum bt_status bt_parse_size(const char *s, uint64_t *out) BT_NODISCARD;
enum bt_status bt_parse_duration(const char *s, uint64_t *out_ns) BT_NODISCARD;

/* Whether --lease and --heartbeat, ns, go together: BT_ERR_INVALID if a lease is shorter than two heartbeats. */
enum bt_status bt_opt_check_lease(uint64_t lease, uint64_t heartbeat,
                                  struct bt_err *err) BT_NODISCARD;

/* The number of CPUs this process may use: affinity mask and cgroup quota, at least 1. */
uint32_t bt_cpus_usable(void);
/* Restricts this process, from now on, to the CPUs of a list like "0-3,8": before any thread is made. BT_ERR_INVALID: not
 * a list, or a CPU that this process may not use (named in err). */
enum bt_status bt_cpus_use(const char *list, struct bt_err *err) BT_NODISCARD;
/* Bytes of memory this process may use: the smaller of RAM and the cgroup limit. */
uint64_t bt_memory_usable(void);

#endif
