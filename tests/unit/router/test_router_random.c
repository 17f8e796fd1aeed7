/* The router's core under random order: nodes answer, refuse, preempt, cut, die and come back, clients cancel, in any
 * order that a seed gives. Every sequence ends once, a finished one has exactly its tokens, and nothing stays counted
 * at any node. Argument: number of seeds. */

#include <stdlib.h>
#include "base/clock.h"
#include "base/mem.h"
#include "router/router_core_int.h"
#include "tests/check.h"

#define MS     BT_NS_PER_MS
#define SEQS   64
#define NODES  6
#define JOBS   256
#define TOKENS 40

struct job {
    bool used;
    struct bt_ticket ticket;
    uint32_t seq, index; /* next token to send */
    bool has_peer;
};

struct node {
    uint64_t session; /* 0: down */
    enum bt_role role;
    struct job jobs[JOBS];
};

struct seq {
    bool used, over, cancelled;
    uint64_t id;
    uint32_t n_prompt, max_tokens, n, stop_at;
    enum bt_rt_end_kind kind;
};

static struct bt_rt_core *core;
static uint64_t now, rng, instances;
static struct node nodes[NODES];
static struct seq seqs[SEQS];

static uint32_t roll(uint32_t n)
{
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (uint32_t)(rng >> 20) % n;
}

static uint64_t n_resent, n_accepted;

/* The one answer. */

static uint32_t token_of(uint32_t seq, uint32_t index)
{
    return seq * 1000 + index * 7 + 1;
}

static uint32_t finish_of(const struct seq *s, uint32_t index)
{
    return index == s->stop_at ? 1 : index + 1 == s->max_tokens ? 2 : 0;
}

static void on_submit(struct node *n, const struct bt_msg_submit *m)
{
    struct job *j = n->jobs;
    uint32_t id = (uint32_t)strtoul(m->request_id, NULL, 10),
             produced = (uint32_t)m->n_tokens - m->n_prompt;

    for (uint32_t i = 0; i < produced; i++) { /* forced tokens are the answer's own */
        CHECK_EQ(m->tokens[m->n_prompt + i], token_of(id, i));
    }
    CHECK(m->sampling.max_tokens > produced);
    /* A decode node also makes a last token, from what a prefill node has kept. */
    n_resent += m->has_replaces;
    CHECK(m->peer_instance != 0 || m->sampling.max_tokens - produced == 1);
    CHECK(!m->has_replaces || (n->role == BT_ROLE_PREFILL && m->peer_instance != 0));
    while (j->used) {
        j++;
    }
    *j = (struct job){true, m->ticket, id, produced, m->peer_instance != 0};
    j->index -= m->has_replaces && produced > 0 && roll(2) == 0; /* sent again, or computed anew */
}

static void drain(void)
{
    struct bt_rt_action a;

    while (bt_rt_core_next(core, &a)) {
        struct node *n = nodes;
        struct seq *s = a.user;

        while (n < nodes + NODES && (a.session == 0 || n->session != a.session)) {
            n++;
        }
        if (a.kind == BT_RT_SEND && a.send.kind == BT_FROM_ROUTER_SUBMIT && n < nodes + NODES) {
            on_submit(n, &a.send.submit);
        } else if (a.kind == BT_RT_SEND && a.send.kind == BT_FROM_ROUTER_CANCEL &&
                   n < nodes + NODES) {
            for (uint32_t i = 0; i < JOBS; i++) {
                if (n->jobs[i].used && bt_ticket_equal(&n->jobs[i].ticket, &a.send.cancel.ticket)) {
                    n->jobs[i].used = false;
                }
            }
        } else if (a.kind == BT_RT_CLOSE && n < nodes + NODES) {
            memset(n->jobs, 0, sizeof n->jobs);
            n->session = 0;
        } else if (a.kind == BT_RT_TOKENS) {
            CHECK(!s->over && a.tokens.index == s->n);
            for (size_t i = 0; i < a.tokens.n; i++) {
                CHECK_EQ(a.tokens.list[i].token, token_of((uint32_t)(s - seqs), s->n++));
            }
        } else if (a.kind == BT_RT_END) {
            CHECK(!s->over);
            s->over = true;
            s->kind = a.end.kind;
            if (a.end.kind == BT_RT_FINISHED) {
                CHECK(s->n > 0 && finish_of(s, s->n - 1) == a.end.finish);
            }
        }
    }
}

static void message(struct node *n, const struct bt_from_daemon *m)
{
    bt_rt_on_message(core, now, n->session, m);
    drain();
}

static void node_up(struct node *n)
{
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_HELLO,
                               .hello = {.version_min = 1,
                                         .version_max = 1,
                                         .role = n->role,
                                         .instance = ++instances,
                                         .name = "n",
                                         .numerics = "",
                                         .kv_layout = "",
                                         .model_name = "",
                                         .transfer_address = "",
                                         .backend = "",
                                         .page_tokens = 4,
                                         .n_pages = 60,
                                         .max_batch = 4,
                                         .max_tokens = 200,
                                         .context = 200}};

    n->session = bt_rt_on_session(core, now);
    message(n, &m);
}

static void node_down(struct node *n)
{
    uint64_t session = n->session;

    memset(n->jobs, 0, sizeof n->jobs);
    n->session = 0;
    bt_rt_on_session_lost(core, now, session, "gone");
    drain();
}

static struct job *any_job(struct node *n)
{
    uint32_t at = roll(JOBS);

    for (uint32_t i = 0; i < JOBS; i++) {
        struct job *j = &n->jobs[(at + i) % JOBS];

        if (j->used) {
            return j;
        }
    }
    return NULL;
}

static void answer(struct node *n, struct job *j)
{
    struct bt_sampled list[8] = {0};
    const struct seq *s = &seqs[j->seq];
    struct bt_msg_output o = {
        .ticket = j->ticket, .index = j->index, .tokens = list, .has_stats = true};
    uint32_t want = n->role == BT_ROLE_PREFILL ? 1 : 1 + roll(6);

    while (o.n_tokens < want && o.finish == 0) {
        list[o.n_tokens++].token = token_of(j->seq, j->index);
        o.finish = finish_of(s, j->index++);
    }
    if (o.finish != 0 || n->role == BT_ROLE_PREFILL) {
        j->used = false;
    }
    message(n, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_OUTPUTS, .outputs = {1, &o}});
}

static void give_up(struct node *n, struct job *j)
{
    static const enum bt_attempt_reason why[] = {BT_ATTEMPT_REFUSED, BT_ATTEMPT_RETRY,
                                                 BT_ATTEMPT_PREEMPTED, BT_ATTEMPT_DRAINING};
    struct bt_from_daemon m = {
        .kind = BT_FROM_DAEMON_ATTEMPT_END,
        .attempt_end = {j->ticket, why[roll(4)], "x", n->role == BT_ROLE_PREFILL && roll(2) == 0}};

    j->used = false;
    message(n, &m);
}

static void seq_start(void)
{
    struct seq *s = seqs;
    uint32_t prompt[20];
    char id[16];

    while (s < seqs + SEQS && s->used) {
        s++;
    }
    if (s == seqs + SEQS) {
        return;
    }
    for (uint32_t i = 0; i < 20; i++) {
        prompt[i] = i;
    }
    *s = (struct seq){.used = true, .n_prompt = 1 + roll(20), .max_tokens = 1 + roll(TOKENS)};
    s->stop_at = roll(3) == 0 ? roll(TOKENS) : UINT32_MAX;
    snprintf(id, sizeof id, "%u", (unsigned)(s - seqs));
    struct bt_sampling sampling = {
        .top_p = 1, .repetition_penalty = 1, .max_tokens = s->max_tokens};
    struct bt_rt_seq_start in = {.request_id = id,
                                 .tokens = prompt,
                                 .n_prompt = s->n_prompt,
                                 .sampling = &sampling,
                                 .priority = (int32_t)roll(3),
                                 .deadline = roll(10) == 0 ? now + roll(500) * MS : UINT64_MAX,
                                 .user = s};

    if (bt_rt_seq_start(core, now, &in, &s->id) == BT_OK) {
        n_accepted++;
    } else {
        s->used = false;
    }
    drain();
}

static void beat(void)
{
    now += roll(60) * MS;
    for (struct node *n = nodes; n < nodes + NODES; n++) {
        if (n->session != 0 && roll(8) != 0) {
            struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_LOAD, .load = {.running = roll(8)}};

            message(n, &m);
        }
    }
    bt_rt_on_tick(core, now);
    drain();
}

static void step(bool faults)
{
    struct node *n = &nodes[roll(NODES)];
    struct job *j = any_job(n);
    uint32_t what = roll(100);

    if (n->session == 0) {
        if (what < 30 || !faults) {
            node_up(n);
        }
    } else if (what < 60 && j != NULL) {
        answer(n, j);
    } else if (what < 66 && j != NULL && faults) {
        give_up(n, j);
    } else if (what < 68 && faults) {
        node_down(n);
    } else if (what < 70 && faults) {
        struct seq *s = &seqs[roll(SEQS)];

        if (s->used && !s->over) {
            s->over = s->cancelled = true;
            bt_rt_seq_cancel(core, now, s->id);
            drain();
        }
    } else if (what < 80 && faults) {
        seq_start();
    } else {
        beat();
    }
}

static uint32_t unsettled(void)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < SEQS; i++) {
        n += seqs[i].used && !seqs[i].over;
    }
    return n;
}

static void check_idle(void)
{
    CHECK_EQ(bt_rt_core_stats(core)->running, 0);
    CHECK_EQ(bt_rt_core_stats(core)->waiting, 0);
    CHECK_EQ(core->seqs.count, 0);
    CHECK_EQ(core->adm.n, 0);
    CHECK_EQ(core->adm.n_flows, 0);
    for (uint32_t i = 0; i < core->n_slots; i++) {
        CHECK_EQ(core->nodes[i].own_seqs, 0);
        CHECK_EQ(core->nodes[i].own_tokens, 0);
        CHECK_EQ(core->nodes[i].own_prompts, 0);
        CHECK_EQ(core->nodes[i].own_short, 0);
        CHECK_EQ(core->nodes[i].own_pages, 0);
    }
}

static void core_start(uint64_t seed)
{
    struct bt_rt_opts opts = {.instance = 1,
                              .name = "r",
                              .seed = {seed, 1},
                              .seqs_max = SEQS,
                              .queue_max = 32,
                              .nodes_max = NODES,
                              .attempts_max = 20,
                              .queue_ns = 30000 * MS,
                              .grace_ns = 2000 * MS,
                              .migrate_ns = 5000 * MS,
                              .lease_ns = 3000 * MS,
                              .heartbeat_ns = 250 * MS,
                              .backoff_ns = 5 * MS};

    rng = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    now = 1000 * MS;
    memset(nodes, 0, sizeof nodes);
    memset(seqs, 0, sizeof seqs);
    CHECK_EQ(bt_rt_core_create(&opts, &core), BT_OK);
    for (uint32_t i = 0; i < NODES; i++) {
        nodes[i].role = i % 2 != 0 ? BT_ROLE_DECODE : BT_ROLE_PREFILL;
    }
}

static uint32_t run(uint64_t seed)
{
    uint32_t finished = 0;

    core_start(seed);
    for (uint32_t i = 0; i < 1500; i++) {
        step(true);
    }
    for (uint32_t i = 0; i < 20000 && unsettled() > 0; i++) {
        step(false);
    }
    CHECK_EQ(unsettled(), 0);
    check_idle();
    for (uint32_t i = 0; i < SEQS; i++) {
        const struct seq *s = &seqs[i];

        if (s->used && !s->cancelled && s->kind == BT_RT_FINISHED) {
            finished++;
            CHECK_EQ(s->n, s->stop_at < s->max_tokens ? s->stop_at + 1 : s->max_tokens);
        }
    }
    bt_rt_core_destroy(core);
    return finished;
}

/* Heap calls of one of these, whatever it sets off. */
static uint64_t heap_calls_of(uint32_t what)
{
    struct node *n = &nodes[roll(NODES)];
    struct job *j = any_job(n);
    struct seq *s = &seqs[roll(SEQS)];
    uint64_t before = bt_test_heap_calls();

    if (what < 55 && j != NULL) {
        answer(n, j);
    } else if (what < 60 && j != NULL) {
        give_up(n, j);
    } else if (what < 62 && s->used && !s->over) {
        s->over = true;
        bt_rt_seq_cancel(core, now, s->id);
        drain();
    } else if (what < 70) {
        now += 5 * MS;
        bt_rt_on_tick(core, now);
        drain();
    } else {
        seq_start();
    }
    return bt_test_heap_calls() - before;
}

/* Once its lists have their working size, a request costs the core no heap call. */
static void test_heap(void)
{
    uint64_t calls = 0, first = n_accepted;

    core_start(1);
    for (uint32_t i = 0; i < NODES; i++) {
        node_up(&nodes[i]);
    }
    for (uint32_t i = 0; n_accepted - first < 6000 && i < 1000000; i++) {
        uint32_t what = roll(100);
        bool warm = n_accepted - first > 1000;

        if (what >= 95) {
            beat(); /* load reports bring memory of their own */
        } else {
            uint64_t n = heap_calls_of(what);

            calls += warm ? n : 0;
        }
        for (uint32_t k = 0; k < SEQS; k++) {
            seqs[k].used = seqs[k].used && !seqs[k].over;
        }
    }
    CHECK_EQ(n_accepted - first, 6000);
    CHECK_EQ(calls, 0);
    bt_rt_core_destroy(core);
}

int main(int argc, char **argv)
{
    uint64_t n_seeds = argc > 1 ? strtoul(argv[1], NULL, 10) : 60;
    uint32_t finished = 0;

    for (uint64_t seed = 1; seed <= n_seeds; seed++) {
        int before = bt_test_failures;

        finished += run(seed);
        if (bt_test_failures != before) {
            fprintf(stderr, "seed %llu fails\n", (unsigned long long)seed);
            break;
        }
    }
    test_heap();
    CHECK(finished > n_seeds * 20); /* most of them were not cancelled */
    CHECK(n_resent > n_seeds);
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
