/* baton fetch, and the same for `baton up`: runs the embedded fetch_model.py. Python is there wherever pip is, and
 * brings hashing and zip files along. */

#include "cli/fetch.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/cache_dir.h"
#include "base/options.h"
#include "cli/cli.h"

extern const unsigned char bt_cli_fetch_script[];
extern const size_t bt_cli_fetch_script_bytes;

static void run_script(int out_fd, const char *folder)
{
    struct bt_buf script = {0};

    if (dup2(out_fd, STDOUT_FILENO) >= 0 &&
        bt_buf_add(&script, bt_cli_fetch_script, bt_cli_fetch_script_bytes)) {
        execlp("python3", "python3", "-c", script.data, folder, (char *)NULL);
    }
    _exit(127);
}

enum bt_status bt_cli_fetch_model(struct bt_buf *path, struct bt_err *err)
{
    struct bt_buf folder = {0};
    int fds[2];
    char chunk[1024];
    ssize_t n;
    int status = 0;
    enum bt_status st = bt_cache_dir(&folder, NULL, err);

    if (st != BT_OK) {
        return st;
    }
    if (pipe(fds) != 0) {
        bt_buf_fini(&folder);
        return bt_err_set(err, BT_ERR_IO, "pipe: %s", strerror(errno));
    }
    pid_t pid = fork();

    if (pid == 0) {
        run_script(fds[1], folder.data);
    }
    close(fds[1]);
    while (pid > 0 && ((n = read(fds[0], chunk, sizeof chunk)) > 0 || (n < 0 && errno == EINTR))) {
        if (n < 0) {
            (void)kill(pid, SIGINT); /* only `baton up` handles signals, and those that stop it */
        } else if (!bt_buf_add(path, chunk, (size_t)n)) {
            break;
        }
    }
    close(fds[0]);
    bt_buf_fini(&folder);
    while (pid > 0 && waitpid(pid, &status, 0) != pid && errno == EINTR) {
        (void)kill(pid, SIGINT);
    }
    if (pid < 0) {
        return bt_err_set(err, BT_ERR_IO, "cannot run python3: %s", strerror(errno));
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
        return bt_err_set(err, BT_ERR_NOT_FOUND,
                          "python3 is needed to fetch the model; install it or give --model PATH");
    }
    while (path->len > 0 && path->data[path->len - 1] == '\n') {
        path->data[--path->len] = '\0';
    }
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0 || path->len == 0) {
        return bt_err_set(err, BT_ERR_IO, "the model was not fetched");
    }
    return BT_OK;
}

int bt_cli_fetch(int argc, char **argv)
{
    const struct bt_prog prog = {
        .name = "baton fetch",
        .summary = "Brings SmolLM2-135M-Instruct (93 MB, Apache-2.0) into the cache folder, once, "
                   "and prints its path.",
        .epilogue = "Example, for daemons started by hand:\n"
                    "  baton-router --model \"$(baton fetch)\"\n",
    };
    struct bt_opt_result res = {0};
    struct bt_err err = {0};
    struct bt_buf path = {0};

    if (bt_opt_parse(&prog, argc, argv, NULL, &res, &err) != BT_OK) {
        fprintf(stderr, "baton fetch: %s\n", err.msg);
        return 2;
    }
    if (res.exit_now) {
        return 0;
    }
    enum bt_status st = bt_cli_fetch_model(&path, &err);

    if (st == BT_OK) {
        printf("%s\n", path.data);
    } else {
        fprintf(stderr, "baton fetch: %s\n", err.msg);
    }
    bt_buf_fini(&path);
    return st == BT_OK ? 0 : 1;
}
