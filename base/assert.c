/* The end of a process that has found a bug in itself. Uses no lock and no heap: the caller's state
 * is suspect. */

#include "base/assert.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void bt_assert_fail(const char *text, const char *file, int line, const char *func)
{
    char msg[512];
    int n = snprintf(msg, sizeof(msg), "%s:%d: %s: assertion failed: %s\n", file, line, func, text);
    if (n > 0) {
        size_t len = strlen(msg);
        ssize_t w = write(STDERR_FILENO, msg, len);
        (void)w; /* nowhere left to report to */
    }
    abort();
}
