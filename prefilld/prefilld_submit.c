/* What routers say to a prefill node: submits, the one that goes on with what was kept, cancels, the end of a session or
 * of the time to drain. */

#include "prefilld/prefilld_core_int.h"

#include <stdio.h>
#include <string.h>
#include "base/assert.h"
#include "base/hash.h"

/* What a prompt's KV and its first token depend on. */
static uint64_t identity_of(const struct bt_msg_submit *s, size_t n_tokens)
{
    uint64_t x = bt_hash64(s->tokens, n_tokens * sizeof *s->tokens, s->n_prompt);
    const uint64_t more[] = {s->sampling.seed, s->sampling.choice, s->sampling.max_tokens,
                             s->sampling.logprobs};

    return bt_hash64(more, sizeof more, x);
}

static void job_init(struct bt_pf_core *c, struct pf_job *j, const struct bt_msg_submit *s)
{
    j->n_tokens = (uint32_t)s->n_tokens;
    j->n_prompt = s->n_prompt;
    j->n_pages = (j->n_tokens + c->opts.page_tokens - 1) / c->opts.page_tokens;
    j->identity = identity_of(s, s->n_tokens);
    j->peer_instance = s->peer_instance;
    j->want_logprobs = s->sampling.logprobs;
    j->prompt_logprobs = s->prompt_logprobs;
    if (s->peer_instance == 0) {
        return;
    }
    j->layers = bt_slab_get(&c->tables);
    BT_ASSERT(j->layers != NULL); /* one for each job */
    j->page_ids = (uint32_t *)(void *)(j->layers + c->n_layers_all);
    memset(j->layers, 0, c->n_layers_all * sizeof *j->layers);
    memset(j->page_ids, 0, (size_t)c->opts.n_groups * j->n_pages * sizeof *j->page_ids);
}

/* Whether the submit wants what was kept: the same request, with the first token at its end if the router has it. */
static bool kept_fits(const struct pf_job *j, const struct bt_msg_submit *s)
{
    bool same = s->peer_instance != 0 && !s->prompt_logprobs && s->n_prompt == j->n_prompt &&
                s->n_tokens >= j->n_tokens && j->identity == identity_of(s, j->n_tokens);

    return same && (s->n_tokens == j->n_tokens ||
                    (s->n_tokens == (size_t)j->n_tokens + 1 && j->has_token && j->finish == 0 &&
                     s->tokens[j->n_tokens] == j->first.token));
}

/* The job that the submit replaces, if it is kept and fits; else it is given up, to be computed anew. */
static struct pf_job *kept_find(struct bt_pf_core *c, uint32_t router,
                                const struct bt_msg_submit *s)
{
    struct pf_job *j = s->has_replaces ? bt_ticket_table_by_ticket(&c->jobs, &s->replaces) : NULL;

    if (j == NULL || !j->kept || j->router != router) {
        return NULL;
    }
    if (!kept_fits(j, s)) {
        bt_pf_job_end(c, j);
        return NULL;
    }
    return j;
}

/* A kept job goes on under a new ticket, with a new peer. */
static void job_adopt(struct bt_pf_core *c, struct pf_job *j, uint64_t now, struct pf_peer *p,
                      const struct bt_msg_submit *s)
{
    bool renamed = bt_ticket_table_rename(&c->jobs, j, &s->ticket);

    BT_ASSERT(renamed); /* the ticket is not in use: bt_pf_on_submit() has looked */
    bt_pf_job_set_kept(c, j, false);
    c->stats.resent++;
    j->peer_instance = s->peer_instance;
    j->t_peer = j->t_progress = now;
    struct bt_pf_action *a = bt_pf_act(c, BT_PF_ADOPTED);

    a->job = j->head.id;
    a->ticket = s->ticket;
    j->stats.resent = true;
    j->known = s->n_tokens > j->n_tokens; /* else they came when their attempt was over */
    if (j->state != JOB_QUEUED && p->state == PEER_UP) {
        bt_pf_send_started(c, j, p);
    }
    if (j->has_token) {
        bt_pf_job_deliver(c, j);
    }
}

static void job_start(struct bt_pf_core *c, uint64_t now, uint32_t router,
                      const struct bt_msg_submit *s)
{
    struct pf_job *j = bt_ticket_table_add(&c->jobs, &s->ticket);

    if (j == NULL && bt_pf_kept_evict(c, false)) {
        j = bt_ticket_table_add(&c->jobs, &s->ticket);
    }
    if (j == NULL) {
        bt_pf_act_end(c, router, s->request_id, &s->ticket, BT_ATTEMPT_REFUSED,
                      "the prefill queue is full");
        return;
    }
    j->router = router;
    snprintf(j->request_id, sizeof j->request_id, "%s", s->request_id != NULL ? s->request_id : "");
    j->t_submit = now;
    job_init(c, j, s);
    j->engine_knows = true;
    struct bt_pf_action *a = bt_pf_act(c, BT_PF_ENGINE_SUBMIT);

    a->job = j->head.id;
    a->submit = s;
}

void bt_pf_on_submit(struct bt_pf_core *c, uint64_t now, uint32_t router,
                     const struct bt_msg_submit *s)
{
    struct pf_peer *p = NULL;

    bt_pf_begin(c);
    if (bt_ticket_table_by_ticket(&c->jobs, &s->ticket) != NULL) {
        c->stats.stale++;
        bt_pf_act_end(c, router, s->request_id, &s->ticket, BT_ATTEMPT_INVALID,
                      "this ticket is already in use");
        return;
    }
    if (c->giving_back) {
        bt_pf_act_end(c, router, s->request_id, &s->ticket, BT_ATTEMPT_DRAINING, DRAINED);
        return;
    }
    if (s->n_tokens > c->opts.context) {
        bt_pf_act_end(c, router, s->request_id, &s->ticket, BT_ATTEMPT_INVALID,
                      "the prompt is longer than the model's context");
        return;
    }
    if (s->peer_instance != 0 && (p = bt_pf_peer_of_submit(c, now, s)) == NULL) {
        bt_pf_act_end(c, router, s->request_id, &s->ticket, BT_ATTEMPT_REFUSED,
                      "too many decode peers");
        return;
    }
    struct pf_job *kept = kept_find(c, router, s);

    if (kept != NULL) {
        job_adopt(c, kept, now, p, s);
    } else {
        job_start(c, now, router, s);
    }
}

void bt_pf_on_cancel(struct bt_pf_core *c, uint64_t now, uint32_t router, const struct bt_ticket *t,
                     bool keep)
{
    struct pf_job *j = bt_ticket_table_by_ticket(&c->jobs, t);

    bt_pf_begin(c);
    if (j == NULL || j->router != router || (keep && j->kept)) {
        return; /* already over: cancel and the end of an attempt may cross */
    }
    bt_pf_job_forget_at_peer(c, j);
    if (!keep || !bt_pf_job_keep(c, j, now)) {
        bt_pf_job_end(c, j);
    }
}

void bt_pf_on_router_lost(struct bt_pf_core *c, uint64_t now, uint32_t router)
{
    uint32_t pos = 0;
    struct pf_job *j;

    (void)now;
    bt_pf_begin(c);
    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->router == router && j->state != JOB_ENDING) {
            bt_pf_job_forget_at_peer(c, j);
            bt_pf_job_end(c, j);
        }
    }
}

void bt_pf_on_give_back(struct bt_pf_core *c, uint64_t now)
{
    uint32_t pos = 0;
    struct pf_job *j;

    (void)now;
    bt_pf_begin(c);
    c->giving_back = true;
    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->state != JOB_ENDING) {
            bt_pf_job_forget_at_peer(c, j);
            bt_pf_job_fail(c, j, BT_ATTEMPT_DRAINING, DRAINED);
        }
    }
}

void bt_pf_on_resume(struct bt_pf_core *c)
{
    bt_pf_begin(c);
    c->giving_back = false;
}
