/* The CUDA context: the device, its stream and memory, and the table. Calls return when they are in the stream; what goes
 * wrong on the device comes out of sync. */

#include "kernels/cuda/cuda_int.h"

#include <stdio.h>
#include <string.h>
#include "base/log.h"
#include "base/mem.h"
#include "kernels/cuda/cuda_blas_int.h"
#include "kernels/cuda/cuda_sample_int.h"
#include "kernels/open.h"

#ifdef BT_CUDA_EMULATED
#define KIND "cuda, emulated on the CPU"
#else
#define KIND "cuda"
#endif

bool cuda_ok(struct cuda_ctx *c, cudaError_t e, const char *what)
{
    if (e == cudaSuccess) {
        return true;
    }
    if (c->fault == BT_OK) {
        bt_log_error("kernels",
                     "cuda device %u failed: %s: %s (%s); nothing is computed on it any more",
                     c->device, what, cudaGetErrorString(e), cudaGetErrorName(e));
        c->fault = e == cudaErrorMemoryAllocation ? BT_ERR_NOMEM : BT_ERR_DEVICE;
    }
    return false;
}

enum bt_status cuda_status(cudaError_t e, const char *what, struct bt_err *err)
{
    if (e == cudaSuccess) {
        return BT_OK;
    }
    return bt_err_set(err, e == cudaErrorMemoryAllocation ? BT_ERR_NOMEM : BT_ERR_DEVICE,
                      "cuda: %s: %s", what, cudaGetErrorString(e));
}

static void cuda_destroy(struct bt_kctx *k)
{
    struct cuda_ctx *c = cuda_of(k);

    cuda_enter(c);
    if (c->stream != NULL) {
        (void)cuda_ok(c, cudaStreamSynchronize(c->stream), "end");
    }
    cuda_blas_destroy(c, c->blas);
    cuda_sample_destroy(c, c->sampler);
    cuda_step_fini(c);
    cuda_upload_fini(c);
    (void)cuda_ok(c, cudaFree(c->attn.p), "device memory");
    (void)cuda_ok(c, cudaFree(c->x16.p), "device memory");
    (void)cuda_ok(c, cudaFree(c->moe.p), "device memory");
    for (uint32_t i = 0; i < BT_K_MARKS; i++) {
        if (c->marks[i] != NULL) {
            (void)cuda_ok(c, cudaEventDestroy(c->marks[i]), "end");
        }
    }
    if (c->stream != NULL) {
        (void)cuda_ok(c, cudaStreamDestroy(c->stream), "end");
    }
    bt_free(c->tiles);
    bt_free(c->pages);
    bt_free(c->places);
    bt_free(c);
}

static void *cuda_alloc(struct bt_kctx *k, size_t bytes)
{
    struct cuda_ctx *c = cuda_of(k);
    void *p = NULL;

    BT_ASSERT(c->step.mode == CUDA_STEP_OFF);
    (void)cuda_begin(c);
    if (cudaMalloc(&p, bytes > 0 ? bytes : 1) != cudaSuccess) {
        (void)cudaGetLastError(); /* it would be taken for that of the next call */
        return NULL;
    }
    /* It may be written from elsewhere as soon as it is handed out. */
    if (!cuda_ok(c, cudaMemsetAsync(p, 0, bytes, c->stream), "zeros") ||
        !cuda_ok(c, cudaStreamSynchronize(c->stream), "zeros")) {
        (void)cuda_ok(c, cudaFree(p), "device memory");
        return NULL;
    }
    return p;
}

static void cuda_free(struct bt_kctx *k, void *dev, size_t bytes)
{
    (void)bytes;
    cuda_enter(cuda_of(k));
    (void)cuda_ok(cuda_of(k), cudaFree(dev), "device memory");
}

/* Copies between host and device: done when they return, for the host's memory is the caller's. */
static void copy_now(struct bt_kctx *k, void *to, const void *from, size_t bytes,
                     enum cudaMemcpyKind kind)
{
    struct cuda_ctx *c = cuda_of(k);

    BT_ASSERT(c->step.mode == CUDA_STEP_OFF);
    (void)cuda_begin(c);
    if (bytes > 0 && cuda_ok(c, cudaMemcpyAsync(to, from, bytes, kind, c->stream), "copy")) {
        c->drained = cuda_ok(c, cudaStreamSynchronize(c->stream), "copy");
    }
}

static void cuda_write(struct bt_kctx *k, void *dev, const void *host, size_t bytes)
{
    copy_now(k, dev, host, bytes, cudaMemcpyHostToDevice);
}

static void cuda_read(struct bt_kctx *k, void *host, const void *dev, size_t bytes)
{
    copy_now(k, host, dev, bytes, cudaMemcpyDeviceToHost);
}

static void *host_alloc(struct bt_kctx *k, size_t bytes)
{
    void *p = NULL;

    cuda_enter(cuda_of(k));
    if (cudaMallocHost(&p, bytes > 0 ? bytes : 1) != cudaSuccess) {
        (void)cudaGetLastError(); /* it would be taken for that of the next call */
        return NULL;
    }
    return p;
}

static void host_free(struct bt_kctx *k, void *p, size_t bytes)
{
    (void)bytes;
    cuda_enter(cuda_of(k));
    (void)cuda_ok(cuda_of(k), cudaFreeHost(p), "pinned memory");
}

static void cuda_fetch(struct bt_kctx *k, void *host, const void *dev, size_t bytes)
{
    struct cuda_ctx *c = cuda_of(k);

    BT_ASSERT(c->step.mode == CUDA_STEP_OFF);
    (void)cuda_begin(c);
    (void)cuda_ok(c, cudaMemcpyAsync(host, dev, bytes, cudaMemcpyDeviceToHost, c->stream), "copy");
}

static void cuda_copy(struct bt_kctx *k, void *dev, const void *from, size_t bytes)
{
    struct cuda_ctx *c = cuda_of(k);

    BT_ASSERT(c->step.mode == CUDA_STEP_OFF);
    (void)cuda_begin(c);
    (void)cuda_ok(c, cudaMemcpyAsync(dev, from, bytes, cudaMemcpyDeviceToDevice, c->stream),
                  "copy");
}

static void *cuda_host(struct bt_kctx *k, void *dev)
{
    (void)k;
    (void)dev;
    return NULL;
}

static enum bt_status cuda_sync(struct bt_kctx *k)
{
    struct cuda_ctx *c = cuda_of(k);

    if (!c->drained) {
        cuda_enter(c);
        c->drained = cuda_ok(c, cudaStreamSynchronize(c->stream), "kernels");
    }
    return c->fault;
}

static uint32_t cuda_mark(struct bt_kctx *k)
{
    struct cuda_ctx *c = cuda_of(k);
    uint32_t mark = c->n_marks++;

    cuda_enter(c);
    (void)cuda_ok(c, cudaEventRecord(c->marks[mark % BT_K_MARKS], c->stream), "mark");
    return mark;
}

static enum bt_status cuda_wait(struct bt_kctx *k, uint32_t mark)
{
    struct cuda_ctx *c = cuda_of(k);

    BT_ASSERT(c->n_marks - mark <= BT_K_MARKS);
    cuda_enter(c);
    (void)cuda_ok(c, cudaEventSynchronize(c->marks[mark % BT_K_MARKS]), "kernels");
    return c->fault;
}

/* Products, with cuBLAS where the class says so. */
static void gemm_all(struct bt_kctx *k, const struct bt_k_product *products, uint32_t n,
                     const float *x, size_t ldx, uint32_t n_rows)
{
    if (cuda_of(k)->blas != NULL) {
        cuda_blas_gemm_all(k, products, n, x, ldx, n_rows);
    } else {
        cuda_gemm_all(k, products, n, x, ldx, n_rows);
    }
}

static void gemm(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
                 const struct bt_kweight *w, const float *bias, uint32_t n_rows)
{
    const struct bt_k_product p = {.y = y, .ldy = ldy, .w = w, .bias = bias};

    gemm_all(k, &p, 1, x, ldx, n_rows);
}

static void embed(struct bt_kctx *k, float *y, const struct bt_kweight *table, const uint32_t *ids,
                  uint32_t n_ids, float scale)
{
    (cuda_weight_of(table)->rows ? cuda_blas_embed : cuda_embed)(k, y, table, ids, n_ids, scale);
}

static enum bt_status weight_create(struct bt_kctx *k, const struct bt_k_weight_desc *d,
                                    struct bt_kweight **out, struct bt_err *err)
{
    return (cuda_blas_takes(cuda_of(k), d) ? cuda_blas_weight_create
                                           : cuda_weight_create)(k, d, out, err);
}

static const struct bt_backend_ops cuda_ops = {
    .destroy = cuda_destroy,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .write = cuda_write,
    .copy = cuda_copy,
    .read = cuda_read,
    .host_alloc = host_alloc,
    .host_free = host_free,
    .fetch = cuda_fetch,
    .host = cuda_host,
    .sync = cuda_sync,
    .mark = cuda_mark,
    .wait = cuda_wait,
    .step_begin = cuda_step_begin,
    .step_end = cuda_step_end,
    .step_forget = cuda_step_forget,
    .mover_create = cuda_mover_create,
    .mover_destroy = cuda_mover_destroy,
    .mover_enter = cuda_mover_enter,
    .mover_slot = cuda_mover_slot,
    .mover_start = cuda_mover_start,
    .mover_go = cuda_mover_go,
    .mover_done = cuda_mover_done,
    .weight_create = weight_create,
    .weight_destroy = cuda_weight_destroy,
    .embed = embed,
    .gemm = gemm,
    .gemm_all = gemm_all,
    .rmsnorm = cuda_rmsnorm,
    .rope = cuda_rope,
    .kv_store = cuda_kv_store,
    .attention = cuda_attention,
    .glu = cuda_glu,
    .add = cuda_add,
    .softcap = cuda_softcap,
    .gather_rows = cuda_gather_rows,
    .moe_reserve = cuda_moe_reserve,
    .moe_ffn = cuda_moe_ffn,
    .sample_reserve = cuda_sample_reserve,
    .sample = cuda_sample,
    .sampled = cuda_sampled,
};

/* The device, made this thread's. */
static enum bt_status choose_device(uint32_t device, struct cudaDeviceProp *prop,
                                    struct bt_err *err)
{
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);

    if (e != cudaSuccess || n == 0) {
        return bt_err_set(err, BT_ERR_UNSUPPORTED, "there is no CUDA device on this machine: %s",
                          e != cudaSuccess ? cudaGetErrorString(e) : "none found");
    }
    if (device >= (uint32_t)n) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "CUDA device %u: this machine has %d, numbered from 0", device, n);
    }
    enum bt_status st = cuda_status(cudaSetDevice((int)device), "device", err);
    if (st == BT_OK) {
        st = cuda_status(cudaGetDeviceProperties(prop, (int)device), "device", err);
    }
    if (st == BT_OK && prop->major < 8) {
        st = bt_err_set(err, BT_ERR_UNSUPPORTED,
                        "CUDA device %u, %s, has compute capability %d.%d; 8.0 or newer is needed",
                        device, prop->name, prop->major, prop->minor);
    }
    if (st == BT_OK && prop->sharedMemPerBlockOptin < CUDA_SHARED_MAX) {
        st = bt_err_set(err, BT_ERR_UNSUPPORTED,
                        "CUDA device %u, %s, gives a block %zu KiB of shared memory; kernels need "
                        "up to %u",
                        device, prop->name, prop->sharedMemPerBlockOptin >> 10,
                        CUDA_SHARED_MAX >> 10);
    }
    return st;
}

static bool is_class(const char *name)
{
    bool known = false;

    for (size_t i = 0; i < sizeof(bt_k_all_classes) / sizeof(bt_k_all_classes[0]); i++) {
        known = known || strcmp(bt_k_all_classes[i], name) == 0;
    }
    return known && strncmp(name, "cuda-", strlen("cuda-")) == 0;
}

static enum bt_status prepare(struct cuda_ctx *c, struct bt_err *err)
{
    c->tiles = bt_alloc(CUDA_TILES_MAX * sizeof(*c->tiles));
    c->pages = bt_alloc(CUDA_PAGES_MAX * sizeof(*c->pages));
    c->places = bt_alloc(CUDA_PLACES_MAX * sizeof(*c->places));
    if (c->tiles == NULL || c->pages == NULL || c->places == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for the CUDA context");
    }
    enum bt_status st =
        cuda_status(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking), "stream", err);
#ifndef BT_CUDA_EMULATED
    if (st == BT_OK) {
        st = cuda_load_kernels(err);
    }
#endif
    for (uint32_t i = 0; i < BT_K_MARKS && st == BT_OK; i++) {
        st = cuda_status(cudaEventCreateWithFlags(&c->marks[i], cudaEventDisableTiming), "event",
                         err);
    }
    if (st == BT_OK) {
        st = cuda_upload_init(c, err);
    }
    if (st == BT_OK) {
        st = cuda_step_init(c, err);
    }
    if (st == BT_OK) {
        st = cuda_status(cudaMalloc(&c->attn.p, CUDA_ATTN_SCRATCH), "device memory", err);
        c->attn.bytes = CUDA_ATTN_SCRATCH;
    }
    if (st == BT_OK && c->mma) {
        st = cuda_status(cudaMalloc(&c->x16.p, CUDA_X16_SCRATCH), "device memory", err);
        c->x16.bytes = CUDA_X16_SCRATCH;
    }
    return st == BT_OK ? cuda_blas_create(c, c->base.numerics, &c->blas, err) : st;
}

/* Sums of tensor cores are the device's own. (Those of cuBLAS are anybody's, and its classes promise nothing.) */
static void name_class(struct cuda_ctx *c, const char *numerics, const struct cudaDeviceProp *prop)
{
    if (strcmp(numerics, "cuda-bf16") != 0) {
        (void)snprintf(c->class_name, sizeof(c->class_name), "%s", numerics); /* fits */
        return;
    }
#ifdef BT_CUDA_EMULATED
    (void)prop;
    (void)snprintf(c->class_name, sizeof(c->class_name), "cuda-bf16-emulated");
#else
    (void)snprintf(c->class_name, sizeof(c->class_name), "cuda-bf16-sm%d%d", prop->major,
                   prop->minor); /* fits */
#endif
}

enum bt_status bt_k_create_cuda(const struct bt_k_opts *opts, struct bt_kctx **out,
                                struct bt_err *err)
{
    const char *numerics = opts->numerics != NULL ? opts->numerics : "cuda-f32";
    struct cudaDeviceProp prop;

    if (!is_class(numerics)) {
        return bt_err_set(err, BT_ERR_INVALID,
                          "the CUDA backend has numerics classes cuda-f32, cuda-bf16, "
                          "cuda-cublas, cuda-cublas-tf32 and cuda-cublas-fp8, not \"%s\"",
                          numerics);
    }
    enum bt_status st = choose_device(opts->device, &prop, err);
    if (st != BT_OK) {
        return st;
    }
    if (strcmp(numerics, "cuda-cublas-fp8") == 0 && prop.major * 10 + prop.minor < 89) {
        return bt_err_set(err, BT_ERR_UNSUPPORTED,
                          "CUDA device %u, %s, has compute capability %d.%d; cuda-cublas-fp8 needs "
                          "8.9 or newer",
                          opts->device, prop.name, prop.major, prop.minor);
    }
    struct cuda_ctx *c = bt_calloc(1, sizeof(*c));
    if (c == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for the CUDA context");
    }
    c->base.ops = &cuda_ops;
    c->base.numerics = c->class_name;
    c->device = opts->device;
    c->mma = strcmp(numerics, "cuda-f32") != 0;
    name_class(c, numerics, &prop);
    st = prepare(c, err);
    if (st != BT_OK) {
        cuda_destroy(&c->base);
        return st;
    }
    (void)snprintf(c->base.describe, sizeof(c->base.describe), KIND " %u (%.32s)", c->device,
                   prop.name); /* fits */
    *out = &c->base;
    return BT_OK;
}
