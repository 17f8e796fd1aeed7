/* The way of a prompt's pages from its prefill node to the running batch: leases, named by their generation, landings,
 * the hand-off, and all that the prefill node says of it. */

#include "decoded/decoded_core_int.h"

#include <stdio.h>
#include <string.h>
#include "base/assert.h"

/* ---- leases: generations are counted up, so the buckets fill evenly ---- */

static struct dc_job *job_by_generation(struct bt_dc_core *c, const struct bt_ticket *t,
                                        uint64_t generation)
{
    uint64_t id = c->leases[generation & c->leases_mask];

    while (id != 0) {
        struct dc_job *j = bt_ticket_table_by_id(&c->jobs, id);

        BT_ASSERT(j != NULL);
        if (j->generation == generation) {
            return bt_ticket_equal(&j->head.ticket, t) ? j : NULL;
        }
        id = j->next_lease;
    }
    return NULL;
}

static void lease_add(struct bt_dc_core *c, struct dc_job *j)
{
    j->generation = ++c->generation;
    uint64_t *bucket = &c->leases[j->generation & c->leases_mask];

    j->next_lease = *bucket;
    *bucket = j->head.id;
}

void bt_dc_lease_drop(struct bt_dc_core *c, struct dc_job *j)
{
    uint64_t *at = &c->leases[j->generation & c->leases_mask];

    while (*at != j->head.id) {
        struct dc_job *other = bt_ticket_table_by_id(&c->jobs, *at);

        BT_ASSERT(other != NULL);
        at = &other->next_lease;
    }
    *at = j->next_lease;
}

/* ---- landings ---- */

void bt_dc_on_engine_landed(struct bt_dc_core *c, uint64_t now, uint64_t job, uint32_t n_cached,
                            uint32_t n_pages, const uint32_t *first_page,
                            const uint32_t *const *page_ids)
{
    struct dc_job *j = bt_dc_live_job(c, job);

    bt_dc_begin(c);
    if (j == NULL) {
        return;
    }
    BT_ASSERT(n_cached <= j->req.n_tokens);
    lease_add(c, j);
    j->n_cached = n_cached;
    j->t_granted = now;
    j->t_progress = now;
    j->land_open = true;
    bt_dc_job_set_state(c, j, JOB_LANDING);
    struct bt_dc_action *a = bt_dc_act_job(c, BT_DC_LAND_OPEN, j);

    a->pages.n_pages = n_pages;
    a->pages.first_page = first_page;
    a->pages.page_ids = page_ids;
    struct bt_control *m = bt_dc_act_control(c, j->conn, BT_CONTROL_GRANT, &j->head.ticket);

    m->generation = j->generation;
    m->grant.n_groups = c->opts.n_groups;
    memcpy(m->grant.first_page, first_page, c->opts.n_groups * sizeof *first_page);
}

void bt_dc_on_land_refused(struct bt_dc_core *c, uint64_t now, uint64_t job, const char *text)
{
    struct dc_job *j = bt_dc_live_job(c, job);

    (void)now;
    bt_dc_begin(c);
    BT_ASSERT(j != NULL && j->state == JOB_LANDING);
    snprintf(c->text, sizeof c->text, "the landing was refused: %s", text);
    j->land_open = false;
    bt_dc_job_give_up(c, j, BT_ATTEMPT_REFUSED, c->text);
}

void bt_dc_on_peer_down(struct bt_dc_core *c, uint64_t now, uint64_t conn, const char *why)
{
    uint32_t pos = 0;
    struct dc_job *j;

    (void)now;
    bt_dc_begin(c);
    snprintf(c->text, sizeof c->text, "connection to the prefill node lost: %s", why);
    for (uint32_t i = 0; i < c->opts.parked_max; i++) {
        if (c->parked[i].used && c->parked[i].conn == conn) {
            bt_dc_parked_drop(c, &c->parked[i]);
        }
    }
    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->conn == conn && (j->state == JOB_LEASING || j->state == JOB_LANDING)) {
            bt_dc_job_fail(c, j, BT_ATTEMPT_RETRY, c->text);
        }
    }
}

/* ---- from the prefill node ---- */

/* The landing is complete and token 0 is known: decode. */
static void job_try_run(struct bt_dc_core *c, struct dc_job *j, uint64_t now)
{
    if (!j->full || !j->handed) {
        return;
    }
    bt_dc_job_set_state(c, j, JOB_RUNNING);
    j->t_run = now;
    c->stats.transfers++;
    c->stats.transferred_bytes += j->bytes;
    c->stats.transferred_tokens += j->bytes > 0 ? j->req.n_tokens - j->n_cached : 0;
    c->stats.cached_tokens += j->n_cached;
    bt_dc_job_close_landing(c, j);
    bt_dc_act_control(c, j->conn, BT_CONTROL_DONE, &j->head.ticket)->generation = j->generation;
    bt_dc_act_job(c, BT_DC_ENGINE_BEGIN, j)->token = j->first.token;
    j->out = j->first;
    struct bt_msg_output *o = bt_dc_act_output(c, j, j->first_index);

    o->has_stats = true; /* already here: the router ends an answer itself at a stop string */
    o->stats = bt_dc_leg_stats(j, now);
}

static void on_handoff(struct bt_dc_core *c, struct dc_job *j, const struct bt_control *m,
                       uint64_t now)
{
    if (m->handoff.index != j->req.n_tokens - j->req.n_prompt ||
        m->handoff.n_groups != c->opts.n_groups) {
        bt_dc_job_give_up(c, j, BT_ATTEMPT_RETRY, "the hand-off does not fit the request");
        return;
    }
    if (j->resent && m->handoff.first.token != j->tokens[j->req.n_tokens]) {
        bt_dc_job_give_up(c, j, BT_ATTEMPT_RETRY,
                          "the hand-off has another first token than the router");
        return;
    }
    j->handed = true;
    j->first = m->handoff.first;
    j->first_index = m->handoff.index;
    j->t_handoff = now;
    j->t_progress = now;
    memcpy(j->n_shares, m->handoff.n_shares, sizeof j->n_shares);
    bt_dc_act_job(c, BT_DC_LAND_EXPECT, j)->n_shares = j->n_shares;
}

static void on_started(struct bt_dc_core *c, uint64_t now, uint64_t conn, struct dc_job *j,
                       const struct bt_control *m)
{
    if (j == NULL && c->giving_back) {
        bt_dc_act_refuse(c, conn, &m->ticket, BT_ATTEMPT_DRAINING, DRAINED);
    } else if (j == NULL) {
        bt_dc_park(c, &m->ticket, conn, m->started.n_tokens, now);
    } else if (j->state == JOB_WAITING) {
        bt_dc_job_lease(c, j, conn, m->started.n_tokens, now, now);
    } else {
        c->stats.stale++;
        if (j->conn != conn) {
            bt_dc_act_refuse(c, conn, &m->ticket, BT_ATTEMPT_INVALID,
                             "this ticket belongs to another prefill node");
        }
    }
}

/* P computes: pages will come. After the hand-off they alone count. Of a lease that is over: P was told how it ended, and
 * a revoke now could overtake that `done`. */
static void on_computing(struct bt_dc_core *c, uint64_t now, uint64_t conn, struct dc_job *j,
                         const struct bt_control *m)
{
    if (j == NULL || j->conn != conn || j->generation != m->generation) {
        c->stats.stale++;
    } else if (j->state == JOB_LANDING && !j->handed) {
        j->t_progress = now;
    }
}

static void on_forget(struct bt_dc_core *c, uint64_t conn, struct dc_job *j,
                      const struct bt_control *m)
{
    struct parked *p = bt_dc_parked_find(c, &m->ticket);

    if (p != NULL && p->conn == conn) {
        bt_dc_parked_drop(c, p);
        return;
    }
    /* 0: P has seen no grant. Another generation's answer must not end this lease. */
    if (j == NULL || j->conn != conn || (m->generation != 0 && m->generation != j->generation)) {
        c->stats.stale++;
        return;
    }
    /* P tells the router itself why (token 0 ended the answer, cancelled, failed): a second report
     * from here could overtake it and start a retry. Once the sequence runs from D's own pages P's
     * word no longer counts. */
    if (j->state == JOB_LEASING || j->state == JOB_LANDING) {
        bt_dc_job_end(c, j);
    }
}

void bt_dc_on_control(struct bt_dc_core *c, uint64_t now, uint64_t conn, const struct bt_control *m)
{
    struct dc_job *j = bt_ticket_table_by_ticket(&c->jobs, &m->ticket);

    bt_dc_begin(c);
    switch (m->kind) {
    case BT_CONTROL_STARTED:
        on_started(c, now, conn, j, m);
        return;
    case BT_CONTROL_HANDOFF:
        if (j != NULL && j->conn == conn && j->state == JOB_LANDING &&
            j->generation == m->generation && !j->handed) {
            on_handoff(c, j, m, now);
            return;
        }
        c->stats.stale++;
        if (j == NULL) {
            bt_dc_act_revoke(c, conn, &m->ticket, m->generation,
                             c->giving_back ? BT_ATTEMPT_DRAINING : BT_ATTEMPT_RETRY);
        }
        return;
    case BT_CONTROL_FORGET:
        on_forget(c, conn, j, m);
        return;
    case BT_CONTROL_COMPUTING:
        on_computing(c, now, conn, j, m);
        return;
    case BT_CONTROL_GRANT:
    case BT_CONTROL_REFUSE:
    case BT_CONTROL_REVOKE:
    case BT_CONTROL_DONE:
    case BT_CONTROL_KINDS:
        break; /* never sent to a decode node */
    }
    c->stats.stale++;
}

void bt_dc_on_landed(struct bt_dc_core *c, uint64_t now, const struct bt_ticket *t,
                     uint64_t generation)
{
    struct dc_job *j = job_by_generation(c, t, generation);

    bt_dc_begin(c);
    if (j != NULL) {
        j->t_progress = j->t_page = now;
    }
}

void bt_dc_on_land_full(struct bt_dc_core *c, uint64_t now, const struct bt_ticket *t,
                        uint64_t generation, enum bt_status st, uint64_t bytes, uint64_t move_ns)
{
    struct dc_job *j = job_by_generation(c, t, generation);

    bt_dc_begin(c);
    if (j == NULL || j->state != JOB_LANDING) {
        return;
    }
    if (st != BT_OK) {
        bt_dc_job_give_up(c, j, BT_ATTEMPT_RETRY, "the pages that came do not match the hand-off");
        return;
    }
    j->full = true;
    j->t_full = now;
    j->bytes = bytes;
    j->move_ns = move_ns;
    job_try_run(c, j, now);
}

void bt_dc_on_land_closed(struct bt_dc_core *c, uint64_t now, const struct bt_ticket *t,
                          uint64_t generation)
{
    struct dc_job *j = job_by_generation(c, t, generation);

    (void)now;
    bt_dc_begin(c);
    BT_ASSERT(j != NULL && j->land_open);
    j->land_open = false;
    if (j->state == JOB_ENDING) {
        bt_dc_job_remove(c, j);
    }
}
