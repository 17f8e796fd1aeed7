/* The engine's life cycle: opens the model on a backend, sizes the KV pool, the room of every
 * sequence and every buffer of the step loop (nothing grows later), describes the result.
 * Sequences are in seq.c, the loop in step.c. */

#include "engine/engine_int.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "base/buf.h"
#include "base/mem.h"
#include "base/options.h"
#include "kernels/kv_type.h"
#include "kernels/open.h"

/* Logits rows that the prompts of one step may ask for: ends of prompts, and all rows of an echoed
 * one. */
#define PREFILL_ROWS_MAX 32U
#define STEP_ROWS_MAX    (1U << 20)
#define SEQS_MAX         (1U << 16)

static enum bt_status check_opts(const struct bt_engine_opts *o, struct bt_err *err)
{
    if (!bt_dtype_is_kv(o->kv_dtype) && o->kv_dtype != BT_DTYPE_AUTO) {
        return bt_err_set(err, BT_ERR_INVALID, "KV type must be f32, f16, bf16 or fp8, not %s",
                          bt_dtype_name(o->kv_dtype));
    }
    if (o->page_tokens == 0 || o->page_tokens > STEP_ROWS_MAX) {
        return bt_err_set(err, BT_ERR_INVALID, "page_tokens must be 1 to %u", STEP_ROWS_MAX);
    }
    if (o->chunk_tokens == 0 || o->max_batch == 0 || o->chunk_tokens > STEP_ROWS_MAX ||
        o->max_batch > STEP_ROWS_MAX) {
        return bt_err_set(err, BT_ERR_INVALID, "chunk_tokens and max_batch must be 1 to %u",
                          STEP_ROWS_MAX);
    }
    if (o->max_seqs == 0 || o->max_seqs > SEQS_MAX) {
        return bt_err_set(err, BT_ERR_INVALID, "max_seqs must be 1 to %u", SEQS_MAX);
    }
    return BT_OK;
}

static enum bt_status open_model(struct bt_engine *e, const struct bt_engine_opts *o,
                                 struct bt_err *err)
{
    struct bt_k_opts ko = {
        .n_threads = o->n_threads, .isa = o->isa, .numerics = o->numerics, .device = o->device};
    enum bt_status st = bt_model_open(o->model_path, &e->model, err);

    if (st != BT_OK) {
        return st;
    }
    e->info = bt_model_info(e->model);
    if (ko.numerics == NULL) {
        ko.numerics = bt_model_numerics(e->model, o->backend);
    }
    st = bt_k_create(o->backend, &ko, &e->k, err);
    if (st != BT_OK) {
        return st;
    }
    e->opts.kv_dtype = bt_k_kv_type(o->kv_dtype, bt_k_numerics(e->k));
    if (strcmp(o->backend, "cpu") != 0 && o->kv_bytes == 0) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "backend %s needs --kv-bytes: how much of a device is free is not asked",
                          o->backend);
    }
    const struct bt_model_load_opts lo = {.panel_dir = o->panel_dir,
                                          .panel_bytes_min = o->panel_bytes_min,
                                          .progress = o->load_progress,
                                          .arg = o->load_arg};
    return bt_model_load(e->model, e->k, &lo, err);
}

static enum bt_status create_pool(struct bt_engine *e, struct bt_err *err)
{
    struct bt_engine_opts *o = &e->opts;
    uint64_t per_seq = (e->info->context + (uint64_t)o->page_tokens - 1) / o->page_tokens;
    uint64_t useful = per_seq * o->max_seqs;
    struct bt_kv_pool_opts po = {.bytes = o->kv_bytes != 0 ? o->kv_bytes : bt_memory_usable() / 4,
                                 .page_tokens = o->page_tokens,
                                 .n_pages_max =
                                     useful < UINT32_MAX / 2 ? (uint32_t)useful : UINT32_MAX / 2,
                                 .dtype = o->kv_dtype};
    enum bt_status st = bt_kv_pool_init(&e->pool, e->k, e->info, &po, err);

    if (st != BT_OK) {
        return st;
    }
    struct bt_batch_opts bo = {.page_tokens = o->page_tokens,
                               .chunk_tokens = o->chunk_tokens,
                               .max_batch = o->max_batch,
                               .max_seqs = o->max_seqs,
                               .tokens_max = e->info->context,
                               .prefill_rows = e->out_max - o->max_batch,
                               .n_groups = e->info->n_groups,
                               .prefix_cache = o->prefix_cache};

    for (uint32_t g = 0; g < bo.n_groups; g++) {
        bo.groups[g].window = e->info->groups[g].window;
        bo.groups[g].n_pages = e->pool.n_pages;
    }
    st = bt_batch_create(&bo, &e->batch);
    return st == BT_OK ? BT_OK
                       : bt_err_set(err, st, "no memory for the accounts of %" PRIu32 " KV pages",
                                    e->pool.n_pages);
}

static size_t row_bytes(const struct bt_engine *e)
{
    return e->info->vocab * sizeof(float);
}

/* Rows of logits for the host. False: no memory. */
static bool create_logits(struct bt_engine *e)
{
    const struct bt_engine_opts *o = &e->opts;
    const uint32_t pinned = o->pinned_rows != 0 ? o->pinned_rows : BT_PINNED_ROWS;
    size_t bytes, more;

    e->n_pinned = e->device_sampling && pinned < e->out_max ? pinned : e->out_max;
    if (!bt_mul_size(e->n_pinned, row_bytes(e), &bytes) ||
        !bt_mul_size(e->out_max - e->n_pinned, row_bytes(e), &more)) {
        return false;
    }
    e->logits = bt_k_host_alloc(e->k, bytes);
    e->more_logits = more > 0 ? bt_alloc(more) : NULL;
    return e->logits != NULL && (e->more_logits != NULL || more == 0);
}

static enum bt_status create_buffers(struct bt_engine *e, struct bt_err *err)
{
    enum bt_status st = bt_sampler_create(e->info->vocab, &e->sampler);

    e->seqs = bt_calloc(e->opts.max_seqs, sizeof(*e->seqs));
    e->spans = bt_calloc(e->opts.max_seqs, sizeof(*e->spans));
    e->tokens = bt_calloc(e->rows_max, sizeof(*e->tokens));
    e->out_rows = bt_calloc(e->out_max, sizeof(*e->out_rows));
    e->draws = bt_calloc(e->out_max, sizeof(*e->draws));
    e->draw_of = bt_calloc(e->out_max, sizeof(*e->draw_of));
    st = st == BT_OK ? draw_init(e) : st;
    if (st != BT_OK || e->seqs == NULL || e->spans == NULL || e->tokens == NULL ||
        e->out_rows == NULL || e->draws == NULL || e->draw_of == NULL || !create_logits(e)) {
        return bt_err_set(err, BT_ERR_NOMEM, "no memory for the buffers of a step");
    }
    st = bt_slab_init(&e->seq_tokens, "sequences", draw_seen_at(e) + draw_seen_bytes(e),
                      e->opts.max_seqs);
    if (st != BT_OK) {
        return bt_err_set(err, st, "no address space for %" PRIu32 " sequences", e->opts.max_seqs);
    }
    return bt_model_ws_create(e->model, e->rows_max, e->out_max, &e->ws, err);
}

static enum bt_status describe_layout(struct bt_engine *e, struct bt_err *err)
{
    const struct bt_model_info *info = e->info;
    struct bt_engine_layout *l = &e->layout;
    struct bt_buf text = {0};

    bt_buf_addf(
        &text, "page_tokens=%" PRIu32 " dtype=%s kv_heads=%" PRIu32 " head_dim=%" PRIu32 " groups=",
        e->opts.page_tokens, bt_dtype_name(e->opts.kv_dtype), info->n_kv_heads, info->head_dim);
    l->fingerprint = info->fingerprint;
    l->numerics = bt_k_numerics(e->k);
    l->kv_layout = e->kv_layout;
    l->page_tokens = e->opts.page_tokens;
    l->n_groups = info->n_groups;
    for (uint32_t g = 0; g < info->n_groups; g++) {
        uint32_t window = info->groups[g].window;
        void *base = e->pool.kv.groups[g].base;
        void *host = bt_k_host(e->k, base);

        l->groups[g].window = window;
        l->groups[g].n_layers = info->groups[g].n_layers;
        l->groups[g].n_pages = e->pool.n_pages;
        l->groups[g].page_layer_bytes = e->pool.page_layer_bytes;
        l->groups[g].base = host != NULL ? host : base;
        l->device_memory = host == NULL;
        l->groups[g].layer_stride = e->pool.kv.groups[g].layer_stride;
        l->groups[g].page_stride = e->pool.kv.groups[g].page_stride;
        bt_buf_adds(&text, g == 0 ? "" : ",");
        if (window == 0) {
            bt_buf_addf(&text, "full:%" PRIu32, info->groups[g].n_layers);
        } else {
            bt_buf_addf(&text, "w%" PRIu32 ":%" PRIu32, window, info->groups[g].n_layers);
        }
    }
    enum bt_status st = text.failed ? bt_err_set(err, BT_ERR_NOMEM, "no memory") : BT_OK;

    if (st == BT_OK) {
        (void)snprintf(e->kv_layout, sizeof(e->kv_layout), "%s", text.data);
    }
    bt_buf_fini(&text);
    return st;
}

enum bt_status bt_engine_create(const struct bt_engine_opts *opts, struct bt_engine **out,
                                struct bt_err *err)
{
    enum bt_status st = check_opts(opts, err);

    if (st != BT_OK) {
        return st;
    }
    struct bt_engine *e = bt_calloc(1, sizeof(*e));

    if (e == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "no memory");
    }
    e->opts = *opts;
    e->opts.model_path = e->opts.panel_dir = e->opts.backend = NULL;
    e->opts.isa = e->opts.numerics = NULL;
    /* No more rows than sequences can fill. */
    e->rows_max = opts->max_batch + opts->chunk_tokens;
    e->out_max = opts->max_batch +
                 (opts->chunk_tokens < PREFILL_ROWS_MAX ? opts->chunk_tokens : PREFILL_ROWS_MAX);
    st = open_model(e, opts, err);
    if (st == BT_OK) {
        st = create_pool(e, err);
    }
    if (st == BT_OK) {
        st = create_buffers(e, err);
    }
    if (st == BT_OK) {
        st = describe_layout(e, err);
    }
    if (st != BT_OK) {
        bt_engine_destroy(e);
        return st;
    }
    *out = e;
    return BT_OK;
}

void bt_engine_destroy(struct bt_engine *e)
{
    if (e == NULL) {
        return;
    }
    for (uint32_t i = 0; e->seqs != NULL && i < e->opts.max_seqs; i++) {
        seq_free(e, i);
    }
    bt_slab_fini(&e->seq_tokens);
    if (e->logits != NULL) {
        bt_k_host_free(e->k, e->logits, e->n_pinned * row_bytes(e));
    }
    bt_model_ws_destroy(e->ws);
    bt_sampler_destroy(e->sampler);
    bt_batch_destroy(e->batch);
    bt_kv_pool_fini(&e->pool);
    bt_model_destroy(e->model);
    bt_k_destroy(e->k);
    bt_free(e->seqs);
    bt_free(e->spans);
    bt_free(e->tokens);
    bt_free(e->out_rows);
    bt_free(e->more_logits);
    bt_free(e->draws);
    bt_free(e->draw_of);
    bt_free(e);
}

void bt_engine_set_hooks(struct bt_engine *e, const struct bt_engine_hooks *hooks)
{
    e->hooks = *hooks;
}

const struct bt_model_packed *bt_engine_packed(const struct bt_engine *e)
{
    return bt_model_packed(e->model);
}

const struct bt_model_info *bt_engine_model(const struct bt_engine *e)
{
    return e->info;
}

const struct bt_engine_layout *bt_engine_layout(const struct bt_engine *e)
{
    return &e->layout;
}

enum bt_status bt_engine_mover_create(struct bt_engine *e, const struct bt_k_mover_opts *o,
                                      struct bt_k_mover **out, struct bt_err *err)
{
    return bt_k_mover_create(e->k, o, out, err);
}

const char *bt_engine_describe(const struct bt_engine *e)
{
    return bt_k_describe(e->k);
}

struct bt_engine_pages bt_engine_pages(const struct bt_engine *e)
{
    struct bt_engine_pages n = {0};

    for (uint32_t g = 0; g < e->info->n_groups; g++) {
        const struct bt_pages *p = bt_batch_pages(e->batch, g);

        n.free += bt_pages_count(p, BT_PAGE_FREE);
        n.cached += bt_pages_count(p, BT_PAGE_CACHED);
        n.leased += bt_pages_count(p, BT_PAGE_LEASED);
        n.quarantined += bt_pages_count(p, BT_PAGE_QUARANTINED);
    }
    return n;
}

bt_seq_id bt_engine_page_holder(const struct bt_engine *e, uint32_t group, uint32_t page)
{
    return bt_pages_info(bt_batch_pages(e->batch, group), page).holder;
}

const struct bt_prefix_change *bt_engine_cache_changes(struct bt_engine *e, uint32_t *n)
{
    return bt_batch_cache_changes(e->batch, n);
}

uint32_t bt_engine_max_tokens(const struct bt_engine *e)
{
    uint32_t capacity = bt_batch_capacity(e->batch);

    return capacity < e->info->context ? capacity : e->info->context;
}

struct bt_engine_load bt_engine_load(const struct bt_engine *e)
{
    struct bt_batch_load l = bt_batch_load(e->batch);

    return (struct bt_engine_load){.n_waiting = l.n_waiting,
                                   .n_running = l.n_running,
                                   .n_held = l.n_held,
                                   .n_landing = l.n_landing,
                                   .waiting_tokens = l.waiting_tokens,
                                   .pages_short = l.pages_short};
}
