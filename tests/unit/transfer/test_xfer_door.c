/* Who is due at the kernel's filters: many at once, those whose connection is up, and the limits. No sockets here: what the
 * filters do is in test_xfer_gate.c. */

#include <string.h>
#include "base/mem.h"
#include "tests/check.h"
#include "transfer/xfer_door.h"

#define S UINT64_C(1000000000)

static struct xfer_door door;

/* k addresses of a machine, IPv4 or 6. */
static uint32_t addresses(uint32_t machine, uint32_t k, uint8_t family, struct xfer_ip *out)
{
    memset(out, 0, (XFER_IPS_MAX + 1) * sizeof(*out));
    for (uint32_t i = 0; i < k; i++) {
        out[i].family = family;
        memcpy(out[i].b, &machine, sizeof(machine));
        out[i].b[family == 4 ? 3 : 15] = (uint8_t)i;
    }
    return k;
}

static bool expect(uint64_t instance, uint32_t machine, uint32_t k, uint8_t family, uint64_t now)
{
    struct xfer_ip ips[XFER_IPS_MAX + 1];
    uint32_t n = addresses(machine, k, family, ips);
    return xfer_door_expect(&door, instance, ips, n, now + 5 * S);
}

static bool is_due(uint64_t instance)
{
    for (uint32_t i = 0; i < door.n_due; i++) {
        if (door.due[i].instance == instance) {
            return true;
        }
    }
    return false;
}

/* A fleet comes back at once to a decode node that started again: nobody waits, and nobody is in the way once it is up. */
static void test_fleet(void)
{
    memset(&door, 0, sizeof(door));
    for (uint32_t i = 1; i <= 100; i++) {
        CHECK(expect(i, i, 4, 4, 0)); /* all announce themselves before the first arrives */
    }
    CHECK_EQ(door.n_due, 100);
    for (uint32_t i = 1; i <= 100; i++) {
        CHECK(xfer_door_arrived(&door, i));
        CHECK(!xfer_door_arrived(&door, i)); /* once */
    }
    for (uint32_t i = 1; i <= 1000; i++) { /* a stream of them, each up before the next comes */
        CHECK(expect(1000 + i, i, 4, 4, S));
        CHECK(xfer_door_arrived(&door, 1000 + i));
        xfer_door_up(&door, 1000 + i, S);
    }
    for (uint32_t i = 1; i <= 100; i++) {
        CHECK(is_due(i)); /* those that are not up were never the ones to go */
    }
    CHECK(is_due(2000) && !is_due(1001));
}

/* It is for the connections that begin, and short. */
static void test_up_ends_it(void)
{
    memset(&door, 0, sizeof(door));
    CHECK(expect(1, 1, 2, 4, 0) && expect(2, 2, 2, 6, 0));
    CHECK_EQ(xfer_door_deadline(&door), 5 * S);
    xfer_door_up(&door, 1, S);
    CHECK_EQ(xfer_door_deadline(&door), S + DOOR_UP_NS);
    xfer_door_up(&door, 1, 2 * S); /* once */
    CHECK(!xfer_door_step(&door, S + DOOR_UP_NS - 1));
    CHECK(xfer_door_step(&door, S + DOOR_UP_NS));
    CHECK(!is_due(1) && is_due(2));
    xfer_door_up(&door, 2, 5 * S - 1); /* it does not last longer by that */
    CHECK(xfer_door_step(&door, 5 * S) && door.n_due == 0);
    CHECK(expect(1, 1, 2, 4, 6 * S)); /* it comes again: all from the beginning */
    xfer_door_up(&door, 1, 6 * S);
    CHECK(expect(1, 1, 2, 4, 7 * S));
    CHECK_EQ(door.n_due, 1);
    CHECK_EQ(xfer_door_deadline(&door), 12 * S);
    CHECK(xfer_door_arrived(&door, 1));
}

/* The limits: so many nodes, and so many addresses, those of one machine counted once. */
static void test_limits(void)
{
    memset(&door, 0, sizeof(door));
    for (uint32_t i = 1; i <= DOOR_DUE_MAX; i++) {
        CHECK(expect(i, 7, XFER_IPS_MAX + 1, 4, 0));
    }
    CHECK(!expect(1000, 7, 1, 4, 0));
    CHECK(expect(5, 7, 1, 4, S)); /* one that is due already takes no other place */
    xfer_door_up(&door, 9, S);
    CHECK(expect(1000, 7, 1, 4, S) && is_due(1000) && !is_due(9));

    static const struct {
        uint8_t family;
        uint32_t fits;
    } sides[] = {{4, 600}, {6, 200}};
    for (unsigned side = 0; side < 2; side++) {
        uint32_t n = 0;
        memset(&door, 0, sizeof(door));
        while (n < 1000 && expect(1 + n, 1 + n, 20, sides[side].family, 0)) {
            n++;
        }
        CHECK(n * 20 >= sides[side].fits && n < 100);
        CHECK_EQ(door.n_due, n); /* the refused one left nothing */
        xfer_door_up(&door, 1, 0);
        CHECK(expect(2000, 2000, 20, sides[side].family, 0));
        CHECK(!is_due(1) && is_due(2) && door.n_due == n);
        CHECK(!expect(2001, 2001, 20, sides[side].family, 0));
    }
}

int main(void)
{
    test_fleet();
    test_up_ends_it();
    test_limits();
    xfer_door_fini(&door);
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
