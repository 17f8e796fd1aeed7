/* Any bytes from a stranger at the transfer port: the pure parsers of both directions, then a live gate that gets them
 * in pieces. Whoever is let in must have said exactly a greeting for this instance; after its time everybody is gone.
 *
 * Input: byte 0: the size of the pieces (0: all at once); then what is said. */

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/log.h"
#include "transfer/xfer_gate.h"
#include "transfer/xfer_loop.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static unsigned n_admitted;

static void admit(void *arg, const struct xfer_knock *k, const struct sockaddr_storage *from,
                  struct xfer_answer *a)
{
    struct bt_xfer *x = arg;
    (void)from;
    if (k->hello.expect != x->o.instance || memcmp(&k->hello.token, &x->o.token, 16) != 0 ||
        k->instance == 0 || k->n_ips > XFER_IPS_MAX) {
        abort();
    }
    n_admitted++;
    a->verdict = XFER_ENTER;
    a->port = 1;
}

static void parse(const uint8_t *data, size_t n)
{
    struct xfer_knock k;
    struct xfer_answer a;
    uint8_t knock[XFER_KNOCK_BYTES] = {0}, answer[XFER_ANSWER_BYTES] = {0};
    size_t len = n < sizeof(knock) ? n : sizeof(knock);
    memcpy(answer, data, n < sizeof(answer) ? n : sizeof(answer));
    if (xfer_answer_decode(answer, &a)) {
        xfer_answer_encode(&a, answer);
    }
    if (xfer_knock_decode(data, len, &k) == XFER_KNOCK_WHOLE) {
        xfer_knock_encode(&k, knock);
        if (memcmp(knock, data, sizeof(knock)) != 0) {
            abort();
        }
    }
}

static void visit(struct bt_xfer *x, const uint8_t *data, size_t n, size_t piece)
{
    struct xfer_gate_hooks hooks = {.arg = x, .admit = admit};
    struct sockaddr_storage from = {.ss_family = AF_INET};
    struct xfer_gate *g;
    int fd[2];
    if (xfer_gate_create(x, &hooks, &g, NULL) != BT_OK) {
        return;
    }
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fd) == 0) {
        n_admitted = 0;
        xfer_gate_take(g, fd[0], &from);
        for (size_t at = 0; at < n; at += piece) {
            size_t len = n - at < piece ? n - at : piece;
            if (send(fd[1], data + at, len, MSG_NOSIGNAL) < 0) {
                break;
            }
            xfer_gate_step(g);
        }
        x->now_ns += GATE_GREETING_NS;
        xfer_gate_step(g);
        if (n_admitted > 1 || xfer_gate_deadline(g) != UINT64_MAX) {
            abort();
        }
        close(fd[1]);
    }
    xfer_gate_destroy(g);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct bt_xfer_hub *hub;
    struct bt_xfer *x;
    struct bt_xfer_opts o = {.manual = true,
                             .instance = 2,
                             .token = {"0123456789abcde"},
                             .listen = "loop:d",
                             .fingerprint = "m",
                             .layout = "k"};
    bt_log_setup(BT_LOG_ERROR, BT_LOG_TEXT);
    if (n == 0 || bt_xfer_hub_create(NULL, &hub) != BT_OK) {
        return 0;
    }
    parse(data + 1, n - 1);
    o.hub = hub;
    if (bt_xfer_create(&o, &x, NULL) == BT_OK) {
        visit(x, data + 1, n - 1, data[0] == 0 ? n : data[0]);
        bt_xfer_destroy(x);
    }
    bt_xfer_hub_destroy(hub);
    return 0;
}
