#ifndef BT_ROUTER_REQUEST_LOG_H
#define BT_ROUTER_REQUEST_LOG_H

/* The file of --request-log: lines are appended on the libuv pool, in order; the loop never waits for the disk. Lines
 * that wait are bounded in bytes; what does not fit, or could not be written, is counted as lost and logged once until
 * writing works again. Loop thread. */

#include <stdint.h>
#include "base/buf.h"
#include "base/status.h"

struct bt_net_loop;
struct bt_request_log;

struct bt_request_log_stats {
    uint64_t written, lost; /* lines */
};

/* Opens the file for appending, made if it is not there (mode 0640); blocks, at start. waiting_max: bytes of lines that
 * may wait; 0: 4 MiB. BT_ERR_IO names the file. */
enum bt_status bt_request_log_open(struct bt_net_loop *loop, const char *path, size_t waiting_max,
                                   struct bt_request_log **out, struct bt_err *err) BT_NODISCARD;
/* Copies one line, '\n' included; one that ran out of memory counts as lost. */
void bt_request_log_add(struct bt_request_log *l, const struct bt_buf *line);
/* What is added from now on goes to the file that the path names then (after a rotation). */
void bt_request_log_reopen(struct bt_request_log *l);
struct bt_request_log_stats bt_request_log_stats(const struct bt_request_log *l);
/* Writes what waits, closes the file. Blocks, at the end; NULL is legal. The loop must not be destroyed before. */
void bt_request_log_close(struct bt_request_log *l);

#endif
