#ifndef BT_PROTO_ADMIN_H
#define BT_PROTO_ADMIN_H

/* Messages of baton.v1.Admin as plain structs (admin.proto has the wire shapes and their meaning). Decoded strings live
 * in the caller's arena. Any thread. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/arena.h"
#include "base/buf.h"
#include "base/status.h"

#define BT_ADMIN_DRAIN    "/baton.v1.Admin/Drain"
#define BT_ADMIN_SET_ROLE "/baton.v1.Admin/SetRole"

struct bt_admin_drain {
    const char *node;
    bool force;
};

struct bt_admin_set_role {
    const char *node, *role;
    bool force;
};

/* DrainResponse and SetRoleResponse: the same on the wire. */
struct bt_admin_node {
    const char *name, *instance;
};

/* Decoders: BT_ERR_PROTOCOL: not such a message, or larger than the arena; err says which. */
enum bt_status bt_admin_drain_encode(const struct bt_admin_drain *m,
                                     struct bt_buf *out) BT_NODISCARD;
enum bt_status bt_admin_drain_decode(const void *data, size_t n, struct bt_arena *arena,
                                     struct bt_admin_drain *out, struct bt_err *err) BT_NODISCARD;
enum bt_status bt_admin_set_role_encode(const struct bt_admin_set_role *m,
                                        struct bt_buf *out) BT_NODISCARD;
enum bt_status bt_admin_set_role_decode(const void *data, size_t n, struct bt_arena *arena,
                                        struct bt_admin_set_role *out,
                                        struct bt_err *err) BT_NODISCARD;
enum bt_status bt_admin_node_encode(const struct bt_admin_node *m, struct bt_buf *out) BT_NODISCARD;
enum bt_status bt_admin_node_decode(const void *data, size_t n, struct bt_arena *arena,
                                    struct bt_admin_node *out, struct bt_err *err) BT_NODISCARD;

/* Serialised FileDescriptorSet of admin.proto, for reflection. Static storage. */
const uint8_t *bt_admin_descriptor(size_t *len);

#endif
