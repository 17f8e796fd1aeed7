/* UTF-8 and JSON strings: every boundary of the well-formed table, and every way to be wrong. */

#include "base/buf.h"
#include "base/utf8.h"
#include "tests/check.h"

static void test_all_scalars(void)
{
    unsigned bad = 0;
    for (uint32_t cp = 0; cp <= 0x10FFFF; cp++) {
        char s[4];
        uint32_t back = 0;
        if (cp == 0xD800) {
            cp = 0xE000;
        }
        unsigned n = bt_utf8_encode(cp, s);
        bad += bt_utf8_decode(s, n, &back) != n || back != cp || !bt_utf8_valid(s, n, NULL);
        for (unsigned cut = 1; cut < n; cut++) {
            bad += bt_utf8_decode(s, cut, &back) != 0 || bt_utf8_valid(s, cut, NULL);
            bad += bt_utf8_complete_len(s, cut) != 0;
        }
        bad += bt_utf8_complete_len(s, n) != n;
    }
    CHECK_EQ(bad, 0);
}

static void test_invalid(void)
{
    static const char *const wrong[] = {
        "\x80", /* continuation alone */
        "\xBF",
        "\xC0\x80", /* overlong NUL */
        "\xC1\xBF",
        "\xE0\x80\x80", /* overlong, three bytes */
        "\xE0\x9F\xBF",
        "\xED\xA0\x80", /* surrogates */
        "\xED\xBF\xBF",
        "\xF0\x80\x80\x80", /* overlong, four bytes */
        "\xF0\x8F\xBF\xBF",
        "\xF4\x90\x80\x80", /* U+110000 */
        "\xF5\x80\x80\x80",
        "\xFE",
        "\xFF",
        "\xC3\x28", /* no continuation */
        "\xE2\x82\x28",
        "\xF0\x9F\x98\x28",
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        uint32_t cp;
        size_t bad = 99;
        size_t n = strlen(wrong[i]);
        CHECK_EQ(bt_utf8_decode(wrong[i], n, &cp), 0);
        CHECK(!bt_utf8_valid(wrong[i], n, &bad));
        CHECK_EQ(bad, 0);
        CHECK_EQ(bt_utf8_complete_len(wrong[i], n), n); /* nothing can repair it */
    }
    size_t bad = 0;
    CHECK(!bt_utf8_valid("ab\xC3\xA9\xE2\x82", 6, &bad));
    CHECK_EQ(bad, 4);
    CHECK(bt_utf8_valid("", 0, &bad));
    CHECK(bt_utf8_valid("a\0b", 3, NULL));
}

static void test_complete(void)
{
    CHECK_EQ(bt_utf8_complete_len("", 0), 0);
    CHECK_EQ(bt_utf8_complete_len("abc", 3), 3);
    CHECK_EQ(bt_utf8_complete_len("ab\xC3", 3), 2);
    CHECK_EQ(bt_utf8_complete_len("ab\xE2\x82", 4), 2);
    CHECK_EQ(bt_utf8_complete_len("ab\xF0\x9F\x98", 5), 2);
    CHECK_EQ(bt_utf8_complete_len("ab\xF0\x9F", 4), 2);
    CHECK_EQ(bt_utf8_complete_len("ab\xF0\x9F\x98\x80", 6), 6);
    CHECK_EQ(bt_utf8_complete_len("ab\xF0\x8F", 4), 4); /* overlong already */
    CHECK_EQ(bt_utf8_complete_len("ab\xED\xA0", 4), 4); /* surrogate already */
    CHECK_EQ(bt_utf8_complete_len("ab\xF4\x90", 4), 4); /* too large already */
    CHECK_EQ(bt_utf8_complete_len("\x80\x80\x80\x80", 4), 4);
    CHECK_EQ(bt_utf8_complete_len("\xC3\xA9\x80", 3), 3);
    CHECK_EQ(bt_utf8_complete_len("\xC0", 1), 1);
    CHECK_EQ(bt_utf8_complete_len("\xFF\xE2", 2), 1);
}

static void test_json(void)
{
    struct bt_buf b = {0};
    static const char text[] = "a\"b\\c\n\r\t\b\f\x01\x7F/\xC3\xA9\xF0\x9F\x98\x80\0z";
    CHECK(bt_buf_add_json_str(&b, text, sizeof(text) - 1));
    CHECK_STR(b.data,
              "\"a\\\"b\\\\c\\n\\r\\t\\b\\f\\u0001\\u007f/\xC3\xA9\xF0\x9F\x98\x80\\u0000z\"");
    bt_buf_clear(&b);
    CHECK(bt_buf_add_json_str(&b, "x\xFFy\xE2\x82", 5));
    CHECK_STR(b.data, "\"x\xEF\xBF\xBDy\xEF\xBF\xBD\xEF\xBF\xBD\"");
    bt_buf_clear(&b);
    CHECK(bt_buf_add_json_str(&b, "", 0));
    CHECK_STR(b.data, "\"\"");
    bt_buf_fini(&b);
}

int main(void)
{
    test_all_scalars();
    test_invalid();
    test_complete();
    test_json();
    return bt_test_done();
}
