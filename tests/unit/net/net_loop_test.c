/* Timers against a plain model, deferred calls, the inbox between threads, pool work. */

#include "net/loop.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/clock.h"
#include "tests/check.h"

#define N_TIMERS 400

struct timers {
    struct bt_net_loop *l;
    struct bt_timer t[N_TIMERS];
    uint64_t last_due;
    int fired, out_of_order, early, unwanted;
    bool stopped[N_TIMERS];
};

static void on_timer(struct bt_timer *t, void *arg)
{
    struct timers *m = arg;

    m->fired++;
    m->out_of_order += t->due_ns < m->last_due;
    m->early += bt_clock_ns() < t->due_ns;
    m->unwanted += m->stopped[t - m->t];
    m->last_due = t->due_ns;
}

static void test_timers(struct bt_net_loop *l)
{
    static struct timers m;
    int expected = 0;
    unsigned rnd = 7;

    m.l = l;
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < N_TIMERS; i++) {
            rnd = rnd * 1103515245 + 12345;
            unsigned what = rnd >> 16;
            if (what % 4 == 0) {
                bt_timer_stop(l, &m.t[i]);
                m.stopped[i] = true;
            } else {
                bt_timer_start(l, &m.t[i], (what % 40) * BT_NS_PER_MS, on_timer, &m);
                m.stopped[i] = false;
            }
        }
    }
    for (int i = 0; i < N_TIMERS; i++) {
        expected += m.t[i].active;
        CHECK(m.t[i].active == !m.stopped[i]);
    }
    uint64_t until = bt_clock_ns() + 2 * BT_NS_PER_S;
    while (m.fired < expected && bt_clock_ns() < until) {
        bt_net_loop_step(l, 100 * BT_NS_PER_MS);
    }
    CHECK_EQ(m.fired, expected);
    CHECK_EQ(m.out_of_order, 0);
    CHECK_EQ(m.early, 0);
    CHECK_EQ(m.unwanted, 0);
}

struct tasks {
    struct bt_net_loop *l;
    struct bt_task a, b;
    int runs_a, runs_b;
};

static void run_b(struct bt_task *t, void *arg)
{
    struct tasks *m = arg;

    (void)t;
    m->runs_b++;
}

static void run_a(struct bt_task *t, void *arg)
{
    struct tasks *m = arg;

    m->runs_a++;
    if (m->runs_a < 3) {
        bt_task_defer(m->l, t, run_a, m); /* itself again: in the next turn */
    }
    bt_task_cancel(m->l, &m->b);
}

static void test_tasks(struct bt_net_loop *l)
{
    struct tasks m = {.l = l};

    bt_task_defer(l, &m.a, run_a, &m);
    bt_task_defer(l, &m.a, run_a, &m);
    bt_task_defer(l, &m.b, run_b, &m);
    CHECK_EQ(m.runs_a, 0);
    for (int i = 0; i < 10; i++) {
        bt_net_loop_step(l, 0);
    }
    CHECK_EQ(m.runs_a, 3);
    CHECK_EQ(m.runs_b, 0);
    bt_task_defer(l, &m.b, run_b, &m);
    bt_net_loop_step(l, 0);
    CHECK_EQ(m.runs_b, 1);
}

#define N_POSTS 20000

struct inbox {
    struct bt_net_loop *l;
    struct bt_inbox *in;
    int got, wrong;
};

static void on_message(void *arg, const void *msg)
{
    struct inbox *m = arg;
    int v;

    memcpy(&v, msg, sizeof v);
    m->wrong += v != m->got;
    m->got++;
    if (m->got == N_POSTS) {
        bt_net_loop_stop(m->l);
    }
}

static void *poster(void *arg)
{
    struct inbox *m = arg;

    for (int i = 0; i < N_POSTS; i++) {
        while (!bt_inbox_post(m->in, &i)) {
            sched_yield();
        }
    }
    return NULL;
}

static void test_inbox(struct bt_net_loop *l)
{
    struct inbox m = {.l = l};
    pthread_t th;

    CHECK_EQ(bt_inbox_create(l, sizeof(int), 512, on_message, &m, &m.in), BT_OK);
    CHECK_EQ(pthread_create(&th, NULL, poster, &m), 0);
    bt_net_loop_run(l);
    pthread_join(th, NULL);
    CHECK_EQ(m.got, N_POSTS);
    CHECK_EQ(m.wrong, 0);
    bt_inbox_destroy(m.in);
}

struct work {
    int worked, done;
};

static void work_run(void *arg)
{
    ((struct work *)arg)->worked++;
}

static void work_done(void *arg)
{
    ((struct work *)arg)->done++;
}

static void *waker(void *arg)
{
    bt_net_loop_wake_stop(arg);
    return NULL;
}

int main(void)
{
    struct bt_net_loop *l = NULL;
    struct work w = {0};
    pthread_t th;

    CHECK_EQ(bt_net_loop_create(&l), BT_OK);
    test_timers(l);
    test_tasks(l);
    test_inbox(l);
    CHECK_EQ(bt_net_work(l, work_run, work_done, &w), BT_OK);
    for (int i = 0; i < 100 && w.done == 0; i++) {
        bt_net_loop_step(l, 50 * BT_NS_PER_MS);
    }
    CHECK_EQ(w.worked, 1);
    CHECK_EQ(w.done, 1);
    CHECK_EQ(pthread_create(&th, NULL, waker, l), 0);
    bt_net_loop_run(l);
    pthread_join(th, NULL);
    bt_net_loop_destroy(l);
    return bt_test_done();
}
