#ifndef BT_PROTO_TICKET_H
#define BT_PROTO_TICKET_H

/* A ticket names one attempt to run one sequence on one pair: 128 random bits (PROTOCOL.md,
 * Identity). */

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define BT_TICKET_BYTES 16

struct bt_ticket {
    uint8_t b[BT_TICKET_BYTES];
};

static inline bool bt_ticket_equal(const struct bt_ticket *a, const struct bt_ticket *b)
{
    return memcmp(a->b, b->b, BT_TICKET_BYTES) == 0;
}

/* Tickets are random: their first bytes are a hash. */
static inline uint64_t bt_ticket_hash(const struct bt_ticket *t)
{
    uint64_t h;

    memcpy(&h, t->b, sizeof h);
    return h;
}

/* Writes 8 hex digits, enough for a log line, and NUL. */
static inline const char *bt_ticket_text(const struct bt_ticket *t, char out[9])
{
    static const char hex[] = "0123456789abcdef";

    for (int i = 0; i < 4; i++) {
        out[2 * i] = hex[t->b[i] >> 4];
        out[2 * i + 1] = hex[t->b[i] & 15];
    }
    out[8] = '\0';
    return out;
}

#endif
