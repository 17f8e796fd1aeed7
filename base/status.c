/* Names of status codes and the error text that load and config paths hand upwards. Knows nothing
 * of logging: whoever decides that something is an error prints it. */

#include "base/status.h"

#include <stdio.h>
#include <string.h>

const char *bt_status_str(enum bt_status st)
{
    switch (st) {
    case BT_OK:
        return "ok";
    case BT_ERR_INVALID:
        return "invalid";
    case BT_ERR_BUSY:
        return "busy";
    case BT_ERR_TIMEOUT:
        return "timeout";
    case BT_ERR_NOT_FOUND:
        return "not found";
    case BT_ERR_UNSUPPORTED:
        return "unsupported";
    case BT_ERR_CANCELLED:
        return "cancelled";
    case BT_ERR_PROTOCOL:
        return "protocol error";
    case BT_ERR_PEER_LOST:
        return "peer lost";
    case BT_ERR_NOMEM:
        return "out of memory";
    case BT_ERR_DEVICE:
        return "device error";
    case BT_ERR_IO:
        return "input/output error";
    }
    return "unknown status";
}

enum bt_status bt_err_set(struct bt_err *err, enum bt_status st, const char *fmt, ...)
{
    if (err == NULL) {
        return st;
    }
    /* The arguments may point into err->msg itself, so the text is built aside. */
    char text[sizeof(err->msg)];
    va_list ap;
    va_start(ap, fmt);
    if (vsnprintf(text, sizeof(text), fmt, ap) < 0) {
        text[0] = '\0';
    }
    va_end(ap);
    memcpy(err->msg, text, strlen(text) + 1);
    err->status = st;
    return st;
}

enum bt_status bt_err_prefix(struct bt_err *err, const char *fmt, ...)
{
    if (err == NULL) {
        return BT_OK;
    }
    char text[sizeof(err->msg)];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    size_t used = n < 0 ? 0 : (size_t)n < sizeof(text) ? (size_t)n : sizeof(text) - 1;
    const char *parts[] = {": ", err->msg};
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        size_t len = strnlen(parts[i], sizeof(text) - 1 - used);
        memcpy(text + used, parts[i], len);
        used += len;
    }
    memcpy(err->msg, text, used);
    err->msg[used] = '\0';
    return err->status;
}
