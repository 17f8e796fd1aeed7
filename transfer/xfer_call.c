/* The gate from P's side: connects to D's gate, knocks, reads the answer. Owns calls and their sockets; the time they
 * may take is the peer's connect timeout. Refuses to know what an answer means. */

#include "transfer/xfer_gate.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>
#include "base/mem.h"

struct xfer_call {
    struct gate_source source;
    TAILQ_ENTRY(xfer_call) link;
    struct xfer_peer *peer;
    size_t n_said, n_heard;
    uint8_t knock[XFER_KNOCK_BYTES];
    uint8_t answer[XFER_ANSWER_BYTES];
};

static void call_end(struct xfer_gate *g, struct xfer_call *c)
{
    TAILQ_REMOVE(xfer_gate_calls(g), c, link);
    close(c->source.fd); /* which takes it out of the epoll set */
    bt_free(c);
}

enum bt_status xfer_gate_call(struct xfer_gate *g, struct xfer_peer *p,
                              const struct sockaddr_storage *a, uint32_t len,
                              const struct xfer_knock *k, char *why, size_t cap)
{
    struct xfer_call *c = bt_calloc(1, sizeof(*c));
    if (c == NULL) {
        snprintf(why, cap, "out of memory");
        return BT_ERR_NOMEM;
    }
    c->peer = p;
    c->source.kind = GATE_CALL;
    xfer_knock_encode(k, c->knock);
    c->source.fd = socket(a->ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->source.fd < 0) {
        snprintf(why, cap, "socket: %s", strerror(errno));
        bt_free(c);
        return BT_ERR_IO;
    }
    if ((connect(c->source.fd, (const struct sockaddr *)a, len) != 0 && errno != EINPROGRESS) ||
        !xfer_gate_watch(g, &c->source, EPOLLOUT, false)) {
        snprintf(why, cap, "%s", strerror(errno));
        close(c->source.fd);
        bt_free(c);
        return BT_ERR_PEER_LOST;
    }
    TAILQ_INSERT_TAIL(xfer_gate_calls(g), c, link);
    return BT_OK;
}

void xfer_gate_hang_up(struct xfer_gate *g, struct xfer_peer *p)
{
    struct xfer_call *c;
    TAILQ_FOREACH(c, xfer_gate_calls(g), link)
    {
        if (c->peer == p) {
            call_end(g, c);
            return;
        }
    }
}

void xfer_calls_end(struct xfer_gate *g)
{
    struct xfer_call *c;
    while ((c = TAILQ_FIRST(xfer_gate_calls(g))) != NULL) {
        call_end(g, c);
    }
}

/* a NULL: it failed. */
static void finish(struct xfer_gate *g, struct xfer_call *c, const struct xfer_answer *a,
                   const char *why)
{
    struct xfer_peer *p = c->peer;
    call_end(g, c);
    xfer_gate_answered(g, p, a, why);
}

static void say(struct xfer_gate *g, struct xfer_call *c)
{
    ssize_t n =
        send(c->source.fd, c->knock + c->n_said, sizeof(c->knock) - c->n_said, MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN && errno != EINTR) {
        finish(g, c, NULL, strerror(errno)); /* also why the connect failed */
        return;
    }
    c->n_said += n > 0 ? (size_t)n : 0;
    if (c->n_said == sizeof(c->knock) && !xfer_gate_watch(g, &c->source, EPOLLIN, true)) {
        finish(g, c, NULL, strerror(errno));
    }
}

static void hear(struct xfer_gate *g, struct xfer_call *c)
{
    struct xfer_answer a;
    ssize_t n =
        recv(c->source.fd, c->answer + c->n_heard, sizeof(c->answer) - c->n_heard, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (n < 0) {
        finish(g, c, NULL, strerror(errno));
        return;
    }
    c->n_heard += (size_t)n;
    if (n > 0 && c->n_heard < sizeof(c->answer)) {
        return;
    }
    if (c->n_heard == 0) {
        finish(g, c, NULL, "the other end closed the connection without an answer");
    } else if (!xfer_answer_decode(c->answer, &a) ||
               (c->n_heard < sizeof(c->answer) && a.verdict != XFER_NO_VERSION)) {
        finish(g, c, NULL, "what answers there is no decode node's transfer port");
    } else {
        finish(g, c, &a, NULL);
    }
}

void xfer_call_ready(struct xfer_gate *g, struct gate_source *s)
{
    struct xfer_call *c = (struct xfer_call *)s; /* its first member */
    if (c->n_said < sizeof(c->knock)) {
        say(g, c);
    } else {
        hear(g, c);
    }
}
