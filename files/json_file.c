/* Reads JSON text into jansson values. Owns the size limit, the treatment of oversized integers and
 * the wording of syntax errors; knows nothing of what a document means. */

#include "files/json_file.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/mem.h"

enum bt_status bt_json_parse(const char *name, const char *text, size_t n, struct json_t **out,
                             struct bt_err *err)
{
    const size_t flags = JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL;
    json_error_t je;
    json_t *v = json_loadb(text, n, flags, &je);

    if (v == NULL && json_error_code(&je) == json_error_numeric_overflow) {
        v = json_loadb(text, n, flags | JSON_DECODE_INT_AS_REAL, &je);
    }
    if (v == NULL) {
        if (json_error_code(&je) == json_error_out_of_memory) {
            return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory while parsing JSON", name);
        }
        return bt_err_set(err, BT_ERR_INVALID, "%s: byte %d (line %d): %s", name, je.position,
                          je.line, je.text);
    }
    *out = v;
    return BT_OK;
}

static enum bt_status read_all(int fd, const char *path, char *buf, size_t n, struct bt_err *err)
{
    size_t got = 0;

    while (got < n) {
        ssize_t r = read(fd, buf + got, n - got);
        if (r < 0 && errno == EINTR) {
            continue;
        }
        if (r < 0) {
            return bt_err_set(err, BT_ERR_IO, "%s: read at byte %zu: %s", path, got,
                              strerror(errno));
        }
        if (r == 0) {
            return bt_err_set(err, BT_ERR_IO, "%s: ends at byte %zu of %zu", path, got, n);
        }
        got += (size_t)r;
    }
    return BT_OK;
}

enum bt_status bt_json_file_read(const char *path, size_t max_bytes, struct json_t **out,
                                 struct bt_err *err)
{
    struct stat sb;
    enum bt_status st;
    char *buf;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

    if (fd < 0) {
        return bt_err_set(err, errno == ENOENT ? BT_ERR_NOT_FOUND : BT_ERR_IO, "%s: %s", path,
                          strerror(errno));
    }
    if (fstat(fd, &sb) != 0 || !S_ISREG(sb.st_mode)) {
        st = bt_err_set(err, BT_ERR_IO, "%s: not a regular file", path);
        goto out_close;
    }
    if ((uint64_t)sb.st_size > max_bytes) {
        st = bt_err_set(err, BT_ERR_INVALID, "%s: %lld bytes, the limit is %zu", path,
                        (long long)sb.st_size, max_bytes);
        goto out_close;
    }
    buf = bt_alloc((size_t)sb.st_size);
    if (buf == NULL) {
        st = bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", path);
        goto out_close;
    }
    st = read_all(fd, path, buf, (size_t)sb.st_size, err);
    if (st == BT_OK) {
        st = bt_json_parse(path, buf, (size_t)sb.st_size, out, err);
    }
    bt_free(buf);
out_close:
    (void)close(fd);
    return st;
}
