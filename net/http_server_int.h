#ifndef BT_NET_HTTP_SERVER_INT_H
#define BT_NET_HTTP_SERVER_INT_H

/* Inside net/ only: how gRPC takes its requests from a server. */

#include "net/http.h"
#include "net/http_int.h"

/* fn returns true if it took the request; called before on_request. */
void bt_http_server_set_grpc(struct bt_http_server *sv,
                             bool (*fn)(struct bt_http_stream *s, const struct bt_http_request *req,
                                        void *arg),
                             void *arg);

#endif
