#ifndef BT_TESTS_CHECK_H
#define BT_TESTS_CHECK_H

/* Checks for test programs: a failed one prints where and what, and the program's exit code becomes 1.
 * End main() with `return bt_test_done();`. */

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static int bt_test_failures;
static int bt_test_checks;

#define CHECK(x)                                                                                   \
    do {                                                                                           \
        bt_test_checks++;                                                                          \
        if (!(x)) {                                                                                \
            bt_test_failures++;                                                                    \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #x);                        \
        }                                                                                          \
    } while (0)

#define CHECK_EQ(a, b)                                                                             \
    do {                                                                                           \
        long long a_ = (long long)(a), b_ = (long long)(b);                                        \
        bt_test_checks++;                                                                          \
        if (a_ != b_) {                                                                            \
            bt_test_failures++;                                                                    \
            fprintf(stderr, "%s:%d: failed: %s == %s (%lld != %lld)\n", __FILE__, __LINE__, #a,    \
                    #b, a_, b_);                                                                   \
        }                                                                                          \
    } while (0)

#define CHECK_STR(a, b)                                                                            \
    do {                                                                                           \
        const char *a_ = (a), *b_ = (b);                                                           \
        bt_test_checks++;                                                                          \
        if (a_ == NULL || b_ == NULL || strcmp(a_, b_) != 0) {                                     \
            bt_test_failures++;                                                                    \
            fprintf(stderr, "%s:%d: failed: %s == %s\n  got:  \"%s\"\n  want: \"%s\"\n", __FILE__, \
                    __LINE__, #a, #b, a_ ? a_ : "(null)", b_ ? b_ : "(null)");                     \
        }                                                                                          \
    } while (0)

#define CHECK_NEAR(a, b, tol)                                                                      \
    do {                                                                                           \
        double a_ = (double)(a), b_ = (double)(b), t_ = (double)(tol);                             \
        bt_test_checks++;                                                                          \
        if (!(fabs(a_ - b_) <= t_)) {                                                              \
            bt_test_failures++;                                                                    \
            fprintf(stderr, "%s:%d: failed: |%s - %s| <= %g (%.9g, %.9g)\n", __FILE__, __LINE__,   \
                    #a, #b, t_, a_, b_);                                                           \
        }                                                                                          \
    } while (0)

#define BT_TEST_SKIP 77

static inline int bt_test_done(void)
{
    printf("%d checks, %d failed\n", bt_test_checks, bt_test_failures);
    return bt_test_failures == 0 ? 0 : 1;
}

#endif
