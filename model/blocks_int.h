#ifndef BT_MODEL_BLOCKS_INT_H
#define BT_MODEL_BLOCKS_INT_H

/* The pieces that families wire together. Rows of all buffers are the batch's tokens; every piece
 * is backend calls only. A pass that ends inside a layer (abandoned by layer_done, or nothing but
 * the cache was wanted) has p->stopped set: pieces after it do nothing. */

#include "model/model_int.h"

struct bt_model_ws {
    struct bt_model *m;
    struct bt_kctx *k;
    uint32_t max_tokens, max_out;
    size_t qkv_width, ffn_width; /* floats of one row */
    /* device, [max_tokens, …] */
    float *x;      /* [dim]: the residual stream */
    float *h;      /* [dim]: input of a block */
    float *o;      /* [dim]: output of a block */
    float *qkv;    /* [qkv_width]: q heads, k heads, v heads */
    float *attn;   /* [n_heads * head_dim] */
    float *ffn;    /* [2 * ffn_dim]: gate, up; NULL when no layer is dense */
    float *router; /* [n_experts]; NULL when dense */
    float *out;    /* [max_out, dim] */
    float *logits; /* [max_out, vocab] */
    /* host */
    float *cos[BT_ROPES_MAX], *sin[BT_ROPES_MAX]; /* [max_tokens, n_pairs] */
    struct bt_k_span *spans;                      /* [n_groups, max_tokens] */
    uint32_t *tokens, *out_rows;                  /* [max_tokens], [max_out]: of a step */
};

struct bt_pass {
    struct bt_model *m;
    struct bt_model_ws *ws;
    struct bt_kctx *k;
    const struct bt_model_kv *kv;
    const struct bt_model_batch *batch;
    uint32_t n;              /* rows */
    uint32_t n_spans, n_out; /* as computed: a step repeats its last row */
    const uint32_t *tokens, *out_rows;
    bool stopped;   /* the layer in hand is the last thing done */
    bool cancelled; /* … because layer_done said so */
};

/* y = norm(x), rows of dim. */
void bt_block_norm(struct bt_pass *p, float *y, const float *x, const float *w);
/* o = attention(h): projections, per-head norms where the layer has them, rope, cache, attention,
 * output projection. */
void bt_block_attention(struct bt_pass *p, uint32_t layer);
/* The experts of a sparse layer, as the backend wants them. */
struct bt_k_moe bt_block_moe(const struct bt_model *m, const struct bt_layer *l);
/* o = feed-forward(h), dense or mixture of experts as the layer is. */
void bt_block_ffn(struct bt_pass *p, uint32_t layer);
/* x += o */
void bt_block_residual(struct bt_pass *p);

/* x += attention(norm(x)); x += ffn(norm(x)): every family but gemma. */
void bt_block_prenorm_layer(struct bt_pass *p, uint32_t layer);
/* The same with a second norm after attention and after ffn: gemma 2 and 3. */
void bt_block_sandwich_layer(struct bt_pass *p, uint32_t layer);

/* Tensors of attention with separate q, k, v under both formats' usual names. qk_norm: with
 * per-head norms. */
void bt_bind_attention(struct bt_binder *b, uint32_t layer, bool qk_norm);
/* Tensors of a dense feed-forward with separate gate and up under the usual names. */
void bt_bind_mlp(struct bt_binder *b, uint32_t layer);
/* input_layernorm and post_attention_layernorm of a prenorm layer. */
void bt_bind_prenorms(struct bt_binder *b, uint32_t layer);

#endif
