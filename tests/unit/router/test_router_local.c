/* The router's core with local prefill: which prompts a decode node gets alone, what it counts, and what follows when
 * such an attempt fails. */

#include <string.h>
#include "base/mem.h"
#include "tests/unit/router/core_fixture.h"

static struct bt_rt_core *core;
static uint64_t now;
static struct {
    uint64_t session;
    struct bt_ticket ticket;
    uint32_t n_tokens;
    uint64_t peer;
    enum bt_role leg;
    bool prompt_logprobs;
    struct bt_gate_token token;
} submits[256];
static struct bt_msg_peer peer_told; /* the last of the last list */
static size_t n_peers_told;          /* how many it had */
static size_t n_submits, n_cancels, n_ends, n_tokens, n_plp;
static struct bt_rt_end last_end;
static char end_text[256];
static bool ready;

static void drain(void)
{
    struct bt_rt_action a;

    while (bt_rt_core_next(core, &a)) {
        if (a.kind == BT_RT_SEND && a.send.kind == BT_FROM_ROUTER_SUBMIT) {
            const struct bt_msg_submit *m = &a.send.submit;

            submits[n_submits].session = a.session;
            submits[n_submits].ticket = m->ticket;
            submits[n_submits].n_tokens = (uint32_t)m->n_tokens;
            submits[n_submits].peer = m->peer_instance;
            submits[n_submits].leg = m->leg;
            submits[n_submits].token = m->peer_gate_token;
            submits[n_submits++].prompt_logprobs = m->prompt_logprobs;
        } else if (a.kind == BT_RT_SEND && a.send.kind == BT_FROM_ROUTER_CANCEL) {
            n_cancels++;
        } else if (a.kind == BT_RT_SEND && a.send.kind == BT_FROM_ROUTER_PEERS) {
            n_peers_told = a.send.peers.n;
            peer_told = n_peers_told > 0 ? a.send.peers.peers[n_peers_told - 1] : peer_told;
        } else if (a.kind == BT_RT_TOKENS) {
            n_tokens += a.tokens.n;
        } else if (a.kind == BT_RT_PROMPT_LOGPROBS) {
            n_plp += a.prompt_logprobs.n;
        } else if (a.kind == BT_RT_END) {
            n_ends++;
            last_end = a.end;
            snprintf(end_text, sizeof end_text, "%s", a.end.text != NULL ? a.end.text : "");
        } else if (a.kind == BT_RT_READY) {
            ready = a.ready;
        }
    }
}

static void begin(enum bt_rt_local local, uint32_t local_tokens)
{
    struct bt_rt_opts opts = fixture_opts();

    opts.queue_max = 32;
    opts.lease_ns = 30000 * MS;
    opts.local_prefill = local;
    opts.local_tokens = local_tokens;
    now = 100000 * MS;
    n_submits = n_cancels = n_ends = n_tokens = n_plp = 0;
    ready = false;
    CHECK_EQ(bt_rt_core_create(&opts, &core), BT_OK);
}

static void end(void)
{
    bt_rt_core_destroy(core);
    CHECK_EQ(bt_test_live_bytes(), 0);
}

static uint64_t join_with(enum bt_role role, uint64_t instance, uint32_t version, uint8_t token)
{
    struct bt_msg_hello h = fixture_hello(role, instance, role == BT_ROLE_PREFILL ? "p" : "d");

    h.version_max = version;
    h.max_tokens = h.context = 4096;
    h.chunk_tokens = 512;
    h.gate_token.b[3] = token;
    uint64_t session = fixture_join(core, now, &h);

    drain();
    return session;
}

static uint64_t join(enum bt_role role, uint64_t instance, uint32_t version)
{
    return join_with(role, instance, version, 0);
}

/* A node's report: prompt tokens a second, ms of a decode step, sequences in its batch. */
static void load(uint64_t session, double speed, double step, uint32_t running, uint64_t waiting)
{
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_LOAD,
                               .load = {.prefill_tokens_per_s = speed,
                                        .decode_step_ms = step,
                                        .running = running,
                                        .waiting_tokens = waiting,
                                        .pages_free = 1000}};

    bt_rt_on_message(core, now, session, &m);
    drain();
}

static uint64_t ask(uint32_t n_prompt, uint32_t max_tokens, bool echo)
{
    static const uint32_t prompt[4000] = {11, 12, 13};
    uint64_t seq = fixture_ask(core, now, prompt, n_prompt, max_tokens, echo, BT_OK);

    drain();
    return seq;
}

static void output(size_t submit, uint32_t index, uint32_t n, uint32_t finish)
{
    struct bt_sampled list[8] = {0};
    struct bt_msg_output o = {.ticket = submits[submit].ticket,
                              .index = index,
                              .n_tokens = n,
                              .tokens = list,
                              .finish = finish,
                              .has_stats = true,
                              .stats = {.queue_ns = 5, .prefill_ns = 7, .prefill_tokens = 30}};
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_OUTPUTS, .outputs = {1, &o}};

    bt_rt_on_message(core, now, submits[submit].session, &m);
    drain();
}

static uint64_t tokens_at(uint64_t instance)
{
    struct bt_rt_node_info info;

    for (uint32_t pos = 0; bt_rt_core_node(core, &pos, &info);) {
        if (info.instance == instance) {
            return info.own_tokens;
        }
    }
    return UINT64_MAX;
}

static void test_tokens(void)
{
    begin(BT_RT_LOCAL_TOKENS, 30);
    (void)join(BT_ROLE_PREFILL, 1, 2);
    uint64_t d = join(BT_ROLE_DECODE, 2, 2);
    uint64_t seq = ask(30, 3, false);

    CHECK_EQ(n_submits, 1);
    CHECK(submits[0].session == d && submits[0].peer == 0 && submits[0].n_tokens == 30);
    CHECK_EQ(tokens_at(2), 60); /* to compute, and to hold */
    CHECK_EQ(tokens_at(1), 0);
    output(0, 0, 1, 0);
    CHECK_EQ(tokens_at(2), 31);
    output(0, 1, 1, 0);
    const struct bt_rt_seq_info *i = bt_rt_seq_info(core, seq);

    CHECK(i->attempt.local && i->has_prefill && i->has_decode);
    CHECK_EQ(i->prefill.prefill_ns, 7);
    CHECK_EQ(i->prefill.prefill_tokens, 30);
    CHECK_STR(i->prefill_name, "d");
    CHECK_STR(i->decode_name, "d");
    output(0, 2, 1, 2);
    CHECK(n_ends == 1 && last_end.kind == BT_RT_FINISHED && last_end.finish == 2 && n_tokens == 3);
    CHECK_EQ(tokens_at(2), 0);
    CHECK_EQ(n_cancels, 0);
    CHECK_EQ(bt_rt_core_stats(core)->local, 1);
    (void)ask(31, 3, false); /* one too many: a pair */
    CHECK_EQ(n_submits, 3);
    CHECK(submits[1].peer == 2 && submits[2].peer == 1);
    (void)ask(20, 1, false); /* one token: the prefill node alone, as ever */
    CHECK(n_submits == 4 && submits[3].session != d);
    CHECK_EQ(bt_rt_core_stats(core)->local, 1);
    end();
}

/* A node of an older version would wait for a prefill node. */
static void test_version(void)
{
    begin(BT_RT_LOCAL_TOKENS, 100);
    (void)join(BT_ROLE_PREFILL, 1, 1);
    (void)join(BT_ROLE_DECODE, 2, 1);
    (void)ask(30, 3, false);
    CHECK_EQ(n_submits, 2);
    (void)join(BT_ROLE_DECODE, 3, 2);
    (void)ask(30, 3, false);
    CHECK_EQ(n_submits, 3);
    CHECK_EQ(submits[2].peer, 0);
    end();
}

/* Pages pass only between nodes that expect the same at the transfer port: nothing, an instance, a token. */
static void test_gate(void)
{
    static const struct {
        uint32_t version;
        uint8_t token;
    } gates[] = {{1, 0}, {2, 0}, {2, 7}};
    struct bt_rt_node_info info;

    for (unsigned i = 0; i < 9; i++) {
        uint32_t pos = 0;

        begin(BT_RT_LOCAL_NEVER, 0);
        (void)join_with(BT_ROLE_PREFILL, 1, gates[i / 3].version, gates[i / 3].token);
        (void)join_with(BT_ROLE_DECODE, 2, gates[i % 3].version,
                        (uint8_t)(2 * gates[i % 3].token)); /* each has its own */
        CHECK_EQ(ready, i / 3 == i % 3);
        while (!ready && bt_rt_core_node(core, &pos, &info)) {
            CHECK(strstr(info.state, "mismatch: the gate at the transfer port") != NULL);
        }
        end();
    }
}

/* A decode node's token goes to prefill nodes that may use it, with lists and with prompts, and to nobody else. */
static void test_gate_token(void)
{
    begin(BT_RT_LOCAL_NEVER, 0);
    uint64_t p = join_with(BT_ROLE_PREFILL, 1, 2, 5);

    n_peers_told = 0;
    (void)join(BT_ROLE_DECODE, 2, 2); /* from before it */
    CHECK_EQ(n_peers_told, 0);
    uint64_t d = join_with(BT_ROLE_DECODE, 3, 2, 6);

    CHECK_EQ(n_peers_told, 1);
    CHECK(peer_told.instance == 3 && peer_told.gate_token.b[3] == 6);
    (void)ask(30, 3, false);
    CHECK_EQ(n_submits, 2);
    for (size_t i = 0; i < 2; i++) {
        CHECK(submits[i].session == p || submits[i].session == d);
        CHECK_EQ(submits[i].token.b[3], submits[i].session == p ? 6 : 0);
    }
    end();
}

/* Without a prefill node only "always" serves. */
static void test_without_prefill_node(void)
{
    static const enum bt_rt_local modes[] = {BT_RT_LOCAL_NEVER, BT_RT_LOCAL_AUTO,
                                             BT_RT_LOCAL_TOKENS};

    for (unsigned i = 0; i < 3; i++) {
        begin(modes[i], 100);
        uint64_t d = join(BT_ROLE_DECODE, 2, 2);

        load(d, 1000, 1, 0, 0);
        (void)ask(3, 3, false);
        CHECK(!ready && n_submits == 0);
        now += 1100 * MS;
        bt_rt_on_tick(core, now);
        drain();
        CHECK(n_ends == 1 && last_end.kind == BT_RT_UNAVAILABLE);
        CHECK(strstr(end_text, "no prefill node") != NULL);
        end();
    }
    begin(BT_RT_LOCAL_ALWAYS, 0);
    uint64_t d = join(BT_ROLE_DECODE, 2, 2);

    CHECK(ready);
    CHECK_EQ(bt_rt_core_context(core), 4096);
    (void)ask(300, 3, false);
    (void)ask(5, 1, false);
    CHECK(n_submits == 2 && submits[0].session == d && submits[1].session == d);
    (void)join(BT_ROLE_PREFILL, 1, 2);
    (void)ask(3, 3, false);
    CHECK(n_submits == 3 && submits[2].session == d);
    end();
}

/* Prompt log-probabilities come from the node that computes. */
static void test_echo(void)
{
    begin(BT_RT_LOCAL_ALWAYS, 0);
    (void)join(BT_ROLE_DECODE, 2, 2);
    (void)ask(3, 2, true);
    CHECK(n_submits == 1 && submits[0].prompt_logprobs);
    struct bt_sampled list[2] = {{.token = 1}, {.token = 2}};
    struct bt_msg_output o = {.ticket = submits[0].ticket,
                              .has_logprobs = true,
                              .prompt_first = 1,
                              .n_prompt_logprobs = 2,
                              .prompt_logprobs = list};
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_OUTPUTS, .outputs = {1, &o}};

    bt_rt_on_message(core, now, submits[0].session, &m);
    drain();
    CHECK_EQ(n_plp, 2);
    output(0, 0, 1, 0);
    output(0, 1, 1, 2);
    CHECK(n_ends == 1 && last_end.kind == BT_RT_FINISHED && n_tokens == 2);
    end();
}

/* Whether one of 64 tokens goes to the decode node alone. p_wait: tokens that wait at P. */
static bool decides(double p_speed, uint64_t p_wait, double d_speed, uint32_t d_running)
{
    begin(BT_RT_LOCAL_AUTO, 0);
    uint64_t p = join(BT_ROLE_PREFILL, 1, 2), d = join(BT_ROLE_DECODE, 2, 2);

    load(p, p_speed, 0, 0, p_wait);
    load(d, d_speed, 2, d_running, 0);
    (void)ask(64, 3, false);
    bool local = n_submits == 1 && submits[0].session == d;

    CHECK(local || n_submits == 2);
    end();
    return local;
}

static void test_auto(void)
{
    CHECK(!decides(2000, 0, 1900, 0));    /* as quick, but no quicker */
    CHECK(decides(2000, 0, 2200, 0));     /* quicker */
    CHECK(!decides(2000, 0, 2200, 4));    /* four others would be held up */
    CHECK(decides(2000, 900, 1900, 4));   /* the prefill node has nearly half a second to do */
    CHECK(!decides(2000, 900, 1900, 30)); /* thirty others */
    CHECK(!decides(2000, 0, 100, 0));     /* made for decoding */
    CHECK(!decides(2000, 900, 0, 1));     /* unknown, and busy: not tried */
}

/* A speed that nobody has measured, or long ago, is measured on an idle node. */
static void test_auto_learns(void)
{
    begin(BT_RT_LOCAL_AUTO, 0);
    uint64_t p = join(BT_ROLE_PREFILL, 1, 2), d = join(BT_ROLE_DECODE, 2, 2);

    load(p, 2000, 0, 0, 100);
    load(d, 0, 0, 0, 0);
    (void)ask(600, 2, false); /* too long to try with */
    CHECK_EQ(n_submits, 2);
    output(0, 0, 1, 0);
    output(1, 0, 1, 0);
    output(1, 1, 1, 2);
    CHECK_EQ(n_ends, 1);
    load(p, 2000, 0, 0, 100);
    load(d, 0, 0, 0, 0);
    (void)ask(64, 2, false);
    CHECK_EQ(n_submits, 3);
    CHECK_EQ(submits[2].session, d);
    output(2, 0, 1, 0);
    output(2, 1, 1, 2);
    load(d, 300, 1, 0, 0); /* slow */
    (void)ask(64, 2, false);
    CHECK_EQ(n_submits, 5);
    end();
}

/* Refused there: another pair, and the node is avoided for that sequence. Lost: begun again with what was delivered. */
static void test_failures(void)
{
    begin(BT_RT_LOCAL_TOKENS, 100);
    (void)join(BT_ROLE_PREFILL, 1, 2);
    uint64_t d = join(BT_ROLE_DECODE, 2, 2);

    (void)ask(30, 3, false);
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_ATTEMPT_END,
                               .attempt_end = {submits[0].ticket, BT_ATTEMPT_REFUSED, "full"}};

    bt_rt_on_message(core, now, d, &m);
    drain();
    CHECK_EQ(tokens_at(2), 0);
    (void)join(BT_ROLE_DECODE, 3, 2);
    now += 100 * MS;
    bt_rt_on_tick(core, now);
    drain();
    CHECK_EQ(n_submits, 2);
    CHECK(submits[1].peer == 0 && submits[1].session != d);
    output(1, 0, 2, 0);
    bt_rt_on_session_lost(core, now, submits[1].session, "gone");
    drain();
    now += 100 * MS;
    bt_rt_on_tick(core, now);
    drain();
    /* what is left has failed there once: a pair with the same node is no better, so alone again */
    CHECK(n_submits >= 3 && submits[2].n_tokens == 32);
    CHECK_EQ(n_ends, 0);
    end();
}

/* A node that never answers is given up. */
static void test_progress(void)
{
    begin(BT_RT_LOCAL_ALWAYS, 0);
    uint64_t d = join(BT_ROLE_DECODE, 2, 2);

    (void)ask(64, 3, false);
    for (unsigned i = 0; i < 62; i++) {
        now += 1000 * MS;
        load(d, 2000, 1, 0, 0);
        bt_rt_on_tick(core, now);
        drain();
    }
    CHECK_EQ(n_cancels, 1);
    CHECK_EQ(n_submits, 2);
    end();
}

/* A node that does both is a cluster; with others it is either leg, and never both legs of one attempt. */
static void test_both(void)
{
    begin(BT_RT_LOCAL_NEVER, 0);
    uint64_t b = join(BT_ROLE_BOTH, 1, 2);

    CHECK(ready);
    (void)ask(64, 3, false);
    CHECK(n_submits == 1 && submits[0].session == b && submits[0].peer == 0);
    CHECK_EQ(submits[0].leg, BT_ROLE_DECODE);
    output(0, 0, 1, 0);
    output(0, 1, 2, 2);
    CHECK(n_ends == 1 && n_tokens == 3);
    (void)ask(64, 1, false);
    CHECK(n_submits == 2 && submits[1].leg == BT_ROLE_PREFILL);
    output(1, 0, 1, 2);
    CHECK_EQ(n_ends, 2);
    CHECK_EQ(tokens_at(1), 0);
    uint64_t d = join(BT_ROLE_DECODE, 2, 2);

    for (unsigned i = 0; i < 8; i++) {
        (void)ask(64, 3, false);
    }
    unsigned pairs = 0, alone = 0;

    for (size_t i = 2; i < n_submits; i++) {
        CHECK(submits[i].session == b || (submits[i].session == d && submits[i].peer == 1));
        CHECK_EQ(submits[i].leg, submits[i].peer == 2 ? BT_ROLE_PREFILL : BT_ROLE_DECODE);
        pairs += submits[i].peer == 2;
        alone += submits[i].peer == 0;
    }
    CHECK(pairs > 0 && alone > 0);
    bt_rt_on_session_lost(core, now, b, "gone");
    drain();
    CHECK(!ready);
    CHECK_EQ(n_ends, 2); /* all of them wait for it to come back */
    end();
}

int main(void)
{
    test_both();
    test_tokens();
    test_version();
    test_gate();
    test_gate_token();
    test_without_prefill_node();
    test_echo();
    test_auto();
    test_auto_learns();
    test_failures();
    test_progress();
    return bt_test_done();
}
