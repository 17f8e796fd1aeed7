/* baton drain: asks the router to take a node out of service, and waits for it. Owns nothing; knows of the cluster what
 * GetCluster says. */

#include <stdio.h>
#include <string.h>
#include "base/clock.h"
#include "cli/cli.h"
#include "cli/client.h"
#include "proto/admin.h"

#define CALL_NS   (5 * BT_NS_PER_S)
#define LOOK_NS   (200 * BT_NS_PER_MS)
#define ARENA_MAX ((size_t)64 << 20)

struct admin_cfg {
    struct bt_client_cfg conn;
    bool force, no_wait;
    uint64_t timeout;
};

static const struct bt_opt options[] = {
    BT_CLIENT_ROWS(struct admin_cfg),
    {"force", BT_OPT_BOOL, offsetof(struct admin_cfg, force), NULL, 0, 0, NULL, NULL,
     "Also the last node of its role: requests are refused from then on."},
    {"no-wait", BT_OPT_BOOL, offsetof(struct admin_cfg, no_wait), NULL, 0, 0, NULL, NULL,
     "Return as soon as the node was told."},
    {"timeout", BT_OPT_DURATION, offsetof(struct admin_cfg, timeout), "2min", 0, 86400e9, NULL,
     "MS", "Wait at most so long, in ms; the node goes on."},
};

/* A node as the router sees it now. */
struct seen {
    bool there;
    uint32_t waiting, running;
    char state[64];
};

static enum bt_status look(struct bt_client *client, const char *instance, struct seen *out,
                           struct bt_err *err)
{
    struct bt_buf request = {0}, reply = {0};
    struct bt_arena arena;
    struct bt_inf_cluster c;

    *out = (struct seen){0};
    bt_arena_init(&arena, ARENA_MAX);
    enum bt_status st = bt_client_unary(client, BT_INF_GET_CLUSTER, &request, &reply, CALL_NS, err);

    if (st == BT_OK) {
        st = bt_inf_cluster_decode(reply.data, reply.len, &arena, &c, err);
    }
    for (size_t i = 0; st == BT_OK && i < c.n_nodes; i++) {
        if (strcmp(c.nodes[i].instance, instance) == 0) {
            out->there = true;
            out->waiting = c.nodes[i].waiting;
            out->running = c.nodes[i].running;
            snprintf(out->state, sizeof out->state, "%s", c.nodes[i].state);
        }
    }
    bt_buf_fini(&reply);
    bt_arena_fini(&arena);
    return st;
}

/* Until the node is gone; one line whenever what it still has changes. */
static enum bt_status wait_gone(struct bt_client *client, const char *name, const char *instance,
                                uint64_t timeout_ns, struct bt_err *err)
{
    uint64_t end = bt_clock_ns() + timeout_ns;
    struct seen now, before = {.running = UINT32_MAX};

    for (;;) {
        enum bt_status st = look(client, instance, &now, err);

        if (st != BT_OK) {
            return st;
        }
        if (!now.there) {
            printf("%s has ended\n", name);
            return BT_OK;
        }
        if (now.running != before.running || now.waiting != before.waiting) {
            printf("%s drains: %u running, %u waiting\n", name, now.running, now.waiting);
            fflush(stdout);
        }
        before = now;
        if (bt_clock_ns() >= end) {
            return bt_err_set(err, BT_ERR_TIMEOUT, "%s still drains after %llu ms; it goes on",
                              name, (unsigned long long)(timeout_ns / BT_NS_PER_MS));
        }
        bt_client_idle(client, LOOK_NS);
    }
}

static enum bt_status drain(const struct admin_cfg *cfg, const char *node, struct bt_err *err)
{
    struct bt_client *client = NULL;
    struct bt_buf request = {0}, reply = {0};
    struct bt_arena arena;
    struct bt_admin_node answer;

    bt_arena_init(&arena, ARENA_MAX);
    enum bt_status st = bt_client_create(&cfg->conn, &client, err);

    if (st == BT_OK) {
        st = bt_admin_drain_encode(&(struct bt_admin_drain){node, cfg->force}, &request);
    }
    if (st == BT_OK) {
        st = bt_client_unary(client, BT_ADMIN_DRAIN, &request, &reply, CALL_NS, err);
    }
    if (st == BT_OK) {
        st = bt_admin_node_decode(reply.data, reply.len, &arena, &answer, err);
    }
    if (st == BT_OK && !cfg->no_wait) {
        st = wait_gone(client, answer.name, answer.instance, cfg->timeout, err);
    }
    bt_buf_fini(&request);
    bt_buf_fini(&reply);
    bt_arena_fini(&arena);
    bt_client_destroy(client);
    return st;
}

int bt_cli_drain(int argc, char **argv)
{
    const struct bt_prog prog = {
        .name = "baton drain",
        .summary =
            "Takes a node out of service: new work goes elsewhere, running work ends or moves "
            "within the node's\n--drain-timeout, then the process ends. Waits for that.",
        .usage = "[options] NODE",
        .opts = options,
        .n_opts = sizeof options / sizeof options[0],
        .positionals = true,
        .epilogue = "NODE is a name as in `baton status`, or an instance (16 hex digits).\n",
    };
    struct admin_cfg cfg = {0};
    struct bt_opt_result res = {0};
    struct bt_err err = {0};
    enum bt_status st = BT_OK;

    if (bt_opt_parse(&prog, argc, argv, &cfg, &res, &err) != BT_OK) {
        fprintf(stderr, "baton drain: %s\n", err.msg);
        return 2;
    }
    if (res.exit_now) {
        bt_opt_free(&prog, &cfg);
        return 0;
    }
    if (res.n_positional != 1) {
        fprintf(stderr, "baton drain: one NODE is needed; `baton status` lists them\n");
        bt_opt_free(&prog, &cfg);
        return 2;
    }
    st = drain(&cfg, res.positional[0], &err);
    if (st != BT_OK) {
        fprintf(stderr, "baton drain: %s\n", err.msg);
    }
    bt_opt_free(&prog, &cfg);
    return st == BT_OK ? 0 : 1;
}
