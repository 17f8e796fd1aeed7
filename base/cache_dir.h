#ifndef BT_BASE_CACHE_DIR_H
#define BT_BASE_CACHE_DIR_H

/* The folder for what can be fetched or computed again (XDG Base Directory Specification): $XDG_CACHE_HOME/baton, else
 * $HOME/.cache/baton. */

#include "base/buf.h"
#include "base/status.h"

/* Appends its path and, if sub is not NULL, "/" and sub; makes nothing. BT_ERR_IO: neither variable is an absolute path. */
enum bt_status bt_cache_dir(struct bt_buf *out, const char *sub, struct bt_err *err) BT_NODISCARD;

#endif
