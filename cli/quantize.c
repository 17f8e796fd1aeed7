/* baton quantize: writes a model as a GGUF file with smaller weights (or plain ones). Owns the command's order of work and
 * what it says; model/export.h and text/tokenizer_export.h know the file. */

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/buf.h"
#include "base/mem.h"
#include "base/options.h"
#include "cli/cli.h"
#include "cli/quantize_int.h"
#include "files/gguf_write.h"
#include "files/out_file.h"
#include "model/export.h"
#include "text/tokenizer_export.h"

struct quantize_cfg {
    int to;
    char *out, *hf;
    uint32_t threads;
};

static const char choices[] = "int8|int4|fp8|q8_0|q5_1|q5_0|q4_1|q4_0|bf16|f16|f32";
static const enum bt_dtype types[] = {BT_DTYPE_Q8_0, BT_DTYPE_Q4_1, BT_DTYPE_GF8,  BT_DTYPE_Q8_0,
                                      BT_DTYPE_Q5_1, BT_DTYPE_Q5_0, BT_DTYPE_Q4_1, BT_DTYPE_Q4_0,
                                      BT_DTYPE_BF16, BT_DTYPE_F16,  BT_DTYPE_F32};

static const struct bt_opt options[] = {
    {"to", BT_OPT_ENUM, offsetof(struct quantize_cfg, to), "int8", 0, 0, choices, NULL,
     "Type of the matrices. int8 is q8_0, int4 is q4_1 (both: a scale for every 32 values). "
     "fp8 is e4m3 with a scale for each row, and needs --hf."},
    {"out", BT_OPT_STR, offsetof(struct quantize_cfg, out), NULL, 0, 0, NULL, "FILE",
     "The file to write (default: the model's name and type in the current folder)."},
    {"hf", BT_OPT_STR, offsetof(struct quantize_cfg, hf), NULL, 0, 0, NULL, "FOLDER",
     "Write a Hugging Face directory instead: of f32, f16, bf16 or fp8 weights from a GGUF file of "
     "llama, qwen2 or qwen3, of fp8 ones from a directory of any architecture."},
    {"threads", BT_OPT_U32, offsetof(struct quantize_cfg, threads), "0", 0, 1024, NULL, NULL,
     "Threads; 0: all CPUs that this process may use."},
};

/* "folder/name.gguf" or "folder/name/": name, type and .gguf. */
static enum bt_status default_out(const char *model, enum bt_dtype t, struct bt_buf *out,
                                  struct bt_err *err)
{
    size_t n = strlen(model), from;

    while (n > 1 && model[n - 1] == '/') {
        n--;
    }
    for (from = n; from > 0 && model[from - 1] != '/'; from--) {
    }
    if (n - from > 5 && strncmp(model + n - 5, ".gguf", 5) == 0) {
        n -= 5;
    }
    return bt_buf_addf(out, "%.*s-%s.gguf", (int)(n - from), model + from, bt_dtype_name(t))
               ? BT_OK
               : bt_err_set(err, BT_ERR_NOMEM, "out of memory");
}

static bool is_dir(const char *path)
{
    struct stat sb;

    return stat(path, &sb) == 0 && S_ISDIR(sb.st_mode);
}

/* What was written, opened as anybody would. */
static enum bt_status check(const struct bt_model *m, struct bt_gguf_writer *w, struct bt_err *err)
{
    struct bt_model *written = NULL;
    const char *path;
    enum bt_status st = bt_gguf_writer_flush(w, &path, err);

    if (st == BT_OK) {
        st = bt_model_open(path, &written, err);
    }
    if (st == BT_OK) {
        st = bt_export_check(m, written, err);
    }
    bt_model_destroy(written);
    return st;
}

static enum bt_status write_file(const struct bt_model *m, const char *model, enum bt_dtype t,
                                 struct bt_kctx *k, struct bt_gguf_writer *w, struct bt_err *err)
{
    const struct bt_model_info *info = bt_model_info(m);
    const struct bt_tok_export_opts tok = {
        .vocab = info->vocab, .has_bos = info->bos >= 0, .has_eos = info->n_eos > 0};
    struct bt_cli_progress p = {.terminal = isatty(STDERR_FILENO) == 1, .shown = -1};
    struct bt_export *e = NULL;
    enum bt_status st = bt_export_create(m, t, w, &e, err);

    if (st == BT_OK && is_dir(model)) {
        st = bt_tokenizer_export_gguf(model, &tok, w, err);
    }
    if (st == BT_OK) {
        st = bt_gguf_writer_begin(w, err);
    }
    if (st == BT_OK) {
        st = bt_export_data(e, k, bt_cli_show, &p, err);
        if (p.terminal) {
            fprintf(stderr, "\r      \r");
        }
    }
    st = st == BT_OK ? check(m, w, err) : st;
    st = st == BT_OK ? bt_gguf_writer_finish(w, err) : st;
    bt_export_destroy(e);
    return st;
}

static void report(const char *path, const struct bt_model_info *info)
{
    struct stat sb;

    if (stat(path, &sb) == 0) {
        printf("%s: %.1f MB, %.2f bits for each of %.1f million weights\n", path,
               (double)sb.st_size / 1e6, (double)sb.st_size * 8.0 / (double)info->n_params,
               (double)info->n_params / 1e6);
    }
}

static enum bt_status quantize(const char *model, const struct quantize_cfg *cfg,
                               struct bt_err *err)
{
    struct bt_k_opts ko = {.n_threads = cfg->threads};
    enum bt_dtype t = types[cfg->to];
    struct bt_model *m = NULL;
    struct bt_kctx *k = NULL;
    struct bt_gguf_writer *w = NULL;
    struct bt_buf path = {0};
    enum bt_status st = cfg->out != NULL ? (bt_buf_adds(&path, cfg->out) ? BT_OK : BT_ERR_NOMEM)
                                         : default_out(model, t, &path, err);

    st = st == BT_OK ? bt_model_open(model, &m, err) : st;
    st = st == BT_OK ? bt_k_create_cpu(&ko, &k, err) : st;
    st = st == BT_OK ? bt_gguf_writer_create(path.data, &w, err) : st;
    st = st == BT_OK ? write_file(m, model, t, k, w, err) : st;
    bt_gguf_writer_destroy(w);
    if (st == BT_OK) {
        report(path.data, bt_model_info(m));
    }
    bt_k_destroy(k);
    bt_model_destroy(m);
    bt_buf_fini(&path);
    return st;
}

/* Nothing that is there is lost unasked, and no work is done for a name that cannot be. */
static enum bt_status check_target(const char *model, const struct quantize_cfg *cfg,
                                   struct bt_err *err)
{
    struct bt_buf config = {0};
    struct stat in, out;
    enum bt_status st = BT_OK;

    if (types[cfg->to] == BT_DTYPE_GF8 && cfg->hf == NULL) {
        st = bt_err_set(err, BT_ERR_INVALID, "--to fp8 needs --hf FOLDER: GGUF has no such type");
    } else if (cfg->out != NULL && cfg->hf != NULL) {
        st = bt_err_set(err, BT_ERR_INVALID, "--out and --hf: only one of them");
    } else if (cfg->out != NULL && is_dir(cfg->out)) {
        st = bt_err_set(err, BT_ERR_INVALID, "--out %s: is a folder", cfg->out);
    } else if (cfg->out != NULL && stat(model, &in) == 0 && stat(cfg->out, &out) == 0 &&
               in.st_dev == out.st_dev && in.st_ino == out.st_ino) {
        st = bt_err_set(err, BT_ERR_INVALID, "--out %s: is the model itself", cfg->out);
    } else if (cfg->hf != NULL && !bt_buf_addf(&config, "%s/config.json", cfg->hf)) {
        st = bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    } else if (cfg->hf != NULL && stat(config.data, &out) == 0) {
        st = bt_err_set(err, BT_ERR_INVALID, "--hf %s: holds a model already", cfg->hf);
    }
    bt_buf_fini(&config);
    return st;
}

int bt_cli_quantize(int argc, char **argv)
{
    const struct bt_prog prog = {
        .name = "baton quantize",
        .summary = "Writes a model (a Hugging Face directory or a GGUF file) with weights of "
                   "another type, as a GGUF file or (--hf) a directory.",
        .usage = "[options] MODEL",
        .opts = options,
        .n_opts = sizeof options / sizeof options[0],
        .positionals = true,
        .epilogue =
            "Norms, biases and routers of experts stay f32, with --to fp8 what they are; with 4 "
            "and 5 bits the output matrix has 8.\n"
            "The file appears when it is complete and was opened again; it replaces one of "
            "its name. In a folder config.json comes last, and goes if what was written "
            "cannot be opened.\n\n"
            "Examples:\n  baton quantize Qwen3-0.6B --to q4_1 --out qwen3-q4.gguf\n"
            "  baton quantize qwen3-q4.gguf --to bf16 --hf qwen3-bf16\n"
            "  baton quantize Qwen3-0.6B --to fp8 --hf Qwen3-0.6B-fp8\n",
    };
    struct quantize_cfg cfg = {0};
    struct bt_opt_result res = {0};
    struct bt_err err = {0};
    int rc = 0;

    if (bt_opt_parse(&prog, argc, argv, &cfg, &res, &err) != BT_OK) {
        fprintf(stderr, "baton quantize: %s\n", err.msg);
        return 2;
    }
    if (!res.exit_now && res.n_positional != 1) {
        fprintf(stderr, "baton quantize: one MODEL is needed; --help says more\n");
        rc = 2;
    } else if (!res.exit_now && check_target(res.positional[0], &cfg, &err) != BT_OK) {
        fprintf(stderr, "baton quantize: %s\n", err.msg);
        rc = 2;
    } else if (!res.exit_now &&
               (cfg.hf != NULL ? bt_cli_quantize_folder(res.positional[0], cfg.hf, types[cfg.to],
                                                        cfg.threads, &err)
                               : quantize(res.positional[0], &cfg, &err)) != BT_OK) {
        fprintf(stderr, "baton quantize: %s\n", err.msg);
        rc = 1;
    }
    bt_opt_free(&prog, &cfg);
    return rc;
}
