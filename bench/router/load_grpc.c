/* Streams over gRPC, many on each connection as a client library would keep them. Owns the calls. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/clock.h"
#include "base/mem.h"
#include "bench/router/load_shared.h"
#include "net/grpc.h"
#include "net/loop.h"
#include "proto/inference.h"

#define PER_CHANNEL 100u
#define PAUSE_NS    (50 * BT_NS_PER_MS)

struct client;
struct stream {
    struct client *c;
    struct bench_reader r;
    struct bt_timer timer;
};

struct client {
    struct bench_shared *b;
    struct bt_net_loop *loop;
    struct bt_arena arena;
    struct bt_buf buf;
    struct stream *streams;
    struct bt_grpc_channel **channels;
    struct bt_timer watch;
};

static void ask(struct bt_timer *t, void *arg);

static void on_message(struct bt_grpc_call *call, void *user, const uint8_t *data, size_t len)
{
    struct stream *s = user;
    struct bt_inf_generated g;
    struct bt_err err = {0};

    (void)call;
    bt_arena_reset(&s->c->arena);
    if (bt_inf_generated_decode(data, len, &s->c->arena, &g, &err) != BT_OK) {
        fprintf(stderr, "bench-router: %s\n", err.msg);
        exit(1);
    }
    bench_received(s->c->b, &s->r, g.text_len, bt_clock_ns());
}

static void on_close(struct bt_grpc_call *call, void *user, const struct bt_grpc_end *end)
{
    struct stream *s = user;
    struct bench_shared *b = s->c->b;
    uint64_t pause = 0;

    (void)call;
    if (atomic_load(&b->stop)) {
        return;
    }
    if (end->status == BT_GRPC_OK && s->r.index == b->max_tokens) {
        atomic_fetch_add(&b->n_done, 1);
    } else {
        pause = PAUSE_NS;
        atomic_fetch_add(end->status == BT_GRPC_RESOURCE_EXHAUSTED ||
                                 end->status == BT_GRPC_UNAVAILABLE
                             ? &b->n_refused
                             : &b->n_failed,
                         1);
    }
    bt_timer_start(s->c->loop, &s->timer, pause, ask, s);
}

static void ask(struct bt_timer *t, void *arg)
{
    static const struct bt_grpc_events events = {.on_message = on_message, .on_close = on_close};
    struct stream *s = arg;
    struct client *c = s->c;
    struct bt_grpc_call *call;
    static const char text[] =
        "Tell me how a relay runs, in some detail, and what becomes of the baton.";
    struct bt_inf_generate g = {.request_id = "",
                                .model = "",
                                .input = BT_INF_TEXT,
                                .text = text,
                                .text_len = sizeof text - 1,
                                .sampling = {.has_temperature = true,
                                             .has_seed = true,
                                             .seed = s->r.slot,
                                             .has_max_tokens = true,
                                             .max_tokens = c->b->max_tokens,
                                             .ignore_eos = true}};

    s->r.index = s->r.bytes = 0;
    s->r.t_ask = bt_clock_ns();
    bt_buf_clear(&c->buf);
    if (bt_inf_generate_encode(&g, &c->buf) != BT_OK ||
        bt_grpc_call_start(c->channels[s->r.slot / PER_CHANNEL],
                           &(struct bt_grpc_start){.path = BT_INF_GENERATE}, &events, s,
                           &call) != BT_OK) {
        bt_timer_start(c->loop, t, PAUSE_NS, ask, s);
        return;
    }
    (void)bt_grpc_send(call, c->buf.data, c->buf.len);
    bt_grpc_half_close(call);
}

static void on_watch(struct bt_timer *t, void *arg)
{
    struct client *c = arg;

    if (atomic_load(&c->b->stop)) {
        bt_net_loop_stop(c->loop);
        return;
    }
    bt_timer_start(c->loop, t, 50 * BT_NS_PER_MS, on_watch, c);
}

void bench_client_grpc(struct bench_shared *b, const char *address)
{
    struct client c = {.b = b};
    uint32_t n_channels = (b->n_streams + PER_CHANNEL - 1) / PER_CHANNEL;
    struct bt_err err = {0};

    bt_arena_init(&c.arena, (size_t)16 << 20);
    c.streams = bt_calloc(b->n_streams, sizeof *c.streams);
    c.channels = bt_calloc(n_channels, sizeof(struct bt_grpc_channel *));
    if (c.streams == NULL || c.channels == NULL || bt_net_loop_create(&c.loop) != BT_OK) {
        fprintf(stderr, "bench-router: out of memory\n");
        exit(1);
    }
    for (uint32_t i = 0; i < n_channels; i++) {
        if (bt_grpc_channel_create(c.loop, &(struct bt_grpc_channel_opts){.address = address},
                                   &c.channels[i], &err) != BT_OK) {
            fprintf(stderr, "bench-router: %s\n", err.msg);
            exit(2);
        }
    }
    for (uint32_t i = 0; i < b->n_streams; i++) {
        c.streams[i] = (struct stream){.c = &c, .r.slot = i};
        bt_timer_start(c.loop, &c.streams[i].timer, BT_NS_PER_S * i / b->n_streams, ask,
                       &c.streams[i]);
    }
    on_watch(&c.watch, &c);
    bt_net_loop_run(c.loop);
    bt_timer_stop(c.loop, &c.watch);
    for (uint32_t i = 0; i < b->n_streams; i++) {
        bt_timer_stop(c.loop, &c.streams[i].timer);
    }
    for (uint32_t i = 0; i < n_channels; i++) {
        bt_grpc_channel_destroy(c.channels[i]);
    }
    bt_net_loop_destroy(c.loop);
    bt_arena_fini(&c.arena);
    bt_buf_fini(&c.buf);
    bt_free(c.streams);
    bt_free(c.channels);
}
