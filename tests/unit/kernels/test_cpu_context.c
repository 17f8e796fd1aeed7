/* Life of a CPU context and its weights: options, descriptions, memory, and every allocation failing once. */

#include <stdio.h>
#include "base/mem.h"
#include "kernels/backend.h"
#include "kernels/kv_type.h"
#include "kernels/open.h"
#include "tests/check.h"

/* The lists for option tables are the arrays. */
static void check_list(const char *list, const char *const *names, size_t n)
{
    char joined[256] = "";
    int at = 0;

    for (size_t i = 0; i < n; i++) {
        at += snprintf(joined + at, sizeof joined - (size_t)at, "%s%s", i > 0 ? "|" : "", names[i]);
    }
    CHECK_STR(joined, list);
}

static void test_names(void)
{
    struct bt_err err = {0};
    struct bt_kctx *k = NULL;

    check_list(BT_K_ISAS, bt_k_isas, sizeof bt_k_isas / sizeof bt_k_isas[0]);
    check_list(BT_K_CLASSES, bt_k_classes, sizeof bt_k_classes / sizeof bt_k_classes[0]);
    for (size_t i = 0; i < sizeof bt_k_isas / sizeof bt_k_isas[0]; i++) {
        enum bt_status st = bt_k_create_cpu(&(struct bt_k_opts){.isa = bt_k_isas[i]}, &k, &err);

        CHECK(st == BT_OK || st == BT_ERR_UNSUPPORTED);
        if (st == BT_OK) {
            bt_k_destroy(k);
        }
    }
}

/* Each name of a type in the list is that of its choice. */
static void test_kv_types(void)
{
    const char *at = BT_K_KV_TYPES;

    for (size_t i = 0; i < sizeof bt_k_kv_types / sizeof bt_k_kv_types[0]; i++) {
        const enum bt_dtype t = bt_k_kv_types[i];
        const char *name = t == BT_DTYPE_AUTO ? "auto" : bt_dtype_name(t);

        CHECK(strncmp(at, name, strlen(name)) == 0);
        CHECK(t == BT_DTYPE_AUTO || bt_k_kv_type(t, "cpu-int8") == t);
        at = strchr(at, '|') != NULL ? strchr(at, '|') + 1 : "";
    }
    CHECK_STR(at, "");
    CHECK_EQ(bt_k_kv_type(BT_DTYPE_AUTO, "cpu-int8"), BT_DTYPE_BF16);
    CHECK_EQ(bt_k_kv_type(BT_DTYPE_AUTO, "cpu-bf16"), BT_DTYPE_BF16);
    CHECK_EQ(bt_k_kv_type(BT_DTYPE_AUTO, "cpu-f32"), BT_DTYPE_F32);
    CHECK_EQ(bt_k_kv_type(BT_DTYPE_AUTO, "cuda-bf16-sm90"), BT_DTYPE_BF16);
    CHECK_EQ(bt_k_kv_type(BT_DTYPE_AUTO, "cuda-f32"), BT_DTYPE_F32);
    CHECK_EQ(bt_k_kv_type(BT_DTYPE_AUTO, "cuda-cublas-tf32"), BT_DTYPE_F32);
    CHECK_EQ(bt_k_kv_type(BT_DTYPE_AUTO, "fake"), BT_DTYPE_F32);
    CHECK(bt_k_one_answer(NULL) && bt_k_one_answer("cpu-int8") &&
          bt_k_one_answer("cuda-bf16-sm90"));
    CHECK(!bt_k_one_answer("cuda-cublas") && !bt_k_one_answer("cuda-cublas-fp8"));
}

static void test_options(void)
{
    struct bt_kctx *k = NULL;
    struct bt_err err = {0};

    CHECK_EQ(bt_k_create_cpu(&(struct bt_k_opts){.n_threads = 1, .isa = "plain"}, &k, &err), BT_OK);
    CHECK_STR(bt_k_numerics(k), "cpu-f32");
    CHECK_STR(bt_k_describe(k), "cpu plain, 1 thread");
    bt_k_destroy(k);
    CHECK_EQ(bt_k_create_cpu(&(struct bt_k_opts){0}, &k, &err), BT_OK);
    CHECK_STR(bt_k_numerics(k), "cpu-f32");
    bt_k_destroy(k);
    CHECK_EQ(bt_k_create_cpu(&(struct bt_k_opts){.numerics = "cpu-int8"}, &k, &err), BT_OK);
    CHECK_STR(bt_k_numerics(k), "cpu-int8");
    bt_k_destroy(k);
    CHECK_EQ(bt_k_create_cpu(&(struct bt_k_opts){.numerics = "cpu-bf16"}, &k, &err), BT_OK);
    CHECK_STR(bt_k_numerics(k), "cpu-bf16");
    bt_k_destroy(k);
    k = NULL;
    CHECK_EQ(bt_k_create_cpu(&(struct bt_k_opts){.numerics = "cpu-int4"}, &k, &err),
             BT_ERR_INVALID);
    CHECK(strstr(err.msg, "\"cpu-int4\"") != NULL);
    CHECK_EQ(bt_k_create_cpu(&(struct bt_k_opts){.isa = "sse9"}, &k, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "sse9") != NULL);
    CHECK_EQ(bt_k_create_cpu(&(struct bt_k_opts){.device = 1}, &k, &err), BT_ERR_INVALID);
    CHECK_EQ(bt_k_create_cpu(&(struct bt_k_opts){.n_threads = 100000}, &k, &err), BT_ERR_INVALID);
    bt_k_destroy(NULL);
}

static void test_memory(void)
{
    static const size_t sizes[] = {1, 4096, 1000000, 9000000};
    struct bt_kctx *k = NULL;

    CHECK_EQ(bt_k_create_cpu(&(struct bt_k_opts){.n_threads = 1}, &k, NULL), BT_OK);
    for (size_t i = 0; i < 4; i++) {
        unsigned char *p = bt_k_alloc(k, sizes[i]);
        CHECK(p != NULL && (uintptr_t)p % 4096 == 0);
        CHECK(p[0] == 0 && p[sizes[i] - 1] == 0);
        bt_k_write(k, p, "x", 1);
        char c = 0;
        bt_k_read(k, &c, p, 1);
        CHECK_EQ(c, 'x');
        CHECK(bt_k_host(k, p) == p);
        bt_k_free(k, p, sizes[i]);
    }
    CHECK_EQ(bt_k_sync(k), BT_OK);
    bt_k_destroy(k);
}

static enum bt_status make_all(const void *data)
{
    struct bt_k_weight_desc d = {
        .dtype = BT_DTYPE_F32, .n_rows = 20, .n_cols = 10, .data = data, .for_gemm = true};
    struct bt_kctx *k = NULL;
    struct bt_kweight *w = NULL;
    enum bt_status st = bt_k_create_cpu(&(struct bt_k_opts){.n_threads = 2}, &k, NULL);

    if (st != BT_OK) {
        return st;
    }
    st = bt_k_weight_create(k, &d, &w, NULL);
    if (st == BT_OK) {
        CHECK_EQ(bt_k_weight_bytes(w), 2 * 16 * 10 * 4);
    }
    bt_k_weight_destroy(k, w);
    bt_k_destroy(k);
    return st;
}

static void test_allocations_fail(void)
{
    static const float data[200];
    bool fired = true;

    for (uint64_t nth = 0; fired; nth++) {
        bt_test_fail_alloc(nth);
        enum bt_status st = make_all(data);
        fired = bt_test_fail_alloc_off();
        CHECK_EQ(st, fired ? BT_ERR_NOMEM : BT_OK);
        CHECK_EQ(bt_test_live_bytes(), 0);
    }
}

int main(void)
{
    test_names();
    test_kv_types();
    test_options();
    test_memory();
    test_allocations_fail();
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
