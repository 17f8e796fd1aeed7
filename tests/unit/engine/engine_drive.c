/* See engine_drive.h. */

#include "tests/unit/engine/engine_drive.h"

#include <stdlib.h>
#include "base/mem.h"
#include "engine/philox.h"
#include "tests/check.h"

#define STEPS_MAX 20000

const char *drive_backend = "cpu";

struct bt_engine_opts drive_opts(const char *model, uint32_t page_tokens, uint32_t chunk_tokens,
                                 uint32_t max_batch)
{
    return (struct bt_engine_opts){.model_path = model,
                                   .backend = drive_backend,
                                   .n_threads = 1,
                                   .kv_bytes = UINT64_C(32) << 20,
                                   .page_tokens = page_tokens,
                                   .kv_dtype = BT_DTYPE_F16,
                                   .chunk_tokens = chunk_tokens,
                                   .max_batch = max_batch,
                                   .max_seqs = DRIVE_RUNS_MAX};
}

struct bt_engine *drive_open(const struct bt_engine_opts *opts)
{
    struct bt_engine *e = NULL;
    struct bt_err err = {0};

    if (bt_engine_create(opts, &e, &err) != BT_OK) {
        fprintf(stderr, "engine: %s\n", err.msg);
        exit(1);
    }
    return e;
}

static struct drive_run *find(struct drive *d, bt_seq_id seq, bool decode)
{
    for (uint32_t i = 0; i < d->n_runs; i++) {
        if ((decode ? d->runs[i]->landing : d->runs[i]->seq) == seq) {
            return d->runs[i];
        }
    }
    CHECK(false && "an event of an unknown sequence");
    exit(1);
}

static uint32_t index_of(const struct drive *d, const struct drive_run *r)
{
    uint32_t i = 0;

    while (d->runs[i] != r) {
        i++;
    }
    return i;
}

/* The decode node leases when it is told that the prompt has started. */
static void on_started(void *arg, bt_seq_id seq, uint32_t n_cached)
{
    struct drive *d = arg;
    struct drive_run *r = find(d, seq, false);

    r->n_cached = n_cached;
    if (d->decode == NULL || r->sampling.max_tokens == 1) {
        return;
    }
    struct bt_engine_req req = {.tokens = r->prompt,
                                .n_tokens = r->n_prompt,
                                .n_prompt = r->n_prompt,
                                .sampling = &r->sampling};
    uint32_t i = index_of(d, r);

    memset(&d->landings[i], 0, sizeof(d->landings[i]));
    CHECK_EQ(bt_engine_land(d->decode, &req, &d->landings[i].at, NULL), BT_OK);
    r->landing = d->landings[i].at.seq;
    r->n_landed_cached = d->landings[i].at.n_cached;
}

static void copy_page(struct drive *d, uint8_t *to, uint8_t *from, size_t bytes)
{
    if (d->out == NULL) {
        memcpy(to, from, bytes);
        return;
    }
    bt_k_mover_start(d->out, 0, from, bytes, false);
    CHECK_EQ(bt_k_mover_done(d->out, 0, true), BT_OK);
    memcpy(bt_k_mover_slot(d->in, 0), bt_k_mover_slot(d->out, 0), bytes);
    bt_k_mover_start(d->in, 0, to, bytes, true);
    CHECK_EQ(bt_k_mover_done(d->in, 0, true), BT_OK);
}

static void on_pages(void *arg, const struct bt_engine_page_event *ev)
{
    struct drive *d = arg;
    struct drive_run *r = find(d, ev->seq, false);

    if (d->decode == NULL || r->landing == 0) {
        return;
    }
    const struct bt_engine_layout *from = bt_engine_layout(d->engine),
                                  *to = bt_engine_layout(d->decode);
    uint32_t i = index_of(d, r), layer = ev->layer;

    for (uint32_t g = 0; g < ev->group; g++) {
        layer += from->groups[g].n_layers;
    }
    for (uint32_t p = ev->first; p < ev->end; p++) {
        uint32_t bit = layer * DRIVE_TOKENS_MAX + p;

        CHECK(p < d->landings[i].at.n_pages);
        if (p < d->landings[i].at.first_page[ev->group]) {
            CHECK(p * from->page_tokens < d->landings[i].at.n_cached);
            continue;
        }
        CHECK((d->landings[i].seen[bit / 8] & 1U << bit % 8) == 0); /* once */
        d->landings[i].seen[bit / 8] |= (uint8_t)(1U << bit % 8);
        d->landings[i].n_seen++;
        copy_page(d,
                  to->groups[ev->group].base + to->groups[ev->group].layer_stride * ev->layer +
                      to->groups[ev->group].page_stride * d->landings[i].at.page_ids[ev->group][p],
                  from->groups[ev->group].base + from->groups[ev->group].layer_stride * ev->layer +
                      from->groups[ev->group].page_stride * ev->page_ids[p],
                  from->groups[ev->group].page_layer_bytes);
    }
}

static void hand_off(struct drive *d, struct drive_run *r)
{
    const struct bt_engine_layout *l = bt_engine_layout(d->decode);
    uint32_t i = index_of(d, r), expected = 0;

    for (uint32_t g = 0; g < l->n_groups; g++) {
        expected +=
            l->groups[g].n_layers * (d->landings[i].at.n_pages - d->landings[i].at.first_page[g]);
    }
    CHECK_EQ(d->landings[i].n_seen, expected);
    r->n_pages_copied = expected;
    CHECK_EQ(bt_engine_start(d->decode, r->landing, r->out[0].token), BT_OK);
}

static void take_token(struct drive_run *r, const struct bt_engine_token *t)
{
    CHECK_EQ(t->index, r->n_out);
    CHECK_EQ(r->finish, BT_FINISH_NONE);
    r->out[r->n_out++] = t->sampled;
    r->finish = t->finish;
}

static void on_token(void *arg, const struct bt_engine_token *t)
{
    struct drive *d = arg;
    struct drive_run *r = find(d, t->seq, false);

    take_token(r, t);
    if (d->decode != NULL && t->finish == BT_FINISH_NONE) {
        hand_off(d, r);
    }
}

static void on_decode_token(void *arg, const struct bt_engine_token *t)
{
    take_token(find(arg, t->seq, true), t);
}

static void on_prompt_logprob(void *arg, bt_seq_id seq, uint32_t pos, const struct bt_sampled *s)
{
    struct drive_run *r = find(arg, seq, false);

    CHECK(r->echo);
    CHECK_EQ(pos, r->n_prompt_logprobs + 1);
    CHECK_EQ(s->token, r->prompt[pos]);
    r->prompt_logprobs[pos] = s->logprob;
    r->n_prompt_logprobs++;
}

static void on_preempted(void *arg, bt_seq_id seq)
{
    struct drive_run *r = find(arg, seq, false);

    r->n_preempted++;
    r->seq = 0;
}

static bool step_interrupted(void *arg)
{
    struct drive *d = arg;

    if (d->cancel_pending && ++d->n_interrupts == 2) { /* after the second layer */
        for (uint32_t i = 0; i < d->n_runs; i++) {
            bt_engine_cancel(d->engine, d->runs[i]->seq);
        }
    }
    return d->cancel_pending;
}

void drive_init(struct drive *d, struct bt_engine *e, struct bt_engine *decode)
{
    *d = (struct drive){.engine = e, .decode = decode};
    struct bt_engine_hooks hooks = {.arg = d,
                                    .on_started = on_started,
                                    .on_pages = on_pages,
                                    .on_token = on_token,
                                    .on_prompt_logprob = on_prompt_logprob,
                                    .on_preempted = on_preempted,
                                    .step_interrupted = step_interrupted};

    bt_engine_set_hooks(e, &hooks);
    if (decode != NULL) {
        struct bt_engine_hooks dh = {.arg = d, .on_token = on_decode_token};

        bt_engine_set_hooks(decode, &dh);
        d->landings = bt_calloc(DRIVE_RUNS_MAX, sizeof(*d->landings));
        if (bt_engine_layout(e)->device_memory) {
            const struct bt_k_mover_opts o = {
                .slot_bytes = bt_engine_layout(e)->groups[0].page_layer_bytes, .n_slots = 1};

            CHECK_EQ(bt_engine_mover_create(e, &o, &d->out, NULL), BT_OK);
            CHECK_EQ(bt_engine_mover_create(decode, &o, &d->in, NULL), BT_OK);
        }
    }
}

void drive_check_idle(struct bt_engine *e)
{
    const struct bt_engine_layout *l = bt_engine_layout(e);
    struct bt_engine_pages p = bt_engine_pages(e);
    struct bt_engine_load load = bt_engine_load(e);
    uint32_t n = 0;

    for (uint32_t g = 0; g < l->n_groups; g++) {
        n += l->groups[g].n_pages;
        for (uint32_t i = 0; i < l->groups[g].n_pages; i++) {
            if (bt_engine_page_holder(e, g, i) != 0) {
                CHECK(false && "a page is still held");
                break;
            }
        }
    }
    CHECK_EQ(p.free + p.cached, n);
    CHECK_EQ(p.leased + p.quarantined, 0);
    CHECK_EQ(load.n_waiting + load.n_running + load.n_held + load.n_landing, 0);
    CHECK_EQ(load.waiting_tokens, 0);
}

void drive_fini(struct drive *d)
{
    bt_k_mover_destroy(d->out);
    bt_k_mover_destroy(d->in);
    drive_check_idle(d->engine);
    bt_engine_destroy(d->engine);
    if (d->decode != NULL) {
        drive_check_idle(d->decode);
        bt_engine_destroy(d->decode);
    }
    bt_free(d->landings);
}

struct drive_run *drive_make(const struct bt_model_info *info, uint32_t n_prompt,
                             uint32_t max_tokens, uint32_t seed)
{
    struct drive_run *r = bt_calloc(1, sizeof(*r));

    CHECK(r != NULL && n_prompt + max_tokens <= DRIVE_TOKENS_MAX);
    r->n_prompt = n_prompt;
    for (uint32_t i = 0; i < n_prompt; i++) {
        r->prompt[i] = (uint32_t)((double)bt_philox_bits(seed, 77, i) * 0x1p-53 * info->vocab);
    }
    r->sampling = (struct bt_sampling){.temperature = seed % 3 == 0 ? 0.0F : 0.8F,
                                       .top_p = seed % 4 == 1 ? 0.9F : 1.0F,
                                       .top_k = seed % 4 == 2 ? 20 : 0,
                                       .min_p = seed % 5 == 1 ? 0.05F : 0.0F,
                                       .repetition_penalty = seed % 5 == 2 ? 1.2F : 1.0F,
                                       .frequency_penalty = seed % 5 == 3 ? 0.4F : 0.0F,
                                       .seed = seed * UINT64_C(0x123456789),
                                       .max_tokens = max_tokens,
                                       .min_tokens = max_tokens / 2,
                                       .ignore_eos = seed % 2 == 0,
                                       .logprobs = true,
                                       .n_top = seed % 6};
    return r;
}

enum bt_status drive_submit(struct drive *d, struct drive_run *r)
{
    uint32_t tokens[DRIVE_TOKENS_MAX];
    struct bt_engine_req req = {.tokens = tokens,
                                .n_tokens = r->n_prompt + r->n_out,
                                .n_prompt = r->n_prompt,
                                .sampling = &r->sampling,
                                .hold = d->decode != NULL,
                                .prompt_logprobs = r->echo};

    memcpy(tokens, r->prompt, r->n_prompt * sizeof(*tokens));
    for (uint32_t i = 0; i < r->n_out; i++) {
        tokens[r->n_prompt + i] = r->out[i].token;
    }
    r->n_prompt_logprobs = 0;
    enum bt_status st = bt_engine_submit(d->engine, &req, &r->seq, NULL);
    uint32_t i = 0;

    while (i < d->n_runs && d->runs[i] != r) {
        i++;
    }
    if (st == BT_OK && i == d->n_runs) {
        CHECK(d->n_runs < DRIVE_RUNS_MAX);
        d->runs[d->n_runs++] = r;
    }
    return st;
}

void drive_release(struct drive *d, struct drive_run *r)
{
    uint32_t i = index_of(d, r);

    bt_engine_release(d->engine, r->seq);
    if (d->decode != NULL) {
        bt_engine_release(d->decode, r->landing);
    }
    r->seq = r->landing = 0;
    d->runs[i] = d->runs[--d->n_runs];
    if (d->landings != NULL) {
        d->landings[i] = d->landings[d->n_runs];
    }
}

void drive_finish(struct drive *d)
{
    struct bt_engine_step_stats stats;
    bool worked, decoded = false;

    for (uint32_t n = 0; d->n_runs > 0 && n < STEPS_MAX; n++) {
        CHECK_EQ(bt_engine_step(d->engine, &worked, &stats), BT_OK);
        if (d->decode != NULL) {
            CHECK_EQ(bt_engine_step(d->decode, &decoded, &stats), BT_OK);
        }
        CHECK(worked || decoded);
        for (uint32_t i = 0; i < d->n_runs;) {
            struct drive_run *r = d->runs[i];

            if (r->finish != BT_FINISH_NONE) {
                drive_release(d, r);
                continue;
            }
            if (r->seq == 0 && r->n_preempted > 0) {
                CHECK_EQ(drive_submit(d, r), BT_OK);
            } else if (d->decode != NULL && r->n_out > 0) {
                bt_engine_release(d->engine, r->seq); /* the decode node has started */
            }
            i++;
        }
        if (bt_test_failures > 20) {
            exit(1);
        }
    }
    CHECK_EQ(d->n_runs, 0);
}

void drive_reset(struct drive_run *r)
{
    memset(r->out, 0, sizeof(r->out));
    r->n_out = r->n_prompt_logprobs = r->n_preempted = r->n_pages_copied = 0;
    r->n_cached = r->n_landed_cached = 0;
    r->finish = BT_FINISH_NONE;
    r->seq = r->landing = 0;
}

bool drive_same(const struct drive_run *a, const struct drive_run *b)
{
    return a->n_out == b->n_out && a->finish == b->finish &&
           memcmp(a->out, b->out, a->n_out * sizeof(a->out[0])) == 0 &&
           a->n_prompt_logprobs == b->n_prompt_logprobs &&
           memcmp(a->prompt_logprobs, b->prompt_logprobs, sizeof(a->prompt_logprobs)) == 0;
}
