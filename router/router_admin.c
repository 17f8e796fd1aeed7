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

/* The node, if it can be told anything. */
static enum bt_status find_listener(struct bt_rt_core *c, const char *node, const char *what,
                                    struct rt_node **out, struct bt_err *err)
{
    enum bt_status st = find(c, node, out, err);
    const struct rt_node *n = *out;

    if (st != BT_OK) {
        return st;
    }
    if (n->version < BT_SESSION_VERSION_ADMIN) {
        return bt_err_set(err, BT_ERR_UNSUPPORTED,
                          "node %s speaks session protocol %u and cannot be told to %s",
                          n->hello.name, n->version, what);
    }
    return n->draining ? bt_err_set(err, BT_ERR_INVALID, "node %s drains already", n->hello.name)
                       : BT_OK;
}

/* Whether others do what n does and would not do any more: as another role, or not at all (NULL). */
static enum bt_status check_missed(const struct bt_rt_core *c, const struct rt_node *n,
                                   const enum bt_role *as, struct bt_err *err)
{
    for (enum bt_role leg = BT_ROLE_PREFILL; leg < BT_LEGS; leg++) {
        bool kept = as != NULL && bt_role_has(*as, leg);

        if (bt_role_has(n->hello.role, leg) && !kept && !replaceable(c, n, leg)) {
            return bt_err_set(err, BT_ERR_INVALID,
                              "node %s is the last %s node: without it no request is served (force "
                              "does it all the same)",
                              n->hello.name, bt_role_name(leg));
        }
    }
    return BT_OK;
}

/* Names label metrics together with roles. */
static bool name_taken(const struct bt_rt_core *c, const struct rt_node *n, enum bt_role role)
{
    for (uint32_t i = 0; i < c->n_slots; i++) {
        const struct rt_node *m = &c->nodes[i];

        if (m != n && m->session != 0 && m->hello_seen && m->hello.role == role &&
            strcmp(m->hello.name, n->hello.name) == 0) {
            return true;
        }
    }
    return false;
}

static enum bt_status check_role(const struct bt_rt_core *c, const struct rt_node *n,
                                 enum bt_role role, struct bt_err *err)
{
    const char *name = n->hello.name, *as = bt_role_name(role);

    if (n->losing != 0 || n->hello.role == role) {
        return bt_err_set(err, BT_ERR_INVALID,
                          n->losing != 0 ? "node %s is about to change its role; then ask again"
                                         : "node %s serves as %s already",
                          name, as);
    }
    if (bt_role_has(role, BT_ROLE_DECODE) && n->hello.transfer_address[0] == '\0') {
        return bt_err_set(err, BT_ERR_INVALID,
                          "node %s cannot serve as %s: it was started without --transfer, so no KV "
                          "pages can reach it",
                          name, as);
    }
    return name_taken(c, n, role)
               ? bt_err_set(err, BT_ERR_INVALID, "another %s node is called %s, too", as, name)
               : BT_OK;
}

enum bt_status bt_rt_set_role(struct bt_rt_core *c, uint64_t now, const char *node,
                              enum bt_role role, bool force, uint64_t *instance, struct bt_err *err)
{
    struct rt_node *n = NULL;
    enum bt_status st = find_listener(c, node, "change its role", &n, err);

    if (st == BT_OK) {
        st = check_role(c, n, role, err);
    }
    if (st == BT_OK && !force) {
        st = check_missed(c, n, &role, err);
    }
    if (st != BT_OK) {
        return st;
    }
    for (enum bt_role leg = BT_ROLE_PREFILL; leg < BT_LEGS; leg++) {
        n->losing |= bt_role_has(n->hello.role, leg) && !bt_role_has(role, leg) ? 1U << leg : 0;
    }
    struct bt_rt_action *a = bt_rt_act(c, BT_RT_SEND);

    a->session = n->session;
    a->send.kind = BT_FROM_ROUTER_SET_ROLE;
    a->send.set_role = role;
    *instance = n->hello.instance;
    bt_rt_nodes_changed(c, now);
    return BT_OK;
}

enum bt_status bt_rt_drain(struct bt_rt_core *c, uint64_t now, const char *node, bool force,
                           uint64_t *instance, struct bt_err *err)
{
    struct rt_node *n = NULL;
    enum bt_status st = find_listener(c, node, "drain: send its process SIGTERM", &n, err);

    if (st == BT_OK && !force) {
        st = check_missed(c, n, NULL, err);
    }
    if (st != BT_OK) {
        return st;
    }
    struct bt_rt_action *a = bt_rt_act(c, BT_RT_SEND);

    a->session = n->session;
    a->send.kind = BT_FROM_ROUTER_DRAIN;
    *instance = n->hello.instance;
    bt_rt_node_drains(c, now, n, "asked to");
    return BT_OK;
}
