/* Files that appear whole: a temporary name, then a change of names. Refuses to know what is in them. */

#include "files/out_file.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>
#include "base/buf.h"
#include "base/mem.h"

enum { STREAM_BYTES = 1 << 20 };

static enum bt_status io_error(const struct bt_out_file *o, struct bt_err *err)
{
    return bt_err_set(err, BT_ERR_IO, "%s: %s", o->temp, strerror(errno));
}

enum bt_status bt_out_file_open(struct bt_out_file *o, const char *path, struct bt_err *err)
{
    struct bt_buf temp = {0};

    *o = (struct bt_out_file){.path = bt_strdup(path)};
    (void)bt_buf_addf(&temp, "%s.%ld.tmp", path, (long)getpid()); /* a failure makes take NULL */
    o->temp = bt_buf_take(&temp, NULL);
    if (o->path == NULL || o->temp == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", path);
    }
    o->f = fopen(o->temp, "wb");
    if (o->f == NULL) {
        return io_error(o, err);
    }
    (void)setvbuf(o->f, NULL, _IOFBF, STREAM_BYTES);
    return BT_OK;
}

enum bt_status bt_out_file_write(struct bt_out_file *o, const void *p, size_t n, struct bt_err *err)
{
    return n == 0 || fwrite(p, n, 1, o->f) == 1 ? BT_OK : io_error(o, err);
}

enum bt_status bt_out_file_flush(struct bt_out_file *o, struct bt_err *err)
{
    return fflush(o->f) == 0 ? BT_OK : io_error(o, err);
}

enum bt_status bt_out_file_finish(struct bt_out_file *o, struct bt_err *err)
{
    FILE *f = o->f;

    if (fflush(f) != 0 || fsync(fileno(f)) != 0) {
        return io_error(o, err);
    }
    o->f = NULL;
    if (fclose(f) != 0 || rename(o->temp, o->path) != 0) {
        enum bt_status st = io_error(o, err);
        (void)unlink(o->temp);
        return st;
    }
    return BT_OK;
}

void bt_out_file_close(struct bt_out_file *o)
{
    if (o->f != NULL) {
        (void)fclose(o->f); /* finish has closed what counts */
        (void)unlink(o->temp);
    }
    bt_free(o->path);
    bt_free(o->temp);
    *o = (struct bt_out_file){0};
}

enum bt_status bt_out_file_put(const char *path, const void *p, size_t n, struct bt_err *err)
{
    struct bt_out_file o;
    enum bt_status st = bt_out_file_open(&o, path, err);

    st = st == BT_OK ? bt_out_file_write(&o, p, n, err) : st;
    st = st == BT_OK ? bt_out_file_finish(&o, err) : st;
    bt_out_file_close(&o);
    return st;
}
