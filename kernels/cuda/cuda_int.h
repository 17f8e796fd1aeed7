#ifndef BT_KERNELS_CUDA_INT_H
#define BT_KERNELS_CUDA_INT_H

/* Inside of the CUDA backend: the context, packed weights, and what the host's C files and the device's .cu files have of
 * each other. Host code is C; every .cu file offers C functions that put kernels into the context's stream.
 *
 * Numerics class "cuda-f32". As cpu-f32 but for the order of sums:
 *  - gemm: K is cut into segments of 256. A segment is one chain acc = fma(x[k], w[k], acc) from +0, padded with zeros to a
 *    multiple of 32; the segments are added in order to +0; then + bias[n]. One row or a thousand, the order is this.
 *  - rmsnorm: thread t of 128 takes elements t, t + 128, … by fma; then a tree 64, 32, …, 1 (t + half added to t).
 *  - attention: q·k is one chain of fma over the head. Keys come in blocks of 32 and splits of 256, aligned at absolute
 *    positions. In a block: the maximum, p = exp(score - max), sums over p and p v position by position. Splits begin
 *    anew and are merged in order (merge_part in cuda_attention.cu): a decoding row's splits run at once, a prompt's one
 *    after the other, with the same bits.
 * exp, tanh, erf: the polynomials of the CPU backend. No operation is fused that is not written as fma.
 *
 * Numerics class "cuda-bf16". As cuda-f32, but for gemm with weights of bf16 and in blocks, and attention over f16 or bf16 pages with a head
 * dimension that 8 divides. Both are made of one operation of tensor cores, c += Σ a b over 16 k, products of 16-bit values
 * summed in f32 (cuda_tile_int.cuh). Its order and rounding inside are the device's, and are not published; so the class is
 * named with the device's compute capability, "cuda-bf16-sm90", and nodes of other devices are of other classes.
 * (The emulation, "cuda-bf16-emulated": acc = acc + a b, k by k.) What is taken for granted, and checked by the parity tests on
 * whatever they run on: an output depends on its row of a, its column of b and its c, not on where in the operation it is or
 * on its neighbours; and products that are zero change nothing but the sign of a zero.
 *  - gemm: x is rounded to bf16, to nearest, ties to even; so are the values of weights in blocks. Weights are always a (16 outputs), rows of x always b (8 of them; if
 *    fewer are there, with anything beside them): one row or a thousand, the operations of an output are the same. K is cut into segments of 512, a
 *    segment is one chain of operations from +0, of k in the order 8 t + 4 s + 2 j + i for steps s = 0, 1 of 32 k; the segments
 *    are added in order to +0; then + bias[n]. Of gf8 weights the codes' values, exact in bf16, take part; each group of values
 *    with one scale d is cut into segments of its own, which are added as total = fma(d, segment, total).
 *  - attention: q is rounded to the pages' type. Scores are chains over the head from +0, 16 dimensions at a time, padded with
 *    zeros to a multiple of 32. Keys come in blocks of 64 and splits of 256, aligned at absolute positions. In a block: the
 *    maximum; p = exp(score - max) of the keys that the row sees, 0 of others. Their sum: four parts of 16 keys in order; a part
 *    is t = 0 … 3 of ((p[2t] + p[2t + 1]) + p[2t + 8]) + p[2t + 9], added as (0 + 1) + (2 + 3). p is rounded to the pages' type,
 *    and p v are chains over the keys, 16 at a time. Splits as in cuda-f32. A value in V that is not finite
 *    joins the sums of the rows that see it, and of no others.
 * Pages of f8 give what pages of f32 give whose K and V are those numbers; in cuda-bf16, with a head dimension that 16 divides, pages
 * of f16. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "kernels/backend_int.h"
#include "kernels/cuda/cuda_api_int.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "base/assert.h" /* declares a C function, and does not say so */

#define CUDA_PANEL        32U /* rows of a weight that lie side by side: one for each lane of a warp */
#define CUDA_BLOCK        32U  /* k values that a thread expands at a time */
#define CUDA_SEGMENT      256U /* k values in one chain of a product */
#define CUDA_GEMV_ROWS    8U   /* products of more rows are tiled */
#define CUDA_HEAD_DIM_MAX 512U
#define CUDA_SHARED_MAX                                                                            \
    (99U << 10) /* bytes that a block may ask for: sm_86's, the least of those from sm_80 on */
#define CUDA_ATTN_ROWS                                                                             \
    16U /* (token, head) rows of an attention tile; of tensor cores for prompts: up to four times */
#define CUDA_ATTN_KEYS    32U  /* keys in a block of the online softmax */
#define CUDA_ATTN_SPLIT   256U /* keys in a split */
#define CUDA_TILE_SEGMENT 512U /* k values in one chain of a product on tensor cores */
#define CUDA_EXPERTS_MAX  1024U
#define CUDA_MOE_ROWS     512U /* rows routed together; more rows go in several rounds */

/* Kernels of products are made for each of these; the first three have the numbers of their types. TILES: bf16 in fragments,
 * for tensor cores; BLOCK_TILES: as BLOCKS, for tensor cores. */
enum cuda_kind {
    CUDA_KIND_F32,
    CUDA_KIND_F16,
    CUDA_KIND_BF16,
    CUDA_KIND_BLOCKS,
    CUDA_KIND_TILES,
    CUDA_KIND_BLOCK_TILES
};

/* How a kernel reads a weight. Panels of 32 rows, padded with zeros; a row's bytes (as in the file, plain types padded to 32
 * values) are cut into units of 2 or 4 bytes, and unit i of the 32 rows lies side by side: unit[panel][i][32]. A row of gf8 is,
 * group by group, a scale and then the codes.
 * Of TILES, a panel is two tiles of 16 rows; a tile is [n_blocks][2 steps][32 lanes][4 words], what a lane gives to an operation
 * of tensor cores side by side: word j of lane 4 g + t in step s of block b holds, of row g + 8 (j % 2), the values
 * k = 32 b + 8 t + 4 s + 2 (j / 2) and k + 1. So a lane's share of 32 values of x, for two steps, is 8 consecutive ones. */
struct cuda_view {
    const void *data;     /* device */
    const uint32_t *perm; /* device [n_cols], or NULL: value k goes with x[perm[k]] */
    uint32_t n_rows, n_cols;
    uint32_t n_blocks;     /* of 32 k */
    uint32_t group_blocks; /* of gf8: how many have one scale; else all of them */
    uint32_t row_units;    /* units in a row */
    uint32_t dtype;        /* enum bt_dtype */
    uint32_t kind;         /* enum cuda_kind */
    uint32_t unit;         /* bytes: 2 or 4 */
};

struct cuda_weight {
    struct bt_kweight base;
    struct cuda_view view;
    void *data;     /* what view.data shows */
    uint32_t *perm; /* and view.perm */
    bool for_gemm, for_embed;
    bool rows; /* not in panels: see cuda_blas_int.h */
};

/* A place for what the host gives along with a call: page tables, ids, angles. A ring in pinned memory and its twin in
 * device memory. What was sent lately is not sent again while it is the same. */
#define CUDA_SENT_MAX  16U
#define CUDA_SEND_MAX  ((size_t)8 << 20) /* one piece; callers cut what is longer */
#define CUDA_RING_HALF ((size_t)32 << 20)
struct cuda_upload {
    uint8_t *host, *dev;   /* [2 * CUDA_RING_HALF] */
    size_t half, at;       /* of the ring, now; next free byte, at most the half's end */
    cudaEvent_t passed[2]; /* the last copy out of each half */
    bool pending[2];
    struct {
        const void *from;
        size_t at, bytes; /* bytes: 0: forgotten */
    } sent[CUDA_SENT_MAX];
    uint32_t next;
};

/* Device memory of a known size. */
struct cuda_scratch {
    void *p;
    size_t bytes;
};
#define CUDA_ATTN_SCRATCH ((size_t)64 << 20)
#define CUDA_X16_SCRATCH  ((size_t)64 << 20)

/* Attention of tiles: rows (token, head of the group) of one span, one key-value head for each block. */
struct cuda_tile {
    uint32_t row0;     /* first batch row of the span */
    uint32_t pos;      /* its position */
    uint32_t first, n; /* rows of the tile, counted through the span: token * group + head */
    uint32_t pages_at; /* the span's page table among all */
};
/* Where a batch row's K and V go. */
struct cuda_place {
    uint32_t row, page, token;
};
#define CUDA_PLACES_MAX (CUDA_SEND_MAX / sizeof(struct cuda_place))
#define CUDA_TILES_MAX  (CUDA_SEND_MAX / sizeof(struct cuda_tile))
#define CUDA_PAGES_MAX  (CUDA_SEND_MAX / sizeof(uint32_t))

/* Steps kept as graphs: see cuda_step.c. */
#define CUDA_STEP_BYTES ((size_t)32 << 20) /* of what the host gives along with a step */
#define CUDA_STEP_SENDS 4096U              /* and how many pieces */
#define CUDA_GRAPHS_MAX 64U
enum cuda_step_mode { CUDA_STEP_OFF, CUDA_STEP_RECORD, CUDA_STEP_REPLAY };
struct cuda_step_key {
    const void *owner, *kv;
    uint32_t rows, n_splits, page_tokens;
};
struct cuda_graph {
    struct cuda_step_key key;
    cudaGraphExec_t exec; /* NULL: not captured yet */
    bool refused;         /* too large */
    uint64_t used;        /* the step that used it last */
    uint64_t sizes;       /* hash of the sizes of what was sent */
    uint32_t n_calls;
};
struct cuda_step_sent {
    const void *key;
    uint32_t tag;
    size_t at, bytes;
};
struct cuda_steps {
    enum cuda_step_mode mode;
    struct cuda_graph *now;
    uint32_t n_splits;   /* of each row, at once */
    uint32_t table;      /* page ids for each row */
    uint8_t *host, *dev; /* [CUDA_STEP_BYTES], pinned, and its twin */
    size_t at;
    struct cuda_step_sent sent[CUDA_STEP_SENDS];
    uint32_t n_sent, n_calls;
    uint64_t sizes;
    bool full;
    uint64_t n_steps;
    cudaEvent_t began, ended; /* of the last graph, if steps are timed; else NULL */
    bool timed;               /* they were put into the stream */
    struct cuda_graph graphs[CUDA_GRAPHS_MAX];
};

struct cuda_ctx {
    struct bt_kctx base;
    cudaStream_t stream;
    uint32_t device;
    bool mma; /* class cuda-bf16: tensor cores */
    char class_name[32];
    cudaEvent_t marks[BT_K_MARKS]; /* by mark modulo their number */
    uint32_t n_marks;              /* so far */
    bool drained; /* nothing was put into the stream since the host waited for it */
    struct cuda_upload up;
    struct cuda_steps step;
    struct cuda_scratch attn;  /* CUDA_ATTN_SCRATCH bytes: partial results of splits */
    struct cuda_scratch x16;   /* CUDA_X16_SCRATCH bytes: x of a product on tensor cores, rounded */
    struct cuda_scratch moe;   /* activations of the experts, by moe_reserve */
    struct cuda_tile *tiles;   /* host [CUDA_TILES_MAX]: of one launch */
    uint32_t *pages;           /* host [CUDA_PAGES_MAX]: page tables of one launch */
    struct cuda_place *places; /* host [CUDA_PLACES_MAX] */
    struct cuda_view views[CUDA_EXPERTS_MAX]; /* of one launch */
    enum bt_status fault;                     /* what sync reports */
    struct cuda_blas *blas;                   /* NULL: own kernels alone; see cuda_blas_int.h */
    struct cuda_sampler *sampler;             /* by sample_reserve; see cuda_sample_int.h */
};

static inline struct cuda_ctx *cuda_of(struct bt_kctx *k)
{
    return (struct cuda_ctx *)(void *)k;
}

static inline const struct cuda_weight *cuda_weight_of(const struct bt_kweight *w)
{
    return (const struct cuda_weight *)(const void *)w;
}

/* Makes c's device the calling thread's: a context is made on one thread and used by another. */
static inline void cuda_enter(const struct cuda_ctx *c)
{
    (void)cudaSetDevice((int)c->device); /* was right when c was made; what follows would fail */
}
/* To be called before anything is put into c's stream. False: a step that is there as a graph runs, and nothing is put. */
static inline bool cuda_begin(struct cuda_ctx *c)
{
    cuda_enter(c);
    c->drained = false;
    c->step.n_calls++;
    return c->step.mode != CUDA_STEP_REPLAY;
}
/* Notes an error of the runtime: the first one is logged, with what was tried, and sync reports it. True: all well. */
bool cuda_ok(struct cuda_ctx *c, cudaError_t e, const char *what);
/* The same before there is a context. */
enum bt_status cuda_status(cudaError_t e, const char *what, struct bt_err *err);
/* Every kernel that BT_LAUNCH names lists itself. They are loaded when a context is made: CUDA would load each when it is first
 * launched, and the first requests would wait for that. */
#define CUDA_KERNELS_MAX 1024U
bool cuda_list_kernel(const void *kernel);
enum bt_status cuda_load_kernels(struct bt_err *err) BT_NODISCARD;
/* A device copy of 1 … CUDA_SEND_MAX host bytes, for kernels put into the stream before three more are sent. */
void *cuda_send(struct cuda_ctx *c, const void *host, size_t bytes);
/* The same of host memory that shows something else by the next call; in a step, key and tag say what it is. Tags below 16 are
 * the callers', key's own value is 0. */
enum { CUDA_SEND_SELF, CUDA_SEND_PLACES, CUDA_SEND_TILES, CUDA_SEND_PAGES, CUDA_SEND_VIEWS };
void *cuda_send_as(struct cuda_ctx *c, const void *key, uint32_t tag, const void *host,
                   size_t bytes);
enum bt_status cuda_upload_init(struct cuda_ctx *c, struct bt_err *err) BT_NODISCARD;
void cuda_upload_fini(struct cuda_ctx *c);

/* Brings a weight's values to w->data, which has room for them. */
typedef enum bt_status cuda_weight_load_fn(struct cuda_ctx *c, struct cuda_weight *w,
                                           const struct bt_k_weight_desc *d, struct bt_err *err);
/* A weight of `bytes` in device memory that kernels read as view says; its data and perm are set here and by load. */
enum bt_status cuda_weight_make(struct cuda_ctx *c, const struct bt_k_weight_desc *d,
                                const struct cuda_view *view, size_t bytes,
                                cuda_weight_load_fn *load, struct bt_kweight **out,
                                struct bt_err *err) BT_NODISCARD;
/* Bytes of one row as packed: the file's, plain types padded to 32 values. */
size_t cuda_row_bytes(enum bt_dtype dtype, uint32_t n_cols);
/* Unit in bytes for rows of a type: the widest that divides its blocks. */
uint32_t cuda_unit(enum bt_dtype dtype);
/* Packs n_panels panels; raw: device, rows of raw_bytes each, of which n_rows (from the first panel's on) are there. */
void cuda_pack(struct cuda_ctx *c, void *out, const uint8_t *raw, size_t raw_bytes, uint32_t n_rows,
               uint32_t n_panels, const struct cuda_view *v);

/* A product, or one product for each expert. */
struct cuda_product {
    float *y;
    const float *x;
    size_t ldy, ldx;
    struct cuda_view w; /* grouped: of no expert, its n_rows and n_cols hold for all */
    const float *bias;  /* device, or NULL */
    uint32_t n_rows;
    /* Grouped: output rows start[e] … start[e + 1] - 1 are expert e's; all device. NULL: not grouped. */
    const struct cuda_view *experts;
    const uint32_t *start;
    const uint32_t *row_expert; /* [n_rows]: the expert of an output row */
    const uint32_t *x_row;      /* [n_rows]: the row of x for an output row; NULL: the same */
    uint32_t n_experts;
    uint32_t kind; /* which weights are meant: enum cuda_kind */
    uint16_t *
        x16; /* device [n_rows][n_blocks * CUDA_BLOCK], 16-byte aligned: x in bf16, for tensor cores */
};
void cuda_product(struct cuda_ctx *c, const struct cuda_product *p);
/* Fills p->x16, in the order of output rows; then the product may be called. */
void cuda_tiles_round(struct cuda_ctx *c, const struct cuda_product *p);
/* What cuda_product and cuda_pack do for CUDA_KIND_TILES. */
void cuda_tiles_product(struct cuda_ctx *c, const struct cuda_product *p);
/* Of CUDA_KIND_BLOCK_TILES. */
void cuda_tiles_blocks(struct cuda_ctx *c, const struct cuda_product *p);
void cuda_tiles_pack(struct cuda_ctx *c, void *out, const uint8_t *raw, size_t raw_bytes,
                     uint32_t n_rows, uint32_t n_panels, const struct cuda_view *v);

/* Routing: kernels over device memory, see cuda_moe.c. */
struct cuda_route {
    const float *logits; /* [n_rows, n_experts] */
    float *prob;         /* the same shape */
    float *weight;       /* [n_rows, top_k] */
    uint32_t *expert;    /* [n_rows, top_k] */
    uint32_t *slot;  /* [n_rows, top_k]: place among the assignments, which lie grouped by expert */
    uint32_t *start; /* [n_experts + 1] */
    uint32_t *row;   /* [n_rows * top_k]: by slot, the row */
    uint32_t *by_slot; /* [n_rows * top_k]: by slot, the expert */
    uint32_t n_rows, n_experts, top_k;
    bool normalize;
};
void cuda_route(struct cuda_ctx *c, const struct cuda_route *r);
/* out[m] = Σ weight · y[slot] in the order of rank. */
void cuda_combine(struct cuda_ctx *c, float *out, const float *y, const struct cuda_route *r,
                  uint32_t dim);

/* One launch over tiles. */
struct cuda_attn {
    struct bt_k_attn a;
    struct bt_k_kv kv;
    const struct cuda_tile *tiles; /* device */
    const uint32_t *pages;         /* device */
    uint32_t n_tiles;
    uint32_t rows;     /* of a tile, at most; splits at once: CUDA_ATTN_ROWS */
    uint32_t n_splits; /* of the longest tile; 0: splits one after the other */
    float *part;       /* [n_tiles][n_kv_heads][n_splits][CUDA_ATTN_ROWS][head_dim + 2] */
};
void cuda_attention_run(struct cuda_ctx *c, const struct cuda_attn *a);
/* Whether tensor cores compute it, and how many rows the tiles of a prompt have. */
bool cuda_attention_tiled(const struct cuda_ctx *c, const struct bt_k_kv *kv);
uint32_t cuda_attention_rows(const struct cuda_ctx *c, const struct bt_k_kv *kv);
/* What cuda_attention_run does on tensor cores, all but joining splits. */
void cuda_attention_tiles(struct cuda_ctx *c, const struct cuda_attn *a);

/* One launch that writes rows of K and V. */
struct cuda_store {
    struct bt_k_kv kv;
    const float *key, *value;
    size_t ldk, ldv;
    const struct cuda_place *places; /* device [n] */
    uint32_t n;
};
void cuda_store_run(struct cuda_ctx *c, const struct cuda_store *s);

/* cuda_step.c: entries of the table, and how the others send within a step. */
enum bt_status cuda_step_init(struct cuda_ctx *c, struct bt_err *err) BT_NODISCARD;
void cuda_step_fini(struct cuda_ctx *c);
uint32_t cuda_step_begin(struct bt_kctx *k, const struct bt_k_step *s);
enum bt_status cuda_step_end(struct bt_kctx *k, bool keep);
void cuda_step_forget(struct bt_kctx *k, const void *owner);
/* What was sent in this step as key and tag, or NULL. */
const struct cuda_step_sent *cuda_step_find(struct cuda_ctx *c, const void *key, uint32_t tag);
void *cuda_step_send(struct cuda_ctx *c, const void *key, uint32_t tag, const void *host,
                     size_t bytes);

/* cuda_mover.c: entries of the table. */
enum bt_status cuda_mover_create(struct bt_kctx *k, const struct bt_k_mover_opts *o,
                                 struct bt_k_mover **out, struct bt_err *err);
void cuda_mover_destroy(struct bt_k_mover *m);
void cuda_mover_enter(struct bt_k_mover *m);
uint8_t *cuda_mover_slot(struct bt_k_mover *m, uint32_t slot);
void cuda_mover_start(struct bt_k_mover *m, uint32_t slot, void *dev, size_t bytes, bool to_device);
void cuda_mover_go(struct bt_k_mover *m);
enum bt_status cuda_mover_done(struct bt_k_mover *m, uint32_t slot, bool wait);

/* The entries of the backend's table. */
enum bt_status cuda_weight_create(struct bt_kctx *k, const struct bt_k_weight_desc *desc,
                                  struct bt_kweight **out, struct bt_err *err);
void cuda_weight_destroy(struct bt_kctx *k, struct bt_kweight *w);
void cuda_embed(struct bt_kctx *k, float *y, const struct bt_kweight *table, const uint32_t *ids,
                uint32_t n_ids, float scale);
void cuda_gemm_all(struct bt_kctx *k, const struct bt_k_product *products, uint32_t n,
                   const float *x, size_t ldx, uint32_t n_rows);
void cuda_gemm(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
               const struct bt_kweight *w, const float *bias, uint32_t n_rows);
void cuda_rmsnorm(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                  const float *w, float w_offset, float eps, uint32_t n_rows, uint32_t n_sub,
                  uint32_t dim);
void cuda_rope(struct bt_kctx *k, float *x, size_t ldx, const float *cos, const float *sin,
               uint32_t n_rows, uint32_t n_heads, uint32_t head_dim, uint32_t rot_dim,
               bool interleaved);
void cuda_kv_store(struct bt_kctx *k, const struct bt_k_kv *kv, const float *key, size_t ldk,
                   const float *value, size_t ldv, const struct bt_k_span *spans, uint32_t n_spans);
void cuda_attention(struct bt_kctx *k, const struct bt_k_attn *a, const struct bt_k_kv *kv,
                    const struct bt_k_span *spans, uint32_t n_spans);
void cuda_glu(struct bt_kctx *k, float *y, size_t ldy, const float *gate, size_t ldg,
              const float *up, size_t ldu, uint32_t n_rows, uint32_t n_cols, enum bt_k_act act);
void cuda_add(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx, uint32_t n_rows,
              uint32_t n_cols);
void cuda_softcap(struct bt_kctx *k, float *x, size_t ldx, float cap, uint32_t n_rows,
                  uint32_t n_cols);
void cuda_gather_rows(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                      const uint32_t *rows, uint32_t n, uint32_t n_cols);
enum bt_status cuda_moe_reserve(struct bt_kctx *k, const struct bt_k_moe *moe, uint32_t n_rows);
void cuda_moe_ffn(struct bt_kctx *k, float *out, const float *x, const float *logits,
                  const struct bt_k_moe *moe, uint32_t n_rows);

#ifdef __cplusplus
}
#endif

#endif
