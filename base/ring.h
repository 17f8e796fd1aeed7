#ifndef BT_BASE_RING_H
#define BT_BASE_RING_H

/* Bounded ring of fixed-size messages between threads. Any number of producers, one consumer.
 * A short mutex around the copy of one message; no allocation after create. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"

struct bt_ring;
/* n_msgs is rounded up to a power of two. */
enum bt_status bt_ring_create(size_t msg_bytes, size_t n_msgs, struct bt_ring **out) BT_NODISCARD;
void bt_ring_destroy(struct bt_ring *r);
bool bt_ring_push(struct bt_ring *r, const void *msg) BT_NODISCARD; /* false: full */
bool bt_ring_pop(struct bt_ring *r, void *msg);                     /* false: empty */
/* Blocks until a message is there or the timeout passes (UINT64_MAX: for ever). */
bool bt_ring_pop_wait(struct bt_ring *r, void *msg, uint64_t timeout_ns);
size_t bt_ring_count(struct bt_ring *r);

#endif
