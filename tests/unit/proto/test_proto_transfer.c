/* Control messages between a pair: each kind through the wire and back, and what is refused, by name. */

#include <string.h>
#include "base/arena.h"
#include "proto/transfer.h"
#include "tests/check.h"

static struct bt_arena arena;
static struct bt_buf buf;
static struct bt_err err;

static struct bt_control sample(enum bt_control_kind kind)
{
    struct bt_control m = {.kind = kind};

    memcpy(m.ticket.b, "0123456789abcdef", BT_TICKET_BYTES);
    m.generation = kind == BT_CONTROL_STARTED || kind == BT_CONTROL_REFUSE ? 0 : UINT64_C(1) << 40;
    if (kind == BT_CONTROL_STARTED) {
        m.started.n_tokens = 77;
    } else if (kind == BT_CONTROL_GRANT) {
        m.grant.n_groups = 2;
        m.grant.first_page[1] = 3;
    } else if (kind == BT_CONTROL_REFUSE) {
        m.refuse.reason = 2;
        m.refuse.text = "no room";
    } else if (kind == BT_CONTROL_REVOKE) {
        m.revoke.reason = 4;
    } else if (kind == BT_CONTROL_HANDOFF) {
        m.handoff.index = 1;
        m.handoff.first.token = 5;
        m.handoff.n_groups = 2;
        m.handoff.n_shares[1] = 8;
    }
    return m;
}

static void test_round_trip(void)
{
    for (enum bt_control_kind k = BT_CONTROL_STARTED; k < BT_CONTROL_KINDS; k++) {
        struct bt_control in = sample(k), out;

        bt_arena_reset(&arena);
        bt_buf_clear(&buf);
        CHECK_EQ(bt_control_encode(&in, &buf), BT_OK);
        CHECK_EQ(bt_control_decode(buf.data, buf.len, &arena, &out, &err), BT_OK);
        CHECK_EQ(out.kind, k);
        CHECK(bt_ticket_equal(&in.ticket, &out.ticket));
        CHECK_EQ(out.generation, in.generation);
        CHECK(bt_control_name(k)[0] != '\0');
        if (k == BT_CONTROL_STARTED) {
            CHECK_EQ(out.started.n_tokens, 77);
        } else if (k == BT_CONTROL_GRANT) {
            CHECK_EQ(out.grant.n_groups, 2);
            CHECK_EQ(out.grant.first_page[1], 3);
        } else if (k == BT_CONTROL_REFUSE) {
            CHECK_EQ(out.refuse.reason, 2);
            CHECK_STR(out.refuse.text, "no room");
        } else if (k == BT_CONTROL_REVOKE) {
            CHECK_EQ(out.revoke.reason, 4);
        } else if (k == BT_CONTROL_HANDOFF) {
            CHECK_EQ(out.handoff.first.token, 5);
            CHECK_EQ(out.handoff.n_shares[1], 8);
        }
    }
}

static void test_direction(void)
{
    for (enum bt_control_kind k = BT_CONTROL_STARTED; k < BT_CONTROL_KINDS; k++) {
        bool up = k == BT_CONTROL_GRANT || k == BT_CONTROL_REFUSE || k == BT_CONTROL_REVOKE ||
                  k == BT_CONTROL_DONE;

        CHECK_EQ(bt_control_from_prefill(k), !up);
    }
}

/* One message of a later version, one with half a ticket, one with none. */
static void test_refused(void)
{
    static const struct {
        uint8_t bytes[16];
        size_t n;
        const char *why;
    } cases[] = {
        {{0x7a, 2, 0x10, 5}, 4, "no known message"},
        {{0x42, 10, 0x0a, 8, 1, 2, 3, 4, 5, 6, 7, 8}, 12, "ticket: must be 16 bytes"},
        {{0x42, 2, 0x10, 5}, 4, "ticket: must be 16 bytes"},
        {{0x42, 20, 0x0a, 16}, 4, "not a Control message"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct bt_control out;

        bt_arena_reset(&arena);
        CHECK_EQ(bt_control_decode(cases[i].bytes, cases[i].n, &arena, &out, &err),
                 BT_ERR_PROTOCOL);
        CHECK(strstr(err.msg, cases[i].why) != NULL);
    }
}

int main(void)
{
    bt_arena_init(&arena, 1 << 20);
    test_round_trip();
    test_direction();
    test_refused();
    bt_buf_fini(&buf);
    bt_arena_fini(&arena);
    return bt_test_done();
}
