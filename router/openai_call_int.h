#ifndef BT_ROUTER_OPENAI_CALL_INT_H
#define BT_ROUTER_OPENAI_CALL_INT_H

/* Between openai_http.c and openai_generate.c. */

#include "net/http.h"
#include "router/router_int.h"

enum bt_openai_kind {
    BT_OPENAI_COMPLETION,
    BT_OPENAI_CHAT,
    BT_OPENAI_TOKENIZE,
    BT_OPENAI_DETOKENIZE
};

/* A request whose body follows; key: whose it is. */
void bt_openai_call_begin(struct bt_router *r, struct bt_http_stream *s, enum bt_openai_kind kind,
                          uint32_t key);
/* Status, headers and body of an error. */
void bt_openai_reply_error(struct bt_http_stream *s, const struct bt_api_err *e,
                           const struct bt_http_header *extra, size_t n_extra);

#endif
