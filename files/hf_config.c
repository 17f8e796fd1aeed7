/* Typed access to config.json and generation_config.json. Owns the two documents, paths into them
 * and the first error met; knows no key by meaning except where token ids are looked up. */

#include "files/hf_config.h"

#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/buf.h"
#include "base/mem.h"
#include "files/gguf.h"
#include "files/json_file.h"

enum { CONFIG_BYTES_MAX = 16 << 20, KEY_PART_MAX = 128 };

struct bt_hf {
    char *path, *gen_path;
    json_t *root;
    json_t *gen; /* NULL: no generation_config.json */
    struct bt_err first;
};

/* The value at a path, null included; NULL: no such key. */
static json_t *lookup(json_t *root, const char *key)
{
    json_t *v = root;

    while (v != NULL && *key != '\0') {
        size_t n = strcspn(key, ".");
        char part[KEY_PART_MAX];
        if (n >= sizeof(part)) {
            return NULL;
        }
        memcpy(part, key, n);
        part[n] = '\0';
        v = json_object_get(v, part);
        key += key[n] == '.' ? n + 1 : n;
    }
    return v;
}

static json_t *set_value(json_t *root, const char *key)
{
    json_t *v = lookup(root, key);

    return json_is_null(v) ? NULL : v;
}

static json_t *get(const struct bt_hf *c, const char *key)
{
    return set_value(c->root, key);
}

static void fail_at(struct bt_hf *c, const char *path, enum bt_status st, const char *key,
                    const char *text)
{
    if (c->first.status == BT_OK) {
        (void)bt_err_set(&c->first, st, "%s: %s: %s", path, key, text);
    }
}

static void fail(struct bt_hf *c, const char *key, const char *text)
{
    fail_at(c, c->path, BT_ERR_INVALID, key, text);
}

void bt_hf_fail(struct bt_hf *c, enum bt_status st, const char *key, const char *fmt, ...)
{
    char text[256];
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    fail_at(c, c->path, st, key, text);
}

static enum bt_status open_root(struct bt_hf *c, struct bt_err *err)
{
    if (!json_is_object(c->root)) {
        return bt_err_set(err, BT_ERR_INVALID, "%s: not a JSON object", c->path);
    }
    if (c->gen != NULL && !json_is_object(c->gen)) {
        return bt_err_set(err, BT_ERR_INVALID, "%s: not a JSON object", c->gen_path);
    }
    return BT_OK;
}

static char *join(const char *dir, const char *name)
{
    struct bt_buf b = {0};

    if (!bt_buf_addf(&b, "%s/%s", dir, name)) {
        bt_buf_fini(&b);
        return NULL;
    }
    return bt_buf_take(&b, NULL);
}

enum bt_status bt_hf_open(const char *dir, struct bt_hf **out, struct bt_err *err)
{
    struct bt_hf *c = bt_calloc(1, sizeof(*c));
    enum bt_status st;

    if (c == NULL || (c->path = join(dir, "config.json")) == NULL ||
        (c->gen_path = join(dir, "generation_config.json")) == NULL) {
        bt_hf_close(c);
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", dir);
    }
    st = bt_json_file_read(c->path, CONFIG_BYTES_MAX, &c->root, err);
    if (st == BT_ERR_NOT_FOUND && err != NULL) {
        bt_gguf_hint(dir, err);
    }
    if (st == BT_OK) {
        st = bt_json_file_read(c->gen_path, CONFIG_BYTES_MAX, &c->gen, err);
        st = st == BT_ERR_NOT_FOUND ? BT_OK : st;
    }
    if (st == BT_OK) {
        st = open_root(c, err);
    }
    if (st != BT_OK) {
        bt_hf_close(c);
        return st;
    }
    *out = c;
    return BT_OK;
}

enum bt_status bt_hf_open_text(const char *name, const char *text, size_t n, struct bt_hf **out,
                               struct bt_err *err)
{
    struct bt_hf *c = bt_calloc(1, sizeof(*c));
    enum bt_status st;

    if (c == NULL || (c->path = bt_strdup(name)) == NULL) {
        bt_hf_close(c);
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", name);
    }
    st = bt_json_parse(name, text, n, &c->root, err);
    if (st == BT_OK) {
        st = open_root(c, err);
    }
    if (st != BT_OK) {
        bt_hf_close(c);
        return st;
    }
    *out = c;
    return BT_OK;
}

void bt_hf_close(struct bt_hf *c)
{
    if (c == NULL) {
        return;
    }
    json_decref(c->root);
    json_decref(c->gen);
    bt_free(c->path);
    bt_free(c->gen_path);
    bt_free(c);
}

const char *bt_hf_path(const struct bt_hf *c)
{
    return c->path;
}

enum bt_status bt_hf_status(const struct bt_hf *c, struct bt_err *err)
{
    if (c->first.status != BT_OK && err != NULL) {
        *err = c->first;
    }
    return c->first.status;
}

bool bt_hf_has(const struct bt_hf *c, const char *key)
{
    return get(c, key) != NULL;
}

bool bt_hf_is_object(const struct bt_hf *c, const char *key)
{
    return json_is_object(get(c, key));
}

bool bt_hf_is_null(const struct bt_hf *c, const char *key)
{
    return json_is_null(lookup(c->root, key));
}

bool bt_hf_is_empty(const struct bt_hf *c, const char *key)
{
    const json_t *v = get(c, key);

    return v == NULL || json_is_false(v) || (json_is_string(v) && json_string_length(v) == 0) ||
           (json_is_number(v) && json_number_value(v) == 0.0) ||
           (json_is_array(v) && json_array_size(v) == 0) ||
           (json_is_object(v) && json_object_size(v) == 0);
}

static bool as_int(const json_t *v, int64_t *out)
{
    if (json_is_integer(v)) {
        *out = json_integer_value(v);
        return true;
    }
    if (json_is_real(v)) {
        double d = json_real_value(v);
        if (d == floor(d) && fabs(d) <= 9007199254740992.0) {
            *out = (int64_t)d;
            return true;
        }
    }
    return false;
}

static int64_t int_value(struct bt_hf *c, const json_t *v, const char *key, int64_t min,
                         int64_t max, int64_t def)
{
    int64_t i;
    char text[96];

    if (!as_int(v, &i)) {
        fail(c, key, "not an integer");
        return def;
    }
    if (i < min || i > max) {
        (void)snprintf(text, sizeof(text), "%lld is outside %lld … %lld", (long long)i,
                       (long long)min, (long long)max);
        fail(c, key, text);
        return def;
    }
    return i;
}

int64_t bt_hf_int(struct bt_hf *c, const char *key, int64_t min, int64_t max, int64_t def)
{
    const json_t *v = get(c, key);

    return v == NULL ? def : int_value(c, v, key, min, max, def);
}

int64_t bt_hf_require_int(struct bt_hf *c, const char *key, int64_t min, int64_t max)
{
    const json_t *v = get(c, key);

    if (v == NULL) {
        fail(c, key, "missing");
        return min;
    }
    return int_value(c, v, key, min, max, min);
}

double bt_hf_real(struct bt_hf *c, const char *key, double def)
{
    const json_t *v = get(c, key);

    if (v == NULL) {
        return def;
    }
    if (!json_is_number(v) || !isfinite(json_number_value(v))) {
        fail(c, key, "not a number");
        return def;
    }
    return json_number_value(v);
}

double bt_hf_require_real(struct bt_hf *c, const char *key)
{
    if (!bt_hf_has(c, key)) {
        fail(c, key, "missing");
    }
    return bt_hf_real(c, key, 0.0);
}

bool bt_hf_bool(struct bt_hf *c, const char *key, bool def)
{
    const json_t *v = get(c, key);

    if (v == NULL) {
        return def;
    }
    if (!json_is_boolean(v)) {
        fail(c, key, "not true or false");
        return def;
    }
    return json_is_true(v);
}

const char *bt_hf_str(struct bt_hf *c, const char *key, const char *def)
{
    const json_t *v = get(c, key);

    if (v == NULL) {
        return def;
    }
    if (!json_is_string(v)) {
        fail(c, key, "not a string");
        return def;
    }
    return json_string_value(v);
}

int64_t bt_hf_array_size(struct bt_hf *c, const char *key)
{
    const json_t *v = get(c, key);

    if (v == NULL) {
        return -1;
    }
    if (!json_is_array(v)) {
        fail(c, key, "not an array");
        return -1;
    }
    return (int64_t)json_array_size(v);
}

const char *bt_hf_array_str(struct bt_hf *c, const char *key, size_t i)
{
    const char *s = json_string_value(json_array_get(get(c, key), i));

    if (s == NULL) {
        fail(c, key, "an element is not a string");
        return "";
    }
    return s;
}

int64_t bt_hf_array_int(struct bt_hf *c, const char *key, size_t i, int64_t min, int64_t max)
{
    return int_value(c, json_array_get(get(c, key), i), key, min, max, min);
}

size_t bt_hf_token_ids(struct bt_hf *c, const char *key, uint32_t *ids, size_t max)
{
    const char *path = c->gen_path;
    const json_t *v = set_value(c->gen, key);
    size_t n = 0;

    if (v == NULL) {
        path = c->path;
        v = get(c, key);
    }
    size_t count = v == NULL ? 0 : json_is_array(v) ? json_array_size(v) : 1;
    for (size_t i = 0; i < count; i++) {
        int64_t id;
        if (!as_int(json_is_array(v) ? json_array_get(v, i) : v, &id) || id < 0 || id > INT32_MAX) {
            fail_at(c, path, BT_ERR_INVALID, key, "not a token id or list of token ids");
            return n;
        }
        if (n == max) {
            fail_at(c, path, BT_ERR_INVALID, key, "too many token ids");
            return n;
        }
        ids[n++] = (uint32_t)id;
    }
    return n;
}
