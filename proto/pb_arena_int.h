#ifndef BT_PROTO_PB_ARENA_INT_H
#define BT_PROTO_PB_ARENA_INT_H

/* Inside proto/ only: protobuf-c unpacking into a capped arena, packing into a bt_buf. */

#include <protobuf-c/protobuf-c.h>
#include "base/arena.h"
#include "base/buf.h"
#include "base/status.h"

ProtobufCAllocator bt_pb_arena(struct bt_arena *arena);
enum bt_status bt_pb_pack(const ProtobufCMessage *m, struct bt_buf *out) BT_NODISCARD;
/* For the fields of a message to be packed: protobuf-c wants char * for what it only reads. NULL is "". */
char *bt_pb_text(const char *s);

#endif
