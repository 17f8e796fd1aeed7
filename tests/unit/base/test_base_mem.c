/* Heap, arena, buffer and status: limits, overflow, and what is left behind when memory runs out.
 */

#include <string.h>
#include "base/arena.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/mem.h"
#include "tests/check.h"

static void test_sizes(void)
{
    size_t v = 7;
    CHECK(!bt_mul_size(SIZE_MAX, 2, &v));
    CHECK_EQ(v, 7);
    CHECK(!bt_add_size(SIZE_MAX, 1, &v));
    CHECK_EQ(v, 7);
    CHECK(bt_mul_size(6, 7, &v));
    CHECK_EQ(v, 42);
    CHECK(bt_mul_size(0, SIZE_MAX, &v));
    CHECK_EQ(v, 0);
    CHECK(bt_add_size(SIZE_MAX - 1, 1, &v));
    CHECK(v == SIZE_MAX);
}

static void test_heap(void)
{
    size_t before = bt_test_live_bytes();
    void *a = bt_alloc(0);
    void *b = bt_alloc(0);
    CHECK(a != NULL && b != NULL && a != b);
    CHECK(bt_test_live_bytes() > before);
    bt_free(a);
    bt_free(b);
    bt_free(NULL);
    CHECK_EQ(bt_test_live_bytes(), before);

    unsigned char *z = bt_calloc(100, 3);
    CHECK(z != NULL);
    for (int i = 0; i < 300; i++) {
        CHECK(z[i] == 0);
        z[i] = (unsigned char)i;
    }
    z = bt_realloc(z, 100000);
    CHECK(z != NULL && z[299] == (unsigned char)299);
    z = bt_realloc(z, 10);
    CHECK(z != NULL && z[9] == 9);
    bt_free(z);
    volatile size_t huge = SIZE_MAX;
    CHECK(bt_calloc(huge, 2) == NULL);
    void *r = bt_realloc(NULL, 5);
    CHECK(r != NULL);
    bt_free(r);

    for (size_t align = 1; align <= 4096; align *= 2) {
        void *p = bt_alloc_aligned(align, 33);
        CHECK(p != NULL && (uintptr_t)p % align == 0);
        bt_free(p);
    }
    char *s = bt_strndup("hello", 3);
    CHECK_STR(s, "hel");
    bt_free(s);
    s = bt_strndup("hi", 100);
    CHECK_STR(s, "hi");
    bt_free(s);
    s = bt_memdup("a\0b", 3);
    CHECK(memcmp(s, "a\0b", 4) == 0);
    bt_free(s);
    s = bt_strdup("");
    CHECK_STR(s, "");
    bt_free(s);
    CHECK_EQ(bt_test_live_bytes(), before);
}

static void test_planned_failure(void)
{
    bt_test_fail_alloc(1);
    void *a = bt_alloc(8);
    CHECK(a != NULL);
    CHECK(bt_realloc(a, 16) == NULL);
    void *b = bt_calloc(1, 1); /* only one fails */
    CHECK(b != NULL);
    CHECK(bt_test_fail_alloc_off());
    CHECK(!bt_test_fail_alloc_off());
    bt_free(a);
    bt_free(b);

    bt_test_fail_alloc(0);
    CHECK(bt_alloc_aligned(64, 64) == NULL);
    CHECK(bt_test_fail_alloc_off());
    bt_test_fail_alloc(0);
    CHECK(bt_strdup("x") == NULL);
    CHECK(bt_test_fail_alloc_off());
    bt_test_fail_alloc(5);
    CHECK(!bt_test_fail_alloc_off());
}

static void test_arena(void)
{
    size_t before = bt_test_live_bytes();
    struct bt_arena a;
    bt_arena_init(&a, 1000);
    void *p = bt_arena_alloc(&a, 1);
    void *q = bt_arena_alloc(&a, 0);
    CHECK(p != NULL && q != NULL && p != q);
    CHECK((uintptr_t)p % 16 == 0 && (uintptr_t)q % 16 == 0);
    CHECK_EQ(a.used, 32);
    CHECK(bt_arena_alloc(&a, 1000) == NULL);
    CHECK(bt_arena_alloc(&a, SIZE_MAX) == NULL);
    CHECK(bt_arena_alloc(&a, SIZE_MAX - 20) == NULL);
    CHECK_EQ(a.used, 32);
    char *s = bt_arena_strndup(&a, "abcdef", 4);
    CHECK_STR(s, "abcd");
    bt_arena_reset(&a);
    CHECK_EQ(a.used, 0);
    CHECK_EQ(bt_test_live_bytes(), before);
    bt_arena_fini(&a);

    bt_arena_init(&a, (size_t)1 << 24);
    size_t total = 0;
    for (size_t n = 1; n < 200000; n = n * 3 + 1) {
        unsigned char *b = bt_arena_zalloc(&a, n);
        CHECK(b != NULL && (uintptr_t)b % 16 == 0 && b[0] == 0 && b[n - 1] == 0);
        memset(b, 0xAA, n);
        total += n;
    }
    CHECK(a.used >= total);
    bt_test_fail_alloc(0);
    CHECK(bt_arena_alloc(&a, (size_t)1 << 20) == NULL);
    CHECK(bt_test_fail_alloc_off());
    CHECK(bt_arena_alloc(&a, (size_t)1 << 20) != NULL);
    bt_arena_fini(&a);
    CHECK_EQ(bt_test_live_bytes(), before);
}

/* What fits into one block needs no heap call after the first time; what does not is given back. */
static void test_arena_rewind(void)
{
    size_t before = bt_test_live_bytes();
    struct bt_arena a;
    uint64_t calls = 0;

    bt_arena_init(&a, (size_t)1 << 24);
    bt_arena_rewind(&a);
    for (int round = 0; round < 100; round++) {
        uint64_t at = bt_test_heap_calls();

        for (int i = 0; i < 100; i++) {
            void *p = bt_arena_alloc(&a, 400);
            CHECK(p != NULL);
            memset(p, i, 400);
        }
        bt_arena_rewind(&a);
        CHECK_EQ(a.used, 0);
        calls = round >= 10 ? calls + bt_test_heap_calls() - at : 0;
    }
    CHECK_EQ(calls, 0);
    CHECK(bt_arena_alloc(&a, (size_t)1 << 23) != NULL);
    bt_arena_rewind(&a);
    CHECK(bt_test_live_bytes() - before < 70000);
    bt_arena_fini(&a);
    CHECK_EQ(bt_test_live_bytes(), before);
}

static void test_buf(void)
{
    size_t before = bt_test_live_bytes();
    struct bt_buf b = {0};
    CHECK(bt_buf_add(&b, NULL, 0));
    CHECK_STR(b.data, "");
    CHECK(bt_buf_adds(&b, "abc") && bt_buf_addc(&b, 'd') && bt_buf_addf(&b, "%03d", 7));
    CHECK_STR(b.data, "abcd007");
    bt_buf_consume(&b, 0);
    bt_buf_consume(&b, 4);
    CHECK_STR(b.data, "007");
    bt_buf_consume(&b, 3);
    CHECK_EQ(b.len, 0);
    CHECK(bt_buf_addu(&b, 0) && bt_buf_addu(&b, 10) && bt_buf_addu(&b, UINT64_MAX));
    CHECK_STR(b.data, "01018446744073709551615");
    bt_buf_clear(&b);
    CHECK(bt_buf_addf(&b, "%0500d", 1)); /* longer than the small buffer */
    CHECK_EQ(b.len, 500);
    CHECK(b.data[499] == '1' && b.data[500] == '\0');
    bt_buf_clear(&b);
    CHECK(b.len == 0 && b.cap > 500);

    CHECK(!bt_buf_reserve(&b, SIZE_MAX));
    CHECK(b.failed && !bt_buf_adds(&b, "x"));
    bt_buf_clear(&b);
    CHECK(bt_buf_adds(&b, "x"));
    size_t len = 9;
    char *s = bt_buf_take(&b, &len);
    CHECK_STR(s, "x");
    CHECK_EQ(len, 1);
    CHECK(b.data == NULL && b.cap == 0);
    bt_free(s);
    s = bt_buf_take(&b, &len);
    CHECK_STR(s, "");
    CHECK_EQ(len, 0);
    bt_free(s);

    CHECK(bt_buf_adds(&b, "keep"));
    bt_test_fail_alloc(0);
    CHECK(!bt_buf_addf(&b, "%0900d", 1));
    CHECK(bt_test_fail_alloc_off());
    CHECK(b.failed);
    CHECK_STR(b.data, "keep");
    CHECK(bt_buf_take(&b, &len) == NULL);
    CHECK_EQ(len, 0);
    bt_buf_fini(&b);
    CHECK_EQ(bt_test_live_bytes(), before);
}

static void test_err(void)
{
    struct bt_err e = {0};
    CHECK_EQ(bt_err_set(NULL, BT_ERR_IO, "x"), BT_ERR_IO);
    CHECK_EQ(bt_err_prefix(NULL, "x"), BT_OK);
    CHECK_EQ(bt_err_set(&e, BT_ERR_INVALID, "field %d", 3), BT_ERR_INVALID);
    CHECK_EQ(bt_err_prefix(&e, "file %s", "a"), BT_ERR_INVALID);
    CHECK_STR(e.msg, "file a: field 3");
    CHECK_EQ(bt_err_set(&e, BT_ERR_NOMEM, "again: %s", e.msg), BT_ERR_NOMEM);
    CHECK_STR(e.msg, "again: file a: field 3");
    char big[2000];
    memset(big, 'x', sizeof(big) - 1);
    big[sizeof(big) - 1] = '\0';
    bt_err_set(&e, BT_ERR_IO, "%s", big);
    CHECK_EQ(strlen(e.msg), sizeof(e.msg) - 1);
    bt_err_prefix(&e, "%s", big);
    CHECK_EQ(strlen(e.msg), sizeof(e.msg) - 1);
    bt_err_set(&e, BT_ERR_IO, "end");
    bt_err_prefix(&e, "%.509s", big);
    CHECK_EQ(strlen(e.msg), sizeof(e.msg) - 1);
    for (int st = -60; st <= 0; st++) {
        CHECK(bt_status_str((enum bt_status)st) != NULL);
    }
    CHECK_STR(bt_status_str(BT_ERR_PEER_LOST), "peer lost");
}

static void test_clock(void)
{
    uint64_t a = bt_clock_ns();
    uint64_t b = bt_clock_ns();
    CHECK(a > 0 && b >= a);
    CHECK(bt_clock_unix_ns() > UINT64_C(1700000000) * BT_NS_PER_S);
}

/* Grows now and then, and what is in it stays. */
static void test_grow(void)
{
    uint32_t *list = NULL;
    size_t cap = 0, grown = 0;

    for (uint32_t n = 0; n < 1000; n++) {
        size_t before = cap;

        list = bt_grow(list, n, &cap, sizeof *list);
        grown += cap != before;
        CHECK(cap > n);
        list[n] = n;
    }
    CHECK(grown <= 6);
    for (uint32_t n = 0; n < 1000; n++) {
        CHECK_EQ(list[n], n);
    }
    bt_free(list);
}

int main(void)
{
    test_sizes();
    test_heap();
    test_planned_failure();
    test_arena();
    test_arena_rewind();
    test_buf();
    test_err();
    test_clock();
    test_grow();
    return bt_test_done();
}
