/* Log lines as they arrive on a real stderr: format, escapes, cuts, and whole lines from several
 * threads. */

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
#include "base/buf.h"
#include "base/clock.h"
#include "base/log.h"
#include "tests/check.h"

static int real_stderr;
static int capture_fd;

static void capture_start(void)
{
    char name[] = "/tmp/baton-log-XXXXXX";
    capture_fd = mkstemp(name);
    CHECK(capture_fd >= 0);
    (void)unlink(name);
    (void)fflush(stderr);
    real_stderr = dup(STDERR_FILENO);
    (void)dup2(capture_fd, STDERR_FILENO);
}

static void capture_end(struct bt_buf *out)
{
    char block[4096];
    ssize_t n;
    (void)dup2(real_stderr, STDERR_FILENO);
    (void)close(real_stderr);
    bt_buf_clear(out);
    CHECK(bt_buf_reserve(out, 1));
    (void)lseek(capture_fd, 0, SEEK_SET);
    while ((n = read(capture_fd, block, sizeof(block))) > 0) {
        bt_buf_add(out, block, (size_t)n);
    }
    (void)close(capture_fd);
}

static int calls;

static int count_call(void)
{
    return ++calls;
}

static void test_text(struct bt_buf *out)
{
    bt_log_setup(BT_LOG_WARN, BT_LOG_TEXT);
    CHECK(bt_log_on(BT_LOG_ERROR) && bt_log_on(BT_LOG_WARN) && !bt_log_on(BT_LOG_INFO));
    capture_start();
    errno = ENOENT;
    bt_log_error("mod", "line one\nline \"two\" %d \x1b[31m\xFF", 2);
    CHECK_EQ(errno, ENOENT);
    bt_log_info("mod", "%d", count_call());
    BT_LOG(BT_LOG_WARN, "net", "r-7", "x");
    capture_end(out);
    CHECK_EQ(calls, 0); /* arguments of a line that is off are not evaluated */
    CHECK(out->len > 28 && out->data[10] == 'T' && out->data[26] == 'Z');
    const char *end = strchr(out->data, '\n');
    CHECK(end != NULL);
    if (end != NULL) {
        size_t n = (size_t)(end - out->data);
        static const char want[] =
            " error main mod line one\\nline \"two\" 2 \\u001b[31m\xEF\xBF\xBD";
        CHECK(n == 27 + sizeof(want) - 1 && memcmp(out->data + 27, want, sizeof(want) - 1) == 0);
        CHECK(strlen(end + 1) > 27);
        CHECK_STR(end + 1 + 27, " warn main net req=r-7 x\n");
    }
}

static void test_json_and_cut(struct bt_buf *out)
{
    char big[6000];
    memset(big, '\x01', sizeof(big) - 1); /* each byte takes six in JSON */
    big[sizeof(big) - 1] = '\0';
    bt_log_setup(BT_LOG_TRACE, BT_LOG_JSON);
    capture_start();
    BT_LOG(BT_LOG_DEBUG, "m", "a\"b", "t\\");
    BT_LOG(BT_LOG_ERROR, big, big, "%s", big);
    bt_log_trace("m", "%s", big);
    capture_end(out);
    CHECK(strstr(out->data, "\"level\":\"debug\",\"thread\":\"main\",\"module\":\"m\",\"req\":"
                            "\"a\\\"b\",\"text\":\"t\\\\\"}\n") != NULL);
    unsigned lines = 0;
    for (const char *p = out->data; *p != '\0'; lines++) {
        const char *end = strchr(p, '\n');
        CHECK(end != NULL);
        if (end == NULL) {
            break;
        }
        CHECK(end - p <= 4096 && p[0] == '{' && end[-1] == '}' && end[-2] == '"');
        p = end + 1;
    }
    CHECK_EQ(lines, 3);
}

static void *log_many(void *arg)
{
    bt_log_thread(arg);
    for (int i = 0; i < 500; i++) {
        bt_log_info("mod",
                    "0123456789012345678901234567890123456789012345678901234567890123456789");
    }
    return NULL;
}

static void test_threads(struct bt_buf *out)
{
    static char names[4][4] = {"t0", "t1", "t2", "t3"};
    pthread_t threads[4];
    bt_log_setup(BT_LOG_INFO, BT_LOG_TEXT);
    capture_start();
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, log_many, names[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    capture_end(out);
    size_t line = out->len / 2000;
    unsigned bad = out->len % 2000 != 0;
    for (size_t i = 0; i < 2000 && bad == 0; i++) {
        bad += out->data[(i + 1) * line - 1] != '\n' ||
               memchr(out->data + i * line, '\n', line - 1) != NULL;
    }
    CHECK_EQ(bad, 0);
}

static void test_limit(void)
{
    struct bt_log_limit l = {0};
    uint64_t now = 5 * BT_NS_PER_S;
    uint32_t held = 9;

    CHECK(bt_log_may(&l, now, &held));
    CHECK_EQ(held, 0);
    for (int i = 0; i < 3; i++) {
        CHECK(!bt_log_may(&l, now + 59 * BT_NS_PER_S, &held));
    }
    CHECK(bt_log_may(&l, now + 60 * BT_NS_PER_S, &held));
    CHECK_EQ(held, 3);
    CHECK(!bt_log_may(&l, now + 60 * BT_NS_PER_S, &held));
}

int main(void)
{
    struct bt_buf out = {0};
    test_text(&out);
    test_json_and_cut(&out);
    test_threads(&out);
    test_limit();
    bt_buf_fini(&out);
    return bt_test_done();
}
