#ifndef BT_MODEL_MODEL_INT_H
#define BT_MODEL_MODEL_INT_H

/* The inside of model/: a model's parsed configuration, its layers' weights, and what a family must
 * provide. */

#include "base/arena.h"
#include "files/gguf.h"
#include "files/hf_config.h"
#include "files/panel_file.h"
#include "files/safetensors.h"
#include "model/model.h"
#include "model/rope.h"

enum {
    BT_LAYERS_MAX = 1024,
    BT_DIM_MAX = 1 << 17,
    BT_VOCAB_MAX = 1 << 23,
    BT_CONTEXT_MAX = 1 << 24,
    BT_EXPERTS_MAX = 1024,
    BT_HEAD_DIM_MAX = 512,
    BT_ROPES_MAX = 2,
};

/* What config.json or GGUF metadata says, in one vocabulary. Everything here enters the
 * fingerprint. */
struct bt_model_config {
    uint32_t n_layers, dim, n_heads, n_kv_heads, head_dim, vocab, context;
    uint32_t ffn_dim;
    uint32_t n_experts, n_experts_used, expert_ffn_dim; /* 0 experts: dense */
    bool norm_topk;
    enum bt_k_act act;
    double rms_eps;
    float norm_offset;   /* added to every norm weight: 1 where files store w - 1 */
    float embed_scale;   /* on embedding rows */
    float attn_scale;    /* on q·k */
    float attn_softcap;  /* 0: none */
    float final_softcap; /* 0: none */
    bool tied;           /* the output matrix is the embedding table */
    bool qkv_bias, o_bias, mlp_bias;
    bool rope_interleaved;
    uint32_t n_ropes;
    struct bt_rope_spec ropes[BT_ROPES_MAX];
    uint32_t n_eos;
    uint32_t eos[BT_MODEL_EOS_MAX];
    int64_t bos;
};

#define BT_GF8_SCALE_MAX 0x1p7F /* see BT_DTYPE_GF8 */

enum bt_quant_kind {
    BT_QUANT_NONE,
    BT_QUANT_GPTQ, /* qweight [K / per word, N], qzeros [groups, N / per word], scales [groups, N] */
    BT_QUANT_AWQ,  /* qweight [K, N / 8], qzeros [groups, N / 8], scales [groups, N] */
    BT_QUANT_CT_INT,    /* weight int8 [N, K], weight_scale [N, groups] */
    BT_QUANT_CT_PACKED, /* weight_packed [N, K / per word], weight_scale [N, groups] */
    BT_QUANT_F8, /* weight e4m3 [N, K], a scale for all of it, for a row, or for a block of it */
};

/* quantization_config of a HF directory: how its quantised matrices are to be read. */
struct bt_quant_config {
    enum bt_quant_kind kind;
    uint32_t bits;                   /* 4 or 8 */
    uint32_t group;                  /* input values that share a scale; 0: a whole row */
    uint32_t zero_added;             /* what the file's zero points are short of */
    uint32_t block_rows, block_cols; /* F8: values that share a scale; 0: a row, or all */
    bool scale_inv; /* F8: the scales are called weight_scale_inv, and are factors all the same */
};

/* One quantised matrix [n_rows N, n_cols K] as its file has it. Value (n, k) is scale * (q - zero). */
struct bt_quant {
    struct bt_quant_config c;
    const struct bt_tensor *q, *scale;
    const struct bt_tensor *zero;  /* NULL: the middle of the range */
    const struct bt_tensor *index; /* group of each k; NULL: in order */
    uint32_t n_rows, n_cols, group;
    uint32_t scale_rows, scale_cols; /* F8: rows and columns of a scale */
    uint32_t *
        perm; /* place k of the matrix holds input perm[k], so that groups lie together; NULL: in order */
};

struct bt_linear {
    struct bt_kweight *w; /* [n_out, n_in]; NULL: this layer has none */
    float *bias;          /* device [n_out] or NULL */
};

/* Device vectors and matrices of one layer; a family fills what it has. */
struct bt_layer {
    uint32_t window; /* 0: full attention */
    uint8_t rope;    /* index of its rope */
    bool sparse;     /* mixture of experts instead of one feed-forward */
    float *attn_norm, *post_attn_norm, *ffn_norm, *post_ffn_norm, *q_norm, *k_norm;
    struct bt_linear qkv;     /* fused, or */
    struct bt_linear q, k, v; /* apart */
    struct bt_linear o;
    struct bt_linear gate_up;  /* fused, or */
    struct bt_linear gate, up; /* apart */
    struct bt_linear down;
    struct bt_linear router;
    struct bt_kweight **expert_gate, **expert_up, **expert_down; /* [n_experts] */
};

/* A tensor that the model uses and where its device form goes. */
struct bt_slot {
    const struct bt_tensor *tensor;
    const char *
        gguf_name; /* of the tensor in a GGUF file; experts of one matrix have the same. The model's arena */
    const char *hf_name; /* likewise */
    const void *data;    /* the tensor's, or a slice of it */
    size_t bytes;
    uint32_t n_rows, n_cols;      /* vectors: 1, length */
    const struct bt_quant *quant; /* NULL: data is what the kernels take */
    bool for_gemm, for_embed, expert;
    struct bt_kweight **weight; /* exactly one of these two is not NULL */
    float **vector;
};

struct bt_binder;
struct bt_meta;
struct bt_pass;

/* One architecture. All functions report through the sticky error of their first argument. */
struct bt_family {
    const char *name;      /* info.arch */
    const char *hf_type;   /* config.json model_type; NULL: no such files */
    const char *gguf_arch; /* general.architecture; NULL: no such files */
    /* Fill m->config beyond what model/config_*.c read already, and windows, ropes, sparse of
     * m->layers. */
    void (*config_hf)(struct bt_model *m, struct bt_hf *c);
    void (*config_gguf)(struct bt_model *m, struct bt_meta *g);
    /* Declares the tensors of one layer. */
    void (*bind)(struct bt_binder *b, uint32_t layer);
    /* Runs one layer over ws->x. */
    void (*layer)(struct bt_pass *p, uint32_t layer);
};

extern const struct bt_family bt_family_llama, bt_family_mistral, bt_family_qwen2, bt_family_qwen3,
    bt_family_gemma2, bt_family_gemma3, bt_family_phi3, bt_family_mixtral, bt_family_qwen3_moe;

struct bt_model {
    char *path;
    const struct bt_family *family;
    struct bt_st *st; /* one of the two */
    struct bt_gguf *gguf;
    struct bt_arena arena; /* layers, slots, expert arrays */
    struct bt_model_config config;
    struct bt_quant_config quant;
    struct bt_layer *layers;
    float *rope_divisors; /* [ropes[0].dim / 2] or NULL */
    struct bt_rope_table ropes[BT_ROPES_MAX];
    struct bt_slot *slots;
    size_t n_slots, cap_slots;
    struct bt_kweight *embed, *output; /* output: NULL when tied */
    float *final_norm;
    struct bt_kctx *k;            /* NULL until loaded */
    struct bt_panel_file *panels; /* NULL: packed weights lie in the backend's memory, … */
    uint8_t *own_panels; /* … in one block, so that all of it may be huge pages; NULL: each alone */
    size_t own_panel_bytes;
    struct bt_model_packed packed;
    uint8_t *layer_group;
    uint32_t *layer_index;
    struct bt_model_info info;
};

/* config_hf.c */
const struct bt_family *bt_config_hf_family(struct bt_hf *c);
/* Everything that the families share, rope included, then family->config_hf; fills m->config,
 * allocates m->layers. */
enum bt_status bt_config_hf_read(struct bt_model *m, struct bt_hf *c,
                                 struct bt_err *err) BT_NODISCARD;
/* sliding_window: 0 for null; if_absent: what a missing key means. */
uint32_t bt_config_hf_window(struct bt_hf *c, uint32_t if_absent);
/* The same window on every layer, unless layer_types says otherwise. */
void bt_config_hf_window_all(struct bt_model *m, struct bt_hf *c, uint32_t window);
/* Windows by layer_types where set, else sliding where is_sliding says. window 0: the sliding
 * layers are full. */
void bt_config_hf_windows(struct bt_model *m, struct bt_hf *c, uint32_t window,
                          bool (*is_sliding)(uint32_t layer, uint32_t arg), uint32_t arg);
/* Windows of the qwen families: use_sliding_window, max_window_layers. */
void bt_config_hf_qwen_windows(struct bt_model *m, struct bt_hf *c);
/* Rope parameters of one kind of layer. object: "rope_parameters.full_attention" and the like;
 * theta_key, scaling_key: the published spelling (scaling_key NULL: never scaled). */
void bt_config_hf_rope(struct bt_hf *c, struct bt_rope_spec *spec, const char *object,
                       const char *theta_key, const char *scaling_key, double theta_default);

/* config_gguf.c */
const struct bt_family *bt_config_gguf_family(const struct bt_gguf *g, struct bt_err *err);
enum bt_status bt_config_gguf_read(struct bt_model *m, struct bt_err *err) BT_NODISCARD;
/* Keys below are without the architecture prefix. The first error sticks. */
uint32_t bt_meta_u32(struct bt_meta *g, const char *key, uint32_t min, uint32_t max);
uint32_t bt_meta_u32_or(struct bt_meta *g, const char *key, uint32_t min, uint32_t max,
                        uint32_t def);
double bt_meta_f64_or(struct bt_meta *g, const char *key, double def);
bool bt_meta_has(struct bt_meta *g, const char *key);
/* attention.sliding_window, where there is one, on every layer. */
void bt_config_gguf_window_all(struct bt_model *m, struct bt_meta *g);
/* Experts: their number, how many a token gets, their width; the layers with a router are sparse.
 * ffn_key: where the width stands. */
void bt_config_gguf_experts(struct bt_model *m, struct bt_meta *g, const char *ffn_key);
const struct bt_gguf *bt_meta_file(const struct bt_meta *g);
void bt_meta_fail(struct bt_meta *g, enum bt_status st, const char *key, const char *text);

/* config.c: shared by both. */
enum bt_status bt_config_check(struct bt_model *m, const char *file,
                               struct bt_err *err) BT_NODISCARD;
enum bt_status bt_config_layers_alloc(struct bt_model *m, struct bt_err *err) BT_NODISCARD;
enum bt_status bt_config_groups(struct bt_model *m, const char *file,
                                struct bt_err *err) BT_NODISCARD;

/* weights.c: hf and gguf are the files' names without layer prefix and ".weight". The first error
 * sticks. */
struct bt_model *bt_bind_model(struct bt_binder *b);
void bt_bind_vector(struct bt_binder *b, float **dst, const char *hf, const char *gguf, uint32_t n);
void bt_bind_linear(struct bt_binder *b, struct bt_linear *dst, const char *hf, const char *gguf,
                    uint32_t n_out, uint32_t n_in, bool bias);
/* Expert matrices. HF: one tensor each, hf_stem.N.hf_suffix. GGUF: one tensor for all, gguf_stem_exps
 * [n_experts, n_out, n_in]; in older files gguf_stem.N each. */
void bt_bind_experts(struct bt_binder *b, struct bt_kweight ***dst, const char *hf_stem,
                     const char *hf_suffix, const char *gguf_stem, uint32_t n_out, uint32_t n_in);
enum bt_status bt_weights_bind(struct bt_model *m, struct bt_err *err) BT_NODISCARD;
void bt_weights_unload(struct bt_model *m, bool wrong_panels);
const struct bt_tensor *bt_weights_find(const struct bt_model *m, const char *name);

/* panels.c: sets m->panels or leaves it NULL, and says which in m->packed. m->k is set. */
void bt_panels_open(struct bt_model *m, const struct bt_model_load_opts *o);
void bt_panels_close(struct bt_model *m, bool wrong); /* wrong: nobody shall use the file again */
size_t bt_panels_bytes(struct bt_model *m, const struct bt_slot *s); /* its share of the file */
/* data: NULL for a quantised matrix, whose rows are yet to be made. */
struct bt_k_weight_desc bt_slot_desc(const struct bt_slot *s);

/* What a binder's helpers are to other files: weights.c. The first error sticks; NULL after one. */
const struct bt_tensor *bt_bind_take(struct bt_binder *b, const char *name, bool any_type);
void bt_bind_fail(struct bt_binder *b, enum bt_status st, const struct bt_tensor *t,
                  const char *fmt, ...) BT_PRINTF(4, 5);
void bt_bind_check_shape(struct bt_binder *b, const struct bt_tensor *t, uint32_t n_dims,
                         const uint64_t *shape);
void bt_bind_no_memory(struct bt_binder *b);

/* quant_config.c: reads quantization_config, where there is one, and refuses what it cannot read. */
void bt_quant_config_read(struct bt_model *m, struct bt_hf *c);
/* quant_bind.c: the quantised form of the matrix stem + ".weight", in m's arena; NULL when the file
 * has it plain, or after an error. */
const struct bt_quant *bt_quant_bind(struct bt_binder *b, const char *stem, uint32_t n_rows,
                                     uint32_t n_cols);
/* Bytes of q, scales and zero points. */
size_t bt_quant_bytes(const struct bt_quant *q);
/* quant_f8.c: the F8 parts of both. */
void bt_quant_f8_bind(struct bt_binder *b, struct bt_quant *q, const char *stem);
enum bt_status bt_quant_f8_rows(const struct bt_quant *q, void **rows,
                                struct bt_err *err) BT_NODISCARD;
/* A tensor stem + suffix of this type (NULL: F32, F16 or BF16) and shape (cols 0: one dimension); NULL when it is absent and
 * not needed, or after an error. */
const struct bt_tensor *bt_quant_part(struct bt_binder *b, const char *stem, const char *suffix,
                                      bool needed, const char *type, uint64_t rows, uint64_t cols);
/* Whether a tensor of a quantised directory says only how activations or the KV cache may be rounded, which is not done. */
bool bt_quant_unused(const struct bt_model *m, const char *name);
/* quant_rows.c: G4, G8 or GF8, and the matrix as rows of such blocks (its columns in the order of perm), in memory that
 * bt_free frees. */
enum bt_dtype bt_quant_dtype(const struct bt_quant *q);
enum bt_status bt_quant_rows(const struct bt_quant *q, void **rows,
                             struct bt_err *err) BT_NODISCARD;

/* fingerprint.c: fills fingerprint, n_params, weight_bytes. */
enum bt_status bt_fingerprint(struct bt_model *m, struct bt_err *err) BT_NODISCARD;

#endif
