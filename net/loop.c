/* The loop object: a uv_loop_t with a pairing heap of timers behind one uv_timer_t, a list of
 * deferred calls behind one uv_idle_t, and wrappers for async, pool work and signals. It knows
 * nothing of sockets or protocols. */

#include "net/loop.h"
#include "net/loop_int.h"

#include <pthread.h>
#include <signal.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/ring.h"

#define INBOX_BATCH 256

/* ---- timers ---- */

static struct bt_timer *heap_merge(struct bt_timer *a, struct bt_timer *b)
{
    if (a == NULL) {
        return b;
    }
    if (b == NULL) {
        return a;
    }
    if (b->due_ns < a->due_ns) {
        struct bt_timer *t = a;
        a = b;
        b = t;
    }
    /* b becomes the first child of a; prev of a first child is its parent */
    b->next = a->child;
    if (a->child != NULL) {
        a->child->prev = b;
    }
    b->prev = a;
    a->child = b;
    a->next = NULL;
    a->prev = NULL;
    return a;
}

/* The usual two passes: pairs from left to right, then all into one. Iterative: a list may be long.
 */
static struct bt_timer *heap_merge_list(struct bt_timer *first)
{
    struct bt_timer *pairs = NULL;

    while (first != NULL) {
        struct bt_timer *a = first;
        struct bt_timer *b = a->next;
        first = b != NULL ? b->next : NULL;
        a->next = a->prev = NULL;
        if (b != NULL) {
            b->next = b->prev = NULL;
        }
        a = heap_merge(a, b);
        a->next = pairs;
        pairs = a;
    }
    struct bt_timer *root = NULL;
    while (pairs != NULL) {
        struct bt_timer *a = pairs;
        pairs = a->next;
        a->next = NULL;
        root = heap_merge(root, a);
    }
    return root;
}

static void heap_remove(struct bt_net_loop *l, struct bt_timer *t)
{
    if (l->timers == t) {
        l->timers = heap_merge_list(t->child);
    } else {
        if (t->prev->child == t) {
            t->prev->child = t->next;
        } else {
            t->prev->next = t->next;
        }
        if (t->next != NULL) {
            t->next->prev = t->prev;
        }
        l->timers = heap_merge(l->timers, heap_merge_list(t->child));
    }
    t->child = t->next = t->prev = NULL;
    t->active = false;
}

static void on_uv_timer(uv_timer_t *h);

static void arm(struct bt_net_loop *l)
{
    if (l->timers == NULL) {
        if (l->armed_ns != UINT64_MAX) {
            (void)uv_timer_stop(&l->timer); /* cannot fail on an initialised handle */
            l->armed_ns = UINT64_MAX;
        }
        return;
    }
    uint64_t due = l->timers->due_ns;
    if (due == l->armed_ns) {
        return;
    }
    uint64_t now = bt_clock_ns();
    uint64_t ms = due > now ? (due - now + BT_NS_PER_MS - 1) / BT_NS_PER_MS : 0;
    uv_update_time(
        &l->uv); /* libuv counts from its cached time, which may be old by a long callback */
    (void)uv_timer_start(&l->timer, on_uv_timer, ms, 0); /* fails only without a callback */
    l->armed_ns = due;
}

static void on_uv_timer(uv_timer_t *h)
{
    struct bt_net_loop *l = h->data;
    uint64_t now = bt_clock_ns();

    l->armed_ns = UINT64_MAX;
    while (l->timers != NULL && l->timers->due_ns <= now) {
        struct bt_timer *t = l->timers;
        heap_remove(l, t);
        t->fn(t, t->arg);
    }
    arm(l);
}

void bt_timer_start(struct bt_net_loop *l, struct bt_timer *t, uint64_t delay_ns, bt_timer_fn *fn,
                    void *arg)
{
    if (t->active) {
        heap_remove(l, t);
    }
    uint64_t now = bt_clock_ns();
    /* A timer started with no delay inside a timer callback must not run in the same round for
     * ever. */
    t->due_ns = delay_ns > UINT64_MAX - now ? UINT64_MAX : now + (delay_ns > 0 ? delay_ns : 1);
    t->fn = fn;
    t->arg = arg;
    t->child = t->next = t->prev = NULL;
    t->active = true;
    l->timers = heap_merge(l->timers, t);
    arm(l);
}

void bt_timer_stop(struct bt_net_loop *l, struct bt_timer *t)
{
    if (!t->active) {
        return;
    }
    heap_remove(l, t);
    arm(l);
}

/* ---- deferred calls ---- */

static void task_unlink(struct bt_task *t)
{
    t->prev->next = t->next;
    t->next->prev = t->prev;
    t->next = t->prev = NULL;
    t->queued = false;
}

/* Runs what is queued now; what these calls queue waits for the next turn, so that I/O gets its
 * share. */
static void on_idle(uv_idle_t *h)
{
    struct bt_net_loop *l = h->data;
    struct bt_task mark = {.queued = false};

    /* The mark sits behind the last one of this turn. */
    mark.prev = l->tasks.prev;
    mark.next = &l->tasks;
    mark.prev->next = &mark;
    l->tasks.prev = &mark;
    while (l->tasks.next != &mark) {
        struct bt_task *t = l->tasks.next;
        task_unlink(t);
        t->fn(t, t->arg);
    }
    task_unlink(&mark);
    if (l->tasks.next == &l->tasks) {
        (void)uv_idle_stop(&l->idle); /* cannot fail */
    }
}

void bt_task_defer(struct bt_net_loop *l, struct bt_task *t, bt_task_fn *fn, void *arg)
{
    if (t->queued) {
        return;
    }
    t->fn = fn;
    t->arg = arg;
    t->queued = true;
    t->prev = l->tasks.prev;
    t->next = &l->tasks;
    t->prev->next = t;
    l->tasks.prev = t;
    if (!uv_is_active((uv_handle_t *)&l->idle)) {
        (void)uv_idle_start(&l->idle, on_idle); /* fails only without a callback */
    }
}

void bt_task_cancel(struct bt_net_loop *l, struct bt_task *t)
{
    (void)l;
    if (t->queued) {
        task_unlink(t);
    }
}

/* ---- loop ---- */

static void on_wake(uv_async_t *h)
{
    uv_stop(h->loop);
}

enum bt_status bt_net_loop_create(struct bt_net_loop **out)
{
    struct bt_net_loop *l = bt_calloc(1, sizeof *l);

    if (l == NULL) {
        return BT_ERR_NOMEM;
    }
    (void)signal(SIGPIPE, SIG_IGN); /* libuv writes without MSG_NOSIGNAL; a closed peer is an error
                                       code, not a death */
    l->read_buf = bt_alloc(BT_NET_READ_BYTES);
    if (l->read_buf == NULL) {
        goto err_free;
    }
    if (uv_loop_init(&l->uv) != 0) {
        goto err_buf;
    }
    if (uv_async_init(&l->uv, &l->wake, on_wake) != 0) {
        goto err_loop;
    }
    (void)uv_timer_init(&l->uv, &l->timer); /* these two always succeed */
    (void)uv_idle_init(&l->uv, &l->idle);
    l->timer.data = l;
    l->idle.data = l;
    l->armed_ns = UINT64_MAX;
    l->tasks.next = l->tasks.prev = &l->tasks;
    *out = l;
    return BT_OK;
err_loop:
    (void)uv_loop_close(&l->uv); /* nothing was opened on it */
err_buf:
    bt_free(l->read_buf);
err_free:
    bt_free(l);
    return BT_ERR_NOMEM;
}

void bt_net_loop_run(struct bt_net_loop *l)
{
    (void)uv_run(&l->uv, UV_RUN_DEFAULT); /* tells only whether handles are left */
}

static void step_timeout(struct bt_timer *t, void *arg)
{
    (void)t;
    (void)arg;
}

void bt_net_loop_step(struct bt_net_loop *l, uint64_t timeout_ns)
{
    struct bt_timer t = {.active = false};

    if (timeout_ns == 0) {
        (void)uv_run(&l->uv, UV_RUN_NOWAIT);
        return;
    }
    bt_timer_start(l, &t, timeout_ns, step_timeout, NULL);
    (void)uv_run(&l->uv, UV_RUN_ONCE);
    bt_timer_stop(l, &t);
}

void bt_net_loop_stop(struct bt_net_loop *l)
{
    uv_stop(&l->uv);
}

void bt_net_loop_wake_stop(struct bt_net_loop *l)
{
    (void)uv_async_send(&l->wake); /* fails only on a closed handle */
}

void bt_net_loop_destroy(struct bt_net_loop *l)
{
    if (l == NULL) {
        return;
    }
    /* Deferred closes first: they may still need the idle and timer handles. */
    while (l->tasks.next != &l->tasks) {
        (void)uv_run(&l->uv, UV_RUN_NOWAIT);
    }
    uv_close((uv_handle_t *)&l->wake, NULL);
    uv_close((uv_handle_t *)&l->timer, NULL);
    uv_close((uv_handle_t *)&l->idle, NULL);
    (void)uv_run(&l->uv, UV_RUN_DEFAULT);
    int rc = uv_loop_close(&l->uv);
    BT_ASSERT(rc == 0); /* a handle was left open */
    bt_free(l->read_buf);
    bt_buf_fini(&l->pull_buf);
    bt_buf_fini(&l->tls_buf);
    bt_free(l);
}

struct uv_loop_s *bt_net_loop_uv(struct bt_net_loop *l)
{
    return &l->uv;
}

uint64_t bt_net_loop_now(const struct bt_net_loop *l)
{
    (void)l;
    return bt_clock_ns();
}

/* ---- inbox ---- */

struct bt_inbox {
    uv_async_t async;
    struct bt_ring *ring;
    bt_inbox_fn *handle;
    void *arg;
    void *msg; /* one message, for the pop */
    bool closed;
};

static void inbox_on_async(uv_async_t *h)
{
    struct bt_inbox *in = h->data;
    unsigned n = 0;

    while (n < INBOX_BATCH && !in->closed && bt_ring_pop(in->ring, in->msg)) {
        in->handle(in->arg, in->msg);
        n++;
    }
    if (n == INBOX_BATCH && !in->closed) {
        (void)uv_async_send(h); /* sends coalesce: one wake may cover many messages */
    }
}

enum bt_status bt_inbox_create(struct bt_net_loop *l, size_t msg_bytes, size_t n_msgs,
                               bt_inbox_fn *handle, void *arg, struct bt_inbox **out)
{
    struct bt_inbox *in = bt_calloc(1, sizeof *in);

    if (in == NULL) {
        return BT_ERR_NOMEM;
    }
    in->handle = handle;
    in->arg = arg;
    in->msg = bt_alloc(msg_bytes);
    if (in->msg == NULL) {
        goto err_free;
    }
    if (bt_ring_create(msg_bytes, n_msgs, &in->ring) != BT_OK) {
        goto err_msg;
    }
    if (uv_async_init(&l->uv, &in->async, inbox_on_async) != 0) {
        goto err_ring;
    }
    in->async.data = in;
    *out = in;
    return BT_OK;
err_ring:
    bt_ring_destroy(in->ring);
err_msg:
    bt_free(in->msg);
err_free:
    bt_free(in);
    return BT_ERR_NOMEM;
}

bool bt_inbox_post(struct bt_inbox *in, const void *msg)
{
    if (!bt_ring_push(in->ring, msg)) {
        return false;
    }
    (void)uv_async_send(&in->async); /* fails only on a closed handle */
    return true;
}

static void inbox_on_closed(uv_handle_t *h)
{
    struct bt_inbox *in = h->data;

    bt_ring_destroy(in->ring);
    bt_free(in->msg);
    bt_free(in);
}

void bt_inbox_destroy(struct bt_inbox *in)
{
    if (in == NULL) {
        return;
    }
    in->closed = true;
    uv_close((uv_handle_t *)&in->async, inbox_on_closed);
}

/* ---- pool work ---- */

struct pool_work {
    uv_work_t req;
    void (*work)(void *arg);
    void (*done)(void *arg);
    void *arg;
};

static void pool_run(uv_work_t *req)
{
    struct pool_work *w = req->data;

    w->work(w->arg);
}

static void pool_done(uv_work_t *req, int status)
{
    struct pool_work *w = req->data;

    (void)status; /* only uv_cancel() makes it non-zero */
    w->done(w->arg);
    bt_free(w);
}

enum bt_status bt_net_work(struct bt_net_loop *l, void (*work)(void *arg), void (*done)(void *arg),
                           void *arg)
{
    struct pool_work *w = bt_calloc(1, sizeof *w);

    if (w == NULL) {
        return BT_ERR_NOMEM;
    }
    w->req.data = w;
    w->work = work;
    w->done = done;
    w->arg = arg;
    if (uv_queue_work(&l->uv, &w->req, pool_run, pool_done) != 0) {
        bt_free(w);
        return BT_ERR_NOMEM;
    }
    return BT_OK;
}

/* ---- signals ---- */

struct bt_net_signal {
    uv_signal_t sig;
    bt_net_signal_fn *fn;
    void *arg;
};

static void on_signal(uv_signal_t *h, int signum)
{
    struct bt_net_signal *s = h->data;

    s->fn(s->arg, signum);
}

static void signal_on_closed(uv_handle_t *h)
{
    bt_free(h->data);
}

enum bt_status bt_net_signal_start(struct bt_net_loop *l, int signum, bt_net_signal_fn *fn,
                                   void *arg, struct bt_net_signal **out)
{
    struct bt_net_signal *s = bt_calloc(1, sizeof *s);

    if (s == NULL) {
        return BT_ERR_NOMEM;
    }
    s->fn = fn;
    s->arg = arg;
    if (uv_signal_init(&l->uv, &s->sig) != 0) {
        bt_free(s);
        return BT_ERR_NOMEM;
    }
    s->sig.data = s;
    int rc = uv_signal_start(&s->sig, on_signal, signum);
    if (rc != 0) {
        bt_log_error("net", "signal %d: %s", signum, uv_strerror(rc));
        uv_close((uv_handle_t *)&s->sig, signal_on_closed);
        return BT_ERR_INVALID;
    }
    *out = s;
    return BT_OK;
}

/* libuv gives the signal its default action again, which would be death by a signal of a process that is about
 * to exit by itself: so it is ignored from here on, and held back in between. */
void bt_net_signal_stop(struct bt_net_signal *s)
{
    if (s == NULL) {
        return;
    }
    int signum = s->sig.signum;
    sigset_t one, before;

    sigemptyset(&one);
    sigaddset(&one, signum);
    pthread_sigmask(SIG_BLOCK, &one, &before);
    uv_close((uv_handle_t *)&s->sig, signal_on_closed);
    (void)signal(signum, SIG_IGN);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}
