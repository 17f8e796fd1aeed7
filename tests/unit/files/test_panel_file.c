/* The cache of packed weights: filling once, sharing, waiting, throwing out; files of others and broken ones. */

#include "files/panel_file.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "tests/check.h"
#include "tests/tempfile.h"

enum { BYTES = 10000 };

static struct bt_panel_want want(const char *key)
{
    return (struct bt_panel_want){
        .dir = bt_temp_path("a/b/panels"), .key = key, .about = "a model", .bytes = BYTES};
}

static void fill(struct bt_panel_file *f, uint8_t seed)
{
    uint8_t *p = bt_panel_file_data(f);

    for (size_t i = 0; i < BYTES; i++) {
        CHECK_EQ(p[i], 0);
        p[i] = (uint8_t)(seed + i % 251);
    }
}

/* The same bytes by writing, from `at` on. */
static void fill_from(struct bt_panel_file *f, uint8_t seed, size_t at)
{
    uint8_t bytes[BYTES];

    for (size_t i = 0; i < BYTES; i++) {
        bytes[i] = (uint8_t)(seed + i % 251);
    }
    CHECK(bt_panel_file_put(f, at, bytes + at, BYTES - at));
}

static bool holds(struct bt_panel_file *f, uint8_t seed)
{
    const uint8_t *p = bt_panel_file_data(f);

    for (size_t i = 0; i < BYTES; i++) {
        if (p[i] != (uint8_t)(seed + i % 251)) {
            return false;
        }
    }
    return true;
}

static bool exists(const char *path)
{
    return access(path, F_OK) == 0;
}

static void test_fill_and_share(void)
{
    struct bt_panel_want w = want("one");
    struct bt_panel_file *f = NULL, *g = NULL;
    struct bt_err err = {0};
    char path[600];

    CHECK_EQ(bt_panel_file_open(&w, &f, &err), BT_OK);
    CHECK(!bt_panel_file_ready(f));
    (void)snprintf(path, sizeof(path), "%s", bt_panel_file_path(f));
    fill(f, 1);
    CHECK(bt_panel_file_put(f, BYTES - 3, "put", 3)); /* seen through the mapping */
    CHECK(memcmp(bt_panel_file_data(f) + BYTES - 3, "put", 3) == 0);
    fill_from(f, 1, BYTES - 3);
    bt_panel_file_progress(f, BYTES);
    CHECK_EQ(bt_panel_file_publish(f, &err), BT_OK);
    CHECK(bt_panel_file_ready(f));
    CHECK_EQ(bt_panel_file_open(&w, &g, &err), BT_OK); /* beside the first */
    CHECK(bt_panel_file_ready(g) && holds(g, 1));
    bt_panel_file_close(f);
    CHECK(holds(g, 1));
    bt_panel_file_close(g);
    CHECK(exists(path));
    /* Another key is another file; another size under the same key is not believed. */
    struct bt_panel_want other = want("two");
    CHECK_EQ(bt_panel_file_open(&other, &f, &err), BT_OK);
    CHECK(!bt_panel_file_ready(f) && strcmp(bt_panel_file_path(f), path) != 0);
    bt_panel_file_close(f);
    w.bytes = BYTES + 1;
    CHECK_EQ(bt_panel_file_open(&w, &f, &err), BT_OK);
    CHECK(!bt_panel_file_ready(f));
    bt_panel_file_close(f);
    CHECK(!exists(path)); /* what was not published is gone */
}

static void test_discard(void)
{
    struct bt_panel_want w = want("wrong");
    struct bt_panel_file *f = NULL, *g = NULL;

    CHECK_EQ(bt_panel_file_open(&w, &f, NULL), BT_OK);
    fill(f, 2);
    CHECK_EQ(bt_panel_file_publish(f, NULL), BT_OK);
    CHECK_EQ(bt_panel_file_open(&w, &g, NULL), BT_OK);
    bt_panel_file_discard(g);
    CHECK(holds(f, 2)); /* whoever maps it keeps it */
    CHECK_EQ(bt_panel_file_open(&w, &g, NULL), BT_OK);
    CHECK(!bt_panel_file_ready(g));
    bt_panel_file_close(g);
    bt_panel_file_close(f);
}

/* A process that died while filling, and a machine that was started again since: neither file is believed. */
static void test_not_believed(void)
{
    struct bt_panel_want w = want("holes");
    struct bt_panel_file *f = NULL;
    pid_t pid = fork();
    int status;
    char path[600];

    if (pid == 0) {
        if (bt_panel_file_open(&w, &f, NULL) == BT_OK) {
            bt_panel_file_data(f)[7] = 7;
            (void)raise(SIGKILL);
        }
        _exit(1);
    }
    CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
    CHECK_EQ(bt_panel_file_open(&w, &f, NULL), BT_OK);
    CHECK(!bt_panel_file_ready(f));
    fill(f, 3);
    CHECK_EQ(bt_panel_file_publish(f, NULL), BT_OK);
    (void)snprintf(path, sizeof(path), "%s", bt_panel_file_path(f));
    bt_panel_file_close(f);

    int fd = open(path, O_RDWR | O_CLOEXEC);
    char head[4096];
    CHECK_EQ(pread(fd, head, sizeof(head), 0), (ssize_t)sizeof(head));
    char id[64] = "";
    FILE *b = fopen("/proc/sys/kernel/random/boot_id", "re");
    CHECK(b != NULL && fgets(id, 37, b) != NULL);
    (void)fclose(b);
    char *at = memmem(head, sizeof(head), id, strlen(id));
    CHECK(at != NULL);
    at[0] ^= 1;
    CHECK_EQ(pwrite(fd, head, sizeof(head), 0), (ssize_t)sizeof(head));
    (void)close(fd);
    CHECK_EQ(bt_panel_file_open(&w, &f, NULL), BT_OK);
    CHECK(!bt_panel_file_ready(f));
    bt_panel_file_close(f);
}

static void count_waiting(void *arg, double fraction)
{
    CHECK(fraction >= 0.0 && fraction <= 1.0);
    (*(int *)arg)++;
}

/* Two at once: one fills, the other waits for it and maps what it made. */
static void test_wait(void)
{
    struct bt_panel_want w = want("wait");
    struct bt_panel_file *f = NULL;
    int n_waits = 0, fds[2], status;
    char byte;

    CHECK_EQ(pipe(fds), 0);
    pid_t pid = fork();
    if (pid == 0) {
        if (bt_panel_file_open(&w, &f, NULL) != BT_OK || bt_panel_file_ready(f) ||
            write(fds[1], "x", 1) != 1) {
            _exit(1);
        }
        (void)usleep(200 * 1000);
        for (size_t i = 0; i < BYTES; i++) {
            bt_panel_file_data(f)[i] = (uint8_t)(4 + i % 251);
        }
        _exit(bt_panel_file_publish(f, NULL) == BT_OK ? 0 : 1);
    }
    CHECK_EQ(read(fds[0], &byte, 1), 1);
    w.waiting = count_waiting;
    w.arg = &n_waits;
    CHECK_EQ(bt_panel_file_open(&w, &f, NULL), BT_OK);
    CHECK(bt_panel_file_ready(f) && holds(f, 4));
    CHECK(n_waits > 0);
    bt_panel_file_close(f);
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    (void)close(fds[0]);
    (void)close(fds[1]);
}

static void test_refused(void)
{
    struct bt_panel_file *f = NULL;
    struct bt_err err = {0};
    struct bt_panel_want w = want("mine alone");

    CHECK_EQ(bt_panel_file_open(&w, &f, &err), BT_OK);
    CHECK_EQ(bt_panel_file_publish(f, &err), BT_OK);
    char path[600];
    (void)snprintf(path, sizeof(path), "%s", bt_panel_file_path(f));
    bt_panel_file_close(f);
    CHECK_EQ(chmod(path, 0622), 0);
    CHECK_EQ(bt_panel_file_open(&w, &f, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, path) != NULL);
    CHECK_EQ(unlink(path), 0);
    CHECK_EQ(symlink("/dev/null", path), 0);
    CHECK_EQ(bt_panel_file_open(&w, &f, &err), BT_ERR_IO);
    CHECK_EQ(unlink(path), 0);
    CHECK_EQ(mkfifo(path, 0600), 0);
    CHECK_EQ(bt_panel_file_open(&w, &f, &err), BT_ERR_INVALID);
    CHECK_EQ(unlink(path), 0);

    CHECK_EQ(chmod(w.dir, 0777), 0);
    CHECK_EQ(bt_panel_file_open(&w, &f, &err), BT_ERR_INVALID);
    CHECK_EQ(chmod(w.dir, 0700), 0);

    w.dir = "relative";
    CHECK_EQ(bt_panel_file_open(&w, &f, &err), BT_ERR_INVALID);
    w.dir = "/proc/nowhere";
    CHECK_EQ(bt_panel_file_open(&w, &f, &err), BT_ERR_IO);
    w = want("huge");
    w.bytes = (size_t)1 << 60;
    CHECK_EQ(bt_panel_file_open(&w, &f, &err), BT_ERR_BUSY);
    CHECK(strstr(err.msg, "file system") != NULL);
}

/* Files that nobody has opened for a long time go when another one is made; those in use stay. */
static void test_old_ones_go(void)
{
    struct bt_panel_want w[3] = {want("old"), want("old but in use"), want("new")};
    struct bt_panel_file *f[3];
    const struct timespec long_ago[2] = {{.tv_sec = time(NULL) - 40 * 86400},
                                         {.tv_sec = time(NULL) - 40 * 86400}};
    char paths[2][600];

    for (int i = 0; i < 2; i++) {
        CHECK_EQ(bt_panel_file_open(&w[i], &f[i], NULL), BT_OK);
        CHECK_EQ(bt_panel_file_publish(f[i], NULL), BT_OK);
        (void)snprintf(paths[i], sizeof(paths[i]), "%s", bt_panel_file_path(f[i]));
    }
    bt_panel_file_close(f[0]);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(utimensat(AT_FDCWD, paths[i], long_ago, 0), 0);
    }
    CHECK_EQ(bt_panel_file_open(&w[2], &f[2], NULL), BT_OK);
    CHECK(!exists(paths[0]) && exists(paths[1]));
    bt_panel_file_close(f[2]);
    bt_panel_file_close(f[1]);
    /* Opening counts as use. */
    CHECK_EQ(bt_panel_file_open(&w[1], &f[1], NULL), BT_OK);
    CHECK(bt_panel_file_ready(f[1]));
    bt_panel_file_close(f[1]);
    CHECK_EQ(bt_panel_file_open(&w[2], &f[2], NULL), BT_OK);
    CHECK(exists(paths[1]));
    bt_panel_file_close(f[2]);
}

int main(void)
{
    if (bt_temp_is_full()) {
        return 0;
    }
    test_fill_and_share();
    test_discard();
    test_not_believed();
    test_wait();
    test_refused();
    test_old_ones_go();
    bt_temp_remove_folder(bt_temp_path("a/b/panels"));
    bt_temp_remove_folder(bt_temp_path("a/b"));
    bt_temp_remove_folder(bt_temp_path("a"));
    bt_temp_clean(NULL, 0);
    return bt_test_done();
}
