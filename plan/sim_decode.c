/* Around decoded_core, as decoded/decoded_io.c: carries its actions out, gives it what happens. */

#include "plan/sim_int.h"

#include "base/assert.h"
#include "base/mem.h"

void sim_decode_start(struct bt_sim *s, struct sim_node *n)
{
    const struct sim_config *c = &s->cfg;
    struct bt_dc_opts o = {
        .max_jobs = c->max_jobs,
        .first_slot = c->max_jobs, /* behind the prefill leg's */
        .parked_max = c->max_jobs < 16 ? 4 : 64,
        .context = c->context,
        .n_groups = c->n_groups,
        .park_ns = c->lease_ns,
        .transfer_ns = c->transfer_ns,
    };

    for (uint32_t g = 0; g < c->n_groups; g++) {
        o.n_layers[g] = c->n_layers[g];
    }
    enum bt_status st = bt_dc_core_create(&o, &n->dc);

    BT_ASSERT(st == BT_OK);
}

static bool do_engine(struct bt_sim *s, struct sim_node *n, const struct bt_dc_action *a)
{
    const struct bt_dc_request *m = a->request;
    bool land = a->kind == BT_DC_ENGINE_LAND;

    sim_job_new(s, n, a->job, &a->ticket);
    if (sim_chance(s, s->cfg.busy_ppm)) {
        sim_job_gone(n, a->job);
        return false;
    }
    struct sim_req *r = sim_alloc(sizeof *r + m->n_tokens * sizeof r->tokens[0]);

    r->n_tokens = m->n_tokens;
    r->n_prompt = m->n_prompt;
    r->max_tokens = m->sampling.max_tokens;
    r->seed = m->sampling.seed;
    r->prompt_logprobs = m->prompt_logprobs;
    memcpy(r->tokens, m->tokens, m->n_tokens * sizeof r->tokens[0]);
    s->result.n_local += !land;
    sim_engine_cmd(
        s, n, &(struct sim_cmd){.kind = land ? CMD_LAND : CMD_SUBMIT, .job = a->job, .req = r});
    return true;
}

static void do_begin(struct bt_sim *s, struct sim_node *n, const struct bt_dc_action *a)
{
    struct sim_job_state *j = sim_job(s, n, a->job, "BEGIN");

    if (j->begun || j->gone) {
        sim_fail(s, "%s begins job %llx twice, or without pages", s->procs[n->proc].name,
                 (unsigned long long)a->job);
    }
    j->begun = true;
    s->result.n_transfers++;
    sim_engine_cmd(s, n, &(struct sim_cmd){.kind = CMD_BEGIN, .job = a->job, .token = a->token});
}

static void do_release(struct bt_sim *s, struct sim_node *n, uint64_t job)
{
    struct sim_job_state *j = sim_job(s, n, job, "RELEASE");

    if (sim_land_open_of_job(n, job)) {
        sim_fail(s, "%s releases job %llx under an open landing", s->procs[n->proc].name,
                 (unsigned long long)job);
    }
    sim_engine_cmd(s, n, &(struct sim_cmd){.kind = CMD_RELEASE, .job = job});
    *j = (struct sim_job_state){0};
}

static void engine_job(struct bt_sim *s, struct sim_node *n, enum sim_cmd_kind kind, uint64_t job)
{
    (void)sim_job(s, n, job, kind == CMD_CANCEL ? "CANCEL" : "QUARANTINE");
    sim_engine_cmd(s, n, &(struct sim_cmd){.kind = kind, .job = job});
}

/* false: the engine or the transfer room does not take it. */
static bool do_action(struct bt_sim *s, struct sim_node *n, const struct bt_dc_action *a)
{
    switch (a->kind) {
    case BT_DC_ENGINE_LAND:
    case BT_DC_ENGINE_SUBMIT:
        return do_engine(s, n, a);
    case BT_DC_ENGINE_BEGIN:
        do_begin(s, n, a);
        break;
    case BT_DC_ENGINE_QUARANTINE:
        engine_job(s, n, CMD_QUARANTINE, a->job);
        break;
    case BT_DC_ENGINE_CANCEL:
        engine_job(s, n, CMD_CANCEL, a->job);
        break;
    case BT_DC_ENGINE_RELEASE:
        do_release(s, n, a->job);
        break;
    case BT_DC_LAND_OPEN:
        if (sim_chance(s, s->cfg.busy_ppm)) {
            return false;
        }
        sim_land_open(s, n, a);
        break;
    case BT_DC_LAND_EXPECT:
        sim_land_expect(s, n, a);
        break;
    case BT_DC_LAND_CLOSE:
        sim_land_close(s, n, a);
        break;
    case BT_DC_CONTROL:
        sim_control(s, n, a->peer, &a->control);
        break;
    case BT_DC_OUTPUT:
        sim_ticket_output(s, n, a->router, &a->output);
        break;
    case BT_DC_ATTEMPT_END:
        sim_ticket_end(s, n, a->router, &a->end);
        break;
    }
    return true;
}

void sim_decode_run(struct bt_sim *s, struct sim_node *n)
{
    const struct bt_dc_actions *list = bt_dc_core_actions(n->dc);
    struct bt_dc_action refused = {0};

    for (size_t i = 0; i < list->n; i++) {
        if (!do_action(s, n, &list->items[i])) {
            refused = list->items[i];
        }
    }
    if (refused.job == 0) {
        return;
    }
    if (refused.kind == BT_DC_LAND_OPEN) {
        bt_dc_on_land_refused(n->dc, s->now, refused.job, "busy");
    } else {
        bt_dc_on_engine_failed(n->dc, s->now, refused.job, BT_ERR_BUSY, "busy");
    }
    sim_decode_run(s, n);
}

static void on_prompt_logprobs(struct bt_sim *s, struct sim_node *n, const struct sim_engine_msg *m)
{
    struct bt_sampled list[64];

    for (uint32_t at = 0; at < m->n_list; at += 64) {
        uint32_t k = m->n_list - at < 64 ? m->n_list - at : 64;

        for (uint32_t i = 0; i < k; i++) {
            list[i] = (struct bt_sampled){.token = m->ids[at + i], .logprob = -1};
        }
        bt_dc_on_engine_prompt_logprobs(n->dc, s->now, m->job, m->first + at, list, k);
        sim_decode_run(s, n);
    }
}

void sim_decode_engine(struct bt_sim *s, struct sim_node *n, const struct sim_engine_msg *m)
{
    const uint32_t *tables[SIM_GROUPS_MAX];

    switch (m->kind) {
    case EV_FAILED:
        bt_dc_on_engine_failed(n->dc, s->now, m->job, m->status, m->text);
        break;
    case EV_LANDED:
        for (uint32_t g = 0; g < s->cfg.n_groups; g++) {
            tables[g] = m->ids + (size_t)g * m->end;
        }
        bt_dc_on_engine_landed(n->dc, s->now, m->job, m->first, m->end, m->first_page, tables);
        break;
    case EV_TOKEN:
        bt_dc_on_engine_token(n->dc, s->now, m->job, m->index, &m->sampled, m->finish);
        break;
    case EV_PREEMPTED:
        bt_dc_on_engine_preempted(n->dc, s->now, m->job);
        break;
    case EV_STARTED:
        bt_dc_on_engine_started(n->dc, s->now, m->job, m->first);
        break;
    case EV_LOGPROBS:
        on_prompt_logprobs(s, n, m);
        return;
    case EV_PAGES:
    case EV_SHORT:
        return;
    }
    sim_decode_run(s, n);
}
