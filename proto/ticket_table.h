#ifndef BT_PROTO_TICKET_TABLE_H
#define BT_PROTO_TICKET_TABLE_H

/* A fixed number of jobs, found by ticket or by generational id (generation << 32 | slot; 0 is
 * never valid). Used by the cores: no allocation after init, iteration in slot order. One thread.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/hash.h"
#include "base/status.h"
#include "proto/ticket.h"

/* First member of every job struct. Slots in ids begin with first_slot: so the ids of two tables may
 * differ. */
struct bt_job {
    uint64_t id; /* 0: slot is free */
    struct bt_ticket ticket;
    uint32_t next_free;
};

struct bt_ticket_table {
    uint8_t *jobs;
    size_t job_bytes;
    uint32_t n_slots, first_slot, count;
    uint32_t n_fresh;   /* slots below were in use before: others have never been touched */
    uint32_t free_head; /* of those that are not now */
    uint32_t *generation;
    struct bt_map by_ticket;
};

enum bt_status bt_ticket_table_init(struct bt_ticket_table *t, size_t job_bytes, uint32_t n_slots,
                                    uint32_t first_slot) BT_NODISCARD;
void bt_ticket_table_fini(struct bt_ticket_table *t);
/* A zeroed job with id and ticket set; NULL: full, or the ticket is in use. */
void *bt_ticket_table_add(struct bt_ticket_table *t, const struct bt_ticket *ticket);
void *bt_ticket_table_by_ticket(const struct bt_ticket_table *t, const struct bt_ticket *ticket);
void *bt_ticket_table_by_id(const struct bt_ticket_table *t, uint64_t id);
/* The ticket is no longer found; the job stays (by id) until it is removed. */
void bt_ticket_table_forget(struct bt_ticket_table *t, void *job);
/* The job is found by another ticket from now on. false: that one is in use; nothing changed. */
bool bt_ticket_table_rename(struct bt_ticket_table *t, void *job, const struct bt_ticket *ticket);
void bt_ticket_table_remove(struct bt_ticket_table *t, void *job);
/* The next used job after slot *pos (start with 0); NULL at the end. Removing the returned job is
 * allowed. */
void *bt_ticket_table_next(const struct bt_ticket_table *t, uint32_t *pos);

#endif
