/* baton.v1.Admin over gRPC: checks the key, asks the core, answers. Decides nothing. */

#include "router/admin_grpc.h"

#include <stdio.h>
#include <string.h>
#include "net/grpc.h"
#include "net/loop.h"
#include "proto/admin.h"
#include "router/router_int.h"

#define REQUEST_ARENA ((size_t)1 << 20)

static void fail(struct bt_grpc_call *call, enum bt_status st, const char *text)
{
    bt_grpc_fail(call,
                 st == BT_ERR_PROTOCOL      ? BT_GRPC_INVALID_ARGUMENT
                 : st == BT_ERR_NOT_FOUND   ? BT_GRPC_NOT_FOUND
                 : st == BT_ERR_UNSUPPORTED ? BT_GRPC_UNIMPLEMENTED
                                            : BT_GRPC_FAILED_PRECONDITION,
                 "%s", text);
}

static void reply_node(struct bt_grpc_call *call, const char *name, uint64_t instance)
{
    struct bt_buf b = {0};
    char hex[17];

    snprintf(hex, sizeof hex, "%016llx", (unsigned long long)instance);
    if (bt_admin_node_encode(&(struct bt_admin_node){name, hex}, &b) == BT_OK) {
        bt_grpc_reply(call, b.data, b.len);
    } else {
        bt_grpc_fail(call, BT_GRPC_RESOURCE_EXHAUSTED, "out of memory");
    }
    bt_buf_fini(&b);
}

static void drain_message(struct bt_grpc_call *call, void *user, const uint8_t *data, size_t len)
{
    struct bt_router *r = user;
    struct bt_arena a;
    struct bt_admin_drain m;
    struct bt_err err = {0};
    uint64_t instance = 0;

    bt_arena_init(&a, REQUEST_ARENA);
    enum bt_status st = bt_admin_drain_decode(data, len, &a, &m, &err);

    if (st == BT_OK) {
        st = bt_rt_drain(r->core, bt_net_loop_now(r->loop), m.node, m.force, &instance, &err);
    }
    if (st == BT_OK) {
        reply_node(call, bt_rt_core_instance_name(r->core, instance), instance);
        bt_router_kick(r);
    } else {
        fail(call, st, err.msg);
    }
    bt_arena_fini(&a);
}

static void set_role_message(struct bt_grpc_call *call, void *user, const uint8_t *data, size_t len)
{
    struct bt_router *r = user;
    struct bt_arena a;
    struct bt_admin_set_role m;
    struct bt_err err = {0};
    enum bt_role role = BT_ROLE_BOTH;
    uint64_t instance = 0;

    bt_arena_init(&a, REQUEST_ARENA);
    enum bt_status st = bt_admin_set_role_decode(data, len, &a, &m, &err);

    if (st == BT_OK && !bt_role_parse(m.role, &role)) {
        st = bt_err_set(&err, BT_ERR_PROTOCOL, "role \"%.40s\": must be prefill, decode or both",
                        m.role);
    }
    if (st == BT_OK) {
        st = bt_rt_set_role(r->core, bt_net_loop_now(r->loop), m.node, role, m.force, &instance,
                            &err);
    }
    if (st == BT_OK) {
        reply_node(call, bt_rt_core_instance_name(r->core, instance), instance);
        bt_router_kick(r);
    } else {
        fail(call, st, err.msg);
    }
    bt_arena_fini(&a);
}

/* Who may: router_keys.c knows. */
static void bind(struct bt_grpc_call *call, struct bt_router *r,
                 const struct bt_grpc_events *events)
{
    struct bt_api_err e = {0};

    if (bt_router_may_administer(r, bt_grpc_metadata(call, "authorization"), bt_grpc_peer(call),
                                 &e)) {
        bt_grpc_bind(call, events, r);
    } else {
        bt_grpc_fail(call, (enum bt_grpc_status)bt_api_grpc_status(e.code), "%s", e.msg);
    }
}

static void on_drain(struct bt_grpc_call *call, void *arg)
{
    static const struct bt_grpc_events events = {.on_message = drain_message};

    bind(call, arg, &events);
}

static void on_set_role(struct bt_grpc_call *call, void *arg)
{
    static const struct bt_grpc_events events = {.on_message = set_role_message};

    bind(call, arg, &events);
}

static const struct bt_grpc_method methods[] = {{BT_ADMIN_DRAIN, BT_GRPC_UNARY, on_drain},
                                                {BT_ADMIN_SET_ROLE, BT_GRPC_UNARY, on_set_role}};

enum bt_status bt_admin_grpc_add(struct bt_grpc_server *g, struct bt_router *r)
{
    size_t len = 0;
    const uint8_t *descriptor = bt_admin_descriptor(&len);
    enum bt_status st = bt_grpc_server_add(g, methods, sizeof methods / sizeof methods[0], r);

    return st == BT_OK ? bt_grpc_reflection_add(g, descriptor, len) : st;
}
