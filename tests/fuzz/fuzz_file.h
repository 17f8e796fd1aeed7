#ifndef BT_TESTS_FUZZ_FILE_H
#define BT_TESTS_FUZZ_FILE_H

/* A fuzz input as a file with a path, in memory. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static inline const char *bt_fuzz_path(const uint8_t *data, size_t n)
{
    static int fd = -1;
    static char path[64];

    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    }
    if (fd < 0 || ftruncate(fd, 0) != 0 || pwrite(fd, data, n, 0) != (ssize_t)n) {
        abort();
    }
    return path;
}

#endif
