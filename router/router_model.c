/* Tokenizer and chat template from a model's files. Owns nothing beyond them. */

#include "router/router_model.h"

#include <string.h>
#include <sys/stat.h>
#include "base/log.h"
#include "base/mem.h"
#include "files/gguf.h"

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), k = strlen(end);

    return n >= k && strcmp(s + n - k, end) == 0;
}

static enum bt_status load_gguf_tokenizer(const char *path, struct bt_tokenizer **out,
                                          struct bt_err *err)
{
    struct bt_gguf *g = NULL;
    enum bt_status st = bt_gguf_open(path, &g, err);

    if (st == BT_OK) {
        st = bt_tokenizer_open_gguf(g, out, err);
        bt_gguf_close(g);
    }
    return st;
}

/* "models/SmolLM2.gguf" → "SmolLM2"; "models/tiny/" → "tiny"; "tiny/tokenizer.json" → "tiny". */
static char *base_name(const char *path)
{
    size_t n = strlen(path);

    if (ends_with(path, "/tokenizer.json")) {
        n -= strlen("/tokenizer.json");
    } else if (ends_with(path, ".gguf")) {
        n -= strlen(".gguf");
    }
    while (n > 1 && path[n - 1] == '/') {
        n--;
    }
    size_t from = n;

    while (from > 0 && path[from - 1] != '/') {
        from--;
    }
    return bt_strndup(path + from, n - from);
}

enum bt_status bt_router_model_load(const char *path, struct bt_router_model *out,
                                    struct bt_err *err)
{
    struct bt_err why = {0};
    struct stat sb;

    *out = (struct bt_router_model){0};
    if (stat(path, &sb) == 0 && !S_ISDIR(sb.st_mode) && !ends_with(path, ".gguf") &&
        !ends_with(path, ".json")) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "%s: neither a model directory nor a .gguf file nor a tokenizer.json",
                          path);
    }
    enum bt_status st = ends_with(path, ".gguf") ? load_gguf_tokenizer(path, &out->tok, err)
                                                 : bt_tokenizer_load(path, &out->tok, err);

    if (st != BT_OK) {
        return st;
    }
    out->name = base_name(path);
    if (out->name == NULL) {
        bt_router_model_fini(out);
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    if (!ends_with(path, ".json") && bt_template_load(path, &out->tmpl, &why) != BT_OK) {
        bt_log_warn("router", "no chat template, chats will be refused: %s", why.msg);
        bt_template_files_fini(&out->tmpl);
        out->tmpl = (struct bt_template_files){0};
    }
    return BT_OK;
}

void bt_router_model_fini(struct bt_router_model *m)
{
    bt_tokenizer_destroy(m->tok);
    bt_template_files_fini(&m->tmpl);
    bt_free(m->name);
    *m = (struct bt_router_model){0};
}
