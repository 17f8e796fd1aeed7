#ifndef BT_ROUTER_API_H
#define BT_ROUTER_API_H

/* What both front ends share: errors as clients see them, and the parameters of a request with their checks. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/sampling.h"
#include "base/status.h"
#include "text/stop.h"

enum bt_api_code {
    BT_API_OK,
    BT_API_INVALID,
    BT_API_UNAUTHENTICATED,
    BT_API_FORBIDDEN,
    BT_API_NOT_FOUND,
    BT_API_EXHAUSTED,
    BT_API_UNAVAILABLE,
    BT_API_DEADLINE,
    BT_API_CANCELLED,
    BT_API_INTERNAL,
};

struct bt_api_err {
    enum bt_api_code code;
    char param[64]; /* the parameter at fault, "" if none */
    char msg[640];
    uint64_t retry_ns; /* EXHAUSTED, UNAVAILABLE: when to try again */
};

int bt_api_http_status(enum bt_api_code c);
const char *bt_api_error_type(enum bt_api_code c); /* OpenAI's error.type */
const char *bt_api_error_code(enum bt_api_code c); /* OpenAI's error.code */
/* A value of enum bt_grpc_status. */
int bt_api_grpc_status(enum bt_api_code c);
/* Fills e (param may be NULL) and returns false, so that checks can end with it. */
bool bt_api_fail(struct bt_api_err *e, enum bt_api_code code, const char *param, const char *fmt,
                 ...) BT_PRINTF(4, 5);

/* Where the trace id begins in a W3C traceparent (32 digits, others follow). NULL: there is none, or it is not one. */
const char *bt_api_trace_id(const char *traceparent);

#define BT_PARAMS_N_MAX       128u
#define BT_PARAMS_PROMPTS_MAX 1024u

/* Parameters of one request, resolved but for max_tokens (0: what is left of the context). */
struct bt_params {
    struct bt_sampling sampling; /* bias points to `bias`; choice is set for each sequence */
    struct bt_logit_bias *bias;  /* owned */
    bool has_seed, has_max_tokens;
    uint32_t n;
    size_t n_stop;
    char *stop[BT_STOP_STRINGS_MAX]; /* owned */
    size_t stop_len[BT_STOP_STRINGS_MAX];
    bool echo;
    bool keep_special; /* special tokens leave their text */
    bool timings;
    int32_t priority;
};

void bt_params_init(struct bt_params *p); /* the defaults */
void bt_params_fini(struct bt_params *p);
/* Copies the string. false: too many, too long, empty, not UTF-8, or no memory. */
bool bt_params_add_stop(struct bt_params *p, const char *s, size_t len, struct bt_api_err *e);
bool bt_params_add_stop_id(struct bt_params *p, uint64_t id, struct bt_api_err *e);
bool bt_params_add_bias(struct bt_params *p, uint64_t token, double bias, struct bt_api_err *e);
/* Ranges of everything, named as clients name it. vocab: ids must be below. Draws a seed if none was given. */
bool bt_params_check(struct bt_params *p, uint32_t vocab, struct bt_api_err *e);

#endif
