/* What the engine says: a prompt has begun, its pages come layer by layer, its first token ends the computing. */

#include "prefilld/prefilld_core_int.h"

#include <stdio.h>
#include <string.h>
#include "base/assert.h"

void bt_pf_on_engine_failed(struct bt_pf_core *c, uint64_t now, uint64_t job, enum bt_status st,
                            const char *text)
{
    struct pf_job *j = bt_pf_live_job(c, job);

    (void)now;
    bt_pf_begin(c);
    if (j == NULL) {
        return;
    }
    j->engine_knows = false;
    bt_pf_job_forget_at_peer(c, j);
    snprintf(c->text, sizeof c->text, "%s", text);
    bt_pf_job_fail(c, j,
                   st == BT_ERR_INVALID                      ? BT_ATTEMPT_INVALID
                   : st == BT_ERR_BUSY || st == BT_ERR_NOMEM ? BT_ATTEMPT_REFUSED
                                                             : BT_ATTEMPT_INTERNAL,
                   c->text);
}

void bt_pf_on_engine_started(struct bt_pf_core *c, uint64_t now, uint64_t job)
{
    struct pf_job *j = bt_pf_live_job(c, job);

    bt_pf_begin(c);
    if (j == NULL) {
        return;
    }
    bt_pf_job_set_state(c, j, JOB_COMPUTING);
    j->t_start = j->t_peer = now;
    struct pf_peer *p = bt_pf_peer_by_instance(c, j->peer_instance);

    if (p != NULL && p->state == PEER_UP && !j->kept) {
        bt_pf_send_started(c, j, p);
    }
}

void bt_pf_on_engine_cached(struct bt_pf_core *c, uint64_t now, uint64_t job, uint32_t n_tokens)
{
    struct pf_job *j = bt_pf_live_job(c, job);

    (void)now;
    bt_pf_begin(c);
    if (j != NULL) {
        BT_ASSERT(n_tokens < j->n_tokens);
        j->n_cached = n_tokens;
        c->stats.cached_tokens += n_tokens < j->n_prompt ? n_tokens : j->n_prompt;
    }
}

void bt_pf_on_engine_pages(struct bt_pf_core *c, uint64_t now, uint64_t job, uint32_t group,
                           uint32_t layer, uint32_t first, uint32_t end, const uint32_t *page_ids)
{
    struct pf_job *j = bt_pf_live_job(c, job);

    (void)now;
    bt_pf_begin(c);
    if (j == NULL || j->layers == NULL) {
        return;
    }
    BT_ASSERT(group < c->opts.n_groups && layer < c->opts.n_layers[group] && first <= end &&
              end <= j->n_pages);
    struct layer_progress *l = &j->layers[c->layer_base[group] + layer];

    memcpy(j->page_ids + (size_t)group * j->n_pages + first, page_ids,
           (end - first) * sizeof *page_ids);
    if (end > l->avail_end) {
        l->avail_end = end;
    }
    if (j->granted) {
        bt_pf_push_layer(c, j, group, layer);
    }
}

void bt_pf_job_deliver(struct bt_pf_core *c, struct pf_job *j)
{
    struct bt_pf_action *a = bt_pf_act(c, BT_PF_OUTPUT);

    c->out = j->first; /* the job's memory may go before the action is carried out */
    a->router = j->router;
    a->again = j->told;
    a->output = (struct bt_msg_output){
        .ticket = j->head.ticket,
        .index = j->index,
        .n_tokens = 1,
        .tokens = &c->out,
        .finish = j->finish,
        .has_logprobs = j->want_logprobs,
        .has_stats = true,
        .stats = j->known ? (struct bt_msg_leg_stats){.resent = true} : j->stats,
    };
    j->told = true;
    if (j->finish != 0 || j->peer_instance == 0) {
        bt_pf_job_forget_at_peer(c, j);
        bt_pf_job_end(c, j);
    } else if (j->granted) {
        bt_pf_send_handoff(c, j);
    }
}

void bt_pf_on_engine_token(struct bt_pf_core *c, uint64_t now, uint64_t job, uint32_t index,
                           const struct bt_sampled *s, uint32_t finish)
{
    struct pf_job *j = bt_pf_live_job(c, job);

    bt_pf_begin(c);
    if (j == NULL) {
        return;
    }
    double batch = c->n_computing;

    bt_pf_job_set_state(c, j, JOB_HELD);
    j->t_progress = now;
    j->index = index;
    j->first = *s;
    j->finish = finish;
    j->has_token = true;
    j->stats = (struct bt_msg_leg_stats){
        .queue_ns = j->t_start - j->t_submit,
        .prefill_ns = now - j->t_start,
        .cached_tokens = j->n_cached < j->n_prompt ? j->n_cached : j->n_prompt,
        .prefill_tokens = j->n_tokens - j->n_cached,
        .batch = batch,
        .resent = j->stats.resent,
    };
    if (!j->kept) {
        bt_pf_job_deliver(c, j);
    }
}

void bt_pf_on_engine_prompt_logprobs(struct bt_pf_core *c, uint64_t now, uint64_t job,
                                     uint32_t first, const struct bt_sampled *list, size_t n)
{
    struct pf_job *j = bt_pf_live_job(c, job);

    (void)now;
    bt_pf_begin(c);
    if (j == NULL) {
        return;
    }
    BT_ASSERT(!j->kept);
    struct bt_pf_action *a = bt_pf_act(c, BT_PF_OUTPUT);

    a->router = j->router;
    a->output = (struct bt_msg_output){.ticket = j->head.ticket,
                                       .has_logprobs = true,
                                       .prompt_first = first,
                                       .n_prompt_logprobs = n,
                                       .prompt_logprobs = list};
}

void bt_pf_on_engine_preempted(struct bt_pf_core *c, uint64_t now, uint64_t job)
{
    struct pf_job *j = bt_pf_live_job(c, job);

    (void)now;
    bt_pf_begin(c);
    if (j != NULL) {
        j->engine_knows = false;
        bt_pf_job_forget_at_peer(c, j);
        bt_pf_job_fail(c, j, BT_ATTEMPT_PREEMPTED, "the prefill node ran out of pages");
    }
}

void bt_pf_on_engine_alive(struct bt_pf_core *c, uint64_t now)
{
    uint32_t pos = 0;
    struct pf_job *j;

    bt_pf_begin(c);
    while (c->n_computing > 0 && (j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->state == JOB_COMPUTING && j->granted && now - j->t_alive >= c->opts.alive_ns) {
            j->t_alive = now;
            bt_pf_act_control(c, j->conn, BT_CONTROL_COMPUTING, &j->head.ticket)->generation =
                j->generation;
        }
    }
}

void bt_pf_on_engine_short(struct bt_pf_core *c, uint64_t now)
{
    (void)now;
    bt_pf_begin(c);
    (void)bt_pf_kept_evict(c, true); /* told again while it lasts */
}
