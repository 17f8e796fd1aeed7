/* baton.v1.Admin between plain structs and protobuf bytes; refuses to know what any of it means. */

#include "proto/admin.h"

#include "baton/v1/admin.pb-c.h"
#include "proto/pb_arena_int.h"

extern const unsigned char bt_admin_descriptors[];
extern const size_t bt_admin_descriptors_bytes;

const uint8_t *bt_admin_descriptor(size_t *len)
{
    *len = bt_admin_descriptors_bytes;
    return bt_admin_descriptors;
}

static enum bt_status bad(struct bt_err *err, const char *what)
{
    return bt_err_set(err, BT_ERR_PROTOCOL, "not a %s, or too large", what);
}

enum bt_status bt_admin_drain_encode(const struct bt_admin_drain *m, struct bt_buf *out)
{
    Baton__V1__DrainRequest w = BATON__V1__DRAIN_REQUEST__INIT;

    w.node = bt_pb_text(m->node);
    w.force = m->force;
    return bt_pb_pack(&w.base, out);
}

enum bt_status bt_admin_drain_decode(const void *data, size_t n, struct bt_arena *arena,
                                     struct bt_admin_drain *out, struct bt_err *err)
{
    ProtobufCAllocator pa = bt_pb_arena(arena);
    Baton__V1__DrainRequest *m = baton__v1__drain_request__unpack(&pa, n, data);

    if (m == NULL) {
        return bad(err, "DrainRequest");
    }
    *out = (struct bt_admin_drain){m->node, m->force != 0};
    return BT_OK;
}

enum bt_status bt_admin_set_role_encode(const struct bt_admin_set_role *m, struct bt_buf *out)
{
    Baton__V1__SetRoleRequest w = BATON__V1__SET_ROLE_REQUEST__INIT;

    w.node = bt_pb_text(m->node);
    w.role = bt_pb_text(m->role);
    w.force = m->force;
    return bt_pb_pack(&w.base, out);
}

enum bt_status bt_admin_set_role_decode(const void *data, size_t n, struct bt_arena *arena,
                                        struct bt_admin_set_role *out, struct bt_err *err)
{
    ProtobufCAllocator pa = bt_pb_arena(arena);
    Baton__V1__SetRoleRequest *m = baton__v1__set_role_request__unpack(&pa, n, data);

    if (m == NULL) {
        return bad(err, "SetRoleRequest");
    }
    *out = (struct bt_admin_set_role){m->node, m->role, m->force != 0};
    return BT_OK;
}

enum bt_status bt_admin_node_encode(const struct bt_admin_node *m, struct bt_buf *out)
{
    Baton__V1__DrainResponse w = BATON__V1__DRAIN_RESPONSE__INIT;

    w.name = bt_pb_text(m->name);
    w.instance = bt_pb_text(m->instance);
    return bt_pb_pack(&w.base, out);
}

enum bt_status bt_admin_node_decode(const void *data, size_t n, struct bt_arena *arena,
                                    struct bt_admin_node *out, struct bt_err *err)
{
    ProtobufCAllocator pa = bt_pb_arena(arena);
    Baton__V1__DrainResponse *m = baton__v1__drain_response__unpack(&pa, n, data);

    if (m == NULL) {
        return bad(err, "DrainResponse");
    }
    *out = (struct bt_admin_node){m->name, m->instance};
    return BT_OK;
}
