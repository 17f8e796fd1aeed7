/* GGUF headers, good and bad. A small writer builds files; defects are then written over it. */

#include "files/gguf.h"

#include <stdint.h>
#include "base/mem.h"
#include "tests/check.h"
#include "tests/tempfile.h"

static uint8_t buf[16384];
static size_t len;

static void put(uint64_t v, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        buf[len++] = (uint8_t)(i < 8 ? v >> (8 * i) : 0);
    }
}

static void put_str(const char *s)
{
    put(strlen(s), 8);
    memcpy(buf + len, s, strlen(s));
    len += strlen(s);
}

static void begin(uint64_t n_tensors, uint64_t n_keys)
{
    len = 0;
    memcpy(buf, "GGUF", 4);
    len = 4;
    put(3, 4);
    put(n_tensors, 8);
    put(n_keys, 8);
}

static void key(const char *name, uint32_t type)
{
    put_str(name);
    put(type, 4);
}

static void tensor(const char *name, uint32_t type, uint64_t d0, uint64_t d1, uint64_t offset)
{
    put_str(name);
    put(2, 4);
    put(d0, 8);
    put(d1, 8);
    put(type, 4);
    put(offset, 8);
}

static void data(size_t align, size_t n)
{
    while (len % align != 0) {
        put(0, 1);
    }
    for (size_t i = 0; i < n; i++) {
        put(i, 1);
    }
}

static enum bt_status open_buf(struct bt_gguf **g, struct bt_err *err)
{
    return bt_gguf_open(bt_temp_write("t.gguf", buf, len), g, err);
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
    begin(3, 9);
    key("general.architecture", BT_GGUF_STRING);
    put_str("llama");
    key("u8", BT_GGUF_U8);
    put(200, 1);
    key("i16", BT_GGUF_I16);
    put((uint64_t)-5, 2);
    key("u64", BT_GGUF_U64);
    put(UINT64_MAX, 8);
    key("f32", BT_GGUF_F32);
    put(0x3fc00000, 4);
    key("yes", BT_GGUF_BOOL);
    put(1, 1);
    key("words", BT_GGUF_ARRAY);
    put(BT_GGUF_STRING, 4);
    put(3, 8);
    put_str("a");
    put_str("");
    put_str("ccc");
    key("nums", BT_GGUF_ARRAY);
    put(BT_GGUF_I32, 4);
    put(2, 8);
    put((uint64_t)-7, 4);
    put(9, 4);
    key("nested", BT_GGUF_ARRAY);
    put(BT_GGUF_ARRAY, 4);
    put(1, 8);
    put(BT_GGUF_U8, 4);
    put(2, 8);
    put(0, 2);
    tensor("w", 0, 4, 2, 0);
    tensor("q", 8, 64, 1, 32);
    tensor("odd", 13, 256, 1, 128);
    data(32, 128 + 64);
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
    CHECK_STR(t->type_name, "Q5_K");
    bt_gguf_close(g);

    /* Every prefix of a good file is refused, not read past. */
    size_t full = len;
    for (size_t n = 0; n < full; n++) {
        g = NULL;
        enum bt_status st = bt_gguf_open(bt_temp_write("t.gguf", buf, n), &g, &err);
        CHECK(st == BT_ERR_INVALID || n >= full - 64);
        bt_gguf_close(g);
    }
}

static void test_bad_header(void)
{
    begin(0, 0);
    buf[0] = 'X';
    expect(BT_ERR_INVALID, "not a GGUF");
    begin(0, 0);
    buf[4] = 1;
    expect(BT_ERR_UNSUPPORTED, "version 1");
    begin(0, 0);
    buf[4] = 0;
    buf[7] = 3;
    expect(BT_ERR_UNSUPPORTED, "big-endian");
    begin(UINT64_MAX, 0);
    expect(BT_ERR_INVALID, "byte 8");
    begin(0, UINT64_MAX);
    expect(BT_ERR_INVALID, "byte 16");
    begin(0, 1);
    put(UINT64_MAX, 8);
    put(0, 16);
    expect(BT_ERR_INVALID, "bytes needed");
    begin(0, 1);
    key("k", 99);
    put(0, 16);
    expect(BT_ERR_INVALID, "value type 99");
    begin(0, 1);
    key("k", BT_GGUF_ARRAY);
    put(BT_GGUF_U64, 4);
    put(UINT64_MAX / 8, 8);
    expect(BT_ERR_INVALID, "key k");
    begin(0, 2);
    key("k", BT_GGUF_U8);
    put(0, 1);
    key("k", BT_GGUF_U8);
    put(0, 1);
    expect(BT_ERR_INVALID, "key k appears twice");
    begin(0, 1);
    key("k", BT_GGUF_ARRAY);
    for (int i = 0; i < 8; i++) {
        put(BT_GGUF_ARRAY, 4);
        put(1, 8);
    }
    expect(BT_ERR_INVALID, "array depth");
}

static void test_bad_tensors(void)
{
    begin(1, 1);
    key("general.alignment", BT_GGUF_U32);
    put(24, 4);
    tensor("t", 0, 2, 1, 0);
    data(32, 64);
    expect(BT_ERR_INVALID, "general.alignment");
    begin(1, 0);
    tensor("t", 0, 2, 1, 8);
    data(32, 64);
    expect(BT_ERR_INVALID, "tensor t: offset 8");
    begin(1, 0);
    tensor("t", 0, 32, 1, 0);
    data(32, 64);
    expect(BT_ERR_INVALID, "tensor t: 128 bytes");
    begin(1, 0);
    tensor("t", 0, 2, 1, UINT64_MAX - 31);
    data(32, 64);
    expect(BT_ERR_INVALID, "outside");
    begin(1, 0);
    tensor("t", 8, 33, 1, 0);
    data(32, 64);
    expect(BT_ERR_INVALID, "blocks");
    begin(1, 0);
    tensor("t", 77, 32, 1, 0);
    data(32, 64);
    expect(BT_ERR_INVALID, "unknown type 77");
    begin(1, 0);
    tensor("t", 0, UINT64_MAX / 2, 4, 0);
    data(32, 64);
    expect(BT_ERR_INVALID, "overflows");
    begin(2, 0);
    tensor("t", 0, 16, 1, 0);
    tensor("u", 0, 8, 1, 32);
    data(32, 64);
    expect(BT_ERR_INVALID, "t and u overlap");
    begin(2, 0);
    tensor("t", 0, 8, 1, 0);
    tensor("t", 0, 8, 1, 32);
    data(32, 64);
    expect(BT_ERR_INVALID, "appears twice");
    begin(1, 0);
    put_str("t");
    put(5, 4);
    put(0, 64);
    memset(buf + len, 0, 64);
    len += 64;
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
