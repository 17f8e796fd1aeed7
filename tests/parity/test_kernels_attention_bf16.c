/* Attention of classes cpu-int8 and cpu-bf16: it has the bits of its definition in kernels/backend.h, written here a second time, on
 * every instruction set and thread count, however a sequence is cut into chunks and paged, and with f32 and bf16 caches alike, and with f8
 * caches, whose numbers are what they were rounded to. So
 * it is with values that overflow, are denormal or not finite, which a row that does not see them must not notice. It is near
 * double precision. */

#include "tests/parity/attention_parity.h"
#include "tests/parity/bf16_parity.h"

#define LOG2_E 0x1.715476p+0F

/* To eight significant bits. */
static float bf16(float f)
{
    int e;
    double m = frexp((double)f, &e), r = ldexp(rint(m * 256), e - 8);

    return !isfinite(f)           ? f
           : fabsf(f) < LEAST     ? copysignf(0, f)
           : r > 0x1p127 * 1.999  ? INFINITY
           : r < -0x1p127 * 1.999 ? -INFINITY
                                  : (float)r;
}

static float exp2_of(float x)
{
    x = -127.0F > x ? -127.0F : x;
    float n = (x + (0x1.8p23F + 127)) - (0x1.8p23F + 127), r = x - n;
    float p = fmaf(0x1.c2a218p-5F, r, 0x1.f00c4cp-3F);
    p = fmaf(fmaf(p, r, 0x1.62f5fap-1F), r, 1.0F);
    return isnan(x) ? x : n <= -127 ? 0 : p * ldexpf(1, (int)n);
}

/* A sequence's q (times the scale), k and v, rounded. */
struct rounded_seq {
    float *q, *k, *v;
};

/* t: of the pages; only f8 rounds more than attention does. */
static float *rounded_copy(const float *x, size_t n, float by, enum bt_dtype t)
{
    float *out = bt_alloc(n * sizeof(float));

    for (size_t i = 0; i < n; i++) {
        out[i] = bf16((t == BT_DTYPE_F8 ? rounded(x[i], t) : x[i]) * by);
    }
    return out;
}

/* tanh is not written a second time: softcap is compared with double precision, and between instruction sets. */
static void definition(const struct seq *q, const struct rounded_seq *b, uint32_t t, uint32_t h,
                       float *out)
{
    const struct shape *s = &q->s;
    const uint32_t dim = s->head_dim, kv = h / (s->n_heads / s->n_kv_heads) * dim;
    const uint32_t from = s->window != 0 && t >= s->window ? t - s->window + 1 : 0;
    float max = -INFINITY, sum[16] = {0}, total[16];

    memset(out, 0, dim * sizeof(float));
    for (uint32_t base = from / 64 * 64; base <= t; base += 64) {
        float p[64], old = max;
        for (uint32_t j = base; j < base + 64; j++) {
            float score = 0;
            if (j < from || j > t) {
                p[j - base] = -INFINITY;
                continue;
            }
            for (uint32_t i = 0; i < dim; i += 2) {
                for (uint32_t d = i + 2; d-- > i;) { /* the odd one first */
                    score = d < dim ? fused(b->q[t * q->q_stride + h * dim + d],
                                            b->k[j * q->kv_stride + kv + d], score)
                                    : fused(0, 0, score);
                }
            }
            p[j - base] = score;
            max = max > score ? max : score;
        }
        float rescale = max != old ? exp2_of(old - max) : 1.0F;
        for (uint32_t j = 0; j < 64; j++) {
            bool seen = base + j >= from && base + j <= t;
            p[j] = seen ? bf16(exp2_of(p[j] - max)) : 0;
        }
        for (uint32_t l = 0; l < 16; l++) {
            sum[l] = rescale != 1.0F ? flushed(sum[l] * rescale) : sum[l];
            for (uint32_t half = 0; half < 64; half += 32) {
                sum[l] += p[half + 2 * l + 1];
                sum[l] += p[half + 2 * l];
            }
        }
        for (uint32_t d = 0; d < dim; d++) {
            out[d] = rescale != 1.0F ? flushed(out[d] * rescale) : out[d];
            for (uint32_t i = 0; i < 64; i += 2) {
                for (uint32_t j = i + 2; j-- > i;) {
                    if (base + j >= from && base + j <= t) {
                        out[d] = fused(p[j], b->v[(base + j) * q->kv_stride + kv + d], out[d]);
                    }
                }
            }
        }
    }
    memcpy(total, sum, sizeof(total));
    for (uint32_t n = 8; n > 0; n /= 2) {
        for (uint32_t l = 0; l < n; l++) {
            total[l] += total[l + n];
        }
    }
    for (uint32_t d = 0; d < dim; d++) {
        out[d] = out[d] * (1.0F / total[0]) + 0.0F;
    }
}

/* Values of every kind; what is not finite is rare, and not among the first. */
static float number(uint32_t lo, uint32_t n)
{
    uint32_t bits = (pk_u32() & 0x807fffffU) | (lo + pk_u32() % n) << 23;
    float f;

    memcpy(&f, &bits, sizeof(f));
    return f;
}

enum kind { ORDINARY, PEAKED, SMALL, WILD, KINDS };

static void fill(struct seq *q, enum kind kind)
{
    for (uint32_t t = 0; t < q->s.n_tokens; t++) {
        for (size_t i = 0; i < q->q_stride; i++) {
            q->q[t * q->q_stride + i] *= kind == PEAKED ? 30.0F : 1.0F;
        }
        for (size_t i = 0; i < q->kv_stride; i++) {
            size_t at = t * q->kv_stride + i;
            if (kind == SMALL) {
                q->k[at] = number(0, 6);
                q->v[at] = number(0, 9);
            } else if (kind == WILD && t > 20 && pk_u32() % 500 == 0) {
                q->k[at] = number(240, 15);
                q->v[at] = number(250, 6);
            } else if (kind == WILD) {
                q->v[at] = number(1, 250);
            }
        }
    }
}

/* NaNs count as equal. */
static void same(const char *what, const struct pk *p, int i, float *got, const float *want,
                 size_t n)
{
    for (size_t j = 0; j < n; j++) {
        if (isnan(got[j]) && isnan(want[j])) {
            got[j] = want[j];
        }
    }
    pk_same(what, p, i, got, want, n);
}

static void test_shape(const struct pk *p, struct shape s, enum kind kind)
{
    static const uint32_t chunks[] = {1000, 64, 5, 1};
    size_t n = (size_t)s.n_tokens * s.n_heads * s.head_dim;
    float *want = pk_floats(n, 0, 0), *got = pk_floats(n, 0, 0);
    struct seq q;
    char what[128];

    snprintf(what, sizeof(what),
             "attention %s heads %u/%u dim %u page %u tokens %u window %u kind %d",
             bt_dtype_name(s.dtype), s.n_heads, s.n_kv_heads, s.head_dim, s.page_tokens, s.n_tokens,
             s.window, (int)kind);
    seq_init(&q, s);
    fill(&q, kind);
    struct rounded_seq b = {.q = rounded_copy(q.q, s.n_tokens * q.q_stride,
                                              1.0F / sqrtf((float)s.head_dim) * LOG2_E,
                                              BT_DTYPE_F32),
                            .k = rounded_copy(q.k, s.n_tokens * q.kv_stride, 1, s.dtype),
                            .v = rounded_copy(q.v, s.n_tokens * q.kv_stride, 1, s.dtype)};
    for (uint32_t t = 0; t < s.n_tokens; t++) {
        for (uint32_t h = 0; h < s.n_heads; h++) {
            definition(&q, &b, t, h, want + ((size_t)t * s.n_heads + h) * s.head_dim);
        }
    }
    for (int i = 0; i < p->n; i++) {
        bool slow = strncmp(p->isa[i], "plain", 5) == 0; /* one way of cutting is enough */
        for (uint32_t c = slow ? (uint32_t)i % 4 : 0, end = slow ? c + 1 : 4; c < end; c++) {
            memset(q.kv.base, 0xff, q.kv_bytes);
            for (uint32_t t = 0; t < s.n_tokens; t += chunks[c]) {
                uint32_t left = s.n_tokens - t;
                seq_chunk(p->k[i], &q, got, t, left < chunks[c] ? left : chunks[c]);
            }
            same(what, p, i, got, want, n);
        }
    }
    seq_fini(&q);
    bt_free(b.q);
    bt_free(b.k);
    bt_free(b.v);
    bt_free(want);
    bt_free(got);
}

/* Near double precision, softcap and f16 too, and the same bits everywhere. */
static void test_near(const struct pk *p, struct shape s)
{
    size_t n = (size_t)s.n_tokens * s.n_heads * s.head_dim;
    float *want = pk_floats(n, 0, 0), *got = pk_floats(n, 0, 0);
    double *ref = bt_alloc(n * sizeof(double));
    struct seq q;

    seq_init(&q, s);
    seq_reference(&q, ref);
    for (int i = 0; i < p->n; i++) {
        for (uint32_t t = 0, chunk; t < s.n_tokens; t += chunk) {
            chunk = s.n_tokens - t < 33 ? s.n_tokens - t : 33;
            seq_chunk(p->k[i], &q, i == 0 ? want : got, t, chunk);
        }
        if (i == 0) { /* values of up to 2, q, k, v and p each off by up to 2^-9 of theirs */
            pk_near("near", want, ref, n, 0.015, 0);
        } else {
            pk_same("near", p, i, got, want, n);
        }
    }
    seq_fini(&q);
    bt_free(want);
    bt_free(got);
    bt_free(ref);
}

int main(void)
{
    static const struct shape shapes[] = {
        {3, 1, 24, 1, 70, 0, BT_DTYPE_F32, 0},     {6, 2, 64, 16, 140, 0, BT_DTYPE_BF16, 0},
        {4, 1, 128, 16, 80, 0, BT_DTYPE_F32, 0},   {4, 2, 64, 16, 200, 50, BT_DTYPE_BF16, 0},
        {2, 2, 31, 64, 130, 1, BT_DTYPE_F32, 0},   {2, 1, 256, 5, 66, 7, BT_DTYPE_BF16, 0},
        {40, 1, 16, 16, 70, 0, BT_DTYPE_F32, 0},   {8, 4, 80, 16, 100, 0, BT_DTYPE_BF16, 0},
        {10, 5, 32, 16, 130, 40, BT_DTYPE_F32, 0}, {100, 100, 16, 16, 66, 0, BT_DTYPE_BF16, 0},
        {2, 1, 24, 3, 150, 64, BT_DTYPE_F32, 0},   {6, 2, 64, 16, 140, 0, BT_DTYPE_F8, 0},
        {4, 1, 128, 16, 80, 50, BT_DTYPE_F8, 0},   {2, 2, 31, 64, 130, 1, BT_DTYPE_F8, 0},
        {10, 5, 96, 16, 130, 40, BT_DTYPE_F8, 0},
    };
    static const struct shape near[] = {
        {8, 2, 80, 64, 140, 0, BT_DTYPE_F16, 30.0F}, {2, 2, 64, 64, 130, 1, BT_DTYPE_F32, 5.0F},
        {12, 6, 64, 32, 140, 0, BT_DTYPE_F16, 0},    {4, 2, 128, 16, 200, 0, BT_DTYPE_BF16, 0},
        {4, 2, 64, 16, 140, 0, BT_DTYPE_F8, 20.0F},
    };
    static const char *const classes[] = {"cpu-bf16", "cpu-int8"};
    struct pk p;

    for (size_t c = 0; c < 2; c++) {
        pk_open_as(&p, classes[c]);
        for (size_t i = 0; i < (c == 0 ? sizeof(shapes) / sizeof(shapes[0]) : 1); i++) {
            for (enum kind kind = ORDINARY; kind < KINDS; kind++) {
                struct shape other = shapes[i];
                test_shape(&p, other, kind);
                other.dtype = other.dtype == BT_DTYPE_F32 ? BT_DTYPE_BF16 : BT_DTYPE_F32;
                if (i < 2) {
                    test_shape(&p, other, kind);
                }
            }
        }
        for (size_t i = 0; i < sizeof(near) / sizeof(near[0]); i++) {
            test_near(&p, near[i]);
        }
        pk_close(&p);
    }
    return bt_test_done();
}
