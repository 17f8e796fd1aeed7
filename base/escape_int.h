#ifndef BT_BASE_ESCAPE_INT_H
#define BT_BASE_ESCAPE_INT_H

#include <stddef.h>

#define BT_JSON_ESCAPE_MAX 6 /* bytes written for one character, at most: \u0000 */

/* Writes the first character of s (n > 0 bytes) as it stands inside a JSON string, without NUL;
 * invalid UTF-8 becomes U+FFFD, one for each bad byte. Returns the bytes of s used; *written: bytes
 * of out. */
size_t bt_json_escape(const char *s, size_t n, char out[BT_JSON_ESCAPE_MAX], size_t *written);

#endif
