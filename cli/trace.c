/* baton trace: finds a request in the router's request log and has it drawn. */

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/buf.h"
#include "base/options.h"
#include "cli/cli.h"
#include "cli/trace_draw.h"

struct trace_cfg {
    char *log;
};

static const struct bt_opt options[] = {
    {"log", BT_OPT_STR, offsetof(struct trace_cfg, log), NULL, 0, 0, NULL, "FILE",
     "The file of the router's --request-log (default: $BATON_REQUEST_LOG)."},
};

/* The next line into `line`; false: the end, or an error. */
static bool read_line(FILE *f, struct bt_buf *line)
{
    char piece[4096];

    bt_buf_clear(line);
    while (fgets(piece, sizeof piece, f) != NULL) {
        bt_buf_adds(line, piece);
        if (line->len > 0 && line->data[line->len - 1] == '\n') {
            return true;
        }
    }
    return line->len > 0 && !ferror(f);
}

/* The last line of that request, as ids may come again; left empty if there is none. */
static enum bt_status find_line(const char *path, const char *id, struct bt_buf *found,
                                struct bt_err *err)
{
    struct bt_buf needle = {0}, line = {0};
    FILE *f = fopen(path, "re");

    if (f == NULL) {
        return bt_err_set(err, BT_ERR_IO, "%s: %s", path, strerror(errno));
    }
    bt_buf_adds(&needle, "\"request_id\":");
    bt_buf_add_json_str(&needle, id, strlen(id));
    bt_buf_addc(&needle, ',');
    errno = 0;
    while (!needle.failed && read_line(f, &line)) {
        if (strstr(line.data, needle.data) != NULL) {
            bt_buf_clear(found);
            bt_buf_add(found, line.data, line.len);
        }
    }
    enum bt_status st = BT_OK;

    if (ferror(f)) {
        st = bt_err_set(err, BT_ERR_IO, "%s: %s", path, strerror(errno));
    } else if (line.failed || needle.failed || found->failed) {
        st = bt_err_set(err, BT_ERR_NOMEM, "out of memory");
    }
    (void)fclose(f);
    bt_buf_fini(&needle);
    bt_buf_fini(&line);
    return st;
}

/* OpenAI clients know the request by the id of its answer. */
static const char *without_prefix(const char *id)
{
    static const char *const prefixes[] = {"chatcmpl-", "cmpl-"};

    for (unsigned i = 0; i < 2; i++) {
        if (strncmp(id, prefixes[i], strlen(prefixes[i])) == 0) {
            return id + strlen(prefixes[i]);
        }
    }
    return NULL;
}

static enum bt_status trace(const char *path, const char *id, struct bt_err *err)
{
    struct bt_buf out = {0}, line = {0};
    const char *shorter = without_prefix(id);
    enum bt_status st = find_line(path, id, &line, err);

    if (st == BT_OK && line.len == 0 && shorter != NULL) {
        st = find_line(path, shorter, &line, err);
    }
    if (st == BT_OK && line.len == 0) {
        st = bt_err_set(err, BT_ERR_NOT_FOUND,
                        "%s: no request \"%s\" in it (a request is written when it ends; older "
                        "ones may be in a rotated file)",
                        path, id);
    }
    if (st == BT_OK) {
        st = bt_trace_draw(line.data, line.len, bt_cli_width(STDOUT_FILENO), &out, err);
    }
    if (st == BT_OK) {
        (void)fwrite(out.data, 1, out.len, stdout);
    }
    bt_buf_fini(&line);
    bt_buf_fini(&out);
    return st;
}

int bt_cli_trace(int argc, char **argv)
{
    const struct bt_prog prog = {
        .name = "baton trace",
        .summary = "Draws where the time of one request went, from the router's request log.",
        .usage = "[options] REQUEST_ID",
        .epilogue = "Example:\n"
                    "  baton-router --request-log requests.jsonl ...\n"
                    "  curl -H 'x-request-id: slow-one' ...\n"
                    "  baton trace --log requests.jsonl slow-one\n\n"
                    "The id is the answer's x-request-id header, or the id in its body.\n",
        .opts = options,
        .n_opts = sizeof options / sizeof options[0],
        .positionals = true,
    };
    struct trace_cfg cfg = {0};
    struct bt_opt_result res = {0};
    struct bt_err err = {0};

    if (bt_opt_parse(&prog, argc, argv, &cfg, &res, &err) != BT_OK) {
        fprintf(stderr, "baton trace: %s\n", err.msg);
        return 2;
    }
    if (res.exit_now) {
        bt_opt_free(&prog, &cfg);
        return 0;
    }
    const char *path = cfg.log != NULL ? cfg.log : getenv("BATON_REQUEST_LOG");
    int rc = 2;

    if (res.n_positional != 1) {
        fprintf(stderr, "baton trace: give one request id\n");
    } else if (path == NULL || path[0] == '\0') {
        fprintf(stderr, "baton trace: --log is missing: the file that the router writes with "
                        "--request-log (or set BATON_REQUEST_LOG)\n");
    } else if (trace(path, res.positional[0], &err) != BT_OK) {
        fprintf(stderr, "baton trace: %s\n", err.msg);
        rc = 1;
    } else {
        rc = 0;
    }
    bt_opt_free(&prog, &cfg);
    return rc;
}
