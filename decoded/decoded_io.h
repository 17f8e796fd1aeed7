#ifndef BT_DECODED_DECODED_IO_H
#define BT_DECODED_DECODED_IO_H

/* Carries events of engine, transfer room and sessions into the core, and the core's actions out.
 * Loop thread. */

#include "node/node.h"

struct bt_decoded;

enum bt_status bt_decoded_create(struct bt_decoded **out) BT_NODISCARD;
void bt_decoded_destroy(struct bt_decoded *d);
/* The hooks to run the node with; arg is d. */
struct bt_node_hooks bt_decoded_hooks(struct bt_decoded *d);

#endif
