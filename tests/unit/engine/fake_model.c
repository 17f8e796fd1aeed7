/* A model and a device without arithmetic, in place of model/ and kernels/: what a token "computes"
 * is a hash of all the KV that it may see, read through the page tables. So a wrong, missing, stale
 * or misplaced page changes the answer, and reading an entry without a page aborts.
 *
 * Paths: "fake:full" one group; "fake:window" full and windowed layers in turn; "fake:windows" two
 * windows, no full layer. */

#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "base/mem.h"
#include "kernels/open.h"
#include "model/model.h"

#define VOCAB    97
#define HEAD_DIM 4

struct bt_kctx {
    int unused;
};

struct bt_model {
    struct bt_model_info info;
    uint8_t layer_group[4];
    uint32_t layer_index[4];
};

struct bt_model_ws {
    uint32_t max_tokens, max_out;
    uint64_t *hidden;
};

static uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t x = (a ^ b * UINT64_C(0x9E3779B97F4A7C15)) + UINT64_C(0xD1B54A32D192ED03);

    x = (x ^ x >> 32) * UINT64_C(0xDA942042E4DD58B5);
    return x ^ x >> 29;
}

enum bt_status bt_k_create(const char *backend, const struct bt_k_opts *opts, struct bt_kctx **out,
                           struct bt_err *err)
{
    (void)opts;
    if (strcmp(backend, "cpu") != 0) {
        return bt_err_set(err, BT_ERR_UNSUPPORTED, "no such fake");
    }
    *out = bt_calloc(1, sizeof(**out));
    return *out != NULL ? BT_OK : bt_err_set(err, BT_ERR_NOMEM, "no memory");
}

void bt_k_destroy(struct bt_kctx *k)
{
    bt_free(k);
}

void *bt_k_alloc(struct bt_kctx *k, size_t bytes)
{
    (void)k;
    return bt_calloc(1, bytes);
}

void bt_k_free(struct bt_kctx *k, void *dev, size_t bytes)
{
    (void)k;
    (void)bytes;
    bt_free(dev);
}

void *bt_k_host_alloc(struct bt_kctx *k, size_t bytes)
{
    (void)k;
    return bt_alloc_aligned(64, bytes);
}

void bt_k_host_free(struct bt_kctx *k, void *p, size_t bytes)
{
    (void)k;
    (void)bytes;
    bt_free(p);
}

void bt_k_fetch(struct bt_kctx *k, void *host, const void *dev, size_t bytes)
{
    (void)k;
    memcpy(host, dev, bytes);
}

void bt_k_read(struct bt_kctx *k, void *host, const void *dev, size_t bytes)
{
    bt_k_fetch(k, host, dev, bytes);
}

enum bt_status bt_k_sample_reserve(struct bt_kctx *k, uint32_t n_rows, uint32_t vocab)
{
    (void)k;
    (void)n_rows;
    (void)vocab;
    return BT_ERR_UNSUPPORTED;
}

void bt_k_sample(struct bt_kctx *k, float *logits, const struct bt_k_draw *draws, uint32_t n)
{
    (void)k;
    (void)logits;
    (void)draws;
    (void)n;
    abort();
}

const struct bt_sampled *bt_k_sampled(const struct bt_kctx *k)
{
    (void)k;
    abort();
}

void bt_k_copy(struct bt_kctx *k, void *dev, const void *from, size_t bytes)
{
    (void)k;
    memcpy(dev, from, bytes);
}

enum bt_status bt_k_sync(struct bt_kctx *k)
{
    (void)k;
    return BT_OK;
}

void *bt_k_host(struct bt_kctx *k, void *dev)
{
    (void)k;
    return dev;
}

uint32_t bt_k_mark(struct bt_kctx *k)
{
    (void)k;
    return 0;
}

enum bt_status bt_k_wait(struct bt_kctx *k, uint32_t mark)
{
    (void)k;
    (void)mark;
    return BT_OK;
}

enum bt_status bt_k_mover_create(struct bt_kctx *k, const struct bt_k_mover_opts *o,
                                 struct bt_k_mover **out, struct bt_err *err)
{
    (void)k;
    (void)o;
    (void)out;
    return bt_err_set(err, BT_ERR_UNSUPPORTED, "memory is the host's");
}

void bt_k_mover_destroy(struct bt_k_mover *m)
{
    BT_ASSERT(m == NULL);
}

uint8_t *bt_k_mover_slot(struct bt_k_mover *m, uint32_t slot)
{
    (void)m;
    (void)slot;
    abort();
}

void bt_k_mover_start(struct bt_k_mover *m, uint32_t slot, void *dev, size_t bytes, bool to_device)
{
    (void)m;
    (void)slot;
    (void)dev;
    (void)bytes;
    (void)to_device;
    abort();
}

enum bt_status bt_k_mover_done(struct bt_k_mover *m, uint32_t slot, bool wait)
{
    (void)m;
    (void)slot;
    (void)wait;
    return BT_ERR_DEVICE;
}

const char *bt_k_numerics(const struct bt_kctx *k)
{
    (void)k;
    return "fake";
}

const char *bt_k_describe(const struct bt_kctx *k)
{
    (void)k;
    return "fake";
}

const char *bt_model_numerics(const struct bt_model *m, const char *backend)
{
    (void)m;
    (void)backend;
    return "fake";
}

enum bt_status bt_model_open(const char *path, struct bt_model **out, struct bt_err *err)
{
    struct bt_model *m = bt_calloc(1, sizeof(*m));

    if (m == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "no memory");
    }
    struct bt_model_info *i = &m->info;

    *i = (struct bt_model_info){.n_layers = 4,
                                .n_kv_heads = 1,
                                .head_dim = HEAD_DIM,
                                .vocab = VOCAB,
                                .context = 400,
                                .n_groups = 2,
                                .layer_group = m->layer_group,
                                .layer_index = m->layer_index,
                                .n_eos = 2,
                                .eos = {1, 2},
                                .bos = -1};
    if (strcmp(path, "fake:full") == 0) {
        i->n_groups = 1;
    } else if (strcmp(path, "fake:window") == 0) {
        i->groups[1].window = 9;
    } else if (strcmp(path, "fake:windows") == 0) {
        i->groups[0].window = 16;
        i->groups[1].window = 1;
    } else {
        bt_free(m);
        return bt_err_set(err, BT_ERR_INVALID, "%s: no such fake", path);
    }
    for (uint32_t l = 0; l < i->n_layers; l++) {
        m->layer_group[l] = (uint8_t)(l % i->n_groups);
        m->layer_index[l] = i->groups[m->layer_group[l]].n_layers++;
    }
    *out = m;
    return BT_OK;
}

const struct bt_model_info *bt_model_info(const struct bt_model *m)
{
    return &m->info;
}

const struct bt_model_packed *bt_model_packed(const struct bt_model *m)
{
    static const struct bt_model_packed none;

    (void)m;
    return &none;
}

enum bt_status bt_model_load(struct bt_model *m, struct bt_kctx *k,
                             const struct bt_model_load_opts *opts, struct bt_err *err)
{
    (void)m;
    (void)k;
    (void)err;
    if (opts != NULL && opts->progress != NULL) {
        opts->progress(opts->arg, 1.0);
    }
    return BT_OK;
}

void bt_model_destroy(struct bt_model *m)
{
    bt_free(m);
}

enum bt_status bt_model_ws_create(struct bt_model *m, uint32_t max_tokens, uint32_t max_out,
                                  struct bt_model_ws **out, struct bt_err *err)
{
    (void)m;
    struct bt_model_ws *ws = bt_calloc(1, sizeof(*ws));
    uint64_t *hidden = bt_calloc(max_tokens, sizeof(*hidden));

    if (ws == NULL || hidden == NULL) {
        bt_free(ws);
        bt_free(hidden);
        return bt_err_set(err, BT_ERR_NOMEM, "no memory");
    }
    *ws = (struct bt_model_ws){.max_tokens = max_tokens, .max_out = max_out, .hidden = hidden};
    *out = ws;
    return BT_OK;
}

void bt_model_ws_destroy(struct bt_model_ws *ws)
{
    if (ws != NULL) {
        bt_free(ws->hidden);
        bt_free(ws);
    }
}

/* Where K (which = 0) or V (1) of a position lies. */
static uint8_t *cell(const struct bt_model *m, const struct bt_model_kv *kv, uint32_t layer,
                     const uint32_t *pages, uint32_t pos, uint32_t which)
{
    uint32_t g = m->layer_group[layer], page = pages[pos / kv->page_tokens];
    size_t row = HEAD_DIM * bt_dtype_block_bytes(kv->dtype);

    BT_ASSERT(page != BT_PAGE_NONE);
    return (uint8_t *)kv->groups[g].base + m->layer_index[layer] * kv->groups[g].layer_stride +
           page * kv->groups[g].page_stride +
           (which * kv->page_tokens + pos % kv->page_tokens) * row;
}

static void run_layer(const struct bt_model *m, struct bt_model_ws *ws,
                      const struct bt_model_kv *kv, const struct bt_model_span *sp, uint32_t row,
                      uint32_t layer)
{
    uint32_t g = m->layer_group[layer], window = m->info.groups[g].window;
    const uint32_t *pages = sp->pages[g];

    for (uint32_t t = 0; t < sp->n; t++) {
        uint64_t k = mix(ws->hidden[row + t], layer), v = ~k;

        memcpy(cell(m, kv, layer, pages, sp->pos + t, 0), &k, sizeof(k));
        memcpy(cell(m, kv, layer, pages, sp->pos + t, 1), &v, sizeof(v));
    }
    for (uint32_t t = 0; t < sp->n; t++) {
        uint32_t pos = sp->pos + t, q = window == 0 || pos < window ? 0 : pos - window + 1;
        uint64_t h = ws->hidden[row + t];

        for (; q <= pos; q++) {
            uint64_t k, v;

            memcpy(&k, cell(m, kv, layer, pages, q, 0), sizeof(k));
            memcpy(&v, cell(m, kv, layer, pages, q, 1), sizeof(v));
            h = mix(mix(h, k), v);
        }
        ws->hidden[row + t] = h;
    }
}

enum bt_status bt_model_forward(struct bt_model *m, struct bt_model_ws *ws,
                                const struct bt_model_kv *kv, const struct bt_model_batch *batch)
{
    uint32_t row = 0;

    BT_ASSERT(batch->n_tokens <= ws->max_tokens && batch->n_out <= ws->max_out);
    for (uint32_t i = 0; i < batch->n_spans; row += batch->spans[i++].n) {
        for (uint32_t t = 0; t < batch->spans[i].n; t++) {
            ws->hidden[row + t] = mix(batch->tokens[row + t] + 1, batch->spans[i].pos + t);
        }
    }
    BT_ASSERT(row == batch->n_tokens);
    for (uint32_t l = 0; l < m->info.n_layers; l++) {
        row = 0;
        for (uint32_t i = 0; i < batch->n_spans; row += batch->spans[i++].n) {
            run_layer(m, ws, kv, &batch->spans[i], row, l);
        }
        if (batch->layer_done != NULL && !batch->layer_done(batch->arg, l)) {
            return BT_ERR_CANCELLED;
        }
    }
    for (uint32_t o = 0; o < batch->n_out; o++) {
        BT_ASSERT(batch->out_rows[o] < batch->n_tokens);
        for (uint32_t v = 0; v < VOCAB; v++) {
            batch->logits[(size_t)o * VOCAB + v] =
                (float)(mix(ws->hidden[batch->out_rows[o]], v) >> 40) * (8.0F / (1U << 24));
        }
    }
    return BT_OK;
}
