/* What routers are told of a prefix cache: a listener that does as it is told knows in the end what
 * is there, whatever came between and however often it began anew. */

#include "sched/prefix_report.h"

#include <stdlib.h>
#include <string.h>
#include "base/mem.h"
#include "tests/check.h"

enum { N = 4000, LISTENERS = 3 };

struct world {
    struct bt_prefix_report *r;
    uint64_t rng;
    bool there[N];
    bool known[LISTENERS][N];
    uint32_t n_resets;
};

static uint32_t rnd(struct world *w, uint32_t n)
{
    w->rng = w->rng * UINT64_C(6364136223846793005) + 1442695040888963407U;
    return (uint32_t)((w->rng >> 33) % n);
}

/* Many share a place in the set. */
static uint64_t name(uint32_t i)
{
    return ((uint64_t)i + 1) << 32 | (i % 50) * 7;
}

static void change(struct world *w, uint32_t n)
{
    for (uint32_t k = 0; k < n; k++) {
        uint32_t i = rnd(w, N);
        struct bt_prefix_change c = {name(i), !w->there[i]};

        w->there[i] = !w->there[i];
        bt_prefix_report_change(w->r, &c, 1);
    }
}

static bool hear(struct world *w, uint32_t listener)
{
    struct bt_prefix_news news;

    bt_prefix_report_next(w->r, listener, &news);
    if (news.reset) {
        memset(w->known[listener], 0, sizeof w->known[listener]);
        w->n_resets++;
    }
    for (size_t i = 0; i < news.n_removed; i++) {
        w->known[listener][(news.removed[i] >> 32) - 1] = false;
    }
    for (size_t i = 0; i < news.n_added; i++) {
        w->known[listener][(news.added[i] >> 32) - 1] = true;
    }
    CHECK(news.n_added <= BT_PREFIX_NEWS_MAX && news.n_removed <= BT_PREFIX_NEWS_MAX);
    return news.n_added + news.n_removed > 0;
}

static void test_random(uint64_t seed)
{
    struct world *w = bt_calloc(1, sizeof *w);
    uint32_t n_wrong = 0;

    w->rng = seed;
    CHECK_EQ(bt_prefix_report_create(N, LISTENERS, &w->r), BT_OK);
    for (uint32_t step = 0; step < 400; step++) {
        change(w, rnd(w, 20) == 0 ? 9000 : rnd(w, 60));
        if (rnd(w, 50) == 0) {
            bt_prefix_report_restart(w->r, rnd(w, LISTENERS));
        }
        if (rnd(w, 2) == 0) {
            (void)hear(w, rnd(w, LISTENERS));
        }
    }
    for (uint32_t l = 0; l < LISTENERS; l++) {
        for (uint32_t k = 0; k < 2 + N / BT_PREFIX_NEWS_MAX + 9000 / BT_PREFIX_NEWS_MAX; k++) {
            (void)hear(w, l);
        }
        CHECK(!hear(w, l));
        for (uint32_t i = 0; i < N; i++) {
            CHECK(w->there[i] || !w->known[l][i]); /* never what is not there */
            n_wrong += w->there[i] && !w->known[l][i];
        }
    }
    CHECK(w->n_resets > LISTENERS);
    CHECK(n_wrong <= N * LISTENERS / 50); /* moved while all were told */
    bt_prefix_report_destroy(w->r);
    bt_free(w);
}

static void test_told_once(void)
{
    struct bt_prefix_report *r = NULL;
    struct bt_prefix_news news;
    struct bt_prefix_change c[3] = {{5, true}, {6, true}, {5, false}};

    CHECK_EQ(bt_prefix_report_create(2, 1, &r), BT_OK);
    bt_prefix_report_change(r, c, 2);
    bt_prefix_report_next(r, 0, &news);
    CHECK(news.reset && news.n_added == 2 && news.n_removed == 0);
    bt_prefix_report_next(r, 0, &news);
    CHECK(!news.reset && news.n_added == 0 && news.n_removed == 0);
    bt_prefix_report_change(r, c + 2, 1);
    bt_prefix_report_next(r, 0, &news);
    CHECK(!news.reset && news.n_added == 0 && news.n_removed == 1 && news.removed[0] == 5);
    bt_prefix_report_change(r, c, 2); /* 6 is known */
    bt_prefix_report_next(r, 0, &news);
    CHECK(news.n_added == 1 && news.added[0] == 5);
    c[0].hash = 9;
    bt_prefix_report_change(r, c, 1); /* one too many */
    bt_prefix_report_next(r, 0, &news);
    CHECK(news.n_added == 0);
    bt_prefix_report_destroy(r);
}

static void test_no_memory(void)
{
    bool fired = true;

    for (uint64_t nth = 0; fired; nth++) {
        struct bt_prefix_report *r = NULL;

        bt_test_fail_alloc(nth);
        enum bt_status st = bt_prefix_report_create(4, 2, &r);

        fired = bt_test_fail_alloc_off();
        CHECK_EQ(st, fired ? BT_ERR_NOMEM : BT_OK);
        bt_prefix_report_destroy(r);
    }
}

int main(void)
{
    test_told_once();
    for (uint64_t seed = 1; seed <= 20; seed++) {
        test_random(seed);
    }
    test_no_memory();
    CHECK_EQ(bt_test_live_bytes(), 0);
    return bt_test_done();
}
