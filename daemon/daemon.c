/* Wires both legs into a node. Owns them; refuses to know what either does. */

#include "daemon/daemon.h"

#include <stdio.h>
#include "decoded/decoded_io.h"
#include "node/node.h"
#include "prefilld/prefilld_io.h"

int bt_daemon_main(const struct bt_prog *prog, int argc, char **argv)
{
    struct bt_prefilld *p = NULL;
    struct bt_decoded *d = NULL;
    int rc = 1;

    if (bt_prefilld_create(&p) == BT_OK && bt_decoded_create(&d) == BT_OK) {
        const struct bt_node_hooks legs[BT_LEGS] = {
            [BT_ROLE_PREFILL] = bt_prefilld_hooks(p), [BT_ROLE_DECODE] = bt_decoded_hooks(d)};

        rc = bt_node_main(prog, argc, argv, legs);
    } else {
        fprintf(stderr, "%s: out of memory\n", prog->name);
    }
    bt_decoded_destroy(d);
    bt_prefilld_destroy(p);
    return rc;
}
