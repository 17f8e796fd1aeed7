/* Where option values come from and which source wins. Sources are applied weakest first (defaults,
 * file, environment, command line), each value checked even if a stronger one replaces it. Prints
 * only what --help,
 * --version and --dump-config ask for; errors go to the caller. */

#include "base/options_int.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include "base/log.h"
#include "base/mem.h"

#define CONFIG_BYTES_MAX ((size_t)1 << 20)

struct common {
    bool help, version, dump_config;
    char *config;
    int log_level, log_format;
};

static const struct bt_opt common_opts[] = {
    {.name = "config",
     .type = BT_OPT_STR,
     .offset = offsetof(struct common, config),
     .arg = "FILE",
     .help = "Read options from FILE: lines \"name = value\", # begins a comment."},
    {.name = "log-level",
     .type = BT_OPT_ENUM,
     .offset = offsetof(struct common, log_level),
     .dflt = "info",
     .choices = "error|warn|info|debug|trace",
     .arg = "LEVEL",
     .help = "How much to log on stderr: error, warn, info, debug or trace."},
    {.name = "log-format",
     .type = BT_OPT_ENUM,
     .offset = offsetof(struct common, log_format),
     .dflt = "text",
     .choices = "text|json",
     .help = "Log lines as text or one JSON object each."},
    {.name = "dump-config",
     .type = BT_OPT_BOOL,
     .offset = offsetof(struct common, dump_config),
     .help = "Print the values in effect as a --config file and exit."},
    {.name = "version",
     .type = BT_OPT_BOOL,
     .offset = offsetof(struct common, version),
     .help = "Print the version and exit."},
    {.name = "help",
     .type = BT_OPT_BOOL,
     .offset = offsetof(struct common, help),
     .help = "Print this and exit."},
};
#define N_COMMON (sizeof(common_opts) / sizeof(common_opts[0]))

enum source { SRC_NONE, SRC_DEFAULT, SRC_FILE, SRC_ENV, SRC_ARG };

/* One option of either table. */
struct slot {
    const struct bt_opt *opt;
    void *base;
    enum source source; /* of the value it has now */
};

/* One use of an option on the command line. */
struct use {
    struct slot *slot;
    const char *text;
    const char *arg; /* as written, up to '=' */
    size_t arg_len;
};

struct parser {
    const struct bt_prog *prog;
    struct common common;
    struct slot *slots;
    size_t n_slots;
    struct use *uses;
    size_t n_uses;
    struct bt_err *err;
};

static struct slot *find(struct parser *p, const char *name, size_t len)
{
    for (size_t i = 0; i < p->n_slots; i++) {
        const char *s = p->slots[i].opt->name;
        if (strlen(s) == len && memcmp(s, name, len) == 0) {
            return &p->slots[i];
        }
    }
    return NULL;
}

static bool is_common(const struct parser *p, const struct slot *s)
{
    return s->base == (const void *)&p->common;
}

/* --config, --help, --version and --dump-config: about this run, not part of a configuration. */
static bool is_of_run(const struct parser *p, const struct slot *s)
{
    return is_common(p, s) && s->opt->type != BT_OPT_ENUM;
}

static enum bt_status assign(struct parser *p, struct slot *s, enum source source, const char *text,
                             const char *where)
{
    enum bt_status st = bt_opt_store(s->opt, s->base, text, s->source == source, where, p->err);
    if (st == BT_OK) {
        s->source = source;
    }
    return st;
}

static enum bt_status apply_defaults(struct parser *p)
{
    for (size_t i = 0; i < p->n_slots; i++) {
        const char *text = p->slots[i].opt->dflt;
        char where[160];
        if (text == NULL) {
            continue;
        }
        (void)snprintf(where, sizeof(where), "default of --%s", p->slots[i].opt->name);
        enum bt_status st = assign(p, &p->slots[i], SRC_DEFAULT, text, where);
        if (st != BT_OK) {
            return st;
        }
    }
    return BT_OK;
}

static enum bt_status apply_env(struct parser *p)
{
    for (size_t i = 0; i < p->n_slots; i++) {
        struct slot *s = &p->slots[i];
        char name[128];
        bt_opt_env_name(s->opt->name, name, sizeof(name));
        const char *text = is_of_run(p, s) ? NULL : getenv(name);
        if (text == NULL || text[0] == '\0') {
            continue; /* an empty variable is how many launchers say "not set" */
        }
        enum bt_status st = assign(p, s, SRC_ENV, text, name);
        if (st != BT_OK) {
            return st;
        }
    }
    return BT_OK;
}

static enum bt_status apply_args(struct parser *p)
{
    for (size_t i = 0; i < p->n_uses; i++) {
        const struct use *u = &p->uses[i];
        char where[160];
        if (is_of_run(p, u->slot)) {
            continue; /* applied already */
        }
        (void)snprintf(where, sizeof(where), "%.*s", (int)u->arg_len, u->arg);
        enum bt_status st = assign(p, u->slot, SRC_ARG, u->text, where);
        if (st != BT_OK) {
            return st;
        }
    }
    return BT_OK;
}

static char *trim(char *s, char *end)
{
    while (s < end && (*s == ' ' || *s == '\t')) {
        s++;
    }
    while (end > s && (end[-1] == ' ' || end[-1] == '\t' || end[-1] == '\r')) {
        end--;
    }
    *end = '\0';
    return s;
}

/* Undoes quote(): takes the text between the quotes in place. false: no closing quote, or more
 * after it. */
static bool unquote(char *s)
{
    char *to = s;
    for (s++; *s != '\0' && *s != '"'; s++) {
        if (*s == '\\' && s[1] != '\0') {
            s++;
            *to++ = *s == 'n' ? '\n' : *s == 'r' ? '\r' : *s;
        } else {
            *to++ = *s;
        }
    }
    if (*s != '"') {
        return false;
    }
    s++;
    s += strspn(s, " \t");
    bool ok = *s == '\0' || *s == '#';
    *to = '\0';
    return ok;
}

/* One line of a config file, NUL-terminated at end. */
static enum bt_status apply_line(struct parser *p, char *ln, char *end, const char *where)
{
    ln = trim(ln, end);
    if (*ln == '\0' || *ln == '#') {
        return BT_OK;
    }
    char *eq = strchr(ln, '=');
    if (eq == NULL) {
        return bt_err_set(p->err, BT_ERR_INVALID, "%s: no '=' in \"%.60s\"", where, ln);
    }
    char *value = trim(eq + 1, ln + strlen(ln));
    char *name = trim(ln, eq);
    if (*value == '"') {
        if (!unquote(value)) {
            return bt_err_set(p->err, BT_ERR_INVALID, "%s: %.60s: the quoted value does not end",
                              where, name);
        }
    } else {
        for (char *c = value; *c != '\0'; c++) {
            if (*c == '#' && (c == value || c[-1] == ' ' || c[-1] == '\t')) {
                (void)trim(value, c);
                break;
            }
        }
    }
    struct slot *s = find(p, name, strlen(name));
    if (s == NULL || is_of_run(p, s)) {
        return bt_err_set(p->err, BT_ERR_INVALID, "%s: unknown option \"%.60s\"", where, name);
    }
    char full[320];
    (void)snprintf(full, sizeof(full), "%.200s: %.60s", where, name);
    return assign(p, s, SRC_FILE, value, full);
}

static enum bt_status read_file(struct parser *p, const char *path, struct bt_buf *out)
{
    FILE *f = fopen(path, "re");
    enum bt_status st = BT_OK;
    char block[4096];
    size_t n;

    if (f == NULL) {
        return bt_err_set(p->err, BT_ERR_INVALID, "--config %.200s: %s", path, strerror(errno));
    }
    while (st == BT_OK && (n = fread(block, 1, sizeof(block), f)) > 0) {
        if (memchr(block, '\0', n) != NULL) {
            st = bt_err_set(p->err, BT_ERR_INVALID,
                            "--config %.200s: holds a zero byte, not a text file", path);
        } else if (out->len + n > CONFIG_BYTES_MAX) {
            st = bt_err_set(p->err, BT_ERR_INVALID, "--config %.200s: larger than 1 MiB", path);
        } else if (!bt_buf_add(out, block, n)) {
            st = bt_err_set(p->err, BT_ERR_NOMEM, "--config %.200s: out of memory", path);
        }
    }
    if (st == BT_OK && ferror(f)) {
        st = bt_err_set(p->err, BT_ERR_INVALID, "--config %.200s: %s", path, strerror(errno));
    }
    (void)fclose(f);
    return st;
}

static enum bt_status apply_file(struct parser *p, const char *path)
{
    struct bt_buf text = {0};
    enum bt_status st = read_file(p, path, &text);
    char *ln = text.data;

    for (unsigned number = 1; st == BT_OK && ln != NULL && *ln != '\0'; number++) {
        char *end = strchrnul(ln, '\n');
        char *next = *end == '\n' ? end + 1 : end;
        char where[240];
        (void)snprintf(where, sizeof(where), "%.200s:%u", path, number);
        *end = '\0';
        st = apply_line(p, ln, end, where);
        ln = next;
    }
    bt_buf_fini(&text);
    return st;
}

/* One argument that begins with "--"; next: the argument after it or NULL; *took_next: it was the
 * value. */
static enum bt_status scan_option(struct parser *p, const char *arg, const char *next,
                                  bool *took_next)
{
    const char *name = arg + 2;
    size_t len = strcspn(name, "=");
    const char *text = name[len] == '=' ? name + len + 1 : NULL;
    struct slot *s = find(p, name, len);

    *took_next = false;
    if (s == NULL && len > 3 && memcmp(name, "no-", 3) == 0) {
        s = find(p, name + 3, len - 3);
        if (s != NULL && s->opt->type == BT_OPT_BOOL && !is_common(p, s)) {
            if (text != NULL) {
                return bt_err_set(p->err, BT_ERR_INVALID, "--%.*s: takes no value", (int)len, name);
            }
            text = "false";
        } else {
            s = NULL;
        }
    }
    if (s == NULL) {
        return bt_err_set(p->err, BT_ERR_INVALID, "--%.*s: unknown option (see %s --help)",
                          (int)(len < 200 ? len : 200), name, p->prog->name);
    }
    if (text == NULL && s->opt->type == BT_OPT_BOOL) {
        text = "true";
    }
    if (text == NULL) {
        if (next == NULL || (next[0] == '-' && next[1] == '-')) {
            return bt_err_set(
                p->err, BT_ERR_INVALID,
                "--%s: needs a value (one that begins with -- is given as --%s=VALUE)",
                s->opt->name, s->opt->name);
        }
        text = next;
        *took_next = true;
    }
    p->uses[p->n_uses++] = (struct use){.slot = s, .text = text, .arg = arg, .arg_len = len + 2};
    if (is_of_run(p, s)) {
        char where[160];
        (void)snprintf(where, sizeof(where), "--%s", s->opt->name);
        return assign(p, s, SRC_ARG, text, where);
    }
    return BT_OK;
}

/* Fills p->uses and moves positional arguments behind the options in argv. moved: room for argc
 * pointers. */
static enum bt_status scan_args(struct parser *p, int argc, char **argv, char **moved,
                                struct bt_opt_result *res)
{
    int n_options = 0, n_positional = 0;
    bool options = true;

    for (int i = 1; i < argc; i++) {
        if (options && strcmp(argv[i], "--") == 0) {
            options = false;
            moved[n_options++] = argv[i];
        } else if (options && argv[i][0] == '-' && argv[i][1] == '-') {
            bool took;
            enum bt_status st = scan_option(p, argv[i], i + 1 < argc ? argv[i + 1] : NULL, &took);
            if (st != BT_OK) {
                return st;
            }
            moved[n_options++] = argv[i];
            if (took) {
                moved[n_options++] = argv[++i];
            }
        } else if (options && argv[i][0] == '-' && argv[i][1] != '\0') {
            return bt_err_set(p->err, BT_ERR_INVALID, "%.200s: unknown option (see %s --help)",
                              argv[i], p->prog->name);
        } else if (!p->prog->positionals) {
            return bt_err_set(p->err, BT_ERR_INVALID, "%.200s: unexpected argument (see %s --help)",
                              argv[i], p->prog->name);
        } else {
            argv[1 + n_positional++] = argv[i]; /* never ahead of i */
        }
    }
    memmove(argv + argc - n_positional, argv + 1, (size_t)n_positional * sizeof(*argv));
    memcpy(argv + 1, moved, (size_t)n_options * sizeof(*argv));
    res->n_positional = n_positional;
    res->positional = argv + argc - n_positional;
    return BT_OK;
}

/* Whether one of the words stands among the options: answered even if the rest of the line is
 * wrong. */
static bool asked_for(int argc, char **argv, const char *word, const char *other)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], word) == 0 || (other != NULL && strcmp(argv[i], other) == 0)) {
            return true;
        }
    }
    return false;
}

/* Output that the user asked for and did not get is an error. */
static enum bt_status print_out(struct bt_buf *b, struct bt_err *err)
{
    enum bt_status st = BT_OK;
    if (b->failed) {
        st = bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    } else if (fwrite(b->data, 1, b->len, stdout) != b->len || fflush(stdout) != 0) {
        st = bt_err_set(err, BT_ERR_IO, "stdout: %s", strerror(errno));
    }
    bt_buf_fini(b);
    return st;
}

static enum bt_status print_help(const struct bt_prog *prog, struct bt_err *err)
{
    struct bt_buf out = {0};
    struct winsize ws;
    unsigned columns = 80;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &ws) == 0 && ws.ws_col > 80) {
        columns = ws.ws_col < 100 ? ws.ws_col : 100;
    }
    bt_opt_help(prog, common_opts, N_COMMON, columns, &out);
    return print_out(&out, err);
}

/* Quotes a value that a config line would not give back as it is. */
static void add_quoted(struct bt_buf *out, const char *s)
{
    size_t n = strlen(s);
    bool plain = n > 0 && strpbrk(s, "#\"\n\r") == NULL && s[0] != ' ' && s[0] != '\t' &&
                 s[n - 1] != ' ' && s[n - 1] != '\t';
    if (plain) {
        bt_buf_adds(out, s);
        return;
    }
    bt_buf_addc(out, '"');
    for (; *s != '\0'; s++) {
        if (*s == '"' || *s == '\\') {
            bt_buf_addc(out, '\\');
        }
        if (*s == '\n' || *s == '\r') {
            bt_buf_adds(out, *s == '\n' ? "\\n" : "\\r");
        } else {
            bt_buf_addc(out, *s);
        }
    }
    bt_buf_addc(out, '"');
}

static enum bt_status print_config(struct parser *p)
{
    struct bt_buf out = {0};
    for (size_t i = 0; i < p->n_slots; i++) {
        const struct slot *s = &p->slots[i];
        struct bt_buf value = {0};
        if (is_of_run(p, s)) {
            continue;
        }
        if (bt_opt_format(s->opt, s->base, &value)) {
            bt_buf_addf(&out, "%s = ", s->opt->name);
            add_quoted(&out, value.data != NULL ? value.data : "");
            bt_buf_addc(&out, '\n');
        } else {
            bt_buf_addf(&out, "# %s =\n", s->opt->name);
        }
        out.failed = out.failed || value.failed;
        bt_buf_fini(&value);
    }
    return print_out(&out, p->err);
}

static enum bt_status parser_init(struct parser *p, int argc, void *cfg)
{
    p->n_slots = p->prog->n_opts + N_COMMON;
    p->slots = bt_calloc(p->n_slots, sizeof(*p->slots));
    p->uses = bt_calloc((size_t)argc + 1, sizeof(*p->uses));
    if (p->slots == NULL || p->uses == NULL) {
        return bt_err_set(p->err, BT_ERR_NOMEM, "out of memory");
    }
    for (size_t i = 0; i < p->prog->n_opts; i++) {
        p->slots[i] = (struct slot){.opt = &p->prog->opts[i], .base = cfg};
    }
    for (size_t i = 0; i < N_COMMON; i++) {
        p->slots[p->prog->n_opts + i] = (struct slot){.opt = &common_opts[i], .base = &p->common};
    }
    return BT_OK;
}

static enum bt_status parse_all(struct parser *p, int argc, char **argv, struct bt_opt_result *res)
{
    char **moved = bt_calloc((size_t)argc + 1, sizeof(*moved));
    if (moved == NULL) {
        return bt_err_set(p->err, BT_ERR_NOMEM, "out of memory");
    }
    enum bt_status st = scan_args(p, argc, argv, moved, res);
    bt_free(moved);
    if (st != BT_OK || (st = apply_defaults(p)) != BT_OK) {
        return st;
    }
    const char *path = p->common.config != NULL ? p->common.config : getenv("BATON_CONFIG");
    if (path != NULL && path[0] != '\0' && (st = apply_file(p, path)) != BT_OK) {
        return st;
    }
    st = apply_env(p);
    return st == BT_OK ? apply_args(p) : st;
}

enum bt_status bt_opt_parse(const struct bt_prog *prog, int argc, char **argv, void *cfg,
                            struct bt_opt_result *res, struct bt_err *err)
{
    struct parser p = {.prog = prog, .err = err};

    *res = (struct bt_opt_result){0};
    if (asked_for(argc, argv, "--help", "-h")) {
        res->exit_now = true;
        return print_help(prog, err);
    }
    if (asked_for(argc, argv, "--version", NULL)) {
        struct bt_buf out = {0};
        res->exit_now = true;
        bt_buf_addf(&out, "%s %s\n", prog->name, BT_VERSION);
        return print_out(&out, err);
    }
    enum bt_status st = parser_init(&p, argc, cfg);
    if (st == BT_OK) {
        st = parse_all(&p, argc, argv, res);
    }
    if (st == BT_OK && p.common.dump_config) {
        res->exit_now = true;
        st = print_config(&p);
    }
    if (st == BT_OK) {
        bt_log_setup((enum bt_log_level)p.common.log_level,
                     (enum bt_log_format)p.common.log_format);
    } else {
        bt_opt_free(prog, cfg);
    }
    bt_free(p.common.config);
    bt_free(p.slots);
    bt_free(p.uses);
    return st;
}

void bt_opt_free(const struct bt_prog *prog, void *cfg)
{
    for (size_t i = 0; i < prog->n_opts; i++) {
        if (prog->opts[i].type == BT_OPT_STR || prog->opts[i].type == BT_OPT_LIST) {
            char **field = (char **)(void *)((char *)cfg + prog->opts[i].offset);
            bt_free(*field);
            *field = NULL;
        }
    }
}
