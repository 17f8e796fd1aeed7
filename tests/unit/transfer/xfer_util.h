#ifndef BT_TESTS_XFER_UTIL_H
#define BT_TESTS_XFER_UTIL_H

/* One side of a transfer in a test: a bt_xfer, its events in order, and waiting for one of them with a deadline. */

#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/mem.h"
#include "tests/check.h"
#include "transfer/xfer.h"
#include "transfer/xfer_loop.h"

#define WAIT_MS 30000 /* ends a hang; nothing is judged by time */

struct side {
    struct bt_xfer *x;
    uint64_t instance;
    int efd;
    struct bt_xfer_event *got; /* polled, not yet asked for */
    size_t n_got, cap;
    struct fake_device *device; /* of a staged world */
};

struct world {       /* how the two sides of a test are joined */
    const char *tls; /* NULL: loopback hub */
    enum bt_xfer_proto proto;
    struct bt_xfer_hub *hub;
    bool staged; /* pages lie where the host is not to look: side_stage */
    bool direct; /* and are registered besides, all of this process' memory that `region` says */
    struct bt_xfer_region region;
};

/* A device whose copies are done some polls after they began, and not before: batch by batch, those of one in another order than
 * they were queued in. */
enum { STAGE_SLOTS = 6, STAGE_POLLS = 3 };
struct fake_device {
    size_t slot_bytes;
    uint8_t *slots;
    struct {
        void *device;
        size_t bytes;
        bool to_device, going;
    } copy[STAGE_SLOTS];
    uint32_t order[STAGE_SLOTS], n_going, n_polls; /* the first batch is copied next */
    uint32_t batch[STAGE_SLOTS], n_batches; /* copies in each that began; others are queued */
    uint64_t n_copies, fail_at;             /* it fails when it has made so many copies; 0: never */
};

/* As CUDA's current device: a thread has it or not. */
static _Thread_local const void *fake_current;

static inline void fake_enter(void *arg)
{
    fake_current = arg;
}

static inline uint8_t *fake_slot(void *arg, uint32_t slot)
{
    struct fake_device *d = arg;
    return d->slots + slot * d->slot_bytes;
}

static inline bool fake_failed(const struct fake_device *d)
{
    return d->fail_at > 0 && d->n_copies >= d->fail_at;
}

static inline void fake_start(void *arg, uint32_t slot, void *device, size_t bytes, bool to_device)
{
    struct fake_device *d = arg;
    if (fake_failed(d)) {
        return;
    }
    if (bytes > d->slot_bytes || d->copy[slot].going || fake_current == NULL) {
        abort();
    }
    d->copy[slot].device = device;
    d->copy[slot].bytes = bytes;
    d->copy[slot].to_device = to_device;
    d->copy[slot].going = true;
    d->order[d->n_going++] = slot;
}

static inline void fake_go(void *arg)
{
    struct fake_device *d = arg;
    uint32_t n = d->n_going;
    for (uint32_t i = 0; i < d->n_batches; i++) {
        n -= d->batch[i];
    }
    if (n > 0) {
        d->batch[d->n_batches++] = n;
    } else if (!fake_failed(d)) {
        abort(); /* called for nothing */
    }
}

static inline void fake_copy(struct fake_device *d, uint32_t s)
{
    if (d->copy[s].to_device) {
        memcpy(d->copy[s].device, fake_slot(d, s), d->copy[s].bytes);
        memset(fake_slot(d, s), 0xdd, d->copy[s].bytes);
    } else {
        memcpy(fake_slot(d, s), d->copy[s].device, d->copy[s].bytes);
    }
    d->copy[s].going = false;
    d->n_copies++;
}

static inline enum bt_status fake_done(void *arg, uint32_t slot, bool wait)
{
    struct fake_device *d = arg;
    while (d->copy[slot].going && d->n_batches > 0 && (++d->n_polls % STAGE_POLLS == 0 || wait) &&
           !fake_failed(d)) {
        uint32_t n = d->batch[0];
        for (uint32_t i = n; i-- > 0;) {
            fake_copy(d, d->order[i]);
        }
        d->n_going -= n;
        memmove(d->order, d->order + n, d->n_going * sizeof(d->order[0]));
        memmove(d->batch, d->batch + 1, --d->n_batches * sizeof(d->batch[0]));
    }
    if (fake_failed(d)) {
        d->n_going = d->n_batches = 0;
        return BT_ERR_DEVICE;
    }
    return d->copy[slot].going ? BT_ERR_BUSY : BT_OK;
}

static inline void side_wake(void *arg)
{
    uint64_t one = 1;
    struct side *s = arg;
    if (write(s->efd, &one, sizeof(one)) < 0) {
        abort();
    }
}

/* Everybody's here, unless the options have another one: sides in other processes know it too. */
static const struct bt_gate_token test_token = {
    {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};

/* Fills in the wire, the instance, and names; the caller sets the rest before. */
static inline void side_start(struct side *s, const struct world *w, struct bt_xfer_opts *o,
                              uint64_t instance, bool listen)
{
    static char names[64][32];
    struct bt_err err = {0};
    memset(s, 0, sizeof(*s));
    s->efd = eventfd(0, EFD_CLOEXEC);
    o->hub = w->hub;
    o->tls = w->tls;
    o->proto = o->proto != 0 ? o->proto : w->proto;
    o->instance = s->instance = instance;
    o->token = bt_gate_token_is_set(&o->token) ? o->token : test_token;
    o->fingerprint = o->fingerprint != NULL ? o->fingerprint : "tiny/f32/v1";
    o->layout = o->layout != NULL ? o->layout : "k16v16";
    o->wake = side_wake;
    o->wake_arg = s;
    if (listen) {
        snprintf(names[instance % 64], sizeof(names[0]), "loop:%u", (unsigned)instance);
        o->listen = w->hub != NULL ? names[instance % 64] : "127.0.0.1:0";
    }
    struct bt_xfer_stage stage;
    if (w->staged) {
        s->device = calloc(1, sizeof(*s->device));
        s->device->slot_bytes = 1 << 20;
        s->device->slots = malloc(STAGE_SLOTS * s->device->slot_bytes);
        stage = (struct bt_xfer_stage){s->device,   s->device->slot_bytes,
                                       STAGE_SLOTS, fake_enter,
                                       fake_slot,   fake_start,
                                       fake_go,     fake_done};
        o->stage = &stage;
    }
    if (w->direct) {
        o->regions[0] = w->region;
        o->n_regions = 1;
    }
    enum bt_status st = bt_xfer_create(o, &s->x, &err);
    if (st != BT_OK) {
        fprintf(stderr, "%s\n", err.msg);
        exit(st == BT_ERR_UNSUPPORTED ? BT_TEST_SKIP : 1);
    }
}

static inline void side_stop(struct side *s)
{
    struct bt_xfer_stats st;
    bt_xfer_stats(s->x, &st);
    CHECK_EQ(st.sealed_heap_calls, 0);
    for (size_t i = 0; i < s->n_got; i++) {
        bt_xfer_event_free(&s->got[i]);
    }
    bt_xfer_destroy(s->x);
    if (s->device != NULL) {
        CHECK_EQ(s->device->n_going, 0);
        free(s->device->slots);
        free(s->device);
    }
    free(s->got);
    close(s->efd);
    memset(s, 0, sizeof(*s));
}

static inline void side_collect(struct side *s)
{
    struct bt_xfer_event ev;
    while (bt_xfer_poll(s->x, &ev)) {
        if (s->n_got == s->cap) {
            s->cap = s->cap * 2 + 64;
            s->got = realloc(s->got, s->cap * sizeof(ev));
        }
        s->got[s->n_got++] = ev;
    }
}

/* Takes the first event of that kind out of the backlog; waits for it up to ms. */
static inline bool side_wait(struct side *s, enum bt_xfer_event_kind kind,
                             struct bt_xfer_event *out, int ms)
{
    uint64_t end = bt_clock_ns() + (uint64_t)ms * BT_NS_PER_MS;
    memset(out, 0, sizeof(*out));
    for (;;) {
        side_collect(s);
        for (size_t i = 0; i < s->n_got; i++) {
            if (s->got[i].kind == kind) {
                *out = s->got[i];
                memmove(&s->got[i], &s->got[i + 1], (s->n_got - i - 1) * sizeof(*out));
                s->n_got--;
                return true;
            }
        }
        uint64_t now = bt_clock_ns();
        if (now >= end) {
            return false;
        }
        struct pollfd pfd = {.fd = s->efd, .events = POLLIN};
        uint64_t v;
        if (poll(&pfd, 1, (int)((end - now) / BT_NS_PER_MS) + 1) > 0 &&
            read(s->efd, &v, sizeof(v)) < 0) {
            abort();
        }
    }
}

static inline size_t side_count(struct side *s, enum bt_xfer_event_kind kind)
{
    size_t n = 0;
    side_collect(s);
    for (size_t i = 0; i < s->n_got; i++) {
        n += s->got[i].kind == kind;
    }
    return n;
}

/* Dials d from p; returns the connection's id on both sides. */
static inline bool join(struct side *p, struct side *d, uint64_t *at_p, uint64_t *at_d)
{
    struct bt_xfer_event ev;
    if (bt_xfer_connect(p->x, bt_xfer_address(d->x), d->instance, bt_xfer_token(d->x), at_p) !=
        BT_OK) {
        return false;
    }
    if (!side_wait(p, BT_XFER_PEER_UP, &ev, WAIT_MS) || ev.peer != *at_p || ev.incoming) {
        return false;
    }
    if (!side_wait(d, BT_XFER_PEER_UP, &ev, WAIT_MS) || !ev.incoming) {
        return false;
    }
    *at_d = ev.peer;
    return true;
}

/* As in the relay: pages go only after D's grant, so that the landings opened before are open. */
static inline void grant(struct side *d, uint64_t at_d, struct side *p)
{
    struct bt_xfer_event ev;
    CHECK_EQ(bt_xfer_send_ctrl(d->x, at_d, "grant", 5), BT_OK);
    CHECK(side_wait(p, BT_XFER_CTRL, &ev, WAIT_MS));
    bt_xfer_event_free(&ev);
}

static inline void ticket_set(uint8_t t[BT_XFER_TICKET_BYTES], unsigned n)
{
    memset(t, 0, BT_XFER_TICKET_BYTES);
    memcpy(t, &n, sizeof(n));
    t[15] = 0x5a;
}

/* Contents that depend on everything that could be mixed up. */
static inline void page_fill(uint8_t *p, size_t n, unsigned ticket, unsigned group, unsigned layer,
                             unsigned page)
{
    uint32_t v = ticket * 2654435761u + group * 40503u + layer * 9973u + page * 31u + 7;
    for (size_t i = 0; i < n; i++) {
        v = v * 1664525u + 1013904223u;
        p[i] = (uint8_t)(v >> 24);
    }
}

static inline bool page_is(const uint8_t *p, size_t n, unsigned ticket, unsigned group,
                           unsigned layer, unsigned page)
{
    uint32_t v = ticket * 2654435761u + group * 40503u + layer * 9973u + page * 31u + 7;
    for (size_t i = 0; i < n; i++) {
        v = v * 1664525u + 1013904223u;
        if (p[i] != (uint8_t)(v >> 24)) {
            return false;
        }
    }
    return true;
}

#endif
