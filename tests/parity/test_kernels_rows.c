/* Everything that works row by row, and the expert mixture: equal bits on every instruction set and thread count, rows
 * independent of each other, and errors against double precision. */

#include "tests/parity/kernel_parity.h"

static const uint32_t widths[] = {1, 7, 16, 24, 63, 576, 1000};
#define N_WIDTHS (sizeof(widths) / sizeof(widths[0]))

/* Runs `call` on a copy of src for each context; got must equal the first one's. */
#define FOR_ALL(what, p, src, count, want, got, call)                                              \
    for (int i = 0; i < (p)->n; i++) {                                                             \
        struct bt_kctx *k = (p)->k[i];                                                             \
        float *y = i == 0 ? (want) : (got);                                                        \
        memcpy(y, src, (count) * sizeof(float));                                                   \
        call;                                                                                      \
        if (i > 0) {                                                                               \
            pk_same(what, p, i, y, want, count);                                                   \
        }                                                                                          \
    }

static void test_rmsnorm(const struct pk *p, uint32_t m, uint32_t n_sub, uint32_t dim)
{
    size_t ld = (size_t)n_sub * dim + 5, n = m * ld;
    float *x = pk_floats(n, -3, 3), *w = pk_floats(dim, 0, 2), *want = pk_floats(n, 0, 0),
          *got = pk_floats(n, 0, 0);
    double *ref = bt_alloc(n * sizeof(double));

    FOR_ALL("rmsnorm", p, x, n, want, got,
            bt_k_rmsnorm(k, y, ld, x, ld, w, 1.0F, 1e-5F, m, n_sub, dim));
    FOR_ALL("rmsnorm in place", p, x, n, got, got,
            bt_k_rmsnorm(k, y, ld, y, ld, w, 1.0F, 1e-5F, m, n_sub, dim));
    pk_same("rmsnorm in place", p, 0, got, want, n);
    for (uint32_t r = 0; r < m; r++) {
        for (uint32_t i = 0; i < ld; i++) {
            ref[r * ld + i] = (double)x[r * ld + i];
        }
        for (uint32_t s = 0; s < n_sub; s++) {
            double ss = 0;
            for (uint32_t i = 0; i < dim; i++) {
                ss += ref[r * ld + s * dim + i] * ref[r * ld + s * dim + i];
            }
            for (uint32_t i = 0; i < dim; i++) {
                ref[r * ld + s * dim + i] *= (1 + (double)w[i]) / sqrt(ss / dim + 1e-5);
            }
        }
    }
    pk_near("rmsnorm", want, ref, n, 1e-7, 6e-7);
    bt_free(x);
    bt_free(w);
    bt_free(want);
    bt_free(got);
    bt_free(ref);
}

static void test_rope(const struct pk *p, uint32_t head_dim, uint32_t rot, bool interleaved)
{
    const uint32_t m = 5, heads = 3, half = rot / 2;
    size_t ld = (size_t)heads * head_dim + 1, n = m * ld;
    float *x = pk_floats(n, -3, 3), *c = pk_floats(m * half, -1, 1),
          *s = pk_floats(m * half, -1, 1);
    float *want = pk_floats(n, 0, 0), *got = pk_floats(n, 0, 0);
    double *ref = bt_alloc(n * sizeof(double));

    FOR_ALL("rope", p, x, n, want, got,
            bt_k_rope(k, y, ld, c, s, m, heads, head_dim, rot, interleaved));
    for (size_t i = 0; i < n; i++) {
        ref[i] = (double)x[i];
    }
    for (uint32_t r = 0; r < m; r++) {
        for (uint32_t h = 0; h < heads; h++) {
            for (uint32_t i = 0; i < half; i++) {
                size_t o = r * ld + h * head_dim;
                size_t a = o + (interleaved ? 2 * i : i),
                       b = o + (interleaved ? 2 * i + 1 : i + half);
                double co = (double)c[r * half + i], si = (double)s[r * half + i];
                ref[a] = (double)x[a] * co - (double)x[b] * si;
                ref[b] = (double)x[b] * co + (double)x[a] * si;
            }
        }
    }
    pk_near("rope", want, ref, n, 1e-6, 1e-7);
    bt_free(x);
    bt_free(c);
    bt_free(s);
    bt_free(want);
    bt_free(got);
    bt_free(ref);
}

static double act_ref(double x, enum bt_k_act act)
{
    switch (act) {
    case BT_K_SILU:
        return x / (1 + exp(-x));
    case BT_K_GELU_TANH:
        return 0.5 * x * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
    default:
        return 0.5 * x * (1 + erf(x * sqrt(0.5)));
    }
}

static void test_glu(const struct pk *p, uint32_t m, uint32_t cols, enum bt_k_act act)
{
    size_t ld = cols + 2, n = m * ld;
    float *g = pk_floats(n, -12, 12), *u = pk_floats(n, -2, 2), *want = pk_floats(n, 0, 0),
          *got = pk_floats(n, 0, 0);
    double *ref = bt_alloc(n * sizeof(double));

    FOR_ALL("glu", p, g, n, want, got, bt_k_glu(k, y, ld, y, ld, u, ld, m, cols, act));
    for (size_t i = 0; i < n; i++) {
        ref[i] = i % ld < cols ? act_ref((double)g[i], act) * (double)u[i] : (double)g[i];
    }
    /* gelu's 1 + erf cancels for large negative x: absolute error there */
    pk_near("glu", want, ref, n, act == BT_K_SILU ? 1e-9 : 1e-6, 1e-6);
    bt_free(g);
    bt_free(u);
    bt_free(want);
    bt_free(got);
    bt_free(ref);
}

static void test_small_ops(const struct pk *p, uint32_t m, uint32_t cols)
{
    size_t ld = cols + 3, n = m * ld;
    float *x = pk_floats(n, -50, 50), *z = pk_floats(n, -2, 2), *want = pk_floats(n, 0, 0),
          *got = pk_floats(n, 0, 0);
    uint32_t rows[64];

    FOR_ALL("add", p, x, n, want, got, bt_k_add(k, y, ld, z, ld, m, cols));
    CHECK_NEAR(want[cols - 1], x[cols - 1] + z[cols - 1], 0);
    CHECK_NEAR(want[cols], x[cols], 0);
    FOR_ALL("softcap", p, x, n, want, got, bt_k_softcap(k, y, ld, 30.0F, m, cols));
    CHECK_NEAR(want[cols - 1], 30 * tanh((double)x[cols - 1] / 30), 6e-6);
    for (uint32_t i = 0; i < m; i++) {
        rows[i] = (i * 7 + 3) % m;
    }
    FOR_ALL("gather", p, z, n, want, got, bt_k_gather_rows(k, y, ld, x, ld, rows, m, cols));
    CHECK_NEAR(want[(m - 1) * ld], x[rows[m - 1] * ld], 0);
    bt_free(x);
    bt_free(z);
    bt_free(want);
    bt_free(got);
}

/* The functions behind the activations, over their whole range, in units of the last place. */
static void test_functions(const struct pk *p)
{
    const uint32_t n = 1 << 16;
    float *x = pk_floats(n, 0, 0), *one = pk_floats(n, 1, 1), *want = pk_floats(n, 0, 0),
          *got = pk_floats(n, 0, 0);
    double worst = 0;

    for (uint32_t i = 0; i < n; i++) { /* tanh by softcap of 1, all magnitudes */
        uint32_t bits = 0x30000000U + i * ((0x42000000U - 0x30000000U) / n) + (i & 1) * 0x80000000U;
        memcpy(&x[i], &bits, 4);
    }
    FOR_ALL("tanh", p, x, n, want, got, bt_k_softcap(k, y, n, 1.0F, 1, n));
    for (uint32_t i = 0; i < n; i++) {
        double t = tanh((double)x[i]);
        double ulp = ldexp(1, ilogb(t) - 23), e = fabs((double)want[i] - t) / ulp;
        worst = e > worst ? e : worst;
    }
    printf("tanh: %.2f ulp\n", worst);
    CHECK(worst < 2.0);

    for (uint32_t i = 0; i < n; i++) {
        x[i] = -90.0F + 180.0F * (float)i / (float)n;
    }
    FOR_ALL("silu", p, x, n, want, got, bt_k_glu(k, y, n, y, n, one, n, 1, n, BT_K_SILU));
    worst = 0;
    for (uint32_t i = 0; i < n; i++) {
        double t = act_ref((double)x[i], BT_K_SILU),
               ulp = ldexp(1, t < 0 || t > 0 ? ilogb(t) - 23 : -149);
        double e = (double)x[i] < -87.0 ? 0 : fabs((double)want[i] - t) / ulp;
        worst = e > worst ? e : worst;
    }
    printf("silu: %.2f ulp\n", worst);
    CHECK(worst < 4.0);
    /* ends of the range */
    const float special[16] = {-INFINITY, -1e30F, -200, -104, -88, -1e-40F,
                               0,         1e-40F, 88,   104,  200, 1e30F};
    FOR_ALL("silu at the ends", p, special, 16, want, got,
            bt_k_glu(k, y, 16, y, 16, one, 16, 1, 16, BT_K_SILU));
    CHECK(fabsf(want[2]) < 1e-30F && want[10] > 199.9F && want[11] > 9.9e29F);
    bt_free(x);
    bt_free(one);
    bt_free(want);
    bt_free(got);
}

/* Every result of rounding to f8, against the definition: nearest, ties to even, at most 448; and NaN. */
static void test_rounding_f8(const struct pk *p)
{
    const uint32_t n = 4096, dim = 64;
    float *x = pk_floats(n, 0, 0);
    uint32_t page = 0;
    struct bt_k_span span = {.n = n / dim, .pages = &page};
    struct bt_k_kv kv = {.page_stride = 2 * (size_t)n,
                         .page_tokens = n / dim,
                         .n_kv_heads = 1,
                         .head_dim = dim,
                         .dtype = BT_DTYPE_F8};

    kv.base = bt_alloc(2 * n);
    for (uint32_t round = 0; round < 16; round++) {
        for (uint32_t i = 0; i < n; i++) {
            uint32_t bits = pk_u32();
            if (round % 2 == 0) { /* around ties, and near the ends of what there is */
                bits = (bits & 0xfff00000U) + 0x80000 + pk_u32() % 3 - 1;
                bits = (bits & 0x80ffffffU) | (0x3aU + pk_u32() % 11) << 24;
            }
            memcpy(&x[i], &bits, 4);
        }
        for (int i = 0; i < p->n; i++) {
            uint8_t *d = kv.base;
            memset(d, 0x55, 2 * n);
            bt_k_kv_store(p->k[i], &kv, x, dim, x, dim, &span, 1);
            CHECK(memcmp(d, d + n, n) == 0);
            for (uint32_t j = 0; j < n; j++) {
                const uint32_t e = d[j] >> 3 & 15, m = d[j] & 7;
                const double a = fabs((double)x[j]),
                             unit = ldexp(1, a >= 0x1p-6 && a <= 448 ? ilogb(a) - 3 : -9);
                const double want = a > 448 ? 448 : rint(a / unit) * unit,
                             got = e == 0 ? m * 0x1p-9 : ldexp(8 + m, (int)e - 10);
                if (isnan(x[j])) {
                    CHECK_EQ(d[j] & 0x7f, 0x7f);
                } else if (got < want || got > want || (d[j] >> 7 != 0) != (signbit(x[j]) != 0)) {
                    fprintf(stderr, "%s: %a\n", p->isa[i], (double)x[j]);
                    CHECK_NEAR(got, want, 0);
                    break;
                }
            }
        }
    }
    bt_free(kv.base);
    bt_free(x);
}

/* Every f16 and bf16 result of rounding, against the definition: nearest, ties to even. */
static void test_rounding(const struct pk *p, enum bt_dtype t)
{
    const uint32_t n = 4096, dim = 64;
    float *x = pk_floats(n, 0, 0), *v = pk_floats(n, 0, 0);
    uint32_t page = 0;
    uint16_t *want = NULL, *got = NULL;
    struct bt_k_span span = {.n = n / dim, .pages = &page};
    struct bt_k_kv kv = {.page_stride = 4 * (size_t)n,
                         .page_tokens = n / dim,
                         .n_kv_heads = 1,
                         .head_dim = dim,
                         .dtype = t};

    for (uint32_t round = 0; round < 16; round++) {
        for (uint32_t i = 0; i < n; i++) {
            uint32_t bits = pk_u32();
            if (round % 2 == 0) { /* around ties */
                bits =
                    (bits & 0xfffff000U) + (t == BT_DTYPE_F16 ? 0x1000 : 0x8000) + pk_u32() % 3 - 1;
                bits = (bits & 0x8fffffffU) | 0x30000000U;
            }
            if ((bits & 0x7f800000U) == 0x7f800000U) {
                bits &= 0xff800000U; /* infinities; no NaN */
            }
            memcpy(&x[i], &bits, 4);
        }
        for (int i = 0; i < p->n; i++) {
            uint16_t *d = bt_calloc(2 * n, 2);
            kv.base = d;
            bt_k_kv_store(p->k[i], &kv, x, dim, v, dim, &span, 1);
            if (i == 0) {
                want = d;
            } else {
                got = d;
                CHECK(memcmp(got, want, 4 * (size_t)n) == 0);
                bt_free(got);
            }
        }
        for (uint32_t i = 0; i < n && t == BT_DTYPE_BF16; i++) {
            uint32_t bits;
            memcpy(&bits, &x[i], 4);
            uint64_t down = bits >> 16, rest = bits & 0xffff;
            uint64_t up = rest > 0x8000 || (rest == 0x8000 && (down & 1)) ? down + 1 : down;
            if (want[i] != up) {
                CHECK_EQ(want[i], up);
                break;
            }
        }
        for (uint32_t i = 0; i < n && t == BT_DTYPE_F16; i++) {
            double a = fabs((double)x[i]);
            int e = a < 0x1p-14 ? -24 : ilogb(a) - 10;
            double r = rint(ldexp(a, -e)); /* units of the last place */
            double h = a >= 65520 ? INFINITY : ldexp(r, e);
            uint32_t g = want[i] & 0x7fffU;
            double gv = g >= 0x7c00 ? INFINITY
                        : g < 0x400 ? ldexp(g, -24)
                                    : ldexp(1024 + (g & 1023), (int)(g >> 10) - 25);
            if (gv < h || gv > h || (want[i] >> 15 != 0) != (signbit(x[i]) != 0)) {
                CHECK_NEAR(gv, h, 0);
                break;
            }
        }
        bt_free(want);
    }
    bt_free(x);
    bt_free(v);
}

static void test_moe(const struct pk *p, uint32_t m, uint32_t n_experts, uint32_t top_k,
                     bool normalize)
{
    const uint32_t dim = 40, ffn = 24;
    float *x = pk_floats(m * dim, -1, 1), *logits = pk_floats(m * n_experts, -3, 3);
    float *w = pk_floats((size_t)3 * n_experts * dim * ffn, -1, 1);
    float *want = pk_floats(m * dim, 0, 0), *got = pk_floats(m * dim, 0, 0);
    double *ref = bt_calloc(m * dim, sizeof(double));

    logits[0] = logits[1]; /* a tie */
    for (int i = 0; i < p->n; i++) {
        struct bt_kweight *ws[3][16];
        for (uint32_t j = 0; j < 3 * n_experts; j++) {
            struct bt_k_weight_desc d = {.dtype = BT_DTYPE_F32,
                                         .n_rows = j / n_experts == 2 ? dim : ffn,
                                         .n_cols = j / n_experts == 2 ? ffn : dim,
                                         .data = w + (size_t)j * dim * ffn,
                                         .for_gemm = true};
            CHECK_EQ(bt_k_weight_create(p->k[i], &d, &ws[j / n_experts][j % n_experts], NULL),
                     BT_OK);
        }
        struct bt_k_moe moe = {.n_experts = n_experts,
                               .top_k = top_k,
                               .normalize = normalize,
                               .act = BT_K_SILU,
                               .gate = ws[0],
                               .up = ws[1],
                               .down = ws[2],
                               .dim = dim,
                               .ffn_dim = ffn};
        float *y = i == 0 ? want : got;
        bt_k_moe_ffn(p->k[i], y, x, logits, &moe, m);
        pk_same("moe", p, i, y, want, m * dim);
        for (uint32_t r = 0; r < m; r++) { /* row by row: the same */
            bt_k_moe_ffn(p->k[i], got + r * dim, x + r * dim, logits + r * n_experts, &moe, 1);
        }
        pk_same("moe alone", p, i, got, want, m * dim);
        CHECK_EQ(bt_k_sync(p->k[i]), BT_OK);
        for (uint32_t j = 0; j < 3 * n_experts; j++) {
            bt_k_weight_destroy(p->k[i], ws[j / n_experts][j % n_experts]);
        }
    }
    for (uint32_t r = 0; r < m; r++) {
        double prob[16], total = 0, chosen = 0;
        bool used[16] = {false};
        for (uint32_t e = 0; e < n_experts; e++) {
            prob[e] = exp((double)logits[r * n_experts + e]);
            total += prob[e];
        }
        for (uint32_t pass = 0; pass < 2; pass++) {
            memset(used, 0, sizeof(used));
            for (uint32_t t = 0; t < top_k; t++) {
                uint32_t best = n_experts;
                for (uint32_t e = 0; e < n_experts; e++) {
                    best = !used[e] && (best == n_experts || prob[e] > prob[best]) ? e : best;
                }
                used[best] = true;
                chosen += pass == 0 ? prob[best] : 0;
                for (uint32_t f = 0; f < ffn && pass == 1; f++) {
                    double g = 0, u = 0;
                    for (uint32_t i = 0; i < dim; i++) {
                        g += (double)x[r * dim + i] * (double)w[((size_t)best * ffn + f) * dim + i];
                        u += (double)x[r * dim + i] *
                             (double)w[((size_t)(n_experts + best) * ffn + f) * dim + i];
                    }
                    double h =
                        act_ref(g, BT_K_SILU) * u * prob[best] / (normalize ? chosen : total);
                    for (uint32_t i = 0; i < dim; i++) {
                        ref[r * dim + i] +=
                            h * (double)w[((size_t)(2 * n_experts + best) * dim + i) * ffn + f];
                    }
                }
            }
        }
    }
    pk_near("moe", want, ref, m * dim, 2e-5, 2e-6);
    bt_free(x);
    bt_free(logits);
    bt_free(w);
    bt_free(want);
    bt_free(got);
    bt_free(ref);
}

int main(void)
{
    struct pk p;

    pk_open(&p);
    for (size_t i = 0; i < N_WIDTHS; i++) {
        test_rmsnorm(&p, 1, 1, widths[i]);
        test_rmsnorm(&p, 40, 3, widths[i]);
        for (int act = 0; act < 3; act++) {
            test_glu(&p, 1, widths[i], (enum bt_k_act)act);
            test_glu(&p, 33, widths[i], (enum bt_k_act)act);
        }
        test_small_ops(&p, 1, widths[i]);
        test_small_ops(&p, 64, widths[i]);
    }
    for (int inter = 0; inter < 2; inter++) {
        test_rope(&p, 24, 24, inter != 0);
        test_rope(&p, 64, 64, inter != 0);
        test_rope(&p, 80, 32, inter != 0);
        test_rope(&p, 128, 128, inter != 0);
    }
    test_functions(&p);
    test_rounding(&p, BT_DTYPE_F16);
    test_rounding(&p, BT_DTYPE_BF16);
    test_rounding_f8(&p);
    test_moe(&p, 1, 8, 2, true);
    test_moe(&p, 50, 8, 3, false);
    test_moe(&p, 300, 16, 4, true);
    pk_close(&p);
    return bt_test_done();
}
