/* The only place that asks the kernel what time it is. */

#include "base/clock.h"

#include <time.h>
#include "base/assert.h"

static uint64_t read_clock(clockid_t id)
{
    struct timespec ts;
    BT_ASSERT(clock_gettime(id, &ts) == 0);
    return (uint64_t)ts.tv_sec * BT_NS_PER_S + (uint64_t)ts.tv_nsec;
}

uint64_t bt_clock_ns(void)
{
    return read_clock(CLOCK_BOOTTIME);
}

uint64_t bt_clock_unix_ns(void)
{
    return read_clock(CLOCK_REALTIME);
}
