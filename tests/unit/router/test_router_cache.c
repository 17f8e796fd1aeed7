/* The router's core and the nodes' prefix caches: it follows what they tell of them, believes its own
 * guesses for a while only, and lets a hot prefix draw no more work than it saves. */

#include <string.h>
#include "base/mem.h"
#include "sched/prefix_hash.h"
#include "tests/unit/router/core_fixture.h"

#define N_P      4u
#define N_TOKENS 2048u
#define BLOCKS   (N_TOKENS / 64)

static struct bt_rt_core *core;
static uint64_t now, p[N_P], d; /* sessions */
static struct bt_ticket ticket;
static uint64_t went; /* to this prefill session */

static void drain(void)
{
    struct bt_rt_action a;

    while (bt_rt_core_next(core, &a)) {
        if (a.kind == BT_RT_SEND && a.send.kind == BT_FROM_ROUTER_SUBMIT && a.session != d) {
            went = a.session;
            ticket = a.send.submit.ticket;
        }
    }
}

static uint64_t join(enum bt_role role, uint64_t instance, uint32_t page_tokens)
{
    char name[8] = {'n', (char)('0' + instance)};
    struct bt_msg_hello h = fixture_hello(role, instance, name);

    h.page_tokens = page_tokens;
    h.n_pages = 100000;
    h.max_batch = 1024;
    h.max_tokens = h.context = 8192;
    h.chunk_tokens = 16384;
    uint64_t session = fixture_join(core, now, &h);

    drain();
    return session;
}

static void tell(uint64_t session, const struct bt_msg_prefix_blocks *b)
{
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_LOAD, .load = {.prefix_blocks = *b}};

    bt_rt_on_message(core, now, session, &m);
    drain();
}

static void begin(uint32_t page_tokens)
{
    struct bt_rt_opts opts = fixture_opts();

    now = 1000 * MS;
    opts.seqs_max = 1024;
    opts.progress_ns = 600000 * MS;
    opts.lease_ns = 900000 * MS;
    CHECK_EQ(bt_rt_core_create(&opts, &core), BT_OK);
    d = join(BT_ROLE_DECODE, 9, page_tokens);
    for (uint32_t i = 0; i < N_P; i++) {
        p[i] = join(BT_ROLE_PREFILL, 1 + i, page_tokens);
        tell(p[i], &(struct bt_msg_prefix_blocks){.told = true, .reset = true});
    }
}

static void end(void)
{
    bt_rt_core_destroy(core);
    CHECK_EQ(bt_test_live_bytes(), 0);
}

static uint64_t work_at(uint32_t i)
{
    struct bt_rt_node_info info;
    uint32_t pos = 0;

    while (bt_rt_core_node(core, &pos, &info)) {
        if (info.instance == 1 + i) {
            return info.own_tokens;
        }
    }
    CHECK(!"the node is there");
    return 0;
}

static uint32_t token_of(uint32_t kind, uint32_t pos)
{
    return 1 + (kind * 7919 + pos * 31) % 1999;
}

/* Starts a prompt that begins with the first n_shared tokens of a kind, and ends in its own way; the
 * prefill node that gets it. */
static uint32_t start(uint32_t kind, uint32_t n_shared, uint32_t n_tokens)
{
    static uint32_t unique;
    uint32_t prompt[N_TOKENS + 64];

    for (uint32_t i = 0; i < n_tokens; i++) {
        prompt[i] = i < n_shared ? token_of(kind, i) : 1 + (unique++ * 2654435761U >> 8) % 1999;
    }
    went = 0;
    (void)fixture_ask(core, now, prompt, n_tokens, 2, false, BT_OK);
    drain();
    for (uint32_t i = 0; i < N_P; i++) {
        if (p[i] == went) {
            return i;
        }
    }
    CHECK(!"it went somewhere");
    return 0;
}

static void output(uint64_t session, uint32_t n, uint32_t finish)
{
    struct bt_sampled list[2] = {{.token = 1}, {.token = 2}};
    struct bt_msg_output o = {
        .ticket = ticket, .n_tokens = n, .tokens = list, .finish = finish, .has_stats = true};
    struct bt_from_daemon m = {.kind = BT_FROM_DAEMON_OUTPUTS, .outputs = {1, &o}};

    bt_rt_on_message(core, now, session, &m);
    drain();
}

/* From start to end; *computed: tokens that the router expected the node to compute. */
static uint32_t run(uint32_t kind, uint32_t n_tokens, uint64_t *computed)
{
    uint32_t at = start(kind, n_tokens, n_tokens);

    *computed = work_at(at);
    output(went, 1, 0);
    output(d, 2, 2);
    return at;
}

static void blocks_of(uint32_t kind, uint32_t block_tokens, uint64_t out[BLOCKS])
{
    uint32_t text[N_TOKENS];
    uint64_t at = 0;

    for (uint32_t i = 0; i < N_TOKENS; i++) {
        text[i] = token_of(kind, i);
    }
    for (uint32_t i = 0; (i + 1) * block_tokens <= N_TOKENS; i++) {
        out[i] = at = bt_prefix_block_hash(at, text + (size_t)i * block_tokens, block_tokens);
    }
}

/* It goes to a node that has it by what that said, until it says otherwise. */
static void test_told(void)
{
    uint64_t blocks[BLOCKS], n;

    begin(16);
    blocks_of(1, 64, blocks);
    tell(p[2], &(struct bt_msg_prefix_blocks){.told = true, .n_added = 5, .added = blocks});
    for (uint32_t i = 0; i < 5; i++) {
        CHECK_EQ(run(1, 400, &n), 2);
        CHECK_EQ(n, i == 0 ? 400 - 320 : 400 - 384); /* then it was given the sixth block */
    }
    tell(p[2], &(struct bt_msg_prefix_blocks){
                   .told = true, .n_removed = 3, .removed = blocks + 3}); /* the guess, too */
    CHECK_EQ(run(1, 400, &n), 2);
    CHECK_EQ(n, 400 - 192);
    tell(p[2], &(struct bt_msg_prefix_blocks){.told = true, .reset = true});
    (void)run(1, 400, &n);
    CHECK_EQ(n, 400);
    /* The same instance again: its next session knows nothing until it is told. */
    uint32_t at = run(1, 400, &n);

    CHECK_EQ(n, 400 - 384);
    p[at] = join(BT_ROLE_PREFILL, 1 + at, 16);
    (void)run(1, 400, &n);
    CHECK_EQ(n, 400);
    end();
}

/* What a node was given it is believed to have for half a minute, longer only if it says so. */
static void test_guesses(void)
{
    uint64_t blocks[BLOCKS], n;

    begin(16);
    uint32_t at = run(1, 400, &n);

    now += 29000 * MS;
    CHECK_EQ(run(1, 400, &n), at);
    CHECK_EQ(n, 400 - 384);
    now += 31000 * MS;
    at = run(1, 400, &n);
    CHECK_EQ(n, 400);
    blocks_of(1, 64, blocks);
    tell(p[at], &(struct bt_msg_prefix_blocks){.told = true, .n_added = 6, .added = blocks});
    now += 300000 * MS;
    CHECK_EQ(run(1, 400, &n), at);
    CHECK_EQ(n, 400 - 384);
    end();
}

/* Blocks are whole pages. */
static void test_other_pages(void)
{
    uint64_t blocks[BLOCKS], n;

    begin(24);
    blocks_of(1, 72, blocks);
    tell(p[3], &(struct bt_msg_prefix_blocks){.told = true, .n_added = 4, .added = blocks});
    CHECK_EQ(run(1, 300, &n), 3);
    CHECK_EQ(n, 300 - 4 * 72);
    end();
}

/* One prefix that everybody wants, on one of four nodes, among eight others with homes of their own:
 * it spreads before its node is more than the prefix ahead; each of the
 * others is computed again once at most, where its home is busy with the hot one. */
static void test_hot_prefix(void)
{
    enum { FAMILIES = 8, N = 600 };
    const uint32_t hot = 1024, warm = 512;
    uint64_t blocks[BLOCKS];
    bool has[FAMILIES + 1][N_P] = {0};
    uint32_t n_hot[N_P] = {0}, n_cached = 0;

    begin(16);
    for (uint32_t f = 0; f <= FAMILIES; f++) {
        blocks_of(f, 64, blocks);
        tell(p[f % N_P], &(struct bt_msg_prefix_blocks){
                             .told = true, .n_added = (f == 0 ? hot : warm) / 64, .added = blocks});
        has[f][f % N_P] = true;
    }
    for (uint32_t i = 0; i < N; i++) {
        uint32_t f = i % 3 != 0 ? 0 : 1 + i / 3 % FAMILIES, shared = f == 0 ? hot : warm;
        uint64_t least = UINT64_MAX, most = 0, cost[N_P];
        uint32_t n_tokens = shared + 40;

        for (uint32_t k = 0; k < N_P; k++) {
            cost[k] = work_at(k) + (has[f][k] ? 40 : n_tokens);
        }
        uint32_t at = start(f, shared, n_tokens);

        for (uint32_t k = 0; k < N_P; k++) {
            CHECK(cost[at] <= cost[k]);
            least = work_at(k) < least ? work_at(k) : least;
            most = work_at(k) > most ? work_at(k) : most;
        }
        CHECK(most - least <= hot + 40);
        n_cached += has[f][at];
        n_hot[at] += f == 0;
        has[f][at] = true;
    }
    for (uint32_t k = 0; k < N_P; k++) {
        CHECK(n_hot[k] <= N / 3);
    }
    CHECK(n_cached >= N - (N_P - 1) - FAMILIES);
    end();
}

int main(void)
{
    test_told();
    test_guesses();
    test_other_pages();
    test_hot_prefix();
    return bt_test_done();
}
