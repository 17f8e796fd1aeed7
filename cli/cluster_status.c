/* baton status: asks the router, once or every second, and shows what it says. */

#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/clock.h"
#include "cli/cli.h"
#include "cli/client.h"
#include "cli/status_draw.h"

#define TIMEOUT_NS   (5 * BT_NS_PER_S)
#define ARENA_MAX    ((size_t)64 << 20)
#define PLAIN_WIDTH  200 /* of what goes into a file or a pipe */
#define PLAIN_HEIGHT 2000

struct status_cfg {
    struct bt_client_cfg conn;
    bool watch;
};

static const struct bt_opt options[] = {
    BT_CLIENT_ROWS(struct status_cfg),
    {"watch", BT_OPT_BOOL, offsetof(struct status_cfg, watch), NULL, 0, 0, NULL, NULL,
     "Show it again every second until Ctrl-C."},
};

/* One answer; it lives in the arena. */
static enum bt_status ask(struct bt_client *client, struct bt_arena *arena,
                          struct bt_inf_cluster *out, struct bt_err *err)
{
    struct bt_buf request = {0}, reply = {0};
    enum bt_status st =
        bt_client_unary(client, BT_INF_GET_CLUSTER, &request, &reply, TIMEOUT_NS, err);

    if (st == BT_OK) {
        st = bt_inf_cluster_decode(reply.data, reply.len, arena, out, err);
    }
    bt_buf_fini(&reply);
    return st;
}

static enum bt_status show(struct bt_client *client, struct bt_err *err)
{
    struct bt_arena arena;
    struct bt_inf_cluster c;
    struct bt_buf out = {0};

    bt_arena_init(&arena, ARENA_MAX);
    enum bt_status st = ask(client, &arena, &c, err);

    if (st == BT_OK) {
        bt_status_table(&c, &out);
        (void)fwrite(out.data, 1, out.len, stdout);
    }
    bt_buf_fini(&out);
    bt_arena_fini(&arena);
    return st;
}

/* ---- watch ---- */

struct watch {
    struct bt_client *client;
    struct bt_status_sample before;
    bool terminal, seen; /* an answer came once */
};

/* Writes over what was there, so that nothing flickers; below what is new, the screen is cleared. */
static void paint(const struct watch *w, const struct bt_buf *text)
{
    if (!w->terminal) {
        (void)fwrite(text->data, 1, text->len, stdout);
        putchar('\n');
        return;
    }
    printf("\033[H");
    for (const char *p = text->data; *p != '\0';) {
        size_t n = strcspn(p, "\n");

        printf("%.*s\033[K%s", (int)n, p, p[n] == '\n' && p[n + 1] != '\0' ? "\n" : "");
        p += n + (p[n] == '\n');
    }
    printf("\033[J");
}

static enum bt_status watch_once(struct watch *w, struct bt_err *err)
{
    struct bt_arena arena;
    struct bt_inf_cluster c;
    struct bt_status_sample now = {0};
    struct bt_buf out = {0};
    int width = w->terminal ? bt_cli_width(STDOUT_FILENO) : PLAIN_WIDTH;

    bt_arena_init(&arena, ARENA_MAX);
    enum bt_status st = ask(w->client, &arena, &c, err);

    if (st == BT_OK) {
        w->seen = true;
        bt_status_sample_take(&now, &c, bt_clock_ns());
        bt_status_screen(&c, &w->before, &now, width,
                         w->terminal ? bt_cli_height(STDOUT_FILENO) : PLAIN_HEIGHT, &out);
        w->before = now;
    } else if (w->seen && st != BT_ERR_CANCELLED) {
        bt_buf_addf(&out, "%.*s\n", width, err->msg); /* it may come back */
        w->before = (struct bt_status_sample){0};
        st = BT_OK;
    }
    if (st == BT_OK && !out.failed) {
        paint(w, &out);
        fflush(stdout);
    }
    bt_buf_fini(&out);
    bt_arena_fini(&arena);
    return st;
}

static enum bt_status watch(struct bt_client *client, struct bt_err *err)
{
    struct watch w = {.client = client, .terminal = isatty(STDOUT_FILENO) != 0};
    enum bt_status st = bt_client_catch_interrupt(client);
    bool stop = false;

    if (w.terminal) {
        printf("\033[2J");
    }
    while (st == BT_OK && !stop) {
        uint64_t until = bt_clock_ns() + BT_NS_PER_S;

        st = watch_once(&w, err);
        while (st == BT_OK && bt_clock_ns() < until && !stop) {
            bt_client_idle(client, 50 * BT_NS_PER_MS);
            stop = bt_client_interrupted(client);
        }
    }
    if (w.terminal) {
        putchar('\n');
    }
    return st == BT_ERR_CANCELLED ? BT_OK : st; /* Ctrl-C is how a watch ends */
}

int bt_cli_status(int argc, char **argv)
{
    const struct bt_prog prog = {
        .name = "baton status",
        .summary = "Shows the nodes of a cluster: roles, load, KV pages, transports.",
        .opts = options,
        .n_opts = sizeof options / sizeof options[0],
    };
    struct status_cfg cfg = {0};
    struct bt_opt_result res = {0};
    struct bt_err err = {0};
    struct bt_client *client = NULL;

    if (bt_opt_parse(&prog, argc, argv, &cfg, &res, &err) != BT_OK) {
        fprintf(stderr, "baton status: %s\n", err.msg);
        return 2;
    }
    if (res.exit_now) {
        bt_opt_free(&prog, &cfg);
        return 0;
    }
    enum bt_status st = bt_client_create(&cfg.conn, &client, &err);

    if (st == BT_OK) {
        st = cfg.watch ? watch(client, &err) : show(client, &err);
    }
    if (st != BT_OK) {
        fprintf(stderr, "baton status: %s\n", err.msg);
    }
    bt_client_destroy(client);
    bt_opt_free(&prog, &cfg);
    return st == BT_OK ? 0 : 1;
}
