#ifndef BT_TESTS_ECHO_SERVICE_H
#define BT_TESTS_ECHO_SERVICE_H

/* HTTP paths and the gRPC service baton.test.Echo that the tests of net/ talk to. Messages are
 * plain bytes.
 *   HTTP  POST /echo      answers the body
 *         GET /chunks?n=N N server-sent events
 *         GET /flood      64 MiB in 64 KiB pieces, minding the queue
 *         else            "hello\n"
 *   gRPC  Unary   echoes
 *         Chat    echoes each message
 *         Count   text N: messages "0" … N-1, then OK
 *         Fail    text N: status N, message "müde 100%", retry after 1.5 s
 *         Flood   64 MiB in 64 KiB messages, minding the queue
 *         Hang    never answers */

#include <stdbool.h>
#include <stddef.h>
#include "net/grpc.h"
#include "net/http.h"

struct echo_stats {
    int closed_done, closed_peer, closed_timeout, closed_limit, closed_server,
        closed_other; /* HTTP streams */
    int calls_open, calls_finished, calls_cancelled, calls_deadline, calls_failed; /* gRPC */
    size_t queued_max;
};

void echo_on_request(struct bt_http_stream *s, const struct bt_http_request *req, void *stats);
extern const struct bt_grpc_method echo_methods[];
extern const size_t echo_n_methods;

#endif
