/* The engine thread behind its rings: a job from submit to release, and a loop that hands over and
 * takes back jobs faster than the engine can look at them. */

#include "base/clock.h"
#include "base/mem.h"
#include "net/loop.h"
#include "node/engine_thread.h"
#include "tests/check.h"
#include "tests/tiny_model.h"

#define WAIT_NS (30 * BT_NS_PER_S)

struct seen {
    struct bt_net_loop *loop;
    uint32_t n_started, n_tokens, n_failed, n_pages, n_short;
    uint64_t token_job;
};

static void on_event(void *arg, const struct bt_engine_ev *ev)
{
    struct seen *s = arg;

    s->n_started += ev->kind == BT_ENGINE_EV_STARTED;
    s->n_failed += ev->kind == BT_ENGINE_EV_FAILED;
    s->n_pages += ev->kind == BT_ENGINE_EV_PAGES;
    s->n_short += ev->kind == BT_ENGINE_EV_SHORT;
    CHECK(ev->kind != BT_ENGINE_EV_BROKEN);
    if (ev->kind == BT_ENGINE_EV_TOKEN) {
        s->n_tokens++;
        s->token_job = ev->job;
    }
}

static struct bt_engine_thread *start_with(const char *model, uint32_t max_jobs, uint64_t kv_bytes,
                                           struct seen *s)
{
    const struct bt_engine_opts o = {.model_path = model,
                                     .backend = "cpu",
                                     .n_threads = 1,
                                     .kv_bytes = kv_bytes,
                                     .page_tokens = 16,
                                     .kv_dtype = BT_DTYPE_F32,
                                     .chunk_tokens = 32,
                                     .max_batch = 4,
                                     .max_seqs = max_jobs};
    struct bt_engine *e = NULL;
    struct bt_engine_thread *t = NULL;
    struct bt_err err = {0};

    *s = (struct seen){0};
    CHECK_EQ(bt_net_loop_create(&s->loop), BT_OK);
    if (bt_engine_create(&o, &e, &err) != BT_OK) {
        fprintf(stderr, "engine: %s\n", err.msg);
        exit(1);
    }
    CHECK_EQ(bt_engine_thread_start(s->loop, e, max_jobs, on_event, s, &t), BT_OK);
    return t;
}

static struct bt_engine_thread *start(const char *model, uint32_t max_jobs, struct seen *s)
{
    return start_with(model, max_jobs, UINT64_C(1) << 20, s);
}

static void stop(struct bt_engine_thread *t, struct seen *s)
{
    CHECK_EQ(bt_engine_thread_snapshot(t).sealed_heap_calls, 0);
    bt_engine_thread_stop(t);
    bt_net_loop_destroy(s->loop);
}

static enum bt_status submit(struct bt_engine_thread *t, uint64_t job)
{
    static const uint32_t tokens[20] = {5, 6, 7, 8};
    const struct bt_sampling sampling = {
        .top_p = 1, .repetition_penalty = 1, .max_tokens = 4, .ignore_eos = true};

    return bt_engine_thread_submit(
        t, job,
        &(struct bt_engine_req){
            .tokens = tokens, .n_tokens = 20, .n_prompt = 20, .sampling = &sampling, .hold = true});
}

/* Everything is free again. */
static bool idle(struct bt_engine_thread *t)
{
    struct bt_engine_snapshot s = bt_engine_thread_snapshot(t);

    return s.pages.leased + s.pages.quarantined + s.load.n_waiting + s.load.n_running +
               s.load.n_held ==
           0;
}

static void test_one_job(const char *model)
{
    struct seen s;
    struct bt_engine_thread *t = start(model, 4, &s);
    const uint64_t job = UINT64_C(9) << 32 | 3;
    uint64_t until = bt_clock_ns() + WAIT_NS;

    CHECK_EQ(submit(t, job), BT_OK);
    while (s.n_tokens == 0 && bt_clock_ns() < until) {
        bt_net_loop_step(s.loop, BT_NS_PER_MS);
    }
    CHECK_EQ(s.n_started, 1);
    CHECK_EQ(s.n_tokens, 1);
    CHECK_EQ(s.token_job, job);
    CHECK_EQ(s.n_pages, TINY_LAYERS); /* two pages, completed in one chunk: one event a layer */
    CHECK(!idle(t));
    bt_engine_thread_release(t, job);
    while (!idle(t) && bt_clock_ns() < until) {
        bt_net_loop_step(s.loop, BT_NS_PER_MS);
    }
    CHECK(idle(t));
    stop(t, &s);
}

/* Each job is taken back at once and its slot used again: the engine is always behind. Work beyond
 * what the ring holds is refused, what ends work never is. */
static void test_flood(const char *model)
{
    struct seen s;
    struct bt_engine_thread *t = start(model, 1, &s);
    uint32_t n_taken = 0, n_busy = 0;

    for (uint64_t generation = 1; generation <= 20000; generation++) {
        uint64_t job = generation << 32;
        enum bt_status st = submit(t, job);

        if (st == BT_OK) {
            n_taken++;
            bt_engine_thread_cancel(t, job);
            bt_engine_thread_release(t, job);
        } else {
            CHECK_EQ(st, BT_ERR_BUSY);
            n_busy++;
        }
        if (generation % 64 == 0) {
            bt_net_loop_step(s.loop, 0);
        }
    }
    CHECK(n_taken > 0);
    CHECK(n_busy > 0);
    for (uint64_t until = bt_clock_ns() + WAIT_NS; bt_clock_ns() < until;) {
        bt_net_loop_step(s.loop, BT_NS_PER_MS);
        uint32_t before = s.n_tokens;

        if (submit(t, UINT64_C(30000) << 32) == BT_OK) { /* it still works */
            while (s.n_tokens == before && bt_clock_ns() < until) {
                bt_net_loop_step(s.loop, BT_NS_PER_MS);
            }
            break;
        }
    }
    CHECK_EQ(s.token_job, UINT64_C(30000) << 32);
    stop(t, &s);
}

/* A prompt that waits for the pages of a held one is told of, also by the engine that sleeps then. */
static void test_short_of_pages(const char *model)
{
    struct seen s;
    struct bt_engine_thread *t = start(model, 4, &s);
    const struct bt_engine_layout *l = bt_engine_layout(bt_engine_thread_engine(t));
    uint64_t page_bytes = (uint64_t)l->groups[0].n_layers * l->groups[0].page_layer_bytes;
    uint64_t until = bt_clock_ns() + WAIT_NS;

    stop(t, &s);
    t = start_with(model, 4, 3 * page_bytes, &s); /* a prompt takes two */
    CHECK_EQ(submit(t, UINT64_C(1) << 32), BT_OK);
    while (s.n_tokens == 0 && bt_clock_ns() < until) {
        bt_net_loop_step(s.loop, BT_NS_PER_MS);
    }
    CHECK_EQ(s.n_short, 0);
    CHECK_EQ(submit(t, UINT64_C(1) << 32 | 1), BT_OK);
    while ((s.n_short == 0 || !bt_engine_thread_snapshot(t).load.pages_short) &&
           bt_clock_ns() < until) {
        bt_net_loop_step(s.loop, BT_NS_PER_MS);
    }
    CHECK(s.n_short > 0);
    CHECK(bt_engine_thread_snapshot(t).load.pages_short);
    CHECK_EQ(s.n_started, 1);
    bt_engine_thread_release(t, UINT64_C(1) << 32);
    while ((s.n_tokens < 2 || bt_engine_thread_snapshot(t).load.pages_short) &&
           bt_clock_ns() < until) {
        bt_net_loop_step(s.loop, BT_NS_PER_MS);
    }
    CHECK_EQ(s.n_tokens, 2);
    CHECK(!bt_engine_thread_snapshot(t).load.pages_short);
    stop(t, &s);
}

int main(void)
{
    struct tiny_model m;

    tiny_llama(&m);
    const char *model = tiny_write(&m, tiny_config, 1);

    test_one_job(model);
    test_flood(model);
    test_short_of_pages(model);
    tiny_clean();
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
