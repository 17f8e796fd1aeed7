#ifndef BT_TESTS_TINY_MODEL_H
#define BT_TESTS_TINY_MODEL_H

/* A two-layer Llama model with seeded random weights, written as a Hugging Face directory into the
 * test's temporary directory. Its list of tensors may be edited before writing, to make broken
 * models. */

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include "tests/tempfile.h"

enum {
    TINY_LAYERS = 2,
    TINY_DIM = 32,
    TINY_HEADS = 4,
    TINY_KV_HEADS = 2,
    TINY_HEAD_DIM = 8,
    TINY_FFN = 48,
    TINY_VOCAB = 64,
    TINY_TENSORS_MAX = 64,
};

static const char tiny_config[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"hidden_size\": 32, "
    "\"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "
    "\"intermediate_size\": 48, \"vocab_size\": 64, \"max_position_embeddings\": 256, "
    "\"rms_norm_eps\": 1e-5, \"hidden_act\": \"silu\", \"rope_theta\": 10000.0, "
    "\"eos_token_id\": [2, 3], \"bos_token_id\": 1}";

struct tiny_tensor {
    char name[96];
    const char *type; /* "F32", "BF16", "I64", "F8_E4M3" */
    uint32_t n_dims, shape[2];
};

struct tiny_model {
    struct tiny_tensor t[TINY_TENSORS_MAX];
    uint32_t n;
};

static inline void tiny_add(struct tiny_model *m, const char *name, uint32_t rows, uint32_t cols)
{
    struct tiny_tensor *t = &m->t[m->n++];

    *t = (struct tiny_tensor){.type = "F32", .n_dims = cols == 0 ? 1 : 2, .shape = {rows, cols}};
    (void)snprintf(t->name, sizeof(t->name), "%s", name);
}

static inline void tiny_add_layer(struct tiny_model *m, uint32_t layer, const char *stem,
                                  uint32_t rows, uint32_t cols)
{
    char name[96];

    (void)snprintf(name, sizeof(name), "model.layers.%u.%s.weight", layer, stem);
    tiny_add(m, name, rows, cols);
}

/* The tensors that tiny_config asks for. */
static inline void tiny_llama(struct tiny_model *m)
{
    uint32_t q = TINY_HEADS * TINY_HEAD_DIM, kv = TINY_KV_HEADS * TINY_HEAD_DIM;

    *m = (struct tiny_model){0};
    tiny_add(m, "model.embed_tokens.weight", TINY_VOCAB, TINY_DIM);
    tiny_add(m, "lm_head.weight", TINY_VOCAB, TINY_DIM);
    tiny_add(m, "model.norm.weight", TINY_DIM, 0);
    for (uint32_t i = 0; i < TINY_LAYERS; i++) {
        tiny_add_layer(m, i, "input_layernorm", TINY_DIM, 0);
        tiny_add_layer(m, i, "post_attention_layernorm", TINY_DIM, 0);
        tiny_add_layer(m, i, "self_attn.q_proj", q, TINY_DIM);
        tiny_add_layer(m, i, "self_attn.k_proj", kv, TINY_DIM);
        tiny_add_layer(m, i, "self_attn.v_proj", kv, TINY_DIM);
        tiny_add_layer(m, i, "self_attn.o_proj", TINY_DIM, q);
        tiny_add_layer(m, i, "mlp.gate_proj", TINY_FFN, TINY_DIM);
        tiny_add_layer(m, i, "mlp.up_proj", TINY_FFN, TINY_DIM);
        tiny_add_layer(m, i, "mlp.down_proj", TINY_DIM, TINY_FFN);
    }
}

static inline struct tiny_tensor *tiny_find(struct tiny_model *m, const char *name)
{
    for (uint32_t i = 0; i < m->n; i++) {
        if (strcmp(m->t[i].name, name) == 0) {
            return &m->t[i];
        }
    }
    abort();
}

static inline void tiny_remove(struct tiny_model *m, const char *name)
{
    *tiny_find(m, name) = m->t[--m->n];
}

/* Writes config.json and model.safetensors; returns the directory. Weights are uniform in ±0.5 from
 * seed. */
static inline const char *tiny_write(const struct tiny_model *m, const char *config, uint64_t seed)
{
    static char header[16384];
    static uint8_t out[1 << 20];
    size_t h = 0, data = 0;

    header[h++] = '{';
    for (uint32_t i = 0; i < m->n; i++) {
        const struct tiny_tensor *t = &m->t[i];
        size_t values = (size_t)t->shape[0] * (t->n_dims == 2 ? t->shape[1] : 1);
        size_t bytes = values * (strcmp(t->type, "F32") == 0      ? 4
                                 : strcmp(t->type, "I64") == 0    ? 8
                                 : strncmp(t->type, "F8", 2) == 0 ? 1
                                                                  : 2);
        h += (size_t)snprintf(header + h, sizeof(header) - h,
                              "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%u", i ? "," : "", t->name,
                              t->type, t->shape[0]);
        if (t->n_dims == 2) {
            h += (size_t)snprintf(header + h, sizeof(header) - h, ",%u", t->shape[1]);
        }
        h += (size_t)snprintf(header + h, sizeof(header) - h, "],\"data_offsets\":[%zu,%zu]}", data,
                              data + bytes);
        data += bytes;
    }
    header[h++] = '}';
    for (unsigned i = 0; i < 8; i++) {
        out[i] = (uint8_t)((uint64_t)h >> (8 * i));
    }
    memcpy(out + 8, header, h);
    for (size_t i = 0; i + 4 <= data; i += 4) {
        seed = seed * 6364136223846793005U + 1442695040888963407U;
        float v = (float)(seed >> 40) * 0x1p-24F - 0.5F;
        memcpy(out + 8 + h + i, &v, 4);
    }
    (void)bt_temp_write("model.safetensors", out, 8 + h + data);
    (void)bt_temp_write("config.json", config, strlen(config));
    return bt_temp_dir();
}

static inline void tiny_clean(void)
{
    static const char *const names[] = {"config.json", "model.safetensors",
                                        "generation_config.json"};

    bt_temp_clean(names, sizeof(names) / sizeof(names[0]));
}

#endif
