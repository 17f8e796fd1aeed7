/* The CPU context: chooses the instruction set, owns the thread pool and per-thread scratch, hands out memory. Device
 * memory is ordinary memory, calls finish before they return. Knows nothing about what the kernels compute. */

#include "kernels/cpu/cpu_int.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include "base/mem.h"
#include "base/options.h"

#define MAP_MIN  (1U << 20)         /* from here on memory comes straight from the kernel */
#define HUGE_MIN (size_t)(4U << 20) /* from here on huge pages are asked for */

void *cpu_map(size_t bytes)
{
    if (bytes < MAP_MIN) {
        void *small = bt_alloc_aligned(4096, bytes);
        if (small != NULL) {
            memset(small, 0, bytes);
        }
        return small;
    }
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (p == MAP_FAILED) {
        return NULL;
    }
    if (bytes >= HUGE_MIN) {
        (void)madvise(p, bytes, MADV_HUGEPAGE); /* a kernel without huge pages is only slower */
    }
    return p;
}

void cpu_unmap(void *p, size_t bytes)
{
    if (p == NULL) {
        return;
    }
    if (bytes < MAP_MIN) {
        bt_free(p);
    } else {
        (void)munmap(p, bytes); /* cannot fail for a whole mapping of ours */
    }
}

enum bt_status cpu_xq_reserve(struct cpu_ctx *c, size_t bytes)
{
    if (bytes <= c->xq_bytes) {
        return BT_OK;
    }
    int32_t *p = cpu_map(bytes); /* lazily: only rows that are used take memory */
    if (p == NULL) {
        return BT_ERR_NOMEM;
    }
    cpu_unmap(c->xq, c->xq_bytes);
    c->xq = p;
    c->xq_bytes = bytes;
    return BT_OK;
}

struct range_run {
    cpu_range_fn *fn;
    void *arg;
    uint32_t n, n_tasks;
};

static void range_task(void *arg, uint32_t task, uint32_t thread)
{
    const struct range_run *r = arg;
    uint64_t n = r->n;

    (void)thread;
    r->fn(r->arg, (uint32_t)(n * task / r->n_tasks), (uint32_t)(n * (task + 1) / r->n_tasks));
}

void cpu_for_range(struct cpu_ctx *c, uint32_t n, size_t item_cost, cpu_range_fn *fn, void *arg)
{
    const size_t task_cost = 16384; /* floats: a few µs, what handing over a task costs */
    size_t worth = n * item_cost / task_cost;
    uint32_t n_tasks = worth < c->n_threads * 4U ? (uint32_t)worth : c->n_threads * 4U;

    if (n == 0) {
        return;
    }
    if (n_tasks <= 1 || n == 1) {
        fn(arg, 0, n);
        return;
    }
    struct range_run run = {.fn = fn, .arg = arg, .n = n, .n_tasks = n_tasks < n ? n_tasks : n};
    bt_pool_run(c->pool, range_task, &run, run.n_tasks);
}

static void cpu_destroy(struct bt_kctx *k)
{
    struct cpu_ctx *c = cpu_of(k);

    bt_pool_destroy(c->pool);
    cpu_unmap(c->scratch, c->scratch_bytes);
    cpu_unmap(c->xq, c->xq_bytes);
    cpu_unmap(c->moe, c->moe_bytes);
    cpu_unmap(c->ordered, c->ordered_bytes);
    bt_free(c);
}

static void *cpu_alloc(struct bt_kctx *k, size_t bytes)
{
    (void)k;
    return cpu_map(bytes);
}

static void cpu_free(struct bt_kctx *k, void *dev, size_t bytes)
{
    (void)k;
    cpu_unmap(dev, bytes);
}

static void cpu_write(struct bt_kctx *k, void *dev, const void *host, size_t bytes)
{
    (void)k;
    memcpy(dev, host, bytes);
}

static void cpu_copy(struct bt_kctx *k, void *dev, const void *from, size_t bytes)
{
    (void)k;
    memcpy(dev, from, bytes);
}

static void cpu_read(struct bt_kctx *k, void *host, const void *dev, size_t bytes)
{
    (void)k;
    memcpy(host, dev, bytes);
}

static void *cpu_host(struct bt_kctx *k, void *dev)
{
    (void)k;
    return dev;
}

static enum bt_status cpu_sync(struct bt_kctx *k)
{
    return cpu_of(k)->fault;
}

static const struct bt_backend_ops cpu_ops = {
    .destroy = cpu_destroy,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .write = cpu_write,
    .copy = cpu_copy,
    .read = cpu_read,
    .host = cpu_host,
    .sync = cpu_sync,
    .panel_bytes = cpu_panel_memory,
    .panel_layout = "cpu 16",
    .weight_create = cpu_weight_create,
    .weight_destroy = cpu_weight_destroy,
    .embed = cpu_embed,
    .gemm = cpu_gemm,
    .gemm_all = cpu_gemm_all,
    .rmsnorm = cpu_rmsnorm,
    .rope = cpu_rope,
    .kv_store = cpu_kv_store,
    .attention = cpu_attention,
    .glu = cpu_glu,
    .add = cpu_add,
    .softcap = cpu_softcap,
    .gather_rows = cpu_gather_rows,
    .moe_reserve = cpu_moe_reserve,
    .moe_ffn = cpu_moe_ffn,
};

/* What --isa chooses: kernels of f32, and those of the other classes. Best first; the last one runs anywhere. */
static const struct isa {
    const char *name;
    const struct cpu_isa *f32;
    const struct cpu_int8 *int8;
    const struct cpu_bf16 *bf16;
} isas[] = {
#if defined(__x86_64__)
    {"avx512-bf16", &cpu_isa_avx512, &cpu_int8_avx512_vnni, &cpu_bf16_avx512_bf16},
    {"avx512-vnni", &cpu_isa_avx512, &cpu_int8_avx512_vnni, &cpu_bf16_avx512},
    {"avx512", &cpu_isa_avx512, &cpu_int8_avx512, &cpu_bf16_avx512},
    {"avx2", &cpu_isa_avx2, &cpu_int8_avx2, &cpu_bf16_avx2},
    {"plain", &cpu_isa_plain_fma, &cpu_int8_plain_fma, &cpu_bf16_plain_fma},
#elif defined(__aarch64__)
    {"neon", &cpu_isa_neon, &cpu_int8_plain, &cpu_bf16_plain},
#endif
    {"plain-libm", &cpu_isa_plain, &cpu_int8_plain, &cpu_bf16_plain},
    {"plain", &cpu_isa_plain, &cpu_int8_plain, &cpu_bf16_plain},
};

static bool isa_present(const struct isa *isa)
{
#if defined(__x86_64__)
    bool fma = __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx");
    bool avx2 = fma && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");

    bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");

    if (isa->bf16 == &cpu_bf16_avx512_bf16) {
        return vnni && __builtin_cpu_supports("avx512bf16") && cpu_bf16_fits();
    }
    if (isa->int8 == &cpu_int8_avx512_vnni) {
        return vnni;
    }
    if (isa->f32 == &cpu_isa_avx512) {
        return avx512;
    }
    if (isa->f32 == &cpu_isa_avx2) {
        return avx2;
    }
    if (isa->f32 == &cpu_isa_plain_fma) {
        return fma;
    }
#elif defined(__aarch64__)
    if (isa->f32 == &cpu_isa_neon) {
        return true;
    }
#endif
    return isa->f32 == &cpu_isa_plain;
}

static enum bt_status choose_isa(const char *want, const struct isa **out, struct bt_err *err)
{
    bool any = want == NULL || strcmp(want, "auto") == 0, known = false;

    for (size_t i = 0; i < sizeof(isas) / sizeof(isas[0]); i++) {
        if ((any || strcmp(want, isas[i].name) == 0) && isa_present(&isas[i])) {
            *out = &isas[i];
            return BT_OK;
        }
    }
    for (size_t i = 0; i < sizeof(bt_k_isas) / sizeof(bt_k_isas[0]); i++) {
        known = known || strcmp(want, bt_k_isas[i]) == 0;
    }
    return known ? bt_err_set(err, BT_ERR_UNSUPPORTED, "this CPU has no %s", want)
                 : bt_err_set(err, BT_ERR_INVALID, "unknown instruction set \"%s\" (" BT_K_ISAS ")",
                              want);
}

static enum bt_status choose_numerics(const char *want, const char **out, struct bt_err *err)
{
    for (size_t i = 0; i < sizeof(bt_k_classes) / sizeof(bt_k_classes[0]); i++) {
        if (want == NULL || strcmp(want, bt_k_classes[i]) == 0) {
            *out = bt_k_classes[i];
            return BT_OK;
        }
    }
    return bt_err_set(err, BT_ERR_INVALID, "unknown numerics class \"%s\" (" BT_K_CLASSES ")",
                      want);
}

enum bt_status bt_k_create_cpu(const struct bt_k_opts *opts, struct bt_kctx **out,
                               struct bt_err *err)
{
    const struct isa *isa = NULL;
    const char *numerics = NULL;
    enum bt_status st = choose_isa(opts->isa, &isa, err);
    uint32_t n_threads = opts->n_threads != 0 ? opts->n_threads : bt_cpus_usable();

    if (st == BT_OK) {
        st = choose_numerics(opts->numerics, &numerics, err);
    }
    if (st != BT_OK) {
        return st;
    }
    if (opts->device != 0) {
        return bt_err_set(err, BT_ERR_INVALID, "the CPU backend has device 0 only, not %u",
                          opts->device);
    }
    if (n_threads > CPU_THREADS_MAX) {
        return bt_err_set(err, BT_ERR_INVALID, "%u threads, the limit is %u", n_threads,
                          CPU_THREADS_MAX);
    }
    struct cpu_ctx *c = bt_calloc(1, sizeof(*c));
    if (c == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for the CPU context");
    }
    c->base.ops = &cpu_ops;
    c->base.numerics = numerics;
    c->isa = isa->f32;
    c->int8 = strcmp(numerics, "cpu-int8") == 0 ? isa->int8 : NULL;
    c->bf16 = strcmp(numerics, "cpu-bf16") == 0 ? isa->bf16 : NULL;
    c->attn = strcmp(numerics, "cpu-f32") != 0 ? isa->bf16 : NULL;
    c->n_threads = n_threads;
    c->scratch_bytes = (size_t)n_threads * CPU_SCRATCH * sizeof(float);
    c->scratch = cpu_map(c->scratch_bytes);
    if (c->scratch == NULL || bt_pool_create(n_threads, &c->pool) != BT_OK) {
        cpu_destroy(&c->base);
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory or threads for %u compute threads",
                          n_threads);
    }
    (void)snprintf(c->base.describe, sizeof(c->base.describe), "cpu %s, %u thread%s", isa->name,
                   n_threads, n_threads == 1 ? "" : "s"); /* fits */
    *out = &c->base;
    return BT_OK;
}
