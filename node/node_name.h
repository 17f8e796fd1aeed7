#ifndef BT_NODE_NODE_NAME_H
#define BT_NODE_NODE_NAME_H

/* The name of a node that was given none. */

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BT_NODE_NAME_BYTES 64

/* Writes "HOST-ROLE-N": the machine's name up to its first dot, at most 32 bytes of it, and the lowest N that no other
 * node of this role has on this machine (in this network namespace). So it is the same after a restart, and differs
 * between containers, whose process ids do not. Returns a descriptor that holds N: the caller closes it when the name is
 * no longer used; a process that dies gives N back. -1: N could not be held, and is the process id. Any thread; does
 * not block. */
int bt_node_default_name(const char *role, char name[BT_NODE_NAME_BYTES]);

#ifdef __cplusplus
}
#endif

#endif
