#ifndef BT_TESTS_PARITY_CUDA_PARITY_H
#define BT_TESTS_PARITY_CUDA_PARITY_H

/* What the parity tests of the CUDA backend share: a context of each backend, and arrays that exist in both memories. The
 * tests reach device memory through the backend's table only, so that they run on a device as on the emulation. */

#include "kernels/open.h"
#include "tests/parity/kernel_parity.h"

struct cp {
    struct bt_kctx *cpu, *cuda;
};

/* numerics: the CUDA class; NULL: its first. Leaves the program (77: skipped) where there is no device. */
static inline void cp_open_as(struct cp *p, const char *numerics)
{
    const struct bt_k_opts o = {.n_threads = 1}, cuda = {.numerics = numerics};
    struct bt_err err = {0};
    enum bt_status st = bt_k_create("cuda", &cuda, &p->cuda, &err);

    if (st == BT_ERR_UNSUPPORTED) {
        printf("skipped: %s\n", err.msg);
        exit(77);
    }
    if (st != BT_OK || bt_k_create("cpu", &o, &p->cpu, &err) != BT_OK) {
        fprintf(stderr, "%s\n", err.msg);
        exit(1);
    }
    printf("%s, %s; %s\n", bt_k_describe(p->cuda), bt_k_numerics(p->cuda), bt_k_describe(p->cpu));
}

static inline void cp_open(struct cp *p)
{
    cp_open_as(p, NULL);
}

static inline void cp_close(struct cp *p)
{
    CHECK_EQ(bt_k_sync(p->cuda), BT_OK);
    bt_k_destroy(p->cuda);
    bt_k_destroy(p->cpu);
}

/* Once for each CUDA class that promises one answer. */
static inline void cp_each_exact(void (*check)(struct bt_kctx *cuda))
{
    for (size_t i = 0; i < sizeof(bt_k_all_classes) / sizeof(bt_k_all_classes[0]); i++) {
        struct cp cp;
        if (strncmp(bt_k_all_classes[i], "cuda-", 5) != 0 ||
            !bt_k_one_answer(bt_k_all_classes[i])) {
            continue;
        }
        cp_open_as(&cp, bt_k_all_classes[i]);
        check(cp.cuda);
        cp_close(&cp);
    }
}

/* A device copy of host bytes. */
static inline void *cp_put(struct bt_kctx *k, const void *host, size_t bytes)
{
    void *dev = bt_k_alloc(k, bytes);

    if (dev == NULL) {
        abort();
    }
    bt_k_write(k, dev, host, bytes);
    return dev;
}

static inline float *cp_floats(struct bt_kctx *k, const float *host, size_t n)
{
    return cp_put(k, host, n * sizeof(float));
}

/* Reads n floats and frees them. */
static inline void cp_take(struct bt_kctx *k, float *host, float *dev, size_t n)
{
    bt_k_read(k, host, dev, n * sizeof(float));
    bt_k_free(k, dev, n * sizeof(float));
}

/* The same bits. */
static inline bool cp_same(const char *what, const float *got, const float *want, size_t n)
{
    bt_test_checks++;
    for (size_t j = 0; j < n; j++) {
        if (memcmp(&got[j], &want[j], sizeof(float)) != 0) {
            bt_test_failures++;
            fprintf(stderr, "%s: value %zu is %.9g, not %.9g\n", what, j, (double)got[j],
                    (double)want[j]);
            return false;
        }
    }
    return true;
}

/* |got - want| <= atol + rtol |want|, want in f32. */
static inline bool cp_near(const char *what, const float *got, const float *want, size_t n,
                           double atol, double rtol)
{
    double *w = bt_alloc(n * sizeof(double));

    for (size_t i = 0; i < n; i++) {
        w[i] = (double)want[i];
    }
    bool ok = pk_near(what, got, w, n, atol, rtol);
    bt_free(w);
    return ok;
}

#endif
