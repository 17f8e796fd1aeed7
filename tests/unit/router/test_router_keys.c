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
    return bt_router_keys_load(&r, bt_temp_write("keys", text, strlen(text)), err);
}

static void test_lines(void)
{
    struct bt_err err;

    CHECK(bt_router_key_ok(&r, NULL)); /* without keys nobody is asked */
    CHECK_EQ(load("# team keys\n\n  abc alice\r\ndef\tbob and more\nghi", &err), BT_OK);
    CHECK_EQ(r.n_keys, 3);
    uint32_t key = 9;

    CHECK(bt_router_key_find(&r, "Bearer def", &key) && key == 1);
    CHECK_STR(bt_router_key_name(&r, 0), "alice");
    CHECK_STR(bt_router_key_name(&r, 1), "bob and more");
    CHECK_STR(bt_router_key_name(&r, 2), "key-3");
    CHECK(bt_router_key_name(&r, 3) == NULL);
    CHECK(bt_router_key_ok(&r, "Bearer abc"));
    CHECK(bt_router_key_ok(&r, "bearer  def"));
    CHECK(bt_router_key_ok(&r, "Bearer ghi"));
    CHECK(!bt_router_key_ok(&r, "Bearer alice"));
    CHECK(!bt_router_key_ok(&r, "Bearer ab"));
    CHECK(!bt_router_key_ok(&r, "Bearer abcd"));
    CHECK(!bt_router_key_ok(&r, "Bearer "));
    CHECK(!bt_router_key_ok(&r, "Basic abc"));
    CHECK(!bt_router_key_ok(&r, "abc"));
    CHECK(!bt_router_key_ok(&r, NULL));
    bt_router_keys_free(&r);
}

static void test_refused(void)
{
    struct bt_err err;
    static char line[8192];

    CHECK_EQ(load("# nothing\n", &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "holds no key") != NULL);
    bt_router_keys_free(&r);
    /* The end of a long line is not a key of its own. */
    memset(line, 'k', 4095);
    memcpy(line + 4095, "secret\n", 8);
    CHECK_EQ(load(line, &err), BT_ERR_INVALID);
    CHECK(!bt_router_key_ok(&r, "Bearer secret") || r.n_keys == 0);
    bt_router_keys_free(&r);
    CHECK_EQ(bt_router_keys_load(&r, "/nonexistent/keys", &err), BT_ERR_IO);
    CHECK(strstr(err.msg, "/nonexistent/keys") != NULL);
    bt_router_keys_free(&r);
}

int main(void)
{
    static const char *const files[] = {"keys"};

    test_lines();
    test_refused();
    bt_temp_clean(files, 1);
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
