/* The prefill node's decisions. Owns jobs and peers as plain state; refuses to know of sockets,
 * threads, UCX, the engine's inside and the clock. */

#include "prefilld/prefilld_core.h"

#include <stdio.h>
#include "base/assert.h"
#include "base/hash.h"
#include "base/mem.h"
#include "base/slab.h"

#define ADDRESS_MAX         256
#define RECONNECT_DOUBLINGS 4
#define DRAINED             "the node drains and its time is over"
/* The longest list: each job ended, with its peer told, and each peer dialled and its state told; or all layers pushed. */
#define ACTIONS_PER_JOB  8
#define ACTIONS_PER_PEER 2
#define ACTIONS_MORE     32

enum job_state { JOB_QUEUED, JOB_COMPUTING, JOB_HELD, JOB_ENDING };

#define BIT(s) (1u << (s))
static const uint8_t legal_next[] = {
    [JOB_QUEUED] = BIT(JOB_COMPUTING) | BIT(JOB_ENDING),
    [JOB_COMPUTING] = BIT(JOB_HELD) | BIT(JOB_ENDING),
    [JOB_HELD] = BIT(JOB_ENDING),
    [JOB_ENDING] = 0,
};

/* What is known of one layer of one group: shares [pushed_end, avail_end) are computed and not yet
 * pushed. */
struct layer_progress {
    uint32_t avail_end, pushed_end;
};

struct pf_job {
    struct bt_job head;
    char request_id[BT_SESSION_ID_MAX + 1];
    enum job_state state;
    uint32_t router;
    uint64_t peer_instance; /* 0: no decode leg */
    uint32_t n_tokens, n_prompt, n_cached, n_pages;
    uint64_t identity;          /* of tokens and sampling */
    uint64_t t_submit, t_start; /* ns */
    uint64_t t_peer;            /* ns: it wants its peer since then */
    uint64_t t_progress;        /* ns: token 0, the grant, or a push that ended */
    uint64_t t_alive;           /* ns: the grant, or when D was last told that it is computed */
    uint64_t post_ns, t_push_first, t_push_last, n_shares; /* of its pushes that ended */
    bool want_logprobs, prompt_logprobs;
    bool engine_knows;
    bool kept; /* its attempt is over, its decode side failed; t_kept: since then */
    uint64_t t_kept;
    bool told;                     /* its first token and statistics went out, */
    bool known;                    /* and the router has them */
    struct bt_msg_leg_stats stats; /* with has_token */
    uint32_t finish;
    bool started_sent, granted, handed, has_token, done;
    uint64_t generation;
    uint64_t conn;                              /* connection that `started` went over */
    uint32_t first_page[BT_CONTROL_GROUPS_MAX]; /* first page that D wants */
    uint32_t index;
    struct bt_sampled first;
    uint32_t pushes_open;
    struct layer_progress
        *layers;        /* [Σ n_layers]; of c->tables, with page_ids behind; NULL: no peer */
    uint32_t *page_ids; /* [n_groups][n_pages] */
};

enum peer_state { PEER_IDLE, PEER_CONNECTING, PEER_UP };
enum peer_told { TOLD_NOTHING, TOLD_REACHABLE, TOLD_UNREACHABLE };

struct pf_peer {
    uint64_t instance; /* 0: free */
    char address[ADDRESS_MAX];
    struct bt_gate_token gate_token;
    bool wanted;         /* in the routers' list */
    enum peer_told told; /* to the routers */
    enum peer_state state;
    uint64_t conn;
    uint64_t next_dial; /* time */
    uint32_t failures;
};

struct bt_pf_core {
    struct bt_pf_opts opts;
    struct bt_ticket_table jobs;
    struct bt_slab tables; /* of jobs with a peer */
    struct pf_peer *peers;
    uint32_t n_layers_all;
    uint32_t layer_base[BT_CONTROL_GROUPS_MAX];
    uint32_t n_computing, n_kept;
    bool giving_back;
    struct bt_sampled out; /* token of the current output action */
    struct bt_pf_actions actions;
    size_t actions_max;
    struct bt_pf_stats stats;
    char text[256];
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

static void begin(struct bt_pf_core *c)
{
    c->actions.n = 0;
}

static struct bt_pf_action *act(struct bt_pf_core *c, enum bt_pf_action_kind kind)
{
    struct bt_pf_actions *a = &c->actions;

    BT_ASSERT(a->n < c->actions_max);
    struct bt_pf_action *x = &a->items[a->n++];

    memset(x, 0, sizeof *x);
    x->kind = kind;
    return x;
}

static struct bt_control *act_control(struct bt_pf_core *c, uint64_t conn,
                                      enum bt_control_kind kind, const struct bt_ticket *t)
{
    struct bt_pf_action *a = act(c, BT_PF_CONTROL);

    a->peer = conn;
    a->control.kind = kind;
    a->control.ticket = *t;
    return &a->control;
}

/* request_id: valid as long as the list. */
static struct bt_msg_attempt_end *act_end(struct bt_pf_core *c, uint32_t router,
                                          const char *request_id, const struct bt_ticket *t,
                                          enum bt_attempt_reason reason, const char *text)
{
    struct bt_pf_action *a = act(c, BT_PF_ATTEMPT_END);

    a->router = router;
    a->request_id = request_id;
    a->end = (struct bt_msg_attempt_end){.ticket = *t, .reason = reason, .text = text};
    return &a->end;
}

/* ---- peers ---- */

static struct pf_peer *peer_by_instance(struct bt_pf_core *c, uint64_t instance)
{
    for (uint32_t i = 0; instance != 0 && i < c->opts.peers_max; i++) {
        if (c->peers[i].instance == instance) {
            return &c->peers[i];
        }
    }
    return NULL;
}

static struct pf_peer *peer_by_conn(struct bt_pf_core *c, uint64_t conn)
{
    for (uint32_t i = 0; i < c->opts.peers_max; i++) {
        if (c->peers[i].instance != 0 && c->peers[i].state != PEER_IDLE &&
            c->peers[i].conn == conn) {
            return &c->peers[i];
        }
    }
    return NULL;
}

static void peer_dial(struct bt_pf_core *c, struct pf_peer *p)
{
    struct bt_pf_action *a = act(c, BT_PF_CONNECT);

    a->instance = p->instance;
    a->address = p->address;
    a->gate_token = p->gate_token;
    p->state = PEER_CONNECTING;
    p->conn = 0;
}

static struct pf_peer *peer_add(struct bt_pf_core *c, uint64_t instance, const char *address,
                                const struct bt_gate_token *token)
{
    struct pf_peer *p = peer_by_instance(c, instance);

    for (uint32_t i = 0; p == NULL && i < c->opts.peers_max; i++) {
        if (c->peers[i].instance == 0) {
            p = &c->peers[i];
            *p = (struct pf_peer){.instance = instance};
        }
    }
    if (p != NULL && p->state == PEER_IDLE) {
        snprintf(p->address, sizeof p->address, "%s", address);
    }
    if (p != NULL && bt_gate_token_is_set(token)) { /* a router from before it tells none */
        p->gate_token = *token;
    }
    return p;
}

static void act_peer_state(struct bt_pf_core *c, const struct pf_peer *p, bool reachable,
                           const char *why)
{
    act(c, BT_PF_PEER_STATE)->peer_state = (struct bt_msg_peer_state){p->instance, reachable, why};
}

/* A new peer that is reached is told as well: what was said of it before may still be on its way.
 * Routers that come later hear of it with their next list (bt_pf_on_peers). */
static void tell_peer_state(struct bt_pf_core *c, struct pf_peer *p, bool reachable,
                            const char *why)
{
    enum peer_told told = reachable ? TOLD_REACHABLE : TOLD_UNREACHABLE;

    if (p->told != told) {
        p->told = told;
        act_peer_state(c, p, reachable, why);
    }
}

/* ---- jobs ---- */

static void job_set_state(struct bt_pf_core *c, struct pf_job *j, enum job_state next)
{
    BT_ASSERT((legal_next[j->state] & BIT(next)) != 0);
    c->n_computing -= j->state == JOB_COMPUTING;
    c->n_computing += next == JOB_COMPUTING;
    j->state = next;
}

static struct pf_job *live_job(struct bt_pf_core *c, uint64_t id)
{
    struct pf_job *j = bt_ticket_table_by_id(&c->jobs, id);

    return j != NULL && j->state != JOB_ENDING ? j : NULL;
}

static void job_finish_ending(struct bt_pf_core *c, struct pf_job *j)
{
    if (j->pushes_open > 0) {
        return;
    }
    if (j->done && j->n_shares > 0) {
        act(c, BT_PF_MOVED)->moved =
            (struct bt_pf_moved){j->n_shares, j->post_ns, j->t_push_last - j->t_push_first};
    }
    if (j->engine_knows) {
        act(c, BT_PF_ENGINE_RELEASE)->job = j->head.id;
    }
    job_free_memory(c, j);
    bt_ticket_table_remove(&c->jobs, j);
}

static void job_set_kept(struct bt_pf_core *c, struct pf_job *j, bool kept)
{
    c->n_kept += kept && !j->kept;
    c->n_kept -= !kept && j->kept;
    j->kept = kept;
}

/* Ends a job in any state but ENDING; the engine forgets it once no send is in flight. */
static void job_end(struct bt_pf_core *c, struct pf_job *j)
{
    job_set_kept(c, j, false);
    if (j->engine_knows && j->state != JOB_HELD) {
        act(c, BT_PF_ENGINE_CANCEL)->job = j->head.id;
    }
    if (j->pushes_open > 0) {
        act(c, BT_PF_PUSH_CANCEL)->ticket = j->head.ticket;
    }
    bt_ticket_table_forget(&c->jobs, j);
    job_set_state(c, j, JOB_ENDING);
    job_finish_ending(c, j);
}

/* The decode node need not wait for this ticket any more. */
static void job_forget_at_peer(struct bt_pf_core *c, struct pf_job *j)
{
    if (j->started_sent) {
        act_control(c, j->conn, BT_CONTROL_FORGET, &j->head.ticket)->generation = j->generation;
    }
}

static void job_fail(struct bt_pf_core *c, struct pf_job *j, enum bt_attempt_reason reason,
                     const char *text)
{
    if (!j->kept) { /* else its attempt is over */
        c->stats.failures++;
        act_end(c, j->router, j->request_id, &j->head.ticket, reason, text);
    }
    job_end(c, j);
}

/* Keeps a job without its decode side. false: nobody could use it. What P has told of the prompt's log-probabilities
 * cannot be told again, so they must all have been. */
static bool job_keep(struct bt_pf_core *c, struct pf_job *j, uint64_t now)
{
    if (c->giving_back || j->peer_instance == 0 || (j->prompt_logprobs && j->state != JOB_HELD)) {
        return false;
    }
    if (j->pushes_open > 0) {
        act(c, BT_PF_PUSH_CANCEL)->ticket = j->head.ticket;
    }
    for (uint32_t i = 0; i < c->n_layers_all; i++) {
        j->layers[i].pushed_end = 0;
    }
    j->started_sent = j->granted = j->handed = false;
    j->conn = j->generation = 0;
    j->post_ns = j->t_push_first = j->t_push_last = j->n_shares = 0;
    j->t_kept = now;
    job_set_kept(c, j, true);
    return true;
}

/* Only the decode side of its attempt failed. */
static void job_lose_peer(struct bt_pf_core *c, struct pf_job *j, uint64_t now,
                          enum bt_attempt_reason reason, const char *text)
{
    bool kept = job_keep(c, j, now);

    c->stats.failures++;
    act_end(c, j->router, j->request_id, &j->head.ticket, reason, text)->kept = kept;
    if (!kept) {
        job_end(c, j);
    }
}

/* Gives up the job that is kept for the longest, for others; with_pages: one that holds some. false: there is none. */
static bool kept_evict(struct bt_pf_core *c, bool with_pages)
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
        job_end(c, oldest);
    }
    return oldest != NULL;
}

static void send_started(struct bt_pf_core *c, struct pf_job *j, const struct pf_peer *p)
{
    j->started_sent = true;
    j->conn = p->conn;
    act_control(c, p->conn, BT_CONTROL_STARTED, &j->head.ticket)->started.n_tokens = j->n_tokens;
}

/* ---- from routers ---- */

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

/* The peer that a submit names, dialled if it has to be. NULL: too many. */
static struct pf_peer *peer_of_submit(struct bt_pf_core *c, uint64_t now,
                                      const struct bt_msg_submit *s)
{
    struct pf_peer *p = peer_add(c, s->peer_instance, s->peer_address, &s->peer_gate_token);

    if (p != NULL && p->state == PEER_IDLE && now >= p->next_dial) {
        peer_dial(c, p);
    }
    return p;
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
        job_end(c, j);
        return NULL;
    }
    return j;
}

static void job_deliver(struct bt_pf_core *c, struct pf_job *j);

/* A kept job goes on under a new ticket, with a new peer. */
static void job_adopt(struct bt_pf_core *c, struct pf_job *j, uint64_t now, struct pf_peer *p,
                      const struct bt_msg_submit *s)
{
    bool renamed = bt_ticket_table_rename(&c->jobs, j, &s->ticket);

    BT_ASSERT(renamed); /* the ticket is not in use: bt_pf_on_submit() has looked */
    job_set_kept(c, j, false);
    c->stats.resent++;
    j->peer_instance = s->peer_instance;
    j->t_peer = j->t_progress = now;
    struct bt_pf_action *a = act(c, BT_PF_ADOPTED);

    a->job = j->head.id;
    a->ticket = s->ticket;
    j->stats.resent = true;
    j->known = s->n_tokens > j->n_tokens; /* else they came when their attempt was over */
    if (j->state != JOB_QUEUED && p->state == PEER_UP) {
        send_started(c, j, p);
    }
    if (j->has_token) {
        job_deliver(c, j);
    }
}

static void job_start(struct bt_pf_core *c, uint64_t now, uint32_t router,
                      const struct bt_msg_submit *s)
{
    struct pf_job *j = bt_ticket_table_add(&c->jobs, &s->ticket);

    if (j == NULL && kept_evict(c, false)) {
        j = bt_ticket_table_add(&c->jobs, &s->ticket);
    }
    if (j == NULL) {
        act_end(c, router, s->request_id, &s->ticket, BT_ATTEMPT_REFUSED,
                "the prefill queue is full");
        return;
    }
    j->router = router;
    snprintf(j->request_id, sizeof j->request_id, "%s", s->request_id != NULL ? s->request_id : "");
    j->t_submit = now;
    job_init(c, j, s);
    j->engine_knows = true;
    struct bt_pf_action *a = act(c, BT_PF_ENGINE_SUBMIT);

    a->job = j->head.id;
    a->submit = s;
}

void bt_pf_on_submit(struct bt_pf_core *c, uint64_t now, uint32_t router,
                     const struct bt_msg_submit *s)
{
    struct pf_peer *p = NULL;

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
    if (s->n_tokens > c->opts.context) {
        act_end(c, router, s->request_id, &s->ticket, BT_ATTEMPT_INVALID,
                "the prompt is longer than the model's context");
        return;
    }
    if (s->peer_instance != 0 && (p = peer_of_submit(c, now, s)) == NULL) {
        act_end(c, router, s->request_id, &s->ticket, BT_ATTEMPT_REFUSED, "too many decode peers");
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

    begin(c);
    if (j == NULL || j->router != router || (keep && j->kept)) {
        return; /* already over: cancel and the end of an attempt may cross */
    }
    job_forget_at_peer(c, j);
    if (!keep || !job_keep(c, j, now)) {
        job_end(c, j);
    }
}

void bt_pf_on_router_lost(struct bt_pf_core *c, uint64_t now, uint32_t router)
{
    uint32_t pos = 0;
    struct pf_job *j;

    (void)now;
    begin(c);
    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->router == router && j->state != JOB_ENDING) {
            job_forget_at_peer(c, j);
            job_end(c, j);
        }
    }
}

void bt_pf_on_give_back(struct bt_pf_core *c, uint64_t now)
{
    uint32_t pos = 0;
    struct pf_job *j;

    (void)now;
    begin(c);
    c->giving_back = true;
    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->state != JOB_ENDING) {
            job_forget_at_peer(c, j);
            job_fail(c, j, BT_ATTEMPT_DRAINING, DRAINED);
        }
    }
}

void bt_pf_on_resume(struct bt_pf_core *c)
{
    begin(c);
    c->giving_back = false;
}

void bt_pf_on_peers(struct bt_pf_core *c, uint64_t now, const struct bt_msg_peer *peers, size_t n)
{
    begin(c);
    for (uint32_t i = 0; i < c->opts.peers_max; i++) {
        c->peers[i].wanted = false;
    }
    for (size_t i = 0; i < n; i++) {
        struct pf_peer *p = peer_add(c, peers[i].instance, peers[i].address, &peers[i].gate_token);

        if (p == NULL) {
            continue; /* more peers than configured: those are dialled when a submit names them and
                         there is room */
        }
        p->wanted = true;
        if (p->told == TOLD_UNREACHABLE) { /* again: the list may be of a router that came later */
            act_peer_state(c, p, false, "still not reached");
        }
        if (p->state == PEER_IDLE && now >= p->next_dial) {
            peer_dial(c, p);
        }
    }
    for (uint32_t i = 0; i < c->opts.peers_max; i++) {
        struct pf_peer *p = &c->peers[i];

        if (p->instance != 0 && !p->wanted && p->state == PEER_IDLE) {
            p->instance = 0;
        }
    }
}

/* ---- from the engine ---- */

void bt_pf_on_engine_failed(struct bt_pf_core *c, uint64_t now, uint64_t job, enum bt_status st,
                            const char *text)
{
    struct pf_job *j = live_job(c, job);

    (void)now;
    begin(c);
    if (j == NULL) {
        return;
    }
    j->engine_knows = false;
    job_forget_at_peer(c, j);
    snprintf(c->text, sizeof c->text, "%s", text);
    job_fail(c, j,
             st == BT_ERR_INVALID                      ? BT_ATTEMPT_INVALID
             : st == BT_ERR_BUSY || st == BT_ERR_NOMEM ? BT_ATTEMPT_REFUSED
                                                       : BT_ATTEMPT_INTERNAL,
             c->text);
}

void bt_pf_on_engine_started(struct bt_pf_core *c, uint64_t now, uint64_t job)
{
    struct pf_job *j = live_job(c, job);

    begin(c);
    if (j == NULL) {
        return;
    }
    job_set_state(c, j, JOB_COMPUTING);
    j->t_start = j->t_peer = now;
    struct pf_peer *p = peer_by_instance(c, j->peer_instance);

    if (p != NULL && p->state == PEER_UP && !j->kept) {
        send_started(c, j, p);
    }
}

void bt_pf_on_engine_cached(struct bt_pf_core *c, uint64_t now, uint64_t job, uint32_t n_tokens)
{
    struct pf_job *j = live_job(c, job);

    (void)now;
    begin(c);
    if (j != NULL) {
        BT_ASSERT(n_tokens < j->n_tokens);
        j->n_cached = n_tokens;
        c->stats.cached_tokens += n_tokens < j->n_prompt ? n_tokens : j->n_prompt;
    }
}

static void push_layer(struct bt_pf_core *c, struct pf_job *j, uint32_t group, uint32_t layer)
{
    struct layer_progress *l = &j->layers[c->layer_base[group] + layer];
    uint32_t first = l->pushed_end > j->first_page[group] ? l->pushed_end : j->first_page[group];

    if (first >= l->avail_end) {
        return;
    }
    struct bt_pf_action *a = act(c, BT_PF_PUSH);

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

void bt_pf_on_engine_pages(struct bt_pf_core *c, uint64_t now, uint64_t job, uint32_t group,
                           uint32_t layer, uint32_t first, uint32_t end, const uint32_t *page_ids)
{
    struct pf_job *j = live_job(c, job);

    (void)now;
    begin(c);
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
        push_layer(c, j, group, layer);
    }
}

/* Shares that D must count: every wanted page of every layer. */
static void send_handoff(struct bt_pf_core *c, struct pf_job *j)
{
    struct bt_control *m = act_control(c, j->conn, BT_CONTROL_HANDOFF, &j->head.ticket);

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

/* Its first token to the router, and on to D: once for each attempt. The statistics go out until the router has them. */
static void job_deliver(struct bt_pf_core *c, struct pf_job *j)
{
    struct bt_pf_action *a = act(c, BT_PF_OUTPUT);

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
        job_forget_at_peer(c, j);
        job_end(c, j);
    } else if (j->granted) {
        send_handoff(c, j);
    }
}

void bt_pf_on_engine_token(struct bt_pf_core *c, uint64_t now, uint64_t job, uint32_t index,
                           const struct bt_sampled *s, uint32_t finish)
{
    struct pf_job *j = live_job(c, job);

    begin(c);
    if (j == NULL) {
        return;
    }
    double batch = c->n_computing;

    job_set_state(c, j, JOB_HELD);
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
        job_deliver(c, j);
    }
}

void bt_pf_on_engine_prompt_logprobs(struct bt_pf_core *c, uint64_t now, uint64_t job,
                                     uint32_t first, const struct bt_sampled *list, size_t n)
{
    struct pf_job *j = live_job(c, job);

    (void)now;
    begin(c);
    if (j == NULL) {
        return;
    }
    BT_ASSERT(!j->kept);
    struct bt_pf_action *a = act(c, BT_PF_OUTPUT);

    a->router = j->router;
    a->output = (struct bt_msg_output){.ticket = j->head.ticket,
                                       .has_logprobs = true,
                                       .prompt_first = first,
                                       .n_prompt_logprobs = n,
                                       .prompt_logprobs = list};
}

void bt_pf_on_engine_preempted(struct bt_pf_core *c, uint64_t now, uint64_t job)
{
    struct pf_job *j = live_job(c, job);

    (void)now;
    begin(c);
    if (j != NULL) {
        j->engine_knows = false;
        job_forget_at_peer(c, j);
        job_fail(c, j, BT_ATTEMPT_PREEMPTED, "the prefill node ran out of pages");
    }
}

void bt_pf_on_engine_alive(struct bt_pf_core *c, uint64_t now)
{
    uint32_t pos = 0;
    struct pf_job *j;

    begin(c);
    while (c->n_computing > 0 && (j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->state == JOB_COMPUTING && j->granted && now - j->t_alive >= c->opts.alive_ns) {
            j->t_alive = now;
            act_control(c, j->conn, BT_CONTROL_COMPUTING, &j->head.ticket)->generation =
                j->generation;
        }
    }
}

void bt_pf_on_engine_short(struct bt_pf_core *c, uint64_t now)
{
    (void)now;
    begin(c);
    (void)kept_evict(c, true); /* told again while it lasts */
}

/* ---- from the transfer room ---- */

void bt_pf_on_connecting(struct bt_pf_core *c, uint64_t now, uint64_t instance, uint64_t conn)
{
    struct pf_peer *p = peer_by_instance(c, instance);

    (void)now;
    begin(c);
    BT_ASSERT(p != NULL && p->state == PEER_CONNECTING);
    p->conn = conn;
}

static void peer_back_off(struct bt_pf_core *c, struct pf_peer *p, uint64_t now)
{
    uint32_t doublings = p->failures < RECONNECT_DOUBLINGS ? p->failures : RECONNECT_DOUBLINGS;

    p->state = PEER_IDLE;
    p->conn = 0;
    p->next_dial = now + (c->opts.reconnect_ns << doublings);
    p->failures++;
}

void bt_pf_on_connect_failed(struct bt_pf_core *c, uint64_t now, uint64_t instance, const char *why)
{
    struct pf_peer *p = peer_by_instance(c, instance);

    begin(c);
    BT_ASSERT(p != NULL && p->state == PEER_CONNECTING);
    peer_back_off(c, p, now);
    snprintf(c->text, sizeof c->text, "%s", why);
    tell_peer_state(c, p, false, c->text);
}

void bt_pf_on_peer_up(struct bt_pf_core *c, uint64_t now, uint64_t conn)
{
    struct pf_peer *p = peer_by_conn(c, conn);
    uint32_t pos = 0;
    struct pf_job *j;

    (void)now;
    begin(c);
    if (p == NULL) {
        act(c, BT_PF_DISCONNECT)->peer = conn;
        return;
    }
    p->state = PEER_UP;
    p->failures = 0;
    tell_peer_state(c, p, true, "");
    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        bool begun = j->state == JOB_COMPUTING || j->state == JOB_HELD;

        if (begun && !j->kept && j->peer_instance == p->instance && !j->started_sent) {
            send_started(c, j, p);
        }
    }
}

void bt_pf_on_peer_down(struct bt_pf_core *c, uint64_t now, uint64_t conn, const char *why)
{
    struct pf_peer *p = peer_by_conn(c, conn);
    uint32_t pos = 0;
    struct pf_job *j;

    begin(c);
    if (p == NULL) {
        return;
    }
    uint64_t instance = p->instance;
    bool was_up = p->state == PEER_UP;

    peer_back_off(c, p, now);
    snprintf(c->text, sizeof c->text, "connection to the decode node lost: %s", why);
    tell_peer_state(c, p, false, c->text);
    while (was_up && (j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        if (j->state != JOB_ENDING && j->peer_instance == instance && j->started_sent) {
            job_lose_peer(c, j, now, BT_ATTEMPT_RETRY, c->text);
        }
    }
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
    if (j == NULL || !j->started_sent || j->conn != conn || j->granted ||
        m->grant.n_groups != c->opts.n_groups) {
        c->stats.stale++;
        if (j == NULL || !j->granted || j->generation != m->generation) {
            act_control(c, conn, BT_CONTROL_FORGET, &m->ticket)->generation = m->generation;
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
            push_layer(c, j, g, l);
        }
    }
    if (j->has_token) {
        send_handoff(c, j);
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

    begin(c);
    switch (m->kind) {
    case BT_CONTROL_GRANT:
        on_grant(c, now, conn, j, m);
        return;
    case BT_CONTROL_REFUSE:
        if (j != NULL && j->started_sent && j->conn == conn) {
            snprintf(c->text, sizeof c->text, "refused by the decode node: %s", m->refuse.text);
            job_lose_peer(c, j, now, reason_from_peer(m->refuse.reason), c->text);
            return;
        }
        break;
    case BT_CONTROL_REVOKE:
        if (match) {
            job_lose_peer(c, j, now, reason_from_peer(m->revoke.reason),
                          "revoked by the decode node");
            return;
        }
        break;
    case BT_CONTROL_DONE:
        if (match && j->handed) {
            c->stats.done++;
            j->done = true;
            job_end(c, j);
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

    begin(c);
    BT_ASSERT(j != NULL && j->pushes_open > 0);
    j->pushes_open--;
    if (j->state == JOB_ENDING) {
        job_finish_ending(c, j);
        return;
    }
    if (!is_current(j, t)) {
        return;
    }
    j->t_progress = now;
    if (st != BT_OK) {
        job_forget_at_peer(c, j);
        job_lose_peer(c, j, now, BT_ATTEMPT_RETRY, "sending pages to the decode node failed");
    }
}

/* ---- time ---- */

static void check_job(struct bt_pf_core *c, struct pf_job *j, uint64_t now)
{
    bool begun = j->state == JOB_COMPUTING || j->state == JOB_HELD;

    if (j->kept) {
        if (now - j->t_kept > c->opts.keep_ns) {
            c->stats.keep_expired++;
            job_end(c, j);
        }
        return;
    }
    if (!begun || j->peer_instance == 0) {
        return;
    }
    if (!j->started_sent && now - j->t_peer > c->opts.unreachable_ns) {
        job_lose_peer(c, j, now, BT_ATTEMPT_RETRY,
                      "the decode node cannot be reached from the prefill node");
    } else if (j->state == JOB_HELD &&
               j->pushes_open == 0 && /* those end, or the connection does */
               now - j->t_progress > c->opts.grant_ns) {
        job_forget_at_peer(c, j);
        job_lose_peer(c, j, now, BT_ATTEMPT_RETRY,
                      j->granted ? "the decode node did not confirm the hand-off in time"
                                 : "the decode node gave no grant in time");
    }
}

void bt_pf_on_tick(struct bt_pf_core *c, uint64_t now)
{
    uint32_t pos = 0;
    struct pf_job *j;

    begin(c);
    while ((j = bt_ticket_table_next(&c->jobs, &pos)) != NULL) {
        check_job(c, j, now);
    }
    for (uint32_t i = 0; i < c->opts.peers_max; i++) {
        struct pf_peer *p = &c->peers[i];

        if (p->instance != 0 && p->wanted && p->state == PEER_IDLE && now >= p->next_dial) {
            peer_dial(c, p);
        }
    }
}
