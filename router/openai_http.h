#ifndef BT_ROUTER_OPENAI_HTTP_H
#define BT_ROUTER_OPENAI_HTTP_H

/* The HTTP side of the front end: OpenAI-compatible endpoints, tokenizer, health, metrics, status. */

#include "net/http.h"

struct bt_router;

/* For struct bt_http_server_opts; arg is the struct bt_router. */
void bt_openai_on_request(struct bt_http_stream *s, const struct bt_http_request *req, void *arg);
void bt_openai_error_body(int status, const char *message, struct bt_buf *body,
                          const char **content_type, void *arg);

#endif
