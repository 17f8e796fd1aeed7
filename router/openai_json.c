/* Typed members of JSON objects. Owns types and their error messages; refuses to know any field. */

#include "router/openai_json_int.h"

#include "base/mem.h"

bool bt_json_wrong_type(const char *name, const char *want, struct bt_api_err *e)
{
    return bt_api_fail(e, BT_API_INVALID, name, "%s: must be %s", name, want);
}

bool bt_json_out_of_memory(struct bt_api_err *e)
{
    return bt_api_fail(e, BT_API_INTERNAL, NULL, "out of memory");
}

const json_t *bt_json_member(const json_t *o, const char *name)
{
    const json_t *v = json_object_get(o, name);

    return json_is_null(v) ? NULL : v;
}

bool bt_json_bool(const json_t *o, const char *name, bool *out, struct bt_api_err *e)
{
    const json_t *v = bt_json_member(o, name);

    if (v == NULL) {
        return true;
    }
    if (!json_is_boolean(v)) {
        return bt_json_wrong_type(name, "true or false", e);
    }
    *out = json_is_true(v);
    return true;
}

bool bt_json_float(const json_t *o, const char *name, float *out, struct bt_api_err *e)
{
    const json_t *v = bt_json_member(o, name);

    if (v == NULL) {
        return true;
    }
    if (!json_is_number(v)) {
        return bt_json_wrong_type(name, "a number", e);
    }
    *out = (float)json_number_value(v);
    return true;
}

bool bt_json_int(const json_t *o, const char *name, int64_t min, int64_t max, int64_t *out,
                 bool *has, struct bt_api_err *e)
{
    const json_t *v = bt_json_member(o, name);

    if (v == NULL) {
        return true;
    }
    if (!json_is_integer(v)) {
        return bt_json_wrong_type(name, "an integer", e);
    }
    int64_t n = json_integer_value(v);

    if (n < min || n > max) {
        return bt_api_fail(e, BT_API_INVALID, name, "%s: must be from %lld to %lld", name,
                           (long long)min, (long long)max);
    }
    *out = n;
    if (has != NULL) {
        *has = true;
    }
    return true;
}

bool bt_json_u32(const json_t *o, const char *name, uint32_t *out, bool *has, struct bt_api_err *e)
{
    int64_t n = *out;

    if (!bt_json_int(o, name, 0, UINT32_MAX / 2, &n, has, e)) {
        return false;
    }
    *out = (uint32_t)n;
    return true;
}

char *bt_json_dup_string(const json_t *v, size_t *len)
{
    size_t n = json_string_length(v);

    if (len != NULL) {
        *len = n;
    }
    return bt_memdup(json_string_value(v), n);
}

bool bt_json_parse_object(const char *body, size_t len, json_t **out, struct bt_api_err *e)
{
    json_error_t err;
    json_t *o = json_loadb(body, len, JSON_ALLOW_NUL, &err);

    if (o == NULL) {
        return bt_api_fail(e, BT_API_INVALID, NULL,
                           "the body is not valid JSON: %s (line %d, column %d)", err.text,
                           err.line, err.column);
    }
    if (!json_is_object(o)) {
        json_decref(o);
        return bt_api_fail(e, BT_API_INVALID, NULL, "the body must be a JSON object");
    }
    *out = o;
    return true;
}
