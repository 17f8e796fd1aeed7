#ifndef BT_BASE_UTF8_H
#define BT_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Strict UTF-8 (no surrogates, no overlong forms, at most U+10FFFF). */

/* true if all n bytes are valid; else *bad (may be NULL) is the offset of the first bad byte. */
bool bt_utf8_valid(const char *s, size_t n, size_t *bad);
/* Decodes one character; returns its length 1..4, or 0 if the bytes at s are invalid or cut off. n
 * > 0. */
unsigned bt_utf8_decode(const char *s, size_t n, uint32_t *cp);
/* Encodes cp into out (4 bytes); returns the length; cp must be a scalar value. */
unsigned bt_utf8_encode(uint32_t cp, char out[4]);
/* Length of the longest prefix of s that does not end inside a character that more bytes could
 * complete. Bytes that can never become valid count as complete (they will be replaced). */
size_t bt_utf8_complete_len(const char *s, size_t n);

#endif
