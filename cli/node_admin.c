/* baton drain, baton role: ask the router to take a node out of service or to change what it does, and wait for it. Own
 * nothing; know of the cluster what GetCluster says. */

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
    char *admin_key;
    bool force, no_wait;
    uint64_t timeout;
};

static const struct bt_opt options[] = {
    BT_CLIENT_ROWS(struct admin_cfg),
    {"admin-key", BT_OPT_STR, offsetof(struct admin_cfg, admin_key), NULL, 0, 0, NULL, "KEY",
     "Key that administers, where the router has some (--admin-key-file); otherwise this is done "
     "on "
     "the router's machine."},
    {"force", BT_OPT_BOOL, offsetof(struct admin_cfg, force), NULL, 0, 0, NULL, NULL,
     "Also if no other node does what this one did: requests are refused from then on."},
    {"no-wait", BT_OPT_BOOL, offsetof(struct admin_cfg, no_wait), NULL, 0, 0, NULL, NULL,
     "Return as soon as the node was told."},
    {"timeout", BT_OPT_DURATION, offsetof(struct admin_cfg, timeout), "2min", 0, 86400e9, NULL,
     "MS", "Wait at most so long, in ms; the node goes on."},
};

/* A node as the router sees it now. */
struct seen {
    bool there;
    uint32_t waiting, running;
    char state[64], role[16];
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
            snprintf(out->role, sizeof out->role, "%s", c.nodes[i].role);
        }
    }
    bt_buf_fini(&reply);
    bt_arena_fini(&arena);
    return st;
}

/* What a command waits for. */
struct goal {
    const char *role; /* to serve as that, with nothing of its former role left; NULL: to be gone */
    const char *doing;
};

static bool reached(const struct goal *g, const struct seen *now)
{
    return g->role == NULL
               ? !now->there
               : strcmp(now->role, g->role) == 0 && strncmp(now->state, "changing", 8) != 0;
}

/* One line whenever what the node still has changes. */
static enum bt_status wait_for(struct bt_client *client, const struct goal *g,
                               const struct bt_admin_node *node, uint64_t timeout_ns,
                               struct bt_err *err)
{
    uint64_t end = bt_clock_ns() + timeout_ns;
    struct seen now, before = {.running = UINT32_MAX};

    for (;;) {
        enum bt_status st = look(client, node->instance, &now, err);

        if (st != BT_OK) {
            return st;
        }
        if (reached(g, &now)) {
            printf("%s %s%s\n", node->name, g->role != NULL ? "serves as " : "has ended",
                   g->role != NULL ? g->role : "");
            return BT_OK;
        }
        if (!now.there) {
            return bt_err_set(err, BT_ERR_NOT_FOUND, "%s is not connected any more", node->name);
        }
        if (now.running != before.running || now.waiting != before.waiting) {
            printf("%s %s: %u running, %u waiting\n", node->name, g->doing, now.running,
                   now.waiting);
            fflush(stdout);
        }
        before = now;
        if (bt_clock_ns() >= end) {
            return bt_err_set(err, BT_ERR_TIMEOUT, "%s still %s after %llu ms; it goes on",
                              node->name, g->doing,
                              (unsigned long long)(timeout_ns / BT_NS_PER_MS));
        }
        bt_client_idle(client, LOOK_NS);
    }
}

/* Calls `path` with the encoded request, then waits. Who may not wait is told before anything has happened. */
static enum bt_status ask(const struct admin_cfg *cfg, const char *path,
                          const struct bt_buf *request, const struct goal *g, struct bt_err *err)
{
    const char *may_look = cfg->conn.api_key != NULL ? cfg->conn.api_key : cfg->admin_key;
    struct bt_client *client = NULL;
    struct bt_buf reply = {0};
    struct bt_arena arena;
    struct bt_admin_node answer;

    bt_arena_init(&arena, ARENA_MAX);
    enum bt_status st = bt_client_create(&cfg->conn, &client, err);

    if (st == BT_OK && !cfg->no_wait) {
        struct seen none;

        bt_client_present(client, may_look);
        st = look(client, "", &none, err);
    }
    if (st == BT_OK) {
        bt_client_present(client, cfg->admin_key != NULL ? cfg->admin_key : cfg->conn.api_key);
        st = bt_client_unary(client, path, request, &reply, CALL_NS, err);
    }
    if (st == BT_OK) {
        st = bt_admin_node_decode(reply.data, reply.len, &arena, &answer, err);
    }
    if (st == BT_OK && !cfg->no_wait) {
        bt_client_present(client, may_look);
        st = wait_for(client, g, &answer, cfg->timeout, err);
    }
    bt_buf_fini(&reply);
    bt_arena_fini(&arena);
    bt_client_destroy(client);
    return st;
}

static enum bt_status drain(const struct admin_cfg *cfg, char **args, struct bt_err *err)
{
    const struct goal gone = {NULL, "drains"};
    struct bt_buf request = {0};
    enum bt_status st =
        bt_admin_drain_encode(&(struct bt_admin_drain){args[0], cfg->force}, &request);

    if (st == BT_OK) {
        st = ask(cfg, BT_ADMIN_DRAIN, &request, &gone, err);
    }
    bt_buf_fini(&request);
    return st;
}

static enum bt_status set_role(const struct admin_cfg *cfg, char **args, struct bt_err *err)
{
    const struct goal changed = {args[1], "changes"};
    struct bt_buf request = {0};
    enum bt_status st = bt_admin_set_role_encode(
        &(struct bt_admin_set_role){args[0], args[1], cfg->force}, &request);

    if (st == BT_OK) {
        st = ask(cfg, BT_ADMIN_SET_ROLE, &request, &changed, err);
    }
    bt_buf_fini(&request);
    return st;
}

typedef enum bt_status admin_fn(const struct admin_cfg *cfg, char **args, struct bt_err *err);

/* want: the positionals, for people. */
static int run(const struct bt_prog *prog, int argc, char **argv, int n_args, const char *want,
               admin_fn *fn)
{
    struct admin_cfg cfg = {0};
    struct bt_opt_result res = {0};
    struct bt_err err = {0};
    int rc = 0;

    if (bt_opt_parse(prog, argc, argv, &cfg, &res, &err) != BT_OK) {
        fprintf(stderr, "%s: %s\n", prog->name, err.msg);
        return 2;
    }
    if (!res.exit_now && res.n_positional != n_args) {
        fprintf(stderr, "%s: %s; `baton status` lists the nodes\n", prog->name, want);
        rc = 2;
    } else if (!res.exit_now && fn(&cfg, res.positional, &err) != BT_OK) {
        fprintf(stderr, "%s: %s\n", prog->name, err.msg);
        rc = 1;
    }
    bt_opt_free(prog, &cfg);
    return rc;
}

#define EPILOGUE "NODE is a name as in `baton status`, or an instance (16 hex digits).\n"

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
        .epilogue = EPILOGUE,
    };

    return run(&prog, argc, argv, 1, "one NODE is needed", drain);
}

int bt_cli_role(int argc, char **argv)
{
    const struct bt_prog prog = {
        .name = "baton role",
        .summary = "Makes a running node serve as something else, without a restart: what it no "
                   "longer does "
                   "goes elsewhere,\nrunning work ends or moves within the node's --drain-timeout. "
                   "Waits for "
                   "that.",
        .usage = "[options] NODE prefill|decode|both",
        .opts = options,
        .n_opts = sizeof options / sizeof options[0],
        .positionals = true,
        .epilogue = EPILOGUE,
    };

    return run(&prog, argc, argv, 2, "a NODE and its new role are needed", set_role);
}
