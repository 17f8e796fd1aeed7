/* Weights: checks a description, packs rows into panels (layout: cpu_int.h) on all threads, frees them. Owns the packed
 * copy; the mapped file stays the caller's. Does no arithmetic on values: packing moves bits. */

#include "kernels/cpu/cpu_int.h"

#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif
#include "base/mem.h"

#define PUT_BYTES (size_t)(256U * 1024) /* handed over at once: within the second-level cache */

size_t cpu_panel_bytes(enum bt_dtype dtype, uint32_t n_cols, uint32_t shift)
{
    size_t n_blocks = n_cols / CPU_BLOCK;

    switch (dtype) {
    case BT_DTYPE_F32:
        return (size_t)n_cols * 64;
    case BT_DTYPE_F16:
        return (size_t)n_cols * 32;
    case BT_DTYPE_BF16:
        return ((size_t)n_cols + 1) / 2 * 64;
    case BT_DTYPE_G4:
    case BT_DTYPE_G8:
    case BT_DTYPE_GF8:
        return n_blocks * cpu_block_bytes(dtype) +
               (((n_blocks - 1) >> shift) + 1) * cpu_head_bytes(dtype);
    default:
        return n_blocks * cpu_block_bytes(dtype);
    }
}

/* The largest power of two of blocks that the group is a multiple of; a group that is the whole row needs one header. */
static uint32_t group_shift(const struct bt_k_weight_desc *d)
{
    uint32_t blocks = d->group / CPU_BLOCK;

    return d->group == d->n_cols ? 31U : blocks == 0 ? 0U : (uint32_t)__builtin_ctz(blocks);
}

/* What one panel's packing works on: 16 columns, the last ones of the last panel being absent (NULL). */
struct pack {
    uint8_t *out;
    const uint8_t *rows[CPU_PANEL];
    const uint8_t *next; /* the rows of the panel that comes after this, in one piece; or NULL */
    uint32_t n_cols;
    bool stream; /* out, on 16 bytes, is not looked at soon: past the caches where that can be */
};

/* Reads ahead: what lies in the next panel where bytes [at, at + n) of these columns lie. Sixteen rows in step are more than
 * the hardware follows. */
static inline void fetch_next(const struct pack *p, size_t at, size_t n)
{
    for (size_t i = CPU_PANEL * at; p->next != NULL && i < CPU_PANEL * (at + n); i += 64) {
        __builtin_prefetch(p->next + i, 0, 2);
    }
}

typedef uint32_t words4 __attribute__((vector_size(16)));

static inline void put_16(uint8_t *out, words4 v, bool stream)
{
#if defined(__x86_64__)
    if (stream) {
        _mm_stream_si128((__m128i *)(void *)out, (__m128i)v);
        return;
    }
#endif
    (void)stream;
    memcpy(out, &v, sizeof(v));
}

/* 4 words of 4 columns, from byte `at` of their rows on: they meet in out[4][16]. flip: bits to turn. */
static inline void put_4x4(uint8_t *out, const uint8_t *const rows[4], size_t at, uint32_t flip,
                           bool stream)
{
    words4 r[4];
    for (int i = 0; i < 4; i++) {
        memcpy(&r[i], rows[i] + at, sizeof(r[i]));
        r[i] ^= flip;
    }
    words4 low01 = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5),
           low23 = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5),
           high01 = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7),
           high23 = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
    r[0] = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
    r[1] = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
    r[2] = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
    r[3] = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
    for (uint32_t i = 0; i < 4; i++) {
        put_16(out + (size_t)i * 64, r[i], stream);
    }
}

/* n 32-bit words of every column, from byte `at` of its row on, to out[n][16]. stream: out lies on 16 bytes. */
static inline void put_words(const struct pack *p, uint8_t *out, size_t at, uint32_t n,
                             uint32_t flip, bool stream)
{
    uint32_t c = 0;

    if (n % 4 == 0 && p->rows[CPU_PANEL - 1] != NULL) {
        for (uint32_t w = 0; w < n; w += 4) { /* whole lines of out, one after the other */
            for (c = 0; c < CPU_PANEL; c += 4) {
                put_4x4(out + (size_t)w * 64 + (size_t)c * 4, p->rows + c, at + (size_t)w * 4, flip,
                        stream);
            }
        }
    }
    for (; c < CPU_PANEL && p->rows[c] != NULL; c++) {
        for (uint32_t w = 0; w < n; w++) {
            uint32_t word;
            memcpy(&word, p->rows[c] + at + (size_t)w * 4, 4);
            word ^= flip;
            memcpy(out + ((size_t)w * CPU_PANEL + c) * 4, &word, 4);
        }
    }
}

/* n words of all of the row, a cache line of each column at a time. */
static void pack_words(const struct pack *p, uint32_t n)
{
    for (uint32_t w = 0; w < n; w += 16) {
        const uint32_t some = n - w < 16 ? n - w : 16;
        uint8_t *out = p->out + (size_t)w * 64;
        fetch_next(p, (size_t)w * 4, (size_t)some * 4);
        if (p->stream) {
            put_words(p, out, (size_t)w * 4, some, 0, true);
        } else {
            put_words(p, out, (size_t)w * 4, some, 0, false);
        }
    }
}

static void pack_f16(const struct pack *p)
{
    for (uint32_t k0 = 0; k0 < p->n_cols; k0 += CPU_BLOCK) {
        uint32_t k1 = p->n_cols - k0 < CPU_BLOCK ? p->n_cols : k0 + CPU_BLOCK;
        fetch_next(p, (size_t)k0 * 2, (size_t)(k1 - k0) * 2);
        for (uint32_t c = 0; c < CPU_PANEL && p->rows[c] != NULL; c++) {
            for (uint32_t k = k0; k < k1; k++) {
                memcpy(p->out + ((size_t)k * CPU_PANEL + c) * 2, p->rows[c] + (size_t)k * 2, 2);
            }
        }
    }
}

/* Two k side by side in a column's word; of an odd K the last one alone. */
static void pack_bf16(const struct pack *p)
{
    const uint32_t n = p->n_cols / 2;

    pack_words(p, n);
    for (uint32_t c = 0; p->n_cols % 2 != 0 && c < CPU_PANEL && p->rows[c] != NULL; c++) {
        memcpy(p->out + ((size_t)n * CPU_PANEL + c) * 4, p->rows[c] + (size_t)n * 4, 2);
    }
}

/* The low two bits of 32 quants as pairs[2][16] of column c. */
static void put_pairs(uint8_t *out, const uint8_t *q, uint32_t c)
{
    for (uint32_t h = 0; h < 2; h++) {
        for (uint32_t j = 0; j < 4; j++) {
            const uint8_t *k = q + 16 * h + j;
            out[h * 64 + c * 4 + j] =
                (uint8_t)((k[0] & 3U) | (k[4] & 3U) << 2 | (k[8] & 3U) << 4 | (k[12] & 3U) << 6);
        }
    }
}

static void put_nibbles(uint8_t *out, const uint8_t *q, uint32_t c)
{
    for (uint32_t k = 0; k < 16; k++) {
        out[k / 4 * 64 + c * 4 + k % 4] = (uint8_t)((q[k] & 15U) | (q[k + 16] & 15U) << 4);
    }
}

/* Bit `bit` of 32 quants as bits[16] of column c. */
static void put_bits(uint8_t *out, const uint8_t *q, unsigned bit, uint32_t c)
{
    for (uint32_t j = 0; j < 4; j++) {
        unsigned byte = 0;
        for (uint32_t i = 0; i < 8; i++) {
            byte |= (q[4 * i + j] >> bit & 1U) << i;
        }
        out[c * 4 + j] = (uint8_t)byte;
    }
}

/* n_scales f16 values, 32 fifth bits if there are any, then 16 bytes of nibbles. */
static void pack_q4(const struct pack *p, uint32_t n_scales, bool high)
{
    const size_t q_at = 2 * n_scales + (high ? 4 : 0), in_bytes = q_at + 16,
                 out_bytes = CPU_PANEL * in_bytes;

    for (uint32_t b = 0; b < p->n_cols / CPU_BLOCK; b++) {
        uint8_t *out = p->out + b * out_bytes;
        fetch_next(p, b * in_bytes, in_bytes);
        put_words(p, out + (size_t)n_scales * 32, b * in_bytes + q_at, 4, 0, false);
        for (uint32_t c = 0; c < CPU_PANEL && p->rows[c] != NULL; c++) {
            const uint8_t *in = p->rows[c] + b * in_bytes;
            for (uint32_t s = 0; s < n_scales; s++) {
                memcpy(out + s * 32 + c * 2, in + s * 2, 2);
            }
            if (high) {
                uint8_t q[CPU_BLOCK];
                for (uint32_t k = 0; k < CPU_BLOCK; k++) {
                    q[k] = (uint8_t)((uint32_t)in[q_at - 4 + k / 8] >> k % 8 & 1U);
                }
                put_bits(out + n_scales * 32 + 256, q, 0, c);
            }
        }
    }
}

static void put_nibble_words(uint8_t *out, const uint8_t *nibbles, uint32_t c)
{
    for (uint32_t i = 0; i < 4; i++) {
        memcpy(out + i * 64 + c * 4, nibbles + i * 4, 4);
    }
}

static void put_bytes(uint8_t *out, const uint8_t *q, uint32_t c)
{
    for (uint32_t i = 0; i < 8; i++) {
        memcpy(out + i * 64 + c * 4, q + 4 * i, 4);
    }
}

static void pack_grouped(const struct pack *p, enum bt_dtype dtype, uint32_t shift)
{
    const size_t in_bytes = bt_dtype_block_bytes(dtype);

    for (uint32_t b = 0; b < p->n_cols / CPU_BLOCK; b++) {
        uint8_t *head = p->out + cpu_group_at(dtype, shift, b),
                *out = p->out + cpu_grouped_at(dtype, shift, b);
        fetch_next(p, b * in_bytes, in_bytes);
        for (uint32_t c = 0; c < CPU_PANEL && p->rows[c] != NULL; c++) {
            const uint8_t *in = p->rows[c] + b * in_bytes;
            memcpy(head + c * 4, in, 4);
            memcpy(head + 64 + c * 4, in + 4, 4);
            (dtype == BT_DTYPE_G4 ? put_nibble_words : put_bytes)(out, in + 8, c);
        }
    }
}

static void pack_gf8(const struct pack *p, uint32_t shift)
{
    const size_t in_bytes = bt_dtype_block_bytes(BT_DTYPE_GF8);

    for (uint32_t b = 0; b < p->n_cols / CPU_BLOCK; b++) {
        uint8_t *head = p->out + cpu_group_at(BT_DTYPE_GF8, shift, b),
                *out = p->out + cpu_grouped_at(BT_DTYPE_GF8, shift, b);
        fetch_next(p, b * in_bytes, in_bytes);
        for (uint32_t c = 0; c < CPU_PANEL && p->rows[c] != NULL; c++) {
            memcpy(head + c * 4, p->rows[c] + b * in_bytes, 4);
        }
        put_words(p, out, b * in_bytes + 4, 8, 0, false);
    }
}

static void pack_q8_0(const struct pack *p)
{
    for (uint32_t b = 0; b < p->n_cols / CPU_BLOCK; b++) {
        uint8_t *out = p->out + (size_t)b * 544;
        fetch_next(p, (size_t)b * 34, 34);
        put_words(p, out + 32, (size_t)b * 34 + 2, 8, 0x80808080U, false); /* + 128 in each byte */
        for (uint32_t c = 0; c < CPU_PANEL && p->rows[c] != NULL; c++) {
            memcpy(out + c * 2, p->rows[c] + (size_t)b * 34, 2);
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

static void pack_q2_k_column(uint8_t *out, const uint8_t *in, uint32_t c)
{
    uint8_t q[256];

    cpu_k_values(in, BT_DTYPE_Q2_K, q);
    memcpy(out + c * 2, in + 80, 2);
    memcpy(out + 32 + c * 2, in + 82, 2);
    for (uint32_t s = 0; s < 8; s++) {
        uint8_t *sub = out + 64 + (size_t)s * 160;
        sub[c] = in[2 * s];
        sub[16 + c] = in[2 * s + 1];
        put_pairs(sub + 32, q + s * CPU_BLOCK, c);
    }
}

static void pack_q3_k_column(uint8_t *out, const uint8_t *in, uint32_t c)
{
    uint8_t q[256];

    cpu_k_values(in, BT_DTYPE_Q3_K, q);
    memcpy(out + c * 2, in + 108, 2);
    for (uint32_t s = 0; s < 8; s++) {
        uint8_t *sub = out + 32 + (size_t)s * 224;
        sub[c] = (uint8_t)cpu_q3_k_scale(in + 96, 2 * s);
        sub[16 + c] = (uint8_t)cpu_q3_k_scale(in + 96, 2 * s + 1);
        put_pairs(sub + 32, q + s * CPU_BLOCK, c);
        put_bits(sub + 160, q + s * CPU_BLOCK, 2, c);
    }
}

static void pack_q5_k_column(uint8_t *out, const uint8_t *in, uint32_t c)
{
    uint8_t q[256];

    cpu_k_values(in, BT_DTYPE_Q5_K, q);
    memcpy(out + c * 2, in, 2);
    memcpy(out + 32 + c * 2, in + 2, 2);
    for (uint32_t s = 0; s < 8; s++) {
        uint8_t *sub = out + 64 + (size_t)s * 352;
        cpu_q4_k_scale(in + 4, s, &sub[c], &sub[16 + c]);
        put_nibbles(sub + 32, q + s * CPU_BLOCK, c);
        put_bits(sub + 288, q + s * CPU_BLOCK, 4, c);
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
    static void (*const columns[BT_DTYPE_COUNT])(uint8_t *, const uint8_t *, uint32_t) = {
        [BT_DTYPE_Q2_K] = pack_q2_k_column, [BT_DTYPE_Q3_K] = pack_q3_k_column,
        [BT_DTYPE_Q4_K] = pack_q4_k_column, [BT_DTYPE_Q5_K] = pack_q5_k_column,
        [BT_DTYPE_Q6_K] = pack_q6_k_column,
    };
    const size_t in_bytes = bt_dtype_block_bytes(dtype),
                 out_bytes = cpu_block_bytes(dtype) * (CPU_SUPER / CPU_BLOCK);

    for (uint32_t b = 0; b < p->n_cols / CPU_SUPER; b++) {
        fetch_next(p, b * in_bytes, in_bytes);
        for (uint32_t c = 0; c < CPU_PANEL && p->rows[c] != NULL; c++) {
            columns[dtype](p->out + b * out_bytes, p->rows[c] + b * in_bytes, c);
        }
    }
}

static void pack_panel(const struct pack *p, const struct cpu_weight *w)
{
    switch (w->dtype) {
    case BT_DTYPE_G4:
    case BT_DTYPE_G8:
        pack_grouped(p, w->dtype, w->group_shift);
        break;
    case BT_DTYPE_GF8:
        pack_gf8(p, w->group_shift);
        break;
    case BT_DTYPE_F32:
        pack_words(p, p->n_cols);
        break;
    case BT_DTYPE_F16:
        pack_f16(p);
        break;
    case BT_DTYPE_BF16:
        pack_bf16(p);
        break;
    case BT_DTYPE_Q4_0:
    case BT_DTYPE_IQ4_NL:
        pack_q4(p, 1, false);
        break;
    case BT_DTYPE_Q4_1:
        pack_q4(p, 2, false);
        break;
    case BT_DTYPE_Q5_0:
        pack_q4(p, 1, true);
        break;
    case BT_DTYPE_Q5_1:
        pack_q4(p, 2, true);
        break;
    case BT_DTYPE_Q8_0:
        pack_q8_0(p);
        break;
    default:
        pack_super(p, w->dtype);
        break;
    }
}

struct pack_run {
    const struct cpu_weight *w;
    const struct bt_k_weight_desc *desc;
    _Atomic int failed; /* an enum bt_status */
};

/* The rows of a panel and of those behind it. */
static const uint8_t *raw_panel(const struct pack_run *run, uint32_t panel)
{
    return (const uint8_t *)run->desc->data + (size_t)panel * CPU_PANEL * run->w->raw_row_bytes;
}

/* out: zeroed, panel_bytes. more: a whole panel comes after this one. */
static void pack_one(const struct pack_run *run, uint32_t panel, uint8_t *out, bool more,
                     bool stream)
{
    const struct cpu_weight *w = run->w;
    struct pack p = {.out = out,
                     .n_cols = w->n_cols,
                     .next = more ? raw_panel(run, panel + 1) : NULL,
                     .stream = stream};

    for (uint32_t c = 0; c < CPU_PANEL && panel * CPU_PANEL + c < w->n_rows; c++) {
        p.rows[c] = raw_panel(run, panel) + c * w->raw_row_bytes;
    }
    pack_panel(&p, w);
}

static size_t raw_bytes(const struct pack_run *run, uint32_t first, uint32_t last)
{
    const size_t from = (size_t)first * CPU_PANEL, to = (size_t)last * CPU_PANEL;

    return ((to < run->w->n_rows ? to : run->w->n_rows) - from) * run->w->raw_row_bytes;
}

/* Rows of a mapped file: all of their pages at once, so that they can be fetched ahead; of other memory: nothing. */
static void touch_rows(const struct pack_run *run, uint32_t first, uint32_t last)
{
#ifdef MADV_POPULATE_READ
    const uintptr_t page = 4096, at = (uintptr_t)raw_panel(run, first), from = at & ~(page - 1);

    /* an older kernel: one by one */
    (void)madvise((void *)from, at - from + raw_bytes(run, first, last), MADV_POPULATE_READ);
#else
    (void)run;
    (void)first;
    (void)last;
#endif
}

static void pack_range(void *arg, uint32_t first, uint32_t last)
{
    const struct pack_run *run = arg;

    touch_rows(run, first, last);
    for (uint32_t panel = first; panel < last; panel++) {
        pack_one(run, panel, run->w->packed + panel * run->w->panel_bytes, panel + 2 < last, true);
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* By way of memory of its own that stays in the caches, some panels at a time. */
static void pack_and_put(void *arg, uint32_t first, uint32_t last)
{
    struct pack_run *run = arg;
    const size_t bytes = run->w->panel_bytes, most = PUT_BYTES / bytes;
    const uint32_t step = most == 0 ? 1 : most < last - first ? (uint32_t)most : last - first;
    uint8_t *panels = bt_alloc_aligned(64, step * bytes);

    for (uint32_t at = first; at < last && panels != NULL && atomic_load(&run->failed) == BT_OK;
         at += step) {
        const uint32_t n = last - at < step ? last - at : step;
        memset(panels, 0, n * bytes);
        for (uint32_t i = 0; i < n; i++) {
            pack_one(run, at + i, panels + i * bytes, at + i + 2 < last, false);
        }
        if (!run->desc->put(run->desc->put_arg, at * bytes, panels, n * bytes)) {
            atomic_store(&run->failed, BT_ERR_IO);
        }
    }
    if (panels == NULL) {
        atomic_store(&run->failed, BT_ERR_NOMEM);
    }
    bt_free(panels);
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
        pack_one(run, samples[i], fresh, false, false);
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
    if (d->group % CPU_BLOCK != 0 || (d->group != 0 && d->n_cols % d->group != 0)) {
        return bt_err_set(err, BT_ERR_INVALID, "%u columns in groups of %u", d->n_cols, d->group);
    }
    for (uint32_t k = 0; d->perm != NULL && k < d->n_cols; k++) {
        if (d->perm[k] >= d->n_cols || d->for_embed) {
            return bt_err_set(err, BT_ERR_INVALID, "order of the inputs: %u of %u", d->perm[k],
                              d->n_cols);
        }
    }
    return BT_OK;
}

static enum bt_status copy_perm(struct cpu_ctx *c, struct cpu_weight *w,
                                const struct bt_k_weight_desc *d, struct bt_err *err)
{
    if (d->perm == NULL) {
        return BT_OK;
    }
    w->perm = bt_alloc(d->n_cols * sizeof(*w->perm));
    if (w->perm == NULL || !cpu_order_reserve(c, d->n_cols)) {
        bt_free(w->perm);
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for the order of %u inputs", d->n_cols);
    }
    memcpy(w->perm, d->perm, d->n_cols * sizeof(*w->perm));
    return BT_OK;
}

/* Puts the packed form where the description says. */
static enum bt_status pack_weight(struct cpu_ctx *c, struct cpu_weight *w,
                                  const struct bt_k_weight_desc *desc, struct bt_err *err)
{
    struct pack_run run = {.w = w, .desc = desc};
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
    cpu_for_range(c, w->n_panels, (size_t)w->n_cols * CPU_PANEL,
                  desc->put != NULL ? pack_and_put : pack_range, &run);
    enum bt_status st = (enum bt_status)atomic_load(&run.failed);
    return st == BT_OK ? BT_OK
                       : bt_err_set(err, st, "its packed form could not be written%s",
                                    st == BT_ERR_NOMEM ? ": out of memory" : "");
}

size_t cpu_panel_memory(struct bt_kctx *k, const struct bt_k_weight_desc *desc)
{
    size_t bytes = 0;

    if (!desc->for_gemm || check_desc(desc, NULL) != BT_OK ||
        !bt_mul_size((desc->n_rows + CPU_PANEL - 1) / CPU_PANEL,
                     cpu_panel_bytes(desc->dtype, desc->n_cols, group_shift(desc)), &bytes)) {
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
    if ((cpu_is_int8(cpu_of(k), desc->dtype) &&
         cpu_int8_reserve(cpu_of(k), desc->n_cols) != BT_OK) ||
        (cpu_is_bf16(cpu_of(k), desc->dtype) &&
         cpu_bf16_reserve(cpu_of(k), desc->n_cols) != BT_OK)) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for activations of %u columns",
                          desc->n_cols);
    }
    struct cpu_weight *w = bt_calloc(1, sizeof(*w));
    if (w == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "out of memory for a weight");
    }
    w->dtype = desc->dtype;
    w->n_rows = desc->n_rows;
    w->n_cols = desc->n_cols;
    w->n_panels = (desc->n_rows + CPU_PANEL - 1) / CPU_PANEL;
    w->group_shift = group_shift(desc);
    w->panel_bytes = cpu_panel_bytes(w->dtype, w->n_cols, w->group_shift);
    st = copy_perm(cpu_of(k), w, desc, err);
    if (st != BT_OK) {
        bt_free(w);
        return st;
    }
    w->raw_row_bytes = (size_t)(desc->n_cols / bt_dtype_block_values(desc->dtype)) *
                       bt_dtype_block_bytes(desc->dtype);
    w->raw = desc->for_embed ? desc->data : NULL;
    if (desc->for_gemm && (st = pack_weight(cpu_of(k), w, desc, err)) != BT_OK) {
        bt_free(w->perm);
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
    bt_free(w->perm);
    bt_free(w);
}
