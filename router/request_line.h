#ifndef BT_ROUTER_REQUEST_LINE_H
#define BT_ROUTER_REQUEST_LINE_H

/* One line of JSON for the request log, of a request that is over (docs/operations.md lists the fields). Nothing of the
 * prompt or the answer is in it, and no key. No-ops without a request log. Loop thread. */

#include <stdint.h>
#include "router/api.h"

struct bt_gen;
struct bt_router;

/* Before the sequences are given up: what the core knows of them is read here. e: why it failed; NULL: finished. */
void bt_gen_log(struct bt_gen *g, const struct bt_api_err *e);

/* A request that never became one. Strings: NULL or "": unknown. */
struct bt_request_refused {
    const char *request_id, *endpoint, *traceparent;
    uint32_t key; /* as in struct bt_gen_start */
    uint64_t t_arrival;
    const struct bt_api_err *err;
};
void bt_request_refused_log(struct bt_router *r, const struct bt_request_refused *q);

#endif
