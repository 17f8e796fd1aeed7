/* Jobs in slots with generations, and a map from tickets to slots. */

#include "proto/ticket_table.h"

#include "base/assert.h"
#include "base/mem.h"

#define NO_SLOT UINT32_MAX

static struct bt_job *at(const struct bt_ticket_table *t, uint32_t slot)
{
    return (struct bt_job *)(void *)(t->jobs + (size_t)slot * t->job_bytes);
}

enum bt_status bt_ticket_table_init(struct bt_ticket_table *t, size_t job_bytes, uint32_t n_slots,
                                    uint32_t first_slot)
{
    BT_ASSERT(job_bytes >= sizeof(struct bt_job) && n_slots > 0 &&
              first_slot <= UINT32_MAX - n_slots);
    *t = (struct bt_ticket_table){
        .job_bytes = (job_bytes + 15) & ~(size_t)15, .n_slots = n_slots, .first_slot = first_slot};
    bt_map_init(&t->by_ticket, false);
    t->jobs = bt_calloc(n_slots, t->job_bytes);
    t->generation = bt_calloc(n_slots, sizeof *t->generation);
    if (t->jobs == NULL || t->generation == NULL ||
        bt_map_reserve(&t->by_ticket, n_slots) != BT_OK) {
        bt_ticket_table_fini(t);
        return BT_ERR_NOMEM;
    }
    t->free_head = NO_SLOT;
    return BT_OK;
}

void bt_ticket_table_fini(struct bt_ticket_table *t)
{
    bt_map_fini(&t->by_ticket);
    bt_free(t->jobs);
    bt_free(t->generation);
    *t = (struct bt_ticket_table){0};
}

static void map_ticket(struct bt_ticket_table *t, struct bt_job *j, uint32_t slot)
{
    enum bt_status st = bt_map_put(&t->by_ticket, j->ticket.b, BT_TICKET_BYTES, slot);

    BT_ASSERT(st == BT_OK); /* room for all slots was reserved */
}

void *bt_ticket_table_add(struct bt_ticket_table *t, const struct bt_ticket *ticket)
{
    bool fresh = t->free_head == NO_SLOT;
    uint32_t slot = fresh ? t->n_fresh : t->free_head;

    if (slot == t->n_slots || bt_map_get(&t->by_ticket, ticket->b, BT_TICKET_BYTES, NULL)) {
        return NULL;
    }
    struct bt_job *j = at(t, slot);

    t->n_fresh += fresh;
    t->free_head = fresh ? NO_SLOT : j->next_free;
    memset(j, 0, t->job_bytes);
    j->ticket = *ticket;
    map_ticket(t, j, slot);
    t->count++;
    if (++t->generation[slot] == 0) {
        t->generation[slot] = 1;
    }
    j->id = (uint64_t)t->generation[slot] << 32 | (t->first_slot + slot);
    return j;
}

void *bt_ticket_table_by_ticket(const struct bt_ticket_table *t, const struct bt_ticket *ticket)
{
    uint64_t slot = 0;

    return bt_map_get(&t->by_ticket, ticket->b, BT_TICKET_BYTES, &slot) ? at(t, (uint32_t)slot)
                                                                        : NULL;
}

void *bt_ticket_table_by_id(const struct bt_ticket_table *t, uint64_t id)
{
    uint32_t slot = (uint32_t)id - t->first_slot;

    if (id == 0 || slot >= t->n_fresh || at(t, slot)->id != id) {
        return NULL;
    }
    return at(t, slot);
}

void bt_ticket_table_forget(struct bt_ticket_table *t, void *job)
{
    struct bt_job *j = job;

    if (bt_ticket_table_by_ticket(t, &j->ticket) == job) {
        (void)bt_map_del(&t->by_ticket, j->ticket.b, BT_TICKET_BYTES);
    }
}

bool bt_ticket_table_rename(struct bt_ticket_table *t, void *job, const struct bt_ticket *ticket)
{
    struct bt_job *j = job;
    uint32_t slot = (uint32_t)j->id - t->first_slot;

    if (bt_map_get(&t->by_ticket, ticket->b, BT_TICKET_BYTES, NULL)) {
        return false;
    }
    bt_ticket_table_forget(t, job);
    j->ticket = *ticket;
    map_ticket(t, j, slot);
    return true;
}

void bt_ticket_table_remove(struct bt_ticket_table *t, void *job)
{
    struct bt_job *j = job;
    uint32_t slot = (uint32_t)j->id - t->first_slot;

    BT_ASSERT(j->id != 0 && at(t, slot) == j);
    bt_ticket_table_forget(t, job);
    j->id = 0;
    j->next_free = t->free_head;
    t->free_head = slot;
    t->count--;
}

void *bt_ticket_table_next(const struct bt_ticket_table *t, uint32_t *pos)
{
    while (*pos < t->n_fresh) {
        struct bt_job *j = at(t, (*pos)++);

        if (j->id != 0) {
            return j;
        }
    }
    return NULL;
}
