/* Log lines: formatted on the caller's stack, sent with one write(), so lines of several threads do
 * not mix and a slow reader holds up only who writes. Owns the level, the format and each thread's
 * name; no files, no rotation. */

#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/escape_int.h"

#define LIMIT_NS   (60 * BT_NS_PER_S)
#define LINE_BYTES 4096
#define LINE_END   8 /* kept free for what closes a line */
#define TEXT_BYTES 2048
#define NAME_BYTES 256 /* of level, thread, module, request id */

static atomic_int log_level = BT_LOG_INFO;
static atomic_int log_format = BT_LOG_TEXT;
static _Thread_local const char *thread_name = "main";

static const char *const level_names[] = {"error", "warn", "info", "debug", "trace"};

struct line {
    char data[LINE_BYTES];
    size_t len;
};

void bt_log_setup(enum bt_log_level level, enum bt_log_format format)
{
    atomic_store_explicit(&log_level, (int)level, memory_order_relaxed);
    atomic_store_explicit(&log_format, (int)format, memory_order_relaxed);
}

bool bt_log_on(enum bt_log_level level)
{
    return (int)level <= atomic_load_explicit(&log_level, memory_order_relaxed);
}

void bt_log_thread(const char *name)
{
    thread_name = name;
    if (gettid() != getpid()) {
        (void)prctl(PR_SET_NAME, name); /* cannot fail */
    }
}

/* The line's own words: they fit, because add_clean bounds everything else. */
static void add(struct line *l, const char *s, size_t n)
{
    if (n <= sizeof(l->data) - l->len) {
        memcpy(l->data + l->len, s, n);
        l->len += n;
    }
}

static void adds(struct line *l, const char *s)
{
    add(l, s, strlen(s));
}

/* Text from outside may hold line breaks and terminal codes: control characters and bad UTF-8 never
 * reach the reader. In text format quotes and backslashes stay as they are. At most max bytes, the
 * rest is cut. */
static void add_clean(struct line *l, const char *s, size_t max, bool json)
{
    size_t room = sizeof(l->data) - LINE_END - l->len;
    size_t end = l->len + (max < room ? max : room);
    size_t n = strlen(s);
    size_t i = 0;
    while (i < n) {
        char esc[BT_JSON_ESCAPE_MAX];
        size_t len;
        bool plain = !json && (s[i] == '"' || s[i] == '\\');
        size_t used = bt_json_escape(s + i, n - i, esc, &len);
        if (plain) {
            esc[0] = s[i];
            len = 1;
        }
        if (len > end - l->len) {
            return;
        }
        add(l, esc, len);
        i += used;
    }
}

static void add_time(struct line *l)
{
    uint64_t ns = bt_clock_unix_ns();
    time_t s = (time_t)(ns / BT_NS_PER_S);
    struct tm tm;
    char t[64];
    if (gmtime_r(&s, &tm) == NULL) {
        return;
    }
    size_t n = strftime(t, sizeof(t), "%Y-%m-%dT%H:%M:%S", &tm);
    int m = snprintf(t + n, sizeof(t) - n, ".%06uZ", (unsigned)(ns % BT_NS_PER_S / 1000));
    add(l, t, n + (m > 0 ? (size_t)m : 0));
}

static void add_member(struct line *l, const char *name, const char *value, size_t max)
{
    adds(l, ",\"");
    adds(l, name);
    adds(l, "\":\"");
    add_clean(l, value, max, true);
    adds(l, "\"");
}

static void send_line(const struct line *l)
{
    size_t at = 0;
    while (at < l->len) {
        ssize_t w = write(STDERR_FILENO, l->data + at, l->len - at);
        if (w < 0 && errno == EINTR) {
            continue;
        }
        if (w <= 0) {
            return; /* stderr is gone: there is no other place to say so */
        }
        at += (size_t)w;
    }
}

void bt_log_write(enum bt_log_level level, const char *module, const char *req, const char *fmt,
                  ...)
{
    int saved_errno = errno;
    char text[TEXT_BYTES];
    struct line l;
    va_list ap;

    if (!bt_log_on(level)) {
        return;
    }
    va_start(ap, fmt);
    int n = vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    if (n < 0) {
        text[0] = '\0';
    } else if ((size_t)n >= sizeof(text)) {
        memcpy(text + sizeof(text) - 4, "...", 4);
    }
    l.len = 0;
    if (atomic_load_explicit(&log_format, memory_order_relaxed) == BT_LOG_JSON) {
        adds(&l, "{\"time\":\"");
        add_time(&l);
        adds(&l, "\"");
        add_member(&l, "level", level_names[level], NAME_BYTES);
        add_member(&l, "thread", thread_name, NAME_BYTES);
        add_member(&l, "module", module, NAME_BYTES);
        if (req != NULL) {
            add_member(&l, "req", req, NAME_BYTES);
        }
        add_member(&l, "text", text, LINE_BYTES);
        adds(&l, "}\n");
    } else {
        add_time(&l);
        const char *words[] = {level_names[level], thread_name, module};
        for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
            adds(&l, " ");
            add_clean(&l, words[i], NAME_BYTES, false);
        }
        if (req != NULL) {
            adds(&l, " req=");
            add_clean(&l, req, NAME_BYTES, false);
        }
        adds(&l, " ");
        add_clean(&l, text, LINE_BYTES, false);
        adds(&l, "\n");
    }
    send_line(&l);
    errno = saved_errno;
}

bool bt_log_may(struct bt_log_limit *l, uint64_t now_ns, uint32_t *n_held)
{
    if (now_ns < l->next_ns) {
        l->n_held += l->n_held < UINT32_MAX;
        return false;
    }
    *n_held = l->n_held;
    *l = (struct bt_log_limit){.next_ns = now_ns + LIMIT_NS};
    return true;
}
