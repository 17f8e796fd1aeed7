/* The decode node's decisions: the core's life, its list of actions, how jobs end, and deadlines. Owns jobs as plain
 * state; refuses to know of sockets, threads, UCX, the engine's inside and the clock. */

#include "decoded/decoded_core_int.h"

#include <string.h>
#include "base/assert.h"
#include "base/mem.h"

/* The longest list: each job ended, with its peer told, and each parked message refused. */
#define ACTIONS_PER_JOB 8
#define ACTIONS_MORE    32
#define BIT(s)          (1u << (s))

static const uint8_t legal_next[] = {
    [JOB_WAITING] = BIT(JOB_LEASING) | BIT(JOB_COMPUTING) | BIT(JOB_ENDING),
    [JOB_LEASING] = BIT(JOB_LANDING) | BIT(JOB_ENDING),
    [JOB_LANDING] = BIT(JOB_RUNNING) | BIT(JOB_ENDING),
    [JOB_COMPUTING] = BIT(JOB_RUNNING) | BIT(JOB_ENDING),
    [JOB_RUNNING] = BIT(JOB_ENDING),
    [JOB_ENDING] = 0,
};

/* ---- life ---- */

enum bt_status bt_dc_core_create(const struct bt_dc_opts *opts, struct bt_dc_core **out)
{
    struct bt_dc_core *c = bt_calloc(1, sizeof *c);

    if (c == NULL) {
        return BT_ERR_NOMEM;
    }
    c->opts = *opts;
    while (c->leases_mask + 1 < opts->max_jobs) {
        c->leases_mask = c->leases_mask << 1 | 1;
    }
    c->actions_max = (size_t)ACTIONS_PER_JOB * opts->max_jobs + opts->parked_max + ACTIONS_MORE;
    c->actions.items = bt_reserve(c->actions_max * sizeof *c->actions.items);
    c->leases = bt_calloc(c->leases_mask + 1, sizeof *c->leases);
    c->parked = bt_calloc(opts->parked_max, sizeof *c->parked);
    bool ok = c->actions.items != NULL && c->leases != NULL && c->parked != NULL &&
              bt_ticket_table_init(&c->jobs, sizeof(struct dc_job), opts->max_jobs,
                                   opts->first_slot) == BT_OK &&
              bt_slab_init(&c->requests, "decode requests",
                           opts->context * sizeof(uint32_t) +
                               BT_LOGIT_BIAS_MAX * sizeof(struct bt_logit_bias),
                           opts->max_jobs) == BT_OK;

    if (!ok) {
        bt_dc_core_destroy(c);
        return BT_ERR_NOMEM;
    }
    *out = c;
    return BT_OK;
}

void bt_dc_core_destroy(struct bt_dc_core *c)
{
    uint32_t pos = 0;
    struct dc_job *j;

    if (c == NULL) {
        return;
    }
    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        bt_slab_put(&c->requests, j->tokens);
    }
    bt_slab_fini(&c->requests);
    bt_ticket_table_fini(&c->jobs);
    bt_unreserve(c->actions.items, c->actions_max * sizeof *c->actions.items);
    bt_free(c->leases);
    bt_free(c->parked);
    bt_free(c);
}

const struct bt_dc_actions *bt_dc_core_actions(const struct bt_dc_core *c)
{
    return &c->actions;
}

const struct bt_dc_stats *bt_dc_core_stats(const struct bt_dc_core *c)
{
    return &c->stats;
}

uint32_t bt_dc_core_jobs(const struct bt_dc_core *c)
{
    return c->jobs.count;
}

/* ---- actions ---- */

void bt_dc_begin(struct bt_dc_core *c)
{
    c->actions.n = 0;
}

static struct bt_dc_action *act(struct bt_dc_core *c, enum bt_dc_action_kind kind)
{
    struct bt_dc_actions *a = &c->actions;

    BT_ASSERT(a->n < c->actions_max);
    struct bt_dc_action *x = &a->items[a->n++];

    memset(x, 0, sizeof *x);
    x->kind = kind;
    return x;
}

struct bt_dc_action *bt_dc_act_job(struct bt_dc_core *c, enum bt_dc_action_kind kind,
                                   const struct dc_job *j)
{
    struct bt_dc_action *a = act(c, kind);

    a->job = j->head.id;
    a->ticket = j->head.ticket;
    a->generation = j->generation;
    a->peer = j->conn;
    a->router = j->router;
    return a;
}

struct bt_control *bt_dc_act_control(struct bt_dc_core *c, uint64_t conn, enum bt_control_kind kind,
                                     const struct bt_ticket *t)
{
    struct bt_dc_action *a = act(c, BT_DC_CONTROL);

    a->peer = conn;
    a->control.kind = kind;
    a->control.ticket = *t;
    return &a->control;
}

void bt_dc_act_refuse(struct bt_dc_core *c, uint64_t conn, const struct bt_ticket *t,
                      enum bt_attempt_reason reason, const char *text)
{
    struct bt_control *m = bt_dc_act_control(c, conn, BT_CONTROL_REFUSE, t);

    m->refuse.reason = reason;
    m->refuse.text = text;
}

void bt_dc_act_end(struct bt_dc_core *c, uint32_t router, const char *request_id,
                   const struct bt_ticket *t, enum bt_attempt_reason reason, const char *text)
{
    struct bt_dc_action *a = act(c, BT_DC_ATTEMPT_END);

    a->router = router;
    a->request_id = request_id;
    a->end = (struct bt_msg_attempt_end){.ticket = *t, .reason = reason, .text = text};
}

/* ---- jobs ---- */

void bt_dc_job_set_state(struct bt_dc_core *c, struct dc_job *j, enum job_state next)
{
    BT_ASSERT((legal_next[j->state] & BIT(next)) != 0);
    c->n_running -= j->state == JOB_RUNNING;
    c->n_running += next == JOB_RUNNING;
    j->state = next;
}

struct dc_job *bt_dc_live_job(struct bt_dc_core *c, uint64_t id)
{
    struct dc_job *j = bt_ticket_table_by_id(&c->jobs, id);

    return j != NULL && j->state != JOB_ENDING ? j : NULL;
}

/* What still lands over the same connection is witness to its pages from now on (waits_its_turn). */
static void leave_page_time(struct bt_dc_core *c, const struct dc_job *gone)
{
    uint32_t pos = 0;
    struct dc_job *j;

    while (gone->t_page != 0 && (j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->state == JOB_LANDING && j->conn == gone->conn && j->t_page < gone->t_page) {
            j->t_page = gone->t_page;
        }
    }
}

void bt_dc_job_remove(struct bt_dc_core *c, struct dc_job *j)
{
    if (j->engine_knows) {
        bt_dc_act_job(c, BT_DC_ENGINE_RELEASE, j);
    }
    if (j->generation != 0) {
        bt_dc_lease_drop(c, j);
    }
    bt_slab_put(&c->requests, j->tokens);
    leave_page_time(c, j);
    bt_ticket_table_remove(&c->jobs, j);
}

void bt_dc_job_close_landing(struct bt_dc_core *c, struct dc_job *j)
{
    if (j->land_open && !j->land_closing) {
        j->land_closing = true;
        bt_dc_act_job(c, BT_DC_LAND_CLOSE, j);
    }
}

void bt_dc_job_end(struct bt_dc_core *c, struct dc_job *j)
{
    if (j->state == JOB_RUNNING || (j->state == JOB_COMPUTING && j->engine_knows)) {
        bt_dc_act_job(c, BT_DC_ENGINE_CANCEL, j);
    }
    bt_ticket_table_forget(&c->jobs, j);
    bt_dc_job_set_state(c, j, JOB_ENDING);
    if (j->land_open) {
        bt_dc_act_job(c, BT_DC_ENGINE_QUARANTINE, j);
        bt_dc_job_close_landing(c, j);
        return;
    }
    bt_dc_job_remove(c, j);
}

void bt_dc_act_revoke(struct bt_dc_core *c, uint64_t conn, const struct bt_ticket *t,
                      uint64_t generation, enum bt_attempt_reason reason)
{
    struct bt_control *m = bt_dc_act_control(c, conn, BT_CONTROL_REVOKE, t);

    m->generation = generation;
    m->revoke.reason = reason;
}

void bt_dc_job_revoke_at_peer(struct bt_dc_core *c, struct dc_job *j, enum bt_attempt_reason reason,
                              const char *text)
{
    if (j->state == JOB_LANDING) {
        bt_dc_act_revoke(c, j->conn, &j->head.ticket, j->generation, reason);
    } else if (j->state == JOB_LEASING) {
        bt_dc_act_refuse(c, j->conn, &j->head.ticket, reason, text);
    }
}

void bt_dc_job_fail(struct bt_dc_core *c, struct dc_job *j, enum bt_attempt_reason reason,
                    const char *text)
{
    c->stats.failures++;
    bt_dc_act_end(c, j->router, j->request_id, &j->head.ticket, reason, text);
    bt_dc_job_end(c, j);
}

void bt_dc_job_give_up(struct bt_dc_core *c, struct dc_job *j, enum bt_attempt_reason reason,
                       const char *text)
{
    bt_dc_job_revoke_at_peer(c, j, reason, text);
    bt_dc_job_fail(c, j, reason, text);
}

/* ---- time ---- */

/* Pages of another ticket came over the same connection of late: a prefill node sends one prompt after the other. If the
 * pages of this one are lost, P notices. */
static bool waits_its_turn(struct bt_dc_core *c, const struct dc_job *late, uint64_t now)
{
    uint32_t pos = 0;
    struct dc_job *j;

    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->conn == late->conn && j->t_page != 0 && now - j->t_page <= c->opts.transfer_ns) {
            return true;
        }
    }
    return false;
}

void bt_dc_on_tick(struct bt_dc_core *c, uint64_t now)
{
    uint32_t pos = 0;
    struct dc_job *j;

    bt_dc_begin(c);
    for (uint32_t i = 0; c->n_parked > 0 && i < c->opts.parked_max; i++) {
        struct parked *p = &c->parked[i];

        if (p->used && now - p->since > c->opts.park_ns) {
            c->stats.stale++;
            bt_dc_act_refuse(c, p->conn, &p->ticket, BT_ATTEMPT_RETRY,
                             "no submit came for this ticket");
            bt_dc_parked_drop(c, p);
        }
    }
    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->state == JOB_LANDING && now - j->t_progress > c->opts.transfer_ns &&
            !waits_its_turn(c, j, now)) {
            c->stats.stalled++;
            bt_dc_job_give_up(c, j, BT_ATTEMPT_RETRY, "the transfer made no progress");
        } else if (j->state == JOB_COMPUTING && j->t_compute == 0 &&
                   now - j->t_submit > c->opts.transfer_ns) {
            bt_dc_job_fail(c, j, BT_ATTEMPT_REFUSED,
                           "the decode node had no room for the prompt in time");
        }
    }
}
