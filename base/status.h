#ifndef BT_BASE_STATUS_H
#define BT_BASE_STATUS_H

/* Status codes, grouped by what an error takes down, and the error text of load and config paths.
 */

#include <stdarg.h>

#define BT_NODISCARD    __attribute__((warn_unused_result))
#define BT_PRINTF(f, a) __attribute__((format(printf, f, a)))

enum bt_status {
    BT_OK = 0,
    /* The request, nothing else. */
    BT_ERR_INVALID = -1, /* bad argument, field, file content */
    BT_ERR_BUSY = -2,    /* a limit was reached; try later */
    BT_ERR_TIMEOUT = -3,
    BT_ERR_NOT_FOUND = -4,
    BT_ERR_UNSUPPORTED = -5, /* well-formed, but not implemented: refused by name */
    BT_ERR_CANCELLED = -6,
    /* The peer or its connection. */
    BT_ERR_PROTOCOL = -20,
    BT_ERR_PEER_LOST = -21,
    /* The process or a file it needs. */
    BT_ERR_NOMEM = -40,
    BT_ERR_DEVICE = -41,
    BT_ERR_IO = -42,
};

/* A short lower-case English name; never NULL. */
const char *bt_status_str(enum bt_status st);

/* What went wrong, for a person: names the file, field, tensor or byte offset. */
struct bt_err {
    enum bt_status status;
    char msg[512];
};

/* Sets err (NULL allowed: only the status is kept by the caller) and returns st. Text is cut at the
 * buffer. */
enum bt_status bt_err_set(struct bt_err *err, enum bt_status st, const char *fmt, ...)
    BT_PRINTF(3, 4);

/* Puts "prefix: " before an existing message, for callers that know the file or tensor. Returns
 * err->status (BT_OK when err is NULL). */
enum bt_status bt_err_prefix(struct bt_err *err, const char *fmt, ...) BT_PRINTF(2, 3);

#endif
