/* Weights: checks a description, packs rows into panels (layout: cpu_int.h) on all threads, frees them. Owns the packed
 * copy; the mapped file stays the caller's. Does no arithmetic on values: packing moves bits. */

#include "kernels/cpu/cpu_int.h"

#include <string.h>
#include "base/mem.h"

size_t cpu_panel_bytes(enum bt_dtype dtype, uint32_t n_cols)
{
    switch (dtype) {
    case BT_DTYPE_F32:
        return (size_t)n_cols * 64;
    case BT_DTYPE_F16:
        return (size_t)n_cols * 32;
    case BT_DTYPE_BF16:
        return ((size_t)n_cols + 1) / 2 * 64;
    default:
        return n_cols / CPU_BLOCK * cpu_block_bytes(dtype);
    }
}

/* What one panel's packing works on: 16 columns, the last ones of the last panel being absent (NULL). */
struct pack {
    uint8_t *out;
    const uint8_t *rows[CPU_PANEL];
    uint32_t n_cols;
};

static void pack_f32(const struct pack *p)
{
    for (uint32_t k0 = 0; k0 < p->n_cols; k0 += CPU_BLOCK) {
        uint32_t k1 = p->n_cols - k0 < CPU_BLOCK ? p->n_cols : k0 + CPU_BLOCK;
        for (uint32_t c = 0; c < CPU_PANEL && p->rows[c] != NULL; c++) {
            for (uint32_t k = k0; k < k1; k++) {
                memcpy(p->out + ((size_t)k * CPU_PANEL + c) * 4, p->rows[c] + (size_t)k * 4, 4);
            }
        }
    }
}

/* pair: two k side by side in a column's 32-bit word. */
static void pack_u16(const struct pack *p, bool pair)
{
    uint16_t *out = (uint16_t *)(void *)p->out;

    for (uint32_t k0 = 0; k0 < p->n_cols; k0 += CPU_BLOCK) {
        uint32_t k1 = p->n_cols - k0 < CPU_BLOCK ? p->n_cols : k0 + CPU_BLOCK;
        for (uint32_t c = 0; c < CPU_PANEL && p->rows[c] != NULL; c++) {
            for (uint32_t k = k0; k < k1; k++) {
                size_t at = pair ? ((size_t)(k / 2) * CPU_PANEL + c) * 2 + k % 2
                                 : (size_t)k * CPU_PANEL + c;
                memcpy(&out[at], p->rows[c] + (size_t)k * 2, 2);
            }
        }
    }
}

/* n_scales f16 values, then 16 bytes of nibbles. */
static void pack_q4(const struct pack *p, uint32_t n_scales)
{
    const size_t in_bytes = 2 * n_scales + 16, out_bytes = CPU_PANEL * in_bytes;

    for (uint32_t b = 0; b < p->n_cols / CPU_BLOCK; b++) {
        uint8_t *out = p->out + b * out_bytes;
        for (uint32_t c = 0; c < CPU_PANEL && p->rows[c] != NULL; c++) {
            const uint8_t *in = p->rows[c] + b * in_bytes;
            for (uint32_t s = 0; s < n_scales; s++) {
                memcpy(out + s * 32 + c * 2, in + s * 2, 2);
            }
            for (uint32_t i = 0; i < 4; i++) {
                memcpy(out + n_scales * 32 + i * 64 + c * 4, in + n_scales * 2 + i * 4, 4);
            }
        }
    }
}

static void pack_q8_0(const struct pack *p)
{
    for (uint32_t b = 0; b < p->n_cols / CPU_BLOCK; b++) {
        uint8_t *out = p->out + (size_t)b * 544;
        for (uint32_t c = 0; c < CPU_PANEL && p->rows[c] != NULL; c++) {
            const uint8_t *in = p->rows[c] + (size_t)b * 34;
            memcpy(out + c * 2, in, 2);
            for (uint32_t i = 0; i < 8; i++) {
                uint32_t word;
                memcpy(&word, in + 2 + 4 * i, 4);
                word ^= 0x80808080U; /* + 128 in each byte */
                memcpy(out + 32 + i * 64 + c * 4, &word, 4);
            }
        }
    }
}

static void pack_q4_k_column(uint8_t *out, const uint8_t *in, uint32_t c)
{
    memcpy(out + c * 2, in, 2);
    memcpy(out + 32 + c * 2, in + 2, 2);
    for (uint32_t s = 0; s < 8; s++) {
        uint8_t *sub = out + 64 + (size_t)s * 288;
        const uint8_t *q = in + 16 + 32 * (s / 2);
        uint64_t w[4];
        memcpy(w, q, sizeof(w));
        for (uint32_t i = 0; i < 2; i++) {
            const uint64_t low = 0x0f0f0f0f0f0f0f0fU;
            uint64_t a = s % 2 == 0 ? w[i] & low : w[i] >> 4 & low;
            uint64_t b = s % 2 == 0 ? w[i + 2] & low : w[i + 2] >> 4 & low;
            a |= b << 4;
            memcpy(sub + 32 + (2 * i) * 64 + c * 4, &a, 4);
            a >>= 32;
            memcpy(sub + 32 + (2 * i + 1) * 64 + c * 4, &a, 4);
        }
        cpu_q4_k_scale(in + 4, s, &sub[c], &sub[16 + c]);
    }
}

static void pack_q6_k_column(uint8_t *out, const uint8_t *in, uint32_t c)
{
    uint8_t q[256];

    cpu_q6_k_values(in, q);
    memcpy(out + c * 2, in + 208, 2);
    for (uint32_t s = 0; s < 8; s++) {
        uint8_t *sub = out + 32 + (size_t)s * 416, *words = sub + 32 + c * 4, *high = words + 256;
        sub[c] = in[192 + 2 * s];
        sub[16 + c] = in[192 + 2 * s + 1];
        for (uint32_t k = 0; k < 16; k++) {
            uint32_t a = q[s * CPU_BLOCK + k], b = q[s * CPU_BLOCK + 16 + k], field = 2 * (k / 4);
            words[k / 4 * 64 + k % 4] = (uint8_t)((a & 15) | (b & 15) << 4);
            high[k % 4] = (uint8_t)(high[k % 4] | (a >> 4) << field);
            high[64 + k % 4] = (uint8_t)(high[64 + k % 4] | (b >> 4) << field);
        }
    }
}

static void pack_super(const struct pack *p, enum bt_dtype dtype)
{
    const bool q4 = dtype == BT_DTYPE_Q4_K;
    const size_t in_bytes = bt_dtype_block_bytes(dtype), out_bytes = q4 ? 2368 : 3360;

    for (uint32_t b = 0; b < p->n_cols / CPU_SUPER; b++) {
        for (uint32_t c = 0; c < CPU_PANEL && p->rows[c] != NULL; c++) {
            (q4 ? pack_q4_k_column : pack_q6_k_column)(p->out + b * out_bytes,
                                                       p->rows[c] + b * in_bytes, c);
        }
    }
}

static void pack_panel(const struct pack *p, enum bt_dtype dtype)
{
    switch (dtype) {
    case BT_DTYPE_F32:
        pack_f32(p);
        break;
    case BT_DTYPE_F16:
        pack_u16(p, false);
        break;
    case BT_DTYPE_BF16:
        pack_u16(p, true);
        break;
    case BT_DTYPE_Q4_0:
        pack_q4(p, 1);
        break;
    case BT_DTYPE_Q4_1:
        pack_q4(p, 2);
        break;
    case BT_DTYPE_Q8_0:
        pack_q8_0(p);
        break;
    default:
        pack_super(p, dtype);
        break;
    }
}

struct pack_run {
    const struct cpu_weight *w;
    const uint8_t *data;
};

/* out: zeroed, panel_bytes. */
static void pack_one(const struct pack_run *run, uint32_t panel, uint8_t *out)
{
    const struct cpu_weight *w = run->w;
    struct pack p = {.out = out, .n_cols = w->n_cols};

    for (uint32_t c = 0; c < CPU_PANEL && panel * CPU_PANEL + c < w->n_rows; c++) {
        p.rows[c] = run->data + (size_t)(panel * CPU_PANEL + c) * w->raw_row_bytes;
    }
    pack_panel(&p, w->dtype);
}

static void pack_range(void *arg, uint32_t first, uint32_t last)
{
    const struct pack_run *run = arg;

    for (uint32_t panel = first; panel < last; panel++) {
        pack_one(run, panel, run->w->packed + panel * run->w->panel_bytes);
    }
}

/* The first and the last panel are what packing would make today. */
static enum bt_status check_ready(const struct pack_run *run, struct bt_err *err)
{
    const struct cpu_weight *w = run->w;
    const uint32_t samples[] = {0, w->n_panels - 1};
    uint8_t *fresh = bt_alloc(w->panel_bytes);
    bool same = true;

    if (fresh == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for a panel");
    }
    for (uint32_t i = 0; i < 2 && same; i++) {
        memset(fresh, 0, w->panel_bytes);
        pack_one(run, samples[i], fresh);
        same = memcmp(fresh, w->packed + samples[i] * w->panel_bytes, w->panel_bytes) == 0;
    }
    bt_free(fresh);
    return same ? BT_OK
                : bt_err_set(err, BT_ERR_PROTOCOL,
                             "the packed form is not of this weight, or of "
                             "another version of the layout");
}

static enum bt_status check_desc(const struct bt_k_weight_desc *d, struct bt_err *err)
{
    if ((unsigned)d->dtype >= BT_DTYPE_COUNT) {
        return bt_err_set(err, BT_ERR_UNSUPPORTED, "element type %d", (int)d->dtype);
    }
    if (d->n_rows == 0 || d->n_cols == 0 || d->n_rows > INT32_MAX || d->n_cols > INT32_MAX) {
        return bt_err_set(err, BT_ERR_INVALID, "shape %u x %u", d->n_rows, d->n_cols);
    }
    if (d->n_cols % bt_dtype_block_values(d->dtype) != 0) {
        return bt_err_set(err, BT_ERR_INVALID, "%u columns, not a multiple of %s's block of %u",
                          d->n_cols, bt_dtype_name(d->dtype), bt_dtype_block_values(d->dtype));
    }
    return BT_OK;
}

/* Puts the packed form where the description says. */
static enum bt_status pack_weight(struct cpu_ctx *c, struct cpu_weight *w,
                                  const struct bt_k_weight_desc *desc, struct bt_err *err)
{
    struct pack_run run = {.w = w, .data = desc->data};
    bool fits = bt_mul_size(w->n_panels, w->panel_bytes, &w->packed_bytes);

    w->borrowed = desc->panels != NULL;
    w->packed = w->borrowed ? desc->panels : fits ? cpu_map(w->packed_bytes) : NULL;
    if (!fits || w->packed == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for a packed weight of %u x %u %s",
                          desc->n_rows, desc->n_cols, bt_dtype_name(desc->dtype));
    }
    w->base.packed_bytes = w->packed_bytes;
    if (w->borrowed && desc->panels_ready) {
        return check_ready(&run, err);
    }
    cpu_for_range(c, w->n_panels, (size_t)w->n_cols * CPU_PANEL, pack_range, &run);
    return BT_OK;
}

size_t cpu_panel_memory(struct bt_kctx *k, const struct bt_k_weight_desc *desc)
{
    size_t bytes = 0;

    if (!desc->for_gemm || check_desc(desc, NULL) != BT_OK ||
        !bt_mul_size((desc->n_rows + CPU_PANEL - 1) / CPU_PANEL,
                     cpu_panel_bytes(desc->dtype, desc->n_cols), &bytes)) {
        return 0;
    }
    (void)k;
    return bytes;
}

enum bt_status cpu_weight_create(struct bt_kctx *k, const struct bt_k_weight_desc *desc,
                                 struct bt_kweight **out, struct bt_err *err)
{
    enum bt_status st = check_desc(desc, err);
    if (st != BT_OK) {
        return st;
    }
    struct cpu_weight *w = bt_calloc(1, sizeof(*w));
    if (w == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for a weight");
    }
    w->dtype = desc->dtype;
    w->n_rows = desc->n_rows;
    w->n_cols = desc->n_cols;
    w->n_panels = (desc->n_rows + CPU_PANEL - 1) / CPU_PANEL;
    w->panel_bytes = cpu_panel_bytes(desc->dtype, desc->n_cols);
    w->raw_row_bytes = (size_t)(desc->n_cols / bt_dtype_block_values(desc->dtype)) *
                       bt_dtype_block_bytes(desc->dtype);
    w->raw = desc->for_embed ? desc->data : NULL;
    if (desc->for_gemm && (st = pack_weight(cpu_of(k), w, desc, err)) != BT_OK) {
        bt_free(w);
        return st;
    }
    *out = &w->base;
    return BT_OK;
}

void cpu_weight_destroy(struct bt_kctx *k, struct bt_kweight *weight)
{
    struct cpu_weight *w = (struct cpu_weight *)(void *)weight;

    (void)k;
    if (!w->borrowed) {
        cpu_unmap(w->packed, w->packed_bytes);
    }
    bt_free(w);
}
