/* Strict UTF-8, the table of well-formed byte sequences written as code. Stateless. */

#include "base/utf8.h"

#include "base/assert.h"

/* Length of the character that lead starts, 0 if it starts none; *lo, *hi: bounds of its second
 * byte. */
static unsigned lead_len(unsigned char lead, unsigned char *lo, unsigned char *hi)
{
    *lo = 0x80;
    *hi = 0xBF;
    if (lead < 0x80) {
        return 1;
    }
    if (lead < 0xC2) {
        return 0; /* a continuation byte, or overlong */
    }
    if (lead < 0xE0) {
        return 2;
    }
    if (lead < 0xF0) {
        if (lead == 0xE0) {
            *lo = 0xA0; /* below: overlong */
        } else if (lead == 0xED) {
            *hi = 0x9F; /* above: surrogates */
        }
        return 3;
    }
    if (lead <= 0xF4) {
        if (lead == 0xF0) {
            *lo = 0x90; /* below: overlong */
        } else if (lead == 0xF4) {
            *hi = 0x8F; /* above: past U+10FFFF */
        }
        return 4;
    }
    return 0;
}

/* How many of the n > 0 bytes at s belong to the start of one character; *len: its full length (0:
 * bad lead). */
static unsigned good_bytes(const char *s, size_t n, unsigned *len)
{
    unsigned char lo, hi;
    *len = lead_len((unsigned char)s[0], &lo, &hi);
    if (*len == 0) {
        return 0;
    }
    unsigned i = 1;
    while (i < *len && i < n) {
        unsigned char c = (unsigned char)s[i];
        if (c < lo || c > hi) {
            break;
        }
        lo = 0x80;
        hi = 0xBF;
        i++;
    }
    return i;
}

unsigned bt_utf8_decode(const char *s, size_t n, uint32_t *cp)
{
    static const unsigned char lead_bits[5] = {0, 0x7F, 0x1F, 0x0F, 0x07};
    unsigned len;
    if (n == 0 || good_bytes(s, n, &len) != len || len == 0) {
        return 0;
    }
    uint32_t v = (unsigned char)s[0] & lead_bits[len];
    for (unsigned i = 1; i < len; i++) {
        v = v << 6 | ((unsigned char)s[i] & 0x3Fu);
    }
    *cp = v;
    return len;
}

bool bt_utf8_valid(const char *s, size_t n, size_t *bad)
{
    size_t i = 0;
    while (i < n) {
        if ((unsigned char)s[i] < 0x80) {
            i++;
            continue;
        }
        unsigned len;
        unsigned good = good_bytes(s + i, n - i, &len);
        if (len == 0 || good != len) {
            if (bad != NULL) {
                *bad = i;
            }
            return false;
        }
        i += len;
    }
    return true;
}

unsigned bt_utf8_encode(uint32_t cp, char out[4])
{
    BT_ASSERT(cp <= 0x10FFFF && !(cp >= 0xD800 && cp <= 0xDFFF));
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xC0 | cp >> 6);
        out[1] = (char)(0x80 | (cp & 0x3F));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xE0 | cp >> 12);
        out[1] = (char)(0x80 | (cp >> 6 & 0x3F));
        out[2] = (char)(0x80 | (cp & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | cp >> 18);
    out[1] = (char)(0x80 | (cp >> 12 & 0x3F));
    out[2] = (char)(0x80 | (cp >> 6 & 0x3F));
    out[3] = (char)(0x80 | (cp & 0x3F));
    return 4;
}

size_t bt_utf8_complete_len(const char *s, size_t n)
{
    for (unsigned back = 1; back <= 3 && back <= n; back++) {
        unsigned char c = (unsigned char)s[n - back];
        if ((c & 0xC0) == 0x80) {
            continue;
        }
        unsigned len;
        unsigned good = good_bytes(s + n - back, back, &len);
        return len > back && good == back ? n - back : n;
    }
    return n;
}
