/* The tile operation of tensor cores against plain sums, with what brings it its operands; and that an output depends on its
 * row, its column and what was there, on nothing else, which the numerics class cuda-bf16 takes for granted. In an emulated
 * build, that the emulation tells of broken rules. */

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/float16.h"
#include "tests/parity/cuda_parity.h"
#include "tests/parity/cuda_tile_kernels_int.h"

static uint16_t number16(float v, bool bf16)
{
    return bf16 ? bt_f32_to_bf16(v) : bt_f32_to_f16(v);
}

static float value16(uint16_t v, bool bf16)
{
    return bf16 ? bt_bf16_to_f32(v) : bt_f16_to_f32(v);
}

struct operands {
    uint16_t a[16][16], b[16][8];
    float c[16][8];
};

static void multiply(struct cuda_ctx *c, const struct operands *o, bool bf16, float out[16][8])
{
    struct bt_kctx *k = &c->base;
    uint16_t *a = cp_put(k, o->a, sizeof(o->a)), *b = cp_put(k, o->b, sizeof(o->b));
    float *from = cp_put(k, o->c, sizeof(o->c)), *d = bt_k_alloc(k, sizeof(o->c));

    tile_test_multiply(c, d, a, b, from, bf16);
    cp_take(k, &out[0][0], d, 128);
    bt_k_free(k, a, sizeof(o->a));
    bt_k_free(k, b, sizeof(o->b));
    bt_k_free(k, from, sizeof(o->c));
}

static void test_multiply(struct cuda_ctx *c, bool bf16)
{
    struct operands o;
    float got[16][8];
    double want[128], size = 0;

    for (uint32_t i = 0; i < 16; i++) {
        for (uint32_t j = 0; j < 16; j++) {
            o.a[i][j] = number16(pk_uniform(-2, 2), bf16);
            o.b[i][j % 8] = number16(pk_uniform(-2, 2), bf16);
            o.c[i][j % 8] = pk_uniform(-8, 8);
        }
    }
    for (uint32_t i = 0; i < 128; i++) {
        double sum = (double)o.c[i / 8][i % 8], most = fabs(sum);
        for (uint32_t k = 0; k < 16; k++) {
            double p = (double)value16(o.a[i / 8][k], bf16) * (double)value16(o.b[k][i % 8], bf16);
            sum += p;
            most += fabs(p);
        }
        want[i] = sum;
        size = most > size ? most : size;
    }
    multiply(c, &o, bf16, got);
    pk_near(bf16 ? "bf16" : "f16", &got[0][0], want, 128, size * 4e-7, 0);
}

/* One row of a, one column of b and one c, wherever they are and whatever is beside them. */
static void test_independence(struct cuda_ctx *c, bool bf16)
{
    struct operands o;
    uint16_t row[16], col[16];
    float got[16][8], first = 0;

    for (uint32_t k = 0; k < 16; k++) {
        row[k] = number16(pk_uniform(-2, 2), bf16);
        col[k] = number16(pk_uniform(-2, 2), bf16);
    }
    for (uint32_t i = 0; i < 128; i++) {
        uint32_t m = i / 8, n = i % 8;
        for (uint32_t j = 0; j < 256; j++) { /* neighbours: zeros, or large */
            o.a[j / 16][j % 16] = number16(i % 3 == 0 ? 0 : pk_uniform(-900, 900), bf16);
            o.b[j / 16][j % 8] = number16(i % 3 == 1 ? 0 : pk_uniform(-900, 900), bf16);
            o.c[j / 16][j % 8] = pk_uniform(-1e6F, 1e6F);
        }
        for (uint32_t k = 0; k < 16; k++) {
            o.a[m][k] = row[k];
            o.b[k][n] = col[k];
        }
        o.c[m][n] = 0.37F;
        multiply(c, &o, bf16, got);
        first = i == 0 ? got[m][n] : first;
        CHECK(memcmp(&first, &got[m][n], sizeof(float)) == 0);
        memset(o.a[m], 0, sizeof(o.a[m]));
        o.c[m][n] = 0x1.fffffep-3F;
        multiply(c, &o, bf16, got);
        CHECK(memcmp(&o.c[m][n], &got[m][n], sizeof(float)) == 0); /* products that are zero */
    }
}

static void test_load(struct cuda_ctx *c)
{
    struct bt_kctx *k = &c->base;
    uint16_t m[4][8][8];
    uint32_t out[32][4];

    for (uint32_t i = 0; i < 256; i++) {
        m[i / 64][i / 8 % 8][i % 8] = (uint16_t)(i * 257);
    }
    for (int transposed = 0; transposed < 2; transposed++) {
        uint16_t *from = cp_put(k, m, sizeof(m));
        uint32_t *dev = bt_k_alloc(k, sizeof(out));
        tile_test_load(c, dev, from, transposed);
        bt_k_read(k, out, dev, sizeof(out));
        for (uint32_t l = 0; l < 32; l++) {
            for (uint32_t i = 0; i < 4; i++) {
                uint32_t g = l / 4, t = l % 4, low = transposed ? m[i][2 * t][g] : m[i][g][2 * t],
                         high = transposed ? m[i][2 * t + 1][g] : m[i][g][2 * t + 1];
                CHECK_EQ(out[l][i], low | high << 16);
            }
        }
        bt_k_free(k, from, sizeof(m));
        bt_k_free(k, dev, sizeof(out));
    }
}

static void test_xor(struct cuda_ctx *c)
{
    float from[32], out[32];

    for (uint32_t i = 0; i < 32; i++) {
        from[i] = (float)i * 1.5F;
    }
    for (uint32_t mask = 0; mask < 32; mask += 3) {
        float *in = cp_floats(&c->base, from, 32), *dev = bt_k_alloc(&c->base, sizeof(out));
        tile_test_xor(c, dev, in, mask);
        cp_take(&c->base, out, dev, 32);
        bt_k_free(&c->base, in, sizeof(from));
        for (uint32_t i = 0; i < 32; i++) {
            CHECK(out[i] == from[i ^ mask]);
        }
    }
}

static void test_copy(struct cuda_ctx *c)
{
    enum { N = 128 };
    struct bt_kctx *k = &c->base;
    uint32_t from[N][4], keep[N], out[N][4];

    for (uint32_t i = 0; i < N; i++) {
        keep[i] = i % 5 != 2;
        for (uint32_t j = 0; j < 4; j++) {
            from[i][j] = pk_u32() | 1;
        }
    }
    for (uint32_t n = 32; n <= N; n += 32) {
        uint32_t *df = cp_put(k, from, sizeof(from)), *dk = cp_put(k, keep, sizeof(keep)),
                 *dev = bt_k_alloc(k, sizeof(out));
        tile_test_copy(c, dev, df, dk, n);
        bt_k_read(k, out, dev, sizeof(out));
        for (uint32_t i = 0; i < n * 4; i++) {
            CHECK_EQ(out[i / 4][i % 4], keep[i / 4] ? from[i / 4][i % 4] : 0);
        }
        bt_k_free(k, df, sizeof(from));
        bt_k_free(k, dk, sizeof(keep));
        bt_k_free(k, dev, sizeof(out));
    }
}

#ifdef BT_CUDA_EMULATED
/* In a process of its own: it ends there, with these words. */
static void test_fault(struct cuda_ctx *c, enum tile_fault fault, const char *words)
{
    int fd[2], status = 0;
    char text[1024];
    size_t n = 0;
    ssize_t got;

    CHECK_EQ(pipe(fd), 0);
    (void)fflush(stdout);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        (void)dup2(fd[1], 2);
        (void)signal(SIGABRT, SIG_DFL);
        float *out = bt_k_alloc(&c->base, 4096);
        tile_test_fault(c, fault, out);
        enum bt_status st = bt_k_sync(&c->base); /* nothing in a stream is done before */
        (void)st;
        _exit(0);
    }
    (void)close(fd[1]);
    while (n + 1 < sizeof(text) && (got = read(fd[0], text + n, sizeof(text) - 1 - n)) > 0) {
        n += (size_t)got;
    }
    text[n] = 0;
    (void)close(fd[0]);
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(!WIFEXITED(status) || WEXITSTATUS(status) != 0);
    CHECK(strstr(text, words) != NULL && strstr(text, "break_rule") != NULL);
    if (strstr(text, words) == NULL) {
        fprintf(stderr, "fault %d: \"%s\", not \"%s\"\n", (int)fault, text, words);
    }
}

static void test_faults(struct cuda_ctx *c)
{
    static const char *const words[TILE_FAULTS] = {
        [TILE_LANE_MISSING] = "warp operation that not all lanes reach",
        [TILE_OTHER_OPERATION] = "another operation",
        [TILE_BARRIER_IN_BRANCH] = "not all",
        [TILE_COPY_READ_EARLY] = "copy in flight",
        [TILE_COPY_NO_BARRIER] = "before the next barrier",
        [TILE_COPY_LEFT] = "ends while copies",
        [TILE_NO_WARP_SYNC] = "before the next barrier",
        [TILE_ROW_ODD] = "16-byte aligned",
    };

    for (int f = 0; f < TILE_FAULTS; f++) {
        test_fault(c, (enum tile_fault)f, words[f]);
    }
}
#endif

int main(void)
{
    struct cp p;

    cp_open_as(&p, "cuda-bf16");
    struct cuda_ctx *c = cuda_of(p.cuda);
    for (int bf16 = 0; bf16 < 2; bf16++) {
        test_multiply(c, bf16);
        test_independence(c, bf16);
    }
    test_load(c);
    test_xor(c);
    test_copy(c);
#ifdef BT_CUDA_EMULATED
    test_faults(c);
#endif
    cp_close(&p);
    return bt_test_done();
}
