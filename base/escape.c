/* One character of a JSON string at a time, for buffers that grow and for log lines that do not. */

#include "base/escape_int.h"

#include <stdint.h>
#include <string.h>
#include "base/utf8.h"

static size_t put(char *out, const char *s, size_t n)
{
    memcpy(out, s, n);
    return n;
}

size_t bt_json_escape(const char *s, size_t n, char out[BT_JSON_ESCAPE_MAX], size_t *written)
{
    static const char hex[] = "0123456789abcdef";
    unsigned char c = (unsigned char)s[0];

    if (c >= 0x80) {
        uint32_t cp;
        unsigned len = bt_utf8_decode(s, n, &cp);
        if (len == 0) {
            *written = put(out, "\xEF\xBF\xBD", 3);
            return 1;
        }
        *written = put(out, s, len);
        return len;
    }
    const char *two = NULL;
    switch (c) {
    case '"':
        two = "\\\"";
        break;
    case '\\':
        two = "\\\\";
        break;
    case '\n':
        two = "\\n";
        break;
    case '\r':
        two = "\\r";
        break;
    case '\t':
        two = "\\t";
        break;
    case '\b':
        two = "\\b";
        break;
    case '\f':
        two = "\\f";
        break;
    default:
        break;
    }
    if (two != NULL) {
        *written = put(out, two, 2);
    } else if (c < 0x20 || c == 0x7F) {
        char u[6] = {'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]};
        *written = put(out, u, 6);
    } else {
        *written = put(out, s, 1);
    }
    return 1;
}
