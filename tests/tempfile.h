#ifndef BT_TESTS_TEMPFILE_H
#define BT_TESTS_TEMPFILE_H

/* A temporary directory for one test program, and files in it. */

#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

static inline const char *bt_temp_dir(void)
{
    static char dir[64];

    if (dir[0] == '\0') {
        (void)snprintf(dir, sizeof(dir), "/tmp/baton-test-XXXXXX");
        if (mkdtemp(dir) == NULL) {
            perror("mkdtemp");
            exit(1);
        }
    }
    return dir;
}

/* Caches leave a tenth of a disk free: where less is, there is nothing to test. Says so. */
static inline bool bt_temp_is_full(void)
{
    struct statvfs v;
    bool full = statvfs(bt_temp_dir(), &v) == 0 && v.f_bavail < v.f_blocks / 10 + v.f_blocks / 100;

    if (full) {
        puts("skipped: about a tenth of /tmp's disk is free, so no cache file is written there");
        (void)rmdir(bt_temp_dir());
    }
    return full;
}

/* Path of name inside the directory; four results stay valid. */
static inline const char *bt_temp_path(const char *name)
{
    static char paths[4][512];
    static unsigned next;
    char *p = paths[next++ % 4];

    (void)snprintf(p, sizeof(paths[0]), "%s/%s", bt_temp_dir(), name);
    return p;
}

/* Removes the files in a subdirectory of it, and the subdirectory. */
static inline void bt_temp_remove_folder(const char *path)
{
    char file[1024];
    DIR *d = opendir(path);
    const struct dirent *e;

    while (d != NULL && (e = readdir(d)) != NULL) {
        if (snprintf(file, sizeof(file), "%s/%s", path, e->d_name) < (int)sizeof(file)) {
            (void)unlink(file);
        }
    }
    if (d != NULL) {
        (void)closedir(d);
    }
    (void)rmdir(path);
}

static inline const char *bt_temp_write(const char *name, const void *data, size_t n)
{
    const char *path = bt_temp_path(name);
    FILE *f = fopen(path, "wb");

    if (f == NULL || fwrite(data, 1, n, f) != n || fclose(f) != 0) {
        perror(path);
        exit(1);
    }
    return path;
}

/* Removes the directory with its plain files. */
static inline void bt_temp_clean(const char *const *names, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        (void)unlink(bt_temp_path(names[i]));
    }
    (void)rmdir(bt_temp_dir());
}

#endif
