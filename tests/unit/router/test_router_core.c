/* The router's core alone: placement, attempts, retries, node loss, as events in and actions out.
 */

#include <stdlib.h>
#include "base/mem.h"
#include "tests/unit/router/core_fixture.h"

#define PROGRESS_MS UINT64_C(60000)

static struct bt_rt_core *core;
static uint64_t now;

/* What the drained actions amounted to. */
struct sent {
    uint64_t session;
    enum bt_from_router_kind kind;
    struct bt_ticket ticket;
    uint32_t n_tokens, n_prompt, last_token;
    uint64_t peer;
    bool prompt_logprobs;
    uint32_t max_tokens;
    size_t n_peers;
    bool keep, has_replaces;
    struct bt_ticket replaces;
};
static struct sent sent[4096];
static size_t n_sent;
static uint32_t tokens[64], n_tokens;
static size_t n_ends, n_closed, n_warned, n_plp;
static uint64_t closed;
static struct bt_rt_end last_end;
static char end_text[512], warn_text[512];
static bool ready;

static void take(const struct bt_rt_action *a)
{
    switch (a->kind) {
    case BT_RT_SEND: {
        struct sent *s = &sent[n_sent++];

        *s = (struct sent){.session = a->session, .kind = a->send.kind};
        if (a->send.kind == BT_FROM_ROUTER_SUBMIT) {
            const struct bt_msg_submit *m = &a->send.submit;

            *s = (struct sent){a->session,
                               a->send.kind,
                               m->ticket,
                               (uint32_t)m->n_tokens,
                               m->n_prompt,
                               m->tokens[m->n_tokens - 1],
                               m->peer_instance,
                               m->prompt_logprobs,
                               m->sampling.max_tokens,
                               0,
                               false,
                               m->has_replaces,
                               m->replaces};
        } else if (a->send.kind == BT_FROM_ROUTER_CANCEL) {
            s->ticket = a->send.cancel.ticket;
            s->keep = a->send.cancel.keep;
        } else if (a->send.kind == BT_FROM_ROUTER_PEERS) {
            s->n_peers = a->send.peers.n;
        }
        break;
    }
    case BT_RT_CLOSE:
        n_closed++;
        closed = a->session;
        break;
    case BT_RT_TOKENS:
        CHECK_EQ(a->tokens.index, n_tokens);
        for (size_t i = 0; i < a->tokens.n; i++) {
            tokens[n_tokens++] = a->tokens.list[i].token;
        }
        break;
    case BT_RT_PROMPT_LOGPROBS:
        n_plp += a->prompt_logprobs.n;
        break;
    case BT_RT_END:
        n_ends++;
        last_end = a->end;
        snprintf(end_text, sizeof end_text, "%s", a->end.text != NULL ? a->end.text : "");
        break;
    case BT_RT_READY:
        ready = a->ready;
        break;
    case BT_RT_LOG:
        if (a->level <= 1) {
            n_warned++;
            snprintf(warn_text, sizeof warn_text, "%s", a->text);
        }
        break;
    }
}

static void drain(void)
{
    struct bt_rt_action a;

    while (bt_rt_core_next(core, &a)) {
        take(&a);
    }
}

static void clear(void)
{
    n_sent = n_ends = n_closed = n_warned = n_plp = 0;
    n_tokens = 0;
}

static void begin(void)
{
    struct bt_rt_opts opts = fixture_opts();

    now = 1000 * MS;
    opts.progress_ns = PROGRESS_MS * MS;
    ready = false;
    clear();
    CHECK_EQ(bt_rt_core_create(&opts, &core), BT_OK);
}

static void end(void)
{
    bt_rt_core_destroy(core);
    core = NULL;
    CHECK_EQ(bt_test_live_bytes(), 0);
}

static uint64_t join_as(enum bt_role role, uint64_t instance, const char *name,
                        uint64_t fingerprint, uint32_t pages)
{
    struct bt_msg_hello h = fixture_hello(role, instance, name);

    h.fingerprint = fingerprint;
    h.n_pages = pages;
    uint64_t session = fixture_join(core, now, &h);

    drain();
    return session;
}

static uint64_t join(enum bt_role role, uint64_t instance, const char *name)
{
    return join_as(role, instance, name, 77, 1000);
}

static uint64_t start_n(uint32_t n_prompt, uint32_t max_tokens, enum bt_status want)
{
    static const uint32_t prompt[600] = {11, 12, 13};
    uint64_t seq = fixture_ask(core, now, prompt, n_prompt, max_tokens, false, want);

    drain();
    return seq;
}

static uint64_t start(uint32_t max_tokens)
{
    return start_n(3, max_tokens, BT_OK);
}

static void output(uint64_t session, const struct bt_ticket *t, uint32_t index, uint32_t first,
                   size_t n, uint32_t finish, bool stats)
{
    struct bt_sampled list[80] = {0};
    struct bt_msg_output o = {.ticket = *t,
                              .index = index,
                              .n_tokens = n,
                              .tokens = list,
                              .finish = finish,
                              .has_stats = stats,
                              .stats = {.transferred_tokens = 3}};
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_OUTPUTS, .outputs = {1, &o}};

    for (size_t i = 0; i < n; i++) {
        list[i].token = first + (uint32_t)i;
    }
    bt_rt_on_message(core, now, session, &m);
    drain();
}

static void attempt_end(uint64_t session, const struct bt_ticket *t, enum bt_attempt_reason reason)
{
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_ATTEMPT_END,
                               .attempt_end = {*t, reason, "because", false}};

    bt_rt_on_message(core, now, session, &m);
    drain();
}

static void attempt_end_kept(uint64_t session, const struct bt_ticket *t,
                             enum bt_attempt_reason reason)
{
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_ATTEMPT_END,
                               .attempt_end = {*t, reason, "because", true}};

    bt_rt_on_message(core, now, session, &m);
    drain();
}

static void tick(uint64_t ms)
{
    now += ms * MS;
    bt_rt_on_tick(core, now);
    drain();
}

/* The nth sent message of a kind, or NULL. */
static const struct sent *nth(enum bt_from_router_kind kind, size_t n)
{
    for (size_t i = 0; i < n_sent; i++) {
        if (sent[i].kind == kind && n-- == 0) {
            return &sent[i];
        }
    }
    static const struct sent none;

    CHECK(!"such a message was sent");
    return &none;
}

static size_t count(enum bt_from_router_kind kind)
{
    size_t n = 0;

    for (size_t i = 0; i < n_sent; i++) {
        n += sent[i].kind == kind;
    }
    return n;
}

#define SUBMIT(n) nth(BT_FROM_ROUTER_SUBMIT, n)

static void test_one_answer(void)
{
    begin();
    uint64_t p = join(BT_ROLE_PREFILL, 1, "p0");

    CHECK(!ready);
    uint64_t d = join(BT_ROLE_DECODE, 2, "d0");

    CHECK(ready);
    CHECK_EQ(count(BT_FROM_ROUTER_WELCOME), 2);
    CHECK_EQ(nth(BT_FROM_ROUTER_PEERS, 0)->n_peers, 0);
    CHECK_EQ(nth(BT_FROM_ROUTER_PEERS, 1)->n_peers, 1);
    CHECK_EQ(bt_rt_core_context(core), 512);
    uint64_t seq = start(5);

    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 2);
    CHECK_EQ(SUBMIT(0)->session, p);
    CHECK_EQ(SUBMIT(0)->peer, 2);
    CHECK_EQ(SUBMIT(1)->session, d);
    CHECK_EQ(SUBMIT(1)->peer, 1);
    CHECK(bt_ticket_equal(&SUBMIT(0)->ticket, &SUBMIT(1)->ticket));
    struct bt_ticket t = SUBMIT(0)->ticket;

    output(p, &t, 0, 100, 1, 0, true);
    output(d, &t, 0, 100, 1, 0, true); /* the same token again: the first copy counts */
    output(d, &t, 1, 101, 2, 0, false);
    CHECK_EQ(n_tokens, 3);
    CHECK_EQ(bt_rt_core_stats(core)->running, 1);
    output(d, &t, 3, 103, 2, 2, true);
    CHECK_EQ(n_tokens, 5);
    CHECK_EQ(n_ends, 1);
    CHECK(last_end.kind == BT_RT_FINISHED && last_end.finish == 2);
    CHECK_EQ(tokens[4], 104);
    CHECK_EQ(count(BT_FROM_ROUTER_CANCEL), 0);
    CHECK(bt_rt_seq_info(core, seq) == NULL);
    CHECK_EQ(bt_rt_core_stats(core)->running, 0);
    output(d, &t, 5, 105, 1, 0, false);
    CHECK_EQ(bt_rt_core_stats(core)->stale, 1);
    end();
}

static void test_one_token(void)
{
    begin();
    uint64_t p = join(BT_ROLE_PREFILL, 1, "p0");

    join(BT_ROLE_DECODE, 2, "d0");
    start(1);
    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 1);
    CHECK_EQ(SUBMIT(0)->session, p);
    CHECK_EQ(SUBMIT(0)->peer, 0);
    output(p, &SUBMIT(0)->ticket, 0, 100, 1, 2, true);
    CHECK_EQ(n_ends, 1);
    /* A first token that ends the answer: the decode leg is told. */
    clear();
    start(9);
    output(p, &SUBMIT(0)->ticket, 0, 100, 1, 1, true);
    CHECK(n_ends == 1 && last_end.finish == 1);
    CHECK_EQ(count(BT_FROM_ROUTER_CANCEL), 1);
    end();
}

static void test_spread(void)
{
    begin();
    uint64_t p[2] = {join(BT_ROLE_PREFILL, 1, "p0"), join(BT_ROLE_PREFILL, 2, "p1")};
    uint64_t d[2] = {join(BT_ROLE_DECODE, 3, "d0"), join(BT_ROLE_DECODE, 4, "d1")};
    uint32_t used[4] = {0};

    clear();
    /* One after the other, all idle: ties rotate. */
    for (int i = 0; i < 8; i++) {
        clear();
        start(2);
        used[SUBMIT(0)->session == p[1]]++;
        used[2 + (SUBMIT(1)->session == d[1])]++;
        uint64_t ps = SUBMIT(0)->session, ds = SUBMIT(1)->session;
        struct bt_ticket t = SUBMIT(0)->ticket;

        output(ps, &t, 0, 1, 1, 0, true);
        output(ds, &t, 1, 2, 1, 2, true);
        CHECK_EQ(n_ends, 1);
    }
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(used[i], 4);
    }
    /* At once, without any report: counted at dispatch. */
    clear();
    for (int i = 0; i < 8; i++) {
        start(2);
    }
    memset(used, 0, sizeof used);
    for (size_t i = 0; i < 16; i++) {
        const struct sent *s = SUBMIT(i);

        used[s->session == p[1] ? 1 : s->session == d[0] ? 2 : s->session == d[1] ? 3 : 0]++;
    }
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(used[i], 4);
    }
    /* A long prompt weighs more than a short one. */
    clear();
    start_n(400, 2, BT_OK);
    uint64_t busy = SUBMIT(0)->session;

    clear();
    start(2);
    start(2);
    CHECK(SUBMIT(0)->session != busy && SUBMIT(2)->session != busy);
    end();
}

static void test_retry(void)
{
    begin();
    uint64_t p[2] = {join(BT_ROLE_PREFILL, 1, "p0"), join(BT_ROLE_PREFILL, 2, "p1")};
    uint64_t d[2] = {join(BT_ROLE_DECODE, 3, "d0"), join(BT_ROLE_DECODE, 4, "d1")};

    (void)p;
    clear();
    start(9);
    struct bt_ticket t = SUBMIT(0)->ticket;
    uint64_t ps = SUBMIT(0)->session, ds = SUBMIT(1)->session;

    output(ps, &t, 0, 100, 1, 0, true);
    output(ds, &t, 0, 100, 3, 0, false);
    attempt_end(ds, &t, BT_ATTEMPT_PREEMPTED);
    /* At once on another decode node, with a new ticket, tokens so far forced. */
    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 4);
    CHECK(!bt_ticket_equal(&SUBMIT(2)->ticket, &t));
    CHECK_EQ(SUBMIT(2)->n_tokens, 6);
    CHECK_EQ(SUBMIT(2)->n_prompt, 3);
    CHECK_EQ(SUBMIT(2)->last_token, 102);
    CHECK_EQ(SUBMIT(2)->max_tokens, 9);
    CHECK_EQ(SUBMIT(3)->session, ds == d[0] ? d[1] : d[0]);
    CHECK_EQ(SUBMIT(2)->session, ps); /* it may still have the pages */
    CHECK_EQ(bt_rt_core_stats(core)->migrated, 1);
    /* Old tickets say nothing any more. */
    output(ds, &t, 3, 999, 1, 0, false);
    CHECK_EQ(n_tokens, 3);
    CHECK_EQ(bt_rt_core_stats(core)->stale, 1);
    t = SUBMIT(2)->ticket;
    output(SUBMIT(2)->session, &t, 3, 103, 1, 0, true);
    output(SUBMIT(3)->session, &t, 3, 103, 6, 2, true);
    CHECK_EQ(n_tokens, 9);
    CHECK_EQ(tokens[8], 108);
    CHECK(n_ends == 1 && last_end.kind == BT_RT_FINISHED);
    end();
}

/* Time passes while every node reports its load. */
static void wait_alive(const uint64_t *sessions, size_t n, uint64_t ms)
{
    for (uint64_t t = 0; t < ms; t += 100) {
        for (size_t i = 0; i < n; i++) {
            bt_rt_on_message(core, now, sessions[i],
                             &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_LOAD});
            drain();
        }
        tick(100);
    }
}

/* A node that lives but says nothing: the attempt is given up, both legs are told, the next one goes elsewhere. */
static void test_silent_node(void)
{
    begin();
    uint64_t all[4] = {join(BT_ROLE_PREFILL, 1, "p0"), join(BT_ROLE_PREFILL, 2, "p1"),
                       join(BT_ROLE_DECODE, 3, "d0"), join(BT_ROLE_DECODE, 4, "d1")};

    clear();
    start(9);
    struct bt_ticket t = SUBMIT(0)->ticket;
    uint64_t ps = SUBMIT(0)->session, ds = SUBMIT(1)->session;

    output(ps, &t, 0, 100, 1, 0, true);
    output(ds, &t, 0, 100, 2, 0, false);
    /* Tokens after a gap are no progress. */
    wait_alive(all, 4, PROGRESS_MS / 2);
    output(ds, &t, 4, 104, 1, 0, false);
    wait_alive(all, 4, PROGRESS_MS / 2 - 100);
    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 2);
    wait_alive(all, 4, 300);
    CHECK_EQ(count(BT_FROM_ROUTER_CANCEL), 1); /* the prefill leg had ended */
    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 4);
    CHECK_EQ(SUBMIT(3)->session, ds == all[2] ? all[3] : all[2]);
    CHECK_EQ(SUBMIT(2)->n_tokens, 5);
    t = SUBMIT(2)->ticket;
    output(SUBMIT(2)->session, &t, 2, 102, 1, 0, true);
    output(SUBMIT(3)->session, &t, 2, 102, 7, 2, true);
    CHECK_EQ(n_tokens, 9);
    CHECK(n_ends == 1 && last_end.kind == BT_RT_FINISHED);
    end();
}

/* Who was refused waits no longer than until a node has room again. */
static void test_refused_goes_on(void)
{
    begin();
    uint64_t p = join(BT_ROLE_PREFILL, 1, "p0");
    uint64_t d = join(BT_ROLE_DECODE, 3, "d0");

    clear();
    start(2);
    struct bt_ticket first = SUBMIT(0)->ticket;

    start(9);
    for (int i = 0; i < 8; i++) {
        size_t n = count(BT_FROM_ROUTER_SUBMIT);

        attempt_end(d, &SUBMIT(n - 1)->ticket, BT_ATTEMPT_REFUSED);
        for (int k = 0; k < 100 && count(BT_FROM_ROUTER_SUBMIT) == n && i < 7; k++) {
            tick(25);
            bt_rt_on_message(core, now, p, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_LOAD});
            bt_rt_on_message(core, now, d, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_LOAD});
            drain();
        }
    }
    size_t n = count(BT_FROM_ROUTER_SUBMIT);

    output(p, &first, 0, 100, 1, 0, true);
    output(d, &first, 0, 100, 2, 2, true);
    CHECK_EQ(n_ends, 1);
    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), n + 2);
    end();
}

static void test_refused(void)
{
    begin();
    uint64_t p = join(BT_ROLE_PREFILL, 1, "p0");
    uint64_t d = join(BT_ROLE_DECODE, 3, "d0");

    clear();
    start(9);
    for (int i = 0; i < 20; i++) {
        struct bt_ticket t = SUBMIT(0)->ticket;

        clear();
        attempt_end(i % 2 != 0 ? p : d, &t, BT_ATTEMPT_REFUSED);
        CHECK_EQ(count(BT_FROM_ROUTER_CANCEL), 1); /* the other leg */
        CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 0);
        CHECK_EQ(bt_rt_core_stats(core)->waiting, 1);
        for (int k = 0; k < 30 && count(BT_FROM_ROUTER_SUBMIT) == 0; k++) {
            tick(25);
            bt_rt_on_message(core, now, p, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_LOAD});
            bt_rt_on_message(core, now, d, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_LOAD});
            drain();
        }
        CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 2);
        CHECK_EQ(n_ends, 0);
    }
    CHECK_EQ(bt_rt_core_stats(core)->migrated, 0);
    /* Errors of the request itself end it. */
    attempt_end(p, &SUBMIT(0)->ticket, BT_ATTEMPT_INVALID);
    CHECK(n_ends == 1 && last_end.kind == BT_RT_INVALID);
    CHECK(strstr(end_text, "p0") != NULL && strstr(end_text, "because") != NULL);
    /* Failures without progress are bounded. */
    clear();
    start(9);
    for (int i = 0; i < 100 && n_ends == 0; i++) {
        size_t n = count(BT_FROM_ROUTER_SUBMIT);

        attempt_end(p, &SUBMIT(n - 2)->ticket, BT_ATTEMPT_RETRY);
        for (int k = 0; k < 30 && n_ends == 0 && count(BT_FROM_ROUTER_SUBMIT) == n; k++) {
            tick(10);
        }
    }
    CHECK(n_ends == 1 && last_end.kind == BT_RT_UNAVAILABLE);
    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 2 * 4);
    CHECK(strstr(end_text, "4 attempts failed") != NULL &&
          strstr(end_text, "(in prefill)") != NULL);
    end();
}

/* The last SUBMITs are an attempt on these two, which replaces that ticket at the prefill node. */
static void check_resent(uint64_t p, uint64_t d, const struct bt_ticket *t, uint32_t n_sent_tokens)
{
    size_t n = count(BT_FROM_ROUTER_SUBMIT);

    CHECK_EQ(SUBMIT(n - 2)->session, p);
    CHECK(SUBMIT(n - 2)->has_replaces && bt_ticket_equal(&SUBMIT(n - 2)->replaces, t));
    CHECK_EQ(SUBMIT(n - 2)->n_tokens, n_sent_tokens);
    CHECK_EQ(SUBMIT(n - 1)->session, d);
    CHECK(!SUBMIT(n - 1)->has_replaces);
    CHECK_EQ(SUBMIT(n - 1)->n_tokens, n_sent_tokens);
}

/* Only the decode side fails: the same prefill node is told to keep the prompt and to send it again, also when another one
 * has less to do. */
static void test_resend(void)
{
    begin();
    uint64_t p[2] = {join(BT_ROLE_PREFILL, 1, "p0"), join(BT_ROLE_PREFILL, 2, "p1")};
    uint64_t d[2] = {join(BT_ROLE_DECODE, 3, "d0"), join(BT_ROLE_DECODE, 4, "d1")};

    clear();
    uint64_t seq = start(2); /* the last token is made by a decode node, too */
    struct bt_ticket t = SUBMIT(0)->ticket;
    uint64_t ps = SUBMIT(0)->session, ds = SUBMIT(1)->session, other = ds == d[0] ? d[1] : d[0];

    (void)p;
    output(ps, &t, 0, 100, 1, 0, true);
    bt_rt_on_session_lost(core, now, ds, "reset");
    drain();
    CHECK_EQ(count(BT_FROM_ROUTER_CANCEL), 1);
    CHECK(nth(BT_FROM_ROUTER_CANCEL, 0)->keep && nth(BT_FROM_ROUTER_CANCEL, 0)->session == ps);
    check_resent(ps, other, &t, 4);
    /* The prefill node says what its decode node did: nothing to cancel there. Refusals do not count. */
    for (size_t i = 0; i < 4; i++) {
        size_t n = count(BT_FROM_ROUTER_SUBMIT);

        t = SUBMIT(n - 2)->ticket;
        output(ps, &t, 0, 100, 1, 0, true); /* the token that is known already */
        attempt_end_kept(ps, &t, BT_ATTEMPT_REFUSED);
        CHECK_EQ(count(BT_FROM_ROUTER_CANCEL), 2 + i);
        CHECK_EQ(nth(BT_FROM_ROUTER_CANCEL, 1 + i)->session, other);
        for (int k = 0; k < 60 && count(BT_FROM_ROUTER_SUBMIT) == n; k++) {
            tick(10);
        }
        check_resent(ps, other, &t, 4);
    }
    t = SUBMIT(count(BT_FROM_ROUTER_SUBMIT) - 2)->ticket;
    output(ps, &t, 0, 100, 1, 0, true);
    output(other, &t, 0, 100, 2, 2, true);
    CHECK(n_ends == 1 && last_end.kind == BT_RT_FINISHED && n_tokens == 2);
    CHECK_EQ(bt_rt_core_stats(core)->token_mismatches, 0);
    (void)seq;
    end();
}

/* Of one index there is one token. A node that has another one is told of, once; the first copy stays. */
static void test_token_mismatch(void)
{
    begin();
    uint64_t p = join(BT_ROLE_PREFILL, 1, "p0");
    uint64_t d[2] = {join(BT_ROLE_DECODE, 3, "d0"), join(BT_ROLE_DECODE, 4, "d1")};

    /* The decode node begins with another token: it is stopped, the next attempt runs elsewhere. */
    clear();
    start(9);
    struct bt_ticket t = SUBMIT(0)->ticket;
    uint64_t ds = SUBMIT(1)->session;

    output(p, &t, 0, 100, 1, 0, true);
    output(ds, &t, 0, 107, 1, 0, true);
    CHECK_EQ(bt_rt_core_stats(core)->token_mismatches, 1);
    CHECK_EQ(n_warned, 1);
    CHECK(strstr(warn_text, "p0") != NULL && strstr(warn_text, "107") != NULL);
    CHECK(strstr(warn_text, ds == d[0] ? "d0" : "d1") != NULL && strstr(warn_text, "100") != NULL);
    CHECK_EQ(count(BT_FROM_ROUTER_CANCEL), 2);
    CHECK(!nth(BT_FROM_ROUTER_CANCEL, 0)->keep && !nth(BT_FROM_ROUTER_CANCEL, 1)->keep);
    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 4);
    CHECK_EQ(SUBMIT(3)->session, ds == d[0] ? d[1] : d[0]);
    CHECK_EQ(SUBMIT(2)->n_tokens, 4);
    CHECK_EQ(SUBMIT(2)->last_token, 100);
    CHECK(!SUBMIT(2)->has_replaces);
    CHECK_EQ(n_tokens, 1);
    /* The prefill node's copy comes second and differs: the decode node goes on with what was taken. */
    t = SUBMIT(2)->ticket;
    ds = SUBMIT(3)->session;
    output(ds, &t, 1, 101, 2, 0, true);
    output(p, &t, 1, 55, 1, 1, true); /* even if it says that the answer ends here */
    CHECK_EQ(bt_rt_core_stats(core)->token_mismatches, 2);
    CHECK_EQ(n_warned, 2);
    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 4);
    output(ds, &t, 3, 103, 6, 2, true);
    CHECK(n_ends == 1 && last_end.kind == BT_RT_FINISHED && n_tokens == 9);
    CHECK_EQ(tokens[1], 101);
    /* Told once for each node. */
    clear();
    start(9);
    output(SUBMIT(0)->session, &SUBMIT(0)->ticket, 0, 100, 1, 0, true);
    output(SUBMIT(1)->session, &SUBMIT(0)->ticket, 0, 101, 1, 0, true);
    CHECK_EQ(bt_rt_core_stats(core)->token_mismatches, 3);
    clear();
    for (int i = 0; i < 2; i++) {
        n_tokens = 0; /* of another answer */
        start(9);
        size_t n = count(BT_FROM_ROUTER_SUBMIT);

        output(p, &SUBMIT(n - 2)->ticket, 0, 100, 1, 0, true);
        output(SUBMIT(n - 1)->session, &SUBMIT(n - 2)->ticket, 0, 101, 1, 0, true);
    }
    CHECK_EQ(bt_rt_core_stats(core)->token_mismatches, 5);
    CHECK(n_warned <= 1); /* of the second decode node */
    end();
}

static void load_short(uint64_t session, bool pages_short)
{
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_LOAD, .load = {.pages_short = pages_short}};

    bt_rt_on_message(core, now, session, &m);
    drain();
}

/* A prefill node whose pool is full of what nobody takes gets no more: others do, or it waits here. */
static void test_prefill_without_pages(void)
{
    begin();
    uint64_t p = join(BT_ROLE_PREFILL, 1, "p0");

    join(BT_ROLE_DECODE, 3, "d0");
    load_short(p, true);
    clear();
    for (int i = 0; i < 9; i++) {
        start(9);
    }
    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 2); /* one keeps its place */
    CHECK_EQ(bt_rt_core_stats(core)->waiting, 8);
    start_n(3, 9, BT_ERR_BUSY); /* the queue is full, and says so */
    uint64_t p1 = join(BT_ROLE_PREFILL, 2, "p1");

    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 2 + 16);
    for (size_t i = 2; i < 18; i += 2) {
        CHECK_EQ(SUBMIT(i)->session, p1);
    }
    load_short(p1, true);
    clear();
    start(9);
    CHECK_EQ(bt_rt_core_stats(core)->waiting, 1);
    load_short(p, false);
    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 2);
    CHECK_EQ(SUBMIT(0)->session, p);
    end();
}

/* What is kept is let go when nobody will want it: the client leaves, or resends fail again and again. */
static void test_kept_is_dropped(void)
{
    begin();
    uint64_t p[2] = {join(BT_ROLE_PREFILL, 1, "p0"), join(BT_ROLE_PREFILL, 2, "p1")};

    join(BT_ROLE_DECODE, 3, "d0");
    clear();
    uint64_t seq = start(9);
    struct bt_ticket t = SUBMIT(0)->ticket;
    uint64_t ps = SUBMIT(0)->session, ds = SUBMIT(1)->session, other = ps == p[0] ? p[1] : p[0];

    attempt_end(ds, &t, BT_ATTEMPT_REFUSED);
    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 2); /* waits */
    bt_rt_seq_cancel(core, now, seq);
    drain();
    CHECK_EQ(count(BT_FROM_ROUTER_CANCEL), 2);
    CHECK(nth(BT_FROM_ROUTER_CANCEL, 0)->keep && !nth(BT_FROM_ROUTER_CANCEL, 1)->keep);
    CHECK(bt_ticket_equal(&nth(BT_FROM_ROUTER_CANCEL, 1)->ticket, &t));
    CHECK_EQ(nth(BT_FROM_ROUTER_CANCEL, 1)->session, ps);
    /* A third failure in a row: that may be the prefill node. */
    clear();
    start(9);
    ps = SUBMIT(0)->session;
    other = ps == p[0] ? p[1] : p[0];
    for (size_t i = 0; i < 3; i++) {
        CHECK_EQ(SUBMIT(2 * i)->session, ps);
        CHECK_EQ(SUBMIT(2 * i)->has_replaces, i > 0);
        t = SUBMIT(2 * i)->ticket;
        attempt_end_kept(ps, &t, BT_ATTEMPT_RETRY);
        for (int k = 0; k < 60 && count(BT_FROM_ROUTER_SUBMIT) == 2 * (i + 1); k++) {
            tick(10);
        }
    }
    CHECK_EQ(SUBMIT(6)->session, other);
    CHECK(!SUBMIT(6)->has_replaces);
    CHECK(!nth(BT_FROM_ROUTER_CANCEL, count(BT_FROM_ROUTER_CANCEL) - 1)->keep);
    end();
}

/* A prefill node keeps a prompt for its lease only: whoever finds no decode node before goes where any prompt would. */
static void test_kept_for_a_lease(void)
{
    for (int late = 0; late < 2; late++) {
        begin();
        uint64_t p[2] = {join(BT_ROLE_PREFILL, 1, "p0"), join(BT_ROLE_PREFILL, 2, "p1")};
        uint64_t d = join(BT_ROLE_DECODE, 3, "d0");

        clear();
        start(9);
        struct bt_ticket t = SUBMIT(0)->ticket;
        uint64_t ps = SUBMIT(0)->session;

        bt_rt_on_session_lost(core, now, d, "reset");
        drain();
        wait_alive(p, 2, late ? 3200 : 2800);
        CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 2);
        CHECK_EQ(count(BT_FROM_ROUTER_CANCEL), 1 + late);
        if (late) {
            CHECK_EQ(nth(BT_FROM_ROUTER_CANCEL, 1)->session, ps);
            CHECK(!nth(BT_FROM_ROUTER_CANCEL, 1)->keep &&
                  bt_ticket_equal(&nth(BT_FROM_ROUTER_CANCEL, 1)->ticket, &t));
        }
        join(BT_ROLE_DECODE, 4, "d1");
        CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 4);
        CHECK_EQ(SUBMIT(2)->has_replaces, !late);
        CHECK(late || SUBMIT(2)->session == ps);
        end();
    }
}

/* What a draining node gives back goes on at once, without a failure; bounded all the same. */
static void test_given_back(void)
{
    begin();
    uint64_t p = join(BT_ROLE_PREFILL, 1, "p0");

    join(BT_ROLE_DECODE, 3, "d0");
    clear();
    start(9);
    for (size_t i = 0; i < 4; i++) {
        attempt_end(i % 2 != 0 ? p : SUBMIT(2 * i + 1)->session, &SUBMIT(2 * i)->ticket,
                    BT_ATTEMPT_DRAINING);
        CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 2 * (i + 2));
        CHECK_EQ(n_ends, 0);
    }
    CHECK_EQ(bt_rt_core_stats(core)->migrated, 4);
    for (int i = 0; i < 100 && n_ends == 0; i++) {
        size_t n = count(BT_FROM_ROUTER_SUBMIT);

        attempt_end(p, &SUBMIT(n - 2)->ticket, BT_ATTEMPT_DRAINING);
        for (int k = 0; k < 30 && n_ends == 0 && count(BT_FROM_ROUTER_SUBMIT) == n; k++) {
            tick(10);
        }
    }
    CHECK(n_ends == 1 && last_end.kind == BT_RT_UNAVAILABLE);
    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 2 * (4 + 4));
    end();
}

static void test_node_loss(void)
{
    begin();
    uint64_t p = join(BT_ROLE_PREFILL, 1, "p0");
    uint64_t d[2] = {join(BT_ROLE_DECODE, 3, "d0"), join(BT_ROLE_DECODE, 4, "d1")};

    clear();
    start(9);
    struct bt_ticket t = SUBMIT(0)->ticket;
    uint64_t ds = SUBMIT(1)->session;

    output(p, &t, 0, 100, 1, 0, true);
    output(ds, &t, 0, 100, 2, 0, true);
    /* The prefill node's part is done: its loss changes nothing. */
    bt_rt_on_session_lost(core, now, p, "reset");
    drain();
    CHECK(!ready && n_ends == 0 && count(BT_FROM_ROUTER_SUBMIT) == 2);
    p = join(BT_ROLE_PREFILL, 5, "p0");
    CHECK(ready);
    bt_rt_on_session_lost(core, now, ds, "reset");
    drain();
    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 4);
    CHECK_EQ(SUBMIT(2)->session, p);
    CHECK_EQ(SUBMIT(2)->n_tokens, 5);
    CHECK_EQ(SUBMIT(3)->session, ds == d[0] ? d[1] : d[0]);
    /* Before token 0 too. A node that is silent for a lease is lost. */
    uint64_t d2 = SUBMIT(3)->session;

    for (int i = 0; i < 20 && n_closed == 0; i++) {
        tick(250);
        bt_rt_on_message(core, now, d2, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_LOAD});
        drain();
    }
    CHECK_EQ(n_closed, 1);
    CHECK_EQ(closed, p);
    CHECK_EQ(bt_rt_core_stats(core)->waiting, 1);
    /* No pair for too long: an error that names the cause. */
    for (int i = 0; i < 100 && n_ends == 0; i++) {
        tick(250);
        bt_rt_on_message(core, now, d2, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_LOAD});
        drain();
    }
    CHECK(n_ends == 1 && last_end.kind == BT_RT_UNAVAILABLE);
    CHECK(strstr(end_text, "no prefill node is connected") != NULL);
    CHECK(strstr(end_text, "p0 was lost") != NULL);
    struct bt_rt_gone_info g;
    uint32_t pos = 0, n = 0;

    while (bt_rt_core_gone(core, &pos, &g)) {
        n++;
    }
    CHECK_EQ(n, 2);
    end();
}

static void test_no_node(void)
{
    begin();
    start(9);
    CHECK_EQ(n_ends, 0);
    tick(500);
    CHECK_EQ(n_ends, 0);
    tick(600);
    CHECK(n_ends == 1 && last_end.kind == BT_RT_UNAVAILABLE);
    CHECK(strstr(end_text, "no prefill or decode node") != NULL);
    /* A node that comes within the grace. */
    clear();
    start(9);
    join(BT_ROLE_PREFILL, 1, "p0");
    tick(100);
    join(BT_ROLE_DECODE, 2, "d0");
    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 2);
    end();
}

static void test_cancel(void)
{
    begin();
    uint64_t p = join(BT_ROLE_PREFILL, 1, "p0");
    uint64_t d = join(BT_ROLE_DECODE, 2, "d0");

    clear();
    uint64_t seq = start(9);

    bt_rt_seq_cancel(core, now, seq);
    drain();
    CHECK_EQ(count(BT_FROM_ROUTER_CANCEL), 2);
    CHECK_EQ(nth(BT_FROM_ROUTER_CANCEL, 0)->session, p);
    CHECK_EQ(nth(BT_FROM_ROUTER_CANCEL, 1)->session, d);
    CHECK_EQ(n_ends, 0);
    bt_rt_seq_cancel(core, now, seq);
    drain();
    CHECK_EQ(count(BT_FROM_ROUTER_CANCEL), 2);
    output(p, &SUBMIT(0)->ticket, 0, 100, 1, 0, true);
    CHECK_EQ(n_tokens, 0);
    /* A deadline ends it in any phase. */
    struct bt_sampling sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 5};
    uint32_t prompt[2] = {1, 2};

    CHECK_EQ(bt_rt_seq_start(core, now,
                             &(struct bt_rt_seq_start){.request_id = "r",
                                                       .tokens = prompt,
                                                       .n_prompt = 2,
                                                       .sampling = &sampling,
                                                       .deadline = now + 50 * MS},
                             &seq),
             BT_OK);
    tick(60);
    CHECK(n_ends == 1 && last_end.kind == BT_RT_DEADLINE);
    CHECK_EQ(count(BT_FROM_ROUTER_CANCEL), 4);
    end();
}

/* A client that leaves when it sees a token is not told of the end that was queued behind it. */
static void test_cancel_while_draining(void)
{
    begin();
    join(BT_ROLE_PREFILL, 1, "p0");
    uint64_t d = join(BT_ROLE_DECODE, 2, "d0");

    clear();
    uint64_t seq = start(2);
    struct bt_sampled list[2] = {{.token = 100}, {.token = 101}};
    struct bt_msg_output o = {
        .ticket = SUBMIT(0)->ticket, .index = 1, .n_tokens = 1, .tokens = list + 1, .finish = 2};
    struct bt_rt_action a;

    output(SUBMIT(0)->session, &o.ticket, 0, 100, 1, 0, true);
    bt_rt_on_message(core, now, d,
                     &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_OUTPUTS, .outputs = {1, &o}});
    while (bt_rt_core_next(core, &a)) {
        if (a.kind == BT_RT_TOKENS) {
            bt_rt_seq_cancel(core, now, seq);
        }
        CHECK(a.kind != BT_RT_END);
    }
    end();
}

static void test_mismatch(void)
{
    begin();
    join_as(BT_ROLE_PREFILL, 1, "p0", 77, 1000);
    join_as(BT_ROLE_DECODE, 2, "d0", 78, 1000);
    CHECK(!ready);
    CHECK_EQ(n_warned, 2);
    CHECK(strstr(warn_text, "fingerprint") != NULL && strstr(warn_text, "4d") != NULL &&
          strstr(warn_text, "4e") != NULL);
    for (int i = 0; i < 4; i++) {
        tick(250);
    }
    CHECK_EQ(n_warned, 2);
    struct bt_rt_node_info info;
    uint32_t pos = 0;

    CHECK(bt_rt_core_node(core, &pos, &info));
    CHECK(strncmp(info.state, "mismatch: ", 10) == 0);
    clear();
    start(5);
    tick(2000);
    CHECK(n_ends == 1 && last_end.kind == BT_RT_UNAVAILABLE);
    CHECK(strstr(end_text, "mismatch") != NULL);
    join_as(BT_ROLE_DECODE, 3, "d1", 77, 1000);
    CHECK(ready);
    pos = 0;
    CHECK(bt_rt_core_node(core, &pos, &info));
    CHECK_STR(info.state, "ready");
    CHECK(bt_rt_core_node(core, &pos, &info));
    CHECK(strncmp(info.state, "mismatch: ", 10) == 0);
    end();
}

/* A long name is cut between characters: others read it as UTF-8. */
static void test_long_name(void)
{
    struct bt_rt_node_info n;
    uint32_t pos = 0;
    char name[131];

    for (size_t i = 0; i + 2 < sizeof name; i += 2) {
        memcpy(name + i, "\xc3\xa4", 3);
    }
    begin();
    join(BT_ROLE_PREFILL, 1, name);
    CHECK(bt_rt_core_node(core, &pos, &n));
    CHECK_EQ(strlen(n.name), 62);
    end();
}

static void test_version(void)
{
    begin();
    uint64_t s = bt_rt_on_session(core, now);
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_HELLO,
                               .hello = {.version_min = 7,
                                         .version_max = 9,
                                         .instance = 1,
                                         .name = "new",
                                         .numerics = "",
                                         .kv_layout = "",
                                         .model_name = "",
                                         .transfer_address = "",
                                         .backend = ""}};

    bt_rt_on_message(core, now, s, &m);
    drain();
    CHECK_EQ(count(BT_FROM_ROUTER_WELCOME), 1);
    CHECK_EQ(n_closed, 1);
    CHECK(strstr(warn_text, "7 to 9") != NULL);
    /* Anything before hello ends the session. */
    s = bt_rt_on_session(core, now);
    bt_rt_on_message(core, now, s, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_LOAD});
    drain();
    CHECK_EQ(n_closed, 2);
    end();
}

static void test_unreachable(void)
{
    begin();
    uint64_t p = join(BT_ROLE_PREFILL, 1, "p0");

    join(BT_ROLE_DECODE, 2, "d0");
    uint64_t d1 = join(BT_ROLE_DECODE, 3, "d1");
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_PEER_STATE,
                               .peer_state = {2, false, "no route"}};

    bt_rt_on_message(core, now, p, &m);
    drain();
    clear();
    for (int i = 0; i < 4; i++) {
        start(5);
    }
    for (size_t i = 0; i < 4; i++) {
        CHECK_EQ(SUBMIT(2 * i + 1)->session, d1);
    }
    m.peer_state.instance = 3;
    bt_rt_on_message(core, now, p, &m);
    drain();
    CHECK(!ready);
    m.peer_state.reachable = true;
    bt_rt_on_message(core, now, p, &m);
    drain();
    CHECK(ready);
    end();
}

static void test_gap(void)
{
    begin();
    uint64_t p = join(BT_ROLE_PREFILL, 1, "p0");
    uint64_t d = join(BT_ROLE_DECODE, 2, "d0");

    clear();
    start(70);
    struct bt_ticket t = SUBMIT(0)->ticket;

    output(d, &t, 1, 101, 2, 0, false);
    output(d, &t, 3, 103, 1, 0, false);
    CHECK_EQ(n_tokens, 0);
    output(p, &t, 0, 100, 1, 0, true);
    CHECK_EQ(n_tokens, 4);
    CHECK_EQ(tokens[3], 103);
    /* A gap too long is the attempt's failure. */
    output(d, &t, 6, 106, 1, 0, false);
    output(d, &t, 9, 109, 1, 0, false);
    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 4);
    CHECK_EQ(SUBMIT(2)->n_tokens, 7);
    end();
}

/* A token that no model has is never an answer, and never sent to other nodes. */
static void test_unknown_token(void)
{
    begin();
    uint64_t p = join(BT_ROLE_PREFILL, 1, "p0");
    uint64_t d = join(BT_ROLE_DECODE, 2, "d0");

    clear();
    start(70);
    output(p, &SUBMIT(0)->ticket, 0, 100, 1, 0, true);
    output(d, &SUBMIT(0)->ticket, 0, 1999, 2, 0, false);
    CHECK_EQ(n_tokens, 1);
    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 4);
    CHECK_EQ(SUBMIT(2)->n_tokens, 4);
    end();
}

static void test_limits(void)
{
    begin();
    /* The queue. */
    for (int i = 0; i < 8; i++) {
        start(5);
    }
    CHECK_EQ(bt_rt_core_room(core), 0);
    start_n(3, 5, BT_ERR_BUSY);
    uint64_t p = join(BT_ROLE_PREFILL, 1, "p0");
    uint64_t d = join_as(BT_ROLE_DECODE, 2, "d0", 77, 3); /* three answers of one page */

    /* Pages of the decode node: what does not fit waits. */
    CHECK_EQ(bt_rt_core_stats(core)->running, 3);
    CHECK_EQ(bt_rt_core_stats(core)->waiting, 5);
    struct bt_ticket t = SUBMIT(0)->ticket;

    output(p, &t, 0, 100, 1, 0, true);
    output(d, &t, 1, 101, 4, 2, true);
    CHECK_EQ(n_ends, 1);
    CHECK_EQ(bt_rt_core_stats(core)->running, 3);
    CHECK_EQ(bt_rt_core_stats(core)->waiting, 4);
    for (int i = 0; i < 200 && n_ends < 5; i++) {
        tick(250);
        bt_rt_on_message(core, now, p, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_LOAD});
        bt_rt_on_message(core, now, d, &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_LOAD});
        drain();
    }
    CHECK(n_ends == 5 && last_end.kind == BT_RT_EXHAUSTED);
    /* The context. */
    clear();
    start_n(500, 13, BT_OK);
    CHECK(n_ends == 1 && last_end.kind == BT_RT_INVALID);
    CHECK(strstr(end_text, "500") != NULL && strstr(end_text, "13") != NULL &&
          strstr(end_text, "512") != NULL);
    start_n(512, 0, BT_OK);
    CHECK(n_ends == 2 && last_end.kind == BT_RT_INVALID);
    end();
}

static void test_late_stats(void)
{
    begin();
    uint64_t p = join(BT_ROLE_PREFILL, 1, "p0");
    uint64_t d = join(BT_ROLE_DECODE, 2, "d0");

    clear();
    start(2);
    struct bt_ticket t = SUBMIT(0)->ticket;

    output(d, &t, 0, 100, 2, 2, true);
    CHECK(n_tokens == 2 && n_ends == 0); /* the prefill leg's statistics are on their way */
    output(p, &t, 0, 100, 1, 0, true);
    CHECK(n_tokens == 2 && n_ends == 1);
    start(2);
    n_tokens = 0;
    t = SUBMIT(2)->ticket;
    output(d, &t, 0, 100, 2, 2, true);
    tick(200);
    CHECK_EQ(n_ends, 2);
    end();
}

static void prompt_logprobs(uint64_t session, const struct bt_ticket *t, uint32_t first, size_t n)
{
    struct bt_sampled list[8] = {0};
    struct bt_msg_output o = {.ticket = *t,
                              .has_logprobs = true,
                              .prompt_first = first,
                              .n_prompt_logprobs = n,
                              .prompt_logprobs = list};

    bt_rt_on_message(core, now, session,
                     &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_OUTPUTS, .outputs = {1, &o}});
    drain();
}

/* An answer is complete only with the log-probabilities of its prompt: when the prefill node that
 * owed them is lost, another one computes them, and nothing is delivered twice. */
static void test_late_prompt_logprobs(void)
{
    struct bt_sampling sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 2};
    const uint32_t prompt[4] = {1, 2, 3, 4};
    uint64_t seq;

    begin();
    uint64_t p = join(BT_ROLE_PREFILL, 1, "p0");
    uint64_t d = join(BT_ROLE_DECODE, 2, "d0");

    clear();
    CHECK_EQ(bt_rt_seq_start(core, now,
                             &(struct bt_rt_seq_start){.request_id = "r",
                                                       .tokens = prompt,
                                                       .n_prompt = 4,
                                                       .sampling = &sampling,
                                                       .prompt_logprobs = true,
                                                       .deadline = UINT64_MAX},
                             &seq),
             BT_OK);
    drain();
    struct bt_ticket t = SUBMIT(0)->ticket;

    prompt_logprobs(p, &t, 1, 1);
    output(d, &t, 0, 100, 2, 2, true);
    tick(500);
    CHECK(n_tokens == 2 && n_ends == 0);
    uint64_t p2 = join(BT_ROLE_PREFILL, 3, "p1");

    bt_rt_on_session_lost(core, now, p, "test");
    drain();
    tick(50);
    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 3);
    CHECK_EQ(SUBMIT(2)->session, p2);
    CHECK_EQ(SUBMIT(2)->peer, 0);
    CHECK_EQ(SUBMIT(2)->n_tokens, 5);
    CHECK(SUBMIT(2)->prompt_logprobs);
    prompt_logprobs(p2, &SUBMIT(2)->ticket, 1, 3);
    output(p2, &SUBMIT(2)->ticket, 1, 101, 1, 2, true);
    CHECK(n_plp == 3 && n_tokens == 2 && n_ends == 1);
    CHECK(last_end.kind == BT_RT_FINISHED && last_end.finish == 2);
    end();
}

static void test_reconnect(void)
{
    begin();
    join(BT_ROLE_PREFILL, 1, "p0");
    uint64_t d = join(BT_ROLE_DECODE, 2, "d0");

    clear();
    start(5);
    join(BT_ROLE_DECODE, 2, "d0");
    CHECK_EQ(n_closed, 1);
    CHECK_EQ(closed, d);
    CHECK_EQ(count(BT_FROM_ROUTER_SUBMIT), 4);
    /* A draining node gets nothing new; what runs goes on. */
    clear();
    bt_rt_on_message(core, now, closed + (UINT64_C(1) << 32),
                     &(struct bt_from_daemon){.kind = BT_FROM_DAEMON_DRAINING});
    drain();
    end();
}

/* ---- prompts go where their beginning is cached ---- */

/* A sequence whose prompt is told by its first token; *p, *d: the sessions it was sent to. */
static struct bt_ticket start_kind(uint32_t kind, uint32_t n_prompt, bool echo, uint64_t *p,
                                   uint64_t *d)
{
    uint32_t prompt[600] = {kind, 5, 6};
    struct bt_sampling sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 2};
    uint64_t seq = 0;

    clear();
    CHECK_EQ(bt_rt_seq_start(core, now,
                             &(struct bt_rt_seq_start){.request_id = "r",
                                                       .tokens = prompt,
                                                       .n_prompt = n_prompt,
                                                       .sampling = &sampling,
                                                       .prompt_logprobs = echo,
                                                       .deadline = UINT64_MAX},
                             &seq),
             BT_OK);
    drain();
    *p = SUBMIT(0)->session;
    *d = SUBMIT(1)->session;
    return SUBMIT(0)->ticket;
}

static void finish(const struct bt_ticket *t, uint64_t p, uint64_t d)
{
    output(p, t, 0, 1, 1, 0, true);
    output(d, t, 0, 1, 2, 2, true);
}

/* Alone: from start to end. */
static void run_kind(uint32_t kind, uint32_t n_prompt, uint64_t *p, uint64_t *d)
{
    struct bt_ticket t = start_kind(kind, n_prompt, false, p, d);

    finish(&t, *p, *d);
    CHECK_EQ(n_ends, 1);
}

static void report_cached(uint64_t session, uint32_t pages)
{
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_LOAD, .load = {.pages_cached = pages}};

    bt_rt_on_message(core, now, session, &m);
    drain();
}

static uint64_t own_tokens(uint64_t instance)
{
    struct bt_rt_node_info info;
    uint32_t pos = 0;

    while (bt_rt_core_node(core, &pos, &info)) {
        if (info.instance == instance) {
            return info.own_tokens;
        }
    }
    CHECK(!"the node is there");
    return 0;
}

static void join_four(uint64_t p[2], uint64_t d[2], uint32_t pages_cached)
{
    begin();
    for (uint64_t i = 0; i < 2; i++) {
        p[i] = join(BT_ROLE_PREFILL, 1 + i, i == 0 ? "p0" : "p1");
        d[i] = join(BT_ROLE_DECODE, 3 + i, i == 0 ? "d0" : "d1");
        report_cached(p[i], pages_cached);
        report_cached(d[i], pages_cached);
    }
}

static void test_affinity(void)
{
    uint64_t p[2], d[2], ps, ds, p1, d1;

    join_four(p, d, 10);
    run_kind(1, 300, &ps, &ds);
    for (uint32_t i = 0; i < 6; i++) {
        run_kind(1, 300 + i, &p1, &d1);
        CHECK(p1 == ps && d1 == ds);
        run_kind(1, 100, &p1, &d1); /* a part of it */
        CHECK(p1 == ps && d1 == ds);
        run_kind(100 + i, 300, &p1, &d1); /* others go on in turn */
    }
    /* Too short to be worth it: in turn. */
    run_kind(1, 63, &ps, &ds);
    run_kind(1, 63, &p1, &d1);
    CHECK(p1 != ps && d1 != ds);
    /* An echoed prompt is computed whole; its decode node has it all the same. */
    run_kind(7, 300, &ps, &ds);
    uint32_t n_same = 0;

    for (uint32_t i = 0; i < 4; i++) {
        struct bt_ticket t = start_kind(7, 300, true, &p1, &d1);

        n_same += p1 == ps;
        CHECK_EQ(d1, ds);
        CHECK_EQ(own_tokens(p1 == p[0] ? 1 : 2), 300);
        attempt_end(p1, &t, BT_ATTEMPT_INVALID);
    }
    CHECK_EQ(n_same, 2);
    end();
}

/* Nodes that never show a cached page are chosen as if nothing was known. */
static void test_affinity_needs_a_cache(void)
{
    uint64_t p[2], d[2], ps, ds, p1, d1;

    join_four(p, d, 0);
    run_kind(1, 300, &ps, &ds);
    run_kind(1, 300, &p1, &d1);
    CHECK(p1 != ps && d1 != ds);
    end();
}

/* The answer's tokens count on the decode node: the next turn of a conversation begins with them. */
static void test_affinity_of_answers(void)
{
    uint64_t p[2], d[2], ps, ds, p1, d1;

    join_four(p, d, 10);
    /* 126 + 2: the second block is full with the answer only. */
    run_kind(1, 126, &ps, &ds);
    uint32_t prompt[200] = {1, 5, 6};
    struct bt_sampling sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 2};
    uint64_t seq = 0;

    prompt[126] = 1;
    prompt[127] = 2;
    clear();
    CHECK_EQ(bt_rt_seq_start(core, now,
                             &(struct bt_rt_seq_start){.request_id = "r",
                                                       .tokens = prompt,
                                                       .n_prompt = 200,
                                                       .sampling = &sampling,
                                                       .deadline = UINT64_MAX},
                             &seq),
             BT_OK);
    drain();
    p1 = SUBMIT(0)->session;
    d1 = SUBMIT(1)->session;
    CHECK(p1 == ps && d1 == ds);
    CHECK_EQ(own_tokens(p1 == p[0] ? 1 : 2), 200 - 64); /* it has the prompt's first block */
    end();
}

/* Everybody wants one node: the others help before it is more than a prefix ahead, and what is
 * cached elsewhere is still found there. */
static void test_affinity_is_bounded(void)
{
    uint64_t p[2], d[2], hot, other, ds, p1, d1;

    join_four(p, d, 10);
    run_kind(1, 400, &hot, &ds);
    uint32_t kind = 1;

    do { /* something that the other node has */
        run_kind(++kind, 400, &other, &ds);
    } while (other == hot);
    uint64_t at_hot = hot == p[0] ? 1 : 2, at_other = 3 - at_hot;
    uint32_t n_hot = 0;

    for (uint32_t i = 0; i < 16; i++) {
        start_kind(1, 400, false, &p1, &d1);
        n_hot += p1 == hot;
        uint64_t a = own_tokens(at_hot), b = own_tokens(at_other);

        CHECK(a <= b + 400 && b <= a + 400);
    }
    CHECK(n_hot > 4 && n_hot <= 16);
    /* Its own prefixes are worth as much as before. */
    start_kind(kind, 400, false, &p1, &d1);
    CHECK_EQ(p1, other);
    end();
}

static void test_affinity_of_the_lost(void)
{
    uint64_t p[2], d[2], ps, ds, p1, d1;

    join_four(p, d, 10);
    uint32_t kind = 1;

    do {
        run_kind(++kind, 300, &ps, &ds);
    } while (ps != p[0]);
    bt_rt_on_session_lost(core, now, p[0], "gone");
    drain();
    run_kind(kind, 300, &p1, &d1);
    CHECK_EQ(p1, p[1]);
    /* Back under another instance: it has nothing, so the one that helped keeps the prompt. */
    p[0] = join(BT_ROLE_PREFILL, 77, "p0");
    report_cached(p[0], 10);
    for (uint32_t i = 0; i < 4; i++) {
        run_kind(kind, 300, &p1, &d1);
        CHECK_EQ(p1, p[1]);
    }
    end();
}

/* Each allocation of a start fails once: nothing is left behind, the next start works. */
static void test_memory(void)
{
    bool fired = true;

    begin();
    uint64_t p = join(BT_ROLE_PREFILL, 1, "p0");

    join(BT_ROLE_DECODE, 2, "d0");
    start(5); /* the action list has its size now */
    for (uint64_t at = 0; fired; at++) {
        static const uint32_t prompt[] = {1, 2};
        struct bt_sampling sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 1};
        uint64_t seq = 0;

        clear();
        bt_test_fail_alloc(at);
        enum bt_status st = bt_rt_seq_start(core, now,
                                            &(struct bt_rt_seq_start){.request_id = "r",
                                                                      .tokens = prompt,
                                                                      .n_prompt = 2,
                                                                      .sampling = &sampling,
                                                                      .deadline = UINT64_MAX},
                                            &seq);

        fired = bt_test_fail_alloc_off();
        drain();
        if (st == BT_OK) {
            tick(1);
            output(p, &SUBMIT(0)->ticket, 0, 100, 1, 2, true);
            CHECK_EQ(n_ends, 1);
        } else {
            CHECK_EQ(st, BT_ERR_NOMEM);
        }
        CHECK_EQ(bt_rt_core_stats(core)->running, 1);
        CHECK_EQ(bt_rt_core_stats(core)->waiting, 0);
    }
    end();
}

int main(void)
{
    test_one_answer();
    test_one_token();
    test_spread();
    test_retry();
    test_silent_node();
    test_refused();
    test_refused_goes_on();
    test_resend();
    test_kept_is_dropped();
    test_kept_for_a_lease();
    test_prefill_without_pages();
    test_token_mismatch();
    test_given_back();
    test_node_loss();
    test_no_node();
    test_cancel();
    test_cancel_while_draining();
    test_mismatch();
    test_long_name();
    test_version();
    test_unreachable();
    test_gap();
    test_unknown_token();
    test_limits();
    test_late_stats();
    test_late_prompt_logprobs();
    test_reconnect();
    test_affinity();
    test_affinity_needs_a_cache();
    test_affinity_of_answers();
    test_affinity_is_bounded();
    test_affinity_of_the_lost();
    test_memory();
    return bt_test_done();
}
