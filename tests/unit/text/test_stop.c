/* Stop strings: what is released, what is held, where the text is cut; whatever the pieces. */

#include "text/stop.h"

#include <stdlib.h>
#include "base/mem.h"
#include "tests/check.h"

#define STRINGS_MAX 4

static struct bt_stop_set *make(const char *const *strings, size_t n)
{
    size_t lens[BT_STOP_STRINGS_MAX];
    struct bt_stop_set *s = NULL;

    for (size_t i = 0; i < n; i++) {
        lens[i] = strlen(strings[i]);
    }
    CHECK_EQ(bt_stop_set_create(strings, lens, n, &s, NULL), BT_OK);
    return s;
}

/* Feeds text in pieces of `step` bytes; the whole output, and which string hit. */
static int run(const struct bt_stop_set *s, const char *text, size_t step, struct bt_buf *out)
{
    struct bt_stop m;
    size_t n = strlen(text);

    bt_buf_clear(out);
    bt_stop_init(&m, s);
    for (size_t i = 0; i < n; i += step) {
        CHECK_EQ(bt_stop_feed(&m, text + i, n - i < step ? n - i : step, out), BT_OK);
        CHECK(out->len == 0 || memcmp(out->data, text, out->len) == 0);
    }
    CHECK_EQ(bt_stop_finish(&m, out), BT_OK);
    return m.hit;
}

static void check(const char *const *strings, size_t n, const char *text, const char *want, int hit)
{
    struct bt_stop_set *s = make(strings, n);
    struct bt_buf out = {0};

    for (size_t step = 1; step < 9; step++) {
        CHECK_EQ(run(s, text, step, &out), hit);
        CHECK_STR(out.data == NULL ? "" : out.data, want);
    }
    bt_buf_fini(&out);
    bt_stop_set_destroy(s);
}

static void cases(void)
{
    check((const char *[]){"x"}, 0, "all of it", "all of it", -1);
    check((const char *[]){"stop"}, 1, "a sto stp stop b", "a sto stp ", 0);
    check((const char *[]){"stop"}, 1, "a stostop", "a sto", 0);
    check((const char *[]){"stop"}, 1, "never: sto", "never: sto", -1);
    check((const char *[]){"\n\n"}, 1, "one\ntwo\n\nthree", "one\ntwo", 0);
    check((const char *[]){"aab"}, 1, "aaaaaab", "aaaa", 0);
    check((const char *[]){"abcabd"}, 1, "abcabcabd!", "abc", 0);
    check((const char *[]){"b", "abc"}, 2, "xabc", "xa", 0); /* the one that ends first */
    check((const char *[]){"bc", "abc"}, 2, "xabc", "x",
          1); /* of those that end together the longest */
    check((const char *[]){"abcdX", "cd"}, 2, "zabcdX", "zab", 1); /* inside the start of another */
    check((const char *[]){"a"}, 1, "a", "", 0);
    check((const char *[]){"\xc3\xa9"}, 1, "caf\xc3\xa9!", "caf", 0);
}

static void held(void)
{
    struct bt_stop_set *s = make((const char *[]){"</s>", "<|end|>"}, 2);
    struct bt_stop m;
    struct bt_buf out = {0};

    bt_stop_init(&m, s);
    CHECK_EQ(bt_stop_feed(&m, "hi <", 4, &out), BT_OK);
    CHECK_STR(out.data, "hi "); /* only what may be a stop waits */
    CHECK_EQ(bt_stop_feed(&m, "|en", 3, &out), BT_OK);
    CHECK_STR(out.data, "hi ");
    CHECK_EQ(bt_stop_feed(&m, "!", 1, &out), BT_OK);
    CHECK_STR(out.data, "hi <|en!");
    CHECK_EQ(bt_stop_feed(&m, "</s> more", 9, &out), BT_OK);
    CHECK_EQ(m.hit, 0);
    CHECK_STR(out.data, "hi <|en!");
    CHECK_EQ(bt_stop_feed(&m, "still more", 10, &out), BT_OK);
    CHECK_EQ(bt_stop_finish(&m, &out), BT_OK);
    CHECK_STR(out.data, "hi <|en!");
    bt_buf_fini(&out);
    bt_stop_set_destroy(s);
}

/* Against the obvious search, on random texts of few letters. */
static int naive(const char *const *strings, size_t n, const char *text, size_t *cut)
{
    size_t len = strlen(text);

    for (size_t end = 1; end <= len; end++) {
        int best = -1;
        for (size_t i = 0; i < n; i++) {
            size_t k = strlen(strings[i]);
            if (k <= end && memcmp(text + end - k, strings[i], k) == 0 &&
                (best < 0 || k > strlen(strings[best]))) {
                best = (int)i;
            }
        }
        if (best >= 0) {
            *cut = end - strlen(strings[best]);
            return best;
        }
    }
    *cut = len;
    return -1;
}

static void random_texts(void)
{
    struct bt_buf out = {0};

    srand(5);
    for (int round = 0; round < 2000; round++) {
        char strings[STRINGS_MAX][8], text[48];
        const char *p[STRINGS_MAX];
        size_t n = (size_t)(1 + rand() % STRINGS_MAX), cut;
        for (size_t i = 0; i < n; i++) {
            size_t k = (size_t)(1 + rand() % 6);
            for (size_t c = 0; c < k; c++) {
                strings[i][c] = (char)('a' + rand() % 2);
            }
            strings[i][k] = '\0';
            p[i] = strings[i];
        }
        size_t len = (size_t)(rand() % 47);
        for (size_t c = 0; c < len; c++) {
            text[c] = (char)('a' + rand() % 3 % 2);
        }
        text[len] = '\0';
        struct bt_stop_set *s = make(p, n);
        int want = naive(p, n, text, &cut), got = run(s, text, (size_t)(1 + rand() % 5), &out);
        CHECK((want < 0) == (got < 0));
        CHECK(want < 0 || strcmp(p[want], p[got]) == 0);
        CHECK(out.len == cut && memcmp(out.data == NULL ? "" : out.data, text, cut) == 0);
        bt_stop_set_destroy(s);
    }
    bt_buf_fini(&out);
}

static void refused(void)
{
    const char *many[BT_STOP_STRINGS_MAX + 1];
    size_t lens[BT_STOP_STRINGS_MAX + 1];
    struct bt_stop_set *s = NULL;
    struct bt_err err;

    for (size_t i = 0; i <= BT_STOP_STRINGS_MAX; i++) {
        many[i] = "x";
        lens[i] = 1;
    }
    CHECK_EQ(bt_stop_set_create(many, lens, BT_STOP_STRINGS_MAX + 1, &s, &err), BT_ERR_INVALID);
    lens[1] = 0;
    CHECK_EQ(bt_stop_set_create(many, lens, 2, &s, &err), BT_ERR_INVALID);
    CHECK(strstr(err.msg, "stop[1]") != NULL);
    lens[1] = BT_STOP_BYTES_MAX + 1;
    CHECK_EQ(bt_stop_set_create(many, lens, 2, &s, &err), BT_ERR_INVALID);
    bt_stop_set_destroy(NULL);
}

static void memory(void)
{
    size_t live = bt_test_live_bytes();
    bool fired = true;

    for (uint64_t nth = 0; fired; nth++) {
        struct bt_stop_set *s = NULL;
        bt_test_fail_alloc(nth);
        enum bt_status st =
            bt_stop_set_create((const char *[]){"one", "two"}, (size_t[]){3, 3}, 2, &s, NULL);
        fired = bt_test_fail_alloc_off();
        CHECK_EQ(st, fired ? BT_ERR_NOMEM : BT_OK);
        bt_stop_set_destroy(s);
        CHECK_EQ(bt_test_live_bytes(), live);
    }
}

int main(void)
{
    cases();
    held();
    random_texts();
    refused();
    memory();
    return bt_test_done();
}
