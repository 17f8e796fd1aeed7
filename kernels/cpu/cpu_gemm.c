/* Matrix products: cuts the output into rectangles and hands them to the threads; products of the same x together, so that x is
 * prepared once and the threads meet once. Every rectangle computes whole sums, so the cut (and the number of threads) cannot
 * change a bit. The arithmetic is in isa_gemm.inc. */

#include "kernels/cpu/cpu_int.h"

#define X_TASK_BYTES                                                                               \
    (384U * 1024) /* prepared rows of one task: they stay in the second-level cache */

struct gemm_run {
    const struct cpu_gemms *all;
    const struct cpu_ctx *ctx;
    struct cpu_cut cut;
};

static void gemm_task(void *arg, uint32_t task, uint32_t thread)
{
    const struct gemm_run *r = arg;
    const struct cpu_isa *isa = r->ctx->isa;
    struct cpu_part p;

    for (uint32_t i = 0; i < r->all->n; i++) {
        const struct cpu_gemm *g = &r->all->g[i];
        if (!cpu_cut_part(&r->cut, r->all, g->n_rows, task, i, &p)) {
            continue;
        }
        if (g->n_rows <= (g->w->dtype == BT_DTYPE_F32 ? isa->gemv_rows_f32 : isa->gemv_rows_max)) {
            /* of all rows: there is one row task then */
            isa->gemv(g, p.panel0, p.panel1);
        } else {
            isa->gemm(g, p.row0, p.row1, p.panel0, p.panel1, cpu_scratch(r->ctx, thread));
        }
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

static uint32_t count_panels(const struct cpu_gemms *all)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < all->n; i++) {
        n += all->g[i].w->n_panels;
    }
    return n;
}

/* How many tasks the panels are cut into. */
static uint32_t panel_tasks(const struct cpu_ctx *c, const struct cpu_gemms *all,
                            uint32_t n_row_tasks)
{
    /* A few tasks per thread, so that a thread that lost its core does not hold up the rest; not too small, because a
     * task prepares its rows of x again, and a quarter of it should be a long stream. As many for each thread: of nine equal
     * tasks two threads do one after the other while one waits. */
    const size_t work_min = 64 * 1024;
    uint32_t n_panels = count_panels(all);
    size_t work = (size_t)all->g[0].n_rows * all->g[0].w->n_cols * n_panels * CPU_PANEL;
    size_t most = work / work_min < n_panels / 4 ? work / work_min : n_panels / 4;
    uint32_t n_tasks = (c->n_threads * 4 + n_row_tasks - 1) / n_row_tasks;

    if (c->n_threads == 1 || most <= 1) {
        return 1;
    }
    n_tasks = n_tasks < most ? n_tasks : (uint32_t)most;
    while (n_tasks * n_row_tasks % c->n_threads != 0 && n_tasks < most) {
        n_tasks++;
    }
    while (n_tasks * n_row_tasks % c->n_threads != 0 && n_tasks > c->n_threads) {
        n_tasks--;
    }
    return n_tasks;
}

static struct cpu_cut cut_by(const struct cpu_ctx *c, const struct cpu_gemms *all, uint32_t n_rows,
                             uint32_t row_step)
{
    struct cpu_cut cut = {.row_step = row_step, .n_row_tasks = (n_rows + row_step - 1) / row_step};

    cut.n_panel_tasks = panel_tasks(c, all, cut.n_row_tasks);
    cut.n_tasks = cut.n_row_tasks * cut.n_panel_tasks;
    return cut;
}

struct cpu_cut cpu_cut_tiles(const struct cpu_ctx *c, const struct cpu_gemms *all, uint32_t n_tiles,
                             size_t tile_bytes)
{
    size_t step = X_TASK_BYTES / tile_bytes;

    step = step < 4 ? 4 : step < n_tiles ? step : n_tiles;
    uint32_t n_row_tasks = (uint32_t)((n_tiles + step - 1) / step);
    return cut_by(c, all, n_tiles, (n_tiles + n_row_tasks - 1) / n_row_tasks);
}

bool cpu_cut_part(const struct cpu_cut *cut, const struct cpu_gemms *all, uint32_t n_rows,
                  uint32_t task, uint32_t i, struct cpu_part *out)
{
    /* pairs of panels, as kernels take them: as many for each task as can be */
    uint64_t n_panels = count_panels(all), pairs = (n_panels + 1) / 2;
    uint64_t at = task / cut->n_row_tasks, first = at * pairs / cut->n_panel_tasks * 2,
             last = (at + 1) * pairs / cut->n_panel_tasks * 2, base = 0;
    uint32_t row0 = task % cut->n_row_tasks * cut->row_step;

    for (uint32_t j = 0; j < i; j++) {
        base += all->g[j].w->n_panels;
    }
    uint64_t end = base + all->g[i].w->n_panels;
    first = first > base ? first : base;
    last = last < end ? last : end;
    if (first >= last) {
        return false;
    }
    *out = (struct cpu_part){.row0 = row0,
                             .row1 = n_rows - row0 < cut->row_step ? n_rows : row0 + cut->row_step,
                             .panel0 = (uint32_t)(first - base),
                             .panel1 = (uint32_t)(last - base)};
    return true;
}

struct cpu_gemms cpu_gemms_rows(const struct cpu_gemms *all, uint32_t row, uint32_t n_rows)
{
    struct cpu_gemms part = *all;

    for (uint32_t i = 0; i < all->n; i++) {
        struct cpu_gemm *g = &part.g[i];
        g->x += (size_t)row * g->ldx;
        g->y += (size_t)row * g->ldy;
        g->n_rows = g->n_rows - row < n_rows ? g->n_rows - row : n_rows;
    }
    return part;
}

static void run_gemm(const struct cpu_ctx *c, const struct cpu_gemms *all)
{
    uint32_t n_rows = all->g[0].n_rows, row_tasks = (n_rows + CPU_GEMM_ROWS - 1) / CPU_GEMM_ROWS;
    struct gemm_run run = {.all = all, .ctx = c};

    run.cut = cut_by(c, all, n_rows, ((n_rows + row_tasks - 1) / row_tasks + 11) / 12 * 12);
    bt_pool_run(c->pool, gemm_task, &run, run.cut.n_tasks);
}

static void run_class(struct cpu_ctx *c, const struct cpu_gemms *all)
{
    enum bt_dtype dtype = all->g[0].w->dtype;

    if (cpu_is_int8(c, dtype)) {
        cpu_int8_gemm(c, all);
    } else if (cpu_is_bf16(c, dtype)) {
        cpu_bf16_gemm(c, all);
    } else {
        run_gemm(c, all);
    }
}

/* Inputs in a weight's order go through the context's memory, some rows at a time. */
static void run_ordered(struct cpu_ctx *c, const struct cpu_gemms *one)
{
    const struct cpu_weight *w = one->g[0].w;

    for (uint32_t row = 0; row < one->g[0].n_rows; row += CPU_ORDER_ROWS) {
        struct cpu_gemms part = cpu_gemms_rows(one, row, CPU_ORDER_ROWS);
        struct cpu_gemm *g = &part.g[0];
        struct order_run order = {.y = c->ordered, .x = g->x, .ldx = g->ldx, .w = w};
        cpu_for_range(c, g->n_rows, w->n_cols, order_range, &order);
        g->x = c->ordered;
        g->ldx = w->n_cols;
        run_class(c, &part);
    }
}

/* Whether two weights take x prepared in the same way. */
static bool same_x(const struct cpu_ctx *c, const struct cpu_weight *a, const struct cpu_weight *b)
{
    bool own = cpu_is_int8(c, a->dtype) || cpu_is_int8(c, b->dtype) || cpu_is_bf16(c, a->dtype) ||
               cpu_is_bf16(c, b->dtype);

    return a->perm == NULL && b->perm == NULL && (a->dtype == b->dtype || !own);
}

void cpu_gemm_all(struct bt_kctx *k, const struct bt_k_product *products, uint32_t n,
                  const float *x, size_t ldx, uint32_t n_rows)
{
    struct cpu_ctx *c = cpu_of(k);
    struct cpu_gemms all = {.n = 0};

    for (uint32_t i = 0; i < n && n_rows > 0; i++) {
        const struct cpu_weight *w = cpu_weight_of(products[i].w);
        BT_ASSERT(w->packed != NULL && products[i].ldy >= w->n_rows && ldx >= w->n_cols &&
                  w->n_cols == cpu_weight_of(products[0].w)->n_cols);
        all.g[all.n++] = (struct cpu_gemm){.y = products[i].y,
                                           .x = x,
                                           .ldy = products[i].ldy,
                                           .ldx = ldx,
                                           .w = w,
                                           .bias = products[i].bias,
                                           .n_rows = n_rows};
        if (i + 1 < n && same_x(c, w, cpu_weight_of(products[i + 1].w))) {
            continue;
        }
        if (w->perm != NULL) {
            run_ordered(c, &all);
        } else {
            run_class(c, &all);
        }
        all.n = 0;
    }
}

void cpu_gemm(struct bt_kctx *k, float *y, size_t ldy, const float *x, size_t ldx,
              const struct bt_kweight *weight, const float *bias, uint32_t n_rows)
{
    const struct bt_k_product one = {.y = y, .ldy = ldy, .w = weight, .bias = bias};

    cpu_gemm_all(k, &one, 1, x, ldx, n_rows);
}
