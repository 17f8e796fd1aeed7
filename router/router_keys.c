/* API keys: read from a file at start, compared with what a client sends. Owns their memory; knows no
 * front end. */

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include "base/mem.h"
#include "router/router_int.h"

#define KEY_FILE_MAX ((size_t)1 << 20)

/* key: n bytes, then perhaps its name. */
static bool add_key(struct bt_router *r, char *key, size_t n)
{
    struct bt_router_key *grown = bt_realloc(r->keys, (r->n_keys + 1) * sizeof *grown);

    if (grown == NULL) {
        return false;
    }
    r->keys = grown;
    struct bt_router_key *k = &grown[r->n_keys++];
    char unnamed[32];
    char *name = key + n + strspn(key + n, " \t\r\n");
    size_t len = strlen(name);

    while (len > 0 && strchr(" \t\r\n", name[len - 1]) != NULL) {
        name[--len] = '\0';
    }
    snprintf(unnamed, sizeof unnamed, "key-%zu", r->n_keys);
    *k = (struct bt_router_key){bt_memdup(key, n), n, bt_strdup(len > 0 ? name : unnamed)};
    return k->key != NULL && k->name != NULL;
}

enum bt_status bt_router_keys_load(struct bt_router *r, const char *path, struct bt_err *err)
{
    char line[4096];
    FILE *f = fopen(path, "re");

    if (f == NULL) {
        return bt_err_set(err, BT_ERR_IO, "--api-key-file %s: %s", path, strerror(errno));
    }
    enum bt_status st = BT_OK;

    for (size_t total = 0; st == BT_OK && fgets(line, sizeof line, f) != NULL;) {
        size_t from = strspn(line, " \t"), n = strcspn(line + from, " \t\r\n");
        size_t len = strlen(line);

        total += len;
        if (len + 1 == sizeof line && line[len - 1] != '\n') { /* its rest would be a key */
            st = bt_err_set(err, BT_ERR_INVALID, "--api-key-file %s: a line of %zu bytes or more",
                            path, len);
            break;
        }
        if (n == 0 || line[from] == '#') {
            continue;
        }
        if (!add_key(r, line + from, n)) {
            st = bt_err_set(err, BT_ERR_NOMEM, "out of memory");
        } else if (total > KEY_FILE_MAX) {
            st = bt_err_set(err, BT_ERR_INVALID, "--api-key-file %s: longer than 1 MiB", path);
        }
    }
    (void)fclose(f);
    if (st == BT_OK && r->n_keys == 0) {
        st = bt_err_set(err, BT_ERR_INVALID, "--api-key-file %s: holds no key", path);
    }
    return st;
}

void bt_router_keys_free(struct bt_router *r)
{
    for (size_t i = 0; i < r->n_keys; i++) {
        bt_free(r->keys[i].key);
        bt_free(r->keys[i].name);
    }
    bt_free(r->keys);
    r->keys = NULL;
    r->n_keys = 0;
}

/* In a time that does not depend on where the texts differ. */
static bool key_equal(const struct bt_router_key *k, const char *s, size_t len)
{
    unsigned char diff = k->len != len;

    for (size_t i = 0; i < k->len; i++) {
        diff |= (unsigned char)(k->key[i] ^ (i < len ? s[i] : 0));
    }
    return diff == 0;
}

bool bt_router_key_ok(const struct bt_router *r, const char *authorization)
{
    uint32_t key;

    return bt_router_key_find(r, authorization, &key);
}

bool bt_router_key_find(const struct bt_router *r, const char *authorization, uint32_t *at)
{
    bool ok = r->n_keys == 0;

    *at = 0;
    if (ok || authorization == NULL || strncasecmp(authorization, "bearer ", 7) != 0) {
        return ok;
    }
    const char *key = authorization + 7 + strspn(authorization + 7, " ");
    size_t len = strlen(key);

    for (size_t i = 0; i < r->n_keys; i++) {
        bool equal = key_equal(&r->keys[i], key, len);

        ok |= equal;
        *at = equal ? (uint32_t)i : *at;
    }
    return ok;
}

const char *bt_router_key_name(const struct bt_router *r, uint32_t key)
{
    return key < r->n_keys ? r->keys[key].name : NULL;
}
