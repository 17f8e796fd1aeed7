/* The mover: pages of any size at any address, in and out of slots, many in one launch, against copies by the context. On the
 * emulated device also how many launches, waits and allocations that takes, and what becomes of copies when the device fails. */

#include "tests/parity/cuda_parity.h"
#ifdef BT_CUDA_EMULATED
#include "kernels/cuda/emulation/emu_runtime_int.h"
#endif

#define SLOTS  37U /* no power of two: batches wrap around */
#define SLOT   70013U
#define ROUNDS 60U
#define FILL   0x6b

/* Device memory and what must be in it. */
struct fixture {
    struct cp p;
    struct bt_k_mover *m;
    uint8_t *dev, *want, *got;
    size_t bytes;
};

static void open_fixture(struct fixture *f, const struct bt_k_mover_opts *o)
{
    cp_open(&f->p);
    f->bytes = (size_t)o->n_slots * (o->slot_bytes + 64);
    f->want = bt_alloc(f->bytes);
    f->got = bt_alloc(f->bytes);
    for (size_t i = 0; i < f->bytes; i++) {
        f->want[i] = (uint8_t)pk_u32();
    }
    f->dev = cp_put(f->p.cuda, f->want, f->bytes);
    CHECK_EQ(bt_k_mover_create(f->p.cuda, o, &f->m, NULL), BT_OK);
}

static void close_fixture(struct fixture *f)
{
    bt_k_mover_destroy(f->m);
    bt_k_free(f->p.cuda, f->dev, f->bytes);
    bt_free(f->want);
    bt_free(f->got);
    cp_close(&f->p);
}

static void check_device(struct fixture *f)
{
    bt_k_read(f->p.cuda, f->got, f->dev, f->bytes);
    CHECK(memcmp(f->got, f->want, f->bytes) == 0);
}

static uint32_t a_size(void)
{
    static const uint32_t sizes[] = {0,   1,   3,    4,    15,   16,   17,   31,    64,    250,
                                     511, 512, 4080, 4095, 4096, 4097, 8197, 16384, 65536, SLOT};
    uint32_t pick = pk_u32() % 24;

    return pick < 20 ? sizes[pick] : pk_u32() % SLOT;
}

/* A batch of n copies, both ways, each with its own stretch of device memory: what lies around stays what it was. */
static void one_batch(struct fixture *f, uint32_t n, uint32_t first)
{
    struct {
        uint8_t *slot, *want;
        size_t bytes;
        bool in;
    } copy[SLOTS];

    for (uint32_t i = 0; i < n; i++) {
        const uint32_t slot = (first + i) % SLOTS;
        const size_t at = slot * (size_t)(SLOT + 64) + pk_u32() % 2 * (pk_u32() % 33);

        copy[i].slot = bt_k_mover_slot(f->m, slot);
        copy[i].want = f->want + at;
        copy[i].bytes = a_size();
        copy[i].in = pk_u32() % 2 == 0;
        for (size_t j = 0; j < SLOT; j++) {
            copy[i].slot[j] = copy[i].in ? (uint8_t)(j * 7 + slot) : FILL;
        }
        if (copy[i].in) {
            memcpy(copy[i].want, copy[i].slot, copy[i].bytes);
        }
        bt_k_mover_start(f->m, slot, f->dev + at, copy[i].bytes, copy[i].in);
    }
    for (uint32_t i = 0; i < 20; i++) {
        CHECK_EQ(bt_k_mover_done(f->m, (first + i % n) % SLOTS, false), BT_ERR_BUSY);
    }
    bt_k_mover_go(f->m);
    while (bt_k_mover_done(f->m, (first + n - 1) % SLOTS, false) == BT_ERR_BUSY) {
    }
    for (uint32_t i = 0; i < n; i++) {
        CHECK_EQ(bt_k_mover_done(f->m, (first + i) % SLOTS, false), BT_OK);
        if (!copy[i].in) {
            CHECK(memcmp(copy[i].slot, copy[i].want, copy[i].bytes) == 0);
            for (size_t j = copy[i].bytes; j < SLOT; j++) {
                if (copy[i].slot[j] != FILL) {
                    CHECK(!"bytes behind the copy are what they were");
                    break;
                }
            }
        }
    }
}

/* single_bytes: some of them are copies of their own. */
static void test_copies(size_t single_bytes)
{
    struct fixture f;
    const struct bt_k_mover_opts o = {
        .slot_bytes = SLOT, .n_slots = SLOTS, .single_bytes = single_bytes};
    uint32_t first = 0;

    open_fixture(&f, &o);
    for (uint32_t i = 0; i < SLOTS; i++) {
        CHECK((uintptr_t)bt_k_mover_slot(f.m, i) % 64 == 0);
        CHECK_EQ(bt_k_mover_done(f.m, i, false), BT_OK); /* none yet */
    }
    bt_k_mover_go(f.m); /* nothing */
#ifdef BT_CUDA_EMULATED
    const struct emu_counts before = emu_counts();
#endif
    for (uint32_t round = 0; round < ROUNDS; round++) {
        const uint32_t n = round % 4 == 0 ? SLOTS : 1 + pk_u32() % SLOTS;

        one_batch(&f, n, first);
        first = (first + n) % SLOTS;
    }
#ifdef BT_CUDA_EMULATED
    CHECK_EQ(emu_counts().n_allocs, before.n_allocs);
    CHECK_EQ(emu_counts().n_waits, before.n_waits);
    CHECK(single_bytes != 0 || emu_counts().n_launches - before.n_launches <= ROUNDS);
#endif
    check_device(&f);
    /* Who waits need not have said go. */
    f.want[5] = bt_k_mover_slot(f.m, 3)[0] = 0x77;
    bt_k_mover_start(f.m, 3, f.dev + 5, 1, true);
    CHECK_EQ(bt_k_mover_done(f.m, 3, true), BT_OK);
    check_device(&f);
    close_fixture(&f);
}

#ifdef BT_CUDA_EMULATED
/* Kernels of n copies of `bytes` that are begun together. */
static uint64_t launches_of(struct bt_k_mover *m, uint8_t *dev, uint32_t n, size_t bytes)
{
    const uint64_t before = emu_counts().n_launches;

    for (uint32_t i = 0; i < n; i++) {
        bt_k_mover_start(m, i, dev + i * bytes, bytes, i % 2 == 0);
    }
    bt_k_mover_go(m);
    CHECK_EQ(bt_k_mover_done(m, n - 1, true), BT_OK);
    return emu_counts().n_launches - before;
}

/* How many copies, and how many bytes, go together; a large one goes alone, and so do all where the caller wants it. */
static void test_limits(void)
{
    struct fixture f;
    struct bt_k_mover_opts o = {.slot_bytes = 1 << 20, .n_slots = 600};

    open_fixture(&f, &o);
    CHECK_EQ(launches_of(f.m, f.dev, 1, 4096), 1);
    CHECK_EQ(launches_of(f.m, f.dev, 256, 64), 1);
    CHECK_EQ(launches_of(f.m, f.dev, 600, 64), 3);
    CHECK_EQ(launches_of(f.m, f.dev, 20, 512 << 10), 3); /* of 4 MiB */
    CHECK_EQ(launches_of(f.m, f.dev, 3, 1 << 20), 0);
    bt_k_mover_destroy(f.m);
    o.single_bytes = 1;
    CHECK_EQ(bt_k_mover_create(f.p.cuda, &o, &f.m, NULL), BT_OK);
    CHECK_EQ(launches_of(f.m, f.dev, 7, 100), 0);
    close_fixture(&f);
}

/* The device fails at some kernel or copy: what was done before is done, all later copies fail, also those that begin then. */
static void test_fault(size_t single_bytes)
{
    const struct bt_k_mover_opts o = {
        .slot_bytes = 4096, .n_slots = SLOTS, .single_bytes = single_bytes};

    for (uint64_t at = 1; at < 8; at++) {
        struct fixture f;
        bool failed = false;

        open_fixture(&f, &o);
        emu_device_set(&(struct emu_device){.fault_after = at});
        for (uint32_t round = 0; round < 12; round++) {
            for (uint32_t i = 0; i < 3; i++) {
                bt_k_mover_start(f.m, i, f.dev + (size_t)i * 4096, 4096, false);
            }
            bt_k_mover_go(f.m);
            enum bt_status st = bt_k_mover_done(f.m, 2, round % 2 == 0);

            while (st == BT_ERR_BUSY) {
                st = bt_k_mover_done(f.m, 2, false);
            }
            CHECK(st == BT_ERR_DEVICE || (st == BT_OK && !failed));
            failed = st == BT_ERR_DEVICE;
            if (failed) {
                CHECK_EQ(bt_k_mover_done(f.m, 1, false), BT_ERR_DEVICE);
            } else {
                CHECK(memcmp(bt_k_mover_slot(f.m, 2), f.want + 8192, 4096) == 0);
            }
        }
        CHECK(failed);
        bt_k_mover_destroy(f.m);
        emu_device_set(&(struct emu_device){0});
        CHECK_EQ(bt_k_mover_create(f.p.cuda, &o, &f.m, NULL), BT_OK);
        close_fixture(&f);
    }
}
#endif

int main(void)
{
    test_copies(0);
    test_copies(4096);
#ifdef BT_CUDA_EMULATED
    test_limits();
    test_fault(0);
    test_fault(1);
#endif
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
