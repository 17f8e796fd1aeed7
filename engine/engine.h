#ifndef BT_ENGINE_ENGINE_H
#define BT_ENGINE_ENGINE_H

/* The engine: KV pool, sequences, sampler and the step loop over one model. It knows nothing of
 * tickets, peers or routers: prefilld and decoded differ by which calls they make. All calls on one
 * thread (the engine thread) but bt_engine_create's. Sequences are named by generational ids: a
 * stale id is BT_ERR_NOT_FOUND, never another sequence.
 *
 * A prefill node:  bt_engine_submit → step … (on_started, on_pages per layer, on_token 0) →
 *                  the sequence is held, its pages stay → bt_engine_release.
 * A decode node:   bt_engine_land (pages leased for the prompt, filled from outside) →
 *                  bt_engine_start → step … (on_token 1, 2 …) → finished → bt_engine_release.
 * Both roles:      bt_engine_submit with hold = false decodes on after token 0. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/dtype.h"
#include "base/status.h"
#include "base/sampling.h"
#include "model/model.h"
#include "sched/prefix_index.h"

struct bt_engine;

typedef uint64_t bt_seq_id; /* generation << 32 | slot; 0 is never valid */

enum bt_finish { BT_FINISH_NONE, BT_FINISH_STOP, BT_FINISH_LENGTH };

struct bt_engine_opts {
    const char *model_path;
    const char *panel_dir; /* for packed weights, shared by processes (model/model.h); NULL: none */
    uint64_t panel_bytes_min;
    const char *backend;  /* "cpu", "cuda" */
    uint32_t device;      /* index among the backend's devices */
    const char *isa;      /* NULL: auto */
    const char *numerics; /* class (kernels/open.h); NULL: bt_model_numerics */
    uint32_t n_threads;   /* 0: all usable CPUs */
    uint64_t kv_bytes;    /* size of the KV pool; 0: a quarter of the usable memory (CPU only) */
    uint32_t page_tokens;
    enum bt_dtype
        kv_dtype; /* bt_dtype_is_kv(), or BT_DTYPE_AUTO: by the class (kernels/kv_type.h) */
    uint32_t chunk_tokens; /* token budget of one step's prefill */
    uint32_t max_batch;    /* sequences decoded in one step */
    uint32_t max_seqs;     /* sequences known at once, waiting ones included; more: BT_ERR_BUSY */
    /* Keep full pages of sequences that are over, while there is room, and let later ones with the
     * same first tokens use them. The same bits come out. */
    bool prefix_cache;
    /* Sample on the host even where the backend could (kernels/backend.h); how many distinct tokens of a penalised history are the
     * device's at most (0: BT_K_SEEN_MAX); how many rows that are not are fetched without waiting (0: enough). For tests: the
     * answers are the same. */
    bool host_sampling;
    uint32_t device_seen_max, pinned_rows;
    void (*load_progress)(void *arg, double fraction);
    void *load_arg;
};

/* What must be equal on P and D before KV may travel: compared as text, shown in status. */
struct bt_engine_layout {
    uint64_t fingerprint;  /* model */
    const char *numerics;  /* class */
    const char *kv_layout; /* "page_tokens=16 dtype=f16 kv_heads=3 head_dim=64 groups=full:30" */
    uint32_t page_tokens, n_groups;
    bool device_memory; /* the host cannot touch the pages */
    struct {
        uint32_t window, n_layers, n_pages; /* pages of the pool in this group */
        size_t page_layer_bytes;            /* a page's share of one layer */
        uint8_t *base; /* host address (or device address) of page 0, layer 0 */
        size_t layer_stride, page_stride;
    } groups[BT_MODEL_KV_GROUPS_MAX];
};

struct bt_engine_pages {
    uint32_t free, cached, leased, quarantined; /* summed over groups */
};

/* One sequence to run. */
struct bt_engine_req {
    const uint32_t *tokens; /* copied; prompt, then answer tokens already delivered (forced, never
                               sampled again) */
    uint32_t n_tokens,
        n_prompt; /* n_prompt >= 1; n_tokens - n_prompt = index of the first token to produce */
    const struct bt_sampling *sampling; /* copied, bias included */
    bool hold; /* stop after the first produced token and keep the pages (prefill node) */
    bool prompt_logprobs; /* echo: log-probabilities of prompt tokens 1 … n_prompt-1 */
};

/* Pages that are complete for one layer: indexes are absolute page numbers of the sequence in
 * that layer's group. */
struct bt_engine_page_event {
    bt_seq_id seq;
    uint32_t group, layer;    /* layer: index within the group */
    uint32_t first, end;      /* absolute page numbers [first, end) */
    const uint32_t *page_ids; /* page id of absolute page p is page_ids[p]; borrowed for the call */
};

struct bt_engine_token {
    bt_seq_id seq;
    uint32_t index; /* index in the answer, 0 = first */
    enum bt_finish finish;
    bool has_logprobs;
    struct bt_sampled sampled;
};

/* Called inside bt_engine_step, on the engine thread. */
struct bt_engine_hooks {
    void *arg;
    /* Its first chunk begins now; pages are leased. n_cached: tokens whose KV the prefix cache had;
     * computing begins behind them. */
    void (*on_started)(void *arg, bt_seq_id seq, uint32_t n_cached);
    /* Every needed page of the prompt once per layer, as its last token's KV is stored (partial
     * tail: with the last chunk; those from the cache: right after on_started). Pages that a sliding window will have left before decode begins
     * are not reported. Only for hold sequences. */
    void (*on_pages)(void *arg, const struct bt_engine_page_event *ev);
    void (*on_token)(void *arg, const struct bt_engine_token *t);
    void (*on_prompt_logprob)(void *arg, bt_seq_id seq, uint32_t pos,
                              const struct bt_sampled *s); /* pos >= 1 */
    void (*on_preempted)(void *arg,
                         bt_seq_id seq); /* out of pages: its pages are gone, the id too */
    /* Between layers; may be NULL. true: something was cancelled (bt_engine_cancel may be called
     * from here), the pass is abandoned if every sequence in it was. */
    bool (*step_interrupted)(void *arg);
};

enum bt_status bt_engine_create(const struct bt_engine_opts *opts, struct bt_engine **out,
                                struct bt_err *err) BT_NODISCARD;
void bt_engine_destroy(struct bt_engine *e);
void bt_engine_set_hooks(struct bt_engine *e, const struct bt_engine_hooks *hooks);
const struct bt_model_info *bt_engine_model(const struct bt_engine *e);
const struct bt_model_packed *bt_engine_packed(const struct bt_engine *e);
const struct bt_engine_layout *bt_engine_layout(const struct bt_engine *e);
/* Copies between pages in device memory and the host, for another thread (kernels/backend.h). It is destroyed before the engine.
 * Before the first step. */
enum bt_status bt_engine_mover_create(struct bt_engine *e, const struct bt_k_mover_opts *o,
                                      struct bt_k_mover **out, struct bt_err *err) BT_NODISCARD;
const char *bt_engine_describe(const struct bt_engine *e); /* backend text for logs */
struct bt_engine_pages bt_engine_pages(const struct bt_engine *e);
/* Who holds a page of a group (page < its n_pages); 0: nobody; BT_PAGE_SHARED: it has or had
 * several holders. */
bt_seq_id bt_engine_page_holder(const struct bt_engine *e, uint32_t group, uint32_t page);
/* Blocks of tokens that came into the prefix cache or left it since the last call: see
 * bt_batch_cache_changes(). To be called after a step and the calls before it. */
const struct bt_prefix_change *bt_engine_cache_changes(struct bt_engine *e, uint32_t *n);
/* Largest sequence (tokens) that an empty pool holds; at most the model's context. */
uint32_t bt_engine_max_tokens(const struct bt_engine *e);

/* Queues a sequence for prefill. BT_ERR_BUSY: max_seqs; BT_ERR_INVALID: a token id outside the
 * vocabulary, too long. */
enum bt_status bt_engine_submit(struct bt_engine *e, const struct bt_engine_req *req,
                                bt_seq_id *out, struct bt_err *err) BT_NODISCARD;

/* Leases pages for the first n_tokens tokens of req (their KV will be written from outside) and
 * names the sequence. BT_ERR_BUSY: no pages now. Per group, pages before first_page are not wanted
 * (outside the window, or taken from the prefix cache; those must not be written). */
struct bt_engine_landing {
    bt_seq_id seq;
    uint32_t n_pages; /* absolute pages 0 … n_pages - 1 cover the tokens */
    uint32_t first_page[BT_MODEL_KV_GROUPS_MAX];      /* first wanted absolute page of each group */
    const uint32_t *page_ids[BT_MODEL_KV_GROUPS_MAX]; /* borrowed until start or release;
                                                         BT_PAGE_NONE before first_page, or a page of
                                                         the cache */
    uint32_t n_cached;                                /* tokens whose KV the prefix cache had */
};
enum bt_status bt_engine_land(struct bt_engine *e, const struct bt_engine_req *req,
                              struct bt_engine_landing *out, struct bt_err *err) BT_NODISCARD;
/* The landed pages are full and `first` is the token that the prefill node sampled (index =
 * n_tokens - n_prompt of the land call): the sequence joins the running batch. If it should wait
 * for room in the batch it is queued. BT_ERR_NOT_FOUND: stale id. BT_ERR_INVALID: not landing, no
 * such token, or a token that ends the answer (EOS, stop id, length); the sequence stays as it was.
 */
enum bt_status bt_engine_start(struct bt_engine *e, bt_seq_id seq,
                               uint32_t first_token) BT_NODISCARD;
/* Counts a landing sequence's pages as quarantined (a receive may still be in flight) until
 * release. */
void bt_engine_quarantine(struct bt_engine *e, bt_seq_id seq);
/* Ends a sequence in any state and frees its pages; stale ids are ignored. Not from inside a hook.
 */
void bt_engine_release(struct bt_engine *e, bt_seq_id seq);
/* Marks a sequence cancelled so that step_interrupted may abandon the pass; may be called from
 * step_interrupted. From then on it takes part in no step and no hook is called for it. The caller
 * still releases it after the step. */
void bt_engine_cancel(struct bt_engine *e, bt_seq_id seq);

struct
    bt_engine_step_stats { /* n_spans 0: nothing was computed, or given up because all was cancelled */
    uint32_t n_prefill_tokens, n_decode_tokens, n_spans;
    uint32_t n_host_draws; /* tokens that the host samples because the device that samples cannot */
    uint64_t compute_ns;
};
/* Runs one batched forward pass if there is work. *worked false: nothing to do, sleep until the
 * next call above. A sequence that finished (finish != NONE) or is held stays known until released.
 * stats is always filled. BT_ERR_DEVICE: nothing was delivered; the same pass would be tried again.
 * Allocates nothing. */
enum bt_status bt_engine_step(struct bt_engine *e, bool *worked,
                              struct bt_engine_step_stats *stats) BT_NODISCARD;

struct bt_engine_load {
    uint32_t n_waiting;      /* without pages yet */
    uint32_t n_running;      /* prefilling, decoding, or ready for room in the batch */
    uint32_t n_held;         /* held or finished, not released yet */
    uint32_t n_landing;      /* quarantined ones too */
    uint64_t waiting_tokens; /* prompt tokens not yet computed */
    bool pages_short;        /* in the last step a prompt waited for pages that others hold */
};
struct bt_engine_load bt_engine_load(const struct bt_engine *e);

#endif
