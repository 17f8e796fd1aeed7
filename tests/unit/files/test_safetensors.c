/* Safetensors headers, good and bad: each defect must be refused with a message that names it. */

#include "files/safetensors.h"

#include <stdint.h>
#include "base/mem.h"
#include "tests/check.h"
#include "tests/tempfile.h"

/* Writes name with this header and n_data bytes of data (byte i is i). */
static const char *write_st(const char *name, const char *header, size_t n_data)
{
    static uint8_t buf[8192];
    size_t n = strlen(header);

    for (unsigned i = 0; i < 8; i++) {
        buf[i] = (uint8_t)((uint64_t)n >> (8 * i));
    }
    memcpy(buf + 8, header, n);
    for (size_t i = 0; i < n_data; i++) {
        buf[8 + n + i] = (uint8_t)i;
    }
    return bt_temp_write(name, buf, 8 + n + n_data);
}

static void test_good(void)
{
    struct bt_err err = {0};
    struct bt_st *s = NULL;
    const char *path =
        write_st("a.safetensors",
                 "{\"__metadata__\":{\"format\":\"pt\"},"
                 "\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[8,20]},"
                 "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
                 "\"i\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[20,28]}}",
                 28);
    CHECK_EQ(bt_st_open(path, &s, &err), BT_OK);
    if (s == NULL) {
        fprintf(stderr, "%s\n", err.msg);
        return;
    }
    CHECK_EQ(bt_st_count(s), 3);
    CHECK_STR(bt_st_at(s, 0)->name, "a");
    const struct bt_tensor *t = bt_st_find(s, "b");
    CHECK(t != NULL);
    if (t != NULL) {
        CHECK(t->supported && t->dtype == BT_DTYPE_BF16);
        CHECK_EQ(t->n_dims, 2);
        CHECK_EQ(t->shape[0], 2);
        CHECK_EQ(t->shape[1], 3);
        CHECK_EQ(t->bytes, 12);
        CHECK_EQ(((const uint8_t *)t->data)[0], 8);
        CHECK_EQ(bt_tensor_values(t), 6);
    }
    t = bt_st_find(s, "i");
    CHECK(t != NULL && !t->supported && t->n_dims == 0 && t->bytes == 8);
    CHECK(bt_st_find(s, "c") == NULL);
    bt_st_close(s);
}

static void expect_bad(const char *header, size_t n_data, const char *want)
{
    struct bt_err err = {0};
    struct bt_st *s = NULL;

    CHECK_EQ(bt_st_open(write_st("bad.safetensors", header, n_data), &s, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, want) != NULL && strstr(err.msg, "bad.safetensors") != NULL);
    if (strstr(err.msg, want) == NULL) {
        fprintf(stderr, "  wanted \"%s\" in: %s\n", want, err.msg);
    }
}

static void test_bad(void)
{
    expect_bad("{", 0, "byte");
    expect_bad("[]", 0, "no JSON object");
    expect_bad("{\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 7, "tensor x");
    expect_bad("{\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,0]}}", 8, "outside");
    expect_bad("{\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[-8,0]}}", 8, "outside");
    expect_bad("{\"x\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", 8,
               "the shape needs 12");
    expect_bad("{\"x\":{\"dtype\":\"F99\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
               "unknown dtype \"F99\"");
    expect_bad("{\"x\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", 8, "shape[0]");
    expect_bad("{\"x\":{\"dtype\":\"F32\",\"shape\":2,\"data_offsets\":[0,8]}}", 8, "shape");
    expect_bad("{\"x\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}",
               8, "at most 8");
    expect_bad(
        "{\"x\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 8,
        "overflows");
    expect_bad("{\"x\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0]}}", 8,
               "pair of integers");
    expect_bad("{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0.5,4]}}", 8,
               "pair of integers");
    expect_bad("{\"x\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 8, "no dtype");
    expect_bad("{\"x\":3}", 8, "no dtype");
    expect_bad("{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
               "\"y\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2,6]}}",
               8, "x and y overlap");
    expect_bad("{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
               "\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
               8, "duplicate");

    struct bt_err err = {0};
    struct bt_st *s = NULL;
    const uint8_t huge[16] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, '{', '}'};
    CHECK_EQ(bt_st_open(bt_temp_write("bad.safetensors", huge, sizeof(huge)), &s, &err),
             BT_ERR_INVALID);
    CHECK(strstr(err.msg, "byte 0: header") != NULL);
    CHECK_EQ(bt_st_open(bt_temp_write("bad.safetensors", huge, 5), &s, &err), BT_ERR_INVALID);
    CHECK_EQ(bt_st_open(bt_temp_write("bad.safetensors", huge, 0), &s, &err), BT_ERR_INVALID);
    CHECK_EQ(bt_st_open(bt_temp_path("nothing"), &s, &err), BT_ERR_NOT_FOUND);
    CHECK_EQ(bt_st_open("/dev/zero", &s, &err), BT_ERR_IO);
}

static enum bt_status open_index(const char *index, struct bt_st **s, struct bt_err *err)
{
    (void)bt_temp_write("model.safetensors.index.json", index, strlen(index));
    return bt_st_open(bt_temp_dir(), s, err);
}

static void test_shards(void)
{
    struct bt_err err = {0};
    struct bt_st *s = NULL;

    (void)write_st("s1", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4);
    (void)write_st("s2", "{\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4);
    (void)write_st("s3", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4);
    CHECK_EQ(bt_st_open(bt_temp_dir(), &s, &err), BT_ERR_NOT_FOUND);
    CHECK_EQ(open_index("{\"weight_map\":{\"a\":\"s1\",\"b\":\"s2\"}}", &s, &err), BT_OK);
    if (s != NULL) {
        CHECK_EQ(bt_st_count(s), 2);
        CHECK(bt_st_find(s, "a") != NULL && bt_st_find(s, "b") != NULL);
        bt_st_close(s);
        s = NULL;
    }
    CHECK_EQ(open_index("{\"weight_map\":{\"a\":\"s1\",\"b\":\"s3\"}}", &s, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "tensor a is in") != NULL);
    CHECK_EQ(open_index("{\"weight_map\":{\"a\":\"s1\",\"c\":\"s2\"}}", &s, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "tensor c is not in s2") != NULL);
    CHECK_EQ(open_index("{\"weight_map\":{\"a\":\"s2\",\"b\":\"s1\"}}", &s, &err), BT_ERR_INVALID);
    CHECK_EQ(open_index("{\"weight_map\":{\"a\":\"../s1\"}}", &s, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "weight_map.a") != NULL);
    CHECK_EQ(open_index("{\"weight_map\":{\"a\":\"s9\"}}", &s, &err), BT_ERR_NOT_FOUND);
    CHECK_EQ(open_index("{\"weight_map\":[]}", &s, &err), BT_ERR_INVALID);
    CHECK_EQ(open_index("{\"weight_map\":", &s, &err), BT_ERR_INVALID);
}

static void test_out_of_memory(void)
{
    const char *path = write_st("a.safetensors",
                                "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
                                "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,16]}}",
                                16);
    bool fired = true;

    for (uint64_t nth = 0; fired; nth++) {
        struct bt_st *s = NULL;
        size_t live = bt_test_live_bytes();
        bt_test_fail_alloc(nth);
        enum bt_status st = bt_st_open(path, &s, NULL);
        fired = bt_test_fail_alloc_off();
        CHECK_EQ(st, fired ? BT_ERR_NOMEM : BT_OK);
        bt_st_close(s);
        CHECK_EQ(bt_test_live_bytes(), live);
    }
}

int main(void)
{
    static const char *const names[] = {
        "a.safetensors", "bad.safetensors", "s1", "s2", "s3", "model.safetensors.index.json"};
    test_good();
    test_bad();
    test_shards();
    test_out_of_memory();
    bt_temp_clean(names, sizeof(names) / sizeof(names[0]));
    return bt_test_done();
}
