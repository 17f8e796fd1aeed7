/* What the engine says: a prompt that is computed here has begun, tokens come, or it gives up. */

#include "decoded/decoded_core_int.h"

#include <stdio.h>
#include "base/assert.h"

void bt_dc_on_engine_failed(struct bt_dc_core *c, uint64_t now, uint64_t job, enum bt_status st,
                            const char *text)
{
    struct dc_job *j = bt_dc_live_job(c, job);

    (void)now;
    bt_dc_begin(c);
    if (j == NULL) {
        return;
    }
    enum bt_attempt_reason reason = st == BT_ERR_INVALID                      ? BT_ATTEMPT_INVALID
                                    : st == BT_ERR_BUSY || st == BT_ERR_NOMEM ? BT_ATTEMPT_REFUSED
                                                                              : BT_ATTEMPT_INTERNAL;

    snprintf(c->text, sizeof c->text, "%s", text);
    j->engine_knows = false;
    bt_dc_job_give_up(c, j, reason, c->text);
}

struct bt_msg_output *bt_dc_act_output(struct bt_dc_core *c, struct dc_job *j, uint32_t index)
{
    struct bt_dc_action *a = bt_dc_act_job(c, BT_DC_OUTPUT, j);

    a->output = (struct bt_msg_output){.ticket = j->head.ticket,
                                       .index = index,
                                       .n_tokens = 1,
                                       .tokens = &j->out,
                                       .has_logprobs = j->has_logprobs};
    return &a->output;
}

static struct bt_msg_leg_stats local_stats(const struct dc_job *j, uint64_t now)
{
    return (struct bt_msg_leg_stats){
        .queue_ns = j->t_compute - j->t_submit,
        .prefill_ns = j->t_run - j->t_compute,
        .cached_tokens = j->n_cached < j->req.n_prompt ? j->n_cached : j->req.n_prompt,
        .prefill_tokens = j->req.n_tokens - j->n_cached,
        .decode_ns = now - j->t_run,
        .batch = j->n_tokens > 0 ? (double)j->batch_sum / j->n_tokens : 0,
    };
}

struct bt_msg_leg_stats bt_dc_leg_stats(const struct dc_job *j, uint64_t now)
{
    if (j->local) {
        return local_stats(j, now);
    }
    return (struct bt_msg_leg_stats){
        .grant_ns = j->t_granted - j->t_started,
        .transfer_ns = j->move_ns,
        .transfer_tail_ns = j->t_full > j->t_handoff ? j->t_full - j->t_handoff : 0,
        .decode_ns = now - j->t_run,
        .transferred_tokens =
            j->bytes > 0 && j->req.n_prompt > j->n_cached ? j->req.n_prompt - j->n_cached : 0,
        .transferred_bytes = j->bytes,
        .batch = j->n_tokens > 0 ? (double)j->batch_sum / j->n_tokens : 0,
    };
}

void bt_dc_on_engine_started(struct bt_dc_core *c, uint64_t now, uint64_t job, uint32_t n_cached)
{
    struct dc_job *j = bt_dc_live_job(c, job);

    bt_dc_begin(c);
    if (j != NULL && j->state == JOB_COMPUTING) {
        BT_ASSERT(n_cached < j->req.n_tokens);
        j->t_compute = now;
        j->n_cached = n_cached;
        c->stats.cached_tokens += n_cached;
    }
}

void bt_dc_on_engine_prompt_logprobs(struct bt_dc_core *c, uint64_t now, uint64_t job,
                                     uint32_t first, const struct bt_sampled *list, size_t n)
{
    struct dc_job *j = bt_dc_live_job(c, job);

    (void)now;
    bt_dc_begin(c);
    if (j == NULL) {
        return;
    }
    struct bt_dc_action *a = bt_dc_act_job(c, BT_DC_OUTPUT, j);

    a->output = (struct bt_msg_output){.ticket = j->head.ticket,
                                       .has_logprobs = true,
                                       .prompt_first = first,
                                       .n_prompt_logprobs = n,
                                       .prompt_logprobs = list};
}

void bt_dc_on_engine_token(struct bt_dc_core *c, uint64_t now, uint64_t job, uint32_t index,
                           const struct bt_sampled *s, uint32_t finish)
{
    struct dc_job *j = bt_dc_live_job(c, job);

    bt_dc_begin(c);
    if (j == NULL) {
        return;
    }
    bool first = j->state == JOB_COMPUTING;

    if (first) {
        bt_dc_job_set_state(c, j, JOB_RUNNING);
        j->t_run = now;
        c->stats.local_prefills++;
        c->stats.local_prefill_tokens += j->req.n_tokens - j->n_cached;
    }
    j->out = *s;
    j->batch_sum += c->n_running;
    j->n_tokens++;
    struct bt_msg_output *o = bt_dc_act_output(c, j, index);

    o->finish = finish;
    if (first && finish == 0) {
        o->has_stats = true;
        o->stats = bt_dc_leg_stats(j, now);
    }
    if (finish != 0) {
        o->tokens = s; /* the job is gone before the action is carried out */
        o->has_stats = true;
        o->stats = bt_dc_leg_stats(j, now);
        bt_dc_job_end(c, j);
    }
}

void bt_dc_on_engine_preempted(struct bt_dc_core *c, uint64_t now, uint64_t job)
{
    struct dc_job *j = bt_dc_live_job(c, job);

    (void)now;
    bt_dc_begin(c);
    if (j != NULL) {
        j->engine_knows = false;
        bt_dc_job_fail(c, j, BT_ATTEMPT_PREEMPTED, "the decode node ran out of pages");
    }
}
