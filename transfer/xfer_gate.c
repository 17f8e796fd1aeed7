/* The gate from D's side, and what both sides share: the epoll set and its rounds. Owns visitors: accepted connections
 * that have not said their greeting yet, and those that were answered and have not left. Every byte read here is a stranger's until the knock is whole and names
 * this instance. */

#include "transfer/xfer_gate.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"

#define EVENTS_MAX  32
#define ACCEPTS_MAX 32
#define BACKLOG     1024
#define LOG_GAP_NS  BT_NS_PER_S
/* Without descriptors or memory nothing is accepted for so long: a listener that stays readable would spin. */
#define PAUSE_NS (100 * BT_NS_PER_MS)

struct visitor {
    struct gate_source source;
    TAILQ_ENTRY(visitor) link;
    bool answered;
    uint64_t since_ns; /* when it came, or was answered */
    struct sockaddr_storage from;
    size_t n;
    uint8_t knock[XFER_KNOCK_BYTES];
};
TAILQ_HEAD(visitors, visitor);

struct xfer_gate {
    struct bt_xfer *x;
    struct xfer_gate_hooks hooks;
    struct gate_source listener; /* fd -1: none */
    int epfd;
    uint64_t paused_until_ns; /* 0: accepting */
    struct visitors visitors; /* that are still to greet, oldest first */
    struct visitors answered; /* that are still to leave, oldest first */
    uint32_t n_visitors;      /* of both */
    struct xfer_calls calls;
    uint64_t logged_ns;
    uint64_t n_unlogged;
};

/* ---- shared with xfer_call.c ---- */

bool xfer_gate_watch(struct xfer_gate *g, struct gate_source *s, uint32_t events, bool again)
{
    struct epoll_event e = {.events = events, .data.ptr = s};
    return epoll_ctl(g->epfd, again ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, s->fd, &e) == 0;
}

struct xfer_calls *xfer_gate_calls(struct xfer_gate *g)
{
    return &g->calls;
}

void xfer_gate_answered(struct xfer_gate *g, struct xfer_peer *p, const struct xfer_answer *a,
                        const char *why)
{
    g->hooks.answered(g->hooks.arg, p, a, why);
}

/* ---- refusing ---- */

static void refused(struct xfer_gate *g, const struct sockaddr_storage *from, const char *why)
{
    char text[80];
    uint64_t now = g->x->now_ns;
    if (g->logged_ns != 0 && now - g->logged_ns < LOG_GAP_NS) {
        g->n_unlogged++;
        return;
    }
    xfer_addr_format(from, text, sizeof(text));
    if (g->n_unlogged > 0) {
        bt_log_warn("gate", "%s refused at the transfer port: %s (and %llu others before)", text,
                    why, (unsigned long long)g->n_unlogged);
    } else {
        bt_log_warn("gate", "%s refused at the transfer port: %s", text, why);
    }
    g->logged_ns = now;
    g->n_unlogged = 0;
}

static void visit_end(struct xfer_gate *g, struct visitor *v)
{
    TAILQ_REMOVE(v->answered ? &g->answered : &g->visitors, v, link);
    g->n_visitors--;
    close(v->source.fd); /* which takes it out of the epoll set */
    bt_free(v);
}

/* A visitor that is no prefill node gets no word. */
static void turn_away(struct xfer_gate *g, struct visitor *v, uint64_t *counter, const char *why)
{
    (*counter)++;
    refused(g, &v->from, why);
    visit_end(g, v);
}

/* ---- greeting ---- */

/* Nothing more is said; but the socket stays until the other end has closed it: closed with bytes of its in it, or with some
 * on their way, it would be reset, and the answer perhaps be lost. */
static void answer(struct xfer_gate *g, struct visitor *v, const struct xfer_answer *a)
{
    uint8_t bytes[XFER_ANSWER_BYTES];
    xfer_answer_encode(a, bytes);
    /* An empty socket buffer takes it whole; if not, the other end has not read it all and tries again. */
    ssize_t n = send(v->source.fd, bytes, sizeof(bytes), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n != (ssize_t)sizeof(bytes) || shutdown(v->source.fd, SHUT_WR) != 0) {
        visit_end(g, v);
        return;
    }
    TAILQ_REMOVE(&g->visitors, v, link);
    v->answered = true;
    v->since_ns = g->x->now_ns;
    TAILQ_INSERT_TAIL(&g->answered, v, link);
}

/* What an answered one still says is not looked at. */
static void answered_hear(struct xfer_gate *g, struct visitor *v)
{
    ssize_t n = recv(v->source.fd, v->knock, sizeof(v->knock), MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        visit_end(g, v);
    }
}

static void judge(struct xfer_gate *g, struct visitor *v, const struct xfer_knock *k)
{
    struct bt_xfer *x = g->x;
    struct xfer_answer a = {0};
    a.verdict = xfer_greet_judge(x, &k->hello, a.text, sizeof(a.text));
    if (a.verdict == XFER_ENTER) {
        g->hooks.admit(g->hooks.arg, k, &v->from, &a);
    }
    if (a.verdict != XFER_ENTER) {
        x->st.gate_refused++;
        x->st.fail_refused += a.verdict == XFER_NO_MODEL || a.verdict == XFER_NO_VERSION;
        refused(g, &v->from, a.text);
    }
    answer(g, v, &a);
}

static void visitor_hear(struct xfer_gate *g, struct visitor *v)
{
    struct bt_xfer *x = g->x;
    struct xfer_knock k;
    struct xfer_answer other = {.verdict = XFER_NO_VERSION,
                                .text = "another version is spoken here"};
    ssize_t n = recv(v->source.fd, v->knock + v->n, sizeof(v->knock) - v->n, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (n <= 0) {
        turn_away(g, v, &x->st.gate_garbage, "it left before its greeting was whole");
        return;
    }
    v->n += (size_t)n;
    switch (xfer_knock_decode(v->knock, v->n, &k)) {
    case XFER_KNOCK_MORE:
        return;
    case XFER_KNOCK_WHOLE:
        judge(g, v, &k);
        return;
    case XFER_KNOCK_VERSION_OTHER:
        x->st.gate_refused++;
        refused(g, &v->from, "its greeting is of another version");
        answer(g, v, &other);
        return;
    case XFER_KNOCK_WRONG:
        turn_away(g, v, &x->st.gate_garbage, "what it says is no prefill node's greeting");
        return;
    }
}

void xfer_gate_take(struct xfer_gate *g, int fd, const struct sockaddr_storage *from)
{
    struct bt_xfer *x = g->x;
    struct visitor *v = TAILQ_FIRST(&g->answered);
    if (g->n_visitors == GATE_VISITORS_MAX && v != NULL) {
        visit_end(g, v);
    } else if (g->n_visitors == GATE_VISITORS_MAX) {
        turn_away(g, TAILQ_FIRST(&g->visitors), &x->st.gate_crowded,
                  "it has not said its greeting, and too many others want to");
    }
    v = bt_calloc(1, sizeof(*v));
    if (v == NULL) {
        close(fd);
        return;
    }
    v->source = (struct gate_source){.kind = GATE_VISITOR, .fd = fd};
    v->from = *from;
    v->since_ns = x->now_ns;
    TAILQ_INSERT_TAIL(&g->visitors, v, link);
    g->n_visitors++;
    if (!xfer_gate_watch(g, &v->source, EPOLLIN, false)) {
        visit_end(g, v);
        return;
    }
    visitor_hear(g, v); /* mostly the greeting is there already */
}

static void accept_some(struct xfer_gate *g)
{
    for (int i = 0; i < ACCEPTS_MAX; i++) {
        struct sockaddr_storage from;
        socklen_t len = sizeof(from);
        memset(&from, 0, sizeof(from));
        int fd =
            accept4(g->listener.fd, (struct sockaddr *)&from, &len, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            xfer_gate_take(g, fd, &from);
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
            bt_log_warn("gate", "cannot accept at the transfer port: %s", strerror(errno));
            (void)epoll_ctl(g->epfd, EPOLL_CTL_DEL, g->listener.fd, NULL);
            g->paused_until_ns = g->x->now_ns + PAUSE_NS;
            return;
        } else if (errno != ECONNABORTED && errno != EINTR) {
            return; /* EAGAIN: nobody is left */
        }
    }
}

/* ---- rounds ---- */

int xfer_gate_fd(const struct xfer_gate *g)
{
    return g->epfd;
}

uint64_t xfer_gate_deadline(const struct xfer_gate *g)
{
    const struct visitor *v = TAILQ_FIRST(&g->visitors), *a = TAILQ_FIRST(&g->answered);
    uint64_t t = v != NULL ? v->since_ns + GATE_GREETING_NS : UINT64_MAX;
    if (a != NULL && a->since_ns + GATE_LEAVING_NS < t) {
        t = a->since_ns + GATE_LEAVING_NS;
    }
    return g->paused_until_ns != 0 && g->paused_until_ns < t ? g->paused_until_ns : t;
}

static bool timers(struct xfer_gate *g)
{
    uint64_t now = g->x->now_ns;
    struct visitor *v;
    bool did = false;
    while ((v = TAILQ_FIRST(&g->visitors)) != NULL && now - v->since_ns >= GATE_GREETING_NS) {
        turn_away(g, v, &g->x->st.gate_slow, "it took too long to say its greeting");
        did = true;
    }
    while ((v = TAILQ_FIRST(&g->answered)) != NULL && now - v->since_ns >= GATE_LEAVING_NS) {
        visit_end(g, v);
        did = true;
    }
    if (g->paused_until_ns != 0 && now >= g->paused_until_ns) {
        g->paused_until_ns = xfer_gate_watch(g, &g->listener, EPOLLIN, false) ? 0 : now + PAUSE_NS;
        did = true;
    }
    return did;
}

bool xfer_gate_step(struct xfer_gate *g)
{
    struct epoll_event e[EVENTS_MAX];
    bool knocking = false;
    int n = epoll_wait(g->epfd, e, EVENTS_MAX, 0);
    /* Nobody is accepted before all events are handled: a new visitor may end an old one that is among them. */
    for (int i = 0; i < n; i++) {
        struct gate_source *s = e[i].data.ptr;
        if (s->kind == GATE_VISITOR) {
            struct visitor *v = (struct visitor *)s; /* its first member */
            if (v->answered) {
                answered_hear(g, v);
            } else {
                visitor_hear(g, v);
            }
        } else if (s->kind == GATE_CALL) {
            xfer_call_ready(g, s);
        } else {
            knocking = true;
        }
    }
    if (knocking) {
        accept_some(g);
    }
    return timers(g) || n > 0;
}

/* ---- life ---- */

enum bt_status xfer_gate_create(struct bt_xfer *x, const struct xfer_gate_hooks *hooks,
                                struct xfer_gate **out, struct bt_err *err)
{
    struct xfer_gate *g = bt_calloc(1, sizeof(*g));
    if (g == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "transfer: out of memory");
    }
    g->x = x;
    g->hooks = *hooks;
    g->listener = (struct gate_source){.kind = GATE_LISTENER, .fd = -1};
    TAILQ_INIT(&g->visitors);
    TAILQ_INIT(&g->answered);
    TAILQ_INIT(&g->calls);
    g->epfd = epoll_create1(EPOLL_CLOEXEC);
    if (g->epfd < 0) {
        bt_free(g);
        return bt_err_set(err, BT_ERR_IO, "transfer: epoll: %s", strerror(errno));
    }
    *out = g;
    return BT_OK;
}

enum bt_status xfer_gate_listen(struct xfer_gate *g, const struct sockaddr_storage *a, uint32_t len,
                                struct sockaddr_storage *bound, struct bt_err *err)
{
    char text[80];
    int on = 1;
    socklen_t n = sizeof(*bound);
    int fd = socket(a->ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    xfer_addr_format(a, text, sizeof(text));
    if (fd < 0) {
        return bt_err_set(err, BT_ERR_IO, "transfer: socket: %s", strerror(errno));
    }
    /* A replacement on the same port need not wait for old connections to be forgotten. */
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
        bind(fd, (const struct sockaddr *)a, len) != 0 || listen(fd, BACKLOG) != 0 ||
        getsockname(fd, (struct sockaddr *)bound, &n) != 0) {
        enum bt_status st =
            bt_err_set(err, BT_ERR_IO, "transfer: cannot listen on %s: %s", text, strerror(errno));
        close(fd);
        return st;
    }
    g->listener.fd = fd;
    if (!xfer_gate_watch(g, &g->listener, EPOLLIN, false)) {
        return bt_err_set(err, BT_ERR_IO, "transfer: epoll: %s", strerror(errno));
    }
    return BT_OK;
}

void xfer_gate_destroy(struct xfer_gate *g)
{
    struct visitor *v;
    if (g == NULL) {
        return;
    }
    while ((v = TAILQ_FIRST(&g->visitors)) != NULL || (v = TAILQ_FIRST(&g->answered)) != NULL) {
        visit_end(g, v);
    }
    xfer_calls_end(g);
    if (g->listener.fd >= 0) {
        close(g->listener.fd);
    }
    close(g->epfd);
    bt_free(g);
}
