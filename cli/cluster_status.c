/* baton status: the cluster as a table. */

#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/clock.h"
#include "cli/cli.h"
#include "cli/client.h"

#define TIMEOUT_NS     (5 * BT_NS_PER_S)
#define NAME_WIDTH_MIN 10
#define ARENA_MAX      ((size_t)64 << 20)

struct status_cfg {
    struct bt_client_cfg conn;
    bool watch;
};

static const struct bt_opt options[] = {
    BT_CLIENT_ROWS(struct status_cfg),
    {"watch", BT_OPT_BOOL, offsetof(struct status_cfg, watch), NULL, 0, 0, NULL, NULL,
     "Show it again every second until Ctrl-C."},
};

/* The state up to its reason, which print_details() gives a line of its own. */
static void print_node(const struct bt_inf_node *n, int width)
{
    uint32_t total = n->pages_free + n->pages_cached + n->pages_leased + n->pages_quarantined;
    bool ready = strcmp(n->state, "ready") == 0;

    printf("%-*s %-8s %s%-10.*s%s %7u %7u %8u %8u %8u %6u %6u  %.8s\n", width, n->name, n->role,
           bt_cli_style(STDOUT_FILENO, ready ? BT_CLI_GREEN : BT_CLI_YELLOW),
           (int)strcspn(n->state, ":"), n->state, bt_cli_style(STDOUT_FILENO, BT_CLI_PLAIN),
           n->waiting, n->running, total, n->pages_free, n->pages_cached, n->pages_leased,
           n->pages_quarantined, n->instance);
}

static void print_details(const struct bt_inf_node *n, int width)
{
    printf("%-*s %s; kv %s; model %s\n", width, n->name, n->backend, n->kv_layout, n->fingerprint);
    if (strchr(n->state, ':') != NULL) {
        printf("%-*s %s%s%s\n", width, "", bt_cli_style(STDOUT_FILENO, BT_CLI_YELLOW), n->state,
               bt_cli_style(STDOUT_FILENO, BT_CLI_PLAIN));
    }
    if (n->transfer_address[0] != '\0') {
        printf("%-*s takes KV pages at %s\n", width, "", n->transfer_address);
    }
    for (size_t i = 0; i < n->n_transports; i++) {
        printf("%-*s kv with %s over %s\n", width, "", n->transports[i].peer,
               n->transports[i].description);
    }
}

static void print_cluster(const struct bt_inf_cluster *c)
{
    int width = NAME_WIDTH_MIN;

    printf("%smodel %s%s, %u requests running, %u waiting, router %.8s\n\n",
           bt_cli_style(STDOUT_FILENO, BT_CLI_BOLD), c->model,
           bt_cli_style(STDOUT_FILENO, BT_CLI_PLAIN), c->requests_running, c->requests_waiting,
           c->router_instance);
    if (c->n_nodes == 0) {
        printf("no nodes are connected\n");
        return;
    }
    for (size_t i = 0; i < c->n_nodes; i++) {
        int len = (int)strlen(c->nodes[i].name);

        width = len > width ? len : width;
    }
    printf("%-*s %-8s %-10s %7s %7s %8s %8s %8s %6s %6s  %s\n", width, "node", "role", "state",
           "waiting", "running", "KV pages", "free", "cached", "leased", "quar.", "instance");
    for (size_t i = 0; i < c->n_nodes; i++) {
        print_node(&c->nodes[i], width);
    }
    printf("\n");
    for (size_t i = 0; i < c->n_nodes; i++) {
        print_details(&c->nodes[i], width);
    }
}

static enum bt_status show(struct bt_client *client, struct bt_err *err)
{
    struct bt_buf request = {0}, reply = {0};
    struct bt_arena arena;
    struct bt_inf_cluster cluster;

    bt_arena_init(&arena, ARENA_MAX);
    enum bt_status st =
        bt_client_unary(client, BT_INF_GET_CLUSTER, &request, &reply, TIMEOUT_NS, err);

    if (st == BT_OK) {
        st = bt_inf_cluster_decode(reply.data, reply.len, &arena, &cluster, err);
    }
    if (st == BT_OK) {
        print_cluster(&cluster);
    }
    bt_arena_fini(&arena);
    bt_buf_fini(&reply);
    return st;
}

static enum bt_status watch(struct bt_client *client, struct bt_err *err)
{
    enum bt_status st = bt_client_catch_interrupt(client);

    while (st == BT_OK && !bt_client_interrupted(client)) {
        uint64_t until = bt_clock_ns() + BT_NS_PER_S;

        printf("\033[H\033[2J");
        st = show(client, err);
        fflush(stdout);
        while (st == BT_OK && bt_clock_ns() < until) {
            bt_client_idle(client, 50 * BT_NS_PER_MS);
        }
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
