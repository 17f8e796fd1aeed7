/* Appends lines to a file without ever making the loop wait. Owns the descriptor and two buffers, one that fills and one
 * that the pool writes; refuses to know what a line says. */

#include "router/request_log.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "net/loop.h"

#define WAITING_MAX ((size_t)4 << 20)

/* Touched by the pool thread while `writing`, by the loop otherwise. */
struct batch {
    struct bt_buf lines;
    uint64_t n; /* lines */
    bool reopen;
    int error; /* errno; 0: all was written */
    const char *step;
};

struct bt_request_log {
    struct bt_net_loop *loop;
    char *path;
    size_t waiting_max;
    int fd;    /* -1: not open; the pool's while writing */
    bool torn; /* the file ends inside a line */
    struct bt_buf waiting;
    uint64_t n_waiting; /* lines */
    bool reopen, writing, complained;
    struct batch batch;
    struct bt_request_log_stats stats;
};

static int open_file(const char *path)
{
    return open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0640);
}

static bool failed(struct batch *b, const char *step)
{
    b->error = errno;
    b->step = step;
    return false;
}

static bool write_all(struct bt_request_log *l, const char *p, size_t n)
{
    while (n > 0) {
        ssize_t done = write(l->fd, p, n);

        if (done < 0 && errno == EINTR) {
            continue;
        }
        if (done < 0) {
            return failed(&l->batch, "write");
        }
        p += done;
        n -= (size_t)done;
        l->torn = p[-1] != '\n';
    }
    return true;
}

/* Pool thread. */
static void write_batch(void *arg)
{
    struct bt_request_log *l = arg;
    struct batch *b = &l->batch;

    b->error = 0;
    if (l->fd >= 0 && b->reopen) {
        (void)close(l->fd); /* every write before was answered */
        l->fd = -1;
    }
    if (l->fd < 0) {
        l->fd = open_file(l->path);
        l->torn = false;
    }
    if (l->fd < 0) {
        (void)failed(b, "open");
        return;
    }
    if (l->torn && !write_all(l, "\n", 1)) {
        return;
    }
    (void)write_all(l, b->lines.data, b->lines.len);
}

static void account(struct bt_request_log *l)
{
    struct batch *b = &l->batch;

    if (b->error == 0) {
        l->stats.written += b->n;
        if (l->complained) {
            l->complained = false;
            bt_log_info("router", "request log %s: written again; %llu lines were lost", l->path,
                        (unsigned long long)l->stats.lost);
        }
        return;
    }
    l->stats.lost += b->n;
    if (!l->complained) {
        l->complained = true;
        bt_log_error("router", "request log %s: %s: %s; lines are lost until this works again",
                     l->path, b->step, strerror(b->error));
    }
}

static void pump(struct bt_request_log *l);

static void on_written(void *arg)
{
    struct bt_request_log *l = arg;

    l->writing = false;
    account(l);
    pump(l);
}

/* Moves what waits into the batch. */
static void take_batch(struct bt_request_log *l)
{
    struct bt_buf empty = l->batch.lines;

    bt_buf_clear(&empty);
    l->batch.lines = l->waiting;
    l->batch.n = l->n_waiting;
    l->batch.reopen = l->reopen;
    l->waiting = empty;
    l->n_waiting = 0;
    l->reopen = false;
}

static void pump(struct bt_request_log *l)
{
    if (l->writing || l->n_waiting == 0) {
        return;
    }
    take_batch(l);
    l->writing = true;
    if (bt_net_work(l->loop, write_batch, on_written, l) != BT_OK) {
        l->writing = false;
        l->batch.error = ENOMEM;
        l->batch.step = "write";
        l->reopen = l->reopen || l->batch.reopen;
        account(l);
    }
}

enum bt_status bt_request_log_open(struct bt_net_loop *loop, const char *path, size_t waiting_max,
                                   struct bt_request_log **out, struct bt_err *err)
{
    struct bt_request_log *l = bt_calloc(1, sizeof *l);

    if (l == NULL || (l->path = bt_strdup(path)) == NULL) {
        bt_free(l);
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    l->loop = loop;
    l->waiting_max = waiting_max != 0 ? waiting_max : WAITING_MAX;
    l->fd = open_file(path);
    if (l->fd < 0) {
        enum bt_status st = bt_err_set(err, BT_ERR_IO, "%s: %s", path, strerror(errno));

        bt_free(l->path);
        bt_free(l);
        return st;
    }
    *out = l;
    return BT_OK;
}

void bt_request_log_add(struct bt_request_log *l, const struct bt_buf *line)
{
    if (line->failed || l->waiting.len + line->len > l->waiting_max ||
        !bt_buf_reserve(&l->waiting, line->len)) {
        l->stats.lost++;
        if (!l->complained) {
            l->complained = true;
            bt_log_error("router",
                         "request log %s: %zu bytes of lines wait for the disk; more are lost "
                         "until this works again",
                         l->path, l->waiting.len);
        }
        return;
    }
    (void)bt_buf_add(&l->waiting, line->data, line->len);
    l->n_waiting++;
    pump(l);
}

void bt_request_log_reopen(struct bt_request_log *l)
{
    l->reopen = true;
    bt_log_info("router", "request log %s: reopened for the next line", l->path);
}

struct bt_request_log_stats bt_request_log_stats(const struct bt_request_log *l)
{
    return l->stats;
}

void bt_request_log_close(struct bt_request_log *l)
{
    if (l == NULL) {
        return;
    }
    while (l->writing) {
        bt_net_loop_step(l->loop, 10 * BT_NS_PER_MS); /* on_written starts the next batch */
    }
    if (l->fd >= 0) {
        (void)close(l->fd);
    }
    bt_buf_fini(&l->waiting);
    bt_buf_fini(&l->batch.lines);
    bt_free(l->path);
    bt_free(l);
}
