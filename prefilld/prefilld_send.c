/* The way of a prompt's pages to its decode node: grants, pushes, the hand-off, and what the decode node answers. */

#include "prefilld/prefilld_core_int.h"

#include <stdio.h>
#include "base/assert.h"

void bt_pf_push_layer(struct bt_pf_core *c, struct pf_job *j, uint32_t group, uint32_t layer)
{
    struct layer_progress *l = &j->layers[c->layer_base[group] + layer];
    uint32_t first = l->pushed_end > j->first_page[group] ? l->pushed_end : j->first_page[group];

    if (first >= l->avail_end) {
        return;
    }
    struct bt_pf_action *a = bt_pf_act(c, BT_PF_PUSH);

    a->job = j->head.id;
    a->ticket = j->head.ticket;
    a->generation = j->generation;
    a->peer = j->conn;
    a->push.group = group;
    a->push.layer = layer;
    a->push.first = first;
    a->push.n_pages = l->avail_end - first;
    a->push.page_ids = j->page_ids + (size_t)group * j->n_pages + first;
    l->pushed_end = l->avail_end;
    j->n_shares += a->push.n_pages;
    j->pushes_open++;
}

void bt_pf_send_handoff(struct bt_pf_core *c, struct pf_job *j)
{
    struct bt_control *m = bt_pf_act_control(c, j->conn, BT_CONTROL_HANDOFF, &j->head.ticket);

    m->generation = j->generation;
    m->handoff.index = j->index;
    m->handoff.first = j->first;
    m->handoff.has_logprobs = j->want_logprobs;
    m->handoff.n_groups = c->opts.n_groups;
    for (uint32_t g = 0; g < c->opts.n_groups; g++) {
        uint32_t pages = j->n_pages > j->first_page[g] ? j->n_pages - j->first_page[g] : 0;

        m->handoff.n_shares[g] = (uint64_t)pages * c->opts.n_layers[g];
    }
    j->handed = true;
    c->stats.handoffs++;
}

/* First page that a token behind all these sees: those before it are not kept, whatever a grant asks for. */
static uint32_t first_visible(const struct bt_pf_core *c, uint32_t group, uint32_t n_tokens)
{
    uint32_t window = c->opts.window[group];

    return window == 0 || n_tokens < window ? 0 : (n_tokens - window + 1) / c->opts.page_tokens;
}

static void on_grant(struct bt_pf_core *c, uint64_t now, uint64_t conn, struct pf_job *j,
                     const struct bt_control *m)
{
    if (m->generation == 0) { /* no decode node counts its leases from there */
        c->stats.stale++;
        return;
    }
    if (j == NULL || !j->started_sent || j->conn != conn || j->granted ||
        m->grant.n_groups != c->opts.n_groups) {
        c->stats.stale++;
        if (j == NULL || !j->granted || j->generation != m->generation) {
            bt_pf_act_control(c, conn, BT_CONTROL_FORGET, &m->ticket)->generation = m->generation;
        }
        return;
    }
    j->granted = true;
    j->t_progress = j->t_alive = now;
    j->generation = m->generation;
    for (uint32_t g = 0; g < c->opts.n_groups; g++) {
        uint32_t kept = first_visible(c, g, j->n_tokens);

        j->first_page[g] = m->grant.first_page[g] > kept ? m->grant.first_page[g] : kept;
    }
    for (uint32_t g = 0; g < c->opts.n_groups; g++) {
        for (uint32_t l = 0; l < c->opts.n_layers[g]; l++) {
            bt_pf_push_layer(c, j, g, l);
        }
    }
    if (j->has_token) {
        bt_pf_send_handoff(c, j);
    }
}

/* What a decode node says of an attempt is passed on only where it does not speak of the request: it tells the router
 * itself, and whoever comes first decides. */
static enum bt_attempt_reason reason_from_peer(uint32_t reason)
{
    return reason == BT_ATTEMPT_REFUSED || reason == BT_ATTEMPT_DRAINING
               ? (enum bt_attempt_reason)reason
               : BT_ATTEMPT_RETRY;
}

void bt_pf_on_control(struct bt_pf_core *c, uint64_t now, uint64_t conn, const struct bt_control *m)
{
    struct pf_job *j = bt_ticket_table_by_ticket(&c->jobs, &m->ticket);
    bool match = j != NULL && j->started_sent && j->conn == conn &&
                 (!j->granted || j->generation == m->generation);

    bt_pf_begin(c);
    switch (m->kind) {
    case BT_CONTROL_GRANT:
        on_grant(c, now, conn, j, m);
        return;
    case BT_CONTROL_REFUSE:
        if (j != NULL && j->started_sent && j->conn == conn) {
            snprintf(c->text, sizeof c->text, "refused by the decode node: %s", m->refuse.text);
            bt_pf_job_lose_peer(c, j, now, reason_from_peer(m->refuse.reason), c->text);
            return;
        }
        break;
    case BT_CONTROL_REVOKE:
        if (match) {
            bt_pf_job_lose_peer(c, j, now, reason_from_peer(m->revoke.reason),
                                "revoked by the decode node");
            return;
        }
        break;
    case BT_CONTROL_DONE:
        if (match && j->handed) {
            c->stats.done++;
            j->done = true;
            bt_pf_job_end(c, j);
            return;
        }
        break;
    case BT_CONTROL_STARTED:
    case BT_CONTROL_HANDOFF:
    case BT_CONTROL_FORGET:
    case BT_CONTROL_COMPUTING:
    case BT_CONTROL_KINDS:
        break; /* never sent to a prefill node */
    }
    c->stats.stale++;
}

/* Of its current attempt: sends of one before may still end. */
static bool is_current(const struct pf_job *j, const struct bt_ticket *t)
{
    return !j->kept && bt_ticket_equal(&j->head.ticket, t);
}

void bt_pf_count_push(struct bt_pf_core *c, uint64_t now, uint64_t job, const struct bt_ticket *t,
                      uint64_t post_ns, uint64_t move_ns)
{
    struct pf_job *j = bt_ticket_table_by_id(&c->jobs, job);

    BT_ASSERT(j != NULL && j->pushes_open > 0);
    if (!is_current(j, t)) {
        return;
    }
    uint64_t from = move_ns < now ? now - move_ns : 0;

    j->post_ns += post_ns;
    j->t_push_first = j->t_push_last == 0 || from < j->t_push_first ? from : j->t_push_first;
    j->t_push_last = now;
}

void bt_pf_on_pushed(struct bt_pf_core *c, uint64_t now, uint64_t job, const struct bt_ticket *t,
                     enum bt_status st)
{
    struct pf_job *j = bt_ticket_table_by_id(&c->jobs, job);

    bt_pf_begin(c);
    BT_ASSERT(j != NULL && j->pushes_open > 0);
    j->pushes_open--;
    if (j->state == JOB_ENDING) {
        bt_pf_job_finish_ending(c, j);
        return;
    }
    if (!is_current(j, t)) {
        return;
    }
    struct pf_peer *p = bt_pf_peer_by_conn(c, j->conn);

    j->t_progress = now;
    if (p != NULL) {
        p->t_pushed = now;
    }
    if (st != BT_OK) {
        bt_pf_job_forget_at_peer(c, j);
        bt_pf_job_lose_peer(c, j, now, BT_ATTEMPT_RETRY, "sending pages to the decode node failed");
    }
}
