/* The engine alone: no daemon, no network. Times prompts of given lengths and decode steps at given batches and contexts, says
 * where the time goes by kind of kernel and by matrix, how long loading took beside reading the file once, and what is resident
 * beside packed weights and KV. The KV cache of decode runs is filled with made-up values, so that a long context costs no
 * prompt. */

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/mem.h"
#include "base/options.h"
#include "bench/engine/part_times.h"
#include "bench/engine/run_limits.h"
#include "engine/engine_int.h"
#include "kernels/kv_type.h"
#include "kernels/open.h"

#define REPEATS_MAX  256U
#define STEPS_MAX    4096U
#define MATRICES_MAX 32U
#define WARM_STEPS   2U
#define LIMIT_STEPS  8U /* decode steps between two looks at the limits */

struct config {
    char *prefill, *decode;
    uint32_t threads, device, page_tokens, chunk_tokens, steps, repeat;
    int backend, isa, kv_dtype, numerics;
    char *panels;
    bool limits, json;
};

#define ROW(name, type, field, dflt, lo, hi, choices, arg, help)                                   \
    {name, type, offsetof(struct config, field), dflt, lo, hi, choices, arg, help}
static const char *const backends[] = {"cpu", "cuda"};
static const struct bt_opt options[] = {
    ROW("backend", BT_OPT_ENUM, backend, "cpu", 0, 0, "cpu|cuda", NULL, "Where the model runs."),
    ROW("device", BT_OPT_U32, device, "0", 0, 255, NULL, "N", "Index of the device to use."),
    ROW("threads", BT_OPT_U32, threads, "0", 0, 1024, NULL, "N",
        "Compute threads; 0: every CPU that this process may use."),
    ROW("isa", BT_OPT_ENUM, isa, "auto", 0, 0, BT_K_ISAS, NULL,
        "Instruction set of the CPU kernels."),
    ROW("numerics", BT_OPT_ENUM, numerics, "auto", 0, 0, "auto|" BT_K_ALL_CLASSES, NULL,
        "Numerics class; auto: by the weights."),
    ROW("kv-dtype", BT_OPT_ENUM, kv_dtype, "auto", 0, 0, BT_K_KV_TYPES, NULL,
        "Element type of the KV cache; auto: as nodes have it."),
    ROW("page-tokens", BT_OPT_U32, page_tokens, "16", 1, 4096, NULL, "N", "Tokens in a KV page."),
    ROW("chunk-tokens", BT_OPT_U32, chunk_tokens, "512", 1, 65536, NULL, "N",
        "Prompt tokens computed in one step at most."),
    ROW("prefill", BT_OPT_LIST, prefill, "512", 0, 0, NULL, "N[,N...]",
        "Lengths of prompts to time, in tokens; 0: none."),
    ROW("decode", BT_OPT_LIST, decode, "1@512,8@512", 0, 0, NULL, "B@C[,...]",
        "Batches to time: B sequences, each with C tokens before; 0: none."),
    ROW("steps", BT_OPT_U32, steps, "32", 1, STEPS_MAX - WARM_STEPS, NULL, "N",
        "Decode steps to time for each."),
    ROW("repeat", BT_OPT_U32, repeat, "5", 1, REPEATS_MAX, NULL, "N",
        "Times each prompt is computed; the median counts."),
    ROW("panels", BT_OPT_STR, panels, NULL, 0, 0, NULL, "DIR",
        "Keep packed weights in this folder, as nodes do; a second run finds them there."),
    ROW("limits", BT_OPT_BOOL, limits, "false", 0, 0, NULL, NULL,
        "Measure FMA and reading between the steps, with as many threads, and print shares of "
        "both."),
    ROW("json", BT_OPT_BOOL, json, "false", 0, 0, NULL, NULL, "One JSON object, nothing else."),
};

static const struct bt_prog prog = {.name = "bench-engine",
                                    .summary = "Times the engine alone, without daemons.",
                                    .usage = "[options] DIR_OR_GGUF",
                                    .opts = options,
                                    .n_opts = sizeof(options) / sizeof(options[0]),
                                    .positionals = true};

static struct config cfg;
static struct bt_engine *engine;
static uint32_t n_delivered; /* tokens that hooks have seen */

_Noreturn static void die(const char *text)
{
    fprintf(stderr, "bench-engine: %s\n", text);
    exit(1);
}

static void on_token(void *arg, const struct bt_engine_token *t)
{
    (void)arg;
    (void)t;
    n_delivered++;
}

/* ---- what is to be measured ---- */

#define CASES_MAX 32U
struct one_case {
    uint32_t batch, context; /* batch 0: a prompt of `context` tokens */
};
static struct one_case cases[CASES_MAX];
static uint32_t n_cases;

static void add_case(uint32_t batch, uint32_t context)
{
    if (n_cases == CASES_MAX) {
        die("too many lengths and batches");
    }
    cases[n_cases++] = (struct one_case){.batch = batch, .context = context};
}

static void parse_cases(void)
{
    char *save = NULL, *end;

    for (char *s = strtok_r(cfg.prefill, ",", &save); s != NULL; s = strtok_r(NULL, ",", &save)) {
        unsigned long n = strtoul(s, &end, 10);
        if (*end != 0 || n > 1U << 20) {
            die("--prefill: numbers of tokens, separated by commas");
        }
        if (n > 0) {
            add_case(0, (uint32_t)n);
        }
    }
    for (char *s = strtok_r(cfg.decode, ",", &save); s != NULL; s = strtok_r(NULL, ",", &save)) {
        unsigned long b = strtoul(s, &end, 10), c = 0;
        if (*end == '@') {
            c = strtoul(end + 1, &end, 10);
        }
        if (*end != 0 || b > 4096 || c > 1U << 20 || (b > 0 && c == 0)) {
            die("--decode: B@C, separated by commas");
        }
        if (b > 0) {
            add_case((uint32_t)b, (uint32_t)c);
        }
    }
}

/* ---- the model from outside ---- */

static size_t kv_bytes_per_token(const struct bt_model_info *m, enum bt_dtype t)
{
    return (size_t)m->n_layers * 2 * m->n_kv_heads * m->head_dim * bt_dtype_block_bytes(t);
}

struct sizes {
    uint64_t packed_bytes, body_ops, head_ops; /* operations for one row: all layers; the output */
};

static struct sizes model_sizes(const struct bt_model *m)
{
    struct sizes z = {0};
    const struct bt_kweight *head = m->config.tied ? m->embed : m->output;

    for (size_t i = 0; i < m->n_slots; i++) {
        const struct bt_slot *s = &m->slots[i];
        if (s->weight == NULL || !s->for_gemm) {
            continue;
        }
        uint64_t ops = 2ULL * s->n_rows * s->n_cols;
        z.packed_bytes += bt_k_weight_bytes(*s->weight);
        if (*s->weight == head) {
            z.head_ops += ops;
        } else if (m->config.n_experts > 0 && strstr(s->tensor->name, "exp") != NULL) {
            z.body_ops += ops * m->config.n_experts_used / m->config.n_experts;
        } else {
            z.body_ops += ops;
        }
    }
    return z;
}

/* Products and causal attention of n tokens that follow `pos` others; windows are looked at roughly. */
static double ops_of(const struct sizes *z, uint32_t n, uint32_t pos, uint32_t n_out)
{
    const struct bt_model_info *m = engine->info;
    double pairs = 0;

    for (uint32_t g = 0; g < m->n_groups; g++) {
        double w = m->groups[g].window, sum = 0;
        for (uint32_t i = 0; i < n; i++) {
            double keys = (double)pos + i + 1;
            sum += w > 0 && keys > w ? w : keys;
        }
        pairs += sum * m->groups[g].n_layers;
    }
    return (double)z->body_ops * n + (double)z->head_ops * n_out +
           4.0 * m->n_heads * m->head_dim * pairs;
}

static double read_once_s(const char *path)
{
    static char buf[1 << 20];
    double best = 0;

    for (int rep = 0; rep < 2; rep++) { /* the second time from the page cache */
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        uint64_t t0 = bt_clock_ns();
        struct stat st;
        if (fd < 0 || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
            if (fd >= 0) {
                close(fd);
            }
            return 0; /* a directory: not measured */
        }
        while (read(fd, buf, sizeof(buf)) > 0) {
        }
        best = (double)(bt_clock_ns() - t0) * 1e-9;
        close(fd);
    }
    return best;
}

/* A line of /proc/self/status in bytes. */
static uint64_t status_bytes(const char *key)
{
    char line[256];
    uint64_t kib = 0;
    FILE *f = fopen("/proc/self/status", "re");

    while (f != NULL && fgets(line, sizeof(line), f) != NULL) {
        if (strncmp(line, key, strlen(key)) == 0) {
            kib = strtoull(line + strlen(key), NULL, 10);
        }
    }
    if (f != NULL) {
        (void)fclose(f);
    }
    return kib * 1024;
}

/* ---- running ---- */

static const struct bt_sampling greedy = {
    .top_p = 1.0F, .repetition_penalty = 1.0F, .max_tokens = 1, .ignore_eos = true};

static uint32_t *made_up_tokens(uint32_t n)
{
    uint32_t *t = bt_alloc(n * sizeof(*t)), s = 1;

    if (t == NULL) {
        die("out of memory");
    }
    for (uint32_t i = 0; i < n; i++) {
        s = s * 1664525U + 1013904223U;
        t[i] = (s >> 8) % engine->info->vocab;
    }
    return t;
}

static void forget_times(void)
{
    static struct bench_matrix ignored[MATRICES_MAX];

    (void)bench_parts_take();
    (void)bench_parts_matrices(engine->model, ignored, MATRICES_MAX);
}

static void step(void)
{
    struct bt_engine_step_stats stats;
    bool worked;

    if (bt_engine_step(engine, &worked, &stats) != BT_OK || !worked) {
        die("a step did nothing");
    }
}

static void look_at_limits(void)
{
    if (cfg.limits) {
        bench_run_limits_look(cfg.threads != 0 ? cfg.threads : bt_cpus_usable());
    }
}

static double run_prompt(const uint32_t *tokens, uint32_t n, bool forget)
{
    struct bt_engine_req req = {
        .tokens = tokens, .n_tokens = n, .n_prompt = n, .sampling = &greedy};
    struct bt_err err = {0};
    bt_seq_id id;
    uint64_t t0 = bt_clock_ns();

    bench_parts_begin(forget);
    n_delivered = 0;
    if (bt_engine_submit(engine, &req, &id, &err) != BT_OK) {
        die(err.msg);
    }
    while (n_delivered == 0) {
        step();
    }
    uint64_t took = bt_clock_ns() - t0;
    bench_parts_end(took);
    bt_engine_release(engine, id);
    return (double)took * 1e-9;
}

/* Values as activations have them, in every page of the sequence. */
static void fill_pages(const struct bt_engine_landing *l)
{
    static const uint32_t halves[] = {0x3c003800U, 0xb400b800U, 0x3a00b000U, 0x34003400U};

    for (uint32_t g = 0; g < engine->layout.n_groups; g++) {
        size_t bytes = engine->layout.groups[g].page_layer_bytes;
        uint8_t *share = bt_alloc(bytes); /* the pages may be a device's */
        if (share == NULL) {
            die("out of memory");
        }
        for (uint32_t p = l->first_page[g]; p < l->n_pages; p++) {
            for (uint32_t layer = 0; layer < engine->layout.groups[g].n_layers; layer++) {
                uint8_t *at = engine->layout.groups[g].base +
                              layer * engine->layout.groups[g].layer_stride +
                              l->page_ids[g][p] * engine->layout.groups[g].page_stride;
                for (size_t i = 0; i < bytes; i += 4) {
                    memcpy(share + i, &halves[(i / 4 * 7 + p) % 4], 4);
                }
                bt_k_write(engine->k, at, share, bytes);
            }
        }
        bt_free(share);
    }
}

/* Step times of a batch, in seconds, and those of the device: both hold cfg.steps. */
static void run_batch(const uint32_t *tokens, const struct one_case *c, double *steps,
                      double *device)
{
    struct bt_sampling sampling = greedy;
    struct bt_engine_req req = {
        .tokens = tokens, .n_tokens = c->context, .n_prompt = c->context, .sampling = &sampling};
    bt_seq_id *ids = bt_alloc(c->batch * sizeof(*ids));
    struct bt_err err = {0};

    sampling.max_tokens = cfg.steps + WARM_STEPS + 2;
    for (uint32_t i = 0; ids != NULL && i < c->batch; i++) {
        struct bt_engine_landing l;
        if (bt_engine_land(engine, &req, &l, &err) != BT_OK) {
            die(err.msg);
        }
        fill_pages(&l);
        ids[i] = l.seq;
        if (bt_engine_start(engine, l.seq, tokens[i % c->context]) != BT_OK) {
            die("a sequence does not start");
        }
    }
    for (uint32_t i = 0; ids != NULL && i < WARM_STEPS + cfg.steps; i++) {
        if (i % LIMIT_STEPS == 0) {
            look_at_limits();
        }
        bench_parts_begin(i <= WARM_STEPS);
        uint64_t t0 = bt_clock_ns();
        n_delivered = 0;
        step();
        uint64_t took = bt_clock_ns() - t0;
        bench_parts_end(took);
        if (n_delivered != c->batch) {
            die("a step left a sequence out");
        }
        if (i >= WARM_STEPS) {
            steps[i - WARM_STEPS] = (double)took * 1e-9;
            device[i - WARM_STEPS] = (double)bt_k_step_device_ns(engine->k) * 1e-9;
        } else {
            (void)bt_k_step_device_ns(engine->k); /* they are timed from now on */
            forget_times();
        }
    }
    for (uint32_t i = 0; ids != NULL && i < c->batch; i++) {
        bt_engine_release(engine, ids[i]);
    }
    bt_free(ids);
}

/* ---- what is told ---- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

struct result {
    double s;       /* median of a prompt or a step */
    double total;   /* all of them */
    double slowed;  /* the median's time over that of the fastest */
    double outside; /* median of a step's time beyond the device's in its graph; 0: not known */
    double
        quiet; /* the fastest of each call added up: what it takes when nobody has the CPU in between; 0: not known */
    double tokens_per_s, gops, gbytes;
    struct bench_run_limits limits; /* with --limits */
};

static double median(double *t, uint32_t n)
{
    qsort(t, n, sizeof(*t), by_value);
    return n % 2 == 1 ? t[n / 2] : (t[n / 2 - 1] + t[n / 2]) / 2;
}

static struct result evaluate(const struct one_case *c, const struct sizes *z, double *t,
                              uint32_t n)
{
    struct result r = {0};
    uint32_t rows = c->batch > 0 ? c->batch : c->context;

    for (uint32_t i = 0; i < n; i++) {
        r.total += t[i];
    }
    r.s = median(t, n);
    r.tokens_per_s = rows / r.s;
    if (c->batch == 0) {
        r.gops = ops_of(z, c->context, 0, 1) / r.s * 1e-9;
    } else {
        double kv = (double)kv_bytes_per_token(engine->info, engine->opts.kv_dtype) *
                    (c->context + WARM_STEPS + cfg.steps / 2.0) * c->batch;
        r.gops = c->batch * ops_of(z, 1, c->context, 1) / r.s * 1e-9;
        r.gbytes = ((double)z->packed_bytes + kv) / r.s * 1e-9;
    }
    r.slowed = r.s / t[0];
    r.quiet = (double)bench_parts_fastest() * 1e-9;
    r.limits = bench_run_limits_tell();
    return r;
}

/* What the host adds to a step: the median over the steps that the device was timed in. */
static double outside_of(const double *t, double *device, uint32_t n)
{
    uint32_t n_timed = 0;

    for (uint32_t i = 0; i < n; i++) {
        if (device[i] > 0) {
            device[n_timed++] = t[i] - device[i];
        }
    }
    return n_timed > 0 ? median(device, n_timed) : 0;
}

static void print_parts(const struct result *r)
{
    struct bench_times parts = bench_parts_take();
    static struct bench_matrix m[MATRICES_MAX];
    uint32_t n = bench_parts_matrices(engine->model, m, MATRICES_MAX);
    double rest = r->total;

    printf(cfg.json ? "\"parts\":{" : "   ");
    for (int p = 0; p < BENCH_PARTS; p++) {
        double s = (double)parts.ns[p] * 1e-9;
        rest -= s;
        if (parts.calls[p] > 0) {
            printf(cfg.json ? "\"%s\":%.4f," : " %s %.1f %%,", bench_part_name((enum bench_part)p),
                   cfg.json ? s / r->total : 100 * s / r->total);
        }
    }
    printf(cfg.json ? "\"outside\":%.4f},\"matrices\":{" : " outside %.1f %%\n    products:",
           cfg.json ? rest / r->total : 100 * rest / r->total);
    for (uint32_t i = 0; i < n; i++) {
        double s = (double)m[i].ns * 1e-9 / r->total;
        printf(cfg.json ? "%s\"%s\":%.4f" : "%s %s %.1f %%", i > 0 ? "," : "", m[i].name,
               cfg.json ? s : 100 * s);
    }
    printf(cfg.json ? "}" : "\n");
}

/* By medians, and of the fastest beside the best. */
static void print_shares(const struct one_case *c, const struct result *r)
{
    const struct bench_run_limits *l = &r->limits;

    printf(
        "    limits, median and best: FMA %.0f, %.0f GFLOP/s, reading %.1f, %.1f GB/s; shares: FMA "
        "%.1f %%, %.1f %%",
        l->fma, l->fma_best, l->read, l->read_best, 100 * r->gops / l->fma,
        100 * r->gops * r->slowed / l->fma_best);
    if (c->batch > 0) {
        printf(", reading %.1f %%, %.1f %%", 100 * r->gbytes / l->read,
               100 * r->gbytes * r->slowed / l->read_best);
    }
    printf("\n    undisturbed, the fastest of each call added up: %.2f ms; shares of the best: FMA "
           "%.1f %%",
           1e3 * r->quiet, r->quiet > 0 ? 100 * r->gops * r->s / r->quiet / l->fma_best : 0);
    if (c->batch > 0 && r->quiet > 0) {
        printf(", reading %.1f %%", 100 * r->gbytes * r->s / r->quiet / l->read_best);
    }
    printf("\n");
}

static void print_case(const struct one_case *c, const struct result *r, bool first)
{
    if (cfg.json) {
        printf("%s{\"phase\":\"%s\",\"batch\":%u,\"context\":%u,\"seconds\":%.6f,\"tokens_per_s\":%"
               ".2f,"
               "\"gops\":%.2f,\"gbytes_per_s\":%.3f,\"slowed\":%.3f,"
               "\"quiet_seconds\":%.6f,\"outside_seconds\":%.7f,"
               "\"fma_gops\":[%.1f,%.1f],\"read_gbytes_per_s\":[%.2f,%.2f],",
               first ? "" : ",", c->batch > 0 ? "decode" : "prefill", c->batch > 0 ? c->batch : 1,
               c->context, r->s, r->tokens_per_s, r->gops, r->gbytes, r->slowed, r->quiet,
               r->outside, r->limits.fma, r->limits.fma_best, r->limits.read, r->limits.read_best);
        print_parts(r);
        printf("}");
        return;
    }
    if (c->batch == 0) {
        printf("prefill %u: %.1f tokens/s, %.3f s, %.1f GFLOP/s\n", c->context, r->tokens_per_s,
               r->s, r->gops);
    } else {
        printf("decode %u at %u: %.1f tokens/s, %.2f ms a step, %.2f GB/s of packed weights and "
               "KV, %.1f GFLOP/s\n",
               c->batch, c->context, r->tokens_per_s, r->s * 1e3, r->gbytes, r->gops);
        if (r->outside > 0) {
            printf("    a step's time beyond the device's in its graph: %.1f us\n",
                   1e6 * r->outside);
        }
    }
    if (cfg.limits) {
        print_shares(c, r);
    }
    print_parts(r);
}

/* rest: bytes that are neither file pages nor packed weights nor KV: activations, logits, tables, the program. */
static void print_head(const struct sizes *z, double ready_s, double read_s)
{
    if (cfg.json) {
        printf("{\"model\":\"%s\",\"backend\":\"%s\",\"numerics\":\"%s\",\"kv\":\"%s\","
               "\"params\":%" PRIu64 ",\"file_bytes\":%" PRIu64 ",\"packed_bytes\":%" PRIu64
               ",\"kv_bytes_per_token\":%zu,\"ops_per_token\":%" PRIu64
               ",\"ready_s\":%.4f,\"read_once_s\":%.4f,\"cases\":[",
               engine->info->name, bt_engine_describe(engine), engine->layout.numerics,
               bt_dtype_name(engine->opts.kv_dtype), engine->info->n_params,
               engine->info->weight_bytes, z->packed_bytes,
               kv_bytes_per_token(engine->info, engine->opts.kv_dtype), z->body_ops + z->head_ops,
               ready_s, read_s);
        return;
    }
    printf("%s: %.1f M parameters, %.1f MB in files, %.1f MB packed; %s, %s, kv %s; %.3f GFLOP a "
           "token\n",
           engine->info->name, (double)engine->info->n_params * 1e-6,
           (double)engine->info->weight_bytes * 1e-6, (double)z->packed_bytes * 1e-6,
           bt_engine_describe(engine), engine->layout.numerics,
           bt_dtype_name(engine->opts.kv_dtype), (double)(z->body_ops + z->head_ops) * 1e-9);
    printf("ready in %.3f s; reading the file once from the page cache: %.3f s\n", ready_s, read_s);
}

static void print_memory(const struct sizes *z, size_t kv_pool_bytes)
{
    uint64_t rss = status_bytes("VmRSS:"), file = status_bytes("RssFile:"),
             anon = status_bytes("RssAnon:");
    double needed = (double)z->packed_bytes + (double)kv_pool_bytes;

    if (cfg.json) {
        printf("],\"rss_bytes\":%" PRIu64 ",\"rss_file_bytes\":%" PRIu64
               ",\"rss_anon_bytes\":%" PRIu64 ",\"kv_pool_bytes\":%zu}\n",
               rss, file, anon, kv_pool_bytes);
        return;
    }
    printf("resident: %.1f MB (%.1f of it mapped files), packed weights %.1f MB, KV pool %.1f MB: "
           "%.2f times both together, %.2f without mapped files\n",
           (double)rss * 1e-6, (double)file * 1e-6, (double)z->packed_bytes * 1e-6,
           (double)kv_pool_bytes * 1e-6, (double)rss / needed, (double)anon / needed);
}

/* ---- together ---- */

/* Tokens of one sequence at its end. */
static uint64_t tokens_of(const struct one_case *c)
{
    return (uint64_t)c->context + (c->batch > 0 ? cfg.steps + WARM_STEPS + 2 : 1);
}

/* Tokens of KV that the largest case needs; every sequence rounded up to pages. */
static uint64_t pool_tokens(void)
{
    uint64_t most = 0;

    for (uint32_t i = 0; i < n_cases; i++) {
        uint32_t b = cases[i].batch, pt = cfg.page_tokens;
        uint64_t n = (tokens_of(&cases[i]) + pt - 1) / pt * pt * (b > 0 ? b : 1);
        most = n > most ? n : most;
    }
    return most + 2ULL * cfg.page_tokens;
}

static size_t create(const char *path)
{
    struct bt_model *m = NULL;
    struct bt_err err = {0};
    uint32_t max_batch = 1;

    for (uint32_t i = 0; i < n_cases; i++) {
        max_batch = cases[i].batch > max_batch ? cases[i].batch : max_batch;
    }
    if (bt_model_open(path, &m, &err) != BT_OK) { /* its shape tells how much KV is needed */
        die(err.msg);
    }
    for (uint32_t i = 0; i < n_cases; i++) {
        uint64_t need = tokens_of(&cases[i]);

        if (need > bt_model_info(m)->context) {
            fprintf(stderr,
                    "bench-engine: a case of %u tokens needs %llu with its steps, but the model's "
                    "context is %u\n",
                    cases[i].context, (unsigned long long)need, bt_model_info(m)->context);
            exit(2);
        }
    }
    const char *class = cfg.numerics > 0 ? bt_k_all_classes[cfg.numerics - 1]
                                         : bt_model_numerics(m, backends[cfg.backend]);
    enum bt_dtype t = bt_k_kv_type(bt_k_kv_types[cfg.kv_dtype], class);
    size_t kv = pool_tokens() * kv_bytes_per_token(bt_model_info(m), t);
    bt_model_destroy(m);

    struct bt_engine_opts o = {.model_path = path,
                               .backend = backends[cfg.backend],
                               .device = cfg.device,
                               .isa = bt_k_isas[cfg.isa],
                               .numerics = class,
                               .n_threads = cfg.threads,
                               .kv_bytes = kv,
                               .page_tokens = cfg.page_tokens,
                               .panel_dir = cfg.panels,
                               .kv_dtype = t,
                               .chunk_tokens = cfg.chunk_tokens,
                               .max_batch = max_batch,
                               .max_seqs = max_batch + 1};
    if (bt_engine_create(&o, &engine, &err) != BT_OK) {
        die(err.msg);
    }
    return kv;
}

static void run_case(const struct one_case *c, const struct sizes *z, bool first)
{
    static double t[STEPS_MAX > REPEATS_MAX ? STEPS_MAX : REPEATS_MAX], device[STEPS_MAX];
    double outside = 0;
    uint32_t *tokens = made_up_tokens(c->context);
    uint32_t n = c->batch > 0 ? cfg.steps : cfg.repeat;

    bench_run_limits_forget();
    if (c->batch == 0) {
        run_prompt(tokens, c->context < cfg.chunk_tokens ? c->context : cfg.chunk_tokens,
                   true); /* warm */
        forget_times();
        for (uint32_t i = 0; i < n; i++) {
            look_at_limits();
            t[i] = run_prompt(tokens, c->context, i == 0);
        }
        look_at_limits();
    } else {
        run_batch(tokens, c, t, device);
        outside = outside_of(t, device, n);
    }
    struct result r = evaluate(c, z, t, n);
    r.outside = outside;
    print_case(c, &r, first);
    (void)fflush(stdout);
    bt_free(tokens);
}

int main(int argc, char **argv)
{
    struct bt_opt_result res;
    struct bt_err err = {0};

    if (bt_opt_parse(&prog, argc, argv, &cfg, &res, &err) != BT_OK) {
        fprintf(stderr, "bench-engine: %s\n", err.msg);
        return 2;
    }
    if (res.exit_now) {
        return 0;
    }
    if (res.n_positional != 1) {
        fprintf(stderr, "bench-engine: one model, a directory or a .gguf file\n");
        return 2;
    }
    parse_cases();
    double read_s = read_once_s(res.positional[0]);
    uint64_t t0 = bt_clock_ns();
    size_t kv = create(res.positional[0]);
    double ready_s = (double)(bt_clock_ns() - t0) * 1e-9;
    struct sizes z = model_sizes(engine->model);
    const struct bt_engine_hooks hooks = {.on_token = on_token};

    bt_engine_set_hooks(engine, &hooks);
    bench_parts_watch(engine->k);
    print_head(&z, ready_s, read_s);
    for (uint32_t i = 0; i < n_cases; i++) {
        run_case(&cases[i], &z, i == 0);
    }
    print_memory(&z, kv);
    bt_engine_destroy(engine);
    bt_opt_free(&prog, &cfg);
    return 0;
}
