/* The ring: order, full and empty, time-outs, and several producers against one waiting consumer.
 */

#include <pthread.h>
#include "base/clock.h"
#include "base/mem.h"
#include "base/ring.h"
#include "tests/check.h"

static void test_single(void)
{
    size_t before = bt_test_live_bytes();
    struct bt_ring *r = NULL;
    CHECK_EQ(bt_ring_create(sizeof(int), 3, &r), BT_OK); /* rounded up to 4 */
    int v = 0;
    CHECK(!bt_ring_pop(r, &v));
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < 4; i++) {
            int x = round * 10 + i;
            CHECK(bt_ring_push(r, &x));
        }
        int extra = -1;
        CHECK(!bt_ring_push(r, &extra));
        CHECK_EQ(bt_ring_count(r), 4);
        for (int i = 0; i < 4; i++) {
            CHECK(bt_ring_pop(r, &v) && v == round * 10 + i);
        }
        int odd = 7; /* moves the wrap to another place each round */
        CHECK(bt_ring_push(r, &odd) && bt_ring_pop_wait(r, &v, 0) && v == 7);
    }
    uint64_t t0 = bt_clock_ns();
    CHECK(!bt_ring_pop_wait(r, &v, 5 * BT_NS_PER_MS));
    CHECK(bt_clock_ns() - t0 >= 4 * BT_NS_PER_MS);
    CHECK(!bt_ring_pop_wait(r, &v, 0));
    bt_ring_destroy(r);
    bt_ring_destroy(NULL);

    CHECK_EQ(bt_ring_create(1, 0, &r), BT_OK); /* at least one */
    CHECK(bt_ring_push(r, "x") && !bt_ring_push(r, "y"));
    bt_ring_destroy(r);

    CHECK_EQ(bt_ring_create(SIZE_MAX / 2, 8, &r), BT_ERR_NOMEM);
    CHECK_EQ(bt_ring_create(1, SIZE_MAX, &r), BT_ERR_NOMEM);
    bool fired = true;
    for (uint64_t nth = 0; fired; nth++) {
        r = NULL;
        bt_test_fail_alloc(nth);
        enum bt_status st = bt_ring_create(8, 8, &r);
        fired = bt_test_fail_alloc_off();
        CHECK_EQ(st, fired ? BT_ERR_NOMEM : BT_OK);
        bt_ring_destroy(r);
    }
    CHECK_EQ(bt_test_live_bytes(), before);
}

#define N_PRODUCERS 4u
#define N_EACH      20000u

struct msg {
    uint32_t from, number;
    unsigned char pad[40]; /* large enough that a torn copy would show */
};

struct producer {
    struct bt_ring *ring;
    uint32_t id;
};

static void *produce(void *arg)
{
    struct producer *p = arg;
    for (uint32_t i = 0; i < N_EACH; i++) {
        struct msg m = {.from = p->id, .number = i};
        memset(m.pad, (int)((p->id + i) & 0xFF), sizeof(m.pad));
        while (!bt_ring_push(p->ring, &m)) {
            (void)sched_yield();
        }
    }
    return NULL;
}

static void test_threads(void)
{
    struct bt_ring *r = NULL;
    struct producer producers[N_PRODUCERS];
    pthread_t threads[N_PRODUCERS];
    uint32_t next[N_PRODUCERS] = {0};
    unsigned bad = 0;

    CHECK_EQ(bt_ring_create(sizeof(struct msg), 64, &r), BT_OK);
    for (uint32_t i = 0; i < N_PRODUCERS; i++) {
        producers[i] = (struct producer){.ring = r, .id = i};
        CHECK_EQ(pthread_create(&threads[i], NULL, produce, &producers[i]), 0);
    }
    for (unsigned n = 0; n < N_PRODUCERS * N_EACH; n++) {
        struct msg m;
        uint64_t timeout = n % 2 == 0 ? UINT64_MAX : 60 * BT_NS_PER_S;
        if (!bt_ring_pop_wait(r, &m, timeout) || m.from >= N_PRODUCERS) {
            bad++;
            break;
        }
        bad += m.number != next[m.from]++; /* each producer's order is kept */
        for (size_t i = 0; i < sizeof(m.pad); i++) {
            bad += m.pad[i] != (unsigned char)(m.from + m.number);
        }
    }
    for (uint32_t i = 0; i < N_PRODUCERS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    CHECK_EQ(bad, 0);
    CHECK_EQ(bt_ring_count(r), 0);
    bt_ring_destroy(r);
}

int main(void)
{
    test_single();
    test_threads();
    return bt_test_done();
}
