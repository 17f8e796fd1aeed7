/* The engine thread: commands in, steps, events out. Owns the mapping from job ids to the engine's
 * sequence ids and everything that crosses between the loop and the engine; refuses to know what a
 * ticket or a peer is. The thread is sealed (base/mem.h): requests that it is done with go back to
 * the loop to be freed, and what its events point to lies in a ring of blocks. */

#include "node/engine_thread.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include "base/assert.h"
#include "base/clock.h"
#include "base/fifo.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/ring.h"
#include "base/spent.h"
#include "net/loop.h"

#define EVENT_RING   8192
#define BLOCKS_MIN   ((size_t)1 << 20) /* bytes for what events point to */
#define LOGPROBS_MAX 64                /* of a prompt in one event */
#define CHANGES_MAX  1024              /* of the cache in one event */
/* Submit or land, begin, quarantine, cancel, release: each at most once for a job. The first is
 * refused while the ring has less room than the others of max_jobs jobs may need. */
#define CMDS_PER_JOB 5
#define CMDS_TO_END  4
#define CMDS_WAITING 4 /* submits waiting for a busy engine, in max_jobs */

enum cmd_kind {
    CMD_SUBMIT,
    CMD_LAND,
    CMD_BEGIN,
    CMD_QUARANTINE,
    CMD_CANCEL,
    CMD_RELEASE,
    CMD_STOP
};

/* A request and everything it points to, in one block. */
struct req_copy {
    struct bt_engine_req req;
    struct bt_sampling sampling;
};

struct cmd {
    enum cmd_kind kind;
    uint32_t token;
    uint64_t job;
    struct req_copy *req;
};

/* What crosses to the loop: the event and one block of the ring that its pointers lie in, or NULL. */
struct event_msg {
    struct bt_engine_ev ev;
    void *block;
};

struct job_slot {
    uint64_t job; /* 0: free */
    bt_seq_id seq;
};

struct bt_engine_thread {
    struct bt_engine *engine;
    struct bt_net_loop *loop;
    struct bt_inbox *inbox;
    struct bt_ring *cmds;
    size_t cmds_busy; /* so many commands waiting: no new job */
    struct bt_fifo *blocks;
    struct bt_spent spent; /* requests, on their way back to the loop */
    struct bt_seal seal;
    bt_engine_ev_fn *handle;
    void *arg;
    pthread_t thread;

    /* engine thread only */
    struct job_slot *jobs;  /* by slot of the job id */
    uint32_t *seq_job_slot; /* by slot of the sequence id */
    uint32_t max_jobs;
    struct cmd *stash; /* commands taken from the ring inside a step, carried out after it */
    size_t n_stash, stash_cap;
    bool stopping;

    /* prompt log-probabilities of the running step */
    struct bt_sampled plp[LOGPROBS_MAX];
    uint32_t plp_n, plp_first;
    uint64_t plp_job;

    pthread_mutex_t mutex; /* guards snapshot */
    struct bt_engine_snapshot snapshot;
    bool was_short;            /* of pages, after the last step */
    atomic_bool stop;          /* events are no longer wanted */
    _Atomic uint64_t n_layers; /* computed */
};

static uint32_t slot_of(uint64_t id)
{
    return (uint32_t)id;
}

/* ---- events to the loop: when it is behind, the engine waits for it; none is dropped ---- */

/* false: nobody wants events any more. */
static bool wait_for_loop(struct bt_engine_thread *t)
{
    nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    return !atomic_load(&t->stop);
}

/* n bytes for an event. NULL: events are no longer wanted. */
static void *block_take(struct bt_engine_thread *t, size_t n)
{
    void *block;

    do {
        block = bt_fifo_take(t->blocks, n);
    } while (block == NULL && wait_for_loop(t));
    return block;
}

static void *block_of(struct bt_engine_thread *t, const void *p, size_t n)
{
    void *block = block_take(t, n);

    if (block != NULL) {
        memcpy(block, p, n);
    }
    return block;
}

static void post(struct bt_engine_thread *t, const struct bt_engine_ev *ev, void *block)
{
    struct event_msg m = {.ev = *ev, .block = block};

    while (!bt_inbox_post(t->inbox, &m)) {
        if (!wait_for_loop(t)) {
            bt_fifo_give(block);
            return;
        }
    }
}

static void on_event(void *arg, const void *msg)
{
    struct bt_engine_thread *t = arg;
    const struct event_msg *m = msg;

    if (!atomic_load(&t->stop)) {
        t->handle(t->arg, &m->ev);
    }
    bt_fifo_give(m->block);
    bt_spent_free(&t->spent);
}

static void post_failed(struct bt_engine_thread *t, uint64_t job, enum bt_status st,
                        const char *text)
{
    char *copy = block_of(t, text, strlen(text) + 1);

    if (copy != NULL) {
        post(t,
             &(struct bt_engine_ev){
                 .kind = BT_ENGINE_EV_FAILED, .job = job, .status = st, .text = copy},
             copy);
    }
}

static void tell_cache(struct bt_engine_thread *t)
{
    uint32_t n_all, at = 0;
    const struct bt_prefix_change *list = bt_engine_cache_changes(t->engine, &n_all);

    while (at < n_all) {
        uint32_t n = n_all - at < CHANGES_MAX ? n_all - at : CHANGES_MAX;
        struct bt_prefix_change *copy = block_of(t, list + at, n * sizeof *copy);

        if (copy == NULL) {
            return;
        }
        post(t, &(struct bt_engine_ev){.kind = BT_ENGINE_EV_CACHE, .cache = {n, copy}}, copy);
        at += n;
    }
}

/* ---- job ids and sequence ids ---- */

static struct job_slot *job_find(struct bt_engine_thread *t, uint64_t job)
{
    if (slot_of(job) >= t->max_jobs) {
        return NULL;
    }
    return t->jobs[slot_of(job)].job == job ? &t->jobs[slot_of(job)] : NULL;
}

static uint64_t job_of_seq(struct bt_engine_thread *t, bt_seq_id seq)
{
    const struct job_slot *s = &t->jobs[t->seq_job_slot[slot_of(seq)]];

    return s->seq == seq ? s->job : 0;
}

static void job_bind(struct bt_engine_thread *t, uint64_t job, bt_seq_id seq)
{
    BT_ASSERT(slot_of(seq) < t->max_jobs);
    t->jobs[slot_of(job)] = (struct job_slot){job, seq};
    t->seq_job_slot[slot_of(seq)] = slot_of(job);
}

/* ---- hooks, called inside a step ---- */

static void hook_started(void *arg, bt_seq_id seq, uint32_t n_cached)
{
    struct bt_engine_thread *t = arg;
    uint64_t job = job_of_seq(t, seq);

    post(t, &(struct bt_engine_ev){.kind = BT_ENGINE_EV_STARTED, .job = job, .n_cached = n_cached},
         NULL);
}

static void hook_pages(void *arg, const struct bt_engine_page_event *p)
{
    struct bt_engine_thread *t = arg;
    uint64_t job = job_of_seq(t, p->seq);
    uint32_t *ids = block_of(t, p->page_ids + p->first, (p->end - p->first) * sizeof *ids);

    if (ids == NULL) {
        return;
    }
    struct bt_engine_ev ev = {.kind = BT_ENGINE_EV_PAGES, .job = job};

    ev.pages.group = p->group;
    ev.pages.layer = p->layer;
    ev.pages.first = p->first;
    ev.pages.end = p->end;
    ev.pages.page_ids = ids;
    post(t, &ev, ids);
}

static void flush_prompt_logprobs(struct bt_engine_thread *t)
{
    if (t->plp_n == 0) {
        return;
    }
    struct bt_engine_ev ev = {.kind = BT_ENGINE_EV_PROMPT_LOGPROBS, .job = t->plp_job};

    ev.prompt_logprobs.first = t->plp_first;
    ev.prompt_logprobs.n = t->plp_n;
    struct bt_sampled *list = block_of(t, t->plp, t->plp_n * sizeof *list);

    t->plp_n = 0;
    if (list != NULL) {
        ev.prompt_logprobs.list = list;
        post(t, &ev, list);
    }
}

static void hook_prompt_logprob(void *arg, bt_seq_id seq, uint32_t pos, const struct bt_sampled *s)
{
    struct bt_engine_thread *t = arg;
    uint64_t job = job_of_seq(t, seq);

    if (t->plp_n == LOGPROBS_MAX ||
        (t->plp_n > 0 && (t->plp_job != job || t->plp_first + t->plp_n != pos))) {
        flush_prompt_logprobs(t);
    }
    if (t->plp_n == 0) {
        t->plp_job = job;
        t->plp_first = pos;
    }
    t->plp[t->plp_n++] = *s;
}

static void hook_token(void *arg, const struct bt_engine_token *token)
{
    struct bt_engine_thread *t = arg;

    flush_prompt_logprobs(t);
    post(t,
         &(struct bt_engine_ev){
             .kind = BT_ENGINE_EV_TOKEN, .job = job_of_seq(t, token->seq), .token = *token},
         NULL);
}

static void hook_preempted(void *arg, bt_seq_id seq)
{
    struct bt_engine_thread *t = arg;
    uint64_t job = job_of_seq(t, seq);

    t->jobs[slot_of(job)] = (struct job_slot){0};
    post(t, &(struct bt_engine_ev){.kind = BT_ENGINE_EV_PREEMPTED, .job = job}, NULL);
}

/* Between layers: takes commands so that a cancel is seen at once; the others wait in the stash. */
static bool hook_interrupted(void *arg)
{
    struct bt_engine_thread *t = arg;
    struct cmd c;
    bool any = false;

    atomic_fetch_add_explicit(&t->n_layers, 1, memory_order_relaxed);
    while (t->n_stash < t->stash_cap && bt_ring_pop(t->cmds, &c)) {
        if (c.kind == CMD_CANCEL || c.kind == CMD_RELEASE) {
            struct job_slot *s = job_find(t, c.job);

            if (s != NULL) {
                bt_engine_cancel(t->engine, s->seq);
                any = true;
            }
        }
        t->stash[t->n_stash++] = c;
    }
    return any;
}

/* ---- commands ---- */

static void do_submit(struct bt_engine_thread *t, const struct cmd *c)
{
    struct bt_err err = {0};
    bt_seq_id seq = 0;
    enum bt_status st = bt_engine_submit(t->engine, &c->req->req, &seq, &err);

    if (st != BT_OK) {
        post_failed(t, c->job, st, err.msg);
        return;
    }
    job_bind(t, c->job, seq);
}

/* The page tables of a landing go in one block: n_pages ids for each group. */
static void do_land(struct bt_engine_thread *t, const struct cmd *c)
{
    struct bt_err err = {0};
    struct bt_engine_landing l = {0};
    enum bt_status st = bt_engine_land(t->engine, &c->req->req, &l, &err);

    if (st == BT_ERR_BUSY) { /* where both legs share the pool, the next one may find room */
        post(t, &(struct bt_engine_ev){.kind = BT_ENGINE_EV_SHORT}, NULL);
    }
    if (st != BT_OK) {
        post_failed(t, c->job, st, err.msg);
        return;
    }
    uint32_t n_groups = bt_engine_model(t->engine)->n_groups;
    struct bt_engine_ev ev = {.kind = BT_ENGINE_EV_LANDED, .job = c->job, .n_cached = l.n_cached};
    uint32_t *ids = block_take(t, (size_t)n_groups * l.n_pages * sizeof *ids);

    job_bind(t, c->job, l.seq);
    if (ids == NULL) {
        return;
    }
    ev.landed.n_pages = l.n_pages;
    for (uint32_t g = 0; g < n_groups; g++) {
        memcpy(ids + (size_t)g * l.n_pages, l.page_ids[g], l.n_pages * sizeof *ids);
        ev.landed.first_page[g] = l.first_page[g];
        ev.landed.page_ids[g] = ids + (size_t)g * l.n_pages;
    }
    post(t, &ev, ids);
}

static void do_begin(struct bt_engine_thread *t, const struct cmd *c)
{
    struct job_slot *s = job_find(t, c->job);

    if (s == NULL) {
        return;
    }
    enum bt_status st = bt_engine_start(t->engine, s->seq, c->token);

    if (st != BT_OK) {
        bt_engine_release(t->engine, s->seq);
        *s = (struct job_slot){0};
        post_failed(t, c->job, st, "the sequence cannot start");
    }
}

static void do_cmd(struct bt_engine_thread *t, const struct cmd *c)
{
    struct job_slot *s = c->kind == CMD_STOP ? NULL : job_find(t, c->job);

    switch (c->kind) {
    case CMD_SUBMIT:
        do_submit(t, c);
        break;
    case CMD_LAND:
        do_land(t, c);
        break;
    case CMD_BEGIN:
        do_begin(t, c);
        break;
    case CMD_QUARANTINE:
        if (s != NULL) {
            bt_engine_quarantine(t->engine, s->seq);
        }
        break;
    case CMD_CANCEL:
        if (s != NULL) {
            bt_engine_cancel(t->engine, s->seq);
        }
        break;
    case CMD_RELEASE:
        if (s != NULL) {
            bt_engine_release(t->engine, s->seq);
            *s = (struct job_slot){0};
        }
        break;
    case CMD_STOP:
        t->stopping = true;
        break;
    }
    bt_spent_add(&t->spent, c->req);
}

/* The speed under load is that of full chunks: steps much smaller than the largest so far say little
 * about it. */
static void take_speed(struct bt_engine_snapshot *s, uint32_t n_tokens, double speed)
{
    if (n_tokens > s->prefill_step_max) {
        s->prefill_tokens_per_s = n_tokens > 4 * s->prefill_step_max ? 0 : s->prefill_tokens_per_s;
        s->prefill_step_max = n_tokens;
    }
    if (n_tokens >= s->prefill_step_max / 4) {
        s->prefill_tokens_per_s =
            s->prefill_tokens_per_s == 0 ? speed : 0.8 * s->prefill_tokens_per_s + 0.2 * speed;
    }
}

static void take_snapshot(struct bt_engine_thread *t, const struct bt_engine_step_stats *st)
{
    struct bt_engine_pages pages = bt_engine_pages(t->engine);
    struct bt_engine_load load = bt_engine_load(t->engine);

    pthread_mutex_lock(&t->mutex);
    struct bt_engine_snapshot *s = &t->snapshot;

    s->pages = pages;
    s->load = load;
    if (st != NULL) {
        s->n_steps++;
        s->n_prefill_tokens += st->n_prefill_tokens;
        s->n_decode_tokens += st->n_decode_tokens;
        s->n_host_draws += st->n_host_draws;
        double seconds = (double)st->compute_ns / 1e9;

        if (st->n_prefill_tokens > 0 && seconds > 0) {
            s->prefill_ns += st->compute_ns;
            take_speed(s, st->n_prefill_tokens, (double)st->n_prefill_tokens / seconds);
        } else {
            double ms = seconds * 1e3;

            s->decode_ns += st->compute_ns;
            s->decode_step_ms = s->decode_step_ms == 0 ? ms : 0.9 * s->decode_step_ms + 0.1 * ms;
        }
    }
    pthread_mutex_unlock(&t->mutex);
}

static bool run_commands(struct bt_engine_thread *t)
{
    struct cmd c;
    size_t n = t->n_stash;

    for (size_t i = 0; i < t->n_stash; i++) {
        do_cmd(t, &t->stash[i]);
    }
    t->n_stash = 0;
    while (bt_ring_pop(t->cmds, &c)) {
        do_cmd(t, &c);
        n++;
    }
    return n > 0;
}

/* The plan of a step that computes nothing has news as well: that a prompt cannot start. */
static void tell_short(struct bt_engine_thread *t, bool worked)
{
    bool is_short = bt_engine_load(t->engine).pages_short;

    if (is_short) {
        post(t, &(struct bt_engine_ev){.kind = BT_ENGINE_EV_SHORT}, NULL);
    }
    if (!worked && is_short != t->was_short) {
        take_snapshot(t, NULL);
    }
    t->was_short = is_short;
}

static void *thread_main(void *arg)
{
    struct bt_engine_thread *t = arg;
    struct cmd c;

    bt_log_thread("engine");
    bt_alloc_seal(&t->seal);
    while (!t->stopping) {
        bool worked = false;
        struct bt_engine_step_stats stats = {0};

        if (run_commands(t)) {
            take_snapshot(t, NULL);
        }
        if (t->stopping) {
            break;
        }
        enum bt_status st = bt_engine_step(t->engine, &worked, &stats);

        if (st != BT_OK) { /* the same step would fail again */
            post(t,
                 &(struct bt_engine_ev){
                     .kind = BT_ENGINE_EV_BROKEN, .status = st, .text = "a step failed"},
                 NULL);
            break;
        }
        flush_prompt_logprobs(t);
        tell_short(t, worked);
        if (worked && stats.n_spans == 0) { /* given up, or it only preempted: tells no speed */
            take_snapshot(t, NULL);
        } else if (worked) {
            take_snapshot(t, &stats);
            post(t, &(struct bt_engine_ev){.kind = BT_ENGINE_EV_STEP, .step = stats}, NULL);
        } else if (t->n_stash == 0 && bt_ring_pop_wait(t->cmds, &c, UINT64_MAX)) {
            do_cmd(t, &c);
            take_snapshot(t, NULL);
        }
        tell_cache(t);
    }
    return NULL;
}

/* ---- life ---- */

static void thread_free(struct bt_engine_thread *t)
{
    struct cmd c;

    while (t->cmds != NULL && bt_ring_pop(t->cmds, &c)) {
        bt_free(c.req);
    }
    for (size_t i = 0; i < t->n_stash; i++) { /* of an engine that broke */
        bt_free(t->stash[i].req);
    }
    bt_spent_free(&t->spent);
    if (t->inbox != NULL) {
        bt_inbox_destroy(t->inbox);
    }
    bt_ring_destroy(t->cmds);
    bt_fifo_destroy(t->blocks);
    bt_free(t->stash);
    bt_free(t->seq_job_slot);
    bt_free(t->jobs);
    bt_engine_destroy(t->engine);
    pthread_mutex_destroy(&t->mutex);
    bt_free(t);
}

/* Room for the largest landing twice. */
static size_t blocks_bytes(const struct bt_engine *e)
{
    const struct bt_model_info *info = bt_engine_model(e);
    size_t pages = info->context / bt_engine_layout(e)->page_tokens + 1;
    size_t largest = pages * info->n_groups * sizeof(uint32_t) + BT_FIFO_BLOCK_OVERHEAD;

    return 2 * largest > BLOCKS_MIN ? 2 * largest : BLOCKS_MIN;
}

enum bt_status bt_engine_thread_start(struct bt_net_loop *l, struct bt_engine *e, uint32_t max_jobs,
                                      bt_engine_ev_fn *handle, void *arg,
                                      struct bt_engine_thread **out)
{
    struct bt_engine_thread *t = bt_calloc(1, sizeof *t);
    size_t n_cmds = (size_t)max_jobs * (CMDS_PER_JOB + CMDS_WAITING) + 1; /* and the stop */

    if (t == NULL) {
        bt_engine_destroy(e);
        return BT_ERR_NOMEM;
    }
    t->engine = e;
    t->loop = l;
    t->handle = handle;
    t->arg = arg;
    t->max_jobs = max_jobs;
    t->stash_cap = n_cmds;
    t->cmds_busy = n_cmds - 1 - (size_t)max_jobs * CMDS_TO_END;
    pthread_mutex_init(&t->mutex, NULL);
    t->jobs = bt_calloc(max_jobs, sizeof *t->jobs);
    t->seq_job_slot = bt_calloc(max_jobs, sizeof *t->seq_job_slot);
    t->stash = bt_calloc(n_cmds, sizeof *t->stash);
    enum bt_status st =
        t->jobs == NULL || t->seq_job_slot == NULL || t->stash == NULL ? BT_ERR_NOMEM : BT_OK;

    t->seal.thread = "engine";
    if (st == BT_OK) {
        st = bt_fifo_create(blocks_bytes(e), &t->blocks);
    }
    if (st == BT_OK) {
        st = bt_ring_create(sizeof(struct cmd), n_cmds, &t->cmds);
    }
    if (st == BT_OK) {
        st = bt_inbox_create(l, sizeof(struct event_msg), EVENT_RING, on_event, t, &t->inbox);
    }
    if (st != BT_OK) {
        thread_free(t);
        return st;
    }
    bt_engine_set_hooks(e, &(struct bt_engine_hooks){
                               .arg = t,
                               .on_started = hook_started,
                               .on_pages = hook_pages,
                               .on_token = hook_token,
                               .on_prompt_logprob = hook_prompt_logprob,
                               .on_preempted = hook_preempted,
                               .step_interrupted = hook_interrupted,
                           });
    take_snapshot(t, NULL);
    if (pthread_create(&t->thread, NULL, thread_main, t) != 0) {
        thread_free(t);
        return BT_ERR_BUSY;
    }
    *out = t;
    return BT_OK;
}

static void push_cmd(struct bt_engine_thread *t, const struct cmd *c)
{
    bool ok = bt_ring_push(t->cmds, c);

    BT_ASSERT(ok); /* push_req() left room for what ends the jobs that it took */
}

void bt_engine_thread_stop(struct bt_engine_thread *t)
{
    if (t == NULL) {
        return;
    }
    atomic_store(&t->stop, true);
    push_cmd(t, &(struct cmd){.kind = CMD_STOP});
    pthread_join(t->thread, NULL);
    thread_free(t);
}

static struct req_copy *copy_req(const struct bt_engine_req *req)
{
    size_t tokens = (size_t)req->n_tokens * sizeof(uint32_t);
    size_t bias = (size_t)req->sampling->n_bias * sizeof(struct bt_logit_bias);
    struct req_copy *c = bt_alloc(sizeof *c + bias + tokens);

    if (c == NULL) {
        return NULL;
    }
    struct bt_logit_bias *b = (struct bt_logit_bias *)(c + 1);
    uint32_t *ids = (uint32_t *)(b + req->sampling->n_bias);

    if (bias > 0) {
        memcpy(b, req->sampling->bias, bias);
    }
    memcpy(ids, req->tokens, tokens);
    c->sampling = *req->sampling;
    c->sampling.bias = b;
    c->req = *req;
    c->req.tokens = ids;
    c->req.sampling = &c->sampling;
    return c;
}

static enum bt_status push_req(struct bt_engine_thread *t, enum cmd_kind kind, uint64_t job,
                               const struct bt_engine_req *req)
{
    if (bt_ring_count(t->cmds) >= t->cmds_busy) {
        return BT_ERR_BUSY;
    }
    bt_spent_free(&t->spent);
    struct req_copy *copy = copy_req(req);

    if (copy == NULL) {
        return BT_ERR_NOMEM;
    }
    push_cmd(t, &(struct cmd){.kind = kind, .job = job, .req = copy});
    return BT_OK;
}

enum bt_status bt_engine_thread_submit(struct bt_engine_thread *t, uint64_t job,
                                       const struct bt_engine_req *req)
{
    return push_req(t, CMD_SUBMIT, job, req);
}

enum bt_status bt_engine_thread_land(struct bt_engine_thread *t, uint64_t job,
                                     const struct bt_engine_req *req)
{
    return push_req(t, CMD_LAND, job, req);
}

void bt_engine_thread_begin(struct bt_engine_thread *t, uint64_t job, uint32_t first_token)
{
    push_cmd(t, &(struct cmd){.kind = CMD_BEGIN, .job = job, .token = first_token});
}

void bt_engine_thread_quarantine(struct bt_engine_thread *t, uint64_t job)
{
    push_cmd(t, &(struct cmd){.kind = CMD_QUARANTINE, .job = job});
}

void bt_engine_thread_cancel(struct bt_engine_thread *t, uint64_t job)
{
    push_cmd(t, &(struct cmd){.kind = CMD_CANCEL, .job = job});
}

void bt_engine_thread_release(struct bt_engine_thread *t, uint64_t job)
{
    push_cmd(t, &(struct cmd){.kind = CMD_RELEASE, .job = job});
}

struct bt_engine_snapshot bt_engine_thread_snapshot(struct bt_engine_thread *t)
{
    pthread_mutex_lock(&t->mutex);
    struct bt_engine_snapshot s = t->snapshot;

    pthread_mutex_unlock(&t->mutex);
    s.sealed_heap_calls = bt_seal_heap_calls(&t->seal);
    return s;
}

uint64_t bt_engine_thread_layers(struct bt_engine_thread *t)
{
    return atomic_load_explicit(&t->n_layers, memory_order_relaxed);
}

const struct bt_engine *bt_engine_thread_engine(const struct bt_engine_thread *t)
{
    return t->engine;
}
