/* The computing pieces of a layer, in backend calls. Owns the use of the workspace's buffers;
 * refuses to know which family calls. */

#include "model/blocks_int.h"

void bt_block_norm(struct bt_pass *p, float *y, const float *x, const float *w)
{
    const struct bt_model_config *c = &p->m->config;

    bt_k_rmsnorm(p->k, y, c->dim, x, c->dim, w, c->norm_offset, (float)c->rms_eps, p->n, 1, c->dim);
}

static void linear(struct bt_pass *p, float *y, size_t ldy, const float *x, size_t ldx,
                   const struct bt_linear *l)
{
    bt_k_gemm(p->k, y, ldy, x, ldx, l->w, l->bias, p->n);
}

static struct bt_k_product product(float *y, size_t ldy, const struct bt_linear *l)
{
    return (struct bt_k_product){.y = y, .ldy = ldy, .w = l->w, .bias = l->bias};
}

static void project_qkv(struct bt_pass *p, const struct bt_layer *l, float *q, float *key,
                        float *value)
{
    const struct bt_model_config *c = &p->m->config;
    size_t ld = p->ws->qkv_width;

    if (l->qkv.w != NULL) {
        linear(p, q, ld, p->ws->h, c->dim, &l->qkv);
    } else {
        const struct bt_k_product qkv[] = {product(q, ld, &l->q), product(key, ld, &l->k),
                                           product(value, ld, &l->v)};
        bt_k_gemm_all(p->k, qkv, 3, p->ws->h, c->dim, p->n);
    }
    if (l->q_norm != NULL) {
        bt_k_rmsnorm(p->k, q, ld, q, ld, l->q_norm, c->norm_offset, (float)c->rms_eps, p->n,
                     c->n_heads, c->head_dim);
        bt_k_rmsnorm(p->k, key, ld, key, ld, l->k_norm, c->norm_offset, (float)c->rms_eps, p->n,
                     c->n_kv_heads, c->head_dim);
    }
    const float *cos = p->ws->cos[l->rope], *sin = p->ws->sin[l->rope];
    uint32_t rot = c->ropes[l->rope].dim;
    bt_k_rope(p->k, q, ld, cos, sin, p->n, c->n_heads, c->head_dim, rot, c->rope_interleaved);
    bt_k_rope(p->k, key, ld, cos, sin, p->n, c->n_kv_heads, c->head_dim, rot, c->rope_interleaved);
}

void bt_block_attention(struct bt_pass *p, uint32_t layer)
{
    const struct bt_model_config *c = &p->m->config;
    const struct bt_layer *l = &p->m->layers[layer];
    struct bt_model_ws *ws = p->ws;
    uint32_t g = p->m->layer_group[layer];
    size_t q_width = (size_t)c->n_heads * c->head_dim,
           kv_width = (size_t)c->n_kv_heads * c->head_dim;
    float *q = ws->qkv, *key = q + q_width, *value = key + kv_width;
    const struct bt_k_span *spans = ws->spans + (size_t)g * ws->max_tokens;

    project_qkv(p, l, q, key, value);
    struct bt_k_kv kv = {.base = (uint8_t *)p->kv->groups[g].base +
                                 p->m->layer_index[layer] * p->kv->groups[g].layer_stride,
                         .page_stride = p->kv->groups[g].page_stride,
                         .page_tokens = p->kv->page_tokens,
                         .n_kv_heads = c->n_kv_heads,
                         .head_dim = c->head_dim,
                         .dtype = p->kv->dtype};
    bt_k_kv_store(p->k, &kv, key, ws->qkv_width, value, ws->qkv_width, spans, p->n_spans);
    if (p->batch->layer_done != NULL && !p->batch->layer_done(p->batch->arg, layer)) {
        p->stopped = p->cancelled = true;
        return;
    }
    if (layer + 1 == c->n_layers && p->n_out == 0) {
        p->stopped = true; /* a chunk inside a prompt: the cache is all that it leaves */
        return;
    }
    struct bt_k_attn a = {.q = q,
                          .out = ws->attn,
                          .q_stride = ws->qkv_width,
                          .out_stride = q_width,
                          .n_heads = c->n_heads,
                          .scale = c->attn_scale,
                          .softcap = c->attn_softcap,
                          .window = l->window};
    bt_k_attention(p->k, &a, &kv, spans, p->n_spans);
    linear(p, ws->o, c->dim, ws->attn, q_width, &l->o);
}

static void dense_ffn(struct bt_pass *p, const struct bt_layer *l)
{
    const struct bt_model_config *c = &p->m->config;
    float *gate = p->ws->ffn, *up = gate + c->ffn_dim;
    size_t ld = p->ws->ffn_width;

    if (l->gate_up.w != NULL) {
        linear(p, gate, ld, p->ws->h, c->dim, &l->gate_up);
    } else {
        const struct bt_k_product both[] = {product(gate, ld, &l->gate), product(up, ld, &l->up)};
        bt_k_gemm_all(p->k, both, 2, p->ws->h, c->dim, p->n);
    }
    bt_k_glu(p->k, gate, ld, gate, ld, up, ld, p->n, c->ffn_dim, c->act);
    linear(p, p->ws->o, c->dim, gate, ld, &l->down);
}

struct bt_k_moe bt_block_moe(const struct bt_model *m, const struct bt_layer *l)
{
    const struct bt_model_config *c = &m->config;

    return (struct bt_k_moe){.n_experts = c->n_experts,
                             .top_k = c->n_experts_used,
                             .normalize = c->norm_topk,
                             .act = c->act,
                             .gate = l->expert_gate,
                             .up = l->expert_up,
                             .down = l->expert_down,
                             .dim = c->dim,
                             .ffn_dim = c->expert_ffn_dim};
}

static void sparse_ffn(struct bt_pass *p, const struct bt_layer *l)
{
    const struct bt_model_config *c = &p->m->config;
    struct bt_k_moe moe = bt_block_moe(p->m, l);

    linear(p, p->ws->router, c->n_experts, p->ws->h, c->dim, &l->router);
    bt_k_moe_ffn(p->k, p->ws->o, p->ws->h, p->ws->router, &moe, p->n);
}

void bt_block_ffn(struct bt_pass *p, uint32_t layer)
{
    const struct bt_layer *l = &p->m->layers[layer];

    if (l->sparse) {
        sparse_ffn(p, l);
    } else {
        dense_ffn(p, l);
    }
}

void bt_block_residual(struct bt_pass *p)
{
    uint32_t dim = p->m->config.dim;

    bt_k_add(p->k, p->ws->x, dim, p->ws->o, dim, p->n, dim);
}

void bt_block_prenorm_layer(struct bt_pass *p, uint32_t layer)
{
    const struct bt_layer *l = &p->m->layers[layer];

    bt_block_norm(p, p->ws->h, p->ws->x, l->attn_norm);
    bt_block_attention(p, layer);
    if (p->stopped) {
        return;
    }
    bt_block_residual(p);
    bt_block_norm(p, p->ws->h, p->ws->x, l->ffn_norm);
    bt_block_ffn(p, layer);
    bt_block_residual(p);
}

void bt_block_sandwich_layer(struct bt_pass *p, uint32_t layer)
{
    const struct bt_layer *l = &p->m->layers[layer];

    bt_block_norm(p, p->ws->h, p->ws->x, l->attn_norm);
    bt_block_attention(p, layer);
    if (p->stopped) {
        return;
    }
    bt_block_norm(p, p->ws->o, p->ws->o, l->post_attn_norm);
    bt_block_residual(p);
    bt_block_norm(p, p->ws->h, p->ws->x, l->ffn_norm);
    bt_block_ffn(p, layer);
    bt_block_norm(p, p->ws->o, p->ws->o, l->post_ffn_norm);
    bt_block_residual(p);
}

void bt_bind_attention(struct bt_binder *b, uint32_t layer, bool qk_norm)
{
    struct bt_model *m = bt_bind_model(b);
    const struct bt_model_config *c = &m->config;
    struct bt_layer *l = &m->layers[layer];
    uint32_t q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;

    bt_bind_linear(b, &l->q, "self_attn.q_proj", "attn_q", q, c->dim, c->qkv_bias);
    bt_bind_linear(b, &l->k, "self_attn.k_proj", "attn_k", kv, c->dim, c->qkv_bias);
    bt_bind_linear(b, &l->v, "self_attn.v_proj", "attn_v", kv, c->dim, c->qkv_bias);
    bt_bind_linear(b, &l->o, "self_attn.o_proj", "attn_output", c->dim, q, c->o_bias);
    if (qk_norm) {
        bt_bind_vector(b, &l->q_norm, "self_attn.q_norm", "attn_q_norm", c->head_dim);
        bt_bind_vector(b, &l->k_norm, "self_attn.k_norm", "attn_k_norm", c->head_dim);
    }
}

void bt_bind_mlp(struct bt_binder *b, uint32_t layer)
{
    struct bt_model *m = bt_bind_model(b);
    const struct bt_model_config *c = &m->config;
    struct bt_layer *l = &m->layers[layer];

    bt_bind_linear(b, &l->gate, "mlp.gate_proj", "ffn_gate", c->ffn_dim, c->dim, c->mlp_bias);
    bt_bind_linear(b, &l->up, "mlp.up_proj", "ffn_up", c->ffn_dim, c->dim, c->mlp_bias);
    bt_bind_linear(b, &l->down, "mlp.down_proj", "ffn_down", c->dim, c->ffn_dim, c->mlp_bias);
}

void bt_bind_prenorms(struct bt_binder *b, uint32_t layer)
{
    struct bt_model *m = bt_bind_model(b);
    struct bt_layer *l = &m->layers[layer];

    bt_bind_vector(b, &l->attn_norm, "input_layernorm", "attn_norm", m->config.dim);
    bt_bind_vector(b, &l->ffn_norm, "post_attention_layernorm", "ffn_norm", m->config.dim);
}
