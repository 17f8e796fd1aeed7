#ifndef BT_PROTO_GATE_TOKEN_H
#define BT_PROTO_GATE_TOKEN_H

/* What lets a prefill node in at a decode node's transfer port: 128 random bits that each node makes at its start
 * and tells its routers, which tell the prefill nodes that may use it. A secret: it stands in no status, log, trace or
 * metric, so nothing here turns it into text. */

#include <stdbool.h>
#include <stdint.h>

#define BT_GATE_TOKEN_BYTES 16

/* All zero: none. */
struct bt_gate_token {
    uint8_t b[BT_GATE_TOKEN_BYTES];
};

/* In a time that does not depend on where they differ. */
static inline bool bt_gate_token_equal(const struct bt_gate_token *a, const struct bt_gate_token *b)
{
    volatile uint8_t diff = 0; /* volatile: the loop has no early end */

    for (unsigned i = 0; i < BT_GATE_TOKEN_BYTES; i++) {
        diff = (uint8_t)(diff | (a->b[i] ^ b->b[i]));
    }
    return diff == 0;
}

static inline bool bt_gate_token_is_set(const struct bt_gate_token *t)
{
    static const struct bt_gate_token none = {{0}};

    return !bt_gate_token_equal(t, &none);
}

#endif
