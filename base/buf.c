/* The growable byte string. Doubles, never shrinks, and remembers a failed append so that a caller
 * may check once at the end. */

#include "base/buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/assert.h"
#include "base/escape_int.h"
#include "base/mem.h"

#define CAP_MIN ((size_t)64)

void bt_buf_fini(struct bt_buf *b)
{
    bt_free(b->data);
    *b = (struct bt_buf){0};
}

void bt_buf_clear(struct bt_buf *b)
{
    b->len = 0;
    b->failed = false;
    if (b->data != NULL) {
        b->data[0] = '\0';
    }
}

bool bt_buf_reserve(struct bt_buf *b, size_t more)
{
    size_t need;
    if (b->failed) {
        return false;
    }
    if (!bt_add_size(b->len, more, &need) || !bt_add_size(need, 1, &need)) {
        b->failed = true;
        return false;
    }
    if (need <= b->cap) {
        return true;
    }
    size_t cap = b->cap < CAP_MIN ? CAP_MIN : b->cap;
    while (cap < need) {
        if (!bt_mul_size(cap, 2, &cap)) {
            cap = need;
        }
    }
    char *p = bt_realloc(b->data, cap);
    if (p == NULL) {
        b->failed = true;
        return false;
    }
    p[b->len] = '\0';
    b->data = p;
    b->cap = cap;
    return true;
}

bool bt_buf_add(struct bt_buf *b, const void *p, size_t n)
{
    /* With room for it and the NUL there is nothing to reserve: most appends are short. */
    if ((b->failed || n >= b->cap - b->len) && !bt_buf_reserve(b, n)) {
        return false;
    }
    if (n > 0) {
        memcpy(b->data + b->len, p, n);
    }
    b->len += n;
    b->data[b->len] = '\0';
    return true;
}

bool bt_buf_adds(struct bt_buf *b, const char *s)
{
    return bt_buf_add(b, s, strlen(s));
}

bool bt_buf_addc(struct bt_buf *b, char c)
{
    return bt_buf_add(b, &c, 1);
}

bool bt_buf_addu(struct bt_buf *b, uint64_t v)
{
    char digits[20];
    size_t at = sizeof digits;

    do {
        digits[--at] = (char)('0' + v % 10);
        v /= 10;
    } while (v > 0);
    return bt_buf_add(b, digits + at, sizeof digits - at);
}

bool bt_buf_addf(struct bt_buf *b, const char *fmt, ...)
{
    va_list ap;
    char small[256];
    va_start(ap, fmt);
    int n = vsnprintf(small, sizeof(small), fmt, ap);
    va_end(ap);
    if (n < 0) {
        b->failed = true;
        return false;
    }
    if ((size_t)n < sizeof(small)) {
        return bt_buf_add(b, small, (size_t)n);
    }
    if (!bt_buf_reserve(b, (size_t)n)) {
        return false;
    }
    va_start(ap, fmt);
    (void)vsnprintf(b->data + b->len, (size_t)n + 1, fmt, ap);
    va_end(ap);
    b->len += (size_t)n;
    return true;
}

bool bt_buf_add_json_str(struct bt_buf *b, const char *s, size_t n)
{
    bt_buf_addc(b, '"');
    size_t i = 0;
    while (i < n) {
        /* Runs that need no escape go in one copy. */
        size_t run = i;
        while (run < n && (unsigned char)s[run] >= 0x20 && (unsigned char)s[run] < 0x7F &&
               s[run] != '"' && s[run] != '\\') {
            run++;
        }
        if (run > i) {
            bt_buf_add(b, s + i, run - i);
            i = run;
            continue;
        }
        char esc[BT_JSON_ESCAPE_MAX];
        size_t len;
        i += bt_json_escape(s + i, n - i, esc, &len);
        bt_buf_add(b, esc, len);
    }
    return bt_buf_addc(b, '"');
}

void bt_buf_consume(struct bt_buf *b, size_t n)
{
    BT_ASSERT(n <= b->len);
    if (n == 0) {
        return;
    }
    b->len -= n;
    memmove(b->data, b->data + n, b->len);
    b->data[b->len] = '\0';
}

char *bt_buf_take(struct bt_buf *b, size_t *len)
{
    size_t n = b->len;
    char *p = NULL;
    if (bt_buf_reserve(b, 0)) {
        p = b->data;
        b->data = NULL;
    } else {
        n = 0;
    }
    bt_buf_fini(b);
    if (len != NULL) {
        *len = n;
    }
    return p;
}
