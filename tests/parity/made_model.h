#ifndef BT_TESTS_PARITY_MADE_MODEL_H
#define BT_TESTS_PARITY_MADE_MODEL_H

/* A two-layer Llama or mixture of experts whose matrices have any block type, with seeded random weights, as a GGUF file; and
 * the same values as a file of f32, made by the plain-C kernels. Every column count is a multiple of 256. */

#include "files/gguf_write.h"
#include "files/quant_blocks.h"
#include "tests/parity/kernel_parity.h"
#include "tests/tempfile.h"

enum {
    MADE_LAYERS = 2,
    MADE_DIM = 256,
    MADE_HEADS = 4,
    MADE_KV_HEADS = 2,
    MADE_FFN = 256,
    MADE_VOCAB = 96,
    MADE_CONTEXT = 1024,
    MADE_EXPERTS = 3, /* all are used: which ones cannot hang on a rounding */
    MADE_TENSORS_MAX = 32,
};

struct made_tensor {
    char name[64];
    uint32_t n_rows, n_cols; /* n_cols 0: a vector of f32 near 1 */
    uint32_t n_matrices;     /* experts, or 1 */
    bool plain;              /* f32 whatever the type is */
};

struct made_model {
    struct made_tensor t[MADE_TENSORS_MAX];
    uint32_t n;
};

static inline void made_add(struct made_model *m, int layer, const char *stem, uint32_t n_rows,
                            uint32_t n_cols)
{
    struct made_tensor *t = &m->t[m->n++];

    *t = (struct made_tensor){.n_rows = n_rows, .n_cols = n_cols, .n_matrices = 1};
    if (layer < 0) {
        (void)snprintf(t->name, sizeof(t->name), "%s.weight", stem);
    } else {
        (void)snprintf(t->name, sizeof(t->name), "blk.%d.%s.weight", layer, stem);
    }
}

static inline void made_tensors(struct made_model *m, bool experts)
{
    const uint32_t kv = MADE_DIM / MADE_HEADS * MADE_KV_HEADS;

    m->n = 0;
    made_add(m, -1, "token_embd", MADE_VOCAB, MADE_DIM);
    made_add(m, -1, "output", MADE_VOCAB, MADE_DIM);
    made_add(m, -1, "output_norm", MADE_DIM, 0);
    for (int i = 0; i < MADE_LAYERS; i++) {
        made_add(m, i, "attn_norm", MADE_DIM, 0);
        made_add(m, i, "attn_q", MADE_DIM, MADE_DIM);
        made_add(m, i, "attn_k", kv, MADE_DIM);
        made_add(m, i, "attn_v", kv, MADE_DIM);
        made_add(m, i, "attn_output", MADE_DIM, MADE_DIM);
        made_add(m, i, "ffn_norm", MADE_DIM, 0);
        if (experts) {
            made_add(m, i, "ffn_gate_inp", MADE_EXPERTS, MADE_DIM);
            m->t[m->n - 1].plain = true;
        }
        made_add(m, i, experts ? "ffn_gate_exps" : "ffn_gate", MADE_FFN, MADE_DIM);
        made_add(m, i, experts ? "ffn_up_exps" : "ffn_up", MADE_FFN, MADE_DIM);
        made_add(m, i, experts ? "ffn_down_exps" : "ffn_down", MADE_DIM, MADE_FFN);
        for (uint32_t e = 1; experts && e <= 3; e++) {
            m->t[m->n - e].n_matrices = MADE_EXPERTS;
        }
    }
}

static inline void made_keys(struct bt_gguf_writer *w, bool experts)
{
    bt_gguf_add_str(w, "general.architecture", "llama", 5);
    bt_gguf_add_u32(w, "llama.block_count", MADE_LAYERS);
    bt_gguf_add_u32(w, "llama.context_length", MADE_CONTEXT);
    bt_gguf_add_u32(w, "llama.embedding_length", MADE_DIM);
    bt_gguf_add_u32(w, "llama.feed_forward_length", MADE_FFN);
    bt_gguf_add_u32(w, "llama.attention.head_count", MADE_HEADS);
    bt_gguf_add_u32(w, "llama.attention.head_count_kv", MADE_KV_HEADS);
    bt_gguf_add_f32(w, "llama.attention.layer_norm_rms_epsilon", 1e-5F);
    bt_gguf_add_u32(w, "tokenizer.ggml.eos_token_id", 2);
    if (experts) {
        bt_gguf_add_u32(w, "llama.expert_count", MADE_EXPERTS);
        bt_gguf_add_u32(w, "llama.expert_used_count", MADE_EXPERTS);
    }
}

/* Where a block's scale and minimum lie; the scale that gives values a deviation of 1/16; the minimum that makes
 * their mean 0. */
static inline void made_scales(enum bt_dtype t, uint8_t *block)
{
    static const struct {
        uint16_t d_at, min_at; /* min_at 0: none */
        float unit, min;
    } of[BT_DTYPE_COUNT] = {
        [BT_DTYPE_Q4_0] = {0, 0, 0.0135F, 0},      [BT_DTYPE_Q4_1] = {0, 2, 0.0135F, -7.5F},
        [BT_DTYPE_Q5_0] = {0, 0, 0.0068F, 0},      [BT_DTYPE_Q5_1] = {0, 2, 0.0068F, -15.5F},
        [BT_DTYPE_IQ4_NL] = {0, 0, 0.0009F, 0},    [BT_DTYPE_Q8_0] = {0, 0, 0.00085F, 0},
        [BT_DTYPE_Q2_K] = {80, 82, 0.0045F, 1.5F}, [BT_DTYPE_Q3_K] = {108, 0, 0.0014F, 0},
        [BT_DTYPE_Q4_K] = {0, 2, 0.00024F, 7.5F},  [BT_DTYPE_Q5_K] = {0, 2, 0.00012F, 15.5F},
        [BT_DTYPE_Q6_K] = {208, 0, 0.00005F, 0},
    };
    float d = of[t].unit * pk_uniform(0.6F, 1.4F), min = d * of[t].min;

    d = of[t].min_at == 0 && pk_u32() % 2 == 0 ? -d : d; /* for a mean of 0 */

    bt_quantize(block + of[t].d_at, &d, 1, BT_DTYPE_F16);
    if (of[t].min_at != 0) {
        bt_quantize(block + of[t].min_at, &min, 1, BT_DTYPE_F16);
    }
}

/* The bytes of a tensor in type t. */
static inline uint8_t *made_blocks(const struct made_tensor *m, enum bt_dtype t, size_t *bytes)
{
    size_t block = bt_dtype_block_bytes(t);

    *bytes = (size_t)m->n_matrices * m->n_rows * (m->n_cols / bt_dtype_block_values(t)) * block;
    uint8_t *w = bt_alloc(*bytes);
    for (size_t i = 0; i < *bytes; i++) {
        w[i] = (uint8_t)pk_u32();
    }
    for (size_t i = 0; i < *bytes; i += block) {
        made_scales(t, w + i);
    }
    return w;
}

/* The f32 values of blocks; takes and frees them. */
static inline uint8_t *made_values(struct bt_kctx *k, const struct made_tensor *m, enum bt_dtype t,
                                   uint8_t *blocks, size_t *bytes)
{
    uint32_t n = m->n_matrices * m->n_rows;
    struct bt_k_weight_desc d = {
        .dtype = t, .n_rows = n, .n_cols = m->n_cols, .data = blocks, .for_embed = true};
    struct bt_kweight *w = NULL;
    uint32_t *ids = bt_alloc(n * sizeof(uint32_t));

    *bytes = (size_t)n * m->n_cols * sizeof(float);
    float *values = bt_alloc(*bytes);
    CHECK_EQ(bt_k_weight_create(k, &d, &w, NULL), BT_OK);
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = i;
    }
    bt_k_embed(k, values, w, ids, n, 1.0F);
    bt_k_weight_destroy(k, w);
    bt_free(ids);
    bt_free(blocks);
    return (uint8_t *)values;
}

/* plain: a context whose embeddings are the file's values; NULL: the file has type t, else f32. Returns its path. */
static inline const char *made_write(const char *name, enum bt_dtype t, bool experts,
                                     struct bt_kctx *plain)
{
    static struct made_model m;
    struct bt_gguf_writer *w = NULL;
    const char *path = bt_temp_path(name);

    made_tensors(&m, experts);
    CHECK_EQ(bt_gguf_writer_create(path, &w, NULL), BT_OK);
    made_keys(w, experts);
    for (uint32_t i = 0; i < m.n; i++) {
        const struct made_tensor *e = &m.t[i];
        uint64_t shape[3] = {e->n_matrices, e->n_rows, e->n_cols};
        bool blocks = e->n_cols != 0 && !e->plain && plain == NULL;
        (void)bt_gguf_add_tensor(w, e->name, blocks ? t : BT_DTYPE_F32,
                                 e->n_cols == 0      ? 1
                                 : e->n_matrices > 1 ? 3
                                                     : 2,
                                 e->n_matrices > 1 ? shape : shape + 1);
    }
    CHECK_EQ(bt_gguf_writer_begin(w, NULL), BT_OK);
    pk_seed = 77 + t;
    for (uint32_t i = 0; i < m.n; i++) {
        const struct made_tensor *e = &m.t[i];
        size_t bytes = (size_t)e->n_rows * (e->n_cols == 0 ? 1 : e->n_cols) * sizeof(float);
        float spread = e->n_cols == 0 ? 0.2F : 0.1F, mean = e->n_cols == 0 ? 1.0F : 0.0F;
        uint8_t *data =
            e->n_cols == 0 || e->plain
                ? (uint8_t *)pk_floats(bytes / sizeof(float), mean - spread, mean + spread)
                : made_blocks(e, t, &bytes);
        if (e->n_cols != 0 && !e->plain && plain != NULL) {
            data = made_values(plain, e, t, data, &bytes);
        }
        CHECK_EQ(bt_gguf_writer_data(w, data, bytes, NULL), BT_OK);
        bt_free(data);
    }
    CHECK_EQ(bt_gguf_writer_finish(w, NULL), BT_OK);
    bt_gguf_writer_destroy(w);
    return path;
}

#endif
