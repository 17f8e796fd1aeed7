/* baton chat: a conversation in the terminal, streaming, with history. Ctrl-C stops the answer,
 * Ctrl-D or /exit ends. */

#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/mem.h"
#include "cli/cli.h"
#include "cli/client.h"
#include "cli/sampling_options.h"

#define HISTORY_MAX     4096u
#define HELLO_NS        (5 * BT_NS_PER_S)
#define HELLO_ARENA_MAX ((size_t)64 << 20)

struct chat_cfg {
    struct bt_client_cfg conn;
    struct bt_cli_sampling sampling;
    bool timings;
    char *system;
};

static const struct bt_opt options[] = {
    BT_CLIENT_ROWS(struct chat_cfg),
    BT_CLI_SAMPLING_ROWS(struct chat_cfg, "0.6", "0.05"),
    {"system", BT_OPT_STR, offsetof(struct chat_cfg, system), NULL, 0, 0, NULL, "TEXT",
     "System message to begin with."},
    {"timings", BT_OPT_BOOL, offsetof(struct chat_cfg, timings), NULL, 0, 0, NULL, NULL,
     "Show after each answer where each millisecond went."},
};

struct chat {
    const struct chat_cfg *cfg;
    struct bt_client *client;
    struct bt_inf_message messages[HISTORY_MAX];
    char *memory[HISTORY_MAX]; /* of the contents */
    size_t n;
    struct bt_buf answer, line, input;
    bool eof;
    bool has_timings;
    struct bt_inf_usage usage;
    struct bt_inf_timings timings;
};

static bool history_add(struct chat *ch, const char *role, const char *content)
{
    char *copy = ch->n < HISTORY_MAX ? bt_strdup(content) : NULL;

    if (copy == NULL) {
        return false;
    }
    ch->memory[ch->n] = copy;
    ch->messages[ch->n++] = (struct bt_inf_message){.role = role, .content = copy};
    return true;
}

static void history_clear(struct chat *ch)
{
    while (ch->n > 0) {
        bt_free(ch->memory[--ch->n]);
    }
    if (ch->cfg->system != NULL && !history_add(ch, "system", ch->cfg->system)) {
        fprintf(stderr, "baton chat: out of memory\n");
    }
}

static void on_delta(void *arg, const struct bt_inf_generated *m)
{
    struct chat *ch = arg;

    fwrite(m->text, 1, m->text_len, stdout);
    fflush(stdout);
    (void)bt_buf_add(&ch->answer, m->text, m->text_len); /* answer.failed tells */
    if (m->has_usage) {
        ch->usage = m->usage;
    }
    if (m->has_timings) {
        ch->has_timings = true;
        ch->timings = m->timings;
    }
}

/* Waits for a line while signals are served. false: end of input. */
static bool read_line(struct chat *ch)
{
    char chunk[4096];

    bt_buf_clear(&ch->line);
    for (;;) {
        char *nl = ch->input.len > 0 ? memchr(ch->input.data, '\n', ch->input.len) : NULL;

        if (nl != NULL || (ch->eof && ch->input.len > 0)) {
            size_t n = nl != NULL ? (size_t)(nl - ch->input.data) : ch->input.len;

            if (!bt_buf_add(&ch->line, ch->input.data, n) || !bt_buf_addc(&ch->line, '\0')) {
                return false;
            }
            bt_buf_consume(&ch->input, n + (nl != NULL));
            return true;
        }
        if (ch->eof) {
            return false;
        }
        struct pollfd p = {.fd = STDIN_FILENO, .events = POLLIN};

        bt_client_idle(ch->client, 0);
        if (bt_client_interrupted(ch->client)) {
            printf("\n(Ctrl-D or /exit ends the chat)\n> ");
            fflush(stdout);
        }
        if (poll(&p, 1, 100) > 0) {
            ssize_t n = read(STDIN_FILENO, chunk, sizeof chunk);

            ch->eof = n <= 0;
            if (n > 0 && !bt_buf_add(&ch->input, chunk, (size_t)n)) {
                return false;
            }
        }
    }
}

static void answer(struct chat *ch)
{
    struct bt_err err = {0};
    struct bt_inf_generate req = {
        .input = BT_INF_CHAT,
        .n_messages = ch->n,
        .messages = ch->messages,
        .sampling = bt_cli_sampling_resolve(&ch->cfg->sampling),
        .timings = ch->cfg->timings,
    };

    bt_buf_clear(&ch->answer);
    ch->has_timings = false;
    enum bt_status st = bt_client_generate(ch->client, &req, on_delta, ch, &err);

    printf("\n");
    if (st != BT_OK && st != BT_ERR_CANCELLED) {
        fprintf(stderr, "%s%s%s\n", bt_cli_style(STDERR_FILENO, BT_CLI_RED), err.msg,
                bt_cli_style(STDERR_FILENO, BT_CLI_PLAIN));
        bt_free(ch->memory[--ch->n]); /* the question was not answered: it may be asked again */
        return;
    }
    if (st == BT_ERR_CANCELLED) {
        printf("(stopped)\n");
    } else if (ch->has_timings) {
        fflush(stdout);
        bt_client_print_timings(&ch->timings, &ch->usage);
    }
    if (!history_add(ch, "assistant", ch->answer.len > 0 ? ch->answer.data : "")) {
        fprintf(stderr, "the history is full: /clear begins anew\n");
    }
}

/* Asks who is there, so that a wrong address or key shows before the first question. */
static enum bt_status say_hello(struct chat *ch, struct bt_err *err)
{
    struct bt_buf request = {0}, reply = {0};
    struct bt_arena arena;
    struct bt_inf_cluster cluster;

    bt_arena_init(&arena, HELLO_ARENA_MAX);
    enum bt_status st =
        bt_client_unary(ch->client, BT_INF_GET_CLUSTER, &request, &reply, HELLO_NS, err);

    if (st == BT_OK) {
        st = bt_inf_cluster_decode(reply.data, reply.len, &arena, &cluster, err);
    }
    if (st == BT_OK && isatty(STDIN_FILENO)) {
        printf("%s%s%s on %s\n", bt_cli_style(STDOUT_FILENO, BT_CLI_BOLD), cluster.model,
               bt_cli_style(STDOUT_FILENO, BT_CLI_PLAIN), ch->cfg->conn.server);
    }
    bt_arena_fini(&arena);
    bt_buf_fini(&reply);
    return st;
}

static void converse(struct chat *ch)
{
    bool tty = isatty(STDIN_FILENO);

    history_clear(ch);
    if (tty) {
        printf("%sCtrl-C stops an answer; /clear begins anew; /exit or Ctrl-D ends%s\n",
               bt_cli_style(STDOUT_FILENO, BT_CLI_DIM), bt_cli_style(STDOUT_FILENO, BT_CLI_PLAIN));
    }
    for (;;) {
        if (tty) {
            printf("%s> %s", bt_cli_style(STDOUT_FILENO, BT_CLI_CYAN),
                   bt_cli_style(STDOUT_FILENO, BT_CLI_PLAIN));
            fflush(stdout);
        }
        if (!read_line(ch) || strcmp(ch->line.data, "/exit") == 0) {
            return;
        }
        if (strcmp(ch->line.data, "/clear") == 0) {
            history_clear(ch);
        } else if (ch->line.data[0] != '\0') {
            if (!history_add(ch, "user", ch->line.data)) {
                fprintf(stderr, "the history is full: /clear begins anew\n");
                continue;
            }
            answer(ch);
        }
    }
}

int bt_cli_chat(int argc, char **argv)
{
    const struct bt_prog prog = {
        .name = "baton chat",
        .summary = "Talks to the model: one line, one answer.",
        .opts = options,
        .n_opts = sizeof options / sizeof options[0],
        .epilogue = "Example:\n  baton chat --temperature 0.7 --system \"You answer briefly.\"\n",
    };
    struct chat_cfg cfg = {0};
    struct bt_opt_result res = {0};
    struct bt_err err = {0};

    if (bt_opt_parse(&prog, argc, argv, &cfg, &res, &err) != BT_OK ||
        bt_cli_sampling_check(&cfg.sampling, &err) != BT_OK) {
        fprintf(stderr, "baton chat: %s\n", err.msg);
        return 2;
    }
    if (res.exit_now) {
        bt_opt_free(&prog, &cfg);
        return 0;
    }
    struct chat *ch = bt_calloc(1, sizeof *ch);
    enum bt_status st = ch == NULL ? bt_err_set(&err, BT_ERR_NOMEM, "out of memory") : BT_OK;

    if (st == BT_OK) {
        ch->cfg = &cfg;
        st = bt_client_create(&cfg.conn, &ch->client, &err);
    }
    if (st == BT_OK) {
        st = bt_client_catch_interrupt(ch->client);
    }
    if (st == BT_OK) {
        st = say_hello(ch, &err);
    }
    if (st == BT_OK) {
        converse(ch);
    } else {
        fprintf(stderr, "baton chat: %s\n", err.msg);
    }
    if (ch != NULL) {
        while (ch->n > 0) {
            bt_free(ch->memory[--ch->n]);
        }
        bt_client_destroy(ch->client);
        bt_buf_fini(&ch->answer);
        bt_buf_fini(&ch->line);
        bt_buf_fini(&ch->input);
        bt_free(ch);
    }
    bt_opt_free(&prog, &cfg);
    return st == BT_OK ? 0 : 1;
}
