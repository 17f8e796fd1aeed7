#ifndef BT_PREFILLD_PREFILLD_IO_H
#define BT_PREFILLD_PREFILLD_IO_H

/* Carries events of engine, transfer room and sessions into the core, and the core's actions out.
 * Loop thread. */

#include "node/node.h"

struct bt_prefilld;

enum bt_status bt_prefilld_create(struct bt_prefilld **out) BT_NODISCARD;
void bt_prefilld_destroy(struct bt_prefilld *p);
/* The hooks to run the node with; arg is p. */
struct bt_node_hooks bt_prefilld_hooks(struct bt_prefilld *p);

#endif
