/* The decode node's decisions. Owns jobs, leases (generations) and parked messages as plain state;
 * refuses to know of sockets, threads, UCX, the engine's inside and the clock. */

#include "decoded/decoded_core.h"

#include <stdio.h>
#include "base/assert.h"
#include "base/mem.h"
#include "base/slab.h"

#define DRAINED "the node drains and its time is over"
#define OVER    "the request is over"
/* The longest list: each job ended, with its peer told, and each parked message refused. */
#define ACTIONS_PER_JOB 8
#define ACTIONS_MORE    32

enum job_state { JOB_WAITING, JOB_LEASING, JOB_LANDING, JOB_COMPUTING, JOB_RUNNING, JOB_ENDING };

#define BIT(s) (1u << (s))
static const uint8_t legal_next[] = {
    [JOB_WAITING] = BIT(JOB_LEASING) | BIT(JOB_COMPUTING) | BIT(JOB_ENDING),
    [JOB_LEASING] = BIT(JOB_LANDING) | BIT(JOB_ENDING),
    [JOB_LANDING] = BIT(JOB_RUNNING) | BIT(JOB_ENDING),
    [JOB_COMPUTING] = BIT(JOB_RUNNING) | BIT(JOB_ENDING),
    [JOB_RUNNING] = BIT(JOB_ENDING),
    [JOB_ENDING] = 0,
};

struct dc_job {
    struct bt_job head;
    char request_id[BT_SESSION_ID_MAX + 1];
    enum job_state state;
    uint32_t router;
    uint64_t conn;       /* P's connection; 0 before `started` */
    uint64_t generation; /* of the lease; 0 before */
    uint64_t next_lease; /* id of the next job in its bucket of leases; 0: the last */
    uint32_t n_cached;   /* tokens that the prefix cache had */
    struct bt_dc_request req;
    uint32_t *tokens; /* of c->requests: memory of req.tokens, and of req.sampling.bias behind */
    bool land_open, land_closing, engine_knows;
    bool full, handed;
    bool local;  /* its prompt is computed here */
    bool resent; /* P sends again: the last token of the submit is the one that it hands off */
    struct bt_sampled first;
    uint32_t first_index;
    bool has_logprobs;
    uint64_t t_progress; /* ns: the grant, a page, the hand-off, or P said that it computes */
    uint64_t t_page;     /* a page came; 0: none yet */
    uint64_t t_started, t_granted, t_handoff, t_full, t_run; /* ns */
    uint64_t t_submit, t_compute; /* local: it came, and its first chunk began; 0: not yet */
    uint64_t batch_sum;           /* running jobs, summed over its tokens */
    uint32_t n_tokens;            /* decoded here */
    uint64_t n_shares[BT_CONTROL_GROUPS_MAX];
    uint64_t bytes, move_ns;
    struct bt_sampled out; /* token of the current output action */
};

/* A `started` without its submit. */
struct parked {
    bool used;
    struct bt_ticket ticket;
    uint64_t conn;
    uint32_t n_tokens;
    uint64_t since;
};

struct bt_dc_core {
    struct bt_dc_opts opts;
    struct bt_ticket_table jobs;
    struct bt_slab requests;
    uint64_t *
        leases; /* job ids by generation & leases_mask, for landings that outlive their ticket; 0: none */
    uint64_t leases_mask;
    struct parked *parked;
    uint32_t n_parked;
    uint64_t generation;
    uint32_t n_running;
    bool giving_back;
    struct bt_dc_actions actions;
    size_t actions_max;
    struct bt_dc_stats stats;
    char text[256];
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

static void begin(struct bt_dc_core *c)
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

static struct bt_dc_action *act_job(struct bt_dc_core *c, enum bt_dc_action_kind kind,
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

static struct bt_control *act_control(struct bt_dc_core *c, uint64_t conn,
                                      enum bt_control_kind kind, const struct bt_ticket *t)
{
    struct bt_dc_action *a = act(c, BT_DC_CONTROL);

    a->peer = conn;
    a->control.kind = kind;
    a->control.ticket = *t;
    return &a->control;
}

static void act_refuse(struct bt_dc_core *c, uint64_t conn, const struct bt_ticket *t,
                       enum bt_attempt_reason reason, const char *text)
{
    struct bt_control *m = act_control(c, conn, BT_CONTROL_REFUSE, t);

    m->refuse.reason = reason;
    m->refuse.text = text;
}

/* request_id: valid as long as the list. */
static void act_end(struct bt_dc_core *c, uint32_t router, const char *request_id,
                    const struct bt_ticket *t, enum bt_attempt_reason reason, const char *text)
{
    struct bt_dc_action *a = act(c, BT_DC_ATTEMPT_END);

    a->router = router;
    a->request_id = request_id;
    a->end = (struct bt_msg_attempt_end){.ticket = *t, .reason = reason, .text = text};
}

/* ---- jobs ---- */

static void job_set_state(struct bt_dc_core *c, struct dc_job *j, enum job_state next)
{
    BT_ASSERT((legal_next[j->state] & BIT(next)) != 0);
    c->n_running -= j->state == JOB_RUNNING;
    c->n_running += next == JOB_RUNNING;
    j->state = next;
}

static struct dc_job *live_job(struct bt_dc_core *c, uint64_t id)
{
    struct dc_job *j = bt_ticket_table_by_id(&c->jobs, id);

    return j != NULL && j->state != JOB_ENDING ? j : NULL;
}

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

static void lease_drop(struct bt_dc_core *c, struct dc_job *j)
{
    uint64_t *at = &c->leases[j->generation & c->leases_mask];

    while (*at != j->head.id) {
        struct dc_job *other = bt_ticket_table_by_id(&c->jobs, *at);

        BT_ASSERT(other != NULL);
        at = &other->next_lease;
    }
    *at = j->next_lease;
}

/* ---- ends of jobs ---- */

static void job_remove(struct bt_dc_core *c, struct dc_job *j)
{
    if (j->engine_knows) {
        act_job(c, BT_DC_ENGINE_RELEASE, j);
    }
    if (j->generation != 0) {
        lease_drop(c, j);
    }
    bt_slab_put(&c->requests, j->tokens);
    bt_ticket_table_remove(&c->jobs, j);
}

static void job_close_landing(struct bt_dc_core *c, struct dc_job *j)
{
    if (j->land_open && !j->land_closing) {
        j->land_closing = true;
        act_job(c, BT_DC_LAND_CLOSE, j);
    }
}

/* Ends a job in any state but ENDING. Its pages go when the landing is closed. */
static void job_end(struct bt_dc_core *c, struct dc_job *j)
{
    if (j->state == JOB_RUNNING || (j->state == JOB_COMPUTING && j->engine_knows)) {
        act_job(c, BT_DC_ENGINE_CANCEL, j);
    }
    bt_ticket_table_forget(&c->jobs, j);
    job_set_state(c, j, JOB_ENDING);
    if (j->land_open) {
        act_job(c, BT_DC_ENGINE_QUARANTINE, j);
        job_close_landing(c, j);
        return;
    }
    job_remove(c, j);
}

static void act_revoke(struct bt_dc_core *c, uint64_t conn, const struct bt_ticket *t,
                       uint64_t generation, enum bt_attempt_reason reason)
{
    struct bt_control *m = act_control(c, conn, BT_CONTROL_REVOKE, t);

    m->generation = generation;
    m->revoke.reason = reason;
}

/* P need not send any more: it is told, unless the news came from it. */
static void job_revoke_at_peer(struct bt_dc_core *c, struct dc_job *j,
                               enum bt_attempt_reason reason, const char *text)
{
    if (j->state == JOB_LANDING) {
        act_revoke(c, j->conn, &j->head.ticket, j->generation, reason);
    } else if (j->state == JOB_LEASING) {
        act_refuse(c, j->conn, &j->head.ticket, reason, text);
    }
}

static void job_fail(struct bt_dc_core *c, struct dc_job *j, enum bt_attempt_reason reason,
                     const char *text)
{
    c->stats.failures++;
    act_end(c, j->router, j->request_id, &j->head.ticket, reason, text);
    job_end(c, j);
}

/* The same, with P told. */
static void job_give_up(struct bt_dc_core *c, struct dc_job *j, enum bt_attempt_reason reason,
                        const char *text)
{
    job_revoke_at_peer(c, j, reason, text);
    job_fail(c, j, reason, text);
}

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

/* since: when `started` came. */
static void job_lease(struct bt_dc_core *c, struct dc_job *j, uint64_t conn, uint32_t n_tokens,
                      uint64_t since, uint64_t now)
{
    if (!counts_agree(j, n_tokens)) {
        c->stats.stale++;
        act_refuse(c, conn, &j->head.ticket, BT_ATTEMPT_INVALID,
                   "the token counts of the two legs differ");
        job_fail(c, j, BT_ATTEMPT_RETRY, "the token counts of the two legs differ");
        return;
    }
    j->conn = conn;
    j->t_started = since;
    j->t_progress = now;
    job_set_state(c, j, JOB_LEASING);
    j->engine_knows = true;
    act_job(c, BT_DC_ENGINE_LAND, j)->request = &j->req;
}

/* The prompt is computed here: it waits in the engine, which leases its pages when it starts. */
static void job_compute(struct bt_dc_core *c, struct dc_job *j, uint64_t now)
{
    j->local = true;
    j->t_submit = j->t_progress = now;
    job_set_state(c, j, JOB_COMPUTING);
    j->engine_knows = true;
    act_job(c, BT_DC_ENGINE_SUBMIT, j)->request = &j->req;
}

/* ---- parked messages ---- */

static struct parked *parked_find(struct bt_dc_core *c, const struct bt_ticket *t)
{
    for (uint32_t i = 0; c->n_parked > 0 && i < c->opts.parked_max; i++) {
        if (c->parked[i].used && bt_ticket_equal(&c->parked[i].ticket, t)) {
            return &c->parked[i];
        }
    }
    return NULL;
}

static void parked_drop(struct bt_dc_core *c, struct parked *p)
{
    p->used = false;
    c->n_parked--;
}

static void park(struct bt_dc_core *c, const struct bt_ticket *t, uint64_t conn, uint32_t n_tokens,
                 uint64_t now)
{
    if (parked_find(c, t) != NULL) {
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
    act_refuse(c, conn, t, BT_ATTEMPT_RETRY, "too many prompts without a submit");
}

/* ---- from routers ---- */

/* Whether the core has room for it: the engine judges the rest. */
static bool request_fits(const struct bt_dc_core *c, const struct bt_msg_submit *s)
{
    return s->n_tokens <= c->opts.context && s->sampling.n_bias <= BT_LOGIT_BIAS_MAX;
}

_Static_assert(_Alignof(struct bt_logit_bias) <= sizeof(uint32_t),
               "the bias lies right behind the tokens");

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
    begin(c);
    if (bt_ticket_table_by_ticket(&c->jobs, &s->ticket) != NULL) {
        c->stats.stale++;
        act_end(c, router, s->request_id, &s->ticket, BT_ATTEMPT_INVALID,
                "this ticket is already in use");
        return;
    }
    if (c->giving_back) {
        act_end(c, router, s->request_id, &s->ticket, BT_ATTEMPT_DRAINING, DRAINED);
        return;
    }
    if (!request_fits(c, s)) {
        act_end(c, router, s->request_id, &s->ticket, BT_ATTEMPT_INVALID,
                "the request is longer than the model's context");
        return;
    }
    struct dc_job *j = bt_ticket_table_add(&c->jobs, &s->ticket);

    if (j == NULL) {
        act_end(c, router, s->request_id, &s->ticket, BT_ATTEMPT_REFUSED,
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
    struct parked *p = parked_find(c, &s->ticket);

    if (p != NULL) {
        uint64_t conn = p->conn;
        uint32_t n = p->n_tokens;
        uint64_t since = p->since;

        parked_drop(c, p);
        job_lease(c, j, conn, n, since, now);
    }
}

void bt_dc_on_cancel(struct bt_dc_core *c, uint64_t now, uint32_t router, const struct bt_ticket *t)
{
    struct dc_job *j = bt_ticket_table_by_ticket(&c->jobs, t);

    (void)now;
    begin(c);
    if (j == NULL || j->router != router) {
        return; /* already over: cancel and the end of an attempt may cross */
    }
    job_revoke_at_peer(c, j, BT_ATTEMPT_RETRY, OVER);
    job_end(c, j);
}

void bt_dc_on_router_lost(struct bt_dc_core *c, uint64_t now, uint32_t router)
{
    uint32_t pos = 0;
    struct dc_job *j;

    (void)now;
    begin(c);
    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->router == router && j->state != JOB_ENDING) {
            job_revoke_at_peer(c, j, BT_ATTEMPT_RETRY, OVER);
            job_end(c, j);
        }
    }
}

void bt_dc_on_give_back(struct bt_dc_core *c, uint64_t now)
{
    uint32_t pos = 0;
    struct dc_job *j;

    (void)now;
    begin(c);
    c->giving_back = true;
    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->state != JOB_ENDING) {
            job_give_up(c, j, BT_ATTEMPT_DRAINING, DRAINED);
        }
    }
}

void bt_dc_on_resume(struct bt_dc_core *c)
{
    begin(c);
    c->giving_back = false;
}

/* ---- from the engine ---- */

void bt_dc_on_engine_failed(struct bt_dc_core *c, uint64_t now, uint64_t job, enum bt_status st,
                            const char *text)
{
    struct dc_job *j = live_job(c, job);

    (void)now;
    begin(c);
    if (j == NULL) {
        return;
    }
    enum bt_attempt_reason reason = st == BT_ERR_INVALID                      ? BT_ATTEMPT_INVALID
                                    : st == BT_ERR_BUSY || st == BT_ERR_NOMEM ? BT_ATTEMPT_REFUSED
                                                                              : BT_ATTEMPT_INTERNAL;

    snprintf(c->text, sizeof c->text, "%s", text);
    j->engine_knows = false;
    job_give_up(c, j, reason, c->text);
}

void bt_dc_on_engine_landed(struct bt_dc_core *c, uint64_t now, uint64_t job, uint32_t n_cached,
                            uint32_t n_pages, const uint32_t *first_page,
                            const uint32_t *const *page_ids)
{
    struct dc_job *j = live_job(c, job);

    begin(c);
    if (j == NULL) {
        return;
    }
    BT_ASSERT(n_cached <= j->req.n_tokens);
    lease_add(c, j);
    j->n_cached = n_cached;
    j->t_granted = now;
    j->t_progress = now;
    j->land_open = true;
    job_set_state(c, j, JOB_LANDING);
    struct bt_dc_action *a = act_job(c, BT_DC_LAND_OPEN, j);

    a->pages.n_pages = n_pages;
    a->pages.first_page = first_page;
    a->pages.page_ids = page_ids;
    struct bt_control *m = act_control(c, j->conn, BT_CONTROL_GRANT, &j->head.ticket);

    m->generation = j->generation;
    m->grant.n_groups = c->opts.n_groups;
    memcpy(m->grant.first_page, first_page, c->opts.n_groups * sizeof *first_page);
}

void bt_dc_on_land_refused(struct bt_dc_core *c, uint64_t now, uint64_t job, const char *text)
{
    struct dc_job *j = live_job(c, job);

    (void)now;
    begin(c);
    BT_ASSERT(j != NULL && j->state == JOB_LANDING);
    snprintf(c->text, sizeof c->text, "the landing was refused: %s", text);
    j->land_open = false;
    job_give_up(c, j, BT_ATTEMPT_REFUSED, c->text);
}

static struct bt_msg_output *act_output(struct bt_dc_core *c, struct dc_job *j, uint32_t index)
{
    struct bt_dc_action *a = act_job(c, BT_DC_OUTPUT, j);

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

static struct bt_msg_leg_stats leg_stats(const struct dc_job *j, uint64_t now)
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
    struct dc_job *j = live_job(c, job);

    begin(c);
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
    struct dc_job *j = live_job(c, job);

    (void)now;
    begin(c);
    if (j == NULL) {
        return;
    }
    struct bt_dc_action *a = act_job(c, BT_DC_OUTPUT, j);

    a->output = (struct bt_msg_output){.ticket = j->head.ticket,
                                       .has_logprobs = true,
                                       .prompt_first = first,
                                       .n_prompt_logprobs = n,
                                       .prompt_logprobs = list};
}

void bt_dc_on_engine_token(struct bt_dc_core *c, uint64_t now, uint64_t job, uint32_t index,
                           const struct bt_sampled *s, uint32_t finish)
{
    struct dc_job *j = live_job(c, job);

    begin(c);
    if (j == NULL) {
        return;
    }
    bool first = j->state == JOB_COMPUTING;

    if (first) {
        job_set_state(c, j, JOB_RUNNING);
        j->t_run = now;
        c->stats.local_prefills++;
        c->stats.local_prefill_tokens += j->req.n_tokens - j->n_cached;
    }
    j->out = *s;
    j->batch_sum += c->n_running;
    j->n_tokens++;
    struct bt_msg_output *o = act_output(c, j, index);

    o->finish = finish;
    if (first && finish == 0) {
        o->has_stats = true;
        o->stats = leg_stats(j, now);
    }
    if (finish != 0) {
        o->tokens = s; /* the job is gone before the action is carried out */
        o->has_stats = true;
        o->stats = leg_stats(j, now);
        job_end(c, j);
    }
}

void bt_dc_on_engine_preempted(struct bt_dc_core *c, uint64_t now, uint64_t job)
{
    struct dc_job *j = live_job(c, job);

    (void)now;
    begin(c);
    if (j != NULL) {
        j->engine_knows = false;
        job_fail(c, j, BT_ATTEMPT_PREEMPTED, "the decode node ran out of pages");
    }
}

/* ---- from the transfer room ---- */

void bt_dc_on_peer_down(struct bt_dc_core *c, uint64_t now, uint64_t conn, const char *why)
{
    uint32_t pos = 0;
    struct dc_job *j;

    (void)now;
    begin(c);
    snprintf(c->text, sizeof c->text, "connection to the prefill node lost: %s", why);
    for (uint32_t i = 0; i < c->opts.parked_max; i++) {
        if (c->parked[i].used && c->parked[i].conn == conn) {
            parked_drop(c, &c->parked[i]);
        }
    }
    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->conn == conn && (j->state == JOB_LEASING || j->state == JOB_LANDING)) {
            job_fail(c, j, BT_ATTEMPT_RETRY, c->text);
        }
    }
}

/* The landing is complete and token 0 is known: decode. */
static void job_try_run(struct bt_dc_core *c, struct dc_job *j, uint64_t now)
{
    if (!j->full || !j->handed) {
        return;
    }
    job_set_state(c, j, JOB_RUNNING);
    j->t_run = now;
    c->stats.transfers++;
    c->stats.transferred_bytes += j->bytes;
    c->stats.transferred_tokens += j->bytes > 0 ? j->req.n_tokens - j->n_cached : 0;
    c->stats.cached_tokens += j->n_cached;
    job_close_landing(c, j);
    act_control(c, j->conn, BT_CONTROL_DONE, &j->head.ticket)->generation = j->generation;
    act_job(c, BT_DC_ENGINE_BEGIN, j)->token = j->first.token;
    j->out = j->first;
    struct bt_msg_output *o = act_output(c, j, j->first_index);

    o->has_stats = true; /* already here: the router ends an answer itself at a stop string */
    o->stats = leg_stats(j, now);
}

static void on_handoff(struct bt_dc_core *c, struct dc_job *j, const struct bt_control *m,
                       uint64_t now)
{
    if (m->handoff.index != j->req.n_tokens - j->req.n_prompt ||
        m->handoff.n_groups != c->opts.n_groups) {
        job_give_up(c, j, BT_ATTEMPT_RETRY, "the hand-off does not fit the request");
        return;
    }
    if (j->resent && m->handoff.first.token != j->tokens[j->req.n_tokens]) {
        job_give_up(c, j, BT_ATTEMPT_RETRY, "the hand-off has another first token than the router");
        return;
    }
    j->handed = true;
    j->first = m->handoff.first;
    j->first_index = m->handoff.index;
    j->t_handoff = now;
    j->t_progress = now;
    memcpy(j->n_shares, m->handoff.n_shares, sizeof j->n_shares);
    act_job(c, BT_DC_LAND_EXPECT, j)->n_shares = j->n_shares;
}

static void on_started(struct bt_dc_core *c, uint64_t now, uint64_t conn, struct dc_job *j,
                       const struct bt_control *m)
{
    if (j == NULL && c->giving_back) {
        act_refuse(c, conn, &m->ticket, BT_ATTEMPT_DRAINING, DRAINED);
    } else if (j == NULL) {
        park(c, &m->ticket, conn, m->started.n_tokens, now);
    } else if (j->state == JOB_WAITING) {
        job_lease(c, j, conn, m->started.n_tokens, now, now);
    } else {
        c->stats.stale++;
        if (j->conn != conn) {
            act_refuse(c, conn, &m->ticket, BT_ATTEMPT_INVALID,
                       "this ticket belongs to another prefill node");
        }
    }
}

/* P computes: pages will come. After the hand-off they alone count. */
static void on_computing(struct bt_dc_core *c, uint64_t now, uint64_t conn, struct dc_job *j,
                         const struct bt_control *m)
{
    if (j == NULL || j->conn != conn || j->generation != m->generation) {
        c->stats.stale++;
        if (j == NULL) { /* it was told already, unless that was lost */
            act_revoke(c, conn, &m->ticket, m->generation,
                       c->giving_back ? BT_ATTEMPT_DRAINING : BT_ATTEMPT_RETRY);
        }
    } else if (j->state == JOB_LANDING && !j->handed) {
        j->t_progress = now;
    }
}

static void on_forget(struct bt_dc_core *c, uint64_t conn, struct dc_job *j,
                      const struct bt_control *m)
{
    struct parked *p = parked_find(c, &m->ticket);

    if (p != NULL && p->conn == conn) {
        parked_drop(c, p);
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
        job_end(c, j);
    }
}

void bt_dc_on_control(struct bt_dc_core *c, uint64_t now, uint64_t conn, const struct bt_control *m)
{
    struct dc_job *j = bt_ticket_table_by_ticket(&c->jobs, &m->ticket);

    begin(c);
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
            act_revoke(c, conn, &m->ticket, m->generation,
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

    begin(c);
    if (j != NULL) {
        j->t_progress = j->t_page = now;
    }
}

void bt_dc_on_land_full(struct bt_dc_core *c, uint64_t now, const struct bt_ticket *t,
                        uint64_t generation, enum bt_status st, uint64_t bytes, uint64_t move_ns)
{
    struct dc_job *j = job_by_generation(c, t, generation);

    begin(c);
    if (j == NULL || j->state != JOB_LANDING) {
        return;
    }
    if (st != BT_OK) {
        job_give_up(c, j, BT_ATTEMPT_RETRY, "the pages that came do not match the hand-off");
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
    begin(c);
    BT_ASSERT(j != NULL && j->land_open);
    j->land_open = false;
    if (j->state == JOB_ENDING) {
        job_remove(c, j);
    }
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

    begin(c);
    for (uint32_t i = 0; c->n_parked > 0 && i < c->opts.parked_max; i++) {
        struct parked *p = &c->parked[i];

        if (p->used && now - p->since > c->opts.park_ns) {
            c->stats.stale++;
            act_refuse(c, p->conn, &p->ticket, BT_ATTEMPT_RETRY, "no submit came for this ticket");
            parked_drop(c, p);
        }
    }
    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->state == JOB_LANDING && now - j->t_progress > c->opts.transfer_ns &&
            !waits_its_turn(c, j, now)) {
            c->stats.stalled++;
            job_give_up(c, j, BT_ATTEMPT_RETRY, "the transfer made no progress");
        } else if (j->state == JOB_COMPUTING && j->t_compute == 0 &&
                   now - j->t_submit > c->opts.transfer_ns) {
            job_fail(c, j, BT_ATTEMPT_REFUSED,
                     "the decode node had no room for the prompt in time");
        }
    }
}
