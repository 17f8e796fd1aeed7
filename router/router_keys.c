/* Keys of clients and of administrators: read from files at start, compared with what a caller sends. Owns their memory, and the
 * rules of who may what; knows no front end. */

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include "base/mem.h"
#include "router/router_int.h"

#define KEY_FILE_MAX ((size_t)1 << 20)

/* key: n bytes, then perhaps its name. */
static bool add_key(struct bt_router_keys *all, char *key, size_t n)
{
    struct bt_router_key *grown = bt_realloc(all->list, (all->n + 1) * sizeof *grown);

    if (grown == NULL) {
        return false;
    }
    all->list = grown;
    struct bt_router_key *k = &grown[all->n++];
    char unnamed[32];
    char *name = key + n + strspn(key + n, " \t\r\n");
    size_t len = strlen(name);

    while (len > 0 && strchr(" \t\r\n", name[len - 1]) != NULL) {
        name[--len] = '\0';
    }
    snprintf(unnamed, sizeof unnamed, "key-%zu", all->n);
    *k = (struct bt_router_key){bt_memdup(key, n), n, bt_strdup(len > 0 ? name : unnamed)};
    return k->key != NULL && k->name != NULL;
}

enum bt_status bt_router_keys_load(struct bt_router_keys *k, const char *option, const char *path,
                                   struct bt_err *err)
{
    char line[4096];
    FILE *f = fopen(path, "re");

    if (f == NULL) {
        return bt_err_set(err, BT_ERR_IO, "%s %s: %s", option, path, strerror(errno));
    }
    enum bt_status st = BT_OK;

    for (size_t total = 0; st == BT_OK && fgets(line, sizeof line, f) != NULL;) {
        size_t from = strspn(line, " \t"), n = strcspn(line + from, " \t\r\n");
        size_t len = strlen(line);

        total += len;
        if (len + 1 == sizeof line && line[len - 1] != '\n') { /* its rest would be a key */
            st = bt_err_set(err, BT_ERR_INVALID, "%s %s: a line of %zu bytes or more", option, path,
                            len);
            break;
        }
        if (n == 0 || line[from] == '#') {
            continue;
        }
        if (!add_key(k, line + from, n)) {
            st = bt_err_set(err, BT_ERR_NOMEM, "out of memory");
        } else if (total > KEY_FILE_MAX) {
            st = bt_err_set(err, BT_ERR_INVALID, "%s %s: longer than 1 MiB", option, path);
        }
    }
    (void)fclose(f);
    if (st == BT_OK && k->n == 0) {
        st = bt_err_set(err, BT_ERR_INVALID, "%s %s: holds no key", option, path);
    }
    return st;
}

void bt_router_keys_free(struct bt_router_keys *k)
{
    for (size_t i = 0; i < k->n; i++) {
        bt_free(k->list[i].key);
        bt_free(k->list[i].name);
    }
    bt_free(k->list);
    *k = (struct bt_router_keys){0};
}

enum bt_status bt_router_keys_check(const struct bt_router *r, struct bt_err *err)
{
    for (size_t i = 0; i < r->admin_keys.n; i++) {
        const struct bt_router_key *a = &r->admin_keys.list[i];

        for (size_t k = 0; k < r->keys.n; k++) {
            const struct bt_router_key *c = &r->keys.list[k];

            if (a->len == c->len && memcmp(a->key, c->key, a->len) == 0) {
                return bt_err_set(
                    err, BT_ERR_INVALID,
                    "--admin-key-file: its key \"%s\" stands in --api-key-file too, as "
                    "\"%s\": clients must not have it",
                    a->name, c->name);
            }
        }
    }
    return BT_OK;
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

/* Whether it is one of them, and which: all are compared. */
static bool find(const struct bt_router_keys *all, const char *authorization, uint32_t *at)
{
    bool ok = false;

    *at = 0;
    if (authorization == NULL || strncasecmp(authorization, "bearer ", 7) != 0) {
        return false;
    }
    const char *key = authorization + 7 + strspn(authorization + 7, " ");
    size_t len = strlen(key);

    for (size_t i = 0; i < all->n; i++) {
        bool equal = key_equal(&all->list[i], key, len);

        ok |= equal;
        *at = equal ? (uint32_t)i : *at;
    }
    return ok;
}

bool bt_router_key_find(const struct bt_router *r, const char *authorization, uint32_t *at)
{
    return find(&r->keys, authorization, at) || r->keys.n == 0;
}

bool bt_router_may_look(const struct bt_router *r, const char *authorization)
{
    uint32_t at;

    return bt_router_key_find(r, authorization, &at) || find(&r->admin_keys, authorization, &at);
}

static bool is_local(const char *peer)
{
    return strncmp(peer, "127.", 4) == 0 || strncmp(peer, "[::1]:", 6) == 0 ||
           strncmp(peer, "[::ffff:127.", 12) == 0;
}

bool bt_router_may_administer(const struct bt_router *r, const char *authorization,
                              const char *peer, struct bt_api_err *e)
{
    uint32_t at;

    if (r->admin_keys.n == 0) {
        return is_local(peer) ||
               bt_api_fail(e, BT_API_FORBIDDEN, NULL,
                           "a router without --admin-key-file is administered from its own machine "
                           "only, whatever the API key");
    }
    if (find(&r->admin_keys, authorization, &at)) {
        return true;
    }
    return bt_api_fail(
        e, BT_API_UNAUTHENTICATED, NULL,
        find(&r->keys, authorization, &at)
            ? "an API key does not administer: an admin key is needed, one of the "
              "router's --admin-key-file (baton: --admin-key or BATON_ADMIN_KEY)"
            : "a missing or wrong admin key: one of the router's --admin-key-file is "
              "needed (baton: --admin-key or BATON_ADMIN_KEY)");
}

const char *bt_router_key_name(const struct bt_router *r, uint32_t key)
{
    return key < r->keys.n ? r->keys.list[key].name : NULL;
}
