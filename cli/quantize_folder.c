/* baton quantize --hf: writes a model as a Hugging Face directory. Owns the order in which its files appear; model/export.h knows
 * weights and config.json. */

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/buf.h"
#include "cli/quantize_int.h"
#include "files/map.h"
#include "files/out_file.h"
#include "model/export.h"
#include "text/tokenizer_export.h"

void bt_cli_show(void *arg, double fraction)
{
    struct bt_cli_progress *p = arg;
    int percent = (int)(fraction * 100.0);

    if (percent <= p->shown || (!p->terminal && percent < p->shown + 10 && percent < 100)) {
        return;
    }
    p->shown = percent;
    fprintf(stderr, p->terminal ? "\r%3d %%" : "%d %%\n", percent);
    fflush(stderr);
}

static enum bt_status put_text(const char *folder, const char *name, const struct bt_buf *b,
                               struct bt_err *err)
{
    struct bt_buf path = {0};
    enum bt_status st = bt_buf_addf(&path, "%s/%s", folder, name)
                            ? bt_out_file_put(path.data, b->data, b->len, err)
                            : bt_err_set(err, BT_ERR_NOMEM, "out of memory");

    bt_buf_fini(&path);
    return st;
}

/* The files of a directory beside weights and config.json. */
static bool goes_along(const char *name)
{
    static const char *const names[] = {"tokenizer.json",
                                        "tokenizer_config.json",
                                        "tokenizer.model",
                                        "vocab.json",
                                        "merges.txt",
                                        "added_tokens.json",
                                        "chat_template.jinja",
                                        "chat_template.json",
                                        "special_tokens_map.json",
                                        "generation_config.json"};
    bool found = false;

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        found = found || strcmp(names[i], name) == 0;
    }
    return found;
}

static enum bt_status copy_file(const char *from, const char *folder, const char *name,
                                struct bt_err *err)
{
    struct bt_buf in = {0}, out = {0};
    struct bt_file_map map = {0};
    enum bt_status st =
        bt_buf_addf(&in, "%s/%s", from, name) && bt_buf_addf(&out, "%s/%s", folder, name)
            ? bt_file_map_open(&map, in.data, 1, err)
            : bt_err_set(err, BT_ERR_NOMEM, "out of memory");

    st = st == BT_OK ? bt_out_file_put(out.data, map.data, map.bytes, err) : st;
    bt_file_map_close(&map);
    bt_buf_fini(&in);
    bt_buf_fini(&out);
    return st;
}

static enum bt_status copy_texts(const char *from, const char *folder, struct bt_err *err)
{
    DIR *d = opendir(from);
    const struct dirent *e;
    enum bt_status st = BT_OK;

    if (d == NULL) {
        return bt_err_set(err, BT_ERR_IO, "%s: %s", from, strerror(errno));
    }
    while (st == BT_OK && (e = readdir(d)) != NULL) {
        st = goes_along(e->d_name) ? copy_file(from, folder, e->d_name, err) : BT_OK;
    }
    (void)closedir(d);
    return st;
}

/* The tokenizer's files, and others that say nothing of weights. g: NULL: from a directory. */
static enum bt_status write_texts(const char *model, const struct bt_gguf *g, const char *folder,
                                  struct bt_err *err)
{
    struct bt_buf tok = {0}, tok_config = {0};

    if (g == NULL) {
        return copy_texts(model, folder, err);
    }
    enum bt_status st = bt_tokenizer_export_hf(g, &tok, &tok_config, err);
    st = st == BT_OK ? put_text(folder, "tokenizer.json", &tok, err) : st;
    st = st == BT_OK ? put_text(folder, "tokenizer_config.json", &tok_config, err) : st;
    bt_buf_fini(&tok);
    bt_buf_fini(&tok_config);
    return st;
}

/* config.json comes last: a folder without it is no model. */
static enum bt_status write_folder(const struct bt_model *m, const char *model,
                                   const struct bt_gguf *g, const char *folder, enum bt_dtype t,
                                   struct bt_kctx *k, struct bt_err *err)
{
    struct bt_buf config = {0}, path = {0};
    struct bt_cli_progress p = {.terminal = isatty(STDERR_FILENO) == 1, .shown = -1};
    struct bt_st_writer *w = NULL;
    struct bt_export *e = NULL;
    enum bt_status st = BT_OK;

    bool made = mkdir(folder, 0777) == 0;
    if (!made && errno != EEXIST) {
        st = bt_err_set(err, BT_ERR_IO, "%s: %s", folder, strerror(errno));
    }
    if (st == BT_OK && !bt_buf_addf(&path, "%s/model.safetensors", folder)) {
        st = bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    st = st == BT_OK ? bt_st_writer_create(path.data, &w, err) : st;
    st = st == BT_OK ? bt_export_create_hf(m, t, w, &config, &e, err) : st;
    st = st == BT_OK ? write_texts(model, g, folder, err) : st;
    st = st == BT_OK ? bt_st_writer_begin(w, err) : st;
    st = st == BT_OK ? bt_export_data(e, k, bt_cli_show, &p, err) : st;
    st = st == BT_OK ? bt_st_writer_finish(w, err) : st;
    st = st == BT_OK ? put_text(folder, "config.json", &config, err) : st;
    if (p.terminal) {
        fprintf(stderr, "\r      \r");
    }
    bt_export_destroy(e);
    bt_st_writer_destroy(w);
    if (st != BT_OK && made) {
        (void)rmdir(folder); /* if nothing is in it */
    }
    bt_buf_fini(&config);
    bt_buf_fini(&path);
    return st;
}

/* Opens what was written; a folder that is not the model has no config.json. */
static enum bt_status reopen(const struct bt_model *m, const char *folder,
                             struct bt_model **written, struct bt_err *err)
{
    struct bt_buf config = {0};
    enum bt_status st = bt_buf_addf(&config, "%s/config.json", folder)
                            ? bt_model_open(folder, written, err)
                            : bt_err_set(err, BT_ERR_NOMEM, "out of memory");

    st = st == BT_OK ? bt_export_check(m, *written, err) : st;
    if (st != BT_OK && !config.failed) {
        (void)unlink(config.data);
    }
    bt_buf_fini(&config);
    return st;
}

enum bt_status bt_cli_quantize_folder(const char *model, const char *folder, enum bt_dtype t,
                                      uint32_t threads, struct bt_err *err)
{
    struct bt_k_opts ko = {.n_threads = threads};
    struct stat sb;
    bool from_dir = stat(model, &sb) == 0 && S_ISDIR(sb.st_mode);
    struct bt_model *m = NULL, *written = NULL;
    struct bt_gguf *g = NULL;
    struct bt_kctx *k = NULL;
    enum bt_status st = BT_OK;

    if (t != BT_DTYPE_GF8 && (t > BT_DTYPE_BF16 || from_dir)) {
        st = bt_err_set(err, BT_ERR_INVALID,
                        "--hf needs --to fp8, or a GGUF file and --to f32, f16 or bf16 (default: "
                        "int8)");
    }
    st = st == BT_OK ? bt_model_open(model, &m, err) : st;
    st = st == BT_OK && !from_dir ? bt_gguf_open(model, &g, err) : st;
    st = st == BT_OK ? bt_k_create_cpu(&ko, &k, err) : st;
    st = st == BT_OK ? write_folder(m, model, g, folder, t, k, err) : st;
    st = st == BT_OK ? reopen(m, folder, &written, err) : st;
    if (st == BT_OK) {
        printf("%s: %.1f million weights, %s\n", folder,
               (double)bt_model_info(written)->n_params / 1e6,
               t == BT_DTYPE_GF8 ? "fp8" : bt_dtype_name(t));
    }
    bt_k_destroy(k);
    bt_gguf_close(g);
    bt_model_destroy(m);
    bt_model_destroy(written);
    return st;
}
