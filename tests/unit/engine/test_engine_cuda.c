/* Engines on the CUDA backend: pages in device memory go from one engine to another as layers end, a step waits for the device
 * once, what is sampled there is what the host samples, nothing takes memory after the start, in every class that promises it an
 * answer has the same bits whatever the batch, chunks and pages, and a device that fails ends the work and brings no wrong token.
 * Arguments: model folders. */

#include <stdlib.h>
#include "base/mem.h"
#include "kernels/open.h"
#include "tests/check.h"
#include "tests/unit/engine/engine_drive.h"
#ifdef BT_CUDA_EMULATED
#include "kernels/cuda/emulation/emu_runtime_int.h"
#endif

#define N_RUNS     3
#define N_SAMPLERS 6

static const char *model, *numerics; /* NULL: the model's own class */

static struct bt_engine_opts opts(uint32_t page_tokens, uint32_t chunk_tokens, uint32_t max_batch)
{
    struct bt_engine_opts o = drive_opts(model, page_tokens, chunk_tokens, max_batch);

    o.numerics = numerics;
    return o;
}

static void make_runs(struct drive *d, struct drive_run **runs)
{
    for (uint32_t i = 0; i < N_RUNS; i++) {
        runs[i] = drive_make(bt_engine_model(d->engine), 9 + 17 * i, 6, i);
        CHECK_EQ(drive_submit(d, runs[i]), BT_OK);
    }
}

static void free_runs(struct drive_run **runs)
{
    for (uint32_t i = 0; i < N_RUNS; i++) {
        bt_free(runs[i]);
    }
}

/* What one engine computes alone is what two compute with the pages in between, whatever the chunks and pages. */
static void test_relay(void)
{
    static const uint32_t page_tokens[] = {16, 3}, chunk_tokens[] = {64, 7}, batch[] = {1, 4};
    struct drive_run *want[N_RUNS], *got[N_RUNS];
    struct bt_engine_opts o = opts(16, 64, 4);
    struct drive d;

    drive_init(&d, drive_open(&o), NULL);
    make_runs(&d, want);
    drive_finish(&d);
    drive_fini(&d);
    /* Alone, and beside prompts: steps of other sizes, and passes that are none. */
    for (uint32_t i = 0; i < 2; i++) {
        struct bt_engine_opts p = opts(16, i == 0 ? 64 : 5, batch[i]);

        drive_init(&d, drive_open(&p), NULL);
        make_runs(&d, got);
        drive_finish(&d);
        for (uint32_t r = 0; r < N_RUNS; r++) {
            CHECK(drive_same(want[r], got[r]));
        }
        free_runs(got);
        drive_fini(&d);
    }
    for (uint32_t i = 0; i < 2; i++) {
        struct bt_engine_opts p = opts(page_tokens[i], chunk_tokens[i], 4);

        drive_init(&d, drive_open(&p), drive_open(&p));
        make_runs(&d, got);
        drive_finish(&d);
        for (uint32_t r = 0; r < N_RUNS; r++) {
            CHECK(drive_same(want[r], got[r]));
            CHECK(got[r]->n_pages_copied > 0);
        }
        free_runs(got);
        drive_fini(&d);
    }
    free_runs(want);
}

/* Requests with every parameter that sampling knows, one of them echoed. */
static void make_samplers(struct drive *d, struct drive_run **runs)
{
    static const struct bt_logit_bias bias[] = {{3, 2.5F}, {9, -4.0F}, {3, 1.0F}};

    for (uint32_t i = 0; i < N_SAMPLERS; i++) {
        struct drive_run *r = drive_make(bt_engine_model(d->engine), 5 + 7 * i, 9, 11 * i + 1);
        struct bt_sampling *p = &r->sampling;

        p->temperature = i % 4 == 3 ? 0.0F : 1.3F;
        p->top_k = i % 3 == 1 ? 40 : 0;
        p->top_p = i % 2 == 1 ? 0.8F : 1.0F;
        p->min_p = i % 5 == 2 ? 0.02F : 0.0F;
        p->repetition_penalty = i % 2 == 0 ? 1.4F : 1.0F;
        p->presence_penalty = i % 3 == 0 ? 0.5F : 0.0F;
        p->frequency_penalty = i % 3 == 2 ? -0.4F : 0.0F;
        p->logprobs = i % 3 != 1;
        p->n_top = i % 3 == 0 ? 5 : 0;
        p->n_stop_ids = 1;
        p->stop_ids[0] = 7;
        p->n_bias = i % 2 == 0 ? 3 : 0;
        p->bias = bias;
        r->echo = i == 2;
        runs[i] = r;
        CHECK_EQ(drive_submit(d, r), BT_OK);
    }
}

/* Sampled on the host, on the device, and row by row on either (penalties over many tokens): the same to the bit. */
static void test_sampling(void)
{
    struct drive_run *want[N_SAMPLERS], *got[N_SAMPLERS];
    struct bt_engine_opts o = opts(16, 64, 4);
    struct drive d;

    o.host_sampling = true;
    drive_init(&d, drive_open(&o), NULL);
    make_samplers(&d, want);
    drive_finish(&d);
    drive_fini(&d);
    o.host_sampling = false;
    for (uint32_t i = 0; i < 3; i++) {
        o.device_seen_max = i == 0 ? 0 : 14;
        o.pinned_rows = i == 2 ? 1 : 0;
        drive_init(&d, drive_open(&o), NULL);
        make_samplers(&d, got);
        drive_finish(&d);
        for (uint32_t r = 0; r < N_SAMPLERS; r++) {
            CHECK(drive_same(want[r], got[r]));
            CHECK(got[r]->n_out > 0);
            bt_free(got[r]);
        }
        drive_fini(&d);
    }
    for (uint32_t r = 0; r < N_SAMPLERS; r++) {
        bt_free(want[r]);
    }
}

/* A pass whose sequences are all cancelled ends between two layers, and the device is through with it. */
static void test_cancel(void)
{
    struct bt_engine_opts o = opts(16, 64, 4);
    struct bt_engine_step_stats stats;
    struct drive_run *runs[N_RUNS];
    struct drive d;
    bool worked;

    drive_init(&d, drive_open(&o), NULL);
    make_runs(&d, runs);
    d.cancel_pending = true;
    CHECK_EQ(bt_engine_step(d.engine, &worked, &stats), BT_OK);
    CHECK_EQ(stats.n_spans, 0);
#ifdef BT_CUDA_EMULATED
    CHECK_EQ(emu_counts().n_queued, 0); /* whoever gets these pages next is alone with them */
#endif
    d.cancel_pending = false;
    for (uint32_t i = 0; i < N_RUNS; i++) {
        drive_release(&d, runs[i]);
    }
    free_runs(runs);
    drive_fini(&d);
}

#ifdef BT_CUDA_EMULATED
/* What rows of a step ask for: nothing, everything that the device does, or what it leaves to the host. */
enum ask { ASK_GREEDY, ASK_ALL, ASK_HOST };

static void ask_for(struct bt_sampling *p, enum ask ask)
{
    static const struct bt_logit_bias bias = {3, 2.5F};

    *p = (struct bt_sampling){
        .top_p = 1, .repetition_penalty = 1, .max_tokens = p->max_tokens, .ignore_eos = true};
    if (ask == ASK_ALL) {
        p->temperature = 1.3F;
        p->top_k = 40;
        p->top_p = 0.8F;
        p->logprobs = true;
        p->n_top = 5;
        p->n_bias = 1;
        p->bias = &bias;
    } else if (ask == ASK_HOST) {
        p->repetition_penalty = 1.4F;
    }
}

static void steps_of(enum ask ask, uint64_t launches)
{
    struct bt_engine_opts o = opts(16, 16, 4);
    struct bt_engine_step_stats stats;
    struct drive_run *runs[N_RUNS];
    struct drive d;
    bool worked = true;

    o.device_seen_max = 5;
    drive_init(&d, drive_open(&o), NULL);
    for (uint32_t i = 0; i < N_RUNS; i++) {
        runs[i] = drive_make(bt_engine_model(d.engine), 9 + 17 * i, 6, i);
        ask_for(&runs[i]->sampling, ask);
        CHECK_EQ(drive_submit(&d, runs[i]), BT_OK);
    }
    struct emu_counts start = emu_counts(), before = start;
    uint32_t n_decode = 0, n_again = 0, n_host = 0, n_tokens = 0;

    while (worked) {
        CHECK_EQ(bt_engine_step(d.engine, &worked, &stats), BT_OK);
        struct emu_counts after = emu_counts();

        n_host += stats.n_host_draws;
        if (worked && stats.n_prefill_tokens == 0) {
            CHECK_EQ(after.n_waits - before.n_waits, 1);
            CHECK_EQ(after.n_graphs - before.n_graphs, 1);
            if (after.n_captures == before.n_captures) {
                CHECK_EQ(after.n_launches - before.n_launches, launches); /* sampling's */
                n_again++;
            }
            n_decode++;
        }
        before = after;
    }
    CHECK(n_decode >= 3 && n_again >= 2);
    for (uint32_t i = 0; i < N_RUNS; i++) {
        n_tokens += runs[i]->n_out;
    }
    CHECK_EQ(n_host, ask == ASK_HOST ? n_tokens : 0);
    CHECK_EQ(before.n_allocs, start.n_allocs);
    for (uint32_t i = 0; i < N_RUNS; i++) {
        drive_release(&d, runs[i]);
    }
    free_runs(runs);
    drive_fini(&d);
}
#endif

/* A step is one wait, one graph and the kernels of sampling; rows whose logits come to the host wait no more than others. */
static void test_steps(void)
{
#ifdef BT_CUDA_EMULATED
    static const uint64_t launches[] = {[ASK_GREEDY] = 2, [ASK_ALL] = 26, [ASK_HOST] = 0};

    for (enum ask ask = ASK_GREEDY; ask <= ASK_HOST; ask++) {
        steps_of(ask, launches[ask]);
    }
#endif
}

#ifdef BT_CUDA_EMULATED
/* Steps until the device fails, or all have ended. True: it failed. */
static bool step_to_fault(struct drive *d)
{
    struct bt_engine_step_stats stats;
    bool worked = true;
    enum bt_status st = BT_OK;

    while (st == BT_OK && worked) {
        st = bt_engine_step(d->engine, &worked, &stats);
    }
    CHECK(st == BT_OK || st == BT_ERR_DEVICE);
    if (st == BT_OK) {
        return false;
    }
    uint32_t n = d->runs[0]->n_out;

    CHECK_EQ(bt_engine_step(d->engine, &worked, &stats), BT_ERR_DEVICE);
    CHECK_EQ(d->runs[0]->n_out, n);
    return true;
}
#endif

/* A device that fails at any place, in a prompt, in a captured step or in one that runs again: what came before is right, nothing
 * comes after, and everything ends. */
static void test_fault(void)
{
#ifdef BT_CUDA_EMULATED
    struct bt_engine_opts o = opts(16, 16, 4);
    struct drive_run *want[N_RUNS], *got[N_RUNS];
    struct drive d;
    bool failed = true;

    drive_init(&d, drive_open(&o), NULL);
    make_runs(&d, want);
    drive_finish(&d);
    drive_fini(&d);
    for (uint64_t at = 1; failed; at += at / 2 + 7) {
        drive_init(&d, drive_open(&o), NULL);
        make_runs(&d, got);
        emu_device_set(&(struct emu_device){.fault_after = at});
        failed = step_to_fault(&d);
        for (uint32_t i = 0; i < N_RUNS; i++) {
            CHECK(got[i]->n_out <= want[i]->n_out &&
                  memcmp(got[i]->out, want[i]->out, got[i]->n_out * sizeof(got[i]->out[0])) == 0);
            CHECK(failed || got[i]->n_out == want[i]->n_out);
            drive_release(&d, got[i]);
        }
        free_runs(got);
        drive_fini(&d); /* of a device that is lost */
        emu_device_set(&(struct emu_device){0});
    }
    free_runs(want);
#endif
}

int main(int argc, char **argv)
{
    struct bt_k_opts o = {0};
    struct bt_kctx *k = NULL;
    struct bt_err err = {0};
    enum bt_status st = bt_k_create("cuda", &o, &k, &err);

    if (st == BT_ERR_UNSUPPORTED) {
        printf("skipped: %s\n", err.msg);
        return BT_TEST_SKIP;
    }
    CHECK_EQ(st, BT_OK);
    bt_k_destroy(k);
    drive_backend = "cuda";
    for (int i = 1; i < argc; i++) {
        model = argv[i];
        for (size_t c = 0; c < sizeof(bt_k_all_classes) / sizeof(bt_k_all_classes[0]); c++) {
            numerics = bt_k_all_classes[c];
            if (strncmp(numerics, "cuda-", strlen("cuda-")) == 0 && bt_k_one_answer(numerics)) {
                test_relay();
            }
        }
        numerics = NULL;
        test_cancel();
        test_sampling();
        test_steps();
        if (i == 1) {
            test_fault();
        }
        printf("%s done\n", model);
    }
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
