/* Matrix products of class cpu-bf16: rounds x to bf16 once per product, into the context's buffer, then cuts the output into
 * rectangles like cpu_gemm.c; sets the CPU to flush denormals where the kernels rely on it. Checks what a CPU's own instruction
 * does. The arithmetic is in isa_bf16.inc and bf16_spec.h. */

#include "kernels/cpu/cpu_int.h"

#include <string.h>
#include "base/mem.h"
#include "kernels/cpu/bf16_spec.h"
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

struct bf16_task {
    struct cpu_bf16_run r; /* of the first product; the others differ in r.g */
    const struct cpu_gemms *all;
    const struct cpu_ctx *ctx;
    uint32_t n_tiles;
    struct cpu_cut cut;
};

enum bt_status cpu_bf16_reserve(struct cpu_ctx *c, uint32_t n_cols)
{
    size_t pair_bytes = (size_t)CPU_BF16_ROWS * c->bf16->pair_words * sizeof(uint32_t), bytes;

    return bt_mul_size(((size_t)n_cols + 1) / 2, pair_bytes, &bytes) ? cpu_xq_reserve(c, bytes)
                                                                     : BT_ERR_NOMEM;
}

static void prepare_range(void *arg, uint32_t first, uint32_t last)
{
    const struct bf16_task *t = arg;
    t->ctx->bf16->prepare(&t->r, first, last);
}

static void run_task(const struct bf16_task *t, uint32_t task)
{
    const struct cpu_bf16 *isa = t->ctx->bf16;
    struct cpu_bf16_run r = t->r;
    struct cpu_part p;

    for (uint32_t i = 0; i < t->all->n; i++) {
        r.g = t->all->g[i];
        if (!cpu_cut_part(&t->cut, t->all, t->n_tiles, task, i, &p)) {
            continue;
        }
        if (t->n_tiles == 1) {
            isa->gemv(&r, p.panel0, p.panel1);
        } else {
            isa->gemm(&r, p.row0, p.row1, p.panel0, p.panel1);
        }
    }
}

static void bf16_task(void *arg, uint32_t task, uint32_t thread)
{
    const struct bf16_task *t = arg;

    (void)thread;
#if defined(__SSE2__)
    if (t->ctx->bf16->flushes) {
        const unsigned flush_to_zero = 0x8000, denormals_are_zero = 0x40, csr = _mm_getcsr();
        _mm_setcsr(csr | flush_to_zero | denormals_are_zero);
        run_task(t, task);
        _mm_setcsr(csr);
        return;
    }
#endif
    run_task(t, task);
}

/* At most CPU_BF16_ROWS rows. */
static void gemm_rows(struct cpu_ctx *c, const struct cpu_gemms *all)
{
    const struct cpu_gemm *g = &all->g[0];
    const uint32_t height = c->bf16->tile_rows_max, tiles = (g->n_rows + height - 1) / height;
    const uint32_t rows = (g->n_rows + tiles - 1) / tiles; /* even: no tile has but a row or two */
    size_t tile_bytes = (size_t)rows * ((g->w->n_cols + 1) / 2) * c->bf16->pair_words * 4;
    struct bf16_task t = {.r = {.g = *g, .xq = (uint32_t *)c->xq, .tile_rows = rows},
                          .all = all,
                          .ctx = c,
                          .n_tiles = (g->n_rows + rows - 1) / rows};

    cpu_for_range(c, t.n_tiles, (size_t)rows * g->w->n_cols, prepare_range, &t);
    t.cut = cpu_cut_tiles(c, all, t.n_tiles, tile_bytes);
    bt_pool_run(c->pool, bf16_task, &t, t.cut.n_tasks);
}

void cpu_bf16_gemm(struct cpu_ctx *c, const struct cpu_gemms *all)
{
    for (uint32_t row = 0; row < all->g[0].n_rows; row += CPU_BF16_ROWS) {
        struct cpu_gemms part = cpu_gemms_rows(all, row, CPU_BF16_ROWS);
        gemm_rows(c, &part);
    }
}

/* ---- what a CPU's instruction does ---- */

/* Random bits with an exponent from lo to lo + n - 1, in both halves of a word where wide is false. */
static uint32_t probe_bits(uint32_t *seed, uint32_t lo, uint32_t n)
{
    *seed = *seed * 1664525U + 1013904223U;
    uint32_t bits = *seed ^ *seed >> 15;
    return (bits & 0x807fffffU) | (lo + (bits >> 23 & 255U) % n) << 23;
}

static uint32_t probe_pair(uint32_t *seed, uint32_t lo, uint32_t n)
{
    uint32_t high = probe_bits(seed, lo, n) & 0xffff0000U;
    return high | probe_bits(seed, lo, n) >> 16;
}

/* Exponents of x, w and acc: lowest, count. */
static const struct probe {
    uint32_t x, n_x, w, n_w, acc, n_acc;
} probes[] = {
    {120, 16, 120, 16, 110, 40}, /* ordinary */
    {127, 2, 127, 2, 127, 3},    /* cancelling */
    {0, 70, 50, 40, 0, 4},       /* results that are denormal; denormal x and acc */
    {52, 3, 50, 3, 1, 2},        /* at the edge of them */
    {180, 20, 180, 20, 240, 15}, /* overflow */
    {0, 256, 0, 256, 0, 256},    /* anything, infinities and NaNs too */
};

bool cpu_bf16_check(bf16_dot_fn *dot)
{
    uint32_t seed = 1, x[16], w[16], acc_bits;
    float acc[16], want[16];

    for (uint32_t round = 0; round < 64 * (sizeof(probes) / sizeof(probes[0])); round++) {
        const struct probe *p = &probes[round / 64];
        for (int i = 0; i < 16; i++) {
            x[i] = probe_pair(&seed, p->x, p->n_x);
            w[i] = probe_pair(&seed, p->w, p->n_w);
            acc_bits = probe_bits(&seed, p->acc, p->n_acc);
            /* often with few bits set, so that sums are ties or at an edge */
            acc_bits &= i % 2 == 0 ? UINT32_MAX : 0xff800003U;
            x[i] &= i % 4 < 2 ? UINT32_MAX : 0xff80ff80U;
            w[i] &= i % 4 < 2 ? UINT32_MAX : 0xff80ff80U;
            memcpy(&acc[i], &acc_bits, sizeof(acc[i]));
            want[i] = bf16_dot2(acc[i], x[i], w[i]);
        }
        dot(acc, x, w);
        for (int i = 0; i < 16; i++) {
            bool same = memcmp(&acc[i], &want[i], sizeof(acc[i])) == 0;
            if (!same && !(isnan(acc[i]) && isnan(want[i]))) {
                return false;
            }
        }
    }
    return true;
}
