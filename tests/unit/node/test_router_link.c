/* Sessions of a daemon when the names of its routers resolve to other addresses over time: the table does not fill, a session
 * that is up outlives its address in DNS, and an address without either is forgotten. Against a whole router. */

#include <string.h>
#include "base/clock.h"
#include "base/mem.h"
#include "net/addr.h"
#include "node/router_link.h"
#include "tests/check.h"
#include "tests/unit/router/fake_cluster.h"

struct seen {
    uint32_t n_up, n_lost;
};

static void load(void *arg, uint32_t router, struct bt_msg_load *out)
{
    (void)arg;
    (void)router;
    *out = (struct bt_msg_load){0};
}

static void on_up(void *arg, uint32_t router)
{
    struct seen *s = arg;

    (void)router;
    s->n_up++;
}

static void on_lost(void *arg, uint32_t router)
{
    struct seen *s = arg;

    (void)router;
    s->n_lost++;
}

static void on_message(void *arg, uint32_t router, const struct bt_from_router *m)
{
    (void)arg;
    (void)router;
    (void)m;
}

static struct bt_router_link *start(struct fake_cluster *c, struct seen *s)
{
    struct bt_router_link_opts o = {
        .routers = c->sessions,
        .hello = {.version_min = BT_SESSION_VERSION_MIN,
                  .version_max = BT_SESSION_VERSION_MAX,
                  .role = BT_ROLE_DECODE,
                  .instance = 4711,
                  .name = "linked",
                  .numerics = "",
                  .kv_layout = "",
                  .model_name = "",
                  .transfer_address = "",
                  .backend = ""},
        .heartbeat_ns = 100 * BT_NS_PER_MS,
        .lease_ns = 10 * BT_NS_PER_S,
        .arg = s,
        .load = load,
        .on_up = on_up,
        .on_lost = on_lost,
        .on_message = on_message,
    };
    struct bt_router_link *r = NULL;
    struct bt_err err = {0};

    CHECK_EQ(bt_router_link_create(c->loop, &o, &r, &err), BT_OK);
    return r;
}

static uint32_t n_addresses(const struct bt_router_link *r)
{
    uint32_t n = 0;
    bool up;

    for (uint32_t i = 0; i < BT_ROUTERS_MAX; i++) {
        n += bt_router_link_address(r, i, &up) != NULL;
    }
    return n;
}

static bool knows(const struct bt_router_link *r, const char *address)
{
    for (uint32_t i = 0; i < BT_ROUTERS_MAX; i++) {
        bool up;
        const char *a = bt_router_link_address(r, i, &up);

        if (a != NULL && strcmp(a, address) == 0) {
            return true;
        }
    }
    return false;
}

/* Nobody listens there. */
static struct bt_hostport elsewhere(uint32_t i)
{
    char text[32];
    struct bt_hostport hp;
    struct bt_err err = {0};

    snprintf(text, sizeof text, "127.1.%u.%u:1", i / 200, 1 + i % 200);
    CHECK_EQ(bt_hostport_parse(text, -1, &hp, &err), BT_OK);
    return hp;
}

int main(void)
{
    static struct fake_cluster c;
    struct seen seen = {0}, other = {0};
    struct bt_hostport addrs[4], router;
    struct bt_err err = {0};

    fake_start(&c, 1, 1);
    CHECK_EQ(bt_hostport_parse(c.sessions, -1, &router, &err), BT_OK);
    struct bt_router_link *r = start(&c, &seen);

    FAKE_UNTIL(&c, bt_router_link_up(r) == 1);
    /* 100 times four other addresses: more than there are places by far. */
    for (uint32_t round = 0; round < 100; round++) {
        for (uint32_t i = 0; i < 4; i++) {
            addrs[i] = elsewhere(3 * round + i); /* one stays */
        }
        bt_router_link_resolved(r, 0, addrs, 4);
        CHECK(n_addresses(r) <= 1 + 2 * 4); /* those that are just dialled take a moment */
        FAKE_UNTIL(&c, n_addresses(r) == 1 + 4);
        CHECK(knows(r, c.sessions)); /* its session is up */
    }
    CHECK_EQ(bt_router_link_up(r), 1);
    CHECK_EQ(seen.n_up, 1);
    CHECK_EQ(seen.n_lost, 0);
    /* Back in DNS: nothing to do. Gone again, and the session ends: forgotten. */
    addrs[3] = router;
    bt_router_link_resolved(r, 0, addrs, 4);
    FAKE_UNTIL(&c, n_addresses(r) == 4);
    bt_router_link_resolved(r, 0, addrs, 3);
    CHECK(knows(r, c.sessions));
    struct bt_router_link *twin =
        start(&c, &other); /* the same instance: the router ends the first session */

    FAKE_UNTIL(&c, seen.n_lost == 1 && !knows(r, c.sessions));
    CHECK_EQ(n_addresses(r), 3);
    CHECK_EQ(bt_router_link_up(twin), 1);
    bt_router_link_destroy(r);
    bt_router_link_destroy(twin);
    fake_stop(&c);
    CHECK_EQ(bt_test_live_bytes(), 0);
    CHECK_EQ(fake_failures(), 0);
    return bt_test_done();
}
