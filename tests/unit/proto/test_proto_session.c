/* Session messages: what a router refuses to hear from a node, by name. */

#include <math.h>
#include <string.h>
#include "base/arena.h"
#include "base/mem.h"
#include "proto/session.h"
#include "tests/check.h"

static struct bt_arena arena;
static struct bt_buf buf;
static struct bt_err err;

static enum bt_status through(const struct bt_from_daemon *in, struct bt_from_daemon *out)
{
    bt_arena_reset(&arena);
    bt_buf_clear(&buf);
    CHECK_EQ(bt_from_daemon_encode(in, &buf), BT_OK);
    return bt_from_daemon_decode(buf.data, buf.len, &arena, out, &err);
}

static void test_strings(void)
{
    static const struct {
        const char *text;
        bool ok;
    } cases[] = {
        {"", true},          {"node 1/\xc3\xa4", true}, {"a\nb", false},
        {"\x1b[31m", false}, {"\xff\xfe", false},       {"\xed\xa0\x80", false},
    };
    const struct bt_from_daemon hello = {
        .kind = BT_FROM_DAEMON_HELLO,
        .hello = {.version_min = 1, .version_max = 1, .role = BT_ROLE_DECODE, .instance = 1}};

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (unsigned k = 0; k < 6; k++) {
            struct bt_from_daemon in = hello, out;
            const char **field[] = {&in.hello.name,      &in.hello.numerics,
                                    &in.hello.kv_layout, &in.hello.model_name,
                                    &in.hello.backend,   &in.hello.transfer_address};

            *field[k] = cases[i].text;
            CHECK_EQ(through(&in, &out), cases[i].ok ? BT_OK : BT_ERR_PROTOCOL);
            CHECK(cases[i].ok || strstr(err.msg, "hello.") != NULL);
        }
        struct bt_msg_transport t = {1, cases[i].text};
        struct bt_from_daemon in = {.kind = BT_FROM_DAEMON_LOAD,
                                    .load = {.n_transports = 1, .transports = &t}};
        struct bt_from_daemon out;

        CHECK_EQ(through(&in, &out), cases[i].ok ? BT_OK : BT_ERR_PROTOCOL);
    }
}

/* Instance 0 means "no peer" everywhere else. */
static void test_peer_without_instance(void)
{
    struct bt_msg_peer list[2] = {{.instance = 1, .address = "127.0.0.1:1", .name = "a"},
                                  {.instance = 0, .address = "127.0.0.1:2", .name = "b"}};
    struct bt_from_router in = {.kind = BT_FROM_ROUTER_PEERS, .peers = {2, list}}, out;

    bt_arena_reset(&arena);
    bt_buf_clear(&buf);
    CHECK_EQ(bt_from_router_encode(&in, &buf), BT_OK);
    CHECK_EQ(bt_from_router_decode(buf.data, buf.len, &arena, &out, &err), BT_ERR_PROTOCOL);
    CHECK(strstr(err.msg, "peers.instance") != NULL);
}

/* Speeds and times that nobody can have measured count as not measured. */
static void test_measured(void)
{
    static const double bad[] = {NAN, INFINITY, -INFINITY, -1, 1e-300, 1e300};
    struct bt_from_daemon in = {.kind = BT_FROM_DAEMON_LOAD}, out;

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        in.load.prefill_tokens_per_s = in.load.decode_step_ms = bad[i];
        CHECK_EQ(through(&in, &out), BT_OK);
        CHECK(out.load.prefill_tokens_per_s == 0 && out.load.decode_step_ms == 0);
    }
    in.load.waiting_tokens = UINT64_MAX; /* others are added to it */
    in.load.prefill_tokens_per_s = 590;
    in.load.decode_step_ms = 0.01;
    CHECK_EQ(through(&in, &out), BT_OK);
    CHECK(out.load.prefill_tokens_per_s == 590 && out.load.decode_step_ms == 0.01);
    CHECK(out.load.waiting_tokens < UINT64_MAX / 2);
}

/* A report tells of a prefix cache, of nothing new in it, or not at all. */
static void test_prefix_blocks(void)
{
    static uint64_t many[BT_SESSION_BLOCKS_MAX + 1];
    const uint64_t added[2] = {5, UINT64_MAX}, removed[1] = {7};
    struct bt_from_daemon in = {.kind = BT_FROM_DAEMON_LOAD}, out;
    struct bt_msg_prefix_blocks *b = &in.load.prefix_blocks;
    const struct bt_msg_prefix_blocks *got = &out.load.prefix_blocks;

    CHECK_EQ(through(&in, &out), BT_OK);
    CHECK(!got->told);
    b->told = true;
    CHECK_EQ(through(&in, &out), BT_OK);
    CHECK(got->told && !got->reset && got->n_added == 0 && got->n_removed == 0);
    *b = (struct bt_msg_prefix_blocks){true, true, 2, 1, added, removed};
    CHECK_EQ(through(&in, &out), BT_OK);
    CHECK(got->told && got->reset && got->n_added == 2 && got->n_removed == 1);
    CHECK(got->added[1] == UINT64_MAX && got->removed[0] == 7);
    *b = (struct bt_msg_prefix_blocks){true, false, 0, BT_SESSION_BLOCKS_MAX + 1, NULL, many};
    CHECK_EQ(through(&in, &out), BT_ERR_PROTOCOL);
    CHECK(strstr(err.msg, "prefix_blocks") != NULL);
}

/* What lets a prefill node send again what it has: each field arrives, and is absent where it was not set. */
static void test_resend(void)
{
    const uint32_t tokens[2] = {1, 2};
    struct bt_from_router submit = {
        .kind = BT_FROM_ROUTER_SUBMIT,
        .submit = {.n_tokens = 2,
                   .tokens = tokens,
                   .n_prompt = 2,
                   .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 2},
                   .has_replaces = true,
                   .replaces = {{9, 8}}}};
    struct bt_from_router cancel = {.kind = BT_FROM_ROUTER_CANCEL, .cancel = {.keep = true}}, got;

    for (int set = 1; set >= 0; set--) {
        struct bt_msg_output o = {.has_stats = true, .stats = {.resent = set}};
        struct bt_from_daemon outputs = {.kind = BT_FROM_DAEMON_OUTPUTS, .outputs = {1, &o}}, out;
        struct bt_from_daemon end = {.kind = BT_FROM_DAEMON_ATTEMPT_END,
                                     .attempt_end = {.reason = BT_ATTEMPT_RETRY, .kept = set}};
        struct bt_from_daemon load = {.kind = BT_FROM_DAEMON_LOAD, .load = {.pages_short = set}};

        submit.submit.has_replaces = set;
        cancel.cancel.keep = set;
        bt_buf_clear(&buf);
        CHECK_EQ(bt_from_router_encode(&submit, &buf), BT_OK);
        CHECK_EQ(bt_from_router_decode(buf.data, buf.len, &arena, &got, &err), BT_OK);
        CHECK_EQ(got.submit.has_replaces, set);
        CHECK(!set || bt_ticket_equal(&got.submit.replaces, &submit.submit.replaces));
        bt_buf_clear(&buf);
        CHECK_EQ(bt_from_router_encode(&cancel, &buf), BT_OK);
        CHECK_EQ(bt_from_router_decode(buf.data, buf.len, &arena, &got, &err), BT_OK);
        CHECK_EQ(got.cancel.keep, set);
        CHECK_EQ(through(&outputs, &out), BT_OK);
        CHECK_EQ(out.outputs.outputs[0].stats.resent, set);
        CHECK_EQ(through(&end, &out), BT_OK);
        CHECK_EQ(out.attempt_end.kept, set);
        CHECK_EQ(through(&load, &out), BT_OK);
        CHECK_EQ(out.load.pages_short, set);
    }
}

/* Gate tokens: 16 bytes arrive as they are, none as none, other lengths are refused by name. */
static void test_gate_tokens(void)
{
    static const uint32_t tokens[] = {5};
    const struct bt_gate_token secret = {"0123456789abcde"}, none = {{0}};
    struct bt_from_daemon hello = {.kind = BT_FROM_DAEMON_HELLO,
                                   .hello = {.role = BT_ROLE_DECODE, .instance = 1}},
                          hello_out;
    struct bt_msg_peer peer = {.instance = 1};
    struct bt_from_router out,
        in[] = {{.kind = BT_FROM_ROUTER_PEERS, .peers = {1, &peer}},
                {.kind = BT_FROM_ROUTER_SUBMIT,
                 .submit = {.n_tokens = 1,
                            .tokens = tokens,
                            .n_prompt = 1,
                            .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 1}}}};

    for (unsigned set = 0; set < 2; set++) {
        const struct bt_gate_token *want = set ? &secret : &none;

        hello.hello.gate_token = peer.gate_token = in[1].submit.peer_gate_token = *want;
        CHECK_EQ(through(&hello, &hello_out), BT_OK);
        CHECK(bt_gate_token_equal(&hello_out.hello.gate_token, want));
        for (unsigned i = 0; i < 2; i++) {
            bt_buf_clear(&buf);
            CHECK_EQ(bt_from_router_encode(&in[i], &buf), BT_OK);
            CHECK_EQ(bt_from_router_decode(buf.data, buf.len, &arena, &out, &err), BT_OK);
            CHECK(bt_gate_token_equal(
                i == 0 ? &out.peers.peers[0].gate_token : &out.submit.peer_gate_token, want));
        }
    }
    CHECK(bt_gate_token_is_set(&secret) && !bt_gate_token_is_set(&none));
    /* FromDaemon{hello{role "both", instance 1, gate_token of 3 bytes}}, FromRouter{peers{peer{instance 1, gate_token}}} */
    static const uint8_t short_hello[] = "\x0a\x15\x1a\x04"
                                         "both"
                                         "\x21\1\0\0\0\0\0\0\0\xa2\x01\x03"
                                         "abc";
    static const uint8_t short_peer[] = "\x22\x10\x0a\x0e\x09\1\0\0\0\0\0\0\0\x22\x03"
                                        "abc";

    CHECK_EQ(bt_from_daemon_decode(short_hello, sizeof short_hello - 1, &arena, &hello_out, &err),
             BT_ERR_PROTOCOL);
    CHECK(strstr(err.msg, "hello.gate_token") != NULL);
    CHECK_EQ(bt_from_router_decode(short_peer, sizeof short_peer - 1, &arena, &out, &err),
             BT_ERR_PROTOCOL);
    CHECK(strstr(err.msg, "peers.gate_token") != NULL);
}

static void test_trace_ids(void)
{
    static const uint32_t tokens[] = {5};
    static const struct {
        const char *id;
        bool ok;
    } cases[] = {{"", true},
                 {"4bf92f3577b34da6a3ce929d0e0e4736", true},
                 {"4bf92f3577b34da6a3ce929d0e0e47361", false},
                 {"4bf92f3577b34da6a3ce929d0e0e473", false},
                 {"4BF92F3577B34DA6A3CE929D0E0E4736", false},
                 {"00000000000000000000000000000000", false},
                 {"4bf92f3577b34da6a3ce929d0e0e\n736", false}};

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct bt_from_router in = {.kind = BT_FROM_ROUTER_SUBMIT,
                                    .submit = {.n_tokens = 1,
                                               .tokens = tokens,
                                               .n_prompt = 1,
                                               .sampling = {.top_p = 1,
                                                            .repetition_penalty = 1,
                                                            .max_tokens = 1},
                                               .trace_id = cases[i].id}},
                              out;

        bt_buf_clear(&buf);
        CHECK_EQ(bt_from_router_encode(&in, &buf), BT_OK);
        CHECK_EQ(bt_from_router_decode(buf.data, buf.len, &arena, &out, &err),
                 cases[i].ok ? BT_OK : BT_ERR_PROTOCOL);
        CHECK(!cases[i].ok || strcmp(out.submit.trace_id, cases[i].id) == 0);
        CHECK(cases[i].ok || strstr(err.msg, "submit.trace_id") != NULL);
    }
}

static void test_roles(void)
{
    for (enum bt_role r = BT_ROLE_PREFILL; r <= BT_ROLE_BOTH; r++) {
        enum bt_role other = r == BT_ROLE_PREFILL ? BT_ROLE_DECODE : BT_ROLE_PREFILL, parsed;
        struct bt_from_daemon in = {.kind = BT_FROM_DAEMON_ROLE_STATE,
                                    .role_state = {r, BT_ROLE_BOTH}};
        struct bt_from_daemon out;
        struct bt_from_router to = {.kind = BT_FROM_ROUTER_SET_ROLE, .set_role = r}, back;

        CHECK(bt_role_parse(bt_role_name(r), &parsed) && parsed == r);
        CHECK_EQ(through(&in, &out), BT_OK);
        CHECK(out.role_state.role == r && out.role_state.leaving == BT_ROLE_BOTH);
        in.role_state.leaving = other;
        CHECK_EQ(through(&in, &out), (r == BT_ROLE_BOTH ? BT_ERR_PROTOCOL : BT_OK));
        bt_buf_clear(&buf);
        CHECK_EQ(bt_from_router_encode(&to, &buf), BT_OK);
        CHECK_EQ(bt_from_router_decode(buf.data, buf.len, &arena, &back, &err), BT_OK);
        CHECK(back.kind == BT_FROM_ROUTER_SET_ROLE && back.set_role == r);
    }
    CHECK(!bt_role_has(BT_ROLE_PREFILL, BT_ROLE_DECODE) &&
          bt_role_has(BT_ROLE_BOTH, BT_ROLE_DECODE));
}

/* A submit says for which leg it is; one of version 1 does not. */
static void test_leg(void)
{
    static const uint32_t tokens[] = {5};

    for (enum bt_role leg = BT_ROLE_PREFILL; leg <= BT_ROLE_BOTH; leg++) {
        struct bt_from_router in = {.kind = BT_FROM_ROUTER_SUBMIT,
                                    .submit = {.leg = leg,
                                               .n_tokens = 1,
                                               .tokens = tokens,
                                               .n_prompt = 1,
                                               .sampling = {.top_p = 1,
                                                            .repetition_penalty = 1,
                                                            .max_tokens = 1}}},
                              out;

        bt_buf_clear(&buf);
        CHECK_EQ(bt_from_router_encode(&in, &buf), BT_OK);
        CHECK_EQ(bt_from_router_decode(buf.data, buf.len, &arena, &out, &err), BT_OK);
        CHECK_EQ(out.submit.leg, leg);
    }
}

int main(void)
{
    bt_arena_init(&arena, (size_t)4 << 20);
    test_strings();
    test_measured();
    test_prefix_blocks();
    test_gate_tokens();
    test_trace_ids();
    test_roles();
    test_leg();
    test_peer_without_instance();
    test_resend();
    bt_arena_fini(&arena);
    bt_buf_fini(&buf);
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
