/* baton complete: continues a text from the command line or standard input, streaming. */

#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/mem.h"
#include "cli/cli.h"
#include "cli/client.h"
#include "cli/sampling_options.h"

struct complete_cfg {
    struct bt_client_cfg conn;
    struct bt_cli_sampling sampling;
    bool timings, chat;
};

static const struct bt_opt options[] = {
    BT_CLIENT_ROWS(struct complete_cfg),
    BT_CLI_SAMPLING_ROWS(struct complete_cfg, "-1", "-1"),
    {"chat", BT_OPT_BOOL, offsetof(struct complete_cfg, chat), NULL, 0, 0, NULL, NULL,
     "Send the text as a user's message through the model's chat template."},
    {"timings", BT_OPT_BOOL, offsetof(struct complete_cfg, timings), NULL, 0, 0, NULL, NULL,
     "Show where each millisecond went, on standard error."},
};

struct printing {
    bool any; /* text came */
    bool has_usage, has_timings;
    struct bt_inf_usage usage;
    struct bt_inf_timings timings;
};

static void on_delta(void *arg, const struct bt_inf_generated *m)
{
    struct printing *p = arg;

    fwrite(m->text, 1, m->text_len, stdout);
    fflush(stdout);
    p->any = p->any || m->text_len > 0;
    if (m->has_usage) {
        p->has_usage = true;
        p->usage = m->usage;
    }
    if (m->has_timings) {
        p->has_timings = true;
        p->timings = m->timings;
    }
}

/* The positionals joined by blanks, or all of standard input. */
static bool read_prompt(const struct bt_opt_result *res, struct bt_buf *out)
{
    char chunk[65536];
    size_t n;

    for (int i = 0; i < res->n_positional; i++) {
        if ((i > 0 && !bt_buf_addc(out, ' ')) || !bt_buf_adds(out, res->positional[i])) {
            return false;
        }
    }
    if (res->n_positional > 0) {
        return true;
    }
    if (isatty(STDIN_FILENO)) {
        fprintf(stderr, "reading the text from the terminal; Ctrl-D ends it\n");
    }
    while ((n = fread(chunk, 1, sizeof chunk, stdin)) > 0) {
        if (!bt_buf_add(out, chunk, n)) {
            return false;
        }
    }
    return true;
}

static int complete(const struct complete_cfg *cfg, const struct bt_buf *prompt)
{
    struct bt_client *c = NULL;
    struct bt_err err = {0};
    struct printing p = {0};
    struct bt_inf_message message = {
        .role = "user", .content = prompt->data, .content_len = prompt->len};
    struct bt_inf_generate req = {
        .input = cfg->chat ? BT_INF_CHAT : BT_INF_TEXT,
        .text = prompt->data,
        .text_len = prompt->len,
        .n_messages = 1,
        .messages = &message,
        .sampling = bt_cli_sampling_resolve(&cfg->sampling),
        .timings = cfg->timings,
    };
    enum bt_status st = bt_client_create(&cfg->conn, &c, &err);

    if (st == BT_OK) {
        st = bt_client_catch_interrupt(c);
    }
    if (st == BT_OK) {
        st = bt_client_generate(c, &req, on_delta, &p, &err);
        if (st == BT_OK || p.any) {
            putchar('\n');
        }
        fflush(stdout); /* before what follows on standard error */
    }
    if (st == BT_OK && p.has_timings) {
        bt_client_print_timings(&p.timings, &p.usage);
    }
    if (st != BT_OK) {
        fprintf(stderr, "baton complete: %s\n", err.msg);
    }
    bt_client_destroy(c);
    return st == BT_OK ? 0 : st == BT_ERR_CANCELLED ? 130 : 1;
}

int bt_cli_complete(int argc, char **argv)
{
    const struct bt_prog prog = {
        .name = "baton complete",
        .summary = "Continues a text: the arguments, or standard input without any.",
        .usage = "[options] [TEXT...]",
        .opts = options,
        .n_opts = sizeof options / sizeof options[0],
        .positionals = true,
        .epilogue = "Example:\n  baton complete --max-tokens 40 --timings \"Once upon a time\"\n",
    };
    struct complete_cfg cfg = {0};
    struct bt_opt_result res = {0};
    struct bt_err err = {0};
    struct bt_buf prompt = {0};
    int rc = 1;

    if (bt_opt_parse(&prog, argc, argv, &cfg, &res, &err) != BT_OK ||
        bt_cli_sampling_check(&cfg.sampling, &err) != BT_OK) {
        fprintf(stderr, "baton complete: %s\n", err.msg);
        return 2;
    }
    if (res.exit_now) {
        rc = 0;
    } else if (!read_prompt(&res, &prompt)) {
        fprintf(stderr, "baton complete: out of memory\n");
    } else if (prompt.len == 0 || strlen(prompt.data) != prompt.len) {
        fprintf(stderr, "baton complete: the prompt is empty or has a NUL byte in it\n");
        rc = 2;
    } else {
        rc = complete(&cfg, &prompt);
    }
    bt_buf_fini(&prompt);
    bt_opt_free(&prog, &cfg);
    return rc;
}
