#ifndef BT_ROUTER_OPENAI_JSON_INT_H
#define BT_ROUTER_OPENAI_JSON_INT_H

/* Inside router/ only: typed members of JSON objects, with errors that name the member; and what the two files of the
 * request parser share. Each getter leaves *out alone when the member is absent or null. */

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "router/api.h"

bool bt_json_wrong_type(const char *name, const char *want, struct bt_api_err *e); /* false */
bool bt_json_out_of_memory(struct bt_api_err *e);                                  /* false */
/* NULL: absent or null, which mean the same. */
const json_t *bt_json_member(const json_t *o, const char *name);
bool bt_json_bool(const json_t *o, const char *name, bool *out, struct bt_api_err *e);
bool bt_json_float(const json_t *o, const char *name, float *out, struct bt_api_err *e);
/* has may be NULL. */
bool bt_json_int(const json_t *o, const char *name, int64_t min, int64_t max, int64_t *out,
                 bool *has, struct bt_api_err *e);
bool bt_json_u32(const json_t *o, const char *name, uint32_t *out, bool *has, struct bt_api_err *e);
char *bt_json_dup_string(const json_t *v, size_t *len); /* len may be NULL; NULL: no memory */
/* The body as an object; json_decref it. */
bool bt_json_parse_object(const char *body, size_t len, json_t **out, struct bt_api_err *e);

/* openai_params.c: sampling and the like; known fields whose meaning is not supported. */
bool bt_openai_get_params(const json_t *o, bool chat, struct bt_params *p, struct bt_api_err *e);
bool bt_openai_check_unsupported(const json_t *o, bool chat, struct bt_api_err *e);

#endif
