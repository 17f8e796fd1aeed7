/* What Linux lets this process use: affinity, RAM and control group limits. Reads a few kernel
 * files, keeps nothing. A file that is missing or odd counts as "no limit". */

#include "base/options.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/cgroup_int.h"

#define PATH_BYTES 4096

/* Reads the head of a small file as text; false if it cannot be read. */
static bool read_text(const char *path, char *out, size_t cap)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    size_t len = 0;
    ssize_t r = 0;
    while (len < cap - 1 && (r = read(fd, out + len, cap - 1 - len)) > 0) {
        len += (size_t)r;
    }
    (void)close(fd);
    out[len] = '\0';
    return r >= 0;
}

static uint64_t read_number(const char *path)
{
    char text[64];
    char *end;
    if (!read_text(path, text, sizeof(text)) || text[0] < '0' || text[0] > '9') {
        return UINT64_MAX;
    }
    unsigned long long v = strtoull(text, &end, 10);
    return end == text ? UINT64_MAX : v;
}

static uint64_t cpus_of(uint64_t quota, uint64_t period)
{
    return period == 0 ? UINT64_MAX : quota / period + (quota % period != 0);
}

/* One group's folder: its limit, or UINT64_MAX. */
static uint64_t limit_of(const char *dir, bool memory, bool v2)
{
    char path[PATH_BYTES + 64];
    if (memory) {
        (void)snprintf(path, sizeof(path), "%s/%s", dir,
                       v2 ? "memory.max" : "memory.limit_in_bytes");
        return read_number(path);
    }
    if (v2) {
        char text[64];
        uint64_t quota, period;
        (void)snprintf(path, sizeof(path), "%s/cpu.max", dir);
        if (!read_text(path, text, sizeof(text)) ||
            sscanf(text, "%" SCNu64 " %" SCNu64, &quota, &period) != 2) {
            return UINT64_MAX; /* "max 100000" */
        }
        return cpus_of(quota, period);
    }
    (void)snprintf(path, sizeof(path), "%s/cpu.cfs_quota_us", dir);
    uint64_t quota = read_number(path); /* -1: none */
    (void)snprintf(path, sizeof(path), "%s/cpu.cfs_period_us", dir);
    uint64_t period = read_number(path);
    return quota == UINT64_MAX || period == UINT64_MAX ? UINT64_MAX : cpus_of(quota, period);
}

/* Smallest limit of base + path and of every folder above it down to base. */
static uint64_t limit_up(const char *base, const char *path, bool memory, bool v2)
{
    char dir[PATH_BYTES];
    int n = snprintf(dir, sizeof(dir), "%s%s", base, path);
    if (n < 0 || (size_t)n >= sizeof(dir) || strstr(path, "..") != NULL) {
        return limit_of(base, memory, v2);
    }
    uint64_t min = UINT64_MAX;
    size_t base_len = strlen(base);
    for (;;) {
        uint64_t v = limit_of(dir, memory, v2);
        min = v < min ? v : min;
        char *slash = strrchr(dir, '/');
        if (slash == NULL || slash < dir + base_len) {
            return min;
        }
        *slash = '\0';
    }
}

static bool has_word(const char *list, const char *word)
{
    size_t n = strlen(word);
    for (const char *p = list; p != NULL && *p != '\0';) {
        const char *end = strchrnul(p, ',');
        if ((size_t)(end - p) == n && memcmp(p, word, n) == 0) {
            return true;
        }
        p = *end == ',' ? end + 1 : NULL;
    }
    return false;
}

/* Lines of proc are "id:controllers:path"; v2 has no controllers. */
static uint64_t limit(const char *proc, const char *mount, bool memory)
{
    char text[8192];
    const char *controller = memory ? "memory" : "cpu";
    uint64_t min = UINT64_MAX;
    char *save = NULL;

    if (!read_text(proc, text, sizeof(text))) {
        return UINT64_MAX;
    }
    for (char *ln = strtok_r(text, "\n", &save); ln != NULL; ln = strtok_r(NULL, "\n", &save)) {
        char *names = strchr(ln, ':');
        char *path = names != NULL ? strchr(names + 1, ':') : NULL;
        if (path == NULL) {
            continue;
        }
        *names++ = '\0';
        *path++ = '\0';
        bool v2 = names[0] == '\0';
        if (!v2 && !has_word(names, controller)) {
            continue;
        }
        char base[PATH_BYTES];
        int n = snprintf(base, sizeof(base), "%s%s%s", mount, v2 ? "" : "/", names);
        if (n < 0 || (size_t)n >= sizeof(base)) {
            continue;
        }
        uint64_t v = limit_up(base, path, memory, v2);
        min = v < min ? v : min;
    }
    return min;
}

uint64_t bt_cgroup_memory(const char *proc, const char *mount)
{
    return limit(proc, mount, true);
}

uint64_t bt_cgroup_cpus(const char *proc, const char *mount)
{
    return limit(proc, mount, false);
}

uint32_t bt_cpus_usable(void)
{
    uint64_t n = 0;
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        n = (uint64_t)CPU_COUNT(&set);
    } else {
        long online = sysconf(_SC_NPROCESSORS_ONLN); /* more CPUs than cpu_set_t holds */
        n = online > 0 ? (uint64_t)online : 1;
    }
    uint64_t quota = bt_cgroup_cpus("/proc/self/cgroup", "/sys/fs/cgroup");
    n = quota < n ? quota : n;
    return n > 0 ? (uint32_t)n : 1;
}

/* One number of a CPU list, and what follows it; -1: none, or more than cpu_set_t holds. */
static long cpu_number(const char **at)
{
    char *end;

    if (**at < '0' || **at > '9') {
        return -1;
    }
    long v = strtol(*at, &end, 10);
    *at = end;
    return v >= 0 && v < CPU_SETSIZE ? v : -1;
}

static bool parse_cpus(const char *list, cpu_set_t *out)
{
    const char *at = list;

    CPU_ZERO(out);
    for (;; at++) {
        long first = cpu_number(&at), last = first;
        if (*at == '-') {
            at++;
            last = cpu_number(&at);
        }
        if (first < 0 || last < first || (*at != ',' && *at != '\0')) {
            return false;
        }
        for (long i = first; i <= last; i++) {
            CPU_SET((size_t)i, out);
        }
        if (*at == '\0') {
            return true;
        }
    }
}

enum bt_status bt_cpus_use(const char *list, struct bt_err *err)
{
    cpu_set_t have, want;

    if (!parse_cpus(list, &want)) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "%s: a list of CPU numbers below %d is needed, like 0-3,8", list,
                          CPU_SETSIZE);
    }
    if (sched_getaffinity(0, sizeof(have), &have) == 0) {
        for (size_t i = 0; i < CPU_SETSIZE; i++) {
            if (CPU_ISSET(i, &want) && !CPU_ISSET(i, &have)) {
                return bt_err_set(err, BT_ERR_INVALID, "%s: this process may not use CPU %zu", list,
                                  i);
            }
        }
    }
    if (sched_setaffinity(0, sizeof(want), &want) != 0) {
        return bt_err_set(err, BT_ERR_INVALID, "%s: %s", list, strerror(errno));
    }
    return BT_OK;
}

uint64_t bt_memory_usable(void)
{
    long pages = sysconf(_SC_PHYS_PAGES);
    long page = sysconf(_SC_PAGESIZE);
    uint64_t ram = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : UINT64_MAX;
    uint64_t max = bt_cgroup_memory("/proc/self/cgroup", "/sys/fs/cgroup");
    return max < ram ? max : ram;
}
