/* Strangers at D's ports, over UCX: zeros, garbage, half a greeting, somebody else's greeting, a flood of silent
 * connections, and UCX's own ports behind the gate. None of them reaches UCX; all are counted; peers come and go meanwhile. */

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include "tests/unit/transfer/xfer_util.h"
#include "transfer/xfer_wire.h"

/* A connection to an address "HOST:PORT" of IPv4; -1: refused, or no answer within ms. */
static int call(const char *address, int ms)
{
    char host[80];
    struct sockaddr_in a = {.sin_family = AF_INET};
    snprintf(host, sizeof(host), "%s", address);
    char *colon = strrchr(host, ':');
    *colon = 0;
    a.sin_port = htons((uint16_t)strtoul(colon + 1, NULL, 10));
    CHECK_EQ(inet_pton(AF_INET, host, &a.sin_addr), 1);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int e = connect(fd, (struct sockaddr *)&a, sizeof(a)) == 0 ? 0 : errno;
    socklen_t len = sizeof(e);
    struct pollfd p = {.fd = fd, .events = POLLOUT};
    if (e == EINPROGRESS && poll(&p, 1, ms) == 1) {
        CHECK_EQ(getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &len), 0);
    }
    if (e != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Waits until the other end closes; what it said. */
static size_t hear(int fd, uint8_t *out, size_t cap)
{
    size_t n = 0;
    for (;;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        CHECK_EQ(poll(&p, 1, WAIT_MS), 1);
        ssize_t k = recv(fd, out + n, cap - n, 0);
        if (k <= 0) {
            close(fd);
            return n;
        }
        n += (size_t)k;
    }
}

static struct bt_xfer_stats stats(const struct side *s)
{
    struct bt_xfer_stats st;
    bt_xfer_stats(s->x, &st);
    return st;
}

/* The thread publishes its counters at the end of a round. */
static bool counted(const struct side *s, size_t offset, uint64_t want)
{
    uint64_t end = bt_clock_ns() + WAIT_MS * BT_NS_PER_MS;
    for (;;) {
        struct bt_xfer_stats st = stats(s);
        uint64_t v;
        memcpy(&v, (const uint8_t *)&st + offset, sizeof(v));
        if (v >= want) {
            return v == want;
        }
        if (bt_clock_ns() > end) {
            return false;
        }
        usleep(1000);
    }
}
#define COUNTED(side, field, want) CHECK(counted(side, offsetof(struct bt_xfer_stats, field), want))

static struct xfer_knock knock_of(const struct side *d)
{
    struct xfer_knock k = {
        .instance = 77,
        .hello = {.expect = d->instance,
                  .token = test_token,
                  .version_min = XFER_VERSION_MIN,
                  .version_max = XFER_VERSION_MAX,
                  .fingerprint = "tiny/f32/v1",
                  .layout = "k16v16"},
    };
    return k;
}

/* Says the first n bytes of a knock, and ends. */
static size_t say(const struct side *d, const struct xfer_knock *k, size_t n,
                  uint8_t out[XFER_ANSWER_BYTES])
{
    uint8_t bytes[XFER_KNOCK_BYTES];
    int fd = call(bt_xfer_address(d->x), WAIT_MS);
    CHECK(fd >= 0);
    xfer_knock_encode(k, bytes);
    CHECK_EQ(send(fd, bytes, n, MSG_NOSIGNAL), (ssize_t)n);
    shutdown(fd, SHUT_WR);
    return hear(fd, out, XFER_ANSWER_BYTES);
}

static void join_works(const struct world *w, struct side *d, uint64_t instance)
{
    struct bt_xfer_opts op = {0};
    struct side p;
    struct bt_xfer_event ev;
    uint64_t pd, dp;
    side_start(&p, w, &op, instance, false);
    CHECK(join(&p, d, &pd, &dp));
    CHECK_EQ(bt_xfer_send_ctrl(p.x, pd, "hello", 5), BT_OK);
    CHECK(side_wait(d, BT_XFER_CTRL, &ev, WAIT_MS));
    CHECK(ev.peer == dp && ev.instance == instance);
    bt_xfer_event_free(&ev);
    side_stop(&p);
    CHECK(side_wait(d, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
}

static void test_strangers(const struct world *w)
{
    static const char http[] = "GET / HTTP/1.1\r\nhost: x\r\n\r\n";
    struct bt_xfer_opts od = {0};
    struct side d;
    uint8_t zeros[4096] = {0}, out[XFER_ANSWER_BYTES];
    side_start(&d, w, &od, 2, true);
    uint64_t n = 0;

    static const size_t sizes[] = {1, 17, 64, 4096};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        int fd = call(bt_xfer_address(d.x), WAIT_MS);
        CHECK_EQ(send(fd, zeros, sizes[i], MSG_NOSIGNAL), (ssize_t)sizes[i]);
        CHECK_EQ(hear(fd, out, sizeof(out)), 0);
        COUNTED(&d, gate_garbage, ++n);
    }
    int fd = call(bt_xfer_address(d.x), WAIT_MS);
    CHECK_EQ(send(fd, http, sizeof(http), MSG_NOSIGNAL), (ssize_t)sizeof(http));
    CHECK_EQ(hear(fd, out, sizeof(out)), 0);
    COUNTED(&d, gate_garbage, ++n);
    close(call(bt_xfer_address(d.x), WAIT_MS)); /* a port scan */
    COUNTED(&d, gate_garbage, ++n);
    struct xfer_knock k = knock_of(&d);
    CHECK_EQ(say(&d, &k, XFER_KNOCK_BYTES - 1, out), 0); /* ended before it was whole */
    COUNTED(&d, gate_garbage, ++n);
    fd = call(bt_xfer_address(d.x), WAIT_MS); /* says nothing, for ever */
    CHECK_EQ(hear(fd, out, sizeof(out)), 0);
    COUNTED(&d, gate_slow, 1);
    CHECK_EQ(stats(&d).gate_refused, 0);
    join_works(w, &d, 1);
    side_stop(&d);
}

/* Greetings that are whole, and do not belong here. */
static void test_refused(const struct world *w)
{
    struct bt_xfer_opts od = {0};
    struct side d;
    struct xfer_answer a;
    uint8_t out[XFER_ANSWER_BYTES];
    uint64_t n = 0;
    side_start(&d, w, &od, 0x1122334455667788, true);

    struct xfer_knock k = knock_of(&d);
    k.hello.expect ^= 1;
    CHECK_EQ(say(&d, &k, XFER_KNOCK_BYTES, out), XFER_ANSWER_BYTES);
    CHECK(xfer_answer_decode(out, &a) && a.verdict == XFER_NO_INSTANCE && a.port == 0);
    COUNTED(&d, gate_refused, ++n);
    for (unsigned bit = 0; bit < 128;
         bit += 5) { /* anybody may know the instance; this is the proof */
        k = knock_of(&d);
        k.hello.token.b[bit / 8] ^= (uint8_t)(1u << bit % 8);
        CHECK_EQ(say(&d, &k, XFER_KNOCK_BYTES, out), XFER_ANSWER_BYTES);
        CHECK(xfer_answer_decode(out, &a) && a.verdict == XFER_NO_TOKEN && a.port == 0);
        CHECK(strstr(a.text, "gate token") != NULL);
        CHECK(memmem(out, sizeof(out), test_token.b, 4) == NULL);
        COUNTED(&d, gate_refused, ++n);
    }
    k = knock_of(&d);
    k.hello.expect = 0; /* nobody in particular: not even a greeting */
    CHECK_EQ(say(&d, &k, XFER_KNOCK_BYTES, out), 0);
    COUNTED(&d, gate_garbage, 1);
    k = knock_of(&d);
    snprintf(k.hello.layout, sizeof(k.hello.layout), "k8v8");
    CHECK_EQ(say(&d, &k, XFER_KNOCK_BYTES, out), XFER_ANSWER_BYTES);
    CHECK(xfer_answer_decode(out, &a) && a.verdict == XFER_NO_MODEL);
    CHECK(strstr(a.text, "k8v8") != NULL && strstr(a.text, "k16v16") != NULL);
    COUNTED(&d, gate_refused, ++n);
    k = knock_of(&d);
    k.hello.version_min = k.hello.version_max = XFER_VERSION_MAX + 1;
    CHECK_EQ(say(&d, &k, XFER_KNOCK_BYTES, out), XFER_ANSWER_BYTES);
    CHECK(xfer_answer_decode(out, &a) && a.verdict == XFER_NO_VERSION);
    COUNTED(&d, gate_refused, ++n);
    k = knock_of(&d);
    CHECK_EQ(say(&d, &k, XFER_KNOCK_BYTES, out), XFER_ANSWER_BYTES); /* right, and then silent */
    CHECK(xfer_answer_decode(out, &a) && a.verdict == XFER_ENTER && a.port != 0);
    join_works(w, &d, 1);
    side_stop(&d);
}

/* An answer that is given before the greeting has been read is not taken back by a reset when the rest of it comes. */
static void test_answered_early(const struct world *w)
{
    struct bt_xfer_opts od = {0};
    struct side d;
    struct xfer_answer a;
    uint8_t bytes[XFER_KNOCK_BYTES], out[XFER_ANSWER_BYTES];
    side_start(&d, w, &od, 2, true);
    struct xfer_knock k = knock_of(&d);
    xfer_knock_encode(&k, bytes);
    bytes[4]++; /* the version */
    for (int i = 0; i < 10; i++) {
        int fd = call(bt_xfer_address(d.x), WAIT_MS);
        struct pollfd p = {.fd = fd, .events = POLLIN};
        CHECK_EQ(send(fd, bytes, 6, MSG_NOSIGNAL), 6);
        CHECK_EQ(poll(&p, 1, WAIT_MS), 1);
        for (int more = 0; more < 3; more++) {
            CHECK_EQ(send(fd, bytes, sizeof(bytes), MSG_NOSIGNAL), (ssize_t)sizeof(bytes));
        }
        ssize_t n = 0, got;
        while ((got = recv(fd, out + n, sizeof(out) - (size_t)n, 0)) > 0) {
            n += got;
        }
        CHECK_EQ(n, (ssize_t)sizeof(out));
        CHECK(xfer_answer_decode(out, &a) && a.verdict == XFER_NO_VERSION);
        CHECK(poll(&p, 1, WAIT_MS) == 1 && recv(fd, out, 1, 0) == 0); /* an end, no error */
        close(fd);
    }
    COUNTED(&d, gate_refused, 10);
    int still[5];
    for (int i = 0; i < 5; i++) {
        still[i] = call(bt_xfer_address(d.x), WAIT_MS);
        CHECK_EQ(send(still[i], bytes, 6, MSG_NOSIGNAL), 6);
    }
    uint64_t end = bt_clock_ns() + WAIT_MS * BT_NS_PER_MS;
    for (int i = 0; i < 5; i++) { /* they keep their ends open, and are left all the same */
        while (send(still[i], bytes, 1, MSG_NOSIGNAL) == 1 && bt_clock_ns() < end) {
            usleep(20000);
        }
        CHECK(bt_clock_ns() < end);
        close(still[i]);
    }
    side_stop(&d);
}

static void test_flood(const struct world *w)
{
    enum { FLOOD = 300 };
    struct bt_xfer_opts od = {0};
    struct side d;
    int fds[FLOOD];
    side_start(&d, w, &od, 2, true);
    for (int i = 0; i < FLOOD; i++) {
        fds[i] = call(bt_xfer_address(d.x), WAIT_MS);
        CHECK(fds[i] >= 0);
        if (i % 2 == 0) {
            CHECK_EQ(send(fds[i], "BTXK", 4, MSG_NOSIGNAL), 4);
        }
    }
    join_works(w, &d, 1); /* although the hall is full */
    struct bt_xfer_stats st = stats(&d);
    CHECK(st.gate_crowded > 0);
    for (int i = 0; i < FLOOD; i++) {
        close(fds[i]);
    }
    join_works(w, &d, 3);
    side_stop(&d);
}

/* The addresses of all listening sockets of this process. */
static size_t listening(char out[][80], size_t cap)
{
    DIR *dir = opendir("/proc/self/fd");
    struct dirent *e;
    size_t n = 0;
    while ((e = readdir(dir)) != NULL) {
        struct sockaddr_in a;
        int fd = (int)strtol(e->d_name, NULL, 10), on = 0;
        socklen_t len = sizeof(on), alen = sizeof(a);
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &on, &len) == 0 && on != 0 &&
            getsockname(fd, (struct sockaddr *)&a, &alen) == 0 && a.sin_family == AF_INET &&
            n < cap) {
            char ip[INET_ADDRSTRLEN];
            inet_ntop(AF_INET, &a.sin_addr, ip, sizeof(ip));
            snprintf(out[n++], 80, "%s:%u", ip, ntohs(a.sin_port));
        }
    }
    closedir(dir);
    return n;
}

/* Some sandboxes' kernels take neither filter nor key. */
static bool can_be_shut(void)
{
    struct sock_filter pass[] = {BPF_STMT(BPF_RET | BPF_K, UINT32_MAX)};
    struct sock_fprog prog = {.len = 1, .filter = pass};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct tcp_md5sig sig = {.tcpm_flags = TCP_MD5SIG_FLAG_PREFIX, .tcpm_keylen = 1};
    sig.tcpm_addr.ss_family = AF_INET;
    bool works = setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &prog, sizeof(prog)) == 0 ||
                 setsockopt(fd, IPPROTO_TCP, TCP_MD5SIG_EXT, &sig, sizeof(sig)) == 0;
    close(fd);
    return works;
}

/* UCX's ports: shut before anybody is due and after; in between they worked. */
static void test_back_doors(const struct world *w)
{
    enum { MANY = 64 };
    struct bt_xfer_opts od = {.connect_timeout_ns = 2 * BT_NS_PER_S}, op = od;
    static char ports[MANY][80];
    struct side d, p;
    uint64_t pd, dp;
    side_start(&d, w, &od, 2, true);
    side_start(&p, w, &op, 1, false);
    for (int round = 0; round < 2; round++) {
        size_t n = listening(ports, MANY);
        unsigned gates = 0;
        CHECK(n >= 3); /* the gate, UCX's listener, and at least one device */
        for (size_t i = 0; i < n; i++) {
            int fd = call(ports[i], strcmp(ports[i], bt_xfer_address(d.x)) == 0 ? WAIT_MS : 150);
            if (fd >= 0) {
                gates++;
                CHECK(strcmp(ports[i], bt_xfer_address(d.x)) == 0);
                close(fd);
            }
        }
        CHECK_EQ(gates, 1);
        if (round == 0) {
            CHECK(join(&p, &d, &pd, &dp));
            sleep(3); /* until those who came are no longer due */
        }
    }
    struct bt_xfer_event ev;
    CHECK_EQ(bt_xfer_send_ctrl(p.x, pd, "still here", 10), BT_OK);
    CHECK(side_wait(&d, BT_XFER_CTRL, &ev, WAIT_MS));
    bt_xfer_event_free(&ev);
    side_stop(&p);
    side_stop(&d);
}

/* Every port lies in the range; a range that is used up is an error, not a hang. */
static void test_port_range(const struct world *w)
{
    enum { MANY = 64, MIN = 21000, MAX = MIN + BT_XFER_PORTS_MIN - 1 };
    struct bt_xfer_opts od = {.port_min = MIN, .port_max = MAX}, op = od;
    static char ports[MANY][80];
    struct bt_err err = {0};
    struct bt_xfer *x;
    struct side d, p;
    uint64_t pd, dp;
    side_start(&d, w, &od, 2, true);
    side_start(&p, w, &op, 1, false);
    CHECK(join(&p, &d, &pd, &dp));
    size_t n = listening(ports, MANY);
    CHECK(n >= 3);
    for (size_t i = 0; i < n; i++) {
        long port = strtol(strrchr(ports[i], ':') + 1, NULL, 10);
        CHECK((port >= MIN && port <= MAX) || strcmp(ports[i], bt_xfer_address(d.x)) == 0);
    }
    side_stop(&p);
    side_stop(&d);
    struct bt_xfer_opts bad = {.instance = 1, .tls = w->tls, .port_min = MIN, .port_max = MIN + 9};
    CHECK_EQ(bt_xfer_create(&bad, &x, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "21009") != NULL);
}

int main(int argc, char **argv)
{
    struct world w = {.tls = argc > 1 ? argv[1] : "tcp"};
    test_strangers(&w);
    test_refused(&w);
    test_answered_early(&w);
    test_flood(&w);
    if (can_be_shut()) {
        test_back_doors(&w);
    } else {
        printf("not tested: this kernel takes neither socket filters nor keys, so UCX's own ports "
               "stay open\n");
    }
    test_port_range(&w);
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
