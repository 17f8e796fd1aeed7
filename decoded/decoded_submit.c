/* How jobs begin at a decode node: submits of routers, and prefill nodes' `started` that wait for theirs; and what else
 * routers say: cancels, the end of a session or of the time to drain. Owns the parked messages. */

#include "decoded/decoded_core_int.h"

#include <stdio.h>
#include <string.h>
#include "base/assert.h"

#define OVER "the request is over"

_Static_assert(_Alignof(struct bt_logit_bias) <= sizeof(uint32_t),
               "the bias lies right behind the tokens");

/* Whether P computed all tokens of the submit, or all but the last: when it sends again, the first token of the answer
 * is known to the router already. */
static bool counts_agree(struct dc_job *j, uint32_t n_tokens)
{
    if (n_tokens + 1 == j->req.n_tokens && n_tokens >= j->req.n_prompt) {
        j->resent = true;
        j->req.n_tokens--;
    }
    return n_tokens == j->req.n_tokens;
}

void bt_dc_job_lease(struct bt_dc_core *c, struct dc_job *j, uint64_t conn, uint32_t n_tokens,
                     uint64_t since, uint64_t now)
{
    if (!counts_agree(j, n_tokens)) {
        c->stats.stale++;
        bt_dc_act_refuse(c, conn, &j->head.ticket, BT_ATTEMPT_INVALID,
                         "the token counts of the two legs differ");
        bt_dc_job_fail(c, j, BT_ATTEMPT_RETRY, "the token counts of the two legs differ");
        return;
    }
    j->conn = conn;
    j->t_started = since;
    j->t_progress = now;
    bt_dc_job_set_state(c, j, JOB_LEASING);
    j->engine_knows = true;
    bt_dc_act_job(c, BT_DC_ENGINE_LAND, j)->request = &j->req;
}

/* The prompt is computed here: it waits in the engine, which leases its pages when it starts. */
static void job_compute(struct bt_dc_core *c, struct dc_job *j, uint64_t now)
{
    j->local = true;
    j->t_submit = j->t_progress = now;
    bt_dc_job_set_state(c, j, JOB_COMPUTING);
    j->engine_knows = true;
    bt_dc_act_job(c, BT_DC_ENGINE_SUBMIT, j)->request = &j->req;
}

/* ---- parked messages ---- */

struct parked *bt_dc_parked_find(struct bt_dc_core *c, const struct bt_ticket *t)
{
    for (uint32_t i = 0; c->n_parked > 0 && i < c->opts.parked_max; i++) {
        if (c->parked[i].used && bt_ticket_equal(&c->parked[i].ticket, t)) {
            return &c->parked[i];
        }
    }
    return NULL;
}

void bt_dc_parked_drop(struct bt_dc_core *c, struct parked *p)
{
    p->used = false;
    c->n_parked--;
}

void bt_dc_park(struct bt_dc_core *c, const struct bt_ticket *t, uint64_t conn, uint32_t n_tokens,
                uint64_t now)
{
    if (bt_dc_parked_find(c, t) != NULL) {
        c->stats.stale++;
        return;
    }
    for (uint32_t i = 0; i < c->opts.parked_max; i++) {
        if (!c->parked[i].used) {
            c->parked[i] = (struct parked){true, *t, conn, n_tokens, now};
            c->n_parked++;
            return;
        }
    }
    c->stats.stale++;
    bt_dc_act_refuse(c, conn, t, BT_ATTEMPT_RETRY, "too many prompts without a submit");
}

/* ---- from routers ---- */

/* Whether the core has room for it: the engine judges the rest. */
static bool request_fits(const struct bt_dc_core *c, const struct bt_msg_submit *s)
{
    return s->n_tokens <= c->opts.context && s->sampling.n_bias <= BT_LOGIT_BIAS_MAX;
}

static void copy_request(struct bt_dc_core *c, struct dc_job *j, const struct bt_msg_submit *s)
{
    j->tokens = bt_slab_get(&c->requests);
    BT_ASSERT(j->tokens != NULL); /* one for each job */
    struct bt_logit_bias *bias = (struct bt_logit_bias *)(void *)(j->tokens + s->n_tokens);

    memcpy(j->tokens, s->tokens, s->n_tokens * sizeof *j->tokens);
    if (s->sampling.n_bias > 0) {
        memcpy(bias, s->sampling.bias, s->sampling.n_bias * sizeof *bias);
    }
    j->req =
        (struct bt_dc_request){(uint32_t)s->n_tokens, s->n_prompt,
                               s->prompt_logprobs && s->peer_instance == 0, j->tokens, s->sampling};
    j->req.sampling.bias = bias;
    j->has_logprobs = s->sampling.logprobs;
}

void bt_dc_on_submit(struct bt_dc_core *c, uint64_t now, uint32_t router,
                     const struct bt_msg_submit *s)
{
    bt_dc_begin(c);
    if (bt_ticket_table_by_ticket(&c->jobs, &s->ticket) != NULL) {
        c->stats.stale++;
        bt_dc_act_end(c, router, s->request_id, &s->ticket, BT_ATTEMPT_INVALID,
                      "this ticket is already in use");
        return;
    }
    if (c->giving_back) {
        bt_dc_act_end(c, router, s->request_id, &s->ticket, BT_ATTEMPT_DRAINING, DRAINED);
        return;
    }
    if (!request_fits(c, s)) {
        bt_dc_act_end(c, router, s->request_id, &s->ticket, BT_ATTEMPT_INVALID,
                      "the request is longer than the model's context");
        return;
    }
    struct dc_job *j = bt_ticket_table_add(&c->jobs, &s->ticket);

    if (j == NULL) {
        bt_dc_act_end(c, router, s->request_id, &s->ticket, BT_ATTEMPT_REFUSED,
                      "the decode queue is full");
        return;
    }
    j->router = router;
    snprintf(j->request_id, sizeof j->request_id, "%s", s->request_id != NULL ? s->request_id : "");
    copy_request(c, j, s);
    if (s->peer_instance == 0) {
        job_compute(c, j, now);
        return;
    }
    struct parked *p = bt_dc_parked_find(c, &s->ticket);

    if (p != NULL) {
        uint64_t conn = p->conn;
        uint32_t n = p->n_tokens;
        uint64_t since = p->since;

        bt_dc_parked_drop(c, p);
        bt_dc_job_lease(c, j, conn, n, since, now);
    }
}

void bt_dc_on_cancel(struct bt_dc_core *c, uint64_t now, uint32_t router, const struct bt_ticket *t)
{
    struct dc_job *j = bt_ticket_table_by_ticket(&c->jobs, t);

    (void)now;
    bt_dc_begin(c);
    if (j == NULL || j->router != router) {
        return; /* already over: cancel and the end of an attempt may cross */
    }
    bt_dc_job_revoke_at_peer(c, j, BT_ATTEMPT_RETRY, OVER);
    bt_dc_job_end(c, j);
}

void bt_dc_on_router_lost(struct bt_dc_core *c, uint64_t now, uint32_t router)
{
    uint32_t pos = 0;
    struct dc_job *j;

    (void)now;
    bt_dc_begin(c);
    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->router == router && j->state != JOB_ENDING) {
            bt_dc_job_revoke_at_peer(c, j, BT_ATTEMPT_RETRY, OVER);
            bt_dc_job_end(c, j);
        }
    }
}

void bt_dc_on_give_back(struct bt_dc_core *c, uint64_t now)
{
    uint32_t pos = 0;
    struct dc_job *j;

    (void)now;
    bt_dc_begin(c);
    c->giving_back = true;
    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->state != JOB_ENDING) {
            bt_dc_job_give_up(c, j, BT_ATTEMPT_DRAINING, DRAINED);
        }
    }
}

void bt_dc_on_resume(struct bt_dc_core *c)
{
    bt_dc_begin(c);
    c->giving_back = false;
}
