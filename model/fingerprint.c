/* The fingerprint of a model: a hash over the parsed configuration and every used tensor's name,
 * type, shape and a sample of its bytes. Owns what counts as "the same model"; cheap on mapped
 * files, as it reads three short pieces a tensor. */

#include <string.h>
#include "base/buf.h"
#include "base/hash.h"
#include "model/model_int.h"

enum { SAMPLE_BYTES = 64 };

static void add_rope(struct bt_buf *b, const struct bt_rope_spec *s)
{
    bt_buf_addf(b, "rope %d %u %.17g %.17g %.17g %.17g %.17g %.17g %.17g %.17g %.17g %.17g %d\n",
                (int)s->type, s->dim, s->theta, s->factor, s->original_context, s->low_freq_factor,
                s->high_freq_factor, s->beta_fast, s->beta_slow, s->attention_factor, s->mscale,
                s->mscale_all_dim, s->truncate);
}

static void add_config(struct bt_buf *b, const struct bt_model *m)
{
    const struct bt_model_config *c = &m->config;

    bt_buf_addf(b, "%s %u %u %u %u %u %u %u %u %u %u %u %d\n", m->family->name, c->n_layers, c->dim,
                c->n_heads, c->n_kv_heads, c->head_dim, c->vocab, c->context, c->ffn_dim,
                c->n_experts, c->n_experts_used, c->expert_ffn_dim, c->norm_topk);
    bt_buf_addf(b, "%d %.17g %.9g %.9g %.9g %.9g %.9g %d %d %d %d %d\n", (int)c->act, c->rms_eps,
                (double)c->norm_offset, (double)c->embed_scale, (double)c->attn_scale,
                (double)c->attn_softcap, (double)c->final_softcap, c->tied, c->qkv_bias, c->o_bias,
                c->mlp_bias, c->rope_interleaved);
    for (uint32_t i = 0; i < c->n_ropes; i++) {
        add_rope(b, &c->ropes[i]);
    }
    bt_buf_addf(b, "bos %lld eos", (long long)c->bos);
    for (uint32_t i = 0; i < c->n_eos; i++) {
        bt_buf_addf(b, " %u", c->eos[i]);
    }
    for (uint32_t i = 0; i < c->n_layers; i++) {
        bt_buf_addf(b, "\nlayer %u %u %d", m->layers[i].window, m->layers[i].rope,
                    m->layers[i].sparse);
    }
}

static uint64_t hash_slot(const struct bt_slot *s, uint64_t h)
{
    const struct bt_tensor *t = s->tensor;
    const uint8_t *p = s->data;
    size_t n = s->bytes < SAMPLE_BYTES ? s->bytes : SAMPLE_BYTES;
    uint8_t dims[BT_TENSOR_DIMS_MAX * 8];

    for (uint32_t i = 0; i < t->n_dims; i++) {
        for (unsigned k = 0; k < 8; k++) {
            dims[i * 8 + k] = (uint8_t)(t->shape[i] >> (8 * k));
        }
    }
    h = bt_hash64(t->name, strlen(t->name), h);
    h = bt_hash64(t->type_name, strlen(t->type_name), h);
    h = bt_hash64(dims, t->n_dims * 8, h);
    h = bt_hash64(p, n, h);
    h = bt_hash64(p + (s->bytes - n) / 2, n, h);
    return bt_hash64(p + s->bytes - n, n, h);
}

static uint64_t hash_quant(const struct bt_quant *q, uint64_t h)
{
    const struct bt_tensor *parts[] = {q->q, q->scale, q->zero, q->index};
    uint32_t how[] = {(uint32_t)q->c.kind, q->c.bits, q->group, q->c.zero_added};
    uint32_t blocks[] = {q->scale_rows, q->scale_cols};

    h = bt_hash64(how, sizeof(how), h);
    h = q->c.kind == BT_QUANT_F8 ? bt_hash64(blocks, sizeof(blocks), h) : h;
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        if (parts[i] != NULL) {
            struct bt_slot s = {
                .tensor = parts[i], .data = parts[i]->data, .bytes = parts[i]->bytes};
            h = hash_slot(&s, h);
        }
    }
    return h;
}

enum bt_status bt_fingerprint(struct bt_model *m, struct bt_err *err)
{
    struct bt_buf text = {0};

    add_config(&text, m);
    if (text.failed) {
        bt_buf_fini(&text);
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", m->path);
    }
    uint64_t h = bt_hash64(text.data, text.len, 0);
    bt_buf_fini(&text);
    if (m->rope_divisors != NULL) {
        h = bt_hash64(m->rope_divisors, m->config.ropes[0].dim / 2 * sizeof(float), h);
    }
    for (size_t i = 0; i < m->n_slots; i++) {
        const struct bt_slot *s = &m->slots[i];
        h = s->quant != NULL ? hash_quant(s->quant, h) : hash_slot(s, h);
        m->info.n_params += (uint64_t)s->n_rows * s->n_cols;
        m->info.weight_bytes += s->bytes;
    }
    m->info.fingerprint = h;
    return BT_OK;
}
