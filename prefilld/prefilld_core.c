/* The prefill node's decisions: the core's life, its list of actions, what all ways have in common in which a job goes
 * on, is kept or ends, and deadlines. Owns jobs as plain state; refuses to know of sockets, threads, UCX, the engine's
 * inside and the clock. */

#include "prefilld/prefilld_core_int.h"

#include <string.h>
#include "base/assert.h"
#include "base/mem.h"

/* The longest list: each job ended, with its peer told, and each peer dialled and its state told; or all layers pushed. */
#define ACTIONS_PER_JOB  8
#define ACTIONS_PER_PEER 2
#define ACTIONS_MORE     32

#define BIT(s) (1u << (s))

static const uint8_t legal_next[] = {
    [JOB_QUEUED] = BIT(JOB_COMPUTING) | BIT(JOB_ENDING),
    [JOB_COMPUTING] = BIT(JOB_HELD) | BIT(JOB_ENDING),
    [JOB_HELD] = BIT(JOB_ENDING),
    [JOB_ENDING] = 0,
};

/* ---- life ---- */

enum bt_status bt_pf_core_create(const struct bt_pf_opts *opts, struct bt_pf_core **out)
{
    struct bt_pf_core *c = bt_calloc(1, sizeof *c);

    if (c == NULL) {
        return BT_ERR_NOMEM;
    }
    c->opts = *opts;
    for (uint32_t g = 0; g < opts->n_groups; g++) {
        c->layer_base[g] = c->n_layers_all;
        c->n_layers_all += opts->n_layers[g];
    }
    size_t pages = opts->context / opts->page_tokens + 1;

    c->actions_max = (size_t)ACTIONS_PER_JOB * opts->max_jobs +
                     (size_t)ACTIONS_PER_PEER * opts->peers_max + c->n_layers_all + ACTIONS_MORE;
    c->actions.items = bt_reserve(c->actions_max * sizeof *c->actions.items);
    c->peers = bt_calloc(opts->peers_max, sizeof *c->peers);
    bool ok = c->actions.items != NULL && c->peers != NULL &&
              bt_ticket_table_init(&c->jobs, sizeof(struct pf_job), opts->max_jobs,
                                   opts->first_slot) == BT_OK &&
              bt_slab_init(&c->tables, "prefill job tables",
                           c->n_layers_all * sizeof(struct layer_progress) +
                               opts->n_groups * pages * sizeof(uint32_t),
                           opts->max_jobs) == BT_OK;

    if (!ok) {
        bt_pf_core_destroy(c);
        return BT_ERR_NOMEM;
    }
    *out = c;
    return BT_OK;
}

static void job_free_memory(struct bt_pf_core *c, struct pf_job *j)
{
    bt_slab_put(&c->tables, j->layers);
    j->layers = NULL;
    j->page_ids = NULL;
}

void bt_pf_core_destroy(struct bt_pf_core *c)
{
    uint32_t pos = 0;
    struct pf_job *j;

    if (c == NULL) {
        return;
    }
    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        job_free_memory(c, j);
    }
    bt_slab_fini(&c->tables);
    bt_ticket_table_fini(&c->jobs);
    bt_unreserve(c->actions.items, c->actions_max * sizeof *c->actions.items);
    bt_free(c->peers);
    bt_free(c);
}

const struct bt_pf_actions *bt_pf_core_actions(const struct bt_pf_core *c)
{
    return &c->actions;
}

const struct bt_pf_stats *bt_pf_core_stats(const struct bt_pf_core *c)
{
    return &c->stats;
}

uint32_t bt_pf_core_jobs(const struct bt_pf_core *c)
{
    return c->jobs.count;
}

uint32_t bt_pf_core_kept(const struct bt_pf_core *c)
{
    return c->n_kept;
}

/* ---- actions ---- */

void bt_pf_begin(struct bt_pf_core *c)
{
    c->actions.n = 0;
}

struct bt_pf_action *bt_pf_act(struct bt_pf_core *c, enum bt_pf_action_kind kind)
{
    struct bt_pf_actions *a = &c->actions;

    BT_ASSERT(a->n < c->actions_max);
    struct bt_pf_action *x = &a->items[a->n++];

    memset(x, 0, sizeof *x);
    x->kind = kind;
    return x;
}

struct bt_control *bt_pf_act_control(struct bt_pf_core *c, uint64_t conn, enum bt_control_kind kind,
                                     const struct bt_ticket *t)
{
    struct bt_pf_action *a = bt_pf_act(c, BT_PF_CONTROL);

    a->peer = conn;
    a->control.kind = kind;
    a->control.ticket = *t;
    return &a->control;
}

struct bt_msg_attempt_end *bt_pf_act_end(struct bt_pf_core *c, uint32_t router,
                                         const char *request_id, const struct bt_ticket *t,
                                         enum bt_attempt_reason reason, const char *text)
{
    struct bt_pf_action *a = bt_pf_act(c, BT_PF_ATTEMPT_END);

    a->router = router;
    a->request_id = request_id;
    a->end = (struct bt_msg_attempt_end){.ticket = *t, .reason = reason, .text = text};
    return &a->end;
}

/* ---- jobs ---- */

void bt_pf_job_set_state(struct bt_pf_core *c, struct pf_job *j, enum job_state next)
{
    BT_ASSERT((legal_next[j->state] & BIT(next)) != 0);
    c->n_computing -= j->state == JOB_COMPUTING;
    c->n_computing += next == JOB_COMPUTING;
    j->state = next;
}

struct pf_job *bt_pf_live_job(struct bt_pf_core *c, uint64_t id)
{
    struct pf_job *j = bt_ticket_table_by_id(&c->jobs, id);

    return j != NULL && j->state != JOB_ENDING ? j : NULL;
}

void bt_pf_job_finish_ending(struct bt_pf_core *c, struct pf_job *j)
{
    if (j->pushes_open > 0) {
        return;
    }
    if (j->done && j->n_shares > 0) {
        bt_pf_act(c, BT_PF_MOVED)->moved =
            (struct bt_pf_moved){j->n_shares, j->post_ns, j->t_push_last - j->t_push_first};
    }
    if (j->engine_knows) {
        bt_pf_act(c, BT_PF_ENGINE_RELEASE)->job = j->head.id;
    }
    job_free_memory(c, j);
    bt_ticket_table_remove(&c->jobs, j);
}

void bt_pf_job_set_kept(struct bt_pf_core *c, struct pf_job *j, bool kept)
{
    c->n_kept += kept && !j->kept;
    c->n_kept -= !kept && j->kept;
    j->kept = kept;
}

void bt_pf_job_end(struct bt_pf_core *c, struct pf_job *j)
{
    bt_pf_job_set_kept(c, j, false);
    if (j->engine_knows && j->state != JOB_HELD) {
        bt_pf_act(c, BT_PF_ENGINE_CANCEL)->job = j->head.id;
    }
    if (j->pushes_open > 0) {
        bt_pf_act(c, BT_PF_PUSH_CANCEL)->ticket = j->head.ticket;
    }
    bt_ticket_table_forget(&c->jobs, j);
    bt_pf_job_set_state(c, j, JOB_ENDING);
    bt_pf_job_finish_ending(c, j);
}

void bt_pf_job_forget_at_peer(struct bt_pf_core *c, struct pf_job *j)
{
    if (j->started_sent) {
        bt_pf_act_control(c, j->conn, BT_CONTROL_FORGET, &j->head.ticket)->generation =
            j->generation;
    }
}

void bt_pf_job_fail(struct bt_pf_core *c, struct pf_job *j, enum bt_attempt_reason reason,
                    const char *text)
{
    if (!j->kept) { /* else its attempt is over */
        c->stats.failures++;
        bt_pf_act_end(c, j->router, j->request_id, &j->head.ticket, reason, text);
    }
    bt_pf_job_end(c, j);
}

bool bt_pf_job_keep(struct bt_pf_core *c, struct pf_job *j, uint64_t now)
{
    if (c->giving_back || j->peer_instance == 0 || (j->prompt_logprobs && j->state != JOB_HELD)) {
        return false;
    }
    if (j->pushes_open > 0) {
        bt_pf_act(c, BT_PF_PUSH_CANCEL)->ticket = j->head.ticket;
    }
    for (uint32_t i = 0; i < c->n_layers_all; i++) {
        j->layers[i].pushed_end = 0;
    }
    j->started_sent = j->granted = j->handed = false;
    j->conn = j->generation = 0;
    j->post_ns = j->t_push_first = j->t_push_last = j->n_shares = 0;
    j->t_kept = now;
    bt_pf_job_set_kept(c, j, true);
    return true;
}

void bt_pf_job_lose_peer(struct bt_pf_core *c, struct pf_job *j, uint64_t now,
                         enum bt_attempt_reason reason, const char *text)
{
    bool kept = bt_pf_job_keep(c, j, now);

    c->stats.failures++;
    bt_pf_act_end(c, j->router, j->request_id, &j->head.ticket, reason, text)->kept = kept;
    if (!kept) {
        bt_pf_job_end(c, j);
    }
}

bool bt_pf_kept_evict(struct bt_pf_core *c, bool with_pages)
{
    struct pf_job *j, *oldest = NULL;
    uint32_t pos = 0;

    while (c->n_kept > 0 && (j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->kept && (!with_pages || j->state != JOB_QUEUED) &&
            (oldest == NULL || j->t_kept < oldest->t_kept)) {
            oldest = j;
        }
    }
    if (oldest != NULL) {
        c->stats.keep_evicted++;
        bt_pf_job_end(c, oldest);
    }
    return oldest != NULL;
}

/* ---- time ---- */

/* Its pages wait behind those of others, which do leave: where none does, the transfer room hangs. */
static bool waits_its_turn(struct bt_pf_core *c, const struct pf_job *j, uint64_t now)
{
    const struct pf_peer *p = j->pushes_open > 0 ? bt_pf_peer_by_conn(c, j->conn) : NULL;

    return p != NULL && now - p->t_pushed <= c->opts.grant_ns;
}

static void check_job(struct bt_pf_core *c, struct pf_job *j, uint64_t now)
{
    bool begun = j->state == JOB_COMPUTING || j->state == JOB_HELD;

    if (j->kept) {
        if (now - j->t_kept > c->opts.keep_ns) {
            c->stats.keep_expired++;
            bt_pf_job_end(c, j);
        }
        return;
    }
    if (!begun || j->peer_instance == 0) {
        return;
    }
    if (!j->started_sent && now - j->t_peer > c->opts.unreachable_ns) {
        bt_pf_job_lose_peer(c, j, now, BT_ATTEMPT_RETRY,
                            "the decode node cannot be reached from the prefill node");
    } else if (j->state == JOB_HELD && now - j->t_progress > c->opts.grant_ns &&
               !waits_its_turn(c, j, now)) {
        bt_pf_job_forget_at_peer(c, j);
        bt_pf_job_lose_peer(c, j, now, BT_ATTEMPT_RETRY,
                            j->granted ? "the decode node did not confirm the hand-off in time"
                                       : "the decode node gave no grant in time");
    }
}

void bt_pf_on_tick(struct bt_pf_core *c, uint64_t now)
{
    uint32_t pos = 0;
    struct pf_job *j;

    bt_pf_begin(c);
    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        check_job(c, j, now);
    }
    for (uint32_t i = 0; i < c->opts.peers_max; i++) {
        struct pf_peer *p = &c->peers[i];

        if (p->instance != 0 && p->wanted && p->state == PEER_IDLE && now >= p->next_dial) {
            bt_pf_peer_dial(c, p);
        }
    }
}
