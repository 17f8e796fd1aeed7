#ifndef BT_DAEMON_DAEMON_H
#define BT_DAEMON_DAEMON_H

/* What baton-prefilld and baton-decoded are made of: a node with both legs. The two programs differ by
 * name, text and default role. */

#include "base/options.h"

/* Makes both legs and runs the node from argv to its end. Returns the exit code. */
int bt_daemon_main(const struct bt_prog *prog, int argc, char **argv);

#endif
