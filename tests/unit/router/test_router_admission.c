/* Admission: the order of the waiting by priority, key and arrival, the spread of work over nodes, what is refused and
 * with which wait, and a cluster in virtual time under ten times the load that it can take. */

#include <stdlib.h>
#include "base/clock.h"
#include "base/mem.h"
#include "router/router_core_int.h"
#include "tests/check.h"

#define MS    BT_NS_PER_MS
#define NODES 32

/* ---- a cluster that computes nothing ---- */

struct job {
    struct bt_ticket ticket;
    uint32_t n_prompt, left, max_tokens;
    uint32_t seq; /* the request's number */
    bool two_legs;
};

struct node {
    uint64_t session;
    enum bt_role role;
    struct job jobs[4096];
    uint32_t n;
    double speed;       /* prefill: tokens a second */
    double budget;      /* of time, not used yet, in seconds */
    uint64_t idle_busy; /* ms without work while something waited in the router */
    uint64_t total;     /* tokens of all jobs it was ever sent */
};

static struct bt_rt_core *core;
static uint64_t now;
static struct node nodes[2 * NODES];
static uint32_t n_nodes;
static uint32_t order[8192], n_order; /* request numbers as prefill nodes get them */
static uint32_t where[8192];          /* the prefill node of each */
static uint64_t t_first[8192], t_end[8192];
static struct bt_rt_end last_end;
static uint32_t n_finished, n_failed;
static double skew; /* see take_skew(): the most */

static struct node *node_of(uint64_t session)
{
    for (uint32_t i = 0; i < n_nodes; i++) {
        if (nodes[i].session == session) {
            return &nodes[i];
        }
    }
    abort();
}

/* Predicted seconds of work at a prefill node that just got more, beyond those of the one with the least. */
static void take_skew(const struct node *n)
{
    double s = 0, least = 1e9;

    for (uint32_t i = 0; i < n_nodes && nodes[i].role == BT_ROLE_PREFILL; i++) {
        const struct rt_node *p = &core->nodes[i];
        double x = (double)(p->own_tokens + p->other_tokens - p->done_tokens) / nodes[i].speed;

        least = x < least ? x : least;
        s = &nodes[i] == n ? x : s;
    }
    skew = s - least > skew ? s - least : skew;
}

static void take(const struct bt_rt_action *a)
{
    if (a->kind == BT_RT_SEND && a->send.kind == BT_FROM_ROUTER_SUBMIT) {
        const struct bt_msg_submit *m = &a->send.submit;
        struct node *n = node_of(a->session);
        uint32_t id = (uint32_t)strtoul(m->request_id, NULL, 10);

        CHECK(n->n < 4096);
        n->jobs[n->n++] = (struct job){
            m->ticket, m->n_prompt, m->n_prompt, m->sampling.max_tokens, id, m->peer_instance != 0};
        n->total += m->n_tokens;
        if (n->role == BT_ROLE_PREFILL) {
            order[n_order++] = id;
            where[id] = (uint32_t)(n - nodes);
            take_skew(n);
        }
    } else if (a->kind == BT_RT_TOKENS && t_first[(uintptr_t)a->user] == 0) {
        t_first[(uintptr_t)a->user] = now;
    } else if (a->kind == BT_RT_END) {
        t_end[(uintptr_t)a->user] = now;
        last_end = a->end;
        n_finished += a->end.kind == BT_RT_FINISHED;
        n_failed += a->end.kind != BT_RT_FINISHED;
    }
}

static void drain(void)
{
    struct bt_rt_action a;

    while (bt_rt_core_next(core, &a)) {
        take(&a);
    }
}

static void join(enum bt_role role, double speed, uint32_t pages)
{
    struct node *n = &nodes[n_nodes];
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_HELLO,
                               .hello = {.version_min = 1,
                                         .version_max = 1,
                                         .role = role,
                                         .instance = 100 + n_nodes,
                                         .name = "",
                                         .fingerprint = 7,
                                         .numerics = "f32",
                                         .kv_layout = "L",
                                         .model_name = "m",
                                         .transfer_address = "a",
                                         .backend = "cpu",
                                         .page_tokens = 16,
                                         .n_pages = pages,
                                         .max_batch = 64,
                                         .chunk_tokens = 512,
                                         .max_tokens = 65536,
                                         .context = 65536}};

    *n = (struct node){.session = bt_rt_on_session(core, now), .role = role, .speed = speed};
    n_nodes++;
    bt_rt_on_message(core, now, n->session, &m);
    drain();
}

static void report(struct node *n)
{
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_LOAD};

    for (uint32_t i = 0; i < n->n; i++) {
        m.load.waiting_tokens += n->role == BT_ROLE_PREFILL ? n->jobs[i].left : 0;
    }
    m.load.waiting = n->n;
    m.load.prefill_tokens_per_s = n->role == BT_ROLE_PREFILL ? n->speed : 0;
    bt_rt_on_message(core, now, n->session, &m);
    drain();
}

static void report_all(void)
{
    for (uint32_t i = 0; i < n_nodes; i++) {
        report(&nodes[i]);
    }
}

static void begin(uint32_t n_prefill, uint32_t n_decode, uint32_t queue_max, uint64_t max_ttft_ms,
                  uint32_t pages)
{
    struct bt_rt_opts opts = {.instance = 9,
                              .name = "r",
                              .seed = {1, 2},
                              .seqs_max = 8192,
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

    now = 1000 * MS;
    n_nodes = n_order = n_finished = n_failed = 0;
    memset(t_first, 0, sizeof t_first);
    memset(t_end, 0, sizeof t_end);
    CHECK_EQ(bt_rt_core_create(&opts, &core), BT_OK);
    for (uint32_t i = 0; i < n_prefill; i++) {
        join(BT_ROLE_PREFILL, 10000, 100000);
    }
    for (uint32_t i = 0; i < n_decode; i++) {
        join(BT_ROLE_DECODE, 0, pages);
    }
    report_all();
}

static void end(void)
{
    bt_rt_core_destroy(core);
    core = NULL;
    CHECK_EQ(bt_test_live_bytes(), 0);
}

static enum bt_status ask(uint32_t id, uint32_t key, int32_t priority, uint32_t n_prompt,
                          uint32_t max_tokens)
{
    static uint32_t prompt[65536];
    struct bt_sampling sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = max_tokens};
    char name[16];
    uint64_t seq;

    snprintf(name, sizeof name, "%u", id);
    enum bt_status st = bt_rt_seq_start(core, now,
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

static void output(struct node *n, const struct job *j, uint32_t index, size_t n_tokens)
{
    struct bt_sampled list[256] = {0};
    struct bt_msg_output o = {
        .ticket = j->ticket, .index = index, .n_tokens = n_tokens, .tokens = list};
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_OUTPUTS, .outputs = {1, &o}};

    o.finish = index + n_tokens == j->max_tokens ? 2 : 0;
    bt_rt_on_message(core, now, n->session, &m);
    drain();
}

/* The prompt is computed, and the rest of the answer comes at once. */
static void answer(struct node *p, uint32_t at)
{
    struct job j = p->jobs[at];

    memmove(p->jobs + at, p->jobs + at + 1, (--p->n - at) * sizeof *p->jobs);
    output(p, &j, 0, 1);
    for (uint32_t i = 0; i < n_nodes && j.two_legs; i++) {
        struct node *d = &nodes[i];

        for (uint32_t k = 0; d->role == BT_ROLE_DECODE && k < d->n; k++) {
            if (d->jobs[k].seq == j.seq) {
                d->jobs[k] = d->jobs[--d->n];
                output(d, &j, 1, j.max_tokens - 1);
                return;
            }
        }
    }
}

/* One ms of every prefill node: half of its time for the oldest prompt, the rest for the shortest. */
static void compute(void)
{
    for (uint32_t i = 0; i < n_nodes; i++) {
        struct node *p = &nodes[i];

        if (p->role != BT_ROLE_PREFILL) {
            continue;
        }
        p->idle_busy += p->n == 0 && bt_rt_core_stats(core)->waiting > 0;
        double budget = p->speed / 1000 + p->budget;

        while (p->n > 0 && budget >= 1) {
            uint32_t at = 0, quantum = (uint32_t)budget;

            for (uint32_t k = 1; k < p->n && budget < p->speed / 2000; k++) {
                at = p->jobs[k].left < p->jobs[at].left ? k : at;
            }
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

static void run(uint32_t ms)
{
    for (uint32_t i = 0; i < ms; i++) {
        now += MS;
        compute();
        if (now / MS % 25 == 0) {
            bt_rt_on_tick(core, now);
            drain();
        }
        if (now / MS % 250 == 0) {
            report_all();
        }
    }
}

/* ---- order ---- */

/* Fills the only prefill node, so that what follows waits. */
static void fill(uint32_t id)
{
    for (uint32_t i = 0; i < 2; i++) {
        CHECK_EQ(ask(id + i, 0, 0, 20000, 1), BT_OK);
    }
    CHECK_EQ(n_order, 2);
    for (uint32_t i = 2; bt_rt_core_stats(core)->waiting == 0; i++) {
        CHECK_EQ(ask(id + i, 0, 9, 500, 1), BT_OK);
    }
    n_order = 0;
}

static void test_order(void)
{
    begin(1, 1, 1024, 0, 10000);
    fill(1000);
    for (uint32_t i = 0; i < 30; i++) {
        CHECK_EQ(ask(i, 0, i % 3 == 2 ? 5 : i % 3 == 1 ? -5 : 0, 600, 1), BT_OK);
    }
    CHECK_EQ(bt_rt_core_stats(core)->waiting, 31);
    run(20000);
    CHECK_EQ(bt_rt_core_stats(core)->waiting, 0);
    CHECK_EQ(n_order, 31);
    for (uint32_t i = 0; i < 10; i++) {
        CHECK_EQ(order[1 + i], 3 * i + 2);
        CHECK_EQ(order[11 + i], 3 * i);
        CHECK_EQ(order[21 + i], 3 * i + 1);
    }
    CHECK_EQ(n_failed, 0);
    end();
}

/* One key with 1,000 requests does not starve another with one, nor one with a few long prompts. */
static void test_keys(void)
{
    begin(1, 1, 2000, 0, 10000);
    fill(5000);
    for (uint32_t i = 0; i < 1000; i++) {
        CHECK_EQ(ask(i, 1, 0, 600, 1), BT_OK);
    }
    CHECK_EQ(ask(2000, 2, 0, 600, 1), BT_OK);
    run(6000);
    uint32_t at = 0;

    while (at < n_order && order[at] != 2000) {
        at++;
    }
    CHECK(at <= 3);
    /* By work, not by number: eight times as long is an eighth as often. */
    uint32_t from = n_order;

    for (uint32_t i = 0; i < 20; i++) {
        CHECK_EQ(ask(3000 + i, 2, 0, 4800, 1), BT_OK);
    }
    run(8000);
    uint32_t n[2] = {0};

    for (uint32_t i = from; i < n_order; i++) {
        n[order[i] >= 3000]++;
    }
    CHECK(n[1] >= 3 && n[0] >= 7 * n[1] && n[0] <= 9 * n[1] + 9);
    end();
}

/* ---- spread ---- */

static void test_ties(void)
{
    uint32_t used[2 * NODES] = {0};

    begin(NODES, NODES, 1024, 0, 10000);
    for (uint32_t i = 0; i < n_nodes; i++) {
        nodes[i].speed *= 1 + 0.01 * (i % 7); /* noise */
    }
    report_all();
    /* At once, and one after the other. */
    for (uint32_t i = 0; i < NODES; i++) {
        CHECK_EQ(ask(i, 0, 0, 100, 5), BT_OK);
        used[where[i]]++;
    }
    run(1000);
    for (uint32_t i = 0; i < NODES; i++) {
        CHECK_EQ(used[i], 1);
        CHECK_EQ(ask(100 + i, 0, 0, 100, 5), BT_OK);
        used[where[100 + i]]++;
        run(50);
    }
    for (uint32_t i = 0; i < NODES; i++) {
        CHECK_EQ(used[i], 2);
        CHECK_EQ(nodes[NODES + i].total, 200);
    }
    end();
}

/* Prompts of 32k tokens with one token to answer among short ones: the nodes' seconds of work differ by no more than
 * the longest takes, also when one is four times as fast. */
static void test_skew(void)
{
    const double longest = 32768;

    for (uint32_t round = 0; round < 2; round++) {
        uint32_t rng = 12345;

        begin(4, 2, 4096, 0, 100000);
        skew = 0;
        nodes[0].speed = round == 0 ? 10000 : 40000;
        report_all();
        for (uint32_t i = 0; i < 3000; i++) {
            rng = rng * 1664525 + 1013904223;
            CHECK_EQ(ask(i, 0, 0, (rng >> 8) % 16 == 0 ? 32768 : 20 + (rng >> 8) % 200,
                         (rng >> 8) % 16 == 0 ? 1 : 8),
                     BT_OK);
            run(rng >> 25);
        }
        CHECK(skew <= longest / 10000 + 0.001);
        /* Nobody idles while something waits, but for the way to it. */
        for (uint32_t k = 0; k < 4; k++) {
            CHECK(nodes[k].idle_busy <= 10);
        }
        run(900000);
        CHECK_EQ(n_failed, 0);
        CHECK_EQ(bt_rt_core_stats(core)->running, 0);
        end();
    }
}

/* A short prompt is not held back by the long ones that wait. */
static void test_short_beside_long(void)
{
    begin(1, 1, 1024, 0, 10000);
    for (uint32_t i = 0; i < 6; i++) {
        CHECK_EQ(ask(i, 0, 0, 32768, 1), BT_OK);
    }
    CHECK_EQ(bt_rt_core_stats(core)->waiting, 4);
    CHECK_EQ(ask(10, 0, 0, 100, 1), BT_OK);
    CHECK_EQ(bt_rt_core_stats(core)->waiting, 4);
    run(200);
    CHECK(t_end[10] != 0);
    end();
}

/* ---- memory of decode nodes ---- */

static void test_pages(void)
{
    begin(1, 2, 1024, 0, 100); /* 1600 tokens each */
    for (uint32_t i = 0; i < 40; i++) {
        CHECK_EQ(ask(i, 0, 0, 16, 64), BT_OK); /* five pages at their end */
    }
    CHECK_EQ(nodes[1].n, 20);
    CHECK_EQ(nodes[2].n, 20);
    CHECK_EQ(ask(50, 0, 0, 16, 64), BT_OK);
    CHECK_EQ(bt_rt_core_stats(core)->waiting, 1);
    CHECK_EQ(ask(51, 0, 0, 60000, 10000), BT_OK); /* no node takes that ever */
    CHECK(n_failed == 1 && last_end.kind == BT_RT_INVALID);
    run(1000);
    CHECK_EQ(n_finished, 41);
    CHECK_EQ(core->nodes[1].own_pages + core->nodes[2].own_pages, 0);
    end();
}

/* ---- refusals ---- */

static void test_refusal(void)
{
    begin(1, 1, 8, 3000, 10000);
    CHECK_EQ(ask(0, 0, 0, 20000, 1), BT_OK); /* two seconds */
    CHECK_EQ(ask(1, 0, 0, 20000, 1), BT_ERR_TIMEOUT);
    struct bt_rt_forecast f = bt_rt_forecast(core, now, 0, 0, 20000);

    CHECK(f.wait_ns / MS >= 1900 && f.wait_ns / MS <= 2100 && f.prefill_ns / MS == 2000);
    /* A short one would be computed beside it. */
    CHECK_EQ(ask(2, 0, 0, 100, 1), BT_OK);
    /* What can never run is told so, not sent away for later. */
    CHECK_EQ(ask(3, 0, 0, 40000, 40000), BT_OK);
    CHECK(n_failed == 1 && last_end.kind == BT_RT_INVALID);
    run(1500);
    f = bt_rt_forecast(core, now, 0, 0, 20000); /* reports tell how far it is */
    CHECK(f.wait_ns / MS < 1000);
    CHECK_EQ(ask(4, 0, 0, 20000, 1), BT_OK);
    run(5000);
    CHECK_EQ(n_finished, 3);
    CHECK_EQ(ask(5, 0, 0, 39000, 1), BT_ERR_TIMEOUT);
    /* A speed that nobody has measured for long refuses nobody, or it would never be measured again. */
    run(20000);
    CHECK_EQ(ask(6, 0, 0, 39000, 1), BT_OK);
    CHECK_EQ(ask(7, 0, 0, 39000, 1), BT_ERR_TIMEOUT);
    end();
}

/* Ten times what the cluster can take: the queue stays bounded, who is admitted is served in time, who is refused is
 * told a wait after which he would be served, and seconds later all is as before. */
static void test_overload(void)
{
    uint32_t refused = 0, admitted = 0, asked = 0;
    uint64_t waits = 0, late = 0;

    begin(2, 2, 64, 2000, 100000); /* 20,000 tokens a second: 20 requests of 1,000 */
    for (uint32_t i = 0; i < 20000; i++) {
        if (i % 5 == 0) {
            enum bt_status st = ask(asked, asked % 3, 0, 1000, 8);

            CHECK(st == BT_OK || st == BT_ERR_TIMEOUT || st == BT_ERR_BUSY);
            if (st == BT_OK) {
                admitted++;
            } else {
                refused++;
                waits += bt_rt_forecast(core, now, asked % 3, 0, 1000).wait_ns;
            }
            asked++;
        }
        run(1);
        CHECK(bt_rt_core_stats(core)->waiting <= 64);
    }
    CHECK_EQ(asked, 4000);
    CHECK(admitted >= 360 && admitted <= 460); /* 400 can be served, and some wait at the end */
    CHECK_EQ(n_failed, 0);
    /* A wait of about two seconds less one prompt is what stands before each. */
    CHECK(waits / refused / MS > 1000 && waits / refused / MS < 2500);
    uint64_t over = now;

    run(3000);
    CHECK_EQ(n_finished, admitted);
    CHECK_EQ(bt_rt_core_stats(core)->waiting, 0);
    CHECK_EQ(bt_rt_core_stats(core)->running, 0);
    for (uint32_t i = 0; i < asked; i++) {
        late += t_end[i] > over + 2500 * MS;
    }
    CHECK_EQ(late, 0);
    CHECK_EQ(ask(5000, 0, 0, 1000, 8), BT_OK);
    CHECK_EQ(bt_rt_forecast(core, now, 0, 0, 10).wait_ns / MS / 200, 0);
    run(200);
    CHECK(t_end[5000] != 0);
    /* Nobody idled meanwhile. */
    CHECK(nodes[0].idle_busy + nodes[1].idle_busy <= 20);
    end();
}

int main(void)
{
    test_order();
    test_keys();
    test_ties();
    test_skew();
    test_short_beside_long();
    test_pages();
    test_refusal();
    test_overload();
    return bt_test_done();
}
