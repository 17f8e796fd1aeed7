/* Address texts, and names resolved on the pool. */

#include "net/addr.h"

#include <netinet/in.h>
#include <arpa/inet.h>

#include "net/loop.h"
#include "base/clock.h"
#include "tests/check.h"

static void good(const char *text, int dflt, const char *host, unsigned port, const char *back)
{
    struct bt_hostport hp;
    struct bt_err err;
    char out[BT_ADDR_TEXT_MAX];

    CHECK_EQ(bt_hostport_parse(text, dflt, &hp, &err), BT_OK);
    CHECK_STR(hp.host, host);
    CHECK_EQ(hp.port, port);
    CHECK_STR(bt_hostport_text(&hp, out), back);
}

static void bad(const char *text)
{
    struct bt_hostport hp;
    struct bt_err err = {.msg = ""};

    CHECK_EQ(bt_hostport_parse(text, -1, &hp, &err), BT_ERR_INVALID);
    CHECK(err.msg[0] != '\0');
}

static bool loopback(const char *text)
{
    struct bt_hostport hp;

    CHECK_EQ(bt_hostport_parse(text, 1, &hp, NULL), BT_OK);
    return bt_hostport_is_loopback(&hp);
}

static void test_sockaddr(void)
{
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(80)};
    struct sockaddr_in6 in6 = {
        .sin6_family = AF_INET6, .sin6_port = htons(81), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    struct bt_hostport hp;
    char out[BT_ADDR_TEXT_MAX];

    in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    bt_hostport_from_sockaddr((const struct sockaddr *)&in, &hp);
    CHECK_STR(bt_hostport_text(&hp, out), "127.0.0.1:80");
    bt_hostport_from_sockaddr((const struct sockaddr *)&in6, &hp);
    CHECK_STR(bt_hostport_text(&hp, out), "[::1]:81");
}

struct resolved {
    int calls;
    enum bt_status st;
    size_t n;
    struct bt_hostport first;
};

static void on_resolved(void *arg, enum bt_status st, const struct bt_hostport *addrs, size_t n,
                        const char *why)
{
    struct resolved *r = arg;

    (void)why;
    r->calls++;
    r->st = st;
    r->n = n;
    if (n > 0) {
        r->first = addrs[0];
    }
}

static void test_resolve(void)
{
    struct bt_net_loop *l = NULL;
    struct resolved r = {.calls = 0};
    struct bt_hostport hp;

    CHECK_EQ(bt_net_loop_create(&l), BT_OK);
    CHECK_EQ(bt_hostport_parse("127.0.0.1:99", -1, &hp, NULL), BT_OK);
    CHECK_EQ(bt_net_resolve(l, &hp, on_resolved, &r), BT_OK);
    for (int i = 0; i < 100 && r.calls == 0; i++) {
        bt_net_loop_step(l, 50 * BT_NS_PER_MS);
    }
    CHECK_EQ(r.calls, 1);
    CHECK_EQ(r.st, BT_OK);
    CHECK_EQ(r.n, 1);
    CHECK_STR(r.first.host, "127.0.0.1");
    CHECK_EQ(r.first.port, 99);
    bt_net_loop_destroy(l);
}

int main(void)
{
    struct bt_hostport hp;

    good("host:8080", -1, "host", 8080, "host:8080");
    good("127.0.0.1:0", -1, "127.0.0.1", 0, "127.0.0.1:0");
    good("[::1]:65535", -1, "::1", 65535, "[::1]:65535");
    good("[fe80::2]", 7, "fe80::2", 7, "[fe80::2]:7");
    good(":9", -1, "0.0.0.0", 9, "0.0.0.0:9");
    good("a.example", 443, "a.example", 443, "a.example:443");
    bad("http://127.0.0.1:80");
    bad("");
    bad("host");
    bad("host:");
    bad("host:x");
    bad("host:65536");
    bad("host:-1");
    bad("host:123456");
    bad("::1:80");
    bad("[::1:80");
    bad("[::1]x");
    bad("[host]:1");
    bad("a b:1");
    bad("http://a:1");
    CHECK(loopback("127.1.2.3:1") && loopback("localhost:1") && loopback("[::1]:1"));
    CHECK(loopback("[::ffff:127.0.0.1]:1") && !loopback("10.0.0.1:1") && !loopback("[::2]:1") &&
          !loopback("x:1"));
    CHECK_EQ(bt_hostport_parse(":1", -1, &hp, NULL), BT_OK);
    CHECK(bt_hostport_is_any(&hp));
    test_sockaddr();
    test_resolve();
    return bt_test_done();
}
