/* The world: events in order of virtual time, random numbers, the log, the life of a run. Refuses to
 * know what the events mean. */

#include "plan/sim_int.h"

#include <stdio.h>
#include <stdlib.h>
#include "base/assert.h"
#include "base/mem.h"

#define EVENTS_MAX UINT64_C(3000000)

/* ---- memory and random numbers ---- */

void *sim_alloc(size_t n)
{
    void *p = bt_calloc(1, n);

    BT_ASSERT(p != NULL);
    return p;
}

void *sim_grow(void *list, uint32_t n, uint32_t *cap, size_t item_bytes)
{
    if (n < *cap) {
        return list;
    }
    *cap = *cap == 0 ? 32 : *cap * 2;
    void *grown = bt_realloc(list, *cap * item_bytes);

    BT_ASSERT(grown != NULL);
    return grown;
}

uint64_t sim_random(struct bt_sim *s)
{
    uint64_t z = s->random += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

uint64_t sim_between(struct bt_sim *s, uint64_t lo, uint64_t hi)
{
    return hi <= lo ? lo : lo + sim_random(s) % (hi - lo + 1);
}

uint32_t sim_below(struct bt_sim *s, uint32_t n)
{
    return (uint32_t)(sim_random(s) % n);
}

bool sim_chance(struct bt_sim *s, uint32_t ppm)
{
    return ppm > 0 && sim_below(s, 1000000) < ppm;
}

/* ---- events ---- */

static bool before(const struct sim_heap_item *a, const struct sim_heap_item *b)
{
    return a->at != b->at ? a->at < b->at : a->seq < b->seq;
}

static void heap_push(struct bt_sim *s, struct sim_heap_item x)
{
    s->heap = bt_grow(s->heap, s->n_heap, &s->cap_heap, sizeof *s->heap);
    size_t at = s->n_heap++;

    while (at > 0 && before(&x, &s->heap[(at - 1) / 2])) {
        s->heap[at] = s->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    s->heap[at] = x;
}

static struct sim_heap_item heap_pop(struct bt_sim *s)
{
    struct sim_heap_item top = s->heap[0];
    struct sim_heap_item x = s->heap[--s->n_heap];
    size_t at = 0;

    for (size_t child = 1; child < s->n_heap; child = 2 * at + 1) {
        if (child + 1 < s->n_heap && before(&s->heap[child + 1], &s->heap[child])) {
            child++;
        }
        if (!before(&s->heap[child], &x)) {
            break;
        }
        s->heap[at] = s->heap[child];
        at = child;
    }
    s->heap[at] = x;
    return top;
}

static uint32_t event_slot(struct bt_sim *s)
{
    if (s->n_free == 0) {
        size_t n = s->n_events == 0 ? 1024 : s->n_events;

        s->events = bt_realloc(s->events, (s->n_events + n) * sizeof *s->events);
        s->free_events = bt_realloc(s->free_events, (s->n_events + n) * sizeof *s->free_events);
        BT_ASSERT(s->events != NULL && s->free_events != NULL);
        for (size_t i = 0; i < n; i++) {
            s->free_events[s->n_free++] = (uint32_t)(s->n_events + n - 1 - i);
        }
        s->n_events += n;
    }
    return s->free_events[--s->n_free];
}

static struct sim_event *insert(struct bt_sim *s, uint64_t at, const struct sim_event *e)
{
    uint32_t slot = event_slot(s);
    struct sim_event *x = &s->events[slot];

    *x = *e;
    x->at = at > s->now ? at : s->now;
    x->seq = ++s->seq;
    x->order = x->order == 0 ? x->seq : x->order;
    heap_push(s, (struct sim_heap_item){x->at, x->seq, slot});
    return x;
}

void sim_repost(struct bt_sim *s, uint64_t at, const struct sim_event *e)
{
    (void)insert(s, at, e);
}

struct sim_event *sim_post(struct bt_sim *s, uint64_t at, uint32_t proc, sim_fn *fn)
{
    struct sim_event e = {.fn = fn, .proc = proc};

    if (proc != SIM_WORLD) {
        e.incarnation = s->procs[proc].incarnation;
    }
    return insert(s, at, &e);
}

void sim_push_event(struct sim_event **list, size_t *n, size_t *cap, struct sim_event *e)
{
    *list = bt_grow(*list, *n, cap, sizeof **list);
    (*list)[(*n)++] = *e;
    e->p = NULL;
}

static void handle(struct bt_sim *s, struct sim_event *e)
{
    if (e->proc != SIM_WORLD) {
        struct sim_proc *p = &s->procs[e->proc];

        if (!p->alive || p->incarnation != e->incarnation) {
            return;
        }
        if (p->frozen) {
            sim_push_event(&p->stalled, &p->n_stalled, &p->cap_stalled, e);
            return;
        }
    }
    e->fn(s, e);
    s->result.events++;
}

/* ---- log ---- */

void sim_log_args(struct bt_sim *s, const char *text, const char *fmt, const uint64_t *args)
{
    struct sim_log_entry *l = &s->log[s->n_log++ % SIM_LOG_MAX];
    uint64_t hash = sim_mix(s->result.trace, s->now);

    l->at = s->now;
    l->fmt = fmt;
    memcpy(l->args, args, sizeof l->args);
    l->text[0] = '\0';
    if (text != NULL) {
        snprintf(l->text, sizeof l->text, "%s", text);
        hash = bt_hash64(l->text, strlen(l->text), hash);
    }
    s->result.trace = bt_hash64(l->args, sizeof l->args, hash);
    if (s->opts.log != NULL) {
        bt_sim_tail(s, 1, s->opts.log, s->opts.log_arg);
    }
}

static void log_line(const struct bt_sim *s, const struct sim_log_entry *l, char *out, size_t cap)
{
    size_t at = 0;
    unsigned n = 0;
    int w = snprintf(out, cap, "%11.3f ms  ", (double)(l->at - s->t0) / 1e6);

    at = w > 0 ? (size_t)w : 0;
    for (const char *f = l->fmt; *f != '\0' && at + 24 < cap; f++) {
        if (f[0] != '%') {
            out[at++] = *f;
            out[at] = '\0';
            continue;
        }
        f++;
        if (*f == 's') {
            w = snprintf(out + at, cap - at, "%s", l->text);
        } else {
            uint64_t v = n < SIM_ARGS ? l->args[n++] : 0;

            if (*f == 'p') {
                w = snprintf(out + at, cap - at, "%s", v < s->n_procs ? s->procs[v].name : "?");
                at += w > 0 ? (size_t)w : 0;
                continue;
            }
            w = snprintf(out + at, cap - at, *f == 'x' ? "%llx" : "%llu", (unsigned long long)v);
        }
        at += w > 0 ? (size_t)w : 0;
        at = at < cap ? at : cap - 1;
    }
}

void bt_sim_tail(const struct bt_sim *s, uint32_t n, bt_sim_line_fn *line, void *arg)
{
    char text[256];

    n = n < SIM_LOG_MAX ? n : SIM_LOG_MAX;
    for (uint64_t i = s->n_log > n ? s->n_log - n : 0; i < s->n_log; i++) {
        log_line(s, &s->log[i % SIM_LOG_MAX], text, sizeof text);
        line(arg, text);
    }
}

void sim_fail(struct bt_sim *s, const char *fmt, ...)
{
    va_list ap;

    if (s->result.failed) {
        return;
    }
    s->result.failed = true;
    va_start(ap, fmt);
    vsnprintf(s->result.text, sizeof s->result.text, fmt, ap);
    va_end(ap);
    sim_logs(s, s->result.text, "VIOLATION %s", 0);
}

/* ---- life ---- */

const char *bt_sim_profile_name(enum bt_sim_profile p)
{
    static const char *const names[BT_SIM_PROFILES] = {
        [BT_SIM_CALM] = "calm",
        [BT_SIM_CANCELS] = "cancels",
        [BT_SIM_KILLS] = "kills",
        [BT_SIM_CUTS] = "cuts",
        [BT_SIM_FREEZES] = "freezes",
        [BT_SIM_TINY_POOLS] = "tiny-pools",
        [BT_SIM_ROLLING] = "rolling",
        [BT_SIM_ONE_FAULT] = "one-fault",
        [BT_SIM_EVERYTHING] = "everything",
        [BT_SIM_RESEND] = "resend",
    };

    return p < BT_SIM_PROFILES ? names[p] : NULL;
}

enum bt_status bt_sim_create(const struct bt_sim_opts *opts, struct bt_sim **out)
{
    struct bt_sim *s = bt_calloc(1, sizeof *s);

    if (s == NULL) {
        return BT_ERR_NOMEM;
    }
    s->opts = *opts;
    s->random = sim_mix(opts->seed, (uint64_t)opts->profile + 1);
    s->t0 = s->now = UINT64_C(1000) * BT_NS_PER_S;
    s->slow = 1;
    bt_arena_init(&s->arena, (size_t)1 << 24);
    sim_config(s);
    *out = s;
    return BT_OK;
}

void bt_sim_run(struct bt_sim *s)
{
    const struct sim_config *c = &s->cfg;

    sim_procs_start(s);
    sim_clients_start(s);
    sim_faults_start(s);
    sim_quiet_start(s);
    sim_log(s, "run: %u routers, %u prefill and %u decode nodes, %u requests, %u faults",
            c->n_routers, c->n_nodes[0], c->n_nodes[1], c->n_requests, c->n_faults);
    while (!s->result.failed && !s->done) {
        if (s->n_heap == 0 || s->result.events > EVENTS_MAX) {
            sim_fail(s, "the run does not end: %llu events", (unsigned long long)s->result.events);
            break;
        }
        struct sim_heap_item x = heap_pop(s);
        struct sim_event e = s->events[x.slot];

        s->free_events[s->n_free++] = x.slot;
        s->now = e.at;
        handle(s, &e);
        bt_free(e.p);
    }
    s->result.virtual_ns = s->now - s->t0;
}

const struct bt_sim_result *bt_sim_result(const struct bt_sim *s)
{
    return &s->result;
}

void bt_sim_destroy(struct bt_sim *s)
{
    if (s == NULL) {
        return;
    }
    for (size_t i = 0; i < s->n_heap; i++) {
        bt_free(s->events[s->heap[i].slot].p);
    }
    for (size_t i = 0; i < s->n_held; i++) {
        bt_free(s->held[i].p);
    }
    for (uint32_t i = 0; i < s->n_procs; i++) {
        struct sim_proc *p = &s->procs[i];

        for (size_t k = 0; k < p->n_stalled; k++) {
            bt_free(p->stalled[k].p);
        }
        bt_free(p->stalled);
        sim_router_destroy(p->router);
        sim_node_destroy(p->node);
    }
    sim_clients_fini(s);
    bt_arena_fini(&s->arena);
    bt_buf_fini(&s->buf);
    bt_free(s->heap);
    bt_free(s->events);
    bt_free(s->free_events);
    bt_free(s->held);
    bt_free(s->streams);
    bt_free(s->conns);
    bt_free(s->ops);
    bt_free(s);
}
