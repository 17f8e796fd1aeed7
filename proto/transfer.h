#ifndef BT_PROTO_TRANSFER_H
#define BT_PROTO_TRANSFER_H

/* Control messages between prefilld and decoded as plain structs (transfer.proto has the wire
 * shapes). */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/arena.h"
#include "base/buf.h"
#include "base/sampling.h"
#include "base/status.h"
#include "proto/ticket.h"

#define BT_CONTROL_GROUPS_MAX 8u

enum bt_control_kind {
    BT_CONTROL_STARTED,
    BT_CONTROL_GRANT,
    BT_CONTROL_REFUSE,
    BT_CONTROL_REVOKE,
    BT_CONTROL_HANDOFF,
    BT_CONTROL_FORGET,
    BT_CONTROL_DONE,
    BT_CONTROL_COMPUTING,
    BT_CONTROL_KINDS,
};
const char *bt_control_name(enum bt_control_kind k);
/* Whether prefilld sends it, to decoded; else the other way. */
bool bt_control_from_prefill(enum bt_control_kind k);

struct bt_control {
    enum bt_control_kind kind;
    struct bt_ticket ticket;
    uint64_t generation; /* all but STARTED and REFUSE; FORGET: 0 when not granted yet */
    union {
        struct {
            uint32_t n_tokens; /* of the submit; one less: the last is the one of the hand-off */
        } started;
        struct {
            uint32_t n_groups;
            uint32_t first_page[BT_CONTROL_GROUPS_MAX];
        } grant;
        struct {
            uint32_t reason; /* enum bt_attempt_reason of proto/session.h */
            const char *text;
        } refuse;
        struct {
            uint32_t reason; /* the same; 0: not told */
        } revoke;
        struct {
            uint32_t index;
            struct bt_sampled first;
            bool has_logprobs;
            uint32_t n_groups;
            uint64_t n_shares[BT_CONTROL_GROUPS_MAX]; /* (layer, page) shares that make the landing
                                                         complete */
        } handoff;
    };
};

enum bt_status bt_control_decode(const void *data, size_t n, struct bt_arena *arena,
                                 struct bt_control *out, struct bt_err *err) BT_NODISCARD;
enum bt_status bt_control_encode(const struct bt_control *m, struct bt_buf *out) BT_NODISCARD;

#endif
