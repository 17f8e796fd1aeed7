/* What can be wrong with a node's options, and what follows from several of them together. Reads options; refuses to
 * know of anything that runs. */

#include <stdio.h>
#include <string.h>
#include "base/clock.h"
#include "node/node_int.h"

static enum bt_status all_routers_loopback(const char *routers, bool *all, struct bt_err *err)
{
    char one[BT_ADDR_TEXT_MAX];

    *all = true;
    for (const char *p = routers; *p != '\0';) {
        size_t n = strcspn(p, ",");
        struct bt_hostport hp;

        if (n >= sizeof one) {
            return bt_err_set(err, BT_ERR_INVALID, "--router: address too long");
        }
        memcpy(one, p, n);
        one[n] = '\0';
        enum bt_status st = bt_hostport_parse(one, -1, &hp, err);

        if (st != BT_OK) {
            bt_err_prefix(err, "--router");
            return st;
        }
        *all = *all && bt_hostport_is_loopback(&hp);
        p += n + (p[n] == ',');
    }
    return BT_OK;
}

enum bt_status bt_node_transfer_ports(const struct bt_node *n, uint16_t *min, uint16_t *max,
                                      struct bt_err *err)
{
    const char *text = n->cfg.transfer_ports;
    unsigned from = 0, to = 0;
    char end;

    *min = *max = 0;
    if (text == NULL) {
        return BT_OK;
    }
    if (sscanf(text, "%5u-%5u%c", &from, &to, &end) != 2 || from == 0 || to > UINT16_MAX ||
        from > to || to - from + 1 < BT_XFER_PORTS_MIN) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "--transfer-ports %s: want FROM-TO, at least %d ports up to 65535", text,
                          BT_XFER_PORTS_MIN);
    }
    *min = (uint16_t)from;
    *max = (uint16_t)to;
    return BT_OK;
}

enum bt_status bt_node_transfer_address(const struct bt_node *n, char out[BT_ADDR_TEXT_MAX],
                                        struct bt_err *err)
{
    bool local = false;
    struct bt_hostport hp;
    enum bt_status st = all_routers_loopback(n->cfg.router, &local, err);

    if (st != BT_OK) {
        return st;
    }
    if (n->cfg.transfer == NULL) {
        if (!local && n->role == BT_ROLE_PREFILL) {
            out[0] = '\0';
            return BT_OK;
        }
        if (!local) {
            return bt_err_set(err, BT_ERR_INVALID,
                              "--transfer is needed: the routers are on other machines, so say "
                              "under which address "
                              "prefill nodes reach this one");
        }
        snprintf(out, BT_ADDR_TEXT_MAX, "127.0.0.1:0");
        return BT_OK;
    }
    st = bt_hostport_parse(n->cfg.transfer, 0, &hp, err);
    if (st != BT_OK) {
        bt_err_prefix(err, "--transfer");
        return st;
    }
    if (bt_hostport_is_any(&hp)) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "--transfer %s: peers cannot dial this; give an address of this machine",
                          n->cfg.transfer);
    }
    if (bt_hostport_is_loopback(&hp) && !local) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "--transfer %s is a loopback address, but a router is remote: a prefill "
                          "node on another "
                          "machine cannot reach it",
                          n->cfg.transfer);
    }
    bt_hostport_text(&hp, out);
    return BT_OK;
}

enum bt_status bt_node_check(struct bt_node *n, struct bt_err *err)
{
    char address[BT_ADDR_TEXT_MAX];

    if (n->cfg.router == NULL) {
        return bt_err_set(
            err, BT_ERR_INVALID,
            "--router HOST:PORT is missing: the address that the router logs as \"sessions on\"");
    }
    if (n->cfg.model == NULL) {
        return bt_err_set(err, BT_ERR_INVALID, "--model DIR_OR_GGUF is missing");
    }
    if (strcmp(bt_node_backends[n->cfg.backend], "emulated") == 0) {
        return bt_err_set(err, BT_ERR_INVALID, "--backend emulated: not there yet");
    }
    if (bt_opt_check_lease(n->cfg.lease, n->cfg.heartbeat, err) != BT_OK) {
        return BT_ERR_INVALID;
    }
    if (n->cfg.cpus != NULL && bt_cpus_use(n->cfg.cpus, err) != BT_OK) {
        return bt_err_prefix(err, "--cpus");
    }
    uint16_t port_min, port_max;
    enum bt_status st = bt_node_transfer_address(n, address, err);

    if (st == BT_OK) {
        st = bt_node_transfer_ports(n, &port_min, &port_max, err);
    }
    return st == BT_OK ? bt_node_metrics_init(n, err) : st;
}
