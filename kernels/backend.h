#ifndef BT_KERNELS_BACKEND_H
#define BT_KERNELS_BACKEND_H

/* The backend table: everything that model/ and engine/ may ask of a device. One table per backend (cpu/,
 * cuda/). `bt_k_` functions below call through the context's table.
 *
 * Memory: "device pointer" means memory from bt_k_alloc: arithmetic on it is legal, only the backend dereferences
 * it (bt_k_host tells the host address where there is one). "host pointer" is ordinary memory, borrowed for the call.
 *
 * Order: calls of one context execute in order, as if on one stream. A context belongs to one thread; the CPU
 * backend splits work over its own pool inside a call.
 *
 * One answer (DESIGN promise 1, PROTOCOL "Numerics class"): activations are f32. Each output element is a pure function
 * of its own inputs, computed in one fixed order: independent of how many rows are in the call, of the number of
 * threads, and of the instruction set (plain C, AVX2 and AVX-512 give the same bits):
 *  - gemm: acc = fma(x[m][k], w[n][k], acc) for k = 0, 1, … K-1, starting at +0; then + bias[n].
 *    A block-quantised w[n][k] is the f32 value fma(scale, q, min) (or scale * q) of its block, f32 arithmetic.
 *  - dot products and sums over one row (norms, attention scores): 16 virtual lanes, lane i takes elements i, i+16, …
 *    by fma; then a fixed tree 16 → 8 → 4 → 2 → 1 (lane i + lane i+half).
 *  - exp, tanh, … are our own polynomials in f32 with fma, the same on every instruction set.
 *  - attention: keys in blocks aligned at absolute positions, online softmax in block order; reads K and V as stored. In every
 *    class of the CPU pages of f8 give what pages of f32 give whose K and V are those numbers.
 * That is class "cpu-f32". Class "cpu-int8" differs in gemm with block-quantised weights and in attention, and there only. In gemm x
 * is rounded to 8 bits per row and 32 consecutive k. Weights of gf8 are as in cpu-f32. With a = max |x[k]|:
 *    a < 2^-100:            q[k] = 0, s = 0
 *    a infinite or NaN:     q[k] = 0, s = NaN
 *    else:                  s = a / 127, q[k] = x[k] * (127 / a), the product of two f32 values rounded once, to the nearest
 *                           integer, ties to even; -127 … 127
 * Each output is one f32 chain over blocks of 32 k in order, starting at +0; then + bias[n]. A block adds, with the integer sums
 * exact (below 2^24) and w the integers of the format with their offset subtracted (q3_k: 4, q4_0: 8, q5_0: 16, q6_k: 32;
 * iq4_nl: those of its table):
 *    q4_0, q5_0, q8_0,
 *    iq4_nl:                acc = fma(Σ w q, d * s, acc)
 *    q4_1, q5_1, q4_k,
 *    q5_k, g4, g8:          acc = fma(Σ w q, d * s, acc), then acc = fma(m, s * Σ q, acc); q4_k, q5_k: d and m are the
 *                           products of the superblock's and the block's, m negative
 *    q3_k, q6_k:            as q4_0 for the first 16 k, then for the last 16; d: as q4_k's
 *    q2_k:                  as q4_k for the first 16 k, then for the last 16
 * All products and sums that are not fma are rounded to f32 one by one.
 * Class "cpu-bf16" differs from cpu-f32 in gemm with bf16 weights and in attention, and there only. In gemm magnitudes below 2^-126 count as zero of the
 * same sign, in x, w, bias and in every result; a result is judged after rounding to 24 bits as if exponents had no end. x is
 * rounded to bf16, to nearest, ties to even. Each output is one f32 chain over pairs of k, starting at +0; a pair k, k + 1 adds
 *    acc = fma(x[k + 1], w[k + 1], acc), then acc = fma(x[k], w[k], acc)
 * where an absent x[K] and w[K] are +0; then + bias[n]. This is what vdpbf16ps does; a CPU whose instruction does something
 * else (it is tried when a context is made) computes without it. Which NaN a NaN is is not said.
 * Attention of classes cpu-int8 and cpu-bf16 has two such products, rounded and flushed like those. q times scale * log2 e (one f32
 * value; with a softcap: times scale), k, v and probabilities are rounded to bf16, f32 and f16 caches when they are read, a bf16
 * cache when it is written (magnitudes below 2^-126 to zero), so that f32 and bf16 caches give the same bits.
 *  - s[j] is the chain over pairs of dimensions, odd first, of q and k[j]; with a softcap tanh(s / softcap) * (softcap * log2 e).
 *  - Blocks of 64 positions aligned at absolute ones, in order. m is the largest s so far. Where it grows, to m', acc and sum are
 *    multiplied by E(m - m'), and their magnitudes below 2^-126 become zero. p[j] = E(s[j] - m), rounded.
 *  - acc[d] goes on with the chain over pairs of positions (even, odd), odd first, of p and v, where a position that is not seen
 *    adds nothing. sum has 16 lanes; lane i takes pairs i, i + 16, … of the block, odd first, by f32 additions.
 *  - out[d] = acc[d] * (1 / sum) + 0, the lanes of sum added in the tree of above.
 *  - E(x): x = max(-127, x); n = x rounded to an integer such that (x + (1.5 * 2^23 + 127)) is n + that; r = x - n;
 *    ((c3 r + c2) r + c1) r + 1 by three fma, times 2^n, which is 0 for n = -127. c1, c2, c3: 0x1.62f5fap-1, 0x1.f00c4cp-3,
 *    0x1.c2a218p-5: 2^x to 2^-13, a 16th of what rounding p changes.
 * bt_k_embed is exact in all classes. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/dtype.h"
#include "base/sampling.h"
#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct bt_kctx;    /* a device context: stream, thread pool, scratch */
struct bt_kweight; /* a matrix [n_rows N, n_cols K], packed for the device */
struct bt_k_mover; /* copies beside a context */

#define BT_PAGE_NONE                                                                               \
    UINT32_MAX /* a page-table entry that holds no page; never read by a correct call */

/* The CPU's instruction sets and numerics classes, for option tables (base/options.h): as a list, and by choice. */
#define BT_K_ISAS    "auto|plain|avx2|avx512|avx512-vnni|avx512-bf16|neon"
#define BT_K_CLASSES "cpu-f32|cpu-int8|cpu-bf16"
extern const char *const bt_k_isas[7], *const bt_k_classes[3];

struct bt_k_opts {
    uint32_t n_threads; /* 0: bt_cpus_usable() */
    /* CPU: NULL or one of bt_k_isas; unknown or absent on this CPU: error. "plain-libm": plain C without fused
     * instructions, for tests and other machines. */
    const char *isa;
    const char *numerics; /* CPU: NULL or one of bt_k_classes; unknown: BT_ERR_INVALID */
    uint32_t device;      /* index among devices; CPU: 0 */
};

/* A weight matrix as it lies in a file: n_rows rows of n_cols values, row after row without gaps, any alignment.
 * n_cols must be a multiple of the block size. */
struct bt_k_weight_desc {
    enum bt_dtype dtype;
    uint32_t n_rows; /* N: output features */
    uint32_t n_cols; /* K: input features */
    const void *
        data; /* host; borrowed for the call, for_embed: until bt_k_weight_destroy (the mapped file) */
    uint32_t
        group; /* G4, G8, GF8: consecutive values of a row whose blocks have the same scale and minimum; 0: 32. A multiple
                             of 32 that divides n_cols */
    const uint32_t *
        perm; /* host [n_cols], borrowed for the call: value k of a row goes with x[perm[k]], and sums run over
                             k = 0, 1, …; NULL: x[k]. Not with for_embed */
    bool for_gemm;  /* bt_k_gemm, bt_k_moe_ffn will be called */
    bool for_embed; /* bt_k_embed will be called */
    bool expert;    /* with for_gemm: of the two only bt_k_moe_ffn; must be said of its weights */
    /* Where the packed form is kept: bt_k_panel_bytes bytes, 64-byte aligned, zeroed, borrowed until
     * bt_k_weight_destroy. NULL: in memory of the backend's own. */
    void *panels;
    bool panels_ready; /* they hold the packed form of this weight already, and are not written */
    /* Writes bytes of the packed form to `at` (from `panels` on), which is only read then; any thread. False: cannot be done,
     * the weight is not created (BT_ERR_IO). NULL: `panels` is written as memory. */
    bool (*put)(void *arg, size_t at, const void *data, size_t bytes);
    void *put_arg;
};

/* One layer of a paged KV pool. A page's share of a layer is [K|V][n_kv_heads][page_tokens][head_dim] of dtype, contiguous,
 * page_stride bytes from one page id to the next. */
struct bt_k_kv {
    void *base; /* device: page 0 of this layer */
    size_t page_stride;
    uint32_t page_tokens, n_kv_heads, head_dim;
    enum bt_dtype dtype; /* bt_dtype_is_kv() */
};

/* Consecutive tokens of one sequence in a ragged batch. */
struct bt_k_span {
    uint32_t row; /* first row in the batch */
    uint32_t n;   /* rows: 1 in decode, up to the chunk size in prefill */
    uint32_t pos; /* absolute position of the first one; its keys are positions 0 … pos + n - 1 */
    const uint32_t *pages; /* host: page id of absolute page p = position / page_tokens */
};

struct bt_k_attn {
    const float *q; /* device [n_tokens, n_heads, head_dim], row stride q_stride floats */
    float *out;     /* device [n_tokens, n_heads * head_dim], row stride out_stride floats */
    size_t q_stride, out_stride;
    uint32_t n_heads; /* a multiple of kv->n_kv_heads */
    float scale;      /* score = scale * q·k */
    float softcap;    /* 0: none; else score = softcap * tanh(score / softcap) */
    uint32_t window;  /* 0: all; else position p sees positions > p - window only */
};

enum bt_k_act { BT_K_SILU, BT_K_GELU_TANH, BT_K_GELU_ERF };

/* Names the numerics class; part of what two nodes must have alike. Owned by the context. */
const char *bt_k_numerics(const struct bt_kctx *k);
/* For logs: "cpu avx512, 2 threads". Owned by the context. */
const char *bt_k_describe(const struct bt_kctx *k);

enum bt_status bt_k_create_cpu(const struct bt_k_opts *opts, struct bt_kctx **out,
                               struct bt_err *err) BT_NODISCARD;
void bt_k_destroy(struct bt_kctx *k);

/* Zeroed, 4096-byte aligned; large blocks are mapped lazily. NULL: out of memory. Freed with the same byte count. */
void *bt_k_alloc(struct bt_kctx *k, size_t bytes) BT_NODISCARD;
void bt_k_free(struct bt_kctx *k, void *dev, size_t bytes);
void bt_k_write(struct bt_kctx *k, void *dev, const void *host, size_t bytes);
void bt_k_read(struct bt_kctx *k, void *host, const void *dev,
               size_t bytes); /* after all earlier calls */
/* Host memory that the device writes by itself, 64-byte aligned, not zeroed. NULL: out of memory. Freed with the same byte count. */
void *bt_k_host_alloc(struct bt_kctx *k, size_t bytes) BT_NODISCARD;
void bt_k_host_free(struct bt_kctx *k, void *p, size_t bytes);
/* As bt_k_read into memory of bt_k_host_alloc, but done when bt_k_sync has returned. */
void bt_k_fetch(struct bt_kctx *k, void *host, const void *dev, size_t bytes);
/* From device memory to device memory, after all earlier calls; the ranges do not overlap. */
void bt_k_copy(struct bt_kctx *k, void *dev, const void *from, size_t bytes);
void *bt_k_host(struct bt_kctx *k, void *dev); /* the host address of device memory, or NULL */
enum bt_status bt_k_sync(struct bt_kctx *k) BT_NODISCARD; /* device faults surface here */
/* Puts a mark behind all calls so far. bt_k_wait returns when what is in front of the mark is done, what is behind goes on
 * meanwhile. Of the last BT_K_MARKS marks; the same faults as of bt_k_sync. */
#define BT_K_MARKS 8U
uint32_t bt_k_mark(struct bt_kctx *k);
enum bt_status bt_k_wait(struct bt_kctx *k, uint32_t mark) BT_NODISCARD;

/* A step: a pass over rows that are one token of one sequence each, as in decode, which a backend may keep and run again. Between begin
 * and end the calls of such a pass are made, bt_k_read, bt_k_write, bt_k_copy, bt_k_sync and bt_k_wait excepted; what the
 * host's pointers show does not change, and is the only thing that may differ between two steps of the same owner, memory and
 * number of rows. Nothing is computed before the end. */
struct bt_k_step {
    const void *owner; /* names whatever else decides the calls: the model and its activations */
    const void *kv;    /* device: the pool */
    uint32_t n_rows, rows_max;
    uint32_t pos_max; /* the largest position */
    uint32_t n_heads, n_kv_heads, head_dim, page_tokens;
};
/* Returns for how many rows the calls are to be made, n_rows … rows_max: the caller repeats its last row as often as is missing.
 * 0: no steps here, now: the calls do what they always do, and there is no end. */
uint32_t bt_k_step_begin(struct bt_kctx *k, const struct bt_k_step *s);
/* keep false: the calls are to be as if not made. BT_ERR_BUSY: so they are (with keep because they differ from those of the step
 * that was kept): begin again. BT_ERR_DEVICE, BT_ERR_NOMEM. */
enum bt_status bt_k_step_end(struct bt_kctx *k, bool keep) BT_NODISCARD;
void bt_k_step_forget(struct bt_kctx *k, const void *owner); /* before its memory goes */

/* A mover copies between device memory that the host cannot reach (bt_k_host: NULL) and its slots, blocks of host memory that
 * the device reads and writes by itself. It has a stream of its own: the context computes meanwhile, and no order holds
 * between the two; callers know what is done. After create it belongs to one thread, any; the context outlives it.
 * BT_ERR_UNSUPPORTED: the host reaches all of this backend's memory. */
struct bt_k_mover_opts {
    size_t slot_bytes; /* of a copy, at most */
    uint32_t n_slots;
    /* Copies of so many bytes and more are made one by one, as one copy of the device's; 0: as the backend thinks best. */
    size_t single_bytes;
};
enum bt_status bt_k_mover_create(struct bt_kctx *k, const struct bt_k_mover_opts *o,
                                 struct bt_k_mover **out, struct bt_err *err) BT_NODISCARD;
void bt_k_mover_destroy(struct bt_k_mover *m); /* waits for its copies */
/* Makes the device current on the calling thread, for libraries that look for it there. */
void bt_k_mover_enter(struct bt_k_mover *m);
uint8_t *bt_k_mover_slot(struct bt_k_mover *m, uint32_t slot); /* 64-byte aligned */
/* Queues a copy of at most slot_bytes between a slot, whose last copy is done (bt_k_mover_done), and dev, of any size and
 * alignment; both are left alone until it is done. Nothing happens before bt_k_mover_go, by which time the bytes are in the slot. */
void bt_k_mover_start(struct bt_k_mover *m, uint32_t slot, void *dev, size_t bytes, bool to_device);
/* Begins what was queued: many copies at the price of one. They may run at the same time, in any order, but never one of this call
 * before all of those before are done. */
void bt_k_mover_go(struct bt_k_mover *m);
/* Of the last copy of a slot. BT_OK: done, and so are all that were queued before it; BT_ERR_BUSY: not yet, never with wait, which
 * begins what is queued; BT_ERR_DEVICE: it failed, which was logged, and so do all later ones. */
enum bt_status bt_k_mover_done(struct bt_k_mover *m, uint32_t slot, bool wait) BT_NODISCARD;

/* Bytes of the packed form that may lie in desc.panels; 0: this backend keeps it in memory of its own. */
size_t bt_k_panel_bytes(struct bt_kctx *k, const struct bt_k_weight_desc *desc);
/* Names the packed form: what is packed once serves every context of the same name, whatever its numerics class. Static
 * storage; "" where panel_bytes is 0. */
const char *bt_k_panel_layout(const struct bt_kctx *k);
/* With panels_ready, a sample of them is compared with the weight: BT_ERR_PROTOCOL if they are of another weight or
 * another version of the layout. */
enum bt_status bt_k_weight_create(struct bt_kctx *k, const struct bt_k_weight_desc *desc,
                                  struct bt_kweight **out, struct bt_err *err) BT_NODISCARD;
void bt_k_weight_destroy(struct bt_kctx *k, struct bt_kweight *w);
/* Packed bytes held besides the mapped file, in desc.panels or in memory of its own. */
size_t bt_k_weight_bytes(const struct bt_kweight *w);

/* All shapes below: rows M, row strides (ld…) in floats, row-major f32 in device memory unless said otherwise.
 * These calls cannot fail for legal shapes; illegal shapes are bugs (assert). */

/* y[M, dim] = scale * table row ids[m], converted to f32. ids: host, each < n_rows (caller checks). */
void bt_k_embed(struct bt_kctx *k, float *y, const struct bt_kweight *table, const uint32_t *ids,
                uint32_t n_ids, float scale);
/* y[M, N] = x[M, K] · wᵀ (+ bias[N] if not NULL). y must not overlap x. */
void bt_k_gemm(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
               const struct bt_kweight *w, const float *bias, uint32_t n_rows);
/* n (1 to BT_K_PRODUCTS_MAX) products of the same x, each as bt_k_gemm would make it, to the bit: a backend may prepare x once and
 * share all of the work out at once. The weights have the same K; the outputs do not overlap. */
#define BT_K_PRODUCTS_MAX 3U
struct bt_k_product {
    float *y;
    size_t ldy;
    const struct bt_kweight *w;
    const float *bias; /* or NULL */
};
void bt_k_gemm_all(struct bt_kctx *k, const struct bt_k_product *products, uint32_t n,
                   const float *x, size_t ldx, uint32_t n_rows);
/* y = x / sqrt(mean(x²) + eps) * (w + w_offset) per row of dim values; w: device [dim]. Row r of x begins at
 * x + (r / n_sub) * ldx + (r % n_sub) * dim, likewise y: n_sub = 1 for hidden rows, n_heads for per-head norms.
 * n_rows counts tokens (n_rows * n_sub rows are normalised). x, y may be the same. */
void bt_k_rmsnorm(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                  const float *w, float w_offset, float eps, uint32_t n_rows, uint32_t n_sub,
                  uint32_t dim);
/* Rotates the first rot_dim values of each head in place. cos, sin: host [n_rows, rot_dim / 2] f32.
 * interleaved: pairs (2i, 2i+1) as GGUF llama files need; else (i, i + rot_dim/2). */
void bt_k_rope(struct bt_kctx *k, float *x, size_t ldx, const float *cos, const float *sin,
               uint32_t n_rows, uint32_t n_heads, uint32_t head_dim, uint32_t rot_dim,
               bool interleaved);
/* Rounds (to nearest even; F8: to at most 448) rows of K and V [n_kv_heads, head_dim] into their pages. */
void bt_k_kv_store(struct bt_kctx *k, const struct bt_k_kv *kv, const float *key, size_t ldk,
                   const float *value, size_t ldv, const struct bt_k_span *spans, uint32_t n_spans);
/* Causal attention of every span over its own pages (K and V of the span already stored). Never materialises T×T. */
void bt_k_attention(struct bt_kctx *k, const struct bt_k_attn *a, const struct bt_k_kv *kv,
                    const struct bt_k_span *spans, uint32_t n_spans);
/* y = act(gate) * up; any of them may be the same memory. */
void bt_k_glu(struct bt_kctx *k, float *y, size_t ldy, const float *gate, size_t ldg,
              const float *up, size_t ldu, uint32_t n_rows, uint32_t n_cols, enum bt_k_act act);
void bt_k_add(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx, uint32_t n_rows,
              uint32_t n_cols);
/* x = cap * tanh(x / cap) */
void bt_k_softcap(struct bt_kctx *k, float *x, size_t ldx, float cap, uint32_t n_rows,
                  uint32_t n_cols);
/* y[i] = x[rows[i]]; rows: host. */
void bt_k_gather_rows(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                      const uint32_t *rows, uint32_t n, uint32_t n_cols);

/* Mixture of experts: router logits [M, n_experts] → softmax over all → top_k largest (ties: lower index) → weights,
 * divided by their sum if normalize. out[m] = Σ over the chosen, in descending weight order, of
 * weight · down_e( act(gate_e x) * up_e x ). x, out: [M, dim], not overlapping. */
struct bt_k_moe {
    uint32_t n_experts, top_k;
    bool normalize;
    enum bt_k_act act;
    struct bt_kweight *const
        *gate; /* n_experts each: [ffn_dim, dim], [ffn_dim, dim], [dim, ffn_dim] */
    struct bt_kweight *const *up;
    struct bt_kweight *const *down;
    uint32_t dim, ffn_dim;
};
/* Makes room for calls of any number of rows up to n_rows, so that they need no memory; reads the numbers of *moe only. */
enum bt_status bt_k_moe_reserve(struct bt_kctx *k, const struct bt_k_moe *moe,
                                uint32_t n_rows) BT_NODISCARD;
void bt_k_moe_ffn(struct bt_kctx *k, float *out, const float *x, const float *logits,
                  const struct bt_k_moe *moe, uint32_t n_rows);

/* Sampling on the device, so that logits stay there: of rows of logits, the token and log-probabilities that engine/sampler.h
 * defines, to the bit. What a device does not do is the host's, row by row: penalties over more than BT_K_SEEN_MAX distinct
 * tokens. Everything else of struct bt_sampling is done there. */
#define BT_K_SEEN_MAX 8192U
#define BT_K_EOS_MAX  16U
/* A token of prompt or answer, and how often it is in the answer. */
struct bt_k_seen {
    uint32_t token, count;
};
struct bt_k_draw {
    uint32_t row; /* of the logits */
    /* If given, log-probabilities of `token` and params->n_top of the most likely ones are wanted, whatever else params say; else
     * a token is drawn. */
    bool given;
    uint32_t token;
    const struct bt_sampling *params; /* the tokens of bias: < vocab */
    uint64_t random;                  /* 53 bits */
    const struct bt_k_seen
        *seen; /* [n_seen] distinct tokens, at most BT_K_SEEN_MAX; penalties apply to them */
    uint32_t n_seen;
    bool masked;         /* EOS (unless ignore_eos) and stop ids are */
    const uint32_t *eos; /* [n_eos], at most BT_K_EOS_MAX */
    uint32_t n_eos;
};
/* Makes room for calls of up to n_rows draws over a vocabulary, so that they need no memory; called once.
 * BT_ERR_UNSUPPORTED: this backend does not sample, or not so much: the host does. BT_ERR_NOMEM. */
enum bt_status bt_k_sample_reserve(struct bt_kctx *k, uint32_t n_rows, uint32_t vocab) BT_NODISCARD;
/* n >= 1 draws, each of another row of logits (device [.., vocab]), which are changed. Not within a step; the call before has been
 * waited for (bt_k_sync). All but logits is read before it returns. */
void bt_k_sample(struct bt_kctx *k, float *logits, const struct bt_k_draw *draws, uint32_t n);
/* What came of the last call, [n], once bt_k_sync has returned; host, owned by the context. Without params->logprobs, and not
 * given: the token alone. */
const struct bt_sampled *bt_k_sampled(const struct bt_kctx *k);

#ifdef __cplusplus
}
#endif

#endif
