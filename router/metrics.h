#ifndef BT_ROUTER_METRICS_H
#define BT_ROUTER_METRICS_H

/* The router's counters and histograms: plain numbers of the loop thread, rendered on demand. */

#include <stdint.h>
#include "base/buf.h"
#include "base/status.h"
#include "net/prom.h"
#include "router/api.h"

struct bt_request_log;
struct bt_rt_core;

enum bt_refusal {
    BT_REFUSED_INVALID,
    BT_REFUSED_UNAUTHENTICATED,
    BT_REFUSED_QUEUE_FULL,
    BT_REFUSED_QUEUE_TIMEOUT,
    BT_REFUSED_MAX_TTFT,
    BT_REFUSED_NO_NODE,
    BT_REFUSED_DRAINING,
    BT_REFUSALS,
};

enum bt_finished {
    BT_FINISHED_STOP,
    BT_FINISHED_LENGTH,
    BT_FINISHED_CANCELLED,
    BT_FINISHED_ERROR,
    BT_FINISHEDS
};

struct bt_router_metrics {
    struct bt_prom_hist ttft, itl, request, queue, prefill, transfer; /* seconds */
    uint64_t finished[BT_FINISHEDS], refused[BT_REFUSALS];
    uint64_t prompt_tokens, generated_tokens, cached_tokens;
};

/* buckets_*: upper bounds in seconds, "0.001,0.01,…". */
enum bt_status bt_router_metrics_init(struct bt_router_metrics *m, const char *buckets_ttft,
                                      const char *buckets_itl, const char *buckets_request,
                                      struct bt_err *err) BT_NODISCARD;
/* log: NULL if none is kept. */
void bt_router_metrics_render(const struct bt_router_metrics *m, const struct bt_rt_core *core,
                              const struct bt_request_log *log, struct bt_buf *out);

#endif
