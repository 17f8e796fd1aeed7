/* The cache of packed weights: opening, locking, filling, and throwing out files that nobody wants. Owns the file's header
 * and locks; knows nothing of weights. */

#include "files/panel_file.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>
#include "base/assert.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/hash.h"
#include "base/mem.h"

enum { HEADER_BYTES = 4096, BOOT_ID_BYTES = 40, ABOUT_BYTES = 1024, UNUSED_DAYS = 30 };

static const char MAGIC[8] = "BTPANEL";
static const char SUFFIX[] = ".panels";
static const uint32_t COMPLETE = 1;
static const uint64_t STALL_NS = UINT64_C(10) * 1000 * 1000 * 1000;

struct header {
    char magic[8];
    _Atomic uint32_t state; /* COMPLETE or 0 */
    uint32_t key_bytes;
    uint64_t bytes;
    _Atomic uint64_t bytes_done;
    char boot_id[BOOT_ID_BYTES];
    char about[ABOUT_BYTES];
    char key[BT_PANEL_KEY_MAX];
};
static_assert(sizeof(struct header) <= HEADER_BYTES, "the header fits its page");

struct bt_panel_file {
    int fd;
    bool ready, ours;    /* ours: empty when opened, this process fills it */
    struct header *head; /* the mapping */
    size_t map_bytes;
    struct bt_buf path;
};

/* One attempt to open: what it found. */
enum found { FOUND_READY, FOUND_OURS, FOUND_BUSY, FOUND_GONE, FOUND_ERROR };

static enum bt_status io_error(struct bt_err *err, const char *path, const char *what)
{
    return bt_err_set(err, BT_ERR_IO, "%s: %s: %s", path, what, strerror(errno));
}

static bool read_boot_id(char out[BOOT_ID_BYTES])
{
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, out, BOOT_ID_BYTES - 1) : -1;

    if (fd >= 0) {
        (void)close(fd);
    }
    memset(out + (n > 0 ? n : 0), 0, (size_t)(BOOT_ID_BYTES - (n > 0 ? n : 0)));
    return n > 0;
}

/* Nobody else may write what this process computes with. */
static enum bt_status check_owner(const char *path, const struct stat *sb, struct bt_err *err)
{
    if (sb->st_uid != geteuid() || (sb->st_mode & (S_IWGRP | S_IWOTH)) != 0) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "%s: must belong to user %u, and only that one may write it", path,
                          (unsigned)geteuid());
    }
    return BT_OK;
}

static enum bt_status make_folder(const char *dir, struct bt_err *err)
{
    struct bt_buf path = {0};
    struct stat sb;
    enum bt_status st = BT_OK;

    for (const char *p = strchr(dir + 1, '/');; p = strchr(p + 1, '/')) {
        bt_buf_clear(&path);
        if (!bt_buf_addf(&path, "%.*s", p != NULL ? (int)(p - dir) : (int)strlen(dir), dir)) {
            st = bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", dir);
            break;
        }
        if (mkdir(path.data, 0700) != 0 && errno != EEXIST) {
            st = io_error(err, path.data, "mkdir");
            break;
        }
        if (p == NULL) {
            st = stat(dir, &sb) == 0 ? check_owner(dir, &sb, err) : io_error(err, dir, "stat");
            break;
        }
    }
    bt_buf_fini(&path);
    return st;
}

/* ---- making room ---- */

struct old_file {
    char name[64];
    time_t used;
};

/* Unused for longer; names make it an order. */
static bool is_older(time_t used, const char *name, const struct old_file *than)
{
    return used < than->used || (used == than->used && strcmp(name, than->name) < 0);
}

static bool is_panel_file(const char *name)
{
    size_t n = strlen(name), k = sizeof(SUFFIX) - 1;

    return n > k && n < sizeof(((struct old_file *)NULL)->name) &&
           strcmp(name + n - k, SUFFIX) == 0;
}

/* Deletes a file unless somebody has it open. */
static bool remove_unused(int dir_fd, const char *name)
{
    int fd = openat(dir_fd, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    bool gone = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0 && unlinkat(dir_fd, name, 0) == 0;

    if (fd >= 0) {
        (void)close(fd);
    }
    return gone;
}

/* The next one after *at in the order of their last use, but not `keep`. */
static bool next_oldest(int dir_fd, struct old_file *at, const char *keep)
{
    int fd = openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
    struct old_file best = {.name = ""};
    const struct dirent *e;
    struct stat sb;

    if (d == NULL) {
        if (fd >= 0) {
            (void)close(fd);
        }
        return false;
    }
    while ((e = readdir(d)) != NULL) { /* NOLINT(concurrency-mt-unsafe): a stream of its own */
        if (!is_panel_file(e->d_name) || strcmp(e->d_name, keep) == 0 ||
            fstatat(dir_fd, e->d_name, &sb, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(sb.st_mode) ||
            is_older(sb.st_mtime, e->d_name, at) || strcmp(e->d_name, at->name) == 0 ||
            (best.name[0] != '\0' && !is_older(sb.st_mtime, e->d_name, &best))) {
            continue;
        }
        (void)snprintf(best.name, sizeof(best.name), "%.*s", (int)sizeof(best.name) - 1, e->d_name);
        best.used = sb.st_mtime;
    }
    (void)closedir(d);
    if (best.name[0] != '\0') {
        *at = best;
    }
    return best.name[0] != '\0';
}

static bool has_room(int dir_fd, uint64_t bytes)
{
    struct statvfs v;

    if (fstatvfs(dir_fd, &v) != 0) {
        return false;
    }
    uint64_t unit = v.f_frsize, free_bytes = (uint64_t)v.f_bavail * unit;
    return free_bytes >= bytes && free_bytes - bytes >= (uint64_t)v.f_blocks * unit / 10;
}

/* If the file system were empty. */
static bool could_hold(int dir_fd, uint64_t bytes)
{
    struct statvfs v;

    return fstatvfs(dir_fd, &v) == 0 && bytes / v.f_frsize < (uint64_t)v.f_blocks / 10 * 9;
}

static enum bt_status make_room(const char *dir, const char *keep, uint64_t bytes,
                                struct bt_err *err)
{
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct old_file old = {.name = ""};
    const time_t stale = time(NULL) - (time_t)UNUSED_DAYS * 24 * 3600;

    if (fd < 0) {
        return io_error(err, dir, "open");
    }
    while (could_hold(fd, bytes) && next_oldest(fd, &old, keep) &&
           (old.used < stale || !has_room(fd, bytes))) {
        (void)remove_unused(fd, old.name);
    }
    bool room = has_room(fd, bytes);
    (void)close(fd);
    return room ? BT_OK
                : bt_err_set(
                      err, BT_ERR_BUSY,
                      "%s: %.0f MB of packed weights would leave less than a tenth of the file "
                      "system free",
                      dir, (double)bytes / 1e6);
}

/* ---- opening ---- */

static bool header_matches(const struct header *h, const struct bt_panel_want *w)
{
    char boot_id[BOOT_ID_BYTES];
    size_t n = strlen(w->key);

    return memcmp(h->magic, MAGIC, sizeof(MAGIC)) == 0 && atomic_load(&h->state) == COMPLETE &&
           h->bytes == w->bytes && h->key_bytes == n && memcmp(h->key, w->key, n) == 0 &&
           read_boot_id(boot_id) && memcmp(h->boot_id, boot_id, sizeof(boot_id)) == 0;
}

static bool read_header(int fd, struct header *h)
{
    return pread(fd, h, sizeof(*h), 0) == (ssize_t)sizeof(*h);
}

static enum bt_status map_file(struct bt_panel_file *f, int prot, struct bt_err *err)
{
    void *p = mmap(NULL, f->map_bytes, prot, MAP_SHARED, f->fd, 0);

    if (p == MAP_FAILED) {
        return io_error(err, f->path.data, "mmap");
    }
    f->head = p;
    return BT_OK;
}

/* Shared lock held. */
static enum found use(struct bt_panel_file *f, struct bt_err *err)
{
    struct stat sb;

    if (fstat(f->fd, &sb) != 0 || (uint64_t)sb.st_size < f->map_bytes) {
        (void)bt_err_set(err, BT_ERR_IO, "%s: too short: delete it", f->path.data);
        return FOUND_ERROR;
    }
    (void)futimens(f->fd, NULL); /* used now; a read-only file system only ages it */
    f->ready = true;
    return map_file(f, PROT_READ, err) == BT_OK ? FOUND_READY : FOUND_ERROR;
}

/* Exclusive lock held: nobody has it mapped. */
static enum found begin(struct bt_panel_file *f, const struct bt_panel_want *w, struct bt_err *err)
{
    const char *name = strrchr(f->path.data, '/') + 1;
    int e = 0;

    f->ours = true;
    if (ftruncate(f->fd, 0) != 0) {
        (void)io_error(err, f->path.data, "ftruncate");
        return FOUND_ERROR;
    }
    if (make_room(w->dir, name, f->map_bytes, err) != BT_OK) {
        return FOUND_ERROR;
    }
    if ((e = posix_fallocate(f->fd, 0, (off_t)f->map_bytes)) != 0) {
        errno = e;
        (void)io_error(err, f->path.data, "no room on the disk");
        return FOUND_ERROR;
    }
    if (map_file(f, PROT_READ | PROT_WRITE, err) != BT_OK) {
        return FOUND_ERROR;
    }
    struct header *h = f->head;
    memcpy(h->magic, MAGIC, sizeof(MAGIC));
    h->bytes = w->bytes;
    h->key_bytes = (uint32_t)strlen(w->key);
    memcpy(h->key, w->key, h->key_bytes);
    (void)snprintf(h->about, sizeof(h->about), "%s", w->about != NULL ? w->about : "");
    if (!read_boot_id(h->boot_id)) {
        (void)io_error(err, "/proc/sys/kernel/random/boot_id", "read");
        return FOUND_ERROR;
    }
    return FOUND_OURS;
}

static enum found try_open(struct bt_panel_file *f, const struct bt_panel_want *w,
                           uint64_t *bytes_done, struct bt_err *err)
{
    struct header h;
    struct stat sb;

    f->fd = open(f->path.data, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    if (f->fd < 0) {
        (void)io_error(err, f->path.data, "open");
        return FOUND_ERROR;
    }
    if (fstat(f->fd, &sb) != 0 || !S_ISREG(sb.st_mode)) {
        (void)bt_err_set(err, BT_ERR_INVALID, "%s: not a regular file", f->path.data);
        return FOUND_ERROR;
    }
    if (check_owner(f->path.data, &sb, err) != BT_OK) {
        return FOUND_ERROR;
    }
    if (flock(f->fd, LOCK_SH | LOCK_NB) != 0) {
        *bytes_done = read_header(f->fd, &h) ? atomic_load(&h.bytes_done) : 0;
        return FOUND_BUSY;
    }
    if (fstat(f->fd, &sb) != 0 || sb.st_nlink == 0) {
        return FOUND_GONE; /* deleted between open and lock */
    }
    if (read_header(f->fd, &h) && header_matches(&h, w)) {
        return use(f, err);
    }
    /* Not good: ours to fill, if nobody else has it. The shared lock is lost if that fails. */
    if (flock(f->fd, LOCK_EX | LOCK_NB) != 0) {
        return FOUND_GONE;
    }
    if (fstat(f->fd, &sb) != 0 || sb.st_nlink == 0) {
        return FOUND_GONE;
    }
    if (read_header(f->fd, &h) && header_matches(&h, w)) { /* filled between the two locks */
        return flock(f->fd, LOCK_SH) == 0 ? use(f, err) : FOUND_GONE;
    }
    return begin(f, w, err);
}

static void pause_ms(long ms)
{
    const struct timespec t = {.tv_nsec = ms * 1000 * 1000};

    (void)nanosleep(&t, NULL);
}

static enum bt_status open_or_wait(struct bt_panel_file *f, const struct bt_panel_want *w,
                                   struct bt_err *err)
{
    uint64_t done = 0, last = UINT64_MAX, t_last = bt_clock_ns();
    struct bt_err own = {0};

    for (;;) {
        enum found found = try_open(f, w, &done, &own);
        if (found == FOUND_READY || found == FOUND_OURS) {
            return BT_OK;
        }
        if (found == FOUND_ERROR) {
            return bt_err_set(err, own.status, "%s", own.msg);
        }
        (void)close(f->fd);
        f->fd = -1;
        if (done != last) {
            last = done;
            t_last = bt_clock_ns();
        }
        if (bt_clock_ns() - t_last > STALL_NS) {
            return bt_err_set(err, BT_ERR_TIMEOUT,
                              "%s: another process holds it and has not got on for 10 s",
                              f->path.data);
        }
        if (found == FOUND_BUSY && w->waiting != NULL) {
            w->waiting(w->arg, (double)done / (double)w->bytes);
        }
        pause_ms(10);
    }
}

enum bt_status bt_panel_file_open(const struct bt_panel_want *want, struct bt_panel_file **out,
                                  struct bt_err *err)
{
    size_t n = strlen(want->key);
    struct bt_panel_file *f = bt_calloc(1, sizeof(*f));
    enum bt_status st = BT_OK;

    if (f == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    f->fd = -1;
    if (n > BT_PANEL_KEY_MAX || want->bytes > SIZE_MAX - HEADER_BYTES || want->dir[0] != '/') {
        st = bt_err_set(err, BT_ERR_INVALID, "%s: the folder must be an absolute path", want->dir);
    } else if (!bt_buf_addf(&f->path, "%s/%016llx%s", want->dir,
                            (unsigned long long)bt_hash64(want->key, n, 0), SUFFIX)) {
        st = bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    f->map_bytes = want->bytes + HEADER_BYTES;
    if (st == BT_OK) {
        st = make_folder(want->dir, err);
    }
    if (st == BT_OK) {
        st = open_or_wait(f, want, err);
    }
    if (st != BT_OK) {
        bt_panel_file_close(f);
        return st;
    }
    *out = f;
    return BT_OK;
}

void bt_panel_file_close(struct bt_panel_file *f)
{
    if (f == NULL) {
        return;
    }
    if (f->ours && !f->ready) {
        (void)unlink(f->path.data);
    }
    if (f->head != NULL) {
        (void)munmap(f->head, f->map_bytes);
    }
    if (f->fd >= 0) {
        (void)close(f->fd);
    }
    bt_buf_fini(&f->path);
    bt_free(f);
}

uint8_t *bt_panel_file_data(struct bt_panel_file *f)
{
    return (uint8_t *)f->head + HEADER_BYTES;
}

bool bt_panel_file_put(struct bt_panel_file *f, size_t at, const void *data, size_t bytes)
{
    const uint8_t *p = data;

    BT_ASSERT(!f->ready && at <= f->map_bytes - HEADER_BYTES &&
              bytes <= f->map_bytes - HEADER_BYTES - at);
    while (bytes > 0) {
        ssize_t n = pwrite(f->fd, p, bytes, (off_t)(HEADER_BYTES + at));
        if (n == 0 || (n < 0 && errno != EINTR)) {
            return false;
        }
        size_t done = n > 0 ? (size_t)n : 0;
        p += done;
        at += done;
        bytes -= done;
    }
    return true;
}

bool bt_panel_file_ready(const struct bt_panel_file *f)
{
    return f->ready;
}

const char *bt_panel_file_path(const struct bt_panel_file *f)
{
    return f->path.data;
}

void bt_panel_file_progress(struct bt_panel_file *f, size_t bytes_done)
{
    atomic_store(&f->head->bytes_done, bytes_done);
}

enum bt_status bt_panel_file_publish(struct bt_panel_file *f, struct bt_err *err)
{
    atomic_store(&f->head->state, COMPLETE);
    f->ready = true;
    if (mprotect(f->head, f->map_bytes, PROT_READ) != 0) {
        return io_error(err, f->path.data, "mprotect");
    }
    if (flock(f->fd, LOCK_SH) != 0) {
        return io_error(err, f->path.data, "flock");
    }
    return BT_OK;
}

void bt_panel_file_discard(struct bt_panel_file *f)
{
    (void)unlink(f->path.data);
    bt_panel_file_close(f);
}
