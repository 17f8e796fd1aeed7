/* The cores of prefilld and decoded against each other: a relay of messages between them under a
 * seeded random order, with fake engines and a fake transfer room. After each run: every attempt
 * ended exactly once, no page leaked, nothing pushed after release, nothing written into a closed
 * landing, and neither core has called the heap since it was created. */

#include <stdlib.h>
#include "base/assert.h"
#include "base/mem.h"
#include "decoded/decoded_core.h"
#include "prefilld/prefilld_core.h"
#include "tests/check.h"

#define N_LAYERS   3
#define PAGE       4
#define MAX_JOBS   32
#define MAX_MSGS   8192
#define MAX_TRIES  512
#define CONTEXT    255
#define CONN       77
#define KEEP_NS    500000
#define ALIVE_NS   250000
#define P_INSTANCE 11
#define D_INSTANCE 22

/* ---- a bag of things in flight, delivered in random order ---- */

enum what {
    W_P_CTRL,
    W_D_CTRL,
    W_P_SUBMIT,
    W_D_SUBMIT,
    W_P_CANCEL,
    W_D_CANCEL,
    W_STARTED,
    W_PAGES,
    W_TOKEN,
    W_PUSHED,
    W_LANDED,
    W_D_TOKEN,
    W_CLOSED
};

struct flight {
    enum what what;
    uint64_t job, generation;
    struct bt_control ctrl;
    struct bt_ticket ticket;
    uint32_t a, b, n;
    bool keep;
};

/* One attempt of a request, as its router made it. */
struct
try {
    uint32_t request;
    bool known;   /* its submit has the first token */
    bool over;    /* the router has given it up */
    int replaces; /* attempt before, or -1 */
};

struct engine_job {
    uint64_t job; /* 0: unknown */
    uint32_t request;
    uint32_t n_tokens, layer, chunk_end, max_tokens;
    bool cancelled;
};

struct landing {
    struct bt_ticket ticket;
    uint64_t generation;
    bool open, closing;
    uint32_t first_page;
    uint64_t want, got;
    bool expecting, told;
};

struct world {
    struct bt_pf_core *p;
    struct bt_dc_core *d;
    struct flight msgs[MAX_MSGS];
    size_t n;
    struct engine_job pe[MAX_JOBS], de[MAX_JOBS];
    struct landing land[MAX_JOBS * 4];
    size_t n_land;
    uint64_t now;
    unsigned seed;
    bool no_pages; /* D has none */
    bool cache;    /* both engines find some first pages in theirs */
    uint32_t token0_finish;
    uint64_t conn;                       /* of the two nodes */
    uint32_t refusals;                   /* of leases, to come */
    bool retry;                          /* the router tries again */
    struct bt_ticket tickets[MAX_TRIES]; /* by attempt; the first ones are those of the requests */
    struct try tries[MAX_TRIES];
    uint32_t n_tries;
    /* results per request */
    uint32_t n_requests, n_tokens_of[MAX_JOBS], max_tokens_of[MAX_JOBS];
    uint32_t computed[MAX_JOBS], told_tokens[MAX_JOBS];
    uint32_t p_outputs[MAX_JOBS], d_outputs[MAX_JOBS], ended[MAX_JOBS], finished[MAX_JOBS];
    uint32_t drained[MAX_JOBS]; /* of `ended`: with that reason */
    bool cancelled[MAX_JOBS];
    uint32_t p_cached[MAX_JOBS], d_cached[MAX_JOBS]; /* tokens, as reported */
    uint32_t p_hits, d_hits;                         /* tokens, all requests */
    uint64_t pushed_after_release;
    uint64_t heap_calls; /* when the cores were there */
};

static uint32_t rnd(struct world *w, uint32_t n)
{
    w->seed = w->seed * 1664525u + 1013904223u;
    return (w->seed >> 8) % n;
}

static uint32_t try_of(const struct world *w, const struct bt_ticket *t)
{
    for (uint32_t i = 0; i < w->n_tries; i++) {
        if (bt_ticket_equal(&w->tickets[i], t)) {
            return i;
        }
    }
    BT_ASSERT(false);
    return 0;
}

static uint32_t request_of(const struct world *w, const struct bt_ticket *t)
{
    return w->tries[try_of(w, t)].request;
}

static struct flight *fly(struct world *w, enum what what)
{
    BT_ASSERT(w->n < MAX_MSGS);
    struct flight *f = &w->msgs[w->n++];

    memset(f, 0, sizeof *f);
    f->what = what;
    return f;
}

static struct engine_job *engine_find(struct engine_job *list, uint64_t job)
{
    for (int i = 0; i < MAX_JOBS; i++) {
        if (list[i].job == job) {
            return &list[i];
        }
    }
    return NULL;
}

static struct landing *land_find(struct world *w, const struct bt_ticket *t, uint64_t generation)
{
    for (size_t i = 0; i < w->n_land; i++) {
        if (w->land[i].generation == generation && bt_ticket_equal(&w->land[i].ticket, t)) {
            return &w->land[i];
        }
    }
    return NULL;
}

static void add_try(struct world *w, uint32_t request, int replaces)
{
    uint32_t i = w->n_tries++;

    BT_ASSERT(i < MAX_TRIES);
    for (int k = 0; k < BT_TICKET_BYTES; k++) {
        w->tickets[i].b[k] = (uint8_t)rnd(w, 256);
    }
    w->tries[i] =
        (struct try){.request = request, .known = w->p_outputs[request] > 0, .replaces = replaces};
    fly(w, W_P_SUBMIT)->a = i;
    fly(w, W_D_SUBMIT)->a = i;
}

/* What the router does: the other leg is cancelled; P's is kept, and the next attempt follows. */
static void router_hears_end(struct world *w, const struct bt_msg_attempt_end *e, bool from_p)
{
    uint32_t i = try_of(w, &e->ticket), r = w->tries[i].request;

    if (w->retry && (w->tries[i].over || (from_p && w->d_outputs[r] > 0))) {
        return; /* too late, or P's part was done */
    }
    w->ended[r]++;
    w->drained[r] += e->reason == BT_ATTEMPT_DRAINING;
    CHECK(from_p || !e->kept);
    if (!from_p) {
        struct flight *f = fly(w, W_P_CANCEL);

        f->ticket = e->ticket;
        f->keep = w->retry && w->d_outputs[r] == 0;
    } else {
        fly(w, W_D_CANCEL)->ticket = e->ticket;
    }
    if (w->retry) {
        w->tries[i].over = true;
        add_try(w, r, !from_p || e->kept ? (int)i : -1);
    }
}

/* ---- actions ---- */

static void run_p(struct world *w);
static void run_d(struct world *w);

static void land_check(struct world *w, struct landing *l)
{
    if (l->open && l->expecting && !l->told && l->got >= l->want) {
        l->told = true;
        bt_dc_on_land_full(w->d, w->now, &l->ticket, l->generation,
                           l->got == l->want ? BT_OK : BT_ERR_PROTOCOL, l->got * 100, 5);
        run_d(w);
    }
}

static void do_p(struct world *w, const struct bt_pf_action *a)
{
    struct engine_job *e;

    switch (a->kind) {
    case BT_PF_ENGINE_SUBMIT:
        e = engine_find(w->pe, 0);
        BT_ASSERT(e != NULL);
        *e = (struct engine_job){.job = a->job,
                                 .request = request_of(w, &a->submit->ticket),
                                 .n_tokens = (uint32_t)a->submit->n_tokens};
        fly(w, W_STARTED)->job = a->job;
        break;
    case BT_PF_ENGINE_CANCEL:
        e = engine_find(w->pe, a->job);
        CHECK(e != NULL);
        break;
    case BT_PF_ENGINE_RELEASE:
        e = engine_find(w->pe, a->job);
        CHECK(e != NULL);
        if (e != NULL) {
            *e = (struct engine_job){0};
        }
        break;
    case BT_PF_PUSH: {
        CHECK(engine_find(w->pe, a->job) != NULL);
        struct flight *f = fly(w, W_PUSHED);

        f->job = a->job;
        f->ticket = a->ticket;
        f->generation = a->generation;
        f->n = a->push.n_pages;
        f->b = a->push.first;
        break;
    }
    case BT_PF_CONTROL: {
        CHECK_EQ(a->peer, w->conn);
        struct flight *f = fly(w, W_D_CTRL);

        f->ctrl = a->control;
        break;
    }
    case BT_PF_OUTPUT: {
        uint32_t r = request_of(w, &a->output.ticket);

        CHECK_EQ(a->output.tokens[0].token, 100);
        CHECK_EQ(a->output.index, 0);
        if (w->tries[try_of(w, &a->output.ticket)].over) {
            break; /* the router drops it: neither token nor statistics are known there */
        }
        w->p_outputs[r]++;
        w->finished[r] += a->output.finish != 0;
        w->p_cached[r] += a->output.stats.cached_tokens;
        w->told_tokens[r] += a->output.stats.cached_tokens + a->output.stats.prefill_tokens;
        CHECK(w->told_tokens[r] == w->n_tokens_of[r]);
        break;
    }
    case BT_PF_ADOPTED:
        CHECK(engine_find(w->pe, a->job) != NULL);
        CHECK(w->tries[try_of(w, &a->ticket)].replaces >= 0);
        break;
    case BT_PF_ATTEMPT_END:
        CHECK(strcmp(a->request_id, "r") == 0);
        router_hears_end(w, &a->end, true);
        break;
    case BT_PF_PUSH_CANCEL:
    case BT_PF_CONNECT:
    case BT_PF_DISCONNECT:
    case BT_PF_PEER_STATE:
    case BT_PF_MOVED:
        break;
    }
}

static void run_p(struct world *w)
{
    const struct bt_pf_actions *list = bt_pf_core_actions(w->p);

    for (size_t i = 0; i < list->n; i++) {
        do_p(w, &list->items[i]);
    }
}

static void do_d(struct world *w, const struct bt_dc_action *a)
{
    struct engine_job *e;
    struct landing *l;

    switch (a->kind) {
    case BT_DC_ENGINE_LAND:
        e = engine_find(w->de, 0);
        BT_ASSERT(e != NULL);
        *e = (struct engine_job){.job = a->job,
                                 .n_tokens = a->request->n_tokens,
                                 .max_tokens = a->request->sampling.max_tokens};
        fly(w, W_LANDED)->job = a->job;
        break;
    case BT_DC_ENGINE_SUBMIT:
        CHECK(false); /* every submit here names a peer */
        break;
    case BT_DC_ENGINE_BEGIN:
        CHECK_EQ(a->token, 100);
        fly(w, W_D_TOKEN)->job = a->job;
        break;
    case BT_DC_ENGINE_RELEASE:
        e = engine_find(w->de, a->job);
        CHECK(e != NULL);
        l = land_find(w, &a->ticket, a->generation);
        CHECK(l == NULL || !l->open); /* never released under an open landing */
        if (e != NULL) {
            *e = (struct engine_job){0};
        }
        break;
    case BT_DC_LAND_OPEN:
        BT_ASSERT(w->n_land < MAX_JOBS * 4);
        w->land[w->n_land++] = (struct landing){.ticket = a->ticket,
                                                .generation = a->generation,
                                                .open = true,
                                                .first_page = a->pages.first_page[0]};
        break;
    case BT_DC_LAND_EXPECT:
        l = land_find(w, &a->ticket, a->generation);
        BT_ASSERT(l != NULL);
        l->expecting = true;
        l->want = a->n_shares[0];
        break;
    case BT_DC_LAND_CLOSE: {
        l = land_find(w, &a->ticket, a->generation);
        BT_ASSERT(l != NULL);
        CHECK(l->open && !l->closing);
        l->closing = true;
        struct flight *f = fly(w, W_CLOSED);

        f->ticket = a->ticket;
        f->generation = a->generation;
        break;
    }
    case BT_DC_CONTROL:
        fly(w, W_P_CTRL)->ctrl = a->control;
        break;
    case BT_DC_OUTPUT: {
        uint32_t r = request_of(w, &a->output.ticket);

        CHECK_EQ(a->output.index, w->d_outputs[r]);
        w->d_outputs[r]++;
        if (a->output.has_stats) {
            w->d_cached[r] = w->n_tokens_of[r] - a->output.stats.transferred_tokens;
        }
        w->finished[r] += a->output.finish != 0;
        break;
    }
    case BT_DC_ATTEMPT_END:
        CHECK(strcmp(a->request_id, "r") == 0);
        router_hears_end(w, &a->end, false);
        break;
    case BT_DC_ENGINE_QUARANTINE:
    case BT_DC_ENGINE_CANCEL:
        CHECK(engine_find(w->de, a->job) != NULL);
        break;
    }
}

static void run_d(struct world *w)
{
    const struct bt_dc_actions *list = bt_dc_core_actions(w->d);
    struct bt_dc_action copy[8 * MAX_JOBS];
    size_t n = list->n;

    BT_ASSERT(n <= 8 * MAX_JOBS);
    if (n > 0) {
        if (n > 0) {
            memcpy(copy, list->items, n * sizeof copy[0]);
        }
    }
    for (size_t i = 0; i < n; i++) {
        do_d(w, &copy[i]);
    }
    for (size_t i = 0; i < n; i++) {
        if (copy[i].kind == BT_DC_LAND_EXPECT) {
            land_check(w, land_find(w, &copy[i].ticket, copy[i].generation));
        }
    }
}

/* ---- deliveries ---- */

static void p_engine_hit(struct world *w, struct engine_job *e, uint32_t n_pages)
{
    uint32_t ids[64] = {0};

    if (n_pages == 0) {
        return;
    }
    bt_pf_on_engine_cached(w->p, w->now, e->job, n_pages * PAGE);
    CHECK_EQ(bt_pf_core_actions(w->p)->n, 0);
    for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
        bt_pf_on_engine_pages(w->p, w->now, e->job, 0, layer, 0, n_pages, ids);
        run_p(w);
    }
    e->chunk_end = n_pages;
    w->p_hits += n_pages * PAGE;
}

static void deliver_engine_p(struct world *w, const struct flight *f)
{
    struct engine_job *e = engine_find(w->pe, f->job);

    if (e == NULL) {
        return; /* released meanwhile */
    }
    uint32_t n_pages = (e->n_tokens + PAGE - 1) / PAGE;

    if (f->what == W_STARTED) {
        w->computed[e->request]++;
        bt_pf_on_engine_started(w->p, w->now, f->job);
        run_p(w);
        if (w->cache) {
            p_engine_hit(w, e, rnd(w, (e->n_tokens - 1) / PAGE + 1));
        }
        fly(w, W_PAGES)->job = f->job;
    } else if (f->what == W_PAGES) {
        uint32_t ids[64] = {0};
        uint32_t first = e->chunk_end;
        uint32_t end = first + 2 < n_pages ? first + 2 : n_pages;
        uint32_t layer = e->layer;

        BT_ASSERT(n_pages <= 64);
        if (++e->layer == N_LAYERS) {
            e->layer = 0;
            e->chunk_end = end;
        }
        fly(w, e->chunk_end == n_pages ? W_TOKEN : W_PAGES)->job = f->job;
        bt_pf_on_engine_pages(w->p, w->now, f->job, 0, layer, first, end, ids);
        run_p(w);
    } else {
        struct bt_sampled s = {.token = 100};

        bt_pf_on_engine_token(w->p, w->now, f->job, 0, &s, w->token0_finish);
        run_p(w);
    }
}

static void deliver_engine_d(struct world *w, const struct flight *f)
{
    struct engine_job *e = engine_find(w->de, f->job);
    /* Actions may point to these: they live until the list was carried out. */
    uint32_t ids[64] = {0};
    const uint32_t *tables[1] = {ids};
    uint32_t first[1] = {0};
    struct bt_sampled s = {.token = 100 + f->a + 1};

    if (e == NULL) {
        return;
    }
    bool refused = w->no_pages || (w->refusals > 0 && rnd(w, 2) == 0);

    if (f->what == W_LANDED && refused) {
        w->refusals -= w->refusals > 0;
        *e = (struct engine_job){0};
        bt_dc_on_engine_failed(w->d, w->now, f->job, BT_ERR_BUSY, "no pages");
    } else if (f->what == W_LANDED) {
        first[0] = w->cache ? rnd(w, e->n_tokens / PAGE + 1) : 0;
        w->d_hits += first[0] * PAGE;
        bt_dc_on_engine_landed(w->d, w->now, f->job, first[0] * PAGE,
                               (e->n_tokens + PAGE - 1) / PAGE, first, tables);
    } else {
        bool last = f->a + 2 == e->max_tokens;

        if (!last) {
            struct flight *next = fly(w, W_D_TOKEN);

            next->job = f->job;
            next->a = f->a + 1;
        }
        bt_dc_on_engine_token(w->d, w->now, f->job, f->a + 1, &s, last ? 2 : 0);
    }
    run_d(w);
}

static void deliver_push(struct world *w, const struct flight *f)
{
    struct landing *l = land_find(w, &f->ticket, f->generation);

    if (l != NULL && l->open && !l->closing) {
        l->got += f->n;
        CHECK(f->b >= l->first_page);
        land_check(w, l);
    }
    w->pushed_after_release += engine_find(w->pe, f->job) == NULL;
    bt_pf_on_pushed(w->p, w->now, f->job, &f->ticket, BT_OK);
    run_p(w);
}

static void submit(struct world *w, uint32_t i, bool to_p)
{
    uint32_t tokens[256] = {0};
    const struct try *y = &w->tries[i];
    uint32_t r = y->request;
    struct bt_msg_submit s = {
        .ticket = w->tickets[i],
        .request_id = "r",
        .n_tokens = w->n_tokens_of[r] + y->known,
        .tokens = tokens,
        .n_prompt = w->n_tokens_of[r],
        .sampling = {.max_tokens = w->max_tokens_of[r], .top_p = 1},
        .peer_instance = to_p ? D_INSTANCE : P_INSTANCE,
        .peer_address = "d",
    };

    tokens[w->n_tokens_of[r]] = 100;
    if (to_p && y->replaces >= 0) {
        s.has_replaces = true;
        s.replaces = w->tickets[y->replaces];
    }
    if (to_p) {
        bt_pf_on_submit(w->p, w->now, 0, &s);
        run_p(w);
    } else {
        bt_dc_on_submit(w->d, w->now, 0, &s);
        run_d(w);
    }
}

static void deliver(struct world *w, const struct flight *f)
{
    switch (f->what) {
    case W_P_CTRL:
        bt_pf_on_control(w->p, w->now, w->conn, &f->ctrl);
        run_p(w);
        break;
    case W_D_CTRL:
        bt_dc_on_control(w->d, w->now, w->conn, &f->ctrl);
        run_d(w);
        break;
    case W_P_SUBMIT:
    case W_D_SUBMIT:
        submit(w, f->a, f->what == W_P_SUBMIT);
        break;
    case W_P_CANCEL:
        bt_pf_on_cancel(w->p, w->now, 0, &f->ticket, f->keep);
        run_p(w);
        break;
    case W_D_CANCEL:
        bt_dc_on_cancel(w->d, w->now, 0, &f->ticket);
        run_d(w);
        break;
    case W_STARTED:
    case W_PAGES:
    case W_TOKEN:
        deliver_engine_p(w, f);
        break;
    case W_LANDED:
    case W_D_TOKEN:
        deliver_engine_d(w, f);
        break;
    case W_PUSHED:
        deliver_push(w, f);
        break;
    case W_CLOSED:
        land_find(w, &f->ticket, f->generation)->open = false;
        bt_dc_on_land_closed(w->d, w->now, &f->ticket, f->generation);
        run_d(w);
        break;
    }
}

/* What has to come before message i: the submit of a ticket before its cancel, both of an attempt before the one that
 * replaces it. Messages of the router to one node keep their order; everything else may be delivered in any order. */
static bool comes_before(const struct world *w, size_t k, size_t i)
{
    const struct flight *x = &w->msgs[k], *y = &w->msgs[i];
    bool x_submit = x->what == W_P_SUBMIT || x->what == W_D_SUBMIT;
    bool to_p = y->what == W_P_SUBMIT || y->what == W_P_CANCEL;
    const struct bt_ticket *t;

    if (y->what == W_P_CANCEL || y->what == W_D_CANCEL) {
        t = &y->ticket;
    } else if (y->what == W_P_SUBMIT && w->tries[y->a].replaces >= 0) {
        t = &w->tickets[w->tries[y->a].replaces];
    } else {
        return false;
    }
    return k != i && (x->what == W_P_SUBMIT || x->what == W_P_CANCEL) == to_p &&
           (x_submit
                ? bt_ticket_equal(&w->tickets[x->a], t)
                : y->what == W_P_SUBMIT && x->what == W_P_CANCEL && bt_ticket_equal(&x->ticket, t));
}

static size_t pick(struct world *w)
{
    size_t i = rnd(w, (uint32_t)w->n);

    for (size_t k = 0; k < w->n; k++) {
        if (comes_before(w, k, i)) {
            i = k;
            k = (size_t)-1;
        }
    }
    return i;
}

static void world_start_with_window(struct world *w, unsigned seed, uint32_t window)
{
    memset(w, 0, sizeof *w);
    w->seed = seed;
    w->now = 1000;
    w->conn = CONN;
    struct bt_pf_opts po = {.max_jobs = MAX_JOBS,
                            .peers_max = 4,
                            .n_groups = 1,
                            .n_layers = {N_LAYERS},
                            .window = {window},
                            .page_tokens = PAGE,
                            .context = CONTEXT,
                            .reconnect_ns = 100,
                            .unreachable_ns = 1000000,
                            .grant_ns = 1000000,
                            .alive_ns = ALIVE_NS,
                            .keep_ns = KEEP_NS};
    struct bt_dc_opts dopts = {.max_jobs = MAX_JOBS,
                               .parked_max = 8,
                               .context = CONTEXT,
                               .n_groups = 1,
                               .n_layers = {N_LAYERS},
                               .park_ns = 1000000,
                               .transfer_ns = 1000000};
    struct bt_msg_peer peer = {.instance = D_INSTANCE, .address = "d", .name = "d"};

    CHECK_EQ(bt_pf_core_create(&po, &w->p), BT_OK);
    CHECK_EQ(bt_dc_core_create(&dopts, &w->d), BT_OK);
    w->heap_calls = bt_test_heap_calls();
    bt_pf_on_peers(w->p, w->now, &peer, 1);
    CHECK_EQ(bt_pf_core_actions(w->p)->n, 1);
    CHECK_EQ(bt_pf_core_actions(w->p)->items[0].kind, BT_PF_CONNECT);
    bt_pf_on_connecting(w->p, w->now, D_INSTANCE, CONN);
    bt_pf_on_peer_up(w->p, w->now, CONN);
}

static void world_start(struct world *w, unsigned seed)
{
    world_start_with_window(w, seed, 0);
}

static void add_request(struct world *w, uint32_t n_tokens, uint32_t max_tokens)
{
    uint32_t r = w->n_requests++;

    w->n_tokens_of[r] = n_tokens;
    w->max_tokens_of[r] = max_tokens;
    add_try(w, r, -1);
}

static void world_run(struct world *w)
{
    for (size_t steps = 0; w->n > 0 && steps < 100000; steps++) {
        size_t i = pick(w);
        struct flight f = w->msgs[i];

        memmove(&w->msgs[i], &w->msgs[i + 1], (w->n - i - 1) * sizeof f);
        w->n--;
        w->now++;
        deliver(w, &f);
    }
    CHECK_EQ(w->n, 0);
    for (int i = 0; i < 2; i++) { /* a job that loses its decode side is kept for a while */
        w->now += 10000000;       /* every deadline passes */
        bt_pf_on_tick(w->p, w->now);
        run_p(w);
        bt_dc_on_tick(w->d, w->now);
        run_d(w);
        while (w->n > 0) {
            struct flight f = w->msgs[--w->n];

            deliver(w, &f);
        }
    }
}

static void world_check_idle(struct world *w)
{
    for (int i = 0; i < MAX_JOBS; i++) {
        CHECK_EQ(w->pe[i].job, 0);
        CHECK_EQ(w->de[i].job, 0);
    }
    for (size_t i = 0; i < w->n_land; i++) {
        CHECK(!w->land[i].open);
    }
    CHECK_EQ(w->pushed_after_release, 0);
    CHECK_EQ(bt_pf_core_jobs(w->p), 0);
    CHECK_EQ(bt_dc_core_jobs(w->d), 0);
    CHECK_EQ(bt_test_heap_calls() - w->heap_calls, 0);
    bt_pf_core_destroy(w->p);
    bt_dc_core_destroy(w->d);
}

/* Until somewhere in the middle. */
static void world_run_some(struct world *w)
{
    for (uint32_t i = 0; i < 20 + rnd(w, 60) && w->n > 0; i++) {
        size_t k = pick(w);
        struct flight f = w->msgs[k];

        memmove(&w->msgs[k], &w->msgs[k + 1], (w->n - k - 1) * sizeof f);
        w->n--;
        deliver(w, &f);
    }
}

/* ---- cases ---- */

static void test_random_order(unsigned seed)
{
    static struct world w;

    world_start(&w, seed);
    uint32_t n = 1 + rnd(&w, 8);

    for (uint32_t i = 0; i < n; i++) {
        add_request(&w, 1 + rnd(&w, 40), 2 + rnd(&w, 5));
    }
    world_run(&w);
    for (uint32_t r = 0; r < n; r++) {
        CHECK_EQ(w.p_outputs[r], 1);
        CHECK_EQ(w.d_outputs[r], w.max_tokens_of[r]);
        CHECK_EQ(w.finished[r], 1);
        CHECK_EQ(w.ended[r], 0);
    }
    CHECK_EQ(bt_dc_core_stats(w.d)->transfers, n);
    world_check_idle(&w);
}

/* What a node has in its cache is not computed and not sent, and counted as such; also when D has
 * all of a prompt and nothing is sent at all. */
static void test_cached(unsigned seed)
{
    static struct world w;
    uint32_t tokens = 0, p_cached = 0, d_cached = 0;

    world_start(&w, seed);
    w.cache = true;
    for (uint32_t i = 0; i < 8; i++) {
        add_request(&w, i % 2 == 0 ? PAGE * (1 + rnd(&w, 4)) : 1 + rnd(&w, 40), 2 + rnd(&w, 5));
        tokens += w.n_tokens_of[i];
    }
    world_run(&w);
    for (uint32_t r = 0; r < 8; r++) {
        CHECK_EQ(w.p_outputs[r], 1);
        CHECK_EQ(w.d_outputs[r], w.max_tokens_of[r]);
        CHECK_EQ(w.finished[r], 1);
        CHECK_EQ(w.ended[r], 0);
        p_cached += w.p_cached[r];
        d_cached += w.d_cached[r];
    }
    CHECK_EQ(p_cached, w.p_hits);
    CHECK_EQ(d_cached, w.d_hits);
    CHECK_EQ(bt_pf_core_stats(w.p)->cached_tokens, w.p_hits);
    CHECK_EQ(bt_dc_core_stats(w.d)->cached_tokens, w.d_hits);
    CHECK_EQ(bt_dc_core_stats(w.d)->transferred_tokens, tokens - w.d_hits);
    CHECK_EQ(bt_dc_core_stats(w.d)->transfers, 8);
    world_check_idle(&w);
}

static void test_random_cancel(unsigned seed)
{
    static struct world w;

    world_start(&w, seed);
    for (uint32_t i = 0; i < 8; i++) {
        add_request(&w, 1 + rnd(&w, 40), 2 + rnd(&w, 5));
        if (rnd(&w, 2) == 0) {
            w.cancelled[i] = true;
            fly(&w, W_P_CANCEL)->ticket = w.tickets[i];
            fly(&w, W_D_CANCEL)->ticket = w.tickets[i];
        }
    }
    world_run(&w);
    for (uint32_t r = 0; r < 8; r++) {
        CHECK(w.cancelled[r] || w.finished[r] == 1);
        CHECK(w.cancelled[r] || w.ended[r] == 0);
    }
    world_check_idle(&w);
}

static void test_token0_ends(unsigned seed)
{
    static struct world w;

    world_start(&w, seed);
    w.token0_finish = 1;
    for (uint32_t i = 0; i < 5; i++) {
        add_request(&w, 1 + rnd(&w, 40), 8);
    }
    world_run(&w);
    for (uint32_t r = 0; r < 5; r++) {
        CHECK_EQ(w.p_outputs[r], 1);
        CHECK_EQ(w.finished[r], 1);
        CHECK_EQ(w.d_outputs[r], 0);
    }
    CHECK_EQ(bt_dc_core_stats(w.d)->transferred_tokens, 0);
    /* the router ends D's leg */
    for (uint32_t r = 0; r < 5; r++) {
        bt_dc_on_cancel(w.d, w.now, 0, &w.tickets[r]);
        run_d(&w);
    }
    world_check_idle(&w);
}

/* D refuses, gives landings up, and loses its connection, all before `done`: each prompt is computed once, and its answer is
 * whole. */
static void reset_connection(struct world *w)
{
    bt_pf_on_peer_down(w->p, w->now, w->conn, "test");
    run_p(w);
    bt_dc_on_peer_down(w->d, w->now, w->conn, "test");
    run_d(w);
    for (size_t i = 0; i < w->n;) {
        if (w->msgs[i].what == W_P_CTRL || w->msgs[i].what == W_D_CTRL) {
            w->msgs[i] = w->msgs[--w->n];
            continue;
        }
        w->msgs[i].generation = w->msgs[i].what == W_PUSHED ? 0 : w->msgs[i].generation;
        i++;
    }
    w->now += 200; /* the first pause */
    w->conn++;
    bt_pf_on_tick(w->p, w->now);
    bt_pf_on_connecting(w->p, w->now, D_INSTANCE, w->conn);
    bt_pf_on_peer_up(w->p, w->now, w->conn);
    run_p(w);
}

static void test_resend(unsigned seed)
{
    static struct world w;
    uint32_t resets;

    world_start(&w, seed);
    w.retry = true;
    w.refusals = rnd(&w, 6);
    resets = rnd(&w, 3);
    for (uint32_t i = 0; i < 4; i++) {
        add_request(&w, 1 + rnd(&w, 40), 2 + rnd(&w, 5));
    }
    for (uint32_t i = 0; i < resets; i++) {
        world_run_some(&w);
        reset_connection(&w);
    }
    world_run(&w);
    for (uint32_t r = 0; r < 4; r++) {
        CHECK_EQ(w.computed[r], 1);
        CHECK_EQ(w.finished[r], 1);
        CHECK_EQ(w.d_outputs[r], w.max_tokens_of[r]);
        CHECK_EQ(w.told_tokens[r], w.n_tokens_of[r]);
    }
    CHECK_EQ(bt_pf_core_kept(w.p), 0);
    world_check_idle(&w);
}

static void p_control(struct world *w, enum bt_control_kind kind, uint64_t generation);

static bool has_action(const struct world *w, enum bt_pf_action_kind kind)
{
    const struct bt_pf_actions *list = bt_pf_core_actions(w->p);

    for (size_t i = 0; i < list->n; i++) {
        if (list->items[i].kind == kind) {
            return true;
        }
    }
    return false;
}

/* What is kept makes room for those that need it: pages, then jobs; late messages of its attempt find nothing. */
static void test_kept_goes_first(void)
{
    static struct world w;
    uint64_t stale;

    world_start(&w, 1);
    for (uint32_t i = 0; i < MAX_JOBS; i++) {
        add_request(&w, 8, 4);
        submit(&w, i, true);
    }
    w.n = 0;
    for (uint32_t i = 0; i < 3; i++) { /* two of them have begun, one after the other */
        if (i < 2) {
            bt_pf_on_engine_started(w.p, w.now, w.pe[i].job);
        }
        bt_pf_on_cancel(w.p, ++w.now, 0, &w.tickets[i], true);
        CHECK(!has_action(&w, BT_PF_ENGINE_RELEASE) && !has_action(&w, BT_PF_ATTEMPT_END));
    }
    CHECK_EQ(bt_pf_core_kept(w.p), 3);
    stale = bt_pf_core_stats(w.p)->stale;
    p_control(&w, BT_CONTROL_GRANT, 9); /* for the ticket that is over */
    CHECK_EQ(bt_pf_core_stats(w.p)->stale, stale + 1);
    CHECK_EQ(bt_pf_core_actions(w.p)->items[0].control.kind, BT_CONTROL_FORGET);
    for (int i = 0; i < 3; i++) { /* the one that waits itself has no pages */
        bt_pf_on_engine_short(w.p, w.now);
        CHECK(has_action(&w, BT_PF_ENGINE_RELEASE) == (i < 2));
        run_p(&w);
    }
    CHECK_EQ(bt_pf_core_kept(w.p), 1);
    CHECK_EQ(bt_pf_core_jobs(w.p), MAX_JOBS - 2);
    for (uint32_t i = 0; i < 3; i++) {
        add_try(&w, i, -1);
        submit(&w, MAX_JOBS + i, true);
    }
    CHECK_EQ(bt_pf_core_kept(w.p), 0);
    CHECK_EQ(bt_pf_core_stats(w.p)->keep_evicted, 3);
    bt_pf_on_router_lost(w.p, w.now, 0);
    run_p(&w);
    world_check_idle(&w);
}

/* A submit that replaces what does not fit is computed; what was kept goes. */
static void test_replaces_another(void)
{
    static struct world w;
    uint32_t tokens[9] = {0};
    struct bt_msg_submit s = {.request_id = "r",
                              .n_tokens = 8,
                              .tokens = tokens,
                              .n_prompt = 8,
                              .sampling = {.max_tokens = 4, .top_p = 1},
                              .peer_instance = D_INSTANCE,
                              .peer_address = "d",
                              .has_replaces = true};

    for (int i = 0; i < 4; i++) {
        world_start(&w, 1);
        add_request(&w, 8, 4);
        add_request(&w, 8, 4);
        w.n = 0;
        submit(&w, 0, true);
        if (i < 3) { /* the fourth is alive, and stays so */
            bt_pf_on_cancel(w.p, w.now, 0, &w.tickets[0], true);
        }
        s.ticket = w.tickets[1];
        s.replaces = w.tickets[0];
        tokens[3] = i == 0;                              /* other tokens */
        s.n_tokens = 8 + (i == 1);                       /* a first token that is not known here */
        bt_pf_on_submit(w.p, w.now, i == 2 ? 1 : 0, &s); /* of another router */
        CHECK(has_action(&w, BT_PF_ENGINE_SUBMIT) && !has_action(&w, BT_PF_ADOPTED));
        run_p(&w);
        CHECK_EQ(bt_pf_core_jobs(w.p), i < 2 ? 1 : 2);
        bt_pf_on_router_lost(w.p, w.now, 0);
        run_p(&w);
        bt_pf_on_router_lost(w.p, w.now, 1);
        run_p(&w);
        world_check_idle(&w);
    }
}

static void test_no_pages(unsigned seed)
{
    static struct world w;

    world_start(&w, seed);
    w.no_pages = true;
    add_request(&w, 30, 4);
    world_run(&w);
    CHECK(w.ended[0] >= 1);
    CHECK_EQ(w.finished[0], 0);
    world_check_idle(&w);
}

/* A node whose time to drain is over gives everything back that it has not finished, with that reason, and the other one
 * never has another reason for it. */
static void test_give_back(unsigned seed)
{
    static struct world w;
    bool at_p;

    world_start(&w, seed);
    for (uint32_t i = 0; i < 6; i++) {
        add_request(&w, 1 + rnd(&w, 40), 2 + rnd(&w, 5));
    }
    world_run_some(&w);
    at_p = rnd(&w, 2) == 0;
    if (at_p) {
        bt_pf_on_give_back(w.p, w.now);
        run_p(&w);
    } else {
        bt_dc_on_give_back(w.d, w.now);
        run_d(&w);
    }
    world_run(&w);
    for (uint32_t r = 0; r < 6; r++) {
        CHECK(w.finished[r] == 1 || w.drained[r] > 0);
        CHECK(at_p || w.drained[r] == w.ended[r]);
    }
    world_check_idle(&w);
}

static void test_peer_lost(unsigned seed)
{
    static struct world w;

    world_start(&w, seed);
    for (uint32_t i = 0; i < 6; i++) {
        add_request(&w, 1 + rnd(&w, 40), 3);
    }
    world_run_some(&w);
    /* The connection breaks: control messages in flight are gone, pushes end with an error. */
    bt_pf_on_peer_down(w.p, w.now, CONN, "test");
    run_p(&w);
    bt_dc_on_peer_down(w.d, w.now, CONN, "test");
    run_d(&w);
    for (size_t i = 0; i < w.n;) {
        struct flight *f = &w.msgs[i];
        bool gone = f->what == W_P_CTRL || f->what == W_D_CTRL;

        if (f->what == W_PUSHED) {
            f->generation = 0; /* nothing arrives */
        }
        if (gone) {
            w.msgs[i] = w.msgs[--w.n];
        } else {
            i++;
        }
    }
    /* It does not come back: what is left must end by its deadlines or by the router's cancel. */
    for (uint32_t r = 0; r < 6; r++) {
        fly(&w, W_P_CANCEL)->ticket = w.tickets[r];
        fly(&w, W_D_CANCEL)->ticket = w.tickets[r];
    }
    world_run(&w);
    world_check_idle(&w);
}

/* ---- single steps ---- */

static void d_control(struct world *w, enum bt_control_kind kind, uint64_t generation)
{
    struct bt_control m = {.kind = kind, .ticket = w->tickets[0], .generation = generation};

    if (kind == BT_CONTROL_STARTED) {
        m.started.n_tokens = w->n_tokens_of[0];
    }
    bt_dc_on_control(w->d, w->now, CONN, &m);
}

static void p_control(struct world *w, enum bt_control_kind kind, uint64_t generation)
{
    struct bt_control m = {.kind = kind, .ticket = w->tickets[0], .generation = generation};

    if (kind == BT_CONTROL_GRANT) {
        m.grant.n_groups = 1;
    }
    bt_pf_on_control(w->p, w->now, CONN, &m);
}

/* One request of 8 tokens that D has leased pages for; its generation. */
/* D leases pages for request i, whose landing is open then. */
static void d_land(struct world *w, uint32_t i)
{
    uint32_t ids[2] = {0}, first[1] = {0};
    const uint32_t *tables[1] = {ids};

    add_request(w, 8, 4);
    w->n = 0;
    submit(w, i, false);
    struct bt_control m = {.kind = BT_CONTROL_STARTED, .ticket = w->tickets[i]};

    m.started.n_tokens = w->n_tokens_of[i];
    bt_dc_on_control(w->d, w->now, CONN, &m);
    uint64_t job = bt_dc_core_actions(w->d)->items[0].job;

    run_d(w);
    bt_dc_on_engine_landed(w->d, w->now, job, 0, 2, first, tables);
    run_d(w);
}

static uint64_t d_landing(struct world *w)
{
    world_start(w, 1);
    d_land(w, 0);
    return w->land[0].generation;
}

static void d_closed(struct world *w)
{
    w->land[0].open = false;
    bt_dc_on_land_closed(w->d, w->now, &w->tickets[0], w->land[0].generation);
    run_d(w);
}

static void test_forget_of_another_generation(void)
{
    static struct world w;
    uint64_t generation = d_landing(&w);
    uint64_t stale = bt_dc_core_stats(w.d)->stale;

    d_control(&w, BT_CONTROL_FORGET, generation + 1);
    CHECK_EQ(bt_dc_core_actions(w.d)->n, 0);
    CHECK_EQ(bt_dc_core_stats(w.d)->stale, stale + 1);
    CHECK_EQ(bt_dc_core_jobs(w.d), 1);
    d_control(&w, BT_CONTROL_FORGET, generation);
    CHECK(bt_dc_core_actions(w.d)->n > 0);
    run_d(&w);
    d_closed(&w);
    world_check_idle(&w);
}

static void test_engine_failure_revokes(void)
{
    static struct world w;
    uint64_t generation = d_landing(&w);
    bool revoked = false;
    uint64_t job = 0;

    for (int i = 0; i < MAX_JOBS; i++) {
        job = w.de[i].job != 0 ? w.de[i].job : job;
    }
    memset(w.de, 0, sizeof w.de);
    bt_dc_on_engine_failed(w.d, w.now, job, BT_ERR_DEVICE, "test");
    const struct bt_dc_actions *list = bt_dc_core_actions(w.d);

    for (size_t i = 0; i < list->n; i++) {
        revoked = revoked || (list->items[i].kind == BT_DC_CONTROL &&
                              list->items[i].control.kind == BT_CONTROL_REVOKE &&
                              list->items[i].control.generation == generation);
        CHECK(list->items[i].kind != BT_DC_ENGINE_RELEASE);
    }
    CHECK(revoked);
    d_closed(&w);
    world_check_idle(&w);
}

/* P gets request i, alone in its answer, and its engine begins with it. Returns P's job; nothing is granted yet. */
static uint64_t p_begin(struct world *w, uint32_t i)
{
    add_request(w, 8, 4);
    w->n = 0;
    submit(w, i, true);
    bt_pf_on_engine_started(w->p, w->now, w->pe[i].job);
    return w->pe[i].job;
}

/* The pushes of request 0 end, one for each layer. */
static void p_pushes_end(struct world *w, uint64_t job, enum bt_status st)
{
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        bt_pf_on_pushed(w->p, w->now, job, &w->tickets[0], st);
        run_p(w);
    }
}

/* A prompt computed and granted, with one push under way; its job. */
static uint64_t p_held(struct world *w, uint64_t generation)
{
    uint32_t ids[2] = {0};
    struct bt_sampled s = {.token = 100};

    world_start(w, 1);
    uint64_t job = p_begin(w, 0);

    p_control(w, BT_CONTROL_GRANT, generation);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        bt_pf_on_engine_pages(w->p, w->now, job, 0, l, 0, 2, ids);
    }
    bt_pf_on_engine_token(w->p, w->now, job, 0, &s, 0);
    return job;
}

static void test_slow_transfer_is_not_stuck(void)
{
    static struct world w;
    uint64_t job = p_held(&w, 5);

    /* Longer than the deadline in all, never without progress for so long. */
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        w.now += 900000;
        bt_pf_on_tick(w.p, w.now);
        CHECK_EQ(bt_pf_core_actions(w.p)->n, 0);
        bt_pf_on_pushed(w.p, w.now, job, &w.tickets[0], BT_OK);
    }
    w.now += 900000;
    bt_pf_on_tick(w.p, w.now);
    CHECK_EQ(bt_pf_core_actions(w.p)->n, 0);
    w.now += 200000; /* and nothing from D */
    bt_pf_on_tick(w.p, w.now);
    CHECK(bt_pf_core_actions(w.p)->n > 0);
    run_p(&w);
    CHECK_EQ(w.ended[0], 1);
    CHECK_EQ(bt_pf_core_kept(w.p), 1);
    w.now += KEEP_NS + 1;
    bt_pf_on_tick(w.p, w.now);
    run_p(&w);
    CHECK_EQ(bt_pf_core_stats(w.p)->keep_expired, 1);
    world_check_idle(&w);
}

/* A prompt whose pages wait at P behind those of others is not late; where no page leaves any more, it is. */
static void test_queued_pushes_are_not_stuck(void)
{
    static struct world w;
    uint64_t job = p_held(&w, 5), other;
    uint32_t ids[2] = {0};
    struct bt_control m = {.kind = BT_CONTROL_GRANT, .generation = 6};

    other = p_begin(&w, 1);
    m.ticket = w.tickets[1];
    m.grant.n_groups = 1;
    bt_pf_on_control(w.p, w.now, CONN, &m);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        bt_pf_on_engine_pages(w.p, w.now, other, 0, l, 0, 2, ids);
    }
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        w.now += 900000;
        bt_pf_on_tick(w.p, w.now);
        CHECK_EQ(bt_pf_core_actions(w.p)->n, 0);
        bt_pf_on_pushed(w.p, w.now, other, &w.tickets[1], BT_OK);
    }
    w.now += 900000;
    bt_pf_on_tick(w.p, w.now);
    CHECK_EQ(bt_pf_core_actions(w.p)->n, 0);
    w.now += 100001; /* the transfer room hangs, and does not even end the pushes */
    bt_pf_on_tick(w.p, w.now);
    run_p(&w);
    CHECK_EQ(w.ended[0], 1);
    w.now += KEEP_NS + 1;
    bt_pf_on_tick(w.p, w.now);
    run_p(&w);
    CHECK_EQ(bt_pf_core_stats(w.p)->keep_expired, 1);
    bt_pf_on_router_lost(w.p, w.now, 0);
    run_p(&w);
    p_pushes_end(&w, job, BT_ERR_CANCELLED);
    world_check_idle(&w);
}

/* P tells it of what is granted and computed, now and then, while layers come out of its engine; not of more. */
static void test_says_that_it_computes(void)
{
    static struct world w;
    uint32_t ids[2] = {0};
    struct bt_sampled s = {.token = 100};

    world_start(&w, 1);
    uint64_t job = p_begin(&w, 0);

    w.now += ALIVE_NS;
    bt_pf_on_engine_alive(w.p, w.now);
    CHECK_EQ(bt_pf_core_actions(w.p)->n, 0); /* no grant yet */
    p_control(&w, BT_CONTROL_GRANT, 5);
    for (int i = 0; i < 3; i++) {
        w.now += ALIVE_NS - 1;
        bt_pf_on_engine_alive(w.p, w.now);
        CHECK_EQ(bt_pf_core_actions(w.p)->n, 0); /* too early */
        w.now += 1;
        bt_pf_on_engine_alive(w.p, w.now);
        const struct bt_pf_actions *list = bt_pf_core_actions(w.p);

        CHECK_EQ(list->n, 1);
        CHECK_EQ(list->items[0].control.kind, BT_CONTROL_COMPUTING);
        CHECK_EQ(list->items[0].control.generation, 5);
        CHECK_EQ(list->items[0].peer, CONN);
        CHECK(bt_ticket_equal(&list->items[0].control.ticket, &w.tickets[0]));
    }
    w.now += 10 * ALIVE_NS; /* an engine that hangs tells the core nothing */
    bt_pf_on_tick(w.p, w.now);
    CHECK_EQ(bt_pf_core_actions(w.p)->n, 0);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        bt_pf_on_engine_pages(w.p, w.now, job, 0, l, 0, 2, ids);
    }
    bt_pf_on_engine_token(w.p, w.now, job, 0, &s, 0);
    w.now += ALIVE_NS;
    bt_pf_on_engine_alive(w.p, w.now); /* of others */
    CHECK_EQ(bt_pf_core_actions(w.p)->n, 0);
    p_control(&w, BT_CONTROL_DONE, 5);
    run_p(&w);
    p_pushes_end(&w, job, BT_OK);
    world_check_idle(&w);
}

/* What is kept has no decode node that could be told. */
static void test_kept_tells_nobody(void)
{
    static struct world w;

    world_start(&w, 1);
    (void)p_begin(&w, 0);
    p_control(&w, BT_CONTROL_GRANT, 5);
    bt_pf_on_cancel(w.p, w.now, 0, &w.tickets[0], true);
    w.now += ALIVE_NS;
    bt_pf_on_engine_alive(w.p, w.now);
    CHECK_EQ(bt_pf_core_actions(w.p)->n, 0);
    bt_pf_on_router_lost(w.p, w.now, 0);
    run_p(&w);
    world_check_idle(&w);
}

/* A prompt that takes P many deadlines keeps its landing as long as P says so: about this lease, before the hand-off. */
static void test_slow_prompt_is_not_stuck(void)
{
    static struct world w;
    uint64_t generation = d_landing(&w);
    uint64_t stale = bt_dc_core_stats(w.d)->stale;

    for (int i = 0; i < 5; i++) {
        w.now += 900000;
        bt_dc_on_tick(w.d, w.now);
        CHECK_EQ(bt_dc_core_actions(w.d)->n, 0);
        d_control(&w, BT_CONTROL_COMPUTING, generation);
        CHECK_EQ(bt_dc_core_actions(w.d)->n, 0);
    }
    CHECK_EQ(bt_dc_core_stats(w.d)->stale, stale);
    w.now += 900000;
    d_control(&w, BT_CONTROL_COMPUTING, generation + 1); /* another lease's */
    CHECK_EQ(bt_dc_core_actions(w.d)->n, 0);
    CHECK_EQ(bt_dc_core_stats(w.d)->stale, stale + 1);
    w.now += 200000; /* it hangs, though its connection lives */
    bt_dc_on_tick(w.d, w.now);
    CHECK_EQ(bt_dc_core_stats(w.d)->stalled, 1);
    run_d(&w);
    CHECK_EQ(w.ended[0], 1);
    d_control(&w, BT_CONTROL_COMPUTING, generation); /* sent before it heard: nothing new for it */
    CHECK_EQ(bt_dc_core_actions(w.d)->n, 0);
    CHECK_EQ(bt_dc_core_stats(w.d)->stale, stale + 2);
    d_closed(&w);
    world_check_idle(&w);
}

static void d_all_closed(struct world *w)
{
    for (size_t i = 0; i < w->n_land; i++) {
        if (w->land[i].open) {
            w->land[i].open = false;
            bt_dc_on_land_closed(w->d, w->now, &w->land[i].ticket, w->land[i].generation);
            run_d(w);
        }
    }
}

/* A landing waits its turn while pages of others come from the same P, not while it only says something. */
static void test_landings_take_turns(void)
{
    static struct world w;
    uint64_t generation = d_landing(&w);
    const struct bt_ticket first = w.tickets[0];

    d_land(&w, 1);
    for (int i = 0; i < 5; i++) {
        w.now += 900000;
        bt_dc_on_landed(w.d, w.now, &first, generation);
        bt_dc_on_tick(w.d, w.now);
        CHECK_EQ(bt_dc_core_actions(w.d)->n, 0);
    }
    w.now += 1000001;
    d_control(&w, BT_CONTROL_COMPUTING, generation);
    bt_dc_on_tick(w.d, w.now);
    CHECK_EQ(bt_dc_core_stats(w.d)->stalled, 1); /* the second; the first computes, it says */
    run_d(&w);
    CHECK(w.ended[0] == 0 && w.ended[1] == 1);
    w.now += 1000001;
    bt_dc_on_tick(w.d, w.now);
    CHECK_EQ(bt_dc_core_stats(w.d)->stalled, 2);
    run_d(&w);
    d_all_closed(&w);
    world_check_idle(&w);
}

/* The last page before its own may be one of a request that is over: it counts all the same, no longer than others. */
static void test_turn_after_one_that_ended(void)
{
    static struct world w;
    uint64_t generation = d_landing(&w);

    d_land(&w, 1);
    w.now += 900000;
    bt_dc_on_landed(w.d, w.now, &w.tickets[0], generation);
    bt_dc_on_cancel(w.d, w.now, 0, &w.tickets[0]);
    run_d(&w);
    d_closed(&w);
    w.now += 1000000;
    bt_dc_on_tick(w.d, w.now);
    CHECK_EQ(bt_dc_core_actions(w.d)->n, 0);
    w.now += 1;
    bt_dc_on_tick(w.d, w.now);
    CHECK_EQ(bt_dc_core_stats(w.d)->stalled, 1);
    run_d(&w);
    CHECK_EQ(w.ended[1], 1);
    d_all_closed(&w);
    world_check_idle(&w);
}

/* After the hand-off only pages count: a late word of P does not keep a transfer that is stuck. */
static void test_stuck_after_the_handoff(void)
{
    static struct world w;
    uint64_t generation = d_landing(&w);
    struct bt_control m = {
        .kind = BT_CONTROL_HANDOFF, .ticket = w.tickets[0], .generation = generation};

    m.handoff.n_groups = 1;
    m.handoff.n_shares[0] = 2 * N_LAYERS;
    m.handoff.first.token = 100;
    bt_dc_on_control(w.d, w.now, CONN, &m);
    run_d(&w);
    w.now += 900000;
    d_control(&w, BT_CONTROL_COMPUTING, generation);
    CHECK_EQ(bt_dc_core_actions(w.d)->n, 0);
    w.now += 200000;
    bt_dc_on_tick(w.d, w.now);
    CHECK_EQ(bt_dc_core_stats(w.d)->stalled, 1);
    run_d(&w);
    CHECK_EQ(w.ended[0], 1);
    d_closed(&w);
    world_check_idle(&w);
}

/* Pages outside the window are not there any more, whatever a grant asks for. */
static void test_grant_beyond_the_window(void)
{
    static struct world w;
    uint32_t ids[1] = {7};
    struct bt_sampled s = {.token = 100};

    world_start_with_window(&w, 1, PAGE);
    uint64_t job = p_begin(&w, 0);

    p_control(&w, BT_CONTROL_GRANT, 5);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        bt_pf_on_engine_pages(w.p, w.now, job, 0, l, 1, 2, ids);
        const struct bt_pf_actions *list = bt_pf_core_actions(w.p);

        CHECK_EQ(list->n, 1);
        CHECK_EQ(list->items[0].push.first, 1);
        CHECK_EQ(list->items[0].push.page_ids[0], 7);
    }
    bt_pf_on_engine_token(w.p, w.now, job, 0, &s, 0);
    CHECK_EQ(bt_pf_core_actions(w.p)->items[1].control.handoff.n_shares[0], N_LAYERS);
    p_control(&w, BT_CONTROL_DONE, 5);
    run_p(&w);
    p_pushes_end(&w, job, BT_OK);
    world_check_idle(&w);
}

/* Decode nodes count leases from 1: a grant of 0, and a word that the hand-off to it arrived, are nobody's. */
static void test_grant_of_no_lease(void)
{
    static struct world w;
    uint32_t ids[1] = {7};
    struct bt_sampled s = {.token = 100};

    world_start(&w, 1);
    uint64_t job = p_begin(&w, 0), stale = bt_pf_core_stats(w.p)->stale;

    p_control(&w, BT_CONTROL_GRANT, 0);
    CHECK_EQ(bt_pf_core_actions(w.p)->n, 0);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        bt_pf_on_engine_pages(w.p, w.now, job, 0, l, 0, 1, ids);
        CHECK_EQ(bt_pf_core_actions(w.p)->n, 0);
    }
    bt_pf_on_engine_token(w.p, w.now, job, 0, &s, 0);
    run_p(&w);
    p_control(&w, BT_CONTROL_DONE, 0);
    CHECK_EQ(bt_pf_core_actions(w.p)->n, 0);
    CHECK_EQ(bt_pf_core_stats(w.p)->stale, stale + 2);
    CHECK_EQ(bt_pf_core_jobs(w.p), 1); /* it waits for its grant */
    p_control(&w, BT_CONTROL_GRANT, 5);
    run_p(&w);
    p_control(&w, BT_CONTROL_DONE, 5);
    run_p(&w);
    p_pushes_end(&w, job, BT_OK);
    world_check_idle(&w);
}

static void test_second_grant_is_stale(void)
{
    static struct world w;
    uint64_t job = p_held(&w, 5);
    uint64_t stale = bt_pf_core_stats(w.p)->stale;

    p_control(&w, BT_CONTROL_GRANT, 5);
    CHECK_EQ(bt_pf_core_actions(w.p)->n, 0);
    p_control(&w, BT_CONTROL_GRANT, 6);
    CHECK_EQ(bt_pf_core_actions(w.p)->n, 1);
    CHECK_EQ(bt_pf_core_actions(w.p)->items[0].control.kind, BT_CONTROL_FORGET);
    CHECK_EQ(bt_pf_core_actions(w.p)->items[0].control.generation, 6);
    CHECK_EQ(bt_pf_core_stats(w.p)->stale, stale + 2);
    p_control(&w, BT_CONTROL_DONE, 6); /* another lease's */
    CHECK_EQ(bt_pf_core_actions(w.p)->n, 0);
    p_control(&w, BT_CONTROL_DONE, 5);
    run_p(&w);
    p_pushes_end(&w, job, BT_OK);
    world_check_idle(&w);
}

static size_t count_unreachable(const struct world *w)
{
    const struct bt_pf_actions *list = bt_pf_core_actions(w->p);
    size_t n = 0;

    for (size_t i = 0; i < list->n; i++) {
        n += list->items[i].kind == BT_PF_PEER_STATE && !list->items[i].peer_state.reachable &&
             list->items[i].peer_state.instance == D_INSTANCE;
    }
    return n;
}

/* A router that comes after the loss of a connection must not place on that pair. */
static void test_later_router_hears_of_cut_peer(void)
{
    static struct world w;
    struct bt_msg_peer peer = {.instance = D_INSTANCE, .address = "d", .name = "d"};

    world_start(&w, 1);
    bt_pf_on_peers(w.p, w.now, &peer, 1);
    CHECK_EQ(count_unreachable(&w), 0);
    bt_pf_on_peer_down(w.p, w.now, CONN, "test");
    CHECK_EQ(count_unreachable(&w), 1);
    bt_pf_on_peers(w.p, w.now, &peer, 1);
    CHECK_EQ(count_unreachable(&w), 1);
    w.now += 1000;
    bt_pf_on_tick(w.p, w.now); /* dials again */
    bt_pf_on_connecting(w.p, w.now, D_INSTANCE, CONN + 1);
    bt_pf_on_peer_up(w.p, w.now, CONN + 1);
    bt_pf_on_peers(w.p, w.now, &peer, 1);
    CHECK_EQ(count_unreachable(&w), 0);
    world_check_idle(&w);
}

/* A table full of peers that are gone has room for those that a new list names, and for a submit's. */
static void test_gone_peers_make_room(void)
{
    static struct world w;
    struct bt_msg_peer peers[4];

    world_start(&w, 1); /* room for four */
    const struct bt_pf_actions *list = bt_pf_core_actions(w.p);

    for (uint32_t i = 0; i < 4; i++) {
        peers[i] = (struct bt_msg_peer){.instance = D_INSTANCE + i, .address = "d", .name = "d"};
    }
    bt_pf_on_peers(w.p, w.now, peers, 4);
    CHECK_EQ(list->n, 3); /* one is up */
    for (uint32_t i = 1; i < 4; i++) {
        bt_pf_on_connecting(w.p, w.now, D_INSTANCE + i, CONN + i);
        bt_pf_on_peer_up(w.p, w.now, CONN + i);
    }
    bt_pf_on_peers(w.p, w.now, NULL, 0); /* it serves as decode node for a while; all stay up */
    for (uint32_t i = 0; i < 4; i++) {
        bt_pf_on_peer_down(w.p, w.now, CONN + i, "test");
    }
    for (uint32_t i = 0; i < 4; i++) {
        peers[i].instance = D_INSTANCE + 10 + i;
    }
    bt_pf_on_peers(w.p, w.now, peers, 4);
    CHECK_EQ(list->n, 4);
    for (uint32_t i = 0; i < 4; i++) {
        CHECK(list->items[i].kind == BT_PF_CONNECT &&
              list->items[i].instance == D_INSTANCE + 10 + i);
        bt_pf_on_connecting(w.p, w.now, D_INSTANCE + 10 + i, CONN + 10 + i);
    }
    bt_pf_on_peers(w.p, w.now, peers, 3);
    bt_pf_on_peer_down(w.p, w.now, CONN + 13, "test"); /* on no list any more */
    uint32_t token = 5;
    struct bt_msg_submit submit = {.ticket = {"0123456789abcde"},
                                   .n_tokens = 1,
                                   .tokens = &token,
                                   .n_prompt = 1,
                                   .sampling = {.max_tokens = 4, .top_p = 1},
                                   .peer_instance = D_INSTANCE + 20,
                                   .peer_address = "e"};

    bt_pf_on_submit(w.p, w.now, 0, &submit);
    CHECK(list->n > 0 && list->items[0].kind == BT_PF_CONNECT &&
          list->items[0].instance == D_INSTANCE + 20);
    bt_pf_core_destroy(w.p);
    bt_dc_core_destroy(w.d);
}

/* The token that a peer's gate asks for goes into the dialling, whoever told it: a list or a submit. */
static void test_gate_token(void)
{
    static struct world w;
    struct bt_msg_peer peer = {.instance = D_INSTANCE, .address = "d", .name = "d"};
    uint32_t token = 5;
    struct bt_msg_submit s = {.ticket = {"0123456789abcde"},
                              .n_tokens = 1,
                              .tokens = &token,
                              .n_prompt = 1,
                              .sampling = {.max_tokens = 4, .top_p = 1},
                              .peer_instance = D_INSTANCE + 1,
                              .peer_address = "e",
                              .peer_gate_token = {{8}}};

    world_start(&w, 1);
    const struct bt_pf_actions *list = bt_pf_core_actions(w.p);

    bt_pf_on_peer_down(w.p, w.now, CONN, "test");
    peer.gate_token.b[0] = 9;
    bt_pf_on_peers(w.p, w.now, &peer, 1);
    peer.gate_token.b[0] = 0; /* an older router, which knows of none */
    w.now += 1000;
    bt_pf_on_peers(w.p, w.now, &peer, 1);
    CHECK(list->n == 2 && list->items[1].kind == BT_PF_CONNECT);
    CHECK_EQ(list->items[1].gate_token.b[0], 9);
    bt_pf_on_submit(w.p, w.now, 0, &s);
    CHECK(list->n > 0 && list->items[0].kind == BT_PF_CONNECT);
    CHECK(list->items[0].instance == D_INSTANCE + 1 && list->items[0].gate_token.b[0] == 8);
    bt_pf_core_destroy(w.p);
    bt_dc_core_destroy(w.d);
}

/* An engine that did not take a job is not told of its end. */
static void test_submit_refused_by_engine(void)
{
    static struct world w;

    world_start(&w, 1);
    add_request(&w, 8, 4);
    w.n = 0;
    submit(&w, 0, true);
    uint64_t job = w.pe[0].job;

    w.pe[0] = (struct engine_job){0};
    bt_pf_on_engine_failed(w.p, w.now, job, BT_ERR_BUSY, "test");
    CHECK_EQ(bt_pf_core_actions(w.p)->n, 1);
    CHECK_EQ(bt_pf_core_actions(w.p)->items[0].kind, BT_PF_ATTEMPT_END);
    CHECK_EQ(bt_pf_core_actions(w.p)->items[0].end.reason, BT_ATTEMPT_REFUSED);
    world_check_idle(&w);
}

/* ---- forgeries ---- */

/* Nothing came of it but one count, and at most an answer to who sent it, about the ticket that it named. */
static void check_forged_p(struct world *w, uint64_t conn, const struct bt_control *m)
{
    uint64_t stale = bt_pf_core_stats(w->p)->stale;

    bt_pf_on_control(w->p, w->now, conn, m);
    const struct bt_pf_actions *list = bt_pf_core_actions(w->p);

    CHECK_EQ(bt_pf_core_stats(w->p)->stale, stale + 1);
    CHECK(list->n <= 1);
    for (size_t i = 0; i < list->n; i++) {
        CHECK_EQ(list->items[i].kind, BT_PF_CONTROL);
        CHECK_EQ(list->items[i].peer, conn);
        CHECK(bt_ticket_equal(&list->items[i].control.ticket, &m->ticket));
    }
}

static void check_forged_d(struct world *w, uint64_t conn, const struct bt_control *m)
{
    uint64_t stale = bt_dc_core_stats(w->d)->stale;

    bt_dc_on_control(w->d, w->now, conn, m);
    const struct bt_dc_actions *list = bt_dc_core_actions(w->d);

    CHECK_EQ(bt_dc_core_stats(w->d)->stale, stale + 1);
    CHECK(list->n <= 1);
    for (size_t i = 0; i < list->n; i++) {
        CHECK_EQ(list->items[i].kind, BT_DC_CONTROL);
        CHECK_EQ(list->items[i].peer, conn);
        CHECK(bt_ticket_equal(&list->items[i].control.ticket, &m->ticket));
    }
}

/* One message that nobody should have sent: a ticket that nobody gave, or a real one over a connection that it does not
 * belong to, or with a generation that D never gave. */
static void forge(struct world *w)
{
    static const enum bt_control_kind kinds[] = {
        BT_CONTROL_GRANT,  BT_CONTROL_REFUSE, BT_CONTROL_REVOKE,   BT_CONTROL_HANDOFF,
        BT_CONTROL_FORGET, BT_CONTROL_DONE,   BT_CONTROL_COMPUTING};
    struct bt_control m = {.kind = kinds[rnd(w, 7)], .generation = 1 + rnd(w, 20)};
    uint64_t conn = CONN;

    switch (rnd(w, 3)) {
    case 0:
        memset(m.ticket.b, 0xee, sizeof m.ticket.b);
        m.ticket.b[3] = (uint8_t)rnd(w, 256);
        break;
    case 1:
        m.ticket = w->tickets[rnd(w, w->n_requests)];
        conn = CONN + 1;
        break;
    default:
        m.ticket = w->tickets[rnd(w, w->n_requests)];
        m.generation = 1000000 + rnd(w, 20);
        m.kind = BT_CONTROL_DONE;
        check_forged_p(w, conn, &m);
        m.kind = rnd(w, 2) == 0 ? BT_CONTROL_HANDOFF : BT_CONTROL_COMPUTING;
        check_forged_d(w, conn, &m);
        return;
    }
    m.grant.n_groups = m.handoff.n_groups = 1;
    check_forged_p(w, conn, &m);
    check_forged_d(w, conn, &m);
}

static void test_forged(unsigned seed)
{
    static struct world w;

    world_start(&w, seed);
    for (uint32_t i = 0; i < 6; i++) {
        add_request(&w, 1 + rnd(&w, 40), 2 + rnd(&w, 5));
    }
    for (size_t steps = 0; w.n > 0 && steps < 100000; steps++) {
        size_t i = pick(&w);
        struct flight f = w.msgs[i];

        memmove(&w.msgs[i], &w.msgs[i + 1], (w.n - i - 1) * sizeof f);
        w.n--;
        deliver(&w, &f);
        forge(&w);
    }
    for (uint32_t r = 0; r < 6; r++) {
        CHECK_EQ(w.p_outputs[r], 1);
        CHECK_EQ(w.d_outputs[r], w.max_tokens_of[r]);
        CHECK_EQ(w.finished[r], 1);
        CHECK_EQ(w.ended[r], 0);
    }
    world_check_idle(&w);
}

/* The longest lists: as many jobs as there may be, all given back in one call, or lost with their connection. */
static void test_all_at_once(unsigned seed)
{
    static struct world w;

    world_start(&w, seed);
    for (uint32_t i = 0; i < MAX_JOBS; i++) {
        add_request(&w, 1 + rnd(&w, 40), 2 + rnd(&w, 5));
    }
    for (int i = 0; i < 12; i++) {
        world_run_some(&w);
    }
    if (seed % 2 == 0) {
        bt_pf_on_peer_down(w.p, w.now, CONN, "cut");
        run_p(&w);
        bt_dc_on_peer_down(w.d, w.now, CONN, "cut");
        run_d(&w);
        CHECK(bt_pf_core_kept(w.p) > 0);
    }
    bt_pf_on_give_back(w.p, w.now);
    run_p(&w);
    bt_dc_on_give_back(w.d, w.now);
    run_d(&w);
    world_run(&w);
    world_check_idle(&w);
}

/* A submit that no node can serve is answered, and takes no place. */
static void test_longer_than_context(void)
{
    static struct world w;
    static uint32_t tokens[CONTEXT + 1];
    struct bt_msg_submit s = {.ticket = {{1}},
                              .request_id = "r",
                              .n_tokens = CONTEXT + 1,
                              .tokens = tokens,
                              .n_prompt = CONTEXT + 1,
                              .sampling = {.max_tokens = 1, .top_p = 1},
                              .peer_instance = D_INSTANCE,
                              .peer_address = "d"};

    world_start(&w, 1);
    bt_pf_on_submit(w.p, w.now, 0, &s);
    CHECK_EQ(bt_pf_core_actions(w.p)->n, 1);
    CHECK_EQ(bt_pf_core_actions(w.p)->items[0].kind, BT_PF_ATTEMPT_END);
    CHECK_EQ(bt_pf_core_actions(w.p)->items[0].end.reason, BT_ATTEMPT_INVALID);
    bt_dc_on_submit(w.d, w.now, 0, &s);
    CHECK_EQ(bt_dc_core_actions(w.d)->n, 1);
    CHECK_EQ(bt_dc_core_actions(w.d)->items[0].kind, BT_DC_ATTEMPT_END);
    CHECK_EQ(bt_dc_core_actions(w.d)->items[0].end.reason, BT_ATTEMPT_INVALID);
    world_check_idle(&w);
}

int main(void)
{
    test_longer_than_context();
    test_forget_of_another_generation();
    test_engine_failure_revokes();
    test_slow_transfer_is_not_stuck();
    test_queued_pushes_are_not_stuck();
    test_landings_take_turns();
    test_says_that_it_computes();
    test_kept_tells_nobody();
    test_slow_prompt_is_not_stuck();
    test_turn_after_one_that_ended();
    test_stuck_after_the_handoff();
    test_kept_goes_first();
    test_replaces_another();
    test_grant_beyond_the_window();
    test_grant_of_no_lease();
    test_second_grant_is_stale();
    test_submit_refused_by_engine();
    test_later_router_hears_of_cut_peer();
    test_gone_peers_make_room();
    test_gate_token();
    for (unsigned seed = 1; seed <= 2000; seed++) {
        test_random_order(seed);
        test_cached(seed);
        test_random_cancel(seed);
        test_token0_ends(seed);
        test_no_pages(seed);
        test_peer_lost(seed);
        test_give_back(seed);
        test_resend(seed);
        test_forged(seed);
        test_all_at_once(seed);
        if (bt_test_failures > 0) {
            fprintf(stderr, "failed at seed %u\n", seed);
            break;
        }
    }
    return bt_test_done();
}
