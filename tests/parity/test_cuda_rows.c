/* The CUDA backend's row kernels against the CPU backend: the same bits where the class says so, close where a sum has
 * another order. Shapes are odd on purpose; gaps between rows must stay. */

#include "tests/parity/cuda_parity.h"

static const uint32_t widths[] = {1, 7, 24, 63, 576, 1000};
#define N_WIDTHS (sizeof(widths) / sizeof(widths[0]))

/* One call on both backends, on copies of x (n floats) and with z beside it; the CPU's result in want. */
#define ON_BOTH(p, x, z, n, n_z, want, got, call)                                                  \
    for (int side = 0; side < 2; side++) {                                                         \
        struct bt_kctx *k = side == 0 ? (p)->cpu : (p)->cuda;                                      \
        float *dx = cp_floats(k, x, n), *dz = cp_floats(k, z, n_z);                                \
        call;                                                                                      \
        cp_take(k, side == 0 ? (want) : (got), dx, n);                                             \
        bt_k_free(k, dz, (n_z) * sizeof(float));                                                   \
    }

static void test_rmsnorm(const struct cp *p, uint32_t m, uint32_t n_sub, uint32_t dim)
{
    size_t ld = (size_t)n_sub * dim + 5, n = m * ld;
    float *x = pk_floats(n, -3, 3), *w = pk_floats(dim, 0, 2), *want = pk_floats(n, 0, 0),
          *got = pk_floats(n, 0, 0), *alone = pk_floats(n, 0, 0);

    ON_BOTH(p, x, w, n, dim, want, got,
            bt_k_rmsnorm(k, dx, ld, dx, ld, dz, 1.0F, 1e-5F, m, n_sub, dim));
    cp_near("rmsnorm", got, want, n, 1e-7, 2e-6);
    ON_BOTH(
        p, x, w, n, dim, want, alone, for (uint32_t r = 0; r < m; r++) {
            bt_k_rmsnorm(k, dx + r * ld, ld, dx + r * ld, ld, dz, 1.0F, 1e-5F, 1, n_sub, dim);
        });
    cp_same("rmsnorm row by row", alone, got, n);
    bt_free(x);
    bt_free(w);
    bt_free(want);
    bt_free(got);
    bt_free(alone);
}

static void test_rope(const struct cp *p, uint32_t head_dim, uint32_t rot, bool interleaved)
{
    const uint32_t m = 5, heads = 3, half = rot / 2;
    size_t ld = (size_t)heads * head_dim + 1, n = m * ld;
    float *x = pk_floats(n, -3, 3), *c = pk_floats(m * half, -1, 1),
          *s = pk_floats(m * half, -1, 1), *want = pk_floats(n, 0, 0), *got = pk_floats(n, 0, 0);

    ON_BOTH(p, x, x, n, n, want, got,
            bt_k_rope(k, dx, ld, c, s, m, heads, head_dim, rot, interleaved));
    cp_same("rope", got, want, n);
    /* What was sent before is not taken for what lies at the same place now. */
    s[0] = c[m * half - 1] = 0.25F;
    ON_BOTH(p, x, x, n, n, want, got,
            bt_k_rope(k, dx, ld, c, s, m, heads, head_dim, rot, interleaved));
    cp_same("rope with other angles", got, want, n);
    bt_free(x);
    bt_free(c);
    bt_free(s);
    bt_free(want);
    bt_free(got);
}

static void test_values(const struct cp *p, uint32_t m, uint32_t cols)
{
    size_t ld = cols + 3, n = m * ld;
    float *x = pk_floats(n, -12, 12), *z = pk_floats(n, -2, 2), *want = pk_floats(n, 0, 0),
          *got = pk_floats(n, 0, 0);
    uint32_t rows[64];

    for (int act = 0; act < 3; act++) {
        ON_BOTH(p, x, z, n, n, want, got,
                bt_k_glu(k, dx, ld, dx, ld, dz, ld, m, cols, (enum bt_k_act)act));
        cp_same("glu", got, want, n);
    }
    ON_BOTH(p, x, z, n, n, want, got, bt_k_add(k, dx, ld, dz, ld, m, cols));
    cp_same("add", got, want, n);
    ON_BOTH(p, x, z, n, n, want, got, bt_k_softcap(k, dx, ld, 5.0F, m, cols));
    cp_same("softcap", got, want, n);
    for (uint32_t i = 0; i < m; i++) {
        rows[i] = (i * 7 + 3) % m;
    }
    ON_BOTH(p, x, z, n, n, want, got, bt_k_gather_rows(k, dx, ld, dz, ld, rows, m, cols));
    cp_same("gather", got, want, n);
    bt_free(x);
    bt_free(z);
    bt_free(want);
    bt_free(got);
}

/* exp, tanh and erf at all magnitudes and at the ends. */
static void test_functions(const struct cp *p)
{
    const uint32_t n = 1 << 12;
    float *x = pk_floats(n, 0, 0), *one = pk_floats(n, 1, 1), *want = pk_floats(n, 0, 0),
          *got = pk_floats(n, 0, 0);
    static const float ends[] = {-INFINITY, -1e30F, -200,  -104.5F, -88,   -1e-40F,  -0.0F,  0,
                                 1e-40F,    88,     89.5F, 104,     1e30F, INFINITY, 0.625F, 4.0F};

    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits = 0x30000000U + i * ((0x43000000U - 0x30000000U) / n) + (i & 1) * 0x80000000U;
        memcpy(&x[i], &bits, 4);
    }
    memcpy(x, ends, sizeof(ends));
    for (int act = 0; act < 3; act++) {
        ON_BOTH(p, x, one, n, n, want, got,
                bt_k_glu(k, dx, n, dx, n, dz, n, 1, n, (enum bt_k_act)act));
        for (uint32_t i = 0; i < n; i++) {
            if (isnan(want[i]) && isnan(got[i])) {
                got[i] = want[i]; /* which NaN is not said */
            }
        }
        cp_same("activations", got, want, n);
    }
    ON_BOTH(p, x, one, n, n, want, got, bt_k_softcap(k, dx, n, 1.0F, 1, n));
    cp_same("tanh", got, want, n);
    bt_free(x);
    bt_free(one);
    bt_free(want);
    bt_free(got);
}

struct experts {
    struct bt_kweight *w[3][16];
    struct bt_k_moe moe;
};

static void open_experts(struct bt_kctx *k, struct experts *x, const float *values,
                         uint32_t n_experts, uint32_t top_k, bool normalize, uint32_t dim,
                         uint32_t ffn)
{
    for (uint32_t j = 0; j < 3 * n_experts; j++) {
        struct bt_k_weight_desc d = {.dtype = j % 5 == 4 ? BT_DTYPE_BF16 : BT_DTYPE_F32,
                                     .n_rows = j / n_experts == 2 ? dim : ffn,
                                     .n_cols = j / n_experts == 2 ? ffn : dim,
                                     .data = values + (size_t)j * dim * ffn,
                                     .for_gemm = true};
        CHECK_EQ(bt_k_weight_create(k, &d, &x->w[j / n_experts][j % n_experts], NULL), BT_OK);
    }
    x->moe = (struct bt_k_moe){.n_experts = n_experts,
                               .top_k = top_k,
                               .normalize = normalize,
                               .act = BT_K_SILU,
                               .gate = x->w[0],
                               .up = x->w[1],
                               .down = x->w[2],
                               .dim = dim,
                               .ffn_dim = ffn};
}

/* Some experts have bf16 weights: one product, several types. */
static void test_moe(const struct cp *p, uint32_t m, uint32_t n_experts, uint32_t top_k,
                     bool normalize)
{
    const uint32_t dim = 40, ffn = 24;
    float *x = pk_floats(m * dim, -1, 1), *logits = pk_floats(m * n_experts, -3, 3);
    float *w = pk_floats((size_t)3 * n_experts * dim * ffn, -1, 1);
    float *want = pk_floats(m * dim, 0, 0), *got = pk_floats(m * dim, 0, 0),
          *alone = pk_floats(m * dim, 0, 0);

    for (size_t i = 0; i < (size_t)3 * n_experts * dim * ffn; i++) { /* as bf16: finite, ordinary */
        uint16_t h[2] = {(uint16_t)(0x3e00 + pk_u32() % 256 + (pk_u32() & 0x8000)),
                         (uint16_t)(0x3e00 + pk_u32() % 256 + (pk_u32() & 0x8000))};
        memcpy(&w[i], h, 4);
    }
    logits[0] = logits[1]; /* a tie */
    for (int side = 0; side < 2; side++) {
        struct bt_kctx *k = side == 0 ? p->cpu : p->cuda;
        struct experts e;
        open_experts(k, &e, w, n_experts, top_k, normalize, dim, ffn);
        float *dx = cp_floats(k, x, m * dim), *dl = cp_floats(k, logits, m * n_experts),
              *dy = cp_floats(k, x, m * dim);
        CHECK_EQ(bt_k_moe_reserve(k, &e.moe, m), BT_OK);
        bt_k_moe_ffn(k, dy, dx, dl, &e.moe, m);
        bt_k_read(k, side == 0 ? want : got, dy, m * dim * sizeof(float));
        for (uint32_t r = 0; r < m; r++) {
            bt_k_moe_ffn(k, dy + r * dim, dx + r * dim, dl + r * n_experts, &e.moe, 1);
        }
        cp_take(k, alone, dy, m * dim);
        CHECK_EQ(bt_k_sync(k), BT_OK);
        bt_k_free(k, dx, m * dim * sizeof(float));
        bt_k_free(k, dl, (size_t)m * n_experts * sizeof(float));
        for (uint32_t j = 0; j < 3 * n_experts; j++) {
            bt_k_weight_destroy(k, e.w[j / n_experts][j % n_experts]);
        }
    }
    cp_near("moe", got, want, m * dim, 2e-6, 4e-6);
    cp_same("moe row by row", alone, got, m * dim);
    bt_free(x);
    bt_free(logits);
    bt_free(w);
    bt_free(want);
    bt_free(got);
    bt_free(alone);
}

int main(void)
{
    struct cp p;

    cp_open(&p);
    for (size_t i = 0; i < N_WIDTHS; i++) {
        test_rmsnorm(&p, 1, 1, widths[i]);
        test_rmsnorm(&p, 9, 3, widths[i]);
        test_values(&p, 1, widths[i]);
        test_values(&p, 33, widths[i]);
    }
    for (int inter = 0; inter < 2; inter++) {
        test_rope(&p, 24, 24, inter != 0);
        test_rope(&p, 80, 32, inter != 0);
        test_rope(&p, 128, 128, inter != 0);
    }
    test_functions(&p);
    test_moe(&p, 1, 8, 2, true);
    test_moe(&p, 20, 8, 3, false);
    test_moe(&p, 70, 16, 4, true);
    test_moe(&p, 520, 3, 1, true); /* more than one round */
    cp_close(&p);
    return bt_test_done();
}
