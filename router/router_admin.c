/* What those who run the cluster ask of nodes: found by name, checked, told. Refuses to know how they asked. */

#include <stdio.h>
#include <stdlib.h>
#include "base/log.h"
#include "router/router_core_int.h"

static bool is_instance(const char *text, uint64_t instance)
{
    char hex[17];

    snprintf(hex, sizeof hex, "%016llx", (unsigned long long)instance);
    return strcmp(text, hex) == 0;
}

/* By name or instance. BT_ERR_NOT_FOUND, with the names that there are; BT_ERR_INVALID: several. */
static enum bt_status find(struct bt_rt_core *c, const char *node, struct rt_node **out,
                           struct bt_err *err)
{
    char names[256] = "";
    size_t len = 0;

    *out = NULL;
    for (uint32_t i = 0; i < c->n_slots; i++) {
        struct rt_node *n = &c->nodes[i];

        if (n->session == 0 || !n->hello_seen) {
            continue;
        }
        if (is_instance(node, n->hello.instance)) {
            *out = n;
            return BT_OK;
        }
        if (len < sizeof names) {
            len += (size_t)snprintf(names + len, sizeof names - len, "%s%s", len > 0 ? ", " : "",
                                    n->hello.name);
        }
        if (strcmp(node, n->hello.name) == 0 && *out != NULL) {
            return bt_err_set(
                err, BT_ERR_INVALID,
                "several nodes are called %s: name one by its instance, %016llx or %016llx", node,
                (unsigned long long)(*out)->hello.instance, (unsigned long long)n->hello.instance);
        }
        *out = strcmp(node, n->hello.name) == 0 ? n : *out;
    }
    return *out != NULL
               ? BT_OK
               : bt_err_set(err, BT_ERR_NOT_FOUND, "no node is called \"%.64s\"; connected: %s",
                            node, names[0] != '\0' ? names : "none");
}

/* Another node does what n does in that role, for the kind of nodes that is in use. */
static bool replaceable(const struct bt_rt_core *c, const struct rt_node *n, enum bt_role role)
{
    if (n->ident != c->served || (role == BT_ROLE_PREFILL && bt_rt_local_only(c))) {
        return true;
    }
    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *m = &c->nodes[i];

        if (m != n && m->ident == n->ident && bt_rt_usable(m, role)) {
            return true;
        }
    }
    return false;
}

enum bt_status bt_rt_drain(struct bt_rt_core *c, uint64_t now, const char *node, bool force,
                           uint64_t *instance, struct bt_err *err)
{
    struct rt_node *n = NULL;
    enum bt_status st = find(c, node, &n, err);

    if (st != BT_OK) {
        return st;
    }
    if (n->version < BT_SESSION_VERSION_ADMIN) {
        return bt_err_set(
            err, BT_ERR_UNSUPPORTED,
            "node %s speaks session protocol %u and cannot be told to drain: send its "
            "process SIGTERM",
            n->hello.name, n->version);
    }
    if (n->draining) {
        return bt_err_set(err, BT_ERR_INVALID, "node %s drains already", n->hello.name);
    }
    for (enum bt_role leg = BT_ROLE_PREFILL; leg < BT_LEGS; leg++) {
        if (!force && bt_role_has(n->hello.role, leg) && !replaceable(c, n, leg)) {
            return bt_err_set(err, BT_ERR_INVALID,
                              "node %s is the last %s node: without it no request is served (force "
                              "drains it all the same)",
                              n->hello.name, bt_role_name(leg));
        }
    }
    struct bt_rt_action *a = bt_rt_act(c, BT_RT_SEND);

    a->session = n->session;
    a->send.kind = BT_FROM_ROUTER_DRAIN;
    *instance = n->hello.instance;
    bt_rt_node_drains(c, now, n, "asked to");
    return BT_OK;
}
