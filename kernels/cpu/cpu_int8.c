/* Matrix products of the integer class: rounds x to 8 bits once per product, into the context's buffer, then cuts the output
 * into rectangles like cpu_gemm.c. The arithmetic is in isa_int8.inc. */

#include "kernels/cpu/cpu_int.h"

#include "base/mem.h"

struct int8_task {
    struct cpu_int8_run r; /* of the first product; the others differ in r.g */
    const struct cpu_gemms *all;
    const struct cpu_ctx *ctx;
    uint32_t n_tiles;
    struct cpu_cut cut;
};

enum bt_status cpu_int8_reserve(struct cpu_ctx *c, uint32_t n_cols)
{
    size_t bytes;

    if (!bt_mul_size(n_cols / CPU_BLOCK, CPU_INT8_ROWS * CPU_INT8_WORDS * sizeof(int32_t),
                     &bytes)) {
        return BT_ERR_NOMEM;
    }
    return cpu_xq_reserve(c, bytes);
}

static void quantise_range(void *arg, uint32_t first, uint32_t last)
{
    const struct int8_task *t = arg;
    t->ctx->int8->quantise(&t->r, first, last);
}

static void int8_task(void *arg, uint32_t task, uint32_t thread)
{
    const struct int8_task *t = arg;
    const struct cpu_int8 *isa = t->ctx->int8;
    struct cpu_int8_run r = t->r;
    struct cpu_part p;

    for (uint32_t i = 0; i < t->all->n; i++) {
        r.g = t->all->g[i];
        if (!cpu_cut_part(&t->cut, t->all, t->n_tiles, task, i, &p)) {
            continue;
        }
        if (r.g.n_rows <= isa->gemv_rows_max) {
            isa->gemv(&r, p.panel0, p.panel1);
        } else {
            isa->gemm(&r, p.row0, p.row1, p.panel0, p.panel1, cpu_scratch(t->ctx, thread));
        }
    }
}

/* At most CPU_INT8_ROWS rows. */
static void gemm_rows(struct cpu_ctx *c, const struct cpu_gemms *all)
{
    const struct cpu_gemm *g = &all->g[0];
    const uint32_t height = c->int8->tile_rows_max;
    uint32_t tiles = (g->n_rows + height - 1) / height;
    uint32_t rows =
        (g->n_rows + tiles - 1) / tiles; /* even, so that no tile has but a row or two */
    size_t tile_bytes = (size_t)rows * (g->w->n_cols / CPU_BLOCK) *
                        c->int8->row_words(g->w->dtype) * sizeof(int32_t);
    struct int8_task t = {.r = {.g = *g, .xq = c->xq, .tile_rows = rows},
                          .all = all,
                          .ctx = c,
                          .n_tiles = (g->n_rows + rows - 1) / rows};

    cpu_for_range(c, t.n_tiles, (size_t)rows * g->w->n_cols, quantise_range, &t);
    t.cut = cpu_cut_tiles(c, all, t.n_tiles, tile_bytes);
    bt_pool_run(c->pool, int8_task, &t, t.cut.n_tasks);
}

void cpu_int8_gemm(struct cpu_ctx *c, const struct cpu_gemms *all)
{
    for (uint32_t row = 0; row < all->g[0].n_rows; row += CPU_INT8_ROWS) {
        struct cpu_gemms part = cpu_gemms_rows(all, row, CPU_INT8_ROWS);
        gemm_rows(c, &part);
    }
}
