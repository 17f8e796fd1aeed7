/* Errors and parameters as both front ends know them. Owns names and ranges; refuses to know JSON, protobuf and how a
 * request runs. */

#include "router/api.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/hash.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "proto/session.h"

static const struct {
    int http, grpc; /* grpc: enum bt_grpc_status */
    const char *type, *code;
} codes[] = {
    [BT_API_OK] = {200, 0, "", ""},
    [BT_API_INVALID] = {400, 3, "invalid_request_error", "invalid_request"},
    [BT_API_UNAUTHENTICATED] = {401, 16, "authentication_error", "invalid_api_key"},
    [BT_API_FORBIDDEN] = {403, 7, "permission_error", "permission_denied"},
    [BT_API_NOT_FOUND] = {404, 5, "not_found_error", "not_found"},
    [BT_API_EXHAUSTED] = {429, 8, "rate_limit_error", "overloaded"},
    [BT_API_UNAVAILABLE] = {503, 14, "service_unavailable_error", "unavailable"},
    [BT_API_DEADLINE] = {408, 4, "timeout_error", "deadline_exceeded"},
    [BT_API_CANCELLED] = {499, 1, "cancelled_error", "cancelled"},
    [BT_API_INTERNAL] = {500, 13, "internal_error", "internal"},
};

int bt_api_http_status(enum bt_api_code c)
{
    return codes[c].http;
}

int bt_api_grpc_status(enum bt_api_code c)
{
    return codes[c].grpc;
}

const char *bt_api_error_type(enum bt_api_code c)
{
    return codes[c].type;
}

const char *bt_api_error_code(enum bt_api_code c)
{
    return codes[c].code;
}

bool bt_api_fail(struct bt_api_err *e, enum bt_api_code code, const char *param, const char *fmt,
                 ...)
{
    va_list ap;

    e->code = code;
    e->retry_ns = 0;
    snprintf(e->param, sizeof e->param, "%s", param != NULL ? param : "");
    va_start(ap, fmt);
    (void)vsnprintf(e->msg, sizeof e->msg, fmt, ap);
    va_end(ap);
    return false;
}

/* version-traceid-parentid-flags in lower case hex; versions above 00 may have more behind, ff is none. */
const char *bt_api_trace_id(const char *traceparent)
{
    static const char shape[] = "vv-tttttttttttttttttttttttttttttttt-pppppppppppppppp-ff";
    size_t len = traceparent != NULL ? strlen(traceparent) : 0;
    const size_t whole = sizeof shape - 1;

    if (len < whole || strncmp(traceparent, "ff", 2) == 0 ||
        (len > whole && (strncmp(traceparent, "00", 2) == 0 || traceparent[whole] != '-'))) {
        return NULL;
    }
    for (size_t i = 0; i < whole; i++) {
        if (shape[i] == '-' ? traceparent[i] != '-'
                            : strchr("0123456789abcdef", traceparent[i]) == NULL) {
            return NULL;
        }
    }
    return bt_trace_id_valid(traceparent + 3) && strspn(traceparent + 36, "0") < 16
               ? traceparent + 3
               : NULL;
}

/* ---- parameters ---- */

void bt_params_init(struct bt_params *p)
{
    *p = (struct bt_params){
        .n = 1,
        .sampling = {.temperature = 1.0f, .top_p = 1.0f, .repetition_penalty = 1.0f},
    };
}

void bt_params_fini(struct bt_params *p)
{
    for (size_t i = 0; i < p->n_stop; i++) {
        bt_free(p->stop[i]);
    }
    p->n_stop = 0;
    bt_free(p->bias);
    p->bias = NULL;
    p->sampling.n_bias = 0;
}

bool bt_params_add_stop(struct bt_params *p, const char *s, size_t len, struct bt_api_err *e)
{
    if (p->n_stop == BT_STOP_STRINGS_MAX) {
        return bt_api_fail(e, BT_API_INVALID, "stop", "stop: at most %d strings",
                           BT_STOP_STRINGS_MAX);
    }
    if (len == 0 || len > BT_STOP_BYTES_MAX) {
        return bt_api_fail(e, BT_API_INVALID, "stop", "stop: a string must have 1 to %d bytes",
                           BT_STOP_BYTES_MAX);
    }
    if (!bt_utf8_valid(s, len, NULL)) {
        return bt_api_fail(e, BT_API_INVALID, "stop", "stop: not valid UTF-8");
    }
    char *copy = bt_memdup(s, len);

    if (copy == NULL) {
        return bt_api_fail(e, BT_API_INTERNAL, NULL, "out of memory");
    }
    p->stop[p->n_stop] = copy;
    p->stop_len[p->n_stop++] = len;
    return true;
}

bool bt_params_add_stop_id(struct bt_params *p, uint64_t id, struct bt_api_err *e)
{
    if (p->sampling.n_stop_ids == BT_STOP_IDS_MAX) {
        return bt_api_fail(e, BT_API_INVALID, "stop_token_ids", "stop_token_ids: at most %d ids",
                           BT_STOP_IDS_MAX);
    }
    p->sampling.stop_ids[p->sampling.n_stop_ids++] = id < UINT32_MAX ? (uint32_t)id : UINT32_MAX;
    return true;
}

bool bt_params_add_bias(struct bt_params *p, uint64_t token, double bias, struct bt_api_err *e)
{
    if (p->sampling.n_bias == BT_LOGIT_BIAS_MAX) {
        return bt_api_fail(e, BT_API_INVALID, "logit_bias", "logit_bias: at most %d tokens",
                           BT_LOGIT_BIAS_MAX);
    }
    if (!(bias >= -100.0 && bias <= 100.0)) {
        return bt_api_fail(e, BT_API_INVALID, "logit_bias",
                           "logit_bias: values must be from -100 to 100");
    }
    if (p->bias == NULL) {
        p->bias = bt_alloc(BT_LOGIT_BIAS_MAX * sizeof *p->bias);
        if (p->bias == NULL) {
            return bt_api_fail(e, BT_API_INTERNAL, NULL, "out of memory");
        }
        p->sampling.bias = p->bias;
    }
    p->bias[p->sampling.n_bias++] =
        (struct bt_logit_bias){token < UINT32_MAX ? (uint32_t)token : UINT32_MAX, (float)bias};
    return true;
}

static bool check_range(float v, float min, float max, bool min_excluded, const char *name,
                        struct bt_api_err *e)
{
    if (v > min && v <= max) {
        return true;
    }
    if (!min_excluded && v == min) {
        return true;
    }
    return bt_api_fail(e, BT_API_INVALID, name, "%s: must be %s %g and at most %g", name,
                       min_excluded ? "greater than" : "at least", (double)min, (double)max);
}

static bool check_ids(const struct bt_params *p, uint32_t vocab, struct bt_api_err *e)
{
    const struct bt_sampling *s = &p->sampling;

    for (uint32_t i = 0; i < s->n_stop_ids; i++) {
        if (s->stop_ids[i] >= vocab) {
            return bt_api_fail(e, BT_API_INVALID, "stop_token_ids",
                               "stop_token_ids: id %u is outside the vocabulary of %u tokens",
                               s->stop_ids[i], vocab);
        }
    }
    for (uint32_t i = 0; i < s->n_bias; i++) {
        if (s->bias[i].token >= vocab) {
            return bt_api_fail(e, BT_API_INVALID, "logit_bias",
                               "logit_bias: id %u is outside the vocabulary of %u tokens",
                               s->bias[i].token, vocab);
        }
    }
    return true;
}

bool bt_params_check(struct bt_params *p, uint32_t vocab, struct bt_api_err *e)
{
    struct bt_sampling *s = &p->sampling;

    if (!check_range(s->temperature, 0, 100, false, "temperature", e) ||
        !check_range(s->top_p, 0, 1, true, "top_p", e) ||
        !check_range(s->min_p, 0, 1, false, "min_p", e) ||
        !check_range(s->repetition_penalty, 0, 100, true, "repetition_penalty", e) ||
        !check_range(s->presence_penalty, -2, 2, false, "presence_penalty", e) ||
        !check_range(s->frequency_penalty, -2, 2, false, "frequency_penalty", e)) {
        return false;
    }
    if (s->repetition_penalty < 1e-3f) {
        return bt_api_fail(e, BT_API_INVALID, "repetition_penalty",
                           "repetition_penalty: must be at least 0.001");
    }
    if (p->n < 1 || p->n > BT_PARAMS_N_MAX) {
        return bt_api_fail(e, BT_API_INVALID, "n", "n: must be from 1 to %u", BT_PARAMS_N_MAX);
    }
    if (p->has_max_tokens && s->max_tokens == 0 && !p->echo) {
        return bt_api_fail(e, BT_API_INVALID, "max_tokens",
                           "max_tokens: 0 is allowed only together with echo");
    }
    if (p->has_max_tokens && s->min_tokens > s->max_tokens) {
        return bt_api_fail(e, BT_API_INVALID, "min_tokens",
                           "min_tokens (%u) is greater than max_tokens (%u)", s->min_tokens,
                           s->max_tokens);
    }
    if (s->n_top > BT_LOGPROBS_MAX) {
        return bt_api_fail(e, BT_API_INVALID, "logprobs", "logprobs: at most %d", BT_LOGPROBS_MAX);
    }
    if (!check_ids(p, vocab, e)) {
        return false;
    }
    if (!p->has_seed) {
        bt_random_bytes(&s->seed, sizeof s->seed);
    }
    return true;
}
