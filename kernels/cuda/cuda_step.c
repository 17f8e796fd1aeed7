/* Decode steps as CUDA graphs. The calls of a step are captured once for each number of rows and of splits, and are the same
 * every time after that: the host goes through them again to lay out what it sends (ids, angles, page tables), at the same
 * places as before, nothing is put into the stream meanwhile, and at the end one copy and one graph are. Owns the graphs and
 * the memory that their kernels read; what a step computes is the caller's. */

#include "kernels/cuda/cuda_int.h"

#include <string.h>
#include "base/hash.h"
#include "base/mem.h"
#include "kernels/open.h"

#define ALIGN ((size_t)256)

/* A few rows more than asked for, so that there are few graphs. */
static uint32_t bucket(uint32_t n, uint32_t max)
{
    uint32_t b = 1;

    while (b < n) {
        b = b >= 4 && b + b / 2 >= n && b % 2 == 0 ? b + b / 2 : b * 2;
    }
    return b < max ? b : max;
}

static uint32_t splits_of(uint32_t pos_max)
{
    uint32_t n = 1;

    while (n * CUDA_ATTN_SPLIT <= pos_max) {
        n *= 2;
    }
    return n;
}

enum bt_status cuda_step_init(struct cuda_ctx *c, struct bt_err *err)
{
    struct cuda_steps *s = &c->step;
    enum bt_status st =
        cuda_status(cudaMallocHost((void **)&s->host, CUDA_STEP_BYTES), "pinned memory", err);

    if (st == BT_OK) {
        st = cuda_status(cudaMalloc((void **)&s->dev, CUDA_STEP_BYTES), "device memory", err);
    }
    return st;
}

static void drop(struct cuda_ctx *c, struct cuda_graph *g)
{
    if (g->exec != NULL) {
        (void)cuda_ok(c, cudaGraphExecDestroy(g->exec), "graph");
    }
    *g = (struct cuda_graph){0};
}

void cuda_step_fini(struct cuda_ctx *c)
{
    for (uint32_t i = 0; i < CUDA_GRAPHS_MAX; i++) {
        drop(c, &c->step.graphs[i]);
    }
    if (c->step.ended != NULL) {
        (void)cuda_ok(c, cudaEventDestroy(c->step.began), "timing");
        (void)cuda_ok(c, cudaEventDestroy(c->step.ended), "timing");
    }
    (void)cuda_ok(c, cudaFreeHost(c->step.host), "pinned memory");
    (void)cuda_ok(c, cudaFree(c->step.dev), "device memory");
}

void cuda_step_forget(struct bt_kctx *k, const void *owner)
{
    struct cuda_ctx *c = cuda_of(k);

    cuda_enter(c);
    for (uint32_t i = 0; i < CUDA_GRAPHS_MAX; i++) {
        if (c->step.graphs[i].key.owner == owner) {
            drop(c, &c->step.graphs[i]);
        }
    }
}

static bool same(const struct cuda_step_key *a, const struct cuda_step_key *b)
{
    return a->owner == b->owner && a->kv == b->kv && a->rows == b->rows &&
           a->n_splits == b->n_splits && a->page_tokens == b->page_tokens;
}

/* The graph of a key, or the place for one: an empty one, or that which was not used for longest. */
static struct cuda_graph *find(struct cuda_ctx *c, const struct cuda_step_key *key)
{
    struct cuda_graph *all = c->step.graphs, *oldest = &all[0];

    for (uint32_t i = 0; i < CUDA_GRAPHS_MAX; i++) {
        if (same(&all[i].key, key)) {
            return &all[i];
        }
        oldest = all[i].used < oldest->used ? &all[i] : oldest;
    }
    drop(c, oldest);
    oldest->key = *key;
    return oldest;
}

uint32_t cuda_step_begin(struct bt_kctx *k, const struct bt_k_step *in)
{
    struct cuda_ctx *c = cuda_of(k);
    struct cuda_steps *s = &c->step;
    uint32_t n_splits = splits_of(in->pos_max), rows = bucket(in->n_rows, in->rows_max);
    uint32_t group = in->n_heads / in->n_kv_heads;
    size_t tiles = (size_t)rows * ((group + CUDA_ATTN_ROWS - 1) / CUDA_ATTN_ROWS);
    size_t part =
        tiles * in->n_kv_heads * n_splits * CUDA_ATTN_ROWS * (in->head_dim + 2) * sizeof(float);
    const struct cuda_step_key key = {.owner = in->owner,
                                      .kv = in->kv,
                                      .rows = rows,
                                      .n_splits = n_splits,
                                      .page_tokens = in->page_tokens};

    BT_ASSERT(s->mode == CUDA_STEP_OFF);
    s->table = n_splits * CUDA_ATTN_SPLIT / in->page_tokens + 1;
    s->n_splits = n_splits;
    if (n_splits > UINT16_MAX || part > c->attn.bytes || tiles > CUDA_TILES_MAX ||
        rows * (size_t)s->table > CUDA_PAGES_MAX || c->fault != BT_OK) {
        return 0;
    }
    struct cuda_graph *g = find(c, &key);
    if (g->refused) {
        return 0;
    }
    g->used = ++s->n_steps;
    s->now = g;
    s->at = s->n_sent = s->n_calls = 0;
    s->sizes = 0;
    s->full = false;
    if (g->exec != NULL) {
        s->mode = CUDA_STEP_REPLAY;
        return rows;
    }
    cuda_enter(c);
    if (!cuda_ok(c, cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal),
                 "capture of a step")) {
        return 0;
    }
    s->mode = CUDA_STEP_RECORD;
    return rows;
}

const struct cuda_step_sent *cuda_step_find(struct cuda_ctx *c, const void *key, uint32_t tag)
{
    const struct cuda_steps *s = &c->step;

    for (uint32_t i = 0; i < s->n_sent; i++) {
        if (s->sent[i].key == key && s->sent[i].tag == tag) {
            return &s->sent[i];
        }
    }
    return NULL;
}

void *cuda_step_send(struct cuda_ctx *c, const void *key, uint32_t tag, const void *host,
                     size_t bytes)
{
    struct cuda_steps *s = &c->step;
    const struct cuda_step_sent *before = cuda_step_find(c, key, tag);

    if (before != NULL) {
        BT_ASSERT(before->bytes == bytes);
        return s->dev + before->at;
    }
    if (s->n_sent == CUDA_STEP_SENDS || bytes > CUDA_STEP_BYTES - s->at) {
        s->full = true;
        return s->dev;
    }
    size_t at = s->at;
    memcpy(s->host + at, host, bytes);
    s->sent[s->n_sent++] =
        (struct cuda_step_sent){.key = key, .tag = tag, .at = at, .bytes = bytes};
    s->sizes = bt_hash64(&bytes, sizeof(bytes), s->sizes);
    s->at = (at + bytes + ALIGN - 1) / ALIGN * ALIGN;
    return s->dev + at;
}

/* Ends the capture; false: there is no graph. */
static bool capture_end(struct cuda_ctx *c, bool keep)
{
    struct cuda_steps *s = &c->step;
    cudaGraph_t graph = NULL;

    cuda_enter(c);
    bool fine = cuda_ok(c, cudaStreamEndCapture(c->stream, &graph), "capture of a step") && keep &&
                cuda_ok(c, cudaGraphInstantiate(&s->now->exec, graph, 0), "graph of a step");
    if (graph != NULL) {
        (void)cuda_ok(c, cudaGraphDestroy(graph), "graph of a step");
    }
    s->now->sizes = s->sizes;
    s->now->n_calls = s->n_calls;
    return fine;
}

enum bt_status cuda_step_end(struct bt_kctx *k, bool keep)
{
    struct cuda_ctx *c = cuda_of(k);
    struct cuda_steps *s = &c->step;
    struct cuda_graph *g = s->now;
    enum cuda_step_mode mode = s->mode;

    BT_ASSERT(mode != CUDA_STEP_OFF);
    s->mode = CUDA_STEP_OFF;
    keep = keep && !s->full;
    if (mode == CUDA_STEP_RECORD && !capture_end(c, keep)) {
        g->refused = s->full;
        return c->fault != BT_OK ? c->fault : BT_ERR_BUSY;
    }
    if (!keep) {
        g->refused = s->full;
        return BT_ERR_BUSY;
    }
    if (g->sizes != s->sizes || g->n_calls != s->n_calls) {
        const struct cuda_step_key key = g->key;
        cuda_enter(c);
        drop(c, g);
        g->key = key;
        return BT_ERR_BUSY;
    }
    cuda_enter(c);
    c->drained = false;
    if (s->at > 0) {
        (void)cuda_ok(c, cudaMemcpyAsync(s->dev, s->host, s->at, cudaMemcpyHostToDevice, c->stream),
                      "upload of a step");
    }
    s->timed = s->ended != NULL && cuda_ok(c, cudaEventRecord(s->began, c->stream), "timing");
    (void)cuda_ok(c, cudaGraphLaunch(g->exec, c->stream), "step");
    s->timed = s->timed && cuda_ok(c, cudaEventRecord(s->ended, c->stream), "timing");
    return c->fault;
}

static void timing_begin(struct cuda_ctx *c)
{
    struct cuda_steps *s = &c->step;

    if (!cuda_ok(c, cudaEventCreateWithFlags(&s->began, cudaEventDefault), "timing")) {
        return;
    }
    if (!cuda_ok(c, cudaEventCreateWithFlags(&s->ended, cudaEventDefault), "timing")) {
        (void)cuda_ok(c, cudaEventDestroy(s->began), "timing");
        s->ended = NULL;
    }
}

uint64_t bt_k_step_device_ns_cuda(struct bt_kctx *k)
{
    struct cuda_ctx *c = cuda_of(k);
    float ms = 0;

    cuda_enter(c);
    if (c->step.ended == NULL) {
        timing_begin(c);
    } else if (c->step.timed) {
        (void)cuda_ok(c, cudaEventElapsedTime(&ms, c->step.began, c->step.ended), "timing");
    }
    c->step.timed = false;
    return (uint64_t)(ms * 1e6F);
}
