/* baton perplexity: how well a model foretells a text. Owns the windows and the sums; one sequence at a time, without a
 * cluster. */

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/buf.h"
#include "base/mem.h"
#include "base/options.h"
#include "cli/cli.h"
#include "files/gguf.h"
#include "kernels/kv_type.h"
#include "model/model.h"
#include "text/tokenizer.h"

enum { ROWS = 64, PAGE_TOKENS = 16 };

struct perplexity_cfg {
    uint32_t context, threads;
    int numerics; /* 0: auto, else bt_k_classes[numerics - 1] */
    int kv_dtype; /* bt_k_kv_types[kv_dtype] */
};

static const struct bt_opt options[] = {
    {"context", BT_OPT_U32, offsetof(struct perplexity_cfg, context), "512", 2, 1 << 20, NULL, NULL,
     "Tokens in a window; at most the model's context."},
    {"threads", BT_OPT_U32, offsetof(struct perplexity_cfg, threads), "0", 0, 1024, NULL, NULL,
     "Threads; 0: all CPUs that this process may use."},
    {"numerics", BT_OPT_ENUM, offsetof(struct perplexity_cfg, numerics), "auto", 0, 0,
     "auto|" BT_K_CLASSES, NULL, "Numerics class, as nodes have it."},
    {"kv-dtype", BT_OPT_ENUM, offsetof(struct perplexity_cfg, kv_dtype), "auto", 0, 0,
     BT_K_KV_TYPES, NULL, "Element type of the KV cache, as nodes have it."},
};

struct run {
    struct bt_kctx *k;
    struct bt_model *m;
    struct bt_tokenizer *t;
    struct bt_model_ws *ws;
    struct bt_model_kv kv;
    size_t kv_bytes[BT_MODEL_KV_GROUPS_MAX];
    uint32_t *pages; /* [n_pages] 0, 1, 2, … */
    uint32_t context;
    float *logits; /* [ROWS, vocab] */
    struct bt_ids ids;
    /* -log p of the tokens foretold */
    uint64_t n;
    double sum, sum_squares;
};

static enum bt_status read_text(const char *path, struct bt_buf *b, struct bt_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : 1;

    while (got > 0 && b->len <= BT_TOK_TEXT_BYTES_MAX) {
        if (!bt_buf_reserve(b, 1 << 20)) {
            (void)close(fd);
            return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", path);
        }
        got = read(fd, b->data + b->len, 1 << 20);
        b->len += got > 0 ? (size_t)got : 0;
    }
    enum bt_status st =
        got < 0 ? bt_err_set(err, BT_ERR_IO, "%s: %s", path, strerror(errno)) : BT_OK;
    if (fd >= 0) {
        (void)close(fd);
    }
    return st;
}

static enum bt_status open_tokenizer(struct run *r, const char *model, struct bt_err *err)
{
    struct stat sb;
    struct bt_gguf *g = NULL;

    if (stat(model, &sb) == 0 && S_ISDIR(sb.st_mode)) {
        return bt_tokenizer_load(model, &r->t, err);
    }
    enum bt_status st = bt_gguf_open(model, &g, err);
    if (st == BT_OK) {
        st = bt_tokenizer_open_gguf(g, &r->t, err);
    }
    bt_gguf_close(g);
    return st;
}

static enum bt_status read_ids(struct run *r, const char *path, struct bt_err *err)
{
    struct bt_buf text = {0};
    enum bt_status st = read_text(path, &text, err);

    if (st == BT_OK) {
        st = bt_tokenizer_encode(r->t, text.data != NULL ? text.data : "", text.len, 0, &r->ids,
                                 err);
        if (st != BT_OK) {
            bt_err_prefix(err, "%s", path);
        }
    }
    bt_buf_fini(&text);
    if (st == BT_OK && r->ids.len < 2) {
        st = bt_err_set(err, BT_ERR_INVALID, "%s: %zu tokens, at least 2 are needed", path,
                        r->ids.len);
    }
    return st;
}

static enum bt_status make_pool(struct run *r, enum bt_dtype kv_dtype, struct bt_err *err)
{
    const struct bt_model_info *info = bt_model_info(r->m);
    uint32_t n_pages = (r->context + PAGE_TOKENS - 1) / PAGE_TOKENS;
    size_t page = (size_t)2 * info->n_kv_heads * PAGE_TOKENS * info->head_dim *
                  bt_dtype_block_bytes(kv_dtype);

    r->kv.page_tokens = PAGE_TOKENS;
    r->kv.dtype = kv_dtype;
    r->pages = bt_alloc(n_pages * sizeof(*r->pages));
    r->logits = bt_alloc((size_t)ROWS * info->vocab * sizeof(float));
    bool ok = r->pages != NULL && r->logits != NULL;
    for (uint32_t i = 0; ok && i < n_pages; i++) {
        r->pages[i] = i;
    }
    for (uint32_t g = 0; ok && g < info->n_groups; g++) {
        r->kv.groups[g].page_stride = page;
        r->kv.groups[g].layer_stride = page * n_pages;
        r->kv_bytes[g] = page * n_pages * info->groups[g].n_layers;
        r->kv.groups[g].base = bt_k_alloc(r->k, r->kv_bytes[g]);
        ok = r->kv.groups[g].base != NULL;
    }
    if (!ok) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for a window of %u tokens", r->context);
    }
    return bt_model_ws_create(r->m, ROWS, ROWS, &r->ws, err);
}

static void run_fini(struct run *r)
{
    for (uint32_t g = 0; g < BT_MODEL_KV_GROUPS_MAX; g++) {
        if (r->kv.groups[g].base != NULL) {
            bt_k_free(r->k, r->kv.groups[g].base, r->kv_bytes[g]);
        }
    }
    bt_model_ws_destroy(r->ws);
    bt_free(r->pages);
    bt_free(r->logits);
    bt_ids_fini(&r->ids);
    bt_tokenizer_destroy(r->t);
    bt_model_destroy(r->m);
    bt_k_destroy(r->k);
}

/* Adds -log softmax(logits)[id]. */
static void score(struct run *r, const float *logits, uint32_t vocab, uint32_t id)
{
    float most = logits[0];
    double sum = 0.0;

    for (uint32_t i = 1; i < vocab; i++) {
        most = logits[i] > most ? logits[i] : most;
    }
    for (uint32_t i = 0; i < vocab; i++) {
        sum += (double)expf(logits[i] - most);
    }
    double nll = log(sum) - ((double)logits[id] - (double)most);
    r->n++;
    r->sum += nll;
    r->sum_squares += nll * nll;
}

/* One window: every token but the first is foretold from those before it. */
static enum bt_status run_window(struct run *r, const uint32_t *tokens, uint32_t n)
{
    uint32_t vocab = bt_model_info(r->m)->vocab, rows[ROWS];
    enum bt_status st = BT_OK;

    for (uint32_t i = 0; i < ROWS; i++) {
        rows[i] = i;
    }
    for (uint32_t at = 0; at + 1 < n && st == BT_OK; at += ROWS) {
        uint32_t take = n - 1 - at < ROWS ? n - 1 - at : ROWS;
        struct bt_model_span span = {.n = take, .pos = at};
        struct bt_model_batch b = {.n_tokens = take,
                                   .tokens = tokens + at,
                                   .n_spans = 1,
                                   .spans = &span,
                                   .n_out = take,
                                   .out_rows = rows,
                                   .logits = r->logits};
        for (uint32_t g = 0; g < BT_MODEL_KV_GROUPS_MAX; g++) {
            span.pages[g] = r->pages;
        }
        st = bt_model_forward(r->m, r->ws, &r->kv, &b);
        for (uint32_t i = 0; i < take && st == BT_OK; i++) {
            score(r, r->logits + (size_t)i * vocab, vocab, tokens[at + i + 1]);
        }
    }
    return st;
}

static double perplexity(const struct run *r)
{
    return exp(r->sum / (double)r->n);
}

/* The standard error of the mean, carried through exp. */
static double error_bar(const struct run *r)
{
    double mean = r->sum / (double)r->n, n = (double)r->n;
    double variance = n > 1.0 ? (r->sum_squares / n - mean * mean) / (n - 1.0) : 0.0;

    return perplexity(r) * sqrt(fmax(variance, 0.0));
}

static enum bt_status run_windows(struct run *r, struct bt_err *err)
{
    size_t n_prefix;
    const uint32_t *prefix = bt_tokenizer_prefix(r->t, &n_prefix);
    uint32_t vocab = bt_model_info(r->m)->vocab, step = r->context - (uint32_t)n_prefix;
    uint32_t *window = bt_alloc(r->context * sizeof(*window));
    size_t n_windows = (r->ids.len + step - 1) / step;
    bool terminal = isatty(STDERR_FILENO) == 1;
    enum bt_status st = window != NULL ? BT_OK : bt_err_set(err, BT_ERR_NOMEM, "out of memory");

    for (size_t i = 0; i < r->ids.len && st == BT_OK; i++) {
        if (r->ids.v[i] >= vocab) {
            st = bt_err_set(err, BT_ERR_INVALID, "the tokenizer's id %u is not one of the model's",
                            r->ids.v[i]);
        }
    }
    for (size_t w = 0; w < n_windows && st == BT_OK; w++) {
        size_t left = r->ids.len - w * step;
        uint32_t take = left < step ? (uint32_t)left : step;
        memcpy(window, prefix, n_prefix * sizeof(*window));
        memcpy(window + n_prefix, r->ids.v + w * step, take * sizeof(*window));
        st = run_window(r, window, take + (uint32_t)n_prefix);
        if (st != BT_OK) {
            st = bt_err_set(err, st, "window %zu: %s", w + 1, bt_status_str(st));
        } else if (terminal && r->n > 0) {
            fprintf(stderr, "\r%zu of %zu windows, perplexity %.4f ", w + 1, n_windows,
                    perplexity(r));
        }
    }
    if (terminal) {
        fprintf(stderr, "\r%60s\r", "");
    }
    bt_free(window);
    if (st == BT_OK) {
        printf("perplexity %.4f ± %.4f in class %s, kv %s: %llu tokens in %zu windows of %u, "
               "log-likelihood %.6f a token\n",
               perplexity(r), error_bar(r), bt_k_numerics(r->k), bt_dtype_name(r->kv.dtype),
               (unsigned long long)r->n, n_windows, r->context, -r->sum / (double)r->n);
    }
    return st;
}

static enum bt_status measure(const char *model, const char *file, const struct perplexity_cfg *cfg,
                              struct bt_err *err)
{
    struct run r = {0};
    struct bt_k_opts ko = {.n_threads = cfg->threads};
    enum bt_status st = bt_model_open(model, &r.m, err);

    st = st == BT_OK ? open_tokenizer(&r, model, err) : st;
    st = st == BT_OK ? read_ids(&r, file, err) : st;
    if (st == BT_OK) {
        ko.numerics =
            cfg->numerics == 0 ? bt_model_numerics(r.m, "cpu") : bt_k_classes[cfg->numerics - 1];
    }
    st = st == BT_OK ? bt_k_create_cpu(&ko, &r.k, err) : st;
    st = st == BT_OK ? bt_model_load(r.m, r.k, NULL, err) : st;
    if (st == BT_OK) {
        uint32_t context = bt_model_info(r.m)->context;
        r.context = cfg->context < context ? cfg->context : context;
        st = make_pool(&r, bt_k_kv_type(bt_k_kv_types[cfg->kv_dtype], bt_k_numerics(r.k)), err);
    }
    st = st == BT_OK ? run_windows(&r, err) : st;
    run_fini(&r);
    return st;
}

int bt_cli_perplexity(int argc, char **argv)
{
    const struct bt_prog prog = {
        .name = "baton perplexity",
        .summary = "Measures how well a model foretells the text of a file.",
        .usage = "[options] MODEL FILE",
        .opts = options,
        .n_opts = sizeof options / sizeof options[0],
        .positionals = true,
        .epilogue = "The text is cut into windows without overlap, each with the model's first "
                    "token (BOS) in\n"
                    "front if it has one. Every token of a window but the very first is foretold "
                    "from those\n"
                    "before it. The figure behind ± is one standard error.\n\n"
                    "Example:\n  baton perplexity qwen3-q4.gguf book.txt --context 1024\n",
    };
    struct perplexity_cfg cfg = {0};
    struct bt_opt_result res = {0};
    struct bt_err err = {0};
    int rc = 0;

    if (bt_opt_parse(&prog, argc, argv, &cfg, &res, &err) != BT_OK) {
        fprintf(stderr, "baton perplexity: %s\n", err.msg);
        return 2;
    }
    if (!res.exit_now && res.n_positional != 2) {
        fprintf(stderr, "baton perplexity: a MODEL and a FILE are needed; --help says more\n");
        rc = 2;
    } else if (!res.exit_now &&
               measure(res.positional[0], res.positional[1], &cfg, &err) != BT_OK) {
        fprintf(stderr, "baton perplexity: %s\n", err.msg);
        rc = 1;
    }
    bt_opt_free(&prog, &cfg);
    return rc;
}
