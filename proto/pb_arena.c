/* protobuf-c memory inside an arena: a message that would need more than the arena's cap fails to
 * decode instead of growing the heap. Knows nothing of any message. */

#include "proto/pb_arena_int.h"

/* A NUL behind each block: `bytes` that are text can be used as strings. */
static void *pb_alloc(void *arg, size_t n)
{
    char *p = n < SIZE_MAX ? bt_arena_alloc(arg, n + 1) : NULL;

    if (p != NULL) {
        p[n] = '\0';
    }
    return p;
}

static void pb_free(void *arg, void *p)
{
    (void)arg;
    (void)p;
}

ProtobufCAllocator bt_pb_arena(struct bt_arena *arena)
{
    return (ProtobufCAllocator){.alloc = pb_alloc, .free = pb_free, .allocator_data = arena};
}

enum bt_status bt_pb_pack(const ProtobufCMessage *m, struct bt_buf *out)
{
    size_t n = protobuf_c_message_get_packed_size(m);

    if (!bt_buf_reserve(out, n + 1)) {
        return BT_ERR_NOMEM;
    }
    protobuf_c_message_pack(m, (uint8_t *)out->data + out->len);
    out->len += n;
    out->data[out->len] = '\0';
    return BT_OK;
}

char *bt_pb_text(const char *s)
{
    union {
        const char *in;
        char *out;
    } u = {.in = s != NULL ? s : ""};

    return u.out;
}
