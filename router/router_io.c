/* Between the core and the rest of the router: carries out its actions, gives it time, and answers what both front ends
 * ask (model, draining). Decides nothing. */

#include <stdio.h>
#include <string.h>
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "net/grpc.h"
#include "proto/inference.h"
#include "router/generate.h"
#include "router/router_int.h"
#include "router/session_io.h"

#define TICK_NS (25 * BT_NS_PER_MS)
#define TRIM_BYTES                                                                                 \
    ((size_t)4 << 20) /* requests that leave so much behind that it is worth the time */
#define TRIM_PAUSE (2 * BT_NS_PER_S)

void bt_router_tell_health(struct bt_router *r)
{
    bool serving = !r->draining && bt_rt_core_ready(r->core);

    if (r->grpc != NULL && bt_grpc_health_set(r->grpc, BT_INF_SERVICE,
                                              serving ? BT_GRPC_HEALTH_SERVING
                                                      : BT_GRPC_HEALTH_NOT_SERVING) != BT_OK) {
        bt_log_error("router", "out of memory: health is not up to date");
    }
}

static void carry_out(struct bt_router *r, const struct bt_rt_action *a)
{
    switch (a->kind) {
    case BT_RT_SEND:
        bt_sessions_send(r->sessions, a->session, &a->send);
        break;
    case BT_RT_CLOSE:
        bt_sessions_close(r->sessions, a->session, a->text);
        break;
    case BT_RT_TOKENS:
        bt_gen_on_tokens(r, a);
        break;
    case BT_RT_PROMPT_LOGPROBS:
        bt_gen_on_prompt_logprobs(r, a);
        break;
    case BT_RT_END:
        bt_gen_on_seq_end(r, a);
        break;
    case BT_RT_READY:
        bt_log_info("router", a->ready ? "a pair can serve" : "no pair can serve");
        bt_router_tell_health(r);
        break;
    case BT_RT_LOG:
        BT_LOG((enum bt_log_level)a->level, "router", NULL, "%s", a->text);
        break;
    }
}

void bt_router_pump(struct bt_router *r)
{
    struct bt_rt_action a;

    if (r->pumping) {
        return;
    }
    r->pumping = true;
    do {
        while (bt_rt_core_next(r->core, &a)) {
            carry_out(r, &a);
        }
        bt_gen_flush(r); /* a stop string may have made the core decide something */
    } while (bt_rt_core_pending(r->core));
    bt_gen_collect(r);
    r->pumping = false;
}

static void on_pump(struct bt_task *t, void *arg)
{
    (void)t;
    bt_router_pump(arg);
}

void bt_router_kick(struct bt_router *r)
{
    bt_task_defer(r->loop, &r->pump_task, on_pump, r);
}

static void trim(void *arg)
{
    (void)arg;
    bt_mem_trim();
}

static void on_trimmed(void *arg)
{
    struct bt_router *r = arg;

    r->trimming = false;
    r->t_trim = bt_net_loop_now(r->loop);
}

/* A parsed body is many small blocks, which libc keeps: twenty of 8 MB left 380 MB behind. On the pool, where most of
 * them came from. */
static void give_back(struct bt_router *r, uint64_t now)
{
    if (r->trimming || r->parsed_bytes < TRIM_BYTES || now - r->t_trim < TRIM_PAUSE) {
        return;
    }
    r->parsed_bytes /= 8; /* looks again: some were still in use */
    r->trimming = bt_net_work(r->loop, trim, on_trimmed, r) == BT_OK;
}

static void on_tick(struct bt_timer *t, void *arg)
{
    struct bt_router *r = arg;

    give_back(r, bt_net_loop_now(r->loop));
    bt_rt_on_tick(r->core, bt_net_loop_now(r->loop));
    bt_router_pump(r);
    bt_timer_start(r->loop, t, TICK_NS, on_tick, r);
}

enum bt_status bt_router_start(struct bt_router *r, const struct bt_rt_opts *opts)
{
    struct bt_rt_opts o = *opts;

    o.n_keys = (uint32_t)r->keys.n;
    enum bt_status st = bt_rt_core_create(&o, &r->core);

    if (st != BT_OK) {
        return st;
    }
    bt_map_init(&r->by_request_id, true);
    r->sequences_max = opts->queue_max;
    bt_timer_start(r->loop, &r->tick, TICK_NS, on_tick, r);
    return BT_OK;
}

void bt_router_stop(struct bt_router *r)
{
    bt_timer_stop(r->loop, &r->tick);
    bt_task_cancel(r->loop, &r->pump_task);
    bt_gen_cancel_all(r);
    bt_task_cancel(r->loop, &r->pump_task);
    bt_rt_core_destroy(r->core);
    bt_map_fini(&r->by_request_id);
    bt_free(r->scratch);
    r->core = NULL;
    r->scratch = NULL;
}

void bt_router_drain(struct bt_router *r)
{
    r->draining = true;
    bt_router_tell_health(r);
}

bool bt_router_admit(const struct bt_router *r, const char *model, struct bt_api_err *e)
{
    if (r->draining) {
        (void)bt_api_fail(e, BT_API_UNAVAILABLE, NULL, "the router is draining");
        e->retry_ns = BT_NS_PER_S;
        return false;
    }
    if (model != NULL && model[0] != '\0' && strcmp(model, r->model_name) != 0) {
        return bt_api_fail(e, BT_API_NOT_FOUND, "model",
                           "model \"%.200s\" is not served here; \"%s\" is", model, r->model_name);
    }
    return true;
}

/* The queue's refusals are counted where they are made. */
void bt_router_count_refusal(struct bt_router *r, const struct bt_api_err *e)
{
    if (e->code == BT_API_UNAUTHENTICATED) {
        r->metrics.refused[BT_REFUSED_UNAUTHENTICATED]++;
    } else if (e->code == BT_API_INVALID || e->code == BT_API_NOT_FOUND) {
        r->metrics.refused[BT_REFUSED_INVALID]++;
    } else if (e->code == BT_API_UNAVAILABLE && r->draining) {
        r->metrics.refused[BT_REFUSED_DRAINING]++;
    }
}

void bt_router_new_id(char out[25])
{
    unsigned char b[12];

    bt_random_bytes(b, sizeof b);
    for (unsigned i = 0; i < sizeof b; i++) {
        snprintf(out + 2 * i, 3, "%02x", b[i]);
    }
}
