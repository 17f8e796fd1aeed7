/* The bounded ring between threads: a mutex held for one copy, a condition for a consumer that
 * waits. Knows nothing of event loops: whoever pushes to a loop wakes it by its own means. */

#include "base/ring.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include "base/assert.h"
#include "base/clock.h"
#include "base/mem.h"

struct bt_ring {
    pthread_mutex_t lock;
    pthread_cond_t filled;
    size_t msg_bytes;
    size_t mask;
    size_t head; /* next to pop; both only grow and wrap by the mask */
    size_t tail;
    unsigned n_waiting;
    unsigned char *data;
};

enum bt_status bt_ring_create(size_t msg_bytes, size_t n_msgs, struct bt_ring **out)
{
    size_t n = 1;
    size_t bytes;

    while (n < n_msgs) {
        if (!bt_mul_size(n, 2, &n)) {
            return BT_ERR_NOMEM;
        }
    }
    if (!bt_mul_size(n, msg_bytes, &bytes)) {
        return BT_ERR_NOMEM;
    }
    struct bt_ring *r = bt_calloc(1, sizeof(*r));
    if (r == NULL) {
        return BT_ERR_NOMEM;
    }
    r->data = bt_calloc(1, bytes);
    if (r->data == NULL) {
        bt_free(r);
        return BT_ERR_NOMEM;
    }
    r->msg_bytes = msg_bytes;
    r->mask = n - 1;

    pthread_condattr_t attr;
    BT_ASSERT(pthread_condattr_init(&attr) == 0);
    BT_ASSERT(pthread_condattr_setclock(&attr, CLOCK_MONOTONIC) == 0);
    BT_ASSERT(pthread_cond_init(&r->filled, &attr) == 0);
    (void)pthread_condattr_destroy(&attr);
    BT_ASSERT(pthread_mutex_init(&r->lock, NULL) == 0);
    *out = r;
    return BT_OK;
}

void bt_ring_destroy(struct bt_ring *r)
{
    if (r == NULL) {
        return;
    }
    BT_ASSERT(pthread_cond_destroy(&r->filled) == 0);
    BT_ASSERT(pthread_mutex_destroy(&r->lock) == 0);
    bt_free(r->data);
    bt_free(r);
}

bool bt_ring_push(struct bt_ring *r, const void *msg)
{
    (void)pthread_mutex_lock(&r->lock);
    bool room = r->tail - r->head <= r->mask;
    if (room) {
        memcpy(r->data + (r->tail & r->mask) * r->msg_bytes, msg, r->msg_bytes);
        r->tail++;
        if (r->n_waiting > 0) {
            (void)pthread_cond_signal(&r->filled);
        }
    }
    (void)pthread_mutex_unlock(&r->lock);
    return room;
}

static bool pop_locked(struct bt_ring *r, void *msg)
{
    if (r->tail == r->head) {
        return false;
    }
    memcpy(msg, r->data + (r->head & r->mask) * r->msg_bytes, r->msg_bytes);
    r->head++;
    return true;
}

bool bt_ring_pop(struct bt_ring *r, void *msg)
{
    (void)pthread_mutex_lock(&r->lock);
    bool got = pop_locked(r, msg);
    (void)pthread_mutex_unlock(&r->lock);
    return got;
}

/* Now plus timeout on the condition's clock. A timeout beyond a century is a century. */
static struct timespec deadline(uint64_t timeout_ns)
{
    const uint64_t century_s = UINT64_C(100) * 365 * 86400;
    uint64_t s = timeout_ns / BT_NS_PER_S;
    struct timespec ts;

    BT_ASSERT(clock_gettime(CLOCK_MONOTONIC, &ts) == 0);
    ts.tv_sec += (time_t)(s < century_s ? s : century_s);
    ts.tv_nsec += (long)(timeout_ns % BT_NS_PER_S);
    if (ts.tv_nsec >= (long)BT_NS_PER_S) {
        ts.tv_nsec -= (long)BT_NS_PER_S;
        ts.tv_sec++;
    }
    return ts;
}

bool bt_ring_pop_wait(struct bt_ring *r, void *msg, uint64_t timeout_ns)
{
    (void)pthread_mutex_lock(&r->lock);
    bool got = pop_locked(r, msg);
    if (!got && timeout_ns > 0) {
        struct timespec until = deadline(timeout_ns);
        int rc = 0;
        r->n_waiting++;
        while (!(got = pop_locked(r, msg)) && rc != ETIMEDOUT) {
            if (timeout_ns == UINT64_MAX) {
                rc = pthread_cond_wait(&r->filled, &r->lock);
            } else {
                rc = pthread_cond_timedwait(&r->filled, &r->lock, &until);
            }
        }
        r->n_waiting--;
    }
    (void)pthread_mutex_unlock(&r->lock);
    return got;
}

size_t bt_ring_count(struct bt_ring *r)
{
    (void)pthread_mutex_lock(&r->lock);
    size_t n = r->tail - r->head;
    (void)pthread_mutex_unlock(&r->lock);
    return n;
}
