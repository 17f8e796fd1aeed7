/* What the router's core does when it is told to take nodes out of service. */

#include <string.h>
#include "base/mem.h"
#include "tests/unit/router/core_fixture.h"

static struct bt_rt_core *core;
static uint64_t now, told[16], submitted[16];
static size_t n_told, n_submitted, n_ends;
static struct bt_ticket ticket; /* of the last submit */
static bool ready;

static void drain_actions(void)
{
    struct bt_rt_action a;

    while (bt_rt_core_next(core, &a)) {
        if (a.kind == BT_RT_SEND &&
            (a.send.kind == BT_FROM_ROUTER_DRAIN || a.send.kind == BT_FROM_ROUTER_SET_ROLE)) {
            told[n_told++] = a.session;
        } else if (a.kind == BT_RT_SEND && a.send.kind == BT_FROM_ROUTER_SUBMIT) {
            submitted[n_submitted++] = a.session;
            ticket = a.send.submit.ticket;
        } else if (a.kind == BT_RT_END) {
            n_ends++;
        } else if (a.kind == BT_RT_READY) {
            ready = a.ready;
        }
    }
}

static void begin(void)
{
    const struct bt_rt_opts opts = fixture_opts();

    now = 1000 * MS;
    n_told = n_submitted = n_ends = 0;
    ready = false;
    CHECK_EQ(bt_rt_core_create(&opts, &core), BT_OK);
}

static void end(void)
{
    bt_rt_core_destroy(core);
    CHECK_EQ(bt_test_live_bytes(), 0);
}

static uint64_t join(enum bt_role role, uint64_t instance, const char *name, uint64_t model,
                     uint32_t version)
{
    struct bt_msg_hello h = fixture_hello(role, instance, name);

    h.fingerprint = model;
    h.version_max = version;
    uint64_t session = fixture_join(core, now, &h);

    drain_actions();
    return session;
}

static const char *drain(const char *node, bool force, enum bt_status want, uint64_t instance)
{
    static struct bt_err err;
    uint64_t got = 0;

    err = (struct bt_err){0};
    CHECK_EQ(bt_rt_drain(core, now, node, force, &got, &err), want);
    CHECK_EQ(got, instance);
    drain_actions();
    return err.msg;
}

static void ask(void)
{
    static const uint32_t prompt[] = {1, 2, 3};

    (void)fixture_ask(core, now, prompt, 3, 3, false, BT_OK);
    drain_actions();
}

static void test_drain(void)
{
    begin();
    uint64_t p0 = join(BT_ROLE_PREFILL, 1, "p0", 7, 2);
    uint64_t d0 = join(BT_ROLE_DECODE, 3, "d0", 7, 2);

    CHECK(strstr(drain("p0", false, BT_ERR_INVALID, 0), "the last prefill node") != NULL);
    CHECK(strstr(drain("d0", false, BT_ERR_INVALID, 0), "the last decode node") != NULL);
    CHECK(strstr(drain("d1", false, BT_ERR_NOT_FOUND, 0), "p0, d0") != NULL);
    CHECK(strstr(drain("", false, BT_ERR_NOT_FOUND, 0), "p0, d0") != NULL);
    CHECK_EQ(n_told, 0);
    uint64_t p1 = join(BT_ROLE_PREFILL, 2, "p1", 7, 2);

    (void)drain("p0", false, BT_OK, 1);
    CHECK(n_told == 1 && told[0] == p0 && ready);
    CHECK(strstr(drain("p0", true, BT_ERR_INVALID, 0), "drains already") != NULL);
    CHECK(strstr(drain("p1", false, BT_ERR_INVALID, 0), "the last prefill node") != NULL);
    for (unsigned i = 0; i < 3; i++) {
        ask();
    }
    CHECK_EQ(n_submitted, 6);
    for (size_t i = 0; i < n_submitted; i++) {
        CHECK(submitted[i] == p1 || submitted[i] == d0);
    }
    (void)drain("0000000000000003", true, BT_OK, 3);
    CHECK(n_told == 2 && told[1] == d0 && !ready);
    end();
}

static void test_who(void)
{
    begin();
    (void)join(BT_ROLE_PREFILL, 1, "x-00000003", 7, 2);
    (void)join(BT_ROLE_PREFILL, 2, "x", 7, 2);
    (void)join(BT_ROLE_DECODE, 3, "x", 7, 2); /* a name is one node's, whatever their roles */
    CHECK_STR(bt_rt_core_instance_name(core, 3), "x-00000003");
    CHECK(strstr(drain("x-00000003", false, BT_ERR_INVALID, 0),
                 "0000000000000001 or 0000000000000003") != NULL);
    (void)drain("0000000000000001", false, BT_OK, 1);
    static const char long_name[] = /* what is kept of both is the same */
        "0123456789012345678901234567890123456789012345678901234567890123456789";

    (void)join(BT_ROLE_DECODE, 6, long_name, 7, 2);
    (void)join(BT_ROLE_DECODE, 7, long_name, 7, 2);
    CHECK(strcmp(bt_rt_core_instance_name(core, 6), bt_rt_core_instance_name(core, 7)) != 0);
    (void)join(BT_ROLE_PREFILL, 4, "old", 7, 1);
    CHECK(strstr(drain("old", true, BT_ERR_UNSUPPORTED, 0), "SIGTERM") != NULL);
    (void)join(BT_ROLE_PREFILL, 5, "other", 8, 2); /* another model, not in use: nobody misses it */
    (void)drain("other", false, BT_OK, 5);
    end();
}

static void role_state(uint64_t session, enum bt_role role, enum bt_role leaving)
{
    const struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_ROLE_STATE,
                                     .role_state = {role, leaving}};

    bt_rt_on_message(core, now, session, &m);
    drain_actions();
}

static const char *set_role(const char *node, enum bt_role role, bool force, enum bt_status want,
                            uint64_t instance)
{
    static struct bt_err err;
    uint64_t got = 0;

    err = (struct bt_err){0};
    CHECK_EQ(bt_rt_set_role(core, now, node, role, force, &got, &err), want);
    CHECK_EQ(got, instance);
    drain_actions();
    return err.msg;
}

static const char *state_of(uint64_t instance, enum bt_role *role)
{
    static struct bt_rt_node_info info;

    for (uint32_t pos = 0; bt_rt_core_node(core, &pos, &info);) {
        if (info.instance == instance) {
            *role = info.role;
            return info.state;
        }
    }
    return "";
}

static void test_role(void)
{
    enum bt_role role;

    begin();
    uint64_t p0 = join(BT_ROLE_PREFILL, 1, "p0", 7, 2);

    (void)join(BT_ROLE_PREFILL, 2, "p1", 7, 2);
    (void)join(BT_ROLE_DECODE, 3, "d0", 7, 2);
    CHECK(strstr(set_role("p0", BT_ROLE_PREFILL, false, BT_ERR_INVALID, 0), "prefill already") !=
          NULL);
    CHECK(strstr(set_role("d0", BT_ROLE_PREFILL, false, BT_ERR_INVALID, 0), "the last decode") !=
          NULL);
    CHECK_EQ(n_told, 0);
    (void)set_role("p0", BT_ROLE_DECODE, false, BT_OK, 1);
    CHECK(n_told == 1 && told[0] == p0);
    CHECK(strncmp(state_of(1, &role), "changing", 8) == 0 && role == BT_ROLE_PREFILL);
    CHECK(strstr(set_role("p0", BT_ROLE_BOTH, false, BT_ERR_INVALID, 0), "about to") != NULL);
    CHECK(strstr(set_role("p1", BT_ROLE_DECODE, false, BT_ERR_INVALID, 0), "the last prefill") !=
          NULL);
    ask(); /* nothing for the leg that goes */
    CHECK(n_submitted == 2 && submitted[0] != p0 && submitted[1] != p0);
    role_state(p0, BT_ROLE_DECODE, BT_ROLE_PREFILL);
    CHECK(strstr(state_of(1, &role), "as prefill node") != NULL && role == BT_ROLE_DECODE);
    role_state(p0, BT_ROLE_DECODE, BT_ROLE_BOTH);
    CHECK_STR(state_of(1, &role), "ready");
    (void)set_role("d0", BT_ROLE_PREFILL, false, BT_OK, 3); /* p0 decodes now */
    CHECK(ready);
    end();
}

/* What a node computes in the leg that it gives up is still taken. */
static void test_role_keeps_what_runs(void)
{
    begin();
    uint64_t b = join(BT_ROLE_BOTH, 1, "b", 7, 2);

    ask(); /* its decode leg */
    CHECK(n_submitted == 1 && submitted[0] == b);
    (void)join(BT_ROLE_DECODE, 2, "d", 7, 2);
    (void)set_role("b", BT_ROLE_PREFILL, false, BT_OK, 1);
    role_state(b, BT_ROLE_PREFILL, BT_ROLE_DECODE);
    struct bt_sampled list[3] = {{.token = 1}, {.token = 2}, {.token = 3}};
    struct bt_msg_output o = {.ticket = ticket, .n_tokens = 3, .tokens = list, .finish = 2};
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_OUTPUTS, .outputs = {1, &o}};

    bt_rt_on_message(core, now, b, &m);
    drain_actions();
    CHECK_EQ(n_ends, 1);
    end();
}

static size_t n_gone(const char *name)
{
    struct bt_rt_gone_info g;
    size_t n = 0;

    for (uint32_t pos = 0; bt_rt_core_gone(core, &pos, &g);) {
        n += strcmp(g.name, name) == 0;
    }
    return n;
}

/* Which node is missed is no matter of its role: it may have changed that, and comes back with the one it began with. */
static void test_gone(void)
{
    begin();
    uint64_t n = join(BT_ROLE_PREFILL, 1, "n", 7, 2);

    (void)join(BT_ROLE_PREFILL, 2, "p", 7, 2);
    role_state(n, BT_ROLE_DECODE, BT_ROLE_BOTH);
    bt_rt_on_session_lost(core, now, n, "killed");
    drain_actions();
    CHECK_EQ(n_gone("n"), 1);
    n = join(BT_ROLE_PREFILL, 3, "n", 7, 2);
    CHECK_EQ(n_gone("n"), 0);
    bt_rt_on_session_lost(core, now, n, "killed");
    n = join(BT_ROLE_BOTH, 4, "n", 7, 2);
    role_state(n, BT_ROLE_PREFILL, BT_ROLE_BOTH);
    bt_rt_on_session_lost(core, now, n, "killed");
    CHECK_EQ(n_gone("n"), 1); /* once, also after it died in two roles */
    /* A session is not a node: this one has not died. */
    n = join(BT_ROLE_PREFILL, 5, "n", 7, 2);
    (void)join(BT_ROLE_DECODE, 5, "n", 7, 2);
    CHECK_EQ(n_gone("n"), 0);
    CHECK_STR(bt_rt_core_instance_name(core, 5), "n");
    drain_actions();
    end();
}

int main(void)
{
    test_gone();
    test_role();
    test_role_keeps_what_runs();
    test_drain();
    test_who();
    return bt_test_done();
}
