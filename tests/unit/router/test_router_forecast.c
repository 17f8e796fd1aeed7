/* How good the forecasts are: clusters in virtual time that get ten times what they can take, with a limit for the time
 * to the first token. */

#include <stdio.h>
#include "tests/check.h"
#include "tests/unit/router/virtual_cluster.h"

#define LIMIT_MS 2000u
#define FLOOD_MS 30000u

struct load {
    const char *name;
    uint32_t mean_ms; /* between requests */
    uint32_t shortest, longest, answer;
    bool keys, priorities;
};

/* What must come of it, in percent. */
struct want {
    uint32_t in_time, nearly; /* of the answered: within the limit, within a tenth more */
    uint32_t shed;            /* of the admitted: at most so many refused while they waited */
    uint32_t computed; /* of what the prefill nodes can compute; 0: they are not what is short */
};

struct result {
    uint32_t asked, admitted, in_time, nearly, shed;
    uint64_t worst_ms, tokens;
};

static uint32_t rng;
static uint32_t sizes[VC_SEQS]; /* 0: refused at once */

static uint32_t rnd(uint32_t n)
{
    rng = rng * 1664525 + 1013904223;
    return (uint32_t)((uint64_t)(rng >> 4) * n >> 28);
}

/* Sizes are spread over octaves: as many of 100 to 200 as of 1,000 to 2,000. */
static uint32_t size_of(const struct load *l)
{
    uint32_t octaves = 0;

    while (l->shortest << (octaves + 1) <= l->longest) {
        octaves++;
    }
    uint32_t low = l->shortest << (octaves > 0 ? rnd(octaves) : 0);

    return octaves > 0 ? low + rnd(low) : low;
}

static void count(struct result *r)
{
    for (uint32_t i = 0; i < r->asked; i++) {
        uint64_t ms = (vc.t_first[i] - vc.t_ask[i]) / MS;

        if (sizes[i] == 0) {
            continue;
        }
        r->admitted++;
        if (vc.t_first[i] == 0) {
            CHECK_EQ(vc.how[i], BT_RT_LATE);
            r->shed++;
        } else {
            CHECK_EQ(vc.how[i], BT_RT_FINISHED);
            r->in_time += ms <= LIMIT_MS;
            r->nearly += ms <= LIMIT_MS + LIMIT_MS / 10;
            r->worst_ms = ms > r->worst_ms ? ms : r->worst_ms;
            r->tokens += sizes[i];
        }
    }
}

static void ask_some(const struct load *l, struct result *r)
{
    for (uint32_t k = 0; k < 4 && r->asked < VC_SEQS; k++) {
        if (rnd(l->mean_ms * 4) != 0) {
            continue;
        }
        uint32_t n = size_of(l), key = l->keys ? rnd(8) == 0 ? 1 : rnd(2) * 2 : 0;
        enum bt_status st =
            vc_ask(r->asked, key, l->priorities && rnd(10) == 0 ? 5 : 0, n, l->answer);

        CHECK(st == BT_OK || st == BT_ERR_TIMEOUT);
        sizes[r->asked++] = st == BT_OK ? n : 0;
    }
}

/* Ten times too much for half a minute, on the cluster that was begun; ends it. */
static void flood(const struct load *l, const struct want *w, void (*event)(uint32_t ms))
{
    struct result r = {0};
    double speed = 0;

    rng = 7;
    for (uint32_t t = 0; t < FLOOD_MS; t++) {
        ask_some(l, &r);
        if (event != NULL) {
            event(t);
        }
        vc_run(1);
        for (uint32_t i = 0; i < vc.n_nodes; i++) {
            speed += vc.nodes[i].speed / FLOOD_MS;
        }
    }
    uint32_t asked = r.asked;

    vc_run(LIMIT_MS + LIMIT_MS / 2); /* and it is over */
    CHECK_EQ(bt_rt_core_stats(vc.core)->waiting, 0);
    vc_run(20000);
    /* What the flood has taught refuses nobody whom an idle node would serve in time. */
    vc.core->late[2] = (struct rt_late){.took = 4e9, .expected = 1e9};
    uint32_t most = (uint32_t)(vc.nodes[vc.n_nodes / 2 - 1].speed * LIMIT_MS / 1000 * 0.95);

    CHECK_EQ(vc_ask(r.asked, 0, 0, most, 8), BT_OK);
    vc_run(2 * LIMIT_MS);
    CHECK(vc.t_first[r.asked] - vc.t_ask[r.asked] <= LIMIT_MS * MS);
    count(&r);
    uint32_t answered = r.admitted - r.shed;

    printf("%-18s asked %5u, admitted %4u, shed %3u; of the others in time %5.1f %%, within 1.1 "
           "%5.1f %%, worst %llu ms; "
           "%3.0f %% of the prefill nodes' time\n",
           l->name, asked, r.admitted, r.shed, 100.0 * r.in_time / answered,
           100.0 * r.nearly / answered, (unsigned long long)r.worst_ms,
           100 * (double)r.tokens / (speed * FLOOD_MS / 1000));
    CHECK(r.in_time * 100 >= w->in_time * answered);
    CHECK(r.nearly * 100 >= w->nearly * answered);
    CHECK(r.shed * 100 <= w->shed * r.admitted);
    CHECK((double)r.tokens * 100 >= w->computed * speed * FLOOD_MS / 1000);
    vc_end();
}

static void slower_for_a_while(uint32_t ms)
{
    if (ms == 10000 || ms == 20000) {
        for (uint32_t i = 0; i < vc.n_nodes && vc.nodes[i].role == BT_ROLE_PREFILL; i++) {
            vc.nodes[i].speed = ms == 10000 ? 4000 : 10000;
        }
    }
}

/* As on a machine that others use, too: for a quarter of a second at a time a node is slow, or stands nearly still. */
static void uneven(uint32_t ms)
{
    static const double speeds[] = {10000, 12000, 8000, 11000, 9000, 10000, 4000, 500};

    for (uint32_t i = 0; ms % 250 == 0 && i < vc.n_nodes; i++) {
        if (vc.nodes[i].role == BT_ROLE_PREFILL) {
            vc.nodes[i].speed = speeds[(ms / 250 * 2654435761U + i * 40503U) >> 16 & 7];
        }
    }
}

static void begin(uint32_t n_prefill, uint32_t n_decode)
{
    vc_begin(n_prefill, n_decode, 1024, LIMIT_MS, 100000);
}

/* What is held in the router instead of being sent to a node at once costs short prompts next to nothing: mean time to
 * their first token, of prompts of which one in ten is long, at nineteen twentieths of what the nodes can take. */
static double mean_short_ms(bool at_once)
{
    const double mean_tokens = 0.9 * 160 + 0.1 * 8000;
    double sum = 0;
    uint32_t id = 0, n_short = 0;

    vc_begin(4, 2, 8192, 0, 1000000);
    for (uint32_t i = 0; i < 4 && at_once; i++) {
        vc.core->nodes[i].hello.chunk_tokens = UINT32_MAX; /* takes more whatever it has */
    }
    rng = 7;
    for (uint32_t t = 0; t < 2 * FLOOD_MS; t++) {
        if (rnd(1000000) < 0.95 * 4 * 10 / mean_tokens * 1e6) {
            sizes[id] = rnd(10) == 0 ? 4000 + rnd(8000) : 20 + rnd(280);
            CHECK_EQ(vc_ask(id, 0, 0, sizes[id], 8), BT_OK);
            id++;
        }
        vc_run(1);
    }
    vc_run(FLOOD_MS);
    for (uint32_t i = 0; i < id; i++) {
        if (sizes[i] < 300) {
            sum += (double)(vc.t_first[i] - vc.t_ask[i]) / (double)MS;
            n_short++;
        }
    }
    vc_end();
    return sum / n_short;
}

static void test_holding(void)
{
    double held = mean_short_ms(false), at_once = mean_short_ms(true);

    printf(
        "short prompts' first token after %.0f ms on average; %.0f ms if all were sent at once\n",
        held, at_once);
    CHECK(held < at_once * 1.1);
}

int main(void)
{
    const struct load mixed = {"all sizes", 10, 64, 8192, 8, false, false};

    const struct want want = {99, 100, 3, 95};

    begin(2, 2);
    flood(&(struct load){"one size", 5, 1000, 1000, 8, false, false}, &want, NULL);
    begin(2, 2);
    flood(&mixed, &want, NULL);
    begin(2, 2);
    flood(&(struct load){"three keys", 10, 64, 8192, 8, true, false}, &want, NULL);
    begin(2, 2);
    flood(&(struct load){"priorities", 10, 64, 8192, 8, true, true}, &want, NULL);
    begin(2, 2);
    vc.nodes[0].speed = 2500;
    vc_report_all();
    flood(&mixed, &want, NULL);
    begin(2, 2);
    flood(&mixed, &(struct want){99, 99, 3, 95}, slower_for_a_while);
    begin(2, 2);
    flood(&(struct load){"uneven, one size", 5, 1000, 1000, 8, false, false},
          &(struct want){99, 99, 6, 95}, uneven);
    begin(2, 2);
    flood(&(struct load){"uneven, all sizes", 10, 64, 8192, 8, false, false},
          &(struct want){99, 99, 6, 95}, uneven);
    begin(1, 1);
    flood(&(struct load){"uneven, one node", 10, 1000, 1000, 8, false, false},
          &(struct want){99, 99, 6, 95}, uneven);
    begin(2, 2);
    vc.nodes[2].step_ms = vc.nodes[3].step_ms = 50;
    flood(&(struct load){"long answers", 5, 256, 256, 100, false, false},
          &(struct want){99, 100, 3, 0}, NULL);
    begin(1, 1);
    vc.nodes[0].speed = 500;
    vc_report_all();
    flood(&(struct load){"a slow node", 4, 16, 128, 8, false, false}, &want, NULL);
    test_holding();
    return bt_test_done();
}
