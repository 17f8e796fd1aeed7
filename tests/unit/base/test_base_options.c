/* Options: every type, every source, which one wins, and the words of every error. */

#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>
#include "base/buf.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/options.h"
#include "tests/check.h"

struct cfg {
    char *listen;
    uint32_t chunk;
    uint64_t big, kv_bytes, lease;
    double ratio;
    bool warm, cold, no_quick;
    int backend;
    char *routers;
};

static const struct bt_opt opts[] = {
    {"listen", BT_OPT_STR, offsetof(struct cfg, listen), "127.0.0.1:0", 0, 0, NULL, "HOST:PORT",
     "Address for clients."},
    {"chunk-tokens", BT_OPT_U32, offsetof(struct cfg, chunk), "512", 1, 4096, NULL, NULL,
     "Tokens a chunk."},
    {"big", BT_OPT_U64, offsetof(struct cfg, big), NULL, 0, 0, NULL, NULL, "A large number."},
    {"kv-bytes", BT_OPT_SIZE, offsetof(struct cfg, kv_bytes), "1MiB", 4096, 1 << 30, NULL, NULL,
     "Bytes of KV."},
    {"lease", BT_OPT_DURATION, offsetof(struct cfg, lease), "3s", 0, 0, NULL, NULL,
     "How long a lease lasts."},
    {"ratio", BT_OPT_DOUBLE, offsetof(struct cfg, ratio), "0.1", -1, 1, NULL, NULL, "A ratio."},
    {"warm", BT_OPT_BOOL, offsetof(struct cfg, warm), "true", 0, 0, NULL, NULL, "Warm up."},
    {"cold", BT_OPT_BOOL, offsetof(struct cfg, cold), NULL, 0, 0, NULL, NULL, "Cold."},
    {"no-quick", BT_OPT_BOOL, offsetof(struct cfg, no_quick), NULL, 0, 0, NULL, NULL,
     "Its own name begins with no-."},
    {"backend", BT_OPT_ENUM, offsetof(struct cfg, backend), "cuda", 0, 0, "cpu|cuda|emulated", NULL,
     "Which backend."},
    {"router", BT_OPT_LIST, offsetof(struct cfg, routers), NULL, 0, 0, NULL, "HOST:PORT",
     "Routers."},
};

static const struct bt_prog prog = {
    .name = "baton-test",
    .summary = "A program that does nothing.",
    .epilogue = "Example:\n  baton-test --warm",
    .opts = opts,
    .n_opts = sizeof(opts) / sizeof(opts[0]),
    .positionals = true,
};

#define MAX_ARGS 16

static struct cfg cfg;
static struct bt_opt_result res;
static struct bt_err err;
static char *argv_now[MAX_ARGS];

/* Parses the arguments (ended by NULL) into cfg, res, err. */
static enum bt_status parse(const char *arg, ...)
{
    static char store[MAX_ARGS][512];
    int argc = 1;
    va_list ap;
    bt_opt_free(&prog, &cfg);
    memset(&cfg, 0, sizeof(cfg));
    err = (struct bt_err){0};
    (void)snprintf(store[0], sizeof(store[0]), "baton-test");
    argv_now[0] = store[0];
    va_start(ap, arg);
    for (const char *a = arg; a != NULL && argc < MAX_ARGS - 1; a = va_arg(ap, const char *)) {
        (void)snprintf(store[argc], sizeof(store[argc]), "%s", a);
        argv_now[argc] = store[argc];
        argc++;
    }
    va_end(ap);
    argv_now[argc] = NULL;
    return bt_opt_parse(&prog, argc, argv_now, &cfg, &res, &err);
}

static const char *write_config(const char *text)
{
    static char path[64];
    (void)snprintf(path, sizeof(path), "/tmp/baton-config-%d", (int)getpid());
    FILE *f = fopen(path, "w");
    CHECK(f != NULL);
    if (f != NULL) {
        (void)fputs(text, f);
        (void)fclose(f);
    }
    return path;
}

static void test_defaults_and_types(void)
{
    CHECK_EQ(parse(NULL), BT_OK);
    CHECK(!res.exit_now && res.n_positional == 0);
    CHECK_STR(cfg.listen, "127.0.0.1:0");
    CHECK_EQ(cfg.chunk, 512);
    CHECK_EQ(cfg.big, 0);
    CHECK_EQ(cfg.kv_bytes, 1 << 20);
    CHECK_EQ(cfg.lease, INT64_C(3000000000));
    CHECK(cfg.ratio == 0.1 && cfg.warm && !cfg.cold);
    CHECK_EQ(cfg.backend, 1);
    CHECK(cfg.routers == NULL);

    CHECK_EQ(parse("--big=18446744073709551615", "--kv-bytes", "64KiB", "--lease", "1.5s",
                   "--ratio=-1", "--no-warm", "--cold", "--backend=emulated", "--listen=--odd=x",
                   NULL),
             BT_OK);
    CHECK(cfg.big == UINT64_MAX);
    CHECK_EQ(cfg.kv_bytes, 65536);
    CHECK_EQ(cfg.lease, 1500000000);
    CHECK(cfg.ratio == -1 && !cfg.warm && cfg.cold);
    CHECK_EQ(cfg.backend, 2);
    CHECK_STR(cfg.listen, "--odd=x");
    CHECK_EQ(parse("--ratio", "-0.5", "--no-quick", "--warm=off", "--cold=1", "--listen=", NULL),
             BT_OK);
    CHECK(cfg.ratio == -0.5 && cfg.no_quick && !cfg.warm && cfg.cold);
    CHECK_STR(cfg.listen, "");
    CHECK_EQ(parse("--chunk-tokens", "1", "--chunk-tokens", "4096", NULL),
             BT_OK); /* the last one counts */
    CHECK_EQ(cfg.chunk, 4096);
}

static void test_positionals(void)
{
    CHECK_EQ(parse("a", "--big", "1", "-", "--cold", "b", "--", "--listen", "-x", NULL), BT_OK);
    CHECK_EQ(res.n_positional, 5);
    static const char *const want[] = {"a", "-", "b", "--listen", "-x"};
    for (int i = 0; i < 5; i++) {
        CHECK_STR(res.positional[i], want[i]);
    }
    static const char *const moved[] = {"baton-test", "--big", "1", "--cold",   "--",
                                        "a",          "-",     "b", "--listen", "-x"};
    for (int i = 0; i < 10; i++) {
        CHECK_STR(argv_now[i], moved[i]);
    }
    CHECK_STR(cfg.listen, "127.0.0.1:0");
    CHECK_EQ(parse("--", "--help", NULL), BT_OK);
    CHECK(!res.exit_now && res.n_positional == 1);

    struct bt_prog strict = prog;
    strict.positionals = false;
    char name[] = "t", arg[] = "stray";
    char *argv[] = {name, arg, NULL};
    CHECK_EQ(bt_opt_parse(&strict, 2, argv, &cfg, &res, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "stray: unexpected argument") != NULL);
}

static void test_list(void)
{
    CHECK_EQ(parse("--router", "a:1", "--router=b:2,c:3", "--router", "d", NULL), BT_OK);
    CHECK_STR(cfg.routers, "a:1,b:2,c:3,d");
    (void)setenv("BATON_ROUTER", "env:1", 1);
    CHECK_EQ(parse("--router", "a:1", NULL), BT_OK); /* a stronger source replaces */
    CHECK_STR(cfg.routers, "a:1");
    CHECK_EQ(parse("--config", write_config("router = f:1\nrouter = f:2\n"), NULL), BT_OK);
    CHECK_STR(cfg.routers, "env:1");
    (void)unsetenv("BATON_ROUTER");
    CHECK_EQ(parse("--config", write_config("router = f:1\nrouter = f:2\n"), NULL), BT_OK);
    CHECK_STR(cfg.routers, "f:1,f:2");
}

static void test_precedence(void)
{
    const char *path = write_config("chunk-tokens = 2\n");
    CHECK_EQ(parse("--config", path, NULL), BT_OK);
    CHECK_EQ(cfg.chunk, 2);
    (void)setenv("BATON_CHUNK_TOKENS", "3", 1);
    CHECK_EQ(parse("--config", path, NULL), BT_OK);
    CHECK_EQ(cfg.chunk, 3);
    CHECK_EQ(parse("--chunk-tokens=4", "--config", path, NULL), BT_OK);
    CHECK_EQ(cfg.chunk, 4);
    (void)setenv("BATON_CHUNK_TOKENS", "0", 1);
    CHECK_EQ(parse("--chunk-tokens=4", NULL), BT_ERR_INVALID); /* wrong even though it would lose */
    CHECK_STR(err.msg, "BATON_CHUNK_TOKENS: 0 is out of range (1 to 4096)");
    (void)setenv("BATON_CHUNK_TOKENS", "", 1);
    CHECK_EQ(parse(NULL), BT_OK);
    CHECK_EQ(cfg.chunk, 512);
    (void)unsetenv("BATON_CHUNK_TOKENS");
    (void)setenv("BATON_CONFIG", path, 1);
    CHECK_EQ(parse(NULL), BT_OK);
    CHECK_EQ(cfg.chunk, 2);
    (void)unsetenv("BATON_CONFIG");
    CHECK_EQ(parse("--log-level", "debug", NULL), BT_OK);
    CHECK(bt_log_on(BT_LOG_DEBUG) && !bt_log_on(BT_LOG_TRACE));
    CHECK_EQ(parse("--config", write_config("log-level = error\n"), NULL), BT_OK);
    CHECK(!bt_log_on(BT_LOG_WARN));
    CHECK_EQ(parse(NULL), BT_OK);
    CHECK(bt_log_on(BT_LOG_INFO));
}

#define CHECK_FAILS(want, ...)                                                                     \
    do {                                                                                           \
        CHECK_EQ(parse(__VA_ARGS__, NULL), BT_ERR_INVALID);                                        \
        CHECK(strstr(err.msg, want) != NULL);                                                      \
        if (strstr(err.msg, want) == NULL) {                                                       \
            fprintf(stderr, "  got: %s\n", err.msg);                                               \
        }                                                                                          \
        CHECK(cfg.listen == NULL);                                                                 \
    } while (0)

static void test_errors(void)
{
    CHECK_FAILS("--nope: unknown option", "--nope");
    CHECK_FAILS("--nope: unknown option", "--nope=3");
    CHECK_FAILS("-v: unknown option", "-v");
    CHECK_FAILS("--no-listen: unknown option", "--no-listen");
    CHECK_FAILS("--no-help: unknown option", "--no-help");
    CHECK_FAILS("--no-warm: takes no value", "--no-warm=true");
    CHECK_FAILS("--chunk-tokens: needs a value", "--chunk-tokens");
    CHECK_FAILS("--chunk-tokens: needs a value", "--chunk-tokens", "--cold");
    CHECK_FAILS("--chunk-tokens: 0 is out of range (1 to 4096)", "--chunk-tokens", "0");
    CHECK_FAILS("--chunk-tokens: 4097 is out of range", "--chunk-tokens=4097");
    CHECK_FAILS("--chunk-tokens: \"-1\" is not a whole number", "--chunk-tokens", "-1");
    CHECK_FAILS("is not a whole number", "--chunk-tokens", " 1");
    CHECK_FAILS("is not a whole number", "--chunk-tokens", "+1");
    CHECK_FAILS("is not a whole number", "--chunk-tokens", "0x10");
    CHECK_FAILS("is not a whole number", "--chunk-tokens=");
    CHECK_FAILS("is not a whole number", "--big=18446744073709551616");
    CHECK_FAILS("--kv-bytes: 1KiB is out of range (4KiB to 1GiB)", "--kv-bytes=1KiB");
    CHECK_FAILS("--kv-bytes: \"64K\" is not a size", "--kv-bytes=64K");
    CHECK_FAILS("--kv-bytes: \"-1\" is not a size", "--kv-bytes=-1");
    CHECK_FAILS("--lease: \"3 days\" is not a duration", "--lease=3 days");
    CHECK_FAILS("--ratio: \"nan\" is not a number", "--ratio=nan");
    CHECK_FAILS("--ratio: \"1x\" is not a number", "--ratio=1x");
    CHECK_FAILS("--ratio: 1.5 is out of range (-1 to 1)", "--ratio=1.5");
    CHECK_FAILS("--cold: \"maybe\" is not true or false", "--cold=maybe");
    CHECK_FAILS("--backend: \"tpu\" is none of cpu|cuda|emulated", "--backend", "tpu");
    CHECK_FAILS("--backend: \"cp\" is none of", "--backend", "cp");
    CHECK_FAILS("--backend: \"\" is none of", "--backend=");
    CHECK_FAILS("--backend: \"cpu|cuda\" is none of", "--backend=cpu|cuda");
    CHECK_FAILS("--log-level: \"loud\" is none of", "--log-level=loud");
    CHECK_FAILS("--config /nonexistent/x: No such file", "--config", "/nonexistent/x");
    CHECK_FAILS("--config /: ", "--config", "/");
    CHECK_FAILS("--dump-config: \"x\" is not true or false", "--dump-config=x");
}

static void file_fails(const char *text, const char *want)
{
    CHECK_EQ(parse("--config", write_config(text), NULL), BT_ERR_INVALID);
    CHECK(strstr(err.msg, want) != NULL);
    if (strstr(err.msg, want) == NULL) {
        fprintf(stderr, "  got: %s\n", err.msg);
    }
}

static void test_file(void)
{
    CHECK_EQ(parse("--config",
                   write_config(
                       "# comment\r\n\n  chunk-tokens=7   # seven\r\n\tlisten = a#b  \nbig =  9\n"
                       "router = \" x # \\\"y\\\\ \" # more\nwarm = no"),
                   NULL),
             BT_OK);
    CHECK_EQ(cfg.chunk, 7);
    CHECK_EQ(cfg.big, 9);
    CHECK_STR(cfg.listen, "a#b");
    CHECK_STR(cfg.routers, " x # \"y\\ ");
    CHECK(!cfg.warm);
    CHECK_EQ(parse("--config", write_config("listen = # none\n"), NULL), BT_OK);
    CHECK_STR(cfg.listen, "");
    CHECK_EQ(parse("--config", write_config(""), NULL), BT_OK);

    file_fails("\n\nchunk-token = 1\n", ":3: unknown option \"chunk-token\"");
    file_fails("chunk-tokens 1\n", ":1: no '=' in \"chunk-tokens 1\"");
    file_fails("chunk-tokens = x\n", ":1: chunk-tokens: \"x\" is not a whole number");
    file_fails("chunk-tokens = 0\n", ":1: chunk-tokens: 0 is out of range");
    file_fails("help = true\n", "unknown option \"help\"");
    file_fails("config = other\n", "unknown option \"config\"");
    file_fails("= 3\n", "unknown option \"\"");
    file_fails("listen = \"abc\n", ":1: listen: the quoted value does not end");
    file_fails("listen = \"abc\" d\n", "the quoted value does not end");

    const char *path = write_config("");
    FILE *f = fopen(path, "w");
    CHECK(f != NULL);
    if (f != NULL) {
        (void)fwrite("big = 1\0\n", 1, 9, f);
        (void)fclose(f);
    }
    CHECK_FAILS("zero byte", "--config", path);
    f = fopen(path, "w");
    CHECK(f != NULL);
    for (int i = 0; f != NULL && i < 40000; i++) {
        (void)fputs("# thirty characters of comment\n", f);
    }
    if (f != NULL) {
        (void)fclose(f);
    }
    CHECK_FAILS("larger than 1 MiB", "--config", path);
}

static int saved_stdout = -1;
static FILE *capture;

static void capture_start(void)
{
    (void)fflush(stdout);
    capture = tmpfile();
    saved_stdout = dup(STDOUT_FILENO);
    CHECK(capture != NULL && saved_stdout >= 0);
    (void)dup2(fileno(capture), STDOUT_FILENO);
}

static void capture_end(struct bt_buf *out)
{
    char block[1024];
    size_t n;
    (void)fflush(stdout);
    (void)dup2(saved_stdout, STDOUT_FILENO);
    (void)close(saved_stdout);
    rewind(capture);
    bt_buf_clear(out);
    CHECK(bt_buf_reserve(out, 1));
    while ((n = fread(block, 1, sizeof(block), capture)) > 0) {
        bt_buf_add(out, block, n);
    }
    (void)fclose(capture);
}

static void test_output(void)
{
    struct bt_buf out = {0};
    capture_start();
    CHECK_EQ(parse("--nope", "--help", NULL), BT_OK);
    capture_end(&out);
    CHECK(res.exit_now);
    CHECK(strncmp(out.data, "Usage: baton-test [options]\n\nA program", 38) == 0);
    for (size_t i = 0; i < prog.n_opts; i++) {
        CHECK(strstr(out.data, opts[i].name) != NULL && strstr(out.data, opts[i].help) != NULL);
    }
    static const char *const parts[] = {
        "[env: BATON_CHUNK_TOKENS]",       "[default: 512]",    "--[no-]warm", "--log-level LEVEL",
        "Example:\n  baton-test --warm\n", "--listen HOST:PORT"};
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        CHECK(strstr(out.data, parts[i]) != NULL);
    }
    for (const char *p = out.data; *p != '\0';) {
        size_t n = strcspn(p, "\n");
        CHECK(n <= 100 && (n == 0 || p[n - 1] != ' '));
        p += n + (p[n] == '\n');
    }
    capture_start();
    CHECK_EQ(parse("--version", NULL), BT_OK);
    capture_end(&out);
    CHECK(res.exit_now);
    CHECK_STR(out.data, "baton-test " BT_VERSION "\n");

    /* What --dump-config prints reads back as the same configuration. */
    struct bt_buf again = {0};
    capture_start();
    CHECK_EQ(parse("--dump-config", "--listen= a \"#\\ b\n", "--ratio=0.30000000000000004",
                   "--lease=1500ms", "--cold", "--kv-bytes=5000", "--log-level=warn", NULL),
             BT_OK);
    capture_end(&out);
    CHECK(res.exit_now);
    CHECK(strstr(out.data, "chunk-tokens = 512\n") != NULL);
    CHECK(strstr(out.data, "lease = 1500ms\n") != NULL);
    CHECK(strstr(out.data, "kv-bytes = 5000\n") != NULL);
    CHECK(strstr(out.data, "# router =\n") != NULL);
    CHECK(strstr(out.data, "log-level = warn\n") != NULL);
    capture_start();
    CHECK_EQ(parse("--config", write_config(out.data), "--dump-config", NULL), BT_OK);
    capture_end(&again);
    CHECK_STR(again.data, out.data);
    CHECK_STR(cfg.listen, " a \"#\\ b\n");
    CHECK(cfg.ratio == 0.30000000000000004);
    bt_buf_fini(&out);
    bt_buf_fini(&again);
}

static void test_units(void)
{
    uint64_t v = 77;
    CHECK_EQ(bt_parse_size("0", &v), BT_OK);
    CHECK_EQ(v, 0);
    CHECK(bt_parse_size("512B", &v) == BT_OK && v == 512);
    CHECK(bt_parse_size("1.5GiB", &v) == BT_OK && v == UINT64_C(1610612736));
    CHECK(bt_parse_size("2 MiB", &v) == BT_OK && v == 2 << 20);
    CHECK(bt_parse_size("18446744073709551615", &v) == BT_OK && v == UINT64_MAX);
    static const char *const bad[] = {
        "",    " 1", "1k",  "1kib", "KiB",   "18446744073709551616", "16777216TiB", "1.",
        "1.x", ".5", "1e3", "-1",   "1KiB ", "1.0000000001"};
    v = 77;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        CHECK_EQ(bt_parse_size(bad[i], &v), BT_ERR_INVALID);
    }
    CHECK_EQ(v, 77);
    CHECK(bt_parse_duration("250", &v) == BT_OK && v == 250000000);
    CHECK(bt_parse_duration("0.5ms", &v) == BT_OK && v == 500000);
    CHECK(bt_parse_duration("2min", &v) == BT_OK && v == UINT64_C(120000000000));
    CHECK(bt_parse_duration("1h", &v) == BT_OK && v == UINT64_C(3600000000000));
    CHECK(bt_parse_duration("7us", &v) == BT_OK && v == 7000);
    CHECK(bt_parse_duration("7ns", &v) == BT_OK && v == 7);
    CHECK_EQ(bt_parse_duration("600000000h", &v), BT_ERR_INVALID);
    CHECK_EQ(bt_parse_duration("3m", &v), BT_ERR_INVALID);
}

/* Every allocation fails once: an error, no leak, then success. */
static void test_nomem(void)
{
    const char *path = write_config("listen = \"a b\"\nrouter = x\nrouter = y\n");
    bool fired = true;
    bt_opt_free(&prog, &cfg);
    size_t before = bt_test_live_bytes();
    for (uint64_t nth = 0; fired && nth < 100; nth++) {
        bt_test_fail_alloc(nth);
        enum bt_status st = parse("--config", path, "--router", "a", "--router", "b", "pos", NULL);
        fired = bt_test_fail_alloc_off();
        CHECK_EQ(st, fired ? BT_ERR_NOMEM : BT_OK);
        bt_opt_free(&prog, &cfg);
        CHECK_EQ(bt_test_live_bytes(), before);
    }
    CHECK(!fired);
}

int main(void)
{
    test_defaults_and_types();
    test_positionals();
    test_list();
    test_precedence();
    test_errors();
    test_file();
    test_output();
    test_units();
    test_nomem();
    bt_opt_free(&prog, &cfg);
    (void)unlink(write_config(""));
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
