#ifndef BT_NODE_ENGINE_THREAD_H
#define BT_NODE_ENGINE_THREAD_H

/* The engine thread of prefilld and decoded: owns the bt_engine, takes commands from the loop
 * through a bounded ring, runs steps while there is work, sleeps otherwise, and posts events to the
 * loop.
 *
 * Sequences are named by the caller's job id (generational, slot in the low 32 bits), so that a
 * command may follow its submit without waiting for an answer. Commands are carried out in order.
 *
 * The thread is sealed (base/mem.h): it never calls the heap once it runs. */

#include <stdbool.h>
#include <stdint.h>
#include "base/status.h"
#include "engine/engine.h"

struct bt_engine_thread;
struct bt_net_loop;

enum bt_engine_ev_kind {
    BT_ENGINE_EV_FAILED,  /* submit or land was refused: status, text; the job is unknown to the
                             engine */
    BT_ENGINE_EV_STARTED, /* the first chunk begins */
    BT_ENGINE_EV_PAGES,   /* pages of one layer are complete */
    BT_ENGINE_EV_TOKEN,
    BT_ENGINE_EV_PROMPT_LOGPROBS, /* a part of them */
    BT_ENGINE_EV_PREEMPTED,       /* the engine forgot the job */
    BT_ENGINE_EV_SHORT,  /* a prompt waits for pages that others hold (after each step, and before
                               sleeping), or a landing found none; job 0 */
    BT_ENGINE_EV_LANDED, /* pages are leased */
    BT_ENGINE_EV_STEP,   /* end of a step: all its tokens were posted */
    BT_ENGINE_EV_CACHE,  /* blocks came into the prefix cache, or left it */
    BT_ENGINE_EV_BROKEN, /* the device failed: the engine thread has stopped, status, text */
};

/* Pointers are valid during the callback only. */
struct bt_engine_ev {
    enum bt_engine_ev_kind kind;
    uint64_t job;
    enum bt_status status;
    const char *text;
    uint32_t n_cached; /* STARTED, LANDED: tokens whose KV the prefix cache had */
    struct {
        uint32_t group, layer, first, end; /* absolute page numbers */
        const uint32_t *page_ids;          /* [end - first]: of pages first, first + 1, … */
    } pages;
    struct bt_engine_token token;
    struct {
        uint32_t first; /* prompt position of list[0] */
        uint32_t n;
        const struct bt_sampled *list;
    } prompt_logprobs;
    struct {
        uint32_t n_pages;
        uint32_t first_page[BT_MODEL_KV_GROUPS_MAX];
        const uint32_t *page_ids[BT_MODEL_KV_GROUPS_MAX];
    } landed;
    struct bt_engine_step_stats step;
    struct {
        uint32_t n;
        const struct bt_prefix_change *list;
    } cache;
};
typedef void bt_engine_ev_fn(void *arg, const struct bt_engine_ev *ev);

/* Takes over the engine. handle runs on the loop thread. max_jobs: slots that job ids may use. */
enum bt_status bt_engine_thread_start(struct bt_net_loop *l, struct bt_engine *e, uint32_t max_jobs,
                                      bt_engine_ev_fn *handle, void *arg,
                                      struct bt_engine_thread **out) BT_NODISCARD;
/* Stops after the running step, joins, destroys the engine. No event is delivered after. */
void bt_engine_thread_stop(struct bt_engine_thread *t);

/* Loop thread. req is copied. BT_ERR_NOMEM, BT_ERR_BUSY (the engine is too far behind): nothing was
 * queued, the job is unknown to the engine. At most max_jobs jobs at once, each with at most one of
 * each command below: those are always taken. */
enum bt_status bt_engine_thread_submit(struct bt_engine_thread *t, uint64_t job,
                                       const struct bt_engine_req *req) BT_NODISCARD;
enum bt_status bt_engine_thread_land(struct bt_engine_thread *t, uint64_t job,
                                     const struct bt_engine_req *req) BT_NODISCARD;
void bt_engine_thread_begin(struct bt_engine_thread *t, uint64_t job,
                            uint32_t first_token); /* bt_engine_start */
void bt_engine_thread_quarantine(struct bt_engine_thread *t, uint64_t job);
void bt_engine_thread_cancel(struct bt_engine_thread *t,
                             uint64_t job); /* may abandon the running pass */
void bt_engine_thread_release(struct bt_engine_thread *t,
                              uint64_t job); /* no event of this job follows its handling */

/* A recent copy, any thread. */
struct bt_engine_snapshot {
    struct bt_engine_pages pages;
    struct bt_engine_load load;
    uint64_t n_steps, n_prefill_tokens, n_decode_tokens, n_host_draws;
    uint64_t prefill_ns, decode_ns; /* compute time of steps with and without prompt tokens */
    double prefill_tokens_per_s;    /* moving average, of steps with about as many tokens as the
                                       largest; 0 before the first */
    uint32_t prefill_step_max;      /* prompt tokens of the largest step */
    double decode_step_ms;
    uint64_t sealed_heap_calls; /* of the thread: 0, or a bug */
};
struct bt_engine_snapshot bt_engine_thread_snapshot(struct bt_engine_thread *t);
/* Layers computed since the start, of all steps: it grows while the engine works, and no more when it hangs. Any thread. */
uint64_t bt_engine_thread_layers(struct bt_engine_thread *t);
/* Immutable after start. */
const struct bt_engine *bt_engine_thread_engine(const struct bt_engine_thread *t);

#endif
