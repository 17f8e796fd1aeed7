/* Packed weights in a cache file: packed once, mapped by the next, the same answer from both; a file with other bytes, or of
 * a model that was replaced under the same name, is not used. */

#include "model/model.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include "tests/check.h"
#include "tests/model_run.h"
#include "tests/tiny_model.h"

enum { LEN = 9, HEADER = 4096, PATH_BYTES = 1024 };

static struct bt_kctx *kctx;
static char dir[512];
static void (*progress)(void *arg, double fraction); /* of the next loads */

/* Loads, computes one prompt, tells what the cache did. */
static struct bt_model_packed answer(const char *path, uint64_t bytes_min, float *logits)
{
    const struct bt_model_load_opts load = {
        .panel_dir = dir, .panel_bytes_min = bytes_min, .progress = progress};
    static const uint32_t prompt[LEN] = {1, 5, 9, 13, 17, 21, 25, 29, 33};
    struct bt_model_run r = {.k = kctx};
    struct bt_model_packed packed;
    struct bt_err err = {0};

    CHECK_EQ(bt_model_open(path, &r.m, &err), BT_OK);
    CHECK_EQ(bt_model_load(r.m, kctx, &load, &err), BT_OK);
    packed = *bt_model_packed(r.m);
    bt_model_run_pool(&r, 8, BT_DTYPE_F32, LEN);
    CHECK_EQ(bt_model_run_tokens(&r, prompt, LEN, 0, LEN, logits), BT_OK);
    bt_model_run_close(&r);
    return packed;
}

/* The panel files in the folder; the last one's path. */
static int count_files(char path[PATH_BYTES])
{
    DIR *d = opendir(dir);
    const struct dirent *e;
    int n = 0;

    while (d != NULL && (e = readdir(d)) != NULL) {
        if (e->d_name[0] != '.') {
            CHECK(snprintf(path, PATH_BYTES, "%s/%s", dir, e->d_name) < PATH_BYTES);
            n++;
        }
    }
    if (d != NULL) {
        (void)closedir(d);
    }
    return n;
}

static void flip_byte(const char *path, off_t at)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    uint8_t byte = 0;

    CHECK(fd >= 0 && pread(fd, &byte, 1, at) == 1);
    byte ^= 0x40;
    CHECK_EQ(pwrite(fd, &byte, 1, at), 1);
    (void)close(fd);
}

static void set_file_limit(rlim_t bytes)
{
    struct rlimit limit;

    CHECK_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = bytes < limit.rlim_max ? bytes : limit.rlim_max;
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

static void no_more_writing(void *arg, double fraction)
{
    (void)arg;
    (void)fraction;
    set_file_limit(HEADER);
}

/* The cache file has its size and its first weight when it can no longer be written. */
static void test_file_that_cannot_be_written(const char *model, const float *own)
{
    float logits[TINY_VOCAB];
    char path[PATH_BYTES];

    (void)signal(SIGXFSZ, SIG_IGN);
    progress = no_more_writing;
    struct bt_model_packed p = answer(model, 0, logits);
    progress = NULL;
    set_file_limit(RLIM_INFINITY);
    CHECK(!p.shared && !p.reused && strstr(p.note, "could not be written") != NULL);
    CHECK(memcmp(own, logits, sizeof(logits)) == 0);
    CHECK(!answer(model, 0, logits).reused);
    CHECK(answer(model, 0, logits).reused);
    CHECK_EQ(count_files(path), 1);
    bt_temp_remove_folder(dir);
}

int main(void)
{
    float own[TINY_VOCAB], first[TINY_VOCAB], second[TINY_VOCAB], third[TINY_VOCAB];
    struct bt_err err = {0};
    struct tiny_model t;
    struct bt_model_packed p;
    char path[PATH_BYTES];

    if (bt_temp_is_full()) {
        return 0;
    }
    CHECK_EQ(bt_k_create_cpu(&(struct bt_k_opts){.n_threads = 1}, &kctx, &err), BT_OK);
    (void)snprintf(dir, sizeof(dir), "%s", bt_temp_path("panels"));
    tiny_llama(&t);
    const char *model = tiny_write(&t, tiny_config, 7);

    p = answer(model, UINT64_MAX, own);
    CHECK(!p.shared && p.bytes > 0 && strcmp(p.note, "small") == 0);
    CHECK_EQ(count_files(path), 0);

    p = answer(model, 0, first);
    CHECK(p.shared && !p.reused);
    CHECK_EQ(count_files(path), 1);
    CHECK(strcmp(p.note, path) == 0);
    p = answer(model, 0, second);
    CHECK(p.shared && p.reused);
    CHECK(memcmp(own, first, sizeof(own)) == 0 && memcmp(own, second, sizeof(own)) == 0);

    /* What is packed does not depend on the numerics class: one file for all of them. */
    struct bt_kctx *const f32 = kctx;
    for (int i = 1; i < 3; i++) {
        const struct bt_k_opts opts = {.n_threads = 1, .numerics = bt_k_classes[i]};
        CHECK_EQ(bt_k_create_cpu(&opts, &kctx, &err), BT_OK);
        p = answer(model, 0, third);
        CHECK(p.shared && p.reused);
        bt_k_destroy(kctx);
    }
    kctx = f32;
    CHECK_EQ(count_files(path), 1);

    flip_byte(path, HEADER); /* the first weight's first panel */
    p = answer(model, 0, third);
    CHECK(p.shared && !p.reused);
    CHECK(memcmp(own, third, sizeof(own)) == 0);
    CHECK(answer(model, 0, third).reused);

    /* The same model written again: another file under the same name. */
    model = tiny_write(&t, tiny_config, 7);
    p = answer(model, 0, third);
    CHECK(p.shared && !p.reused);
    CHECK_EQ(count_files(path), 2);

    bt_temp_remove_folder(dir);
    test_file_that_cannot_be_written(model, own);

    /* A folder that cannot be: in memory of its own, and it says why. */
    (void)snprintf(dir, sizeof(dir), "/proc/nowhere");
    p = answer(model, 0, third);
    CHECK(!p.shared && strstr(p.note, "/proc/nowhere") != NULL);
    CHECK(memcmp(own, third, sizeof(own)) == 0);
    bt_k_destroy(kctx);
    tiny_clean();
    return bt_test_done();
}
