#ifndef BT_BASE_BUF_H
#define BT_BASE_BUF_H

/* A growable byte string. One thread. Zero-initialised is empty and valid. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/status.h"

struct bt_buf {
    char *data; /* NUL after data[len], so text may be used as a C string; NULL while empty and
                   never grown */
    size_t len;
    size_t cap;
    bool failed; /* an append ran out of memory; the content is cut and later appends do nothing */
};

void bt_buf_fini(struct bt_buf *b);
void bt_buf_clear(struct bt_buf *b); /* keeps the memory, forgets a failure */
bool bt_buf_reserve(struct bt_buf *b, size_t more);
bool bt_buf_add(struct bt_buf *b, const void *p, size_t n);
bool bt_buf_adds(struct bt_buf *b, const char *s);
bool bt_buf_addc(struct bt_buf *b, char c);
bool bt_buf_addu(struct bt_buf *b, uint64_t v); /* decimal; quicker than a format */
bool bt_buf_addf(struct bt_buf *b, const char *fmt, ...) BT_PRINTF(2, 3);
/* JSON string with quotes and escapes; invalid UTF-8 becomes U+FFFD. */
bool bt_buf_add_json_str(struct bt_buf *b, const char *s, size_t n);
void bt_buf_consume(struct bt_buf *b, size_t n); /* drops n bytes from the front */
/* Takes the memory out (caller frees with bt_free); b is empty again. NULL if an append had failed;
 * an empty buffer gives "". len may be NULL. */
char *bt_buf_take(struct bt_buf *b, size_t *len);

#endif
