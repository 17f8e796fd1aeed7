#ifndef BT_KERNELS_CPU_INT_H
#define BT_KERNELS_CPU_INT_H

/* Inside of the CPU backend: the context, packed weights, and the table of kernels that each instruction set fills in.
 *
 * Packed weight: panels of 16 rows of the matrix (16 output features), padded with zeros; inside a panel k runs
 * slowest, and the 16 outputs lie side by side, one per SIMD lane. 32 consecutive k make a block:
 *   f32, f16        [k][16] values
 *   bf16            [k / 2][16] pairs: the even k in the low half of a 32-bit word (odd K: a last half pair)
 *   q4_0            f16 d[16]; words[4][16]
 *   q4_1            f16 d[16], m[16]; words[4][16]
 *   q5_0            f16 d[16]; words[4][16]; bits[16]
 *   q5_1            f16 d[16], m[16]; words[4][16]; bits[16]
 *   iq4_nl          f16 d[16]; words[4][16]: places in cpu_iq4_nl
 *   q8_0            f16 d[16]; bytes[8][16]
 *   q2_k            per 256: f16 d[16], dmin[16]; then 8 blocks of uint8 sm[2][16] (low nibble: scale, high one: minimum
 *                   of 16 k); pairs[2][16]
 *   q3_k            per 256: f16 d[16]; then 8 blocks of int8 sc[2][16]; pairs[2][16]; bits[16]
 *   q4_k            per 256: f16 d[16], dmin[16]; then 8 blocks of uint8 sc[16], m[16]; words[4][16]
 *   q5_k            per 256: f16 d[16], dmin[16]; then 8 blocks of uint8 sc[16], m[16]; words[4][16]; bits[16]
 *   q6_k            per 256: f16 d[16]; then 8 blocks of int8 sc[2][16]; words[4][16]; pairs[2][16]
 *   g4              per group: f32 d[16], m[16]; then its blocks of words[4][16]
 *   g8              per group: f32 d[16], m[16]; then its blocks of bytes[8][16]
 *   gf8             per group: f32 d[16]; then its blocks of bytes[8][16], e4m3
 * All are 32-bit words, one per column, so that four consecutive k of a column meet in one lane:
 *   words[i][c]     byte j: the low nibble is q of k = 4i + j, the high one of k = 16 + 4i + j
 *   bytes[i][c]     byte j: q of k = 4i + j
 *   pairs[h][c]     byte j, bits 2i and 2i + 1: two bits of q of k = 16h + 4i + j (q6_k: 4 and 5; else 0 and 1)
 *   bits[c]         byte j, bit 4h + i: one bit of q of k = 16h + 4i + j, above those elsewhere
 * q is unsigned everywhere: signed formats are stored with their offset added (q8_0 128, q6_k 32; iq4_nl's table 128, q5_0
 * 16, q3_k 4). */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/assert.h"
#include "kernels/backend_int.h"
#include "kernels/cpu/cpu_pool.h"

#define CPU_PANEL        16U
#define CPU_BLOCK        32U  /* k values in a block */
#define CPU_SUPER        256U /* k values in a superblock of the K formats */
#define CPU_GEMM_ROWS    240U /* rows of x in one task; a multiple of every tile height */
#define CPU_KB           512U /* k values that a tile sums in registers; a multiple of CPU_SUPER */
#define CPU_ORDER_ROWS   256U /* rows of x put into a weight's order at a time */
#define CPU_INT8_ROWS    512U /* rows of x rounded to 8 bits at a time */
#define CPU_INT8_WORDS   18U
#define CPU_BF16_ROWS    512U /* rows of x rounded to bf16 at a time */
#define CPU_HEAD_DIM_MAX 512U
#define CPU_ATTN_ROWS    64U /* query rows (token, head) in one attention tile … */
#define CPU_ATTN16_ROWS  96U /* … with products of bf16 */
#define CPU_ATTN_KEYS    64U /* keys in a block of the online softmax, aligned at absolute positions */
#define CPU_THREADS_MAX  1024U

/* Floats of per-thread scratch: packed rows of x for one or more K-blocks, and expanded panels. */
#define CPU_SCRATCH_A    (CPU_GEMM_ROWS * CPU_KB)
#define CPU_SCRATCH_B    (CPU_KB * CPU_PANEL * 2U)
#define CPU_SCRATCH_GEMM (CPU_SCRATCH_A + CPU_SCRATCH_B)
/* q, accumulators, scores, one block of K or V. */
#define CPU_SCRATCH_ATTN                                                                           \
    (2U * CPU_ATTN_ROWS * CPU_HEAD_DIM_MAX + CPU_ATTN_ROWS * CPU_ATTN_KEYS +                       \
     CPU_ATTN_KEYS * CPU_HEAD_DIM_MAX)
/* With products of bf16: q, accumulators, scores, probabilities, sums, one block of K or V. */
#define CPU_SCRATCH_ATTN16                                                                         \
    (CPU_ATTN16_ROWS * (2U * CPU_HEAD_DIM_MAX + 2U * CPU_ATTN_KEYS + CPU_PANEL) +                  \
     CPU_ATTN_KEYS * CPU_HEAD_DIM_MAX / 2U)
#define CPU_MAX(a, b) ((a) > (b) ? (a) : (b))
#define CPU_SCRATCH   CPU_MAX(CPU_SCRATCH_GEMM, CPU_MAX(CPU_SCRATCH_ATTN, CPU_SCRATCH_ATTN16))

struct cpu_weight {
    struct bt_kweight base;
    enum bt_dtype dtype;
    uint32_t n_rows, n_cols; /* N, K */
    uint32_t n_panels;
    size_t panel_bytes;
    uint32_t group_shift; /* g4, g8, gf8: 1 << group_shift blocks have one header */
    uint32_t *perm;       /* [n_cols]: order of the inputs; NULL: as they are */
    uint8_t *packed;      /* NULL: not for gemm */
    bool borrowed;        /* packed is the caller's */
    size_t packed_bytes;
    const uint8_t *raw; /* the mapped rows; NULL: not for embed */
    size_t raw_row_bytes;
};

/* y[M, N] = x · wᵀ + bias; the kernels below compute a rectangle of it. */
struct cpu_gemm {
    float *y;
    const float *x;
    size_t ldy, ldx;
    const struct cpu_weight *w;
    const float *bias;
    uint32_t n_rows;
};

/* A product of the integer class: x of g as the quantise of the same table left it, in tiles of tile_rows rows (the last one
 * may have fewer), one after the other; within a tile block by block. */
struct cpu_int8_run {
    struct cpu_gemm g;
    int32_t *xq; /* [n_rows][n_cols / CPU_BLOCK][row_words(dtype)], in that order of tiles */
    uint32_t tile_rows;
};

/* Products of activations in 8 bits with block-quantised weights, for one instruction set. */
struct cpu_int8 {
    uint32_t tile_rows_max;
    uint32_t gemv_rows_max; /* products of more rows go to gemm; 0: all do */
    /* 32-bit words that a block of one row of x takes, at most CPU_INT8_WORDS. */
    uint32_t (*row_words)(enum bt_dtype dtype);
    void (*quantise)(const struct cpu_int8_run *r, uint32_t tile0, uint32_t tile1);
    /* All rows (at most gemv_rows_max), panels [p0, p1). */
    void (*gemv)(const struct cpu_int8_run *r, uint32_t p0, uint32_t p1);
    /* scratch: CPU_SCRATCH_GEMM floats. */
    void (*gemm)(const struct cpu_int8_run *r, uint32_t tile0, uint32_t tile1, uint32_t p0,
                 uint32_t p1, float *scratch);
};

/* Query rows of neighbouring key-value heads, equally many of each, one head's after the other's; they need not be
 * neighbours. */
struct cpu_attn_tile {
    const struct bt_k_attn *a;
    const struct bt_k_kv *kv;
    const uint32_t *pages;
    uint32_t kv_head, n_kv_heads;
    uint32_t n_rows; /* of all of them, <= CPU_ATTN_ROWS, or CPU_ATTN16_ROWS */
    struct {
        const float *q;
        float *out;
        uint32_t pos;
    } rows[CPU_MAX(CPU_ATTN_ROWS, CPU_ATTN16_ROWS)];
};

/* Where the first head's keys of the block of CPU_ATTN_KEYS positions from base on are stored; for positions that no row sees, some
 * row that may be read. first, last: the positions that some row sees; one is in the block. row_bytes: of one head. */
void cpu_attn_keys(const struct cpu_attn_tile *t, size_t row_bytes, uint32_t first, uint32_t last,
                   uint32_t base, const uint8_t *out[CPU_ATTN_KEYS]);
/* The keys of that block that row r sees: [lo, hi); none: both are 0. */
void cpu_attn_seen(const struct cpu_attn_tile *t, uint32_t r, uint32_t base, uint32_t *lo,
                   uint32_t *hi);

/* A product of class cpu-bf16: x of g as the prepare of the same table left it, in tiles of tile_rows rows (the last one may
 * have fewer), one after the other. */
struct cpu_bf16_run {
    struct cpu_gemm g;
    uint32_t *xq; /* [n_rows][pairs of k][pair_words], in that order of tiles */
    uint32_t tile_rows;
};

/* Products of activations in bf16 with bf16 weights, and attention with products of bf16, for one instruction set. */
struct cpu_bf16 {
    uint32_t tile_rows_max;
    uint32_t pair_words; /* 32-bit words that two k of one row of x take */
    bool flushes;        /* gemv and gemm rely on MXCSR's flush-to-zero and denormals-are-zero */
    void (*prepare)(const struct cpu_bf16_run *r, uint32_t tile0, uint32_t tile1);
    /* All rows (one tile), panels [p0, p1). */
    void (*gemv)(const struct cpu_bf16_run *r, uint32_t p0, uint32_t p1);
    void (*gemm)(const struct cpu_bf16_run *r, uint32_t tile0, uint32_t tile1, uint32_t p0,
                 uint32_t p1);
    void (*round)(uint16_t *out, const float *x, uint32_t n); /* as attention rounds K and V */
    /* scratch: CPU_SCRATCH_ATTN16 floats. */
    void (*attention)(const struct cpu_attn_tile *t, float *scratch);
};

struct cpu_isa {
    const char *name;
    uint32_t gemv_rows_max; /* products of more rows go to gemm … */
    uint32_t gemv_rows_f32; /* … with f32 weights, which gemm need not decode, earlier */
    /* All n_rows (at most gemv_rows_max), panels [p0, p1): straight from the packed panels. */
    void (*gemv)(const struct cpu_gemm *g, uint32_t p0, uint32_t p1);
    /* Rows [r0, r1) (at most CPU_GEMM_ROWS), panels [p0, p1). scratch: CPU_SCRATCH_GEMM floats. */
    void (*gemm)(const struct cpu_gemm *g, uint32_t r0, uint32_t r1, uint32_t p0, uint32_t p1,
                 float *scratch);
    /* scratch: CPU_SCRATCH_ATTN floats. */
    void (*attention)(const struct cpu_attn_tile *t, float *scratch);
    void (*rmsnorm)(float *y, const float *x, const float *w, float w_offset, float eps,
                    uint32_t dim);
    /* One head, rot_dim values. */
    void (*rope)(float *x, const float *cos, const float *sin, uint32_t rot_dim, bool interleaved);
    /* n values to dtype (F32, F16, BF16). */
    void (*round_store)(void *dst, const float *src, uint32_t n, enum bt_dtype dtype);
    void (*glu)(float *y, const float *gate, const float *up, uint32_t n, enum bt_k_act act);
    void (*add)(float *y, const float *x, uint32_t n);           /* y += x */
    void (*madd)(float *y, const float *x, float a, uint32_t n); /* y = fma(a, x, y) */
    void (*softcap)(float *x, float cap, uint32_t n);
    void (*softmax)(float *y, const float *x, uint32_t n);
};

extern const struct cpu_int8 cpu_int8_plain, cpu_int8_plain_fma, cpu_int8_avx2, cpu_int8_avx512,
    cpu_int8_avx512_vnni;
extern const struct cpu_bf16 cpu_bf16_plain, cpu_bf16_plain_fma, cpu_bf16_avx2, cpu_bf16_avx512,
    cpu_bf16_avx512_bf16;
/* Whether this CPU's AVX512-BF16, which it must have, does what class cpu-bf16 says. */
bool cpu_bf16_fits(void);
extern const struct cpu_isa cpu_isa_plain, cpu_isa_plain_fma, cpu_isa_avx2, cpu_isa_avx512,
    cpu_isa_neon;

struct cpu_ctx {
    struct bt_kctx base;
    const struct cpu_isa *isa;
    struct bt_pool *pool;
    uint32_t n_threads;
    float *scratch; /* [n_threads][CPU_SCRATCH] */
    size_t scratch_bytes;
    const struct cpu_int8 *int8; /* NULL: not the integer class */
    const struct cpu_bf16 *bf16; /* NULL: not class cpu-bf16 */
    const struct cpu_bf16 *attn; /* its attention is that of the class; NULL: isa's is */
    int32_t *
        xq; /* x in 8 bits or in bf16: rows of the widest weight that takes it so, grown when weights are created */
    size_t xq_bytes;
    float *moe; /* activations of the experts, grown on first use */
    size_t moe_bytes;
    float
        *ordered; /* [CPU_ORDER_ROWS, n_cols]: inputs in a weight's order; made with such weights */
    size_t ordered_bytes;
    enum bt_status fault; /* what sync reports */
};

static inline struct cpu_ctx *cpu_of(struct bt_kctx *k)
{
    return (struct cpu_ctx *)(void *)k;
}

static inline const struct cpu_weight *cpu_weight_of(const struct bt_kweight *w)
{
    return (const struct cpu_weight *)(const void *)w;
}

static inline float *cpu_scratch(const struct cpu_ctx *c, uint32_t thread)
{
    return c->scratch + (size_t)thread * CPU_SCRATCH;
}

/* Bytes of 32 k of a panel; the superblock headers of the K formats are spread over their blocks. */
static inline size_t cpu_block_bytes(enum bt_dtype dtype)
{
    static const uint16_t bytes[BT_DTYPE_COUNT] = {
        2048,     1024,     1024,     288,      320,      352, 384, 288, 544,
        1344 / 8, 1824 / 8, 2368 / 8, 2880 / 8, 3360 / 8, 256, 512, 512};
    return bytes[dtype];
}

/* Bytes of a panel of K columns; shift: a weight's group_shift. */
size_t cpu_panel_bytes(enum bt_dtype dtype, uint32_t n_cols, uint32_t shift);
/* Bytes of a group's header in a g4, g8 or gf8 panel; the byte where block b's header is, and where its values are. */
static inline size_t cpu_head_bytes(enum bt_dtype dtype)
{
    return dtype == BT_DTYPE_GF8 ? 64 : 128;
}
static inline size_t cpu_group_at(enum bt_dtype dtype, uint32_t shift, uint32_t b)
{
    return (size_t)(b >> shift) * (cpu_head_bytes(dtype) + (cpu_block_bytes(dtype) << shift));
}
static inline size_t cpu_grouped_at(enum bt_dtype dtype, uint32_t shift, uint32_t b)
{
    return cpu_group_at(dtype, shift, b) + cpu_head_bytes(dtype) +
           (b & ((1U << shift) - 1U)) * cpu_block_bytes(dtype);
}
/* n values of a raw row, from the first block on, to f32. n: a multiple of the block size. */
void cpu_dequant(float *y, const uint8_t *raw, enum bt_dtype dtype, uint32_t n);
/* The values that iq4_nl's nibbles stand for, each with 128 added. */
extern const uint8_t cpu_iq4_nl[16];
/* The 256 quants of a block without their offset, in order: q2_k 0 … 3, q3_k 0 … 7 (zero is 4), q5_k 0 … 31. */
void cpu_k_values(const uint8_t *p, enum bt_dtype dtype, uint8_t q[256]);
/* Scale, -32 … 31, of the 16 values from 16 s on of a q3_k block, from its 12 bytes. */
int8_t cpu_q3_k_scale(const uint8_t *scales, uint32_t s);
/* Scale and minimum (6 bits each) of sub-block s of a q4_k or q5_k block, from its 12 bytes. */
void cpu_q4_k_scale(const uint8_t *scales, uint32_t s, uint8_t *scale, uint8_t *min);
/* The 256 quants of a q6_k block, in order, each with 32 added: 0 … 63. */
void cpu_q6_k_values(const uint8_t *p, uint8_t q[256]);

/* Calls fn(arg, first, last) for ranges of 0 … n - 1, in parallel if n * item_cost (roughly: floats touched) is worth it. */
typedef void cpu_range_fn(void *arg, uint32_t first, uint32_t last);
void cpu_for_range(struct cpu_ctx *c, uint32_t n, size_t item_cost, cpu_range_fn *fn, void *arg);

/* Makes room for products with weights of n_cols inputs in their own order. */
bool cpu_order_reserve(struct cpu_ctx *c, uint32_t n_cols) BT_NODISCARD;
/* Products of the same x that the threads share out together: their panels count through, the first product's first. The x,
 * ldx and n_rows of all are the same, the weights have the same n_cols. */
struct cpu_gemms {
    struct cpu_gemm g[BT_K_PRODUCTS_MAX];
    uint32_t n;
};
/* How their outputs are cut into the tasks of the threads: by rows (or tiles of rows), and by panels. */
struct cpu_cut {
    uint32_t row_step, n_row_tasks, n_panel_tasks, n_tasks;
};
struct cpu_part {
    uint32_t row0, row1, panel0, panel1; /* up to row1 and panel1 */
};
/* Rows in n_tiles tiles whose prepared x is tile_bytes each. */
struct cpu_cut cpu_cut_tiles(const struct cpu_ctx *c, const struct cpu_gemms *all, uint32_t n_tiles,
                             size_t tile_bytes);
/* What of product i is in a task; none of its panels: false. */
bool cpu_cut_part(const struct cpu_cut *cut, const struct cpu_gemms *all, uint32_t n_rows,
                  uint32_t task, uint32_t i, struct cpu_part *out);
/* The same products of at most n_rows rows from `row` on. */
struct cpu_gemms cpu_gemms_rows(const struct cpu_gemms *all, uint32_t row, uint32_t n_rows);
/* Whether the integer class has its own products for a weight of this type. */
static inline bool cpu_is_int8(const struct cpu_ctx *c, enum bt_dtype dtype)
{
    return c->int8 != NULL && dtype > BT_DTYPE_BF16 && dtype != BT_DTYPE_GF8;
}
/* Makes c->xq at least so many bytes; what it held is lost. BT_ERR_NOMEM. */
enum bt_status cpu_xq_reserve(struct cpu_ctx *c, size_t bytes) BT_NODISCARD;
/* Room for the activations of products with n_cols columns; before the first of them. BT_ERR_NOMEM. */
enum bt_status cpu_int8_reserve(struct cpu_ctx *c, uint32_t n_cols) BT_NODISCARD;
/* Block-quantised weights of one type. */
void cpu_int8_gemm(struct cpu_ctx *c, const struct cpu_gemms *all);
/* Whether the products of a weight of this type are those of class cpu-bf16. */
static inline bool cpu_is_bf16(const struct cpu_ctx *c, enum bt_dtype dtype)
{
    return c->bf16 != NULL && dtype == BT_DTYPE_BF16;
}
enum bt_status cpu_bf16_reserve(struct cpu_ctx *c, uint32_t n_cols) BT_NODISCARD;
/* bf16 weights. */
void cpu_bf16_gemm(struct cpu_ctx *c, const struct cpu_gemms *all);

/* Memory of whole pages, zeroed, mapped lazily. NULL: out of memory. */
void *cpu_map(size_t bytes) BT_NODISCARD;
void cpu_unmap(void *p, size_t bytes);

/* The entries of the backend's table. */
size_t cpu_panel_memory(struct bt_kctx *k, const struct bt_k_weight_desc *desc);
enum bt_status cpu_weight_create(struct bt_kctx *k, const struct bt_k_weight_desc *desc,
                                 struct bt_kweight **out, struct bt_err *err);
void cpu_weight_destroy(struct bt_kctx *k, struct bt_kweight *w);
void cpu_embed(struct bt_kctx *k, float *y, const struct bt_kweight *table, const uint32_t *ids,
               uint32_t n_ids, float scale);
void cpu_gemm(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
              const struct bt_kweight *w, const float *bias, uint32_t n_rows);
void cpu_gemm_all(struct bt_kctx *k, const struct bt_k_product *products, uint32_t n,
                  const float *x, size_t ldx, uint32_t n_rows);
void cpu_rmsnorm(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                 const float *w, float w_offset, float eps, uint32_t n_rows, uint32_t n_sub,
                 uint32_t dim);
void cpu_rope(struct bt_kctx *k, float *x, size_t ldx, const float *cos, const float *sin,
              uint32_t n_rows, uint32_t n_heads, uint32_t head_dim, uint32_t rot_dim,
              bool interleaved);
void cpu_kv_store(struct bt_kctx *k, const struct bt_k_kv *kv, const float *key, size_t ldk,
                  const float *value, size_t ldv, const struct bt_k_span *spans, uint32_t n_spans);
void cpu_attention(struct bt_kctx *k, const struct bt_k_attn *a, const struct bt_k_kv *kv,
                   const struct bt_k_span *spans, uint32_t n_spans);
void cpu_glu(struct bt_kctx *k, float *y, size_t ldy, const float *gate, size_t ldg,
             const float *up, size_t ldu, uint32_t n_rows, uint32_t n_cols, enum bt_k_act act);
void cpu_add(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx, uint32_t n_rows,
             uint32_t n_cols);
void cpu_softcap(struct bt_kctx *k, float *x, size_t ldx, float cap, uint32_t n_rows,
                 uint32_t n_cols);
void cpu_gather_rows(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                     const uint32_t *rows, uint32_t n, uint32_t n_cols);
enum bt_status cpu_moe_reserve(struct bt_kctx *k, const struct bt_k_moe *moe, uint32_t n_rows);
void cpu_moe_ffn(struct bt_kctx *k, float *out, const float *x, const float *logits,
                 const struct bt_k_moe *moe, uint32_t n_rows);

#endif
