/* The virtual cluster of the tests of admission and forecasts. */

#include "tests/unit/router/virtual_cluster.h"

#include <stdlib.h>
#include "base/assert.h"
#include "base/mem.h"
#include "sched/batch.h"
#include "tests/check.h"

#define BATCH 64u

struct vc vc;

static struct vc_node *node_of(uint64_t session)
{
    for (uint32_t i = 0; i < vc.n_nodes; i++) {
        if (vc.nodes[i].session == session) {
            return &vc.nodes[i];
        }
    }
    abort();
}

/* Predicted seconds of work at a prefill node that just got more, beyond those of the one with the least. */
static void take_skew(const struct vc_node *n)
{
    double s = 0, least = 1e9;

    for (uint32_t i = 0; i < vc.n_nodes && vc.nodes[i].role == BT_ROLE_PREFILL; i++) {
        const struct rt_node *p = &vc.core->nodes[i];
        double x = (double)(p->own_tokens + p->other_tokens - p->done_tokens) / vc.nodes[i].speed;

        least = x < least ? x : least;
        s = &vc.nodes[i] == n ? x : s;
    }
    vc.skew = s - least > vc.skew ? s - least : vc.skew;
}

static void take(const struct bt_rt_action *a)
{
    if (a->kind == BT_RT_SEND && a->send.kind == BT_FROM_ROUTER_SUBMIT) {
        const struct bt_msg_submit *m = &a->send.submit;
        struct vc_node *n = node_of(a->session);
        uint32_t id = (uint32_t)strtoul(m->request_id, NULL, 10);

        CHECK(n->n < VC_JOBS);
        n->jobs[n->n++] = (struct vc_job){.ticket = m->ticket,
                                          .n_prompt = m->n_prompt,
                                          .left = m->n_prompt,
                                          .max_tokens = m->sampling.max_tokens,
                                          .seq = id,
                                          .two_legs = m->peer_instance != 0};
        n->total += m->n_tokens;
        if (n->role == BT_ROLE_PREFILL) {
            vc.order[vc.n_order++] = id;
            vc.where[id] = (uint32_t)(n - vc.nodes);
            take_skew(n);
        }
    } else if (a->kind == BT_RT_TOKENS && vc.t_first[(uintptr_t)a->user] == 0) {
        vc.t_first[(uintptr_t)a->user] = vc.now;
    } else if (a->kind == BT_RT_END) {
        vc.t_end[(uintptr_t)a->user] = vc.now;
        vc.how[(uintptr_t)a->user] = a->end.kind;
        vc.last_end = a->end;
        vc.n_finished += a->end.kind == BT_RT_FINISHED;
        vc.n_failed += a->end.kind != BT_RT_FINISHED;
    }
}

static void drain(void)
{
    struct bt_rt_action a;

    while (bt_rt_core_next(vc.core, &a)) {
        take(&a);
    }
}

static void join(enum bt_role role, double speed, uint32_t pages)
{
    struct vc_node *n = &vc.nodes[vc.n_nodes];
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_HELLO,
                               .hello = {.version_min = 1,
                                         .version_max = 1,
                                         .role = role,
                                         .instance = 100 + vc.n_nodes,
                                         .name = "",
                                         .fingerprint = 7,
                                         .numerics = "f32",
                                         .kv_layout = "L",
                                         .model_name = "m",
                                         .transfer_address = "a",
                                         .backend = "cpu",
                                         .page_tokens = 16,
                                         .n_pages = pages,
                                         .max_batch = BATCH,
                                         .chunk_tokens = 512,
                                         .max_tokens = 65536,
                                         .context = 65536}};

    *n = (struct vc_node){
        .session = bt_rt_on_session(vc.core, vc.now), .role = role, .speed = speed};
    vc.n_nodes++;
    bt_rt_on_message(vc.core, vc.now, n->session, &m);
    drain();
}

static void report(struct vc_node *n)
{
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_LOAD};

    for (uint32_t i = 0; i < n->n; i++) {
        m.load.waiting_tokens += n->role == BT_ROLE_PREFILL ? n->jobs[i].left : 0;
    }
    m.load.waiting = n->n;
    m.load.decode_step_ms = n->step_ms;
    m.load.prefill_tokens_per_s = n->role == BT_ROLE_PREFILL ? n->speed : 0;
    bt_rt_on_message(vc.core, vc.now, n->session, &m);
    drain();
}

void vc_report_all(void)
{
    for (uint32_t i = 0; i < vc.n_nodes; i++) {
        report(&vc.nodes[i]);
    }
}

void vc_begin(uint32_t n_prefill, uint32_t n_decode, uint32_t queue_max, uint64_t max_ttft_ms,
              uint32_t pages)
{
    struct bt_rt_opts opts = {.instance = 9,
                              .name = "r",
                              .seed = {1, 2},
                              .seqs_max = VC_SEQS,
                              .queue_max = queue_max,
                              .nodes_max = 2 * NODES,
                              .attempts_max = 4,
                              .queue_ns = 30000 * MS,
                              .grace_ns = 1000 * MS,
                              .migrate_ns = 5000 * MS,
                              .lease_ns = 3000 * MS,
                              .heartbeat_ns = 250 * MS,
                              .backoff_ns = 20 * MS,
                              .max_ttft_ns = max_ttft_ms * MS,
                              .n_keys = 3};

    vc.now = 1000 * MS;
    vc.n_nodes = vc.n_order = vc.n_finished = vc.n_failed = 0;
    memset(vc.t_ask, 0, sizeof vc.t_ask);
    memset(vc.t_first, 0, sizeof vc.t_first);
    memset(vc.t_end, 0, sizeof vc.t_end);
    CHECK_EQ(bt_rt_core_create(&opts, &vc.core), BT_OK);
    for (uint32_t i = 0; i < n_prefill; i++) {
        join(BT_ROLE_PREFILL, 10000, 100000);
    }
    for (uint32_t i = 0; i < n_decode; i++) {
        join(BT_ROLE_DECODE, 0, pages);
    }
    vc_report_all();
}

void vc_end(void)
{
    bt_rt_core_destroy(vc.core);
    vc.core = NULL;
    CHECK_EQ(bt_test_live_bytes(), 0);
}

enum bt_status vc_ask(uint32_t id, uint32_t key, int32_t priority, uint32_t n_prompt,
                      uint32_t max_tokens)
{
    static uint32_t prompt[65536];
    struct bt_sampling sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = max_tokens};
    char name[16];
    uint64_t seq;

    BT_ASSERT(id < VC_SEQS);
    vc.t_ask[id] = vc.now;
    snprintf(name, sizeof name, "%u", id);
    enum bt_status st = bt_rt_seq_start(vc.core, vc.now,
                                        &(struct bt_rt_seq_start){.request_id = name,
                                                                  .tokens = prompt,
                                                                  .n_prompt = n_prompt,
                                                                  .sampling = &sampling,
                                                                  .priority = priority,
                                                                  .key = key,
                                                                  .deadline = UINT64_MAX,
                                                                  .user = (void *)(uintptr_t)id},
                                        &seq);
    drain();
    return st;
}

static void output(struct vc_node *n, const struct vc_job *j, uint32_t index, size_t n_tokens)
{
    struct bt_sampled list[256] = {0};
    struct bt_msg_output o = {
        .ticket = j->ticket, .index = index, .n_tokens = n_tokens, .tokens = list};
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_OUTPUTS, .outputs = {1, &o}};

    o.finish = index + n_tokens == j->max_tokens ? 2 : 0;
    bt_rt_on_message(vc.core, vc.now, n->session, &m);
    drain();
}

/* The prompt is computed, and the rest of the answer comes at once. */
static void answer(struct vc_node *p, uint32_t at)
{
    struct vc_job j = p->jobs[at];

    memmove(p->jobs + at, p->jobs + at + 1, (--p->n - at) * sizeof *p->jobs);
    output(p, &j, 0, 1);
    for (uint32_t i = 0; i < vc.n_nodes && j.two_legs; i++) {
        struct vc_node *d = &vc.nodes[i];

        for (uint32_t k = 0; d->role == BT_ROLE_DECODE && k < d->n; k++) {
            if (d->jobs[k].seq == j.seq && d->step_ms > 0) {
                d->jobs[k].landed = true;
                d->jobs[k].left = j.max_tokens - 1;
                return;
            }
            if (d->jobs[k].seq == j.seq) {
                d->jobs[k] = d->jobs[--d->n];
                output(d, &j, 1, j.max_tokens - 1);
                return;
            }
        }
    }
}

/* A step of a decode node: the oldest sequences get a token each. */
static void step(struct vc_node *d)
{
    for (uint32_t i = 0, n = 0; i < d->n && n < BATCH; i++) {
        if (!d->jobs[i].landed) {
            continue;
        }
        struct vc_job j = d->jobs[i];

        n++;
        if (--d->jobs[i].left == 0) {
            memmove(d->jobs + i, d->jobs + i + 1, (--d->n - i) * sizeof *d->jobs);
            i--;
        }
        output(d, &j, j.max_tokens - j.left, 1);
    }
}

static void step_all(void)
{
    for (uint32_t i = 0; i < vc.n_nodes; i++) {
        struct vc_node *d = &vc.nodes[i];

        if (d->role == BT_ROLE_DECODE && d->step_ms > 0 && vc.now / MS % d->step_ms == 0) {
            step(d);
        }
    }
}

/* The oldest of the prompts that are much shorter than the oldest one of all, as the nodes' scheduler has it; else
 * that one. */
static uint32_t shorter(const struct vc_node *p)
{
    uint32_t at = 0;
    unsigned best = bt_batch_rank(p->jobs[0].left);

    for (uint32_t k = 1; k < p->n; k++) {
        unsigned rank = bt_batch_rank(p->jobs[k].left);

        if (rank < best) {
            best = rank;
            at = k;
        }
    }
    return at;
}

/* One ms of every prefill node: half of its time for the oldest prompt, the rest for shorter ones. */
static void compute(void)
{
    for (uint32_t i = 0; i < vc.n_nodes; i++) {
        struct vc_node *p = &vc.nodes[i];

        if (p->role != BT_ROLE_PREFILL) {
            continue;
        }
        p->idle_busy += p->n == 0 && bt_rt_core_stats(vc.core)->waiting > 0;
        double budget = p->speed / 1000 + p->budget;

        while (p->n > 0 && budget >= 1) {
            uint32_t at = budget < p->speed / 2000 ? shorter(p) : 0, quantum = (uint32_t)budget;

            quantum = p->n > 1 && quantum > 1 ? (quantum + 1) / 2 : quantum;
            quantum = quantum < p->jobs[at].left ? quantum : p->jobs[at].left;
            p->jobs[at].left -= quantum;
            budget -= quantum;
            if (p->jobs[at].left == 0) {
                answer(p, at);
            }
        }
        p->budget = p->n > 0 ? budget : 0;
    }
}

void vc_run(uint32_t ms)
{
    for (uint32_t i = 0; i < ms; i++) {
        vc.now += MS;
        compute();
        step_all();
        if (vc.now / MS % 25 == 0) {
            bt_rt_on_tick(vc.core, vc.now);
            drain();
        }
        if (vc.now / MS % 250 == 0) {
            vc_report_all();
        }
    }
}
