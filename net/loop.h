#ifndef BT_NET_LOOP_H
#define BT_NET_LOOP_H

/* One libuv loop and the small things every daemon hangs on it: timers, deferred calls, an inbox
 * from other threads, work on the libuv pool, signals. Everything belongs to the thread that runs
 * the loop, except bt_inbox_post() and bt_net_loop_wake_stop(). Callbacks run on the loop thread
 * and must stay under 1 ms. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct uv_loop_s;
struct bt_net_loop;

/* Also makes the process ignore SIGPIPE, which libuv's writes would raise. */
enum bt_status bt_net_loop_create(struct bt_net_loop **out) BT_NODISCARD;
/* Runs until bt_net_loop_stop(); keeps waiting even when no handle is active. */
void bt_net_loop_run(struct bt_net_loop *l);
/* Runs ready callbacks once; waits for the first at most timeout_ns. For tests and shutdown. */
void bt_net_loop_step(struct bt_net_loop *l, uint64_t timeout_ns);
void bt_net_loop_stop(struct bt_net_loop *l);
/* The same from any thread. */
void bt_net_loop_wake_stop(struct bt_net_loop *l);
/* Everything created on the loop must be closed or destroyed first (their memory may still be
 * pending: it is released here). A handle left open is a bug and asserts. */
void bt_net_loop_destroy(struct bt_net_loop *l);
/* For rooms that poll their own descriptors with libuv. */
struct uv_loop_s *bt_net_loop_uv(struct bt_net_loop *l);
/* Monotonic time, bt_clock_ns(). */
uint64_t bt_net_loop_now(const struct bt_net_loop *l);

/* ---- timers: embedded in the caller's struct, zero-initialised is stopped, starting cannot fail
 * ---- */

struct bt_timer;
typedef void bt_timer_fn(struct bt_timer *t, void *arg);
struct bt_timer {
    struct bt_timer *child, *next, *prev; /* pairing heap; private */
    uint64_t due_ns;
    bt_timer_fn *fn;
    void *arg;
    bool active;
};
/* One shot, delay_ns from now (1 ms resolution, never early). Restarting an active timer moves it.
 * The struct must stay in place while active. Stop before freeing it. */
void bt_timer_start(struct bt_net_loop *l, struct bt_timer *t, uint64_t delay_ns, bt_timer_fn *fn,
                    void *arg);
void bt_timer_stop(struct bt_net_loop *l, struct bt_timer *t);

/* ---- deferred call: runs once on the loop, soon, never inside bt_task_defer() ---- */

struct bt_task;
typedef void bt_task_fn(struct bt_task *t, void *arg);
struct bt_task {
    struct bt_task *next, *prev; /* private */
    bt_task_fn *fn;
    void *arg;
    bool queued;
};
void bt_task_defer(struct bt_net_loop *l, struct bt_task *t, bt_task_fn *fn,
                   void *arg); /* queued: no-op */
void bt_task_cancel(struct bt_net_loop *l, struct bt_task *t);

/* ---- inbox: fixed-size messages from any thread, one coalesced wake ---- */

struct bt_inbox;
typedef void bt_inbox_fn(void *arg, const void *msg);
/* handle is called on the loop thread for each message, in order, at most 256 a wake. */
enum bt_status bt_inbox_create(struct bt_net_loop *l, size_t msg_bytes, size_t n_msgs,
                               bt_inbox_fn *handle, void *arg, struct bt_inbox **out) BT_NODISCARD;
/* Any thread; copies msg_bytes. false: full, nothing was posted. */
bool bt_inbox_post(struct bt_inbox *in, const void *msg) BT_NODISCARD;
/* Loop thread, when no other thread posts any more. Messages left are dropped. */
void bt_inbox_destroy(struct bt_inbox *in);

/* ---- work on the libuv pool ---- */

/* work runs on a pool thread, then done on the loop thread, exactly once (also after a refused
 * start: never). work must touch only what arg gives it. */
enum bt_status bt_net_work(struct bt_net_loop *l, void (*work)(void *arg), void (*done)(void *arg),
                           void *arg) BT_NODISCARD;

/* ---- signals ---- */

struct bt_net_signal;
typedef void bt_net_signal_fn(void *arg, int signum);
enum bt_status bt_net_signal_start(struct bt_net_loop *l, int signum, bt_net_signal_fn *fn,
                                   void *arg, struct bt_net_signal **out) BT_NODISCARD;
/* Frees it; NULL is legal. The signal is ignored from then on. */
void bt_net_signal_stop(struct bt_net_signal *s);

#ifdef __cplusplus
}
#endif
#endif
