/* One forward pass over a ragged batch: embedding, the family's layers, final norm and logits. Owns
 * the workspace and its sizes; refuses to know how a layer is built. */

#include <string.h>
#include "base/assert.h"
#include "base/mem.h"
#include "model/blocks_int.h"

static float *device_rows(struct bt_kctx *k, uint32_t n_rows, size_t width)
{
    return bt_k_alloc(k, (size_t)n_rows * width * sizeof(float));
}

static void free_rows(struct bt_kctx *k, float *p, uint32_t n_rows, size_t width)
{
    if (p != NULL) {
        bt_k_free(k, p, (size_t)n_rows * width * sizeof(float));
    }
}

static bool any_layer(const struct bt_model *m, bool sparse)
{
    for (uint32_t i = 0; i < m->config.n_layers; i++) {
        if (m->layers[i].sparse == sparse) {
            return true;
        }
    }
    return false;
}

/* The experts' activations lie with the backend. */
static bool reserve_experts(struct bt_model_ws *ws, const struct bt_model *m)
{
    for (uint32_t i = 0; i < m->config.n_layers; i++) {
        struct bt_k_moe moe = bt_block_moe(m, &m->layers[i]);
        if (m->layers[i].sparse && bt_k_moe_reserve(ws->k, &moe, ws->max_tokens) != BT_OK) {
            return false;
        }
    }
    return true;
}

static bool alloc_device(struct bt_model_ws *ws, const struct bt_model *m)
{
    const struct bt_model_config *c = &m->config;
    uint32_t n = ws->max_tokens;

    ws->x = device_rows(ws->k, n, c->dim);
    ws->h = device_rows(ws->k, n, c->dim);
    ws->o = device_rows(ws->k, n, c->dim);
    ws->qkv = device_rows(ws->k, n, ws->qkv_width);
    ws->attn = device_rows(ws->k, n, (size_t)c->n_heads * c->head_dim);
    ws->out = device_rows(ws->k, ws->max_out, c->dim);
    ws->logits = device_rows(ws->k, ws->max_out, c->vocab);
    if (any_layer(m, false)) {
        ws->ffn = device_rows(ws->k, n, ws->ffn_width);
    }
    if (any_layer(m, true)) {
        ws->router = device_rows(ws->k, n, c->n_experts);
    }
    return ws->x != NULL && ws->h != NULL && ws->o != NULL && ws->qkv != NULL && ws->attn != NULL &&
           ws->out != NULL && ws->logits != NULL && (ws->ffn != NULL || !any_layer(m, false)) &&
           (ws->router != NULL || !any_layer(m, true)) && reserve_experts(ws, m);
}

static bool alloc_host(struct bt_model_ws *ws, const struct bt_model *m)
{
    ws->spans = bt_calloc((size_t)ws->max_tokens * m->info.n_groups, sizeof(*ws->spans));
    ws->tokens = bt_calloc(ws->max_tokens, sizeof(*ws->tokens));
    ws->out_rows = bt_calloc(ws->max_out, sizeof(*ws->out_rows));
    bool ok = ws->spans != NULL && ws->tokens != NULL && ws->out_rows != NULL;

    for (uint32_t i = 0; i < m->config.n_ropes; i++) {
        size_t row = m->ropes[i].n_pairs * sizeof(float);
        ws->cos[i] = bt_calloc(ws->max_tokens, row);
        ws->sin[i] = bt_calloc(ws->max_tokens, row);
        ok = ok && ws->cos[i] != NULL && ws->sin[i] != NULL;
    }
    return ok;
}

enum bt_status bt_model_ws_create(struct bt_model *m, uint32_t max_tokens, uint32_t max_out,
                                  struct bt_model_ws **out, struct bt_err *err)
{
    const struct bt_model_config *c = &m->config;
    struct bt_model_ws *ws = bt_calloc(1, sizeof(*ws));

    BT_ASSERT(m->k != NULL && max_tokens > 0 && max_out > 0);
    if (ws == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for the workspace");
    }
    ws->m = m;
    ws->k = m->k;
    ws->max_tokens = max_tokens;
    ws->max_out = max_out;
    ws->qkv_width = (size_t)(c->n_heads + 2 * c->n_kv_heads) * c->head_dim;
    ws->ffn_width = (size_t)2 * c->ffn_dim;
    if (!alloc_device(ws, m) || !alloc_host(ws, m)) {
        bt_model_ws_destroy(ws);
        return bt_err_set(err, BT_ERR_NOMEM,
                          "out of memory for a workspace of %u tokens, %u logit rows", max_tokens,
                          max_out);
    }
    *out = ws;
    return BT_OK;
}

void bt_model_ws_destroy(struct bt_model_ws *ws)
{
    if (ws == NULL) {
        return;
    }
    const struct bt_model_config *c = &ws->m->config;
    uint32_t n = ws->max_tokens;

    bt_k_step_forget(ws->k, ws);
    free_rows(ws->k, ws->x, n, c->dim);
    free_rows(ws->k, ws->h, n, c->dim);
    free_rows(ws->k, ws->o, n, c->dim);
    free_rows(ws->k, ws->qkv, n, ws->qkv_width);
    free_rows(ws->k, ws->attn, n, (size_t)c->n_heads * c->head_dim);
    free_rows(ws->k, ws->ffn, n, ws->ffn_width);
    free_rows(ws->k, ws->router, n, c->n_experts);
    free_rows(ws->k, ws->out, ws->max_out, c->dim);
    free_rows(ws->k, ws->logits, ws->max_out, c->vocab);
    for (uint32_t i = 0; i < BT_ROPES_MAX; i++) {
        bt_free(ws->cos[i]);
        bt_free(ws->sin[i]);
    }
    bt_free(ws->spans);
    bt_free(ws->tokens);
    bt_free(ws->out_rows);
    bt_free(ws);
}

/* The span of the batch that span s of the pass is. */
static const struct bt_model_span *span_of(const struct bt_pass *p, uint32_t s)
{
    return &p->batch->spans[s < p->batch->n_spans ? s : p->batch->n_spans - 1];
}

/* Rotation rows of every token, for one rope. */
static void fill_rope(struct bt_pass *p, uint32_t rope)
{
    struct bt_rope_table *t = &p->m->ropes[rope];
    size_t pairs = t->n_pairs, row = 0;

    for (uint32_t s = 0; s < p->n_spans; s++) {
        const struct bt_model_span *in = span_of(p, s);
        for (uint32_t i = 0; i < in->n; i++, row++) {
            const float *cs = bt_rope_table_row(t, in->pos + i);
            memcpy(p->ws->cos[rope] + row * pairs, cs, pairs * sizeof(float));
            memcpy(p->ws->sin[rope] + row * pairs, cs + pairs, pairs * sizeof(float));
        }
    }
}

static void fill_spans(struct bt_pass *p)
{
    for (uint32_t g = 0; g < p->m->info.n_groups; g++) {
        struct bt_k_span *out = p->ws->spans + (size_t)g * p->ws->max_tokens;
        uint32_t row = 0;
        for (uint32_t s = 0; s < p->n_spans; s++) {
            const struct bt_model_span *in = span_of(p, s);
            BT_ASSERT(in->n > 0);
            out[s] =
                (struct bt_k_span){.row = row, .n = in->n, .pos = in->pos, .pages = in->pages[g]};
            row += in->n;
        }
        BT_ASSERT(row == p->n);
    }
}

static void logits(struct bt_pass *p)
{
    const struct bt_model *m = p->m;
    const struct bt_model_config *c = &m->config;
    struct bt_model_ws *ws = p->ws;
    uint32_t n = p->n_out;

    bt_k_gather_rows(p->k, ws->out, c->dim, ws->x, c->dim, p->out_rows, n, c->dim);
    bt_k_rmsnorm(p->k, ws->out, c->dim, ws->out, c->dim, m->final_norm, c->norm_offset,
                 (float)c->rms_eps, n, 1, c->dim);
    bt_k_gemm(p->k, ws->logits, c->vocab, ws->out, c->dim, c->tied ? m->embed : m->output, NULL, n);
    if (c->final_softcap > 0.0F) {
        bt_k_softcap(p->k, ws->logits, c->vocab, c->final_softcap, n, c->vocab);
    }
}

/* The pass as a step of the backend, if all rows are alike: a token of a sequence, whose logits are wanted. Sets how many rows are
 * computed. */
static bool step_begin(struct bt_pass *p)
{
    const struct bt_model_batch *b = p->batch;
    const struct bt_model_config *c = &p->m->config;
    struct bt_k_step s = {.owner = p->ws,
                          .kv = p->kv->groups[0].base,
                          .n_rows = b->n_tokens,
                          .rows_max = p->ws->max_out < p->ws->max_tokens ? p->ws->max_out
                                                                         : p->ws->max_tokens,
                          .n_heads = c->n_heads,
                          .n_kv_heads = c->n_kv_heads,
                          .head_dim = c->head_dim,
                          .page_tokens = p->kv->page_tokens};

    if (b->paced || b->n_spans != b->n_tokens || b->n_out != b->n_tokens) {
        return false;
    }
    for (uint32_t i = 0; i < b->n_tokens; i++) {
        s.pos_max = b->spans[i].pos > s.pos_max ? b->spans[i].pos : s.pos_max;
    }
    uint32_t n = bt_k_step_begin(p->k, &s);
    if (n == 0) {
        return false;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t from = i < b->n_tokens ? i : b->n_tokens - 1;
        p->ws->tokens[i] = b->tokens[from];
        p->ws->out_rows[i] = b->out_rows[from];
    }
    p->n = p->n_spans = p->n_out = n;
    p->tokens = p->ws->tokens;
    p->out_rows = p->ws->out_rows;
    return true;
}

/* All calls of the pass. */
static void run(struct bt_pass *p)
{
    const struct bt_model_config *c = &p->m->config;

    fill_spans(p);
    for (uint32_t i = 0; i < c->n_ropes; i++) {
        fill_rope(p, i);
    }
    bt_k_embed(p->k, p->ws->x, p->m->embed, p->tokens, p->n, c->embed_scale);
    for (uint32_t i = 0; i < c->n_layers && !p->stopped; i++) {
        p->m->family->layer(p, i);
    }
    if (!p->cancelled && p->n_out > 0) {
        logits(p);
    }
}

static struct bt_pass pass_of(struct bt_model *m, struct bt_model_ws *ws,
                              const struct bt_model_kv *kv, const struct bt_model_batch *b)
{
    return (struct bt_pass){.m = m,
                            .ws = ws,
                            .k = m->k,
                            .kv = kv,
                            .batch = b,
                            .n = b->n_tokens,
                            .n_spans = b->n_spans,
                            .n_out = b->n_out,
                            .tokens = b->tokens,
                            .out_rows = b->out_rows};
}

enum bt_status bt_model_forward(struct bt_model *m, struct bt_model_ws *ws,
                                const struct bt_model_kv *kv, const struct bt_model_batch *batch)
{
    struct bt_pass p = pass_of(m, ws, kv, batch);
    enum bt_status st = BT_OK;

    BT_ASSERT(batch->n_tokens > 0 && batch->n_tokens <= ws->max_tokens &&
              batch->n_out <= ws->max_out);
    bool step = step_begin(&p);
    run(&p);
    if (step) {
        st = bt_k_step_end(p.k, !p.cancelled);
    }
    if (p.cancelled) {
        st = bt_k_sync(p.k); /* what is in a device's stream still writes to pages */
        return st == BT_OK ? BT_ERR_CANCELLED : st;
    }
    if (st == BT_ERR_BUSY) { /* as an ordinary pass, then */
        p = pass_of(m, ws, kv, batch);
        run(&p);
        if (p.cancelled) {
            st = bt_k_sync(p.k);
            return st == BT_OK ? BT_ERR_CANCELLED : st;
        }
    }
    if (batch->queued != NULL) {
        batch->queued(batch->arg, ws->logits);
    }
    if (batch->n_out > 0 && batch->logits != NULL) {
        bt_k_read(p.k, batch->logits, ws->logits,
                  (size_t)batch->n_out * m->config.vocab * sizeof(float));
    }
    return bt_k_sync(p.k);
}
