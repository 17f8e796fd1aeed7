#ifndef BT_TRANSFER_XFER_GATE_H
#define BT_TRANSFER_XFER_GATE_H

/* What stands before UCX, whose parsers abort the process on a stranger's bytes. D listens with a plain TCP socket
 * (the gate); P connects to it, says a KNOCK of fixed size and reads an ANSWER of fixed size (transfer/xfer_wire.h).
 * Only then is P expected at UCX's own ports (transfer/xfer_door.h). D's token (proto/gate_token.h),
 * which D tells its routers and they tell prefill nodes, is the proof of belonging to the cluster.
 *
 * Limits: a visitor has GATE_GREETING_NS in all, however slowly it speaks; at most GATE_VISITORS_MAX wait, and
 * when one more comes the oldest goes (a prefill node speaks at once, so it is never old), before it one that was answered
 * and has not closed its end yet, for which it has GATE_LEAVING_NS; the first byte that no knock has ends the visit. Refusals are counted and logged, at most one line a second.
 *
 * Sockets and their timers only: who may enter is asked of the hooks, and of x what it is. Transfer thread;
 * nothing blocks; no CPU while nobody comes. */

#include <sys/socket.h>
#include "transfer/xfer_int.h"

#define GATE_VISITORS_MAX 64
#define GATE_GREETING_NS  (2 * UINT64_C(1000000000))
#define GATE_LEAVING_NS   (1 * UINT64_C(1000000000))

struct xfer_gate;

struct xfer_gate_hooks {
    void *arg;
    /* D: a knock in which everything fits. Fills in *a: XFER_ENTER with port and ips, or XFER_NO_ROOM and text. */
    void (*admit)(void *arg, const struct xfer_knock *k, const struct sockaddr_storage *from,
                  struct xfer_answer *a);
    /* P: what became of a call, once, unless it was hung up before. a NULL: no answer, why says it. */
    void (*answered)(void *arg, struct xfer_peer *p, const struct xfer_answer *a, const char *why);
};

/* Not listening yet. */
enum bt_status xfer_gate_create(struct bt_xfer *x, const struct xfer_gate_hooks *hooks,
                                struct xfer_gate **out, struct bt_err *err) BT_NODISCARD;
/* Ends all visits and calls without a word. NULL is legal. */
void xfer_gate_destroy(struct xfer_gate *g);

/* D: listens; *bound is what it listens on. Errors as of bt_xfer_create. */
enum bt_status xfer_gate_listen(struct xfer_gate *g, const struct sockaddr_storage *a, uint32_t len,
                                struct sockaddr_storage *bound, struct bt_err *err) BT_NODISCARD;

/* P: calls and knocks for p (which has no call yet). BT_OK: `answered` follows. Else: why has the reason. */
enum bt_status xfer_gate_call(struct xfer_gate *g, struct xfer_peer *p,
                              const struct sockaddr_storage *a, uint32_t len,
                              const struct xfer_knock *k, char *why, size_t cap) BT_NODISCARD;
void xfer_gate_hang_up(struct xfer_gate *g, struct xfer_peer *p); /* no call: nothing */

/* Readable when xfer_gate_step has something to do; else there is the deadline (UINT64_MAX: none). */
int xfer_gate_fd(const struct xfer_gate *g);
uint64_t xfer_gate_deadline(const struct xfer_gate *g);
/* A bounded piece of work at x->now_ns. True: something was done. */
bool xfer_gate_step(struct xfer_gate *g);

/* A connection that was accepted: takes fd, which must not block. For the step, and for tests. */
void xfer_gate_take(struct xfer_gate *g, int fd, const struct sockaddr_storage *from);

/* ---- the gate's two sides, for each other only ---- */

/* What epoll says has happened at; the first member of what it stands for. */
struct gate_source {
    enum { GATE_LISTENER, GATE_VISITOR, GATE_CALL } kind;
    int fd;
};

/* xfer_call.c */
struct xfer_call;
TAILQ_HEAD(xfer_calls, xfer_call);
void xfer_call_ready(struct xfer_gate *g, struct gate_source *s);
void xfer_calls_end(struct xfer_gate *g);

/* xfer_gate.c */
bool xfer_gate_watch(struct xfer_gate *g, struct gate_source *s, uint32_t events, bool again);
struct xfer_calls *xfer_gate_calls(struct xfer_gate *g);
void xfer_gate_answered(struct xfer_gate *g, struct xfer_peer *p, const struct xfer_answer *a,
                        const char *why);

#endif
