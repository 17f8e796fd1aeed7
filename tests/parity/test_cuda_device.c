/* What the backend makes of a device that is not as it should be: one with too little shared memory is refused, and one that fails
 * is told by every later wait. On the emulated device. */

#include "kernels/cuda/emulation/emu_runtime_int.h"
#include "kernels/open.h"
#include "tests/parity/kernel_parity.h"

#define N 512U

static struct bt_kctx *open_context(void)
{
    struct bt_err err = {0};
    struct bt_kctx *k = NULL;

    if (bt_k_create("cuda", &(struct bt_k_opts){0}, &k, &err) != BT_OK) {
        fprintf(stderr, "%s\n", err.msg);
        exit(1);
    }
    return k;
}

static void test_shared_memory(void)
{
    static const char *const classes[] = {"cuda-f32", "cuda-bf16"};

    for (size_t i = 0; i < 2; i++) {
        const struct bt_k_opts o = {.numerics = classes[i]};
        struct bt_err err = {0};
        struct bt_kctx *k = NULL;

        emu_device_set(&(struct emu_device){.shared_max = 64U << 10});
        CHECK_EQ(bt_k_create("cuda", &o, &k, &err), BT_ERR_UNSUPPORTED);
        CHECK(strstr(err.msg, "emulated, gives a block 64 KiB of shared memory") != NULL);
    }
    emu_device_set(&(struct emu_device){0});
}

/* y = x + x, twice, with a wait in between. */
static enum bt_status work(struct bt_kctx *k, const float *x, float *got)
{
    float *dev = bt_k_alloc(k, N * sizeof(float));

    if (dev == NULL) {
        return BT_ERR_DEVICE;
    }
    bt_k_write(k, dev, x, N * sizeof(float));
    bt_k_add(k, dev, N, dev, N, 1, N);
    enum bt_status st = bt_k_wait(k, bt_k_mark(k)), again = BT_OK;
    bt_k_add(k, dev, N, dev, N, 1, N);
    bt_k_read(k, got, dev, N * sizeof(float));
    again = bt_k_sync(k);
    CHECK(st == BT_OK || again == st); /* it stays */
    bt_k_free(k, dev, N * sizeof(float));
    return again;
}

static void test_fault(void)
{
    float *x = pk_floats(N, -1, 1), *got = pk_floats(N, 0, 0);
    enum bt_status st = BT_ERR_DEVICE;
    uint64_t at = 1;

    for (; st != BT_OK && at < 100; at++) {
        struct bt_kctx *k = open_context();

        emu_device_set(&(struct emu_device){.fault_after = at});
        st = work(k, x, got);
        CHECK(st == BT_OK || st == BT_ERR_DEVICE);
        if (st == BT_ERR_DEVICE) {
            CHECK_EQ(work(k, x, got), BT_ERR_DEVICE);
        }
        bt_k_destroy(k);
        emu_device_set(&(struct emu_device){0});
    }
    CHECK(at > 4 && at < 100); /* it failed at several places */
    for (uint32_t i = 0; i < N; i++) {
        CHECK(got[i] == 4 * x[i]);
    }
    bt_free(x);
    bt_free(got);
}

int main(void)
{
    test_shared_memory();
    test_fault();
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
