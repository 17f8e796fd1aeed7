#ifndef BT_BASE_LOG_H
#define BT_BASE_LOG_H

/* Log lines on stderr: `time level thread module req=ID text`, or one JSON object a line.
 * Any thread; one write() a line; never blocks on a lock held during I/O of another line's text.
 * error: operator must act; warn: degraded but continuing; info: lifecycle; debug: per object;
 * trace: per step. */

#include <stdbool.h>
#include <stdint.h>
#include "base/status.h"

enum bt_log_level { BT_LOG_ERROR, BT_LOG_WARN, BT_LOG_INFO, BT_LOG_DEBUG, BT_LOG_TRACE };
enum bt_log_format { BT_LOG_TEXT, BT_LOG_JSON };

void bt_log_setup(enum bt_log_level level, enum bt_log_format format);
bool bt_log_on(enum bt_log_level level);
/* Names the calling thread in its later lines (default "main"), and for debuggers and top; there the process's first
 * thread keeps the program's name. name: static storage. */
void bt_log_thread(const char *name);
void bt_log_write(enum bt_log_level level, const char *module, const char *req, const char *fmt,
                  ...) BT_PRINTF(4, 5);

/* Lines that an outsider can make come again and again: the first is written, then one a minute. Zeroed at the start;
 * one thread. true: write it. *n_held: how many were not written since the last one that was. */
struct bt_log_limit {
    uint64_t next_ns;
    uint32_t n_held;
};
bool bt_log_may(struct bt_log_limit *l, uint64_t now_ns, uint32_t *n_held) BT_NODISCARD;

/* req: request id or NULL. The arguments are evaluated only if the level is on. */
#define BT_LOG(level, module, req, ...)                                                            \
    (bt_log_on(level) ? bt_log_write(level, module, req, __VA_ARGS__) : (void)0)
#define bt_log_error(module, ...) BT_LOG(BT_LOG_ERROR, module, NULL, __VA_ARGS__)
#define bt_log_warn(module, ...)  BT_LOG(BT_LOG_WARN, module, NULL, __VA_ARGS__)
#define bt_log_info(module, ...)  BT_LOG(BT_LOG_INFO, module, NULL, __VA_ARGS__)
#define bt_log_debug(module, ...) BT_LOG(BT_LOG_DEBUG, module, NULL, __VA_ARGS__)
#define bt_log_trace(module, ...) BT_LOG(BT_LOG_TRACE, module, NULL, __VA_ARGS__)

#endif
