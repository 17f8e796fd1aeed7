/* GGUF headers, good and bad. A small writer builds files; defects are then written over it. */

#include "files/gguf.h"

#include <stdint.h>
#include "base/mem.h"
#include "tests/check.h"
#include "tests/gguf_writer.h"

static enum bt_status open_buf(struct bt_gguf **g, struct bt_err *err)
{
    return bt_gguf_open(gw_save("t.gguf"), g, err);
}

static void expect(enum bt_status want, const char *text)
{
    struct bt_err err = {0};
    struct bt_gguf *g = NULL;

    CHECK_EQ(open_buf(&g, &err), want);
    CHECK(strstr(err.msg, text) != NULL);
    if (strstr(err.msg, text) == NULL) {
        fprintf(stderr, "  wanted \"%s\" in: %s\n", text, err.msg);
    }
    bt_gguf_close(g);
}

static void write_good(void)
{
    gw_begin(3, 9);
    gw_key("general.architecture", BT_GGUF_STRING);
    gw_str("llama");
    gw_key("u8", BT_GGUF_U8);
    gw_put(200, 1);
    gw_key("i16", BT_GGUF_I16);
    gw_put((uint64_t)-5, 2);
    gw_key("u64", BT_GGUF_U64);
    gw_put(UINT64_MAX, 8);
    gw_key("f32", BT_GGUF_F32);
    gw_put(0x3fc00000, 4);
    gw_key("yes", BT_GGUF_BOOL);
    gw_put(1, 1);
    gw_key("words", BT_GGUF_ARRAY);
    gw_put(BT_GGUF_STRING, 4);
    gw_put(3, 8);
    gw_str("a");
    gw_str("");
    gw_str("ccc");
    gw_key("nums", BT_GGUF_ARRAY);
    gw_put(BT_GGUF_I32, 4);
    gw_put(2, 8);
    gw_put((uint64_t)-7, 4);
    gw_put(9, 4);
    gw_key("nested", BT_GGUF_ARRAY);
    gw_put(BT_GGUF_ARRAY, 4);
    gw_put(1, 8);
    gw_put(BT_GGUF_U8, 4);
    gw_put(2, 8);
    gw_put(0, 2);
    gw_tensor("w", 0, 4, 2, 0);
    gw_tensor("q", 8, 64, 1, 32);
    gw_tensor("odd", 15, 256, 1, 128);
    gw_align(32);
    gw_count(128 + 64);
}

static void test_values(struct bt_gguf *g)
{
    struct bt_err err = {0};
    struct bt_gguf_iter it;
    const char *s;
    size_t n;
    uint64_t u = 0;
    double d = 0;
    bool b = false;

    CHECK_EQ(bt_gguf_get_str(g, "general.architecture", &s, &n, &err), BT_OK);
    CHECK(n == 5 && memcmp(s, "llama", 5) == 0);
    CHECK_EQ(bt_gguf_get_u64(g, "u8", &u, &err), BT_OK);
    CHECK_EQ(u, 200);
    CHECK_EQ(bt_gguf_get_u64(g, "u64", &u, &err), BT_OK);
    CHECK(u == UINT64_MAX);
    CHECK_EQ(bt_gguf_get_f64(g, "f32", &d, &err), BT_OK);
    CHECK_NEAR(d, 1.5, 0);
    CHECK_EQ(bt_gguf_get_f64(g, "i16", &d, &err), BT_OK);
    CHECK_NEAR(d, -5, 0);
    CHECK_EQ(bt_gguf_get_bool(g, "yes", &b, &err), BT_OK);
    CHECK(b);
    CHECK_EQ(bt_gguf_get_u64(g, "i16", &u, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "key i16") != NULL);
    CHECK_EQ(bt_gguf_get_u64(g, "f32", &u, &err), BT_ERR_INVALID);
    CHECK_EQ(bt_gguf_get_u64(g, "none", &u, &err), BT_ERR_NOT_FOUND);
    CHECK_EQ(bt_gguf_get_bool(g, "u8", &b, &err), BT_ERR_INVALID);
    CHECK_EQ(bt_gguf_get_str(g, "u8", &s, &n, &err), BT_ERR_INVALID);
    CHECK_EQ(bt_gguf_iter_strings(g, "nums", &it, &err), BT_ERR_INVALID);
    CHECK_EQ(bt_gguf_iter_numbers(g, "words", &it, &err), BT_ERR_INVALID);
    CHECK_EQ(bt_gguf_iter_numbers(g, "nested", &it, &err), BT_ERR_INVALID);
    CHECK_EQ(bt_gguf_iter_strings(g, "words", &it, &err), BT_OK);
    CHECK(bt_gguf_next_str(&it, &s, &n) && n == 1 && s[0] == 'a');
    CHECK(bt_gguf_next_str(&it, &s, &n) && n == 0);
    CHECK(bt_gguf_next_str(&it, &s, &n) && n == 3 && memcmp(s, "ccc", 3) == 0);
    CHECK(!bt_gguf_next_str(&it, &s, &n));
    CHECK_EQ(bt_gguf_iter_numbers(g, "nums", &it, &err), BT_OK);
    CHECK(bt_gguf_next_f64(&it, &d) && d == -7);
    CHECK(bt_gguf_next_f64(&it, &d) && d == 9);
    CHECK(!bt_gguf_next_f64(&it, &d));
}

static void test_good(void)
{
    struct bt_err err = {0};
    struct bt_gguf *g = NULL;

    write_good();
    CHECK_EQ(open_buf(&g, &err), BT_OK);
    if (g == NULL) {
        fprintf(stderr, "%s\n", err.msg);
        return;
    }
    test_values(g);
    CHECK_EQ(bt_gguf_tensor_count(g), 3);
    const struct bt_tensor *t = bt_gguf_tensor_find(g, "w");
    CHECK(t != NULL && t->dtype == BT_DTYPE_F32 && t->n_dims == 2 && t->shape[0] == 2 &&
          t->shape[1] == 4);
    CHECK(t != NULL && t->bytes == 32 && ((const uint8_t *)t->data)[5] == 5);
    t = bt_gguf_tensor_find(g, "q");
    CHECK(t != NULL && t->dtype == BT_DTYPE_Q8_0 && t->bytes == 68 &&
          ((const uint8_t *)t->data)[0] == 32);
    t = bt_gguf_tensor_find(g, "odd");
    CHECK(t != NULL && !t->supported && t->data == NULL);
    CHECK_STR(t->type_name, "Q8_K");
    bt_gguf_close(g);

    /* Every prefix of a good file is refused, not read past. */
    size_t full = gw_len;
    for (size_t n = 0; n < full; n++) {
        g = NULL;
        enum bt_status st = bt_gguf_open(bt_temp_write("t.gguf", gw_buf, n), &g, &err);
        CHECK(st == BT_ERR_INVALID || n >= full - 64);
        bt_gguf_close(g);
    }
}

static void test_bad_header(void)
{
    gw_begin(0, 0);
    gw_buf[0] = 'X';
    expect(BT_ERR_INVALID, "not a GGUF");
    gw_begin(0, 0);
    gw_buf[4] = 1;
    expect(BT_ERR_UNSUPPORTED, "version 1");
    gw_begin(0, 0);
    gw_buf[4] = 0;
    gw_buf[7] = 3;
    expect(BT_ERR_UNSUPPORTED, "big-endian");
    gw_begin(UINT64_MAX, 0);
    expect(BT_ERR_INVALID, "byte 8");
    gw_begin(0, UINT64_MAX);
    expect(BT_ERR_INVALID, "byte 16");
    gw_begin(0, 1);
    gw_put(UINT64_MAX, 8);
    gw_put(0, 16);
    expect(BT_ERR_INVALID, "bytes needed");
    gw_begin(0, 1);
    gw_key("k", 99);
    gw_put(0, 16);
    expect(BT_ERR_INVALID, "value type 99");
    gw_begin(0, 1);
    gw_key("k", BT_GGUF_ARRAY);
    gw_put(BT_GGUF_U64, 4);
    gw_put(UINT64_MAX / 8, 8);
    expect(BT_ERR_INVALID, "key k");
    gw_begin(0, 2);
    gw_key("k", BT_GGUF_U8);
    gw_put(0, 1);
    gw_key("k", BT_GGUF_U8);
    gw_put(0, 1);
    expect(BT_ERR_INVALID, "key k appears twice");
    gw_begin(0, 1);
    gw_key("k", BT_GGUF_ARRAY);
    for (int i = 0; i < 8; i++) {
        gw_put(BT_GGUF_ARRAY, 4);
        gw_put(1, 8);
    }
    expect(BT_ERR_INVALID, "array depth");
}

static void test_bad_tensors(void)
{
    gw_begin(1, 1);
    gw_key("general.alignment", BT_GGUF_U32);
    gw_put(24, 4);
    gw_tensor("t", 0, 2, 1, 0);
    gw_align(32);
    gw_count(64);
    expect(BT_ERR_INVALID, "general.alignment");
    gw_begin(1, 0);
    gw_tensor("t", 0, 2, 1, 8);
    gw_align(32);
    gw_count(64);
    expect(BT_ERR_INVALID, "tensor t: offset 8");
    gw_begin(1, 0);
    gw_tensor("t", 0, 32, 1, 0);
    gw_align(32);
    gw_count(64);
    expect(BT_ERR_INVALID, "tensor t: 128 bytes");
    gw_begin(1, 0);
    gw_tensor("t", 0, 2, 1, UINT64_MAX - 31);
    gw_align(32);
    gw_count(64);
    expect(BT_ERR_INVALID, "outside");
    gw_begin(1, 0);
    gw_tensor("t", 8, 33, 1, 0);
    gw_align(32);
    gw_count(64);
    expect(BT_ERR_INVALID, "blocks");
    gw_begin(1, 0);
    gw_tensor("t", 77, 32, 1, 0);
    gw_align(32);
    gw_count(64);
    expect(BT_ERR_INVALID, "unknown type 77");
    gw_begin(1, 0);
    gw_tensor("t", 0, UINT64_MAX / 2, 4, 0);
    gw_align(32);
    gw_count(64);
    expect(BT_ERR_INVALID, "overflows");
    gw_begin(2, 0);
    gw_tensor("t", 0, 16, 1, 0);
    gw_tensor("u", 0, 8, 1, 32);
    gw_align(32);
    gw_count(64);
    expect(BT_ERR_INVALID, "t and u overlap");
    gw_begin(2, 0);
    gw_tensor("t", 0, 8, 1, 0);
    gw_tensor("t", 0, 8, 1, 32);
    gw_align(32);
    gw_count(64);
    expect(BT_ERR_INVALID, "appears twice");
    gw_begin(1, 0);
    gw_str("t");
    gw_put(5, 4);
    gw_put(0, 64);
    gw_put(0, 64);
    expect(BT_ERR_INVALID, "5 dimensions");
}

static void test_out_of_memory(void)
{
    bool fired = true;

    write_good();
    for (uint64_t nth = 0; fired; nth++) {
        struct bt_gguf *g = NULL;
        size_t live = bt_test_live_bytes();
        bt_test_fail_alloc(nth);
        enum bt_status st = open_buf(&g, NULL);
        fired = bt_test_fail_alloc_off();
        CHECK_EQ(st, fired ? BT_ERR_NOMEM : BT_OK);
        bt_gguf_close(g);
        CHECK_EQ(bt_test_live_bytes(), live);
    }
}

int main(void)
{
    static const char *const names[] = {"t.gguf"};

    test_good();
    test_bad_header();
    test_bad_tensors();
    test_out_of_memory();
    bt_temp_clean(names, 1);
    return bt_test_done();
}
