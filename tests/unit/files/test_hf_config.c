/* Typed getters of config.json: conversions, defaults, and errors that name the key. */

#include "files/hf_config.h"

#include "tests/check.h"
#include "tests/tempfile.h"

static const char text[] =
    "{\"n\": 4, \"r\": 2.5, \"whole\": 8.0, \"s\": \"x\", \"t\": true, \"nil\": null,"
    "\"o\": {\"in\": {\"deep\": 7}}, \"list\": [\"a\", \"b\"], \"ints\": [1, 2.0],"
    "\"eos\": 3, \"eos_list\": [3, 4], \"bad_eos\": [\"x\"]}";

static struct bt_hf *open_text(const char *s)
{
    struct bt_err err = {0};
    struct bt_hf *c = NULL;

    CHECK_EQ(bt_hf_open_text("c.json", s, strlen(s), &c, &err), BT_OK);
    return c;
}

static void test_values(void)
{
    struct bt_hf *c = open_text(text);
    uint32_t ids[2];

    CHECK_EQ(bt_hf_require_int(c, "n", 1, 10), 4);
    CHECK_EQ(bt_hf_int(c, "whole", 0, 10, 0), 8);
    CHECK_EQ(bt_hf_int(c, "absent", 0, 10, 5), 5);
    CHECK_EQ(bt_hf_int(c, "nil", 0, 10, 6), 6);
    CHECK_EQ(bt_hf_int(c, "o.in.deep", 0, 10, 0), 7);
    CHECK_EQ(bt_hf_int(c, "n.in.deep", 0, 10, 1), 1);
    CHECK_NEAR(bt_hf_real(c, "r", 0), 2.5, 0);
    CHECK_NEAR(bt_hf_require_real(c, "n"), 4, 0);
    CHECK_STR(bt_hf_str(c, "s", "d"), "x");
    CHECK_STR(bt_hf_str(c, "q", "d"), "d");
    CHECK(bt_hf_bool(c, "t", false) && bt_hf_bool(c, "q", true));
    CHECK(bt_hf_has(c, "o.in") && !bt_hf_has(c, "nil") && bt_hf_is_object(c, "o") &&
          !bt_hf_is_object(c, "n"));
    CHECK(bt_hf_is_null(c, "nil") && !bt_hf_is_null(c, "absent") && !bt_hf_is_null(c, "n"));
    CHECK_EQ(bt_hf_array_size(c, "list"), 2);
    CHECK_EQ(bt_hf_array_size(c, "nothing"), -1);
    CHECK_STR(bt_hf_array_str(c, "list", 1), "b");
    CHECK_EQ(bt_hf_array_int(c, "ints", 1, 0, 9), 2);
    CHECK_EQ(bt_hf_token_ids(c, "eos", ids, 2), 1);
    CHECK_EQ(bt_hf_token_ids(c, "eos_list", ids, 2), 2);
    CHECK(ids[0] == 3 && ids[1] == 4);
    CHECK_EQ(bt_hf_token_ids(c, "absent", ids, 2), 0);
    CHECK_EQ(bt_hf_status(c, NULL), BT_OK);
    bt_hf_close(c);
}

static void expect(struct bt_hf *c, const char *want)
{
    struct bt_err err = {0};

    CHECK_EQ(bt_hf_status(c, &err), BT_ERR_INVALID);
    CHECK_STR(err.msg, want);
    bt_hf_close(c);
}

static void test_errors(void)
{
    uint32_t ids[1];
    struct bt_hf *c = open_text(text);
    (void)bt_hf_require_int(c, "o.in.none", 0, 1);
    (void)bt_hf_int(c, "s", 0, 1, 0);
    expect(c, "c.json: o.in.none: missing");
    c = open_text(text);
    CHECK_EQ(bt_hf_int(c, "n", 5, 10, 9), 9);
    expect(c, "c.json: n: 4 is outside 5 … 10");
    c = open_text(text);
    (void)bt_hf_int(c, "r", 0, 10, 0);
    expect(c, "c.json: r: not an integer");
    c = open_text(text);
    (void)bt_hf_real(c, "s", 0);
    expect(c, "c.json: s: not a number");
    c = open_text(text);
    (void)bt_hf_bool(c, "n", false);
    expect(c, "c.json: n: not true or false");
    c = open_text(text);
    (void)bt_hf_token_ids(c, "eos_list", ids, 1);
    expect(c, "c.json: eos_list: too many token ids");
    c = open_text(text);
    (void)bt_hf_token_ids(c, "bad_eos", ids, 1);
    expect(c, "c.json: bad_eos: not a token id or list of token ids");
    c = open_text(text);
    bt_hf_fail(c, BT_ERR_INVALID, "k", "no %d", 3);
    expect(c, "c.json: k: no 3");

    struct bt_err err = {0};
    CHECK_EQ(bt_hf_open_text("c.json", "[1]", 3, &c, &err), BT_ERR_INVALID);
    CHECK_EQ(bt_hf_open_text("c.json", "{\"a\":}", 6, &c, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "c.json: byte 6") != NULL);
    CHECK_EQ(bt_hf_open("/nonexistent", &c, &err), BT_ERR_NOT_FOUND);
}

static void test_files(void)
{
    struct bt_err err = {0};
    struct bt_hf *c = NULL;
    uint32_t ids[4];
    /* An integer past 64 bits must not make the file unreadable. */
    static const char cfg[] = "{\"eos_token_id\": 1, \"bos_token_id\": 9, \"n\": 3, \"huge\": "
                              "1000000000000000019884624838656}";
    static const char gen[] = "{\"eos_token_id\": [5, 6]}";

    (void)bt_temp_write("config.json", cfg, strlen(cfg));
    CHECK_EQ(bt_hf_open(bt_temp_dir(), &c, &err), BT_OK);
    CHECK_EQ(bt_hf_token_ids(c, "eos_token_id", ids, 4), 1);
    CHECK_EQ(bt_hf_int(c, "n", 0, 9, 0), 3);
    bt_hf_close(c);
    (void)bt_temp_write("generation_config.json", gen, strlen(gen));
    CHECK_EQ(bt_hf_open(bt_temp_dir(), &c, &err), BT_OK);
    CHECK_EQ(bt_hf_token_ids(c, "eos_token_id", ids, 4), 2);
    CHECK(ids[0] == 5 && ids[1] == 6);
    CHECK_EQ(bt_hf_token_ids(c, "bos_token_id", ids, 4), 1);
    bt_hf_close(c);
    (void)bt_temp_write("generation_config.json", "x", 1);
    CHECK_EQ(bt_hf_open(bt_temp_dir(), &c, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "generation_config.json") != NULL);
}

int main(void)
{
    static const char *const names[] = {"config.json", "generation_config.json"};

    test_values();
    test_errors();
    test_files();
    bt_temp_clean(names, 2);
    return bt_test_done();
}
