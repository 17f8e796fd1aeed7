/* The engine on real tiny models and on a hashing fake (see fake_model.c); arguments: model paths.
 * One answer: the same tokens and log-probabilities whatever the batch, chunk and page sizes,
 * across a relay, a preemption or a resubmit. */

#include <stdlib.h>
#include <sys/stat.h>
#include "base/mem.h"
#include "tests/check.h"
#include "tests/unit/engine/engine_drive.h"

#define N_REQS 24
#define DECODE 14

static const char *model;
static uint32_t vocab;
static struct drive_run *want[N_REQS]; /* each run alone, in large chunks */

/* Lengths around page and chunk borders. */
static const uint32_t lengths[N_REQS] = {1,  2,  3,  4,  7,  15, 16,  17,  31,  32,  33,  47,
                                         48, 49, 63, 64, 65, 96, 127, 128, 129, 191, 200, 257};

static void make_reference(void)
{
    struct bt_engine_opts o = drive_opts(model, 16, 512, 1);
    struct drive d;

    drive_init(&d, drive_open(&o), NULL);
    vocab = bt_engine_model(d.engine)->vocab;
    for (uint32_t i = 0; i < N_REQS; i++) {
        want[i] = drive_make(bt_engine_model(d.engine), lengths[i], DECODE, i);
        want[i]->echo = i % 7 == 3;
        CHECK_EQ(drive_submit(&d, want[i]), BT_OK);
        drive_finish(&d);
        CHECK_EQ(want[i]->n_prompt_logprobs, want[i]->echo ? lengths[i] - 1 : 0);
    }
    drive_fini(&d);
}

static void run_all(struct drive *d)
{
    struct drive_run *got[N_REQS];

    for (uint32_t i = 0; i < N_REQS; i++) {
        got[i] = bt_alloc(sizeof(*got[i]));
        *got[i] = *want[i];
        drive_reset(got[i]);
        memset(got[i]->prompt_logprobs, 0, sizeof(got[i]->prompt_logprobs));
        CHECK_EQ(drive_submit(d, got[i]), BT_OK);
    }
    drive_finish(d);
    for (uint32_t i = 0; i < N_REQS; i++) {
        if (!drive_same(got[i], want[i])) {
            fprintf(stderr, "%s: request %u (prompt %u) differs: %u tokens, want %u\n", model, i,
                    lengths[i], got[i]->n_out, want[i]->n_out);
            CHECK(false);
        }
        bt_free(got[i]);
    }
}

static void test_one_answer(void)
{
    static const uint32_t page_tokens[] = {1, 3, 16, 64}, chunk[] = {5, 16, 64, 512};

    for (size_t i = 0; i < 4; i++) {
        for (size_t c = 0; c < 4; c++) {
            struct bt_engine_opts o =
                drive_opts(model, page_tokens[i], chunk[c], c % 2 == 0 ? 32 : 5);
            struct drive d;

            if ((i + c) % 2 == 1 && strncmp(model, "fake:", 5) != 0) {
                continue; /* half of the grid is enough where it costs time */
            }
            o.n_threads = 1 + (uint32_t)c % 2;
            o.isa = i % 2 == 0 ? "plain" : NULL; /* the reference takes the best */
            drive_init(&d, drive_open(&o), NULL);
            run_all(&d);
            drive_fini(&d);
        }
    }
}

static void test_relay(void)
{
    static const uint32_t page_tokens[] = {1, 3, 16, 64};

    for (size_t i = 0; i < 4; i++) {
        struct bt_engine_opts po = drive_opts(model, page_tokens[i], 48, 1);
        struct bt_engine_opts dopts = drive_opts(model, page_tokens[i], 1, i == 2 ? 3 : 32);
        struct drive d;

        drive_init(&d, drive_open(&po), drive_open(&dopts));
        CHECK_STR(bt_engine_layout(d.engine)->kv_layout, bt_engine_layout(d.decode)->kv_layout);
        CHECK(bt_engine_layout(d.engine)->fingerprint == bt_engine_layout(d.decode)->fingerprint);
        run_all(&d);
        drive_fini(&d);
    }
}

static uint64_t bytes_for(uint32_t page_tokens, uint32_t n_pages)
{
    struct bt_engine_opts o = drive_opts(model, page_tokens, 16, 1);
    struct bt_engine *e = drive_open(&o);
    const struct bt_engine_layout *l = bt_engine_layout(e);
    uint64_t per_page = 0;

    for (uint32_t g = 0; g < l->n_groups; g++) {
        per_page += l->groups[g].n_layers * l->groups[g].page_layer_bytes;
    }
    bt_engine_destroy(e);
    return per_page * n_pages + per_page / 2;
}

static void test_preemption(void)
{
    struct bt_engine_opts o = drive_opts(model, 4, 40, 32);
    struct drive d;

    o.kv_bytes = bytes_for(4, 74); /* the longest, 257 + 14 tokens, takes 68 */
    drive_init(&d, drive_open(&o), NULL);
    CHECK_EQ(bt_engine_layout(d.engine)->groups[0].n_pages, 74);
    CHECK_EQ(bt_engine_max_tokens(d.engine), 74 * 4);
    struct drive_run *got[12];
    uint32_t n_preempted = 0;

    /* Equal ones, that start together and outgrow the pool together. */
    for (uint32_t i = 0; i < 12; i++) {
        got[i] = bt_alloc(sizeof(*got[i]));
        *got[i] = *want[7];
        drive_reset(got[i]);
        CHECK_EQ(drive_submit(&d, got[i]), BT_OK);
    }
    drive_finish(&d);
    for (uint32_t i = 0; i < 12; i++) {
        CHECK(drive_same(got[i], want[7]));
        n_preempted += got[i]->n_preempted;
        bt_free(got[i]);
    }
    /* Where every group has a window, pages come back as fast as they go. */
    CHECK(n_preempted > 0 || bt_engine_layout(d.engine)->groups[0].window != 0);
    run_all(&d);
    drive_fini(&d);
}

/* Tokens already delivered are forced, never sampled again; the rest is what it would have been. */
static void test_resubmit(void)
{
    struct bt_engine_opts o = drive_opts(model, 16, 64, 8);
    struct drive d;

    drive_init(&d, drive_open(&o), NULL);
    for (uint32_t i = 1; i < N_REQS; i += 5) {
        struct drive_run *r = bt_alloc(sizeof(*r));

        for (uint32_t k = 1; k + 1 < want[i]->n_out; k += 4) {
            *r = *want[i];
            r->echo = false;
            r->n_prompt_logprobs = want[i]->n_prompt_logprobs;
            r->finish = BT_FINISH_NONE;
            memset(&r->out[k], 0, (DRIVE_TOKENS_MAX - k) * sizeof(r->out[0]));
            r->n_out = k;
            CHECK_EQ(drive_submit(&d, r), BT_OK);
            drive_finish(&d);
            r->n_prompt_logprobs = want[i]->n_prompt_logprobs;
            CHECK(drive_same(r, want[i]));
        }
        bt_free(r);
    }
    drive_fini(&d);
}

static struct drive_run *run_one(struct drive *d, struct drive_run *r)
{
    CHECK_EQ(drive_submit(d, r), BT_OK);
    drive_finish(d);
    return r;
}

static void test_finish(void)
{
    struct bt_engine_opts o = drive_opts(model, 16, 64, 8);
    struct drive d;

    drive_init(&d, drive_open(&o), NULL);
    const struct bt_model_info *info = bt_engine_model(d.engine);
    struct drive_run *r = drive_make(info, 20, 1, 3);

    r->sampling.min_tokens = 0;
    r->sampling.ignore_eos = true;
    run_one(&d, r);
    CHECK_EQ(r->n_out, 1);
    CHECK_EQ(r->finish, BT_FINISH_LENGTH);
    /* A stop id as token 0 ends with STOP, also when it is the last allowed one. */
    r->sampling.n_stop_ids = 1;
    r->sampling.stop_ids[0] = r->out[0].token;
    drive_reset(r);
    run_one(&d, r);
    CHECK_EQ(r->n_out, 1);
    CHECK_EQ(r->finish, BT_FINISH_STOP);
    /* min_tokens holds it back. */
    r->sampling.max_tokens = 6;
    r->sampling.min_tokens = 4;
    drive_reset(r);
    run_one(&d, r);
    CHECK(r->n_out >= 5);
    /* EOS, forced by a bias, with and without ignore_eos. */
    struct bt_logit_bias bias = {.token = info->eos[0], .bias = 1e6F};

    bt_free(r);
    r = drive_make(info, 20, 8, 6);
    r->sampling.n_bias = 1;
    r->sampling.bias = &bias;
    r->sampling.min_tokens = 0;
    r->sampling.ignore_eos = false;
    drive_reset(r);
    run_one(&d, r);
    CHECK_EQ(r->n_out, 1);
    CHECK_EQ(r->finish, BT_FINISH_STOP);
    r->sampling.ignore_eos = true;
    drive_reset(r);
    run_one(&d, r);
    CHECK_EQ(r->n_out, 8);
    CHECK_EQ(r->finish, BT_FINISH_LENGTH);
    bt_free(r);
    /* The context ends the answer. */
    if (info->context <= DRIVE_TOKENS_MAX) {
        r = drive_make(info, info->context - 4, 4, 2);
        r->sampling.max_tokens = 1000;
        r->sampling.min_tokens = 0;
        run_one(&d, r);
        CHECK_EQ(r->n_out, 4);
        CHECK_EQ(r->finish, BT_FINISH_LENGTH);
        bt_free(r);
    }
    drive_fini(&d);
}

/* An echoed prompt token's log-probability is what sampling it there would have told. */
static void test_echo(void)
{
    struct bt_engine_opts o = drive_opts(model, 16, 64, 8);
    const struct drive_run *w = want[10];
    struct drive d;

    CHECK(w->echo);
    drive_init(&d, drive_open(&o), NULL);
    for (uint32_t pos = 1; pos < w->n_prompt; pos += 7) {
        struct drive_run *r = bt_alloc(sizeof(*r));
        struct bt_logit_bias bias = {.token = w->prompt[pos], .bias = 1e6F};

        *r = *w;
        drive_reset(r);
        r->echo = false;
        r->n_prompt = pos;
        r->sampling.max_tokens = 1;
        r->sampling.min_tokens = 0;
        r->sampling.n_bias = 1;
        r->sampling.bias = &bias;
        run_one(&d, r);
        CHECK_EQ(r->out[0].token, w->prompt[pos]);
        CHECK(memcmp(&r->out[0].logprob, &w->prompt_logprobs[pos], sizeof(float)) == 0);
        bt_free(r);
    }
    drive_fini(&d);
}

static void test_cancel(void)
{
    struct bt_engine_opts o = drive_opts(model, 16, 64, 8);
    struct bt_engine_step_stats stats;
    struct drive d;
    bool worked;

    drive_init(&d, drive_open(&o), NULL);
    struct drive_run *a = drive_make(bt_engine_model(d.engine), 200, 5, 1);
    struct drive_run *b = drive_make(bt_engine_model(d.engine), 30, 5, 2);

    /* All cancelled between layers: the pass ends there, nothing is delivered, nothing runs
     * afterwards. */
    CHECK_EQ(drive_submit(&d, a), BT_OK);
    d.cancel_pending = true;
    CHECK_EQ(bt_engine_step(d.engine, &worked, &stats), BT_OK);
    CHECK(worked);
    CHECK_EQ(d.n_interrupts, 2);
    CHECK_EQ(stats.n_spans + stats.n_prefill_tokens, 0); /* they were not computed */
    CHECK_EQ(bt_engine_step(d.engine, &worked, &stats), BT_OK);
    CHECK(!worked);
    bt_engine_release(d.engine, a->seq);
    drive_check_idle(d.engine);
    /* One of two: the pass goes on, the cancelled one hears nothing more. */
    d.n_runs = 0;
    d.cancel_pending = false;
    CHECK_EQ(drive_submit(&d, b), BT_OK);
    CHECK_EQ(drive_submit(&d, a), BT_OK);
    bt_engine_cancel(d.engine, b->seq);
    d.cancel_pending = true;
    d.n_interrupts = 100;
    CHECK_EQ(bt_engine_step(d.engine, &worked, &stats), BT_OK);
    CHECK_EQ(stats.n_prefill_tokens, 64);
    drive_release(&d, b);
    d.cancel_pending = false;
    drive_finish(&d);
    CHECK_EQ(b->n_out, 0);
    CHECK(a->n_out > 0);
    bt_free(a);
    bt_free(b);
    drive_fini(&d);
}

static void test_refusals(void)
{
    struct bt_engine_opts o = drive_opts(model, 16, 64, 8);
    struct bt_engine *e = NULL;
    struct bt_err err;

    o.kv_bytes = bytes_for(16, 4);
    o.max_seqs = 2;
    e = drive_open(&o);
    struct drive_run *r = drive_make(bt_engine_model(e), 60, 8, 1);
    struct bt_engine_req req = {
        .tokens = r->prompt, .n_tokens = 60, .n_prompt = 60, .sampling = &r->sampling};
    struct bt_engine_landing land;
    bt_seq_id a, b, c;

    CHECK_EQ(bt_engine_max_tokens(e), 64);
    req.n_prompt = 0;
    CHECK_EQ(bt_engine_submit(e, &req, &a, &err), BT_ERR_INVALID);
    req.n_prompt = req.n_tokens = 64;
    CHECK_EQ(bt_engine_submit(e, &req, &a, &err), BT_ERR_INVALID); /* no room for one more */
    req.n_prompt = req.n_tokens = 60;
    r->prompt[9] = vocab;
    CHECK_EQ(bt_engine_submit(e, &req, &a, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "vocabulary") != NULL);
    r->prompt[9] = 5;
    r->sampling.top_p = 0.0F;
    CHECK_EQ(bt_engine_submit(e, &req, &a, &err), BT_ERR_INVALID);
    r->sampling.top_p = NAN;
    CHECK_EQ(bt_engine_submit(e, &req, &a, &err), BT_ERR_INVALID);
    r->sampling.top_p = 1.0F;
    CHECK_EQ(bt_engine_land(e, &req, &land, &err), BT_OK);
    CHECK_EQ(bt_engine_pages(e).free,
             bt_engine_layout(e)->n_groups * 4 - bt_engine_pages(e).leased);
    a = land.seq;
    if (bt_engine_layout(e)->groups[0].window == 0) {
        CHECK_EQ(bt_engine_land(e, &req, &land, &err), BT_ERR_BUSY); /* pages */
    }
    CHECK_EQ(bt_engine_submit(e, &req, &b, &err), BT_OK);
    CHECK_EQ(bt_engine_submit(e, &req, &c, &err), BT_ERR_BUSY); /* places */
    CHECK_EQ(bt_engine_start(e, b, 3), BT_ERR_INVALID);
    CHECK_EQ(bt_engine_start(e, a, vocab), BT_ERR_INVALID);
    CHECK_EQ(bt_engine_start(e, a + (UINT64_C(1) << 32), 3), BT_ERR_NOT_FOUND);
    uint32_t n = bt_engine_pages(e).leased;

    bt_engine_quarantine(e, a);
    CHECK_EQ(bt_engine_pages(e).quarantined, n);
    CHECK_EQ(bt_engine_start(e, a, 3), BT_ERR_INVALID);
    bt_engine_release(e, a);
    bt_engine_release(e, a);
    bt_engine_release(e, b);
    CHECK_EQ(bt_engine_start(e, a, 3), BT_ERR_NOT_FOUND);
    drive_check_idle(e);
    bt_engine_destroy(e);
    o.kv_bytes = 10;
    CHECK_EQ(bt_engine_create(&o, &e, &err), BT_ERR_INVALID);
    o.backend = "abacus";
    CHECK_EQ(bt_engine_create(&o, &e, &err), BT_ERR_UNSUPPORTED);
    bt_free(r);
}

static struct drive_run *run_copy(struct drive *d, const struct drive_run *w)
{
    struct drive_run *r = bt_alloc(sizeof(*r));

    *r = *w;
    drive_reset(r);
    memset(r->prompt_logprobs, 0, sizeof(r->prompt_logprobs));
    return run_one(d, r);
}

static uint32_t full_pages(uint32_t n_tokens, uint32_t page_tokens)
{
    return n_tokens / page_tokens * page_tokens;
}

/* What a cache has of the first n_tokens tokens of a prompt that it has answered before: whole
 * pages, and the rest if the page that it lies in became full. At least: other prompts may begin
 * alike. */
static uint32_t at_least(const struct drive_run *w, uint32_t n_tokens, uint32_t page_tokens)
{
    uint32_t stored = w->n_prompt + (w->n_out > 0 ? w->n_out - 1 : 0);
    uint32_t full = full_pages(n_tokens, page_tokens);

    return full_pages(stored, page_tokens) > full ? n_tokens : full;
}

/* Computed before, by the same engine: the same answers, and only what is new is computed. */
static void test_cache_hits(void)
{
    static const uint32_t page_tokens[] = {1, 3, 16};

    for (size_t i = 0; i < 3; i++) {
        struct bt_engine_opts o = drive_opts(model, page_tokens[i], 48, 8);
        struct drive d;

        o.prefix_cache = true;
        drive_init(&d, drive_open(&o), NULL);
        for (uint32_t n = 0; n < 2 * N_REQS; n++) {
            const struct drive_run *w = want[n % N_REQS];
            struct drive_run *r = run_copy(&d, w);

            CHECK(drive_same(r, w));
            CHECK(r->n_cached < w->n_prompt && (!w->echo || r->n_cached == 0));
            if (n >= N_REQS && !w->echo) {
                CHECK(r->n_cached >= at_least(w, w->n_prompt - 1, page_tokens[i]));
            }
            bt_free(r);
        }
        CHECK(bt_engine_pages(d.engine).cached > 0);
        drive_fini(&d);
    }
}

/* A conversation: the next prompt is the last one, its answer, and more. */
static void test_cache_turns(void)
{
    struct bt_engine_opts o = drive_opts(model, 4, 64, 8);
    struct drive with, without;

    drive_init(&without, drive_open(&o), NULL);
    o.prefix_cache = true;
    drive_init(&with, drive_open(&o), NULL);
    struct drive_run *turn = drive_make(bt_engine_model(with.engine), 30, 9, 4);

    for (uint32_t i = 0; i < 8; i++) {
        struct drive_run *a = run_copy(&without, turn), *b = run_copy(&with, turn);
        uint32_t n = a->n_prompt + a->n_out;

        CHECK(drive_same(a, b));
        CHECK_EQ(a->n_cached, 0);
        if (i > 0) { /* the last token of an answer is not stored */
            CHECK(b->n_cached >= full_pages(turn->n_prompt - 5 - 1, 4));
        }
        for (uint32_t k = 0; k < a->n_out; k++) {
            turn->prompt[a->n_prompt + k] = a->out[k].token;
        }
        for (uint32_t k = 0; k < 5; k++) {
            turn->prompt[n + k] = (i * 31 + k * 7) % vocab;
        }
        turn->n_prompt = n + 5;
        bt_free(a);
        bt_free(b);
    }
    bt_free(turn);
    drive_fini(&with);
    drive_fini(&without);
}

/* All at once, twice, in a pool where cached pages are given up and sequences preempted. */
static void test_cache_small_pool(void)
{
    struct bt_engine_opts o = drive_opts(model, 4, 40, 32);
    struct drive d;

    o.kv_bytes = bytes_for(4, 74);
    o.prefix_cache = true;
    drive_init(&d, drive_open(&o), NULL);
    run_all(&d);
    run_all(&d);
    struct drive_run *got[12];

    for (uint32_t i = 0; i < 12; i++) {
        got[i] = bt_alloc(sizeof(*got[i]));
        *got[i] = *want[7 + i % 2];
        drive_reset(got[i]);
        CHECK_EQ(drive_submit(&d, got[i]), BT_OK);
    }
    drive_finish(&d);
    for (uint32_t i = 0; i < 12; i++) {
        CHECK(drive_same(got[i], want[7 + i % 2]));
        bt_free(got[i]);
    }
    drive_fini(&d);
}

/* A prefill and a decode node, each with its own cache: pages that the decode node has do not
 * travel. */
static void test_cache_relay(void)
{
    static const uint32_t page_tokens[] = {1, 3, 16};

    for (size_t i = 0; i < 3; i++) {
        struct bt_engine_opts po = drive_opts(model, page_tokens[i], 48, 1);
        struct bt_engine_opts dopts = drive_opts(model, page_tokens[i], 1, 32);
        struct drive d;

        po.prefix_cache = i != 1;
        dopts.prefix_cache = true;
        drive_init(&d, drive_open(&po), drive_open(&dopts));
        run_all(&d);
        run_all(&d);
        for (uint32_t k = 0; k < N_REQS; k++) {
            struct drive_run *r = run_copy(&d, want[k]);
            uint32_t n = want[k]->n_prompt;

            CHECK(drive_same(r, want[k]));
            if (i == 1 || want[k]->echo) {
                CHECK_EQ(r->n_cached, 0);
            } else {
                CHECK(r->n_cached < n && r->n_cached >= full_pages(n - 1, page_tokens[i]));
            }
            if (r->n_out > 1) {
                CHECK(r->n_landed_cached >= at_least(want[k], n, page_tokens[i]));
                CHECK((r->n_pages_copied == 0) == (r->n_landed_cached == n));
            }
            bt_free(r);
        }
        drive_fini(&d);
    }
}

static bool check_model(const char *path)
{
    struct stat st;

    if (strncmp(path, "fake:", 5) != 0 && stat(path, &st) != 0) {
        printf("skipped: no %s\n", path);
        return false;
    }
    model = path;
    make_reference();
    test_one_answer();
    test_relay();
    test_preemption();
    test_resubmit();
    test_finish();
    test_echo();
    test_cancel();
    test_refusals();
    test_cache_hits();
    test_cache_turns();
    test_cache_small_pool();
    test_cache_relay();
    for (uint32_t k = 0; k < N_REQS; k++) {
        bt_free(want[k]);
    }
    return true;
}

int main(int argc, char **argv)
{
    int n = 0;

    for (int i = 1; i < argc; i++) {
        n += check_model(argv[i]);
    }
    return n == 0 ? BT_TEST_SKIP : bt_test_done();
}
