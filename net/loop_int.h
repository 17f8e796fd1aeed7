#ifndef BT_NET_LOOP_INT_H
#define BT_NET_LOOP_INT_H

/* Inside net/ only: the loop's insides, and buffers that all its connections share (a read and its
 * handling never overlap another's on one thread). */

#include <uv.h>

#include "base/buf.h"
#include "net/loop.h"

#define BT_NET_READ_BYTES ((size_t)64 << 10)
#define BT_NET_PULL_BYTES ((size_t)256 << 10)

struct bt_net_loop {
    uv_loop_t uv;
    uv_timer_t timer;
    uv_idle_t idle;
    uv_async_t wake;
    struct bt_timer *timers; /* root of the heap */
    uint64_t armed_ns;       /* what the uv timer waits for; UINT64_MAX: stopped */
    struct bt_task tasks;    /* ring; this one is the sentinel */
    char *read_buf;          /* BT_NET_READ_BYTES */
    struct bt_buf pull_buf;  /* output on its way to one write */
    struct bt_buf tls_buf;   /* the same, encrypted */
};

#endif
