/* Files that the writer made, read by the reader: keys, arrays, tensors, alignment; nothing on the disk before finish. */

#include "files/gguf_write.h"

#include <sys/stat.h>
#include "tests/check.h"
#include "tests/tempfile.h"

static bool exists(const char *path)
{
    struct stat sb;

    return stat(path, &sb) == 0;
}

static void add_all(struct bt_gguf_writer *w)
{
    const uint64_t odd[] = {3}, matrix[] = {2, 64}, experts[] = {2, 1, 4};

    bt_gguf_add_str(w, "general.architecture", "llama", 5);
    bt_gguf_add_u32(w, "n", 7);
    bt_gguf_add_f32(w, "f", 0.5F);
    bt_gguf_add_bool(w, "yes", true);
    bt_gguf_add_array(w, "words", BT_GGUF_STRING, 2);
    bt_gguf_put_str(w, "one", 3);
    bt_gguf_put_str(w, "", 0);
    bt_gguf_add_array(w, "ints", BT_GGUF_I32, 1);
    bt_gguf_put_i32(w, -5);
    CHECK_EQ(bt_gguf_add_tensor(w, "odd", BT_DTYPE_F32, 1, odd), 12);
    CHECK_EQ(bt_gguf_add_tensor(w, "q", BT_DTYPE_Q8_0, 2, matrix), 136);
    CHECK_EQ(bt_gguf_add_tensor(w, "e", BT_DTYPE_F16, 3, experts), 16);
}

static void write_good(const char *path)
{
    struct bt_gguf_writer *w = NULL;
    struct bt_err err = {0};
    uint8_t data[12 + 136 + 16];
    const char *temp = NULL;

    for (size_t i = 0; i < sizeof(data); i++) {
        data[i] = (uint8_t)i;
    }
    CHECK_EQ(bt_gguf_writer_create(path, &w, &err), BT_OK);
    add_all(w);
    CHECK_EQ(bt_gguf_writer_begin(w, &err), BT_OK);
    for (size_t i = 0; i < sizeof(data); i += 10) { /* pieces that end anywhere */
        size_t n = sizeof(data) - i < 10 ? sizeof(data) - i : 10;
        CHECK_EQ(bt_gguf_writer_data(w, data + i, n, &err), BT_OK);
    }
    CHECK_EQ(bt_gguf_writer_flush(w, &temp, &err), BT_OK);
    CHECK(exists(temp) && !exists(path));
    CHECK_EQ(bt_gguf_writer_finish(w, &err), BT_OK);
    CHECK(!exists(temp) && exists(path));
    bt_gguf_writer_destroy(w);
}

static void check_good(const char *path)
{
    struct bt_gguf *g = NULL;
    struct bt_gguf_iter it;
    struct bt_err err = {0};
    uint64_t u = 0;
    double d = 0;
    bool b = false;
    const char *s;
    size_t n;

    CHECK_EQ(bt_gguf_open(path, &g, &err), BT_OK);
    CHECK(bt_gguf_get_u64(g, "n", &u, &err) == BT_OK && u == 7);
    CHECK(bt_gguf_get_f64(g, "f", &d, &err) == BT_OK && d == 0.5);
    CHECK(bt_gguf_get_bool(g, "yes", &b, &err) == BT_OK && b);
    CHECK_EQ(bt_gguf_iter_strings(g, "words", &it, &err), BT_OK);
    CHECK(bt_gguf_next_str(&it, &s, &n) && n == 3 && memcmp(s, "one", 3) == 0);
    CHECK(bt_gguf_next_str(&it, &s, &n) && n == 0);
    CHECK_EQ(bt_gguf_iter_numbers(g, "ints", &it, &err), BT_OK);
    CHECK(bt_gguf_next_f64(&it, &d) && d == -5);
    const struct bt_tensor *t = bt_gguf_tensor_find(g, "odd");
    CHECK(t != NULL && t->n_dims == 1 && t->shape[0] == 3 && ((const uint8_t *)t->data)[11] == 11);
    t = bt_gguf_tensor_find(g, "q");
    CHECK(t != NULL && t->dtype == BT_DTYPE_Q8_0 && t->shape[0] == 2 && t->shape[1] == 64 &&
          ((const uint8_t *)t->data)[0] == 12);
    t = bt_gguf_tensor_find(g, "e");
    CHECK(t != NULL && t->n_dims == 3 && t->shape[0] == 2 && t->shape[2] == 4 &&
          ((const uint8_t *)t->data)[15] == 163);
    bt_gguf_close(g);
}

/* Every key of one file, carried into another. */
static void test_copy(const char *from, const char *to)
{
    struct bt_gguf *a = NULL, *b = NULL;
    struct bt_gguf_writer *w = NULL;

    CHECK_EQ(bt_gguf_open(from, &a, NULL), BT_OK);
    CHECK_EQ(bt_gguf_writer_create(to, &w, NULL), BT_OK);
    for (size_t i = 0; i < bt_gguf_value_count(a); i++) {
        bt_gguf_add_value(w, bt_gguf_value_at(a, i));
    }
    CHECK_EQ(bt_gguf_writer_begin(w, NULL), BT_OK);
    CHECK_EQ(bt_gguf_writer_finish(w, NULL), BT_OK);
    bt_gguf_writer_destroy(w);
    CHECK_EQ(bt_gguf_open(to, &b, NULL), BT_OK);
    CHECK_EQ(bt_gguf_value_count(b), 6);
    for (size_t i = 0; i < bt_gguf_value_count(b); i++) {
        const struct bt_gguf_value *x = bt_gguf_value_at(a, i), *y = bt_gguf_value_at(b, i);
        CHECK_STR(x->key, y->key);
        CHECK(x->type == y->type && x->count == y->count && x->bytes == y->bytes &&
              memcmp(x->data, y->data, x->bytes) == 0);
    }
    bt_gguf_close(a);
    bt_gguf_close(b);
    (void)unlink(to);
}

static void test_given_up(const char *path)
{
    struct bt_gguf_writer *w = NULL;
    struct bt_err err = {0};

    CHECK_EQ(bt_gguf_writer_create(path, &w, &err), BT_OK);
    add_all(w);
    CHECK_EQ(bt_gguf_writer_begin(w, &err), BT_OK);
    bt_gguf_writer_destroy(w);
    CHECK(!exists(path));
    CHECK_EQ(rmdir(bt_temp_dir()), 0); /* nothing is left in it */
    CHECK_EQ(mkdir(bt_temp_dir(), 0700), 0);
    CHECK_EQ(bt_gguf_writer_create("/nonexistent/x.gguf", &w, &err), BT_ERR_IO);
    CHECK(strstr(err.msg, "/nonexistent/x.gguf") != NULL);
}

int main(void)
{
    char path[512], copy[512];

    (void)snprintf(path, sizeof(path), "%s", bt_temp_path("w.gguf"));
    (void)snprintf(copy, sizeof(copy), "%s", bt_temp_path("c.gguf"));
    test_given_up(path);
    write_good(path);
    check_good(path);
    test_copy(path, copy);
    (void)unlink(path);
    (void)rmdir(bt_temp_dir());
    return bt_test_done();
}
