/* Two processes over UCX: either is killed (SIGKILL) or stopped (SIGSTOP) in the middle of a transfer. The survivor
 * must hear of it in time, get every page and push back, live, and serve the next peer. */

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include "tests/unit/transfer/xfer_util.h"

enum { SHARE = 65536, PAGES = 256, TICKETS = 16 };

static uint32_t ids[PAGES];

static void fill_ids(void)
{
    for (uint32_t k = 0; k < PAGES; k++) {
        ids[k] = k;
    }
}

static void options(struct bt_xfer_opts *o)
{
    memset(o, 0, sizeof(*o));
    o->heartbeat_ns = 50 * BT_NS_PER_MS;
    o->lease_ns = 1500 * BT_NS_PER_MS; /* a loaded machine holds a thread up for a while */
    o->window_bytes = 1u << 20;
}

static void open_landings(struct side *d, uint64_t peer, uint8_t *mem)
{
    struct bt_xfer_landing l = {.generation = 1, .peer = peer, .n_groups = 1};
    l.group[0] = (struct bt_xfer_land_group){.base = mem,
                                             .page_stride = SHARE,
                                             .page_layer_bytes = SHARE,
                                             .n_layers = 1,
                                             .n_pages = PAGES,
                                             .page_ids = ids};
    for (unsigned t = 0; t < TICKETS; t++) {
        ticket_set(l.ticket, t);
        CHECK_EQ(bt_xfer_land_open(d->x, &l), BT_OK);
    }
    CHECK_EQ(bt_xfer_send_ctrl(d->x, peer, "go", 2), BT_OK);
}

static void push_tickets(struct side *p, uint64_t peer, const uint8_t *mem)
{
    struct bt_xfer_push u = {.generation = 1,
                             .peer = peer,
                             .n_layers = 1,
                             .page_stride = SHARE,
                             .page_layer_bytes = SHARE,
                             .base = mem,
                             .n_pages = PAGES,
                             .page_ids = ids};
    for (unsigned t = 0; t < TICKETS; t++) {
        ticket_set(u.ticket, t);
        u.tag = t;
        CHECK_EQ(bt_xfer_push(p->x, &u), BT_OK);
    }
}

/* The child's whole life. 0: it lived until its peer went down and all its buffers came back. */
static int child_main(const char *role, const char *tls, const char *address)
{
    struct world w = {.tls = tls};
    struct bt_xfer_opts o;
    struct side s;
    struct bt_xfer_event ev;
    uint8_t *mem = calloc(PAGES, SHARE);
    bool d = strcmp(role, "d") == 0;

    options(&o);
    side_start(&s, &w, &o, d ? 2 : 1, d);
    if (d) {
        printf("%s\n", bt_xfer_address(s.x));
        fflush(stdout);
        CHECK(side_wait(&s, BT_XFER_PEER_UP, &ev, WAIT_MS));
        open_landings(&s, ev.peer, mem);
    } else {
        uint64_t peer;
        CHECK_EQ(bt_xfer_connect(s.x, address, 2, &test_token, &peer), BT_OK);
        CHECK(side_wait(&s, BT_XFER_CTRL, &ev, WAIT_MS));
        bt_xfer_event_free(&ev);
        push_tickets(&s, peer, mem);
    }
    CHECK(side_wait(&s, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
    for (unsigned t = 0; t < TICKETS; t++) {
        uint8_t ticket[BT_XFER_TICKET_BYTES];
        ticket_set(ticket, t);
        if (d) {
            CHECK_EQ(bt_xfer_land_close(s.x, ticket, 1), BT_OK);
        }
        CHECK(side_wait(&s, d ? BT_XFER_LAND_CLOSED : BT_XFER_PUSHED, &ev, WAIT_MS));
    }
    side_stop(&s);
    free(mem);
    return bt_test_failures == 0 ? 0 : 1;
}

/* Starts this program again as the other side; *out: its stdout. */
static pid_t child_start(const char *role, const char *tls, const char *address, FILE **out)
{
    int fd[2];
    char self[512];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (n < 0 || pipe2(fd, O_CLOEXEC) != 0) {
        exit(1);
    }
    self[n] = 0;
    pid_t pid = fork();
    if (pid == 0) {
        dup2(fd[1], 1);
        execl(self, self, "--child", role, tls, address, (char *)NULL);
        _exit(127);
    }
    close(fd[1]);
    *out = fdopen(fd[0], "r");
    return pid;
}

struct result {
    uint64_t down_ns_max;
    unsigned rounds;
};

static void note_down(struct result *r, uint64_t t0)
{
    uint64_t ns = bt_clock_ns() - t0;
    r->down_ns_max = ns > r->down_ns_max ? ns : r->down_ns_max;
    r->rounds++;
}

/* Sends the signal; for SIGSTOP also lets the child go on, and sees that it ends well. */
static void strike(pid_t pid, int sig)
{
    CHECK_EQ(kill(pid, sig), 0);
}

static void reap(pid_t pid, int sig, FILE *out)
{
    int status = 0;
    if (sig == SIGSTOP) {
        CHECK_EQ(kill(pid, SIGCONT), 0);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    if (sig == SIGSTOP) {
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    } else {
        CHECK(WIFSIGNALED(status));
    }
    fclose(out);
}

/* The counts are published at the end of a round, so after the events of it. */
static bool nothing_left(const struct side *s)
{
    uint64_t end = bt_clock_ns() + WAIT_MS * BT_NS_PER_MS;
    struct bt_xfer_stats st;
    do {
        bt_xfer_stats(s->x, &st);
        if (st.sends_in_flight + st.receives_in_flight + st.pushes_open + st.landings_open +
                st.peers_up ==
            0) {
            return true;
        }
        usleep(1000);
    } while (bt_clock_ns() < end);
    return false;
}

/* We are D, the child is P. */
static void strike_p(const char *tls, int sig, unsigned rounds, struct result *r)
{
    struct world w = {.tls = tls};
    struct bt_xfer_opts o;
    struct side d;
    struct bt_xfer_event ev;
    uint8_t *mem = malloc((size_t)PAGES * SHARE);

    options(&o);
    side_start(&d, &w, &o, 2, true);
    for (unsigned i = 0; i < rounds; i++) {
        FILE *out;
        memset(mem, 0, (size_t)PAGES * SHARE);
        pid_t pid = child_start("p", tls, bt_xfer_address(d.x), &out);
        CHECK(side_wait(&d, BT_XFER_PEER_UP, &ev, WAIT_MS));
        open_landings(&d, ev.peer, mem);
        for (unsigned k = 0; k < 1 + i % 3; k++) {
            CHECK(side_wait(&d, BT_XFER_LANDED, &ev, WAIT_MS));
        }
        strike(pid, sig);
        uint64_t t0 = bt_clock_ns();
        CHECK(side_wait(&d, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
        CHECK_EQ(ev.status, sig == SIGSTOP ? BT_ERR_TIMEOUT : BT_ERR_PEER_LOST);
        note_down(r, t0);
        for (unsigned t = 0; t < TICKETS; t++) {
            uint8_t ticket[BT_XFER_TICKET_BYTES];
            ticket_set(ticket, t);
            CHECK_EQ(bt_xfer_land_close(d.x, ticket, 1), BT_OK);
            CHECK(side_wait(&d, BT_XFER_LAND_CLOSED, &ev, WAIT_MS));
        }
        memset(mem, 0xee, (size_t)PAGES * SHARE);
        reap(pid, sig, out);
        usleep(20000); /* what a late writer would need */
        for (size_t b = 0; b < (size_t)PAGES * SHARE; b++) {
            if (mem[b] != 0xee) {
                CHECK(false);
                break;
            }
        }
        while (side_wait(&d, BT_XFER_LANDED, &ev, 0)) {
        }
        CHECK(nothing_left(&d));
    }
    side_stop(&d);
    free(mem);
}

/* We are P, the child is D. */
static void strike_d(const char *tls, int sig, unsigned rounds, struct result *r)
{
    struct world w = {.tls = tls};
    struct bt_xfer_opts o;
    struct side p;
    struct bt_xfer_event ev;
    uint8_t *mem = calloc(PAGES, SHARE);

    options(&o);
    side_start(&p, &w, &o, 1, false);
    for (unsigned i = 0; i < rounds; i++) {
        FILE *out;
        char address[80] = "";
        uint64_t peer;
        pid_t pid = child_start("d", tls, "-", &out);
        CHECK(fgets(address, sizeof(address), out) != NULL);
        address[strcspn(address, "\n")] = 0;
        CHECK_EQ(bt_xfer_connect(p.x, address, 2, &test_token, &peer), BT_OK);
        CHECK(side_wait(&p, BT_XFER_CTRL, &ev, WAIT_MS));
        bt_xfer_event_free(&ev);
        push_tickets(&p, peer, mem);
        for (unsigned k = 0; k < 1 + i % 3; k++) {
            CHECK(side_wait(&p, BT_XFER_PUSHED, &ev, WAIT_MS));
        }
        strike(pid, sig);
        uint64_t t0 = bt_clock_ns();
        CHECK(side_wait(&p, BT_XFER_PEER_DOWN, &ev, WAIT_MS));
        note_down(r, t0);
        for (unsigned t = 1 + i % 3; t < TICKETS; t++) {
            CHECK(side_wait(&p, BT_XFER_PUSHED, &ev, WAIT_MS));
        }
        CHECK_EQ(side_count(&p, BT_XFER_PUSHED), 0);
        reap(pid, sig, out);
        while (side_wait(&p, BT_XFER_PEER_UP, &ev, 0)) {
        }
        CHECK(nothing_left(&p));
    }
    side_stop(&p);
    free(mem);
}

int main(int argc, char **argv)
{
    fill_ids();
    if (argc == 5 && strcmp(argv[1], "--child") == 0) {
        return child_main(argv[2], argv[3], argv[4]);
    }
    const char *tls = argc > 1 ? argv[1] : "tcp";
    unsigned rounds = argc > 2 ? (unsigned)strtoul(argv[2], NULL, 10) : 6;
    struct result kp = {0}, kd = {0}, sp = {0}, sd = {0};
    strike_p(tls, SIGKILL, rounds, &kp);
    strike_d(tls, SIGKILL, rounds, &kd);
    strike_p(tls, SIGSTOP, (rounds + 2) / 3, &sp);
    strike_d(tls, SIGSTOP, (rounds + 2) / 3, &sd);
    printf("%s: down after kill of P %.1f ms, of D %.1f ms; after stop %.0f and %.0f ms (the "
           "slowest of %u and %u)\n",
           tls, (double)kp.down_ns_max / 1e6, (double)kd.down_ns_max / 1e6,
           (double)sp.down_ns_max / 1e6, (double)sd.down_ns_max / 1e6, kp.rounds, sp.rounds);
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
