/* Random traffic through the scheduler under many seeds, half of them with the prefix cache. After
 * every event: each page stands in as many tables as it has references, counts add up, windows are
 * right; what a step reads is the KV of its own tokens, what it writes nobody else holds; at the end
 * every sequence has completed and all pages are free or cached. */

#include "sched/batch.h"

#include <stdlib.h>
#include <string.h>
#include "base/mem.h"
#include "tests/check.h"

#define N_SEQS     24
#define STEPS_MAX  40000
#define TOKENS_MAX 512
#define PAGES_MAX  68

struct sim {
    struct bt_batch *b;
    struct bt_batch_opts o;
    uint64_t rng;
    struct {
        bool used;
        uint64_t id;
        uint32_t end; /* tokens at which it finishes */
        uint32_t tokens[TOKENS_MAX];
    } seqs[N_SEQS];
    uint32_t n_left; /* to be created */
    uint32_t n_completed, n_preempted, n_hits, n_copies;
    uint64_t content[3][PAGES_MAX][5]; /* what was stored, by group, page and place in it */
};

static uint32_t rnd(struct sim *s, uint32_t n)
{
    s->rng = s->rng * UINT64_C(6364136223846793005) + 1442695040888963407U;
    return (uint32_t)((s->rng >> 33) % n);
}

static void check_pages(struct sim *s)
{
    for (uint32_t g = 0; g < s->o.n_groups; g++) {
        const struct bt_pages *p = bt_batch_pages(s->b, g);
        uint32_t n_refs = 0, n_seen = 0, sum = 0;

        for (uint32_t st = 0; st < BT_PAGE_STATES; st++) {
            sum += bt_pages_count(p, (enum bt_page_state)st);
        }
        CHECK_EQ(sum, bt_pages_total(p));
        for (uint32_t i = 0; i < bt_pages_total(p); i++) {
            struct bt_page_info info = bt_pages_info(p, i);
            bool held = info.state == BT_PAGE_LEASED || info.state == BT_PAGE_QUARANTINED;

            CHECK(held == (info.n_refs > 0) && held == (info.holder != 0));
            n_refs += info.n_refs;
        }
        for (uint32_t slot = 0; slot < s->o.max_seqs; slot++) {
            const struct bt_batch_seq *q = bt_batch_seq(s->b, slot);

            if (q->state == BT_BATCH_FREE) {
                continue;
            }
            for (uint32_t a = 0; a < q->table_len; a++) {
                bool in = a >= q->first_page[g] && a < q->n_paged;

                uint64_t holder = in && q->pages[g][a] != BT_BATCH_NO_PAGE
                                      ? bt_pages_info(p, q->pages[g][a]).holder
                                      : 0;

                if (in != (q->pages[g][a] != BT_BATCH_NO_PAGE) ||
                    (in && holder != q->id && !(s->o.prefix_cache && holder == BT_PAGE_SHARED))) {
                    CHECK(false && "a table entry without its lease");
                }
                n_seen += in;
            }
        }
        CHECK_EQ(n_seen, n_refs);
    }
}

/* The KV of a position depends on every token up to it. */
static uint64_t kv_of(const uint32_t *tokens, uint32_t pos)
{
    uint64_t h = 1;

    for (uint32_t i = 0; i <= pos; i++) {
        h = (h ^ tokens[i]) * UINT64_C(0x9E3779B97F4A7C15);
        h ^= h >> 29;
    }
    return h;
}

static uint64_t *cell(struct sim *s, const struct bt_batch_seq *q, uint32_t g, uint32_t pos)
{
    return &s->content[g][q->pages[g][pos / s->o.page_tokens]][pos % s->o.page_tokens];
}

/* Stores the KV of positions [from, end) of a group, after checking that of those before that the
 * one at `from` sees or, of one that landed, that are in the pages that it has. */
static void store_group(struct sim *s, const struct bt_batch_seq *q, uint32_t g, uint32_t from,
                        uint32_t end, bool landed)
{
    uint32_t w = s->o.groups[g].window, seer = landed ? end : from;
    uint32_t pos = w == 0 || seer < w ? 0 : seer - w + 1;

    pos = landed ? pos / s->o.page_tokens * s->o.page_tokens : pos; /* whole pages are sent */
    for (; pos < end; pos++) {
        if (pos < from) {
            CHECK(*cell(s, q, g, pos) == kv_of(q->tokens, pos));
        } else {
            struct bt_page_info info =
                bt_pages_info(bt_batch_pages(s->b, g), q->pages[g][pos / s->o.page_tokens]);

            CHECK(info.state == BT_PAGE_LEASED && info.n_refs == 1 && info.holder == q->id);
            *cell(s, q, g, pos) = kv_of(q->tokens, pos);
        }
    }
}

static void store(struct sim *s, const struct bt_batch_seq *q, uint32_t from, uint32_t end,
                  bool landed)
{
    for (uint32_t g = 0; g < s->o.n_groups; g++) {
        store_group(s, q, g, from, end, landed);
    }
}

/* What a sequence that starts or lands finds in pages of others. */
static void copy_cached(struct sim *s, const struct bt_batch_seq *q)
{
    for (uint32_t g = 0; q->n_copied > 0 && g < s->o.n_groups; g++) {
        CHECK(q->n_copied < s->o.page_tokens);
        memmove(s->content[g][q->pages[g][q->n_shared]], s->content[g][q->copy_from[g]],
                sizeof s->content[g][0]);
    }
    s->n_hits += q->n_shared;
    s->n_copies += q->n_copied > 0;
}

/* Few different beginnings, so that prompts share them. */
static void make_tokens(struct sim *s, uint32_t *tokens)
{
    uint32_t family = rnd(s, 3), shared = rnd(s, TOKENS_MAX / 4);

    for (uint32_t i = 0; i < TOKENS_MAX; i++) {
        tokens[i] = i < shared ? family * 1000 + i : rnd(s, 2);
    }
}

static void create_one(struct sim *s)
{
    uint32_t at = 0;

    while (at < N_SEQS && s->seqs[at].used) {
        at++;
    }
    if (at == N_SEQS) {
        return;
    }
    uint32_t cap = bt_batch_capacity(s->b);
    uint32_t n = 1 + rnd(s, rnd(s, 4) == 0 ? cap - 1 : 1 + cap / 8);
    uint32_t end = n + 1 + rnd(s, 30);
    bool land = rnd(s, 3) == 0;

    end = end < cap ? end : cap;
    struct bt_batch_new nw = {.n_tokens = n,
                              .n_tokens_max = end,
                              .hold = !land && rnd(s, 2) == 0,
                              .all_rows = rnd(s, 6) == 0,
                              .tokens = s->seqs[at].tokens};
    uint32_t slot;

    make_tokens(s, s->seqs[at].tokens);
    enum bt_status st = land ? bt_batch_land(s->b, &nw, &slot) : bt_batch_submit(s->b, &nw, &slot);

    if (st == BT_OK) {
        if (land) {
            copy_cached(s, bt_batch_seq(s->b, slot));
        }
        s->seqs[at].used = true;
        s->seqs[at].id = bt_batch_seq(s->b, slot)->id;
        s->seqs[at].end = end;
        s->n_left--;
    } else {
        CHECK_EQ(st, BT_ERR_BUSY);
    }
}

static void outside_event(struct sim *s, uint32_t at)
{
    uint32_t slot = bt_batch_find(s->b, s->seqs[at].id);
    const struct bt_batch_seq *q = bt_batch_seq(s->b, slot);

    CHECK(slot != BT_BATCH_NO_SLOT);
    if (q->state == BT_BATCH_LANDING && rnd(s, 8) == 0) {
        bt_batch_quarantine(s->b, slot);
    } else if (q->state == BT_BATCH_LANDING && q->n_tokens < s->seqs[at].end) {
        store(s, q, bt_batch_n_cached(s->b, q), q->n_tokens, true);
        bt_batch_start(s->b, slot);
    } else if (q->state == BT_BATCH_HELD || q->state == BT_BATCH_FINISHED ||
               q->state == BT_BATCH_QUARANTINED || q->state == BT_BATCH_LANDING || q->cancelled) {
        bt_batch_remove(s->b, slot);
        s->seqs[at].used = false;
        s->n_completed++;
    } else if (rnd(s, 100) == 0) {
        bt_batch_cancel(s->b, slot);
    }
}

static void check_plan(struct sim *s, const struct bt_batch_plan *plan)
{
    uint32_t n_decode = 0, n_rows = 0, n_prefill = 0;

    for (uint32_t i = 0; i < plan->n_spans; i++) {
        const struct bt_batch_span *sp = &plan->spans[i];
        const struct bt_batch_seq *q = bt_batch_seq(s->b, sp->slot);

        CHECK(sp->n >= 1 && !q->cancelled && sp->pos == q->n_done);
        CHECK_EQ(sp->last, sp->pos + sp->n == q->n_tokens);
        n_decode += sp->decode;
        n_prefill += sp->decode ? 0 : sp->n;
        store(s, q, sp->pos, sp->pos + sp->n, false);
        n_rows += sp->decode ? 0 : q->all_rows ? sp->n : sp->last;
        for (uint32_t g = 0; g < s->o.n_groups; g++) {
            uint32_t w = s->o.groups[g].window;
            uint32_t from = w == 0 || sp->pos < w ? 0 : sp->pos - w + 1;

            for (uint32_t p = from; p < sp->pos + sp->n; p++) {
                CHECK(q->pages[g][p / s->o.page_tokens] != BT_BATCH_NO_PAGE);
            }
        }
    }
    CHECK(n_decode <= s->o.max_batch);
    CHECK(n_prefill <= s->o.chunk_tokens && n_rows <= s->o.prefill_rows);
    CHECK_EQ(n_prefill, plan->n_prefill_tokens);
}

static void one_step(struct sim *s)
{
    struct bt_batch_plan plan;

    bt_batch_plan(s->b, &plan);
    for (uint32_t i = 0; i < plan.n_started; i++) {
        copy_cached(s, bt_batch_seq(s->b, plan.started[i]));
    }
    check_plan(s, &plan);
    for (uint32_t i = 0; i < plan.n_preempted; i++) {
        for (uint32_t at = 0; at < N_SEQS; at++) {
            if (s->seqs[at].used && s->seqs[at].id == plan.preempted[i]) {
                s->seqs[at].used = false;
                s->n_preempted++;
            }
        }
    }
    if (plan.n_spans == 0) {
        return;
    }
    if (rnd(s, 10) == 0) {
        bt_batch_abandon(s->b);
        return;
    }
    bt_batch_commit(s->b);
    for (uint32_t i = 0; i < plan.n_spans; i++) {
        const struct bt_batch_seq *q = bt_batch_seq(s->b, plan.spans[i].slot);

        for (uint32_t at = 0; plan.spans[i].last && at < N_SEQS; at++) {
            if (s->seqs[at].used && s->seqs[at].id == q->id) {
                bt_batch_sampled(s->b, plan.spans[i].slot, q->n_tokens + 1 > s->seqs[at].end);
                break;
            }
        }
    }
}

static void run(uint64_t seed, uint32_t *n_hits, uint32_t *n_copies)
{
    struct sim s = {.rng = seed * 977 + 1, .n_left = 60};

    s.o = (struct bt_batch_opts){.page_tokens = 1 + rnd(&s, 5),
                                 .chunk_tokens = 1 + rnd(&s, 40),
                                 .max_batch = 1 + rnd(&s, 6),
                                 .max_seqs = N_SEQS,
                                 .tokens_max = 4096,
                                 .prefill_rows = 1 + rnd(&s, 6),
                                 .n_groups = 1 + rnd(&s, 3),
                                 .prefix_cache = seed % 2 == 1};
    uint32_t n_pages = 8 + rnd(&s, PAGES_MAX - 8);

    for (uint32_t g = 0; g < s.o.n_groups; g++) {
        s.o.groups[g].n_pages = n_pages;
        s.o.groups[g].window = g == 0 && rnd(&s, 4) != 0 ? 0 : 1 + rnd(&s, 20);
    }
    CHECK_EQ(bt_batch_create(&s.o, &s.b), BT_OK);
    uint64_t heap_calls = bt_test_heap_calls();
    uint32_t n = 0;
    bool any = true;

    for (; n < STEPS_MAX && (any || s.n_left > 0); n++) {
        if (s.n_left > 0 && rnd(&s, 3) == 0) {
            create_one(&s);
        }
        any = false;
        for (uint32_t at = 0; at < N_SEQS; at++) {
            any = any || s.seqs[at].used;
            if (s.seqs[at].used && rnd(&s, 4) == 0) {
                outside_event(&s, at);
            }
        }
        one_step(&s);
        check_pages(&s);
    }
    CHECK(n < STEPS_MAX); /* nobody starved */
    CHECK_EQ(bt_test_heap_calls(), heap_calls);
    CHECK_EQ(s.n_completed + s.n_preempted, 60);
    for (uint32_t g = 0; g < s.o.n_groups; g++) {
        CHECK_EQ(bt_pages_count(bt_batch_pages(s.b, g), BT_PAGE_FREE) +
                     bt_pages_count(bt_batch_pages(s.b, g), BT_PAGE_CACHED),
                 n_pages);
        CHECK(s.o.prefix_cache || bt_pages_count(bt_batch_pages(s.b, g), BT_PAGE_CACHED) == 0);
    }
    if (bt_test_failures > 0) {
        fprintf(stderr, "seed %llu\n", (unsigned long long)seed);
        exit(1);
    }
    bt_batch_destroy(s.b);
    *n_hits += s.n_hits;
    *n_copies += s.n_copies;
}

int main(int argc, char **argv)
{
    uint64_t n = argc > 1 ? strtoull(argv[1], NULL, 10) : 200;

    uint32_t n_hits = 0, n_copies = 0;

    for (uint64_t seed = 0; seed < n; seed++) {
        run(seed, &n_hits, &n_copies);
    }
    CHECK(n_hits > n && n_copies > n);
    return bt_test_done();
}
