/* The bytes of gRPC: message prefix, timeouts, percent-encoded messages, status names. It holds no
 * connection and no clock. */

#include "net/grpc.h"
#include "net/grpc_int.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* A large announced size takes memory only as its bytes arrive. */
#define RESERVE_MAX ((size_t)1 << 20)

static enum bt_grpc_deframe begin_message(struct bt_grpc_deframer *d)
{
    d->need =
        (size_t)d->head[1] << 24 | (size_t)d->head[2] << 16 | (size_t)d->head[3] << 8 | d->head[4];
    if (d->head[0] != 0) {
        return BT_GRPC_DEFRAME_COMPRESSED;
    }
    return d->need > d->max ? BT_GRPC_DEFRAME_TOO_LARGE : BT_GRPC_DEFRAME_OK;
}

enum bt_grpc_deframe bt_grpc_deframe(struct bt_grpc_deframer *d, const uint8_t *data, size_t len,
                                     bool (*fn)(void *arg, const uint8_t *data, size_t len),
                                     void *arg)
{
    static const uint8_t empty[1];

    while (len > 0 || d->n_head == 5) {
        if (d->n_head < 5) {
            size_t n = 5 - d->n_head < len ? 5 - d->n_head : len;
            memcpy(d->head + d->n_head, data, n);
            d->n_head += n;
            data += n;
            len -= n;
            if (d->n_head < 5) {
                break;
            }
            enum bt_grpc_deframe st = begin_message(d);
            if (st != BT_GRPC_DEFRAME_OK) {
                return st;
            }
        }
        bool go_on;
        if (d->body.len == 0 && len >= d->need) { /* whole message in this piece: no copy */
            size_t n = d->need;
            d->n_head = 0;
            go_on = fn(arg, n > 0 ? data : empty, n);
            data += n;
            len -= n;
        } else {
            size_t n = d->need - d->body.len < len ? d->need - d->body.len : len;
            if (d->body.len == 0 &&
                !bt_buf_reserve(&d->body, d->need < RESERVE_MAX ? d->need : RESERVE_MAX)) {
                return BT_GRPC_DEFRAME_NOMEM;
            }
            if (!bt_buf_add(&d->body, data, n)) {
                return BT_GRPC_DEFRAME_NOMEM;
            }
            data += n;
            len -= n;
            if (d->body.len < d->need) {
                break;
            }
            struct bt_buf whole = d->body;
            d->body = (struct bt_buf){0};
            d->n_head = 0;
            go_on = fn(arg, (const uint8_t *)whole.data, whole.len);
            bt_buf_fini(&whole);
        }
        if (!go_on) {
            return BT_GRPC_DEFRAME_STOPPED;
        }
    }
    return BT_GRPC_DEFRAME_OK;
}

bool bt_grpc_deframe_idle(const struct bt_grpc_deframer *d)
{
    return d->n_head == 0;
}

void bt_grpc_deframe_fini(struct bt_grpc_deframer *d)
{
    bt_buf_fini(&d->body);
}

bool bt_grpc_frame(struct bt_buf *b, const void *data, size_t len)
{
    uint8_t head[5] = {0, (uint8_t)(len >> 24), (uint8_t)(len >> 16), (uint8_t)(len >> 8),
                       (uint8_t)len};

    return len <= UINT32_MAX && bt_buf_reserve(b, len + 5) && bt_buf_add(b, head, 5) &&
           bt_buf_add(b, data, len);
}

static const struct {
    char unit;
    uint64_t ns;
} units[] = {
    {'n', 1},          {'u', 1000},        {'m', 1000000},
    {'S', 1000000000}, {'M', 60000000000}, {'H', 3600000000000},
};

bool bt_grpc_timeout_parse(const char *s, uint64_t *ns)
{
    uint64_t v = 0;
    size_t n = strlen(s);

    if (n < 2 || n > 9) { /* at most 8 digits and a unit */
        return false;
    }
    for (size_t i = 0; i + 1 < n; i++) {
        if (s[i] < '0' || s[i] > '9') {
            return false;
        }
        v = v * 10 + (uint64_t)(s[i] - '0');
    }
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        if (units[i].unit == s[n - 1]) {
            *ns = v > UINT64_MAX / 2 / units[i].ns ? UINT64_MAX / 2 : v * units[i].ns;
            return true;
        }
    }
    return false;
}

void bt_grpc_timeout_text(uint64_t ns, char out[16])
{
    size_t i = 0;

    while (i + 1 < sizeof units / sizeof units[0] &&
           (ns + units[i].ns - 1) / units[i].ns > 99999999) {
        i++;
    }
    uint64_t v = ns / units[i].ns + (ns % units[i].ns > 0 ? 1 : 0);
    (void)snprintf(out, 16, "%" PRIu64 "%c", v > 99999999 ? UINT64_C(99999999) : v, units[i].unit);
}

void bt_grpc_message_encode(const char *message, struct bt_buf *out)
{
    for (; *message != '\0'; message++) {
        unsigned char c = (unsigned char)*message;
        if (c >= 0x20 && c < 0x7f && c != '%') {
            bt_buf_addc(out, (char)c);
        } else {
            bt_buf_addf(out, "%%%02X", c);
        }
    }
}

static int hex(char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    c = (char)(c | 32);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

void bt_grpc_message_decode(const char *text, struct bt_buf *out)
{
    for (; *text != '\0'; text++) {
        int high = text[0] == '%' ? hex(text[1]) : -1;
        int low = high >= 0 ? hex(text[2]) : -1;
        if (low >= 0 && high * 16 + low != 0) {
            bt_buf_addc(out, (char)(high * 16 + low));
            text += 2;
        } else {
            bt_buf_addc(out, *text); /* tolerated as it is */
        }
    }
}

enum bt_grpc_status bt_grpc_status_from_http(int http)
{
    switch (http) {
    case 400:
        return BT_GRPC_INTERNAL;
    case 401:
        return BT_GRPC_UNAUTHENTICATED;
    case 403:
        return BT_GRPC_PERMISSION_DENIED;
    case 404:
        return BT_GRPC_UNIMPLEMENTED;
    case 429:
    case 502:
    case 503:
    case 504:
        return BT_GRPC_UNAVAILABLE;
    default:
        return BT_GRPC_UNKNOWN;
    }
}

const char *bt_grpc_status_name(enum bt_grpc_status st)
{
    static const char *const names[] = {
        "OK",
        "CANCELLED",
        "UNKNOWN",
        "INVALID_ARGUMENT",
        "DEADLINE_EXCEEDED",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
        "DATA_LOSS",
        "UNAUTHENTICATED",
    };

    return (unsigned)st < sizeof names / sizeof names[0] ? names[st] : "UNKNOWN";
}
