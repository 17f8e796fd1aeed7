/* Finds a model's chat template and the special tokens it prints, in the places where model files
 * keep them. Knows the file layouts, not the language. */

#include "text/template.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "files/gguf.h"
#include "files/json_file.h"

#define CONFIG_BYTES_MAX (64u * 1024 * 1024) /* tokenizer_config.json lists every added token */

static enum bt_status no_memory(struct bt_err *err)
{
    return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
}

static enum bt_status compile(const char *path, const char *s, size_t n,
                              struct bt_template_files *f, struct bt_err *err)
{
    enum bt_status st = bt_template_compile(s, n, &f->tmpl, err);

    if (st != BT_OK) {
        return bt_err_prefix(err, "%s", path);
    }
    f->source = bt_strndup(s, n);
    return f->source != NULL ? BT_OK : no_memory(err);
}

/* The whole file as text. BT_ERR_NOT_FOUND when there is none. */
static enum bt_status read_text(const char *path, struct bt_buf *b, struct bt_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = 1;

    if (fd < 0) {
        return bt_err_set(err, errno == ENOENT ? BT_ERR_NOT_FOUND : BT_ERR_IO, "%s: %s", path,
                          strerror(errno));
    }
    while (got > 0 && b->len <= BT_TEMPLATE_BYTES_MAX) {
        if (!bt_buf_reserve(b, 65536)) {
            (void)close(fd);
            return no_memory(err);
        }
        got = read(fd, b->data + b->len, 65536);
        b->len += got > 0 ? (size_t)got : 0;
    }
    int read_errno = errno;

    (void)close(fd);
    return got < 0 ? bt_err_set(err, BT_ERR_IO, "%s: %s", path, strerror(read_errno)) : BT_OK;
}

/* A special token: a string, or an object with `content`. */
static enum bt_status get_token(const char *path, const json_t *config, const char *key, char **out,
                                struct bt_err *err)
{
    const json_t *v = json_object_get(config, key);

    v = json_is_object(v) ? json_object_get(v, "content") : v;
    if (v == NULL || json_is_null(v)) {
        return BT_OK;
    }
    if (!json_is_string(v) || strlen(json_string_value(v)) != json_string_length(v)) {
        return bt_err_set(err, BT_ERR_INVALID, "%s: %s is not a string", path, key);
    }
    *out = bt_strdup(json_string_value(v));
    return *out != NULL ? BT_OK : no_memory(err);
}

/* The template in a JSON value: its text, or a list of named ones. */
static const json_t *pick_template(const json_t *v)
{
    const json_t *item, *first = NULL;
    size_t i;

    if (!json_is_array(v)) {
        return v;
    }
    json_array_foreach(v, i, item)
    {
        const char *name = json_string_value(json_object_get(item, "name"));

        first = first != NULL ? first : json_object_get(item, "template");
        if (name != NULL && strcmp(name, "default") == 0) {
            return json_object_get(item, "template");
        }
    }
    return json_array_size(v) == 1 ? first : NULL;
}

static enum bt_status template_from_json(const char *path, const json_t *doc,
                                         struct bt_template_files *f, struct bt_err *err)
{
    const json_t *v = json_object_get(doc, "chat_template");

    if (v == NULL || json_is_null(v)) {
        return BT_OK;
    }
    v = pick_template(v);
    if (!json_is_string(v)) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "%s: chat_template is neither text nor a list with a default", path);
    }
    return compile(path, json_string_value(v), json_string_length(v), f, err);
}

/* chat_template.jinja, then chat_template.json, if f has no template yet. */
static enum bt_status load_template_files(const char *dir, struct bt_template_files *f,
                                          struct bt_err *err)
{
    char path[4096];
    struct bt_buf text = {0};
    json_t *doc = NULL;
    enum bt_status st;

    (void)snprintf(path, sizeof path, "%s/chat_template.jinja", dir);
    st = read_text(path, &text, err);
    if (st == BT_OK) {
        st = compile(path, text.data != NULL ? text.data : "", text.len, f, err);
    }
    bt_buf_fini(&text);
    if (st != BT_ERR_NOT_FOUND) {
        return st;
    }
    (void)snprintf(path, sizeof path, "%s/chat_template.json", dir);
    st = bt_json_file_read(path, CONFIG_BYTES_MAX, &doc, err);
    if (st == BT_OK) {
        st = template_from_json(path, doc, f, err);
        json_decref(doc);
    }
    return st == BT_ERR_NOT_FOUND ? BT_OK : st;
}

static enum bt_status load_dir(const char *dir, struct bt_template_files *f, struct bt_err *err)
{
    char path[4096];
    json_t *doc = NULL;
    enum bt_status st = load_template_files(dir, f, err);

    if (st != BT_OK) {
        return st;
    }
    (void)snprintf(path, sizeof path, "%s/tokenizer_config.json", dir);
    st = bt_json_file_read(path, CONFIG_BYTES_MAX, &doc, err);
    if (st != BT_OK) {
        return st == BT_ERR_NOT_FOUND ? BT_OK : st;
    }
    if (f->tmpl == NULL) {
        st = template_from_json(path, doc, f, err);
    }
    st = st == BT_OK ? get_token(path, doc, "bos_token", &f->bos_token, err) : st;
    st = st == BT_OK ? get_token(path, doc, "eos_token", &f->eos_token, err) : st;
    json_decref(doc);
    return st;
}

/* The text of the token whose id a GGUF key names; absent keys and ids leave *out alone. */
static enum bt_status gguf_token(const struct bt_gguf *g, const char *key, char **out,
                                 struct bt_err *err)
{
    struct bt_err ignored = {0};
    struct bt_gguf_iter it;
    const char *s = NULL;
    uint64_t id;
    size_t n = 0;

    if (bt_gguf_get_u64(g, key, &id, &ignored) != BT_OK ||
        bt_gguf_iter_strings(g, "tokenizer.ggml.tokens", &it, &ignored) != BT_OK) {
        return BT_OK;
    }
    for (uint64_t i = 0; i <= id; i++) {
        if (!bt_gguf_next_str(&it, &s, &n)) {
            return bt_err_set(err, BT_ERR_INVALID, "%s: %s is %llu, beyond the vocabulary",
                              bt_gguf_path(g), key, (unsigned long long)id);
        }
    }
    *out = bt_strndup(s, n);
    return *out != NULL ? BT_OK : no_memory(err);
}

static enum bt_status load_gguf(const char *path, struct bt_template_files *f, struct bt_err *err)
{
    struct bt_gguf *g;
    enum bt_status st = bt_gguf_open(path, &g, err);
    const char *s;
    size_t n;

    if (st != BT_OK) {
        return st;
    }
    st = bt_gguf_get_str(g, "tokenizer.chat_template", &s, &n, err);
    st = st == BT_OK ? compile(path, s, n, f, err) : st == BT_ERR_NOT_FOUND ? BT_OK : st;
    st = st == BT_OK ? gguf_token(g, "tokenizer.ggml.bos_token_id", &f->bos_token, err) : st;
    st = st == BT_OK ? gguf_token(g, "tokenizer.ggml.eos_token_id", &f->eos_token, err) : st;
    bt_gguf_close(g);
    return st;
}

enum bt_status bt_template_load(const char *model, struct bt_template_files *out,
                                struct bt_err *err)
{
    struct bt_err local = {0};
    enum bt_status st;
    struct stat sb;

    err = err != NULL ? err : &local;
    *out = (struct bt_template_files){0};
    if (strlen(model) > 4000) {
        return bt_err_set(err, BT_ERR_INVALID, "model path of %zu bytes is too long",
                          strlen(model));
    }
    if (stat(model, &sb) != 0) {
        return bt_err_set(err, errno == ENOENT ? BT_ERR_NOT_FOUND : BT_ERR_IO, "%s: %s", model,
                          strerror(errno));
    }
    st = S_ISDIR(sb.st_mode) ? load_dir(model, out, err) : load_gguf(model, out, err);
    if (st != BT_OK) {
        bt_template_files_fini(out);
    }
    return st;
}

void bt_template_files_fini(struct bt_template_files *f)
{
    bt_template_destroy(f->tmpl);
    bt_free(f->source);
    bt_free(f->bos_token);
    bt_free(f->eos_token);
    *f = (struct bt_template_files){0};
}
