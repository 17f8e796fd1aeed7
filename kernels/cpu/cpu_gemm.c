/* Matrix products: cuts the output into rectangles and hands them to the threads. Every rectangle computes whole sums, so
 * the cut (and the number of threads) cannot change a bit. The arithmetic is in isa_gemm.inc. */

#include "kernels/cpu/cpu_int.h"

#define X_TASK_BYTES                                                                               \
    (384U * 1024) /* prepared rows of one task: they stay in the second-level cache */

struct gemm_run {
    struct cpu_gemm g;
    const struct cpu_isa *isa;
    const struct cpu_ctx *ctx;
    struct cpu_cut cut;
    uint32_t gemv_rows;
};

static void gemm_task(void *arg, uint32_t task, uint32_t thread)
{
    const struct gemm_run *r = arg;
    struct cpu_part p = cpu_cut_part(&r->cut, r->g.n_rows, r->g.w->n_panels, task);

    if (r->g.n_rows <= r->gemv_rows) {
        r->isa->gemv(&r->g, p.panel0, p.panel1);
    } else {
        r->isa->gemm(&r->g, p.row0, p.row1, p.panel0, p.panel1, cpu_scratch(r->ctx, thread));
    }
}

struct order_run {
    float *y;
    const float *x;
    size_t ldx;
    const struct cpu_weight *w;
};

static void order_range(void *arg, uint32_t first, uint32_t last)
{
    const struct order_run *r = arg;

    for (uint32_t m = first; m < last; m++) {
        float *y = r->y + (size_t)m * r->w->n_cols;
        const float *x = r->x + (size_t)m * r->ldx;
        for (uint32_t i = 0; i < r->w->n_cols; i++) {
            y[i] = x[r->w->perm[i]];
        }
    }
}

bool cpu_order_reserve(struct cpu_ctx *c, uint32_t n_cols)
{
    size_t bytes = (size_t)CPU_ORDER_ROWS * n_cols * sizeof(float);
    float *p = bytes > c->ordered_bytes ? cpu_map(bytes) : c->ordered;

    if (p != c->ordered && p != NULL) {
        cpu_unmap(c->ordered, c->ordered_bytes);
        c->ordered = p;
        c->ordered_bytes = bytes;
    }
    return p != NULL;
}

static uint32_t panel_step(const struct cpu_ctx *c, const struct cpu_gemm *g, uint32_t n_row_tasks)
{
    /* A few tasks per thread, so that a thread that lost its core does not hold up the rest; not too small, because a
     * task prepares its rows of x again, and a quarter of it should be a long stream. As many for each thread: of nine equal
     * tasks two threads do one after the other while one waits. */
    const size_t work_min = 64 * 1024;
    size_t work = (size_t)g->n_rows * g->w->n_cols * g->w->n_rows;
    uint32_t n_tasks = (c->n_threads * 4 + n_row_tasks - 1) / n_row_tasks;

    while (n_tasks * n_row_tasks % c->n_threads != 0) {
        n_tasks++;
    }
    n_tasks = work / n_tasks < work_min ? (uint32_t)(work / work_min) + 1 : n_tasks;
    uint32_t step = (g->w->n_panels + n_tasks - 1) / n_tasks;
    return c->n_threads == 1 ? g->w->n_panels : step < 4 ? 4 : (step + 1) / 2 * 2;
}

static struct cpu_cut cut_by(const struct cpu_ctx *c, const struct cpu_gemm *g, uint32_t n_rows,
                             uint32_t row_step)
{
    struct cpu_cut cut = {.row_step = row_step, .n_row_tasks = (n_rows + row_step - 1) / row_step};

    cut.panel_step = panel_step(c, g, cut.n_row_tasks);
    cut.n_tasks = cut.n_row_tasks * ((g->w->n_panels + cut.panel_step - 1) / cut.panel_step);
    return cut;
}

struct cpu_cut cpu_cut_tiles(const struct cpu_ctx *c, const struct cpu_gemm *g, uint32_t n_tiles,
                             size_t tile_bytes)
{
    size_t step = X_TASK_BYTES / tile_bytes;

    step = step < 4 ? 4 : step < n_tiles ? step : n_tiles;
    uint32_t n_row_tasks = (uint32_t)((n_tiles + step - 1) / step);
    return cut_by(c, g, n_tiles, (n_tiles + n_row_tasks - 1) / n_row_tasks);
}

struct cpu_part cpu_cut_part(const struct cpu_cut *cut, uint32_t n_rows, uint32_t n_panels,
                             uint32_t task)
{
    uint32_t row0 = task % cut->n_row_tasks * cut->row_step,
             panel0 = task / cut->n_row_tasks * cut->panel_step;

    return (struct cpu_part){
        .row0 = row0,
        .row1 = n_rows - row0 < cut->row_step ? n_rows : row0 + cut->row_step,
        .panel0 = panel0,
        .panel1 = n_panels - panel0 < cut->panel_step ? n_panels : panel0 + cut->panel_step};
}

static void run_gemm(const struct cpu_ctx *c, const struct cpu_gemm *g)
{
    const struct cpu_weight *w = g->w;
    uint32_t n_rows = g->n_rows;
    struct gemm_run run = {.g = *g,
                           .isa = c->isa,
                           .ctx = c,
                           .gemv_rows = w->dtype == BT_DTYPE_F32 ? c->isa->gemv_rows_f32
                                                                 : c->isa->gemv_rows_max};
    uint32_t row_tasks = (n_rows + CPU_GEMM_ROWS - 1) / CPU_GEMM_ROWS;

    run.cut = cut_by(c, g, n_rows, ((n_rows + row_tasks - 1) / row_tasks + 11) / 12 * 12);
    bt_pool_run(c->pool, gemm_task, &run, run.cut.n_tasks);
}

/* Inputs in w's order go through the context's memory, some rows at a time. */
void cpu_gemm(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
              const struct bt_kweight *weight, const float *bias, uint32_t n_rows)
{
    struct cpu_ctx *c = cpu_of(k);
    const struct cpu_weight *w = cpu_weight_of(weight);
    uint32_t step = w->perm != NULL ? CPU_ORDER_ROWS : n_rows;

    BT_ASSERT(w->packed != NULL && ldy >= w->n_rows && ldx >= w->n_cols);
    for (uint32_t row = 0; row < n_rows; row += step) {
        struct cpu_gemm g = {.y = y + (size_t)row * ldy,
                             .x = x + (size_t)row * ldx,
                             .ldy = ldy,
                             .ldx = ldx,
                             .w = w,
                             .bias = bias,
                             .n_rows = n_rows - row < step ? n_rows - row : step};
        if (w->perm != NULL) {
            struct order_run order = {.y = c->ordered, .x = g.x, .ldx = ldx, .w = w};
            cpu_for_range(c, g.n_rows, w->n_cols, order_range, &order);
            g.x = c->ordered;
            g.ldx = w->n_cols;
        }
        if (cpu_is_int8(c, w->dtype)) {
            cpu_int8_gemm(c, &g);
        } else if (cpu_is_bf16(c, w->dtype)) {
            cpu_bf16_gemm(c, &g);
        } else {
            run_gemm(c, &g);
        }
    }
}
