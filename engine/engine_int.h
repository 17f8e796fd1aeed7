#ifndef BT_ENGINE_ENGINE_INT_H
#define BT_ENGINE_ENGINE_INT_H

/* Shared by engine.c (life cycle), seq.c (sequences), step.c (the step loop) and draw.c (sampling on the device). */

#include "base/slab.h"
#include "engine/engine.h"
#include "engine/kv_pool.h"
#include "engine/sampler.h"
#include "sched/batch.h"

/* The engine's side of a scheduler slot: tokens and parameters. Valid while the slot is in use. */
struct seq {
    uint32_t *
        tokens; /* of seq_tokens: room for the whole context and the biases behind, then, where the device samples, for what
                         it is told of the history */
    uint32_t n_tokens, n_prompt, n_tokens_max;
    struct bt_sampling sampling; /* bias: behind the tokens */
    bool prompt_logprobs;
    uint32_t n_noted, n_seen; /* tokens that the device is told of, as so many distinct ones */
};

struct bt_engine {
    struct bt_engine_opts opts; /* strings not kept */
    struct bt_kctx *k;
    struct bt_model *model;
    const struct bt_model_info *info;
    struct bt_model_ws *ws;
    struct bt_kv_pool pool;
    struct bt_batch *batch;
    struct bt_sampler *sampler;
    struct seq *seqs; /* [max_seqs], by slot */
    struct bt_slab seq_tokens;
    struct bt_engine_hooks hooks;
    struct bt_engine_layout layout;
    char kv_layout[256];

    /* One step: rows_max tokens, out_max logits rows. */
    uint32_t rows_max, out_max;
    uint32_t *tokens;
    uint32_t *out_rows;
    struct bt_model_span *spans; /* [max_seqs] */
    /* Of rows that the host samples: [n_pinned, vocab] of bt_k_host_alloc, and ordinary memory for the other ones of out_max, which
     * costs nothing before it is used. Where the host samples all, n_pinned is out_max. */
    float *logits, *more_logits;
    uint32_t n_pinned;
    struct bt_batch_plan plan; /* the pass that runs now */

    /* Where the device samples (draw.c): the pass's draws, and by logits row which of them it is, or BT_HOST_DRAWS and which of the
     * host's rows. */
    bool device_sampling;
    struct bt_k_draw *draws;         /* [out_max] */
    uint32_t *draw_of;               /* [out_max] */
    uint32_t seen_max, n_host_draws; /* rows of the pass that are the host's after all */

    /* A device computes behind its calls: what a layer leaves is told when it is done, while the next ones wait in the stream. */
    bool paced;                 /* the pass waits for its layers */
    uint32_t marks[BT_K_MARKS]; /* by layer modulo their number */
    uint32_t n_marked, n_told;  /* layers of the pass */
};

#define BT_HOST_DRAWS (1U << 31)
/* Pinned rows of logits where the device samples: the host has few, if any, and a row may be half a megabyte. */
#define BT_PINNED_ROWS 16U

/* Makes room for sampling on the device, if it can. */
enum bt_status draw_init(struct bt_engine *e) BT_NODISCARD;
/* Bytes of a sequence's tokens and biases, and behind them of what the device is told. */
size_t draw_seen_at(const struct bt_engine *e);
size_t draw_seen_bytes(const struct bt_engine *e);
/* Puts the sampling of the pass behind it. */
void draw_queue(struct bt_engine *e, float *logits);
/* What was sampled of a row of logits; NULL: they are the host's, who finds them at draw_logits. */
const struct bt_sampled *draw_result(const struct bt_engine *e, uint32_t row);
const float *draw_logits(const struct bt_engine *e, uint32_t row);
/* Prompt positions [first, end) of an echoed span whose logits tell about the prompt token that
 * follows. */
void echo_range(const struct bt_engine *e, const struct bt_batch_span *sp, uint32_t *first,
                uint32_t *end);

void seq_free(struct bt_engine *e, uint32_t slot);
/* Copies what the scheduler found in pages of others for a sequence that starts or lands. */
void seq_copy_cached(struct bt_engine *e, const struct bt_batch_seq *b);
/* What a token at an index of the answer means for its sequence. */
enum bt_finish seq_finish(const struct bt_engine *e, const struct seq *s, uint32_t token,
                          uint32_t index);

#endif
