#ifndef BT_TRANSFER_XFER_LOOP_H
#define BT_TRANSFER_XFER_LOOP_H

/* The loopback twin: a hub joins several `bt_xfer` of one process (opts.hub, addresses "loop:NAME") without any
 * wire, runs the same protocol code as UCX, and can inject faults. Any thread. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"

struct bt_xfer_hub;

/* What happens to page messages, in parts per million, drawn from the seed. Other messages are only delayed. */
struct bt_xfer_faults {
    uint64_t seed;
    uint32_t
        drop_ppm; /* the send completes, nothing arrives (no real wire does this: deadlines must) */
    uint32_t duplicate_ppm;
    uint32_t reorder_ppm;  /* delivered after the next one */
    uint32_t corrupt_ppm;  /* one bit of the payload flipped (the test page is hit as well) */
    uint64_t delay_ns_max; /* uniform extra delay of any message; 0: none */
};

enum bt_status bt_xfer_hub_create(const struct bt_xfer_faults *faults,
                                  struct bt_xfer_hub **out) BT_NODISCARD;
/* Every bt_xfer on it must have been destroyed. */
void bt_xfer_hub_destroy(struct bt_xfer_hub *hub);
void bt_xfer_hub_set_faults(struct bt_xfer_hub *hub, const struct bt_xfer_faults *faults);

/* `instance` is the bt_xfer's opts.instance. */

/* As kill -9: its connections break at the other ends, nothing it sends or hears passes any more. */
void bt_xfer_hub_kill(struct bt_xfer_hub *hub, uint64_t instance);
/* As SIGSTOP: nothing is delivered to it or sent by it until false, and nobody is told. */
void bt_xfer_hub_freeze(struct bt_xfer_hub *hub, uint64_t instance, bool on);
/* Receives of pages into it begin but do not end until false. */
void bt_xfer_hub_hold_receives(struct bt_xfer_hub *hub, uint64_t instance, bool on);

#endif
