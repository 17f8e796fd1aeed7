#ifndef BT_BASE_CLOCK_H
#define BT_BASE_CLOCK_H

#include <stdint.h>

#define BT_NS_PER_MS UINT64_C(1000000)
#define BT_NS_PER_S  UINT64_C(1000000000)

/* Monotonic nanoseconds that count suspend (CLOCK_BOOTTIME). Cores never call this: time is passed
 * to them. */
uint64_t bt_clock_ns(void);
/* Unix time in nanoseconds, for logs and `created` fields only. */
uint64_t bt_clock_unix_ns(void);

#endif
