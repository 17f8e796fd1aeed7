/* Memory that is sized at create: slabs, block rings, blocks on their way back, reserved tables, and the seal that
 * catches who calls the heap all the same. */

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/buf.h"
#include "base/fifo.h"
#include "base/hash.h"
#include "base/mem.h"
#include "base/slab.h"
#include "base/spent.h"
#include "tests/check.h"

#define BIG ((size_t)1 << 20)

static uint32_t next_random(uint32_t *x)
{
    *x = *x * 1664525u + 1013904223u;
    return *x >> 8;
}

/* Pages of [p, p + n) that are in memory. */
static size_t resident(void *p, size_t n)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), count = 0;
    unsigned char in[BIG / 4096];
    char *from = (char *)p - (uintptr_t)p % page;

    CHECK(n <= BIG && mincore(from, n, in) == 0);
    for (size_t i = 0; i < n / page; i++) {
        count += in[i] & 1;
    }
    return count;
}

static void test_slab(void)
{
    struct bt_slab s = {0};
    void *held[10];
    size_t live = bt_test_live_bytes();

    bt_slab_fini(&s);
    CHECK_EQ(bt_slab_init(&s, "things", 24, 10), BT_OK);
    uint64_t calls = bt_test_heap_calls();

    for (uint32_t i = 0; i < 10; i++) {
        held[i] = bt_slab_get(&s);
        CHECK(held[i] != NULL && (uintptr_t)held[i] % 16 == 0);
        memset(held[i], (int)i, 24);
    }
    CHECK(bt_slab_get(&s) == NULL);
    CHECK_EQ(bt_slab_used(&s), 10);
    for (uint32_t i = 0; i < 10; i++) {
        CHECK(((uint8_t *)held[i])[0] == i && ((uint8_t *)held[i])[23] == i);
    }
    bt_slab_put(&s, held[3]);
    bt_slab_put(&s, held[7]);
    bt_slab_put(&s, NULL);
    CHECK(bt_slab_get(&s) == held[7]); /* the last one, which is still in the caches */
    CHECK(bt_slab_get(&s) == held[3]);
    for (uint32_t i = 0; i < 10; i++) {
        bt_slab_put(&s, held[i]);
    }
    CHECK_EQ(bt_slab_used(&s), 0);
    CHECK(bt_test_heap_calls() == calls);
    bt_slab_fini(&s);
    CHECK_EQ(bt_test_live_bytes(), live);
}

/* Large objects: memory only where it was written to, and what was written behind the first part goes back. */
static void test_slab_large(void)
{
    struct bt_slab s;

    CHECK_EQ(bt_slab_init(&s, "tables", BIG, 100000), BT_OK); /* 100 GB of addresses */
    char *o = bt_slab_get(&s);

    CHECK_EQ(resident(o, BIG), 0);
    memset(o, 1, BIG);
    CHECK(resident(o, BIG) >= BIG / 4096 - 1);
    bt_slab_put(&s, o);
    CHECK(resident(o, BIG) <= BT_SLAB_KEEP_BYTES / 4096 + 2);
    CHECK(bt_slab_get(&s) == o);
    o[BIG - 1] = 1;
    bt_slab_put(&s, o);
    bt_slab_fini(&s);
    CHECK_EQ(bt_slab_init(&s, "too much", SIZE_MAX / 2, 3), BT_ERR_NOMEM);
    bt_slab_fini(&s);
    bt_test_fail_alloc(0);
    CHECK_EQ(bt_slab_init(&s, "none", 64, 3), BT_ERR_NOMEM);
    CHECK(bt_test_fail_alloc_off());
    bt_slab_fini(&s);
}

struct fifo_block {
    uint8_t *p;
    size_t n;
    uint8_t fill;
};

/* Random sizes, given back in random order: no two blocks share a byte, and room always comes back. */
static void test_fifo_random(void)
{
    struct bt_fifo *f;
    struct fifo_block held[64] = {0};
    uint32_t x = 7, n_full = 0;

    CHECK_EQ(bt_fifo_create(4096, &f), BT_OK);
    uint64_t calls = bt_test_heap_calls();

    for (uint32_t round = 0; round < 100000; round++) {
        struct fifo_block *b = &held[next_random(&x) % 64];

        if (b->p != NULL) {
            for (size_t i = 0; i < b->n; i++) {
                if (b->p[i] != b->fill) {
                    CHECK(b->p[i] == b->fill);
                    break;
                }
            }
            bt_fifo_give(b->p);
            b->p = NULL;
            continue;
        }
        b->n = next_random(&x) % (round % 3 == 0 ? 2000 : 100);
        b->fill = (uint8_t)round;
        b->p = bt_fifo_take(f, b->n);
        n_full += b->p == NULL;
        if (b->p != NULL) {
            CHECK((uintptr_t)b->p % 16 == 0);
            memset(b->p, b->fill, b->n);
        }
    }
    CHECK(n_full > 1000 && n_full < 99000);
    for (uint32_t i = 0; i < 64; i++) {
        bt_fifo_give(held[i].p);
    }
    void *all = bt_fifo_take(f, 4096 - BT_FIFO_BLOCK_OVERHEAD);

    CHECK(all != NULL && bt_fifo_take(f, 0) == NULL);
    bt_fifo_give(all);
    CHECK(bt_fifo_take(f, 4096) == NULL && bt_fifo_take(f, SIZE_MAX) == NULL);
    CHECK(bt_test_heap_calls() == calls);
    bt_fifo_destroy(f);
    bt_fifo_destroy(NULL);
}

/* One block out at a time always lies at the beginning. */
static void test_fifo_rewinds(void)
{
    struct bt_fifo *f;

    CHECK_EQ(bt_fifo_create(BIG, &f), BT_OK);
    void *first = bt_fifo_take(f, 100);

    bt_fifo_give(first);
    for (int i = 0; i < 100; i++) {
        void *p = bt_fifo_take(f, 5000);

        CHECK(p == first);
        bt_fifo_give(p);
    }
    bt_fifo_destroy(f);
}

/* Not by CHECK: threads that check, too, are running when it counts. */
static void start(pthread_t *t, void *(*fn)(void *), void *arg)
{
    if (pthread_create(t, NULL, fn, arg) != 0) {
        abort();
    }
}

static void *add_spent(void *arg)
{
    for (int i = 0; i < 1000; i++) {
        void *p = bt_alloc(8 + (size_t)i);

        bt_spent_add(arg, p);
    }
    return NULL;
}

static void test_spent(void)
{
    struct bt_spent s = {0};
    pthread_t threads[4];
    size_t live = bt_test_live_bytes();

    bt_spent_free(&s);
    for (int i = 0; i < 4; i++) {
        start(&threads[i], add_spent, &s);
    }
    for (int i = 0; i < 100; i++) {
        bt_spent_free(&s);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    bt_spent_add(&s, NULL);
    bt_spent_free(&s);
    CHECK_EQ(bt_test_live_bytes(), live);
}

static void test_map_reserve(void)
{
    static uint32_t keys[1000];
    struct bt_map m;

    bt_map_init(&m, false);
    CHECK_EQ(bt_map_reserve(&m, 1000), BT_OK);
    uint64_t calls = bt_test_heap_calls(), v = 0;

    for (int round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < 1000; i++) {
            keys[i] = i * 977;
            CHECK_EQ(bt_map_put(&m, &keys[i], sizeof keys[i], i), BT_OK);
        }
        for (uint32_t i = 0; i < 1000; i++) {
            CHECK(bt_map_get(&m, &keys[i], sizeof keys[i], &v) && v == i);
            CHECK(bt_map_del(&m, &keys[i], sizeof keys[i]));
        }
    }
    CHECK(bt_test_heap_calls() == calls);
    CHECK_EQ(bt_map_reserve(&m, 10), BT_OK);
    CHECK(bt_test_heap_calls() == calls);
    bt_map_fini(&m);
}

/* A sealed thread's calls are counted; another's are not, nor what it does unsealed. */
static void *sealed_thread(void *arg)
{
    struct bt_seal *s = arg;
    struct bt_buf text = {0};

    bt_free(bt_alloc(1));
    bt_alloc_seal(s);
    bt_free(NULL);
    void *p = bt_alloc(10);

    p = bt_realloc(p, 20);
    CHECK_EQ(bt_seal_heap_calls(s), 2);
    struct bt_seal *was = bt_alloc_unseal();
    struct bt_seal *inner = bt_alloc_unseal();

    bt_free(p);
    bt_alloc_reseal(inner);
    bt_free(bt_calloc(3, 3));
    bt_alloc_reseal(was);
    CHECK_EQ(bt_seal_heap_calls(s), 2);
    bt_buf_adds(&text, "grows");
    bt_buf_fini(&text);
    CHECK_EQ(bt_seal_heap_calls(s), 4);
    return NULL;
}

static void test_seal(void)
{
    struct bt_seal s = {.thread = "test"};
    pthread_t t;

    start(&t, sealed_thread, &s);
    bt_free(bt_alloc(1));
    pthread_join(t, NULL);
    CHECK_EQ(bt_seal_heap_calls(&s), 4);
}

/* This program again, as a daemon under test: it dies at its first sealed heap call, and says where. */
static void test_seal_aborts(const char *self)
{
    int out[2], status = 0;
    char text[8192] = "";
    size_t n = 0;
    ssize_t r;

    CHECK_EQ(pipe(out), 0);
    pid_t pid = fork();

    if (pid == 0) {
        (void)dup2(out[1], STDERR_FILENO);
        (void)setenv("BT_HEAP_SEAL", "abort", 1);
        (void)execl(self, self, "break-the-seal", (char *)NULL);
        _exit(99);
    }
    close(out[1]);
    while (n < sizeof text - 1 && (r = read(out[0], text + n, sizeof text - 1 - n)) > 0) {
        n += (size_t)r;
    }
    close(out[0]);
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    CHECK(strstr(text, "heap call on the sealed unit-test thread") != NULL);
    CHECK(strstr(text, "test_base_pools") != NULL || strstr(text, "base_pools") != NULL);
    CHECK(strstr(text, "not reached") == NULL);
}

static int break_the_seal(void)
{
    static struct bt_seal s = {.thread = "unit-test"};

    bt_alloc_seal(&s);
    struct bt_seal *was = bt_alloc_unseal();
    void *p = bt_alloc(1);

    bt_alloc_reseal(was);
    bt_free(p); /* ends the process */
    fprintf(stderr, "not reached\n");
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        return break_the_seal();
    }
    test_slab();
    test_slab_large();
    test_fifo_random();
    test_fifo_rewinds();
    test_spent();
    test_map_reserve();
    test_seal();
    test_seal_aborts(argv[0]);
    return bt_test_done();
}
