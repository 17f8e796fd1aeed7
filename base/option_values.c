/* Option values: text to the typed field with range check, and back to text. Knows nothing of where
 * text came from but the words to begin an error with. */

#include "base/options_int.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/clock.h"
#include "base/mem.h"

struct unit {
    const char *name;
    uint64_t factor;
};

/* Smallest first, ended by NULL; the one with an empty name is what a bare number means. */
static const struct unit size_units[] = {
    {"", 1},
    {"B", 1},
    {"KiB", UINT64_C(1) << 10},
    {"MiB", UINT64_C(1) << 20},
    {"GiB", UINT64_C(1) << 30},
    {"TiB", UINT64_C(1) << 40},
    {NULL, 0},
};

static const struct unit duration_units[] = {
    {"", UINT64_C(1000000)},        {"ns", 1},
    {"us", UINT64_C(1000)},         {"ms", UINT64_C(1000000)},
    {"s", UINT64_C(1000000000)},    {"min", UINT64_C(60000000000)},
    {"h", UINT64_C(3600000000000)}, {NULL, 0},
};

/* Digits, maybe a fraction of up to nine, maybe a unit; exact in integers. */
static bool parse_units(const char *s, const struct unit *units, uint64_t *out)
{
    unsigned __int128 whole = 0;
    uint64_t frac = 0, frac_unit = 1;

    if (!isdigit((unsigned char)*s)) {
        return false;
    }
    for (; isdigit((unsigned char)*s); s++) {
        whole = whole * 10 + (unsigned)(*s - '0');
        if (whole > UINT64_MAX) {
            return false;
        }
    }
    if (*s == '.') {
        s++;
        if (!isdigit((unsigned char)*s)) {
            return false;
        }
        for (; isdigit((unsigned char)*s); s++) {
            if (frac_unit == UINT64_C(1000000000)) {
                return false;
            }
            frac = frac * 10 + (uint64_t)(*s - '0');
            frac_unit *= 10;
        }
    }
    while (*s == ' ') {
        s++;
    }
    for (const struct unit *u = units; u->name != NULL; u++) {
        if (strcmp(s, u->name) == 0) {
            unsigned __int128 v =
                whole * u->factor + (unsigned __int128)frac * u->factor / frac_unit;
            if (v > UINT64_MAX) {
                return false;
            }
            *out = (uint64_t)v;
            return true;
        }
    }
    return false;
}

enum bt_status bt_parse_size(const char *s, uint64_t *out)
{
    return parse_units(s, size_units, out) ? BT_OK : BT_ERR_INVALID;
}

enum bt_status bt_parse_duration(const char *s, uint64_t *out_ns)
{
    return parse_units(s, duration_units, out_ns) ? BT_OK : BT_ERR_INVALID;
}

/* The largest unit that divides v, so that the text means exactly v. */
static void format_units(uint64_t v, const struct unit *units, const char *zero, struct bt_buf *out)
{
    const struct unit *best = &units[1];
    if (v == 0) {
        bt_buf_adds(out, zero);
        return;
    }
    for (const struct unit *u = &units[1]; u->name != NULL; u++) {
        if (v % u->factor == 0) {
            best = u;
        }
    }
    bt_buf_addf(out, "%" PRIu64 "%s", v / best->factor,
                units == size_units && best->factor == 1 ? "" : best->name);
}

static void format_number(const struct bt_opt *opt, double v, struct bt_buf *out)
{
    bool fits = v >= 0 && v < 18446744073709551616.0;
    if (opt->type == BT_OPT_SIZE && fits) {
        format_units((uint64_t)v, size_units, "0", out);
    } else if (opt->type == BT_OPT_DURATION && fits) {
        format_units((uint64_t)v, duration_units, "0ms", out);
    } else {
        bt_buf_addf(out, "%.15g", v);
    }
}

static enum bt_status range_error(const struct bt_opt *opt, const char *text, const char *where,
                                  struct bt_err *err)
{
    struct bt_buf b = {0};
    format_number(opt, opt->min, &b);
    bt_buf_adds(&b, " to ");
    format_number(opt, opt->max, &b);
    bt_err_set(err, BT_ERR_INVALID, "%s: %.100s is out of range (%s)", where, text,
               b.failed ? "see --help" : b.data);
    bt_buf_fini(&b);
    return BT_ERR_INVALID;
}

static bool out_of_range(const struct bt_opt *opt, double v)
{
    return (opt->min != 0 || opt->max != 0) && (v < opt->min || v > opt->max);
}

static bool parse_u64(const char *s, uint64_t *out)
{
    char *end;
    if (!isdigit((unsigned char)*s)) {
        return false;
    }
    errno = 0;
    unsigned long long v = strtoull(s, &end, 10);
    if (errno != 0 || *end != '\0') {
        return false;
    }
    *out = v;
    return true;
}

/* Decimal only, with a point whatever the locale: nobody calls setlocale in these programs. */
static bool parse_double(const char *s, double *out)
{
    char *end;
    if (*s == '\0' || isspace((unsigned char)*s)) {
        return false;
    }
    double v = strtod(s, &end);
    if (*end != '\0' || !isfinite(v)) {
        return false;
    }
    *out = v;
    return true;
}

static bool parse_bool(const char *s, bool *out)
{
    static const char *const yes[] = {"true", "yes", "on", "1"};
    static const char *const no[] = {"false", "no", "off", "0"};
    for (size_t i = 0; i < sizeof(yes) / sizeof(yes[0]); i++) {
        if (strcmp(s, yes[i]) == 0 || strcmp(s, no[i]) == 0) {
            *out = strcmp(s, yes[i]) == 0;
            return true;
        }
    }
    return false;
}

/* Index of s in "a|b|c", or -1. */
static int choice_index(const char *choices, const char *s)
{
    size_t n = strlen(s);
    int index = 0;
    for (const char *p = choices; p != NULL; index++) {
        const char *end = strchrnul(p, '|');
        if (n > 0 && (size_t)(end - p) == n && memcmp(p, s, n) == 0) {
            return index;
        }
        p = *end == '|' ? end + 1 : NULL;
    }
    return -1;
}

static enum bt_status store_string(char **field, const char *text, bool add, const char *where,
                                   struct bt_err *err)
{
    char *copy;
    if (add && *field != NULL && (*field)[0] != '\0') {
        struct bt_buf b = {0};
        bt_buf_adds(&b, *field);
        if (text[0] != '\0') {
            bt_buf_addc(&b, ',');
            bt_buf_adds(&b, text);
        }
        copy = bt_buf_take(&b, NULL);
    } else {
        copy = bt_strdup(text);
    }
    if (copy == NULL) {
        return bt_err_set(err, BT_ERR_NOMEM, "%s: out of memory", where);
    }
    bt_free(*field);
    *field = copy;
    return BT_OK;
}

static const char *expected(enum bt_opt_type type)
{
    switch (type) {
    case BT_OPT_U32:
    case BT_OPT_U64:
        return "a whole number";
    case BT_OPT_SIZE:
        return "a size such as 512, 64KiB, 2MiB or 1GiB";
    case BT_OPT_DURATION:
        return "a duration such as 250ms, 3s or 2min (a bare number is milliseconds)";
    case BT_OPT_DOUBLE:
        return "a number";
    case BT_OPT_BOOL:
        return "true or false";
    case BT_OPT_STR:
    case BT_OPT_ENUM:
    case BT_OPT_LIST:
        break;
    }
    return "a value";
}

enum bt_status bt_opt_store(const struct bt_opt *opt, void *base, const char *text, bool add,
                            const char *where, struct bt_err *err)
{
    void *field = (char *)base + opt->offset;
    uint64_t u = 0;
    double d = 0;
    bool ok = true, flag = false;
    int choice;

    switch (opt->type) {
    case BT_OPT_STR:
    case BT_OPT_LIST:
        return store_string(field, text, add && opt->type == BT_OPT_LIST, where, err);
    case BT_OPT_ENUM:
        choice = choice_index(opt->choices, text);
        if (choice < 0) {
            return bt_err_set(err, BT_ERR_INVALID, "%s: \"%.100s\" is none of %s", where, text,
                              opt->choices);
        }
        *(int *)field = choice;
        return BT_OK;
    case BT_OPT_BOOL:
        ok = parse_bool(text, &flag);
        break;
    case BT_OPT_DOUBLE:
        ok = parse_double(text, &d);
        break;
    case BT_OPT_U32:
    case BT_OPT_U64:
        ok = parse_u64(text, &u);
        d = (double)u;
        break;
    case BT_OPT_SIZE:
        ok = bt_parse_size(text, &u) == BT_OK;
        d = (double)u;
        break;
    case BT_OPT_DURATION:
        ok = bt_parse_duration(text, &u) == BT_OK;
        d = (double)u;
        break;
    }
    if (!ok) {
        return bt_err_set(err, BT_ERR_INVALID, "%s: \"%.100s\" is not %s", where, text,
                          expected(opt->type));
    }
    if (opt->type != BT_OPT_BOOL && out_of_range(opt, d)) {
        return range_error(opt, text, where, err);
    }
    if (opt->type == BT_OPT_U32 && u > UINT32_MAX) {
        return bt_err_set(err, BT_ERR_INVALID, "%s: %.100s is out of range (at most %" PRIu32 ")",
                          where, text, UINT32_MAX);
    }
    if (opt->type == BT_OPT_BOOL) {
        *(bool *)field = flag;
    } else if (opt->type == BT_OPT_DOUBLE) {
        *(double *)field = d;
    } else if (opt->type == BT_OPT_U32) {
        *(uint32_t *)field = (uint32_t)u;
    } else {
        *(uint64_t *)field = u;
    }
    return BT_OK;
}

static void format_choice(const char *choices, int index, struct bt_buf *out)
{
    const char *p = choices;
    for (int i = 0; i < index && p != NULL; i++) {
        p = strchr(p, '|');
        p = p != NULL ? p + 1 : NULL;
    }
    if (p != NULL) {
        bt_buf_add(out, p, (size_t)(strchrnul(p, '|') - p));
    }
}

bool bt_opt_format(const struct bt_opt *opt, const void *base, struct bt_buf *out)
{
    const void *field = (const char *)base + opt->offset;
    switch (opt->type) {
    case BT_OPT_STR:
    case BT_OPT_LIST: {
        const char *s = *(char *const *)field;
        if (s == NULL) {
            return false;
        }
        bt_buf_adds(out, s);
        break;
    }
    case BT_OPT_U32:
        bt_buf_addf(out, "%" PRIu32, *(const uint32_t *)field);
        break;
    case BT_OPT_U64:
        bt_buf_addf(out, "%" PRIu64, *(const uint64_t *)field);
        break;
    case BT_OPT_SIZE:
        format_units(*(const uint64_t *)field, size_units, "0", out);
        break;
    case BT_OPT_DURATION:
        format_units(*(const uint64_t *)field, duration_units, "0ms", out);
        break;
    case BT_OPT_DOUBLE: {
        /* The shortest text that reads back as the same number. */
        double d = *(const double *)field;
        char text[64];
        for (int digits = 1; digits <= 17; digits++) {
            (void)snprintf(text, sizeof(text), "%.*g", digits, d);
            if (strtod(text, NULL) == d) {
                break;
            }
        }
        bt_buf_adds(out, text);
        break;
    }
    case BT_OPT_BOOL:
        bt_buf_adds(out, *(const bool *)field ? "true" : "false");
        break;
    case BT_OPT_ENUM:
        format_choice(opt->choices, *(const int *)field, out);
        break;
    }
    return true;
}

void bt_opt_env_name(const char *name, char *out, size_t cap)
{
    static const char prefix[] = "BATON_";
    size_t n = 0;
    for (const char *p = prefix; *p != '\0' && n + 1 < cap; p++) {
        out[n++] = *p;
    }
    for (const char *p = name; *p != '\0' && n + 1 < cap; p++) {
        out[n++] = *p == '-' || *p == '.' ? '_' : (char)toupper((unsigned char)*p);
    }
    out[n] = '\0';
}

enum bt_status bt_opt_check_lease(uint64_t lease, uint64_t heartbeat, struct bt_err *err)
{
    if (lease >= 2 * heartbeat) {
        return BT_OK;
    }
    return bt_err_set(err, BT_ERR_INVALID,
                      "--lease %llu ms is shorter than two heartbeats of %llu ms (--heartbeat): "
                      "nodes that live would count as gone",
                      (unsigned long long)(lease / BT_NS_PER_MS),
                      (unsigned long long)(heartbeat / BT_NS_PER_MS));
}
