#ifndef BT_TESTS_ENGINE_DRIVE_H
#define BT_TESTS_ENGINE_DRIVE_H

/* Drives engines in tests: submits requests, steps until all have ended, keeps what the hooks said.
 * A relay couples a prefill and a decode engine by copying pages as a transfer would. */

#include "engine/engine.h"

#define DRIVE_RUNS_MAX   64
#define DRIVE_TOKENS_MAX 1024

/* One request and what came of it. */
struct drive_run {
    uint32_t prompt[DRIVE_TOKENS_MAX];
    uint32_t n_prompt;
    struct bt_sampling sampling;
    bool echo;

    struct bt_sampled out[DRIVE_TOKENS_MAX]; /* by answer index */
    uint32_t n_out;
    enum bt_finish finish;
    float prompt_logprobs[DRIVE_TOKENS_MAX];
    uint32_t n_prompt_logprobs;
    uint32_t n_preempted, n_pages_copied;
    uint32_t n_cached, n_landed_cached; /* tokens from the prefix caches, the last time */

    bt_seq_id seq, landing; /* on the (prefill) engine; on the decode engine */
};

struct drive {
    struct bt_engine *engine, *decode; /* decode: NULL but in a relay */
    struct drive_run *runs[DRIVE_RUNS_MAX];
    uint32_t n_runs;
    bool cancel_pending; /* step_interrupted says true */
    uint32_t n_interrupts;
    struct {
        struct bt_engine_landing at;
        uint8_t seen[DRIVE_TOKENS_MAX * 8]; /* (layer of all groups, page): copied */
        uint32_t n_seen;
    } *landings;                 /* by run; relay only */
    struct bt_k_mover *out, *in; /* relay whose pages lie in device memory */
};

extern const char *drive_backend; /* of drive_opts; "cpu" */

struct bt_engine_opts drive_opts(const char *model, uint32_t page_tokens, uint32_t chunk_tokens,
                                 uint32_t max_batch);
/* Exits the test program on failure. */
struct bt_engine *drive_open(const struct bt_engine_opts *opts);
void drive_init(struct drive *d, struct bt_engine *e, struct bt_engine *decode);
void drive_fini(struct drive *d); /* checks that no page is held, destroys the engines */

/* A deterministic request: seed picks tokens and parameters. */
struct drive_run *drive_make(const struct bt_model_info *info, uint32_t n_prompt,
                             uint32_t max_tokens, uint32_t seed);
/* Submits r, with the tokens it already produced forced. */
enum bt_status drive_submit(struct drive *d, struct drive_run *r);
/* Steps until every submitted request has ended; releases them. */
void drive_finish(struct drive *d);
void drive_release(struct drive *d, struct drive_run *r);
/* Token for token and bit for bit. */
bool drive_same(const struct drive_run *a, const struct drive_run *b);
void drive_reset(struct drive_run *r); /* forgets the answer */
void drive_check_idle(struct bt_engine *e);

#endif
