#ifndef BT_BASE_ASSERT_H
#define BT_BASE_ASSERT_H

/* BT_ASSERT states what only a bug can break. On in every build; aborts with file, line, text.
 * Never used on anything that came from network, file or config. */
#define BT_ASSERT(x) ((x) ? (void)0 : bt_assert_fail(#x, __FILE__, __LINE__, __func__))

__attribute__((noreturn, cold)) void bt_assert_fail(const char *text, const char *file, int line,
                                                    const char *func);

#endif
