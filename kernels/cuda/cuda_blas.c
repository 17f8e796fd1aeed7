/* Products of many rows by cuBLASLt. Owns the library's handle, its workspace, the memory for expanded weights and rounded x,
 * and what the library chose for each shape. Knows nothing of how the library computes. */

#include "kernels/cuda/cuda_blas_int.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>
#include "base/hash.h"
#include "base/log.h"
#include "base/mem.h"
#include "kernels/cuda/cuda_blas_api_int.h"

#define PLANS       4096U /* shapes remembered */
#define PLAN_PLACES 8U    /* where a shape may lie: one behind the other */
#define ALIGN_MAX   256U

/* y[rows, n] = x[rows, k] · wᵀ. Hashed and compared as bytes, so there is no padding. */
struct shape {
    uint64_t ld_y, ld_x;
    uint32_t kind, rows, n, k, ld_w;
    uint32_t align_w, align_x, align_y; /* bytes, powers of two up to ALIGN_MAX */
};
static_assert(sizeof(struct shape) == 2 * sizeof(uint64_t) + 8 * sizeof(uint32_t), "no padding");

struct plan {
    struct shape shape;
    enum { FREE, FOUND, NOTHING } state;
    cublasLtMatmulAlgo_t algo;
};

struct cuda_blas {
    struct cuda_blas_api api;
    cublasLtHandle_t handle;
    void *workspace, *weights, *x;
    size_t weight_bytes, x_bytes; /* of those, used */
    bool tf32, fp8;
    bool told;          /* that there was nothing for a shape */
    uint32_t next;      /* place among PLAN_PLACES that is given away next */
    struct plan *plans; /* [PLANS] */
    uint64_t asked;     /* calls of the heuristic */
};

static bool blas_ok(struct cuda_ctx *c, cublasStatus_t st, const char *what)
{
    if (st == CUBLAS_STATUS_SUCCESS) {
        return true;
    }
    if (c->fault == BT_OK) {
        bt_log_error("kernels", "cuda device %u: cuBLASLt, %s: %s", c->device, what,
                     c->blas->api.text(st));
        c->fault = BT_ERR_DEVICE;
    }
    return false;
}

static enum bt_status prepare(struct cuda_blas *b, struct bt_err *err)
{
    b->plans = bt_calloc(PLANS, sizeof(*b->plans));
    if (b->plans == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for cuBLAS");
    }
    cublasStatus_t made = b->api.create(&b->handle);
    if (made != CUBLAS_STATUS_SUCCESS) {
        b->handle = NULL;
        return bt_err_set(err, BT_ERR_DEVICE, "cuBLASLt does not start: %s", b->api.text(made));
    }
    enum bt_status st =
        cuda_status(cudaMalloc(&b->workspace, CUDA_BLAS_WORKSPACE), "workspace of cuBLAS", err);
    if (st == BT_OK) {
        st = cuda_status(cudaMalloc(&b->weights, CUDA_BLAS_WEIGHTS), "expanded weights", err);
    }
    if (st == BT_OK) {
        st = cuda_status(cudaMalloc(&b->x, CUDA_BLAS_X), "rounded activations", err);
    }
    return st;
}

enum bt_status cuda_blas_create(struct cuda_ctx *c, const char *numerics, struct cuda_blas **out,
                                struct bt_err *err)
{
    *out = NULL;
    if (strncmp(numerics, "cuda-cublas", strlen("cuda-cublas")) != 0) {
        return BT_OK;
    }
    struct cuda_blas *b = bt_calloc(1, sizeof(*b));
    if (b == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for cuBLAS");
    }
    b->weight_bytes = CUDA_BLAS_WEIGHTS;
    b->x_bytes = CUDA_BLAS_X;
    b->tf32 = strcmp(numerics, "cuda-cublas-tf32") == 0;
    b->fp8 = strcmp(numerics, "cuda-cublas-fp8") == 0;
    enum bt_status st = cuda_blas_open(&b->api, err);
    if (st == BT_OK) {
        st = prepare(b, err);
    }
    if (st != BT_OK) {
        cuda_blas_destroy(c, b);
        return st;
    }
    bt_log_info("kernels", "cuBLASLt %zu for products of more than %u rows", b->api.version(),
                CUDA_BLAS_FEW);
    *out = b;
    return BT_OK;
}

void cuda_blas_destroy(struct cuda_ctx *c, struct cuda_blas *b)
{
    if (b == NULL) {
        return;
    }
    if (b->handle != NULL) {
        (void)b->api.destroy(b->handle); /* nothing can be done about it */
    }
    (void)cuda_ok(c, cudaFree(b->workspace), "device memory");
    (void)cuda_ok(c, cudaFree(b->weights), "device memory");
    (void)cuda_ok(c, cudaFree(b->x), "device memory");
    bt_free(b->plans);
    bt_free(b);
}

void cuda_blas_limit(struct bt_kctx *k, size_t weight_bytes, size_t x_bytes)
{
    struct cuda_blas *b = cuda_of(k)->blas;

    BT_ASSERT(weight_bytes <= CUDA_BLAS_WEIGHTS && x_bytes <= CUDA_BLAS_X);
    b->weight_bytes = weight_bytes;
    b->x_bytes = x_bytes;
}

uint64_t cuda_blas_asked(struct bt_kctx *k)
{
    return cuda_of(k)->blas->asked;
}

/* ---- one product of the library ---- */

/* What cuBLASLt is told: column by column, D[n, rows] = Wᵀ[k, n] · X[k, rows]. */
struct job {
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t w, x, y;
};

static cudaDataType type_of(uint32_t kind)
{
    static const cudaDataType types[] = {CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF};

    return kind == CUDA_KIND_F8 ? CUDA_R_8F_E4M3 : types[kind];
}

static bool describe(struct cuda_ctx *c, const struct shape *s, struct job *j)
{
    const cudaDataType type = type_of(s->kind);
    const struct cuda_blas_api *api = &c->blas->api;
    const cublasOperation_t turned = CUBLAS_OP_T;
    cublasComputeType_t sums = c->blas->tf32 && s->kind == CUDA_KIND_F32
                                   ? CUBLAS_COMPUTE_32F_FAST_TF32
                                   : CUBLAS_COMPUTE_32F;

    return blas_ok(c, api->op_init(&j->op, sizeof(j->op), sums, CUDA_R_32F), "operation") &&
           blas_ok(c, api->op_set(&j->op, CUBLASLT_MATMUL_DESC_TRANSA, &turned, sizeof(turned)),
                   "operation") &&
           blas_ok(c, api->layout_init(&j->w, sizeof(j->w), type, s->k, s->n, (int64_t)s->ld_w),
                   "layout of weights") &&
           blas_ok(c, api->layout_init(&j->x, sizeof(j->x), type, s->k, s->rows, (int64_t)s->ld_x),
                   "layout of inputs") &&
           blas_ok(
               c,
               api->layout_init(&j->y, sizeof(j->y), CUDA_R_32F, s->n, s->rows, (int64_t)s->ld_y),
               "layout of outputs");
}

static bool ask(struct cuda_ctx *c, const struct shape *s, struct job *j, struct plan *p)
{
    const struct cuda_blas_api *api = &c->blas->api;
    const size_t bytes = CUDA_BLAS_WORKSPACE;
    const struct {
        cublasLtMatmulPreferenceAttributes_t name;
        uint32_t value;
    } aligned[] = {{CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, s->align_w},
                   {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, s->align_x},
                   {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, s->align_y},
                   {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, s->align_y}};
    cublasLtMatmulPreferenceOpaque_t pref;
    cublasLtMatmulHeuristicResult_t found;
    int n = 0;
    bool ok = blas_ok(c, api->pref_init(&pref, sizeof(pref)), "preferences") &&
              blas_ok(c,
                      api->pref_set(&pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                                    sizeof(bytes)),
                      "preferences");

    for (size_t i = 0; i < sizeof(aligned) / sizeof(aligned[0]) && ok; i++) {
        ok = blas_ok(
            c, api->pref_set(&pref, aligned[i].name, &aligned[i].value, sizeof(aligned[i].value)),
            "preferences");
    }
    if (!ok) {
        return false;
    }
    c->blas->asked++;
    cublasStatus_t st =
        api->heuristic(c->blas->handle, &j->op, &j->w, &j->x, &j->y, &j->y, &pref, 1, &found, &n);
    if (st != CUBLAS_STATUS_NOT_SUPPORTED && !blas_ok(c, st, "choice of an algorithm")) {
        return false; /* not the shape's fault, so it is not remembered */
    }
    p->shape = *s;
    p->state = st == CUBLAS_STATUS_SUCCESS && n > 0 && found.state == CUBLAS_STATUS_SUCCESS &&
                       found.workspaceSize <= CUDA_BLAS_WORKSPACE
                   ? FOUND
                   : NOTHING;
    if (p->state == FOUND) {
        p->algo = found.algo;
    } else if (!c->blas->told) {
        c->blas->told = true; /* once: others of its kind follow */
        bt_log_warn("kernels",
                    "cuBLASLt has no product of %u rows, [%u, %u] of kind %u: %s; own kernels "
                    "compute such",
                    s->rows, s->n, s->k, s->kind, api->text(st));
    }
    return true;
}

/* The plan for a shape, found at its first use; NULL: the library failed. */
static struct plan *plan_of(struct cuda_ctx *c, const struct shape *s, struct job *j)
{
    struct cuda_blas *b = c->blas;
    uint64_t at = bt_hash64(s, sizeof(*s), 0);
    struct plan *p = NULL;

    for (uint32_t i = 0; i < PLAN_PLACES; i++) {
        struct plan *q = &b->plans[(at + i) % PLANS];
        if (q->state != FREE && memcmp(&q->shape, s, sizeof(*s)) == 0) {
            return q;
        }
        p = q->state == FREE && p == NULL ? q : p;
    }
    if (p == NULL) {
        p = &b->plans[(at + b->next++ % PLAN_PLACES) % PLANS];
    }
    return ask(c, s, j, p) ? p : NULL;
}

static uint32_t alignment(const void *p)
{
    uintptr_t at = (uintptr_t)p | ALIGN_MAX;

    return (uint32_t)(at & (~at + 1));
}

/* False: the library has nothing for this shape (or has failed, and sync will say so). */
static bool multiply(struct cuda_ctx *c, struct shape *s, float *y, const void *w, const void *x)
{
    const float one = 1.0F, zero = 0.0F;
    struct cuda_blas *b = c->blas;
    struct job j;

    s->align_w = alignment(w);
    s->align_x = alignment(x);
    s->align_y = alignment(y);
    cuda_enter(c);
    if (!describe(c, s, &j)) {
        return false;
    }
    struct plan *p = plan_of(c, s, &j);
    if (p == NULL || p->state == NOTHING) {
        return false;
    }
    if (!cuda_begin(c)) {
        return true;
    }
    return blas_ok(c,
                   b->api.matmul(b->handle, &j.op, &one, w, &j.w, x, &j.x, &zero, y, &j.y, y, &j.y,
                                 &p->algo, b->workspace, CUDA_BLAS_WORKSPACE, c->stream),
                   "product");
}

/* ---- a product of ours ---- */

static uint32_t few_rows(const struct cuda_weight *w)
{
    return w->rows ? CUDA_BLAS_FEW : CUDA_BLAS_FEW_BLOCKS;
}

static uint32_t padded(uint32_t n_cols)
{
    return (n_cols + CUDA_BLOCK - 1) / CUDA_BLOCK * CUDA_BLOCK;
}

/* The type in which cuBLASLt sees a weight. */
static uint32_t kind_of(const struct cuda_weight *w)
{
    return w->view.kind > CUDA_KIND_BF16 && w->view.kind != CUDA_KIND_F8 ? CUDA_KIND_BF16
                                                                         : w->view.kind;
}

static size_t kind_bytes(uint32_t kind)
{
    return kind == CUDA_KIND_F32 ? sizeof(float) : sizeof(uint16_t);
}

/* Where the scales lie behind so many codes. */
static size_t behind(size_t bytes)
{
    return (bytes + ALIGN_MAX - 1) / ALIGN_MAX * ALIGN_MAX;
}

static const float *scales_of(const struct cuda_weight *w)
{
    size_t codes = (size_t)w->view.n_rows * w->view.n_cols;

    return (const float *)(const void *)((const uint8_t *)w->data + behind(codes));
}

/* Own kernels: any number of rows. */
static void compute(struct cuda_ctx *c, const struct bt_k_product *p, const float *x, size_t ldx,
                    uint32_t n_rows)
{
    const struct cuda_weight *w = cuda_weight_of(p->w);

    if (!w->rows) {
        cuda_gemm(&c->base, p->y, p->ldy, x, ldx, p->w, p->bias, n_rows);
        return;
    }
    struct cuda_rows_product r = {.w = w->data,
                                  .bias = p->bias,
                                  .ldy = p->ldy,
                                  .ldx = ldx,
                                  .ld = padded(w->view.n_cols),
                                  .n_out = w->view.n_rows,
                                  .n_cols = w->view.n_cols,
                                  .kind = w->view.kind};
    for (uint32_t row = 0; row < n_rows; row += r.n_rows) {
        r.n_rows = n_rows - row < CUDA_BLAS_FEW ? n_rows - row : CUDA_BLAS_FEW;
        r.y = p->y + row * p->ldy;
        r.x = x + row * ldx;
        r.aligned = ldx % 4 == 0 && (uintptr_t)r.x % 16 == 0;
        if (r.kind == CUDA_KIND_F8) {
            r.scales = scales_of(w);
            cuda_f8_gemv(c, &r);
        } else {
            cuda_rows_gemv(c, &r);
        }
    }
}

/* x as the library reads it: the caller's, or what is in b->x. */
struct input {
    const void *x;
    size_t ld;
    uint32_t rounded; /* the kind that b->x holds; CUDA_KIND_BLOCKS: none that others may use */
};

static void round_input(struct cuda_ctx *c, const struct cuda_weight *w, const float *x, size_t ldx,
                        uint32_t n_rows, struct input *in)
{
    uint32_t kind = kind_of(w), ld = padded(w->view.n_cols);

    if (kind == CUDA_KIND_F32 && w->view.perm == NULL && ldx % 4 == 0 && (uintptr_t)x % 16 == 0) {
        in->x = x;
        in->ld = ldx;
        return;
    }
    if (kind == CUDA_KIND_F8) { /* scales, then codes */
        in->x = (uint8_t *)c->blas->x + behind(n_rows * sizeof(float));
        in->ld = ld;
        if (in->rounded != kind) {
            cuda_f8_round(c, (uint8_t *)c->blas->x + behind(n_rows * sizeof(float)), c->blas->x, x,
                          ldx, w->view.n_cols, n_rows);
            in->rounded = kind;
        }
        return;
    }
    in->x = c->blas->x;
    in->ld = ld;
    if (in->rounded != kind || w->view.perm != NULL) {
        cuda_rows_round(c, c->blas->x, ld, kind, x, ldx, w->view.perm, w->view.n_cols, n_rows);
        in->rounded = w->view.perm == NULL ? kind : CUDA_KIND_BLOCKS;
    }
}

/* Rows that fit into b->x. */
static bool multiply_all(struct cuda_ctx *c, const struct bt_k_product *p, const struct input *in,
                         uint32_t n_rows)
{
    const struct cuda_weight *w = cuda_weight_of(p->w);
    struct shape s = {.kind = kind_of(w),
                      .rows = n_rows,
                      .n = w->view.n_rows,
                      .k = w->view.n_cols,
                      .ld_w = padded(w->view.n_cols),
                      .ld_x = in->ld,
                      .ld_y = p->ldy};

    if (w->rows) {
        return multiply(c, &s, p->y, w->data, in->x);
    }
    size_t fit = c->blas->weight_bytes / (s.ld_w * kind_bytes(s.kind)) / CUDA_PANEL * CUDA_PANEL;
    uint32_t step = fit < CUDA_PANEL ? CUDA_PANEL : fit < s.n ? (uint32_t)fit : s.n;
    BT_ASSERT((size_t)CUDA_PANEL * s.ld_w * kind_bytes(s.kind) <= CUDA_BLAS_WEIGHTS);
    for (uint32_t n = 0; n < w->view.n_rows; n += step) {
        s.n = w->view.n_rows - n < step ? w->view.n_rows - n : step;
        cuda_rows_expand(c, c->blas->weights, &w->view, n, s.n);
        if (!multiply(c, &s, p->y + n, c->blas->weights, in->x)) {
            return false;
        }
    }
    return true;
}

void cuda_blas_gemm_all(struct bt_kctx *k, const struct bt_k_product *products, uint32_t n,
                        const float *x, size_t ldx, uint32_t n_rows)
{
    struct cuda_ctx *c = cuda_of(k);
    uint32_t n_cols = cuda_weight_of(products[0].w)->view.n_cols;
    size_t fit = c->blas->x_bytes / (padded(n_cols) * sizeof(float));
    uint32_t step = fit <= CUDA_BLAS_FEW_BLOCKS ? CUDA_BLAS_FEW_BLOCKS + 1
                    : fit < n_rows              ? (uint32_t)fit
                                                : n_rows;

    BT_ASSERT((size_t)(CUDA_BLAS_FEW_BLOCKS + 1) * padded(n_cols) * sizeof(float) <= CUDA_BLAS_X);
    for (uint32_t row = 0; row < n_rows; row += step) {
        struct input in = {.rounded = CUDA_KIND_BLOCKS};
        uint32_t m = n_rows - row < step ? n_rows - row : step;
        for (uint32_t i = 0; i < n; i++) {
            const struct cuda_weight *w = cuda_weight_of(products[i].w);
            struct bt_k_product p = products[i];
            BT_ASSERT(w->for_gemm && w->view.n_cols == n_cols && p.ldy >= w->view.n_rows &&
                      ldx >= n_cols);
            p.y += row * p.ldy;
            if (n_rows <= few_rows(w)) {
                compute(c, &p, x + row * ldx, ldx, m);
                continue;
            }
            round_input(c, w, x + row * ldx, ldx, m, &in);
            if (!multiply_all(c, &p, &in, m)) {
                compute(c, &p, x + row * ldx, ldx, m);
            } else if (kind_of(w) == CUDA_KIND_F8) {
                cuda_f8_scale(c, p.y, p.ldy, c->blas->x, scales_of(w), p.bias, m, w->view.n_rows);
            } else if (p.bias != NULL) {
                cuda_rows_bias(c, p.y, p.ldy, p.bias, m, w->view.n_rows);
            }
        }
    }
}

/* ---- weights as rows ---- */

static bool is_f8(const struct cuda_ctx *c, const struct bt_k_weight_desc *d)
{
    return c->blas->fp8 && d->dtype == BT_DTYPE_GF8 && d->group == d->n_cols && !d->for_embed;
}

bool cuda_blas_takes(const struct cuda_ctx *c, const struct bt_k_weight_desc *d)
{
    return c->blas != NULL && d->for_gemm && !d->expert && d->perm == NULL &&
           (bt_dtype_block_values(d->dtype) == 1 || is_f8(c, d));
}

/* Takes blocks apart: a row's first scale is all of its scales. */
static enum bt_status send_f8(struct cuda_ctx *c, struct cuda_weight *w,
                              const struct bt_k_weight_desc *d, struct bt_err *err)
{
    const size_t codes = (size_t)d->n_rows * d->n_cols, block = bt_dtype_block_bytes(d->dtype);
    const uint8_t *from = d->data;
    uint8_t *host = bt_alloc(w->base.packed_bytes), *to = host;

    if (host == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for a weight");
    }
    w->rows = true;
    memset(host + codes, 0, behind(codes) - codes);
    for (uint32_t n = 0; n < d->n_rows; n++) {
        memcpy(host + behind(codes) + n * sizeof(float), from, sizeof(float));
        for (uint32_t k = 0; k < d->n_cols; k += CUDA_BLOCK, from += block, to += CUDA_BLOCK) {
            memcpy(to, from + sizeof(float), CUDA_BLOCK);
        }
    }
    enum bt_status st = cuda_status(
        cudaMemcpyAsync(w->data, host, w->base.packed_bytes, cudaMemcpyHostToDevice, c->stream),
        "loading a weight", err);
    enum bt_status done = cuda_status(cudaStreamSynchronize(c->stream), "loading a weight", err);
    bt_free(host);
    return st == BT_OK && done == BT_OK ? c->fault : st != BT_OK ? st : done;
}

static enum bt_status send_rows(struct cuda_ctx *c, struct cuda_weight *w,
                                const struct bt_k_weight_desc *d, struct bt_err *err)
{
    size_t from = d->n_cols * (size_t)bt_dtype_block_bytes(d->dtype),
           to = cuda_row_bytes(d->dtype, d->n_cols);
    uint32_t at_once = from == to ? d->n_rows : 1; /* rows without padding are one piece */
    enum bt_status st = BT_OK;

    w->rows = true;
    if (from != to) {
        st = cuda_status(cudaMemsetAsync(w->data, 0, d->n_rows * to, c->stream), "zeros", err);
    }
    for (uint32_t row = 0; row < d->n_rows && st == BT_OK; row += at_once) {
        st = cuda_status(cudaMemcpyAsync((uint8_t *)w->data + row * to,
                                         (const uint8_t *)d->data + row * from, at_once * from,
                                         cudaMemcpyHostToDevice, c->stream),
                         "loading a weight", err);
    }
    enum bt_status done = cuda_status(cudaStreamSynchronize(c->stream), "loading a weight", err);
    return st == BT_OK && done == BT_OK ? c->fault : st != BT_OK ? st : done;
}

enum bt_status cuda_blas_weight_create(struct bt_kctx *k, const struct bt_k_weight_desc *d,
                                       struct bt_kweight **out, struct bt_err *err)
{
    const bool f8 = is_f8(cuda_of(k), d);
    const struct cuda_view v = {.n_rows = d->n_rows,
                                .n_cols = d->n_cols,
                                .n_blocks = padded(d->n_cols) / CUDA_BLOCK,
                                .dtype = (uint32_t)d->dtype,
                                .kind = f8 ? CUDA_KIND_F8 : (uint32_t)d->dtype};
    size_t bytes = f8 ? behind((size_t)d->n_rows * d->n_cols) + d->n_rows * sizeof(float)
                      : d->n_rows * cuda_row_bytes(d->dtype, d->n_cols);

    return cuda_weight_make(cuda_of(k), d, &v, bytes, f8 ? send_f8 : send_rows, out, err);
}

void cuda_blas_embed(struct bt_kctx *k, float *y, const struct bt_kweight *table,
                     const uint32_t *ids, uint32_t n_ids, float scale)
{
    struct cuda_ctx *c = cuda_of(k);
    const struct cuda_weight *w = cuda_weight_of(table);
    const uint32_t most = CUDA_SEND_MAX / sizeof(uint32_t);

    BT_ASSERT(w->for_embed);
    for (uint32_t row = 0, m; row < n_ids; row += m) {
        m = n_ids - row < most ? n_ids - row : most;
        for (uint32_t i = 0; i < m; i++) {
            BT_ASSERT(ids[row + i] < w->view.n_rows);
        }
        cuda_rows_embed(c, y + (size_t)row * w->view.n_cols, &w->view,
                        cuda_send(c, ids + row, m * sizeof(uint32_t)), m, scale);
    }
}
