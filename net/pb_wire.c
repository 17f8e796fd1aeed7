/* Reading and writing protobuf fields. It knows the wire format and no message. */

#include "net/pb_wire.h"

#include <string.h>

static bool get_varint(struct bt_pb_in *in, uint64_t *out)
{
    uint64_t v = 0;

    for (unsigned shift = 0; shift < 64 && in->p < in->end; shift += 7) {
        uint8_t byte = *in->p++;
        v |= (uint64_t)(byte & 0x7f) << shift;
        if ((byte & 0x80) == 0) {
            *out = v;
            return true;
        }
    }
    in->bad = true;
    return false;
}

static bool get_fixed(struct bt_pb_in *in, size_t n, uint64_t *out)
{
    if ((size_t)(in->end - in->p) < n) {
        in->bad = true;
        return false;
    }
    *out = 0;
    for (size_t i = 0; i < n; i++) {
        *out |= (uint64_t)in->p[i] << (8 * i);
    }
    in->p += n;
    return true;
}

bool bt_pb_next(struct bt_pb_in *in, struct bt_pb_field *f)
{
    uint64_t tag = 0, len = 0;

    if (in->bad || in->p == in->end || !get_varint(in, &tag)) {
        return false;
    }
    f->number = (uint32_t)(tag >> 3);
    f->type = (unsigned)(tag & 7);
    f->data = NULL;
    f->len = 0;
    f->value = 0;
    if (f->number == 0 || tag >> 3 > UINT32_MAX) {
        in->bad = true;
        return false;
    }
    switch (f->type) {
    case 0:
        return get_varint(in, &f->value);
    case 1:
        return get_fixed(in, 8, &f->value);
    case 5:
        return get_fixed(in, 4, &f->value);
    case 2:
        if (!get_varint(in, &len) || len > (size_t)(in->end - in->p)) {
            break;
        }
        f->data = in->p;
        f->len = (size_t)len;
        in->p += len;
        return true;
    default:
        break;
    }
    in->bad = true;
    return false;
}

bool bt_pb_is(const struct bt_pb_field *f, uint32_t number, unsigned type)
{
    return f->number == number && f->type == type;
}

static void put_raw(struct bt_buf *b, uint64_t v)
{
    while (v >= 0x80) {
        bt_buf_addc(b, (char)(0x80 | (v & 0x7f)));
        v >>= 7;
    }
    bt_buf_addc(b, (char)v);
}

void bt_pb_put_varint(struct bt_buf *b, uint32_t number, uint64_t value)
{
    put_raw(b, (uint64_t)number << 3);
    put_raw(b, value);
}

void bt_pb_put_bytes(struct bt_buf *b, uint32_t number, const void *data, size_t len)
{
    put_raw(b, (uint64_t)number << 3 | 2);
    put_raw(b, len);
    bt_buf_add(b, data, len);
}

void bt_pb_put_str(struct bt_buf *b, uint32_t number, const char *s)
{
    bt_pb_put_bytes(b, number, s, strlen(s));
}
