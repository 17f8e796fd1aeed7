/* Files of API keys, and what a client may send. */

#include <stdio.h>
#include "base/mem.h"
#include "router/router_int.h"
#include "tests/check.h"
#include "tests/tempfile.h"

static struct bt_router r;

static enum bt_status load(const char *text, struct bt_err *err)
{
    *err = (struct bt_err){0};
    return bt_router_keys_load(&r.keys, "--api-key-file", bt_temp_write("keys", text, strlen(text)),
                               err);
}

static bool key_ok(const char *authorization)
{
    uint32_t key;

    return bt_router_key_find(&r, authorization, &key);
}

static void test_lines(void)
{
    struct bt_err err;

    CHECK(key_ok(NULL)); /* without keys nobody is asked */
    CHECK_EQ(load("# team keys\n\n  abc alice\r\ndef\tbob and more\nghi", &err), BT_OK);
    CHECK_EQ(r.keys.n, 3);
    uint32_t key = 9;

    CHECK(bt_router_key_find(&r, "Bearer def", &key) && key == 1);
    CHECK_STR(bt_router_key_name(&r, 0), "alice");
    CHECK_STR(bt_router_key_name(&r, 1), "bob and more");
    CHECK_STR(bt_router_key_name(&r, 2), "key-3");
    CHECK(bt_router_key_name(&r, 3) == NULL);
    CHECK(key_ok("Bearer abc"));
    CHECK(key_ok("bearer  def"));
    CHECK(key_ok("Bearer ghi"));
    CHECK(!key_ok("Bearer alice"));
    CHECK(!key_ok("Bearer ab"));
    CHECK(!key_ok("Bearer abcd"));
    CHECK(!key_ok("Bearer "));
    CHECK(!key_ok("Basic abc"));
    CHECK(!key_ok("abc"));
    CHECK(!key_ok(NULL));
    bt_router_keys_free(&r.keys);
}

static void test_refused(void)
{
    struct bt_err err;
    static char line[8192];

    CHECK_EQ(load("# nothing\n", &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "holds no key") != NULL);
    bt_router_keys_free(&r.keys);
    /* The end of a long line is not a key of its own. */
    memset(line, 'k', 4095);
    memcpy(line + 4095, "secret\n", 8);
    CHECK_EQ(load(line, &err), BT_ERR_INVALID);
    CHECK(!key_ok("Bearer secret") || r.keys.n == 0);
    bt_router_keys_free(&r.keys);
    CHECK_EQ(bt_router_keys_load(&r.keys, "--api-key-file", "/nonexistent/keys", &err), BT_ERR_IO);
    CHECK(strstr(err.msg, "/nonexistent/keys") != NULL);
    bt_router_keys_free(&r.keys);
}

/* Without admin keys: this machine, whatever is presented. With them: who has one, from anywhere, and nobody else. */
static void test_who_administers(void)
{
    static const char *const local[] = {"127.0.0.1:9", "127.8.8.8:9", "[::1]:9",
                                        "[::ffff:127.0.0.1]:9"};
    static const char *const remote[] = {"10.0.0.1:9", "[::2]:9", "[::ffff:10.0.0.1]:9",
                                         "[127::1]:9", ""};
    static const char *const presented[] = {NULL, "Bearer abc", "Bearer root", "Bearer "};
    const char *admin = "root alice\n";
    struct bt_api_err e;
    struct bt_err err;

    for (unsigned api = 0; api < 2; api++) { /* with API keys, too */
        CHECK(api == 0 || load("abc\n", &err) == BT_OK);
        for (size_t k = 0; k < 4; k++) {
            for (size_t i = 0; i < 4; i++) {
                CHECK(bt_router_may_administer(&r, presented[k], local[i], &e));
            }
            for (size_t i = 0; i < 5; i++) {
                CHECK(!bt_router_may_administer(&r, presented[k], remote[i], &e));
                CHECK(e.code == BT_API_FORBIDDEN && strstr(e.msg, "--admin-key-file") != NULL);
            }
        }
        CHECK_EQ(bt_router_keys_load(&r.admin_keys, "--admin-key-file",
                                     bt_temp_write("keys", admin, strlen(admin)), &err),
                 BT_OK);
        CHECK_EQ(bt_router_keys_check(&r, &err), BT_OK);
        for (size_t i = 0; i < 4; i++) {
            CHECK(bt_router_may_administer(&r, "Bearer root", remote[i], &e));
            CHECK(bt_router_may_administer(&r, "Bearer root", local[i], &e));
            CHECK(!bt_router_may_administer(&r, NULL, local[i], &e));
            CHECK(e.code == BT_API_UNAUTHENTICATED && strstr(e.msg, "--admin-key") != NULL);
            CHECK(!bt_router_may_administer(&r, "Bearer abc", local[i], &e));
            CHECK_EQ(strstr(e.msg, "an API key does not administer") != NULL, api == 1);
        }
        CHECK(bt_router_may_look(&r, "Bearer root")); /* they see the nodes, */
        CHECK_EQ(bt_router_may_look(&r, "Bearer xyz"), api == 0);
        CHECK_EQ(key_ok("Bearer root"), api == 0); /* and are no clients */
        bt_router_keys_free(&r.admin_keys);
        bt_router_keys_free(&r.keys);
    }
}

static void test_a_key_in_both_files(void)
{
    struct bt_err err;

    CHECK_EQ(load("abc\nroot bob\n", &err), BT_OK);
    CHECK_EQ(bt_router_keys_load(&r.admin_keys, "--admin-key-file",
                                 bt_temp_write("keys", "x\nroot\n", 7), &err),
             BT_OK);
    CHECK_EQ(bt_router_keys_check(&r, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "\"key-2\"") != NULL && strstr(err.msg, "\"bob\"") != NULL);
    CHECK(strstr(err.msg, "root") == NULL);
    bt_router_keys_free(&r.admin_keys);
    CHECK_EQ(bt_router_keys_load(&r.admin_keys, "--admin-key-file", bt_temp_write("keys", "#\n", 2),
                                 &err),
             BT_ERR_INVALID);
    CHECK(strncmp(err.msg, "--admin-key-file ", 17) == 0);
    bt_router_keys_free(&r.keys);
}

int main(void)
{
    static const char *const files[] = {"keys"};

    test_lines();
    test_refused();
    test_who_administers();
    test_a_key_in_both_files();
    bt_temp_clean(files, 1);
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
