/* Operators of chat templates on values: arithmetic in 64 bits, text and lists joined and repeated, comparison. */

#include "text/template_int.h"

#include <math.h>
#include <string.h>

static bool is_int(struct tv v)
{
    return v.type == TV_INT || v.type == TV_BOOL;
}

static int64_t as_int(struct tv v)
{
    return v.type == TV_BOOL ? v.b : v.i;
}

static bool int_pow(int64_t base, int64_t exp, int64_t *out)
{
    int64_t r = 1;

    while (exp > 0) {
        if ((exp & 1) != 0 && __builtin_mul_overflow(r, base, &r)) {
            return false;
        }
        exp >>= 1;
        if (exp > 0 && __builtin_mul_overflow(base, base, &base)) {
            return false;
        }
    }
    *out = r;
    return true;
}

static bool int_op(struct tev *ev, uint8_t op, int64_t a, int64_t b, struct tv *out)
{
    int64_t r = 0;
    bool fits = true;

    if (b == 0 && (op == 'f' || op == '%' || op == '/')) {
        return bt_tev_fail(ev, "division by zero");
    }
    switch (op) {
    case '+':
        fits = !__builtin_add_overflow(a, b, &r);
        break;
    case '-':
        fits = !__builtin_sub_overflow(a, b, &r);
        break;
    case '*':
        fits = !__builtin_mul_overflow(a, b, &r);
        break;
    case 'f':
        fits = !(a == INT64_MIN && b == -1);
        r = fits ? a / b - (a % b != 0 && (a < 0) != (b < 0)) : 0;
        break;
    case '%':
        r = b == -1 ? 0 : a % b;
        r += r != 0 && (r < 0) != (b < 0) ? b : 0;
        break;
    case 'p':
        if (b < 0) {
            *out = tv_float(pow((double)a, (double)b));
            return a != 0 || bt_tev_fail(ev, "division by zero");
        }
        fits = int_pow(a, b, &r);
        break;
    default: /* '/' */
        *out = tv_float((double)a / (double)b);
        return true;
    }
    *out = tv_int(r);
    return fits || bt_tev_fail(ev, "the integer result does not fit 64 bits");
}

static bool float_op(struct tev *ev, uint8_t op, double a, double b, struct tv *out)
{
    double r;

    if (b == 0 && (op == 'f' || op == '%' || op == '/')) {
        return bt_tev_fail(ev, "division by zero");
    }
    switch (op) {
    case '+':
        r = a + b;
        break;
    case '-':
        r = a - b;
        break;
    case '*':
        r = a * b;
        break;
    case 'f':
        r = floor(a / b);
        break;
    case '%':
        r = fmod(a, b);
        r += r != 0 && (r < 0) != (b < 0) ? b : 0;
        break;
    case 'p':
        r = pow(a, b);
        break;
    default:
        r = a / b;
        break;
    }
    *out = tv_float(r);
    return true;
}

static bool concat_lists(struct tev *ev, struct tv a, struct tv b, struct tv *out)
{
    struct tlist *l;

    if (!bt_tlist_new(ev, a.list->n + b.list->n, &l) || !bt_tev_steps(ev, l->cap / 4)) {
        return false;
    }
    for (uint32_t i = 0; i < a.list->n; i++) {
        l->items[l->n++] = a.list->items[i];
    }
    for (uint32_t i = 0; i < b.list->n; i++) {
        l->items[l->n++] = b.list->items[i];
    }
    *out = tv_list((enum list_kind)a.kind, l);
    return true;
}

static bool repeat(struct tev *ev, struct tv v, int64_t times, struct tv *out)
{
    size_t n = v.type == TV_STR ? v.n : v.list->n;
    struct tlist *l;

    times = times < 0 ? 0 : times;
    if (n > 0 && (uint64_t)times > ev->out_max / n) {
        return bt_tev_fail(ev, "repeated to more than %zu", ev->out_max);
    }
    if (!bt_tev_steps(ev, n * (size_t)times / 16)) {
        return false;
    }
    if (v.type == TV_STR) {
        char *s = bt_tev_alloc(ev, n * (size_t)times);

        for (int64_t i = 0; s != NULL && n > 0 && i < times; i++) {
            memcpy(s + (size_t)i * n, v.s, n);
        }
        *out = tv_str(s, n * (size_t)times);
        return s != NULL;
    }
    if (!bt_tlist_new(ev, (uint32_t)(n * (size_t)times), &l)) {
        return false;
    }
    for (int64_t i = 0; n > 0 && i < times; i++) {
        memcpy(l->items + l->n, v.list->items, n * sizeof *l->items);
        l->n += (uint32_t)n;
    }
    *out = tv_list((enum list_kind)v.kind, l);
    return true;
}

static bool concat_str(struct tev *ev, struct tv a, struct tv b, struct tv *out)
{
    size_t n = (size_t)a.n + b.n;
    char *s;

    if (n > ev->out_max) {
        return bt_tev_fail(ev, "text longer than %zu bytes", ev->out_max);
    }
    s = bt_tev_alloc(ev, n);
    if (s == NULL || !bt_tev_steps(ev, n / 64)) {
        return false;
    }
    memcpy(s, a.s, a.n);
    memcpy(s + a.n, b.s, b.n);
    *out = tv_str(s, n);
    return true;
}

bool bt_tev_binary(struct tev *ev, uint8_t op, struct tv a, struct tv b, struct tv *out)
{
    const char shown[3] = {op == 'f'   ? '/'
                           : op == 'p' ? '*'
                                       : (char)op,
                           op == 'f'   ? '/'
                           : op == 'p' ? '*'
                                       : '\0',
                           '\0'};
    bool lists = a.type == TV_LIST && b.type == TV_LIST && a.kind == b.kind && a.kind <= LIST_TUPLE;

    if (op == '%' && a.type == TV_STR) {
        return bt_tstr_percent(ev, a, b, out);
    }
    if (a.type == TV_UNDEF || b.type == TV_UNDEF) {
        return bt_tev_undefined_error(ev, a.type == TV_UNDEF ? a : b);
    }
    if (is_int(a) && is_int(b)) {
        return int_op(ev, op, as_int(a), as_int(b), out);
    }
    if ((is_int(a) || a.type == TV_FLOAT) && (is_int(b) || b.type == TV_FLOAT)) {
        return float_op(ev, op, a.type == TV_FLOAT ? a.f : (double)as_int(a),
                        b.type == TV_FLOAT ? b.f : (double)as_int(b), out);
    }
    if (op == '+' && a.type == TV_STR && b.type == TV_STR) {
        return concat_str(ev, a, b, out);
    }
    if (op == '+' && lists) {
        return concat_lists(ev, a, b, out);
    }
    if (op == '*' && is_int(b) &&
        (a.type == TV_STR || (a.type == TV_LIST && a.kind <= LIST_TUPLE))) {
        return repeat(ev, a, as_int(b), out);
    }
    if (op == '*' && is_int(a) &&
        (b.type == TV_STR || (b.type == TV_LIST && b.kind <= LIST_TUPLE))) {
        return repeat(ev, b, as_int(a), out);
    }
    return bt_tev_fail(ev, "'%s' does not work between %s and %s", shown, bt_tv_type_name(a),
                       bt_tv_type_name(b));
}

bool bt_tev_contains(struct tev *ev, struct tv item, struct tv in, bool *out)
{
    struct tlist *l;

    *out = false;
    if (in.type == TV_STR) {
        if (item.type != TV_STR) {
            return bt_tev_fail(ev, "'in' looks for a string in a string, not for %s",
                               bt_tv_type_name(item));
        }
        *out = item.n == 0 || memmem(in.s, in.n, item.s, item.n) != NULL;
        return bt_tev_steps(ev, in.n / 64);
    }
    if (in.type == TV_DICT) {
        if (!bt_tv_hashable(item)) {
            return bt_tev_fail(ev, "a %s cannot be a key", bt_tv_type_name(item));
        }
        *out = bt_tdict_find(in.dict, item) != NULL;
        return bt_tev_steps(ev, in.dict->n / 16);
    }
    if (!bt_tev_items(ev, in, &l)) {
        return false;
    }
    for (uint32_t i = 0; i < l->n && !*out; i++) {
        if (!bt_tv_equal(ev, l->items[i], item, out)) {
            return false;
        }
    }
    return true;
}

bool bt_tev_compare(struct tev *ev, uint8_t op, struct tv a, struct tv b, bool *out)
{
    bool same = false;

    switch (op) {
    case '=':
    case '!':
        if (!bt_tv_equal(ev, a, b, out)) {
            return false;
        }
        *out = *out == (op == '=');
        return true;
    case 'i':
    case 'n':
        if (!bt_tev_contains(ev, a, b, out)) {
            return false;
        }
        *out = *out == (op == 'i');
        return true;
    case '<':
        return bt_tv_less(ev, a, b, out);
    case '>':
        return bt_tv_less(ev, b, a, out);
    default: /* 'l', 'g' */
        if (!(op == 'l' ? bt_tv_less(ev, a, b, out) : bt_tv_less(ev, b, a, out)) ||
            !bt_tv_equal(ev, a, b, &same)) {
            return false;
        }
        *out = *out || same;
        return true;
    }
}
