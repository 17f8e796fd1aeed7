#ifndef BT_NET_PB_WIRE_H
#define BT_NET_PB_WIRE_H

/* Inside net/ only: the protobuf wire format, field by field. Reflection walks descriptors and
 * answers in a handful of fields; generated code would not make that shorter. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"

struct bt_pb_in {
    const uint8_t *p, *end;
    bool bad; /* the bytes are no message */
};
struct bt_pb_field {
    uint32_t number;
    unsigned type;       /* 0 varint, 1 fixed64, 2 bytes, 5 fixed32 */
    uint64_t value;      /* varint, fixed */
    const uint8_t *data; /* bytes; into the input */
    size_t len;
};
/* false: end, or bad. */
bool bt_pb_next(struct bt_pb_in *in, struct bt_pb_field *f);
bool bt_pb_is(const struct bt_pb_field *f, uint32_t number, unsigned type);

void bt_pb_put_varint(struct bt_buf *b, uint32_t number, uint64_t value);
void bt_pb_put_bytes(struct bt_buf *b, uint32_t number, const void *data, size_t len);
void bt_pb_put_str(struct bt_buf *b, uint32_t number, const char *s);

#endif
