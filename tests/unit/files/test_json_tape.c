/* The JSON tape: values, escapes, syntax errors with their byte, limits. */

#include "files/json_tape.h"

#include "base/mem.h"
#include "tests/check.h"
#include "tests/tempfile.h"

static void values(void)
{
    static const char text[] = " {\"a\": [1, -2.5e+3, true, false, null], \"k\\u0000y\": {\"x\": "
                               "\"\\ud83d\\ude00\\n\\\"\\/\\u00e9\"},"
                               "\"empty\": {}, \"list\": [[], [[]]], \"nul\": \"a\\u0000b\"} ";
    struct bt_tape *t = NULL;
    uint32_t u;

    CHECK_EQ(bt_tape_parse("t", text, sizeof(text) - 1, &t, NULL), BT_OK);
    const struct bt_tape_node *root = bt_tape_root(t), *a = bt_tape_get(root, "a");
    CHECK(bt_tape_is(root, BT_TAPE_OBJECT) && root->len == 5);
    CHECK(bt_tape_is(a, BT_TAPE_ARRAY) && a->len == 5 && a->span == 6);
    CHECK(bt_tape_u32(a + 1, &u) && u == 1);
    CHECK(!bt_tape_u32(a + 2, &u) && a[2].type == BT_TAPE_NUMBER && a[2].len == 7);
    CHECK(a[3].type == BT_TAPE_TRUE && a[4].type == BT_TAPE_FALSE && a[5].type == BT_TAPE_NULL);
    const struct bt_tape_node *key = a + a->span, *x = bt_tape_get(key + 1, "x");
    CHECK(key->len == 3 && memcmp(key->s, "k\0y", 3) == 0);
    CHECK(bt_tape_str_eq(x, "\xf0\x9f\x98\x80\n\"/\xc3\xa9"));
    CHECK(bt_tape_get(root, "empty")->len == 0 && bt_tape_get(root, "list")->span == 4);
    CHECK(bt_tape_get(root, "nul")->len == 3);
    CHECK(bt_tape_get(root, "none") == NULL && bt_tape_get(a, "a") == NULL &&
          bt_tape_get(NULL, "a") == NULL);
    bt_tape_destroy(t);
    CHECK_EQ(bt_tape_parse("t", "4294967295", 10, &t, NULL), BT_OK);
    CHECK(bt_tape_u32(bt_tape_root(t), &u) && u == UINT32_MAX);
    bt_tape_destroy(t);
    CHECK_EQ(bt_tape_parse("t", "4294967296", 10, &t, NULL), BT_OK);
    CHECK(!bt_tape_u32(bt_tape_root(t), &u));
    bt_tape_destroy(t);
    bt_tape_destroy(NULL);
}

static void refused(void)
{
    static const struct {
        const char *text, *want;
    } c[] = {
        {"", "byte 0"},
        {" [1,]", "byte 4"},
        {"[1 2]", "byte 3"},
        {"{\"a\" 1}", "byte 5"},
        {"{1:2}", "byte 1"},
        {"[01]", "byte 3"},
        {"[-]", "byte 2"},
        {"[1.]", "byte 3"},
        {"[1e]", "byte 3"},
        {"nul", "byte 0"},
        {"[1]x", "byte 3"},
        {"\"a", "byte 2"},
        {"\"\\x\"", "byte 2"},
        {"\"\\ud800\"", "byte 7"},
        {"\"\\udc00\"", "byte 7"},
        {"\"\\ud800\\u0041\"", "byte 13"},
        {"\"\\u00g0\"", "hex"},
        {"\"\n\"", "byte 1"},
        {"\"\xff\"", "byte 1"},
        {"[", "byte 1"},
        {"{\"a\":", "byte 5"},
        {"[}", "byte 1"},
        {"{\"a\":1,}", "key expected"},
    };

    for (size_t i = 0; i < sizeof(c) / sizeof(c[0]); i++) {
        struct bt_tape *t = NULL;
        struct bt_err err = {.status = BT_OK};
        CHECK_EQ(bt_tape_parse("name", c[i].text, strlen(c[i].text), &t, &err), BT_ERR_INVALID);
        CHECK(strncmp(err.msg, "name: byte ", 11) == 0);
        CHECK(strstr(err.msg, c[i].want) != NULL);
        if (strstr(err.msg, c[i].want) == NULL) {
            fprintf(stderr, "  %s: %s\n", c[i].text, err.msg);
        }
    }
}

static void limits(void)
{
    char deep[200];
    struct bt_tape *t = NULL;
    struct bt_err err;

    memset(deep, '[', 100);
    memset(deep + 100, ']', 100);
    CHECK_EQ(bt_tape_parse("t", deep, 200, &t, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "byte 64: nested too deeply") != NULL);
    CHECK_EQ(bt_tape_parse("t", deep + 36, 128, &t, &err), BT_OK);
    bt_tape_destroy(t);
    const char *path = bt_temp_write("a.json", "[1]", 3);
    CHECK_EQ(bt_tape_read(path, 2, &t, &err), BT_ERR_INVALID);
    CHECK_EQ(bt_tape_read(path, 3, &t, &err), BT_OK);
    bt_tape_destroy(t);
    CHECK_EQ(bt_tape_read("/nonexistent", 3, &t, &err), BT_ERR_NOT_FOUND);
    CHECK_EQ(bt_tape_read("/", 3, &t, &err), BT_ERR_IO);
    bt_temp_clean((const char *[]){"a.json"}, 1);
}

static void memory(void)
{
    size_t live = bt_test_live_bytes();
    char text[2000];
    bool fired = true;

    memset(text, ' ', sizeof(text));
    for (size_t i = 0; i < sizeof(text) - 1; i += 2) {
        memcpy(text + i, i == 0 ? "[0" : ",0", 2);
    }
    memcpy(text + sizeof(text) - 2, " ]", 2);
    for (uint64_t nth = 0; fired; nth++) {
        struct bt_tape *t = NULL;
        bt_test_fail_alloc(nth);
        enum bt_status st = bt_tape_parse("t", text, sizeof(text), &t, NULL);
        fired = bt_test_fail_alloc_off();
        CHECK_EQ(st, fired ? BT_ERR_NOMEM : BT_OK);
        bt_tape_destroy(st == BT_OK ? t : NULL);
        CHECK_EQ(bt_test_live_bytes(), live);
    }
}

int main(void)
{
    values();
    refused();
    limits();
    memory();
    return bt_test_done();
}
