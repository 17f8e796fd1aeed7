/* Maps files read-only. Owns the mapping and its checks against odd files; knows nothing of
 * formats. */

#include "files/map.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static enum bt_status map_fd(struct bt_file_map *m, int fd, const char *path, size_t min_bytes,
                             struct bt_err *err)
{
    struct stat sb;

    if (fstat(fd, &sb) != 0) {
        return bt_err_set(err, BT_ERR_IO, "%s: %s", path, strerror(errno));
    }
    if (!S_ISREG(sb.st_mode)) {
        return bt_err_set(err, BT_ERR_IO, "%s: not a regular file", path);
    }
    if (sb.st_size == 0 || (uint64_t)sb.st_size < min_bytes) {
        return bt_err_set(err, BT_ERR_INVALID, "%s: %lld bytes is too short", path,
                          (long long)sb.st_size);
    }
    if ((uint64_t)sb.st_size > SIZE_MAX) {
        return bt_err_set(err, BT_ERR_INVALID, "%s: %lld bytes do not fit the address space", path,
                          (long long)sb.st_size);
    }
    void *p = mmap(NULL, (size_t)sb.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (p == MAP_FAILED) {
        return bt_err_set(err, errno == ENOMEM ? BT_ERR_NOMEM : BT_ERR_IO,
                          "%s: mmap of %lld bytes: %s", path, (long long)sb.st_size,
                          strerror(errno));
    }
    m->data = p;
    m->bytes = (size_t)sb.st_size;
    return BT_OK;
}

enum bt_status bt_file_map_open(struct bt_file_map *m, const char *path, size_t min_bytes,
                                struct bt_err *err)
{
    /* O_NONBLOCK: a FIFO under the name must not hang the opening. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

    if (fd < 0) {
        return bt_err_set(err, errno == ENOENT ? BT_ERR_NOT_FOUND : BT_ERR_IO, "%s: %s", path,
                          strerror(errno));
    }
    enum bt_status st = map_fd(m, fd, path, min_bytes, err);
    (void)close(fd);
    return st;
}

void bt_file_map_forget(const void *p, size_t bytes)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = ((uintptr_t)p + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)p + bytes) / page * page;

    if (first < end) {
        (void)madvise((void *)first, end - first, MADV_DONTNEED);
    }
}

void bt_file_map_close(struct bt_file_map *m)
{
    if (m->data != NULL) {
        (void)munmap((void *)(uintptr_t)m->data, m->bytes);
    }
    *m = (struct bt_file_map){0};
}
