/* Control group limits, read from folders that look like v1, v2 and a container's view. */

#include <ftw.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/stat.h>
#include "base/cgroup_int.h"
#include "base/options.h"
#include "tests/check.h"

static char root[] = "/tmp/baton-cgroup-XXXXXX";
static char proc[64];

static void put(const char *path, const char *text)
{
    char full[256];
    (void)snprintf(full, sizeof(full), "%s/%s", root, path);
    for (char *p = full + sizeof(root); (p = strchr(p, '/')) != NULL; p++) {
        *p = '\0';
        (void)mkdir(full, 0755);
        *p = '/';
    }
    FILE *f = fopen(full, "w");
    CHECK(f != NULL);
    if (f != NULL) {
        (void)fputs(text, f);
        (void)fclose(f);
    }
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

static void test_v2(void)
{
    put("proc", "0::/a/b\n");
    CHECK(bt_cgroup_memory(proc, root) == UINT64_MAX);
    CHECK(bt_cgroup_cpus(proc, root) == UINT64_MAX);
    put("a/b/memory.max", "max\n");
    put("a/b/cpu.max", "max 100000\n");
    CHECK(bt_cgroup_memory(proc, root) == UINT64_MAX);
    CHECK(bt_cgroup_cpus(proc, root) == UINT64_MAX);
    put("a/memory.max", "1000000\n"); /* the parent's limit binds as well */
    put("a/cpu.max", "150000 100000\n");
    CHECK_EQ(bt_cgroup_memory(proc, root), 1000000);
    CHECK_EQ(bt_cgroup_cpus(proc, root), 2);
    put("a/b/memory.max", "4096\n");
    put("a/b/cpu.max", "50000 100000\n");
    CHECK_EQ(bt_cgroup_memory(proc, root), 4096);
    CHECK_EQ(bt_cgroup_cpus(proc, root), 1);
    put("a/b/cpu.max", "50000 0\n");
    CHECK_EQ(bt_cgroup_cpus(proc, root), 2);
}

static void test_container(void)
{
    put("proc", "0::/../../elsewhere\n");
    put("memory.max", "777\n");
    CHECK_EQ(bt_cgroup_memory(proc, root), 777);
    put("proc", "0::/not/here\n");
    CHECK_EQ(bt_cgroup_memory(proc, root), 777);
    put("proc", "0::/\n");
    CHECK_EQ(bt_cgroup_memory(proc, root), 777);
    put("memory.max", "max\n");
}

static void test_v1(void)
{
    put("proc", "7:memory:/x\n3:cpu,cpuacct:/x/y\n1:name=systemd:/x\n0::/\n");
    put("memory/x/memory.limit_in_bytes", "12345\n");
    put("cpu,cpuacct/x/y/cpu.cfs_quota_us", "-1\n");
    put("cpu,cpuacct/x/y/cpu.cfs_period_us", "100000\n");
    CHECK_EQ(bt_cgroup_memory(proc, root), 12345);
    CHECK(bt_cgroup_cpus(proc, root) == UINT64_MAX);
    put("cpu,cpuacct/x/y/cpu.cfs_quota_us", "300000\n");
    CHECK_EQ(bt_cgroup_cpus(proc, root), 3);
}

static void test_odd(void)
{
    put("proc", "garbage\n:\n::\n\n5:memory\n");
    CHECK(bt_cgroup_memory(proc, root) == UINT64_MAX);
    CHECK(bt_cgroup_memory("/nonexistent", root) == UINT64_MAX);
    CHECK(bt_cpus_usable() >= 1);
    CHECK(bt_memory_usable() > 1 << 20);
}

static void test_cpus(void)
{
    static const char *const bad[] = {"",   "x",  "1-",  "-1",   "3-1",
                                      "0,", ",0", "0 1", "1024", "0-99999999999"};
    struct bt_err err = {0};
    cpu_set_t set;
    char list[64];
    int last = CPU_SETSIZE - 1;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        CHECK_EQ(bt_cpus_use(bad[i], &err), BT_ERR_INVALID);
    }
    CHECK_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
    while (!CPU_ISSET((size_t)last, &set)) {
        last--;
    }
    if (last + 1 < CPU_SETSIZE) {
        (void)snprintf(list, sizeof(list), "%d", last + 1);
        CHECK_EQ(bt_cpus_use(list, &err), BT_ERR_INVALID);
        CHECK(strstr(err.msg, "may not use CPU") != NULL);
    }
    (void)snprintf(list, sizeof(list), "%d,%d-%d", last, last, last);
    CHECK_EQ(bt_cpus_use(list, &err), BT_OK);
    CHECK_EQ(bt_cpus_usable(), 1);
    CHECK(sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) == 1 &&
          CPU_ISSET((size_t)last, &set));
}

int main(void)
{
    if (mkdtemp(root) == NULL) {
        perror(root);
        return BT_TEST_SKIP;
    }
    (void)snprintf(proc, sizeof(proc), "%s/proc", root);
    test_v2();
    test_container();
    test_cpus();
    test_v1();
    test_odd();
    (void)nftw(root, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    return bt_test_done();
}
